//! Load while things fail: clients that retry, and what they saw.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::{Ask, millis, post};

/// A number from 0 to below `end`.
pub fn random(end: u64) -> u64 {
    RandomState::new().hash_one(0) % end
}

/// How often a test disturbs at random: so often, or a multiple of it in a longer run (`cargo xtask soak`).
pub fn rounds(usual: u32) -> u32 {
    let factor = std::env::var("ONLYONCE_SOAK").ok().and_then(|factor| factor.parse().ok()).unwrap_or(1);
    usual * factor
}

/// Clients that send every key twice at once, and retry it while the proxy comes and goes.
pub struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
pub struct Seen {
    /// The bodies of the answers that came to their end, by key.
    pub answers: BTreeMap<String, BTreeSet<Vec<u8>>>,
    /// Keys that nobody got an answer for; what became of them is for their leases to say.
    pub unanswered: BTreeSet<String>,
}

const CLIENTS: u64 = 4;

impl Load {
    /// Clients of these instances; each attempt goes to any of them.
    pub fn start(addrs: Vec<SocketAddr>) -> Self {
        let addrs = Arc::new(addrs);
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Seen::default())));
        let clients = (0..CLIENTS * 2).map(|client| {
            let (addrs, stop, seen) = (Arc::clone(&addrs), Arc::clone(&stop), Arc::clone(&seen));
            thread::spawn(move || {
                for number in 0.. {
                    // A pair of clients works through the same keys.
                    let key = format!("{}-{number}", client / 2);
                    let request = work(&key);
                    let mut answered = false;
                    for _ in 0..6 {
                        if stop.load(Ordering::SeqCst) {
                            break;
                        }
                        match request.try_send(addrs[random(addrs.len() as u64) as usize]) {
                            Ok(answer) if answer.status == 201 && answer.whole => {
                                seen.lock()
                                    .unwrap()
                                    .answers
                                    .entry(key.clone())
                                    .or_default()
                                    .insert(answer.body);
                                answered = true;
                                break;
                            }
                            // In progress, broken off, or nobody there.
                            _ => thread::sleep(millis(25)),
                        }
                    }
                    if !answered {
                        seen.lock().unwrap().unanswered.insert(key);
                    }
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                }
            })
        });
        Self { clients: clients.collect(), stop, seen }
    }

    pub fn end(self) -> Seen {
        self.stop.store(true, Ordering::SeqCst);
        self.clients.into_iter().for_each(|client| client.join().unwrap());
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

/// Work whose steps take a random time, so that every one of them is interrupted now and then; some
/// answers are streamed. A retry may order it in another way: orders are headers, which do not count.
fn work(key: &str) -> Ask {
    let framing = ["", "pieces=3 pause=8", "chunked pieces=3 pause=8"][random(3) as usize];
    post(key).order(&format!("before={} after={} {framing}", random(25), random(25)))
}

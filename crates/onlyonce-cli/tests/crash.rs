//! `kill -9` at random moments under load, with an upstream that notes its effects on disk.
//!
//! 1. No key's effect happens twice while its holder lived within its lease.
//! 2. Every answer that a caller saw to its end is replayed after the restart.
//! 3. No key stays stuck past its lease.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use support::{Ask, PATIENCE, Proxy, Setup, Upstream, millis, post, until};

/// A number from 0 to below `end`.
fn random(end: u64) -> u64 {
    RandomState::new().hash_one(0) % end
}

/// Clients that send every key twice at once, and retry it while the proxy comes and goes.
struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Default)]
struct Seen {
    /// The bodies of the answers that came to their end, by key.
    answers: BTreeMap<String, BTreeSet<Vec<u8>>>,
    /// Keys that nobody got an answer for; what became of them is for their leases to say.
    unanswered: BTreeSet<String>,
}

const CLIENTS: u64 = 4;

impl Load {
    fn start(proxy: &Proxy) -> Self {
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Seen::default())));
        let clients = (0..CLIENTS * 2).map(|client| {
            let (addr, stop, seen) = (proxy.addr, Arc::clone(&stop), Arc::clone(&seen));
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
                        match request.try_send(addr) {
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

    fn end(self) -> Seen {
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

/// Kills the proxy and starts it again, on the same store and port.
fn crash(proxy: &mut Proxy, setup: &Setup) {
    proxy.kill();
    let started = Instant::now();
    *proxy = loop {
        // The port was free a moment ago, and is so again in a moment if someone was quicker.
        match setup.try_start() {
            Ok(proxy) => break proxy,
            Err(error) => assert!(started.elapsed() < PATIENCE, "{error}"),
        }
    };
}

/// A proxy, clients, and so many crashes; gives the proxy as it is after the last one.
fn crashes(setup: Setup, rounds: u32) -> (Proxy, Seen) {
    let mut proxy = setup.start();
    let setup = setup.listen(proxy.addr);
    let load = Load::start(&proxy);
    for _ in 0..rounds {
        thread::sleep(millis(100 + random(300)));
        crash(&mut proxy, &setup);
    }
    (proxy, load.end())
}

#[test]
fn killed_at_random_no_effect_happens_twice_and_no_answer_changes() {
    let upstream = Upstream::start();
    let config = "[defaults]\non_lapse = \"hold\"\nstream_after = \"0s\"\n";
    let (proxy, seen) = crashes(Setup::new(upstream.url()).config(config), 14);
    for (key, effects) in upstream.effects_by_key() {
        assert_eq!(effects, 1, "{key}: no lease has ended");
    }
    assert!(seen.answers.len() > 30, "there was load: {}", seen.answers.len());
    for (key, bodies) in &seen.answers {
        assert_eq!(bodies.len(), 1, "{key}: all its callers saw the same answer");
        let replay = post(key).send(&proxy);
        assert!(replay.replayed() && bodies.contains(&replay.body), "{key}: {replay:?}");
    }
    let interrupted = seen.unanswered.iter().filter(|key| !seen.answers.contains_key(*key));
    let mut held = 0;
    for key in interrupted {
        let answer = post(key).send(&proxy);
        let refusal = answer.refusal();
        assert!(matches!(refusal, (409, "request-in-progress") | (201, _)), "{key}: {refusal:?}");
        held += usize::from(refusal.0 == 409);
    }
    assert!(held > 0, "a crash has interrupted something");
    for (key, effects) in upstream.effects_by_key() {
        assert_eq!(effects, 1, "{key}: afterwards neither");
    }
}

#[test]
fn killed_at_random_every_key_is_settled_after_its_lease() {
    const LEASE: Duration = Duration::from_secs(2);
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"1s\"\nlease = \"2s\"\nstream_after = \"0s\"\n";
    let (proxy, seen) = crashes(Setup::new(upstream.url()).config(config), 8);
    // Whatever a crash has interrupted was claimed before now.
    thread::sleep(LEASE);
    for key in seen.answers.keys().chain(&seen.unanswered) {
        let answer = post(key).send(&proxy);
        assert_eq!((answer.status, answer.whole), (201, true), "{key}: {answer:?}");
        if let Some(bodies) = seen.answers.get(key) {
            assert!(bodies.contains(&answer.body), "{key} had an answer");
        }
    }
    let mut attempts: BTreeMap<String, Vec<(u32, u64)>> = BTreeMap::new();
    for note in upstream.notes().into_iter().filter(|note| note[0] == "received") {
        attempts
            .entry(note[3].clone())
            .or_default()
            .push((note[4].parse().unwrap(), note[5].parse().unwrap()));
    }
    let mut reruns = 0;
    for (key, attempts) in attempts {
        for pair in attempts.windows(2) {
            assert!(pair[0].0 < pair[1].0, "{key}: each attempt is sent once: {attempts:?}");
            let apart = millis(pair[1].1 - pair[0].1);
            // A request is received a little after its claim.
            assert!(apart > LEASE / 2, "{key}: {apart:?} apart, within the lease");
            reruns += 1;
        }
    }
    assert!(reruns > 0, "a crash has interrupted something");
}

#[test]
fn a_key_whose_holder_was_killed_runs_again_after_its_lease() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"1s\"\nlease = \"4s\"\n";
    let setup = Setup::new(upstream.url()).config(config);
    let mut proxy = setup.start();
    let setup = setup.listen(proxy.addr);
    let caller = post("k").order("before=600").open(&proxy);
    until("the work runs", || upstream.received() == 1);
    let killed_at = Instant::now();
    crash(&mut proxy, &setup);
    drop(caller);
    let refused = post("k").send(&proxy);
    assert_eq!(refused.refusal(), (409, "request-in-progress"), "its holder may live");
    let mut answer = refused;
    until("the key is settled", || {
        answer = post("k").send(&proxy);
        answer.status == 201
    });
    assert!(killed_at.elapsed() > millis(2_000), "not within the lease: {:?}", killed_at.elapsed());
    assert_eq!((answer.replayed(), answer.sent("idempotency-attempt")), (false, vec!["2".to_owned()]));
}

#[test]
fn an_answer_that_was_seen_to_its_end_outlives_a_crash_right_after_it() {
    let upstream = Upstream::start();
    let setup = Setup::new(upstream.url());
    let mut proxy = setup.start();
    let setup = setup.listen(proxy.addr);
    for round in 0..10 {
        let key = format!("key-{round}");
        let first = post(&key).send(&proxy);
        // The moment its caller has seen the end.
        crash(&mut proxy, &setup);
        let replay = post(&key).send(&proxy);
        assert_eq!((replay.replayed(), &replay.body), (true, &first.body), "{key}");
    }
    assert_eq!(upstream.effects(), 10);
}

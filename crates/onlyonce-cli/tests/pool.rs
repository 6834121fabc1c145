//! A guarded request is sent once, whatever the upstream does with the connections that are kept open.
//!
//! The upstream here is a listener in the test, so that it can close a connection at the worst moment.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use support::{PATIENCE, Proxy, Setup, Upstream, get, millis, post, until};

/// Everything that was received, on whatever connection.
type Wire = Arc<Mutex<Vec<u8>>>;

/// What becomes of the second request on a connection; the first is answered.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Second {
    /// The connection was closed right after the first answer.
    IsTooLate,
    /// Its first byte makes the upstream close, unread.
    ClosesUnread,
    ClosesAfterHead,
    ClosesAfterBody,
    GetsHalfAnAnswer,
    /// The upstream stops sending after it, and closes when the proxy does.
    EndsTheSendingSide,
}

struct Fickle {
    addr: SocketAddr,
    wire: Wire,
}

impl Fickle {
    fn start(second: Second) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (addr, wire) = (listener.local_addr().unwrap(), Wire::default());
        let kept = Arc::clone(&wire);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let wire = Arc::clone(&kept);
                thread::spawn(move || serve(stream, second, &wire));
            }
        });
        Self { addr, wire }
    }

    fn proxy(&self) -> Proxy {
        Setup::new(format!("http://{}", self.addr)).start()
    }

    /// How often a request with this key was on the wire.
    fn sent(&self, key: &str) -> usize {
        let wire = self.wire.lock().unwrap();
        let line = format!("idempotency-key: {key}\r\n");
        wire.windows(line.len()).filter(|window| *window == line.as_bytes()).count()
    }
}

const ANSWER: &[u8] = b"HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\ndone";

fn serve(mut stream: TcpStream, second: Second, wire: &Wire) {
    if !read_request(&mut stream, wire) {
        return;
    }
    let _ = stream.write_all(ANSWER);
    match second {
        Second::IsTooLate => {}
        Second::ClosesUnread => {
            // What is unread makes the close a reset.
            let mut data = [0; 1 << 16];
            let bytes = stream.peek(&mut data).unwrap_or(0);
            wire.lock().unwrap().extend(&data[..bytes]);
        }
        Second::ClosesAfterHead => {
            let mut data = [0; 1 << 16];
            let bytes = stream.read(&mut data).unwrap_or(0);
            wire.lock().unwrap().extend(&data[..bytes]);
        }
        Second::ClosesAfterBody => {
            read_request(&mut stream, wire);
        }
        Second::GetsHalfAnAnswer => {
            if read_request(&mut stream, wire) {
                let _ = stream.write_all(&ANSWER[..ANSWER.len() - 2]);
            }
        }
        Second::EndsTheSendingSide => {
            if read_request(&mut stream, wire) {
                let _ = stream.shutdown(Shutdown::Write);
                read_request(&mut stream, wire);
            }
        }
    }
}

/// `amount=100` ends each request of these tests that has a body, and an empty line the others.
fn read_request(stream: &mut TcpStream, wire: &Wire) -> bool {
    let mut request = Vec::new();
    let mut data = [0; 4096];
    loop {
        match stream.read(&mut data) {
            Ok(bytes) if bytes > 0 => {
                wire.lock().unwrap().extend(&data[..bytes]);
                request.extend(&data[..bytes]);
            }
            _ => return false,
        }
        let has_body = request.starts_with(b"POST");
        if request.ends_with(if has_body { b"amount=100" } else { b"\r\n\r\n" }) {
            return true;
        }
    }
}

/// Sends a guarded request on a connection that was used before.
fn sent_second(second: Second) {
    let fickle = Fickle::start(second);
    let proxy = fickle.proxy();
    let mut lost = 0;
    for round in 0..10 {
        assert_eq!(get("/first").send(&proxy).status, 201);
        let key = format!("key-{round}");
        let answer = post(&key).send(&proxy);
        assert_eq!(fickle.sent(&key), 1, "{second:?}");
        if answer.status == 201 {
            // The first connection was not yet back, so it went on one of its own.
            continue;
        }
        lost += 1;
        assert_eq!(answer.refusal(), (502, "upstream-lost"), "{second:?}");
        // Nobody knows what came of it, so nobody sends it again.
        assert_eq!(post(&key).send(&proxy).refusal(), (409, "request-in-progress"), "{second:?}");
        assert_eq!(fickle.sent(&key), 1, "{second:?}");
    }
    assert!(lost >= 3, "{second:?}: {lost} of 10 went on a connection that was used before");
}

#[test]
fn a_request_that_closes_its_connection_unread_is_not_sent_again() {
    sent_second(Second::ClosesUnread);
}

#[test]
fn a_request_whose_connection_is_closed_after_its_head_is_not_sent_again() {
    sent_second(Second::ClosesAfterHead);
}

#[test]
fn a_request_whose_connection_is_closed_after_its_body_is_not_sent_again() {
    sent_second(Second::ClosesAfterBody);
    sent_second(Second::EndsTheSendingSide);
}

#[test]
fn a_request_with_half_an_answer_is_not_sent_again() {
    sent_second(Second::GetsHalfAnAnswer);
}

#[test]
fn a_connection_that_is_closed_while_idle_costs_at_most_one_sending() {
    let fickle = Fickle::start(Second::IsTooLate);
    let proxy = fickle.proxy();
    let mut done = 0;
    for round in 0..60 {
        let key = format!("key-{round}");
        let answer = post(&key).send(&proxy);
        let sent = fickle.sent(&key);
        match answer.refusal() {
            (201, _) => assert_eq!(sent, 1, "{key}"),
            // The close crossed the request.
            (502, "upstream-lost") => assert!(sent <= 1, "{key}"),
            (502, "upstream-unreachable") => assert_eq!(sent, 0, "{key}"),
            other => panic!("{key}: {other:?}"),
        }
        done += usize::from(answer.status == 201);
        if answer.refusal().1 != "upstream-unreachable" {
            post(&key).send(&proxy);
            assert_eq!(fickle.sent(&key), sent, "{key}: the retry sends nothing");
        }
    }
    assert!(done >= 20, "closed connections are mostly noticed: {done} of 60");
}

#[test]
fn under_load_no_request_is_sent_twice() {
    let fickle = Fickle::start(Second::ClosesUnread);
    let proxy = fickle.proxy();
    let addr = proxy.addr;
    let clients: Vec<_> = (0..8)
        .map(|client| {
            thread::spawn(move || {
                (0..20).map(|round| post(&format!("key-{client}-{round}")).send_to(addr).status).collect()
            })
        })
        .collect();
    let statuses: Vec<u16> =
        clients.into_iter().flat_map(|client: thread::JoinHandle<Vec<u16>>| client.join().unwrap()).collect();
    assert!(statuses.iter().all(|status| [201, 502].contains(status)), "{statuses:?}");
    assert!(statuses.contains(&201) && statuses.contains(&502), "{statuses:?}");
    for client in 0..8 {
        for round in 0..20 {
            assert!(fickle.sent(&format!("key-{client}-{round}")) <= 1);
        }
    }
}

#[test]
fn a_connection_that_is_accepted_and_closed_is_tried_once() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let wire = Wire::default();
    let kept = Arc::clone(&wire);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.shutdown(Shutdown::Write);
            let kept = Arc::clone(&kept);
            thread::spawn(move || {
                let mut data = Vec::new();
                let _ = stream.set_read_timeout(Some(PATIENCE));
                let _ = stream.read_to_end(&mut data);
                kept.lock().unwrap().extend(data);
            });
        }
    });
    let fickle = Fickle { addr, wire };
    let config = "[defaults]\ntimeout = \"2s\"\nlease = \"60s\"\n";
    let proxy = Setup::new(format!("http://{addr}")).config(config).start();
    for round in 0..20 {
        let key = format!("key-{round}");
        let answer = post(&key).send(&proxy);
        // hyper can lose a request that it is handed at the moment at which it finds the connection closed
        // (hyperium/hyper#4122): nothing is sent then, and only the timeout answers.
        let sent_max = match answer.refusal() {
            (502, "upstream-lost") => 1,
            (502, "upstream-unreachable") | (504, "upstream-timeout") => 0,
            other => panic!("{key}: {other:?}"),
        };
        assert!(fickle.sent(&key) <= sent_max, "{key}: {answer:?}");
    }
}

#[test]
fn an_upstream_that_went_away_is_not_taken_for_one_that_was_sent_something() {
    let mut upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    assert_eq!(get("/warm").send(&proxy).status, 200);
    upstream.stop();
    // The connection that was kept goes first, one way or the other.
    until("the proxy has noticed", || get("/warm").send(&proxy).refusal() == (502, "upstream-unreachable"));
    for _ in 0..2 {
        assert_eq!(post("k").send(&proxy).refusal(), (502, "upstream-unreachable"));
    }
    upstream.start_again();
    assert_eq!((post("k").send(&proxy).status, upstream.received_for("k")), (201, 1));
}

#[test]
fn idle_connections_are_used_again_but_not_for_long() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for key in 0..5 {
        assert_eq!(post(&key.to_string()).send(&proxy).status, 201);
    }
    assert!(upstream.connected() < 5, "connections are used again");
    let before = upstream.connected();
    thread::sleep(onlyonce_cli::forward::POOL_IDLE_MAX + millis(500));
    assert_eq!(post("late").send(&proxy).status, 201);
    assert_eq!(upstream.connected(), before + 1, "the server may be about to close an old one");
}

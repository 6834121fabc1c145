//! How the proxy leaves.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::time::Instant;

use rustix::process::Signal;
use support::{Connection, PATIENCE, Proxy, Setup, Upstream, get, happens_within, millis, post, until};

fn stopping(proxy: &Proxy) {
    until("the proxy has heard", || proxy.stderr().contains("stopping"));
}

#[test]
fn guarded_work_is_finished_and_recorded() {
    for signal in [Signal::TERM, Signal::INT] {
        let upstream = Upstream::start();
        let setup = Setup::new(upstream.url());
        let mut proxy = setup.start();
        let waiting = post("waited-for").order("before=700").start(&proxy);
        let left = post("left-alone").order("before=700").open(&proxy);
        let mut streaming = post("streaming").order("size=46 chunked pieces=2 pause=2000").open(&proxy);
        until("all three run", || upstream.received() == 3);
        drop(left);
        proxy.signal(signal);
        let answer = waiting.join().unwrap();
        assert_eq!((answer.status, answer.whole), (201, true));
        let mut streamed = streaming.head().unwrap();
        streaming.rest(&mut streamed, false);
        assert_eq!((streamed.whole, streamed.body.len()), (true, 46));
        assert_eq!(proxy.ended().code(), Some(0));

        let proxy = setup.start();
        assert_eq!(post("waited-for").send(&proxy).body, answer.body);
        for key in ["waited-for", "left-alone", "streaming"] {
            assert!(post(key).send(&proxy).replayed(), "{key}");
        }
        assert_eq!(upstream.received(), 3);
    }
}

#[test]
fn new_connections_are_refused_while_the_last_work_is_done() {
    let upstream = Upstream::start();
    let mut proxy = Proxy::start(&upstream, "");
    let working = post("k").order("before=2500").start(&proxy);
    until("the work runs", || upstream.received() == 1);
    proxy.terminate();
    stopping(&proxy);
    until("nobody is let in", || Connection::open(proxy.addr).is_err());
    let ready = get("/readyz").send_to(proxy.admin);
    assert!(ready.status == 503 && ready.json()["reasons"][0] == "shutting down", "{ready:?}");
    assert_eq!(get("/healthz").send_to(proxy.admin).status, 200, "it is alive");
    assert_eq!(working.join().unwrap().status, 201);
    assert_eq!(proxy.ended().code(), Some(0));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn idle_connections_hold_nobody_up() {
    let upstream = Upstream::start();
    let mut proxy = Proxy::start(&upstream, "");
    let mut used = Connection::open(proxy.addr).unwrap();
    assert_eq!(used.ask(&post("k")).status, 201);
    let unused = Connection::open(proxy.addr).unwrap();
    until("both are open", || get("/x").send(&proxy).status == 200);
    let asked = Instant::now();
    proxy.terminate();
    assert_eq!(proxy.ended().code(), Some(0));
    // An unused one has until what is not guarded is cut off: its request may be on its way.
    assert!(asked.elapsed() < millis(14_000), "{:?}", asked.elapsed());
    assert_eq!(used.all(), b"");
    drop(unused);
}

#[test]
fn streams_and_tunnels_that_are_not_guarded_are_cut_after_ten_seconds() {
    let upstream = Upstream::start();
    let mut proxy = Proxy::start(&upstream, "");
    let mut stream = get("/events").order("events=1 endless pause=100").open(&proxy);
    assert!(stream.until(b"data: 1\n\n").is_some());
    let mut tunnel =
        get("/chat").line("Connection", "upgrade").line("Upgrade", "websocket").order("upgrade").open(&proxy);
    assert!(tunnel.until(b"hello").is_some());
    let asked = Instant::now();
    proxy.terminate();
    stopping(&proxy);
    assert!(!happens_within(millis(7_000), || proxy.has_ended()), "they may go on for a while");
    tunnel.write(b"ping").unwrap();
    assert!(tunnel.until(b"ping").is_some(), "and work until then");
    assert_eq!(proxy.ended().code(), Some(0));
    let took = asked.elapsed();
    assert!((millis(9_500)..millis(20_000)).contains(&took), "{took:?}");
    assert!(!stream.all().ends_with(b"0\r\n\r\n"), "a stream that was cut does not look whole");
    assert_eq!(tunnel.all(), b"");
}

#[test]
fn a_second_signal_leaves_at_once() {
    let upstream = Upstream::start();
    let setup = Setup::new(upstream.url());
    let mut proxy = setup.start();
    let _working = post("k").order("before=60000").open(&proxy);
    until("the work runs", || upstream.received() == 1);
    proxy.terminate();
    stopping(&proxy);
    let asked = Instant::now();
    proxy.signal(Signal::INT);
    assert_eq!(proxy.ended().code(), Some(1), "something was left undone");
    assert!(asked.elapsed() < millis(5_000));
    let proxy = setup.start();
    assert_eq!(post("k").send(&proxy).refusal(), (409, "request-in-progress"), "its lease goes on");
}

#[test]
fn guarded_work_is_left_running_after_shutdown_grace() {
    let upstream = Upstream::start();
    let setup = Setup::new(upstream.url()).config("shutdown_grace = \"400ms\"\n");
    let mut proxy = setup.start();
    let _working = post("k").order("before=60000").open(&proxy);
    until("the work runs", || upstream.received() == 1);
    let asked = Instant::now();
    proxy.terminate();
    assert_eq!(proxy.ended().code(), Some(1), "something was left undone");
    assert!((millis(400)..PATIENCE).contains(&asked.elapsed()));
    let proxy = setup.start();
    assert_eq!(post("k").send(&proxy).refusal(), (409, "request-in-progress"), "its lease goes on");
}

#[test]
fn without_work_it_leaves_at_once() {
    let upstream = Upstream::start();
    let mut proxy = Proxy::start(&upstream, "");
    let asked = Instant::now();
    proxy.terminate();
    assert_eq!(proxy.ended().code(), Some(0));
    assert!(asked.elapsed() < millis(5_000), "{:?}", asked.elapsed());
}

//! Several proxies on one store are one.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::BTreeSet;
use std::thread;

use support::{Proxy, Setup, Upstream, post, until};

const KEYS: usize = 40;

fn pair(upstream: &Upstream, config: &str) -> (Proxy, Proxy) {
    let one = Setup::new(upstream.url()).config(config);
    let two = Setup::new(upstream.url()).config(config).store_of(&one);
    (one.start(), two.start())
}

#[test]
fn copies_sent_to_both_at_once_have_one_effect_and_one_answer() {
    let upstream = Upstream::start();
    let (one, two) = pair(&upstream, "[defaults]\non_concurrent = \"wait\"\nwait = \"25s\"\n");
    let clients: Vec<_> = [one.addr, two.addr, one.addr, two.addr]
        .into_iter()
        .map(|addr| {
            thread::spawn(move || {
                let send = |key| post(&format!("key-{key}")).order("before=5").send_to(addr);
                (0..KEYS).map(send).collect::<Vec<_>>()
            })
        })
        .collect();
    let answers: Vec<_> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    for key in 0..KEYS {
        let of_key: Vec<_> = answers.iter().map(|answers| &answers[key]).collect();
        assert!(of_key.iter().all(|answer| answer.status == 201), "{of_key:?}");
        assert_eq!(of_key.iter().filter(|answer| !answer.replayed()).count(), 1, "one has run it");
        assert_eq!(of_key.iter().map(|answer| &answer.body).collect::<BTreeSet<_>>().len(), 1, "one answer");
    }
    let effects = upstream.effects_by_key();
    assert_eq!(effects.len(), KEYS);
    assert!(effects.values().all(|effects| *effects == 1), "{effects:?}");
    let executed = |proxy: &Proxy| proxy.metric("onlyonce_claims_total{answer=\"execute\"}");
    assert_eq!(executed(&one) + executed(&two), KEYS as f64);
}

#[test]
fn what_one_is_doing_the_other_refuses_and_then_replays() {
    let upstream = Upstream::start();
    let (one, two) = pair(&upstream, "");
    let first = post("k").order("before=600").start(&one);
    until("the first runs", || upstream.received() == 1);
    assert_eq!(post("k").send(&two).refusal(), (409, "request-in-progress"));
    assert_eq!(post("k").body("amount=101").send(&two).refusal(), (422, "idempotency-key-reused"));
    let first = first.join().unwrap();
    let replay = post("k").send(&two);
    assert_eq!((replay.replayed(), &replay.body), (true, &first.body));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn when_one_is_killed_the_other_takes_over_after_the_lease() {
    let upstream = Upstream::start();
    let (mut one, two) = pair(&upstream, "[defaults]\ntimeout = \"1s\"\nlease = \"4s\"\n");
    assert_eq!(post("done").send(&one).status, 201);
    let caller = post("k").order("before=20000").open(&one);
    until("the first runs", || upstream.received() == 2);
    one.kill();
    drop(caller);
    assert!(post("done").send(&two).replayed());
    assert_eq!(post("k").send(&two).refusal(), (409, "request-in-progress"));
    assert_eq!(upstream.received(), 2);
    let mut answer = None;
    until("the lease ends", || {
        let got = post("k").send(&two);
        let settled = got.status == 201;
        answer = Some(got);
        settled
    });
    assert_eq!(answer.unwrap().sent("idempotency-attempt"), ["2"]);
    assert_eq!(upstream.effects_for("k"), 1);
}

#[test]
fn a_holder_that_stalled_past_its_lease_does_not_overwrite_its_successor() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"1500ms\"\nlease = \"2s\"\nstream_after = \"0s\"\n";
    let (one, two) = pair(&upstream, config);
    let mut first = post("k").order("size=46 chunked pieces=2 pause=4000").open(&one);
    first.head().unwrap();
    assert!(first.until(b"w\r\n").is_some(), "its answer is on the way");
    // As long as it is stopped, it renews nothing.
    one.signal(rustix::process::Signal::STOP);
    let mut taken = None;
    until("the other takes over", || {
        let got = post("k").send(&two);
        let settled = got.status == 201;
        taken = Some(got);
        settled
    });
    one.signal(rustix::process::Signal::CONT);
    let taken = taken.unwrap();
    assert_eq!(taken.sent("idempotency-attempt"), ["2"]);
    assert!(first.until(b"0\r\n\r\n").is_some(), "its caller gets the real answer");
    until("the loss is counted", || one.metric("onlyonce_lost_leases_total") == 1.0);
    assert!(one.stderr().contains("its record stands"), "and logged: {}", one.stderr());
    for proxy in [&one, &two] {
        let replay = post("k").send(proxy);
        assert_eq!((replay.replayed(), &replay.body), (true, &taken.body));
    }
}

#[test]
fn many_can_start_at_once_on_a_store_that_is_not_there_yet() {
    let upstream = Upstream::start();
    let first = Setup::new(upstream.url());
    let others: Vec<_> = (0..3).map(|_| Setup::new(upstream.url()).store_of(&first)).collect();
    let starting: Vec<_> = others.into_iter().map(|setup| thread::spawn(move || setup.start())).collect();
    let mut proxies = vec![first.start()];
    proxies.extend(starting.into_iter().map(|starting| starting.join().unwrap()));
    let bodies: BTreeSet<_> = proxies.iter().map(|proxy| post("k").send(proxy).body).collect();
    assert_eq!((bodies.len(), upstream.effects()), (1, 1));
}

#[test]
fn two_namespaces_share_a_store_and_no_keys() {
    let upstream = Upstream::start();
    let one = Setup::new(upstream.url()).config("namespace = \"payments\"\n");
    let two = Setup::new(upstream.url()).config("namespace = \"orders\"\n").store_of(&one);
    let (one, two) = (one.start(), two.start());
    assert_ne!(post("k").send(&one).body, post("k").send(&two).body);
    assert!(post("k").send(&one).replayed() && post("k").send(&two).replayed());
    assert_eq!(upstream.effects(), 2);
}

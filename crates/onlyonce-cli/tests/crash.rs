//! `kill -9` at random moments under load, with an upstream that notes its effects on disk.
//!
//! 1. No key's effect happens twice while its holder lived within its lease.
//! 2. Every answer that a caller saw to its end is replayed after the restart.
//! 3. No key stays stuck past its lease.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use support::load::{Load, Seen, random, rounds};
use support::{PATIENCE, Proxy, Setup, Upstream, millis, post, until};

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
    let load = Load::start(vec![proxy.addr]);
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
    let (proxy, seen) = crashes(Setup::new(upstream.url()).config(config), rounds(14));
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
    let (proxy, seen) = crashes(Setup::new(upstream.url()).config(config), rounds(8));
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

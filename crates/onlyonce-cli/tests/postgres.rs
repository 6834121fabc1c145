//! Proxies on Postgres: several instances, one truth, whatever fails between them and the database.
//!
//! After each disturbance what was done upstream is held against what callers were told:
//!
//! 1. No key's effect happens twice (under `hold`, whatever happens).
//! 2. Every answer that a caller saw to its end is the one that is replayed.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::thread;
use std::time::{Duration, Instant};

use onlyonce_testkit::{PgBouncer, Postgres, Proxy as Wire};
use support::load::{Load, Seen, random, rounds};
use support::{PATIENCE, Proxy, Setup, Upstream, millis, onlyonce, post, run, text, until};

const HOLD: &str = "[defaults]\non_lapse = \"hold\"\nstream_after = \"0s\"\n";

fn on(server: &Postgres, upstream: &Upstream, config: &str) -> Setup {
    Setup::new(upstream.url()).config(config).store_url(&server.url(&server.database()))
}

/// Instances that share the store.
fn instances<const N: usize>(setup: &Setup, upstream: &Upstream, config: &str) -> [Proxy; N] {
    std::array::from_fn(|_| Setup::new(upstream.url()).config(config).store_of(setup).start())
}

/// Holds what was done against what was told.
fn check(upstream: &Upstream, seen: &Seen, proxy: &Proxy) {
    let effects = upstream.effects_by_key();
    assert!(effects.values().all(|effects| *effects == 1), "{effects:?}");
    assert!(seen.answers.len() > 20, "there was load: {}", seen.answers.len());
    for (key, bodies) in &seen.answers {
        assert_eq!(bodies.len(), 1, "{key}: all its callers saw the same answer");
        let mut replay = post(key).send(proxy);
        // The last writes may still be on their way.
        let _ = support::happens_within(PATIENCE, || {
            replay = post(key).send(proxy);
            replay.replayed()
        });
        assert!(replay.replayed() && bodies.contains(&replay.body), "{key}: {replay:?}");
    }
}

#[test]
fn ten_instances_start_at_once_on_an_empty_database() {
    let (server, upstream) = (Postgres::shared(), Upstream::start());
    let setup = on(server, &upstream, "");
    let starting: Vec<_> = (0..10)
        .map(|_| {
            let setup = Setup::new(upstream.url()).store_of(&setup);
            thread::spawn(move || setup.start())
        })
        .collect();
    let proxies: Vec<_> = starting.into_iter().map(|starting| starting.join().unwrap()).collect();
    let copies: Vec<_> = proxies.iter().map(|proxy| post("k").order("before=100").start(proxy)).collect();
    let answers: Vec<_> = copies.into_iter().map(|copy| copy.join().unwrap()).collect();
    assert_eq!(answers.iter().filter(|answer| answer.status == 201 && !answer.replayed()).count(), 1);
    assert_eq!(upstream.effects_for("k"), 1);
}

#[test]
fn a_copy_that_waits_on_another_instance_is_answered_soon_after_the_first() {
    let upstream = Upstream::start();
    let config = "[defaults]\non_concurrent = \"wait\"\nwait = \"25s\"\n";
    let setup = on(Postgres::shared(), &upstream, config);
    let [one, two] = instances(&setup, &upstream, config);
    let mut lags: Vec<_> = (0..7)
        .map(|round| {
            let key = format!("k{round}");
            // Not in step with the pauses between two looks.
            let first = post(&key).order(&format!("before={}", 700 + 37 * round)).start(&one);
            until("the first runs", || upstream.received() == round + 1);
            let two = two.addr;
            let copy = thread::spawn(move || (post(&key).send_to(two), Instant::now()));
            let first = first.join().unwrap();
            let first_at = Instant::now();
            let (copy, copy_at) = copy.join().unwrap();
            assert_eq!((copy.replayed(), &copy.body), (true, &first.body));
            copy_at.saturating_duration_since(first_at)
        })
        .collect();
    lags.sort();
    let median = lags[lags.len() / 2];
    println!("after the first: median {median:?}, worst {:?}", lags[lags.len() - 1]);
    assert!(median < millis(1_000), "{lags:?} after the first");
}

#[test]
fn one_of_three_instances_is_killed_again_and_again_under_load() {
    let upstream = Upstream::start();
    let setup = on(Postgres::shared(), &upstream, HOLD);
    let mut proxies: [Proxy; 3] = instances(&setup, &upstream, HOLD);
    let load = Load::start(proxies.iter().map(|proxy| proxy.addr).collect());
    for _ in 0..rounds(8) {
        thread::sleep(millis(100 + random(300)));
        let victim = &mut proxies[random(3) as usize];
        victim.kill();
        let again = Setup::new(upstream.url()).config(HOLD).store_of(&setup).listen(victim.addr);
        let mut started = None;
        until("it starts again on its port", || {
            started = again.try_start().ok();
            started.is_some()
        });
        *victim = started.unwrap();
    }
    check(&upstream, &load.end(), &proxies[0]);
}

#[test]
fn the_connection_to_the_database_is_cut_stalled_and_delayed_at_random() {
    let (server, upstream) = (Postgres::start(""), Upstream::start());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let wire = runtime.block_on(Wire::start(server.port())).unwrap();
    let url = format!("postgres://postgres@127.0.0.1:{}/{}", wire.port(), server.database());
    let setup = Setup::new(upstream.url()).config(HOLD).store_url(&url);
    let [one, two] = instances(&setup, &upstream, HOLD);
    let load = Load::start(vec![one.addr, two.addr]);
    for _ in 0..rounds(25) {
        thread::sleep(millis(50 + random(200)));
        match random(4) {
            0 | 1 => wire.cut(),
            2 => {
                wire.stall(true);
                thread::sleep(millis(random(300)));
                wire.stall(false);
            }
            _ => wire.delay(millis(random(20))),
        }
    }
    wire.delay(Duration::ZERO);
    check(&upstream, &load.end(), &one);
}

#[test]
fn the_database_crashes_and_comes_back_under_load() {
    let (server, upstream) = (Postgres::start(""), Upstream::start());
    let setup = on(&server, &upstream, HOLD);
    let [one, two] = instances(&setup, &upstream, HOLD);
    let load = Load::start(vec![one.addr, two.addr]);
    for _ in 0..rounds(3) {
        thread::sleep(millis(500 + random(500)));
        server.crash();
        thread::sleep(millis(random(500)));
        server.start_again();
    }
    thread::sleep(millis(500));
    check(&upstream, &load.end(), &two);
}

#[test]
fn without_the_database_new_work_is_refused_in_time_and_finished_work_is_answered() {
    let (server, upstream) = (Postgres::start(""), Upstream::start());
    let setup = on(&server, &upstream, "");
    let proxy = setup.start();
    let finishing = post("under-way").order("before=1500").start(&proxy);
    until("it runs", || upstream.received() == 1);
    server.stop();
    let asked = Instant::now();
    let refused = post("new").send(&proxy);
    assert_eq!((refused.refusal(), refused.retry_after().is_some()), ((503, "store-unavailable"), true));
    assert!(asked.elapsed() < millis(7_000), "{:?}", asked.elapsed());
    assert_eq!(upstream.received_for("new"), 0, "fail closed");
    let finished = finishing.join().unwrap();
    assert_eq!((finished.status, finished.whole), (201, true), "the work was done: its caller is told");
    server.start_again();
    until("it recovers by itself", || post("new").send(&proxy).status == 201);
    until("and records what was done meanwhile", || post("under-way").send(&proxy).replayed());
    assert_eq!(upstream.effects_for("under-way"), 1);
}

#[test]
fn a_database_that_hangs_holds_no_request_longer_than_a_call_may_take() {
    let (server, upstream) = (Postgres::shared(), Upstream::start());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let wire = runtime.block_on(Wire::start(server.port())).unwrap();
    let url = format!("postgres://postgres@127.0.0.1:{}/{}", wire.port(), server.database());
    let proxy = Setup::new(upstream.url()).store_url(&url).start();
    assert_eq!(post("before").send(&proxy).status, 201);
    wire.stall(true);
    let asked = Instant::now();
    assert_eq!(post("stalled").send(&proxy).refusal(), (503, "store-unavailable"));
    assert!(asked.elapsed() < millis(7_000), "{:?}", asked.elapsed());
    wire.stall(false);
    until("it recovers by itself", || post("after").send(&proxy).status == 201);
    assert!(post("before").send(&proxy).replayed());
    assert_eq!(upstream.received_for("stalled"), 0);
}

#[test]
fn a_database_that_became_read_only_is_refused_until_it_is_not() {
    let (server, upstream) = (Postgres::shared(), Upstream::start());
    let database = server.database();
    let proxy = Setup::new(upstream.url()).store_url(&server.url(&database)).start();
    assert_eq!(post("before").send(&proxy).status, 201);
    // For new sessions, as after a failover; the old ones are gone.
    let sessions =
        format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'");
    server.sql("postgres", &format!("ALTER DATABASE {database} SET default_transaction_read_only = on"));
    server.sql("postgres", &sessions);
    assert_eq!(post("new").send(&proxy).refusal(), (503, "store-unavailable"));
    server.sql("postgres", &format!("ALTER DATABASE {database} SET default_transaction_read_only = off"));
    server.sql("postgres", &sessions);
    until("it recovers by itself", || post("new").send(&proxy).status == 201);
    assert!(post("before").send(&proxy).replayed());
    assert_eq!(upstream.received_for("new"), 1);
}

#[test]
fn a_start_waits_for_the_database_and_not_for_ever() {
    let (server, upstream) = (Postgres::start(""), Upstream::start());
    let url = server.url(&server.database());
    server.stop();
    let started = Instant::now();
    let setup = Setup::new(upstream.url()).config("store_start_wait = \"1s\"\n").store_url(&url);
    let mut command = onlyonce();
    command.arg("proxy").arg("--config").arg(setup.written());
    let output = run(command);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(started.elapsed() < millis(10_000), "{:?}", started.elapsed());
    let setup = setup.config("store_start_wait = \"25s\"\n");
    let starting = thread::spawn(move || setup.start());
    thread::sleep(millis(700));
    server.start_again();
    assert_eq!(post("k").send(&starting.join().unwrap()).status, 201);
}

#[test]
fn behind_pgbouncer_in_transaction_mode_copies_have_one_effect() {
    let (server, upstream) = (Postgres::shared(), Upstream::start());
    let bouncer = PgBouncer::start(server, "pool_mode = transaction\n");
    let url = bouncer.url(&server.database());
    let config = "[defaults]\non_concurrent = \"wait\"\nwait = \"25s\"\n";
    let setup = Setup::new(upstream.url()).config(config).store_url(&url);
    let [one, two] = instances(&setup, &upstream, config);
    let clients: Vec<_> = [one.addr, two.addr, one.addr, two.addr]
        .into_iter()
        .map(|addr| {
            thread::spawn(move || {
                let send = |key| post(&format!("key-{key}")).order("before=5").send_to(addr);
                (0..20).map(send).filter(|answer| answer.status == 201).count()
            })
        })
        .collect();
    let answered: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
    assert_eq!(answered, 80);
    assert!(upstream.effects_by_key().values().all(|effects| *effects == 1));
}

#[test]
fn operators_look_after_keys_in_postgres_too() {
    let (server, upstream) = (Postgres::shared(), Upstream::start());
    let url = server.url(&server.database());
    let command = |arguments: &[&str]| {
        let mut command = onlyonce();
        command.args(arguments).args(["--store", &url]);
        let output = run(command);
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (code, sql, _) = command(&["migrate", "--print"]);
    assert_eq!(code, Some(0));
    assert!(sql.contains("CREATE TABLE") && sql.contains("idempotency_keys"), "{sql}");
    assert_eq!(command(&["doctor"]).0, Some(0), "nothing there yet is a warning");
    assert_eq!(command(&["migrate"]).0, Some(0));
    let proxy = Setup::new(upstream.url()).store_url(&url).start();
    assert_eq!(post("k").send(&proxy).status, 201);
    let (code, listed, _) = command(&["keys", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((code, &listed[0]["key"], &listed[0]["state"]), (Some(0), &"k".into(), &"done".into()));
    let (code, report, _) = command(&["doctor", "--upstream", &upstream.url()]);
    assert_eq!(code, Some(0), "{report}");
    for word in ["PostgreSQL", "synchronous_commit", "fsync", "max_connections"] {
        assert!(report.contains(word), "no {word} in\n{report}");
    }
    assert_eq!(command(&["keys", "release", "k"]).0, Some(0));
    assert!(!post("k").send(&proxy).replayed());
    assert_eq!(upstream.effects_for("k"), 2);
}

#[test]
fn a_password_is_in_no_message() {
    let upstream = Upstream::start();
    let url = "postgres://ann:hunter2@127.0.0.1:1/keys";
    let setup = Setup::new(upstream.url()).config("store_start_wait = \"0s\"\n").store_url(url);
    for arguments in [&["proxy"][..], &["doctor"], &["keys", "list"]] {
        let mut command = onlyonce();
        command.args(arguments).arg("--config").arg(setup.written());
        let output = run(command);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!output.status.success() && !said.contains("hunter2"), "{arguments:?}: {said}");
    }
}

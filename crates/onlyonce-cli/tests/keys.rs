//! What an operator sees and decides, while the proxy runs.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::process::Output;

use serde_json::Value;
use support::{Proxy, Setup, Upstream, onlyonce, post, run, text, until};

/// A proxy whose keys lapse soon and are then held, and its store.
fn held() -> (Upstream, Setup, Proxy) {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"900ms\"\nlease = \"1200ms\"\non_lapse = \"hold\"\n\
                  [[route]]\nmatch = \"POST /slow\"\ntimeout = \"60s\"\nlease = \"75s\"\n";
    let setup = Setup::new(upstream.url()).config(config);
    let proxy = setup.start();
    (upstream, setup, proxy)
}

fn keys(setup: &Setup, arguments: &[&str]) -> Output {
    let mut command = onlyonce();
    command.arg("keys").args(arguments).args(["--store", setup.store()]);
    run(command)
}

#[track_caller]
fn done(setup: &Setup, arguments: &[&str]) -> String {
    let output = keys(setup, arguments);
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[track_caller]
fn json(setup: &Setup, arguments: &[&str]) -> Vec<Value> {
    let out = done(setup, &[arguments, &["--json"]].concat());
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"))
}

/// The exit code and what was said about it.
#[track_caller]
fn failed(setup: &Setup, arguments: &[&str]) -> (i32, String) {
    let output = keys(setup, arguments);
    assert_eq!(text(&output.stdout), "", "{arguments:?}");
    (output.status.code().unwrap(), text(&output.stderr))
}

/// Sends a request whose answer is lost, and waits until its lease has ended.
fn lapse(proxy: &Proxy, key: &str) {
    assert_eq!(post(key).order("close=effect").send(proxy).refusal(), (502, "upstream-lost"));
    until("the lease ends", || post(key).send(proxy).refusal() == (409, "outcome-unknown"));
}

#[test]
fn a_listing_shows_what_is_running_lapsed_and_done() {
    let (upstream, setup, proxy) = held();
    assert_eq!(json(&setup, &["list"]).len(), 0);
    post("done").line("Authorization", "Bearer ann").order("size=23").send(&proxy);
    lapse(&proxy, "lapsed");
    let _running = post("running").to("/slow").order("before=60000").open(&proxy);
    until("it runs", || upstream.received_for("running") == 1);

    let rows = json(&setup, &["list"]);
    let states: Vec<_> =
        rows.iter().map(|row| (row["key"].as_str().unwrap(), row["state"].as_str().unwrap())).collect();
    assert_eq!(states, [("done", "done"), ("lapsed", "lapsed"), ("running", "running")]);
    assert_eq!(
        (&rows[0]["status"], &rows[0]["body_bytes"], &rows[0]["attempt"]),
        (&201.into(), &23.into(), &1.into())
    );
    assert_eq!(rows[2]["endpoint"], "POST /slow");
    let caller = rows[0]["caller"].as_str().unwrap();
    assert!(caller.starts_with("sha256:") && !caller.contains("ann"), "no credential is kept: {caller}");
    for field in ["created_at", "completed_at", "expires_at"] {
        let time = rows[0][field].as_str().unwrap();
        assert!(time.starts_with("20") && time.contains('T') && time.ends_with('Z'), "{field}: {time}");
    }

    let table = done(&setup, &["list"]);
    assert_eq!(table.lines().count(), 4, "{table}");
    for (line, words) in table.lines().skip(1).zip([["done", "201"], ["lapsed", "1"], ["running", "/slow"]]) {
        assert!(words.iter().all(|word| line.contains(word)), "{line}");
    }
    for (filter, count) in [
        (&["--state", "lapsed"][..], 1),
        (&["--endpoint", "POST /slow"], 1),
        (&["--caller", ""], 2),
        (&["--namespace", "other"], 0),
    ] {
        assert_eq!(json(&setup, &[&["list"], filter].concat()).len(), count, "{filter:?}");
    }
    let shown = done(&setup, &["show", "done"]);
    assert!(shown.contains("201") && shown.contains("POST /payments"), "{shown}");
    assert_eq!(json(&setup, &["show", "done"])[0]["id"], rows[0]["id"]);
}

#[test]
fn a_released_key_runs_again() {
    let (upstream, setup, proxy) = held();
    lapse(&proxy, "k");
    done(&setup, &["release", "k"]);
    let rerun = post("k").send(&proxy);
    assert_eq!((rerun.status, rerun.replayed()), (201, false));
    assert_eq!(rerun.sent("idempotency-attempt"), ["1"], "nobody knew it any more");
    assert_eq!(upstream.effects_for("k"), 2);
}

#[test]
fn a_completed_key_is_replayed() {
    let (upstream, setup, proxy) = held();
    lapse(&proxy, "k");
    let line = [
        "complete",
        "k",
        "--status",
        "202",
        "--body",
        "{\"id\":7}",
        "--header",
        "Content-Type: application/json",
    ];
    done(&setup, &line);
    let replay = post("k").send(&proxy);
    assert_eq!((replay.status, replay.replayed(), &*text(&replay.body)), (202, true, "{\"id\":7}"));
    assert_eq!(replay.header("content-type"), Some("application/json"));
    assert_eq!(post("k").body("amount=101").send(&proxy).status, 422, "it is still the same request");
    assert_eq!(upstream.effects_for("k"), 1);
}

#[test]
fn work_that_is_running_is_decided_about_only_by_force() {
    let (upstream, setup, proxy) = held();
    let first = post("k").to("/slow").order("before=2500").start(&proxy);
    until("it runs", || upstream.received() == 1);
    for command in ["release", "complete"] {
        let (code, said) = failed(&setup, &[command, "k"]);
        assert!(code == 2 && said.contains("--force"), "{said}");
    }
    done(&setup, &["complete", "k", "--status", "200", "--body", "decided", "--force"]);
    let replay = post("k").to("/slow").send(&proxy);
    assert_eq!((replay.status, &replay.body[..]), (200, &b"decided"[..]));
    assert_eq!(first.join().unwrap().status, 201, "its caller gets the real answer");
    let replay = post("k").to("/slow").send(&proxy);
    assert_eq!(&replay.body[..], b"decided", "and its holder overwrites nothing");
    assert_eq!(proxy.metric("onlyonce_lost_leases_total"), 1.0);
}

#[test]
fn an_ambiguous_key_is_exit_code_2_with_the_candidates() {
    let (_upstream, setup, proxy) = held();
    post("k").send(&proxy);
    post("k").to("/refunds").send(&proxy);
    let (code, said) = failed(&setup, &["release", "k"]);
    assert!(code == 2 && said.contains("POST /payments") && said.contains("POST /refunds"), "{said}");
    assert_eq!(json(&setup, &["show", "k"]).len(), 2);
    let id =
        json(&setup, &["show", "k", "--endpoint", "POST /refunds"])[0]["id"].as_str().unwrap().to_owned();
    done(&setup, &["release", "k", "--id", &id]);
    assert!(post("k").send(&proxy).replayed());
    assert!(!post("k").to("/refunds").send(&proxy).replayed());
}

#[test]
fn an_absent_key_or_store_is_exit_code_1() {
    let (_upstream, setup, _proxy) = held();
    for command in ["show", "release", "complete"] {
        let (code, said) = failed(&setup, &[command, "absent"]);
        assert!(code == 1 && said.contains("absent"), "{said}");
    }
    let absent = Setup::new("http://127.0.0.1:9");
    for command in [&["list"][..], &["show", "k"], &["purge"]] {
        let (code, said) = failed(&absent, command);
        assert!(code == 1 && said.contains("does not exist") && said.lines().count() == 1, "{said}");
    }
    assert!(!absent.database().exists(), "looking creates nothing");
}

#[test]
fn a_purge_removes_what_has_expired_and_nothing_else() {
    let upstream = Upstream::start();
    let config =
        "[[route]]\nmatch = \"POST /brief\"\ntimeout = \"100ms\"\nlease = \"200ms\"\nretention = \"300ms\"\n";
    let setup = Setup::new(upstream.url()).config(config);
    let proxy = setup.start();
    let kept = post("kept").send(&proxy);
    post("brief").to("/brief").send(&proxy);
    until("it has expired", || json(&setup, &["list"]).len() == 1);
    // A lease later at most.
    until("it is removed", || done(&setup, &["purge"]).contains("removed 1 "));
    assert!(done(&setup, &["purge"]).contains("removed 0 "));
    assert_eq!(post("kept").send(&proxy).body, kept.body);
    assert!(!post("brief").to("/brief").send(&proxy).replayed());
}

#[test]
fn a_doctor_says_what_is_well_and_what_is_not() {
    let (mut upstream, setup, proxy) = held();
    lapse(&proxy, "k");
    let file = setup.written();
    let doctor = |more: &[&str]| {
        let mut command = onlyonce();
        command.arg("doctor").arg("--config").arg(&file).args(more);
        run(command)
    };
    let well = doctor(&[]);
    let said = text(&well.stdout);
    assert_eq!(well.status.code(), Some(0), "{said}");
    assert!(said.contains("1 lapsed") && said.contains("takes connections"), "{said}");
    assert!(!said.contains("fail"), "{said}");
    let report: Vec<Value> = serde_json::from_slice(&doctor(&["--json"]).stdout).unwrap();
    assert!(report.iter().any(|line| line["check"] == "store" && line["result"] == "ok"), "{report:?}");
    assert_eq!(json(&setup, &["list"]).len(), 1, "its own record is gone again");

    upstream.stop();
    let ill = doctor(&[]);
    assert_eq!(ill.status.code(), Some(1));
    assert!(text(&ill.stdout).contains("fail  upstream"), "{}", text(&ill.stdout));
    let volatile = doctor(&["--store", "sqlite::memory:"]);
    assert_eq!(volatile.status.code(), Some(2), "{}", text(&volatile.stdout));
}

#[test]
fn a_store_can_be_made_before_the_proxy_starts() {
    let setup = Setup::new("http://127.0.0.1:9");
    let migrate = || {
        let mut command = onlyonce();
        command.args(["migrate", "--store", setup.store()]);
        run(command)
    };
    let (first, again) = (migrate(), migrate());
    assert!(first.status.success() && text(&first.stdout).contains("is created"), "{first:?}");
    assert!(again.status.success() && text(&again.stdout).contains("already"), "{again:?}");
    setup.start();
}

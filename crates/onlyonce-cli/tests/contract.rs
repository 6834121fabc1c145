//! The HTTP contract through the process, clause by clause: proxy and upstream are processes, the client
//! is a socket.
//!
//! Faults that others shipped, and the test that would see them here. Names without a file are in this
//! one; `layer` is `crates/onlyonce/tests/contract.rs`, `core` is `crates/onlyonce-core/src`.
//!
//! | report | test |
//! |---|---|
//! | ikyriak/IdempotentAPI#19 | instances: `copies_sent_to_both_at_once_have_one_effect_and_one_answer` |
//! | ikyriak/IdempotentAPI#23 | `without_the_store_nothing_is_forwarded` |
//! | granit-fx/granit-dotnet#1151 | core: `tests/model.rs` (every interleaving), `tests/engine.rs` |
//! | yoyowallet/django-idempotency-key#60 | `keys_do_not_wait_for_each_other` |
//! | apache/camel PR 2943 | startup: `a_file_that_is_not_a_store_of_ours_is_refused_and_left_alone` |
//! | VilledeMontreal/express-idempotency#32 | crash: `a_key_whose_holder_was_killed_runs_again_after_its_lease` |
//! | KanishJebaMathewM/Truxify#4623, Laravel #53342 | instances: `a_holder_that_stalled_past_its_lease_does_not_overwrite_its_successor` |
//! | KanishJebaMathewM/Truxify#4622 | `an_answer_that_breaks_off_is_never_passed_off_as_whole`, the tests of 3.4 |
//! | powertools-lambda-python#4759 | core: `tests/boundaries.rs` |
//! | caura-ai/caura#1629 | `a_caller_that_hangs_up_does_not_stop_the_work` |
//! | elchin92/avito-mcp#60 | `what_was_sent_and_then_lost_is_unknown_until_the_lease_ends` |
//! | svix/svix-webhooks PR 2181 | startup: `a_setting_that_cannot_be_is_one_line_with_what_is_allowed` |
//! | db-scheduler #365 | shutdown: `guarded_work_is_finished_and_recorded`, `while_an_answer_flows_its_lease_is_renewed` |
//! | apalis PR 507 | crash: `killed_at_random_no_effect_happens_twice_and_no_answer_changes` (fresh revisions) |
//! | ikyriak/IdempotentAPI#58, julik/idempo#21 | `a_key_reused_for_another_request_is_told_what_differs` |
//! | xavierjohn/Trellis#549 | core: `fingerprint.rs`, `identity.rs` |
//! | nensii21/devlink#1195, #773 | `another_endpoint_or_caller_is_another_operation` |
//! | chatvector-ai/chatvector-ai#520 | `a_body_mode_decides_what_counts_as_the_same` |
//! | powertools-lambda-typescript#5705 | `a_retry_is_given_the_first_answer` |
//! | ikyriak/IdempotentAPI#21 | `a_replay_has_its_own_framing` |
//! | gofiber/fiber#4693, VSN2015/concerns_on_rails#47 | `header_lines_are_replayed_as_they_were` |
//! | gofiber/fiber#4018, #4287 | `an_answer_over_the_limit_is_marked_as_done` |
//! | pathosDev/actor-ts#1308 | `a_streamed_answer_is_replayed_whole` |
//! | ArcadeData/arcadedb#5174 | `bytes_are_replayed_as_they_were` |
//! | LabsCrypt/remitlend#1329 | `passing_failures_are_not_kept` |
//! | ietf-wg-httpapi/idempotency#41 | `an_upstreams_own_502_and_504_are_unknown` |
//! | enkan/enkan#139 | `a_malformed_key_is_refused_and_never_ignored` |
//! | LFDT-Paladin/paladin#1001 | `a_copy_of_a_running_request_is_told_when_to_come_back` |
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::time::Instant;

use serde_json::json;
use support::lock::Lock;
use support::{
    Answer, Ask, Connection, PATIENCE, Proxy, Setup, Upstream, ask, get, happens_within, millis, post, until,
};

/// Asks until the answer is no longer that the first is still running.
#[track_caller]
fn send_until_settled(ask: &Ask, proxy: &Proxy) -> Answer {
    let mut answer = None;
    until("the key is settled", || {
        let got = ask.send(proxy);
        let settled = got.refusal() != (409, "request-in-progress");
        answer = settled.then_some(got);
        settled
    });
    answer.unwrap()
}

// ---- 3.1: answers ----

#[test]
fn a_retry_is_given_the_first_answer() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let first = post("k").send(&proxy);
    assert_eq!((first.status, first.replayed(), first.whole), (201, false, true));
    for _ in 0..2 {
        let again = post("k").send(&proxy);
        assert_eq!((again.status, again.replayed()), (201, true));
        assert_eq!(again.body, first.body);
    }
    let other = post("k2").send(&proxy);
    assert!(!other.replayed() && other.body != first.body);
    assert_eq!(upstream.effects(), 2);
}

#[test]
fn a_request_without_a_key_is_forwarded_unless_its_rule_requires_one() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[[route]]\nmatch = \"POST /strict\"\nkey = \"required\"\n");
    for effects in 1..=2 {
        let answer = ask("POST", "/payments").body("x").send(&proxy);
        assert_eq!((answer.status, answer.replayed(), upstream.effects()), (201, false, effects));
    }
    let refused = ask("POST", "/strict").body("x").send(&proxy);
    assert_eq!(refused.refusal(), (400, "idempotency-key-missing"));
    assert_eq!(upstream.received(), 2);
}

#[test]
fn no_spelling_of_a_path_slips_past_a_rule_that_requires_a_key() {
    let upstream = Upstream::start();
    let config = "[[route]]\nmatch = \"POST /payments/{id}\"\nkey = \"required\"\n";
    let proxy = Proxy::start(&upstream, config);
    for target in [
        "/payments/7",
        "//payments/7",
        "/payments//7",
        "/payments/7/",
        "/./payments/7",
        "/x/../payments/7",
        "/pay%6Dents/7",
        "/%2e/payments/7?x=1",
        "/payments/a%2Fb",
        "http://api.test/payments/7",
    ] {
        assert_eq!(ask("POST", target).send(&proxy).refusal(), (400, "idempotency-key-missing"), "{target}");
    }
    assert_eq!(upstream.received(), 0);
    // An encoded slash separates nothing, so this is one segment and another resource.
    assert_eq!(ask("POST", "/payments%2F7").send(&proxy).status, 201);
}

#[test]
fn a_malformed_key_is_refused_and_never_ignored() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let long = "k".repeat(256);
    for key in ["", "a b", "a,b", "a\"b", "\"a", "\"\"", "\"a\\b\"", "k\u{fc}", "k\tx", &long] {
        assert_eq!(post(key).send(&proxy).refusal(), (400, "idempotency-key-malformed"), "{key:?}");
    }
    let twice = post("a").line("idempotency-key", "a").send(&proxy);
    assert_eq!(twice.refusal(), (400, "idempotency-key-malformed"));
    assert_eq!(upstream.received(), 0);
    assert_eq!(post(&long[1..]).send(&proxy).status, 201, "255 characters are a key");
}

#[test]
fn a_key_is_the_same_bare_and_quoted_and_is_forwarded_as_sent() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for (first, again) in [("abc", "\"abc\""), ("\"a b\\\"c\"", "\"a b\\\"c\";v=1")] {
        let sent = post(first).send(&proxy);
        assert_eq!(sent.sent("idempotency-key"), [first]);
        assert!(post(again).send(&proxy).replayed(), "{again}");
    }
    assert_eq!(upstream.effects(), 2);
}

#[test]
fn a_key_reused_for_another_request_is_told_what_differs() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let first = post("k").order("before=700").start(&proxy);
    until("the first runs", || upstream.received() == 1);
    for when in ["before the first has ended", "afterwards"] {
        for (request, differs) in [
            (post("k").to("/payments?dry-run=1"), json!(["target"])),
            (post("k").body("amount=101"), json!(["body"])),
            (post("k").to("/payments?dry-run=1").body("amount=101"), json!(["target", "body"])),
        ] {
            let refused = request.send(&proxy);
            assert_eq!(refused.refusal(), (422, "idempotency-key-reused"), "{when}");
            assert_eq!(refused.json()["differs"], differs, "{when}");
        }
        until("the first has ended", || post("k").send(&proxy).replayed());
    }
    assert_eq!(first.join().unwrap().status, 201);
    assert_eq!(upstream.received(), 1);
}

#[test]
fn a_copy_of_a_running_request_is_told_when_to_come_back() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let first = post("k").order("before=2600").start(&proxy);
    until("the first runs", || upstream.received() == 1);
    let started = Instant::now();
    let copy = post("k").send(&proxy);
    assert_eq!((copy.refusal(), copy.retry_after()), ((409, "request-in-progress"), Some(1)));
    // As long as it has run so far.
    std::thread::sleep(millis(2_100).saturating_sub(started.elapsed()));
    let copy = post("k").send(&proxy);
    assert!(copy.replayed() || copy.retry_after() == Some(2), "{copy:?}");
    assert_eq!(first.join().unwrap().status, 201);
    assert!(post("k").send(&proxy).replayed());
    assert_eq!(upstream.received(), 1);
}

#[test]
fn under_wait_copies_get_the_first_answer_when_it_is_there() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\non_concurrent = \"wait\"\nwait = \"20s\"\n");
    let copies: Vec<_> = (0..8).map(|_| post("k").order("before=400").start(&proxy)).collect();
    let answers: Vec<_> = copies.into_iter().map(|copy| copy.join().unwrap()).collect();
    assert!(answers.iter().all(|answer| answer.status == 201 && answer.body == answers[0].body));
    assert_eq!(answers.iter().filter(|answer| answer.replayed()).count(), 7);
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn under_wait_a_copy_runs_the_work_itself_if_the_first_was_released() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\non_concurrent = \"wait\"\nwait = \"20s\"\n");
    let first = post("k").order("before=400 status=500").start(&proxy);
    until("the first runs", || upstream.received() == 1);
    let copy = post("k").send(&proxy);
    assert_eq!((copy.status, copy.replayed()), (201, false));
    assert_eq!(first.join().unwrap().status, 500);
}

#[test]
fn waiting_ends_after_wait() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\non_concurrent = \"wait\"\nwait = \"300ms\"\n");
    let _first = post("k").order("before=3000").open(&proxy);
    until("the first runs", || upstream.received() == 1);
    let asked = Instant::now();
    assert_eq!(post("k").send(&proxy).refusal(), (409, "request-in-progress"));
    assert!(asked.elapsed() >= millis(300));
}

#[test]
fn what_was_not_sent_is_released_and_runs_at_once() {
    let mut upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    upstream.stop();
    let refused = post("k").send(&proxy);
    assert_eq!((refused.refusal(), refused.retry_after()), ((502, "upstream-unreachable"), Some(1)));
    assert!(refused.json()["detail"].as_str().unwrap().contains("a retry with the same key runs it"));
    upstream.start_again();
    let retry = post("k").send(&proxy);
    assert_eq!((retry.status, retry.replayed()), (201, false));
    assert_eq!(retry.sent("idempotency-attempt"), ["1"], "the key was free");
}

#[test]
fn what_was_sent_and_then_lost_is_unknown_until_the_lease_ends() {
    std::thread::scope(|scope| {
        for order in ["close=head", "close=effect", "die"] {
            scope.spawn(move || sent_and_then_lost(order));
        }
    });
}

fn sent_and_then_lost(order: &str) {
    let mut upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\ntimeout = \"1s\"\nlease = \"3s\"\n");
    let lost = post("k").order(order).send(&proxy);
    assert_eq!(lost.refusal(), (502, "upstream-lost"), "{order}");
    assert!((1..=3).contains(&lost.retry_after().unwrap()), "{lost:?}");
    assert!(lost.json()["detail"].as_str().unwrap().contains("once the lease has ended"), "{lost:?}");
    if order == "die" {
        upstream.start_again();
    }
    assert_eq!(post("k").send(&proxy).refusal(), (409, "request-in-progress"), "{order}");
    assert_eq!(upstream.received(), 1, "{order}");
    let rerun = send_until_settled(&post("k"), &proxy);
    assert_eq!((rerun.status, rerun.replayed()), (201, false), "{order}");
    assert_eq!(rerun.sent("idempotency-attempt"), ["2"], "{order}");
    assert!(post("k").send(&proxy).replayed());
}

#[test]
fn work_that_is_too_slow_is_504_and_its_answer_is_replayed_when_it_comes() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\ntimeout = \"300ms\"\nlease = \"30s\"\n");
    let slow = post("k").order("before=1200").send(&proxy);
    assert_eq!(slow.refusal(), (504, "upstream-timeout"));
    assert!((1..=30).contains(&slow.retry_after().unwrap()));
    let replay = send_until_settled(&post("k"), &proxy);
    assert_eq!((replay.status, replay.replayed()), (201, true));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn at_the_end_of_its_lease_the_work_is_given_up_and_runs_again() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\ntimeout = \"500ms\"\nlease = \"1s\"\n");
    assert_eq!(post("k").order("before=60000").send(&proxy).status, 504);
    let rerun = send_until_settled(&post("k"), &proxy);
    assert_eq!((rerun.status, rerun.sent("idempotency-attempt")), (201, vec!["2".to_owned()]));
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn under_hold_a_lapsed_key_is_refused_without_a_time_to_come_back() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"1s\"\nlease = \"1500ms\"\non_lapse = \"hold\"\n";
    let proxy = Proxy::start(&upstream, config);
    let lost = post("k").order("close=effect").send(&proxy);
    assert_eq!((lost.refusal(), lost.retry_after()), ((502, "upstream-lost"), Some(2)));
    let held = send_until_settled(&post("k"), &proxy);
    assert_eq!((held.refusal(), held.retry_after()), ((409, "outcome-unknown"), None));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn a_body_over_the_limit_is_refused_and_nothing_is_forwarded() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nrequest_body_bytes_max = 8\n");
    assert_eq!(post("k").body("123456789").send(&proxy).refusal(), (413, "request-too-large"));
    let chunked = post("k").line("transfer-encoding", "chunked").body("5\r\n12345\r\n4\r\n6789\r\n0\r\n\r\n");
    assert_eq!(chunked.send(&proxy).refusal(), (413, "request-too-large"));
    assert_eq!(upstream.received(), 0);
    assert_eq!(post("k").body("12345678").send(&proxy).status, 201, "nothing was claimed");
    assert_eq!(ask("POST", "/payments").body("123456789").send(&proxy).status, 201, "not guarded, no limit");
}

#[test]
fn a_body_that_is_too_slow_is_refused_and_nothing_is_forwarded() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nrequest_timeout = \"300ms\"\n");
    let mut connection = post("k").line("content-length", "10").body("12345").open(&proxy);
    assert_eq!(connection.answer().refusal(), (408, "request-too-slow"));
    assert_eq!(upstream.received(), 0);
    assert_eq!(post("k").body("1234567890").send(&proxy).status, 201, "nothing was claimed");
}

#[test]
fn a_key_on_a_request_for_an_upgrade_is_refused_and_an_offer_of_h2c_is_ignored() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let upgrade = post("k").line("Connection", "upgrade").line("Upgrade", "websocket").send(&proxy);
    assert_eq!(upgrade.refusal(), (400, "not-guardable"));
    assert_eq!(upstream.received(), 0);
    let offer = post("k")
        .line("Connection", "close, Upgrade, HTTP2-Settings")
        .line("Upgrade", "h2c")
        .line("HTTP2-Settings", "AAMAAABkAAQAAP__");
    let answer = offer.send(&proxy);
    assert_eq!(answer.status, 201);
    for name in ["upgrade", "http2-settings"] {
        assert_eq!(answer.sent(name), [""; 0], "{name}");
    }
}

#[test]
fn without_the_store_nothing_is_forwarded() {
    let upstream = Upstream::start();
    let setup = Setup::new(upstream.url()).store_query("busy_timeout_ms=100");
    let proxy = setup.start();
    let recorded = post("old").send(&proxy);
    let lock = Lock::take(&setup.database());
    let refused = post("k").send(&proxy);
    assert_eq!((refused.refusal(), refused.retry_after()), ((503, "store-unavailable"), Some(1)));
    assert_eq!(upstream.received(), 1);
    let replay = post("old").send(&proxy);
    assert!(replay.replayed() && replay.body == recorded.body, "a replay writes nothing");
    assert_eq!(get("/free").send(&proxy).status, 200, "what is not guarded needs no store");
    drop(lock);
    assert_eq!(post("k").send(&proxy).status, 201);
}

#[test]
fn a_store_that_was_destroyed_under_the_proxy_is_away_too() {
    let upstream = Upstream::start();
    let setup = Setup::new(upstream.url());
    let proxy = setup.start();
    assert_eq!(post("k").send(&proxy).status, 201);
    for file in ["keys.db", "keys.db-wal"] {
        let path = setup.folder.path().join(file);
        let size = std::fs::metadata(&path).map_or(4096, |metadata| metadata.len());
        std::fs::write(&path, vec![0xa5; usize::try_from(size).unwrap()]).unwrap();
    }
    for key in ["k2", "k3"] {
        let refused = post(key).send(&proxy);
        assert_eq!(refused.refusal(), (503, "store-unavailable"));
        assert!(refused.retry_after().is_some());
    }
    assert_eq!(upstream.received(), 1);
}

#[test]
fn every_refusal_is_a_problem_that_names_its_code_everywhere() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let refused = post("").send(&proxy);
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    let problem = refused.json();
    assert_eq!(problem["type"], "urn:onlyonce:problem:idempotency-key-malformed");
    assert_eq!(problem["code"], "idempotency-key-malformed");
    assert_eq!(problem["status"], 400);
    for member in ["title", "detail", "error"] {
        let line = problem[member].as_str().unwrap();
        assert!(!line.is_empty() && !line.contains('\n'), "{member}: {line}");
    }
}

#[test]
fn an_upstreams_own_409_is_told_apart_from_ours_and_cannot_pose_as_a_replay() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let conflict = post("k")
        .order("status=409")
        .line("x-add", "Idempotent-Replayed: true")
        .line("x-add", "Onlyonce-Refused: response-not-kept")
        .line("x-add", "Onlyonce-Other: 1");
    let first = conflict.send(&proxy);
    assert_eq!((first.refusal(), first.replayed()), ((409, "not refused"), false));
    assert_eq!(first.header("onlyonce-other"), None);
    let replay = conflict.send(&proxy);
    assert_eq!((replay.refusal(), replay.replayed()), ((409, "not refused"), true));
}

#[test]
fn keys_do_not_wait_for_each_other() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let _slow = post("slow").order("before=20000").open(&proxy);
    until("the slow one runs", || upstream.received() == 1);
    let asked = Instant::now();
    assert_eq!(post("quick").send(&proxy).status, 201);
    assert!(asked.elapsed() < millis(10_000));
}

// ---- 2.1: what the upstream is sent ----

#[test]
fn the_upstream_is_told_the_attempt_and_only_by_the_proxy() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let forged = |ask: Ask| ask.line("Idempotency-Attempt", "7").send(&proxy).sent("idempotency-attempt");
    assert_eq!(forged(post("k")), ["1"]);
    assert_eq!(forged(get("/x")), [""; 0]);
}

#[test]
fn a_guarded_request_asks_for_no_encoding_and_others_ask_as_the_client_did() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let asked = |ask: Ask| ask.line("Accept-Encoding", "br, gzip").send(&proxy).sent("accept-encoding");
    assert_eq!(asked(post("k")), ["identity"]);
    assert_eq!(asked(get("/x")), ["br, gzip"]);
    assert_eq!(post("k2").send(&proxy).sent("accept-encoding"), ["identity"]);
}

#[test]
fn what_belongs_to_one_connection_is_not_passed_on() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for request in [post("k"), get("/x")] {
        let answer = request
            .line("Connection", "close, X-Hop")
            .line("X-Hop", "1")
            .line("Keep-Alive", "timeout=5")
            .line("Proxy-Authorization", "Basic x")
            .line("TE", "gzip")
            .line("X-End", "1")
            .line("x-add", "Connection: X-Internal")
            .line("x-add", "X-Internal: 1")
            .line("x-add", "Keep-Alive: timeout=5")
            .line("x-add", "X-End-Too: 1")
            .send(&proxy);
        for name in ["connection", "x-hop", "keep-alive", "proxy-authorization", "te"] {
            assert_eq!(answer.sent(name), [""; 0], "{name}");
        }
        assert_eq!((answer.sent("x-end"), answer.header("x-end-too")), (vec!["1".into()], Some("1")));
        for name in ["x-internal", "keep-alive"] {
            assert_eq!(answer.header(name), None, "{name}");
        }
    }
}

#[test]
fn the_upstream_learns_where_a_request_came_from() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let answer = post("k").line("X-Forwarded-For", "10.0.0.1").send(&proxy);
    assert_eq!(answer.sent("x-forwarded-for"), ["10.0.0.1, 127.0.0.1"]);
    assert_eq!(answer.sent("x-forwarded-proto"), ["http"]);
    assert_eq!(answer.sent("x-forwarded-host"), ["api.test"]);
    assert_eq!(answer.sent("host"), ["api.test"], "the host stays as received");

    let proxy = Proxy::start(&upstream, "host = \"upstream\"\n");
    let answer = post("k").send(&proxy);
    assert_eq!(answer.sent("host"), [upstream.addr.to_string()]);
    assert_eq!(answer.sent("x-forwarded-host"), ["api.test"]);
}

#[test]
fn a_target_is_forwarded_byte_for_byte() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let targets =
        ["/", "//a/./b/../c", "/%2F%7e%e2%82%ac", "/a;b=c,d/'(*)", "/?", "/a?b?c&&d=%20;e+f", "/a//?x=/../"];
    for (at, target) in targets.iter().enumerate() {
        for request in [get(target), post(&format!("k{at}")).to(target)] {
            assert_eq!(request.send(&proxy).json()["target"], **target);
        }
    }
    let proxy = Setup::new(format!("{}/v1/", upstream.url())).start();
    assert_eq!(post("k").to("//a?b").send(&proxy).json()["target"], "/v1//a?b");
}

#[test]
fn methods_are_guarded_by_default_or_by_rule_or_never() {
    let upstream = Upstream::start();
    let config = "[[route]]\nmatch = \"POST /off\"\nkey = \"off\"\n[[route]]\nmatch = \"* /all\"\n";
    let proxy = Proxy::start(&upstream, config);
    for (method, target, guarded) in [
        ("POST", "/", true),
        ("PATCH", "/", true),
        ("PUT", "/", false),
        ("DELETE", "/", false),
        ("PUT", "/all", true),
        ("DELETE", "/all", true),
        ("GET", "/all", false),
        ("OPTIONS", "/all", false),
        ("POST", "/off", false),
    ] {
        let send = || ask(method, target).line("Idempotency-Key", "k").send(&proxy);
        send();
        assert_eq!(send().replayed(), guarded, "{method} {target}");
    }
}

// ---- 3.2 and 3.3: what counts, and who asks ----

#[test]
fn only_the_headers_that_a_rule_lists_count() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nfingerprint_headers = [\"content-type\"]\n");
    let typed = |kind, agent| post("k").line("Content-Type", kind).line("User-Agent", agent).send(&proxy);
    assert_eq!(typed("text/plain", "a").status, 201);
    assert!(typed("text/plain", "b").replayed());
    let refused = typed("text/html", "a");
    assert_eq!((refused.status, &refused.json()["differs"]), (422, &json!(["target"])));
}

#[test]
fn a_body_mode_decides_what_counts_as_the_same() {
    let upstream = Upstream::start();
    let config: String = ["raw", "json", "form", "multipart"]
        .iter()
        .map(|mode| format!("[[route]]\nmatch = \"POST /{mode}\"\nbody = \"{mode}\"\n"))
        .collect();
    let proxy = Proxy::start(&upstream, &format!("[defaults]\nbody = \"auto\"\n{config}"));
    let part = |boundary: &str| {
        format!("--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--{boundary}--\r\n")
    };
    let form = "multipart/form-data; boundary=";
    let (one, two) = (part("one"), part("two"));
    let (in_one, in_two) = (format!("{form}one"), format!("{form}two"));
    let json = "application/json";
    let pairs = "application/x-www-form-urlencoded";
    for (at, (target, first, again, same)) in [
        ("/raw", (json, "{\"a\":1,\"b\":2}"), (json, "{\"b\":2,\"a\":1}"), false),
        ("/json", (json, "{\"a\":1,\"b\":2}"), (json, "{ \"b\": 2.0, \"a\": 1 }"), true),
        ("/json", (json, "{\"a\":1}"), (json, "{\"a\":2}"), false),
        ("/form", (pairs, "a=1&b=%20"), (pairs, "b=+&a=1"), true),
        ("/form", (pairs, "a=1&a=2"), (pairs, "a=2&a=1"), false),
        ("/multipart", (&*in_one, &*one), (&*in_two, &*two), true),
        ("/auto", (json, "[1, 2]"), (json, "[1,2]"), true),
        ("/auto", ("text/plain", "[1, 2]"), ("text/plain", "[1,2]"), false),
        ("/auto", (&*in_one, &*one), (&*in_two, &*two), true),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("k{at}");
        let send = |(kind, body): (&str, &str)| {
            post(&key).to(target).line("Content-Type", kind).body(body).send(&proxy)
        };
        assert_eq!(send(first).status, 201);
        let again = send(again);
        assert_eq!((again.replayed(), again.status == 422), (same, !same), "{at} {target}");
    }
}

#[test]
fn another_endpoint_or_caller_is_another_operation() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let requests = [
        post("k"),
        post("k").to("/refunds"),
        ask("PATCH", "/payments").line("Idempotency-Key", "k").body("amount=100"),
        post("k").line("Authorization", "Bearer ann"),
        post("k").line("Authorization", "Bearer bob"),
    ];
    let first: Vec<_> = requests.iter().map(|request| request.send(&proxy)).collect();
    assert!(first.iter().all(|answer| !answer.replayed()));
    for (request, first) in requests.iter().zip(&first) {
        let again = request.send(&proxy);
        assert!(again.replayed() && again.body == first.body);
    }
    assert_eq!(upstream.effects(), 5);
}

#[test]
fn a_stable_endpoint_name_shares_keys_between_paths() {
    let upstream = Upstream::start();
    let config = "[[route]]\nmatch = \"POST /payments/{id}/refunds\"\nendpoint = \"refunds\"\n";
    let proxy = Proxy::start(&upstream, config);
    assert_eq!(post("k").to("/payments/1/refunds").send(&proxy).status, 201);
    let refused = post("k").to("/payments/2/refunds").send(&proxy);
    assert_eq!((refused.status, &refused.json()["differs"]), (422, &json!(["target"])));
}

#[test]
fn cookies_are_no_caller_unless_somebody_said_so() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let cookie = || post("k").line("Cookie", "session=ann");
    assert_eq!(cookie().send(&proxy).refusal(), (400, "caller-unresolved"));
    assert_eq!(upstream.received(), 0);
    assert_eq!(cookie().line("Authorization", "Bearer ann").send(&proxy).status, 201);
    assert_eq!(
        ask("POST", "/").line("Cookie", "a=1").send(&proxy).status,
        201,
        "without a key nobody is asked"
    );
    for caller in ["authorization", "none"] {
        let proxy = Proxy::start(&upstream, &format!("caller = \"{caller}\"\n"));
        assert_eq!(cookie().send(&proxy).status, 201, "{caller}");
    }
}

#[test]
fn under_caller_none_everybody_shares_a_key() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "caller = \"none\"\n");
    post("k").line("Authorization", "Bearer ann").send(&proxy);
    assert!(post("k").line("Authorization", "Bearer bob").send(&proxy).replayed());
}

#[test]
fn a_callers_header_tells_callers_apart_and_must_be_there() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "caller = { header = \"x-user-id\" }\n");
    for request in [
        post("k"),
        post("k").line("X-User-Id", ""),
        post("k").line("X-User-Id", "ann").line("X-User-Id", "bob"),
        post("k").line("Authorization", "Bearer ann"),
    ] {
        assert_eq!(request.send(&proxy).refusal(), (400, "caller-unresolved"));
    }
    assert_eq!(upstream.received(), 0);
    let by = |user| post("k").line("X-User-Id", user).send(&proxy);
    assert_ne!(by("ann").body, by("bob").body);
    assert!(by("ann").replayed() && by("bob").replayed());
    assert_eq!(upstream.effects(), 2);
}

mod jwt {
    use super::*;
    use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
    use std::time::{SystemTime, UNIX_EPOCH};

    /// A key of the tests, and what a key set says about it.
    const KEY: &str = "-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgt/JASTlN9xf3CMXj
Xym1DYVvoxjv3JnxopL8J3fVeHehRANCAAQzhQ2RpexDjWh6AnjMsVRc2+N+NZON
pD7sPKzD9S4drNXc9MVuDwRZvexngIB4OTSInBdm+Ya3oETOxupV1LUc
-----END PRIVATE KEY-----";
    const X: &str = "M4UNkaXsQ41oegJ4zLFUXNvjfjWTjaQ-7Dysw_UuHaw";
    const Y: &str = "1dz0xW4PBFm97GeAgHg5NIicF2b5hregRM7G6lXUtRw";

    fn token(mut claims: serde_json::Value, lives_for: i64) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        claims["exp"] = (i64::try_from(now).unwrap() + lives_for).into();
        let header = Header { kid: Some("one".into()), ..Header::new(Algorithm::ES256) };
        encode(&header, &claims, &EncodingKey::from_ec_pem(KEY.as_bytes()).unwrap()).unwrap()
    }

    fn proxy(upstream: &Upstream) -> Proxy {
        let setup = Setup::new(upstream.url());
        let keys = setup.folder.path().join("keys.json");
        let set =
            json!({ "keys": [{ "kty": "EC", "crv": "P-256", "kid": "one", "use": "sig", "x": X, "y": Y }] });
        std::fs::write(&keys, set.to_string()).unwrap();
        setup.config(&format!("caller = {{ jwt = {{ jwks = \"{}\" }} }}\n", keys.display())).start()
    }

    fn by(token: &str) -> Ask {
        post("k").line("Authorization", &format!("Bearer {token}"))
    }

    #[test]
    fn a_refreshed_token_is_the_same_caller_and_another_subject_is_another() {
        let upstream = Upstream::start();
        let proxy = proxy(&upstream);
        let first = by(&token(json!({ "sub": "ann" }), 600)).send(&proxy);
        assert_eq!((first.status, first.replayed()), (201, false));
        let refreshed = by(&token(json!({ "sub": "ann", "jti": 2 }), 900)).send(&proxy);
        assert!(refreshed.replayed() && refreshed.body == first.body);
        assert!(!by(&token(json!({ "sub": "bob" }), 600)).send(&proxy).replayed());
        assert!(!post("k").send(&proxy).replayed(), "no token is nobody");
        assert!(post("k").send(&proxy).replayed());
        assert_eq!(upstream.effects(), 3);
    }

    #[test]
    fn a_token_that_does_not_verify_is_401() {
        let upstream = Upstream::start();
        let proxy = proxy(&upstream);
        let good = token(json!({ "sub": "ann" }), 600);
        let other_subject = token(json!({ "sub": "bob" }), 600);
        let spliced = {
            let (good, other): (Vec<_>, Vec<_>) =
                (good.split('.').collect(), other_subject.split('.').collect());
            [good[0], other[1], good[2]].join(".")
        };
        let shared = EncodingKey::from_secret(b"guessed").unwrap();
        let symmetric =
            encode(&Header::default(), &json!({ "sub": "ann", "exp": 9_999_999_999_u64 }), &shared).unwrap();
        let none = format!("eyJhbGciOiJub25lIn0.{}.", good.split('.').nth(1).unwrap());
        let expired = token(json!({ "sub": "ann" }), -3_600);
        for bad in [&*expired, &spliced, &symmetric, &none, "x", ""] {
            assert_eq!(by(bad).send(&proxy).refusal(), (401, "caller-unverified"), "{bad}");
        }
        let basic = post("k").line("Authorization", "Basic YTpi").send(&proxy);
        assert_eq!(basic.refusal(), (401, "caller-unverified"));
        let unnamed = by(&token(json!({ "name": "ann" }), 600)).send(&proxy);
        assert_eq!(unnamed.refusal(), (400, "caller-unresolved"));
        assert_eq!(upstream.received(), 0);
        assert_eq!(by(&good).send(&proxy).status, 201);
    }
}

// ---- 3.4: what is kept ----

#[test]
fn outcomes_are_kept() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for status in [200, 201, 202, 204, 301, 302, 304, 400, 403, 404, 409, 410, 422, 451] {
        let key = format!("k{status}");
        let send = || post(&key).order(&format!("status={status}")).send(&proxy);
        let (first, again) = (send(), send());
        assert_eq!((first.status, first.replayed()), (status, false));
        assert_eq!((again.status, again.replayed(), &again.body), (status, true, &first.body));
        assert_eq!(upstream.effects_for(&key), 1, "{status}");
    }
}

#[test]
fn passing_failures_are_not_kept() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for status in [401, 407, 408, 421, 425, 429, 500, 501, 503] {
        let key = format!("k{status}");
        let failed = post(&key).order(&format!("status={status}")).send(&proxy);
        assert_eq!(failed.refusal(), (status, "not refused"));
        let retry = post(&key).send(&proxy);
        assert_eq!((retry.status, retry.replayed()), (201, false), "{status}");
        assert_eq!(retry.sent("idempotency-attempt"), ["1"], "{status}: the key was free");
        assert!(post(&key).send(&proxy).replayed(), "{status}");
    }
}

#[test]
fn an_upstreams_own_502_and_504_are_unknown() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\ntimeout = \"1s\"\nlease = \"3s\"\n");
    let key = |status| format!("k{status}");
    for status in [502, 504] {
        let first = post(&key(status)).order(&format!("status={status}")).send(&proxy);
        assert_eq!(first.refusal(), (status, "not refused"), "passed on as it came");
        assert_eq!(post(&key(status)).send(&proxy).refusal(), (409, "request-in-progress"));
        assert_eq!(upstream.effects_for(&key(status)), 1);
    }
    for status in [502, 504] {
        let rerun = send_until_settled(&post(&key(status)), &proxy);
        assert_eq!((rerun.status, rerun.sent("idempotency-attempt")), (201, vec!["2".to_owned()]));
    }
}

#[test]
fn keep_and_unknown_replace_the_defaults() {
    let upstream = Upstream::start();
    let config =
        "[[route]]\nmatch = \"POST /payments\"\nkeep = [\"2xx\", \"500\", \"!202\"]\nunknown = [\"503\"]\n";
    let proxy = Proxy::start(&upstream, config);
    for (status, again) in
        [(200, "replay"), (202, "run"), (404, "run"), (500, "replay"), (502, "run"), (503, "refuse")]
    {
        let key = format!("k{status}");
        assert_eq!(post(&key).order(&format!("status={status}")).send(&proxy).status, status);
        let second = post(&key).send(&proxy);
        let what = match second.refusal() {
            (409, "request-in-progress") => "refuse",
            _ if second.replayed() => "replay",
            _ => "run",
        };
        assert_eq!(what, again, "{status}");
    }
}

#[test]
fn an_outcome_is_forgotten_after_its_retention() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"500ms\"\nlease = \"600ms\"\nretention = \"1500ms\"\n";
    let proxy = Proxy::start(&upstream, config);
    let asked = Instant::now();
    let first = post("k").send(&proxy);
    assert!(post("k").send(&proxy).replayed());
    let mut again = None;
    until("the key is forgotten", || {
        let got = post("k").send(&proxy);
        let forgotten = !got.replayed();
        again = Some(got);
        forgotten
    });
    assert!(asked.elapsed() >= millis(1_400), "{:?}", asked.elapsed());
    let again = again.unwrap();
    assert_eq!((again.status, again.sent("idempotency-attempt")), (201, vec!["1".to_owned()]));
    assert_ne!(again.body, first.body);
}

#[test]
fn interim_answers_are_not_outcomes() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let first = post("k").order("interim").send(&proxy);
    let again = post("k").send(&proxy);
    assert_eq!((first.status, again.status, again.replayed()), (201, 201, true));
    assert_eq!(again.header("link"), None);
    assert_eq!(again.body, first.body);
}

// ---- 2.2: the work does not die with the connection ----

#[test]
fn a_caller_that_hangs_up_does_not_stop_the_work() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let caller = post("k").order("before=500").open(&proxy);
    until("the work runs", || upstream.received() == 1);
    drop(caller);
    let retry = send_until_settled(&post("k"), &proxy);
    assert_eq!((retry.status, retry.replayed()), (201, true));
    assert_eq!((upstream.received(), upstream.effects()), (1, 1));
}

#[test]
fn a_caller_that_hangs_up_in_the_middle_of_the_answer_does_not_stop_its_recording() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nstream_after = \"0s\"\n");
    let mut caller = post("k").order("size=46 pieces=2 pause=500 chunked").open(&proxy);
    assert_eq!(caller.head().unwrap().status, 201);
    drop(caller);
    let retry = send_until_settled(&post("k"), &proxy);
    assert_eq!((retry.status, retry.replayed(), retry.body.len()), (201, true, 46));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn a_caller_that_hangs_up_in_the_middle_of_its_request_has_claimed_nothing() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    drop(post("k").line("Content-Length", "10").body("amou").open(&proxy));
    let retry = post("k").send(&proxy);
    assert_eq!((retry.status, retry.replayed()), (201, false));
    assert_eq!(retry.json()["body"], "amount=100");
    assert_eq!(upstream.received(), 1);
}

// ---- 3.5: what is replayed ----

#[test]
fn header_lines_are_replayed_as_they_were() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let mut request = post("k");
    let lines = [
        "Location: /payments/7",
        "ETag: \"7,8\"",
        "Link: </a>, </b>",
        "Link: </c>",
        "Content-Type: application/vnd.api+json",
        "Content-Language: de",
        "X-Odd:   spaces, commas; \"quotes\"",
        "Set-Cookie: session=1",
        "WWW-Authenticate: Basic",
        "Server-Timing: db;dur=1",
        "Date: Mon, 01 Jan 2001 00:00:00 GMT",
        "Connection: X-Hop",
        "X-Hop: 1",
    ];
    for line in lines {
        request = request.line("x-add", line);
    }
    let (first, replay) = (request.send(&proxy), request.send(&proxy));
    assert_eq!(first.header("set-cookie"), Some("session=1"), "the first caller gets its cookie");
    assert!(replay.replayed());
    for name in ["location", "etag", "link", "content-type", "content-language", "x-odd"] {
        assert!(!replay.all(name).is_empty(), "{name}");
        assert_eq!(replay.all(name), first.all(name), "{name}");
    }
    assert_eq!(replay.all("link"), ["</a>, </b>", "</c>"]);
    for name in ["set-cookie", "www-authenticate", "server-timing", "x-hop"] {
        assert_eq!(replay.header(name), None, "{name}");
    }
    assert_ne!(replay.header("date"), Some("Mon, 01 Jan 2001 00:00:00 GMT"));
}

#[test]
fn cookies_are_replayed_where_a_rule_allows_it() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nrecord_cookies = true\n");
    let request = post("k").line("x-add", "Set-Cookie: a=1").line("x-add", "Set-Cookie: b=2");
    request.send(&proxy);
    assert_eq!(request.send(&proxy).all("set-cookie"), ["a=1", "b=2"]);
}

#[test]
fn a_replay_has_its_own_framing() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let request = post("k").order("size=46 pieces=3 chunked");
    let (first, replay) = (request.send(&proxy), request.send(&proxy));
    assert_eq!((first.body.len(), &first.body), (46, &replay.body));
    assert_eq!(replay.header("content-length"), Some("46"));
    assert_eq!(replay.header("transfer-encoding"), None);
}

#[test]
fn bytes_are_replayed_as_they_were() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let request = post("k").body(&b"\x00\xff\r\n"[..]).order("hex=00ff0d0a80c3280a00");
    let (first, replay) = (request.send(&proxy), request.send(&proxy));
    assert_eq!(first.body, b"\x00\xff\r\n\x80\xc3\x28\n\x00");
    assert_eq!((replay.replayed(), replay.body), (true, first.body));
    let empty = post("k2").order("size=0");
    assert_eq!((empty.send(&proxy).body.len(), empty.send(&proxy).header("content-length")), (0, Some("0")));
}

#[test]
fn trailers_are_recorded_and_announced_anew() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let request = post("k")
        .line("TE", "trailers")
        .line("x-add", "Trailer: grpc-status")
        .line("x-trailer", "grpc-status: 0")
        .order("size=23");
    let (first, replay) = (request.send(&proxy), request.send(&proxy));
    for (answer, replayed) in [(&first, false), (&replay, true)] {
        assert_eq!((answer.replayed(), answer.whole, answer.body.len()), (replayed, true, 23));
        assert_eq!(answer.header("trailer"), Some("grpc-status"));
        assert_eq!(answer.trailers, [("grpc-status".to_owned(), "0".to_owned())]);
    }
}

#[test]
fn a_streamed_answer_is_replayed_whole() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nstream_after = \"100ms\"\n");
    let request = post("k").order("size=92 pieces=4 pause=150 chunked");
    let asked = Instant::now();
    let mut connection = request.open(&proxy);
    let mut first = connection.head().unwrap();
    let shown_after = asked.elapsed();
    connection.rest(&mut first, false);
    assert!(shown_after + millis(150) < asked.elapsed(), "the beginning comes before the end");
    assert_eq!((first.whole, first.body.len()), (true, 92));
    let replay = request.send(&proxy);
    assert_eq!((replay.replayed(), &replay.body), (true, &first.body));
}

#[test]
fn events_are_passed_on_at_once_and_replayed() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let request = post("k").order("events=2 pause=1500");
    let mut connection = request.open(&proxy);
    assert_eq!(connection.head().unwrap().header("content-type"), Some("text/event-stream"));
    let asked = Instant::now();
    assert!(connection.until(b"data: 1\n\n").is_some());
    assert!(asked.elapsed() < millis(1_000), "stream_after does not hold events up");
    assert!(connection.until(b"0\r\n\r\n").is_some());
    let replay = request.send(&proxy);
    assert_eq!((replay.replayed(), &replay.body[..]), (true, &b"data: 1\n\ndata: 2\n\n"[..]));
}

#[test]
fn the_end_of_a_streamed_answer_is_held_back_until_it_is_recorded() {
    for (framing, held_back, silent_for) in [("chunked", &b"0\r\n\r\n"[..], 700), ("", b"w", 2_000)] {
        let upstream = Upstream::start();
        let config = "record_grace = \"30s\"\n[defaults]\nstream_after = \"0s\"\n";
        let setup = Setup::new(upstream.url()).store_query("busy_timeout_ms=100").config(config);
        let proxy = setup.start();
        let mut connection = post("k").order(&format!("size=46 pieces=2 pause=1200 {framing}")).open(&proxy);
        assert_eq!(connection.head().unwrap().status, 201);
        assert!(connection.until(b"w").is_some(), "the first piece");
        let lock = Lock::take(&setup.database());
        if framing == "chunked" {
            assert!(connection.until(b"w\r\n").is_some(), "no data is held back");
        }
        assert!(connection.is_silent_for(millis(silent_for)), "{framing}: the end waits for the record");
        drop(lock);
        assert!(connection.until(held_back).is_some());
        assert!(post("k").send(&proxy).replayed());
        assert_eq!(upstream.received(), 1);
    }
}

#[test]
fn an_answer_over_the_limit_is_marked_as_done() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nresponse_body_bytes_max = 100\n");
    for (key, framing) in [("k1", ""), ("k2", "chunked pieces=20")] {
        let request = post(key).order(&format!("size=1000 {framing}"));
        let first = request.send(&proxy);
        assert_eq!((first.status, first.whole, first.body.len()), (201, true, 1000), "{framing}");
        let again = request.send(&proxy);
        assert_eq!((again.refusal(), again.retry_after()), ((409, "response-not-kept"), None));
        assert_eq!(again.json()["original_status"], 201);
        assert_eq!(upstream.effects_for(key), 1);
    }
    let fits = post("k3").order("size=100");
    fits.send(&proxy);
    assert_eq!(fits.send(&proxy).body.len(), 100);
}

#[test]
fn an_endless_answer_is_marked_before_its_first_excess_byte_is_seen() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "[defaults]\nresponse_body_bytes_max = 100\nstream_after = \"0s\"\n");
    let mut connection = post("k").order("size=23 chunked endless pause=20").open(&proxy);
    connection.head().unwrap();
    for _ in 0..5 {
        assert!(connection.until(b"w").is_some());
    }
    let again = post("k").send(&proxy);
    assert_eq!(
        (again.refusal(), &again.json()["original_status"]),
        ((409, "response-not-kept"), &json!(201))
    );
    assert!(connection.until(b"w").is_some(), "the first caller is still served");
}

#[test]
fn without_its_caller_an_endless_answer_is_marked_after_one_more_lease() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"500ms\"\nlease = \"1s\"\nstream_after = \"0s\"\n";
    let proxy = Proxy::start(&upstream, config);
    let mut connection = post("k").order("size=23 chunked endless pause=50").open(&proxy);
    connection.head().unwrap();
    drop(connection);
    let again = send_until_settled(&post("k"), &proxy);
    assert_eq!(again.refusal(), (409, "response-not-kept"));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn while_an_answer_flows_its_lease_is_renewed() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"500ms\"\nlease = \"1s\"\nstream_after = \"0s\"\n";
    let proxy = Proxy::start(&upstream, config);
    let mut connection = post("k").order("size=552 pieces=24 pause=150 chunked").open(&proxy);
    connection.head().unwrap();
    let started = Instant::now();
    while started.elapsed() < millis(2_200) {
        assert_eq!(post("k").send(&proxy).refusal(), (409, "request-in-progress"));
    }
    assert!(connection.until(b"0\r\n\r\n").is_some());
    let replay = post("k").send(&proxy);
    assert_eq!((replay.replayed(), replay.body.len()), (true, 552));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn an_answer_that_breaks_off_is_never_passed_off_as_whole() {
    let upstream = Upstream::start();
    let config = "[[route]]\nmatch = \"POST /streamed\"\nstream_after = \"0s\"\nidle_timeout = \"400ms\"\n";
    let proxy = Proxy::start(&upstream, config);
    // Before anything was passed on it is a refusal.
    for (key, framing) in [("k1", ""), ("k2", "chunked pieces=2")] {
        let lost = post(key).order(&format!("size=46 close=half {framing}")).send(&proxy);
        assert_eq!(lost.refusal(), (502, "upstream-lost"), "{framing}");
    }
    // Afterwards it is an answer that breaks off as well.
    for (key, order) in [
        ("k3", "size=46 close=half pieces=4 pause=100"),
        ("k4", "size=46 close=half chunked pieces=4 pause=100"),
        ("k5", "size=46 chunked pieces=2 pause=20000"),
    ] {
        let cut = post(key).to("/streamed").order(order).send(&proxy);
        assert_eq!((cut.status, cut.whole), (201, false), "{order}");
    }
    for key in ["k1", "k2"] {
        assert_eq!(post(key).send(&proxy).refusal(), (409, "request-in-progress"), "{key}");
    }
    assert_eq!(post("k5").to("/streamed").send(&proxy).refusal(), (409, "request-in-progress"));
    assert_eq!(upstream.received(), 5);
}

// ---- 3.6: when the outcome cannot be recorded ----

#[test]
fn while_the_store_is_away_the_caller_gets_the_answer_and_it_is_recorded_later() {
    let upstream = Upstream::start();
    let setup =
        Setup::new(upstream.url()).store_query("busy_timeout_ms=100").config("record_grace = \"300ms\"\n");
    let proxy = setup.start();
    let first = post("k").order("before=1500").start(&proxy);
    until("the work runs", || upstream.received() == 1);
    let lock = Lock::take(&setup.database());
    let first = first.join().unwrap();
    assert_eq!((first.status, first.whole, first.replayed()), (201, true, false), "while the store is away");
    assert_eq!(post("k").send(&proxy).refusal(), (409, "request-in-progress"));
    drop(lock);
    let replay = send_until_settled(&post("k"), &proxy);
    assert_eq!((replay.replayed(), &replay.body), (true, &first.body));
    assert_eq!(upstream.received(), 1);
}

#[test]
fn an_outcome_that_could_not_be_recorded_within_the_lease_is_counted() {
    let upstream = Upstream::start();
    let config = "record_grace = \"100ms\"\n[defaults]\ntimeout = \"2s\"\nlease = \"2500ms\"\n";
    let setup = Setup::new(upstream.url()).store_query("busy_timeout_ms=50").config(config);
    let proxy = setup.start();
    let first = post("k").order("before=1200").start(&proxy);
    until("the work runs", || upstream.received() == 1);
    let lock = Lock::take(&setup.database());
    assert_eq!(first.join().unwrap().status, 201);
    until("the failure is counted", || proxy.metric("onlyonce_record_failures_total") >= 1.0);
    drop(lock);
    assert!(proxy.stderr().contains("could not be recorded"), "it is logged");
}

#[test]
fn a_connection_serves_many_requests_guarded_and_not() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let mut connection = Connection::open(proxy.addr).unwrap();
    for (request, replayed) in
        [(post("k"), false), (post("k"), true), (get("/x"), false), (post(""), false), (post("k"), true)]
    {
        assert_eq!(connection.ask(&request).replayed(), replayed);
    }
    assert!(happens_within(PATIENCE, || upstream.effects() == 2));
}

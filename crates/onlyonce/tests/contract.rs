//! The HTTP contract, clause by clause.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use http_body_util::{BodyExt, Full};
use onlyonce::settings::{KeyRule, OnConcurrent};
use onlyonce::{Caller, CallerError, Config, Execution, Failure, KeepRules, Route, Settings};
use onlyonce_core::{BodyMode, Lapse};
use tokio::sync::{Mutex, Notify};
use tokio::time::{Instant, advance, sleep};

use support::{App, Feed, TestBody, fed, post, secs, seen, text, with};

fn config(settings: Settings) -> Config {
    Config { defaults: settings, ..Config::default() }
}

/// Work that takes a second and says which run it was.
fn slow() -> App {
    slow_under(Settings::default())
}

fn slow_under(settings: Settings) -> App {
    App::new(config(settings), |run, _| {
        async move {
            sleep(secs(1)).await;
            text(201, format!("run {run}"))
        }
        .boxed()
    })
}

fn answers(status: u16) -> App {
    App::new(Config::default(), move |run, _| async move { text(status, format!("run {run}")) }.boxed())
}

/// Work whose answers the test feeds by hand.
fn feeding(settings: Settings) -> (App, Arc<Mutex<Vec<Feed>>>) {
    feeding_with(settings, |_| {})
}

fn feeding_with(settings: Settings, head: fn(&mut HeaderMap)) -> (App, Arc<Mutex<Vec<Feed>>>) {
    let feeds = Arc::new(Mutex::new(Vec::new()));
    let given = Arc::clone(&feeds);
    let app = App::new(config(settings), move |_, _| {
        let given = Arc::clone(&given);
        async move {
            let (feed, mut response) = fed(200);
            head(response.headers_mut());
            given.lock().await.push(feed);
            response
        }
        .boxed()
    });
    (app, feeds)
}

async fn next_data(answer: &mut http::Response<onlyonce::ResponseBody<TestBody>>) -> Bytes {
    answer.body_mut().frame().await.unwrap().unwrap().into_data().unwrap()
}

// ---- 3.1: answers ----

#[tokio::test(start_paused = true)]
async fn a_retry_is_given_the_first_answer() {
    let app = slow();
    let first = seen(app.send(post("k", "100")).await).await;
    let again = seen(app.send(post("\"k\"", "100")).await).await;
    assert_eq!((first.status, &first.body[..], first.replayed()), (201, &b"run 1"[..], false));
    assert_eq!((again.status, &again.body[..], again.replayed()), (201, &b"run 1"[..], true));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn without_a_key_a_request_passes_unless_its_rule_requires_one() {
    let keyless = || Request::post("/payments").body(Full::default()).unwrap();
    let app = slow();
    for run in ["run 1", "run 2"] {
        assert_eq!(seen(app.send(keyless()).await).await.body, run);
    }
    let app = slow_under(Settings { key: KeyRule::Required, ..Settings::default() });
    let refused = seen(app.send(keyless()).await).await;
    assert_eq!((refused.status, refused.refused()), (400, Some("idempotency-key-missing")));
    assert_eq!(app.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_malformed_key_is_refused_and_never_ignored() {
    let app = slow();
    let long = "k".repeat(256);
    for key in ["", "a b", "a,b", "\"a", "k\tx", &long] {
        let refused = seen(app.send(post(key, "")).await).await;
        assert_eq!((refused.status, refused.refused()), (400, Some("idempotency-key-malformed")), "{key}");
    }
    let twice = with(post("a", ""), "idempotency-key", "a");
    assert_eq!(seen(app.send(twice).await).await.refused(), Some("idempotency-key-malformed"));
    assert_eq!(app.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_key_reused_for_another_request_is_told_what_differs_even_while_the_first_runs() {
    let app = slow();
    let first = app.start(post("k", "100"));
    sleep(Duration::from_millis(500)).await;
    for when in ["running", "done"] {
        let mut other_target = post("k", "100");
        *other_target.uri_mut() = "/payments?dry-run=1".parse().unwrap();
        let mut both = post("k", "999");
        *both.uri_mut() = "/payments?dry-run=1".parse().unwrap();
        for (request, differs) in
            [(other_target, &["target"][..]), (post("k", "999"), &["body"]), (both, &["target", "body"])]
        {
            let refused = seen(app.send(request).await).await;
            assert_eq!((refused.status, refused.refused()), (422, Some("idempotency-key-reused")), "{when}");
            assert_eq!(refused.problem()["differs"], serde_json::json!(differs));
        }
        sleep(secs(2)).await;
    }
    first.await.unwrap();
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_copy_of_a_running_request_is_refused_with_a_time_to_come_back() {
    let app = App::new(Config::default(), |_, _| {
        async {
            sleep(secs(50)).await;
            text(200, "")
        }
        .boxed()
    });
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(100)).await;
    let copy = seen(app.send(post("k", "")).await).await;
    assert_eq!(
        (copy.status, copy.refused(), copy.retry_after()),
        (409, Some("request-in-progress"), Some(1))
    );
    sleep(secs(20)).await;
    assert_eq!(seen(app.send(post("k", "")).await).await.retry_after(), Some(20));
    sleep(secs(25)).await;
    // 45 s have run, and 30 s of the lease of 75 s are left.
    assert_eq!(seen(app.send(post("k", "")).await).await.retry_after(), Some(29));
    first.await.unwrap();
    assert_eq!(app.runs(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_concurrent_copies_exactly_one_runs_over_many_rounds() {
    let app = App::new(Config::default(), |_, _| async { text(200, "done") }.boxed());
    for round in 1..=50 {
        let copies: Vec<_> = (0..64).map(|_| app.start(post(&format!("key-{round}"), "100"))).collect();
        for copy in copies {
            let copy = seen(copy.await.unwrap()).await;
            assert!(copy.status == 200 || copy.refused() == Some("request-in-progress"), "{copy:?}");
        }
        assert_eq!(app.runs(), round);
    }
}

#[tokio::test(start_paused = true)]
async fn under_wait_a_copy_gets_the_answer_when_it_is_there() {
    let app = slow_under(Settings { on_concurrent: OnConcurrent::Wait, ..Settings::default() });
    let copies: Vec<_> = (0..64).map(|_| app.start(post("k", ""))).collect();
    let mut replayed = 0;
    for copy in copies {
        let copy = seen(copy.await.unwrap()).await;
        assert_eq!(copy.body, "run 1");
        replayed += usize::from(copy.replayed());
    }
    assert_eq!((app.runs(), replayed), (1, 63));
}

#[tokio::test(start_paused = true)]
async fn under_wait_a_copy_runs_the_work_itself_if_the_first_was_released() {
    let settings = Settings { on_concurrent: OnConcurrent::Wait, ..Settings::default() };
    let app = App::new(config(settings), |run, _| {
        async move {
            sleep(secs(1)).await;
            text(if run == 1 { 500 } else { 200 }, format!("run {run}"))
        }
        .boxed()
    });
    let (first, copy) = tokio::join!(app.send(post("k", "")), app.send(post("k", "")));
    assert_eq!((seen(first).await.body, seen(copy).await.body), ("run 1".into(), "run 2".into()));
}

#[tokio::test(start_paused = true)]
async fn waiting_ends_after_wait() {
    let settings = Settings { on_concurrent: OnConcurrent::Wait, wait: secs(3), ..Settings::default() };
    let app = App::new(config(settings), |_, _| {
        async {
            sleep(secs(50)).await;
            text(200, "")
        }
        .boxed()
    });
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    let asked = Instant::now();
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("request-in-progress"));
    assert_eq!(asked.elapsed(), secs(3));
    first.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_was_not_sent_is_released_and_what_was_lost_is_left_to_its_lease() {
    for (failure, code, runs_at_once) in
        [(Failure::NotSent, "upstream-unreachable", 2), (Failure::Lost, "upstream-lost", 1)]
    {
        let app = App::new(Config::default(), move |_, _| {
            async move {
                let mut response = text(502, "made up by a proxy");
                response.extensions_mut().insert(failure);
                response
            }
            .boxed()
        });
        let failed = seen(app.send(post("k", "")).await).await;
        assert_eq!((failed.status, failed.refused()), (502, Some(code)));
        assert!(failed.retry_after().is_some());
        seen(app.send(post("k", "")).await).await;
        assert_eq!(app.runs(), runs_at_once, "{code}");
        advance(secs(75)).await;
        seen(app.send(post("k", "")).await).await;
        assert_eq!(app.runs(), runs_at_once + 1, "{code}");
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_is_too_slow_is_504_and_its_answer_is_replayed_when_it_comes() {
    let app = App::new(Config::default(), |_, _| {
        async {
            sleep(secs(70)).await;
            text(201, "late")
        }
        .boxed()
    });
    let asked = Instant::now();
    let slow = seen(app.send(post("k", "")).await).await;
    assert_eq!((slow.status, slow.refused(), slow.retry_after()), (504, Some("upstream-timeout"), Some(16)));
    assert_eq!(asked.elapsed(), secs(60));
    assert_eq!(seen(app.send(post("k", "")).await).await.status, 409);
    sleep(secs(11)).await;
    let replay = seen(app.send(post("k", "")).await).await;
    assert_eq!((replay.status, &replay.body[..], replay.replayed()), (201, &b"late"[..], true));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn at_the_end_of_the_lease_the_work_is_given_up_and_runs_again_as_the_next_attempt() {
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&attempts);
    let app = App::new(Config::default(), move |run, request| {
        let noted = Arc::clone(&noted);
        async move {
            noted.lock().await.push(request.extensions().get::<Execution>().unwrap().attempt);
            sleep(secs(if run == 1 { 1_000 } else { 1 })).await;
            text(201, format!("run {run}"))
        }
        .boxed()
    });
    assert_eq!(seen(app.send(post("k", "")).await).await.status, 504);
    sleep(secs(15)).await;
    assert_eq!(seen(app.send(post("k", "")).await).await.body, "run 2");
    assert_eq!(*attempts.lock().await, [1, 2]);
    app.layer.drained().await;
}

#[tokio::test(start_paused = true)]
async fn under_hold_a_lapsed_key_is_refused_without_a_time_to_come_back() {
    let settings = Settings { on_lapse: Lapse::Hold, retention: secs(100), ..Settings::default() };
    let app = App::new(config(settings), |_, _| {
        async {
            sleep(secs(1_000)).await;
            text(200, "")
        }
        .boxed()
    });
    let slow = seen(app.send(post("k", "")).await).await;
    assert_eq!((slow.status, slow.retry_after()), (504, Some(16)), "an answer may still come");
    sleep(secs(15)).await;
    let held = seen(app.send(post("k", "")).await).await;
    assert_eq!((held.status, held.refused(), held.retry_after()), (409, Some("outcome-unknown"), None));
    sleep(secs(98)).await;
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("outcome-unknown"));
    assert_eq!(app.runs(), 1);
    sleep(secs(2)).await;
    app.start(post("k", ""));
    sleep(secs(1)).await;
    assert_eq!(app.runs(), 2, "forgotten a retention after the lease ended");
}

#[tokio::test(start_paused = true)]
async fn a_body_over_the_limit_or_too_slow_is_refused_and_nothing_is_claimed() {
    let app = slow_under(Settings { request_body_bytes_max: 4, ..Settings::default() });
    let large = seen(app.send(post("k", "12345")).await).await;
    assert_eq!((large.status, large.refused()), (413, Some("request-too-large")));
    let announced = with(post("k", ""), "content-length", "5");
    assert_eq!(seen(app.send(announced).await).await.status, 413);
    assert_eq!(app.runs(), 0);
    assert_eq!(seen(app.send(post("k", "1234")).await).await.body, "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_asks_for_an_upgrade_is_not_guardable_but_an_offer_of_h2c_is_ignored() {
    let app = slow();
    let upgrade = with(with(post("k", ""), "connection", "upgrade"), "upgrade", "websocket");
    let refused = seen(app.send(upgrade).await).await;
    assert_eq!((refused.status, refused.refused()), (400, Some("not-guardable")));
    let offer = with(with(post("k", ""), "connection", "Upgrade, HTTP2-Settings"), "upgrade", "h2c");
    assert_eq!(seen(app.send(offer).await).await.body, "run 1");
}

#[tokio::test(start_paused = true)]
async fn without_the_store_nothing_runs() {
    let app = slow();
    app.store.down.store(true, Ordering::SeqCst);
    let refused = seen(app.send(post("k", "")).await).await;
    assert_eq!((refused.status, refused.refused()), (503, Some("store-unavailable")));
    assert!(refused.retry_after().is_some());
    assert_eq!(app.runs(), 0);
    app.store.down.store(false, Ordering::SeqCst);
    assert_eq!(seen(app.send(post("k", "")).await).await.body, "run 1");
}

#[tokio::test(start_paused = true)]
async fn every_refusal_is_a_problem_with_its_code_in_every_place() {
    let app = slow();
    let refused = seen(app.send(post("", "")).await).await;
    let problem = refused.problem();
    assert_eq!(refused.header("content-type"), Some("application/problem+json"));
    assert_eq!(problem["type"], "urn:onlyonce:problem:idempotency-key-malformed");
    assert_eq!(problem["code"], "idempotency-key-malformed");
    assert_eq!(problem["status"], 400);
    for member in ["title", "detail", "error"] {
        assert!(problem[member].as_str().is_some_and(|text| !text.is_empty()), "{member}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_upstreams_own_409_and_headers_are_not_taken_for_ours() {
    let app = App::new(Config::default(), |_, _| {
        async {
            let mut response = text(409, "out of stock");
            for name in ["idempotent-replayed", "onlyonce-refused", "onlyonce-anything"] {
                response
                    .headers_mut()
                    .insert(HeaderName::from_static(name), HeaderValue::from_static("true"));
            }
            response
        }
        .boxed()
    });
    let first = seen(app.send(post("k", "")).await).await;
    assert_eq!((first.status, first.headers.len()), (409, 0));
    let replay = seen(app.send(post("k", "")).await).await;
    assert_eq!((replay.status, replay.replayed(), replay.refused()), (409, true, None));
}

// ---- 3.2 and 3.3: what counts, and who asks ----

#[tokio::test(start_paused = true)]
async fn only_the_headers_that_a_rule_lists_count() {
    let app = slow_under(Settings {
        fingerprint_headers: vec![HeaderName::from_static("content-type")],
        ..Settings::default()
    });
    let typed =
        |kind: &str, agent: &str| with(with(post("k", "1"), "content-type", kind), "user-agent", agent);
    app.send(typed("text/plain", "a")).await;
    assert!(seen(app.send(typed("text/plain", "b")).await).await.replayed());
    assert_eq!(seen(app.send(typed("text/html", "a")).await).await.status, 422);
}

#[tokio::test(start_paused = true)]
async fn a_body_mode_decides_what_counts_as_the_same_body() {
    let app = slow_under(Settings { body: BodyMode::Json, ..Settings::default() });
    app.send(post("k", r#"{"a":1,"b":2}"#)).await;
    assert!(seen(app.send(post("k", r#"{ "b": 2, "a": 1 }"#)).await).await.replayed());
    assert_eq!(seen(app.send(post("k", r#"{"a":1,"b":3}"#)).await).await.status, 422);
}

#[tokio::test(start_paused = true)]
async fn the_same_key_on_another_endpoint_or_from_another_caller_is_another_operation() {
    let app = slow();
    let mut refund = post("k", "");
    *refund.uri_mut() = "/refunds".parse().unwrap();
    let mut patch = post("k", "");
    *patch.method_mut() = http::Method::PATCH;
    let requests = [
        post("k", ""),
        refund,
        patch,
        with(post("k", ""), "authorization", "Bearer ann"),
        with(post("k", ""), "authorization", "Bearer bob"),
    ];
    for (run, request) in (1..).zip(requests) {
        assert_eq!(seen(app.send(request).await).await.body, format!("run {run}"));
    }
    let again = with(post("k", ""), "authorization", "Bearer bob");
    assert_eq!(seen(app.send(again).await).await.body, "run 5");
}

#[tokio::test(start_paused = true)]
async fn cookies_are_no_caller_unless_somebody_said_so() {
    let cookie = || with(post("k", ""), "cookie", "session=ann");
    let app = slow();
    let refused = seen(app.send(cookie()).await).await;
    assert_eq!((refused.status, refused.refused()), (400, Some("caller-unresolved")));
    assert_eq!(app.runs(), 0);
    let signed_in = with(cookie(), "authorization", "Bearer ann");
    assert_eq!(seen(app.send(signed_in).await).await.status, 201);
    for caller in [Caller::Authorization, Caller::Everyone] {
        let config = Config { caller, ..Config::default() };
        let app = App::new(config, |_, _| async { text(201, "") }.boxed());
        assert_eq!(seen(app.send(cookie()).await).await.status, 201);
    }
}

#[tokio::test(start_paused = true)]
async fn a_callers_header_must_be_there_and_a_closure_can_refuse() {
    let config = Config { caller: Caller::Header(HeaderName::from_static("x-user-id")), ..Config::default() };
    let app = App::new(config, |run, _| async move { text(201, format!("run {run}")) }.boxed());
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("caller-unresolved"));
    assert_eq!(seen(app.send(with(post("k", ""), "x-user-id", "")).await).await.status, 400);
    assert_eq!(seen(app.send(with(post("k", ""), "x-user-id", "ann")).await).await.body, "run 1");
    assert_eq!(seen(app.send(with(post("k", ""), "x-user-id", "bob")).await).await.body, "run 2");

    for (error, status, code) in [
        (CallerError::Unresolved("no".into()), 400, "caller-unresolved"),
        (CallerError::Unverified("bad".into()), 401, "caller-unverified"),
        (CallerError::Unavailable("away".into()), 503, "caller-unverified"),
    ] {
        let caller = Caller::from_request(move |_| Err(error.clone()));
        let app = App::new(Config { caller, ..Config::default() }, |_, _| async { text(201, "") }.boxed());
        let refused = seen(app.send(post("k", "")).await).await;
        assert_eq!((refused.status, refused.refused()), (status, Some(code)));
        assert_eq!(refused.header("www-authenticate").is_some(), status == 401);
        assert_eq!(app.runs(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stable_endpoint_name_shares_keys_between_paths() {
    let refunds = Route::new("POST /payments/{id}/refunds", Settings::default()).unwrap();
    let config = Config { routes: vec![refunds.endpoint("refunds").unwrap()], ..Config::default() };
    let app = App::new(config, |_, _| async { text(201, "") }.boxed());
    for (path, status) in [("/payments/1/refunds", 201), ("/payments/2/refunds", 422)] {
        let mut request = post("k", "");
        *request.uri_mut() = path.parse().unwrap();
        assert_eq!(seen(app.send(request).await).await.status, status);
    }
}

// ---- 3.4: what is kept ----

#[tokio::test(start_paused = true)]
async fn outcomes_are_kept_and_passing_failures_are_not() {
    for status in [200, 201, 204, 302, 400, 404, 409, 422] {
        let app = answers(status);
        app.send(post("k", "")).await;
        assert!(seen(app.send(post("k", "")).await).await.replayed(), "{status}");
        assert_eq!(app.runs(), 1, "{status}");
    }
    for status in [401, 407, 408, 421, 425, 429, 500, 503] {
        let app = answers(status);
        for run in ["run 1", "run 2"] {
            let answer = seen(app.send(post("k", "")).await).await;
            assert_eq!((answer.status, &answer.body[..]), (status, run.as_bytes()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_upstreams_502_or_504_is_unknown_and_not_released() {
    for status in [502, 504] {
        let app = answers(status);
        let first = seen(app.send(post("k", "")).await).await;
        assert_eq!((first.status, first.refused(), &first.body[..]), (status, None, &b"run 1"[..]));
        assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("request-in-progress"));
        advance(secs(75)).await;
        assert_eq!(seen(app.send(post("k", "")).await).await.body, "run 2");
    }
}

#[tokio::test(start_paused = true)]
async fn keep_and_unknown_replace_the_defaults() {
    let keep = KeepRules::new(&["2xx", "500"], &["503"]).unwrap();
    for (status, second) in [(500, Some("run 1")), (404, Some("run 2")), (503, None)] {
        let settings = Settings { keep: keep.clone(), ..Settings::default() };
        let app = App::new(config(settings), move |run, _| {
            async move { text(status, format!("run {run}")) }.boxed()
        });
        app.send(post("k", "")).await;
        let again = seen(app.send(post("k", "")).await).await;
        match second {
            Some(body) => assert_eq!(again.body, body, "{status}"),
            None => assert_eq!(again.refused(), Some("request-in-progress"), "{status}"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_releases_the_key_and_is_passed_on() {
    let app = App::new(Config::default(), |run, _| {
        async move {
            assert!(run > 1, "the first run panics");
            text(200, format!("run {run}"))
        }
        .boxed()
    });
    assert!(app.start(post("k", "")).await.is_err_and(|error| error.is_panic()));
    assert_eq!(seen(app.send(post("k", "")).await).await.body, "run 2");
}

// ---- 2.2: the work does not die with the connection ----

#[tokio::test(start_paused = true)]
async fn a_caller_that_hangs_up_does_not_stop_the_work() {
    let app = slow();
    let caller = app.start(post("k", ""));
    sleep(Duration::from_millis(500)).await;
    caller.abort();
    sleep(secs(1)).await;
    let retry = seen(app.send(post("k", "")).await).await;
    assert_eq!((&retry.body[..], retry.replayed(), app.runs()), (&b"run 1"[..], true, 1));
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_guarded_work() {
    let app = slow();
    app.start(post("k", "")).abort();
    let caller = app.start(post("k2", ""));
    sleep(Duration::from_millis(500)).await;
    caller.abort();
    let asked = Instant::now();
    app.layer.drained().await;
    assert_eq!(asked.elapsed(), Duration::from_millis(500));
    assert!(seen(app.send(post("k2", "")).await).await.replayed());
}

// ---- 3.5: what is replayed ----

#[tokio::test(start_paused = true)]
async fn a_replay_is_the_same_bytes_lines_and_trailers() {
    let (app, feeds) = feeding_with(Settings::default(), |headers| {
        for (name, value) in [
            ("location", "/payments/7"),
            ("etag", "\"7\""),
            ("link", "</a>, </b>"),
            ("link", "</c>"),
            ("content-type", "application/grpc"),
            ("set-cookie", "session=1"),
            ("date", "today"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
    });
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    let feed = feeds.lock().await.pop().unwrap();
    feed.data(&b"\0\xff"[..]);
    feed.data(&b"\r\n"[..]);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    feed.trailers(trailers.clone());
    drop(feed);
    let first = seen(first.await.unwrap()).await;
    assert_eq!((&first.body[..], &first.trailers), (&b"\0\xff\r\n"[..], &trailers));
    assert_eq!(first.header("set-cookie"), Some("session=1"), "the first caller gets its cookie");
    let replay = seen(app.send(post("k", "")).await).await;
    assert_eq!((&replay.body, &replay.trailers), (&first.body, &trailers));
    assert_eq!(replay.headers.get_all("link").iter().collect::<Vec<_>>(), ["</a>, </b>", "</c>"]);
    assert_eq!((replay.header("location"), replay.header("etag")), (Some("/payments/7"), Some("\"7\"")));
    for name in ["set-cookie", "date", "connection", "x-hop", "content-length"] {
        assert_eq!(replay.header(name), None, "{name}");
    }
    assert_eq!(replay.header("trailer"), Some("grpc-status"));
}

#[tokio::test(start_paused = true)]
async fn a_long_answer_is_passed_on_but_its_end_is_held_back_until_it_is_recorded() {
    let (app, feeds) = feeding(Settings::default());
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("one ");
    let asked = Instant::now();
    let mut first = first.await.unwrap();
    assert_eq!(asked.elapsed(), Duration::from_millis(999), "the beginning is shown after stream_after");
    assert_eq!(next_data(&mut first).await, "one ");
    feed.data("two");
    assert_eq!(next_data(&mut first).await, "two", "chunked: no data is held back");
    app.store.down.store(true, Ordering::SeqCst);
    drop(feed);
    let mut end = Box::pin(first.body_mut().frame());
    assert!(end.as_mut().now_or_never().is_none());
    sleep(secs(1)).await;
    assert!(end.as_mut().now_or_never().is_none(), "the end waits for the record");
    app.store.down.store(false, Ordering::SeqCst);
    assert!(end.await.is_none());
    let replay = seen(app.send(post("k", "")).await).await;
    assert_eq!((&replay.body[..], replay.replayed()), (&b"one two"[..], true));
}

#[tokio::test(start_paused = true)]
async fn under_a_known_length_the_last_bytes_are_held_back() {
    let (app, feeds) = feeding_with(Settings::default(), |headers| {
        headers.insert("content-length", HeaderValue::from_static("7"));
    });
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("one ");
    let mut first = first.await.unwrap();
    assert_eq!(next_data(&mut first).await, "one ");
    app.store.down.store(true, Ordering::SeqCst);
    feed.data("two");
    drop(feed);
    let mut rest = Box::pin(first.body_mut().frame());
    sleep(secs(1)).await;
    assert!(rest.as_mut().now_or_never().is_none(), "the last bytes wait for the record");
    app.store.down.store(false, Ordering::SeqCst);
    assert_eq!(rest.await.unwrap().unwrap().into_data().unwrap(), "two");
}

#[tokio::test(start_paused = true)]
async fn record_grace_bounds_how_long_the_end_is_held_back() {
    let (app, feeds) = feeding(Settings::default());
    let first = app.start(post("k", ""));
    sleep(secs(2)).await;
    let mut first = first.await.unwrap();
    app.store.down.store(true, Ordering::SeqCst);
    feeds.lock().await.clear();
    let asked = Instant::now();
    assert!(first.body_mut().frame().await.is_none());
    assert_eq!(asked.elapsed(), secs(2));
}

#[tokio::test(start_paused = true)]
async fn events_are_passed_on_at_once() {
    let (app, feeds) = feeding_with(Settings::default(), |headers| {
        headers.insert("content-type", HeaderValue::from_static("text/event-stream; charset=utf-8"));
    });
    let asked = Instant::now();
    let mut first = app.send(post("k", "")).await;
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("data: 1\n\n");
    assert_eq!(next_data(&mut first).await, "data: 1\n\n");
    assert_eq!(asked.elapsed(), Duration::ZERO);
    drop(feed);
    assert!(first.body_mut().frame().await.is_none());
    assert_eq!(seen(app.send(post("k", "")).await).await.body, "data: 1\n\n");
}

#[tokio::test(start_paused = true)]
async fn while_an_answer_flows_the_lease_is_renewed() {
    let (app, feeds) = feeding(Settings::default());
    let mut first = app.send(post("k", "")).await;
    let feed = feeds.lock().await.pop().unwrap();
    for _ in 0..20 {
        sleep(secs(50)).await;
        feed.data(".");
        assert_eq!(next_data(&mut first).await, ".");
        assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("request-in-progress"));
    }
    drop(feed);
    assert!(first.body_mut().frame().await.is_none());
    assert_eq!(seen(app.send(post("k", "")).await).await.body.len(), 20);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_late_head_leaves_its_answer_the_lease_it_needs() {
    let app = App::new(Config::default(), |run, _| {
        async move {
            sleep(secs(58)).await;
            let (feed, response) = fed(200);
            tokio::spawn(async move {
                sleep(secs(30)).await;
                feed.data(format!("run {run}"));
            });
            response
        }
        .boxed()
    });
    let first = app.start(post("k", ""));
    // The lease of the claim ends at 75 s, and the answer at 88 s.
    sleep(secs(80)).await;
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("request-in-progress"));
    assert_eq!(seen(first.await.unwrap()).await.body, "run 1");
    assert!(seen(app.send(post("k", "")).await).await.replayed());
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_not_recorded_may_not_pause_for_ever_either() {
    for status in [500, 502] {
        let feeds = Arc::new(Mutex::new(Vec::new()));
        let given = Arc::clone(&feeds);
        let app = App::new(Config::default(), move |_, _| {
            let given = Arc::clone(&given);
            async move {
                let (feed, response) = fed(status);
                given.lock().await.push(feed);
                response
            }
            .boxed()
        });
        let mut answer = app.send(post("k", "")).await;
        let feed = feeds.lock().await.pop().unwrap();
        // A caller that is busy for longer than the pause that is allowed is not the answer's fault.
        feed.data("one");
        assert_eq!(next_data(&mut answer).await, "one");
        sleep(secs(70)).await;
        feed.data("two");
        assert_eq!(next_data(&mut answer).await, "two");
        let asked = Instant::now();
        assert!(answer.body_mut().frame().await.unwrap().is_err(), "{status}");
        assert_eq!(asked.elapsed(), secs(60));
    }
}

#[tokio::test(start_paused = true)]
async fn http_1_0_has_no_end_to_hold_back_and_is_sent_whole_answers() {
    let (app, feeds) = feeding(Settings::default());
    let mut request = post("k", "");
    *request.version_mut() = http::Version::HTTP_10;
    let first = app.start(request);
    sleep(secs(5)).await;
    assert!(!first.is_finished(), "its beginning would look like all of it");
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("one ");
    feed.data("two");
    drop(feed);
    assert_eq!(seen(first.await.unwrap()).await.body, "one two");
}

#[tokio::test(start_paused = true)]
async fn an_answer_over_the_limit_leaves_the_mark_before_its_first_excess_byte_is_seen() {
    let settings = Settings { response_body_bytes_max: 8, ..Settings::default() };
    let (app, feeds) = feeding(settings);
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("12345678");
    feed.data("9");
    let mut first = first.await.unwrap();
    let copy = seen(app.send(post("k", "")).await).await;
    assert_eq!(
        (copy.status, copy.refused()),
        (409, Some("response-not-kept")),
        "before the end of the answer"
    );
    assert_eq!(copy.problem()["original_status"], 200);
    assert_eq!(next_data(&mut first).await, "123456789");
    feed.data("more");
    drop(feed);
    assert_eq!(seen(first).await.body, "more");
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_does_not_wait_for_who_still_reads_what_is_marked_as_done() {
    let settings = Settings { response_body_bytes_max: 8, ..Settings::default() };
    let (app, feeds) = feeding(settings);
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("123456789");
    let mut first = first.await.unwrap();
    let asked = Instant::now();
    app.layer.drained().await;
    assert_eq!(asked.elapsed(), Duration::ZERO);
    assert_eq!(next_data(&mut first).await, "123456789", "and still reads");
    feed.data("more");
    drop(feed);
    assert_eq!(seen(first).await.body, "more");
}

#[tokio::test(start_paused = true)]
async fn an_announced_length_over_the_limit_is_marked_before_anything_is_passed_on() {
    let settings = Settings { response_body_bytes_max: 8, ..Settings::default() };
    let (app, feeds) = feeding_with(settings, |headers| {
        headers.insert("content-length", HeaderValue::from_static("9"));
    });
    let first = app.send(post("k", "")).await;
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("response-not-kept"));
    let feed = feeds.lock().await.pop().unwrap();
    feed.data("123456789");
    drop(feed);
    assert_eq!(seen(first).await.body, "123456789");
}

#[tokio::test(start_paused = true)]
async fn without_its_caller_an_endless_answer_is_marked_as_done_after_one_more_lease() {
    let (app, feeds) = feeding(Settings::default());
    let first = app.send(post("k", "")).await;
    drop(first);
    let feed = feeds.lock().await.pop().unwrap();
    for _ in 0..8 {
        feed.data(".");
        assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("request-in-progress"));
        sleep(secs(9)).await;
    }
    sleep(secs(4)).await;
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("response-not-kept"));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_breaks_or_pauses_is_left_to_its_lease() {
    // Before anything was passed on: a refusal. Afterwards: a broken answer, never a shorter one.
    let (app, feeds) = feeding(Settings::default());
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(1)).await;
    feeds.lock().await.pop().unwrap().fail();
    let first = seen(first.await.unwrap()).await;
    assert_eq!((first.status, first.refused()), (502, Some("upstream-lost")));
    assert_eq!(seen(app.send(post("k", "")).await).await.status, 409);

    let mut broken = app.send(post("k2", "")).await;
    feeds.lock().await.pop().unwrap().fail();
    assert!(broken.body_mut().frame().await.unwrap().is_err());

    let mut paused = app.send(post("k3", "")).await;
    let asked = Instant::now();
    assert!(paused.body_mut().frame().await.unwrap().is_err());
    assert_eq!(asked.elapsed(), secs(59));
    assert_eq!(seen(app.send(post("k3", "")).await).await.status, 409);
}

// ---- 3.6: when the outcome cannot be recorded ----

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_the_caller_gets_the_answer_and_the_record_is_made_later() {
    let app = slow();
    let first = app.start(post("k", ""));
    sleep(Duration::from_millis(500)).await;
    app.store.down.store(true, Ordering::SeqCst);
    let asked = Instant::now();
    let first = seen(first.await.unwrap()).await;
    assert_eq!((&first.body[..], asked.elapsed()), (&b"run 1"[..], Duration::from_millis(2_500)));
    sleep(secs(30)).await;
    app.store.down.store(false, Ordering::SeqCst);
    sleep(secs(2)).await;
    assert!(seen(app.send(post("k", "")).await).await.replayed());
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_lost_its_lease_never_overwrites() {
    // The store's clock jumps, as when the holder was suspended: another instance takes over.
    let jumped = Arc::new(std::sync::atomic::AtomicI64::new(0));
    let clock = Arc::clone(&jumped);
    let started = Instant::now();
    let inner = onlyonce_core::MemoryStore::with_clock(move || {
        onlyonce_core::Timestamp(clock.load(Ordering::SeqCst)).plus(started.elapsed())
    });
    let store = support::TestStore { inner, down: Arc::default() };
    let release = Arc::new(Notify::new());
    let held = Arc::clone(&release);
    let stalled = App::on(store.clone(), Config::default(), move |_, _| {
        let held = Arc::clone(&held);
        async move {
            held.notified().await;
            text(200, "from the stalled holder")
        }
        .boxed()
    });
    let other = App::on(store, Config::default(), |_, _| async { text(200, "from the successor") }.boxed());
    let first = stalled.start(post("k", ""));
    sleep(secs(1)).await;
    jumped.store(75_000, Ordering::SeqCst);
    assert_eq!(seen(other.send(post("k", "")).await).await.body, "from the successor");
    release.notify_one();
    assert_eq!(seen(first.await.unwrap()).await.body, "from the stalled holder", "the real answer");
    assert_eq!(seen(stalled.send(post("k", "")).await).await.body, "from the successor");
}

#[tokio::test(start_paused = true)]
async fn an_answer_whose_body_panics_is_cut_off_and_left_to_its_lease() {
    let app = App::new(Config::default(), |_, _| {
        async {
            let frames = futures_util::stream::once(async {
                sleep(secs(2)).await;
                panic!("in the middle of the answer")
            });
            let mut response = text(200, "");
            *response.body_mut() = http_body_util::StreamBody::new(frames).boxed_unsync();
            response
        }
        .boxed()
    });
    let mut first = app.send(post("k", "")).await;
    assert!(first.body_mut().frame().await.unwrap().is_err(), "a cut answer must not look whole");
    assert_eq!(seen(app.send(post("k", "")).await).await.refused(), Some("request-in-progress"));
    sleep(secs(75)).await;
    app.start(post("k", ""));
    sleep(secs(1)).await;
    assert_eq!(app.runs(), 2);
}

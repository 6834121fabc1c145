//! What a server sees of a call, byte for byte, while it misbehaves by script.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::{Extensions, HeaderValue};
use onlyonce_client::{
    Because, BudgetSettings, Client, Error, GaveUp, IDEMPOTENCY_KEY, Key, Keyless, Receipt, Settings, Work,
    http, layered, mint,
};
use reqwest_middleware::{ClientWithMiddleware, Middleware, Next};
use support::{Server, Step, answer, created, faults, once, quick, refusal, replayed};

/// Where nobody listens. A port that was free a moment ago may be another test's by now.
const NOBODY: &str = "http://127.0.0.1:9/";

fn client() -> Client {
    Client::new(quick()).unwrap()
}

fn middleware() -> ClientWithMiddleware {
    layered(http().unwrap(), quick()).unwrap().build()
}

fn gave_up(error: Error) -> GaveUp {
    match error {
        Error::GaveUp(gave_up) => *gave_up,
        other => panic!("not given up: {other:?}"),
    }
}

/// What a middleware error holds.
fn own(error: &reqwest_middleware::Error) -> &Error {
    Error::of(error).unwrap_or_else(|| panic!("not ours: {error:?}"))
}

#[tokio::test]
async fn every_fault_alone_is_one_effect_under_one_key() {
    let client = client();
    let tries = faults().into_iter().map(|fault| {
        let client = client.clone();
        async move {
            let server = Server::start([fault.clone(), Step::Work(replayed())]);
            let answer = client.post(server.url()).body("amount=10").send().await;
            let answer = answer.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
            assert_eq!((answer.status.as_u16(), &*answer.body), (201, &b"paid"[..]), "{fault:?}");
            assert_eq!((answer.receipt.attempts, answer.receipt.replayed), (2, true), "{fault:?}");
            assert_eq!(server.requests().len(), 2, "{fault:?}");
            assert_eq!(server.requests()[1].body, b"amount=10");
            let key = server.assert_one_operation();
            assert_eq!(answer.receipt.key.unwrap().as_str(), key);
        }
    });
    futures(tries).await;
}

#[tokio::test]
async fn every_fault_in_a_row_is_one_effect_under_one_key() {
    let script = || faults().into_iter().chain([Step::Work(replayed())]);
    let server = Server::start(script());
    let answer = client().post(server.url()).body("amount=10").send().await.unwrap();
    assert_eq!(answer.status, 201);
    assert_eq!(server.requests().len(), faults().len() + 1);
    server.assert_one_operation();

    let server = Server::start(script());
    let response = middleware().post(server.url()).body("amount=10").send().await.unwrap();
    assert_eq!(response.status(), 201);
    assert_eq!(response.url().as_str(), server.url());
    let receipt = Receipt::of(&response).unwrap().clone();
    assert_eq!(receipt.attempts as usize, faults().len() + 1);
    assert!(receipt.replayed);
    assert_eq!(response.headers()["location"], "/payments/7");
    assert!(response.remote_addr().is_some(), "what reqwest knows of a response stays");
    assert_eq!(response.text().await.unwrap(), "paid");
    assert_eq!(receipt.key.unwrap().as_str(), server.assert_one_operation());
}

#[tokio::test]
async fn the_deadline_ends_a_call_and_the_key_goes_on() {
    // A wait beyond the deadline ends the call at once, so that no attempt is cut off by it.
    let limited = answer("429 Too Many Requests", "retry-after: 90\r\n", "");
    let no_store = "onlyonce-refused: store-unavailable\r\nretry-after: 90\r\n";
    let cases = [
        (Step::Drop, Work::MayBeDone),
        (Step::WorkAndStall(Duration::from_secs(60)), Work::MayBeDone),
        (Step::WorkAndCut("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx".into()), Work::MayBeDone),
        (Step::Say(answer_of("503 Service Unavailable")), Work::MayBeDone),
        (Step::Say(refusal("409 Conflict", "request-in-progress", "")), Work::MayBeDone),
        (Step::Say(limited), Work::NotDone),
        (Step::Say(answer("503 Service Unavailable", no_store, "")), Work::NotDone),
    ];
    futures(cases.into_iter().map(|(fault, work)| async move {
        let server = Server::start([fault.clone()]);
        let mut settings = quick();
        settings.deadline = Duration::from_secs(2);
        settings.attempt_timeout = Duration::from_secs(20);
        settings.backoff_max = Duration::from_millis(300);
        let client = Client::new(settings).unwrap();
        let started = Instant::now();
        let error = client.post(server.url()).body("amount=10").send().await.unwrap_err();
        assert!(started.elapsed() < Duration::from_secs(15), "{fault:?}: {:?}", started.elapsed());
        assert_eq!(error.work(), work, "{fault:?}");
        assert_eq!(error.key().unwrap().as_str(), server.requests()[0].key(), "{fault:?}");
        assert!(error.to_string().contains(&server.requests()[0].key()), "{error}");
        assert_eq!(gave_up(error).because, Because::Deadline, "{fault:?}");
    }))
    .await;
}

#[tokio::test]
async fn nothing_reached_means_nothing_done() {
    let mut settings = quick();
    settings.deadline = Duration::from_millis(900);
    settings.backoff_first = Duration::from_millis(100);
    settings.backoff_max = Duration::from_secs(10);
    let client = Client::new(settings).unwrap();
    let error = client.post(NOBODY).send().await.unwrap_err();
    assert_eq!(error.work(), Work::NotDone);
    let gave_up = gave_up(error);
    assert_eq!(gave_up.because, Because::Deadline);
    assert!(gave_up.attempts > 1, "it was worth another try");
}

#[tokio::test]
async fn a_retry_after_is_met_in_both_forms_but_not_for_years() {
    let soon = "retry-after: Wed, 21 Oct 2026 07:00:01 GMT\r\ndate: Wed, 21 Oct 2026 07:00:00 GMT\r\n";
    for after in ["retry-after: 1\r\n", soon] {
        let server =
            Server::start([Step::Say(answer("503 Service Unavailable", after, "")), Step::Work(created())]);
        let started = Instant::now();
        client().post(server.url()).send().await.unwrap();
        assert!(started.elapsed() >= Duration::from_secs(1), "{after}: {:?}", started.elapsed());
    }
    for after in ["retry-after: 99999999999\r\n", "retry-after: Mon, 21 Oct 2965 07:00:00 GMT\r\n"] {
        let server = Server::start([Step::Say(answer("503 Service Unavailable", after, ""))]);
        let mut settings = quick();
        settings.deadline = Duration::from_secs(50);
        let started = Instant::now();
        let error = Client::new(settings).unwrap().post(server.url()).send().await.unwrap_err();
        assert_eq!(gave_up(error).because, Because::Deadline, "a wait in vain is not waited");
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
        assert_eq!(server.requests().len(), 1);

        let server =
            Server::start([Step::Say(answer("503 Service Unavailable", after, "")), Step::Work(created())]);
        let mut settings = quick();
        settings.retry_after_max = Duration::from_millis(10);
        Client::new(settings).unwrap().post(server.url()).send().await.unwrap();
    }
}

/// Changes whatever passes, as an application's own layers may.
struct Busybody;

#[async_trait::async_trait]
impl Middleware for Busybody {
    async fn handle(
        &self,
        mut request: reqwest::Request,
        extensions: &mut Extensions,
        next: Next<'_>,
    ) -> reqwest_middleware::Result<reqwest::Response> {
        request.headers_mut().insert("x-seen", HeaderValue::from_static("yes"));
        request.headers_mut().entry(IDEMPOTENCY_KEY).or_insert(HeaderValue::from_static("busybody"));
        next.run(request, extensions).await
    }
}

#[tokio::test]
async fn a_callers_own_key_survives_every_layer_and_attempt() {
    let script = || [Step::WorkAndDrop, Step::Say(answer("500 Oh", "", "")), Step::Work(replayed())];
    // A default of the HTTP client is not a key that the caller chose for this call.
    let defaults = [(IDEMPOTENCY_KEY, HeaderValue::from_static("default"))].into_iter().collect();
    let http = http().unwrap().default_headers(defaults);
    let middleware = layered(http, quick()).unwrap().with(Busybody).build();
    for value in ["order-4711", "\"order 4711\"", "order 4711"] {
        let server = Server::start(script());
        client().post(server.url()).header(IDEMPOTENCY_KEY, value).key(mint()).send().await.unwrap();
        assert_eq!(server.assert_one_operation(), value);

        let server = Server::start(script());
        let call = middleware.post(server.url()).header(IDEMPOTENCY_KEY, value).with_extension(mint());
        let response = call.send().await.unwrap();
        assert_eq!(server.assert_one_operation(), value);
        assert!(server.requests().iter().all(|request| request.lines("x-seen") == ["yes"]));
        let key = Receipt::of(&response).unwrap().key.clone().unwrap();
        assert_eq!(key.as_str(), value.trim_matches('"'));
    }
    for key in [mint(), Key::new("order-4711").unwrap()] {
        let server = Server::start(script());
        client().post(server.url()).key(key.clone()).send().await.unwrap();
        assert_eq!(server.assert_one_operation(), key.as_str());
        let server = Server::start(script());
        middleware.post(server.url()).with_extension(key.clone()).send().await.unwrap();
        assert_eq!(server.assert_one_operation(), key.as_str());
    }
    // A caller's key counts on every method.
    let server = Server::start(script());
    client().put(server.url()).header(IDEMPOTENCY_KEY, "k").send().await.unwrap();
    assert_eq!(server.assert_one_operation(), "k");
}

#[tokio::test]
async fn a_key_that_cannot_be_read_is_not_sent() {
    let server = Server::start([Step::Work(created())]);
    let call = client().post(server.url()).header(IDEMPOTENCY_KEY, "a").header(IDEMPOTENCY_KEY, "b");
    assert!(matches!(call.send().await, Err(Error::Key(_))));
    let error = middleware().post(server.url()).header(IDEMPOTENCY_KEY, "").send().await.unwrap_err();
    assert!(matches!(own(&error), Error::Key(_)));
    assert_eq!(server.requests(), []);
}

#[tokio::test]
async fn two_operations_never_share_a_key() {
    let server = Server::start([Step::WorkAndDrop, Step::Work(replayed()), Step::Work(created())]);
    let (client, middleware) = (client(), middleware());
    let call = client.post(server.url()).body("amount=10");
    let request = middleware.post(server.url()).body("amount=10");
    for _ in 0..3 {
        call.clone().send().await.unwrap();
        request.try_clone().unwrap().send().await.unwrap();
        middleware.execute(request.try_clone().unwrap().build().unwrap()).await.unwrap();
    }
    // Extensions that are used again carry nothing from one call to the next.
    let mut extensions = Extensions::new();
    for _ in 0..2 {
        let request = request.try_clone().unwrap().build().unwrap();
        middleware.execute_with_extensions(request, &mut extensions).await.unwrap();
    }
    let keys: HashSet<_> = server.requests().iter().map(|request| request.key()).collect();
    assert_eq!(keys.len(), 11);
    assert_eq!(server.effects().len(), 11);
}

#[tokio::test]
async fn clones_are_one_operation_if_they_are_told_so() {
    let server = Server::start([Step::Work(created())]);
    let call = client().post(server.url()).key(mint());
    let (first, second) = tokio::join!(call.clone().send(), call.send());
    assert_eq!(first.unwrap().receipt.key, second.unwrap().receipt.key);
    assert_eq!(server.effects().len(), 1);

    let server = Server::start([Step::Work(created())]);
    let call = middleware().post(server.url()).with_extension(mint());
    call.try_clone().unwrap().send().await.unwrap();
    call.send().await.unwrap();
    assert_eq!(server.effects().len(), 1);

    // The same intent is the same operation, also from another client.
    let server = Server::start([Step::Work(created())]);
    for intent in ["order-4711", "order-4711", "order-4712"] {
        client().post(server.url()).intent(intent).send().await.unwrap();
    }
    assert_eq!(server.effects().len(), 2);
}

#[tokio::test]
async fn a_post_without_a_key_is_sent_once_whatever_becomes_of_it() {
    let redirects = ["301 Moved", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"]
        .map(|status| Step::Say(answer(status, "location: /elsewhere\r\n", "")));
    for fault in faults().into_iter().chain(redirects) {
        let server = Server::start([fault.clone(), Step::Work(created())]);
        let _ = client().post(server.url()).body("amount=10").keyless().send().await;
        assert_eq!(server.requests().len(), 1, "{fault:?}");
        assert!(server.requests()[0].lines("idempotency-key").is_empty());

        let server = Server::start([fault.clone(), Step::Work(created())]);
        let _ = middleware().post(server.url()).body("amount=10").with_extension(Keyless).send().await;
        assert_eq!(server.requests().len(), 1, "{fault:?}");
    }
    let server = Server::start([Step::WorkAndDrop]);
    let error = client().post(server.url()).keyless().send().await.unwrap_err();
    assert_eq!((error.key(), error.work()), (None, Work::MayBeDone));
    assert_eq!(gave_up(error).because, Because::NotRepeatable);
    // Its answer is the caller's, whatever it is.
    let server = Server::start([Step::Work(answer("503 Service Unavailable", "", "busy"))]);
    let answer = client().post(server.url()).keyless().send().await.unwrap();
    assert_eq!((answer.status.as_u16(), &*answer.body), (503, &b"busy"[..]));
}

/// The server closes an idle connection just when the next request takes it from the pool.
#[tokio::test]
async fn a_stale_connection_is_no_second_sending() {
    let client = client();
    for _ in 0..20 {
        let server = Server::start([Step::SayAndClose(created()), Step::WorkAndDrop, Step::Work(created())]);
        client.post(server.url()).keyless().send().await.unwrap();
        tokio::time::sleep(Duration::from_millis(45)).await;
        let _ = client.post(server.url()).keyless().send().await;
        assert!(server.requests().len() <= 2, "{:#?}", server.requests());
        assert!(server.effects().len() <= 1);
    }
}

/// In HTTP/2 a server can say that it did not look at a request, and libraries like to repeat it then.
#[tokio::test]
async fn a_stream_that_is_refused_is_no_second_sending_without_a_key() {
    const REFUSED_STREAM: [u8; 4] = [0, 0, 0, 7];
    let reset = |stream: [u8; 4]| frame(3, 0, stream, &REFUSED_STREAM);
    let go_away = |_: [u8; 4]| frame(7, 0, [0; 4], &[0; 8]);
    for says in [reset as fn([u8; 4]) -> Vec<u8>, go_away] {
        let (addr, heads) = http2(says);
        let mut settings = quick();
        settings.deadline = Duration::from_millis(500);
        let client = Client::with_http(http().unwrap().http2_prior_knowledge(), settings).unwrap();
        let error = client.post(format!("http://{addr}/")).keyless().send().await.unwrap_err();
        assert_eq!(gave_up(error).because, Because::NotRepeatable);
        assert_eq!(heads.load(Ordering::SeqCst), 1);
        client.post(format!("http://{addr}/")).send().await.unwrap_err();
        assert!(heads.load(Ordering::SeqCst) > 2, "with a key it is repeated");
    }
}

fn frame(kind: u8, flags: u8, stream: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags], &stream[..], payload].concat()
}

/// Speaks as much HTTP/2 as it takes to answer every request with this, and counts the requests.
fn http2(says: fn([u8; 4]) -> Vec<u8>) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const ACK: u8 = 1;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (addr, heads) = (listener.local_addr().unwrap(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&heads);
    let serve = move |mut stream: std::net::TcpStream| -> std::io::Result<()> {
        stream.read_exact(&mut [0; 24])?;
        stream.write_all(&frame(SETTINGS, 0, [0; 4], &[]))?;
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head)?;
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            stream.read_exact(&mut payload)?;
            match (head[3], head[4] & ACK) {
                (SETTINGS, 0) => stream.write_all(&frame(SETTINGS, ACK, [0; 4], &[]))?,
                (HEADERS, _) => {
                    counted.fetch_add(1, Ordering::SeqCst);
                    stream.write_all(&says([head[5], head[6], head[7], head[8]]))?;
                }
                _ => {}
            }
        }
    };
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            std::thread::spawn(move || serve(stream));
        }
    });
    (addr, heads)
}

#[tokio::test]
async fn what_is_idempotent_by_its_method_is_sent_again_without_a_key() {
    for method in [
        reqwest::Method::GET,
        reqwest::Method::HEAD,
        reqwest::Method::OPTIONS,
        reqwest::Method::PUT,
        reqwest::Method::DELETE,
    ] {
        let server = Server::start([
            Step::Drop,
            Step::Say(answer("503 Oh", "", "")),
            Step::Say(answer("200 OK", "", "")),
        ]);
        let answer = client().call(method.clone(), server.url()).send().await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.receipt.attempts), (200, 3), "{method}");
        assert_eq!(answer.receipt.key, None);
        let server =
            Server::start([Step::Drop, Step::Say(answer_of("503 Oh")), Step::Say(answer_of("200 OK"))]);
        let response = middleware().request(method.clone(), server.url()).send().await.unwrap();
        assert_eq!(response.status(), 200, "{method}");
        assert!(server.requests().iter().all(|request| request.lines("idempotency-key").is_empty()));
    }
    // When no retry helps, the last answer is passed on.
    let server = Server::start([Step::Say(answer_of("503 Oh"))]);
    let mut settings = quick();
    settings.deadline = Duration::from_millis(100);
    assert_eq!(Client::new(settings).unwrap().get(server.url()).send().await.unwrap().status, 503);
}

fn answer_of(status: &str) -> String {
    answer(status, "", "")
}

#[tokio::test]
async fn an_applications_own_answer_is_final() {
    for status in [
        "200 OK",
        "204 No Content",
        "304 Not Modified",
        "400 Bad Request",
        "401 Unauthorized",
        "402 Payment Required",
        "404 Not Found",
        "409 Conflict",
        "412 No",
        "422 No",
        "501 No",
    ] {
        let body = if status.starts_with("204") || status.starts_with("304") {
            ""
        } else {
            r#"{"error": "sold out"}"#
        };
        let said = if body.is_empty() {
            format!("HTTP/1.1 {status}\r\n\r\n")
        } else {
            answer(status, "content-type: application/json\r\n", body)
        };
        let server = Server::start([Step::Work(said)]);
        let answer = client().post(server.url()).send().await.unwrap();
        assert!(status.starts_with(answer.status.as_str()), "{status}: {answer:?}");
        assert_eq!((&*answer.body, answer.receipt.replayed), (body.as_bytes(), false));
        let response = middleware().post(server.url()).send().await.unwrap();
        assert!(status.starts_with(response.status().as_str()));
        assert_eq!(server.requests().len(), 2, "{status}");
    }
    let server = Server::start([Step::Work(answer("500 Oh", "stripe-should-retry: false\r\n", ""))]);
    assert_eq!(client().post(server.url()).send().await.unwrap().status, 500);
}

#[tokio::test]
async fn a_replay_is_final_and_the_caller_sees_it() {
    for status in ["200 OK", "402 Payment Required", "409 Conflict", "429 Too Many", "500 Oh", "503 Oh"] {
        let server = Server::start([Step::Work(answer(status, "idempotent-replayed: true\r\n", ""))]);
        let answer = client().post(server.url()).send().await.unwrap();
        assert!(answer.receipt.replayed);
        let response = middleware().post(server.url()).send().await.unwrap();
        assert!(Receipt::of(&response).unwrap().replayed);
        assert_eq!(server.requests().len(), 2, "{status}");
    }
}

#[tokio::test]
async fn a_refusal_of_the_key_is_an_error_that_says_what_differs() {
    let reused = refusal("422 Unprocessable Content", "idempotency-key-reused", r#", "differs": ["body"]"#);
    let stripe = answer(
        "400 Bad Request",
        "content-type: application/json\r\n",
        r#"{"error": {"type": "idempotency_error", "message": "Keys for idempotent requests ..."}}"#,
    );
    let not_kept = refusal("409 Conflict", "response-not-kept", r#", "original_status": 201"#);
    for (said, code, differs, work) in [
        (reused, "idempotency-key-reused", &["body"][..], Work::NotDone),
        (
            refusal("400 Bad Request", "idempotency-key-missing", ""),
            "idempotency-key-missing",
            &[],
            Work::NotDone,
        ),
        (refusal("409 Conflict", "outcome-unknown", ""), "outcome-unknown", &[], Work::MayBeDone),
        (not_kept, "response-not-kept", &[], Work::Done),
        (stripe, "idempotency_error", &[], Work::NotDone),
    ] {
        let server = Server::start([Step::Say(said)]);
        let error = client().post(server.url()).send().await.unwrap_err();
        assert_eq!(error.work(), work);
        assert!(error.to_string().contains(code), "{error}");
        let Error::Refused(refused) = error else { panic!("{error:?}") };
        assert_eq!(
            (&*refused.code, &*refused.differs),
            (code, differs.iter().map(ToString::to_string).collect::<Vec<_>>().as_slice())
        );
        assert_eq!(refused.original_status, (code == "response-not-kept").then_some(201));
        let error = middleware().post(server.url()).send().await.unwrap_err();
        assert!(matches!(own(&error), Error::Refused(_)));
        assert_eq!(server.requests().len(), 2, "{code}");
    }
}

#[tokio::test]
async fn the_key_goes_along_within_its_origin_and_nowhere_else() {
    for status in ["307 Temporary Redirect", "308 Permanent Redirect"] {
        let other = Server::start([Step::Work(created())]);
        let away = Server::start([Step::Say(answer(status, &format!("location: {}\r\n", other.url()), ""))]);
        let answered = client().post(away.url()).body("amount=10").send().await.unwrap();
        assert!(answered.status.is_redirection(), "the caller decides");
        let response = middleware().post(away.url()).body("amount=10").send().await.unwrap();
        assert!(response.status().is_redirection());
        assert_eq!(other.requests(), []);

        // The redirect is part of the attempt: both are made again.
        let hop = answer(status, "location: /v2/payments\r\n", "");
        let home = Server::start([
            Step::Say(hop.clone()),
            Step::WorkAndDrop,
            Step::Say(hop),
            Step::Work(replayed()),
        ]);
        let answer = client()
            .post(home.url())
            .header("authorization", "Bearer t")
            .body("amount=10")
            .send()
            .await
            .unwrap();
        assert_eq!((answer.status.as_u16(), answer.receipt.attempts), (201, 2));
        assert_eq!(answer.url().path(), "/v2/payments");
        let requests = home.requests();
        let lines: Vec<_> = requests.iter().map(|request| &*request.line).collect();
        let [first, second] = ["POST /payments HTTP/1.1", "POST /v2/payments HTTP/1.1"];
        assert_eq!(lines, [first, second, first, second]);
        assert!(requests.iter().all(|r| r.body == b"amount=10" && r.lines("authorization") == ["Bearer t"]));
        let keys: HashSet<_> = requests.iter().map(|request| request.key()).collect();
        assert_eq!((keys.len(), home.effects().len()), (1, 1));
    }
}

#[tokio::test]
async fn a_303_is_read_without_the_key() {
    let other = Server::start([Step::Drop, Step::Say(answer("200 OK", "", "done"))]);
    let see = format!("location: {}\r\nidempotent-replayed: true\r\n", other.url());
    let home = Server::start([Step::Work(answer("303 See Other", &see, ""))]);
    let call =
        client().post(home.url()).header("authorization", "Bearer t").header("content-type", "text/plain");
    let answered = call.body("amount=10").send().await.unwrap();
    assert_eq!((&*answered.body, answered.receipt.attempts), (&b"done"[..], 2));
    assert!(answered.receipt.replayed, "the work itself was a replay");
    assert_eq!(home.assert_one_operation(), answered.receipt.key.unwrap().as_str());
    for request in other.requests() {
        assert_eq!(request.line, "GET /payments HTTP/1.1");
        for name in ["idempotency-key", "authorization", "content-type", "content-length"] {
            assert!(request.lines(name).is_empty(), "{name}: {request:?}");
        }
    }
    let hop = Step::Work(answer("303 See Other", "location: /payments/7\r\n", ""));
    let home = Server::start([hop, Step::Say(answer_of("200 OK"))]);
    client().post(home.url()).header("authorization", "Bearer t").body("amount=10").send().await.unwrap();
    let read = &home.requests()[1];
    assert_eq!((&*read.line, read.lines("authorization")), ("GET /payments/7 HTTP/1.1", vec!["Bearer t"]));
    assert!(read.lines("idempotency-key").is_empty(), "{read:?}");
}

#[tokio::test]
async fn a_redirect_that_turns_a_post_into_a_get_is_not_followed() {
    for status in ["301 Moved Permanently", "302 Found"] {
        let server = Server::start([Step::Say(answer(status, "location: /list\r\n", ""))]);
        let answer = client().post(server.url()).send().await.unwrap();
        assert!(answer.status.is_redirection());
        assert_eq!(server.requests().len(), 1);
    }
    // A GET goes along as ever, and not in circles for ever.
    let server = Server::start([Step::Say(answer("302 Found", "location: /list\r\n", ""))]);
    assert_eq!(client().get(server.url()).send().await.unwrap().status, 302);
    assert_eq!(server.requests().len(), 11);
}

/// The work was done when the 303 came: whatever its result is answered with says nothing about it.
#[tokio::test]
async fn after_a_303_the_work_may_be_done_whatever_comes_then() {
    let denied = Server::start([Step::Say(answer_of("401 Unauthorized"))]);
    let unverified = Server::start([Step::Say(refusal("401 Unauthorized", "caller-unverified", ""))]);
    for to in [NOBODY.to_owned(), denied.url(), unverified.url()] {
        let see = answer("303 See Other", &format!("location: {to}\r\nidempotent-replayed: true\r\n"), "");
        let home = Server::start([Step::Work(see)]);
        let mut settings = quick();
        settings.deadline = Duration::from_millis(1_500);
        match Client::new(settings).unwrap().post(home.url()).body("amount=10").send().await {
            Ok(answered) => assert_eq!(answered.status, 401, "{to}"),
            Err(error) => assert_eq!(error.work(), Work::MayBeDone, "{to}: {error}"),
        }
        home.assert_one_operation();
    }
}

#[tokio::test]
async fn nothing_is_sent_once_the_deadline_is_over() {
    let server = Server::start([Step::Work(created())]);
    let mut settings = quick();
    settings.deadline = Duration::from_nanos(1);
    let error = Client::new(settings).unwrap().post(server.url()).send().await.unwrap_err();
    assert_eq!((error.work(), gave_up(error).because), (Work::NotDone, Because::Deadline));
    assert_eq!(server.requests(), []);
}

/// Such as a list of what was refused, or a report about it.
#[tokio::test]
async fn a_success_is_the_answer_whatever_problem_it_speaks_of() {
    for code in ["request-in-progress", "store-unavailable", "response-not-kept"] {
        for status in ["200 OK", "201 Created", "302 Found"] {
            let server = Server::start([Step::Work(refusal(status, code, ""))]);
            let answer = client().post(server.url()).send().await.unwrap();
            assert!(status.starts_with(answer.status.as_str()), "{code}: {answer:?}");
            server.assert_one_operation();
            assert_eq!(server.requests().len(), 1);
        }
    }
}

#[tokio::test]
async fn an_interim_status_is_no_answer() {
    let odd = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: odd\r\n\r\n";
    let server = Server::start([Step::WorkAndCut(odd.into()), Step::Work(replayed())]);
    let answer = client().post(server.url()).body("amount=10").send().await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.receipt.attempts), (201, 2));
    server.assert_one_operation();
}

#[tokio::test]
async fn what_passes_by_itself_is_tried_again_and_nothing_was_done() {
    for said in [
        refusal("503 Service Unavailable", "not-committed", ""),
        refusal("503 Service Unavailable", "caller-unverified", ""),
        refusal("503 Service Unavailable", "store-unavailable", ""),
        refusal("502 Bad Gateway", "upstream-unreachable", ""),
        refusal("408 Request Timeout", "request-too-slow", ""),
    ] {
        let server = Server::start([Step::Say(said.clone()), Step::Work(created())]);
        let answer = client().post(server.url()).body("amount=10").send().await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.receipt.attempts), (201, 2), "{said}");
        let server = Server::start([Step::Say(said.clone())]);
        let error = Client::new(once()).unwrap().post(server.url()).send().await.unwrap_err();
        assert_eq!(error.work(), Work::NotDone, "{said}: {error}");
    }
}

/// A body that can be read once.
struct Once(Option<bytes::Bytes>);

impl http_body::Body for Once {
    type Data = bytes::Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, std::io::Error>>> {
        std::task::Poll::Ready(self.0.take().map(|bytes| Ok(http_body::Frame::data(bytes))))
    }
}

#[tokio::test]
async fn a_body_that_streams_is_frozen() {
    let server = Server::start([Step::WorkAndDrop, Step::Work(replayed())]);
    let stream = |bytes: &'static [u8]| reqwest::Body::wrap(Once(Some(bytes.into())));
    middleware().post(server.url()).body(stream(b"amount=10")).send().await.unwrap();
    assert!(server.requests().iter().all(|request| request.body == b"amount=10"));
    server.assert_one_operation();

    let mut settings = quick();
    settings.request_body_bytes_max = 8;
    let server = Server::start([Step::Work(created())]);
    let small = layered(http().unwrap(), settings).unwrap().build();
    let error = small.post(server.url()).body(stream(b"amount=10")).send().await.unwrap_err();
    assert!(matches!(own(&error), Error::Request { .. }), "{error:?}");
    assert_eq!(server.requests(), []);
}

#[tokio::test]
async fn an_answer_over_the_limit_is_given_up() {
    let mut settings = quick();
    settings.answer_body_bytes_max = 3;
    let server = Server::start([Step::Work(created())]);
    let error = Client::new(settings).unwrap().post(server.url()).send().await.unwrap_err();
    assert_eq!((error.work(), gave_up(error).because), (Work::MayBeDone, Because::AnswerTooLarge));
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn all_calls_of_a_client_share_one_retry_budget() {
    let server = Server::start([Step::Say(answer_of("503 Service Unavailable"))]);
    let mut settings = quick();
    settings.budget = BudgetSettings { retries_max: 3, retries_per_call: 0.0, retries_per_second: 0.0 };
    let client = Client::new(settings).unwrap();
    for _ in 0..5 {
        let error = client.clone().post(server.url()).send().await.unwrap_err();
        assert_eq!(gave_up(error).because, Because::Budget);
    }
    assert_eq!(server.requests().len(), 5 + 3);
    // Waiting for a first copy is not what a budget is against.
    let in_flight = Step::Say(refusal("409 Conflict", "request-in-progress", ""));
    let server = Server::start([in_flight.clone(), in_flight, Step::Work(replayed())]);
    client.post(server.url()).send().await.unwrap();
}

#[test]
fn settings_that_contradict_each_other_build_nothing() {
    let mut settings = Settings::default();
    settings.server_retention = settings.deadline;
    assert!(Client::new(settings.clone()).is_err());
    assert!(layered(http().unwrap(), settings).is_err());
}

/// Runs them at the same time.
async fn futures(futures: impl IntoIterator<Item = impl Future<Output = ()> + Send + 'static>) {
    let mut set: tokio::task::JoinSet<()> = futures.into_iter().collect();
    while let Some(joined) = set.join_next().await {
        joined.unwrap();
    }
}

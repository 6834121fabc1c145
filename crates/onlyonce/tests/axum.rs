//! An axum application, as a person writes it, over real connections.
#![allow(clippy::unwrap_used, missing_docs)]

mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::post as posting;
use onlyonce::{Builder, Caller, Execution, KeyRule, MemoryStore, OnlyonceLayer};
use tokio::net::TcpListener;
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use wire::{post, send, start};

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, app).into_future());
    addr
}

fn builder() -> Builder<OnlyonceLayer> {
    OnlyonceLayer::builder(MemoryStore::new()).caller(Caller::header("x-user-id"))
}

/// Work that is counted, and lasts until it is let go.
#[derive(Clone, Default)]
struct Payments {
    runs: Arc<AtomicUsize>,
    started: Arc<Notify>,
    go: Arc<Notify>,
}

impl Payments {
    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

async fn pay(State(payments): State<Payments>, body: String) -> (StatusCode, String) {
    let run = payments.runs.fetch_add(1, Ordering::SeqCst) + 1;
    payments.started.notify_one();
    payments.go.notified().await;
    (StatusCode::CREATED, format!("paid {body} in run {run}"))
}

#[tokio::test]
async fn a_caller_that_hangs_up_loses_nothing_and_its_retry_gets_the_answer() {
    let payments = Payments::default();
    let once = builder().build().unwrap();
    let app = Router::new().route("/payments", posting(pay)).layer(once).with_state(payments.clone());
    let to = serve(app).await;
    let first = start(to, post("/payments", Some("k"), "100"));
    timeout(PATIENCE, payments.started.notified()).await.unwrap();
    drop(first);
    // The server has time to notice.
    sleep(Duration::from_millis(100)).await;
    let busy = send(to, post("/payments", Some("k"), "100")).await;
    assert_eq!((busy.status, busy.refused()), (409, Some("request-in-progress")));
    payments.go.notify_one();
    let retried = async {
        loop {
            let retry = send(to, post("/payments", Some("k"), "100")).await;
            if retry.status != 409 {
                break retry;
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    let retry = timeout(PATIENCE, retried).await.unwrap();
    assert_eq!((retry.status, retry.text.as_str()), (201, "paid 100 in run 1"));
    assert!(retry.replayed());
    assert_eq!(payments.runs(), 1);
    let edited = send(to, post("/payments", Some("k"), "999")).await;
    assert_eq!((edited.status, edited.refused()), (422, Some("idempotency-key-reused")));
}

#[tokio::test]
async fn a_graceful_shutdown_waits_for_work_whose_caller_is_gone() {
    let payments = Payments::default();
    let once = builder().build().unwrap();
    let app = Router::new().route("/payments", posting(pay)).layer(once.clone()).with_state(payments.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let server = tokio::spawn(async move {
        let signal = async {
            let _ = stopped.await;
        };
        axum::serve(listener, app).with_graceful_shutdown(signal).await.unwrap();
        once.drained().await;
    });
    let first = start(to, post("/payments", Some("k"), "100"));
    timeout(PATIENCE, payments.started.notified()).await.unwrap();
    drop(first);
    stop.send(()).unwrap();
    sleep(Duration::from_millis(200)).await;
    assert!(!server.is_finished(), "the work is still running");
    payments.go.notify_one();
    timeout(PATIENCE, server).await.unwrap().unwrap();
}

/// What a handler is told about its operation.
async fn told(execution: Execution) -> String {
    let operation = &execution.operation;
    format!(
        "{} {} for {} as {}",
        execution.attempt,
        operation.key(),
        operation.caller(),
        execution.downstream("charge").uuid()
    )
}

async fn told_if_guarded(execution: Option<Execution>) -> String {
    execution.map_or("not guarded".into(), |execution| format!("key {}", execution.operation.key()))
}

#[tokio::test]
async fn a_handler_is_handed_its_operation() {
    let app = Router::new()
        .route("/told", posting(told).put(told))
        .route("/perhaps", posting(told_if_guarded))
        .layer(builder().build().unwrap());
    let to = serve(app).await;
    let guarded = send(to, post("/told", Some("order-4711"), "")).await;
    let charge = onlyonce::Operation::new(
        onlyonce::NAMESPACE_DEFAULT,
        "POST /told",
        "ann",
        onlyonce::Key::new("order-4711").unwrap(),
    )
    .downstream("charge")
    .uuid();
    assert_eq!(guarded.text, format!("1 order-4711 for ann as {charge}"));

    let keyless = send(to, post("/told", None, "")).await;
    assert_eq!((keyless.status, keyless.refused()), (400, Some("idempotency-key-missing")));
    assert_eq!(keyless.header("content-type"), Some("application/problem+json"));
    // PUT is guarded only where a rule says so: the application is wrong here, and not the client.
    let mut unguarded = post("/told", Some("order-4711"), "");
    *unguarded.method_mut() = http::Method::PUT;
    let unguarded = send(to, unguarded).await;
    assert_eq!((unguarded.status, unguarded.refused()), (500, None));

    assert_eq!(send(to, post("/perhaps", Some("k"), "")).await.text, "key k");
    assert_eq!(send(to, post("/perhaps", None, "")).await.text, "not guarded");
}

#[derive(Clone)]
struct User(u64);

/// Stands for the application's own authentication.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let user = request.headers().get("x-user-id").and_then(|user| match user.as_bytes() {
        b"ann" => Some(User(1)),
        b"bob" => Some(User(2)),
        _ => None,
    });
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

#[tokio::test]
async fn callers_come_from_the_applications_own_authentication() {
    let payments = Payments::default();
    let once = OnlyonceLayer::builder(MemoryStore::new())
        .caller(Caller::extension(|user: &User| user.0.to_string()))
        .build()
        .unwrap();
    let app = Router::new()
        .route("/payments", posting(pay))
        .layer(once)
        .layer(from_fn(authenticate))
        .with_state(payments.clone());
    let to = serve(app).await;
    let from = |user: &'static str| {
        let mut request = post("/payments", Some("k"), "100");
        request.headers_mut().insert("x-user-id", HeaderValue::from_static(user));
        payments.go.notify_one();
        send(to, request)
    };
    assert_eq!(from("ann").await.text, "paid 100 in run 1");
    assert_eq!(from("bob").await.text, "paid 100 in run 2", "the same key, and another operation");
    assert_eq!(from("ann").await.text, "paid 100 in run 1");
    let stranger = from("eve").await;
    assert_eq!((stranger.status, stranger.refused()), (400, Some("caller-unresolved")));
    assert!(!stranger.text.contains("User"), "no name of a type is told: {}", stranger.text);
    assert_eq!(payments.runs(), 2);
}

#[tokio::test]
async fn a_refusal_can_have_another_body_and_keeps_its_code() {
    let payments = Payments::default();
    let once = builder()
        .route("POST /payments", |rule| rule.key(KeyRule::Required))
        .refusal_body(|problem| {
            let body = format!(
                "<error code=\"{}\" status=\"{}\" differs=\"{}\">{}</error>",
                problem.code().as_str(),
                problem.status_code().as_u16(),
                problem.differs().join(" "),
                problem.code().title(),
            );
            (HeaderValue::from_static("application/xml"), body.into())
        })
        .build()
        .unwrap();
    let app = Router::new().route("/payments", posting(pay)).layer(once).with_state(payments.clone());
    let to = serve(app).await;
    let keyless = send(to, post("/payments", None, "100")).await;
    assert_eq!((keyless.status, keyless.refused()), (400, Some("idempotency-key-missing")));
    assert_eq!(keyless.header("content-type"), Some("application/xml"));
    assert_eq!(
        keyless.text,
        "<error code=\"idempotency-key-missing\" status=\"400\" differs=\"\">An Idempotency-Key is required</error>"
    );
    assert_eq!(keyless.header("content-length"), Some(keyless.text.len().to_string().as_str()));
    let first = start(to, post("/payments", Some("k"), "100"));
    timeout(PATIENCE, payments.started.notified()).await.unwrap();
    let busy = send(to, post("/payments", Some("k"), "100")).await;
    assert_eq!((busy.status, busy.refused()), (409, Some("request-in-progress")));
    assert!(busy.header("retry-after").is_some() && busy.text.starts_with("<error "), "{busy:?}");
    let edited = send(to, post("/payments", Some("k"), "999")).await;
    assert!(edited.text.contains("differs=\"body\""), "{edited:?}");
    drop(first);
}

#[tokio::test]
async fn around_nested_routers_the_whole_path_counts() {
    let payments = Payments::default();
    let routes = || Router::new().route("/payments", posting(pay));
    let app = Router::new()
        .nest("/v1", routes())
        .nest("/v2", routes())
        .layer(builder().route("POST /v2/{*rest}", |rule| rule.key(KeyRule::Required)).build().unwrap())
        .with_state(payments.clone());
    let to = serve(app).await;
    for (path, text) in [("/v1/payments", "paid 1 in run 1"), ("/v2/payments", "paid 1 in run 2")] {
        payments.go.notify_one();
        assert_eq!(send(to, post(path, Some("k"), "1")).await.text, text);
    }
    assert_eq!(send(to, post("/v2/payments", None, "1")).await.refused(), Some("idempotency-key-missing"));
}

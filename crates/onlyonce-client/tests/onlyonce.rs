//! The client against the layer of this project, over a real connection.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use http::StatusCode;
use onlyonce::{Config, OnlyonceLayer};
use onlyonce_client::{Client, Error, Key, Receipt, Work, http, layered};
use onlyonce_core::MemoryStore;
use support::quick;

/// A payments API behind the layer; payments take so long.
struct Api {
    url: String,
    effects: Arc<AtomicUsize>,
}

impl Api {
    async fn start(work: Duration) -> Self {
        let effects = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&effects);
        let pay = move |body: Bytes| async move {
            tokio::time::sleep(work).await;
            let number = counted.fetch_add(1, Ordering::SeqCst) + 1;
            let status = if body == "sold out" { StatusCode::CONFLICT } else { StatusCode::CREATED };
            (status, format!("{number}: {}", body.escape_ascii()))
        };
        let layer = OnlyonceLayer::new(Arc::new(MemoryStore::new()), Config::default()).unwrap();
        let app = Router::new().route("/payments", post(pay)).layer(layer);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/payments", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, effects }
    }

    fn effects(&self) -> usize {
        self.effects.load(Ordering::SeqCst)
    }
}

#[tokio::test]
async fn work_that_outlasts_an_attempt_is_waited_for_and_replayed() {
    let api = Api::start(Duration::from_millis(1_500)).await;
    let mut settings = quick();
    settings.attempt_timeout = Duration::from_millis(500);
    for (number, http) in [http().unwrap(), http().unwrap().http2_prior_knowledge()].into_iter().enumerate() {
        let client = Client::with_http(http, settings.clone()).unwrap();
        let answer = client.post(&api.url).body("10").send().await.unwrap();
        assert_eq!(answer.status, 201);
        assert_eq!(answer.body, format!("{}: 10", number + 1));
        assert!(answer.receipt.replayed);
        // A timeout, an answer that it is in flight, the replay.
        assert!(answer.receipt.attempts >= 3, "{answer:?}");
    }

    let middleware = layered(http().unwrap(), settings).unwrap().build();
    let response = middleware.post(&api.url).body("20").send().await.unwrap();
    assert_eq!(response.status(), 201);
    assert!(Receipt::of(&response).unwrap().replayed);
    assert_eq!(response.text().await.unwrap(), "3: 20");
    assert_eq!(api.effects(), 3);
}

#[tokio::test]
async fn a_key_with_another_request_is_refused_with_what_differs() {
    let api = Api::start(Duration::ZERO).await;
    let client = Client::new(quick()).unwrap();
    let key = Key::new("order 4711").unwrap();
    let first = client.post(&api.url).key(key.clone()).body("10").send().await.unwrap();
    assert!(!first.receipt.replayed);
    for (url, body, differs) in [
        (api.url.clone(), "20", &["body"][..]),
        (format!("{}?a=1", api.url), "10", &["target"]),
        (format!("{}?a=1", api.url), "20", &["target", "body"]),
    ] {
        let error = client.post(url).key(key.clone()).body(body).send().await.unwrap_err();
        assert_eq!(error.work(), Work::NotDone);
        let Error::Refused(refused) = error else { panic!("{error:?}") };
        assert_eq!((&*refused.code, refused.answer.status.as_u16()), ("idempotency-key-reused", 422));
        assert_eq!(refused.differs, differs);
        assert!(!refused.detail.is_empty());
    }
    let again = client.post(&api.url).key(key).body("10").send().await.unwrap();
    assert!(again.receipt.replayed);
    assert_eq!((again.body, api.effects()), (first.body, 1));
}

#[tokio::test]
async fn calls_with_one_intent_at_once_are_one_effect() {
    let api = Api::start(Duration::from_millis(300)).await;
    let client = Client::new(quick()).unwrap();
    let calls: tokio::task::JoinSet<_> =
        (0..8).map(|_| client.post(&api.url).intent("order-4711").body("10").send()).collect();
    for answer in calls.join_all().await {
        assert_eq!(answer.unwrap().body, "1: 10");
    }
    assert_eq!(api.effects(), 1);
}

#[tokio::test]
async fn an_applications_own_conflict_is_an_answer() {
    let api = Api::start(Duration::ZERO).await;
    let answer = Client::new(quick()).unwrap().post(&api.url).body("sold out").send().await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.receipt.attempts), (409, 1));
}

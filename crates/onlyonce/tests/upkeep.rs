//! What a layer does without being asked: its store does not grow for years.
#![allow(clippy::unwrap_used, missing_docs)]

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use onlyonce::{
    Failed, FunctionConfig, Key, MemoryStore, NAMESPACE_DEFAULT, Once, OnlyonceLayer, Operation, RequestBody,
    Store,
};
use onlyonce_core::Timestamp;
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};

/// A store whose clock is tokio's.
fn store() -> Arc<MemoryStore> {
    let started = Instant::now();
    Arc::new(MemoryStore::with_clock(move || Timestamp(1_000_000).plus(started.elapsed())))
}

async fn pay(layer: &OnlyonceLayer) {
    let work = |_: Request<RequestBody<Full<Bytes>>>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("paid")))
    };
    let request = Request::post("/payments").header("idempotency-key", "k").body(Full::from("100")).unwrap();
    assert_eq!(layer.layer(service_fn(work)).oneshot(request).await.unwrap().status(), 200);
}

async fn is_kept(store: &MemoryStore) -> bool {
    let payment = Operation::new(NAMESPACE_DEFAULT, "POST /payments", "", Key::new("k").unwrap());
    store.read(payment.id()).await.unwrap().is_some()
}

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test(start_paused = true)]
async fn expired_records_are_removed_unless_that_is_turned_off() {
    for every in [Some(Duration::from_secs(60)), None] {
        let store = store();
        let layer = OnlyonceLayer::builder(store.clone()).sweep_every(every).build().unwrap();
        pay(&layer).await;
        sleep(DAY - Duration::from_secs(61)).await;
        assert!(is_kept(&store).await);
        sleep(Duration::from_secs(150)).await;
        assert_eq!(is_kept(&store).await, every.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_function_removes_expired_records_as_well() {
    let store = store();
    let config = FunctionConfig { retention: Duration::from_secs(600), ..FunctionConfig::default() };
    let once = Once::new(store.clone(), "pay", config).unwrap();
    let key = Key::new("k").unwrap();
    once.run(key.clone(), "100", |_| async { Ok::<_, Failed>("paid".to_owned()) }).await.unwrap();
    let id = Operation::new(NAMESPACE_DEFAULT, "pay", "", key).id();
    sleep(Duration::from_secs(530)).await;
    assert!(store.read(id).await.unwrap().is_some());
    sleep(Duration::from_secs(150)).await;
    assert!(store.read(id).await.unwrap().is_none());
}

#[test]
fn sweeping_without_a_pause_is_refused() {
    let refused = OnlyonceLayer::builder(MemoryStore::new()).sweep_every(Duration::ZERO).build();
    assert_eq!(refused.err().unwrap().setting, "sweep_every");
}

#[tokio::test(start_paused = true)]
async fn nothing_goes_on_when_the_last_clone_is_dropped() {
    let store = store();
    let layer = OnlyonceLayer::builder(store.clone()).build().unwrap();
    let clone = layer.clone();
    pay(&layer).await;
    drop(layer);
    sleep(Duration::from_secs(150)).await;
    assert!(Arc::strong_count(&store) > 1, "a clone is left");
    drop(clone);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(Arc::strong_count(&store), 1);
    sleep(DAY * 2).await;
    assert!(is_kept(&store).await);
}

#[test]
fn a_layer_that_was_built_before_there_was_a_runtime_sweeps_all_the_same() {
    let store = store();
    let layer = OnlyonceLayer::builder(store.clone()).build().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(async {
        pay(&layer).await;
        assert!(is_kept(&store).await);
        sleep(DAY + Duration::from_secs(150)).await;
        assert!(!is_kept(&store).await);
    });
}

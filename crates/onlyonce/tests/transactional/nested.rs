//! More than one guard around a handler.

use std::time::Duration;

use http::Request;
use http_body_util::Full;
use onlyonce::{Config, OnlyonceLayer, RequestBody, TransactionalLayer, Tx};
use onlyonce_core::Transactional;
use onlyonce_postgres::PostgresTransactions;
use onlyonce_sqlite::SqliteTransactions;
use tokio::time::sleep;
use tower::{Layer, ServiceExt};

use super::shop::*;

/// That somebody is at it now is not how it ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_that_passes_is_not_recorded_by_the_guard_before_it() {
    let shop = OnPostgres::open().await;
    let store = shop.instance(4).await;
    let slow = Counter::new(store.clone(), config(), |request, run| {
        Box::pin(async move {
            sleep(Duration::from_millis(500)).await;
            sell::<OnPostgres>(request, run).await
        })
    });
    let first = tokio::spawn({
        let slow = slow.clone();
        async move { slow.pay("k").await }
    });
    while slow.runs() == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    let outer = Config { namespace: "outer".to_owned(), ..Config::default() };
    let outer = OnlyonceLayer::new(store.store(), outer).unwrap();
    let inner = TransactionalLayer::new(store, waiting(Duration::ZERO)).unwrap();
    let nested = outer.layer(inner.layer(tower::service_fn(
        |_: Request<RequestBody<RequestBody<Full<bytes::Bytes>>>>| async {
            Ok::<_, std::convert::Infallible>(answer(500, "the first has done it"))
        },
    )));
    let refused = nested.clone().oneshot(payment("k", "100")).await.unwrap();
    assert_eq!(refused.status().as_u16(), 409);
    assert_eq!(first.await.unwrap().body, "run 1");
    let retry = nested.oneshot(payment("k", "100")).await.unwrap();
    assert_eq!(retry.status().as_u16(), 201);
}

/// Each store's transaction is its own; both are committed, one after the other, or neither.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_have_a_transaction_on_each_of_two_stores() {
    let (shop, books) = (OnPostgres::open().await, OnSqlite::open().await);
    let outer = TransactionalLayer::new(shop.instance(2).await, config()).unwrap();
    let inner = TransactionalLayer::new(books.instance(2).await, config()).unwrap();
    let nested = outer.layer(inner.layer(tower::service_fn(
        |request: Request<RequestBody<RequestBody<Full<bytes::Bytes>>>>| async move {
            let mut sale = Tx::<PostgresTransactions>::take(request.extensions()).unwrap();
            let mut entry = Tx::<SqliteTransactions>::take(request.extensions()).unwrap();
            OnPostgres::note(&mut sale, "sale").await;
            OnSqlite::note(&mut entry, "entry").await;
            let fails = request.headers()["idempotency-key"] == "fails";
            Ok::<_, std::convert::Infallible>(answer(if fails { 500 } else { 201 }, "done"))
        },
    )));
    assert_eq!(nested.clone().oneshot(payment("fails", "100")).await.unwrap().status().as_u16(), 500);
    assert_eq!(shop.notes().await.len() + books.notes().await.len(), 0);
    for replayed in [false, true] {
        let answer = nested.clone().oneshot(payment("k", "100")).await.unwrap();
        assert_eq!(answer.status().as_u16(), 201);
        assert_eq!(answer.headers().contains_key("idempotent-replayed"), replayed);
    }
    assert_eq!((shop.notes().await, books.notes().await), (vec!["sale".into()], vec!["entry".into()]));
}

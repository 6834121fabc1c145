//! Handlers that end their transaction themselves, or open another inside.

use std::future::Future;
use std::task::{Context, Waker};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::Full;
use onlyonce::Tx;
use onlyonce_postgres::PostgresTransactions;
use sqlx::Connection;

use super::shop::*;

type Open = Tx<PostgresTransactions>;

fn request(keyed: bool) -> Request<Full<bytes::Bytes>> {
    if keyed { payment("k", "100") } else { Request::post("/payments").body(Full::from("100")).unwrap() }
}

/// Notes one line, does something to the transaction, notes another, and answers 201.
async fn pay(
    keyed: bool,
    between: for<'a> fn(&'a mut Open) -> BoxFuture<'a, ()>,
) -> (OnPostgres, Counter, Answer) {
    let shop = OnPostgres::open().await;
    let counter = Counter::new(shop.instance(2).await, config(), move |request, run| {
        Box::pin(async move {
            let mut tx = Open::take(request.extensions()).unwrap();
            OnPostgres::note(&mut tx, "before").await;
            if run == 1 {
                between(&mut tx).await;
            }
            OnPostgres::note(&mut tx, "after").await;
            answer(201, format!("run {run}"))
        }) as BoxFuture<'static, Response<Full<bytes::Bytes>>>
    });
    let first = counter.send(request(keyed)).await;
    (shop, counter, first)
}

/// sqlx undoes all of a transaction when the begin of one inside it is dropped halfway.
fn leave_a_nested_begin(tx: &mut Open) -> BoxFuture<'_, ()> {
    Box::pin(async move {
        loop {
            let mut nested = Box::pin((***tx).begin());
            // Otherwise the server was quicker.
            if nested.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
                return;
            }
        }
    })
}

fn roll_back(tx: &mut Open) -> BoxFuture<'_, ()> {
    Box::pin(async move { sqlx::raw_sql("ROLLBACK").execute(&mut ***tx).await.map(drop).unwrap() })
}

fn commit(tx: &mut Open) -> BoxFuture<'_, ()> {
    Box::pin(async move { sqlx::raw_sql("COMMIT").execute(&mut ***tx).await.map(drop).unwrap() })
}

fn nest_and_leave(tx: &mut Open) -> BoxFuture<'_, ()> {
    Box::pin(async move {
        let mut nested = (***tx).begin().await.unwrap();
        sqlx::raw_sql("INSERT INTO notes VALUES ('nested')").execute(&mut *nested).await.unwrap();
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nested_transaction_that_is_left_open_is_undone_alone() {
    for keyed in [true, false] {
        let (shop, counter, first) = pay(keyed, nest_and_leave).await;
        assert_eq!((first.status.as_u16(), first.refused.as_deref()), (201, None), "{keyed}");
        assert_eq!(shop.notes().await, ["after", "before"], "{keyed}");
        if keyed {
            assert!(counter.pay("k").await.replayed);
        }
    }
}

/// What a handler wrote before it lost its transaction is gone, and what it wrote afterwards was committed
/// alone: nobody may be told that the work is done, nor that nothing was.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_its_handler_rolled_back_is_not_reported_as_committed_or_undone() {
    for (name, end) in
        [("nested", leave_a_nested_begin as fn(&mut Open) -> BoxFuture<'_, ()>), ("raw", roll_back)]
    {
        for keyed in [true, false] {
            let (shop, _, first) = pay(keyed, end).await;
            assert_eq!(shop.notes().await, ["after"], "{name} {keyed}");
            assert_eq!(first.status.as_u16(), 503, "{name} {keyed}: {first:?}");
            assert!(!first.body.contains("Nothing was done"), "{name} {keyed}: {first:?}");
        }
    }
}

/// A handler that commits by itself has committed the claim too: its answer is recorded a commit later.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_its_handler_committed_is_answered_truly() {
    let (shop, counter, first) = pay(true, commit).await;
    assert_eq!(shop.notes().await, ["after", "before"]);
    assert_eq!((first.status.as_u16(), first.body.as_str()), (201, "run 1"), "{first:?}");
    let retry = counter.pay("k").await;
    assert_eq!((retry.replayed, &retry.body), (true, &first.body));
    let (_, _, first) = pay(false, commit).await;
    assert_eq!(first.status.as_u16(), 503, "{first:?}");
    assert!(!first.body.contains("Nothing was done"), "{first:?}");
}

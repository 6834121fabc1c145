//! Answers that are more than a status and a few bytes.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use onlyonce::{Config, RequestBody, Settings, TransactionalLayer, Tx};
use onlyonce_postgres::PostgresTransactions;
use tower::{Layer, ServiceExt};

use super::shop::*;

type Failing = Box<dyn std::error::Error + Send + Sync>;
type Streamed = UnsyncBoxBody<Bytes, Failing>;

fn streamed(
    frames: impl futures_util::Stream<Item = Result<Frame<Bytes>, Failing>> + Send + 'static,
) -> Streamed {
    StreamBody::new(frames).boxed_unsync()
}

fn data(bytes: impl Into<Bytes>) -> Result<Frame<Bytes>, Failing> {
    Ok(Frame::data(bytes.into()))
}

/// What one request is answered by a handler that makes a response of its transaction.
async fn ask(
    layer: &TransactionalLayer<PostgresTransactions>,
    key: &str,
    respond: impl Fn(Tx<PostgresTransactions>) -> Response<Streamed> + Clone + Send + 'static,
) -> (http::response::Parts, Result<Bytes, String>) {
    let service = layer.layer(tower::service_fn(move |request: Request<RequestBody<Full<Bytes>>>| {
        let respond = respond.clone();
        async move {
            let mut tx = Tx::take(request.extensions()).unwrap();
            OnPostgres::note(&mut tx, "head").await;
            Ok::<_, Infallible>(respond(tx))
        }
    }));
    let (head, body) = service.oneshot(payment(key, "100")).await.unwrap().into_parts();
    (head, body.collect().await.map(|body| body.to_bytes()).map_err(|error| error.to_string()))
}

/// Writes before each of its pieces.
fn of(tx: Tx<PostgresTransactions>, pieces: usize) -> Response<Streamed> {
    Response::new(streamed(stream::unfold((tx, pieces), |(mut tx, left)| async move {
        let left = left.checked_sub(1)?;
        OnPostgres::note(&mut tx, "body").await;
        Some((data(vec![b'x'; 600]), (tx, left)))
    })))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_writes_as_it_comes_is_committed_with_what_it_wrote() {
    let shop = OnPostgres::open().await;
    let defaults = Settings { response_body_bytes_max: 1_000, ..config().defaults };
    let layer =
        TransactionalLayer::new(shop.instance(1).await, Config { defaults, ..Config::default() }).unwrap();
    let (head, body) = ask(&layer, "small", |tx| of(tx, 1)).await;
    assert_eq!((head.status.as_u16(), body.unwrap().len()), (200, 600));
    assert_eq!(shop.notes().await, ["body", "head"]);
    // One that does not end within the limit still has the transaction when it is to be committed.
    let (head, _) = ask(&layer, "large", |tx| of(tx, 2)).await;
    assert_eq!(head.status.as_u16(), 503);
    assert_eq!(shop.notes().await, ["body", "head"]);
    // Its connection is back.
    assert_eq!(ask(&layer, "next", |tx| of(tx, 1)).await.0.status.as_u16(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_fails_at_its_end_rolls_the_work_back() {
    let shop = OnPostgres::open().await;
    let layer = TransactionalLayer::new(shop.instance(1).await, config()).unwrap();
    let cut = |_| Response::new(streamed(stream::iter([data("half"), Err("lost".into())])));
    let (head, _) = ask(&layer, "cut", cut).await;
    assert_eq!(
        (head.status.as_u16(), head.headers["onlyonce-refused"].to_str().unwrap()),
        (503, "not-committed")
    );
    let grpc = |status: &'static str| {
        move |_| {
            let trailers =
                HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static(status))]);
            let frames = stream::iter([data("row"), Ok(Frame::trailers(trailers))]);
            let response = Response::builder().header("content-type", "application/grpc");
            response.body(streamed(frames)).unwrap()
        }
    };
    for (status, notes) in [("13", 0), ("0", 2), ("5", 3)] {
        let (head, body) = ask(&layer, status, grpc(status)).await;
        assert_eq!((head.status.as_u16(), body.unwrap().as_ref()), (200, &b"row"[..]), "{status}");
        assert_eq!(shop.notes().await.len(), notes, "{status}");
        let (head, _) = ask(&layer, status, grpc("0")).await;
        assert_eq!(head.headers.contains_key("idempotent-replayed"), status != "13", "{status}");
        if status == "13" {
            assert_eq!(shop.notes().await.len(), 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_content_is_replayed_without_length_and_cookie() {
    let shop = OnPostgres::open().await;
    let layer = TransactionalLayer::new(shop.instance(1).await, config()).unwrap();
    for replayed in [false, true] {
        let (head, body) = ask(&layer, "k", |_| {
            let response =
                Response::builder().status(204).header("set-cookie", "session=1").header("etag", "1");
            response.body(streamed(stream::empty())).unwrap()
        })
        .await;
        assert_eq!((head.status.as_u16(), body.unwrap().len()), (204, 0));
        assert_eq!(head.headers["etag"], "1");
        assert_eq!(head.headers.contains_key("set-cookie"), !replayed);
        assert_eq!(head.headers.contains_key("idempotent-replayed"), replayed);
        assert!(!head.headers.contains_key("content-length"));
    }
    assert_eq!(shop.notes().await.len(), 1);
}

struct PanicsWhenDropped(Arc<AtomicBool>);

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        assert!(self.0.swap(true, Ordering::SeqCst), "a bug in a destructor");
    }
}

/// Given up at the end of its lease, dropped halfway, with a panic on top.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_panics_as_it_is_given_up_leaves_nothing() {
    let shop = OnPostgres::open().await;
    let defaults = Settings {
        timeout: Duration::from_millis(200),
        lease: Some(Duration::from_millis(600)),
        retention: Duration::from_secs(60),
        ..waiting(Duration::from_secs(30)).defaults
    };
    let store = shop.instance(1).await;
    let panicked = Arc::new(AtomicBool::new(false));
    let counter = Counter::new(store, Config { defaults, ..Config::default() }, {
        let panicked = Arc::clone(&panicked);
        move |request, run| {
            let panicked = Arc::clone(&panicked);
            Box::pin(async move {
                let mut tx = Tx::take(request.extensions()).unwrap();
                OnPostgres::note(&mut tx, "paid").await;
                if run == 1 {
                    let _late = PanicsWhenDropped(panicked);
                    std::future::pending::<()>().await;
                }
                answer(201, format!("run {run}"))
            })
        }
    });
    assert_eq!(counter.pay("k").await.status.as_u16(), 504);
    assert_eq!(counter.pay("k").await.body, "run 2");
    assert!(panicked.load(Ordering::SeqCst));
    assert_eq!(shop.notes().await, ["paid"]);
}

//! A hyper server, without a framework.
#![allow(clippy::unwrap_used, missing_docs)]

mod wire;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use onlyonce::{Caller, MemoryStore, OnlyonceLayer, RequestBody};
use tokio::net::TcpListener;
use tower::{Layer, service_fn};

use wire::{post, send};

/// Answers every request with its number and what was in it.
async fn serve(once: OnlyonceLayer) -> SocketAddr {
    let runs = Arc::new(AtomicUsize::new(0));
    let work = service_fn(move |request: Request<RequestBody<Incoming>>| {
        let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let text = format!("run {run}: {}", body.escape_ascii());
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(text)))
        }
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let service = TowerToHyperService::new(once.layer(work));
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let serving = http1::Builder::new().serve_connection(TokioIo::new(stream), service.clone());
            tokio::spawn(serving);
        }
    });
    addr
}

#[tokio::test]
async fn a_retry_is_given_the_first_answer_and_what_is_not_guarded_passes() {
    let once =
        OnlyonceLayer::builder(MemoryStore::new()).caller(Caller::header("x-user-id")).build().unwrap();
    let to = serve(once).await;
    let first = send(to, post("/payments", Some("k"), "100")).await;
    let retry = send(to, post("/payments", Some("k"), "100")).await;
    assert_eq!((first.text.as_str(), first.replayed()), ("run 1: 100", false));
    assert_eq!((retry.text.as_str(), retry.replayed()), ("run 1: 100", true));
    assert_eq!(retry.header("content-length"), Some("10"));
    assert_eq!(send(to, post("/payments", None, "100")).await.text, "run 2: 100");
    let edited = send(to, post("/payments", Some("k"), "999")).await;
    assert_eq!((edited.status, edited.refused()), (422, Some("idempotency-key-reused")));
}

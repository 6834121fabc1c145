//! A gRPC service by tonic, over HTTP/2.
#![allow(clippy::unwrap_used, missing_docs)]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::{Buf, BufMut, Bytes};
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2 as client;
use hyper::server::conn::http2 as server;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use onlyonce::{Execution, MemoryStore, OnlyonceLayer, RequestBody};
use tokio::net::{TcpListener, TcpStream};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::Grpc;
use tonic::{Response, Status};
use tower::{Layer, service_fn};

/// Messages that are text.
#[derive(Clone, Copy)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, text: String, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        Ok(Some(String::from_utf8(bytes.into()).unwrap()))
    }
}

/// Fails the way that it is asked to, and otherwise says which run this was.
fn pay(run: u32, request: &tonic::Request<String>) -> Result<Response<String>, Status> {
    let attempt = request.extensions().get::<Execution>().map(|execution| execution.attempt);
    match request.get_ref().as_str() {
        "unavailable" if run == 1 => Err(Status::unavailable("later")),
        "refuse" => Err(Status::failed_precondition(format!("no funds in run {run}"))),
        amount => Ok(Response::new(format!("paid {amount} in run {run}, attempt {attempt:?}"))),
    }
}

async fn serve() -> SocketAddr {
    let runs = Arc::new(AtomicU32::new(0));
    let payments = service_fn(move |request: Request<RequestBody<Incoming>>| {
        let runs = Arc::clone(&runs);
        let unary = service_fn(move |request: tonic::Request<String>| {
            let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
            std::future::ready(pay(run, &request))
        });
        async move { Ok::<_, std::convert::Infallible>(Grpc::new(Text).unary(unary, request).await) }
    });
    let service =
        TowerToHyperService::new(OnlyonceLayer::builder(MemoryStore::new()).build().unwrap().layer(payments));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let builder = server::Builder::new(TokioExecutor::new());
            tokio::spawn(builder.serve_connection(TokioIo::new(stream), service.clone()));
        }
    });
    addr
}

struct Answer {
    headers: HeaderMap,
    message: Option<String>,
    trailers: HeaderMap,
}

/// A unary call, frame by frame: a message is a flag, four bytes of length, and its bytes.
async fn call(to: SocketAddr, key: &str, message: &str) -> Answer {
    let io = TokioIo::new(TcpStream::connect(to).await.unwrap());
    let (mut sender, connection) = client::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let mut body = vec![0];
    body.put_u32(message.len().try_into().unwrap());
    body.put_slice(message.as_bytes());
    let request = Request::post("http://api/payments.Payments/Pay")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("idempotency-key", key)
        .body(Full::<Bytes>::from(body))
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let (parts, body) = response.into_parts();
    let collected = body.collect().await.unwrap();
    let trailers = collected.trailers().cloned().unwrap_or_default();
    let mut bytes = collected.to_bytes();
    let message = (!bytes.is_empty()).then(|| {
        bytes.advance(1);
        assert_eq!(bytes.get_u32() as usize, bytes.len());
        String::from_utf8(bytes.into()).unwrap()
    });
    Answer { headers: parts.headers, message, trailers }
}

#[tokio::test]
async fn a_unary_call_is_replayed_with_its_trailers() {
    let to = serve().await;
    let first = call(to, "k", "100").await;
    let retry = call(to, "k", "100").await;
    for answer in [&first, &retry] {
        assert_eq!(answer.message.as_deref(), Some("paid 100 in run 1, attempt Some(1)"));
        assert_eq!(answer.trailers["grpc-status"], "0");
        assert!(!answer.headers.contains_key("grpc-status"), "it stays where it was");
        assert_eq!(answer.headers["content-type"], "application/grpc");
    }
    assert!(!first.headers.contains_key("idempotent-replayed"));
    assert_eq!(retry.headers["idempotent-replayed"], "true");
}

#[tokio::test]
async fn a_status_that_may_pass_is_not_kept_and_one_that_is_an_outcome_is() {
    let to = serve().await;
    let first = call(to, "a", "unavailable").await;
    assert_eq!((first.message, &first.headers["grpc-status"]), (None, &"14".parse().unwrap()));
    let retry = call(to, "a", "unavailable").await;
    assert_eq!(retry.message.as_deref(), Some("paid unavailable in run 2, attempt Some(1)"));

    let first = call(to, "b", "refuse").await;
    let retry = call(to, "b", "refuse").await;
    for answer in [&first, &retry] {
        assert_eq!(answer.headers["grpc-status"], "9");
        assert_eq!(answer.headers["grpc-message"], "no%20funds%20in%20run%203");
    }
    assert_eq!(retry.headers["idempotent-replayed"], "true");
}

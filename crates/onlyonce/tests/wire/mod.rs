//! A client on a connection of its own.
#![allow(dead_code)]

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

/// What came back.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    pub(crate) fn replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    pub(crate) fn refused(&self) -> Option<&str> {
        self.header("onlyonce-refused")
    }
}

/// `POST path` from `ann`, with this key if there is one.
pub(crate) fn post(path: &str, key: Option<&str>, body: &'static str) -> Request<Full<Bytes>> {
    let mut request = Request::post(path).header("host", "api").header("x-user-id", "ann");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    request.body(Full::from(body)).unwrap()
}

pub(crate) async fn send(to: SocketAddr, request: Request<Full<Bytes>>) -> Answer {
    let io = TokioIo::new(TcpStream::connect(to).await.unwrap());
    let (mut sender, connection) = http1::handshake(io).await.unwrap();
    let connection = tokio::spawn(connection);
    let (parts, body) = sender.send_request(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    connection.abort();
    Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        text: String::from_utf8(body.into()).unwrap(),
    }
}

/// A request that is on its way. Dropping it hangs up.
pub(crate) struct Sent(JoinHandle<Answer>);

pub(crate) fn start(to: SocketAddr, request: Request<Full<Bytes>>) -> Sent {
    Sent(tokio::spawn(send(to, request)))
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.abort();
    }
}

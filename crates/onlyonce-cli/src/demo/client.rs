//! The callers of the demo.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;

/// Callers that pay through one address. Clones share their connections.
#[derive(Clone)]
pub(super) struct Client {
    target: SocketAddr,
    http: legacy::Client<HttpConnector, Full<Bytes>>,
}

/// A payment as it is sent, and sent again.
#[derive(Clone, Copy)]
pub(super) struct Order {
    pub(super) payer: &'static str,
    pub(super) order: &'static str,
    pub(super) amount: u64,
}

impl Client {
    pub(super) fn new(target: SocketAddr) -> Self {
        let mut builder = legacy::Client::builder(TokioExecutor::new());
        // What is sent again is what the demo is about; nothing else may do it.
        builder.retry_canceled_requests(false);
        Self { target, http: builder.build_http() }
    }

    /// Pays, and says what the caller saw.
    pub(super) async fn pay(&self, order: Order) -> String {
        let request = Request::post(format!("http://{}/payments", self.target))
            .header("idempotency-key", order.order)
            .header(header::AUTHORIZATION, order.payer)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(
                serde_json::json!({ "order": order.order, "amount": order.amount }).to_string(),
            ));
        let Ok(request) = request else { return "no request".into() };
        let Ok(response) = self.http.request(request).await else { return "connection lost".into() };
        let (head, body) = response.into_parts();
        if body.collect().await.is_err() {
            return "connection lost".into();
        }
        let note = |name| head.headers.get(name).and_then(|value| value.to_str().ok());
        match (note("onlyonce-refused"), note("idempotent-replayed")) {
            (Some(code), _) => format!("{} {code}", head.status.as_u16()),
            (None, Some(_)) => format!("{} replayed", head.status.as_u16()),
            (None, None) => head.status.as_u16().to_string(),
        }
    }

    /// Pays, and hangs up before the answer is there.
    pub(super) async fn pay_impatiently(&self, order: Order, patience: Duration) -> String {
        // A connection of its own: it is closed when the caller leaves.
        let caller = Self::new(self.target);
        match tokio::time::timeout(patience, caller.pay(order)).await {
            Ok(saw) => saw,
            Err(_) => "hung up".into(),
        }
    }
}

/// `["201", "201", "hung up"]` as `["2 × 201", "1 × hung up"]`.
pub(super) fn tally(saw: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut counts = BTreeMap::new();
    for saw in saw {
        *counts.entry(saw).or_insert(0) += 1;
    }
    counts.into_iter().map(|(saw, count)| format!("{count} × {saw}")).collect()
}

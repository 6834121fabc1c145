//! The admin server: `/healthz`, `/readyz`, `/metrics`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::{StatusCode, header};
use onlyonce_core::{Id, Store};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::error;

use crate::telemetry;

/// How long a readiness check may take, on the local clock.
const CHECK_TIME_MAX: Duration = Duration::from_secs(2);

/// What readiness is told from.
#[derive(Clone)]
pub(crate) struct Health {
    store: Arc<dyn Store>,
    upstream: String,
    closing: CancellationToken,
}

impl Health {
    pub(crate) fn new(store: Arc<dyn Store>, upstream: String, closing: CancellationToken) -> Self {
        Self { store, upstream, closing }
    }

    /// Why requests should not come here, if they should not.
    async fn reasons(&self) -> Vec<String> {
        if self.closing.is_cancelled() {
            return vec!["shutting down".to_owned()];
        }
        let store = async {
            match timeout(CHECK_TIME_MAX, self.store.read(Id([0; 32]))).await {
                Ok(Ok(_)) => None,
                Ok(Err(error)) => Some(format!("the store cannot be read: {error}")),
                Err(_) => Some(format!("the store did not answer within {CHECK_TIME_MAX:?}")),
            }
        };
        let upstream = async { reach(&self.upstream).await.err() };
        let (store, upstream) = tokio::join!(store, upstream);
        store.into_iter().chain(upstream).collect()
    }
}

/// Whether something takes connections there.
pub(crate) async fn reach(address: &str) -> Result<(), String> {
    match timeout(CHECK_TIME_MAX, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("the upstream {address} cannot be reached: {error}")),
        Err(_) => Err(format!("the upstream {address} did not answer within {CHECK_TIME_MAX:?}")),
    }
}

/// Answers until it is aborted.
pub(crate) async fn serve(listener: TcpListener, health: Health) {
    if let Err(error) = axum::serve(listener, router(health)).await {
        error!(%error, "the admin server ended");
    }
}

fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(async || Json(json!({ "status": "alive" }))))
        .route("/readyz", get(ready))
        .route("/metrics", get(render))
        .with_state(health)
}

async fn ready(State(health): State<Health>) -> Response {
    let reasons = health.reasons().await;
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": reasons.is_empty(), "reasons": reasons }))).into_response()
}

async fn render() -> Response {
    match telemetry::metrics() {
        Some(handle) => {
            handle.run_upkeep();
            ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], handle.render())
                .into_response()
        }
        None => (StatusCode::NOT_FOUND, "This process records its metrics elsewhere.\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use onlyonce_core::MemoryStore;
    use serde_json::Value;

    use super::*;

    async fn body(response: Response) -> (StatusCode, String) {
        let status = response.status();
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(bytes.to_vec()).unwrap())
    }

    async fn readiness(health: &Health) -> (StatusCode, Vec<String>) {
        let (status, text) = body(ready(State(health.clone())).await).await;
        let answer: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(answer["ready"], status == StatusCode::OK);
        (status, serde_json::from_value(answer["reasons"].clone()).unwrap())
    }

    #[tokio::test]
    async fn ready_is_who_reaches_store_and_upstream_and_is_not_leaving() {
        let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = upstream.local_addr().unwrap().to_string();
        let closing = CancellationToken::new();
        let health = Health::new(Arc::new(MemoryStore::new()), address.clone(), closing.clone());
        assert_eq!(readiness(&health).await, (StatusCode::OK, vec![]));

        drop(upstream);
        let (status, reasons) = readiness(&health).await;
        assert_eq!((status, reasons.len()), (StatusCode::SERVICE_UNAVAILABLE, 1));
        assert!(reasons[0].contains(&address), "{reasons:?}");

        closing.cancel();
        let (status, reasons) = readiness(&health).await;
        assert_eq!((status, reasons), (StatusCode::SERVICE_UNAVAILABLE, vec!["shutting down".to_owned()]));
    }

    #[tokio::test]
    async fn a_store_that_cannot_be_read_is_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let url = crate::store::StoreUrl::file(folder.path().join("keys.db"));
        let store = crate::store::OpenStore::open(&url, false, Duration::ZERO).await.unwrap();
        let upstream = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = upstream.local_addr().unwrap().to_string();
        let health = Health::new(store.store(), address, CancellationToken::new());
        assert_eq!(readiness(&health).await.0, StatusCode::OK);
        store.close().await.unwrap();
        let (status, reasons) = readiness(&health).await;
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert!(reasons[0].starts_with("the store cannot be read"), "{reasons:?}");
    }

    /// A rate needs a first value: a counter that appears with its first step hides that step.
    #[tokio::test]
    async fn every_counter_is_there_and_described_from_the_first_scrape() {
        // What a process counts from its start.
        assert!(telemetry::metrics().is_some());
        let (status, text) = body(render().await).await;
        assert_eq!(status, StatusCode::OK);
        let answers = onlyonce::metric::CLAIM_ANSWERS.map(|answer| format!("{{answer=\"{answer}\"}}"));
        for answer in &answers {
            assert!(text.contains(&format!("onlyonce_claims_total{answer} ")), "{answer} in {text}");
        }
        for name in [
            "onlyonce_in_flight",
            "onlyonce_lost_leases_total",
            "onlyonce_record_failures_total",
            "onlyonce_swept_rows_total",
            "onlyonce_sweep_failures_total",
        ] {
            assert!(
                text.contains(&format!("\n{name} ")) && text.contains(&format!("# HELP {name} ")),
                "{name}: {text}"
            );
        }
    }
}

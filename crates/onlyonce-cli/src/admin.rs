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

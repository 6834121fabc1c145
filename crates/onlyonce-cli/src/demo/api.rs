//! The payments API of the demo. It knows nothing of keys or retries, and keeps a ledger.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use http::{HeaderMap, StatusCode, header};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::failed;
use crate::cli::Failure;

/// How long the card network takes to charge, and then to send a receipt.
const CHARGE_AFTER: Duration = Duration::from_millis(50);
const RECEIPT_AFTER: Duration = Duration::from_millis(250);

/// A running API. Clones are the same one.
#[derive(Clone)]
pub(super) struct Api {
    addr: SocketAddr,
    books: Arc<Mutex<Books>>,
}

#[derive(Default)]
struct Books {
    ledger: Vec<Charge>,
    fails_once: HashSet<String>,
    dies_after_charging: HashSet<String>,
}

/// One entry of the ledger.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Charge {
    payer: String,
    order: String,
    amount: u64,
}

#[derive(Deserialize)]
struct Payment {
    order: String,
    amount: u64,
}

impl Api {
    pub(super) async fn start(listen: &str) -> Result<Self, Failure> {
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let addr = listener.local_addr().map_err(failed)?;
        let api = Self { addr, books: Arc::default() };
        let routes = Router::new()
            .route("/payments", post(pay))
            .route("/ledger", get(async |State(api): State<Api>| Json(api.charges())))
            .with_state(api.clone());
        tokio::spawn(accept(listener, routes));
        Ok(api)
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(super) fn charges(&self) -> Vec<Charge> {
        self.books().ledger.clone()
    }

    /// The first payment for this order is answered 503 before anything is charged.
    pub(super) fn fail_once(&self, order: &str) {
        self.books().fails_once.insert(order.to_owned());
    }

    /// The first payment for this order is charged, and then the connection is gone.
    pub(super) fn die_after_charging(&self, order: &str) {
        self.books().dies_after_charging.insert(order.to_owned());
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn pay(
    State(api): State<Api>,
    Extension(connection): Extension<CancellationToken>,
    headers: HeaderMap,
    Json(Payment { order, amount }): Json<Payment>,
) -> (StatusCode, Json<serde_json::Value>) {
    if api.books().fails_once.remove(&order) {
        let busy = serde_json::json!({ "error": "the card network is busy" });
        return (StatusCode::SERVICE_UNAVAILABLE, Json(busy));
    }
    let payer =
        headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).unwrap_or("anonymous");
    let charge = Charge { payer: payer.to_owned(), order, amount };
    tokio::time::sleep(CHARGE_AFTER).await;
    let (receipt, dies) = {
        let mut books = api.books();
        books.ledger.push(charge.clone());
        (books.ledger.len(), books.dies_after_charging.remove(&charge.order))
    };
    if dies {
        connection.cancel();
        std::future::pending::<()>().await;
    }
    tokio::time::sleep(RECEIPT_AFTER).await;
    (StatusCode::CREATED, Json(serde_json::json!({ "receipt": receipt, "charged": charge.amount })))
}

async fn accept(listener: TcpListener, routes: Router) {
    while let Ok((stream, _)) = listener.accept().await {
        let gone = CancellationToken::new();
        let service = TowerToHyperService::new(routes.clone().layer(Extension(gone.clone())));
        tokio::spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                // A caller that hangs up is the caller's business.
                _ = connection => {}
                () = gone.cancelled() => {}
            }
        });
    }
}

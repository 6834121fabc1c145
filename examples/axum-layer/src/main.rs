//! A payments API in axum whose retries are safe. The README says what to try.

use std::error::Error;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use onlyonce::{BodyMode, Caller, Execution, KeyRule, OnlyonceLayer, SettingsError, Store};
use onlyonce_postgres::PostgresStore;
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let once = layer(store().await?)?;
    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app(once.clone())).with_graceful_shutdown(told_to_stop()).await?;
    // Work whose caller hung up has no connection that the server would wait for.
    once.drained().await;
    Ok(())
}

/// Postgres, for several instances, where `DATABASE_URL` names one; otherwise a file.
async fn store() -> Result<Arc<dyn Store>, Box<dyn Error>> {
    Ok(match std::env::var("DATABASE_URL") {
        Ok(url) => Arc::new(PostgresStore::open(&url.parse()?).await?),
        Err(_) => Arc::new(SqliteStore::open(&SqliteOptions::file("keys.db")).await?),
    })
}

/// Which requests are guarded, and how.
fn layer(store: Arc<dyn Store>) -> Result<OnlyonceLayer, SettingsError> {
    OnlyonceLayer::builder(store)
        .namespace("payments")
        .caller(Caller::extension(|User(name): &User| name.clone()))
        .defaults(|rule| rule.body(BodyMode::Json).timeout(Duration::from_secs(20)))
        .route("POST /payments", |rule| rule.key(KeyRule::Required))
        .build()
}

fn app(once: OnlyonceLayer) -> Router {
    Router::new()
        .route("/payments", post(pay).get(list))
        .with_state(Ledger::default())
        // What is added later is further outside: who asks is known before the key is claimed.
        .layer(once)
        .layer(from_fn(authenticate))
}

/// Payments that were made. A real application has them in its database.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<Vec<Payment>>>);

#[derive(Clone, Serialize)]
struct Payment {
    payer: String,
    amount: u32,
    /// What the bank was told. It is the same if the work has to run again, so the bank charges once.
    charge: String,
}

#[derive(Deserialize)]
struct Order {
    amount: u32,
}

async fn pay(
    State(Ledger(payments)): State<Ledger>,
    execution: Execution,
    Json(Order { amount }): Json<Order>,
) -> Response {
    if amount > 1_000 {
        return (StatusCode::PAYMENT_REQUIRED, "the limit is 1000\n").into_response();
    }
    let charge = execution.downstream("charge").uuid();
    // The bank takes its time.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let payment = Payment { payer: execution.operation.caller().to_owned(), amount, charge };
    payments.lock().unwrap_or_else(PoisonError::into_inner).push(payment.clone());
    (StatusCode::CREATED, Json(payment)).into_response()
}

async fn list(State(Ledger(payments)): State<Ledger>) -> Json<Vec<Payment>> {
    Json(payments.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Who is logged in.
#[derive(Clone)]
struct User(String);

/// Stands for the application's own authentication: the token is the name.
async fn authenticate(mut request: Request, next: Next) -> Response {
    match bearer(request.headers()) {
        Some(name) => {
            let user = User(name.to_owned());
            request.extensions_mut().insert(user);
            next.run(request).await
        }
        None => (StatusCode::UNAUTHORIZED, "log in\n").into_response(),
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ").filter(|name| !name.is_empty())
}

/// Ctrl-C, or the signal by which a service is stopped.
async fn told_to_stop() {
    let mut terminated = signal(SignalKind::terminate()).expect("signals can be waited for");
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminated.recv() => {}
    }
}

//! A payments API: a card is charged and the payment booked, once. The README says what to try.

mod card;
mod payment;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use axum::routing::{get, post};
use onlyonce::{BodyMode, Caller, KeyRule, SettingsError, TransactionalLayer};
use onlyonce_postgres::{PostgresStore, PostgresTransactions};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::net::TcpListener;

use card::Cards;

/// With these the server notices within a minute that this machine has vanished, and rolls its transactions back. (When
/// only the process dies, it notices at once.)
const KEEPALIVE: [(&str, &str); 3] =
    [("tcp_keepalives_idle", "30"), ("tcp_keepalives_interval", "10"), ("tcp_keepalives_count", "3")];

#[tokio::main]
async fn main() -> ExitCode {
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("axum-payments: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> Result<(), Box<dyn Error>> {
    // For providers that speak HTTPS.
    rustls::crypto::ring::default_provider().install_default().map_err(|_| "TLS is set up twice")?;
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL to a Postgres database, such as postgres://localhost/payments")?;
    let provider = std::env::var("CARD_PROVIDER").unwrap_or_else(|_| "http://127.0.0.1:3001".into());

    let options = url.parse::<PgConnectOptions>()?.options(KEEPALIVE);
    let pool = PgPoolOptions::new().max_connections(16).connect_with(options).await?;
    sqlx::raw_sql(include_str!("../schema.sql")).execute(&pool).await?;
    let store = PostgresStore::open(&url.parse()?).await?;
    let once = layer(store.transactions(&pool).await?)?;

    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let app = app(once.clone(), pool, Cards::new(&provider)?);
    axum::serve(listener, app).with_graceful_shutdown(told_to_stop()).await?;
    // Work whose caller hung up has no connection that the server would wait for.
    once.drained().await;
    Ok(())
}

fn layer(store: PostgresTransactions) -> Result<TransactionalLayer<PostgresTransactions>, SettingsError> {
    let layer = TransactionalLayer::builder(store)
        .namespace("payments")
        // A gateway in front has authenticated the user, and nobody else can reach this server.
        .caller(Caller::header("x-user"))
        .defaults(|rule| rule.body(BodyMode::Json).timeout(Duration::from_secs(20)))
        .route("POST /payments", |rule| rule.key(KeyRule::Required))
        .build()?;
    // Running a handler again is safe here: its only effect outside of the transaction has a downstream key.
    Ok(layer.reruns(3))
}

fn app(once: TransactionalLayer<PostgresTransactions>, pool: PgPool, cards: Cards) -> Router {
    Router::new()
        .route("/payments", post(payment::pay))
        .with_state(cards)
        .layer(once)
        .merge(Router::new().route("/accounts/{name}", get(payment::account)).with_state(pool))
}

/// A real one waits for SIGTERM as well.
async fn told_to_stop() {
    let _ = tokio::signal::ctrl_c().await;
}

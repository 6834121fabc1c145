//! A receiver of webhooks: whatever is delivered again is done once. The README says what to try.

mod receipt;
mod signature;
mod webhook;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use axum::routing::post;
use onlyonce::{FunctionConfig, Once};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use sqlx::sqlite::{SqliteConnectOptions, SqlitePool};
use tokio::net::TcpListener;

use signature::Secrets;
use webhook::Receiver;

/// How long a delivery waits after this process has died in the work of the one before. It is renewed while the
/// work runs, so it need not be as long as that.
const LEASE: Duration = Duration::from_secs(10);

/// Longer than any provider goes on delivering.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 3_600);

#[tokio::main]
async fn main() -> ExitCode {
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("webhook-receiver: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve() -> Result<(), Box<dyn Error>> {
    let secrets = std::env::var("WEBHOOK_SECRETS")
        .map_err(|_| "set WEBHOOK_SECRETS to provider=secret, with a comma between several")?;
    let shop =
        SqlitePool::connect_with(SqliteConnectOptions::new().filename("shop.db").create_if_missing(true));
    let shop = shop.await?;
    sqlx::raw_sql(include_str!("../schema.sql")).execute(&shop).await?;

    let store = SqliteStore::open(&SqliteOptions::file("keys.db")).await?;
    let config = FunctionConfig { lease: LEASE, retention: RETENTION, ..FunctionConfig::default() };
    let once = Once::new(store, "webhook", config)?;

    let address = std::env::var("LISTEN").unwrap_or_else(|_| "127.0.0.1:3000".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let receiver = Receiver { secrets: Secrets::parse(&secrets)?, once: once.clone(), shop };
    let app = Router::new().route("/webhooks/{provider}", post(webhook::receive)).with_state(receiver);
    axum::serve(listener, app).with_graceful_shutdown(told_to_stop()).await?;
    // Work whose provider hung up has no connection that the server would wait for.
    once.drained().await;
    Ok(())
}

/// A real one waits for SIGTERM as well.
async fn told_to_stop() {
    let _ = tokio::signal::ctrl_c().await;
}

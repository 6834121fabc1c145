//! The same on SQLite: one transaction for each step. One connection writes, as SQLite allows one writer at a
//! time: a pool of sixteen that all wait for its lock is slower.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Executor, Row};

use super::{paid, replayed, work};

const READERS: u32 = 16;

#[derive(Clone)]
struct Pools {
    write: SqlitePool,
    read: SqlitePool,
}

pub(super) async fn application(url: &str) -> Result<Router, sqlx::Error> {
    let options: SqliteConnectOptions = url.parse()?;
    let options = options
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let write = SqlitePoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
    let create = "CREATE TABLE IF NOT EXISTS idempotency_keys (
        key          TEXT    PRIMARY KEY,
        status       INTEGER,
        answer       BLOB,
        created_at   INTEGER NOT NULL DEFAULT (unixepoch()),
        completed_at INTEGER
    )";
    write.execute(create).await?;
    let read = SqlitePoolOptions::new().max_connections(READERS).connect_with(options).await?;
    Ok(Router::new().route("/payments/{bytes}", post(pay)).with_state(Pools { write, read }))
}

async fn pay(State(pools): State<Pools>, Path(bytes): Path<usize>, headers: HeaderMap, _: Bytes) -> Response {
    let Some(key) = headers.get("idempotency-key").and_then(|key| key.to_str().ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let answered = pay_once(&pools, key, bytes).await;
    answered.unwrap_or_else(|_| StatusCode::SERVICE_UNAVAILABLE.into_response())
}

async fn pay_once(Pools { write, read }: &Pools, key: &str, bytes: usize) -> Result<Response, sqlx::Error> {
    let key = key.to_owned();
    // A replay should not wait for the writer.
    let select = "SELECT status, answer FROM idempotency_keys WHERE key = ?";
    if let Some(row) = sqlx::query(select).bind(key.clone()).fetch_optional(read).await? {
        return Ok(match (row.try_get(0)?, row.try_get::<Option<Vec<u8>>, _>(1)?) {
            (Some(status), Some(answer)) => replayed(status, answer.into()),
            _ => StatusCode::CONFLICT.into_response(),
        });
    }
    let claim = "INSERT INTO idempotency_keys (key) VALUES (?) ON CONFLICT DO NOTHING";
    if sqlx::query(claim).bind(key.clone()).execute(write).await?.rows_affected() == 0 {
        return Ok(StatusCode::CONFLICT.into_response());
    }
    let answer = work(bytes);
    let complete =
        "UPDATE idempotency_keys SET status = 201, answer = ?, completed_at = unixepoch() WHERE key = ?";
    sqlx::query(complete).bind(answer.to_vec()).bind(key).execute(write).await?;
    Ok(paid(answer))
}

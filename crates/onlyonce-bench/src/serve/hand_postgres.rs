//! What a good engineer writes in an afternoon, on Postgres: claim, work and answer in a statement each. It does
//! not look at the body, does not survive a caller who hangs up, and never takes over a key whose holder died.

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{Executor, Row};

use super::{paid, replayed, work};

const POOL_SIZE: u32 = 16;

pub(super) async fn application(url: &str) -> Result<Router, sqlx::Error> {
    let pool = PgPoolOptions::new().max_connections(POOL_SIZE).connect(url).await?;
    let create = "CREATE TABLE IF NOT EXISTS idempotency_keys (
        key          text        PRIMARY KEY,
        status       integer,
        answer       bytea,
        created_at   timestamptz NOT NULL DEFAULT now(),
        completed_at timestamptz
    )";
    pool.execute(create).await?;
    Ok(Router::new().route("/payments/{bytes}", post(pay)).with_state(pool))
}

async fn pay(State(pool): State<PgPool>, Path(bytes): Path<usize>, headers: HeaderMap, _: Bytes) -> Response {
    let Some(key) = headers.get("idempotency-key").and_then(|key| key.to_str().ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let answered = pay_once(&pool, key, bytes).await;
    answered.unwrap_or_else(|_| StatusCode::SERVICE_UNAVAILABLE.into_response())
}

async fn pay_once(pool: &PgPool, key: &str, bytes: usize) -> Result<Response, sqlx::Error> {
    let claim = "INSERT INTO idempotency_keys (key) VALUES ($1) ON CONFLICT DO NOTHING RETURNING key";
    if sqlx::query(claim).bind(key).fetch_optional(pool).await?.is_some() {
        let answer = work(bytes);
        let complete =
            "UPDATE idempotency_keys SET status = 201, answer = $2, completed_at = now() WHERE key = $1";
        sqlx::query(complete).bind(key).bind(&answer[..]).execute(pool).await?;
        return Ok(paid(answer));
    }
    let select = "SELECT status, answer FROM idempotency_keys WHERE key = $1";
    let row = sqlx::query(select).bind(key).fetch_one(pool).await?;
    Ok(match (row.try_get(0)?, row.try_get::<Option<Vec<u8>>, _>(1)?) {
        (Some(status), Some(answer)) => replayed(status, answer.into()),
        _ => StatusCode::CONFLICT.into_response(),
    })
}

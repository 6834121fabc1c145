//! The servers that are compared, each a process of its own: the same axum application, bare, guarded by hand,
//! and guarded by the layer.

mod hand_postgres;
mod hand_sqlite;

use std::error::Error;
use std::io::Read;
use std::sync::LazyLock;
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::serve::ListenerExt;
use bytes::Bytes;
use onlyonce::{OnlyonceLayer, Store};
use onlyonce_postgres::PostgresStore;
use onlyonce_sqlite::SqliteStore;
use std::sync::Arc;
use tokio::net::TcpListener;

use crate::stats::SplitMix;

/// The largest answer.
const ANSWER_BYTES_MAX: usize = 256 * 1024;

/// Serves until its standard input ends, which it does with whoever started it.
pub(crate) async fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let application = match words[..] {
        ["bare"] => bare(),
        ["hand", url] if url.starts_with("postgres:") => hand_postgres::application(url).await?,
        ["hand", url] => hand_sqlite::application(url).await?,
        ["layer", url] => bare().layer(OnlyonceLayer::builder(store(url).await?).build()?),
        _ => return Err("serve wants bare, hand URL or layer URL".into()),
    };
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    println!("listening on {}", listener.local_addr()?);
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    let listener = listener.tap_io(|stream| {
        // Without it the second part of an answer would wait for the client's acknowledgement.
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, application).await?;
    Ok(())
}

async fn store(url: &str) -> Result<Arc<dyn Store>, Box<dyn Error>> {
    Ok(match url.strip_prefix("postgres:") {
        Some(_) => Arc::new(PostgresStore::open(&url.parse()?).await?),
        None => Arc::new(SqliteStore::open(&url.parse()?).await?),
    })
}

/// The application whose retries are to be safe. What it does costs nothing, so that what is measured is
/// what guarding it costs.
fn bare() -> Router {
    Router::new().route("/payments/{bytes}", post(pay)).route("/hold/{ms}", post(hold))
}

async fn pay(Path(bytes): Path<usize>) -> Response {
    paid(work(bytes))
}

/// Keeps its caller waiting, for requests that are to be in flight.
async fn hold(Path(ms): Path<u64>) -> Response {
    tokio::time::sleep(Duration::from_millis(ms)).await;
    paid(work(16))
}

/// The business: an answer of so many bytes, as hard to compress as real ones are at worst.
pub(crate) fn work(bytes: usize) -> Bytes {
    static ANSWER: LazyLock<Bytes> = LazyLock::new(|| {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
        let mut random = SplitMix(7);
        (0..ANSWER_BYTES_MAX).map(|_| LETTERS[random.below(64)]).collect()
    });
    ANSWER.slice(..bytes.min(ANSWER_BYTES_MAX))
}

fn paid(answer: Bytes) -> Response {
    (StatusCode::CREATED, [("content-type", "application/octet-stream")], answer).into_response()
}

/// What a replay is answered with, by hand.
fn replayed(status: i32, answer: Bytes) -> Response {
    let status = u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok());
    let headers = [("content-type", "application/octet-stream"), ("idempotent-replayed", "true")];
    (status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), headers, answer).into_response()
}

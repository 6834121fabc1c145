//! Makes retries safe: the work happens once, and whoever asks again gets the first answer.
//!
//! | what comes again | what makes it safe |
//! |---|---|
//! | a request to any HTTP service | [`OnlyonceLayer`], a tower layer |
//! | a request whose work is in one database | [`TransactionalLayer`]: the work, its claim and its answer in one transaction |
//! | a call of an async function: a webhook, a worker | [`Once`] |
//! | a message from a queue | [`Inbox`]: its side effects and the mark that it was processed in one transaction |
//! | a scheduled run | [`Periods`](period::Periods): one run for each period |
//!
//! # In an axum application
//!
//! `cargo add onlyonce --features axum`, and `cargo add onlyonce-postgres`, or `onlyonce-sqlite` for one file.
//!
//! ```no_run
//! use axum::{Router, routing::post};
//! use onlyonce::{Caller, Execution, KeyRule, OnlyonceLayer};
//! use onlyonce_postgres::PostgresStore;
//!
//! async fn pay(execution: Execution, amount: String) -> String {
//!     // A key for the bank to go by. It is the same if this has to run again.
//!     let charge = execution.downstream("charge").uuid();
//!     format!("charged {amount} as {charge}")
//! }
//!
//! #[tokio::main]
//! async fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let store = PostgresStore::open(&"postgres://app@localhost/app".parse()?).await?;
//!     let once = OnlyonceLayer::builder(store)
//!         .caller(Caller::header("x-user-id"))
//!         .route("POST /payments", |rule| rule.key(KeyRule::Required))
//!         .build()?;
//!     let app = Router::new().route("/payments", post(pay)).layer(once.clone());
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//!     let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
//!     axum::serve(listener, app).with_graceful_shutdown(stop).await?;
//!     once.drained().await;
//!     Ok(())
//! }
//! ```
//!
//! A request that carries an `Idempotency-Key` is claimed in the store, run on a task of its own, and its answer
//! recorded. A retry with that key is given the recorded answer, by whichever instance it reaches.
//!
//! # What happens to a request
//!
//! 1. GET, HEAD, OPTIONS, TRACE and CONNECT pass. POST and PATCH are guarded, other methods where a
//!    [route](Builder::route) says so.
//! 2. Without a key it passes, or is refused (400) under [`KeyRule::Required`].
//! 3. With a malformed key it is refused (400), never passed: it would be unprotected.
//! 4. The [caller](Caller), the namespace, the endpoint and the key are its identity. The same key from
//!    another caller is another operation.
//! 5. Path, query, body and the headers that a route lists are its fingerprint. The same key with
//!    another fingerprint is refused (422), before anything else is considered.
//! 6. If the key is free the service runs. A copy meanwhile is refused (409) or waits.
//! 7. 2xx, 3xx and most 4xx are kept and replayed with `Idempotent-Replayed: true`. 5xx and the
//!    statuses that ask to try again (401, 407, 408, 421, 425, 429) release the key. 502, 504 and an
//!    answer that was lost say nothing about the work: the key stays held until its lease ends. So it does
//!    when the service fails with an error; when it panics, the key is released.
//! 8. If the store is away, nothing runs (503).
//!
//! Every refusal is an RFC 9457 problem with a code in `Onlyonce-Refused`; see [`problem`]. An application can
//! [put it in its own words](Builder::refusal_body). The service's own errors are passed on as they are.
//!
//! # An accepted and a refused request
//!
//! ```
//! use std::convert::Infallible;
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use http_body_util::{BodyExt, Full};
//! use onlyonce::{MemoryStore, OnlyonceLayer, RequestBody};
//! use tower::{Layer, ServiceExt, service_fn};
//!
//! async fn pay(request: Request<RequestBody<Full<Bytes>>>) -> Result<Response<Full<Bytes>>, Infallible> {
//!     let amount = request.into_body().collect().await?.to_bytes();
//!     Ok(Response::new(Full::new(format!("paid {}", amount.escape_ascii()).into())))
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
//! let payments = OnlyonceLayer::builder(MemoryStore::new()).build()?.layer(service_fn(pay));
//! let request = |amount: &'static str| {
//!     Request::post("/payments").header("idempotency-key", "order-4711").body(Full::from(amount))
//! };
//!
//! let first = payments.clone().oneshot(request("100")?).await?;
//! assert_eq!(first.status(), 200);
//!
//! // A retry is given the first answer; the payment is made once.
//! let retry = payments.clone().oneshot(request("100")?).await?;
//! assert_eq!(retry.headers()["idempotent-replayed"], "true");
//!
//! // An edited request under the same key is refused.
//! let edited = payments.clone().oneshot(request("999")?).await?;
//! assert_eq!(edited.status(), 422);
//! assert_eq!(edited.headers()["onlyonce-refused"], "idempotency-key-reused");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Deployment
//!
//! - Put the layer *inside* whatever authenticates, so that the caller is known, and *outside* whatever has side
//!   effects. In axum, the layer that is added last is outermost.
//! - Put it *around* axum's nested routers, not into them: inside of one the path has lost its prefix, and
//!   `/v1/payments` and `/v2/payments` would share their keys.
//! - A response compressed by an inner layer is recorded compressed, for the encodings of the first caller:
//!   compress outside.
//! - A guarded request is read into memory before the service is called, and a recorded answer while it is sent:
//!   [`request_body_bytes_max`](Rule::request_body_bytes_max) and
//!   [`response_body_bytes_max`](Rule::response_body_bytes_max) bound them.
//! - The work goes on when its caller hangs up. So a server's own graceful shutdown does not wait for it:
//!   [`OnlyonceLayer::drained`] does.
//! - Expired records are removed by the layer itself; see [`Builder::sweep_every`].
//! - A gRPC call that failed at once is judged by its own status, as if it were the HTTP status for it. A stream that
//!   fails later is recorded as it is, except in the transactional form, which rolls it back. The layer's own
//!   refusals have HTTP statuses, which a gRPC client maps to its own.
//! - A holder that stalls for longer than its lease and then wakes can still act on the outside world,
//!   although its record is refused. Give such an act [a key of its own](Execution::downstream).
//!
//! # Features
//!
//! `axum`: [`Execution`] and [`Tx`] as extractors.

mod admit;
mod answer;
mod body;
mod builder;
pub mod caller;
mod claim;
#[cfg(feature = "axum")]
mod extract;
pub mod function;
mod headers;
pub mod inbox;
pub mod keep;
mod layer;
pub mod period;
pub mod problem;
mod renewal;
pub mod rules;
mod service;
pub mod settings;
mod sweeper;
pub mod transactional;
mod work;

pub use admit::IDEMPOTENCY_KEY;
pub use body::{BoxError, RequestBody, ResponseBody};
pub use builder::{Builder, Rule};
pub use caller::{Caller, CallerError, ResolveCaller};
#[cfg(feature = "axum")]
pub use extract::Unguarded;
pub use function::{Failed, FunctionConfig, Once, Returned, RunError};
pub use headers::{HOP_BY_HOP, IDEMPOTENT_REPLAYED, recorded_headers};
pub use inbox::{Inbox, InboxConfig, InboxError, Incoming, NotDone, Processed, Received};
pub use keep::KeepRules;
pub use layer::{Config, Execution, Failure, NAMESPACE_DEFAULT, OnlyonceLayer};
pub use onlyonce_core::{BodyMode, Downstream, IntoStore, Key, Lapse, MemoryStore, Operation, Store};
pub use rules::Route;
pub use service::{OnlyonceService, ResponseFuture};
pub use settings::{KeyRule, OnConcurrent, Settings, SettingsError};
pub use sweeper::SWEEP_ROWS_MAX;
pub use transactional::{TransactionalLayer, Tx};

/// The names of what the layer counts, through the [`metrics`](https://docs.rs/metrics) facade.
pub mod metric {
    pub use crate::sweeper::{SWEEP_FAILURES, SWEPT_ROWS};
    pub use crate::work::{CLAIM_ANSWERS, CLAIMS, IN_FLIGHT, LOST_LEASES, RECORD_FAILURES};
}

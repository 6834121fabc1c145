//! Makes retries safe: the work happens once, and whoever asks again gets the first answer.

mod answer;
mod body;
pub mod caller;
mod headers;
pub mod keep;
mod layer;
pub mod problem;
pub mod rules;
mod service;
pub mod settings;
mod work;

pub use body::{BoxError, RequestBody, ResponseBody};
pub use caller::{Caller, CallerError, ResolveCaller};
pub use headers::IDEMPOTENT_REPLAYED;
pub use keep::KeepRules;
pub use layer::{Config, Execution, Failure, NAMESPACE_DEFAULT, OnlyonceLayer};
pub use rules::Route;
pub use service::{IDEMPOTENCY_KEY, OnlyonceService, ResponseFuture};
pub use settings::{Settings, SettingsError};

/// The names of what the layer counts, through the [`metrics`](https://docs.rs/metrics) facade.
pub mod metric {
    pub use crate::work::{CLAIM_ANSWERS, CLAIMS, IN_FLIGHT, LOST_LEASES, RECORD_FAILURES};
}

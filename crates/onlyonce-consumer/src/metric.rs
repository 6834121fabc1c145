//! The names of what a consumer counts, through the [`metrics`](https://docs.rs/metrics) facade. Each has the label
//! `consumer`.

/// Counts messages by how they were settled, in the label `outcome`: `done`, `duplicate`, `retried`, `in_flight`,
/// `not_committed`, `interrupted`, `store_error`, `dead_lettered`. One that comes again is counted again.
pub const MESSAGES: &str = "onlyonce_messages_total";
/// How many messages are being processed.
pub const IN_FLIGHT: &str = "onlyonce_messages_in_flight";
/// How long handlers take, in seconds, from opening their transaction to their end.
pub const HANDLER_SECONDS: &str = "onlyonce_handler_seconds";
/// Counts what the broker could not do or be told.
pub const BROKER_FAILURES: &str = "onlyonce_broker_failures_total";
/// Counts attempts to subscribe again.
pub const RECONNECTS: &str = "onlyonce_broker_reconnects_total";

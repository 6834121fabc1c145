//! The life of one idempotency key: who may do the work, and what everybody else is told.
//!
//! ```text
//!             grant                   complete
//!   absent ───────────▶ Running ─────────────────▶ Done ──▶ replay
//!     ▲                  │  │ ▲                      │
//!     │     release      │  └─┘ renew;               │ expires
//!     ├──────────────────┘      lapsed: rerun, hold  │
//!     └──────────────────────────────────────────────┘
//! ```
//!
//! Read in this order; it takes ten minutes:
//!
//! 1. [`record`]: what a store keeps for one key.
//! 2. [`machine`]: every decision, as pure functions.
//! 3. [`engine`]: the decisions carried out against a store that may fail at any call.
//!
//! A [`Store`] is a compare-and-swap register with a clock, and decides nothing. [`identity`] and
//! [`fingerprint`] say which requests are the same, [`outcome`] how an answer is kept, [`downstream`] which
//! key a side effect outside of the store has, [`group`] and [`reads`] how concurrent calls share a commit
//! or a round trip. A store that is also [`Transactional`] can claim a key inside its user's own transaction:
//! see [`transact`].
//!
//! # Example
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use onlyonce_core::{Claimed, Engine, Fingerprint, Key, Lapse, MemoryStore, Operation, Outcome, Policy, Verdict};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
//! let engine = Engine::new(Arc::new(MemoryStore::new()));
//! let policy = Policy {
//!     lease: Duration::from_secs(75),
//!     retention: Duration::from_secs(86_400),
//!     on_lapse: Lapse::Rerun,
//! };
//! let payment = Operation::new("default", "POST /payments", "ann", Key::new("order-4711")?);
//! let request = Fingerprint { target: [0; 32], body: [1; 32] };
//!
//! let Claimed::Execute(grant) = engine.claim(&payment, request, &policy).await? else { panic!() };
//! // While the work runs, a copy is refused …
//! assert!(matches!(engine.claim(&payment, request, &policy).await?, Claimed::Refused(_)));
//! let outcome = Outcome { status: 201, head: Default::default(), body: "paid".into() };
//! grant.finish(Verdict::Keep(outcome.clone())).await?;
//! // … and once it is done, every copy gets its outcome.
//! let Claimed::Replay(replayed) = engine.claim(&payment, request, &policy).await? else { panic!() };
//! assert_eq!(replayed, outcome);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```

pub mod backoff;
mod digest;
pub mod downstream;
pub mod engine;
pub mod fingerprint;
pub mod group;
pub mod identity;
pub mod machine;
mod memory;
pub mod outcome;
pub mod reads;
pub mod record;
pub mod store;
#[cfg(test)]
mod tests;
pub mod transact;

pub use downstream::Downstream;
pub use engine::{Claimed, Engine, Finished, Grant};
pub use fingerprint::BodyMode;
pub use identity::{Id, Key, Operation};
pub use machine::{Lapse, Policy, Refusal, Verdict};
pub use memory::MemoryStore;
pub use outcome::Recorded;
pub use record::{Fingerprint, Outcome, Revision, Timestamp, Write};
pub use store::{Inspect, IntoStore, Store, StoreError, StoreErrorKind};
pub use transact::{TransactionError, Transactional};

//! Sends a request until its outcome is known, and its work is done once.
//!
//! A client that saw a timeout does not know whether the server did the work. It has to ask again, and the
//! server has to see that it is the same request: by its `Idempotency-Key`, the same on every attempt. This
//! crate mints the key once for each call, keeps it through every retry and redirect, and with a journal
//! through a crash of the process too.
//!
//! | take | for |
//! |---|---|
//! | [`layered`] | programs that use `reqwest`: a layer for `reqwest-middleware` |
//! | [`Client`] | whole answers and little else |
//! | `Journal` (feature `journal`) | intents that outlive the process, on SQLite |
//!
//! # What happens to a call
//!
//! 1. The caller's own key wins. Otherwise a POST or PATCH is given a fresh one; other methods are sent as
//!    they are.
//! 2. The body is read into memory, so that every attempt sends the same bytes.
//! 3. A timeout, a lost connection, an answer that was cut off, 408, 425, 429, 5xx and a 409 that says *in
//!    flight* are followed by another attempt: with the same key, after a wait that doubles and is partly
//!    random, or the one that `Retry-After` asks for.
//! 4. Every other answer is the caller's, an application's own 409 and 422 too, and so is any replay
//!    (`Idempotent-Replayed: true`): nothing newer will come.
//! 5. A refusal of the key itself (400, 409, 422 with its problem type) is [`Error::Refused`], and says what
//!    differs.
//! 6. A call ends by its deadline, whatever the server asks for. [`Error::GaveUp`] says whether the work may
//!    have happened, and has the key to go on with.
//! 7. Without a key only GET, HEAD, OPTIONS, TRACE, PUT and DELETE are sent again. A POST is not, whatever
//!    becomes of it.
//! 8. The key goes along on redirects within its origin, and to no other.
//!
//! # One key, one intent
//!
//! The key stands for what a user wants to happen once, not for an HTTP call. Whoever can name that (an order
//! id, a row id) says so with [`Call::intent`] or [`derive()`]: then the second click, the restarted job and
//! the other machine have the same key as the first. A key that is a hash of the body is wrong: two payments
//! of the same amount become one, and a retry with a new timestamp becomes two.
//!
//! # Other clients of reqwest in the same program
//!
//! This crate has reqwest's feature `rustls-no-provider` on, with the provider `ring` for the clients that it makes. A
//! program whose *other* `reqwest::Client`s are built without a provider (with `default-features = false` and no feature
//! for TLS) must name one first, or building them panics:
//! `rustls::crypto::ring::default_provider().install_default()`.
//!
//! # Example
//!
//! ```
//! use onlyonce_client::{Client, Error, Settings};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let mut settings = Settings::default();
//! settings.deadline = std::time::Duration::from_millis(50);
//! let client = Client::new(settings)?;
//! // Nobody listens there, so nothing can have happened.
//! let error = client.post("http://127.0.0.1:9/payments").body("amount=10").send().await.unwrap_err();
//! assert!(matches!(error, Error::GaveUp(_)));
//! assert_eq!(error.work(), onlyonce_client::Work::NotDone);
//! let key = error.key().expect("it had a key").clone();
//! // Later: the same operation, not a second one.
//! let call = client.post("http://127.0.0.1:9/payments").body("amount=10").key(key);
//! # drop(call);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;
mod budget;
mod client;
mod decide;
mod error;
#[cfg(feature = "journal")]
mod journal;
mod key;
mod middleware;
mod redirect;
mod retry_after;
mod send;
mod settings;

pub use answer::{Answer, IDEMPOTENT_REPLAYED, Receipt};
#[cfg(feature = "journal")]
pub use client::Resumed;
pub use client::{Call, Client};
pub use decide::{Because, Work};
pub use error::{Error, GaveUp, Refused};
#[cfg(feature = "journal")]
pub use journal::{Entry, Journal, JournalError, JournalOptions};
pub use key::{IDEMPOTENCY_KEY, derive, mint};
pub use middleware::{BuildError, Keyless, http, layered};
pub use onlyonce_core::Key;
pub use onlyonce_core::identity::MalformedKey;
pub use settings::{BudgetSettings, DEADLINE_MAX, Settings, SettingsError};

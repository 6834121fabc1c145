//! The strongest form: the claim of a key, the handler's own writes and the recorded answer in **one**
//! transaction.
//!
//! ```text
//! begin ─▶ claim ─▶ the handler, with the transaction ─▶ record the answer ─▶ commit ─▶ answer
//!            │                    │
//!            │                    └ 5xx, error, panic, no answer: roll back; nothing happened
//!            └ done before: replay · claimed by an open transaction: wait for its end
//! ```
//!
//! | the work ended with | the database |
//! |---|---|
//! | an answer worth keeping | the work and its answer are committed, and then the caller is told |
//! | another answer, an error, a panic, none within the lease | as if the request had never come |
//! | a serialization failure or a deadlock | the same, and the handler runs again where [`reruns`](TransactionalLayer::reruns) allows it |
//! | the process was killed, the connection lost | the same: no key is left held, the next retry runs at once |
//! | a commit whose answer was lost | one or the other: settled by claiming the key again |
//!
//! # The handler
//!
//! It is given the open transaction as a [`Tx`] and writes through it; nothing that goes another way is
//! undone. A request without a key gets a transaction too, committed by the same rules, and nothing is
//! recorded. A request that no rule covers has none, and [`Tx`] refuses it.
//!
//! It leaves the transaction's end to the layer: no `COMMIT` or `ROLLBACK` of its own, after which every
//! statement commits alone. On Postgres sqlx does the same to it where the `begin` of a transaction nested inside
//! fails or is dropped halfway, by a timeout for example; one that has begun may be dropped. An answer worth
//! keeping is then answered by 503 unless it was recorded. Where the answer is not worth keeping nobody finds out:
//! what was committed stays, and so may the key, until its lease ends.
//!
//! It needs no second connection of the pool that its transaction is from: where every connection belongs to
//! such a handler, each waits for the others until the pool's `acquire_timeout`.
//!
//! An effect outside of the database, such as a card charge, cannot be rolled back: give it a
//! [downstream key](Execution::downstream), which is the same when the handler runs again.
//!
//! # Copies
//!
//! A copy that comes while the first is running waits for its end, for up to [`Settings::wait`]. Within one
//! process it waits in memory and holds no connection, however many there are; of each key one request at
//! a time has one. On another instance it looks again and again, and holds a connection for
//! no longer than [`LOCK_WAIT`] at a time. After `wait` it is refused with 409.
//!
//! SQLite has one writer at a time for a whole file. There every request waits for its turn, whatever its key,
//! for up to [`TURN_WAIT`] and then gets 503: keep whatever is slow out of the handler.
//!
//! # Limits
//!
//! The transaction is open while the handler runs, its answer is gathered, and with it one connection of
//! the pool is in use; a handler that waits for somebody else's service keeps locks meanwhile. Nothing of an
//! answer is sent before the commit: a stream of events has no place here. An answer over
//! [`Settings::response_body_bytes_max`] is not recorded; the mark that the work was done is, before the
//! first byte is sent. One whose body still has the transaction then is not committed.
//!
//! Nobody sees a key that an open transaction has claimed. An [`OnlyonceLayer`](crate::OnlyonceLayer) that is asked
//! for it, on an instance that has not been deployed anew for example, waits at its row for a moment, holds up
//! other keys meanwhile, and answers 503.
//!
//! Of two layers around one handler, each on a store of another type, both give their [`Tx`], and the inner one
//! commits first; on stores of one type the inner one's is given. Two guards in a row, in one process or not,
//! must not claim the same key in the same table: the second would find the first at it, and refuse with 409.
//! Give one of them a [namespace](crate::Config::namespace) of its own.

mod queue;
mod service;
mod tx;
mod work;

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::Transactional;
use tokio_util::task::TaskTracker;
use tower_layer::Layer;

#[cfg(doc)]
use crate::Execution;
use crate::admit::Front;
use crate::builder::Builder;
use crate::layer::Config;
use crate::settings::{OnConcurrent, Settings, SettingsError};
use crate::sweeper::Sweeper;
use queue::Queue;

pub use service::TransactionalService;
pub use tx::{NoTransaction, Tx};
pub use work::{LOCK_WAIT, TURN_WAIT};

/// Guards a service, and runs each operation in one transaction with its claim and its recorded answer.
///
/// Cheap to clone; clones share the store and the running work.
pub struct TransactionalLayer<T> {
    shared: Arc<Shared<T>>,
    reruns: u32,
}

pub(crate) struct Shared<T> {
    pub(crate) front: Front,
    pub(crate) store: T,
    pub(crate) queue: Arc<Queue>,
    pub(crate) record_grace: Duration,
    pub(crate) tasks: TaskTracker,
    pub(crate) sweeper: Sweeper,
}

impl<T: Transactional> TransactionalLayer<T> {
    /// Says in code what is to be set; see [`Builder`]. Unlike those of [`OnlyonceLayer`], copies wait unless it
    /// says otherwise.
    ///
    /// [`OnlyonceLayer`]: crate::OnlyonceLayer
    pub fn builder(store: T) -> Builder<Self> {
        let defaults = Settings { on_concurrent: OnConcurrent::Wait, ..Settings::default() };
        Builder::new(Config { defaults, ..Config::default() }, |config| Self::new(store, config))
    }

    /// A layer on this store. [`builder`](Self::builder) says the same in fewer words.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn new(store: T, config: Config) -> Result<Self, SettingsError> {
        let (record_grace, sweep_every) = (config.record_grace, config.sweep_every);
        let shared = Shared {
            front: Front::new(config)?,
            sweeper: Sweeper::new(store.store(), sweep_every),
            store,
            queue: Arc::default(),
            record_grace,
            tasks: TaskTracker::new(),
        };
        Ok(Self { shared: Arc::new(shared), reruns: 0 })
    }

    /// How often a handler runs again whose transaction the database undid because of a concurrent one; never
    /// unless this says so. Such a handler must have no effect outside of its transaction but under a
    /// [downstream key](Execution::downstream). It reports what its own queries met by
    /// [`Failure::Conflict`](crate::Failure::Conflict).
    ///
    /// Postgres under `SERIALIZABLE` needs them: it notes by pages of an index what was read, so that work under
    /// different keys conflicts as well while the table has few. Of 400 executions, eight at a time, it undid 58 on
    /// an empty table and none on one with 20,000 keys.
    #[must_use]
    pub fn reruns(mut self, times_max: u32) -> Self {
        self.reruns = times_max;
        self
    }

    /// Waits until no work is running, and stops the sweeper. For a graceful shutdown, after the last request
    /// was accepted.
    pub async fn drained(&self) {
        self.shared.sweeper.stop();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

impl<T> Clone for TransactionalLayer<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), reruns: self.reruns }
    }
}

impl<I, T> Layer<I> for TransactionalLayer<T> {
    type Service = TransactionalService<I, T>;

    fn layer(&self, inner: I) -> TransactionalService<I, T> {
        TransactionalService::new(inner, Arc::clone(&self.shared), self.reruns)
    }
}

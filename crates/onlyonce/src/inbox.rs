//! The effects of a message, once, however often it is delivered: for consumers of a queue.
//!
//! A broker delivers a message again whenever it did not hear that it was processed, and a producer sends it again
//! whenever it did not hear that it was taken. An inbox claims the message's id in the same database transaction as
//! the effects, so that both are committed or neither is.
//!
//! ```text
//! your transaction:  receive ─▶ your writes ─▶ done ─▶ commit ─▶ acknowledge
//!                       │
//!                       ├ processed and committed before: Duplicate; acknowledge
//!                       └ somebody is at it: an error; put it back
//! ```
//!
//! | what | in a transaction of yours: [`receive`](Inbox::receive), [`process`](Inbox::process) | with a counted attempt: [`attempt`](Inbox::attempt) |
//! |---|---|---|
//! | commits for one message | one | two: the attempt, then the effects |
//! | a copy meanwhile | waits for your transaction's end | is told that somebody is at it |
//! | a worker that was killed | as if it had never received it; a copy runs at once | its attempt counts; a copy runs when its lease is over |
//! | a message that kills every worker | is never told from one that was never tried | can be given up after so many attempts |
//!
//! The crate `onlyonce-consumer` is built on the second: it takes messages from a broker, and acknowledges them, puts
//! them back and dead-letters them.
//!
//! # What a message is
//!
//! Its identity is the namespace, the consumer's name and its id: two consumers of one message both process it. An
//! id is any text that is not empty; [`key_of`] says under which key it is kept. Where the payload
//! [is given](Incoming::payload), a message that has the id of another payload is refused: a producer that uses an
//! id twice would otherwise lose the second message, unseen.
//!
//! # How it can end
//!
//! | the handling | what to do | a copy |
//! |---|---|---|
//! | done | [`First::done`], commit, acknowledge | is a [`Duplicate`] with the same result |
//! | retry later | roll back, put it back | is received again |
//! | failed for good | dead-letter it, [`First::failed`], commit, acknowledge | is a [`Duplicate`] that tells so |
//!
//! A message is dead-lettered, and that is confirmed, before it is recorded as failed. The other way round, one whose
//! worker dies in between would be in no queue at all: its copy is a duplicate, and acknowledged.
//!
//! Never acknowledge before the commit is answered. If its answer is lost, put the message back: whoever receives it
//! then is told whether it was committed.
//!
//! # Your transaction
//!
//! It may come from [`Transactional::begin`], or from your own pool. [`receive`](Inbox::receive) waits for a copy's
//! open transaction for as long as `begin` was told; in a transaction that you opened yourself, for as long as your
//! own `lock_timeout` says (on Postgres for ever, unless it is set). After a [`Duplicate`], [`InboxError::Mismatch`] or
//! [`InboxError::InFlight`] the transaction is as good as before, and nothing was written; after any other error it
//! can only be rolled back.
//!
//! On SQLite open it for writing from the start (`BEGIN IMMEDIATE`, as `begin` does): one that reads first and writes
//! later fails when somebody else wrote in between.
//!
//! # How long it is remembered
//!
//! For [`retention`](InboxConfig::retention) from its commit, 7 days unless it is set. It must exceed the time in which
//! the broker, or a person who replays a queue, can deliver the message again: what comes later is processed again.
//! Expired records are removed every [`sweep_every`](InboxConfig::sweep_every).
//!
//! # Example
//!
//! ```
//! use onlyonce::inbox::{Inbox, InboxConfig, InboxError, Incoming, Received};
//! use onlyonce_core::Transactional;
//! use onlyonce_sqlite::{SqliteOptions, SqliteStore};
//! use sqlx::{Row, SqlitePool, sqlite::SqliteConnectOptions};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! # let folder = tempfile::tempdir()?;
//! # let file = folder.path().join("app.db");
//! # let connect = SqliteConnectOptions::new().filename(&file).create_if_missing(true)
//! #     .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal);
//! # let pool = SqlitePool::connect_with(connect).await?;
//! # sqlx::query("CREATE TABLE payments (amount INTEGER)").execute(&pool).await?;
//! let store = SqliteStore::open(&SqliteOptions::file(&file).shared(true)).await?;
//! let database = store.transactions(&pool).await?;
//! let inbox = Inbox::new(database.clone(), "billing", InboxConfig::default())?;
//!
//! // The message comes twice; the payment is made once.
//! for (delivery, expected) in [(1, "booked"), (2, "a duplicate of payment 1")] {
//!     let message = Incoming::new("order-4711").payload(b"100");
//!     let mut tx = database.begin(std::time::Duration::from_secs(1)).await?;
//!     let told = match inbox.receive(&mut tx, &message).await? {
//!         Received::First(first) => {
//!             let insert = sqlx::query("INSERT INTO payments VALUES (100) RETURNING rowid");
//!             let payment: i64 = insert.fetch_one(&mut *tx).await?.get(0);
//!             first.done(&mut tx, &payment).await?;
//!             "booked".to_owned()
//!         }
//!         Received::Duplicate(duplicate) => {
//!             format!("a duplicate of payment {}", duplicate.result::<i64>()?)
//!         }
//!     };
//!     database.commit(tx).await?;
//!     // Only now may it be acknowledged.
//!     assert_eq!(told, expected, "delivery {delivery}");
//! }
//!
//! // Another payload under the same id is refused.
//! let mut tx = database.begin(std::time::Duration::from_secs(1)).await?;
//! let reused = inbox.receive(&mut tx, &Incoming::new("order-4711").payload(b"999")).await;
//! assert!(matches!(reused, Err(InboxError::Mismatch)));
//! # database.roll_back(tx).await;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod attempt;
mod duplicate;
mod error;
mod incoming;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::transact::{self, ClaimedIn, Held};
use onlyonce_core::{Downstream, Engine, Lapse, Operation, Policy, Store, Transactional};
use serde::Serialize;

use crate::function::recorded;
use crate::layer::{Execution, NAMESPACE_DEFAULT};
use crate::settings::{SettingsError, check_durations, check_retention};
use crate::sweeper::Sweeper;

pub use attempt::{Attempt, Attempted};
pub use duplicate::Duplicate;
pub use error::{InboxError, NotDone};
pub use incoming::{HASHED_PREFIX, Incoming, NoId, key_of};

/// Everything about an inbox but its store and its consumer's name.
#[derive(Clone, Debug)]
pub struct InboxConfig {
    /// One application. Two applications on one store set their own.
    pub namespace: String,
    /// How long a counted attempt is held without a renewal, on the store's clock. Copies wait for so long after a
    /// process has died; the handling itself may take longer.
    pub lease: Duration,
    /// How long a message is remembered after it was processed, on the store's clock. At least the lease, and longer
    /// than [`redelivery_horizon`](Self::redelivery_horizon).
    pub retention: Duration,
    /// How long after a message's first delivery the broker can deliver it again, where that is known; what
    /// [`retention`](Self::retention) is checked against.
    pub redelivery_horizon: Option<Duration>,
    /// How often expired records are removed from the store, on the local monotonic clock; `None` leaves it to
    /// somebody else.
    pub sweep_every: Option<Duration>,
}

/// A week: brokers hardly keep a message for longer, and people hardly replay an older one.
pub const RETENTION_DEFAULT: Duration = Duration::from_secs(7 * 86_400);

impl Default for InboxConfig {
    fn default() -> Self {
        Self {
            namespace: NAMESPACE_DEFAULT.to_owned(),
            lease: Duration::from_secs(30),
            retention: RETENTION_DEFAULT,
            redelivery_horizon: None,
            sweep_every: Some(Duration::from_secs(60)),
        }
    }
}

impl InboxConfig {
    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Names the setting that contradicts another, and what is allowed.
    pub fn check(&self) -> Result<(), SettingsError> {
        if self.namespace.is_empty() {
            return Err(SettingsError::new("namespace", "must not be empty"));
        }
        check_durations(&[("lease", self.lease), ("retention", self.retention)])?;
        if let Some(every) = self.sweep_every {
            check_durations(&[("sweep_every", every)])?;
        }
        check_retention(self.retention, self.lease)?;
        match self.redelivery_horizon {
            Some(horizon) if self.retention <= horizon => {
                let reason = format!(
                    "{:?} must exceed {horizon:?}, for which the broker may deliver a message again: it would be \
                     processed twice",
                    self.retention
                );
                Err(SettingsError::new("retention", reason))
            }
            _ => Ok(()),
        }
    }

    /// A worker that went silent either committed or left nothing behind, so its message is always run again.
    fn policy(&self) -> Policy {
        Policy { lease: self.lease, retention: self.retention, on_lapse: Lapse::Rerun }
    }
}

/// The messages of one consumer. Cheap to clone; clones share the store.
pub struct Inbox<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    store: T,
    keys: Arc<dyn Store>,
    engine: Engine,
    consumer: String,
    config: InboxConfig,
    sweeper: Sweeper,
}

impl<T> Clone for Inbox<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

/// How the endpoint of a message's key is called, for people who list keys.
#[must_use]
pub fn endpoint_of(consumer: &str) -> String {
    format!("{ENDPOINT_PREFIX}{consumer}")
}

/// What [`endpoint_of`] puts before a consumer's name.
pub const ENDPOINT_PREFIX: &str = "inbox ";

/// What receiving a message told.
pub enum Received<'a, T> {
    /// Nobody has processed it: do so in this transaction, then [`First::done`], then commit.
    First(First<'a, T>),
    /// It was processed, and that is committed: acknowledge it. Nothing was written.
    Duplicate(Duplicate),
}

/// What processing a message told.
#[derive(Debug)]
pub enum Processed<R> {
    /// It was processed now; commit.
    Done(R),
    /// It was processed, and that is committed: acknowledge it. Nothing was written.
    Duplicate(Duplicate),
}

impl<T: Transactional> Inbox<T> {
    /// The inbox of the consumer with this name. Another consumer of the same messages has another name; a renamed one
    /// forgets what was processed.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn new(store: T, consumer: impl Into<String>, config: InboxConfig) -> Result<Self, SettingsError> {
        let consumer = consumer.into();
        if consumer.is_empty() {
            return Err(SettingsError::new("consumer", "must not be empty"));
        }
        config.check()?;
        let keys = store.store();
        let (engine, sweeper) =
            (Engine::new(Arc::clone(&keys)), Sweeper::new(Arc::clone(&keys), config.sweep_every));
        Ok(Self { shared: Arc::new(Shared { store, keys, engine, consumer, config, sweeper }) })
    }

    /// Receives a message inside `transaction`, before its effects.
    ///
    /// # Errors
    /// See [`InboxError`]: nothing may be done for the message, and it must not be acknowledged.
    pub async fn receive(
        &self,
        transaction: &mut T::Transaction,
        message: &Incoming<'_>,
    ) -> Result<Received<'_, T>, InboxError> {
        let Shared { store, config, sweeper, .. } = &*self.shared;
        sweeper.start();
        let operation = self.operation(message)?;
        let claimed =
            transact::claim(store, transaction, &operation, message.fingerprint(), &config.policy()).await?;
        match claimed {
            ClaimedIn::Execute(held) => {
                let execution = Execution { operation: Arc::new(operation), attempt: held.attempt() };
                Ok(Received::First(First { store, held, execution }))
            }
            ClaimedIn::Replay(outcome) => Ok(Received::Duplicate(Duplicate::of(outcome))),
            ClaimedIn::Refused(refusal) => Err(refusal.into()),
        }
    }

    /// Receives a message inside `transaction` and, unless it was processed before, has `work` process it there. Its
    /// result is recorded beside what it wrote, and counts once the transaction is committed, which is yours to do.
    ///
    /// ```
    /// # use onlyonce::inbox::{Inbox, InboxError, Incoming, NotDone, Processed};
    /// # use onlyonce_sqlite::SqliteTransactions;
    /// # async fn handle(inbox: &Inbox<SqliteTransactions>, pool: &sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
    /// let processed = inbox
    ///     .process(&mut tx, &Incoming::new("order-4711"), async |tx, execution| {
    ///         sqlx::query("INSERT INTO payments VALUES (100)").execute(&mut **tx).await?;
    ///         Ok(execution.downstream("receipt").uuid())
    ///     })
    ///     .await;
    /// match processed {
    ///     Ok(Processed::Done(_)) => tx.commit().await?,
    ///     Ok(Processed::Duplicate(_)) => tx.rollback().await?,
    ///     // Put the message back.
    ///     Err(error) => return Err(error.into()),
    /// }
    /// // Acknowledge the message.
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`InboxError`]: roll back, and do not acknowledge the message. [`InboxError::NotDone`] has what `work` said.
    pub async fn process<R, W>(
        &self,
        transaction: &mut T::Transaction,
        message: &Incoming<'_>,
        work: W,
    ) -> Result<Processed<R>, InboxError>
    where
        R: Serialize,
        W: AsyncFnOnce(&mut T::Transaction, &Execution) -> Result<R, NotDone>,
    {
        match self.receive(transaction, message).await? {
            Received::First(first) => {
                let result = work(&mut *transaction, first.execution()).await.map_err(InboxError::NotDone)?;
                first.done(transaction, &result).await?;
                Ok(Processed::Done(result))
            }
            Received::Duplicate(duplicate) => Ok(Processed::Duplicate(duplicate)),
        }
    }

    /// The name that the inbox has.
    #[must_use]
    pub fn consumer(&self) -> &str {
        &self.shared.consumer
    }

    /// The settings that the inbox has.
    #[must_use]
    pub fn config(&self) -> &InboxConfig {
        &self.shared.config
    }

    fn operation(&self, message: &Incoming<'_>) -> Result<Operation, NoId> {
        let Shared { consumer, config, .. } = &*self.shared;
        Ok(Operation::new(config.namespace.clone(), endpoint_of(consumer), "", key_of(message.id)?))
    }
}

/// A message that is to be processed in the transaction that received it. Rolling that back undoes all of it.
pub struct First<'a, T> {
    store: &'a T,
    held: Held,
    execution: Execution,
}

impl<T: Transactional> First<'_, T> {
    /// Which message it is, as an operation. Attempts that were rolled back do not count in it.
    #[must_use]
    pub fn execution(&self) -> &Execution {
        &self.execution
    }

    /// The key of the side effect that the handler calls `label`, for its provider to dedupe on; the same however often
    /// the message is received. See [`onlyonce_core::downstream`].
    #[must_use]
    pub fn downstream(&self, label: &str) -> Downstream {
        self.execution.downstream(label)
    }

    /// Records the result beside the effects. It counts once the transaction is committed. A result that does not
    /// serialise is not kept, but the message is done.
    ///
    /// # Errors
    /// When it is not recorded: roll the transaction back.
    pub fn done<R: Serialize + ?Sized>(
        self,
        transaction: &mut T::Transaction,
        result: &R,
    ) -> impl Future<Output = Result<(), InboxError>> + Send {
        let json = serde_json::to_vec(result);
        self.complete(transaction, false, json)
    }

    /// Records that the message can never be processed, and why, beside whatever else is written in the transaction. To
    /// be used where nothing was done for it. It counts once the transaction is committed.
    ///
    /// # Errors
    /// When it is not recorded: roll the transaction back.
    pub fn failed<E: Serialize + ?Sized>(
        self,
        transaction: &mut T::Transaction,
        reason: &E,
    ) -> impl Future<Output = Result<(), InboxError>> + Send {
        let json = serde_json::to_vec(reason);
        self.complete(transaction, true, json)
    }

    async fn complete(
        self,
        transaction: &mut T::Transaction,
        is_error: bool,
        json: Result<Vec<u8>, serde_json::Error>,
    ) -> Result<(), InboxError> {
        let outcome = recorded(self.execution.attempt, is_error, json).encode();
        Ok(self.held.complete(self.store, transaction, outcome).await?)
    }
}

impl<T> fmt::Debug for Received<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First(first) => f.debug_tuple("First").field(first).finish(),
            Self::Duplicate(duplicate) => f.debug_tuple("Duplicate").field(duplicate).finish(),
        }
    }
}

impl<T> fmt::Debug for First<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("First").field("execution", &self.execution).finish_non_exhaustive()
    }
}

//! The strongest form: the claim, the user's own writes and the outcome in **one** transaction.
//!
//! ```text
//! begin ─▶ claim ─▶ the user's writes ─▶ complete ─▶ commit        one commit; all of it, or nothing
//!            │
//!            ├ somebody completed it: replay, roll back
//!            └ somebody has claimed it and not committed: wait for that, or Busy
//! ```
//!
//! A claim that nobody committed was never made: after a crash there is no lease to wait for. While its
//! transaction is open, nobody can see it; whoever claims the same key waits in the database for that
//! transaction's end.
//!
//! What the [`machine`] decides is decided here as well: a key that is held with a lease by
//! another way in is refused, and a lapsed or expired one taken over.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::engine::CLAIM_ROUNDS_MAX;
use crate::identity::{Id, Operation};
use crate::machine::{self, Claim, Finish, Policy, Refusal, Verdict};
use crate::record::{Fingerprint, Outcome, Record, Revision, Write};
use crate::store::{Inserted, Replaced, Store, StoreError, StoreErrorKind};

/// A store that can join a transaction which is its user's as well.
///
/// As with [`Store`], no method has a default, and a store decides nothing.
///
/// # Cancellation
///
/// A dropped `begin` leaves no connection inside a transaction. A transaction that is dropped, in whatever
/// state, is rolled back.
#[async_trait]
pub trait Transactional: Send + Sync + 'static {
    /// The open transaction, in the type that the user's own queries want.
    type Transaction: Send + 'static;

    /// Whether one transaction at a time can write, in the whole database: then beginning one waits for its
    /// turn, whatever its key, and a claim waits for nobody.
    const ONE_WRITER: bool;

    /// The same keys outside of transactions.
    fn store(&self) -> Arc<dyn Store>;

    /// Opens a transaction for writing. Until it has claimed its key it waits no longer than `wait` for a
    /// lock or for its turn, on the store's clock; what the user does afterwards runs under the user's own
    /// settings.
    async fn begin(&self, wait: Duration) -> Result<Self::Transaction, TransactionError>;

    /// Opens a transaction for writing in which no key is claimed: from the start it runs under the user's own
    /// settings. Where only one can write at a time, it waits for its turn until it is dropped.
    async fn open(&self) -> Result<Self::Transaction, TransactionError>;

    /// As [`Store::insert`], inside the transaction. If another open transaction has inserted the same id, it
    /// waits for that one's end, and then sees what was committed.
    async fn insert(
        &self,
        transaction: &mut Self::Transaction,
        operation: &Operation,
        write: Write,
    ) -> Result<Inserted, TransactionError>;

    /// As [`Store::replace`], inside the transaction; waits like [`insert`](Self::insert).
    async fn replace(
        &self,
        transaction: &mut Self::Transaction,
        id: Id,
        expected: Revision,
        write: Write,
    ) -> Result<Replaced, TransactionError>;

    /// Makes it durable. After [`TransactionError::Failed`] with
    /// [`StoreError::may_have_applied`] nobody knows whether it is; after any other error it is undone.
    async fn commit(&self, transaction: Self::Transaction) -> Result<(), TransactionError>;

    /// Undoes it, and gives its connection back.
    async fn roll_back(&self, transaction: Self::Transaction);
}

/// Why a call inside a transaction failed. The transaction can then only be rolled back.
#[derive(Debug)]
pub enum TransactionError {
    /// Another transaction has claimed the key and did not end within the wait.
    Busy,
    /// The database undid the transaction because of a concurrent one (a serialization failure, a
    /// deadlock). The same again may succeed.
    Conflict(StoreError),
    /// Anything else.
    Failed(StoreError),
}

impl std::fmt::Display for TransactionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Busy => f.write_str("another transaction has claimed the key and has not ended"),
            Self::Conflict(error) => write!(f, "undone because of a concurrent transaction: {error}"),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TransactionError {}

/// The answer to a claim inside a transaction.
#[derive(Debug)]
pub enum ClaimedIn {
    /// The transaction holds the key: do the work in it, then [`Held::complete`], then commit.
    Execute(Held),
    /// The work was done and committed; this is what came of it. Roll back.
    Replay(Outcome),
    /// Do not run the work. Roll back.
    Refused(Refusal),
}

/// A key that an open transaction holds. Rolling the transaction back gives it up.
#[derive(Debug)]
pub struct Held {
    id: Id,
    record: Record,
    policy: Policy,
}

/// Claims the operation's key inside the transaction.
///
/// # Errors
/// When it cannot be told who holds the key. The work must not run then.
pub async fn claim<S: Transactional + ?Sized>(
    store: &S,
    transaction: &mut S::Transaction,
    operation: &Operation,
    fingerprint: Fingerprint,
    policy: &Policy,
) -> Result<ClaimedIn, TransactionError> {
    let mut seen = None;
    for _ in 0..CLAIM_ROUNDS_MAX {
        let revision = Revision::fresh();
        let (write, written) = match &seen {
            None => {
                let write = machine::grant(fingerprint, revision, policy);
                let written = match store.insert(transaction, operation, write.clone()).await? {
                    Inserted::New(at) => Replaced::Written(at),
                    Inserted::Exists(seen) => Replaced::Lost(Some(seen)),
                };
                (write, written)
            }
            Some(seen) => match machine::claim(seen, fingerprint, revision, policy) {
                Claim::Replay(outcome) => return Ok(ClaimedIn::Replay(outcome)),
                Claim::Refuse(refusal) => return Ok(ClaimedIn::Refused(refusal)),
                Claim::Take { expected, write } => {
                    let replacing = store.replace(transaction, operation.id(), expected, write.clone());
                    (write, replacing.await?)
                }
            },
        };
        match written {
            Replaced::Written(at) => {
                let held = Held { id: operation.id(), record: write.at(at), policy: *policy };
                return Ok(ClaimedIn::Execute(held));
            }
            Replaced::Lost(found) => seen = found,
        }
    }
    let error = StoreError::new(StoreErrorKind::Unavailable, "too many writers compete for the key");
    Err(TransactionError::Conflict(error))
}

impl Held {
    /// Which attempt this is since the key was last free. Attempts that were rolled back do not count.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.record.attempt
    }

    /// Writes the outcome beside the work. It counts once the transaction is committed.
    ///
    /// # Errors
    /// When the outcome is not written: the transaction must be rolled back. If
    /// [`StoreError::may_have_applied`], it is not the one that claimed the key any more.
    pub async fn complete<S: Transactional + ?Sized>(
        &self,
        store: &S,
        transaction: &mut S::Transaction,
        outcome: Outcome,
    ) -> Result<(), TransactionError> {
        let (held, verdict) = (&self.record, Verdict::Keep(outcome));
        let Finish::Complete(write) = machine::finish(held, verdict, Revision::fresh(), &self.policy) else {
            return Ok(());
        };
        match store.replace(transaction, self.id, held.revision, write).await? {
            Replaced::Written(_) => Ok(()),
            // Nobody else can see the claim, so nobody else can have changed it.
            Replaced::Lost(_) => Err(TransactionError::Failed(StoreError::new(
                StoreErrorKind::Ambiguous,
                "the claim is gone from its own transaction: it was ended by its user, and what was written since may be \
                 committed; or it was rolled back to a savepoint",
            ))),
        }
    }
}

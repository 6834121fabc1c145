//! An attempt that is counted before it is made, in a commit of its own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use onlyonce_core::engine::CALL_TIME_MAX;
use onlyonce_core::machine::{self, Claim};
use onlyonce_core::record::Record;
use onlyonce_core::{
    Claimed, Finished, Id, Recorded, Revision, StoreError, StoreErrorKind, TransactionError, Transactional,
    Verdict,
};
use serde::Serialize;
use tokio::time::timeout;
use tracing::{Instrument, error};

use super::{Duplicate, Inbox, InboxError, Incoming, Shared};
use crate::function::recorded;
use crate::layer::Execution;
use crate::renewal::Renewal;
use crate::work::LOST_LEASES;

/// How long the end of an attempt is waited for that was not done. The store is tried on until the lease ends.
const UNDONE_GRACE: Duration = Duration::from_secs(2);

/// What counting an attempt told.
pub enum Attempted<T> {
    /// The attempt counts: process the message, or give it up.
    Run(Attempt<T>),
    /// It was processed, and that is committed: acknowledge it. Nothing was written.
    Duplicate(Duplicate),
}

impl<T: Transactional> Inbox<T> {
    /// How many attempts the message with this id has had, counted ones and that of a transaction that processed it; zero
    /// if it is not known.
    ///
    /// # Errors
    /// [`NoId`](InboxError::NoId) or [`Store`](InboxError::Store).
    pub async fn attempts(&self, id: &str) -> Result<u32, InboxError> {
        let Shared { keys, config, .. } = &*self.shared;
        let reading = timeout(CALL_TIME_MAX, keys.read(self.operation(&Incoming::new(id))?.id()));
        let Some(seen) = reading.await.map_err(|_| late())?? else { return Ok(0) };
        let Record { fingerprint, attempt, .. } = seen.record;
        match machine::claim(&seen, fingerprint, Revision::fresh(), &config.policy()) {
            // The next one; it is the first again if the record has expired.
            Claim::Take { write, .. } => Ok(write.attempt - 1),
            Claim::Replay(_) | Claim::Refuse(_) => Ok(attempt),
        }
    }

    /// Counts an attempt at the message, in a commit of its own, and holds the message for as long as the attempt
    /// is [kept up](Attempt::during).
    ///
    /// Call it on a task of its own: one that is dropped halfway may leave the message held by nobody until its
    /// lease ends.
    ///
    /// # Errors
    /// [`NoId`](InboxError::NoId), [`Mismatch`](InboxError::Mismatch), [`InFlight`](InboxError::InFlight) or
    /// [`Store`](InboxError::Store). Nothing may be done for the message, and it must not be acknowledged.
    pub async fn attempt(&self, message: &Incoming<'_>) -> Result<Attempted<T>, InboxError> {
        let config = &self.shared.config;
        self.shared.sweeper.start();
        let operation = Arc::new(self.operation(message)?);
        match self.shared.engine.claim(&operation, message.fingerprint(), &config.policy()).await? {
            Claimed::Execute(grant) => {
                let execution = Execution { operation, attempt: grant.attempt() };
                let renewal = Renewal::new(execution.operation.id(), grant, config.lease);
                Ok(Attempted::Run(Attempt { inbox: self.clone(), execution, renewal }))
            }
            Claimed::Replay(outcome) => Ok(Attempted::Duplicate(Duplicate::of(outcome))),
            Claimed::Refused(refusal) => Err(refusal.into()),
        }
    }
}

/// A counted attempt at a message. Dropping one is as good as dying: the message is held until its lease ends.
pub struct Attempt<T> {
    inbox: Inbox<T>,
    execution: Execution,
    renewal: Renewal,
}

impl<T: Transactional> Attempt<T> {
    /// Which message it is, as an operation, and which attempt. The first is 1; one that died counts.
    #[must_use]
    pub fn execution(&self) -> &Execution {
        &self.execution
    }

    /// Takes the work to its end, and keeps the message held meanwhile.
    pub async fn during<F: Future>(&mut self, work: F) -> F::Output {
        self.renewal.during(work).await
    }

    /// Records the result in the transaction that has the effects, and commits it. When this is `Ok`, and only then, the
    /// message may be acknowledged. A result that does not serialise is not kept, but the message is done.
    ///
    /// # Errors
    /// When nothing is committed, or nobody knows: put the message back. It is not held any more, or only until its
    /// lease ends, and a copy is told what came of it.
    pub fn done<R: Serialize + ?Sized>(
        self,
        transaction: T::Transaction,
        result: &R,
    ) -> impl Future<Output = Result<(), InboxError>> + Send + use<T, R> {
        let recorded = recorded(self.execution.attempt, false, serde_json::to_vec(result));
        self.commit(transaction, recorded)
    }

    async fn commit(mut self, mut transaction: T::Transaction, result: Recorded) -> Result<(), InboxError> {
        let (shared, operation) = (Arc::clone(&self.inbox.shared), self.execution.operation.id());
        let outcome = result.encode();
        let grant = self.renewal.settled().await;
        match grant.complete_in(&shared.store, &mut transaction, outcome).await {
            Ok(Finished::Written) => {}
            Ok(Finished::LeaseLost) => {
                shared.store.roll_back(transaction).await;
                counter!(LOST_LEASES).increment(1);
                error!(%operation, "the lease was lost to another worker; nothing was committed");
                return Err(InboxError::LeaseLost);
            }
            Err(error) => {
                shared.store.roll_back(transaction).await;
                self.again().await;
                return Err(error.into());
            }
        }
        match shared.store.commit(transaction).await {
            Ok(()) => Ok(()),
            Err(error) if may_have_applied(&error) && shared.is_done(operation).await => Ok(()),
            Err(error) => {
                self.again().await;
                Err(error.into())
            }
        }
    }

    /// Ends an attempt that did nothing: the message is free at once, and the attempt counts.
    pub async fn again(self) {
        self.end(Verdict::Again).await;
    }

    /// Ends an attempt that was not made after all: the message is free at once, as if it had never been received, and
    /// earlier attempts do not count any more either.
    pub async fn release(self) {
        self.end(Verdict::Release).await;
    }

    /// Ends an attempt at a message that can never be processed: it is remembered as that, and its copies are
    /// duplicates. `false` if that is not recorded: a copy is then tried again.
    pub fn failed<E: Serialize + ?Sized>(self, reason: &E) -> impl Future<Output = bool> + Send + use<T, E> {
        let recorded = recorded(self.execution.attempt, true, serde_json::to_vec(reason));
        async move { self.end(Verdict::Keep(recorded.encode())).await == Some(Finished::Written) }
    }

    /// On a task of its own, so that a store that is away keeps nobody from putting the message back.
    async fn end(self, verdict: Verdict) -> Option<Finished> {
        let ending = tokio::spawn(self.renewal.finish(verdict).in_current_span());
        timeout(UNDONE_GRACE, ending).await.ok()?.ok()?
    }
}

impl<T> Shared<T> {
    /// Whether the outcome is there. If it is not it may still come: only the end of the attempt settles that.
    async fn is_done(&self, operation: Id) -> bool {
        let read = timeout(CALL_TIME_MAX, self.keys.read(operation)).await;
        let Ok(Ok(Some(seen))) = read else { return false };
        let claim = machine::claim(&seen, seen.record.fingerprint, Revision::fresh(), &self.config.policy());
        matches!(claim, Claim::Replay(_))
    }
}

impl<T> fmt::Debug for Attempted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Run(attempt) => f.debug_tuple("Run").field(attempt).finish(),
            Self::Duplicate(duplicate) => f.debug_tuple("Duplicate").field(duplicate).finish(),
        }
    }
}

impl<T> fmt::Debug for Attempt<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").field("execution", &self.execution).finish_non_exhaustive()
    }
}

fn late() -> StoreError {
    StoreError::new(StoreErrorKind::Unavailable, format!("the store did not answer within {CALL_TIME_MAX:?}"))
}

fn may_have_applied(error: &TransactionError) -> bool {
    matches!(error, TransactionError::Failed(error) if StoreError::may_have_applied(error))
}

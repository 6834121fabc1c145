//! Carries out what the [`machine`] decides, against a store that may fail at any call.
//!
//! | | store calls |
//! |---|---|
//! | a replay or a refusal | 1, and nothing is written |
//! | an execution | 2: claim, outcome |
//! | a take-over of an expired or lapsed key | 3 |
//!
//! A write whose answer the store lost is settled by reading: every write carries a fresh random revision,
//! so it is in the store or it is not. A claim that took too long is not: the store may take it back.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::backoff::Backoff;
use crate::identity::{Id, Operation};
use crate::machine::{self, Claim, Finish, Policy, Refusal, Verdict};
use crate::record::{Fingerprint, Outcome, Record, Revision, Seen, Write};
use crate::store::{Inserted, Replaced, Store, StoreError, StoreErrorKind};
use crate::transact::{TransactionError, Transactional};

/// How often a claim starts over when others keep writing the same key in between.
pub(crate) const CLAIM_ROUNDS_MAX: u32 = 16;

/// How long one store call may take, on the local clock. Its outcome then counts as unknown.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(5);

const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_CEILING: Duration = Duration::from_secs(1);

/// Claims keys on one store. Cheap to clone.
#[derive(Clone)]
pub struct Engine {
    store: Arc<dyn Store>,
}

/// The answer to a claim.
#[derive(Debug)]
pub enum Claimed {
    /// The caller holds the key now: run the work, then [`Grant::finish`].
    Execute(Grant),
    /// The work was done; this is what came of it.
    Replay(Outcome),
    /// Do not run the work.
    Refused(Refusal),
}

impl Engine {
    /// An engine on this store.
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }

    /// Claims the operation's key.
    ///
    /// Call it on a task of its own: a claim that is dropped halfway may leave the key held by nobody
    /// until the lease ends.
    ///
    /// # Errors
    /// When the store cannot say who holds the key. The work must not run then.
    pub async fn claim(
        &self,
        operation: &Operation,
        fingerprint: Fingerprint,
        policy: &Policy,
    ) -> Result<Claimed, StoreError> {
        let id = operation.id();
        let mut seen: Option<Seen> = None;
        for _ in 0..CLAIM_ROUNDS_MAX {
            let revision = Revision::fresh();
            let (expected, write) = match &seen {
                None => (None, machine::grant(fingerprint, revision, policy)),
                Some(seen) => match machine::claim(seen, fingerprint, revision, policy) {
                    Claim::Replay(outcome) => return Ok(Claimed::Replay(outcome)),
                    Claim::Refuse(refusal) => return Ok(Claimed::Refused(refusal)),
                    Claim::Take { expected, write } => (Some(expected), write),
                },
            };
            // Before the call, so that the holder's idea of its lease ends no later than the store's.
            let asked_at = Instant::now();
            let writing = self.write(operation, expected, &write);
            // A call that is late is dropped, and the store may then take back what it wrote: a grant
            // that a read would still find must not be acted on.
            let Ok(written) = timeout(CALL_TIME_MAX, writing).await else { return Err(late()) };
            let held = match written {
                Ok(Replaced::Written(at)) => write.at(at),
                Ok(Replaced::Lost(found)) => {
                    seen = found;
                    continue;
                }
                // Within the time of the one call: a caller is told in time, whatever became of its claim. Boxed, as
                // below: what hardly ever happens must not make every claim's future larger.
                Err(error) => Box::pin(self.settle(id, revision, asked_at + CALL_TIME_MAX, error)).await?,
            };
            let lease_ends = asked_at + policy.lease;
            let grant = Grant {
                store: Arc::clone(&self.store),
                id,
                held,
                policy: *policy,
                lease_ends,
                in_doubt: Vec::new(),
            };
            if lease_ends <= Instant::now() {
                // Someone may take over at any moment: too late to start.
                let _ = Box::pin(grant.finish(Verdict::Release)).await;
                return Err(StoreError::new(
                    StoreErrorKind::Unavailable,
                    "the store took longer than the lease to grant the key",
                ));
            }
            return Ok(Claimed::Execute(grant));
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, "too many writers compete for the key"))
    }

    async fn write(
        &self,
        operation: &Operation,
        expected: Option<Revision>,
        write: &Write,
    ) -> Result<Replaced, StoreError> {
        match expected {
            Some(expected) => self.store.replace(operation.id(), expected, write.clone()).await,
            None => Ok(match self.store.insert(operation, write.clone()).await? {
                Inserted::New(at) => Replaced::Written(at),
                Inserted::Exists(seen) => Replaced::Lost(Some(seen)),
            }),
        }
    }

    /// The record of a write that failed, if the store has it all the same.
    async fn settle(
        &self,
        id: Id,
        revision: Revision,
        by: Instant,
        error: StoreError,
    ) -> Result<Record, StoreError> {
        if !error.may_have_applied() {
            return Err(error);
        }
        match timeout_at(by, self.store.read(id)).await {
            Ok(Ok(Some(Seen { record, .. }))) if record.revision == revision => Ok(record),
            _ => Err(error),
        }
    }
}

/// A held key. Dropping it writes nothing: the key stays held until its lease ends.
pub struct Grant {
    store: Arc<dyn Store>,
    id: Id,
    held: Record,
    policy: Policy,
    lease_ends: Instant,
    /// Renewals whose answer was lost: if the store has one of them, it is ours.
    in_doubt: Vec<Revision>,
}

/// What became of the write that ends a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// It is in the store.
    Written,
    /// The lease had ended and the key is another's: nothing was written.
    LeaseLost,
}

impl Grant {
    /// Which attempt this is since the key was last free; the first is 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        self.held.attempt
    }

    /// When the lease ends, on the local monotonic clock; never later than on the store's.
    #[must_use]
    pub fn lease_ends(&self) -> Instant {
        self.lease_ends
    }

    /// Extends the lease by its full length from now. `false` if the key is another's already.
    ///
    /// # Errors
    /// When the store does not answer. The lease then ends when it would have ended, and the grant
    /// can still be renewed or finished.
    pub async fn renew(&mut self) -> Result<bool, StoreError> {
        let revision = Revision::fresh();
        loop {
            let asked_at = Instant::now();
            let write = machine::renew(&self.held, revision, &self.policy);
            // Noted before the call: if this future is dropped in it, the write may be applied.
            self.in_doubt.push(revision);
            match in_time(self.store.replace(self.id, self.held.revision, write.clone())).await? {
                Replaced::Written(at) => {
                    self.hold(write.at(at));
                    self.lease_ends = asked_at + self.policy.lease;
                    return Ok(true);
                }
                Replaced::Lost(found) if self.adopt(found.as_ref()) => {}
                Replaced::Lost(_) => return Ok(false),
            }
        }
    }

    /// Ends the grant. While the store fails it tries again until the lease ends, and at least once.
    ///
    /// # Errors
    /// When the store did not take the write before the lease ended. The work is done; the key stays
    /// held until the store's clock says that the lease is over.
    pub fn finish(mut self, verdict: Verdict) -> impl Future<Output = Result<Finished, StoreError>> + Send {
        // Outside of the block: an `async fn` would keep the grant and the verdict twice.
        let finish = machine::finish(&self.held, verdict, Revision::fresh(), &self.policy);
        async move {
            let mut waits = Backoff::new(RETRY_FIRST, RETRY_CEILING);
            let mut removal_in_doubt = false;
            loop {
                let attempt = match &finish {
                    Finish::Nothing => return Ok(Finished::Written),
                    Finish::Complete(write) => self.complete(write).await,
                    Finish::Remove => self.remove(&mut removal_in_doubt).await,
                };
                let error = match attempt {
                    Ok(finished) => return Ok(finished),
                    Err(error) => error,
                };
                let wait = waits.next().unwrap_or(RETRY_CEILING);
                if Instant::now() + wait >= self.lease_ends {
                    return Err(error);
                }
                sleep(wait).await;
            }
        }
    }

    /// Writes the outcome inside a transaction of its user, beside the work; it counts once that is committed.
    /// Do not renew in between: the renewal would wait for the transaction. If it is rolled back the grant is
    /// still held.
    ///
    /// # Errors
    /// When the outcome is not written: the transaction must be rolled back.
    pub async fn complete_in<T: Transactional + ?Sized>(
        &mut self,
        store: &T,
        transaction: &mut T::Transaction,
        outcome: Outcome,
    ) -> Result<Finished, TransactionError> {
        let (revision, verdict) = (Revision::fresh(), Verdict::Keep(outcome));
        let Finish::Complete(write) = machine::finish(&self.held, verdict, revision, &self.policy) else {
            return Ok(Finished::LeaseLost);
        };
        loop {
            match store.replace(transaction, self.id, self.held.revision, write.clone()).await? {
                Replaced::Written(_) => return Ok(Finished::Written),
                Replaced::Lost(found) if self.adopt(found.as_ref()) => {}
                Replaced::Lost(_) => return Ok(Finished::LeaseLost),
            }
        }
    }

    async fn complete(&mut self, write: &Write) -> Result<Finished, StoreError> {
        loop {
            match in_time(self.store.replace(self.id, self.held.revision, write.clone())).await? {
                Replaced::Written(_) => return Ok(Finished::Written),
                // An earlier try was applied and its answer lost.
                Replaced::Lost(Some(seen)) if seen.record.revision == write.revision => {
                    return Ok(Finished::Written);
                }
                Replaced::Lost(found) if self.adopt(found.as_ref()) => {}
                Replaced::Lost(_) => return Ok(Finished::LeaseLost),
            }
        }
    }

    async fn remove(&mut self, in_doubt: &mut bool) -> Result<Finished, StoreError> {
        loop {
            match in_time(self.store.remove(self.id, self.held.revision)).await {
                Ok(true) => return Ok(Finished::Written),
                Ok(false) => {}
                Err(error) => {
                    *in_doubt |= error.may_have_applied();
                    return Err(error);
                }
            }
            let found = in_time(self.store.read(self.id)).await?;
            if self.adopt(found.as_ref()) {
                continue;
            }
            // If an earlier try's answer was lost, the key may be gone, or another's, because of it.
            return Ok(if *in_doubt { Finished::Written } else { Finished::LeaseLost });
        }
    }

    /// Takes over what the store has if it is a renewal of ours whose answer was lost.
    fn adopt(&mut self, found: Option<&Seen>) -> bool {
        match found {
            Some(seen) if self.in_doubt.contains(&seen.record.revision) => {
                self.hold(seen.record.clone());
                true
            }
            _ => false,
        }
    }

    fn hold(&mut self, record: Record) {
        self.in_doubt.clear();
        self.held = record;
    }
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grant").field("id", &self.id).field("held", &self.held).finish_non_exhaustive()
    }
}

async fn in_time<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(CALL_TIME_MAX, call).await.unwrap_or_else(|_| Err(late()))
}

fn late() -> StoreError {
    StoreError::new(StoreErrorKind::Ambiguous, format!("the store did not answer within {CALL_TIME_MAX:?}"))
}

impl Revision {
    /// One that no other write has, from the operating system's randomness.
    #[must_use]
    pub fn fresh() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system has a source of randomness");
        Self(u128::from_be_bytes(bytes))
    }
}

//! Group commit: concurrent writes share one durable commit.
//!
//! While one batch commits, the next gathers; nothing waits for a batch to fill. The writer runs on a
//! task of its own, so a caller that is dropped never interrupts the database driver.

use std::future::Future;

use tokio::sync::{mpsc, oneshot};
use tracing::error;

use crate::identity::{Id, Operation};
use crate::record::{Revision, Write};
use crate::store::{Inserted, Replaced, StoreError, StoreErrorKind};

/// One call of a [`Store`](crate::Store), as data.
#[derive(Clone, Debug)]
pub enum Call {
    /// See [`Store::insert`](crate::Store::insert).
    Insert(Operation, Write),
    /// See [`Store::replace`](crate::Store::replace).
    Replace(Id, Revision, Write),
    /// See [`Store::remove`](crate::Store::remove).
    Remove(Id, Revision),
}

/// What a [`Call`] returned.
#[derive(Clone, Debug)]
pub enum Reply {
    /// Of an insert.
    Inserted(Inserted),
    /// Of a replace.
    Replaced(Replaced),
    /// Of a remove.
    Removed(bool),
}

/// The database side of a [`Group`].
pub trait Writer: Send + 'static {
    /// Applies the calls in order and commits them together; returns one result for each, in the
    /// same order. A call that fails by itself must not take the others with it.
    fn write(&mut self, calls: &[Call]) -> impl Future<Output = Vec<Result<Reply, StoreError>>> + Send;
}

/// Hands calls to a [`Writer`] in batches. Clones share the writer; it ends with the last of them.
#[derive(Clone, Debug)]
pub struct Group {
    jobs: mpsc::Sender<Job>,
}

struct Job {
    call: Call,
    reply: oneshot::Sender<Result<Reply, StoreError>>,
}

impl Group {
    /// Starts the writer on a task of its own. A batch has at most `calls_max` calls, and as many
    /// again may wait for the next.
    pub fn start(writer: impl Writer, calls_max: usize) -> Self {
        let (jobs, queue) = mpsc::channel(calls_max);
        tokio::spawn(run(writer, queue, calls_max));
        Self { jobs }
    }

    /// Applies one call, together with whatever else is waiting.
    ///
    /// # Errors
    /// As the writer says; [`StoreErrorKind::Ambiguous`] if it went away with the call in hand.
    pub async fn call(&self, call: Call) -> Result<Reply, StoreError> {
        let (reply, answer) = oneshot::channel();
        let closed = || StoreError::new(StoreErrorKind::Unavailable, "the store is closed");
        self.jobs.send(Job { call, reply }).await.map_err(|_| closed())?;
        answer.await.unwrap_or_else(|_| {
            Err(StoreError::new(StoreErrorKind::Ambiguous, "the store was closed during the call"))
        })
    }
}

async fn run(mut writer: impl Writer, mut queue: mpsc::Receiver<Job>, calls_max: usize) {
    let mut jobs = Vec::new();
    while queue.recv_many(&mut jobs, calls_max).await > 0 {
        // Nobody waits for these any more. A claim must not be made for a caller that has left; the
        // other calls finish work that is done.
        jobs.retain(|job| !(job.reply.is_closed() && matches!(job.call, Call::Insert(..))));
        // Two writers that lock rows in different orders deadlock. Calls on one key keep their order.
        jobs.sort_by_key(|job| job.call.id());
        let (calls, replies): (Vec<_>, Vec<_>) = jobs.drain(..).map(|job| (job.call, job.reply)).unzip();
        if calls.is_empty() {
            continue;
        }
        let results = writer.write(&calls).await;
        if results.len() != calls.len() {
            error!(calls = calls.len(), results = results.len(), "the writer lost count of its calls");
            continue;
        }
        let mut orphans = Vec::new();
        for ((call, reply), result) in calls.into_iter().zip(replies).zip(results) {
            let undelivered = reply.send(result).err();
            if let (Call::Insert(operation, write), Some(Ok(Reply::Inserted(Inserted::New(_))))) =
                (call, undelivered)
            {
                orphans.push(Call::Remove(operation.id(), write.revision));
            }
        }
        // Keys that were claimed for callers who left meanwhile would stay held by nobody.
        if !orphans.is_empty() {
            writer.write(&orphans).await;
        }
    }
}

impl Call {
    /// The id that the call is about.
    #[must_use]
    pub fn id(&self) -> Id {
        match self {
            Self::Insert(operation, _) => operation.id(),
            Self::Replace(id, ..) | Self::Remove(id, _) => *id,
        }
    }
}

/// The conversions that a store's methods need; a reply of the wrong kind is a writer's bug.
impl Reply {
    /// The reply to an insert.
    ///
    /// # Errors
    /// If it is the reply to another kind of call.
    pub fn inserted(self) -> Result<Inserted, StoreError> {
        match self {
            Self::Inserted(inserted) => Ok(inserted),
            other => Err(other.mixed_up()),
        }
    }

    /// The reply to a replace.
    ///
    /// # Errors
    /// If it is the reply to another kind of call.
    pub fn replaced(self) -> Result<Replaced, StoreError> {
        match self {
            Self::Replaced(replaced) => Ok(replaced),
            other => Err(other.mixed_up()),
        }
    }

    /// The reply to a remove.
    ///
    /// # Errors
    /// If it is the reply to another kind of call.
    pub fn removed(self) -> Result<bool, StoreError> {
        match self {
            Self::Removed(removed) => Ok(removed),
            other => Err(other.mixed_up()),
        }
    }

    fn mixed_up(&self) -> StoreError {
        StoreError::new(StoreErrorKind::Ambiguous, format!("the store mixed up its replies: {self:?}"))
    }
}

//! Why a message was not processed.

use std::fmt;
use std::time::Duration;

use onlyonce_core::{Refusal, StoreError, TransactionError};

use super::NoId;
use crate::body::BoxError;

/// Why a message was not processed, or nobody knows that it was. It must not be acknowledged.
#[derive(Debug)]
pub enum InboxError {
    /// It has no id. Nothing was done, and never can be; the transaction is as good as before.
    NoId,
    /// Its id was first used for another payload. Nothing was done for this one; the transaction is as good as before.
    Mismatch,
    /// Somebody has a counted attempt at it, and the lease is not over. Nothing was done; the transaction is as good as
    /// before.
    InFlight {
        /// How long until the lease ends, on the store's clock, if it is not renewed.
        lease_left: Duration,
    },
    /// Another open transaction has received it, and did not end within the wait. Nothing was done; roll back.
    Busy,
    /// The database undid the transaction because of a concurrent one. Nothing was done; the same again may succeed.
    Conflict(StoreError),
    /// The lease was lost to another worker while this one was at it. Nothing was committed; roll back.
    LeaseLost,
    /// The store cannot say who has it, or cannot record it. Roll back. Nothing was committed, unless this came of a
    /// commit and [`may_have_applied`](StoreError::may_have_applied) says so: a copy is then told.
    Store(StoreError),
    /// What the handler said, which did not process it. Roll back.
    NotDone(NotDone),
}

impl fmt::Display for InboxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoId => NoId.fmt(f),
            Self::Mismatch => f.write_str("the message's id was first used for another payload"),
            Self::InFlight { lease_left } => {
                write!(f, "another worker is at the message, for at least {lease_left:?} unless it ends")
            }
            Self::Busy => f.write_str("another transaction has received the message and has not ended"),
            Self::Conflict(error) => write!(f, "undone because of a concurrent transaction: {error}"),
            Self::LeaseLost => f.write_str("the message was lost to another worker meanwhile"),
            Self::Store(_) => f.write_str("the store that remembers messages is away"),
            Self::NotDone(why) => why.fmt(f),
        }
    }
}

impl std::error::Error for InboxError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Conflict(error) | Self::Store(error) => Some(error),
            Self::NotDone(NotDone::RetryLater { error, .. }) => Some(&**error),
            _ => None,
        }
    }
}

impl From<NoId> for InboxError {
    fn from(NoId: NoId) -> Self {
        Self::NoId
    }
}

impl From<StoreError> for InboxError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<TransactionError> for InboxError {
    fn from(error: TransactionError) -> Self {
        match error {
            TransactionError::Busy => Self::Busy,
            TransactionError::Conflict(error) => Self::Conflict(error),
            TransactionError::Failed(error) => Self::Store(error),
        }
    }
}

impl From<Refusal> for InboxError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Mismatch { .. } => Self::Mismatch,
            Refusal::InFlight { lease_left, .. } => Self::InFlight { lease_left },
            // Of a message that is held for an operator; an inbox never asks for that.
            Refusal::Unknown => Self::InFlight { lease_left: Duration::ZERO },
        }
    }
}

/// Why a handler did not process a message, and what shall become of it.
///
/// `?` makes any error one to [retry later](Self::RetryLater): whatever was written is rolled back, so trying again is
/// safe. (This is why `NotDone` is no [`std::error::Error`] itself.)
#[derive(Debug)]
pub enum NotDone {
    /// It may be processed another time.
    RetryLater {
        /// How long to wait before, at least, on the broker's clock; `None` leaves it to whoever puts it back.
        after: Option<Duration>,
        /// What stood in the way.
        error: BoxError,
    },
    /// It can never be processed, for this reason: it is to go where people look after it.
    Failed {
        /// In one line, for people.
        reason: String,
    },
}

impl NotDone {
    /// To be tried again when the consumer sees fit.
    #[must_use]
    pub fn retry_later(error: impl Into<BoxError>) -> Self {
        Self::RetryLater { after: None, error: error.into() }
    }

    /// To be tried again, not before `delay` is over.
    #[must_use]
    pub fn retry_after(delay: Duration, error: impl Into<BoxError>) -> Self {
        Self::RetryLater { after: Some(delay), error: error.into() }
    }

    /// Never to be tried again.
    #[must_use]
    pub fn failed(reason: impl fmt::Display) -> Self {
        Self::Failed { reason: reason.to_string() }
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for NotDone {
    fn from(error: E) -> Self {
        Self::retry_later(error)
    }
}

impl fmt::Display for NotDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RetryLater { error, .. } => write!(f, "the message is to be tried again: {error}"),
            Self::Failed { reason } => write!(f, "the message can never be processed: {reason}"),
        }
    }
}

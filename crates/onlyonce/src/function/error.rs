//! How the work fails, and what its callers are told.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use onlyonce_core::StoreError;
use onlyonce_core::outcome::UnreadableOutcome;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::body::BoxError;

/// Why the work failed, and what becomes of its key.
///
/// `?` makes any error an [`unknown`](Self::unknown) one. (This is why `Failed` is no [`std::error::Error`] itself.)
#[derive(Debug)]
pub struct Failed(pub(super) Fate);

#[derive(Debug)]
pub(super) enum Fate {
    /// The error in JSON, if it serialises.
    Keep(Result<Vec<u8>, serde_json::Error>),
    Release(BoxError),
    Unknown(BoxError),
}

impl Failed {
    /// For good: the error is recorded, and every later call is given it. For what a retry cannot change, such as a
    /// declined card.
    #[must_use]
    pub fn keep<E: Serialize + ?Sized>(error: &E) -> Self {
        Self(Fate::Keep(serde_json::to_vec(error)))
    }

    /// Nothing was done: the key is released, and the next call runs the work.
    #[must_use]
    pub fn release(error: impl Into<BoxError>) -> Self {
        Self(Fate::Release(error.into()))
    }

    /// Nobody knows how much was done: the key stays held until its lease ends.
    #[must_use]
    pub fn unknown(error: impl Into<BoxError>) -> Self {
        Self(Fate::Unknown(error.into()))
    }
}

impl<E: std::error::Error + Send + Sync + 'static> From<E> for Failed {
    fn from(error: E) -> Self {
        Self::unknown(error)
    }
}

/// Why a call has no value.
#[derive(Debug)]
pub enum RunError {
    /// The input does not serialise, so it cannot be compared with that of a retry. Nothing ran.
    Input(BoxError),
    /// The key was first used with another input. Nothing ran for this one.
    Mismatch,
    /// Another call with this key is doing the work. Try again later.
    InFlight {
        /// How long its attempt has run, on the store's clock.
        running_for: Duration,
        /// How long until its lease ends, on the store's clock, if it is not renewed.
        lease_left: Duration,
    },
    /// The work was started and its holder went silent; [`Lapse::Hold`](onlyonce_core::Lapse) leaves it to an operator.
    OutcomeUnknown,
    /// The store cannot say who holds the key. Nothing ran for this call; try again.
    StoreUnavailable(StoreError),
    /// The work ended with an error that it [kept](Failed::keep).
    Kept(KeptError),
    /// The work ended with an error and [released](Failed::release) the key. The next call runs it; if the store
    /// was away, once the lease has ended.
    Released(BoxError),
    /// The work ended with an error, and [nobody knows](Failed::unknown) how much of it was done.
    Failed {
        /// The error.
        error: BoxError,
        /// How long until the key's lease ends, at the latest, on the local monotonic clock. What a call is told
        /// then is up to [`on_lapse`](super::FunctionConfig::on_lapse).
        lease_left: Duration,
    },
    /// The work ended, but its lease was lost to another holder meanwhile. What it returned is not recorded;
    /// ask again for the other's.
    LeaseLost,
    /// The work was done, but what is recorded cannot be returned. It is not run again.
    NotReplayable(NotReplayable),
    /// The runtime shut down. The work may have run.
    Interrupted,
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(_) => f.write_str("nothing was done: the input does not serialise"),
            Self::Mismatch => f.write_str("nothing was done: the key was first used with another input"),
            Self::InFlight { running_for, .. } => {
                write!(f, "another call with this key has been running for {running_for:?}")
            }
            Self::OutcomeUnknown => {
                f.write_str("the work was started before and may have been done; an operator must decide")
            }
            Self::StoreUnavailable(_) => {
                f.write_str("nothing was done: the store that keeps idempotency keys is away")
            }
            Self::Kept(kept) => kept.fmt(f),
            Self::Released(_) => f.write_str("the work failed and can be tried again"),
            Self::Failed { lease_left, .. } => {
                write!(f, "the work failed and may have been done; its key is held for {lease_left:?}")
            }
            Self::LeaseLost => f.write_str("the work ended after its lease had been lost to another holder"),
            Self::NotReplayable(why) => write!(f, "the work was done before, but {why}; it is not run again"),
            Self::Interrupted => f.write_str("the work was interrupted and may have been done"),
        }
    }
}

impl std::error::Error for RunError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Input(error) | Self::Released(error) | Self::Failed { error, .. } => Some(&**error),
            Self::StoreUnavailable(error) => Some(error),
            Self::NotReplayable(NotReplayable::Unreadable(error)) => Some(error),
            Self::NotReplayable(NotReplayable::OtherType(error)) => Some(&**error),
            _ => None,
        }
    }
}

/// The error that the work ended with for good; the same on every call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptError {
    /// Whether it was recorded before, and the work has not run for this call.
    pub replayed: bool,
    /// The attempt that ended with it; see [`Execution::attempt`](crate::Execution::attempt).
    pub attempt: u32,
    pub(super) json: Bytes,
}

impl KeptError {
    /// The error itself.
    ///
    /// # Errors
    /// If it is not an `E`.
    pub fn read<E: DeserializeOwned>(&self) -> Result<E, BoxError> {
        Ok(serde_json::from_slice(&self.json)?)
    }
}

impl fmt::Display for KeptError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the work failed, and so does every call with this key")
    }
}

/// Why something recorded cannot be returned.
#[derive(Debug)]
pub enum NotReplayable {
    /// It is a response: the key was completed by an operator, or is a layer's.
    Response {
        /// Its HTTP status.
        status: u16,
    },
    /// It did not serialise.
    NotKept,
    /// A newer version wrote it, or it is damaged.
    Unreadable(UnreadableOutcome),
    /// It is not of the type that this call returns.
    OtherType(BoxError),
}

impl fmt::Display for NotReplayable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Response { status } => {
                write!(f, "what is recorded is a response with status {status}, not what a function returned")
            }
            Self::NotKept => f.write_str("what it returned could not be kept"),
            Self::Unreadable(error) => error.fmt(f),
            Self::OtherType(_) => f.write_str("what is recorded is not of the type that this call returns"),
        }
    }
}

//! What is known of a message that was processed before.

use onlyonce_core::Outcome;
use serde::de::DeserializeOwned;

use crate::function::{KeptError, RunError, replayed};

/// A message that was processed before, and that is committed: it is to be acknowledged, whatever came of it and
/// whether that can be read or not.
#[derive(Clone, Debug)]
pub struct Duplicate {
    outcome: Outcome,
}

impl Duplicate {
    pub(super) fn of(outcome: Outcome) -> Self {
        Self { outcome }
    }

    /// The result that was recorded with it.
    ///
    /// # Errors
    /// [`RunError::Kept`] if it [failed](super::First::failed) for good, [`RunError::NotReplayable`] if the recorded
    /// result cannot be read as an `R`. The message was processed all the same.
    pub fn result<R: DeserializeOwned>(&self) -> Result<R, RunError> {
        replayed(&self.outcome).map(|returned| returned.value)
    }

    /// Why it failed for good, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<KeptError> {
        match self.result::<serde::de::IgnoredAny>() {
            Err(RunError::Kept(error)) => Some(error),
            _ => None,
        }
    }
}

//! What a person sets. All durations are on the local clock.

use std::fmt;
use std::time::Duration;

use http::HeaderName;

use crate::key::IDEMPOTENCY_KEY;

/// The longest deadline that can be set: a year.
pub const DEADLINE_MAX: Duration = Duration::from_secs(365 * 86_400);

/// How long and how often a client tries.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Settings {
    /// How long one call may take with all its attempts, waits and the reading of the answer.
    pub deadline: Duration,
    /// How long one attempt may take, from connecting to the last byte of the answer. Shorter than the work
    /// is fine: the next attempt asks for the same answer.
    pub attempt_timeout: Duration,
    /// The first wait between two attempts; it doubles from one to the next. Half of each wait is random.
    pub backoff_first: Duration,
    /// The longest of these waits.
    pub backoff_max: Duration,
    /// A `Retry-After` that asks for more than this is taken for this.
    pub retry_after_max: Duration,
    /// How many retries all calls of one client may make together.
    pub budget: BudgetSettings,
    /// The longest request body that is kept for further attempts, in bytes.
    pub request_body_bytes_max: usize,
    /// The longest answer that is gathered, in bytes.
    pub answer_body_bytes_max: usize,
    /// For how long the server remembers a key, counted from its first use. A journal does not send an older
    /// one again: the server may have forgotten it, and do the work a second time.
    pub server_retention: Duration,
    /// The field that carries the key.
    pub key_header: HeaderName,
}

/// How many retries all calls of one client may make together. Waiting for a first copy that is still
/// running costs nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetSettings {
    /// So many at once, and at the start.
    pub retries_max: u32,
    /// Every call adds so many.
    pub retries_per_call: f64,
    /// Every second adds so many.
    pub retries_per_second: f64,
}

impl Default for BudgetSettings {
    fn default() -> Self {
        Self { retries_max: 100, retries_per_call: 0.2, retries_per_second: 0.5 }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(60),
            attempt_timeout: Duration::from_secs(20),
            backoff_first: Duration::from_millis(200),
            backoff_max: Duration::from_secs(10),
            retry_after_max: Duration::from_secs(60),
            budget: BudgetSettings::default(),
            request_body_bytes_max: 16 << 20,
            answer_body_bytes_max: 16 << 20,
            server_retention: Duration::from_secs(86_400),
            key_header: IDEMPOTENCY_KEY,
        }
    }
}

impl Settings {
    /// # Errors
    /// Refuses settings that contradict each other.
    pub(crate) fn check(&self) -> Result<(), SettingsError> {
        let refused = |why: &'static str| Err(SettingsError(why));
        if self.deadline.is_zero() || self.attempt_timeout.is_zero() {
            return refused("deadline and attempt_timeout must be longer than zero");
        }
        if self.deadline > DEADLINE_MAX {
            return refused("deadline must be at most a year");
        }
        if self.backoff_first.is_zero() {
            return refused("backoff_first must be longer than zero, or retries come in a busy loop");
        }
        if self.backoff_max < self.backoff_first || self.backoff_max > DEADLINE_MAX {
            return refused("backoff_max must be at least backoff_first, and at most a year");
        }
        if self.server_retention <= self.deadline {
            return refused("server_retention must exceed deadline, or a late attempt may do the work again");
        }
        let BudgetSettings { retries_per_call, retries_per_second, .. } = self.budget;
        if ![retries_per_call, retries_per_second].iter().all(|rate| rate.is_finite() && *rate >= 0.0) {
            return refused("the retry budget must grow by finite amounts, and not shrink by itself");
        }
        Ok(())
    }
}

/// Settings that contradict each other. Nothing was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingsError(&'static str);

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for SettingsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_contradictions_are_not() {
        assert_eq!(Settings::default().check(), Ok(()));
        let refused: [fn(&mut Settings); 9] = [
            |s| s.deadline = Duration::ZERO,
            |s| s.attempt_timeout = Duration::ZERO,
            |s| s.deadline = Duration::MAX,
            |s| s.backoff_first = Duration::ZERO,
            |s| s.server_retention = s.deadline,
            |s| s.budget.retries_per_call = f64::NAN,
            // Nothing times infinity is no number, and no retry could be afforded.
            |s| s.budget.retries_per_second = f64::INFINITY,
            // A busy loop, and a wait that does not fit.
            |s| s.backoff_max = Duration::ZERO,
            |s| s.backoff_max = Duration::MAX,
        ];
        for (number, spoil) in refused.iter().enumerate() {
            let mut settings = Settings::default();
            spoil(&mut settings);
            assert!(settings.check().is_err(), "{number}");
        }
    }
}

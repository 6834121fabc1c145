//! How many retries a client can afford, whatever its calls want.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::settings::BudgetSettings;

/// Tokens that every call of one client draws its retries from, so that a server in trouble is not met with
/// several times its usual load. Starts full; every call adds a fraction, and so does every second.
#[derive(Debug)]
pub(crate) struct Budget {
    settings: BudgetSettings,
    purse: Mutex<Purse>,
}

#[derive(Debug)]
struct Purse {
    tokens: f64,
    counted_at: Instant,
}

impl Budget {
    pub(crate) fn new(settings: BudgetSettings, now: Instant) -> Self {
        let purse = Purse { tokens: f64::from(settings.retries_max), counted_at: now };
        Self { settings, purse: Mutex::new(purse) }
    }

    /// A call begins.
    pub(crate) fn deposit(&self, now: Instant) {
        self.change(now, |tokens| *tokens += self.settings.retries_per_call);
    }

    /// Whether a retry can be afforded.
    pub(crate) fn affords(&self, now: Instant) -> bool {
        self.change(now, |tokens| *tokens >= 1.0)
    }

    /// A retry is made. Several may have looked at the last token: the debt is at most one for each.
    pub(crate) fn withdraw(&self, now: Instant) {
        self.change(now, |tokens| *tokens -= 1.0);
    }

    fn change<T>(&self, now: Instant, change: impl FnOnce(&mut f64) -> T) -> T {
        let mut purse = self.purse.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = now.saturating_duration_since(purse.counted_at).as_secs_f64();
        purse.counted_at = purse.counted_at.max(now);
        purse.tokens += seconds * self.settings.retries_per_second;
        let changed = change(&mut purse.tokens);
        purse.tokens = purse.tokens.min(f64::from(self.settings.retries_max));
        changed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn retries_run_out_and_come_back_with_calls_and_time() {
        let start = Instant::now();
        let settings = BudgetSettings { retries_max: 2, retries_per_call: 0.5, retries_per_second: 0.1 };
        let budget = Budget::new(settings, start);
        budget.deposit(start); // full is full
        for _ in 0..2 {
            assert!(budget.affords(start));
            budget.withdraw(start);
        }
        assert!(!budget.affords(start));
        budget.deposit(start);
        assert!(!budget.affords(start));
        budget.deposit(start);
        assert!(budget.affords(start));
        budget.withdraw(start);
        assert!(!budget.affords(start + Duration::from_secs(9)));
        assert!(budget.affords(start + Duration::from_secs(11)));
        assert!(
            !budget.affords(start + Duration::from_secs(11)) || budget.affords(start),
            "time does not go back"
        );
    }
}

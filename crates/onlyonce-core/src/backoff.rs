//! How long to wait before the next try.

use std::time::Duration;

/// Waits that double from a first one up to a ceiling. Endless: the caller has a deadline.
#[derive(Clone, Debug)]
pub struct Backoff {
    next: Duration,
    ceiling: Duration,
}

impl Backoff {
    /// Starts at `first` and doubles up to `ceiling`.
    #[must_use]
    pub fn new(first: Duration, ceiling: Duration) -> Self {
        Self { next: first.min(ceiling), ceiling }
    }
}

impl Iterator for Backoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = self.next;
        self.next = wait.saturating_mul(2).min(self.ceiling);
        Some(wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_up_to_the_ceiling() {
        let waits: Vec<_> = Backoff::new(Duration::from_millis(20), Duration::from_millis(100))
            .take(5)
            .map(|wait| wait.as_millis())
            .collect();
        assert_eq!(waits, [20, 40, 80, 100, 100]);
    }
}

//! What can be set, with its defaults and limits. The names are those of the configuration file.

use std::fmt;
use std::time::Duration;

use http::HeaderName;
use onlyonce_core::{BodyMode, Lapse, Policy};

use crate::keep::KeepRules;

/// Whether a request must carry a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyRule {
    /// Guarded with a key, passed on without one.
    #[default]
    Optional,
    /// Refused without one.
    Required,
    /// Never guarded.
    Off,
}

/// What a copy is told while the first is still running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnConcurrent {
    /// Refused at once with 409.
    #[default]
    Reject,
    /// Held for up to [`Settings::wait`] and then given the first one's answer.
    Wait,
}

/// The settings of one route, or of all that no route changes.
///
/// Durations are measured on this process's monotonic clock, except `lease` and `retention`, which the
/// store adds to its own clock.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long the work may take from the claim to the head of its answer. The caller is then told
    /// 504, while the work goes on until the lease ends.
    pub timeout: Duration,
    /// How long a key is held without a renewal; `None` is `timeout` and 15 seconds more.
    pub lease: Option<Duration>,
    /// How long an outcome is remembered, from completion.
    pub retention: Duration,
    /// How long a guarded request's body may take to arrive.
    pub request_timeout: Duration,
    /// How long an answer may pause between two of its bytes.
    pub idle_timeout: Duration,
    /// How long an answer is gathered before its beginning is passed on, from its head.
    pub stream_after: Duration,
    /// Whether a request must carry a key.
    pub key: KeyRule,
    /// What counts as the same body.
    pub body: BodyMode,
    /// What a copy is told while the first is still running.
    pub on_concurrent: OnConcurrent,
    /// How long a copy waits under [`OnConcurrent::Wait`].
    pub wait: Duration,
    /// What becomes of a key whose holder went silent.
    pub on_lapse: Lapse,
    /// Which answers are kept.
    pub keep: KeepRules,
    /// Request headers that must be equal in a retry.
    pub fingerprint_headers: Vec<HeaderName>,
    /// The largest guarded request body, in bytes; it is held in memory.
    pub request_body_bytes_max: usize,
    /// The largest answer that is recorded, in bytes; it is held in memory.
    pub response_body_bytes_max: usize,
    /// Whether `Set-Cookie` is recorded. A replayed session cookie rolls a session back.
    pub record_cookies: bool,
}

/// What a lease has over `timeout` unless it is set.
pub const LEASE_MARGIN: Duration = Duration::from_secs(15);

/// The longest duration that any setting takes: ten years, far below every overflow.
pub const DURATION_MAX: Duration = Duration::from_secs(10 * 366 * 86_400);

impl Default for Settings {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            lease: None,
            retention: Duration::from_secs(24 * 3_600),
            request_timeout: Duration::from_secs(30),
            idle_timeout: Duration::from_secs(60),
            stream_after: Duration::from_secs(1),
            key: KeyRule::default(),
            body: BodyMode::default(),
            on_concurrent: OnConcurrent::default(),
            wait: Duration::from_secs(10),
            on_lapse: Lapse::default(),
            keep: KeepRules::default(),
            fingerprint_headers: Vec::new(),
            request_body_bytes_max: 1 << 20,
            response_body_bytes_max: 1 << 20,
            record_cookies: false,
        }
    }
}

impl Settings {
    /// The lease in force.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.lease.unwrap_or(self.timeout + LEASE_MARGIN)
    }

    pub(crate) fn policy(&self) -> Policy {
        Policy { lease: self.lease(), retention: self.retention, on_lapse: self.on_lapse }
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Names the setting that contradicts another, and what is allowed.
    pub fn check(&self) -> Result<(), SettingsError> {
        check_durations(&[
            ("timeout", self.timeout),
            ("lease", self.lease()),
            ("retention", self.retention),
            ("request_timeout", self.request_timeout),
            ("idle_timeout", self.idle_timeout),
            ("wait", self.wait),
            ("stream_after", self.stream_after),
        ])?;
        if self.lease() <= self.timeout {
            return Err(SettingsError::new(
                "lease",
                format!(
                    "{:?} must exceed timeout = {:?}, or a copy could start while the first still runs",
                    self.lease(),
                    self.timeout
                ),
            ));
        }
        check_retention(self.retention, self.lease())
    }
}

/// Checks each duration alone.
pub(crate) fn check_durations(durations: &[(&'static str, Duration)]) -> Result<(), SettingsError> {
    for (name, value) in durations {
        if *value > DURATION_MAX {
            return Err(SettingsError::new(name, format!("{value:?} is too long; at most ten years")));
        }
        // A copy that waits no time is refused at once, an answer may be streamed at once, and a finished one
        // passed on without a record.
        if value.is_zero() && !matches!(*name, "wait" | "stream_after" | "record_grace") {
            return Err(SettingsError::new(name, "must be longer than zero"));
        }
    }
    Ok(())
}

/// A key must not be forgotten while it is held.
pub(crate) fn check_retention(retention: Duration, lease: Duration) -> Result<(), SettingsError> {
    if retention < lease {
        let reason = format!("{retention:?} must be at least lease = {lease:?}");
        return Err(SettingsError::new("retention", reason));
    }
    Ok(())
}

/// A setting that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    /// The setting's name.
    pub setting: &'static str,
    reason: String,
    route: Option<String>,
}

impl SettingsError {
    /// The setting with this name cannot be, for this reason, which says what is allowed.
    pub fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        Self { setting, reason: reason.into(), route: None }
    }

    /// The same, in the route with this pattern.
    pub(crate) fn in_route(self, pattern: &str) -> Self {
        Self { route: Some(pattern.to_owned()), ..self }
    }
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(route) = &self.route {
            write!(f, "in the route {route:?}, ")?;
        }
        write!(f, "`{}`: {}", self.setting, self.reason)
    }
}

impl std::error::Error for SettingsError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_within_the_timeout_is_refused() {
        let secs = Duration::from_secs;
        let of = |timeout, lease, retention| {
            let settings = Settings {
                timeout: secs(timeout),
                lease: Some(secs(lease)),
                retention: secs(retention),
                ..Settings::default()
            };
            settings.check().map_err(|error| error.setting)
        };
        assert_eq!(of(10, 11, 11), Ok(()));
        assert_eq!(of(10, 10, 100), Err("lease"));
        assert_eq!(of(10, 9, 100), Err("lease"));
        assert_eq!(of(10, 20, 19), Err("retention"));
        assert_eq!(of(0, 20, 30), Err("timeout"));
        assert_eq!(of(10, 20, u64::MAX), Err("retention"));
        assert_eq!(Settings::default().lease(), secs(75));
    }
}

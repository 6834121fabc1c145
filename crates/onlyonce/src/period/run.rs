//! What a finished period remembers about its run.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use onlyonce_core::outcome::{UnreadableOutcome, Value};
use onlyonce_core::{Outcome, Recorded};
use serde::{Deserialize, Serialize};

use super::Period;

/// A run, as people will want to know of it. Its times are those of the host that ran it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// What the job's periods were: a unit or a cron expression.
    pub every: String,
    /// The time zone's name.
    pub zone: String,
    /// The period's first instant: when it was due.
    pub scheduled_at: Timestamp,
    /// When the work began.
    pub started_at: Timestamp,
    /// How long it took, in milliseconds.
    pub duration_ms: u64,
    /// The exit status of a command; zero where the work was no command.
    #[serde(default)]
    pub exit_status: u8,
    /// Where it ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// As whom.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

impl Run {
    /// A run of this period that went well, by nobody in particular.
    #[must_use]
    pub fn of(period: &Period, started_at: Timestamp, took: Duration) -> Self {
        Self {
            every: period.every().to_string(),
            zone: period.zone().to_owned(),
            scheduled_at: period.starts_at(),
            started_at,
            duration_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            exit_status: 0,
            host: None,
            user: None,
            pid: None,
        }
    }

    /// The bytes that a store keeps.
    #[must_use]
    pub fn outcome(&self, attempt: u32) -> Outcome {
        let json = serde_json::to_vec(self).unwrap_or_default().into();
        Recorded::Value(Value { attempt, is_error: self.exit_status != 0, json }).encode()
    }

    /// Reads what [`outcome`](Self::outcome) wrote.
    ///
    /// # Errors
    /// Refuses what a newer version wrote, what is damaged, and what is not a run. The work was done.
    pub fn read(outcome: &Outcome) -> Result<Self, UnreadableRun> {
        match Recorded::decode(outcome).map_err(UnreadableRun::Outcome)? {
            Recorded::Value(value) => serde_json::from_slice(&value.json).map_err(|_| UnreadableRun::NoRun),
            _ => Err(UnreadableRun::NoRun),
        }
    }
}

/// Why what is recorded about a run cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadableRun {
    /// It is no outcome that this version can read.
    Outcome(UnreadableOutcome),
    /// It is the outcome of something else: a person completed the key with a response, for example.
    NoRun,
}

impl fmt::Display for UnreadableRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outcome(error) => error.fmt(f),
            Self::NoRun => f.write_str("the period is done, but what is recorded about it is no run"),
        }
    }
}

impl std::error::Error for UnreadableRun {}

//! How runs are shown: a table for people, JSON for programs.

use std::io::{self, Write};
use std::time::Duration;

use jiff::Timestamp;
use onlyonce::period::{Period, Run};
use onlyonce_core::record::State as Stored;
use serde::Serialize;

use super::Known;
use crate::keys::{State, printable};
use crate::run::instant;

/// One period, as programs see it. `created_at`, `lease_until`, `completed_at` and `expires_at` are the store's, the rest is
/// as the host that ran it told.
#[derive(Serialize)]
pub(super) struct Row {
    job: String,
    period: String,
    /// running, lapsed, done, failed, missing, forgotten or due.
    state: &'static str,
    attempt: Option<u32>,
    scheduled_at: Option<Timestamp>,
    created_at: Option<String>,
    lease_until: Option<String>,
    completed_at: Option<String>,
    expires_at: Option<String>,
    every: Option<String>,
    zone: Option<String>,
    started_at: Option<Timestamp>,
    duration_ms: Option<u64>,
    exit_status: Option<u8>,
    host: Option<String>,
    user: Option<String>,
    pid: Option<u32>,
}

impl Row {
    pub(super) fn of(known: &Known, scheduled_at: Option<Timestamp>) -> Self {
        let record = &known.entry.record;
        let (lease_until, completed_at) = match &record.state {
            Stored::Running { lease_until } => (Some(instant(*lease_until)), None),
            Stored::Done { completed_at, .. } => (None, Some(instant(*completed_at))),
        };
        let run = known.run.as_ref();
        let state = match (known.state, run) {
            (State::Done, Some(run)) if run.exit_status != 0 => "failed",
            (state, _) => state.as_str(),
        };
        let of = |part: fn(&Run) -> Option<String>| run.and_then(part);
        Self {
            job: known.job.clone(),
            period: known.period.clone(),
            state,
            attempt: Some(record.attempt),
            scheduled_at,
            created_at: Some(instant(record.created_at)),
            lease_until,
            completed_at,
            expires_at: Some(instant(record.expires_at)),
            every: of(|run| Some(run.every.clone())),
            zone: of(|run| Some(run.zone.clone())),
            started_at: run.map(|run| run.started_at),
            duration_ms: run.map(|run| run.duration_ms),
            exit_status: run.map(|run| run.exit_status),
            host: of(|run| run.host.clone()),
            user: of(|run| run.user.clone()),
            pid: run.and_then(|run| run.pid),
        }
    }

    /// A period without a run.
    pub(super) fn absent(job: &str, period: &Period, state: &'static str) -> Self {
        Self {
            job: job.to_owned(),
            period: period.name().to_owned(),
            state,
            attempt: None,
            scheduled_at: Some(period.starts_at()),
            created_at: None,
            lease_until: None,
            completed_at: None,
            expires_at: None,
            every: Some(period.every().to_string()),
            zone: Some(period.zone().to_owned()),
            started_at: None,
            duration_ms: None,
            exit_status: None,
            host: None,
            user: None,
            pid: None,
        }
    }

    fn cells(&self) -> [String; COLUMNS] {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let took = self.duration_ms.map(|ms| format!("{:.1}s", Duration::from_millis(ms).as_secs_f64()));
        let by = match (&self.user, &self.host) {
            (Some(user), Some(host)) => Some(format!("{user}@{host}")),
            (None, host) => host.clone(),
            (user, None) => user.clone(),
        };
        let by = by.map(|by| printable(&by));
        [
            self.state.to_owned(),
            self.job.clone(),
            self.period.clone(),
            or_none(self.completed_at.clone().or_else(|| self.created_at.clone())),
            or_none(took),
            or_none(self.exit_status.map(|status| status.to_string())),
            or_none(self.attempt.map(|attempt| attempt.to_string())),
            or_none(by),
        ]
    }
}

const COLUMNS: usize = 8;
const HEADINGS: [&str; COLUMNS] = ["STATE", "JOB", "PERIOD", "AT", "TOOK", "EXIT", "ATTEMPT", "BY"];

pub(super) fn list(rows: &[Row], json: bool, out: &mut impl Write) -> io::Result<()> {
    if json {
        serde_json::to_writer_pretty(&mut *out, rows)?;
        return writeln!(out);
    }
    if rows.is_empty() {
        return writeln!(out, "no runs");
    }
    let lines: Vec<[String; COLUMNS]> =
        std::iter::once(HEADINGS.map(str::to_owned)).chain(rows.iter().map(Row::cells)).collect();
    let widths: [usize; COLUMNS] =
        std::array::from_fn(|i| lines.iter().map(|line| line[i].chars().count()).max().unwrap_or(0));
    for line in &lines {
        let cells = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

pub(super) fn details(known: &Known, json: bool, out: &mut impl Write) -> io::Result<()> {
    let row = Row::of(known, known.run.as_ref().map(|run| run.scheduled_at));
    let value = serde_json::to_value(&row)?;
    if json {
        serde_json::to_writer_pretty(&mut *out, &value)?;
        return writeln!(out);
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        match value {
            serde_json::Value::Null => {}
            serde_json::Value::String(text) => writeln!(out, "{name:<13} {}", printable(text))?,
            other => writeln!(out, "{name:<13} {other}")?,
        }
    }
    Ok(())
}

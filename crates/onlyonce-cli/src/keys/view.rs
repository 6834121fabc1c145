//! How keys are shown: tables for people, JSON for programs.

use std::fmt::Write as _;
use std::io::{self, Write};

use jiff::Timestamp as Instant;
use onlyonce_core::record::State as Stored;
use onlyonce_core::store::Entry;
use onlyonce_core::{Outcome, Recorded, Timestamp};
use serde::Serialize;

use super::State;

/// One key, as programs see it. The times are the store's.
#[derive(Serialize)]
struct Row<'a> {
    id: String,
    namespace: &'a str,
    endpoint: &'a str,
    caller: &'a str,
    key: &'a str,
    state: &'static str,
    attempt: u32,
    created_at: String,
    lease_until: Option<String>,
    completed_at: Option<String>,
    expires_at: String,
    outcome: Option<&'static str>,
    status: Option<u16>,
    body_bytes: Option<usize>,
}

impl<'a> Row<'a> {
    fn of(entry: &'a Entry) -> Self {
        let Entry { operation, record, now } = entry;
        let (lease_until, completed_at, outcome) = match &record.state {
            Stored::Running { lease_until } => (Some(rfc3339(*lease_until)), None, None),
            Stored::Done { outcome, completed_at } => (None, Some(rfc3339(*completed_at)), Some(outcome)),
        };
        Self {
            id: operation.id().to_string(),
            namespace: operation.namespace(),
            endpoint: operation.endpoint(),
            caller: operation.caller(),
            key: operation.key().as_str(),
            state: State::of(record, *now).as_str(),
            attempt: record.attempt,
            created_at: rfc3339(record.created_at),
            lease_until,
            completed_at,
            expires_at: rfc3339(record.expires_at),
            outcome: outcome.map(kind),
            status: outcome.map(|outcome| outcome.status).filter(|status| *status != 0),
            body_bytes: outcome.map(|outcome| outcome.body.len()),
        }
    }
}

/// What a retry is given; a status says it of a response only.
fn kind(outcome: &Outcome) -> &'static str {
    match Recorded::decode(outcome) {
        Ok(Recorded::Response(_)) => "response",
        Ok(Recorded::NotKept { .. }) => "not kept",
        Ok(Recorded::Value(value)) if value.is_error => "error",
        Ok(Recorded::Value(_)) => "value",
        Err(_) => "unreadable",
    }
}

/// A point beyond what a calendar holds is shown as the calendar's end.
fn rfc3339(at: Timestamp) -> String {
    let instant =
        Instant::from_millisecond(at.0).unwrap_or(if at.0 < 0 { Instant::MIN } else { Instant::MAX });
    format!("{instant:.3}")
}

/// A JSON array, whole.
pub(super) fn json(entries: &[Entry], out: &mut impl Write) -> io::Result<()> {
    let mut listing = Listing::new(true);
    listing.page(entries, out)?;
    listing.end(out)
}

/// A list that is printed page by page.
pub(super) struct Listing {
    json: bool,
    widths: Option<[usize; COLUMNS]>,
    rows: u64,
}

const COLUMNS: usize = 8;
const HEADINGS: [&str; COLUMNS] =
    ["STATE", "ATTEMPT", "STATUS", "CREATED", "KEY", "ENDPOINT", "CALLER", "ID"];

impl Listing {
    pub(super) fn new(json: bool) -> Self {
        Self { json, widths: None, rows: 0 }
    }

    pub(super) fn page(&mut self, entries: &[Entry], out: &mut impl Write) -> io::Result<()> {
        if self.json {
            for entry in entries {
                out.write_all(if self.rows == 0 { b"[\n  " } else { b",\n  " })?;
                serde_json::to_writer(&mut *out, &Row::of(entry))?;
                self.rows += 1;
            }
            return Ok(());
        }
        let rows: Vec<[String; COLUMNS]> = entries.iter().map(cells).collect();
        if rows.is_empty() {
            return Ok(());
        }
        self.rows += rows.len() as u64;
        // The first page sets the widths: the others are not known yet.
        let widths = match self.widths {
            Some(widths) => widths,
            None => {
                let widths = widths(&rows);
                line(&widths, &HEADINGS.map(str::to_owned), out)?;
                *self.widths.insert(widths)
            }
        };
        rows.iter().try_for_each(|row| line(&widths, row, out))
    }

    pub(super) fn end(&self, out: &mut impl Write) -> io::Result<()> {
        match (self.json, self.rows) {
            (true, 0) => writeln!(out, "[]"),
            (true, _) => writeln!(out, "\n]"),
            (false, 0) => writeln!(out, "no keys"),
            (false, _) => Ok(()),
        }
    }
}

fn cells(entry: &Entry) -> [String; COLUMNS] {
    let row = Row::of(entry);
    [
        row.state.to_owned(),
        row.attempt.to_string(),
        row.status.map_or_else(|| row.outcome.unwrap_or("-").to_owned(), |status| status.to_string()),
        row.created_at,
        printable(row.key),
        printable(row.endpoint),
        caller(row.caller),
        row.id,
    ]
}

fn widths(rows: &[[String; COLUMNS]]) -> [usize; COLUMNS] {
    std::array::from_fn(|column| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([HEADINGS[column].len()]).max().unwrap_or_default()
    })
}

fn line(widths: &[usize; COLUMNS], row: &[String; COLUMNS], out: &mut impl Write) -> io::Result<()> {
    let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
    writeln!(out, "{}", cells.join("  ").trim_end())
}

/// Everything about each key, a line for each fact.
pub(super) fn details(entries: &[Entry], out: &mut impl Write) -> io::Result<()> {
    for (number, entry) in entries.iter().enumerate() {
        if number > 0 {
            writeln!(out)?;
        }
        let row = Row::of(entry);
        let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        for (name, value) in [
            ("key", printable(row.key)),
            ("id", row.id),
            ("namespace", printable(row.namespace)),
            ("endpoint", printable(row.endpoint)),
            ("caller", caller(row.caller)),
            ("state", row.state.to_owned()),
            ("attempt", row.attempt.to_string()),
            ("created at", row.created_at),
            ("lease until", or_dash(row.lease_until)),
            ("completed at", or_dash(row.completed_at)),
            ("expires at", row.expires_at),
            ("outcome", or_dash(row.outcome.map(str::to_owned))),
            ("status", or_dash(row.status.map(|status| status.to_string()))),
            ("body bytes", or_dash(row.body_bytes.map(|bytes| bytes.to_string()))),
        ] {
            writeln!(out, "{name:<12}  {value}")?;
        }
    }
    Ok(())
}

/// What an operator has to choose between.
pub(super) fn candidates(entries: &[Entry]) -> String {
    let mut text = String::new();
    for entry in entries {
        let row = Row::of(entry);
        // Writing to a String does not fail.
        let _ = writeln!(
            text,
            "  --id {}  namespace {}, endpoint {}, caller {}, {}",
            row.id,
            printable(row.namespace),
            printable(row.endpoint),
            caller(row.caller),
            row.state
        );
    }
    text.truncate(text.trim_end().len());
    text
}

fn caller(name: &str) -> String {
    if name.is_empty() { "(anonymous)".to_owned() } else { printable(name) }
}

/// A name may come from a client, and must not move the cursor of an operator's terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escaped = c.is_control().then(|| c.escape_default());
            let plain = escaped.is_none().then_some(c);
            escaped.into_iter().flatten().chain(plain)
        })
        .collect()
}

//! `onlyonce doctor`: is everything as it should be?

use std::io::Write;
use std::time::{Duration, Instant};

use clap::Args;
use onlyonce_core::store::{Filter, Inserted, OpenError, OpenErrorKind};
use onlyonce_core::{Fingerprint, Key, Lapse, Operation, Policy, Revision, machine};
use serde_json::json;

use crate::admin;
use crate::cli::{FAILED, Failure, StoreArgs, USAGE};
use crate::config::{self, FileConfig};
use crate::connect::Connector;
use crate::keys::{Pages, State};
use crate::store::{Concern, OpenStore, StoreUrl};
use crate::upstream::Upstream;

/// Above this many records they are not counted by state: that reads every one of them.
const COUNTED_RECORDS_MAX: u64 = 10_000;

/// A durable write that takes longer than this holds every guarded request up.
const SLOW_WRITE: Duration = Duration::from_millis(250);

/// What `onlyonce doctor` is told.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  onlyonce doctor --config onlyonce.toml
  onlyonce doctor --store sqlite:/var/lib/onlyonce/keys.db --upstream http://127.0.0.1:3000 --json

Every line is ok, warn or fail. Exit code 1 if one of them is fail, 2 if that is for the configuration: a
setting that cannot be, a store that is refused. It writes one record to the store and removes it again, to
see that it can.")]
pub struct DoctorArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The API to reach, unless the file says it
    #[arg(long, env = "ONLYONCE_UPSTREAM", hide_env_values = true, value_name = "URL")]
    upstream: Option<String>,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

/// How one check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Ok,
    Warn,
    Fail,
}

impl Level {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

#[derive(Default)]
struct Report {
    lines: Vec<(&'static str, Level, String)>,
    /// Whether the configuration must change before anything else counts.
    refused: bool,
}

impl Report {
    fn line(&mut self, check: &'static str, level: Level, detail: impl Into<String>) {
        self.lines.push((check, level, detail.into()));
    }

    fn refuse(&mut self, check: &'static str, detail: impl Into<String>) {
        self.refused = true;
        self.line(check, Level::Fail, detail);
    }

    fn not_opened(&mut self, error: &OpenError) {
        match error.kind() {
            OpenErrorKind::Refused => self.refuse("store", error.to_string()),
            OpenErrorKind::Failed => self.line("store", Level::Fail, error.to_string()),
        }
    }

    fn exit_code(&self) -> Option<u8> {
        let failed = self.lines.iter().any(|(_, level, _)| *level == Level::Fail);
        failed.then_some(if self.refused { USAGE } else { FAILED })
    }
}

/// Checks everything, and prints a line for each check.
///
/// # Errors
/// With exit code 1 if a check failed, and 2 if the configuration is wrong or refused.
pub async fn run(args: &DoctorArgs, out: &mut impl Write) -> Result<(), Failure> {
    let report = examine(args).await;
    if args.json {
        let lines: Vec<_> = report
            .lines
            .iter()
            .map(|(check, level, detail)| json!({ "check": check, "result": level.as_str(), "detail": detail }))
            .collect();
        serde_json::to_writer_pretty(&mut *out, &lines).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        for (check, level, detail) in &report.lines {
            writeln!(out, "{:<4}  {check:<9}  {detail}", level.as_str())?;
        }
    }
    match report.exit_code() {
        Some(code) => Err(Failure { code, message: None }),
        None => Ok(()),
    }
}

async fn examine(args: &DoctorArgs) -> Report {
    let mut report = Report::default();
    let now = jiff::Timestamp::now();
    report.line("clock", Level::Ok, format!("this machine's clock says {now:.0}"));
    let (url, file) = match config::load_store(&args.store) {
        Ok(loaded) => loaded,
        Err(error) => {
            report.refuse("config", error.to_string());
            return report;
        }
    };
    let config = match &args.store.config {
        Some(path) => format!("{} is valid", path.display()),
        None => "no --config file; flags, environment and defaults count".to_owned(),
    };
    report.line("config", Level::Ok, config);
    store(&mut report, &url, args.store.allow_volatile || file.allow_volatile()).await;
    upstream(&mut report, args.upstream.as_deref(), &file).await;
    report
}

async fn store(report: &mut Report, url: &StoreUrl, allow_volatile: bool) {
    match url.volatile() {
        Some(Some(reason)) if allow_volatile => {
            report.line("durable", Level::Warn, format!("volatile, as allowed: {reason}"));
        }
        Some(Some(reason)) => {
            return report.refuse("durable", format!("volatile: {reason}; use a file with synchronous=full"));
        }
        Some(None) => report.line("durable", Level::Ok, "every acknowledged write is on disk"),
        // Known when the server was asked.
        None => {}
    }
    let wanted = url.schema_wanted();
    match url.schema_found(allow_volatile).await {
        Ok(Some(version)) if version == wanted => {
            report.line("schema", Level::Ok, format!("version {version}, as this build wants it"));
        }
        Ok(Some(version)) if version < wanted => {
            let detail =
                format!("version {version}; `onlyonce migrate` or the next start takes it to {wanted}");
            return report.line("schema", Level::Warn, detail);
        }
        // A newer build may have left it so that this one still can use it: opening it tells.
        Ok(Some(version)) => {
            let detail = format!("version {version} is newer than this build, which knows up to {wanted}");
            report.line("schema", Level::Warn, detail);
        }
        Ok(None) => {
            let detail =
                format!("there is nothing at {url} yet; `onlyonce proxy` or `onlyonce migrate` creates it");
            return report.line("schema", Level::Warn, detail);
        }
        Err(error) => return report.not_opened(&error),
    }
    match OpenStore::open_existing(url, allow_volatile).await {
        Ok(store) => {
            if let Err(error) = look_into(report, url, &store).await {
                report.line("store", Level::Fail, error.to_string());
            }
            if let Err(error) = store.close().await {
                report.line("store", Level::Warn, format!("did not close tidily: {error}"));
            }
        }
        Err(error) => report.not_opened(&error),
    }
}

async fn look_into(
    report: &mut Report,
    url: &StoreUrl,
    store: &OpenStore,
) -> Result<(), onlyonce_core::StoreError> {
    let facts = store.facts().await?;
    report.line("store", Level::Ok, format!("{url}, {}", facts.about));
    for (check, concern, note) in facts.notes {
        let level = match concern {
            Concern::None => Level::Ok,
            Concern::Some => Level::Warn,
            Concern::Grave => Level::Fail,
        };
        report.line(check, level, note);
    }
    match write_once(store).await? {
        took if took > SLOW_WRITE => report.line(
            "write",
            Level::Warn,
            format!("a durable write took {} ms; every guarded request pays two", took.as_millis()),
        ),
        took => report.line(
            "write",
            Level::Ok,
            format!("a durable write took {:.1} ms", took.as_secs_f64() * 1e3),
        ),
    }
    let records = facts.records.unwrap_or_default();
    if records > COUNTED_RECORDS_MAX {
        let about = if facts.exact { "" } else { "about " };
        report.line("keys", Level::Ok, format!("{about}{records} records, expired ones included"));
        return Ok(());
    }
    let (mut running, mut lapsed, mut done, mut expired) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut unreadable = Vec::new();
    let mut pages = Pages::new(store, Filter::default());
    while let Some(page) = pages.next().await? {
        unreadable.extend(page.unreadable);
        for entry in &page.entries {
            match State::of(&entry.record, entry.now) {
                State::Running => running += 1,
                State::Lapsed => lapsed += 1,
                State::Done => done += 1,
                State::Expired => expired += 1,
            }
        }
    }
    for reason in &unreadable {
        report.line("keys", Level::Fail, reason.clone());
    }
    let counts =
        format!("{running} running, {lapsed} lapsed, {done} done, {expired} expired and not yet swept");
    report.line("keys", if lapsed == 0 { Level::Ok } else { Level::Warn }, counts);
    Ok(())
}

/// Claims a key that no request can have, and gives it back.
async fn write_once(store: &OpenStore) -> Result<Duration, onlyonce_core::StoreError> {
    let revision = Revision::fresh();
    // An endpoint of a request starts with its method and a space.
    let key = Key::new(format!("{:032x}", revision.0)).expect("hexadecimal digits are a key");
    let operation = Operation::new("onlyonce", "doctor", "", key);
    let minute = Duration::from_secs(60);
    let policy = Policy { lease: minute, retention: minute, on_lapse: Lapse::Rerun };
    let write = machine::grant(Fingerprint { target: [0; 32], body: [0; 32] }, revision, &policy);
    let handle = store.store();
    let started = Instant::now();
    let inserted = handle.insert(&operation, write).await?;
    let took = started.elapsed();
    if let Inserted::New(_) = inserted {
        handle.remove(operation.id(), revision).await?;
    }
    Ok(took)
}

async fn upstream(report: &mut Report, flag: Option<&str>, file: &FileConfig) {
    let upstream = match flag.map(Upstream::parse).transpose() {
        Ok(flag) => flag.or_else(|| file.upstream().cloned()),
        Err(error) => return report.refuse("upstream", error.to_string()),
    };
    let Some(upstream) = upstream else {
        return report.line(
            "upstream",
            Level::Warn,
            "not set, so not checked; give --upstream URL or --config FILE",
        );
    };
    if upstream.is_https()
        && let Err(error) = Connector::new(true)
    {
        return report.line(
            "upstream",
            Level::Fail,
            format!("no certificates to check {upstream} with: {error}"),
        );
    }
    match admin::reach(&upstream.address()).await {
        Ok(()) => report.line("upstream", Level::Ok, format!("{upstream} takes connections")),
        Err(reason) => report.line("upstream", Level::Fail, reason),
    }
}

#[cfg(test)]
mod tests;

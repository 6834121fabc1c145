//! `onlyonce run`: one run of a command for each period, whatever reruns, overlaps or crashes.
//!
//! | file | holds |
//! |---|---|
//! | `guard` | a period: claimed, run, recorded |
//! | `child`, `keeper` | the command, and what ends it when the guard is gone |
//! | `signals` | what is passed on to it |
//!
//! Nothing of the command's output passes through here: it has the guard's own standard input, output and error. What
//! the guard has to say goes to standard error.

mod child;
mod guard;
pub mod keeper;
mod signals;

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, Write};
use std::time::Duration;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use onlyonce::SWEEP_ROWS_MAX;
use onlyonce::period::{self, Every, MalformedCron, Period, Run, Schedule};
use onlyonce_core::store::Filter;
use onlyonce_core::{Engine, Lapse};

use crate::cli::{Failure, StoreArgs, duration};
use crate::config;
use crate::keys::{State, printable};
use crate::runs;
use crate::store::OpenStore;

use guard::{Guard, Told, own_failure};
use signals::Signals;

pub(crate) use child::KEEPER;

/// What `onlyonce run` is told.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// The job's name: a job runs once for each of its periods
    #[arg(long, value_name = "NAME")]
    pub(crate) job: String,
    /// How often it runs: hour, day, week, month, quarter, year or a cron expression such as '30 2 * * *'
    #[arg(long, value_name = "PERIOD", value_parser = every)]
    every: Every,
    /// The time zone that periods are cut in, such as Europe/Berlin [default: this machine's]
    #[arg(long, env = "ONLYONCE_TZ", value_name = "ZONE", value_parser = zone)]
    tz: Option<TimeZone>,
    /// Run this period, such as 2026-06, instead of the one that is due
    #[arg(long, value_name = "P", conflicts_with_all = ["at", "catch_up"])]
    period: Option<String>,
    /// When the run was scheduled, instead of now: 2026-07-01T00:00:00Z, or the name of a Kubernetes CronJob's Job
    #[arg(long, value_name = "INSTANT", value_parser = scheduled_at)]
    at: Option<Timestamp>,
    /// Before the period that is due, run the last N of those that were missed since the job's first known run
    #[arg(long, value_name = "N", default_value_t = 0)]
    catch_up: usize,
    /// How long before its time a timer may fire and still mean the period that is about to begin
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "30s")]
    tolerance: Duration,
    /// How long others wait after this process has died; it is renewed while the command runs
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "90s")]
    lease: Duration,
    /// How long a run is remembered, at least as long as its period [default: 30d, three periods, or what --catch-up needs]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    retention: Option<Duration>,
    /// What becomes of a period whose guard died in the middle of it
    #[arg(long, value_enum, default_value_t)]
    on_lapse: OnLapse,
    /// What to do while another period of the job is still running
    #[arg(long, value_enum, default_value_t)]
    overlap: Overlap,
    /// How long to wait under --overlap wait
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "1h")]
    wait: Duration,
    /// The exit status if the period, or under --overlap another one of the job, is still running
    #[arg(long, value_name = "N", default_value_t = 0)]
    busy_exit: u8,
    /// Record a run that failed, too: the period is then done, and later starts exit with its status
    #[arg(long)]
    keep_failure: bool,
    /// How long the command has to end by itself when it is stopped; at most a third of the lease
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "10s")]
    grace: Duration,
    /// Which application this is; two on one store need two names
    #[arg(long, env = "ONLYONCE_NAMESPACE", value_name = "NAME", default_value = onlyonce::NAMESPACE_DEFAULT)]
    namespace: String,
    /// Say what became of it as a JSON object, in one line on standard error
    #[arg(long)]
    json: bool,
    /// Say nothing unless something went wrong, or a period waited in vain
    #[arg(long, conflicts_with = "json")]
    quiet: bool,
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// The command and its arguments, after --
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

const EXAMPLES: &str = "\
Examples:
  onlyonce run --job billing --every month --tz Europe/Berlin -- ./bill.sh
      However often and wherever it is started: once for July, once for August.
  onlyonce run --job report --every '30 2 * * *' --tz Europe/Berlin -- ./report.sh
      Once for each 02:30, also on the days when the clock is set.
  onlyonce run --job billing --every month --tz Europe/Berlin --period 2026-06 -- ./bill.sh
      June, by hand. If it was done, this says when, and does nothing.

The command sees ONLYONCE_KEY (billing:2026-07), ONLYONCE_PERIOD (2026-07) and ONLYONCE_ATTEMPT (1 unless the period was begun
before: the command failed, or a guard died). Its input and output are its own; what onlyonce has to say goes to standard error.

Exit codes:
  the command's own; 128 and the signal's number if a signal ended it; 126 or 127 if it cannot be started
  0    the period was done before, or is running (then --busy-exit N)
  2    wrong usage or configuration; nothing ran
  125  onlyonce failed: the store is away, the lease was lost, a run that nobody knows the end of is left to a person";

/// What becomes of a period whose guard died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum OnLapse {
    /// The next start runs it again
    #[default]
    Rerun,
    /// It is left to a person
    Hold,
}

impl From<OnLapse> for Lapse {
    fn from(on_lapse: OnLapse) -> Self {
        match on_lapse {
            OnLapse::Rerun => Self::Rerun,
            OnLapse::Hold => Self::Hold,
        }
    }
}

/// What to do while another period of the job is running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Overlap {
    /// Leave this period out
    Skip,
    /// Wait for its end, so that every period is run
    #[default]
    Wait,
    /// Run both at once
    Allow,
}

/// The shortest lease: renewals and stops must fit in.
const LEASE_MIN: Duration = Duration::from_secs(1);

impl RunArgs {
    /// A command that is stopped must be gone when its lease ends.
    fn grace(&self) -> Duration {
        self.grace.min(self.lease / 3)
    }

    /// Whatever may be caught up with must still be remembered.
    fn retention(&self, period: &Period) -> Duration {
        let periods = u32::try_from(self.catch_up).unwrap_or(u32::MAX).saturating_add(1);
        let caught_up = period.longest().saturating_mul(periods).min(onlyonce::settings::DURATION_MAX);
        self.retention.unwrap_or_else(|| period::retention_default(period).max(caught_up))
    }

    fn check(&self, period: &Period) -> Result<(), Failure> {
        let setting = |error: onlyonce::SettingsError| {
            Failure::usage(format!("--{}", error.to_string().replace('`', "")))
        };
        if !(LEASE_MIN..=onlyonce::settings::DURATION_MAX).contains(&self.lease) {
            return Err(Failure::usage("--lease must be from 1s to ten years (3660d)"));
        }
        if self.namespace.is_empty() {
            return Err(Failure::usage("--namespace must not be empty"));
        }
        let retention = self.retention(period);
        if retention > onlyonce::settings::DURATION_MAX || retention < self.lease {
            return Err(Failure::usage("--retention must be from the --lease to ten years (3660d)"));
        }
        period::check_period_retention(retention, period, self.tolerance).map_err(setting)?;
        period::operation(&self.namespace, &self.job, period.name())
            .map_err(|error| Failure::usage(format!("--job: {error}")))?;
        Ok(())
    }
}

/// Runs what is due.
///
/// # Errors
/// With the exit code that the command documents.
pub async fn run(args: RunArgs) -> Result<(), Failure> {
    let done = start(&args).await;
    match done {
        Err(Failure { code, message: Some(message) }) if args.json => {
            tell(
                serde_json::json!({ "job": args.job, "result": "error", "exit_status": code, "message": message }),
            );
            Err(Failure { code, message: None })
        }
        done => done,
    }
}

async fn start(args: &RunArgs) -> Result<(), Failure> {
    let (url, file) = config::load_store(&args.store)?;
    let zone = args.tz.clone().map_or_else(machine_zone, Ok)?;
    let schedule = Schedule::new(args.every.clone(), zone);
    let now = Timestamp::now();
    let due = due(args, &schedule, now)?;
    args.check(&due)?;
    // Before anything is claimed, so that no signal leaves it held.
    let mut signals =
        Signals::catch().map_err(|error| own_failure(format!("signals cannot be received: {error}")))?;
    let allow_volatile = args.store.allow_volatile || file.allow_volatile();
    let opening = OpenStore::open(&url, allow_volatile, OPEN_WAIT);
    let store = tokio::select! {
        opened = opening => opened.map_err(|error| own(error.into()))?,
        signal = asked_to_end(&mut signals) => return Err(ended_by(signal)),
    };
    let done = run_all(args, &schedule, due, &store, &mut signals).await;
    let _ = store.close().await;
    match done? {
        0 => Ok(()),
        code => Err(Failure { code, message: None }),
    }
}

/// How long a store that is away is waited for, on the local clock.
const OPEN_WAIT: Duration = Duration::from_secs(30);

/// What a person can put right by other arguments keeps its status.
fn own(failure: Failure) -> Failure {
    match failure {
        failed if failed.code == crate::cli::FAILED => Failure { code: guard::OWN_FAILURE, ..failed },
        refused => refused,
    }
}

async fn asked_to_end(signals: &mut Signals) -> rustix::process::Signal {
    loop {
        let signal = signals.next().await;
        if signals::ends(signal) {
            return signal;
        }
    }
}

fn ended_by(signal: rustix::process::Signal) -> Failure {
    let code = u8::try_from(128 + signal.as_raw()).unwrap_or(guard::OWN_FAILURE);
    Failure { code, message: Some("told to end before the store was open".to_owned()) }
}

/// The period that this start is for.
fn due(args: &RunArgs, schedule: &Schedule, now: Timestamp) -> Result<Period, Failure> {
    let (setting, period) = match &args.period {
        Some(name) => {
            ("--period", schedule.find(name).map_err(|error| Failure::usage(format!("--period: {error}")))?)
        }
        None => {
            let at = args.at.unwrap_or(now);
            let never = || Failure::usage(format!("--every {}: was never due before {at}", schedule.every()));
            ("--at", schedule.due(at, args.tolerance).ok_or_else(never)?)
        }
    };
    match now.checked_add(args.tolerance) {
        // Done before its time, it would not be run when its time has come.
        Ok(soon) if period.starts_at() > soon => {
            let (name, begins) = (period.name(), period.starts_at());
            Err(Failure::usage(format!("{setting}: {name} begins at {begins} only")))
        }
        _ => Ok(period),
    }
}

/// Runs what was missed and then what is due, up to the first that does not succeed. The exit code of the last.
async fn run_all(
    args: &RunArgs,
    schedule: &Schedule,
    due: Period,
    store: &OpenStore,
    signals: &mut Signals,
) -> Result<u8, Failure> {
    let guard = Guard { args, store: store.store(), engine: Engine::new(store.store()) };
    let mut periods = Vec::new();
    if args.catch_up > 0 {
        periods = missed(args, schedule, &due, store).await?;
    }
    periods.push(due);
    let mut code = 0;
    for period in &periods {
        let told = guard.run(period, signals).await?;
        code = told.exit_status;
        say(args, &told)?;
        if code != 0 || !told.result.lets_go_on() {
            break;
        }
    }
    // Where no proxy does it.
    let _ = store.store().sweep(SWEEP_ROWS_MAX).await;
    Ok(code)
}

impl guard::Result {
    /// Whether the next period may come.
    fn lets_go_on(self) -> bool {
        matches!(self, Self::Done | Self::DoneBefore)
    }
}

/// The latest of the periods that nobody has finished since the job's first known run, the oldest first.
async fn missed(
    args: &RunArgs,
    schedule: &Schedule,
    due: &Period,
    store: &OpenStore,
) -> Result<Vec<Period>, Failure> {
    let filter = Filter {
        namespace: Some(args.namespace.clone()),
        endpoint: Some(period::ENDPOINT.to_owned()),
        caller: Some(args.job.clone()),
        ..Filter::default()
    };
    let (known, unreadable) = runs::known(store, filter).await.map_err(own)?;
    if let Some(damaged) = unreadable.first() {
        return Err(own_failure(format!("store: {damaged}")));
    }
    let first = known.iter().filter_map(|run| schedule.find(&run.period).ok()).min_by_key(Period::starts_at);
    let Some(first) = first else { return Ok(Vec::new()) };
    let is_done = |run: &runs::Known| run.state == State::Done;
    let mut missed = runs::absent(schedule, first, due.starts_at(), &known, is_done);
    let since = runs::remembered_since(&known, Some(args.retention(due)), args.tolerance);
    // What somebody has begun is known, however old.
    let begun: HashSet<&str> = known.iter().map(|run| run.period.as_str()).collect();
    let absent = missed.len();
    missed.retain(|period| period.starts_at() >= since || begun.contains(period.name()));
    if missed.len() < absent {
        not_caught_up(args, &runs::forgotten(absent - missed.len(), &args.job));
    }
    if missed.len() > args.catch_up {
        let older = missed.len() - args.catch_up;
        let message =
            format!("{older} older periods of {} were missed as well; --period runs one of them", args.job);
        not_caught_up(args, &message);
        missed.drain(..older);
    }
    Ok(missed)
}

/// Older ones are a person's business.
fn not_caught_up(args: &RunArgs, message: &str) {
    if args.json {
        tell(serde_json::json!({ "job": args.job, "result": "not_caught_up", "message": message }));
    } else {
        tell(format!("onlyonce: {message}"));
    }
}

/// Nobody may be listening, and the work goes on all the same.
pub(crate) fn tell(message: impl Display) {
    let _ = writeln!(io::stderr(), "{message}");
}

fn say(args: &RunArgs, told: &Told) -> Result<(), Failure> {
    if args.json {
        let json = serde_json::to_string(told).map_err(|error| own_failure(error.to_string()))?;
        tell(json);
        return Ok(());
    }
    // A scheduler mails whatever is said: a run that went well says enough by itself.
    let is_news = told.result != guard::Result::Done || told.exit_status != 0;
    let is_wrong = match told.result {
        guard::Result::Done | guard::Result::DoneBefore | guard::Result::Running => false,
        // It was to be run, and was not.
        guard::Result::Overlaps => args.overlap == Overlap::Wait,
        _ => true,
    };
    if is_wrong || told.exit_status != 0 || (is_news && !args.quiet) {
        tell(format!("onlyonce: {}", told.message));
    }
    Ok(())
}

pub(crate) fn every(text: &str) -> Result<Every, String> {
    text.parse().map_err(|error: MalformedCron| {
        format!("hour, day, week, month, quarter, year or a cron expression are allowed: {error}")
    })
}

pub(crate) fn zone(name: &str) -> Result<TimeZone, String> {
    TimeZone::get(name).map_err(|error| format!("{error}; a name such as Europe/Berlin or UTC is wanted"))
}

/// The zone that this machine's own scheduler goes by.
fn machine_zone() -> Result<TimeZone, Failure> {
    let untold = !std::path::Path::new("/etc/localtime").exists() && std::env::var_os("TZ").is_none();
    match TimeZone::try_system() {
        Ok(zone) if zone.iana_name().is_some() => Ok(zone),
        // Where nothing says otherwise, as in a container, it is UTC.
        _ if untold => Ok(TimeZone::UTC),
        _ => Err(Failure::usage("--tz is needed: the name of this machine's time zone cannot be told")),
    }
}

/// Since 2021 CronJobs name their Jobs so. A date at the end of a name (`billing-20260701`) would be minutes of 2008.
const MINUTES_OF_CRONJOBS: std::ops::Range<i64> = 26_824_320..100_000_000;

/// An instant, or the name of a Job that a CronJob started: it ends in the scheduled minute.
fn scheduled_at(text: &str) -> Result<Timestamp, String> {
    if let Ok(instant) = text.parse() {
        return Ok(instant);
    }
    let minute = text.rsplit_once('-').and_then(|(_, minute)| minute.parse::<i64>().ok());
    let plausible = minute.filter(|minute| MINUTES_OF_CRONJOBS.contains(minute));
    plausible.and_then(|minute| Timestamp::from_second(minute * 60).ok()).ok_or_else(|| {
        "an instant such as 2026-07-01T00:00:00Z is wanted, or the name of a Job that a CronJob started, such as \
         billing-29705640"
            .to_owned()
    })
}

/// A point of the store's clock, for people.
pub(crate) fn instant(at: onlyonce_core::Timestamp) -> String {
    let instant =
        Timestamp::from_millisecond(at.0).unwrap_or(if at.0 < 0 { Timestamp::MIN } else { Timestamp::MAX });
    format!("{instant:.0}")
}

/// Who ran it, and for how long.
fn by(run: &Run) -> String {
    let took = guard::seconds(Duration::from_millis(run.duration_ms));
    match (&run.user, &run.host) {
        (Some(user), Some(host)) => format!("by {} on {} in {took}", printable(user), printable(host)),
        (None, Some(host)) => format!("on {} in {took}", printable(host)),
        _ => format!("in {took}"),
    }
}

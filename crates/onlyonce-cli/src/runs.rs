//! `onlyonce runs`: which periods of which jobs were run, by whom, and which were not.

mod view;

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::time::Duration;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use onlyonce::period::{self, Every, Period, Run, Schedule};
use onlyonce_core::record::{Record, State as Stored};
use onlyonce_core::store::{Entry, Filter};

use crate::cli::{Failure, StoreArgs};
use crate::config;
use crate::keys::{Pages, State};
use crate::run::tell;
use crate::store::OpenStore;

/// What can be done with runs.
#[derive(Subcommand, Clone, Debug)]
pub enum RunsCommand {
    /// List the runs of a job, or of all, and the periods that are missing
    #[command(after_help = "\
Examples:
  onlyonce runs list
  onlyonce runs list --job billing
  onlyonce runs list --job billing --every month --tz Europe/Berlin --since 2026-01-01T00:00:00Z --json

A period is missing if it is over and nobody finished it, from the job's first known run on, or from --since. Which periods
there should be is told by the job's latest recorded run, unless --every and --tz say it. The current one is due until then.
One that began longer ago than runs are remembered is forgotten: nobody knows whether it was run.

One that is lapsed was begun and not finished, and nobody is at it: the command failed, or whoever ran it died.")]
    List(ListArgs),
    /// Show everything known about the run of a period
    #[command(after_help = "\
Examples:
  onlyonce runs show billing 2026-07
  onlyonce runs show billing 2026-07 --json

Exit code 1 if there is no such run.")]
    Show(RunArgs),
    /// Forget the run of a period: the next start runs it again
    #[command(after_help = "\
Examples:
  onlyonce runs release billing 2026-07

Exit code 1 if there is no such run, 2 if it is still going on (then --force).")]
    Release(ReleaseArgs),
}

impl RunsCommand {
    pub(crate) fn store_args(&mut self) -> &mut StoreArgs {
        match self {
            Self::List(args) => &mut args.store,
            Self::Show(args) => &mut args.store,
            Self::Release(args) => &mut args.run.store,
        }
    }
}

/// What `runs list` is told.
#[derive(Args, Clone, Debug)]
pub struct ListArgs {
    /// Only this job
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// How often it is run: hour, day, week, month, quarter, year or a cron expression [default: as it was last run]
    #[arg(long, value_name = "PERIOD", requires = "job", value_parser = crate::run::every)]
    every: Option<Every>,
    /// In which time zone [default: as it was last run]
    #[arg(long, value_name = "ZONE", requires = "job", value_parser = crate::run::zone)]
    tz: Option<TimeZone>,
    /// Which periods should be there: those since this instant [default: since the first known run]
    #[arg(long, value_name = "INSTANT")]
    since: Option<Timestamp>,
    /// Only those that are missing
    #[arg(long)]
    missing: bool,
    /// At most so many of each job, the latest; 0 is all of them [default: 100, and all with --json]
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
    /// Which application
    #[arg(long, env = "ONLYONCE_NAMESPACE", value_name = "NAME", default_value = onlyonce::NAMESPACE_DEFAULT)]
    namespace: String,
    /// Print a JSON array, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// Which run is meant.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The job
    job: String,
    /// The period, such as 2026-07
    period: String,
    /// Which application
    #[arg(long, env = "ONLYONCE_NAMESPACE", value_name = "NAME", default_value = onlyonce::NAMESPACE_DEFAULT)]
    namespace: String,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    store: StoreArgs,
}

/// What `runs release` is told.
#[derive(Args, Clone, Debug)]
pub struct ReleaseArgs {
    #[command(flatten)]
    run: RunArgs,
    /// Release it although it may be going on: it can then happen twice
    #[arg(long)]
    force: bool,
}

const ROWS_DEFAULT: usize = 100;

/// A run that the store remembers.
pub(crate) struct Known {
    pub(crate) job: String,
    pub(crate) period: String,
    pub(crate) state: State,
    entry: Entry,
    run: Option<Run>,
}

impl Known {
    /// `None` if it is forgotten, or is no run.
    pub(crate) fn of(entry: Entry) -> Option<Self> {
        let job = entry.operation.caller().to_owned();
        let period = entry.operation.key().as_str().strip_prefix(&job)?.strip_prefix(':')?.to_owned();
        let state = State::of(&entry.record, entry.now);
        let run = match &entry.record.state {
            Stored::Done { outcome, .. } => Run::read(outcome).ok(),
            Stored::Running { .. } => None,
        };
        (state != State::Expired).then_some(Self { job, period, state, entry, run })
    }
}

/// The periods from the one `first` up to an instant that have no run that `counts`.
pub(crate) fn absent(
    schedule: &Schedule,
    first: Period,
    until: Timestamp,
    known: &[Known],
    counts: impl Fn(&Known) -> bool,
) -> Vec<Period> {
    let names: HashSet<&str> =
        known.iter().filter(|run| counts(run)).map(|run| run.period.as_str()).collect();
    let was_due = was_due(schedule, known);
    let periods = std::iter::successors(Some(first), |period| schedule.next(period));
    periods
        .take_while(|period| period.starts_at() < until)
        .filter(|period| !names.contains(period.name()) && was_due(period))
        .collect()
}

/// Whether a period was one when its time came: the next run that was begun tells what the job's periods were then.
fn was_due(schedule: &Schedule, known: &[Known]) -> impl Fn(&Period) -> bool {
    let now = schedule.every().to_string();
    let other = |run: &Run| (run.every != now).then(|| run.every.parse().ok()).flatten();
    let of = |every: Every| Schedule::new(every, schedule.zone().clone());
    let mut then: Vec<(Timestamp, Option<Schedule>)> = known
        .iter()
        .filter_map(|known| Some((known.entry.record.granted_at.0, known.run.as_ref()?)))
        .filter_map(|(begun, run)| Some((Timestamp::from_millisecond(begun).ok()?, other(run).map(of))))
        .collect();
    then.sort_by_key(|(begun, _)| *begun);
    move |period| {
        let next = then.partition_point(|(begun, _)| *begun < period.starts_at());
        match then.get(next) {
            Some((_, Some(other))) => other.find(period.name()).is_ok(),
            _ => true,
        }
    }
}

/// Since when any run would still be remembered, on the store's clock. Before that a period that is not known may have been
/// run all the same: one that was run late, by hand, outlives those that were run in their time. Runs are remembered for as
/// long as those that are known say, and no longer than `retention`; they may come so much `early`.
pub(crate) fn remembered_since(known: &[Known], retention: Option<Duration>, early: Duration) -> Timestamp {
    let now = known.iter().map(|run| run.entry.now.0).max();
    let now = now.and_then(|now| Timestamp::from_millisecond(now).ok()).unwrap_or_else(Timestamp::now);
    let kept = known.iter().map(|run| kept_for(&run.entry.record)).chain(retention).min().unwrap_or_default();
    now.checked_sub(kept.saturating_sub(early)).unwrap_or(Timestamp::MIN)
}

/// The retention that it was recorded with.
fn kept_for(record: &Record) -> Duration {
    let from = match record.state {
        Stored::Running { lease_until } => lease_until,
        Stored::Done { completed_at, .. } => completed_at,
    };
    record.expires_at.since(from)
}

/// What is said of those before.
pub(crate) fn forgotten(count: usize, job: &str) -> String {
    format!(
        "{count} periods of {job} are longer ago than its runs are remembered, so nobody knows whether they were run; \
         --period runs one of them"
    )
}

/// Carries out one command.
///
/// # Errors
/// With the exit code that the command documents. Nothing was written then.
pub async fn run(mut command: RunsCommand, out: &mut impl Write) -> Result<(), Failure> {
    let (url, file) = config::load_store(command.store_args())?;
    let allow_volatile = command.store_args().allow_volatile || file.allow_volatile();
    let store = OpenStore::open_existing(&url, allow_volatile).await?;
    let done = match command {
        RunsCommand::List(args) => list(&args, &store, out).await,
        RunsCommand::Show(args) => show(&args, &store, out).await,
        RunsCommand::Release(args) => release(&args, &store, out).await,
    };
    let _ = store.close().await;
    done
}

async fn list(args: &ListArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let filter = Filter {
        namespace: Some(args.namespace.clone()),
        endpoint: Some(period::ENDPOINT.to_owned()),
        caller: args.job.clone(),
        ..Filter::default()
    };
    let (known, unreadable) = known(store, filter).await?;
    let mut jobs: BTreeMap<String, Vec<Known>> = BTreeMap::new();
    for run in known {
        jobs.entry(run.job.clone()).or_default().push(run);
    }
    if let Some(job) = &args.job {
        jobs.entry(job.clone()).or_default();
    }
    let limit = match args.limit {
        Some(0) => usize::MAX,
        Some(limit) => limit,
        None if args.json => usize::MAX,
        None => ROWS_DEFAULT,
    };
    let mut rows = Vec::new();
    for (job, known) in jobs {
        let mut of_job = rows_of(args, &job, &known)?;
        if of_job.len() > limit {
            tell(format!(
                "onlyonce: {job} has {} more; --limit N shows more, --limit 0 all",
                of_job.len() - limit
            ));
            of_job.drain(..of_job.len() - limit);
        }
        rows.extend(of_job);
    }
    view::list(&rows, args.json, out)?;
    if unreadable.is_empty() {
        return Ok(());
    }
    Err(Failure::failed(format!("the list is not complete:\n  {}", unreadable.join("\n  "))))
}

/// The runs of one job and its periods without one, in order.
fn rows_of(args: &ListArgs, job: &str, known: &[Known]) -> Result<Vec<view::Row>, Failure> {
    let schedule = schedule(args, known)?;
    let find = |name: &str| schedule.as_ref().and_then(|schedule| schedule.find(name).ok());
    let mut rows: Vec<(Option<Timestamp>, view::Row)> = Vec::new();
    let now = Timestamp::now();
    let is_over = |run: &Known| find(&run.period).is_none_or(|period| period.ends_at() <= now);
    let unfinished = |run: &Known| run.state == State::Lapsed && is_over(run);
    for run in known.iter().filter(|run| !args.missing || unfinished(run)) {
        let scheduled_at = match &run.run {
            Some(run) => Some(run.scheduled_at),
            None => find(&run.period).map(|period| period.starts_at()),
        };
        if scheduled_at.zip(args.since).is_none_or(|(at, since)| at >= since) {
            rows.push((scheduled_at, view::Row::of(run, scheduled_at)));
        }
    }
    if let Some(schedule) = &schedule {
        let first = match args.since {
            Some(since) => first_since(schedule, since),
            None => known.iter().filter_map(|run| find(&run.period)).min_by_key(Period::starts_at),
        };
        let absent = first.map(|first| absent(schedule, first, now, known, |_| true)).unwrap_or_default();
        let retention = absent.first().filter(|_| known.is_empty()).map(period::retention_default);
        let since = remembered_since(known, retention, period::TOLERANCE_DEFAULT);
        let mut unknown = 0;
        for period in &absent {
            let state = match period {
                due if due.ends_at() > now => "due",
                old if old.starts_at() < since => "forgotten",
                _ => "missing",
            };
            unknown += usize::from(state == "forgotten");
            if !args.missing || state == "missing" {
                rows.push((Some(period.starts_at()), view::Row::absent(job, period, state)));
            }
        }
        if args.missing && unknown > 0 {
            tell(format!("onlyonce: {}", forgotten(unknown, job)));
        }
    }
    rows.sort_by_key(|(scheduled_at, _)| *scheduled_at);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

/// What the job's periods are, as far as that is known.
fn schedule(args: &ListArgs, known: &[Known]) -> Result<Option<Schedule>, Failure> {
    let last = known
        .iter()
        .filter_map(|known| Some((known.entry.record.granted_at, known.run.as_ref()?)))
        .max_by_key(|(granted_at, _)| *granted_at)
        .map(|(_, run)| run);
    let every = match (&args.every, last) {
        (Some(every), _) => Some(every.clone()),
        (None, Some(run)) => run.every.parse().ok(),
        (None, None) => None,
    };
    let zone = match (&args.tz, last) {
        (Some(zone), _) => Some(zone.clone()),
        (None, Some(run)) => TimeZone::get(&run.zone).ok(),
        (None, None) => None,
    };
    match (every, zone) {
        (Some(every), Some(zone)) => Ok(Some(Schedule::new(every, zone))),
        (Some(_), None) => Err(Failure::usage("--tz is needed: no recorded run says the time zone")),
        _ => Ok(None),
    }
}

fn first_since(schedule: &Schedule, since: Timestamp) -> Option<Period> {
    let current = schedule.current(since)?;
    if current.starts_at() < since { schedule.next(&current) } else { Some(current) }
}

async fn show(args: &RunArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let known = find(args, store).await?;
    view::details(&known, args.json, out)?;
    Ok(())
}

async fn release(args: &ReleaseArgs, store: &OpenStore, out: &mut impl Write) -> Result<(), Failure> {
    let known = find(&args.run, store).await?;
    if known.state == State::Running && !args.force {
        return Err(Failure::usage(
            "the run may be going on; wait for its end or for its lease's, or release it with --force",
        ));
    }
    let Entry { operation, record, .. } = &known.entry;
    if !store.store().remove(operation.id(), record.revision).await? {
        return Err(Failure::failed(
            "the run changed in the meantime, so nothing was done; look at it again with `onlyonce runs show`",
        ));
    }
    if args.run.json {
        view::details(&known, true, out)?;
    } else {
        writeln!(out, "released: the next start runs {} again", operation.key())?;
    }
    Ok(())
}

async fn find(args: &RunArgs, store: &OpenStore) -> Result<Known, Failure> {
    let operation = period::operation(&args.namespace, &args.job, &args.period)
        .map_err(|error| Failure::usage(error.to_string()))?;
    let (known, unreadable) = known(store, Filter { id: Some(operation.id()), ..Filter::default() }).await?;
    if !unreadable.is_empty() {
        return Err(Failure::failed(format!("store: {}", unreadable.join("\n  "))));
    }
    let none = || Failure::failed(format!("there is no such run: {}", operation.key()));
    known.into_iter().next().ok_or_else(none)
}

/// The runs that match, and in a line each the records that cannot be read.
pub(crate) async fn known(store: &OpenStore, filter: Filter) -> Result<(Vec<Known>, Vec<String>), Failure> {
    let mut pages = Pages::new(store, filter);
    let (mut known, mut unreadable) = (Vec::new(), Vec::new());
    while let Some(page) = pages.next().await? {
        unreadable.extend(page.unreadable);
        known.extend(page.entries.into_iter().filter_map(Known::of));
    }
    Ok((known, unreadable))
}

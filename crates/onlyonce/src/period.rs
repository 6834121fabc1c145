//! Jobs that run once for each period: an hour, a day, a month, or whenever a cron expression is due.
//!
//! A run is claimed under its job and its period, so it does not matter how often a scheduler starts it, on how
//! many hosts, how late, or whether it was started by hand before. The period comes from the *scheduled* instant in
//! a time zone; [`Schedule`] says what happens on the days when a clock is set.
//!
//! ```text
//! once(tx, job, period, work) ─▶ claim JOB:PERIOD ─▶ work, in the same transaction ─▶ record ─▶ Ran::Now
//!                                  │
//!                                  ├ done before: Ran::Before, with who did it and when
//!                                  └ another zone, still running, the store is away: an error, nothing runs
//! ```
//!
//! | the work ended with | the period |
//! |---|---|
//! | a value | done, once the transaction is committed |
//! | an error | as if it had never been claimed: the next start runs the work |
//!
//! [`once`](Periods::once) is the strongest form: work, claim and record are one transaction. For work that is not in the
//! database [`run`](Periods::run) holds a lease and renews it. The command `onlyonce run` does the same for any program, and both
//! know each other's runs.
//!
//! # Example
//!
//! ```no_run
//! use jiff::{Timestamp, tz::TimeZone};
//! use onlyonce::period::{Period, PeriodConfig, Periods, Ran};
//! use onlyonce_sqlite::SqliteTransactions;
//!
//! # async fn example(store: SqliteTransactions, pool: sqlx::SqlitePool) -> Result<(), Box<dyn std::error::Error>> {
//! let periods = Periods::transactional(store, PeriodConfig::default())?;
//! let month = Period::month(&TimeZone::get("Europe/Berlin")?, Timestamp::now());
//! let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;
//! let billed = periods.once(&mut tx, "billing", &month, async |tx, _execution| {
//!     sqlx::query("INSERT INTO invoices SELECT * FROM due").execute(&mut **tx).await
//! });
//! match billed.await {
//!     Ok(Ran::Now(_)) => tx.commit().await?,
//!     Ok(Ran::Before(run)) => println!("{} was billed at {}", month.name(), run.started_at),
//!     Err(error) => return Err(error.into()), // dropped, the transaction is rolled back
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Time zones come from the [`jiff`] crate; its features decide where it looks for them.

mod calendar;
mod cron;
mod run;

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce_core::transact::{self, ClaimedIn, Held};
use onlyonce_core::{
    BodyMode, Claimed, Engine, Fingerprint, Finished, IntoStore, Key, Lapse, Operation, Policy, Refusal,
    StoreError, TransactionError, Transactional, Verdict, fingerprint,
};

use crate::layer::{Config, Execution};
use crate::renewal::Renewal;
use crate::settings::{DURATION_MAX, SettingsError, check_durations, check_retention};

pub use calendar::{Every, Period, Schedule, UnknownPeriod};
pub use cron::{Cron, MalformedCron};
pub use run::{Run, UnreadableRun};

/// The endpoint of every period's key. The caller is the job, and the key is `JOB:PERIOD`.
pub const ENDPOINT: &str = "run";

/// The endpoint of the key that a job holds under, whatever its period, while it runs.
pub const OVERLAP_ENDPOINT: &str = "run overlap";

/// The longest name of a job, in bytes.
pub const JOB_BYTES_MAX: usize = 100;

/// How far ahead of its time a timer may fire, on the local clock, and still mean the period that is about to begin:
/// half of the shortest time between two runs of a cron expression, so that it never reaches further than that.
pub const TOLERANCE_DEFAULT: Duration = Duration::from_secs(30);

const DAY: Duration = Duration::from_secs(86_400);

/// The identity of a job's run for a period.
///
/// # Errors
/// Refuses a malformed job name.
pub fn operation(namespace: &str, job: &str, period: &str) -> Result<Operation, MalformedJob> {
    check_job(job)?;
    let key = Key::new(format!("{job}:{period}")).map_err(|_| MalformedJob(job.to_owned()))?;
    Ok(Operation::new(namespace, ENDPOINT, job, key))
}

/// The identity of what runs of one job share, so that those of two periods do not overlap.
///
/// # Errors
/// Refuses a malformed job name.
pub fn overlap(namespace: &str, job: &str) -> Result<Operation, MalformedJob> {
    check_job(job)?;
    let key = Key::new(job).map_err(|_| MalformedJob(job.to_owned()))?;
    Ok(Operation::new(namespace, OVERLAP_ENDPOINT, job, key))
}

/// What starts of a period must agree on: the kind of period and its time zone. A cron expression itself is not part of
/// it: edited so that it still names a minute, it means the same run.
#[must_use]
pub fn fingerprint_of(period: &Period) -> Fingerprint {
    let target = format!("{} {}", period.every().kind(), period.zone());
    fingerprint::fingerprint(&target, &http::HeaderMap::new(), &[], b"", BodyMode::Raw)
}

/// How long a run of this period is remembered unless it is set: thirty days or three periods, whichever is longer.
#[must_use]
pub fn retention_default(period: &Period) -> Duration {
    (3 * period.longest()).clamp(30 * DAY, DURATION_MAX)
}

/// Refuses to forget a run while its period is still on: the next start would repeat it. `tolerance` is how long before
/// its period a run may come.
///
/// # Errors
/// With what is allowed.
pub fn check_period_retention(
    retention: Duration,
    period: &Period,
    tolerance: Duration,
) -> Result<(), SettingsError> {
    let least = period.longest() + tolerance;
    if retention >= least {
        return Ok(());
    }
    let hours = least.as_secs().div_ceil(3_600);
    let every = period.every().to_string();
    let reason = format!(
        "{retention:?} is shorter than a period of {every:?} can be: a run would be forgotten while another start can \
         repeat it; at least {hours}h"
    );
    Err(SettingsError::new("retention", reason))
}

fn check_job(job: &str) -> Result<(), MalformedJob> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
    let fits = (1..=JOB_BYTES_MAX).contains(&job.len()) && job.bytes().all(allowed);
    if fits { Ok(()) } else { Err(MalformedJob(job.to_owned())) }
}

/// A text that cannot be a job's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedJob(String);

impl fmt::Display for MalformedJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a job's name; 1 to {JOB_BYTES_MAX} letters, digits and . _ - / are allowed",
            self.0
        )
    }
}

impl std::error::Error for MalformedJob {}

/// Everything about guarded periods but their store. The durations are on the store's clock.
#[derive(Clone, Debug)]
pub struct PeriodConfig {
    /// One application. Two applications on one store set their own.
    pub namespace: String,
    /// How long a run is held without a renewal: so long others wait after a process has died. Only for
    /// [`Periods::run`].
    pub lease: Duration,
    /// How long a run is remembered; [`retention_default`] unless it is set. Never less than its period.
    pub retention: Option<Duration>,
    /// What becomes of a run whose holder went silent.
    pub on_lapse: Lapse,
    /// Who runs it, as people will see it: a host or an instance.
    pub host: Option<String>,
}

impl Default for PeriodConfig {
    fn default() -> Self {
        Self {
            namespace: Config::default().namespace,
            lease: Duration::from_secs(90),
            retention: None,
            on_lapse: Lapse::default(),
            host: None,
        }
    }
}

/// Runs jobs once for each period, in a transaction of `T` or, without one, under a lease.
#[derive(Clone)]
pub struct Periods<T = ()> {
    store: T,
    engine: Engine,
    config: PeriodConfig,
}

/// What a start told.
#[derive(Debug)]
pub enum Ran<R> {
    /// The work was done now.
    Now(R),
    /// It was done before, and nothing was done now.
    Before(Run),
}

impl Periods {
    /// Runs work that is not in the store's database.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn new(store: impl IntoStore, config: PeriodConfig) -> Result<Self, SettingsError> {
        config.check()?;
        Ok(Self { store: (), engine: Engine::new(store.into_store()), config })
    }
}

impl<T: Transactional> Periods<T> {
    /// Runs work in the store's own database.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn transactional(store: T, config: PeriodConfig) -> Result<Self, SettingsError> {
        config.check()?;
        Ok(Self { engine: Engine::new(store.store()), store, config })
    }

    /// Claims the period inside `transaction`, before the work.
    ///
    /// # Errors
    /// See [`PeriodError`]: nothing may be done for the period.
    pub async fn claim(
        &self,
        transaction: &mut T::Transaction,
        job: &str,
        period: &Period,
    ) -> Result<Claim<'_, T>, PeriodError> {
        let (operation, policy) = self.claimable(job, period)?;
        let fingerprint = fingerprint_of(period);
        match transact::claim(&self.store, transaction, &operation, fingerprint, &policy).await? {
            ClaimedIn::Execute(held) => {
                let execution = Execution { operation: Arc::new(operation), attempt: held.attempt() };
                let (store, host) = (&self.store, self.config.host.clone());
                let period = period.clone();
                Ok(Claim::Run(Turn { store, held, execution, period, host, started: Started::now() }))
            }
            ClaimedIn::Replay(outcome) => Ok(Claim::Before(Run::read(&outcome)?)),
            ClaimedIn::Refused(refusal) => Err(refusal.into()),
        }
    }

    /// Has `work` run inside `transaction` unless the period was run before. The run is recorded beside what it wrote, and
    /// counts once the transaction is committed, which is yours to do.
    ///
    /// In a spawned task use [`claim`](Self::claim): the compiler cannot tell yet that what an async closure returns may go to
    /// another thread.
    ///
    /// # Errors
    /// Roll back. See [`PeriodError`]; [`PeriodError::Work`] has what `work` said.
    pub async fn once<R, E, W>(
        &self,
        transaction: &mut T::Transaction,
        job: &str,
        period: &Period,
        work: W,
    ) -> Result<Ran<R>, PeriodError<E>>
    where
        W: AsyncFnOnce(&mut T::Transaction, &Execution) -> Result<R, E>,
    {
        let turn = match self.claim(transaction, job, period).await.map_err(PeriodError::with_work)? {
            Claim::Run(turn) => turn,
            Claim::Before(run) => return Ok(Ran::Before(run)),
        };
        let result = work(&mut *transaction, turn.execution()).await.map_err(PeriodError::Work)?;
        turn.done(transaction).await.map_err(PeriodError::with_work)?;
        Ok(Ran::Now(result))
    }
}

/// What a claim told.
pub enum Claim<'a, T> {
    /// Do the work in this transaction, then [`Turn::done`], then commit.
    Run(Turn<'a, T>),
    /// It was done before. Nothing was written.
    Before(Run),
}

/// A period that is this transaction's to run.
pub struct Turn<'a, T> {
    store: &'a T,
    held: Held,
    execution: Execution,
    period: Period,
    host: Option<String>,
    started: Started,
}

impl<T: Transactional> Turn<'_, T> {
    /// Which run it is, for logs and for [downstream keys](Execution::downstream).
    #[must_use]
    pub fn execution(&self) -> &Execution {
        &self.execution
    }

    /// Records the run beside the work. It counts once the transaction is committed.
    ///
    /// # Errors
    /// When it is not recorded: roll back.
    pub async fn done(self, transaction: &mut T::Transaction) -> Result<(), PeriodError> {
        let Self { store, held, period, host, started, .. } = self;
        let run = started.ended(&period, host);
        Ok(held.complete(store, transaction, run.outcome(held.attempt())).await?)
    }
}

impl<T> Periods<T> {
    /// Has `work` run unless the period was run before, and holds a lease on it meanwhile. Work that is dropped halfway
    /// leaves the period to its lease.
    ///
    /// A holder that stalls for longer than its lease and then wakes can still act on the outside world, although its
    /// record is refused. Give such an act [a key of its own](Execution::downstream).
    ///
    /// # Errors
    /// See [`PeriodError`].
    pub async fn run<R, E, W>(&self, job: &str, period: &Period, work: W) -> Result<Ran<R>, PeriodError<E>>
    where
        W: AsyncFnOnce(&Execution) -> Result<R, E>,
    {
        let (operation, policy) = self.claimable(job, period)?;
        let grant = match self.engine.claim(&operation, fingerprint_of(period), &policy).await? {
            Claimed::Execute(grant) => grant,
            Claimed::Replay(outcome) => return Ok(Ran::Before(Run::read(&outcome)?)),
            Claimed::Refused(refusal) => return Err(refusal.into()),
        };
        let (id, attempt) = (operation.id(), grant.attempt());
        let execution = Execution { operation: Arc::new(operation), attempt };
        let mut renewal = Renewal::new(id, grant, policy.lease);
        let started = Started::now();
        let result = renewal.during(work(&execution)).await;
        let verdict = match &result {
            Ok(_) => Verdict::Keep(started.ended(period, self.config.host.clone()).outcome(attempt)),
            Err(_) => Verdict::Release,
        };
        let finished = renewal.finish(verdict).await;
        let result = result.map_err(PeriodError::Work)?;
        match finished {
            Some(Finished::Written) => Ok(Ran::Now(result)),
            Some(Finished::LeaseLost) => Err(PeriodError::LeaseLost),
            None => Err(PeriodError::NotRecorded),
        }
    }

    fn claimable<E>(&self, job: &str, period: &Period) -> Result<(Operation, Policy), PeriodError<E>> {
        let PeriodConfig { namespace, lease, retention, on_lapse, .. } = &self.config;
        let retention = retention.unwrap_or_else(|| retention_default(period));
        check_period_retention(retention, period, TOLERANCE_DEFAULT)?;
        let policy = Policy { lease: *lease, retention, on_lapse: *on_lapse };
        Ok((operation(namespace, job, period.name())?, policy))
    }
}

impl PeriodConfig {
    fn check(&self) -> Result<(), SettingsError> {
        if self.namespace.is_empty() {
            return Err(SettingsError::new("namespace", "must not be empty"));
        }
        check_durations(&[("lease", self.lease)])?;
        match self.retention {
            Some(retention) => {
                check_durations(&[("retention", retention)])?;
                check_retention(retention, self.lease)
            }
            None => Ok(()),
        }
    }
}

/// When work began, on the local clocks.
struct Started(jiff::Timestamp, Instant);

impl Started {
    fn now() -> Self {
        Self(jiff::Timestamp::now(), Instant::now())
    }

    fn ended(self, period: &Period, host: Option<String>) -> Run {
        Run { host, pid: Some(std::process::id()), ..Run::of(period, self.0, self.1.elapsed()) }
    }
}

/// Why a period was not run, or its run not recorded.
#[derive(Debug)]
pub enum PeriodError<E = Infallible> {
    /// The job's name cannot be one. Nothing ran.
    Job(MalformedJob),
    /// A setting cannot be. Nothing ran.
    Settings(SettingsError),
    /// The period was claimed under another time zone or kind of period. Nothing ran.
    OtherSchedule,
    /// It is being run. Nothing ran now.
    InFlight {
        /// How long its lease lasts, on the store's clock, in the worst case.
        lease_left: Duration,
    },
    /// Whoever ran it went silent, and [`Lapse::Hold`] leaves it to a person. Nothing ran now.
    Unknown,
    /// It was run; what is recorded about that cannot be read.
    Unreadable(UnreadableRun),
    /// The store did not say who holds the period, or the record was not written: the transaction must be rolled back.
    Transaction(TransactionError),
    /// The store did not say who holds the period. Nothing ran.
    Store(StoreError),
    /// The work failed with this error; it counts as not done.
    Work(E),
    /// The work was done, but another holder had taken over in the meantime.
    LeaseLost,
    /// The work was done, but that could not be recorded before the lease ended: it may be run again.
    NotRecorded,
}

impl<E: fmt::Display> fmt::Display for PeriodError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job(error) => error.fmt(f),
            Self::Settings(error) => error.fmt(f),
            Self::OtherSchedule => {
                f.write_str("the period was claimed under another time zone or kind of period; nothing ran")
            }
            Self::InFlight { lease_left } => {
                write!(f, "the period is being run; its lease ends in {} s", lease_left.as_secs().max(1))
            }
            Self::Unknown => f.write_str("whoever ran the period went silent; it is left to a person"),
            Self::Unreadable(error) => error.fmt(f),
            Self::Transaction(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
            Self::Work(error) => error.fmt(f),
            Self::LeaseLost => f.write_str("the work was done, but another had taken the period over"),
            Self::NotRecorded => f.write_str("the work was done, but this could not be recorded"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for PeriodError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Transaction(error) => Some(error),
            Self::Store(error) => Some(error),
            Self::Work(error) => Some(error),
            _ => None,
        }
    }
}

impl PeriodError {
    /// The same error where there is work that can fail as well.
    fn with_work<E>(self) -> PeriodError<E> {
        match self {
            Self::Job(error) => PeriodError::Job(error),
            Self::Settings(error) => PeriodError::Settings(error),
            Self::OtherSchedule => PeriodError::OtherSchedule,
            Self::InFlight { lease_left } => PeriodError::InFlight { lease_left },
            Self::Unknown => PeriodError::Unknown,
            Self::Unreadable(error) => PeriodError::Unreadable(error),
            Self::Transaction(error) => PeriodError::Transaction(error),
            Self::Store(error) => PeriodError::Store(error),
            Self::LeaseLost => PeriodError::LeaseLost,
            Self::NotRecorded => PeriodError::NotRecorded,
        }
    }
}

impl<E> From<MalformedJob> for PeriodError<E> {
    fn from(error: MalformedJob) -> Self {
        Self::Job(error)
    }
}

impl<E> From<SettingsError> for PeriodError<E> {
    fn from(error: SettingsError) -> Self {
        Self::Settings(error)
    }
}

impl<E> From<Refusal> for PeriodError<E> {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Mismatch { .. } => Self::OtherSchedule,
            Refusal::InFlight { lease_left, .. } => Self::InFlight { lease_left },
            Refusal::Unknown => Self::Unknown,
        }
    }
}

impl<E> From<UnreadableRun> for PeriodError<E> {
    fn from(error: UnreadableRun) -> Self {
        Self::Unreadable(error)
    }
}

impl<E> From<TransactionError> for PeriodError<E> {
    fn from(error: TransactionError) -> Self {
        Self::Transaction(error)
    }
}

impl<E> From<StoreError> for PeriodError<E> {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

//! One period: claimed, run, recorded.
//!
//! ```text
//! claim the period ─▶ take the job's turn ─▶ run the command, leases renewed ─▶ record, or release
//!    │                   │                       │
//!    │                   └ another period of     ├ the lease is lost, or ends: the command is stopped
//!    │                     the job runs          └ the guard dies: the keeper stops the command
//!    ├ done before
//!    ├ running
//!    └ left to a person
//! ```
//!
//! | the command ended with | the period |
//! |---|---|
//! | status 0 | done |
//! | another status | its lease is over, so that the next start runs it, as the next attempt; done with `--keep-failure` |
//! | a stop, because the lease ended | left to its lease: nobody knows how far it came |

use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use jiff::Timestamp;
use onlyonce::period::{self, Period, Run, UnreadableRun};
use onlyonce_core::backoff::Backoff;
use onlyonce_core::record::State;
use onlyonce_core::{
    Claimed, Engine, Fingerprint, Finished, Grant, Lapse, Operation, Policy, Refusal, Store, StoreError,
    Verdict,
};
use rustix::process::Signal;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::child::Child;
use super::keeper::{Because, Report};
use super::signals::{Signals, ends};
use super::{OnLapse, Overlap, RunArgs};
use crate::cli::Failure;

/// The exit status of what onlyonce itself could not do, so that it can be told from the command's own; `env`, `timeout` and
/// `docker run` have the same.
pub(crate) const OWN_FAILURE: u8 = 125;

const WAIT_FIRST: Duration = Duration::from_millis(100);
const WAIT_CEILING: Duration = Duration::from_secs(1);

/// A lease is renewed when this part of it is over.
const RENEW_AFTER: u32 = 3;

/// What became of one period.
#[derive(Debug, Serialize)]
pub(super) struct Told {
    job: String,
    period: String,
    pub(super) result: Result,
    /// This process's own, if the period is the last.
    pub(super) exit_status: u8,
    attempt: Option<u32>,
    /// Of this run, or of the one before.
    run: Option<Run>,
    /// On the store's clock.
    completed_at: Option<String>,
    pub(super) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Result {
    /// The command ran, and its end is recorded.
    Done,
    /// The command ran and failed; the next start runs it again.
    Failed,
    /// The command was run for this period before.
    DoneBefore,
    /// It is being run for this period.
    Running,
    /// It is being run for another period of the job.
    Overlaps,
    /// It was run for this period by somebody who went silent, and a person is to decide.
    Unknown,
    /// It was stopped because its lease was lost, or ended, or its end could not be recorded.
    LeaseLost,
    /// This process was told to end before the command was started.
    Interrupted,
}

/// Runs a job's periods.
pub(super) struct Guard<'a> {
    pub(super) args: &'a RunArgs,
    pub(super) store: Arc<dyn Store>,
    pub(super) engine: Engine,
}

/// What is held while the command runs.
struct Held {
    run: Grant,
    turn: Option<Grant>,
}

impl Guard<'_> {
    pub(super) async fn run(
        &self,
        period: &Period,
        signals: &mut Signals,
    ) -> std::result::Result<Told, Failure> {
        let (args, operation) = (self.args, self.operation(period)?);
        let policy = self.policy(period);
        let run = match self.claim(&operation, period::fingerprint_of(period), policy).await? {
            Claimed::Execute(grant) => grant,
            Claimed::Replay(_) => return self.done_before(&operation, period).await,
            Claimed::Refused(refusal) => return self.refused(refusal, period),
        };
        let mut held = Held { run, turn: None };
        if args.overlap != Overlap::Allow {
            match self.turn(&mut held, signals).await? {
                Turn::Taken => {}
                Turn::Busy(running_for) => {
                    self.give_back(held).await?;
                    return Ok(self.overlaps(period, running_for));
                }
                Turn::Interrupted(signal) => return self.interrupted(held, period, signal).await,
            }
        }
        match signals.asked_to_end() {
            Some(signal) => self.interrupted(held, period, signal).await,
            None => self.execute(held, &operation, period, signals).await,
        }
    }

    fn operation(&self, period: &Period) -> std::result::Result<Operation, Failure> {
        period::operation(&self.args.namespace, &self.args.job, period.name())
            .map_err(|error| Failure::usage(format!("--job: {error}")))
    }

    fn policy(&self, period: &Period) -> Policy {
        let RunArgs { lease, on_lapse, .. } = self.args;
        Policy { lease: *lease, retention: self.args.retention(period), on_lapse: (*on_lapse).into() }
    }

    /// For a command that failed: the next start runs it again, as the next attempt. Under [`Lapse::Hold`] what stays in the
    /// store without an end is left to a person, and this end is known.
    fn failed(&self) -> Verdict {
        match self.args.on_lapse {
            OnLapse::Rerun => Verdict::Again,
            OnLapse::Hold => Verdict::Release,
        }
    }

    /// For a command that was not started. A period that was begun before must not look as if it had never been.
    async fn give_back(&self, held: Held) -> std::result::Result<(), Failure> {
        let verdict = if held.run.attempt() > 1 { self.failed() } else { Verdict::Release };
        held.finish(verdict).await.map_err(away)?;
        Ok(())
    }

    /// On a task of its own: a claim that is dropped halfway would hold the key for nobody.
    async fn claim(
        &self,
        operation: &Operation,
        fingerprint: Fingerprint,
        policy: Policy,
    ) -> std::result::Result<Claimed, Failure> {
        let (engine, operation) = (self.engine.clone(), operation.clone());
        let claiming = tokio::spawn(async move { engine.claim(&operation, fingerprint, &policy).await });
        match claiming.await {
            Ok(claimed) => claimed.map_err(away),
            Err(error) => Err(own_failure(error.to_string())),
        }
    }

    /// Takes the job's turn, which one period at a time has.
    async fn turn(&self, held: &mut Held, signals: &mut Signals) -> std::result::Result<Turn, Failure> {
        let args = self.args;
        let operation = period::overlap(&args.namespace, &args.job)
            .map_err(|error| Failure::usage(format!("--job: {error}")))?;
        // It means nothing once its lease is over.
        let policy = Policy { lease: args.lease, retention: args.lease, on_lapse: Lapse::Rerun };
        let gives_up =
            Instant::now() + if args.overlap == Overlap::Wait { args.wait } else { Duration::ZERO };
        let mut waits = Backoff::new(WAIT_FIRST, WAIT_CEILING);
        loop {
            let running_for = match self.claim(&operation, EVERY_PERIOD, policy).await? {
                Claimed::Execute(grant) => {
                    held.turn = Some(grant);
                    return Ok(Turn::Taken);
                }
                Claimed::Refused(Refusal::InFlight { running_for, .. }) => running_for,
                Claimed::Refused(_) | Claimed::Replay(_) => Duration::ZERO,
            };
            let next = Instant::now() + waits.next().unwrap_or(WAIT_CEILING);
            if next > gives_up {
                return Ok(Turn::Busy(running_for));
            }
            tokio::select! {
                () = sleep_until(next) => {}
                signal = signals.next() => if ends(signal) { return Ok(Turn::Interrupted(signal)) },
            }
            if held.due(args.lease) <= Instant::now() && !held.run.renew().await.map_err(away)? {
                return Err(own_failure("the period was taken over while it waited for its turn"));
            }
        }
    }

    async fn execute(
        &self,
        held: Held,
        operation: &Operation,
        period: &Period,
        signals: &mut Signals,
    ) -> std::result::Result<Told, Failure> {
        let args = self.args;
        let attempt = held.run.attempt();
        let variables = [
            ("ONLYONCE_KEY", operation.key().as_str().to_owned()),
            ("ONLYONCE_PERIOD", period.name().to_owned()),
            ("ONLYONCE_ATTEMPT", attempt.to_string()),
        ];
        let (started_at, started) = (Timestamp::now(), Clock::now());
        let mut child = match Child::start(&args.command, &variables, args.grace(), held.lease_ends()) {
            Ok(child) => child,
            Err(error) => {
                self.give_back(held).await?;
                return Err(own_failure(format!("no process can be started: {error}")));
            }
        };
        let mut heart = Heart::start(held, args.lease);
        let report = loop {
            tokio::select! {
                report = child.ended() => break report,
                Some(beat) = heart.beats.recv() => match beat {
                    Beat::Until(ends) => child.lease_until(ends).await,
                    Beat::Lost => child.stop().await,
                },
                signal = signals.next() => child.signal(signal).await,
            }
        };
        child.reap().await;
        let held = heart.stopped().await?;
        let mut run = Run {
            host: Some(rustix::system::uname().nodename().to_string_lossy().into_owned()),
            user: user(),
            pid: Some(std::process::id()),
            ..Run::of(period, started_at, started.elapsed())
        };
        match report {
            Some(Report::Ended { status, because: Because::Itself }) => {
                run.exit_status = status;
                self.record(held, period, attempt, run).await
            }
            Some(Report::Failed { status, reason }) => {
                self.give_back(held).await?;
                let program = args.command[0].to_string_lossy();
                let message = format!("{program}: {reason}; {} is released", self.name(period));
                Ok(self.told(period, Result::Failed, status, message))
            }
            _ => {
                // The turn is nobody's now; the period is left to its lease.
                held.finish(Verdict::Leave).await.map_err(away)?;
                let message = format!(
                    "the lease of {} was lost or ended, so the command was stopped; its end is not recorded",
                    self.name(period)
                );
                Ok(self.told(period, Result::LeaseLost, OWN_FAILURE, message))
            }
        }
    }

    async fn record(
        &self,
        held: Held,
        period: &Period,
        attempt: u32,
        run: Run,
    ) -> std::result::Result<Told, Failure> {
        let (name, status) = (self.name(period), run.exit_status);
        let keeps = status == 0 || self.args.keep_failure;
        let verdict = if keeps { Verdict::Keep(run.outcome(attempt)) } else { self.failed() };
        let finished = held.finish(verdict).await;
        let lost = match finished {
            Ok(Finished::Written) => None,
            Ok(Finished::LeaseLost) => Some("the lease was lost to another run of it".to_owned()),
            Err(error) => Some(format!("the store did not take it: {error}")),
        };
        let (result, exit_status, message) = match lost {
            None if keeps => {
                let took = seconds(Duration::from_millis(run.duration_ms));
                (Result::Done, status, format!("{name} is done, in {took}, with exit status {status}"))
            }
            None => {
                let message =
                    format!("{name} failed with exit status {status}; the next start runs it again");
                (Result::Failed, status, message)
            }
            Some(why) => {
                let message =
                    format!("{name} ended with exit status {status}, but this is not recorded: {why}");
                (Result::LeaseLost, if status == 0 { OWN_FAILURE } else { status }, message)
            }
        };
        let told = self.told(period, result, exit_status, message);
        Ok(Told { attempt: Some(attempt), run: Some(run), ..told })
    }

    async fn done_before(
        &self,
        operation: &Operation,
        period: &Period,
    ) -> std::result::Result<Told, Failure> {
        let name = self.name(period);
        let seen = self.store.read(operation.id()).await.map_err(away)?;
        let Some(State::Done { outcome, completed_at }) = seen.map(|seen| seen.record.state) else {
            return Err(own_failure(format!(
                "{name} was done, and forgotten at this very moment; start it again"
            )));
        };
        let at = super::instant(completed_at);
        let (run, status, how) = match Run::read(&outcome) {
            Ok(run) => {
                let status = run.exit_status;
                let how = format!(" {}, with exit status {status}", super::by(&run));
                (Some(run), status, how)
            }
            // A person completed it.
            Err(UnreadableRun::NoRun) => (None, 0, String::new()),
            Err(UnreadableRun::Outcome(error)) => {
                return Err(own_failure(format!("{name} was done at {at}, but how cannot be read: {error}")));
            }
        };
        let message = format!("{name} was done at {at}{how}; nothing to do");
        let told = self.told(period, Result::DoneBefore, status, message);
        Ok(Told { run, completed_at: Some(at), ..told })
    }

    fn refused(&self, refusal: Refusal, period: &Period) -> std::result::Result<Told, Failure> {
        let (name, job) = (self.name(period), &self.args.job);
        match refusal {
            Refusal::Mismatch { .. } => Err(Failure::usage(format!(
                "{name} was run with another --tz, or another kind of --every; it is not run again. `onlyonce runs show {job} \
                 {}` says with which; `onlyonce runs release` forgets that run",
                period.name()
            ))),
            Refusal::InFlight { running_for, lease_left } => {
                let message = format!(
                    "{name} is running, for {} now; its lease ends in {} unless it is renewed",
                    seconds(running_for),
                    seconds(lease_left)
                );
                Ok(self.told(period, Result::Running, self.args.busy_exit, message))
            }
            Refusal::Unknown => {
                let message = format!(
                    "whoever ran {name} went silent, and nobody knows how far it came; `onlyonce runs release {job} {}` has it \
                     run again",
                    period.name()
                );
                Ok(self.told(period, Result::Unknown, OWN_FAILURE, message))
            }
        }
    }

    fn overlaps(&self, period: &Period, running_for: Duration) -> Told {
        let message = format!(
            "another period of {} is running, for {} now; {} is not run",
            self.args.job,
            seconds(running_for),
            period.name()
        );
        self.told(period, Result::Overlaps, self.args.busy_exit, message)
    }

    async fn interrupted(
        &self,
        held: Held,
        period: &Period,
        signal: Signal,
    ) -> std::result::Result<Told, Failure> {
        self.give_back(held).await?;
        let status = u8::try_from(128 + signal.as_raw()).unwrap_or(OWN_FAILURE);
        let message = format!("told to end before {} was started", self.name(period));
        Ok(self.told(period, Result::Interrupted, status, message))
    }

    fn name(&self, period: &Period) -> String {
        format!("{}:{}", self.args.job, period.name())
    }

    fn told(&self, period: &Period, result: Result, exit_status: u8, message: String) -> Told {
        Told {
            job: self.args.job.clone(),
            period: period.name().to_owned(),
            result,
            exit_status,
            attempt: None,
            run: None,
            completed_at: None,
            message,
        }
    }
}

enum Turn {
    Taken,
    Busy(Duration),
    Interrupted(Signal),
}

/// Turns of a job mean the same whatever the period.
const EVERY_PERIOD: Fingerprint = Fingerprint { target: [0; 32], body: [0; 32] };

impl Held {
    fn lease_ends(&self) -> Instant {
        let turn = self.turn.as_ref().map(Grant::lease_ends);
        turn.map_or(self.run.lease_ends(), |turn| turn.min(self.run.lease_ends()))
    }

    /// When it is to be renewed.
    fn due(&self, lease: Duration) -> Instant {
        let left_over = lease - lease / RENEW_AFTER;
        self.lease_ends().checked_sub(left_over).unwrap_or_else(Instant::now)
    }

    /// `false` if something is another's.
    async fn renew(&mut self) -> std::result::Result<bool, StoreError> {
        if !self.run.renew().await? {
            return Ok(false);
        }
        match &mut self.turn {
            Some(turn) => turn.renew().await,
            None => Ok(true),
        }
    }

    /// Ends the run as `verdict` says, and gives up the turn.
    async fn finish(self, verdict: Verdict) -> std::result::Result<Finished, StoreError> {
        let finished = self.run.finish(verdict).await;
        if let Some(turn) = self.turn {
            // Its lease ends by itself.
            let _ = turn.finish(Verdict::Release).await;
        }
        finished
    }
}

/// Renews what is held until it is told to stop.
struct Heart {
    beats: mpsc::UnboundedReceiver<Beat>,
    stop: CancellationToken,
    task: JoinHandle<Held>,
}

enum Beat {
    Until(Instant),
    Lost,
}

impl Heart {
    fn start(held: Held, lease: Duration) -> Self {
        let (sender, beats) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let task = tokio::spawn(beat(held, lease, sender, stop.clone()));
        Self { beats, stop, task }
    }

    async fn stopped(self) -> std::result::Result<Held, Failure> {
        self.stop.cancel();
        self.task.await.map_err(|error| own_failure(error.to_string()))
    }
}

async fn beat(
    mut held: Held,
    lease: Duration,
    beats: mpsc::UnboundedSender<Beat>,
    stop: CancellationToken,
) -> Held {
    let mut due = held.due(lease);
    loop {
        let renewed = tokio::select! {
            biased;
            // A renewal that is dropped halfway is settled by whatever ends the grant.
            () = stop.cancelled() => return held,
            renewed = async { sleep_until(due).await; held.renew().await } => renewed,
        };
        due = match renewed {
            Ok(true) => {
                let _ = beats.send(Beat::Until(held.lease_ends()));
                held.due(lease)
            }
            Ok(false) => {
                let _ = beats.send(Beat::Lost);
                stop.cancelled().await;
                return held;
            }
            Err(error) => {
                // The keeper stops the command in time if this goes on.
                tracing::warn!(%error, "the lease could not be renewed");
                Instant::now() + (lease / 12).min(WAIT_CEILING)
            }
        };
    }
}

fn user() -> Option<String> {
    let name =
        std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).ok().filter(|name| !name.is_empty());
    name.or_else(|| Some(format!("uid {}", rustix::process::getuid().as_raw())))
}

pub(super) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

fn away(error: StoreError) -> Failure {
    Failure { code: OWN_FAILURE, ..error.into() }
}

pub(super) fn own_failure(message: impl Into<String>) -> Failure {
    Failure { code: OWN_FAILURE, message: Some(message.into()) }
}

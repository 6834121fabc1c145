//! Walks every interleaving of three workers on one key and checks, at every step, what must always
//! hold.
//!
//! A worker does what [`crate::engine`] does, one store call at a time: it inserts, decides on what it
//! found, writes on top of what it saw, runs, renews, and completes or releases; it settles a lost
//! answer by reading. Between any two calls the others may act, time may pass and a sweep may run. A
//! call whose answer is lost was applied, or is applied at any later time, or never.
//!
//! A crash needs no step of its own: a worker that never acts again has crashed, and the worlds in
//! which one does not are part of the walk. Neither does time need a bound. The clock always says
//! zero; when time passes, every stored point moves into the past, and beyond "long ago" it stays put.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::time::Duration;

use bytes::Bytes;

use crate::machine::{self, Claim, Finish, Lapse, Policy, Refusal, Verdict};
use crate::record::{Fingerprint, NewState, Outcome, Record, Revision, Seen, State, Timestamp, Write};

const WORKERS: usize = 3;
const NOW: Timestamp = Timestamp(0);
const LONG_AGO: Timestamp = Timestamp(-1);

/// What is under test: the machine, the register that a store is, and the engine's three habits.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) grant: fn(Fingerprint, Revision, &Policy) -> Write,
    pub(super) claim: fn(&Seen, Fingerprint, Revision, &Policy) -> Claim,
    pub(super) renew: fn(&Record, Revision, &Policy) -> Write,
    pub(super) finish: fn(&Record, Verdict, Revision, &Policy) -> Finish,
    /// Whether an insert goes ahead although there is this record.
    pub(super) inserts_over: fn(&Record) -> bool,
    /// Whether a replace that expects this revision applies to this record.
    pub(super) replaces: fn(&Record, Revision) -> bool,
    /// Whether a remove that expects this revision applies to this record.
    pub(super) removes: fn(&Record, Revision) -> bool,
    /// Whether a sweep takes this record at this time.
    pub(super) sweeps: fn(&Record, Timestamp) -> bool,
    /// Whether a claim whose answer was lost is settled by reading, or taken for granted.
    pub(super) settles: bool,
    /// Whether a claim that loses to nothing claims again, or runs.
    pub(super) claims_again: bool,
    /// Whether a renewal whose answer was lost is recognised later.
    pub(super) adopts: bool,
}

impl Rules {
    pub(super) const REAL: Self = Self {
        grant: machine::grant,
        claim: machine::claim,
        renew: machine::renew,
        finish: machine::finish,
        inserts_over: |_| false,
        replaces: |record, expected| record.revision == expected,
        removes: |record, expected| record.revision == expected,
        sweeps: |record, now| record.expires_at <= now,
        settles: true,
        claims_again: true,
        adopts: true,
    };
}

/// What one walk includes.
#[derive(Clone, Copy)]
pub(super) struct Config {
    pub(super) on_lapse: Lapse,
    /// Which request each worker makes.
    pub(super) requests: [u8; WORKERS],
    /// How many answers may get lost.
    pub(super) lost_max: u8,
    /// How many renewals are tried.
    pub(super) renewals_max: u8,
}

impl Config {
    /// Long enough to tell the boundary from the times before and after it; the walk needs no more.
    fn policy(&self) -> Policy {
        let tick = Duration::from_millis(1);
        Policy { lease: tick, retention: tick, on_lapse: self.on_lapse }
    }

    fn fingerprint(&self, worker: usize) -> Fingerprint {
        Fingerprint { target: [7; 32], body: [self.requests[worker]; 32] }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    stored: Option<Record>,
    workers: [Worker; WORKERS],
    /// Calls that their worker no longer waits for and that the store may still apply.
    late: Vec<(usize, Call)>,
    lost_left: u8,
    renewals_left: u8,
    truth: Truth,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Worker {
    /// About to insert.
    Idle,
    /// Decided on what it saw, and has not written yet.
    Decided(Call),
    /// The answer to its grant was lost; about to read.
    Unsure(Revision),
    /// At work.
    Holding(Held),
    /// The work is over, and the write that says so is not known to be in the store.
    Ending {
        held: Held,
        finish: Finish,
        reading: bool,
    },
    Stopped,
}

/// What an engine's grant keeps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Held {
    record: Record,
    in_doubt: Vec<Revision>,
}

impl Held {
    /// Forgets when the lease ends, which makes for far fewer worlds. The machine does not look at it
    /// in a held record; a test in [`super::boundaries`] says so.
    fn new(mut record: Record) -> Self {
        record.state = State::Running { lease_until: LONG_AGO };
        record.expires_at = LONG_AGO;
        Self { record, in_doubt: Vec::new() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Call {
    /// An insert or, on top of a record, a replace. `free`: the key was absent or expired when that
    /// was decided.
    Grant {
        over: Option<Revision>,
        free: bool,
        write: Write,
    },
    Renew(Revision, Write),
    Complete(Revision, Write),
    Release(Revision),
}

/// What happened since the key was last free, kept apart from what the record says about it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Truth {
    owner: Option<usize>,
    done: Option<Outcome>,
    fingerprint: Option<Fingerprint>,
    grants: u32,
    runs: u32,
    created_at: Option<Timestamp>,
    granted_at: Option<Timestamp>,
}

type Checked<T = ()> = Result<T, &'static str>;

fn check(holds: bool, otherwise: &'static str) -> Checked {
    if holds { Ok(()) } else { Err(otherwise) }
}

impl World {
    fn start(config: &Config) -> Self {
        Self {
            stored: None,
            workers: std::array::from_fn(|_| Worker::Idle),
            late: Vec::new(),
            lost_left: config.lost_max,
            renewals_left: config.renewals_max,
            truth: Truth::default(),
        }
    }

    /// The store applies a call of worker `by`, or finds that it does not apply.
    fn apply(&mut self, rules: &Rules, config: &Config, by: usize, call: &Call) -> Checked<bool> {
        let applies = match (call, &self.stored) {
            (Call::Grant { over: None, .. }, None) => true,
            (Call::Grant { over: None, .. }, Some(record)) => (rules.inserts_over)(record),
            (Call::Release(expected), Some(record)) => (rules.removes)(record, *expected),
            (
                Call::Grant { over: Some(expected), .. }
                | Call::Renew(expected, _)
                | Call::Complete(expected, _),
                Some(record),
            ) => (rules.replaces)(record, *expected),
            (_, None) => false,
        };
        if !applies {
            return Ok(false);
        }
        let before = self.stored.take();
        match call {
            Call::Grant { free, write, .. } => {
                if *free {
                    check(before.is_none_or(|was| was.expires_at <= NOW), "a grant on a key in use")?;
                    self.truth = Truth { created_at: Some(NOW), ..Truth::default() };
                } else {
                    let lapsed = before.is_some_and(|was| lease_over(&was));
                    let may = lapsed && self.truth.done.is_none() && config.on_lapse == Lapse::Rerun;
                    check(may, "a take-over of a key that is held, done or on hold")?;
                }
                self.truth.grants += 1;
                self.truth.owner = Some(by);
                self.truth.granted_at = Some(NOW);
                self.truth.fingerprint = Some(config.fingerprint(by));
                self.write(write)?;
            }
            Call::Renew(_, write) => {
                check(self.truth.owner == Some(by), "a stale holder renewed the key")?;
                check(self.truth.done.is_none(), "a renewal of a completed key")?;
                self.write(write)?;
            }
            Call::Complete(_, write) => {
                check(self.truth.owner == Some(by), "a stale holder completed the key")?;
                check(self.truth.done.is_none(), "a key completed twice")?;
                match &write.state {
                    NewState::Done(outcome) => self.truth.done = Some(outcome.clone()),
                    NewState::Running { lease } => {
                        check(lease.is_zero(), "an attempt that is over kept its lease")?;
                    }
                }
                self.write(write)?;
            }
            Call::Release(_) => {
                check(self.truth.owner == Some(by), "a stale holder removed the key")?;
                check(self.truth.done.is_none(), "a completed key was removed")?;
                self.truth = Truth::default();
            }
        }
        Ok(true)
    }

    fn write(&mut self, write: &Write) -> Checked {
        let record = write.clone().at(NOW);
        check(record.attempt == self.truth.grants, "the attempts do not count up by one from 1")?;
        check(Some(record.created_at) == self.truth.created_at, "a write changed created_at")?;
        check(Some(record.granted_at) == self.truth.granted_at, "a write changed granted_at")?;
        check(Some(record.fingerprint) == self.truth.fingerprint, "a write changed the fingerprint")?;
        self.stored = Some(record);
        Ok(())
    }

    /// Worker `i` decides on what the store has.
    fn decide(&mut self, rules: &Rules, config: &Config, i: usize) -> Checked {
        let Some(record) = self.stored.clone() else {
            self.workers[i] = Worker::Idle;
            return Ok(());
        };
        let fingerprint = config.fingerprint(i);
        let expired = record.expires_at <= NOW;
        let same = self.truth.fingerprint == Some(fingerprint);
        let lapsed = lease_over(&record);
        let done = self.truth.done.clone();
        let seen = Seen { record, now: NOW };
        let claim = (rules.claim)(&seen, fingerprint, self.fresh(), &config.policy());
        // Exactly one answer is right for every world, so this also proves that no key is stuck.
        let right = match &claim {
            Claim::Take { .. } if expired => true,
            _ if expired => false,
            Claim::Refuse(Refusal::Mismatch { .. }) => !same,
            _ if !same => false,
            Claim::Replay(outcome) => done.as_ref() == Some(outcome),
            _ if done.is_some() => false,
            Claim::Refuse(Refusal::InFlight { .. }) => !lapsed,
            Claim::Refuse(Refusal::Unknown) => lapsed && config.on_lapse == Lapse::Hold,
            Claim::Take { .. } => lapsed && config.on_lapse == Lapse::Rerun,
        };
        check(right, "a claim got the wrong answer")?;
        self.workers[i] = match claim {
            Claim::Take { expected, write } => {
                Worker::Decided(Call::Grant { over: Some(expected), free: expired, write })
            }
            Claim::Replay(_) | Claim::Refuse(_) => Worker::Stopped,
        };
        Ok(())
    }

    /// Worker `i` starts the work under the grant `revision`.
    fn run(&mut self, config: &Config, i: usize, revision: Revision) -> Checked {
        let record = self.stored.clone().filter(|record| record.revision == revision);
        let record = record.ok_or("a worker ran without its grant in the store")?;
        check(self.truth.owner == Some(i), "a worker ran under another's grant")?;
        self.truth.runs += 1;
        let twice = self.truth.runs > 1 && config.on_lapse == Lapse::Hold;
        check(!twice, "the work ran twice under hold")?;
        self.workers[i] = Worker::Holding(Held::new(record));
        Ok(())
    }

    /// Worker `i` heard that its write did not apply: is what the store has a renewal of its own?
    fn adopt(&self, rules: &Rules, held: &Held) -> Option<Held> {
        let found = self.stored.as_ref()?;
        (rules.adopts && held.in_doubt.contains(&found.revision)).then(|| Held::new(found.clone()))
    }

    /// Worker `i` heard that its write did not apply, does not know what the store has, and gives up.
    fn give_up(&mut self, i: usize) -> Checked {
        let mine = self.truth.owner == Some(i) && self.truth.done.is_none();
        check(!mine || self.stored.is_none(), "a holder that still has the key was told that it lost it")?;
        self.workers[i] = Worker::Stopped;
        Ok(())
    }

    /// The lowest revision that nobody knows: one that nobody refers to any more is as good as new.
    fn fresh(&self) -> Revision {
        let mut known: Vec<Revision> = self.stored.iter().map(|record| record.revision).collect();
        let of_call = |call: &Call, known: &mut Vec<Revision>| match call {
            Call::Grant { over, write, .. } => known.extend(over.iter().copied().chain([write.revision])),
            Call::Renew(over, write) | Call::Complete(over, write) => known.extend([*over, write.revision]),
            Call::Release(over) => known.push(*over),
        };
        for (_, call) in &self.late {
            of_call(call, &mut known);
        }
        for worker in &self.workers {
            match worker {
                Worker::Idle | Worker::Stopped => {}
                Worker::Decided(call) => of_call(call, &mut known),
                Worker::Unsure(revision) => known.push(*revision),
                Worker::Holding(held) | Worker::Ending { held, .. } => {
                    known.push(held.record.revision);
                    known.extend(&held.in_doubt);
                }
            }
            if let Worker::Ending { finish: Finish::Complete(write), .. } = worker {
                known.push(write.revision);
            }
        }
        (1..).map(Revision).find(|revision| !known.contains(revision)).expect("numbers are endless")
    }

    /// A millisecond passes.
    fn tick(&mut self) {
        let shift = |at: &mut Timestamp| *at = Timestamp(at.0 - 1).max(LONG_AGO);
        let shift_record = |record: &mut Record| {
            shift(&mut record.created_at);
            shift(&mut record.granted_at);
            shift(&mut record.expires_at);
            match &mut record.state {
                State::Running { lease_until } => shift(lease_until),
                State::Done { completed_at, .. } => shift(completed_at),
            }
        };
        let shift_write = |write: &mut Write| {
            write.created_at.iter_mut().chain(&mut write.granted_at).for_each(shift);
        };
        let shift_call = |call: &mut Call| match call {
            Call::Grant { write, .. } | Call::Renew(_, write) | Call::Complete(_, write) => {
                shift_write(write);
            }
            Call::Release(_) => {}
        };
        self.stored.iter_mut().for_each(shift_record);
        self.late.iter_mut().for_each(|(_, call)| shift_call(call));
        for worker in &mut self.workers {
            match worker {
                Worker::Idle | Worker::Unsure(_) | Worker::Stopped => {}
                Worker::Decided(call) => shift_call(call),
                Worker::Holding(held) | Worker::Ending { held, .. } => shift_record(&mut held.record),
            }
            if let Worker::Ending { finish: Finish::Complete(write), .. } = worker {
                shift_write(write);
            }
        }
        self.truth.created_at.iter_mut().chain(&mut self.truth.granted_at).for_each(shift);
    }

    /// Gives workers with the same request places that do not depend on who they are.
    fn sort_workers(&mut self, config: &Config) {
        let mut order: [usize; WORKERS] = std::array::from_fn(|i| i);
        order.sort_by_cached_key(|&i| {
            let late: Vec<&Call> =
                self.late.iter().filter(|(by, _)| *by == i).map(|(_, call)| call).collect();
            let owner = self.truth.owner == Some(i);
            (config.requests[i], digest(&(&self.workers[i], owner, late)))
        });
        let place = |i: usize| order.iter().position(|&was| was == i).expect("a permutation");
        self.workers = std::array::from_fn(|i| self.workers[order[i]].clone());
        self.truth.owner = self.truth.owner.map(place);
        self.late.iter_mut().for_each(|(by, _)| *by = place(*by));
    }

    fn one_current_holder(&self) -> Checked {
        let Some(stored) = &self.stored else { return Ok(()) };
        let holds =
            |held: &Held| held.record.revision == stored.revision || held.in_doubt.contains(&stored.revision);
        let current = self.workers.iter().filter(
            |worker| matches!(worker, Worker::Holding(held) | Worker::Ending { held, .. } if holds(held)),
        );
        check(current.count() <= 1, "two current holders")
    }
}

fn lease_over(record: &Record) -> bool {
    matches!(record.state, State::Running { lease_until } if lease_until <= NOW)
}

/// Every completion has an outcome of its own, named after the revision it would install.
fn outcome_named(revision: Revision) -> Outcome {
    Outcome { status: revision.0 as u16, head: Bytes::new(), body: Bytes::new() }
}

/// Who did what, and what became of its answer; time and sweeps are nobody's.
#[derive(Clone, Copy, Debug)]
struct Step(Option<usize>, &'static str, &'static str);

/// The step that broke a promise, and which.
type Broken = (Step, &'static str);

/// Collects the worlds one step away from `from`.
struct Steps<'a> {
    rules: &'a Rules,
    config: &'a Config,
    from: &'a World,
    next: Vec<(Step, World)>,
}

impl Steps<'_> {
    fn step(&mut self, step: Step, act: impl FnOnce(&mut World) -> Checked) -> Result<(), Broken> {
        let mut world = self.from.clone();
        let done = act(&mut world).and_then(|()| world.one_current_holder());
        done.map_err(|broken| (step, broken))?;
        self.next.push((step, world));
        Ok(())
    }

    /// Worker `i` makes a store call: it is answered, or the answer is lost after the store applied
    /// it, or before.
    fn call(
        &mut self,
        i: usize,
        what: &'static str,
        call: &Call,
        answered: impl FnOnce(&mut World, bool) -> Checked,
        lost: impl Fn(&mut World) -> Checked,
    ) -> Result<(), Broken> {
        let (rules, config) = (self.rules, self.config);
        self.step(Step(Some(i), what, ""), |world| {
            let applied = world.apply(rules, config, i, call)?;
            answered(world, applied)
        })?;
        if self.from.lost_left > 0 {
            self.step(Step(Some(i), what, ", answer lost"), |world| {
                world.lost_left -= 1;
                world.apply(rules, config, i, call)?;
                lost(world)
            })?;
            self.step(Step(Some(i), what, ", call delayed"), |world| {
                world.lost_left -= 1;
                world.late.push((i, call.clone()));
                lost(world)
            })?;
        }
        Ok(())
    }

    fn all(mut self) -> Result<Vec<(Step, World)>, Broken> {
        let (rules, config) = (self.rules, self.config);
        self.step(Step(None, "a millisecond passes", ""), |world| {
            world.tick();
            Ok(())
        })?;
        if self.from.stored.as_ref().is_some_and(|record| (rules.sweeps)(record, NOW)) {
            self.step(Step(None, "a sweep", ""), |world| {
                let swept = world.stored.take();
                world.truth = Truth::default();
                check(swept.is_some_and(|was| was.expires_at <= NOW), "a sweep took a live key")
            })?;
        }
        for late in 0..self.from.late.len() {
            self.step(Step(None, "a delayed call arrives", ""), |world| {
                let (by, call) = world.late.remove(late);
                world.apply(rules, config, by, &call).map(drop)
            })?;
        }
        for i in 0..WORKERS {
            self.worker(i)?;
        }
        Ok(self.next)
    }

    fn worker(&mut self, i: usize) -> Result<(), Broken> {
        let (rules, config) = (self.rules, self.config);
        let policy = config.policy();
        let fresh = self.from.fresh();
        match self.from.workers[i].clone() {
            Worker::Stopped => Ok(()),
            Worker::Idle => {
                let write = (rules.grant)(config.fingerprint(i), fresh, &policy);
                self.claim(i, "inserts", &Call::Grant { over: None, free: true, write })
            }
            Worker::Decided(call) => self.claim(i, "takes the key", &call),
            Worker::Unsure(revision) => self.step(Step(Some(i), "reads", ""), |world| {
                if world.stored.as_ref().is_some_and(|record| record.revision == revision) {
                    return world.run(config, i, revision);
                }
                world.workers[i] = Worker::Stopped;
                Ok(())
            }),
            Worker::Holding(held) => {
                if self.from.renewals_left > 0 {
                    self.renew(i, &held, (rules.renew)(&held.record, fresh, &policy))?;
                }
                for verdict in
                    [Verdict::Keep(outcome_named(fresh)), Verdict::Release, Verdict::Leave, Verdict::Again]
                {
                    let finish = (rules.finish)(&held.record, verdict, fresh, &policy);
                    self.finish(i, &held, &finish)?;
                }
                Ok(())
            }
            Worker::Ending { held, finish, reading: true } => {
                self.step(Step(Some(i), "reads", ""), |world| match world.adopt(rules, &held) {
                    Some(held) => {
                        world.workers[i] = Worker::Ending { held, finish, reading: false };
                        Ok(())
                    }
                    None => world.give_up(i),
                })
            }
            Worker::Ending { held, finish, reading: false } => self.finish(i, &held, &finish),
        }
    }

    fn claim(&mut self, i: usize, what: &'static str, call: &Call) -> Result<(), Broken> {
        let (rules, config) = (self.rules, self.config);
        let Call::Grant { write, .. } = call else { unreachable!("a claim writes a grant") };
        let revision = write.revision;
        let answered = |world: &mut World, applied| match (applied, &world.stored) {
            (true, _) => world.run(config, i, revision),
            (false, None) if !rules.claims_again => world.run(config, i, revision),
            (false, _) => world.decide(rules, config, i),
        };
        self.call(i, what, call, answered, |world| {
            if !rules.settles {
                return world.run(config, i, revision);
            }
            world.workers[i] = Worker::Unsure(revision);
            Ok(())
        })
    }

    fn renew(&mut self, i: usize, held: &Held, write: Write) -> Result<(), Broken> {
        let rules = self.rules;
        let revision = write.revision;
        let call = Call::Renew(held.record.revision, write);
        let answered = |world: &mut World, applied| {
            world.renewals_left -= 1;
            if applied {
                let record = world.stored.clone().ok_or("a renewal left nothing")?;
                world.workers[i] = Worker::Holding(Held::new(record));
            } else if let Some(adopted) = world.adopt(rules, held) {
                world.workers[i] = Worker::Holding(adopted);
            }
            // A holder that learns here that it lost the key may still try to finish.
            Ok(())
        };
        self.call(i, "renews", &call, answered, |world| {
            world.renewals_left -= 1;
            let mut held = held.clone();
            held.in_doubt.push(revision);
            world.workers[i] = Worker::Holding(held);
            Ok(())
        })
    }

    fn finish(&mut self, i: usize, held: &Held, finish: &Finish) -> Result<(), Broken> {
        let rules = self.rules;
        let expected = held.record.revision;
        let ending = |held: Held, reading| Worker::Ending { held, finish: finish.clone(), reading };
        let lost = |world: &mut World| {
            world.workers[i] = ending(held.clone(), false);
            Ok(())
        };
        match finish {
            Finish::Nothing => self.step(Step(Some(i), "leaves", ""), |world| {
                world.workers[i] = Worker::Stopped;
                Ok(())
            }),
            Finish::Remove => {
                let answered = |world: &mut World, applied: bool| {
                    world.workers[i] = if applied { Worker::Stopped } else { ending(held.clone(), true) };
                    Ok(())
                };
                self.call(i, "releases", &Call::Release(expected), answered, lost)
            }
            Finish::Complete(write) => {
                let call = Call::Complete(expected, write.clone());
                let answered = |world: &mut World, applied: bool| {
                    let found = world.stored.as_ref().map(|record| record.revision);
                    if applied || found == Some(write.revision) {
                        world.workers[i] = Worker::Stopped;
                        let happened = match &write.state {
                            NewState::Done(outcome) => world.truth.done.as_ref() == Some(outcome),
                            NewState::Running { .. } => true,
                        };
                        return check(happened, "a completion that never happened");
                    }
                    match world.adopt(rules, held) {
                        Some(adopted) => world.workers[i] = ending(adopted, false),
                        None => world.give_up(i)?,
                    }
                    Ok(())
                };
                self.call(i, "completes", &call, answered, lost)
            }
        }
    }
}

/// A promise was broken: which, and the steps that led there.
#[derive(Debug)]
pub(super) struct Violation {
    pub(super) what: &'static str,
    steps: Vec<Step>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, after:", self.what)?;
        self.steps.iter().try_for_each(|Step(who, what, answer)| match who {
            Some(i) => write!(f, " worker {i} {what}{answer};"),
            None => write!(f, " {what};"),
        })
    }
}

/// Walks every world and returns how many there are.
pub(super) fn explore(rules: &Rules, config: &Config) -> Result<usize, Violation> {
    // Worlds that differ only in who is who count once. Where a promise is broken, the way there is
    // walked again with the workers in their places, so that its steps can be followed.
    walk(rules, config, true).or_else(|_| walk(rules, config, false))
}

fn walk(rules: &Rules, config: &Config, anonymous: bool) -> Result<usize, Violation> {
    // Breadth first, so that the steps to a violation are as few as can be.
    let mut todo = VecDeque::from([World::start(config)]);
    let mut seen = HashSet::from([digest(&todo[0])]);
    // Of each world, where it came from.
    let mut origins = vec![(0, Step(None, "", ""))];
    for at in 0.. {
        let Some(from) = todo.pop_front() else { break };
        let steps = Steps { rules, config, from: &from, next: Vec::new() };
        let next = steps.all().map_err(|(last, what)| {
            let mut steps = vec![last];
            let mut i = at;
            while i > 0 {
                steps.push(origins[i].1);
                i = origins[i].0;
            }
            steps.reverse();
            Violation { what, steps }
        })?;
        for (step, mut world) in next {
            if anonymous {
                world.sort_workers(config);
            }
            if seen.insert(digest(&world)) {
                todo.push_back(world);
                origins.push((at, step));
            }
        }
    }
    Ok(seen.len())
}

/// What a world is known by once it was visited; whole ones would not fit into memory. That
/// two of a million worlds share a digest is less likely than one in ten million.
fn digest(value: &impl Hash) -> u64 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(value)
}

/// The walks that together cover every feature; each small enough to be walked to its end.
pub(super) const WALKS: [(&str, Config); 6] = {
    const fn walk(on_lapse: Lapse, requests: [u8; WORKERS], lost_max: u8, renewals_max: u8) -> Config {
        Config { on_lapse, requests, lost_max, renewals_max }
    }
    [
        ("rerun, one request, renewals", walk(Lapse::Rerun, [1, 1, 1], 0, 2)),
        ("hold, one request, renewals", walk(Lapse::Hold, [1, 1, 1], 0, 2)),
        ("rerun, two requests", walk(Lapse::Rerun, [1, 1, 2], 0, 1)),
        ("hold, two requests", walk(Lapse::Hold, [1, 1, 2], 0, 1)),
        ("rerun, lost answers", walk(Lapse::Rerun, [1, 1, 1], 1, 1)),
        ("hold, lost answers", walk(Lapse::Hold, [1, 1, 1], 1, 1)),
    ]
};

#[test]
fn every_interleaving_keeps_the_promises() {
    // Side by side: the walks share nothing.
    std::thread::scope(|scope| {
        for (name, config) in &WALKS {
            scope.spawn(move || match explore(&Rules::REAL, config) {
                Ok(worlds) => println!("{name}: {worlds} worlds"),
                Err(violation) => panic!("{name}: {violation}"),
            });
        }
    });
}

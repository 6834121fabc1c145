//! The engine against a store that fails, hangs or loses its answers at a chosen call.
//!
//! The store's clock is tokio's, which stands still here until everything waits, and then jumps.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::{Instant, advance};

use crate::engine::CALL_TIME_MAX;
use crate::machine::{self, Lapse, Policy, Refusal, Verdict};
use crate::record::{Fingerprint, Outcome, Revision, Seen, State, Timestamp, Write};
use crate::store::{Inserted, Replaced, Store, StoreError, StoreErrorKind};
use crate::{Claimed, Engine, Finished, Grant, Id, Key, MemoryStore, Operation};

const REQUEST: Fingerprint = Fingerprint { target: [1; 32], body: [2; 32] };
const LEASE: Duration = Duration::from_secs(75);
const POLICY: Policy =
    Policy { lease: LEASE, retention: Duration::from_secs(86_400), on_lapse: Lapse::Rerun };

/// What becomes of one store call.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Answered,
    /// Applied, and the answer is lost.
    AnswerLost,
    /// Not applied, and nobody can tell.
    CallLost,
    /// Refused: not applied.
    Unavailable,
    /// Never answered, and not applied.
    Hangs,
    /// Not applied: for an insert an expired record is in the way, which is gone after it, and any
    /// other call finds nothing.
    FindsNothing,
}
use Fate::{AnswerLost, Answered, CallLost, FindsNothing, Hangs, Unavailable};

/// A memory store whose calls meet the given fates, in order; the rest are answered.
#[derive(Clone)]
struct Fated {
    inner: MemoryStore,
    calls: Arc<Mutex<Vec<&'static str>>>,
    fates: Arc<Mutex<VecDeque<Fate>>>,
    ahead: Arc<Mutex<Duration>>,
}

impl Fated {
    fn new() -> Self {
        let started = Instant::now();
        let ahead = Arc::new(Mutex::new(Duration::ZERO));
        let jumped = Arc::clone(&ahead);
        let clock = move || {
            Timestamp(1_000_000).plus(started.elapsed() + *jumped.lock().expect("no panic while locked"))
        };
        Self { inner: MemoryStore::with_clock(clock), calls: Arc::default(), fates: Arc::default(), ahead }
    }

    /// Sets the store's clock forward, and no other.
    fn jump(&self, by: Duration) {
        *self.ahead.lock().expect("no panic while locked") += by;
    }

    fn engine(&self) -> Engine {
        Engine::new(Arc::new(self.clone()))
    }

    /// The calls from here on meet these.
    fn meets(&self, fates: impl IntoIterator<Item = Fate>) {
        *self.fates.lock().expect("no panic while locked") = fates.into_iter().collect();
        self.calls.lock().expect("no panic while locked").clear();
    }

    fn calls(&self) -> Vec<&'static str> {
        self.calls.lock().expect("no panic while locked").clone()
    }

    async fn stored(&self) -> Option<Seen> {
        self.inner.read(payment().id()).await.expect("memory answers")
    }

    async fn call<T>(
        &self,
        name: &'static str,
        nothing: T,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        self.calls.lock().expect("no panic while locked").push(name);
        let fate = self.fates.lock().expect("no panic while locked").pop_front();
        let ambiguous = || StoreError::new(StoreErrorKind::Ambiguous, "the connection was cut");
        match fate.unwrap_or(Answered) {
            Answered => call.await,
            AnswerLost => call.await.and(Err(ambiguous())),
            CallLost => Err(ambiguous()),
            Unavailable => Err(StoreError::new(StoreErrorKind::Unavailable, "no connection")),
            Hangs => std::future::pending().await,
            FindsNothing => Ok(nothing),
        }
    }
}

#[async_trait]
impl Store for Fated {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        let other = machine::grant(REQUEST, Revision(0), &POLICY).at(Timestamp(0));
        let expired = Inserted::Exists(Seen { now: other.expires_at, record: other });
        self.call("insert", expired, self.inner.insert(operation, write)).await
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        self.call("replace", Replaced::Lost(None), self.inner.replace(id, expected, write)).await
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        self.call("remove", false, self.inner.remove(id, expected)).await
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        self.call("read", None, self.inner.read(id)).await
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        self.inner.sweep(rows_max).await
    }
}

fn payment() -> Operation {
    Operation::new("default", "POST /payments", "ann", Key::new("order-4711").expect("a good key"))
}

fn paid() -> Outcome {
    Outcome { status: 201, head: Default::default(), body: "paid".into() }
}

async fn claim(store: &Fated) -> Result<Claimed, StoreError> {
    store.engine().claim(&payment(), REQUEST, &POLICY).await
}

async fn granted(store: &Fated) -> Grant {
    match claim(store).await {
        Ok(Claimed::Execute(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

async fn replayed(store: &Fated) -> Outcome {
    match claim(store).await {
        Ok(Claimed::Replay(outcome)) => outcome,
        other => panic!("not replayed: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn an_execution_takes_two_calls_a_replay_or_refusal_one_a_take_over_three() {
    let store = Fated::new();
    let grant = granted(&store).await;
    assert_eq!(grant.attempt(), 1);
    assert_eq!(grant.finish(Verdict::Keep(paid())).await.expect("written"), Finished::Written);
    assert_eq!(store.calls(), ["insert", "replace"]);

    store.meets([]);
    let before = store.stored().await.expect("stored").record;
    assert_eq!(replayed(&store).await, paid());
    assert_eq!(store.calls(), ["insert"]);
    assert_eq!(store.stored().await.expect("stored").record, before, "a replay writes nothing");

    store.meets([]);
    let edited = Fingerprint { body: [9; 32], ..REQUEST };
    let refused = store.engine().claim(&payment(), edited, &POLICY).await;
    let mismatch = Refusal::Mismatch { target: false, body: true };
    assert!(matches!(refused, Ok(Claimed::Refused(refusal)) if refusal == mismatch), "{refused:?}");
    assert_eq!(store.calls(), ["insert"]);

    store.meets([]);
    advance(POLICY.retention).await;
    let grant = granted(&store).await;
    assert_eq!(grant.attempt(), 1, "an expired key starts over");
    drop(grant);
    advance(LEASE).await;
    store.meets([]);
    let grant = granted(&store).await;
    assert_eq!(grant.attempt(), 2);
    grant.finish(Verdict::Keep(paid())).await.expect("written");
    assert_eq!(store.calls(), ["insert", "replace", "replace"]);
}

#[tokio::test(start_paused = true)]
async fn a_held_key_is_in_flight_until_its_lease_ends() {
    let store = Fated::new();
    let _dropped = granted(&store).await;
    advance(LEASE - Duration::from_millis(1)).await;
    let refusal = Refusal::InFlight {
        running_for: LEASE - Duration::from_millis(1),
        lease_left: Duration::from_millis(1),
    };
    let refused = claim(&store).await;
    assert!(matches!(refused, Ok(Claimed::Refused(found)) if found == refusal), "{refused:?}");

    advance(Duration::from_millis(1)).await;
    let hold = Policy { on_lapse: Lapse::Hold, ..POLICY };
    let held = store.engine().claim(&payment(), REQUEST, &hold).await;
    assert!(matches!(held, Ok(Claimed::Refused(Refusal::Unknown))), "{held:?}");
    assert_eq!(granted(&store).await.attempt(), 2);
}

#[tokio::test(start_paused = true)]
async fn of_any_number_of_concurrent_copies_exactly_one_runs() {
    let store = Fated::new();
    let copies: Vec<_> = (0..100)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { matches!(claim(&store).await, Ok(Claimed::Execute(_))) })
        })
        .collect();
    let mut executed = 0;
    for copy in copies {
        executed += usize::from(copy.await.expect("no panic"));
    }
    assert_eq!(executed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_loses_to_nothing_claims_again() {
    let store = Fated::new();
    // An expired record is there for the insert, and swept before the take-over.
    store.meets([FindsNothing, FindsNothing]);
    assert_eq!(granted(&store).await.attempt(), 1);
    assert_eq!(store.calls(), ["insert", "replace", "insert"]);
    assert!(store.stored().await.is_some(), "the work runs under a grant that is in the store");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_keeps_losing_gives_up_without_running() {
    let store = Fated::new();
    store.meets([FindsNothing; 1000]);
    let error = claim(&store).await.expect_err("never granted");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert_eq!(store.calls().len(), 16);
    assert!(store.stored().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_lost_is_settled_by_reading() {
    let store = Fated::new();
    store.meets([AnswerLost]);
    let grant = granted(&store).await;
    assert_eq!(store.calls(), ["insert", "read"]);
    assert_eq!(grant.finish(Verdict::Keep(paid())).await.expect("written"), Finished::Written);
    assert_eq!(replayed(&store).await, paid());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_may_not_have_been_written_does_not_run() {
    for settling in [vec![CallLost], vec![AnswerLost, Unavailable], vec![AnswerLost, CallLost]] {
        let store = Fated::new();
        store.meets(settling.clone());
        let error = claim(&store).await.expect_err("not granted");
        assert!(error.may_have_applied(), "{settling:?}: {error}");
        assert_eq!(store.calls(), ["insert", "read"]);
    }
    let store = Fated::new();
    store.meets([Unavailable]);
    assert!(!claim(&store).await.expect_err("not granted").may_have_applied());
    assert_eq!(store.calls(), ["insert"], "nothing to settle");
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_answer_was_lost_does_not_run_under_anothers_grant() {
    let store = Fated::new();
    let holder = granted(&store).await;
    for fate in [AnswerLost, CallLost] {
        store.meets([fate]);
        assert!(claim(&store).await.expect_err("not granted").may_have_applied());
        assert_eq!(store.calls(), ["insert", "read"]);
    }
    assert_eq!(holder.finish(Verdict::Keep(paid())).await.expect("written"), Finished::Written);
}

#[tokio::test(start_paused = true)]
async fn a_take_over_whose_answer_was_lost_is_settled_by_reading() {
    for (fate, executes) in [(AnswerLost, true), (CallLost, false)] {
        let store = Fated::new();
        drop(granted(&store).await);
        advance(LEASE).await;
        store.meets([Answered, fate]);
        let claimed = claim(&store).await;
        assert_eq!(matches!(&claimed, Ok(Claimed::Execute(grant)) if grant.attempt() == 2), executes);
        assert_eq!(store.calls(), ["insert", "replace", "read"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_extends_the_lease_from_now() {
    let store = Fated::new();
    let mut grant = granted(&store).await;
    let first = grant.lease_ends();
    advance(LEASE / 3).await;
    assert!(grant.renew().await.expect("renewed"));
    assert_eq!(grant.lease_ends(), first + LEASE / 3);
    advance(LEASE - Duration::from_millis(1)).await;
    assert!(matches!(claim(&store).await, Ok(Claimed::Refused(Refusal::InFlight { .. }))));
    assert_eq!(grant.finish(Verdict::Keep(paid())).await.expect("written"), Finished::Written);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_whose_answer_was_lost_does_not_cost_the_key() {
    for verdict in [Verdict::Keep(paid()), Verdict::Release] {
        for fate in [AnswerLost, CallLost, Unavailable] {
            let store = Fated::new();
            let mut grant = granted(&store).await;
            let lease_ends = grant.lease_ends();
            store.meets([fate, fate]);
            grant.renew().await.expect_err("the answer was lost");
            grant.renew().await.expect_err("the answer was lost");
            assert_eq!(grant.lease_ends(), lease_ends, "the lease counts from a renewal that is known");
            assert_eq!(grant.finish(verdict.clone()).await.expect("finished"), Finished::Written, "{fate:?}");
            let stored = store.stored().await.map(|seen| matches!(seen.record.state, State::Done { .. }));
            assert_eq!(stored, (verdict != Verdict::Release).then_some(true), "{fate:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_goes_on_from_one_whose_answer_was_lost() {
    let store = Fated::new();
    let mut grant = granted(&store).await;
    store.meets([AnswerLost]);
    grant.renew().await.expect_err("the answer was lost");
    advance(Duration::from_secs(1)).await;
    assert!(grant.renew().await.expect("renewed"));
    assert_eq!(grant.lease_ends(), Instant::now() + LEASE);
    assert_eq!(store.calls(), ["replace", "replace", "replace"]);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_was_dropped_in_a_renewal_can_still_finish() {
    let store = Fated::new();
    let mut grant = granted(&store).await;
    store.meets([AnswerLost, Hangs]);
    grant.renew().await.expect_err("the answer was lost");
    let cut = tokio::time::timeout(Duration::from_secs(1), grant.renew()).await;
    assert!(cut.is_err(), "the store hangs");
    assert_eq!(grant.finish(Verdict::Keep(paid())).await.expect("finished"), Finished::Written);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_was_taken_over_changes_nothing() {
    let store = Fated::new();
    let mut stale = granted(&store).await;
    advance(LEASE).await;
    let successor = granted(&store).await;
    let before = store.stored().await.expect("stored").record;
    assert!(!stale.renew().await.expect("answered"));
    assert_eq!(stale.finish(Verdict::Keep(paid())).await.expect("answered"), Finished::LeaseLost);
    assert_eq!(store.stored().await.expect("stored").record, before);

    advance(LEASE).await;
    let third = granted(&store).await;
    let before = store.stored().await.expect("stored").record;
    assert_eq!(successor.finish(Verdict::Release).await.expect("answered"), Finished::LeaseLost);
    assert_eq!(store.stored().await.expect("stored").record, before);
    assert_eq!(third.attempt(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_failed_before_it_was_written_still_notices_a_lost_lease() {
    // The remove says no, and then the read fails; or the store refuses outright.
    for fates in [vec![Answered, Unavailable], vec![Unavailable]] {
        let store = Fated::new();
        let stale = granted(&store).await;
        // By the store's clock alone the lease is over, so the holder still tries again.
        store.jump(LEASE);
        let _successor = granted(&store).await;
        store.meets(fates.clone());
        let finished = stale.finish(Verdict::Release).await.expect("answered");
        assert_eq!(finished, Finished::LeaseLost, "{fates:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn finishing_goes_on_while_the_store_fails() {
    for fate in [Unavailable, CallLost, AnswerLost] {
        for verdict in [Verdict::Keep(paid()), Verdict::Release] {
            let store = Fated::new();
            let grant = granted(&store).await;
            store.meets([fate; 20]);
            assert_eq!(grant.finish(verdict.clone()).await.expect("finished"), Finished::Written);
            match verdict {
                Verdict::Keep(_) => assert_eq!(replayed(&store).await, paid()),
                _ => assert_eq!(granted(&store).await.attempt(), 1),
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn finishing_gives_up_when_the_lease_ends_and_not_before() {
    let store = Fated::new();
    let grant = granted(&store).await;
    store.meets([Unavailable; 1000]);
    let started = Instant::now();
    grant.finish(Verdict::Keep(paid())).await.expect_err("the store is away");
    let tried_for = started.elapsed();
    assert!(tried_for <= LEASE && tried_for > LEASE - Duration::from_secs(2), "{tried_for:?}");
    assert!(store.calls().len() > 70, "about once a second");
}

#[tokio::test(start_paused = true)]
async fn finishing_is_tried_once_even_after_the_lease() {
    let store = Fated::new();
    let grant = granted(&store).await;
    advance(LEASE * 2).await;
    assert_eq!(grant.finish(Verdict::Keep(paid())).await.expect("finished"), Finished::Written);
    assert_eq!(replayed(&store).await, paid());

    let store = Fated::new();
    let grant = granted(&store).await;
    advance(LEASE * 2).await;
    store.meets([Unavailable]);
    grant.finish(Verdict::Keep(paid())).await.expect_err("the lease is over");
    assert_eq!(store.calls(), ["replace"]);
}

#[tokio::test(start_paused = true)]
async fn leaving_writes_nothing() {
    let store = Fated::new();
    let grant = granted(&store).await;
    store.meets([]);
    grant.finish(Verdict::Leave).await.expect("nothing to fail");
    assert_eq!(store.calls(), [""; 0]);
    assert!(matches!(claim(&store).await, Ok(Claimed::Refused(Refusal::InFlight { .. }))));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_is_not_waited_for() {
    let store = Fated::new();
    store.meets([Hangs]);
    let started = Instant::now();
    let error = claim(&store).await.expect_err("not granted");
    assert!(error.may_have_applied());
    assert_eq!(started.elapsed(), CALL_TIME_MAX);

    let store = Fated::new();
    let mut grant = granted(&store).await;
    store.meets([Hangs, Hangs]);
    let started = Instant::now();
    grant.renew().await.expect_err("not renewed");
    assert_eq!(started.elapsed(), CALL_TIME_MAX);
    assert_eq!(grant.finish(Verdict::Keep(paid())).await.expect("finished"), Finished::Written);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_arrives_after_its_own_lease_is_released_and_not_run() {
    let store = Fated::new();
    let brief = Policy { lease: SLOW, ..POLICY };
    // The answer is lost in time, and the read that settles it comes too late.
    store.meets([AnswerLost]);
    let slow = SlowReads(store.clone());
    let error = Engine::new(Arc::new(slow)).claim(&payment(), REQUEST, &brief).await;
    let error = error.expect_err("too late to start");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(store.stored().await.is_none(), "a retry need not wait");

    // A lease of zero is over before the work could start.
    let store = Fated::new();
    let zero = Policy { lease: Duration::ZERO, ..POLICY };
    store.engine().claim(&payment(), REQUEST, &zero).await.expect_err("too late to start");
    assert!(store.stored().await.is_none());
}

const SLOW: Duration = Duration::from_secs(2);

/// Answers an insert after [`SLOW`] less a moment, and a read after two moments.
struct SlowReads(Fated);

#[async_trait]
impl Store for SlowReads {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        let inserted = self.0.insert(operation, write).await;
        tokio::time::sleep(SLOW - Duration::from_millis(1)).await;
        inserted
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        self.0.replace(id, expected, write).await
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        self.0.remove(id, expected).await
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        tokio::time::sleep(Duration::from_millis(2)).await;
        self.0.read(id).await
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        self.0.sweep(rows_max).await
    }
}

/// Inserts that are applied, and whose answer comes after the engine has gone.
struct LateInserts(Fated);

#[async_trait]
impl Store for LateInserts {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        let inserted = self.0.insert(operation, write).await;
        tokio::time::sleep(CALL_TIME_MAX * 2).await;
        inserted
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        self.0.replace(id, expected, write).await
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        self.0.remove(id, expected).await
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        self.0.read(id).await
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        self.0.sweep(rows_max).await
    }
}

/// The store may take the grant back at any moment, so that a copy would run beside it.
#[tokio::test(start_paused = true)]
async fn a_claim_that_took_too_long_is_not_run_although_a_read_would_find_it() {
    let store = Fated::new();
    let late = Engine::new(Arc::new(LateInserts(store.clone())));
    let error = late.claim(&payment(), REQUEST, &POLICY).await.expect_err("not granted");
    assert!(error.may_have_applied());
    assert!(store.stored().await.is_some());
}

//! What callers rely on, when any one or two of the store's calls fail in any way.
//!
//! Each clause plays one story for every number of the first failing call, up to one that is never
//! reached, and for every [`Fault`]. The stories run at once, each on a key of its own; then the lease
//! passes for all of them, and nothing may be stuck.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{
    Claimed, Engine, Finished, Grant, Lapse, Operation, Outcome, Policy, Refusal, Store, StoreErrorKind,
    Verdict,
};
use tokio::task::JoinSet;

use crate::engine::{claim, execute, replayed};
use crate::samples::*;
use crate::{Fault, Faulty, Harness};

/// Longer than a story takes on a busy machine, waits between tries included.
const LEASE_SHORT: Duration = Duration::from_millis(2_500);
const POLICY: Policy = Policy { lease: LEASE_SHORT, retention: RETENTION, on_lapse: Lapse::Rerun };

/// One story: the key it is about, and a sound and a faulty way to the same data.
#[derive(Clone)]
struct Story {
    name: String,
    payment: Operation,
    sound: Engine,
    faulty: Engine,
    faults: Arc<Faulty>,
    first_failing: u64,
}

/// What a story leaves behind for the time after the lease.
enum End {
    /// The outcome is recorded and is replayed for good.
    Done(Outcome),
    /// The key is held by nobody who knows; after the lease it is free, as this attempt or an earlier one.
    Held { attempt_max: u32 },
    /// The key is free.
    Free,
}

/// Plays the story with every fault at every call, and checks what each leaves behind.
async fn play<F>(harness: &dyn Harness, prepare: &[Verdict], story: impl Fn(Story, Option<Grant>) -> F)
where
    F: Future<Output = End> + Send + 'static,
{
    let store = harness.store().await;
    let stories = stories(&store);
    let sound = Engine::new(Arc::clone(&store));
    let mut before = Vec::new();
    for story in &stories {
        before.push(match prepare {
            [] => None,
            _ => Some(execute(&sound, &story.payment, &POLICY).await),
        });
    }
    if !prepare.is_empty() {
        harness.pass(LEASE_SHORT).await;
    }
    let mut tasks = JoinSet::new();
    for (told, holder) in stories.iter().zip(before) {
        let (end, told) = (story(told.clone(), holder), told.clone());
        tasks.spawn(async move { (end.await, told) });
    }
    let ends = tasks.join_all().await;
    let reached = ends.iter().filter(|(_, story)| story.faults.calls() > story.first_failing).count();
    assert!(reached > 0 && reached < ends.len(), "the stories must end before the last fault: {reached}");
    harness.pass(LEASE_SHORT).await;
    for (end, story) in ends {
        check(end, &story).await;
    }
}

/// Nothing is stuck past its lease, and nothing that was recorded is forgotten.
async fn check(end: End, Story { name, payment, sound, .. }: &Story) {
    match (end, claim(sound, payment, &POLICY).await) {
        (End::Done(outcome), Claimed::Replay(replayed)) => assert_eq!(replayed, outcome, "{name}"),
        (End::Held { attempt_max }, Claimed::Execute(grant)) => {
            assert!(grant.attempt() <= attempt_max, "{name}: {grant:?}");
        }
        (End::Free, Claimed::Execute(grant)) => assert_eq!(grant.attempt(), 1, "{name}"),
        (_, claimed) => panic!("{name}: {claimed:?}"),
    }
}

fn stories(store: &Arc<dyn Store>) -> Vec<Story> {
    let mut stories = Vec::new();
    for first_failing in 0..8 {
        for failing in 1..=2 {
            for fault in Fault::ALL {
                let name = format!("{failing} {fault:?} from call {first_failing}");
                let faults = Faulty::new(Arc::clone(store), fault, first_failing..first_failing + failing);
                let faults = Arc::new(faults);
                stories.push(Story {
                    payment: operation(&name),
                    name,
                    sound: Engine::new(Arc::clone(store)),
                    faulty: Engine::new(Arc::clone(&faults) as Arc<dyn Store>),
                    faults,
                    first_failing,
                });
            }
        }
    }
    stories
}

impl Story {
    /// Claims in the faulty way. `None` if the store did not say who holds the key: no work runs then.
    async fn claim(&self) -> Option<Grant> {
        match self.faulty.claim(&self.payment, FINGERPRINT, &POLICY).await {
            Ok(Claimed::Execute(grant)) => Some(grant),
            Ok(other) => panic!("{}: {other:?}", self.name),
            Err(error) => {
                assert_ne!(error.kind(), StoreErrorKind::Unreadable, "{}", self.name);
                None
            }
        }
    }

    /// While one holds the key nobody else is granted it.
    async fn nobody_else_is_granted(&self) {
        let claimed = claim(&self.sound, &self.payment, &POLICY).await;
        assert!(matches!(claimed, Claimed::Refused(Refusal::InFlight { .. })), "{}: {claimed:?}", self.name);
    }

    async fn finish(&self, grant: Grant, verdict: Verdict) -> Finished {
        grant.finish(verdict).await.unwrap_or_else(|error| panic!("{}: {error}", self.name))
    }
}

/// Claim, renew, complete: one holder at a time, and the outcome is replayed.
pub async fn an_execution_survives_any_fault(harness: &dyn Harness) {
    play(harness, &[], |story, _| async move {
        let Some(mut grant) = story.claim().await else { return End::Held { attempt_max: 2 } };
        assert_eq!(grant.attempt(), 1, "{}", story.name);
        story.nobody_else_is_granted().await;
        // Whatever the store says, nobody else has the key.
        assert_ne!(grant.renew().await.ok(), Some(false), "{}", story.name);
        story.nobody_else_is_granted().await;
        let finished = story.finish(grant, Verdict::Keep(outcome("paid"))).await;
        assert_eq!(finished, Finished::Written, "{}", story.name);
        assert_eq!(replayed(&story.sound, &story.payment).await, outcome("paid"), "{}", story.name);
        End::Done(outcome("paid"))
    })
    .await;
}

/// Claim, renew, release: the key is free afterwards.
pub async fn a_release_survives_any_fault(harness: &dyn Harness) {
    play(harness, &[], |story, _| async move {
        let Some(mut grant) = story.claim().await else { return End::Held { attempt_max: 2 } };
        assert_ne!(grant.renew().await.ok(), Some(false), "{}", story.name);
        story.nobody_else_is_granted().await;
        let finished = story.finish(grant, Verdict::Release).await;
        assert_eq!(finished, Finished::Written, "{}", story.name);
        End::Free
    })
    .await;
}

/// Take a lapsed key over, complete: the holder before is refused, its outcome never replayed.
pub async fn a_take_over_survives_any_fault(harness: &dyn Harness) {
    play(harness, &[Verdict::Leave], |story, before| async move {
        let before = before.expect("there was a holder before");
        let Some(grant) = story.claim().await else {
            // The key is still the first holder's, or is held by a claim that nobody heard of.
            return match story.finish(before, Verdict::Keep(outcome("old"))).await {
                Finished::Written => End::Done(outcome("old")),
                Finished::LeaseLost => End::Held { attempt_max: 3 },
            };
        };
        assert_eq!(grant.attempt(), 2, "{}", story.name);
        story.nobody_else_is_granted().await;
        let late = story.finish(before, Verdict::Keep(outcome("old"))).await;
        assert_eq!(late, Finished::LeaseLost, "{}", story.name);
        let finished = story.finish(grant, Verdict::Keep(outcome("new"))).await;
        assert_eq!(finished, Finished::Written, "{}", story.name);
        End::Done(outcome("new"))
    })
    .await;
}

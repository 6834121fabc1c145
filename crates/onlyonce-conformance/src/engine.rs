//! What callers of [`Engine`] rely on.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{
    Claimed, Engine, Fingerprint, Finished, Grant, Lapse, Operation, Outcome, Policy, Refusal, Store, Verdict,
};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use crate::Harness;
use crate::samples::*;

/// Short enough to wait for, and long enough for a claim on a busy machine.
const LEASE_SHORT: Duration = Duration::from_millis(500);

const STEADY: Policy = Policy { lease: LEASE, retention: RETENTION, on_lapse: Lapse::Rerun };
const BRIEF: Policy = Policy { lease: LEASE_SHORT, ..STEADY };

pub(crate) async fn claim(engine: &Engine, operation: &Operation, policy: &Policy) -> Claimed {
    engine.claim(operation, FINGERPRINT, policy).await.expect("the store answers")
}

pub(crate) async fn execute(engine: &Engine, operation: &Operation, policy: &Policy) -> Grant {
    match claim(engine, operation, policy).await {
        Claimed::Execute(grant) => grant,
        refused => panic!("the key should be free: {refused:?}"),
    }
}

pub(crate) async fn replayed(engine: &Engine, operation: &Operation) -> Outcome {
    match claim(engine, operation, &STEADY).await {
        Claimed::Replay(outcome) => outcome,
        other => panic!("there should be an outcome: {other:?}"),
    }
}

async fn finish(grant: Grant, verdict: Verdict) -> Finished {
    grant.finish(verdict).await.expect("the store answers")
}

/// A key whose lease is over from the start, with time left until it expires.
async fn lapse(store: &dyn Store, operation: &Operation) {
    let lapsed = onlyonce_core::record::NewState::Running { lease: Duration::ZERO };
    insert(store, operation, &onlyonce_core::Write { state: lapsed, ..running() }).await;
}

/// Claims one key from 64 tasks on two handles, and gives the grants.
async fn claim_at_once(stores: [&Arc<dyn Store>; 2], operation: &Operation) -> Vec<Grant> {
    let engines = stores.map(|store| Engine::new(Arc::clone(store)));
    let start = Arc::new(Barrier::new(64));
    let mut tasks = JoinSet::new();
    for at in 0..64 {
        let (engine, operation, start) = (engines[at % 2].clone(), operation.clone(), Arc::clone(&start));
        tasks.spawn(async move {
            start.wait().await;
            claim(&engine, &operation, &STEADY).await
        });
    }
    let mut grants = Vec::new();
    for claimed in tasks.join_all().await {
        match claimed {
            Claimed::Execute(grant) => grants.push(grant),
            Claimed::Refused(Refusal::InFlight { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    grants
}

/// Of any number of concurrent copies of a request one is executed, and the others are told so.
pub async fn one_claim_executes(harness: &dyn Harness) {
    let (store, other) = (harness.store().await, harness.other().await);
    for round in 0..8 {
        let payment = operation(&format!("k{round}"));
        let grants = claim_at_once([&store, &other], &payment).await;
        assert_eq!(grants.iter().map(Grant::attempt).collect::<Vec<_>>(), [1]);
    }
}

/// Of any number of concurrent copies one takes a lapsed key over, as its next attempt.
pub async fn one_claim_takes_over(harness: &dyn Harness) {
    let (store, other) = (harness.store().await, harness.other().await);
    for round in 0..8 {
        let payment = operation(&format!("k{round}"));
        lapse(&*store, &payment).await;
        let grants = claim_at_once([&store, &other], &payment).await;
        assert_eq!(grants.iter().map(Grant::attempt).collect::<Vec<_>>(), [2]);
    }
}

/// Every copy after the end gets the outcome, byte for byte, from every handle.
pub async fn a_replay_is_the_outcome_byte_for_byte(harness: &dyn Harness) {
    let (engine, other) = (Engine::new(harness.store().await), Engine::new(harness.other().await));
    let bytes: Vec<u8> = (0..=0xff).collect();
    let outcome = Outcome { status: 418, head: bytes.clone().into(), body: bytes.repeat(64).into() };
    let grant = execute(&engine, &operation("k"), &STEADY).await;
    assert_eq!(finish(grant, Verdict::Keep(outcome.clone())).await, Finished::Written);
    for engine in [&engine, &other, &engine] {
        assert_eq!(replayed(engine, &operation("k")).await, outcome);
    }
}

/// A released key is free, and its next grant is the first again.
pub async fn a_release_frees_the_key(harness: &dyn Harness) {
    let engine = Engine::new(harness.store().await);
    let grant = execute(&engine, &operation("k"), &STEADY).await;
    assert_eq!(finish(grant, Verdict::Release).await, Finished::Written);
    assert_eq!(execute(&engine, &operation("k"), &STEADY).await.attempt(), 1);
}

/// An attempt that did nothing and is to be made again frees its key at once, and counts. One that was lost to
/// another holder by then frees nothing.
pub async fn an_attempt_to_be_made_again_counts(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let engine = Engine::new(Arc::clone(&store));
    for attempt in 1..=3 {
        let grant = execute(&engine, &payment, &STEADY).await;
        assert_eq!(grant.attempt(), attempt);
        assert_eq!(finish(grant, Verdict::Again).await, Finished::Written);
    }
    let hold = Policy { on_lapse: Lapse::Hold, ..STEADY };
    let held = claim(&engine, &payment, &hold).await;
    assert!(matches!(held, Claimed::Refused(Refusal::Unknown)), "{held:?}");
    let stale = execute(&engine, &payment, &BRIEF).await;
    harness.pass(LEASE_SHORT * 2).await;
    let successor = execute(&engine, &payment, &STEADY).await;
    assert_eq!(finish(stale, Verdict::Again).await, Finished::LeaseLost);
    let in_flight = claim(&engine, &payment, &STEADY).await;
    assert!(matches!(in_flight, Claimed::Refused(Refusal::InFlight { .. })), "{in_flight:?}");
    assert_eq!(finish(successor, Verdict::Keep(outcome("paid"))).await, Finished::Written);
    assert_eq!(replayed(&engine, &payment).await, outcome("paid"));
}

/// When nobody knows whether the work happened the key stays held.
pub async fn a_grant_left_alone_stays_held(harness: &dyn Harness) {
    let engine = Engine::new(harness.store().await);
    let grant = execute(&engine, &operation("k"), &STEADY).await;
    assert_eq!(finish(grant, Verdict::Leave).await, Finished::Written);
    let copy = claim(&engine, &operation("k"), &STEADY).await;
    assert!(matches!(copy, Claimed::Refused(Refusal::InFlight { lease_left, .. }) if lease_left <= LEASE));
}

/// A holder whose key was taken over can neither complete nor release nor renew it.
pub async fn a_taken_over_holder_loses_its_lease(harness: &dyn Harness) {
    let (engine, other) = (Engine::new(harness.store().await), Engine::new(harness.other().await));
    let (completes, releases, renews) = (operation("completes"), operation("releases"), operation("renews"));
    let old = [
        execute(&engine, &completes, &BRIEF).await,
        execute(&engine, &releases, &BRIEF).await,
        execute(&engine, &renews, &BRIEF).await,
    ];
    harness.pass(LEASE_SHORT).await;
    let mut new = Vec::new();
    for payment in [&completes, &releases, &renews] {
        let grant = execute(&other, payment, &STEADY).await;
        assert_eq!(grant.attempt(), 2);
        new.push(grant);
    }
    let [old_completes, old_releases, mut old_renews] = old;
    assert_eq!(finish(old_completes, Verdict::Keep(outcome("old"))).await, Finished::LeaseLost);
    assert_eq!(finish(old_releases, Verdict::Release).await, Finished::LeaseLost);
    assert!(!old_renews.renew().await.expect("the store answers"));
    for (grant, payment) in new.into_iter().zip([&completes, &releases, &renews]) {
        assert_eq!(finish(grant, Verdict::Keep(outcome("new"))).await, Finished::Written);
        assert_eq!(replayed(&engine, payment).await, outcome("new"));
    }
}

/// A holder that is late but was not replaced still records its outcome.
pub async fn a_late_holder_finishes_if_nobody_took_over(harness: &dyn Harness) {
    let engine = Engine::new(harness.store().await);
    let grant = execute(&engine, &operation("k"), &BRIEF).await;
    harness.pass(LEASE_SHORT).await;
    assert_eq!(finish(grant, Verdict::Keep(outcome("late"))).await, Finished::Written);
    assert_eq!(replayed(&engine, &operation("k")).await, outcome("late"));
}

/// Under [`Lapse::Hold`] a lapsed key is refused, and stays as it is.
pub async fn hold_refuses_a_lapsed_key(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    lapse(&*store, &payment).await;
    let before = record(&*store, payment.id()).await;
    let engine = Engine::new(Arc::clone(&store));
    let hold = Policy { on_lapse: Lapse::Hold, ..STEADY };
    assert!(matches!(claim(&engine, &payment, &hold).await, Claimed::Refused(Refusal::Unknown)));
    assert_eq!(record(&*store, payment.id()).await, before);
}

/// A renewed lease is a whole lease from the moment of the renewal, and the attempt goes on.
pub async fn a_renewal_counts_from_its_own_moment(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let engine = Engine::new(Arc::clone(&store));
    let mut grant = execute(&engine, &payment, &STEADY).await;
    let before = record(&*store, payment.id()).await;
    harness.pass(Duration::from_millis(60)).await;
    assert!(grant.renew().await.expect("the store answers"));
    let after = record(&*store, payment.id()).await;
    assert!(after.expires_at.since(before.expires_at) >= Duration::from_millis(55), "{before:?} {after:?}");
    assert_ne!(after.revision, before.revision);
    assert_eq!(
        (after.attempt, after.created_at, after.granted_at),
        (before.attempt, before.created_at, before.granted_at)
    );
    assert_eq!(finish(grant, Verdict::Keep(outcome("paid"))).await, Finished::Written);
    assert_eq!(replayed(&engine, &payment).await, outcome("paid"));
}

/// An expired key counts as never seen: the first attempt of whatever is asked now.
pub async fn an_expired_key_starts_afresh(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let engine = Engine::new(Arc::clone(&store));
    let forgetful = Policy { retention: Duration::ZERO, ..STEADY };
    let grant = execute(&engine, &payment, &forgetful).await;
    assert_eq!(finish(grant, Verdict::Keep(outcome("old"))).await, Finished::Written);
    let before = record(&*store, payment.id()).await;
    harness.pass(Duration::from_millis(5)).await;
    let another = Fingerprint { target: [9; 32], body: [9; 32] };
    let Ok(Claimed::Execute(grant)) = engine.claim(&payment, another, &STEADY).await else {
        panic!("an expired key is free")
    };
    assert_eq!(grant.attempt(), 1);
    let after = record(&*store, payment.id()).await;
    assert_eq!(after.fingerprint, another);
    assert!(after.created_at > before.created_at);
}

/// One key for two requests is refused while the first runs, after its lease and after its end.
pub async fn a_mismatch_is_refused_in_every_state(harness: &dyn Harness) {
    let store = harness.store().await;
    let engine = Engine::new(Arc::clone(&store));
    let (runs, lapsed, done) = (operation("running"), operation("lapsed"), operation("done"));
    let _held = execute(&engine, &runs, &STEADY).await;
    lapse(&*store, &lapsed).await;
    finish(execute(&engine, &done, &STEADY).await, Verdict::Keep(outcome("paid"))).await;
    for (payment, on_lapse) in
        [(&runs, Lapse::Rerun), (&lapsed, Lapse::Rerun), (&lapsed, Lapse::Hold), (&done, Lapse::Rerun)]
    {
        for (target, body) in [(true, false), (false, true), (true, true)] {
            let flip = |digest: [u8; 32], differs| if differs { digest.map(|byte| !byte) } else { digest };
            let other =
                Fingerprint { target: flip(FINGERPRINT.target, target), body: flip(FINGERPRINT.body, body) };
            let refused = engine.claim(payment, other, &Policy { on_lapse, ..STEADY }).await;
            let Ok(Claimed::Refused(refusal)) = refused else { panic!("{refused:?}") };
            assert_eq!(refusal, Refusal::Mismatch { target, body });
        }
    }
}

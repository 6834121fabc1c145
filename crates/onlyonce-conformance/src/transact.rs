//! Claims inside their user's own transaction.
//!
//! What a store's user writes in a transaction is a *note* here: see [`TransactHarness::note`].

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use onlyonce_core::record::{NewState, State};
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::transact::{ClaimedIn, Held, claim};
use onlyonce_core::{
    Claimed, Engine, Fingerprint, Finished, Grant, Lapse, Operation, Outcome, Policy, Refusal,
    StoreErrorKind, TransactionError, Transactional, Verdict, Write,
};
use tokio::sync::Barrier;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use crate::TransactHarness;
use crate::samples::*;

const POLICY: Policy = Policy { lease: LEASE, retention: RETENTION, on_lapse: Lapse::Rerun };

/// Longer than any transaction of a test is open, on a busy machine.
const PATIENT: Duration = Duration::from_secs(60);

/// Long enough for a waiting claim to have arrived where it waits.
const A_MOMENT: Duration = Duration::from_millis(300);

/// Short enough to wait for, and long enough for a claim on a busy machine.
const LEASE_SHORT: Duration = Duration::from_millis(500);

type Asked<S> = Result<(<S as Transactional>::Transaction, ClaimedIn), TransactionError>;

/// Opens a transaction and claims the key in it.
async fn ask<S: Transactional>(store: &S, payment: &Operation, policy: &Policy, wait: Duration) -> Asked<S> {
    let mut transaction = store.begin(wait).await?;
    match claim(store, &mut transaction, payment, FINGERPRINT, policy).await {
        Ok(claimed) => Ok((transaction, claimed)),
        Err(error) => {
            store.roll_back(transaction).await;
            Err(error)
        }
    }
}

/// A transaction that holds the key.
async fn hold<S: Transactional>(store: &S, payment: &Operation) -> (S::Transaction, Held) {
    match ask(store, payment, &POLICY, PATIENT).await.expect("the store answers") {
        (transaction, ClaimedIn::Execute(held)) => (transaction, held),
        (_, refused) => panic!("the key should be free: {refused:?}"),
    }
}

/// What a claim is told that is not to execute; its transaction is rolled back.
async fn told<S: Transactional>(store: &S, payment: &Operation, policy: &Policy) -> ClaimedIn {
    let (transaction, claimed) = ask(store, payment, policy, PATIENT).await.expect("the store answers");
    store.roll_back(transaction).await;
    claimed
}

async fn replayed<S: Transactional>(store: &S, payment: &Operation) -> Outcome {
    match told(store, payment, &POLICY).await {
        ClaimedIn::Replay(outcome) => outcome,
        other => panic!("there should be an outcome: {other:?}"),
    }
}

/// Claims the key, writes a note, completes and commits.
async fn execute<H: TransactHarness>(harness: &H, store: &H::Store, payment: &Operation) {
    let (mut transaction, held) = hold(store, payment).await;
    harness.note(&mut transaction, payment.key().as_str()).await;
    held.complete(store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
}

/// A claim on a task of its own, that waits for another transaction's end.
async fn waiting<S: Transactional + Clone>(
    store: &S,
    payment: &Operation,
    wait: Duration,
) -> JoinHandle<Asked<S>> {
    let (store, payment) = (store.clone(), payment.clone());
    let asking = tokio::spawn(async move { ask(&store, &payment, &POLICY, wait).await });
    sleep(A_MOMENT).await;
    assert!(!asking.is_finished(), "the claim did not wait");
    asking
}

async fn execute_with_lease<S: Transactional>(store: &S, payment: &Operation, policy: &Policy) -> Grant {
    let claimed = Engine::new(store.store()).claim(payment, FINGERPRINT, policy).await;
    match claimed.expect("the store answers") {
        Claimed::Execute(grant) => grant,
        refused => panic!("the key should be free: {refused:?}"),
    }
}

fn lapsed() -> Write {
    Write { state: NewState::Running { lease: Duration::ZERO }, ..running() }
}

/// The claim, the user's writes and the outcome are there together, for everyone.
pub async fn an_execution_is_kept_with_its_work(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let (mut transaction, held) = hold(&store, &payment).await;
    assert_eq!(held.attempt(), 1);
    harness.note(&mut transaction, "effect").await;
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    assert_eq!(harness.notes().await, ["effect"]);
    for store in [&store, &other] {
        assert_eq!(replayed(store, &payment).await, outcome("paid"));
        let record = record(&*store.store(), payment.id()).await;
        assert!(matches!(record.state, State::Done { .. }), "{record:?}");
    }
}

/// After a rollback neither the claim nor the work has happened, and the next attempt is the first.
pub async fn a_rolled_back_execution_leaves_nothing(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    for completed in [false, true] {
        let (mut transaction, held) = hold(&store, &payment).await;
        assert_eq!(held.attempt(), 1);
        harness.note(&mut transaction, "effect").await;
        if completed {
            held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
        }
        store.roll_back(transaction).await;
        assert_eq!(read(&*store.store(), payment.id()).await, None);
        assert_eq!(harness.notes().await, [""; 0]);
    }
    execute(harness, &store, &payment).await;
}

/// A transaction that is dropped, in whatever state, is rolled back.
pub async fn a_dropped_transaction_leaves_nothing(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    for state in 0..4 {
        let mut transaction = store.begin(PATIENT).await.expect("it begins");
        if state > 0 {
            let claimed = claim(&store, &mut transaction, &payment, FINGERPRINT, &POLICY).await;
            let Ok(ClaimedIn::Execute(held)) = claimed else { panic!("{state}: {claimed:?}") };
            if state > 1 {
                harness.note(&mut transaction, "effect").await;
            }
            if state > 2 {
                held.complete(&store, &mut transaction, outcome("paid")).await.expect("it is written");
            }
        }
        drop(transaction);
        // Waits for the rollback, which may come a little later.
        let (transaction, held) = hold(&other, &payment).await;
        assert_eq!(held.attempt(), 1);
        other.roll_back(transaction).await;
        assert_eq!(read(&*store.store(), payment.id()).await, None, "{state}");
        assert_eq!(harness.notes().await, [""; 0], "{state}");
    }
    execute(harness, &store, &payment).await;
    assert_eq!(harness.notes().await, ["k"]);
}

/// Until the commit nobody sees the claim or the work.
pub async fn nobody_sees_an_open_claim(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let (mut transaction, held) = hold(&store, &payment).await;
    harness.note(&mut transaction, "effect").await;
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    for store in [&store, &other] {
        assert_eq!(read(&*store.store(), payment.id()).await, None);
    }
    assert_eq!(harness.notes().await, [""; 0]);
    store.commit(transaction).await.expect("it commits");
    assert!(read(&*other.store(), payment.id()).await.is_some());
}

/// A copy waits for the first to commit, and then has its outcome.
pub async fn a_copy_waits_and_replays(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let (mut transaction, held) = hold(&store, &payment).await;
    let copy = waiting(&other, &payment, PATIENT).await;
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    let (transaction, claimed) = copy.await.expect("no panic").expect("the store answers");
    other.roll_back(transaction).await;
    let ClaimedIn::Replay(replayed) = claimed else { panic!("{claimed:?}") };
    assert_eq!(replayed, outcome("paid"));
}

/// A copy waits for the first, and executes when that one is rolled back.
pub async fn a_copy_waits_and_executes_after_a_rollback(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    for dropped in [false, true] {
        let (transaction, _) = hold(&store, &payment).await;
        let copy = waiting(&other, &payment, PATIENT).await;
        if dropped {
            drop(transaction);
        } else {
            store.roll_back(transaction).await;
        }
        let (transaction, claimed) = copy.await.expect("no panic").expect("the store answers");
        let ClaimedIn::Execute(held) = claimed else { panic!("{claimed:?}") };
        assert_eq!(held.attempt(), 1);
        other.roll_back(transaction).await;
    }
}

/// A copy gives up after its wait, and the first goes on. A store that has one lock for all keys cannot tell
/// whether it was its own key that it waited for, and says that nothing was written.
pub async fn a_copy_gives_up_after_its_wait(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let (mut transaction, held) = hold(&store, &payment).await;
    for wait in [Duration::ZERO, Duration::from_millis(400)] {
        let asked_at = Instant::now();
        let asked = ask(&other, &payment, &POLICY, wait).await.map(|(_, claimed)| claimed);
        let gave_up = match &asked {
            Err(TransactionError::Busy) => true,
            Err(TransactionError::Failed(error)) => error.kind() == StoreErrorKind::Unavailable,
            _ => false,
        };
        assert!(gave_up, "{asked:?}");
        // A store's clock may tick in other steps than this one.
        assert!(asked_at.elapsed() >= wait.mul_f64(0.9), "{:?}", asked_at.elapsed());
        assert!(asked_at.elapsed() < PATIENT / 2, "{:?}", asked_at.elapsed());
    }
    harness.note(&mut transaction, "effect").await;
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    assert_eq!(replayed(&other, &payment).await, outcome("paid"));
    assert_eq!(harness.notes().await, ["effect"]);
}

/// Of any number of copies that come at once one executes, and the others have its outcome.
pub async fn of_many_copies_one_executes(harness: &impl TransactHarness) {
    let stores = [harness.store().await, harness.other().await];
    for round in 0..8 {
        let (payment, start) = (operation(&format!("k{round}")), Arc::new(Barrier::new(8)));
        let mut copies = JoinSet::new();
        for at in 0..8 {
            let (store, payment, start) = (stores[at % 2].clone(), payment.clone(), Arc::clone(&start));
            copies.spawn(async move {
                start.wait().await;
                let asked = ask(&store, &payment, &POLICY, PATIENT).await;
                let (mut transaction, claimed) = asked.expect("the store answers");
                if let ClaimedIn::Execute(held) = &claimed {
                    let done = held.complete(&store, &mut transaction, outcome("paid"));
                    done.await.expect("the outcome is written");
                    store.commit(transaction).await.expect("it commits");
                } else {
                    store.roll_back(transaction).await;
                }
                claimed
            });
        }
        let mut executions = 0;
        for claimed in copies.join_all().await {
            match claimed {
                ClaimedIn::Execute(_) => executions += 1,
                ClaimedIn::Replay(replayed) => assert_eq!(replayed, outcome("paid")),
                ClaimedIn::Refused(refusal) => panic!("round {round}: {refusal:?}"),
            }
        }
        assert_eq!(executions, 1, "round {round}");
    }
}

/// A key that is held by a lease is refused, and stays as it is.
pub async fn a_held_key_is_refused(harness: &impl TransactHarness) {
    let (store, payment, held) = (harness.store().await, operation("k"), running());
    insert(&*store.store(), &payment, &held).await;
    let claimed = told(&store, &payment, &POLICY).await;
    assert!(matches!(claimed, ClaimedIn::Refused(Refusal::InFlight { .. })), "{claimed:?}");
    assert_eq!(record(&*store.store(), payment.id()).await.revision, held.revision);
}

/// A lapsed key is taken over as the next attempt, or refused where it is to be held.
pub async fn a_lapsed_key_is_taken_over_or_refused(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    insert(&*store.store(), &payment, &lapsed()).await;
    let claimed = told(&store, &payment, &Policy { on_lapse: Lapse::Hold, ..POLICY }).await;
    assert!(matches!(claimed, ClaimedIn::Refused(Refusal::Unknown)), "{claimed:?}");
    let (mut transaction, held) = hold(&store, &payment).await;
    assert_eq!(held.attempt(), 2);
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    assert_eq!(record(&*store.store(), payment.id()).await.attempt, 2);
    assert_eq!(replayed(&store, &payment).await, outcome("paid"));
}

/// An expired key counts as never seen, whoever asked for what.
pub async fn an_expired_key_starts_afresh(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let stale = Write { fingerprint: Fingerprint { target: [7; 32], body: [7; 32] }, ..expired() };
    insert(&*store.store(), &payment, &Write { attempt: 9, ..stale }).await;
    let (mut transaction, held) = hold(&store, &payment).await;
    assert_eq!(held.attempt(), 1);
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    assert_eq!(record(&*store.store(), payment.id()).await.fingerprint, FINGERPRINT);
}

/// A take-over that is rolled back leaves the record that it took over.
pub async fn a_rolled_back_take_over_leaves_the_record(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    insert(&*store.store(), &payment, &lapsed()).await;
    let before = record(&*store.store(), payment.id()).await;
    let (mut transaction, held) = hold(&store, &payment).await;
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.roll_back(transaction).await;
    assert_eq!(record(&*store.store(), payment.id()).await, before);
}

/// Two that take over one key: the second waits for the first, and then has its outcome.
pub async fn a_copy_of_a_take_over_waits(harness: &impl TransactHarness) {
    let (store, other) = (harness.store().await, harness.other().await);
    for (key, left) in [("lapsed", lapsed()), ("expired", expired())] {
        let payment = operation(key);
        insert(&*store.store(), &payment, &left).await;
        let (mut transaction, held) = hold(&store, &payment).await;
        let copy = waiting(&other, &payment, PATIENT).await;
        held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
        store.commit(transaction).await.expect("it commits");
        let (transaction, claimed) = copy.await.expect("no panic").expect("the store answers");
        other.roll_back(transaction).await;
        let ClaimedIn::Replay(replayed) = claimed else { panic!("{key}: {claimed:?}") };
        assert_eq!(replayed, outcome("paid"));
    }
}

/// A key that was used for another request is refused.
pub async fn a_mismatch_is_refused(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    execute(harness, &store, &payment).await;
    let mut transaction = store.begin(PATIENT).await.expect("it begins");
    let other = Fingerprint { body: [9; 32], ..FINGERPRINT };
    let claimed = claim(&store, &mut transaction, &payment, other, &POLICY).await.expect("it answers");
    store.roll_back(transaction).await;
    let mismatch = Refusal::Mismatch { target: false, body: true };
    assert!(matches!(claimed, ClaimedIn::Refused(refusal) if refusal == mismatch), "{claimed:?}");
}

/// What one way in has completed the other replays.
pub async fn both_ways_in_see_each_others_outcomes(harness: &impl TransactHarness) {
    let (store, other) = (harness.store().await, harness.other().await);
    let engine = Engine::new(other.store());
    let (leased, transacted) = (operation("leased"), operation("transacted"));
    let claimed = engine.claim(&leased, FINGERPRINT, &POLICY).await.expect("the store answers");
    let Claimed::Execute(grant) = claimed else { panic!("{claimed:?}") };
    grant.finish(Verdict::Keep(outcome("leased"))).await.expect("it is recorded");
    assert_eq!(replayed(&store, &leased).await, outcome("leased"));
    execute(harness, &store, &transacted).await;
    let claimed = engine.claim(&transacted, FINGERPRINT, &POLICY).await.expect("the store answers");
    assert!(matches!(&claimed, Claimed::Replay(replayed) if *replayed == outcome("paid")), "{claimed:?}");
}

/// An outcome comes back as it was, whatever its bytes.
pub async fn an_outcome_survives_byte_for_byte(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let body: Vec<u8> = (0..1 << 20).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let kept = Outcome { status: u16::MAX, head: vec![0, 0xff, b'\'', b'\\'].into(), body: body.into() };
    let (mut transaction, held) = hold(&store, &payment).await;
    held.complete(&store, &mut transaction, kept.clone()).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    assert!(replayed(&store, &payment).await == kept);
}

/// Times count from the writes, on the store's clock.
pub async fn times_count_from_the_writes(harness: &impl TransactHarness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let outside = store.store();
    let before = insert(&*outside, &operation("before"), &running()).await;
    let (mut transaction, held) = hold(&store, &payment).await;
    harness.pass(Duration::from_millis(60)).await;
    held.complete(&store, &mut transaction, outcome("paid")).await.expect("the outcome is written");
    store.commit(transaction).await.expect("it commits");
    let record = record(&*outside, payment.id()).await;
    let State::Done { completed_at, .. } = record.state else { panic!("{record:?}") };
    assert!(before <= record.created_at, "{before:?} {record:?}");
    assert_eq!(record.created_at, record.granted_at);
    // Half a millisecond may be lost in rounding, and what the transaction itself took is on top.
    assert!(completed_at.since(record.granted_at) >= Duration::from_millis(55), "{record:?}");
    assert_eq!(record.expires_at, completed_at.plus(RETENTION));
}

/// Inside a transaction an insert and a replace compare as they do outside.
pub async fn an_insert_and_a_replace_compare(harness: &impl TransactHarness) {
    let (store, there, mine, absent) =
        (harness.store().await, operation("there"), operation("mine"), operation("absent"));
    let (first, own) = (running(), running());
    let at = insert(&*store.store(), &there, &first).await;
    let mut transaction = store.begin(PATIENT).await.expect("it begins");
    let inserted = store.insert(&mut transaction, &there, running()).await.expect("it answers");
    let Inserted::Exists(seen) = inserted else { panic!("{inserted:?}") };
    assert_eq!(seen.record, first.clone().at(at));
    assert!(seen.now >= at, "{:?} is before {at:?}", seen.now);
    let lost = store.replace(&mut transaction, there.id(), fresh_revision(), running()).await;
    assert!(
        matches!(&lost, Ok(Replaced::Lost(Some(seen))) if seen.record == first.clone().at(at)),
        "{lost:?}"
    );
    let lost = store.replace(&mut transaction, absent.id(), fresh_revision(), running()).await;
    assert!(matches!(lost, Ok(Replaced::Lost(None))), "{lost:?}");
    // A transaction sees its own writes.
    let inserted = store.insert(&mut transaction, &mine, own.clone()).await.expect("it answers");
    let Inserted::New(at) = inserted else { panic!("{inserted:?}") };
    let again = store.insert(&mut transaction, &mine, running()).await;
    assert!(matches!(&again, Ok(Inserted::Exists(seen)) if seen.record == own.clone().at(at)), "{again:?}");
    let replaced = store.replace(&mut transaction, there.id(), first.revision, done(outcome("paid"))).await;
    assert!(matches!(replaced, Ok(Replaced::Written(_))), "{replaced:?}");
    store.commit(transaction).await.expect("it commits");
    assert_eq!(record(&*store.store(), mine.id()).await, own.at(at));
    assert!(matches!(record(&*store.store(), there.id()).await.state, State::Done { .. }));
}

/// A commit without a claim keeps the user's work.
pub async fn a_transaction_without_a_claim_commits(harness: &impl TransactHarness) {
    let store = harness.store().await;
    let mut transaction = store.begin(PATIENT).await.expect("it begins");
    harness.note(&mut transaction, "effect").await;
    store.commit(transaction).await.expect("it commits");
    assert_eq!(harness.notes().await, ["effect"]);
}

/// A transaction that claims no key is its user's like any other.
pub async fn an_opened_transaction_commits_or_leaves_nothing(harness: &impl TransactHarness) {
    let store = harness.store().await;
    for (line, ends) in [("committed", 0), ("rolled back", 1), ("dropped", 2)] {
        let mut transaction = store.open().await.expect("it opens");
        harness.note(&mut transaction, line).await;
        match ends {
            0 => store.commit(transaction).await.expect("it commits"),
            1 => store.roll_back(transaction).await,
            _ => drop(transaction),
        }
    }
    assert_eq!(harness.notes().await, ["committed"]);
}

/// A grant is completed beside the work of the transaction, and both are there for everyone or neither is.
pub async fn a_grant_is_completed_beside_its_work(harness: &impl TransactHarness) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let mut grant = execute_with_lease(&store, &payment, &POLICY).await;
    // Undone with its transaction, it is as if it had not been tried.
    for _ in 0..2 {
        let mut transaction = store.open().await.expect("it opens");
        harness.note(&mut transaction, "undone").await;
        let completed = grant.complete_in(&store, &mut transaction, outcome("undone")).await;
        assert_eq!(completed.expect("the store answers"), Finished::Written);
        let seen = record(&*other.store(), payment.id()).await;
        assert!(matches!(seen.state, State::Running { .. }), "seen before the commit: {seen:?}");
        store.roll_back(transaction).await;
        assert!(grant.renew().await.expect("the store answers"), "the grant is still held");
    }
    let mut transaction = store.open().await.expect("it opens");
    harness.note(&mut transaction, "effect").await;
    let completed = grant.complete_in(&store, &mut transaction, outcome("paid")).await;
    assert_eq!(completed.expect("the store answers"), Finished::Written);
    store.commit(transaction).await.expect("it commits");
    assert_eq!(harness.notes().await, ["effect"]);
    for store in [&store, &other] {
        assert_eq!(replayed(store, &payment).await, outcome("paid"));
    }
    // What is done stays done, whatever its holder tries afterwards.
    let ended = grant.finish(Verdict::Again).await.expect("the store answers");
    assert_eq!(ended, Finished::LeaseLost);
    assert_eq!(replayed(&store, &payment).await, outcome("paid"));
}

/// A grant that was lost to another holder, whether that one is at it or has finished, completes nothing.
pub async fn a_stale_grant_completes_nothing(harness: &impl TransactHarness) {
    let (store, other) = (harness.store().await, harness.other().await);
    for successor_finishes in [false, true] {
        let payment = operation(if successor_finishes { "finished" } else { "held" });
        let brief = Policy { lease: LEASE_SHORT, ..POLICY };
        let mut stale = execute_with_lease(&store, &payment, &brief).await;
        harness.pass(LEASE_SHORT * 2).await;
        let successor = execute_with_lease(&other, &payment, &POLICY).await;
        assert_eq!((stale.attempt(), successor.attempt()), (1, 2));
        if successor_finishes {
            let kept = successor.finish(Verdict::Keep(outcome("successor"))).await;
            assert_eq!(kept.expect("the store answers"), Finished::Written);
        }
        let before = record(&*store.store(), payment.id()).await;
        let mut transaction = store.open().await.expect("it opens");
        let completed = stale.complete_in(&store, &mut transaction, outcome("stale")).await;
        assert_eq!(completed.expect("the store answers"), Finished::LeaseLost);
        // Even if its user does not look.
        store.commit(transaction).await.expect("it commits");
        assert_eq!(record(&*store.store(), payment.id()).await, before);
    }
}

/// Whoever leaves while a transaction is being opened, at whatever point, leaves none open: the next ones
/// claim, commit and are seen.
pub async fn a_dropped_begin_leaves_no_transaction(harness: &impl TransactHarness) {
    let (store, other) = (harness.store().await, harness.other().await);
    for round in 0..24_u32 {
        {
            let mut beginning = pin!(store.begin(PATIENT));
            for _ in 0..=round % 4 {
                let polled = beginning.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                if matches!(polled, Poll::Ready(_)) {
                    break;
                }
                sleep(Duration::from_micros(u64::from(round) * 100)).await;
            }
        }
        let payment = operation(&format!("k{round}"));
        execute(harness, &store, &payment).await;
        assert!(read(&*other.store(), payment.id()).await.is_some(), "round {round}");
        assert_eq!(replayed(&other, &payment).await, outcome("paid"));
    }
    assert_eq!(harness.notes().await.len(), 24);
}

/// Whoever leaves in the middle of a claim drops its transaction with it, at whatever point.
pub async fn a_dropped_claim_leaves_nothing(harness: &impl TransactHarness) {
    let (store, other) = (harness.store().await, harness.other().await);
    for round in 0..24_u32 {
        let payment = operation(&format!("k{round}"));
        {
            let mut transaction = store.begin(PATIENT).await.expect("it begins");
            let mut claiming = pin!(claim(&store, &mut transaction, &payment, FINGERPRINT, &POLICY));
            for _ in 0..=round % 6 {
                let polled = claiming.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                if matches!(polled, Poll::Ready(_)) {
                    break;
                }
                sleep(Duration::from_micros(u64::from(round) * 100)).await;
            }
        }
        let (transaction, held) = hold(&other, &payment).await;
        assert_eq!(held.attempt(), 1, "round {round}");
        other.roll_back(transaction).await;
        assert_eq!(read(&*store.store(), payment.id()).await, None, "round {round}");
        execute(harness, &store, &payment).await;
        assert_eq!(replayed(&other, &payment).await, outcome("paid"));
    }
}

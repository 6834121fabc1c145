//! What the machine decides one millisecond before, at and after every boundary, and how a write
//! becomes a record.

use std::time::Duration;

use bytes::Bytes;

use super::model::Rules;
use crate::machine::{self, Claim, Finish, Lapse, Policy, Refusal, Verdict};
use crate::record::{Fingerprint, NewState, Outcome, Record, Revision, Seen, State, Timestamp, Write};

const ASKED: Fingerprint = Fingerprint { target: [1; 32], body: [1; 32] };
const MINE: Revision = Revision(1);
const NEXT: Revision = Revision(2);

fn policy(on_lapse: Lapse) -> Policy {
    Policy { lease: Duration::from_millis(100), retention: Duration::from_millis(200), on_lapse }
}

fn outcome() -> Outcome {
    Outcome { status: 201, head: Bytes::from_static(b"head"), body: Bytes::from_static(b"paid") }
}

/// The third attempt on a key first granted at 500.
fn running() -> Record {
    Record {
        fingerprint: ASKED,
        revision: MINE,
        attempt: 3,
        created_at: Timestamp(500),
        granted_at: Timestamp(900),
        state: State::Running { lease_until: Timestamp(1000) },
        expires_at: Timestamp(1200),
    }
}

fn done() -> Record {
    let state = State::Done { outcome: outcome(), completed_at: Timestamp(1000) };
    Record { state, ..running() }
}

/// The record, the store's clock, and the answers.
type Row = (fn() -> Record, i64, [&'static str; 5]);

/// What a claim is answered, by the store's clock.
///
/// | the columns | |
/// |---|---|
/// | 1, 2 | the same request, under `rerun` and under `hold` |
/// | 3, 4, 5 | another target, another body, both; the same under `rerun` and `hold` |
#[rustfmt::skip]
const ANSWERS: [Row; 17] = [
    // The clock was set back to before the grant.
    (running,  899, ["in flight for 0, 101 left",   "in flight for 0, 101 left",   "differs: target", "differs: body", "differs: both"]),
    (running,  900, ["in flight for 0, 100 left",   "in flight for 0, 100 left",   "differs: target", "differs: body", "differs: both"]),
    (running,  901, ["in flight for 1, 99 left",    "in flight for 1, 99 left",    "differs: target", "differs: body", "differs: both"]),
    (running,  999, ["in flight for 99, 1 left",    "in flight for 99, 1 left",    "differs: target", "differs: body", "differs: both"]),
    (running, 1000, ["take as attempt 4 since 500", "unknown",                     "differs: target", "differs: body", "differs: both"]),
    (running, 1001, ["take as attempt 4 since 500", "unknown",                     "differs: target", "differs: body", "differs: both"]),
    (running, 1199, ["take as attempt 4 since 500", "unknown",                     "differs: target", "differs: body", "differs: both"]),
    (running, 1200, ["take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now"]),
    (running, 1201, ["take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now"]),
    (done,     899, ["replay",                      "replay",                      "differs: target", "differs: body", "differs: both"]),
    (done,     999, ["replay",                      "replay",                      "differs: target", "differs: body", "differs: both"]),
    (done,    1000, ["replay",                      "replay",                      "differs: target", "differs: body", "differs: both"]),
    (done,    1001, ["replay",                      "replay",                      "differs: target", "differs: body", "differs: both"]),
    (done,    1199, ["replay",                      "replay",                      "differs: target", "differs: body", "differs: both"]),
    (done,    1200, ["take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now"]),
    (done,    1201, ["take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now", "take as attempt 1 since now"]),
    // An exhausted counter stays where it is.
    (|| Record { attempt: u32::MAX, ..running() }, 1000, ["take as attempt 4294967295 since 500", "unknown", "differs: target", "differs: body", "differs: both"]),
];

/// Compares what the rules answer with the table.
pub(super) fn table(rules: &Rules) -> Result<(), String> {
    let other = [9; 32];
    let asked = [
        ASKED,
        Fingerprint { target: other, ..ASKED },
        Fingerprint { body: other, ..ASKED },
        Fingerprint { target: other, body: other },
    ];
    for (record, now, [rerun, hold, target, body, both]) in ANSWERS {
        for (on_lapse, same) in [(Lapse::Rerun, rerun), (Lapse::Hold, hold)] {
            for (fingerprint, expected) in asked.into_iter().zip([same, target, body, both]) {
                let seen = Seen { record: record(), now: Timestamp(now) };
                let policy = policy(on_lapse);
                let answer = shown((rules.claim)(&seen, fingerprint, NEXT, &policy), fingerprint, &policy);
                if answer != expected {
                    return Err(format!(
                        "{:?} at {now} under {on_lapse:?}: {answer}, not {expected}",
                        seen.record
                    ));
                }
            }
        }
    }
    Ok(())
}

/// A claim's answer in words; a grant's other fields must be as the policy says.
fn shown(claim: Claim, fingerprint: Fingerprint, policy: &Policy) -> String {
    match claim {
        Claim::Replay(replayed) if replayed == outcome() => "replay".to_owned(),
        Claim::Replay(_) => "replay of something else".to_owned(),
        Claim::Refuse(Refusal::Mismatch { target: true, body: true }) => "differs: both".to_owned(),
        Claim::Refuse(Refusal::Mismatch { target: true, body: false }) => "differs: target".to_owned(),
        Claim::Refuse(Refusal::Mismatch { target: false, body: true }) => "differs: body".to_owned(),
        Claim::Refuse(Refusal::Mismatch { target: false, body: false }) => "differs: nothing".to_owned(),
        Claim::Refuse(Refusal::Unknown) => "unknown".to_owned(),
        Claim::Refuse(Refusal::InFlight { running_for, lease_left }) => {
            format!("in flight for {}, {} left", running_for.as_millis(), lease_left.as_millis())
        }
        Claim::Take { expected, write } => {
            let fixed = Write { attempt: 1, created_at: None, ..write.clone() };
            if expected != MINE || fixed != machine::grant(fingerprint, NEXT, policy) {
                return format!("take over {expected:?} with {write:?}");
            }
            let since = write.created_at.map_or("now".to_owned(), |at| at.0.to_string());
            format!("take as attempt {} since {since}", write.attempt)
        }
    }
}

/// Compares the writes of a holder with what they must be.
pub(super) fn writes(rules: &Rules) -> Result<(), String> {
    let policy = policy(Lapse::Rerun);
    let renewal = Write {
        fingerprint: ASKED,
        revision: NEXT,
        attempt: 3,
        created_at: Some(Timestamp(500)),
        granted_at: Some(Timestamp(900)),
        state: NewState::Running { lease: policy.lease },
        retention: policy.retention,
    };
    let completion = Write { state: NewState::Done(outcome()), ..renewal };
    let over = Write { state: NewState::Running { lease: Duration::ZERO }, ..renewal };
    let first = Write { attempt: 1, created_at: None, granted_at: None, ..renewal.clone() };
    // When the held lease ends, and whether it has, makes no difference: the store decides by revision.
    let lapsed = Record {
        state: State::Running { lease_until: Timestamp(i64::MIN) },
        expires_at: Timestamp(i64::MIN),
        ..running()
    };
    for held in [running(), lapsed] {
        let finish = |verdict| (rules.finish)(&held, verdict, NEXT, &policy);
        let same = (rules.renew)(&held, NEXT, &policy) == renewal
            && finish(Verdict::Keep(outcome())) == Finish::Complete(completion.clone())
            && finish(Verdict::Release) == Finish::Remove
            && finish(Verdict::Leave) == Finish::Nothing
            && finish(Verdict::Again) == Finish::Complete(over.clone());
        if !same {
            return Err(format!("the writes of {held:?}"));
        }
    }
    if (rules.grant)(ASKED, NEXT, &policy) != first {
        return Err("the first grant".to_owned());
    }
    Ok(())
}

#[test]
fn every_claim_is_answered_as_the_table_says() {
    assert_eq!(table(&Rules::REAL), Ok(()));
}

#[test]
fn a_holder_writes_what_it_was_granted() {
    assert_eq!(writes(&Rules::REAL), Ok(()));
}

#[test]
fn a_write_becomes_a_record_on_the_stores_clock() {
    let policy = policy(Lapse::Rerun);
    let granted = machine::grant(ASKED, MINE, &policy).at(Timestamp(900));
    assert_eq!(granted, Record { attempt: 1, created_at: Timestamp(900), ..running() });

    let renewed = machine::renew(&granted, NEXT, &policy).at(Timestamp(950));
    let state = State::Running { lease_until: Timestamp(1050) };
    assert_eq!(renewed, Record { revision: NEXT, state, expires_at: Timestamp(1250), ..granted });

    let Finish::Complete(write) = machine::finish(&granted, Verdict::Keep(outcome()), NEXT, &policy) else {
        panic!("an outcome completes the key");
    };
    let state = State::Done { outcome: outcome(), completed_at: Timestamp(1000) };
    // Retention counts from the completion now, not from the end of the lease.
    assert_eq!(
        write.at(Timestamp(1000)),
        Record { revision: NEXT, state, expires_at: Timestamp(1200), ..granted }
    );
}

#[test]
fn a_renewal_after_the_clock_was_set_back_still_counts_from_the_stores_now() {
    let renewed = machine::renew(&running(), NEXT, &policy(Lapse::Rerun)).at(Timestamp(100));
    assert_eq!(renewed.state, State::Running { lease_until: Timestamp(200) });
    assert_eq!(renewed.expires_at, Timestamp(400));
    assert_eq!((renewed.created_at, renewed.granted_at), (Timestamp(500), Timestamp(900)));
}

#[test]
fn zero_is_a_value() {
    let zero = Duration::ZERO;
    let policy = |lease, retention| Policy { lease, retention, on_lapse: Lapse::Hold };
    let answer = |record: Record, policy: &Policy, now| {
        shown(machine::claim(&Seen { record, now: Timestamp(now) }, ASKED, NEXT, policy), ASKED, policy)
    };
    let day = Duration::from_secs(86_400);

    // A lease of zero is over at once, and is remembered for its retention.
    let at_once = policy(zero, day);
    let record = machine::grant(ASKED, MINE, &at_once).at(Timestamp(0));
    assert_eq!(answer(record, &at_once, 0), "unknown");

    // A retention of zero forgets the key when its lease ends …
    let forgetful = policy(Duration::from_millis(5), zero);
    let record = machine::grant(ASKED, MINE, &forgetful).at(Timestamp(0));
    assert_eq!(answer(record.clone(), &forgetful, 4), "in flight for 4, 1 left");
    assert_eq!(answer(record.clone(), &forgetful, 5), "take as attempt 1 since now");
    // … and when it is done.
    let Finish::Complete(write) = machine::finish(&record, Verdict::Keep(outcome()), MINE, &forgetful) else {
        panic!("an outcome completes the key");
    };
    assert_eq!(answer(write.at(Timestamp(3)), &forgetful, 3), "take as attempt 1 since now");
}

#[test]
fn times_beyond_the_clock_are_the_far_future() {
    let forever = Policy { lease: Duration::MAX, retention: Duration::MAX, on_lapse: Lapse::Rerun };
    let far = Timestamp(i64::MAX);
    for now in [0, 1, i64::MAX - 1, i64::MAX] {
        let record = machine::grant(ASKED, MINE, &forever).at(Timestamp(now));
        assert_eq!((record.state, record.expires_at), (State::Running { lease_until: far }, far));
    }
    let day = Policy { lease: Duration::from_millis(10), ..forever };
    let record = machine::grant(ASKED, MINE, &day).at(Timestamp(i64::MAX - 5));
    assert_eq!(record.state, State::Running { lease_until: far });

    assert_eq!(Timestamp(i64::MAX).since(Timestamp(i64::MIN)), Duration::from_millis(i64::MAX as u64));
    assert_eq!(Timestamp(i64::MIN).since(Timestamp(i64::MAX)), Duration::ZERO);
    assert_eq!(Timestamp(7).since(Timestamp(7)), Duration::ZERO);
    // Less than a millisecond is nothing.
    assert_eq!(Timestamp(7).plus(Duration::from_micros(999)), Timestamp(7));
}

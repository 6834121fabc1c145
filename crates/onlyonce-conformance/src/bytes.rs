//! Every field comes back as it was written.

use std::time::Duration;

use bytes::Bytes;
use onlyonce_core::record::{NewState, State};
use onlyonce_core::{Fingerprint, Key, Operation, Outcome, Revision, Timestamp, Write};

use crate::Harness;
use crate::samples::*;

async fn round_trip(harness: &dyn Harness, write: Write) {
    let (store, other, payment) = (harness.store().await, harness.other().await, operation("k"));
    let at = insert(&*store, &payment, &write).await;
    assert_eq!(record(&*store, payment.id()).await, write.clone().at(at));
    assert_eq!(record(&*other, payment.id()).await, write.at(at));
}

/// A body is bytes, not text: every byte value survives, NUL and 0xFF among them.
pub async fn a_binary_body_survives(harness: &dyn Harness) {
    let bytes: Vec<u8> = [0, 0xff].into_iter().chain(0..=0xff).chain([0xff, 0]).collect();
    round_trip(harness, done(Outcome { status: 200, head: bytes.clone().into(), body: bytes.into() })).await;
}

/// An outcome without head and body is an outcome, and not a key that still runs.
pub async fn an_empty_outcome_is_not_a_missing_one(harness: &dyn Harness) {
    let empty = Outcome { status: 204, head: Bytes::new(), body: Bytes::new() };
    round_trip(harness, done(empty.clone())).await;
    let record = record(&*harness.store().await, operation("k").id()).await;
    assert!(matches!(record.state, State::Done { outcome, .. } if outcome == empty));
}

/// A body of 1 MiB, the largest that is recorded by default, survives.
pub async fn a_large_body_survives(harness: &dyn Harness) {
    let body: Vec<u8> = (0..1_048_576_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    round_trip(harness, done(outcome(body))).await;
}

/// The smallest and the largest numbers survive.
pub async fn numbers_survive_at_their_limits(harness: &dyn Harness) {
    let store = harness.store().await;
    for (key, revision, attempt, status) in [
        ("least", 0, 1, 0),
        ("most", u128::MAX, u32::MAX, u16::MAX),
        ("sign bits", 1 << 127, 1 << 31, 1 << 15),
    ] {
        let write =
            Write { revision: Revision(revision), attempt, ..done(Outcome { status, ..outcome("paid") }) };
        let at = insert(&*store, &operation(key), &write).await;
        assert_eq!(record(&*store, operation(key).id()).await, write.at(at), "{key}");
    }
}

/// Times beyond the store's reach become the far future and do not wrap round.
pub async fn the_far_future_survives(harness: &dyn Harness) {
    let endless = NewState::Running { lease: Duration::MAX };
    round_trip(harness, Write { state: endless, retention: Duration::MAX, ..running() }).await;
    let record = record(&*harness.store().await, operation("k").id()).await;
    assert_eq!(record.state, State::Running { lease_until: Timestamp(i64::MAX) });
    assert_eq!(record.expires_at, Timestamp(i64::MAX));
}

/// Both digests survive, each in its place.
pub async fn fingerprints_survive(harness: &dyn Harness) {
    let target = std::array::from_fn(|at| at as u8);
    let body = std::array::from_fn(|at| 0xff - at as u8);
    round_trip(harness, Write { fingerprint: Fingerprint { target, body }, ..running() }).await;
}

/// Namespace, endpoint and caller are any text: nothing in it is taken for syntax, and no two run together.
pub async fn any_text_may_stand_in_a_scope(harness: &dyn Harness) {
    let store = harness.store().await;
    let long = "x".repeat(20_000);
    let texts = [
        "",
        " ",
        "'",
        "\"; DROP TABLE idempotency_keys; --",
        "\0",
        "a\0b",
        "é\u{1f980}\u{202e}",
        "%_*?{}",
        &long,
    ];
    let mut written = Vec::new();
    for text in texts {
        for at in 0..3 {
            let part = |place| if place == at { text } else { "-" };
            let operation = Operation::new(part(0), part(1), part(2), Key::new("k'\"").expect("a key"));
            let write = running();
            insert(&*store, &operation, &write).await;
            written.push((operation.id(), write.revision));
        }
    }
    for (id, revision) in written {
        assert_eq!(record(&*store, id).await.revision, revision);
    }
}

/// A replace leaves nothing behind of what it replaces.
pub async fn a_replace_changes_every_field(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let first = done(outcome("first"));
    insert(&*store, &payment, &first).await;
    let second = Write {
        fingerprint: Fingerprint { target: [3; 32], body: [4; 32] },
        attempt: 7,
        created_at: Some(Timestamp(1)),
        granted_at: Some(Timestamp(2)),
        ..running()
    };
    let at = replace(&*store, payment.id(), first.revision, &second).await;
    assert_eq!(record(&*store, payment.id()).await, second.clone().at(at));
    let third = done(Outcome { status: 500, head: Bytes::new(), body: "third".into() });
    let at = replace(&*store, payment.id(), second.revision, &third).await;
    assert_eq!(record(&*store, payment.id()).await, third.at(at));
}

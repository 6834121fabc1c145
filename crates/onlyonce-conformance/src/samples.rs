//! What the clauses write.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use onlyonce_core::record::{NewState, Record, Seen};
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Fingerprint, Id, Key, Operation, Outcome, Revision, Store, Timestamp, Write};

/// Longer than any test runs.
pub(crate) const LEASE: Duration = Duration::from_secs(3_600);
pub(crate) const RETENTION: Duration = Duration::from_secs(86_400);

pub(crate) const FINGERPRINT: Fingerprint = Fingerprint { target: [0x11; 32], body: [0x22; 32] };

pub(crate) fn operation(key: &str) -> Operation {
    Operation::new("default", "POST /payments", "ann", Key::new(key).expect("a well-formed key"))
}

pub(crate) fn fresh_revision() -> Revision {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    Revision(u128::from(NEXT.fetch_add(1, Ordering::Relaxed)) << 64 | 0xfeed)
}

pub(crate) fn running() -> Write {
    Write {
        fingerprint: FINGERPRINT,
        revision: fresh_revision(),
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: LEASE },
        retention: RETENTION,
    }
}

/// Expired from the moment it is written, and still there.
pub(crate) fn expired() -> Write {
    Write { state: NewState::Running { lease: Duration::ZERO }, retention: Duration::ZERO, ..running() }
}

pub(crate) fn done(outcome: Outcome) -> Write {
    Write { state: NewState::Done(outcome), ..running() }
}

pub(crate) fn outcome(body: impl Into<Bytes>) -> Outcome {
    Outcome { status: 201, head: Bytes::from_static(b"\x01\x01head"), body: body.into() }
}

pub(crate) async fn insert(store: &dyn Store, operation: &Operation, write: &Write) -> Timestamp {
    match store.insert(operation, write.clone()).await.expect("the store inserts") {
        Inserted::New(at) => at,
        Inserted::Exists(seen) => panic!("inserted over {seen:?}"),
    }
}

pub(crate) async fn replace(store: &dyn Store, id: Id, expected: Revision, write: &Write) -> Timestamp {
    match store.replace(id, expected, write.clone()).await.expect("the store replaces") {
        Replaced::Written(at) => at,
        Replaced::Lost(seen) => panic!("lost against {seen:?}"),
    }
}

pub(crate) async fn read(store: &dyn Store, id: Id) -> Option<Seen> {
    store.read(id).await.expect("the store reads")
}

/// The record under this id; there must be one.
pub(crate) async fn record(store: &dyn Store, id: Id) -> Record {
    read(store, id).await.expect("there is a record").record
}

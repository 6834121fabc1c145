//! Durations, and the store's idea of now.

use std::time::Duration;

use onlyonce_core::record::State;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Timestamp, Write};

use crate::Harness;
use crate::samples::*;

/// A grant's times count from the moment of the write, on the store's clock.
pub async fn a_grant_counts_from_the_write(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let at = insert(&*store, &payment, &running()).await;
    let record = record(&*store, payment.id()).await;
    assert_eq!((record.created_at, record.granted_at), (at, at));
    assert_eq!(record.state, State::Running { lease_until: at.plus(LEASE) });
    assert_eq!(record.expires_at, at.plus(LEASE).plus(RETENTION));
}

/// An outcome's times count from the moment of the write, on the store's clock.
pub async fn an_outcome_counts_from_the_write(harness: &dyn Harness) {
    let (store, payment, first) = (harness.store().await, operation("k"), running());
    insert(&*store, &payment, &first).await;
    harness.pass(Duration::from_millis(5)).await;
    let at = replace(&*store, payment.id(), first.revision, &done(outcome("paid"))).await;
    let record = record(&*store, payment.id()).await;
    assert!(matches!(record.state, State::Done { completed_at, .. } if completed_at == at));
    assert_eq!(record.expires_at, at.plus(RETENTION));
}

/// Times that a write brings along are kept as they are.
pub async fn given_times_are_kept(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let (created_at, granted_at) = (Timestamp(1_234_567_890_123), Timestamp(-1));
    let write = Write { created_at: Some(created_at), granted_at: Some(granted_at), ..done(outcome("paid")) };
    insert(&*store, &payment, &write).await;
    let record = record(&*store, payment.id()).await;
    assert_eq!((record.created_at, record.granted_at), (created_at, granted_at));
}

/// Whoever sees a record is told the store's clock, which is not before the record was written.
pub async fn now_comes_with_what_is_seen(harness: &dyn Harness) {
    let (store, payment) = (harness.store().await, operation("k"));
    let at = insert(&*store, &payment, &running()).await;
    harness.pass(Duration::from_millis(20)).await;
    let later = at.plus(Duration::from_millis(15));
    let read = read(&*store, payment.id()).await.expect("there is a record");
    let Ok(Inserted::Exists(inserted)) = store.insert(&payment, running()).await else { panic!() };
    let Ok(Replaced::Lost(Some(lost))) = store.replace(payment.id(), fresh_revision(), running()).await
    else {
        panic!()
    };
    for seen in [&read, &inserted, &lost] {
        assert!(seen.now >= later, "{:?} is before {later:?}", seen.now);
        assert_eq!(seen.record.created_at, at);
    }
}

/// The store's clock goes as fast as time does.
pub async fn time_passes(harness: &dyn Harness) {
    let store = harness.store().await;
    let before = insert(&*store, &operation("before"), &running()).await;
    harness.pass(Duration::from_millis(60)).await;
    let after = insert(&*store, &operation("after"), &running()).await;
    // Half a millisecond may be lost in rounding, and none of it to another time zone.
    assert!(after.since(before) >= Duration::from_millis(55), "{before:?} to {after:?}");
    assert!(after.since(before) <= Duration::from_secs(60), "{before:?} to {after:?}");
}

/// From write to write the store's clock does not go back, whichever handle writes.
pub async fn time_never_goes_back(harness: &dyn Harness) {
    let (store, other) = (harness.store().await, harness.other().await);
    let mut latest = Timestamp(i64::MIN);
    for round in 0..50 {
        let store = if round % 2 == 0 { &store } else { &other };
        let payment = operation(&format!("k{round}"));
        let write = running();
        let inserted = insert(&**store, &payment, &write).await;
        let replaced = replace(&**store, payment.id(), write.revision, &running()).await;
        assert!(latest <= inserted && inserted <= replaced, "{latest:?} {inserted:?} {replaced:?}");
        latest = replaced;
    }
}

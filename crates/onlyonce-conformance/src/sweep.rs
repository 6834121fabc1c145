//! Freeing space.

use std::time::Duration;

use onlyonce_core::Write;
use onlyonce_core::record::NewState;

use crate::Harness;
use crate::samples::*;

/// A sweep removes expired records and says how many; when there are none it removes none.
pub async fn it_removes_what_is_expired(harness: &dyn Harness) {
    let store = harness.store().await;
    assert_eq!(store.sweep(1_000).await.expect("the store sweeps"), 0);
    for key in ["a", "b", "c"] {
        insert(&*store, &operation(key), &expired()).await;
    }
    assert_eq!(store.sweep(1_000).await.expect("the store sweeps"), 3);
    for key in ["a", "b", "c"] {
        assert_eq!(read(&*store, operation(key).id()).await, None);
    }
    assert_eq!(store.sweep(1_000).await.expect("the store sweeps"), 0);
}

/// A sweep spares what is running, lapsed or done and has not expired.
pub async fn it_spares_what_is_not(harness: &dyn Harness) {
    let store = harness.store().await;
    let lapsed = Write { state: NewState::Running { lease: Duration::ZERO }, ..running() };
    let kept = [("running", running()), ("lapsed", lapsed), ("done", done(outcome("paid")))];
    for (key, write) in &kept {
        insert(&*store, &operation(key), write).await;
    }
    insert(&*store, &operation("expired"), &expired()).await;
    harness.pass(Duration::from_millis(5)).await;
    assert_eq!(store.sweep(1_000).await.expect("the store sweeps"), 1);
    for (key, write) in &kept {
        assert_eq!(record(&*store, operation(key).id()).await.revision, write.revision, "{key}");
    }
}

/// A sweep removes at most as many rows as it is asked to.
pub async fn it_removes_no_more_than_asked(harness: &dyn Harness) {
    let store = harness.store().await;
    for at in 0..25 {
        insert(&*store, &operation(&format!("k{at}")), &expired()).await;
    }
    let mut swept = Vec::new();
    for rows_max in [0, 1, 10, 10, 10, 10] {
        swept.push(store.sweep(rows_max).await.expect("the store sweeps"));
    }
    assert_eq!(swept, [0, 1, 10, 10, 4, 0]);
}

/// A key that was swept can be inserted.
pub async fn a_swept_key_is_free(harness: &dyn Harness) {
    let store = harness.store().await;
    insert(&*store, &operation("k"), &expired()).await;
    assert_eq!(store.sweep(1).await.expect("the store sweeps"), 1);
    insert(&*store, &operation("k"), &running()).await;
}

//! Sweeping while others claim and sweep.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use onlyonce_core::Store;
use onlyonce_core::store::{Inserted, Replaced};
use tokio::task::JoinSet;

use super::*;

/// Three instances sweep 3,000 expired keys while half of these are claimed afresh: each key is either
/// swept or has its new holder, and nobody fails.
#[tokio::test(flavor = "multi_thread")]
async fn several_instances_sweep_while_keys_are_claimed() {
    let url = server().url(&server().database());
    let mut stores = Vec::new();
    for _ in 0..3 {
        stores.push(Arc::new(open(&url).await));
    }
    let mut inserting = JoinSet::new();
    for at in 0..3_000 {
        let store = Arc::clone(&stores[at % 3]);
        inserting.spawn(async move {
            let write = expired();
            assert!(matches!(
                store.insert(&operation(&format!("k{at}")), write.clone()).await,
                Ok(Inserted::New(_))
            ));
            (at, write.revision)
        });
    }
    let written = inserting.join_all().await;
    let claiming_ended = Arc::new(AtomicBool::new(false));
    let mut sweeping = JoinSet::new();
    for store in &stores {
        let (store, ended) = (Arc::clone(store), Arc::clone(&claiming_ended));
        sweeping.spawn(async move {
            let mut removed = 0;
            loop {
                let last = ended.load(Ordering::SeqCst);
                let swept = store.sweep(150).await.expect("a sweep waits for nobody");
                removed += swept;
                if swept == 0 && last {
                    return removed;
                }
                tokio::task::yield_now().await;
            }
        });
    }
    let mut claiming = JoinSet::new();
    for (at, expected) in written.into_iter().filter(|(at, _)| at % 2 == 0) {
        let store = Arc::clone(&stores[(at + 1) % 3]);
        claiming.spawn(async move {
            let write = running();
            match store.replace(operation(&format!("k{at}")).id(), expected, write.clone()).await.unwrap() {
                Replaced::Written(_) => Some((at, write.revision)),
                Replaced::Lost(seen) => {
                    assert_eq!(seen, None);
                    None
                }
            }
        });
    }
    let held: Vec<_> = claiming.join_all().await.into_iter().flatten().collect();
    claiming_ended.store(true, Ordering::SeqCst);
    let removed: u64 = sweeping.join_all().await.into_iter().sum();
    assert_eq!(removed + held.len() as u64, 3_000);
    for (at, revision) in held {
        let seen = stores[0].read(operation(&format!("k{at}")).id()).await.unwrap().expect("held");
        assert_eq!(seen.record.revision, revision);
    }
}

#[tokio::test]
async fn a_renewed_key_is_swept_when_its_last_lease_is_over() {
    let store = open(&server().url(&server().database())).await;
    let (payment, first) = (operation("k"), expired());
    store.insert(&payment, first.clone()).await.unwrap();
    let renewed = Write { state: NewState::Running { lease: Duration::from_millis(300) }, ..expired() };
    assert!(matches!(store.replace(payment.id(), first.revision, renewed).await, Ok(Replaced::Written(_))));
    assert_eq!(store.sweep(10).await.unwrap(), 0);
    tokio::time::sleep(Duration::from_millis(320)).await;
    assert_eq!(store.sweep(10).await.unwrap(), 1);
}

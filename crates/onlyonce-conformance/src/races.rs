//! Many calls at once, over two handles.

use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::record::Seen;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Revision, Store};
use tokio::sync::Barrier;
use tokio::task::{JoinSet, yield_now};
use tokio::time::timeout;

use crate::Harness;
use crate::samples::*;

const ROUNDS: usize = 12;
const TASKS: usize = 64;

/// Runs a call on [`TASKS`] tasks that start together, on two handles in turn.
async fn at_once<T, F>(stores: &[Arc<dyn Store>; 2], call: impl Fn(usize, Arc<dyn Store>) -> F) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let start = Arc::new(Barrier::new(TASKS));
    let mut tasks = JoinSet::new();
    for at in 0..TASKS {
        let (start, call) = (Arc::clone(&start), call(at, Arc::clone(&stores[at % 2])));
        tasks.spawn(async move {
            start.wait().await;
            call.await
        });
    }
    tasks.join_all().await
}

async fn handles(harness: &dyn Harness) -> [Arc<dyn Store>; 2] {
    [harness.store().await, harness.other().await]
}

/// Of any number of concurrent inserts of one key exactly one writes, and the others see its record.
pub async fn one_insert_wins(harness: &dyn Harness) {
    let stores = handles(harness).await;
    for round in 0..ROUNDS {
        let payment = operation(&format!("k{round}"));
        let answers = at_once(&stores, |_, store| {
            let (payment, write) = (payment.clone(), running());
            async move { (write.revision, store.insert(&payment, write).await.expect("the store answers")) }
        })
        .await;
        let mut winners = Vec::new();
        let mut seen_by_losers = Vec::new();
        for (revision, answer) in answers {
            match answer {
                Inserted::New(_) => winners.push(revision),
                Inserted::Exists(Seen { record, .. }) => seen_by_losers.push(record.revision),
            }
        }
        assert_eq!(winners.len(), 1, "round {round}");
        assert_eq!(seen_by_losers, vec![winners[0]; TASKS - 1], "round {round}");
        assert_eq!(record(&*stores[0], payment.id()).await.revision, winners[0]);
    }
}

/// Of any number of concurrent replaces of one revision exactly one writes.
pub async fn one_replace_wins(harness: &dyn Harness) {
    let (stores, payment, first) = (handles(harness).await, operation("k"), running());
    insert(&*stores[0], &payment, &first).await;
    let mut expected = first.revision;
    for round in 0..ROUNDS {
        let answers = at_once(&stores, |_, store| {
            let (id, write) = (payment.id(), running());
            async move {
                let answer = store.replace(id, expected, write.clone()).await.expect("the store answers");
                (write.revision, matches!(answer, Replaced::Written(_)))
            }
        })
        .await;
        let winners: Vec<Revision> = answers.into_iter().filter(|(_, won)| *won).map(|(by, _)| by).collect();
        assert_eq!(winners.len(), 1, "round {round}");
        assert_eq!(record(&*stores[1], payment.id()).await.revision, winners[0]);
        expected = winners[0];
    }
}

/// Of any number of concurrent removes of one revision exactly one takes it.
pub async fn one_remove_wins(harness: &dyn Harness) {
    let stores = handles(harness).await;
    for round in 0..ROUNDS {
        let (payment, write) = (operation(&format!("k{round}")), running());
        insert(&*stores[0], &payment, &write).await;
        let answers = at_once(&stores, |_, store| {
            let (id, revision) = (payment.id(), write.revision);
            async move { store.remove(id, revision).await.expect("the store answers") }
        })
        .await;
        assert_eq!(answers.into_iter().filter(|removed| *removed).count(), 1, "round {round}");
    }
}

/// Concurrent replaces and removes of one revision: one of all of them wins.
pub async fn a_replace_or_a_remove_wins(harness: &dyn Harness) {
    let stores = handles(harness).await;
    for round in 0..ROUNDS {
        let (payment, first) = (operation(&format!("k{round}")), running());
        insert(&*stores[0], &payment, &first).await;
        let answers = at_once(&stores, |at, store| {
            let (id, expected) = (payment.id(), first.revision);
            async move {
                if at % 4 < 2 {
                    return (store.remove(id, expected).await.expect("the store answers"), None);
                }
                let write = running();
                let revision = write.revision;
                let answer = store.replace(id, expected, write).await.expect("the store answers");
                (matches!(answer, Replaced::Written(_)), Some(revision))
            }
        })
        .await;
        let winners: Vec<_> = answers.into_iter().filter(|(won, _)| *won).map(|(_, by)| by).collect();
        assert_eq!(winners.len(), 1, "round {round}");
        let left = read(&*stores[0], payment.id()).await.map(|seen| seen.record.revision);
        assert_eq!(left, winners[0], "round {round}");
    }
}

/// An expired record that is replaced by a live one while a sweep runs is not swept afterwards.
pub async fn a_sweep_never_takes_a_renewed_record(harness: &dyn Harness) {
    let stores = handles(harness).await;
    for round in 0..ROUNDS {
        let key = |at| operation(&format!("k{round}-{at}"));
        let first: Vec<_> = (0..TASKS).map(|_| expired()).collect();
        for (at, write) in first.iter().enumerate().filter(|(at, _)| at % 8 != 0) {
            insert(&*stores[0], &key(at), write).await;
        }
        let answers = at_once(&stores, |at, store| {
            let (payment, expected, write) = (key(at), first[at].revision, running());
            async move {
                if at % 8 == 0 {
                    store.sweep(5).await.expect("the store sweeps");
                    return None;
                }
                let answer = store.replace(payment.id(), expected, write.clone()).await;
                match answer.expect("the store answers") {
                    Replaced::Written(_) => Some((payment.id(), write.revision)),
                    Replaced::Lost(seen) => {
                        assert_eq!(seen, None, "nobody else writes");
                        None
                    }
                }
            }
        })
        .await;
        for (id, revision) in answers.into_iter().flatten() {
            assert_eq!(record(&*stores[1], id).await.revision, revision, "round {round}");
        }
    }
}

/// Calls on different keys all succeed, however many there are at once.
pub async fn keys_do_not_wait_for_each_other(harness: &dyn Harness) {
    let stores = handles(harness).await;
    at_once(&stores, |at, store| async move {
        let (payment, first, second) = (operation(&format!("k{at}")), running(), done(outcome("paid")));
        insert(&*store, &payment, &first).await;
        let at = replace(&*store, payment.id(), first.revision, &second).await;
        assert_eq!(record(&*store, payment.id()).await, second.at(at));
    })
    .await;
}

/// A caller that leaves at any point leaves a whole write or none, and no lock.
pub async fn a_dropped_call_is_whole(harness: &dyn Harness) {
    let stores = handles(harness).await;
    let body = vec![7; 100_000];
    for round in 0..60_usize {
        let (payment, first) = (operation(&format!("k{round}")), done(outcome(body.clone())));
        let call = tokio::spawn({
            let (store, payment, first) = (Arc::clone(&stores[0]), payment.clone(), first.clone());
            async move { store.insert(&payment, first).await }
        });
        // A different point in every round.
        for _ in 0..round % 12 {
            yield_now().await;
        }
        if round % 3 == 2 {
            tokio::time::sleep(Duration::from_micros(20 * round as u64)).await;
        }
        call.abort();
        let finished = call.await;
        let next = timeout(Duration::from_secs(20), stores[1].insert(&payment, running())).await;
        let next = next.expect("no lock is left").expect("the store answers");
        match (finished, next) {
            (Ok(Ok(Inserted::New(at))), Inserted::Exists(seen)) => assert_eq!(seen.record, first.at(at)),
            (Ok(answer), next) => panic!("{answer:?}, and then {next:?}"),
            (Err(_), Inserted::New(_)) => {}
            (Err(_), Inserted::Exists(seen)) => {
                let written_at = seen.record.created_at;
                assert_eq!(seen.record, first.at(written_at));
            }
        }
    }
}

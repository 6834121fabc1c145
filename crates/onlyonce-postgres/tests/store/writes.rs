//! What is written, and what is not.

use std::sync::Arc;

use onlyonce_core::store::{Filter, Inserted, Replaced};
use onlyonce_core::{Inspect, Store, StoreErrorKind};
use onlyonce_testkit::Postgres;
use tokio::task::JoinSet;

use super::*;

/// On a server where nobody else writes: the log position and the row's version stay.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_and_a_refusal_write_nothing() {
    let server = Postgres::start("autovacuum = off\nbgwriter_lru_maxpages = 0\ncheckpoint_timeout = 1h\n");
    let database = server.database();
    let store = Arc::new(open(&server.url(&database)).await);
    let (complete, held) = (operation("complete"), operation("held"));
    for (operation, write) in [(&complete, done()), (&held, running())] {
        assert!(matches!(store.insert(operation, write).await, Ok(Inserted::New(_))));
    }
    // Whoever reads a page first may leave hints on it and prune it; that is not this test's.
    for _ in 0..3 {
        server.sql(&database, "SELECT count(*) FROM onlyonce.idempotency_keys");
    }
    server.sql(&database, "CHECKPOINT");
    tokio::time::sleep(Duration::from_millis(500)).await;
    let look = || {
        server.sql(
            &database,
            "SELECT pg_current_wal_insert_lsn(), txid_snapshot_xmax(txid_current_snapshot()), \
             (SELECT string_agg(xmin || ' ' || xmax, ',' ORDER BY id) FROM onlyonce.idempotency_keys)",
        )
    };
    let before = look();
    let mut copies = JoinSet::new();
    for at in 0..200 {
        let (store, operation) =
            (Arc::clone(&store), if at % 2 == 0 { complete.clone() } else { held.clone() });
        copies.spawn(async move {
            for _ in 0..5 {
                assert!(matches!(store.insert(&operation, running()).await, Ok(Inserted::Exists(_))));
            }
        });
    }
    copies.join_all().await;
    // Alone, by the statement for one.
    assert!(matches!(store.insert(&complete, running()).await, Ok(Inserted::Exists(_))));
    assert_eq!(look(), before);
    store.insert(&operation("new"), running()).await.unwrap();
    assert_ne!(look(), before, "a write would have shown");
}

#[tokio::test(flavor = "multi_thread")]
async fn completing_a_key_writes_no_index() {
    let database = server().database();
    let store = Arc::new(open(&server().url(&database)).await);
    let mut holders = JoinSet::new();
    for task in 0..16 {
        let store = Arc::clone(&store);
        holders.spawn(async move {
            for at in 0..100 {
                let (payment, first) = (operation(&format!("k{task}-{at}")), running());
                let Ok(Inserted::New(now)) = store.insert(&payment, first.clone()).await else { panic!() };
                let completed = Write { created_at: Some(now), granted_at: Some(now), ..done() };
                let replaced = store.replace(payment.id(), first.revision, completed).await;
                assert!(matches!(replaced, Ok(Replaced::Written(_))), "{replaced:?}");
            }
        });
    }
    holders.join_all().await;
    let statistics = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables \
                      WHERE relname = 'idempotency_keys' AND n_tup_upd >= 1600";
    for _ in 0..100 {
        let line = server().sql(&database, statistics);
        if let Some((updates, hot)) = line.split_once('|') {
            let (updates, hot): (u64, u64) = (updates.parse().unwrap(), hot.parse().unwrap());
            assert_eq!(updates, 1600);
            assert!(hot * 10 >= updates * 9, "{hot} of {updates} were HOT");
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("no statistics: {}", server().sql(&database, "SELECT * FROM pg_stat_user_tables"));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bad_row_in_a_batch_fails_alone() {
    let database = server().database();
    let store = Arc::new(open(&server().url(&database)).await);
    server().sql(
        &database,
        "ALTER TABLE onlyonce.idempotency_keys ADD CHECK (caller <> 'bad' AND status IS DISTINCT FROM 666)",
    );
    for round in 0..4 {
        let mut calls = JoinSet::new();
        for at in 0..64 {
            let (store, key) = (Arc::clone(&store), format!("k{round}-{at}"));
            calls.spawn(async move {
                let caller = if at == 17 { "bad" } else { "good" };
                (at, store.insert(&operation_of(caller, &key), running()).await)
            });
        }
        for (at, answer) in calls.join_all().await {
            match answer {
                Ok(Inserted::New(_)) => assert_ne!(at, 17),
                Err(error) => {
                    assert_eq!((at, error.kind()), (17, StoreErrorKind::Unavailable), "{error}");
                    assert!(error.to_string().contains("23514"), "{error}");
                }
                Ok(other) => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(idle_in_transaction(&database), "");
}

/// Someone holds the lock of a row for long: its own call fails in time, and the others go on.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_does_not_hold_up_the_others() {
    let database = server().database();
    let store = Arc::new(open(&server().url(&database)).await);
    let (locked, first) = (operation("locked"), running());
    store.insert(&locked, first.clone()).await.unwrap();
    let (to, held) = (server().url(&database), tokio::sync::oneshot::channel::<()>());
    let (release, released) = held;
    let (ready, is_ready) = tokio::sync::oneshot::channel();
    let locker = tokio::spawn(async move {
        use sqlx::{Connection, Executor};
        let mut connection = sqlx::PgConnection::connect(&to).await.unwrap();
        connection.execute("BEGIN; SELECT 1 FROM onlyonce.idempotency_keys FOR UPDATE").await.unwrap();
        ready.send(()).unwrap();
        let _ = released.await;
        connection.execute("ROLLBACK").await.unwrap();
    });
    is_ready.await.unwrap();
    let started = tokio::time::Instant::now();
    let mut calls = JoinSet::new();
    for at in 0..64 {
        let (store, locked, expected) = (Arc::clone(&store), locked.clone(), first.revision);
        calls.spawn(async move {
            match at {
                17 => store.replace(locked.id(), expected, done()).await.map(|_| at),
                _ => store.insert(&operation(&format!("k{at}")), running()).await.map(|_| at),
            }
        });
    }
    let answers = calls.join_all().await;
    let failed: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].kind(), StoreErrorKind::Unavailable);
    assert!(failed[0].to_string().contains("55P03"), "{}", failed[0]);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    release.send(()).unwrap();
    locker.await.unwrap();
    assert!(matches!(store.replace(locked.id(), first.revision, done()).await, Ok(Replaced::Written(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_record_does_not_hide_the_others() {
    let database = server().database();
    let store = open(&server().url(&database)).await;
    for key in ["a", "b", "c"] {
        store.insert(&operation(key), running()).await.unwrap();
    }
    let damage = "\
        UPDATE onlyonce.idempotency_keys SET attempt = -1 WHERE key = 'b'";
    server().sql(&database, damage);
    let page = store.page(&Filter::default(), None, 10).await.unwrap();
    let mut keys: Vec<_> = page.entries.iter().map(|entry| entry.operation.key().as_str()).collect();
    keys.sort_unstable();
    assert_eq!((keys, page.unreadable.len(), page.next), (vec!["a", "c"], 1, None));
    assert!(page.unreadable[0].contains(&operation("b").id().to_string()), "{:?}", page.unreadable);
}

//! How writes share commits, fail alone, and leave nothing behind.

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{connect, done, execute, expired, operation, running};
use onlyonce_core::store::{Filter, Inserted, Replaced};
use onlyonce_core::{Inspect, Revision, Store, StoreErrorKind};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::sleep;

async fn open() -> (TempDir, PathBuf, SqliteStore) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.db");
    let options = SqliteOptions::file(&path).busy_timeout(Duration::from_millis(300));
    let store = SqliteStore::open(&options).await.expect("it opens");
    (folder, path, store)
}

async fn insert(store: &SqliteStore, key: &str, revision: u128) {
    let inserted = store.insert(&operation(key), running(revision)).await.expect("it inserts");
    assert!(matches!(inserted, Inserted::New(_)), "{inserted:?}");
}

async fn exists(store: &SqliteStore, key: &str) -> bool {
    store.read(operation(key).id()).await.expect("it reads").is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_writes_share_a_commit() {
    let (_folder, path, store) = open().await;
    // While another holds the lock the writes gather behind the first.
    let mut lock = connect(&path).await;
    execute(&mut lock, "BEGIN IMMEDIATE").await;
    let mut tasks = JoinSet::new();
    for at in 0..200 {
        let store = store.clone();
        tasks.spawn(async move { insert(&store, &format!("k{at}"), at).await });
    }
    sleep(Duration::from_millis(100)).await;
    execute(&mut lock, "ROLLBACK").await;
    tasks.join_all().await;
    assert!(store.commits() <= 20, "200 writes took {} commits", store.commits());
}

#[tokio::test]
async fn a_replay_writes_nothing() {
    let (folder, path, store) = open().await;
    store.insert(&operation("k"), done(1, "paid")).await.expect("it inserts");
    let log = folder.path().join("keys.db-wal");
    let (commits, size) = (store.commits(), log.metadata().expect("a log").len());
    let mut watcher = connect(&path).await;
    let version = "PRAGMA data_version";
    let before: i64 = sqlx::query_scalar(version).fetch_one(&mut watcher).await.expect("it reads");
    for revision in 2..50 {
        let replayed = store.insert(&operation("k"), running(revision)).await.expect("it answers");
        assert!(matches!(replayed, Inserted::Exists(_)));
        let lost = store.replace(operation("k").id(), Revision(revision), running(99)).await;
        assert!(matches!(lost, Ok(Replaced::Lost(Some(_)))));
        assert!(!store.remove(operation("k").id(), Revision(revision)).await.expect("it answers"));
    }
    let after: i64 = sqlx::query_scalar(version).fetch_one(&mut watcher).await.expect("it reads");
    assert_eq!(after, before, "another connection saw a change");
    assert_eq!((store.commits(), log.metadata().expect("a log").len()), (commits, size));
}

#[tokio::test]
async fn a_replay_does_not_wait_for_a_write_lock() {
    let (_folder, path, store) = open().await;
    insert(&store, "k", 1).await;
    let mut lock = connect(&path).await;
    execute(&mut lock, "BEGIN IMMEDIATE").await;
    let started = Instant::now();
    assert!(matches!(store.insert(&operation("k"), running(2)).await, Ok(Inserted::Exists(_))));
    assert!(exists(&store, "k").await);
    assert_eq!(store.list(&Filter::default(), 10).await.expect("it lists").len(), 1);
    assert!(started.elapsed() < Duration::from_millis(250), "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_held_write_lock_makes_the_store_unavailable_and_no_more() {
    let (_folder, path, store) = open().await;
    let mut lock = connect(&path).await;
    execute(&mut lock, "BEGIN IMMEDIATE").await;
    let error = store.insert(&operation("k"), running(1)).await.expect_err("the lock is held");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("locked"), "{error}");
    execute(&mut lock, "ROLLBACK").await;
    assert!(!exists(&store, "k").await);
    insert(&store, "k", 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_fails_fails_alone() {
    let (_folder, path, store) = open().await;
    let mut by_hand = connect(&path).await;
    execute(
        &mut by_hand,
        "CREATE TRIGGER poison BEFORE INSERT ON idempotency_keys WHEN NEW.key = 'poison' \
         BEGIN SELECT RAISE(ABORT, 'poisoned'); END",
    )
    .await;
    execute(&mut by_hand, "BEGIN IMMEDIATE").await;
    let mut tasks = JoinSet::new();
    for key in ["a", "b", "poison", "c", "d"] {
        let store = store.clone();
        tasks.spawn(async move { (key, store.insert(&operation(key), running(1)).await) });
    }
    sleep(Duration::from_millis(100)).await;
    execute(&mut by_hand, "ROLLBACK").await;
    for (key, inserted) in tasks.join_all().await {
        match (key, inserted) {
            ("poison", Err(error)) => {
                assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                assert!(error.to_string().contains("poisoned"), "{error}");
            }
            (_, inserted) => assert!(matches!(inserted, Ok(Inserted::New(_))), "{key}: {inserted:?}"),
        }
    }
    assert!(!exists(&store, "poison").await);
    assert!(exists(&store, "d").await);
}

#[tokio::test]
async fn a_damaged_record_fails_alone() {
    let (_folder, path, store) = open().await;
    insert(&store, "damaged", 1).await;
    insert(&store, "sound", 2).await;
    let mut by_hand = connect(&path).await;
    execute(&mut by_hand, "UPDATE idempotency_keys SET attempt = -1 WHERE key = 'damaged'").await;
    let id = operation("damaged").id();
    for error in [
        store.read(id).await.map(drop).expect_err("it is damaged"),
        store.insert(&operation("damaged"), running(3)).await.map(drop).expect_err("it is damaged"),
        store.replace(id, Revision(1), running(4)).await.map(drop).expect_err("it is damaged"),
        store.remove(id, Revision(1)).await.map(drop).expect_err("it is damaged"),
    ] {
        assert_eq!(error.kind(), StoreErrorKind::Unreadable);
        assert!(error.to_string().contains(&id.to_string()), "{error}");
        assert!(error.to_string().contains("attempt -1"), "{error}");
    }
    assert!(exists(&store, "sound").await);
}

/// A constraint that is only looked at when the transaction ends makes the commit itself fail.
#[tokio::test]
async fn a_commit_that_is_refused_wrote_nothing_and_leaves_no_transaction() {
    let (_folder, path, store) = open().await;
    let mut by_hand = connect(&path).await;
    execute(
        &mut by_hand,
        "CREATE TABLE parents (id INTEGER PRIMARY KEY); \
         CREATE TABLE children (id INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED); \
         CREATE TRIGGER late AFTER INSERT ON idempotency_keys WHEN NEW.key = 'late' \
         BEGIN INSERT INTO children VALUES (7); END",
    )
    .await;
    let error = store.insert(&operation("late"), running(1)).await.expect_err("its commit fails");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(!exists(&store, "late").await);
    insert(&store, "next", 2).await;
    assert_eq!(store.commits(), 1);
    // Nothing holds the lock.
    execute(&mut by_hand, "BEGIN IMMEDIATE; ROLLBACK").await;
}

/// A claim whose caller has left would hold its key for nobody.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_without_its_caller_is_taken_back() {
    let (_folder, path, store) = open().await;
    let mut lock = connect(&path).await;
    execute(&mut lock, "BEGIN IMMEDIATE").await;
    let claim = tokio::spawn({
        let store = store.clone();
        async move { store.insert(&operation("k"), running(1)).await }
    });
    // By now the writer has the call in hand and waits for the lock.
    sleep(Duration::from_millis(100)).await;
    claim.abort();
    assert!(claim.await.is_err());
    execute(&mut lock, "ROLLBACK").await;
    // Written, and taken back.
    let deadline = Instant::now() + Duration::from_secs(10);
    while store.commits() < 2 && Instant::now() < deadline {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(store.commits(), 2);
    assert!(!exists(&store, "k").await);
}

/// A sweep is many short transactions: claims go on in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_sweep_does_not_stop_claims() {
    let (_folder, path, store) = open().await;
    store.insert(&operation("seed"), expired(1)).await.expect("it inserts");
    let mut by_hand = connect(&path).await;
    execute(
        &mut by_hand,
        "INSERT INTO idempotency_keys \
         WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 20000) \
         SELECT randomblob(32), namespace, endpoint, caller, key, fingerprint_target, fingerprint_body, revision, \
                attempt, created_at, granted_at, lease_until, completed_at, status, expires_at, sweep_at, head, body \
         FROM idempotency_keys, numbers",
    )
    .await;
    let sweep = tokio::spawn({
        let store = store.clone();
        async move { store.sweep(u32::MAX).await.expect("it sweeps") }
    });
    let mut claims = 0;
    while !sweep.is_finished() {
        insert(&store, &format!("k{claims}"), claims).await;
        claims += 1;
    }
    assert_eq!(sweep.await.expect("it ends"), 20_001);
    assert!(claims >= 10, "only {claims} claims during the sweep");
    assert_eq!(store.facts().await.expect("it reads").records, claims as u64);
}

#[tokio::test]
async fn a_closed_store_is_closed() {
    let (folder, path, store) = open().await;
    insert(&store, "k", 1).await;
    store.close().await.expect("it closes");
    store.close().await.expect("it stays closed");
    let files: Vec<_> = folder.path().read_dir().expect("a folder").collect();
    assert_eq!(files.len(), 1, "the log is moved into the database: {files:?}");
    let error = store.read(operation("k").id()).await.expect_err("it is closed");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(store.insert(&operation("k"), running(2)).await.is_err());
    assert!(store.sweep(1).await.is_err());
    assert!(store.list(&Filter::default(), 1).await.is_err());
    let again = SqliteStore::open(&SqliteOptions::file(&path)).await.expect("it opens");
    assert!(exists(&again, "k").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_waits_for_the_calls_in_hand() {
    let (_folder, path, store) = open().await;
    let mut tasks = JoinSet::new();
    for at in 0..100_u32 {
        let store = store.clone();
        tasks.spawn(
            async move { (at, store.insert(&operation(&format!("k{at}")), running(at.into())).await) },
        );
    }
    sleep(Duration::from_millis(2)).await;
    store.close().await.expect("it closes");
    let again = SqliteStore::open(&SqliteOptions::file(&path)).await.expect("it opens");
    for (at, inserted) in tasks.join_all().await {
        let stands = exists(&again, &format!("k{at}")).await;
        match inserted {
            Ok(_) => assert!(stands, "k{at} was acknowledged"),
            Err(error) => assert_eq!((error.kind(), stands), (StoreErrorKind::Unavailable, false), "{error}"),
        }
    }
}

#[tokio::test]
async fn a_store_that_is_only_dropped_loses_nothing() {
    let (_folder, path, store) = open().await;
    insert(&store, "k", 1).await;
    drop(store);
    let again = SqliteStore::open(&SqliteOptions::file(&path)).await.expect("it opens");
    assert!(exists(&again, "k").await);
}

/// Callers leave at any point, many of them; no connection is left inside a transaction.
#[tokio::test(flavor = "multi_thread")]
async fn callers_that_leave_interrupt_no_statement() {
    let (_folder, path, store) = open().await;
    let store = Arc::new(store);
    for round in 0..200_u32 {
        let key = format!("k{}", round % 10);
        let call = tokio::spawn({
            let store = Arc::clone(&store);
            async move {
                let id = operation(&key).id();
                let _ = store.insert(&operation(&key), expired(round.into())).await;
                let _ = store.read(id).await;
                let _ = store.replace(id, Revision(round.into()), expired(round.into())).await;
                let _ = store.list(&Filter::default(), 5).await;
                let _ = store.sweep(3).await;
            }
        });
        sleep(Duration::from_micros(u64::from(round % 50) * 40)).await;
        call.abort();
    }
    let mut by_hand = connect(&path).await;
    execute(&mut by_hand, "BEGIN IMMEDIATE; ROLLBACK").await;
    insert(&store, "after", 1).await;
}

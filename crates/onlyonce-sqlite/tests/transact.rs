//! Transactions on an application's file: whose they are, how they take turns, and how they end.

mod common;

use std::path::PathBuf;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use common::application::{connect_options, note, notes, start, store, transactions};
use common::{connect, done, execute, operation, running};
use onlyonce_core::store::{Inserted, OpenErrorKind};
use onlyonce_core::{Store, StoreError, StoreErrorKind, TransactionError, Transactional};
use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Executor, Row, Sqlite, SqlitePool, Transaction};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Longer than anything takes on a busy machine.
const PATIENT: Duration = Duration::from_secs(60);

struct Application {
    _folder: TempDir,
    path: PathBuf,
    pool: SqlitePool,
    transactions: SqliteTransactions,
}

async fn application(connections: u32) -> Application {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    let pool = start(&path, connections).await;
    let transactions = transactions(&path, &pool).await;
    Application { _folder: folder, path, pool, transactions }
}

async fn begin(transactions: &SqliteTransactions) -> Transaction<'static, Sqlite> {
    transactions.begin(PATIENT).await.expect("it begins")
}

async fn insert(
    transactions: &SqliteTransactions,
    transaction: &mut Transaction<'static, Sqlite>,
    key: &str,
) {
    let inserted = transactions.insert(transaction, &operation(key), done(1, key)).await;
    assert!(matches!(inserted, Ok(Inserted::New(_))), "{inserted:?}");
}

async fn exists(transactions: &SqliteTransactions, key: &str) -> bool {
    transactions.store().read(operation(key).id()).await.expect("it reads").is_some()
}

fn failure<T>(result: Result<T, TransactionError>) -> StoreError {
    match result.map(drop).expect_err("it fails") {
        TransactionError::Failed(error) => error,
        error => panic!("{error:?}"),
    }
}

// Whose file.

#[tokio::test]
async fn the_file_stays_the_applications() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    let pool = start(&path, 1).await;
    pool.execute("PRAGMA application_id = 77; PRAGMA user_version = 5").await.expect("it is theirs");
    let transactions = transactions(&path, &pool).await;
    let mut transaction = begin(&transactions).await;
    note(&mut transaction, "effect").await;
    insert(&transactions, &mut transaction, "k").await;
    transactions.commit(transaction).await.expect("it commits");
    let row = sqlx::query(
        "SELECT (SELECT application_id FROM pragma_application_id), \
                (SELECT user_version FROM pragma_user_version), \
                (SELECT group_concat(name, ' ' ORDER BY name) FROM sqlite_schema WHERE type = 'table')",
    );
    let row = row.fetch_one(&pool).await.expect("it reads");
    assert_eq!((row.get::<i64, _>(0), row.get::<i64, _>(1)), (77, 5));
    let tables: String = row.get(2);
    assert_eq!(tables, "notes onlyonce_idempotency_keys onlyonce_schema_versions");
    assert_eq!(notes(&pool).await, ["effect"]);
    assert!(exists(&transactions, "k").await);
    // The check of the pool has left nothing behind.
    assert_eq!(store(&path).await.facts().await.expect("it reads").records, 1);
}

/// The transaction's connection is as the pool's are, hooks and settings and all.
#[tokio::test]
async fn the_applications_settings_hold_in_the_transaction() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    drop(start(&path, 1).await);
    let options = connect_options(&path)
        .busy_timeout(Duration::from_millis(1_234))
        .foreign_keys(false)
        .synchronous(SqliteSynchronous::Normal);
    let pool = SqlitePoolOptions::new().after_connect(|connection, _| {
        Box::pin(async move { connection.execute("CREATE TEMP TABLE mine (x)").await.map(drop) })
    });
    let pool = pool.connect_with(options).await.expect("it connects");
    let transactions = transactions(&path, &pool).await;
    let mut transaction = begin(&transactions).await;
    let row = sqlx::query(
        "SELECT (SELECT timeout FROM pragma_busy_timeout), (SELECT foreign_keys FROM pragma_foreign_keys), \
                (SELECT count(*) FROM mine), (SELECT synchronous FROM pragma_synchronous)",
    );
    let row = row.fetch_one(&mut *transaction).await.expect("it reads");
    let found: Vec<i64> = (0..4).map(|column| row.get(column)).collect();
    assert_eq!(found, [1_234, 0, 0, 2], "the last is the store's");
}

/// The words of a refusal, which is one line.
async fn refused(store: &SqliteStore, pool: &SqlitePool, names: &[&str]) {
    let error = store.transactions(pool).await.map(drop).expect_err("it must be refused");
    assert_eq!(error.kind(), OpenErrorKind::Refused, "{error}");
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    for name in names {
        assert!(message.contains(name), "{message}");
    }
    let records = store.facts().await.expect("it reads").records;
    assert_eq!(records, 0, "the check left something behind");
}

#[tokio::test]
async fn a_pool_that_leads_elsewhere_is_refused() {
    let Application { _folder, path, pool, .. } = application(1).await;
    let ours = store(&path).await;
    let elsewhere = _folder.path().join("elsewhere.db");
    let other = start(&elsewhere, 1).await;
    refused(&ours, &other, &["another database", "application.db"]).await;
    // Not even one that has the same tables.
    let _theirs = transactions(&elsewhere, &other).await;
    refused(&ours, &other, &["another database", "application.db"]).await;
    let copy = _folder.path().join("copy.db");
    sqlx::query("VACUUM INTO ?").bind(copy.display().to_string()).execute(&pool).await.expect("it copies");
    refused(&ours, &start(&copy, 1).await, &["another database"]).await;
    let memory = SqlitePool::connect("sqlite::memory:").await.expect("it connects");
    refused(&ours, &memory, &["another database"]).await;
    let absent = SqliteConnectOptions::new().filename(_folder.path().join("absent.db"));
    refused(&ours, &SqlitePoolOptions::new().connect_lazy_with(absent), &["another database"]).await;
    assert!(!_folder.path().join("absent.db").exists());
    // One that is about to be created is not.
    let absent =
        SqliteConnectOptions::new().filename(_folder.path().join("absent.db")).create_if_missing(true);
    refused(&ours, &SqlitePoolOptions::new().connect_lazy_with(absent), &["another database"]).await;
    assert!(!_folder.path().join("absent.db").exists());
}

#[cfg(unix)]
#[tokio::test]
async fn another_name_of_the_file_is_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    drop(start(&path, 1).await);
    let link = folder.path().join("link.db");
    std::os::unix::fs::symlink(&path, &link).expect("a link");
    let pool = start(&link, 1).await;
    let transactions = transactions(&path, &pool).await;
    let mut transaction = begin(&transactions).await;
    insert(&transactions, &mut transaction, "k").await;
    transactions.commit(transaction).await.expect("it commits");
    assert!(exists(&transactions, "k").await);
}

#[tokio::test]
async fn a_pool_that_may_not_write_is_refused() {
    let Application { _folder, path, pool: _pool, .. } = application(1).await;
    let ours = store(&path).await;
    let plain = || SqliteConnectOptions::new().filename(&path);
    for options in [plain().read_only(true), plain().pragma("query_only", "ON")] {
        let pool = SqlitePoolOptions::new().connect_lazy_with(options);
        refused(&ours, &pool, &["application.db", "may not write", "read-only", "query_only"]).await;
    }
}

/// Options are overruled, but not a hook that says otherwise afterwards.
#[tokio::test]
async fn a_pool_that_makes_commits_volatile_is_refused() {
    let Application { _folder, path, pool: _pool, .. } = application(1).await;
    let ours = store(&path).await;
    let hook = SqlitePoolOptions::new().after_connect(|connection, _| {
        Box::pin(async move { connection.execute("PRAGMA synchronous = NORMAL").await.map(drop) })
    });
    let pool = hook.connect_lazy_with(connect_options(&path));
    refused(&ours, &pool, &["application.db", "synchronous = 1", "full or extra"]).await;
    let volatile = SqliteOptions::file(&path)
        .shared(true)
        .synchronous(onlyonce_sqlite::Synchronous::Normal)
        .allow_volatile(true);
    let volatile = SqliteStore::open(&volatile).await.expect("it is allowed");
    volatile.transactions(&pool).await.expect("it is allowed");
}

#[tokio::test]
async fn a_store_in_a_file_of_its_own_has_no_transactions() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.db");
    let own = SqliteStore::open(&SqliteOptions::file(&path)).await.expect("it opens");
    let pool = SqlitePoolOptions::new().connect_lazy_with(SqliteConnectOptions::new().filename(&path));
    refused(&own, &pool, &["keys.db", "Onlyonce's own", "shared=true"]).await;
}

// Taking turns.

/// Those that wait hold no connection of the application's, and cost nothing when they leave.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_copies_leave_the_pool_to_its_readers() {
    let Application { _folder, pool, transactions, .. } = application(2).await;
    let mut first = begin(&transactions).await;
    note(&mut first, "first").await;
    let mut copies = JoinSet::new();
    for copy in 0..64 {
        let transactions = transactions.clone();
        copies.spawn(async move {
            // Half of them leave long before their turn comes.
            let wait = if copy % 2 == 0 { Duration::from_millis(50) } else { PATIENT };
            let mut transaction = transactions.begin(wait).await?;
            note(&mut transaction, "copy").await;
            transactions.commit(transaction).await
        });
    }
    sleep(Duration::from_millis(300)).await;
    // Every connection of the pool is to be had, and reads what is committed.
    let (mut one, mut two) = (pool.acquire().await.expect("free"), pool.acquire().await.expect("free"));
    for connection in [&mut one, &mut two] {
        let count = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM notes").fetch_one(&mut **connection);
        assert_eq!(count.await.expect("it reads"), 0);
    }
    drop((one, two));
    transactions.commit(first).await.expect("it commits");
    let mut left = 0;
    for copied in copies.join_all().await {
        match copied {
            Ok(()) => {}
            error => {
                let error = failure(error);
                assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                assert!(error.to_string().contains("did not end within the wait"), "{error}");
                left += 1;
            }
        }
    }
    assert_eq!(left, 32);
    assert_eq!(notes(&pool).await.len(), 1 + 32);
}

/// Whoever has left takes no turn later, however many there were.
#[tokio::test(flavor = "multi_thread")]
async fn those_that_left_are_gone() {
    let Application { _folder, transactions, .. } = application(1).await;
    let first = begin(&transactions).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let mut copies = JoinSet::new();
    for _ in 0..64 {
        let transactions = transactions.clone();
        copies.spawn(async move { failure(transactions.begin(Duration::from_millis(50)).await).kind() });
    }
    assert!(copies.join_all().await.iter().all(|kind| *kind == StoreErrorKind::Unavailable));
    // The one that was next is still there. A task that has ended counts for a moment longer.
    let deadline = Instant::now() + Duration::from_secs(5);
    while tasks() > before + 1 && Instant::now() < deadline {
        sleep(Duration::from_millis(5)).await;
    }
    assert!(tasks() <= before + 1, "{} wait for nobody", tasks() - before);
    transactions.roll_back(first).await;
    transactions.roll_back(begin(&transactions).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_are_taken_in_order() {
    let Application { _folder, pool, transactions, .. } = application(1).await;
    let first = begin(&transactions).await;
    let mut copies = JoinSet::new();
    for copy in 0..16 {
        let transactions = transactions.clone();
        copies.spawn(async move {
            let mut transaction = begin(&transactions).await;
            note(&mut transaction, &format!("{copy:02}")).await;
            transactions.commit(transaction).await.expect("it commits");
        });
        sleep(Duration::from_millis(10)).await;
    }
    transactions.roll_back(first).await;
    copies.join_all().await;
    let notes = notes(&pool).await;
    assert!(notes.is_sorted() && notes.len() == 16, "{notes:?}");
}

/// However short the application's own busy timeout is.
#[tokio::test]
async fn a_begin_waits_for_other_processes_and_no_longer() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    drop(start(&path, 1).await);
    for busy_timeout in [Duration::ZERO, Duration::from_secs(5)] {
        let options = connect_options(&path).busy_timeout(busy_timeout);
        let pool = SqlitePoolOptions::new().connect_lazy_with(options);
        let transactions = transactions(&path, &pool).await;
        let mut other = connect(&path).await;
        execute(&mut other, "BEGIN IMMEDIATE").await;
        let asked_at = Instant::now();
        let error = failure(transactions.begin(Duration::from_millis(400)).await);
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
        assert!(asked_at.elapsed() >= Duration::from_millis(390), "{:?}", asked_at.elapsed());
        assert!(asked_at.elapsed() < Duration::from_secs(4), "{:?}", asked_at.elapsed());
        let waiting = tokio::spawn({
            let transactions = transactions.clone();
            async move { begin(&transactions).await }
        });
        sleep(Duration::from_millis(200)).await;
        assert!(!waiting.is_finished());
        execute(&mut other, "ROLLBACK").await;
        let transaction = waiting.await.expect("no panic");
        transactions.roll_back(transaction).await;
        // A lock that is free is had even with no wait at all.
        let mut free = false;
        for _ in 0..10 {
            // A busy machine may take its time once.
            if let Ok(transaction) = transactions.begin(Duration::ZERO).await {
                transactions.roll_back(transaction).await;
                free = true;
            }
        }
        assert!(free, "nobody else writes");
    }
}

/// Who claims no key waits for its turn for as long as it likes, and costs nothing when it leaves.
#[tokio::test]
async fn an_opened_transaction_waits_for_its_turn() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("application.db");
    let pool = start(&path, 1).await;
    let impatient = connect_options(&path).busy_timeout(Duration::ZERO);
    let impatient =
        SqlitePoolOptions::new().acquire_timeout(Duration::from_millis(50)).connect_lazy_with(impatient);
    let transactions = transactions(&path, &impatient).await;
    let mut other = connect(&path).await;
    for (held_here, leaves) in [(true, false), (false, false), (true, true), (false, true)] {
        let first = if held_here { Some(begin(&transactions).await) } else { None };
        if first.is_none() {
            execute(&mut other, "BEGIN IMMEDIATE").await;
        }
        let opening = tokio::spawn({
            let transactions = transactions.clone();
            async move { transactions.open().await.expect("its turn comes") }
        });
        sleep(Duration::from_millis(300)).await;
        assert!(!opening.is_finished());
        if leaves {
            opening.abort();
        }
        match first {
            Some(first) => transactions.roll_back(first).await,
            None => execute(&mut other, "ROLLBACK").await,
        }
        if let Ok(mut transaction) = opening.await {
            note(&mut transaction, "effect").await;
            transactions.commit(transaction).await.expect("it commits");
        }
    }
    transactions.roll_back(begin(&transactions).await).await;
    assert_eq!(notes(&pool).await, ["effect", "effect"]);
}

#[tokio::test]
async fn a_closed_one_begins_no_more() {
    let Application { _folder, pool, transactions, .. } = application(1).await;
    transactions.close().await;
    let error = failure(transactions.begin(PATIENT).await);
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert_eq!(notes(&pool).await, [""; 0]);
    assert!(!exists(&transactions, "k").await);
}

// How they end.

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_or_an_abort_gives_the_turn_back() {
    let Application { _folder, pool, transactions, .. } = application(1).await;
    for panics in [true, false] {
        let (told, hears) = tokio::sync::oneshot::channel();
        let work = tokio::spawn({
            let transactions = transactions.clone();
            async move {
                let mut transaction = begin(&transactions).await;
                note(&mut transaction, "lost").await;
                insert(&transactions, &mut transaction, "k").await;
                told.send(()).expect("it is heard");
                assert!(!panics, "the work panics");
                sleep(PATIENT).await;
            }
        });
        hears.await.expect("it has written");
        if !panics {
            work.abort();
        }
        assert!(work.await.is_err());
        transactions.roll_back(begin(&transactions).await).await;
        assert_eq!(notes(&pool).await, [""; 0]);
        assert!(!exists(&transactions, "k").await);
    }
}

/// SQLite leaves the transaction open when it refuses to commit it.
#[tokio::test]
async fn a_commit_that_is_refused_is_undone() {
    let Application { _folder, path, pool, transactions } = application(1).await;
    let tables = "CREATE TABLE parents (id INTEGER PRIMARY KEY); \
        CREATE TABLE children (id INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)";
    pool.execute(tables).await.expect("it makes its tables");
    let mut transaction = begin(&transactions).await;
    note(&mut transaction, "lost").await;
    insert(&transactions, &mut transaction, "k").await;
    transaction.execute("INSERT INTO children VALUES (7)").await.expect("it is looked at in the end");
    let error = failure(transactions.commit(transaction).await);
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("FOREIGN KEY"), "{error}");
    // Nothing holds the lock, and nothing is there.
    execute(&mut connect(&path).await, "BEGIN IMMEDIATE; ROLLBACK").await;
    assert_eq!(notes(&pool).await, [""; 0]);
    assert!(!exists(&transactions, "k").await);
    transactions.roll_back(begin(&transactions).await).await;
}

/// Some failures end the transaction at once; sqlx does not notice, and would count it for ever.
#[tokio::test]
async fn a_transaction_that_sqlite_undid_keeps_nobody_from_the_next() {
    let Application { _folder, pool, transactions, .. } = application(1).await;
    for dropped in [false, true] {
        let mut transaction = begin(&transactions).await;
        insert(&transactions, &mut transaction, "k").await;
        let twice = "INSERT OR ROLLBACK INTO notes (at, line) VALUES (1, 'a'), (1, 'b')";
        transaction.execute(twice).await.expect_err("it ends the transaction");
        if dropped {
            drop(transaction);
        } else {
            transactions.roll_back(transaction).await;
        }
        assert!(!exists(&transactions, "k").await);
        transactions.roll_back(begin(&transactions).await).await;
    }
    // A commit cannot tell what became of it.
    let mut transaction = begin(&transactions).await;
    transaction.execute("ROLLBACK").await.expect("it is over");
    assert!(failure(transactions.commit(transaction).await).may_have_applied());
    let mut transaction = begin(&transactions).await;
    note(&mut transaction, "next").await;
    transactions.commit(transaction).await.expect("it commits");
    assert_eq!(notes(&pool).await, ["next"]);
}

/// Whoever leaves in the middle of a commit leaves all of it or nothing, and no lock.
#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_commit_is_whole() {
    let Application { _folder, path, pool, transactions } = application(1).await;
    let mut other = connect(&path).await;
    for round in 0..60_u32 {
        let key = format!("k{round}");
        let mut transaction = begin(&transactions).await;
        note(&mut transaction, &key).await;
        insert(&transactions, &mut transaction, &key).await;
        {
            let mut committing = pin!(transactions.commit(transaction));
            for _ in 0..round % 3 {
                let polled = committing.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                if matches!(polled, Poll::Ready(_)) {
                    break;
                }
                sleep(Duration::from_micros(u64::from(round) * 20)).await;
            }
        }
        execute(&mut other, "BEGIN IMMEDIATE; ROLLBACK").await;
        transactions.roll_back(begin(&transactions).await).await;
        assert_eq!(notes(&pool).await.contains(&key), exists(&transactions, &key).await, "{key}");
    }
    let kept = notes(&pool).await.len();
    assert!((20..=40).contains(&kept), "a third is dropped before it starts, and {kept} were kept");
}

/// At every point of a begin, a claim and a commit, in the hands of somebody who holds them open.
#[tokio::test(flavor = "multi_thread")]
async fn callers_that_leave_hold_nothing() {
    let Application { _folder, path, pool, transactions } = application(2).await;
    for round in 0..200_u32 {
        let key = format!("k{round}");
        let work = tokio::spawn({
            let transactions = transactions.clone();
            async move {
                let mut transaction = begin(&transactions).await;
                note(&mut transaction, &key).await;
                insert(&transactions, &mut transaction, &key).await;
                transactions.commit(transaction).await.expect("it commits");
            }
        });
        sleep(Duration::from_micros(u64::from(round % 50) * 40)).await;
        work.abort();
    }
    transactions.roll_back(begin(&transactions).await).await;
    execute(&mut connect(&path).await, "BEGIN IMMEDIATE; ROLLBACK").await;
    let kept = notes(&pool).await;
    for round in 0..200 {
        let key = format!("k{round}");
        assert_eq!(kept.contains(&key), exists(&transactions, &key).await, "{key}");
    }
}

/// The store's own writes and sweeps take turns with transactions.
#[tokio::test]
async fn the_store_waits_for_an_open_transaction() {
    let Application { _folder, path, transactions, .. } = application(1).await;
    let options = SqliteOptions::file(&path).shared(true).busy_timeout(Duration::from_millis(200));
    let impatient = SqliteStore::open(&options).await.expect("it opens");
    let transaction = begin(&transactions).await;
    let error = impatient.insert(&operation("k"), running(1)).await.expect_err("the lock is held");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(impatient.read(operation("k").id()).await.expect("it reads").is_none());
    transactions.roll_back(transaction).await;
    assert!(matches!(impatient.insert(&operation("k"), running(1)).await, Ok(Inserted::New(_))));
}

/// A pool that would take the file's log away cannot while the store has it.
#[tokio::test]
async fn a_pool_with_another_journal_mode_does_not_begin() {
    let Application { _folder, path, pool, .. } = application(1).await;
    let options = SqliteOptions::file(&path).shared(true).busy_timeout(Duration::from_millis(200));
    let ours = SqliteStore::open(&options).await.expect("it opens");
    let connect = SqliteConnectOptions::new().filename(&path).journal_mode(SqliteJournalMode::Delete);
    let theirs = SqlitePoolOptions::new().connect_lazy_with(connect.busy_timeout(Duration::ZERO));
    let error = ours.transactions(&theirs).await.map(drop).expect_err("it cannot connect");
    assert!(error.to_string().contains("journal mode"), "{error}");
    assert_eq!(journal_mode(&pool).await, "wal");
}

async fn journal_mode(pool: &SqlitePool) -> String {
    sqlx::query_scalar("PRAGMA journal_mode").fetch_one(pool).await.expect("it reads")
}

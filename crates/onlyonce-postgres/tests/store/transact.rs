//! Claims inside the application's own transactions, when things break and when they do not.

use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use onlyonce_core::record::State;
use onlyonce_core::transact::{ClaimedIn, Held, claim};
use onlyonce_core::{
    Claimed, Engine, Lapse, Policy, Store, StoreError, StoreErrorKind, TransactionError, Transactional,
    Verdict,
};
use onlyonce_postgres::{OpenErrorKind, PostgresTransactions, is_conflict};
use onlyonce_testkit::{PgBouncer, Proxy};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, Postgres as Database, Row, Transaction, raw_sql};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::*;

const POLICY: Policy =
    Policy { lease: Duration::from_secs(75), retention: Duration::from_secs(86_400), on_lapse: Lapse::Rerun };
const PATIENT: Duration = Duration::from_secs(60);

type Tx = Transaction<'static, Database>;

fn connect(url: &str) -> PgConnectOptions {
    url.parse::<PgConnectOptions>().unwrap().extra_float_digits(None)
}

fn pool(connect: PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new().max_connections(connections).connect_lazy_with(connect)
}

/// A database with the application's own table in it.
fn database() -> String {
    let database = server().database();
    server().sql(&database, "CREATE TABLE notes (line text)");
    database
}

async fn transactions(url: &str) -> PostgresTransactions {
    let store = open(url).await;
    store.transactions(&pool(connect(url), 4)).await.unwrap()
}

async fn note(transaction: &mut Tx, line: &str) -> Result<(), sqlx::Error> {
    let insert = sqlx::query("INSERT INTO notes VALUES ($1)").bind(line.to_owned()).persistent(false);
    insert.execute(&mut **transaction).await.map(|_| ())
}

fn notes(database: &str) -> String {
    server().sql(database, "SELECT line FROM notes ORDER BY line")
}

async fn ask(
    shop: &PostgresTransactions,
    key: &str,
    wait: Duration,
) -> Result<(Tx, ClaimedIn), TransactionError> {
    let mut transaction = shop.begin(wait).await?;
    let asked = claim(shop, &mut transaction, &operation(key), running().fingerprint, &POLICY).await;
    match asked {
        Ok(claimed) => Ok((transaction, claimed)),
        Err(error) => {
            shop.roll_back(transaction).await;
            Err(error)
        }
    }
}

async fn hold(shop: &PostgresTransactions, key: &str) -> (Tx, Held) {
    match ask(shop, key, PATIENT).await.unwrap() {
        (transaction, ClaimedIn::Execute(held)) => (transaction, held),
        (_, other) => panic!("{key}: {other:?}"),
    }
}

fn outcome() -> Outcome {
    Outcome { status: 201, head: vec![1; 120].into(), body: vec![b'x'; 200].into() }
}

/// Claims, writes a note with the key's name, completes and commits.
async fn execute(shop: &PostgresTransactions, key: &str) -> Result<(), TransactionError> {
    let (mut transaction, claimed) = ask(shop, key, PATIENT).await?;
    let ClaimedIn::Execute(held) = claimed else { panic!("{key}: {claimed:?}") };
    if let Err(error) = note(&mut transaction, key).await {
        shop.roll_back(transaction).await;
        let error = StoreError::new(StoreErrorKind::Unavailable, error.to_string());
        return Err(TransactionError::Failed(error));
    }
    if let Err(error) = held.complete(shop, &mut transaction, outcome()).await {
        shop.roll_back(transaction).await;
        return Err(error);
    }
    shop.commit(transaction).await
}

fn failed<T: std::fmt::Debug>(answer: Result<T, TransactionError>) -> StoreError {
    match answer {
        Err(TransactionError::Failed(error)) => error,
        other => panic!("{other:?}"),
    }
}

async fn show(transaction: &mut Tx, setting: &str) -> String {
    let show = format!("SHOW {setting}");
    transaction.fetch_one(raw_sql(AssertSqlSafe(show))).await.unwrap().get(0)
}

/// Waits until no session of the database is inside a transaction.
async fn all_transactions_end(database: &str) {
    let ended = timeout(Duration::from_secs(10), async {
        while !idle_in_transaction(database).is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    });
    ended.await.unwrap_or_else(|_| panic!("{}", idle_in_transaction(database)));
}

/// Keys that are done, in the order of their names; a claim that is not must never be seen.
async fn done_keys(database: &str) -> String {
    let running = "SELECT count(*) FROM onlyonce.idempotency_keys WHERE completed_at IS NULL";
    assert_eq!(server().sql(database, running), "0", "a claim without its outcome is committed");
    server().sql(database, "SELECT key FROM onlyonce.idempotency_keys ORDER BY key")
}

#[tokio::test]
async fn a_user_has_their_own_settings_back_with_the_key() {
    for (lock, statement) in [("0", "0"), ("7s", "11s")] {
        let database = database();
        let url = server().url(&database);
        let store = open(&url).await;
        let settings = [("lock_timeout", lock), ("statement_timeout", statement)];
        let pool = pool(connect(&url).options(settings), 1);
        let shop = store.transactions(&pool).await.unwrap();
        store.insert(&operation("lapsed"), expired()).await.unwrap();
        for key in ["new", "lapsed"] {
            let mut transaction = shop.begin(Duration::from_secs(3)).await.unwrap();
            assert_eq!(show(&mut transaction, "lock_timeout").await, "3s");
            assert_eq!(show(&mut transaction, "statement_timeout").await, "8s");
            let asked = claim(&shop, &mut transaction, &operation(key), running().fingerprint, &POLICY).await;
            let Ok(ClaimedIn::Execute(held)) = asked else { panic!("{asked:?}") };
            assert_eq!(show(&mut transaction, "lock_timeout").await, lock);
            assert_eq!(show(&mut transaction, "statement_timeout").await, statement);
            for (setting, value) in [("enable_seqscan", "on"), ("plan_cache_mode", "auto"), ("jit", "on")] {
                assert_eq!(show(&mut transaction, setting).await, value);
            }
            held.complete(&shop, &mut transaction, outcome()).await.unwrap();
            shop.commit(transaction).await.unwrap();
            let mut open = shop.open().await.unwrap();
            assert_eq!(show(&mut open, "lock_timeout").await, lock);
            shop.roll_back(open).await;
            let mut plain = pool.begin().await.unwrap();
            assert_eq!(show(&mut plain, "lock_timeout").await, lock);
            assert_eq!(show(&mut plain, "statement_timeout").await, statement);
        }
    }
}

/// Several holders in a row, each shorter than the wait, are bounded by the time for the statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_takes_too_long_as_a_whole_is_busy() {
    let url = server().url(&database());
    let shop = transactions(&url).await;
    let (holder, _) = hold(&shop, "k").await;
    let mut transaction = shop.begin(PATIENT).await.unwrap();
    assert_eq!(show(&mut transaction, "statement_timeout").await, "65s");
    transaction.execute(raw_sql("SET LOCAL statement_timeout = '300ms'")).await.unwrap();
    let asked = claim(&shop, &mut transaction, &operation("k"), running().fingerprint, &POLICY).await;
    assert!(matches!(asked, Err(TransactionError::Busy)), "{asked:?}");
    shop.roll_back(transaction).await;
    shop.roll_back(holder).await;
}

#[tokio::test]
async fn what_a_user_sets_in_the_transaction_stays() {
    let url = server().url(&database());
    let shop = transactions(&url).await;
    let (mut transaction, held) = hold(&shop, "k").await;
    transaction.execute(raw_sql("SET LOCAL lock_timeout = '123ms'")).await.unwrap();
    held.complete(&shop, &mut transaction, outcome()).await.unwrap();
    assert_eq!(show(&mut transaction, "lock_timeout").await, "123ms");
    shop.commit(transaction).await.unwrap();
}

#[tokio::test]
async fn a_transaction_that_a_user_began_alone_can_claim_as_well() {
    let url = server().url(&database());
    let shop = transactions(&url).await;
    let mut transaction = pool(connect(&url), 1).begin().await.unwrap();
    let asked = claim(&shop, &mut transaction, &operation("k"), running().fingerprint, &POLICY).await;
    let Ok(ClaimedIn::Execute(held)) = asked else { panic!("{asked:?}") };
    held.complete(&shop, &mut transaction, outcome()).await.unwrap();
    shop.commit(transaction).await.unwrap();
    assert!(matches!(ask(&shop, "k", PATIENT).await, Ok((_, ClaimedIn::Replay(_)))));
}

/// The server answers the COMMIT of such a transaction without an error, and rolls back.
#[tokio::test]
async fn a_transaction_in_which_a_statement_failed_is_never_reported_as_committed() {
    let database = database();
    let shop = transactions(&server().url(&database)).await;
    let (mut transaction, held) = hold(&shop, "k").await;
    note(&mut transaction, "k").await.unwrap();
    held.complete(&shop, &mut transaction, outcome()).await.unwrap();
    transaction.execute(raw_sql("SELECT 1 / 0")).await.unwrap_err();
    let error = failed(shop.commit(transaction).await);
    assert!(!error.may_have_applied() && error.to_string().contains("25P02"), "{error}");
    assert_eq!((notes(&database).as_str(), done_keys(&database).await.as_str()), ("", ""));
    // Before the outcome is written, that is what fails.
    let (mut transaction, held) = hold(&shop, "k").await;
    transaction.execute(raw_sql("SELECT 1 / 0")).await.unwrap_err();
    let error = failed(held.complete(&shop, &mut transaction, outcome()).await);
    assert!(!error.may_have_applied() && error.to_string().contains("25P02"), "{error}");
    shop.roll_back(transaction).await;
    all_transactions_end(&database).await;
    execute(&shop, "k").await.unwrap();
}

#[tokio::test]
async fn a_commit_that_the_server_refuses_is_undone() {
    let database = database();
    let shop = transactions(&server().url(&database)).await;
    server().sql(&database, "ALTER TABLE notes ADD UNIQUE (line) DEFERRABLE INITIALLY DEFERRED");
    execute(&shop, "k").await.unwrap();
    let (mut transaction, held) = hold(&shop, "k2").await;
    note(&mut transaction, "k").await.unwrap();
    held.complete(&shop, &mut transaction, outcome()).await.unwrap();
    let error = failed(shop.commit(transaction).await);
    assert!(!error.may_have_applied() && error.to_string().contains("23505"), "{error}");
    assert_eq!(done_keys(&database).await, "k");
}

/// A server that answers every query, except that it goes down over a COMMIT.
fn server_that_panics_at_a_commit() -> u16 {
    fn send(stream: &mut TcpStream, kind: u8, payload: &[u8]) {
        let length = u32::try_from(payload.len() + 4).unwrap();
        stream.write_all(&[&[kind], &length.to_be_bytes()[..], payload].concat()).unwrap();
    }
    fn receive(stream: &mut TcpStream) -> Vec<u8> {
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut payload = vec![0; u32::from_be_bytes(length) as usize - 4];
        stream.read_exact(&mut payload).unwrap();
        payload
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        receive(&mut stream);
        send(&mut stream, b'R', &[0; 4]);
        send(&mut stream, b'Z', b"I");
        loop {
            stream.read_exact(&mut [0]).unwrap();
            if receive(&mut stream).starts_with(b"COMMIT") {
                return send(&mut stream, b'E', b"SPANIC\0VPANIC\0C58030\0Mcould not fsync file\0\0");
            }
            send(&mut stream, b'C', b"DONE\0");
            send(&mut stream, b'Z', b"T");
        }
    });
    port
}

/// It panics when it cannot tell whether its log is on disk; the commit may stand in it, and be recovered.
#[tokio::test]
async fn a_commit_over_which_the_server_panics_is_in_doubt() {
    let shop = transactions(&server().url(&database())).await;
    let url = format!("postgres://app@127.0.0.1:{}/app?sslmode=disable", server_that_panics_at_a_commit());
    let transaction = pool(connect(&url), 1).begin().await.unwrap();
    let error = failed(shop.commit(transaction).await);
    assert!(error.may_have_applied() && error.to_string().contains("58030"), "{error}");
}

#[tokio::test]
async fn a_claim_that_its_user_rolled_back_is_not_completed() {
    let database = database();
    let shop = transactions(&server().url(&database)).await;
    let (mut transaction, held) = hold(&shop, "k").await;
    transaction.execute(raw_sql("ROLLBACK; BEGIN")).await.unwrap();
    let error = failed(held.complete(&shop, &mut transaction, outcome()).await);
    assert!(error.to_string().contains("the claim is gone"), "{error}");
    shop.roll_back(transaction).await;
    assert_eq!(done_keys(&database).await, "");
}

/// sqlx undoes a whole transaction when the begin of one inside it is dropped halfway. What is done with it
/// afterwards would be committed alone.
#[tokio::test]
async fn nothing_is_recorded_by_a_transaction_that_is_over() {
    let database = database();
    let shop = transactions(&server().url(&database)).await;
    let claimed = Engine::new(shop.store()).claim(&operation("k"), running().fingerprint, &POLICY).await;
    let Ok(Claimed::Execute(mut grant)) = claimed else { panic!("{claimed:?}") };
    let mut transaction = shop.open().await.unwrap();
    note(&mut transaction, "k").await.unwrap();
    loop {
        let mut nested = pin!((*transaction).begin());
        // Otherwise the server was quicker.
        if nested.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            break;
        }
    }
    let error = failed(grant.complete_in(&shop, &mut transaction, outcome()).await);
    assert!(error.may_have_applied() && error.to_string().contains("is over"), "{error}");
    let asked = claim(&shop, &mut transaction, &operation("k2"), running().fingerprint, &POLICY).await;
    assert!(failed(asked).to_string().contains("is over"));
    shop.roll_back(transaction).await;
    assert_eq!(notes(&database), "");
    assert!(grant.renew().await.unwrap(), "it is still held");
}

/// Under these the snapshot of a copy that waited is older than what it waited for.
#[tokio::test(flavor = "multi_thread")]
async fn stricter_isolation_levels_conflict_where_others_wait() {
    for isolation in ["repeatable read", "serializable"] {
        let database = database();
        let url = server().url(&database);
        let store = open(&url).await;
        let default = [("default_transaction_isolation", isolation)];
        let shop = store.transactions(&pool(connect(&url).options(default), 4)).await.unwrap();
        let (mut transaction, held) = hold(&shop, "k").await;
        assert_eq!(show(&mut transaction, "transaction_isolation").await, isolation);
        let copy = tokio::spawn({
            let shop = shop.clone();
            async move { ask(&shop, "k", PATIENT).await.map(|(_, claimed)| claimed) }
        });
        sleep(Duration::from_millis(300)).await;
        assert!(!copy.is_finished());
        held.complete(&shop, &mut transaction, outcome()).await.unwrap();
        shop.commit(transaction).await.unwrap();
        let waited = copy.await.unwrap();
        assert!(matches!(waited, Err(TransactionError::Conflict(_))), "{isolation}: {waited:?}");
        let again = ask(&shop, "k", PATIENT).await;
        assert!(matches!(again, Ok((_, ClaimedIn::Replay(_)))), "{isolation}: {again:?}");
        // A rolled back claim was never made, under any level.
        let (transaction, _) = hold(&shop, "k2").await;
        let copy = tokio::spawn({
            let shop = shop.clone();
            async move { execute(&shop, "k2").await }
        });
        sleep(Duration::from_millis(300)).await;
        shop.roll_back(transaction).await;
        copy.await.unwrap().unwrap();
        // Neither is an expired one in the way.
        store.insert(&operation("k3"), expired()).await.unwrap();
        execute(&shop, "k3").await.unwrap();
        assert_eq!(done_keys(&database).await, "k\nk2\nk3");
    }
}

/// Two that read what the other writes: one of them is undone, and its key with it.
#[tokio::test]
async fn a_serialization_failure_is_a_conflict() {
    let database = database();
    let url = server().url(&database);
    let default = [("default_transaction_isolation", "serializable")];
    let shop = open(&url).await.transactions(&pool(connect(&url).options(default), 4)).await.unwrap();
    let (mut first, first_held) = hold(&shop, "k1").await;
    let (mut second, second_held) = hold(&shop, "k2").await;
    for (transaction, line) in [(&mut first, "k1"), (&mut second, "k2")] {
        transaction.fetch_all(raw_sql("SELECT count(*) FROM notes")).await.unwrap();
        note(transaction, line).await.unwrap();
    }
    first_held.complete(&shop, &mut first, outcome()).await.unwrap();
    second_held.complete(&shop, &mut second, outcome()).await.unwrap();
    shop.commit(first).await.unwrap();
    let conflict = shop.commit(second).await;
    assert!(matches!(conflict, Err(TransactionError::Conflict(_))), "{conflict:?}");
    assert_eq!((notes(&database).as_str(), done_keys(&database).await.as_str()), ("k1", "k1"));
    execute(&shop, "k2").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_a_conflict() {
    let database = database();
    let shop = transactions(&server().url(&database)).await;
    server().sql(&database, "INSERT INTO notes VALUES ('a')");
    // One holds the key and wants the row; the other holds the row and wants the key.
    let (mut holder, _) = hold(&shop, "k").await;
    let mut wanter = shop.begin(PATIENT).await.unwrap();
    let lock = "SELECT * FROM notes FOR UPDATE";
    wanter.execute(raw_sql(lock)).await.unwrap();
    let wanting = tokio::spawn({
        let shop = shop.clone();
        async move {
            let asked =
                claim(&shop, &mut wanter, &operation("k"), running().fingerprint, &POLICY).await.map(|_| ());
            shop.roll_back(wanter).await;
            asked
        }
    });
    let locked = holder.execute(raw_sql(lock)).await.map(|_| ());
    shop.roll_back(holder).await;
    match (locked, wanting.await.unwrap()) {
        (Err(error), Ok(())) => assert!(is_conflict(&error), "{error}"),
        (Ok(()), Err(error)) => assert!(matches!(error, TransactionError::Conflict(_)), "{error:?}"),
        other => panic!("{other:?}"),
    }
}

async fn refused(store: &PostgresStore, pool: PgPool, says: &[&str]) {
    let error = store.transactions(&pool).await.err().expect("refused");
    assert_eq!(error.kind(), OpenErrorKind::Refused, "{error}");
    let text = error.to_string();
    assert!(says.iter().all(|says| text.contains(says)), "{text}");
    assert!(!text.contains('\n') && !text.contains("hunter2"), "{text}");
}

#[tokio::test]
async fn a_pool_in_which_the_guarantee_would_not_hold_is_refused() {
    let (database, elsewhere) = (database(), database());
    let url = server().url(&database);
    let store = open(&url).await;
    let one = |url: &str| pool(connect(url), 1);
    refused(&store, one(&server().url(&elsewhere)), &["another database"]).await;
    // With the same tables it is another one still.
    open(&server().url(&elsewhere)).await;
    refused(&store, one(&server().url(&elsewhere)), &["another database", &database]).await;
    let other_server = onlyonce_testkit::Postgres::start("");
    refused(&store, one(&other_server.url("postgres")), &["another database"]).await;
    let volatile = connect(&url).options([("synchronous_commit", "off")]);
    refused(&store, pool(volatile.clone(), 1), &["volatile", "allow_volatile"]).await;
    let allowed = PostgresStore::open(&options(&url).allow_volatile(true)).await.unwrap();
    let shop = allowed.transactions(&pool(volatile, 1)).await.unwrap();
    let mut transaction = shop.begin(PATIENT).await.unwrap();
    assert_eq!(show(&mut transaction, "synchronous_commit").await, "off");
    let read_only = connect(&url).options([("default_transaction_read_only", "on")]);
    refused(&store, pool(read_only, 1), &["read-only"]).await;
    let user = format!("u_{database}");
    server().sql(&database, &format!("CREATE ROLE {user} LOGIN PASSWORD 'x'"));
    let of_user = |password: &str| {
        one(&format!("postgres://{user}:{password}@127.0.0.1:{}/{database}", server().port()))
    };
    refused(&store, of_user("hunter2"), &["user, password and database"]).await;
    refused(&store, of_user("x"), &["GRANT USAGE ON SCHEMA", "UPDATE"]).await;
    server().sql(
        &database,
        &format!(
            "GRANT USAGE ON SCHEMA onlyonce TO {user}; \
             GRANT SELECT, INSERT, UPDATE ON onlyonce.idempotency_keys TO {user}; GRANT INSERT ON notes TO {user}"
        ),
    );
    execute(&store.transactions(&of_user("x")).await.unwrap(), "k").await.unwrap();
    let error = store.transactions(&one("postgres://postgres@127.0.0.1:1/keys")).await.err().expect("away");
    assert_eq!(error.kind(), OpenErrorKind::Failed, "{error}");
}

/// Transaction pooling shares sessions, and so what another client has set in one.
#[tokio::test]
async fn what_another_client_left_with_the_pooler_makes_no_commit_volatile() {
    let database = database();
    let bouncer = PgBouncer::start(server(), "default_pool_size = 1\n");
    let store = open(&server().url(&database)).await;
    let shop = store.transactions(&pool(connect(&bouncer.url(&database)), 1)).await.unwrap();
    let mut other = sqlx::PgConnection::connect_with(&connect(&bouncer.url(&database))).await.unwrap();
    other.execute(raw_sql("SET synchronous_commit = off; SET lock_timeout = '1234ms'")).await.unwrap();
    // One that connects only now sees the other's setting from the start.
    let late = store.transactions(&pool(connect(&bouncer.url(&database)), 1)).await.unwrap();
    for (shop, key) in [(shop, "k"), (late, "l")] {
        let (mut transaction, _) = hold(&shop, key).await;
        let (commit, lock) = (
            show(&mut transaction, "synchronous_commit").await,
            show(&mut transaction, "lock_timeout").await,
        );
        // PgBouncer ends when its clients' transactions have.
        shop.roll_back(transaction).await;
        assert_eq!((commit.as_str(), lock.as_str()), ("on", "1234ms"));
    }
}

/// On a server where nobody else writes: how many transactions a number of executions are.
#[tokio::test]
async fn an_execution_is_one_transaction() {
    let server = onlyonce_testkit::Postgres::start("autovacuum = off\n");
    let database = server.database();
    server.sql(&database, "CREATE TABLE notes (line text)");
    let url = server.url(&database);
    let store = open(&url).await;
    let shop = store.transactions(&pool(connect(&url), 2)).await.unwrap();
    let engine = Engine::new(Arc::new(store.clone()));
    let count = || {
        let next = server.sql(&database, "SELECT txid_snapshot_xmax(txid_current_snapshot())");
        next.parse::<u64>().unwrap()
    };
    let before = count();
    for at in 0..10 {
        execute(&shop, &format!("k{at}")).await.unwrap();
    }
    assert_eq!(count() - before, 10);
    // A replay is none: it writes nothing.
    let before = count();
    for at in 0..10 {
        let (transaction, claimed) = ask(&shop, &format!("k{at}"), PATIENT).await.unwrap();
        assert!(matches!(claimed, ClaimedIn::Replay(_)));
        shop.roll_back(transaction).await;
    }
    assert_eq!(count() - before, 0);
    // With a lease it is two, and the work another.
    let plain = pool(connect(&url), 1);
    for at in 0..10 {
        let payment = operation(&format!("leased{at}"));
        let claimed = engine.claim(&payment, running().fingerprint, &POLICY).await.unwrap();
        let Claimed::Execute(grant) = claimed else { panic!("{claimed:?}") };
        plain.execute("INSERT INTO notes VALUES ('leased')").await.unwrap();
        grant.finish(Verdict::Keep(outcome())).await.unwrap();
    }
    assert_eq!(count() - before, 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_a_free_connection_is_unavailable_in_time() {
    let database = database();
    let url = server().url(&database);
    let shop = open(&url).await.transactions(&pool(connect(&url), 1)).await.unwrap();
    let (transaction, _) = hold(&shop, "k").await;
    let asked_at = Instant::now();
    let error = failed(shop.begin(PATIENT).await);
    assert!(!error.may_have_applied(), "{error}");
    assert!(asked_at.elapsed() < Duration::from_secs(15), "{:?}", asked_at.elapsed());
    shop.roll_back(transaction).await;
    // The one that gave up gets the connection now, and gives it back.
    execute(&shop, "k").await.unwrap();
    all_transactions_end(&database).await;
}

/// Nobody answers any more: every call ends, and only the commit is in doubt.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_vanished_is_given_up_in_time() {
    let database = database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let store = open(&server().url(&database)).await;
    let url = format!("postgres://postgres@127.0.0.1:{}/{database}", proxy.port());
    let shop = store.transactions(&pool(connect(&url), 4)).await.unwrap();
    let (mut completing, held) = hold(&shop, "k1").await;
    let (mut committing, committed) = hold(&shop, "k2").await;
    committed.complete(&shop, &mut committing, outcome()).await.unwrap();
    proxy.stall(true);
    let asked_at = Instant::now();
    let (begun, completed, committed) = tokio::join!(
        shop.begin(PATIENT),
        held.complete(&shop, &mut completing, outcome()),
        shop.commit(committing)
    );
    assert!(!failed(begun).may_have_applied());
    assert!(!failed(completed).may_have_applied());
    assert_eq!(failed(committed).kind(), StoreErrorKind::Ambiguous);
    shop.roll_back(completing).await;
    assert!(asked_at.elapsed() < Duration::from_secs(20), "{:?}", asked_at.elapsed());
    // What was on its way arrives.
    proxy.stall(false);
    all_transactions_end(&database).await;
    execute(&shop, "k1").await.unwrap();
    assert_eq!(done_keys(&database).await, "k1\nk2");
}

/// Cuts the connection at another moment of the commit each time.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_lost_is_in_doubt_and_whole() {
    let database = database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let store = open(&server().url(&database)).await;
    let url = format!("postgres://postgres@127.0.0.1:{}/{database}", proxy.port());
    let shop = store.transactions(&pool(connect(&url), 2)).await.unwrap();
    let (mut kept, mut doubted_kept, mut undone) = (0, 0, 0);
    // A slow machine shifts the moments: as many rounds as it takes to meet each kind.
    for round in 0..400_u64 {
        if round >= 40 && kept > 0 && doubted_kept > 0 && undone > 0 {
            break;
        }
        let key = format!("k{round:03}");
        let (mut transaction, held) = hold(&shop, &key).await;
        note(&mut transaction, &key).await.unwrap();
        held.complete(&shop, &mut transaction, outcome()).await.unwrap();
        // There and back are four times this: the question, and the COMMIT.
        proxy.delay(Duration::from_millis(10));
        let committing = tokio::spawn({
            let shop = shop.clone();
            async move { shop.commit(transaction).await }
        });
        sleep(Duration::from_millis(round % 40 * 3)).await;
        proxy.delay(Duration::ZERO);
        proxy.cut();
        let answer = committing.await.unwrap();
        all_transactions_end(&database).await;
        let seen = store.read(operation(&key).id()).await.unwrap();
        let there = seen.is_some_and(|seen| matches!(seen.record.state, State::Done { .. }));
        match answer {
            Ok(()) => {
                assert!(there, "round {round}: a commit that was answered is lost");
                kept += 1;
            }
            Err(TransactionError::Failed(error)) if error.may_have_applied() => {
                doubted_kept += u32::from(there);
            }
            Err(error) => {
                assert!(!there, "round {round}: undone by its answer, and there: {error}");
                undone += 1;
            }
        }
    }
    assert_eq!(notes(&database), done_keys(&database).await, "work without its key, or the reverse");
    assert!(kept > 0 && doubted_kept > 0 && undone > 0, "{kept} {doubted_kept} {undone}");
}

/// What a task was told of its keys.
#[derive(Default)]
struct Told {
    committed: Vec<String>,
    undone: Vec<String>,
    in_doubt: u32,
}

/// Cuts connections at random while many tasks execute, and then compares.
async fn work_and_key_stay_together(shop: PostgresTransactions, proxy: &Proxy, database: &str, cut_ms: u64) {
    let started = Instant::now();
    let committed = Arc::new(AtomicUsize::new(0));
    // On a slow machine few commits fit between two cuts.
    let ended = {
        let committed = Arc::clone(&committed);
        move || match started.elapsed().as_secs() {
            0..4 => false,
            4..60 => committed.load(Ordering::Relaxed) > 50,
            _ => true,
        }
    };
    let mut tasks = JoinSet::new();
    for task in 0..8 {
        let (shop, committed, ended) = (shop.clone(), Arc::clone(&committed), ended.clone());
        tasks.spawn(async move {
            let mut told = Told::default();
            for at in 0.. {
                if ended() {
                    break;
                }
                let key = format!("k{task}-{at:05}");
                match execute(&shop, &key).await {
                    Ok(()) => {
                        told.committed.push(key);
                        committed.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(TransactionError::Failed(error)) if error.may_have_applied() => told.in_doubt += 1,
                    Err(_) => told.undone.push(key),
                }
            }
            told
        });
    }
    let mut random: u64 = 0x9e37_79b9_7f4a_7c15;
    while !ended() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        sleep(Duration::from_millis(cut_ms + (random >> 33) % cut_ms)).await;
        proxy.cut();
    }
    let told = tasks.join_all().await;
    all_transactions_end(database).await;
    let done = done_keys(database).await;
    assert_eq!(notes(database), done, "work without its key, or the reverse");
    let done: std::collections::HashSet<&str> = done.lines().collect();
    let lost = told.iter().flat_map(|told| &told.committed).filter(|key| !done.contains(key.as_str()));
    assert_eq!(lost.collect::<Vec<_>>(), [""; 0], "committed, and lost");
    let back = told.iter().flat_map(|told| &told.undone).filter(|key| done.contains(key.as_str()));
    assert_eq!(back.collect::<Vec<_>>(), [""; 0], "undone, and there");
    let count = |of: fn(&Told) -> usize| told.iter().map(of).sum::<usize>();
    let (committed, undone) = (count(|told| told.committed.len()), count(|told| told.undone.len()));
    assert!(committed > 50 && undone > 0, "{committed} committed, {undone} undone");
    execute(&shop, "last").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn work_and_key_stay_together_when_connections_are_cut() {
    let database = database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let store = open(&server().url(&database)).await;
    let url = format!("postgres://postgres@127.0.0.1:{}/{database}", proxy.port());
    let shop = store.transactions(&pool(connect(&url), 6)).await.unwrap();
    work_and_key_stay_together(shop, &proxy, &database, 40).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn work_and_key_stay_together_when_the_poolers_connections_are_cut() {
    let database = database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let pooler = PgBouncer::start_before(proxy.port(), "server_login_retry = 1\n");
    let store = open(&server().url(&database)).await;
    let shop = store.transactions(&pool(connect(&pooler.url(&database)), 6)).await.unwrap();
    // A cut in a login makes PgBouncer refuse everyone for a second.
    work_and_key_stay_together(shop, &proxy, &database, 250).await;
}

/// Polls an execution a number of times and drops it. With one connection in the pool, a transaction that
/// is left in it would take in whatever the application writes next.
#[tokio::test(flavor = "multi_thread")]
async fn a_caller_dropped_at_any_point_leaves_no_claim_and_no_transaction() {
    let database = database();
    let url = server().url(&database);
    let store = open(&url).await;
    let pool = pool(connect(&url), 1);
    let shop = store.transactions(&pool).await.unwrap();
    let mut answered = 0;
    for round in 0..120_u32 {
        let key = format!("k{round:03}");
        {
            let mut call = pin!(execute(&shop, &key));
            for _ in 0..=round % 12 {
                if let Poll::Ready(answer) = call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    answer.unwrap();
                    answered += 1;
                    break;
                }
                sleep(Duration::from_micros(u64::from(round) * 12)).await;
            }
        }
        pool.execute(raw_sql("INSERT INTO notes VALUES ('alone')")).await.unwrap();
        let alone = server().sql(&database, "SELECT count(*) FROM notes WHERE line = 'alone'");
        assert_eq!(alone, (round + 1).to_string(), "a write went into a transaction that was left open");
    }
    all_transactions_end(&database).await;
    server().sql(&database, "DELETE FROM notes WHERE line = 'alone'");
    let done = done_keys(&database).await;
    assert_eq!(notes(&database), done, "work without its key, or the reverse");
    assert!((1..120).contains(&answered) && done.lines().count() >= answered, "{answered} answered");
}

/// A key that an open transaction has claimed locks its row for as long as that one is open, and nobody sees it.
#[tokio::test(flavor = "multi_thread")]
async fn keys_of_long_transactions_fail_no_claims_of_others() {
    let url = server().url(&database());
    let (store, shop) = (open(&url).await, transactions(&url).await);
    let long = |at: u32| operation(&format!("long-{at}"));
    let mut transaction = shop.begin(PATIENT).await.unwrap();
    for at in 0..8 {
        claim(&shop, &mut transaction, &long(at), running().fingerprint, &POLICY).await.unwrap();
    }
    let until = Instant::now() + Duration::from_secs(4);
    let engine = Engine::new(Arc::new(store));
    let mut copies = JoinSet::new();
    for at in 0..8 {
        let engine = engine.clone();
        copies.spawn(async move {
            while Instant::now() < until {
                engine.claim(&long(at), running().fingerprint, &POLICY).await.unwrap_err();
                sleep(Duration::from_secs(1)).await;
            }
        });
    }
    let mut others = JoinSet::new();
    for at in 0..64 {
        let engine = engine.clone();
        others.spawn(async move {
            for claims in 0.. {
                let claimed =
                    engine.claim(&operation(&format!("{at}-{claims}")), running().fingerprint, &POLICY).await;
                assert!(matches!(claimed, Ok(Claimed::Execute(_))), "{claimed:?}");
                if Instant::now() >= until {
                    return;
                }
                sleep(Duration::from_millis(5)).await;
            }
        });
    }
    others.join_all().await;
    copies.join_all().await;
    shop.roll_back(transaction).await;
}

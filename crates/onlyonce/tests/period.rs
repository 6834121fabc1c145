//! Periods as a library call, on real databases.
#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use onlyonce::period::{Claim, Every, Period, PeriodConfig, PeriodError, Periods, Ran, Schedule};
use onlyonce_core::{Lapse, MemoryStore};
use onlyonce_postgres::{PostgresStore, PostgresTransactions};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use onlyonce_testkit::Postgres;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use tokio::time::sleep;

fn berlin() -> TimeZone {
    TimeZone::get("Europe/Berlin").unwrap()
}

fn at(instant: &str) -> Timestamp {
    instant.parse().unwrap()
}

fn july() -> Period {
    Period::month(&berlin(), at("2026-07-01T00:00:00+02:00"))
}

fn by(host: &str) -> PeriodConfig {
    PeriodConfig { host: Some(host.into()), ..PeriodConfig::default() }
}

/// An application with a table of invoices.
struct App {
    pool: PgPool,
    database: PostgresTransactions,
}

impl App {
    async fn start() -> Self {
        let server = Postgres::shared();
        let url = server.url(&server.database());
        let pool = PgPoolOptions::new().max_connections(10).connect_lazy(&url).unwrap();
        sqlx::query("CREATE TABLE invoices (line text)").execute(&pool).await.unwrap();
        let store = PostgresStore::open(&url.parse().unwrap()).await.unwrap();
        let database = store.transactions(&pool).await.unwrap();
        Self { pool, database }
    }

    fn periods(&self, config: PeriodConfig) -> Periods<PostgresTransactions> {
        Periods::transactional(self.database.clone(), config).unwrap()
    }

    /// What a scheduler calls: bills and commits, unless it was done.
    async fn bill(&self, host: &str, period: &Period) -> Result<Ran<u32>, PeriodError> {
        let mut tx = self.pool.begin().await.unwrap();
        let periods = self.periods(by(host));
        let turn = match periods.claim(&mut tx, "billing", period).await? {
            Claim::Run(turn) => turn,
            Claim::Before(run) => return Ok(Ran::Before(run)),
        };
        let attempt = turn.execution().attempt;
        let line = format!("{} {attempt}", turn.execution().operation.key());
        sqlx::query("INSERT INTO invoices VALUES ($1)").bind(line).execute(&mut *tx).await.unwrap();
        turn.done(&mut tx).await?;
        tx.commit().await.unwrap();
        Ok(Ran::Now(attempt))
    }

    async fn invoices(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT line FROM invoices ORDER BY line").fetch_all(&self.pool).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_hosts_one_bills_and_the_others_are_told_who() {
    let app = Arc::new(App::start().await);
    // Clocks that are apart by minutes: the month is the same.
    let starts = (0..8).map(|i| {
        let app = Arc::clone(&app);
        let scheduled_at = at("2026-07-01T00:00:00+02:00") + jiff::SignedDuration::from_secs(40 * i);
        tokio::spawn(async move {
            let host = format!("host-{i}");
            let ran = app.bill(&host, &Period::month(&berlin(), scheduled_at)).await.unwrap();
            (host, ran)
        })
    });
    let (mut did, mut told) = (Vec::new(), Vec::new());
    for start in starts.collect::<Vec<_>>() {
        match start.await.unwrap() {
            (host, Ran::Now(_)) => did.push(host),
            (_, Ran::Before(run)) => told.push(run.host.unwrap()),
        }
    }
    assert_eq!(app.invoices().await, ["billing:2026-07 1"]);
    assert_eq!((did.len(), told.len()), (1, 7));
    assert!(told.iter().all(|host| *host == did[0]), "{told:?} {did:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_failed_or_was_not_committed_leaves_the_period_free() {
    let app = App::start().await;
    let mut tx = app.pool.begin().await.unwrap();
    let periods = app.periods(by("a"));
    let failed = periods
        .once(&mut tx, "billing", &july(), async |tx, _| -> Result<(), _> {
            sqlx::query("INSERT INTO invoices VALUES ('half')").execute(&mut **tx).await?;
            sqlx::query("INSERT INTO no_such_table VALUES (1)").execute(&mut **tx).await?;
            Ok(())
        })
        .await;
    assert!(matches!(failed, Err(PeriodError::Work(sqlx::Error::Database(_)))), "{failed:?}");
    drop(tx);

    let mut tx = app.pool.begin().await.unwrap();
    let done = periods.once(&mut tx, "billing", &july(), async |_, _| Ok::<_, sqlx::Error>(())).await;
    assert!(matches!(done, Ok(Ran::Now(()))));
    tx.rollback().await.unwrap();

    assert!(matches!(app.bill("b", &july()).await, Ok(Ran::Now(1))));
    assert!(matches!(app.bill("c", &july()).await, Ok(Ran::Before(run)) if run.host.as_deref() == Some("b")));
    assert_eq!(app.invoices().await, ["billing:2026-07 1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn on_sqlite_a_period_is_run_once_in_the_applications_own_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("app.db");
    let connect = SqliteConnectOptions::new().filename(&file).create_if_missing(true);
    let connect = connect.journal_mode(SqliteJournalMode::Wal).busy_timeout(Duration::from_secs(60));
    let pool = SqlitePoolOptions::new().max_connections(4).connect_lazy_with(connect);
    sqlx::query("CREATE TABLE invoices (line TEXT)").execute(&pool).await.unwrap();
    let store = SqliteStore::open(&SqliteOptions::file(&file).shared(true)).await.unwrap();
    let periods = Periods::transactional(store.transactions(&pool).await.unwrap(), by("a")).unwrap();
    let (mut ran, july) = (0, july());
    for _ in 0..3 {
        let mut tx = pool.begin_with("BEGIN IMMEDIATE").await.unwrap();
        let billed = periods.once(&mut tx, "billing", &july, async |tx, _| {
            sqlx::query("INSERT INTO invoices VALUES ('x')").execute(&mut **tx).await
        });
        if let Ran::Now(_) = billed.await.unwrap() {
            ran += 1;
        }
        tx.commit().await.unwrap();
    }
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM invoices").fetch_one(&pool).await.unwrap();
    assert_eq!((ran, rows), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_zone_a_malformed_job_and_a_short_retention_are_refused() {
    let app = App::start().await;
    app.bill("a", &july()).await.unwrap();
    let utc = Period::month(&TimeZone::UTC, at("2026-07-01T00:00:00Z"));
    assert!(matches!(app.bill("a", &utc).await, Err(PeriodError::OtherSchedule)));

    let mut tx = app.pool.begin().await.unwrap();
    let nothing = async |_: &mut _, _: &_| -> Result<(), sqlx::Error> { panic!("it must not run") };
    let malformed = app.periods(by("a")).once(&mut tx, "a:b", &july(), nothing).await;
    assert!(matches!(malformed, Err(PeriodError::Job(_))));
    let config = PeriodConfig { retention: Some(Duration::from_secs(86_400)), ..by("a") };
    let short = app.periods(config).once(&mut tx, "billing", &july(), nothing).await;
    assert!(matches!(&short, Err(PeriodError::Settings(error)) if error.setting == "retention"), "{short:?}");
}

#[tokio::test]
async fn without_a_transaction_the_lease_is_renewed_for_as_long_as_the_work_goes_on() {
    let config = PeriodConfig { lease: Duration::from_millis(900), ..by("a") };
    let periods = Periods::new(MemoryStore::new(), config).unwrap();
    let day = Schedule::new(Every::Day, berlin()).find("2026-07-14").unwrap();
    let ran = AtomicU32::new(0);
    let long = periods.run("report", &day, async |_| {
        ran.fetch_add(1, Ordering::SeqCst);
        sleep(Duration::from_millis(2_500)).await;
        Ok::<_, std::io::Error>(7)
    });
    let copies = async {
        for _ in 0..8 {
            sleep(Duration::from_millis(250)).await;
            let copy = periods.run("report", &day, async |_| Ok::<_, std::io::Error>(8)).await;
            assert!(matches!(copy, Err(PeriodError::InFlight { .. })), "{copy:?}");
        }
    };
    let (long, ()) = tokio::join!(long, copies);
    assert!(matches!(long, Ok(Ran::Now(7))), "{long:?}");
    let again = periods.run("report", &day, async |_| Ok::<_, std::io::Error>(8)).await;
    assert!(matches!(again, Ok(Ran::Before(run)) if run.zone == "Europe/Berlin" && run.every == "day"));
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn without_a_transaction_a_failure_is_run_again_and_a_dropped_run_is_held() {
    let config = PeriodConfig { lease: Duration::from_millis(200), on_lapse: Lapse::Hold, ..by("a") };
    let periods = Periods::new(MemoryStore::new(), config).unwrap();
    let failed = periods.run("a", &july(), async |_| Err::<(), _>(std::io::Error::other("no paper"))).await;
    assert!(matches!(failed, Err(PeriodError::Work(error)) if error.to_string() == "no paper"));
    let july = july();
    let dropped = periods.run("a", &july, async |_| {
        std::future::pending::<()>().await;
        Ok::<_, std::io::Error>(())
    });
    assert!(tokio::time::timeout(Duration::from_millis(50), dropped).await.is_err());
    sleep(Duration::from_millis(400)).await;
    let later = periods.run("a", &july, async |_| Ok::<_, std::io::Error>(())).await;
    assert!(matches!(later, Err(PeriodError::Unknown)), "{later:?}");
}

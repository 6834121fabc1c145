//! An application with a table of effects, on a real database.

use std::time::Duration;

use async_trait::async_trait;
use onlyonce::inbox::{Inbox, InboxConfig};
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{
    Id, Operation, Revision, Store, StoreError, StoreErrorKind, TransactionError, Transactional, Write,
};
use onlyonce_postgres::{PostgresStore, PostgresTransactions};
use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use onlyonce_testkit::Postgres;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions};

/// Longer than any transaction of a test is open, on a busy machine.
pub(crate) const PATIENT: Duration = Duration::from_secs(60);

#[async_trait]
pub(crate) trait App: Sized + Send + Sync + 'static {
    type Database: Transactional<Transaction: Send> + Clone;

    async fn start() -> Self;
    fn database(&self) -> &Self::Database;
    /// A transaction of the application's own pool, which Onlyonce has not seen.
    async fn own_transaction(&self) -> <Self::Database as Transactional>::Transaction;
    async fn effect(tx: &mut <Self::Database as Transactional>::Transaction, line: &str);
    async fn effects(&self) -> Vec<String>;
    /// How many rows the table of keys has, expired ones included.
    async fn rows(&self) -> i64;

    fn inbox(&self) -> Inbox<Self::Database> {
        self.inbox_with("billing", InboxConfig::default())
    }

    fn inbox_with(&self, consumer: &str, config: InboxConfig) -> Inbox<Self::Database> {
        Inbox::new(self.database().clone(), consumer, config).unwrap()
    }
}

pub(crate) struct OnPostgres {
    pool: PgPool,
    database: PostgresTransactions,
}

#[async_trait]
impl App for OnPostgres {
    type Database = PostgresTransactions;

    async fn start() -> Self {
        let server = Postgres::shared();
        let url = server.url(&server.database());
        let pool = PgPoolOptions::new().max_connections(10).connect_lazy(&url).unwrap();
        sqlx::query("CREATE TABLE effects (line text)").execute(&pool).await.unwrap();
        let store = PostgresStore::open(&url.parse().unwrap()).await.unwrap();
        let database = store.transactions(&pool).await.unwrap();
        Self { pool, database }
    }

    fn database(&self) -> &PostgresTransactions {
        &self.database
    }

    async fn own_transaction(&self) -> sqlx::Transaction<'static, sqlx::Postgres> {
        self.pool.begin().await.unwrap()
    }

    async fn effect(tx: &mut sqlx::Transaction<'static, sqlx::Postgres>, line: &str) {
        sqlx::query("INSERT INTO effects VALUES ($1)").bind(line).execute(&mut **tx).await.unwrap();
    }

    async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT line FROM effects ORDER BY line").fetch_all(&self.pool).await.unwrap()
    }

    async fn rows(&self) -> i64 {
        let count = "SELECT count(*) FROM onlyonce.idempotency_keys";
        sqlx::query_scalar(count).fetch_one(&self.pool).await.unwrap()
    }
}

pub(crate) struct OnSqlite {
    _folder: tempfile::TempDir,
    pool: SqlitePool,
    store: SqliteStore,
    database: SqliteTransactions,
}

#[async_trait]
impl App for OnSqlite {
    type Database = SqliteTransactions;

    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("app.db");
        let connect = SqliteConnectOptions::new().filename(&file).create_if_missing(true);
        let connect = connect.journal_mode(SqliteJournalMode::Wal).busy_timeout(PATIENT);
        let pool = SqlitePoolOptions::new().max_connections(4).connect_lazy_with(connect);
        sqlx::query("CREATE TABLE effects (line TEXT)").execute(&pool).await.unwrap();
        let store = SqliteStore::open(&SqliteOptions::file(&file).shared(true)).await.unwrap();
        let database = store.transactions(&pool).await.unwrap();
        Self { _folder: folder, pool, store, database }
    }

    fn database(&self) -> &SqliteTransactions {
        &self.database
    }

    async fn own_transaction(&self) -> sqlx::Transaction<'static, sqlx::Sqlite> {
        self.pool.begin_with("BEGIN IMMEDIATE").await.unwrap()
    }

    async fn effect(tx: &mut sqlx::Transaction<'static, sqlx::Sqlite>, line: &str) {
        sqlx::query("INSERT INTO effects VALUES (?)").bind(line).execute(&mut **tx).await.unwrap();
    }

    async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT line FROM effects ORDER BY line").fetch_all(&self.pool).await.unwrap()
    }

    async fn rows(&self) -> i64 {
        self.store.facts().await.unwrap().records.try_into().unwrap()
    }
}

/// A database whose answer to a commit is lost, after it was carried out or instead of that.
#[derive(Clone)]
pub(crate) struct Deaf<T> {
    pub(crate) database: T,
    pub(crate) commits: bool,
}

#[async_trait]
impl<T: Transactional> Transactional for Deaf<T> {
    type Transaction = T::Transaction;

    const ONE_WRITER: bool = T::ONE_WRITER;

    fn store(&self) -> std::sync::Arc<dyn Store> {
        self.database.store()
    }

    async fn begin(&self, wait: Duration) -> Result<Self::Transaction, TransactionError> {
        self.database.begin(wait).await
    }

    async fn open(&self) -> Result<Self::Transaction, TransactionError> {
        self.database.open().await
    }

    async fn insert(
        &self,
        tx: &mut Self::Transaction,
        operation: &Operation,
        write: Write,
    ) -> Result<Inserted, TransactionError> {
        self.database.insert(tx, operation, write).await
    }

    async fn replace(
        &self,
        tx: &mut Self::Transaction,
        id: Id,
        expected: Revision,
        write: Write,
    ) -> Result<Replaced, TransactionError> {
        self.database.replace(tx, id, expected, write).await
    }

    async fn commit(&self, tx: Self::Transaction) -> Result<(), TransactionError> {
        if self.commits {
            self.database.commit(tx).await?;
        } else {
            self.database.roll_back(tx).await;
        }
        let lost = StoreError::new(StoreErrorKind::Ambiguous, "the answer was lost");
        Err(TransactionError::Failed(lost))
    }

    async fn roll_back(&self, tx: Self::Transaction) {
        self.database.roll_back(tx).await;
    }
}

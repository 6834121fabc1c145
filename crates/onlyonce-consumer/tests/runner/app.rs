//! An application with a table of effects, on a real database.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{
    Id, Operation, Revision, Store, StoreError, StoreErrorKind, TransactionError, Transactional, Write,
};
use onlyonce_postgres::{PostgresStore, PostgresTransactions};
use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use onlyonce_testkit::{Postgres, Proxy};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions};
use tokio::sync::Semaphore;

/// A database that several instances of an application connect to, each from a runtime of its own.
pub(crate) trait App: Clone + Send + Sync + 'static {
    type Database: Transactional + Clone;

    fn start() -> Self;
    fn connect(&self) -> impl Future<Output = Self::Database> + Send;
    fn effect<'a>(
        tx: &'a mut <Self::Database as Transactional>::Transaction,
        line: &'a str,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send + 'a;
    fn effects(&self) -> impl Future<Output = Vec<String>> + Send;
}

#[derive(Clone)]
pub(crate) struct OnPostgres {
    database: String,
    pub(crate) url: String,
}

impl OnPostgres {
    /// The same database, reached through a proxy that can cut the connections.
    pub(crate) fn through(&self, proxy: &Proxy) -> Self {
        let direct = format!(":{}/", Postgres::shared().port());
        let url = self.url.replace(&direct, &format!(":{}/", proxy.port()));
        assert_ne!(url, self.url);
        Self { url, ..self.clone() }
    }
}

impl App for OnPostgres {
    type Database = PostgresTransactions;

    fn start() -> Self {
        let server = Postgres::shared();
        let database = server.database();
        server.sql(&database, "CREATE TABLE effects (line text)");
        Self { url: server.url(&database), database }
    }

    async fn connect(&self) -> PostgresTransactions {
        let pool = PgPoolOptions::new().max_connections(10).connect_lazy(&self.url).unwrap();
        let store = PostgresStore::open(&self.url.parse().unwrap()).await.unwrap();
        store.transactions(&pool).await.unwrap()
    }

    async fn effect<'a>(
        tx: &'a mut sqlx::Transaction<'static, sqlx::Postgres>,
        line: &'a str,
    ) -> Result<(), sqlx::Error> {
        let insert = sqlx::query("INSERT INTO effects VALUES ($1)").bind(line).persistent(false);
        insert.execute(&mut **tx).await.map(|_| ())
    }

    async fn effects(&self) -> Vec<String> {
        let lines = Postgres::shared().sql(&self.database, "SELECT line FROM effects ORDER BY line");
        lines.split_whitespace().map(str::to_owned).collect()
    }
}

#[derive(Clone)]
pub(crate) struct OnSqlite {
    folder: Arc<tempfile::TempDir>,
}

impl OnSqlite {
    fn pool(&self) -> SqlitePool {
        let connect = SqliteConnectOptions::new().filename(self.folder.path().join("app.db"));
        let connect = connect.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
        SqlitePoolOptions::new().max_connections(2).connect_lazy_with(connect)
    }
}

impl App for OnSqlite {
    type Database = SqliteTransactions;

    fn start() -> Self {
        Self { folder: Arc::new(tempfile::tempdir().unwrap()) }
    }

    async fn connect(&self) -> SqliteTransactions {
        let pool = self.pool();
        sqlx::query("CREATE TABLE IF NOT EXISTS effects (line TEXT)").execute(&pool).await.unwrap();
        let options = SqliteOptions::file(self.folder.path().join("app.db")).shared(true);
        SqliteStore::open(&options).await.unwrap().transactions(&pool).await.unwrap()
    }

    async fn effect<'a>(
        tx: &'a mut sqlx::Transaction<'static, sqlx::Sqlite>,
        line: &'a str,
    ) -> Result<(), sqlx::Error> {
        sqlx::query("INSERT INTO effects VALUES (?)").bind(line).execute(&mut **tx).await.map(|_| ())
    }

    async fn effects(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT line FROM effects ORDER BY line").fetch_all(&self.pool()).await.unwrap()
    }
}

/// A database whose commits wait for a permit each, and so many of which fail.
#[derive(Clone)]
pub(crate) struct Gate<T> {
    pub(crate) database: T,
    pub(crate) commits: Arc<Semaphore>,
    pub(crate) failing: Arc<AtomicU32>,
}

impl<T> Gate<T> {
    pub(crate) fn new(database: T, permits: usize, failing: u32) -> Self {
        let (commits, failing) = (Arc::new(Semaphore::new(permits)), Arc::new(AtomicU32::new(failing)));
        Self { database, commits, failing }
    }
}

#[async_trait::async_trait]
impl<T: Transactional> Transactional for Gate<T> {
    type Transaction = T::Transaction;

    const ONE_WRITER: bool = T::ONE_WRITER;

    fn store(&self) -> Arc<dyn Store> {
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
        self.commits.acquire().await.unwrap().forget();
        let fails = self.failing.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if fails.is_ok() {
            self.database.roll_back(tx).await;
            let error = StoreError::new(StoreErrorKind::Unavailable, "a deferred constraint is violated");
            return Err(TransactionError::Failed(error));
        }
        self.database.commit(tx).await
    }

    async fn roll_back(&self, tx: Self::Transaction) {
        self.database.roll_back(tx).await;
    }
}

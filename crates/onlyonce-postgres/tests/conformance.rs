//! The store passes the suite, directly and through PgBouncer; the other handle has its own connections,
//! as another machine would.

#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Harness, InspectHarness, TransactHarness};
use onlyonce_core::{Inspect, Store, Transactional};
use onlyonce_postgres::{PostgresOptions, PostgresStore, PostgresTransactions};
use onlyonce_testkit::{PgBouncer, Postgres};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Executor, Row, raw_sql};
use tokio::sync::OnceCell;

/// A schema of its own in a database that all clauses share.
struct PostgresHarness {
    options: PostgresOptions,
    store: OnceCell<PostgresStore>,
    /// What the application's own pool connects to.
    connect: PgConnectOptions,
    /// Of what the application writes itself.
    table: String,
}

impl PostgresHarness {
    fn at(url: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let options: PostgresOptions = url.parse().unwrap();
        let options = options.schema(format!("Clause \"{number}\"")).pool_size(4);
        // PgBouncer refuses startup parameters that it does not know.
        let connect = url.parse::<PgConnectOptions>().unwrap().extra_float_digits(None);
        Self { options, store: OnceCell::new(), connect, table: format!("notes_{number}") }
    }

    fn direct() -> Self {
        Self::at(&server().url(database()))
    }

    fn pooled() -> Self {
        static POOLER: OnceLock<PgBouncer> = OnceLock::new();
        Self::at(&POOLER.get_or_init(|| PgBouncer::start(server(), "")).url(database()))
    }

    async fn open(&self) -> PostgresStore {
        PostgresStore::open(&self.options).await.unwrap()
    }

    async fn opened(&self) -> PostgresStore {
        self.store.get_or_init(|| self.open()).await.clone()
    }
}

fn server() -> &'static Postgres {
    Postgres::shared()
}

fn database() -> &'static str {
    static DATABASE: OnceLock<String> = OnceLock::new();
    DATABASE.get_or_init(|| server().database())
}

#[async_trait]
impl Harness for PostgresHarness {
    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.opened().await)
    }

    async fn other(&self) -> Arc<dyn Store> {
        Arc::new(self.open().await)
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

#[async_trait]
impl InspectHarness for PostgresHarness {
    async fn inspect(&self) -> Arc<dyn Inspect> {
        Arc::new(self.opened().await)
    }
}

impl PostgresHarness {
    fn pool(&self) -> PgPool {
        PgPoolOptions::new().max_connections(8).connect_lazy_with(self.connect.clone())
    }

    async fn transactions(&self, store: &PostgresStore) -> PostgresTransactions {
        let table = &self.table;
        let create = format!("CREATE TABLE IF NOT EXISTS {table} (number serial, line text)");
        let pool = self.pool();
        pool.execute(raw_sql(AssertSqlSafe(create))).await.unwrap();
        store.transactions(&pool).await.unwrap()
    }
}

#[async_trait]
impl TransactHarness for PostgresHarness {
    type Store = PostgresTransactions;

    async fn store(&self) -> PostgresTransactions {
        self.transactions(&self.opened().await).await
    }

    async fn other(&self) -> PostgresTransactions {
        self.transactions(&self.open().await).await
    }

    async fn note(&self, transaction: &mut <PostgresTransactions as Transactional>::Transaction, line: &str) {
        let insert = format!("INSERT INTO {} (line) VALUES ($1)", self.table);
        let query = sqlx::query(AssertSqlSafe(insert)).bind(line.to_owned()).persistent(false);
        query.execute(&mut **transaction).await.unwrap();
    }

    async fn notes(&self) -> Vec<String> {
        let select = format!("SELECT line FROM {} ORDER BY number", self.table);
        let rows = self.pool().fetch_all(raw_sql(AssertSqlSafe(select))).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    async fn pass(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }
}

mod direct {
    use super::*;

    onlyonce_conformance::suite!(PostgresHarness::direct());
    onlyonce_conformance::inspect_suite!(PostgresHarness::direct());
    onlyonce_conformance::transact_suite!(PostgresHarness::direct());
}

mod through_pgbouncer {
    use super::*;

    onlyonce_conformance::suite!(PostgresHarness::pooled());
    onlyonce_conformance::inspect_suite!(PostgresHarness::pooled());
    onlyonce_conformance::transact_suite!(PostgresHarness::pooled());

    #[tokio::test]
    async fn it_is_found_out() {
        let harness = PostgresHarness::pooled();
        assert!(harness.open().await.facts().await.unwrap().pooled);
        assert!(!PostgresHarness::direct().open().await.facts().await.unwrap().pooled);
    }
}

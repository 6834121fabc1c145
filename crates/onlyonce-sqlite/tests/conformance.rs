//! The store passes the suite; the other handle has its own connections, as another process would.

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::application;
use onlyonce_conformance::{Fault, Faulty, Harness, InspectHarness, TransactHarness};
use onlyonce_core::{Inspect, Store};
use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use sqlx::{Sqlite, SqlitePool, Transaction};
use tempfile::TempDir;
use tokio::sync::OnceCell;

struct SqliteHarness {
    folder: TempDir,
    store: OnceCell<SqliteStore>,
}

impl SqliteHarness {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder"), store: OnceCell::new() }
    }

    async fn open(&self) -> SqliteStore {
        let options = SqliteOptions::file(self.folder.path().join("keys.db"));
        SqliteStore::open(&options).await.expect("the store opens")
    }

    async fn opened(&self) -> SqliteStore {
        self.store.get_or_init(|| self.open()).await.clone()
    }
}

#[async_trait]
impl Harness for SqliteHarness {
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
impl InspectHarness for SqliteHarness {
    async fn inspect(&self) -> Arc<dyn Inspect> {
        Arc::new(self.opened().await)
    }
}

onlyonce_conformance::suite!(SqliteHarness::new());
onlyonce_conformance::inspect_suite!(SqliteHarness::new());

/// A decorator over the store passes too.
mod decorated {
    use super::*;

    struct Decorated(SqliteHarness);

    #[async_trait]
    impl Harness for Decorated {
        async fn store(&self) -> Arc<dyn Store> {
            Arc::new(Faulty::new(self.0.store().await, Fault::LostAfter, 0..0))
        }

        async fn other(&self) -> Arc<dyn Store> {
            Arc::new(Faulty::new(self.0.other().await, Fault::LostAfter, 0..0))
        }

        async fn pass(&self, time: Duration) {
            self.0.pass(time).await;
        }
    }

    onlyonce_conformance::suite!(Decorated(SqliteHarness::new()));
}

/// In an application's file, beside its tables.
mod shared {
    use super::*;

    struct SharedHarness(SqliteHarness, OnceCell<SqlitePool>);

    impl SharedHarness {
        fn new() -> Self {
            Self(SqliteHarness::new(), OnceCell::new())
        }

        fn path(&self) -> PathBuf {
            self.0.folder.path().join("application.db")
        }

        async fn pool(&self) -> &SqlitePool {
            self.1.get_or_init(|| async { application::start(&self.path(), 4).await }).await
        }

        async fn open(&self) -> SqliteStore {
            self.pool().await;
            application::store(&self.path()).await
        }
    }

    #[async_trait]
    impl Harness for SharedHarness {
        async fn store(&self) -> Arc<dyn Store> {
            Arc::new(self.0.store.get_or_init(|| self.open()).await.clone())
        }

        async fn other(&self) -> Arc<dyn Store> {
            Arc::new(self.open().await)
        }

        async fn pass(&self, time: Duration) {
            self.0.pass(time).await;
        }
    }

    #[async_trait]
    impl InspectHarness for SharedHarness {
        async fn inspect(&self) -> Arc<dyn Inspect> {
            Arc::new(self.0.store.get_or_init(|| self.open()).await.clone())
        }
    }

    #[async_trait]
    impl TransactHarness for SharedHarness {
        type Store = SqliteTransactions;

        async fn store(&self) -> SqliteTransactions {
            TransactHarness::other(self).await
        }

        async fn other(&self) -> SqliteTransactions {
            application::transactions(&self.path(), self.pool().await).await
        }

        async fn note(&self, transaction: &mut Transaction<'static, Sqlite>, line: &str) {
            application::note(transaction, line).await;
        }

        async fn notes(&self) -> Vec<String> {
            application::notes(self.pool().await).await
        }

        async fn pass(&self, time: Duration) {
            self.0.pass(time).await;
        }
    }

    onlyonce_conformance::suite!(SharedHarness::new());
    onlyonce_conformance::inspect_suite!(SharedHarness::new());
    onlyonce_conformance::transact_suite!(SharedHarness::new());
}

//! The store passes the suite; the other handle has its own connections, as another process would.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Fault, Faulty, Harness, InspectHarness};
use onlyonce_core::{Inspect, Store};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
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

//! The store passes the suite, directly and through PgBouncer; the other handle has its own connections,
//! as another machine would.

#![allow(clippy::unwrap_used, missing_docs)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_conformance::{Harness, InspectHarness};
use onlyonce_core::{Inspect, Store};
use onlyonce_postgres::{PostgresOptions, PostgresStore};
use onlyonce_testkit::{PgBouncer, Postgres};
use tokio::sync::OnceCell;

/// A schema of its own in a database that all clauses share.
struct PostgresHarness {
    options: PostgresOptions,
    store: OnceCell<PostgresStore>,
}

impl PostgresHarness {
    fn at(url: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let schema = format!("Clause \"{}\"", NEXT.fetch_add(1, Ordering::Relaxed));
        let options: PostgresOptions = url.parse().unwrap();
        Self { options: options.schema(schema).pool_size(4), store: OnceCell::new() }
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

mod direct {
    use super::*;

    onlyonce_conformance::suite!(PostgresHarness::direct());
    onlyonce_conformance::inspect_suite!(PostgresHarness::direct());
}

mod through_pgbouncer {
    use super::*;

    onlyonce_conformance::suite!(PostgresHarness::pooled());
    onlyonce_conformance::inspect_suite!(PostgresHarness::pooled());

    #[tokio::test]
    async fn it_is_found_out() {
        let harness = PostgresHarness::pooled();
        assert!(harness.open().await.facts().await.unwrap().pooled);
        assert!(!PostgresHarness::direct().open().await.facts().await.unwrap().pooled);
    }
}

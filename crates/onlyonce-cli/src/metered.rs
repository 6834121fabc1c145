//! A store that is watched: how long each call takes, and how it ends.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use metrics::histogram;
use onlyonce_core::record::Seen;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Id, Operation, Revision, Store, StoreError, StoreErrorKind, Write};

use crate::telemetry::STORE_SECONDS;

/// Passes every call on and measures it on the local monotonic clock.
pub struct Metered {
    store: Arc<dyn Store>,
}

impl Metered {
    /// Watches this store.
    #[must_use]
    pub fn new(store: Arc<dyn Store>) -> Self {
        Self { store }
    }
}

async fn watch<T>(
    call: &'static str,
    calling: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let started = Instant::now();
    let result = calling.await;
    let name = match &result {
        Ok(_) => "ok",
        Err(error) => match error.kind() {
            StoreErrorKind::Unavailable => "unavailable",
            StoreErrorKind::Ambiguous => "ambiguous",
            StoreErrorKind::Unreadable => "unreadable",
        },
    };
    histogram!(STORE_SECONDS, "call" => call, "result" => name).record(started.elapsed());
    result
}

#[async_trait]
impl Store for Metered {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        watch("insert", self.store.insert(operation, write)).await
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        watch("replace", self.store.replace(id, expected, write)).await
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        watch("remove", self.store.remove(id, expected)).await
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        watch("read", self.store.read(id)).await
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        watch("sweep", self.store.sweep(rows_max)).await
    }
}

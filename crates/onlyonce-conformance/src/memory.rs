//! The memory store on a clock that stands still until it is told.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::{Inspect, MemoryStore, Store, Timestamp};

use crate::{Harness, InspectHarness};

/// The memory store on a clock that stands still until it is told.
#[derive(Clone)]
pub struct MemoryHarness {
    store: MemoryStore,
    clock: Arc<AtomicI64>,
}

impl MemoryHarness {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        let clock = Arc::new(AtomicI64::new(1_700_000_000_000));
        let read = Arc::clone(&clock);
        let store = MemoryStore::with_clock(move || Timestamp(read.load(Ordering::SeqCst)));
        Self { store, clock }
    }
}

impl Default for MemoryHarness {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Harness for MemoryHarness {
    async fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn other(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn pass(&self, time: Duration) {
        let millis = i64::try_from(time.as_millis()).expect("a time that a test can wait for");
        self.clock.fetch_add(millis, Ordering::SeqCst);
    }
}

#[async_trait]
impl InspectHarness for MemoryHarness {
    async fn inspect(&self) -> Arc<dyn Inspect> {
        Arc::new(self.store.clone())
    }
}

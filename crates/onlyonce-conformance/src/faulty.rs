//! A store whose calls fail when they are told to.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use onlyonce_core::record::Seen;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Id, Operation, Revision, Store, StoreError, StoreErrorKind, Write};

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Before it reaches the store, and the caller is told so: [`StoreErrorKind::Unavailable`].
    Refused,
    /// Before it reaches the store, and the caller cannot tell: [`StoreErrorKind::Ambiguous`].
    LostBefore,
    /// After it was applied, and the caller cannot tell: [`StoreErrorKind::Ambiguous`].
    LostAfter,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Refused, Self::LostBefore, Self::LostAfter];

    fn error(self) -> StoreError {
        match self {
            Self::Refused => StoreError::new(StoreErrorKind::Unavailable, "the store was not reached"),
            Self::LostBefore | Self::LostAfter => {
                StoreError::new(StoreErrorKind::Ambiguous, "the store's answer was lost")
            }
        }
    }
}

/// A store whose calls fail when they are told to. Calls are counted from 0, reads and sweeps among them.
pub struct Faulty {
    store: Arc<dyn Store>,
    fault: Fault,
    failing: Range<u64>,
    calls: AtomicU64,
}

impl Faulty {
    /// Lets the calls with these numbers fail. An empty range is a decorator that does nothing.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, fault: Fault, failing: Range<u64>) -> Self {
        Self { store, fault, failing, calls: AtomicU64::new(0) }
    }

    /// How many calls there were.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    async fn run<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        if !self.failing.contains(&self.calls.fetch_add(1, Ordering::SeqCst)) {
            return call.await;
        }
        if self.fault == Fault::LostAfter {
            call.await?;
        }
        Err(self.fault.error())
    }
}

#[async_trait]
impl Store for Faulty {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        self.run(self.store.insert(operation, write)).await
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        self.run(self.store.replace(id, expected, write)).await
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        self.run(self.store.remove(id, expected)).await
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        self.run(self.store.read(id)).await
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        self.run(self.store.sweep(rows_max)).await
    }
}

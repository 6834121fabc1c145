//! Removes expired records now and then. Claims do not depend on it: whether a record is expired is decided
//! when its key is claimed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use metrics::counter;
use onlyonce_core::Store;
use tokio::runtime::Handle;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// How many expired records one call removes at most. Further calls follow until none is left.
pub const SWEEP_ROWS_MAX: u32 = 1_000;

/// Counts expired records that were removed.
pub const SWEPT_ROWS: &str = "onlyonce_swept_rows_total";
/// Counts sweeps that the store did not carry out.
pub const SWEEP_FAILURES: &str = "onlyonce_sweep_failures_total";

/// Sweeps a store until it is dropped.
pub(crate) struct Sweeper {
    store: Arc<dyn Store>,
    /// Never, if there is none.
    every: Option<Duration>,
    started: AtomicBool,
    stop: CancellationToken,
}

impl Sweeper {
    /// Starts at once if there is a runtime to run on; a layer can be built before there is one.
    pub(crate) fn new(store: Arc<dyn Store>, every: Option<Duration>) -> Self {
        let sweeper = Self { store, every, started: AtomicBool::new(false), stop: CancellationToken::new() };
        if Handle::try_current().is_ok() {
            sweeper.start();
        }
        sweeper
    }

    /// Starts on the current runtime unless it was started. Called for every guarded request, and cheap.
    pub(crate) fn start(&self) {
        let Some(every) = self.every else { return };
        if self.started.load(Ordering::Relaxed) || self.started.swap(true, Ordering::Relaxed) {
            return;
        }
        let sweeping = sweep(Arc::clone(&self.store), every);
        tokio::spawn(self.stop.clone().run_until_cancelled_owned(sweeping));
    }

    /// Ends it for good. A sweep that is going on is given up; stores allow that.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn sweep(store: Arc<dyn Store>, every: Duration) {
    loop {
        sleep(every).await;
        while swept_all_it_could(&*store).await {}
    }
}

/// Whether there may be more to remove.
async fn swept_all_it_could(store: &dyn Store) -> bool {
    match store.sweep(SWEEP_ROWS_MAX).await {
        Ok(rows) => {
            counter!(SWEPT_ROWS).increment(rows);
            rows >= u64::from(SWEEP_ROWS_MAX)
        }
        Err(error) => {
            counter!(SWEEP_FAILURES).increment(1);
            warn!(%error, "expired keys could not be removed; tried again later");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use onlyonce_core::record::Seen;
    use onlyonce_core::store::{Inserted, Replaced};
    use onlyonce_core::{Id, Operation, Revision, StoreError, StoreErrorKind, Write};
    use tokio::time::advance;

    use super::*;

    /// Has as many expired rows as it is given, and fails its first sweep.
    struct Expired(std::sync::Mutex<(bool, u64)>);

    #[async_trait::async_trait]
    impl Store for Expired {
        async fn insert(&self, _: &Operation, _: Write) -> Result<Inserted, StoreError> {
            unreachable!("only swept")
        }
        async fn replace(&self, _: Id, _: Revision, _: Write) -> Result<Replaced, StoreError> {
            unreachable!("only swept")
        }
        async fn remove(&self, _: Id, _: Revision) -> Result<bool, StoreError> {
            unreachable!("only swept")
        }
        async fn read(&self, _: Id) -> Result<Option<Seen>, StoreError> {
            unreachable!("only swept")
        }
        async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
            let (failed, rows) = &mut *self.0.lock().expect("no panic");
            if !std::mem::replace(failed, true) {
                return Err(StoreError::new(StoreErrorKind::Unavailable, "away"));
            }
            let swept = (*rows).min(u64::from(rows_max));
            *rows -= swept;
            Ok(swept)
        }
    }

    impl Expired {
        fn new(rows: u64) -> Arc<Self> {
            Arc::new(Self(std::sync::Mutex::new((false, rows))))
        }

        fn left(&self) -> u64 {
            self.0.lock().expect("no panic").1
        }
    }

    const MINUTE: Duration = Duration::from_secs(60);

    async fn minutes(minutes: u32) {
        for _ in 0..minutes {
            advance(MINUTE).await;
            // The sweeper has its turn: once for its timer, and once for each batch.
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_removes_batch_after_batch_and_goes_on_after_a_failure() {
        let store = Expired::new(2_500);
        let sweeper = Sweeper::new(store.clone(), Some(MINUTE));
        tokio::task::yield_now().await;
        minutes(1).await;
        assert_eq!(store.left(), 2_500, "the first sweep failed");
        minutes(1).await;
        assert_eq!(store.left(), 0);
        drop(sweeper);
    }

    #[tokio::test(start_paused = true)]
    async fn it_ends_when_it_is_dropped_or_stopped_and_frees_the_store() {
        for drops in [true, false] {
            let store = Expired::new(1);
            let sweeper = Sweeper::new(store.clone(), Some(MINUTE));
            tokio::task::yield_now().await;
            if drops {
                drop(sweeper);
                tokio::task::yield_now().await;
                assert_eq!(Arc::strong_count(&store), 1);
            } else {
                sweeper.stop();
            }
            minutes(3).await;
            assert_eq!(store.left(), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn it_does_not_run_where_it_is_turned_off() {
        let store = Expired::new(1);
        let sweeper = Sweeper::new(store.clone(), None);
        sweeper.start();
        minutes(3).await;
        assert_eq!(store.left(), 1);
    }

    #[test]
    fn outside_of_a_runtime_it_starts_with_the_first_request() {
        let store = Expired::new(1);
        let sweeper = Sweeper::new(store.clone(), Some(MINUTE));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        runtime.expect("a runtime").block_on(async {
            minutes(3).await;
            assert_eq!(store.left(), 1, "nobody started it");
            sweeper.start();
            tokio::task::yield_now().await;
            minutes(2).await;
            assert_eq!(store.left(), 0);
        });
    }
}

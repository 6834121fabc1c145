//! Shared reads: concurrent reads share one round trip to the database.
//!
//! While one batch is read, the next gathers. Readers run on tasks of their own, so a caller that is dropped
//! never interrupts the database driver.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use tokio::sync::{Mutex, mpsc, oneshot};

use crate::identity::Id;
use crate::record::Seen;
use crate::store::{StoreError, StoreErrorKind};

/// The database side of [`Reads`].
pub trait Reader: Send + 'static {
    /// The records under these ids, which are sorted and stand once each, as of the latest committed
    /// write; in words what is wrong with one that cannot be read.
    fn read(&mut self, ids: &[Id]) -> impl Future<Output = Result<Found, StoreError>> + Send;
}

/// What a [`Reader`] found.
pub type Found = HashMap<Id, Result<Seen, String>>;

/// Hands reads to [`Reader`]s in batches. Clones share the readers, which end with the last of them.
#[derive(Clone, Debug)]
pub struct Reads {
    asks: mpsc::Sender<Ask>,
}

#[derive(Debug)]
struct Ask {
    id: Id,
    answer: oneshot::Sender<Result<Option<Seen>, StoreError>>,
}

impl Reads {
    /// Starts each reader on a task of its own. A batch has at most `ids_max` ids, and as many again may
    /// wait for the next.
    pub fn start<R: Reader>(readers: impl IntoIterator<Item = R>, ids_max: usize) -> Self {
        let (asks, queue) = mpsc::channel(ids_max);
        let queue = Arc::new(Mutex::new(queue));
        for reader in readers {
            tokio::spawn(run(reader, Arc::clone(&queue), ids_max));
        }
        Self { asks }
    }

    /// The record under this id, as of the latest committed write.
    ///
    /// # Errors
    /// As the reader says; nothing is written either way.
    pub async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        let (answer, answered) = oneshot::channel();
        let closed = || StoreError::new(StoreErrorKind::Unavailable, "the store is closed");
        self.asks.send(Ask { id, answer }).await.map_err(|_| closed())?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }
}

async fn run(mut reader: impl Reader, queue: Arc<Mutex<mpsc::Receiver<Ask>>>, ids_max: usize) {
    let mut asks = Vec::new();
    while queue.lock().await.recv_many(&mut asks, ids_max).await > 0 {
        asks.retain(|ask| !ask.answer.is_closed());
        let mut ids: Vec<Id> = asks.iter().map(|ask| ask.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            continue;
        }
        let found = reader.read(&ids).await;
        for Ask { id, answer } in asks.drain(..) {
            let _ = answer.send(match &found {
                Err(error) => Err(StoreError::new(error.kind(), error.to_string())),
                Ok(found) => match found.get(&id) {
                    None => Ok(None),
                    Some(Ok(seen)) => Ok(Some(seen.clone())),
                    Some(Err(reason)) => Err(StoreError::unreadable(id, reason)),
                },
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::record::{Fingerprint, Revision, Timestamp};
    use crate::{Lapse, Policy, machine};

    /// Takes a second for each batch; id 2 is damaged, id 3 is absent, and a batch with id 9 fails.
    struct Slow(Arc<Mutex<Vec<Vec<u8>>>>);

    impl Reader for Slow {
        async fn read(&mut self, ids: &[Id]) -> Result<Found, StoreError> {
            self.0.lock().expect("no panic while locked").push(ids.iter().map(|id| id.0[0]).collect());
            tokio::time::sleep(Duration::from_secs(1)).await;
            if ids.contains(&Id([9; 32])) {
                return Err(StoreError::new(StoreErrorKind::Unavailable, "away"));
            }
            Ok(ids.iter().filter(|id| id.0[0] != 3).map(|id| (*id, record(*id))).collect())
        }
    }

    fn record(id: Id) -> Result<Seen, String> {
        if id.0[0] == 2 {
            return Err("damaged".into());
        }
        let second = Duration::from_secs(1);
        let policy = Policy { lease: second, retention: second, on_lapse: Lapse::Rerun };
        let print = Fingerprint { target: id.0, body: id.0 };
        let record = machine::grant(print, Revision(1), &policy).at(Timestamp(0));
        Ok(Seen { record, now: Timestamp(0) })
    }

    #[tokio::test(start_paused = true)]
    async fn concurrent_reads_share_a_batch_and_each_gets_its_own_answer() {
        let batches = Arc::default();
        let reads = Reads::start([Slow(Arc::clone(&batches))], 8);
        let ask = |id: u8| {
            let reads = reads.clone();
            tokio::spawn(async move { reads.read(Id([id; 32])).await })
        };
        let first = ask(5);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let asked = [4, 2, 4, 3, 1].map(ask);
        let left = ask(7);
        tokio::time::sleep(Duration::from_millis(1)).await;
        left.abort();
        let target = |seen: Option<Seen>| seen.map(|seen| seen.record.fingerprint.target[0]);
        assert_eq!(target(first.await.expect("no panic").expect("read")), Some(5));
        let [four, two, again, three, one] = asked;
        assert_eq!(target(four.await.expect("no panic").expect("read")), Some(4));
        assert_eq!(two.await.expect("no panic").expect_err("damaged").kind(), StoreErrorKind::Unreadable);
        assert_eq!(target(again.await.expect("no panic").expect("read")), Some(4));
        assert_eq!(target(three.await.expect("no panic").expect("read")), None);
        assert_eq!(target(one.await.expect("no panic").expect("read")), Some(1));
        let batches = batches.lock().expect("no panic while locked").clone();
        assert_eq!(batches, [vec![5], vec![1, 2, 3, 4]], "sorted, once each, and not for who left");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_reaches_everyone_in_the_batch() {
        let reads = Reads::start([Slow(Arc::default())], 8);
        let (a, b) = tokio::join!(reads.read(Id([9; 32])), reads.read(Id([9; 32])));
        for answer in [a, b] {
            assert_eq!(answer.expect_err("away").kind(), StoreErrorKind::Unavailable);
        }
        assert!(reads.read(Id([1; 32])).await.expect("read").is_some(), "and nobody after it");
    }
}

//! Copies of one key in one process take turns, in memory: only the one whose turn it is needs a
//! connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use onlyonce_core::Id;
use tokio::sync::OwnedMutexGuard;

/// The keys that somebody in this process is at, or waits for.
#[derive(Default)]
pub(crate) struct Queue {
    locks: Mutex<HashMap<Id, Lock>>,
}

type Lock = Arc<tokio::sync::Mutex<()>>;

/// The turn at one key, until it is dropped.
pub(crate) struct Turn {
    // Dropped in this order: whoever forgets the key looks whether somebody still wants its lock.
    _guard: OwnedMutexGuard<()>,
    _place: Place,
}

/// A place in the queue of one key.
struct Place {
    queue: Arc<Queue>,
    id: Id,
    lock: Option<Lock>,
}

impl Queue {
    /// Waits for the turn at this key. Copies get it in the order in which they came.
    pub(crate) async fn turn(self: &Arc<Self>, id: Id) -> Turn {
        let lock = Arc::clone(self.locks().entry(id).or_default());
        let place = Place { queue: Arc::clone(self), id, lock: Some(Arc::clone(&lock)) };
        Turn { _guard: lock.lock_owned().await, _place: place }
    }

    fn locks(&self) -> std::sync::MutexGuard<'_, HashMap<Id, Lock>> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut locks = self.queue.locks();
        self.lock = None;
        if locks.get(&self.id).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(&self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_millis(50);

    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_for_each_key_and_nothing_is_left_behind() {
        let queue = Arc::new(Queue::default());
        let (one, two) = (Id([1; 32]), Id([2; 32]));
        let first = queue.turn(one).await;
        let _other = timeout(SOON, queue.turn(two)).await.expect("another key does not wait");
        assert!(timeout(SOON, queue.turn(one)).await.is_err(), "the turn is taken");
        let waiting = tokio::spawn({
            let queue = Arc::clone(&queue);
            async move { queue.turn(one).await }
        });
        tokio::time::sleep(SOON).await;
        drop(first);
        let second = waiting.await.expect("its turn has come");
        // A waiter that gives up after everybody else has gone forgets the key as well.
        let mut given_up = Box::pin(queue.turn(one));
        assert!(futures_util::poll!(&mut given_up).is_pending());
        drop(second);
        assert_eq!(queue.locks().len(), 2);
        drop(given_up);
        assert_eq!(queue.locks().len(), 1);
    }
}

//! A queue in memory that delivers at least once: it redelivers whatever was not settled when a connection was cut or a
//! deadline passed, loses acknowledgements on request, and remembers how each message was settled.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use onlyonce_consumer::{Broker, BrokerError, DeadLetter, Delivery, Message, Subscription};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

#[derive(Clone, Default)]
pub(crate) struct Queue {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
pub(crate) struct State {
    entries: Vec<Entry>,
    /// Counts subscriptions; those up to `cut` are gone.
    subscriptions: u64,
    cut: u64,
    refusal: Option<fn() -> BrokerError>,
    /// So many acknowledgements are lost on their way.
    pub(crate) losing_acknowledgements: u32,
    /// So many messages cannot be dead-lettered.
    pub(crate) failing_dead_letters: u32,
    pub(crate) deadline: Option<Duration>,
    pub(crate) horizon: Option<Duration>,
    pub(crate) acknowledged: Vec<String>,
    pub(crate) put_back: Vec<(String, Duration)>,
    pub(crate) dead: Vec<(Message, DeadLetter)>,
    pub(crate) extensions: u32,
}

struct Entry {
    message: Message,
    place: Place,
}

enum Place {
    Ready { from: Instant },
    Out { subscription: u64, until: Option<Instant> },
    Settled,
}

pub(crate) fn message(id: &str, payload: &str) -> Message {
    let id = Some(id.to_owned()).filter(|id| !id.is_empty());
    Message {
        id,
        topic: "orders".to_owned(),
        payload: Bytes::copy_from_slice(payload.as_bytes()),
        ..Message::default()
    }
}

impl Queue {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap()
    }

    pub(crate) fn publish(&self, message: Message) {
        self.state().entries.push(Entry { message, place: Place::Ready { from: Instant::now() } });
        self.shared.changed.notify_waiters();
    }

    /// As a broker that restarts: what was not settled is delivered again, on another connection.
    pub(crate) fn cut(&self) {
        let mut state = self.state();
        state.cut = state.subscriptions;
        let cut = state.cut;
        state.free(|subscription, _| subscription <= cut);
        drop(state);
        self.shared.changed.notify_waiters();
    }

    /// What subscriptions are told, until this is `None`.
    pub(crate) fn refuse(&self, refusal: Option<fn() -> BrokerError>) {
        self.state().refusal = refusal;
    }

    /// How many messages are not settled.
    pub(crate) fn left(&self) -> usize {
        self.state().entries.iter().filter(|entry| !matches!(entry.place, Place::Settled)).count()
    }

    pub(crate) async fn drained(&self) {
        let drained = async {
            while self.left() > 0 {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(120), drained)
            .await
            .unwrap_or_else(|_| panic!("{} are left", self.left()));
    }
}

impl State {
    /// Makes messages ready again.
    fn free(&mut self, which: impl Fn(u64, Option<Instant>) -> bool) {
        for Entry { place, .. } in &mut self.entries {
            if let Place::Out { subscription, until } = *place
                && which(subscription, until)
            {
                *place = Place::Ready { from: Instant::now() };
            }
        }
    }

    /// Hands out the next message that is ready.
    fn take(&mut self, subscription: u64, prefetch: u16) -> Option<usize> {
        let now = Instant::now();
        self.free(|_, until| until.is_some_and(|until| until <= now));
        let out = self.entries.iter().filter(|entry| matches!(entry.place, Place::Out { .. })).count();
        if out >= prefetch.into() {
            return None;
        }
        let ready = |entry: &Entry| matches!(entry.place, Place::Ready { from } if from <= now);
        let at = self.entries.iter().position(ready)?;
        let until = self.deadline.map(|deadline| now + deadline);
        let entry = &mut self.entries[at];
        entry.place = Place::Out { subscription, until };
        entry.message.deliveries = Some(entry.message.deliveries.unwrap_or(0) + 1);
        Some(at)
    }
}

impl Broker for Queue {
    type Subscription = OneSubscription;

    async fn subscribe(&self, prefetch: u16) -> Result<OneSubscription, BrokerError> {
        let mut state = self.state();
        if let Some(refusal) = state.refusal {
            return Err(refusal());
        }
        state.subscriptions += 1;
        Ok(OneSubscription { queue: self.clone(), number: state.subscriptions, prefetch })
    }

    fn redelivery_horizon(&self) -> Option<Duration> {
        self.state().horizon
    }
}

pub(crate) struct OneSubscription {
    queue: Queue,
    number: u64,
    prefetch: u16,
}

impl Subscription for OneSubscription {
    type Delivery = OneDelivery;

    async fn next(&mut self) -> Option<Result<OneDelivery, BrokerError>> {
        loop {
            {
                let mut state = self.queue.state();
                if state.cut >= self.number {
                    return None;
                }
                if let Some(at) = state.take(self.number, self.prefetch) {
                    let message = state.entries[at].message.clone();
                    let (queue, subscription) = (self.queue.clone(), self.number);
                    return Some(Ok(OneDelivery { queue, subscription, at, message }));
                }
            }
            // Delays and deadlines pass without anybody saying so.
            let _ = timeout(Duration::from_millis(10), self.queue.shared.changed.notified()).await;
        }
    }
}

impl Drop for OneSubscription {
    fn drop(&mut self) {
        self.queue.state().free(|subscription, _| subscription == self.number);
    }
}

pub(crate) struct OneDelivery {
    queue: Queue,
    subscription: u64,
    at: usize,
    message: Message,
}

impl OneDelivery {
    /// Settles the message, if it is still this delivery's to settle.
    fn settle(&self, settle: impl FnOnce(&mut State, String) -> Place) -> Result<(), BrokerError> {
        let mut state = self.queue.state();
        if !matches!(state.entries[self.at].place, Place::Out { subscription, .. } if subscription == self.subscription)
        {
            return Err(BrokerError::unavailable("the delivery is gone with its connection"));
        }
        let id = self.message.id.clone().unwrap_or_default();
        let place = settle(&mut state, id);
        state.entries[self.at].place = place;
        drop(state);
        self.queue.shared.changed.notify_waiters();
        Ok(())
    }
}

fn again(delay: Duration) -> Place {
    Place::Ready { from: Instant::now() + delay }
}

impl Delivery for OneDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    async fn acknowledge(self) -> Result<(), BrokerError> {
        let mut lost = false;
        self.settle(|state, id| {
            lost = state.losing_acknowledgements > 0;
            if lost {
                state.losing_acknowledgements -= 1;
                return again(Duration::ZERO);
            }
            state.acknowledged.push(id);
            Place::Settled
        })?;
        if lost { Err(BrokerError::unavailable("the acknowledgement was lost")) } else { Ok(()) }
    }

    async fn put_back(self, delay: Duration) -> Result<(), BrokerError> {
        self.settle(|state, id| {
            state.put_back.push((id, delay));
            again(delay)
        })
    }

    async fn dead_letter(self, reason: &DeadLetter) -> Result<(), BrokerError> {
        let mut failed = false;
        self.settle(|state, _| {
            failed = state.failing_dead_letters > 0;
            if failed {
                state.failing_dead_letters -= 1;
                return again(Duration::ZERO);
            }
            state.dead.push((self.message.clone(), reason.clone()));
            Place::Settled
        })?;
        if failed { Err(BrokerError::unavailable("the dead-letter queue did not confirm")) } else { Ok(()) }
    }

    async fn extend(&mut self) -> Result<(), BrokerError> {
        let subscription = self.subscription;
        self.settle(|state, _| {
            state.extensions += 1;
            Place::Out { subscription, until: state.deadline.map(|deadline| Instant::now() + deadline) }
        })
    }

    fn deadline(&self) -> Option<Duration> {
        self.queue.state().deadline
    }
}

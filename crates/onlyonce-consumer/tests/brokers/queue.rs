//! A queue on a real broker, as a test sees it from outside.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use onlyonce_consumer::{Broker, DeadLetter, Delivery, Reason, Subscription};
use tokio::time::timeout;

/// Longer than anything takes on a loaded machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Long enough for a message that is on its way to come.
pub(crate) const QUIET: Duration = Duration::from_millis(700);

/// A fresh queue for one test.
pub(crate) trait Queue: Sized {
    type Broker: Broker;

    async fn fresh() -> Self;

    /// The adapter under test, on this port of 127.0.0.1.
    fn broker_at(&self, port: u16) -> Self::Broker;

    /// Whether the adapter itself keeps what waits for its delay, and not the broker.
    const HOLDS_WHAT_IS_PUT_BACK: bool;

    fn port(&self) -> u16;

    async fn publish(&self, sent: &Sent);

    /// Takes the next dead letter, which must come.
    async fn dead_letter(&self) -> Dead;

    fn broker(&self) -> Self::Broker {
        self.broker_at(self.port())
    }

    async fn subscribe(&self, prefetch: u16) -> <Self::Broker as Broker>::Subscription {
        timeout(LONG, self.broker().subscribe(prefetch)).await.expect("in time").expect("it exists")
    }
}

pub(crate) type DeliveryOf<Q> = <<<Q as Queue>::Broker as Broker>::Subscription as Subscription>::Delivery;

/// A message as its producer sends it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sent {
    pub(crate) id: Option<String>,
    pub(crate) payload: &'static str,
    pub(crate) headers: Vec<(&'static str, &'static str)>,
}

pub(crate) fn message(id: &str, payload: &'static str) -> Sent {
    Sent { id: Some(id.to_owned()), payload, headers: Vec::new() }
}

/// A dead letter as people find it.
#[derive(Clone, Debug)]
pub(crate) struct Dead {
    pub(crate) id: Option<String>,
    pub(crate) payload: Bytes,
    pub(crate) headers: Vec<(String, String)>,
}

impl Dead {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }
}

/// The next delivery, which must come.
pub(crate) async fn next<S: Subscription>(subscription: &mut S) -> S::Delivery {
    let next = timeout(LONG, subscription.next()).await.expect("a message comes");
    next.expect("the connection lives").expect("no error")
}

/// Nothing comes.
pub(crate) async fn nothing<S: Subscription>(subscription: &mut S) {
    if let Ok(next) = timeout(QUIET, subscription.next()).await {
        panic!("{:?}", next.map(|next| next.map(|delivery| delivery.message().clone())));
    }
}

/// It ends, with or without saying why.
pub(crate) async fn ends<S: Subscription>(subscription: &mut S) {
    let ending = async { while subscription.next().await.is_some() {} };
    timeout(LONG, ending).await.expect("it ends");
}

pub(crate) fn reason() -> DeadLetter {
    DeadLetter {
        reason: Reason::AttemptsExhausted,
        detail: "no account of that name".to_owned(),
        consumer: "billing".to_owned(),
        attempts: 5,
    }
}

/// A name that no other test has, on a broker that may be shared by many processes.
pub(crate) fn fresh_name(what: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

//! Takes messages from a broker, for as long as it is told to.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use metrics::{counter, gauge};
use onlyonce::{Inbox, InboxConfig, NotDone, SettingsError};
use onlyonce_core::Transactional;
use onlyonce_core::backoff::Backoff;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{info, warn};

use crate::broker::{Broker, BrokerError, BrokerErrorKind, Subscription};
use crate::handler::{Delivered, Handler, HandlerFn};
use crate::metric;
use crate::settings::Settings;
use crate::work::Worker;

/// The wait before the second attempt to subscribe; it doubles.
const RECONNECT_FIRST: Duration = Duration::from_millis(100);

/// The longest such wait.
const RECONNECT_CEILING: Duration = Duration::from_secs(15);

/// How long handlers that were interrupted are waited for: to be rolled back, and their messages put back.
const INTERRUPTED_GRACE: Duration = Duration::from_secs(5);

/// Consumes one queue, under one name.
pub struct Consumer<B, T> {
    broker: B,
    inbox: Inbox<T>,
    store: T,
    settings: Settings,
}

impl<B: Broker, T: Transactional + Clone> Consumer<B, T> {
    /// A consumer with this name, of what `broker` delivers; its messages are remembered in `store`, whose transactions
    /// the handler writes in.
    ///
    /// The name is part of each message's identity: two consumers of the same messages have two, the instances of one
    /// share one, and a renamed one forgets what was processed.
    ///
    /// # Errors
    /// Names the setting that cannot be, and what is allowed.
    pub fn new(
        broker: B,
        store: T,
        name: impl Into<String>,
        settings: Settings,
    ) -> Result<Self, SettingsError> {
        settings.check()?;
        let inbox = Inbox::new(store.clone(), name, settings.inbox.clone())?;
        Ok(Self { broker, inbox, store, settings })
    }

    /// As [`run`](Self::run), with a closure:
    ///
    /// ```
    /// # use onlyonce_consumer::{Broker, Consumer, ConsumerError};
    /// # use onlyonce_sqlite::SqliteTransactions;
    /// # async fn run<B: Broker>(consumer: Consumer<B, SqliteTransactions>) -> Result<(), ConsumerError> {
    /// let stop = async { drop(tokio::signal::ctrl_c().await) };
    /// consumer
    ///     .run_fn(stop, |tx, message| {
    ///         Box::pin(async move {
    ///             let amount: i64 = message.json()?;
    ///             sqlx::query("INSERT INTO payments VALUES (?)").bind(amount).execute(&mut **tx).await?;
    ///             Ok(())
    ///         })
    ///     })
    ///     .await
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn run_fn<R, F>(self, stop: impl Future<Output = ()>, handler: F) -> Result<(), ConsumerError>
    where
        F: for<'a> Fn(&'a mut T::Transaction, &'a Delivered) -> BoxFuture<'a, Result<R, NotDone>>
            + Send
            + Sync
            + 'static,
        R: Serialize + Send + 'static,
    {
        self.run(stop, HandlerFn(handler)).await
    }

    /// Processes messages until `stop` is ready. Then it takes no more, waits for those in hand for up to
    /// [`shutdown_grace`](Settings::shutdown_grace), has what still runs rolled back and put back, and is done.
    ///
    /// A lost connection is made again, whatever it takes, and so is the first one. Dropping this future interrupts
    /// nobody and waits for nobody: handlers run to their end, and what they commit is known when the message comes
    /// again.
    ///
    /// # Errors
    /// If the broker refuses the first subscription, or remembers messages for longer than the inbox does. Nothing
    /// was processed.
    pub async fn run(
        self,
        stop: impl Future<Output = ()>,
        handler: impl Handler<T>,
    ) -> Result<(), ConsumerError> {
        let Self { broker, inbox, store, settings } = self;
        let consumer = inbox.consumer().to_owned();
        // Where transactions take turns, more would only hold messages while they wait for theirs.
        let concurrency = if T::ONE_WRITER { 1 } else { settings.concurrency };
        let permits = Arc::new(Semaphore::new(concurrency.into()));
        let (tasks, interrupt) = (TaskTracker::new(), CancellationToken::new());
        let grace = settings.shutdown_grace;
        let worker = Arc::new(Worker::new(inbox, store, handler, settings, interrupt.clone()));
        let mut stop = pin!(stop);
        let mut waits = reconnects();
        let mut was_subscribed = false;
        let subscription = 'connected: loop {
            let subscribed = tokio::select! {
                () = &mut stop => break None,
                subscribed = broker.subscribe(worker.settings().prefetch) => subscribed,
            };
            let subscribed_at = Instant::now();
            match subscribed {
                Ok(mut subscription) => {
                    if !was_subscribed {
                        check_horizon(&broker, worker.inbox_config())?;
                        was_subscribed = true;
                    }
                    info!(consumer, "subscribed");
                    loop {
                        // Nothing is taken before somebody is free to process it.
                        let next = async {
                            let permit = Arc::clone(&permits).acquire_owned().await;
                            (permit.expect("it is never closed"), subscription.next().await)
                        };
                        let (permit, delivered) = tokio::select! {
                            biased;
                            () = &mut stop => break 'connected Some(subscription),
                            next = next => next,
                        };
                        match delivered {
                            Some(Ok(delivery)) => {
                                waits = reconnects();
                                let in_hand = InHand::new(&consumer);
                                let processing = Arc::clone(&worker).process(delivery);
                                tasks.spawn(async move {
                                    processing.await;
                                    drop((in_hand, permit));
                                });
                            }
                            Some(Err(error)) => failed(&consumer, &error),
                            None => break,
                        }
                    }
                    warn!(consumer, "the connection to the broker is gone");
                }
                Err(error) if !was_subscribed && error.kind() == BrokerErrorKind::Refused => {
                    return Err(ConsumerError::Broker(error));
                }
                Err(error) => failed(&consumer, &error),
            }
            if subscribed_at.elapsed() > RECONNECT_CEILING {
                waits = reconnects();
            }
            tokio::select! {
                () = &mut stop => break None,
                () = sleep(waits.next().unwrap_or(RECONNECT_CEILING)) => {}
            }
            counter!(metric::RECONNECTS, "consumer" => consumer.clone()).increment(1);
        };
        tasks.close();
        info!(consumer, in_hand = tasks.len(), "stopping: no more messages are taken");
        if timeout(grace, tasks.wait()).await.is_err() {
            warn!(
                consumer,
                in_hand = tasks.len(),
                "the grace is over; what still runs is rolled back and put back"
            );
            interrupt.cancel();
            let _ = timeout(INTERRUPTED_GRACE, tasks.wait()).await;
        }
        // Only now: what is in hand is settled on its connection. What it holds beyond goes back to the broker.
        drop(subscription);
        Ok(())
    }
}

fn reconnects() -> Backoff {
    Backoff::new(RECONNECT_FIRST, RECONNECT_CEILING)
}

fn failed(consumer: &str, error: &BrokerError) {
    counter!(metric::BROKER_FAILURES, "consumer" => consumer.to_owned()).increment(1);
    warn!(consumer, %error, "the broker failed");
}

/// A message that the broker can deliver after it was forgotten would be processed twice.
fn check_horizon(broker: &impl Broker, config: &InboxConfig) -> Result<(), ConsumerError> {
    let redelivery_horizon = broker.redelivery_horizon().max(config.redelivery_horizon);
    InboxConfig { redelivery_horizon, ..config.clone() }.check().map_err(ConsumerError::Settings)
}

/// A message that is being processed, as it is measured.
struct InHand {
    consumer: String,
}

impl InHand {
    fn new(consumer: &str) -> Self {
        gauge!(metric::IN_FLIGHT, "consumer" => consumer.to_owned()).increment(1.0);
        Self { consumer: consumer.to_owned() }
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        gauge!(metric::IN_FLIGHT, "consumer" => self.consumer.clone()).decrement(1.0);
    }
}

/// Why a consumer did not start.
#[derive(Debug)]
pub enum ConsumerError {
    /// The broker refuses the subscription; somebody must change the configuration.
    Broker(BrokerError),
    /// A setting does not fit the broker.
    Settings(SettingsError),
}

impl fmt::Display for ConsumerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker(error) => error.fmt(f),
            Self::Settings(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConsumerError {}

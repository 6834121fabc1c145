//! One delivered message, from the claim to its settlement.
//!
//! | what happened | the transaction | the record | the message |
//! |---|---|---|---|
//! | the handler is done | committed, with the record | done | acknowledged, then |
//! | done, but nothing is committed, or nobody knows | rolled back, or settled | attempt ended | put back |
//! | retry later, any other error, a panic, a timeout | rolled back | attempt ended | put back |
//! | the same, at the last attempt | rolled back | failed | dead-lettered |
//! | failed for good | rolled back | failed | dead-lettered |
//! | interrupted by a shutdown, or no transaction could be opened | rolled back, none | forgotten | put back |
//! | the worker was killed | rolled back by the database | held until its lease ends | delivered again by the broker |
//! | the same, at the last attempt; then, when it is delivered | none | failed | dead-lettered |
//! | processed before | none | unchanged | acknowledged |
//! | another worker is at it | none | unchanged | put back |
//! | the id of another payload; no id | none | unchanged | dead-lettered |
//! | the store is away | none | unchanged | kept for a while, then put back |
//!
//! A message that kills its worker takes with it whatever is processed beside it, and that has lost an attempt, too. So
//! the last attempt is made alone: a message is given up only for what it did itself.

use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, histogram};
use onlyonce::inbox::{Attempt, Attempted};
use onlyonce::settings::DURATION_MAX;
use onlyonce::{Inbox, InboxConfig, InboxError, Incoming, NotDone};
use onlyonce_core::backoff::Backoff;
use onlyonce_core::{StoreErrorKind, TransactionError, Transactional};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument, Span, debug, error, field, info_span, warn};

use crate::broker::{BrokerError, DeadLetter, Delivery, Reason};
use crate::handler::{Delivered, Handler};
use crate::metric;
use crate::settings::Settings;

/// The pauses between two calls of a store that is away.
const STORE_WAIT_FIRST: Duration = Duration::from_millis(100);
const STORE_WAIT_CEILING: Duration = Duration::from_secs(5);

/// A copy waits at least so long for another worker, whose lease may be about to end.
const IN_FLIGHT_DELAY_MIN: Duration = Duration::from_millis(50);

/// The delivery's deadline starts again after this part of it, so that there is time to try again.
const EXTEND_AFTER: u32 = 3;

/// What all messages of a consumer have in common.
pub(crate) struct Worker<T, H> {
    inbox: Inbox<T>,
    store: T,
    handler: Arc<H>,
    settings: Settings,
    interrupt: CancellationToken,
    /// As many as messages are processed at a time. One that is to be alone takes all of them.
    turns: Semaphore,
}

/// How a handler ended.
enum Handled<T: Transactional, R> {
    Done(T::Transaction, R),
    Failed(String),
    Again {
        after: Option<Duration>,
        why: String,
    },
    /// It was not called.
    NotOpened(TransactionError),
    Interrupted,
}

impl<T: Transactional + Clone, H: Handler<T>> Worker<T, H> {
    pub(crate) fn new(
        inbox: Inbox<T>,
        store: T,
        handler: H,
        settings: Settings,
        interrupt: CancellationToken,
    ) -> Self {
        let turns = Semaphore::new(settings.concurrency.into());
        Self { inbox, store, handler: Arc::new(handler), settings, interrupt, turns }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn inbox_config(&self) -> &InboxConfig {
        self.inbox.config()
    }

    /// Processes and settles one message. On a task of its own.
    pub(crate) async fn process<D: Delivery>(self: Arc<Self>, delivery: D) {
        let id = self.settings.message_id.of(delivery.message());
        let (consumer, topic) = (self.inbox.consumer(), &delivery.message().topic);
        let span = info_span!("message", consumer, topic, id = id.as_deref(), attempt = field::Empty);
        self.process_with_id(delivery, id).instrument(span).await;
    }

    async fn process_with_id<D: Delivery>(&self, mut delivery: D, id: Option<String>) {
        let Some(id) = id else {
            let why = format!("the message has no id: {}", self.settings.message_id.described());
            let letter = self.letter(Reason::NoId, why, 0);
            self.dead_letter(delivery, &letter).await;
            return;
        };
        // Held to the end, so that nobody is beside a last attempt before it is settled.
        let Some(_turn) = self.turn(&mut delivery, &id).await else {
            return self.put_back(delivery, Duration::ZERO, "interrupted").await;
        };
        match self.attempt(&mut delivery, &id).await {
            Ok(Attempted::Run(attempt)) => self.run(delivery, id, attempt).await,
            Ok(Attempted::Duplicate(_)) => {
                debug!("processed before");
                self.acknowledge(delivery, "duplicate").await;
            }
            Err(InboxError::Mismatch) => {
                let why = "the message's id was first used for another payload".to_owned();
                let letter = self.letter(Reason::IdReused, why, 0);
                self.dead_letter(delivery, &letter).await;
            }
            Err(InboxError::InFlight { lease_left }) => {
                let delay = lease_left.min(self.settings.in_flight_delay_max).max(IN_FLIGHT_DELAY_MIN);
                self.put_back(delivery, delay, "in_flight").await;
            }
            Err(error) => {
                error!(%error, source = error_source(&error), "nobody can say whether the message was processed");
                self.put_back(delivery, self.settings.retry_first, "store_error").await;
            }
        }
    }

    /// Waits for the message's turn: alone, if it is to have the last of several attempts. Before the attempt is counted,
    /// because whoever only waits beside a message that kills its worker must not lose one. `None` if a shutdown came
    /// first.
    async fn turn<D: Delivery>(&self, delivery: &mut D, id: &str) -> Option<SemaphorePermit<'_>> {
        let Settings { concurrency, attempts_max, .. } = self.settings;
        let deliveries = delivery.message().deliveries;
        let waiting = async {
            // A message that the broker delivers for the first time has had no attempt; and if nobody can be asked now,
            // there will be none.
            let is_first = attempts_max == 1 || deliveries == Some(1);
            let attempts = if is_first { 0 } else { self.inbox.attempts(id).await.unwrap_or(0) };
            let is_last = attempts_max > 1 && attempts + 1 == attempts_max;
            self.turns.acquire_many(if is_last { concurrency.into() } else { 1 }).await.ok()
        };
        let waiting = self.interrupt.run_until_cancelled(waiting);
        extended(delivery, waiting).await.flatten()
    }

    /// Counts the attempt. A store that is away is waited for, with the message in hand.
    async fn attempt<D: Delivery>(&self, delivery: &mut D, id: &str) -> Result<Attempted<T>, InboxError> {
        let payload = delivery.message().payload.clone();
        let message = Incoming::new(id);
        let message = if self.settings.check_payload { message.payload(&payload) } else { message };
        let claiming = async {
            let gives_up = Instant::now() + self.settings.store_wait;
            let mut waits = Backoff::new(STORE_WAIT_FIRST, STORE_WAIT_CEILING);
            loop {
                let error = match self.inbox.attempt(&message).await {
                    Err(InboxError::Store(error)) if error.kind() != StoreErrorKind::Unreadable => error,
                    told => return told,
                };
                warn!(%error, "the store cannot say whether the message was processed");
                let wait = waits.next().unwrap_or(STORE_WAIT_CEILING);
                if Instant::now() + wait > gives_up || self.interrupt.is_cancelled() {
                    return Err(InboxError::Store(error));
                }
                tokio::select! {
                    () = sleep(wait) => {}
                    () = self.interrupt.cancelled() => {}
                }
            }
        };
        extended(delivery, claiming).await
    }

    /// Makes the attempt, and settles the message by what came of it.
    async fn run<D: Delivery>(&self, mut delivery: D, id: String, mut attempt: Attempt<T>) {
        let execution = attempt.execution().clone();
        let (number, attempts_max) = (execution.attempt, self.settings.attempts_max);
        Span::current().record("attempt", number);
        if number > attempts_max {
            let why = format!(
                "{attempts_max} attempts were made, and the last did not end: its worker died, or what it did could \
                 not be committed"
            );
            let letter = self.letter(Reason::AttemptsExhausted, why, attempts_max);
            return self.give_up(delivery, attempt, letter).await;
        }
        let delivered = Delivered { id, message: Arc::new(delivery.message().clone()), execution };
        let started_at = Instant::now();
        let handled = attempt.during(extended(&mut delivery, self.handle(delivered))).await;
        histogram!(metric::HANDLER_SECONDS, "consumer" => self.consumer()).record(started_at.elapsed());
        match handled {
            Handled::Done(transaction, result) => match attempt.done(transaction, &result).await {
                Ok(()) => self.acknowledge(delivery, "done").await,
                Err(error) => {
                    warn!(%error, source = error_source(&error), "what the handler did is not known to be committed");
                    self.put_back(delivery, self.settings.retry_delay(number), "not_committed").await;
                }
            },
            Handled::Failed(reason) => {
                let letter = self.letter(Reason::Failed, reason, number);
                self.give_up(delivery, attempt, letter).await;
            }
            Handled::Again { why, .. } if number >= attempts_max => {
                let why = format!("the last of {attempts_max} attempts failed: {why}");
                let letter = self.letter(Reason::AttemptsExhausted, why, number);
                self.give_up(delivery, attempt, letter).await;
            }
            Handled::Again { after, why } => {
                warn!(why, "the attempt failed; the message is put back");
                attempt.again().await;
                let delay = after.unwrap_or_else(|| self.settings.retry_delay(number));
                self.put_back(delivery, delay.min(DURATION_MAX), "retried").await;
            }
            Handled::NotOpened(error) => {
                error!(%error, "no transaction could be opened");
                attempt.release().await;
                self.put_back(delivery, self.settings.retry_delay(number), "store_error").await;
            }
            Handled::Interrupted => {
                warn!("interrupted by the shutdown");
                attempt.release().await;
                self.put_back(delivery, Duration::ZERO, "interrupted").await;
            }
        }
    }

    /// Calls the handler in a transaction. Unless it is done, that is rolled back.
    async fn handle(&self, delivered: Delivered) -> Handled<T, H::Output> {
        let (store, handler) = (self.store.clone(), Arc::clone(&self.handler));
        // On a task of its own, so that one that blocks its thread does not keep the message from being held, and a
        // panic ends only this. Aborted, it drops the transaction.
        let handling = async move {
            let mut transaction = store.open().await?;
            let handled = handler.handle(&mut transaction, &delivered).await;
            Ok::<_, TransactionError>((transaction, handled))
        };
        let handling = AbortOnDropHandle::new(tokio::spawn(handling.in_current_span()));
        let again = |why: String| Handled::Again { after: None, why };
        let ended = tokio::select! {
            biased;
            ended = timeout(self.settings.handler_timeout, handling) => ended,
            () = self.interrupt.cancelled() => return Handled::Interrupted,
        };
        let (transaction, not_done) = match ended {
            Ok(Ok(Ok((transaction, Ok(result))))) => return Handled::Done(transaction, result),
            Ok(Ok(Ok((transaction, Err(not_done))))) => (transaction, not_done),
            Ok(Ok(Err(error))) => return Handled::NotOpened(error),
            Ok(Err(panic)) => return again(format!("the handler panicked: {panic}")),
            Err(_) => {
                return again(format!("the handler took longer than {:?}", self.settings.handler_timeout));
            }
        };
        self.store.roll_back(transaction).await;
        match not_done {
            NotDone::Failed { reason } => Handled::Failed(reason),
            NotDone::RetryLater { after, error } => Handled::Again { after, why: error.to_string() },
        }
    }

    /// Dead-letters the message, and then remembers that it was. The other way round, one that was lost in between
    /// would be in no queue at all.
    async fn give_up<D: Delivery>(&self, delivery: D, mut attempt: Attempt<T>, letter: DeadLetter) {
        if attempt.during(self.dead_letter(delivery, &letter)).await {
            attempt.failed(&letter.detail).await;
        } else {
            attempt.again().await;
        }
    }

    async fn acknowledge<D: Delivery>(&self, delivery: D, outcome: &'static str) {
        self.settled(delivery.acknowledge().await, outcome);
    }

    async fn put_back<D: Delivery>(&self, delivery: D, delay: Duration, outcome: &'static str) {
        self.settled(delivery.put_back(delay).await, outcome);
    }

    async fn dead_letter<D: Delivery>(&self, delivery: D, letter: &DeadLetter) -> bool {
        error!(reason = letter.reason.as_str(), detail = letter.detail, "the message is given up");
        self.settled(delivery.dead_letter(letter).await, "dead_lettered")
    }

    /// A message that could not be settled comes again, and is then known.
    fn settled(&self, settled: Result<(), BrokerError>, outcome: &'static str) -> bool {
        counter!(metric::MESSAGES, "consumer" => self.consumer(), "outcome" => outcome).increment(1);
        settled
            .inspect_err(|error| {
                counter!(metric::BROKER_FAILURES, "consumer" => self.consumer()).increment(1);
                warn!(%error, outcome, "the broker could not be told; it delivers the message again");
            })
            .is_ok()
    }

    fn letter(&self, reason: Reason, detail: String, attempts: u32) -> DeadLetter {
        DeadLetter { reason, detail, consumer: self.consumer(), attempts }
    }

    fn consumer(&self) -> String {
        self.inbox.consumer().to_owned()
    }
}

/// Takes the work to its end, and keeps the broker from giving the message to somebody else meanwhile.
async fn extended<D: Delivery, F: Future>(delivery: &mut D, work: F) -> F::Output {
    let mut work = std::pin::pin!(work);
    loop {
        let extension = async {
            match delivery.deadline() {
                Some(deadline) => sleep(deadline / EXTEND_AFTER).await,
                None => std::future::pending().await,
            }
            if let Err(error) = delivery.extend().await {
                warn!(%error, "the broker could not be told that the message is still being processed");
            }
        };
        tokio::select! {
            biased;
            output = &mut work => return output,
            () = extension => {}
        }
    }
}

fn error_source(error: &InboxError) -> Option<String> {
    std::error::Error::source(error).map(ToString::to_string)
}

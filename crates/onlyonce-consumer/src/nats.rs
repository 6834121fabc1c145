//! NATS JetStream.
//!
//! ```no_run
//! use onlyonce_consumer::nats::Nats;
//!
//! # fn main() -> Result<(), onlyonce_consumer::BrokerError> {
//! let orders = Nats::new("nats://localhost:4222", "ORDERS", "billing")?.dead_letters("dead.billing");
//! # Ok(())
//! # }
//! ```
//!
//! | | |
//! |---|---|
//! | the message id | the header `Nats-Msg-Id` |
//! | in progress | a durable pull consumer with explicit acknowledgements; its `ack_wait` starts again with every `extend` |
//! | put back | a negative acknowledgement with the delay, which the broker keeps |
//! | dead letter | published to the subject `dead.CONSUMER`, and acknowledged once a stream has it |
//! | connection lost | what was not settled is delivered again after its `ack_wait`; a settlement counts on any connection |
//!
//! Every settlement is confirmed by the broker, so that one that was lost is known.
//!
//! # What the broker must allow
//!
//! [`subscribe`](Broker::subscribe) checks all of it, and refuses with the reason:
//!
//! - The stream exists. So does the consumer, or it is made, to deliver all that the stream has.
//! - The consumer is a durable pull consumer with explicit acknowledgements and without `max_deliver`: JetStream also counts
//!   deliveries that never reached a handler, and what has reached its limit is lost without a word. It has no
//!   `inactive_threshold`: one that is made again delivers all that the stream has once more.
//! - A stream covers the subject for dead letters, confirms what it gets, keeps it whether or not somebody waits for it (its
//!   `retention` is not `interest`), and the consumer does not consume it.
//!
//! A stream's `duplicate_window` only spares the broker messages that are published twice within it.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_nats::jetstream::consumer::{self, AckPolicy, DeliverPolicy, PullConsumer, pull};
use async_nats::jetstream::context::{ConsumerInfoErrorKind, GetStreamByNameErrorKind, GetStreamErrorKind};
use async_nats::jetstream::stream::{self, ConsumerErrorKind, RetentionPolicy, Stream};
use async_nats::jetstream::{self, AckKind, Context, ErrorCode};
use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, HeaderMap, Request, ServerAddr};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use percent_encoding::percent_decode_str;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::broker::{Broker, BrokerError, DeadLetter, Delivery, Subscription};
use crate::message::Message;

/// The header of a dead letter that has the id of the message: its own `Nats-Msg-Id` tells dead letters apart.
pub const MESSAGE_ID: &str = "Onlyonce-Dead-Letter-Message-Id";
/// The header of a dead letter that has the subject that the message was published to.
pub const SUBJECT: &str = "Onlyonce-Dead-Letter-Subject";

/// How long a consumer that is made here waits for a message to be settled or extended, on the broker's clock.
pub const ACK_WAIT: Duration = Duration::from_secs(30);

/// What a broker may take for any answer, on the local clock.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// A connection that is silent for some of these is gone.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// How long one request for messages stands: what a broker forgot in a restart is asked for again so much later.
const PULL_TIME: Duration = Duration::from_secs(5);

/// A durable consumer of a JetStream stream.
pub struct Nats {
    servers: Vec<ServerAddr>,
    options: ConnectOptions,
    stream: String,
    consumer: String,
    filter: String,
    dead: String,
    ack_wait: Duration,
    /// How long the stream keeps a message, as seen when it was subscribed to.
    horizon: Mutex<Option<Duration>>,
}

impl Nats {
    /// The durable consumer with this name, of this stream, on one of these servers: URLs with commas between them,
    /// `nats://user:password@host:port` or `tls://…`, which trusts the certificates of the operating system. A user without
    /// a password is a token. The first URL that has either signs in at all of them.
    ///
    /// # Errors
    /// If a URL cannot be understood.
    pub fn new(servers: &str, stream: &str, consumer: &str) -> Result<Self, BrokerError> {
        let servers: Result<Vec<ServerAddr>, _> =
            servers.split(',').map(|server| server.trim().parse()).collect();
        // Not the URL itself: it may have a password in it.
        let understood = |error| {
            BrokerError::refused(format!(
                "the URL of a server must be nats://user:password@host:port: {error}"
            ))
        };
        let servers = servers.map_err(understood)?;
        let options = ConnectOptions::new().name(format!("onlyonce {consumer}")).ping_interval(PING_INTERVAL);
        Ok(Self {
            options: signed_in(options, &servers),
            servers,
            stream: stream.to_owned(),
            consumer: consumer.to_owned(),
            filter: String::new(),
            dead: format!("dead.{consumer}"),
            ack_wait: ACK_WAIT,
            horizon: Mutex::new(None),
        })
    }

    /// Consumes only what was published to subjects that match, such as `orders.*`.
    #[must_use]
    pub fn filter(mut self, subject: &str) -> Self {
        subject.clone_into(&mut self.filter);
        self
    }

    /// The subject for dead letters; `dead.CONSUMER` otherwise.
    #[must_use]
    pub fn dead_letters(mut self, subject: &str) -> Self {
        subject.clone_into(&mut self.dead);
        self
    }

    /// The `ack_wait` of the consumer if it has to be made, on the broker's clock; [`ACK_WAIT`] otherwise. One that
    /// exists keeps its own.
    #[must_use]
    pub fn ack_wait(mut self, wait: Duration) -> Self {
        self.ack_wait = wait;
        self
    }

    /// Signs in with the token and key of this file, as `nsc` writes them.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn credentials_file(mut self, path: impl Into<PathBuf>) -> Result<Self, BrokerError> {
        let path = path.into();
        let unread = |error: std::io::Error| {
            BrokerError::refused(format!("cannot read {}", path.display())).with_source(error)
        };
        self.options = self.options.credentials_file(&path).await.map_err(unread)?;
        Ok(self)
    }

    /// Trusts the certificates in this PEM file as well.
    #[must_use]
    pub fn root_certificates(mut self, path: impl Into<PathBuf>) -> Self {
        self.options = self.options.add_root_certificates(path.into());
        self
    }

    async fn open(&self, prefetch: u16) -> Result<NatsSubscription, BrokerError> {
        let lost = CancellationToken::new();
        let context = jetstream::new(self.connect(&lost).await?);
        let stream = stream(&context, &self.stream).await?;
        let horizon = Some(stream.cached_info().config.max_age).filter(|age| !age.is_zero());
        *self.horizon.lock().unwrap_or_else(PoisonError::into_inner) = horizon;
        let consumer = self.consumer(&stream).await?;
        self.check_dead_letters(&context, consumer.cached_info()).await?;
        let dead = Arc::new(Dead { context, subject: self.dead.clone() });
        Ok(NatsSubscription {
            deadline: deadline(&consumer.cached_info().config),
            consumer,
            room: Arc::new(Semaphore::new(usize::from(prefetch.max(1)))),
            pulling: Pulling::Idle,
            lost,
            dead,
        })
    }

    /// The client reconnects by itself, but what it had asked for is forgotten by then.
    async fn connect(&self, lost: &CancellationToken) -> Result<Client, BrokerError> {
        let lost = lost.clone();
        let options = self.options.clone().event_callback(move |event| {
            if matches!(event, Event::Disconnected | Event::Closed) {
                lost.cancel();
            }
            std::future::ready(())
        });
        options.connect(&self.servers[..]).await.map_err(|error| {
            let refused = matches!(
                error.kind(),
                ConnectErrorKind::ServerParse
                    | ConnectErrorKind::Authentication
                    | ConnectErrorKind::AuthorizationViolation
            );
            failed("cannot connect", refused, error)
        })
    }

    async fn consumer(&self, stream: &Stream) -> Result<PullConsumer, BrokerError> {
        let what = format!("cannot use the consumer {} of the stream {}", self.consumer, self.stream);
        match stream.consumer_info(&self.consumer).await {
            Ok(info) => {
                self.suits(&info.config).map_err(|why| BrokerError::refused(format!("{what}: {why}")))?;
            }
            Err(error) if error.kind() == ConsumerInfoErrorKind::NotFound => {}
            Err(error) => {
                let refused = match error.kind() {
                    ConsumerInfoErrorKind::InvalidName => true,
                    ConsumerInfoErrorKind::JetStream(error) => is_refusal(&error),
                    _ => false,
                };
                return Err(failed(&what, refused, error));
            }
        }
        // With the configuration that it has, if it is there: then this changes nothing.
        let made = stream.get_or_create_consumer(&self.consumer, self.configuration()).await;
        made.map_err(|error| {
            let refused = match error.kind() {
                ConsumerErrorKind::InvalidConsumerType | ConsumerErrorKind::InvalidName => true,
                ConsumerErrorKind::JetStream(error) => is_refusal(&error),
                _ => false,
            };
            failed(&what, refused, error)
        })
    }

    fn configuration(&self) -> pull::Config {
        pull::Config {
            durable_name: Some(self.consumer.clone()),
            deliver_policy: DeliverPolicy::All,
            ack_policy: AckPolicy::Explicit,
            ack_wait: self.ack_wait,
            max_deliver: -1,
            filter_subject: self.filter.clone(),
            ..pull::Config::default()
        }
    }

    /// Whether an existing consumer does what is promised here; otherwise why it does not.
    fn suits(&self, config: &consumer::Config) -> Result<(), String> {
        if config.deliver_subject.is_some() {
            return Err("it is a push consumer; it must be a pull consumer".to_owned());
        }
        if config.durable_name.is_none() {
            return Err("it is ephemeral and may vanish; it must be durable".to_owned());
        }
        if !config.inactive_threshold.is_zero() {
            let threshold = config.inactive_threshold;
            return Err(format!(
                "its inactive_threshold is {threshold:?}, after which it vanishes, and what was processed comes again; it \
                 must be unset"
            ));
        }
        if config.ack_policy != AckPolicy::Explicit {
            return Err(format!("its ack_policy is {:?}; it must be Explicit", config.ack_policy));
        }
        if config.max_deliver > 0 {
            let max = config.max_deliver;
            return Err(format!(
                "its max_deliver is {max}, after which messages are lost; it must be unlimited (-1)"
            ));
        }
        if config.headers_only {
            return Err("it delivers headers_only; it must deliver payloads".to_owned());
        }
        let filters = filters(config);
        if !self.filter.is_empty() && filters != [self.filter.as_str()] {
            return Err(format!("it filters {filters:?}, and not {:?}", self.filter));
        }
        Ok(())
    }

    async fn check_dead_letters(
        &self,
        context: &Context,
        consumer: &consumer::Info,
    ) -> Result<(), BrokerError> {
        let (dead, what) = (&self.dead, format!("cannot keep dead letters in {}", self.dead));
        if dead.contains(['*', '>']) {
            return Err(BrokerError::refused(format!("{what}: it must be one subject, without wildcards")));
        }
        let keeps = match context.stream_by_subject(dead.as_str()).await {
            Ok(name) => stream(context, &name).await?,
            Err(error) if error.kind() == GetStreamByNameErrorKind::NotFound => {
                return Err(BrokerError::refused(format!("{what}: no stream covers that subject")));
            }
            Err(error) => {
                let refused = error.kind() == GetStreamByNameErrorKind::InvalidSubject;
                return Err(failed(&what, refused, error));
            }
        };
        let stream::Config { name, retention, no_ack, .. } = &keeps.cached_info().config;
        if *retention == RetentionPolicy::Interest {
            return Err(BrokerError::refused(format!(
                "{what}: the retention is Interest of the stream {name}: it drops what no consumer waits for"
            )));
        }
        if *no_ack {
            return Err(BrokerError::refused(format!(
                "{what}: the stream {name} has no_ack, and never says that it has one"
            )));
        }
        let filters = filters(&consumer.config);
        let consumed = filters.is_empty() || filters.iter().any(|filter| covers(filter, dead));
        if *name == self.stream && consumed {
            return Err(BrokerError::refused(format!(
                "{what}: the consumer {} consumes that subject, and would get them again",
                self.consumer
            )));
        }
        Ok(())
    }
}

impl Broker for Nats {
    type Subscription = NatsSubscription;

    async fn subscribe(&self, prefetch: u16) -> Result<NatsSubscription, BrokerError> {
        self.open(prefetch).await
    }

    /// The age at which the stream drops a message, if it has one.
    fn redelivery_horizon(&self) -> Option<Duration> {
        *self.horizon.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Nats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nats")
            .field("stream", &self.stream)
            .field("consumer", &self.consumer)
            .field("dead", &self.dead)
            .finish_non_exhaustive()
    }
}

/// The client itself takes no notice of what is before the host.
fn signed_in(options: ConnectOptions, servers: &[ServerAddr]) -> ConnectOptions {
    let plain = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let Some(server) = servers.iter().find(|server| server.has_user_pass()) else { return options };
    let user = plain(server.username().unwrap_or_default());
    match server.password() {
        Some(password) => options.user_and_password(user, plain(password)),
        None => options.token(user),
    }
}

async fn stream(context: &Context, name: &str) -> Result<Stream, BrokerError> {
    context.get_stream(name).await.map_err(|error| {
        let refused = match error.kind() {
            GetStreamErrorKind::EmptyName | GetStreamErrorKind::InvalidStreamName => true,
            GetStreamErrorKind::JetStream(error) => is_refusal(&error),
            GetStreamErrorKind::Request => false,
        };
        failed(&format!("cannot read the stream {name}"), refused, error)
    })
}

/// The subjects that a consumer is limited to; none if it gets all.
fn filters(config: &consumer::Config) -> Vec<&str> {
    let one = Some(config.filter_subject.as_str()).filter(|filter| !filter.is_empty());
    one.into_iter().chain(config.filter_subjects.iter().map(String::as_str)).collect()
}

/// Whether a subject matches a filter: `*` stands for one token, `>` at the end for one or more.
fn covers(filter: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for wanted in filter.split('.') {
        match (wanted, tokens.next()) {
            (">", token) => return token.is_some(),
            ("*", Some(_)) => {}
            (wanted, Some(token)) if wanted == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

/// The shortest time after which the broker delivers a message again.
fn deadline(config: &consumer::Config) -> Duration {
    // Where there are such steps they stand in for the wait.
    config.backoff.iter().copied().min().unwrap_or(config.ack_wait)
}

/// One connection's requests for messages.
pub struct NatsSubscription {
    consumer: PullConsumer,
    deadline: Duration,
    /// For messages that are asked for or not settled.
    room: Arc<Semaphore>,
    pulling: Pulling,
    /// The connection was lost.
    lost: CancellationToken,
    dead: Arc<Dead>,
}

/// Kept between calls, so that a call that is dropped loses nothing.
enum Pulling {
    Idle,
    Asking(BoxFuture<'static, Result<Pull, BrokerError>>),
    Receiving(Pull),
    Over,
}

/// An open request, and the room for what has not come yet.
struct Pull {
    batch: pull::Batch,
    room: OwnedSemaphorePermit,
}

/// Where dead letters go.
struct Dead {
    context: Context,
    subject: String,
}

impl Subscription for NatsSubscription {
    type Delivery = NatsDelivery;

    async fn next(&mut self) -> Option<Result<NatsDelivery, BrokerError>> {
        let lost = self.lost.clone();
        tokio::select! {
            biased;
            () = lost.cancelled() => None,
            next = self.receive() => next,
        }
    }
}

impl NatsSubscription {
    async fn receive(&mut self) -> Option<Result<NatsDelivery, BrokerError>> {
        loop {
            match &mut self.pulling {
                Pulling::Idle => {
                    self.pulling =
                        Pulling::Asking(pull(self.consumer.clone(), Arc::clone(&self.room)).boxed());
                }
                Pulling::Asking(asking) => match asking.await {
                    Ok(pull) => self.pulling = Pulling::Receiving(pull),
                    Err(error) => {
                        self.pulling = Pulling::Over;
                        return Some(Err(error));
                    }
                },
                Pulling::Receiving(pull) => match pull.batch.next().await {
                    Some(Ok(message)) => {
                        // The request is never answered with more than it asked for.
                        let room = pull.room.split(1);
                        return Some(Ok(NatsDelivery::new(
                            message,
                            self.deadline,
                            room,
                            Arc::clone(&self.dead),
                        )));
                    }
                    Some(Err(error)) => {
                        self.pulling = Pulling::Over;
                        return Some(Err(unavailable("receive messages", error)));
                    }
                    None => self.pulling = Pulling::Idle,
                },
                Pulling::Over => return None,
            }
        }
    }
}

/// Asks for as many messages as there is room for, once there is any.
async fn pull(consumer: PullConsumer, room: Arc<Semaphore>) -> Result<Pull, BrokerError> {
    let what = "ask for messages";
    let free = room.clone().acquire_owned().await;
    let mut free = free.map_err(|_| BrokerError::unavailable("the subscription is closed"))?;
    while let Ok(more) = room.clone().try_acquire_owned() {
        free.merge(more);
    }
    let config = consumer.cached_info().config.clone();
    let batch_max = usize::try_from(config.max_batch).ok().filter(|&max| max > 0).unwrap_or(usize::MAX);
    if let Some(spare) = free.num_permits().checked_sub(batch_max) {
        drop(free.split(spare));
    }
    let expires =
        Some(config.max_expires).filter(|max| !max.is_zero()).map_or(PULL_TIME, |max| max.min(PULL_TIME));
    let asking = consumer.batch().max_messages(free.num_permits()).expires(expires).messages();
    let batch = asking.await.map_err(|error| unavailable(what, error))?;
    Ok(Pull { batch, room: free })
}

/// A message whose settlement the broker waits for.
pub struct NatsDelivery {
    message: Message,
    headers: HeaderMap,
    /// Where a settlement is sent to; its parts name this delivery.
    reply: String,
    /// Names the message in its stream, and who consumed it. When it was published is part of it: another stream of that
    /// name, in another domain or made anew, counts from the start as well.
    place: String,
    deadline: Duration,
    dead: Arc<Dead>,
    _room: Option<OwnedSemaphorePermit>,
}

impl NatsDelivery {
    fn new(
        delivered: jetstream::Message,
        deadline: Duration,
        room: Option<OwnedSemaphorePermit>,
        dead: Arc<Dead>,
    ) -> Self {
        let info = delivered.info().ok();
        let place = info.as_ref().map(|info| {
            let published = info.published.unix_timestamp_nanos();
            format!("{} {} {published} {}", info.stream, info.stream_sequence, info.consumer)
        });
        let count = info.and_then(|info| u64::try_from(info.delivered).ok());
        let async_nats::Message { subject, reply, payload, headers, .. } = delivered.message;
        let headers = headers.unwrap_or_default();
        let id = headers.get(async_nats::header::NATS_MESSAGE_ID).map(ToString::to_string);
        let message = Message {
            id: id.filter(|id| !id.is_empty()),
            topic: subject.to_string(),
            headers: lines(&headers),
            payload,
            deliveries: count,
        };
        let reply = reply.map(|reply| reply.to_string()).unwrap_or_default();
        Self { message, headers, reply, place: place.unwrap_or_default(), deadline, dead, _room: room }
    }

    /// Waits for the broker's word that it heard, so that nobody takes a lost settlement for one that counts.
    async fn settle(&self, what: &str, kind: AckKind) -> Result<(), BrokerError> {
        let request = Request::new().payload(kind.into()).timeout(Some(ANSWER_TIME_MAX));
        let answer = self.dead.context.client().send_request(self.reply.clone(), request).await;
        answer.map(drop).map_err(|error| unavailable(what, error))
    }

    /// Its own headers, without those that the broker would act on again: it would take the dead letter for a
    /// duplicate, refuse it, or drop it after a while.
    fn dead_headers(&self, letter: &DeadLetter) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, values) in self.headers.iter() {
            let name: &str = name.as_ref();
            let of_broker = name.get(..5).is_some_and(|start| start.eq_ignore_ascii_case("nats-"));
            for value in values.iter().filter(|_| !of_broker) {
                headers.append(name, value.clone());
            }
        }
        for (name, value) in letter.headers() {
            headers.insert(name, value);
        }
        headers.insert(SUBJECT, self.message.topic.as_str());
        if let Some(id) = &self.message.id {
            headers.insert(MESSAGE_ID, id.as_str());
        }
        // Published again because its confirmation was lost, it is one.
        headers.insert(async_nats::header::NATS_MESSAGE_ID, self.place.as_str());
        headers
    }
}

impl Delivery for NatsDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    async fn acknowledge(self) -> Result<(), BrokerError> {
        self.settle("acknowledge a message", AckKind::Ack).await
    }

    async fn put_back(self, delay: Duration) -> Result<(), BrokerError> {
        self.settle("put a message back", AckKind::Nak(Some(delay).filter(|delay| !delay.is_zero()))).await
    }

    async fn dead_letter(self, letter: &DeadLetter) -> Result<(), BrokerError> {
        let Dead { context, subject } = &*self.dead;
        let what = format!("publish a dead letter to {subject}");
        let published = context.publish_with_headers(
            subject.clone(),
            self.dead_headers(letter),
            self.message.payload.clone(),
        );
        let kept = async { published.await?.await };
        let late =
            |_| BrokerError::unavailable(format!("cannot {what}: no answer within {ANSWER_TIME_MAX:?}"));
        timeout(ANSWER_TIME_MAX, kept).await.map_err(late)?.map_err(|error| unavailable(&what, error))?;
        self.acknowledge().await
    }

    async fn extend(&mut self) -> Result<(), BrokerError> {
        self.settle("extend a message's deadline", AckKind::Progress).await
    }

    fn deadline(&self) -> Option<Duration> {
        Some(self.deadline)
    }
}

impl fmt::Debug for NatsSubscription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsSubscription").field("dead", &self.dead.subject).finish_non_exhaustive()
    }
}

impl fmt::Debug for NatsDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsDelivery")
            .field("message", &self.message)
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}

/// In the order of their names, which is all that the client keeps; the values of one name as sent.
fn lines(headers: &HeaderMap) -> Vec<(String, Bytes)> {
    let mut lines: Vec<_> = headers
        .iter()
        .flat_map(|(name, values)| {
            let name: &str = name.as_ref();
            values.iter().map(move |value| (name.to_owned(), Bytes::from(value.as_str().to_owned())))
        })
        .collect();
    lines.sort_by(|(one, _), (other, _)| one.cmp(other));
    lines
}

/// The broker's own judgement of a request: what it calls a bad one fails again, and so does JetStream that is off.
fn is_refusal(error: &jetstream::Error) -> bool {
    let off = [ErrorCode::JETSTREAM_NOT_ENABLED, ErrorCode::JETSTREAM_NOT_ENABLED_FOR_ACCOUNT];
    (400..500).contains(&error.code()) || off.contains(&error.error_code())
}

fn unavailable(what: &str, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> BrokerError {
    BrokerError::unavailable(format!("cannot {what}")).with_source(error)
}

fn failed(
    message: &str,
    refused: bool,
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> BrokerError {
    let failed = if refused { BrokerError::refused(message) } else { BrokerError::unavailable(message) };
    failed.with_source(error)
}

#[cfg(test)]
mod tests {
    use super::covers;

    #[test]
    fn filters_match_subjects_as_the_broker_has_them() {
        let matching = [
            ("a.b", "a.b"),
            ("a.*", "a.b"),
            ("*.b", "a.b"),
            (">", "a"),
            ("a.>", "a.b.c"),
            ("a.*.c", "a.b.c"),
        ];
        let others =
            [("a", "a.b"), ("a.b", "a"), ("a.*", "a"), ("a.*", "a.b.c"), ("a.>", "a"), ("a.b", "a.c")];
        for (filter, subject) in matching {
            assert!(covers(filter, subject), "{filter} {subject}");
        }
        for (filter, subject) in others {
            assert!(!covers(filter, subject), "{filter} {subject}");
        }
    }
}

//! RabbitMQ, over AMQP 0-9-1.
//!
//! ```no_run
//! use onlyonce_consumer::rabbitmq::RabbitMq;
//!
//! # fn main() -> Result<(), onlyonce_consumer::BrokerError> {
//! let orders = RabbitMq::new("amqp://user:password@localhost:5672/%2f", "orders")?.dead_letters("orders.dead")?;
//! # Ok(())
//! # }
//! ```
//!
//! | | |
//! |---|---|
//! | the message id | the property `message_id` |
//! | in progress | unacknowledged on a channel with a prefetch count; classic and quorum queues |
//! | put back | the delivery is held for the delay, and then returned to its queue |
//! | dead letter | published to the queue `QUEUE.dead`, on a connection of its own, with a confirm, and only then acknowledged |
//! | connection lost | the broker returns what was unacknowledged to the queue; nothing of the old channel is acknowledged on a new one |
//!
//! A delivery that is held counts towards the prefetch: it should be larger than the number of messages that fail
//! at a time, or the rest of the queue waits with them. In return nothing has to be declared, and a message keeps its place in
//! the queue and its exchange.
//!
//! # What the broker must allow
//!
//! - A broker closes the channel of a consumer that holds a delivery for longer than its `consumer_timeout`
//!   (30 minutes by default), and delivers again. There is no way to extend it: it must be longer than the handler
//!   takes, and than [`DELAY_MAX`].
//! - A quorum queue with a `delivery-limit` drops or moves a message that was returned so often, put back or not. RabbitMQ 4 sets
//!   one of 20 where nobody did: lift it (`-1`), so that attempts are counted in one place.
//! - A time to live on the queue or on messages drops what waits too long.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, LongString, ShortString};
use lapin::uri::{AMQPScheme, AMQPUri};
use lapin::{Acker, BasicProperties, Confirmation, Connection, ConnectionProperties, Consumer, ErrorKind};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

use crate::broker::{Broker, BrokerError, DeadLetter, Delivery, Subscription};
use crate::message::Message;

/// How long a delivery is held at most before it is put back, on the local clock. Well below the 30 minutes after
/// which a broker takes it for lost.
pub const DELAY_MAX: Duration = Duration::from_secs(600);

/// How long a delivery that was dropped is held before it goes back to its queue, so that one which fails at once does
/// not go round as fast as it can.
const DROPPED_DELAY: Duration = Duration::from_secs(5);

/// The header of a dead letter that has the exchange it was published to; empty for the default one.
pub const EXCHANGE: &str = "Onlyonce-Dead-Letter-Exchange";
/// The header of a dead letter that has the routing key it was published with.
pub const ROUTING_KEY: &str = "Onlyonce-Dead-Letter-Routing-Key";

/// What a broker may take for any answer, on the local clock.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

/// A peer that is silent for twice as long is gone. The broker's own suggestion is a minute.
const HEARTBEAT_SECONDS: u16 = 15;

/// The broker's codes for what will fail again until somebody changes the configuration, there or here: no such virtual host
/// (402, 530), no permission, no such queue, a queue of another kind.
const REFUSALS: [u16; 5] = [402, 403, NOT_FOUND, 406, 530];
const NOT_FOUND: u16 = 404;

/// The delivery mode of a message that is kept on disk.
const PERSISTENT: u8 = 2;

/// A queue on a RabbitMQ broker. It must exist.
#[derive(Clone)]
pub struct RabbitMq {
    uri: AMQPUri,
    queue: ShortString,
    dead: ShortString,
}

impl RabbitMq {
    /// The queue on the broker and virtual host of this URL: `amqp://user:password@host:port/vhost`, or `amqps://` with
    /// the feature `rabbitmq-tls`, which trusts the certificates of the operating system.
    ///
    /// # Errors
    /// If the URL cannot be understood, or the name is too long for a queue.
    pub fn new(url: &str, queue: &str) -> Result<Self, BrokerError> {
        let mut uri: AMQPUri = url.parse().map_err(|error| {
            // Not the URL itself: it has the password in it.
            BrokerError::refused(format!(
                "the URL of the broker must be amqp://user:password@host:port/vhost: {error}"
            ))
        })?;
        if uri.scheme == AMQPScheme::AMQPS && !cfg!(feature = "rabbitmq-tls") {
            return Err(BrokerError::refused("amqps:// needs the feature rabbitmq-tls"));
        }
        uri.query.heartbeat.get_or_insert(HEARTBEAT_SECONDS);
        Ok(Self { uri, queue: queue_name(queue)?, dead: queue_name(&format!("{queue}.dead"))? })
    }

    /// The queue for dead letters; `QUEUE.dead` otherwise. Declared durable if it does not exist.
    ///
    /// # Errors
    /// If the name is too long for a queue, or is the queue's own.
    pub fn dead_letters(mut self, queue: &str) -> Result<Self, BrokerError> {
        if queue == self.queue.as_str() {
            return Err(BrokerError::refused(format!(
                "dead letters in {queue} itself would be delivered again"
            )));
        }
        self.dead = queue_name(queue)?;
        Ok(self)
    }

    async fn open(&self, prefetch: u16) -> Result<RabbitMqSubscription, lapin::Error> {
        let connection = self.connect(self.queue.as_str()).await?;
        self.declare_dead_letters(&connection).await?;
        let channel = connection.create_channel().await?;
        channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
        let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
        let consumer = channel.basic_consume(self.queue.clone(), "".into(), options, arguments).await?;
        let link = Link { broker: self.clone(), publisher: Mutex::new(None), _connection: connection };
        Ok(RabbitMqSubscription { consumer: Some(consumer), link: Arc::new(link) })
    }

    async fn connect(&self, purpose: &str) -> Result<Connection, lapin::Error> {
        let name = format!("onlyonce {purpose}");
        let properties = ConnectionProperties::default().with_connection_name(name.into());
        Connection::connect_uri(self.uri.clone(), properties).await
    }

    /// Whoever declared it before us chose its arguments: any durability and kind will do.
    async fn declare_dead_letters(&self, connection: &Connection) -> Result<(), lapin::Error> {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        // A channel of its own: it is closed when there is no such queue.
        let channel = connection.create_channel().await?;
        match channel.queue_declare(self.dead.clone(), passive, FieldTable::default()).await {
            Err(error) if code(&error) == Some(NOT_FOUND) => {}
            other => return other.map(drop),
        }
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        let channel = connection.create_channel().await?;
        channel.queue_declare(self.dead.clone(), durable, FieldTable::default()).await.map(drop)
    }
}

impl Broker for RabbitMq {
    type Subscription = RabbitMqSubscription;

    async fn subscribe(&self, prefetch: u16) -> Result<RabbitMqSubscription, BrokerError> {
        let what = format!("consume {}", self.queue);
        in_time(&what, self.open(prefetch)).await?.map_err(|error| failed(&what, error))
    }

    /// AMQP does not say how long a queue keeps a message.
    fn redelivery_horizon(&self) -> Option<Duration> {
        None
    }
}

impl fmt::Debug for RabbitMq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, vhost) = (&self.uri.authority.host, &self.uri.vhost);
        f.debug_struct("RabbitMq")
            .field("host", host)
            .field("vhost", vhost)
            .field("queue", &self.queue)
            .finish()
    }
}

fn queue_name(name: &str) -> Result<ShortString, BrokerError> {
    ShortString::try_new(name).map_err(|error| BrokerError::refused(format!("no name for a queue: {error}")))
}

/// The consumer on one channel of one connection. Dropping it closes the channel: the broker returns what is not settled
/// to the queue, at once.
#[derive(Debug)]
pub struct RabbitMqSubscription {
    /// `None` after it has ended.
    consumer: Option<Consumer>,
    link: Arc<Link>,
}

/// The connection, for as long as one of its deliveries may want to be settled.
struct Link {
    broker: RabbitMq,
    /// Of dead letters, from the first one on: a broker that is out of memory or disk hears nothing more from a connection
    /// that publishes, and what it waits for are acknowledgements.
    publisher: Mutex<Option<Arc<Connection>>>,
    _connection: Connection,
}

impl Link {
    async fn publisher(&self) -> Result<Arc<Connection>, lapin::Error> {
        let mut publisher = self.publisher.lock().await;
        if let Some(connection) = publisher.as_ref().filter(|connection| connection.status().connected()) {
            return Ok(Arc::clone(connection));
        }
        let connection = self.broker.connect(self.broker.dead.as_str()).await?;
        self.broker.declare_dead_letters(&connection).await?;
        Ok(Arc::clone(publisher.insert(Arc::new(connection))))
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("broker", &self.broker).finish_non_exhaustive()
    }
}

impl Subscription for RabbitMqSubscription {
    type Delivery = RabbitMqDelivery;

    async fn next(&mut self) -> Option<Result<RabbitMqDelivery, BrokerError>> {
        let delivered = self.consumer.as_mut()?.next().await;
        if !matches!(delivered, Some(Ok(_))) {
            self.consumer = None;
        }
        let delivery = delivered?.map_err(|error| failed("receive messages", error));
        Some(delivery.map(|delivery| RabbitMqDelivery::new(delivery, Arc::clone(&self.link))))
    }
}

/// A message on its channel. Dropped unsettled, it goes back to its queue after a few seconds.
#[derive(Debug)]
pub struct RabbitMqDelivery {
    message: Message,
    properties: BasicProperties,
    exchange: ShortString,
    /// `None` once it was settled, or nobody knows.
    acker: Option<Acker>,
    link: Arc<Link>,
}

impl RabbitMqDelivery {
    fn new(delivery: lapin::message::Delivery, link: Arc<Link>) -> Self {
        let lapin::message::Delivery { exchange, routing_key, redelivered, properties, data, acker, .. } =
            delivery;
        let message = Message {
            id: properties.message_id().as_ref().map(ToString::to_string).filter(|id| !id.is_empty()),
            topic: routing_key.to_string(),
            headers: properties.headers().iter().flat_map(FieldTable::inner).filter_map(header).collect(),
            payload: Bytes::from(data),
            deliveries: deliveries(&properties, redelivered),
        };
        Self { message, properties, exchange, acker: Some(acker), link }
    }

    async fn publish_dead(&self, letter: &DeadLetter) -> Result<Confirmation, lapin::Error> {
        // A channel of its own: what the broker refuses closes it, and nothing else.
        let channel = self.link.publisher().await?.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (properties, payload) = (self.dead_properties(letter), &self.message.payload);
        let dead = self.link.broker.dead.clone();
        let confirm = channel.basic_publish("".into(), dead, options, payload, properties);
        confirm.await?.await
    }

    /// Its own, without those that would lose it or send it elsewhere.
    fn dead_properties(&self, letter: &DeadLetter) -> BasicProperties {
        let own = &self.properties;
        let mut headers = own.headers().clone().unwrap_or_default();
        let origin = [(EXCHANGE, self.exchange.to_string()), (ROUTING_KEY, self.message.topic.clone())];
        for (name, value) in letter.headers().into_iter().chain(origin) {
            headers.insert(name.into(), AMQPValue::LongString(LongString::from(value)));
        }
        // The broker sends copies to the routing keys that these name.
        let headers = headers.inner().iter().filter(|(name, _)| !["CC", "BCC"].contains(&name.as_str()));
        let headers: std::collections::BTreeMap<_, _> =
            headers.map(|(name, value)| (name.clone(), value.clone())).collect();
        let kept = BasicProperties::default().with_headers(headers.into()).with_delivery_mode(PERSISTENT);
        // Neither an expiration, after which it would be dropped, nor the producer's user, in whose name the broker
        // lets nobody else publish.
        let kept = with(kept, own.message_id(), BasicProperties::with_message_id);
        let kept = with(kept, own.content_type(), BasicProperties::with_content_type);
        let kept = with(kept, own.content_encoding(), BasicProperties::with_content_encoding);
        let kept = with(kept, own.correlation_id(), BasicProperties::with_correlation_id);
        let kept = with(kept, own.reply_to(), BasicProperties::with_reply_to);
        let kept = with(kept, own.timestamp(), BasicProperties::with_timestamp);
        let kept = with(kept, own.kind(), BasicProperties::with_type);
        with(kept, own.app_id(), BasicProperties::with_app_id)
    }
}

fn with<T: Clone>(
    properties: BasicProperties,
    value: &Option<T>,
    set: impl FnOnce(BasicProperties, T) -> BasicProperties,
) -> BasicProperties {
    match value {
        Some(value) => set(properties, value.clone()),
        None => properties,
    }
}

impl Delivery for RabbitMqDelivery {
    fn message(&self) -> &Message {
        &self.message
    }

    async fn acknowledge(mut self) -> Result<(), BrokerError> {
        let what = "acknowledge a message";
        let Some(acker) = self.acker.take() else { return Ok(()) };
        settled(what, in_time(what, acker.ack(BasicAckOptions::default())).await?)
    }

    /// Returns at once; the delivery is held in the background. An error afterwards means that the connection is
    /// gone, and the broker has put it back itself.
    async fn put_back(mut self, delay: Duration) -> Result<(), BrokerError> {
        let Some(acker) = self.acker.take() else { return Ok(()) };
        if acker.usable() && !delay.is_zero() {
            tokio::spawn(returned_after(delay.min(DELAY_MAX), acker));
            return Ok(());
        }
        returned(&acker).await
    }

    async fn dead_letter(self, letter: &DeadLetter) -> Result<(), BrokerError> {
        let what = format!("publish a dead letter to {}", self.link.broker.dead);
        let unkept = |why: &str| Err(BrokerError::unavailable(format!("cannot {what}: {why}")));
        match in_time(&what, self.publish_dead(letter)).await?.map_err(|error| failed(&what, error))? {
            Confirmation::Ack(None) => self.acknowledge().await,
            Confirmation::Ack(Some(_)) => {
                // The next one declares it again.
                *self.link.publisher.lock().await = None;
                unkept("there is no such queue any more")
            }
            Confirmation::Nack(_) => unkept("the broker did not keep it"),
            Confirmation::NotRequested => unkept("the broker does not confirm"),
        }
    }

    async fn extend(&mut self) -> Result<(), BrokerError> {
        Ok(())
    }

    fn deadline(&self) -> Option<Duration> {
        None
    }
}

/// AMQP has no deadline: what nobody settles would stay in nobody's hands, and count towards the prefetch, for as long as
/// the connection lives.
impl Drop for RabbitMqDelivery {
    fn drop(&mut self) {
        let unsettled = self.acker.take().filter(Acker::usable);
        if let (Some(acker), Ok(runtime)) = (unsettled, Handle::try_current()) {
            runtime.spawn(returned_after(DROPPED_DELAY, acker));
        }
    }
}

async fn returned_after(delay: Duration, acker: Acker) {
    sleep(delay).await;
    if let Err(error) = returned(&acker).await {
        tracing::debug!(%error, "the broker has put a message back itself");
    }
}

async fn returned(acker: &Acker) -> Result<(), BrokerError> {
    let what = "put a message back";
    let requeue = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
    settled(what, in_time(what, acker.nack(requeue)).await?)
}

/// A tag counts on its own channel only: after that is closed nothing is sent, and the answer is `false`.
fn settled(what: &str, answer: Result<bool, lapin::Error>) -> Result<(), BrokerError> {
    match answer {
        Ok(true) => Ok(()),
        Ok(false) => Err(BrokerError::unavailable(format!("cannot {what}: its channel is closed"))),
        Err(error) => Err(failed(what, error)),
    }
}

/// AMQP has no word for a broker that takes its time; one that is out of memory or disk just does not answer.
async fn in_time<T>(what: &str, call: impl Future<Output = T>) -> Result<T, BrokerError> {
    let late = |_| BrokerError::unavailable(format!("cannot {what}: no answer within {ANSWER_TIME_MAX:?}"));
    timeout(ANSWER_TIME_MAX, call).await.map_err(late)
}

fn failed(what: &str, error: lapin::Error) -> BrokerError {
    let message = format!("cannot {what}");
    let failed = match code(&error) {
        Some(code) if REFUSALS.contains(&code) => BrokerError::refused(message),
        _ => BrokerError::unavailable(message),
    };
    failed.with_source(error)
}

fn code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// How often it was delivered. Quorum queues count the times before this one; a classic queue knows whether there were
/// any.
fn deliveries(properties: &BasicProperties, redelivered: bool) -> Option<u64> {
    let counted = properties.headers().as_ref().and_then(|headers| headers.inner().get("x-delivery-count"));
    match counted.and_then(number).and_then(|before| u64::try_from(before).ok()) {
        Some(before) if before > 0 => Some(before.saturating_add(1)),
        _ => (!redelivered).then_some(1),
    }
}

/// A header whose value has one obvious text; the broker's own tables and lists, such as `x-death`, have none.
fn header((name, value): (&ShortString, &AMQPValue)) -> Option<(String, Bytes)> {
    let value = match value {
        AMQPValue::LongString(text) => Bytes::copy_from_slice(text.as_bytes()),
        AMQPValue::ShortString(text) => Bytes::copy_from_slice(text.as_str().as_bytes()),
        AMQPValue::ByteArray(bytes) => Bytes::copy_from_slice(bytes.as_slice()),
        AMQPValue::Boolean(value) => value.to_string().into(),
        AMQPValue::Float(value) => value.to_string().into(),
        AMQPValue::Double(value) => value.to_string().into(),
        other => number(other)?.to_string().into(),
    };
    Some((name.to_string(), value))
}

fn number(value: &AMQPValue) -> Option<i128> {
    Some(match *value {
        AMQPValue::ShortShortInt(value) => value.into(),
        AMQPValue::ShortShortUInt(value) => value.into(),
        AMQPValue::ShortInt(value) => value.into(),
        AMQPValue::ShortUInt(value) => value.into(),
        AMQPValue::LongInt(value) => value.into(),
        AMQPValue::LongUInt(value) => value.into(),
        AMQPValue::LongLongInt(value) => value.into(),
        AMQPValue::Timestamp(value) => value.into(),
        _ => return None,
    })
}

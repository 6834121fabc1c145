//! What is RabbitMQ's own.

use std::time::Duration;

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use onlyonce_consumer::rabbitmq::{EXCHANGE, ROUTING_KEY, RabbitMq};
use onlyonce_consumer::{Broker, BrokerErrorKind, Delivery};
use tokio::time::sleep;

use crate::queue::{Dead, LONG, Queue, Sent, fresh_name, message, next, nothing, reason};

/// A queue, and a connection beside the adapter's.
pub(crate) struct RabbitQueue {
    name: String,
    channel: Channel,
    _connection: Connection,
}

fn server() -> &'static onlyonce_testkit::RabbitMq {
    onlyonce_testkit::RabbitMq::shared()
}

/// The URL of the server, by way of another port.
fn url_at(port: u16) -> String {
    let (before, after) = server().url().rsplit_once(&format!(":{}", server().port())).unwrap();
    format!("{before}:{port}{after}")
}

impl RabbitQueue {
    async fn declared(arguments: FieldTable) -> Self {
        let connection = Connection::connect(server().url(), ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        let name = fresh_name("orders");
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(name.as_str().into(), durable, arguments).await.unwrap();
        Self { name, channel, _connection: connection }
    }

    async fn publish_with(&self, payload: &[u8], properties: BasicProperties) {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let queue = self.name.as_str().into();
        let confirm =
            self.channel.basic_publish("".into(), queue, options, payload, properties).await.unwrap();
        assert!(matches!(confirm.await.unwrap(), lapin::Confirmation::Ack(None)));
    }
}

impl Queue for RabbitQueue {
    type Broker = RabbitMq;

    const HOLDS_WHAT_IS_PUT_BACK: bool = true;

    async fn fresh() -> Self {
        Self::declared(FieldTable::default()).await
    }

    fn broker_at(&self, port: u16) -> RabbitMq {
        RabbitMq::new(&url_at(port), &self.name).unwrap()
    }

    fn port(&self) -> u16 {
        server().port()
    }

    async fn publish(&self, sent: &Sent) {
        let mut headers = FieldTable::default();
        for (name, value) in &sent.headers {
            headers.insert((*name).into(), text(value));
        }
        let mut properties = BasicProperties::default().with_headers(headers).with_delivery_mode(2);
        if let Some(id) = &sent.id {
            properties = properties.with_message_id(id.as_str().into());
        }
        self.publish_with(sent.payload.as_bytes(), properties).await;
    }

    async fn dead_letter(&self) -> Dead {
        let name = format!("{}.dead", self.name);
        loop {
            let options = BasicGetOptions { no_ack: true };
            let Some(got) = self.channel.basic_get(name.as_str().into(), options).await.unwrap() else {
                sleep(Duration::from_millis(50)).await;
                continue;
            };
            let properties = &got.properties;
            assert_eq!(*properties.delivery_mode(), Some(2), "kept on disk");
            let headers = properties.headers().clone().unwrap_or_default();
            let headers = headers.inner().iter().filter_map(|(name, value)| match value {
                AMQPValue::LongString(value) => Some((name.to_string(), value.to_string())),
                _ => None,
            });
            return Dead {
                id: properties.message_id().as_ref().map(ToString::to_string),
                headers: headers.collect(),
                payload: got.data.clone().into(),
            };
        }
    }
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

#[tokio::test]
async fn a_queue_that_does_not_exist_is_refused() {
    let broker = RabbitMq::new(server().url(), &fresh_name("absent")).unwrap();
    let error = broker.subscribe(1).await.err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("no queue"), "{error}");
}

#[tokio::test]
async fn a_wrong_password_and_a_wrong_virtual_host_are_refused() {
    let queue = RabbitQueue::fresh().await;
    let port = server().port();
    for url in
        [format!("amqp://guest:wrong@127.0.0.1:{port}/%2f"), format!("amqp://127.0.0.1:{port}/nowhere")]
    {
        let error = RabbitMq::new(&url, &queue.name).unwrap().subscribe(1).await.err().unwrap();
        assert_eq!(error.kind(), BrokerErrorKind::Refused, "{url}: {error}");
        assert!(!error.to_string().contains("wrong@"), "{error}");
    }
}

#[test]
fn a_url_that_cannot_be_understood_is_refused_without_being_shown() {
    for url in ["http://user:secret@host", "amqp//secret", "amqps://user:secret@host"] {
        let error = RabbitMq::new(url, "orders").err().unwrap();
        assert_eq!(error.kind(), BrokerErrorKind::Refused);
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let error = RabbitMq::new("amqp://localhost", &"q".repeat(300)).err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Refused);
    let error = RabbitMq::new("amqp://localhost", "orders").unwrap().dead_letters("orders").err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Refused);
}

/// A broker takes these as instructions: the dead letter would be dropped after a while, be copied to another
/// queue, or be refused because somebody else's name is on it.
#[tokio::test]
async fn a_dead_letter_says_where_it_came_from_and_nothing_that_would_lose_it() {
    let queue = RabbitQueue::fresh().await;
    let mut headers = FieldTable::default();
    headers.insert("Number".into(), text("5"));
    headers.insert("CC".into(), AMQPValue::FieldArray(vec![text(&format!("{}.copies", queue.name))].into()));
    let properties = BasicProperties::default()
        .with_headers(headers)
        .with_message_id("order-1".into())
        .with_expiration("2000".into())
        .with_user_id("guest".into())
        .with_content_type("application/json".into())
        .with_correlation_id("c-1".into());
    queue.publish_with(b"{}", properties).await;
    let mut subscription = queue.subscribe(1).await;
    next(&mut subscription).await.dead_letter(&reason()).await.unwrap();
    let name = format!("{}.dead", queue.name);
    // Longer than the expiration.
    sleep(Duration::from_millis(2_500)).await;
    let got = queue.channel.basic_get(name.as_str().into(), BasicGetOptions { no_ack: true }).await.unwrap();
    let dead = got.expect("it is still there");
    let own = &dead.properties;
    assert_eq!((own.expiration(), own.user_id()), (&None, &None));
    assert_eq!(own.content_type().as_ref().map(|text| text.as_str()), Some("application/json"));
    assert_eq!(own.correlation_id().as_ref().map(|text| text.as_str()), Some("c-1"));
    let headers = own.headers().clone().unwrap();
    let headers = headers.inner();
    assert!(!headers.contains_key("CC"), "{headers:?}");
    assert_eq!(headers.get(EXCHANGE), Some(&text("")));
    assert_eq!(headers.get(ROUTING_KEY), Some(&text(&queue.name)));
    assert_eq!(headers.get("Number"), Some(&text("5")));
}

/// Deleted behind the adapter's back: an unroutable message is acknowledged by a broker all the same.
#[tokio::test]
async fn a_dead_letter_that_nobody_keeps_is_an_error_and_the_message_comes_again() {
    let queue = RabbitQueue::fresh().await;
    queue.publish(&message("poison", "boom")).await;
    let mut subscription = queue.subscribe(1).await;
    let delivery = next(&mut subscription).await;
    let name = format!("{}.dead", queue.name);
    queue
        .channel
        .queue_delete(name.as_str().into(), lapin::options::QueueDeleteOptions::default())
        .await
        .unwrap();
    let error = delivery.dead_letter(&reason()).await.err().unwrap();
    assert!(error.to_string().contains(&name), "{error}");
    drop(subscription);
    let mut again = queue.subscribe(1).await;
    assert_eq!(next(&mut again).await.message().id.as_deref(), Some("poison"));
}

#[tokio::test]
async fn a_dead_letter_queue_that_exists_keeps_its_own_arguments() {
    let queue = RabbitQueue::fresh().await;
    let mut quorum = FieldTable::default();
    quorum.insert("x-queue-type".into(), text("quorum"));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let name = format!("{}.dead", queue.name);
    queue.channel.queue_declare(name.as_str().into(), durable, quorum).await.unwrap();
    queue.publish(&message("poison", "boom")).await;
    next(&mut queue.subscribe(1).await).await.dead_letter(&reason()).await.unwrap();
    assert_eq!(queue.dead_letter().await.id.as_deref(), Some("poison"));
}

#[tokio::test]
async fn a_quorum_queue_is_consumed_and_counts_deliveries() {
    let mut quorum = FieldTable::default();
    quorum.insert("x-queue-type".into(), text("quorum"));
    let queue = RabbitQueue::declared(quorum).await;
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.subscribe(5).await;
    for times in 1..=3 {
        let delivery = next(&mut subscription).await;
        assert_eq!(delivery.message().deliveries, Some(times));
        delivery.put_back(Duration::from_millis(200)).await.unwrap();
    }
    next(&mut subscription).await.acknowledge().await.unwrap();
    nothing(&mut subscription).await;
}

/// A delivery tag means another message on another channel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledgement_from_before_a_cut_is_an_error_and_settles_nothing() {
    let queue = RabbitQueue::fresh().await;
    let proxy = onlyonce_testkit::Proxy::start(server().port()).await.unwrap();
    let broker = queue.broker_at(proxy.port());
    queue.publish(&message("one", "1")).await;
    let mut subscription = broker.subscribe(1).await.unwrap();
    let stale = next(&mut subscription).await;
    proxy.cut();
    while onlyonce_consumer::Subscription::next(&mut subscription).await.is_some() {}
    let mut subscription = tokio::time::timeout(LONG, broker.subscribe(1)).await.unwrap().unwrap();
    let fresh = next(&mut subscription).await;
    let error = stale.acknowledge().await.err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Unavailable, "{error}");
    drop((fresh, subscription));
    assert_eq!(next(&mut queue.subscribe(1).await).await.message().id.as_deref(), Some("one"));
}

//! What is RabbitMQ's own.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use onlyonce_consumer::rabbitmq::{EXCHANGE, ROUTING_KEY, RabbitMq};
use onlyonce_consumer::{Broker, BrokerErrorKind, Delivery};
use onlyonce_testkit::RabbitMq as Server;
use tokio::sync::Mutex;
use tokio::time::sleep;

use crate::queue::{Dead, LONG, Queue, Sent, ends, fresh_name, message, next, nothing, reason};
use crate::storm::Storm;

/// A queue, and a connection beside the adapter's.
pub(crate) struct RabbitQueue {
    name: String,
    /// Of a broker of its own.
    alone: Option<Arc<Server>>,
    /// Made again when the broker was killed.
    connected: Mutex<(Connection, Channel)>,
}

fn server() -> &'static Server {
    Server::shared()
}

impl RabbitQueue {
    async fn declared(arguments: FieldTable) -> Self {
        Self::declared_on(None, arguments).await
    }

    async fn declared_on(alone: Option<Arc<Server>>, arguments: FieldTable) -> Self {
        let url = alone.as_deref().unwrap_or_else(|| server()).url();
        let (connection, channel) = connected(url).await.unwrap();
        let name = fresh_name("orders");
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(name.as_str().into(), durable, arguments).await.unwrap();
        Self { name, alone, connected: Mutex::new((connection, channel)) }
    }

    async fn channel(&self) -> Channel {
        self.connected.lock().await.1.clone()
    }

    fn server(&self) -> &Server {
        self.alone.as_deref().unwrap_or_else(|| server())
    }

    async fn publish_with(&self, payload: &[u8], properties: BasicProperties) {
        assert!(self.published(payload, properties).await.unwrap());
    }

    /// Whether it is in the queue.
    async fn published(&self, payload: &[u8], properties: BasicProperties) -> lapin::Result<bool> {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (channel, queue) = (self.channel().await, self.name.as_str().into());
        let confirm = channel.basic_publish("".into(), queue, options, payload, properties).await?;
        Ok(matches!(confirm.await?, lapin::Confirmation::Ack(None)))
    }
}

async fn connected(url: &str) -> lapin::Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok((connection, channel))
}

fn properties(sent: &Sent) -> BasicProperties {
    let mut headers = FieldTable::default();
    for (name, value) in &sent.headers {
        headers.insert((*name).into(), text(value));
    }
    let properties = BasicProperties::default().with_headers(headers).with_delivery_mode(2);
    match &sent.id {
        Some(id) => properties.with_message_id(id.as_str().into()),
        None => properties,
    }
}

impl Queue for RabbitQueue {
    type Broker = RabbitMq;

    const HOLDS_WHAT_IS_PUT_BACK: bool = true;

    async fn fresh() -> Self {
        Self::declared(FieldTable::default()).await
    }

    fn broker_at(&self, port: u16) -> RabbitMq {
        let own = format!(":{}/", self.port());
        let url = self.server().url().replace(&own, &format!(":{port}/"));
        RabbitMq::new(&url, &self.name).unwrap()
    }

    fn port(&self) -> u16 {
        self.server().port()
    }

    async fn publish(&self, sent: &Sent) {
        self.publish_with(sent.payload.as_bytes(), properties(sent)).await;
    }

    async fn dead_letter(&self) -> Dead {
        let name = format!("{}.dead", self.name);
        loop {
            // A channel of its own: it is closed while there is no such queue.
            let channel = self.connected.lock().await.0.create_channel().await.unwrap();
            let got = channel.basic_get(name.as_str().into(), BasicGetOptions { no_ack: true }).await;
            let Ok(Some(got)) = got else {
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

impl Storm for RabbitQueue {
    async fn alone() -> Self {
        let server = tokio::task::spawn_blocking(Server::start).await.unwrap();
        Self::declared_on(Some(Arc::new(server)), FieldTable::default()).await
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        vec![("BROKER", self.server().url().to_owned()), ("QUEUE", self.name.clone())]
    }

    fn crash_broker(&self) {
        self.server().crash();
        self.server().start_again();
    }

    fn restart_broker(&self) {
        self.server().stop();
        self.server().start_again();
    }

    async fn publish_surely(&self, sent: &Sent) {
        while !self.published(sent.payload.as_bytes(), properties(sent)).await.unwrap_or(false) {
            if let Ok(again) = connected(self.server().url()).await {
                *self.connected.lock().await = again;
            } else {
                sleep(Duration::from_millis(200)).await;
            }
        }
    }

    async fn left(&self) -> u64 {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        // Of its own: the broker may have been killed since the last message was published.
        let (_connection, channel) = connected(self.server().url()).await.unwrap();
        let queue = channel.queue_declare(self.name.as_str().into(), passive, FieldTable::default()).await;
        queue.unwrap().message_count().into()
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
    let got = queue
        .channel()
        .await
        .basic_get(name.as_str().into(), BasicGetOptions { no_ack: true })
        .await
        .unwrap();
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
    for id in ["other", "poison"] {
        queue.publish(&message(id, "boom")).await;
    }
    let mut subscription = queue.subscribe(1).await;
    next(&mut subscription).await.dead_letter(&reason()).await.unwrap();
    let delivery = next(&mut subscription).await;
    let name = format!("{}.dead", queue.name);
    queue
        .channel()
        .await
        .queue_delete(name.as_str().into(), lapin::options::QueueDeleteOptions::default())
        .await
        .unwrap();
    let error = delivery.dead_letter(&reason()).await.err().unwrap();
    assert!(error.to_string().contains(&name), "{error}");
    // Although the connection lives; and the queue is declared again.
    next(&mut subscription).await.dead_letter(&reason()).await.unwrap();
    assert_eq!(queue.dead_letter().await.id.as_deref(), Some("poison"));
}

/// A broker that is out of disk or memory takes nothing more from a connection that publishes, and acknowledgements are
/// what it waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_acknowledged_while_the_broker_takes_no_dead_letter() {
    let queue = RabbitQueue::alone().await;
    for id in ["poison", "one", "two"] {
        queue.publish(&message(id, "x")).await;
    }
    let mut subscription = queue.subscribe(2).await;
    let (poison, one) = (next(&mut subscription).await, next(&mut subscription).await);
    tokio::task::block_in_place(|| queue.server().disk_full(true));
    let given_up = tokio::spawn(async move { poison.dead_letter(&reason()).await });
    sleep(Duration::from_secs(1)).await;
    one.acknowledge().await.unwrap();
    // Only if the broker has heard it.
    let two = next(&mut subscription).await;
    assert_eq!((two.message().id.as_deref(), given_up.is_finished()), (Some("two"), false));
    tokio::task::block_in_place(|| queue.server().disk_full(false));
    given_up.await.unwrap().unwrap();
    assert_eq!(queue.dead_letter().await.id.as_deref(), Some("poison"));
}

/// The broker says so, and nothing else happens to the connection.
#[tokio::test]
async fn a_queue_that_is_deleted_ends_the_subscription() {
    let queue = RabbitQueue::fresh().await;
    let mut subscription = queue.subscribe(1).await;
    let options = lapin::options::QueueDeleteOptions::default();
    queue.channel().await.queue_delete(queue.name.as_str().into(), options).await.unwrap();
    ends(&mut subscription).await;
}

#[tokio::test]
async fn a_dead_letter_queue_that_exists_keeps_its_own_arguments() {
    let queue = RabbitQueue::fresh().await;
    let mut quorum = FieldTable::default();
    quorum.insert("x-queue-type".into(), text("quorum"));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let name = format!("{}.dead", queue.name);
    queue.channel().await.queue_declare(name.as_str().into(), durable, quorum).await.unwrap();
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

/// The header is the broker's on a quorum queue only; elsewhere a producer may have copied it from there.
#[tokio::test]
async fn a_message_that_was_delivered_before_is_not_taken_for_a_new_one() {
    let queue = RabbitQueue::fresh().await;
    let mut headers = FieldTable::default();
    headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(0));
    queue.publish_with(b"{}", BasicProperties::default().with_headers(headers)).await;
    let mut subscription = queue.subscribe(1).await;
    let delivery = next(&mut subscription).await;
    assert_eq!(delivery.message().deliveries, Some(1));
    delivery.put_back(Duration::ZERO).await.unwrap();
    assert_ne!(next(&mut subscription).await.message().deliveries, Some(1));
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

/// No client that holds names and ids to be text can read it, and it stands before the rest of the queue. That must be
/// seen, and not be a connection on which nothing comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_the_client_cannot_read_ends_the_subscription() {
    let queue = RabbitQueue::fresh().await;
    tokio::task::block_in_place(|| published_with_id(server().port(), &queue.name, b"\xfc"));
    for _ in 0..2 {
        let mut subscription = queue.subscribe(1).await;
        ends(&mut subscription).await;
    }
}

/// As a producer that sends another encoding.
fn published_with_id(port: u16, queue: &str, id: &[u8]) {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let short = |text: &[u8]| [&[u8::try_from(text.len()).unwrap()], text].concat();
    let long = |text: &[u8]| [&u32::try_from(text.len()).unwrap().to_be_bytes(), text].concat();
    let frame =
        |kind: u8, channel: u8, payload: &[u8]| [&[kind, 0, channel], &long(payload)[..], &[0xce]].concat();
    let answered = |stream: &mut std::net::TcpStream| {
        let mut head = [0; 7];
        stream.read_exact(&mut head).unwrap();
        let length = u32::from_be_bytes([head[3], head[4], head[5], head[6]]);
        let mut rest = vec![0; usize::try_from(length).unwrap() + 1];
        stream.read_exact(&mut rest).unwrap();
    };
    let start_ok =
        [&[0, 10, 0, 11, 0, 0, 0, 0][..], &short(b"PLAIN"), &long(b"\0guest\0guest"), &short(b"en_US")];
    let tune_ok = [0, 10, 0, 31, 0, 1, 0, 2, 0, 0, 0, 0];
    let open = [&[0, 10, 0, 40][..], &short(b"/"), &[0, 0]];
    stream.write_all(b"AMQP\0\0\x09\x01").unwrap();
    answered(&mut stream);
    stream.write_all(&frame(1, 0, &start_ok.concat())).unwrap();
    answered(&mut stream);
    stream.write_all(&frame(1, 0, &tune_ok)).unwrap();
    stream.write_all(&frame(1, 0, &open.concat())).unwrap();
    answered(&mut stream);
    stream.write_all(&frame(1, 1, &[0, 20, 0, 10, 0])).unwrap();
    answered(&mut stream);
    let publish = [&[0, 60, 0, 40, 0, 0, 0][..], &short(queue.as_bytes()), &[0]];
    // One byte of content, and of all properties the message id.
    let header = [&[0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0x80][..], &short(id)];
    stream.write_all(&frame(1, 1, &publish.concat())).unwrap();
    stream.write_all(&frame(2, 1, &header.concat())).unwrap();
    stream.write_all(&frame(3, 1, b"x")).unwrap();
    let close = [&[0, 20, 0, 40, 0, 200, 0][..], &[0, 0, 0, 0]];
    stream.write_all(&frame(1, 1, &close.concat())).unwrap();
    answered(&mut stream);
}

//! What is NATS JetStream's own.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use async_nats::jetstream::{self, Context, consumer, stream};
use futures_util::StreamExt;
use onlyonce_consumer::nats::{MESSAGE_ID, Nats, SUBJECT};
use onlyonce_consumer::{Broker, BrokerError, BrokerErrorKind, Delivery};
use onlyonce_testkit::Nats as Server;
use tokio::time::sleep;

use crate::queue::{Dead, Queue, Sent, ends, fresh_name, message, next, nothing, reason};
use crate::storm::Storm;

/// A stream with one consumer and a stream for its dead letters, and a connection beside the adapter's.
pub(crate) struct NatsQueue {
    name: String,
    /// Of a broker of its own.
    alone: Option<Arc<Server>>,
    context: Context,
}

/// Short, so that what was dropped comes again soon; long enough for a loaded machine.
const ACK_WAIT: Duration = Duration::from_secs(3);

/// The name that `examples/consumer.rs` gives.
const CONSUMER: &str = "orders";

fn server() -> &'static Server {
    Server::shared()
}

impl NatsQueue {
    async fn with_max_age(max_age: Duration) -> Self {
        Self::with(None, max_age).await
    }

    async fn with(alone: Option<Arc<Server>>, max_age: Duration) -> Self {
        let url = alone.as_deref().unwrap_or_else(|| server()).url();
        let context = jetstream::new(async_nats::connect(url).await.unwrap());
        let name = fresh_name("orders");
        let subjects = |prefix: &str| vec![format!("{prefix}.{name}")];
        for (stream, subjects) in [(name.clone(), subjects("in")), (format!("{name}-dead"), subjects("dead"))]
        {
            let config = stream::Config {
                name: stream,
                subjects,
                max_age,
                duplicate_window: Duration::from_millis(100),
                ..stream::Config::default()
            };
            context.create_stream(config).await.unwrap();
        }
        Self { name, alone, context }
    }

    fn server(&self) -> &Server {
        self.alone.as_deref().unwrap_or_else(|| server())
    }

    fn subject(&self) -> String {
        format!("in.{}", self.name)
    }

    async fn publish_with(&self, payload: &'static str, headers: HeaderMap) {
        let published =
            self.context.publish_with_headers(self.subject(), headers, payload.into()).await.unwrap();
        assert!(!published.await.unwrap().duplicate);
    }

    /// What becomes of a subscription to a consumer that was made with this configuration.
    async fn subscribed_to(&self, config: consumer::Config) -> Result<(), BrokerError> {
        let context = &self.context;
        let subject = format!("$JS.API.CONSUMER.DURABLE.CREATE.{}.{CONSUMER}", self.name);
        let request = serde_json::json!({"stream_name": self.name, "config": config});
        let answer =
            context.client().request(subject, serde_json::to_vec(&request).unwrap().into()).await.unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&answer.payload).unwrap();
        assert!(answer["error"].is_null(), "{answer}");
        self.broker().subscribe(1).await.map(drop)
    }
}

impl Queue for NatsQueue {
    type Broker = Nats;

    const HOLDS_WHAT_IS_PUT_BACK: bool = false;

    async fn fresh() -> Self {
        Self::with_max_age(Duration::ZERO).await
    }

    fn broker_at(&self, port: u16) -> Nats {
        let url = format!("nats://127.0.0.1:{port}");
        let broker = Nats::new(&url, &self.name, CONSUMER).unwrap().ack_wait(ACK_WAIT);
        broker.dead_letters(&format!("dead.{}", self.name))
    }

    fn port(&self) -> u16 {
        self.server().port()
    }

    async fn publish(&self, sent: &Sent) {
        self.publish_with(sent.payload, headers(sent)).await;
    }

    async fn dead_letter(&self) -> Dead {
        let stream = self.context.get_stream(format!("{}-dead", self.name)).await.unwrap();
        let config = consumer::pull::OrderedConfig::default();
        let messages = stream.create_consumer(config).await.unwrap().messages().await.unwrap();
        let dead = Box::pin(messages).next().await.unwrap().unwrap();
        let headers = dead.headers.clone().unwrap_or_default();
        let headers: Vec<_> = headers
            .iter()
            .flat_map(|(name, values)| values.iter().map(move |value| (name.to_string(), value.to_string())))
            .collect();
        let id = headers.iter().find(|(name, _)| name == MESSAGE_ID).map(|(_, id)| id.clone());
        Dead { id, headers, payload: dead.payload.clone() }
    }
}

fn headers(sent: &Sent) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in &sent.headers {
        headers.insert(*name, *value);
    }
    if let Some(id) = &sent.id {
        headers.insert("Nats-Msg-Id", id.as_str());
    }
    headers
}

impl Storm for NatsQueue {
    async fn alone() -> Self {
        let server = tokio::task::spawn_blocking(Server::start).await.unwrap();
        Self::with(Some(Arc::new(server)), Duration::ZERO).await
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let dead = format!("dead.{}", self.name);
        vec![("BROKER", self.server().url().to_owned()), ("QUEUE", self.name.clone()), ("DEAD", dead)]
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
        let publish = || async {
            let subject = self.subject();
            self.context.publish_with_headers(subject, headers(sent), sent.payload.into()).await?.await
        };
        while publish().await.is_err() {
            sleep(Duration::from_millis(200)).await;
        }
    }

    async fn left(&self) -> u64 {
        let stream = self.context.get_stream(&self.name).await.unwrap();
        let info = stream.consumer_info(CONSUMER).await.unwrap();
        info.num_pending + u64::try_from(info.num_ack_pending).unwrap()
    }
}

#[tokio::test]
async fn a_delivery_that_is_extended_is_not_delivered_again_and_one_that_is_not_is() {
    let queue = NatsQueue::fresh().await;
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.subscribe(2).await;
    let mut delivery = next(&mut subscription).await;
    assert_eq!(delivery.deadline(), Some(ACK_WAIT));
    let extended = Instant::now();
    while extended.elapsed() < ACK_WAIT * 2 {
        delivery.extend().await.unwrap();
        if let Ok(other) = tokio::time::timeout(ACK_WAIT / 6, next(&mut subscription)).await {
            panic!("delivered again: {:?}", other.message());
        }
    }
    // From here on nobody extends it.
    let mut again = next(&mut subscription).await;
    assert_eq!((again.message().id.as_deref(), again.message().deliveries), (Some("one"), Some(2)));
    // The work of the first one is committed: it settles the message for good, whoever else has it.
    delivery.acknowledge().await.unwrap();
    again.extend().await.unwrap();
    sleep(ACK_WAIT).await;
    nothing(&mut subscription).await;
}

/// The client has sent it, and that is all it knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledgement_that_the_broker_never_heard_is_an_error() {
    let queue = NatsQueue::fresh().await;
    let proxy = onlyonce_testkit::Proxy::start(queue.port()).await.unwrap();
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.broker_at(proxy.port()).subscribe(1).await.unwrap();
    let delivery = next(&mut subscription).await;
    proxy.stall(true);
    let error = delivery.acknowledge().await.err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn the_user_and_password_of_the_url_sign_in() {
    let server = tokio::task::spawn_blocking(|| Server::start_for("app", "p@ss/1")).await.unwrap();
    for (signs_in, url) in [
        ("an absent stream", format!("nats://app:p%40ss%2F1@127.0.0.1:{}", server.port())),
        ("cannot connect", format!("nats://app:wrong@127.0.0.1:{}", server.port())),
        ("cannot connect", server.url().to_owned()),
    ] {
        let error = Nats::new(&url, "ORDERS", CONSUMER).unwrap().subscribe(1).await.err().unwrap();
        let absent = error.to_string().contains("cannot read the stream ORDERS");
        assert_eq!(
            (error.kind(), absent),
            (BrokerErrorKind::Refused, signs_in == "an absent stream"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_absent_stream_is_refused() {
    let queue = NatsQueue::fresh().await;
    let broker = Nats::new(queue.server().url(), "nowhere", CONSUMER).unwrap();
    let error = broker.subscribe(1).await.err().unwrap();
    assert_eq!(error.kind(), BrokerErrorKind::Refused, "{error}");
}

#[tokio::test]
async fn a_consumer_that_would_lose_messages_is_refused_with_the_reason() {
    let suitable = || consumer::Config {
        ack_policy: consumer::AckPolicy::Explicit,
        ack_wait: ACK_WAIT,
        max_deliver: -1,
        ..consumer::Config::default()
    };
    type Change = fn(&mut consumer::Config);
    let wrong: [(Change, &str); 5] = [
        (|config| config.max_deliver = 20, "max_deliver is 20"),
        (|config| config.ack_policy = consumer::AckPolicy::All, "ack_policy is All"),
        (|config| config.deliver_subject = Some("pushed.here".to_owned()), "push consumer"),
        (|config| config.headers_only = true, "headers_only"),
        (|config| config.inactive_threshold = Duration::from_secs(60), "inactive_threshold"),
    ];
    for (change, reason) in wrong {
        let queue = NatsQueue::fresh().await;
        let mut config = suitable();
        config.durable_name = Some(CONSUMER.to_owned());
        change(&mut config);
        let error = queue.subscribed_to(config).await.err().unwrap_or_else(|| panic!("{reason}: taken"));
        assert_eq!(error.kind(), BrokerErrorKind::Refused, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    let queue = NatsQueue::fresh().await;
    let config = consumer::Config { durable_name: Some(CONSUMER.to_owned()), ..suitable() };
    queue.subscribed_to(config).await.unwrap();
    let error = queue.broker().filter("in.something.else").subscribe(1).await.err().unwrap();
    assert!(error.to_string().contains("in.something.else"), "{error}");
}

#[tokio::test]
async fn a_subject_for_dead_letters_that_nobody_keeps_or_that_is_consumed_is_refused() {
    let queue = NatsQueue::fresh().await;
    for (subject, reason) in [
        ("nobody.listens", "no stream covers"),
        ("dead.>", "wildcards"),
        (queue.subject().as_str(), "would get them again"),
    ] {
        let error = queue.broker().dead_letters(subject).subscribe(1).await.err().unwrap();
        assert_eq!(error.kind(), BrokerErrorKind::Refused, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

/// A stream that keeps what somebody waits for confirms what it drops.
#[tokio::test]
async fn a_stream_that_would_not_keep_dead_letters_is_refused() {
    let queue = NatsQueue::fresh().await;
    type Change = fn(&mut stream::Config);
    let wrong: [(Change, &str); 2] = [
        (|config| config.retention = stream::RetentionPolicy::Interest, "retention is Interest"),
        (|config| config.no_ack = true, "no_ack"),
    ];
    for (number, (change, reason)) in wrong.into_iter().enumerate() {
        let subject = format!("kept.{}.{number}", queue.name);
        let mut config = stream::Config {
            name: format!("{}-{number}", queue.name),
            subjects: vec![subject.clone()],
            ..stream::Config::default()
        };
        change(&mut config);
        queue.context.create_stream(config).await.unwrap();
        let broker = queue.broker().dead_letters(&subject);
        let error = broker.subscribe(1).await.err().unwrap_or_else(|| panic!("{reason}: taken"));
        assert_eq!(error.kind(), BrokerErrorKind::Refused, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

/// The numbers of messages begin again with each stream, and each domain has its own.
#[tokio::test]
async fn a_dead_letter_of_another_stream_of_the_same_name_is_no_duplicate() {
    let queue = NatsQueue::fresh().await;
    let mut dead = queue.context.get_stream(format!("{}-dead", queue.name)).await.unwrap();
    let config =
        stream::Config { duplicate_window: Duration::from_secs(120), ..dead.cached_info().config.clone() };
    queue.context.update_stream(config).await.unwrap();
    for id in ["one", "two"] {
        queue.publish(&message(id, "x")).await;
        let mut subscription = queue.subscribe(1).await;
        next(&mut subscription).await.dead_letter(&reason()).await.unwrap();
        let config = queue.context.get_stream(&queue.name).await.unwrap().cached_info().config.clone();
        queue.context.delete_stream(&queue.name).await.unwrap();
        queue.context.create_stream(config).await.unwrap();
    }
    assert_eq!(dead.info().await.unwrap().state.messages, 2);
}

/// Behind the adapter's back. The runner then subscribes again, and it is made again.
#[tokio::test]
async fn a_consumer_that_is_deleted_ends_the_subscription() {
    let queue = NatsQueue::fresh().await;
    let mut subscription = queue.subscribe(1).await;
    nothing(&mut subscription).await;
    let stream = queue.context.get_stream(&queue.name).await.unwrap();
    stream.delete_consumer(CONSUMER).await.unwrap();
    ends(&mut subscription).await;
    queue.publish(&message("one", "1")).await;
    next(&mut queue.subscribe(1).await).await.acknowledge().await.unwrap();
}

/// Headers that the broker acts on: with the message's own id a stream would take the dead letter for a duplicate,
/// and confirm what it does not keep.
#[tokio::test]
async fn a_dead_letter_in_the_stream_it_came_from_is_kept() {
    let context = jetstream::new(async_nats::connect(server().url()).await.unwrap());
    let name = fresh_name("both");
    let config = stream::Config {
        name: name.clone(),
        subjects: vec![format!("in.{name}"), format!("dead.{name}")],
        duplicate_window: Duration::from_secs(120),
        ..stream::Config::default()
    };
    context.create_stream(config).await.unwrap();
    let queue = NatsQueue { name: name.clone(), alone: None, context };
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", "order-1");
    headers.insert("Nats-Expected-Stream", name.as_str());
    headers.insert("Nats-Expected-Last-Sequence", "0");
    queue.publish_with("{}", headers).await;
    let broker = queue.broker().filter(&queue.subject());
    let mut subscription = broker.subscribe(1).await.unwrap();
    next(&mut subscription).await.dead_letter(&reason()).await.unwrap();
    let stream = queue.context.get_stream(&name).await.unwrap();
    let dead = stream.get_last_raw_message_by_subject(&format!("dead.{name}")).await.unwrap();
    let header = |name: &str| dead.headers.get(name).map(ToString::to_string);
    assert_eq!(header(MESSAGE_ID).as_deref(), Some("order-1"));
    assert_eq!(header(SUBJECT), Some(queue.subject()));
    assert_eq!(header("Nats-Expected-Last-Sequence"), None);
}

#[tokio::test]
async fn the_horizon_is_the_age_at_which_the_stream_drops_a_message() {
    let queue = NatsQueue::with_max_age(Duration::from_secs(3_600)).await;
    let broker = queue.broker();
    assert_eq!(broker.redelivery_horizon(), None);
    let _subscription = broker.subscribe(1).await.unwrap();
    assert_eq!(broker.redelivery_horizon(), Some(Duration::from_secs(3_600)));
}

/// No client that holds headers to be text can read it. That must be seen, and not be a connection on which nothing comes;
/// and other messages come in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_the_client_cannot_read_ends_the_subscription() {
    use std::io::{BufRead, Write};
    let queue = NatsQueue::fresh().await;
    let mut subscription = queue.subscribe(1).await;
    nothing(&mut subscription).await;
    tokio::task::block_in_place(|| {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", queue.port())).unwrap();
        let header = b"NATS/1.0\r\nNats-Msg-Id: \xfc\r\n\r\n";
        let publish = format!(
            "CONNECT {{\"headers\":true,\"verbose\":false}}\r\nHPUB {} {} {}\r\n",
            queue.subject(),
            header.len(),
            header.len() + 1
        );
        stream.write_all(&[publish.as_bytes(), header, b"x\r\nPING\r\n"].concat()).unwrap();
        let lines = std::io::BufReader::new(stream).lines();
        assert!(lines.map(Result::unwrap).any(|line| line == "PONG"));
    });
    ends(&mut subscription).await;
    queue.publish(&message("one", "1")).await;
    let mut subscription = queue.subscribe(1).await;
    next(&mut subscription).await.acknowledge().await.unwrap();
}

//! Every message's effect exactly once, whatever happens to consumers, broker and database at once.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use onlyonce_consumer::broker::{ATTEMPTS, REASON};
use onlyonce_consumer::{Broker, Delivery};
use onlyonce_testkit::{Postgres, Proxy};
use tokio::time::sleep;

use crate::queue::{LONG, Queue, Sent, ends, message, next, nothing};
use crate::workers::Workers;

/// How many messages a storm has that are published several times.
const COPIED: usize = 2_000;

/// Each is published at least so often.
const COPIES: usize = 2;

/// How many are published once, and come again only because somebody died: no copy makes up for one that is lost.
const SINGLE: usize = 500;

/// A queue on a broker of its own, which a test may kill.
pub(crate) trait Storm: Queue {
    async fn alone() -> Self;

    /// What a consumer process is told.
    fn environment(&self) -> Vec<(&'static str, String)>;

    /// Kills the broker, and starts it again on what it kept.
    fn crash_broker(&self);

    /// The same in order: clients are told.
    fn restart_broker(&self);

    /// Publishes until the broker has confirmed it, and so perhaps several times.
    async fn publish_surely(&self, sent: &Sent);

    /// How many messages are in the queue or in somebody's hands. Nobody consumes it.
    async fn left(&self) -> u64;
}

pub(crate) async fn nothing_is_lost_doubled_or_stuck<Q: Storm>() {
    let (queue, database) = (Q::alone().await, Database::new().await);
    let mut workers = Workers::start(3, [queue.environment(), database.environment()].concat());
    let copied: Vec<String> = (0..COPIED).map(|number| format!("copied-{number}")).collect();
    let single: Vec<String> = (0..SINGLE).map(|number| format!("single-{number}")).collect();
    let ids = [&copied[..], &single[..]].concat();
    let publish = async |id: &String, payload: &'static str| {
        queue.publish_surely(&Sent { id: Some(id.clone()), payload, ..Sent::default() }).await;
    };
    let publishing = async {
        for copy in 0..COPIES {
            for (number, id) in copied.iter().enumerate() {
                let payload = if number % 20 == 7 { "flaky" } else { "order" };
                publish(id, payload).await;
                // Copies come close together and far apart.
                if (copy + number) % 7 == 0 {
                    publish(id, payload).await;
                }
                if number % (COPIED / SINGLE) == 0 && copy == 0 {
                    publish(&single[number * SINGLE / COPIED], "order").await;
                }
            }
        }
    };
    let harm = async {
        let mut random = Random(u64::from(std::process::id()) | 1);
        let started = Instant::now();
        let (mut kills, mut done) = (0, 0);
        // A while longer than the queue lasts would prove nothing, so it goes by what is done.
        for (share, blow) in [
            (10, Blow::CutDatabase),
            (25, Blow::CrashBroker),
            (50, Blow::DatabaseAway),
            (70, Blow::CutDatabase),
        ] {
            while done * 100 < share * ids.len() {
                assert!(
                    started.elapsed() < LONG * 10,
                    "{done} of {} done; {}",
                    ids.len(),
                    database.summary()
                );
                sleep(Duration::from_millis(50 + random.below(350))).await;
                workers.kill(usize::try_from(random.below(1_000)).unwrap());
                kills += 1;
                done = database.done();
            }
            match blow {
                Blow::CutDatabase => database.proxy.cut(),
                Blow::CrashBroker => tokio::task::block_in_place(|| queue.crash_broker()),
                Blow::DatabaseAway => {
                    database.proxy.refuse(true);
                    database.proxy.cut();
                    sleep(Duration::from_secs(2)).await;
                    database.proxy.refuse(false);
                }
            }
        }
        kills
    };
    let ((), kills) = tokio::join!(publishing, harm);
    let calm = Instant::now();
    while database.done() < ids.len() {
        assert!(calm.elapsed() < LONG * 2, "{} of {} done: lost or stuck", database.done(), ids.len());
        workers.revive();
        sleep(Duration::from_millis(200)).await;
    }
    // Copies of what is done are acknowledged.
    let settled = Instant::now();
    loop {
        sleep(Duration::from_secs(2)).await;
        workers.stop();
        if queue.left().await == 0 {
            break;
        }
        assert!(settled.elapsed() < LONG * 2, "{} messages are stuck", queue.left().await);
        workers = Workers::start(3, [queue.environment(), database.environment()].concat());
    }
    let effects = database.effects();
    for id in &ids {
        assert_eq!(effects.get(id), Some(&1), "{id}");
    }
    assert_eq!(effects.len(), ids.len());
    eprintln!("{} messages, {kills} consumers killed; {}", ids.len(), database.summary());
}

pub(crate) async fn a_restarted_broker_delivers_what_was_not_settled<Q: Storm>() {
    let queue = Q::alone().await;
    for id in ["one", "two", "three"] {
        queue.publish(&message(id, "x")).await;
    }
    let broker = queue.broker();
    let mut subscription = broker.subscribe(2).await.unwrap();
    next(&mut subscription).await.acknowledge().await.unwrap();
    let held = next(&mut subscription).await;
    tokio::task::block_in_place(|| queue.restart_broker());
    ends(&mut subscription).await;
    let started = Instant::now();
    let mut subscription = loop {
        match broker.subscribe(2).await {
            Ok(subscription) => break subscription,
            Err(error) => assert!(started.elapsed() < LONG, "{error}"),
        }
        sleep(Duration::from_millis(200)).await;
    };
    let mut again = Vec::new();
    for _ in 0..2 {
        let delivery = next(&mut subscription).await;
        again.push(delivery.message().id.clone().unwrap());
        delivery.acknowledge().await.unwrap();
    }
    again.sort();
    assert_eq!(again, ["three", "two"]);
    drop(held);
    nothing(&mut subscription).await;
}

enum Blow {
    CutDatabase,
    CrashBroker,
    DatabaseAway,
}

/// The neighbours of a message that kills its worker are killed with it.
pub(crate) async fn a_poison_message_is_dead_lettered_and_the_rest_flow_on<Q: Storm>() {
    const ATTEMPTS_MAX: usize = 3;
    let (queue, database) = (Q::fresh().await, Database::new().await);
    let mut environment = [queue.environment(), database.environment()].concat();
    environment.push(("ATTEMPTS_MAX", ATTEMPTS_MAX.to_string()));
    let ids: Vec<String> = (0..60).map(|number| format!("order-{number}")).collect();
    for (number, id) in ids.iter().enumerate() {
        queue.publish(&Sent { id: Some(id.clone()), payload: "order", ..Sent::default() }).await;
        if number == 20 {
            let id = Some("poison".to_owned());
            queue.publish(&Sent { id, payload: "poison", ..Sent::default() }).await;
        }
    }
    let mut workers = Workers::start(2, environment);
    let started = Instant::now();
    let dead = {
        let mut dead = Box::pin(queue.dead_letter());
        loop {
            tokio::select! {
                dead = &mut dead => break dead,
                () = sleep(Duration::from_millis(100)) => workers.revive(),
            }
            assert!(started.elapsed() < LONG * 2, "{} died; {}", workers.died, database.summary());
        }
    };
    assert_eq!(dead.id.as_deref(), Some("poison"), "{dead:?}");
    assert_eq!(dead.header(REASON), Some("attempts-exhausted"));
    assert_eq!(dead.header(ATTEMPTS), Some(ATTEMPTS_MAX.to_string().as_str()));
    while database.done() < ids.len() {
        assert!(started.elapsed() < LONG * 3, "{} of {} done", database.done(), ids.len());
        sleep(Duration::from_millis(100)).await;
    }
    eprintln!("{}", database.summary());
    workers.revive();
    assert_eq!(workers.died, ATTEMPTS_MAX, "once for each attempt");
    workers.stop();
    assert_eq!(queue.left().await, 0);
    let effects = database.effects();
    assert!(ids.iter().all(|id| effects.get(id) == Some(&1)), "{effects:?}");
    assert_eq!(effects.len(), ids.len(), "an attempt that was killed left nothing behind");
}

/// The application's own table, and a way to it that can be cut.
struct Database {
    name: String,
    proxy: Proxy,
}

impl Database {
    async fn new() -> Self {
        let server = Postgres::shared();
        let name = server.database();
        server.sql(&name, "CREATE TABLE effects (message text, attempt int, worker int)");
        Self { name, proxy: Proxy::start(server.port()).await.unwrap() }
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        let url = format!("postgres://postgres@127.0.0.1:{}/{}", self.proxy.port(), self.name);
        vec![("DATABASE_URL", url)]
    }

    /// Messages that have an effect.
    fn done(&self) -> usize {
        self.sql("SELECT count(DISTINCT message) FROM effects").parse().unwrap()
    }

    /// How many effects each has.
    fn effects(&self) -> HashMap<String, usize> {
        let rows = self.sql("SELECT message, count(*) FROM effects GROUP BY 1");
        let row = |row: &str| row.split_once('|').map(|(id, count)| (id.to_owned(), count.parse().unwrap()));
        rows.lines().map(|line| row(line).unwrap()).collect()
    }

    fn summary(&self) -> String {
        let sums = "coalesce(sum(attempt - 1), 0), coalesce(max(attempt), 0), count(DISTINCT worker)";
        let row = self.sql(&format!("SELECT {sums} FROM effects"));
        let [failed, most, workers] = row.split('|').collect::<Vec<_>>()[..] else { panic!("{row}") };
        format!(
            "{failed} attempts failed or were killed, at most {most} for one message; {workers} workers wrote"
        )
    }

    fn sql(&self, sql: &str) -> String {
        tokio::task::block_in_place(|| Postgres::shared().sql(&self.name, sql))
    }
}

/// Enough randomness to kill somebody at an odd moment.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

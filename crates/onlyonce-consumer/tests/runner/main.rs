//! The runner on real databases, fed by a queue that redelivers, loses acknowledgements and is cut.

#![allow(clippy::unwrap_used, missing_docs)]

mod app;
mod queue;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use onlyonce::settings::DURATION_MAX;
use onlyonce_consumer::{
    BrokerError, Consumer, ConsumerError, DeadLetter, Delivered, Handler, InboxConfig, MessageId, NotDone,
    Reason, Settings,
};
use onlyonce_core::Transactional;
use onlyonce_testkit::{Postgres, Proxy};
use tokio::runtime::Runtime;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use app::*;
use queue::{Queue, message};

/// One test on each database.
macro_rules! on_each {
    ($($name:ident;)*) => {
        mod postgres {
            use super::App;
            $(#[tokio::test(flavor = "multi_thread")] async fn $name() {
                super::$name(super::OnPostgres::start()).await;
            })*
        }
        mod sqlite {
            use super::App;
            $(#[tokio::test(flavor = "multi_thread")] async fn $name() {
                super::$name(super::OnSqlite::start()).await;
            })*
        }
    };
}

on_each! {
    every_effect_happens_once_whatever_the_broker_and_the_handler_do;
    copies_delivered_at_once_run_the_handler_once;
    nothing_is_acknowledged_before_it_is_committed;
    a_commit_that_fails_has_the_message_put_back;
    a_redelivery_that_the_handler_asks_for_is_processed;
    a_message_that_always_fails_is_dead_lettered_and_the_rest_flow_on;
    a_message_that_failed_for_good_is_dead_lettered_at_once;
    a_dead_letter_that_was_not_confirmed_is_not_lost;
    a_message_without_an_id_is_dead_lettered_and_never_processed;
    an_id_of_another_payload_is_dead_lettered_unless_payloads_are_not_checked;
    a_handler_that_takes_too_long_is_rolled_back;
    a_long_handler_keeps_its_message;
    a_shutdown_finishes_what_runs_and_puts_back_what_does_not_end;
    a_lost_broker_is_connected_to_again;
}

type Tx<A> = <<A as App>::Database as Transactional>::Transaction;

/// What the test wants of each message.
type Act<A> =
    dyn for<'a> Fn(&'a mut Tx<A>, &'a Delivered) -> BoxFuture<'a, Result<(), NotDone>> + Send + Sync;
type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Writes the message's id, and counts how often it was called for each.
struct Effects<A: App> {
    calls: Arc<Mutex<HashMap<String, u32>>>,
    /// After the effect was written.
    then: Box<Act<A>>,
}

impl<A: App> Handler<A::Database> for Effects<A> {
    type Output = u32;

    async fn handle(&self, tx: &mut Tx<A>, message: &Delivered) -> Result<u32, NotDone> {
        *self.calls.lock().unwrap().entry(message.id().to_owned()).or_default() += 1;
        A::effect(tx, message.id()).await?;
        (self.then)(tx, message).await?;
        Ok(message.attempt())
    }
}

/// A consumer that runs until it is told to stop.
struct Running {
    stop: CancellationToken,
    ended: JoinHandle<Result<(), ConsumerError>>,
    calls: Arc<Mutex<HashMap<String, u32>>>,
}

impl Running {
    async fn start<A: App>(
        app: &A,
        queue: &Queue,
        settings: Settings,
        then: impl for<'a> Fn(&'a mut Tx<A>, &'a Delivered) -> BoxFuture<'a, Result<(), NotDone>>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        let consumer = Consumer::new(queue.clone(), app.connect().await, "billing", settings).unwrap();
        let (stop, calls) = (CancellationToken::new(), Arc::default());
        let handler = Effects::<A> { calls: Arc::clone(&calls), then: Box::new(then) };
        let ended = tokio::spawn(consumer.run(stop.clone().cancelled_owned(), handler));
        Self { stop, ended, calls }
    }

    fn calls(&self, id: &str) -> u32 {
        self.calls.lock().unwrap().get(id).copied().unwrap_or(0)
    }

    async fn stopped(self) {
        self.stop.cancel();
        timeout(Duration::from_secs(60), self.ended).await.expect("it stops").unwrap().unwrap();
    }
}

fn quick() -> Settings {
    Settings {
        retry_first: Duration::from_millis(20),
        retry_ceiling: Duration::from_millis(200),
        in_flight_delay_max: Duration::from_millis(100),
        ..Settings::default()
    }
}

fn with_lease(lease: Duration) -> Settings {
    Settings { inbox: InboxConfig { lease, ..InboxConfig::default() }, ..quick() }
}

fn nothing_more<'a, T>(_: &'a mut T, _: &'a Delivered) -> BoxFuture<'a, Result<(), NotDone>> {
    Box::pin(async { Ok(()) })
}

fn dead(queue: &Queue) -> Vec<(Option<String>, DeadLetter)> {
    queue.state().dead.iter().map(|(message, letter)| (message.id.clone(), letter.clone())).collect()
}

fn numbers(count: u32) -> Vec<String> {
    (1_000..1_000 + count).map(|number| number.to_string()).collect()
}

async fn every_effect_happens_once_whatever_the_broker_and_the_handler_do<A: App>(app: A) {
    let (queue, ids) = (Queue::default(), numbers(120));
    for id in ids.iter().chain(&ids).chain(ids.iter().rev()) {
        queue.publish(message(id, id));
    }
    queue.state().losing_acknowledgements = 40;
    let settings = Settings { attempts_max: 50, ..with_lease(Duration::from_secs(2)) };
    let mut instances = Vec::new();
    for _ in 0..2 {
        let running = Running::start(&app, &queue, settings.clone(), |_, message| {
            Box::pin(async move {
                let number: u32 = message.json()?;
                match (number % 6, message.attempt()) {
                    (1, 1) => return Err(std::io::Error::other("failed").into()),
                    (2, 1) => panic!("the handler of {number} panics"),
                    (3, 1 | 2) => return Err(NotDone::retry_after(Duration::from_millis(5), "later")),
                    (4, _) => sleep(Duration::from_millis(20)).await,
                    _ => {}
                }
                Ok(())
            })
        });
        instances.push(running.await);
    }
    for _ in 0..10 {
        sleep(Duration::from_millis(150)).await;
        queue.cut();
    }
    queue.drained().await;
    for running in instances {
        running.stopped().await;
    }
    assert_eq!(app.effects().await, ids);
    let state = queue.state();
    assert_eq!(state.dead, []);
    assert_eq!((state.losing_acknowledgements, state.acknowledged.len()), (0, 3 * ids.len()));
}

async fn copies_delivered_at_once_run_the_handler_once<A: App>(app: A) {
    let queue = Queue::default();
    let running = Running::start(&app, &queue, quick(), |_, _| {
        Box::pin(async {
            sleep(Duration::from_millis(300)).await;
            Ok(())
        })
    })
    .await;
    for _ in 0..8 {
        queue.publish(message("m", "100"));
    }
    queue.drained().await;
    assert_eq!((running.calls("m"), app.effects().await), (1, vec!["m".to_owned()]));
    assert_eq!(queue.state().acknowledged, ["m"; 8]);
    running.stopped().await;
}

async fn nothing_is_acknowledged_before_it_is_committed<A: App>(app: A) {
    let queue = Queue::default();
    let gate = Gate::new(app.connect().await, 0, 0);
    let (stop, ended) =
        behind(&gate, &queue, |tx, message| Box::pin(async move { Ok(A::effect(tx, message.id()).await?) }));
    for _ in 0..2 {
        queue.publish(message("m", "100"));
    }
    // The one is written and not committed, and its copy must not be taken for a duplicate.
    sleep(Duration::from_millis(700)).await;
    assert_eq!(queue.state().acknowledged, [""; 0]);
    assert_eq!(app.effects().await, [""; 0]);
    gate.commits.add_permits(1);
    queue.drained().await;
    assert_eq!(queue.state().acknowledged, ["m", "m"]);
    assert_eq!(app.effects().await, ["m"]);
    stop.cancel();
    ended.await.unwrap().unwrap();
}

async fn a_commit_that_fails_has_the_message_put_back<A: App>(app: A) {
    let queue = Queue::default();
    let gate = Gate::new(app.connect().await, usize::MAX >> 4, 2);
    let (stop, ended) =
        behind(&gate, &queue, |tx, message| Box::pin(async move { Ok(A::effect(tx, message.id()).await?) }));
    queue.publish(message("m", "100"));
    queue.drained().await;
    assert_eq!((queue.state().put_back.len(), gate.failing.load(Ordering::SeqCst)), (2, 0));
    assert_eq!(app.effects().await, ["m"]);
    stop.cancel();
    ended.await.unwrap().unwrap();
}

/// A consumer on a database behind a gate.
fn behind<T: Transactional + Clone>(
    gate: &Gate<T>,
    queue: &Queue,
    handler: impl for<'a> Fn(&'a mut T::Transaction, &'a Delivered) -> BoxFuture<'a, Result<(), NotDone>>
    + Send
    + Sync
    + 'static,
) -> (CancellationToken, JoinHandle<Result<(), ConsumerError>>) {
    let consumer = Consumer::new(queue.clone(), gate.clone(), "billing", quick()).unwrap();
    let stop = CancellationToken::new();
    let ended = tokio::spawn(consumer.run_fn(stop.clone().cancelled_owned(), handler));
    (stop, ended)
}

async fn a_redelivery_that_the_handler_asks_for_is_processed<A: App>(app: A) {
    let queue = Queue::default();
    let running = Running::start(&app, &queue, quick(), |_, message| {
        Box::pin(async move {
            match message.attempt() {
                1 => Err(NotDone::retry_after(Duration::from_millis(300), "the bank is closed")),
                2 => Err(NotDone::retry_later("still closed")),
                3 => Err(std::io::Error::other("no network").into()),
                _ => Ok(()),
            }
        })
    })
    .await;
    queue.publish(message("m", "100"));
    queue.drained().await;
    assert_eq!((running.calls("m"), app.effects().await), (4, vec!["m".to_owned()]));
    // The handler's own wait, and then the settings' by attempt.
    let waits = [300, 40, 80].map(|wait| ("m".to_owned(), Duration::from_millis(wait)));
    assert_eq!(queue.state().put_back, waits);
    running.stopped().await;
}

async fn a_message_that_always_fails_is_dead_lettered_and_the_rest_flow_on<A: App>(app: A) {
    let (queue, ids) = (Queue::default(), numbers(20));
    let settings = Settings { attempts_max: 4, concurrency: 2, prefetch: 4, ..quick() };
    let running = Running::start(&app, &queue, settings, |_, message| {
        Box::pin(async move {
            match message.id() {
                "fails" => Err(NotDone::retry_later("no such account")),
                "panics" => panic!("an index is out of bounds"),
                _ => Ok(()),
            }
        })
    })
    .await;
    for id in ["fails", "panics"].into_iter().chain(ids.iter().map(String::as_str)).chain(["fails"]) {
        queue.publish(message(id, "x"));
    }
    queue.drained().await;
    assert_eq!(app.effects().await, ids);
    for (id, why) in [("fails", "no such account"), ("panics", "an index is out of bounds")] {
        assert_eq!(running.calls(id), 4, "{id}");
        let letters = dead(&queue);
        let letters: Vec<_> = letters.iter().filter(|(of, _)| of.as_deref() == Some(id)).collect();
        let [(_, letter)] = letters[..] else { panic!("{letters:?}") };
        assert_eq!(
            (letter.reason, letter.attempts, letter.consumer.as_str()),
            (Reason::AttemptsExhausted, 4, "billing")
        );
        assert!(letter.detail.contains(why), "{letter:?}");
    }
    // A copy of what was dead-lettered is not tried again.
    queue.publish(message("panics", "x"));
    queue.drained().await;
    assert_eq!((running.calls("panics"), dead(&queue).len()), (4, 2));
    running.stopped().await;
}

async fn a_message_that_failed_for_good_is_dead_lettered_at_once<A: App>(app: A) {
    let queue = Queue::default();
    let running = Running::start(&app, &queue, quick(), |_, message| {
        Box::pin(async move { message.json::<u32>().map(|_| ()) })
    })
    .await;
    for _ in 0..3 {
        queue.publish(message("m", "no number"));
    }
    queue.drained().await;
    assert_eq!((running.calls("m"), app.effects().await.len()), (1, 0));
    let letters = dead(&queue);
    let [(_, letter)] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((letter.reason, letter.attempts), (Reason::Failed, 1));
    assert!(letter.detail.starts_with("the payload cannot be read"), "{letter:?}");
    running.stopped().await;
}

async fn a_dead_letter_that_was_not_confirmed_is_not_lost<A: App>(app: A) {
    let queue = Queue::default();
    queue.state().failing_dead_letters = 2;
    let running =
        Running::start(&app, &queue, quick(), |_, _| Box::pin(async { Err(NotDone::failed("never")) })).await;
    queue.publish(message("m", "100"));
    queue.drained().await;
    let letters = dead(&queue);
    assert_eq!((letters.len(), running.calls("m"), letters[0].1.attempts), (1, 3, 3));
    assert_eq!(app.effects().await, [""; 0]);
    running.stopped().await;
}

async fn a_message_without_an_id_is_dead_lettered_and_never_processed<A: App>(app: A) {
    let queue = Queue::default();
    let running = Running::start(&app, &queue, quick(), nothing_more).await;
    for _ in 0..2 {
        queue.publish(message("", "100"));
    }
    queue.drained().await;
    running.stopped().await;
    let letters = dead(&queue);
    assert_eq!(letters.len(), 2);
    for (_, letter) in letters {
        assert_eq!((letter.reason, letter.attempts), (Reason::NoId, 0));
        assert!(letter.detail.contains("absent or empty"), "{letter:?}");
    }
    assert_eq!(app.effects().await, [""; 0]);
    // Whoever looks for it in a payload may be surprised by it.
    let letters = dead(&queue).len();
    let panics = MessageId::function(|message| Some(message.payload[100..].escape_ascii().to_string()));
    let running =
        Running::start(&app, &queue, Settings { message_id: panics, ..quick() }, nothing_more).await;
    queue.publish(message("m", "100"));
    queue.drained().await;
    running.stopped().await;
    assert_eq!(dead(&queue).split_off(letters)[0].1.reason, Reason::NoId);
    // Where its id is in the payload, the same message is processed once.
    let in_payload = MessageId::function(|message| String::from_utf8(message.payload.to_vec()).ok());
    let settings = Settings { message_id: in_payload, ..quick() };
    let running = Running::start(&app, &queue, settings, nothing_more).await;
    for _ in 0..2 {
        queue.publish(message("", "100"));
    }
    queue.drained().await;
    assert_eq!(app.effects().await, ["100"]);
    running.stopped().await;
}

async fn an_id_of_another_payload_is_dead_lettered_unless_payloads_are_not_checked<A: App>(app: A) {
    for check_payload in [true, false] {
        let (queue, id) = (Queue::default(), if check_payload { "checked" } else { "unchecked" });
        let settings = Settings { check_payload, ..quick() };
        let running = Running::start(&app, &queue, settings, nothing_more).await;
        for payload in ["100", "100", "999"] {
            queue.publish(message(id, payload));
            queue.drained().await;
        }
        let reasons: Vec<_> = dead(&queue).into_iter().map(|(_, letter)| letter.reason).collect();
        assert_eq!(reasons, if check_payload { vec![Reason::IdReused] } else { vec![] });
        assert_eq!(running.calls(id), 1);
        running.stopped().await;
    }
    assert_eq!(app.effects().await, ["checked", "unchecked"]);
}

async fn a_handler_that_takes_too_long_is_rolled_back<A: App>(app: A) {
    let queue = Queue::default();
    let settings = Settings { handler_timeout: Duration::from_millis(500), ..quick() };
    let running = Running::start(&app, &queue, settings, |_, message| {
        Box::pin(async move {
            if message.attempt() == 1 {
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    })
    .await;
    queue.publish(message("m", "100"));
    queue.drained().await;
    assert_eq!((running.calls("m"), app.effects().await), (2, vec!["m".to_owned()]));
    running.stopped().await;
}

/// Longer than its lease, and than the broker's deadline, while somebody else is asked to process a copy.
async fn a_long_handler_keeps_its_message<A: App>(app: A) {
    let queue = Queue::default();
    queue.state().deadline = Some(Duration::from_millis(900));
    let mut instances = Vec::new();
    for _ in 0..2 {
        let running = Running::start(&app, &queue, with_lease(Duration::from_secs(2)), |_, _| {
            Box::pin(async {
                sleep(Duration::from_secs(5)).await;
                Ok(())
            })
        });
        instances.push(running.await);
    }
    for _ in 0..2 {
        queue.publish(message("m", "100"));
    }
    queue.drained().await;
    let calls: u32 = instances.iter().map(|running| running.calls("m")).sum();
    assert_eq!((calls, app.effects().await), (1, vec!["m".to_owned()]));
    {
        let state = queue.state();
        assert_eq!(state.acknowledged, ["m", "m"]);
        assert!(state.extensions >= 5, "{}", state.extensions);
    }
    for running in instances {
        running.stopped().await;
    }
}

async fn a_shutdown_finishes_what_runs_and_puts_back_what_does_not_end<A: App>(app: A) {
    let queue = Queue::default();
    let settings =
        Settings { shutdown_grace: Duration::from_millis(1_500), concurrency: 1, prefetch: 3, ..quick() };
    let running = Running::start(&app, &queue, settings.clone(), |_, message| {
        Box::pin(async move {
            sleep(Duration::from_millis(if message.id() == "ends" { 400 } else { 60_000 })).await;
            Ok(())
        })
    })
    .await;
    let called = async |id: &str| {
        while running.calls(id) == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    for (stops, id) in [("it is not told to stop", "ends"), ("it is", "never-ends")] {
        queue.publish(message(id, "x"));
        timeout(Duration::from_secs(30), called(id)).await.unwrap_or_else(|_| panic!("{stops}: {id}"));
    }
    queue.publish(message("not-taken", "x"));
    let told_at = Instant::now();
    let calls = Arc::clone(&running.calls);
    running.stopped().await;
    assert!(told_at.elapsed() < Duration::from_secs(20), "{:?}", told_at.elapsed());
    assert_eq!(app.effects().await, ["ends"]);
    assert_eq!(calls.lock().unwrap().get("not-taken"), None);
    assert_eq!(queue.state().put_back, [("never-ends".to_owned(), Duration::ZERO)]);
    assert_eq!(queue.left(), 2);
    // Free at once: nobody waits for a lease.
    let next = Running::start(&app, &queue, settings, nothing_more).await;
    let drained_at = Instant::now();
    queue.drained().await;
    assert!(drained_at.elapsed() < Duration::from_secs(20), "{:?}", drained_at.elapsed());
    next.stopped().await;
    assert_eq!(app.effects().await, ["ends", "never-ends", "not-taken"]);
}

async fn a_lost_broker_is_connected_to_again<A: App>(app: A) {
    let queue = Queue::default();
    // At the start as later: it may be started before its broker.
    queue.refuse(Some(|| BrokerError::unavailable("connection refused")));
    let running = Running::start(&app, &queue, quick(), nothing_more).await;
    for id in ["a", "b"] {
        queue.publish(message(id, "x"));
        sleep(Duration::from_millis(300)).await;
        assert_eq!(queue.left(), 1, "{id}");
        queue.refuse(None);
        queue.drained().await;
        // What is said later about a queue that was there before is no reason to give up.
        queue.refuse(Some(|| BrokerError::refused("there is no such queue")));
        queue.cut();
    }
    queue.refuse(None);
    assert!(!running.ended.is_finished());
    running.stopped().await;
    assert_eq!(app.effects().await, ["a", "b"]);
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_anything_is_processed() {
    let app = OnSqlite::start();
    let database = app.connect().await;
    let queue = Queue::default();
    queue.publish(message("m", "100"));
    let run = async |settings: Settings| {
        let consumer = Consumer::new(queue.clone(), database.clone(), "billing", settings).unwrap();
        let handler = Effects::<OnSqlite> { calls: Arc::default(), then: Box::new(nothing_more) };
        consumer.run(std::future::pending(), handler).await.unwrap_err()
    };
    queue.refuse(Some(|| BrokerError::refused("there is no such queue")));
    let error = run(quick()).await;
    assert!(
        matches!(&error, ConsumerError::Broker(error) if error.to_string() == "there is no such queue"),
        "{error}"
    );
    // Messages that the broker can deliver after they were forgotten.
    queue.refuse(None);
    queue.state().horizon = Some(InboxConfig::default().retention);
    let error = run(quick()).await;
    assert!(matches!(&error, ConsumerError::Settings(error) if error.setting == "retention"), "{error}");
    let settings = Settings { attempts_max: 0, ..quick() };
    let refused = Consumer::new(queue.clone(), database.clone(), "billing", settings).map(|_| ());
    assert_eq!(refused.unwrap_err().setting, "attempts_max");
    assert!(Consumer::new(queue.clone(), database.clone(), "", quick()).is_err());
    assert_eq!((app.effects().await.len(), queue.left()), (0, 1));
}

/// A process that is killed: its tasks stop where they are, and its connections close.
fn kill(runtime: Runtime) {
    runtime.shutdown_background();
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn a_message_that_kills_its_worker_is_dead_lettered_and_the_rest_flow_on<A: App>(app: &A) {
    let (queue, ids) = (Queue::default(), numbers(30));
    for id in
        ids[..15].iter().map(String::as_str).chain(["kills"]).chain(ids[10..].iter().map(String::as_str))
    {
        queue.publish(message(id, "x"));
    }
    let settings = Settings { attempts_max: 3, ..with_lease(Duration::from_secs(1)) };
    let deaths = Arc::new(AtomicU32::new(0));
    let waiting = runtime();
    for worker in 0.. {
        let (died, death) = std::sync::mpsc::channel::<()>();
        let process = runtime();
        let (app, queue, settings, deaths) =
            (app.clone(), queue.clone(), settings.clone(), Arc::clone(&deaths));
        let drained = queue.clone();
        let died = Mutex::new(died);
        process.spawn(async move {
            let running = Running::start(&app, &queue, settings, move |_, message| {
                let death = (message.id() == "kills").then(|| died.lock().unwrap().clone());
                deaths.fetch_add(death.is_some().into(), Ordering::SeqCst);
                Box::pin(async move {
                    // What is processed beside it has not ended when it dies.
                    sleep(Duration::from_millis(if death.is_some() { 50 } else { 150 })).await;
                    if let Some(death) = death {
                        death.send(()).unwrap();
                        std::future::pending::<()>().await;
                    }
                    Ok(())
                })
            });
            running.await.ended.await
        });
        let done = (0..6_000).find_map(|_| {
            if death.recv_timeout(Duration::from_millis(20)).is_ok() {
                return Some(false);
            }
            (drained.left() == 0).then_some(true)
        });
        kill(process);
        assert!(worker < 10, "it circulates for ever");
        match done {
            Some(true) => break,
            Some(false) => drained.cut(),
            None => panic!("{} are stuck", drained.left()),
        }
    }
    assert_eq!(deaths.load(Ordering::SeqCst), 3);
    assert_eq!(waiting.block_on(app.effects()), ids);
    let letters = dead(&queue);
    let [(_, letter)] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((letter.reason, letter.attempts), (Reason::AttemptsExhausted, 3));
    assert!(letter.detail.contains("its worker died"), "{letter:?}");
}

#[test]
fn on_postgres_a_message_that_kills_its_worker_is_dead_lettered_and_the_rest_flow_on() {
    a_message_that_kills_its_worker_is_dead_lettered_and_the_rest_flow_on(&OnPostgres::start());
}

#[test]
fn on_sqlite_a_message_that_kills_its_worker_is_dead_lettered_and_the_rest_flow_on() {
    a_message_that_kills_its_worker_is_dead_lettered_and_the_rest_flow_on(&OnSqlite::start());
}

/// The database is away for half a second, again and again: nothing is acknowledged that is not committed, nothing is
/// given up, and what was not processed is processed once.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_loses_no_message_and_repeats_none() {
    let direct = OnPostgres::start();
    let proxy = Proxy::start(Postgres::shared().port()).await.unwrap();
    let app = direct.through(&proxy);
    let (queue, ids) = (Queue::default(), numbers(300));
    let settings = Settings { attempts_max: 20, ..with_lease(Duration::from_secs(2)) };
    let running = Running::start(&app, &queue, settings, |_, _| {
        Box::pin(async {
            sleep(Duration::from_millis(10)).await;
            Ok(())
        })
    })
    .await;
    for id in ids.iter().chain(&ids) {
        queue.publish(message(id, id));
    }
    for _ in 0..3 {
        sleep(Duration::from_millis(200)).await;
        proxy.refuse(true);
        proxy.cut();
        // What is acknowledged while it is away was committed before.
        sleep(Duration::from_millis(100)).await;
        let acknowledged = queue.state().acknowledged.clone();
        let effects = direct.effects().await;
        assert!(acknowledged.iter().all(|id| effects.contains(id)), "acknowledged and not committed");
        sleep(Duration::from_millis(400)).await;
        proxy.refuse(false);
    }
    queue.drained().await;
    running.stopped().await;
    assert_eq!(direct.effects().await, ids);
    assert_eq!(queue.state().dead, []);
    assert_eq!(queue.state().acknowledged.len(), 2 * ids.len());
}

/// The claim's short timeouts do not hold in the handler's transaction.
#[tokio::test(flavor = "multi_thread")]
async fn a_handlers_settings_are_its_own() {
    let (app, queue) = (OnPostgres::start(), Queue::default());
    let consumer = Consumer::new(queue.clone(), app.connect().await, "billing", quick()).unwrap();
    let stop = CancellationToken::new();
    let ended = tokio::spawn(consumer.run_fn(stop.clone().cancelled_owned(), |tx, _| {
        Box::pin(async move {
            for setting in ["lock_timeout", "statement_timeout"] {
                let show = "SELECT current_setting($1)";
                let value: String = sqlx::query_scalar(show).bind(setting).fetch_one(&mut **tx).await?;
                OnPostgres::effect(tx, &format!("{setting}={value}")).await?;
            }
            Ok(())
        })
    }));
    queue.publish(message("m", "100"));
    queue.drained().await;
    stop.cancel();
    ended.await.unwrap().unwrap();
    assert_eq!(app.effects().await, ["lock_timeout=0", "statement_timeout=0"]);
}

/// No broker can add it to a clock.
#[tokio::test]
async fn a_handler_that_would_wait_for_ever_waits_for_long() {
    let (app, queue) = (OnSqlite::start(), Queue::default());
    let running = Running::start(&app, &queue, quick(), |_, _| {
        Box::pin(async { Err(NotDone::retry_after(Duration::MAX, "never again")) })
    })
    .await;
    queue.publish(message("m", "100"));
    let put_back = async {
        while queue.state().put_back.is_empty() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(30), put_back).await.expect("it is put back");
    running.stopped().await;
    assert_eq!(queue.state().put_back, [("m".to_owned(), DURATION_MAX)]);
}

/// The renewal of its lease is a change that its snapshot does not have. It is not stuck, and whoever looks after it is
/// told that nothing was committed.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_handler_above_read_committed_conflicts_with_its_own_renewal() {
    let (app, queue) = (OnPostgres::start(), Queue::default());
    let database = app.url.rsplit('/').next().unwrap();
    let isolation = "SET default_transaction_isolation = 'repeatable read'";
    Postgres::shared().sql(database, &format!("ALTER DATABASE \"{database}\" {isolation}"));
    for (lease, ends) in [(Duration::from_millis(1_200), "dead"), (Duration::from_secs(60), "done")] {
        let settings = Settings { attempts_max: 2, ..with_lease(lease) };
        let consumer = Consumer::new(queue.clone(), app.connect().await, ends, settings).unwrap();
        let stop = CancellationToken::new();
        let ended = tokio::spawn(consumer.run_fn(stop.clone().cancelled_owned(), |tx, message| {
            Box::pin(async move {
                OnPostgres::effect(tx, message.id()).await?;
                sleep(Duration::from_millis(900)).await;
                Ok(())
            })
        }));
        queue.publish(message("m", "100"));
        queue.drained().await;
        stop.cancel();
        ended.await.unwrap().unwrap();
    }
    let letters = dead(&queue);
    let [(_, letter)] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((letter.reason, letter.consumer.as_str()), (Reason::AttemptsExhausted, "dead"));
    assert!(letter.detail.contains("could not be committed"), "{letter:?}");
    assert_eq!(app.effects().await, ["m"]);
}

/// After a while it is put back, so that no broker takes its consumer for dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_stays_away_has_the_message_put_back() {
    let direct = OnPostgres::start();
    let proxy = Proxy::start(Postgres::shared().port()).await.unwrap();
    let queue = Queue::default();
    let settings = Settings { store_wait: Duration::from_millis(300), ..quick() };
    let running = Running::start(&direct.through(&proxy), &queue, settings, nothing_more).await;
    proxy.refuse(true);
    proxy.cut();
    queue.publish(message("m", "100"));
    let put_back = async {
        while queue.state().put_back.len() < 2 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(60), put_back).await.expect("it is put back");
    assert_eq!(queue.state().acknowledged, [""; 0]);
    proxy.refuse(false);
    queue.drained().await;
    assert_eq!((running.calls("m"), direct.effects().await), (1, vec!["m".to_owned()]));
    running.stopped().await;
}

/// While the store is away the message is kept, and no attempt is counted.
#[tokio::test(flavor = "multi_thread")]
async fn no_attempt_is_counted_while_the_store_is_away() {
    let direct = OnPostgres::start();
    let proxy = Proxy::start(Postgres::shared().port()).await.unwrap();
    let queue = Queue::default();
    let running = Running::start(&direct.through(&proxy), &queue, quick(), |_, message| {
        assert_eq!(message.attempt(), 1);
        Box::pin(async { Ok(()) })
    })
    .await;
    proxy.refuse(true);
    proxy.cut();
    queue.publish(message("m", "100"));
    sleep(Duration::from_secs(2)).await;
    assert_eq!(running.calls("m"), 0);
    {
        let state = queue.state();
        assert_eq!((state.acknowledged.len(), state.put_back.len()), (0, 0));
    }
    proxy.refuse(false);
    queue.drained().await;
    assert_eq!((running.calls("m"), direct.effects().await), (1, vec!["m".to_owned()]));
    running.stopped().await;
}

//! Connections that are cut, stalled and refused; servers that crash, restart and turn read-only.

use std::collections::HashMap;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Revision, Store, StoreError, StoreErrorKind};
use onlyonce_postgres::PgBouncer as Pooling;
use onlyonce_testkit::{PgBouncer, Postgres, Proxy};
use sqlx::{Connection, Executor};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::*;

const TASKS: u64 = 64;
const CUTTING_TIME: Duration = Duration::from_secs(6);

/// What one task knows of one key: the revisions that may be stored, and whether one must be.
#[derive(Debug)]
struct Known {
    key: String,
    possible: Vec<Option<Revision>>,
    after: &'static str,
}

fn proxied(proxy: &Proxy, database: &str) -> String {
    format!("postgres://postgres@127.0.0.1:{}/{database}", proxy.port())
}

/// Inserts and replaces on fresh keys until the time is over.
async fn work(store: Arc<PostgresStore>, task: u64, until: Instant) -> Vec<Known> {
    let mut known = Vec::new();
    for at in 0.. {
        if Instant::now() >= until {
            break;
        }
        let key = format!("k{task}-{at}");
        let (payment, first, second) = (operation(&key), running(), done());
        let (possible, after) = match store.insert(&payment, first.clone()).await {
            Ok(Inserted::New(_)) => match store.replace(payment.id(), first.revision, second.clone()).await {
                Ok(Replaced::Written(_)) => (vec![Some(second.revision)], "replaced"),
                Ok(lost) => panic!("nobody else writes {key}: {lost:?}"),
                Err(error) if error.may_have_applied() => {
                    (vec![Some(first.revision), Some(second.revision)], "a replace in doubt")
                }
                Err(_) => (vec![Some(first.revision)], "a replace refused"),
            },
            Ok(exists) => panic!("nobody else writes {key}: {exists:?}"),
            Err(error) if error.may_have_applied() => {
                (vec![None, Some(first.revision)], "an insert in doubt")
            }
            Err(_) => {
                sleep(Duration::from_millis(1)).await;
                (vec![None], "an insert refused")
            }
        };
        known.push(Known { key, possible, after });
    }
    known
}

/// Cuts connections at random while many tasks write, and then compares what they were told with what is
/// there.
async fn nothing_acknowledged_is_lost(
    store: PostgresStore,
    proxy: &Proxy,
    database: &str,
    between_cuts: Range<u64>,
) {
    let (store, until) = (Arc::new(store), Instant::now() + CUTTING_TIME);
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        tasks.spawn(work(Arc::clone(&store), task, until));
    }
    let mut random: u64 = 0x9e37_79b9_7f4a_7c15;
    while Instant::now() < until {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let wait = between_cuts.start + (random >> 33) % (between_cuts.end - between_cuts.start);
        sleep(Duration::from_millis(wait)).await;
        proxy.cut();
    }
    let known: Vec<Known> = tasks.join_all().await.into_iter().flatten().collect();
    let mut told: HashMap<&str, u32> = HashMap::new();
    for known in &known {
        *told.entry(known.after).or_default() += 1;
    }
    assert!(told.get("replaced").is_some_and(|keys| *keys > 200), "{told:?}");
    assert!(told.contains_key("an insert in doubt") && told.contains_key("a replace in doubt"), "{told:?}");
    // A statement whose connection was cut may still be running.
    sleep(Duration::from_millis(300)).await;
    assert_eq!(idle_in_transaction(database), "");
    let look = open(&server().url(database)).await;
    let mut wrong = Vec::new();
    for known in &known {
        let seen = look.read(operation(&known.key).id()).await.unwrap();
        if !known.possible.contains(&seen.map(|seen| seen.record.revision)) {
            wrong.push(known);
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {wrong:?}", wrong.len(), known.len());
    assert!(matches!(store.insert(&operation("last"), running()).await, Ok(Inserted::New(_))), "it recovers");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_acknowledged_is_lost_when_connections_are_cut() {
    let database = server().database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let store = open(&proxied(&proxy, &database)).await;
    nothing_acknowledged_is_lost(store, &proxy, &database, 1..150).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_acknowledged_is_lost_when_the_poolers_connections_are_cut() {
    let database = server().database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let pooler = PgBouncer::start_before(proxy.port(), "server_login_retry = 1\n");
    let store = open(&pooler.url(&database)).await;
    // A cut in a login makes PgBouncer refuse everyone for a second.
    nothing_acknowledged_is_lost(store, &proxy, &database, 200..400).await;
}

fn unavailable<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> String {
    let error = answer.expect_err("nobody is there");
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    error.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_connection_is_given_up_in_time() {
    let database = server().database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let time = Duration::from_millis(600);
    let store = PostgresStore::open(&options(&proxied(&proxy, &database)).call_timeout(time)).await.unwrap();
    store.insert(&operation("warm"), running()).await.unwrap();
    // At once, so that the connection is trusted: the write is sent, and nobody knows. On a busy machine a
    // moment passes, and the connection is asked first; then nothing was sent.
    let mut in_doubt = false;
    for round in 0..20 {
        store.insert(&operation(&format!("trusted {round}")), running()).await.unwrap();
        proxy.stall(true);
        let started = Instant::now();
        let error = store.insert(&operation(&format!("in doubt {round}")), running()).await.unwrap_err();
        assert!(started.elapsed() < time * 2, "{:?}", started.elapsed());
        in_doubt = error.kind() == StoreErrorKind::Ambiguous;
        if in_doubt {
            break;
        }
        proxy.stall(false);
    }
    assert!(in_doubt, "a write that was sent and not answered was taken for one that was not sent");
    // Later ones do not get as far as sending anything.
    let started = Instant::now();
    unavailable(store.insert(&operation("refused"), running()).await);
    unavailable(store.read(operation("warm").id()).await);
    assert!(started.elapsed() < time * 4, "{:?}", started.elapsed());
    proxy.stall(false);
    assert!(matches!(store.insert(&operation("later"), running()).await, Ok(Inserted::New(_))));
    assert!(store.read(operation("refused").id()).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_network_slows_calls_and_fails_none() {
    let database = server().database();
    let proxy = Proxy::start(server().port()).await.unwrap();
    let store = Arc::new(open(&proxied(&proxy, &database)).await);
    proxy.delay(Duration::from_millis(60));
    let mut calls = JoinSet::new();
    for at in 0..200 {
        let store = Arc::clone(&store);
        calls.spawn(async move { store.insert(&operation(&format!("k{at}")), running()).await.unwrap() });
    }
    assert_eq!(calls.join_all().await.len(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_crashed_is_unavailable_and_one_that_is_back_is_used() {
    let server = Postgres::start("");
    let database = server.database();
    let store = Arc::new(open(&server.url(&database)).await);
    for at in 0..20 {
        store.insert(&operation(&format!("k{at}")), running()).await.unwrap();
    }
    sleep(Duration::from_millis(150)).await;
    server.crash();
    unavailable(store.insert(&operation("away"), running()).await);
    unavailable(store.read(operation("k0").id()).await);
    unavailable(store.sweep(10).await);
    server.start_again();
    for at in 0..20 {
        assert!(store.read(operation(&format!("k{at}")).id()).await.unwrap().is_some(), "k{at} is lost");
    }
    assert!(store.read(operation("away").id()).await.unwrap().is_none());
    // Every connection of the pool is stale now, and no call fails for it.
    for round in 0..2 {
        let mut calls = JoinSet::new();
        for at in 0..100 {
            let store = Arc::clone(&store);
            calls.spawn(async move {
                store.insert(&operation(&format!("r{round}-{at}")), running()).await.unwrap()
            });
        }
        calls.join_all().await;
        sleep(Duration::from_millis(150)).await;
        server.stop();
        server.start_again();
    }
    assert!(matches!(store.insert(&operation("last"), running()).await, Ok(Inserted::New(_))));
}

fn terminate(database: &str) {
    server().sql(
        "postgres",
        &format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_read_only_or_full_is_unavailable_until_it_is_not() {
    let database = server().database();
    let store = open(&server().url(&database)).await;
    let user = format!("u_{database}");
    server().sql(
        &database,
        &format!(
            "CREATE ROLE {user} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA onlyonce TO {user}; \
             GRANT ALL ON ALL TABLES IN SCHEMA onlyonce TO {user}"
        ),
    );
    let url = format!("postgres://{user}:x@127.0.0.1:{}/{database}", server().port());
    let app = open(&url).await;
    for (breaking, mending, code) in [
        (
            format!("ALTER DATABASE {database} SET default_transaction_read_only = on"),
            format!("ALTER DATABASE {database} RESET default_transaction_read_only"),
            "25006",
        ),
        (
            format!("ALTER ROLE {user} CONNECTION LIMIT 0"),
            format!("ALTER ROLE {user} CONNECTION LIMIT -1"),
            "53300",
        ),
    ] {
        server().sql("postgres", &breaking);
        terminate(&database);
        sleep(Duration::from_millis(150)).await;
        let text = unavailable(app.insert(&operation(code), running()).await);
        assert!(text.contains(code), "{text}");
        server().sql("postgres", &mending);
        if code == "53300" {
            let seen = app.insert(&operation(code), running()).await;
            assert!(matches!(seen, Ok(Inserted::New(_))), "{seen:?}");
        } else {
            // Every connection was opened anew, so the setting is gone with the old ones.
            assert!(matches!(app.insert(&operation(code), running()).await, Ok(Inserted::New(_))));
        }
    }
    store.close().await;
}

/// Polls a claim a number of times and drops it, with the server at each stage in between: afterwards the
/// key is free unless the claim was answered, and no connection is in a transaction.
async fn dropped_at_every_point(store: &PostgresStore, database: &str) {
    let mut answered = 0;
    for round in 0..60_u32 {
        let key = format!("dropped-{round}");
        let done = {
            let (payment, write) = (operation(&key), running());
            let mut call = pin!(store.insert(&payment, write));
            let mut done = false;
            for _ in 0..=round % 4 {
                if let Poll::Ready(answer) = call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    assert!(matches!(answer, Ok(Inserted::New(_))), "{answer:?}");
                    done = true;
                    break;
                }
                sleep(Duration::from_micros(u64::from(round) * 120)).await;
            }
            done
        };
        answered += u32::from(done);
        // A claim in its commit is released right after it.
        let id = operation(&key).id();
        let settled = timeout(Duration::from_secs(10), async {
            while store.read(id).await.unwrap().is_some() != done {
                sleep(Duration::from_millis(2)).await;
            }
        });
        settled.await.unwrap_or_else(|_| panic!("round {round}: a phantom claim, or a lost one"));
        assert!(matches!(
            store.insert(&operation(&format!("next-{round}")), running()).await,
            Ok(Inserted::New(_))
        ));
    }
    assert!((5..55).contains(&answered), "{answered} of 60 were answered");
    sleep(Duration::from_millis(20)).await;
    assert_eq!(idle_in_transaction(database), "");
    let look = open(&server().url(database)).await;
    for round in 0..60 {
        let seen = look.read(operation(&format!("next-{round}")).id()).await.unwrap();
        assert!(seen.is_some(), "next-{round} was acknowledged inside a transaction that is not committed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_dropped_at_any_point_leaves_no_claim_and_no_transaction() {
    let database = server().database();
    let url = server().url(&database);
    dropped_at_every_point(&open(&url).await, &database).await;
    server().sql(&database, "TRUNCATE onlyonce.idempotency_keys");
    let pooled = options(&url).pgbouncer(Pooling::Yes);
    dropped_at_every_point(&PostgresStore::open(&pooled).await.unwrap(), &database).await;
}

/// Transaction pooling shares sessions, and so what another client has set in one.
#[tokio::test(flavor = "multi_thread")]
async fn what_another_client_left_with_the_pooler_makes_no_write_volatile() {
    let database = server().database();
    let bouncer = PgBouncer::start(
        server(),
        "pool_mode = transaction\ndefault_pool_size = 1\nignore_startup_parameters = extra_float_digits\n",
    );
    let store = PostgresStore::open(&options(&bouncer.url(&database))).await.unwrap();
    server().sql(
        &database,
        "CREATE TABLE public.noted (setting text); \
         CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO public.noted VALUES (current_setting('synchronous_commit')); RETURN NEW; END $$; \
         CREATE TRIGGER note AFTER INSERT OR UPDATE ON onlyonce.idempotency_keys \
             FOR EACH ROW EXECUTE FUNCTION public.note()",
    );
    let mut other = sqlx::PgConnection::connect(&bouncer.url(&database)).await.unwrap();
    other.execute(sqlx::raw_sql("SET synchronous_commit = off")).await.unwrap();
    store.insert(&operation("k"), running()).await.unwrap();
    // One that connects only now sees the other's setting from the start.
    let late = PostgresStore::open(&options(&bouncer.url(&database))).await.unwrap();
    late.insert(&operation("l"), running()).await.unwrap();
    assert_eq!(server().sql(&database, "SELECT count(*), min(setting), max(setting) FROM noted"), "2|on|on");
}

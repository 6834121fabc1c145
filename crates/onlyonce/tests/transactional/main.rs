//! The transactional form on real databases: what is committed together, and what copies are told.

#![allow(clippy::unwrap_used, missing_docs)]

mod answers;
mod commits;
mod crash;
mod ended;
mod nested;
mod shop;

use std::sync::Arc;
use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::Full;
use onlyonce::transactional::NoTransaction;
use onlyonce::{Config, Execution, Failure, OnlyonceLayer, Settings, TransactionalLayer, Tx};
use onlyonce_core::Transactional;
use onlyonce_testkit::{Postgres, Proxy};
use sqlx::postgres::PgConnectOptions;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, Service, ServiceExt};

use shop::*;

/// One test on each database.
macro_rules! on_each {
    ($($(#[$attribute:meta])* $name:ident;)*) => {
        mod postgres {
            use super::Shop;
            $($(#[$attribute])* #[tokio::test(flavor = "multi_thread")] async fn $name() {
                super::$name(super::OnPostgres::open().await).await;
            })*
        }
        mod sqlite {
            use super::Shop;
            $($(#[$attribute])* #[tokio::test(flavor = "multi_thread")] async fn $name() {
                super::$name(super::OnSqlite::open().await).await;
            })*
        }
    };
}

on_each! {
    the_work_and_its_answer_are_committed_together;
    an_answer_that_is_not_kept_rolls_the_work_back;
    a_panic_rolls_back_and_reaches_the_caller;
    sixty_four_copies_are_one_execution_and_other_keys_go_on;
    a_copy_on_another_instance_waits_for_the_commit;
    the_work_goes_on_when_its_caller_hangs_up;
    an_edited_request_is_refused;
    a_request_without_a_key_has_a_transaction_too;
    a_request_that_no_rule_covers_has_no_transaction;
    work_past_its_timeout_is_committed_and_past_its_lease_rolled_back;
    an_answer_too_large_to_record_leaves_the_mark_that_it_was_done;
    a_key_held_with_a_lease_by_another_door_is_waited_for;
    a_transaction_that_is_kept_is_not_committed;
    a_shutdown_waits_for_the_work;
}

async fn the_work_and_its_answer_are_committed_together<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(POOL_SIZE).await, config(), sell::<S>);
    let first = counter.pay("k").await;
    assert_eq!((first.status, first.replayed, first.body.as_str()), (StatusCode::CREATED, false, "run 1"));
    let retry = counter.pay("k").await;
    assert_eq!((retry.replayed, &retry.body), (true, &first.body));
    assert_eq!(shop.notes().await, ["k"]);
    // A conflict that the application itself found is an outcome as well.
    let refusing = Counter::new(shop.instance(1).await, config(), |request, run| {
        Box::pin(async move {
            sell::<S>(request, run).await;
            answer(409, "sold out")
        })
    });
    let first = refusing.pay("sold-out").await;
    let retry = refusing.pay("sold-out").await;
    assert_eq!(
        (first.status, retry.status, retry.replayed),
        (StatusCode::CONFLICT, StatusCode::CONFLICT, true)
    );
    assert_eq!((refusing.runs(), shop.notes().await.len()), (1, 2));
}

async fn an_answer_that_is_not_kept_rolls_the_work_back<S: Shop>(shop: S) {
    for status in [500, 502, 503, 504, 429, 401] {
        let counter = Counter::new(shop.instance(2).await, config(), move |request, run| {
            Box::pin(async move {
                assert_eq!(request.extensions().get::<Execution>().unwrap().attempt, 1);
                let sold = sell::<S>(request, run).await;
                if run == 1 { answer(status, "later") } else { sold }
            })
        });
        let key = format!("k{status}");
        let first = counter.pay(&key).await;
        assert_eq!((first.status.as_u16(), first.body.as_str(), first.refused), (status, "later", None));
        assert!(!shop.notes().await.contains(&key), "{status}");
        let retry = counter.pay(&key).await;
        assert_eq!((retry.status, retry.body.as_str()), (StatusCode::CREATED, "run 2"));
        assert!(shop.notes().await.contains(&key), "{status}");
    }
}

async fn a_panic_rolls_back_and_reaches_the_caller<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(2).await, config(), |request, run| {
        Box::pin(async move {
            let sold = sell::<S>(request, run).await;
            assert!(run > 1, "a bug in the handler");
            sold
        })
    });
    let panicked = tokio::spawn({
        let counter = counter.clone();
        async move { counter.pay("k").await }
    });
    assert!(panicked.await.unwrap_err().is_panic());
    assert!(shop.notes().await.is_empty());
    assert_eq!(counter.pay("k").await.body, "run 2");
}

async fn sixty_four_copies_are_one_execution_and_other_keys_go_on<S: Shop>(shop: S) {
    let store = shop.instance(POOL_SIZE).await;
    let counter = Counter::new(store, config(), |request, run| {
        Box::pin(async move {
            // Slow before it writes: SQLite's other keys wait for a writer, and not for this.
            if key_of(&request) == "slow" {
                sleep(Duration::from_millis(400)).await;
            }
            sell::<S>(request, run).await
        })
    });
    let mut copies = JoinSet::new();
    for _ in 0..64 {
        let counter = counter.clone();
        copies.spawn(async move { counter.pay("slow").await });
    }
    sleep(Duration::from_millis(100)).await;
    let mut others = JoinSet::new();
    for other in 0..POOL_SIZE * 2 {
        let counter = counter.clone();
        others.spawn(async move { counter.pay(&format!("other-{other}")).await });
    }
    for other in others.join_all().await {
        assert_eq!((other.status, other.replayed), (StatusCode::CREATED, false));
    }
    let answers = copies.join_all().await;
    let first: Vec<_> = answers.iter().filter(|answer| !answer.replayed).collect();
    assert_eq!(first.len(), 1);
    assert!(
        answers.iter().all(|answer| answer.status == StatusCode::CREATED && answer.body == first[0].body)
    );
    assert_eq!(counter.runs(), 1 + POOL_SIZE as usize * 2);
    assert_eq!(shop.notes().await.iter().filter(|line| *line == "slow").count(), 1);
}

async fn a_copy_on_another_instance_waits_for_the_commit<S: Shop>(shop: S) {
    let slow = |request, run| {
        Box::pin(async move {
            let sold = sell::<S>(request, run).await;
            sleep(Duration::from_millis(500)).await;
            sold
        }) as futures_util::future::BoxFuture<'static, _>
    };
    let one = Counter::new(shop.instance(2).await, config(), slow);
    let two = Counter::new(shop.instance(1).await, waiting(Duration::from_secs(30)), slow);
    let first = tokio::spawn({
        let one = one.clone();
        async move { one.pay("k").await }
    });
    while one.runs() == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    let copy = two.pay("k").await;
    let first = first.await.unwrap();
    assert_eq!((copy.replayed, &copy.body, two.runs()), (true, &first.body, 0));
    assert_eq!(shop.notes().await, ["k"]);
}

async fn the_work_goes_on_when_its_caller_hangs_up<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(2).await, config(), |request, run| {
        Box::pin(async move {
            let sold = sell::<S>(request, run).await;
            sleep(Duration::from_millis(200)).await;
            sold
        })
    });
    let hung_up = timeout(Duration::from_millis(100), counter.pay("k")).await;
    assert!(hung_up.is_err());
    let retry = counter.pay("k").await;
    assert_eq!((retry.replayed, retry.body.as_str(), counter.runs()), (true, "run 1", 1));
    assert_eq!(shop.notes().await, ["k"]);
}

async fn an_edited_request_is_refused<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(2).await, config(), sell::<S>);
    counter.pay("k").await;
    let edited = counter.send(payment("k", "999")).await;
    assert_eq!((edited.status.as_u16(), edited.refused.as_deref()), (422, Some("idempotency-key-reused")));
    assert_eq!(shop.notes().await, ["k"]);
}

async fn a_request_without_a_key_has_a_transaction_too<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(2).await, config(), |request, run| {
        Box::pin(async move {
            assert!(request.extensions().get::<Execution>().is_none());
            let sold = sell::<S>(request, run).await;
            if run == 1 { answer(500, "later") } else { sold }
        })
    });
    let request = || Request::post("/payments").body(Full::from("100")).unwrap();
    assert_eq!(counter.send(request()).await.status.as_u16(), 500);
    assert!(shop.notes().await.is_empty());
    for _ in 0..2 {
        assert!(!counter.send(request()).await.replayed);
    }
    assert_eq!(shop.notes().await, ["none", "none"]);
}

async fn a_request_that_no_rule_covers_has_no_transaction<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(2).await, config(), |request, _| {
        Box::pin(async move {
            let mut first = Tx::<S::Store>::take(request.extensions());
            let second = Tx::<S::Store>::take(request.extensions());
            match (&mut first, second) {
                (Err(NoTransaction::NotCovered), Err(NoTransaction::NotCovered)) => answer(200, "none"),
                (Ok(tx), Err(NoTransaction::Taken)) => {
                    S::note(tx, "one").await;
                    answer(200, "one")
                }
                _ => answer(500, "?"),
            }
        })
    });
    let request = Request::get("/payments").header("idempotency-key", "k").body(Full::default()).unwrap();
    assert_eq!(counter.send(request).await.body, "none");
    assert_eq!(counter.pay("k").await.body, "one");
}

async fn work_past_its_timeout_is_committed_and_past_its_lease_rolled_back<S: Shop>(shop: S) {
    let defaults = Settings {
        timeout: Duration::from_millis(200),
        lease: Some(Duration::from_millis(1_500)),
        retention: Duration::from_secs(60),
        ..waiting(Duration::from_secs(30)).defaults
    };
    let config = Config { defaults, ..Config::default() };
    let counter = Counter::new(shop.instance(2).await, config, |request, run| {
        Box::pin(async move {
            let key = key_of(&request);
            let sold = sell::<S>(request, run).await;
            match (key.as_str(), run) {
                ("late", _) => sleep(Duration::from_millis(700)).await,
                ("never", 2) => std::future::pending().await,
                _ => {}
            }
            sold
        })
    });
    let first = counter.pay("late").await;
    assert_eq!((first.status.as_u16(), first.refused.as_deref()), (504, Some("upstream-timeout")));
    assert!(first.retry_after);
    let retry = counter.pay("late").await;
    assert_eq!((retry.replayed, retry.body.as_str()), (true, "run 1"));
    assert_eq!(counter.pay("never").await.status.as_u16(), 504);
    let retry = counter.pay("never").await;
    assert_eq!((retry.replayed, retry.body.as_str()), (false, "run 3"));
    assert_eq!(shop.notes().await, ["late", "never"]);
}

async fn an_answer_too_large_to_record_leaves_the_mark_that_it_was_done<S: Shop>(shop: S) {
    let defaults = Settings { response_body_bytes_max: 1_000, ..config().defaults };
    let config = Config { defaults, ..Config::default() };
    let counter = Counter::new(shop.instance(2).await, config, |request, run| {
        Box::pin(async move {
            sell::<S>(request, run).await;
            answer(200, vec![b'x'; 5_000])
        })
    });
    let first = counter.pay("k").await;
    assert_eq!((first.status.as_u16(), first.body.len()), (200, 5_000));
    let retry = counter.pay("k").await;
    assert_eq!((retry.status.as_u16(), retry.refused.as_deref()), (409, Some("response-not-kept")));
    assert_eq!((counter.runs(), shop.notes().await.len()), (1, 1));
}

async fn a_key_held_with_a_lease_by_another_door_is_waited_for<S: Shop>(shop: S) {
    let store = shop.instance(2).await;
    let layer = OnlyonceLayer::new(store.store(), Config::default()).unwrap();
    let mut other = layer.layer(tower::service_fn(|_| async {
        sleep(Duration::from_millis(600)).await;
        Ok::<_, std::convert::Infallible>(answer(200, "by the other door"))
    }));
    let first = other.ready().await.unwrap().call(payment("k", "100"));
    let first = tokio::spawn(first);
    sleep(Duration::from_millis(200)).await;
    let impatient = Counter::new(store.clone(), waiting(Duration::ZERO), sell::<S>);
    let refused = impatient.pay("k").await;
    assert_eq!((refused.status.as_u16(), refused.refused.as_deref()), (409, Some("request-in-progress")));
    assert!(refused.retry_after);
    let counter = Counter::new(store, waiting(Duration::from_secs(30)), sell::<S>);
    let copy = counter.pay("k").await;
    assert_eq!((copy.replayed, copy.body.as_str(), counter.runs()), (true, "by the other door", 0));
    assert_eq!(first.await.unwrap().unwrap().status().as_u16(), 200);
}

async fn a_transaction_that_is_kept_is_not_committed<S: Shop>(shop: S) {
    let counter = Counter::new(shop.instance(2).await, config(), |request, run| {
        Box::pin(async move {
            let mut tx = Tx::<S::Store>::take(request.extensions()).unwrap();
            S::note(&mut tx, "kept").await;
            if run == 1 {
                tokio::spawn(async move {
                    sleep(Duration::from_millis(300)).await;
                    drop(tx);
                });
            }
            answer(201, format!("run {run}"))
        })
    });
    let first = counter.pay("k").await;
    assert_eq!((first.status.as_u16(), first.refused.as_deref()), (503, Some("not-committed")));
    let retry = counter.pay("k").await;
    assert_eq!((retry.status.as_u16(), retry.body.as_str()), (201, "run 2"));
    assert_eq!(shop.notes().await, ["kept"]);
}

async fn a_shutdown_waits_for_the_work<S: Shop>(shop: S) {
    let layer = TransactionalLayer::new(shop.instance(2).await, config()).unwrap();
    let counter = Counter::behind(&layer, |request, run| {
        Box::pin(async move {
            let sold = sell::<S>(request, run).await;
            sleep(Duration::from_millis(300)).await;
            sold
        })
    });
    let _ = timeout(Duration::from_millis(100), counter.pay("k")).await;
    assert!(shop.notes().await.is_empty());
    layer.drained().await;
    assert_eq!(shop.notes().await, ["k"]);
}

/// A statement that failed undoes the whole transaction in Postgres, whether the handler looked or not.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_overlooks_an_error_of_its_own_is_not_committed() {
    let shop = OnPostgres::open().await;
    let counter = Counter::new(shop.instance(2).await, config(), |request, run| {
        Box::pin(async move {
            let mut tx = Tx::take(request.extensions()).unwrap();
            OnPostgres::note(&mut tx, "paid").await;
            if run == 1 {
                OnPostgres::fail(&mut tx).await;
            }
            answer(201, format!("run {run}"))
        })
    });
    for request in [payment("k", "100"), Request::post("/payments").body(Full::from("100")).unwrap()] {
        counter.runs.store(0, std::sync::atomic::Ordering::SeqCst);
        let keyed = request.headers().contains_key("idempotency-key");
        let first = counter.send(request).await;
        assert_eq!(
            (first.status.as_u16(), first.refused.as_deref()),
            (503, Some("not-committed")),
            "{keyed}"
        );
        assert!(shop.notes().await.is_empty());
    }
    assert_eq!(counter.pay("k").await.body, "run 2");
    assert_eq!(shop.notes().await, ["paid"]);
}

/// Only the claim waits for moments: a handler's own statements wait as its application wants.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_runs_under_the_settings_of_its_application() {
    let shop = OnPostgres::open().await;
    let url = format!("{}?options=-c%20lock_timeout%3D7654", shop.url);
    let store = shop.with_options(url.parse::<PgConnectOptions>().unwrap(), 2).await;
    let counter = Counter::new(store, config(), |request, _| {
        Box::pin(async move {
            let mut tx = Tx::<onlyonce_postgres::PostgresTransactions>::take(request.extensions()).unwrap();
            let setting: String = sqlx::query_scalar("SHOW lock_timeout").fetch_one(&mut **tx).await.unwrap();
            answer(200, setting)
        })
    });
    assert_eq!(counter.pay("k").await.body, "7654ms");
    let unkeyed = Request::post("/payments").body(Full::from("100")).unwrap();
    assert_eq!(counter.send(unkeyed).await.body, "7654ms");
}

/// A copy that waits on another instance holds its only connection for moments at a time.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_another_instance_leaves_the_pool_to_other_keys() {
    let shop = OnPostgres::open().await;
    let one = Counter::new(shop.instance(1).await, config(), |request, run| {
        Box::pin(async move {
            let sold = sell::<OnPostgres>(request, run).await;
            sleep(Duration::from_secs(2)).await;
            sold
        })
    });
    let two = Counter::new(shop.instance(1).await, waiting(Duration::from_secs(30)), sell::<OnPostgres>);
    let first = tokio::spawn({
        let one = one.clone();
        async move { one.pay("k").await }
    });
    while one.runs() == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    let mut copies = JoinSet::new();
    for _ in 0..16 {
        let two = two.clone();
        copies.spawn(async move { two.pay("k").await });
    }
    sleep(Duration::from_millis(200)).await;
    for other in 0..5 {
        assert_eq!(two.pay(&format!("other-{other}")).await.status.as_u16(), 201);
    }
    assert!(!first.is_finished(), "the other keys were done while the copies waited");
    assert!(copies.join_all().await.iter().all(|copy| copy.replayed));
    assert_eq!(first.await.unwrap().status.as_u16(), 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_has_waited_long_enough_is_refused() {
    let shop = OnPostgres::open().await;
    let slow = |request, run| {
        Box::pin(async move {
            let sold = sell::<OnPostgres>(request, run).await;
            sleep(Duration::from_secs(3)).await;
            sold
        }) as futures_util::future::BoxFuture<'static, _>
    };
    let one = Counter::new(shop.instance(2).await, waiting(Duration::from_millis(300)), slow);
    let two = Counter::new(shop.instance(2).await, waiting(Duration::from_millis(300)), slow);
    let first = tokio::spawn({
        let one = one.clone();
        async move { one.pay("k").await }
    });
    while one.runs() == 0 {
        sleep(Duration::from_millis(5)).await;
    }
    for (name, counter) in [("in this process", &one), ("on another instance", &two)] {
        let copy = counter.pay("k").await;
        assert_eq!(
            (copy.status.as_u16(), copy.refused.as_deref()),
            (409, Some("request-in-progress")),
            "{name}"
        );
        assert!(copy.retry_after, "{name}");
    }
    assert!(!first.is_finished());
    assert_eq!(first.await.unwrap().status.as_u16(), 201);
    assert_eq!((one.runs(), two.runs()), (1, 0));
}

/// Two transactions that each read what the other writes: the database undoes one of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_may_runs_again_after_a_serialization_failure() {
    let shop = OnPostgres::open().await;
    let url = format!("{}?options=-c%20default_transaction_isolation%3Dserializable", shop.url);
    for reruns in [0, 8] {
        let store = shop.with_options(url.parse::<PgConnectOptions>().unwrap(), 8).await;
        let layer = TransactionalLayer::new(store, config()).unwrap().reruns(reruns);
        let everybody_has_read = Arc::new(Barrier::new(4));
        let counter = Counter::behind(&layer, move |request, run| {
            let everybody_has_read = Arc::clone(&everybody_has_read);
            Box::pin(async move {
                let key = key_of(&request);
                let mut tx =
                    Tx::<onlyonce_postgres::PostgresTransactions>::take(request.extensions()).unwrap();
                let work = async {
                    let count: i64 =
                        sqlx::query_scalar("SELECT count(*) FROM notes").fetch_one(&mut **tx).await?;
                    if run <= 4 {
                        everybody_has_read.wait().await;
                    }
                    sqlx::query("INSERT INTO notes VALUES ($1)").bind(key).execute(&mut **tx).await?;
                    Ok::<_, sqlx::Error>(count)
                };
                match work.await {
                    Ok(count) => answer(201, format!("run {run} after {count}")),
                    Err(error) => {
                        let mut response = answer(500, "?");
                        if onlyonce_postgres::is_conflict(&error) {
                            response.extensions_mut().insert(Failure::Conflict);
                        }
                        response
                    }
                }
            })
        });
        let mut paying = JoinSet::new();
        for key in 0..4 {
            let counter = counter.clone();
            paying.spawn(async move { counter.pay(&format!("k{reruns}-{key}")).await });
        }
        let answers = paying.join_all().await;
        let refused =
            answers.iter().filter(|answer| answer.refused.as_deref() == Some("not-committed")).count();
        let done = answers.iter().filter(|answer| answer.status == StatusCode::CREATED).count();
        assert_eq!(refused + done, 4, "{answers:?}");
        assert_eq!(refused == 0, reruns > 0, "{answers:?}");
        let noted = shop.notes().await.iter().filter(|line| line.starts_with(&format!("k{reruns}-"))).count();
        assert_eq!(noted, done);
    }
}

/// The connection dies while the database is committing. What the caller is told is true either way.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_was_lost_is_settled() {
    let server = Postgres::start("");
    let database = server.database();
    // The commit takes half a second, and does not notice who has left.
    server.sql(
        &database,
        "CREATE TABLE notes (line text); \
         CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS \
            'BEGIN PERFORM pg_sleep(0.5); IF NEW.line LIKE ''bad%'' THEN RAISE ''no''; END IF; RETURN NULL; END'; \
         CREATE CONSTRAINT TRIGGER dawdle AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED \
            FOR EACH ROW EXECUTE FUNCTION dawdle()",
    );
    let wire = Proxy::start(server.port()).await.unwrap();
    let shop = OnPostgres::reach(server.url(&database));
    let through = format!("postgres://postgres@127.0.0.1:{}/{database}", wire.port());
    let store = shop.with_options(through.parse().unwrap(), 4).await;
    let config = Config { record_grace: Duration::from_secs(10), ..config() };
    let counter = Counter::new(store, config, sell::<OnPostgres>);
    for (key, status, refused) in [("good", 201, None), ("bad", 503, Some("not-committed"))] {
        let paying = tokio::spawn({
            let counter = counter.clone();
            async move { counter.pay(key).await }
        });
        let committing =
            "SELECT count(*) FROM pg_stat_activity WHERE query ILIKE 'commit%' AND state = 'active'";
        let patience = Instant::now() + Duration::from_secs(30);
        while server.sql(&database, committing) == "0" {
            assert!(Instant::now() < patience, "no commit is under way");
        }
        wire.cut();
        let first = paying.await.unwrap();
        assert_eq!((first.status.as_u16(), first.refused.as_deref()), (status, refused), "{key}: {first:?}");
        assert_eq!(shop.notes().await.contains(&key.to_owned()), status == 201, "{key}");
    }
    let retry = counter.pay("good").await;
    assert_eq!((retry.replayed, retry.body.as_str()), (true, "run 1"));
}

//! The inbox on real databases: what is committed together, and what copies are told.

#![allow(clippy::unwrap_used, missing_docs)]

mod app;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use onlyonce::inbox::{Attempt, Attempted};
use onlyonce::{Inbox, InboxConfig, InboxError, Incoming, NotDone, Processed, Received};
use onlyonce_core::{StoreErrorKind, Transactional};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use app::*;

/// One test on each database.
macro_rules! on_each {
    ($($name:ident;)*) => {
        mod postgres {
            use super::App;
            $(#[tokio::test(flavor = "multi_thread")] async fn $name() {
                super::$name(super::OnPostgres::start().await).await;
            })*
        }
        mod sqlite {
            use super::App;
            $(#[tokio::test(flavor = "multi_thread")] async fn $name() {
                super::$name(super::OnSqlite::start().await).await;
            })*
        }
    };
}

on_each! {
    a_message_that_comes_again_is_a_duplicate_with_the_first_result;
    copies_at_once_run_the_handler_once;
    a_copy_is_no_duplicate_before_the_first_is_committed;
    a_message_to_be_retried_is_received_again;
    a_message_that_failed_for_good_is_a_duplicate_that_tells_so;
    two_consumers_both_process_a_message;
    another_payload_under_the_same_id_is_refused;
    any_text_is_an_id_and_none_is_refused;
    the_transaction_goes_on_after_a_duplicate_and_a_refusal;
    a_transaction_of_ones_own_pool_will_do;
    cleanup_beside_inserts_fails_neither;
    the_table_does_not_grow_by_default;
    what_is_forgotten_is_processed_again;
    an_attempt_counts_before_the_handler_and_survives_its_worker;
    an_attempt_is_kept_up_for_as_long_as_its_handler_runs;
    an_attempt_to_be_retried_frees_the_message_at_once;
    an_attempt_that_failed_for_good_is_a_duplicate_that_tells_so;
    an_attempt_that_lost_its_message_commits_nothing;
    a_commit_whose_answer_was_lost_is_settled;
}

type Tx<A> = <<A as App>::Database as Transactional>::Transaction;

/// Processes the message in a transaction, and says whether it was its first time.
async fn deliver<A: App>(app: &A, inbox: &Inbox<A::Database>, message: Incoming<'_>, line: &str) -> bool {
    let mut tx = app.database().begin(PATIENT).await.unwrap();
    let is_first = match inbox.receive(&mut tx, &message).await.unwrap() {
        Received::First(first) => {
            A::effect(&mut tx, line).await;
            first.done(&mut tx, &line).await.unwrap();
            true
        }
        Received::Duplicate(_) => false,
    };
    app.database().commit(tx).await.unwrap();
    is_first
}

/// What receiving the message says where it is an error; nothing is committed.
async fn refusal<A: App>(app: &A, inbox: &Inbox<A::Database>, message: Incoming<'_>) -> InboxError {
    let mut tx = app.database().begin(PATIENT).await.unwrap();
    let refused = inbox.receive(&mut tx, &message).await.map(|received| format!("{received:?}"));
    app.database().roll_back(tx).await;
    refused.unwrap_err()
}

async fn a_message_that_comes_again_is_a_duplicate_with_the_first_result<A: App>(app: A) {
    let inbox = app.inbox();
    for delivery in 0..3 {
        let mut tx = app.database().begin(PATIENT).await.unwrap();
        let message = Incoming::new("order-4711").payload(b"100");
        let processed = inbox.process(&mut tx, &message, async |tx, execution| {
            assert_eq!(execution.attempt, 1);
            A::effect(tx, "paid").await;
            Ok((7_u32, execution.downstream("receipt").uuid()))
        });
        match processed.await.unwrap() {
            Processed::Done((number, _)) => assert_eq!((delivery, number), (0, 7)),
            Processed::Duplicate(duplicate) => {
                let (number, receipt) = duplicate.result::<(u32, String)>().unwrap();
                assert_eq!((delivery > 0, number, receipt.len()), (true, 7, 36));
                assert!(duplicate.failure().is_none());
                assert!(duplicate.result::<String>().is_err(), "it is not of that type");
            }
        }
        app.database().commit(tx).await.unwrap();
    }
    assert_eq!(app.effects().await, ["paid"]);
}

async fn copies_at_once_run_the_handler_once<A: App>(app: A) {
    let (inbox, app, runs) = (app.inbox(), Arc::new(app), Arc::new(AtomicU32::new(0)));
    let start = Arc::new(Barrier::new(8));
    let mut copies = JoinSet::new();
    for _ in 0..8 {
        let (app, inbox, runs, start) =
            (Arc::clone(&app), inbox.clone(), Arc::clone(&runs), Arc::clone(&start));
        copies.spawn(async move {
            start.wait().await;
            let mut tx = app.database().begin(PATIENT).await.unwrap();
            let message = Incoming::new("order-4711");
            let processed = inbox.process(&mut tx, &message, async |tx, _| {
                runs.fetch_add(1, Ordering::SeqCst);
                A::effect(tx, "paid").await;
                sleep(Duration::from_millis(100)).await;
                Ok(())
            });
            let is_first = matches!(processed.await.unwrap(), Processed::Done(()));
            app.database().commit(tx).await.unwrap();
            is_first
        });
    }
    let told = copies.join_all().await;
    assert_eq!(told.iter().filter(|is_first| **is_first).count(), 1, "{told:?}");
    assert_eq!((runs.load(Ordering::SeqCst), app.effects().await.len()), (1, 1));
}

async fn a_copy_is_no_duplicate_before_the_first_is_committed<A: App>(app: A) {
    let (inbox, message) = (app.inbox(), Incoming::new("order-4711"));
    let mut first_tx = app.database().begin(PATIENT).await.unwrap();
    let Ok(Received::First(first)) = inbox.receive(&mut first_tx, &message).await else {
        panic!("not first")
    };
    first.done(&mut first_tx, &()).await.unwrap();
    // The record is written and not committed. A copy that acknowledged now would lose the message.
    let begun = app.database().begin(Duration::from_millis(300)).await;
    let told = match begun {
        Ok(mut tx) => inbox.receive(&mut tx, &message).await.map(|received| format!("{received:?}")),
        // SQLite lets nobody else begin to write.
        Err(error) => Err(error.into()),
    };
    match told.unwrap_err() {
        InboxError::Busy => {}
        InboxError::Store(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable),
        other => panic!("{other:?}"),
    }
    app.database().roll_back(first_tx).await;
    assert!(deliver(&app, &inbox, message, "paid").await, "the message was lost with its first delivery");
    assert!(!deliver(&app, &inbox, message, "paid").await);
    assert_eq!(app.effects().await, ["paid"]);
}

async fn a_message_to_be_retried_is_received_again<A: App>(app: A) {
    let inbox = app.inbox();
    for asks_again in [true, true, false] {
        let mut tx = app.database().begin(PATIENT).await.unwrap();
        let message = Incoming::new("order-4711");
        let processed = inbox.process(&mut tx, &message, async |tx, _| {
            A::effect(tx, "paid").await;
            if asks_again {
                return Err(NotDone::retry_after(Duration::from_secs(1), "the bank is closed"));
            }
            Ok(())
        });
        match processed.await {
            Ok(Processed::Done(())) => app.database().commit(tx).await.unwrap(),
            Err(InboxError::NotDone(NotDone::RetryLater { after, error })) => {
                assert_eq!(
                    (after, error.to_string().as_str()),
                    (Some(Duration::from_secs(1)), "the bank is closed")
                );
                app.database().roll_back(tx).await;
                assert_eq!(app.effects().await, [""; 0]);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(app.effects().await, ["paid"]);
}

async fn a_message_that_failed_for_good_is_a_duplicate_that_tells_so<A: App>(app: A) {
    let (inbox, message) = (app.inbox(), Incoming::new("order-4711"));
    let mut tx = app.database().begin(PATIENT).await.unwrap();
    let Ok(Received::First(first)) = inbox.receive(&mut tx, &message).await else { panic!("not first") };
    first.failed(&mut tx, "no such account").await.unwrap();
    app.database().commit(tx).await.unwrap();
    let mut tx = app.database().begin(PATIENT).await.unwrap();
    let Ok(Received::Duplicate(duplicate)) = inbox.receive(&mut tx, &message).await else {
        panic!("no duplicate")
    };
    assert_eq!(duplicate.failure().unwrap().read::<String>().unwrap(), "no such account");
    assert!(duplicate.result::<()>().is_err());
    app.database().roll_back(tx).await;
}

async fn two_consumers_both_process_a_message<A: App>(app: A) {
    let message = Incoming::new("order-4711");
    for consumer in ["billing", "shipping"] {
        let inbox = app.inbox_with(consumer, InboxConfig::default());
        assert!(deliver(&app, &inbox, message, consumer).await);
        assert!(!deliver(&app, &inbox, message, consumer).await);
    }
    let elsewhere = InboxConfig { namespace: "other".to_owned(), ..InboxConfig::default() };
    assert!(deliver(&app, &app.inbox_with("billing", elsewhere), message, "elsewhere").await);
    assert_eq!(app.effects().await, ["billing", "elsewhere", "shipping"]);
}

async fn another_payload_under_the_same_id_is_refused<A: App>(app: A) {
    let inbox = app.inbox();
    assert!(deliver(&app, &inbox, Incoming::new("m").payload(b"100"), "100").await);
    assert!(!deliver(&app, &inbox, Incoming::new("m").payload(b"100"), "100").await);
    for other in [Incoming::new("m").payload(b"999"), Incoming::new("m").payload(b""), Incoming::new("m")] {
        let refused = refusal(&app, &inbox, other).await;
        assert!(matches!(refused, InboxError::Mismatch), "{refused:?}");
        let refused = inbox.attempt(&other).await;
        assert!(matches!(refused, Err(InboxError::Mismatch)), "{refused:?}");
    }
    assert_eq!(app.effects().await, ["100"]);
}

async fn any_text_is_an_id_and_none_is_refused<A: App>(app: A) {
    let (inbox, long) = (app.inbox(), "m".repeat(100_000));
    let ids = ["m", "M", " m", "sha256:m", "bestellung-\u{fc}", "a\0b", &long, &long[1..]];
    for id in ids {
        assert!(deliver(&app, &inbox, Incoming::new(id), "x").await, "{id}");
    }
    for id in ids {
        assert!(!deliver(&app, &inbox, Incoming::new(id), "x").await, "{id}");
    }
    let refused = refusal(&app, &inbox, Incoming::new("")).await;
    assert!(matches!(refused, InboxError::NoId), "{refused:?}");
    assert_eq!(app.effects().await.len(), ids.len());
}

async fn the_transaction_goes_on_after_a_duplicate_and_a_refusal<A: App>(app: A) {
    let inbox = app.inbox();
    assert!(deliver(&app, &inbox, Incoming::new("m").payload(b"100"), "m").await);
    let attempted = inbox.attempt(&Incoming::new("held")).await.unwrap();
    // A batch in one transaction: what was processed before is no reason to give up the rest.
    let mut tx = app.database().begin(PATIENT).await.unwrap();
    let told = inbox.receive(&mut tx, &Incoming::new("m").payload(b"100")).await;
    assert!(matches!(told, Ok(Received::Duplicate(_))), "{told:?}");
    let told = inbox.receive(&mut tx, &Incoming::new("m").payload(b"999")).await;
    assert!(matches!(told, Err(InboxError::Mismatch)), "{told:?}");
    let told = inbox.receive(&mut tx, &Incoming::new("held")).await;
    assert!(matches!(told, Err(InboxError::InFlight { .. })), "{told:?}");
    let told = inbox.receive(&mut tx, &Incoming::new("")).await;
    assert!(matches!(told, Err(InboxError::NoId)), "{told:?}");
    for id in ["n", "o"] {
        let received = inbox.receive(&mut tx, &Incoming::new(id)).await;
        let Ok(Received::First(first)) = received else { panic!("{received:?}") };
        A::effect(&mut tx, id).await;
        first.done(&mut tx, &()).await.unwrap();
    }
    app.database().commit(tx).await.unwrap();
    drop(attempted);
    assert_eq!(app.effects().await, ["m", "n", "o"]);
    for id in ["n", "o"] {
        assert!(!deliver(&app, &inbox, Incoming::new(id), id).await);
    }
}

async fn a_transaction_of_ones_own_pool_will_do<A: App>(app: A) {
    let (inbox, message) = (app.inbox(), Incoming::new("m"));
    for commits in [false, true] {
        let mut tx = app.own_transaction().await;
        A::effect(&mut tx, "before").await;
        let Ok(Received::First(first)) = inbox.receive(&mut tx, &message).await else { panic!("not first") };
        A::effect(&mut tx, "after").await;
        first.done(&mut tx, &()).await.unwrap();
        if commits {
            app.database().commit(tx).await.unwrap();
        }
    }
    let mut tx = app.own_transaction().await;
    let told = inbox.receive(&mut tx, &message).await;
    assert!(matches!(told, Ok(Received::Duplicate(_))), "{told:?}");
    A::effect(&mut tx, "later").await;
    app.database().commit(tx).await.unwrap();
    assert_eq!(app.effects().await, ["after", "before", "later"]);
}

/// Records expire as fast as they are written, and are swept by several at once.
async fn cleanup_beside_inserts_fails_neither<A: App>(app: A) {
    let brief = InboxConfig {
        lease: Duration::from_millis(1),
        retention: Duration::from_millis(1),
        sweep_every: None,
        ..InboxConfig::default()
    };
    let (inbox, app, over) = (app.inbox_with("billing", brief), Arc::new(app), CancellationToken::new());
    let mut consumers = JoinSet::new();
    for consumer in 0..4 {
        let (app, inbox) = (Arc::clone(&app), inbox.clone());
        consumers.spawn(async move {
            for number in 0..60 {
                // Ids come again, so that an insert meets the row that a sweep is about to take.
                let id = format!("m{}", (number + consumer) % 20);
                deliver(&*app, &inbox, Incoming::new(&id), "x").await;
            }
        });
    }
    let mut sweepers = JoinSet::new();
    for _ in 0..2 {
        let (store, over) = (app.database().store(), over.clone());
        sweepers.spawn(async move {
            let mut swept = 0;
            while !over.is_cancelled() {
                swept += store.sweep(10).await.unwrap();
            }
            swept
        });
    }
    // A deadlock, or a sweep and an insert that wait for each other, fails one of them.
    timeout(Duration::from_secs(120), consumers.join_all()).await.expect("the consumers end");
    over.cancel();
    assert!(sweepers.join_all().await.iter().sum::<u64>() > 0, "nothing was swept meanwhile");
    sleep(Duration::from_millis(10)).await;
    while app.database().store().sweep(1_000).await.unwrap() > 0 {}
    assert_eq!(app.rows().await, 0);
}

async fn the_table_does_not_grow_by_default<A: App>(app: A) {
    assert_eq!(InboxConfig::default().retention, Duration::from_secs(7 * 86_400));
    assert!(InboxConfig::default().sweep_every.is_some());
    let config = InboxConfig {
        lease: Duration::from_millis(500),
        retention: Duration::from_millis(500),
        sweep_every: Some(Duration::from_millis(100)),
        ..InboxConfig::default()
    };
    let inbox = app.inbox_with("billing", config);
    for number in 0..50 {
        assert!(deliver(&app, &inbox, Incoming::new(&number.to_string()), "x").await);
    }
    let swept = async {
        while app.rows().await > 0 {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(30), swept).await.expect("nobody called anything, and it is swept");
}

async fn what_is_forgotten_is_processed_again<A: App>(app: A) {
    // Which is why a retention within the time of redeliveries is refused.
    let config = |retention, horizon| InboxConfig {
        retention: Duration::from_secs(retention),
        redelivery_horizon: Some(Duration::from_secs(horizon)),
        ..InboxConfig::default()
    };
    assert!(config(101, 100).check().is_ok());
    for retention in [99, 100] {
        let error = config(retention, 100).check().unwrap_err();
        assert_eq!(error.setting, "retention");
        assert!(error.to_string().contains("must exceed 100s"), "{error}");
        assert!(Inbox::new(app.database().clone(), "billing", config(retention, 100)).is_err());
    }
    assert!(Inbox::new(app.database().clone(), "", InboxConfig::default()).is_err());
    let brief = Duration::from_millis(300);
    let config = InboxConfig { lease: brief, retention: brief, sweep_every: None, ..InboxConfig::default() };
    let inbox = app.inbox_with("billing", config);
    assert!(deliver(&app, &inbox, Incoming::new("m"), "first").await);
    sleep(brief * 2).await;
    assert!(deliver(&app, &inbox, Incoming::new("m"), "second").await);
}

async fn run<A: App>(inbox: &Inbox<A::Database>, id: &str) -> Attempt<A::Database> {
    match inbox.attempt(&Incoming::new(id)).await.unwrap() {
        Attempted::Run(attempt) => attempt,
        other => panic!("{other:?}"),
    }
}

/// Waits until the message is free, however long the lease of a dead worker lasts.
async fn run_when_free<A: App>(inbox: &Inbox<A::Database>, id: &str) -> Attempt<A::Database> {
    loop {
        match inbox.attempt(&Incoming::new(id)).await {
            Ok(Attempted::Run(attempt)) => return attempt,
            Err(InboxError::InFlight { lease_left }) => {
                sleep(lease_left.min(Duration::from_millis(100))).await;
            }
            other => panic!("{other:?}"),
        }
    }
}

async fn done<A: App>(app: &A, attempt: Attempt<A::Database>, line: &str) -> Result<(), InboxError> {
    let mut tx: Tx<A> = app.database().open().await.unwrap();
    A::effect(&mut tx, line).await;
    attempt.done(tx, &line).await
}

fn brief_lease() -> InboxConfig {
    InboxConfig { lease: Duration::from_secs(1), ..InboxConfig::default() }
}

async fn an_attempt_counts_before_the_handler_and_survives_its_worker<A: App>(app: A) {
    let inbox = app.inbox_with("billing", brief_lease());
    for died in 1..=2 {
        let attempt = run_when_free::<A>(&inbox, "m").await;
        assert_eq!(attempt.execution().attempt, died);
        assert_eq!(inbox.attempts("m").await.unwrap(), died);
        let mut tx: Tx<A> = app.database().open().await.unwrap();
        A::effect(&mut tx, "died").await;
        // As a process that was killed: neither committed nor ended.
        drop((tx, attempt));
        let told = inbox.attempt(&Incoming::new("m")).await;
        assert!(matches!(told, Err(InboxError::InFlight { .. })), "{told:?}");
    }
    let attempt = run_when_free::<A>(&inbox, "m").await;
    assert_eq!(attempt.execution().attempt, 3, "attempts that died count");
    assert_eq!(inbox.attempts("another").await.unwrap(), 0);
    done(&app, attempt, "paid").await.unwrap();
    let told = inbox.attempt(&Incoming::new("m")).await;
    assert!(matches!(told, Ok(Attempted::Duplicate(_))), "{told:?}");
    // Both forms of an inbox know of it.
    assert!(!deliver(&app, &inbox, Incoming::new("m"), "paid").await);
    assert_eq!(app.effects().await, ["paid"]);
}

async fn an_attempt_is_kept_up_for_as_long_as_its_handler_runs<A: App>(app: A) {
    let inbox = app.inbox_with("billing", brief_lease());
    let mut attempt = run::<A>(&inbox, "m").await;
    attempt.during(sleep(Duration::from_secs(3))).await;
    let told = inbox.attempt(&Incoming::new("m")).await;
    assert!(matches!(told, Err(InboxError::InFlight { .. })), "{told:?}");
    done(&app, attempt, "paid").await.unwrap();
    assert_eq!(app.effects().await, ["paid"]);
}

async fn an_attempt_to_be_retried_frees_the_message_at_once<A: App>(app: A) {
    let inbox = app.inbox();
    for number in 1..=3 {
        let attempt = run::<A>(&inbox, "m").await;
        assert_eq!(attempt.execution().attempt, number);
        attempt.again().await;
        assert_eq!(inbox.attempts("m").await.unwrap(), number);
    }
    // One that was not made after all is forgotten with those before it.
    run::<A>(&inbox, "m").await.release().await;
    assert_eq!(inbox.attempts("m").await.unwrap(), 0);
    assert_eq!(run::<A>(&inbox, "m").await.execution().attempt, 1);
    let inbox = app.inbox_with("shipping", InboxConfig::default());
    done(&app, run::<A>(&inbox, "m").await, "paid").await.unwrap();
}

async fn an_attempt_that_failed_for_good_is_a_duplicate_that_tells_so<A: App>(app: A) {
    let inbox = app.inbox();
    assert!(run::<A>(&inbox, "m").await.failed("no such account").await);
    let told = inbox.attempt(&Incoming::new("m")).await.unwrap();
    let Attempted::Duplicate(duplicate) = told else { panic!("{told:?}") };
    assert_eq!(duplicate.failure().unwrap().read::<String>().unwrap(), "no such account");
}

async fn an_attempt_that_lost_its_message_commits_nothing<A: App>(app: A) {
    let inbox = app.inbox_with("billing", brief_lease());
    let stalled = run::<A>(&inbox, "m").await;
    // Nobody kept it up.
    let successor = run_when_free::<A>(&inbox, "m").await;
    let told = done(&app, stalled, "stalled").await;
    assert!(matches!(told, Err(InboxError::LeaseLost)), "{told:?}");
    done(&app, successor, "paid").await.unwrap();
    assert_eq!(app.effects().await, ["paid"]);
}

async fn a_commit_whose_answer_was_lost_is_settled<A: App>(app: A) {
    for commits in [true, false] {
        let deaf = Deaf { database: app.database().clone(), commits };
        let inbox = Inbox::new(deaf.clone(), "billing", InboxConfig::default()).unwrap();
        let id = if commits { "committed" } else { "lost" };
        let Ok(Attempted::Run(attempt)) = inbox.attempt(&Incoming::new(id)).await else { panic!("held") };
        let mut tx = deaf.open().await.unwrap();
        A::effect(&mut tx, id).await;
        let told = attempt.done(tx, &()).await;
        assert_eq!(told.is_ok(), commits, "{told:?}");
        match inbox.attempt(&Incoming::new(id)).await.unwrap() {
            Attempted::Duplicate(_) => assert!(commits),
            // At once: nobody waits for a lease.
            Attempted::Run(attempt) => assert_eq!((commits, attempt.execution().attempt), (false, 2)),
        }
    }
    assert_eq!(app.effects().await, ["committed"]);
}

/// On Postgres a transaction that Onlyonce did not open waits as its own settings say.
#[tokio::test(flavor = "multi_thread")]
async fn in_a_transaction_of_ones_own_a_copy_waits_as_its_lock_timeout_says() {
    let app = OnPostgres::start().await;
    let (inbox, message) = (app.inbox(), Incoming::new("m"));
    let mut first_tx = app.own_transaction().await;
    let Ok(Received::First(_)) = inbox.receive(&mut first_tx, &message).await else { panic!("not first") };
    let mut tx = app.own_transaction().await;
    sqlx::query("SET LOCAL lock_timeout = '200ms'").execute(&mut *tx).await.unwrap();
    let told = inbox.receive(&mut tx, &message).await;
    assert!(matches!(told, Err(InboxError::Busy)), "{told:?}");
    drop(tx);
    drop(first_tx);
    assert!(deliver(&app, &inbox, message, "paid").await);
}

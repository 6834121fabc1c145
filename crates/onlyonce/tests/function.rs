//! A function, run once for each key.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use http::StatusCode;
use onlyonce::function::NotReplayable;
use onlyonce::settings::{OnConcurrent, SettingsError};
use onlyonce::{Failed, FunctionConfig, Once, Returned, RunError};
use onlyonce_conformance::{Fault, Faulty};
use onlyonce_core::machine::{self, Finish};
use onlyonce_core::outcome::Response;
use onlyonce_core::{
    Key, Lapse, MemoryStore, Operation, Outcome, Policy, Recorded, Revision, Store, Timestamp, Verdict,
};
use serde::{Deserialize, Serialize, Serializer};
use tokio::time::{Instant, sleep, timeout};

type Answer = Result<Returned<String>, RunError>;

/// A function that counts how often it was started.
#[derive(Clone)]
struct App {
    store: Arc<dyn Store>,
    once: Once,
    runs: Arc<AtomicU32>,
}

impl App {
    fn new() -> Self {
        Self::under(FunctionConfig::default())
    }

    /// On a store whose clock is tokio's, so that paused time passes for both.
    fn under(config: FunctionConfig) -> Self {
        let started = Instant::now();
        let clock = move || Timestamp(1_000_000).plus(started.elapsed());
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_clock(clock));
        let once = Once::new(Arc::clone(&store), "charge", config).unwrap();
        Self { store, once, runs: Arc::default() }
    }

    /// The same function on the same data, over a way that fails.
    fn over(&self, fault: Fault, failing: std::ops::Range<u64>) -> (Self, Arc<Faulty>) {
        let faulty = Arc::new(Faulty::new(Arc::clone(&self.store), fault, failing));
        let once = Once::new(Arc::clone(&faulty), "charge", FunctionConfig::default()).unwrap();
        (Self { once, ..self.clone() }, faulty)
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }

    /// Work that takes so long and then says which run it was.
    fn take(&self, time: Duration) -> BoxFuture<'static, Answer> {
        self.end(time, |run| Ok(format!("run {run}")))
    }

    /// Work that takes so long and then ends as told.
    fn end<E>(&self, time: Duration, end: E) -> BoxFuture<'static, Answer>
    where
        E: FnOnce(u32) -> Result<String, Failed> + Send + 'static,
    {
        self.call(&100, time, end)
    }

    fn call<I, E>(&self, input: &I, time: Duration, end: E) -> BoxFuture<'static, Answer>
    where
        I: Serialize + 'static,
        E: FnOnce(u32) -> Result<String, Failed> + Send + 'static,
    {
        let runs = Arc::clone(&self.runs);
        let called = self.once.run(key(), input, move |_| async move {
            let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
            sleep(time).await;
            end(run)
        });
        called.boxed()
    }

    async fn again(&self) -> Answer {
        self.take(Duration::ZERO).await
    }
}

fn key() -> Key {
    Key::new("order-4711").unwrap()
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const LEASE: Duration = Duration::from_secs(75);

fn fresh(value: &str, attempt: u32) -> Returned<String> {
    Returned { value: value.to_owned(), replayed: false, attempt }
}

fn replay(value: &str, attempt: u32) -> Returned<String> {
    Returned { replayed: true, ..fresh(value, attempt) }
}

#[tokio::test(start_paused = true)]
async fn a_later_call_is_given_the_first_value() {
    let app = App::new();
    assert_eq!(app.take(secs(1)).await.unwrap(), fresh("run 1", 1));
    sleep(secs(3_600)).await;
    assert_eq!(app.again().await.unwrap(), replay("run 1", 1));
    assert_eq!(app.runs(), 1);
    sleep(secs(86_400)).await;
    assert_eq!(app.again().await.unwrap(), fresh("run 2", 1), "it is forgotten after its retention");
}

#[tokio::test(start_paused = true)]
async fn another_input_is_refused_in_every_state() {
    let app = App::new();
    let first = tokio::spawn(app.take(secs(10)));
    sleep(secs(1)).await;
    for _ in 0..2 {
        let other = app.call(&101, Duration::ZERO, |_| Ok(String::new())).await;
        assert!(matches!(other, Err(RunError::Mismatch)), "{other:?}");
        sleep(secs(20)).await;
    }
    assert_eq!(first.await.unwrap().unwrap(), fresh("run 1", 1));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn of_64_copies_one_runs_and_the_others_are_told_so() {
    let app = App::new();
    let calls = join_all((0..64).map(|_| tokio::spawn(app.take(secs(10))))).await;
    let mut in_flight = 0;
    for call in calls {
        match call.unwrap() {
            Ok(returned) => assert_eq!(returned, fresh("run 1", 1)),
            Err(RunError::InFlight { running_for, lease_left }) => {
                assert!(running_for < secs(1) && lease_left > secs(74), "{running_for:?} {lease_left:?}");
                in_flight += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!((app.runs(), in_flight), (1, 63));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_waiting_copies_one_runs_and_all_are_given_its_value() {
    let app = App::under(FunctionConfig { on_concurrent: OnConcurrent::Wait, ..FunctionConfig::default() });
    let calls = join_all((0..64).map(|_| tokio::spawn(app.take(Duration::from_millis(50))))).await;
    let values: Vec<_> = calls.into_iter().map(|call| call.unwrap().unwrap()).collect();
    assert!(values.iter().all(|returned| returned.value == "run 1"));
    assert_eq!(values.iter().filter(|returned| !returned.replayed).count(), 1);
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_copy_waits_no_longer_than_it_was_told() {
    let app = App::under(FunctionConfig { on_concurrent: OnConcurrent::Wait, ..FunctionConfig::default() });
    let first = tokio::spawn(app.take(secs(30)));
    sleep(secs(1)).await;
    let asked = Instant::now();
    assert!(matches!(app.again().await, Err(RunError::InFlight { .. })));
    assert_eq!(asked.elapsed().as_secs(), 10);
    assert_eq!(first.await.unwrap().unwrap(), fresh("run 1", 1));
}

#[tokio::test(start_paused = true)]
async fn a_waiting_copy_runs_what_the_first_released() {
    let app = App::under(FunctionConfig { on_concurrent: OnConcurrent::Wait, ..FunctionConfig::default() });
    let first = tokio::spawn(app.end(secs(5), |_| Err(Failed::release("not now"))));
    sleep(secs(1)).await;
    assert_eq!(app.again().await.unwrap(), fresh("run 2", 1));
    assert!(matches!(first.await.unwrap(), Err(RunError::Released(_))));
}

#[tokio::test(start_paused = true)]
async fn the_work_goes_on_without_its_caller() {
    let app = App::new();
    timeout(secs(1), app.take(secs(10))).await.expect_err("the caller gives up");
    assert!(matches!(app.again().await, Err(RunError::InFlight { .. })));
    sleep(secs(10)).await;
    assert_eq!(app.again().await.unwrap(), replay("run 1", 1));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_never_awaited_does_nothing() {
    let app = App::new();
    drop(app.take(secs(10)));
    sleep(secs(1)).await;
    assert_eq!(app.runs(), 0);
    assert_eq!(app.again().await.unwrap(), fresh("run 1", 1));
}

#[tokio::test(start_paused = true)]
async fn a_panic_reaches_the_caller_and_releases_the_key() {
    let app = App::new();
    let panicked = tokio::spawn(app.end(secs(1), |_| panic!("on purpose"))).await.unwrap_err().into_panic();
    assert_eq!(panicked.downcast_ref::<&str>(), Some(&"on purpose"));
    assert_eq!(app.again().await.unwrap(), fresh("run 2", 1));
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
enum Declined {
    NoFunds { missing: u64 },
}

#[tokio::test(start_paused = true)]
async fn a_kept_error_is_the_error_of_every_call() {
    let app = App::new();
    let decline = |_| Err(Failed::keep(&Declined::NoFunds { missing: 7 }));
    for replayed in [false, true, true] {
        let Err(RunError::Kept(kept)) = app.end(secs(1), decline).await else { panic!("not kept") };
        assert_eq!(kept.read::<Declined>().unwrap(), Declined::NoFunds { missing: 7 });
        assert_eq!((kept.replayed, kept.attempt), (replayed, 1));
        assert!(kept.read::<u64>().is_err());
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_released_key_runs_again_at_once() {
    let app = App::new();
    let Err(RunError::Released(error)) = app.end(secs(1), |_| Err(Failed::release("no route"))).await else {
        panic!("not released")
    };
    assert_eq!(error.to_string(), "no route");
    assert_eq!(app.again().await.unwrap(), fresh("run 2", 1));
}

#[tokio::test(start_paused = true)]
async fn an_error_that_nobody_classified_leaves_the_key_to_its_lease() {
    let app = App::new();
    let lost = |_| Err(io::Error::from(io::ErrorKind::ConnectionReset))?;
    // The lease was renewed at 25 s.
    let Err(RunError::Failed { error, lease_left }) = app.end(secs(30), lost).await else {
        panic!("not left")
    };
    assert!(error.downcast_ref::<io::Error>().is_some());
    assert_eq!(lease_left, secs(70));
    sleep(lease_left - secs(1)).await;
    assert!(matches!(app.again().await, Err(RunError::InFlight { .. })));
    sleep(secs(1)).await;
    assert_eq!(app.again().await.unwrap(), fresh("run 2", 2));
    assert_eq!(app.again().await.unwrap(), replay("run 2", 2), "the attempt is remembered");
}

#[tokio::test(start_paused = true)]
async fn under_hold_it_is_left_to_an_operator() {
    let app = App::under(FunctionConfig { on_lapse: Lapse::Hold, ..FunctionConfig::default() });
    assert!(matches!(app.end(secs(1), |_| Err(Failed::unknown("lost"))).await, Err(RunError::Failed { .. })));
    sleep(LEASE).await;
    assert!(matches!(app.again().await, Err(RunError::OutcomeUnknown)));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_lease_is_renewed_for_as_long_as_the_work_runs() {
    let app = App::new();
    let first = tokio::spawn(app.take(20 * LEASE));
    for minute in 1..25 {
        sleep(secs(60)).await;
        match app.again().await {
            Err(RunError::InFlight { running_for, lease_left }) => {
                assert_eq!(running_for.as_secs(), 60 * minute);
                assert!(lease_left > LEASE / 2, "{lease_left:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(first.await.unwrap().unwrap(), fresh("run 1", 1));
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_failed_is_tried_again_before_the_lease_ends() {
    let app = App::new();
    // At 25 s, 31.25 s and 37.5 s.
    let (faulty, _) = app.over(Fault::Refused, 1..4);
    let first = tokio::spawn(faulty.take(secs(200)));
    for _ in 0..19 {
        sleep(secs(10)).await;
        assert!(matches!(app.again().await, Err(RunError::InFlight { .. })));
    }
    assert_eq!(first.await.unwrap().unwrap(), fresh("run 1", 1));
}

/// In real time, on a runtime that has other things to do: an idle one may leave its timers to the blocked thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn work_that_blocks_its_thread_keeps_its_lease() {
    let lease = secs(1);
    let app = App::under(FunctionConfig { lease, ..FunctionConfig::default() });
    let busy = tokio::spawn(async {
        loop {
            tokio::task::yield_now().await;
        }
    });
    let first = tokio::spawn(app.end(Duration::ZERO, move |run| {
        std::thread::sleep(3 * lease);
        Ok(format!("run {run}"))
    }));
    sleep(2 * lease).await;
    let copy = app.again().await;
    assert!(matches!(copy, Err(RunError::InFlight { .. })), "{copy:?}");
    assert_eq!(first.await.unwrap().unwrap(), fresh("run 1", 1));
    busy.abort();
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_lost_its_lease_is_told_so_and_changes_nothing() {
    let app = App::new();
    // Its renewals, at 25 s and every 6.25 s from then on, fail until the lease is long over.
    let (cut_off, _) = app.over(Fault::Refused, 1..20);
    let first = tokio::spawn(cut_off.take(secs(200)));
    sleep(secs(100)).await;
    assert_eq!(app.again().await.unwrap(), fresh("run 2", 2), "the key is free after the lease");
    assert!(matches!(first.await.unwrap(), Err(RunError::LeaseLost)));
    assert_eq!(app.again().await.unwrap(), replay("run 2", 2));
}

#[tokio::test(start_paused = true)]
async fn a_late_holder_is_recorded_if_nobody_took_over() {
    let app = App::new();
    let (cut_off, _) = app.over(Fault::Refused, 1..20);
    assert_eq!(cut_off.take(secs(200)).await.unwrap(), fresh("run 1", 1));
    assert_eq!(app.again().await.unwrap(), replay("run 1", 1));
}

#[tokio::test(start_paused = true)]
async fn without_the_store_nothing_runs() {
    let app = App::new();
    let (cut_off, _) = app.over(Fault::Refused, 0..u64::MAX);
    assert!(matches!(cut_off.again().await, Err(RunError::StoreUnavailable(_))));
    assert_eq!(app.runs(), 0);
    assert_eq!(app.again().await.unwrap(), fresh("run 1", 1));
}

#[tokio::test(start_paused = true)]
async fn a_result_is_held_back_for_record_grace_while_it_cannot_be_recorded() {
    let app = App::new();
    // Tries after 50, 100, 200, 400, 800 ms and every second.
    let (cut_off, _) = app.over(Fault::Refused, 1..12);
    let asked = Instant::now();
    assert_eq!(cut_off.take(secs(10)).await.unwrap(), fresh("run 1", 1));
    assert_eq!(asked.elapsed().as_secs(), 12);
    assert!(matches!(app.again().await, Err(RunError::InFlight { .. })));
    // The store is back, and is told.
    cut_off.once.drained().await;
    assert!(asked.elapsed() < LEASE);
    assert_eq!(app.again().await.unwrap(), replay("run 1", 1));
    assert_eq!(app.runs(), 1);
}

/// Whichever calls fail: the work runs at most once while its holder lives, and what a caller was told stays true.
#[tokio::test(start_paused = true)]
async fn any_fault_at_any_call_is_survived() {
    let mut reached = 0;
    for (first, failing) in (0..8).flat_map(|first| [(first, 1), (first, 2)]) {
        for fault in Fault::ALL {
            for end in [End::Value, End::Keep, End::Release] {
                let told = format!("{failing} {fault:?} from call {first}, {end:?}");
                let app = App::new();
                let (faulty, calls) = app.over(fault, first..first + failing);
                // Long enough for one renewal.
                let answer = faulty.end(secs(30), move |run| end.of(run)).await;
                let ran = app.runs();
                sleep(LEASE).await;
                let later = app.again().await;
                reached += u32::from(calls.calls() > first);
                match (answer, later) {
                    (Ok(returned), Ok(later)) if returned.value == "run 1" => {
                        assert_eq!((later, ran, app.runs()), (replay("run 1", 1), 1, 1), "{told}");
                    }
                    (Err(RunError::Kept(_)), Err(RunError::Kept(later))) => {
                        assert_eq!((later.read::<u32>().unwrap(), ran, app.runs()), (1, 1, 1), "{told}");
                    }
                    (Err(RunError::Released(_)), Ok(later)) => {
                        assert_eq!((later, ran), (fresh("run 2", 1), 1), "{told}");
                    }
                    // Nothing ran, and nothing is stuck.
                    (Err(RunError::StoreUnavailable(_)), Ok(later)) => {
                        assert_eq!((later.value.as_str(), ran, app.runs()), ("run 1", 0, 1), "{told}");
                    }
                    other => panic!("{told}: {other:?}"),
                }
            }
        }
    }
    assert!(reached > 0);
}

#[derive(Clone, Copy, Debug)]
enum End {
    Value,
    Keep,
    Release,
}

impl End {
    fn of(self, run: u32) -> Result<String, Failed> {
        match self {
            Self::Value => Ok(format!("run {run}")),
            Self::Keep => Err(Failed::keep(&run)),
            Self::Release => Err(Failed::release("not now")),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn name_namespace_and_caller_are_part_of_the_identity() {
    let app = App::new();
    app.again().await.unwrap();
    let other = FunctionConfig { namespace: "other".into(), ..FunctionConfig::default() };
    for once in [
        Once::new(Arc::clone(&app.store), "refund", FunctionConfig::default()).unwrap(),
        Once::new(Arc::clone(&app.store), "charge", other).unwrap(),
        app.once.for_caller("ann"),
        app.once.for_caller("bob"),
    ] {
        let returned = App { once, ..app.clone() }.again().await.unwrap();
        assert!(!returned.replayed, "{returned:?}");
    }
    assert!(app.again().await.unwrap().replayed);
    assert_eq!(app.runs(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_downstream_key_is_the_same_on_every_attempt() {
    let app = App::new();
    let charge = |end: Result<(), &'static str>| {
        app.once.run(key(), &100, move |execution| async move {
            let keys = [execution.downstream("charge").uuid(), execution.downstream("email").uuid()];
            // The first attempt ends after its charge was made and its answer lost.
            end.map_err(|_| Failed::unknown(keys[0].clone()))?;
            Ok((execution.attempt, keys))
        })
    };
    let Err(RunError::Failed { error, .. }) = charge(Err("lost")).await else { panic!("not left") };
    sleep(LEASE).await;
    let Returned { value: (attempt, [charged, mailed]), .. } = charge(Ok(())).await.unwrap();
    assert_eq!((attempt, &charged), (2, &error.to_string()));
    assert_ne!(charged, mailed);
    let operation = Operation::new("default", "charge", "", key());
    assert_eq!(charged, operation.downstream("charge").uuid());
}

/// Completes the running key by hand, as an operator would.
async fn complete(app: &App, outcome: Outcome) {
    let id = Operation::new("default", "charge", "", key()).id();
    let seen = app.store.read(id).await.unwrap().unwrap();
    let policy = Policy { lease: LEASE, retention: secs(86_400), on_lapse: Lapse::Rerun };
    let finish = machine::finish(&seen.record, Verdict::Keep(outcome), Revision::fresh(), &policy);
    let Finish::Complete(write) = finish else { panic!("{finish:?}") };
    app.store.replace(id, seen.record.revision, write).await.unwrap();
}

async fn left(app: &App) {
    app.end(Duration::ZERO, |_| Err(Failed::unknown("lost"))).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn what_is_no_value_of_this_type_is_an_error_and_never_a_rerun() {
    let app = App::new();
    left(&app).await;
    let response = Response { status: StatusCode::CREATED, ..Response::default() };
    complete(&app, Recorded::Response(response).encode()).await;
    let answer = app.again().await;
    let Err(RunError::NotReplayable(NotReplayable::Response { status: 201 })) = answer else {
        panic!("{answer:?}")
    };

    complete(&app, Outcome { status: 0, head: vec![9, 3].into(), body: "1".into() }).await;
    let answer = app.again().await;
    assert!(matches!(answer, Err(RunError::NotReplayable(NotReplayable::Unreadable(_)))), "{answer:?}");

    let value = onlyonce_core::outcome::Value { attempt: 1, is_error: false, json: "1".into() };
    complete(&app, Recorded::Value(value).encode()).await;
    let answer = app.again().await;
    assert!(matches!(answer, Err(RunError::NotReplayable(NotReplayable::OtherType(_)))), "{answer:?}");
    let answer = app.once.run(key(), &100, |_| async { Ok(2_u32) }).await.unwrap();
    assert_eq!(answer, Returned { value: 1, replayed: true, attempt: 1 });
    assert_eq!(app.runs(), 1);
}

/// Serialises as long as it is `true`.
#[derive(Debug, PartialEq, Deserialize)]
struct Serialises(bool);

impl Serialize for Serialises {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            true => serializer.serialize_bool(true),
            false => Err(serde::ser::Error::custom("it does not")),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_value_that_does_not_serialise_is_returned_once_and_not_run_again() {
    let app = App::new();
    let runs = Arc::new(AtomicU32::new(0));
    let call = || {
        let runs = Arc::clone(&runs);
        app.once.run(key(), &100, |_| async move {
            runs.fetch_add(1, Ordering::SeqCst);
            Ok(Serialises(false))
        })
    };
    assert_eq!(call().await.unwrap().value, Serialises(false));
    assert!(matches!(call().await, Err(RunError::NotReplayable(NotReplayable::NotKept))));
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn an_error_that_does_not_serialise_is_not_run_again() {
    let app = App::new();
    for _ in 0..2 {
        let answer = app.end(Duration::ZERO, |_| Err(Failed::keep(&Serialises(false)))).await;
        assert!(matches!(answer, Err(RunError::NotReplayable(NotReplayable::NotKept))), "{answer:?}");
    }
    assert_eq!(app.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_input_that_does_not_serialise_is_refused() {
    let app = App::new();
    let answer = app.call(&Serialises(false), Duration::ZERO, |_| Ok(String::new())).await;
    assert!(matches!(answer, Err(RunError::Input(_))), "{answer:?}");
    assert_eq!(app.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_work_that_is_running() {
    let app = App::new();
    timeout(secs(1), app.take(secs(10))).await.expect_err("the caller gives up");
    let asked = Instant::now();
    app.once.drained().await;
    assert_eq!(asked.elapsed().as_secs(), 9);
    assert!(app.again().await.unwrap().replayed);
}

#[test]
fn what_cannot_be_is_refused() {
    let of = |config| Once::new(MemoryStore::new(), "charge", config).err().map(|e: SettingsError| e.setting);
    let default = FunctionConfig::default;
    assert_eq!(of(default()), None);
    assert_eq!(
        (default().lease, default().retention, default().record_grace),
        (LEASE, secs(86_400), secs(2))
    );
    assert_eq!(of(FunctionConfig { lease: Duration::ZERO, ..default() }), Some("lease"));
    assert_eq!(of(FunctionConfig { retention: LEASE - secs(1), ..default() }), Some("retention"));
    assert_eq!(of(FunctionConfig { wait: Duration::MAX, ..default() }), Some("wait"));
    assert_eq!(of(FunctionConfig { record_grace: Duration::MAX, ..default() }), Some("record_grace"));
    assert_eq!(of(FunctionConfig { record_grace: Duration::ZERO, ..default() }), None);
    assert_eq!(of(FunctionConfig { namespace: String::new(), ..default() }), Some("namespace"));
    assert!(Once::new(MemoryStore::new(), "", default()).is_err());
}

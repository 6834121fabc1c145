//! Claims with a million expired keys in the table, quiet and during the sweep, in turns.

use std::time::Duration;

use onlyonce_core::record::NewState;
use onlyonce_core::{Fingerprint, Key, Operation, Revision, Store, Write};
use onlyonce_postgres::{PostgresOptions, PostgresStore};
use onlyonce_testkit::Postgres;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::{TURN, percentile};

const ROUNDS: usize = 5;
const CONCURRENT: usize = 16;
const EXPIRED_ROWS: u32 = 1_000_000;
/// More than a turn's sweep gets through.
const SWEPT_ROWS_MAX: u64 = 190_000;

pub(crate) async fn measure() {
    let server = Postgres::start("");
    let database = server.database();
    let options: PostgresOptions = server.url(&database).parse().expect("the testkit's URL");
    let claims = PostgresStore::open(&options).await.expect("a private server");
    let sweeps = PostgresStore::open(&options).await.expect("a private server");
    fill(&server, &database, &claims).await;
    let (mut quiet, mut swept) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        claim_for_a_turn(&claims, &format!("quiet-{round}"), &mut quiet).await;
        let sweeping = tokio::spawn(sweep(sweeps.clone()));
        claim_for_a_turn(&claims, &format!("swept-{round}"), &mut swept).await;
        let ended_early = sweeping.is_finished();
        let rows = sweeping.await.expect("no panic");
        println!("round {round}: {rows} rows swept{}", if ended_early { ", ended early" } else { "" });
    }
    for (name, times) in [("quiet", &mut quiet), ("during a sweep", &mut swept)] {
        times.sort();
        let (p50, p99) = (percentile(times, 50), percentile(times, 99));
        println!("{name}: {} claims, p50 {p50:?}, p99 {p99:?}", times.len());
    }
}

async fn fill(server: &Postgres, database: &str, store: &PostgresStore) {
    store.insert(&operation("template"), expired()).await.expect("inserted");
    let fill = format!(
        "INSERT INTO onlyonce.idempotency_keys \
         SELECT created_at, granted_at, expires_at, sweep_at, lease_until, completed_at, attempt, status, \
            sha256(n::text::bytea), revision, fingerprint_target, fingerprint_body, namespace, endpoint, caller, \
            'k' || n, head, body \
         FROM onlyonce.idempotency_keys, generate_series(1, {EXPIRED_ROWS}) n"
    );
    server.sql(database, &fill);
    server.sql(database, "VACUUM ANALYZE onlyonce.idempotency_keys");
}

async fn sweep(store: PostgresStore) -> u64 {
    let started = Instant::now();
    let mut removed = 0;
    while removed < SWEPT_ROWS_MAX && started.elapsed() < TURN {
        removed += store.sweep(1_000).await.expect("a sweep waits for nobody");
    }
    removed
}

async fn claim_for_a_turn(store: &PostgresStore, name: &str, times: &mut Vec<Duration>) {
    let started = Instant::now();
    let mut claiming = JoinSet::new();
    for claimant in 0..CONCURRENT {
        let (store, name) = (store.clone(), format!("{name}-{claimant}"));
        claiming.spawn(async move {
            let mut times = Vec::new();
            while started.elapsed() < TURN {
                let asked = Instant::now();
                let payment = operation(&format!("{name}-{}", times.len()));
                store.insert(&payment, running()).await.expect("inserted");
                times.push(asked.elapsed());
            }
            times
        });
    }
    times.extend(claiming.join_all().await.into_iter().flatten());
}

fn operation(key: &str) -> Operation {
    Operation::new("default", "POST /payments", "ann", Key::new(key).expect("a valid key"))
}

fn running() -> Write {
    Write {
        fingerprint: Fingerprint { target: [1; 32], body: [2; 32] },
        revision: Revision::fresh(),
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: Duration::from_secs(75) },
        retention: Duration::from_secs(86_400),
    }
}

fn expired() -> Write {
    let state = NewState::Running { lease: Duration::ZERO };
    Write { state, retention: Duration::ZERO, ..running() }
}

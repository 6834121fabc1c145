//! The store against a real server: what it refuses, what it writes, and what happens when things break.

#![allow(clippy::unwrap_used, missing_docs)]

mod faults;
mod open;
mod sweep;
mod transact;
mod writes;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use onlyonce_core::record::NewState;
use onlyonce_core::{Fingerprint, Key, Operation, Outcome, Revision, Write};
use onlyonce_postgres::{PostgresOptions, PostgresStore};
use onlyonce_testkit::Postgres;

fn server() -> &'static Postgres {
    Postgres::shared()
}

fn options(url: &str) -> PostgresOptions {
    url.parse().unwrap()
}

async fn open(url: &str) -> PostgresStore {
    PostgresStore::open(&options(url)).await.unwrap()
}

fn operation(key: &str) -> Operation {
    operation_of("ann", key)
}

fn operation_of(caller: &str, key: &str) -> Operation {
    Operation::new("default", "POST /payments", caller, Key::new(key).unwrap())
}

fn fresh_revision() -> Revision {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    Revision(u128::from(NEXT.fetch_add(1, Ordering::Relaxed)) << 64 | 0xfeed)
}

fn running() -> Write {
    Write {
        fingerprint: Fingerprint { target: [1; 32], body: [2; 32] },
        revision: fresh_revision(),
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: Duration::from_secs(75) },
        retention: Duration::from_secs(86_400),
    }
}

fn done() -> Write {
    let outcome = Outcome { status: 201, head: vec![1; 120].into(), body: vec![b'x'; 200].into() };
    Write { state: NewState::Done(outcome), ..running() }
}

fn expired() -> Write {
    Write { state: NewState::Running { lease: Duration::ZERO }, retention: Duration::ZERO, ..running() }
}

/// Sessions of this database that are inside a transaction and do nothing.
fn idle_in_transaction(database: &str) -> String {
    server().sql(
        database,
        &format!(
            "SELECT pid, state, query FROM pg_stat_activity WHERE datname = '{database}' \
             AND state LIKE 'idle in transaction%'"
        ),
    )
}

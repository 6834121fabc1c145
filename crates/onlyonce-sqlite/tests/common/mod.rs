//! What the tests write, and another hand on the same file.
#![allow(dead_code, unreachable_pub)]

pub mod application;

use std::path::Path;
use std::time::Duration;

use onlyonce_core::record::NewState;
use onlyonce_core::{Fingerprint, Key, Operation, Outcome, Revision, Write};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Executor, SqliteConnection};

pub fn operation(key: &str) -> Operation {
    Operation::new("default", "POST /payments", "ann", Key::new(key).expect("a key"))
}

pub fn running(revision: u128) -> Write {
    Write {
        fingerprint: Fingerprint { target: [1; 32], body: [2; 32] },
        revision: Revision(revision),
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: Duration::from_secs(3_600) },
        retention: Duration::from_secs(3_600),
    }
}

pub fn done(revision: u128, body: &str) -> Write {
    let outcome = Outcome { status: 201, head: "head".into(), body: body.to_owned().into() };
    Write { state: NewState::Done(outcome), ..running(revision) }
}

pub fn expired(revision: u128) -> Write {
    Write {
        state: NewState::Running { lease: Duration::ZERO },
        retention: Duration::ZERO,
        ..running(revision)
    }
}

/// A connection that knows nothing of Onlyonce.
pub async fn connect(path: &Path) -> SqliteConnection {
    SqliteConnectOptions::new().filename(path).create_if_missing(true).connect().await.expect("it opens")
}

pub async fn execute(connection: &mut SqliteConnection, sql: &str) {
    connection.execute(AssertSqlSafe(sql.to_owned())).await.expect(sql);
}

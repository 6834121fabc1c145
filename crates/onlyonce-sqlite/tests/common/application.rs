//! An application with a database of its own.

use std::path::Path;

use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{Executor, Row, Sqlite, SqlitePool, Transaction};

/// How the application connects.
pub fn connect_options(path: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new().filename(path).create_if_missing(true).journal_mode(SqliteJournalMode::Wal)
}

/// The application's pool, and its tables.
pub async fn start(path: &Path, connections: u32) -> SqlitePool {
    let pool = SqlitePoolOptions::new().max_connections(connections);
    let pool = pool.connect_with(connect_options(path)).await.expect("it connects");
    let tables = "CREATE TABLE IF NOT EXISTS notes (at INTEGER PRIMARY KEY, line TEXT NOT NULL)";
    pool.execute(tables).await.expect("it makes its tables");
    pool
}

/// The store in the application's file.
pub async fn store(path: &Path) -> SqliteStore {
    SqliteStore::open(&SqliteOptions::file(path).shared(true)).await.expect("the store opens")
}

pub async fn transactions(path: &Path, pool: &SqlitePool) -> SqliteTransactions {
    store(path).await.transactions(pool).await.expect("it is the same file")
}

/// What the application does in a transaction.
pub async fn note(transaction: &mut Transaction<'static, Sqlite>, line: &str) {
    let insert = sqlx::query("INSERT INTO notes (line) VALUES (?)").bind(line.to_owned());
    insert.execute(&mut **transaction).await.expect("it writes");
}

pub async fn notes(pool: &SqlitePool) -> Vec<String> {
    let rows = sqlx::query("SELECT line FROM notes ORDER BY at").fetch_all(pool).await.expect("it reads");
    rows.iter().map(|row| row.get(0)).collect()
}

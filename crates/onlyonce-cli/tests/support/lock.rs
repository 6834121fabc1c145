//! Someone else who writes to the database and takes long.

use std::path::Path;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, SqliteConnection};
use tokio::runtime::{Builder, Runtime};

/// Holds the database's write lock until it is dropped.
pub struct Lock {
    runtime: Runtime,
    connection: Option<SqliteConnection>,
}

impl Lock {
    pub fn take(database: &Path) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let connection = runtime.block_on(async {
            let options = SqliteConnectOptions::new().filename(database).busy_timeout(super::PATIENCE);
            let mut connection = options.connect().await.unwrap();
            sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut connection).await.unwrap();
            connection
        });
        Self { runtime, connection: Some(connection) }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        use sqlx::Connection;
        let connection = self.connection.take().expect("a lock is dropped once");
        self.runtime.block_on(connection.close()).unwrap();
    }
}

//! The reading connections: many reads, one statement, no lock.
//!
//! In a write-ahead log readers wait for nobody, not even for another process's write lock. So an insert
//! asks here first, and a replay costs a fraction of a read.

use std::sync::Arc;

use onlyonce_core::reads::{Found, Reader};
use onlyonce_core::{Id, StoreError};
use sqlx::AssertSqlSafe;
use tokio::sync::Mutex;

use crate::error::not_applied;
use crate::link::Link;
use crate::sql;

/// Reads on one connection.
pub(crate) struct Selects(pub(crate) Arc<Mutex<Link>>);

impl Reader for Selects {
    async fn read(&mut self, ids: &[Id]) -> Result<Found, StoreError> {
        let mut link = self.0.lock().await;
        select(&mut link, ids).await.map_err(|error| {
            link.discard();
            not_applied("read", &error)
        })
    }
}

async fn select(link: &mut Link, ids: &[Id]) -> Result<Found, sqlx::Error> {
    let (text, arguments) = link.sql().select(ids, false)?;
    let connection = link.connection().await?;
    let rows = sqlx::query_with(AssertSqlSafe(text), arguments).fetch_all(connection).await?;
    rows.iter().map(|row| Ok((sql::id(row).map_err(sqlx::Error::Protocol)?, sql::seen(row)))).collect()
}

//! The reading connection: many reads, one statement, no lock.

use std::sync::Arc;

use onlyonce_core::reads::{Found, Reader};
use onlyonce_core::{Id, StoreError};
use sqlx::postgres::PgArguments;
use tokio::sync::Mutex;

use crate::link::{Failure, Link, Statement};
use crate::sql;

/// How many reads one statement answers at most.
pub(crate) const READS_MAX: usize = 256;

/// Reads on one connection.
pub(crate) struct Selects(pub(crate) Arc<Mutex<Link>>);

impl Reader for Selects {
    async fn read(&mut self, ids: &[Id]) -> Result<Found, StoreError> {
        let mut link = self.0.lock().await;
        select(&mut link, ids).await.map_err(|Failure { error, .. }| error)
    }
}

/// The records under these ids; in words what is wrong with one that cannot be read.
pub(crate) async fn select(link: &mut Link, ids: &[Id]) -> Result<Found, Failure> {
    let text = Arc::clone(&link.target.sql.read);
    let arguments = || {
        let mut arguments = PgArguments::default();
        sql::bind_ids(ids, &mut arguments).map(|()| arguments)
    };
    let statement = Statement { text: &text, arguments: &arguments, doing: "read", writes: false };
    let rows = link.fetch(&statement).await?;
    Ok(rows.iter().filter_map(|row| Some((sql::id(row).ok()?, sql::seen(row)))).collect())
}

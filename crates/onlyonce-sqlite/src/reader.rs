//! The reading connections: many reads, one statement, no lock.
//!
//! In a write-ahead log readers wait for nobody, not even for another process's write lock. So an insert
//! asks here first, and a replay costs a fraction of a read.

use std::collections::HashMap;
use std::sync::Arc;

use onlyonce_core::record::Seen;
use onlyonce_core::{Id, StoreError, StoreErrorKind};
use sqlx::AssertSqlSafe;
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::error::not_applied;
use crate::link::Link;
use crate::sql;
use crate::writer::unreadable;

type Answer = Result<Option<Seen>, StoreError>;

/// Hands reads to the reading connections. Clones share them; they end with the last of them.
#[derive(Clone)]
pub(crate) struct Reads {
    asks: mpsc::Sender<Ask>,
}

struct Ask {
    id: Id,
    answer: oneshot::Sender<Answer>,
}

impl Reads {
    /// Starts a task of its own for each connection: a caller that is dropped interrupts none.
    pub(crate) fn start(links: Vec<Arc<Mutex<Link>>>) -> Self {
        let (asks, queue) = mpsc::channel(sql::ROWS_MAX);
        let queue = Arc::new(Mutex::new(queue));
        for link in links {
            tokio::spawn(run(link, Arc::clone(&queue)));
        }
        Self { asks }
    }

    /// The record under this id, as of the latest committed write.
    pub(crate) async fn read(&self, id: Id) -> Answer {
        let (answer, answered) = oneshot::channel();
        let closed = || StoreError::new(StoreErrorKind::Unavailable, "the store is closed");
        self.asks.send(Ask { id, answer }).await.map_err(|_| closed())?;
        answered.await.unwrap_or_else(|_| Err(closed()))
    }
}

async fn run(link: Arc<Mutex<Link>>, queue: Arc<Mutex<mpsc::Receiver<Ask>>>) {
    let mut asks = Vec::new();
    while queue.lock().await.recv_many(&mut asks, sql::ROWS_MAX).await > 0 {
        asks.retain(|ask| !ask.answer.is_closed());
        let mut ids: Vec<Id> = asks.iter().map(|ask| ask.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            continue;
        }
        let mut link = link.lock().await;
        match select(&mut link, &ids).await {
            Ok(found) => {
                for Ask { id, answer } in asks.drain(..) {
                    let _ = answer.send(match found.get(&id) {
                        None => Ok(None),
                        Some(Ok(seen)) => Ok(Some(seen.clone())),
                        Some(Err(reason)) => Err(unreadable(id, reason)),
                    });
                }
            }
            Err(error) => {
                link.discard();
                for Ask { answer, .. } in asks.drain(..) {
                    let _ = answer.send(Err(not_applied("read", &error)));
                }
            }
        }
    }
}

async fn select(link: &mut Link, ids: &[Id]) -> Result<HashMap<Id, Result<Seen, String>>, sqlx::Error> {
    let (text, arguments) = sql::select(ids, false)?;
    let connection = link.connection().await?;
    let rows = sqlx::query_with(AssertSqlSafe(text), arguments).fetch_all(connection).await?;
    rows.iter().map(|row| Ok((sql::id(row).map_err(sqlx::Error::Protocol)?, sql::seen(row)))).collect()
}

//! The reading connection: many reads, one statement, no lock.

use std::collections::HashMap;
use std::sync::Arc;

use onlyonce_core::record::Seen;
use onlyonce_core::{Id, StoreError, StoreErrorKind};
use sqlx::postgres::PgArguments;
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::link::{Failure, Link, Statement};
use crate::sql;

/// How many reads one statement answers at most.
const READS_MAX: usize = 256;

type Answer = Result<Option<Seen>, StoreError>;

/// Hands reads to the reading connection. Clones share it; it ends with the last of them.
#[derive(Clone)]
pub(crate) struct Reads {
    asks: mpsc::Sender<Ask>,
}

struct Ask {
    id: Id,
    answer: oneshot::Sender<Answer>,
}

impl Reads {
    /// Starts a task of its own: a caller that is dropped interrupts nothing.
    pub(crate) fn start(link: Arc<Mutex<Link>>) -> Self {
        let (asks, queue) = mpsc::channel(READS_MAX);
        tokio::spawn(run(link, queue));
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

async fn run(link: Arc<Mutex<Link>>, mut queue: mpsc::Receiver<Ask>) {
    let mut asks = Vec::new();
    while queue.recv_many(&mut asks, READS_MAX).await > 0 {
        asks.retain(|ask| !ask.answer.is_closed());
        let mut ids: Vec<Id> = asks.iter().map(|ask| ask.id).collect();
        ids.sort_unstable();
        ids.dedup();
        if ids.is_empty() {
            continue;
        }
        let found = select(&mut *link.lock().await, &ids).await;
        for Ask { id, answer } in asks.drain(..) {
            let _ = answer.send(match &found {
                Err(Failure { error, .. }) => Err(StoreError::new(error.kind(), error.to_string())),
                Ok(found) => match found.get(&id) {
                    None => Ok(None),
                    Some(Ok(seen)) => Ok(Some(seen.clone())),
                    Some(Err(reason)) => Err(unreadable(id, reason)),
                },
            });
        }
    }
}

/// The records under these ids; in words what is wrong with one that cannot be read.
pub(crate) async fn select(
    link: &mut Link,
    ids: &[Id],
) -> Result<HashMap<Id, Result<Seen, String>>, Failure> {
    let text = Arc::clone(&link.target.sql.read);
    let arguments = || {
        let mut arguments = PgArguments::default();
        sql::bind_ids(ids, &mut arguments).map(|()| arguments)
    };
    let statement = Statement { text: &text, arguments: &arguments, doing: "read", writes: false };
    let rows = link.fetch(&statement).await?;
    Ok(rows.iter().filter_map(|row| Some((sql::id(row).ok()?, sql::seen(row)))).collect())
}

pub(crate) fn unreadable(id: Id, reason: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unreadable, format!("the record {id} cannot be read: {reason}"))
}

//! The one writing connection: many calls, one transaction.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use onlyonce_core::group::{Call, Reply, Writer};
use onlyonce_core::record::{Record, Seen};
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Id, Operation, Revision, StoreError, Timestamp};
use sqlx::sqlite::SqliteArguments;
use sqlx::{Arguments, AssertSqlSafe, Row, SqliteConnection};
use tokio::sync::{Mutex, oneshot};

use crate::error::{at_commit, is_everywhere, not_applied, primary};
use crate::link::Link;
use crate::sql::Statements;
use crate::{error, sql};

/// Writes batches of calls.
///
/// A batch is read, decided in memory in the order of its calls, and written: three round trips to
/// SQLite however many calls there are. Nobody else can write in between, see [`sql`].
pub(crate) struct Batches {
    /// Shared with sweeps, which take turns with batches.
    pub(crate) link: Arc<Mutex<Link>>,
    /// Counts the transactions that changed something.
    pub(crate) commits: Arc<AtomicU64>,
    /// Dropped with the writer, when its last call is answered.
    pub(crate) _ended: oneshot::Sender<()>,
}

pub(crate) type Replies = Vec<Result<Reply, StoreError>>;

/// A batch of which nothing is known to be applied.
struct Failure {
    error: StoreError,
    everywhere: bool,
}

impl Writer for Batches {
    async fn write(&mut self, calls: &[Call]) -> Replies {
        let link = Arc::clone(&self.link);
        let mut link = link.lock().await;
        match self.transact(&mut link, calls).await {
            Ok(replies) => replies,
            Err(failure) if failure.everywhere || calls.len() == 1 => {
                calls.iter().map(|_| Err(copy(&failure.error))).collect()
            }
            // One of them is the culprit: alone it takes nobody with it.
            Err(_) => {
                let mut replies = Vec::with_capacity(calls.len());
                for call in calls {
                    match self.transact(&mut link, std::slice::from_ref(call)).await {
                        Ok(reply) => replies.extend(reply),
                        Err(failure) => replies.push(Err(failure.error)),
                    }
                }
                replies
            }
        }
    }
}

fn copy(error: &StoreError) -> StoreError {
    StoreError::new(error.kind(), error.to_string())
}

impl Batches {
    /// Applies the calls in one transaction. Afterwards the connection is in none, or given up.
    async fn transact(&self, link: &mut Link, calls: &[Call]) -> Result<Replies, Failure> {
        let sql = link.sql();
        let connection =
            link.connection().await.map_err(|error| Failure::before_commit("connect", &error))?;
        if let Err(error) = sqlx::query(sql::BEGIN).execute(&mut *connection).await {
            if primary(&error) != Some(error::code::BUSY) {
                link.discard();
            }
            return Err(Failure::before_commit("begin to write", &error));
        }
        match apply(sql, connection, calls).await {
            Ok((replies, true)) => match sqlx::query(sql::COMMIT).execute(connection).await {
                Ok(_) => {
                    self.commits.fetch_add(1, Ordering::Relaxed);
                    Ok(replies)
                }
                Err(error) => {
                    link.discard();
                    Err(Failure { error: at_commit(&error), everywhere: true })
                }
            },
            // Nothing to write: the log stays as it is, and nobody waits for the disk.
            Ok((replies, false)) => {
                roll_back(link).await;
                Ok(replies)
            }
            Err(error) => {
                roll_back(link).await;
                Err(Failure::before_commit("write", &error))
            }
        }
    }
}

impl Failure {
    fn before_commit(doing: &str, error: &sqlx::Error) -> Self {
        Self { error: not_applied(doing, error), everywhere: is_everywhere(error) }
    }
}

async fn roll_back(link: &mut Link) {
    let rolled_back = match link.connection().await {
        Ok(connection) => sqlx::query(sql::ROLLBACK).execute(connection).await.is_ok(),
        Err(_) => false,
    };
    if !rolled_back {
        link.discard();
    }
}

/// What must be known of a row to write over it.
#[derive(Clone, Copy)]
struct Stored {
    revision: Revision,
    created_at: Timestamp,
    sweep_at: Timestamp,
}

/// One key during a batch: what the store has and what it shall have.
#[derive(Default)]
struct Slot<'a> {
    stored: Option<Stored>,
    record: Option<Record>,
    operation: Option<&'a Operation>,
    unreadable: Option<String>,
}

/// Carries the calls out within the open transaction; `true` if there is something to commit.
pub(crate) async fn apply(
    sql: &Statements,
    connection: &mut SqliteConnection,
    calls: &[Call],
) -> Result<(Replies, bool), sqlx::Error> {
    let (mut slots, now) = load(sql, connection, calls).await?;
    let replies = calls.iter().map(|call| decide(slots.entry(call.id()).or_default(), call, now)).collect();
    let changed = store(sql, connection, &slots).await?;
    Ok((replies, changed))
}

async fn load<'a>(
    sql: &Statements,
    connection: &mut SqliteConnection,
    calls: &'a [Call],
) -> Result<(HashMap<Id, Slot<'a>>, Timestamp), sqlx::Error> {
    let mut slots: HashMap<Id, Slot<'a>> = calls.iter().map(|call| (call.id(), Slot::default())).collect();
    let ids: Vec<Id> = slots.keys().copied().collect();
    let mut now = Timestamp(0);
    for ids in ids.chunks(sql::ROWS_MAX) {
        let (text, arguments) = sql.select(ids, true)?;
        let rows = sqlx::query_with(AssertSqlSafe(text), arguments).fetch_all(&mut *connection).await?;
        let (clock, rows) = rows.split_first().ok_or(sqlx::Error::RowNotFound)?;
        now = Timestamp(clock.try_get(0)?);
        for row in rows {
            let id = sql::id(row).map_err(sqlx::Error::Protocol)?;
            let slot = slots.entry(id).or_default();
            match sql::seen(row).and_then(|seen| Ok((seen.record, sql::sweep_at(row)?))) {
                Ok((record, sweep_at)) => {
                    let Record { revision, created_at, .. } = record;
                    slot.stored = Some(Stored { revision, created_at, sweep_at });
                    slot.record = Some(record);
                }
                Err(reason) => slot.unreadable = Some(reason),
            }
        }
    }
    Ok((slots, now))
}

/// A register compares revisions and decides nothing else.
fn decide<'a>(slot: &mut Slot<'a>, call: &'a Call, now: Timestamp) -> Result<Reply, StoreError> {
    if let Some(reason) = &slot.unreadable {
        return Err(StoreError::unreadable(call.id(), reason));
    }
    Ok(match call {
        Call::Insert(operation, write) => Reply::Inserted(match &slot.record {
            Some(record) => Inserted::Exists(Seen { record: record.clone(), now }),
            None => {
                slot.record = Some(write.clone().at(now));
                slot.operation = Some(operation);
                Inserted::New(now)
            }
        }),
        Call::Replace(_, expected, write) => Reply::Replaced(match &slot.record {
            Some(record) if record.revision == *expected => {
                slot.record = Some(write.clone().at(now));
                Replaced::Written(now)
            }
            found => Replaced::Lost(found.clone().map(|record| Seen { record, now })),
        }),
        Call::Remove(_, expected) => {
            let removed = slot.record.as_ref().is_some_and(|record| record.revision == *expected);
            if removed {
                slot.record = None;
            }
            Reply::Removed(removed)
        }
    })
}

/// Writes what the batch changed; `true` if it changed anything.
async fn store(
    sql: &Statements,
    connection: &mut SqliteConnection,
    slots: &HashMap<Id, Slot<'_>>,
) -> Result<bool, sqlx::Error> {
    let (mut deletes, mut updates, mut restarts, mut inserts) = (vec![], vec![], vec![], vec![]);
    for (id, slot) in slots {
        match (slot.stored, &slot.record) {
            (None, None) => {}
            (Some(stored), Some(record)) if stored.revision == record.revision => {}
            (Some(stored), None) => deletes.push((*id, stored.revision)),
            (Some(stored), Some(record))
                if stored.created_at == record.created_at && record.expires_at <= stored.sweep_at =>
            {
                updates.push((*id, stored.revision, record, None));
            }
            (Some(stored), Some(record)) => {
                // Never nearer, so that a listing under way does not miss it.
                let sweep_at = record.expires_at.max(stored.sweep_at);
                restarts.push((*id, stored.revision, record, Some(sweep_at)));
            }
            (None, Some(record)) => match slot.operation {
                Some(operation) => inserts.push((operation, record)),
                None => return Err(sqlx::Error::Protocol("a record came from nowhere".to_owned())),
            },
        }
    }
    run(connection, &sql.deletes, &deletes, |to, (id, stored)| {
        sql::bind_id(to, *id)?;
        sql::bind_revision(to, *stored)
    })
    .await?;
    for (texts, rows) in [(&sql.updates, &updates), (&sql.restarts, &restarts)] {
        run(connection, texts, rows, |to, (id, stored, record, sweep_at)| {
            sql::bind_record(to, record, *sweep_at)?;
            sql::bind_id(to, *id)?;
            sql::bind_revision(to, *stored)
        })
        .await?;
    }
    run(connection, &sql.inserts, &inserts, |to, (operation, record)| {
        sql::bind_id(to, operation.id())?;
        sql::bind_record(to, record, Some(record.expires_at))?;
        for part in
            [operation.namespace(), operation.endpoint(), operation.caller(), operation.key().as_str()]
        {
            to.add(part).map_err(sqlx::Error::Encode)?;
        }
        Ok(())
    })
    .await?;
    Ok(!(deletes.is_empty() && updates.is_empty() && restarts.is_empty() && inserts.is_empty()))
}

/// Runs a statement once for each row, and fails unless each changed exactly one row.
pub(crate) async fn run<T>(
    connection: &mut SqliteConnection,
    texts: &sql::Repeated,
    mut rows: &[T],
    bind: impl Fn(&mut SqliteArguments, &T) -> Result<(), sqlx::Error>,
) -> Result<(), sqlx::Error> {
    while !rows.is_empty() {
        let (text, count) = texts.at_most(rows.len());
        let (now, later) = rows.split_at(count);
        let mut arguments = SqliteArguments::default();
        for row in now {
            bind(&mut arguments, row)?;
        }
        let done = sqlx::query_with(AssertSqlSafe(text), arguments).execute(&mut *connection).await?;
        if done.rows_affected() != count as u64 {
            return Err(sqlx::Error::Protocol(format!(
                "{count} rows were to change under the write lock and {} did",
                done.rows_affected()
            )));
        }
        rows = later;
    }
    Ok(())
}

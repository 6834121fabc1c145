//! Keys claimed inside the application's own transactions.
//!
//! ```text
//! begin ──▶ its turn ──▶ the one connection ──▶ BEGIN IMMEDIATE ──▶ the user's, until it ends
//!         (in memory)    (a pool of one)       (other processes)
//! ```
//!
//! SQLite has one write lock for a file, so executions take turns whatever anybody does. They take turns
//! for a connection, which belongs to the open transaction and goes back when that one ends, in whatever
//! way. So nobody has to be told of the end, those that wait hold nothing but memory, and the application's
//! pool stays free for its readers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::group::{Call, Reply};
use onlyonce_core::record::NewState;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{
    Fingerprint, Id, Key, Operation, Revision, Store, StoreError, StoreErrorKind, TransactionError,
    Transactional, Write,
};
use sqlx::{Sqlite, SqlitePool, Transaction};
use tokio::sync::{Mutex, oneshot};
use tokio::time::{sleep, timeout};

use crate::error::{at_commit, code, not_applied, primary};
use crate::link::Target;
use crate::{OpenError, SqliteStore, detached, schema, sql, writer};

/// How long a begin may wait at least: a free lock is had even by who would not wait for a held one.
const WAIT_MIN: Duration = Duration::from_millis(100);

/// The pause between two attempts, when SQLite's own waiting has ended before the caller's.
const PAUSE: Duration = Duration::from_millis(10);

/// How long the trace of a check stays if its process dies in the middle, until a sweep.
const TRACE_TIME: Duration = Duration::from_secs(60);

/// Claims keys inside transactions on an application's own SQLite file.
///
/// Made by [`SqliteStore::transactions`]. Clones share one connection, which the open transaction has.
#[derive(Clone)]
pub struct SqliteTransactions {
    store: SqliteStore,
    pool: SqlitePool,
    /// Whoever is next for the connection. The others wait here, where it costs nothing to leave.
    next: Arc<Mutex<()>>,
}

impl SqliteStore {
    /// Claims keys inside transactions on the database that `pool` leads to, which must be this store's
    /// file, opened as [`shared`](crate::SqliteOptions::shared).
    ///
    /// The transactions do not run on the pool's connections but on one more, which is opened as those are,
    /// with the same options and hooks; only `synchronous` is this store's. So they never keep the
    /// application's readers waiting for a connection.
    ///
    /// # Errors
    /// [`Refused`](crate::OpenErrorKind::Refused) if the configuration must change: the store's file is not
    /// shared, the pool leads to another database, or may not write, or makes its commits less durable than
    /// the store's. [`Failed`](crate::OpenErrorKind::Failed) otherwise.
    pub async fn transactions(&self, pool: &SqlitePool) -> Result<SqliteTransactions, OpenError> {
        let target = &self.shared.target;
        if !target.shared {
            return Err(OpenError::refused(format!(
                "the SQLite file {} is Onlyonce's own, so no transaction of an application spans it; open the \
                 application's file with shared=true",
                target.name
            )));
        }
        let connect = pool.connect_options().as_ref().clone();
        // A file that is gone must not come back empty.
        let connect = connect.create_if_missing(false).synchronous(target.synchronous.into());
        let one = pool.options().clone().min_connections(0).max_connections(1);
        let transactions = SqliteTransactions {
            store: self.clone(),
            pool: one.connect_lazy_with(connect),
            next: Arc::default(),
        };
        match transactions.check(target).await {
            Ok(()) => Ok(transactions),
            Err(error) => {
                transactions.close().await;
                Err(error)
            }
        }
    }
}

#[async_trait]
impl Transactional for SqliteTransactions {
    type Transaction = Transaction<'static, Sqlite>;

    const ONE_WRITER: bool = true;

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    /// As [`Transactional::begin`]: waits until it is alone in writing to the file, for at least 100 ms.
    ///
    /// Nobody can tell whether whoever writes has claimed the same key, so this never says
    /// [`TransactionError::Busy`].
    async fn begin(&self, wait: Duration) -> Result<Self::Transaction, TransactionError> {
        self.begin_within(wait).await.map_err(|error| {
            TransactionError::Failed(match error {
                sqlx::Error::PoolTimedOut => StoreError::new(
                    StoreErrorKind::Unavailable,
                    "others who write to the SQLite file did not end within the wait",
                ),
                error => not_applied("begin to write", &error),
            })
        })
    }

    async fn open(&self) -> Result<Self::Transaction, TransactionError> {
        self.begin(Duration::MAX).await
    }

    async fn insert(
        &self,
        transaction: &mut Self::Transaction,
        operation: &Operation,
        write: Write,
    ) -> Result<Inserted, TransactionError> {
        let applied = self.apply(transaction, Call::Insert(operation.clone(), write)).await;
        answer(applied).and_then(Reply::inserted).map_err(TransactionError::Failed)
    }

    async fn replace(
        &self,
        transaction: &mut Self::Transaction,
        id: Id,
        expected: Revision,
        write: Write,
    ) -> Result<Replaced, TransactionError> {
        let applied = self.apply(transaction, Call::Replace(id, expected, write)).await;
        answer(applied).and_then(Reply::replaced).map_err(TransactionError::Failed)
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<(), TransactionError> {
        // One that SQLite refuses to commit is still open; dropped with the error, it is rolled back.
        let commit = async move { transaction.commit().await.map_err(|error| at_commit(&error)) };
        detached(commit).await.map_err(TransactionError::Failed)
    }

    async fn roll_back(&self, transaction: Self::Transaction) {
        let roll_back =
            async move { transaction.rollback().await.map_err(|error| not_applied("roll back", &error)) };
        if let Err(error) = detached(roll_back).await {
            // Undone all the same, by SQLite before or by the connection's end.
            tracing::debug!(%error, "a transaction was not rolled back by its own statement");
        }
    }
}

impl SqliteTransactions {
    /// Waits for the open transaction to end, and closes its connection. Later ones fail to begin. The
    /// application's pool and the store stay open.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    async fn begin_within(&self, wait: Duration) -> Result<Transaction<'static, Sqlite>, sqlx::Error> {
        let begun = async {
            let next = Arc::clone(&self.next).lock_owned().await;
            let (caller, begun) = oneshot::channel();
            let pool = self.pool.clone();
            // On a task of its own, so that a caller who leaves interrupts no BEGIN: what has begun without
            // a caller is dropped whole, and so rolled back.
            tokio::spawn(async move {
                let result = begin(&pool, &caller).await;
                drop(next);
                let _ = caller.send(result);
            });
            begun.await.unwrap_or(Err(sqlx::Error::WorkerCrashed))
        };
        timeout(wait.max(WAIT_MIN), begun).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
    }

    /// Carries the call out as the store's writer does.
    async fn apply(
        &self,
        transaction: &mut Transaction<'static, Sqlite>,
        call: Call,
    ) -> Result<Result<Reply, StoreError>, sqlx::Error> {
        let sql = self.store.shared.target.sql();
        let (mut replies, _) = writer::apply(sql, transaction, std::slice::from_ref(&call)).await?;
        replies.pop().ok_or(sqlx::Error::RowNotFound)
    }

    /// Refuses a pool whose transactions would not be the store's. No comparison of paths tells: what the
    /// store commits must be there to be replaced in a transaction.
    async fn check(&self, target: &Target) -> Result<(), OpenError> {
        let failed = |error: StoreError| {
            OpenError::failed(format!("the SQLite file {} could not be written", target.name))
                .with_source(error)
        };
        let (trace, write) = trace();
        self.store.insert(&trace, write.clone()).await.map_err(failed)?;
        let checked = self.check_in_transaction(target, trace.id(), &write).await;
        self.store.remove(trace.id(), write.revision).await.map_err(failed)?;
        checked
    }

    async fn check_in_transaction(&self, target: &Target, id: Id, write: &Write) -> Result<(), OpenError> {
        let mut transaction =
            self.begin_within(target.busy_timeout).await.map_err(|error| refusal(target, error))?;
        let next = Write { revision: Revision::fresh(), ..write.clone() };
        let replace = Call::Replace(id, write.revision, next);
        let checked = match self.apply(&mut transaction, replace).await {
            Ok(Ok(Reply::Replaced(Replaced::Written(_)))) => {
                schema::check_synchronous(target, &mut transaction).await
            }
            Ok(_) => Err(another_database(target)),
            // There is no such table.
            Err(error) if primary(&error) == Some(code::ERROR) => Err(another_database(target)),
            Err(error) => Err(refusal(target, error)),
        };
        self.roll_back(transaction).await;
        checked
    }
}

/// Begins as soon as nobody else writes, for as long as there is a caller.
async fn begin<T>(
    pool: &SqlitePool,
    caller: &oneshot::Sender<T>,
) -> Result<Transaction<'static, Sqlite>, sqlx::Error> {
    let mut renewed = false;
    loop {
        match pool.begin_with(sql::BEGIN).await {
            Err(error) if is_held_up(&error) => {
                if caller.is_closed() {
                    return Err(error);
                }
                sleep(PAUSE).await;
            }
            // When SQLite undoes a transaction by itself (`ON CONFLICT ROLLBACK`, a full disk), sqlx goes on
            // counting it, and nothing begins on that connection again. A new one serves.
            Err(_) if !renewed => {
                renewed = true;
                pool.acquire().await?.close().await?;
            }
            begun => return begun,
        }
    }
}

fn is_held_up(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::PoolTimedOut) || matches!(primary(error), Some(code::BUSY | code::LOCKED))
}

fn answer(applied: Result<Result<Reply, StoreError>, sqlx::Error>) -> Result<Reply, StoreError> {
    applied.unwrap_or_else(|error| Err(not_applied("write", &error)))
}

/// A key that nobody else has.
fn trace() -> (Operation, Write) {
    let revision = Revision::fresh();
    let key = Key::new(format!("{:032x}", revision.0)).expect("hexadecimal digits are a key");
    let write = Write {
        fingerprint: Fingerprint { target: [0; 32], body: [0; 32] },
        revision,
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: TRACE_TIME },
        retention: Duration::ZERO,
    };
    (Operation::new("onlyonce", "transactions", "onlyonce", key), write)
}

fn another_database(target: &Target) -> OpenError {
    OpenError::refused(format!(
        "the application's pool leads to another database than the SQLite file {}: what the store writes is \
         not seen there",
        target.name
    ))
}

/// The words for a pool on which no transaction can begin or write.
fn refusal(target: &Target, error: sqlx::Error) -> OpenError {
    let name = &target.name;
    let open_error = match (&error, primary(&error)) {
        (_, Some(code::READONLY)) => OpenError::refused(format!(
            "the application's pool may not write to the SQLite file {name}: it is read-only or sets query_only"
        )),
        (_, Some(code::CANTOPEN | code::NOTADB)) => another_database(target),
        (sqlx::Error::PoolTimedOut, _) => OpenError::failed(format!(
            "no transaction could begin on the application's pool: others write to the SQLite file {name}, or \
             the pool sets a journal mode other than wal"
        )),
        _ => OpenError::failed(format!(
            "no transaction could begin on the application's pool, for the SQLite file {name}"
        )),
    };
    open_error.with_source(error)
}

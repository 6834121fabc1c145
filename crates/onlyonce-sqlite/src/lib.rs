//! The SQLite store of Onlyonce: one file, full durability, several processes.
//!
//! ```
//! use onlyonce_core::Engine;
//! use onlyonce_sqlite::{SqliteOptions, SqliteStore};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("keys.db");
//! let store = SqliteStore::open(&SqliteOptions::file(&path)).await?;
//! let engine = Engine::new(std::sync::Arc::new(store.clone()));
//! # let _ = engine;
//! store.close().await?;
//!
//! // What can forget an acknowledged write is refused.
//! assert!(SqliteStore::open(&"sqlite:keys.db?synchronous=off".parse()?).await.is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! ```text
//! insert ──▶ readers ── found ──▶ Exists
//!               │ absent
//! replace ──────┴──▶ group ──▶ one writer: BEGIN IMMEDIATE · read · decide · write · COMMIT
//! remove  ─────────────┘
//! read ────▶ readers: two connections, many ids in one statement
//! ```
//!
//! # In the application's own transactions
//!
//! The strongest form keeps the claim, the application's writes and the outcome in one transaction: after a
//! crash there are all of them or none. A transaction spans one file, so the keys live in the application's
//! own database then, in the tables `onlyonce_idempotency_keys` and `onlyonce_schema_versions`. Nothing else
//! in the file is touched, its header included.
//!
//! ```
//! use std::time::Duration;
//!
//! use onlyonce_core::transact::{ClaimedIn, claim};
//! use onlyonce_core::{Fingerprint, Key, Lapse, Operation, Outcome, Policy, Transactional};
//! use onlyonce_sqlite::{SqliteOptions, SqliteStore, SqliteTransactions};
//! use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePool};
//!
//! # type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;
//! async fn pay(keys: &SqliteTransactions, order: &str) -> Result<Outcome> {
//!     let payment = Operation::new("default", "POST /payments", "ann", Key::new(order)?);
//!     let request = Fingerprint { target: [0; 32], body: [1; 32] };
//!     let policy = Policy {
//!         lease: Duration::from_secs(75),
//!         retention: Duration::from_secs(86_400),
//!         on_lapse: Lapse::Rerun,
//!     };
//!
//!     let mut transaction = keys.begin(Duration::from_secs(10)).await?;
//!     match claim(keys, &mut transaction, &payment, request, &policy).await? {
//!         ClaimedIn::Execute(held) => {
//!             let booking = sqlx::query("INSERT INTO payments (order_id) VALUES (?)").bind(order.to_owned());
//!             booking.execute(&mut *transaction).await?;
//!             let outcome = Outcome { status: 201, head: Default::default(), body: "paid".into() };
//!             held.complete(keys, &mut transaction, outcome.clone()).await?;
//!             keys.commit(transaction).await?;
//!             Ok(outcome)
//!         }
//!         ClaimedIn::Replay(outcome) => Ok(outcome),
//!         ClaimedIn::Refused(refusal) => Err(format!("{refusal:?}").into()),
//!     } // A transaction that is dropped is rolled back.
//! }
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("shop.db");
//! let shop = SqliteConnectOptions::new()
//!     .filename(&path)
//!     .create_if_missing(true)
//!     .journal_mode(SqliteJournalMode::Wal);
//! let shop = SqlitePool::connect_with(shop).await?;
//! sqlx::query("CREATE TABLE payments (order_id TEXT NOT NULL)").execute(&shop).await?;
//!
//! let store = SqliteStore::open(&SqliteOptions::file(&path).shared(true)).await?;
//! let keys = store.transactions(&shop).await?;
//! let paid = pay(&keys, "order-4711").await?;
//! // A copy gets the first answer, and nothing is booked twice.
//! assert_eq!(pay(&keys, "order-4711").await?, paid);
//! let booked: i64 = sqlx::query_scalar("SELECT count(*) FROM payments").fetch_one(&shop).await?;
//! assert_eq!(booked, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! What to know about it:
//!
//! - **One writer at a time for a file**, whatever the keys. From its `begin` on, a transaction holds up every
//!   other writer of the file: other executions, which wait in memory until their turn or the end of their
//!   wait; the application's own writes, which SQLite lets wait for their busy timeout; the store's claims
//!   with a lease and its sweeps, which wait for [`SqliteOptions::busy_timeout`]. Keep slow calls, to a
//!   payment provider for example, out of it. Readers wait for nobody.
//! - What is to be undone with the claim must go through the transaction. A write on another connection from
//!   inside of it waits for itself and fails, and so does a second `begin`.
//! - Some failures undo the whole transaction at once: `OR ROLLBACK`, `RAISE(ROLLBACK)`, a full disk. What is
//!   written after one of them commits on its own, without the key; so leave at the first error.
//! - The file needs a write-ahead log; the application sets it, as above. It stays set.
//! - The transaction runs on a connection of its own beside the application's pool, opened as the pool's are.
//!   It commits as durably as the store, also if the pool has `synchronous = NORMAL`.
//! - If the pool attaches further files, SQLite commits each of them, but in a power failure not all together.
//! - A database in memory cannot be shared: tests take a file in a temporary folder.
//!
//! # Durability
//!
//! The database keeps a write-ahead log and runs with `synchronous = FULL`: a commit is answered after
//! an fsync of the log. That covers a power failure as far as the disk honours fsync. Do not put the file
//! on a network file system: SQLite's locks and shared memory do not work there, so two claims of one key
//! could both pass.
//!
//! # Clock
//!
//! SQLite's, which is the system clock of the machine. All processes that share the file share it.

mod error;
mod link;
mod options;
mod reader;
mod schema;
mod sql;
#[cfg(test)]
mod tests;
mod transact;
mod writer;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use onlyonce_core::group::{Call, Group};
use onlyonce_core::reads::Reads;
use onlyonce_core::record::Seen;
use onlyonce_core::store::{Cursor, Entry, Filter, Inserted, Inspect, Page, Replaced};
use onlyonce_core::{Id, Key, Operation, Revision, Store, StoreError, StoreErrorKind, Write};
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, QueryBuilder, Row, Sqlite};
use tokio::sync::{Mutex, oneshot};

pub use onlyonce_core::store::{Migrated, OpenError, OpenErrorKind};
pub use options::{BUSY_TIMEOUT_DEFAULT, BUSY_TIMEOUT_MAX, SqliteOptions, Synchronous};
pub use schema::SCHEMA_VERSION;
pub use transact::SqliteTransactions;

use error::not_applied;
use link::{Link, Target};
use reader::Selects;
use sql::Statements;
use writer::Batches;

/// How many calls share one commit at most.
const CALLS_MAX: usize = 256;

/// How many connections read. One more lists.
const READERS: usize = 2;

/// How many rows one transaction of a sweep removes; claims get their turn in between.
const SWEEP_ROWS_MAX: u32 = 100;

/// Keys in a SQLite file. Clones share one handle; several handles and processes may share the file.
#[derive(Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

struct Shared {
    target: Target,
    /// Empty once the store is closed.
    open: RwLock<Option<Open>>,
    commits: Arc<AtomicU64>,
    writer: Arc<Mutex<Link>>,
    readers: Vec<Arc<Mutex<Link>>>,
    lister: Arc<Mutex<Link>>,
    writer_ended: Mutex<Option<oneshot::Receiver<()>>>,
}

#[derive(Clone)]
struct Open {
    group: Group,
    reads: Reads,
}

/// What a store runs on, for people who look after it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Facts {
    /// SQLite's version.
    pub sqlite_version: String,
    /// `wal` for a file.
    pub journal_mode: String,
    /// 2 stands for full and 3 for extra; less is volatile.
    pub synchronous: i64,
    /// The schema's version.
    pub schema_version: u32,
    /// How many records there are, expired ones included.
    pub records: u64,
}

/// The schema version in the file, or `None` if there is no file or nothing in it. Writes nothing.
///
/// # Errors
/// If the options are refused, or the file cannot be read or is another application's.
pub async fn schema_version(options: &SqliteOptions) -> Result<Option<u32>, OpenError> {
    schema::version(&Target::new(options)?).await
}

/// Creates the database or brings its schema up to [`SCHEMA_VERSION`]. Many processes may do so at once.
///
/// # Errors
/// As [`SqliteStore::open`].
pub async fn migrate(options: &SqliteOptions) -> Result<Migrated, OpenError> {
    let target = Target::new(options)?;
    let (connection, migrated) = schema::prepare(&target).await?;
    Link::new(target.clone(), Some(connection)).close().await.map_err(|error| target.explain(error))?;
    Ok(migrated)
}

impl SqliteStore {
    /// Opens the database, and creates or migrates it first if need be.
    ///
    /// # Errors
    /// [`OpenErrorKind::Refused`] if the configuration must change: a volatile database, a file that is
    /// not Onlyonce's or of a newer version, a folder that is absent or read-only.
    /// [`OpenErrorKind::Failed`] otherwise.
    pub async fn open(options: &SqliteOptions) -> Result<Self, OpenError> {
        let target = Target::new(options)?;
        let (connection, _) = schema::prepare(&target).await?;
        let link = |connection| Arc::new(Mutex::new(Link::new(target.clone(), connection)));
        let writer = link(Some(connection));
        let mut readers = Vec::with_capacity(READERS);
        for _ in 0..READERS {
            readers.push(link(Some(target.connect(false).await.map_err(|error| target.explain(error))?)));
        }
        let commits = Arc::default();
        let (_ended, writer_ended) = oneshot::channel();
        let batches = Batches { link: Arc::clone(&writer), commits: Arc::clone(&commits), _ended };
        let open = Open {
            group: Group::start(batches, CALLS_MAX),
            reads: Reads::start(readers.iter().cloned().map(Selects), sql::ROWS_MAX),
        };
        let lister = link(None);
        Ok(Self {
            shared: Arc::new(Shared {
                target,
                open: RwLock::new(Some(open)),
                commits,
                writer,
                readers,
                lister,
                writer_ended: Mutex::new(Some(writer_ended)),
            }),
        })
    }

    /// The file, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.shared.target.path.as_deref()
    }

    /// How many transactions this handle has committed. Concurrent calls share one.
    #[must_use]
    pub fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// What the store runs on.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub async fn facts(&self) -> Result<Facts, StoreError> {
        let lister = self.lister()?;
        detached(async move {
            let mut link = lister.lock().await;
            let facts = facts(&mut link).await;
            facts.map_err(|error| {
                link.discard();
                not_applied("read its settings", &error)
            })
        })
        .await
    }

    async fn rows(
        &self,
        filter: &Filter,
        after: Option<&Cursor>,
        rows_max: u32,
    ) -> Result<Vec<SqliteRow>, StoreError> {
        let (lister, filter, after) = (self.lister()?, filter.clone(), after.cloned());
        detached(async move {
            let mut link = lister.lock().await;
            list(&mut link, &filter, after.as_ref(), rows_max).await.map_err(|error| {
                link.discard();
                not_applied("list", &error)
            })
        })
        .await
    }

    /// Finishes the calls in hand, moves the log into the database and closes every connection. Calls
    /// made later fail. A store that is only dropped is as durable; the log is then moved by whoever
    /// opens the file next.
    ///
    /// # Errors
    /// If the log could not be moved. Nothing is lost: it stays beside the database.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.shared.open.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(ended) = self.shared.writer_ended.lock().await.take() {
            let _ = ended.await;
        }
        let mut links = self.shared.readers.clone();
        links.push(Arc::clone(&self.shared.lister));
        links.push(Arc::clone(&self.shared.writer));
        for link in links {
            // The last connection to close moves the log.
            let closed = link.lock().await.close().await;
            closed.map_err(|error| not_applied("close", &error))?;
        }
        Ok(())
    }

    fn open_parts(&self) -> Result<Open, StoreError> {
        let open = self.shared.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable, "the store is closed"))
    }

    fn lister(&self) -> Result<Arc<Mutex<Link>>, StoreError> {
        self.open_parts().map(|_| Arc::clone(&self.shared.lister))
    }
}

#[async_trait]
impl Store for SqliteStore {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        let Open { group, reads } = self.open_parts()?;
        // A replay ends here. Whoever finds nothing still has to win the insert itself.
        if let Some(seen) = reads.read(operation.id()).await? {
            return Ok(Inserted::Exists(seen));
        }
        group.call(Call::Insert(operation.clone(), write)).await?.inserted()
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        self.open_parts()?.group.call(Call::Replace(id, expected, write)).await?.replaced()
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        self.open_parts()?.group.call(Call::Remove(id, expected)).await?.removed()
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        self.open_parts()?.reads.read(id).await
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        self.open_parts()?;
        let writer = Arc::clone(&self.shared.writer);
        detached(sweep(writer, rows_max)).await
    }
}

#[async_trait]
impl Inspect for SqliteStore {
    async fn page(&self, filter: &Filter, after: Option<&Cursor>, rows_max: u32) -> Result<Page, StoreError> {
        let rows = self.rows(filter, after, rows_max).await?;
        let mut page = Page::default();
        if let (Some(last), true) = (rows.last(), rows.len() >= rows_max as usize) {
            page.next = Some(cursor(last)?);
        }
        for row in &rows {
            match entry(row) {
                Ok(entry) => page.entries.push(entry),
                Err(error) => page.unreadable.push(error.to_string()),
            }
        }
        Ok(page)
    }
}

/// Runs on a task of its own, so that a caller who leaves interrupts no statement.
async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::spawn(work).await.unwrap_or_else(|error| {
        Err(StoreError::new(StoreErrorKind::Ambiguous, "the store's task ended early").with_source(error))
    })
}

async fn sweep(writer: Arc<Mutex<Link>>, rows_max: u32) -> Result<u64, StoreError> {
    let mut removed = 0;
    loop {
        let left = u64::from(rows_max).saturating_sub(removed);
        let rows = left.min(SWEEP_ROWS_MAX.into());
        if rows == 0 {
            return Ok(removed);
        }
        let mut link = writer.lock().await;
        let sweep = link.sql().sweep.as_str();
        let swept = match link.connection().await {
            Ok(connection) => sqlx::query(sweep).bind(rows.cast_signed()).execute(connection).await,
            Err(error) => Err(error),
        };
        let swept = swept.map_err(|error| {
            link.discard();
            not_applied("sweep", &error)
        })?;
        removed += swept.rows_affected();
        if swept.rows_affected() < rows {
            return Ok(removed);
        }
    }
}

async fn list(
    link: &mut Link,
    filter: &Filter,
    after: Option<&Cursor>,
    rows_max: u32,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    let mut query = list_query(link.sql(), filter, after, rows_max);
    query.build().persistent(false).fetch_all(link.connection().await?).await
}

/// Conditions only for what is asked, so that each can use its index.
fn list_query(
    sql: &Statements,
    filter: &Filter,
    after: Option<&Cursor>,
    rows_max: u32,
) -> QueryBuilder<Sqlite> {
    let mut query = QueryBuilder::new(sql.list.as_str());
    query.push(" WHERE true");
    if let Some(id) = filter.id {
        query.push(" AND id = ").push_bind(id.0.to_vec());
    }
    if let Some(key) = &filter.key {
        let span = Id::span(key);
        query.push(" AND id BETWEEN ").push_bind(span.start().0.to_vec());
        query.push(" AND ").push_bind(span.end().0.to_vec());
    }
    let parts = [
        (" AND key = ", &filter.key),
        (" AND namespace = ", &filter.namespace),
        (" AND endpoint = ", &filter.endpoint),
        (" AND caller = ", &filter.caller),
    ];
    for (condition, value) in parts {
        if let Some(value) = value {
            query.push(condition).push_bind(value.clone());
        }
    }
    // Those in the span of one key are few, and sorted. The index in this order would be read until they are found.
    let order = if filter.key.is_some() { "+sweep_at" } else { "sweep_at" };
    if let Some(Cursor { at, id }) = after {
        query.push(format!(" AND ({order}, id) > (")).push_bind(at.0);
        query.push(", ").push_bind(id.0.to_vec()).push(")");
    }
    query.push(format!(" ORDER BY {order}, id LIMIT ")).push_bind(i64::from(rows_max));
    query
}

/// Where a listing goes on after this row: the schema lets no row have another kind of id or time.
fn cursor(row: &SqliteRow) -> Result<Cursor, StoreError> {
    let parse = || Ok(Cursor { at: sql::sweep_at(row)?, id: sql::id(row)? });
    parse().map_err(|reason: String| StoreError::new(StoreErrorKind::Unreadable, reason))
}

fn entry(row: &SqliteRow) -> Result<Entry, StoreError> {
    let parse = || {
        let Seen { record, now } = sql::seen(row)?;
        let part = |column| sql::get::<String>(row, sql::PARTS_COLUMN + column);
        let key = Key::new(part(3)?).map_err(|error| error.to_string())?;
        Ok(Entry { operation: Operation::new(part(0)?, part(1)?, part(2)?, key), record, now })
    };
    parse().map_err(|reason: String| match sql::id(row) {
        Ok(id) => StoreError::unreadable(id, &reason),
        Err(_) => StoreError::new(StoreErrorKind::Unreadable, reason),
    })
}

async fn facts(link: &mut Link) -> Result<Facts, sqlx::Error> {
    let Statements { version, table, .. } = link.sql();
    let query = format!(
        "SELECT sqlite_version(), (SELECT journal_mode FROM pragma_journal_mode), \
                (SELECT synchronous FROM pragma_synchronous), ({version}), (SELECT count(*) FROM {table})"
    );
    let row = sqlx::query(AssertSqlSafe(query)).fetch_one(link.connection().await?).await?;
    Ok(Facts {
        sqlite_version: row.try_get(0)?,
        journal_mode: row.try_get(1)?,
        synchronous: row.try_get(2)?,
        schema_version: row.try_get(3)?,
        records: row.try_get::<i64, _>(4)?.cast_unsigned(),
    })
}

//! The Postgres store of Onlyonce: several instances, one truth.
//!
//! ```no_run
//! use onlyonce_core::Engine;
//! use onlyonce_postgres::{PostgresOptions, PostgresStore};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let options: PostgresOptions = "postgres://app:secret@db.internal/shop?sslmode=verify-full".parse()?;
//! let store = PostgresStore::open(&options).await?;
//! let engine = Engine::new(std::sync::Arc::new(store.clone()));
//! # let _ = engine;
//! store.close().await;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! ```text
//! insert  ──┐
//! replace ──┼──▶ group ──▶ writers, a connection each: one statement · one commit · many calls
//! remove  ──┘
//! read ────────▶ one connection, many ids in one statement
//! sweep, list ─▶ one connection
//! ```
//!
//! # Durability
//!
//! A call is answered after its commit. `fsync = off`, `synchronous_commit = off` and an unlogged table
//! can forget it, and are refused unless [`PostgresOptions::allow_volatile`] was called; each new connection
//! is checked. In a session that a pooler shares, another client may have switched `synchronous_commit` off:
//! there each transaction switches it on for itself.
//!
//! # Failover
//!
//! A standby that takes over without having been waited for may lack the latest keys: see
//! [`Facts::on_failover`]. A server that turns out read-only is left, and the next call connects anew, to
//! wherever the name then leads.
//!
//! # What a failed call means
//!
//! [`Unavailable`](onlyonce_core::StoreErrorKind::Unavailable): nothing was written. The server was not
//! reached, or answered with an error, which undoes the statement.
//! [`Ambiguous`](onlyonce_core::StoreErrorKind::Ambiguous): the statement was sent and its answer lost, or
//! it took longer than a call may take. The server gives up a little earlier, but what is still on its way
//! in the network, or waits for a standby, may be applied later. It names the revision that it replaces, so
//! it can then only leave a key held until its lease ends.
//!
//! # Clock
//!
//! The server's, and never this machine's.
//!
//! # In the application's own transaction
//!
//! [`PostgresStore::transactions`] takes the application's own pool. The claim, the application's queries and
//! the outcome then share one transaction and one commit: together they are there, or none of them is.
//!
//! ```no_run
//! use std::time::Duration;
//! use onlyonce_core::transact::{ClaimedIn, claim};
//! use onlyonce_core::{Fingerprint, Key, Lapse, Operation, Outcome, Policy, Transactional};
//! use onlyonce_postgres::{PostgresOptions, PostgresStore};
//! use sqlx::postgres::{PgConnectOptions, PgPool};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! let url = "postgres://app:secret@db.internal/shop?sslmode=verify-full";
//! let store = PostgresStore::open(&url.parse::<PostgresOptions>()?).await?;
//! // With these a machine that vanished is noticed within a minute, and its transactions are rolled back.
//! let keepalive = [("tcp_keepalives_idle", "30"), ("tcp_keepalives_interval", "10"), ("tcp_keepalives_count", "3")];
//! let pool = PgPool::connect_with(url.parse::<PgConnectOptions>()?.options(keepalive)).await?;
//! let transactions = store.transactions(&pool).await?;
//!
//! let payment = Operation::new("default", "POST /payments", "ann", Key::new("order-4711")?);
//! let request = Fingerprint { target: [0; 32], body: [1; 32] };
//! let policy = Policy {
//!     lease: Duration::from_secs(75),
//!     retention: Duration::from_secs(86_400),
//!     on_lapse: Lapse::Rerun,
//! };
//! let mut transaction = transactions.begin(Duration::from_secs(10)).await?;
//! match claim(&transactions, &mut transaction, &payment, request, &policy).await? {
//!     ClaimedIn::Execute(held) => {
//!         let insert = sqlx::query("INSERT INTO payments (payer, cents) VALUES ($1, $2)");
//!         insert.bind("ann").bind(4_200_i64).execute(&mut *transaction).await?;
//!         let paid = Outcome { status: 201, head: Default::default(), body: "paid".into() };
//!         held.complete(&transactions, &mut transaction, paid).await?;
//!         transactions.commit(transaction).await?;
//!     }
//!     ClaimedIn::Replay(outcome) => println!("{:?}", outcome.body),
//!     ClaimedIn::Refused(refusal) => println!("{refusal:?}"),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```
//!
//! A copy waits at the primary key for the end of the transaction that claimed first, and has a connection of
//! the pool meanwhile. The pool's settings are the application's: isolation level, timeouts, plans. Only until
//! the key is claimed do `lock_timeout` and `statement_timeout` follow the wait.
//!
//! | under | a copy that waited |
//! |---|---|
//! | `READ COMMITTED`, the default | has the outcome, or executes after a rollback |
//! | `REPEATABLE READ`, `SERIALIZABLE` | is told [`Conflict`](onlyonce_core::TransactionError::Conflict) after a commit, for its snapshot is older; in a new transaction it has the outcome |
//!
//! The application's own queries may fail likewise: [`is_conflict`] tells. After any failed statement nothing
//! of the transaction can be committed, whatever the application does with the error: `commit` then fails.
//!
//! Behind a pooler that shares connections between transactions this works as well; what the application
//! itself prepares there, as sqlx does unless told `persistent(false)`, is between it and the pooler.

mod error;
mod facts;
mod link;
mod options;
mod reader;
mod schema;
mod sql;
#[cfg(test)]
mod tests;
mod transact;
mod writer;

use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use onlyonce_core::group::{Call, Group};
use onlyonce_core::reads::Reads;
use onlyonce_core::record::Seen;
use onlyonce_core::store::{Cursor, Entry, Filter, Inserted, Inspect, Page, Replaced};
use onlyonce_core::{Id, Key, Operation, Revision, Store, StoreError, StoreErrorKind, Write};
use sqlx::Arguments;
use sqlx::postgres::{PgArguments, PgRow};
use tokio::sync::{Mutex, oneshot};

pub use error::is_conflict;
pub use facts::Facts;
pub use onlyonce_core::store::{Migrated, OpenError, OpenErrorKind};
pub use options::{
    CALL_TIMEOUT_DEFAULT, CALL_TIMEOUT_MIN, POOL_SIZE_DEFAULT, POOL_SIZE_MAX, POOL_SIZE_MIN, PgBouncer,
    PostgresOptions, SCHEMA_DEFAULT,
};
pub use schema::SCHEMA_VERSION;
pub use transact::PostgresTransactions;

use link::{Failure, Link, Live, Statement, Target};
use reader::{READS_MAX, Selects};
use writer::Batches;

/// How many calls share one commit at most.
const CALLS_MAX: usize = 256;

/// How many rows one transaction of a sweep removes. A claim that meets one of them waits for it.
const SWEEP_ROWS_MAX: u32 = 200;

/// Keys in a Postgres database. Clones share one handle; any number of handles and machines may share the
/// database.
#[derive(Clone)]
pub struct PostgresStore {
    shared: Arc<Shared>,
}

struct Shared {
    target: Arc<Target>,
    /// Empty once the store is closed.
    open: RwLock<Option<Open>>,
    writers: Vec<Arc<Mutex<Link>>>,
    reader: Arc<Mutex<Link>>,
    /// Sweeps and lists.
    caretaker: Arc<Mutex<Link>>,
    writers_ended: Mutex<Vec<oneshot::Receiver<()>>>,
}

#[derive(Clone)]
struct Open {
    group: Group,
    reads: Reads,
}

/// The schema version in the database, or `None` if it has no tables. Writes nothing.
///
/// # Errors
/// If the database is refused or cannot be read.
pub async fn schema_version(options: &PostgresOptions) -> Result<Option<u32>, OpenError> {
    schema::version(&Target::new(options)).await
}

/// Creates the tables or brings them up to [`SCHEMA_VERSION`]. Many instances may do so at once.
///
/// # Errors
/// As [`PostgresStore::open`].
pub async fn migrate(options: &PostgresOptions) -> Result<Migrated, OpenError> {
    let target = Arc::new(Target::new(options));
    let (live, migrated) = schema::prepare(&target).await?;
    Link::new(target, Some(live)).close().await;
    Ok(migrated)
}

/// The SQL that [`migrate`] would run on a schema of version `from`, zero for none, for people whose
/// migrations are run by others. Empty if there is nothing to do.
#[must_use]
pub fn migration_sql(options: &PostgresOptions, from: u32) -> String {
    schema::migration_sql(&options.schema, from)
}

impl PostgresStore {
    /// Connects, and creates or migrates the tables first if need be.
    ///
    /// # Errors
    /// [`OpenErrorKind::Refused`] if the configuration must change: a volatile or too old server, a wrong
    /// password, missing privileges, tables of a newer version or without their unique index.
    /// [`OpenErrorKind::Failed`] otherwise.
    pub async fn open(options: &PostgresOptions) -> Result<Self, OpenError> {
        let target = Arc::new(Target::new(options));
        let (live, _) = schema::prepare(&target).await?;
        Ok(Self::start(&target, live, options.pool_size))
    }

    fn start(target: &Arc<Target>, live: Live, pool_size: u32) -> Self {
        let link = |live| Arc::new(Mutex::new(Link::new(Arc::clone(target), live)));
        let (reader, caretaker) = (link(None), link(None));
        let mut live = Some(live);
        let writers: Vec<_> = (2..pool_size).map(|_| link(live.take())).collect();
        let mut writers_ended = Vec::new();
        let batches = writers.iter().rev().map(|link| {
            let (_ended, ended) = oneshot::channel();
            writers_ended.push(ended);
            Batches { link: Arc::clone(link), _ended }
        });
        let group = Group::start_many(batches, CALLS_MAX);
        let open = Open { group, reads: Reads::start([Selects(Arc::clone(&reader))], READS_MAX) };
        Self {
            shared: Arc::new(Shared {
                target: Arc::clone(target),
                open: RwLock::new(Some(open)),
                writers,
                reader,
                caretaker,
                writers_ended: Mutex::new(writers_ended),
            }),
        }
    }

    /// What the store runs on.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub async fn facts(&self) -> Result<Facts, StoreError> {
        let caretaker = self.caretaker()?;
        detached(async move { facts::facts(&mut *caretaker.lock().await).await }).await
    }

    async fn listed(
        &self,
        filter: &Filter,
        after: Option<&Cursor>,
        rows_max: u32,
    ) -> Result<Vec<PgRow>, StoreError> {
        let (caretaker, filter, after) = (self.caretaker()?, filter.clone(), after.cloned());
        detached(async move {
            let mut link = caretaker.lock().await;
            let (text, arguments) = list_query(&link.target.sql.list, &filter, after.as_ref(), rows_max);
            let statement = Statement { text: &text, arguments: &arguments, doing: "list", writes: false };
            link.fetch(&statement).await.map_err(|Failure { error, .. }| error)
        })
        .await
    }

    /// Finishes the calls in hand and closes every connection. Calls made later fail.
    pub async fn close(&self) {
        self.shared.open.write().unwrap_or_else(PoisonError::into_inner).take();
        for ended in self.shared.writers_ended.lock().await.drain(..) {
            let _ = ended.await;
        }
        for link in self.shared.writers.iter().chain([&self.shared.reader, &self.shared.caretaker]) {
            link.lock().await.close().await;
        }
    }

    fn open_parts(&self) -> Result<Open, StoreError> {
        let open = self.shared.open.read().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable, "the store is closed"))
    }

    fn caretaker(&self) -> Result<Arc<Mutex<Link>>, StoreError> {
        self.open_parts().map(|_| Arc::clone(&self.shared.caretaker))
    }
}

#[async_trait]
impl Store for PostgresStore {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        self.open_parts()?.group.call(Call::Insert(operation.clone(), write)).await?.inserted()
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
        let caretaker = self.caretaker()?;
        detached(sweep(caretaker, rows_max)).await
    }
}

#[async_trait]
impl Inspect for PostgresStore {
    async fn page(&self, filter: &Filter, after: Option<&Cursor>, rows_max: u32) -> Result<Page, StoreError> {
        let rows = self.listed(filter, after, rows_max).await?;
        let mut page = Page::default();
        for row in &rows {
            match entry(row) {
                Ok(entry) => page.entries.push(entry),
                Err(error) => page.unreadable.push(error.to_string()),
            }
        }
        if let Some(last) = rows.last().filter(|_| rows.len() >= rows_max as usize) {
            let cursor = sql::cursor(last);
            page.next = Some(cursor.map_err(|reason| StoreError::new(StoreErrorKind::Unreadable, reason))?);
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

async fn sweep(caretaker: Arc<Mutex<Link>>, rows_max: u32) -> Result<u64, StoreError> {
    let mut removed = 0;
    loop {
        let left = u64::from(rows_max).saturating_sub(removed);
        let rows = left.min(SWEEP_ROWS_MAX.into());
        if rows == 0 {
            return Ok(removed);
        }
        let mut link = caretaker.lock().await;
        let text = Arc::clone(&link.target.sql.sweep);
        let arguments = || {
            let mut arguments = PgArguments::default();
            arguments.add(rows.cast_signed()).map(|()| arguments)
        };
        let statement = Statement { text: &text, arguments: &arguments, doing: "sweep", writes: true };
        let swept = link.fetch(&statement).await.map_err(|Failure { error, .. }| error)?.len() as u64;
        removed += swept;
        if swept < rows {
            return Ok(removed);
        }
    }
}

type Bound = Result<PgArguments, sqlx::error::BoxDynError>;

/// Conditions only for what is asked, so that each can use its index.
fn list_query(
    select: &str,
    filter: &Filter,
    after: Option<&Cursor>,
    rows_max: u32,
) -> (Arc<str>, impl Fn() -> Bound + Send + Sync + use<>) {
    let mut text = select.to_owned();
    let mut places = 0;
    let mut place = || {
        places += 1;
        format!("${places}")
    };
    let Filter { id, namespace, endpoint, caller, key } = filter.clone();
    if id.is_some() {
        text += &format!(" AND id = {}::bytea", place());
    }
    if key.is_some() {
        text += &format!(" AND id BETWEEN {}::bytea AND {}::bytea", place(), place());
    }
    let parts = [("key", key), ("namespace", namespace), ("endpoint", endpoint), ("caller", caller)];
    for (column, _) in parts.iter().filter(|(_, value)| value.is_some()) {
        text += &format!(" AND {column} = {}::text", place());
    }
    let after = after.cloned();
    // Those in the span of one key are few, and sorted. The index in this order would be read until they are found.
    let order = if parts[0].1.is_some() { "sweep_at + 0" } else { "sweep_at" };
    if after.is_some() {
        text += &format!(" AND ({order}, id) > ({}::bigint, {}::bytea)", place(), place());
    }
    text += &format!(" ORDER BY {order}, id LIMIT {}::bigint", place());
    let arguments = move || {
        let mut to = PgArguments::default();
        if let Some(id) = id {
            to.add(&id.0[..])?;
        }
        if let Some(key) = &parts[0].1 {
            let span = Id::span(key);
            to.add(&span.start().0[..])?;
            to.add(&span.end().0[..])?;
        }
        for value in parts.iter().filter_map(|(_, value)| value.as_deref()) {
            to.add(sql::escaped(value))?;
        }
        if let Some(Cursor { at, id }) = &after {
            to.add(at.0)?;
            to.add(&id.0[..])?;
        }
        to.add(i64::from(rows_max))?;
        Ok(to)
    };
    (text.into(), arguments)
}

fn entry(row: &PgRow) -> Result<Entry, StoreError> {
    let parse = || {
        let Seen { record, now } = sql::seen(row)?;
        let key = Key::new(sql::scope(row, 3)?).map_err(|error| error.to_string())?;
        let (namespace, endpoint, caller) = (sql::scope(row, 0)?, sql::scope(row, 1)?, sql::scope(row, 2)?);
        Ok(Entry { operation: Operation::new(namespace, endpoint, caller, key), record, now })
    };
    parse().map_err(|reason: String| match sql::id(row) {
        Ok(id) => StoreError::unreadable(id, &reason),
        Err(_) => StoreError::new(StoreErrorKind::Unreadable, reason),
    })
}

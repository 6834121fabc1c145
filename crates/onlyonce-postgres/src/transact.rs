//! Claims inside the user's own transactions.
//!
//! The driver's `begin` and `commit` run on tasks of their own, to their end: a `begin` that is dropped
//! halfway leaves its connection inside a transaction, and with the pool. Whoever leaves drops the open
//! transaction, and so rolls it back.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use onlyonce_core::engine::CALL_TIME_MAX;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{
    Id, Operation, Revision, Store, StoreError, StoreErrorKind, Timestamp, TransactionError, Transactional,
    Write,
};
use sqlx::postgres::{PgArguments, PgPool, PgRow};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, Postgres, Row, Transaction};
use tokio::time::timeout;

use crate::error::{self, code, in_doubt, is_conflict, is_undone, not_applied, sqlstate};
use crate::link::{CONFIGURED_COMMIT, Failure, Statement, Target, volatile};
use crate::schema::{self, literal};
use crate::sql::{self, Change, Claim, quoted};
use crate::{OpenError, PostgresStore};

/// How often an insert is tried whose key is taken and freed by others each time.
const ROUNDS_MAX: u32 = 16;

/// Which server this is, and which of its databases.
const PLACE: &str = "SELECT (extract(epoch FROM pg_catalog.pg_postmaster_start_time()) * 1000000)::bigint, \
    oid::bigint FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()";

/// Transactions of the application's own pool, in which keys can be claimed: see the [crate](crate)'s page.
///
/// Clones share the pool. Closing the store or the pool is left to whoever opened it.
#[derive(Clone)]
pub struct PostgresTransactions {
    store: PostgresStore,
    pool: PgPool,
    target: Arc<Target>,
}

impl PostgresStore {
    /// Claims keys of this store inside transactions of the application's own pool, which must lead to the
    /// store's database.
    ///
    /// # Errors
    /// [`Refused`](crate::OpenErrorKind::Refused) if the pool leads elsewhere, its user may not write the
    /// table, its transactions are read-only, or its commits can be forgotten and the store's options do not
    /// allow that. [`Failed`](crate::OpenErrorKind::Failed) if either database cannot be asked.
    pub async fn transactions(&self, pool: &PgPool) -> Result<PostgresTransactions, OpenError> {
        let target = Arc::clone(&self.shared.target);
        let place = self.place().await.map_err(|error| {
            OpenError::failed(format!("{} could not be asked", target.name)).with_source(error)
        })?;
        let asking = check(pool, &target, place);
        timeout(CALL_TIME_MAX, asking).await.unwrap_or_else(|_| {
            Err(OpenError::failed(format!("the pool did not answer within {CALL_TIME_MAX:?}")))
        })?;
        Ok(PostgresTransactions { store: self.clone(), pool: pool.clone(), target })
    }

    async fn place(&self) -> Result<(i64, i64), StoreError> {
        let caretaker = self.caretaker()?;
        crate::detached(async move {
            let arguments = || Ok(PgArguments::default());
            let text = PLACE.into();
            let statement =
                Statement { text: &text, arguments: &arguments, doing: "tell where it is", writes: false };
            let rows = caretaker.lock().await.fetch(&statement).await;
            let rows = rows.map_err(|Failure { error, .. }| error)?;
            let found = rows.first().and_then(|row| Some((row.try_get(0).ok()?, row.try_get(1).ok()?)));
            found.ok_or_else(|| {
                StoreError::new(StoreErrorKind::Unavailable, "Postgres did not tell where it is")
            })
        })
        .await
    }
}

/// Refuses a pool in whose transactions the guarantee would not hold.
async fn check(pool: &PgPool, target: &Target, place: (i64, i64)) -> Result<(), OpenError> {
    let row = look(pool, &target.schema).await.map_err(|error| explain(&error))?;
    let text = |column: &str| row.try_get::<String, _>(column).map_err(|error| explain(&error));
    let yes = |column: &str| row.try_get::<bool, _>(column).map_err(|error| explain(&error));
    let number = |column: usize| row.try_get::<i64, _>(column).map_err(|error| explain(&error));
    let refused = |what: String| Err(OpenError::refused(format!("the pool {what}")));
    if (number(0)?, number(1)?) != place {
        return refused(format!(
            "leads to another database than the store's, {}: a claim and the work beside it must commit together",
            target.name
        ));
    }
    if let Some(reason) = volatile(&text("synchronous_commit")?, &text("fsync")?)
        && !target.allow_volatile
    {
        return refused(format!("is volatile: {reason}, or set allow_volatile = true"));
    }
    if yes("read_only")? {
        return refused("has read-only transactions; a claim writes".to_owned());
    }
    if !yes("may_write")? {
        let schema = quoted(&target.schema);
        return refused(format!(
            "has a user that may not write the keys; GRANT USAGE ON SCHEMA {schema} and GRANT SELECT, INSERT, \
             UPDATE ON {schema}.idempotency_keys to it"
        ));
    }
    Ok(())
}

async fn look(pool: &PgPool, schema: &str) -> Result<PgRow, sqlx::Error> {
    let question = format!(
        "SELECT place.*, {CONFIGURED_COMMIT} AS synchronous_commit, \
            current_setting('fsync') AS fsync, current_setting('transaction_read_only') = 'on' AS read_only, \
            coalesce((SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') \
                AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE') \
                FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                WHERE n.nspname = {} AND c.relname = '{}'), false) AS may_write FROM ({PLACE}) AS place",
        literal(schema),
        schema::TABLE,
    );
    let mut connection = pool.acquire().await?;
    connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(question))).await
}

fn explain(error: &sqlx::Error) -> OpenError {
    let line = error::line(error);
    match sqlstate(error) {
        Some(code::INVALID_PASSWORD | code::INVALID_AUTHORIZATION | code::NO_SUCH_DATABASE) => {
            OpenError::refused("the pool is not let in; check its user, password and database")
                .with_source(line)
        }
        _ => OpenError::failed("the pool could not be asked").with_source(line),
    }
}

#[async_trait]
impl Transactional for PostgresTransactions {
    type Transaction = Transaction<'static, Postgres>;

    const ONE_WRITER: bool = false;

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn begin(&self, wait: Duration) -> Result<Self::Transaction, TransactionError> {
        self.begin_with(sql::begin(wait, self.target.allow_volatile)).await
    }

    async fn open(&self) -> Result<Self::Transaction, TransactionError> {
        self.begin_with(sql::open(self.target.allow_volatile)).await
    }

    async fn insert(
        &self,
        transaction: &mut Self::Transaction,
        operation: &Operation,
        write: Write,
    ) -> Result<Inserted, TransactionError> {
        check_open(transaction)?;
        let claim = Claim::of(operation, &write);
        for _ in 0..ROUNDS_MAX {
            let rows = fetch(transaction, &self.target.sql.claim, &|to| claim.bind(to)).await;
            let rows = rows.map_err(|error| failed_claim("claim the key", &error))?;
            let Some(row) = rows.first() else { continue };
            return inserted(row).map_err(|reason| unreadable(claim.id, &reason));
        }
        let reason = "too many writers compete for the key";
        Err(TransactionError::Conflict(StoreError::new(StoreErrorKind::Unavailable, reason)))
    }

    async fn replace(
        &self,
        transaction: &mut Self::Transaction,
        id: Id,
        expected: Revision,
        write: Write,
    ) -> Result<Replaced, TransactionError> {
        check_open(transaction)?;
        let change = Change::of(id, expected, &write);
        let rows = if write.is_grant() {
            let taken = fetch(transaction, &self.target.sql.take_over, &|to| change.bind(to)).await;
            taken.map_err(|error| failed_claim("take the key over", &error))?
        } else {
            self.in_time(transaction, &self.target.sql.replace, &|to| change.bind(to)).await?
        };
        match rows.first() {
            Some(row) => sql::get(row, 0).map(|now| Replaced::Written(Timestamp(now))),
            // Read afterwards and not with the update, whose snapshot may be older than the write it lost to.
            None => self
                .in_time(transaction, &self.target.sql.read, &|to| sql::bind_ids(&[id], to))
                .await?
                .first()
                .map(sql::seen)
                .transpose()
                .map(Replaced::Lost),
        }
        .map_err(|reason| unreadable(id, &reason))
    }

    async fn commit(&self, transaction: Self::Transaction) -> Result<(), TransactionError> {
        let committing = tokio::spawn(commit(transaction));
        match timeout(CALL_TIME_MAX, committing).await {
            Ok(Ok(committed)) => committed,
            Ok(Err(error)) => Err(lost(StoreErrorKind::Ambiguous, "commit", error.to_string())),
            Err(_) => Err(lost(StoreErrorKind::Ambiguous, "commit", late())),
        }
    }

    async fn roll_back(&self, transaction: Self::Transaction) {
        // One that fails, or takes longer, is rolled back before the pool gives its connection to anybody.
        let _ = timeout(CALL_TIME_MAX, tokio::spawn(transaction.rollback())).await;
    }
}

impl PostgresTransactions {
    async fn begin_with(&self, begin: String) -> Result<Transaction<'static, Postgres>, TransactionError> {
        let pool = self.pool.clone();
        let beginning = tokio::spawn(async move { pool.begin_with(AssertSqlSafe(begin)).await });
        let doing = "begin a transaction";
        match timeout(CALL_TIME_MAX, beginning).await {
            Ok(Ok(Ok(transaction))) => Ok(transaction),
            Ok(Ok(Err(error))) => Err(failed(doing, &error)),
            Ok(Err(error)) => Err(lost(StoreErrorKind::Unavailable, doing, error.to_string())),
            Err(_) => Err(lost(StoreErrorKind::Unavailable, doing, late())),
        }
    }

    /// A statement that waits for nobody. The time is for a server that is gone.
    async fn in_time(
        &self,
        transaction: &mut Transaction<'static, Postgres>,
        text: &Arc<str>,
        bind: Bind<'_>,
    ) -> Result<Vec<PgRow>, TransactionError> {
        let doing = "write in the transaction";
        match timeout(CALL_TIME_MAX, fetch(transaction, text, bind)).await {
            Ok(fetched) => fetched.map_err(|error| failed(doing, &error)),
            Err(_) => Err(lost(StoreErrorKind::Unavailable, doing, late())),
        }
    }
}

type Bind<'a> = &'a (dyn Fn(&mut PgArguments) -> Result<(), sqlx::error::BoxDynError> + Send + Sync);

/// Nothing is prepared for longer than its use: a plan that was made while the table was empty would scan it,
/// and a pooler runs the next transaction elsewhere.
async fn fetch(
    connection: &mut PgConnection,
    text: &Arc<str>,
    bind: Bind<'_>,
) -> Result<Vec<PgRow>, sqlx::Error> {
    let mut arguments = PgArguments::default();
    bind(&mut arguments).map_err(sqlx::Error::Encode)?;
    let query = sqlx::query_with(AssertSqlSafe(Arc::clone(text)), arguments).persistent(false);
    query.fetch_all(connection).await
}

/// Race: a statement failed, and nobody looked; or the transaction was ended behind our back. The server
/// answers the COMMIT of such a transaction as it answers any other, and commits nothing. So it is asked first
/// for something that only an intact one can do; from then on nothing of the transaction can fail unseen.
async fn commit(mut transaction: Transaction<'static, Postgres>) -> Result<(), TransactionError> {
    let intact = transaction.execute(sqlx::raw_sql("SAVEPOINT onlyonce")).await;
    intact.map_err(|error| match sqlstate(&error) {
        // Nobody knows how it was ended, and what was written since is committed.
        Some(code::NO_TRANSACTION) => TransactionError::Failed(in_doubt("commit", &error)),
        _ => failed("commit", &error),
    })?;
    transaction.commit().await.map_err(|error| {
        if is_undone(&error) {
            failed("commit", &error)
        } else {
            TransactionError::Failed(in_doubt("commit", &error))
        }
    })
}

/// Race: a user's work loses its transaction, and its outcome is recorded all the same, by a statement that
/// commits alone. sqlx undoes all of a transaction when the begin of one inside it fails or is dropped halfway.
fn check_open(transaction: &Transaction<'static, Postgres>) -> Result<(), TransactionError> {
    if transaction.is_in_transaction() {
        return Ok(());
    }
    let reason = "the transaction is over: the begin of one inside it failed or was dropped halfway; what was written \
                  since may be committed";
    Err(TransactionError::Failed(StoreError::new(StoreErrorKind::Ambiguous, reason)))
}

fn inserted(row: &PgRow) -> Result<Inserted, String> {
    match sql::written(row)? {
        (true, now) => Ok(Inserted::New(now)),
        (false, _) => sql::seen(row).map(Inserted::Exists),
    }
}

/// Until it has its key a transaction waits for locks as long as `begin` was told.
fn failed_claim(doing: &str, error: &sqlx::Error) -> TransactionError {
    match sqlstate(error) {
        Some(code::LOCK_NOT_AVAILABLE | code::QUERY_CANCELED) => TransactionError::Busy,
        _ => failed(doing, error),
    }
}

/// Nothing is committed.
fn failed(doing: &str, error: &sqlx::Error) -> TransactionError {
    let told = not_applied(doing, error);
    if is_conflict(error) { TransactionError::Conflict(told) } else { TransactionError::Failed(told) }
}

fn unreadable(id: Id, reason: &str) -> TransactionError {
    TransactionError::Failed(StoreError::unreadable(id, reason))
}

fn lost(kind: StoreErrorKind, doing: &str, reason: String) -> TransactionError {
    let message = format!("Postgres did not say whether it could {doing}");
    TransactionError::Failed(StoreError::new(kind, message).with_source(reason))
}

fn late() -> String {
    format!("no answer within {CALL_TIME_MAX:?}")
}

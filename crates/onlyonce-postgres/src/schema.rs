//! The tables, and how they come about.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor, PgConnection, Row};
use tokio::time::timeout;

use crate::link::{Live, Target};
use crate::sql::quoted;
use crate::{Migrated, OpenError};

/// The schema that this version writes.
pub const SCHEMA_VERSION: u32 = 1;

/// The oldest program version that can share the table with this one, in versions of the schema: during a
/// rolling deploy the old instances go on until they are replaced.
const COMPATIBLE_FROM: u32 = 1;

/// How long a migration may take, the wait for another instance's among it.
const MIGRATION_TIME_MAX: Duration = Duration::from_secs(60);

/// Names the advisory lock that one migration at a time holds.
const MIGRATION_LOCK: i64 = 0x6f6e_6c79_6f6e_6365;

/// Each entry takes the schema one version further; an entry that was released is never changed.
///
/// - The id alone is the primary key: with several columns the planner may pick a wider index. Text is in
///   the collation `C`, which no upgrade of the operating system changes under an index.
/// - Times are milliseconds and not `timestamptz`, which ends before the far future does.
/// - Nothing that completing a key changes is indexed, and half of each page is left free, so that the
///   completed row fits beside the claim and no index is written (a HOT update). `sweep_at` is how sweeps
///   find what expired, and the order of listings: it is `expires_at` as of the claim, and completing in time
///   only brings that nearer.
/// - There are two indexes because every claim pays for each of them. A client key is found through the id:
///   see [`Id::span`](onlyonce_core::Id::span).
/// - One check: it is read and prepared for every statement that writes.
/// - Rows die as fast as keys are claimed: twice each, by completion and by sweep. The default of a fifth
///   of the table would let millions gather before a vacuum; here it is a fiftieth, and the statistics that
///   the vacuum brings keep pace. A vacuum without pauses is short, and its work is small when it comes often.
const MIGRATIONS: [&str; SCHEMA_VERSION as usize] = ["
CREATE TABLE {schema}.idempotency_keys (
    created_at         bigint  NOT NULL,
    granted_at         bigint  NOT NULL,
    expires_at         bigint  NOT NULL,
    sweep_at           bigint  NOT NULL,
    lease_until        bigint,
    completed_at       bigint,
    attempt            bigint  NOT NULL,
    status             integer,
    id                 bytea   NOT NULL PRIMARY KEY,
    revision           bytea   NOT NULL,
    fingerprint_target bytea   NOT NULL,
    fingerprint_body   bytea   NOT NULL,
    namespace          text    COLLATE \"C\" NOT NULL,
    endpoint           text    COLLATE \"C\" NOT NULL,
    caller             text    COLLATE \"C\" NOT NULL,
    key                text    COLLATE \"C\" NOT NULL,
    head               bytea,
    body               bytea,
    CHECK (sweep_at >= expires_at
           AND num_nonnulls(completed_at, status, head, body) = CASE WHEN lease_until IS NULL THEN 4 ELSE 0 END)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02,
    autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.02,
    toast.autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX idempotency_keys_sweep_at ON {schema}.idempotency_keys (sweep_at);
"];

/// The table of the keys, in the schema.
pub(crate) const TABLE: &str = "idempotency_keys";

const VERSIONS: &str = "
CREATE TABLE IF NOT EXISTS {schema}.schema_versions (
    version         integer     NOT NULL PRIMARY KEY,
    compatible_from integer     NOT NULL,
    applied_at      timestamptz NOT NULL DEFAULT now()
);
";

/// The columns that the statements name.
const COLUMNS: [&str; 18] = [
    "id",
    "namespace",
    "endpoint",
    "caller",
    "key",
    "fingerprint_target",
    "fingerprint_body",
    "revision",
    "attempt",
    "created_at",
    "granted_at",
    "lease_until",
    "completed_at",
    "status",
    "head",
    "body",
    "expires_at",
    "sweep_at",
];

/// What the database says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    version: u32,
    compatible_from: u32,
}

/// The SQL that takes the schema from version `from` to [`SCHEMA_VERSION`], in one transaction.
pub(crate) fn migration_sql(schema: &str, from: u32) -> String {
    let steps = steps(schema, from);
    if steps.is_empty() {
        return String::new();
    }
    let create =
        if from == 0 { format!("CREATE SCHEMA IF NOT EXISTS {};", quoted(schema)) } else { String::new() };
    format!("BEGIN;\nSELECT pg_advisory_xact_lock({MIGRATION_LOCK});\n{create}{steps}COMMIT;\n")
}

fn steps(schema: &str, from: u32) -> String {
    let schema = quoted(schema);
    let mut sql = String::new();
    for (version, migration) in (1..).zip(MIGRATIONS).skip(from as usize) {
        if version == 1 {
            sql += &VERSIONS.replace("{schema}", &schema);
        }
        sql += &migration.replace("{schema}", &schema);
        sql += &format!(
            "INSERT INTO {schema}.schema_versions (version, compatible_from) VALUES ({version}, {COMPATIBLE_FROM});\n"
        );
    }
    sql
}

/// The version in the database, or `None` if it has no tables. Writes nothing.
pub(crate) async fn version(target: &Target) -> Result<Option<u32>, OpenError> {
    let mut live = target.connect().await.map_err(|error| target.explain(&error))?;
    let found = in_time(target, look(target, &mut live.connection)).await?;
    Ok(found.map(|found| found.version))
}

/// Opens the database, with its schema as this version wants it.
pub(crate) async fn prepare(target: &Target) -> Result<(Live, Migrated), OpenError> {
    let mut live = target.connect().await.map_err(|error| target.explain(&error))?;
    let migrated = in_time(target, migrate(target, &mut live.connection)).await?;
    in_time(target, check(target, &mut live.connection)).await?;
    Ok((live, migrated))
}

async fn in_time<T>(
    target: &Target,
    work: impl Future<Output = Result<T, OpenError>>,
) -> Result<T, OpenError> {
    timeout(MIGRATION_TIME_MAX, work).await.unwrap_or_else(|_| {
        Err(OpenError::failed(format!("{} did not answer within {MIGRATION_TIME_MAX:?}", target.name)))
    })
}

pub(crate) fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

async fn look(target: &Target, connection: &mut PgConnection) -> Result<Option<Version>, OpenError> {
    let explain = |error: sqlx::Error| target.explain(&error);
    // From the catalog and not by `to_regclass`: that may answer from before the migration lock was won.
    let exists = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n \
         ON n.oid = c.relnamespace WHERE n.nspname = {} AND c.relname = 'schema_versions')",
        literal(&target.schema)
    );
    let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(exists))).await.map_err(explain)?;
    if !row.try_get::<bool, _>(0).map_err(explain)? {
        return Ok(None);
    }
    let table = format!("{}.schema_versions", quoted(&target.schema));
    let newest = format!("SELECT version, compatible_from FROM {table} ORDER BY version DESC LIMIT 1");
    let row = connection.fetch_optional(sqlx::raw_sql(AssertSqlSafe(newest))).await.map_err(explain)?;
    let Some(row) = row else { return Ok(None) };
    let number = |column: usize| row.try_get::<i32, _>(column).map(i32::cast_unsigned).map_err(explain);
    Ok(Some(Version { version: number(0)?, compatible_from: number(1)? }))
}

/// The version to start from, if this program can use the database.
fn check_version(target: &Target, found: Option<Version>) -> Result<u32, OpenError> {
    match found {
        None => Ok(0),
        Some(Version { version, compatible_from }) if compatible_from <= SCHEMA_VERSION => Ok(version),
        Some(Version { version, .. }) => Err(OpenError::refused(format!(
            "{} has schema version {version} and this program knows up to {SCHEMA_VERSION}; use a newer onlyonce",
            target.name
        ))),
    }
}

/// Race: ten instances find the same old schema. One migrates under the lock, which ends with its
/// transaction; the others then read the new version under the same lock.
async fn migrate(target: &Target, connection: &mut PgConnection) -> Result<Migrated, OpenError> {
    let explain = |error: sqlx::Error| target.explain(&error);
    let found = check_version(target, look(target, connection).await?)?;
    if found >= SCHEMA_VERSION {
        return Ok(Migrated { from: found, to: found });
    }
    let patience = MIGRATION_TIME_MAX.as_millis();
    let begin = format!(
        "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {patience}; \
         SET LOCAL statement_timeout = {patience}; \
         SET LOCAL idle_in_transaction_session_timeout = {patience}; \
         SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"
    );
    connection.execute(sqlx::raw_sql(AssertSqlSafe(begin))).await.map_err(explain)?;
    let migrated = migrate_locked(target, connection).await;
    let end = if migrated.is_ok() { "COMMIT" } else { "ROLLBACK" };
    let ended = connection.execute(sqlx::raw_sql(end)).await.map_err(explain);
    let migrated = migrated?;
    ended?;
    Ok(migrated)
}

async fn migrate_locked(target: &Target, connection: &mut PgConnection) -> Result<Migrated, OpenError> {
    let explain = |error: sqlx::Error| target.explain(&error);
    let from = check_version(target, look(target, connection).await?)?;
    if from >= SCHEMA_VERSION {
        return Ok(Migrated { from, to: from });
    }
    // Asked first, because creating a schema wants a privilege even where the schema exists.
    let schema = quoted(&target.schema);
    let exists = format!(
        "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = {})",
        literal(&target.schema)
    );
    let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(exists))).await.map_err(explain)?;
    let mut sql = String::new();
    if !row.try_get::<bool, _>(0).map_err(explain)? {
        sql = format!("CREATE SCHEMA {schema};");
    }
    sql += &steps(&target.schema, from);
    connection.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.map_err(explain)?;
    Ok(Migrated { from, to: SCHEMA_VERSION })
}

/// Refuses a database in which the guarantee would not hold: without the unique id two claims of one key
/// both pass, and an unlogged table is empty after a crash.
async fn check(target: &Target, connection: &mut PgConnection) -> Result<(), OpenError> {
    let explain = |error: sqlx::Error| target.explain(&error);
    let schema = literal(&target.schema);
    let columns: Vec<String> = COLUMNS.iter().map(|column| literal(column)).collect();
    let question = format!(
        "SELECT c.relpersistence = 'u', \
            EXISTS (SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a \
                ON a.attrelid = c.oid AND a.attnum = i.indkey[0] AND a.attname = 'id' \
                WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indimmediate \
                  AND i.indpred IS NULL AND i.indnkeyatts = 1), \
            (SELECT count(*) FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND NOT a.attisdropped \
                AND a.attname IN ({})), \
            has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') \
                AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE') \
                AND has_table_privilege(c.oid, 'DELETE') \
         FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = {schema} AND c.relname = 'idempotency_keys'",
        columns.join(", ")
    );
    let row = connection.fetch_optional(sqlx::raw_sql(AssertSqlSafe(question))).await.map_err(explain)?;
    let refused = |what: &str| {
        let Target { name, schema, .. } = target;
        Err(OpenError::refused(format!("{name}: table {schema}.idempotency_keys {what}")))
    };
    let Some(row) = row else {
        return refused("is gone, though the schema's version says that it was made; restore it");
    };
    let yes = |column: usize| row.try_get::<bool, _>(column).map_err(explain);
    if !yes(1)? {
        return refused("has no unique index on id alone; without one two claims of a key both pass");
    }
    if row.try_get::<i64, _>(2).map_err(explain)? != COLUMNS.len() as i64 {
        return refused("is not as it was made: columns are missing");
    }
    if yes(0)? && !target.allow_volatile {
        return refused(
            "is unlogged, so it is empty after a crash; ALTER TABLE ... SET LOGGED, or set allow_volatile = true",
        );
    }
    if !yes(3)? {
        let schema = quoted(&target.schema);
        return refused(&format!(
            "is not this user's to write; GRANT USAGE ON SCHEMA {schema} and GRANT SELECT, INSERT, UPDATE, \
             DELETE ON ALL TABLES IN SCHEMA {schema} to it"
        ));
    }
    Ok(())
}

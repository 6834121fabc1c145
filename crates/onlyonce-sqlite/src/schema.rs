//! The tables, whose they are, and how they come about.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Connection, Executor, Row, SqliteConnection};
use tokio::time::sleep;

use crate::error::{code, extended, primary};
use crate::link::Target;
use crate::options::Synchronous;
use crate::sql;
use crate::{Migrated, OpenError};

/// The schema that this version writes.
pub const SCHEMA_VERSION: u32 = 1;

/// Stands in the file's header and says that the database is Onlyonce's: `1cee` and `0001`.
const APPLICATION_ID: i64 = 0x1cee_0001;

/// Each entry takes the schema one version further; an entry that was released is never changed. `{keys}`
/// stands for the table, as in [`sql`].
///
/// The id is a plain primary key beside the rowid: a table clustered by an id that is mostly random would move
/// large bodies about. There are two indexes because every claim pays for each of them, and nothing that
/// completing a key in time changes is in one. `sweep_at` is how sweeps find what expired, and the order of
/// listings: it is `expires_at` as of the claim, and completing in time only brings that nearer. A client key
/// is found through the id: see [`Id::span`](onlyonce_core::Id::span).
const MIGRATIONS: [&str; SCHEMA_VERSION as usize] = ["
    CREATE TABLE {keys} (
        id                 BLOB    NOT NULL PRIMARY KEY CHECK (length(id) = 32),
        namespace          TEXT    NOT NULL,
        endpoint           TEXT    NOT NULL,
        caller             TEXT    NOT NULL,
        key                TEXT    NOT NULL,
        fingerprint_target BLOB    NOT NULL CHECK (length(fingerprint_target) = 32),
        fingerprint_body   BLOB    NOT NULL CHECK (length(fingerprint_body) = 32),
        revision           BLOB    NOT NULL CHECK (length(revision) = 16),
        attempt            INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        granted_at         INTEGER NOT NULL,
        lease_until        INTEGER,
        completed_at       INTEGER,
        status             INTEGER,
        expires_at         INTEGER NOT NULL,
        sweep_at           INTEGER NOT NULL,
        head               BLOB,
        body               BLOB,
        CHECK ((lease_until IS NULL) <> (completed_at IS NULL)),
        CHECK ((completed_at IS NULL) = (status IS NULL)),
        CHECK ((completed_at IS NULL) = (head IS NULL)),
        CHECK ((completed_at IS NULL) = (body IS NULL)),
        CHECK (sweep_at >= expires_at)
    ) STRICT;
    CREATE INDEX {keys}_sweep_at ON {keys} (sweep_at);
"];

/// Says which version is in an application's file, whose header is the application's.
const VERSIONS: &str = "
    CREATE TABLE IF NOT EXISTS onlyonce_schema_versions (
        version    INTEGER NOT NULL PRIMARY KEY,
        applied_at INTEGER NOT NULL
    ) STRICT;
";

/// Whose a database is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// Nobody's yet: there is nothing in it, or nothing of ours if it is shared.
    Nobody,
    /// Onlyonce's, or its part of it is, at this version.
    Ours(u32),
    Foreign,
}

/// The version in the file, or `None` if there is no file or nothing in it. Writes nothing.
pub(crate) async fn version(target: &Target) -> Result<Option<u32>, OpenError> {
    match look(target).await? {
        Owner::Nobody => Ok(None),
        Owner::Ours(version) => Ok(Some(version)),
        Owner::Foreign => Err(foreign(target)),
    }
}

/// Opens the database for writing, with its schema as this version wants it.
pub(crate) async fn prepare(target: &Target) -> Result<(SqliteConnection, Migrated), OpenError> {
    if target.path.as_ref().is_some_and(|path| path.is_dir()) {
        let name = &target.name;
        return Err(OpenError::refused(format!("{name} is a folder; give the path of a SQLite file")));
    }
    // Before anything may write: another's database stays as it is, byte for byte.
    let owner = look(target).await?;
    check_version(target, owner)?;
    if owner == Owner::Nobody && !target.create && target.path.as_ref().is_some_and(|path| !path.exists()) {
        return Err(OpenError::failed(format!("the SQLite file {} does not exist", target.name)));
    }
    let explain = |error| target.explain(error);
    let mut connection = target.connect(target.create).await.map_err(explain)?;
    write_ahead(target, &mut connection).await?;
    check_synchronous(target, &mut connection).await?;
    let migrated = migrate(target, &mut connection).await?;
    check(target, &mut connection).await?;
    Ok((connection, migrated))
}

async fn look(target: &Target) -> Result<Owner, OpenError> {
    if target.path.as_ref().is_none_or(|path| !path.exists()) {
        return Ok(Owner::Nobody);
    }
    let looked = async {
        let mut connection = target.connect_to_look().await?;
        let owner = owner(target, &mut connection).await;
        let _ = connection.close().await;
        owner
    };
    match looked.await {
        // A process died while it created the file; only a writer can finish or undo that.
        Err(error) if extended(&error) == Some(code::READONLY_ROLLBACK) => Ok(Owner::Nobody),
        looked => looked.map_err(|error| target.explain(error)),
    }
}

async fn owner(target: &Target, connection: &mut SqliteConnection) -> Result<Owner, sqlx::Error> {
    let row = sqlx::query(
        "SELECT (SELECT application_id FROM pragma_application_id), \
                (SELECT user_version FROM pragma_user_version), \
                (SELECT count(*) FROM sqlite_schema), \
                EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'onlyonce_schema_versions'), \
                EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'onlyonce_idempotency_keys')",
    )
    .fetch_one(&mut *connection)
    .await?;
    let (application, version, objects): (i64, i64, i64) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    if target.shared {
        return match (application, row.try_get(3)?, row.try_get(4)?) {
            (APPLICATION_ID, _, _) | (_, false, true) => Ok(Owner::Foreign),
            (_, false, false) => Ok(Owner::Nobody),
            (_, true, _) => {
                let version: i64 = sqlx::query_scalar(target.sql().version).fetch_one(connection).await?;
                Ok(u32::try_from(version).map_or(Owner::Foreign, Owner::Ours))
            }
        };
    }
    Ok(match (application, u32::try_from(version)) {
        (APPLICATION_ID, Ok(version)) => Owner::Ours(version),
        (0, Ok(0)) if objects == 0 => Owner::Nobody,
        _ => Owner::Foreign,
    })
}

fn foreign(target: &Target) -> OpenError {
    let name = &target.name;
    OpenError::refused(if target.shared {
        format!(
            "the SQLite file {name} is one of Onlyonce's own, or has other tables whose names begin with \
             onlyonce_; an application's file is wanted, or no shared=true"
        )
    } else {
        format!(
            "the SQLite file {name} belongs to another application; Onlyonce wants a file of its own, or \
             shared=true to keep its tables beside that application's"
        )
    })
}

/// The version to start from, if this one can use the database.
fn check_version(target: &Target, owner: Owner) -> Result<u32, OpenError> {
    match owner {
        Owner::Nobody => Ok(0),
        Owner::Ours(version) if version <= SCHEMA_VERSION => Ok(version),
        Owner::Ours(version) => Err(OpenError::refused(format!(
            "the SQLite file {} has schema version {version} and this program knows up to {SCHEMA_VERSION}; \
             use a newer onlyonce",
            target.name
        ))),
        Owner::Foreign => Err(foreign(target)),
    }
}

/// Switches to a write-ahead log, which outlives the connection.
///
/// Race: many processes open a new file at once. The switch wants the file for itself, and SQLite's busy
/// timeout does not cover it.
async fn write_ahead(target: &Target, connection: &mut SqliteConnection) -> Result<(), OpenError> {
    if target.path.is_none() {
        return Ok(());
    }
    if target.shared && has_its_own_mode(connection).await.map_err(|error| target.explain(error))? {
        return Err(OpenError::refused(format!(
            "the SQLite file {} is shared with an application and keeps no write-ahead log; set \
             `PRAGMA journal_mode = WAL` in the application",
            target.name
        )));
    }
    let deadline = Instant::now() + target.busy_timeout;
    let mut wait = Duration::from_millis(2);
    let mode: String = loop {
        match sqlx::query_scalar("PRAGMA journal_mode = WAL").fetch_one(&mut *connection).await {
            Ok(mode) => break mode,
            Err(error) if primary(&error) == Some(code::BUSY) && Instant::now() < deadline => {
                sleep(wait).await;
                wait = (wait * 2).min(Duration::from_millis(100));
            }
            Err(error) => return Err(target.explain(error)),
        }
    };
    if mode.eq_ignore_ascii_case("wal") {
        return Ok(());
    }
    Err(OpenError::refused(format!(
        "the SQLite file {} keeps journal mode {mode}, perhaps because of its file system; wal is needed",
        target.name
    )))
}

/// Whether there is something in the database, under another journal mode than ours.
async fn has_its_own_mode(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT EXISTS (SELECT 1 FROM sqlite_schema) AND (SELECT journal_mode FROM pragma_journal_mode) <> 'wal'",
    )
    .fetch_one(connection)
    .await
}

pub(crate) async fn check_synchronous(
    target: &Target,
    connection: &mut SqliteConnection,
) -> Result<(), OpenError> {
    let found: i64 = sqlx::query_scalar("PRAGMA synchronous")
        .fetch_one(connection)
        .await
        .map_err(|error| target.explain(error))?;
    let wanted = match target.synchronous {
        Synchronous::Off => 0,
        Synchronous::Normal => 1,
        Synchronous::Full => 2,
        Synchronous::Extra => 3,
    };
    if found >= wanted {
        return Ok(());
    }
    Err(OpenError::refused(format!(
        "SQLite runs {} with synchronous = {found} although {} was asked for; full or extra is needed",
        target.name, target.synchronous
    )))
}

/// Race: ten processes find the same old schema. One migrates under the write lock; the others then
/// read the new version under the same lock.
async fn migrate(target: &Target, connection: &mut SqliteConnection) -> Result<Migrated, OpenError> {
    let explain = |error| target.explain(error);
    let found = check_version(target, owner(target, connection).await.map_err(explain)?)?;
    if found == SCHEMA_VERSION {
        return Ok(Migrated { from: found, to: found });
    }
    connection.execute(sql::BEGIN).await.map_err(explain)?;
    let migrated = migrate_locked(target, connection).await;
    let end = if migrated.is_ok() { sql::COMMIT } else { sql::ROLLBACK };
    let ended = connection.execute(end).await.map_err(explain);
    let migrated = migrated?;
    ended?;
    Ok(migrated)
}

async fn migrate_locked(target: &Target, connection: &mut SqliteConnection) -> Result<Migrated, OpenError> {
    let explain = |error| target.explain(error);
    let from = check_version(target, owner(target, connection).await.map_err(explain)?)?;
    if from == SCHEMA_VERSION {
        return Ok(Migrated { from, to: from });
    }
    for migration in &MIGRATIONS[from as usize..] {
        let migration = migration.replace("{keys}", target.sql().table);
        connection.execute(AssertSqlSafe(migration)).await.map_err(explain)?;
    }
    let seal = if target.shared {
        let now = sql::NOW;
        format!("{VERSIONS} INSERT INTO onlyonce_schema_versions VALUES ({SCHEMA_VERSION}, ({now}));")
    } else {
        format!("PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};")
    };
    connection.execute(AssertSqlSafe(seal)).await.map_err(explain)?;
    Ok(Migrated { from, to: SCHEMA_VERSION })
}

/// Refuses a database in which the guarantee would not hold: without the unique id two claims of one
/// key both pass.
async fn check(target: &Target, connection: &mut SqliteConnection) -> Result<(), OpenError> {
    let sql = target.sql();
    let table = sql.table;
    let unique: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pragma_index_list(?) AS list \
         WHERE list.\"unique\" = 1 AND list.partial = 0 \
           AND (SELECT group_concat(name) FROM pragma_index_info(list.name)) = 'id'",
    )
    .bind(table)
    .fetch_one(&mut *connection)
    .await
    .map_err(|error| target.explain(error))?;
    let damaged = |what: &str| {
        OpenError::refused(format!(
            "the SQLite file {} is damaged: {what}; restore it, or give the path of a new file",
            target.name
        ))
    };
    if unique == 0 {
        return Err(damaged(&format!("table {table} has no unique index on id")));
    }
    for statement in [&sql.insert, &sql.update, &sql.restart, &sql.delete, &sql.sweep, &sql.list] {
        let prepared = sqlx::SqlSafeStr::into_sql_str(statement.as_str());
        connection
            .prepare(prepared)
            .await
            .map_err(|error| damaged(&format!("table {table} is not as it was made")).with_source(error))?;
    }
    Ok(())
}

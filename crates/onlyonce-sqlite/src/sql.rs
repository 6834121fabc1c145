//! The statements and the rows.
//!
//! Each statement opens with the race it closes. All writes run under `BEGIN IMMEDIATE`: SQLite has one
//! write lock for the whole file and all processes, so what the transaction read is still so when it
//! writes. Each writing statement names the revision it replaces all the same, and the writer checks how
//! many rows it changed, so that a mistake above it rolls back instead of overwriting a holder.
//!
//! `{keys}` stands for the table: see [`Statements`].

use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use onlyonce_core::record::{Record, Seen, State};
use onlyonce_core::{Fingerprint, Id, Outcome, Revision, Timestamp};
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Arguments, Row, Sqlite};

/// The store's clock, in milliseconds since the Unix epoch.
macro_rules! now {
    () => {
        "CAST(round(unixepoch('subsec') * 1000) AS INTEGER)"
    };
}

macro_rules! columns {
    () => {
        "id, fingerprint_target, fingerprint_body, revision, attempt, created_at, granted_at, lease_until, \
         completed_at, status, head, body, expires_at, sweep_at"
    };
}

/// How many rows one round trip to SQLite carries at most.
pub(crate) const ROWS_MAX: usize = 64;

/// Race: two claims of one key. Whoever commits `BEGIN IMMEDIATE` first reads, decides and writes before
/// the other can read.
pub(crate) const BEGIN: &str = "BEGIN IMMEDIATE";
pub(crate) const COMMIT: &str = "COMMIT";
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// Race: a clock read before the lock was won would date a write before its predecessor.
pub(crate) const NOW: &str = concat!("SELECT ", now!());

/// Race: a row and a clock read apart could show a lease as over that is not. One statement is one
/// snapshot, and each row carries the clock of its reading.
const SELECT: &str = concat!("SELECT ", columns!(), ", ", now!(), " FROM {keys} WHERE id IN ");

/// Race: two inserts of one key. The primary key refuses the second, whatever the writer believed.
const INSERT: &str = concat!(
    "INSERT INTO {keys} (",
    columns!(),
    ", namespace, endpoint, caller, key) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);"
);

/// Race: a holder that lost its lease writes over its successor. It names a revision that is gone, and
/// changes no row. `sweep_at` stays, so that its index is left alone.
const UPDATE: &str = "UPDATE {keys} SET fingerprint_target = ?, fingerprint_body = ?, \
    revision = ?, attempt = ?, granted_at = ?, lease_until = ?, completed_at = ?, status = ?, head = ?, \
    body = ?, expires_at = ? WHERE id = ? AND revision = ?;";

/// Race: as above, for a key that starts afresh or is kept longer than its claim asked for.
const RESTART: &str = "UPDATE {keys} SET fingerprint_target = ?, fingerprint_body = ?, \
    revision = ?, attempt = ?, created_at = ?, granted_at = ?, lease_until = ?, completed_at = ?, status = ?, \
    head = ?, body = ?, expires_at = ?, sweep_at = ? WHERE id = ? AND revision = ?;";

/// Race: a release frees a key that another has taken over. It names a revision that is gone.
const DELETE: &str = "DELETE FROM {keys} WHERE id = ? AND revision = ?;";

/// Race: a sweep removes a key that was renewed or claimed afresh after it was found expired. Finding
/// and removing are one statement under the write lock.
const SWEEP: &str = concat!(
    "DELETE FROM {keys} WHERE rowid IN (SELECT rowid FROM {keys} WHERE sweep_at <= ",
    now!(),
    " ORDER BY sweep_at LIMIT ?)"
);

/// Race: none; a listing is a snapshot, and nothing is decided from it.
const LIST: &str =
    concat!("SELECT ", columns!(), ", ", now!(), ", namespace, endpoint, caller, key FROM {keys}");

/// A statement repeated 1, 2, 4 … [`ROWS_MAX`] times, so that one round trip carries many rows and few
/// texts stay prepared.
pub(crate) struct Repeated([Arc<str>; 7]);

impl Repeated {
    fn new(one: &str) -> Self {
        Self(std::array::from_fn(|power| one.repeat(1 << power).into()))
    }

    /// The longest text for at most `rows` rows, and how many it takes.
    pub(crate) fn at_most(&self, rows: usize) -> (Arc<str>, usize) {
        let power = rows.clamp(1, ROWS_MAX).ilog2() as usize;
        (Arc::clone(&self.0[power]), 1 << power)
    }
}

/// [`SELECT`] for a number of ids.
struct Select {
    places: usize,
    alone: Arc<str>,
    /// With [`NOW`] in front.
    after_now: Arc<str>,
}

/// Every statement about one table of keys.
pub(crate) struct Statements {
    /// The table, by its name in the database.
    pub(crate) table: &'static str,
    /// One column: the schema's version.
    pub(crate) version: &'static str,
    pub(crate) insert: String,
    pub(crate) update: String,
    pub(crate) restart: String,
    pub(crate) delete: String,
    pub(crate) sweep: String,
    pub(crate) list: String,
    pub(crate) inserts: Repeated,
    pub(crate) updates: Repeated,
    pub(crate) restarts: Repeated,
    pub(crate) deletes: Repeated,
    selects: [Select; 3],
}

/// In a file of Onlyonce's own.
static OWN: LazyLock<Statements> =
    LazyLock::new(|| Statements::about("idempotency_keys", "SELECT user_version FROM pragma_user_version"));

/// Among an application's tables. The header's `user_version` is the application's there.
static SHARED: LazyLock<Statements> = LazyLock::new(|| {
    Statements::about(
        "onlyonce_idempotency_keys",
        "SELECT coalesce(max(version), 0) FROM onlyonce_schema_versions",
    )
});

impl Statements {
    /// Those for a file of Onlyonce's own, or for one that is `shared` with an application.
    pub(crate) fn of(shared: bool) -> &'static Self {
        if shared { &SHARED } else { &OWN }
    }

    fn about(table: &'static str, version: &'static str) -> Self {
        let with_table = |text: &str| text.replace("{keys}", table);
        let repeated = |text| Repeated::new(&with_table(text));
        let selects = [1, 8, ROWS_MAX].map(|places| {
            let alone = format!("{}({})", with_table(SELECT), vec!["?"; places].join(", "));
            Select { places, after_now: format!("{NOW}; {alone}").into(), alone: alone.into() }
        });
        Self {
            table,
            version,
            insert: with_table(INSERT),
            update: with_table(UPDATE),
            restart: with_table(RESTART),
            delete: with_table(DELETE),
            sweep: with_table(SWEEP),
            list: with_table(LIST),
            inserts: repeated(INSERT),
            updates: repeated(UPDATE),
            restarts: repeated(RESTART),
            deletes: repeated(DELETE),
            selects,
        }
    }

    /// The text that reads these ids, at most [`ROWS_MAX`], and its arguments. `after_now` puts the clock
    /// in a row of its own in front.
    pub(crate) fn select(
        &self,
        ids: &[Id],
        after_now: bool,
    ) -> Result<(Arc<str>, SqliteArguments), sqlx::Error> {
        let largest = &self.selects[self.selects.len() - 1];
        let select = self.selects.iter().find(|select| ids.len() <= select.places).unwrap_or(largest);
        let mut arguments = SqliteArguments::default();
        // An id may stand in the list more than once.
        let last = ids.last().into_iter().cycle();
        for id in ids.iter().chain(last).take(select.places) {
            bind_id(&mut arguments, *id)?;
        }
        Ok((Arc::clone(if after_now { &select.after_now } else { &select.alone }), arguments))
    }
}

/// Adds the columns of a record to the arguments, in the order of the statements; `created_at` and `sweep_at`
/// only where the statement has them.
pub(crate) fn bind_record(
    to: &mut SqliteArguments,
    record: &Record,
    sweep_at: Option<Timestamp>,
) -> Result<(), sqlx::Error> {
    fn add<'q, T>(to: &mut SqliteArguments, value: T) -> Result<(), sqlx::Error>
    where
        T: sqlx::Encode<'q, Sqlite> + sqlx::Type<Sqlite>,
    {
        to.add(value).map_err(sqlx::Error::Encode)
    }
    let (lease_until, done) = match &record.state {
        State::Running { lease_until } => (Some(lease_until.0), None),
        State::Done { outcome, completed_at } => (None, Some((completed_at.0, outcome))),
    };
    add(to, record.fingerprint.target.as_slice())?;
    add(to, record.fingerprint.body.as_slice())?;
    bind_revision(to, record.revision)?;
    add(to, i64::from(record.attempt))?;
    if sweep_at.is_some() {
        add(to, record.created_at.0)?;
    }
    add(to, record.granted_at.0)?;
    add(to, lease_until)?;
    add(to, done.map(|(completed_at, _)| completed_at))?;
    add(to, done.map(|(_, outcome)| i64::from(outcome.status)))?;
    add(to, done.map(|(_, outcome)| &outcome.head[..]))?;
    add(to, done.map(|(_, outcome)| &outcome.body[..]))?;
    add(to, record.expires_at.0)?;
    sweep_at.map_or(Ok(()), |at| add(to, at.0))
}

pub(crate) fn bind_id(to: &mut SqliteArguments, id: Id) -> Result<(), sqlx::Error> {
    to.add(id.0.as_slice()).map_err(sqlx::Error::Encode)
}

pub(crate) fn bind_revision(to: &mut SqliteArguments, revision: Revision) -> Result<(), sqlx::Error> {
    to.add(revision.0.to_be_bytes().as_slice()).map_err(sqlx::Error::Encode)
}

/// The column that holds the clock in [`SELECT`] and [`LIST`].
const NOW_COLUMN: usize = 14;

/// The first of the four readable parts in [`LIST`].
pub(crate) const PARTS_COLUMN: usize = 15;

/// Which id a row is about.
pub(crate) fn id(row: &SqliteRow) -> Result<Id, String> {
    bytes(row, 0).map(Id)
}

/// When the record in a row can be swept at the earliest.
pub(crate) fn sweep_at(row: &SqliteRow) -> Result<Timestamp, String> {
    get(row, 13).map(Timestamp)
}

/// The record in a row, and the clock of its reading; in words what is wrong with it otherwise.
pub(crate) fn seen(row: &SqliteRow) -> Result<Seen, String> {
    let lease_until: Option<i64> = get(row, 7)?;
    let completed_at: Option<i64> = get(row, 8)?;
    let state = match (lease_until, completed_at) {
        (Some(at), None) => State::Running { lease_until: Timestamp(at) },
        (None, Some(at)) => {
            let status = get::<i64>(row, 9)?;
            let status = u16::try_from(status).map_err(|_| format!("status {status}"))?;
            let outcome = Outcome { status, head: blob(row, 10)?, body: blob(row, 11)? };
            State::Done { outcome, completed_at: Timestamp(at) }
        }
        _ => return Err("neither running nor done".to_owned()),
    };
    let attempt = get::<i64>(row, 4)?;
    let record = Record {
        fingerprint: Fingerprint { target: bytes(row, 1)?, body: bytes(row, 2)? },
        revision: Revision(u128::from_be_bytes(bytes(row, 3)?)),
        attempt: u32::try_from(attempt).map_err(|_| format!("attempt {attempt}"))?,
        created_at: Timestamp(get(row, 5)?),
        granted_at: Timestamp(get(row, 6)?),
        state,
        expires_at: Timestamp(get(row, 12)?),
    };
    Ok(Seen { record, now: Timestamp(get(row, NOW_COLUMN)?) })
}

pub(crate) fn get<'r, T>(row: &'r SqliteRow, column: usize) -> Result<T, String>
where
    T: sqlx::Decode<'r, Sqlite> + sqlx::Type<Sqlite>,
{
    row.try_get(column).map_err(|error| error.to_string())
}

fn bytes<const N: usize>(row: &SqliteRow, column: usize) -> Result<[u8; N], String> {
    let found: &[u8] = get(row, column)?;
    found.try_into().map_err(|_| format!("{} bytes instead of {N} in column {column}", found.len()))
}

fn blob(row: &SqliteRow, column: usize) -> Result<Bytes, String> {
    get::<&[u8]>(row, column).map(Bytes::copy_from_slice)
}

//! The statements and the rows.
//!
//! Each statement opens with the race it closes. Every one runs in a transaction of its own at READ
//! COMMITTED: it sees what was committed when it began. A writing statement that meets a row which another
//! transaction has changed waits for that one's end and then checks its condition again, on the newest
//! version; so the revision that it names is compared with what is there, not with what was.
//!
//! Within one statement an id stands at most once.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use onlyonce_core::engine::CALL_TIME_MAX;
use onlyonce_core::record::{Record, Seen, State};
use onlyonce_core::store::Cursor;
use onlyonce_core::{Fingerprint, Id, Operation, Outcome, Revision, Timestamp, Write};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{Arguments, Postgres, Row};

use crate::link::durable;

/// The clock once for a whole statement, in milliseconds since the Unix epoch.
///
/// `clock_timestamp()` and not `now()`: that is when the transaction began, which behind a pooler is a
/// round trip earlier. A statement that waits for a lock keeps the time from before the wait, so a lease
/// ends sooner and never later than its holder thinks.
const CLOCK: &str =
    "clock AS MATERIALIZED (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now)";

const COLUMNS: &str = "id, fingerprint_target, fingerprint_body, revision, attempt, created_at, granted_at, \
    lease_until, completed_at, status, head, body, expires_at";

/// The statements, for one schema.
pub(crate) struct Sql {
    pub(crate) insert: Arc<str>,
    pub(crate) replace: Arc<str>,
    /// `insert` in a user's transaction.
    pub(crate) claim: Arc<str>,
    /// `replace` by a grant in a user's transaction.
    pub(crate) take_over: Arc<str>,
    pub(crate) write_many: Arc<str>,
    pub(crate) remove: Arc<str>,
    pub(crate) remove_many: Arc<str>,
    pub(crate) read: Arc<str>,
    pub(crate) sweep: Arc<str>,
    /// Without its conditions.
    pub(crate) list: String,
}

/// A name as SQL writes it.
pub(crate) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// `time` on the store's clock, from then on; the far future where it does not fit.
fn from_now(time: &str) -> String {
    format!("CASE WHEN {time} > 9223372036854775807 - now THEN 9223372036854775807 ELSE now + {time} END")
}

/// The columns of a write in terms of its parts, which come as `{prefix}name`.
fn assigned(part: impl Fn(&str) -> String) -> [(&'static str, String); 12] {
    [
        ("fingerprint_target", part("target")),
        ("fingerprint_body", part("body_print")),
        ("revision", part("revision")),
        ("attempt", part("attempt")),
        ("created_at", format!("coalesce({}, now)", part("created_at"))),
        ("granted_at", format!("coalesce({}, now)", part("granted_at"))),
        ("lease_until", from_now(&part("lease"))),
        ("completed_at", format!("CASE WHEN {} IS NULL THEN now END", part("lease"))),
        ("status", part("status")),
        ("head", part("head")),
        ("body", part("body")),
        ("expires_at", from_now(&part("remembered"))),
    ]
}

/// The parts of a write, in the order in which [`Parts`] binds them behind the id, and their types.
const PARTS: [(&str, &str); 11] = [
    ("target", "bytea"),
    ("body_print", "bytea"),
    ("revision", "bytea"),
    ("attempt", "bigint"),
    ("created_at", "bigint"),
    ("granted_at", "bigint"),
    ("lease", "bigint"),
    ("status", "integer"),
    ("head", "bytea"),
    ("body", "bytea"),
    ("remembered", "bigint"),
];

/// What an insert has besides.
const SCOPE: [(&str, &str); 4] =
    [("namespace", "text"), ("endpoint", "text"), ("caller", "text"), ("key", "text")];

impl Sql {
    pub(crate) fn new(schema: &str) -> Self {
        let table = format!("{}.idempotency_keys", quoted(schema));
        Self {
            insert: insert(&table, "true").into(),
            replace: replace(&table, "now").into(),
            claim: insert(&table, &settings_restored()).into(),
            take_over: replace(&table, &format!("now, {}", settings_restored())).into(),
            write_many: write_many(&table).into(),
            remove: remove(&table).into(),
            remove_many: remove_many(&table).into(),
            read: read(&table).into(),
            sweep: sweep(&table).into(),
            list: list(&table),
        }
    }
}

/// `$n::type` for a part of a call that comes alone.
fn alone(first: usize) -> impl Fn(&str) -> String {
    move |name| match PARTS.iter().chain(&SCOPE).position(|(part, _)| *part == name) {
        Some(at) => {
            format!("${}::{}", first + at, PARTS.iter().chain(&SCOPE).nth(at).map_or("", |part| part.1))
        }
        None => name.to_owned(),
    }
}

fn insert_into(table: &str, part: impl Fn(&str) -> String, id: &str, from: &str) -> String {
    let columns = assigned(&part);
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    let values: Vec<&str> = columns.iter().map(|(_, value)| value.as_str()).collect();
    let scope: Vec<String> = SCOPE.iter().map(|(name, _)| part(name)).collect();
    format!(
        "INSERT INTO {table} (id, {}, sweep_at, namespace, endpoint, caller, key) \
         SELECT {id}, {}, {}, {} FROM {from} ON CONFLICT (id) DO NOTHING RETURNING id",
        names.join(", "),
        values.join(", "),
        from_now(&part("remembered")),
        scope.join(", "),
    )
}

/// Race: two inserts of one key. The primary key lets one pass; the other waits for its commit and does
/// nothing. What was committed before the statement began is told from the same snapshot, and then nothing
/// is tried and nothing written, not even a transaction id used. What was committed in between is in
/// neither: there is no row, and the writer asks again, with a new snapshot that has it.
///
/// `written` is true, and what else shall happen then.
fn insert(table: &str, written: &str) -> String {
    let inserted = insert_into(table, alone(2), "$1::bytea", "clock WHERE NOT EXISTS (SELECT FROM seen)");
    format!(
        "WITH {CLOCK}, \
         seen AS MATERIALIZED (SELECT {COLUMNS} FROM {table} WHERE id = $1::bytea), \
         inserted AS ({inserted}) \
         SELECT {COLUMNS}, now, false FROM seen, clock \
         UNION ALL SELECT id, {}, now, {written} FROM inserted, clock",
        nulls(),
    )
}

/// Settings of the session that hold until a user's transaction has claimed its key.
const UNTIL_CLAIMED: [&str; 2] = ["lock_timeout", "statement_timeout"];

/// Opens a transaction of the user's pool, with its own isolation level.
///
/// The settings come first and then `BEGIN`, which takes what was done in the same message into the
/// transaction: if one of them fails, none is open. What they were is kept in the transaction itself, for
/// [`settings_restored`].
pub(crate) fn begin(wait: Duration, allow_volatile: bool) -> String {
    let wait = wait.clamp(Duration::from_millis(1), LOCK_WAIT_MAX);
    let times = [wait, wait + CALL_TIME_MAX].map(|time| time.as_millis());
    let keep = UNTIL_CLAIMED.map(|name| {
        format!("pg_catalog.set_config('onlyonce.{name}', pg_catalog.current_setting('{name}'), true)")
    });
    let set = UNTIL_CLAIMED.iter().zip(times);
    let set: String = set.map(|(name, time)| format!("; SET LOCAL {name} = {time}")).collect();
    format!("SELECT {}{set}{}; BEGIN", keep.join(", "), durable(allow_volatile))
}

/// Opens a transaction of the user's pool under its own settings, for whoever claims no key in it.
pub(crate) fn open(allow_volatile: bool) -> String {
    format!("SELECT{}; BEGIN", durable(allow_volatile))
}

/// Longer than anybody waits, and well within what the server can count.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(86_400);

/// True; and what the transaction then does runs under its user's settings again.
fn settings_restored() -> String {
    UNTIL_CLAIMED
        .map(|name| {
            format!(
                "pg_catalog.set_config('{name}', coalesce(nullif(pg_catalog.current_setting('onlyonce.{name}', \
                 true), ''), pg_catalog.current_setting('{name}')), true) IS NOT NULL"
            )
        })
        .join(" AND ")
}

/// As many NULLs as there are columns behind the id.
fn nulls() -> String {
    ["NULL"; 12].join(", ")
}

/// `sweep_at` rises with `expires_at` and never falls: completing a key in time leaves it alone, and so
/// every index.
fn assignments(part: impl Fn(&str) -> String) -> String {
    let columns = assigned(&part);
    let set: Vec<String> = columns.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    format!("{}, sweep_at = greatest(k.sweep_at, {})", set.join(", "), from_now(&part("remembered")))
}

/// Race: a holder that lost its lease writes over its successor. It names a revision that is gone, and
/// changes no row.
fn replace(table: &str, returning: &str) -> String {
    format!(
        "WITH {CLOCK} UPDATE {table} k SET {} FROM clock WHERE k.id = $1::bytea AND k.revision = $13::bytea \
         RETURNING {returning}",
        assignments(alone(2)),
    )
}

/// Race: a release frees a key that another has taken over. It names a revision that is gone.
fn remove(table: &str) -> String {
    format!("DELETE FROM {table} WHERE id = $1::bytea AND revision = $2::bytea RETURNING id")
}

/// Race: those of `insert` and `replace`, for many keys in one commit. All inserts come before the first
/// update (the condition on their count sees to that) and each kind locks in the order of the ids. So of two
/// such statements that meet on several keys neither waits for one that waits for it: who updates has no
/// insert left that could wait, inserts wait for inserts only in one order, and updates likewise.
fn write_many(table: &str) -> String {
    let arrays = |first: usize, parts: &[(&str, &str)]| {
        let casts = parts.iter().enumerate().map(|(at, (_, kind))| format!("${}::{kind}[]", first + at));
        let names: Vec<&str> = parts.iter().map(|(name, _)| *name).collect();
        (casts.collect::<Vec<_>>().join(", "), names.join(", "))
    };
    let id = [("id", "bytea")];
    let (insert_casts, insert_names) = arrays(1, &[&id[..], &PARTS[..], &SCOPE[..]].concat());
    let (replace_casts, replace_names) =
        arrays(17, &[&id[..], &PARTS[..], &[("expected", "bytea")]].concat());
    let inserted = insert_into(
        table,
        |name| format!("c.{name}"),
        "c.id",
        "claim c CROSS JOIN clock WHERE NOT EXISTS (SELECT FROM seen WHERE seen.id = c.id) ORDER BY c.id",
    );
    format!(
        "WITH {CLOCK}, \
         claim AS MATERIALIZED (SELECT * FROM unnest({insert_casts}) AS c ({insert_names})), \
         change AS MATERIALIZED (SELECT * FROM unnest({replace_casts}) AS c ({replace_names})), \
         seen AS MATERIALIZED (SELECT {COLUMNS} FROM {table} WHERE id = ANY ($1::bytea[])), \
         inserted AS ({inserted}), \
         replaced AS (UPDATE {table} k SET {} FROM change c CROSS JOIN clock \
             WHERE k.id = c.id AND k.id = ANY ($17::bytea[]) AND k.revision = c.expected \
               AND (SELECT count(*) FROM inserted) >= 0 RETURNING k.id) \
         SELECT {COLUMNS}, now, false FROM seen, clock \
         UNION ALL SELECT id, {}, now, true FROM inserted, clock \
         UNION ALL SELECT id, {}, now, true FROM replaced, clock",
        assignments(|name| format!("c.{name}")),
        nulls(),
        nulls(),
    )
}

/// Race: that of `remove`, for many keys in one commit. A statement of its own, because an update and a
/// removal that meet two of their like crosswise would deadlock.
fn remove_many(table: &str) -> String {
    format!(
        "DELETE FROM {table} k USING unnest($1::bytea[], $2::bytea[]) AS c (id, expected) \
         WHERE k.id = c.id AND k.id = ANY ($1::bytea[]) AND k.revision = c.expected RETURNING k.id"
    )
}

/// Race: a row and a clock read apart could show a lease as over that is not. One statement is one
/// snapshot, and its clock was read with it.
fn read(table: &str) -> String {
    format!("WITH {CLOCK} SELECT {COLUMNS}, now FROM {table}, clock WHERE id = ANY ($1::bytea[])")
}

/// Race: a sweep removes a key that was renewed or claimed afresh after it was found expired. The rows are
/// locked as they are found, at their newest version, and those that a claim has locked are skipped: a
/// sweep waits for nobody, and another sweep takes other rows.
fn sweep(table: &str) -> String {
    format!(
        "WITH {CLOCK}, \
         dead AS MATERIALIZED (SELECT id, revision FROM {table} WHERE sweep_at <= (SELECT now FROM clock) \
             ORDER BY sweep_at LIMIT $1::bigint FOR UPDATE SKIP LOCKED) \
         DELETE FROM {table} k USING dead \
         WHERE k.id = dead.id AND k.id = ANY (ARRAY (SELECT id FROM dead)) AND k.revision = dead.revision \
         RETURNING 1"
    )
}

/// Race: none; a listing is a snapshot, and nothing is decided from it.
fn list(table: &str) -> String {
    format!(
        "WITH {CLOCK} SELECT {COLUMNS}, now, namespace, endpoint, caller, key, sweep_at \
         FROM {table}, clock WHERE true"
    )
}

/// Text as the columns hold it. Postgres has no NUL in text, so NUL is written `\0` and a backslash `\\`;
/// any other text stays as it is, for people to search.
pub(crate) fn escaped(text: &str) -> String {
    if text.contains(['\0', '\\']) {
        text.replace('\\', "\\\\").replace('\0', "\\0")
    } else {
        text.to_owned()
    }
}

/// What [`escaped`] made of it, undone.
fn unescaped(text: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        plain.push(match character {
            '\\' => match characters.next() {
                Some('\\') => '\\',
                Some('0') => '\0',
                _ => return Err(format!("a backslash that escapes nothing in {text:?}")),
            },
            plain => plain,
        });
    }
    Ok(plain)
}

type Bound = Result<(), sqlx::error::BoxDynError>;

/// The columns of a write as durations: [`Write::at`] the beginning of time, to which the statement adds
/// the store's clock.
pub(crate) struct Parts {
    target: [u8; 32],
    body_print: [u8; 32],
    revision: [u8; 16],
    attempt: i64,
    created_at: Option<i64>,
    granted_at: Option<i64>,
    lease: Option<i64>,
    status: Option<i32>,
    head: Option<Bytes>,
    body: Option<Bytes>,
    remembered: i64,
}

impl Parts {
    pub(crate) fn of(write: &Write) -> Self {
        let (created_at, granted_at) = (write.created_at.map(|at| at.0), write.granted_at.map(|at| at.0));
        let Record { fingerprint, revision, attempt, state, expires_at, .. } = write.clone().at(Timestamp(0));
        let (lease, outcome) = match state {
            State::Running { lease_until } => (Some(lease_until.0), None),
            State::Done { outcome, .. } => (None, Some(outcome)),
        };
        Self {
            target: fingerprint.target,
            body_print: fingerprint.body,
            revision: revision.0.to_be_bytes(),
            attempt: attempt.into(),
            created_at,
            granted_at,
            lease,
            status: outcome.as_ref().map(|outcome| outcome.status.into()),
            head: outcome.as_ref().map(|outcome| outcome.head.clone()),
            body: outcome.map(|outcome| outcome.body),
            remembered: expires_at.0,
        }
    }

    fn bind_alone(&self, to: &mut PgArguments) -> Bound {
        to.add(&self.target[..])?;
        to.add(&self.body_print[..])?;
        to.add(&self.revision[..])?;
        to.add(self.attempt)?;
        to.add(self.created_at)?;
        to.add(self.granted_at)?;
        to.add(self.lease)?;
        to.add(self.status)?;
        to.add(self.head.as_deref())?;
        to.add(self.body.as_deref())?;
        to.add(self.remembered)
    }

    fn bind_many(all: &[&Self], to: &mut PgArguments) -> Bound {
        fn each<'a, T>(all: &[&'a Parts], part: impl Fn(&'a Parts) -> T) -> Vec<T> {
            all.iter().map(|parts| part(parts)).collect()
        }
        to.add(each(all, |parts| &parts.target[..]))?;
        to.add(each(all, |parts| &parts.body_print[..]))?;
        to.add(each(all, |parts| &parts.revision[..]))?;
        to.add(each(all, |parts| parts.attempt))?;
        to.add(each(all, |parts| parts.created_at))?;
        to.add(each(all, |parts| parts.granted_at))?;
        to.add(each(all, |parts| parts.lease))?;
        to.add(each(all, |parts| parts.status))?;
        to.add(each(all, |parts| parts.head.as_deref()))?;
        to.add(each(all, |parts| parts.body.as_deref()))?;
        to.add(each(all, |parts| parts.remembered))
    }
}

/// An insert, ready to be bound.
pub(crate) struct Claim {
    pub(crate) id: Id,
    parts: Parts,
    scope: [String; 4],
}

impl Claim {
    pub(crate) fn of(operation: &Operation, write: &Write) -> Self {
        let scope =
            [operation.namespace(), operation.endpoint(), operation.caller(), operation.key().as_str()];
        Self { id: operation.id(), parts: Parts::of(write), scope: scope.map(escaped) }
    }

    pub(crate) fn bind(&self, to: &mut PgArguments) -> Bound {
        to.add(&self.id.0[..])?;
        self.parts.bind_alone(to)?;
        self.scope.iter().try_for_each(|part| to.add(part.as_str()))
    }
}

/// A replace, ready to be bound.
pub(crate) struct Change {
    pub(crate) id: Id,
    parts: Parts,
    expected: [u8; 16],
}

impl Change {
    pub(crate) fn of(id: Id, expected: Revision, write: &Write) -> Self {
        Self { id, parts: Parts::of(write), expected: expected.0.to_be_bytes() }
    }

    pub(crate) fn bind(&self, to: &mut PgArguments) -> Bound {
        to.add(&self.id.0[..])?;
        self.parts.bind_alone(to)?;
        to.add(&self.expected[..])
    }
}

pub(crate) fn bind_many(claims: &[Claim], changes: &[Change], to: &mut PgArguments) -> Bound {
    to.add(claims.iter().map(|claim| &claim.id.0[..]).collect::<Vec<_>>())?;
    Parts::bind_many(&claims.iter().map(|claim| &claim.parts).collect::<Vec<_>>(), to)?;
    for part in 0..SCOPE.len() {
        to.add(claims.iter().map(|claim| claim.scope[part].as_str()).collect::<Vec<_>>())?;
    }
    to.add(changes.iter().map(|change| &change.id.0[..]).collect::<Vec<_>>())?;
    Parts::bind_many(&changes.iter().map(|change| &change.parts).collect::<Vec<_>>(), to)?;
    to.add(changes.iter().map(|change| &change.expected[..]).collect::<Vec<_>>())
}

pub(crate) fn bind_ids(ids: &[Id], to: &mut PgArguments) -> Bound {
    to.add(ids.iter().map(|id| &id.0[..]).collect::<Vec<_>>())
}

pub(crate) fn bind_removal(id: Id, expected: Revision, to: &mut PgArguments) -> Bound {
    to.add(&id.0[..])?;
    to.add(&expected.0.to_be_bytes()[..])
}

pub(crate) fn bind_removals(removals: &[(Id, Revision)], to: &mut PgArguments) -> Bound {
    let expected: Vec<[u8; 16]> = removals.iter().map(|(_, expected)| expected.0.to_be_bytes()).collect();
    to.add(removals.iter().map(|(id, _)| &id.0[..]).collect::<Vec<_>>())?;
    to.add(expected.iter().map(|expected| &expected[..]).collect::<Vec<_>>())
}

/// The column that holds the clock behind those of a record.
const NOW_COLUMN: usize = 13;

/// The column of a write's answer that says whether the row was written; if not, it was there.
const WRITTEN_COLUMN: usize = 14;

/// The first of the four readable parts in a listing.
const SCOPE_COLUMN: usize = 14;

/// The column of a listing that gives its order.
const ORDER_COLUMN: usize = 18;

/// Which id a row is about.
pub(crate) fn id(row: &PgRow) -> Result<Id, String> {
    bytes(row, 0).map(Id)
}

/// Where a listing goes on after this row.
pub(crate) fn cursor(row: &PgRow) -> Result<Cursor, String> {
    Ok(Cursor { at: Timestamp(get(row, ORDER_COLUMN)?), id: id(row)? })
}

/// Whether a row of a write's answer tells of a row written, and the clock.
pub(crate) fn written(row: &PgRow) -> Result<(bool, Timestamp), String> {
    Ok((get(row, WRITTEN_COLUMN)?, Timestamp(get(row, NOW_COLUMN)?)))
}

/// The readable parts in a row of a listing.
pub(crate) fn scope(row: &PgRow, part: usize) -> Result<String, String> {
    unescaped(get(row, SCOPE_COLUMN + part)?)
}

/// The record in a row, and the clock of its reading; in words what is wrong with it otherwise.
pub(crate) fn seen(row: &PgRow) -> Result<Seen, String> {
    let lease_until: Option<i64> = get(row, 7)?;
    let completed_at: Option<i64> = get(row, 8)?;
    let state = match (lease_until, completed_at) {
        (Some(at), None) => State::Running { lease_until: Timestamp(at) },
        (None, Some(at)) => {
            let status = get::<i32>(row, 9)?;
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

pub(crate) fn get<'r, T>(row: &'r PgRow, column: usize) -> Result<T, String>
where
    T: sqlx::Decode<'r, Postgres> + sqlx::Type<Postgres>,
{
    row.try_get(column).map_err(|error| error.to_string())
}

fn bytes<const N: usize>(row: &PgRow, column: usize) -> Result<[u8; N], String> {
    let found: &[u8] = get(row, column)?;
    found.try_into().map_err(|_| format!("{} bytes instead of {N} in column {column}", found.len()))
}

fn blob(row: &PgRow, column: usize) -> Result<Bytes, String> {
    get::<&[u8]>(row, column).map(Bytes::copy_from_slice)
}

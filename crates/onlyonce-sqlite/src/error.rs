//! What went wrong, and whether anything was written.

use onlyonce_core::{StoreError, StoreErrorKind};

/// SQLite's primary result codes, <https://www.sqlite.org/rescode.html>.
pub(crate) mod code {
    pub(crate) const ERROR: i32 = 1;
    pub(crate) const BUSY: i32 = 5;
    pub(crate) const LOCKED: i32 = 6;
    pub(crate) const NOMEM: i32 = 7;
    pub(crate) const READONLY: i32 = 8;
    pub(crate) const IOERR: i32 = 10;
    pub(crate) const CORRUPT: i32 = 11;
    pub(crate) const FULL: i32 = 13;
    pub(crate) const CANTOPEN: i32 = 14;
    pub(crate) const CONSTRAINT: i32 = 19;
    pub(crate) const NOTADB: i32 = 26;
    /// An extended code: a read-only connection met a journal that must be rolled back first.
    pub(crate) const READONLY_ROLLBACK: i32 = 776;
}

/// The extended result code, if SQLite gave one.
pub(crate) fn extended(error: &sqlx::Error) -> Option<i32> {
    error.as_database_error().and_then(|error| error.code()).and_then(|code| code.parse().ok())
}

/// The primary result code, if SQLite gave one.
pub(crate) fn primary(error: &sqlx::Error) -> Option<i32> {
    extended(error).map(|code| code & 0xff)
}

/// Whether the failure lies in the database as a whole rather than in one call.
pub(crate) fn is_everywhere(error: &sqlx::Error) -> bool {
    use code::*;
    match primary(error) {
        Some(code) => {
            matches!(code, BUSY | LOCKED | NOMEM | READONLY | IOERR | CORRUPT | FULL | CANTOPEN | NOTADB)
        }
        None => true,
    }
}

/// The error of a call that cannot have been applied: its `COMMIT` was never sent.
pub(crate) fn not_applied(doing: &str, error: &sqlx::Error) -> StoreError {
    let kind = match primary(error) {
        Some(code::CORRUPT | code::NOTADB) => StoreErrorKind::Unreadable,
        _ => StoreErrorKind::Unavailable,
    };
    StoreError::new(kind, format!("SQLite could not {doing}")).with_source(error.to_string())
}

/// The error of a call whose `COMMIT` failed.
///
/// `BUSY` and a constraint that is looked at in the end are refused before anything is written. After any
/// other failure, of an fsync for example, the frames may be in the log, and recovery may find them whole.
pub(crate) fn at_commit(error: &sqlx::Error) -> StoreError {
    match primary(error) {
        Some(code::BUSY | code::CONSTRAINT) => not_applied("commit", error),
        _ => StoreError::new(StoreErrorKind::Ambiguous, "SQLite could not say whether it committed")
            .with_source(error.to_string()),
    }
}

//! What went wrong, and whether anything was written.

use onlyonce_core::{StoreError, StoreErrorKind};
use sqlx::postgres::{PgDatabaseError, PgSeverity};

/// The codes of <https://www.postgresql.org/docs/current/errcodes-appendix.html> that matter here.
pub(crate) mod code {
    pub(crate) const PROTOCOL_VIOLATION: &str = "08P01";
    pub(crate) const FEATURE_NOT_SUPPORTED: &str = "0A000";
    pub(crate) const READ_ONLY: &str = "25006";
    pub(crate) const NO_TRANSACTION: &str = "25P01";
    pub(crate) const NO_SUCH_STATEMENT: &str = "26000";
    pub(crate) const SERIALIZATION_FAILURE: &str = "40001";
    pub(crate) const DEADLOCK_DETECTED: &str = "40P01";
    pub(crate) const INSUFFICIENT_PRIVILEGE: &str = "42501";
    pub(crate) const DUPLICATE_STATEMENT: &str = "42P05";
    pub(crate) const LOCK_NOT_AVAILABLE: &str = "55P03";
    pub(crate) const QUERY_CANCELED: &str = "57014";
    pub(crate) const INVALID_PASSWORD: &str = "28P01";
    pub(crate) const INVALID_AUTHORIZATION: &str = "28000";
    pub(crate) const NO_SUCH_DATABASE: &str = "3D000";
}

/// What the server said, if it was the server.
fn said(error: &sqlx::Error) -> Option<&PgDatabaseError> {
    error.as_database_error().and_then(|error| error.try_downcast_ref())
}

/// The five characters of SQLSTATE, if the server gave any.
pub(crate) fn sqlstate(error: &sqlx::Error) -> Option<&str> {
    said(error).map(PgDatabaseError::code)
}

fn is_class(error: &sqlx::Error, classes: &[&str]) -> bool {
    sqlstate(error).is_some_and(|code| classes.iter().any(|class| code.starts_with(class)))
}

/// Whether the server undid the transaction because of a concurrent one: a serialization failure or a
/// deadlock. The same work in a new transaction may succeed.
#[must_use]
pub fn is_conflict(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error), Some(code::SERIALIZATION_FAILURE | code::DEADLOCK_DETECTED))
}

/// Whether the same call may be sent again: it was undone, or never understood, because of others.
pub(crate) fn is_passing(error: &sqlx::Error) -> bool {
    let Some(code) = sqlstate(error) else { return false };
    // A plan that was prepared before a migration is of the class "feature not supported".
    let replanned = code == code::FEATURE_NOT_SUPPORTED && error.to_string().contains("cached plan");
    replanned || is_conflict(error) || matches!(code, code::NO_SUCH_STATEMENT | code::DUPLICATE_STATEMENT)
}

/// Whether the connection can go on: the server answered, it stays, and it is one that can be written.
pub(crate) fn is_usable_after(error: &sqlx::Error) -> bool {
    let Some(said) = said(error) else { return false };
    let fatal = matches!(said.severity(), PgSeverity::Fatal | PgSeverity::Panic);
    !fatal && !is_class(error, &["08", "26", "42P05", "0A000", "57P", "58", "XX", code::READ_ONLY])
}

/// Whether the failure lies in the database as a whole rather than in one call.
pub(crate) fn is_everywhere(error: &sqlx::Error) -> bool {
    // What could not be put into a message is one call's fault, or that of all of them together.
    let unsendable = matches!(error, sqlx::Error::Encode(_) | sqlx::Error::Protocol(_));
    // Data, constraints, triggers, a lock that was not had in time, a statement that took too long.
    !unsendable && !is_class(error, &["22", "23", "P0", "55P03", "57014", "54", "40"])
}

/// Whether an error of a statement outside a transaction means that the statement was undone.
///
/// A server that answers with an error has not committed, unless it panics: then a commit may stand in its log
/// already, and be recovered. A pooler answers in the same form when it lost its server (class 08), and then
/// nobody knows.
pub(crate) fn is_undone(error: &sqlx::Error) -> bool {
    if said(error).is_some_and(|said| matches!(said.severity(), PgSeverity::Panic)) {
        return false;
    }
    match error {
        sqlx::Error::Database(_) => !is_class(error, &["08", "57P02"]),
        sqlx::Error::Encode(_) | sqlx::Error::Configuration(_) => true,
        _ => false,
    }
}

/// The error of a call that was not applied.
pub(crate) fn not_applied(doing: &str, error: &sqlx::Error) -> StoreError {
    let kind = if is_class(error, &["XX001", "XX002"]) {
        StoreErrorKind::Unreadable
    } else {
        StoreErrorKind::Unavailable
    };
    StoreError::new(kind, format!("Postgres could not {doing}")).with_source(line(error))
}

/// The error of a call that was sent and not answered.
pub(crate) fn in_doubt(doing: &str, error: &sqlx::Error) -> StoreError {
    StoreError::new(StoreErrorKind::Ambiguous, format!("Postgres did not say whether it could {doing}"))
        .with_source(line(error))
}

/// The error in one line, with its code.
pub(crate) fn line(error: &sqlx::Error) -> String {
    match said(error) {
        Some(said) => format!("{} ({})", said.message().replace('\n', " "), said.code()),
        None => error.to_string().replace('\n', " "),
    }
}

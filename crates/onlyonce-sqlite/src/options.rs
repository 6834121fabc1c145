//! Where the database is and how durable it must be.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use sqlx::sqlite::SqliteSynchronous;

use crate::OpenError;

/// How long one statement waits for another process's write lock, unless the options say otherwise.
///
/// Shorter than [`CALL_TIME_MAX`](onlyonce_core::engine::CALL_TIME_MAX), so that a caller hears that
/// nothing was written rather than that nobody knows.
pub const BUSY_TIMEOUT_DEFAULT: Duration = Duration::from_secs(4);

/// The longest wait for another process's write lock that can be asked for.
pub const BUSY_TIMEOUT_MAX: Duration = Duration::from_secs(60);

/// Where the database is and how durable it must be.
///
/// ```
/// use onlyonce_sqlite::SqliteOptions;
///
/// let options: SqliteOptions = "sqlite:keys.db?busy_timeout_ms=1000".parse()?;
/// assert!("sqlite:keys.db?colour=blue".parse::<SqliteOptions>().is_err());
/// # let _ = options;
/// # Ok::<(), onlyonce_sqlite::OpenError>(())
/// ```
///
/// | URL | |
/// |---|---|
/// | `sqlite:PATH`, `sqlite://PATH` | the file; `%3F` stands for `?`, `%23` for `#`, `%25` for `%` |
/// | `?mode=rwc` | create the file if it is absent (the default) |
/// | `?mode=rw` | the file must exist |
/// | `?mode=memory`, `sqlite::memory:` | no file; volatile |
/// | `?synchronous=full`, `extra` | every commit is on disk before it is answered (`full` is the default) |
/// | `?synchronous=normal`, `off` | a power failure loses commits; volatile |
/// | `?shared=true` | the file is an application's: see [`shared`](Self::shared) |
/// | `?busy_timeout_ms=N` | how long to wait for another process's write lock, at most 60,000 |
///
/// What is volatile is refused unless [`allow_volatile`](Self::allow_volatile) was called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SqliteOptions {
    pub(crate) place: Place,
    pub(crate) create: bool,
    pub(crate) synchronous: Synchronous,
    pub(crate) busy_timeout: Duration,
    pub(crate) allow_volatile: bool,
    pub(crate) shared: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    File(PathBuf),
    Memory,
}

/// When SQLite waits for the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Synchronous {
    /// Never: volatile.
    Off,
    /// At checkpoints: a power failure loses the latest commits, so this is volatile.
    Normal,
    /// Before every commit is answered.
    #[default]
    Full,
    /// As [`Full`](Self::Full), and the folder too when a rollback journal is removed.
    Extra,
}

impl SqliteOptions {
    /// The database in this file, created if it is absent.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self::at(Place::File(path.into()))
    }

    /// A database in memory, gone when its last handle is: volatile.
    #[must_use]
    pub fn memory() -> Self {
        Self::at(Place::Memory)
    }

    fn at(place: Place) -> Self {
        Self {
            place,
            create: true,
            synchronous: Synchronous::default(),
            busy_timeout: BUSY_TIMEOUT_DEFAULT,
            allow_volatile: false,
            shared: false,
        }
    }

    /// Whether to create the file if it is absent; `true` unless said otherwise.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// When SQLite waits for the disk.
    #[must_use]
    pub fn synchronous(mut self, synchronous: Synchronous) -> Self {
        self.synchronous = synchronous;
        self
    }

    /// How long a write waits for another process's write lock, on the local clock.
    #[must_use]
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        self.busy_timeout = timeout.min(BUSY_TIMEOUT_MAX);
        self
    }

    /// Whether a database that can forget what it acknowledged may be opened.
    #[must_use]
    pub fn allow_volatile(mut self, allow: bool) -> Self {
        self.allow_volatile = allow;
        self
    }

    /// Whether the file is an application's own database, with the keys in tables beside the application's:
    /// what [`SqliteStore::transactions`](crate::SqliteStore::transactions) needs.
    ///
    /// The tables are `onlyonce_idempotency_keys` and `onlyonce_schema_versions`. The header's
    /// `application_id` and `user_version` stay as they are, and so does the journal mode of a file that has
    /// something in it: it must be WAL, a setting that stays with the file. Unless this is set, a file with
    /// anything of another application in it is refused.
    #[must_use]
    pub fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// The file, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::File(path) => Some(path),
            Place::Memory => None,
        }
    }

    /// Why these options can lose an acknowledged write, if they can.
    #[must_use]
    pub fn volatile(&self) -> Option<&'static str> {
        match (&self.place, self.synchronous) {
            (Place::Memory, _) => Some("a database in memory is gone when the process ends"),
            (_, Synchronous::Off) => Some("with synchronous=off a power failure loses or damages keys"),
            (_, Synchronous::Normal) => Some("with synchronous=normal a power failure loses keys"),
            _ => None,
        }
    }

    /// Refuses what can lose an acknowledged write, unless it is allowed.
    pub(crate) fn check_durable(&self) -> Result<(), OpenError> {
        match self.volatile() {
            Some(reason) if !self.allow_volatile => Err(OpenError::refused(format!(
                "the SQLite store is volatile: {reason}; use a file with synchronous=full, or set \
                 allow_volatile = true"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses a shared database that nobody could share.
    pub(crate) fn check_shared(&self) -> Result<(), OpenError> {
        match &self.place {
            Place::Memory if self.shared => Err(OpenError::refused(
                "no application can reach the tables of a SQLite store in memory; shared=true needs a file",
            )),
            _ => Ok(()),
        }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), OpenError> {
        let refuse = |allowed: &str| {
            Err(OpenError::refused(format!(
                "the SQLite URL's parameter `{name}` has a value that is not allowed: {allowed}"
            )))
        };
        match (name, value) {
            ("mode", "rwc") => self.create = true,
            ("mode", "rw") => self.create = false,
            ("mode", "memory") => self.place = Place::Memory,
            ("mode", "ro") => return refuse("a store must be written; rwc, rw and memory are"),
            ("mode", _) => return refuse("rwc, rw and memory are"),
            ("synchronous", "extra") => self.synchronous = Synchronous::Extra,
            ("synchronous", "full") => self.synchronous = Synchronous::Full,
            ("synchronous", "normal") => self.synchronous = Synchronous::Normal,
            ("synchronous", "off") => self.synchronous = Synchronous::Off,
            ("synchronous", _) => return refuse("full, extra, normal and off are"),
            ("shared", "true") => self.shared = true,
            ("shared", "false") => self.shared = false,
            ("shared", _) => return refuse("true and false are"),
            ("busy_timeout_ms", _) => match value.parse().map(Duration::from_millis) {
                Ok(timeout) if timeout <= BUSY_TIMEOUT_MAX => self.busy_timeout = timeout,
                _ => return refuse("whole milliseconds from 0 to 60000 are"),
            },
            _ => {
                return Err(OpenError::refused(format!(
                    "the SQLite URL has an unknown parameter `{}`; mode, synchronous, shared and busy_timeout_ms \
                     are allowed",
                    name.escape_debug()
                )));
            }
        }
        Ok(())
    }
}

impl FromStr for SqliteOptions {
    type Err = OpenError;

    /// Reads a URL. A message never repeats the URL: it may be another store's, with a password in it.
    fn from_str(url: &str) -> Result<Self, OpenError> {
        let Some(rest) = url.strip_prefix("sqlite:") else {
            return Err(OpenError::refused("not the URL of a SQLite store; sqlite:PATH is"));
        };
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let place = place.strip_prefix("//").unwrap_or(place);
        let path = percent_decode_str(place).decode_utf8().map_err(|_| {
            OpenError::refused("the path in the SQLite URL is not UTF-8 after percent-decoding")
        })?;
        let mut options = match &*path {
            ":memory:" => Self::memory(),
            path => Self::file(path),
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            options.set(&name, &value)?;
        }
        if options.path() == Some(Path::new("")) {
            return Err(OpenError::refused("the SQLite URL has no path; sqlite:PATH is allowed"));
        }
        if path.contains('\0') {
            return Err(OpenError::refused("the path in the SQLite URL has a NUL byte in it"));
        }
        Ok(options)
    }
}

impl From<Synchronous> for SqliteSynchronous {
    fn from(synchronous: Synchronous) -> Self {
        match synchronous {
            Synchronous::Off => Self::Off,
            Synchronous::Normal => Self::Normal,
            Synchronous::Full => Self::Full,
            Synchronous::Extra => Self::Extra,
        }
    }
}

impl fmt::Display for Synchronous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Normal => "normal",
            Self::Full => "full",
            Self::Extra => "extra",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_file() {
        for (url, path) in [
            ("sqlite:keys.db", "keys.db"),
            ("sqlite://keys.db", "keys.db"),
            ("sqlite:///var/lib/keys.db", "/var/lib/keys.db"),
            ("sqlite:/var/lib/keys.db?mode=rwc", "/var/lib/keys.db"),
            ("sqlite:a%20b%3Fc%23%25.db", "a b?c#%.db"),
            ("sqlite:100%.db", "100%.db"),
            ("sqlite:schlüssel.db", "schlüssel.db"),
        ] {
            let options: SqliteOptions = url.parse().expect(url);
            assert_eq!(options, SqliteOptions::file(path), "{url}");
            assert_eq!(options.volatile(), None);
        }
    }

    #[test]
    fn parameters_are_read() {
        let options: SqliteOptions =
            "sqlite:k.db?mode=rw&synchronous=extra&busy_timeout_ms=0&shared=true".parse().expect("valid");
        let expected = SqliteOptions::file("k.db")
            .create(false)
            .synchronous(Synchronous::Extra)
            .busy_timeout(Duration::ZERO)
            .shared(true);
        assert_eq!(options, expected);
    }

    #[test]
    fn a_refusal_names_the_parameter_and_what_is_allowed() {
        for (url, names) in [
            ("sqlite:k.db?colour=blue", &["`colour`", "mode, synchronous, shared and busy_timeout_ms"][..]),
            ("sqlite:k.db?mode=ro", &["`mode`", "rwc, rw and memory"]),
            ("sqlite:k.db?mode=", &["`mode`", "rwc, rw and memory"]),
            ("sqlite:k.db?synchronous=FULLY", &["`synchronous`", "full, extra, normal and off"]),
            ("sqlite:k.db?busy_timeout_ms=60001", &["`busy_timeout_ms`", "0 to 60000"]),
            ("sqlite:k.db?busy_timeout_ms=-1", &["`busy_timeout_ms`", "0 to 60000"]),
            ("sqlite:k.db?shared=yes", &["`shared`", "true and false"]),
            ("sqlite:", &["no path", "sqlite:PATH"]),
            ("sqlite://?mode=rw", &["no path"]),
            ("sqlite:%FF", &["UTF-8"]),
            ("sqlite:a%00b", &["NUL"]),
            ("keys.db", &["sqlite:PATH"]),
        ] {
            let error = url.parse::<SqliteOptions>().expect_err(url).to_string();
            for name in names {
                assert!(error.contains(name), "{url}: {error}");
            }
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_message_never_repeats_a_password() {
        for url in
            ["postgres://ann:hunter2@db/x", "sqlite:k.db?mode=hunter2", "sqlite:k.db?synchronous=hunter2"]
        {
            let error = url.parse::<SqliteOptions>().expect_err(url).to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn what_can_forget_is_volatile() {
        for url in [
            "sqlite::memory:",
            "sqlite://:memory:",
            "sqlite:?mode=memory",
            "sqlite:k.db?mode=memory",
            "sqlite:k.db?synchronous=normal",
            "sqlite:k.db?synchronous=off",
        ] {
            let options: SqliteOptions = url.parse().expect(url);
            assert!(options.volatile().is_some(), "{url}");
            let error = options.check_durable().expect_err(url).to_string();
            assert!(error.contains("volatile") && error.contains("allow_volatile"), "{error}");
            assert!(options.allow_volatile(true).check_durable().is_ok(), "{url}");
        }
    }
}

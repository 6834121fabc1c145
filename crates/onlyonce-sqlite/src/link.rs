//! One connection that is opened again after a failure.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection, SqliteConnection};

use crate::OpenError;
use crate::error::{code, primary};
use crate::options::{Place, SqliteOptions, Synchronous};
use crate::sql::Statements;

/// Above this the log is cut back after a checkpoint.
const LOG_BYTES_KEPT: u64 = 64 << 20;

/// How many pages of 4 KiB the log gathers before they are moved into the database. Random ids dirty a
/// page each, so SQLite's own 1,000 would have every other batch pay for a checkpoint.
const CHECKPOINT_PAGES: u64 = 8_000;

/// The page cache of one connection. SQLite's own 2 MiB holds less than a busy hour's inner pages.
const CACHE_KIB: u64 = 16 << 10;

/// A place and how to connect to it.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) path: Option<PathBuf>,
    pub(crate) create: bool,
    pub(crate) busy_timeout: Duration,
    pub(crate) synchronous: Synchronous,
    /// Whether the file is an application's, with our tables beside its own.
    pub(crate) shared: bool,
    connect: SqliteConnectOptions,
}

impl Target {
    /// Checks what can be told without opening the file.
    pub(crate) fn new(options: &SqliteOptions) -> Result<Self, OpenError> {
        options.check_durable()?;
        options.check_shared()?;
        // Sets no journal mode: that would write to a database before it is known whose it is.
        let connect = SqliteConnectOptions::new()
            .busy_timeout(options.busy_timeout)
            .synchronous(options.synchronous.into())
            .pragma("journal_size_limit", LOG_BYTES_KEPT.to_string())
            .pragma("wal_autocheckpoint", CHECKPOINT_PAGES.to_string())
            .pragma("cache_size", format!("-{CACHE_KIB}"))
            .disable_statement_logging();
        let (connect, path) = match &options.place {
            Place::File(path) => {
                // Absolute, so that the file stays the same when the working directory changes, and so
                // that no name reads as one of SQLite's `file:` URIs.
                let path = std::path::absolute(path).map_err(|error| {
                    OpenError::refused(format!("the SQLite path {} cannot be used", path.display()))
                        .with_source(error)
                })?;
                (connect.filename(&path), Some(path))
            }
            Place::Memory => {
                // A name of its own, shared by the connections of one handle.
                static DATABASES: AtomicU64 = AtomicU64::new(1);
                let number = DATABASES.fetch_add(1, Ordering::Relaxed);
                (connect.vfs("memdb").filename(format!("/onlyonce-{number}")), None)
            }
        };
        Ok(Self {
            name: path.as_ref().map_or_else(|| "in memory".to_owned(), |path| path.display().to_string()),
            path,
            create: options.create,
            busy_timeout: options.busy_timeout,
            synchronous: options.synchronous,
            shared: options.shared,
            connect,
        })
    }

    /// The statements about its keys.
    pub(crate) fn sql(&self) -> &'static Statements {
        Statements::of(self.shared)
    }

    /// Connects for reading and writing; creates the file only if asked to, because a later connection
    /// that finds its file gone must not start an empty one.
    pub(crate) async fn connect(&self, create: bool) -> Result<SqliteConnection, sqlx::Error> {
        if let (true, Some(path)) = (create, &self.path) {
            create_private(path);
        }
        self.connect.clone().create_if_missing(create || self.path.is_none()).connect().await
    }

    /// Connects in a way that cannot change the file.
    pub(crate) async fn connect_to_look(&self) -> Result<SqliteConnection, sqlx::Error> {
        self.connect.clone().read_only(true).connect().await
    }

    /// The words for a failure to open or to set up.
    pub(crate) fn explain(&self, error: sqlx::Error) -> OpenError {
        let name = &self.name;
        let refusal = match primary(&error) {
            Some(code::NOTADB) => Some("is not a SQLite database; give the path of a new file".to_owned()),
            Some(code::READONLY | code::CANTOPEN) => self.path.as_deref().and_then(why_not),
            _ => None,
        };
        let open_error = match refusal {
            Some(reason) => OpenError::refused(format!("the SQLite file {name} {reason}")),
            None => OpenError::failed(format!("the SQLite file {name} could not be opened")),
        };
        open_error.with_source(error)
    }
}

/// Creates the file, if it is absent, for nobody but its owner: recorded answers are nobody else's to read.
/// SQLite itself would create it as the umask says, and gives the log beside it the file's own mode. A file
/// that is there keeps the mode that somebody gave it.
///
/// Race: several processes create it at once. One does; the others find an empty file, which is an empty
/// database to SQLite. What cannot be created is SQLite's to report.
fn create_private(path: &Path) {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    if let Ok(file) = options.open(path) {
        // Closing a file drops every lock that this process holds on it, and another connection of this
        // process may have found it already. So it stays open: one descriptor for each file created.
        std::mem::forget(file);
    }
}

/// Why this path cannot hold a database that is written, if the file system says so.
///
/// Never opens the database itself: closing a file drops every lock that this process holds on it,
/// those of another handle's connections among them.
fn why_not(path: &Path) -> Option<String> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if !folder.is_dir() {
        return Some(format!("cannot be created, for its folder {} does not exist", folder.display()));
    }
    if path.metadata().is_ok_and(|metadata| metadata.permissions().readonly()) {
        return Some("is read-only; a store must be written".to_owned());
    }
    let probe = folder.join(format!(".onlyonce-{}-probe", std::process::id()));
    match OpenOptions::new().write(true).create_new(true).open(&probe) {
        Ok(_) => {
            let _ = std::fs::remove_file(&probe);
            // The folder is fine, so it is the file; it is there but may not be written.
            path.exists().then(|| "may not be written by this user".to_owned())
        }
        Err(error) => match error.kind() {
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem | ErrorKind::NotFound => {
                Some(format!(
                    "cannot be written, for its folder {} takes no new files ({error}); SQLite keeps its log there",
                    folder.display()
                ))
            }
            _ => None,
        },
    }
}

/// One connection that is opened again after a failure.
pub(crate) struct Link {
    target: Target,
    connection: Option<SqliteConnection>,
    closed: bool,
}

impl Link {
    pub(crate) fn new(target: Target, connection: Option<SqliteConnection>) -> Self {
        Self { target, connection, closed: false }
    }

    pub(crate) fn sql(&self) -> &'static Statements {
        self.target.sql()
    }

    /// The connection, outside a transaction.
    pub(crate) async fn connection(&mut self) -> Result<&mut SqliteConnection, sqlx::Error> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None if self.closed => return Err(sqlx::Error::Configuration("the store is closed".into())),
            None => self.target.connect(false).await?,
        };
        Ok(self.connection.insert(connection))
    }

    /// Gives the connection up. SQLite rolls back whatever it was in the middle of.
    pub(crate) fn discard(&mut self) {
        self.connection = None;
    }

    /// Closes the connection for good, and waits until the file is let go.
    pub(crate) async fn close(&mut self) -> Result<(), sqlx::Error> {
        self.closed = true;
        match self.connection.take() {
            Some(connection) => connection.close().await,
            None => Ok(()),
        }
    }
}

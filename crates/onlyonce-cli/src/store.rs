//! The stores that this build has, by URL. The only module that names them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::store::{Cursor, Filter, Migrated, OpenError, OpenErrorKind, Page};
use onlyonce_core::{Inspect, Store, StoreError};
use onlyonce_postgres::{PostgresOptions, PostgresStore};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

/// Where keys are kept.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl(Place);

#[derive(Clone, PartialEq, Eq)]
enum Place {
    Sqlite(SqliteOptions),
    Postgres(Box<PostgresOptions>),
}

const ALLOWED: &str = "sqlite:PATH and postgres://USER:PASSWORD@HOST/DATABASE are allowed";

impl StoreUrl {
    /// Reads a store's URL.
    ///
    /// # Errors
    /// Refuses a store that this build does not have, without repeating a password.
    pub fn parse(url: &str) -> Result<Self, String> {
        match url.split_once(':').map(|(scheme, _)| scheme) {
            Some("sqlite") => {
                url.parse().map(|sqlite| Self(Place::Sqlite(sqlite))).map_err(|error| error.to_string())
            }
            Some("postgres" | "postgresql") => url
                .parse()
                .map(|postgres| Self(Place::Postgres(Box::new(postgres))))
                .map_err(|error| error.to_string()),
            Some(scheme)
                if scheme.len() > 1
                    && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)) =>
            {
                Err(format!("names a {scheme} store, which this build does not have; {ALLOWED}"))
            }
            _ => Err(format!("has no scheme; {ALLOWED}, such as sqlite:onlyonce.db")),
        }
    }

    /// A store in this file.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self(Place::Sqlite(SqliteOptions::file(path)))
    }

    fn allowing(&self, allow_volatile: bool) -> Place {
        match self.0.clone() {
            Place::Sqlite(options) => Place::Sqlite(options.allow_volatile(allow_volatile)),
            Place::Postgres(options) => Place::Postgres(Box::new(options.allow_volatile(allow_volatile))),
        }
    }

    /// Why this store can forget what it acknowledged, if it can; `None` where only the server can tell.
    pub(crate) fn volatile(&self) -> Option<Option<&'static str>> {
        match &self.0 {
            Place::Sqlite(options) => Some(options.volatile()),
            Place::Postgres(_) => None,
        }
    }

    /// The schema version that this build wants there.
    pub(crate) fn schema_wanted(&self) -> u32 {
        match &self.0 {
            Place::Sqlite(_) => onlyonce_sqlite::SCHEMA_VERSION,
            Place::Postgres(_) => onlyonce_postgres::SCHEMA_VERSION,
        }
    }

    /// The schema version that is there, or `None` if there is nothing yet. Writes nothing.
    pub(crate) async fn schema_found(&self, allow_volatile: bool) -> Result<Option<u32>, OpenError> {
        match self.allowing(allow_volatile) {
            Place::Sqlite(options) => onlyonce_sqlite::schema_version(&options).await,
            Place::Postgres(options) => onlyonce_postgres::schema_version(&options).await,
        }
    }

    /// Creates the store or brings its schema up to date.
    pub(crate) async fn migrate(&self, allow_volatile: bool) -> Result<Migrated, OpenError> {
        match self.allowing(allow_volatile) {
            Place::Sqlite(options) => onlyonce_sqlite::migrate(&options).await,
            Place::Postgres(options) => onlyonce_postgres::migrate(&options).await,
        }
    }

    /// The SQL of a migration from this version, zero for none; `None` where nobody else can run it.
    pub(crate) fn migration_sql(&self, from: u32) -> Option<String> {
        match &self.0 {
            Place::Sqlite(_) => None,
            Place::Postgres(options) => Some(onlyonce_postgres::migration_sql(options, from)),
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::Sqlite(options) => match options.path() {
                Some(path) => write!(f, "sqlite:{}", path.display()),
                None => f.write_str("sqlite::memory:"),
            },
            Place::Postgres(options) => write!(f, "{options}"),
        }
    }
}

impl fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An open store.
#[derive(Clone)]
pub enum OpenStore {
    /// In a file of this machine.
    Sqlite(SqliteStore),
    /// In a Postgres database.
    Postgres(PostgresStore),
}

const RETRY_EVERY: Duration = Duration::from_millis(500);

/// An opening that has begun gets at least so long, on the local clock.
const OPEN_TIME_MIN: Duration = Duration::from_secs(5);

impl OpenStore {
    /// Opens the store, and creates it if need be. One that is away is tried again for `wait`, on the local
    /// clock.
    ///
    /// # Errors
    /// At once if it is refused, and at the end of `wait` if it could not be opened.
    pub async fn open(url: &StoreUrl, allow_volatile: bool, wait: Duration) -> Result<Self, OpenError> {
        let deadline = Instant::now() + wait;
        loop {
            let opening = Self::open_once(url.allowing(allow_volatile));
            // One that takes connections and then hangs is not waited for any longer either.
            let opened = timeout_at(deadline + OPEN_TIME_MIN, opening).await.unwrap_or_else(|_| {
                Err(OpenError::failed(format!("{url} did not answer within {:?}", wait + OPEN_TIME_MIN)))
            });
            match opened {
                Ok(store) => return Ok(store),
                Err(error) if error.kind() == OpenErrorKind::Refused => return Err(error),
                Err(error) if Instant::now() + RETRY_EVERY >= deadline => return Err(error),
                Err(error) => {
                    warn!(store = %url, %error, "the store cannot be opened yet");
                    sleep(RETRY_EVERY).await;
                }
            }
        }
    }

    async fn open_once(place: Place) -> Result<Self, OpenError> {
        Ok(match place {
            Place::Sqlite(options) => Self::Sqlite(SqliteStore::open(&options).await?),
            Place::Postgres(options) => Self::Postgres(PostgresStore::open(&options).await?),
        })
    }

    /// Opens a store that is there already.
    ///
    /// # Errors
    /// If it is refused, cannot be opened, or is not there.
    pub async fn open_existing(url: &StoreUrl, allow_volatile: bool) -> Result<Self, OpenError> {
        let place = match url.allowing(allow_volatile) {
            Place::Sqlite(options) => Place::Sqlite(options.create(false)),
            postgres @ Place::Postgres(_) => match url.schema_found(allow_volatile).await? {
                Some(_) => postgres,
                None => {
                    return Err(OpenError::failed(format!(
                        "there are no tables at {url} yet; `onlyonce migrate` creates them"
                    )));
                }
            },
        };
        Self::open_once(place).await
    }

    /// For the engine.
    #[must_use]
    pub fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Sqlite(store) => Arc::new(store.clone()),
            Self::Postgres(store) => Arc::new(store.clone()),
        }
    }

    /// For people.
    #[must_use]
    pub fn inspect(&self) -> Arc<dyn Inspect> {
        match self {
            Self::Sqlite(store) => Arc::new(store.clone()),
            Self::Postgres(store) => Arc::new(store.clone()),
        }
    }

    /// A part of a listing, damaged records apart.
    pub(crate) async fn page(
        &self,
        filter: &Filter,
        after: Option<&Cursor>,
        rows_max: u32,
    ) -> Result<Page, StoreError> {
        self.inspect().page(filter, after, rows_max).await
    }

    /// What the store runs on.
    pub(crate) async fn facts(&self) -> Result<Facts, StoreError> {
        Ok(match self {
            Self::Sqlite(store) => {
                let facts = store.facts().await?;
                let about = format!(
                    "SQLite {}, journal_mode {}, synchronous {}",
                    facts.sqlite_version, facts.journal_mode, facts.synchronous
                );
                Facts { about, notes: Vec::new(), records: Some(facts.records), exact: true }
            }
            Self::Postgres(store) => postgres_facts(&store.facts().await?),
        })
    }

    /// Finishes what is being written and lets the store go.
    ///
    /// # Errors
    /// If the store could not tidy up; nothing is lost.
    pub async fn close(&self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(store) => store.close().await,
            Self::Postgres(store) => {
                store.close().await;
                Ok(())
            }
        }
    }
}

/// What people want to know of a store.
pub(crate) struct Facts {
    /// Product, version and settings, in one line.
    pub(crate) about: String,
    /// What else is to be said, by topic.
    pub(crate) notes: Vec<(&'static str, Concern, String)>,
    /// How many records there are, expired ones included.
    pub(crate) records: Option<u64>,
    /// Whether that number was counted; otherwise it is an estimate.
    pub(crate) exact: bool,
}

/// How much a note matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Concern {
    None,
    Some,
    Grave,
}

/// A clock that is further off makes logs hard to read beside those of the database.
const CLOCK_OFF_MAX_MS: u64 = 2_000;

fn postgres_facts(facts: &onlyonce_postgres::Facts) -> Facts {
    let on = |flag: bool| if flag { "on" } else { "off" };
    let about = format!(
        "PostgreSQL {}, fsync {}, synchronous_commit {}, full_page_writes {}{}",
        facts.server_version,
        on(facts.fsync),
        facts.synchronous_commit,
        on(facts.full_page_writes),
        if facts.pooled { ", through a transaction pooler" } else { "" },
    );
    let mut notes = Vec::new();
    if facts.in_recovery || facts.read_only {
        notes.push((
            "writable",
            Concern::Grave,
            "the server takes no writes: it is a standby or read-only".into(),
        ));
    }
    notes.push(match facts.fsync && facts.synchronous_commit != "off" {
        true => ("durable", Concern::None, "every acknowledged write is on disk".into()),
        false => ("durable", Concern::Some, "volatile, as allowed: a crash loses acknowledged keys".into()),
    });
    if !facts.full_page_writes {
        notes.push((
            "durable",
            Concern::Some,
            "full_page_writes is off: a power failure can tear a page".into(),
        ));
    }
    let waits = !facts.synchronous_standby_names.is_empty();
    let concern = if waits { Concern::None } else { Concern::Some };
    let standbys = format!("{} standbys connected; {}", facts.standbys, facts.on_failover());
    notes.push(("failover", concern, standbys));
    let instances = facts.connections_max / facts.pool_size.max(1);
    let pool = format!(
        "each instance opens up to {} of the server's max_connections = {}",
        facts.pool_size, facts.connections_max
    );
    notes.push(("pool", if instances < 2 { Concern::Some } else { Concern::None }, pool));
    let off = facts.clock_ahead_ms.unsigned_abs();
    let clock = format!(
        "the server's clock, which decides, is {off} ms {} this machine's",
        if facts.clock_ahead_ms < 0 { "behind" } else { "ahead of" }
    );
    notes.push(("clock", if off > CLOCK_OFF_MAX_MS { Concern::Some } else { Concern::None }, clock));
    let rights = match facts.may_migrate {
        true => "this user may run later migrations",
        false => {
            "this user may not create tables; run later migrations as another (`onlyonce migrate --print`)"
        }
    };
    notes.push(("rights", Concern::None, rights.into()));
    Facts { about, notes, records: facts.records_estimate, exact: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_not_here_is_refused_without_its_password() {
        for (url, says) in [
            ("mysql://ann:hunter2@db/keys", "mysql store, which this build does not have; sqlite:PATH"),
            ("postgres://ann:hunter2@db/keys?colour=hunter2", "colour"),
            ("redis://:hunter2@cache", "redis store"),
            ("hunter2", "no scheme"),
            ("C:\\hunter2.db", "no scheme"),
            ("sqlite:k.db?password=hunter2", "unknown parameter"),
        ] {
            let error = StoreUrl::parse(url).expect_err(url);
            assert!(error.contains(says) && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn a_file_is_named_by_its_path() {
        assert_eq!(StoreUrl::parse("sqlite:///var/k.db").unwrap().to_string(), "sqlite:/var/k.db");
        assert_eq!(StoreUrl::parse("sqlite:k.db").unwrap(), StoreUrl::file("k.db"));
        let database = StoreUrl::parse("postgresql://ann:hunter2@db/keys").unwrap().to_string();
        assert_eq!(database, "postgres://ann@db:5432/keys");
    }
}

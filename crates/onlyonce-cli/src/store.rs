//! The stores that this build has, by URL. The only module that names one.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::store::{Cursor, Filter};
use onlyonce_core::{Inspect, Store, StoreError};
pub(crate) use onlyonce_sqlite::Page;
use onlyonce_sqlite::{OpenError, OpenErrorKind, SqliteOptions, SqliteStore};
use tokio::time::{Instant, sleep};
use tracing::warn;

/// Where keys are kept.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    sqlite: SqliteOptions,
}

impl StoreUrl {
    /// Reads a store's URL.
    ///
    /// # Errors
    /// Refuses a store that this build does not have, without repeating a password.
    pub fn parse(url: &str) -> Result<Self, String> {
        match url.split_once(':').map(|(scheme, _)| scheme) {
            Some("sqlite") => match url.parse::<SqliteOptions>() {
                Ok(sqlite) => Ok(Self { sqlite }),
                Err(error) => Err(error.to_string()),
            },
            Some(scheme)
                if scheme.len() > 1
                    && scheme.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte)) =>
            {
                Err(format!("names a {scheme} store, which this build does not have; sqlite:PATH is allowed"))
            }
            _ => Err("has no scheme; sqlite:PATH is allowed, such as sqlite:onlyonce.db".into()),
        }
    }

    /// A store in this file.
    #[must_use]
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self { sqlite: SqliteOptions::file(path) }
    }

    /// What the driver is asked for.
    pub(crate) fn options(&self, allow_volatile: bool) -> SqliteOptions {
        self.sqlite.clone().allow_volatile(allow_volatile)
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.sqlite.path() {
            Some(path) => write!(f, "sqlite:{}", path.display()),
            None => f.write_str("sqlite::memory:"),
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
pub struct OpenStore {
    sqlite: SqliteStore,
}

const RETRY_EVERY: Duration = Duration::from_millis(500);

impl OpenStore {
    /// Opens the store, and creates it if need be. One that is away is tried again for `wait`, on the local
    /// clock.
    ///
    /// # Errors
    /// At once if it is refused, and at the end of `wait` if it could not be opened.
    pub async fn open(url: &StoreUrl, allow_volatile: bool, wait: Duration) -> Result<Self, OpenError> {
        let deadline = Instant::now() + wait;
        loop {
            match SqliteStore::open(&url.options(allow_volatile)).await {
                Ok(sqlite) => return Ok(Self { sqlite }),
                Err(error) if error.kind() == OpenErrorKind::Refused => return Err(error),
                Err(error) if Instant::now() + RETRY_EVERY >= deadline => return Err(error),
                Err(error) => {
                    warn!(store = %url, %error, "the store cannot be opened yet");
                    sleep(RETRY_EVERY).await;
                }
            }
        }
    }

    /// Opens a store that is there already.
    ///
    /// # Errors
    /// If it is refused, cannot be opened, or is not there.
    pub async fn open_existing(url: &StoreUrl, allow_volatile: bool) -> Result<Self, OpenError> {
        let options = url.options(allow_volatile).create(false);
        Ok(Self { sqlite: SqliteStore::open(&options).await? })
    }

    /// For the engine.
    #[must_use]
    pub fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.sqlite.clone())
    }

    /// For people.
    #[must_use]
    pub fn inspect(&self) -> Arc<dyn Inspect> {
        Arc::new(self.sqlite.clone())
    }

    /// A part of a listing, damaged records apart.
    pub(crate) async fn page(
        &self,
        filter: &Filter,
        after: Option<&Cursor>,
        rows_max: u32,
    ) -> Result<Page, StoreError> {
        self.sqlite.page(filter, after, rows_max).await
    }

    pub(crate) fn sqlite(&self) -> &SqliteStore {
        &self.sqlite
    }

    /// Finishes what is being written and lets the store go.
    ///
    /// # Errors
    /// If the store could not tidy up; nothing is lost.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.sqlite.close().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_not_here_is_refused_without_its_password() {
        for (url, says) in [
            ("postgres://ann:hunter2@db/keys", "postgres store, which this build does not have; sqlite:PATH"),
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
    }
}

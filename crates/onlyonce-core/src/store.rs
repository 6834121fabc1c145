//! What a store must do: keep records as a compare-and-swap register with a clock.
//!
//! A store decides nothing. It does not know what a lease is, and it never looks at a record before
//! it writes one except to compare revisions.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::identity::{Id, Operation};
use crate::record::{Record, Revision, Seen, Timestamp, Write};

/// A register of records, each under a 32-byte id.
///
/// The five methods are all required: none has a default, because a default would have to be built
/// from reads and writes that are not atomic together.
///
/// # Cancellation
///
/// A caller may drop any of these futures at any point. The write may then have been applied or not, or
/// be applied later, but it must be whole, and no connection may be left inside a transaction. A grant
/// whose future was dropped may also be taken back later; whoever dropped it must not act on it, even if
/// a read shows it.
///
/// # Errors
///
/// Every method fails with a [`StoreError`]; [`StoreError::may_have_applied`] says whether the write
/// may nevertheless be in the store.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Writes a record under an id that has none, expired or not, in one atomic step.
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError>;

    /// Replaces the record whose revision is `expected`, in one atomic step.
    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError>;

    /// Removes the record whose revision is `expected`; `false` if there is no such record.
    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError>;

    /// Reads the record under `id`, expired or not, as of the latest committed write.
    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError>;

    /// Removes at most `rows_max` expired records and returns how many it removed.
    ///
    /// This only frees space: whether a record is expired is decided when it is claimed.
    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError>;
}

/// A store, or one that is shared already.
///
/// A shared store is not a [`Store`] itself: every call would go through two.
pub trait IntoStore {
    /// The store as it is shared.
    fn into_store(self) -> Arc<dyn Store>;
}

impl<S: Store> IntoStore for S {
    fn into_store(self) -> Arc<dyn Store> {
        Arc::new(self)
    }
}

impl<S: Store> IntoStore for Arc<S> {
    fn into_store(self) -> Arc<dyn Store> {
        self
    }
}

impl IntoStore for Arc<dyn Store> {
    fn into_store(self) -> Arc<dyn Store> {
        self
    }
}

/// What an [`insert`](Store::insert) found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The record is written, at this point of the store's clock.
    New(Timestamp),
    /// There is a record already; nothing was written.
    Exists(Seen),
}

/// What a [`replace`](Store::replace) found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replaced {
    /// The record is written, at this point of the store's clock.
    Written(Timestamp),
    /// The stored revision is another one, or there is no record; nothing was written.
    Lost(Option<Seen>),
}

/// A store call that failed.
#[derive(Debug)]
pub struct StoreError {
    kind: StoreErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// What kind of failure a [`StoreError`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreErrorKind {
    /// The store was not reached, or refused: nothing was written.
    Unavailable,
    /// The answer was lost: the write is in the store or it is not.
    Ambiguous,
    /// A record in the store cannot be understood: it is damaged, or a newer version wrote it.
    Unreadable,
}

impl StoreError {
    /// A failure of the given kind; `message` says in one line what could not be done.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }

    /// The same failure with its cause attached.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The record under this id cannot be understood, for this reason.
    #[must_use]
    pub fn unreadable(id: Id, reason: &str) -> Self {
        Self::new(StoreErrorKind::Unreadable, format!("the record {id} cannot be read: {reason}"))
    }

    /// What kind of failure this is.
    #[must_use]
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether the write that failed may nevertheless be in the store.
    #[must_use]
    pub fn may_have_applied(&self) -> bool {
        self.kind == StoreErrorKind::Ambiguous
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for StoreError {}

/// Why a store was not opened, in one line. Nothing was written to one that is not Onlyonce's.
#[derive(Debug)]
pub struct OpenError {
    kind: OpenErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Whose fault an [`OpenError`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenErrorKind {
    /// The configuration: it will fail again until someone changes it.
    Refused,
    /// The circumstances: trying again may help.
    Failed,
}

impl OpenError {
    /// The configuration must change first; `message` says what is wrong, where, and what is allowed.
    pub fn refused(message: impl Into<String>) -> Self {
        Self { kind: OpenErrorKind::Refused, message: message.into(), source: None }
    }

    /// The circumstances are to blame; `message` says what could not be done.
    pub fn failed(message: impl Into<String>) -> Self {
        Self { kind: OpenErrorKind::Failed, message: message.into(), source: None }
    }

    /// The same with its cause attached.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Whose fault it is.
    #[must_use]
    pub fn kind(&self) -> OpenErrorKind {
        self.kind
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for OpenError {}

/// What a migration did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migrated {
    /// The schema version that was found; zero if there was nothing.
    pub from: u32,
    /// The version that it has now.
    pub to: u32,
}

/// What people need to look after a store. Apart from [`Store`], because the guarantee does not
/// depend on it.
#[async_trait]
pub trait Inspect: Send + Sync + 'static {
    /// Records that match `filter`, starting after `after`; at most `rows_max`. A damaged one does not hide the
    /// others: whoever decides about a key must know all of its records.
    ///
    /// The order is the store's own, and a record never moves towards its front. So one that changes between
    /// two pages may be met twice, and is never missed. Of records with the same retention the oldest come
    /// first.
    ///
    /// # Errors
    /// Fails if the store cannot be read; nothing is written either way.
    async fn page(&self, filter: &Filter, after: Option<&Cursor>, rows_max: u32) -> Result<Page, StoreError>;

    /// The first records that match `filter`, at most `rows_max`, in the order of [`page`](Self::page).
    ///
    /// # Errors
    /// Fails if the store cannot be read or one of them is damaged.
    async fn list(&self, filter: &Filter, rows_max: u32) -> Result<Vec<Entry>, StoreError> {
        let Page { entries, unreadable, .. } = self.page(filter, None, rows_max).await?;
        match unreadable.into_iter().next() {
            Some(damage) => Err(StoreError::new(StoreErrorKind::Unreadable, damage)),
            None => Ok(entries),
        }
    }
}

/// Which records to list. `None` matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only the record with this id.
    pub id: Option<Id>,
    /// Only this namespace.
    pub namespace: Option<String>,
    /// Only this endpoint, for example `POST /payments`.
    pub endpoint: Option<String>,
    /// Only this caller.
    pub caller: Option<String>,
    /// Only this client key.
    pub key: Option<String>,
}

/// Where a listing goes on: behind the last entry of the page before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Its place in the store's order.
    pub at: Timestamp,
    /// Its id, for several may have the same place.
    pub id: Id,
}

/// A part of a listing, with what is damaged apart.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The records that can be read.
    pub entries: Vec<Entry>,
    /// The others, in a line each: which it is, and what is wrong with it.
    pub unreadable: Vec<String>,
    /// Where the next page starts; `None` after the last one.
    pub next: Option<Cursor>,
}

/// One listed record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The readable parts of its identity.
    pub operation: Operation,
    /// The record.
    pub record: Record,
    /// The store's clock when it was read.
    pub now: Timestamp,
}

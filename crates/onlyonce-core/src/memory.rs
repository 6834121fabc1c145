//! A store in memory, for tests and examples. It forgets everything when the process ends, so it
//! keeps no promise across a restart and none between two processes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

use crate::identity::{Id, Operation};
use crate::record::{Record, Revision, Seen, Timestamp, Write};
use crate::store::{Cursor, Entry, Filter, Inserted, Inspect, Page, Replaced, Store, StoreError};

/// A store in memory. Clones share their records.
#[derive(Clone)]
pub struct MemoryStore {
    records: Arc<Mutex<HashMap<Id, (Operation, Record)>>>,
    clock: Arc<dyn Fn() -> Timestamp + Send + Sync>,
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// An empty store on this process's monotonic clock.
    #[must_use]
    pub fn new() -> Self {
        let started = Instant::now();
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::with_clock(move || Timestamp(0).plus(epoch + started.elapsed()))
    }

    /// An empty store on a clock of the caller's.
    #[must_use]
    pub fn with_clock(clock: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self { records: Arc::default(), clock: Arc::new(clock) }
    }

    fn records(&self) -> MutexGuard<'_, HashMap<Id, (Operation, Record)>> {
        // Every write is one assignment, so a panic elsewhere leaves nothing half done.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        let mut records = self.records();
        let now = (self.clock)();
        if let Some((_, record)) = records.get(&operation.id()) {
            return Ok(Inserted::Exists(Seen { record: record.clone(), now }));
        }
        records.insert(operation.id(), (operation.clone(), write.at(now)));
        Ok(Inserted::New(now))
    }

    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        let mut records = self.records();
        let now = (self.clock)();
        match records.get_mut(&id) {
            Some((_, record)) if record.revision == expected => {
                *record = write.at(now);
                Ok(Replaced::Written(now))
            }
            found => Ok(Replaced::Lost(found.map(|(_, record)| Seen { record: record.clone(), now }))),
        }
    }

    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        let mut records = self.records();
        let matches = records.get(&id).is_some_and(|(_, record)| record.revision == expected);
        if matches {
            records.remove(&id);
        }
        Ok(matches)
    }

    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        let records = self.records();
        let now = (self.clock)();
        Ok(records.get(&id).map(|(_, record)| Seen { record: record.clone(), now }))
    }

    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        let mut records = self.records();
        let now = (self.clock)();
        let expired: Vec<Id> = records
            .iter()
            .filter(|(_, (_, record))| record.expires_at <= now)
            .map(|(id, _)| *id)
            .take(rows_max as usize)
            .collect();
        for id in &expired {
            records.remove(id);
        }
        Ok(expired.len() as u64)
    }
}

#[async_trait]
impl Inspect for MemoryStore {
    async fn page(&self, filter: &Filter, after: Option<&Cursor>, rows_max: u32) -> Result<Page, StoreError> {
        let records = self.records();
        let now = (self.clock)();
        let mut entries: Vec<Entry> = records
            .values()
            .filter(|(operation, record)| {
                matches(filter, operation)
                    && after.is_none_or(|after| (record.created_at, operation.id()) > (after.at, after.id))
            })
            .map(|(operation, record)| Entry { operation: operation.clone(), record: record.clone(), now })
            .collect();
        entries.sort_by_key(|entry| (entry.record.created_at, entry.operation.id()));
        entries.truncate(rows_max as usize);
        let last = entries.last().filter(|_| entries.len() >= rows_max as usize);
        let next = last.map(|entry| Cursor { at: entry.record.created_at, id: entry.operation.id() });
        Ok(Page { entries, unreadable: Vec::new(), next })
    }
}

fn matches(filter: &Filter, operation: &Operation) -> bool {
    let wanted = |filter: &Option<String>, value: &str| filter.as_deref().is_none_or(|want| want == value);
    filter.id.is_none_or(|id| id == operation.id())
        && wanted(&filter.namespace, operation.namespace())
        && wanted(&filter.endpoint, operation.endpoint())
        && wanted(&filter.caller, operation.caller())
        && wanted(&filter.key, operation.key().as_str())
}

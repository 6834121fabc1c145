//! What a store runs on, for people who look after it.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use onlyonce_core::{StoreError, StoreErrorKind};
use sqlx::postgres::{PgArguments, PgRow};

use crate::link::{Failure, Link, Statement};
use crate::sql::{self, quoted};

/// What a store runs on, for people who look after it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Facts {
    /// The server's version, such as `15.4`.
    pub server_version: String,
    /// The schema's version.
    pub schema_version: u32,
    /// `synchronous_commit` as this user has it here; `off` is volatile.
    pub synchronous_commit: String,
    /// Whether the server waits for the disk; without it is volatile.
    pub fsync: bool,
    /// Whether a page that was half written in a crash can be restored.
    pub full_page_writes: bool,
    /// Whether the server is a standby, which takes no writes.
    pub in_recovery: bool,
    /// Whether this user's transactions are read-only here.
    pub read_only: bool,
    /// The standbys that a commit waits for; empty if it waits for none.
    pub synchronous_standby_names: String,
    /// How many standbys are connected, if this user may know.
    pub standbys: u64,
    /// How many connections the server takes.
    pub connections_max: u32,
    /// How many connections this store opens at most. Every instance does.
    pub pool_size: u32,
    /// The server's clock minus this machine's, in milliseconds; half the round trip is in it.
    pub clock_ahead_ms: i64,
    /// Whether this user may create tables in the schema, as a later migration will want.
    pub may_migrate: bool,
    /// How many records there are by the planner's estimate, expired ones included; `None` before the
    /// first vacuum.
    pub records_estimate: Option<u64>,
    /// Whether a pooler stands in between that shares connections between transactions.
    pub pooled: bool,
}

impl Facts {
    /// What a failover to a standby means for acknowledged keys, in one sentence.
    #[must_use]
    pub fn on_failover(&self) -> &'static str {
        let waits = !self.synchronous_standby_names.is_empty();
        match self.synchronous_commit.as_str() {
            "off" => "a crash of the server alone loses the latest keys",
            "on" | "remote_apply" if waits => "a failover to a synchronous standby loses no key",
            "remote_write" if waits => {
                "a failover to a synchronous standby loses no key unless that machine crashed as well"
            }
            _ => {
                "commits wait for no standby: a crash loses no key, but a failover loses those that were not \
                 replicated yet; set synchronous_standby_names to rule that out"
            }
        }
    }
}

pub(crate) async fn facts(link: &mut Link) -> Result<Facts, StoreError> {
    let target = Arc::clone(&link.target);
    let schema = quoted(&target.schema);
    let text: Arc<str> = format!(
        "SELECT current_setting('server_version'), current_setting('synchronous_commit'), \
                current_setting('fsync') = 'on', current_setting('full_page_writes') = 'on', \
                pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', \
                current_setting('synchronous_standby_names'), \
                (SELECT count(*) FROM pg_catalog.pg_stat_replication), \
                current_setting('max_connections')::integer, \
                (extract(epoch FROM clock_timestamp()) * 1000)::bigint, \
                has_schema_privilege(n.oid, 'CREATE'), c.reltuples::bigint, \
                (SELECT max(version) FROM {schema}.schema_versions) \
         FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE n.nspname = $1::text AND c.relname = 'idempotency_keys'"
    )
    .into();
    let arguments = || {
        use sqlx::Arguments;
        let mut arguments = PgArguments::default();
        arguments.add(target.schema.as_str()).map(|()| arguments)
    };
    let statement =
        Statement { text: &text, arguments: &arguments, doing: "read its settings", writes: false };
    let rows = link.fetch(&statement).await.map_err(|Failure { error, .. }| error)?;
    let here = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let row =
        rows.first().ok_or_else(|| StoreError::new(StoreErrorKind::Unavailable, "the table is gone"))?;
    parse(row, i64::try_from(here).unwrap_or(i64::MAX), target.pool_size, target.is_pooled())
        .map_err(|reason| StoreError::new(StoreErrorKind::Unreadable, reason))
}

fn parse(row: &PgRow, here: i64, pool_size: u32, pooled: bool) -> Result<Facts, String> {
    Ok(Facts {
        server_version: sql::get(row, 0)?,
        synchronous_commit: sql::get(row, 1)?,
        fsync: sql::get(row, 2)?,
        full_page_writes: sql::get(row, 3)?,
        in_recovery: sql::get(row, 4)?,
        read_only: sql::get(row, 5)?,
        synchronous_standby_names: sql::get(row, 6)?,
        standbys: sql::get::<i64>(row, 7)?.cast_unsigned(),
        connections_max: sql::get::<i32>(row, 8)?.cast_unsigned(),
        pool_size,
        clock_ahead_ms: sql::get::<i64>(row, 9)? - here,
        may_migrate: sql::get(row, 10)?,
        records_estimate: u64::try_from(sql::get::<i64>(row, 11)?).ok(),
        schema_version: sql::get::<i32>(row, 12)?.cast_unsigned(),
        pooled,
    })
}

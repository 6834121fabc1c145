//! A store and the database under it, which measurements fill and weigh.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_core::{Claimed, Engine, Fingerprint, Key, Lapse, Operation, Outcome, Policy, Store, Verdict};
use onlyonce_postgres::PostgresStore;
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use onlyonce_testkit::Postgres;
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, Row};

use crate::http::Database;
use crate::serve::work;

/// What a recorded answer has in it unless a measurement says otherwise.
pub(crate) const ANSWER_BYTES: usize = 100;

pub(crate) const A_DAY: Policy =
    Policy { lease: Duration::from_secs(75), retention: Duration::from_secs(86_400), on_lapse: Lapse::Rerun };

pub(crate) const FINGERPRINT: Fingerprint = Fingerprint { target: [1; 32], body: [2; 32] };

/// A database of its own, with a store on it.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) engine: Engine,
    kind: Kind,
}

/// The keys of claims that were measured: no other key has a UUID of version 7.
const CLAIMED: &str = "key LIKE 'claimed-%' OR key LIKE '________-____-7%'";

/// What becomes of copied records.
#[derive(Clone, Copy)]
pub(crate) enum Copies {
    Live,
    Expired,
}

#[derive(Clone)]
enum Kind {
    Postgres { server: Arc<Postgres>, database: String },
    Sqlite { path: PathBuf },
}

impl Place {
    pub(crate) async fn postgres(server: &Arc<Postgres>) -> Self {
        Self::at(Kind::Postgres { server: Arc::clone(server), database: server.database() }).await
    }

    /// A fresh file.
    pub(crate) async fn sqlite(path: PathBuf) -> Self {
        Self::at(Kind::Sqlite { path }).await
    }

    /// The same database through a store of its own, as another instance has it.
    pub(crate) async fn again(&self) -> Self {
        Self::at(self.kind.clone()).await
    }

    async fn at(kind: Kind) -> Self {
        let store: Arc<dyn Store> = match &kind {
            Kind::Postgres { server, database } => {
                let options = server.url(database).parse().expect("the testkit's URL");
                Arc::new(PostgresStore::open(&options).await.expect("a private server"))
            }
            Kind::Sqlite { path } => {
                Arc::new(SqliteStore::open(&SqliteOptions::file(path)).await.expect("an open file"))
            }
        };
        Self { engine: Engine::new(Arc::clone(&store)), store, kind }
    }

    pub(crate) fn database(&self) -> Database {
        match self.kind {
            Kind::Postgres { .. } => Database::Postgres,
            Kind::Sqlite { .. } => Database::Sqlite,
        }
    }

    /// Runs an operation that does nothing, from the claim to the outcome.
    pub(crate) async fn execute(&self, key: &str, answer_bytes: usize, policy: &Policy) {
        let claimed = self.engine.claim(&operation(key), FINGERPRINT, policy).await.expect("a claim");
        let Claimed::Execute(grant) = claimed else { panic!("{key} is not fresh") };
        grant.finish(Verdict::Keep(outcome(answer_bytes))).await.expect("an outcome");
    }

    /// Whether this key's operation was done before.
    pub(crate) async fn replays(&self, key: &str) -> bool {
        let claimed = self.engine.claim(&operation(key), FINGERPRINT, &A_DAY).await.expect("a claim");
        matches!(claimed, Claimed::Replay(_))
    }

    /// One batch of a sweep; how many rows it removed.
    pub(crate) async fn sweep(&self) -> u64 {
        self.store.sweep(1_000).await.expect("a sweep waits for nobody")
    }

    /// Removes the keys that measurements of claims left, so that the table has the size it had before.
    pub(crate) async fn forget_claims(&self) {
        match &self.kind {
            Kind::Postgres { .. } => {
                self.sql(&format!("DELETE FROM onlyonce.idempotency_keys WHERE {CLAIMED}")).await;
                // Otherwise a small table would have become a large one, of dead rows.
                self.sql("VACUUM onlyonce.idempotency_keys").await;
            }
            Kind::Sqlite { .. } => {
                self.sqlite_number(&format!("DELETE FROM idempotency_keys WHERE {CLAIMED}")).await;
            }
        }
    }

    /// Adds so many copies of this key's record, with other ids and keys, claimed one millisecond apart.
    pub(crate) async fn copy(&self, template: &str, many: u64, copies: Copies) {
        match &self.kind {
            Kind::Postgres { .. } => {
                let expires = match copies {
                    Copies::Live => "expires_at + n, sweep_at + n",
                    Copies::Expired => "created_at, created_at",
                };
                self.sql(&format!(
                    "INSERT INTO onlyonce.idempotency_keys \
                     SELECT created_at + n, granted_at + n, {expires}, lease_until, completed_at, attempt, \
                        status, sha256(gen_random_uuid()::text::bytea), revision, fingerprint_target, \
                        fingerprint_body, namespace, endpoint, caller, gen_random_uuid()::text, head, body \
                     FROM onlyonce.idempotency_keys, generate_series(1, {many}) n WHERE key = '{template}'"
                ))
                .await;
            }
            Kind::Sqlite { .. } => {
                let expires = match copies {
                    Copies::Live => "expires_at + n, sweep_at + n",
                    Copies::Expired => "created_at, created_at",
                };
                let sql = format!(
                    "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {many}) \
                     INSERT INTO idempotency_keys \
                     SELECT randomblob(32), namespace, endpoint, caller, hex(randomblob(16)), fingerprint_target, \
                        fingerprint_body, revision, attempt, created_at + n, granted_at + n, lease_until, \
                        completed_at, status, {expires}, head, body \
                     FROM idempotency_keys, numbers WHERE key = '{template}'"
                );
                self.sqlite_number(&sql).await;
            }
        }
    }

    /// Lets the database settle after it was filled.
    pub(crate) async fn settle(&self) {
        match &self.kind {
            Kind::Postgres { .. } => {
                self.sql("VACUUM ANALYZE onlyonce.idempotency_keys").await;
                self.sql("CHECKPOINT").await;
            }
            Kind::Sqlite { .. } => {
                self.sqlite_number("PRAGMA wal_checkpoint(TRUNCATE)").await;
            }
        }
    }

    /// What the keys take on disk, indexes included.
    pub(crate) async fn bytes(&self) -> u64 {
        match &self.kind {
            Kind::Postgres { .. } => {
                let size = self.sql("SELECT pg_total_relation_size('onlyonce.idempotency_keys')").await;
                size.parse().expect("a number")
            }
            Kind::Sqlite { .. } => {
                self.sqlite_number("PRAGMA page_count").await * self.sqlite_number("PRAGMA page_size").await
            }
        }
    }

    /// On Postgres: dead rows by its own estimate, and how many automatic vacuums have ended.
    pub(crate) async fn vacuums(&self) -> Option<(u64, u64)> {
        let Kind::Postgres { .. } = &self.kind else { return None };
        let columns =
            "n_dead_tup, autovacuum_count FROM pg_stat_user_tables WHERE relname = 'idempotency_keys'";
        let line = self.sql(&format!("SELECT {columns}")).await;
        let (dead, vacuums) = line.split_once('|')?;
        Some((dead.parse().ok()?, vacuums.parse().ok()?))
    }

    async fn sql(&self, sql: &str) -> String {
        let Kind::Postgres { server, database } = &self.kind else { return String::new() };
        let (server, database, sql) = (Arc::clone(server), database.clone(), sql.to_owned());
        tokio::task::spawn_blocking(move || server.sql(&database, &sql)).await.expect("a private server")
    }

    /// The first column of the first row, if there is one.
    async fn sqlite_number(&self, sql: &str) -> u64 {
        let Kind::Sqlite { path } = &self.kind else { return 0 };
        let options = SqliteConnectOptions::new().filename(path).busy_timeout(Duration::from_secs(60));
        let mut connection = options.connect().await.expect("the store's file");
        // Rows with random keys are filled in far faster where the indexes fit.
        connection.execute("PRAGMA cache_size = -1000000").await.expect("a valid statement");
        let row = connection.fetch_optional(AssertSqlSafe(sql.to_owned())).await.expect("a valid statement");
        let number = row.map_or(0, |row| row.get::<i64, _>(0));
        connection.close().await.expect("nothing is open");
        number.unsigned_abs()
    }
}

pub(crate) fn operation(key: &str) -> Operation {
    Operation::new("default", "POST /payments", "", Key::new(key).expect("a valid key"))
}

pub(crate) fn outcome(answer_bytes: usize) -> Outcome {
    let head = "content-type: application/json, location: /payments/4711";
    Outcome { status: 201, head: head.into(), body: work(answer_bytes) }
}

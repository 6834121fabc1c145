//! One connection that is opened again after a failure.
//!
//! A connection is out of its [`Link`] for as long as a statement is under way, and put back only when the
//! answer has come to its end. So one whose call timed out, failed halfway or was dropped is closed, and
//! whatever it was in the middle of is rolled back by the server.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use onlyonce_core::StoreError;
use sqlx::postgres::{PgArguments, PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection, Row};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::OpenError;
use crate::error::{
    code, in_doubt, is_everywhere, is_passing, is_undone, is_usable_after, not_applied, sqlstate,
};
use crate::options::{PgBouncer, PostgresOptions};
use crate::sql::Sql;

/// A connection that was idle for longer is asked whether it is alive before it is trusted with a write.
/// One round trip; a write that is lost costs a caller more.
const IDLE_TIME_TRUSTED: Duration = Duration::from_millis(100);

/// How often a call is sent again that the server undid because of others.
const TRIES_MAX: u32 = 4;

/// How long a batch waits for a locked row, and then each of its calls alone. Another writer has a row locked
/// for milliseconds; a transaction of an application, for as long as it is open, and then few such keys hold up
/// every writer.
const LOCK_WAIT_MAX: Duration = Duration::from_millis(250);

/// The oldest server this was written for, as `server_version_num` says it.
const SERVER_VERSION_MIN: i64 = 130_000;

/// A database, and how to talk to it.
pub(crate) struct Target {
    /// The URL without its password.
    pub(crate) name: String,
    pub(crate) schema: String,
    pub(crate) sql: Sql,
    pub(crate) call_timeout: Duration,
    pub(crate) pool_size: u32,
    pub(crate) allow_volatile: bool,
    connect_timeout: Duration,
    plain: PgConnectOptions,
    with_settings: PgConnectOptions,
    /// Opens a transaction that has the settings which a pooler does not pass on.
    begin: String,
    pgbouncer: PgBouncer,
    pooler_found: AtomicBool,
}

/// One statement, ready to be sent more than once.
pub(crate) struct Statement<'a> {
    pub(crate) text: &'a Arc<str>,
    pub(crate) arguments: &'a (dyn Fn() -> Result<PgArguments, sqlx::error::BoxDynError> + Send + Sync),
    /// What it does, to go behind "Postgres could not".
    pub(crate) doing: &'static str,
    /// Whether it may write.
    pub(crate) writes: bool,
}

/// A statement that failed.
pub(crate) struct Failure {
    pub(crate) error: StoreError,
    /// Whether others would fail as well.
    pub(crate) everywhere: bool,
}

impl Target {
    pub(crate) fn new(options: &PostgresOptions) -> Self {
        let settings = settings(options.call_timeout);
        let quiet = |connect: &PgConnectOptions| connect.clone().disable_statement_logging();
        let local: String =
            settings.iter().map(|(name, value)| format!("; SET LOCAL {name} = '{value}'")).collect();
        // For the server to notice that a client is gone while nothing is under way.
        let keepalive =
            [("tcp_keepalives_idle", "30"), ("tcp_keepalives_interval", "10"), ("tcp_keepalives_count", "3")];
        Self {
            name: options.to_string(),
            schema: options.schema.clone(),
            sql: Sql::new(&options.schema),
            call_timeout: options.call_timeout,
            pool_size: options.pool_size,
            allow_volatile: options.allow_volatile,
            connect_timeout: options.connect_timeout.min(options.call_timeout),
            plain: quiet(&options.connect),
            with_settings: quiet(&options.connect_with_settings).options(settings).options(keepalive),
            begin: format!("BEGIN ISOLATION LEVEL READ COMMITTED{local}{}", durable(options.allow_volatile)),
            pgbouncer: options.pgbouncer,
            pooler_found: AtomicBool::new(options.pgbouncer == PgBouncer::Yes),
        }
    }

    /// Whether a pooler stands in between, as far as is known by now.
    pub(crate) fn is_pooled(&self) -> bool {
        self.pooler_found.load(Ordering::Relaxed)
    }

    /// Connects and checks that what is written here stays written.
    pub(crate) async fn connect(&self) -> Result<Live, sqlx::Error> {
        timeout(self.connect_timeout, self.establish()).await.unwrap_or_else(|_| {
            let reason = format!("no connection within {:?}", self.connect_timeout);
            Err(io::Error::new(io::ErrorKind::TimedOut, reason).into())
        })
    }

    async fn establish(&self) -> Result<Live, sqlx::Error> {
        if !self.is_pooled() {
            match self.with_settings.connect().await {
                Ok(mut connection) => {
                    let settings_arrived = self.check(&mut connection).await?;
                    let pooled = self.pgbouncer == PgBouncer::Auto && !settings_arrived;
                    self.pooler_found.fetch_or(pooled, Ordering::Relaxed);
                    return Ok(Live { connection, pooled, used: Instant::now() });
                }
                Err(error) if self.pgbouncer == PgBouncer::Auto && refuses_settings(&error) => {
                    self.pooler_found.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
        let mut connection = self.plain.connect().await?;
        self.check(&mut connection).await?;
        Ok(Live { connection, pooled: true, used: Instant::now() })
    }

    /// Refuses a server that forgets; `true` if it has the settings that were asked for.
    async fn check(&self, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
        // In one message, for a pooler may run the next one elsewhere.
        let question = format!(
            "SELECT current_setting('server_version_num'), {CONFIGURED_COMMIT}, current_setting('fsync'), \
                    current_setting('enable_seqscan'), current_setting('plan_cache_mode', true)"
        );
        let row = connection.fetch_one(sqlx::raw_sql(AssertSqlSafe(question))).await?;
        let text = |column: usize| row.try_get::<Option<String>, _>(column).map(Option::unwrap_or_default);
        let refuse = |reason: String| Err(sqlx::Error::Configuration(reason.into()));
        let version: i64 = text(0)?.parse().unwrap_or(0);
        if version < SERVER_VERSION_MIN {
            return refuse(format!(
                "Postgres {} is too old; 13 and newer are supported",
                if version < 100_000 { version / 100 } else { version / 10_000 }
            ));
        }
        if let Some(reason) = volatile(&text(1)?, &text(2)?).filter(|_| !self.allow_volatile) {
            return refuse(format!("the Postgres store is volatile: {reason}, or set allow_volatile = true"));
        }
        Ok(text(3)? == "off" && text(4)? == "force_generic_plan")
    }

    /// The words for a failure to open or to set up.
    pub(crate) fn explain(&self, error: &sqlx::Error) -> OpenError {
        let name = &self.name;
        let line = crate::error::line(error);
        match error {
            sqlx::Error::Configuration(reason) => OpenError::refused(format!("{name}: {reason}")),
            _ => match sqlstate(error) {
                Some(code::INVALID_PASSWORD | code::INVALID_AUTHORIZATION) => {
                    OpenError::refused(format!("{name} does not let this user in; check user and password"))
                        .with_source(line)
                }
                Some(code::NO_SUCH_DATABASE) => {
                    OpenError::refused(format!("{name} does not exist; create the database first"))
                        .with_source(line)
                }
                Some(code::INSUFFICIENT_PRIVILEGE) => OpenError::refused(format!(
                    "{name}: this user lacks privileges in schema {}; see onlyonce migrate --print",
                    self.schema
                ))
                .with_source(line),
                _ => OpenError::failed(format!("{name} could not be opened")).with_source(line),
            },
        }
    }
}

/// What every statement runs under, unless its transaction says otherwise.
///
/// Timeouts: the server gives up before the caller does. Plans: on a table that was empty when a statement
/// was planned a scan looks cheaper than an index, and the plan stays while the table grows. Without these
/// kinds of scan every statement finds its rows by id, in the order of the ids, which is the order that
/// keeps two instances from deadlocking. `jit` is off because a kind of scan that is off counts as dear, and
/// what is dear would be compiled.
fn settings(call_timeout: Duration) -> Vec<(&'static str, String)> {
    let statement = call_timeout.mul_f64(0.85);
    let lock = (call_timeout / 4).min(LOCK_WAIT_MAX);
    let milliseconds = |time: Duration| time.as_millis().to_string();
    let off = || "off".to_owned();
    vec![
        ("statement_timeout", milliseconds(statement)),
        ("lock_timeout", milliseconds(lock)),
        ("idle_in_transaction_session_timeout", milliseconds(call_timeout)),
        ("default_transaction_isolation", "read committed".to_owned()),
        ("enable_seqscan", off()),
        ("enable_bitmapscan", off()),
        ("enable_mergejoin", off()),
        ("jit", off()),
        ("plan_cache_mode", "force_generic_plan".to_owned()),
    ]
}

/// `synchronous_commit` as it is configured, though another client of a pooled session may have set it `off`
/// there: that holds for none of our transactions, see [`durable`].
pub(crate) const CONFIGURED_COMMIT: &str = "(SELECT CASE setting WHEN 'off' THEN reset_val ELSE setting END \
     FROM pg_catalog.pg_settings WHERE name = 'synchronous_commit')";

/// Behind a pooler a session is shared, and another client may have left it with commits that do not wait:
/// what was checked when connecting need not be so any more.
pub(crate) fn durable(allow_volatile: bool) -> &'static str {
    if allow_volatile {
        return "";
    }
    "; SELECT pg_catalog.set_config('synchronous_commit', 'on', true) \
     WHERE pg_catalog.current_setting('synchronous_commit') = 'off'"
}

/// Why these settings can lose an acknowledged write, if they can, and what to do about it.
pub(crate) fn volatile(synchronous_commit: &str, fsync: &str) -> Option<&'static str> {
    if fsync == "off" {
        return Some("with fsync off a crash loses or damages keys; set it to on");
    }
    (synchronous_commit == "off").then_some(
        "with synchronous_commit off a crash loses keys; set it to on, for this user with ALTER ROLE or \
         for this URL with options=-c synchronous_commit=on",
    )
}

/// PgBouncer's answer to settings that it was not told to ignore.
fn refuses_settings(error: &sqlx::Error) -> bool {
    sqlstate(error) == Some(code::PROTOCOL_VIOLATION) && error.to_string().contains("startup parameter")
}

/// An open connection, outside a transaction.
pub(crate) struct Live {
    pub(crate) connection: PgConnection,
    pooled: bool,
    used: Instant,
}

/// How far a statement got that failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    /// Nothing that could have been committed.
    Nothing,
    /// Enough to be committed.
    All,
}

/// One connection that is opened again after a failure.
pub(crate) struct Link {
    pub(crate) target: Arc<Target>,
    live: Option<Live>,
    closed: bool,
}

impl Link {
    pub(crate) fn new(target: Arc<Target>, live: Option<Live>) -> Self {
        Self { target, live, closed: false }
    }

    /// Runs one statement in a transaction of its own, to the end, within the time that a call may take.
    pub(crate) async fn fetch(&mut self, statement: &Statement<'_>) -> Result<Vec<PgRow>, Failure> {
        let deadline = Instant::now() + self.target.call_timeout;
        let mut tries = 1;
        loop {
            match self.attempt(statement, deadline).await {
                Err((_, true)) if tries < TRIES_MAX && Instant::now() < deadline => {
                    sleep(Duration::from_millis(2) * tries).await;
                    tries += 1;
                }
                Err((failure, _)) => return Err(failure),
                Ok(rows) => return Ok(rows),
            }
        }
    }

    /// Tries once; the failure comes with whether another try is in order.
    async fn attempt(
        &mut self,
        statement: &Statement<'_>,
        deadline: Instant,
    ) -> Result<Vec<PgRow>, (Failure, bool)> {
        let Statement { doing, writes, .. } = *statement;
        let refused =
            |error: &sqlx::Error| Failure { error: not_applied("connect", error), everywhere: true };
        let mut live = match timeout_at(deadline, self.ready()).await {
            Ok(Ok(live)) => live,
            Ok(Err(error)) => return Err((refused(&error), false)),
            Err(_) => return Err((refused(&too_slow(self.target.call_timeout)), false)),
        };
        let mut sent = Sent::Nothing;
        let fetched = timeout_at(deadline, live.fetch(&self.target, statement, &mut sent)).await;
        let (error, usable) = match fetched {
            Ok(Ok(rows)) => {
                live.used = Instant::now();
                self.live = Some(live);
                return Ok(rows);
            }
            Ok(Err(failed)) => failed,
            Err(_) => (too_slow(self.target.call_timeout), false),
        };
        if matches!(sqlstate(&error), Some(code::NO_SUCH_STATEMENT | code::DUPLICATE_STATEMENT))
            && self.target.pgbouncer == PgBouncer::Auto
        {
            self.target.pooler_found.store(true, Ordering::Relaxed);
        }
        // A pooled connection that was found dead at its BEGIN.
        let stale =
            live.pooled && sent == Sent::Nothing && !usable && !matches!(error, sqlx::Error::Database(_));
        if usable {
            live.used = Instant::now();
            self.live = Some(live);
        }
        let undone = !writes || sent == Sent::Nothing || is_undone(&error);
        let failure = Failure {
            error: if undone { not_applied(doing, &error) } else { in_doubt(doing, &error) },
            everywhere: is_everywhere(&error),
        };
        Err((failure, is_passing(&error) || stale))
    }

    /// The connection, alive as far as can be told without sending anything that matters.
    async fn ready(&mut self) -> Result<Live, sqlx::Error> {
        if self.closed {
            return Err(sqlx::Error::Configuration("the store is closed".into()));
        }
        if let Some(mut live) = self.live.take() {
            // Behind a pooler the statement's own BEGIN tells.
            if live.pooled || live.used.elapsed() < IDLE_TIME_TRUSTED {
                return Ok(live);
            }
            let patience = self.target.call_timeout / 4;
            if let Ok(Ok(())) = timeout(patience, live.connection.ping()).await {
                return Ok(live);
            }
        }
        self.target.connect().await
    }

    /// Closes the connection for good.
    pub(crate) async fn close(&mut self) {
        self.closed = true;
        if let Some(live) = self.live.take() {
            // A server that does not hear the farewell notices that the connection is gone.
            let _ = timeout(self.target.call_timeout, live.connection.close()).await;
        }
    }
}

fn too_slow(within: Duration) -> sqlx::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {within:?}")).into()
}

impl Live {
    /// Runs the statement; a failure comes with whether the connection can go on.
    async fn fetch(
        &mut self,
        target: &Target,
        statement: &Statement<'_>,
        sent: &mut Sent,
    ) -> Result<Vec<PgRow>, (sqlx::Error, bool)> {
        let arguments = (statement.arguments)().map_err(|error| (sqlx::Error::Encode(error), true))?;
        let query = sqlx::query_with(AssertSqlSafe(Arc::clone(statement.text)), arguments);
        let judged = |error: sqlx::Error| {
            let usable = is_usable_after(&error);
            (error, usable)
        };
        if !self.pooled {
            *sent = Sent::All;
            return query.fetch_all(&mut self.connection).await.map_err(judged);
        }
        // Outside a transaction the pooler could parse the statement on one server and run it on another.
        let begin = AssertSqlSafe(target.begin.clone());
        self.connection.execute(sqlx::raw_sql(begin)).await.map_err(|error| (error, false))?;
        match query.persistent(false).fetch_all(&mut self.connection).await {
            Ok(rows) => {
                *sent = Sent::All;
                self.connection.execute(sqlx::raw_sql("COMMIT")).await.map_err(|error| (error, false))?;
                Ok(rows)
            }
            Err(error) => {
                let usable = is_usable_after(&error)
                    && self.connection.execute(sqlx::raw_sql("ROLLBACK")).await.is_ok();
                Err((error, usable))
            }
        }
    }
}

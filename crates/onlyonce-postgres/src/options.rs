//! Where the database is, and how it is used.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use onlyonce_core::engine::CALL_TIME_MAX;
use sqlx::postgres::PgConnectOptions;

use crate::OpenError;

/// The schema that holds the tables, unless the options say otherwise.
pub const SCHEMA_DEFAULT: &str = "onlyonce";

/// How many connections one store opens at most, unless the options say otherwise.
pub const POOL_SIZE_DEFAULT: u32 = 5;

/// The fewest connections that can be asked for: one writes, one reads, one looks after the table.
pub const POOL_SIZE_MIN: u32 = 3;

/// The most connections that can be asked for.
pub const POOL_SIZE_MAX: u32 = 64;

/// How long one call may take, unless the options say otherwise.
///
/// Shorter than [`CALL_TIME_MAX`], so that a caller hears the store's own reason.
pub const CALL_TIMEOUT_DEFAULT: Duration = Duration::from_secs(4);

/// The shortest time for a call that can be asked for.
pub const CALL_TIMEOUT_MIN: Duration = Duration::from_millis(100);

/// The parameters that are handed to the driver as they are.
const DRIVERS: [&str; 9] =
    ["sslmode", "sslrootcert", "sslcert", "sslkey", "host", "hostaddr", "port", "dbname", "user"];

const ALLOWED: &str = "sslmode, sslrootcert, sslcert, sslkey, host, hostaddr, port, dbname, user, password, \
    application_name, options, connect_timeout, channel_binding, target_session_attrs, schema, pool_size, \
    call_timeout_ms and pgbouncer";

/// Where the database is, and how it is used.
///
/// ```
/// use onlyonce_postgres::PostgresOptions;
///
/// let options: PostgresOptions = "postgres://app:p%40ss@db.internal/shop?sslmode=verify-full".parse()?;
/// assert_eq!(options.to_string(), "postgres://app@db.internal:5432/shop");
/// assert!("postgres://db/shop?colour=blue".parse::<PostgresOptions>().is_err());
/// # Ok::<(), onlyonce_postgres::OpenError>(())
/// ```
///
/// A URL is read as libpq reads it: `postgres://USER:PASSWORD@HOST:PORT/DATABASE?PARAMETERS`. Special
/// characters are percent-encoded. What is absent comes from `PGHOST`, `PGPORT`, `PGUSER`, `PGPASSWORD`,
/// `PGDATABASE`, `PGSSLMODE` and the password file.
///
/// | parameter | |
/// |---|---|
/// | `sslmode` | `disable`, `allow` (as `disable`), `prefer` (the default), `require`, `verify-ca`, `verify-full` |
/// | `sslrootcert`, `sslcert`, `sslkey` | PEM files; without `sslrootcert` the system's certificates count |
/// | `host`, `hostaddr`, `port`, `dbname`, `user`, `password` | instead of the same in front of the `?`; a `host` with a leading `/` is the folder of a socket |
/// | `application_name` | what `pg_stat_activity` shows; `onlyonce` by default |
/// | `options` | settings for each connection, such as `-c synchronous_commit=on`; not through PgBouncer |
/// | `connect_timeout` | whole seconds, as in libpq; never longer than a call |
/// | `channel_binding` | `disable` or `prefer`; the driver has none |
/// | `target_session_attrs` | `any`, `primary` or `read-write`, which mean the same here: see [`crate`] on failover |
/// | `schema` | the schema that holds the tables, `onlyonce` by default |
/// | `pool_size` | how many connections at most, 3 to 64; 5 by default |
/// | `call_timeout_ms` | how long one call may take, 100 to 5000; 4000 by default |
/// | `pgbouncer` | `true` behind any pooler that shares connections between transactions; `auto` (the default) finds PgBouncer out; `false` |
#[derive(Clone)]
pub struct PostgresOptions {
    /// Compared, never shown.
    url: String,
    pub(crate) connect: PgConnectOptions,
    /// As [`connect`](Self::connect), with the settings that the URL's `options` ask for.
    pub(crate) connect_with_settings: PgConnectOptions,
    pub(crate) connect_timeout: Duration,
    pub(crate) schema: String,
    pub(crate) pool_size: u32,
    pub(crate) call_timeout: Duration,
    pub(crate) pgbouncer: PgBouncer,
    pub(crate) allow_volatile: bool,
}

/// Whether a pooler stands in between that shares connections between transactions.
///
/// Such a pooler may run each transaction on another connection. So nothing is prepared, every statement
/// stands in a transaction of its own, and settings hold for one transaction: four round trips instead of
/// one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PgBouncer {
    /// Found out when connecting: PgBouncer does not pass settings on.
    #[default]
    Auto,
    /// There is one.
    Yes,
    /// There is none, or it keeps one connection for each client.
    No,
}

impl PostgresOptions {
    /// The schema that holds the tables.
    #[must_use]
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = schema.into();
        self
    }

    /// How many connections the store opens at most; brought into [`POOL_SIZE_MIN`] to [`POOL_SIZE_MAX`].
    #[must_use]
    pub fn pool_size(mut self, connections: u32) -> Self {
        self.pool_size = connections.clamp(POOL_SIZE_MIN, POOL_SIZE_MAX);
        self
    }

    /// How long one call may take, on the local clock; brought into [`CALL_TIMEOUT_MIN`] to
    /// [`CALL_TIME_MAX`].
    #[must_use]
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout.clamp(CALL_TIMEOUT_MIN, CALL_TIME_MAX);
        self
    }

    /// Whether a pooler stands in between.
    #[must_use]
    pub fn pgbouncer(mut self, pgbouncer: PgBouncer) -> Self {
        self.pgbouncer = pgbouncer;
        self
    }

    /// Whether a database that can forget what it acknowledged may be opened.
    #[must_use]
    pub fn allow_volatile(mut self, allow: bool) -> Self {
        self.allow_volatile = allow;
        self
    }

    /// The most connections that this store will hold open.
    #[must_use]
    pub fn connections_max(&self) -> u32 {
        self.pool_size
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), OpenError> {
        let refuse = |allowed: &str| Err(refused_value(name, allowed));
        match (name, value) {
            ("schema", _) if !value.is_empty() && value.len() <= 63 && !value.contains('\0') => {
                self.schema = value.to_owned();
            }
            ("schema", _) => return refuse("a name of 1 to 63 bytes is"),
            ("pool_size", _) => match value.parse() {
                Ok(connections @ POOL_SIZE_MIN..=POOL_SIZE_MAX) => self.pool_size = connections,
                _ => return refuse("a number from 3 to 64 is"),
            },
            ("call_timeout_ms", _) => match value.parse().map(Duration::from_millis) {
                Ok(timeout) if (CALL_TIMEOUT_MIN..=CALL_TIME_MAX).contains(&timeout) => {
                    self.call_timeout = timeout;
                }
                _ => return refuse("whole milliseconds from 100 to 5000 are"),
            },
            ("connect_timeout", _) => match value.parse() {
                // As in libpq: zero is no limit of its own.
                Ok(0) => self.connect_timeout = CALL_TIME_MAX,
                Ok(seconds) => self.connect_timeout = Duration::from_secs(seconds),
                Err(_) => return refuse("whole seconds are"),
            },
            ("pgbouncer", "auto") => self.pgbouncer = PgBouncer::Auto,
            ("pgbouncer", "true") => self.pgbouncer = PgBouncer::Yes,
            ("pgbouncer", "false") => self.pgbouncer = PgBouncer::No,
            ("pgbouncer", _) => return refuse("auto, true and false are"),
            ("options", _)
            | ("channel_binding", "disable" | "prefer")
            | ("target_session_attrs", "any" | "primary" | "read-write") => {}
            ("channel_binding", _) => return refuse("disable and prefer are; the driver has none"),
            ("target_session_attrs", _) => return refuse("any, primary and read-write are"),
            ("sslmode", "disable" | "allow" | "prefer" | "require" | "verify-ca" | "verify-full") => {}
            ("sslmode", _) => {
                return refuse("disable, allow, prefer, require, verify-ca and verify-full are");
            }
            ("port", _) if value.parse::<u16>().is_err() => return refuse("a port number is"),
            ("hostaddr", _) if value.parse::<std::net::IpAddr>().is_err() => {
                return refuse("an IP address is");
            }
            (_, _) if DRIVERS.contains(&name) || matches!(name, "password" | "application_name") => {}
            _ => {
                return Err(OpenError::refused(format!(
                    "the Postgres URL has an unknown parameter `{}`; {ALLOWED} are allowed",
                    name.escape_debug()
                )));
            }
        }
        Ok(())
    }
}

fn refused_value(name: &str, allowed: &str) -> OpenError {
    OpenError::refused(format!(
        "the Postgres URL's parameter `{name}` has a value that is not allowed: {allowed}"
    ))
}

impl FromStr for PostgresOptions {
    type Err = OpenError;

    /// Reads a URL. A message never repeats the URL: it may have a password in it.
    fn from_str(url: &str) -> Result<Self, OpenError> {
        if !(url.starts_with("postgres://") || url.starts_with("postgresql://")) {
            return Err(OpenError::refused(
                "not the URL of a Postgres store; postgres://USER@HOST/DATABASE is",
            ));
        }
        let (place, query) = url.split_once('?').unwrap_or((url, ""));
        let mut options = Self {
            url: url.to_owned(),
            connect: PgConnectOptions::new_without_pgpass(),
            connect_with_settings: PgConnectOptions::new_without_pgpass(),
            connect_timeout: CALL_TIME_MAX,
            schema: SCHEMA_DEFAULT.to_owned(),
            pool_size: POOL_SIZE_DEFAULT,
            call_timeout: CALL_TIMEOUT_DEFAULT,
            pgbouncer: PgBouncer::default(),
            allow_volatile: false,
        };
        let mut pairs = vec![("application_name".to_owned(), "onlyonce".to_owned())];
        let mut settings = Vec::new();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            options.set(&name, &value)?;
            if DRIVERS.contains(&&*name) || matches!(&*name, "password" | "application_name") {
                pairs.push((name.into_owned(), value.into_owned()));
            } else if name == "options" {
                settings.push((name.into_owned(), value.into_owned()));
            }
        }
        let for_driver = |pairs: &[(String, String)]| {
            let parameters = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
            parse_for_driver(&format!("{place}?{parameters}"))
        };
        options.connect = for_driver(&pairs)?;
        pairs.extend(settings);
        options.connect_with_settings = for_driver(&pairs)?;
        Ok(options)
    }
}

fn parse_for_driver(url: &str) -> Result<PgConnectOptions, OpenError> {
    // PgBouncer refuses this setting, and no column here is a floating-point number.
    url.parse().map(|options: PgConnectOptions| options.extra_float_digits(None)).map_err(
        |error: sqlx::Error| {
            OpenError::refused(
                "the Postgres URL cannot be read; special characters in user, password and database must be \
             percent-encoded",
            )
            .with_source(match error {
                sqlx::Error::Configuration(reason) => reason.to_string(),
                _ => "malformed".to_owned(),
            })
        },
    )
}

impl fmt::Display for PostgresOptions {
    /// The URL without password and parameters.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let connect = &self.connect;
        write!(f, "postgres://{}@", connect.get_username())?;
        match connect.get_socket() {
            Some(socket) => write!(f, "{}", socket.display())?,
            None => write!(f, "{}:{}", connect.get_host(), connect.get_port())?,
        }
        write!(f, "/{}", connect.get_database().unwrap_or(connect.get_username()))
    }
}

impl fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl PartialEq for PostgresOptions {
    fn eq(&self, other: &Self) -> bool {
        let parts = |options: &Self| {
            let Self { schema, pool_size, call_timeout, pgbouncer, allow_volatile, .. } = options.clone();
            (options.url.clone(), schema, pool_size, call_timeout, pgbouncer, allow_volatile)
        };
        parts(self) == parts(other)
    }
}

impl Eq for PostgresOptions {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read_as_libpq_does() {
        for (url, shown) in [
            ("postgres://ann:secret@db:6543/shop", "postgres://ann@db:6543/shop"),
            ("postgresql://ann@db/shop?sslmode=require", "postgres://ann@db:5432/shop"),
            ("postgres://a%40b:p%2Fw%3F%23@db/sh%20op", "postgres://a@b@db:5432/sh op"),
            ("postgres:///shop?host=/var/run/postgresql&user=ann", "postgres://ann@/var/run/postgresql/shop"),
            ("postgres://db?dbname=shop&user=ann&port=1&password=p%26w", "postgres://ann@db:1/shop"),
            ("postgres://ann@[::1]:5/shop", "postgres://ann@[::1]:5/shop"),
        ] {
            assert_eq!(url.parse::<PostgresOptions>().expect(url).to_string(), shown, "{url}");
        }
    }

    #[test]
    fn parameters_are_read() {
        let url = "postgres://db/shop?schema=keys&pool_size=7&call_timeout_ms=900&pgbouncer=true\
                   &channel_binding=prefer&target_session_attrs=read-write&connect_timeout=3&application_name=pay";
        let options: PostgresOptions = url.parse().expect("valid");
        assert_eq!((options.schema.as_str(), options.pool_size), ("keys", 7));
        assert_eq!(options.call_timeout, Duration::from_millis(900));
        assert_eq!(options.connect_timeout, Duration::from_secs(3));
        assert_eq!(options.pgbouncer, PgBouncer::Yes);
        assert_eq!(options.connect.get_application_name(), Some("pay"));
        let defaults: PostgresOptions = "postgres://db/shop".parse().expect("valid");
        assert_eq!((defaults.schema.as_str(), defaults.pool_size), ("onlyonce", 5));
        assert_eq!(defaults.connect.get_application_name(), Some("onlyonce"));
    }

    #[test]
    fn a_refusal_names_the_parameter_and_what_is_allowed() {
        for (parameters, names) in [
            ("colour=blue", ["`colour`", "sslmode"]),
            ("sslmode=maybe", ["`sslmode`", "verify-full"]),
            ("pool_size=2", ["`pool_size`", "3 to 64"]),
            ("pool_size=many", ["`pool_size`", "3 to 64"]),
            ("call_timeout_ms=5001", ["`call_timeout_ms`", "100 to 5000"]),
            ("pgbouncer=maybe", ["`pgbouncer`", "auto, true and false"]),
            ("channel_binding=require", ["`channel_binding`", "disable and prefer"]),
            ("target_session_attrs=standby", ["`target_session_attrs`", "read-write"]),
            ("schema=", ["`schema`", "1 to 63"]),
            ("port=x", ["`port`", "port number"]),
            ("hostaddr=x", ["`hostaddr`", "IP address"]),
        ] {
            let error = format!("postgres://db/shop?{parameters}").parse::<PostgresOptions>();
            let error = error.expect_err(parameters).to_string();
            assert!(names.iter().all(|name| error.contains(name)), "{parameters}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_message_never_repeats_a_password() {
        for url in [
            "mysql://ann:hunter2@db/x",
            "postgres://ann:hunter2#x@db/shop",
            "postgres://ann:hunter2/x@db/shop",
            "postgres://ann:x@db:hunter2/shop",
            "postgres://db/shop?sslmode=hunter2",
            "postgres://db/shop?port=hunter2",
            "postgres://ann:%FFhunter2@db/shop",
        ] {
            let error = url.parse::<PostgresOptions>().expect_err(url).to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
        let options: PostgresOptions = "postgres://ann:hunter2@db/x?password=hunter2".parse().expect("valid");
        assert!(!format!("{options} {options:?}").contains("hunter2"));
    }
}

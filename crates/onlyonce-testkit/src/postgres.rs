//! A private Postgres server.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::system::{self, Keeper};

/// Names a server that is used instead of a private one, for [`Postgres::shared`].
const URL_VARIABLE: &str = "ONLYONCE_TEST_POSTGRES_URL";

/// `fsync` and the rest stay as they are by default: tests are about what a server keeps.
const SETTINGS: &str = "listen_addresses = '127.0.0.1'\nmax_connections = 300\n\
    log_min_messages = error\nlog_min_error_statement = panic\n";

/// Only the superuser comes in without a password.
const ACCESS: &str = "local all all trust\nhost all postgres 127.0.0.1/32 trust\n\
    host all all 127.0.0.1/32 scram-sha-256\n";

/// A Postgres server on a free port of 127.0.0.1. It ends when it is dropped, or with this process.
#[derive(Debug)]
pub struct Postgres {
    programs: PathBuf,
    /// Of a private server.
    private: Option<Private>,
    /// Without a database.
    url: String,
}

#[derive(Debug)]
struct Private {
    folder: PathBuf,
    port: u16,
    _keeper: Keeper,
}

impl Postgres {
    /// One server for all tests of this process: a private one, or the one that
    /// `ONLYONCE_TEST_POSTGRES_URL` names (as a superuser, without a database).
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Postgres> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var(URL_VARIABLE) {
            Ok(url) => {
                let url = url.trim_end_matches('/').to_owned();
                Self { programs: system::postgres_folder(), private: None, url }
            }
            Err(_) => Self::start(""),
        })
    }

    /// A server of its own, with these lines at the end of its configuration.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start(settings: &str) -> Self {
        Self::start_in(system::folder("onlyonce-postgres-"), settings)
    }

    /// A server of its own that offers TLS, and its certificate: self-signed, for `localhost` and for no
    /// address.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start_with_tls() -> (Self, PathBuf) {
        let folder = system::folder("onlyonce-postgres-");
        let (certificate, key) = (folder.join("server.crt"), folder.join("server.key"));
        let mut openssl = system::unprivileged(system::openssl());
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        openssl.args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]);
        openssl.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
        openssl.arg("-out").arg(&certificate).arg("-keyout").arg(&key).current_dir(&folder);
        system::run(openssl);
        let (shown, key) = (certificate.display(), key.display());
        let settings = format!("ssl = on\nssl_cert_file = '{shown}'\nssl_key_file = '{key}'\n");
        (Self::start_in(folder, &settings), certificate)
    }

    fn start_in(folder: PathBuf, settings: &str) -> Self {
        let programs = system::postgres_folder();
        let data = folder.join("data");
        let mut initdb = system::unprivileged(programs.join("initdb"));
        initdb.args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]);
        initdb.arg("--pgdata").arg(&data).current_dir(&folder);
        system::run(initdb);
        let port = system::free_port();
        let configuration = data.join("postgresql.conf");
        let defaults = std::fs::read_to_string(&configuration).expect("initdb wrote it");
        let own = format!("port = {port}\nunix_socket_directories = '{}'\n", folder.display());
        system::write(&configuration, &format!("{defaults}\n{SETTINGS}{own}{settings}\n"));
        system::write(&data.join("pg_hba.conf"), ACCESS);
        let stop = format!(
            "'{}' -D '{}' -m immediate stop; rm -rf '{}'",
            programs.join("pg_ctl").display(),
            data.display(),
            folder.display()
        );
        let private = Private { folder, port, _keeper: Keeper::new("", &stop) };
        let url = format!("postgres://postgres@127.0.0.1:{port}");
        let server = Self { programs, private: Some(private), url };
        server.control(&["start"]);
        server
    }

    /// The URL of a database, as superuser.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("{}/{database}", self.url)
    }

    /// The port on 127.0.0.1.
    ///
    /// # Panics
    /// If the server is not a private one.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.private().port
    }

    /// A new, empty database; its name.
    #[must_use]
    pub fn database(&self) -> String {
        let name = fresh_name();
        self.sql("postgres", &format!("CREATE DATABASE {name}"));
        name
    }

    /// Runs SQL as superuser, and returns what it printed: a line for each row, `|` between columns.
    ///
    /// # Panics
    /// If it fails.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql, &self.url(database)]);
        system::run(psql).trim_end().to_owned()
    }

    /// Stops the server as a crash does: nothing is written and nobody is told.
    pub fn crash(&self) {
        self.control(&["stop", "-m", "immediate"]);
    }

    /// Stops the server in order, and cuts connections.
    pub fn stop(&self) {
        self.control(&["stop", "-m", "fast"]);
    }

    /// Starts it again after [`crash`](Self::crash) or [`stop`](Self::stop).
    pub fn start_again(&self) {
        self.control(&["start"]);
    }

    fn control(&self, arguments: &[&str]) {
        let folder = &self.private().folder;
        let mut pg_ctl = system::unprivileged(self.programs.join("pg_ctl"));
        pg_ctl.arg("-D").arg(folder.join("data")).arg("-l").arg(folder.join("log"));
        pg_ctl.args(["-w", "-s", "-t", "60"]).args(arguments).current_dir(folder);
        // The server inherits what it is given, and a pipe that it holds open would never end.
        pg_ctl.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        let status = pg_ctl.status().unwrap_or_else(|error| panic!("{pg_ctl:?}: {error}"));
        let log = || std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        assert!(status.success(), "{pg_ctl:?}: {status}\n{}", log());
    }

    fn private(&self) -> &Private {
        self.private.as_ref().expect("a private server: it cannot be controlled through a URL")
    }
}

/// A name that no other test has.
fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    format!("test_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

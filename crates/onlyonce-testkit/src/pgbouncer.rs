//! A private PgBouncer in transaction mode.

use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::Postgres;
use crate::system::{self, Keeper};

/// PgBouncer in transaction mode in front of a server. It ends when it is dropped, or with this process.
///
/// It is as strict as it comes: startup parameters that it does not know are refused. Few connections to
/// the server, so that the transactions of one client go over different ones.
#[derive(Debug)]
pub struct PgBouncer {
    port: u16,
    folder: PathBuf,
    _keeper: Keeper,
}

impl PgBouncer {
    /// Starts one with these lines at the end of its configuration.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start(server: &Postgres, settings: &str) -> Self {
        Self::start_before(server.port(), settings)
    }

    /// Starts one in front of this port of 127.0.0.1, such as a [`Proxy`](crate::Proxy)'s.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start_before(server_port: u16, settings: &str) -> Self {
        let program = system::pgbouncer();
        let folder = system::folder("onlyonce-pgbouncer-");
        let port = system::free_port();
        let configuration = folder.join("pgbouncer.ini");
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={server_port} user=postgres\n\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
             default_pool_size = 4\nmax_client_conn = 1000\nlogfile = {}\nadmin_users = postgres\n{settings}\n",
            folder.join("log").display(),
        );
        system::write(&configuration, &text);
        let start = format!("'{}' -q '{}' & pid=$!", program.display(), configuration.display());
        let stop = format!("kill -INT $pid; wait $pid; rm -rf '{}'", folder.display());
        let bouncer = Self { port, _keeper: Keeper::new(&start, &stop), folder };
        bouncer.wait();
        bouncer
    }

    fn wait(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            let log = || std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "PgBouncer does not answer\n{}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The URL of a database through it.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }
}

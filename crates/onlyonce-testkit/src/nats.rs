//! A private NATS server with JetStream.

use std::sync::OnceLock;

use crate::program::Program;
use crate::system;

/// Names a server that is used instead of a private one, for [`Nats::shared`].
const URL_VARIABLE: &str = "ONLYONCE_TEST_NATS_URL";

/// A NATS server with JetStream on a free port of 127.0.0.1, for clients without credentials. It ends when
/// it is dropped, or with this process.
#[derive(Debug)]
pub struct Nats {
    url: String,
    /// Of a private server.
    private: Option<Program>,
}

impl Nats {
    /// One server for all tests of this process: a private one, or the one that `ONLYONCE_TEST_NATS_URL`
    /// names.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Nats> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var(URL_VARIABLE) {
            Ok(url) => Self { url, private: None },
            Err(_) => Self::start(),
        })
    }

    /// A server of its own.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// A server of its own that asks for this user and password; they are not in its [`url`](Self::url).
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start_for(user: &str, password: &str) -> Self {
        Self::start_with(&["--user", user, "--pass", password])
    }

    fn start_with(more: &[&str]) -> Self {
        let program = system::nats_server();
        let folder = system::folder("onlyonce-nats-");
        let [port] = system::free_ports();
        let arguments =
            ["--addr", "127.0.0.1", "--port", &port.to_string(), "--jetstream", "--store_dir", "data"];
        let arguments = arguments.iter().chain(more).map(|&argument| argument.to_owned()).collect();
        // It greets whoever connects.
        let server = Program::start(program, arguments, Vec::new(), &folder, port, b"", "");
        Self { url: format!("nats://127.0.0.1:{port}"), private: Some(server) }
    }

    /// The URL for clients.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The port on 127.0.0.1.
    ///
    /// # Panics
    /// If the server is not a private one.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.private().port()
    }

    /// Stops the server as `kill -9` does.
    pub fn crash(&self) {
        self.private().crash();
    }

    /// Stops the server in order: clients are told.
    pub fn stop(&self) {
        self.private().stop();
    }

    /// Starts it again after [`crash`](Self::crash) or [`stop`](Self::stop), with what it kept.
    pub fn start_again(&self) {
        self.private().start_again();
    }

    fn private(&self) -> &Program {
        self.private.as_ref().expect("a private server: it cannot be controlled through a URL")
    }
}

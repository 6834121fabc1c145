//! A private RabbitMQ server.

use std::sync::OnceLock;

use crate::program::Program;
use crate::system;

/// Names a server that is used instead of a private one, for [`RabbitMq::shared`].
const URL_VARIABLE: &str = "ONLYONCE_TEST_RABBITMQ_URL";

/// The opening of AMQP 0-9-1. The server answers it once it accepts clients.
const HELLO: &[u8] = b"AMQP\x00\x00\x09\x01";

/// Durability is as by default; a disk that is nearly full would block publishers.
const SETTINGS: &str = "disk_free_limit.absolute = 1MB\n";

/// A RabbitMQ server on a free port of 127.0.0.1, without plugins; the user `guest` has its default password.
/// It ends when it is dropped, or with this process.
#[derive(Debug)]
pub struct RabbitMq {
    url: String,
    /// Of a private server.
    private: Option<Program>,
}

impl RabbitMq {
    /// One server for all tests of this process: a private one, or the one that
    /// `ONLYONCE_TEST_RABBITMQ_URL` names.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<RabbitMq> = OnceLock::new();
        SHARED.get_or_init(|| match std::env::var(URL_VARIABLE) {
            Ok(url) => Self { url, private: None },
            Err(_) => Self::start(),
        })
    }

    /// A server of its own. An Erlang system starts with it, which takes seconds.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start() -> Self {
        let program = system::rabbitmq_server();
        let folder = system::folder("onlyonce-rabbitmq-");
        system::write(&folder.join("rabbitmq.conf"), SETTINGS);
        system::write(&folder.join("enabled_plugins"), "[].\n");
        let [port, node_port, names_port] = system::free_ports();
        let within = |name: &str| folder.join(name).display().to_string();
        let environment = vec![
            ("HOME", within("")),
            // A host name that resolves wherever this runs.
            ("RABBITMQ_NODENAME", format!("onlyonce-{port}@localhost")),
            ("RABBITMQ_NODE_IP_ADDRESS", "127.0.0.1".to_owned()),
            ("RABBITMQ_NODE_PORT", port.to_string()),
            ("RABBITMQ_DIST_PORT", node_port.to_string()),
            ("ERL_EPMD_PORT", names_port.to_string()),
            ("ERL_EPMD_ADDRESS", "127.0.0.1".to_owned()),
            ("RABBITMQ_MNESIA_BASE", within("data")),
            ("RABBITMQ_LOG_BASE", within("log")),
            ("RABBITMQ_CONFIG_FILE", within("rabbitmq.conf")),
            ("RABBITMQ_CONF_ENV_FILE", within("no-environment-file")),
            ("RABBITMQ_ENABLED_PLUGINS_FILE", within("enabled_plugins")),
            // Together: the script becomes the server instead of watching it, and nobody reads a shell's input.
            ("RABBITMQ_ALLOW_INPUT", "1".to_owned()),
            ("RABBITMQ_SERVER_START_ARGS", "-noinput".to_owned()),
        ];
        // Started here, so that it ends with the server; otherwise the server starts one that outlives it.
        let names = format!(
            "ERL_EPMD_ADDRESS=127.0.0.1 epmd -port {names_port} &\n\
             for try in 1 2 3 4 5 6 7 8 9; do epmd -port {names_port} -names && break; sleep 0.2; done"
        );
        let server = Program::start(program, Vec::new(), environment, &folder, port, HELLO, &names);
        Self { url: format!("amqp://guest:guest@127.0.0.1:{port}/%2f"), private: Some(server) }
    }

    /// The URL of its virtual host `/`, with user and password.
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

    /// Lets the server believe that its disk is full, or that it is not: while it is, nothing is taken from whoever
    /// publishes.
    ///
    /// # Panics
    /// If the server is not a private one, or cannot be told.
    pub fn disk_full(&self, full: bool) {
        let limit = if full { "1000000GB" } else { "1MB" };
        let program = system::rabbitmq_server().with_file_name("rabbitmqctl");
        self.private().control(&program, &["set_disk_free_limit", limit]);
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

//! A private nginx, as a plain reverse proxy.

use crate::program::Program;
use crate::system;

/// Any request: whatever is answered, it is nginx that answers.
const HELLO: &[u8] = b"GET / HTTP/1.0\r\n\r\n";

/// nginx on a free port of 127.0.0.1 that passes every request on to one server. It ends when it is dropped,
/// or with this process.
///
/// It has a worker for each core, keeps its connections to the server open, and writes no access log.
#[derive(Debug)]
pub struct Nginx {
    program: Program,
}

impl Nginx {
    /// Starts one in front of this port of 127.0.0.1.
    ///
    /// # Panics
    /// With the reason if it does not start.
    #[must_use]
    pub fn start_before(server_port: u16) -> Self {
        let nginx = system::nginx();
        let folder = system::folder("onlyonce-nginx-");
        let port = system::free_port();
        let shown = folder.display();
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {shown}/{kind};\n"))
            .concat();
        let text = format!(
            "daemon off;\nworker_processes auto;\npid {shown}/nginx.pid;\nerror_log stderr;\n\
             events {{ worker_connections 8192; }}\n\
             http {{\n{temporary}access_log off;\nkeepalive_requests 1000000000;\n\
             upstream server {{ server 127.0.0.1:{server_port}; keepalive 2048; keepalive_requests 1000000000; }}\n\
             server {{\nlisten 127.0.0.1:{port} backlog=4096;\n\
             location / {{ proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection \"\"; }}\n\
             }}\n}}\n"
        );
        let configuration = folder.join("nginx.conf");
        system::write(&configuration, &text);
        let arguments =
            ["-c", &configuration.display().to_string(), "-p", &shown.to_string(), "-e", "stderr"];
        let arguments = arguments.map(str::to_owned).to_vec();
        Self { program: Program::start(nginx, arguments, Vec::new(), &folder, port, HELLO, "") }
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.program.port()
    }

    /// The process whose children are the workers.
    ///
    /// # Panics
    /// If it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.program.pid()
    }
}

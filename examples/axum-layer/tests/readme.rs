//! The README is true: every command in it is sent to the program, and answered as it says.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use onlyonce_testkit::Postgres;

/// Far longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The program as a process, in a folder of its own.
struct Program {
    process: Child,
    addr: SocketAddr,
}

impl Program {
    fn start(folder: &Path, database_url: Option<&str>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_axum-layer"));
        command.current_dir(folder).env("LISTEN", "127.0.0.1:0").env_remove("DATABASE_URL");
        if let Some(url) = database_url {
            command.env("DATABASE_URL", url);
        }
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addr = line.trim().strip_prefix("listening on http://").unwrap().parse().unwrap();
        Self { process, addr }
    }

    fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn answer(&self, request: &str) -> String {
        let mut answer = String::new();
        self.send(request).read_to_string(&mut answer).unwrap();
        answer
    }

    /// Presses Ctrl-C.
    fn interrupt(&self) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    }

    fn exited(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some_and(|status| {
            assert!(status.success(), "{status}");
            true
        })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A command of the README, and the lines that its answer has, in order.
struct Step {
    request: String,
    expected: Vec<String>,
}

fn steps(readme: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for block in readme.split("```console\n").skip(1) {
        for line in block.split("```").next().unwrap().lines() {
            match line.strip_prefix("$ curl -i ") {
                Some(arguments) => steps.push(Step { request: request(arguments), expected: Vec::new() }),
                None => steps.last_mut().unwrap().expected.push(line.to_owned()),
            }
        }
    }
    steps
}

/// What curl sends for a URL, `-H` and `-d`, in single quotes or none.
fn request(arguments: &str) -> String {
    let mut words = words(arguments).into_iter();
    let url = words.next().unwrap();
    let path = url.strip_prefix("http://127.0.0.1:3000").unwrap();
    let (mut headers, mut body) = (String::new(), None);
    while let Some(option) = words.next() {
        let value = words.next().unwrap();
        match option.as_str() {
            "-H" => headers.push_str(&format!("{value}\r\n")),
            "-d" => body = Some(value),
            _ => panic!("{option} is not understood"),
        }
    }
    let method = if body.is_some() { "POST" } else { "GET" };
    let body = body.unwrap_or_default();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (i, part) in text.split('\'').enumerate() {
        if i % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

fn does_what_the_readme_says(program: &Program) {
    let steps = steps(include_str!("../README.md"));
    assert!(steps.len() >= 8, "only {} commands were found", steps.len());
    for Step { request, expected } in steps {
        let answer = program.answer(&request);
        let mut rest = answer.as_str();
        for line in &expected {
            let at = rest.find(line).unwrap_or_else(|| panic!("{request}\n\nno {line:?} in\n{answer}"));
            rest = &rest[at..];
        }
        let replayed = expected.iter().any(|line| line == "idempotent-replayed: true");
        assert_eq!(answer.contains("idempotent-replayed"), replayed, "{request}\n\n{answer}");
    }
}

#[test]
fn on_a_file() {
    let folder = tempfile::tempdir().unwrap();
    does_what_the_readme_says(&Program::start(folder.path(), None));
}

#[test]
fn on_postgres() {
    let (folder, server) = (tempfile::tempdir().unwrap(), Postgres::shared());
    let url = server.url(&server.database());
    does_what_the_readme_says(&Program::start(folder.path(), Some(&url)));
    assert!(!folder.path().join("keys.db").exists());
}

#[test]
fn work_outlives_its_connection_and_holds_up_the_end_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = Program::start(folder.path(), None);
    let payment = request(
        "http://127.0.0.1:3000/payments -H 'Authorization: Bearer ann' -H 'Idempotency-Key: k' \
         -H 'Content-Type: application/json' -d '{\"amount\": 7}'",
    );
    let first = program.send(&payment);
    sleep(Duration::from_millis(200));
    first.shutdown(Shutdown::Both).unwrap();
    drop(first);
    let busy = program.answer(&payment);
    // On a machine that took longer than the payment, it is done.
    let done = busy.contains("idempotent-replayed: true");
    assert!(
        done || busy.contains("onlyonce-refused: request-in-progress") && busy.contains("retry-after: 1"),
        "{busy}"
    );
    program.interrupt();
    let stopping = Instant::now();
    while !program.exited() {
        assert!(stopping.elapsed() < PATIENCE, "it does not stop");
        sleep(Duration::from_millis(20));
    }
    let refused = TcpStream::connect(program.addr).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);

    let restarted = Program::start(folder.path(), None);
    let retry = restarted.answer(&payment);
    assert!(retry.starts_with("HTTP/1.1 201 ") && retry.contains("idempotent-replayed: true"), "{retry}");
    assert!(retry.ends_with("}") && retry.contains("\"amount\":7"), "{retry}");
}

//! An example as its reader runs it: the program as a process, and the commands of its README.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

/// How long an answer may take; far longer than any does.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(60);

/// A program that serves HTTP and says where in its first line: `listening on http://127.0.0.1:3000`. It is
/// killed when it is dropped.
#[derive(Debug)]
pub struct Example {
    process: Child,
    addr: SocketAddr,
    /// Kept open: the program would fail to write its next line.
    _output: BufReader<ChildStdout>,
}

impl Example {
    /// Starts it, and waits until it listens.
    ///
    /// # Panics
    /// If it does not.
    pub fn start(command: &mut Command) -> Self {
        let started = command.stdout(Stdio::piped()).spawn();
        let mut process = started.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        let addr = line.trim().strip_prefix("listening on http://").and_then(|addr| addr.parse().ok());
        let addr = addr.unwrap_or_else(|| panic!("{command:?} does not say where it listens but {line:?}"));
        Self { process, addr, _output: output }
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sends a request, and does not wait for its answer.
    ///
    /// # Panics
    /// If it cannot be reached.
    #[must_use]
    pub fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).expect("it listens");
        stream.set_read_timeout(Some(ANSWER_TIME_MAX)).expect("not zero");
        stream.write_all(request.as_bytes()).expect("it reads");
        stream
    }

    /// The whole answer to a request, head and body.
    ///
    /// # Panics
    /// If it does not come.
    #[must_use]
    pub fn ask(&self, request: &str) -> String {
        let mut answer = String::new();
        self.send(request).read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Kills it as `kill -9` does.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A `curl -i` of a README, and the lines that its answer has, in order.
#[derive(Clone, Debug)]
pub struct Curl {
    /// Where it is sent to, on 127.0.0.1.
    pub port: u16,
    /// What is sent: the whole request.
    pub request: String,
    /// Lines of the answer; the last may be the beginning of one.
    pub expected: Vec<String>,
}

impl Curl {
    /// All that stand in `console` blocks.
    ///
    /// # Panics
    /// If one is not understood.
    #[must_use]
    pub fn all(readme: &str) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for block in readme.split("```console\n").skip(1) {
            for line in block.split("```").next().into_iter().flat_map(str::lines) {
                match line.strip_prefix("$ curl -i ") {
                    Some(arguments) => all.push(Self::parse(arguments)),
                    None => all.last_mut().expect("a command first").expected.push(line.to_owned()),
                }
            }
        }
        all
    }

    /// What curl does with a URL, `-X`, `-H` and `-d`, in single quotes or none.
    ///
    /// # Panics
    /// If it is anything else.
    #[must_use]
    pub fn parse(arguments: &str) -> Self {
        let mut words = words(arguments).into_iter();
        let url = words.next().expect("a URL");
        let (place, path) = url.strip_prefix("http://127.0.0.1:").expect(&url).split_at(4);
        let (mut method, mut headers, mut body) = (None, String::new(), None);
        while let Some(option) = words.next() {
            let value = words.next().expect("an option has a value");
            match option.as_str() {
                "-X" => method = Some(value),
                "-H" => headers.push_str(&format!("{value}\r\n")),
                "-d" => body = Some(value),
                _ => panic!("{option} is not understood"),
            }
        }
        let method = method.unwrap_or_else(|| if body.is_some() { "POST" } else { "GET" }.to_owned());
        let body = body.unwrap_or_default();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\
             content-length: {length}\r\n\r\n{body}"
        );
        Self { port: place.parse().expect(&url), request, expected: Vec::new() }
    }

    /// Sends it to the program, and compares the answer.
    ///
    /// # Panics
    /// If a line is missing, or the answer is replayed and should not be, or the other way round.
    pub fn check(&self, program: &Example) {
        let Self { request, expected, .. } = self;
        let answer = program.ask(request);
        let mut rest = answer.as_str();
        for line in expected {
            let at = rest.find(line.as_str());
            rest = &rest[at.unwrap_or_else(|| panic!("{request}\n\nno {line:?} in\n{answer}"))..];
        }
        let replayed = expected.iter().any(|line| line == "idempotent-replayed: true");
        assert_eq!(answer.contains("idempotent-replayed"), replayed, "{request}\n\n{answer}");
    }
}

fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (at, part) in text.split('\'').enumerate() {
        if at % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

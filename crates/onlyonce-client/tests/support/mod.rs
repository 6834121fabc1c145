//! A server that follows a script, and keeps every byte that it was sent.
#![allow(dead_code, unreachable_pub, reason = "no test file uses all of it, and none is a library")]

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use onlyonce_client::Settings;

/// What the server does with one request. *Works* means: once for each key that it has not seen.
#[derive(Clone, Debug)]
pub enum Step {
    /// Sends these bytes.
    Say(String),
    /// Works, then sends these bytes.
    Work(String),
    /// Closes the connection.
    Drop,
    /// Works, then closes the connection.
    WorkAndDrop,
    /// Works, then says nothing for so long.
    WorkAndStall(Duration),
    /// Works, sends these bytes, then closes the connection in the middle of the answer.
    WorkAndCut(String),
    /// Works, then sends these bytes after so long.
    WorkLate(Duration, String),
    /// Sends these bytes after so long.
    SayLate(Duration, String),
    /// Sends these bytes and closes the connection a little later, when it is idle.
    SayAndClose(String),
}

/// One request as it stood on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The connection, counted from 0.
    pub connection: usize,
    pub line: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn lines(&self, name: &str) -> Vec<&str> {
        self.headers.iter().filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| &**value).collect()
    }

    /// The value of the one `Idempotency-Key` line.
    #[track_caller]
    pub fn key(&self) -> String {
        let lines = self.lines("idempotency-key");
        assert_eq!(lines.len(), 1, "not one key: {self:?}");
        lines[0].to_owned()
    }
}

#[derive(Default)]
struct State {
    script: VecDeque<Step>,
    rest: Option<Step>,
    requests: Vec<Request>,
    effects: Vec<String>,
    connections: usize,
}

pub struct Server {
    pub addr: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Server {
    /// Follows the script, then answers every further request with its last step.
    pub fn start(script: impl IntoIterator<Item = Step>) -> Self {
        let script: VecDeque<_> = script.into_iter().collect();
        let state = State { rest: script.back().cloned(), script, ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let state = Arc::clone(&shared);
                thread::spawn(move || serve(&stream, &state));
            }
        });
        Self { addr, state }
    }

    pub fn url(&self) -> String {
        format!("http://{}/payments", self.addr)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state.lock().unwrap().requests.clone()
    }

    /// The keys that work was done for; one entry for each time.
    pub fn effects(&self) -> Vec<String> {
        self.state.lock().unwrap().effects.clone()
    }

    /// One effect, and one key with one body in every attempt.
    #[track_caller]
    pub fn assert_one_operation(&self) -> String {
        let requests = self.requests();
        let first = requests.first().expect("something was sent");
        for request in &requests {
            assert_eq!(
                (&request.line, &request.headers, &request.body),
                (&first.line, &first.headers, &first.body)
            );
        }
        assert_eq!(self.effects(), [first.key()]);
        first.key()
    }
}

fn serve(stream: &TcpStream, state: &Mutex<State>) {
    let connection = {
        let mut state = state.lock().unwrap();
        state.connections += 1;
        state.connections - 1
    };
    let mut reader = BufReader::new(stream);
    while let Some(request) = read(&mut reader, connection) {
        let step = {
            let mut state = state.lock().unwrap();
            state.requests.push(request.clone());
            let step = state.script.pop_front().or_else(|| state.rest.clone()).expect("a script has a step");
            let works = !matches!(step, Step::Say(_) | Step::Drop | Step::SayLate(..) | Step::SayAndClose(_));
            let key = request.lines("idempotency-key").join("|");
            // Without a key every request is new.
            if works && (key.is_empty() || !state.effects.contains(&key)) {
                state.effects.push(key);
            }
            step
        };
        let mut writer = stream;
        let said = match step {
            Step::Say(bytes) | Step::Work(bytes) => writer.write_all(bytes.as_bytes()),
            Step::SayLate(time, bytes) | Step::WorkLate(time, bytes) => {
                thread::sleep(time);
                writer.write_all(bytes.as_bytes())
            }
            Step::WorkAndCut(bytes) => {
                let _ = writer.write_all(bytes.as_bytes());
                break;
            }
            Step::SayAndClose(bytes) => {
                let _ = writer.write_all(bytes.as_bytes());
                thread::sleep(Duration::from_millis(50));
                break;
            }
            Step::WorkAndStall(time) => {
                thread::sleep(time);
                break;
            }
            Step::Drop | Step::WorkAndDrop => break,
        };
        if said.is_err() {
            break;
        }
    }
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

fn read(reader: &mut BufReader<&TcpStream>, connection: usize) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|bytes| *bytes > 0)?;
    let mut headers = Vec::new();
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok().filter(|bytes| *bytes > 0)?;
        let Some((name, value)) = header.trim_end().split_once(':') else { break };
        headers.push((name.to_owned(), value.trim().to_owned()));
    }
    let request = Request { connection, line: line.trim_end().to_owned(), headers, body: Vec::new() };
    assert!(request.lines("transfer-encoding").is_empty(), "a frozen body has a length: {request:?}");
    let length = request.lines("content-length").first().map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { body, ..request })
}

/// A whole answer with these header lines, each with its line end, and this body.
pub fn answer(status: &str, headers: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())
}

pub fn created() -> String {
    answer("201 Created", "location: /payments/7\r\n", "paid")
}

pub fn replayed() -> String {
    answer("201 Created", "location: /payments/7\r\nidempotent-replayed: true\r\n", "paid")
}

/// Our server's refusal.
pub fn refusal(status: &str, code: &str, more: &str) -> String {
    let body =
        format!(r#"{{"type": "urn:onlyonce:problem:{code}", "code": "{code}", "detail": "Why."{more}}}"#);
    answer(status, &format!("content-type: application/problem+json\r\nonlyonce-refused: {code}\r\n"), &body)
}

/// Every way in which an answer that settles nothing can come, and not come.
pub fn faults() -> Vec<Step> {
    let in_use = r#"{"error": {"code": "idempotency_key_in_use", "type": "idempotency_error"}}"#;
    let json = "content-type: application/json\r\n";
    vec![
        Step::Drop,
        Step::WorkAndDrop,
        Step::WorkAndStall(Duration::from_secs(3)),
        Step::WorkAndCut("HTTP/1.1 201 Created\r\ncontent-le".into()),
        Step::WorkAndCut("HTTP/1.1 201 Created\r\ncontent-length: 400\r\n\r\npaid".into()),
        Step::WorkAndCut("HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n4\r\npaid\r\n".into()),
        Step::WorkAndCut("SSH-2.0-nobody\r\n\r\n".into()),
        Step::WorkAndCut("HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n".into()),
        Step::Work(refusal("409 Conflict", "request-in-progress", "")),
        Step::Work(answer("409 Conflict", json, in_use)),
        Step::Work(answer("409 Conflict", "stripe-should-retry: true\r\n", "")),
        Step::Say(answer("408 Request Timeout", "", "")),
        Step::Say(answer("425 Too Early", "", "")),
        Step::Say(answer("429 Too Many Requests", "retry-after: 0\r\n", "")),
        Step::Work(answer("500 Internal Server Error", "", "oh")),
        Step::Work(answer("502 Bad Gateway", "", "")),
        Step::Say(answer("503 Service Unavailable", "retry-after: Wed, 21 Oct 2015 07:28:00 GMT\r\n", "")),
        Step::Work(refusal("504 Gateway Timeout", "upstream-timeout", "")),
        Step::Say(refusal("400 Bad Request", "request-incomplete", "")),
    ]
}

/// Settings that make a test short.
pub fn quick() -> Settings {
    let mut settings = Settings::default();
    settings.backoff_first = Duration::from_millis(4);
    settings.backoff_max = Duration::from_millis(20);
    settings.attempt_timeout = Duration::from_secs(2);
    settings
}

/// Settings with time for one attempt that no deadline cuts off, and for no other.
pub fn once() -> Settings {
    let mut settings = quick();
    settings.deadline = Duration::from_secs(10);
    settings.attempt_timeout = Duration::from_secs(9);
    settings.backoff_first = Duration::from_secs(30);
    settings.backoff_max = Duration::from_secs(30);
    settings
}

//! `onlyonce send` as a process: killed, run again, and resumed.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use serde_json::Value;
use support::load::{random, rounds};
use support::{Proxy, Upstream, millis, onlyonce, run, text, until};
use tempfile::TempDir;

/// A journal, and where it is sent to.
struct Desk {
    folder: TempDir,
    url: String,
}

impl Desk {
    fn new(addr: SocketAddr) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), url: format!("http://{addr}/payments") }
    }

    fn journal(&self) -> PathBuf {
        self.folder.path().join("journal.db")
    }

    /// `onlyonce send` with this journal.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = onlyonce();
        command.arg("send").arg("--journal").arg(self.journal()).args(args);
        command
    }

    /// The command for an intent; `orders` are for the upstream.
    fn order(&self, intent: &str, orders: &str) -> Command {
        let orders = format!("x-do: {orders}");
        self.command(&["POST", &self.url, "--data", "amount=10", "--intent", intent, "-H", &orders])
    }

    fn list(&self) -> Vec<Value> {
        match json(&run(self.command(&["--list", "--json"]))) {
            Value::Array(entries) => entries,
            other => panic!("not a list: {other}"),
        }
    }
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[track_caller]
fn assert_code(output: &Output, code: i32) {
    assert_eq!(output.status.code(), Some(code), "{}{}", text(&output.stdout), text(&output.stderr));
}

/// Kills it without a word, as a crash would.
fn kill(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn start(mut command: Command) -> Child {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A server that says the same to every request, or nothing.
fn server(says: Option<&'static str>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut silent = Vec::new();
        for mut stream in listener.incoming().flatten() {
            let mut head = [0; 4096];
            let _ = stream.read(&mut head);
            match says {
                Some(says) => drop(stream.write_all(says.as_bytes())),
                None => silent.push(stream),
            }
        }
    });
    addr
}

#[test]
fn the_same_intent_again_is_given_the_recorded_answer_without_a_second_request() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let desk = Desk::new(proxy.addr);
    let first = run(desk.order("order-4711", ""));
    assert_code(&first, 0);
    assert!(text(&first.stderr).contains("201 Created"), "{}", text(&first.stderr));
    assert!(!first.stdout.is_empty());
    let received = upstream.received();
    for _ in 0..2 {
        let again = run(desk.order("order-4711", ""));
        assert_code(&again, 0);
        assert_eq!(again.stdout, first.stdout);
        assert!(text(&again.stderr).contains("from the journal"), "{}", text(&again.stderr));
    }
    assert_eq!((upstream.effects(), upstream.received()), (1, received));
    // Another intent is another operation, however equal the request.
    assert_code(&run(desk.order("order-4712", "")), 0);
    assert_eq!(upstream.effects(), 2);
}

#[test]
fn killed_between_sending_and_the_answer_it_is_resumed_to_one_effect_and_the_recorded_answer() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let desk = Desk::new(proxy.addr);
    let child = start(desk.order("order-4711", "after=1500"));
    until("the work is done and not answered", || upstream.effects() == 1);
    kill(child);
    let entries = desk.list();
    assert_eq!((entries.len(), &entries[0]["state"]), (1, &Value::from("unfinished")));
    let key = entries[0]["key"].as_str().unwrap().to_owned();

    let resumed = run(desk.command(&["--resume", "--json"]));
    assert_code(&resumed, 0);
    let resumed = json(&resumed);
    assert_eq!(resumed.as_array().unwrap().len(), 1);
    assert_eq!((&resumed[0]["status"], &resumed[0]["key"]), (&Value::from(201), &Value::from(&*key)));
    assert_eq!((upstream.effects(), upstream.effects_for(&key)), (1, 1));

    // The script that runs again has the answer of its first run.
    let received = upstream.received();
    let again = run(desk.order("order-4711", "after=1500"));
    assert_code(&again, 0);
    assert_eq!(text(&again.stdout), resumed[0]["body"].as_str().unwrap());
    assert_eq!(upstream.received(), received);
    assert_eq!(desk.list()[0]["state"], "answered");
    assert!(text(&run(desk.command(&["--resume"])).stderr).contains("nothing is unfinished"));
}

#[test]
fn killed_at_random_every_intent_is_one_effect_and_one_answer() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let desk = Desk::new(proxy.addr);
    let mut keys = Vec::new();
    for round in 0..rounds(12) {
        let intent = format!("order-{round}");
        let order = || desk.order(&intent, "before=40 after=40");
        for _ in 0..3 {
            let child = start(order());
            thread::sleep(millis(random(200)));
            kill(child);
        }
        // Half of them are resumed, the others are run again.
        if round % 2 == 0 {
            assert_code(&run(desk.command(&["--resume"])), 0);
        }
        let (first, again) = (run(order()), run(order()));
        assert_code(&first, 0);
        assert_eq!(first.stdout, again.stdout);
        keys.extend(desk.list().last().map(|entry| entry["key"].as_str().unwrap().to_owned()));
    }
    let effects = upstream.effects_by_key();
    assert_eq!(effects.len(), keys.len());
    for key in keys {
        assert_eq!(effects.get(&key), Some(&1), "{key}");
    }
}

#[test]
fn several_runs_of_one_intent_at_once_are_one_effect_and_one_answer() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let desk = Desk::new(proxy.addr);
    let runs: Vec<_> = (0..4)
        .map(|_| {
            let order = desk.order("order-4711", "before=300");
            thread::spawn(move || run(order))
        })
        .collect();
    let outputs: Vec<_> = runs.into_iter().map(|run| run.join().unwrap()).collect();
    for output in &outputs {
        assert_code(output, 0);
        assert_eq!(output.stdout, outputs[0].stdout);
    }
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn the_exit_code_says_whether_the_work_may_have_been_done() {
    let nobody = support::free_addr();
    let refused = "HTTP/1.1 422 No\r\nonlyonce-refused: idempotency-key-reused\r\ncontent-length: 0\r\n\r\n";
    let unknown = "HTTP/1.1 409 No\r\nonlyonce-refused: outcome-unknown\r\ncontent-length: 0\r\n\r\n";
    let busy = "HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy";
    for (addr, code, said) in [
        (server(Some("HTTP/1.1 402 Payment Required\r\ncontent-length: 8\r\n\r\ndeclined")), 1, "402"),
        (nobody, 1, "the work was not done"),
        (server(Some(refused)), 1, "idempotency-key-reused"),
        (server(Some(unknown)), 3, "outcome-unknown"),
        (server(Some(busy)), 3, "the work may have been done"),
        (server(None), 3, "the work may have been done"),
    ] {
        let url = format!("http://{addr}/");
        let output = run(Desk::new(addr).command(&["POST", &url, "--deadline", "700ms"]));
        assert_code(&output, code);
        assert!(text(&output.stderr).contains(said), "{said}: {}", text(&output.stderr));
    }
    let desk = Desk::new(server(Some("HTTP/1.1 402 No\r\ncontent-length: 8\r\n\r\ndeclined")));
    let declined = run(desk.order("order-4711", ""));
    assert_code(&declined, 1);
    assert_eq!(text(&declined.stdout), "declined");
    assert_code(&run(desk.order("order-4711", "")), 1);
}

#[test]
fn wrong_usage_sends_nothing_and_says_why() {
    let upstream = Upstream::start();
    let desk = Desk::new(upstream.addr);
    assert_code(&run(desk.order("order-4711", "")), 0);
    let received = upstream.received();
    let url = &*desk.url;
    let cases: [(&[&str], &str); 9] = [
        (&[], "METHOD"),
        (&["POST"], "URL"),
        (&["POST", "not a url"], "URL"),
        (&["POST", url, "--data", "@/absent"], "/absent"),
        (&["POST", url, "--resume"], "cannot be used"),
        (&["--list", "--purge"], "cannot be used"),
        (&["POST", url, "--retention", "10s"], "retention"),
        (&["POST", url, "--data", "amount=99", "--intent", "order-4711"], "another body"),
        (&["POST", url, "--key", ""], "empty"),
    ];
    for (args, why) in cases {
        let output = run(desk.command(args));
        assert_code(&output, 2);
        assert!(text(&output.stderr).contains(why), "{args:?}: {}", text(&output.stderr));
    }
    let mut no_journal = onlyonce();
    no_journal.args(["send", "POST", url, "--intent", "i", "--journal", "/absent/journal.db"]);
    assert_code(&run(no_journal), 2);
    assert_eq!(upstream.received(), received);
}

#[test]
fn an_intent_older_than_the_servers_memory_is_for_a_person() {
    let desk = Desk::new(server(None));
    let short = ["--deadline", "400ms", "--retention", "1s"];
    let unfinished = || {
        let mut command = desk.order("order-4711", "");
        command.args(short);
        command
    };
    assert_code(&run(unfinished()), 3);
    thread::sleep(Duration::from_millis(1_100));
    let mut resume = desk.command(&["--resume"]);
    resume.args(short);
    for command in [unfinished(), resume] {
        let output = run(command);
        assert_code(&output, 3);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(said.contains("unknown"), "{said}");
    }
    assert_eq!(json(&run(desk.command(&["--list", "--json", "--retention", "1s"])))[0]["state"], "unknown");
    assert_code(&run(desk.command(&["--forget", "order-4711"])), 0);
    assert_code(&run(desk.command(&["--forget", "order-4711"])), 1);
    assert!(desk.list().is_empty());
}

#[test]
fn a_callers_key_is_sent_and_without_an_intent_nothing_is_written() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let desk = Desk::new(proxy.addr);
    for _ in 0..2 {
        let output = run(desk.command(&["POST", &desk.url, "--data", "a", "--key", "order-4711", "--json"]));
        assert_code(&output, 0);
        assert_eq!(json(&output)["key"], "order-4711");
    }
    assert_eq!(upstream.effects_for("order-4711"), 1);
    for _ in 0..2 {
        assert_code(&run(desk.command(&["POST", &desk.url, "--data", "a"])), 0);
    }
    assert_eq!(upstream.effects(), 3, "two runs without an intent are two operations");
    assert!(!desk.journal().exists());
    let answer =
        json(&run(desk.command(&["POST", &desk.url, "--data", "a", "--key", "order-4711", "--json"])));
    assert_eq!(
        (&answer["status"], &answer["replayed"], &answer["recorded"]),
        (&201.into(), &true.into(), &false.into())
    );
}

#[test]
fn the_body_comes_from_a_file_or_from_standard_input() {
    let upstream = Upstream::start();
    let desk = Desk::new(upstream.addr);
    let file = desk.folder.path().join("body");
    std::fs::write(&file, b"from \xff a file").unwrap();
    let at_file = format!("@{}", file.display());
    let from_file = json(&run(desk.command(&["POST", &desk.url, "--data", &at_file, "--json"])));
    let mut child = desk
        .command(&["POST", &desk.url, "--data", "@-", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"from \xff a file").unwrap();
    let from_stdin = json(&child.wait_with_output().unwrap());
    // Upstream says what it received.
    let received = |answer: &Value| {
        let body: Value = serde_json::from_str(answer["body"].as_str().unwrap()).unwrap();
        body
    };
    let (from_file, from_stdin) = (received(&from_file), received(&from_stdin));
    assert_eq!(from_file["body"], from_stdin["body"]);
    assert!(!from_file["body"].is_null(), "{from_file}");
}

/// `openssl s_server` with a certificate for localhost that nobody has signed.
struct TlsServer {
    child: Child,
    folder: TempDir,
    url: String,
}

impl TlsServer {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut openssl = Command::new("openssl");
        openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
        openssl.args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]);
        openssl.args([
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ]);
        assert_code(&run(in_folder(openssl, &folder)), 0);
        let addr = support::free_addr();
        let mut server = Command::new("openssl");
        server.args(["s_server", "-www", "-quiet", "-key", "key.pem", "-cert", "cert.pem", "-accept"]);
        server.arg(addr.to_string());
        let child = start(in_folder(server, &folder));
        until("the TLS server listens", || std::net::TcpStream::connect(addr).is_ok());
        Self { child, folder, url: format!("https://localhost:{}/", addr.port()) }
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn in_folder(mut command: Command, folder: &TempDir) -> Command {
    command.current_dir(folder.path());
    command
}

#[test]
fn a_server_is_trusted_as_the_system_says_and_another_is_not_tried_again() {
    let server = TlsServer::start();
    let mut trusting = onlyonce();
    trusting.env("SSL_CERT_FILE", server.folder.path().join("cert.pem")).args(["send", "GET", &server.url]);
    assert_code(&run(trusting), 0);
    let mut wary = onlyonce();
    wary.env_remove("SSL_CERT_FILE").args(["send", "POST", &server.url, "--deadline", "1h"]);
    let output = run(wary);
    assert_code(&output, 1);
    let said = text(&output.stderr);
    assert!(said.contains("after 1 attempt,") && said.contains("invalid peer certificate"), "{said}");
}

/// Nobody reads what it says, or there is no room for it: the exit code says what happened all the same.
#[test]
fn the_exit_code_does_not_depend_on_who_reads_the_output() {
    let declined = server(Some("HTTP/1.1 402 Payment Required\r\ncontent-length: 8\r\n\r\ndeclined"));
    let paid = server(Some("HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\npaid"));
    let busy = server(Some("HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"));
    for json in [&[][..], &["--json"]] {
        for (addr, code) in [(declined, 1), (paid, 0), (busy, 3)] {
            let desk = Desk::new(addr);
            let send = |stdout: Stdio, stderr: Stdio| {
                let mut command = desk.order("order-4711", "");
                command.args(["--deadline", "300ms"]).args(json).stdin(Stdio::null());
                command.stdout(stdout).stderr(stderr).status().unwrap().code()
            };
            assert_eq!(send(unread(), unread()), Some(code), "{json:?}");
            let full = || Stdio::from(std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
            assert_eq!(
                send(full(), Stdio::null()),
                Some(3),
                "what was paid and cannot be told is not failed"
            );
            let mut resume = desk.command(&["--resume", "--deadline", "300ms"]);
            resume.args(json).stdin(Stdio::null()).stdout(unread()).stderr(unread());
            assert_eq!(resume.status().unwrap().code(), Some(if code == 3 { 3 } else { 0 }), "{json:?}");
        }
    }
}

/// The end of a pipe whose other end is closed.
fn unread() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn what_was_sent_before_is_never_said_to_have_failed() {
    // It was sent, and then its host is gone.
    let desk = Desk::new(server(None));
    let child = start(desk.order("order-4711", ""));
    until("it is written down", || desk.journal().exists() && !desk.list().is_empty());
    thread::sleep(millis(300));
    kill(child);
    sql(&desk.journal(), "UPDATE intents SET url = 'http://127.0.0.1:9/payments'");
    let output = run(desk.command(&["--resume", "--deadline", "300ms"]));
    assert_code(&output, 3);
    assert!(text(&output.stdout).contains("may have been done"), "{}", text(&output.stdout));

    // It was sent, and then what was written down about it is damaged.
    let damaged = format!("UPDATE intents SET request_head = x'00', url = '{}'", desk.url);
    sql(&desk.journal(), damaged.leak());
    for command in [desk.order("order-4711", ""), desk.command(&["--resume"])] {
        let output = run(command);
        assert_code(&output, 3);
        assert!((text(&output.stdout) + &text(&output.stderr)).contains("damaged"));
    }

    // A result that was moved to a server that nobody trusts is still one of work that was done.
    let untrusted = TlsServer::start();
    let see = format!("HTTP/1.1 303 See Other\r\nlocation: {}\r\ncontent-length: 0\r\n\r\n", untrusted.url);
    let desk = Desk::new(server(Some(see.leak())));
    let mut wary = desk.order("order-4711", "");
    wary.env_remove("SSL_CERT_FILE");
    let output = run(wary);
    assert_code(&output, 3);
    assert!(text(&output.stderr).contains("the work may have been done"), "{}", text(&output.stderr));
    assert_eq!(desk.list()[0]["state"], "unfinished");
}

#[test]
fn a_servers_words_are_one_line_that_a_terminal_only_shows() {
    let says = r#"{"type": "urn:onlyonce:problem:outcome-unknown", "detail": "a\u001b[2Jb\nforged"}"#;
    let head = "HTTP/1.1 409 No\r\ncontent-type: application/problem+json";
    let said = format!("{head}\r\ncontent-length: {}\r\n\r\n{says}", says.len());
    let desk = Desk::new(server(Some(said.leak())));
    let outputs = [run(desk.order("order\n4711", "")), run(desk.command(&["--resume"]))];
    for output in outputs.into_iter().chain([run(desk.command(&["--list"]))]) {
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(said.contains("\\u{1b}[2Jb\\nforged") && !said.contains('\u{1b}'), "{said:?}");
        assert!(!said.lines().any(|line| line.starts_with("forged") || line.starts_with("4711")), "{said:?}");
    }
}

fn sql(journal: &Path, statement: &'static str) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        use sqlx::Connection;
        let url = format!("sqlite:{}", journal.display());
        let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
        sqlx::query(statement).execute(&mut connection).await.unwrap();
    });
}

#[test]
fn a_file_that_changed_since_is_another_request() {
    let upstream = Upstream::start();
    let desk = Desk::new(upstream.addr);
    let file = desk.folder.path().join("body");
    let at_file = format!("@{}", file.display());
    let send = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        run(desk.command(&["POST", &desk.url, "--data", &at_file, "--intent", "order-4711", "--json"]))
    };
    assert_code(&send(b"amount=10 \xff"), 0);
    let other = send(b"amount=10 \xfe");
    assert_code(&other, 2);
    assert_eq!(json(&other)["differs"], serde_json::json!(["body"]));
    assert_eq!(json(&send(b"amount=10 \xff"))["recorded"], true);
    assert_eq!(upstream.received(), 1);
}

#[test]
fn the_journal_is_in_its_owners_state_folder_and_nobody_elses() {
    let upstream = Upstream::start();
    let home = tempfile::tempdir().unwrap();
    let url = upstream.url();
    let send = |name: &str, folder: &Path| {
        let mut command = onlyonce();
        command.env_remove("XDG_STATE_HOME").env_remove("HOME").env(name, folder);
        command.args(["send", "POST", &url, "--intent", "order-4711", "-H", "authorization: Bearer secret"]);
        command.args(["--keep-out", "authorization"]);
        run(command)
    };
    for (name, folder) in [("XDG_STATE_HOME", home.path().join("state")), ("HOME", home.path().join("home"))]
    {
        assert_code(&send(name, &folder), 0);
        let state = if name == "HOME" { folder.join(".local/state") } else { folder };
        let journal = state.join("onlyonce/journal.db");
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&journal), mode(journal.parent().unwrap())), (0o600, 0o700), "{name}");
    }
    let mut homeless = onlyonce();
    homeless.env_remove("XDG_STATE_HOME").env_remove("HOME").args(["send", "--list"]);
    assert_code(&run(homeless), 2);
}

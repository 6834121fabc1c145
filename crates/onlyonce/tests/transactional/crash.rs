//! `kill -9` at every moment of a payment that is two rows: never one row, and the retry gives one answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onlyonce_testkit::Postgres;
use sqlx::ConnectOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};

/// More moments than a payment has.
const MOMENTS_MAX: usize = 60;

#[test]
fn killed_at_any_moment_a_payment_in_postgres_is_whole_or_absent() {
    let server = Postgres::shared();
    let (mut died, mut committed) = (0, 0);
    let database = server.database();
    server.sql(&database, "CREATE TABLE entries (account text, amount text)");
    let rows = || server.sql(&database, "SELECT count(*) FROM entries").parse().unwrap();
    let clear = || drop(server.sql(&database, "DELETE FROM entries"));
    for flag in ["--die-at-call", "--die-at-pause"] {
        at_every_moment(&server.url(&database), flag, &rows, &clear, &mut died, &mut committed);
    }
    // Otherwise this test would have looked at nothing.
    assert!(died > 8 && committed > 0 && committed < died, "{died} deaths, {committed} after the commit");
}

#[test]
fn killed_at_any_moment_a_payment_in_sqlite_is_whole_or_absent() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bank.db");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let run = |sql: &'static str| -> i64 {
        runtime.block_on(async {
            let options = SqliteConnectOptions::new().filename(&file).create_if_missing(true);
            let options = options.journal_mode(SqliteJournalMode::Wal);
            let mut connection = options.connect().await.unwrap();
            let count = sqlx::query_scalar(sql).fetch_optional(&mut connection).await.unwrap();
            sqlx::Connection::close(connection).await.unwrap();
            count.unwrap_or(0)
        })
    };
    run("CREATE TABLE entries (account text, amount text)");
    let rows = || usize::try_from(run("SELECT count(*) FROM entries")).unwrap();
    let clear = || {
        run("DELETE FROM entries");
    };
    let (mut died, mut committed) = (0, 0);
    for flag in ["--die-at-call", "--die-at-pause"] {
        at_every_moment(file.to_str().unwrap(), flag, &rows, &clear, &mut died, &mut committed);
    }
    assert!(died > 8 && committed > 0 && committed < died, "{died} deaths, {committed} after the commit");
}

fn at_every_moment(
    store: &str,
    flag: &str,
    rows: &dyn Fn() -> usize,
    clear: &dyn Fn(),
    died: &mut usize,
    committed: &mut usize,
) {
    let survivor = Teller::start(store, &[]);
    for moment in 1..MOMENTS_MAX {
        let key = format!("{flag}-{moment}");
        clear();
        let mut mortal = Teller::start(store, &[flag, &moment.to_string()]);
        let first = mortal.pay(&key);
        if first.is_some() {
            assert_eq!(rows(), 2, "{key}");
            assert!(moment > 1, "{key}: nobody died");
            return;
        }
        *died += 1;
        mortal.child.wait().unwrap();
        let left = rows();
        assert!(left == 0 || left == 2, "{key}: half a payment, {left} rows");
        let retry = survivor.pay(&key).expect("the key is not held by anybody");
        assert_eq!(rows(), 2, "{key}");
        if left == 2 {
            *committed += 1;
            assert!(
                retry.contains(&format!("process {}", mortal.child.id())),
                "{key}: not the first's {retry}"
            );
        }
        assert_eq!(survivor.pay(&key), Some(retry), "{key}");
    }
    panic!("a payment has more than {MOMENTS_MAX} moments");
}

struct Teller {
    child: Child,
    addr: SocketAddr,
}

impl Teller {
    fn start(store: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(program());
        command.arg(store).args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addr = line.trim().parse().unwrap_or_else(|_| panic!("the teller did not start: {line:?}"));
        Self { child, addr }
    }

    /// The body of the answer, if there is one.
    fn pay(&self, key: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.addr).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let request = format!(
            "POST /payments HTTP/1.1\r\nhost: bank\r\nconnection: close\r\nidempotency-key: {key}\r\n\
             content-length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        // A connection that ends without an answer, in whatever way.
        let _ = stream.read_to_string(&mut answer);
        let (head, body) = answer.split_once("\r\n\r\n")?;
        assert!(head.starts_with("HTTP/1.1 200 "), "{key}: {answer}");
        Some(body.to_owned())
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Cargo builds the examples of a package before it runs its tests.
fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    tests.parent().unwrap().parent().unwrap().join("examples/teller")
}

//! Several processes on one file, and processes that are killed.
//!
//! The test runs itself again as the other processes, so it has a `main` of its own. A killed process
//! shows what survives a crash of the program. What survives a power failure is up to `synchronous =
//! FULL` and the disk, and is not tested here.

mod common;

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{done, operation, running};
use onlyonce_core::record::State;
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{Revision, Store};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

const PROCESSES: usize = 10;
const KEYS: u32 = 40;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some("child-claim") => runtime.block_on(child_claim(Path::new(&words[1]), &words[2])),
        Some("child-write") => runtime.block_on(child_write(Path::new(&words[1]), &words[2])),
        _ => {
            runtime.block_on(ten_processes_open_a_new_file_and_each_key_has_one_winner());
            println!("test ten_processes_open_a_new_file_and_each_key_has_one_winner ... ok");
            runtime.block_on(what_was_acknowledged_survives_a_kill());
            println!("test what_was_acknowledged_survives_a_kill ... ok");
        }
    }
}

/// Opens the file when told to, claims every key in turn, and says which it won.
async fn child_claim(path: &Path, number: &str) {
    say("ready");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).expect("it is told");
    let store = SqliteStore::open(&SqliteOptions::file(path)).await.expect("it opens");
    let number: u128 = number.parse().expect("a number");
    for key in 0..KEYS {
        let name = format!("k{key}");
        let write = running(number << 32 | u128::from(key));
        if let Inserted::New(_) = store.insert(&operation(&name), write).await.expect("it answers") {
            say(&name);
        }
    }
    say("end");
}

/// Claims and completes one key after another on several tasks, and says what was acknowledged.
async fn child_write(path: &Path, round: &str) {
    let store = SqliteStore::open(&SqliteOptions::file(path)).await.expect("it opens");
    say("ready");
    let next = Arc::new(AtomicU32::new(1));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (store, next, round) = (store.clone(), Arc::clone(&next), round.to_owned());
        tasks.spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let (name, claimed) = (format!("r{round}-{number}"), u128::from(number) << 1);
                let operation = operation(&name);
                let inserted = store.insert(&operation, running(claimed)).await.expect("it answers");
                assert!(matches!(inserted, Inserted::New(_)), "{inserted:?}");
                say(&format!("claimed {name}"));
                let outcome = done(claimed + 1, &name);
                let replaced = store.replace(operation.id(), Revision(claimed), outcome).await;
                assert!(matches!(replaced, Ok(Replaced::Written(_))), "{replaced:?}");
                say(&format!("done {name}"));
            }
        });
    }
    tasks.join_all().await;
}

/// One line in one piece, out of this process before the call returns.
fn say(word: &str) {
    let mut output = std::io::stdout().lock();
    output.write_all(format!("{word}\n").as_bytes()).and_then(|()| output.flush()).expect("it is heard");
}

fn spawn(role: &str, path: &Path, number: usize) -> (Child, BufReader<ChildStdout>) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args([role, &path.display().to_string(), &number.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("it starts");
    let output = BufReader::new(child.stdout.take().expect("it speaks"));
    (child, output)
}

async fn expect_line(output: &mut BufReader<ChildStdout>, expected: &str) {
    let mut line = String::new();
    output.read_line(&mut line).await.expect("it speaks");
    assert_eq!(line.trim_end(), expected);
}

fn database() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("keys.db");
    (folder, path)
}

async fn ten_processes_open_a_new_file_and_each_key_has_one_winner() {
    for _ in 0..2 {
        let (_folder, path) = database();
        let mut children: Vec<_> = (0..PROCESSES).map(|number| spawn("child-claim", &path, number)).collect();
        for (_, output) in &mut children {
            expect_line(output, "ready").await;
        }
        for (child, _) in &mut children {
            child.stdin.take().expect("it listens").write_all(b"go\n").await.expect("it listens");
        }
        let mut winners: HashMap<String, Vec<usize>> = HashMap::new();
        for (number, (mut child, mut output)) in children.into_iter().enumerate() {
            let mut said = String::new();
            output.read_to_string(&mut said).await.expect("it speaks");
            assert!(said.ends_with("end\n"), "process {number} said {said:?}");
            assert!(child.wait().await.expect("it ends").success());
            for name in said.lines().filter(|line| *line != "end") {
                winners.entry(name.to_owned()).or_default().push(number);
            }
        }
        assert_eq!(winners.len(), KEYS as usize);
        assert!(winners.values().all(|winners| winners.len() == 1), "{winners:?}");
        let store = SqliteStore::open(&SqliteOptions::file(&path)).await.expect("it opens");
        for (name, winner) in winners {
            let seen = store.read(operation(&name).id()).await.expect("it reads").expect("it is there");
            assert_eq!(seen.record.revision.0 >> 32, winner[0] as u128, "{name}");
        }
    }
}

async fn what_was_acknowledged_survives_a_kill() {
    let (_folder, path) = database();
    let mut acknowledged = HashMap::new();
    for round in 0..8_usize {
        let (mut child, mut output) = spawn("child-write", &path, round);
        expect_line(&mut output, "ready").await;
        // A different moment in every round: early, in the middle of many commits.
        tokio::time::sleep(Duration::from_millis(3 + 37 * round as u64)).await;
        child.kill().await.expect("SIGKILL");
        let mut said = String::new();
        output.read_to_string(&mut said).await.expect("it spoke");
        // The last line may have been cut off.
        for line in said.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let (state, name) = line.split_once(' ').expect("two words");
            acknowledged.insert(name.to_owned(), state == "done");
        }
        let store = SqliteStore::open(&SqliteOptions::file(&path)).await.expect("it opens");
        for (name, done) in &acknowledged {
            let seen = store.read(operation(name).id()).await.expect("it reads");
            let record = seen.unwrap_or_else(|| panic!("{name} was acknowledged and is gone")).record;
            match record.state {
                State::Done { outcome, .. } => assert_eq!(outcome.body, name.as_bytes()),
                State::Running { .. } => assert!(!done, "the outcome of {name} was acknowledged and is gone"),
            }
        }
    }
    assert!(acknowledged.len() > 100, "only {} keys were written", acknowledged.len());
    assert!(acknowledged.values().any(|done| *done));
}

//! Several processes on one file, and processes that are killed.
//!
//! The test runs itself again as the other processes, so it has a `main` of its own. A killed process
//! shows what survives a crash of the program. What survives a power failure is up to `synchronous =
//! FULL` and the disk, and is not tested here.

mod common;

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{application, done, operation, running};
use onlyonce_core::record::State;
use onlyonce_core::store::{Filter, Inserted, Replaced};
use onlyonce_core::transact::{self, ClaimedIn};
use onlyonce_core::{Fingerprint, Inspect, Lapse, Outcome, Policy, Revision, Store, Transactional};
use onlyonce_sqlite::{SqliteOptions, SqliteStore};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};

const PROCESSES: usize = 10;
const KEYS: u32 = 40;
const PATIENT: Duration = Duration::from_secs(60);
const FINGERPRINT: Fingerprint = Fingerprint { target: [1; 32], body: [2; 32] };
const POLICY: Policy = Policy {
    lease: Duration::from_secs(3_600),
    retention: Duration::from_secs(3_600),
    on_lapse: Lapse::Hold,
};

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        Some("child-claim") => runtime.block_on(child_claim(Path::new(&words[1]), &words[2])),
        Some("child-execute") => runtime.block_on(child_execute(Path::new(&words[1]), &words[2])),
        Some("child-write") => runtime.block_on(child_write(Path::new(&words[1]), &words[2])),
        _ => {
            runtime.block_on(ten_processes_open_a_new_file_and_each_key_has_one_winner());
            println!("test ten_processes_open_a_new_file_and_each_key_has_one_winner ... ok");
            runtime.block_on(what_was_acknowledged_survives_a_kill());
            println!("test what_was_acknowledged_survives_a_kill ... ok");
            runtime.block_on(ten_processes_share_a_new_file_and_each_key_is_executed_once());
            println!("test ten_processes_share_a_new_file_and_each_key_is_executed_once ... ok");
            runtime.block_on(a_kill_leaves_an_execution_whole_or_undone());
            println!("test a_kill_leaves_an_execution_whole_or_undone ... ok");
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

/// Opens the application's file when told to, executes every key in turn, and says which it executed:
/// without end, unless it is round 0.
async fn child_execute(path: &Path, round: &str) {
    say("ready");
    let mut go = String::new();
    std::io::stdin().read_line(&mut go).expect("it is told");
    // Of many that come at once, one sets the file up; the store waits its turn for that.
    let store = application::store(path).await;
    let pool = application::start(path, 2).await;
    let transactions = store.transactions(&pool).await.expect("it is the same file");
    say("started");
    let keys = if round == "0" { 0..KEYS } else { 0..u32::MAX };
    for key in keys {
        let name = format!("r{round}-{key}");
        let mut transaction = transactions.begin(PATIENT).await.expect("it begins");
        let claimed =
            transact::claim(&transactions, &mut transaction, &operation(&name), FINGERPRINT, &POLICY).await;
        match claimed.expect("it answers") {
            ClaimedIn::Execute(held) => {
                assert_eq!(held.attempt(), 1, "{name}");
                application::note(&mut transaction, &name).await;
                let outcome = Outcome { status: 201, head: "".into(), body: name.clone().into() };
                held.complete(&transactions, &mut transaction, outcome).await.expect("it is written");
                transactions.commit(transaction).await.expect("it commits");
                say(&name);
            }
            ClaimedIn::Replay(outcome) => {
                assert_eq!(outcome.body, name.as_bytes());
                transactions.roll_back(transaction).await;
            }
            ClaimedIn::Refused(refusal) => panic!("{name}: {refusal:?}"),
        }
    }
    say("end");
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

async fn ten_processes_share_a_new_file_and_each_key_is_executed_once() {
    let (_folder, path) = database();
    let mut children: Vec<_> = (0..PROCESSES).map(|_| spawn("child-execute", &path, 0)).collect();
    for (_, output) in &mut children {
        expect_line(output, "ready").await;
    }
    for (child, _) in &mut children {
        child.stdin.take().expect("it listens").write_all(b"go\n").await.expect("it listens");
    }
    let mut executed = Vec::new();
    for (number, (mut child, mut output)) in children.into_iter().enumerate() {
        expect_line(&mut output, "started").await;
        let mut said = String::new();
        output.read_to_string(&mut said).await.expect("it speaks");
        assert!(said.ends_with("end\n"), "process {number} said {said:?}");
        assert!(child.wait().await.expect("it ends").success());
        executed.extend(said.lines().filter(|line| *line != "end").map(str::to_owned));
    }
    executed.sort();
    let mut keys: Vec<_> = (0..KEYS).map(|key| format!("r0-{key}")).collect();
    keys.sort();
    assert_eq!(executed, keys);
    let mut notes = application::notes(&application::start(&path, 1).await).await;
    notes.sort();
    assert_eq!(notes, keys);
}

/// Two processes execute the same keys, and one is killed.
async fn a_kill_leaves_an_execution_whole_or_undone() {
    let (_folder, path) = database();
    let mut executed = 0;
    for round in 1..=8_usize {
        let mut children = [spawn("child-execute", &path, round), spawn("child-execute", &path, round)];
        for (child, output) in &mut children {
            expect_line(output, "ready").await;
            child.stdin.as_mut().expect("it listens").write_all(b"go\n").await.expect("it listens");
            expect_line(output, "started").await;
        }
        let mut acknowledged = Vec::new();
        for (mut child, mut output) in children {
            // A different moment in every round; the second has a little more time, alone.
            tokio::time::sleep(Duration::from_millis(3 + 17 * round as u64)).await;
            child.kill().await.expect("SIGKILL");
            let mut said = String::new();
            output.read_to_string(&mut said).await.expect("it spoke");
            // The last line may have been cut off.
            let lines = said.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
            acknowledged.extend(lines.map(str::to_owned));
        }
        let store = application::store(&path).await;
        let notes = application::notes(&application::start(&path, 1).await).await;
        let noted: HashSet<_> = notes.iter().cloned().collect();
        assert_eq!(noted.len(), notes.len(), "something was executed twice: {notes:?}");
        for name in &acknowledged {
            assert!(noted.contains(name), "{name} was acknowledged and is gone");
        }
        let records = store.list(&Filter::default(), u32::MAX).await.expect("it lists");
        let (mut kept, mut running) = (HashSet::new(), Vec::new());
        for entry in records {
            match entry.record.state {
                State::Done { .. } => drop(kept.insert(entry.operation.key().as_str().to_owned())),
                State::Running { .. } => running.push(entry.operation),
            }
        }
        // A process that is killed while it starts leaves the trace of its check, for a minute.
        assert!(running.iter().all(|operation| operation.namespace() == "onlyonce"), "{running:?}");
        assert_eq!(kept, noted, "the effects and the records differ");
        executed = kept.len();
    }
    assert!(executed > 20, "only {executed} keys were executed");
}

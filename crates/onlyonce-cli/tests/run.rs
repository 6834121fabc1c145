//! `onlyonce run` as a scheduler starts it: real commands, real crashes, one machine and several hosts.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use onlyonce_testkit::Postgres;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;
use sqlx::Connection;
use support::{PATIENCE, happens_within, millis, onlyonce, run, text, until};
use tempfile::{NamedTempFile, TempDir};

/// A store, and a file in which commands note what they did.
struct Place {
    folder: TempDir,
    store: String,
}

impl Place {
    fn sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = format!("sqlite:{}", folder.path().join("runs.db").display());
        Self { folder, store }
    }

    fn postgres() -> Self {
        let server = Postgres::shared();
        Self { folder: tempfile::tempdir().unwrap(), store: server.url(&server.database()) }
    }

    /// `onlyonce run` with these words and a shell script as its command. `$NOTES` is the file.
    fn job(&self, words: &str, script: &str) -> Command {
        let mut command = onlyonce();
        command.args(["run", "--store", &self.store]).args(words.split_whitespace());
        command.args(["--", "/bin/sh", "-c", script]).env("NOTES", self.notes_file());
        command.env("TZ", "UTC");
        command
    }

    /// One whose cron expression is several words.
    fn cron_job(&self, every: &str, words: &str, script: &str) -> Command {
        let mut command = onlyonce();
        command.args(["run", "--store", &self.store, "--every", every]).args(words.split_whitespace());
        command.args(["--", "/bin/sh", "-c", script]).env("NOTES", self.notes_file());
        command.env("TZ", "UTC");
        command
    }

    fn runs(&self, words: &str) -> Output {
        let mut command = onlyonce();
        let mut words = words.split_whitespace();
        command.arg("runs").args(words.next()).args(["--store", &self.store]).args(words);
        // Read while it runs: a list may be long.
        command.stdin(Stdio::null()).output().unwrap()
    }

    fn listed(&self, words: &str) -> Vec<Value> {
        let output = self.runs(&format!("list --json {words}"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn notes_file(&self) -> PathBuf {
        self.folder.path().join("notes")
    }

    fn notes(&self) -> Vec<String> {
        let notes = std::fs::read_to_string(self.notes_file()).unwrap_or_default();
        notes.lines().map(str::to_owned).collect()
    }
}

const NOTE: &str = "echo $ONLYONCE_PERIOD $ONLYONCE_ATTEMPT >> $NOTES";

/// Runs beside the test, and ends with it. What it says goes to a file: a pipe would be held open by whatever it leaves
/// behind.
struct Started(Child, NamedTempFile);

impl Started {
    fn new(mut command: Command) -> Self {
        let said = NamedTempFile::new().unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said.reopen().unwrap());
        Self(command.spawn().unwrap(), said)
    }

    fn signal(&self, signal: Signal) {
        kill_process(pid(self.0.id()), signal).unwrap();
    }

    /// Its exit status and what it said.
    #[track_caller]
    fn ended(&mut self) -> (Option<i32>, String) {
        until("the guard ends", || self.0.try_wait().unwrap().is_some());
        let said = std::fs::read_to_string(self.1.path()).unwrap();
        (self.0.wait().unwrap().code(), said)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap()).unwrap()
}

/// Whether a process is there and has not ended.
fn lives(number: u32) -> bool {
    let state = std::fs::read_to_string(format!("/proc/{number}/stat")).unwrap_or_default();
    state.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// What a script noted under this word: `word number`.
fn noted(place: &Place, word: &str) -> Option<u32> {
    place.notes().iter().find_map(|note| note.strip_prefix(word)?.trim().parse().ok())
}

#[track_caller]
fn ends_with(output: &Output, code: i32) -> String {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    said
}

/// ShedLock #6, #231: a late or skewed host ran the period again.
#[test]
fn two_hosts_with_clocks_minutes_apart_run_the_month_once() {
    let place = Place::postgres();
    let hosts: Vec<_> = ["00:00:00", "00:00:02", "00:02:40", "00:04:59"]
        .map(|clock| {
            let words =
                format!("--job billing --every month --tz Europe/Berlin --at 2024-07-01T{clock}+02:00");
            Started::new(place.job(&words, &format!("{NOTE}; sleep 1")))
        })
        .into_iter()
        .collect();
    for mut host in hosts {
        let (code, said) = host.ended();
        assert_eq!(code, Some(0), "{said}");
    }
    // And one that comes when everything is over.
    let late =
        run(place.job("--job billing --every month --tz Europe/Berlin --at 2024-07-01T00:30:00+02:00", NOTE));
    let said = ends_with(&late, 0);
    assert!(said.contains("billing:2024-07 was done at 20") && said.contains("nothing to do"), "{said}");
    assert_eq!(place.notes(), ["2024-07 1"]);
}

/// good_job PR 1543, node-cron #180: a timer fired seconds early and took the period before.
#[test]
fn a_timer_that_fires_five_seconds_early_takes_the_right_period() {
    let place = Place::sqlite();
    for at in ["2024-05-31T23:59:55+02:00", "2024-06-30T23:59:55+02:00", "2024-07-01T00:00:05+02:00"] {
        ends_with(&run(place.job(&format!("--job b --every month --tz Europe/Berlin --at {at}"), NOTE)), 0);
    }
    assert_eq!(place.notes(), ["2024-06 1", "2024-07 1"]);
}

#[test]
fn input_output_and_exit_status_are_the_commands_own() {
    let place = Place::sqlite();
    let script = "cat; echo to-stderr >&2; echo \"$ONLYONCE_KEY|$ONLYONCE_PERIOD|$ONLYONCE_ATTEMPT\"; exit 7";
    let mut command = place.job("--job a/b --every day --tz UTC --at 2024-07-14T12:00:00Z", script);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(200_000).collect();
    let (mut stdin, sent) = (child.stdin.take().unwrap(), bytes.clone());
    let writer = thread::spawn(move || stdin.write_all(&sent).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert_eq!(output.status.code(), Some(7));
    let rest = output.stdout.strip_prefix(&bytes[..]).expect("standard input came back");
    assert_eq!(rest, b"a/b:2024-07-14|2024-07-14|1\n");
    let said = text(&output.stderr);
    assert_eq!(
        said,
        "to-stderr\nonlyonce: a/b:2024-07-14 failed with exit status 7; the next start runs it again\n"
    );
}

#[test]
fn a_run_that_went_well_says_nothing_of_its_own() {
    let place = Place::sqlite();
    let output = run(place.job("--job a --every day", "true"));
    assert_eq!((text(&output.stdout), text(&output.stderr)), (String::new(), String::new()));
}

#[test]
fn a_rerun_by_hand_of_a_done_period_does_nothing_and_says_when_it_was_done() {
    let place = Place::sqlite();
    let words = "--job billing --every month --tz UTC --period 2024-06";
    ends_with(&run(place.job(words, NOTE)), 0);
    let again = run(place.job(words, NOTE));
    let said = ends_with(&again, 0);
    let row = &place.listed("--job billing")[0];
    let (at, host) = (row["completed_at"].as_str().unwrap(), row["host"].as_str().unwrap());
    assert!(said.contains(&format!("billing:2024-06 was done at {at} by ")), "{said}");
    assert!(
        said.contains(&format!(" on {host} in 0.")) && said.contains("exit status 0; nothing to do"),
        "{said}"
    );
    let quiet = run(place.job(&format!("{words} --quiet"), NOTE));
    assert_eq!(ends_with(&quiet, 0), "");
    let json: Value =
        serde_json::from_slice(&run(place.job(&format!("{words} --json"), NOTE)).stderr).unwrap();
    assert_eq!(
        (&json["result"], &json["period"], &json["exit_status"], &json["completed_at"]),
        (&"done_before".into(), &"2024-06".into(), &0.into(), &at.into())
    );
    assert_eq!(place.notes(), ["2024-06 1"]);
}

#[test]
fn a_failed_run_is_run_again_and_a_kept_failure_is_not() {
    let place = Place::sqlite();
    let failing = format!("{NOTE}; exit 3");
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z";
    ends_with(&run(place.job(words, &failing)), 3);
    assert_eq!(
        (&place.listed("")[0]["state"], &place.listed("")[0]["attempt"]),
        (&"lapsed".into(), &1.into())
    );
    let missing = place.listed("--job a --every day --tz UTC --missing");
    assert_eq!(missing[0]["period"], "2024-07-14", "nobody has finished it");
    ends_with(&run(place.job(words, &failing)), 3);
    ends_with(&run(place.job(words, NOTE)), 0);
    ends_with(&run(place.job(words, NOTE)), 0);
    assert_eq!(place.notes(), ["2024-07-14 1", "2024-07-14 2", "2024-07-14 3"]);
    std::fs::remove_file(place.notes_file()).unwrap();

    let words = "--job b --every day --tz UTC --at 2024-07-14T12:00:00Z --keep-failure";
    ends_with(&run(place.job(words, &failing)), 3);
    let said = ends_with(&run(place.job(words, &failing)), 3);
    assert!(said.contains("was done at") && said.contains("exit status 3"), "{said}");
    assert_eq!(place.notes().len(), 1);
    assert_eq!(place.listed("--job b")[0]["state"], "failed");
}

/// Where a run of unknown end is left to a person, one that is known to have failed is not.
#[test]
fn a_failed_run_is_run_again_under_hold() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --on-lapse hold";
    ends_with(&run(place.job(words, &format!("{NOTE}; exit 3"))), 3);
    ends_with(&run(place.job(words, NOTE)), 0);
    assert_eq!(place.notes(), ["2024-07-14 1", "2024-07-14 1"]);
}

/// Whoever takes over from a dead guard and then does not come to start the command leaves what is known about the
/// first attempt.
#[test]
fn a_start_that_only_takes_over_does_not_make_a_begun_period_look_new() {
    let place = Place::sqlite();
    let words = |day: u32| format!("--job a --every day --tz UTC --at 2024-07-{day}T12:00:00Z");
    ends_with(&run(place.job(&words(14), &format!("{NOTE}; exit 3"))), 3);
    let _slow = Started::new(place.job(&words(15), "echo slow >> $NOTES; sleep 60"));
    until("the slow one runs", || place.notes().len() == 2);
    ends_with(&run(place.job(&format!("{} --overlap skip --busy-exit 75", words(14)), NOTE)), 75);
    let mut unknown = onlyonce();
    unknown.args(["run", "--store", &place.store]).args(words(14).split_whitespace());
    unknown.args(["--overlap", "allow", "--", "no-such-program"]);
    ends_with(&run(unknown), 127);
    ends_with(&run(place.job(&format!("{} --overlap allow", words(14)), "[ $ONLYONCE_ATTEMPT -gt 1 ]")), 0);
}

/// A log pipe whose reader has gone.
#[test]
fn a_guard_that_nobody_listens_to_does_its_work_and_ends_as_ever() {
    let place = Place::sqlite();
    let unheard = |mut command: Command| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(writer).status().unwrap().code()
    };
    let at = |day: u32| format!("--job a --every day --tz UTC --at 2024-07-{day}T12:00:00Z");
    ends_with(&run(place.job(&format!("{} --retention 3600d", at(14)), NOTE)), 0);
    let words = format!("{} --retention 3600d --catch-up 3 --json", at(17));
    assert_eq!(unheard(place.job(&words, NOTE)), Some(0));
    assert_eq!(place.notes(), ["2024-07-14 1", "2024-07-15 1", "2024-07-16 1", "2024-07-17 1"]);
    assert_eq!(unheard(place.job(&at(18), "exit 3")), Some(3));
    assert_eq!(unheard(place.job("--job a --every day --lease 10ms", NOTE)), Some(2));
}

/// A newer version wrote it: how the run ended is not known, and success is not made up.
#[test]
fn a_done_period_whose_record_cannot_be_read_is_not_run_again_and_no_success() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z";
    ends_with(&run(place.job(&format!("{words} --keep-failure"), &format!("{NOTE}; exit 3"))), 3);
    let file = place.store.strip_prefix("sqlite:").unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut connection = sqlx::SqliteConnection::connect(file).await.unwrap();
        sqlx::query("UPDATE idempotency_keys SET head = x'ff'").execute(&mut connection).await.unwrap();
        connection.close().await.unwrap();
    });
    let said = ends_with(&run(place.job(words, NOTE)), 125);
    assert!(said.contains("a:2024-07-14 was done at 20") && said.contains("cannot be read"), "{said}");
    assert_eq!(place.notes().len(), 1);
}

#[test]
fn a_period_that_a_person_completed_is_done() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z";
    ends_with(&run(place.job(words, "exit 3")), 3);
    let mut complete = onlyonce();
    complete.args(["keys", "complete", "a:2024-07-14", "--status", "200", "--store", &place.store]);
    ends_with(&run(complete), 0);
    let said = ends_with(&run(place.job(words, NOTE)), 0);
    assert!(said.contains("was done at 20") && said.ends_with("Z; nothing to do\n"), "{said}");
    assert_eq!(place.notes().len(), 0);
}

/// What was done may be forgotten long before an old period that was run late, by hand.
#[test]
fn a_period_that_may_have_been_forgotten_is_not_taken_for_missed() {
    let place = Place::sqlite();
    ends_with(&run(place.job("--job a --every day --tz UTC --period 2024-07-10", NOTE)), 0);
    let words = "--job a --every day --tz UTC --at 2024-07-16T12:00:00Z --catch-up 3";
    let said = ends_with(&run(place.job(words, NOTE)), 0);
    assert_eq!(place.notes(), ["2024-07-10 1", "2024-07-16 1"], "the others may have been done");
    assert!(said.contains("5 periods of a are longer ago than its runs are remembered"), "{said}");
    let states: Vec<_> = place.listed("--job a").iter().map(|row| row["state"].clone()).collect();
    assert_eq!(states[..3], ["done", "forgotten", "forgotten"]);
    let output = place.runs("list --job a --missing --json");
    assert!(text(&output.stderr).contains("of a are longer ago than its runs are remembered"));
    let missing: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    assert!(missing.iter().all(|row| row["state"] == "missing"), "{missing:?}");
    // The thirty days that are remembered are known to be missing, all but today and perhaps one at each end.
    assert!((28..=31).contains(&missing.len()), "{}", missing.len());
    // By hand, whoever asks for one is believed.
    ends_with(&run(place.job("--job a --every day --tz UTC --period 2024-07-11", NOTE)), 0);
    assert_eq!(place.notes().len(), 3);
}

/// Twelve months can be caught up with only if twelve months are remembered.
#[test]
fn runs_are_remembered_for_as_long_as_they_are_caught_up_with() {
    let place = Place::sqlite();
    let kept_days = |job: &str, words: &str| {
        ends_with(&run(place.job(&format!("--job {job} --every month --tz UTC {words}"), NOTE)), 0);
        let row = &place.listed(&format!("--job {job}"))[0];
        let at = |member: &str| row[member].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
        at("expires_at").duration_since(at("completed_at")).as_hours() / 24
    };
    assert_eq!(kept_days("a", ""), 93);
    assert!(kept_days("b", "--catch-up 12") >= 13 * 31);
    assert_eq!(kept_days("c", "--catch-up 12 --retention 40d"), 40);
    assert_eq!(kept_days("d", "--catch-up 18446744073709551615"), 3660);
}

/// A crontab line with `--quiet` would leave a month out, and nobody would hear of it.
#[test]
fn a_period_that_waited_in_vain_is_told_even_under_quiet() {
    let place = Place::sqlite();
    let words = |day: u32| format!("--job a --every day --tz UTC --at 2024-07-{day}T12:00:00Z --quiet");
    let _slow = Started::new(place.job(&words(14), "echo slow >> $NOTES; sleep 60"));
    until("the slow one runs", || place.notes() == ["slow"]);
    let said = ends_with(&run(place.job(&format!("{} --wait 300ms", words(15)), NOTE)), 0);
    assert!(said.contains("2024-07-15 is not run"), "{said}");
    assert_eq!(ends_with(&run(place.job(&format!("{} --overlap skip", words(15)), NOTE)), 0), "");
    assert_eq!(ends_with(&run(place.job(&words(14), NOTE)), 0), "");
}

/// A clock or a word that is wrong would have the period done before its time.
#[test]
fn a_period_of_the_future_is_refused() {
    let place = Place::sqlite();
    for (at, says) in [
        ("2199-07-01T00:00:00Z", "--at: 2199-07 begins at 2199-07-01T00:00:00Z only"),
        // A date, not a count of minutes.
        ("billing-20260701", "a Job that a CronJob started"),
    ] {
        let said = ends_with(&run(place.job(&format!("--job a --every month --tz UTC --at {at}"), NOTE)), 2);
        assert!(said.contains(says), "{said}");
    }
    assert_eq!(place.notes().len(), 0);
}

#[test]
fn what_a_host_calls_itself_moves_no_cursor() {
    let place = Place::sqlite();
    let mut command = place.job("--job a --every day --tz UTC --at 2024-07-14T12:00:00Z", NOTE);
    command.env("USER", "ev\u{1b}[31mil\nrow");
    ends_with(&run(command), 0);
    let again = run(place.job("--job a --every day --tz UTC --at 2024-07-14T12:00:00Z", NOTE));
    let shown = [again.stderr, place.runs("list --limit 0").stdout, place.runs("show a 2024-07-14").stdout];
    for shown in shown.map(|shown| text(&shown)) {
        assert!(shown.contains("ev\\u{1b}[31mil\\nrow") && !shown.contains('\u{1b}'), "{shown}");
    }
    assert_eq!(place.listed("")[0]["user"], "ev\u{1b}[31mil\nrow");
}

/// Whatever is said under `--json` is a JSON object in a line.
#[test]
fn json_is_all_that_is_said_under_json() {
    let place = Place::sqlite();
    let words = |day: u32| {
        format!("--job a --every day --tz UTC --at 2024-07-{day}T12:00:00Z --json --retention 3600d")
    };
    let results = |words: &str, script: &str| -> Vec<String> {
        let output = run(place.job(words, script));
        let lines = text(&output.stderr);
        let read = |line: &str| {
            serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"))
        };
        lines.lines().map(|line| read(line)["result"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(results(&words(10), NOTE), ["done"]);
    assert_eq!(results(&words(10), NOTE), ["done_before"]);
    assert_eq!(results(&format!("{} --catch-up 1", words(13)), NOTE), ["not_caught_up", "done", "done"]);
    assert_eq!(results(&words(14), "exit 3"), ["failed"]);
    assert_eq!(results(&words(14), "kill -9 $$"), ["failed"]);
    assert_eq!(results(&words(14).replace("UTC", "Asia/Tokyo"), NOTE), ["error"]);
}

#[test]
fn what_cannot_be_started_is_told_as_a_shell_tells_it() {
    let place = Place::sqlite();
    let start = |program: &str| {
        let mut command = onlyonce();
        command.args(["run", "--store", &place.store, "--job", "a", "--every", "day", "--", program]);
        run(command)
    };
    assert!(ends_with(&start("no-such-program"), 127).contains("no-such-program"));
    assert!(ends_with(&start("/etc/passwd"), 126).contains("/etc/passwd"));
    // Nothing was done, so nothing is recorded.
    ends_with(&start("/bin/true"), 0);
}

/// The command ignores SIGTERM, and so does what it has started.
const STUBBORN: &str = "trap '' TERM; echo command $$ >> $NOTES
    sh -c 'trap \"\" TERM; echo grandchild $$ >> $NOTES; while :; do sleep 0.1; done' &
    echo go >> $NOTES; while :; do sleep 0.1; done";

#[test]
fn a_killed_guard_takes_its_command_along_long_before_the_lease_ends() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --lease 1h --grace 500ms";
    let mut guard = Started::new(place.job(words, STUBBORN));
    until("both run", || noted(&place, "command").is_some() && noted(&place, "grandchild").is_some());
    guard.signal(Signal::KILL);
    guard.0.wait().unwrap();
    let (command, grandchild) = (noted(&place, "command").unwrap(), noted(&place, "grandchild").unwrap());
    until("the command and what it started are dead", || !lives(command) && !lives(grandchild));
    ends_with(&run(place.job(&format!("{words} --busy-exit 75"), NOTE)), 75);
}

/// As `timeout --signal KILL` does it, and whatever else ends a job by its process group.
#[test]
fn a_guard_killed_with_its_process_group_takes_its_command_along() {
    let place = Place::sqlite();
    let mut job = place.job("--job a --every day --tz UTC --lease 1h --grace 500ms", STUBBORN);
    job.process_group(0);
    let mut guard = Started::new(job);
    until("both run", || noted(&place, "command").is_some() && noted(&place, "grandchild").is_some());
    kill_process_group(pid(guard.0.id()), Signal::KILL).unwrap();
    guard.0.wait().unwrap();
    let (command, grandchild) = (noted(&place, "command").unwrap(), noted(&place, "grandchild").unwrap());
    let all_dead = happens_within(PATIENCE, || !lives(command) && !lives(grandchild));
    if !all_dead {
        let _ = kill_process_group(pid(command), Signal::KILL);
    }
    assert!(all_dead, "the command and what it started are dead");
}

#[test]
fn the_next_start_after_the_lease_takes_over_from_a_killed_guard() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 10s --busy-exit 75";
    let mut guard = Started::new(place.job(words, "echo began >> $NOTES; sleep 60"));
    until("it has begun", || !place.notes().is_empty());
    guard.signal(Signal::KILL);
    guard.0.wait().unwrap();
    let mut refusals = 0;
    until("the next start takes over", || {
        let code = run(place.job(words, NOTE)).status.code();
        refusals += u32::from(code == Some(75));
        code == Some(0)
    });
    assert!(refusals > 0, "until then it was refused");
    assert_eq!(place.notes(), ["began", "2024-07-14 2"]);
    assert_eq!(place.listed("")[0]["attempt"], 2);
}

#[test]
fn a_run_longer_than_its_lease_keeps_it() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 4s";
    let started = Instant::now();
    let mut guard = Started::new(place.job(words, &format!("echo began >> $NOTES; sleep 10; {NOTE}")));
    until("it has begun", || !place.notes().is_empty());
    while started.elapsed() < Duration::from_secs(9) {
        ends_with(&run(place.job(&format!("{words} --busy-exit 75"), NOTE)), 75);
        thread::sleep(millis(300));
    }
    assert_eq!(guard.ended().0, Some(0));
    assert_eq!(place.notes(), ["began", "2024-07-14 1"]);
    assert_eq!(place.listed("")[0]["attempt"], 1);
}

#[test]
fn a_stalled_guard_that_wakes_after_another_took_over_cannot_mark_the_period_done() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 6s";
    let mut stalled = Started::new(place.job(words, "echo began >> $NOTES; sleep 1; echo ended >> $NOTES"));
    until("it has begun", || !place.notes().is_empty());
    stalled.signal(Signal::STOP);
    until("its command has ended", || place.notes().len() == 2);
    until("another takes over", || {
        run(place.job(&format!("{words} --busy-exit 75"), NOTE)).status.code() == Some(0)
    });
    let row = place.listed("")[0].clone();
    stalled.signal(Signal::CONT);
    let (code, said) = stalled.ended();
    assert_eq!(code, Some(125), "{said}");
    assert!(said.contains("lost"), "{said}");
    assert_eq!(place.listed("")[0], row);
    assert_eq!((&row["state"], &row["attempt"]), (&"done".into(), &2.into()));
}

#[test]
fn the_command_of_a_stalled_guard_is_stopped_before_another_may_start() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 4s";
    let mut stalled = Started::new(place.job(words, STUBBORN));
    until("both run", || noted(&place, "command").is_some() && noted(&place, "grandchild").is_some());
    stalled.signal(Signal::STOP);
    let (command, grandchild) = (noted(&place, "command").unwrap(), noted(&place, "grandchild").unwrap());
    // The other one says who is alive when it starts.
    let other = format!(
        "for p in {command} {grandchild}; do kill -0 $p 2>/dev/null && grep -q '^State:.[^Z]' /proc/$p/status \
        && echo alive $p >> $NOTES; done; {NOTE}"
    );
    until("another takes over", || {
        run(place.job(&format!("{words} --busy-exit 75"), &other)).status.code() == Some(0)
    });
    let notes = place.notes();
    assert!(!notes.iter().any(|note| note.starts_with("alive")), "{notes:?}");
    assert_eq!(notes.last().unwrap(), "2024-07-14 2");
    stalled.signal(Signal::CONT);
    assert_eq!(stalled.ended().0, Some(125));
}

#[test]
fn a_killed_keeper_leaves_no_command_behind() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z";
    let mut guard = Started::new(place.job(words, &format!("echo keeper $PPID >> $NOTES; {STUBBORN}")));
    until("both run", || noted(&place, "command").is_some() && noted(&place, "grandchild").is_some());
    kill_process(pid(noted(&place, "keeper").unwrap()), Signal::KILL).unwrap();
    let (code, said) = guard.ended();
    assert_eq!(code, Some(125), "{said}");
    let (command, grandchild) = (noted(&place, "command").unwrap(), noted(&place, "grandchild").unwrap());
    until("they are dead", || !lives(command) && !lives(grandchild));
    assert_eq!(place.listed("")[0]["state"], "running");
}

#[test]
fn a_slow_run_and_the_next_period() {
    let place = Place::sqlite();
    let words = |at: &str, overlap: &str| {
        format!(
            "--job a --tz UTC --retention 3600d --at 2024-07-14T{at}:00Z --overlap {overlap} --busy-exit 75"
        )
    };
    let slow =
        "echo slow >> $NOTES; while [ ! -e $NOTES.go ]; do sleep 0.05; done; echo slow ended >> $NOTES";
    let mut first = Started::new(place.cron_job("0 * * * *", &words("01:00", "skip"), slow));
    until("the slow one runs", || place.notes() == ["slow"]);
    let skipped = run(place.cron_job("0 * * * *", &words("02:00", "skip"), NOTE));
    let said = ends_with(&skipped, 75);
    assert!(
        said.contains("another period of a is running") && said.contains("2024-07-14T02:00 is not run"),
        "{said}"
    );
    let gave_up = run(place.cron_job("0 * * * *", &(words("02:00", "wait") + " --wait 300ms"), NOTE));
    ends_with(&gave_up, 75);
    ends_with(&run(place.cron_job("0 * * * *", &words("03:00", "allow"), NOTE)), 0);
    let mut waiting = Started::new(place.cron_job("0 * * * *", &words("04:00", "wait"), NOTE));
    assert!(!happens_within(millis(700), || waiting.0.try_wait().unwrap().is_some()));
    assert_eq!(place.notes(), ["slow", "2024-07-14T03:00 1"]);
    std::fs::write(place.folder.path().join("notes.go"), "").unwrap();
    assert_eq!(first.ended().0, Some(0));
    assert_eq!(waiting.ended().0, Some(0));
    assert_eq!(place.notes(), ["slow", "2024-07-14T03:00 1", "slow ended", "2024-07-14T04:00 1"]);
    // What was left out can be run later, and another job never waits.
    ends_with(&run(place.cron_job("0 * * * *", &words("02:00", "skip"), NOTE)), 0);
    let states: Vec<_> = place
        .listed("--job a --since 2024-07-14T00:00:00Z --limit 0")
        .iter()
        .take(5)
        .map(|row| (row["period"].clone(), row["state"].clone()))
        .collect();
    let expected =
        [("00:00", "missing"), ("01:00", "done"), ("02:00", "done"), ("03:00", "done"), ("04:00", "done")];
    assert_eq!(states, expected.map(|(at, state)| (format!("2024-07-14T{at}").into(), state.into())));
}

#[test]
fn a_monthly_guard_with_a_days_retention_is_refused() {
    let place = Place::sqlite();
    for (every, retention, least) in
        [("month", "1d", "746h"), ("day", "12h", "26h"), ("year", "365d", "8786h")]
    {
        let words = format!("--job a --every {every} --tz UTC --retention {retention}");
        let said = ends_with(&run(place.job(&words, NOTE)), 2);
        assert!(said.contains("retention") && said.contains(&format!("at least {least}")), "{said}");
    }
    let said = ends_with(&run(place.cron_job("0 2 * * 1-5", "--job a --tz UTC --retention 2d", NOTE)), 2);
    assert!(said.contains("at least 74h"), "{said}");
    ends_with(&run(place.cron_job("*/5 * * * *", "--job a --tz UTC --retention 2d", NOTE)), 0);
    assert_eq!(place.notes().len(), 1);
}

#[test]
fn wrong_usage_is_refused_with_what_is_allowed() {
    let place = Place::sqlite();
    for (words, says) in [
        ("--job a --every fortnight", "hour, day, week, month, quarter, year or a cron expression"),
        ("--job a --every month --tz Mars/Olympus", "Europe/Berlin"),
        ("--job a:b --every month", "letters, digits and . _ - /"),
        ("--job a --every month --tz UTC --period 2024-13", "one is written 2026-07"),
        ("--job a --every month --tz UTC --period 2199-01", "begins at 2199-01-01T00:00:00Z only"),
        ("--job a --every month --at yesterday", "2026-07-01T00:00:00Z"),
        ("--job a --every month --lease 10ms", "--lease must be from 1s"),
        ("--job a --every month --period 2024-06 --catch-up 3", "cannot be used with"),
    ] {
        let said = ends_with(&run(place.job(words, NOTE)), 2);
        assert!(said.contains(says), "{said}");
    }
    let told = run(place.job("--job a --every month --lease 10ms --json", NOTE));
    assert_eq!(told.status.code(), Some(2));
    let told: Value = serde_json::from_slice(&told.stderr).unwrap();
    assert_eq!((&told["result"], &told["exit_status"]), (&"error".into(), &2.into()));
    assert_eq!(place.notes().len(), 0);
}

/// A changed zone would cut other periods under the same names.
#[test]
fn another_zone_for_a_period_that_was_run_is_refused() {
    let place = Place::sqlite();
    ends_with(&run(place.job("--job a --every month --tz Europe/Berlin --period 2024-06", NOTE)), 0);
    let said = ends_with(&run(place.job("--job a --every month --tz UTC --period 2024-06", NOTE)), 2);
    assert!(said.contains("another --tz"), "{said}");
    ends_with(&run(place.job("--job a --every month --tz UTC --period 2024-07", NOTE)), 0);
    assert_eq!(place.notes(), ["2024-06 1", "2024-07 1"]);
}

#[test]
fn a_run_of_unknown_end_is_left_to_a_person_under_hold() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 3s --on-lapse hold";
    let mut guard = Started::new(place.job(words, "echo began >> $NOTES; sleep 60"));
    until("it has begun", || !place.notes().is_empty());
    guard.signal(Signal::KILL);
    guard.0.wait().unwrap();
    until("the lease is over", || place.listed("")[0]["state"] == "lapsed");
    let said = ends_with(&run(place.job(words, NOTE)), 125);
    assert!(said.contains("went silent") && said.contains("onlyonce runs release a 2024-07-14"), "{said}");
    ends_with(&place.runs("release a 2024-07-14"), 0);
    ends_with(&run(place.job(words, NOTE)), 0);
    assert_eq!(place.notes(), ["began", "2024-07-14 1"]);
}

#[test]
fn missed_periods_are_run_in_order_and_up_to_the_first_failure() {
    let place = Place::sqlite();
    let at =
        |day: u32| format!("--job a --every day --tz UTC --retention 3600d --at 2024-07-{day}T12:00:00Z");
    ends_with(&run(place.job(&format!("{} --catch-up 5", at(10)), NOTE)), 0);
    assert_eq!(place.notes(), ["2024-07-10 1"], "a job's first run has missed nothing");
    ends_with(&run(place.job(&at(12), NOTE)), 0);
    let failing = format!("{NOTE}; [ $ONLYONCE_PERIOD != 2024-07-14 ]");
    let said = ends_with(&run(place.job(&format!("{} --catch-up 3", at(16)), &failing)), 1);
    assert!(said.contains("1 older periods of a were missed as well"), "{said}");
    assert_eq!(place.notes()[2..], ["2024-07-13 1", "2024-07-14 1"]);
    ends_with(&run(place.job(&format!("{} --catch-up 9", at(16)), NOTE)), 0);
    assert_eq!(place.notes()[4..], ["2024-07-11 1", "2024-07-14 2", "2024-07-15 1", "2024-07-16 1"]);
}

/// A time that was added today was not missed yesterday.
#[test]
fn what_a_cron_expression_did_not_name_then_was_not_missed() {
    let place = Place::sqlite();
    let words = |at: &str| format!("--job a --tz UTC --retention 3600d --catch-up 9 --at 2024-07-{at}:00Z");
    for at in ["10T02:00", "12T02:00"] {
        ends_with(&run(place.cron_job("0 2 * * *", &words(at).replace("--catch-up 9", ""), NOTE)), 0);
    }
    ends_with(&run(place.cron_job("0 2,14 * * *", &words("13T14:00"), NOTE)), 0);
    let expected = ["10T02:00", "12T02:00", "11T02:00", "13T02:00", "13T14:00"];
    assert_eq!(place.notes(), expected.map(|at| format!("2024-07-{at} 1")));
    let rows = place.listed("--job a --limit 0");
    let missing = rows.iter().find(|row| row["state"] == "missing").unwrap();
    assert_eq!(missing["period"], "2024-07-14T02:00");
}

/// kubernetes #42649: after a hundred missed runs a job never started again.
#[test]
fn a_job_that_missed_hundreds_of_runs_starts_again() {
    let place = Place::sqlite();
    let words = |at: &str| format!("--job a --tz UTC --retention 3600d --at 2024-07-14T{at}:00Z");
    ends_with(&run(place.cron_job("* * * * *", &words("00:00"), NOTE)), 0);
    ends_with(&run(place.cron_job("* * * * *", &(words("12:00") + " --catch-up 2"), NOTE)), 0);
    assert_eq!(place.notes()[1..], ["2024-07-14T11:58 1", "2024-07-14T11:59 1", "2024-07-14T12:00 1"]);
}

/// kubernetes #121594: a daily job of 02:00 ran twice when the clock went back.
#[test]
fn the_repeated_hour_runs_a_daily_job_once_and_an_hourly_one_twice() {
    let place = Place::sqlite();
    for at in ["2024-10-27T02:00:00+02:00", "2024-10-27T02:00:00+01:00"] {
        let words = format!("--job daily --tz Europe/Berlin --at {at}");
        ends_with(&run(place.cron_job("0 2 * * *", &words, NOTE)), 0);
        ends_with(
            &run(place.job(&format!("--job hourly --every hour --tz Europe/Berlin --at {at}"), NOTE)),
            0,
        );
    }
    assert_eq!(place.notes(), ["2024-10-27T02:00 1", "2024-10-27T02+02:00 1", "2024-10-27T02+01:00 1"]);
}

#[test]
fn kubernetes_names_its_jobs_after_the_scheduled_minute() {
    let place = Place::sqlite();
    ends_with(&run(place.job("--job a --every day --tz UTC --at billing-28682640", NOTE)), 0);
    assert_eq!(place.notes(), ["2024-07-14 1"]);
    let said = ends_with(&run(place.job("--job a --every day --tz UTC --at billing-manual-1", NOTE)), 2);
    assert!(said.contains("Job that a CronJob started"), "{said}");
}

#[test]
fn signals_reach_the_command_and_its_end_is_the_guards() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC";
    let trapping = "for s in USR1 USR2 HUP; do trap \"echo got $s >> \\$NOTES\" $s; done; \
        trap 'echo got TERM >> $NOTES; exit 9' TERM; echo ready >> $NOTES; while :; do sleep 0.05; done";
    let job = place.job(words, trapping);
    // The tests themselves may run under nohup.
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(job.get_program()).args(job.get_args());
    command.env("NOTES", place.notes_file());
    let mut guard = Started::new(command);
    until("it is ready", || place.notes() == ["ready"]);
    for (signal, note) in [(Signal::USR1, "got USR1"), (Signal::USR2, "got USR2"), (Signal::HUP, "got HUP")] {
        guard.signal(signal);
        until(note, || place.notes().last().is_some_and(|last| last == note));
    }
    guard.signal(Signal::TERM);
    assert_eq!(guard.ended().0, Some(9));
    assert_eq!(place.notes(), ["ready", "got USR1", "got USR2", "got HUP", "got TERM"]);

    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::QUIT, 131)] {
        std::fs::remove_file(place.notes_file()).unwrap();
        let mut guard = Started::new(place.job(words, "echo ready >> $NOTES; exec sleep 60"));
        until("it is ready", || place.notes() == ["ready"]);
        guard.signal(signal);
        assert_eq!(guard.ended().0, Some(code));
    }
    ends_with(&run(place.job(words, "[ $ONLYONCE_ATTEMPT = 5 ]")), 0);
}

/// db-scheduler #365: a shutdown stopped the heartbeat while the work still ran.
#[test]
fn a_guard_that_is_told_to_end_keeps_the_lease_until_its_command_has_ended() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 4s";
    let script = "trap 'echo told >> $NOTES; sleep 6; echo ended >> $NOTES; exit 0' TERM
        echo ready >> $NOTES; while :; do sleep 0.05; done";
    let mut guard = Started::new(place.job(words, script));
    until("it is ready", || place.notes() == ["ready"]);
    guard.signal(Signal::TERM);
    until("it is told", || place.notes().len() == 2);
    let told = Instant::now();
    while told.elapsed() < Duration::from_secs(5) {
        ends_with(&run(place.job(&format!("{words} --busy-exit 75"), NOTE)), 75);
        thread::sleep(millis(300));
    }
    assert_eq!(guard.ended().0, Some(0));
    ends_with(&run(place.job(words, NOTE)), 0);
    assert_eq!(place.notes(), ["ready", "told", "ended"]);
}

/// `nohup onlyonce run …`: what was ignored stays so, for the command too.
#[test]
fn a_signal_that_was_ignored_from_the_start_stays_ignored() {
    let place = Place::sqlite();
    let job = place.job("--job a --every day", "echo ready >> $NOTES; sleep 2; echo ended >> $NOTES");
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(job.get_program()).args(job.get_args());
    command.env("NOTES", place.notes_file());
    let mut guard = Started::new(command);
    until("it is ready", || place.notes() == ["ready"]);
    guard.signal(Signal::HUP);
    assert_eq!(guard.ended().0, Some(0));
    assert_eq!(place.notes(), ["ready", "ended"]);
}

/// The command ends well, and the next one is not begun on a host that goes away.
#[test]
fn a_guard_that_is_told_to_end_catches_up_no_further() {
    let place = Place::sqlite();
    let at =
        |day: u32| format!("--job a --every day --tz UTC --retention 3600d --at 2024-07-{day}T12:00:00Z");
    ends_with(&run(place.job(&at(14), "true")), 0);
    let script = format!("trap 'exit 0' TERM; {NOTE}; for i in $(seq 100); do sleep 0.05; done");
    let mut guard = Started::new(place.job(&format!("{} --catch-up 5", at(17)), &script));
    until("the first is begun", || place.notes() == ["2024-07-15 1"]);
    guard.signal(Signal::TERM);
    let (code, said) = guard.ended();
    assert_eq!(place.notes(), ["2024-07-15 1"]);
    assert_eq!(code, Some(143), "{said}");
    assert!(said.contains("told to end before a:2024-07-16 was started"), "{said}");
    assert_eq!(place.listed("--job a")[1]["state"], "done");
    assert_eq!(place.listed("--job a")[2]["state"], "missing");
}

#[test]
fn a_start_that_is_told_to_end_while_it_waits_leaves_the_period_free() {
    let place = Place::sqlite();
    let words = |day: u32| format!("--job a --every day --tz UTC --at 2024-07-{day}T12:00:00Z");
    let _slow = Started::new(place.job(&words(14), "echo slow >> $NOTES; sleep 60"));
    until("the slow one runs", || place.notes() == ["slow"]);
    let mut waiting = Started::new(place.job(&words(15), NOTE));
    until("the other one waits", || place.listed("").len() == 2);
    thread::sleep(millis(200));
    waiting.signal(Signal::TERM);
    let (code, said) = waiting.ended();
    assert_eq!(code, Some(143), "{said}");
    assert_eq!(place.listed("").len(), 1);
}

/// Ctrl-C reaches the command once, and it can read the terminal.
#[test]
fn on_a_terminal_the_command_is_interrupted_once_and_can_read() {
    let place = Place::sqlite();
    // A second signal comes while the first is being noted, and is noted after it.
    let script = "trap 'sleep 0.3; echo int >> $NOTES' INT; read line; echo \"read $line\" >> $NOTES
        sleep 3 & p=$!; while kill -0 $p 2>/dev/null; do wait $p; done; echo end >> $NOTES";
    let job = place.job("--job a --every day", script);
    let master =
        rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let open = || std::fs::OpenOptions::new().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    // A session of its own, whose terminal this is.
    let mut command = Command::new("setsid");
    command.args(["--ctty", "--wait"]).arg(job.get_program()).args(job.get_args());
    command.env("NOTES", place.notes_file()).stdin(open()).stdout(open()).stderr(open());
    let mut guard = command.spawn().unwrap();
    let mut terminal = std::fs::File::from(master);
    // What is typed before the command reads waits in the terminal.
    terminal.write_all(b"typed\n").unwrap();
    until("it has read", || place.notes() == ["read typed"]);
    terminal.write_all(b"\x03").unwrap();
    until("it ends", || guard.try_wait().unwrap().is_some());
    assert_eq!(place.notes(), ["read typed", "int", "end"]);
    assert_eq!(guard.wait().unwrap().code(), Some(0));
}

#[test]
fn a_store_that_stays_away_ends_the_command_when_the_lease_does() {
    let server = Postgres::start("");
    let place = Place { folder: tempfile::tempdir().unwrap(), store: server.url(&server.database()) };
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 4s";
    let mut guard = Started::new(place.job(words, "echo command $$ >> $NOTES; exec sleep 60"));
    until("it runs", || noted(&place, "command").is_some());
    server.crash();
    let (code, said) = guard.ended();
    assert_eq!(code, Some(125), "{said}");
    assert!(!lives(noted(&place, "command").unwrap()));
    server.start_again();
    until("the next start takes over", || {
        run(place.job(&format!("{words} --busy-exit 75"), NOTE)).status.code() == Some(0)
    });
    assert_eq!(place.notes().last().unwrap(), "2024-07-14 2");
}

#[test]
fn a_store_that_is_away_for_less_than_the_lease_costs_nothing() {
    let server = Postgres::start("");
    let place = Place { folder: tempfile::tempdir().unwrap(), store: server.url(&server.database()) };
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 30s";
    let mut guard =
        Started::new(place.job(words, &format!("{NOTE}; while [ ! -e $NOTES.go ]; do sleep 0.05; done")));
    until("it runs", || place.notes().len() == 1);
    server.crash();
    server.start_again();
    std::fs::write(place.folder.path().join("notes.go"), "").unwrap();
    let (code, said) = guard.ended();
    assert_eq!(code, Some(0), "{said}");
    ends_with(&run(place.job(words, NOTE)), 0);
    assert_eq!(place.notes().len(), 1);
}

#[test]
fn a_store_that_is_away_from_the_start_runs_nothing() {
    let place =
        Place { folder: tempfile::tempdir().unwrap(), store: "sqlite:/no/such/folder/runs.db".into() };
    let mut guard = Started::new(place.job("--job a --every day", NOTE));
    let ended = happens_within(Duration::from_secs(60), || guard.0.try_wait().unwrap().is_some());
    assert!(ended, "it does not wait for ever");
    assert!(matches!(guard.ended().0, Some(2 | 125)));
    assert_eq!(place.notes().len(), 0);
}

#[test]
fn runs_are_listed_shown_and_released() {
    let place = Place::sqlite();
    for month in ["2024-03", "2024-05"] {
        let words =
            format!("--job billing --every month --tz Europe/Berlin --retention 3600d --period {month}");
        ends_with(&run(place.job(&words, "sleep 0.1")), 0);
    }
    let rows = place.listed("--job billing");
    let states: Vec<_> = rows
        .iter()
        .take(3)
        .map(|row| (row["period"].as_str().unwrap(), row["state"].as_str().unwrap()))
        .collect();
    assert_eq!(states, [("2024-03", "done"), ("2024-04", "missing"), ("2024-05", "done")]);
    assert_eq!(rows.last().unwrap()["state"], "due");
    let row = &rows[0];
    assert!(row["duration_ms"].as_u64().unwrap() >= 100, "{row}");
    assert_eq!((&row["exit_status"], &row["attempt"]), (&0.into(), &1.into()));
    assert_eq!(row["scheduled_at"], "2024-02-29T23:00:00Z");
    for member in ["host", "user", "pid", "started_at", "completed_at", "expires_at", "every", "zone"] {
        assert!(!row[member].is_null(), "{member}: {row}");
    }
    let since =
        place.listed("--job billing --every month --tz Europe/Berlin --since 2024-01-01T00:00:00Z --missing");
    let missing: Vec<_> = since.iter().take(3).map(|row| row["period"].as_str().unwrap()).collect();
    assert_eq!(missing, ["2024-02", "2024-04", "2024-06"]);
    let table = text(&place.runs("list").stdout);
    assert!(table.starts_with("STATE") && table.contains("missing  billing  2024-04"), "{table}");

    let shown = text(&place.runs("show billing 2024-03").stdout);
    assert!(shown.contains("exit_status   0") && shown.contains("zone          Europe/Berlin"), "{shown}");
    assert!(ends_with(&place.runs("show billing 2024-04"), 1).contains("no such run: billing:2024-04"));
    ends_with(&place.runs("release billing 2024-03"), 0);
    ends_with(&place.runs("release billing 2024-03"), 1);
    assert_eq!(place.listed("--job billing")[0]["period"], "2024-05");
}

#[test]
fn a_running_run_is_released_by_force_only() {
    let place = Place::sqlite();
    let words = "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 3s --overlap allow";
    let mut guard = Started::new(place.job(words, "echo command $$ >> $NOTES; exec sleep 60"));
    until("it runs", || noted(&place, "command").is_some());
    assert!(ends_with(&place.runs("release a 2024-07-14"), 2).contains("--force"));
    ends_with(&place.runs("release a 2024-07-14 --force"), 0);
    // At the next renewal the guard finds its lease gone, and stops the command.
    let (code, said) = guard.ended();
    assert_eq!(code, Some(125), "{said}");
    assert!(!lives(noted(&place, "command").unwrap()));
}

#[test]
fn without_a_zone_it_is_the_machines() {
    let place = Place::sqlite();
    let start = |zone: &str| {
        let mut command = place.job("--job a --every month --at 2024-07-01T03:59:00Z", NOTE);
        command.env("TZ", zone);
        run(command)
    };
    ends_with(&start("America/New_York"), 0);
    assert_eq!(place.notes(), ["2024-06 1"]);
    // One that has no name cannot be told from another.
    assert!(ends_with(&start("CET-1CEST"), 2).contains("--tz is needed"));
}

/// A container without /usr/share/zoneinfo.
#[test]
fn zones_are_known_where_the_system_has_none() {
    let place = Place::sqlite();
    let empty = tempfile::tempdir().unwrap();
    let mut command = place.job("--job a --every day --tz America/Sao_Paulo --at 2018-11-04T03:00:00Z", NOTE);
    command.env("TZDIR", empty.path());
    ends_with(&run(command), 0);
    assert_eq!(place.notes(), ["2018-11-04 1"]);
}

/// Guards of two hosts are killed in the middle of the run, and others take over, again and again.
#[test]
fn whatever_is_killed_no_two_commands_run_at_once_and_one_ends() {
    let place = Place::sqlite();
    let words =
        "--job a --every day --tz UTC --at 2024-07-14T12:00:00Z --lease 3s --grace 100ms --busy-exit 75";
    // Each looks for another one that is alive.
    let script = "for f in $NOTES.pid.*; do
            [ -e $f ] || continue
            grep -qs '^State:.[RSD]' /proc/${f##*.}/status && echo overlap ${f##*.} >> $NOTES; done
        : > $NOTES.pid.$$; echo began $ONLYONCE_ATTEMPT >> $NOTES; sleep 4; echo ended >> $NOTES";
    let began = |attempt: u32| place.notes().contains(&format!("began {attempt}"));
    let start = || [(); 2].map(|()| Started::new(place.job(words, script)));
    for kills in 0..4 {
        let mut guards = start();
        until("one of them takes over", || {
            if guards.iter_mut().all(|guard| guard.0.try_wait().unwrap().is_some()) {
                guards = start();
            }
            began(kills + 1)
        });
        thread::sleep(millis(u64::from(kills) * 150));
        for guard in &mut guards {
            guard.0.kill().unwrap();
            guard.0.wait().unwrap();
        }
    }
    until("the last one ends", || run(place.job(words, script)).status.code() == Some(0));
    let expected = ["began 1", "began 2", "began 3", "began 4", "began 5", "ended"];
    assert_eq!(place.notes(), expected);
}

#[test]
fn the_exit_status_of_a_command_that_a_signal_ended_is_128_and_its_number() {
    let place = Place::sqlite();
    let output = run(place.job("--job a --every day", "kill -KILL $$"));
    ends_with(&output, 137);
    assert_eq!(output.status.signal(), None);
}

/// The crontab line and the CronJob of the documentation, as they stand there but for the store and the script.
#[test]
fn the_documented_lines_work() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/jobs.md");
    let page = std::fs::read_to_string(page).unwrap();
    let place = Place::sqlite();
    let start = |words: Vec<String>| {
        let mut command = onlyonce();
        command.args(&words[1..]).env("ONLYONCE_STORE", &place.store);
        ends_with(&run(command), 0)
    };
    let line = page.lines().find(|line| line.contains("* *  onlyonce run")).expect("a crontab line");
    let mut words: Vec<String> = line.split_whitespace().skip(5).map(str::to_owned).collect();
    let store = words.iter().position(|word| word == "--store").unwrap();
    words.drain(store..store + 2);
    *words.last_mut().unwrap() = "/bin/true".into();
    assert_eq!(start(words), "");

    let (_, manifest) = page.split_once("command: ").expect("a manifest");
    let command = &manifest[..manifest.find(']').unwrap() + 1];
    let mut words: Vec<String> = serde_json::from_str(command).unwrap();
    words.iter_mut().for_each(|word| *word = word.replace("$(JOB_NAME)", "billing-28628760"));
    *words.last_mut().unwrap() = "/bin/true".into();
    start(words);
    let rows = place.listed("--job billing");
    assert_eq!((&rows[0]["period"], &rows[0]["state"]), (&"2024-06".into(), &"done".into()));
}

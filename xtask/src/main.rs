//! Every check of this repository as one command: `cargo xtask <job>`.

mod deps;
mod structure;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

/// A demo that takes longer than this hangs.
const DEMO_TIME_MAX: Duration = Duration::from_secs(120);

/// How large the program that people download may get.
const BINARY_BYTES_MAX: u64 = 25_000_000;

type Outcome = Result<(), String>;

struct Job {
    name: &'static str,
    about: &'static str,
    run: fn() -> Outcome,
}

/// In the order in which `ci` runs them: the quick ones first.
const JOBS: [Job; 7] = [
    Job { name: "fmt", about: "the code is formatted", run: fmt },
    Job { name: "deps", about: "crates depend on each other in one direction only", run: deps },
    Job {
        name: "structure",
        about: "pure modules stay pure, and what else a reader relies on",
        run: structure,
    },
    Job { name: "clippy", about: "no lint fires, in tests neither", run: clippy },
    Job { name: "docs", about: "the documentation builds without a warning", run: docs },
    Job { name: "test", about: "every test of every crate, doc tests too", run: test },
    Job { name: "demo", about: "the release build is small enough, and its demo runs", run: demo },
];

/// Takes too long for `ci`.
const SOAK: Job =
    Job { name: "soak", about: "kills, cuts and crashes at random for half an hour", run: soak };

/// Says nothing that passes or fails: figures, for whoever has an idle machine.
const BENCH: Job =
    Job { name: "bench", about: "measures what docs/performance.md is about, in a few minutes", run: bench };

const BENCH_FULL: Job = Job {
    name: "bench-full",
    about: "measures all of it, in an hour or more and 20 GB of disk",
    run: bench_full,
};

/// Not part of `ci`.
const BY_ITSELF: [&Job; 3] = [&SOAK, &BENCH, &BENCH_FULL];

/// How many times as often as in `test`.
const SOAK_FACTOR: &str = "40";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let outcome = match arguments.as_slice() {
        [name] if name == "ci" => ci(),
        [name] => match JOBS.iter().chain(BY_ITSELF).find(|job| job.name == name) {
            Some(job) => step(job),
            None => return usage(),
        },
        _ => return usage(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: cargo xtask <job>\n\n  {:<10} all of these, in this order", "ci");
    for Job { name, about, .. } in &JOBS {
        eprintln!("  {name:<10} {about}");
    }
    eprintln!("\nand by itself\n");
    for Job { name, about, .. } in BY_ITSELF {
        eprintln!("  {name:<10} {about}");
    }
    ExitCode::from(2)
}

fn ci() -> Outcome {
    let started = Instant::now();
    for job in &JOBS {
        step(job)?;
    }
    println!("\nall {} steps passed in {:.0?}", JOBS.len(), started.elapsed());
    Ok(())
}

fn step(Job { name, about, run }: &Job) -> Outcome {
    println!("\n== {name}: {about}");
    let started = Instant::now();
    let outcome = run();
    let verdict = if outcome.is_ok() { "passed" } else { "FAILED" };
    println!("== {name}: {verdict} in {:.1?}", started.elapsed());
    outcome.map_err(|reason| format!("\n{reason}\n\nfailed: {name}; alone: cargo xtask {name}"))
}

fn fmt() -> Outcome {
    run(cargo(["fmt", "--all", "--", "--check"]))
}

fn clippy() -> Outcome {
    run(cargo(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

fn docs() -> Outcome {
    // Libraries only: the program is called like one of them, and their pages would collide.
    let mut command = cargo(["doc", "--workspace", "--lib", "--no-deps", "--locked"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    run(command)
}

fn test() -> Outcome {
    // All failures of a run, not only those of the first crate.
    run(cargo(["test", "--workspace", "--locked", "--no-fail-fast"]))
}

fn soak() -> Outcome {
    let mut command =
        cargo(["test", "-p", "onlyonce-cli", "--locked", "--test", "crash", "--test", "postgres"]);
    command.env("ONLYONCE_SOAK", SOAK_FACTOR).args(["--", "--test-threads", "1", "random", "load", "killed"]);
    run(command)
}

fn bench() -> Outcome {
    measure("quick")
}

fn bench_full() -> Outcome {
    measure("full")
}

fn measure(extent: &str) -> Outcome {
    // By itself, so that the program is the one that people get.
    run(cargo(["build", "--release", "--locked"]))?;
    run(cargo(["run", "--release", "--locked", "-p", "onlyonce-bench", "--", extent]))
}

fn deps() -> Outcome {
    none(&deps::violations(&metadata()?)?)
}

fn structure() -> Outcome {
    none(&structure::violations(&root(), &metadata()?)?)
}

fn demo() -> Outcome {
    run(cargo(["build", "--release", "--locked"]))?;
    let target = metadata()?["target_directory"].as_str().map(PathBuf::from).ok_or("no target directory")?;
    let binary = target.join("release").join(format!("onlyonce{}", env::consts::EXE_SUFFIX));
    let bytes = binary.metadata().map_err(|error| format!("{}: {error}", binary.display()))?.len();
    println!("{bytes} bytes");
    if bytes >= BINARY_BYTES_MAX {
        return Err(format!("the program has {bytes} bytes, {BINARY_BYTES_MAX} are too many"));
    }
    run_within(cargo(["run", "--release", "--locked", "--", "demo"]), Some(DEMO_TIME_MAX))
}

fn none(violations: &[String]) -> Outcome {
    if violations.is_empty() { Ok(()) } else { Err(violations.join("\n")) }
}

/// The workspace as cargo sees it, the resolved dependencies included.
fn metadata() -> Result<Value, String> {
    let output = cargo(["metadata", "--locked", "--format-version", "1"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

/// The cargo that runs this, in the root of the workspace, with nobody to ask.
fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(root()).stdin(Stdio::null());
    command
}

fn run(command: Command) -> Outcome {
    run_within(command, None)
}

fn run_within(mut command: Command, time_max: Option<Duration>) -> Outcome {
    let shown = format!("{command:?}");
    println!("{shown}");
    let started = Instant::now();
    let mut child = command.spawn().map_err(|error| format!("{shown}: {error}"))?;
    let status = loop {
        let waited = match time_max {
            None => child.wait().map(Some),
            Some(_) => child.try_wait(),
        };
        if let Some(status) = waited.map_err(|error| format!("{shown}: {error}"))? {
            break status;
        }
        if time_max.is_some_and(|time_max| started.elapsed() > time_max) {
            let _ = child.kill();
            return Err(format!("{shown}: still running after {time_max:?}"));
        }
        sleep(Duration::from_millis(50));
    };
    if status.success() { Ok(()) } else { Err(format!("{shown}: {status}")) }
}

//! Measurements on real databases, each a comparison inside one run:
//! `cargo run --release -p onlyonce-bench -- NAME`.

mod bars;
mod chart;
mod forms;
mod http;
mod load;
mod machine;
mod memory;
mod place;
mod process;
mod report;
mod scale;
mod serve;
mod stats;
mod sweep;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use onlyonce_testkit::Postgres;
use tokio::runtime::{Builder, Runtime};

use http::{Arena, Pace};
use machine::Machine;
use report::Results;

const USAGE: &str = "usage: onlyonce-bench NAME [WORDS]

  quick  what the bars are about, in a few minutes
  full   everything, in an hour or more, and 20 GB of disk
  http   the part of full that goes over HTTP; with words, the comparisons whose titles contain them all:
         http Postgres first \"256 connections\"
  scale  the part of full that does not
  forms  executions in the layer and in one transaction
  rows   claims, replays and sweeps in small and large tables, of Postgres and SQLite or of the one that is named
  sweep  claims while a million expired keys are swept

quick, full, http and scale start the release build of `onlyonce` beside this program, and write a report into target/bench";

/// How long one side of a comparison runs before it is the other's turn.
const TURN: Duration = Duration::from_secs(2);

const PACE: Pace = Pace { rounds: 5, warm: Duration::from_millis(300), run: Duration::from_secs(1) };

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("onlyonce-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether there is such a measurement.
fn run(arguments: &[String]) -> Result<bool, Box<dyn Error>> {
    let Some((name, arguments)) = arguments.split_first() else { return Ok(false) };
    match name.as_str() {
        "quick" => all(name, &http::comparisons_quick(), Some(scale::QUICK))?,
        "full" => all(name, &http::comparisons_full(), Some(scale::FULL))?,
        "http" => all(name, &http::about(arguments, http::comparisons_full())?, None)?,
        "scale" => all(name, &[], Some(scale::FULL))?,
        "forms" => runtime()?.block_on(forms::measure()),
        "rows" => {
            let (on_postgres, on_sqlite) = match arguments {
                [] => (true, true),
                [name] if name == "postgres" => (true, false),
                [name] if name == "sqlite" => (false, true),
                _ => return Err("rows is of postgres, sqlite or, without a word, both".into()),
            };
            let rows = |on: bool, rows: &'static [u64]| if on { rows } else { &[] };
            let postgres_rows = rows(on_postgres, scale::FULL.postgres_rows);
            let sqlite_rows = rows(on_sqlite, scale::FULL.sqlite_rows);
            let extent = scale::Extent { postgres_rows, sqlite_rows, ..scale::FULL };
            let folder = temporary_folder()?;
            runtime()?.block_on(scale::rows(folder.path(), extent));
        }
        "sweep" => {
            runtime()?.block_on(sweep::figures(&Arc::new(Postgres::start(""))));
        }
        // The roles of the other processes of a measurement. One thread is enough to generate load, and
        // leaves the rest of the machine to those who are measured.
        "load" => {
            let plan = load::Plan::parse(arguments)?;
            Builder::new_current_thread().enable_all().build()?.block_on(load::run(plan))?;
        }
        "serve" => runtime()?.block_on(serve::run(arguments))?,
        "hold" => memory::run(arguments)?,
        _ => return Ok(false),
    }
    Ok(true)
}

fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread().enable_all().build()
}

fn all(
    name: &str,
    comparisons: &[http::Comparison],
    extent: Option<scale::Extent>,
) -> Result<(), Box<dyn Error>> {
    let started = Instant::now();
    let program = beside("onlyonce")?;
    let folder = temporary_folder()?;
    let mut results = Results::default();
    let mut machine = {
        let postgres = Postgres::start("");
        let mut arena = Arena::start(&postgres, folder.path(), &program)?;
        let machine = Machine::look(&postgres, folder.path());
        println!("{machine}");
        results.http = arena.measure(comparisons, PACE)?;
        machine
    };
    if let Some(extent) = extent {
        results.memory = Some(memory::measure(&program, folder.path())?);
        results.scale = runtime()?.block_on(scale::measure(folder.path(), extent));
    }
    machine.add(format!("{} rounds of {:?} each, after {:?} to warm up", PACE.rounds, PACE.run, PACE.warm));
    machine.add(format!("load of the machine after the run: {}", machine::load_average()));
    write(name, &results, &machine, &program)?;
    println!("\nin {:.0?}", started.elapsed());
    Ok(())
}

fn temporary_folder() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("onlyonce-bench-").tempdir()
}

/// A program in the same folder as this one: `target/release`.
fn beside(name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let path = std::env::current_exe()?.with_file_name(name);
    if path.exists() {
        Ok(path)
    } else {
        Err(format!("{} is missing: cargo build --release", path.display()).into())
    }
}

fn write(name: &str, results: &Results, machine: &Machine, program: &Path) -> Result<(), Box<dyn Error>> {
    let folder = program.ancestors().nth(2).ok_or("no target directory")?.join("bench");
    std::fs::create_dir_all(&folder)?;
    let bars = bars::bars(results);
    let (report, chart) = (folder.join(format!("{name}.md")), format!("{name}.svg"));
    std::fs::write(&report, report::markdown(results, &bars, machine, &chart))?;
    if !results.http.is_empty() {
        std::fs::write(folder.join(chart), chart::svg(&results.http))?;
    }
    println!("\n| bar | required | measured | |\n|---|---|---|---|");
    for bar in &bars {
        println!("{bar}");
    }
    println!("\n{}", report.display());
    Ok(())
}

//! Measurements on real databases, each a comparison inside one run:
//! `cargo run --release -p onlyonce-bench -- NAME`.

mod forms;
mod sweep;

use std::process::ExitCode;
use std::time::Duration;

#[tokio::main]
async fn main() -> ExitCode {
    let name = std::env::args().nth(1).unwrap_or_default();
    match name.as_str() {
        "forms" => forms::measure().await,
        "sweep" => sweep::measure().await,
        _ => {
            eprintln!(
                "usage: onlyonce-bench NAME\n\n  forms  executions in the layer and in one transaction\n  \
                 sweep  claims while a million expired keys are swept"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// The value below which this part of all values lie, in percent.
fn percentile<T: Copy>(sorted: &[T], part: usize) -> T {
    sorted[(sorted.len() * part / 100).min(sorted.len() - 1)]
}

/// How long one side of a comparison runs before it is the other's turn.
const TURN: Duration = Duration::from_secs(2);

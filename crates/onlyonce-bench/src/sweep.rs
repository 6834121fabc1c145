//! Claims with a million expired keys in the table, quiet and during the sweep, in turns.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use onlyonce_testkit::Postgres;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::TURN;
use crate::place::{A_DAY, ANSWER_BYTES, Copies, FINGERPRINT, Place, operation};
use crate::report::{time, whole};
use crate::stats::percentile;

const ROUNDS: usize = 5;
const CONCURRENT: usize = 16;
const EXPIRED_ROWS: u64 = 1_000_000;
/// More than a turn's sweep gets through.
const SWEPT_ROWS_MAX: u64 = 190_000;

/// How long claims took, of all rounds together.
pub(crate) struct SweepFigures {
    quiet: Latencies,
    swept: Latencies,
    rows_swept: u64,
}

#[derive(Clone, Copy)]
struct Latencies {
    claims: usize,
    p50: Duration,
    p99: Duration,
}

impl SweepFigures {
    /// p99 during the sweep to p99 in quiet.
    pub(crate) fn ratio(&self) -> f64 {
        self.swept.p99.as_secs_f64() / self.quiet.p99.as_secs_f64()
    }
}

pub(crate) async fn figures(server: &Arc<Postgres>) -> SweepFigures {
    println!("\nclaims while a million expired rows are swept");
    let place = Place::postgres(server).await;
    // Another instance's sweep, as far as this one's claims are concerned.
    let sweeps = place.again().await;
    place.execute("template", ANSWER_BYTES, &A_DAY).await;
    place.copy("template", EXPIRED_ROWS, Copies::Expired).await;
    place.settle().await;
    let (mut quiet, mut swept, mut rows_swept) = (Vec::new(), Vec::new(), 0);
    for round in 0..ROUNDS {
        claim_for_a_turn(&place, &format!("quiet-{round}"), &mut quiet).await;
        let sweeping = tokio::spawn(sweep(sweeps.clone()));
        claim_for_a_turn(&place, &format!("swept-{round}"), &mut swept).await;
        let ended_early = sweeping.is_finished();
        let rows = sweeping.await.expect("no panic");
        println!("  round {round}: {rows} rows swept{}", if ended_early { ", ended early" } else { "" });
        rows_swept += rows;
    }
    let figures = SweepFigures { quiet: latencies(quiet), swept: latencies(swept), rows_swept };
    println!("{figures}");
    figures
}

async fn sweep(place: Place) -> u64 {
    let started = Instant::now();
    let mut removed = 0;
    while removed < SWEPT_ROWS_MAX && started.elapsed() < TURN {
        removed += place.sweep().await;
    }
    removed
}

async fn claim_for_a_turn(place: &Place, name: &str, times: &mut Vec<Duration>) {
    let started = Instant::now();
    let mut claiming = JoinSet::new();
    for claimant in 0..CONCURRENT {
        let (place, name) = (place.clone(), format!("{name}-{claimant}"));
        claiming.spawn(async move {
            let mut times = Vec::new();
            while started.elapsed() < TURN {
                let payment = operation(&format!("{name}-{}", times.len()));
                let asked = Instant::now();
                place.engine.claim(&payment, FINGERPRINT, &A_DAY).await.expect("a claim");
                times.push(asked.elapsed());
            }
            times
        });
    }
    times.extend(claiming.join_all().await.into_iter().flatten());
}

fn latencies(mut times: Vec<Duration>) -> Latencies {
    times.sort_unstable();
    Latencies { claims: times.len(), p50: percentile(&times, 50), p99: percentile(&times, 99) }
}

impl fmt::Display for SweepFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| Postgres, {CONCURRENT} callers | claims | p50 | p99 |\n|---|---:|---:|---:|")?;
        let rows = format!("while {} rows are swept", whole(self.rows_swept as f64));
        for (when, Latencies { claims, p50, p99 }) in [("quiet", self.quiet), (&rows, self.swept)] {
            let (p50, p99) = (time(p50.as_secs_f64()), time(p99.as_secs_f64()));
            writeln!(f, "| {when} | {} | {p50} | {p99} |", whole(claims as f64))?;
        }
        Ok(())
    }
}

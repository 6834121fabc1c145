//! Claims, replays and sweeps in small and large tables, what a key takes on disk, and whether the table stays
//! small while keys come and go.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use onlyonce_core::{Claimed, Lapse, Policy};
use onlyonce_testkit::Postgres;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use uuid::Builder;

use crate::http::Database;
use crate::place::{A_DAY, ANSWER_BYTES, Copies, FINGERPRINT, Place, operation};
use crate::report::whole;
use crate::stats::{SplitMix, Spread};
use crate::sweep::{self, SweepFigures};

const CONCURRENT: u64 = 64;
/// Replays are of these, which were executed as the table was being filled.
const KEYS_SPREAD: u64 = 10_000;
/// The table is filled in so many parts, with keys to replay after each.
const FILLS: u64 = 20;
/// From so many rows a table is about the same with the claims that are made in it.
const ROWS_MANY: u64 = 1_000_000;
/// How many expired rows each round of sweeping has before it.
const EXPIRED_ROWS: u64 = 20_000;
/// Keys that are weighed.
const WEIGHED_KEYS: u64 = 20_000;
const WEIGHED_ANSWER_BYTES: [usize; 3] = [0, 1024, 16 * 1024];

/// How much is measured.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) postgres_rows: &'static [u64],
    pub(crate) sqlite_rows: &'static [u64],
    pub(crate) rounds: usize,
    pub(crate) turn: Duration,
    /// So many keys come and go; none if it is zero.
    pub(crate) cycles: u64,
}

pub(crate) const QUICK: Extent = Extent {
    postgres_rows: &[10_000, 1_000_000],
    sqlite_rows: &[],
    rounds: 3,
    turn: Duration::from_secs(1),
    cycles: 0,
};

pub(crate) const FULL: Extent = Extent {
    postgres_rows: &[10_000, 1_000_000, 10_000_000],
    sqlite_rows: &[10_000, 1_000_000, 10_000_000],
    rounds: 5,
    turn: Duration::from_secs(2),
    cycles: 1_000_000,
};

/// What was found.
#[derive(Default)]
pub(crate) struct Scale {
    at_rows: Vec<AtRows>,
    weights: Vec<Weight>,
    sweep: Option<SweepFigures>,
    cycles: Vec<Cycles>,
}

/// In a table of this size, each per second.
struct AtRows {
    database: Database,
    rows: u64,
    claims: Spread,
    claims_in_order: Spread,
    replays: Spread,
    swept_rows: Spread,
}

struct Weight {
    database: Database,
    answer_bytes: usize,
    bytes_per_key: u64,
}

/// Keys that were claimed, completed, expired and swept.
struct Cycles {
    database: Database,
    many: u64,
    elapsed: Duration,
    samples: Vec<Sample>,
}

#[derive(Clone, Copy)]
struct Sample {
    done: u64,
    bytes: u64,
    /// Of Postgres.
    vacuums: Option<(u64, u64)>,
}

impl Scale {
    /// With keys in no order, and with UUIDs of version 7.
    pub(crate) fn claims_at_ten_million(&self) -> Option<[f64; 2]> {
        let at = |rows| self.at_rows.iter().find(|at| at.database == Database::Postgres && at.rows == rows);
        let (large, small) = (at(10_000_000)?, at(10_000)?);
        let of = |claims: fn(&AtRows) -> Spread| claims(large).median / claims(small).median;
        Some([of(|at| at.claims), of(|at| at.claims_in_order)])
    }

    pub(crate) fn sweep_p99(&self) -> Option<f64> {
        self.sweep.as_ref().map(SweepFigures::ratio)
    }
}

pub(crate) async fn measure(folder: &Path, extent: Extent) -> Scale {
    let server = Arc::new(Postgres::start(""));
    let mut scale = Scale { sweep: Some(sweep::figures(&server).await), ..Scale::default() };
    for on in [Database::Postgres, Database::Sqlite] {
        let place = async |name: &str| match on {
            Database::Postgres => Place::postgres(&server).await,
            Database::Sqlite => Place::sqlite(folder.join(format!("{name}.db"))).await,
        };
        for answer_bytes in WEIGHED_ANSWER_BYTES {
            scale.weights.push(weigh(&place(&format!("weight-{answer_bytes}")).await, answer_bytes).await);
        }
        if extent.cycles > 0 {
            scale.cycles.push(cycle(&place("cycles").await, extent.cycles).await);
        }
        let all_rows = if on == Database::Postgres { extent.postgres_rows } else { extent.sqlite_rows };
        scale.at_rows.extend(tables(place, all_rows, extent).await);
    }
    scale
}

/// The part with small and large tables.
pub(crate) async fn rows(folder: &Path, extent: Extent) {
    if !extent.postgres_rows.is_empty() {
        let server = Arc::new(Postgres::start(""));
        tables(async |_: &str| Place::postgres(&server).await, extent.postgres_rows, extent).await;
    }
    let file = async |name: &str| Place::sqlite(folder.join(format!("{name}.db"))).await;
    tables(file, extent.sqlite_rows, extent).await;
}

async fn tables(place: impl AsyncFn(&str) -> Place, all_rows: &[u64], extent: Extent) -> Vec<AtRows> {
    let mut filled = Vec::new();
    for rows in all_rows {
        filled.push(Filled::new(place(&format!("rows-{rows}")).await, *rows).await);
    }
    at_rows(&filled, extent).await
}

/// A table with so many live rows.
struct Filled {
    place: Place,
    rows: u64,
    keys: u64,
}

impl Filled {
    async fn new(place: Place, rows: u64) -> Self {
        println!("\nfilling {} with {} rows", place.database(), whole(rows as f64));
        let keys = KEYS_SPREAD.min(rows / 10);
        place.execute("template", ANSWER_BYTES, &A_DAY).await;
        for fill in 0..FILLS {
            place.copy("template", (rows - keys) / FILLS, Copies::Live).await;
            let of_this_fill = keys / FILLS;
            execute_each(&place, of_this_fill, ANSWER_BYTES, &A_DAY, move |number| {
                format!("replayed-{}", fill * of_this_fill + number)
            })
            .await;
        }
        place.settle().await;
        Self { place, rows, keys: keys / FILLS * FILLS }
    }

    async fn claims(
        &self,
        turn: Duration,
        fresh: impl Fn(u64, u64) -> String + Clone + Send + 'static,
    ) -> f64 {
        let place = self.place.clone();
        per_second(turn, move |claimant, number| {
            let (place, key) = (place.clone(), operation(&fresh(claimant, number)));
            async move {
                let claimed = place.engine.claim(&key, FINGERPRINT, &A_DAY).await.expect("a claim");
                assert!(matches!(claimed, Claimed::Execute(_)), "the key is fresh");
            }
        })
        .await
    }

    async fn replays(&self, turn: Duration, round: usize) -> f64 {
        let (place, keys) = (self.place.clone(), self.keys);
        per_second(turn, move |claimant, number| {
            let place = place.clone();
            let seed = ((round as u64) << 48) | (claimant << 32) | number;
            let key = format!("replayed-{}", SplitMix(seed).next() % keys);
            async move { assert!(place.replays(&key).await, "{key} was executed") }
        })
        .await
    }

    /// Rows a second, until none is left.
    async fn swept_rows(&self) -> f64 {
        self.place.copy("template", EXPIRED_ROWS, Copies::Expired).await;
        let (started, mut removed) = (Instant::now(), 0);
        loop {
            match self.place.sweep().await {
                0 => return removed as f64 / started.elapsed().as_secs_f64(),
                rows => removed += rows,
            }
        }
    }
}

async fn at_rows(filled: &[Filled], extent: Extent) -> Vec<AtRows> {
    let mut rounds = vec![[const { Vec::new() }; 4]; filled.len()];
    for round in 0..extent.rounds {
        for in_order in [false, true] {
            for (table, rounds) in filled.iter().zip(&mut rounds) {
                let seed =
                    move |claimant: u64, number: u64| ((round as u64) << 48) | (claimant << 32) | number;
                rounds[usize::from(in_order)].push(if in_order {
                    table.claims(extent.turn, move |claimant, number| uuid_now(seed(claimant, number))).await
                } else {
                    let key = move |claimant, number| format!("claimed-{}", seed(claimant, number));
                    table.claims(extent.turn, key).await
                });
                // Nothing finds them but a scan of the whole table. In a large one they may stay.
                if table.rows < ROWS_MANY {
                    table.place.forget_claims().await;
                }
            }
        }
        for (table, rounds) in filled.iter().zip(&mut rounds) {
            rounds[2].push(table.replays(extent.turn, round).await);
        }
        for (table, rounds) in filled.iter().zip(&mut rounds) {
            rounds[3].push(table.swept_rows().await);
        }
    }
    let of_table = |(table, rounds): (&Filled, [Vec<f64>; 4])| {
        let [claims, claims_in_order, replays, swept_rows] = rounds.map(Spread::of);
        let (database, rows) = (table.place.database(), table.rows);
        let at = AtRows { database, rows, claims, claims_in_order, replays, swept_rows };
        println!("{at}");
        at
    };
    filled.iter().zip(rounds).map(of_table).collect()
}

/// A UUID of version 7 of this moment, another one for another seed.
fn uuid_now(seed: u64) -> String {
    let mut random = [0; 10];
    random[..8].copy_from_slice(&SplitMix(seed).next().to_be_bytes());
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Builder::from_unix_timestamp_millis(since_epoch.as_millis() as u64, &random).into_uuid().to_string()
}

async fn weigh(place: &Place, answer_bytes: usize) -> Weight {
    let before = place.bytes().await;
    execute_each(place, WEIGHED_KEYS, answer_bytes, &A_DAY, |number| format!("order-{number:026}")).await;
    place.settle().await;
    let bytes_per_key = place.bytes().await.saturating_sub(before) / WEIGHED_KEYS;
    println!("{}: {bytes_per_key} bytes for a key with an answer of {answer_bytes}", place.database());
    Weight { database: place.database(), answer_bytes, bytes_per_key }
}

/// A key expires as it is completed.
const CYCLE: Policy =
    Policy { lease: Duration::from_secs(5), retention: Duration::ZERO, on_lapse: Lapse::Rerun };
const SWEEP_PAUSE: Duration = Duration::from_millis(500);
const SAMPLES: u64 = 10;

async fn cycle(place: &Place, many: u64) -> Cycles {
    println!("\n{}: {} keys come and go", place.database(), whole(many as f64));
    let started = Instant::now();
    let ended = Arc::new(AtomicBool::new(false));
    let sweeping = tokio::spawn(sweep_until(place.clone(), Arc::clone(&ended)));
    let mut samples = Vec::new();
    for sample in 0..SAMPLES {
        let each_sample = many / SAMPLES;
        execute_each(place, each_sample, ANSWER_BYTES, &CYCLE, move |number| {
            format!("cycle-{}", sample * each_sample + number)
        })
        .await;
        let done = (sample + 1) * each_sample;
        samples.push(Sample { done, bytes: place.bytes().await, vacuums: place.vacuums().await });
    }
    ended.store(true, Ordering::Relaxed);
    let elapsed = started.elapsed();
    sweeping.await.expect("no panic");
    let cycles = Cycles { database: place.database(), many, elapsed, samples };
    print!("{cycles}");
    cycles
}

async fn sweep_until(place: Place, ended: Arc<AtomicBool>) {
    while !ended.load(Ordering::Relaxed) {
        while place.sweep().await > 0 {}
        sleep(SWEEP_PAUSE).await;
    }
}

/// Runs so many operations that do nothing.
async fn execute_each(
    place: &Place,
    many: u64,
    answer_bytes: usize,
    policy: &Policy,
    key: impl Fn(u64) -> String + Clone + Send + 'static,
) {
    let (place, policy) = (place.clone(), *policy);
    each(many, move |number| {
        let (place, key) = (place.clone(), key(number));
        async move { place.execute(&key, answer_bytes, &policy).await }
    })
    .await;
}

/// Does it once for each number, so many at a time.
async fn each<F, Done>(many: u64, work: F)
where
    F: Fn(u64) -> Done + Clone + Send + 'static,
    Done: Future<Output = ()> + Send + 'static,
{
    let next = Arc::new(AtomicU64::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..CONCURRENT {
        let (next, work) = (Arc::clone(&next), work.clone());
        workers.spawn(async move {
            loop {
                match next.fetch_add(1, Ordering::Relaxed) {
                    number if number < many => work(number).await,
                    _ => return,
                }
            }
        });
    }
    workers.join_all().await;
}

/// How often it was done in this time, with the numbers of the worker and of its call.
async fn per_second<F, Done>(turn: Duration, work: F) -> f64
where
    F: Fn(u64, u64) -> Done + Clone + Send + 'static,
    Done: Future<Output = ()> + Send + 'static,
{
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for worker in 0..CONCURRENT {
        let work = work.clone();
        workers.spawn(async move {
            let mut done = 0;
            while started.elapsed() < turn {
                work(worker, done).await;
                done += 1;
            }
            done
        });
    }
    let done: u64 = workers.join_all().await.into_iter().sum();
    done as f64 / started.elapsed().as_secs_f64()
}

impl fmt::Display for AtRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { database, rows, claims, claims_in_order, replays, swept_rows } = self;
        let cell = |Spread { median, min, max }: &Spread| {
            format!("{} ({}..{})", whole(*median), whole(*min), whole(*max))
        };
        write!(f, "| {database} | {} |", whole(*rows as f64))?;
        for spread in [claims, claims_in_order, replays, swept_rows] {
            write!(f, " {} |", cell(spread))?;
        }
        Ok(())
    }
}

impl fmt::Display for Cycles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { database, many, elapsed, samples } = self;
        let rate = *many as f64 / elapsed.as_secs_f64();
        writeln!(
            f,
            "\n{database}: {} keys in {elapsed:.0?}, {} a second\n",
            whole(*many as f64),
            whole(rate)
        )?;
        writeln!(f, "| keys so far | table and indexes, MiB | dead rows | automatic vacuums |")?;
        writeln!(f, "|---:|---:|---:|---:|")?;
        for Sample { done, bytes, vacuums } in samples {
            let (dead, vacuums) = vacuums.map_or_else(
                || ("".into(), "".into()),
                |(dead, vacuums)| (whole(dead as f64), vacuums.to_string()),
            );
            writeln!(f, "| {} | {} | {dead} | {vacuums} |", whole(*done as f64), bytes >> 20)?;
        }
        Ok(())
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.at_rows.is_empty() {
            writeln!(f, "{AT_ROWS}")?;
        }
        for at in &self.at_rows {
            writeln!(f, "{at}")?;
        }
        if let Some(sweep) = &self.sweep {
            writeln!(f, "\n## Claims while a million expired rows are swept\n\n{sweep}")?;
        }
        if !self.weights.is_empty() {
            writeln!(f, "\n## Bytes for a key on disk\n\nIndexes included.\n")?;
            writeln!(f, "| | bytes of its answer | bytes on disk |\n|---|---:|---:|")?;
        }
        for Weight { database, answer_bytes, bytes_per_key } in &self.weights {
            let (answer, disk) = (whole(*answer_bytes as f64), whole(*bytes_per_key as f64));
            writeln!(f, "| {database} | {answer} | {disk} |")?;
        }
        if !self.cycles.is_empty() {
            writeln!(f, "{CYCLES}")?;
        }
        for cycles in &self.cycles {
            write!(f, "{cycles}")?;
        }
        Ok(())
    }
}

const AT_ROWS: &str = "
## Small and large tables

The store alone, without HTTP, 64 callers: claims of fresh keys in no order and of fresh UUIDs of version 7, replays of
keys that lie all over the table, and expired rows removed by one sweep; each a second, median of the rounds, lowest and
highest in brackets.

| | rows | claims/s | claims/s, UUIDv7 | replays/s | rows swept/s |
|---|---:|---:|---:|---:|---:|";

const CYCLES: &str = "
## Keys that come and go

Each is claimed, completed, expired and swept, 64 callers as fast as they can. They expire as they are completed;
Postgres's sweep finds them when their lease would have ended, five seconds after the claim.";

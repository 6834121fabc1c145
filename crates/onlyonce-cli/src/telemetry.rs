//! What can be watched: metrics for Prometheus, and logs.

use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::Duration;

use clap::ValueEnum;
use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use onlyonce::metric;
use tokio::time::{MissedTickBehavior, interval};
use tracing_subscriber::EnvFilter;

/// How long store calls take, by `call` and `result`.
pub const STORE_SECONDS: &str = "onlyonce_store_seconds";

/// How often measured values are put into their buckets, on the local clock. Until then, or until the next
/// scrape, each is kept by itself.
pub(crate) const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// From a read in memory to the longest that a call may take.
const STORE_SECONDS_BUCKETS: [f64; 14] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// The process's metrics, installed by the first call. `None` if the process has another recorder.
pub(crate) fn metrics() -> Option<&'static PrometheusHandle> {
    static HANDLE: OnceLock<Option<PrometheusHandle>> = OnceLock::new();
    let handle = HANDLE.get_or_init(|| {
        let builder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Full(STORE_SECONDS.to_owned()), &STORE_SECONDS_BUCKETS)
            .ok()?;
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).ok()?;
        describe();
        Some(handle)
    });
    handle.as_ref()
}

/// Runs `upkeep` over and over. Nothing else does if nobody scrapes, and the values would pile up.
pub(crate) async fn upkeep(every: Duration, mut upkeep: impl FnMut()) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        upkeep();
    }
}

/// Every counter stands at zero from the first scrape, so that its first step can be seen.
fn describe() {
    describe_counter!(metric::CLAIMS, "Claims of a key, by what they were answered.");
    for answer in metric::CLAIM_ANSWERS {
        counter!(metric::CLAIMS, "answer" => answer).absolute(0);
    }
    describe_gauge!(metric::IN_FLIGHT, "Guarded operations that are running.");
    gauge!(metric::IN_FLIGHT).set(0.0);
    for (name, description) in [
        (metric::LOST_LEASES, "Operations whose key was another's when they ended."),
        (metric::RECORD_FAILURES, "Outcomes that could not be recorded before their lease ended."),
        (metric::SWEPT_ROWS, "Expired keys that were removed."),
        (metric::SWEEP_FAILURES, "Sweeps that the store did not carry out."),
    ] {
        describe_counter!(name, description);
        counter!(name).absolute(0);
    }
    describe_histogram!(STORE_SECONDS, Unit::Seconds, "How long store calls took, by call and result.");
}

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people; in colour on a terminal.
    #[default]
    Text,
    /// One JSON object a line, for programs.
    Json,
}

/// Writes logs to standard error from now on. `ONLYONCE_LOG`, or else `RUST_LOG`, filters them; without
/// either, `level` and above is written.
pub fn start_logs(format: LogFormat, level: &str) {
    let directives = ["ONLYONCE_LOG", "RUST_LOG"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
        .unwrap_or_else(|| level.to_owned());
    let filter = EnvFilter::try_new(&directives).unwrap_or_else(|error| {
        eprintln!("onlyonce: the log filter {directives:?} is ignored: {error}");
        EnvFilter::new(level)
    });
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // A process that embeds the proxy may have its own.
    drop(started);
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn upkeep_goes_on() {
        let runs = AtomicUsize::new(0);
        let count = || {
            runs.fetch_add(1, Ordering::Relaxed);
        };
        let ended = timeout(Duration::from_millis(200), upkeep(Duration::from_millis(1), count)).await;
        assert!(ended.is_err() && runs.load(Ordering::Relaxed) >= 3);
    }
}

//! What the figures must be, as ratios inside one run.

use std::fmt;

use crate::http::{Contestant, Database, Lane, Measured};
use crate::load::Workload;
use crate::memory::Memory;
use crate::report::Results;

/// One requirement and what was measured.
pub(crate) struct Bar {
    name: &'static str,
    required: Required,
    /// `None` if this run did not measure it.
    measured: Option<f64>,
    unit: &'static str,
}

#[derive(Clone, Copy)]
enum Required {
    AtLeast(f64),
    AtMost(f64),
}

use Required::{AtLeast, AtMost};

impl Bar {
    /// `None` if it was not measured.
    fn is_met(&self) -> Option<bool> {
        let measured = self.measured?;
        Some(match self.required {
            AtLeast(bound) => measured >= bound,
            AtMost(bound) => measured <= bound,
        })
    }
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, required, measured, unit } = self;
        let required = match required {
            AtLeast(bound) => format!("at least {bound}{unit}"),
            AtMost(bound) => format!("at most {bound}{unit}"),
        };
        let measured =
            measured.map_or_else(|| "not measured".to_owned(), |value| format!("{value:.2}{unit}"));
        let verdict = match self.is_met() {
            Some(true) => "met",
            Some(false) => "**not met**",
            None => "",
        };
        write!(f, "| {name} | {required} | {measured} | {verdict} |")
    }
}

/// All bars, in the order of the report.
pub(crate) fn bars(results: &Results) -> Vec<Bar> {
    let http = Http(&results.http);
    let times = |name, required, measured| Bar { name, required, measured, unit: " ×" };
    let first = |on, connections| (on, Workload::First, connections);
    let postgres = |connections| first(Database::Postgres, connections);
    vec![
        times(
            "Postgres, first executions, 1 connection: median latency of the layer to hand's",
            AtMost(1.15),
            http.layer_to_hand(postgres(1), |lane| lane.p50.median),
        ),
        times(
            "Postgres, first executions, 64 connections: throughput of the layer to hand's",
            AtLeast(2.0),
            http.layer_to_hand(postgres(64), |lane| lane.per_second.median),
        ),
        times(
            "Postgres, first executions, 256 connections: throughput of the layer to hand's",
            AtLeast(4.0),
            http.layer_to_hand(postgres(256), |lane| lane.per_second.median),
        ),
        times(
            "the same: p99 of the layer to hand's",
            AtMost(1.0),
            http.layer_to_hand(postgres(256), |lane| lane.p99.median),
        ),
        times(
            "Postgres, replays, 64 connections: throughput of the layer to hand's",
            AtLeast(1.5),
            http.layer_to_hand((Database::Postgres, Workload::Replay, 64), |lane| lane.per_second.median),
        ),
        times(
            "SQLite, first executions, 256 connections, full durability: throughput of the layer to one \
             transaction per step",
            AtLeast(6.0),
            http.layer_to_hand(first(Database::Sqlite, 256), |lane| lane.per_second.median),
        ),
        times(
            "proxy, unguarded, 64 connections: throughput to nginx's before the same upstream",
            AtLeast(0.9),
            http.proxies((Contestant::Proxy, Workload::Unguarded), (Contestant::Nginx, Workload::Unguarded)),
        ),
        times(
            "proxy, replays from SQLite, 64 connections: throughput to its own unguarded",
            AtLeast(0.6),
            http.proxies((Contestant::Proxy, Workload::Replay), (Contestant::Proxy, Workload::Unguarded)),
        ),
        times(
            "Postgres, claims at 10 million rows to those at 10 thousand, keys in no order: throughput",
            AtLeast(0.75),
            results.scale.claims_at_ten_million().map(|[in_no_order, _]| in_no_order),
        ),
        times(
            "the same, keys that are UUIDs of version 7",
            AtLeast(0.75),
            results.scale.claims_at_ten_million().map(|[_, in_order]| in_order),
        ),
        times(
            "Postgres, p99 of claims while a million expired rows are swept to quiet",
            AtMost(2.0),
            results.scale.sweep_p99(),
        ),
        Bar {
            name: "proxy, memory for 1,000 guarded requests in flight",
            required: AtMost(20.0),
            measured: results.memory.as_ref().and_then(Memory::mib_per_thousand),
            unit: " MiB",
        },
    ]
}

struct Http<'a>(&'a [Measured]);

impl Http<'_> {
    fn layer_to_hand(
        &self,
        (database, workload, connections): (Database, Workload, usize),
        of: fn(&Measured) -> f64,
    ) -> Option<f64> {
        let figure = |who| Some(of(self.find("", Lane { who, database, workload }, connections)?));
        Some(figure(Contestant::Layer)? / figure(Contestant::Hand)?)
    }

    fn proxies(&self, one: (Contestant, Workload), other: (Contestant, Workload)) -> Option<f64> {
        let figure = |(who, workload)| {
            let lane = Lane { who, database: Database::Sqlite, workload };
            Some(self.find("proxies", lane, 64)?.per_second.median)
        };
        Some(figure(one)? / figure(other)?)
    }

    fn find(&self, title: &str, lane: Lane, connections: usize) -> Option<&Measured> {
        self.0.iter().find(|measured| {
            measured.lane == lane
                && measured.connections == connections
                && measured.answer_bytes == 1024
                && measured.title.starts_with(title)
        })
    }
}

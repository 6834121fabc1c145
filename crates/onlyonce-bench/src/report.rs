//! The figures as a person reads them: on screen, and as Markdown.

use std::fmt::Write as _;
use std::time::Duration;

use crate::bars::Bar;
use crate::http::{Contestant, Cpu, Measured};
use crate::load::Workload;
use crate::machine::Machine;
use crate::memory::Memory;
use crate::scale::Scale;

/// Everything that one run measured.
#[derive(Default)]
pub(crate) struct Results {
    pub(crate) http: Vec<Measured>,
    pub(crate) memory: Option<Memory>,
    pub(crate) scale: Scale,
}

/// A lane in one line of the screen.
pub(crate) fn line(lane: &Measured) -> String {
    let Measured { per_second, p50, p99, cpu, .. } = lane;
    format!(
        "{:<16} {:>8}/s ({}..{})  p50 {}  p99 {}  CPU {:.0} µs  cores: {}",
        name(lane),
        whole(per_second.median),
        whole(per_second.min),
        whole(per_second.max),
        time(p50.median),
        time(p99.median),
        micros_for_one(lane),
        cores(cpu)
    )
}

/// The whole report. The picture is a file beside it.
pub(crate) fn markdown(results: &Results, bars: &[Bar], machine: &Machine, chart: &str) -> String {
    let mut text = String::from("# Onlyonce, measured\n\n");
    let _ = writeln!(text, "{machine}\n");
    text += "| bar | required | measured | |\n|---|---|---|---|\n";
    for bar in bars {
        let _ = writeln!(text, "{bar}");
    }
    if !results.http.is_empty() {
        let _ = writeln!(text, "\n![answers a second]({chart})");
        text += HTTP;
    }
    for title in titles(&results.http) {
        let _ = writeln!(text, "\n### {title}\n\n{COLUMNS}");
        for lane in results.http.iter().filter(|lane| lane.title == title) {
            let _ = writeln!(text, "{}", row(lane, &results.http));
        }
    }
    if let Some(memory) = &results.memory {
        let _ = writeln!(text, "\n## Memory\n\n{memory}");
    }
    let _ = write!(text, "{}", results.scale);
    text
}

const HTTP: &str = "
## Requests over HTTP

Medians of the rounds, and the lowest and highest round in brackets. `×` is the ratio of the median to that of the
first line of the same connections. CPU is the time that the server and all behind it took for one answer. Cores are
those that were busy, on average: of the load generator, the server that is compared, the bare application behind it,
Postgres, and whatever else ran on the machine. SQLite is a part of its server; the proxies' replays are from SQLite.
The load generator is a closed loop: each connection sends its next request when the answer to the last has arrived.
";

const COLUMNS: &str = "| connections | | answers/s | × | p50 | p99 | CPU µs | cores: generator | server | upstream | Postgres | others |\n\
                       |---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|";

/// The titles in their order, each once.
pub(crate) fn titles(lanes: &[Measured]) -> Vec<&str> {
    let mut titles: Vec<&str> = Vec::new();
    for lane in lanes {
        if !titles.contains(&lane.title.as_str()) {
            titles.push(&lane.title);
        }
    }
    titles
}

/// Who it is, and what was asked of it where that is not what the title says.
pub(crate) fn name(lane: &Measured) -> String {
    match (lane.lane.who, lane.lane.workload) {
        (Contestant::Proxy, Workload::Unguarded) => "proxy, unguarded".to_owned(),
        (Contestant::Proxy, Workload::Replay) if lane.title.starts_with("proxies") => {
            "proxy, replays".to_owned()
        }
        (who, _) => who.to_string(),
    }
}

fn row(lane: &Measured, all: &[Measured]) -> String {
    let Measured { title, connections, per_second, p50, p99, cpu, .. } = lane;
    let reference = all.iter().find(|other| other.title == *title && other.connections == *connections);
    let ratio = reference.map_or(1.0, |reference| per_second.median / reference.per_second.median);
    format!(
        "| {connections} | {} | {} ({}..{}) | {ratio:.2} | {} | {} | {:.0} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
        name(lane),
        whole(per_second.median),
        whole(per_second.min),
        whole(per_second.max),
        time(p50.median),
        time(p99.median),
        micros_for_one(lane),
        cpu.generator,
        cpu.server,
        cpu.upstream,
        cpu.postgres,
        cpu.others
    )
}

/// What an answer costs the server and all behind it. It depends less than times do on what else runs.
fn micros_for_one(Measured { cpu, .. }: &Measured) -> f64 {
    (cpu.server + cpu.upstream + cpu.postgres) / cpu.per_second * 1e6
}

fn cores(Cpu { generator, server, upstream, postgres, others, .. }: &Cpu) -> String {
    format!(
        "generator {generator:.2}, server {server:.2}, upstream {upstream:.2}, Postgres {postgres:.2}, \
         others {others:.2}"
    )
}

/// With a comma at each thousand.
pub(crate) fn whole(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Three digits and a unit.
pub(crate) fn time(seconds: f64) -> String {
    let time = Duration::from_secs_f64(seconds);
    match time.as_micros() {
        0..1_000 => format!("{} µs", time.as_micros()),
        1_000..100_000 => format!("{:.2} ms", seconds * 1e3),
        100_000..1_000_000 => format!("{:.0} ms", seconds * 1e3),
        _ => format!("{seconds:.2} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!([7.4, 1_234.0, 1_234_567.0].map(whole), ["7", "1,234", "1,234,567"]);
        assert_eq!([0.000_42, 0.004_2, 0.42, 4.2].map(time), ["420 µs", "4.20 ms", "420 ms", "4.20 s"]);
    }
}

//! The same requests to the same application, guarded in different ways, in turns.

use std::fmt;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use onlyonce_testkit::{Nginx, Postgres};

use crate::load::{Figures, Plan, Workload};
use crate::process::{self, Server, cpu_time, machine_cpu_time};
use crate::stats::{SplitMix, Spread};

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contestant {
    /// A handler that a good engineer writes in an afternoon.
    Hand,
    /// The layer in the same application.
    Layer,
    /// The proxy before the bare application.
    Proxy,
    /// The application, unguarded.
    Bare,
    /// nginx before the bare application.
    Nginx,
}

impl fmt::Display for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hand => "hand",
            Self::Layer => "layer",
            Self::Proxy => "proxy",
            Self::Bare => "bare",
            Self::Nginx => "nginx",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Database {
    Postgres,
    Sqlite,
}

impl fmt::Display for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Postgres => "Postgres",
            Self::Sqlite => "SQLite",
        })
    }
}

/// One side of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lane {
    pub(crate) who: Contestant,
    pub(crate) database: Database,
    pub(crate) workload: Workload,
}

/// What runs in turns, and is compared.
#[derive(Clone, Debug)]
pub(crate) struct Comparison {
    /// Comparisons with the same title stand in one table and one picture.
    pub(crate) title: String,
    pub(crate) connections: usize,
    pub(crate) answer_bytes: usize,
    /// The first is the reference.
    pub(crate) lanes: Vec<Lane>,
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.connections == 1 { "" } else { "s" };
        write!(f, "{}, {} connection{plural}", self.title, self.connections)
    }
}

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) rounds: usize,
    pub(crate) warm: Duration,
    pub(crate) run: Duration,
}

/// What one turn came to.
#[derive(Clone, Copy, Debug)]
struct Turn {
    per_second: f64,
    p50: Duration,
    p99: Duration,
    cpu: Cpu,
}

/// Cores that were busy, by process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cpu {
    /// Answers a second meanwhile.
    pub(crate) per_second: f64,
    pub(crate) generator: f64,
    /// The process that is compared.
    pub(crate) server: f64,
    /// The bare application behind it, if there is one.
    pub(crate) upstream: f64,
    /// All processes of Postgres. SQLite is part of the server.
    pub(crate) postgres: f64,
    /// Whatever else ran on the machine, and what of the kernel's work counts as nobody's.
    pub(crate) others: f64,
}

/// A lane's turns in one comparison.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) title: String,
    pub(crate) connections: usize,
    pub(crate) answer_bytes: usize,
    pub(crate) lane: Lane,
    /// Answers a second.
    pub(crate) per_second: Spread,
    /// In seconds.
    pub(crate) p50: Spread,
    pub(crate) p99: Spread,
    /// The mean of all turns.
    pub(crate) cpu: Cpu,
}

const SMALL_ANSWER_BYTES: usize = 1024;

/// What the bars need.
pub(crate) fn comparisons_quick() -> Vec<Comparison> {
    use Database::{Postgres, Sqlite};
    let first = |database, connections| guarded(database, Workload::First, connections, SMALL_ANSWER_BYTES);
    let replay = |database, connections| guarded(database, Workload::Replay, connections, SMALL_ANSWER_BYTES);
    vec![
        first(Postgres, 1),
        first(Postgres, 64),
        first(Postgres, 256),
        replay(Postgres, 64),
        guarded(Postgres, Workload::Mix, 64, SMALL_ANSWER_BYTES),
        first(Sqlite, 1),
        first(Sqlite, 256),
        replay(Sqlite, 64),
        proxied(64),
    ]
}

pub(crate) fn comparisons_full() -> Vec<Comparison> {
    let connections = [1, 16, 64, 256, 1_024];
    let mut all = Vec::new();
    for database in [Database::Postgres, Database::Sqlite] {
        for workload in [Workload::First, Workload::Replay, Workload::Mix] {
            all.extend(connections.map(|many| guarded(database, workload, many, SMALL_ANSWER_BYTES)));
        }
        for workload in [Workload::First, Workload::Replay] {
            all.extend([16 * 1024, 256 * 1024].map(|bytes| guarded(database, workload, 64, bytes)));
        }
    }
    all.extend(connections.map(proxied));
    all
}

/// The comparisons whose titles contain all of these words.
pub(crate) fn about(words: &[String], all: Vec<Comparison>) -> Result<Vec<Comparison>, String> {
    let titles: Vec<String> = all.iter().map(Comparison::to_string).collect();
    let found: Vec<Comparison> = all
        .into_iter()
        .filter(|comparison| words.iter().all(|word| comparison.to_string().contains(word.as_str())))
        .collect();
    if found.is_empty() {
        return Err(format!(
            "no comparison has {words:?} in its title; there are\n  {}",
            titles.join("\n  ")
        ));
    }
    Ok(found)
}

fn guarded(database: Database, workload: Workload, connections: usize, answer_bytes: usize) -> Comparison {
    let requests = match workload {
        Workload::First => "first executions",
        Workload::Replay => "replays",
        Workload::Mix => "nine first executions to one replay",
        Workload::Unguarded => "unguarded",
    };
    let mut lanes: Vec<Lane> = [Contestant::Hand, Contestant::Layer, Contestant::Proxy]
        .map(|who| Lane { who, database, workload })
        .into();
    if workload == Workload::First {
        lanes.push(Lane { who: Contestant::Bare, database, workload: Workload::Unguarded });
    }
    let title = format!("{database}, {requests}, {} KiB", answer_bytes / 1024);
    Comparison { title, connections, answer_bytes, lanes }
}

/// What a proxy costs that does nothing, and one that replays.
fn proxied(connections: usize) -> Comparison {
    let lane = |who, workload| Lane { who, database: Database::Sqlite, workload };
    let lanes = vec![
        lane(Contestant::Nginx, Workload::Unguarded),
        lane(Contestant::Proxy, Workload::Unguarded),
        lane(Contestant::Proxy, Workload::Replay),
        lane(Contestant::Bare, Workload::Unguarded),
    ];
    let title = "proxies before the bare application, 1 KiB".to_owned();
    Comparison { title, connections, answer_bytes: SMALL_ANSWER_BYTES, lanes }
}

/// Everything that answers, each with a database or a file of its own. All run at the same time; those whose
/// turn it is not are idle.
pub(crate) struct Arena {
    bare: Server,
    hand: [Server; 2],
    layer: [Server; 2],
    proxy: [Server; 2],
    nginx: Nginx,
    postgres_pid: u32,
    seeds: SplitMix,
}

impl Arena {
    pub(crate) fn start(postgres: &Postgres, folder: &Path, proxy: &Path) -> Result<Self, String> {
        let database = || postgres.url(&postgres.database());
        let file = |name: &str| format!("sqlite:{}", folder.join(name).display());
        let bare = Server::own(&["bare"])?;
        let hand = [Server::own(&["hand", &database()])?, Server::own(&["hand", &file("hand.db")])?];
        let layer = [Server::own(&["layer", &database()])?, Server::own(&["layer", &file("layer.db")])?];
        let proxy = [
            Server::proxy(proxy, bare.address, &database())?,
            Server::proxy(proxy, bare.address, &file("proxy.db"))?,
        ];
        let nginx = Nginx::start_before(bare.address.port());
        let postmaster = postgres.sql("postgres", "SELECT pg_read_file('postmaster.pid')");
        let pid = postmaster.lines().next().and_then(|line| line.parse().ok());
        let postgres_pid = pid.ok_or("Postgres does not say which process it is")?;
        // Keys of two runs against one server of one's own must differ.
        let seeds = SplitMix(u64::from(std::process::id()));
        Ok(Self { bare, hand, layer, proxy, nginx, postgres_pid, seeds })
    }

    /// Runs every comparison, and says on standard output what came of it as it goes.
    pub(crate) fn measure(&mut self, all: &[Comparison], pace: Pace) -> Result<Vec<Measured>, String> {
        let mut measured = Vec::new();
        for (number, comparison) in all.iter().enumerate() {
            println!("\n[{}/{}] {comparison}", number + 1, all.len());
            for lane in self.compare(comparison, pace)? {
                println!("  {}", crate::report::line(&lane));
                measured.push(lane);
            }
        }
        Ok(measured)
    }

    fn compare(&mut self, comparison: &Comparison, pace: Pace) -> Result<Vec<Measured>, String> {
        let mut turns: Vec<Vec<Turn>> = vec![Vec::new(); comparison.lanes.len()];
        for _ in 0..pace.rounds {
            let mut order: Vec<usize> = (0..turns.len()).collect();
            self.seeds.shuffle(&mut order);
            for number in order {
                turns[number].push(self.turn(comparison, comparison.lanes[number], pace)?);
            }
        }
        Ok(comparison
            .lanes
            .iter()
            .zip(turns)
            .map(|(lane, turns)| measured(comparison, *lane, &turns))
            .collect())
    }

    fn turn(&mut self, comparison: &Comparison, lane: Lane, pace: Pace) -> Result<Turn, String> {
        let (target, server, proxied) = self.server(lane);
        let plan = Plan {
            target,
            workload: lane.workload,
            marks: lane.workload != Workload::Unguarded,
            answer_bytes: comparison.answer_bytes,
            connections: comparison.connections,
            warm: pace.warm,
            run: pace.run,
            seed: self.seeds.next(),
        };
        let upstream = proxied.then(|| self.bare.pid());
        // An automatic vacuum after another lane's turn is not this one's.
        let on_postgres = lane.database == Database::Postgres && lane.workload != Workload::Unguarded;
        let postgres = on_postgres.then_some(self.postgres_pid);
        let mut generator = Generator::start(&plan)?;
        let generator_pid = generator.child.id();
        let look = || Cpu {
            per_second: 0.0,
            generator: cpu_time(generator_pid).as_secs_f64(),
            server: cpu_time(server).as_secs_f64(),
            upstream: upstream.map_or(0.0, |upstream| cpu_time(upstream).as_secs_f64()),
            postgres: postgres.map_or(0.0, |postgres| cpu_time(postgres).as_secs_f64()),
            others: machine_cpu_time().as_secs_f64(),
        };
        generator.expect("begin")?;
        let before = look();
        generator.expect("end")?;
        let after = look();
        let seconds = pace.run.as_secs_f64();
        let Figures { answers, p50, p99 } = generator.figures()?;
        let per_second = answers as f64 / seconds;
        let busy = |of: fn(&Cpu) -> f64| (of(&after) - of(&before)) / seconds;
        let mut cpu = Cpu {
            per_second,
            generator: busy(|cpu| cpu.generator),
            server: busy(|cpu| cpu.server),
            upstream: busy(|cpu| cpu.upstream),
            postgres: busy(|cpu| cpu.postgres),
            others: busy(|cpu| cpu.others),
        };
        cpu.others = (cpu.others - cpu.generator - cpu.server - cpu.upstream - cpu.postgres).max(0.0);
        Ok(Turn { per_second, p50, p99, cpu })
    }

    /// Its address, its process, and whether the bare application is behind it.
    fn server(&self, Lane { who, database, .. }: Lane) -> (SocketAddr, u32, bool) {
        let on = database as usize;
        let (server, proxied) = match who {
            Contestant::Hand => (&self.hand[on], false),
            Contestant::Layer => (&self.layer[on], false),
            Contestant::Proxy => (&self.proxy[on], true),
            Contestant::Bare => (&self.bare, false),
            Contestant::Nginx => {
                return ((Ipv4Addr::LOCALHOST, self.nginx.port()).into(), self.nginx.pid(), true);
            }
        };
        (server.address, server.pid(), proxied)
    }
}

fn measured(comparison: &Comparison, lane: Lane, turns: &[Turn]) -> Measured {
    let spread = |of: fn(&Turn) -> f64| Spread::of(turns.iter().map(of));
    let (per_second, p50, p99) = (
        spread(|turn| turn.per_second),
        spread(|turn| turn.p50.as_secs_f64()),
        spread(|turn| turn.p99.as_secs_f64()),
    );
    let mean = |of: fn(&Cpu) -> f64| turns.iter().map(|turn| of(&turn.cpu)).sum::<f64>() / turns.len() as f64;
    let cpu = Cpu {
        per_second: mean(|cpu| cpu.per_second),
        generator: mean(|cpu| cpu.generator),
        server: mean(|cpu| cpu.server),
        upstream: mean(|cpu| cpu.upstream),
        postgres: mean(|cpu| cpu.postgres),
        others: mean(|cpu| cpu.others),
    };
    let Comparison { title, connections, answer_bytes, .. } = comparison.clone();
    Measured { title, connections, answer_bytes, lane, per_second, p50, p99, cpu }
}

struct Generator {
    child: Child,
    lines: Box<dyn Iterator<Item = std::io::Result<String>>>,
}

impl Generator {
    fn start(plan: &Plan) -> Result<Self, String> {
        let mut command = process::own("load");
        command.args(plan.arguments()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("{command:?}: {error}"))?;
        let stdout = child.stdout.take().ok_or("no standard output")?;
        Ok(Self { child, lines: Box::new(BufReader::new(stdout).lines()) })
    }

    fn expect(&mut self, expected: &str) -> Result<(), String> {
        match self.line()? {
            line if line == expected => Ok(()),
            line => Err(format!("the load generator said {line} instead of {expected}")),
        }
    }

    fn figures(mut self) -> Result<Figures, String> {
        let figures = self.line()?.parse();
        self.child.wait().map_err(|error| error.to_string())?;
        figures
    }

    fn line(&mut self) -> Result<String, String> {
        let line = self.lines.next().ok_or("the load generator gave up: see above")?;
        line.map_err(|error| error.to_string())
    }
}

impl Drop for Generator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

//! The load generator, a process of its own: so many connections, each sending its next request when the answer
//! to the last one has arrived (a closed loop).
//!
//! It says `begin` and `end` on its standard output where the measured time begins and ends, so that whoever
//! started it can look at clocks then, and the figures after that.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::sleep_until;

use crate::stats::{SplitMix, percentile};

/// How many keys are completed before replays of them are measured, at least one for each connection.
const REPLAYED_KEYS: usize = 256;

/// In a mix, one request of so many repeats an earlier one.
const MIX_REPLAY_EVERY: u64 = 10;

/// From how many of its earlier keys a connection picks one to repeat in a mix.
const MIX_KEYS: usize = 64;

/// A 256 KiB answer should not take a read for each packet.
const READ_BYTES: usize = 64 * 1024;

const BODY: &str = r#"{"amount":100,"currency":"EUR"}"#;

/// What is asked of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Workload {
    /// Every request has a fresh key.
    First,
    /// Every request repeats one that was completed before.
    Replay,
    /// One request of ten repeats an earlier one.
    Mix,
    /// No request has a key.
    Unguarded,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::First => "first",
            Self::Replay => "replay",
            Self::Mix => "mix",
            Self::Unguarded => "unguarded",
        })
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::First, Self::Replay, Self::Mix, Self::Unguarded]
            .into_iter()
            .find(|workload| workload.to_string() == text)
            .ok_or_else(|| format!("no such workload: {text}"))
    }
}

/// What one run of the generator does.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) target: SocketAddr,
    pub(crate) workload: Workload,
    /// Whether replays are marked as such; nobody marks them where nothing is guarded.
    pub(crate) marks: bool,
    pub(crate) answer_bytes: usize,
    pub(crate) connections: usize,
    pub(crate) warm: Duration,
    pub(crate) run: Duration,
    /// Two runs with different seeds have no key in common.
    pub(crate) seed: u64,
}

impl Plan {
    /// As words of a command line.
    pub(crate) fn arguments(&self) -> Vec<String> {
        vec![
            self.target.to_string(),
            self.workload.to_string(),
            self.marks.to_string(),
            self.answer_bytes.to_string(),
            self.connections.to_string(),
            self.warm.as_millis().to_string(),
            self.run.as_millis().to_string(),
            self.seed.to_string(),
        ]
    }

    pub(crate) fn parse(arguments: &[String]) -> Result<Self, String> {
        let [target, workload, marks, answer_bytes, connections, warm, run, seed] = arguments else {
            return Err("load wants eight arguments".into());
        };
        Ok(Self {
            target: parse(target)?,
            workload: workload.parse()?,
            marks: parse(marks)?,
            answer_bytes: parse(answer_bytes)?,
            connections: parse(connections)?,
            warm: Duration::from_millis(parse(warm)?),
            run: Duration::from_millis(parse(run)?),
            seed: parse(seed)?,
        })
    }
}

fn parse<T: FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("not understood: {text}"))
}

/// The figures of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figures {
    /// Answers that arrived within the measured time.
    pub(crate) answers: u64,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answers, p50, p99 } = self;
        write!(f, "figures {answers} {} {}", p50.as_nanos(), p99.as_nanos())
    }
}

impl FromStr for Figures {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let words: Vec<&str> = line.split(' ').collect();
        let ["figures", answers, p50, p99] = words[..] else { return Err(format!("not figures: {line}")) };
        let nanos = |text| parse(text).map(Duration::from_nanos);
        Ok(Self { answers: parse(answers)?, p50: nanos(p50)?, p99: nanos(p99)? })
    }
}

/// Runs the plan to its end and prints what came of it.
///
/// # Errors
/// On the first answer that is not as it must be: nothing is measured with a server that does not work.
pub(crate) async fn run(plan: Plan) -> Result<(), String> {
    let shared =
        Arc::new(Shared { ready: Barrier::new(plan.connections + 1), begins: OnceLock::new(), plan });
    let announcing = tokio::spawn(announce(Arc::clone(&shared)));
    let mut connections = JoinSet::new();
    for number in 0..shared.plan.connections {
        connections.spawn(connection(Arc::clone(&shared), number as u64));
    }
    let mut latencies = Vec::new();
    while let Some(ended) = connections.join_next().await {
        latencies.extend(ended.map_err(|error| error.to_string())??);
    }
    announcing.await.map_err(|error| error.to_string())?;
    if latencies.is_empty() {
        return Err("not one answer within the measured time".into());
    }
    latencies.sort_unstable();
    let (p50, p99) = (percentile(&latencies, 50), percentile(&latencies, 99));
    println!("{}", Figures { answers: latencies.len() as u64, p50, p99 });
    Ok(())
}

struct Shared {
    plan: Plan,
    /// Passed when every connection is open and what it will replay is completed.
    ready: Barrier,
    begins: OnceLock<Instant>,
}

impl Shared {
    /// When the measured time begins: the same for all.
    async fn begins(&self) -> Instant {
        self.ready.wait().await;
        *self.begins.get_or_init(|| Instant::now() + self.plan.warm)
    }
}

async fn announce(shared: Arc<Shared>) {
    let begins = shared.begins().await;
    sleep_until(begins.into()).await;
    println!("begin");
    sleep_until((begins + shared.plan.run).into()).await;
    println!("end");
}

/// The latencies of all answers of one connection that arrived within the measured time.
async fn connection(shared: Arc<Shared>, number: u64) -> Result<Vec<Duration>, String> {
    let plan = &shared.plan;
    let mut keys = Keys::new(plan.seed, number);
    let mut connection = Connection::open(plan).await.map_err(|error| format!("{}: {error}", plan.target))?;
    let mut completed = Vec::new();
    if plan.workload == Workload::Replay {
        for _ in 0..REPLAYED_KEYS.div_ceil(plan.connections) {
            let key = keys.fresh();
            connection.ask(Some(&key), false).await?;
            completed.push(key);
        }
    }
    let begins = shared.begins().await;
    let ends = begins + plan.run;
    let mut latencies = Vec::new();
    for turn in 1.. {
        let replay = match plan.workload {
            Workload::First | Workload::Unguarded => false,
            Workload::Replay => true,
            Workload::Mix => turn % MIX_REPLAY_EVERY == 0,
        };
        let key = match plan.workload {
            Workload::Unguarded => None,
            _ if replay => Some(completed[keys.below(completed.len())]),
            _ => Some(keys.fresh()),
        };
        let asked = Instant::now();
        connection.ask(key.as_ref(), replay).await?;
        let answered = Instant::now();
        if answered >= ends {
            break;
        }
        if answered >= begins {
            latencies.push(answered - asked);
        }
        if let (Workload::Mix, false, Some(key)) = (plan.workload, replay, key) {
            if completed.len() < MIX_KEYS {
                completed.push(key);
            } else {
                completed[keys.below(MIX_KEYS)] = key;
            }
        }
    }
    Ok(latencies)
}

type Key = [u8; 32];

/// Keys as clients draw them: random, so that they fall anywhere in an index.
struct Keys {
    random: SplitMix,
}

impl Keys {
    fn new(seed: u64, connection: u64) -> Self {
        let mut seeds = SplitMix(seed);
        Self { random: SplitMix(seeds.next() ^ connection.wrapping_mul(0x2545_f491_4f6c_dd1d)) }
    }

    fn fresh(&mut self) -> Key {
        let mut key = [0; 32];
        for half in key.chunks_exact_mut(16) {
            half.copy_from_slice(format!("{:016x}", self.random.next()).as_bytes());
        }
        key
    }

    fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound)
    }
}

/// One connection of HTTP/1.1, kept open.
struct Connection {
    stream: TcpStream,
    /// The request up to the key, and all of it where there is no key.
    head: String,
    request: Vec<u8>,
    read: Vec<u8>,
    answer_bytes: usize,
    marks: bool,
}

impl Connection {
    async fn open(plan: &Plan) -> io::Result<Self> {
        let stream = TcpStream::connect(plan.target).await?;
        stream.set_nodelay(true)?;
        let head = format!(
            "POST /payments/{} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n",
            plan.answer_bytes,
            plan.target,
            BODY.len()
        );
        let read = vec![0; READ_BYTES];
        let (answer_bytes, marks) = (plan.answer_bytes, plan.marks);
        Ok(Self { stream, head, request: Vec::new(), read, answer_bytes, marks })
    }

    /// Sends one payment and reads its answer to the end.
    async fn ask(&mut self, key: Option<&Key>, replay: bool) -> Result<(), String> {
        self.request.clear();
        self.request.extend_from_slice(self.head.as_bytes());
        if let Some(key) = key {
            self.request.extend_from_slice(b"idempotency-key: ");
            self.request.extend_from_slice(key);
            self.request.extend_from_slice(b"\r\n");
        }
        self.request.extend_from_slice(b"\r\n");
        self.request.extend_from_slice(BODY.as_bytes());
        self.stream.write_all(&self.request).await.map_err(|error| format!("not sent: {error}"))?;
        let head = self.read_answer().await?;
        let paid = head.status == 201 && head.body_bytes == self.answer_bytes;
        if paid && head.replayed == (replay && self.marks) {
            Ok(())
        } else {
            Err(format!("an answer that must not be: {head:?}, asked for a replay: {replay}"))
        }
    }

    async fn read_answer(&mut self) -> Result<AnswerHead, String> {
        let mut filled = 0;
        let (head, head_bytes) = loop {
            filled += self.read_some(filled).await?;
            if let Some(head_bytes) = end_of_head(&self.read[..filled]) {
                break (AnswerHead::parse(&self.read[..head_bytes])?, head_bytes);
            }
        };
        let mut left = (head_bytes + head.body_bytes)
            .checked_sub(filled)
            .ok_or_else(|| format!("more than one answer: {head:?}"))?;
        while left > 0 {
            let read = self.read_some(0).await?;
            left = left.checked_sub(read).ok_or_else(|| format!("more than one answer: {head:?}"))?;
        }
        Ok(head)
    }

    async fn read_some(&mut self, from: usize) -> Result<usize, String> {
        match self.stream.read(&mut self.read[from..]).await {
            Ok(0) => Err("the connection was closed".into()),
            Ok(bytes) => Ok(bytes),
            Err(error) => Err(format!("no answer: {error}")),
        }
    }
}

fn end_of_head(read: &[u8]) -> Option<usize> {
    read.windows(4).position(|four| four == b"\r\n\r\n").map(|at| at + 4)
}

#[derive(Debug)]
struct AnswerHead {
    status: u16,
    body_bytes: usize,
    replayed: bool,
}

impl AnswerHead {
    fn parse(head: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(head).map_err(|_| "a head that is not text")?;
        let malformed = || format!("not an answer with a length: {text}");
        let mut lines = text.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let (mut body_bytes, mut replayed) = (None, false);
        for line in lines {
            let Some((name, value)) = line.split_once(':') else { continue };
            if name.eq_ignore_ascii_case("content-length") {
                body_bytes = value.trim().parse().ok();
            } else if name.eq_ignore_ascii_case("idempotent-replayed") {
                replayed = value.trim() == "true";
            }
        }
        Ok(Self {
            status: status.ok_or_else(malformed)?,
            body_bytes: body_bytes.ok_or_else(malformed)?,
            replayed,
        })
    }
}

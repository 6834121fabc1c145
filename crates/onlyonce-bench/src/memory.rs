//! What requests in flight cost the proxy in memory, guarded and, for what its connections cost, unguarded.

use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use crate::process::{self, Server, resident_bytes};
use crate::report::whole;

/// How long the application takes over each: long enough for all to be in flight together.
const HELD: Duration = Duration::from_secs(20);

/// What the claims need to be written in.
const SETTLED: Duration = Duration::from_secs(6);

const BODY: &str = r#"{"amount":100,"currency":"EUR"}"#;

/// Memory of a proxy in RAM.
pub(crate) struct Memory {
    /// Each of a fresh proxy.
    in_flight: Vec<InFlight>,
}

struct InFlight {
    guarded: bool,
    many: u64,
    /// Before, with one idle connection.
    idle_bytes: u64,
    bytes: u64,
}

impl InFlight {
    fn mib_per_thousand(&self) -> f64 {
        mib(self.bytes.saturating_sub(self.idle_bytes)) / self.many as f64 * 1e3
    }
}

impl Memory {
    /// Of the most guarded requests that were in flight.
    pub(crate) fn mib_per_thousand(&self) -> Option<f64> {
        self.in_flight.iter().rfind(|in_flight| in_flight.guarded).map(InFlight::mib_per_thousand)
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "The proxy on SQLite, each request on a connection of its own on both sides, small bodies.\n"
        )?;
        writeln!(f, "| requests in flight | MiB before | MiB | MiB for 1,000 |\n|---|---:|---:|---:|")?;
        for in_flight in &self.in_flight {
            let InFlight { guarded, many, idle_bytes, bytes } = in_flight;
            let kind = if *guarded { "guarded" } else { "unguarded" };
            let (many, before, then) = (whole(*many as f64), mib(*idle_bytes), mib(*bytes));
            let each = in_flight.mib_per_thousand();
            writeln!(f, "| {many} {kind} | {before:.1} | {then:.1} | {each:.1} |")?;
        }
        Ok(())
    }
}

/// Measures it on fresh proxies, so that none has memory from before.
pub(crate) fn measure(program: &Path, folder: &Path) -> Result<Memory, String> {
    println!("\nmemory of the proxy");
    let bare = Server::own(&["bare"])?;
    let mut in_flight = Vec::new();
    for (guarded, many) in [(false, 1_000), (true, 1_000), (false, 4_000), (true, 4_000)] {
        let store = format!("sqlite:{}", folder.join(format!("memory-{guarded}-{many}.db")).display());
        let proxy = Server::proxy(program, bare.address, &store)?;
        hold(proxy.address, guarded, 1, Duration::ZERO, || ())?;
        sleep(Duration::from_secs(1));
        let idle_bytes = resident_bytes(proxy.pid());
        let mut bytes = 0;
        hold(proxy.address, guarded, many, HELD, || bytes = resident_bytes(proxy.pid()))?;
        let found = InFlight { guarded, many, idle_bytes, bytes };
        let kind = if guarded { "guarded" } else { "unguarded" };
        println!("  {many} {kind} in flight: {:.1} MiB for 1,000", found.mib_per_thousand());
        in_flight.push(found);
    }
    Ok(Memory { in_flight })
}

/// Looks while another process holds so many requests.
fn hold(
    target: SocketAddr,
    guarded: bool,
    many: u64,
    held: Duration,
    look: impl FnOnce(),
) -> Result<(), String> {
    let mut command = process::own("hold");
    command.args([target.to_string(), guarded.to_string(), many.to_string(), held.as_millis().to_string()]);
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|error| format!("{command:?}: {error}"))?;
    let mut lines = BufReader::new(child.stdout.take().ok_or("no standard output")?).lines();
    let said = lines.next().and_then(Result::ok);
    look();
    let status = child.wait().map_err(|error| error.to_string())?;
    if said.as_deref() == Some("held") && status.success() {
        Ok(())
    } else {
        Err(format!("holding {many}: {status}"))
    }
}

/// Sends so many requests, says `held` when they have had time to arrive, and reads every answer.
pub(crate) fn run(arguments: &[String]) -> Result<(), String> {
    let [target, guarded, many, held_ms] = arguments else { return Err("hold wants four arguments".into()) };
    let many: u64 = many.parse().map_err(|_| "how many?")?;
    let failed = |error: std::io::Error| format!("{target}: {error}");
    let mut streams = Vec::new();
    for number in 0..many {
        let mut stream = TcpStream::connect(target).map_err(failed)?;
        let key = match guarded.as_str() {
            "true" => format!("idempotency-key: hold-{held_ms}-{number}\r\n"),
            _ => String::new(),
        };
        let request = format!(
            "POST /hold/{held_ms} HTTP/1.1\r\nhost: {target}\r\n{key}\
             content-type: application/json\r\ncontent-length: {}\r\n\r\n{BODY}",
            BODY.len()
        );
        stream.write_all(request.as_bytes()).map_err(failed)?;
        streams.push(stream);
    }
    if held_ms != "0" {
        sleep(SETTLED);
    }
    println!("held");
    for mut stream in streams {
        let mut status = [0; 12];
        stream.read_exact(&mut status).map_err(failed)?;
        if status != *b"HTTP/1.1 201" {
            return Err(format!("an answer that must not be: {}", status.escape_ascii()));
        }
    }
    Ok(())
}

//! What guarded requests in flight cost the proxy in memory.

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

/// Memory of a proxy in RAM, in bytes.
pub(crate) struct Memory {
    idle_bytes: u64,
    /// With so many in flight, from few to many, each on a fresh proxy.
    in_flight: Vec<(u64, u64)>,
}

impl Memory {
    /// Of the most that were in flight.
    pub(crate) fn mib_per_thousand(&self) -> f64 {
        let (many, bytes) = self.in_flight.last().copied().unwrap_or((1, self.idle_bytes));
        bytes.saturating_sub(self.idle_bytes) as f64 / many as f64 * 1e3 / f64::from(1 << 20)
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
        writeln!(f, "The proxy on SQLite, each request on a connection of its own, small bodies.\n")?;
        writeln!(f, "| guarded requests in flight | resident MiB | MiB for 1,000 |\n|---:|---:|---:|")?;
        writeln!(f, "| 0 | {} | |", mib(self.idle_bytes))?;
        for (many, bytes) in &self.in_flight {
            let each = bytes.saturating_sub(self.idle_bytes) * 1000 / many;
            writeln!(f, "| {} | {} | {} |", whole(*many as f64), mib(*bytes), mib(each))?;
        }
        Ok(())
    }
}

/// Measures it on fresh proxies, so that none has memory from before.
pub(crate) fn measure(program: &Path, folder: &Path) -> Result<Memory, String> {
    println!("\nmemory of the proxy");
    let bare = Server::own(&["bare"])?;
    let mut idle_bytes = 0;
    let mut in_flight = Vec::new();
    for many in [1_000, 4_000] {
        let store = format!("sqlite:{}", folder.join(format!("memory-{many}.db")).display());
        let proxy = Server::proxy(program, bare.address, &store)?;
        hold(proxy.address, 1, Duration::ZERO, || ())?;
        sleep(Duration::from_secs(1));
        idle_bytes = resident_bytes(proxy.pid());
        let mut bytes = 0;
        hold(proxy.address, many, HELD, || bytes = resident_bytes(proxy.pid()))?;
        println!("  {many} in flight: {} KiB more", bytes.saturating_sub(idle_bytes) / 1024);
        in_flight.push((many, bytes));
    }
    Ok(Memory { idle_bytes, in_flight })
}

/// Looks while another process holds so many requests.
fn hold(target: SocketAddr, many: u64, held: Duration, look: impl FnOnce()) -> Result<(), String> {
    let mut command = process::own("hold");
    command.args([target.to_string(), many.to_string(), held.as_millis().to_string()]);
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
    let [target, many, held_ms] = arguments else { return Err("hold wants three arguments".into()) };
    let many: u64 = many.parse().map_err(|_| "how many?")?;
    let failed = |error: std::io::Error| format!("{target}: {error}");
    let mut streams = Vec::new();
    for number in 0..many {
        let mut stream = TcpStream::connect(target).map_err(failed)?;
        let request = format!(
            "POST /hold/{held_ms} HTTP/1.1\r\nhost: {target}\r\nidempotency-key: hold-{held_ms}-{number}\r\n\
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

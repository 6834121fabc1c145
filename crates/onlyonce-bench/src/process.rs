//! Processes that this one started, and what they use.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

/// In one tick of a process's clock, as every Linux has it.
const TICK: Duration = Duration::from_millis(10);

/// A server that ends with this process.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: SocketAddr,
}

impl Server {
    /// One of this program's own servers.
    pub(crate) fn own(arguments: &[&str]) -> Result<Self, String> {
        let mut command = own("serve");
        let mut child = started(command.args(arguments).stdout(Stdio::piped()).stdin(Stdio::piped()))?;
        let lines =
            child.stdout.take().map(BufReader::<ChildStdout>::new).into_iter().flat_map(BufRead::lines);
        let address = address(lines, "listening on ");
        Ok(Self { child, address: address.ok_or_else(|| format!("{arguments:?} did not start"))? })
    }

    /// The proxy as people run it, in front of this upstream.
    pub(crate) fn proxy(program: &Path, upstream: SocketAddr, store: &str) -> Result<Self, String> {
        let mut command = with_files_max(program);
        command.args(["proxy", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--store", store]);
        command.args(["--upstream", &format!("http://{upstream}")]);
        command.stdin(Stdio::null()).stderr(Stdio::piped()).stdout(Stdio::null());
        let mut child = started(&mut command)?;
        let mut stderr = BufReader::<ChildStderr>::new(child.stderr.take().ok_or("no stderr")?);
        let address = address(stderr.by_ref().lines(), "onlyonce: listening on http://");
        // Nobody reads its log, and it must not wait for a reader.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        Ok(Self { child, address: address.ok_or_else(|| format!("the proxy did not start on {store}"))? })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn address(lines: impl Iterator<Item = std::io::Result<String>>, before: &str) -> Option<SocketAddr> {
    let mut lines = lines.map_while(Result::ok);
    let line = lines.find(|line| line.starts_with(before))?;
    line[before.len()..].split([',', ' ']).next()?.parse().ok()
}

/// This program again, in another role.
pub(crate) fn own(role: &str) -> Command {
    let mut command = with_files_max(&std::env::current_exe().expect("this program has a path"));
    command.arg(role);
    command
}

/// A program that may open as many connections as the system lets it, and that the kernel ends with this one.
fn with_files_max(program: &Path) -> Command {
    let mut command = Command::new("sh");
    let script = "ulimit -n \"$(ulimit -Hn)\"; exec setpriv --pdeathsig KILL -- \"$@\"";
    command.args(["-c", script, "sh"]).arg(program);
    command
}

fn started(command: &mut Command) -> Result<Child, String> {
    command.spawn().map_err(|error| format!("{command:?}: {error}"))
}

/// The CPU time of a process, its children and those of them that ended.
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let own = ticks(pid, 4);
    let theirs =
        children.split_whitespace().filter_map(|child| child.parse().ok()).map(|child| ticks(child, 2));
    TICK * (own + theirs.sum::<u32>())
}

/// The first so many of: user, system, ended children's user, ended children's system.
fn ticks(pid: u32, fields: usize) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name before it, in brackets, may have anything in it.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let times = after_name.split_whitespace().skip(11).take(fields);
    times.filter_map(|ticks| ticks.parse::<u32>().ok()).sum()
}

/// The CPU time of everything on this machine, of its hypervisor's other guests too as far as they took it away.
pub(crate) fn machine_cpu_time() -> Duration {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().next().unwrap_or_default();
    let times: Vec<u32> = line.split_whitespace().skip(1).filter_map(|ticks| ticks.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = times[..] else {
        return Duration::ZERO;
    };
    TICK * (user + nice + system + irq + softirq + steal)
}

/// How much memory a process has in RAM, in bytes.
pub(crate) fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap_or_default() * 1024
}

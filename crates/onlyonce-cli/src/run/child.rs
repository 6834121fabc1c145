//! The guard's side of the command: it speaks to the keeper.

use std::ffi::OsString;
use std::io::{self, IoSlice, IsTerminal};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child as Process, Command};
use tokio::time::Instant;

use super::keeper::{Order, Report, monotonic_ms};

/// The subcommand that is the keeper.
pub(crate) const KEEPER: &str = "run-keeper";

/// A command that runs under a keeper.
pub(super) struct Child {
    keeper: Process,
    reports: Lines<BufReader<OwnedReadHalf>>,
    orders: OwnedWriteHalf,
    pid: Option<Pid>,
    /// In a process group of its own, so that all it starts is ended with it. On a terminal it stays in the guard's: only
    /// so can it read the terminal, and is interrupted by the terminal itself.
    is_group: bool,
}

impl Child {
    pub(super) fn start(
        command: &[OsString],
        variables: &[(&str, String)],
        grace: Duration,
        lease_ends: Instant,
    ) -> io::Result<Self> {
        let is_group = !io::stdin().is_terminal();
        let (ours, theirs) = UnixStream::pair()?;
        send(&ours, io::stdin().as_fd())?;
        let mut keeper = Command::new(this_program()?);
        keeper.arg0("onlyonce").arg(KEEPER);
        if is_group {
            // Nor is the keeper in the guard's: who kills that group with SIGKILL would leave the command without both.
            keeper.arg("--group").process_group(0);
        }
        keeper.arg(format!("--grace-ms={}", grace.as_millis()));
        keeper.arg(format!("--lease-ends-ms={}", on_monotonic_clock(lease_ends)));
        keeper.arg("--").args(command).envs(variables.iter().map(|(name, value)| (name, value)));
        keeper.stdin(Stdio::from(OwnedFd::from(theirs)));
        let process = keeper.spawn()?;
        ours.set_nonblocking(true)?;
        let (reports, orders) = tokio::net::UnixStream::from_std(ours)?.into_split();
        Ok(Self { keeper: process, reports: BufReader::new(reports).lines(), orders, pid: None, is_group })
    }

    /// How the command ended; `None` if the keeper ended without a word. Dropped while it waits, it has missed nothing.
    pub(super) async fn ended(&mut self) -> Option<Report> {
        while let Ok(Some(line)) = self.reports.next_line().await {
            match Report::read(&line) {
                Some(Report::Started(pid)) => self.pid = Pid::from_raw(pid),
                Some(report) => return Some(report),
                None => {}
            }
        }
        // Somebody killed it. What it kept must not go on unkept.
        if let Some(pid) = self.pid {
            let _ = if self.is_group {
                kill_process_group(pid, Signal::KILL)
            } else {
                kill_process(pid, Signal::KILL)
            };
        }
        None
    }

    /// After its end: leaves no process behind.
    pub(super) async fn reap(mut self) {
        let _ = self.keeper.wait().await;
    }

    pub(super) async fn lease_until(&mut self, ends: Instant) {
        self.order(Order::Lease(on_monotonic_clock(ends))).await;
    }

    pub(super) async fn stop(&mut self) {
        self.order(Order::Stop).await;
    }

    /// Passes a signal on, unless the terminal has sent it to the command as well.
    pub(super) async fn signal(&mut self, signal: Signal) {
        let from_terminal = !self.is_group && [Signal::INT, Signal::QUIT].contains(&signal);
        if !from_terminal {
            self.order(Order::Signal(signal)).await;
        }
    }

    async fn order(&mut self, order: Order) {
        // A keeper that is gone is noticed where its reports end.
        let _ = self.orders.write_all(order.line().as_bytes()).await;
    }
}

fn send(control: &UnixStream, stdin: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = [stdin];
    if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    sendmsg(control, &[IoSlice::new(b"\n")], &mut ancillary, SendFlags::empty())?;
    Ok(())
}

/// This very program, even if its file was replaced meanwhile.
fn this_program() -> io::Result<std::path::PathBuf> {
    let running = Path::new("/proc/self/exe");
    if running.exists() { Ok(running.to_owned()) } else { std::env::current_exe() }
}

fn on_monotonic_clock(instant: Instant) -> u64 {
    let left = instant.saturating_duration_since(Instant::now());
    monotonic_ms().saturating_add(u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
}

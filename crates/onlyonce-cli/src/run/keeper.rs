//! The process between the guard and the command. It ends the command when the guard is gone or its lease ends.
//!
//! ```text
//! onlyonce run ──socket──▶ keeper ──▶ the command, in a process group of its own
//! ```
//!
//! The guard holds one end of a socket and sends when its lease ends. The kernel closes that end when the guard dies,
//! however it dies, and a guard that is stopped sends nothing more: in both cases the command is told to end (SIGTERM),
//! and killed with all of its group after the grace, at the latest when the lease ends. From then on another host may
//! run the period.
//!
//! A guard that was its own keeper could do neither: nobody runs code after `kill -9`.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
use std::{io, thread};

use clap::Args;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use rustix::time::{ClockId, clock_gettime};

use super::signals::Signals;
use crate::cli::Failure;

/// What the keeper is told.
#[derive(Args, Clone, Debug)]
pub struct KeeperArgs {
    /// Put the command in a process group of its own
    #[arg(long)]
    pub(super) group: bool,
    /// How long the command has to end by itself
    #[arg(long)]
    pub(super) grace_ms: u64,
    /// When the lease ends, on this machine's monotonic clock
    #[arg(long)]
    pub(super) lease_ends_ms: u64,
    /// The command
    #[arg(last = true, required = true)]
    pub(super) command: Vec<OsString>,
}

/// What the guard says, a line each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The lease ends then, on the monotonic clock in milliseconds.
    Lease(u64),
    Signal(Signal),
    /// The lease was lost.
    Stop,
}

/// What the keeper says, a line each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Report {
    Started(i32),
    /// The command could not be started.
    Failed {
        status: u8,
        reason: String,
    },
    /// The command has ended, with this exit status; 128 and the signal's number if a signal ended it.
    Ended {
        status: u8,
        because: Because,
    },
}

/// Why a command has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Because {
    /// It was not the keeper's doing.
    Itself,
    /// Its lease was lost or ended.
    Lease,
    /// Nobody is left who will read it.
    Guard,
}

enum Event {
    Order(Order),
    GuardGone,
    /// It has ended and is still to be waited for, so that its number is nobody else's yet.
    Ended,
}

/// Carries out the command, and ends with it.
///
/// # Errors
/// If the guard is gone before the command is started.
pub fn run(args: &KeeperArgs) -> Result<(), Failure> {
    let lost = |error: io::Error| Failure::failed(format!("the guard cannot be heard: {error}"));
    // What a terminal or a service manager sends to all processes is for the guard to pass on, once.
    let _deaf = Signals::catch().map_err(lost)?;
    let control = io::stdin().as_fd().try_clone_to_owned().map_err(lost)?;
    let control = UnixStream::from(control);
    let stdin = receive(&control).map_err(lost)?;
    let [program, arguments @ ..] = args.command.as_slice() else { return Ok(()) };
    let mut command = Command::new(program);
    command.args(arguments).stdin(stdin);
    if args.group {
        command.process_group(0);
    }
    match command.spawn() {
        Ok(child) => Keeper::new(args, child, control).map_err(lost)?.keep(),
        Err(error) => {
            let status = if error.kind() == io::ErrorKind::NotFound { NOT_FOUND } else { NOT_EXECUTABLE };
            tell(&control, &Report::Failed { status, reason: error.to_string() });
        }
    }
    Ok(())
}

/// As a shell says it.
const NOT_FOUND: u8 = 127;
const NOT_EXECUTABLE: u8 = 126;

struct Keeper {
    child: Child,
    pid: Pid,
    is_group: bool,
    grace_ms: u64,
    lease_ends_ms: u64,
    stopping: Option<Stopping>,
    control: UnixStream,
    events: Receiver<Event>,
}

#[derive(Clone, Copy)]
struct Stopping {
    because: Because,
    kill_at_ms: u64,
}

impl Keeper {
    fn new(args: &KeeperArgs, child: Child, control: UnixStream) -> io::Result<Self> {
        let pid = Pid::from_child(&child);
        let (sender, events) = mpsc::channel();
        let orders = control.try_clone()?;
        let listener = sender.clone();
        thread::spawn(move || listen(orders, &listener));
        thread::spawn(move || watch(pid, &sender));
        tell(&control, &Report::Started(pid.as_raw_nonzero().get()));
        let KeeperArgs { group: is_group, grace_ms, lease_ends_ms, .. } = *args;
        Ok(Self { child, pid, is_group, grace_ms, lease_ends_ms, stopping: None, control, events })
    }

    fn keep(mut self) {
        loop {
            match self
                .events
                .recv_timeout(Duration::from_millis(self.due_ms().saturating_sub(monotonic_ms())))
            {
                Ok(Event::Order(Order::Lease(ends_ms))) => self.lease_ends_ms = ends_ms,
                Ok(Event::Order(Order::Signal(signal))) => self.kill(signal),
                Ok(Event::Order(Order::Stop)) => self.stop(Because::Lease),
                Ok(Event::GuardGone) => self.stop(Because::Guard),
                Err(RecvTimeoutError::Timeout) => self.due(),
                Ok(Event::Ended) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if self.stopping.is_some() {
            // What it left behind in its group.
            self.kill(Signal::KILL);
        }
        let status = self.child.wait().map_or(NOT_EXECUTABLE, exit_status);
        let because = self.stopping.map_or(Because::Itself, |stopping| stopping.because);
        tell(&self.control, &Report::Ended { status, because });
    }

    /// When something is to be done without a word from anyone.
    fn due_ms(&self) -> u64 {
        match self.stopping {
            Some(stopping) => stopping.kill_at_ms,
            None => self.lease_ends_ms.saturating_sub(self.grace_ms),
        }
    }

    fn due(&mut self) {
        match &mut self.stopping {
            Some(stopping) => {
                stopping.kill_at_ms = u64::MAX;
                self.kill(Signal::KILL);
            }
            None => self.stop(Because::Lease),
        }
    }

    fn stop(&mut self, because: Because) {
        if self.stopping.is_none() {
            let kill_at_ms = (monotonic_ms() + self.grace_ms).min(self.lease_ends_ms);
            self.stopping = Some(Stopping { because, kill_at_ms });
            self.kill(Signal::TERM);
            // One that is stopped could not end.
            self.kill(Signal::CONT);
        }
    }

    fn kill(&self, signal: Signal) {
        // It can only fail because nothing is left of it.
        let _ =
            if self.is_group { kill_process_group(self.pid, signal) } else { kill_process(self.pid, signal) };
    }
}

/// Takes the guard's own standard input, which is for the command.
fn receive(control: &UnixStream) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(control, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let received = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    received.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn listen(orders: UnixStream, events: &Sender<Event>) {
    for line in BufReader::new(orders).lines().map_while(Result::ok) {
        let Some(order) = Order::read(&line) else { continue };
        if events.send(Event::Order(order)).is_err() {
            return;
        }
    }
    let _ = events.send(Event::GuardGone);
}

fn watch(pid: Pid, events: &Sender<Event>) {
    // Not reaped yet: until `wait` nobody else gets this number, and it can still be signalled.
    while waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
        .is_err_and(|error| error == rustix::io::Errno::INTR)
    {}
    let _ = events.send(Event::Ended);
}

fn tell(mut control: &UnixStream, report: &Report) {
    // A guard that is gone need not be told.
    let _ = control.write_all(report.line().as_bytes());
}

fn exit_status(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(NOT_EXECUTABLE)
}

/// A clock that both processes see, and that nobody sets.
pub(super) fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.unsigned_abs() * 1_000 + now.tv_nsec.unsigned_abs() / 1_000_000
}

impl Order {
    pub(super) fn line(self) -> String {
        match self {
            Self::Lease(ends_ms) => format!("lease {ends_ms}\n"),
            Self::Signal(signal) => format!("signal {}\n", signal.as_raw()),
            Self::Stop => "stop\n".to_owned(),
        }
    }

    fn read(line: &str) -> Option<Self> {
        let (verb, rest) = line.split_once(' ').unwrap_or((line, ""));
        match verb {
            "lease" => rest.parse().ok().map(Self::Lease),
            "signal" => Signal::from_named_raw(rest.parse().ok()?).map(Self::Signal),
            "stop" => Some(Self::Stop),
            _ => None,
        }
    }
}

impl Report {
    fn line(&self) -> String {
        match self {
            Self::Started(pid) => format!("started {pid}\n"),
            Self::Failed { status, reason } => format!("failed {status} {}\n", reason.replace('\n', " ")),
            Self::Ended { status, because } => {
                let because = match because {
                    Because::Itself => "itself",
                    Because::Lease => "lease",
                    Because::Guard => "guard",
                };
                format!("ended {status} {because}\n")
            }
        }
    }

    pub(super) fn read(line: &str) -> Option<Self> {
        let (verb, rest) = line.split_once(' ')?;
        let (status, words) = rest.split_once(' ').unwrap_or((rest, ""));
        match verb {
            "started" => rest.parse().ok().map(Self::Started),
            "failed" => Some(Self::Failed { status: status.parse().ok()?, reason: words.to_owned() }),
            "ended" => {
                let because = match words {
                    "itself" => Because::Itself,
                    "lease" => Because::Lease,
                    "guard" => Because::Guard,
                    _ => return None,
                };
                Some(Self::Ended { status: status.parse().ok()?, because })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_reports_are_read_as_they_were_said() {
        for order in
            [Order::Lease(4_711), Order::Signal(Signal::TERM), Order::Signal(Signal::USR2), Order::Stop]
        {
            assert_eq!(Order::read(order.line().trim_end()), Some(order));
        }
        for report in [
            Report::Started(4_711),
            Report::Failed { status: 127, reason: "No such file (os error 2)".to_owned() },
            Report::Ended { status: 143, because: Because::Lease },
            Report::Ended { status: 0, because: Because::Itself },
        ] {
            assert_eq!(Report::read(report.line().trim_end()), Some(report));
        }
    }
}

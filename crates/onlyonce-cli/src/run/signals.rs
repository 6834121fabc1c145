//! The signals that are passed on to the command.

use std::io;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

const PASSED_ON: [Signal; 6] =
    [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// Signals that no longer do what they do by default. Those that whoever started this process had ignored (`nohup`, a
/// shell's background) stay ignored, here and in the command.
pub(super) struct Signals {
    received: mpsc::UnboundedReceiver<Signal>,
    /// The last that asked to end, also if it was passed on to a command, which then ended.
    asked_to_end: Option<Signal>,
}

impl Signals {
    pub(super) fn catch() -> io::Result<Self> {
        let ignored = ignored();
        let (sender, receiver) = mpsc::unbounded_channel();
        for kind in PASSED_ON {
            if ignored & (1 << (kind.as_raw() - 1)) != 0 {
                continue;
            }
            let mut caught = signal(SignalKind::from_raw(kind.as_raw()))?;
            let sender = sender.clone();
            tokio::spawn(async move { while caught.recv().await.is_some() && sender.send(kind).is_ok() {} });
        }
        Ok(Self { received: receiver, asked_to_end: None })
    }

    pub(super) async fn next(&mut self) -> Signal {
        match self.received.recv().await {
            Some(signal) => {
                self.note(signal);
                signal
            }
            None => std::future::pending().await,
        }
    }

    /// One that has come, now or before, and asks to end.
    pub(super) fn asked_to_end(&mut self) -> Option<Signal> {
        while let Ok(signal) = self.received.try_recv() {
            self.note(signal);
        }
        self.asked_to_end
    }

    fn note(&mut self, signal: Signal) {
        if ends(signal) {
            self.asked_to_end = Some(signal);
        }
    }
}

/// Whether a command would be expected to end by it.
pub(super) fn ends(signal: Signal) -> bool {
    ![Signal::USR1, Signal::USR2].contains(&signal)
}

/// A bit for each signal that was ignored when this process was started, where the system tells.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let bits = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    bits.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

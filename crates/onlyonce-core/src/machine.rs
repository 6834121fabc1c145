//! Every decision about a key, as pure functions: no clock, no randomness, no I/O.
//!
//! ```text
//!             grant                   complete
//!   absent ───────────▶ Running ─────────────────▶ Done ──▶ replay
//!     ▲                  │  │ ▲                      │
//!     │     release      │  └─┘ renew;               │ expires
//!     ├──────────────────┘      lapsed: rerun, hold  │
//!     └──────────────────────────────────────────────┘
//! ```
//!
//! A caller that meets a live key whose fingerprint differs is refused in every state.
//!
//! Every boundary is closed at the start and open at the end: at `lease_until` the lease is over, at
//! `expires_at` the key is forgotten.

use std::time::Duration;

use crate::record::{Fingerprint, NewState, Outcome, Record, Revision, Seen, State, Write};

/// The rules that vary between deployments and routes. Nothing here varies between stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long a holder may go without renewing, on the store's clock.
    pub lease: Duration,
    /// How long a key is remembered, on the store's clock: from its completion, or from the end of
    /// its last lease.
    pub retention: Duration,
    /// What to do with a key whose holder went silent.
    pub on_lapse: Lapse,
}

/// What to do with a key whose holder went silent: its work may or may not have happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lapse {
    /// Grant the key again, as the next attempt.
    #[default]
    Rerun,
    /// Refuse until the key expires or an operator decides: the work never runs twice.
    Hold,
}

/// The answer to a claim on a key that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Give this outcome again; do not run the work.
    Replay(Outcome),
    /// Do not run the work.
    Refuse(Refusal),
    /// The key is free: write if the stored revision is still `expected`, and on success run.
    Take {
        /// The revision the caller saw.
        expected: Revision,
        /// The new grant.
        write: Write,
    },
}

/// Why a claim was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The key was first used for a different request.
    Mismatch {
        /// Path, query or a header that counts differs.
        target: bool,
        /// The body differs.
        body: bool,
    },
    /// Someone is doing the work.
    InFlight {
        /// How long the current attempt has run, on the store's clock.
        running_for: Duration,
        /// How long until its lease ends, in the worst case.
        lease_left: Duration,
    },
    /// The holder went silent and [`Lapse::Hold`] applies.
    Unknown,
}

/// How the work ended, as judged by the door that ran it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Remember this outcome.
    Keep(Outcome),
    /// Forget the key; the next caller runs the work.
    Release,
    /// Nobody knows whether the work happened: the lease runs out, then [`Lapse`] decides.
    Leave,
    /// The work did not happen and shall be tried again: the lease is over at once, and the attempt counts.
    /// For [`Lapse::Rerun`]; under [`Lapse::Hold`] an operator decides.
    Again,
}

/// The write that ends a grant. It applies only while the stored revision is still the held one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// Replace the grant by this.
    Complete(Write),
    /// Remove the key.
    Remove,
    /// Write nothing.
    Nothing,
}

/// The first grant of a key that is not in the store.
#[must_use]
pub fn grant(fingerprint: Fingerprint, revision: Revision, policy: &Policy) -> Write {
    Write {
        fingerprint,
        revision,
        attempt: 1,
        created_at: None,
        granted_at: None,
        state: NewState::Running { lease: policy.lease },
        retention: policy.retention,
    }
}

/// Decides a claim on a key that exists. `revision` is the one a new grant would install.
#[must_use]
pub fn claim(seen: &Seen, fingerprint: Fingerprint, revision: Revision, policy: &Policy) -> Claim {
    let Seen { record, now } = seen;
    let fresh = grant(fingerprint, revision, policy);
    if record.expires_at <= *now {
        return Claim::Take { expected: record.revision, write: fresh };
    }
    if record.fingerprint != fingerprint {
        return Claim::Refuse(Refusal::Mismatch {
            target: record.fingerprint.target != fingerprint.target,
            body: record.fingerprint.body != fingerprint.body,
        });
    }
    match &record.state {
        State::Done { outcome, .. } => Claim::Replay(outcome.clone()),
        State::Running { lease_until } if *now < *lease_until => Claim::Refuse(Refusal::InFlight {
            running_for: now.since(record.granted_at),
            lease_left: lease_until.since(*now),
        }),
        State::Running { .. } => match policy.on_lapse {
            Lapse::Hold => Claim::Refuse(Refusal::Unknown),
            Lapse::Rerun => Claim::Take {
                expected: record.revision,
                write: Write {
                    attempt: record.attempt.saturating_add(1),
                    created_at: Some(record.created_at),
                    ..fresh
                },
            },
        },
    }
}

/// The write that extends the grant `held` by another lease, for as long as the work goes on.
#[must_use]
pub fn renew(held: &Record, revision: Revision, policy: &Policy) -> Write {
    Write {
        attempt: held.attempt,
        created_at: Some(held.created_at),
        granted_at: Some(held.granted_at),
        ..grant(held.fingerprint, revision, policy)
    }
}

/// Decides the write that ends the grant `held`. `revision` is the one that write would install.
#[must_use]
pub fn finish(held: &Record, verdict: Verdict, revision: Revision, policy: &Policy) -> Finish {
    match verdict {
        Verdict::Leave => Finish::Nothing,
        Verdict::Release => Finish::Remove,
        Verdict::Keep(outcome) => {
            Finish::Complete(Write { state: NewState::Done(outcome), ..renew(held, revision, policy) })
        }
        Verdict::Again => {
            let state = NewState::Running { lease: Duration::ZERO };
            Finish::Complete(Write { state, ..renew(held, revision, policy) })
        }
    }
}

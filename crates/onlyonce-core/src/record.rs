//! What a store keeps for one key, and what it is asked to write.

use std::time::Duration;

use bytes::Bytes;

/// A point on the *store's* clock, in milliseconds since the Unix epoch.
///
/// Never compare one with a local clock: take `now` from the [`Seen`] it came with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The point `after` later, or the far future on overflow.
    #[must_use]
    pub fn plus(self, after: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(after.as_millis()).unwrap_or(i64::MAX)))
    }

    /// How long it is from `earlier` to here on the store's clock; zero if that clock was set back.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

/// Names one write of one key: 128 fresh random bits, supplied by the caller.
///
/// Every write installs a new revision and names the one it replaces, so a holder that lost its
/// lease cannot overwrite its successor. A counter would not do: a released or swept key starts
/// counting again, and a holder from before would match its successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Revision(pub u128);

/// Digests of the request's meaning; two requests with one key must agree on both.
///
/// Two parts, so that a refusal can say which of them differed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// SHA-256 of what was asked for: path, query and the headers that count.
    pub target: [u8; 32],
    /// SHA-256 of the body in its canonical form.
    pub body: [u8; 32],
}

/// What the work produced, ready to be given again byte for byte. Stores keep it unread.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// The HTTP status of a response, for people who list keys; zero where there is none.
    pub status: u16,
    /// Everything but the body, in the versioned encoding of [`crate::outcome`].
    pub head: Bytes,
    /// The body.
    pub body: Bytes,
}

/// Where a key stands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Someone holds the key and is doing the work.
    Running {
        /// When the holder is presumed dead unless it renews.
        lease_until: Timestamp,
    },
    /// The work is done; this is its outcome.
    Done {
        /// What a retry is given.
        outcome: Outcome,
        /// When it was recorded.
        completed_at: Timestamp,
    },
}

/// One stored key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// What the first request with this key asked for.
    pub fingerprint: Fingerprint,
    /// The latest write.
    pub revision: Revision,
    /// How many grants this key has had since it was last free; the first is 1.
    pub attempt: u32,
    /// When the key was first granted since it was last free.
    pub created_at: Timestamp,
    /// When the current attempt was granted.
    pub granted_at: Timestamp,
    /// Where the key stands.
    pub state: State,
    /// From this point on the key counts as never seen.
    pub expires_at: Timestamp,
}

/// A record, and what the store's clock said when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The record as read.
    pub record: Record,
    /// The store's clock at that moment.
    pub now: Timestamp,
}

/// A write, in durations: the store adds them to its own clock when it applies it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Write {
    /// See [`Record::fingerprint`].
    pub fingerprint: Fingerprint,
    /// The revision this write installs.
    pub revision: Revision,
    /// See [`Record::attempt`].
    pub attempt: u32,
    /// See [`Record::created_at`]; `None` means the moment of the write.
    pub created_at: Option<Timestamp>,
    /// See [`Record::granted_at`]; `None` means the moment of the write.
    pub granted_at: Option<Timestamp>,
    /// Where the key shall stand.
    pub state: NewState,
    /// How long the key is remembered, on the store's clock: after the lease ends if it is running,
    /// after this write if it is done.
    pub retention: Duration,
}

/// The state that a [`Write`] asks for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NewState {
    /// Held for this long from the moment of the write.
    Running {
        /// The lease, on the store's clock.
        lease: Duration,
    },
    /// Done, as of the moment of the write.
    Done(Outcome),
}

impl Write {
    /// Whether this write starts an attempt: somebody is to run the work when it is applied.
    #[must_use]
    pub fn is_grant(&self) -> bool {
        matches!(self.state, NewState::Running { .. }) && self.granted_at.is_none()
    }

    /// Whether it starts the first attempt of a key that was free. Undone before the work has run, it
    /// leaves nothing behind; a later attempt would leave a key that looks as if it had never been tried.
    #[must_use]
    pub fn is_first_grant(&self) -> bool {
        self.is_grant() && self.created_at.is_none()
    }

    /// The record this write leaves in a store whose clock says `now`.
    ///
    /// Every store computes its columns from this, so that the rules of time stand in one place.
    #[must_use]
    pub fn at(self, now: Timestamp) -> Record {
        let (state, expires_at) = match self.state {
            NewState::Running { lease } => {
                let lease_until = now.plus(lease);
                (State::Running { lease_until }, lease_until.plus(self.retention))
            }
            NewState::Done(outcome) => (State::Done { outcome, completed_at: now }, now.plus(self.retention)),
        };
        Record {
            fingerprint: self.fingerprint,
            revision: self.revision,
            attempt: self.attempt,
            created_at: self.created_at.unwrap_or(now),
            granted_at: self.granted_at.unwrap_or(now),
            state,
            expires_at,
        }
    }
}

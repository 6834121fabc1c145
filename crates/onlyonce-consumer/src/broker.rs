//! The seam: what a broker must be able to do, and nothing about what is done with its messages.
//!
//! | after | the broker |
//! |---|---|
//! | [`acknowledge`](Delivery::acknowledge) | never delivers the message again, unless the acknowledgement was lost |
//! | [`put_back`](Delivery::put_back) | delivers it again, to whoever consumes, not before the delay is over |
//! | [`dead_letter`](Delivery::dead_letter) | keeps it elsewhere, with the reason, and never delivers it again |
//! | a delivery that was dropped, a lost connection, a process that died | delivers it again, at once or after its deadline |
//!
//! A broker may deliver any message any number of times, several at once, and in any order; it must not lose one
//! that nobody acknowledged. It decides nothing: what a delivery means is decided by the runner.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use crate::message::Message;

/// A queue on some broker.
pub trait Broker: Send + Sync + 'static {
    /// One connection's deliveries.
    type Subscription: Subscription;

    /// Starts to deliver, on a connection of its own or a new channel of a shared one. Called again whenever a
    /// subscription has ended.
    ///
    /// At most `prefetch` messages are unsettled at a time: neither acknowledged, put back nor dead-lettered.
    ///
    /// # Errors
    /// [`Refused`](BrokerErrorKind::Refused) if it will fail again until someone changes the configuration, such as
    /// a queue that does not exist: the runner then ends if it was the first time. It tries again otherwise.
    fn subscribe(
        &self,
        prefetch: u16,
    ) -> impl Future<Output = Result<Self::Subscription, BrokerError>> + Send;

    /// How long after a message's first delivery the broker may deliver it again, at most, as far as it knows: the
    /// age at which the queue drops a message, for example. `None` if there is no such bound, or it cannot be known.
    ///
    /// Messages must be remembered for longer than that. Called after the first subscription.
    fn redelivery_horizon(&self) -> Option<Duration>;
}

/// Deliveries, one after the other.
pub trait Subscription: Send + 'static {
    /// One delivered message.
    type Delivery: Delivery;

    /// The next one; `None` when the connection is gone: the runner then subscribes again.
    ///
    /// # Errors
    /// What went wrong on the connection, which may go on.
    ///
    /// # Cancellation
    /// Dropped while it waits, it has taken no message.
    fn next(&mut self) -> impl Future<Output = Option<Result<Self::Delivery, BrokerError>>> + Send;
}

/// One delivered message, until it is settled. Settled at most once; after an error nobody knows whether it is, and
/// the broker may deliver it again. Dropping one settles nothing.
pub trait Delivery: Send + 'static {
    /// What was delivered.
    fn message(&self) -> &Message;

    /// Tells the broker that the message is done with.
    ///
    /// # Errors
    /// If the broker cannot be told.
    fn acknowledge(self) -> impl Future<Output = Result<(), BrokerError>> + Send;

    /// Has the message delivered again, not before `delay` is over; sooner only where the broker cannot wait so
    /// long, at the longest delay that it has. Does not itself wait for that.
    ///
    /// # Errors
    /// If the broker cannot be told.
    fn put_back(self, delay: Duration) -> impl Future<Output = Result<(), BrokerError>> + Send;

    /// Puts the message, whole, where people look after it, with [`DeadLetter::headers`] added, and acknowledges it
    /// after the broker has confirmed that it is kept there.
    ///
    /// # Errors
    /// If that was not confirmed: the message is delivered again, and may be in both places.
    fn dead_letter(self, reason: &DeadLetter) -> impl Future<Output = Result<(), BrokerError>> + Send;

    /// Starts the deadline again, where the broker has one; does nothing elsewhere. May be dropped halfway.
    ///
    /// # Errors
    /// If the broker cannot be told. The delivery can still be settled.
    fn extend(&mut self) -> impl Future<Output = Result<(), BrokerError>> + Send;

    /// How long after it was delivered or extended the broker gives a message to somebody else that was not settled,
    /// on the broker's clock. `None` where it waits for as long as the connection lives.
    fn deadline(&self) -> Option<Duration>;
}

/// Why a message goes where people look after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// In one word, for programs.
    pub reason: Reason,
    /// In one line, for people.
    pub detail: String,
    /// Who gave it up.
    pub consumer: String,
    /// How many attempts it had; zero if none was made.
    pub attempts: u32,
}

/// The kinds of reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// It failed, or killed its worker, as often as is allowed.
    AttemptsExhausted,
    /// The handler says that it can never be processed.
    Failed,
    /// Its id was used before for another payload.
    IdReused,
    /// It has no id, so nobody could tell it from another.
    NoId,
}

impl Reason {
    /// The word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AttemptsExhausted => "attempts-exhausted",
            Self::Failed => "failed",
            Self::IdReused => "message-id-reused",
            Self::NoId => "message-id-missing",
        }
    }
}

/// The header of a dead letter that has [`Reason::as_str`].
pub const REASON: &str = "Onlyonce-Dead-Letter-Reason";
/// The header of a dead letter that has the reason for people: one line of printable ASCII, of at most
/// [`DETAIL_BYTES_MAX`].
pub const DETAIL: &str = "Onlyonce-Dead-Letter-Detail";
/// The header of a dead letter that has the consumer's name.
pub const CONSUMER: &str = "Onlyonce-Dead-Letter-Consumer";
/// The header of a dead letter that has the number of attempts.
pub const ATTEMPTS: &str = "Onlyonce-Dead-Letter-Attempts";

/// How many bytes of a reason are kept.
pub const DETAIL_BYTES_MAX: usize = 1_024;

impl DeadLetter {
    /// The headers that a dead letter has besides its own. Safe on every broker: printable ASCII.
    #[must_use]
    pub fn headers(&self) -> [(&'static str, String); 4] {
        [
            (REASON, self.reason.as_str().to_owned()),
            (DETAIL, line(&self.detail)),
            (CONSUMER, line(&self.consumer)),
            (ATTEMPTS, self.attempts.to_string()),
        ]
    }
}

/// An error's text may have any bytes in it, and any length.
fn line(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars() {
        let before = line.len();
        match c {
            ' '..='~' => line.push(c),
            _ if c.is_whitespace() => line.push(' '),
            _ => line.extend(c.escape_default()),
        }
        if line.len() > DETAIL_BYTES_MAX {
            line.truncate(before);
            break;
        }
    }
    line
}

/// What a broker could not do.
#[derive(Debug)]
pub struct BrokerError {
    kind: BrokerErrorKind,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// Whether trying again may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokerErrorKind {
    /// The configuration must change first.
    Refused,
    /// The circumstances are to blame: the broker is away, or the connection was lost.
    Unavailable,
}

impl BrokerError {
    /// The configuration must change first; `message` says what is wrong, and what is allowed.
    pub fn refused(message: impl Into<String>) -> Self {
        Self { kind: BrokerErrorKind::Refused, message: message.into(), source: None }
    }

    /// The broker is away, or the connection was lost; `message` says in one line what could not be done.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self { kind: BrokerErrorKind::Unavailable, message: message.into(), source: None }
    }

    /// The same with its cause attached.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Whether trying again may help.
    #[must_use]
    pub fn kind(&self) -> BrokerErrorKind {
        self.kind
    }
}

impl fmt::Display for BrokerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl StdError for BrokerError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_one_line_of_printable_ascii_whatever_the_error_said() {
        let letter = |detail: &str| DeadLetter {
            reason: Reason::Failed,
            detail: detail.to_owned(),
            consumer: "billing\r\nevil: 1".to_owned(),
            attempts: 3,
        };
        let headers = letter("no such\taccount:\r\n\u{fc}\u{0}").headers();
        assert_eq!(
            headers.map(|(_, value)| value),
            ["failed", "no such account:  \\u{fc}\\u{0}", "billing  evil: 1", "3"].map(str::to_owned)
        );
        let [_, (_, long), ..] = letter(&"\u{fc}".repeat(4_000)).headers();
        assert!(long.len() <= DETAIL_BYTES_MAX && long.ends_with("\\u{fc}"), "{} {long}", long.len());
    }
}

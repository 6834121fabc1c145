//! Why a call has no answer that settles it, and whether the work may have happened.

use std::fmt;
use std::time::Duration;

use onlyonce_core::Key;
use onlyonce_core::identity::MalformedKey;

use crate::answer::{Answer, Problem};
use crate::decide::{Because, Work};
#[cfg(feature = "journal")]
use crate::journal::JournalError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a call has no answer that settles it. [`work`](Self::work) says whether the work may have happened,
/// [`key`](Self::key) what to go on with.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The request's own key cannot be used. Nothing was sent.
    Key(MalformedKey),
    /// The request cannot be sent. Nothing was sent.
    Request {
        /// What is wrong with it.
        reason: String,
        /// What lies behind.
        source: Option<Source>,
    },
    /// The server refuses the key or the request. No retry changes that.
    Refused(Box<Refused>),
    /// There was no answer that settles it. The same call with the same key goes on where this one ended.
    GaveUp(Box<GaveUp>),
    /// The intent stands in the journal with another request. Nothing was sent.
    IntentReused {
        /// The intent.
        intent: String,
        /// What differs: `key`, `method`, `url`, `body`.
        differs: Vec<&'static str>,
    },
    /// The intent was sent, its outcome was never learnt, and it is older than the server's memory: to send
    /// it again could do the work a second time. A person has to look.
    Unknown {
        /// The intent.
        intent: String,
        /// The key that it was sent with.
        key: Key,
        /// How long ago it was written down, on the local clock.
        age: Duration,
    },
    /// The journal could not be used, so this call sent nothing. An earlier one with the same intent may have.
    #[cfg(feature = "journal")]
    Journal(JournalError),
}

/// What a server said about a key that it refused.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Refused {
    /// The key.
    pub key: Option<Key>,
    /// The server's code: `idempotency-key-reused`, `outcome-unknown` and so on.
    pub code: String,
    /// The server's sentence about it.
    pub detail: String,
    /// In what this request differs from the first one with its key: `target`, `body`.
    pub differs: Vec<String>,
    /// The status that the first copy was answered with, if its answer was not kept.
    pub original_status: Option<u16>,
    /// Whether the work of this call may have happened.
    pub work: Work,
    /// How many attempts were made.
    pub attempts: u32,
    /// The whole answer.
    pub answer: Answer,
}

/// How a call ended without an answer that settles it.
#[derive(Debug)]
#[non_exhaustive]
pub struct GaveUp {
    /// The key that every attempt carried. Send it again to go on.
    pub key: Option<Key>,
    /// Why there was no further attempt.
    pub because: Because,
    /// Whether the work may have happened, in any of the attempts.
    pub work: Work,
    /// How many attempts were made.
    pub attempts: u32,
    /// The last answer, if the last attempt had one.
    pub answer: Option<Answer>,
    pub(crate) source: Option<Source>,
}

impl Error {
    /// The key that the call carried, if it got as far as having one.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Refused(refused) => refused.key.as_ref(),
            Self::GaveUp(gave_up) => gave_up.key.as_ref(),
            Self::Unknown { key, .. } => Some(key),
            _ => None,
        }
    }

    /// Whether the work may have happened, as far as this call and the journal know.
    #[must_use]
    pub fn work(&self) -> Work {
        match self {
            Self::Refused(refused) => refused.work,
            Self::GaveUp(gave_up) => gave_up.work,
            Self::Unknown { .. } => Work::MayBeDone,
            // What stands there about the intent could not be read.
            #[cfg(feature = "journal")]
            Self::Journal(JournalError::Damaged(_) | JournalError::Failed(_)) => Work::MayBeDone,
            _ => Work::NotDone,
        }
    }

    /// The error of this crate that a middleware error holds.
    #[must_use]
    pub fn of(error: &reqwest_middleware::Error) -> Option<&Self> {
        match error {
            reqwest_middleware::Error::Middleware(error) => error.downcast_ref(),
            reqwest_middleware::Error::Reqwest(_) => None,
        }
    }

    pub(crate) fn request(reason: impl Into<String>) -> Self {
        Self::Request { reason: reason.into(), source: None }
    }
}

#[cfg(feature = "journal")]
impl Error {
    /// An earlier sender of the same intent may have done the work.
    pub(crate) fn in_doubt(mut self) -> Self {
        match &mut self {
            Self::Refused(refused) => refused.work = refused.work.max(Work::MayBeDone),
            Self::GaveUp(gave_up) => gave_up.work = gave_up.work.max(Work::MayBeDone),
            _ => {}
        }
        self
    }
}

impl Refused {
    pub(crate) fn new(answer: Answer, problem: Problem, work: Work) -> Self {
        let Problem { code, detail, differs, original_status } = problem;
        let (key, attempts) = (answer.receipt.key.clone(), answer.receipt.attempts);
        Self { key, code, detail, differs, original_status, work, attempts, answer }
    }
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotDone => "the work was not done",
            Self::MayBeDone => "the work may have been done",
            Self::Done => "the work was done",
        })
    }
}

impl fmt::Display for Because {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Deadline => "the deadline left no time for another",
            Self::Budget => "the retry budget is spent",
            Self::NotRepeatable => "without a key another could do the work twice",
            Self::AnswerTooLarge => "the answer is longer than is kept",
            Self::Permanent => "another could not end differently",
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(error) => write!(f, "{error}"),
            Self::Request { reason, .. } => f.write_str(reason),
            Self::Refused(refused) => fmt::Display::fmt(refused, f),
            Self::GaveUp(gave_up) => fmt::Display::fmt(gave_up, f),
            Self::IntentReused { intent, differs } => write!(
                f,
                "the intent {intent:?} is in the journal with another {}; one intent is one request",
                differs.join(" and ")
            ),
            Self::Unknown { intent, key, age } => write!(
                f,
                "the outcome of the intent {intent:?} (key {key}) is unknown, and after {} s the server may have \
                 forgotten its key: find out whether it happened, then forget the intent",
                age.as_secs()
            ),
            #[cfg(feature = "journal")]
            Self::Journal(error) => write!(f, "{error}"),
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, detail, differs, answer, work, .. } = self;
        write!(f, "the server refused with {} {code}", answer.status.as_u16())?;
        if !differs.is_empty() {
            write!(f, " (another {})", differs.join(" and "))?;
        }
        if !detail.is_empty() {
            write!(f, ": {detail}")?;
        }
        if *work == Work::NotDone { Ok(()) } else { write!(f, " ({work})") }
    }
}

impl fmt::Display for GaveUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, because, work, attempts, answer, source } = self;
        let plural = if *attempts == 1 { "" } else { "s" };
        write!(f, "no final answer after {attempts} attempt{plural}, and {because}; {work}")?;
        if let Some(key) = key {
            write!(f, " (key {key})")?;
        }
        match (answer, source) {
            (Some(answer), _) => write!(f, "; the last answer was {}", answer.status),
            // reqwest's own words do not say why.
            (None, Some(source)) => {
                let deepest = deepest(&**source);
                write!(f, "; the last attempt: {source}")?;
                if deepest.to_string() == source.to_string() { Ok(()) } else { write!(f, ": {deepest}") }
            }
            (None, None) => Ok(()),
        }
    }
}

fn deepest<'a>(error: &'a (dyn std::error::Error + 'static)) -> &'a (dyn std::error::Error + 'static) {
    std::iter::successors(Some(error), |error| error.source()).last().unwrap_or(error)
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        fn plain(source: &Source) -> &(dyn std::error::Error + 'static) {
            &**source
        }
        match self {
            Self::Key(error) => Some(error),
            Self::Request { source, .. } => source.as_ref().map(plain),
            Self::GaveUp(gave_up) => gave_up.source.as_ref().map(plain),
            #[cfg(feature = "journal")]
            Self::Journal(error) => Some(error),
            _ => None,
        }
    }
}

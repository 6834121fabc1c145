//! What to do after an attempt: every decision of a call, as pure functions.
//!
//! ```text
//!            ┌────── again, after a wait ◀─────┐
//!            ▼                                 │
//!  call ── attempt ──▶ answer, or lost ──▶ decide ──▶ settled: the caller's answer
//!                                              ├────▶ refused: the server says why
//!                                              └────▶ given up: deadline, budget, or no retry is safe
//! ```
//!
//! | an attempt came to | decision |
//! |---|---|
//! | a replay, whatever its status | settled |
//! | a refusal of the key (400, 401, 409, 413, 422 with its problem type) | refused |
//! | 409 whose problem type says *in flight* | again; costs no budget |
//! | a problem type that says *not run* or *lost from sight* | again |
//! | `Stripe-Should-Retry` | as it says |
//! | 408, 425, 429, 5xx but 501 and 505 | again |
//! | any other status, an application's 409 and 422 among them | settled |
//! | no connection, a timeout, an answer lost or cut off | again |
//! | a request that cannot be sent, a certificate that is not trusted, an answer too large to keep | given up |
//!
//! Only an error is read for a problem: a success may speak of another's. After a 303 the work may be done, whatever
//! its result is answered with.
//!
//! *Again* wants a request that may be [repeated](crate::redirect::repeatable), time and budget.

use std::time::Duration;

use http::StatusCode;
use onlyonce_core::backoff::Backoff;

/// Whether the work of a request has happened, as far as its sender can know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// Nothing reached the server, or it said that nothing was done.
    NotDone,
    /// Nobody on this side knows.
    MayBeDone,
    /// The server said that it was.
    Done,
}

/// Why a call ended without an answer that settles it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Because {
    /// The deadline is over, or would be before the next attempt may be made.
    Deadline,
    /// The client's retry budget is spent.
    Budget,
    /// The request carries no key and is not idempotent by its method: another attempt could do the work twice.
    NotRepeatable,
    /// The answer is longer than the client keeps.
    AnswerTooLarge,
    /// No further attempt can end differently.
    Permanent,
}

/// What one attempt came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    Answered(Signs),
    Lost(Loss),
}

/// What an answer says, apart from its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signs {
    pub(crate) status: StatusCode,
    pub(crate) says: Option<Says>,
    pub(crate) replayed: bool,
    /// It is what a 303 led to: the work was done before.
    pub(crate) result: bool,
    /// `Stripe-Should-Retry`.
    pub(crate) should_retry: Option<bool>,
    pub(crate) retry_after: Option<Duration>,
}

/// What a problem type says about the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Says {
    /// The first copy is still running.
    InFlight,
    /// This attempt did nothing.
    NotRun,
    /// The server lost sight of the work.
    LostSight,
    /// The key is refused, and why does not pass by itself.
    Refused(Work),
}

/// How an attempt ended without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// There was no connection: nothing was sent.
    NotConnected,
    /// It took too long.
    TimedOut,
    /// The connection broke, or the answer was cut off or made no sense.
    Broken,
    /// The answer is longer than is kept.
    TooLarge,
    /// The request cannot be sent as it is, or not to this server.
    NotSendable,
    /// An inner layer failed in a way that says nothing.
    Foreign,
}

/// Where a call stands after an attempt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Situation {
    pub(crate) repeatable: bool,
    /// How many attempts were made, this one included.
    pub(crate) attempts: u32,
    /// How long until the deadline.
    pub(crate) left: Duration,
    pub(crate) affordable: bool,
    /// Random, from 0 to 1.
    pub(crate) jitter: f64,
}

/// How long to wait between attempts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) first: Duration,
    pub(crate) max: Duration,
    pub(crate) retry_after_max: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The answer is the caller's.
    Settled,
    Refused,
    Again {
        after: Duration,
        /// Whether the budget pays for it.
        charged: bool,
    },
    GiveUp(Because),
}

pub(crate) fn decide(attempt: Attempt, situation: Situation, pace: Pace) -> Decision {
    let (retry_after, charged) = match attempt {
        Attempt::Answered(signs) => match judge(signs) {
            Judged::Settled => return Decision::Settled,
            Judged::Refused => return Decision::Refused,
            Judged::Again { charged } => (signs.retry_after, charged),
        },
        Attempt::Lost(Loss::TooLarge) => return Decision::GiveUp(Because::AnswerTooLarge),
        Attempt::Lost(Loss::NotSendable | Loss::Foreign) => return Decision::GiveUp(Because::Permanent),
        Attempt::Lost(Loss::NotConnected | Loss::TimedOut | Loss::Broken) => (None, true),
    };
    if !situation.repeatable {
        return Decision::GiveUp(Because::NotRepeatable);
    }
    let after = wait(retry_after, situation, pace);
    if after >= situation.left {
        return Decision::GiveUp(Because::Deadline);
    }
    if charged && !situation.affordable {
        return Decision::GiveUp(Because::Budget);
    }
    Decision::Again { after, charged }
}

enum Judged {
    Settled,
    Refused,
    Again { charged: bool },
}

fn judge(signs: Signs) -> Judged {
    let Signs { status, says, replayed, should_retry, .. } = signs;
    match (says, should_retry) {
        _ if replayed => Judged::Settled,
        (Some(Says::Refused(_)), _) => Judged::Refused,
        (Some(Says::InFlight), _) => Judged::Again { charged: false },
        (Some(Says::NotRun | Says::LostSight), _) => Judged::Again { charged: true },
        (_, Some(true)) if status.is_client_error() || status.is_server_error() => {
            Judged::Again { charged: true }
        }
        (_, Some(false)) => Judged::Settled,
        _ if passes(status) => Judged::Again { charged: true },
        _ => Judged::Settled,
    }
}

/// Whether what a status stands for may pass by itself.
fn passes(status: StatusCode) -> bool {
    match status.as_u16() {
        // Not implemented, HTTP version not supported: it never will be.
        501 | 505 => false,
        408 | 425 | 429 | 500..=599 => true,
        _ => false,
    }
}

/// Half of each wait is random, so that clients that failed together do not return together. A server's own
/// wish is at least met, as far as the cap goes.
fn wait(retry_after: Option<Duration>, situation: Situation, pace: Pace) -> Duration {
    match retry_after {
        Some(wish) => wish.min(pace.retry_after_max).saturating_add(pace.first.mul_f64(situation.jitter)),
        None => {
            let retries = situation.attempts.saturating_sub(1) as usize;
            let whole = Backoff::new(pace.first, pace.max).nth(retries).unwrap_or(pace.max);
            whole.mul_f64(0.5 + situation.jitter / 2.0)
        }
    }
}

/// Whether this attempt may have done the work.
pub(crate) fn work(attempt: Attempt) -> Work {
    match attempt {
        Attempt::Answered(signs) if signs.result => said(attempt).max(Work::MayBeDone),
        _ => said(attempt),
    }
}

fn said(attempt: Attempt) -> Work {
    let signs = match attempt {
        Attempt::Lost(Loss::NotConnected | Loss::NotSendable) => return Work::NotDone,
        Attempt::Lost(Loss::TimedOut | Loss::Broken | Loss::TooLarge | Loss::Foreign) => {
            return Work::MayBeDone;
        }
        Attempt::Answered(signs) => signs,
    };
    match (signs.says, signs.status.as_u16()) {
        (Some(Says::NotRun), _) => Work::NotDone,
        (Some(Says::InFlight | Says::LostSight), _) => Work::MayBeDone,
        (Some(Says::Refused(work)), _) => work,
        // They ask for another request before anything is done.
        (None, 401 | 407 | 408 | 421 | 425 | 429 | 501 | 505) => Work::NotDone,
        (None, 200..=399) => Work::Done,
        (None, _) => Work::MayBeDone,
    }
}

/// Whether an answer is the last word on its key: what a server that keeps this contract records and
/// replays. Another answer is true now and may be different later.
#[cfg(feature = "journal")]
pub(crate) fn lasts(status: StatusCode, replayed: bool) -> bool {
    replayed || !matches!(status.as_u16(), 401 | 407 | 408 | 421 | 425 | 429 | 500..)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Pace = Pace {
        first: Duration::from_millis(200),
        max: Duration::from_secs(10),
        retry_after_max: Duration::from_secs(60),
    };
    const CALM: Situation = Situation {
        repeatable: true,
        attempts: 1,
        left: Duration::from_secs(600),
        affordable: true,
        jitter: 0.0,
    };

    fn signs(status: u16) -> Signs {
        let status = StatusCode::from_u16(status).expect("a status");
        let (says, should_retry, retry_after) = (None, None, None);
        Signs { status, says, replayed: false, result: false, should_retry, retry_after }
    }

    fn again(attempt: Attempt) -> bool {
        matches!(decide(attempt, CALM, PACE), Decision::Again { .. })
    }

    #[test]
    fn every_status_is_retried_or_final() {
        let retried: Vec<u16> =
            (200..=599).filter(|status| again(Attempt::Answered(signs(*status)))).collect();
        let expected: Vec<u16> = [408, 425, 429]
            .into_iter()
            .chain((500..=599).filter(|status| !matches!(status, 501 | 505)))
            .collect();
        assert_eq!(retried, expected);
        for status in (200..=599).filter(|status| !expected.contains(status)) {
            assert_eq!(decide(Attempt::Answered(signs(status)), CALM, PACE), Decision::Settled, "{status}");
        }
    }

    #[test]
    fn a_problem_type_decides_before_the_status() {
        for status in [400, 409, 422, 500] {
            let says = |says| Attempt::Answered(Signs { says: Some(says), ..signs(status) });
            assert_eq!(
                decide(says(Says::InFlight), CALM, PACE),
                Decision::Again { after: Duration::from_millis(100), charged: false }
            );
            for passing in [Says::NotRun, Says::LostSight] {
                assert!(matches!(decide(says(passing), CALM, PACE), Decision::Again { charged: true, .. }));
            }
            for work in [Work::NotDone, Work::MayBeDone, Work::Done] {
                assert_eq!(decide(says(Says::Refused(work)), CALM, PACE), Decision::Refused);
            }
        }
        let bare = Attempt::Answered(signs(409));
        assert_eq!(decide(bare, CALM, PACE), Decision::Settled, "an application's own conflict");
    }

    #[test]
    fn a_replay_is_final_whatever_it_replays() {
        for status in [200, 402, 409, 425, 429, 500, 503] {
            let replay = Signs { replayed: true, should_retry: Some(true), ..signs(status) };
            assert_eq!(decide(Attempt::Answered(replay), CALM, PACE), Decision::Settled, "{status}");
        }
    }

    #[test]
    fn a_server_that_says_whether_to_retry_is_heard() {
        for (status, says, expected) in [
            (409, true, true),
            (409, false, false),
            (500, false, false),
            (402, true, true),
            (200, true, false),
        ] {
            let attempt = Attempt::Answered(Signs { should_retry: Some(says), ..signs(status) });
            assert_eq!(again(attempt), expected, "{status} {says}");
        }
    }

    #[test]
    fn every_loss() {
        for (loss, retried) in [
            (Loss::NotConnected, true),
            (Loss::TimedOut, true),
            (Loss::Broken, true),
            (Loss::TooLarge, false),
            (Loss::NotSendable, false),
            (Loss::Foreign, false),
        ] {
            assert_eq!(again(Attempt::Lost(loss)), retried, "{loss:?}");
        }
    }

    #[test]
    fn what_is_not_repeatable_is_never_sent_again() {
        let once = Situation { repeatable: false, ..CALM };
        for loss in [Loss::NotConnected, Loss::TimedOut, Loss::Broken] {
            assert_eq!(decide(Attempt::Lost(loss), once, PACE), Decision::GiveUp(Because::NotRepeatable));
        }
        for status in 200..=599 {
            for should_retry in [None, Some(true)] {
                let attempt = Attempt::Answered(Signs { should_retry, ..signs(status) });
                assert!(!matches!(decide(attempt, once, PACE), Decision::Again { .. }), "{status}");
            }
        }
    }

    #[test]
    fn time_and_budget_bound_retries() {
        let busy = Attempt::Answered(signs(503));
        let late = Situation { left: Duration::from_millis(100), ..CALM };
        assert_eq!(decide(busy, late, PACE), Decision::GiveUp(Because::Deadline));
        let spent = Situation { affordable: false, ..CALM };
        assert_eq!(decide(busy, spent, PACE), Decision::GiveUp(Because::Budget));
        let in_flight = Attempt::Answered(Signs { says: Some(Says::InFlight), ..signs(409) });
        assert!(matches!(decide(in_flight, spent, PACE), Decision::Again { charged: false, .. }));
    }

    #[test]
    fn waits_double_up_to_the_ceiling_and_half_of_each_is_random() {
        let wait = |attempts, jitter| wait(None, Situation { attempts, jitter, ..CALM }, PACE).as_millis();
        assert_eq!([1, 2, 3, 7, 100].map(|attempts| wait(attempts, 0.0)), [100, 200, 400, 5_000, 5_000]);
        assert_eq!([1, 2, 3, 7, 100].map(|attempts| wait(attempts, 1.0)), [200, 400, 800, 10_000, 10_000]);
    }

    #[test]
    fn retry_after_is_met_but_years_are_not() {
        let after = |seconds, jitter, left| {
            let signs = Signs { retry_after: Some(Duration::from_secs(seconds)), ..signs(503) };
            let left = Duration::from_secs(left);
            decide(Attempt::Answered(signs), Situation { jitter, left, ..CALM }, PACE)
        };
        let again = |millis| Decision::Again { after: Duration::from_millis(millis), charged: true };
        assert_eq!(after(7, 0.0, 600), again(7_000));
        assert_eq!(after(7, 1.0, 600), again(7_200));
        assert_eq!(after(0, 0.0, 600), again(0));
        assert_eq!(after(u64::MAX, 0.0, 600), again(60_000));
        assert_eq!(
            after(u64::MAX, 0.0, 30),
            Decision::GiveUp(Because::Deadline),
            "nothing is waited for in vain"
        );
    }

    #[test]
    fn whether_the_work_may_have_happened() {
        let answered = |status| work(Attempt::Answered(signs(status)));
        for (status, expected) in [
            (201, Work::Done),
            (404, Work::MayBeDone),
            (425, Work::NotDone),
            (429, Work::NotDone),
            (503, Work::MayBeDone),
        ] {
            assert_eq!(answered(status), expected, "{status}");
        }
        assert_eq!(work(Attempt::Lost(Loss::NotConnected)), Work::NotDone);
        for loss in [Loss::TimedOut, Loss::Broken, Loss::Foreign, Loss::TooLarge] {
            assert_eq!(work(Attempt::Lost(loss)), Work::MayBeDone, "{loss:?}");
        }
        let said = |says| work(Attempt::Answered(Signs { says: Some(says), ..signs(503) }));
        assert_eq!(said(Says::NotRun), Work::NotDone);
        assert_eq!(said(Says::LostSight), Work::MayBeDone);
        assert_eq!(said(Says::InFlight), Work::MayBeDone);
        assert_eq!(said(Says::Refused(Work::Done)), Work::Done);
    }

    #[cfg(feature = "journal")]
    #[test]
    fn only_what_servers_keep_is_the_last_word() {
        for (status, last) in
            [(200, true), (303, true), (402, true), (409, true), (401, false), (429, false), (501, false)]
        {
            let status = StatusCode::from_u16(status).expect("a status");
            assert_eq!(lasts(status, false), last, "{status}");
            assert!(lasts(status, true));
        }
    }
}

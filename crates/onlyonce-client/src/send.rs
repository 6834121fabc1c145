//! One call: attempts with one key, until an answer settles it.

use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::Method;
use http::header::{
    AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, PROXY_AUTHORIZATION,
    TRANSFER_ENCODING,
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use onlyonce_core::Key;
use reqwest::{Body, Request, Response};
use tokio::time::{sleep, timeout};

use crate::answer::{Answer, Receipt, Unread, is_replay, signs};
use crate::budget::Budget;
use crate::decide::{self, Attempt, Because, Decision, Loss, Pace, Situation, Work};
use crate::error::{Error, GaveUp, Refused};
use crate::key;
use crate::redirect::{self, Hop, REDIRECTS_MAX, Redirected};
use crate::settings::{Settings, SettingsError};

/// What sends one request once.
pub(crate) trait Transport: Send {
    fn send(&mut self, request: Request) -> impl Future<Output = Result<Response, Lost>> + Send;
}

/// An attempt without an answer.
#[derive(Debug)]
pub(crate) struct Lost {
    pub(crate) loss: Loss,
    pub(crate) source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl From<reqwest::Error> for Lost {
    fn from(error: reqwest::Error) -> Self {
        let loss = if error.is_builder() || is_untrusted(&error) {
            Loss::NotSendable
        } else if error.is_connect() {
            Loss::NotConnected
        } else if error.is_timeout() {
            Loss::TimedOut
        } else {
            Loss::Broken
        };
        Self { loss, source: Some(error.into()) }
    }
}

/// Whether the server's certificate was refused: nothing was sent, and waiting makes nobody trustworthy.
fn is_untrusted(error: &reqwest::Error) -> bool {
    std::iter::successors(Some(error as &(dyn std::error::Error + 'static)), |error| beneath(*error))
        .filter_map(|error| error.downcast_ref())
        .any(|error| matches!(error, rustls::Error::InvalidCertificate(_)))
}

/// What lies behind an error. An I/O error names as its source that of what it holds, and skips it.
fn beneath<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a (dyn std::error::Error + 'static)> {
    match error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
        Some(held) => Some(held),
        None => error.source(),
    }
}

/// A request as every attempt sends it.
pub(crate) struct Frozen {
    pub(crate) request: Request,
    pub(crate) key: Option<Key>,
    pub(crate) started: Started,
}

/// When a call began: the deadline counts from there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Started {
    pub(crate) at: Instant,
    /// When its key was first used, or later. The other clock stands still while the machine sleeps, and the
    /// server's does not.
    pub(crate) on_the_wall: SystemTime,
}

impl Started {
    pub(crate) fn now() -> Self {
        Self { at: Instant::now(), on_the_wall: SystemTime::now() }
    }

    /// How long until the deadline. None once the server may have forgotten the key.
    fn left(&self, settings: &Settings, now: Self) -> Duration {
        let age = now.on_the_wall.duration_since(self.on_the_wall).unwrap_or_default();
        if age >= settings.server_retention {
            return Duration::ZERO;
        }
        settings.deadline.saturating_sub(now.at.saturating_duration_since(self.at))
    }
}

/// What a call ended with: the whole answer, or for a request without a key the response as it arrives.
pub(crate) enum Reply {
    Whole(Answer),
    Arriving(Response),
}

/// What all calls of one client share.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) settings: Settings,
    budget: Budget,
}

impl Sender {
    pub(crate) fn new(settings: Settings) -> Result<Self, SettingsError> {
        settings.check()?;
        let budget = Budget::new(settings.budget, Instant::now());
        Ok(Self { settings, budget })
    }

    /// Sends the request until an answer settles it or a further attempt is out of the question.
    ///
    /// `gather` says whether a response is read to its end within its attempt.
    pub(crate) async fn run(
        &self,
        transport: &mut impl Transport,
        frozen: Frozen,
        gather: bool,
    ) -> Result<Reply, Error> {
        let Frozen { request, key, started } = frozen;
        let repeatable = redirect::repeatable(request.method(), key.is_some());
        let mut next = Some(request);
        let mut work = Work::NotDone;
        self.budget.deposit(Instant::now());
        for attempts in 1_u32.. {
            let request = next.take().expect("a request that is repeated is kept");
            // A body that streams is gone once it was sent.
            next = request.try_clone().filter(|_| repeatable);
            let (attempt, ended) = self.attempt(transport, request, key.is_some(), gather, started).await;
            work = work.max(decide::work(attempt));
            let situation = Situation {
                repeatable: next.is_some(),
                attempts,
                left: started.left(&self.settings, Started::now()),
                affordable: self.budget.affords(Instant::now()),
                jitter: jitter(),
            };
            let call = Called { key: key.clone(), attempts, work };
            match decide::decide(attempt, situation, self.pace()) {
                Decision::Again { after, charged } => {
                    if charged {
                        self.budget.withdraw(Instant::now());
                    }
                    tracing::debug!(?attempt, attempts, ?after, "another attempt follows");
                    sleep(after).await;
                    if started.left(&self.settings, Started::now()).is_zero() {
                        return ended.given_up(call, Because::Deadline);
                    }
                }
                Decision::Settled => return ended.settled(call),
                Decision::Refused => return Err(ended.refused(call)),
                Decision::GiveUp(because) => return ended.given_up(call, because),
            }
        }
        unreachable!("a deadline ends every call")
    }

    fn pace(&self) -> Pace {
        let Settings { backoff_first, backoff_max, retry_after_max, .. } = self.settings;
        Pace { first: backoff_first, max: backoff_max, retry_after_max }
    }

    async fn attempt(
        &self,
        transport: &mut impl Transport,
        request: Request,
        keyed: bool,
        gather: bool,
        started: Started,
    ) -> (Attempt, Ended) {
        let left = started.left(&self.settings, Started::now());
        if left.is_zero() {
            let source = Some("no time was left to send it".into());
            return (
                Attempt::Lost(Loss::NotConnected),
                Ended::Lost(Lost { loss: Loss::NotConnected, source }),
            );
        }
        let whole = async {
            let (response, led) = self.hops(transport, request, keyed).await?;
            self.read(response, led, gather).await
        };
        let ended = match timeout(self.settings.attempt_timeout.min(left), whole).await {
            Ok(Ok(reply)) => Ended::Answered(reply),
            Ok(Err(lost)) => Ended::Lost(lost),
            Err(_) => {
                Ended::Lost(Lost { loss: Loss::TimedOut, source: Some("the attempt took too long".into()) })
            }
        };
        let now = SystemTime::now();
        let attempt = match &ended {
            Ended::Answered(Reply::Whole(answer)) => Attempt::Answered(answer.signs(now)),
            Ended::Answered(Reply::Arriving(response)) => {
                Attempt::Answered(signs(response.status(), response.headers(), now))
            }
            Ended::Lost(lost) => Attempt::Lost(lost.loss),
        };
        (attempt, ended)
    }

    /// Sends a request and follows where it is redirected.
    async fn hops(
        &self,
        transport: &mut impl Transport,
        mut request: Request,
        mut keyed: bool,
    ) -> Result<(Response, Led), Lost> {
        let mut led = Led::default();
        for hops in 0.. {
            let (method, url) = (request.method().clone(), request.url().clone());
            let again = request.try_clone();
            let without_body = bare(&request);
            let response = transport.send(request).await.map_err(|lost| lost.after(led))?;
            led.replayed |= is_replay(response.headers());
            let location = response.headers().get(http::header::LOCATION).and_then(|url| url.to_str().ok());
            let from = Redirected { method: &method, url: &url, keyed };
            let hop = redirect::follow(&from, response.status(), location).filter(|_| hops < REDIRECTS_MAX);
            let next = match hop {
                Some(hop) if hop.to_result => Some((without_body, hop)),
                Some(hop) => again.map(|again| (again, hop)),
                None => None,
            };
            let Some((next, hop)) = next else { return Ok((response, led)) };
            keyed &= !hop.to_result;
            led.to_result |= hop.to_result;
            request = self.redirected(next, hop);
        }
        unreachable!("the hops are counted")
    }

    fn redirected(&self, mut request: Request, hop: Hop) -> Request {
        let headers = request.headers_mut();
        if hop.to_result {
            for name in [
                &self.settings.key_header,
                &CONTENT_TYPE,
                &CONTENT_LENGTH,
                &CONTENT_ENCODING,
                &TRANSFER_ENCODING,
            ] {
                headers.remove(name);
            }
        }
        if !hop.same_origin {
            for name in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, self.settings.key_header.clone()] {
                headers.remove(name);
            }
        }
        if hop.to_result && *request.method() != Method::HEAD {
            *request.method_mut() = Method::GET;
        }
        *request.url_mut() = hop.url;
        request
    }

    async fn read(&self, response: Response, led: Led, gather: bool) -> Result<Reply, Lost> {
        // An interim status ends nothing, and nothing beyond has a meaning in HTTP.
        if !(200..=599).contains(&response.status().as_u16()) {
            return Err(Lost {
                loss: Loss::Broken,
                source: Some("the answer's status is not one of HTTP".into()),
            });
        }
        if !gather {
            return Ok(Reply::Arriving(response));
        }
        let mut answer = Answer::gather(response, self.settings.answer_body_bytes_max).await?;
        answer.receipt.replayed |= led.replayed;
        answer.arrived.result = led.to_result;
        Ok(Reply::Whole(answer))
    }

    /// Makes a request one that can be sent several times, and gives it its key.
    ///
    /// Its own key wins, then `given`; otherwise a POST or a PATCH is given a fresh one.
    ///
    /// # Errors
    /// If its own key is malformed, or its body does not end within the limit and the deadline.
    pub(crate) async fn freeze(
        &self,
        mut request: Request,
        given: Option<&Key>,
        keyless: bool,
    ) -> Result<Frozen, Error> {
        let started = Started::now();
        let name = &self.settings.key_header;
        let mut key = key::of(request.headers(), name).map_err(Error::Key)?;
        if key.is_none() && !keyless {
            let fresh = || matches!(*request.method(), Method::POST | Method::PATCH).then(key::mint);
            key = given.cloned().or_else(fresh);
            if let Some(key) = &key {
                request.headers_mut().insert(name, key::field(key));
            }
        }
        if key.is_some() {
            let body = request.body_mut().take();
            if let Some(body) = body {
                *request.body_mut() = Some(Body::from(self.whole(body).await?));
            }
        }
        Ok(Frozen { request, key, started })
    }

    async fn whole(&self, body: Body) -> Result<Bytes, Error> {
        let bytes_max = self.settings.request_body_bytes_max;
        let too_large = || Error::request(format!("the request body has more than {bytes_max} bytes"));
        match timeout(self.settings.deadline, Limited::new(body, bytes_max).collect()).await {
            Ok(Ok(collected)) => Ok(collected.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
            Err(_) => Err(Error::request("the request body did not end before the deadline")),
            Ok(Err(error)) => Err(Error::Request {
                reason: "the request body could not be read".to_owned(),
                source: Some(error),
            }),
        }
    }
}

/// The request without its body.
fn bare(request: &Request) -> Request {
    let mut bare = Request::new(request.method().clone(), request.url().clone());
    *bare.headers_mut() = request.headers().clone();
    *bare.timeout_mut() = request.timeout().copied();
    *bare.version_mut() = request.version();
    bare
}

/// What redirects came before an answer.
#[derive(Clone, Copy, Debug, Default)]
struct Led {
    /// One of them was a replay.
    replayed: bool,
    /// One of them led to the result of work that was done.
    to_result: bool,
}

impl Lost {
    /// Once a redirect led to the result of work that was done, a failure no longer means that nothing was sent.
    fn after(mut self, led: Led) -> Self {
        self.loss = match self.loss {
            Loss::NotConnected if led.to_result => Loss::Broken,
            // No further attempt, and yet the work may be done.
            Loss::NotSendable if led.to_result => Loss::Foreign,
            loss => loss,
        };
        self
    }
}

impl From<Unread> for Lost {
    fn from(unread: Unread) -> Self {
        let loss = unread.loss();
        match unread {
            Unread::Broken(error) => Self { loss, source: Some(error.into()) },
            Unread::TooLarge => Self { loss, source: None },
        }
    }
}

/// A call as it stands when it ends.
struct Called {
    key: Option<Key>,
    attempts: u32,
    /// Whether any of the attempts may have done the work.
    work: Work,
}

/// How an attempt ended.
enum Ended {
    Answered(Reply),
    Lost(Lost),
}

impl Ended {
    fn settled(self, call: Called) -> Result<Reply, Error> {
        match self {
            Self::Answered(reply) => Ok(reply.of(call)),
            Self::Lost(_) => unreachable!("only an answer settles a call"),
        }
    }

    fn refused(self, call: Called) -> Error {
        let Self::Answered(Reply::Whole(mut answer)) = self else {
            unreachable!("only a whole answer is read for a refusal")
        };
        let (problem, work) = (answer.problem().unwrap_or_default(), call.work);
        answer.came_of(call);
        Error::Refused(Box::new(Refused::new(answer, problem, work)))
    }

    /// Without a key an answer is the caller's, whatever it is: nothing was promised.
    fn given_up(self, call: Called, because: Because) -> Result<Reply, Error> {
        let Called { key, attempts, work, .. } = &call;
        let mut gave_up = GaveUp {
            key: key.clone(),
            because,
            work: *work,
            attempts: *attempts,
            answer: None,
            source: None,
        };
        match self {
            Self::Answered(reply) if call.key.is_none() => return Ok(reply.of(call)),
            Self::Answered(Reply::Whole(mut answer)) => {
                answer.came_of(call);
                gave_up.answer = Some(answer);
            }
            Self::Answered(Reply::Arriving(_)) => {}
            Self::Lost(Lost { source, .. }) => gave_up.source = source,
        }
        Err(Error::GaveUp(Box::new(gave_up)))
    }
}

impl Answer {
    fn came_of(&mut self, call: Called) {
        self.receipt.key = call.key;
        self.receipt.attempts = call.attempts;
        self.arrived.work = call.work;
    }
}

impl Reply {
    fn of(mut self, call: Called) -> Self {
        match &mut self {
            Self::Whole(answer) => answer.came_of(call),
            Self::Arriving(response) => {
                let Called { key, attempts, .. } = call;
                let replayed = is_replay(response.headers());
                response.extensions_mut().insert(Receipt { key, attempts, replayed, recorded: false });
            }
        }
        self
    }

    pub(crate) fn into_response(self) -> Response {
        match self {
            Self::Whole(answer) => answer.into_response(),
            Self::Arriving(response) => response,
        }
    }
}

/// From 0 to 1.
fn jitter() -> f64 {
    let mut bytes = [0; 4];
    // Without randomness there is no jitter, and the call goes on.
    let _ = getrandom::fill(&mut bytes);
    f64::from(u32::from_be_bytes(bytes)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_left_once_the_server_may_have_forgotten_the_key() {
        const HOUR: Duration = Duration::from_secs(3_600);
        let (settings, start) = (Settings::default(), Started::now());
        let left = |ran: Duration, slept: Duration| {
            let now = Started { at: start.at + ran, on_the_wall: start.on_the_wall + ran + slept };
            start.left(&settings, now).as_secs()
        };
        let second = Duration::from_secs(1);
        assert_eq!(left(Duration::ZERO, Duration::ZERO), 60);
        assert_eq!(left(second, HOUR), 59, "a nap is no reason to stop");
        assert_eq!(left(second, 24 * HOUR), 0);
        assert_eq!(left(61 * second, Duration::ZERO), 0);
        // A clock that was set back says nothing.
        let back = Started { at: start.at + second, on_the_wall: start.on_the_wall - HOUR };
        assert_eq!(start.left(&settings, back).as_secs(), 59);
    }

    #[test]
    fn after_a_303_no_failure_means_that_nothing_was_done() {
        let led = Led { to_result: true, ..Led::default() };
        for loss in [
            Loss::NotConnected,
            Loss::TimedOut,
            Loss::Broken,
            Loss::TooLarge,
            Loss::NotSendable,
            Loss::Foreign,
        ] {
            let lost = Lost { loss, source: None }.after(led);
            assert_eq!(decide::work(Attempt::Lost(lost.loss)), Work::MayBeDone, "{loss:?}");
            let alone = Lost { loss, source: None }.after(Led::default());
            assert_eq!(alone.loss, loss);
        }
    }
}

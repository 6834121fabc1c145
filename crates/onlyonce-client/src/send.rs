//! One call: attempts with one key, until an answer settles it.

use std::time::{Instant, SystemTime};

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
    /// When its call began: the deadline counts from there.
    pub(crate) started: Instant,
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
            let before = work;
            work = work.max(decide::work(attempt));
            let situation = Situation {
                repeatable: next.is_some(),
                attempts,
                left: self.settings.deadline.saturating_sub(started.elapsed()),
                affordable: self.budget.affords(Instant::now()),
                jitter: jitter(),
            };
            let call = Called { key: key.clone(), attempts, before, work };
            match decide::decide(attempt, situation, self.pace()) {
                Decision::Again { after, charged } => {
                    if charged {
                        self.budget.withdraw(Instant::now());
                    }
                    tracing::debug!(?attempt, attempts, ?after, "another attempt follows");
                    sleep(after).await;
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
        started: Instant,
    ) -> (Attempt, Ended) {
        let left = self.settings.deadline.saturating_sub(started.elapsed());
        let whole = async {
            let (response, replayed) = self.hops(transport, request, keyed).await?;
            self.read(response, replayed, gather).await
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

    /// Sends a request and follows where it is redirected. Says whether any of the answers was a replay.
    async fn hops(
        &self,
        transport: &mut impl Transport,
        mut request: Request,
        mut keyed: bool,
    ) -> Result<(Response, bool), Lost> {
        let (mut replayed, mut done) = (false, false);
        for hops in 0.. {
            let (method, url) = (request.method().clone(), request.url().clone());
            let again = request.try_clone();
            let without_body = bare(&request);
            let response = transport.send(request).await.map_err(|lost| lost.after(done))?;
            replayed |= is_replay(response.headers());
            let location = response.headers().get(http::header::LOCATION).and_then(|url| url.to_str().ok());
            let from = Redirected { method: &method, url: &url, keyed };
            let hop = redirect::follow(&from, response.status(), location).filter(|_| hops < REDIRECTS_MAX);
            let next = match hop {
                Some(hop) if hop.to_result => Some((without_body, hop)),
                Some(hop) => again.map(|again| (again, hop)),
                None => None,
            };
            let Some((next, hop)) = next else { return Ok((response, replayed)) };
            keyed &= !hop.to_result;
            done |= hop.to_result;
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

    async fn read(&self, response: Response, replayed: bool, gather: bool) -> Result<Reply, Lost> {
        // Nothing beyond has a meaning in HTTP.
        if response.status().as_u16() > 599 {
            return Err(Lost {
                loss: Loss::Broken,
                source: Some("the answer's status is not one of HTTP".into()),
            });
        }
        if !gather {
            return Ok(Reply::Arriving(response));
        }
        let mut answer = Answer::gather(response, self.settings.answer_body_bytes_max).await?;
        answer.receipt.replayed |= replayed;
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
        let started = Instant::now();
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

impl Lost {
    /// Once a redirect led to the result of work that was done, a failure no longer means that nothing was sent.
    fn after(mut self, done: bool) -> Self {
        if done && self.loss == Loss::NotConnected {
            self.loss = Loss::Broken;
        }
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
    /// Whether the attempts before the last may have done the work.
    before: Work,
    /// The same of all.
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
        self.arrived.work_before = call.before;
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

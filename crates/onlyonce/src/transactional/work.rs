//! One request in one transaction, from its begin to its commit, on a task of its own.

use std::any::Any;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{HeaderMap, Request, Response, response};
use http_body::Body;
use http_body_util::BodyExt;
use onlyonce_core::backoff::Backoff;
use onlyonce_core::engine::CALL_TIME_MAX;
use onlyonce_core::transact::{self, ClaimedIn, Held};
use onlyonce_core::{
    Outcome, Recorded, Refusal, StoreError, StoreErrorKind, TransactionError, Transactional, outcome,
};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tower_service::Service;
use tracing::{Instrument, debug, error, warn};

use super::Shared;
use super::tx::Slot;
use crate::admit::{Admitted, RETRY_STORE_AFTER};
use crate::answer::Unkept;
use crate::body::{BoxError, Collected, PAUSED, RequestBody, ResponseBody};
use crate::claim::{WAIT_CEILING, WAIT_FIRST};
use crate::headers;
use crate::keep::Disposition;
use crate::layer::{Execution, Failure};
use crate::problem::{Code, Problem};
use crate::settings::{OnConcurrent, Settings};
use crate::work::{Ended, InFlight, Reply, claimed};

/// How long a claim waits in the database, with a connection in use, for another instance's transaction
/// that has claimed the same key. It then waits without one, and looks again.
pub const LOCK_WAIT: Duration = Duration::from_millis(50);

/// How long it waits for its turn where one transaction at a time can write; it holds no connection
/// meanwhile, and other keys wait alike. A little less than a call may take, for the store's own words.
pub const TURN_WAIT: Duration = CALL_TIME_MAX.saturating_sub(Duration::from_millis(500));

/// How often a claim starts over that the database undid because of a concurrent transaction. No work has
/// run then.
const CLAIM_CONFLICTS_MAX: u32 = 8;

/// What there is to do, and under which rules.
pub(crate) struct Job<T> {
    pub(crate) shared: Arc<Shared<T>>,
    pub(crate) settings: Arc<Settings>,
    /// `None` if the request carries no key.
    pub(crate) admitted: Option<Admitted>,
    pub(crate) reruns: u32,
}

/// An open transaction, and the key that it holds, if the request has one.
struct Open<T: Transactional> {
    transaction: T::Transaction,
    held: Option<Held>,
}

/// What a request is told instead of being run.
enum Instead<ResB> {
    Answer(Response<ResponseBody<ResB>>),
    /// Nothing: its caller hung up while it waited.
    HungUp,
}

/// How one run of the handler ended.
enum Run {
    /// The caller is answered, if it is still there.
    Over,
    /// The database undid it because of a concurrent transaction; the caller is not answered.
    Conflict,
}

/// What the handler made of the request.
struct Answer<ResB> {
    head: response::Parts,
    body: Bytes,
    trailers: HeaderMap,
    /// What is left of a body that is too large to be recorded.
    rest: Option<Pin<Box<ResB>>>,
}

/// How the handler ended.
enum Work<ResB, E> {
    Kept(Answer<ResB>),
    /// An answer that is not kept.
    Passed(Response<ResB>),
    Failed(Failure),
    /// One whose end says that it is not kept.
    Spoiled(Answer<ResB>),
    /// The body of an answer worth keeping broke off.
    Cut(BoxError),
    Error(E),
    Panic(Box<dyn Any + Send>),
    GivenUp,
}

type Replies<ResB, E> = Option<Reply<ResB, E>>;

impl<T: Transactional> Job<T> {
    pub(crate) async fn run<I, B, ResB>(
        mut self,
        mut inner: I,
        request: Request<RequestBody<B>>,
        mut reply: Reply<ResB, I::Error>,
    ) where
        I: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Clone + Send + 'static,
        I::Future: Send,
        B: Body<Data = Bytes> + Send + 'static,
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let wait_ends = Instant::now() + self.wait();
        let _turn = match &self.admitted {
            None => None,
            Some(Admitted { operation, .. }) => tokio::select! {
                biased;
                turn = self.shared.queue.turn(operation.id()) => Some(turn),
                () = sleep_until(wait_ends) => {
                    claimed("in_flight");
                    // A caller that hung up gets nothing.
                    return drop(reply.send(Ok(self.busy())));
                }
                () = reply.closed() => return,
            },
        };
        let mut request = Some(request);
        loop {
            let open = match self.claim(wait_ends, &mut reply).await {
                Ok(open) => open,
                Err(Instead::Answer(response)) => return drop(reply.send(Ok(response))),
                Err(Instead::HungUp) => return,
            };
            let clone = inner.clone();
            let inner = std::mem::replace(&mut inner, clone);
            let again = request.as_ref().filter(|_| self.reruns > 0).and_then(copy);
            let Some(now) = std::mem::replace(&mut request, again) else { return };
            let mut replies = Some(reply);
            match self.execute(open, inner, now, &mut replies).await {
                Run::Over => return,
                Run::Conflict => {}
            }
            let Some(unanswered) = replies else { return };
            if request.is_none() {
                let problem = not_committed("because of a concurrent transaction");
                return drop(unanswered.send(Ok(self.shared.front.refusal(problem))));
            }
            self.reruns -= 1;
            reply = unanswered;
        }
    }

    fn wait(&self) -> Duration {
        match self.settings.on_concurrent {
            OnConcurrent::Reject => Duration::ZERO,
            OnConcurrent::Wait => self.settings.wait,
        }
    }

    /// A transaction that holds the key, or what the caller gets instead.
    async fn claim<ResB, E>(
        &self,
        wait_ends: Instant,
        reply: &mut Reply<ResB, E>,
    ) -> Result<Open<T>, Instead<ResB>> {
        let mut waits = Backoff::new(WAIT_FIRST, WAIT_CEILING);
        let mut conflicts_left = CLAIM_CONFLICTS_MAX;
        let (answer, response) = loop {
            let response = match self.claim_once().await {
                Ok((transaction, None)) => return Ok(Open { transaction, held: None }),
                Ok((transaction, Some(ClaimedIn::Execute(held)))) => {
                    claimed("execute");
                    return Ok(Open { transaction, held: Some(held) });
                }
                Ok((transaction, Some(ClaimedIn::Replay(outcome)))) => {
                    self.roll_back(transaction).await;
                    break ("replay", self.shared.front.replay(&outcome));
                }
                Ok((transaction, Some(ClaimedIn::Refused(refusal)))) => {
                    self.roll_back(transaction).await;
                    let response = self.shared.front.refusal(Problem::refused(refusal));
                    match refusal {
                        Refusal::Mismatch { .. } => break ("mismatch", response),
                        Refusal::Unknown => break ("unknown", response),
                        // Someone holds it with a lease, through another way in.
                        Refusal::InFlight { .. } => response,
                    }
                }
                Err(TransactionError::Busy) => self.busy(),
                Err(TransactionError::Conflict(error)) => {
                    conflicts_left -= 1;
                    if conflicts_left == 0 {
                        break ("store_error", self.unavailable(&error));
                    }
                    continue;
                }
                Err(TransactionError::Failed(error)) => break ("store_error", self.unavailable(&error)),
            };
            if Instant::now() >= wait_ends {
                break ("in_flight", response);
            }
            let next = Instant::now() + waits.next().unwrap_or(WAIT_CEILING);
            tokio::select! {
                () = sleep_until(next.min(wait_ends)) => {}
                () = reply.closed() => return Err(Instead::HungUp),
            }
        };
        claimed(answer);
        Err(Instead::Answer(response))
    }

    /// Opens a transaction, and claims the key in it if there is one.
    async fn claim_once(&self) -> Result<(T::Transaction, Option<ClaimedIn>), TransactionError> {
        let store = &self.shared.store;
        let Some(Admitted { operation, fingerprint, settings }) = &self.admitted else {
            return Ok((in_time(store.open()).await?, None));
        };
        let wait = if T::ONE_WRITER { TURN_WAIT } else { LOCK_WAIT };
        let mut transaction = in_time(store.begin(wait)).await?;
        let policy = settings.policy();
        let claiming = transact::claim(store, &mut transaction, operation, *fingerprint, &policy);
        match in_time(claiming).await {
            Ok(claimed) => Ok((transaction, Some(claimed))),
            Err(error) => {
                self.roll_back(transaction).await;
                Err(error)
            }
        }
    }

    async fn execute<I, B, ResB>(
        &self,
        Open { transaction, held }: Open<T>,
        inner: I,
        mut request: Request<RequestBody<B>>,
        reply: &mut Replies<ResB, I::Error>,
    ) -> Run
    where
        I: Service<Request<RequestBody<B>>, Response = Response<ResB>>,
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let _in_flight = InFlight::enter();
        let slot = Slot::<T>::new(transaction);
        request.extensions_mut().insert(slot.clone());
        if let (Some(held), Some(admitted)) = (&held, &self.admitted) {
            let operation = Arc::clone(&admitted.operation);
            request.extensions_mut().insert(Execution { operation, attempt: held.attempt() });
        }
        let work = self.work(inner, request, reply).await;
        let transaction = slot.take();
        let work = match (work, transaction) {
            (Work::Kept(answer), Some(transaction)) => {
                return self.commit(transaction, held, answer, reply).await;
            }
            (Work::Kept(_), None) => {
                error!("the handler kept its transaction; it is rolled back when that is dropped");
                let problem = not_committed("because its handler kept the transaction");
                self.send(reply, self.shared.front.refusal(problem));
                return Run::Over;
            }
            (work, Some(transaction)) => {
                self.roll_back(transaction).await;
                work
            }
            (work, None) => work,
        };
        self.undone(work, reply)
    }

    /// Runs the handler until its answer is here, if it is one worth keeping; no longer than the lease.
    async fn work<I, B, ResB>(
        &self,
        mut inner: I,
        request: Request<RequestBody<B>>,
        reply: &mut Replies<ResB, I::Error>,
    ) -> Work<ResB, I::Error>
    where
        I: Service<Request<RequestBody<B>>, Response = Response<ResB>>,
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let started = Instant::now();
        let working = async move {
            let called = async {
                poll_fn(|cx| inner.poll_ready(cx)).await?;
                inner.call(request).await
            };
            match called.await {
                Ok(response) => self.answered(response).await,
                Err(error) => Work::Error(error),
            }
        };
        let mut working = std::pin::pin!(AssertUnwindSafe(working).catch_unwind());
        let given_up_at = started + self.settings.lease();
        let ended = match timeout_at(started + self.settings.timeout, &mut working).await {
            Ok(ended) => ended,
            Err(_) => {
                self.send(reply, self.too_slow());
                match timeout_at(given_up_at, working).await {
                    Ok(ended) => ended,
                    Err(_) => return Work::GivenUp,
                }
            }
        };
        ended.unwrap_or_else(Work::Panic)
    }

    /// Decides by the head of the answer, and by its end.
    async fn answered<ResB, E>(&self, mut response: Response<ResB>) -> Work<ResB, E>
    where
        ResB: Body<Data = Bytes>,
        ResB::Error: Into<BoxError>,
    {
        if let Some(failure) = response.extensions().get::<Failure>() {
            return Work::Failed(*failure);
        }
        let disposition = self.settings.keep.of_head(response.status(), response.headers());
        headers::remove_ours(response.headers_mut());
        match disposition {
            Disposition::Keep => match gather(response, &self.settings).await {
                Err(error) => Work::Cut(error),
                Ok(answer) => match self.settings.keep.of_end(&answer.head.headers, &answer.trailers) {
                    Disposition::Keep => Work::Kept(answer),
                    Disposition::Release | Disposition::Unknown => Work::Spoiled(answer),
                },
            },
            Disposition::Release | Disposition::Unknown => Work::Passed(response),
        }
    }

    /// The caller's answer after the transaction was rolled back.
    fn undone<ResB, E>(&self, work: Work<ResB, E>, reply: &mut Replies<ResB, E>) -> Run
    where
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let problem = match work {
            Work::Failed(Failure::Conflict) => return Run::Conflict,
            Work::Passed(response) => {
                let idle_timeout = self.settings.idle_timeout;
                self.send(reply, response.map(|body| ResponseBody::limited(body, idle_timeout)));
                return Run::Over;
            }
            Work::Spoiled(answer) => {
                self.pass(answer, reply);
                return Run::Over;
            }
            Work::Error(error) => {
                reply.take().map(|reply| reply.send(Err(Ended::Error(error))).err());
                return Run::Over;
            }
            Work::Panic(panic) => {
                error!("the handler panicked; its transaction is rolled back");
                reply.take().map(|reply| reply.send(Err(Ended::Panic(panic))).err());
                return Run::Over;
            }
            Work::GivenUp => {
                warn!("no answer within the lease; the transaction is rolled back");
                return Run::Over;
            }
            Work::Failed(Failure::NotSent) => Problem::new(
                Code::UpstreamUnreachable,
                "Nothing was sent to the service that the work needs, and what was written was rolled back; a retry \
                 with the same key runs it again.",
            ),
            Work::Failed(Failure::Lost) => Problem::new(
                Code::UpstreamLost,
                "A service that the work needs was sent a request and its answer was lost; what was written here was \
                 rolled back. A retry with the same key runs it again.",
            ),
            Work::Cut(error) => {
                debug!(%error, "the answer broke off");
                not_committed("because its answer broke off")
            }
            Work::Kept(_) => return Run::Over,
        };
        self.send(reply, self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER)));
        Run::Over
    }

    /// Records the answer beside the work, commits both, and only then lets the caller know.
    async fn commit<ResB, E>(
        &self,
        mut transaction: T::Transaction,
        held: Option<Held>,
        answer: Answer<ResB>,
        reply: &mut Replies<ResB, E>,
    ) -> Run
    where
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let store = &self.shared.store;
        if let Some(held) = held {
            let outcome = self.recorded(&answer);
            let completed = in_time(held.complete(store, &mut transaction, outcome)).await;
            if let Err(error) = completed {
                self.roll_back(transaction).await;
                return match error {
                    TransactionError::Failed(error) if error.may_have_applied() => self.ended(&error, reply),
                    error => self.not_committed(error, reply),
                };
            }
        }
        let error = match timeout(CALL_TIME_MAX, store.commit(transaction)).await {
            Ok(Ok(())) => {
                self.pass(answer, reply);
                return Run::Over;
            }
            Ok(Err(error)) => error,
            Err(_) => TransactionError::Failed(late(StoreErrorKind::Ambiguous)),
        };
        match error {
            TransactionError::Failed(error) if error.may_have_applied() => {
                let response = self.settle(&error).await;
                self.send(reply, response);
                Run::Over
            }
            error => self.not_committed(error, reply),
        }
    }

    fn recorded<ResB>(&self, Answer { head, body, trailers, rest }: &Answer<ResB>) -> Outcome {
        let recorded = match rest {
            Some(_) => Recorded::NotKept { status: head.status },
            None => Recorded::Response(outcome::Response {
                status: head.status,
                headers: headers::recorded_headers(&head.headers, self.settings.record_cookies),
                body: body.clone(),
                trailers: trailers.clone(),
            }),
        };
        recorded.encode()
    }

    /// The work was undone by the database, whatever its handler answered.
    fn not_committed<ResB, E>(&self, error: TransactionError, reply: &mut Replies<ResB, E>) -> Run {
        let error = match error {
            TransactionError::Conflict(_) => return Run::Conflict,
            TransactionError::Busy => TransactionError::Busy.to_string(),
            TransactionError::Failed(error) => error.to_string(),
        };
        error!(%error, "the transaction could not be committed; it is rolled back");
        self.send(reply, self.shared.front.refusal(not_committed("for the database did not commit it")));
        Run::Over
    }

    /// The work was written, and not all of it in the transaction that claimed the key.
    fn ended<ResB, E>(&self, error: &StoreError, reply: &mut Replies<ResB, E>) -> Run {
        error!(%error, "the handler ended its transaction; what it wrote afterwards may be committed without its answer");
        let problem = Problem::new(
            Code::StoreUnavailable,
            "The service ended its transaction too early, and what became of the work is not recorded. A retry with the \
             same key runs it again.",
        );
        self.send(reply, self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER)));
        Run::Over
    }

    /// The commit was sent and its answer lost. Claiming the key again tells: until the database has decided,
    /// the claim waits, and afterwards it finds the outcome or nothing.
    async fn settle<ResB>(&self, error: &StoreError) -> Response<ResponseBody<ResB>> {
        warn!(%error, "the answer to a commit was lost");
        let in_doubt = || {
            let problem = Problem::new(
                Code::StoreUnavailable,
                "The work is committed or rolled back, and the database does not say which. Retry with the same key: a \
                 retry is given its answer, or runs it.",
            );
            self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER))
        };
        if self.admitted.is_none() {
            return in_doubt();
        }
        let settle_by = Instant::now() + self.shared.record_grace;
        let mut waits = Backoff::new(WAIT_FIRST, WAIT_CEILING);
        loop {
            match timeout_at(settle_by, self.claim_once()).await {
                Ok(Ok((transaction, Some(ClaimedIn::Replay(outcome))))) => {
                    self.roll_back(transaction).await;
                    return self.shared.front.replay(&outcome);
                }
                Ok(Ok((transaction, Some(ClaimedIn::Execute(_))))) => {
                    self.roll_back(transaction).await;
                    return self.shared.front.refusal(not_committed("for the database did not commit it"));
                }
                Ok(Ok((transaction, _))) => {
                    self.roll_back(transaction).await;
                    return in_doubt();
                }
                Ok(Err(_)) if Instant::now() < settle_by => {
                    sleep_until(Instant::now() + waits.next().unwrap_or(WAIT_CEILING)).await;
                }
                Ok(Err(_)) | Err(_) => return in_doubt(),
            }
        }
    }

    /// Lets the caller have an answer that was gathered.
    fn pass<ResB, E>(&self, answer: Answer<ResB>, reply: &mut Replies<ResB, E>)
    where
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let Answer { mut head, body, trailers, rest } = answer;
        let Some(rest) = rest else {
            headers::announce(&mut head.headers, &trailers);
            return self.send(reply, Response::from_parts(head, ResponseBody::whole(body, trailers)));
        };
        let (relay, relayed) = ResponseBody::relayed();
        self.send(reply, Response::from_parts(head, relayed));
        relay.pass_data(body);
        let settings = Arc::clone(&self.settings);
        let unkept = Unkept { settings, body: rest, relay: Some(relay), until: None };
        // The work is committed: a caller that reads slowly must not hold up a shutdown.
        tokio::spawn(unkept.relay().in_current_span());
    }

    /// Sends the answer, unless one was sent or the caller hung up.
    fn send<ResB, E>(&self, reply: &mut Replies<ResB, E>, response: Response<ResponseBody<ResB>>) {
        if let Some(reply) = reply.take() {
            let _ = reply.send(Ok(response));
        }
    }

    async fn roll_back(&self, transaction: T::Transaction) {
        let _ = timeout(CALL_TIME_MAX, self.shared.store.roll_back(transaction)).await;
    }

    fn busy<ResB>(&self) -> Response<ResponseBody<ResB>> {
        let problem = Problem::new(
            Code::InProgress,
            "The first request with this key is still running; this one was not run. Retry with the same key.",
        );
        self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER))
    }

    fn too_slow<ResB>(&self) -> Response<ResponseBody<ResB>> {
        let problem = Problem::new(
            Code::UpstreamTimeout,
            "The service did not answer in time; the work may go on. A retry with the same key waits for it, and runs \
             it if it was rolled back.",
        );
        self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER))
    }

    fn unavailable<ResB>(&self, error: &StoreError) -> Response<ResponseBody<ResB>> {
        error!(%error, "no transaction, or the database cannot say who holds the key");
        let problem = Problem::new(
            Code::StoreUnavailable,
            "Nothing was done: the database is away or overloaded. Retry with the same key.",
        );
        self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER))
    }
}

fn not_committed(why: &str) -> Problem {
    let detail =
        format!("Nothing was done: the work was rolled back, {why}. A retry with the same key runs it.");
    Problem::new(Code::NotCommitted, detail).retry_after(RETRY_STORE_AFTER)
}

/// A call before the commit: late, it has changed nothing.
async fn in_time<V>(call: impl Future<Output = Result<V, TransactionError>>) -> Result<V, TransactionError> {
    let late = |_| Err(TransactionError::Failed(late(StoreErrorKind::Unavailable)));
    timeout(CALL_TIME_MAX, call).await.unwrap_or_else(late)
}

fn late(kind: StoreErrorKind) -> StoreError {
    StoreError::new(kind, format!("the database did not answer within {CALL_TIME_MAX:?}"))
}

/// The same request again; its body is in memory.
fn copy<B>(request: &Request<RequestBody<B>>) -> Option<Request<RequestBody<B>>> {
    let mut copy = Request::new(request.body().again()?);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    Some(copy)
}

/// Takes an answer to its end, or to where it is too large to be recorded.
async fn gather<ResB>(response: Response<ResB>, settings: &Settings) -> Result<Answer<ResB>, BoxError>
where
    ResB: Body<Data = Bytes>,
    ResB::Error: Into<BoxError>,
{
    let (head, body) = response.into_parts();
    let mut body = Box::pin(body);
    let (mut collected, mut trailers) = (Collected::default(), HeaderMap::new());
    let bytes_max = settings.response_body_bytes_max;
    let mut too_large = headers::content_length(&head.headers).is_some_and(|bytes| bytes > bytes_max);
    while !too_large && !body.is_end_stream() {
        let frame = timeout(settings.idle_timeout, body.frame()).await.map_err(|_| PAUSED)?;
        match frame.transpose().map_err(Into::into)?.map(http_body::Frame::into_data) {
            None => break,
            Some(Ok(data)) if data.is_empty() => {}
            Some(Ok(data)) => {
                collected.push(data);
                too_large = collected.len() > bytes_max;
            }
            Some(Err(frame)) => trailers.extend(frame.into_trailers().unwrap_or_default()),
        }
    }
    Ok(Answer { head, body: collected.into_bytes(), trailers, rest: too_large.then_some(body) })
}

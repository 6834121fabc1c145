//! One guarded operation, from the claim to the record, on a task of its own.
//!
//! | the work ended with | the key |
//! |---|---|
//! | an answer worth keeping | done: every retry is given it |
//! | another answer, a panic, [`Failure::NotSent`] | released: the next retry runs the work |
//! | an error, [`Failure::Lost`], an answer that says nothing (502, 504), no answer in time | left to its lease |

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, request};
use http_body::Body;
use metrics::{Gauge, counter, gauge};
use onlyonce_core::{Claimed, Grant, Lapse, Outcome, Recorded, StoreError, Verdict};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;
use tracing::{Instrument, debug, error, warn};

use crate::admit::{Admitted, Front, RETRY_STORE_AFTER};
use crate::answer::Answer;
use crate::body::{BoxError, RequestBody, ResponseBody};
use crate::claim::claim;
use crate::headers;
use crate::keep::Disposition;
use crate::layer::{Execution, Failure, Shared};
use crate::problem::{Code, Problem};
use crate::renewal::Renewal;
use crate::settings::OnConcurrent;

/// The work ended without a response.
pub(crate) enum Ended<E> {
    Error(E),
    Panic(Box<dyn Any + Send>),
}

/// Where the answer goes, until it went there. Closed when the caller hangs up.
pub(crate) type Reply<ResB, E> = oneshot::Sender<Result<Response<ResponseBody<ResB>>, Ended<E>>>;

/// What there is to do, and under which rules.
pub(crate) struct Job {
    pub(crate) shared: Arc<Shared>,
    pub(crate) admitted: Admitted,
    pub(crate) ends_by_closing: bool,
}

/// The service that is called, and what it is called with. Both are large and wait for the claim: on the heap,
/// so that no future has to hold them.
pub(crate) struct Call<S, B> {
    pub(crate) inner: S,
    pub(crate) head: request::Parts,
    pub(crate) body: RequestBody<B>,
}

impl Job {
    pub(crate) async fn run<S, B, ResB>(self, call: Box<Call<S, B>>, mut reply: Reply<ResB, S::Error>)
    where
        S: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Send + 'static,
        S::Future: Send,
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        let grant = match self.claim(&mut reply).await {
            Some(Ok(grant)) => grant,
            // A caller that hung up gets nothing.
            Some(Err(response)) => return drop(reply.send(Ok(response))),
            None => return,
        };
        let _in_flight = InFlight::enter();
        let mut reply = Some(reply);
        match self.execute(&grant, call, &mut reply).await {
            Some(Ok(response)) => {
                if let Some(answer) = self.answered(grant, response, reply).await {
                    answer.gather().await;
                }
            }
            Some(Err(ended)) => self.failed(grant, ended, reply).await,
            None => {
                warn!(operation = %self.admitted.operation.id(), "no answer within the lease; the work is given up");
            }
        }
    }

    /// A grant, or what the caller is answered instead; `None` if it hung up while it waited.
    async fn claim<ResB, E>(
        &self,
        reply: &mut Reply<ResB, E>,
    ) -> Option<Result<Box<Grant>, Response<ResponseBody<ResB>>>> {
        let (shared, Admitted { settings, operation, fingerprint }) = (&self.shared, &self.admitted);
        let wait = match settings.on_concurrent {
            OnConcurrent::Reject => Duration::ZERO,
            OnConcurrent::Wait => settings.wait,
        };
        let policy = settings.policy();
        let left = reply.closed();
        let claimed = claim(&shared.engine, operation, *fingerprint, &policy, wait, left).await?;
        Some(match claimed {
            Ok(Claimed::Execute(grant)) => Ok(Box::new(grant)),
            Ok(Claimed::Replay(outcome)) => Err(shared.front.replay(&outcome)),
            Ok(Claimed::Refused(refused)) => Err(shared.front.refusal(Problem::refused(refused))),
            Err(error) => Err(self.unavailable(&error)),
        })
    }

    fn unavailable<ResB>(&self, error: &StoreError) -> Response<ResponseBody<ResB>> {
        error!(operation = %self.admitted.operation.id(), %error, "the store cannot say who holds the key");
        self.shared.front.refusal(
            Problem::new(
                Code::StoreUnavailable,
                "Nothing was done: the store that keeps idempotency keys is away. Retry with the same key.",
            )
            .retry_after(RETRY_STORE_AFTER),
        )
    }

    /// Calls the service until the head of its answer is here; `None` if the lease ended before that.
    async fn execute<S, B, ResB>(
        &self,
        grant: &Grant,
        mut call: Box<Call<S, B>>,
        reply: &mut Option<Reply<ResB, S::Error>>,
    ) -> Option<Result<Response<ResB>, Ended<S::Error>>>
    where
        S: Service<Request<RequestBody<B>>, Response = Response<ResB>>,
    {
        let head_by = (Instant::now() + self.admitted.settings.timeout).min(grant.lease_ends());
        let operation = Arc::clone(&self.admitted.operation);
        call.head.extensions.insert(Execution { operation, attempt: grant.attempt() });
        let called = async move { call.inner.call(Request::from_parts(call.head, call.body)).await };
        let mut work = std::pin::pin!(AssertUnwindSafe(called).catch_unwind());
        let ended = match timeout_at(head_by, &mut work).await {
            Ok(ended) => ended,
            Err(_) => {
                self.send(reply, self.unknown(Code::UpstreamTimeout, grant.lease_ends()));
                timeout_at(grant.lease_ends(), work).await.ok()?
            }
        };
        Some(match ended {
            Ok(answer) => answer.map_err(Ended::Error),
            Err(panic) => Err(Ended::Panic(panic)),
        })
    }

    /// The work ended without an answer.
    async fn failed<ResB, E>(&self, grant: Box<Grant>, ended: Ended<E>, reply: Option<Reply<ResB, E>>) {
        match &ended {
            Ended::Error(_) => {
                debug!(operation = %self.admitted.operation.id(), "the service failed; the key is left to its lease");
            }
            Ended::Panic(_) => {
                error!(operation = %self.admitted.operation.id(), "the service panicked; the key is released");
                self.record(self.renewal(grant), Verdict::Release).await;
            }
        }
        reply.map(|reply| reply.send(Err(ended)).err());
    }

    /// Decides by the head of the answer: one that is worth keeping is still to be gathered.
    async fn answered<ResB, E>(
        self,
        grant: Box<Grant>,
        mut response: Response<ResB>,
        mut reply: Option<Reply<ResB, E>>,
    ) -> Option<Box<Answer<ResB, E>>>
    where
        ResB: Body<Data = Bytes> + Send + 'static,
        ResB::Error: Into<BoxError>,
    {
        match response.extensions().get() {
            Some(Failure::NotSent) => {
                self.record(self.renewal(grant), Verdict::Release).await;
                let problem = Problem::new(
                    Code::UpstreamUnreachable,
                    "Nothing was sent to the service, so the work was not done; a retry with the same key runs it.",
                );
                self.send(&mut reply, self.shared.front.refusal(problem.retry_after(RETRY_STORE_AFTER)));
                return None;
            }
            Some(Failure::Lost) => {
                self.send(&mut reply, self.unknown(Code::UpstreamLost, grant.lease_ends()));
                return None;
            }
            Some(Failure::Conflict) => {
                self.record(self.renewal(grant), Verdict::Release).await;
                self.pass(&mut reply, response);
                return None;
            }
            None => {}
        }
        let disposition = self.admitted.settings.keep.of_head(response.status(), response.headers());
        headers::remove_ours(response.headers_mut());
        match disposition {
            Disposition::Keep => return Some(Answer::new(self, grant, response, reply)),
            Disposition::Release => self.record(self.renewal(grant), Verdict::Release).await,
            Disposition::Unknown => {}
        }
        self.pass(&mut reply, response);
        None
    }

    /// Passes an answer on that is not recorded.
    fn pass<ResB, E>(&self, reply: &mut Option<Reply<ResB, E>>, response: Response<ResB>) {
        let idle_timeout = self.admitted.settings.idle_timeout;
        self.send(reply, response.map(|body| ResponseBody::limited(body, idle_timeout)));
    }

    /// Sends the answer, unless one was sent or the caller hung up.
    pub(crate) fn send<ResB, E>(
        &self,
        reply: &mut Option<Reply<ResB, E>>,
        response: Response<ResponseBody<ResB>>,
    ) {
        if let Some(reply) = reply.take() {
            let _ = reply.send(Ok(response));
        }
    }

    /// The refusal for work that was started and whose answer is not here.
    pub(crate) fn unknown<ResB>(&self, code: Code, lease_ends: Instant) -> Response<ResponseBody<ResB>> {
        let what = match code {
            Code::UpstreamTimeout => "The service did not answer in time; the work may go on.",
            _ => "The service was sent the request and its answer was lost; the work may have happened.",
        };
        // Told in whole seconds: after the end, not before it.
        let lease_left = lease_ends.saturating_duration_since(Instant::now()) + Duration::from_secs(1);
        let seconds = lease_left.as_secs();
        let then = match self.admitted.settings.on_lapse {
            Lapse::Rerun => format!("runs the work again once the lease has ended, in {seconds} s"),
            Lapse::Hold => "is refused until an operator decides".to_owned(),
        };
        let detail = format!(
            "{what} A retry with the same key gets its answer if one is recorded; otherwise it {then}."
        );
        self.shared.front.refusal(Problem::new(code, detail).retry_after(lease_left))
    }

    pub(crate) fn renewal(&self, grant: Box<Grant>) -> Renewal {
        Renewal::new(self.admitted.operation.id(), grant, self.admitted.settings.lease())
    }

    /// Ends the grant and waits for it, but no longer than `record_grace`: the store is then tried on
    /// until the lease ends, while the caller gets the answer.
    pub(crate) async fn record(&self, renewal: Renewal, verdict: Verdict) {
        // A store that panics must not cost the caller its answer.
        let mut finishing = Box::pin(AssertUnwindSafe(renewal.finish(verdict)).catch_unwind());
        if timeout(self.shared.record_grace, &mut finishing).await.is_err() {
            self.shared.tasks.spawn(finishing.in_current_span());
        }
    }
}

/// Counts grants whose key was another's when they ended.
pub const LOST_LEASES: &str = "onlyonce_lost_leases_total";
/// Counts outcomes that could not be recorded before their lease ended.
pub const RECORD_FAILURES: &str = "onlyonce_record_failures_total";
/// Counts claims, by `answer`.
pub const CLAIMS: &str = "onlyonce_claims_total";
/// The values of `answer`.
pub const CLAIM_ANSWERS: [&str; 6] = ["execute", "replay", "mismatch", "in_flight", "unknown", "store_error"];
/// How many guarded operations are running.
pub const IN_FLIGHT: &str = "onlyonce_in_flight";

pub(crate) fn claimed(answer: &'static str) {
    counter!(CLAIMS, "answer" => answer).increment(1);
}

/// Counts running work, however it ends.
pub(crate) struct InFlight(Gauge);

impl InFlight {
    pub(crate) fn enter() -> Self {
        let in_flight = gauge!(IN_FLIGHT);
        in_flight.increment(1);
        Self(in_flight)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

impl Front {
    /// The recorded answer, as every later caller is given it.
    pub(crate) fn replay<ResB>(&self, outcome: &Outcome) -> Response<ResponseBody<ResB>> {
        match Recorded::decode(outcome) {
            Ok(Recorded::Response(recorded)) => {
                let (parts, body, trailers) = headers::replayed(recorded);
                Response::from_parts(parts, ResponseBody::whole(body, trailers))
            }
            Ok(Recorded::NotKept { status }) => self.refusal(Problem::not_kept(status)),
            Ok(Recorded::Value(_)) => self.unreplayable(&"what is recorded is what a function returned"),
            Err(error) => self.unreplayable(&error),
        }
    }

    fn unreplayable<ResB>(&self, why: &dyn std::fmt::Display) -> Response<ResponseBody<ResB>> {
        error!(%why, "a recorded outcome cannot be given again");
        let detail = format!("The work was done, but {why}; it is not run again.");
        self.refusal(Problem::new(Code::StoreUnavailable, detail).retry_after(RETRY_STORE_AFTER))
    }
}

//! What happens to a request before its key is claimed.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, UPGRADE};
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, Version};
use http_body::Body;
use http_body_util::BodyExt;
use onlyonce_core::identity::MalformedKey;
use onlyonce_core::{Key, Operation, fingerprint};
use pin_project_lite::pin_project;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_service::Service;
use tracing::Instrument;

use crate::body::{BoxError, Collected, RequestBody, ResponseBody};
use crate::caller::CallerError;
use crate::layer::Shared;
use crate::problem::{Code, Problem};
use crate::rules::Matched;
use crate::settings::{KeyRule, Settings};
use crate::work::{Ended, Job};

/// The request header that carries the client's key.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// A service guarded by an [`OnlyonceLayer`](crate::OnlyonceLayer).
#[derive(Clone)]
pub struct OnlyonceService<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S> OnlyonceService<S> {
    pub(crate) fn new(inner: S, shared: Arc<Shared>) -> Self {
        Self { inner, shared }
    }
}

/// Whether and how a request is guarded, told from its head alone.
enum Plan {
    Pass,
    Refuse(Problem),
    Guard { key: Key, endpoint: String, settings: Arc<Settings> },
}

impl Shared {
    fn plan<B>(&self, request: &Request<B>) -> Plan {
        let Some(Matched { settings, endpoint }) = self.rules.find(request.method(), request.uri().path())
        else {
            return Plan::Pass;
        };
        match key(request.headers()) {
            None if settings.key == KeyRule::Required => Plan::Refuse(Problem::new(
                Code::KeyMissing,
                "This request must carry an Idempotency-Key header: one fresh value for each operation, the same for each \
                 retry of it.",
            )),
            None => Plan::Pass,
            Some(Err(malformed)) => {
                Plan::Refuse(Problem::new(Code::KeyMalformed, format!("Nothing was done: {malformed}.")))
            }
            Some(Ok(_)) if asks_for_upgrade(request.headers()) => Plan::Refuse(Problem::new(
                Code::NotGuardable,
                "A connection that changes its protocol cannot be replayed; send the request without an Idempotency-Key.",
            )),
            Some(Ok(key)) => Plan::Guard { key, endpoint, settings: Arc::clone(settings) },
        }
    }
}

/// `None` if there is no key.
fn key(headers: &HeaderMap) -> Option<Result<Key, MalformedKey>> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let line = lines.next()?;
    Some(match lines.next() {
        Some(_) => Err(MalformedKey::Repeated),
        None => Key::from_field(line.as_bytes()),
    })
}

/// Some clients offer `h2c` on every request; nobody has to take it up.
fn asks_for_upgrade(headers: &HeaderMap) -> bool {
    let protocols =
        headers.get_all(UPGRADE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    protocols
        .map(<[u8]>::trim_ascii)
        .any(|protocol| !protocol.is_empty() && !protocol.eq_ignore_ascii_case(b"h2c"))
}

impl<S, B, ResB> Service<Request<B>> for OnlyonceService<S>
where
    S: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, ResB, S::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let kind = match self.shared.plan(&request) {
            Plan::Pass => Kind::Passed { future: self.inner.call(request.map(RequestBody::streaming)) },
            Plan::Refuse(problem) => Kind::Refused { response: Some(refusal(problem)) },
            Plan::Guard { key, endpoint, settings } => {
                // The clone that was polled ready is the one that must be called.
                let clone = self.inner.clone();
                let inner = std::mem::replace(&mut self.inner, clone);
                let shared = Arc::clone(&self.shared);
                Kind::Guarded { future: Box::pin(guard(shared, inner, request, key, endpoint, settings)) }
            }
        };
        ResponseFuture { kind }
    }
}

pub(crate) fn refusal<ResB>(problem: Problem) -> Response<ResponseBody<ResB>> {
    problem.into_response().map(|body| ResponseBody::whole(body, HeaderMap::new()))
}

async fn guard<S, B, ResB>(
    shared: Arc<Shared>,
    inner: S,
    request: Request<B>,
    key: Key,
    endpoint: String,
    settings: Arc<Settings>,
) -> Result<Response<ResponseBody<ResB>>, S::Error>
where
    S: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    let (parts, body) = request.into_parts();
    let caller = match shared.caller.resolve(&parts).await {
        Ok(caller) => caller,
        Err(error) => return Ok(refusal(unresolved(error))),
    };
    let (body, trailers) = match read(&parts.headers, body, &settings).await {
        Ok(read) => read,
        Err(problem) => return Ok(refusal(problem)),
    };
    let path_and_query = parts.uri.path_and_query().map_or("/", |target| target.as_str());
    let counted = &settings.fingerprint_headers;
    let fingerprint = fingerprint::fingerprint(path_and_query, &parts.headers, counted, &body, settings.body);
    let operation = Arc::new(Operation::new(shared.namespace.clone(), endpoint, caller, key));
    let ends_by_closing = parts.version < Version::HTTP_11;
    let request = Request::from_parts(parts, RequestBody::whole(body, trailers));

    // When the caller hangs up, this future is dropped; the work must not be.
    let (reply, answer) = oneshot::channel();
    let tasks = shared.tasks.clone();
    let job = Job { shared, settings, operation, fingerprint, ends_by_closing };
    tasks.spawn(job.run(inner, request, reply).in_current_span());
    match answer.await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(Ended::Error(error))) => Err(error),
        // As it would have been without the layer.
        Ok(Err(Ended::Panic(panic))) => std::panic::resume_unwind(panic),
        Err(_) => Ok(refusal(Problem::new(
            Code::UpstreamLost,
            "The work may have happened: it was interrupted. Retry with the same key.",
        ))),
    }
}

fn unresolved(error: CallerError) -> Problem {
    match error {
        CallerError::Unresolved(reason) => {
            Problem::new(Code::CallerUnresolved, format!("Nothing was done: {reason}."))
        }
        CallerError::Unverified(reason) => {
            Problem::new(Code::CallerUnverified, format!("Nothing was done: {reason}."))
        }
        CallerError::Unavailable(reason) => {
            Problem::new(Code::CallerUnverified, format!("Nothing was done: {reason}."))
                .status(StatusCode::SERVICE_UNAVAILABLE)
                .retry_after(RETRY_STORE_AFTER)
        }
    }
}

/// What a caller is told to wait when something that Onlyonce itself needs is away.
pub(crate) const RETRY_STORE_AFTER: std::time::Duration = std::time::Duration::from_secs(1);

/// Reads a guarded request's body, within its limits of size and time.
async fn read<B>(headers: &HeaderMap, body: B, settings: &Settings) -> Result<(Bytes, HeaderMap), Problem>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    let bytes_max = settings.request_body_bytes_max;
    let too_large = || {
        Problem::new(
            Code::RequestTooLarge,
            format!(
                "Nothing was done: a request with an Idempotency-Key may have a body of at most {bytes_max} bytes."
            ),
        )
    };
    let announced = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > bytes_max as u64) || body.size_hint().lower() > bytes_max as u64
    {
        return Err(too_large());
    }
    let reading = async {
        let mut body = std::pin::pin!(body);
        let mut collected = Collected::default();
        let mut trailers = HeaderMap::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                let error: BoxError = error.into();
                Problem::new(
                    Code::RequestIncomplete,
                    format!("Nothing was done: the request's body did not arrive whole ({error})."),
                )
            })?;
            match frame.into_data() {
                Ok(data) => {
                    collected.push(data);
                    if collected.len() > bytes_max {
                        return Err(too_large());
                    }
                }
                Err(frame) => trailers.extend(frame.into_trailers().unwrap_or_default()),
            }
        }
        Ok((collected.into_bytes(), trailers))
    };
    timeout(settings.request_timeout, reading).await.unwrap_or_else(|_| {
        let limit = settings.request_timeout;
        Err(Problem::new(
            Code::RequestTooSlow,
            format!("Nothing was done: the request's body did not arrive within {limit:?}."),
        ))
    })
}

pin_project! {
    /// The future of an [`OnlyonceService`]. Dropping it does not stop guarded work.
    pub struct ResponseFuture<F, ResB, E> {
        #[pin]
        kind: Kind<F, ResB, E>,
    }
}

type Guarded<ResB, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<ResB>>, E>> + Send>>;

pin_project! {
    #[project = KindProj]
    enum Kind<F, ResB, E> {
        Passed { #[pin] future: F },
        Refused { response: Option<Response<ResponseBody<ResB>>> },
        Guarded { future: Guarded<ResB, E> },
    }
}

impl<F, ResB, E> Future for ResponseFuture<F, ResB, E>
where
    F: Future<Output = Result<Response<ResB>, E>>,
{
    type Output = Result<Response<ResponseBody<ResB>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().kind.project() {
            KindProj::Passed { future } => {
                future.poll(cx).map_ok(|response| response.map(ResponseBody::inner))
            }
            KindProj::Refused { response } => {
                Poll::Ready(Ok(response.take().expect("a future is not polled after it is ready")))
            }
            KindProj::Guarded { future } => future.as_mut().poll(cx),
        }
    }
}

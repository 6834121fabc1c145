//! A guarded service: what it passes on, and what it runs on a task of its own.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::Instrument;

use crate::admit::{Guarded, Plan, ends_by_closing};
use crate::body::{BoxError, RequestBody, ResponseBody, Whole};
use crate::layer::Shared;
use crate::problem::{Code, Problem};
use crate::work::{Call, Ended, Job, Reply};

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
        match self.shared.front.plan(&request) {
            Plan::Pass | Plan::Unkeyed { .. } => {
                ResponseFuture::passed(self.inner.call(request.map(RequestBody::streaming)))
            }
            Plan::Refuse(problem) => ResponseFuture::refused(self.shared.front.refusal(problem)),
            Plan::Guard(guarded) => {
                // The clone that was polled ready is the one that must be called.
                let clone = self.inner.clone();
                let inner = std::mem::replace(&mut self.inner, clone);
                ResponseFuture::guarded(guard(Arc::clone(&self.shared), inner, request, guarded))
            }
        }
    }
}

fn guard<S, B, ResB>(
    shared: Arc<Shared>,
    inner: S,
    request: Request<B>,
    guarded: Guarded,
) -> impl Future<Output = Result<Response<ResponseBody<ResB>>, S::Error>> + Send
where
    S: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    let ends_by_closing = ends_by_closing(&request);
    let (head, body) = request.into_parts();
    let mut call = Box::new(Call { inner, head, body: RequestBody::whole(Whole::default()) });
    async move {
        shared.sweeper.start();
        let admitted = match shared.front.admit(&call.head, std::pin::pin!(body), guarded).await {
            Ok((admitted, whole)) => {
                call.body = RequestBody::whole(whole);
                admitted
            }
            Err(problem) => return Ok(shared.front.refusal(problem)),
        };
        let job = Job { shared: Arc::clone(&shared), admitted, ends_by_closing };
        let answer = detached(&shared.tasks, |reply| job.run(call, reply)).await;
        answer.unwrap_or_else(|| Ok(shared.front.refusal(interrupted())))
    }
}

/// Runs work on a task of its own: when the caller hangs up, this future is dropped, and the work must not
/// be. `None` if the work ended without an answer.
pub(crate) fn detached<ResB, E, F, W>(
    tasks: &TaskTracker,
    work: W,
) -> impl Future<Output = Option<Result<Response<ResponseBody<ResB>>, E>>> + use<ResB, E, F, W>
where
    F: Future<Output = ()> + Send + 'static,
    W: FnOnce(Reply<ResB, E>) -> F,
{
    let (reply, answer) = oneshot::channel();
    // Boxed: on its way into the runtime a future is copied whole, again and again.
    tasks.spawn(Box::pin(work(reply)).in_current_span());
    async move {
        match answer.await {
            Ok(Ok(response)) => Some(Ok(response)),
            Ok(Err(Ended::Error(error))) => Some(Err(error)),
            // As it would have been without the layer.
            Ok(Err(Ended::Panic(panic))) => std::panic::resume_unwind(panic),
            Err(_) => None,
        }
    }
}

fn interrupted() -> Problem {
    Problem::new(
        Code::UpstreamLost,
        "The work may have happened: it was interrupted. Retry with the same key.",
    )
}

pin_project! {
    /// The future of an [`OnlyonceService`]. Dropping it does not stop guarded work.
    pub struct ResponseFuture<F, ResB, E> {
        #[pin]
        kind: Kind<F, ResB, E>,
    }
}

type Answering<ResB, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<ResB>>, E>> + Send>>;

pin_project! {
    #[project = KindProj]
    enum Kind<F, ResB, E> {
        Passed { #[pin] future: F },
        Refused { response: Option<Response<ResponseBody<ResB>>> },
        Guarded { future: Answering<ResB, E> },
    }
}

impl<F, ResB, E> ResponseFuture<F, ResB, E> {
    pub(crate) fn passed(future: F) -> Self {
        Self { kind: Kind::Passed { future } }
    }

    pub(crate) fn refused(response: Response<ResponseBody<ResB>>) -> Self {
        Self { kind: Kind::Refused { response: Some(response) } }
    }

    pub(crate) fn guarded(
        future: impl Future<Output = Result<Response<ResponseBody<ResB>>, E>> + Send + 'static,
    ) -> Self {
        Self { kind: Kind::Guarded { future: Box::pin(future) } }
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

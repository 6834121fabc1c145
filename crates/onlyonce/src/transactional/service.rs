//! A service whose guarded work runs in a transaction, on a task of its own.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use onlyonce_core::Transactional;
use tower_service::Service;

use super::Shared;
use super::work::Job;
use crate::admit::{Guarded, Plan, read};
use crate::body::{BoxError, RequestBody, ResponseBody};
use crate::problem::{Code, Problem};
use crate::service::{ResponseFuture, detached};

/// A service guarded by a [`TransactionalLayer`](crate::TransactionalLayer).
pub struct TransactionalService<I, T> {
    inner: I,
    shared: Arc<Shared<T>>,
    reruns: u32,
}

impl<I, T> TransactionalService<I, T> {
    pub(crate) fn new(inner: I, shared: Arc<Shared<T>>, reruns: u32) -> Self {
        Self { inner, shared, reruns }
    }
}

impl<I: Clone, T> Clone for TransactionalService<I, T> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone(), Arc::clone(&self.shared), self.reruns)
    }
}

impl<I, T, B, ResB> Service<Request<B>> for TransactionalService<I, T>
where
    I: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Clone + Send + 'static,
    I::Future: Send + 'static,
    I::Error: Send + 'static,
    T: Transactional,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody<ResB>>;
    type Error = I::Error;
    type Future = ResponseFuture<I::Future, ResB, I::Error>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (guarded, settings) = match self.shared.front.plan(&request) {
            Plan::Pass => {
                return ResponseFuture::passed(self.inner.call(request.map(RequestBody::streaming)));
            }
            Plan::Refuse(problem) => return ResponseFuture::refused(self.shared.front.refusal(problem)),
            Plan::Unkeyed { settings } => (None, settings),
            Plan::Guard(guarded) => {
                let settings = Arc::clone(&guarded.settings);
                (Some(guarded), settings)
            }
        };
        // The clone that was polled ready is the one that must be called.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        let job = Job { shared: Arc::clone(&self.shared), settings, admitted: None, reruns: self.reruns };
        ResponseFuture::guarded(guard(job, inner, request, guarded))
    }
}

async fn guard<I, T, B, ResB>(
    mut job: Job<T>,
    inner: I,
    request: Request<B>,
    guarded: Option<Guarded>,
) -> Result<Response<ResponseBody<ResB>>, I::Error>
where
    I: Service<Request<RequestBody<B>>, Response = Response<ResB>> + Clone + Send + 'static,
    I::Future: Send + 'static,
    I::Error: Send + 'static,
    T: Transactional,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    let shared = Arc::clone(&job.shared);
    shared.sweeper.start();
    let (head, body) = request.into_parts();
    let whole = match (guarded, std::pin::pin!(body)) {
        (Some(guarded), body) => shared.front.admit(&head, body, guarded).await.map(|(admitted, whole)| {
            job.admitted = Some(admitted);
            whole
        }),
        (None, body) => read(&head.headers, body, &job.settings).await,
    };
    let request = match whole {
        Ok(whole) => Request::from_parts(head, RequestBody::whole(whole)),
        Err(problem) => return Ok(shared.front.refusal(problem)),
    };
    let answer = detached(&shared.tasks, |reply| job.run(inner, request, reply)).await;
    answer.unwrap_or_else(|| Ok(shared.front.refusal(interrupted())))
}

fn interrupted() -> Problem {
    Problem::new(
        Code::StoreUnavailable,
        "The work was interrupted; it is committed whole or not at all. Retry with the same key.",
    )
}

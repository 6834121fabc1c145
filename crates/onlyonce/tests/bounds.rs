//! What the layer takes: as much as can be run on a task of its own, and no less.
#![allow(clippy::unwrap_used, missing_docs)]

use std::cell::Cell;
use std::marker::PhantomPinned;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use onlyonce::{BoxError, MemoryStore, OnlyonceLayer, OnlyonceService, RequestBody, ResponseBody};
use tower::{Layer, Service, ServiceExt};

/// A body that can be sent to another thread and no more: neither `Sync` nor `Unpin`, with an error that is no
/// `std::error::Error`.
struct Bare(Cell<Option<Bytes>>, PhantomPinned);

impl Bare {
    fn new(text: &'static str) -> Self {
        Self(Cell::new(Some(text.into())), PhantomPinned)
    }
}

struct BareError;

impl From<BareError> for BoxError {
    fn from(_: BareError) -> Self {
        "bare".into()
    }
}

impl Body for Bare {
    type Data = Bytes;
    type Error = BareError;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BareError>>> {
        Poll::Ready(self.0.take().map(|data| Ok(Frame::data(data))))
    }
}

/// A service that is cloned and sent, and not shared, and whose error says nothing.
#[derive(Clone)]
struct Work(Cell<u32>);

#[derive(Debug)]
struct Failed(#[allow(dead_code)] Cell<()>);

impl Service<Request<RequestBody<Bare>>> for Work {
    type Response = Response<Bare>;
    type Error = Failed;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Bare>, Failed>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Failed>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<RequestBody<Bare>>) -> Self::Future {
        self.0.set(self.0.get() + 1);
        let fails = request.uri().path() == "/fail";
        Box::pin(async move {
            if fails { Err(Failed(Cell::new(()))) } else { Ok(Response::new(Bare::new("done"))) }
        })
    }
}

#[tokio::test]
async fn what_can_be_sent_can_be_guarded() {
    let layer = OnlyonceLayer::builder(MemoryStore::new()).build().unwrap();
    let service = layer.layer(Work(Cell::new(0)));
    let request = |path| Request::post(path).header("idempotency-key", "k").body(Bare::new("100")).unwrap();
    for replayed in [false, true] {
        let answer = service.clone().oneshot(request("/pay")).await.unwrap();
        assert_eq!(answer.headers().contains_key("idempotent-replayed"), replayed);
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "done");
    }
    // The service's own error stays what it is.
    let Failed(_) = service.clone().oneshot(request("/fail")).await.err().unwrap();
}

/// A guarded service goes wherever the service itself could go.
#[test]
fn what_can_be_shared_stays_so() {
    fn can_be_sent<T: Send>() {}
    fn can_be_shared<T: Send + Sync>() {}
    fn future<S: Service<Request<Bare>>>(_: &S)
    where
        S::Future: Send,
    {
    }

    can_be_shared::<OnlyonceLayer>();
    can_be_shared::<OnlyonceService<u32>>();
    can_be_sent::<OnlyonceService<Work>>();
    can_be_sent::<RequestBody<Bare>>();
    can_be_sent::<ResponseBody<Bare>>();
    future(&OnlyonceLayer::builder(MemoryStore::new()).build().unwrap().layer(Work(Cell::new(0))));
}

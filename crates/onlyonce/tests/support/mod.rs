//! A guarded service on a store whose clock is tokio's, so that paused time passes for both.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use onlyonce::{Config, OnlyonceLayer, OnlyonceService, RequestBody, ResponseBody};
use onlyonce_core::store::{Inserted, Replaced};
use onlyonce_core::{
    Id, MemoryStore, Operation, Revision, Store, StoreError, StoreErrorKind, Timestamp, Write, record::Seen,
};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt};

pub(crate) type TestBody = UnsyncBoxBody<Bytes, std::io::Error>;
pub(crate) type InnerRequest = Request<RequestBody<Full<Bytes>>>;
pub(crate) type Answer = Response<ResponseBody<TestBody>>;

/// A memory store that can be switched off.
#[derive(Clone)]
pub(crate) struct TestStore {
    pub(crate) inner: MemoryStore,
    pub(crate) down: Arc<AtomicBool>,
}

impl TestStore {
    fn up(&self) -> Result<(), StoreError> {
        match self.down.load(Ordering::SeqCst) {
            true => Err(StoreError::new(StoreErrorKind::Unavailable, "switched off")),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl Store for TestStore {
    async fn insert(&self, operation: &Operation, write: Write) -> Result<Inserted, StoreError> {
        self.up()?;
        self.inner.insert(operation, write).await
    }
    async fn replace(&self, id: Id, expected: Revision, write: Write) -> Result<Replaced, StoreError> {
        self.up()?;
        self.inner.replace(id, expected, write).await
    }
    async fn remove(&self, id: Id, expected: Revision) -> Result<bool, StoreError> {
        self.up()?;
        self.inner.remove(id, expected).await
    }
    async fn read(&self, id: Id) -> Result<Option<Seen>, StoreError> {
        self.up()?;
        self.inner.read(id).await
    }
    async fn sweep(&self, rows_max: u32) -> Result<u64, StoreError> {
        self.up()?;
        self.inner.sweep(rows_max).await
    }
}

/// A guarded service that counts how often its work was started.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) service: OnlyonceService<BoxCloneSyncService<InnerRequest, Response<TestBody>, Infallible>>,
    pub(crate) layer: OnlyonceLayer,
    pub(crate) store: TestStore,
    runs: Arc<AtomicUsize>,
}

impl App {
    /// `work` is told which run it is, from 1.
    pub(crate) fn new<W>(config: Config, work: W) -> Self
    where
        W: Fn(usize, InnerRequest) -> BoxFuture<'static, Response<TestBody>> + Clone + Send + Sync + 'static,
    {
        let started = Instant::now();
        let clock = move || Timestamp(1_000_000).plus(started.elapsed());
        let store = TestStore { inner: MemoryStore::with_clock(clock), down: Arc::default() };
        Self::on(store, config, work)
    }

    pub(crate) fn on<W>(store: TestStore, config: Config, work: W) -> Self
    where
        W: Fn(usize, InnerRequest) -> BoxFuture<'static, Response<TestBody>> + Clone + Send + Sync + 'static,
    {
        let runs = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&runs);
        let inner = BoxCloneSyncService::new(tower::service_fn(move |request| {
            let work = work(counter.fetch_add(1, Ordering::SeqCst) + 1, request);
            async move { Ok(work.await) }
        }));
        let layer = OnlyonceLayer::new(Arc::new(store.clone()), config).expect("a valid configuration");
        Self { service: layer.layer(inner), layer, store, runs }
    }

    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        self.service.clone().oneshot(request).await.unwrap_or_else(|never| match never {})
    }

    /// Sends a request from a task, so that it runs while the test goes on.
    pub(crate) fn start(&self, request: Request<Full<Bytes>>) -> tokio::task::JoinHandle<Answer> {
        let app = self.clone();
        tokio::spawn(async move { app.send(request).await })
    }
}

/// `POST /payments` with this key and body.
pub(crate) fn post(key: &str, body: &'static str) -> Request<Full<Bytes>> {
    Request::post("/payments")
        .header("idempotency-key", key)
        .body(Full::new(Bytes::from_static(body.as_bytes())))
        .expect("a request")
}

pub(crate) fn with(
    mut request: Request<Full<Bytes>>,
    name: &'static str,
    value: &str,
) -> Request<Full<Bytes>> {
    request.headers_mut().append(name, value.parse().expect("a header value"));
    request
}

pub(crate) fn text(status: u16, body: impl Into<Bytes>) -> Response<TestBody> {
    let body = Full::new(body.into()).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).expect("a status");
    response
}

/// A response whose body the test feeds.
pub(crate) fn fed(status: u16) -> (Feed, Response<TestBody>) {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    let frames = futures_util::stream::poll_fn(move |cx| receiver.poll_recv(cx));
    let mut response = text(status, "");
    *response.body_mut() = StreamBody::new(frames).boxed_unsync();
    (Feed(sender), response)
}

pub(crate) struct Feed(mpsc::UnboundedSender<Result<Frame<Bytes>, std::io::Error>>);

impl Feed {
    pub(crate) fn data(&self, data: impl Into<Bytes>) {
        let _ = self.0.send(Ok(Frame::data(data.into())));
    }
    pub(crate) fn trailers(&self, trailers: HeaderMap) {
        let _ = self.0.send(Ok(Frame::trailers(trailers)));
    }
    pub(crate) fn fail(&self) {
        let _ = self.0.send(Err(std::io::ErrorKind::ConnectionReset.into()));
    }
}

/// What a caller saw of an answer.
#[derive(Debug)]
pub(crate) struct Sight {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: HeaderMap,
}

impl Sight {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
    pub(crate) fn replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }
    pub(crate) fn refused(&self) -> Option<&str> {
        self.header("onlyonce-refused")
    }
    pub(crate) fn problem(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("a problem")
    }
    pub(crate) fn retry_after(&self) -> Option<u64> {
        self.header("retry-after").map(|seconds| seconds.parse().expect("whole seconds"))
    }
}

pub(crate) async fn seen(answer: Answer) -> Sight {
    let (parts, body) = answer.into_parts();
    let collected = body.collect().await.expect("a whole body");
    let trailers = collected.trailers().cloned().unwrap_or_default();
    Sight { status: parts.status.as_u16(), headers: parts.headers, body: collected.to_bytes(), trailers }
}

pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

//! The service behind the layer: sends each request to the upstream, once.
//!
//! # What is known about a request that failed
//!
//! | what failed | it is |
//! |---|---|
//! | the connection could not be made | [`Failure::NotSent`] |
//! | the connection was closed before it took the request up | sent on another one, or [`Failure::NotSent`] |
//! | anything later | [`Failure::Lost`] |
//!
//! hyper's pool sends a request again only when its connection handed it back untouched: the error then
//! carries the request itself (`TrySendError::message`), which hyper gives up when it starts to write.
//! An idle connection is read before it is written, so one that the server has closed is noticed unless
//! the close is still on its way. To make that rare, connections idle for longer than
//! [`POOL_IDLE_MAX`] are not used again.
//!
//! What is not guarded streams both ways at the pace of the slower side and has no timeout. It ends with
//! its client, with its upstream, or when the [`Cut`](Forward::new) comes at shutdown.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri, Version, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::upgrade::OnUpgrade;
use hyper_util::client::legacy::{Client, Error as ClientError, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use onlyonce::problem::{Code, Problem};
use onlyonce::{Execution, Failure};
use pin_project_lite::pin_project;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::{debug, warn};

use crate::connect::Connector;
use crate::headers;
use crate::upstream::Upstream;

/// How long an idle connection is kept, on the local clock. Servers close idle connections after 2 s
/// (gunicorn), 5 s (Node, uvicorn) or later, and a request that crosses the close is lost.
pub const POOL_IDLE_MAX: Duration = Duration::from_millis(1_500);

/// When a caller may come back after a failure that may pass.
const RETRY_AFTER: Duration = Duration::from_secs(1);

const TOO_LONG: &[u8] = b"The target is too long to be passed on; nothing was sent to the service.\n";

/// Any error of a body.
pub type BoxError = Box<dyn StdError + Send + Sync>;

/// The body of a forwarded response, and of the refusals that stand in for one.
pub type ForwardBody = UnsyncBoxBody<Bytes, BoxError>;

/// A request extension: where the request came from.
#[derive(Clone, Copy, Debug)]
pub struct ClientAddr(pub SocketAddr);

/// What the upstream is told as the `Host`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostRule {
    /// The host that the client asked for.
    #[default]
    Preserve,
    /// The host in the upstream's URL.
    Upstream,
}

/// Sends requests to one upstream. Clones share its connections.
#[derive(Clone)]
pub struct Forward(Arc<Shared>);

struct Shared {
    client: Client<Connector, ForwardBody>,
    upstream: Upstream,
    host: HostRule,
    cut: CancellationToken,
    tunnels: TaskTracker,
}

impl Forward {
    /// A service that forwards to `upstream`. `cut` ends whatever is not guarded; `tunnels` are the tasks
    /// of connections that changed their protocol.
    ///
    /// # Errors
    /// If the upstream wants TLS and the system's certificates cannot be loaded.
    pub fn new(
        upstream: Upstream,
        host: HostRule,
        cut: CancellationToken,
        tunnels: TaskTracker,
    ) -> std::io::Result<Self> {
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(POOL_IDLE_MAX)
            .build(Connector::new(upstream.is_https())?);
        Ok(Self(Arc::new(Shared { client, upstream, host, cut, tunnels })))
    }
}

impl Shared {
    async fn guarded(self: Arc<Self>, sending: ResponseFuture) -> Response<ForwardBody> {
        match sending.await {
            // Nobody asked for another protocol, and this is no answer in the one that was spoken.
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => failed(Failure::Lost),
            Ok(response) => passed(response.map(boxed)),
            Err(error) => failed(self.judge(&error)),
        }
    }

    /// `upgrading` is the client's connection if it asks for another protocol on it.
    async fn unguarded(
        self: Arc<Self>,
        sending: ResponseFuture,
        upgrading: Option<OnUpgrade>,
    ) -> Response<ForwardBody> {
        let answer = tokio::select! {
            answer = sending => answer,
            () = self.cut.cancelled() => return refused(Problem::new(
                Code::UpstreamLost,
                "The proxy is shutting down and did not wait for the answer.",
            )),
        };
        match answer {
            Ok(response) if response.status() == StatusCode::SWITCHING_PROTOCOLS => match upgrading {
                Some(inbound) => self.tunnel(response, inbound),
                None => refused(Problem::new(
                    Code::UpstreamLost,
                    "The service changed the protocol although nobody had asked for it.",
                )),
            },
            Ok(response) => {
                let cut = self.cut.clone().cancelled_owned();
                passed(response.map(|body| boxed(CutBody { body, cut })))
            }
            Err(error) => refused(match self.judge(&error) {
                Failure::NotSent => Problem::new(
                    Code::UpstreamUnreachable,
                    "Nothing was sent to the service; the request can be sent again.",
                )
                .retry_after(RETRY_AFTER),
                // What is not known to be unsent may have arrived.
                _ => Problem::new(
                    Code::UpstreamLost,
                    "The service was sent the request and its answer was lost; what it asked for may have happened.",
                ),
            }),
        }
    }

    fn judge(&self, error: &ClientError) -> Failure {
        let failure = failure(error);
        warn!(upstream = %self.upstream, error = %Chain(error), ?failure, "the upstream failed");
        failure
    }

    /// Makes the head fit for the upstream; returns the protocols that it still asks to change to.
    fn prepare(
        &self,
        request: &mut Request<ForwardBody>,
        uri: Uri,
        attempt: Option<u32>,
    ) -> Option<http::HeaderValue> {
        let client = request.extensions().get::<ClientAddr>().map(|client| client.0.ip());
        let upgrade = headers::prepare_request(request.headers_mut(), client, attempt);
        if self.host == HostRule::Upstream {
            headers::set_host(request.headers_mut(), self.upstream.authority());
        }
        *request.uri_mut() = uri;
        *request.version_mut() = Version::HTTP_11;
        upgrade
    }

    /// Passes the answer on that changes the protocol, and from then on bytes, both ways.
    fn tunnel<B>(&self, mut response: Response<B>, inbound: OnUpgrade) -> Response<ForwardBody> {
        let outbound = hyper::upgrade::on(&mut response);
        let cut = self.cut.clone();
        self.tunnels.spawn(async move {
            let copying = async {
                let (inbound, outbound) = tokio::try_join!(inbound, outbound)?;
                let (mut inbound, mut outbound) = (TokioIo::new(inbound), TokioIo::new(outbound));
                tokio::io::copy_bidirectional(&mut inbound, &mut outbound).await?;
                Ok::<(), BoxError>(())
            };
            tokio::select! {
                copied = copying => if let Err(error) = copied {
                    debug!(%error, "a connection that changed its protocol ended");
                },
                () = cut.cancelled() => {}
            }
        });
        let protocol = response.headers().get(header::UPGRADE).cloned();
        let mut response = passed(response.map(|_| empty()));
        headers::keep_upgrade(response.headers_mut(), protocol);
        response
    }
}

impl<B> Service<Request<B>> for Forward
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response<ForwardBody>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<ForwardBody>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let forward = Arc::clone(&self.0);
        let mut request = request.map(boxed);
        let attempt = request.extensions().get::<Execution>().map(|execution| execution.attempt);
        let Some(uri) = forward.upstream.uri(request.uri().path_and_query()) else {
            warn!(upstream = %forward.upstream, "a target is too long to be passed on behind the base path");
            let mut response = Response::new(boxed(Full::new(Bytes::from_static(TOO_LONG))));
            *response.status_mut() = StatusCode::URI_TOO_LONG;
            // Of what is guarded it would be recorded, although nothing was done.
            let response = attempt.map_or(response, |_| failed(Failure::NotSent));
            return Box::pin(std::future::ready(Ok(response)));
        };
        let inbound = request.extensions_mut().remove::<OnUpgrade>();
        let asked = forward.prepare(&mut request, uri, attempt);
        let sending = forward.client.request(request);
        match attempt {
            Some(_) => Box::pin(async { Ok(forward.guarded(sending).await) }),
            None => {
                let upgrading = asked.and(inbound);
                Box::pin(async { Ok(forward.unguarded(sending, upgrading).await) })
            }
        }
    }
}

/// Whether the request may have reached the upstream.
fn failure(error: &ClientError) -> Failure {
    // hyper calls a request cancelled when it never took it up.
    let canceled = error
        .source()
        .and_then(|source| source.downcast_ref::<hyper::Error>())
        .is_some_and(hyper::Error::is_canceled);
    if error.is_connect() || canceled { Failure::NotSent } else { Failure::Lost }
}

/// An answer from the upstream, as the caller's connection may have it.
fn passed(mut response: Response<ForwardBody>) -> Response<ForwardBody> {
    headers::prepare_response(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    response
}

/// Tells the layer to answer in the upstream's place.
fn failed(failure: Failure) -> Response<ForwardBody> {
    let mut response = Response::new(empty());
    *response.status_mut() = StatusCode::BAD_GATEWAY;
    response.extensions_mut().insert(failure);
    response
}

pub(crate) fn refused(problem: Problem) -> Response<ForwardBody> {
    problem.into_response().map(|body| boxed(Full::new(body)))
}

fn empty() -> ForwardBody {
    boxed(Full::new(Bytes::new()))
}

pub(crate) fn boxed<B>(body: B) -> ForwardBody
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

pin_project! {
    /// A body that ends with an error when the proxy has to leave.
    struct CutBody<B> {
        #[pin]
        body: B,
        #[pin]
        cut: WaitForCancellationFutureOwned,
    }
}

impl<B> Body for CutBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.project();
        if this.cut.poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the proxy is shutting down".into())));
        }
        let frame = ready!(this.body.poll_frame(cx));
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An error with all its causes, in one line.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn StdError);

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

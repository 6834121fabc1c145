//! Takes connections, HTTP/1.1 and HTTP/2 without TLS (h2c, prior knowledge), and makes their requests
//! what the layer expects: one `Host`, one `Cookie` line, and the client's address.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, HOST};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use onlyonce::OnlyonceService;
use pin_project_lite::pin_project;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::{debug, warn};

use crate::connect::KEEP_ALIVE_AFTER;
use crate::forward::{BoxError, ClientAddr, Forward, ForwardBody, boxed};
use crate::headers;

/// How long a client may take for a request's head, and stay idle between two requests. Longer than the
/// idle time of common load balancers (60 s), which would otherwise meet closed connections.
pub(crate) const HEAD_TIME_MAX: Duration = Duration::from_secs(75);

/// The pause after a failed accept: file descriptors come back, a tight loop would not help.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The steps of an ending, in their order.
#[derive(Clone, Default)]
pub(crate) struct Ending {
    /// No new connections and requests.
    pub(crate) closing: CancellationToken,
    /// What is not guarded ends.
    pub(crate) cut: CancellationToken,
    /// Every connection ends.
    pub(crate) kill: CancellationToken,
}

/// Takes connections until the ending begins.
pub(crate) async fn serve(
    listener: TcpListener,
    service: OnlyonceService<Forward>,
    connections: TaskTracker,
    ending: Ending,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ending.closing.cancelled() => return,
        };
        match accepted {
            Ok((stream, client)) => {
                let connection = connection(stream, client, service.clone(), ending.clone());
                connections.spawn(connection);
            }
            // The client left before it was its turn.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    client: SocketAddr,
    service: OnlyonceService<Forward>,
    ending: Ending,
) {
    if let Err(error) = prepare(&stream) {
        debug!(%error, "the connection was over at once");
        return;
    }
    let in_use = InUse::default();
    let any_request = Arc::new(AtomicBool::new(false));
    let answer = {
        let (in_use, any_request) = (in_use.clone(), Arc::clone(&any_request));
        service_fn(move |request: Request<Incoming>| {
            any_request.store(true, Ordering::Relaxed);
            let using = in_use.enter();
            let answering = answer(request, client, service.clone());
            async move {
                let body = |body| Tracked { body, _using: using };
                Ok::<_, Infallible>(answering.await.map(body))
            }
        })
    };
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_TIME_MAX);
    builder.http2().timer(TokioTimer::new());
    let mut serving = pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), answer));
    // hyper does not time the bytes by which it tells the protocols apart.
    let mut first_head = pin!(sleep(HEAD_TIME_MAX));
    let (mut waiting, mut closing, mut cutting) = (true, false, false);
    loop {
        tokio::select! {
            served = serving.as_mut() => {
                if let Err(error) = served {
                    debug!(%client, %error, "a connection ended early");
                }
                return;
            }
            () = first_head.as_mut(), if waiting => {
                if !any_request.load(Ordering::Relaxed) {
                    return;
                }
                waiting = false;
            }
            () = ending.closing.cancelled(), if !closing => {
                closing = true;
                serving.as_mut().graceful_shutdown();
            }
            () = ending.cut.cancelled(), if !cutting => {
                cutting = true;
                // Half a head that nobody waits for.
                if in_use.none() {
                    return;
                }
            }
            () = ending.kill.cancelled() => return,
        }
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE_AFTER))
}

async fn answer(
    mut request: Request<Incoming>,
    client: SocketAddr,
    mut service: OnlyonceService<Forward>,
) -> Response<ForwardBody> {
    if let Err(refusal) = admit(&mut request, client) {
        return *refusal;
    }
    // Its readiness is that of `Forward`, which always is.
    let Ok(response) = service.call(request).await;
    response.map(boxed)
}

/// Makes the request what the layer and the upstream expect.
fn admit<B>(request: &mut Request<B>, client: SocketAddr) -> Result<(), Box<Response<ForwardBody>>> {
    if request.method() == Method::CONNECT {
        let mut refusal =
            plain(StatusCode::METHOD_NOT_ALLOWED, "This is a reverse proxy; it opens no tunnels.\n");
        // An empty list: no method is allowed on this kind of target.
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static(""));
        return Err(Box::new(refusal));
    }
    // Two hosts are how requests reach a site they were not checked for (RFC 9112, section 3.2).
    if request.headers().get_all(HOST).iter().count() > 1 {
        return Err(Box::new(plain(StatusCode::BAD_REQUEST, "The request has more than one Host.\n")));
    }
    // HTTP/1.1 wants one even where the target names it; nobody guesses which site was meant.
    if request.version() == Version::HTTP_11 && !request.headers().contains_key(HOST) {
        return Err(Box::new(plain(StatusCode::BAD_REQUEST, "The request has no Host.\n")));
    }
    // HTTP/2 and the absolute form of HTTP/1.1 name the host in the target, and it counts.
    if let Some(authority) = request.uri().authority().cloned() {
        headers::set_host(request.headers_mut(), &authority);
    }
    if request.version() == Version::HTTP_2 {
        headers::join_cookies(request.headers_mut());
    }
    headers::remove_named(request.headers_mut());
    request.extensions_mut().insert(ClientAddr(client));
    Ok(())
}

fn plain(status: StatusCode, text: &'static str) -> Response<ForwardBody> {
    let mut response = Response::new(boxed(Full::new(Bytes::from_static(text.as_bytes()))));
    *response.status_mut() = status;
    response
}

/// How many requests of a connection are being answered.
#[derive(Clone, Default)]
struct InUse(Arc<AtomicUsize>);

impl InUse {
    fn enter(&self) -> Using {
        self.0.fetch_add(1, Ordering::Relaxed);
        Using(Arc::clone(&self.0))
    }

    fn none(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

struct Using(Arc<AtomicUsize>);

impl Drop for Using {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

pin_project! {
    /// A body that counts as being answered until it is sent or given up.
    struct Tracked {
        #[pin]
        body: ForwardBody,
        _using: Using,
    }
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.project().body.poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: &str, uri: &str, version: Version, lines: &[(&str, &str)]) -> Request<()> {
        let mut request = Request::builder().method(method).uri(uri).version(version);
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap()
    }

    fn client() -> SocketAddr {
        "10.0.0.7:1234".parse().unwrap()
    }

    #[test]
    fn the_host_in_the_target_counts() {
        for (uri, version, line, host) in [
            ("/a", Version::HTTP_11, Some("shop"), Some("shop")),
            ("http://real:8080/a", Version::HTTP_11, Some("shop"), Some("real:8080")),
            ("http://ann@real/a", Version::HTTP_11, Some("shop"), Some("real")),
            ("http://real/a", Version::HTTP_2, None, Some("real")),
            ("/a", Version::HTTP_10, None, None),
        ] {
            let lines: Vec<_> = line.map(|host| ("host", host)).into_iter().collect();
            let mut request = request("POST", uri, version, &lines);
            assert!(admit(&mut request, client()).is_ok());
            let found = request.headers().get(HOST).map(|host| host.to_str().unwrap());
            assert_eq!(found, host, "{uri}");
            assert_eq!(request.extensions().get::<ClientAddr>().unwrap().0, client());
        }
    }

    #[test]
    fn two_hosts_no_host_and_tunnels_are_refused() {
        let mut two = request("GET", "/", Version::HTTP_11, &[("host", "a"), ("host", "a")]);
        assert_eq!(admit(&mut two, client()).unwrap_err().status(), StatusCode::BAD_REQUEST);
        let mut none = request("GET", "/", Version::HTTP_11, &[]);
        assert_eq!(admit(&mut none, client()).unwrap_err().status(), StatusCode::BAD_REQUEST);
        let mut tunnel = request("CONNECT", "db:5432", Version::HTTP_11, &[("host", "db:5432")]);
        assert_eq!(admit(&mut tunnel, client()).unwrap_err().status(), StatusCode::METHOD_NOT_ALLOWED);
    }

    #[test]
    fn the_layer_sees_what_the_upstream_will_see() {
        let lines = [
            ("host", "a"),
            ("connection", "x-user-id, authorization, te, upgrade"),
            ("x-user-id", "ann"),
            ("authorization", "Bearer ann"),
            ("te", "trailers"),
            ("upgrade", "websocket"),
        ];
        let mut request = request("POST", "/", Version::HTTP_11, &lines);
        assert!(admit(&mut request, client()).is_ok());
        let mut names: Vec<_> = request.headers().keys().map(http::HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "connection", "host", "te", "upgrade"]);
    }

    #[test]
    fn only_http2_splits_cookies() {
        let lines = [("host", "a"), ("cookie", "a=1"), ("cookie", "b=2")];
        for (version, count) in [(Version::HTTP_2, 1), (Version::HTTP_11, 2)] {
            let mut request = request("GET", "http://a/", version, &lines);
            assert!(admit(&mut request, client()).is_ok());
            assert_eq!(request.headers().get_all("cookie").iter().count(), count);
        }
    }
}

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
use hyper::rt::bounds::Http2ServerConnExec;
use hyper::server::conn::{http1, http2};
use hyper::service::{HttpService, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use onlyonce::OnlyonceService;
use pin_project_lite::pin_project;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;
use tracing::{debug, warn};

use crate::connect::KEEP_ALIVE_AFTER;
use crate::forward::{BoxError, ClientAddr, Forward, ForwardBody, boxed};
use crate::headers;

/// How long a client may take for a request's head, and stay idle between two requests. Before the first it may
/// take as long for its first byte as well. Longer than the idle time of common load balancers (60 s), which would
/// otherwise meet closed connections.
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
    let http2 = tokio::select! {
        spoken = timeout(HEAD_TIME_MAX, speaks_http2(&stream)) => match spoken {
            Ok(Ok(http2)) => http2,
            Ok(Err(error)) => {
                debug!(%client, %error, "a connection ended before its first request");
                return;
            }
            Err(_) => return,
        },
        () = ending.closing.cancelled() => return,
    };
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
    if http2 {
        let serving = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .serve_connection(TokioIo::new(stream), answer);
        // hyper has no limit to the time before the first request of HTTP/2.
        let silent = async {
            sleep(HEAD_TIME_MAX).await;
            if any_request.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        };
        // Boxed, or every connection of HTTP/1.1 would be as large.
        tokio::select! {
            () = Box::pin(until_ended(serving, client, in_use, ending)) => {}
            () = silent => {}
        }
    } else {
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME_MAX)
            .serve_connection(TokioIo::new(stream), answer)
            .with_upgrades();
        until_ended(serving, client, in_use, ending).await;
    }
}

/// How a connection of HTTP/2 with prior knowledge begins (RFC 9113, section 3.4).
const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The pauses before a client's bytes are looked at again when they may become the preface. They double: whoever
/// sends half a preface and no more must not keep a processor busy.
const PREFACE_PAUSE: Duration = Duration::from_millis(5);
const PREFACE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Tells the protocols apart and takes nothing off the connection.
async fn speaks_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut start = [0; HTTP2_PREFACE.len()];
    let mut pause = PREFACE_PAUSE;
    loop {
        // Before the look, so that nothing can have come after it.
        let ended = stream.ready(Interest::READABLE).await?.is_read_closed();
        let bytes = stream.peek(&mut start).await?;
        if ended || bytes == 0 || bytes == start.len() || !HTTP2_PREFACE.starts_with(&start[..bytes]) {
            return Ok(start == *HTTP2_PREFACE);
        }
        // What was only looked at stays readable, so neither the rest nor the end would wake anyone.
        sleep(pause).await;
        pause = PREFACE_PAUSE_MAX.min(pause * 2);
    }
}

/// A connection of either protocol that can be told to take no more requests.
trait Serving: Future<Output = hyper::Result<()>> {
    fn close(self: Pin<&mut Self>);
}

impl<S, B> Serving for http1::UpgradeableConnection<TokioIo<TcpStream>, S>
where
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<BoxError>,
    B: Body + 'static,
    B::Error: Into<BoxError>,
    Self: Future<Output = hyper::Result<()>>,
{
    fn close(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

impl<S, B, E> Serving for http2::Connection<TokioIo<TcpStream>, S, E>
where
    S: HttpService<Incoming, ResBody = B>,
    S::Error: Into<BoxError>,
    B: Body + 'static,
    B::Error: Into<BoxError>,
    E: Http2ServerConnExec<S::Future, B>,
{
    fn close(self: Pin<&mut Self>) {
        self.graceful_shutdown();
    }
}

async fn until_ended(serving: impl Serving, client: SocketAddr, in_use: InUse, ending: Ending) {
    let mut serving = pin!(serving);
    let steps = [&ending.closing, &ending.cut, &ending.kill];
    for (number, step) in steps.into_iter().enumerate() {
        tokio::select! {
            served = serving.as_mut() => {
                if let Err(error) = served {
                    debug!(%client, %error, "a connection ended early");
                }
                return;
            }
            () = step.cancelled() => match number {
                0 => serving.as_mut().close(),
                // Half a head that nobody waits for.
                1 if in_use.none() => return,
                _ => {}
            }
        }
    }
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE_AFTER))
}

fn answer(
    mut request: Request<Incoming>,
    client: SocketAddr,
    mut service: OnlyonceService<Forward>,
) -> impl Future<Output = Response<ForwardBody>> {
    // Its readiness is that of `Forward`, which always is.
    let answering = admit(&mut request, client).map(|()| service.call(request));
    async {
        match answering {
            Ok(answering) => {
                let Ok(response) = answering.await;
                response.map(boxed)
            }
            Err(refusal) => *refusal,
        }
    }
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
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

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

    #[tokio::test]
    async fn the_protocol_is_told_by_the_first_bytes_and_none_is_taken() {
        let (half, rest) = HTTP2_PREFACE.split_at(9);
        let cases: [(&[&[u8]], bool); 5] = [
            (&[HTTP2_PREFACE], true),
            (&[half, rest], true),
            (&[b"POST /payments HTTP/1.1\r\n"], false),
            (&[b"PR", b"OPFIND / HTTP/1.1\r\n"], false),
            (&[half, b"P/1.1\r\n"], false),
        ];
        for (pieces, http2) in cases {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (mut stream, _) = listener.accept().await.unwrap();
            let telling = tokio::spawn(async move { (speaks_http2(&stream).await.unwrap(), stream) });
            for piece in pieces {
                client.write_all(piece).await.unwrap();
                sleep(Duration::from_millis(20)).await;
            }
            let told;
            (told, stream) = telling.await.unwrap();
            assert_eq!(told, http2, "{pieces:?}");
            let mut received = vec![0; pieces.concat().len()];
            stream.read_exact(&mut received).await.unwrap();
            assert_eq!(received, pieces.concat());
        }
    }

    #[tokio::test]
    async fn half_a_preface_is_not_waited_for_after_its_client_left() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        client.write_all(b"PRI").await.unwrap();
        client.shutdown().await.unwrap();
        let told = timeout(Duration::from_secs(5), speaks_http2(&stream)).await;
        assert!(!told.expect("the end is noticed").unwrap());
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

use std::sync::{Arc, Mutex};

use http::HeaderValue;
use onlyonce_core::{Key, Operation};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

use super::*;

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
const A_MOMENT: Duration = Duration::from_millis(100);

/// What an upstream does with the requests on one connection.
#[derive(Clone, Copy)]
enum Habit {
    /// Answers every one.
    KeepsAlive,
    /// Answers the first and closes, without announcing it.
    ClosesIdle,
    /// Answers the first and hangs up on the second once it has read it.
    HangsUpOnSecond,
    /// Reads the first and hangs up.
    HangsUp,
}

/// An upstream that notes the first line of every request it was sent.
struct Server {
    upstream: Upstream,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Server {
    async fn start(habit: Habit) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = Upstream::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, habit, Arc::clone(&noted)));
            }
        });
        Self { upstream, seen }
    }

    fn forward(&self) -> Forward {
        forward(&self.upstream)
    }

    fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, habit: Habit, noted: Arc<Mutex<Vec<String>>>) {
    for number in 1.. {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => request.push(byte),
                Err(_) => return,
            }
        }
        let line = String::from_utf8(request).unwrap().lines().next().unwrap().to_owned();
        noted.lock().unwrap().push(line);
        match (habit, number) {
            (Habit::HangsUp, _) | (Habit::HangsUpOnSecond, 2) => return,
            _ => stream.write_all(OK.as_bytes()).await.unwrap(),
        }
        if matches!(habit, Habit::ClosesIdle) {
            return;
        }
    }
}

fn forward(upstream: &Upstream) -> Forward {
    Forward::new(upstream.clone(), HostRule::Preserve, CancellationToken::new(), TaskTracker::new()).unwrap()
}

fn request(path: &str) -> Request<Full<Bytes>> {
    Request::post(path).header("host", "shop").body(Full::default()).unwrap()
}

fn guarded(path: &str) -> Request<Full<Bytes>> {
    let operation = Operation::new("default", "POST /", "", Key::new("k").unwrap());
    let mut request = request(path);
    request.extensions_mut().insert(Execution { operation: Arc::new(operation), attempt: 1 });
    request
}

/// The failure that the layer is told; or, on what is not guarded, the status and code of the refusal.
async fn send(forward: &mut Forward, request: Request<Full<Bytes>>) -> Result<StatusCode, Failure> {
    let Ok(response) = forward.call(request).await;
    match response.extensions().get::<Failure>() {
        Some(failure) => Err(*failure),
        None => {
            let status = response.status();
            response.into_body().collect().await.unwrap();
            Ok(status)
        }
    }
}

async fn refusal(forward: &mut Forward, request: Request<Full<Bytes>>) -> (StatusCode, HeaderValue) {
    let Ok(response) = forward.call(request).await;
    assert!(response.extensions().get::<Failure>().is_none(), "no layer answers for it");
    (response.status(), response.headers()["onlyonce-refused"].clone())
}

#[tokio::test]
async fn what_no_one_took_was_not_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = Upstream::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    drop(listener);
    let mut forward = forward(&upstream);
    assert_eq!(send(&mut forward, guarded("/")).await, Err(Failure::NotSent));
    let (status, code) = refusal(&mut forward, request("/")).await;
    assert_eq!((status.as_u16(), code.to_str().unwrap()), (502, "upstream-unreachable"));
}

/// A server that takes the connection and never speaks TLS: not one byte of the request went out.
#[tokio::test]
async fn a_connection_that_does_not_come_about_in_time_was_not_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = Upstream::parse(&format!("https://{}", listener.local_addr().unwrap())).unwrap();
    let silent = tokio::spawn(async move { listener.accept().await.unwrap() });
    let mut forward = forward(&upstream);
    assert_eq!(send(&mut forward, guarded("/")).await, Err(Failure::NotSent));
    drop(silent);
}

#[tokio::test]
async fn what_was_read_and_not_answered_is_lost_and_not_sent_again() {
    let upstream = Server::start(Habit::HangsUp).await;
    let mut forward = upstream.forward();
    assert_eq!(send(&mut forward, guarded("/a")).await, Err(Failure::Lost));
    let (status, code) = refusal(&mut forward, request("/b")).await;
    assert_eq!((status.as_u16(), code.to_str().unwrap()), (502, "upstream-lost"));
    sleep(A_MOMENT).await;
    assert_eq!(upstream.seen(), ["POST /a HTTP/1.1", "POST /b HTTP/1.1"]);
}

/// The connection is reused, and the server dies while it works: the moment at which a client that
/// retries by itself would pay twice.
#[tokio::test]
async fn a_reused_connection_that_breaks_after_the_request_is_lost_and_not_sent_again() {
    let upstream = Server::start(Habit::HangsUpOnSecond).await;
    let mut forward = upstream.forward();
    assert_eq!(send(&mut forward, guarded("/a")).await, Ok(StatusCode::OK));
    assert_eq!(send(&mut forward, guarded("/b")).await, Err(Failure::Lost));
    sleep(A_MOMENT).await;
    assert_eq!(upstream.seen(), ["POST /a HTTP/1.1", "POST /b HTTP/1.1"]);
}

#[tokio::test]
async fn a_connection_that_the_upstream_closed_meanwhile_is_not_used() {
    let upstream = Server::start(Habit::ClosesIdle).await;
    let mut forward = upstream.forward();
    for number in 0..20 {
        assert_eq!(send(&mut forward, guarded(&format!("/{number}"))).await, Ok(StatusCode::OK));
        sleep(A_MOMENT / 10).await;
    }
    assert_eq!(upstream.seen().len(), 20, "and none is sent twice");
}

#[tokio::test]
async fn connections_are_reused_but_not_when_they_were_idle_for_long() {
    let upstream = Server::start(Habit::KeepsAlive).await;
    let mut forward = upstream.forward();
    let mut connections = Vec::new();
    for wait in [Duration::ZERO, Duration::ZERO, POOL_IDLE_MAX + A_MOMENT] {
        sleep(wait).await;
        let Ok(response) = forward.call(guarded("/")).await;
        let info = response.extensions().get::<hyper_util::client::legacy::connect::HttpInfo>().cloned();
        connections.push(info.map(|info| info.local_addr()).unwrap());
        response.into_body().collect().await.unwrap();
        // The connection returns to the pool on a task of its own.
        sleep(A_MOMENT / 10).await;
    }
    assert_eq!(connections[0], connections[1]);
    assert_ne!(connections[1], connections[2]);
}

#[tokio::test]
async fn the_host_is_preserved_or_rewritten() {
    for (rule, host) in [(HostRule::Preserve, "shop"), (HostRule::Upstream, "up:3000")] {
        let upstream = Upstream::parse("http://up:3000/base").unwrap();
        let forward = Forward::new(upstream, rule, CancellationToken::new(), TaskTracker::new()).unwrap();
        let mut request = request("/a?b").map(boxed);
        *request.version_mut() = Version::HTTP_2;
        let uri = forward.0.upstream.uri(request.uri().path_and_query()).unwrap();
        forward.0.prepare(&mut request, uri, None);
        assert_eq!(request.headers()["host"], host);
        assert_eq!(request.headers()["x-forwarded-host"], "shop");
        assert_eq!(request.uri(), "http://up:3000/base/a?b");
        assert_eq!(request.version(), Version::HTTP_11);
    }
}

#[tokio::test]
async fn the_cut_ends_what_waits_and_what_flows() {
    // The first answer flows and the second never begins.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = Upstream::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
    tokio::spawn(async move {
        let (mut flows, _) = listener.accept().await.unwrap();
        assert!(flows.read(&mut [0; 1024]).await.unwrap() > 0);
        flows.write_all(b"HTTP/1.1 200 OK\r\n\r\nfirst").await.unwrap();
        let silent = listener.accept().await.unwrap();
        sleep(Duration::from_secs(60)).await;
        drop((flows, silent));
    });
    let cut = CancellationToken::new();
    let mut forward = Forward::new(upstream, HostRule::Preserve, cut.clone(), TaskTracker::new()).unwrap();
    let Ok(response) = forward.call(request("/flows")).await;
    let mut body = response.into_body();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "first");
    assert!(timeout(A_MOMENT, body.frame()).await.is_err(), "it goes on");
    let waiting = tokio::spawn(async move { refusal(&mut forward, request("/waits")).await });
    sleep(A_MOMENT).await;
    assert!(!waiting.is_finished());
    cut.cancel();
    let ended = timeout(Duration::from_secs(5), body.frame()).await.expect("at once");
    assert!(ended.unwrap().is_err(), "cut short is not the end");
    let (status, _) = timeout(Duration::from_secs(5), waiting).await.expect("at once").unwrap();
    assert_eq!(status, StatusCode::BAD_GATEWAY);
}

#[tokio::test]
async fn a_target_that_cannot_be_passed_on_is_answered() {
    let upstream = Upstream::parse("http://127.0.0.1:1/base").unwrap();
    let cut = CancellationToken::new();
    let mut forward = Forward::new(upstream, HostRule::Preserve, cut, TaskTracker::new()).unwrap();
    let longest = format!("/{}", "a".repeat(65_533));
    let Ok(response) = forward.call(request(&longest)).await;
    assert_eq!(response.status(), StatusCode::URI_TOO_LONG);
    let Ok(response) = forward.call(guarded(&longest)).await;
    assert_eq!(response.extensions().get(), Some(&Failure::NotSent), "the key is released");
}

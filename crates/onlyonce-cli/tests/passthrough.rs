//! What is not guarded passes as if there were no proxy.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::thread;
use std::time::Instant;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use support::{Connection, Proxy, Upstream, ask, get, millis, post, until};

const LARGE: u64 = 50 << 20;

/// Far below what is sent.
const GROWTH_KIB_MAX: u64 = 40 << 10;

/// Memory before and after `work`, which must not grow with what passes.
fn flat(proxy: &Proxy, work: impl FnOnce()) {
    assert_eq!(get("/warm").send(proxy).status, 200);
    let before = proxy.memory_kib("VmHWM");
    work();
    let grown = proxy.memory_kib("VmHWM") - before;
    assert!(grown < GROWTH_KIB_MAX, "memory has grown by {grown} KiB");
}

#[test]
fn a_large_upload_takes_no_memory() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    flat(&proxy, || {
        let request = ask("POST", "/upload").line("Content-Length", &LARGE.to_string());
        let mut connection = request.open(&proxy);
        let block = vec![b'x'; 1 << 16];
        for _ in 0..LARGE / block.len() as u64 {
            connection.write(&block).unwrap();
        }
        let answer = connection.answer();
        assert_eq!((answer.status, answer.json()["body_bytes"].as_u64()), (201, Some(LARGE)));
    });
}

#[test]
fn a_large_download_takes_no_memory_however_slowly_it_is_read() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    flat(&proxy, || {
        let mut connection = get("/download").order(&format!("size={LARGE}")).open(&proxy);
        assert_eq!(connection.head().unwrap().header("content-length"), Some(&*LARGE.to_string()));
        let first = connection.skip(1 << 20);
        // Time for whatever would be gathered.
        thread::sleep(millis(700));
        assert_eq!(first + connection.skip(LARGE - first), LARGE);
    });
}

#[test]
fn a_guarded_answer_over_the_limit_takes_no_memory_however_slowly_it_is_read() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    flat(&proxy, || {
        let mut connection = post("k").order(&format!("size={LARGE}")).open(&proxy);
        assert_eq!(connection.head().unwrap().status, 201);
        let first = connection.skip(1 << 20);
        thread::sleep(millis(700));
        assert_eq!(first + connection.skip(LARGE - first), LARGE);
    });
    assert_eq!(post("k").send(&proxy).refusal(), (409, "response-not-kept"));
}

#[test]
fn an_event_arrives_within_a_second() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for request in [get("/events"), post("k").to("/events")] {
        let asked = Instant::now();
        let mut connection = request.order("events=1 endless pause=5000").open(&proxy);
        assert_eq!(connection.head().unwrap().header("content-type"), Some("text/event-stream"));
        assert!(connection.until(b"data: 1\n\n").is_some());
        assert!(asked.elapsed() < millis(1_000), "{:?}", asked.elapsed());
    }
}

#[test]
fn a_connection_that_changes_its_protocol_passes_both_ways() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for method in ["GET", "POST"] {
        let mut connection = ask(method, "/chat")
            .line("Connection", "keep-alive, Upgrade")
            .line("Upgrade", "websocket")
            .line("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
            .order("upgrade")
            .open(&proxy);
        let head = connection.head().unwrap();
        assert_eq!((head.status, head.header("upgrade")), (101, Some("websocket")));
        assert_eq!(head.header("connection").map(str::to_ascii_lowercase).as_deref(), Some("upgrade"));
        assert!(connection.until(b"hello").is_some(), "the server speaks first");
        for message in [&b"\x81\x85\0\0\0\0ping\n"[..], &[0; 20_000], b"end"] {
            connection.write(message).unwrap();
            assert!(connection.until(message).is_some());
        }
    }
}

#[test]
fn a_protocol_that_the_server_does_not_change_to_is_an_answer() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let answer = get("/chat").line("Connection", "close, upgrade").line("Upgrade", "websocket").send(&proxy);
    assert_eq!((answer.status, answer.sent("upgrade")), (200, vec!["websocket".to_owned()]));
}

#[test]
fn http2_without_tls_is_served_guarded_and_not() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let guarded = post("k").send(&proxy);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(proxy.addr).await.unwrap();
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let send = |request: http::request::Builder| {
            let request = request.body(Full::new(Bytes::from_static(b"amount=100"))).unwrap();
            let mut sender = sender.clone();
            async move {
                let response = sender.send_request(request).await.unwrap();
                let (head, body) = response.into_parts();
                let body = body.collect().await.unwrap();
                (head, body.trailers().cloned(), body.to_bytes())
            }
        };
        let to = |path: &str| http::Request::post(format!("http://api.test{path}"));

        let (head, _, body) = send(to("/payments").header("idempotency-key", "k")).await;
        assert_eq!(
            (head.status.as_u16(), &body[..]),
            (201, &guarded.body[..]),
            "one identity for both versions"
        );
        assert_eq!(head.headers["idempotent-replayed"], "true");

        let unguarded = to("/x?y=1").header("cookie", "a=1").header("cookie", "b=2");
        let (head, _, body) = send(unguarded).await;
        let seen: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            (head.status.as_u16(), &seen["target"], &seen["body"]),
            (201, &"/x?y=1".into(), &"amount=100".into())
        );
        let lines: Vec<(String, String)> = serde_json::from_value(seen["headers"].clone()).unwrap();
        let line =
            |name: &str| lines.iter().filter(|line| line.0 == name).map(|line| &*line.1).collect::<Vec<_>>();
        assert_eq!((line("host"), line("cookie")), (vec!["api.test"], vec!["a=1; b=2"]));

        let trailing = || {
            let request = to("/rpc").header("idempotency-key", "rpc").header("te", "trailers");
            request.header("x-trailer", "grpc-status: 0").header("x-add", "trailer: grpc-status")
        };
        for replayed in [false, true] {
            let (head, trailers, _) = send(trailing()).await;
            assert_eq!(head.headers.contains_key("idempotent-replayed"), replayed);
            assert_eq!(trailers.unwrap()["grpc-status"], "0");
        }

        // Streams of one connection are copies like any others.
        let copies = (0..8).map(|_| {
            tokio::spawn(send(to("/payments").header("idempotency-key", "many").header("x-do", "before=300")))
        });
        let mut executed = 0;
        for copy in copies.collect::<Vec<_>>() {
            let (head, ..) = copy.await.unwrap();
            assert!(matches!(head.status.as_u16(), 201 | 409));
            executed += usize::from(head.status == 201 && !head.headers.contains_key("idempotent-replayed"));
        }
        assert_eq!(executed, 1);
    });
    assert_eq!((upstream.effects_for("k"), upstream.effects_for("many")), (1, 1));
}

#[test]
fn an_answer_to_head_has_its_length_and_no_body() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let mut connection = ask("HEAD", "/x").order("size=1234").open(&proxy);
    let head = connection.head().unwrap();
    assert_eq!((head.status, head.header("content-length")), (200, Some("1234")));
    assert_eq!(connection.ask(&get("/y")).json()["target"], "/y", "nothing was in between");
}

#[test]
fn a_client_that_waits_for_100_is_told_to_go_on() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    for request in [post("k"), ask("POST", "/x")] {
        let waiting = request.line("Expect", "100-continue").line("Content-Length", "10").body("");
        let mut connection = waiting.open(&proxy);
        assert_eq!(connection.until(b"\r\n\r\n").unwrap(), b"HTTP/1.1 100 Continue\r\n\r\n");
        connection.write(b"amount=100").unwrap();
        let answer = connection.answer();
        assert_eq!((answer.status, answer.json()["body"].as_str()), (201, Some("amount=100")));
    }
    assert!(post("k").send(&proxy).replayed());
}

#[test]
fn a_request_in_chunks_arrives_whole_with_its_trailers() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let chunks = "7\r\namount=\r\n3\r\n100\r\n0\r\nX-Sum: 7\r\n\r\n";
    for request in [post("k"), ask("PUT", "/x")] {
        let request = request.line("Transfer-Encoding", "chunked").line("Trailer", "X-Sum").body(chunks);
        let seen = request.send(&proxy).json();
        assert_eq!((&seen["body"], seen["body_bytes"].as_u64()), (&"amount=100".into(), Some(10)));
        assert_eq!(seen["trailers"], serde_json::json!([["x-sum", "7"]]));
    }
    assert!(post("k").send(&proxy).replayed(), "however it was framed");
}

#[test]
fn an_answer_may_come_before_the_request_has_ended() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let request =
        ask("POST", "/upload").line("Content-Length", "1000000").body("x").order("early status=413");
    let mut connection = request.open(&proxy);
    assert_eq!(connection.answer().refusal(), (413, "not refused"));
}

#[test]
fn an_old_client_is_served_and_given_its_replay() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let request =
        b"POST /x HTTP/1.0\r\nIdempotency-Key: k\r\nx-do: chunked size=23\r\nContent-Length: 1\r\n\r\nx";
    for replayed in [false, true] {
        let mut connection = Connection::open(proxy.addr).unwrap();
        connection.write(request).unwrap();
        let answer = connection.answer();
        assert_eq!((answer.status, answer.replayed(), answer.body.len()), (201, replayed, 23));
        assert_eq!(answer.header("transfer-encoding"), None, "it knows no chunks");
    }
}

#[test]
fn no_limit_of_guarded_requests_touches_others() {
    let upstream = Upstream::start();
    let config = "[defaults]\ntimeout = \"100ms\"\nlease = \"200ms\"\nrequest_timeout = \"100ms\"\n\
                  idle_timeout = \"100ms\"\nrequest_body_bytes_max = 4\nresponse_body_bytes_max = 4\n";
    let proxy = Proxy::start(&upstream, config);
    assert_eq!(get("/slow").order("before=700").send(&proxy).status, 200);
    let paused = get("/paused").order("size=46 pieces=2 pause=700").send(&proxy);
    assert_eq!((paused.whole, paused.body.len()), (true, 46));
    let mut connection = ask("POST", "/x").line("Content-Length", "10").body("amount").open(&proxy);
    thread::sleep(millis(700));
    connection.write(b"=100").unwrap();
    assert_eq!(connection.answer().json()["body"], "amount=100");
}

#[test]
fn a_client_that_leaves_is_noticed_upstream() {
    let upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    let mut connection = get("/endless").order("endless pause=10").open(&proxy);
    connection.head().unwrap();
    let open = || std::fs::read_dir(format!("/proc/{}/fd", proxy.pid())).unwrap().count();
    let before = open();
    drop(connection);
    until("both connections are closed", || open() <= before - 2);
}

#[test]
fn an_upstream_that_fails_is_told_by_its_code_without_a_key_too() {
    let mut upstream = Upstream::start();
    let proxy = Proxy::start(&upstream, "");
    assert_eq!(get("/x").order("close=head").send(&proxy).refusal(), (502, "upstream-lost"));
    upstream.stop();
    let mut connection = Connection::open(proxy.addr).unwrap();
    until("the proxy has noticed", || connection.ask(&get("/x")).refusal() == (502, "upstream-unreachable"));
}

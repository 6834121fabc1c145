//! The service behind the proxy in the tests: does what each request orders, and notes it on disk.
//!
//! `upstream NOTES [PORT]` prints its address once it listens. NOTES gets one line per event, each in one
//! append, so that nothing is lost when the process is killed:
//!
//! ```text
//! connected
//! received METHOD TARGET KEY ATTEMPT MS   the head was read, at this time of the clock
//! effect   METHOD TARGET KEY ATTEMPT ID   the work was done
//! ```
//!
//! The header `x-do` has the orders, separated by spaces; headers do not count in a fingerprint, so a retry
//! can order something else. Without an order it answers 201 or 200 with what it received, as JSON.
//!
//! | order | |
//! |---|---|
//! | `status=N` | the status |
//! | `before=MS`, `after=MS` | pauses before and after the effect |
//! | `close=head\|body\|effect\|half` | closes the connection after that; `half` is half of the answer |
//! | `die` | the process ends after the effect |
//! | `early` | answers before it reads the body, without an effect |
//! | `size=N`, `hex=BYTES` | the body |
//! | `pieces=N`, `pause=MS` | how many pieces it is sent in, and the pause between two |
//! | `events=N` | a stream of events instead |
//! | `endless` | the last piece is repeated for ever |
//! | `chunked` | a body in chunks instead of a length |
//! | `idle-close` | closes the connection after the answer, without a word |
//! | `interim` | sends a 103 first |
//! | `upgrade` | changes the protocol, says `hello`, and sends back what comes |
//!
//! `x-add: NAME: VALUE` adds a header line, `x-trailer: NAME: VALUE` a trailer.
#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn main() {
    let mut args = std::env::args().skip(1);
    let notes = args.next().expect("usage: upstream NOTES [PORT]");
    let port: u16 = args.next().map_or(0, |port| port.parse().expect("a port"));
    let listener = TcpListener::bind(("127.0.0.1", port)).expect("a free port");
    let notes = OpenOptions::new().create(true).append(true).open(notes).expect("a file for notes");
    let service = Arc::new(Service { notes, effects: AtomicU64::new(0) });
    println!("listening on {}", listener.local_addr().unwrap());
    for stream in listener.incoming().flatten() {
        let service = Arc::clone(&service);
        // An error is a peer that went away.
        thread::spawn(move || service.connection(&stream));
    }
}

struct Service {
    notes: File,
    effects: AtomicU64,
}

impl Service {
    fn connection(&self, stream: &TcpStream) -> io::Result<()> {
        self.note("connected");
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        while let Some(head) = Head::read(&mut reader)? {
            if !self.answer(&head, &mut reader, stream)? {
                break;
            }
        }
        Ok(())
    }

    /// Whether the connection stays open.
    fn answer(&self, head: &Head, reader: &mut impl BufRead, mut stream: &TcpStream) -> io::Result<bool> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(io::Error::other)?;
        self.note(&format!("received {head} {}", now.as_millis()));
        let close = head.order("close").unwrap_or_default();
        if close == "head" {
            return Ok(false);
        }
        if head.is_ordered("upgrade") {
            return upgrade(head, reader, stream);
        }
        if head.line("expect").is_some() {
            stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        if head.is_ordered("early") {
            send(head, &Received::default(), "none", stream)?;
            return Received::read(head, reader).map(|_| true);
        }
        let received = Received::read(head, reader)?;
        if close == "body" {
            return Ok(false);
        }
        head.pause("before");
        let id = format!("{}-{}", std::process::id(), self.effects.fetch_add(1, Ordering::SeqCst));
        self.note(&format!("effect {head} {id}"));
        if head.is_ordered("die") {
            std::process::exit(1);
        }
        if close == "effect" {
            return Ok(false);
        }
        head.pause("after");
        if head.is_ordered("interim") {
            stream.write_all(b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>\r\n\r\n")?;
        }
        send(head, &received, &id, stream)?;
        Ok(close != "half" && !head.is_ordered("idle-close") && head.line("connection") != Some("close"))
    }

    fn note(&self, line: &str) {
        (&self.notes).write_all(format!("{line}\n").as_bytes()).expect("notes can be taken");
    }
}

fn send(head: &Head, received: &Received, id: &str, mut stream: &TcpStream) -> io::Result<()> {
    let status = head.number("status").unwrap_or(if head.method == "POST" { 201 } else { 200 });
    let pieces = pieces(head, received, id);
    let trailers: Vec<&str> = head.lines_of("x-trailer").collect();
    let chunked = head.is_ordered("chunked") || !trailers.is_empty() || head.order("events").is_some();
    let mut text = format!("HTTP/1.1 {status} Ordered\r\n");
    if head.order("events").is_some() {
        text += "content-type: text/event-stream\r\n";
    }
    for line in head.lines_of("x-add") {
        text += &format!("{line}\r\n");
    }
    let has_body = !matches!(status, 204 | 304);
    if chunked {
        text += "transfer-encoding: chunked\r\n";
    } else if has_body {
        text += &format!("content-length: {}\r\n", pieces.iter().map(Vec::len).sum::<usize>());
    }
    stream.write_all(format!("{text}\r\n").as_bytes())?;
    if head.method == "HEAD" || !has_body {
        return Ok(());
    }
    let half = head.order("close") == Some("half");
    let count = if half { pieces.len().div_ceil(2) } else { pieces.len() };
    let piece = |piece: &[u8]| match chunked {
        true => [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat(),
        false => piece.to_vec(),
    };
    for (at, data) in pieces[..count].iter().enumerate() {
        if at > 0 {
            head.pause("pause");
        }
        stream.write_all(&piece(if half && pieces.len() == 1 { &data[..data.len() / 2] } else { data }))?;
    }
    while head.is_ordered("endless") {
        head.pause("pause");
        stream.write_all(&piece(&pieces[pieces.len() - 1]))?;
    }
    if chunked && !half {
        let trailers: String = trailers.iter().map(|line| format!("{line}\r\n")).collect();
        stream.write_all(format!("0\r\n{trailers}\r\n").as_bytes())?;
    }
    Ok(())
}

/// The answer's body, in the pieces it is sent in.
fn pieces(head: &Head, received: &Received, id: &str) -> Vec<Vec<u8>> {
    if let Some(events) = head.number("events") {
        return (1..=events).map(|event| format!("data: {event}\n\n").into_bytes()).collect();
    }
    let body = if let Some(size) = head.number("size") {
        let mut body = b"abcdefghijklmnopqrstuvw".repeat(size.div_ceil(23) as usize);
        body.truncate(size as usize);
        body
    } else if let Some(hex) = head.order("hex") {
        let digits = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal digits");
        (0..hex.len()).step_by(2).map(digits).collect()
    } else {
        serde_json::json!({
            "id": id,
            "method": head.method,
            "target": head.target,
            "headers": head.lines,
            "body": String::from_utf8_lossy(&received.beginning),
            "body_bytes": received.bytes,
            "trailers": received.trailers,
        })
        .to_string()
        .into_bytes()
    };
    let size = body.len().div_ceil(head.number("pieces").unwrap_or(1) as usize).max(1);
    body.chunks(size).map(<[u8]>::to_vec).collect()
}

fn upgrade(head: &Head, reader: &mut impl BufRead, mut stream: &TcpStream) -> io::Result<bool> {
    let protocol = head.line("upgrade").unwrap_or("none");
    let answer = format!("HTTP/1.1 101 Changed\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n\r\nhello");
    stream.write_all(answer.as_bytes())?;
    let mut data = [0; 4096];
    loop {
        match reader.read(&mut data)? {
            0 => return Ok(false),
            bytes => stream.write_all(&data[..bytes])?,
        }
    }
}

struct Head {
    method: String,
    target: String,
    lines: Vec<(String, String)>,
}

impl Head {
    /// `None` if the peer has closed the connection.
    fn read(reader: &mut impl BufRead) -> io::Result<Option<Self>> {
        let Some(start) = line(reader)? else { return Ok(None) };
        let mut parts = start.split(' ').map(str::to_owned);
        let (method, target) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        Ok(Some(Self { method, target, lines: field_lines(reader)? }))
    }

    fn lines_of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.lines.iter().filter(move |line| line.0 == name).map(|line| line.1.as_str())
    }

    fn line(&self, name: &str) -> Option<&str> {
        self.lines.iter().find(|line| line.0 == name).map(|line| line.1.as_str())
    }

    fn orders(&self) -> impl Iterator<Item = &str> {
        self.lines_of("x-do").flat_map(|orders| orders.split(' '))
    }

    fn order(&self, name: &str) -> Option<&str> {
        self.orders().find_map(|order| order.strip_prefix(name)?.strip_prefix('='))
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.order(name).map(|number| number.parse().expect("an order in numbers"))
    }

    fn is_ordered(&self, name: &str) -> bool {
        self.orders().any(|order| order == name)
    }

    fn pause(&self, name: &str) {
        thread::sleep(Duration::from_millis(self.number(name).unwrap_or(0)));
    }
}

impl std::fmt::Display for Head {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let key = self.line("idempotency-key").unwrap_or("-");
        let attempt = self.line("idempotency-attempt").unwrap_or("-");
        write!(f, "{} {} {key} {attempt}", self.method, self.target)
    }
}

/// A request's body: how much there was, and how it began.
#[derive(Default)]
struct Received {
    bytes: u64,
    beginning: Vec<u8>,
    trailers: Vec<(String, String)>,
}

impl Received {
    fn read(head: &Head, reader: &mut impl BufRead) -> io::Result<Self> {
        let mut received = Self::default();
        if let Some(length) = head.line("content-length") {
            received.take(reader, length.parse().map_err(io::Error::other)?)?;
        } else if head.line("transfer-encoding").is_some() {
            loop {
                let size = line(reader)?.ok_or(io::ErrorKind::UnexpectedEof)?;
                let size = u64::from_str_radix(size.trim(), 16).map_err(io::Error::other)?;
                if size == 0 {
                    break;
                }
                received.take(reader, size)?;
                line(reader)?;
            }
            received.trailers = field_lines(reader)?;
        }
        Ok(received)
    }

    fn take(&mut self, reader: &mut impl BufRead, bytes: u64) -> io::Result<()> {
        const BEGINNING_BYTES_MAX: usize = 4096;
        let mut left = bytes;
        let mut data = vec![0; 1 << 16];
        while left > 0 {
            let want = data.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let read = reader.read(&mut data[..want])?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let room = BEGINNING_BYTES_MAX.saturating_sub(self.beginning.len());
            self.beginning.extend_from_slice(&data[..read.min(room)]);
            left -= read as u64;
        }
        self.bytes += bytes;
        Ok(())
    }
}

fn field_lines(reader: &mut impl BufRead) -> io::Result<Vec<(String, String)>> {
    let mut lines = Vec::new();
    loop {
        let text = line(reader)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if text.is_empty() {
            return Ok(lines);
        }
        let (name, value) = text.split_once(':').ok_or(io::ErrorKind::InvalidData)?;
        lines.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
}

/// One line without its end; `None` at the end of the stream.
fn line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut text = Vec::new();
    if reader.read_until(b'\n', &mut text)? == 0 {
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&text).trim_end_matches(['\r', '\n']).to_owned()))
}

//! Real processes and real sockets: the upstream, the proxy, and a client that shows the wire as it is.
#![allow(dead_code, unreachable_pub, reason = "no test file uses all of it, and none is a library")]

pub mod load;
pub mod lock;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// For whatever should happen soon, on a machine that is busy with something else.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until something holds.
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    assert!(happens_within(PATIENCE, holds), "this did not happen: {what}");
}

pub fn happens_within(time: Duration, mut holds: impl FnMut() -> bool) -> bool {
    let started = Instant::now();
    while !holds() {
        if started.elapsed() > time {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}

pub fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A port that nobody listens on: it was free a moment ago.
pub fn free_addr() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap()
}

fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_onlyonce"))
}

/// The `onlyonce` command, free of what the environment of the tests says.
pub fn onlyonce() -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars() {
        if name.starts_with("ONLYONCE_") || name == "DATABASE_URL" || name == "RUST_LOG" {
            command.env_remove(name);
        }
    }
    command
}

/// Runs a command to its end, which must come by itself.
#[track_caller]
pub fn run(mut command: Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    if !happens_within(PATIENCE, || child.try_wait().unwrap().is_some()) {
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        panic!("{command:?} does not end:\n{}{}", text(&output.stdout), text(&output.stderr));
    }
    child.wait_with_output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The upstream process and the notes that it takes.
pub struct Upstream {
    child: Child,
    folder: TempDir,
    pub addr: SocketAddr,
}

impl Upstream {
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (child, addr) = Self::spawn(folder.path(), 0);
        Self { child, folder, addr }
    }

    fn spawn(folder: &Path, port: u16) -> (Child, SocketAddr) {
        let program = binary().parent().unwrap().join("examples/upstream");
        let mut child = Command::new(&program)
            .arg(folder.join("notes"))
            .arg(port.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}; cargo test builds it", program.display()));
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let addr = line.trim().strip_prefix("listening on ").expect("the upstream listens");
        (child, addr.parse().unwrap())
    }

    pub fn stop(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    /// Starts it again where it was.
    pub fn start_again(&mut self) {
        self.stop();
        let mut spawned = None;
        // The port may still be in use by what is left of an old connection.
        self.child = happens_within(PATIENCE, || {
            spawned = std::panic::catch_unwind(|| Self::spawn(self.folder.path(), self.addr.port())).ok();
            spawned.is_some()
        })
        .then(|| spawned.take().unwrap().0)
        .expect("the upstream starts again");
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn notes(&self) -> Vec<Vec<String>> {
        let notes = std::fs::read_to_string(self.folder.path().join("notes")).unwrap();
        notes.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect()
    }

    fn count(&self, event: &str, key: Option<&str>) -> usize {
        let counts = |note: &&Vec<String>| note[0] == event && key.is_none_or(|key| note[3] == key);
        self.notes().iter().filter(counts).count()
    }

    /// Every key that work was done for, as often as it was.
    pub fn effects_by_key(&self) -> BTreeMap<String, usize> {
        let mut effects = BTreeMap::new();
        for note in self.notes().into_iter().filter(|note| note[0] == "effect") {
            *effects.entry(note[3].clone()).or_default() += 1;
        }
        effects
    }

    /// How many connections there were.
    pub fn connected(&self) -> usize {
        self.count("connected", None)
    }

    /// How many requests were received, whatever became of them.
    pub fn received(&self) -> usize {
        self.count("received", None)
    }

    pub fn received_for(&self, key: &str) -> usize {
        self.count("received", Some(key))
    }

    /// How often the work was done.
    pub fn effects(&self) -> usize {
        self.count("effect", None)
    }

    pub fn effects_for(&self, key: &str) -> usize {
        self.count("effect", Some(key))
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How a proxy is to be started.
pub struct Setup {
    pub folder: Arc<TempDir>,
    upstream: String,
    listen: String,
    store: String,
    config: String,
}

impl Setup {
    pub fn new(upstream: impl Into<String>) -> Self {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let store = format!("sqlite:{}", folder.path().join("keys.db").display());
        Self { folder, upstream: upstream.into(), listen: "127.0.0.1:0".into(), store, config: String::new() }
    }

    /// The rest of the file; settings first, then tables.
    pub fn config(mut self, config: &str) -> Self {
        self.config = config.into();
        self
    }

    pub fn listen(mut self, addr: SocketAddr) -> Self {
        self.listen = addr.to_string();
        self
    }

    /// Another instance: the same store, and a file of its own for settings.
    pub fn store_of(mut self, other: &Self) -> Self {
        self.store.clone_from(&other.store);
        self
    }

    /// Another store.
    pub fn store_url(mut self, url: &str) -> Self {
        url.clone_into(&mut self.store);
        self
    }

    /// Parameters of the store's URL.
    pub fn store_query(mut self, query: &str) -> Self {
        self.store = format!("{}?{query}", self.store);
        self
    }

    pub fn store(&self) -> &str {
        &self.store
    }

    pub fn database(&self) -> PathBuf {
        self.folder.path().join("keys.db")
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("onlyonce.toml")
    }

    /// Writes the file and gives its path.
    pub fn written(&self) -> PathBuf {
        let Self { upstream, listen, store, config, .. } = self;
        let file = format!(
            "upstream = \"{upstream}\"\nlisten = \"{listen}\"\nadmin = \"127.0.0.1:0\"\nstore = \"{store}\"\n{config}"
        );
        std::fs::write(self.file(), file).unwrap();
        self.file()
    }

    #[track_caller]
    pub fn start(&self) -> Proxy {
        self.try_start().unwrap_or_else(|error| panic!("{error}"))
    }

    pub fn try_start(&self) -> Result<Proxy, String> {
        let mut command = onlyonce();
        command.arg("proxy").arg("--config").arg(self.written());
        Proxy::spawn(command, Arc::clone(&self.folder))
    }
}

/// A proxy process.
pub struct Proxy {
    child: Child,
    stderr: Arc<Mutex<String>>,
    pub addr: SocketAddr,
    pub admin: SocketAddr,
    pub folder: Arc<TempDir>,
}

impl Proxy {
    /// A proxy in front of this upstream, with these lines in its file.
    pub fn start(upstream: &Upstream, config: &str) -> Self {
        Setup::new(upstream.url()).config(config).start()
    }

    /// Starts the command and waits until it listens; the error is what it said instead.
    pub fn spawn(mut command: Command, folder: Arc<TempDir>) -> Result<Self, String> {
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = Arc::new(Mutex::new(String::new()));
        let (lines, kept) = (BufReader::new(child.stderr.take().unwrap()).lines(), Arc::clone(&stderr));
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = writeln!(kept.lock().unwrap(), "{line}");
            }
        });
        let mut ready = None;
        let listens = happens_within(PATIENCE, || {
            ready = ready_line(&stderr.lock().unwrap());
            ready.is_some() || child.try_wait().unwrap().is_some()
        });
        let Some((addr, admin)) = ready.filter(|_| listens) else {
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!("the proxy does not listen:\n{}", stderr.lock().unwrap()));
        };
        Ok(Self { child, stderr, addr, admin, folder })
    }

    pub fn database(&self) -> PathBuf {
        self.folder.path().join("keys.db")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn stderr(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }

    /// Kills it without a word, as a crash would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub fn terminate(&self) {
        self.signal(rustix::process::Signal::TERM);
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        until("the proxy ends", || self.has_ended());
        self.child.wait().unwrap()
    }

    /// A value that `/metrics` has, 0 if it has none.
    pub fn metric(&self, name: &str) -> f64 {
        let metrics = text(&get("/metrics").send_to(self.admin).body);
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().unwrap())
    }

    /// What `/proc` says about its memory, in KiB: `VmRSS` or `VmHWM`.
    pub fn memory_kib(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("---- what the proxy said ----\n{}", self.stderr());
        }
    }
}

/// `onlyonce: listening on http://ADDR, admin on http://ADDR, ...`
fn ready_line(stderr: &str) -> Option<(SocketAddr, SocketAddr)> {
    let line = stderr.lines().find_map(|line| line.strip_prefix("onlyonce: listening on http://"))?;
    let (addr, rest) = line.split_once(", admin on http://")?;
    Some((addr.parse().ok()?, rest.split(',').next()?.parse().ok()?))
}

/// A request, on a connection of its own.
#[derive(Clone)]
pub struct Ask {
    method: String,
    target: String,
    lines: Vec<(String, String)>,
    body: Vec<u8>,
}

pub fn ask(method: &str, target: &str) -> Ask {
    Ask { method: method.into(), target: target.into(), lines: Vec::new(), body: Vec::new() }
}

/// A payment under this key.
pub fn post(key: &str) -> Ask {
    ask("POST", "/payments").line("Idempotency-Key", key).body("amount=100")
}

pub fn get(target: &str) -> Ask {
    ask("GET", target)
}

impl Ask {
    pub fn line(mut self, name: &str, value: &str) -> Self {
        self.lines.push((name.into(), value.into()));
        self
    }

    /// What the upstream is ordered to do.
    pub fn order(self, orders: &str) -> Self {
        self.line("x-do", orders)
    }

    pub fn to(mut self, target: &str) -> Self {
        self.target = target.into();
        self
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// The head, and with it the body unless its length or coding is among the lines.
    fn wire(&self, connection: &str) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\nHost: api.test\r\n", self.method, self.target);
        let mut framed = false;
        let mut connected = false;
        for (name, value) in &self.lines {
            let name_is = |other: &str| name.eq_ignore_ascii_case(other);
            framed |= name_is("content-length") || name_is("transfer-encoding");
            connected |= name_is("connection");
            let _ = write!(head, "{name}: {value}\r\n");
        }
        if !connected {
            let _ = write!(head, "Connection: {connection}\r\n");
        }
        if !framed && (!self.body.is_empty() || matches!(&*self.method, "POST" | "PUT" | "PATCH")) {
            let _ = write!(head, "Content-Length: {}\r\n", self.body.len());
        }
        [head.as_bytes(), b"\r\n", &self.body].concat()
    }

    /// Sends it and reads the answer to its end, or to where it breaks off.
    pub fn try_send(&self, addr: SocketAddr) -> io::Result<Answer> {
        let mut connection = Connection::open(addr)?;
        connection.write(&self.wire("close"))?;
        let mut answer = connection.head()?;
        connection.rest(&mut answer, self.method == "HEAD");
        Ok(answer)
    }

    #[track_caller]
    pub fn send_to(&self, addr: SocketAddr) -> Answer {
        self.try_send(addr).expect("an answer")
    }

    #[track_caller]
    pub fn send(&self, proxy: &Proxy) -> Answer {
        match self.try_send(proxy.addr) {
            Ok(answer) => answer,
            Err(error) => panic!("no answer to {} {}: {error}", self.method, self.target),
        }
    }

    /// Sends it from a thread of its own.
    pub fn start(&self, proxy: &Proxy) -> JoinHandle<Answer> {
        let (ask, addr) = (self.clone(), proxy.addr);
        thread::spawn(move || ask.send_to(addr))
    }

    /// Sends it and leaves the answer on the connection.
    pub fn open(&self, proxy: &Proxy) -> Connection {
        let mut connection = Connection::open(proxy.addr).unwrap();
        connection.write(&self.wire("keep-alive")).unwrap();
        connection
    }
}

/// A client's connection.
pub struct Connection {
    reader: BufReader<TcpStream>,
}

impl Connection {
    pub fn open(addr: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&addr, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { reader: BufReader::with_capacity(1 << 16, stream) })
    }

    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.reader.get_mut().write_all(bytes)
    }

    /// Sends another request.
    #[track_caller]
    pub fn ask(&mut self, ask: &Ask) -> Answer {
        self.write(&ask.wire("keep-alive")).unwrap();
        self.answer()
    }

    #[track_caller]
    pub fn answer(&mut self) -> Answer {
        let mut answer = self.head().expect("an answer");
        self.rest(&mut answer, false);
        answer
    }

    /// The head of the next answer that is not an interim one.
    pub fn head(&mut self) -> io::Result<Answer> {
        let mut answer = Answer::default();
        loop {
            let start = self.text_line()?;
            let status = start.split(' ').nth(1).and_then(|status| status.parse().ok());
            answer.status = status.ok_or_else(|| io::Error::other(format!("no status line: {start:?}")))?;
            answer.lines = self.field_lines()?;
            if answer.status >= 200 || answer.status == 101 {
                return Ok(answer);
            }
            answer.interim.push(answer.status);
        }
    }

    /// Reads the body to its end, or to where it breaks off.
    pub fn rest(&mut self, answer: &mut Answer, is_head: bool) {
        answer.whole = match answer.header("content-length").map(|length| length.parse::<u64>().unwrap()) {
            _ if is_head || matches!(answer.status, 204 | 304) => true,
            Some(length) => {
                let _ = self.reader.by_ref().take(length).read_to_end(&mut answer.body);
                answer.body.len() as u64 == length
            }
            None if answer.header("transfer-encoding").is_some() => self.chunks(answer).is_ok(),
            None => self.reader.read_to_end(&mut answer.body).is_ok(),
        };
    }

    fn chunks(&mut self, answer: &mut Answer) -> io::Result<()> {
        loop {
            let size = self.text_line()?;
            let size = u64::from_str_radix(size.trim(), 16).map_err(io::Error::other)?;
            if size == 0 {
                answer.trailers = self.field_lines()?;
                return Ok(());
            }
            let before = answer.body.len() as u64;
            self.reader.by_ref().take(size).read_to_end(&mut answer.body)?;
            if answer.body.len() as u64 - before < size {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.text_line()?;
        }
    }

    /// Reads raw bytes until these are among them; `None` at the end of the stream.
    pub fn until(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut read = Vec::new();
        let mut byte = [0];
        while !read.ends_with(bytes) {
            self.reader.read_exact(&mut byte).ok()?;
            read.push(byte[0]);
        }
        Some(read)
    }

    /// Reads this many bytes and forgets them; gives how many came.
    pub fn skip(&mut self, bytes: u64) -> u64 {
        io::copy(&mut self.reader.by_ref().take(bytes), &mut io::sink()).unwrap_or(0)
    }

    /// Whatever comes until the connection ends.
    pub fn all(&mut self) -> Vec<u8> {
        let mut read = Vec::new();
        let _ = self.reader.read_to_end(&mut read);
        read
    }

    /// Whether nothing comes for this long.
    pub fn is_silent_for(&mut self, time: Duration) -> bool {
        self.reader.get_ref().set_read_timeout(Some(time)).unwrap();
        let read = self.reader.fill_buf().map(<[u8]>::len);
        self.reader.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
        matches!(read, Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut))
    }

    fn text_line(&mut self) -> io::Result<String> {
        let mut line = Vec::new();
        self.reader.read_until(b'\n', &mut line)?;
        match line.strip_suffix(b"\r\n") {
            Some(line) => Ok(text(line)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn field_lines(&mut self) -> io::Result<Vec<(String, String)>> {
        let mut lines = Vec::new();
        loop {
            let line = self.text_line()?;
            if line.is_empty() {
                return Ok(lines);
            }
            let (name, value) = line.split_once(':').ok_or_else(|| io::Error::other(line.clone()))?;
            lines.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
}

/// What a client saw.
#[derive(Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub interim: Vec<u16>,
    pub lines: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub trailers: Vec<(String, String)>,
    /// Whether it did not break off.
    pub whole: bool,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.lines.iter().find(|line| line.0 == name).map(|line| line.1.as_str())
    }

    pub fn all(&self, name: &str) -> Vec<&str> {
        self.lines.iter().filter(|line| line.0 == name).map(|line| line.1.as_str()).collect()
    }

    pub fn replayed(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    pub fn retry_after(&self) -> Option<u64> {
        self.header("retry-after").map(|seconds| seconds.parse().expect("whole seconds"))
    }

    /// The status and the code of a refusal.
    pub fn refusal(&self) -> (u16, &str) {
        (self.status, self.header("onlyonce-refused").unwrap_or("not refused"))
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// What the upstream says it was sent.
    pub fn sent(&self, name: &str) -> Vec<String> {
        let lines: Vec<(String, String)> = serde_json::from_value(self.json()["headers"].clone()).unwrap();
        lines.into_iter().filter(|line| line.0 == name).map(|line| line.1).collect()
    }
}

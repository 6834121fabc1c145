//! The proxy as a whole: the store, the layer, the forwarding service, the listeners, and how they end.
//!
//! ```text
//! client ──▶ server ──▶ onlyonce layer ──▶ forward ──▶ upstream
//!                            │
//!                         Metered ──▶ store ◀── keys, doctor
//! ```
//!
//! # How it ends
//!
//! 1. Told to stop, it takes no more connections, asks the open ones to end after what they are doing, and
//!    is not ready.
//! 2. After [`UNGUARDED_GRACE`], or `shutdown_grace` if that is shorter, whatever is not guarded is cut off.
//! 3. When the last answer has been read, or after `shutdown_grace`, it leaves. Work that is still running
//!    then is left Running: its lease ends, and the next attempt takes over. A connection that is still open
//!    then is only closed: the outcome of its work is recorded.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use onlyonce::caller::Caller;
use onlyonce::{Config, OnlyonceLayer};
use onlyonce_core::Store;
use onlyonce_core::store::{OpenError, OpenErrorKind};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_layer::Layer;
use tracing::{info, warn};

use crate::admin::{self, Health};
use crate::config::{CallerSetting, ProxyConfig};
use crate::forward::Forward;
use crate::jwt::JwtCaller;
use crate::metered::Metered;
use crate::server::{self, Ending};
use crate::store::OpenStore;
use crate::telemetry::{self, UPKEEP_EVERY};

/// How long what is not guarded may go on after a signal to stop, on the local clock.
pub const UNGUARDED_GRACE: Duration = Duration::from_secs(10);

/// How long the store may take to tidy up at the end.
const CLOSE_TIME_MAX: Duration = Duration::from_secs(5);

/// Starts a proxy on the current runtime.
///
/// # Errors
/// Says in one line why it cannot start. An upstream that is away is no reason.
pub async fn start(config: ProxyConfig) -> Result<Running, StartError> {
    let metrics = telemetry::metrics();
    let caller = caller(config.caller)?;
    let ending = Ending::default();
    let tunnels = TaskTracker::new();
    let forward = Forward::new(config.upstream.clone(), config.host, ending.cut.clone(), tunnels.clone())
        .map_err(|error| StartError::Failed(format!("the certificates for {}: {error}", config.upstream)))?;
    let store = OpenStore::open(&config.store, config.allow_volatile, config.store_start_wait).await?;
    let metered: Arc<dyn Store> = Arc::new(Metered::new(store.store()));
    let layer_config = Config {
        namespace: config.namespace,
        caller,
        record_grace: config.record_grace,
        sweep_every: Some(config.sweep_every),
        defaults: config.defaults,
        routes: config.routes,
        refusal_body: None,
    };
    let layer = OnlyonceLayer::new(Arc::clone(&metered), layer_config)
        .map_err(|error| StartError::Refused(error.to_string()))?;
    let (listener, addr) = bind("listen", &config.listen).await?;
    let (admin_listener, admin_addr) = bind("admin", &config.admin).await?;

    let connections = TaskTracker::new();
    let health = Health::new(metered, config.upstream.address(), ending.closing.clone());
    let admin = tokio::spawn(admin::serve(admin_listener, health));
    let upkeep =
        metrics.map(|metrics| tokio::spawn(telemetry::upkeep(UPKEEP_EVERY, || metrics.run_upkeep())));
    // Tracked like the connections it opens, so that none is opened after the last one was waited for.
    connections.spawn(server::serve(listener, layer.layer(forward), connections.clone(), ending.clone()));
    let ended = tokio::spawn({
        let ending = ending.clone();
        async move {
            ending.closing.cancelled().await;
            let stopped = wind_down(&ending, config.shutdown_grace, &connections, &tunnels, &layer).await;
            admin.abort();
            if let Some(upkeep) = upkeep {
                upkeep.abort();
            }
            match timeout(CLOSE_TIME_MAX, store.close()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!(%error, "the store did not close tidily; nothing is lost"),
                Err(_) => warn!("the store took too long to close; nothing is lost"),
            }
            stopped
        }
    });
    Ok(Running { addr, admin_addr, closing: ending.closing, ended })
}

/// Who the layer asks.
fn caller(setting: CallerSetting) -> Result<Caller, StartError> {
    Ok(match setting {
        CallerSetting::Implicit => Caller::Implicit,
        CallerSetting::Authorization => Caller::Authorization,
        CallerSetting::Everyone => Caller::Everyone,
        CallerSetting::Header(name) => Caller::Header(name),
        CallerSetting::Jwt(settings) => {
            let told = JwtCaller::new(settings);
            Caller::Custom(Arc::new(told.map_err(|error| StartError::Refused(format!("caller: {error}")))?))
        }
    })
}

async fn bind(name: &str, address: &str) -> Result<(TcpListener, SocketAddr), StartError> {
    let bound = async {
        let listener = TcpListener::bind(address).await?;
        let addr = listener.local_addr()?;
        Ok::<_, std::io::Error>((listener, addr))
    };
    bound.await.map_err(|error| {
        StartError::Failed(format!(
            "{name} = \"{address}\" cannot be listened on: {error}; choose another HOST:PORT"
        ))
    })
}

/// A proxy that is running. Dropping it does not stop it.
pub struct Running {
    addr: SocketAddr,
    admin_addr: SocketAddr,
    closing: CancellationToken,
    ended: JoinHandle<Stopped>,
}

impl Running {
    /// Where it listens; with the real port if port 0 was asked for.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where its admin server listens.
    #[must_use]
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin_addr
    }

    /// Asks it to stop. Returns at once; more calls change nothing.
    pub fn shutdown(&self) {
        self.closing.cancel();
    }

    /// Waits until it has stopped, after [`shutdown`](Self::shutdown) was called.
    pub async fn stopped(self) -> Stopped {
        self.ended.await.unwrap_or(Stopped::LeftRunning)
    }
}

/// How a proxy stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// All guarded work had ended.
    Drained,
    /// Guarded work was still running when `shutdown_grace` was over; its keys stay held until their
    /// leases end.
    LeftRunning,
}

/// Why a proxy did not start, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartError {
    /// The configuration must change first.
    Refused(String),
    /// The circumstances: a busy port, a store that is away.
    Failed(String),
}

impl From<OpenError> for StartError {
    fn from(error: OpenError) -> Self {
        let reason = format!("store: {error}");
        match error.kind() {
            OpenErrorKind::Refused => Self::Refused(reason),
            OpenErrorKind::Failed => Self::Failed(reason),
        }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Refused(reason) | Self::Failed(reason)) = self;
        f.write_str(reason)
    }
}

impl std::error::Error for StartError {}

async fn wind_down(
    ending: &Ending,
    grace: Duration,
    connections: &TaskTracker,
    tunnels: &TaskTracker,
    layer: &OnlyonceLayer,
) -> Stopped {
    info!(grace = ?grace, connections = connections.len(), "stopping: guarded work is finished first");
    let drained = async {
        connections.close();
        tunnels.close();
        // No connection, no new work: only then does an empty layer stay empty.
        connections.wait().await;
        tunnels.wait().await;
        layer.drained().await;
    };
    tokio::pin!(drained);
    let unguarded_grace = UNGUARDED_GRACE.min(grace);
    let mut finished = timeout(unguarded_grace, &mut drained).await.is_ok();
    if !finished {
        info!("stopping: whatever is not guarded is cut off");
        ending.cut.cancel();
        finished = timeout(grace.saturating_sub(unguarded_grace), &mut drained).await.is_ok();
    }
    ending.cut.cancel();
    ending.kill.cancel();
    if finished {
        return Stopped::Drained;
    }
    // Whoever still reads is cut off and can ask again. That is no work left undone; what the layer goes on
    // with, now that nobody can ask for more, is.
    let _ = timeout(CLOSE_TIME_MAX, connections.wait()).await;
    if timeout(Duration::ZERO, layer.drained()).await.is_ok() {
        return Stopped::Drained;
    }
    warn!(grace = ?grace, "guarded work is left running; its keys stay held until their leases end");
    Stopped::LeftRunning
}

#[cfg(test)]
mod tests {
    use http::header::AUTHORIZATION;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::jwt::{JwtSettings, Source};
    use crate::store::StoreUrl;
    use crate::upstream::Upstream;

    fn config(folder: &tempfile::TempDir) -> ProxyConfig {
        let upstream = Upstream::parse("http://127.0.0.1:1").unwrap();
        let store = StoreUrl::file(folder.path().join("keys.db"));
        let any = "127.0.0.1:0".to_owned();
        ProxyConfig { listen: any.clone(), admin: any, ..ProxyConfig::new(upstream, store) }
    }

    #[tokio::test]
    async fn an_idle_proxy_leaves_at_once_and_an_absent_upstream_is_no_reason_not_to_start() {
        let folder = tempfile::tempdir().unwrap();
        let running = start(config(&folder)).await.unwrap();
        assert_ne!(running.addr().port(), 0, "the real port is told");
        let idle = TcpStream::connect(running.addr()).await.unwrap();
        running.shutdown();
        let stopped = timeout(Duration::from_secs(5), running.stopped()).await;
        assert_eq!(stopped, Ok(Stopped::Drained));
        drop(idle);
    }

    /// More than the buffers between here and a client hold.
    const LARGE_BYTES: usize = 16 << 20;

    /// An upstream whose answers are large; at `/events` they have no end, and at `/silent` no beginning.
    async fn talkative() -> Upstream {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = [0; 4_096];
                    let bytes = stream.read(&mut request).await.unwrap();
                    let asks = |path: &[u8]| request[..bytes].windows(path.len()).any(|part| part == path);
                    if asks(b"/silent") {
                        std::future::pending::<()>().await;
                    }
                    let length = if asks(b"/events") { usize::MAX >> 1 } else { LARGE_BYTES };
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
                    stream.write_all(head.as_bytes()).await.unwrap();
                    let mut left = length;
                    while left > 0 && stream.write_all(&[b'~'; 4_096]).await.is_ok() {
                        left = left.saturating_sub(4_096);
                    }
                });
            }
        });
        Upstream::parse(&url).unwrap()
    }

    #[tokio::test]
    async fn only_guarded_work_is_left_running_whoever_still_reads() {
        let guarded = "idempotency-key: k\r\ncontent-length: 0\r\n";
        for (request, lines, expected) in [
            ("GET /events", "", Stopped::Drained),
            ("POST /export", guarded, Stopped::Drained),
            ("POST /silent", guarded, Stopped::LeftRunning),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let mut config = config(&folder);
            config.upstream = talkative().await;
            config.shutdown_grace = Duration::from_millis(300);
            config.defaults.response_body_bytes_max = LARGE_BYTES;
            config.defaults.stream_after = Duration::from_secs(30);
            let running = start(config).await.unwrap();
            let mut client = TcpStream::connect(running.addr()).await.unwrap();
            let sent = format!("{request} HTTP/1.1\r\nhost: a\r\n{lines}\r\n");
            client.write_all(sent.as_bytes()).await.unwrap();
            // It reads no further. What is guarded is recorded before any of it comes.
            let mut some = vec![0; 64 << 10];
            let patience = Duration::from_secs(if expected == Stopped::Drained { 20 } else { 1 });
            let read = timeout(patience, client.read_exact(&mut some)).await;
            assert_eq!(read.is_ok(), expected == Stopped::Drained, "{request}");
            running.shutdown();
            let stopped = timeout(Duration::from_secs(9), running.stopped()).await;
            assert_eq!(stopped, Ok(expected), "{request}");
        }
    }

    #[tokio::test]
    async fn a_busy_port_is_a_failure_and_not_wrong_usage() {
        let folder = tempfile::tempdir().unwrap();
        let busy = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = busy.local_addr().unwrap().to_string();
        for listens in [true, false] {
            let mut config = config(&folder);
            *(if listens { &mut config.listen } else { &mut config.admin }) = address.clone();
            let Err(StartError::Failed(reason)) = start(config).await else { panic!("a failure") };
            assert!(reason.contains(&address), "{reason}");
        }
    }

    #[tokio::test]
    async fn a_key_set_that_is_not_there_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(&folder);
        config.caller = CallerSetting::Jwt(JwtSettings {
            header: AUTHORIZATION,
            claim: "sub".into(),
            jwks: Source::File(folder.path().join("absent.json")),
            issuer: None,
            audience: None,
        });
        let Err(StartError::Refused(reason)) = start(config).await else { panic!("a refusal") };
        assert!(reason.starts_with("caller: ") && reason.contains("absent.json"), "{reason}");
    }
}

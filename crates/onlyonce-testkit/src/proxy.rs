//! A TCP proxy that cuts, stalls and delays.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// A proxy on a free port of 127.0.0.1 in front of another port there. It ends when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    mood: watch::Sender<Mood>,
    accepting: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Mood {
    /// Connections of an earlier age are cut.
    age: u64,
    stalled: bool,
    refusing: bool,
    delay: Duration,
}

impl Proxy {
    /// Starts one in front of this port of 127.0.0.1.
    ///
    /// # Errors
    /// If there is no free port.
    pub async fn start(to: u16) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let (mood, watched) = watch::channel(Mood::default());
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let mood = watched.clone();
                if !mood.borrow().refusing {
                    tokio::spawn(serve(client, to, mood));
                }
            }
        });
        Ok(Self { port, mood, accepting })
    }

    /// Its port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Cuts every connection, in whatever it is in the middle of. New ones are let through.
    pub fn cut(&self) {
        self.mood.send_modify(|mood| mood.age += 1);
    }

    /// Whether connections stay open but nothing passes, as when a machine vanished.
    pub fn stall(&self, stalled: bool) {
        self.mood.send_modify(|mood| mood.stalled = stalled);
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, refusing: bool) {
        self.mood.send_modify(|mood| mood.refusing = refusing);
    }

    /// How much later everything arrives.
    pub fn delay(&self, delay: Duration) {
        self.mood.send_modify(|mood| mood.delay = delay);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut();
    }
}

async fn serve(client: TcpStream, to: u16, mood: watch::Receiver<Mood>) {
    let Ok(server) = TcpStream::connect(("127.0.0.1", to)).await else { return };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
    let mut cut = mood.clone();
    let age = cut.borrow().age;
    tokio::select! {
        () = pump(from_client, to_server, mood.clone()) => {}
        () = pump(from_server, to_client, mood) => {}
        _ = cut.wait_for(|mood| mood.age != age) => {}
    }
}

/// Passes on what comes until one side is done; the other is closed with it.
async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut mood: watch::Receiver<Mood>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(bytes @ 1..) = from.read(&mut buffer).await else { return };
        let Ok(delay) = mood.wait_for(|mood| !mood.stalled).await.map(|mood| mood.delay) else { return };
        if !delay.is_zero() {
            sleep(delay).await;
        }
        if to.write_all(&buffer[..bytes]).await.is_err() {
            return;
        }
    }
}

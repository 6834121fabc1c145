//! The bodies that the layer hands to the service behind it and to the caller in front of it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep};

/// Why an answer is cut off that pauses.
pub(crate) const PAUSED: &str = "the answer paused for longer than idle_timeout";

/// Any error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

pin_project! {
    /// The body of a request as the inner service sees it: streaming as it came if the request is not
    /// guarded, in memory if it is.
    pub struct RequestBody<B> {
        #[pin]
        kind: RequestKind<B>,
    }
}

pin_project! {
    #[project = RequestKindProj]
    enum RequestKind<B> {
        Streaming { #[pin] body: B },
        Whole { whole: Whole },
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn streaming(body: B) -> Self {
        Self { kind: RequestKind::Streaming { body } }
    }

    pub(crate) fn whole(whole: Whole) -> Self {
        Self { kind: RequestKind::Whole { whole } }
    }

    /// The same again, if it is in memory.
    pub(crate) fn again(&self) -> Option<Self> {
        match &self.kind {
            RequestKind::Whole { whole } => Some(Self { kind: RequestKind::Whole { whole: whole.clone() } }),
            RequestKind::Streaming { .. } => None,
        }
    }
}

impl<B: Body<Data = Bytes>> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            RequestKindProj::Streaming { body } => body.poll_frame(cx),
            RequestKindProj::Whole { whole } => Poll::Ready(whole.next().map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            RequestKind::Streaming { body } => body.is_end_stream(),
            RequestKind::Whole { whole } => whole.is_end(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            RequestKind::Streaming { body } => body.size_hint(),
            RequestKind::Whole { whole } => whole.size_hint(),
        }
    }
}

pin_project! {
    /// The body of an answer: the inner service's own if the request was not guarded, otherwise in
    /// memory or passed on while it is being recorded.
    pub struct ResponseBody<B> {
        #[pin]
        kind: ResponseKind<B>,
    }
}

pin_project! {
    #[project = ResponseKindProj]
    enum ResponseKind<B> {
        Inner { #[pin] body: B },
        Limited { #[pin] body: B, idle: Pin<Box<Sleep>>, idle_timeout: Duration, waiting: bool },
        Whole { whole: Whole },
        Relayed { pieces: mpsc::UnboundedReceiver<Piece>, ended: bool },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn inner(body: B) -> Self {
        Self { kind: ResponseKind::Inner { body } }
    }

    pub(crate) fn whole(data: Bytes, trailers: HeaderMap) -> Self {
        Self { kind: ResponseKind::Whole { whole: Whole::new(data, trailers) } }
    }

    /// The inner service's own, cut off when it pauses for too long.
    pub(crate) fn limited(body: B, idle_timeout: Duration) -> Self {
        let idle = Box::pin(tokio::time::sleep(idle_timeout));
        Self { kind: ResponseKind::Limited { body, idle, idle_timeout, waiting: false } }
    }

    /// A body that is fed by a [`Relay`].
    pub(crate) fn relayed() -> (Relay, Self) {
        let (sender, pieces) = mpsc::unbounded_channel();
        let relay = Relay { sender, room: Arc::new(Semaphore::new(RELAYED_PIECES_MAX)) };
        (relay, Self { kind: ResponseKind::Relayed { pieces, ended: false } })
    }
}

impl<B> Body for ResponseBody<B>
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
        match self.project().kind.project() {
            ResponseKindProj::Inner { body } => body.poll_frame(cx).map_err(Into::into),
            ResponseKindProj::Limited { body, idle, idle_timeout, waiting } => {
                let polled = body.poll_frame(cx).map_err(Into::into);
                // The pause begins when the caller asks for more, not while it is busy.
                if polled.is_pending() && !*waiting {
                    idle.as_mut().reset(Instant::now() + *idle_timeout);
                }
                *waiting = polled.is_pending();
                if *waiting && idle.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Some(Err(PAUSED.into())));
                }
                polled
            }
            ResponseKindProj::Whole { whole } => Poll::Ready(whole.next().map(Ok)),
            ResponseKindProj::Relayed { ended: true, .. } => Poll::Ready(None),
            ResponseKindProj::Relayed { pieces, ended } => {
                let piece = ready!(pieces.poll_recv(cx));
                Poll::Ready(match piece {
                    Some(Piece::Frame { frame, .. }) => Some(Ok(frame)),
                    Some(Piece::End) => {
                        *ended = true;
                        None
                    }
                    Some(Piece::Cut(error)) => {
                        *ended = true;
                        Some(Err(error))
                    }
                    // A relay that went away without a word must not look like the end of the answer.
                    None => {
                        *ended = true;
                        Some(Err("the answer was cut off".into()))
                    }
                })
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            ResponseKind::Inner { body } | ResponseKind::Limited { body, .. } => body.is_end_stream(),
            ResponseKind::Whole { whole } => whole.is_end(),
            ResponseKind::Relayed { ended, .. } => *ended,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            ResponseKind::Inner { body } | ResponseKind::Limited { body, .. } => body.size_hint(),
            ResponseKind::Whole { whole } => whole.size_hint(),
            ResponseKind::Relayed { .. } => SizeHint::default(),
        }
    }
}

/// A body in memory.
#[derive(Clone, Default)]
pub(crate) struct Whole {
    data: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl Whole {
    pub(crate) fn new(data: Bytes, trailers: HeaderMap) -> Self {
        Self {
            data: (!data.is_empty()).then_some(data),
            trailers: (!trailers.is_empty()).then_some(trailers),
        }
    }

    pub(crate) fn data(&self) -> &[u8] {
        self.data.as_deref().unwrap_or_default()
    }

    fn next(&mut self) -> Option<Frame<Bytes>> {
        self.data.take().map(Frame::data).or_else(|| self.trailers.take().map(Frame::trailers))
    }

    fn is_end(&self) -> bool {
        self.data.is_none() && self.trailers.is_none()
    }

    /// Unknown with trailers: under a known length HTTP/1.1 has no place for them.
    fn size_hint(&self) -> SizeHint {
        match &self.trailers {
            Some(_) => SizeHint::default(),
            None => SizeHint::with_exact(self.data.as_ref().map_or(0, |data| data.len() as u64)),
        }
    }
}

/// A body that is being gathered, in one piece of memory: small pieces cost no more than their bytes,
/// and a single piece is not copied.
#[derive(Default)]
pub(crate) struct Collected {
    only: Bytes,
    joined: BytesMut,
}

impl Collected {
    pub(crate) fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.only = data;
            return;
        }
        if self.joined.is_empty() {
            self.joined.extend_from_slice(&std::mem::take(&mut self.only));
        }
        self.joined.extend_from_slice(&data);
    }

    pub(crate) fn len(&self) -> usize {
        self.only.len() + self.joined.len()
    }

    /// All of it, copied if it came in several pieces.
    pub(crate) fn copy(&self) -> Bytes {
        match self.joined.is_empty() {
            true => self.only.clone(),
            false => Bytes::copy_from_slice(&self.joined),
        }
    }

    pub(crate) fn into_bytes(self) -> Bytes {
        match self.joined.is_empty() {
            true => self.only,
            false => self.joined.freeze(),
        }
    }
}

/// How many pieces of an answer that is not being recorded may wait for a slow caller.
const RELAYED_PIECES_MAX: usize = 8;

/// Feeds a relayed body.
pub(crate) struct Relay {
    sender: mpsc::UnboundedSender<Piece>,
    room: Arc<Semaphore>,
}

enum Piece {
    Frame { frame: Frame<Bytes>, _room: Option<OwnedSemaphorePermit> },
    End,
    Cut(BoxError),
}

impl Relay {
    /// Passes a frame on without waiting for the caller; for what is held in memory anyway.
    pub(crate) fn pass(&self, frame: Frame<Bytes>) {
        // A caller that hung up is noticed through `closed`.
        let _ = self.sender.send(Piece::Frame { frame, _room: None });
    }

    /// The same for data, if there is any.
    pub(crate) fn pass_data(&self, data: Bytes) {
        if !data.is_empty() {
            self.pass(Frame::data(data));
        }
    }

    /// Passes a frame on as fast as the caller takes it.
    pub(crate) async fn pass_slowly(&self, frame: Frame<Bytes>) {
        let room = tokio::select! {
            room = Arc::clone(&self.room).acquire_owned() => room.ok(),
            () = self.sender.closed() => return,
        };
        let _ = self.sender.send(Piece::Frame { frame, _room: room });
    }

    pub(crate) fn end(&self) {
        let _ = self.sender.send(Piece::End);
    }

    pub(crate) fn cut(&self, error: BoxError) {
        let _ = self.sender.send(Piece::Cut(error));
    }

    pub(crate) async fn closed(&self) {
        self.sender.closed().await;
    }
}

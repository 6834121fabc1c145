//! An answer worth keeping: gathered, recorded, and passed on.
//!
//! One that is complete within `stream_after` is recorded first and sent then. A longer one is passed
//! on as it comes, but its end is held back until the record is on disk, so that no caller sees the end
//! of an answer that could be lost: under `Content-Length` the last bytes, otherwise the end of the
//! stream, so that no event is delayed. One over `response_body_bytes_max` leaves, before its first
//! excess byte is passed on, the mark that the work was done.

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Response, response};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use onlyonce_core::{Grant, Recorded, Verdict, outcome};
use tokio::time::{Instant, sleep_until};
use tracing::{Instrument, debug, warn};

use crate::body::{BoxError, Collected, PAUSED, Relay, ResponseBody};
use crate::headers;
use crate::problem::Code;
use crate::renewal::{Renewal, at};
use crate::settings::Settings;
use crate::work::{Job, Reply};

pub(crate) struct Answer<ResB, E> {
    job: Job,
    head: response::Parts,
    body: Pin<Box<ResB>>,
    caller: CallerSide<ResB, E>,
    renewal: Renewal,
    /// What has arrived, and how many bytes of it were passed on.
    collected: Collected,
    bytes_passed: usize,
    content_length: Option<usize>,
    trailers: HeaderMap,
    idle_at: Instant,
}

enum CallerSide<ResB, E> {
    /// Has not been sent anything; is shown the beginning at that moment, if there is one.
    Waiting {
        reply: Reply<ResB, E>,
        stream_at: Option<Instant>,
    },
    Reading(Relay),
    /// Hung up, or was told 504. The gathering goes on until then.
    Gone {
        until: Instant,
    },
}

enum Event {
    Frame(Frame<Bytes>),
    End,
    Failed(BoxError),
    Idle,
    /// The lease was renewed, or is about to be.
    Renewal,
    StreamDue,
    HungUp,
    GivenUp,
}

impl<ResB, E> Answer<ResB, E>
where
    ResB: Body<Data = Bytes> + Send + 'static,
    ResB::Error: Into<BoxError>,
{
    pub(crate) fn new(
        job: Job,
        grant: Box<Grant>,
        response: Response<ResB>,
        reply: Option<Reply<ResB, E>>,
    ) -> Box<Self> {
        let now = Instant::now();
        let (head, body) = response.into_parts();
        let lease = job.admitted.settings.lease();
        let stream_at = match headers::is_event_stream(&head.headers) {
            true => Some(now),
            false if job.ends_by_closing => None,
            false => Some(now + job.admitted.settings.stream_after),
        };
        // On the heap: it goes through several futures, and each would hold it.
        Box::new(Self {
            caller: match reply {
                Some(reply) => CallerSide::Waiting { reply, stream_at },
                None => CallerSide::Gone { until: now + lease },
            },
            renewal: job.renewal(grant),
            collected: Collected::default(),
            bytes_passed: 0,
            content_length: headers::content_length(&head.headers),
            trailers: HeaderMap::new(),
            idle_at: now + job.admitted.settings.idle_timeout,
            head,
            body: Box::pin(body),
            job,
        })
    }

    /// Takes the answer to its end.
    pub(crate) async fn gather(mut self: Box<Self>) {
        let bytes_max = self.job.admitted.settings.response_body_bytes_max;
        if self.content_length.is_some_and(|bytes| bytes > bytes_max) {
            return self.not_kept().await;
        }
        loop {
            match self.next().await {
                Event::Frame(frame) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => {
                        // A second handle to it, only for a caller that reads along.
                        let copy = matches!(self.caller, CallerSide::Reading(_)).then(|| data.clone());
                        self.collected.push(data);
                        if self.collected.len() > bytes_max {
                            return self.not_kept().await;
                        }
                        if let Some(data) = copy {
                            self.pass_on(data);
                        }
                    }
                    Err(frame) => self.trailers.extend(frame.into_trailers().unwrap_or_default()),
                },
                Event::End => return self.kept().await,
                Event::Failed(error) => return self.cut(Code::UpstreamLost, error),
                Event::Idle => return self.cut(Code::UpstreamTimeout, PAUSED.into()),
                Event::Renewal => {}
                Event::StreamDue => self.show_beginning(),
                Event::HungUp => {
                    self.caller =
                        CallerSide::Gone { until: Instant::now() + self.job.admitted.settings.lease() };
                }
                Event::GivenUp => {
                    warn!(operation = %self.job.admitted.operation.id(), "the caller is gone and the answer does not end");
                    self.mark().await;
                    return;
                }
            }
        }
    }

    async fn next(&mut self) -> Event {
        if self.body.is_end_stream() {
            return Event::End;
        }
        let stream_at = match &self.caller {
            CallerSide::Waiting { stream_at, .. } => *stream_at,
            _ => None,
        };
        if stream_at.is_some_and(|at| at <= Instant::now()) {
            return Event::StreamDue;
        }
        // One timer for whatever is due first.
        let renew_at = self.renewal.due();
        let due_at = [renew_at, stream_at].into_iter().flatten().fold(self.idle_at, Instant::min);
        tokio::select! {
            biased;
            frame = self.body.frame() => match frame {
                Some(Ok(frame)) => {
                    self.idle_at = Instant::now() + self.job.admitted.settings.idle_timeout;
                    Event::Frame(frame)
                }
                Some(Err(error)) => Event::Failed(error.into()),
                None => Event::End,
            },
            event = left(&mut self.caller) => event,
            () = self.renewal.renewing() => Event::Renewal,
            () = sleep_until(due_at) => {
                if renew_at == Some(due_at) {
                    self.renewal.renew();
                    Event::Renewal
                } else if stream_at == Some(due_at) {
                    Event::StreamDue
                } else {
                    Event::Idle
                }
            }
        }
    }

    /// Everything is here: records it, and then lets the caller see the end.
    async fn kept(mut self: Box<Self>) {
        let body = self.collected.into_bytes();
        let recorded = Recorded::Response(outcome::Response {
            status: self.head.status,
            headers: headers::recorded_headers(&self.head.headers, self.job.admitted.settings.record_cookies),
            body: body.clone(),
            trailers: self.trailers.clone(),
        });
        self.job.record(self.renewal, Verdict::Keep(recorded.encode())).await;
        match self.caller {
            CallerSide::Waiting { reply, .. } => {
                headers::announce(&mut self.head.headers, &self.trailers);
                let response = Response::from_parts(self.head, ResponseBody::whole(body, self.trailers));
                self.job.send(&mut Some(reply), response);
            }
            CallerSide::Reading(relay) => {
                relay.pass_data(body.slice(self.bytes_passed..));
                if !self.trailers.is_empty() {
                    relay.pass(Frame::trailers(self.trailers));
                }
                relay.end();
            }
            CallerSide::Gone { .. } => {}
        }
    }

    /// Leaves the mark that the work was done and its answer not kept, and then lets the caller have what
    /// has arrived.
    async fn mark(self: Box<Self>) -> Unkept<ResB> {
        let mark = Recorded::NotKept { status: self.head.status };
        self.job.record(self.renewal, Verdict::Keep(mark.encode())).await;
        let (relay, until) = match self.caller {
            CallerSide::Waiting { reply, .. } => {
                let (relay, body) = ResponseBody::relayed();
                self.job.send(&mut Some(reply), Response::from_parts(self.head, body));
                (Some(relay), None)
            }
            CallerSide::Reading(relay) => (Some(relay), None),
            CallerSide::Gone { until } => (None, Some(until)),
        };
        if let Some(relay) = &relay {
            relay.pass_data(self.collected.into_bytes().slice(self.bytes_passed..));
        }
        Unkept { settings: Arc::clone(&self.job.admitted.settings), body: self.body, relay, until }
    }

    /// The answer is too large to record: leaves the mark, and then passes the rest on.
    async fn not_kept(self: Box<Self>) {
        let unkept = self.mark().await;
        // The work is done and marked: a caller that reads slowly must not hold up a shutdown.
        tokio::spawn(unkept.relay().in_current_span());
    }

    /// The answer was lost halfway: the key is left to its lease.
    fn cut(self: Box<Self>, code: Code, error: BoxError) {
        debug!(operation = %self.job.admitted.operation.id(), %error, "the answer was lost halfway");
        let lease_ends = self.renewal.lease_ends();
        match self.caller {
            CallerSide::Waiting { reply, .. } => {
                self.job.send(&mut Some(reply), self.job.unknown(code, lease_ends));
            }
            CallerSide::Reading(relay) => relay.cut(error),
            CallerSide::Gone { .. } => {}
        }
    }

    /// Sends the head and what has arrived, and lets the rest follow.
    fn show_beginning(&mut self) {
        let (relay, body) = ResponseBody::relayed();
        if let CallerSide::Waiting { reply, .. } =
            std::mem::replace(&mut self.caller, CallerSide::Reading(relay))
        {
            self.job.send(&mut Some(reply), Response::from_parts(self.head.clone(), body));
        }
        self.pass_on(self.collected.copy());
    }

    /// Passes on what has just arrived, but not the last bytes of a known length.
    fn pass_on(&mut self, data: Bytes) {
        let CallerSide::Reading(relay) = &self.caller else { return };
        let whole = self.content_length.is_some_and(|length| self.collected.len() >= length);
        if !whole {
            self.bytes_passed += data.len();
            relay.pass_data(data);
        }
    }
}

/// An answer that is marked as done and not kept.
pub(crate) struct Unkept<ResB> {
    pub(crate) settings: Arc<Settings>,
    pub(crate) body: Pin<Box<ResB>>,
    pub(crate) relay: Option<Relay>,
    /// When it is given up, once there is no caller.
    pub(crate) until: Option<Instant>,
}

impl<ResB> Unkept<ResB>
where
    ResB: Body<Data = Bytes>,
    ResB::Error: Into<BoxError>,
{
    /// Passes the answer on as fast as the caller reads. Without a caller the work goes on, but for no
    /// more than a lease.
    pub(crate) async fn relay(self) {
        let Self { settings, mut body, relay, mut until } = self;
        loop {
            let idle_at = Instant::now() + settings.idle_timeout;
            let frame = tokio::select! {
                biased;
                () = closed(relay.as_ref()), if until.is_none() => {
                    until = Some(Instant::now() + settings.lease());
                    continue;
                }
                frame = body.frame() => frame.map(|frame| frame.map_err(Into::into)),
                () = at(until) => return,
                () = sleep_until(idle_at) => Some(Err(PAUSED.into())),
            };
            match (frame, &relay) {
                (Some(Ok(frame)), Some(relay)) => relay.pass_slowly(frame).await,
                (Some(Ok(_)), None) => {}
                (Some(Err(error)), Some(relay)) => return relay.cut(error),
                (None, Some(relay)) => return relay.end(),
                (_, None) => return,
            }
        }
    }
}

async fn left<ResB, E>(caller: &mut CallerSide<ResB, E>) -> Event {
    match caller {
        CallerSide::Waiting { reply, .. } => reply.closed().await,
        CallerSide::Reading(relay) => relay.closed().await,
        CallerSide::Gone { until } => {
            sleep_until(*until).await;
            return Event::GivenUp;
        }
    }
    Event::HungUp
}

/// Never, if there is no such caller.
async fn closed(relay: Option<&Relay>) {
    match relay {
        Some(relay) => relay.closed().await,
        None => std::future::pending().await,
    }
}

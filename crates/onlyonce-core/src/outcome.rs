//! How an outcome becomes bytes, and bytes an outcome.
//!
//! ```text
//! head:  version (1 byte) · kind (1 byte) · then, by kind:
//! kind:  1 a response: headers · trailers
//!        2 done but not kept
//!        3 a function's value: attempt (u32)
//!        4 a function's error: attempt (u32)
//! lines: count (u32) · for each: name length (u32) · name · value length (u32) · value
//! ```
//!
//! Numbers are big-endian. Header values are kept as bytes: they need not be text. The body is the response's,
//! or the value or error in JSON, which has no HTTP status.

use std::fmt;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use crate::record::Outcome;

/// What a finished key remembers.
#[derive(Clone, Debug)]
pub enum Recorded {
    /// A response, to be given again byte for byte.
    Response(Response),
    /// The work was done and answered with this status, but the answer was too large or did not end.
    NotKept {
        /// The status that the first caller saw.
        status: StatusCode,
    },
    /// What a function returned, to be returned again.
    Value(Value),
}

/// A whole response.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// The status.
    pub status: StatusCode,
    /// The header lines, without those that belong to one connection or one moment.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// The trailer lines; empty if there are none.
    pub trailers: HeaderMap,
}

/// What a function returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// The attempt that returned it.
    pub attempt: u32,
    /// Whether it is an error.
    pub is_error: bool,
    /// The value or error, in JSON.
    pub json: Bytes,
}

const VERSION: u8 = 1;
const RESPONSE: u8 = 1;
const NOT_KEPT: u8 = 2;
const VALUE: u8 = 3;
const ERROR: u8 = 4;

/// In place of the status of an outcome that has none.
const NO_STATUS: u16 = 0;

impl Recorded {
    /// The bytes a store keeps.
    #[must_use]
    pub fn encode(self) -> Outcome {
        let mut head = BytesMut::with_capacity(256);
        head.put_u8(VERSION);
        match self {
            Self::Response(Response { status, headers, body, trailers }) => {
                head.put_u8(RESPONSE);
                put_lines(&mut head, &headers);
                put_lines(&mut head, &trailers);
                Outcome { status: status.as_u16(), head: head.freeze(), body }
            }
            Self::NotKept { status } => {
                head.put_u8(NOT_KEPT);
                Outcome { status: status.as_u16(), head: head.freeze(), body: Bytes::new() }
            }
            Self::Value(Value { attempt, is_error, json }) => {
                head.put_u8(if is_error { ERROR } else { VALUE });
                head.put_u32(attempt);
                Outcome { status: NO_STATUS, head: head.freeze(), body: json }
            }
        }
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// Refuses what a newer version wrote, and damaged bytes. The work was done.
    pub fn decode(outcome: &Outcome) -> Result<Self, UnreadableOutcome> {
        let mut head = Head(&outcome.head);
        let version = head.u8()?;
        if version != VERSION {
            return Err(UnreadableOutcome::Version(version));
        }
        let kind = head.u8()?;
        let recorded = match kind {
            RESPONSE => Self::Response(Response {
                status: final_status(outcome.status)?,
                headers: head.lines()?,
                body: outcome.body.clone(),
                trailers: head.lines()?,
            }),
            NOT_KEPT => Self::NotKept { status: final_status(outcome.status)? },
            VALUE | ERROR if outcome.status == NO_STATUS => {
                let (attempt, is_error) = (head.u32()?, kind == ERROR);
                Self::Value(Value { attempt, is_error, json: outcome.body.clone() })
            }
            _ => return Err(UnreadableOutcome::Damaged),
        };
        if head.0.is_empty() { Ok(recorded) } else { Err(UnreadableOutcome::Damaged) }
    }
}

/// An interim status would not end an answer, and HTTP knows none beyond.
fn final_status(status: u16) -> Result<StatusCode, UnreadableOutcome> {
    StatusCode::from_u16(status)
        .ok()
        .filter(|status| (200..=599).contains(&status.as_u16()))
        .ok_or(UnreadableOutcome::Damaged)
}

/// Why a recorded outcome cannot be given again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnreadableOutcome {
    /// A newer version of Onlyonce wrote it.
    Version(u8),
    /// The bytes make no sense.
    Damaged,
}

impl fmt::Display for UnreadableOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version(version) => write!(
                f,
                "the recorded outcome has format {version}, and this version of onlyonce reads format {VERSION}"
            ),
            Self::Damaged => f.write_str("the recorded outcome is damaged"),
        }
    }
}

impl std::error::Error for UnreadableOutcome {}

fn put_lines(head: &mut BytesMut, lines: &HeaderMap) {
    head.put_u32(u32::try_from(lines.len()).expect("http::HeaderMap holds at most 32,768 lines"));
    for (name, value) in lines {
        for bytes in [name.as_str().as_bytes(), value.as_bytes()] {
            head.put_u32(u32::try_from(bytes.len()).expect("a header line is far below 4 GiB"));
            head.put_slice(bytes);
        }
    }
}

/// The unread rest of a head.
struct Head<'a>(&'a [u8]);

impl<'a> Head<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], UnreadableOutcome> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(UnreadableOutcome::Damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn u8(&mut self) -> Result<u8, UnreadableOutcome> {
        Ok(self.take(1)?[0])
    }

    fn u32(&mut self) -> Result<u32, UnreadableOutcome> {
        let bytes = self.take(4)?.try_into().map_err(|_| UnreadableOutcome::Damaged)?;
        Ok(u32::from_be_bytes(bytes))
    }

    fn part(&mut self) -> Result<&'a [u8], UnreadableOutcome> {
        let bytes = self.u32()? as usize;
        self.take(bytes)
    }

    fn lines(&mut self) -> Result<HeaderMap, UnreadableOutcome> {
        let count = self.u32()?;
        let mut lines = HeaderMap::new();
        for _ in 0..count {
            let name = HeaderName::from_bytes(self.part()?).map_err(|_| UnreadableOutcome::Damaged)?;
            let value = HeaderValue::from_bytes(self.part()?).map_err(|_| UnreadableOutcome::Damaged)?;
            lines.try_append(name, value).map_err(|_| UnreadableOutcome::Damaged)?;
        }
        Ok(lines)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response() -> Response {
        let mut headers = HeaderMap::new();
        headers.append("location", HeaderValue::from_static("/payments/7"));
        headers.append("link", HeaderValue::from_static("</a>; rel=next, </b>; rel=last"));
        headers.append("link", HeaderValue::from_static("</c>"));
        headers.append("x-bytes", HeaderValue::from_bytes(b"\xff\xfe").expect("opaque bytes are allowed"));
        let mut trailers = HeaderMap::new();
        trailers.append("grpc-status", HeaderValue::from_static("0"));
        Response { status: StatusCode::CREATED, headers, body: Bytes::from_static(b"\0\xff\r\n"), trailers }
    }

    #[test]
    fn a_response_comes_back_byte_for_byte() {
        let outcome = Recorded::Response(response()).encode();
        assert_eq!(outcome.status, 201);
        let Ok(Recorded::Response(read)) = Recorded::decode(&outcome) else { panic!("not a response") };
        let wrote = response();
        assert_eq!(
            (read.status, &read.headers, &read.body, &read.trailers),
            (wrote.status, &wrote.headers, &wrote.body, &wrote.trailers)
        );
        assert_eq!(read.headers.get_all("link").iter().count(), 2, "repeated lines stay apart");
    }

    #[test]
    fn not_kept_is_told_from_an_empty_response() {
        let outcome = Recorded::NotKept { status: StatusCode::OK }.encode();
        assert!(matches!(Recorded::decode(&outcome), Ok(Recorded::NotKept { status: StatusCode::OK })));
    }

    fn value(is_error: bool) -> Value {
        Value { attempt: 258, is_error, json: Bytes::from_static(br#"{"id":7}"#) }
    }

    #[test]
    fn a_value_is_told_from_an_error() {
        for is_error in [false, true] {
            let outcome = Recorded::Value(value(is_error)).encode();
            let Ok(Recorded::Value(read)) = Recorded::decode(&outcome) else { panic!("not a value") };
            assert_eq!(read, value(is_error));
        }
    }

    /// A changed encoding would leave a finished key that nobody can read.
    #[test]
    fn the_encoding_of_a_value_never_changes() {
        let pinned = |kind| Outcome {
            status: 0,
            head: Bytes::copy_from_slice(&[1, kind, 0, 0, 1, 2]),
            body: Bytes::from_static(br#"{"id":7}"#),
        };
        assert_eq!(Recorded::Value(value(false)).encode(), pinned(3));
        assert_eq!(Recorded::Value(value(true)).encode(), pinned(4));
    }

    #[test]
    fn a_damaged_value_is_refused() {
        let whole = Recorded::Value(value(false)).encode();
        for bytes in 0..whole.head.len() {
            let cut = Outcome { head: whole.head.slice(..bytes), ..whole.clone() };
            assert!(Recorded::decode(&cut).is_err(), "{bytes} bytes");
        }
        let longer = Outcome { head: [&whole.head[..], &[0]].concat().into(), ..whole.clone() };
        assert!(Recorded::decode(&longer).is_err());
        let other_kind = Outcome { head: Bytes::from_static(&[1, 5, 0, 0, 0, 1]), ..whole.clone() };
        assert!(Recorded::decode(&other_kind).is_err());
        assert!(Recorded::decode(&Outcome { status: 200, ..whole }).is_err(), "a value has no status");
    }

    #[test]
    fn a_newer_format_and_every_truncation_are_refused() {
        let whole = Recorded::Response(response()).encode();
        for bytes in 0..whole.head.len() {
            let cut = Outcome { head: whole.head.slice(..bytes), ..whole.clone() };
            assert!(Recorded::decode(&cut).is_err(), "{bytes} bytes");
        }
        for status in [0, 99, 100, 101, 600, 999] {
            let odd = Outcome { status, ..whole.clone() };
            assert!(Recorded::decode(&odd).is_err(), "status {status}");
        }
        let mut longer = whole.head.to_vec();
        longer.push(0);
        assert!(Recorded::decode(&Outcome { head: longer.clone().into(), ..whole.clone() }).is_err());
        longer[0] = 2;
        let newer = Outcome { head: longer.into(), ..whole };
        assert_eq!(Recorded::decode(&newer).err(), Some(UnreadableOutcome::Version(2)));
    }
}

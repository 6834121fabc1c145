//! Which header lines are recorded, and which are given again.

use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, SET_COOKIE, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, WWW_AUTHENTICATE,
};
use http::{Response, StatusCode, response};
use onlyonce_core::outcome;

/// The response header that marks a replay.
pub const IDEMPOTENT_REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

const OUR_PREFIX: &str = "onlyonce-";

/// The header lines that belong to one connection (RFC 9110, section 7.6.1), not to a request or an answer.
/// `Trailer` is not among them: it announces what a proxy passes on.
pub const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// They belong to one moment or are computed anew.
const NEVER_RECORDED: [HeaderName; 5] =
    [CONTENT_LENGTH, TRAILER, DATE, WWW_AUTHENTICATE, HeaderName::from_static("server-timing")];

/// Removes what only Onlyonce itself may say.
pub(crate) fn remove_ours(headers: &mut HeaderMap) {
    let ours: Vec<HeaderName> = headers.keys().filter(|name| is_ours(name)).cloned().collect();
    for name in ours {
        headers.remove(name);
    }
}

fn is_ours(name: &HeaderName) -> bool {
    *name == IDEMPOTENT_REPLAYED || name.as_str().starts_with(OUR_PREFIX)
}

/// The header lines of an answer that every retry is given again; `record_cookies` takes in `Set-Cookie`.
///
/// Left out are the lines that belong to one connection or one moment, and those that `Connection` names.
#[must_use]
pub fn recorded_headers(headers: &HeaderMap, record_cookies: bool) -> HeaderMap {
    let named_by_connection: Vec<&[u8]> = headers
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .collect();
    let keeps = |name: &HeaderName| {
        !HOP_BY_HOP.contains(name)
            && !NEVER_RECORDED.contains(name)
            && (record_cookies || *name != SET_COOKIE)
            && !named_by_connection.iter().any(|named| named.eq_ignore_ascii_case(name.as_str().as_bytes()))
    };
    let lines = headers.iter().filter(|(name, _)| keeps(name));
    lines.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// Announces the trailers of an answer that is sent from memory: HTTP/1.1 sends none unannounced, and
/// none at all under a known length.
pub(crate) fn announce(headers: &mut HeaderMap, trailers: &HeaderMap) {
    if trailers.is_empty() {
        return;
    }
    headers.remove(CONTENT_LENGTH);
    let names: Vec<&str> = trailers.keys().map(HeaderName::as_str).collect();
    if let Ok(names) = HeaderValue::from_str(&names.join(", ")) {
        headers.insert(TRAILER, names);
    }
}

/// The head, body and trailers of a replay.
pub(crate) fn replayed(recorded: outcome::Response) -> (response::Parts, Bytes, HeaderMap) {
    let outcome::Response { status, headers, body, trailers } = recorded;
    let (mut parts, ()) = Response::new(()).into_parts();
    parts.status = status;
    parts.headers = headers;
    parts.headers.insert(IDEMPOTENT_REPLAYED, HeaderValue::from_static("true"));
    // RFC 9110, section 8.6: these have no content, and must not claim a length.
    if !matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
        parts.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    announce(&mut parts.headers, &trailers);
    (parts, body, trailers)
}

/// Whether the answer is a stream of events, which no caller wants gathered.
pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let essence = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        essence.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
    })
}

/// The length that the head announces, in bytes.
pub(crate) fn content_length(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| {
                let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
                (name, HeaderValue::from_str(value).expect("a value"))
            })
            .collect()
    }

    #[test]
    fn framing_moments_and_cookies_are_not_recorded_and_the_rest_is_verbatim() {
        let headers = map(&[
            ("connection", "close, X-Hop"),
            ("x-hop", "1"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("date", "now"),
            ("set-cookie", "session=1"),
            ("www-authenticate", "Basic"),
            ("server-timing", "db;dur=1"),
            ("trailer", "x-sum"),
            ("location", "/payments/7"),
            ("etag", "\"a,b\""),
            ("link", "</a>"),
            ("link", "</b>, </c>"),
            ("content-type", "application/json"),
            ("content-encoding", "identity"),
        ]);
        let kept = recorded_headers(&headers, false);
        let names: Vec<_> = kept.keys().map(HeaderName::as_str).collect();
        assert_eq!(names, ["location", "etag", "link", "content-type", "content-encoding"]);
        let links: Vec<_> = kept.get_all("link").iter().collect();
        assert_eq!(links, ["</a>", "</b>, </c>"], "lines are neither joined nor split");
        assert!(recorded_headers(&headers, true).contains_key("set-cookie"));
    }

    #[test]
    fn only_onlyonce_may_say_that_an_answer_is_a_replay() {
        let mut headers = map(&[("idempotent-replayed", "true"), ("onlyonce-refused", "x"), ("etag", "1")]);
        remove_ours(&mut headers);
        assert_eq!(headers, map(&[("etag", "1")]));
    }

    #[test]
    fn trailers_are_announced_and_end_a_known_length() {
        let recorded = outcome::Response {
            status: StatusCode::OK,
            headers: map(&[("content-type", "application/grpc")]),
            body: Bytes::from_static(b"abc"),
            trailers: map(&[("grpc-status", "0")]),
        };
        let (parts, ..) = replayed(recorded);
        assert_eq!(parts.headers.get(TRAILER).map(HeaderValue::as_bytes), Some(&b"grpc-status"[..]));
        assert!(!parts.headers.contains_key(CONTENT_LENGTH));
    }

    #[test]
    fn a_replay_has_its_length_unless_it_has_no_content() {
        let of = |status| {
            let recorded = outcome::Response { status, ..outcome::Response::default() };
            replayed(recorded).0.headers.get(CONTENT_LENGTH).cloned()
        };
        assert_eq!(of(StatusCode::OK), Some(HeaderValue::from_static("0")));
        assert_eq!(of(StatusCode::NO_CONTENT), None);
    }
}

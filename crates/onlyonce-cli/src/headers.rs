//! Which header lines pass the proxy, and which it adds.

use std::net::IpAddr;

use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE,
    EXPECT, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, TE, TRANSFER_ENCODING, UPGRADE,
};
use http::uri::Authority;
use onlyonce::HOP_BY_HOP;

/// Tells the upstream which attempt it is doing, so that it can look before it acts again.
pub const IDEMPOTENCY_ATTEMPT: HeaderName = HeaderName::from_static("idempotency-attempt");

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const HTTP2_SETTINGS: HeaderName = HeaderName::from_static("http2-settings");

/// Makes a request's head fit for the next connection. Returns the protocols it asks to change to, which
/// are then still in `headers`; there are none if the request is guarded.
pub(crate) fn prepare_request(
    headers: &mut HeaderMap,
    client: Option<IpAddr>,
    guarded_attempt: Option<u32>,
) -> Option<HeaderValue> {
    let upgrade = if guarded_attempt.is_none() { upgrade(headers) } else { None };
    let trailers = accepts_trailers(headers);
    remove_hop_by_hop(headers);
    headers.remove(HTTP2_SETTINGS);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if let Some(protocols) = &upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocols.clone());
    }
    forwarded(headers, client);
    // Only the proxy counts attempts.
    headers.remove(IDEMPOTENCY_ATTEMPT);
    if let Some(attempt) = guarded_attempt {
        headers.insert(IDEMPOTENCY_ATTEMPT, HeaderValue::from(attempt));
        // What is recorded must be readable by a retry that accepts other encodings.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        // The body is here already.
        headers.remove(EXPECT);
    }
    upgrade
}

/// Makes a response's head fit for the caller's connection.
pub(crate) fn prepare_response(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
}

/// Puts back what a response that changes the protocol needs.
pub(crate) fn keep_upgrade(headers: &mut HeaderMap, protocol: Option<HeaderValue>) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    if let Some(protocol) = protocol {
        headers.insert(UPGRADE, protocol);
    }
}

/// Sets the one `Host` that the upstream sees.
pub(crate) fn set_host(headers: &mut HeaderMap, authority: &Authority) {
    // A name before an `@` is the client's own business.
    let host = authority.as_str().rsplit('@').next().unwrap_or_default();
    if let Ok(host) = HeaderValue::from_str(host) {
        headers.insert(HOST, host);
    }
}

/// HTTP/2 may split cookies into a line each; HTTP/1.1 has one line (RFC 9113, section 8.2.3).
pub(crate) fn join_cookies(headers: &mut HeaderMap) {
    let crumbs: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() < 2 {
        return;
    }
    let joined = crumbs.join(&b"; "[..]);
    if let Ok(joined) = HeaderValue::from_bytes(&joined) {
        headers.insert(COOKIE, joined);
    }
}

fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // A length beside a transfer coding is how requests are smuggled; the coding counts (RFC 9112,
    // section 6.1), and it ends here.
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    remove_named(headers);
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
}

/// Removes what `Connection` names (RFC 9110, section 7.6.1). The layer must not see it either: it would file
/// a key under a caller or a fingerprint that the upstream is not told.
pub(crate) fn remove_named(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
        .filter_map(|name| HeaderName::from_bytes(name).ok())
        .filter(|name| !is_end_to_end(name) && !HOP_BY_HOP.contains(name))
        .collect();
    for name in &named {
        headers.remove(name);
    }
}

/// These frame, address or name the request, or say who asks or what it means: nobody may talk the proxy out
/// of them.
fn is_end_to_end(name: &HeaderName) -> bool {
    const END_TO_END: [HeaderName; 8] = [
        AUTHORIZATION,
        CONTENT_ENCODING,
        CONTENT_LENGTH,
        CONTENT_TYPE,
        COOKIE,
        FORWARDED,
        HOST,
        onlyonce::IDEMPOTENCY_KEY,
    ];
    END_TO_END.contains(name) || name.as_str().starts_with("x-forwarded-")
}

/// The protocols that the request asks for, without `h2c`, which nobody has to take up.
fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    if !tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case(b"upgrade")) {
        return None;
    }
    let protocols: Vec<&[u8]> =
        tokens(headers, &UPGRADE).filter(|protocol| !protocol.eq_ignore_ascii_case(b"h2c")).collect();
    if protocols.is_empty() {
        return None;
    }
    HeaderValue::from_bytes(&protocols.join(&b", "[..])).ok()
}

fn accepts_trailers(headers: &HeaderMap) -> bool {
    tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case(b"trailers"))
}

/// `X-Forwarded-For` grows by one hop. What a proxy in front said about the client's own scheme and host
/// stands: it is nearer to the client.
fn forwarded(headers: &mut HeaderMap, client: Option<IpAddr>) {
    if let Some(client) = client {
        let client = client.to_canonical().to_string();
        let mut hops: Vec<&[u8]> =
            headers.get_all(X_FORWARDED_FOR).iter().map(HeaderValue::as_bytes).collect();
        hops.push(client.as_bytes());
        if let Ok(hops) = HeaderValue::from_bytes(&hops.join(&b", "[..])) {
            headers.insert(X_FORWARDED_FOR, hops);
        }
    }
    headers.entry(X_FORWARDED_PROTO).or_insert(HeaderValue::from_static("http"));
    if let Some(host) = headers.get(HOST).cloned() {
        headers.entry(X_FORWARDED_HOST).or_insert(host);
    }
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a [u8]> {
    headers
        .get_all(name)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii)
        .filter(|token| !token.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| {
                (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap())
            })
            .collect()
    }

    fn client() -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, 7]))
    }

    fn all<'a>(headers: &'a HeaderMap, name: &str) -> Vec<&'a str> {
        headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
    }

    #[test]
    fn what_belongs_to_one_connection_stays_there() {
        let mut headers = map(&[
            ("connection", "close, X-Hop"),
            ("connection", "keep-alive"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authorization", "Basic x"),
            ("te", "gzip, trailers"),
            ("transfer-encoding", "chunked"),
            ("content-length", "3"),
            ("trailer", "x-sum"),
            ("accept-encoding", "br"),
            ("expect", "100-continue"),
            ("idempotency-key", "\"k\""),
        ]);
        assert_eq!(prepare_request(&mut headers, None, None), None);
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["accept-encoding", "expect", "idempotency-key", "te", "trailer", "x-forwarded-proto"]
        );
        assert_eq!(all(&headers, "te"), ["trailers"]);
        assert_eq!(all(&headers, "accept-encoding"), ["br"]);
        assert_eq!(all(&headers, "idempotency-key"), ["\"k\""], "forwarded as sent");
    }

    #[test]
    fn nobody_can_call_what_the_request_means_a_connection_header() {
        let lines = [
            ("authorization", "Bearer ann"),
            ("content-encoding", "gzip"),
            ("content-length", "3"),
            ("content-type", "application/json"),
            ("cookie", "session=1"),
            ("forwarded", "for=10.0.0.9"),
            ("host", "a"),
            ("idempotency-key", "k"),
            ("x-forwarded-host", "b"),
            ("x-forwarded-proto", "https"),
        ];
        let mut headers = map(&lines);
        let named = lines.map(|(name, _)| name).join(", ");
        headers.insert(CONNECTION, HeaderValue::from_str(&named).unwrap());
        prepare_request(&mut headers, None, None);
        for (name, value) in lines {
            assert_eq!(all(&headers, name), [value]);
        }
    }

    #[test]
    fn the_forwarding_headers_grow_and_never_lose_what_a_proxy_in_front_said() {
        let mut headers = map(&[("host", "shop.example")]);
        prepare_request(&mut headers, client(), None);
        assert_eq!(all(&headers, "x-forwarded-for"), ["10.0.0.7"]);
        assert_eq!(all(&headers, "x-forwarded-proto"), ["http"]);
        assert_eq!(all(&headers, "x-forwarded-host"), ["shop.example"]);

        let mut headers = map(&[
            ("host", "inner"),
            ("x-forwarded-for", "1.2.3.4"),
            ("x-forwarded-for", "5.6.7.8, 9.9.9.9"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "shop.example"),
        ]);
        prepare_request(&mut headers, client(), None);
        assert_eq!(all(&headers, "x-forwarded-for"), ["1.2.3.4, 5.6.7.8, 9.9.9.9, 10.0.0.7"]);
        assert_eq!(all(&headers, "x-forwarded-proto"), ["https"]);
        assert_eq!(all(&headers, "x-forwarded-host"), ["shop.example"]);
    }

    #[test]
    fn only_the_proxy_counts_attempts() {
        let sent = [("idempotency-attempt", "7"), ("idempotency-attempt", "8")];
        let mut headers = map(&sent);
        prepare_request(&mut headers, None, None);
        assert!(!headers.contains_key("idempotency-attempt"));

        let mut headers = map(&sent);
        prepare_request(&mut headers, None, Some(2));
        assert_eq!(all(&headers, "idempotency-attempt"), ["2"]);
    }

    #[test]
    fn a_guarded_request_asks_for_plain_bytes_and_no_permission() {
        let mut headers = map(&[
            ("accept-encoding", "gzip"),
            ("accept-encoding", "br"),
            ("expect", "100-continue"),
            ("connection", "upgrade"),
            ("upgrade", "websocket"),
        ]);
        assert_eq!(prepare_request(&mut headers, None, Some(1)), None);
        assert_eq!(all(&headers, "accept-encoding"), ["identity"]);
        assert!(!headers.contains_key("expect") && !headers.contains_key("upgrade"));
    }

    #[test]
    fn a_websocket_passes_and_h2c_does_not() {
        let mut headers = map(&[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c, websocket")]);
        assert_eq!(prepare_request(&mut headers, None, None).unwrap(), "websocket");
        assert_eq!(all(&headers, "connection"), ["upgrade"]);
        assert_eq!(all(&headers, "upgrade"), ["websocket"]);

        for lines in [
            &[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c"), ("http2-settings", "AAMA")][..],
            &[("upgrade", "websocket")],
            &[("connection", "upgrade")],
        ] {
            let mut headers = map(lines);
            assert_eq!(prepare_request(&mut headers, None, None), None, "{lines:?}");
            for name in ["upgrade", "connection", "http2-settings"] {
                assert!(!headers.contains_key(name), "{lines:?}");
            }
        }
    }

    #[test]
    fn cookie_crumbs_become_one_line() {
        let mut headers = map(&[("cookie", "a=1"), ("cookie", "b=2; c=3")]);
        join_cookies(&mut headers);
        assert_eq!(all(&headers, "cookie"), ["a=1; b=2; c=3"]);
    }
}

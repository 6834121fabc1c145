//! Which redirects are followed, and what goes along.
//!
//! | the request | 301, 302 | 303 | 307, 308 |
//! |---|---|---|---|
//! | GET, HEAD without a key | followed | followed | followed |
//! | any, with a key | not followed | as GET, without key and body | same origin only, unchanged |
//! | PUT, DELETE, OPTIONS without a key | not followed | as GET, without body | same origin only, unchanged |
//! | POST and others without a key | not followed | as GET, without body | not followed |
//!
//! A key never leaves its origin: another server does not know it, so it protects nothing there. A POST is
//! not turned into a GET on 301 or 302, as browsers do: the work would quietly not be done. What is not
//! followed is the caller's answer. Credentials stay behind where the origin changes, and nothing goes from
//! https to http.

use http::{Method, StatusCode};
use reqwest::Url;

/// The most redirects of one attempt.
pub(crate) const REDIRECTS_MAX: usize = 10;

/// Where a request goes next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hop {
    pub(crate) url: Url,
    /// The result of work that is done is read: a GET, or HEAD as before, without key and body.
    pub(crate) to_result: bool,
    pub(crate) same_origin: bool,
}

/// The request that was redirected.
pub(crate) struct Redirected<'a> {
    pub(crate) method: &'a Method,
    pub(crate) url: &'a Url,
    pub(crate) keyed: bool,
}

pub(crate) fn follow(from: &Redirected<'_>, status: StatusCode, location: Option<&str>) -> Option<Hop> {
    let url = from.url.join(location?).ok()?;
    let downgrade = from.url.scheme() == "https" && url.scheme() == "http";
    if downgrade || !matches!(url.scheme(), "http" | "https") {
        return None;
    }
    let same_origin = url.origin() == from.url.origin();
    let reads = matches!(*from.method, Method::GET | Method::HEAD) && !from.keyed;
    let followed = match status.as_u16() {
        301 | 302 => reads,
        303 => true,
        307 | 308 => reads || (same_origin && repeatable(from.method, from.keyed)),
        _ => false,
    };
    followed.then_some(Hop { url, to_result: status == StatusCode::SEE_OTHER, same_origin })
}

/// Whether a request may be sent again: with a key always, because the server tells the copies apart, and
/// otherwise if doing it twice is the same as doing it once (RFC 9110, section 9.2.2).
pub(crate) fn repeatable(method: &Method, keyed: bool) -> bool {
    let idempotent = matches!(
        *method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE | Method::TRACE
    );
    keyed || idempotent
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOME: &str = "https://api.example/payments?a=1";

    fn hop(method: &Method, keyed: bool, status: u16, location: &str) -> Option<Hop> {
        let url = HOME.parse().expect("a URL");
        let status = StatusCode::from_u16(status).expect("a status");
        follow(&Redirected { method, url: &url, keyed }, status, Some(location))
    }

    #[test]
    fn every_row_of_the_table() {
        const SAME: &str = "/v2/payments";
        const OTHER: &str = "https://other.example/payments";
        // Method, key; then for 301, 302, 303, 307, 308 whether it is followed here and elsewhere.
        let rows = [
            (Method::GET, false, [(true, true); 5]),
            (Method::HEAD, false, [(true, true); 5]),
            (
                Method::POST,
                true,
                [(false, false), (false, false), (true, true), (true, false), (true, false)],
            ),
            (Method::PUT, true, [(false, false), (false, false), (true, true), (true, false), (true, false)]),
            (Method::GET, true, [(false, false), (false, false), (true, true), (true, false), (true, false)]),
            (
                Method::PUT,
                false,
                [(false, false), (false, false), (true, true), (true, false), (true, false)],
            ),
            (
                Method::POST,
                false,
                [(false, false), (false, false), (true, true), (false, false), (false, false)],
            ),
            (
                Method::PATCH,
                false,
                [(false, false), (false, false), (true, true), (false, false), (false, false)],
            ),
        ];
        for (method, keyed, expected) in rows {
            for (status, (here, elsewhere)) in [301, 302, 303, 307, 308].into_iter().zip(expected) {
                for (location, followed) in [(SAME, here), (OTHER, elsewhere)] {
                    let hop = hop(&method, keyed, status, location);
                    assert_eq!(hop.is_some(), followed, "{method} keyed={keyed} {status} {location}");
                    if let Some(hop) = hop {
                        assert_eq!(hop.same_origin, location == SAME);
                        assert_eq!(hop.to_result, status == 303);
                    }
                }
            }
        }
    }

    #[test]
    fn an_origin_is_scheme_host_and_port() {
        for (location, same_origin) in [
            ("https://api.example:443/x", true),
            ("//api.example/x", true),
            ("?b=2", true),
            ("https://api.example:8443/x", false),
            ("https://www.api.example/x", false),
        ] {
            assert_eq!(
                hop(&Method::GET, false, 307, location).map(|h| h.same_origin),
                Some(same_origin),
                "{location}"
            );
        }
    }

    #[test]
    fn some_places_are_never_gone_to() {
        for location in
            ["http://api.example/payments", "ftp://api.example/x", "file:///etc/passwd", "http://"]
        {
            assert_eq!(hop(&Method::GET, false, 307, location), None, "{location}");
        }
        assert_eq!(hop(&Method::GET, false, 300, "/x"), None);
        assert_eq!(hop(&Method::GET, false, 304, "/x"), None);
        let url = HOME.parse().expect("a URL");
        let from = Redirected { method: &Method::GET, url: &url, keyed: false };
        assert_eq!(follow(&from, StatusCode::FOUND, None), None);
    }
}

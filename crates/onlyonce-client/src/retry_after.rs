//! `Retry-After` in both its forms (RFC 9110, section 10.2.3).

use std::time::{Duration, SystemTime};

use http::header::{DATE, HeaderMap, RETRY_AFTER};

/// How long a server asks to wait. A date is taken relative to the answer's own `Date`, so that two clocks
/// are never compared, and to `now` where there is none. What makes no sense is as good as absent.
pub(crate) fn read(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are a long time.
        return Some(Duration::from_secs(value.parse().unwrap_or(u64::MAX)));
    }
    let at = httpdate::parse_http_date(value).ok()?;
    let date = headers.get(DATE).and_then(|date| httpdate::parse_http_date(date.to_str().ok()?).ok());
    Some(at.duration_since(date.unwrap_or(now)).unwrap_or(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn both_forms_are_read_and_nonsense_is_not() {
        let now = httpdate::parse_http_date("Wed, 21 Oct 2026 07:00:00 GMT").expect("a date");
        let read = |after: &'static str, date: Option<&'static str>| {
            let mut headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static(after))]);
            if let Some(date) = date {
                headers.insert(DATE, HeaderValue::from_static(date));
            }
            super::read(&headers, now).map(|after| after.as_secs())
        };
        assert_eq!(read("0", None), Some(0));
        assert_eq!(read(" 120 ", None), Some(120));
        assert_eq!(read("99999999999999999999999", None), Some(u64::MAX));
        assert_eq!(read("Wed, 21 Oct 2026 07:00:30 GMT", None), Some(30));
        assert_eq!(read("Wed, 21 Oct 2026 06:00:00 GMT", None), Some(0), "it is past");
        // The server's clock is an hour ahead; it still means thirty seconds.
        let (after, date) = ("Wed, 21 Oct 2026 08:00:30 GMT", "Wed, 21 Oct 2026 08:00:00 GMT");
        assert_eq!(read(after, Some(date)), Some(30));
        for nonsense in ["", "-1", "+1", "1.5", "soon", "12 s"] {
            assert_eq!(read(nonsense, None), None, "{nonsense}");
        }
        assert_eq!(super::read(&HeaderMap::new(), now), None);
    }
}

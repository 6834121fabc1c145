//! Whether two requests with one key ask for the same thing.
//!
//! A digest is over length-prefixed parts and opens with a format name, so it does not depend on how
//! the body was chunked, and a later format cannot equal this one.
//!
//! Wherever a body cannot be read safely in its mode it is compared byte for byte: a retry that
//! differs only in spelling is then refused, which is annoying; taking two different requests for the
//! same one would lose an operation.

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName};
use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::digest::Parts;
use crate::record::Fingerprint;

/// What counts as the same body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BodyMode {
    /// The same bytes.
    #[default]
    Raw,
    /// The same RFC 8785 canonical form: key order and white space do not matter.
    Json,
    /// The same decoded pairs of `application/x-www-form-urlencoded`; order counts only within one name.
    Form,
    /// The same parts, whatever boundary the client drew this time.
    Multipart,
    /// One of the above, by content type.
    Auto,
}

const TARGET_FORMAT: &[u8] = b"onlyonce target 1";
const BODY_FORMAT: &[u8] = b"onlyonce body 1";

/// The fingerprint of a request: `path_and_query` and the headers named in `counted` make the target,
/// `body` in its `mode` the rest.
#[must_use]
pub fn fingerprint(
    path_and_query: &str,
    headers: &HeaderMap,
    counted: &[HeaderName],
    body: &[u8],
    mode: BodyMode,
) -> Fingerprint {
    let mut target = Sha256::new();
    target.part(TARGET_FORMAT);
    target.part(path_and_query.as_bytes());
    for name in counted {
        target.part(name.as_str().as_bytes());
        target.part(&(headers.get_all(name).iter().count() as u64).to_be_bytes());
        for value in headers.get_all(name) {
            target.part(value.as_bytes());
        }
    }
    Fingerprint { target: target.finalize().into(), body: body_digest(headers, body, mode) }
}

fn body_digest(headers: &HeaderMap, body: &[u8], mode: BodyMode) -> [u8; 32] {
    let content_type = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    // An encoded body cannot be read without decoding it first.
    let mode = if headers.contains_key(CONTENT_ENCODING) { BodyMode::Raw } else { mode };
    let mut digest = Sha256::new();
    digest.part(BODY_FORMAT);
    let understood = match resolve(mode, content_type) {
        BodyMode::Json => json(&mut digest, body),
        BodyMode::Form => form(&mut digest, body),
        BodyMode::Multipart => multipart(&mut digest, body, content_type),
        BodyMode::Raw | BodyMode::Auto => None,
    };
    if understood.is_none() {
        digest.part(b"raw");
        digest.part(body);
    }
    digest.finalize().into()
}

fn resolve(mode: BodyMode, content_type: &str) -> BodyMode {
    if mode != BodyMode::Auto {
        return mode;
    }
    let essence = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "application/json" => BodyMode::Json,
        json if json.ends_with("+json") => BodyMode::Json,
        "application/x-www-form-urlencoded" => BodyMode::Form,
        multipart if multipart.starts_with("multipart/") => BodyMode::Multipart,
        _ => BodyMode::Raw,
    }
}

/// Adds nothing and returns `None` unless the body is I-JSON (RFC 7493), as the canonical form demands.
fn json(digest: &mut Sha256, body: &[u8]) -> Option<()> {
    if !numbers(body).all(survives_as_double) {
        return None;
    }
    let IJson(value) = serde_json::from_slice(body).ok()?;
    let canonical = serde_json_canonicalizer::to_vec(&value).ok()?;
    digest.part(b"json");
    digest.part(&canonical);
    Some(())
}

/// The number literals of a JSON text; of any other text, something.
fn numbers(body: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = body;
    std::iter::from_fn(move || {
        let mut in_string = false;
        let mut at = 0;
        while let Some(byte) = rest.get(at) {
            match byte {
                b'\\' if in_string => at += 1,
                b'"' => in_string = !in_string,
                b'-' | b'0'..=b'9' if !in_string => {
                    let literal = &rest[at..];
                    let end = literal.iter().position(|byte| !b"+-.eE0123456789".contains(byte));
                    let (literal, later) = literal.split_at(end.unwrap_or(literal.len()));
                    rest = later;
                    return Some(literal);
                }
                _ => {}
            }
            at += 1;
        }
        None
    })
}

/// A double tells any two decimals of so many significant digits apart.
const DOUBLE_DIGITS: usize = 15;

/// Whether no other literal that survives has the same double. Integers have a rule of their own, see
/// [`IJson`].
fn survives_as_double(literal: &[u8]) -> bool {
    let (mantissa, exponent) = match literal.iter().position(|byte| matches!(byte, b'e' | b'E')) {
        Some(at) => (&literal[..at], true),
        None => (literal, false),
    };
    if !exponent && !mantissa.contains(&b'.') {
        return true;
    }
    let digits: Vec<u8> = mantissa.iter().copied().filter(u8::is_ascii_digit).collect();
    let leading = digits.iter().take_while(|digit| **digit == b'0').count();
    let trailing = digits[leading..].iter().rev().take_while(|digit| **digit == b'0').count();
    let significant = digits.len() - leading - trailing;
    let value = std::str::from_utf8(literal).ok().and_then(|literal| literal.parse::<f64>().ok());
    // Below the normal range a double has fewer digits, and then none.
    significant == 0 || (significant <= DOUBLE_DIGITS && value.is_some_and(f64::is_normal))
}

/// Adds nothing and returns `None` if an escape does not decode to UTF-8.
fn form(digest: &mut Sha256, body: &[u8]) -> Option<()> {
    let mut pairs: Vec<_> = form_urlencoded::parse(body).collect();
    if pairs.iter().any(|(name, value)| name.contains('\u{fffd}') || value.contains('\u{fffd}')) {
        return None;
    }
    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
    digest.part(b"form");
    for (name, value) in pairs {
        digest.part(name.as_bytes());
        digest.part(value.as_bytes());
    }
    Some(())
}

/// Adds nothing and returns `None` unless the body is a well-formed multipart (RFC 2046, section 5.1.1)
/// without preamble or epilogue.
fn multipart(digest: &mut Sha256, body: &[u8], content_type: &str) -> Option<()> {
    let boundary = boundary(content_type)?;
    let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
    let mut rest = body.strip_prefix(&delimiter[2..])?;
    let mut parts: Vec<&[u8]> = Vec::new();
    loop {
        if let Some(end) = rest.strip_prefix(b"--") {
            if !matches!(end, b"" | b"\r\n") {
                return None;
            }
            digest.part(b"multipart");
            parts.iter().for_each(|part| digest.part(part));
            return Some(());
        }
        rest = rest.strip_prefix(b"\r\n")?;
        let end = rest.windows(delimiter.len()).position(|window| window == delimiter)?;
        parts.push(&rest[..end]);
        rest = &rest[end + delimiter.len()..];
    }
}

fn boundary(content_type: &str) -> Option<&str> {
    let value = content_type.split(';').skip(1).find_map(|parameter| {
        let (name, value) = parameter.trim().split_once('=')?;
        name.trim().eq_ignore_ascii_case("boundary").then_some(value.trim())
    })?;
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    (!value.is_empty()).then_some(value)
}

/// JSON without repeated members and without integers that a double cannot tell apart.
struct IJson(Value);

/// Beyond this a double skips integers, so two amounts could have one canonical form.
const SAFE_INTEGER_MAX: u64 = 1 << 53;

impl<'de> Deserialize<'de> for IJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IJsonVisitor;

        impl<'de> Visitor<'de> for IJsonVisitor {
            type Value = Value;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("I-JSON")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(Value::Bool(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
                if value.unsigned_abs() > SAFE_INTEGER_MAX {
                    Err(E::custom("not safe"))
                } else {
                    Ok(value.into())
                }
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
                if value > SAFE_INTEGER_MAX { Err(E::custom("not safe")) } else { Ok(value.into()) }
            }

            fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
                // At the limit itself the literal may have been rounded to it.
                if value.abs() >= SAFE_INTEGER_MAX as f64 {
                    Err(E::custom("not safe"))
                } else {
                    Ok(value.into())
                }
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_string<E>(self, value: String) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut values = Vec::new();
                while let Some(IJson(value)) = seq.next_element()? {
                    values.push(value);
                }
                Ok(Value::Array(values))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut members = Map::new();
                while let Some((name, IJson(value))) = map.next_entry::<String, IJson>()? {
                    if members.insert(name, value).is_some() {
                        return Err(A::Error::custom("repeated member"));
                    }
                }
                Ok(Value::Object(members))
            }
        }

        deserializer.deserialize_any(IJsonVisitor).map(IJson)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn of(content_type: &str, body: &str, mode: BodyMode) -> [u8; 32] {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_str(content_type).expect("a header value"));
        fingerprint("/", &headers, &[], body.as_bytes(), mode).body
    }

    fn same(mode: BodyMode, a: &str, b: &str) -> bool {
        of("", a, mode) == of("", b, mode)
    }

    #[test]
    fn one_changed_byte_is_another_request() {
        assert!(same(BodyMode::Raw, "amount=100", "amount=100"));
        assert!(!same(BodyMode::Raw, "amount=100", "amount=101"));
        assert!(!same(BodyMode::Raw, "", "\0"));
    }

    #[test]
    fn path_query_and_counted_headers_are_the_target() {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_static("1"));
        let counted = [HeaderName::from_static("x-a"), HeaderName::from_static("x-b")];
        let of = |target: &str, headers: &HeaderMap, counted: &[HeaderName]| {
            fingerprint(target, headers, counted, b"", BodyMode::Raw)
        };
        let base = of("/p?a=1", &headers, &counted);
        assert_ne!(base.target, of("/p?a=2", &headers, &counted).target);
        assert_ne!(base.target, of("/P?a=1", &headers, &counted).target);
        assert_eq!(base.body, of("/p?a=2", &headers, &counted).body);
        let mut moved = HeaderMap::new();
        moved.append("x-b", HeaderValue::from_static("1"));
        assert_ne!(base.target, of("/p?a=1", &moved, &counted).target);
        let mut repeated = headers.clone();
        repeated.append("x-a", HeaderValue::from_static("1"));
        assert_ne!(base.target, of("/p?a=1", &repeated, &counted).target);
        let mut other = headers.clone();
        other.append("authorization", HeaderValue::from_static("refreshed"));
        assert_eq!(base.target, of("/p?a=1", &other, &counted).target);
    }

    #[test]
    fn json_ignores_order_and_space_and_nothing_else() {
        let json = |a, b| same(BodyMode::Json, a, b);
        assert!(json(r#"{"a":1,"b":[true,null]}"#, " { \"b\" : [ true , null ] , \"a\" : 1.0 } "));
        assert!(json(r#""\u00e9""#, "\"\u{e9}\""));
        assert!(json("1e2", "100"));
        assert!(json("0.5000000000000000000", "5e-1"));
        assert!(json(r#"["\"1.00000000000000000001", 0.10]"#, r#"["\"1.00000000000000000001",0.1]"#));
        assert!(!json("[1,2]", "[2,1]"));
        assert!(!json(r#"{"a":1}"#, r#"{"a":"1"}"#));
        assert!(!json(r#"{"a":null}"#, "{}"));
        assert!(!json("0.1", "0.10000000000000001665"), "two doubles must not be one");
    }

    #[test]
    fn json_outside_i_json_is_compared_byte_for_byte() {
        for (a, b) in [
            (r#"{"a":1,"a":2}"#, r#"{"a":2}"#),
            (r#"{"x":{"a":1,"a":2}}"#, r#"{"x":{"a":2}}"#),
            ("9007199254740993", "9007199254740992"),
            ("9007199254740993.0", "9007199254740992.0"),
            ("-9007199254740994", " -9007199254740994"),
            (r#"{"amount":123456789012345.671}"#, r#"{"amount":123456789012345.672}"#),
            ("0.1", "0.10000000000000000001"),
            ("0", "1e-400"),
            ("-0.0", "-1e-400"),
            ("1.2345678901e-320", "1.2345678902e-320"),
            ("1e400", " 1e400"),
            (r#""\ud800""#, r#" "\ud800""#),
            ("{", "{ "),
            ("1 2", "1  2"),
        ] {
            assert!(!same(BodyMode::Json, a, b), "{a} and {b}");
            assert!(same(BodyMode::Json, a, a));
        }
        assert!(same(BodyMode::Json, "9007199254740992", " 9007199254740992"));
        let deep = "[".repeat(100_000);
        assert!(same(BodyMode::Json, &deep, &deep), "deep nesting must not overflow the stack");
    }

    #[test]
    fn form_order_counts_only_within_one_name() {
        let form = |a, b| same(BodyMode::Form, a, b);
        assert!(form("a=1&b=2", "b=2&a=1"));
        assert!(form("a=x+y", "a=x%20y"));
        assert!(!form("a=1&a=2", "a=2&a=1"));
        assert!(!form("a=1&b=2", "a=2&b=1"));
        assert!(!form("a=bc", "ab=c"));
        assert!(!form("a=%FF", "a=%FE"), "two bytes that are not UTF-8 must not be one");
    }

    #[test]
    fn multipart_ignores_the_boundary_and_nothing_else() {
        let body = |boundary: &str, file: &str| {
            format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--{boundary}\r\n\
                 Content-Disposition: form-data; name=\"f\"; filename=\"x\"\r\n\r\n{file}\r\n--{boundary}--\r\n"
            )
        };
        let of = |boundary: &str, file: &str| {
            let content_type = format!("multipart/form-data; boundary={boundary}");
            of(&content_type, &body(boundary, file), BodyMode::Auto)
        };
        assert_eq!(of("aaa", "data"), of("----WebKit7x", "data"));
        assert_ne!(of("aaa", "data"), of("aaa", "date"));
        assert_eq!(of("\"a b\"".trim_matches('"'), "x"), of("zz", "x"));
        // A line that only starts like the boundary makes parsers disagree.
        assert_ne!(of("aaa", "\r\n--aaab\r\n"), of("bbb", "\r\n--bbbb\r\n"));
    }

    #[test]
    fn auto_goes_by_content_type_and_encoded_bodies_are_raw() {
        let pretty = " {\"a\": 1}";
        for content_type in ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"]
        {
            assert_eq!(of(content_type, pretty, BodyMode::Auto), of("", pretty, BodyMode::Json));
        }
        assert_eq!(of("text/plain", pretty, BodyMode::Auto), of("", pretty, BodyMode::Raw));
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        let encoded = fingerprint("/", &headers, &[], pretty.as_bytes(), BodyMode::Json);
        assert_eq!(encoded.body, of("", pretty, BodyMode::Raw));
    }
}

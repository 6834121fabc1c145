//! Where a key comes from, and how it stands on the wire.

use std::time::{SystemTime, UNIX_EPOCH};

use http::header::{HeaderMap, HeaderName, HeaderValue};
use onlyonce_core::Key;
use onlyonce_core::identity::MalformedKey;
use sha2::{Digest, Sha256};
use uuid::Builder;

/// The field that carries a key.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// Opens the digest of a derived key. Another name would make every retry a new operation.
const DERIVED_FORMAT: &[u8] = b"onlyonce client key 1";

/// A fresh key: a UUID of version 7 (RFC 9562), which is the time in milliseconds by this machine's clock and
/// 74 random bits. For an operation that nothing else identifies.
///
/// Nothing depends on the clock but speed: large tables of keys take new ones fastest in the order of time.
///
/// # Panics
/// If the system has no randomness.
#[must_use]
pub fn mint() -> Key {
    let mut bytes = [0; 10];
    getrandom::fill(&mut bytes).expect("the system has randomness");
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    key(Builder::from_unix_timestamp_millis(since_epoch.as_millis() as u64, &bytes))
}

/// The key for what a person or a program wants to happen once, such as `derive("charge", "order-4711")`.
///
/// The same parts give the same key on every machine and in every version, other parts another one, and the
/// key does not tell them. Derive it from what identifies the *intent*, never from the request: two equal
/// requests can be two wishes, and one wish can be sent as two different bodies.
#[must_use]
pub fn derive(purpose: &str, id: &str) -> Key {
    let mut digest = Sha256::new();
    for part in [DERIVED_FORMAT, purpose.as_bytes(), id.as_bytes()] {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.finalize()[..16]);
    key(Builder::from_custom_bytes(bytes))
}

fn key(uuid: Builder) -> Key {
    Key::new(uuid.into_uuid().to_string()).expect("a UUID is printable ASCII")
}

/// The key that a request brings with it.
///
/// # Errors
/// Refuses several field lines, and a value that no server can read as a key.
pub(crate) fn of(headers: &HeaderMap, name: &HeaderName) -> Result<Option<Key>, MalformedKey> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(MalformedKey::Repeated);
    }
    // Some servers take bare keys with spaces in them; it is theirs to refuse one.
    Key::from_field(line.as_bytes())
        .or_else(|error| {
            line.to_str().map_err(|_| error.clone()).and_then(|text| Key::new(text).map_err(|_| error))
        })
        .map(Some)
}

/// How a key is written: bare, which every server reads, or quoted where it could not be read bare.
pub(crate) fn field(key: &Key) -> HeaderValue {
    let text = key.as_str();
    let bare = Key::from_field(text.as_bytes()).is_ok_and(|read| read == *key);
    let value = if bare {
        HeaderValue::from_str(text)
    } else {
        HeaderValue::from_str(&format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")))
    };
    value.expect("a key is printable ASCII")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_fresh_keys_are_the_same() {
        let keys: std::collections::HashSet<_> = (0..1_000).map(|_| mint()).collect();
        assert_eq!(keys.len(), 1_000);
        let uuid: uuid::Uuid = mint().as_str().parse().expect("a UUID");
        assert_eq!((uuid.get_version_num(), uuid.get_variant()), (7, uuid::Variant::RFC4122));
    }

    #[test]
    fn a_derived_key_never_changes_and_parts_do_not_run_into_each_other() {
        assert_eq!(derive("charge", "order-4711").as_str(), "6bb4eb6b-6917-85e3-b82d-047b421035d6");
        for (purpose, id) in [("refund", "order-4711"), ("charge", "order-4712"), ("charg", "eorder-4711")] {
            assert_ne!(derive("charge", "order-4711"), derive(purpose, id));
        }
    }

    #[test]
    fn a_key_is_read_back_from_the_wire() {
        for text in ["abc", "order 4711", "a,b", "a\"b\\c", "\"quoted\""] {
            let key = Key::new(text).expect("valid");
            let headers = HeaderMap::from_iter([(IDEMPOTENCY_KEY, field(&key))]);
            assert_eq!(of(&headers, &IDEMPOTENCY_KEY), Ok(Some(key)), "{text}");
        }
        assert_eq!(field(&Key::new("abc").expect("valid")), "abc");
    }

    #[test]
    fn a_callers_value_is_one_line_that_can_be_read() {
        let of = |values: &[&'static str]| {
            let lines = values.iter().map(|value| (IDEMPOTENCY_KEY, HeaderValue::from_static(value)));
            let mut headers = HeaderMap::new();
            lines.for_each(|(name, value)| {
                headers.append(name, value);
            });
            of(&headers, &IDEMPOTENCY_KEY)
        };
        assert_eq!(of(&[]), Ok(None));
        assert_eq!(of(&["order 4711"]), Ok(Some(Key::new("order 4711").expect("valid"))));
        assert_eq!(of(&["a", "a"]), Err(MalformedKey::Repeated));
        assert_eq!(of(&[""]), Err(MalformedKey::Empty));
    }
}

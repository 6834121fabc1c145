//! Which operation a request belongs to: the client's key, and the id that a store files it under.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use sha2::{Digest, Sha256};
use uuid::fmt::Hyphenated;
use uuid::{Uuid, Variant};

use crate::digest::Parts;

/// The longest client key, in bytes.
pub const KEY_BYTES_MAX: usize = 255;

/// The key that a client chose for one operation: 1 to 255 printable ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(String);

impl Key {
    /// A key from a value that is not a header: a message id, a name, an operator's argument.
    ///
    /// # Errors
    /// Refuses what is empty, longer than [`KEY_BYTES_MAX`] bytes or not printable ASCII.
    pub fn new(value: impl Into<String>) -> Result<Self, MalformedKey> {
        let value = value.into();
        match value.bytes().position(|byte| !(b' '..=b'~').contains(&byte)) {
            _ if value.is_empty() => Err(MalformedKey::Empty),
            _ if value.len() > KEY_BYTES_MAX => Err(MalformedKey::TooLong { bytes: value.len() }),
            Some(at) => Err(MalformedKey::NotPrintable { at }),
            None => Ok(Self(value)),
        }
    }

    /// Reads the value of an `Idempotency-Key` field, bare (`abc`) or as the structured string that
    /// draft-ietf-httpapi-idempotency-key-header asks for (`"abc"`, RFC 8941 section 3.3.3, parameters ignored). Both
    /// spellings are the same key.
    ///
    /// # Errors
    /// Refuses a value that is neither. A bare key has no space, comma or quote: a comma is how two
    /// field lines look after a proxy joined them.
    pub fn from_field(value: &[u8]) -> Result<Self, MalformedKey> {
        let value = value.trim_ascii();
        if value.first() == Some(&b'"') {
            return match sfv::Parser::new(value).parse::<sfv::Item>() {
                Ok(sfv::Item { bare_item: sfv::BareItem::String(key), .. }) => Self::new(String::from(key)),
                _ => Err(MalformedKey::BadQuoting),
            };
        }
        if let Some(at) = value.iter().position(|byte| matches!(byte, b' ' | b',' | b'"')) {
            return Err(MalformedKey::Separator { at });
        }
        match std::str::from_utf8(value) {
            Ok(value) => Self::new(value),
            Err(error) => Err(MalformedKey::NotPrintable { at: error.valid_up_to() }),
        }
    }

    /// The key without quotes.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a key was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MalformedKey {
    /// There is nothing in it.
    Empty,
    /// It is longer than [`KEY_BYTES_MAX`].
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
    /// A byte is outside the printable ASCII range.
    NotPrintable {
        /// Offset of that byte.
        at: usize,
    },
    /// A bare key has a space, a comma or a quote in it.
    Separator {
        /// Offset of that byte.
        at: usize,
    },
    /// It starts with a quote and is not a structured string.
    BadQuoting,
    /// There is more than one field line.
    Repeated,
}

impl fmt::Display for MalformedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the key is empty; 1 to 255 printable ASCII characters are allowed"),
            Self::TooLong { bytes } => {
                write!(f, "the key has {bytes} bytes; at most {KEY_BYTES_MAX} are allowed")
            }
            Self::NotPrintable { at } => {
                write!(f, "the key has a byte at offset {at} that is not printable ASCII")
            }
            Self::Separator { at } => write!(
                f,
                "the key has a space, comma or quote at offset {at}; a key with such characters must be quoted"
            ),
            Self::BadQuoting => f.write_str("the key starts with a quote but is not a quoted string"),
            Self::Repeated => f.write_str("there is more than one key; send exactly one field line"),
        }
    }
}

impl std::error::Error for MalformedKey {}

/// The 32 bytes that a store files an operation under. The first 8 depend on the client key alone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id(pub [u8; 32]);

/// How many bytes of an id depend on the client key alone. The other 24 tell operations under one key apart.
const KEY_PREFIX_BYTES: usize = 8;

/// Opens the digest of a client key, so that no other digest can equal one.
const KEY_FORMAT: &[u8] = b"onlyonce key 1";

impl Id {
    /// Where the ids of all operations under this client key are, and few others: whoever knows the key and
    /// not its caller finds them in the order of the ids, without an index of their own. Others are there by chance
    /// alone, unless clients send UUIDs of version 7 that begin alike.
    #[must_use]
    pub fn span(key: &str) -> RangeInclusive<Self> {
        let (mut first, mut last) = ([0; 32], [0xff; 32]);
        for id in [&mut first, &mut last] {
            id[..KEY_PREFIX_BYTES].copy_from_slice(&key_prefix(key));
        }
        Self(first)..=Self(last)
    }
}

/// Eight bytes of a hash, or of the key itself if it is a UUID of version 7: those begin with the time (RFC 9562,
/// section 5.7), so that new rows share pages of the index however large it is.
fn key_prefix(key: &str) -> [u8; KEY_PREFIX_BYTES] {
    if let Some(uuid) = time_ordered(key) {
        return std::array::from_fn(|at| uuid.as_bytes()[at]);
    }
    let mut parts = Sha256::new();
    parts.part(KEY_FORMAT);
    parts.part(key.as_bytes());
    let digest: [u8; 32] = parts.finalize().into();
    std::array::from_fn(|at| digest[at])
}

fn time_ordered(key: &str) -> Option<Uuid> {
    let uuid = Uuid::try_parse(key).ok()?;
    let hyphenated = key.len() == Hyphenated::LENGTH;
    (hyphenated && uuid.get_variant() == Variant::RFC4122 && uuid.get_version_num() == 7).then_some(uuid)
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Id {
    type Err = MalformedId;

    fn from_str(text: &str) -> Result<Self, MalformedId> {
        let mut id = [0; 32];
        if text.len() != 64 || !text.is_ascii() {
            return Err(MalformedId);
        }
        for (byte, digits) in id.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| MalformedId)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| MalformedId)?;
        }
        Ok(Self(id))
    }
}

/// A text that is not an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MalformedId;

impl fmt::Display for MalformedId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not an id; 64 hexadecimal digits are expected")
    }
}

impl std::error::Error for MalformedId {}

/// One operation: who asks for what under which key.
///
/// The same client key from another caller, for another endpoint or in another namespace is another
/// operation, and none can see the outcome of another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    id: Id,
    namespace: String,
    endpoint: String,
    caller: String,
    key: Key,
}

/// Opens the digest of an id, so that no other digest can equal one.
const ID_FORMAT: &[u8] = b"onlyonce id 1";

impl Operation {
    /// The operation with these parts.
    ///
    /// `namespace` is one API; `endpoint` is the method and the path or a stable name for it; `caller`
    /// is who asks as the application knows it, and empty for the anonymous caller.
    #[must_use]
    pub fn new(
        namespace: impl Into<String>,
        endpoint: impl Into<String>,
        caller: impl Into<String>,
        key: Key,
    ) -> Self {
        let (namespace, endpoint, caller) = (namespace.into(), endpoint.into(), caller.into());
        let mut parts = Sha256::new();
        for part in
            [ID_FORMAT, namespace.as_bytes(), endpoint.as_bytes(), caller.as_bytes(), key.0.as_bytes()]
        {
            parts.part(part);
        }
        let mut id = Id(parts.finalize().into());
        id.0.copy_within(..32 - KEY_PREFIX_BYTES, KEY_PREFIX_BYTES);
        id.0[..KEY_PREFIX_BYTES].copy_from_slice(&key_prefix(key.as_str()));
        Self { id, namespace, endpoint, caller, key }
    }

    /// What a store files it under: 8 bytes of SHA-256 over the key, or the first 8 of a key that is a UUID of
    /// version 7, and 24 of SHA-256 over all parts, which are length-prefixed.
    #[must_use]
    pub fn id(&self) -> Id {
        self.id
    }

    /// Which API.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Which method and path, or stable name.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Who asks; empty for the anonymous caller.
    #[must_use]
    pub fn caller(&self) -> &str {
        &self.caller
    }

    /// The client's key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(parts: [&str; 4]) -> Id {
        Operation::new(parts[0], parts[1], parts[2], Key::new(parts[3]).expect("valid")).id()
    }

    #[test]
    fn every_part_is_in_the_identity_and_none_runs_into_the_next() {
        let base = id(["default", "POST /payments", "ann", "k"]);
        for other in [
            ["other", "POST /payments", "ann", "k"],
            ["default", "POST /refunds", "ann", "k"],
            ["default", "POST /payments", "bob", "k"],
            ["default", "POST /payments", "ann", "k2"],
            ["default", "POST /paymentsa", "nn", "k"],
            ["defaultPOST", " /payments", "ann", "k"],
        ] {
            assert_ne!(base, id(other), "{other:?}");
        }
    }

    /// A changed digest would turn every key in every store into a new operation.
    #[test]
    fn the_id_never_changes() {
        assert_eq!(
            id(["default", "POST /payments", "", "order-4711"]).to_string(),
            "b5fb08524a1dff576863ee634b666e4f38514ecd657ff3fe00d622f3c00c5ec7",
        );
        let id = id(["default", "POST /payments", "", "order-4711"]);
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!("abc".parse::<Id>(), Err(MalformedId));
    }

    #[test]
    fn uuids_of_version_7_stand_in_the_order_of_their_time() {
        let of = |key| id(["default", "POST /payments", "ann", key]);
        let keys = [
            "019ad6c5-8e00-7b3a-9c1d-2f4e6a8b0c1d",
            "019ad6c5-8e00-7b3b-8c1d-2f4e6a8b0c1d",
            "019ad6c5-8e01-7000-bc1d-2f4e6a8b0c1d",
        ];
        assert!(keys.is_sorted_by(|earlier, later| of(earlier) < of(later)));
        assert_eq!(
            of(keys[0]).to_string(),
            "019ad6c58e007b3a11f1616ef7c28b174306bfa1c5df233d8831c27374723bca",
        );
        assert!(Id::span(keys[0]).contains(&of(keys[0])) && !Id::span(keys[0]).contains(&of(keys[1])));
        // Two spellings are two keys, and so are two operations under one.
        assert_ne!(of(keys[0]), of("019AD6C5-8E00-7B3A-9C1D-2F4E6A8B0C1D"));
        assert_ne!(of(keys[0]), id(["default", "POST /payments", "bob", keys[0]]));
        for other in [
            "019ad6c5-8e00-4b3a-9c1d-2f4e6a8b0c1d",
            "019ad6c5-8e00-7b3a-1c1d-2f4e6a8b0c1d",
            "019ad6c58e007b3a9c1d2f4e6a8b0c1d",
            "{019ad6c5-8e00-7b3a-9c1d-2f4e6a8b0c1d}",
        ] {
            assert!(!of(other).to_string().starts_with("019ad6c5"), "{other}");
        }
    }

    #[test]
    fn operations_under_one_key_stand_together() {
        let span = Id::span("k");
        for parts in [["default", "POST /payments", "ann", "k"], ["other", "POST /refunds", "", "k"]] {
            assert!(span.contains(&id(parts)), "{parts:?}");
        }
        for key in ["k2", "K", "kk"] {
            assert!(!span.contains(&id(["default", "POST /payments", "ann", key])), "{key}");
        }
        assert_eq!(span.start().0[..8], span.end().0[..8]);
    }

    #[test]
    fn bare_and_quoted_are_the_same_key() {
        for (field, key) in [
            ("abc", "abc"),
            (" abc ", "abc"),
            ("\"abc\"", "abc"),
            ("\"abc\";v=1", "abc"),
            ("\"a\\\"b\\\\c\"", "a\"b\\c"),
            ("\"a b,c\"", "a b,c"),
            ("2f1c-~!'", "2f1c-~!'"),
            (&"k".repeat(255), &"k".repeat(255)),
        ] {
            assert_eq!(Key::from_field(field.as_bytes()).map(|k| k.0), Ok(key.to_owned()), "{field}");
        }
    }

    #[test]
    fn a_malformed_key_is_refused_with_its_reason() {
        use MalformedKey::*;
        for (field, reason) in [
            (&b""[..], Empty),
            (b"  ", Empty),
            (b"\"\"", Empty),
            (&[b'k'; 256], TooLong { bytes: 256 }),
            (b"a b", Separator { at: 1 }),
            (b"a,b", Separator { at: 1 }),
            (b"ab\"", Separator { at: 2 }),
            (b"\"ab", BadQuoting),
            (b"\"ab\" x", BadQuoting),
            (b"\"ab\", \"cd\"", BadQuoting),
            (b"\"a\\b\"", BadQuoting),
            (b"a\tb", NotPrintable { at: 1 }),
            (b"a\x7f", NotPrintable { at: 1 }),
            ("k\u{e9}".as_bytes(), NotPrintable { at: 1 }),
            (b"k\xff", NotPrintable { at: 1 }),
        ] {
            assert_eq!(Key::from_field(field), Err(reason), "{}", field.escape_ascii());
        }
    }
}

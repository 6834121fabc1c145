//! Keys for side effects outside of the database, such as a card charge: for whoever carries them out to
//! tell a retry from a new order.
//!
//! ```text
//! key:      SHA-256 of (format · id · label), each part with its length
//!           · of an item: SHA-256 of (format · key · item)
//! uuid:     version 5, of the key in a namespace of Onlyonce
//! at_most:  the key in lower-case base32 (RFC 4648, no padding), cut to the provider's limit
//! ```
//!
//! A key is the same on every rerun and on every instance, for as long as the namespace, the endpoint, the
//! caller, the client's key and the label stay the same. It is not the operation's [`Id`], and the client's
//! key cannot be read from it. It is no secret, though: whoever can guess all the parts can compute it.
//!
//! What is derived here never changes: a changed derivation would charge twice.
//!
//! [The page on downstream keys] lists what common providers accept. A provider must remember its keys for at
//! least as long as the work may be retried; what it has forgotten it does again.
//!
//! [The page on downstream keys]: https://github.com/onlyonce-rs/onlyonce/blob/main/docs/downstream-keys.md
//!
//! # Example
//!
//! ```
//! use onlyonce_core::{Key, Operation};
//!
//! let payment = Operation::new("default", "POST /payments", "ann", Key::new("order-4711")?);
//! let charge = payment.downstream("charge");
//!
//! // A provider that takes UUIDs, and one that takes 32 characters.
//! assert_eq!(charge.uuid(), payment.downstream("charge").uuid());
//! assert_eq!(charge.at_most(32)?.len(), 32);
//!
//! // Too short to tell two operations apart safely.
//! assert!(charge.at_most(10).is_err());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::digest::Parts;
use crate::identity::{Id, Operation};

/// Opens the digest of a key, so that no other digest can equal one.
const FORMAT: &[u8] = b"onlyonce downstream 1";

/// The same for one item of several.
const FORMAT_OF: &[u8] = b"onlyonce downstream of 1";

/// The namespace of the UUIDs, drawn at random once.
const UUID_NAMESPACE: Uuid = Uuid::from_u128(0xc93b_56c8_239a_479a_8fcf_a07c_2da6_da03);

/// The fewest characters that [`Downstream::at_most`] gives: 80 bits. Of a billion keys, two are the same
/// with a probability of one in two million.
pub const CHARS_MIN: usize = 16;

/// The characters of a whole key: 256 bits.
pub const CHARS_MAX: usize = 52;

impl Operation {
    /// The key of the side effect that the work calls `label`; any text will do, and a work with two side
    /// effects has two labels.
    #[must_use]
    pub fn downstream(&self, label: &str) -> Downstream {
        self.id().downstream(label)
    }
}

impl Id {
    /// As [`Operation::downstream`].
    #[must_use]
    pub fn downstream(self, label: &str) -> Downstream {
        Downstream(digest([FORMAT, &self.0, label.as_bytes()]))
    }
}

/// The key of one side effect, in the shape that its provider takes.
///
/// Choose one shape for each provider and stay with it: to the provider, another one is another key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Downstream([u8; 32]);

impl Downstream {
    /// The key of one of several side effects with the same label: `downstream("refund").of("line-7")`.
    ///
    /// `item` is what the item is called wherever the work runs again. Its number in a list will do only if
    /// the list is always in the same order.
    #[must_use]
    pub fn of(self, item: &str) -> Self {
        Self(digest([FORMAT_OF, &self.0, item.as_bytes()]))
    }

    /// An RFC 9562 UUID, in 36 characters with hyphens.
    ///
    /// Version 5 (by name): version 8 would say it better, but many a validator knows only 1 to 5.
    #[must_use]
    pub fn uuid(self) -> String {
        Uuid::new_v5(&UUID_NAMESPACE, &self.0).hyphenated().to_string()
    }

    /// Lower-case letters and digits, as many as a provider's limit allows but at most [`CHARS_MAX`]; five
    /// bits each. A provider that ignores case can take them.
    ///
    /// # Errors
    /// Refuses a limit below [`CHARS_MIN`]: the provider could take two operations for one.
    pub fn at_most(self, chars: usize) -> Result<String, LimitTooShort> {
        if chars < CHARS_MIN {
            return Err(LimitTooShort { chars });
        }
        Ok(base32(&self.0).take(chars).collect())
    }
}

impl fmt::Debug for Downstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Downstream({})", self.uuid())
    }
}

/// A provider's limit under which keys would not be told apart safely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitTooShort {
    /// The limit, in characters.
    pub chars: usize,
}

impl fmt::Display for LimitTooShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { chars } = self;
        write!(
            f,
            "a key of {chars} characters is too short to be told from others; at least {CHARS_MIN} are needed"
        )
    }
}

impl std::error::Error for LimitTooShort {}

fn digest(parts: [&[u8]; 3]) -> [u8; 32] {
    let mut digest = Sha256::new();
    parts.into_iter().for_each(|part| digest.part(part));
    digest.finalize().into()
}

fn base32(bytes: &[u8; 32]) -> impl Iterator<Item = char> {
    const BITS: usize = 5;
    const ALPHABET: &[u8; 1 << BITS] = b"abcdefghijklmnopqrstuvwxyz234567";
    (0..CHARS_MAX).map(|at| {
        let (byte, shift) = (at * BITS / 8, at * BITS % 8);
        let next = bytes.get(byte + 1).copied().unwrap_or(0);
        let window = u16::from_be_bytes([bytes[byte], next]) << shift;
        char::from(ALPHABET[usize::from(window >> (16 - BITS))])
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::identity::Key;

    fn operation(key: &str) -> Operation {
        Operation::new("default", "POST /payments", "", Key::new(key).expect("valid"))
    }

    /// A changed derivation would charge twice. The values were computed with other software.
    #[test]
    fn what_is_derived_never_changes() {
        let charge = operation("order-4711").downstream("charge");
        assert_eq!(charge.uuid(), "38daaa36-b7d9-55ab-8dbb-26abe449b255");
        assert_eq!(
            charge.at_most(255).as_deref(),
            Ok("m7qis7w5xqizyz24hft4ulhhk7pt2zsgkfgnwtrdi6tv7yhynfaa")
        );
        let seat = charge.of("seat 12A");
        assert_eq!(seat.uuid(), "06de6e85-79fe-5933-bed4-48dda663090e");
        assert_eq!(seat.at_most(16).as_deref(), Ok("5dttf4o2w7ghsni6"));
        assert_eq!(operation("order-4711").downstream("").uuid(), "25d742f3-325a-5a39-a50e-e33c5916ee1e");
    }

    #[test]
    fn every_part_counts_and_none_runs_into_the_next() {
        let (a, b) = (operation("a"), operation("b"));
        let keys = [
            a.downstream("charge"),
            b.downstream("charge"),
            a.downstream("email"),
            a.downstream("Charge"),
            a.downstream("charge "),
            a.downstream(""),
            a.downstream("").of("charge"),
            a.downstream("charge").of(""),
            a.downstream("charge").of("1"),
            a.downstream("charge1"),
            a.downstream("charge").of("1").of("1"),
            a.downstream("charge").of("11"),
            a.downstream("charge1").of("1"),
        ];
        assert_eq!(keys.iter().map(|key| key.uuid()).collect::<HashSet<_>>().len(), keys.len());
        assert_eq!(keys.iter().map(|key| key.at_most(16).ok()).collect::<HashSet<_>>().len(), keys.len());
    }

    #[test]
    fn neither_the_id_nor_the_clients_key_shows() {
        let operation = operation("order-4711");
        let charge = operation.downstream("charge");
        assert_ne!(charge.0, operation.id().0);
        for text in [charge.uuid(), charge.at_most(CHARS_MAX).expect("long enough"), format!("{charge:?}")] {
            assert!(!text.contains("4711"), "{text}");
        }
    }

    #[test]
    fn a_uuid_passes_strict_validators() {
        let text = operation("a").downstream("charge").uuid();
        let uuid = Uuid::parse_str(&text).expect("a UUID");
        assert_eq!((uuid.get_version_num(), uuid.get_variant()), (5, uuid::Variant::RFC4122));
        let shape: Vec<usize> = text.split('-').map(str::len).collect();
        assert_eq!(shape, [8, 4, 4, 4, 12]);
        assert!(text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f' | b'-')));
    }

    #[test]
    fn a_limit_is_kept_or_refused() {
        let charge = operation("a").downstream("charge");
        assert_eq!(charge.at_most(0), Err(LimitTooShort { chars: 0 }));
        assert_eq!(charge.at_most(CHARS_MIN - 1), Err(LimitTooShort { chars: 15 }));
        for (limit, chars) in [(16, 16), (36, 36), (52, 52), (53, 52), (usize::MAX, 52)] {
            let text = charge.at_most(limit).expect("long enough");
            assert_eq!(text.len(), chars);
            assert!(text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'2'..=b'7')), "{text}");
        }
    }
}

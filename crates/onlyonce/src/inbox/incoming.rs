//! Which messages are the same.

use std::fmt;

use http::HeaderMap;
use onlyonce_core::fingerprint::fingerprint;
use onlyonce_core::{BodyMode, Fingerprint, Key};
use sha2::{Digest, Sha256};

/// A message as it was delivered: its id, and what it says.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    pub(super) id: &'a str,
    payload: Option<&'a [u8]>,
}

impl<'a> Incoming<'a> {
    /// The message that its producer calls `id`.
    #[must_use]
    pub fn new(id: &'a str) -> Self {
        Self { id, payload: None }
    }

    /// The same with its payload, byte for byte, so that another payload under the same id is refused. Give it always or
    /// never: a message that was received with it is another than one that was received without it.
    #[must_use]
    pub fn payload(self, payload: &'a [u8]) -> Self {
        Self { payload: Some(payload), ..self }
    }

    /// A payload, even an empty one, differs from none by the target.
    pub(super) fn fingerprint(&self) -> Fingerprint {
        let target = if self.payload.is_some() { "payload" } else { "" };
        fingerprint(target, &HeaderMap::new(), &[], self.payload.unwrap_or_default(), BodyMode::Raw)
    }
}

/// The key that a message id is kept under, for people and for whoever looks it up.
///
/// An id of 1 to 255 printable ASCII characters is its own key. Any other, and one that starts with [`HASHED_PREFIX`]
/// itself, is `sha256:` and the SHA-256 of its UTF-8 bytes in lower-case hexadecimal digits: so two ids never share
/// one.
///
/// # Errors
/// If the id is empty.
pub fn key_of(id: &str) -> Result<Key, NoId> {
    if id.is_empty() {
        return Err(NoId);
    }
    match Key::new(id) {
        Ok(key) if !id.starts_with(HASHED_PREFIX) => Ok(key),
        _ => {
            let digest: String = Sha256::digest(id).iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(Key::new(format!("{HASHED_PREFIX}{digest}")).expect("hexadecimal digits are a key"))
        }
    }
}

/// How the key of an id starts that cannot be a key itself.
pub const HASHED_PREFIX: &str = "sha256:";

/// A message that has no id: nobody can tell whether it was processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoId;

impl fmt::Display for NoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the message has no id, so it cannot be told from another; its producer must give it one")
    }
}

impl std::error::Error for NoId {}

#[cfg(test)]
mod tests {
    use super::*;

    /// A changed key would process every message again.
    #[test]
    fn the_key_of_an_id_never_changes() {
        let long = "m".repeat(256);
        for (id, key) in [
            ("order-4711", "order-4711"),
            ("an id, \"quoted\"", "an id, \"quoted\""),
            (&long[..255], &long[..255]),
            (&long, "sha256:04e6003138b0493df4d5786ebd119fc9161eceffa9db5425aac73220920f13ce"),
            ("bestellung-\u{fc}", "sha256:2f2e118578fd014fdfa97d3c29e8acba686f458299f592d1cf5ef9781d3b3325"),
            ("sha256:order", "sha256:00a0d773029f4169179f3c23db04c79112d83ac60c367255e2f1ac9f3220bf1c"),
        ] {
            assert_eq!(key_of(id).expect("it has an id").as_str(), key, "{id}");
        }
        assert_eq!(key_of(""), Err(NoId));
    }

    /// A changed fingerprint would refuse every copy of a message that was received before.
    #[test]
    fn the_fingerprint_never_changes_and_tells_payloads_apart() {
        let hex = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let of = |incoming: Incoming<'_>| {
            let Fingerprint { target, body } = incoming.fingerprint();
            [hex(target), hex(body)]
        };
        let message = Incoming::new("m");
        // The values were computed with other software.
        assert_eq!(
            of(message.payload(b"100")),
            [
                "de9c0a6294000e02e2bd46540f1cab107ebb76bcda5514337a877528374ba9e6",
                "47afbbbc460fe6362be00dc3a7ce9e42900733a8531bfb18ce81259f900a33b3",
            ]
        );
        let prints =
            [of(message), of(message.payload(b"")), of(message.payload(b"1")), of(message.payload(b"2"))];
        for (at, print) in prints.iter().enumerate() {
            assert!(!prints[..at].contains(print), "{at}");
        }
        // The id is not in it.
        assert_eq!(of(message.payload(b"1")), of(Incoming::new("n").payload(b"1")));
    }
}

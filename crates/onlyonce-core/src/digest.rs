//! Length-prefixed digests: no two lists of parts are ever the same bytes.

use sha2::{Digest, Sha256};

/// Adds parts to a digest so that none can run into the next.
pub(crate) trait Parts {
    /// Adds the part's length in bytes and then the part.
    fn part(&mut self, part: &[u8]);
}

impl Parts for Sha256 {
    fn part(&mut self, part: &[u8]) {
        self.update((part.len() as u64).to_be_bytes());
        self.update(part);
    }
}

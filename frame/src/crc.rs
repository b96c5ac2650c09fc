//! CRC-32C (Castagnoli, RFC 3720 appendix B.4), by the `crc32c` crate: by the processor's own
//! instruction where it has one.
//!
//! The state can be kept and continued ([`Crc32c`] is `Copy`), which is what makes stamping a
//! prepared frame cost the same at any frame size: only the bytes after the prepared part are read.

/// A running CRC-32C.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Crc32c(u32);

impl Crc32c {
    /// Nothing read yet.
    pub const fn new() -> Self {
        Self(0)
    }

    /// The state after `bytes` as well.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Self {
        Self(::crc32c::crc32c_append(self.0, bytes))
    }

    /// The checksum of everything read.
    pub const fn value(self) -> u32 {
        self.0
    }
}

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    ::crc32c::crc32c(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The polynomial 0x1EDC6F41 with its bits reversed.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    #[test]
    fn known_answers() {
        // RFC 3720 appendix B.4, and the check value of the CRC catalogue.
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        for (bytes, expected) in [
            (&b""[..], 0),
            (b"123456789", 0xe306_9283),
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (&descending, 0x113f_db5c),
        ] {
            assert_eq!(crc32c(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn any_split_gives_the_same_value() {
        let bytes: Vec<u8> = (0..100u8).map(|n| n.wrapping_mul(37)).collect();
        let slow = !bytes.iter().fold(!0u32, |mut crc, byte| {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 {
                    (crc >> 1) ^ POLYNOMIAL
                } else {
                    crc >> 1
                };
            }
            crc
        });
        for at in 0..=bytes.len() {
            let (head, tail) = bytes.split_at(at);
            assert_eq!(
                Crc32c::new().update(head).update(tail).value(),
                slow,
                "split at {at}"
            );
        }
    }
}

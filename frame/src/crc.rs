//! CRC-32C (Castagnoli, RFC 3720 appendix B.4) in software, 16 bytes a step.
//!
//! The state can be kept and continued ([`Crc32c`] is `Copy`), which is what makes stamping a
//! prepared frame cost the same at any frame size: only the bytes after the prepared part are read.

/// A running CRC-32C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crc32c(u32);

impl Crc32c {
    /// Nothing read yet.
    pub const fn new() -> Self {
        Self(!0)
    }

    /// The state after `bytes` as well.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Self {
        let mut crc = self.0;
        let (blocks, rest) = bytes.as_chunks::<16>();
        for block in blocks {
            crc = step16(crc, block);
        }
        let (words, rest) = rest.as_chunks::<8>();
        for word in words {
            crc = step8(crc, word);
        }
        for byte in rest {
            crc = (crc >> 8) ^ TABLES[0][((crc ^ u32::from(*byte)) & 0xff) as usize];
        }
        Self(crc)
    }

    /// The checksum of everything read.
    pub const fn value(self) -> u32 {
        !self.0
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    Crc32c::new().update(bytes).value()
}

fn step16(crc: u32, block: &[u8; 16]) -> u32 {
    let c = crc.to_le_bytes();
    let t = &TABLES;
    t[15][usize::from(block[0] ^ c[0])]
        ^ t[14][usize::from(block[1] ^ c[1])]
        ^ t[13][usize::from(block[2] ^ c[2])]
        ^ t[12][usize::from(block[3] ^ c[3])]
        ^ t[11][usize::from(block[4])]
        ^ t[10][usize::from(block[5])]
        ^ t[9][usize::from(block[6])]
        ^ t[8][usize::from(block[7])]
        ^ t[7][usize::from(block[8])]
        ^ t[6][usize::from(block[9])]
        ^ t[5][usize::from(block[10])]
        ^ t[4][usize::from(block[11])]
        ^ t[3][usize::from(block[12])]
        ^ t[2][usize::from(block[13])]
        ^ t[1][usize::from(block[14])]
        ^ t[0][usize::from(block[15])]
}

fn step8(crc: u32, word: &[u8; 8]) -> u32 {
    let c = crc.to_le_bytes();
    let t = &TABLES;
    t[7][usize::from(word[0] ^ c[0])]
        ^ t[6][usize::from(word[1] ^ c[1])]
        ^ t[5][usize::from(word[2] ^ c[2])]
        ^ t[4][usize::from(word[3] ^ c[3])]
        ^ t[3][usize::from(word[4])]
        ^ t[2][usize::from(word[5])]
        ^ t[1][usize::from(word[6])]
        ^ t[0][usize::from(word[7])]
}

/// The polynomial 0x1EDC6F41 with its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// `TABLES[n][b]`: what byte `b` contributes when `n` more bytes follow it in the block.
static TABLES: [[u32; 256]; 16] = tables();

const fn tables() -> [[u32; 256]; 16] {
    let mut tables = [[0; 256]; 16];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ POLYNOMIAL
            } else {
                crc >> 1
            };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut n = 1;
    while n < 16 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[n - 1][byte];
            tables[n][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        n += 1;
    }
    tables
}

#[cfg(test)]
mod tests {
    use super::*;

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

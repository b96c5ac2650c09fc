//! The Internet checksum (RFC 1071) of large buffers.

/// A ones'-complement sum that is not folded yet. Its 16-bit words are in the machine's byte order:
/// the sum is the same with its bytes swapped, whichever order they are added in.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds bytes; an odd number of them only at the end.
    #[must_use]
    #[inline]
    pub fn bytes(self, bytes: &[u8]) -> Self {
        // Eight sums of 32-bit words, so that none waits for another.
        let mut sums = [0_u64; 8];
        let mut blocks = bytes.chunks_exact(32);
        for block in &mut blocks {
            for (sum, word) in sums.iter_mut().zip(block.chunks_exact(4)) {
                *sum += u64::from(u32::from_ne_bytes([word[0], word[1], word[2], word[3]]));
            }
        }
        let mut rest = blocks.remainder().chunks_exact(2);
        let mut total = self.0 + sums.into_iter().sum::<u64>();
        for pair in &mut rest {
            total += u64::from(u16::from_ne_bytes([pair[0], pair[1]]));
        }
        if let [last] = *rest.remainder() {
            total += u64::from(u16::from_ne_bytes([last, 0]));
        }
        Self(total)
    }

    /// Adds a number, as its four bytes in network order.
    #[must_use]
    #[inline]
    pub fn number(self, number: u32) -> Self {
        self.bytes(&number.to_be_bytes())
    }

    /// The checksum's two bytes, as they stand in a header.
    #[must_use]
    #[inline]
    pub fn finish(self) -> [u8; 2] {
        // After the first step 33 bits, after the second 18, after the third 17, then 16.
        let mut sum = self.0;
        sum = (sum >> 32) + (sum & 0xffff_ffff);
        for _ in 0..3 {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        (!(sum as u16)).to_ne_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 1071, 4.1, in network order.
    fn simple(bytes: &[u8]) -> [u8; 2] {
        let mut sum = 0_u64;
        for pair in bytes.chunks(2) {
            let low = pair.get(1).copied().unwrap_or(0);
            sum += u64::from(u16::from_be_bytes([pair[0], low]));
        }
        while sum > 0xffff {
            sum = (sum >> 16) + (sum & 0xffff);
        }
        (!(sum as u16)).to_be_bytes()
    }

    #[test]
    fn the_example_of_the_rfc() {
        // RFC 1071, 3: the sum is ddf2.
        let sum = Sum::default().bytes(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]);
        assert_eq!(sum.finish(), (!0xddf2_u16).to_be_bytes());
    }

    #[test]
    fn any_bytes_have_the_sum_that_the_rfc_describes() {
        let bytes: Vec<u8> = (0..70_000_u32).map(|i| ((i * 7919) >> 3) as u8).collect();
        for len in (0..200).chain([1448, 65_535, 70_000]) {
            let (whole, half) = (&bytes[..len], len / 4 * 2);
            assert_eq!(Sum::default().bytes(whole).finish(), simple(whole), "{len}");
            let parts = Sum::default().bytes(&whole[..half]).bytes(&whole[half..]);
            assert_eq!(parts.finish(), simple(whole), "{len}");
        }
        let ones = [0xff; 70_000];
        assert_eq!(Sum::default().bytes(&ones).finish(), [0, 0]);
        let number = Sum::default().number(0x0102_0304).finish();
        assert_eq!(number, simple(&[1, 2, 3, 4]));
    }
}

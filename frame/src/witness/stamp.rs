//! Stamping a prepared frame with its sequence and its CRC, whatever its length, without reading it.

use std::sync::LazyLock;

use crc32c::{crc32c, crc32c_append};

/// What [`Shape::write`](super::Shape::write) prepared.
#[derive(Debug, Clone, Copy)]
pub struct Stamp {
    /// The CRC of the frame with sequence 0.
    of_zero: u32,
    changes: &'static Changes,
    balanced: bool,
}

/// How each byte of a sequence changes the CRC, from the lowest on.
///
/// A CRC is linear: the CRCs of two frames of one length differ by a value that depends on where and
/// how the frames differ, and not on what they have in common. So the CRC of any sequence is that of
/// sequence 0, exclusive-or one table entry per byte.
#[derive(Debug)]
struct Changes([[u32; 256]; 8]);

impl Stamp {
    /// For frames that begin with `prefix` and end with a trailer of one of the two kinds.
    pub(super) fn new(prefix: &[u8], balanced: bool) -> Self {
        Self {
            of_zero: crc32c_append(crc32c(prefix), changing(0, balanced).as_slice()),
            changes: if balanced { &BALANCED } else { &PLAIN },
            balanced,
        }
    }

    /// Writes `seq` and the CRC into a frame that [`Shape::write`](super::Shape::write) filled and
    /// returned this for.
    ///
    /// # Panics
    /// If `frame` is shorter than the trailer, which no frame written by `Shape::write` is.
    #[inline]
    pub fn put(&self, frame: &mut [u8], seq: u64) {
        let crc = self.of_zero ^ self.changes.of(seq);
        if self.balanced {
            let tail = frame
                .last_chunk_mut::<24>()
                .expect("a written frame has its trailer");
            tail[..8].copy_from_slice(&(!seq).to_be_bytes());
            tail[8..16].copy_from_slice(&seq.to_be_bytes());
            tail[16..20].copy_from_slice(&crc.to_be_bytes());
            tail[20..].copy_from_slice(&(!crc).to_be_bytes());
        } else {
            let tail = frame
                .last_chunk_mut::<12>()
                .expect("a written frame has its trailer");
            tail[..8].copy_from_slice(&seq.to_be_bytes());
            tail[8..].copy_from_slice(&crc.to_be_bytes());
        }
    }
}

impl Changes {
    fn of_trailers(balanced: bool) -> Self {
        let crc = |seq| crc32c(&changing(seq, balanced));
        let change = |byte: usize, value: usize| crc((value as u64) << (8 * byte)) ^ crc(0);
        Self(std::array::from_fn(|byte| {
            std::array::from_fn(|value| change(byte, value))
        }))
    }

    #[inline]
    fn of(&self, seq: u64) -> u32 {
        let bytes = self.0.iter().zip(seq.to_le_bytes());
        bytes.fold(0, |crc, (table, byte)| crc ^ table[usize::from(byte)])
    }
}

/// The bytes of a trailer that a sequence changes, without the CRC.
fn changing(seq: u64, balanced: bool) -> Vec<u8> {
    match balanced {
        true => [(!seq).to_be_bytes(), seq.to_be_bytes()].concat(),
        false => seq.to_be_bytes().to_vec(),
    }
}

static PLAIN: LazyLock<Changes> = LazyLock::new(|| Changes::of_trailers(false));
static BALANCED: LazyLock<Changes> = LazyLock::new(|| Changes::of_trailers(true));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::witness::seed;

    #[test]
    fn the_crc_is_that_of_the_whole_frame() {
        let mut random = seed("the_crc_is_that_of_the_whole_frame");
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        for balanced in [false, true] {
            let trailer = if balanced { 24 } else { 12 };
            let prefix: Vec<u8> = (0..97_u8).map(|n| n.wrapping_mul(37)).collect();
            let stamp = Stamp::new(&prefix, balanced);
            let mut frame = [&prefix[..], &vec![0; trailer]].concat();
            let ends = [0, 1, 255, 256, 1 << 40, u64::MAX - 1, u64::MAX];
            for seq in ends.into_iter().chain((0..1000).map(|_| next())) {
                stamp.put(&mut frame, seq);
                let at = prefix.len() + if balanced { 16 } else { 8 };
                let crc = u32::from_be_bytes(*frame[at..].first_chunk().expect("four bytes"));
                assert_eq!(crc, crc32c(&frame[..at]), "{seq:#x}, balanced: {balanced}");
            }
        }
    }
}

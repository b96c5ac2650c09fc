//! Parts of a frame that many filters compare with constants: the index looks frames up by them.

use super::analyse::Base;

/// Some bytes of the frames of one Ethertype, or of all.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Field {
    /// The two bytes at offset 12; `None`: any.
    pub(super) gate: Option<u16>,
    /// Not empty, at most [`MAX_PARTS`].
    pub(super) parts: Vec<Part>,
}

/// One load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Part {
    pub(super) base: Base,
    /// Offset in bytes from the base.
    pub(super) at: u32,
    /// 1, 2, 4 or 8 bytes, big-endian.
    pub(super) len: u8,
    /// Which of its bits count.
    pub(super) mask: u64,
}

/// The most loads of a field.
pub(super) const MAX_PARTS: usize = 6;

impl Field {
    /// What a frame has there; `None` if it is too short.
    ///
    /// Fields of up to eight bytes give them as they are; longer ones give a hash, which two
    /// different values may share.
    #[inline]
    pub(super) fn of(&self, bytes: &[u8]) -> Option<u64> {
        match &self.parts[..] {
            [only] => only.load(bytes),
            parts if self.is_exact() => parts.iter().try_fold(0, |sum, part| {
                Some(sum << (8 * part.len) | part.load(bytes)?)
            }),
            parts => parts
                .iter()
                .try_fold(0, |sum, part| Some(mix(sum ^ part.load(bytes)?))),
        }
    }

    /// As [`of`](Self::of), of a frame whose parts have these values.
    pub(super) fn join(&self, values: &[u64]) -> u64 {
        let parts = self.parts.iter().zip(values);
        if self.is_exact() && self.parts.len() > 1 {
            parts.fold(0, |sum, (part, value)| sum << (8 * part.len) | value)
        } else if let [only] = values {
            *only
        } else {
            parts.fold(0, |sum, (_, value)| mix(sum ^ value))
        }
    }

    /// Whether different bytes have different values.
    #[inline]
    pub(super) fn is_exact(&self) -> bool {
        self.parts.iter().map(|part| part.len).sum::<u8>() <= 8
    }
}

impl Part {
    /// Whether a byte is one of those it loads.
    pub(super) fn covers(&self, base: Base, at: u32) -> bool {
        self.base == base && at >= self.at && at - self.at < u32::from(self.len)
    }

    #[inline]
    pub(super) fn load(&self, bytes: &[u8]) -> Option<u64> {
        let at = match self.base {
            Base::Start => self.at as usize,
            Base::Header(k) => {
                let x = usize::from(bytes.get(k as usize)? & 0xf) * 4;
                x + self.at as usize
            }
        };
        let rest = bytes.get(at..)?;
        let value = match self.len {
            1 => rest.first().map(|&byte| u64::from(byte)),
            2 => rest
                .first_chunk()
                .map(|half| u64::from(u16::from_be_bytes(*half))),
            4 => rest
                .first_chunk()
                .map(|word| u64::from(u32::from_be_bytes(*word))),
            _ => rest.first_chunk().map(|long| u64::from_be_bytes(*long)),
        };
        Some(value? & self.mask)
    }
}

/// Spreads a value over 64 bits; one-to-one.
#[inline]
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

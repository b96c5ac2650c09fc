//! Capture files: classic pcap and pcapng, of any byte order and resolution.
//!
//! Reading is a codec without I/O: [`classic`] and [`ng`] take the bytes of a header, a record or a
//! block and say what is in them. The reader brings the bytes and decides how long a
//! block may be, and what an end within a block means: a damaged file, or a writer still at work.
//!
//! Writing is [`mod@write`]: into memory that is there already.
//!
//! Formats: draft-ietf-opsawg-pcap, draft-ietf-opsawg-pcapng, <https://www.tcpdump.org/linktypes.html>.

pub mod classic;
pub mod ng;
pub mod write;

/// The byte order of a file, or of a section of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    /// Least significant byte first.
    #[default]
    Little,
    /// Most significant byte first.
    Big,
}

impl Order {
    /// The number of 16 bits at `at`.
    ///
    /// # Panics
    /// If `bytes` ends before it, as for the others.
    #[inline]
    pub fn u16(self, bytes: &[u8], at: usize) -> u16 {
        let half = [bytes[at], bytes[at + 1]];
        match self {
            Self::Little => u16::from_le_bytes(half),
            Self::Big => u16::from_be_bytes(half),
        }
    }

    /// The number of 32 bits at `at`.
    #[inline]
    pub fn u32(self, bytes: &[u8], at: usize) -> u32 {
        let word = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        match self {
            Self::Little => u32::from_le_bytes(word),
            Self::Big => u32::from_be_bytes(word),
        }
    }

    /// The number of 64 bits at `at`.
    #[inline]
    pub fn u64(self, bytes: &[u8], at: usize) -> u64 {
        let (first, second) = (self.u32(bytes, at), self.u32(bytes, at + 4));
        match self {
            Self::Little => u64::from(second) << 32 | u64::from(first),
            Self::Big => u64::from(first) << 32 | u64::from(second),
        }
    }
}

/// What a file says that cannot be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bad {
    /// The byte where it shows, from where the codec began to look.
    pub at: usize,
    /// What is wrong there.
    pub what: String,
}

impl Bad {
    /// Something wrong at a byte.
    pub fn new(at: usize, what: impl Into<String>) -> Self {
        let what = what.into();
        Self { at, what }
    }
}

/// How the timestamps of an interface count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Units per second.
    per_second: u64,
    /// Added, in seconds.
    offset_s: i64,
}

impl Clock {
    /// Nanoseconds since 1970.
    pub const NANOS: Self = Self::new(NS);
    /// Microseconds since 1970: what an interface has that says nothing.
    pub const MICROS: Self = Self::new(1_000_000);

    const fn new(per_second: u64) -> Self {
        let offset_s = 0;
        Self {
            per_second,
            offset_s,
        }
    }

    /// Nanoseconds since 1970; what 64 bits do not hold is clamped.
    #[inline]
    pub fn ns(self, units: u64) -> u64 {
        // The usual two, without a division.
        match self {
            Self::NANOS => return units,
            Self::MICROS => return units.saturating_mul(1000),
            _ => {}
        }
        let seconds = i128::from(units / self.per_second) + i128::from(self.offset_s);
        let part =
            u128::from(units % self.per_second) * u128::from(NS) / u128::from(self.per_second);
        let ns = seconds * i128::from(NS) + part as i128;
        u64::try_from(ns.max(0)).unwrap_or(u64::MAX)
    }
}

/// A packet's header, of either format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Bytes that were captured.
    pub cap_len: u32,
    /// Bytes on the wire, as the file says.
    pub wire_len: u32,
    /// Nanoseconds since 1970.
    pub ts_ns: u64,
}

const NS: u64 = 1_000_000_000;

#[cfg(test)]
mod tests;

//! How much a port may send.

/// Bits in a second; 0: any number. What is beyond is dropped, with no queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Police(pub(crate) u64);

impl Police {
    /// Bytes in a second.
    pub(crate) fn bytes_per_s(self) -> u64 {
        self.0.div_ceil(8)
    }

    /// Bytes at once: those of 10 ms, and two super-frames at least.
    pub(crate) fn burst(self) -> u64 {
        (self.bytes_per_s() / 100).max(LEAST)
    }

    /// Nanoseconds of 1024 bytes; 0: none.
    pub(crate) fn ns_per_kib(self) -> u64 {
        match self.0 {
            0 => 0,
            bits => (8 * 1024 * BILLION / bits).max(1),
        }
    }

    /// Nanoseconds of those at once.
    pub(crate) fn burst_ns(self) -> u64 {
        self.burst().saturating_mul(self.ns_per_kib()) >> 10
    }
}

const LEAST: u64 = 128 << 10;
const BILLION: u64 = 1_000_000_000;

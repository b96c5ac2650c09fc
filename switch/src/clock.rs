//! The time of a switch.

use std::time::Instant;

/// Microseconds since the switch started, or since the kernel did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    started: Instant,
    /// The time when it started, by the kernel's clock if the kernel instance reads it, else 0.
    epoch_us: u64,
}

impl Clock {
    /// One that begins now; as the kernel's (`CLOCK_MONOTONIC`) if somebody else reads that.
    pub(crate) fn new(is_kernels: bool) -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let now_us = now.tv_sec as u64 * MILLION + now.tv_nsec as u64 / 1000;
        Self {
            started: Instant::now(),
            epoch_us: if is_kernels { now_us } else { 0 },
        }
    }

    #[inline]
    pub(crate) fn now_us(&self) -> u64 {
        self.epoch_us + self.started.elapsed().as_micros() as u64
    }

    #[inline]
    pub(crate) fn now_s(&self) -> u32 {
        (self.now_us() / MILLION) as u32
    }
}

const MILLION: u64 = 1_000_000;

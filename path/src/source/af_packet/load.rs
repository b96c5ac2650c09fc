//! How fast a ring fills, and how long it lasts at that rate.

use std::time::{Duration, Instant};

/// What came in the last second or two.
#[derive(Debug)]
pub(super) struct Load {
    since: Instant,
    frames: u64,
    bytes: u64,
    /// Frames and bytes per second in the window before.
    rate: Option<(f64, f64)>,
}

impl Default for Load {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            frames: 0,
            bytes: 0,
            rate: None,
        }
    }
}

impl Load {
    /// The kernel handed over a block with this many frames, which take this many bytes of it.
    pub(super) fn add(&mut self, frames: u32, bytes: u64) {
        self.turn();
        self.frames += u64::from(frames);
        self.bytes += bytes;
    }

    /// How long rings last that are empty now, in milliseconds, at most [`LONGEST_MS`]. Each is told
    /// by its blocks of `block_size` bytes and the time in milliseconds after which they close.
    pub(super) fn lasts_ms(&mut self, block_size: u32, rings: [(usize, u32); 2]) -> u64 {
        self.turn();
        let Some((frames, bytes)) = self.rate.filter(|(frames, _)| *frames > 0.0) else {
            return LONGEST_MS;
        };
        let full_ms = f64::from(block_size) / bytes * 1000.0;
        let of_ring = |(blocks, timeout_ms): (usize, u32)| {
            // A block that nothing came to does not close.
            let timeout_ms = f64::from(timeout_ms).max(1000.0 / frames);
            // Each time the timer ends, the block of that moment closes, half full in the mean.
            let per_ms = (1.0 / full_ms + 0.5 / timeout_ms).max(1.0 / timeout_ms);
            blocks as f64 / per_ms
        };
        // A rate too small for a number is no rate: the cast saturates.
        (rings.map(of_ring).iter().sum::<f64>() as u64).min(LONGEST_MS)
    }

    /// Begins another window when this one is long enough.
    fn turn(&mut self) {
        let elapsed = self.since.elapsed();
        if elapsed >= WINDOW {
            let seconds = elapsed.as_secs_f64();
            self.rate = Some((self.frames as f64 / seconds, self.bytes as f64 / seconds));
            (self.since, self.frames, self.bytes) = (Instant::now(), 0, 0);
        }
    }
}

const WINDOW: Duration = Duration::from_secs(1);
/// An hour: the value for a silent wire.
const LONGEST_MS: u64 = 3_600_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn lasts(frames: f64, frame_bytes: f64) -> u64 {
        let mut load = Load {
            rate: Some((frames, frames * frame_bytes)),
            ..Load::default()
        };
        load.lasts_ms(256 << 10, [(128, 2), (192, 64)])
    }

    #[test]
    fn a_ring_lasts_by_time_or_by_bytes_whichever_ends_first() {
        // By the time after which blocks close, of both rings.
        assert_eq!(lasts(5_000.0, 152.0), 128 * 2 + 192 * 64);
        // By bytes: 80 MiB, less what is left of blocks that the timer closes.
        let full = 320 * (256 << 10) / 152_000;
        assert!((full * 4 / 5..full).contains(&lasts(1e6, 152.0)));
        // One frame for a block.
        assert_eq!(lasts(1.0, 152.0), 320 * 1000);
        assert_eq!(lasts(0.0, 0.0), LONGEST_MS);
        assert_eq!(lasts(1e-9, 152.0), LONGEST_MS);
    }

    #[test]
    fn a_rate_is_that_of_the_last_window() {
        let mut load = Load::default();
        load.add(500, 76_000);
        assert_eq!(load.lasts_ms(4096, [(4, 2), (0, 1)]), LONGEST_MS);
        let passed =
            |load: &mut Load| load.since = Instant::now().checked_sub(WINDOW).expect("time");
        passed(&mut load);
        assert_eq!(load.lasts_ms(4096, [(4, 2), (0, 1)]), 8);
        passed(&mut load);
        assert_eq!(load.lasts_ms(4096, [(4, 2), (0, 1)]), LONGEST_MS);
    }
}

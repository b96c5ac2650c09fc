//! How fast a port's rings fill, and how long they last at that rate while nobody reads.

use std::cell::Cell;
use std::time::{Duration, Instant};

use vnplug_ring::layout::{ALIGN, RECORD_HEADER};

use vnplug_path::port::PortCounters;

/// What was delivered until the last look, and how fast.
#[derive(Debug)]
pub(super) struct Pace(Cell<Look>);

#[derive(Debug, Clone, Copy)]
struct Look {
    at: Instant,
    frames: u64,
    bytes: u64,
    /// Bytes of the rings per second.
    rate: Option<f64>,
}

impl Pace {
    /// Of a port that opens now.
    pub(super) fn new() -> Self {
        Self(Cell::new(Look {
            at: Instant::now(),
            frames: 0,
            bytes: 0,
            rate: None,
        }))
    }

    /// For how many milliseconds rings of this many bytes in all hold what comes, at most an hour. The
    /// rate is that since the look before, if that was a second ago or more; else the one told then.
    pub(super) fn lasts_ms(&self, counters: &PortCounters, rings: u64) -> u64 {
        let mut look = self.0.get();
        let elapsed = look.at.elapsed();
        if elapsed >= WINDOW {
            let frames = counters.delivered.saturating_sub(look.frames);
            // On average half a unit is lost to alignment.
            let filled =
                counters.bytes.saturating_sub(look.bytes) + frames * (RECORD_HEADER + ALIGN / 2);
            look = Look {
                at: Instant::now(),
                frames: counters.delivered,
                bytes: counters.bytes,
                rate: Some(filled as f64 / elapsed.as_secs_f64()),
            };
            self.0.set(look);
        }
        match look.rate {
            // The cast saturates.
            Some(rate) if rate > 0.0 => ((rings as f64 / rate * 1000.0) as u64).min(LONGEST_MS),
            _ => LONGEST_MS,
        }
    }
}

const WINDOW: Duration = Duration::from_secs(1);
/// An hour: what is told of a port to which nothing comes.
const LONGEST_MS: u64 = 3_600_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_lasts_as_long_as_the_last_rate_needs_to_fill_it() {
        let pace = Pace::new();
        let mut counters = PortCounters::default();
        let mut passed = |frames: u64| {
            let mut look = pace.0.get();
            look.at = Instant::now().checked_sub(WINDOW).expect("time");
            pace.0.set(look);
            counters.delivered += frames;
            counters.bytes += frames * 60;
            pace.lasts_ms(&counters, 1 << 20)
        };
        assert_eq!(passed(0), LONGEST_MS);
        // 96 bytes of each record, a second and little more passed.
        let told = passed(100_000);
        assert!((109..=120).contains(&told), "{told}");
        assert_eq!(passed(0), LONGEST_MS);
    }

    #[test]
    fn who_asks_again_at_once_is_told_the_same() {
        let pace = Pace::new();
        let counters = PortCounters {
            delivered: 1_000_000,
            bytes: 60_000_000,
            ..PortCounters::default()
        };
        assert_eq!(pace.lasts_ms(&counters, 1 << 20), LONGEST_MS);
    }
}

//! How a sender waits for room in a ring whose reader does not say when there is some.
//!
//! It sleeps, and looks. Who looks too often, or goes on as soon as one frame fits, takes the processor from the thread
//! that makes room: of many senders on two CPUs the wire then gets half and less. Who sleeps too long lets the ring run dry.

use std::time::Duration;

/// One wait: its sleeps, and how much room ends it.
pub(super) struct Patience {
    pause: Duration,
    has_slept: bool,
}

impl Patience {
    /// The first sleep is half as long as all of the last wait: as a rule the second ends it, and the ring is never dry as
    /// long as it drains as before.
    pub(super) fn after(last_wait: Duration) -> Self {
        Self {
            pause: (last_wait / 2).clamp(SHORTEST, LONGEST),
            has_slept: false,
        }
    }

    /// How many bytes of a ring of `capacity` are waited for, where `needed` would do: once it has slept, a quarter of
    /// the ring, for [`QUARTER_WAIT`].
    pub(super) fn wanted(&self, needed: u32, capacity: u64, waited: Duration) -> u32 {
        match self.has_slept && waited < QUARTER_WAIT {
            true => needed.max((capacity / 4) as u32),
            false => needed,
        }
    }

    /// How long to sleep next: twice as long each time.
    pub(super) fn sleep(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST);
        self.has_slept = true;
        pause
    }

    pub(super) fn has_slept(&self) -> bool {
        self.has_slept
    }
}

/// The first sleep of all.
pub(super) const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(10);
/// A quarter of 1 MiB that leaves with 50 Mb/s.
const QUARTER_WAIT: Duration = Duration::from_millis(40);

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 1 << 20;
    const FRAME: u32 = 1536;

    /// A sender that fills a ring of 1 MiB whenever it may, for 100 waits: how often it woke, and for how long the ring
    /// was dry, both behind the first ten waits.
    fn fill(bytes_per_s: f64) -> (u32, Duration) {
        let (mut last, mut wakes, mut dry) = (Duration::ZERO, 0, Duration::ZERO);
        for wait in 0..100 {
            let mut patience = Patience::after(last);
            let mut waited = Duration::ZERO;
            let free = loop {
                let free = waited.as_secs_f64() * bytes_per_s;
                if free >= f64::from(patience.wanted(FRAME, RING, waited)) {
                    break free;
                }
                waited += patience.sleep();
                if wait >= 10 {
                    wakes += 1;
                }
            };
            if wait >= 10 {
                dry += Duration::from_secs_f64((free - RING as f64).max(0.0) / bytes_per_s);
            }
            last = waited;
        }
        (wakes, dry)
    }

    #[test]
    fn a_ring_that_drains_evenly_is_not_dry_and_wakes_its_sender_twice_for_a_quarter() {
        // From 50 Mb/s to 40 Gb/s.
        for mbps in [50, 100, 300, 1_000, 3_000, 10_000, 40_000] {
            let (wakes, dry) = fill(f64::from(mbps) * 125e3);
            assert_eq!(dry, Duration::ZERO, "{mbps} Mb/s");
            let most = match mbps {
                // Sleeps are no longer than 10 ms.
                50 | 100 => 5,
                _ => 2,
            };
            assert!(wakes <= most * 90, "{mbps} Mb/s: {wakes} in 90 waits");
        }
    }

    #[test]
    fn a_slow_ring_is_not_waited_for_until_a_quarter_is_free() {
        let mut patience = Patience::after(Duration::ZERO);
        assert_eq!(patience.wanted(FRAME, RING, Duration::ZERO), FRAME);
        patience.sleep();
        let quarter = (RING / 4) as u32;
        assert_eq!(patience.wanted(FRAME, RING, SHORTEST), quarter);
        assert_eq!(patience.wanted(quarter + 1, RING, SHORTEST), quarter + 1);
        assert_eq!(patience.wanted(FRAME, RING, QUARTER_WAIT), FRAME);
    }
}

//! How a sender waits for room in a ring whose reader does not say when there is some.
//!
//! It sleeps, and looks. Who looks too often, or goes on as soon as one frame fits, takes the processor from the thread
//! that makes room: of many senders on two CPUs the wire then gets half and less. Who sleeps too long lets the ring run dry.

use std::time::{Duration, Instant};

/// One wait for room, look by look, for who must not sleep where it looks: with a lock held, say. Any other waits by
/// [`Port::wait_for_room`](crate::Port::wait_for_room).
///
/// [`Outbox::patience`](crate::Outbox::patience) begins one behind a frame that found no room. Then sleep for each
/// [`pause`](Self::pause), and push again if [`Outbox::has_room_for`](crate::Outbox::has_room_for) says so.
#[derive(Debug)]
pub struct Patience {
    begun: Instant,
    timeout: Duration,
    /// At the last look.
    waited: Duration,
    pause: Duration,
    longest: Duration,
    has_slept: bool,
    /// How long there is more waited for than one frame needs.
    limit: Duration,
}

impl Patience {
    /// How long to sleep before the next look; `None`: the time is over.
    pub fn pause(&mut self) -> Option<Duration> {
        let left = self.timeout.saturating_sub(self.waited);
        (!left.is_zero()).then(|| self.sleep(self.waited).min(left))
    }

    /// A wait of at most `timeout` for the host. The first sleep is half as long as all of the last wait, and 5 ms at most: where a ring drains as
    /// before, the second ends it as a rule, before the ring is dry. Behind a stall the first sleep is too long, once.
    pub(super) fn after(last_wait: Duration, timeout: Duration) -> Self {
        Self {
            begun: Instant::now(),
            timeout,
            waited: Duration::ZERO,
            pause: (last_wait / 2).clamp(SHORTEST, LONGEST / 2),
            longest: LONGEST,
            has_slept: false,
            limit: QUARTER_WAIT.min(timeout),
        }
    }

    /// A wait for another member of a trust group, at which frames are dropped soon: looks at any room, and often.
    pub(super) fn at_member(timeout: Duration) -> Self {
        Self {
            longest: LONGEST_AT_MEMBER,
            limit: Duration::ZERO,
            ..Self::after(Duration::ZERO, timeout)
        }
    }

    /// There is a look now: how long there was waited.
    pub(super) fn look(&mut self) -> Duration {
        self.waited = self.begun.elapsed();
        self.waited
    }

    /// How many bytes of a ring of `capacity` are to be free, beside room for the frame: a quarter once it has slept, for
    /// [`QUARTER_WAIT`].
    pub(super) fn wanted(&self, capacity: u64, waited: Duration) -> u64 {
        match self.has_slept && waited < self.limit {
            true => capacity / 4,
            false => 0,
        }
    }

    /// How long to sleep next: twice as long each time, and no longer than a quarter is waited for.
    fn sleep(&mut self, waited: Duration) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(self.longest);
        self.has_slept = true;
        match self.limit.saturating_sub(waited) {
            Duration::ZERO => pause,
            left => pause.min(left),
        }
    }

    pub(super) fn has_slept(&self) -> bool {
        self.has_slept
    }
}

/// The first sleep of all.
pub(super) const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(10);
const LONGEST_AT_MEMBER: Duration = Duration::from_millis(1);
/// A quarter of 1 MiB that leaves with 50 Mb/s.
pub(super) const QUARTER_WAIT: Duration = Duration::from_millis(40);

#[cfg(test)]
mod tests {
    use super::*;

    const RING: u64 = 1 << 20;
    const FRAME: u64 = 1536;
    const LONG: Duration = Duration::from_secs(1);

    /// A sender that fills a ring of 1 MiB whenever it may, for 100 waits: how often it woke, and for how long the ring
    /// was dry, both behind the first ten waits.
    fn fill(bytes_per_s: f64) -> (u32, Duration) {
        let (mut last, mut wakes, mut dry) = (Duration::ZERO, 0, Duration::ZERO);
        for wait in 0..100 {
            let mut patience = Patience::after(last, LONG);
            let mut waited = Duration::ZERO;
            let free = loop {
                let free = waited.as_secs_f64() * bytes_per_s;
                if free >= patience.wanted(RING, waited).max(FRAME) as f64 {
                    break free;
                }
                waited += patience.sleep(waited);
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
    fn a_quarter_is_waited_for_behind_a_sleep_and_not_for_ever() {
        for (timeout, limit) in [(LONG, QUARTER_WAIT), (LONGEST, LONGEST)] {
            let mut patience = Patience::after(Duration::ZERO, timeout);
            assert_eq!(patience.wanted(RING, Duration::ZERO), 0);
            let mut waited = Duration::ZERO;
            while waited < limit {
                waited += patience.sleep(waited);
                let wanted = if waited < limit { RING / 4 } else { 0 };
                assert_eq!(patience.wanted(RING, waited), wanted, "{waited:?}");
            }
            // It is over when it is said to be, and then sleeps go on.
            assert_eq!(waited, limit);
            assert!(patience.sleep(waited) > SHORTEST);
        }
    }

    #[test]
    fn a_member_is_looked_at_each_millisecond_and_for_any_room() {
        let mut patience = Patience::at_member(LONG);
        let mut waited = Duration::ZERO;
        while waited < QUARTER_WAIT {
            let pause = patience.sleep(waited);
            assert!(pause <= LONGEST_AT_MEMBER, "{pause:?}");
            waited += pause;
            assert_eq!(patience.wanted(RING, waited), 0);
        }
        assert_eq!(patience.sleep(waited), LONGEST_AT_MEMBER);
    }

    #[test]
    fn who_has_no_time_does_not_sleep() {
        assert_eq!(Patience::after(LONG, Duration::ZERO).pause(), None);
        assert_eq!(
            Patience::after(Duration::ZERO, LONG).pause(),
            Some(SHORTEST)
        );
    }

    #[test]
    fn a_stall_costs_half_of_the_longest_sleep() {
        assert_eq!(
            Patience::after(LONG, LONG).sleep(Duration::ZERO),
            LONGEST / 2
        );
    }
}

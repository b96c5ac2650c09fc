//! How long frames gather, and what time it is.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// How fast frames come, to tell how long they may gather.
#[derive(Debug)]
pub(super) struct Flow {
    /// Since the last sleep began.
    pub(super) frames: u64,
    since: Instant,
    pause: Duration,
}

impl Flow {
    pub(super) fn new() -> Self {
        Self {
            frames: 0,
            since: Instant::now(),
            pause: FIRST_PAUSE,
        }
    }

    /// Asked before each sleep: how long frames may gather now. `None`: until the first one.
    ///
    /// At most `longest`, and no longer than they would take, at the latest rate, to fill a quarter
    /// of `room`. After a silence the rate is not known, so pauses begin short and double.
    pub(super) fn pause(&mut self, longest: Duration, room: u32) -> Option<Duration> {
        let now = Instant::now();
        let frames = std::mem::take(&mut self.frames);
        let elapsed = now - std::mem::replace(&mut self.since, now);
        if frames == 0 || longest.is_zero() {
            self.pause = FIRST_PAUSE;
            return None;
        }
        let fills_ns = elapsed.as_nanos() as u64 / frames * u64::from(room / 4);
        let pause = self.pause.min(longest).min(Duration::from_nanos(fills_ns));
        self.pause = (2 * pause).max(FIRST_PAUSE);
        Some(pause)
    }
}

/// The wall clock, read once per batch, and how far the monotonic clock, which stamps are of, is
/// from it.
#[derive(Debug, Default)]
pub(super) struct Clock {
    pub(super) now_ns: u64,
    /// Wall clock less monotonic clock.
    pub(super) offset_ns: u64,
    /// When the counters were looked at last.
    looked_ns: u64,
}

impl Clock {
    /// Reads the clocks; true if the counters are to be looked at again.
    pub(super) fn read(&mut self) -> bool {
        let monotonic_ns = clock_ns(ClockId::Monotonic);
        self.now_ns = clock_ns(ClockId::Realtime);
        let offset_ns = self.now_ns.wrapping_sub(monotonic_ns);
        // The two readings are some nanoseconds apart: the time of frames must not jump by that.
        if offset_ns
            .wrapping_sub(self.offset_ns)
            .cast_signed()
            .unsigned_abs()
            > CLOCK_SLACK_NS
        {
            self.offset_ns = offset_ns;
        }
        let due = monotonic_ns.wrapping_sub(self.looked_ns) > LOOK_NS;
        if due {
            self.looked_ns = monotonic_ns;
        }
        due
    }
}

fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// How long frames gather when they begin to come.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
/// How often the kernel's counters are looked at under load, to mark the frames after a loss.
const LOOK_NS: u64 = 10_000_000;
/// Two readings of one clock's offset that differ by less are the same.
const CLOCK_SLACK_NS: u64 = 5_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_what_is_allowed_and_end_with_a_silence() {
        let longest = Duration::from_micros(500);
        let mut flow = Flow::new();
        assert_eq!(flow.pause(longest, 1 << 20), None);
        let mut pauses = Vec::new();
        for _ in 0..5 {
            flow.frames = 1;
            // As if some time had passed since the last sleep.
            flow.since -= Duration::from_millis(10);
            pauses.push(flow.pause(longest, 1 << 20).unwrap().as_micros());
        }
        assert_eq!(pauses, [100, 200, 400, 500, 500]);
        assert_eq!(flow.pause(longest, 1 << 20), None);
        flow.frames = 1;
        flow.since -= Duration::from_millis(10);
        assert_eq!(flow.pause(longest, 1 << 20), Some(FIRST_PAUSE));
        assert_eq!(flow.pause(Duration::ZERO, 1 << 20), None);
    }

    #[test]
    fn frames_do_not_gather_until_the_memory_is_full() {
        let mut flow = Flow::new();
        flow.frames = 10_000_000;
        flow.since -= Duration::from_secs(1);
        // 64 of 256 places are full after 6.4 us.
        let pause = flow.pause(Duration::from_millis(2), 256).unwrap();
        assert!(pause < Duration::from_micros(8), "{pause:?}");
    }
}

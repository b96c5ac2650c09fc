//! Time as the replay sees it.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// A clock that can be waited for.
pub trait Clock {
    /// Nanoseconds since the clock began.
    fn now_ns(&mut self) -> u64;

    /// Waits until then, or less: the caller looks at the clock again.
    fn wait(&mut self, until_ns: u64);
}

/// The machine's monotonic clock: sleeps until shortly before, then spins.
#[derive(Debug)]
pub struct Monotonic {
    began: Instant,
    spin: Spin,
}

impl Monotonic {
    /// Begins now. The calling thread's timers fire as exactly as the kernel can from now on. A `busy`
    /// clock never sleeps: the most exact, for a CPU of its own.
    pub fn begin(busy: bool) -> Self {
        // NB: where it is refused, sleeps end up to 50 µs late, which spinning makes up for.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        Self {
            began: Instant::now(),
            spin: Spin {
                span: if busy { LONGEST } else { SHORTEST_SPIN },
                busy,
            },
        }
    }
}

impl Clock for Monotonic {
    fn now_ns(&mut self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    fn wait(&mut self, until_ns: u64) {
        let now = self.now_ns();
        let left = Duration::from_nanos(until_ns.saturating_sub(now));
        if left > self.spin.span && !self.spin.busy {
            let sleep = (left - self.spin.span).min(LONGEST);
            std::thread::sleep(sleep);
            let slept = Duration::from_nanos(self.now_ns() - now);
            self.spin.learn(slept.saturating_sub(sleep));
        } else {
            let until_ns = until_ns.min(now + LONGEST.as_nanos() as u64);
            while self.now_ns() < until_ns {
                std::hint::spin_loop();
            }
        }
    }
}

/// How long before the time a sleep must end: as long as sleeps lately were late.
#[derive(Debug)]
struct Spin {
    span: Duration,
    busy: bool,
}

impl Spin {
    /// A sleep ended so much late. Doubles at once where that was too late, and shrinks slowly.
    fn learn(&mut self, late: Duration) {
        let next = match late > self.span / 2 {
            true => self.span * 2,
            false => self.span - self.span / 64,
        };
        self.span = next.clamp(SHORTEST_SPIN, LONGEST_SPIN);
    }
}

const SHORTEST_SPIN: Duration = Duration::from_micros(100);
/// Sleeps that are later are the work of others, which spinning would not keep away either.
const LONGEST_SPIN: Duration = Duration::from_millis(1);
/// A request to stop is noticed after this.
const LONGEST: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_sleeps_make_it_spin_longer_and_good_ones_shorter_again() {
        let us = Duration::from_micros;
        let mut spin = Spin {
            span: SHORTEST_SPIN,
            busy: false,
        };
        spin.learn(us(5));
        assert_eq!(spin.span, us(100));
        spin.learn(us(60));
        assert_eq!(spin.span, us(200));
        for _ in 0..10 {
            spin.learn(Duration::from_millis(40));
        }
        assert_eq!(spin.span, us(1000));
        for _ in 0..1000 {
            spin.learn(us(5));
        }
        assert_eq!(spin.span, us(100));
    }
}

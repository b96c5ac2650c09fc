//! How a reader waits: asleep, awake, or first the one and then the other.
//!
//! A wake-up costs the host a system call and the reader a switch of context: microseconds, and in a
//! guest tens of them. A reader that stays awake pays with a CPU. Between the two: packets of a busy
//! wire come again at once, so a reader that looks for them a little longer finds them without
//! anybody's help, and one that then sleeps by itself for a little, and only after that asks to be
//! woken, costs the host nothing while packets keep coming.
//!
//! NB: spinning counts rounds and does not look at the clock, which is a system call in User-mode
//! Linux. How many rounds a microsecond has is found out once.

use std::time::{Duration, Instant};

use super::phase::Phase;
use super::{Port, Ready};
use crate::error::Error;

/// What a port does while it has nothing to read; see [`PortOptions::waiting`].
///
/// [`PortOptions::waiting`]: crate::PortOptions::waiting
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Waiting {
    /// Sleeps at once, until the host rings: at the watermark or after the maximum delay. The least
    /// CPU, and the only one with which the descriptor may be waited for.
    #[default]
    Sleep,
    /// Looks for this time, then sleeps by itself, longer each time up to a bound, and then as
    /// [`Sleep`](Self::Sleep). The host rings only at the end. A watermark counts only then, too.
    Adaptive {
        /// How long it looks before the first sleep.
        spin: Duration,
        /// The longest sleep without being woken, and so the longest a packet waits here.
        longest_sleep: Duration,
    },
    /// Never sleeps: the lowest latency, and one whole CPU. The host never rings.
    Spin,
}

impl Waiting {
    /// For those who want the lowest latency: [`Spin`](Self::Spin).
    pub const LATENCY: Self = Self::Spin;
    /// For those who want both: looks for 50 µs, then sleeps up to 50 µs at a time, a few times.
    pub const BALANCED: Self = Self::Adaptive {
        spin: Duration::from_micros(50),
        longest_sleep: Duration::from_micros(50),
    };
    /// For those who want the least CPU: [`Sleep`](Self::Sleep), the default.
    pub const CPU: Self = Self::Sleep;
}

impl Port {
    /// Waits the next time as told.
    pub fn set_waiting(&mut self, waiting: Waiting) {
        self.options.waiting = waiting;
    }

    /// As [`Port::wait`], by the port's own way of waiting.
    pub(super) fn wait_as_told(&mut self, timeout: Option<Duration>) -> Result<Ready, Error> {
        match self.options.waiting {
            Waiting::Sleep => self.sleep(timeout),
            Waiting::Spin => self.wait_awake(timeout),
            Waiting::Adaptive {
                spin,
                longest_sleep,
            } => self.wait_by_turns(timeout, spin, longest_sleep),
        }
    }

    fn wait_awake(&mut self, timeout: Option<Duration>) -> Result<Ready, Error> {
        self.release();
        // Where packets come all the time the clock is not looked at.
        if timeout.is_none_or(|timeout| timeout >= FIRST_LOOK) {
            match self.look(ROUNDS_PER_LOOK) {
                Look::Packets => return Ok(Ready::Now),
                Look::Other => return self.sleep(timeout),
                Look::Nothing => {}
            }
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut looks = 0_u32;
        loop {
            match self.look(ROUNDS_PER_LOOK) {
                Look::Packets => return Ok(Ready::Now),
                Look::Other => return self.sleep(left(deadline)),
                Look::Nothing => {}
            }
            looks = looks.wrapping_add(1);
            // A daemon that was killed closes no ring: only its socket tells.
            if looks.is_multiple_of(LOOKS_PER_QUESTION) {
                self.attend(Some(Duration::ZERO))?;
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(Ready::TimedOut);
            }
        }
    }

    fn wait_by_turns(
        &mut self,
        timeout: Option<Duration>,
        spin: Duration,
        longest: Duration,
    ) -> Result<Ready, Error> {
        self.release();
        let rounds = self.rounds_in(spin);
        match self.look(rounds) {
            Look::Packets => return Ok(Ready::Now),
            Look::Other => return self.sleep(timeout),
            Look::Nothing => {}
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut pause = FIRST_PAUSE.min(longest);
        let mut at_bound = 0;
        while !pause.is_zero() && at_bound < PAUSES_AT_BOUND {
            let pause_now = left(deadline).map_or(pause, |left| left.min(pause));
            std::thread::sleep(pause_now);
            match self.look(1) {
                Look::Packets => return Ok(Ready::Now),
                Look::Other => break,
                Look::Nothing => {}
            }
            if left(deadline).is_some_and(|left| left.is_zero()) {
                return Ok(Ready::TimedOut);
            }
            at_bound += u32::from(pause == longest);
            pause = (pause * 2).min(longest);
        }
        self.sleep(left(deadline))
    }

    /// Looks at the rings this many times.
    #[inline]
    fn look(&mut self, rounds: u32) -> Look {
        if !matches!(self.phase, Phase::Live) {
            return Look::Other;
        }
        for round in 0..rounds {
            if round.is_multiple_of(ROUNDS_PER_RELEASE) {
                // What was held back when the wait began may be sent now, and without room nothing comes.
                self.release_held();
            }
            if self.rings.iter_mut().any(|ring| !ring.is_drained()) {
                return Look::Packets;
            }
            std::hint::spin_loop();
        }
        match self.all_open() {
            true => Look::Nothing,
            false => Look::Other,
        }
    }

    /// How many rounds of [`look`](Self::look) take so long; measured with the first use.
    fn rounds_in(&mut self, time: Duration) -> u32 {
        if self.round_ps == 0 {
            let start = Instant::now();
            for _ in 0..ROUNDS_MEASURED {
                std::hint::black_box(self.rings.iter_mut().any(|ring| !ring.is_drained()));
                std::hint::spin_loop();
            }
            let round = start.elapsed().as_nanos() as u64 * 1_000 / u64::from(ROUNDS_MEASURED);
            // A measurement that was interrupted makes rounds look long, and so spins too few.
            self.round_ps = round.clamp(MIN_ROUND_PS, MAX_ROUND_PS);
        }
        let rounds = time.as_nanos() as u64 * 1_000 / self.round_ps;
        u32::try_from(rounds).unwrap_or(u32::MAX).max(1)
    }
}

/// What a look at the rings found.
enum Look {
    Packets,
    Nothing,
    /// The port has other news: a ring's life is over, or it is not attached.
    Other,
}

fn left(deadline: Option<Instant>) -> Option<Duration> {
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

/// Rounds between two looks at the clock: about half a millisecond.
const ROUNDS_PER_LOOK: u32 = 16_384;
/// Rounds between two looks whether room that is held back has become free.
const ROUNDS_PER_RELEASE: u32 = 256;
/// Who has this much time takes the first look without the clock.
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// Such looks between two questions whether the daemon lives.
const LOOKS_PER_QUESTION: u32 = 64;
const ROUNDS_MEASURED: u32 = 1_024;
const MIN_ROUND_PS: u64 = 1_000;
const MAX_ROUND_PS: u64 = 500_000;
/// The first sleep of those that grow.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
/// Sleeps of the longest kind before the host is asked to ring.
const PAUSES_AT_BOUND: u32 = 4;

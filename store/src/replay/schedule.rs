//! When each frame is due: arithmetic only, no clock.
//!
//! Due times are absolute, in nanoseconds since the first frame: a frame that was late delays no other,
//! and errors do not add up.

/// How the frames follow each other.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// As recorded, `speed` times as fast (1.0 is the recorded speed).
    Recorded {
        /// Between 0.000001 and 1e9.
        speed: f64,
        /// Longer recorded gaps are cut to this many nanoseconds, before `speed` is applied.
        longest_gap_ns: u64,
    },
    /// This many frames per second.
    Frames(u64),
    /// This many bits per second; a frame's bits are those of its bytes, FCS excluded.
    Bits(u64),
    /// One after the other.
    Top,
}

impl Pace {
    /// The recorded gaps.
    pub const RECORDED: Self = Self::Recorded {
        speed: 1.0,
        longest_gap_ns: u64::MAX,
    };
}

/// Due times of frames, one after the other.
#[derive(Debug)]
pub struct Schedule {
    pace: Pace,
    /// The latest recorded time so far; `None` before the first frame of a file.
    latest_ns: Option<u64>,
    /// Recorded time that has passed, without what was cut.
    passed_ns: u64,
    frames: u64,
    bits: u128,
    backwards: u64,
}

impl Schedule {
    /// Nothing was sent yet.
    pub fn new(pace: Pace) -> Self {
        Self {
            pace,
            latest_ns: None,
            passed_ns: 0,
            frames: 0,
            bits: 0,
            backwards: 0,
        }
    }

    /// When the next frame is due, in nanoseconds since the first one was; never less than before.
    ///
    /// A frame recorded up to a second before its predecessor follows at once, and the ones after it
    /// keep their times: captures of several queues are so. A larger step back is a clock that was set:
    /// from there on the recorded times count from zero.
    pub fn due(&mut self, recorded_ns: u64, len_bytes: usize) -> u64 {
        let due = match self.pace {
            Pace::Recorded {
                speed,
                longest_gap_ns,
            } => {
                let gap = self.gap(recorded_ns).min(longest_gap_ns);
                self.passed_ns = self.passed_ns.saturating_add(gap);
                match speed {
                    1.0 => self.passed_ns,
                    speed => (self.passed_ns as f64 / speed) as u64,
                }
            }
            Pace::Frames(rate) => per_second(u128::from(self.frames), rate),
            Pace::Bits(rate) => per_second(self.bits, rate),
            Pace::Top => 0,
        };
        self.frames += 1;
        self.bits += len_bytes as u128 * 8;
        due
    }

    /// The next frame begins a file, or the file again: it follows at once, whatever its time is.
    pub fn begin_file(&mut self) {
        self.latest_ns = None;
    }

    /// How many frames were recorded before their predecessor.
    pub fn backwards(&self) -> u64 {
        self.backwards
    }

    fn gap(&mut self, recorded_ns: u64) -> u64 {
        let Some(latest) = self.latest_ns.replace(recorded_ns) else {
            return 0;
        };
        if let Some(gap) = recorded_ns.checked_sub(latest) {
            return gap;
        }
        self.backwards += 1;
        if latest - recorded_ns <= REORDERED_NS {
            self.latest_ns = Some(latest);
        }
        0
    }
}

fn per_second(count: u128, rate: u64) -> u64 {
    u64::try_from(count * 1_000_000_000 / u128::from(rate.max(1))).unwrap_or(u64::MAX)
}

/// What lies further back is not reordering.
const REORDERED_NS: u64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn dues(pace: Pace, frames: &[(u64, usize)]) -> Vec<u64> {
        let mut schedule = Schedule::new(pace);
        let due = |&(ts, len): &(u64, usize)| schedule.due(ts, len);
        frames.iter().map(due).collect()
    }

    #[test]
    fn recorded_gaps_are_kept_scaled_and_cut() {
        let frames = [(1000, 60), (1500, 60), (1500, 60), (9500, 60)];
        assert_eq!(dues(Pace::RECORDED, &frames), [0, 500, 500, 8500]);
        let pace = |speed, longest_gap_ns| Pace::Recorded {
            speed,
            longest_gap_ns,
        };
        assert_eq!(dues(pace(0.5, u64::MAX), &frames), [0, 1000, 1000, 17_000]);
        assert_eq!(dues(pace(2.0, 2000), &frames), [0, 250, 250, 1250]);
    }

    #[test]
    fn rates_are_exact_however_long_they_last() {
        let many = vec![(0, 125); 3_000_001];
        let last = |pace| *dues(pace, &many).last().unwrap();
        assert_eq!(last(Pace::Frames(3)), 1_000_000_000_000_000);
        assert_eq!(last(Pace::Bits(1000)), 3_000_000_000_000_000);
        assert_eq!(
            dues(Pace::Bits(8000), &[(0, 1000), (0, 60)]),
            [0, 1_000_000_000]
        );
        assert_eq!(last(Pace::Top), 0);
    }

    #[test]
    fn reordered_frames_follow_at_once_and_a_clock_that_was_set_begins_anew() {
        let s = 1_000_000_000;
        let mut schedule = Schedule::new(Pace::RECORDED);
        let mut due = |ts| schedule.due(ts, 60);
        assert_eq!([due(10 * s), due(10 * s - 5), due(10 * s + 7)], [0, 0, 7]);
        assert_eq!([due(2 * s), due(2 * s + 3)], [7, 10]);
        assert_eq!(schedule.backwards(), 2);
        schedule.begin_file();
        assert_eq!([schedule.due(5, 60), schedule.due(6, 60)], [10, 11]);
        assert_eq!(schedule.backwards(), 2);
    }

    #[test]
    fn due_times_never_go_back() {
        let mut seed = 7_u64;
        let mut schedule = Schedule::new(Pace::Recorded {
            speed: 3.7,
            longest_gap_ns: 1 << 50,
        });
        let mut before = 0;
        for _ in 0..10_000 {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let due = schedule.due(seed >> (seed % 64), 60);
            assert!(due >= before);
            before = due;
        }
    }
}

//! When a recorded packet is due.
//!
//! Time is a number of nanoseconds that the caller passes in. Packets keep their recorded distance
//! from the first, divided by the speed. A timestamp below the newest so far is due at once: a
//! packet out of order neither stalls nor jumps. When [`STEPPED`] packets in a row are more than a
//! second below the newest, the recording's clock was set back, and the pace starts afresh there.

/// The pace of a replay.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    /// Recorded seconds per second.
    speed: f64,
    base: Option<Base>,
    stragglers: u32,
}

#[derive(Debug, Clone, Copy)]
struct Base {
    ts_ns: u64,
    due_ns: u64,
    newest_ns: u64,
}

impl Pace {
    pub(super) fn new(speed: f64) -> Self {
        Self {
            speed,
            base: None,
            stragglers: 0,
        }
    }

    /// When the packet recorded at `ts_ns` is due; call once per packet, in file order.
    pub(super) fn due_ns(&mut self, ts_ns: u64, now_ns: u64) -> u64 {
        let Some(base) = &mut self.base else {
            return self.start(ts_ns, now_ns);
        };
        if ts_ns.saturating_add(SECOND) < base.newest_ns {
            self.stragglers += 1;
            return if self.stragglers < STEPPED {
                now_ns
            } else {
                self.start(ts_ns, now_ns)
            };
        }
        self.stragglers = 0;
        if ts_ns <= base.newest_ns {
            return now_ns;
        }
        base.newest_ns = ts_ns;
        let after = (ts_ns - base.ts_ns) as f64 / self.speed;
        base.due_ns.saturating_add(after as u64)
    }

    fn start(&mut self, ts_ns: u64, now_ns: u64) -> u64 {
        self.base = Some(Base {
            ts_ns,
            due_ns: now_ns,
            newest_ns: ts_ns,
        });
        self.stragglers = 0;
        now_ns
    }
}

const SECOND: u64 = 1_000_000_000;
const STEPPED: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn dues(speed: f64, seconds: &[u64]) -> Vec<u64> {
        let mut pace = Pace::new(speed);
        seconds
            .iter()
            .map(|s| pace.due_ns(s * SECOND, 7 * SECOND) / SECOND)
            .collect()
    }

    #[test]
    fn recorded_distances_are_kept_and_divided_by_the_speed() {
        assert_eq!(dues(1.0, &[100, 101, 103]), [7, 8, 10]);
        assert_eq!(dues(2.0, &[100, 101, 104]), [7, 7, 9]);
        assert_eq!(dues(0.5, &[100, 101]), [7, 9]);
        assert_eq!(dues(1.0, &[100, 100 + 86_400]), [7, 7 + 86_400]);
    }

    #[test]
    fn a_packet_from_the_past_neither_stalls_nor_jumps() {
        assert_eq!(dues(1.0, &[100, 50, 101, 0, 102]), [7, 7, 8, 7, 9]);
    }

    #[test]
    fn a_clock_set_back_starts_afresh() {
        let mut seconds = vec![1000, 1001];
        seconds.extend(10..20);
        let expected = [7, 8, 7, 7, 7, 7, 7, 7, 7, 7, 8, 9];
        assert_eq!(dues(1.0, &seconds), expected);
    }

    #[test]
    fn absurd_times_saturate() {
        let mut pace = Pace::new(1e-6);
        pace.due_ns(0, 1);
        assert_eq!(pace.due_ns(u64::MAX, 1), u64::MAX);
    }
}

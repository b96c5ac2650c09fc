//! How long a frame takes to a reader and back, by the host's clock alone.
//!
//! The clocks of host and guest differ, so neither end of a measurement may be the guest's. The
//! generator notes when it handed each sequence over; a reader sends the frames back as they are,
//! and the generator, as the sink of its port's transmit ring, looks the sequence up. What it notes
//! stays in the host: a reader cannot make its echo look earlier than it was.
//!
//! With a source that never sleeps (`busy=yes`) the way back costs the host a look at a ring, so the
//! round trip is the reader's wake-up and two hand-overs. With one that sleeps it is two wake-ups.

use std::time::Instant;

use hdrhistogram::Histogram;
use vnplug_frame::witness::{Parsed, Witness, parse};

use super::transmit::{Echoes, Latency};

/// The times of one queue's frames.
pub(super) struct Echo {
    run: u32,
    /// Sequences between two frames of the queue.
    stride: u64,
    since: Instant,
    /// By sequence: which, and when it was handed over.
    stamps: Vec<(u64, u64)>,
    /// A port may send frames back.
    listens: bool,
    times: Histogram<u64>,
}

impl Echo {
    pub(super) fn new(run: u32, stride: u64) -> Self {
        let times = Histogram::new_with_bounds(1, LONGEST_NS, DIGITS)
            .expect("the bounds are a histogram's: 1 ≤ low, 2 low ≤ high, up to 5 digits");
        Self {
            run,
            stride,
            since: Instant::now(),
            stamps: vec![(NONE, 0); STAMPS],
            listens: false,
            times,
        }
    }

    /// Sequences from `first` on were handed over together, just now.
    #[inline]
    pub(super) fn handed_over(&mut self, first: u64, count: usize) {
        if self.listens {
            let now = self.now_ns();
            let sequences = (first..).step_by(self.stride as usize).take(count);
            for seq in sequences {
                let at = self.place(seq);
                self.stamps[at] = (seq, now);
            }
        }
    }

    /// A frame came back. Frames of others, damaged ones and second echoes count for nothing here.
    pub(super) fn came_back(&mut self, bytes: &[u8]) {
        let now = self.now_ns();
        let Parsed::Witness(Witness { run, seq }) = parse(bytes) else {
            return;
        };
        let at = self.place(seq);
        if run == self.run && self.stamps[at].0 == seq {
            let (_, then) = std::mem::replace(&mut self.stamps[at], (NONE, 0));
            self.times.saturating_record(now.saturating_sub(then));
        }
    }

    fn place(&self, seq: u64) -> usize {
        (seq / self.stride) as usize % STAMPS
    }

    fn now_ns(&self) -> u64 {
        self.since.elapsed().as_nanos() as u64
    }
}

impl Echoes for Echo {
    fn begin(&mut self) {
        self.listens = true;
        self.times.reset();
        self.stamps.fill((NONE, 0));
    }

    fn latency(&self) -> Option<Latency> {
        let times = &self.times;
        (!times.is_empty()).then(|| Latency {
            count: times.len(),
            min_ns: times.min(),
            p50_ns: times.value_at_quantile(0.5),
            p99_ns: times.value_at_quantile(0.99),
            p999_ns: times.value_at_quantile(0.999),
            max_ns: times.max(),
        })
    }
}

/// Frames that may be on their way; older ones are forgotten.
const STAMPS: usize = 1 << 16;
/// No frame.
const NONE: u64 = u64::MAX;
/// A minute; longer times count as this.
const LONGEST_NS: u64 = 60_000_000_000;
/// Decimal digits that are kept of each time.
const DIGITS: u8 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug_frame::witness::{Protocol, Shape, make};

    fn frame(run: u32, seq: u64) -> Vec<u8> {
        let shape = Shape {
            len_bytes: 60,
            flow: 0,
            protocol: Protocol::Udp4,
            vlan_tci: None,
        };
        make(shape, run, seq).unwrap()
    }

    #[test]
    fn each_echo_of_ours_counts_once() {
        let mut echo = Echo::new(7, 2);
        echo.handed_over(1, 3);
        echo.came_back(&frame(7, 1));
        assert_eq!(echo.latency(), None, "nobody listened");
        echo.begin();
        echo.handed_over(1, 3);
        for (run, seq) in [(7, 1), (7, 1), (7, 5), (8, 3), (7, 7)] {
            echo.came_back(&frame(run, seq));
        }
        let mut damaged = frame(7, 3);
        damaged[50] ^= 1;
        echo.came_back(&damaged);
        let latency = echo.latency().unwrap();
        assert_eq!(latency.count, 2);
        assert!(latency.min_ns <= latency.p50_ns && latency.p50_ns <= latency.max_ns);
        echo.begin();
        assert_eq!(echo.latency(), None);
    }
}

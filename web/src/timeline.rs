//! A timeline: what came when, in which files, and where nothing came.

use serde_json::{Value, json};

use crate::bins::Axis;
use crate::state::RecordingState;

/// What came between two times.
#[derive(Debug, Clone)]
pub(crate) struct Timeline {
    pub(crate) axis: Axis,
    /// Packets, bytes on the wire, and lost packets of each part.
    pub(crate) bins: [Vec<u64>; 3],
    /// How far from its place a packet may be counted at most.
    pub(crate) spread_ns: u64,
    /// Ranges without a packet.
    pub(crate) gaps: Vec<(u64, u64)>,
    /// The segments that have something.
    pub(crate) parts: Vec<Part>,
    /// First and last time of all that is recorded, or known to be missing.
    pub(crate) all: Option<(u64, u64)>,
    /// What is not counted yet, of `len_bytes`.
    pub(crate) pending_bytes: u64,
    pub(crate) len_bytes: u64,
    /// How many files there are.
    pub(crate) segments: usize,
    pub(crate) states: Vec<RecordingState>,
    /// What cannot be read.
    pub(crate) problems: Vec<String>,
}

/// A segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) directory: String,
    /// Its first time.
    pub(crate) from_ns: u64,
    /// Its last time.
    pub(crate) to_ns: u64,
    pub(crate) packets: u64,
    /// Of the file.
    pub(crate) len_bytes: u64,
}

impl Timeline {
    /// The sums of packets, bytes, and lost packets.
    pub(crate) fn totals(&self) -> [u64; 3] {
        [0, 1, 2].map(|series: usize| self.bins[series].iter().sum())
    }

    /// As the page takes it. Times are strings of nanoseconds since 1970: JavaScript's numbers are too
    /// short for them.
    pub(crate) fn to_json(&self) -> Value {
        let [packets, bytes, lost] = self.totals();
        let range = |&(from, to): &(u64, u64)| json!([from.to_string(), to.to_string()]);
        json!({
            "from_ns": self.axis.from_ns.to_string(),
            "to_ns": self.axis.to_ns.to_string(),
            "bin_ns": self.axis.bin_ns.to_string(),
            "packets": self.bins[0], "bytes": self.bins[1], "lost": self.bins[2],
            "total": { "packets": packets, "bytes": bytes, "lost": lost },
            "spread_ns": self.spread_ns.to_string(),
            "gaps": self.gaps.iter().map(range).collect::<Vec<_>>(),
            "segments": self.parts.iter().take(MOST_PARTS).map(Part::to_json).collect::<Vec<_>>(),
            "segments_in_range": self.parts.len(),
            "all": self.all.map(|(first, last)| json!({
                "from_ns": first.to_string(),
                "to_ns": last.saturating_add(1).to_string(),
            })),
            "pending_bytes": self.pending_bytes,
            "len_bytes": self.len_bytes,
            "files": self.segments,
            "recordings": self.states.iter().map(RecordingState::to_json).collect::<Vec<_>>(),
            "problems": self.problems,
        })
    }
}

impl Part {
    fn to_json(&self) -> Value {
        json!({
            "name": self.name, "directory": self.directory,
            "from_ns": self.from_ns.to_string(), "to_ns": self.to_ns.to_string(),
            "packets": self.packets, "len_bytes": self.len_bytes,
        })
    }
}

/// Times at which packets came, and so where none did.
#[derive(Debug)]
pub(crate) struct Covered {
    axis: Axis,
    /// Shorter ones are no gaps.
    shortest_ns: u64,
    /// First and last times. What has no gap between it and the one before is one with it, so that a long
    /// recording takes little room.
    list: Vec<(u64, u64)>,
}

impl Covered {
    pub(crate) fn new(axis: &Axis) -> Self {
        Self {
            axis: *axis,
            shortest_ns: axis.bin_ns.max(SECOND_NS),
            list: Vec::new(),
        }
    }

    /// Adds a first and a last time.
    pub(crate) fn add(&mut self, (low, high): (u64, u64)) {
        let is_near = |to: u64, from: u64| from.saturating_sub(to) < self.shortest_ns;
        match self.list.last_mut() {
            Some(last) if is_near(last.1, low) && is_near(high, last.0) => {
                *last = (last.0.min(low), last.1.max(high));
            }
            _ => self.list.push((low, high)),
        }
    }

    /// The ranges of the axis that nothing covers: the longest [`MOST_GAPS`] of at least a second and a
    /// part, in order. What is before the first packet or after the last is no gap.
    pub(crate) fn gaps(mut self) -> Vec<(u64, u64)> {
        self.list.sort_unstable();
        let axis = self.axis;
        let mut gaps = Vec::new();
        let mut until = None;
        for (low, high) in self.list {
            if let Some(until) = until
                && low > until
            {
                let (from, to) = (axis.from_ns.max(until), axis.to_ns.min(low));
                if to > from && to - from >= self.shortest_ns {
                    gaps.push((from, to));
                }
            }
            until = until.max(Some(high));
        }
        gaps.sort_unstable_by_key(|(from, to)| std::cmp::Reverse(to - from));
        gaps.truncate(MOST_GAPS);
        gaps.sort_unstable();
        gaps
    }
}

const SECOND_NS: u64 = 1_000_000_000;
const MOST_GAPS: usize = 100;
/// Of the segments this many are listed.
const MOST_PARTS: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;

    fn gaps(covered: &[(u64, u64)], axis: &Axis) -> Vec<(u64, u64)> {
        let mut all = Covered::new(axis);
        covered.iter().for_each(|&range| all.add(range));
        all.gaps()
    }

    #[test]
    fn gaps_are_what_nothing_covers() {
        let s = SECOND_NS;
        let axis = Axis::new(0, 100 * s, 100);
        let covered = [
            (50 * s, 60 * s),
            (10 * s, 20 * s),
            (15 * s, 30 * s),
            (61 * s, 62 * s),
        ];
        assert_eq!(gaps(&covered, &axis), [(30 * s, 50 * s), (60 * s, 61 * s)]);
        let zoomed = Axis::new(40 * s, 45 * s, 100);
        assert_eq!(gaps(&covered, &zoomed), [(40 * s, 45 * s)]);
        assert_eq!(gaps(&[], &axis), []);
    }

    #[test]
    fn what_is_near_is_kept_as_one_and_makes_no_difference() {
        let (mut number, s) = (1_u64, SECOND_NS);
        let mut below = |limit: u64| {
            number = number
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (number >> 33) % limit
        };
        for _ in 0..200 {
            let axis = Axis::new(below(20 * s), 20 * s + below(40 * s), 1 + below(50));
            let mut at = 0;
            let ranges: Vec<(u64, u64)> = (0..60)
                .map(|_| {
                    at += below(s) + below(8) / 7 * below(5 * s);
                    let low = at.saturating_sub(below(2 * s));
                    (low, low + below(s / 2))
                })
                .collect();
            let kept_apart = Covered {
                list: ranges.clone(),
                ..Covered::new(&axis)
            };
            assert_eq!(gaps(&ranges, &axis), kept_apart.gaps(), "{axis:?}");
        }
        let mut all = Covered::new(&Axis::new(0, 100 * s, 100));
        (0..100_000).for_each(|n| all.add((n * s / 1000, n * s / 1000 + 10)));
        assert_eq!(all.list.len(), 1);
    }
}

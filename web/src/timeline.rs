//! A timeline: what came when, in which files, and where nothing came.

use serde_json::{Value, json};

use crate::bins::Axis;
use crate::state::State;

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
    /// First and last time of all that is recorded.
    pub(crate) all: Option<(u64, u64)>,
    /// What is not counted yet, of `len_bytes`.
    pub(crate) pending_bytes: u64,
    pub(crate) len_bytes: u64,
    /// How many files there are.
    pub(crate) segments: usize,
    pub(crate) states: Vec<State>,
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
            "recordings": self.states.iter().map(State::to_json).collect::<Vec<_>>(),
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

/// The ranges of the axis that none of these (first and last time) covers: the longest
/// [`MOST_GAPS`] of at least a second and a part, in order. What is before the first packet or behind
/// the last is no gap.
pub(crate) fn gaps(mut covered: Vec<(u64, u64)>, axis: &Axis) -> Vec<(u64, u64)> {
    covered.sort_unstable();
    let shortest = axis.bin_ns.max(SECOND_NS);
    let mut gaps = Vec::new();
    let mut until = None;
    for (low, high) in covered {
        if let Some(until) = until
            && low > until
        {
            let (from, to) = (axis.from_ns.max(until), axis.to_ns.min(low));
            if to > from && to - from >= shortest {
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

const SECOND_NS: u64 = 1_000_000_000;
const MOST_GAPS: usize = 100;
/// Of the segments so many are listed.
const MOST_PARTS: usize = 500;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_nothing_covers() {
        let s = SECOND_NS;
        let axis = Axis::new(0, 100 * s, 100);
        let covered = vec![
            (50 * s, 60 * s),
            (10 * s, 20 * s),
            (15 * s, 30 * s),
            (61 * s, 62 * s),
        ];
        assert_eq!(
            gaps(covered.clone(), &axis),
            [(30 * s, 50 * s), (60 * s, 61 * s)]
        );
        let zoomed = Axis::new(40 * s, 45 * s, 100);
        assert_eq!(gaps(covered, &zoomed), [(40 * s, 45 * s)]);
        assert_eq!(gaps(Vec::new(), &axis), []);
    }
}

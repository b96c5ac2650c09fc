//! Which programs a value of a field leads to by ranges of values.
//!
//! Ranges in the order of their lower ends, and above them a tree of the highest upper ends: a
//! value is in those that begin at or before it and do not end before it; parts of the tree that
//! end before it are skipped. So a lookup costs a few steps for each range found and for the depth
//! of the tree, however the ranges overlap. All changes between two batches cost one walk over all
//! of them together: a guest may change hundreds at once, as often as it likes.

use super::table::Candidate;

/// Programs by ranges of values.
#[derive(Debug, Default)]
pub(super) struct Spans {
    spans: Vec<Span>,
    /// How many of them are in order; the others came since.
    sorted: usize,
    /// How many of them were not removed.
    live: usize,
    /// There were changes since the tree was made.
    is_stale: bool,
    /// A binary tree in an array, the root at 1: the highest end of the spans below. As many leaves as
    /// the next power of two; those without a span have 0.
    ends: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    low: u64,
    high: u64,
    candidate: Candidate,
}

impl Spans {
    /// Whether it leads nowhere.
    pub(super) fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Lets a range of values lead to one more program, from the next [`settle`](Self::settle) on. Its
    /// upper end is above the lower one.
    pub(super) fn insert(&mut self, low: u64, high: u64, candidate: Candidate) {
        self.spans.push(Span {
            low,
            high,
            candidate,
        });
        self.live += 1;
        self.is_stale = true;
    }

    /// Undoes an [`insert`](Self::insert).
    pub(super) fn remove(&mut self, low: u64, high: u64, candidate: Candidate) {
        let gone = Span {
            low,
            high,
            candidate,
        };
        let first = self.spans[..self.sorted].partition_point(|span| span.low < low);
        let same = self.spans[first..].iter_mut().find(|span| **span == gone);
        if let Some(span) = same {
            // No range ends there: it is left out when the rest is put in order.
            span.high = 0;
            self.live -= 1;
            self.is_stale = true;
        }
    }

    /// Sorts in all changes, however many there are.
    #[inline]
    pub(super) fn settle(&mut self) {
        if self.is_stale {
            self.order();
        }
    }

    #[cold]
    fn order(&mut self) {
        self.spans.retain(|span| span.high > span.low);
        self.spans.sort_by_key(|span| span.low);
        self.sorted = self.spans.len();
        self.plant();
        self.is_stale = false;
    }

    /// Tells `hit` of every program that a value leads to; it must be [settled](Self::settle).
    #[inline]
    pub(super) fn find(&self, value: u64, hit: &mut impl FnMut(Candidate)) {
        let begun = self.spans.partition_point(|span| span.low <= value);
        if begun > 0 {
            self.visit(1, 0, self.ends.len() / 2, begun, value, hit);
        }
    }

    /// The spans below a node that begins at span `first` and has room for `room` of them, as far as
    /// they are among the first `begun`.
    fn visit(
        &self,
        node: usize,
        first: usize,
        room: usize,
        begun: usize,
        value: u64,
        hit: &mut impl FnMut(Candidate),
    ) {
        if first >= begun || self.ends[node] < value {
            return;
        }
        if room == 1 {
            hit(self.spans[first].candidate);
            return;
        }
        let half = room / 2;
        self.visit(2 * node, first, half, begun, value, hit);
        self.visit(2 * node + 1, first + half, half, begun, value, hit);
    }

    /// Rebuilds the tree.
    fn plant(&mut self) {
        let leaves = self.spans.len().next_power_of_two();
        self.ends.clear();
        self.ends.resize(2 * leaves, 0);
        for (end, span) in self.ends[leaves..].iter_mut().zip(&self.spans) {
            *end = span.high;
        }
        for node in (1..leaves).rev() {
            self.ends[node] = self.ends[2 * node].max(self.ends[2 * node + 1]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_leads_where_a_list_of_all_ranges_would_through_many_changes() {
        let mut spans = Spans::default();
        let mut model: Vec<(u64, u64, u32)> = Vec::new();
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) % below
        };
        for round in 0..6_000_u32 {
            let comes = random(100) < if round < 3_000 { 60 } else { 40 };
            if comes {
                let low = random(1_000);
                let high = low + 1 + random(if round % 3 == 0 { 1_000 } else { 20 });
                spans.insert(low, high, Candidate::new(round, false));
                model.push((low, high, round));
            } else if !model.is_empty() {
                let at = random(model.len() as u64) as usize;
                let (low, high, judge) = model.swap_remove(at);
                spans.remove(low, high, Candidate::new(judge, false));
            }
            // Several changes come together.
            if random(3) > 0 {
                continue;
            }
            spans.settle();
            let value = random(2_100);
            let mut found = Vec::new();
            spans.find(value, &mut |candidate| found.push(candidate.judge()));
            found.sort_unstable();
            let holds = |(low, high, _): &&(u64, u64, u32)| (*low..=*high).contains(&value);
            let mut expected: Vec<u32> = model.iter().filter(holds).map(|it| it.2).collect();
            expected.sort_unstable();
            assert_eq!(found, expected, "round {round}");
        }
        for (low, high, judge) in model {
            spans.remove(low, high, Candidate::new(judge, false));
        }
        assert!(spans.is_empty());
        spans.settle();
        spans.find(0, &mut |_| panic!("nothing is there"));
    }
}

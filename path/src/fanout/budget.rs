//! Limits the cost of one owner's ports while a source has more frames than its thread can give to
//! all ports.
//!
//! ```text
//! source is pressed ──► the cap falls to three quarters of what the most expensive owner cost
//! it is not         ──► the cap rises by a sixteenth, and goes when it limited nobody for a while
//! ```
//!
//! As long as the thread keeps up, nothing is counted here and everybody gets everything. Else each
//! owner's ports have the same cap for each batch. An owner that costs less is not affected. Of an
//! owner that costs more, the rest of its ports are skipped in the batch, and these frames count as
//! `dropped_budget`. So the most expensive owner pays first, and an owner of one port never does:
//! the cap has a floor. A single owner has no cap, because it takes from nobody.
//!
//! Costs are estimates in nanoseconds: of a port, of each frame it judges, of bytes that are copied, of
//! ringing a reader.

use crate::port::{Port, PortCounters};

/// The owners of one queue's ports.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// By owner, its ports in this queue.
    ports: Vec<u32>,
    /// Owners that have any.
    owners: usize,
    /// By owner, what it cost in this batch.
    spent: Vec<u64>,
    /// What each may cost in a batch; `None`: nothing is counted.
    cap: Option<u64>,
    /// Batches since an owner was limited.
    calm: u32,
    /// Where the next batch begins among the ports that get everything: none is always the last.
    turn: usize,
}

/// What a port had counted before a batch.
#[derive(Clone, Copy)]
pub(super) struct Before {
    offered: u64,
    delivered: u64,
    bytes: u64,
    rings: u64,
}

impl Before {
    #[inline]
    pub(super) fn of(port: &Port) -> Self {
        let PortCounters {
            offered,
            delivered,
            bytes,
            rings,
            ..
        } = port.counters;
        Self {
            offered,
            delivered,
            bytes,
            rings,
        }
    }

    fn cost(self, now: Self) -> u64 {
        PORT + (now.offered - self.offered) * JUDGED
            + (now.delivered - self.delivered) * COPIED
            + (now.bytes - self.bytes) / BYTES
            + (now.rings - self.rings) * RUNG
    }
}

impl Budget {
    /// A port of this owner comes, or goes.
    pub(super) fn count(&mut self, owner: u32, comes: bool) {
        let at = owner as usize;
        if self.ports.len() <= at {
            self.ports.resize(at + 1, 0);
            self.spent.resize(at + 1, 0);
        }
        let before = self.ports[at];
        self.ports[at] = match comes {
            true => before + 1,
            false => before - 1,
        };
        match (before, self.ports[at]) {
            (0, _) => self.owners += 1,
            (_, 0) => self.owners -= 1,
            _ => {}
        }
        if self.owners < 2 {
            self.cap = None;
        }
    }

    /// Whether there are owners that could take from each other.
    #[inline]
    pub(super) fn has_rivals(&self) -> bool {
        self.owners > 1
    }

    /// Before a batch: whether the source has more than the thread can do.
    pub(super) fn press(&mut self, is_pressed: bool) {
        let heaviest = self.spent.iter().copied().max().unwrap_or(0);
        self.cap = match (self.cap, is_pressed) {
            (None, false) => None,
            // The first batch measures what everybody costs.
            (None, true) => Some(u64::MAX),
            (Some(cap), true) => Some((cap.min(heaviest) / 4 * 3).max(FLOOR)),
            (Some(_), false) if self.calm >= CALM => None,
            (Some(cap), false) => Some(cap.saturating_add(cap / 16)),
        };
        self.calm = self.calm.saturating_add(1);
        if is_pressed {
            self.calm = 0;
        }
        self.spent.fill(0);
    }

    /// Whether costs are counted.
    #[inline]
    pub(super) fn is_tight(&self) -> bool {
        self.cap.is_some()
    }

    /// Where to begin among this many ports.
    pub(super) fn turn(&mut self, ports: usize) -> usize {
        self.turn = self.turn.wrapping_add(1);
        match ports {
            0 => 0,
            ports => (self.turn * STEP) % ports,
        }
    }

    /// Whether an owner may have more of this batch.
    #[inline]
    pub(super) fn allows(&mut self, owner: u32) -> bool {
        let Some(cap) = self.cap else {
            return true;
        };
        let allowed = self.spent[owner as usize] < cap;
        if !allowed {
            self.calm = 0;
        }
        allowed
    }

    /// A port was given its part of the batch.
    #[inline]
    pub(super) fn charge(&mut self, before: Before, port: &Port) {
        self.spent[port.owner as usize] += before.cost(Before::of(port));
    }
}

/// What a port costs that is given frames, in nanoseconds,
const PORT: u64 = 50;
/// each frame that it judges,
const JUDGED: u64 = 4;
/// each that is copied,
const COPIED: u64 = 16;
/// bytes of it that cost one nanosecond,
const BYTES: u64 = 8;
/// and ringing its reader.
const RUNG: u64 = 2_000;
/// The cost of a port that gets a whole batch of full-sized frames, and rings: no owner's cap is
/// lower.
const FLOOR: u64 = PORT + 256 * (JUDGED + COPIED + 1514 / BYTES) + RUNG;
/// After this many batches in which nobody was limited, nothing is counted any more.
const CALM: u32 = 256;
/// How far the next batch begins after the last: prime, so that every port comes first at times.
const STEP: usize = 61;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_held_back_without_need_and_alone() {
        let mut budget = Budget::default();
        budget.count(3, true);
        budget.count(3, true);
        assert!(!budget.has_rivals());
        budget.count(0, true);
        assert!(budget.has_rivals());
        budget.press(false);
        assert!(!budget.is_tight() && budget.allows(3));
        budget.press(true);
        assert!(budget.is_tight());
        budget.count(0, false);
        assert!(!budget.is_tight() && !budget.has_rivals());
    }

    #[test]
    fn the_dearest_owner_is_held_back_first_and_no_longer_than_needed() {
        let mut budget = Budget::default();
        budget.count(0, true);
        budget.count(1, true);
        let batch = |budget: &mut Budget, pressed| {
            budget.press(pressed);
            let mut served = [0, 0];
            for (owner, ports) in [(0, 1), (1, 1000)] {
                for _ in 0..ports {
                    if budget.allows(owner) {
                        budget.spent[owner as usize] += 10_000;
                        served[owner as usize] += 1;
                    }
                }
            }
            served
        };
        assert_eq!(batch(&mut budget, true), [1, 1000]);
        let mut last = 1000;
        for _ in 0..60 {
            let [honest, greedy] = batch(&mut budget, true);
            assert_eq!(honest, 1);
            assert!(greedy <= last && greedy > 0, "{greedy}");
            last = greedy;
        }
        assert!(last < 10, "{last}");
        // The need is over: it has everything again, and soon nothing is counted.
        for _ in 0..200 {
            assert_eq!(batch(&mut budget, false)[0], 1);
        }
        assert_eq!(batch(&mut budget, false), [1, 1000]);
        for _ in 0..=CALM {
            batch(&mut budget, false);
        }
        assert!(!budget.is_tight());
    }
}

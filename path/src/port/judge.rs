//! Which frames of a batch are for a port: its share of a cluster, the operator's filter, pause,
//! direction, the reader's filter, its rules, and sampling, in this order.
//!
//! Which checks a port needs is settled when the port is attached or changed, not for each batch: a
//! port that wants everything has none.

use std::sync::Arc;

use vnplug_ring::control::{Balance, Direction, Tuning};
use vnplug_ring::layout::flags;

use super::PortCounters;
use crate::batch::BatchInfo;
use crate::rules::{Change, Changed, Rules};
use vnplug_filter::Program;
use vnplug_frame::Frame;

/// What decides which frames a port gets.
#[derive(Debug)]
pub struct Judge {
    share: Share,
    guard: Option<Arc<Program>>,
    tuning: Tuning,
    filter: Option<Arc<Program>>,
    rules: Rules,
    /// Frames left out since the last that was taken.
    sampled: u32,
    is_quarantined: bool,
    /// No frame needs a check.
    takes_all: bool,
    /// A frame that guard, direction and filter accept needs no further check.
    takes_found: bool,
}

/// Which of a source's frames a port is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Share {
    /// All.
    All,
    /// Member `index` of a cluster of `of`.
    Member {
        /// Number of the cluster in the daemon.
        cluster: u32,
        /// Which member this is.
        index: u32,
        /// How many members there are.
        of: u32,
        /// How frames are distributed.
        balance: Balance,
    },
}

impl Share {
    /// Whether the frame with this flow hash, the `turn`th of its queue, is for this port.
    #[inline]
    pub fn includes(&self, hash: u32, turn: u64) -> bool {
        match *self {
            Self::All => true,
            Self::Member {
                index, of, balance, ..
            } => {
                let member = match balance {
                    Balance::Flow => (u64::from(hash) * u64::from(of)) >> 32,
                    Balance::RoundRobin => turn % u64::from(of),
                };
                member == u64::from(index)
            }
        }
    }
}

impl Default for Judge {
    /// Takes everything.
    fn default() -> Self {
        Self {
            share: Share::All,
            guard: None,
            tuning: Tuning::default(),
            filter: None,
            rules: Rules::default(),
            sampled: 0,
            is_quarantined: false,
            takes_all: true,
            takes_found: true,
        }
    }
}

impl Judge {
    /// Everything, or a share of a cluster's frames.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Gives the port another share.
    pub fn set_share(&mut self, share: Share) {
        self.share = share;
        self.settle();
    }

    /// The operator's obligatory filter; the reader cannot see what it rejected, not even in
    /// counters.
    pub fn guard(&self) -> Option<&Arc<Program>> {
        self.guard.as_ref()
    }

    /// Sets the operator's filter.
    pub fn set_guard(&mut self, guard: Option<Arc<Program>>) {
        self.guard = guard;
        self.settle();
    }

    /// The reader's own filter.
    pub fn filter(&self) -> Option<&Arc<Program>> {
        self.filter.as_ref()
    }

    /// Sets the reader's filter; the old one is for the caller to free.
    pub fn set_filter(&mut self, filter: Option<Arc<Program>>) -> Option<Arc<Program>> {
        let old = std::mem::replace(&mut self.filter, filter);
        self.settle();
        old
    }

    /// Uses this tuning from the next batch on.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
        self.sampled = 0;
        self.settle();
    }

    /// Whether packets are wanted at all.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.tuning.enabled
    }

    /// Which frames are wanted by their direction.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.tuning.direction
    }

    /// Changes the reader's rules.
    pub fn change_rules(&mut self, change: Change, now_us: u64) -> Changed {
        let changed = self.rules.change(change, now_us);
        self.settle();
        changed
    }

    /// Nothing is taken any more.
    pub(super) fn quarantine(&mut self) {
        self.is_quarantined = true;
        self.settle();
    }

    /// Whether all frames of every batch are taken.
    #[inline]
    pub(super) fn takes_all(&self) -> bool {
        self.takes_all
    }

    /// Whether all frames are taken that the guard accepts and that have the wanted direction.
    /// `by_filter`: the filter still has to run.
    #[inline]
    pub(super) fn takes_all_found(&self, by_filter: bool) -> bool {
        self.takes_found && !(by_filter && self.filter.is_some())
    }

    fn settle(&mut self) {
        self.takes_found =
            self.rules.accept_everything() && self.tuning.sample <= 1 && !self.is_quarantined;
        self.takes_all = self.takes_found
            && self.guard.is_none()
            && self.filter.is_none()
            && self.share == Share::All
            && self.tuning.enabled
            && self.tuning.direction == Direction::Both;
    }

    /// Whether the frame at `place` of a batch is taken; if not, counts the reason.
    #[inline]
    pub(super) fn takes(
        &mut self,
        place: usize,
        batch: &BatchInfo<'_>,
        counters: &mut PortCounters,
    ) -> bool {
        if !self.shares(place, batch) {
            return false;
        }
        counters.offered += 1;
        if !self.admits(&batch.frames[place], counters) {
            return false;
        }
        let outbound = batch.frames[place].flags & flags::OUTBOUND != 0;
        let wanted = match self.tuning.direction {
            Direction::Both => true,
            Direction::Rx => !outbound,
            Direction::Tx => outbound,
        };
        if !wanted {
            counters.direction += 1;
            return false;
        }
        self.takes_found(place, batch, true, counters)
    }

    /// Whether a frame is taken that the guard accepts and that has the wanted direction; if not,
    /// counts the reason. `by_filter`: the filter still has to run.
    #[inline]
    pub(super) fn takes_found(
        &mut self,
        place: usize,
        batch: &BatchInfo<'_>,
        by_filter: bool,
        counters: &mut PortCounters,
    ) -> bool {
        let frame = &batch.frames[place];
        if self.is_quarantined {
            counters.dropped_quarantine += 1;
            return false;
        }
        if by_filter && refuses(self.filter.as_ref(), frame) {
            counters.filtered += 1;
            return false;
        }
        if self.takes_found {
            return true;
        }
        if !self.rules.accept(frame.bytes, batch.now_us) {
            counters.ruled_out += 1;
            return false;
        }
        if self.tuning.sample > 1 {
            self.sampled += 1;
            if self.sampled < self.tuning.sample {
                counters.sampled_out += 1;
                return false;
            }
            self.sampled = 0;
        }
        true
    }

    /// Counts the frames of a batch that are decided without looking at them; says how many are
    /// left.
    pub(super) fn leave_out(&self, batch: &BatchInfo<'_>, counters: &mut PortCounters) -> u64 {
        let mut left = 0;
        for place in 0..batch.hashes.len() {
            if self.shares(place, batch) {
                counters.offered += 1;
                left += u64::from(self.admits(&batch.frames[place], counters));
            }
        }
        left
    }

    /// How many frames of a batch it has to judge.
    pub(super) fn owes(&self, batch: &BatchInfo<'_>) -> u64 {
        let places = 0..batch.hashes.len();
        places.filter(|&place| self.shares(place, batch)).count() as u64
    }

    #[inline]
    fn shares(&self, place: usize, batch: &BatchInfo<'_>) -> bool {
        let turn = batch.first + place as u64;
        self.share.includes(batch.hashes[place], turn)
    }

    /// Whether a frame needs further checks; if not, counts the reason.
    #[inline]
    fn admits(&self, frame: &Frame<'_>, counters: &mut PortCounters) -> bool {
        // First, and also in quarantine: no other counter may show what the operator rejects.
        if refuses(self.guard.as_ref(), frame) {
            counters.refused += 1;
        } else if self.is_quarantined {
            counters.dropped_quarantine += 1;
        } else if !self.tuning.enabled {
            counters.paused += 1;
        } else {
            return true;
        }
        false
    }
}

#[inline]
fn refuses(program: Option<&Arc<Program>>, frame: &Frame<'_>) -> bool {
    program.is_some_and(|program| program.run(frame.bytes, frame.wire_len) == 0)
}

//! A port's place in the fanout, and the counters of frames that it was never shown.
//!
//! A port that is looked up is handed the frames that its guard and its filter accept and that have
//! the wanted direction; it counts the fates of these itself. The fates of all others follow
//! from running totals, taken when the port took its place and when the counters are read:
//!
//! ```text
//! offered            = frames since then
//! refused            = offered − what the guard accepted since then
//! direction          = of those it accepted, the ones of the other direction
//! filtered           = of the rest, those that were not handed over
//! ```
//!
//! A port that is paused or in quarantine gets nothing: what its guard accepted is `paused`, or
//! `dropped_quarantine`.

use std::panic::{AssertUnwindSafe, catch_unwind};

use vnplug_ring::control::Direction;

use super::budget::{Before, Budget};
use super::due::Due;
use crate::batch::BatchInfo;
use crate::port::{Offered, Port, PortCounters, Share};
use vnplug_filter::{Analysis, FrameSet, Index, JudgeId, Totals};

/// A port in its place.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) port: Box<Port>,
    pub place: Delivery,
    /// When it is noted to be due.
    pub(super) due_us: Option<u64>,
    /// Where its arena is when it is noted to be due.
    pub(super) due_at: Option<u64>,
}

/// How a port is given frames.
#[derive(Debug)]
pub(super) enum Delivery {
    /// Every batch whole.
    Whole,
    /// The frames that the index finds for it.
    Indexed(Indexed),
    /// The frames that a switch has for it, whose port has this number.
    Due(u16),
}

/// A port that is looked up.
#[derive(Debug)]
pub(super) struct Indexed {
    guard: Option<JudgeId>,
    filter: Option<JudgeId>,
    /// The program whose frames it is shown: the filter, or the guard if it runs its filter itself.
    follows: Option<JudgeId>,
    own_filter: bool,
    /// All frames when it took its place.
    since: u64,
    /// What its guard had accepted then.
    passed: Totals,
    /// Frames that it was handed since then.
    handed: u64,
    /// What it had accounted for then.
    accounted: u64,
}

impl Seat {
    pub(super) fn new(port: Box<Port>) -> Self {
        Self {
            port,
            place: Delivery::Whole,
            due_us: None,
            due_at: None,
        }
    }

    /// Takes the place that is due to the port as it is.
    pub(super) fn enter(&mut self, at: u32, index: &mut Index, all: Totals) {
        let port = &self.port;
        if let Some(number) = port.member {
            self.place = Delivery::Due(number.get());
            return;
        }
        let judge = &port.judge;
        let wants = judge.is_enabled() && port.quarantined().is_none();
        let everything = judge.guard().is_none() && judge.filter().is_none();
        if judge.share() != Share::All || everything && wants {
            self.place = Delivery::Whole;
            return;
        }
        let guard = judge.guard().map(|guard| index.add(guard));
        let guard_is_keyed = guard.is_some_and(|guard| index.is_keyed(guard));
        let mut own_filter = false;
        let filter = judge.filter().filter(|_| wants).and_then(|filter| {
            // Better on the few frames of its guard than on all.
            own_filter = guard_is_keyed && *filter.analysis() == Analysis::Always;
            (!own_filter).then(|| index.add(filter))
        });
        let follows = filter.or(guard).filter(|_| wants);
        if let Some(follows) = follows {
            index.follow(follows, at);
        }
        self.place = Delivery::Indexed(Indexed {
            guard,
            filter,
            follows,
            own_filter,
            since: all.frames,
            passed: guard.map_or(all, |guard| index.totals(guard)),
            handed: 0,
            accounted: port.counters.accounted(),
        });
    }

    /// Leaves the place; the port's own counters are whole then.
    pub(super) fn leave(&mut self, at: u32, index: &mut Index, all: Totals) {
        self.port.counters = self.counters(index, all);
        let place = std::mem::replace(&mut self.place, Delivery::Whole);
        if let Delivery::Indexed(it) = place {
            if let Some(follows) = it.follows {
                index.unfollow(follows, at);
            }
            for judge in [it.filter, it.guard].into_iter().flatten() {
                index.remove(judge);
            }
        }
    }

    /// The port's counters with the frames that it was not shown.
    pub(super) fn counters(&self, index: &Index, all: Totals) -> PortCounters {
        let mut counters = self.port.counters;
        let Delivery::Indexed(it) = &self.place else {
            return counters;
        };
        let now = it.guard.map_or(all, |guard| index.totals(guard));
        let offered = all.frames - it.since;
        let passed = now.frames - it.passed.frames;
        let outbound = now.outbound - it.passed.outbound;
        counters.offered += offered;
        counters.refused += offered - passed;
        let rest = passed - it.handed;
        if it.follows.is_some() {
            let other = match self.port.judge.direction() {
                Direction::Both => 0,
                Direction::Rx => outbound,
                Direction::Tx => passed - outbound,
            };
            counters.direction += other;
            counters.filtered += rest - other;
        } else if self.port.quarantined().is_some() {
            counters.dropped_quarantine += rest;
        } else {
            counters.paused += rest;
        }
        counters
    }

    /// Offers a batch whole.
    #[inline]
    pub(super) fn offer(&mut self, batch: &BatchInfo<'_>) {
        // A panic here would be a bug of ours that one reader triggers: it costs that reader its
        // port, and nobody else anything (R10).
        let port = &mut self.port;
        let before = port.counters.offered;
        let offer = || match batch.is_own(&port.handle) {
            false => port.take(batch, Offered::Whole),
            true => port.decline(batch),
        };
        if catch_unwind(AssertUnwindSafe(offer)).is_err() {
            port.settle(batch, before);
        }
    }

    /// Offers a batch whole, or skips the port if its owner has used up its part of the batch.
    #[inline(never)]
    pub(super) fn offer_within(&mut self, batch: &BatchInfo<'_>, budget: &mut Budget) {
        if batch.is_own(&self.port.handle) {
            self.offer(batch);
            return;
        }
        if budget.allows(self.port.owner) {
            let before = Before::of(&self.port);
            self.offer(batch);
            budget.charge(before, &self.port);
            return;
        }
        let port = &mut self.port;
        let offered = port.counters.offered;
        // It runs the operator's filter. As in `offer`.
        if catch_unwind(AssertUnwindSafe(|| port.pass_by(batch))).is_err() {
            port.settle(batch, offered);
        }
    }

    /// Whether it is given frames by what this program says of them.
    pub(super) fn uses(&self, judge: JudgeId) -> bool {
        match &self.place {
            Delivery::Whole | Delivery::Due(_) => false,
            Delivery::Indexed(it) => it.guard == Some(judge) || it.filter == Some(judge),
        }
    }

    /// Hands over what the program that it follows accepted, as far as it is wanted and, if there is
    /// a budget, its owner has not had its part of the batch.
    #[inline]
    pub(super) fn take(
        &mut self,
        batch: &BatchInfo<'_>,
        accepted: FrameSet,
        index: &Index,
        outbound: &FrameSet,
        within: Option<&mut Budget>,
    ) {
        let Delivery::Indexed(it) = &mut self.place else {
            return;
        };
        let mut wanted = accepted;
        if let (Some(_), Some(guard)) = (it.filter, it.guard) {
            wanted = wanted.and(&index.accepted(guard));
        }
        match self.port.judge.direction() {
            Direction::Both => {}
            Direction::Rx => wanted = wanted.without(outbound),
            Direction::Tx => wanted = wanted.and(outbound),
        }
        if wanted.is_empty() {
            return;
        }
        it.handed += wanted.len();
        let (port, own_filter) = (&mut self.port, it.own_filter);
        if batch.is_own(&port.handle) {
            port.counters.direction += wanted.len();
            return;
        }
        let mut within = within;
        if let Some(budget) = &mut within
            && !budget.allows(port.owner)
        {
            port.miss(wanted.len());
            return;
        }
        let before = Before::of(port);
        let offered = Offered::Found {
            places: &wanted,
            by_filter: own_filter,
        };
        // As in `offer`.
        if catch_unwind(AssertUnwindSafe(|| port.take(batch, offered))).is_err() {
            port.settle_to(it.accounted + it.handed);
        }
        if let Some(budget) = within {
            budget.charge(before, port);
        }
    }

    /// Gives it what a switch has for it, if its owner has not had its part of the batch.
    #[inline]
    pub(super) fn give(
        &mut self,
        batch: &BatchInfo<'_>,
        wanted: &FrameSet,
        within: Option<&mut Budget>,
    ) {
        let port = &mut self.port;
        let mut within = within;
        if let Some(budget) = &mut within
            && !budget.allows(port.owner)
        {
            port.counters.offered += wanted.len();
            port.miss(wanted.len());
            return;
        }
        let before = Before::of(port);
        let offered = port.counters.offered + wanted.len();
        // As in `offer`.
        let take = || port.take(batch, Offered::Due(wanted));
        if catch_unwind(AssertUnwindSafe(take)).is_err() {
            port.counters.offered = offered;
            port.settle_to(offered);
        }
        if let Some(budget) = within {
            budget.charge(before, port);
        }
    }

    /// Notes when the port is due, and whether to place it again.
    #[inline]
    pub(super) fn note(&mut self, at: u32, due: &mut Due, moved: &mut Vec<u32>) {
        self.note_due(at, due, self.port.due_us(), self.port.due_at());
        if let Delivery::Indexed(it) = &self.place
            && it.follows.is_some()
            && self.port.quarantined().is_some()
        {
            moved.push(at);
        }
    }

    /// Forgets when it was due.
    pub(super) fn forget_due(&mut self, at: u32, due: &mut Due) {
        self.note_due(at, due, None, None);
    }

    #[inline]
    fn note_due(&mut self, at: u32, due: &mut Due, due_us: Option<u64>, due_at: Option<u64>) {
        if due_us != self.due_us {
            due.at_time(at, self.due_us, due_us);
            self.due_us = due_us;
        }
        if due_at != self.due_at
            && let Some(commons) = &self.port.commons
        {
            due.at_place(at, commons, self.due_at, due_at);
            self.due_at = due_at;
        }
    }
}

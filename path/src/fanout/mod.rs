//! One batch to many ports.
//!
//! Attaching, detaching and new filters take effect between two batches, so that every port has
//! judged an exact range of frames and the sums close (point R): `duties`, the frames read times
//! the subscribers of that moment, equals what all ports, present and departed, were offered. A
//! cluster is one subscriber.
//!
//! Ports are of two kinds. Those that want every frame, or a share of a cluster's, are *offered*
//! each batch whole, one after the other: the batch stays in the first cache level, and a ring is
//! touched once per batch. The others, with a filter or a guard, are *looked up*: their programs
//! are in an [`Index`], which finds for each batch whose frames it has. A port without any is not
//! touched; ten thousand of them cost what the lookup costs. Running totals give the fates of the
//! frames that it never saw, exactly, at any time (`seat`).

mod budget;
mod changes;
mod due;
mod ends;
mod members;
mod seat;

use std::cell::RefCell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use vnplug_ring::layout::flags;

use crate::batch::{BatchInfo, Handle};
use crate::cuts::Cuts;
use crate::port::{Port, PortCounters};
use budget::Budget;
use due::Due;
use ends::Ends;
use members::Members;
use seat::Seat;
use vnplug_filter::{FrameSet, Index, Totals};
use vnplug_frame::{Frame, MAX_BATCH, flow};
use vnplug_os::prefetch::prefetch;

/// The ports of one queue.
#[derive(Debug, Default)]
pub struct Fanout {
    source: u16,
    queue: u16,
    seats: Vec<Option<Seat>>,
    free: Vec<u32>,
    by_id: HashMap<u32, u32>,
    /// Seats of ports that are offered every batch whole.
    whole: Vec<u32>,
    index: Index,
    /// Ports that are given what a switch has for them.
    members: Members,
    /// Those that are shown the frames of one port of a switch.
    ends: Ends,
    /// When to ring which seat's reader.
    due: Due,
    /// What each owner may cost.
    budget: Budget,
    /// Seats to be placed again after the batch.
    moved: Vec<u32>,
    hashes: Vec<u32>,
    /// What the super-frames of a batch become.
    cuts: RefCell<Cuts>,
    /// Ports that share with nobody, and members of each cluster.
    alone: u64,
    clusters: HashMap<u32, u64>,
    totals: Totals,
    /// Frames that were there before in another form.
    forms: u64,
    counters: FanoutCounters,
}

/// What went through one queue's fanout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FanoutCounters {
    /// Frames read from the source.
    pub read: u64,
    /// Their captured bytes.
    pub bytes: u64,
    /// Frames times subscribers of that moment.
    pub duties: u64,
    /// The counters of ports that are gone.
    pub departed: PortCounters,
}

impl FanoutCounters {
    /// Adds another queue's.
    pub fn add(&mut self, other: &Self) {
        self.read += other.read;
        self.bytes += other.bytes;
        self.duties += other.duties;
        self.departed.add(&other.departed);
    }
}

impl Fanout {
    /// For queue `queue` of source number `source`.
    pub fn new(source: u16, queue: u16) -> Self {
        Self {
            source,
            queue,
            ..Self::default()
        }
    }

    /// Gives a batch to every port that wants some of it.
    #[inline]
    pub fn deliver(&mut self, frames: &[Frame<'_>], now_us: u64) {
        self.deliver_within(frames, now_us, None);
    }

    /// Gives frames that a port sent to every other one that wants some of them. They count as read,
    /// and every port is offered them; those of the sender's program leave them as of the wrong
    /// direction.
    pub fn show(&mut self, frames: &[Frame<'_>], now_us: u64, sender: &Handle) {
        self.deliver_within(frames, now_us, Some(sender));
    }

    /// Whether no port is here: what comes may be [passed](Self::pass) by.
    #[inline]
    pub fn is_unread(&self) -> bool {
        self.by_id.is_empty() && self.ends.is_empty()
    }

    /// Whether there is a port that is not only given what is due to it.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.by_id.len() > self.members.len() || !self.ends.is_empty()
    }

    /// Whether the ring of some port that is being read is half full; ports of a switch's single ports are not looked at.
    pub fn is_crowded(&mut self, now_us: u64) -> bool {
        let seats = self.seats.iter_mut().flatten();
        // Each learns whether it is being read.
        seats.fold(false, |any, seat| seat.port.is_crowded(now_us) | any)
    }

    /// Counts frames as read that nobody here reads. None of them is outbound.
    #[inline]
    pub fn pass(&mut self, frames: u64, bytes: u64) {
        self.totals.frames += frames;
        self.counters.read += frames;
        self.counters.bytes += bytes;
    }

    #[inline]
    fn deliver_within(&mut self, frames: &[Frame<'_>], now_us: u64, sender: Option<&Handle>) {
        let mut budget = std::mem::take(&mut self.budget);
        for batch in frames.chunks(MAX_BATCH) {
            self.deliver_batch(batch, now_us, sender, &mut budget);
            if !self.ends.is_empty() {
                self.ends.deliver(batch, now_us, sender, &mut budget);
            }
        }
        self.budget = budget;
    }

    #[inline]
    fn deliver_batch(
        &mut self,
        frames: &[Frame<'_>],
        now_us: u64,
        sender: Option<&Handle>,
        budget: &mut Budget,
    ) {
        if frames.first().is_some_and(|frame| frame.is_form) {
            return self.deliver_forms(frames, now_us, sender, budget);
        }
        let mut outbound = FrameSet::default();
        for (place, frame) in frames.iter().enumerate() {
            if frame.flags & flags::OUTBOUND != 0 {
                outbound.insert(place);
            }
        }
        let wanted = self.index.judge(frames, &outbound);
        self.hash(frames, &wanted);
        self.bar_broken();
        self.cuts.get_mut().begin();
        let batch = BatchInfo {
            frames,
            hashes: &self.hashes,
            first: self.counters.read,
            source: self.source,
            queue: self.queue,
            now_us,
            sender,
            cuts: &self.cuts,
        };
        let (seats, due, moved) = (&mut self.seats, &mut self.due, &mut self.moved);
        let is_tight = budget.is_tight();
        let first = match is_tight {
            true => budget.turn(self.whole.len()),
            false => 0,
        };
        let (last, begin) = self.whole.split_at(first);
        for &at in begin.iter().chain(last) {
            if let Some(seat) = &mut seats[at as usize] {
                if is_tight {
                    seat.offer_within(&batch, budget);
                } else {
                    seat.offer(&batch);
                }
                seat.note(at, due, moved);
            }
        }
        for nth in 0..self.index.touched() {
            Self::fetch_ahead(seats, &self.index, nth);
            let (followers, accepted) = self.index.wanted(nth);
            for &at in followers {
                if let Some(seat) = &mut seats[at as usize] {
                    let within = is_tight.then_some(&mut *budget);
                    seat.take(&batch, accepted, &self.index, &outbound, within);
                    seat.note(at, due, moved);
                }
            }
        }
        if !self.members.is_empty() {
            self.members.sort(frames);
            while let Some((at, wanted)) = self.members.next() {
                if let Some(seat) = &mut seats[at as usize] {
                    let within = is_tight.then_some(&mut *budget);
                    seat.give(&batch, &wanted, within);
                    seat.note(at, due, moved);
                    self.counters.duties += wanted.len();
                }
            }
        }
        self.index.forget();
        self.totals.frames += frames.len() as u64;
        self.totals.outbound += outbound.len();
        self.counters.read += frames.len() as u64;
        self.counters.bytes += frames
            .iter()
            .map(|frame| frame.bytes.len() as u64)
            .sum::<u64>();
        self.counters.duties += frames.len() as u64 * self.subscribers();
        while let Some(at) = self.due.take_turned() {
            self.look_at(at, now_us);
        }
        while let Some(at) = self.moved.pop() {
            self.leave(at);
            self.place(at);
        }
    }

    /// Gives ports of a switch frames that all were told of before in another form.
    #[cold]
    fn deliver_forms(
        &mut self,
        frames: &[Frame<'_>],
        now_us: u64,
        sender: Option<&Handle>,
        budget: &mut Budget,
    ) {
        self.hashes.clear();
        self.hashes.resize(frames.len(), 0);
        self.cuts.get_mut().begin();
        let batch = BatchInfo {
            frames,
            hashes: &self.hashes,
            // No batch of frames that are read has such a number, nor has another of these.
            first: FIRST_FORM + self.forms,
            source: self.source,
            queue: self.queue,
            now_us,
            sender,
            cuts: &self.cuts,
        };
        self.forms += frames.len() as u64;
        let is_tight = budget.is_tight();
        self.members.sort(frames);
        while let Some((at, wanted)) = self.members.next() {
            if let Some(seat) = &mut self.seats[at as usize] {
                let within = is_tight.then_some(&mut *budget);
                seat.give(&batch, &wanted, within);
                seat.note(at, &mut self.due, &mut self.moved);
                self.counters.duties += wanted.len();
            }
        }
        while let Some(at) = self.due.take_turned() {
            self.look_at(at, now_us);
        }
        while let Some(at) = self.moved.pop() {
            self.leave(at);
            self.place(at);
        }
    }

    /// Fetches what the ports that come next will need, one step of the way to each.
    #[inline(always)]
    fn fetch_ahead(seats: &[Option<Seat>], index: &Index, nth: usize) {
        let ahead = |distance| {
            let at = index.first_follower(nth + distance)?;
            seats.get(at as usize)
        };
        if let Some(seat) = ahead(12) {
            prefetch(seat);
        }
        if let Some(Some(seat)) = ahead(8) {
            prefetch(&*seat.port);
        }
        if let Some(Some(seat)) = ahead(4) {
            seat.port.producer.prefetch();
        }
    }

    /// Whether ports of several owners share the thread: then it is to be told whether the source
    /// has more than it can do, by [`press`](Self::press).
    #[inline]
    pub fn has_rivals(&self) -> bool {
        self.budget.has_rivals()
    }

    /// Before a batch: whether more frames wait than can be given to all ports in time.
    #[inline]
    pub fn press(&mut self, is_pressed: bool) {
        if is_pressed || self.budget.is_tight() {
            self.budget.press(is_pressed);
        }
    }

    /// Computes the flow hashes that a port needs. A panic there would be a bug of ours that a
    /// frame triggers: it costs that frame its hash, which is then 0, and nobody anything else
    /// (R10).
    #[inline]
    fn hash(&mut self, frames: &[Frame<'_>], wanted: &FrameSet) {
        let hashes = &mut self.hashes;
        hashes.clear();
        if !self.whole.is_empty() {
            loop {
                let rest = frames[hashes.len()..].iter();
                let hash = || hashes.extend(rest.map(|frame| flow_hash(frame.bytes)));
                match catch_unwind(AssertUnwindSafe(hash)) {
                    Ok(()) => return,
                    Err(_) => hashes.push(0),
                }
            }
        } else if !wanted.is_empty() || !self.members.is_empty() {
            // Those that no other port wants have none.
            hashes.resize(frames.len(), 0);
            let mut wanted = wanted.iter();
            loop {
                let hash = || {
                    for place in wanted.by_ref() {
                        hashes[place] = flow_hash(frames[place].bytes);
                    }
                };
                if catch_unwind(AssertUnwindSafe(hash)).is_ok() {
                    return;
                }
            }
        }
    }

    /// Takes the ports out of service whose programs panicked.
    #[inline]
    fn bar_broken(&mut self) {
        while let Some(broken) = self.index.take_broken() {
            let seats = self.seats.iter_mut().flatten();
            for seat in seats.filter(|seat| seat.uses(broken)) {
                seat.port.fail();
                // It is placed again after this batch, of which it gets nothing.
                let at = self.by_id.get(&seat.port.id);
                self.moved.extend(at);
            }
        }
    }

    /// The next time [`tick`](Self::tick) has something to do.
    pub fn due_us(&self) -> Option<u64> {
        let own = self.due.first_us();
        own.into_iter().chain(self.ends.due_us()).min()
    }

    /// Rings readers whose maximum delay has passed.
    pub fn tick(&mut self, now_us: u64) {
        while let Some(at) = self.due.take(now_us) {
            self.look_at(at, now_us);
        }
        self.ends.tick(now_us);
    }

    /// Rings a reader that was due, if it still is.
    fn look_at(&mut self, at: u32, now_us: u64) {
        if let Some(seat) = &mut self.seats[at as usize] {
            seat.forget_due(at, &mut self.due);
            seat.port.tick(now_us);
            seat.note(at, &mut self.due, &mut self.moved);
        }
    }

    /// All ports. Their own counters may lack frames that they were not shown; see
    /// [`accounts`](Self::accounts).
    pub fn ports(&self) -> impl Iterator<Item = &Port> {
        self.accounts().map(|(port, _)| port)
    }

    /// All ports, with the fates of all frames that they were offered.
    pub fn accounts(&self) -> impl Iterator<Item = (&Port, PortCounters)> {
        self.own_accounts().chain(self.ends.accounts())
    }

    fn own_accounts(&self) -> impl Iterator<Item = (&Port, PortCounters)> {
        self.seats
            .iter()
            .flatten()
            .map(|seat| self.account_of(seat))
    }

    /// One port, with the fates of all frames that it was offered.
    pub fn account(&self, id: u32) -> Option<(&Port, PortCounters)> {
        if self.ends.has(id) {
            return self.ends.accounts().find(|(port, _)| port.id == id);
        }
        let at = *self.by_id.get(&id)?;
        self.seats[at as usize]
            .as_ref()
            .map(|seat| self.account_of(seat))
    }

    /// The counters, consistent between two batches.
    pub fn counters(&self) -> FanoutCounters {
        let mut counters = self.counters;
        self.ends.add_to(&mut counters);
        counters
    }

    /// The programs of ports that are looked up.
    pub fn index(&self) -> &Index {
        &self.index
    }

    fn account_of<'a>(&self, seat: &'a Seat) -> (&'a Port, PortCounters) {
        (&seat.port, seat.counters(&self.index, self.totals))
    }

    fn subscribers(&self) -> u64 {
        self.alone + self.clusters.len() as u64
    }
}

/// The frame's flow hash; in tests, one that panics at a frame that begins so.
#[inline]
fn flow_hash(bytes: &[u8]) -> u32 {
    #[cfg(test)]
    assert!(!bytes.starts_with(BREAKS), "on purpose");
    flow::flow_hash(bytes)
}

/// Above the number of any frame that is read.
const FIRST_FORM: u64 = 1 << 63;

#[cfg(test)]
const BREAKS: &[u8] = b"the flow hash has a bug";

#[cfg(test)]
mod tests;

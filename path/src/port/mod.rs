//! One attached reader, as one queue's thread sees it: ring, filters, doorbell, counters.
//!
//! A port of a source with several queues has one [`Port`] (and one ring) in each queue's thread.
//! Nothing a reader does reaches another port: a full ring drops and counts (R5), an impossible
//! index quarantines this port (R2), a panic is caught by the fanout and quarantines this port
//! (R10), and the doorbell never blocks (R8).

pub mod doorbell;

use std::sync::Arc;

use vnplug_ring::control::{Balance, Direction, Tuning};
use vnplug_ring::layout::{Life, Meta, flags};
use vnplug_ring::{Bell, Ground, Producer};

use crate::batch::{BatchInfo, Handle};
use crate::commons::{Commons, Turn};
use crate::rules::Rules;
use doorbell::Doorbell;
use vnplug_filter::{FrameSet, Program};
use vnplug_frame::Frame;
use vnplug_os::peer_log;

/// One reader's part in one queue.
#[derive(Debug)]
pub struct Port {
    /// The port's number in the daemon.
    pub id: u32,
    /// The number of its owner in the daemon: what ports of one owner cost is counted together.
    pub owner: u32,
    /// Its ring; of packets or, in a group, of descriptors.
    pub producer: Producer,
    /// What it shares with the other members of its group.
    pub commons: Option<Arc<Commons>>,
    /// The operator's obligatory filter; what it refuses the reader learns nothing of.
    pub guard: Option<Arc<Program>>,
    /// The reader's own filter.
    pub filter: Option<Arc<Program>>,
    /// The reader's rules, behind its filter.
    pub rules: Rules,
    /// What it shares with the ports that its program holds as one with it.
    pub handle: Handle,
    /// Captured bytes per packet, at most the ring's snaplen.
    pub snaplen: u32,
    /// Everything, or a share of a cluster's frames.
    pub share: Share,
    /// How the reader is woken.
    pub doorbell: Doorbell,
    /// The first record is marked as following a gap.
    pub mark_gap: bool,
    /// What became of each offered frame.
    pub counters: PortCounters,
    /// What the kernel had dropped of this queue when the port was attached.
    pub dropped_before: u64,
    tuning: Tuning,
    quarantined: Option<String>,
    sampled: u32,
    due_us: Option<u64>,
    due_at: Option<u64>,
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
        /// How frames are dealt.
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

/// What became of every frame offered to a port. Exactly one counter goes up for each, so
/// `offered` is the sum of all the others but `bytes` and `rings` (point S).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames this port had to judge.
    pub offered: u64,
    /// Refused by the operator's obligatory filter.
    pub refused: u64,
    /// Passed by while the reader had paused the port.
    pub paused: u64,
    /// Not the wanted direction, or sent by the port's own program.
    pub direction: u64,
    /// Not wanted by the reader's filter.
    pub filtered: u64,
    /// Not wanted by the reader's rules.
    pub ruled_out: u64,
    /// Passed the filter and was left out by 1-in-N sampling.
    pub sampled_out: u64,
    /// Published in the ring.
    pub delivered: u64,
    /// Dropped: the ring was full.
    pub dropped_full: u64,
    /// Dropped unseen: the source had more than its thread could do, and the owner's ports had had
    /// their part of it.
    pub dropped_budget: u64,
    /// Dropped: the port is in quarantine.
    pub dropped_quarantine: u64,
    /// Captured bytes delivered.
    pub bytes: u64,
    /// Times the reader was rung.
    pub rings: u64,
}

impl PortCounters {
    /// Adds another queue's part.
    pub fn add(&mut self, other: &Self) {
        self.offered += other.offered;
        self.refused += other.refused;
        self.paused += other.paused;
        self.direction += other.direction;
        self.filtered += other.filtered;
        self.ruled_out += other.ruled_out;
        self.sampled_out += other.sampled_out;
        self.delivered += other.delivered;
        self.dropped_full += other.dropped_full;
        self.dropped_budget += other.dropped_budget;
        self.dropped_quarantine += other.dropped_quarantine;
        self.bytes += other.bytes;
        self.rings += other.rings;
    }

    /// Frames whose fate is counted; equal to `offered` or we have a bug.
    pub fn accounted(&self) -> u64 {
        self.refused
            + self.paused
            + self.direction
            + self.filtered
            + self.ruled_out
            + self.sampled_out
            + self.delivered
            + self.dropped_full
            + self.dropped_budget
            + self.dropped_quarantine
    }
}

impl Port {
    /// A port without filters that gets everything, and whose ring is `producer`.
    pub fn new(id: u32, producer: Producer, doorbell: Doorbell) -> Self {
        let snaplen = producer.geometry().snaplen;
        Self {
            id,
            owner: 0,
            producer,
            commons: None,
            guard: None,
            filter: None,
            tuning: Tuning::default(),
            rules: Rules::default(),
            handle: Handle {
                port: id,
                ..Handle::default()
            },
            snaplen,
            share: Share::All,
            doorbell,
            mark_gap: false,
            counters: PortCounters::default(),
            dropped_before: 0,
            quarantined: None,
            sampled: 0,
            due_us: None,
            due_at: None,
        }
    }

    /// Judges as told from the next batch on; all counters stay.
    pub fn tune(&mut self, tuning: Tuning) {
        self.tuning = tuning;
        self.sampled = 0;
    }

    /// Bytes of its ring's record area.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.producer.geometry().capacity
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

    /// Judges a batch, copies what the reader wants, publishes it and rings if that is due.
    #[inline]
    pub fn offer(&mut self, batch: &BatchInfo<'_>) {
        let commons = self.commons.clone();
        let mut turn = commons.as_ref().map(|commons| commons.turn(batch));
        match &mut turn {
            Some(turn) if self.wants_everything() => self.describe_all(batch, turn),
            _ => {
                for (place, &hash) in batch.hashes.iter().enumerate() {
                    if self.share.includes(hash, batch.first + place as u64) {
                        self.judge(place, batch, &mut turn);
                    }
                }
            }
        }
        let ground = turn.map(|turn| turn.ground());
        if self.quarantined.is_none() {
            self.producer.publish();
            self.ring_if_due(batch.now_us, ground);
        }
    }

    /// Whether there is nothing to judge a frame by.
    fn wants_everything(&self) -> bool {
        self.guard.is_none()
            && self.filter.is_none()
            && self.share == Share::All
            && self.tuning.enabled
            && self.tuning.direction == Direction::Both
            && self.tuning.sample <= 1
            && self.rules.accept_everything()
            && self.quarantined.is_none()
    }

    /// Offers a batch to a member of a group that wants everything: a descriptor for each frame.
    ///
    /// NB: the counters go up once per batch, and nothing is asked for each frame that is the same
    /// for all.
    #[inline]
    fn describe_all(&mut self, batch: &BatchInfo<'_>, turn: &mut Turn<'_>) {
        let offered = batch.frames.len() as u64;
        let (mut delivered, mut full, mut bytes) = (0, 0, 0);
        let mut lied = None;
        for (place, frame) in batch.frames.iter().enumerate() {
            let meta = || meta_of(place, batch);
            match turn.give(&mut self.producer, place, frame, meta, self.mark_gap) {
                Ok(true) => {
                    self.mark_gap = false;
                    delivered += 1;
                    bytes += frame.bytes.len().min(self.snaplen as usize) as u64;
                }
                Ok(false) => full += 1,
                Err(lie) => {
                    lied = Some(lie);
                    break;
                }
            }
        }
        let counters = &mut self.counters;
        counters.offered += offered;
        counters.delivered += delivered;
        counters.bytes += bytes;
        counters.dropped_full += full;
        counters.dropped_quarantine += offered - delivered - full;
        if let Some(lie) = lied {
            self.quarantine(lie.to_string());
        }
    }

    /// Takes these frames of a batch, which its guard and its filter accept and which have the
    /// wanted direction; with `own_filter` it still judges by its filter. `offered` is counted by
    /// whoever hands them over.
    #[inline]
    pub fn take(&mut self, batch: &BatchInfo<'_>, frames: &FrameSet, own_filter: bool) {
        let commons = self.commons.clone();
        let mut turn = commons.as_ref().map(|commons| commons.turn(batch));
        for place in frames.iter() {
            let frame = &batch.frames[place];
            if self.quarantined.is_some() {
                self.counters.dropped_quarantine += 1;
            } else if own_filter && self.is_filtered(frame) {
                self.counters.filtered += 1;
            } else {
                self.accept(place, batch, &mut turn);
            }
        }
        let ground = turn.map(|turn| turn.ground());
        if self.quarantined.is_none() {
            self.producer.publish();
            self.ring_if_due(batch.now_us, ground);
        }
    }

    /// Counts a batch that the port's own program sent, and is not given.
    #[cold]
    pub fn decline(&mut self, batch: &BatchInfo<'_>) {
        self.counters.direction += self.leave_out(batch);
    }

    /// Counts a batch that the port is not given, as its owner's ports have had their part of it.
    pub fn pass_by(&mut self, batch: &BatchInfo<'_>) {
        let missed = self.leave_out(batch);
        self.miss(missed);
    }

    /// Counts what becomes of a batch before its frames are looked at; says how many are left.
    fn leave_out(&mut self, batch: &BatchInfo<'_>) -> u64 {
        let mut missed = 0;
        for (place, &hash) in batch.hashes.iter().enumerate() {
            if !self.share.includes(hash, batch.first + place as u64) {
                continue;
            }
            self.counters.offered += 1;
            // In this order, as in `judge`.
            if self.is_refused(&batch.frames[place]) {
                self.counters.refused += 1;
            } else if self.quarantined.is_some() {
                self.counters.dropped_quarantine += 1;
            } else if !self.tuning.enabled {
                self.counters.paused += 1;
            } else {
                missed += 1;
            }
        }
        missed
    }

    /// Counts frames that the port is not given; the reader learns it from its ring.
    pub fn miss(&mut self, frames: u64) {
        if self.quarantined.is_some() {
            self.counters.dropped_quarantine += frames;
        } else if frames > 0 {
            self.counters.dropped_budget += frames;
            self.producer.miss(frames);
            self.producer.publish();
        }
    }

    /// Stops serving the reader after a panic in its program.
    #[cold]
    pub fn fail(&mut self) {
        self.quarantine(FAILED.to_owned());
    }

    /// Makes the counters exact after a panic in [`take`](Self::take): what is missing to
    /// `accounted` frames is dropped.
    #[cold]
    pub fn settle_to(&mut self, accounted: u64) {
        let missing = accounted.saturating_sub(self.counters.accounted());
        self.counters.dropped_quarantine += missing;
        self.quarantine(FAILED.to_owned());
    }

    /// Makes the counters exact after a panic in [`offer`](Self::offer), which began with
    /// `offered_before` frames offered: what was not judged is dropped.
    #[cold]
    pub fn settle(&mut self, batch: &BatchInfo<'_>, offered_before: u64) {
        let share = self.share;
        let owed = (batch.first..)
            .zip(batch.hashes)
            .filter(|&(turn, &hash)| share.includes(hash, turn))
            .count() as u64;
        self.counters.offered = offered_before + owed;
        self.settle_to(self.counters.offered);
    }

    #[inline]
    fn judge(&mut self, place: usize, batch: &BatchInfo<'_>, turn: &mut Option<Turn<'_>>) {
        let frame = &batch.frames[place];
        self.counters.offered += 1;
        // First, and also in quarantine: no other counter may tell of what the operator refuses.
        if self.is_refused(frame) {
            self.counters.refused += 1;
            return;
        }
        if self.quarantined.is_some() {
            self.counters.dropped_quarantine += 1;
            return;
        }
        if !self.tuning.enabled {
            self.counters.paused += 1;
            return;
        }
        let outbound = frame.flags & flags::OUTBOUND != 0;
        let wanted = match self.tuning.direction {
            Direction::Both => true,
            Direction::Rx => !outbound,
            Direction::Tx => outbound,
        };
        if !wanted {
            self.counters.direction += 1;
            return;
        }
        if self.is_filtered(frame) {
            self.counters.filtered += 1;
            return;
        }
        self.accept(place, batch, turn);
    }

    #[inline]
    fn is_refused(&self, frame: &Frame<'_>) -> bool {
        let guard = self.guard.as_ref();
        guard.is_some_and(|guard| guard.run(frame.bytes, frame.wire_len) == 0)
    }

    #[inline]
    fn is_filtered(&self, frame: &Frame<'_>) -> bool {
        let filter = self.filter.as_ref();
        filter.is_some_and(|filter| filter.run(frame.bytes, frame.wire_len) == 0)
    }

    /// What comes behind the filters.
    #[inline]
    fn accept(&mut self, place: usize, batch: &BatchInfo<'_>, turn: &mut Option<Turn<'_>>) {
        let frame = &batch.frames[place];
        if !self.rules.accept(frame.bytes, batch.now_us) {
            self.counters.ruled_out += 1;
            return;
        }
        if self.tuning.sample > 1 {
            self.sampled += 1;
            if self.sampled < self.tuning.sample {
                self.counters.sampled_out += 1;
                return;
            }
            self.sampled = 0;
        }
        let bytes = &frame.bytes[..frame.bytes.len().min(self.snaplen as usize)];
        let meta = || meta_of(place, batch);
        let given = match turn {
            None => {
                let mut meta = meta();
                if self.mark_gap {
                    meta.flags |= flags::GAP;
                }
                self.producer.push(&meta, bytes)
            }
            Some(turn) => turn.give(&mut self.producer, place, frame, meta, self.mark_gap),
        };
        match given {
            Ok(true) => {
                self.mark_gap = false;
                self.counters.delivered += 1;
                self.counters.bytes += bytes.len() as u64;
            }
            Ok(false) => self.counters.dropped_full += 1,
            Err(lie) => {
                self.counters.dropped_quarantine += 1;
                self.quarantine(lie.to_string());
            }
        }
    }

    /// Stops serving this reader; its frames are counted as dropped from now on.
    pub fn quarantine(&mut self, reason: String) {
        if self.quarantined.is_none() {
            peer_log!(
                log::Level::Warn,
                "port",
                "port {} is quarantined: {reason}",
                self.id
            );
            self.producer.finish(Life::Quarantined);
            self.doorbell.ring();
            (self.due_us, self.due_at) = (None, None);
            self.quarantined = Some(reason);
        }
    }

    /// Why the port is in quarantine, if it is.
    pub fn quarantined(&self) -> Option<&str> {
        self.quarantined.as_deref()
    }

    /// Ends the ring (the source ended, the port was closed) and wakes the reader.
    pub fn finish(&mut self, life: Life) {
        if self.quarantined.is_none() {
            self.producer.finish(life);
            self.doorbell.ring();
            (self.due_us, self.due_at) = (None, None);
        }
    }

    /// When [`tick`](Self::tick) is to be called at the latest if nothing is offered before.
    #[inline]
    pub fn due_us(&self) -> Option<u64> {
        self.due_us
    }

    /// Where the arena of its group is when [`tick`](Self::tick) is to be called at the latest,
    /// whatever the time.
    #[inline]
    pub fn due_at(&self) -> Option<u64> {
        self.due_at
    }

    /// Rings a reader whose maximum delay has passed, or of whose unread packets the arena will
    /// soon be over others.
    pub fn tick(&mut self, now_us: u64) {
        if self.quarantined.is_some() {
            return;
        }
        let ground = self.commons.as_ref().map(|commons| commons.ground());
        let turned = ground
            .zip(self.due_at)
            .is_some_and(|(ground, due_at)| ground.now >= due_at);
        if turned || self.due_us.is_some_and(|due_us| due_us <= now_us) {
            self.ring_if_due(now_us, ground);
        }
    }

    #[inline]
    fn ring_if_due(&mut self, now_us: u64, ground: Option<Ground>) {
        // Whoever frees the page makes each store to it a fault.
        if !self.producer.is_whole() {
            self.quarantine(OVERWRITTEN.to_owned());
            return;
        }
        self.due_us = match self.producer.bell_on(now_us, ground) {
            Bell::Quiet => None,
            Bell::Later(due_us) => Some(due_us),
            Bell::Ring => {
                self.counters.rings += 1;
                self.doorbell.ring();
                None
            }
        };
        self.due_at = self.producer.due_at();
    }
}

/// What a record says of a frame besides its bytes.
#[inline]
fn meta_of(place: usize, batch: &BatchInfo<'_>) -> Meta {
    let frame = &batch.frames[place];
    Meta {
        ts_ns: frame.ts_ns,
        wire_len: frame.wire_len,
        flow_hash: batch.hashes[place],
        lost: 0,
        flags: frame.flags,
        vlan_tci: frame.vlan_tci,
        source: batch.source,
        queue: batch.queue,
    }
}

/// Why a port is in quarantine whose reader did what only the host may.
const OVERWRITTEN: &str = "its reader wrote over the host's words, or freed their page";
/// Why a port is in quarantine after a panic.
const FAILED: &str = "the daemon failed while serving it; please report this";

#[cfg(test)]
pub(crate) mod tests;

//! One attached reader, as one queue's thread sees it: ring, filters, doorbell, counters.
//!
//! A port of a source with several queues has one [`Port`] (and one ring) in each queue's thread.
//! Nothing a reader does reaches another port: a full ring drops and counts (R5), an impossible
//! index quarantines this port (R2), a panic is caught by the fanout and quarantines this port
//! (R10), and the doorbell never blocks (R8).

pub mod doorbell;
mod judge;
mod program;

use std::num::NonZeroU16;
use std::sync::{Arc, Mutex};

use vnplug_ring::control::Segments;
use vnplug_ring::layout::{Life, Meta, flags};
use vnplug_ring::{Bell, Ground, PeerLied, Producer};

use crate::batch::{BatchInfo, Handle};
use crate::commons::{Commons, Turn};
use doorbell::Doorbell;
pub use judge::{Judge, Share};
pub use program::{Lost, PortProgram, Totals, changed, passed};
use vnplug_filter::{FrameSet, Program};
use vnplug_frame::Frame;
use vnplug_frame::offload::Piece;
use vnplug_os::peer_log;

/// One reader's part in one queue.
#[derive(Debug)]
pub struct Port {
    /// The port's number in the daemon.
    pub id: u32,
    /// Its number on the switch, if it takes part in one: then it is given what is due to it.
    pub member: Option<NonZeroU16>,
    /// The port of a switch of which alone it is shown the frames.
    pub only: Option<NonZeroU16>,
    /// The number of its owner in the daemon: what ports of one owner cost is counted together.
    pub owner: u32,
    /// Its ring; of packets or, in a group, of descriptors.
    pub producer: Producer,
    /// What it shares with the other members of its group.
    pub commons: Option<Arc<Commons>>,
    /// Which frames it gets.
    pub judge: Judge,
    /// The operator's program that what it gets goes through.
    pub program: Option<Arc<Mutex<PortProgram>>>,
    /// Which ports of its program belong together with it.
    pub handle: Handle,
    /// Captured bytes per packet, at most the ring's snaplen.
    pub snaplen: u32,
    /// How it gets super-frames.
    pub segments: Segments,
    /// How the reader is woken.
    pub doorbell: Doorbell,
    /// The first record is marked as following a gap.
    pub mark_gap: bool,
    /// The fates of all offered frames.
    pub counters: PortCounters,
    /// What the kernel had dropped of this queue when the port was attached.
    pub dropped_before: u64,
    /// How much its reader had not read when it was half full and the reader last took something; and when that was.
    crowded: Option<(u64, u64)>,
    quarantined: Option<String>,
    is_revoked: bool,
    due_us: Option<u64>,
    due_at: Option<u64>,
}

/// The fate of every frame offered to a port, or of each packet that it became. Exactly one counter
/// goes up for each, so `offered` and `cut` are the sum of all the others but `bytes` and `rings`
/// (point S).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames this port had to judge.
    pub offered: u64,
    /// Refused by the operator's obligatory filter.
    pub refused: u64,
    /// Skipped while the reader had paused the port.
    pub paused: u64,
    /// Not the wanted direction, or sent by the port's own program.
    pub direction: u64,
    /// Not wanted by the reader's filter.
    pub filtered: u64,
    /// Not wanted by the reader's rules.
    pub ruled_out: u64,
    /// Passed the filter and was left out by 1-in-N sampling.
    pub sampled_out: u64,
    /// Dropped by the operator's program.
    pub program: u64,
    /// Published in the ring.
    pub delivered: u64,
    /// Dropped: the ring was full.
    pub dropped_full: u64,
    /// Dropped unseen: the source had more than its thread could do, and the owner's ports had used
    /// up their part of it.
    pub dropped_budget: u64,
    /// Dropped: the port is in quarantine.
    pub dropped_quarantine: u64,
    /// Packets that super-frames became, beyond one for each: they are in the fates, and not in
    /// `offered`.
    pub cut: u64,
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
        self.program += other.program;
        self.delivered += other.delivered;
        self.dropped_full += other.dropped_full;
        self.dropped_budget += other.dropped_budget;
        self.dropped_quarantine += other.dropped_quarantine;
        self.cut += other.cut;
        self.bytes += other.bytes;
        self.rings += other.rings;
    }

    /// Frames whose fate is counted; a super-frame is one, whatever it became. Equal to `offered` or we
    /// have a bug.
    pub fn accounted(&self) -> u64 {
        self.refused
            + self.paused
            + self.direction
            + self.filtered
            + self.ruled_out
            + self.sampled_out
            + self.program
            + self.delivered
            + self.dropped_full
            + self.dropped_budget
            + self.dropped_quarantine
            - self.cut
    }
}

impl Port {
    /// A port without filters that gets everything, and whose ring is `producer`.
    pub fn new(id: u32, producer: Producer, doorbell: Doorbell) -> Self {
        let snaplen = producer.geometry().snaplen;
        Self {
            id,
            member: None,
            only: None,
            owner: 0,
            producer,
            commons: None,
            judge: Judge::default(),
            program: None,
            handle: Handle {
                port: id,
                ..Handle::default()
            },
            snaplen,
            segments: Segments::Wire,
            doorbell,
            mark_gap: false,
            counters: PortCounters::default(),
            dropped_before: 0,
            crowded: None,
            quarantined: None,
            is_revoked: false,
            due_us: None,
            due_at: None,
        }
    }

    /// Bytes of its ring's record area.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.producer.geometry().capacity
    }

    /// Takes what it wants of these frames, copies that into its ring, publishes it, and rings the
    /// reader if that is due.
    ///
    /// NB: a port that takes everything has no checks per frame, and its counters go up once per
    /// batch.
    #[inline]
    pub fn take(&mut self, batch: &BatchInfo<'_>, offered: Offered<'_>) {
        if let Some(program) = self.program.clone() {
            return self.take_programmed(&program, batch, offered);
        }
        let Self {
            judge, counters, ..
        } = self;
        let mut way = Way {
            producer: &mut self.producer,
            turn: self.commons.as_deref().map(|commons| commons.turn(batch)),
            mark_gap: &mut self.mark_gap,
            snaplen: self.snaplen,
            cuts: self.segments == Segments::Wire,
            lie: None,
        };
        let frame_at = |place: usize| (place, &batch.frames[place], batch.hashes[place]);
        match offered {
            Offered::Whole if judge.takes_all() => {
                let frames = batch.frames.iter().zip(batch.hashes).enumerate();
                let frames = frames.map(|(place, (frame, &hash))| (place, frame, hash));
                let count = batch.frames.len() as u64;
                counters.offered += count;
                way.give_all(frames, count, batch, counters);
            }
            Offered::Whole => {
                for place in 0..batch.frames.len() {
                    if judge.takes(place, batch, counters) {
                        way.give(frame_at(place), batch, counters);
                    }
                }
            }
            Offered::Due(places) if judge.takes_all() => {
                counters.offered += places.len();
                let frames = places.iter().map(frame_at);
                way.give_all(frames, places.len(), batch, counters);
            }
            Offered::Due(places) => {
                for place in places.iter() {
                    if judge.takes(place, batch, counters) {
                        way.give(frame_at(place), batch, counters);
                    }
                }
            }
            Offered::Found { places, by_filter } if judge.takes_all_found(by_filter) => {
                let frames = places.iter().map(frame_at);
                way.give_all(frames, places.len(), batch, counters);
            }
            Offered::Found { places, by_filter } => {
                for place in places.iter() {
                    if judge.takes_found(place, batch, by_filter, counters) {
                        way.give(frame_at(place), batch, counters);
                    }
                }
            }
        }
        let (ground, lie) = way.end();
        self.end_batch(batch.now_us, ground, lie);
    }

    /// Makes visible what a batch brought, and rings the reader if that is due.
    #[inline(always)]
    fn end_batch(&mut self, now_us: u64, ground: Option<Ground>, lie: Option<PeerLied>) {
        if let Some(lie) = lie {
            self.quarantine(lie.to_string());
        }
        if self.quarantined.is_none() {
            self.producer.publish();
            self.ring_if_due(now_us, ground);
        }
    }

    /// Counts a batch that the port's own program sent, and is not given.
    #[cold]
    pub fn decline(&mut self, batch: &BatchInfo<'_>) {
        self.counters.direction += self.judge.leave_out(batch, &mut self.counters);
    }

    /// Whether half of its ring was not read yet, and its reader reads. To be asked again and again.
    pub fn is_crowded(&mut self, now_us: u64) -> bool {
        let used = self.producer.used();
        let is_given = self.quarantined().is_none() && self.judge.is_enabled();
        if !is_given || used <= self.ring_bytes() / 2 {
            self.crowded = None;
            return false;
        }
        match self.crowded {
            Some((least, since_us)) if used >= least => now_us.saturating_sub(since_us) < IDLE_US,
            _ => {
                self.crowded = Some((used, now_us));
                true
            }
        }
    }

    /// Counts a batch that the port is not given, because its owner's ports have used up their
    /// part.
    pub fn pass_by(&mut self, batch: &BatchInfo<'_>) {
        let missed = self.judge.leave_out(batch, &mut self.counters);
        self.miss(missed);
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

    /// Makes the counters exact after a panic while it was given a whole batch, which began with
    /// `offered_before` frames offered: what was not judged is dropped.
    #[cold]
    pub fn settle(&mut self, batch: &BatchInfo<'_>, offered_before: u64) {
        self.counters.offered = offered_before + self.judge.owes(batch);
        self.settle_to(self.counters.offered);
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
            self.judge.quarantine();
            self.quarantined = Some(reason);
        }
    }

    /// Why the port is in quarantine, if it is.
    pub fn quarantined(&self) -> Option<&str> {
        self.quarantined.as_deref()
    }

    /// Ends the ring by an operator's word. From then on the operator's filter is this one, which rejects
    /// everything: no counter shows what comes.
    pub fn revoke(&mut self, nothing: Arc<Program>) {
        self.finish(Life::Revoked);
        self.judge.set_guard(Some(nothing));
        self.is_revoked = true;
    }

    /// Sets the operator's filter, and returns the old one; of a port that was revoked it stays.
    pub fn set_guard(&mut self, guard: Option<Arc<Program>>) -> Option<Arc<Program>> {
        if self.is_revoked {
            return guard;
        }
        let old = self.judge.guard().cloned();
        self.judge.set_guard(guard);
        old
    }

    /// Ends the ring (the source ended, the port was closed) and wakes the reader.
    pub fn finish(&mut self, life: Life) {
        if self.quarantined.is_none() && !self.is_revoked {
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

    /// Rings a reader whose maximum delay has passed, or whose unread packets the arena will soon
    /// overwrite.
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
        // A peer that frees the page makes each store to it a fault.
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

/// Which frames of a batch a port is to look at.
#[derive(Debug, Clone, Copy)]
pub enum Offered<'a> {
    /// All.
    Whole,
    /// Those that are due to it.
    Due(&'a FrameSet),
    /// Those that the index found: its guard accepts them and they have the wanted direction. The
    /// caller counts them as offered.
    Found {
        /// Which of the batch.
        places: &'a FrameSet,
        /// The filter still has to run.
        by_filter: bool,
    },
}

/// The last step: from a batch into a port's ring.
struct Way<'a> {
    producer: &'a mut Producer,
    turn: Option<Turn<'a>>,
    mark_gap: &'a mut bool,
    snaplen: u32,
    /// Super-frames are cut.
    cuts: bool,
    /// The reader's indices make no sense: nothing is put into its ring any more.
    lie: Option<PeerLied>,
}

impl Way<'_> {
    /// Gives the reader a frame: its place in the batch, itself, its hash.
    ///
    /// NB: a function, so that `put` is written in the two loops of `give_all` and here only.
    #[inline(never)]
    fn give(
        &mut self,
        frame: (usize, &Frame<'_>, u32),
        batch: &BatchInfo<'_>,
        counters: &mut PortCounters,
    ) {
        if self.lie.is_some() {
            counters.dropped_quarantine += 1;
            return;
        }
        self.give_all(std::iter::once(frame), 1, batch, counters);
    }

    /// Gives the reader all of these frames, of which there are `count`.
    #[inline(always)]
    fn give_all<'f>(
        &mut self,
        frames: impl Iterator<Item = (usize, &'f Frame<'f>, u32)>,
        count: u64,
        batch: &BatchInfo<'_>,
        counters: &mut PortCounters,
    ) {
        let (mut delivered, mut full, mut bytes, mut cut) = (0, 0, 0, 0);
        for (place, frame, hash) in frames {
            if frame.flags & flags::OFFLOAD != 0 && self.cuts {
                let went = self.put_cut(place, frame, hash, batch);
                delivered += went.delivered;
                full += went.dropped_full;
                bytes += went.bytes;
                cut += went.cut;
                if self.lie.is_some() {
                    break;
                }
                continue;
            }
            match self.put(place, frame, hash, batch) {
                Ok(Some(len)) => {
                    delivered += 1;
                    bytes += len;
                }
                Ok(None) => full += 1,
                Err(lie) => {
                    self.lie = Some(lie);
                    break;
                }
            }
        }
        counters.delivered += delivered;
        counters.bytes += bytes;
        counters.dropped_full += full;
        counters.cut += cut;
        counters.dropped_quarantine += count + cut - delivered - full;
    }

    /// Puts what a frame becomes that was left to a NIC, packet by packet.
    #[cold]
    fn put_cut(
        &mut self,
        place: usize,
        frame: &Frame<'_>,
        hash: u32,
        batch: &BatchInfo<'_>,
    ) -> PortCounters {
        let mut went = PortCounters::default();
        let mut cuts = batch.cuts.borrow_mut();
        let packets = cuts.of(place, frame);
        went.cut = packets.len() as u64 - 1;
        for at in packets.clone() {
            let piece = cuts.get(at, frame);
            let mut meta = meta_of(frame, hash, batch);
            meta.wire_len = piece.wire_len;
            meta.flags &= !flags::OFFLOAD;
            if piece.is_summed {
                meta.flags &= !flags::CSUM_NOT_READY;
            }
            if at > packets.start {
                meta.flags &= !flags::SOURCE_LOSS;
            }
            match self.put_piece((place, at), (frame, &piece), &mut meta) {
                Ok(Some(len)) => {
                    went.delivered += 1;
                    went.bytes += len;
                }
                Ok(None) => went.dropped_full += 1,
                Err(lie) => {
                    self.lie = Some(lie);
                    break;
                }
            }
        }
        went
    }

    /// As [`put`](Self::put), of one packet of several.
    fn put_piece(
        &mut self,
        at: (usize, usize),
        (frame, piece): (&Frame<'_>, &Piece<'_>),
        meta: &mut Meta,
    ) -> Result<Option<u64>, PeerLied> {
        let (head, body) = piece.cut_to(self.snaplen);
        let gap = *self.mark_gap;
        let given = match &mut self.turn {
            None => {
                if gap {
                    meta.flags |= flags::GAP;
                }
                self.producer.push_parts(meta, head, body)?
            }
            Some(turn) => turn.give_piece(self.producer, at, (frame, piece), meta, gap)?,
        };
        if !given {
            return Ok(None);
        }
        *self.mark_gap = false;
        Ok(Some((head.len() + body.len()) as u64))
    }

    /// What the doorbell needs to know, and whether the reader lied.
    #[inline]
    fn end(self) -> (Option<Ground>, Option<PeerLied>) {
        (self.turn.map(|turn| turn.ground()), self.lie)
    }

    /// Puts a frame into the ring: how many bytes of it, or `None` if the ring is full.
    #[inline(always)] // As a function it costs 30 instructions more.
    fn put(
        &mut self,
        place: usize,
        frame: &Frame<'_>,
        hash: u32,
        batch: &BatchInfo<'_>,
    ) -> Result<Option<u64>, PeerLied> {
        let bytes = &frame.bytes[..frame.bytes.len().min(self.snaplen as usize)];
        let meta = || meta_of(frame, hash, batch);
        let given = match &mut self.turn {
            None => {
                let mut meta = meta();
                if *self.mark_gap {
                    meta.flags |= flags::GAP;
                }
                self.producer.push(&meta, bytes)?
            }
            Some(turn) => turn.give(self.producer, place, frame, meta, *self.mark_gap)?,
        };
        if !given {
            return Ok(None);
        }
        *self.mark_gap = false;
        Ok(Some(bytes.len() as u64))
    }
}

/// A record's fields besides the frame's bytes.
#[inline]
fn meta_of(frame: &Frame<'_>, flow_hash: u32, batch: &BatchInfo<'_>) -> Meta {
    Meta {
        ts_ns: frame.ts_ns,
        wire_len: frame.wire_len,
        flow_hash,
        lost: 0,
        flags: frame.flags,
        vlan_tci: frame.vlan_tci,
        source: batch.source,
        queue: batch.queue,
        offload: frame.offload,
    }
}

/// Who takes nothing for so long is not waited for, in microseconds.
const IDLE_US: u64 = 200_000;
/// Why a port is in quarantine whose reader did what only the host may.
const OVERWRITTEN: &str = "its reader wrote over the host's words, or freed their page";
/// Why a port is in quarantine after a panic.
const FAILED: &str = "the daemon failed while serving it; please report this";

#[cfg(test)]
pub(crate) mod tests;

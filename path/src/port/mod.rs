//! One attached reader, as one queue's thread sees it: ring, filters, doorbell, counters.
//!
//! A port of a source with several queues has one [`Port`] (and one ring) in each queue's thread.
//! Nothing a reader does reaches another port: a full ring drops and counts (R5), an impossible
//! index quarantines this port (R2), a panic is caught by the fanout and quarantines this port
//! (R10), and the doorbell never blocks (R8).

mod counters;
pub mod doorbell;
mod judge;
mod program;
mod way;

use std::num::NonZeroU16;
use std::sync::{Arc, Mutex};

use vnplug_ring::control::Segments;
use vnplug_ring::layout::Life;
use vnplug_ring::{Bell, Ground, PeerLied, Producer};

use crate::batch::{BatchInfo, Handle};
use crate::commons::Commons;
pub use counters::PortCounters;
use doorbell::Doorbell;
pub use judge::{Judge, Share};
pub use program::{Lost, PortProgram, Totals, changed, passed};
use vnplug_filter::{FrameSet, Program};
use vnplug_os::peer_log;
use way::Way;

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

/// After this time who takes nothing is not waited for, in microseconds.
const IDLE_US: u64 = 200_000;
/// Why a port is in quarantine whose reader did what only the host may.
const OVERWRITTEN: &str = "its reader wrote over the host's words, or freed their page";
/// Why a port is in quarantine after a panic.
const FAILED: &str = "the daemon failed while serving it; please report this";

#[cfg(test)]
pub(crate) mod tests;

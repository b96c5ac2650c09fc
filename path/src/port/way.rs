//! The last step: from a batch into a port's ring.

use vnplug_frame::Frame;
use vnplug_frame::offload::Piece;
use vnplug_ring::layout::{Meta, flags};
use vnplug_ring::{Ground, PeerLied, Producer};

use super::PortCounters;
use crate::batch::BatchInfo;
use crate::commons::Turn;

/// The last step: from a batch into a port's ring.
pub(super) struct Way<'a> {
    pub(super) producer: &'a mut Producer,
    pub(super) turn: Option<Turn<'a>>,
    pub(super) mark_gap: &'a mut bool,
    pub(super) snaplen: u32,
    /// Super-frames are cut.
    pub(super) cuts: bool,
    /// The reader's indices make no sense: nothing is put into its ring any more.
    pub(super) lie: Option<PeerLied>,
}

impl Way<'_> {
    /// Gives the reader a frame: its place in the batch, itself, its hash.
    ///
    /// NB: a function, so that `put` is written in the two loops of `give_all` and here only.
    #[inline(never)]
    pub(super) fn give(
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
    pub(super) fn give_all<'f>(
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
    pub(super) fn end(self) -> (Option<Ground>, Option<PeerLied>) {
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

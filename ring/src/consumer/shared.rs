//! The reader's end of a group: descriptors of its own, packets in an arena that others read too.
//!
//! The arena does not wait, so a packet is copied out and only then judged to be whole: what
//! [`Consumer::next`] and its sisters lend is a private copy, in a small buffer. [`Consumer::look`]
//! shows a packet where it lies, and tells afterwards. Packets that were recycled before they were
//! read are counted as lost, here and in the `lost` of the next packet: the host cannot know.

use std::sync::atomic::Ordering;

use super::{AttachError, Consumer, Corrupt, Taken, read_meta, read_offload};
use crate::arena::{ArenaReader, DESCRIPTOR, DESCRIPTOR_GAP, DESCRIPTORS_MAGIC, Placed};
use crate::layout::{DATA_OFFSET, Meta, RECORD_HEADER, flags, record_size};
use crate::producer::record_header;
use crate::region::Region;

/// What a consumer of a group has besides a ring.
#[derive(Debug)]
pub(super) struct GroupSide {
    arena: ArenaReader,
    /// Private copies of packets, laid out as in a ring.
    pub(super) copies: Region,
    filled: u64,
    /// A copy that nobody took yet; its descriptor is at `tail`.
    staged: Option<Taken>,
    /// No copy is longer.
    snaplen: u32,
    /// Packets recycled before they were read.
    recycled: u64,
    /// Those that no packet has told of yet.
    untold: u32,
    /// A recycled packet had the flag GAP.
    gap: bool,
    /// `tail` at the last arming.
    armed_at: Option<u64>,
}

/// A packet where it lies. The host does not wait for who looks: see [`is_whole`](Consumer::is_whole).
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// What the packet's header says; this is true.
    pub meta: Meta,
    /// Captured bytes, cut to what this reader asked for.
    pub len: u32,
    at: u64,
    seq: Option<u64>,
}

impl Consumer {
    /// Attaches to the ring of descriptors at the start of `region`, whose packets lie in `arena`.
    ///
    /// # Errors
    /// [`AttachError`] if the header is not that of a ring of descriptors of this version.
    pub fn attach_group(region: Region, arena: ArenaReader) -> Result<Self, AttachError> {
        let mut consumer = Self::attach_kind(region, DESCRIPTORS_MAGIC)?;
        if !consumer.tail.is_multiple_of(DESCRIPTOR) {
            return Err(AttachError::Geometry("tail", consumer.tail));
        }
        let snaplen = consumer.geometry.snaplen.min(arena.snaplen());
        let copies = COPIES.max(4 * record_size(snaplen));
        consumer.shared = Some(Box::new(GroupSide {
            arena,
            copies: Region::heap(copies),
            filled: 0,
            staged: None,
            snaplen,
            recycled: 0,
            untold: 0,
            gap: false,
            armed_at: None,
        }));
        Ok(consumer)
    }

    /// Packets of this reader that were recycled before they were read; 0 for a ring of its own.
    /// [`dropped`](Self::dropped) has them in it.
    pub fn recycled(&self) -> u64 {
        self.shared.as_ref().map_or(0, |shared| shared.recycled)
    }

    /// The next packet where it lies, without a copy, or `None` when nothing is published.
    ///
    /// In a ring of the reader's own the host leaves it alone until [`release`](Self::release). In a
    /// group it may be overwritten at any moment: read it by [`read_at`](Self::read_at) or through
    /// [`pointer`](Self::pointer), then ask [`is_whole`](Self::is_whole) before anything that was
    /// read is believed. Ask once, at the end: the answer counts the packet as lost if it is no.
    ///
    /// # Errors
    /// [`Corrupt`] if the record is impossible.
    #[inline]
    pub fn look(&mut self) -> Result<Option<Look>, Corrupt> {
        if self.shared.is_none() {
            if self.tail == self.head {
                self.refresh();
            }
            return Ok(self.take()?.map(|taken| {
                let (_, mut meta) = read_meta(&self.region, taken.at);
                let skip = read_offload(&self.region, taken.at, taken.cap_len, &mut meta);
                Look {
                    meta,
                    len: taken.cap_len - skip as u32,
                    at: taken.at + RECORD_HEADER + skip,
                    seq: None,
                }
            }));
        }
        loop {
            let Some((placed, lost)) = self.descriptor() else {
                return Ok(None);
            };
            let Some(shared) = &mut self.shared else {
                return Ok(None);
            };
            // No loan outlives this call, and the copy that waited is not needed.
            (shared.staged, shared.filled) = (None, 0);
            match shared.arena.look(placed) {
                Ok(Some((mut meta, at, cap_len))) => {
                    let len = cap_len.min(self.geometry.snaplen);
                    let record = at - RECORD_HEADER;
                    let skip = read_offload(shared.arena.region(), record, len, &mut meta);
                    if skip > 0 && !shared.arena.is_whole(placed.seq) {
                        self.skip(lost);
                        continue;
                    }
                    shared.tell(&mut meta, lost);
                    shared.told();
                    self.step();
                    return Ok(Some(Look {
                        meta,
                        len: len - skip as u32,
                        at: at + skip,
                        seq: Some(placed.seq),
                    }));
                }
                Ok(None) => self.skip(lost),
                Err(cap_len) => return Err(self.corrupt(cap_len)),
            }
        }
    }

    /// Copies bytes of a packet that [`look`](Self::look) found, from byte `from` on; as many as there
    /// are. Not to be believed before [`is_whole`](Self::is_whole).
    #[inline]
    pub fn read_at(&self, look: &Look, from: u32, into: &mut [u8]) -> usize {
        let left = look.len.saturating_sub(from) as usize;
        let count = into.len().min(left);
        let region = self
            .shared
            .as_ref()
            .map_or(&self.region, |shared| shared.arena.region());
        region.read(look.at + u64::from(from), &mut into[..count]);
        count
    }

    /// The address of the first byte of a packet that [`look`](Self::look) found; `look.len` bytes may
    /// be read there while the consumer lives. They may change at any moment.
    #[inline]
    pub fn pointer(&self, look: &Look) -> *const u8 {
        let region = self
            .shared
            .as_ref()
            .map_or(&self.region, |shared| shared.arena.region());
        region.address(look.at, u64::from(look.len))
    }

    /// Whether everything that was read of this packet was the packet. If not, it is lost, and
    /// counted so.
    #[inline]
    pub fn is_whole(&mut self, look: &Look) -> bool {
        let (Some(shared), Some(seq)) = (&mut self.shared, look.seq) else {
            return true;
        };
        let whole = shared.arena.is_whole(seq);
        if !whole {
            // What the packet told of losses was told already.
            shared.recycled += 1;
            shared.untold = shared.untold.saturating_add(1);
        }
        whole
    }

    #[cfg(test)]
    pub(crate) fn copies(&self) -> &Region {
        self.shared
            .as_ref()
            .map_or(&self.region, |shared| &shared.copies)
    }

    /// In a group: whether something was taken since the last arming. What is unread then the host
    /// may have published to a reader that was awake, and not look at again while other members
    /// have it overwritten; what came after an arming it does look at in time.
    pub(super) fn is_first_arming(&mut self) -> bool {
        let tail = Some(self.tail);
        self.shared
            .as_mut()
            .is_some_and(|shared| std::mem::replace(&mut shared.armed_at, tail) != tail)
    }

    /// The loans of everything taken are over: the copies' room is free, but for a staged one.
    pub(super) fn begin_copies(&mut self) {
        let Some(shared) = &mut self.shared else {
            return;
        };
        shared.filled = 0;
        if let Some(staged) = &mut shared.staged {
            let size = record_size(staged.cap_len);
            if staged.at > 0 {
                let mut copy = vec![0; size as usize];
                shared.copies.read(staged.at, &mut copy);
                shared.copies.write(0, &copy);
                staged.at = 0;
            }
            shared.filled = size;
        }
    }

    /// Copies the next whole packet out, if there is none waiting; false: there is none.
    ///
    /// `more`: another one must fit after it.
    #[inline(never)]
    pub(super) fn stage(&mut self, more: bool) -> Result<bool, Corrupt> {
        loop {
            let Some(shared) = &self.shared else {
                return Ok(false);
            };
            if shared.staged.is_some() {
                return Ok(true);
            }
            let spare = if more { 2 } else { 1 };
            if shared.copies.len() - shared.filled < spare * record_size(shared.snaplen) {
                return Ok(false);
            }
            let Some((placed, lost)) = self.descriptor() else {
                return Ok(false);
            };
            self.fetch_descriptor_ahead();
            let Some(shared) = &mut self.shared else {
                return Ok(false);
            };
            match shared.copy(placed, lost) {
                Ok(true) => return Ok(true),
                Ok(false) => self.skip(lost),
                Err(cap_len) => return Err(self.corrupt(cap_len)),
            }
        }
    }

    /// Takes the staged copy.
    #[inline]
    pub(super) fn take_staged(&mut self) -> Option<Taken> {
        let shared = self.shared.as_mut()?;
        let taken = shared.staged.take()?;
        // One more copy fits after it or, while only this one is lent, before it.
        if shared.copies.len() - shared.filled < record_size(shared.snaplen) {
            shared.filled = 0;
        }
        shared.told();
        self.step();
        Some(taken)
    }

    /// The descriptor at `tail`.
    #[inline]
    fn descriptor(&mut self) -> Option<(Placed, u32)> {
        if self.tail == self.head {
            self.refresh();
            if self.tail == self.head {
                return None;
            }
        }
        let offset = DATA_OFFSET + (self.tail & (self.geometry.capacity - 1));
        let seq = self.region.load_u64(offset, Ordering::Relaxed);
        let place = self.region.load_u64(offset + 8, Ordering::Relaxed);
        let at = place as u32;
        Some((Placed { seq, at }, (place >> 32) as u32))
    }

    /// Fetches the record of a descriptor some packets on.
    #[inline]
    fn fetch_descriptor_ahead(&self) {
        const AHEAD: u64 = 4 * DESCRIPTOR;
        if AHEAD < self.head.wrapping_sub(self.tail) {
            let at = self.tail.wrapping_add(AHEAD) & (self.geometry.capacity - 1);
            let at = self
                .region
                .load_u32(DATA_OFFSET + at + 8, Ordering::Relaxed);
            if let Some(shared) = &self.shared {
                shared.arena.fetch(at);
            }
        }
    }

    #[inline]
    fn step(&mut self) {
        self.tail = self.tail.wrapping_add(DESCRIPTOR);
        self.read = self.read.wrapping_add(1);
    }

    /// The packet at `tail` was recycled; its descriptor's own losses are told by the next one.
    #[cold]
    fn skip(&mut self, lost: u32) {
        if let Some(shared) = &mut self.shared {
            shared.recycled += 1;
            let before = lost & !DESCRIPTOR_GAP;
            shared.untold = shared.untold.saturating_add(before).saturating_add(1);
            shared.gap |= lost & DESCRIPTOR_GAP != 0;
        }
        self.step();
    }
}

impl GroupSide {
    /// Copies a packet out. `Ok(false)`: it was recycled meanwhile.
    ///
    /// # Errors
    /// Its captured length, if it is impossible.
    #[inline]
    fn copy(&mut self, placed: Placed, lost: u32) -> Result<bool, u32> {
        let Some((mut meta, from, cap_len)) = self.arena.look(placed)? else {
            return Ok(false);
        };
        let cap_len = cap_len.min(self.snaplen);
        self.tell(&mut meta, lost);
        let at = self.filled;
        let header = record_header(&meta, cap_len, meta.lost);
        self.copies
            .copy_record(at, header, self.arena.region(), from, cap_len);
        if !self.arena.is_whole(placed.seq) {
            return Ok(false);
        }
        self.filled += record_size(cap_len);
        self.staged = Some(Taken { at, cap_len });
        Ok(true)
    }

    /// Puts what this reader alone knows into a packet's header.
    #[inline]
    fn tell(&self, meta: &mut Meta, lost: u32) {
        meta.lost = (lost & !DESCRIPTOR_GAP).saturating_add(self.untold);
        if self.gap || lost & DESCRIPTOR_GAP != 0 {
            meta.flags |= flags::GAP;
        }
    }

    fn told(&mut self) {
        (self.untold, self.gap) = (0, false);
    }
}

/// Bytes for private copies: within a core's second cache level.
const COPIES: u64 = 128 << 10;

//! An arena over memory that frames are received into: nobody moves them.
//!
//! ```text
//!            ┌────────────── record area ──────────────┐
//!   header   │ spare │ buffer │ buffer │ buffer │ …     │
//!                      └ header of a record, then the frame as it was received
//! ```
//!
//! Whoever receives, a kernel or a NIC, fills one buffer after the other. The host writes a record's
//! header into the room before a frame that somebody wants, and holds the newest `kept` buffers back
//! before it gives them to be filled again; that is the time that readers have. Sequences count
//! buffers: the frames of one turn have those of its first buffers, so none is above its own.
//!
//! A frame that does not lie in one buffer, or has no room before it, is copied into the spare area.
//! What is overwritten there takes the floor with it, as in any arena.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use super::{AT_UNIT, Placed, STEPS, arena_snaplen, close, header, is_below, lay};
use crate::layout::{DATA_OFFSET, MAX_CAPACITY, MIN_CAPACITY, Meta, RECORD_HEADER, record_size};
use crate::producer::{CreateError, record_header};
use crate::region::Region;

/// What is fixed when an arena of buffers is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferGeometry {
    /// Bytes of a buffer, a multiple of 8.
    pub buffer: u64,
    /// How many there are.
    pub buffers: u64,
    /// How many are held back, the newest ones: fewer than there are.
    pub kept: u64,
    /// Bytes for copies, a power of two; the buffers begin after them.
    pub spare: u64,
    /// Random number of this incarnation, non-zero.
    pub epoch: u64,
    /// Receive queue of the source.
    pub queue: u32,
}

impl BufferGeometry {
    /// Bytes of the record area.
    pub const fn capacity(&self) -> u64 {
        self.spare + self.buffer * self.buffers
    }

    /// No record has more captured bytes than this.
    pub const fn snaplen(&self) -> u32 {
        arena_snaplen(self.spare)
    }

    /// Offset of the first buffer from the start of the arena.
    pub const fn buffers_at(&self) -> u64 {
        DATA_OFFSET + self.spare
    }
}

/// The host's end. It keeps every position privately and never reads the memory.
#[derive(Debug)]
pub struct Buffers {
    region: Region,
    geometry: BufferGeometry,
    /// Sequence of this turn's first buffer.
    turn: u64,
    floor: u64,
    /// Free-running position in the spare area.
    head: u64,
    /// Where its copies begin, and their sequences.
    copies: VecDeque<(u64, u64)>,
    lent: u64,
    copied: u64,
}

impl Buffers {
    /// Lays an empty arena around the buffers in `region`, which may hold anything.
    ///
    /// # Errors
    /// [`CreateError`] when the geometry is not an arena's or does not fit.
    pub fn create(region: Region, geometry: BufferGeometry) -> Result<Self, CreateError> {
        Self::create_at(region, geometry, 0)
    }

    /// [`create`](Self::create) with the sequences starting at `start`.
    pub(crate) fn create_at(
        region: Region,
        geometry: BufferGeometry,
        start: u64,
    ) -> Result<Self, CreateError> {
        let BufferGeometry {
            buffer,
            buffers,
            kept,
            spare,
            ..
        } = geometry;
        if !spare.is_power_of_two() || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&spare) {
            return Err(CreateError::Capacity(spare));
        }
        let fits = buffer
            .checked_mul(buffers)
            .is_some_and(|bytes| bytes <= MAX_AREA - spare);
        if !fits || !buffer.is_multiple_of(AT_UNIT) || buffer <= RECORD_HEADER || kept >= buffers {
            return Err(CreateError::Capacity(buffer.saturating_mul(buffers)));
        }
        let header = lay(
            &region,
            geometry.capacity(),
            geometry.snaplen(),
            (geometry.epoch, geometry.queue),
            start,
        );
        header?;
        Ok(Self {
            region,
            geometry,
            turn: start,
            floor: start,
            head: 0,
            copies: VecDeque::new(),
            lent: 0,
            copied: 0,
        })
    }

    /// What was fixed when it was made.
    pub fn geometry(&self) -> &BufferGeometry {
        &self.geometry
    }

    /// Where it is: how far this moves says how many of the `kept` buffers, or how large a part of the
    /// spare area, were given away, whichever is more.
    #[inline]
    pub fn at(&self) -> u64 {
        let BufferGeometry { spare, kept, .. } = self.geometry;
        // The sum of both parts is no less than the larger one.
        self.turn
            .wrapping_add(self.head / (spare / kept.max(1)).max(1))
    }

    /// Frames that were made records where they lay.
    pub fn lent(&self) -> u64 {
        self.lent
    }

    /// Frames that had to be copied.
    pub fn copied(&self) -> u64 {
        self.copied
    }

    /// Makes a record of the `nth` frame of this turn, of which nobody has made one yet; `bytes` is
    /// the frame, in its buffer or elsewhere. Readers see it when a descriptor that names it is
    /// published.
    #[inline]
    pub fn place(&mut self, nth: u64, meta: &Meta, bytes: &[u8]) -> Placed {
        self.place_at(nth, meta, bytes.as_ptr().addr(), bytes)
    }

    /// [`place`](Self::place) with the address of the frame told apart, for tests without a kernel.
    #[inline]
    pub(crate) fn place_at(
        &mut self,
        nth: u64,
        meta: &Meta,
        address: usize,
        bytes: &[u8],
    ) -> Placed {
        let seq = self.turn.wrapping_add(nth);
        let bytes = &bytes[..bytes.len().min(self.geometry.snaplen() as usize)];
        let Some(at) = self.record_of(address as u64, bytes.len() as u64) else {
            return self.copy(seq, meta, bytes);
        };
        let words = record_header(meta, bytes.len() as u32, meta.lost);
        self.region.write_record(DATA_OFFSET + at, words, &[]);
        self.lent += 1;
        Placed {
            seq,
            at: (at / AT_UNIT) as u32,
        }
    }

    /// The turn is over: it took this many buffers, and as many will be given back, the oldest ones.
    /// None of their frames is whole from now on.
    #[inline]
    pub fn turn(&mut self, taken: u64) {
        self.turn = self.turn.wrapping_add(taken);
        let needed = self.turn.wrapping_sub(self.geometry.kept);
        // In steps, as readers look at the floor all the time.
        self.raise(needed, self.geometry.kept / STEPS);
    }

    /// No packet of this arena is whole any more: its memory may serve something else.
    pub fn retire(&mut self) {
        close(&self.region);
    }

    /// Where the record of a frame begins in the record area, if the frame lies in a buffer with
    /// room before it.
    #[inline]
    fn record_of(&self, address: u64, len: u64) -> Option<u64> {
        let BufferGeometry {
            buffer,
            buffers,
            spare,
            ..
        } = self.geometry;
        let base = self.region.as_ptr().addr() as u64 + self.geometry.buffers_at();
        let at = address.checked_sub(base)?;
        let in_buffer = at % buffer;
        let fits = at < buffer * buffers && in_buffer >= RECORD_HEADER && in_buffer + len <= buffer;
        (fits && at.is_multiple_of(AT_UNIT)).then(|| spare + at - RECORD_HEADER)
    }

    #[cold]
    fn copy(&mut self, seq: u64, meta: &Meta, bytes: &[u8]) -> Placed {
        let capacity = self.geometry.spare;
        let size = record_size(bytes.len() as u32);
        let to_end = capacity - (self.head & (capacity - 1));
        let start = match size > to_end {
            true => self.head.wrapping_add(to_end),
            false => self.head,
        };
        let end = start.wrapping_add(size);
        while let Some(&(at, seq)) = self.copies.front()
            && is_below(at, end.wrapping_sub(capacity))
        {
            self.copies.pop_front();
            self.raise(seq.wrapping_add(1), 0);
        }
        let at = start & (capacity - 1);
        let words = record_header(meta, bytes.len() as u32, meta.lost);
        self.region.write_record(DATA_OFFSET + at, words, bytes);
        self.head = end;
        self.copies.push_back((start, seq));
        self.copied += 1;
        Placed {
            seq,
            at: (at / AT_UNIT) as u32,
        }
    }

    /// Makes the floor at least `needed` before anything below it is overwritten.
    #[inline]
    fn raise(&mut self, needed: u64, step: u64) {
        if is_below(self.floor, needed) {
            self.floor = needed.wrapping_add(step);
            // Relaxed: the fence orders it.
            self.region
                .store_u64(header::FLOOR, self.floor, Ordering::Relaxed);
            // Pairs with the fence in ArenaReader::is_whole: who sees the bytes sees the floor. Where
            // a kernel overwrites them, it has the buffer by a later Release store of ours.
            fence(Ordering::Release);
        }
    }
}

/// The largest record area: what a descriptor's place can name.
const MAX_AREA: u64 = AT_UNIT << 32;

//! A packet arena: frames that the host places once, for the readers of one group.
//!
//! ```text
//!   host ── Arena::place ──▶ arena: records, overwritten in turn ◀── read ── reader, reader, …
//!    └──── a descriptor (sequence, place) in each reader's own ring ────────▶ ┘
//! ```
//!
//! The host writes and never reads; readers read, and need no right to write. Nobody gives room
//! back: **the arena waits for no reader**. Instead the host says, before it overwrites anything,
//! which records are no longer to be trusted.
//!
//! ```text
//! offset  written      content
//! 0x000   host, once   magic · version · epoch · capacity · data offset · snaplen · queue
//! 0x080   host         floor: a record with a sequence below it may have been overwritten
//! 0x1000  host         records as in a ring (header and bytes), `capacity` bytes
//! ```
//!
//! A descriptor is 16 bytes in a ring of its own kind ([`DESCRIPTORS_MAGIC`]; head, tail, life and
//! wake-up are those of any ring):
//!
//! ```text
//! +0  u64 seq    the record's sequence; it only ever grows
//! +8  u32 at     the record's place: units of 8 bytes from the start of the arena's record area
//! +12 u32 lost   packets this reader lost before this one (saturating); top bit: GAP
//! ```
//!
//! The protocol of the floor, which is that of a sequence lock:
//!
//! | host | reader |
//! |---|---|
//! | 1. store `floor` above every record that the next bytes will touch | 1. read the record |
//! | 2. fence (Release) | 2. fence (Acquire) |
//! | 3. overwrite | 3. load `floor`: if the record's `seq` is below, throw away what was read |
//!
//! If the reader saw any byte of step 3, the fences make it see step 1 too. A sequence says nothing
//! of a place: here it is the free-running position of the record, and a host that gives whole
//! buffers back (the packet memory of AF_XDP, [`Buffers`]) counts buffers. When the memory is to serve something else, the
//! host first clears `epoch`: no record of it is whole any more.

mod buffers;

use std::sync::atomic::{Ordering, fence};

pub use buffers::{BufferGeometry, Buffers};

use crate::consumer::AttachError;
use crate::layout::{
    ALIGN, DATA_OFFSET, MAX_CAPACITY, MAX_SNAPLEN, MIN_CAPACITY, Meta, RECORD_HEADER,
    VERSION_MAJOR, VERSION_MINOR, flags, record_size,
};
use crate::producer::{CreateError, prefix, record_header};
use crate::region::Region;

/// First eight bytes of an arena: `VNPLAREN` in memory order.
pub const ARENA_MAGIC: u64 = u64::from_le_bytes(*b"VNPLAREN");
/// First eight bytes of a ring of descriptors: `VNPLDESC` in memory order.
pub const DESCRIPTORS_MAGIC: u64 = u64::from_le_bytes(*b"VNPLDESC");
/// Bytes of a descriptor.
pub const DESCRIPTOR: u64 = 16;
/// How many records ahead of the one just written lines are fetched.
const AHEAD: u64 = 2;
/// In a descriptor's last word: the packet has flag GAP.
pub const DESCRIPTOR_GAP: u32 = 1 << 31;
/// Bytes of a descriptor's `at`.
pub const AT_UNIT: u64 = ALIGN;

/// Fields of the arena's header. As in a ring, `epoch` and what follows has the same place.
pub mod header {
    /// `u64`: [`super::ARENA_MAGIC`].
    pub const MAGIC: u64 = 0x00;
    /// `u16`, `u16`: version, as a ring's.
    pub const MAJOR: u64 = 0x08;
    /// `u64`: random number of this incarnation, not zero; 0 = the memory serves nobody.
    pub const EPOCH: u64 = 0x10;
    /// `u64`: bytes of the record area.
    pub const CAPACITY: u64 = 0x18;
    /// `u64`: offset of the record area.
    pub const DATA: u64 = 0x20;
    /// `u32`: no record has more captured bytes than this.
    pub const SNAPLEN: u64 = 0x28;
    /// `u32`: receive queue of the source.
    pub const QUEUE: u64 = 0x30;
    /// `u64`: records with a sequence below this may have been overwritten.
    pub const FLOOR: u64 = 0x80;
}

/// What is fixed when an arena is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArenaGeometry {
    /// Bytes of the record area, a power of two.
    pub capacity: u64,
    /// No record has more captured bytes than this.
    pub snaplen: u32,
    /// Random number of this incarnation, non-zero.
    pub epoch: u64,
    /// Receive queue of the source.
    pub queue: u32,
}

/// Where a record lies and how its readers know that it still does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placed {
    /// Its sequence.
    pub seq: u64,
    /// Its place, in units of [`AT_UNIT`] from the start of the record area.
    pub at: u32,
}

/// Bytes of memory for an arena with a record area of `capacity` bytes.
pub const fn arena_size(capacity: u64) -> u64 {
    DATA_OFFSET + capacity
}

/// The longest record that an arena of this capacity takes.
pub const fn arena_snaplen(capacity: u64) -> u32 {
    let most = capacity / 4 - RECORD_HEADER - ALIGN;
    if most < MAX_SNAPLEN as u64 {
        most as u32
    } else {
        MAX_SNAPLEN
    }
}

/// The host's end. It keeps every position privately and never reads the memory.
#[derive(Debug)]
pub struct Arena {
    region: Region,
    geometry: ArenaGeometry,
    head: u64,
    floor: u64,
    placed: u64,
}

impl Arena {
    /// Lays an empty arena into `region`, which may hold anything.
    ///
    /// # Errors
    /// [`CreateError`] when the geometry is not an arena's or does not fit.
    pub fn create(region: Region, geometry: ArenaGeometry) -> Result<Self, CreateError> {
        Self::create_at(region, geometry, 0)
    }

    /// [`create`](Self::create) with the positions starting at `start`, a multiple of 8.
    pub(crate) fn create_at(
        region: Region,
        geometry: ArenaGeometry,
        start: u64,
    ) -> Result<Self, CreateError> {
        let ArenaGeometry {
            capacity,
            snaplen,
            epoch,
            queue,
        } = geometry;
        if !capacity.is_power_of_two() || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
            return Err(CreateError::Capacity(capacity));
        }
        // A record, its padding and a step of the floor leave more than a quarter to the readers.
        if snaplen > arena_snaplen(capacity) {
            return Err(CreateError::Snaplen(snaplen));
        }
        lay(&region, capacity, snaplen, (epoch, queue), start)?;
        Ok(Self {
            region,
            geometry,
            head: start,
            floor: start,
            placed: 0,
        })
    }

    /// What was fixed when it was made.
    pub fn geometry(&self) -> &ArenaGeometry {
        &self.geometry
    }

    /// Where it is: how far this moves says how much of it was overwritten.
    #[inline]
    pub fn at(&self) -> u64 {
        self.head
    }

    /// Frames that were copied into it.
    pub fn placed(&self) -> u64 {
        self.placed
    }

    /// Copies a frame in. Readers see it when a descriptor that names it is published.
    ///
    /// # Panics
    /// If `bytes` is longer than the arena's snaplen.
    #[inline]
    pub fn place(&mut self, meta: &Meta, bytes: &[u8]) -> Placed {
        if meta.flags & flags::OFFLOAD != 0 {
            return self.place_parts(meta, &prefix(meta, bytes), bytes);
        }
        self.place_parts(meta, bytes, &[])
    }

    /// As [`place`](Self::place), with the record's bytes in two parts.
    ///
    /// # Panics
    /// If both together are longer than the arena's snaplen.
    #[inline]
    pub fn place_parts(&mut self, meta: &Meta, head: &[u8], rest: &[u8]) -> Placed {
        let len = head.len() + rest.len();
        assert!(len <= self.geometry.snaplen as usize, "cut to the snaplen");
        let capacity = self.geometry.capacity;
        let size = record_size(len as u32);
        let to_end = capacity - (self.head & (capacity - 1));
        let start = if size > to_end {
            self.head.wrapping_add(to_end)
        } else {
            self.head
        };
        let end = start.wrapping_add(size);
        self.raise(end.wrapping_sub(capacity));
        let offset = start & (capacity - 1);
        let header = record_header(meta, len as u32, meta.lost);
        self.region.write_record(DATA_OFFSET + offset, header, head);
        if !rest.is_empty() {
            let rest_at = DATA_OFFSET + offset + RECORD_HEADER + head.len() as u64;
            self.region.write(rest_at, rest);
        }
        self.head = end;
        self.placed += 1;
        self.own_ahead(end, size);
        Placed {
            seq: start,
            at: (offset / AT_UNIT) as u32,
        }
    }

    /// Takes the lines of a record of the same size, some records from now, back from the readers'
    /// caches.
    ///
    /// NB: all of them, since readers of a group copy whole frames out. 1514-byte frames to one
    /// member: 7.8 → 9.8 Mpps written, 7.7 → 8.4 taken; to eight: 4.6 → 6.7, and 0.9 → 0.5, as
    /// what is overwritten before a reader comes is lost.
    #[inline]
    fn own_ahead(&self, end: u64, size: u64) {
        let mask = self.geometry.capacity - 1;
        let from = end.wrapping_add(AHEAD * size);
        for line in 0..size.div_ceil(64) {
            let at = from.wrapping_add(64 * line) & mask;
            self.region.prefetch_write(DATA_OFFSET + at);
        }
    }

    /// No packet of this arena is whole any more: its memory may serve something else.
    pub fn retire(&mut self) {
        close(&self.region);
    }

    /// Makes the floor at least `needed` before anything below it is overwritten.
    ///
    /// NB: in steps of a 64th, since every reader looks at this line for every packet: it changes
    /// 64 times in a turn of the arena, and not once for each record.
    #[inline]
    fn raise(&mut self, needed: u64) {
        if is_below(self.floor, needed) {
            self.floor = needed.wrapping_add(self.geometry.capacity / STEPS);
            // Relaxed: the fence orders it.
            self.region
                .store_u64(header::FLOOR, self.floor, Ordering::Relaxed);
            // Pairs with the fence in ArenaReader::is_whole: who sees the bytes sees the floor.
            fence(Ordering::Release);
        }
    }
}

/// Lays the header of an arena with this record area and snaplen, epoch and queue, and floor.
fn lay(
    region: &Region,
    capacity: u64,
    snaplen: u32,
    (epoch, queue): (u64, u32),
    floor: u64,
) -> Result<(), CreateError> {
    if epoch == 0 {
        return Err(CreateError::Epoch(epoch));
    }
    let need = arena_size(capacity);
    if region.len() < need {
        return Err(CreateError::Region {
            need,
            have: region.len(),
        });
    }
    close(region);
    region.clear(0, DATA_OFFSET);
    let words = [
        (
            header::MAJOR,
            u64::from(VERSION_MAJOR) | u64::from(VERSION_MINOR) << 16,
        ),
        (header::CAPACITY, capacity),
        (header::DATA, DATA_OFFSET),
        (header::SNAPLEN, u64::from(snaplen)),
        (header::QUEUE, u64::from(queue)),
        (header::FLOOR, floor),
        (header::EPOCH, epoch),
        // Release: the magic comes last, so that a peer that sees it sees the rest.
        (header::MAGIC, ARENA_MAGIC),
    ];
    for (offset, word) in words {
        region.store_u64(offset, word, Ordering::Release);
    }
    Ok(())
}

fn close(region: &Region) {
    region.store_u64(header::EPOCH, 0, Ordering::Relaxed);
    // As in `raise`: before anything is overwritten.
    fence(Ordering::Release);
}

/// The readers' end; clones share the mapping, which needs to be readable only.
#[derive(Debug, Clone)]
pub struct ArenaReader {
    region: Region,
    epoch: u64,
    data: u64,
    snaplen: u32,
}

impl ArenaReader {
    /// Attaches to the arena at the start of `region`, of which nothing is ever written.
    ///
    /// # Errors
    /// [`AttachError`] if the header is not that of an arena of this version.
    pub fn attach(region: Region) -> Result<Self, AttachError> {
        if region.len() < DATA_OFFSET {
            return Err(AttachError::Geometry("arena", region.len()));
        }
        // Acquire: pairs with the Release of the magic in Arena::create.
        let magic = region.load_u64(header::MAGIC, Ordering::Acquire);
        if magic != ARENA_MAGIC {
            return Err(AttachError::Magic(magic));
        }
        let word = |offset| region.load_u64(offset, Ordering::Relaxed);
        let major = word(header::MAJOR) as u16;
        if major != VERSION_MAJOR {
            return Err(AttachError::Version(major));
        }
        let (data, capacity) = (word(header::DATA), word(header::CAPACITY));
        if !data.is_multiple_of(ALIGN) || data < header::FLOOR + 8 || data > region.len() {
            return Err(AttachError::Geometry("arena's data offset", data));
        }
        if capacity > region.len() - data {
            return Err(AttachError::Geometry("arena's capacity", capacity));
        }
        let snaplen = word(header::SNAPLEN) as u32;
        if snaplen > MAX_SNAPLEN {
            return Err(AttachError::Geometry("snaplen", u64::from(snaplen)));
        }
        let epoch = word(header::EPOCH);
        if epoch == 0 {
            return Err(AttachError::Geometry("arena's epoch", 0));
        }
        let region = region
            .part(0, data + capacity)
            .ok_or(AttachError::Geometry("arena's capacity", capacity))?;
        Ok(Self {
            region,
            epoch,
            data,
            snaplen,
        })
    }

    /// No record has more captured bytes than this.
    pub fn snaplen(&self) -> u32 {
        self.snaplen
    }

    /// Whether everything that was read of this record so far was the record, and not what came
    /// after it.
    #[inline]
    pub fn is_whole(&self, seq: u64) -> bool {
        // Pairs with the fence in Arena::raise: what we read came before it, or we see the floor.
        fence(Ordering::Acquire);
        let floor = self.region.load_u64(header::FLOOR, Ordering::Relaxed);
        let epoch = self.region.load_u64(header::EPOCH, Ordering::Relaxed);
        epoch == self.epoch && !is_below(seq, floor)
    }

    /// Where the record's bytes lie and what its header says; `None` if it was recycled.
    ///
    /// # Errors
    /// The captured length, if the record is whole and impossible.
    #[inline]
    pub(crate) fn look(&self, placed: Placed) -> Result<Option<(Meta, u64, u32)>, u32> {
        let at = self.data + u64::from(placed.at) * AT_UNIT;
        if at + RECORD_HEADER > self.region.len() {
            return Err(u32::MAX);
        }
        let (cap_len, meta) = crate::consumer::read_meta(&self.region, at);
        if !self.is_whole(placed.seq) {
            return Ok(None);
        }
        let bytes = at + RECORD_HEADER;
        if cap_len > self.snaplen || u64::from(cap_len) > self.region.len() - bytes {
            return Err(cap_len);
        }
        Ok(Some((meta, bytes, cap_len)))
    }

    /// Asks for the lines of a record that will be looked at soon.
    #[inline]
    pub(crate) fn fetch(&self, at: u32) {
        let at = self.data + u64::from(at) * AT_UNIT;
        self.region.prefetch(at);
        self.region.prefetch(at + 64);
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }
}

/// Whether free-running `a` is below `b`.
#[inline]
const fn is_below(a: u64, b: u64) -> bool {
    b.wrapping_sub(a).wrapping_sub(1) < 1 << 63
}

/// Steps of the floor in one turn of the arena.
const STEPS: u64 = 64;

// The specification, checked.
const _: () = {
    assert!(header::QUEUE + 8 <= header::FLOOR && header::FLOOR + 8 <= DATA_OFFSET);
    assert!(
        MIN_CAPACITY.is_multiple_of(DESCRIPTOR) && (MIN_CAPACITY / STEPS).is_multiple_of(ALIGN)
    );
    assert!(MAX_CAPACITY / AT_UNIT <= 1 << 32);
    assert!(!is_below(5, 5) && is_below(4, 5) && is_below(u64::MAX, 0) && !is_below(5, 4));
};

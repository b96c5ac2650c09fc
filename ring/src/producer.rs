//! The host's end of a ring: reserve → fill → publish, and the decision to ring the reader.
//!
//! The producer keeps its own `head` and never reads back what it wrote. From the reader it takes
//! `tail`, as a distance; and, after publishing, the wake-up line, of which nothing but "ring now,
//! ring by then, or not" follows. A reader that writes nonsense there is woken too early, too late
//! or never: its own loss.

mod descriptors;
mod publish;

use std::sync::atomic::Ordering;

use crate::consumer::AttachError;
use crate::layout::{
    ALIGN, ATTACHED, DATA_OFFSET, Geometry, HEAD, LIFE, Life, MAGIC, MAX_CAPACITY, MIN_CAPACITY,
    Meta, PAD, PUBLISHED, Place, RECORD_HEADER, SEND_LIFE, SEND_MAGIC, TAIL, WAKE_SEQ, flags,
    header, record_size,
};
use crate::offload::{self, PREFIX};
use crate::region::Region;
use publish::Waiting;
pub use publish::{Bell, Ground};

/// The host's end of one ring.
#[derive(Debug)]
pub struct Producer {
    region: Region,
    /// What the reader writes: in the ring, or in memory of the reader's own.
    words: Region,
    geometry: Geometry,
    head: u64,
    tail: u64,
    /// Bytes from the head on that are known to be free and do not wrap; at least this many are.
    room: u64,
    announced: u64,
    written: u64,
    published: u64,
    dropped: u64,
    lost: u32,
    rung: u32,
    waiting: Option<Waiting>,
}

/// Room for one record, given by [`Producer::reserve`] and used up by [`Producer::fill`]. A slot
/// that is not filled costs nothing: the next reservation gets the same room.
#[derive(Debug)]
#[must_use = "a reserved slot is filled or the record is not written"]
pub struct Slot {
    /// The producer's head when it reserved.
    head: u64,
    /// Bytes skipped up to the end of the area, with a pad record.
    pad: u64,
    cap_len: u32,
}

/// The reader's `tail` is impossible; the port must be quarantined. The reader's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLied {
    /// The host's own head.
    pub head: u64,
    /// What the reader wrote.
    pub tail: u64,
}

/// A ring could not be made; the caller's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreateError {
    /// Not a power of two, or outside [`MIN_CAPACITY`]..=[`MAX_CAPACITY`].
    Capacity(u64),
    /// More than [`MAX_SNAPLEN`](crate::layout::MAX_SNAPLEN), or too large for a ring of this capacity.
    Snaplen(u32),
    /// Zero, or its low eight bits are used.
    Epoch(u64),
    /// The region holds fewer bytes than the ring needs.
    Region {
        /// Bytes needed.
        need: u64,
        /// Bytes there.
        have: u64,
    },
}

impl Producer {
    /// Lays an empty ring into `region`, which may hold anything, and opens it.
    ///
    /// # Errors
    /// [`CreateError`] when the geometry is not a ring's or does not fit.
    pub fn create(region: Region, geometry: Geometry) -> Result<Self, CreateError> {
        Self::create_at(region, geometry, 0)
    }

    /// [`create`](Self::create) with all positions and counts starting at `start`, a multiple of
    /// [`ALIGN`](crate::layout::ALIGN): tests begin just before the wrap at 2^64.
    pub(crate) fn create_at(
        region: Region,
        geometry: Geometry,
        start: u64,
    ) -> Result<Self, CreateError> {
        crate::header::lay(&region, &geometry, MAGIC, LIFE, start)?;
        Ok(Self::at(region, geometry, start, start))
    }

    /// The sender's end of a transmit ring (see [`layout`](crate::layout)), at its present head.
    ///
    /// # Errors
    /// [`AttachError`] if the header is not that of a transmit ring of this version.
    pub fn attach(region: Region) -> Result<Self, AttachError> {
        let geometry = crate::header::look(&region, SEND_MAGIC)?;
        let head = region.load_u64(HEAD, Ordering::Relaxed);
        if !head.is_multiple_of(ALIGN) {
            return Err(AttachError::Geometry("head", head));
        }
        // Where the host is, lies between what the ring can hold and the head.
        let tail = region.load_u64(TAIL, Ordering::Acquire);
        if head.wrapping_sub(tail) > geometry.capacity {
            return Err(AttachError::Geometry("tail", tail));
        }
        let written = region.load_u64(PUBLISHED, Ordering::Relaxed);
        let mut producer = Self::at(region, geometry, head, written);
        producer.tail = tail;
        Ok(producer)
    }

    /// Lays an empty ring of packets into `region`, whose reader writes its words into `words`, at the same
    /// offsets: neither side can write what the other does.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_beside(
        region: Region,
        words: Region,
        geometry: Geometry,
    ) -> Result<Self, CreateError> {
        if words.len() < DATA_OFFSET {
            let (need, have) = (DATA_OFFSET, words.len());
            return Err(CreateError::Region { need, have });
        }
        let producer = Self::create(region, geometry)?;
        Ok(Self { words, ..producer })
    }

    /// The reader writes nonsense: it counts as not attached from now on.
    pub fn disown(&mut self) {
        self.words = self.region.clone();
    }

    /// Whether the reader attached to this very ring; see [`Consumer::attach_beside`].
    ///
    /// [`Consumer::attach_beside`]: crate::Consumer::attach_beside
    #[inline]
    pub fn is_attached(&self) -> bool {
        // Acquire: pairs with the Release in Consumer::attach_beside; its words are this ring's.
        self.words.load_u64(ATTACHED, Ordering::Acquire) == self.geometry.epoch
    }

    fn at(region: Region, geometry: Geometry, start: u64, written: u64) -> Self {
        Self {
            words: region.clone(),
            region,
            geometry,
            head: start,
            tail: start,
            room: 0,
            announced: start,
            written,
            published: written,
            dropped: 0,
            lost: 0,
            rung: 0,
            waiting: None,
        }
    }

    /// The geometry frozen at creation.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Whether who made the ring knows records with [`flags::OFFLOAD`]: its layout is 1.1 or later.
    pub fn knows_offload(&self) -> bool {
        (self.region.load_u64(header::MAJOR, Ordering::Relaxed) >> 16) as u16 >= 1
    }

    /// Whether who made this transmit ring takes posted records.
    pub fn takes_posted(&self) -> bool {
        let takes = self.region.load_u32(header::TAKES, Ordering::Relaxed);
        takes & u32::from(flags::POSTED) != 0
    }

    /// Bytes written since the ring was made, published or not.
    #[inline]
    pub fn position(&self) -> u64 {
        self.head
    }

    /// The memory of the ring.
    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Records this ring lost because it was full.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Records written, published or not yet.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Has the processor fetch what the next record and its publishing will touch.
    #[inline]
    pub fn prefetch(&self) {
        let at = DATA_OFFSET + (self.head & (self.geometry.capacity - 1));
        for offset in [at, at + 64, HEAD] {
            self.region.prefetch_write(offset);
        }
        self.words.prefetch(WAKE_SEQ);
    }

    /// Makes room for a record of `cap_len` bytes. `None`: the ring is full and the loss is counted.
    ///
    /// # Errors
    /// [`PeerLied`] if the reader's index is impossible; stop using the ring.
    #[inline(always)]
    pub fn reserve(&mut self, cap_len: u32) -> Result<Option<Slot>, PeerLied> {
        debug_assert!(cap_len <= self.geometry.snaplen);
        let size = record_size(cap_len);
        if size > self.room {
            return self.find_room(cap_len, size);
        }
        Ok(Some(Slot {
            head: self.head,
            pad: 0,
            cap_len,
        }))
    }

    /// [`reserve`](Self::reserve) at the end of the area, and where the reader's progress is asked for.
    #[cold]
    fn find_room(&mut self, cap_len: u32, size: u64) -> Result<Option<Slot>, PeerLied> {
        let capacity = self.geometry.capacity;
        let to_end = capacity - (self.head & (capacity - 1));
        let pad = if size > to_end { to_end } else { 0 };
        if self.free() < pad + size {
            self.refresh_tail()?;
            if self.free() < pad + size {
                self.dropped += 1;
                self.lose();
                return Ok(None);
            }
        }
        self.room = self.free().min(to_end);
        Ok(Some(Slot {
            head: self.head,
            pad,
            cap_len,
        }))
    }

    /// Bytes that the reader has given back, as far as the host has asked.
    fn free(&self) -> u64 {
        self.geometry.capacity - self.head.wrapping_sub(self.tail)
    }

    /// Writes the record; it becomes visible with the next [`publish`](Self::publish).
    ///
    /// # Panics
    /// If `bytes` is not as long as reserved, or something else was written since the reservation.
    #[inline(always)]
    pub fn fill(&mut self, slot: Slot, meta: &Meta, bytes: &[u8]) {
        assert!(
            bytes.len() == slot.cap_len as usize && slot.head == self.head,
            "filled as reserved"
        );
        let at = self.fill_at(&slot);
        let lost = meta.lost.saturating_add(self.lost);
        let header = record_header(meta, slot.cap_len, lost);
        self.region.write_record(at, header, bytes);
        self.filled(at, slot.cap_len);
    }

    /// Where the record is to be written, past a pad if it needs one.
    #[inline(always)]
    fn fill_at(&mut self, slot: &Slot) -> u64 {
        let mask = self.geometry.capacity - 1;
        if slot.pad > 0 {
            self.region
                .store_u32(DATA_OFFSET + (self.head & mask), PAD, Ordering::Relaxed);
            self.head = self.head.wrapping_add(slot.pad);
            self.room = self.free();
        }
        DATA_OFFSET + (self.head & mask)
    }

    /// A record of `cap_len` bytes was written at `at`.
    #[inline(always)]
    fn filled(&mut self, at: u64, cap_len: u32) {
        let size = record_size(cap_len);
        self.head = self.head.wrapping_add(size);
        self.room -= size;
        self.own_ahead(at + size, AHEAD * size);
        self.lost = 0;
        self.written = self.written.wrapping_add(1);
    }

    /// Reserves and fills in one step. `false`: the ring is full and the loss is counted.
    ///
    /// # Errors
    /// [`PeerLied`] as [`reserve`](Self::reserve).
    ///
    /// NB: all of it is written where it is called: as functions they cost a frame 40 instructions more.
    #[inline(always)]
    pub fn push(&mut self, meta: &Meta, bytes: &[u8]) -> Result<bool, PeerLied> {
        if meta.flags & flags::OFFLOAD != 0 {
            return self.push_parts(meta, &prefix(meta, bytes), bytes);
        }
        match self.reserve(bytes.len() as u32)? {
            Some(slot) => {
                self.fill(slot, meta, bytes);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// As [`push`](Self::push), with the record's bytes in two parts: what comes before a frame, or its new
    /// headers, and the rest.
    ///
    /// # Errors
    /// [`PeerLied`] as [`reserve`](Self::reserve).
    #[cold]
    pub fn push_parts(&mut self, meta: &Meta, head: &[u8], rest: &[u8]) -> Result<bool, PeerLied> {
        let Some(slot) = self.reserve((head.len() + rest.len()) as u32)? else {
            return Ok(false);
        };
        let at = self.fill_at(&slot);
        let lost = meta.lost.saturating_add(self.lost);
        let header = record_header(meta, slot.cap_len, lost);
        self.region.write_record(at, header, head);
        let rest_at = at + RECORD_HEADER + head.len() as u64;
        self.region.write(rest_at, rest);
        self.filled(at, slot.cap_len);
        Ok(true)
    }

    /// As [`push`](Self::push), of a transmit ring [that takes such records](Self::takes_posted): of the record's bytes
    /// `head` come first, and the rest is what lies at `place`, which is not looked at here.
    ///
    /// # Errors
    /// [`PeerLied`] as [`reserve`](Self::reserve).
    #[inline]
    pub fn push_posted(&mut self, flags: u16, head: &[u8], place: Place) -> Result<bool, PeerLied> {
        let Some(slot) = self.reserve(head.len() as u32)? else {
            return Ok(false);
        };
        let meta = Meta {
            ts_ns: place.at,
            wire_len: place.len,
            flags: flags | flags::POSTED,
            queue: place.ring,
            ..Meta::default()
        };
        self.fill(slot, &meta, head);
        Ok(true)
    }

    /// Counts a packet that could not even be offered to the ring (longer than a record may be).
    pub fn lose(&mut self) {
        self.lost = self.lost.saturating_add(1);
    }

    /// Counts packets that were not offered to the ring, as if it had been full; told with the next
    /// [`publish`](Self::publish).
    pub fn miss(&mut self, packets: u64) {
        self.dropped += packets;
        let packets = u32::try_from(packets).unwrap_or(u32::MAX);
        self.lost = self.lost.saturating_add(packets);
    }

    /// Ends the ring's life; what was published stays readable. The reader is to be woken.
    pub fn finish(&mut self, life: Life) {
        self.publish();
        self.region
            .store_u64(LIFE, self.geometry.epoch | life as u64, Ordering::Release);
    }

    /// Whether the words that only the host writes are there; a reader can write over them, and can
    /// free their page. Of a ring that the host made.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.region.load_u64(LIFE, Ordering::Relaxed) & !0xff == self.geometry.epoch
    }

    /// Where a transmit ring is in its life; [`Life::Closed`] also if its memory serves another ring.
    pub fn life(&self) -> Life {
        // Acquire: pairs with the Release in Intake::finish.
        let word = self.region.load_u64(SEND_LIFE, Ordering::Acquire);
        if word & !0xff != self.geometry.epoch {
            Life::Closed
        } else {
            Life::from_word(word)
        }
    }

    /// True if a record of `cap_len` bytes fits now; nothing is counted if not.
    ///
    /// # Errors
    /// [`PeerLied`] as [`reserve`](Self::reserve).
    #[inline]
    pub fn has_room(&mut self, cap_len: u32) -> Result<bool, PeerLied> {
        let capacity = self.geometry.capacity;
        let size = record_size(cap_len);
        let to_end = capacity - (self.head & (capacity - 1));
        let needed = if size > to_end { to_end + size } else { size };
        if self.head.wrapping_sub(self.tail) + needed <= capacity {
            return Ok(true);
        }
        self.refresh_tail()?;
        Ok(self.head.wrapping_sub(self.tail) + needed <= capacity)
    }

    /// Bytes published and not yet released, as far as the reader tells.
    pub fn used(&self) -> u64 {
        let tail = self.words.load_u64(TAIL, Ordering::Relaxed);
        self.announced
            .wrapping_sub(tail)
            .min(self.geometry.capacity)
    }

    /// Takes the lines that a record of the same size will start on, `ahead` bytes after the head at
    /// `at`, back from the reader's cache.
    ///
    /// NB: only within the room known to be free; further on the reader is still reading. 60-byte
    /// frames between two processes: 142 → 154 Mpps (512 KiB ring), 79 → 98 (64 KiB).
    #[inline]
    fn own_ahead(&self, at: u64, ahead: u64) {
        if ahead < self.room {
            self.region.prefetch_write(at + ahead);
            self.region.prefetch_write(at + ahead + 64);
        }
    }

    #[cold]
    fn refresh_tail(&mut self) -> Result<(), PeerLied> {
        // Acquire: pairs with the Release in Consumer::release; the reader is done with the bytes.
        let tail = self.words.load_u64(TAIL, Ordering::Acquire);
        // A true tail lies between the last one we took and what we announced.
        let distance = self.announced.wrapping_sub(tail);
        if distance > self.announced.wrapping_sub(self.tail) {
            return Err(PeerLied {
                head: self.announced,
                tail,
            });
        }
        self.tail = tail;
        Ok(())
    }
}

/// What comes before a frame in a record that says how it is to be cut or summed.
pub(crate) fn prefix(meta: &Meta, frame: &[u8]) -> [u8; PREFIX] {
    let mut prefix = [0; PREFIX];
    prefix[PREFIX - offload::HEADER..].copy_from_slice(&meta.offload.to_header(frame));
    prefix
}

/// The four words before a record's bytes.
#[inline]
pub(crate) fn record_header(meta: &Meta, cap_len: u32, lost: u32) -> [u64; 4] {
    [
        u64::from(cap_len) | u64::from(meta.wire_len) << 32,
        meta.ts_ns,
        u64::from(meta.flow_hash) | u64::from(lost) << 32,
        u64::from(meta.flags)
            | u64::from(meta.vlan_tci) << 16
            | u64::from(meta.source) << 32
            | u64::from(meta.queue) << 48,
    ]
}

impl std::fmt::Display for PeerLied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { head, tail } = self;
        write!(f, "the reader's tail {tail} is impossible with head {head}")
    }
}

impl std::error::Error for PeerLied {}

impl std::fmt::Display for CreateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Capacity(bytes) => write!(
                f,
                "a ring of {bytes} bytes: use a power of two from {MIN_CAPACITY} to {MAX_CAPACITY}"
            ),
            Self::Snaplen(snaplen) => {
                write!(
                    f,
                    "a snaplen of {snaplen} bytes does not fit the ring, make it larger"
                )
            }
            Self::Epoch(epoch) => write!(f, "epoch {epoch:#x} is zero or uses its low eight bits"),
            Self::Region { need, have } => write!(f, "the ring needs {need} bytes, {have} given"),
        }
    }
}

impl std::error::Error for CreateError {}

/// How many records ahead of the one just written lines are fetched.
const AHEAD: u64 = 8;

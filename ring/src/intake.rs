//! The host's end of a transmit ring: frames of somebody who may lie, copied out one by one.
//!
//! The sender owns the memory and may change any of it at any time. So the host keeps its own
//! position and geometry, takes `head` as a distance that must not exceed the capacity nor fall
//! back, loads a record's length **once** and checks that copy, and copies the bytes out **once**:
//! what it then looks at, nobody else can change (R1 to R3). Every call does work for one record at
//! most; how many calls there are in a turn is the caller's bound (R4).

use std::sync::atomic::Ordering;

use crate::control::Segments;
use crate::layout::{
    ALIGN, DATA_OFFSET, Geometry, HEAD, Life, PAD, PUBLISHED, Place, READ, RECORD_HEADER,
    SEND_LIFE, SEND_MAGIC, TAIL, flags, header, record_size,
};
use crate::offload::{HEADER, Offload, PREFIX};
use crate::producer::CreateError;
use crate::region::Region;
use crate::wake;

/// The host's end of a transmit ring.
#[derive(Debug)]
pub struct Intake {
    region: Region,
    geometry: Geometry,
    /// The last head that was believable.
    head: u64,
    tail: u64,
    released: u64,
    taken: u64,
    wake_seq: u32,
    /// [`flags::POSTED`], if records may be posted.
    posted: u16,
    /// The record areas in which they may name places, by number.
    areas: Vec<Option<Area>>,
}

/// A record area that was lent.
#[derive(Debug)]
struct Area {
    /// The port that reads the ring.
    port: u32,
    region: Region,
}

/// A frame that was taken: where it lies in the memory it was copied to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Its first byte.
    pub start: usize,
    /// After its last byte.
    pub end: usize,
    /// What its sender left to do, which may not fit it.
    pub offload: Offload,
}

/// The word of a record with its flags, in the lower half.
const FLAGS: u64 = 24;
/// Of a posted record: how many bytes lie at the place, where that is, and in which ring.
const PLACE_LEN: u64 = 4;
const PLACE_AT: u64 = 8;
const PLACE_RING: u64 = 30;

/// What the sender wrote is impossible; the port must be quarantined. The sender's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SenderLied {
    /// Its head.
    Head {
        /// What it wrote.
        head: u64,
        /// The host's own position.
        tail: u64,
    },
    /// What only the host writes.
    Words,
    /// It freed pages of the ring.
    Holes,
    /// The length of a record.
    Record {
        /// What it wrote.
        cap_len: u32,
        /// Bytes published from the record on.
        available: u64,
    },
    /// The place of a posted record. The record is passed and nothing of it is to be sent; the ring is as good as
    /// before.
    Place(Place),
}

impl Intake {
    /// Lays an empty ring into `region`, which may hold anything, and opens it.
    ///
    /// # Errors
    /// [`CreateError`] when the geometry is not a ring's or does not fit.
    pub fn create(region: Region, geometry: Geometry) -> Result<Self, CreateError> {
        Self::create_at(region, geometry, 0)
    }

    /// [`create`](Self::create) with all positions and counts starting at `start`.
    pub(crate) fn create_at(
        region: Region,
        geometry: Geometry,
        start: u64,
    ) -> Result<Self, CreateError> {
        crate::header::lay(&region, &geometry, SEND_MAGIC, SEND_LIFE, start)?;
        Ok(Self {
            region,
            geometry,
            head: start,
            tail: start,
            released: start,
            taken: start,
            wake_seq: 0,
            posted: 0,
            areas: Vec::new(),
        })
    }

    /// Takes posted records from now on, whose places are in these record areas, of its own port, and nowhere else. To be
    /// called before the sender is told of the ring.
    pub fn lend(&mut self, areas: impl IntoIterator<Item = Region>) {
        self.lend_of(self.geometry.port, 0, areas);
        self.posted = flags::POSTED;
        let takes = u32::from(flags::POSTED);
        self.region
            .store_u32(header::TAKES, takes, Ordering::Release);
    }

    /// Places may be in these record areas of another port, too, whose rings have the numbers from `first` on. What had
    /// one of them before comes back.
    pub fn lend_of(
        &mut self,
        port: u32,
        first: u16,
        areas: impl IntoIterator<Item = Region>,
    ) -> Vec<Region> {
        let mut before = Vec::new();
        for (number, region) in (usize::from(first)..).zip(areas) {
            if number >= self.areas.len() {
                self.areas.resize_with(number + 1, || None);
            }
            let old = self.areas[number].replace(Area { port, region });
            before.extend(old.map(|old| old.region));
        }
        before
    }

    /// Nothing of that port may be named any more; its record areas come back.
    pub fn withdraw(&mut self, port: u32) -> Vec<Region> {
        let its = |area: &mut Option<Area>| area.take_if(|area| area.port == port);
        let areas = self.areas.iter_mut().filter_map(its);
        areas.map(|area| area.region).collect()
    }

    /// The geometry frozen at creation.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Copies the next frame into `into` and returns its length in bytes; `None`: nothing is
    /// published.
    ///
    /// # Errors
    /// [`SenderLied`]; stop using the ring.
    ///
    /// # Panics
    /// If `into` is shorter than the geometry's `snaplen`.
    #[inline]
    pub fn take(&mut self, into: &mut [u8]) -> Result<Option<usize>, SenderLied> {
        let copied = self.copy(|_| into)?;
        Ok(copied.map(|(bytes, _)| bytes.len()))
    }

    /// Copies the next frame to where `place` says when it is told how many bytes to have room for, `snaplen` at most.
    /// Returns where in those bytes it lies, and what is left to do with it, which may not fit it: nothing, unless its sender
    /// may leave some ([`Segments::Merged`]).
    ///
    /// # Errors
    /// [`SenderLied`]; stop using the ring.
    ///
    /// # Panics
    /// If that place is shorter.
    #[inline]
    pub fn take_to<'a>(
        &mut self,
        segments: Segments,
        place: impl FnOnce(usize) -> &'a mut [u8],
    ) -> Result<Option<(&'a [u8], Sent)>, SenderLied> {
        let Some((bytes, flags)) = self.copy(place)? else {
            return Ok(None);
        };
        let mut sent = Sent {
            start: 0,
            end: bytes.len(),
            offload: Offload::default(),
        };
        if segments == Segments::Merged && flags & flags::OFFLOAD != 0 {
            // Of our own copy.
            let header = bytes.get(PREFIX - HEADER..PREFIX);
            let Some(header) = header.and_then(<[u8]>::first_chunk) else {
                return Err(self.lie(sent.end as u32));
            };
            sent.start = PREFIX;
            sent.offload = Offload::from_header(header);
        }
        Ok(Some((bytes, sent)))
    }

    /// Copies the next record's bytes out: they, and its flags.
    #[inline(always)]
    fn copy<'a>(
        &mut self,
        place: impl FnOnce(usize) -> &'a mut [u8],
    ) -> Result<Option<(&'a [u8], u16)>, SenderLied> {
        if self.tail == self.head && !self.refresh()? {
            return Ok(None);
        }
        let capacity = self.geometry.capacity;
        let mut offset = self.tail & (capacity - 1);
        let mut skip = 0;
        let mut cap_len = self.cap_len(offset);
        if cap_len == PAD {
            skip = capacity - offset;
            if skip >= self.head.wrapping_sub(self.tail) {
                return Err(self.lie(cap_len));
            }
            offset = 0;
            cap_len = self.cap_len(0);
        }
        if cap_len > self.geometry.snaplen {
            return Err(self.lie(cap_len));
        }
        let size = record_size(cap_len);
        let available = self.head.wrapping_sub(self.tail) - skip;
        if size > available || size > capacity - offset {
            return Err(self.lie(cap_len));
        }
        let (at, len) = (DATA_OFFSET + offset, cap_len as usize);
        let flags = self.region.load_u32(at + FLAGS, Ordering::Relaxed) as u16;
        self.tail = self.tail.wrapping_add(skip + size);
        self.taken = self.taken.wrapping_add(1);
        let into = match flags & self.posted {
            0 => {
                let into = &mut place(len)[..len];
                self.region.read(at + RECORD_HEADER, into);
                into
            }
            _ => self.copy_posted(at, cap_len, place)?,
        };
        Ok(Some((into, flags)))
    }

    /// Copies the bytes of a posted record out, which begins at `at` with `cap_len` bytes of its own.
    #[inline(never)]
    fn copy_posted<'a>(
        &self,
        at: u64,
        cap_len: u32,
        place: impl FnOnce(usize) -> &'a mut [u8],
    ) -> Result<&'a mut [u8], SenderLied> {
        // The one load of each.
        let named = Place {
            ring: self.region.load_u16(at + PLACE_RING, Ordering::Relaxed),
            at: self.region.load_u64(at + PLACE_AT, Ordering::Relaxed),
            len: self.region.load_u32(at + PLACE_LEN, Ordering::Relaxed),
        };
        let len = u64::from(named.len);
        let total = u64::from(cap_len) + len;
        let area = self.areas.get(usize::from(named.ring));
        let area = area.and_then(Option::as_ref).map(|area| &area.region);
        let area = area.filter(|area| {
            let last = area.len().checked_sub(len);
            let fits = last.is_some_and(|last| named.at <= last);
            fits && total <= u64::from(self.geometry.snaplen)
        });
        let Some(area) = area else {
            return Err(SenderLied::Place(named));
        };
        let into = &mut place(total as usize)[..total as usize];
        let (own, rest) = into.split_at_mut(cap_len as usize);
        self.region.read(at + RECORD_HEADER, own);
        // NB: another thread of the host may write there, if the sender has released what it posts: it sends other bytes
        // that it was given, then.
        area.read(named.at, rest);
        Ok(into)
    }

    /// Whether the words that only the host writes are there; a sender can write over them, and can
    /// free their page.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.region.load_u64(SEND_LIFE, Ordering::Relaxed) & !0xff == self.geometry.epoch
    }

    /// Gives the room of what was taken back to the sender. Once per batch.
    #[inline]
    pub fn release(&mut self) {
        if self.released != self.tail {
            // Release: pairs with the Acquire in Producer::refresh_tail; our copies are made.
            self.region.store_u64(TAIL, self.tail, Ordering::Release);
            self.region.store_u64(READ, self.taken, Ordering::Release);
            self.released = self.tail;
        }
    }

    /// True if something is published.
    ///
    /// # Errors
    /// [`SenderLied`], as [`take`](Self::take).
    #[inline]
    pub fn has_news(&mut self) -> Result<bool, SenderLied> {
        Ok(self.tail != self.head || self.refresh()?)
    }

    /// Asks to be kicked once, at the next record. True: something is published already; do not
    /// sleep.
    ///
    /// # Errors
    /// [`SenderLied`], as [`take`](Self::take).
    pub fn arm(&mut self) -> Result<bool, SenderLied> {
        self.release();
        self.wake_seq = self.wake_seq.wrapping_add(1);
        // With a delay of 0 the first record rings, whatever the count.
        wake::arm(&self.region, self.taken.wrapping_add(1), 0, self.wake_seq);
        self.has_news()
    }

    /// Records that were published and not taken, as their sender counts them: no more than there is room
    /// for in what it published. Nothing of them is read.
    pub fn pending(&mut self) -> u64 {
        if self.refresh().is_err() {
            return 0;
        }
        let published = self.region.load_u64(PUBLISHED, Ordering::Relaxed);
        let possible = self.head.wrapping_sub(self.tail) / record_size(0);
        published.wrapping_sub(self.taken).min(possible)
    }

    /// Ends the ring's life: nothing is taken any more.
    pub fn finish(&mut self, life: Life) {
        self.release();
        // Release: pairs with the Acquire in Producer::life.
        self.region.store_u64(
            SEND_LIFE,
            self.geometry.epoch | life as u64,
            Ordering::Release,
        );
    }

    /// Records taken since the ring was made.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// The one load of a record's length.
    #[inline]
    fn cap_len(&self, offset: u64) -> u32 {
        self.region
            .load_u32(DATA_OFFSET + offset, Ordering::Relaxed)
    }

    /// Looks for newly published records.
    #[inline]
    fn refresh(&mut self) -> Result<bool, SenderLied> {
        // Acquire: pairs with the Release in Producer::publish; the records are visible.
        let head = self.region.load_u64(HEAD, Ordering::Acquire);
        let ahead = head.wrapping_sub(self.tail);
        let fell_back = ahead < self.head.wrapping_sub(self.tail);
        if ahead > self.geometry.capacity || fell_back || !head.is_multiple_of(ALIGN) {
            let tail = self.tail;
            return Err(SenderLied::Head { head, tail });
        }
        self.head = head;
        Ok(ahead > 0)
    }

    #[cold]
    fn lie(&self, cap_len: u32) -> SenderLied {
        SenderLied::Record {
            cap_len,
            available: self.head.wrapping_sub(self.tail),
        }
    }
}

impl std::fmt::Display for SenderLied {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Head { head, tail } => {
                write!(f, "the sender's head {head} is impossible with tail {tail}")
            }
            Self::Words => write!(
                f,
                "the sender wrote over the host's words, or freed their page"
            ),
            Self::Holes => write!(f, "the sender freed pages of its ring"),
            Self::Record { cap_len, available } => write!(
                f,
                "the sender's record of {cap_len} bytes is impossible with {available} published"
            ),
            Self::Place(Place { ring, at, len }) => write!(
                f,
                "the sender posts {len} bytes at {at} of ring {ring}, which it was not given"
            ),
        }
    }
}

impl std::error::Error for SenderLied {}

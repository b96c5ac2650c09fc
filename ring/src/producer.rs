//! The host's end of a ring: reserve → fill → publish, and the decision to ring the reader.
//!
//! The producer keeps its own `head` and never reads back what it wrote. From the reader it takes
//! `tail`, as a distance; and, after publishing, the wake-up line, of which nothing but "ring now,
//! ring by then, or not" follows. A reader that writes nonsense there is woken too early, too late
//! or never: its own loss.

use std::sync::atomic::{Ordering, fence};

use crate::layout::{
    DATA_OFFSET, DROPPED, Geometry, HEAD, LIFE, Life, MAGIC, MAX_CAPACITY, MAX_DELAY_US,
    MAX_SNAPLEN, MIN_CAPACITY, Meta, PAD, PUBLISHED, RECORD_HEADER, TAIL, VERSION_MAJOR,
    VERSION_MINOR, WAKE_AT, WAKE_SEQ, header, record_size, ring_size,
};
use crate::region::Region;

/// The host's end of one ring.
#[derive(Debug)]
pub struct Producer {
    region: Region,
    geometry: Geometry,
    head: u64,
    tail: u64,
    announced: u64,
    published: u64,
    dropped: u64,
    lost: u32,
    rung: u32,
    waiting_since_us: Option<u64>,
}

/// Room for one record, given by [`Producer::reserve`] and used up by [`Producer::fill`].
#[derive(Debug)]
#[must_use = "a reserved slot is filled or the record is lost"]
pub struct Slot {
    at: u64,
    cap_len: u32,
}

/// What to do about the reader after publishing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bell {
    /// Nothing: the reader is awake, or has been rung already.
    Quiet,
    /// Ring now, once.
    Ring,
    /// Ask again at this time (the clock's microseconds) if nothing was published until then.
    Later(u64),
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
    /// More than [`MAX_SNAPLEN`], or too large for a ring of this capacity.
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
        let Geometry {
            capacity,
            snaplen,
            link_type,
            epoch,
            port,
            queue,
        } = geometry;
        if !capacity.is_power_of_two() || !(MIN_CAPACITY..=MAX_CAPACITY).contains(&capacity) {
            return Err(CreateError::Capacity(capacity));
        }
        // Any record fits an empty ring even after the longest padding.
        if snaplen > MAX_SNAPLEN || 2 * record_size(snaplen) > capacity {
            return Err(CreateError::Snaplen(snaplen));
        }
        if epoch == 0 || epoch & 0xff != 0 {
            return Err(CreateError::Epoch(epoch));
        }
        let need = ring_size(capacity);
        if region.len() < need {
            return Err(CreateError::Region {
                need,
                have: region.len(),
            });
        }
        // What an earlier user of the memory left behind reaches nobody.
        region.clear(0, need);
        let versions =
            u64::from(VERSION_MAJOR) | u64::from(VERSION_MINOR) << 16 | u64::from(link_type) << 32;
        let words = [
            (header::MAJOR, versions),
            (header::EPOCH, epoch),
            (header::CAPACITY, capacity),
            (header::DATA, DATA_OFFSET),
            (header::SNAPLEN, u64::from(snaplen) | u64::from(port) << 32),
            (header::QUEUE, u64::from(queue)),
            (LIFE, epoch | Life::Open as u64),
            // Release: the magic comes last, so that whoever sees it sees the rest.
            (header::MAGIC, MAGIC),
        ];
        for (offset, word) in words {
            region.store_u64(offset, word, Ordering::Release);
        }
        Ok(Self {
            region,
            geometry,
            head: 0,
            tail: 0,
            announced: 0,
            published: 0,
            dropped: 0,
            lost: 0,
            rung: 0,
            waiting_since_us: None,
        })
    }

    /// The geometry frozen at creation.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Records this ring lost because it was full.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Records written, published or not yet.
    pub fn written(&self) -> u64 {
        self.published
    }

    /// Makes room for a record of `cap_len` bytes. `None`: the ring is full and the loss is counted.
    ///
    /// # Errors
    /// [`PeerLied`] if the reader's index is impossible; stop using the ring.
    #[inline]
    pub fn reserve(&mut self, cap_len: u32) -> Result<Option<Slot>, PeerLied> {
        debug_assert!(cap_len <= self.geometry.snaplen);
        let capacity = self.geometry.capacity;
        let size = record_size(cap_len);
        let offset = self.head & (capacity - 1);
        let to_end = capacity - offset;
        let pad = if size > to_end { to_end } else { 0 };
        let need = size + pad;
        if self.head + need - self.tail > capacity {
            self.refresh_tail()?;
            if self.head + need - self.tail > capacity {
                self.dropped += 1;
                self.lost = self.lost.saturating_add(1);
                return Ok(None);
            }
        }
        if pad > 0 {
            self.region
                .store_u32(DATA_OFFSET + offset, PAD, Ordering::Relaxed);
            self.head += pad;
        }
        let at = DATA_OFFSET + (self.head & (capacity - 1));
        self.head += size;
        Ok(Some(Slot { at, cap_len }))
    }

    /// Writes the record; it becomes visible with the next [`publish`](Self::publish).
    ///
    /// # Panics
    /// If `bytes` is not as long as reserved.
    #[inline]
    pub fn fill(&mut self, slot: Slot, meta: &Meta, bytes: &[u8]) {
        assert!(bytes.len() == slot.cap_len as usize, "filled as reserved");
        let mut head = [0_u8; RECORD_HEADER as usize];
        head[0..4].copy_from_slice(&slot.cap_len.to_le_bytes());
        head[4..8].copy_from_slice(&meta.wire_len.to_le_bytes());
        head[8..16].copy_from_slice(&meta.ts_ns.to_le_bytes());
        head[16..20].copy_from_slice(&meta.flow_hash.to_le_bytes());
        head[20..24].copy_from_slice(&meta.lost.saturating_add(self.lost).to_le_bytes());
        head[24..26].copy_from_slice(&meta.flags.to_le_bytes());
        head[26..28].copy_from_slice(&meta.vlan_tci.to_le_bytes());
        head[28..30].copy_from_slice(&meta.source.to_le_bytes());
        head[30..32].copy_from_slice(&meta.queue.to_le_bytes());
        self.region.write(slot.at, &head);
        self.region.write(slot.at + RECORD_HEADER, bytes);
        self.lost = 0;
        self.published += 1;
    }

    /// Reserves and fills in one step. `false`: the ring is full and the loss is counted.
    ///
    /// # Errors
    /// [`PeerLied`] as [`reserve`](Self::reserve).
    #[inline]
    pub fn push(&mut self, meta: &Meta, bytes: &[u8]) -> Result<bool, PeerLied> {
        match self.reserve(bytes.len() as u32)? {
            Some(slot) => {
                self.fill(slot, meta, bytes);
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Counts a packet that could not even be offered to the ring (longer than a record may be).
    pub fn lose(&mut self) {
        self.lost = self.lost.saturating_add(1);
    }

    /// Makes everything filled so far visible. Once per batch.
    #[inline]
    pub fn publish(&mut self) {
        self.region
            .store_u64(PUBLISHED, self.published, Ordering::Relaxed);
        self.region
            .store_u64(DROPPED, self.dropped, Ordering::Relaxed);
        if self.announced != self.head {
            // Release: pairs with the Acquire in Consumer::refresh.
            self.region.store_u64(HEAD, self.head, Ordering::Release);
            self.announced = self.head;
        }
    }

    /// Decides whether the reader is to be woken; call it after [`publish`](Self::publish) and when
    /// a time it returned has come. `now_us` is any clock that does not go backwards.
    #[inline]
    pub fn bell(&mut self, now_us: u64) -> Bell {
        // Pairs with the fence in Consumer::arm: either we see its arming or it sees our head.
        fence(Ordering::SeqCst);
        let seq = self.region.load_u32(WAKE_SEQ, Ordering::Acquire);
        let delay = self.region.load_u32(MAX_DELAY_US, Ordering::Relaxed);
        if seq == self.rung {
            // Awake. A reader that may go to sleep over unread records needs us to look again.
            return match delay {
                0 => Bell::Quiet,
                _ if self.region.load_u64(TAIL, Ordering::Relaxed) == self.announced => {
                    self.waiting_since_us = None;
                    Bell::Quiet
                }
                delay => Bell::Later(now_us + u64::from(delay)),
            };
        }
        let wake_at = self.region.load_u64(WAKE_AT, Ordering::Relaxed);
        let reached = self.published.wrapping_sub(wake_at) < 1 << 63;
        if reached {
            return self.rang(seq);
        }
        if self.region.load_u64(TAIL, Ordering::Relaxed) == self.announced {
            self.waiting_since_us = None;
            return Bell::Quiet;
        }
        let since = *self.waiting_since_us.get_or_insert(now_us);
        let due = since + u64::from(delay);
        if now_us >= due {
            self.rang(seq)
        } else {
            Bell::Later(due)
        }
    }

    /// Ends the ring's life; what was published stays readable. The reader is to be woken.
    pub fn finish(&mut self, life: Life) {
        self.publish();
        self.region
            .store_u64(LIFE, self.geometry.epoch | life as u64, Ordering::Release);
    }

    /// Bytes published and not yet released, as far as the reader tells.
    pub fn used(&self) -> u64 {
        let tail = self.region.load_u64(TAIL, Ordering::Relaxed);
        self.announced
            .wrapping_sub(tail)
            .min(self.geometry.capacity)
    }

    fn rang(&mut self, seq: u32) -> Bell {
        self.rung = seq;
        self.waiting_since_us = None;
        Bell::Ring
    }

    #[cold]
    fn refresh_tail(&mut self) -> Result<(), PeerLied> {
        // Acquire: pairs with the Release in Consumer::release; the reader is done with the bytes.
        let tail = self.region.load_u64(TAIL, Ordering::Acquire);
        // A true tail lies between the last one we took and what we announced.
        let distance = self.announced.wrapping_sub(tail);
        if distance > self.announced - self.tail {
            return Err(PeerLied {
                head: self.announced,
                tail,
            });
        }
        self.tail = tail;
        Ok(())
    }
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

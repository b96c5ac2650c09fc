//! The arena of a group, as the queue's thread sees it: what its members have in common.
//!
//! A frame is copied into the arena when the first member of a batch wants it; the others get
//! descriptors of the same copy. If the source lends the memory into which it received its frames,
//! nothing is copied: the frame gets a record's header where it lies, and the commons are those
//! of all groups of the source. Each member's [`Port`](crate::port::Port) holds the commons, and with the
//! last of them they are gone. The lock is taken once per member and batch, by one thread, so it is
//! never waited for: it is here because ports travel between threads when they are attached.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vnplug_ring::layout::Meta;
use vnplug_ring::offload::record_prefix;
use vnplug_ring::{Arena, Buffers, Ground, PeerLied, Placed, Producer};

use crate::batch::BatchInfo;
use vnplug_frame::Frame;
use vnplug_frame::offload::Piece;

/// One queue's arena.
#[derive(Debug)]
pub struct Commons {
    inner: Mutex<Inner>,
    copies: AtomicU64,
    lent: AtomicU64,
    /// Where the arena is.
    at: AtomicU64,
    /// How far it may move before a member that waits is rung.
    most: u64,
}

#[derive(Debug)]
struct Inner {
    records: Records,
    /// Where the arena was before this batch.
    began: u64,
    /// The batch that `placed` is about: its first frame's number, and how many it has.
    batch: (u64, usize),
    /// Where its frames lie, if a member wanted them.
    placed: Vec<Option<Placed>>,
    /// Where the packets lie that its super-frames became.
    pieces: Vec<Option<Placed>>,
}

/// Where records lie.
#[derive(Debug)]
enum Records {
    /// The group's own memory.
    Copies(Arena),
    /// Where the source received them.
    Lent(Buffers),
}

impl Records {
    #[inline]
    fn at(&self) -> u64 {
        match self {
            Self::Copies(arena) => arena.at(),
            Self::Lent(buffers) => buffers.at(),
        }
    }

    /// Half a turn: a reader that is rung then has the other half.
    fn most(&self) -> u64 {
        let turn = match self {
            Self::Copies(arena) => arena.geometry().capacity,
            Self::Lent(buffers) => buffers.geometry().kept,
        };
        (turn / 2).max(1)
    }
}

/// The commons during one member's turn.
pub(super) struct Turn<'a> {
    commons: &'a Commons,
    inner: MutexGuard<'a, Inner>,
}

impl Commons {
    /// The commons of an empty arena.
    #[must_use]
    pub fn new(arena: Arena) -> Self {
        Self::on(Records::Copies(arena))
    }

    /// The commons of all groups of a source that lends its memory.
    #[must_use]
    pub fn lent(buffers: Buffers) -> Self {
        Self::on(Records::Lent(buffers))
    }

    fn on(records: Records) -> Self {
        let at = records.at();
        let most = records.most();
        let inner = Inner {
            records,
            began: at,
            batch: (u64::MAX, 0),
            placed: Vec::new(),
            pieces: Vec::new(),
        };
        Self {
            inner: Mutex::new(inner),
            copies: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            at: AtomicU64::new(at),
            most,
        }
    }

    /// Where the arena is. It only grows; the queue's thread sets it.
    #[inline]
    pub(crate) fn at(&self) -> u64 {
        self.at.load(Ordering::Relaxed)
    }

    /// What the doorbell of a member needs to know outside of its turn.
    pub(super) fn ground(&self) -> Ground {
        let now = self.at();
        Ground {
            began: now,
            now,
            most: self.most,
        }
    }

    /// Frames that members have where the source received them, however many members took them.
    pub fn lent_frames(&self) -> u64 {
        self.lent.load(Ordering::Relaxed)
    }

    /// Frames that were copied into the arena, however many members took them.
    pub fn copies(&self) -> u64 {
        self.copies.load(Ordering::Relaxed)
    }

    /// Invalidates everything in the arena: its memory goes away.
    pub fn retire(&self) {
        match &mut self.lock().records {
            Records::Copies(arena) => arena.retire(),
            Records::Lent(buffers) => buffers.retire(),
        }
    }

    /// The source has handed out a batch of lent frames from this many buffers, and is about to
    /// give away as many of the oldest ones.
    pub(crate) fn end_turn(&self, taken: u64) {
        if let Records::Lent(buffers) = &mut self.lock().records {
            buffers.turn(taken);
            self.at.store(buffers.at(), Ordering::Relaxed);
        }
    }

    /// A member's turn with this batch.
    pub(super) fn turn(&self, batch: &BatchInfo<'_>) -> Turn<'_> {
        let mut inner = self.lock();
        let this = (batch.first, batch.frames.len());
        if inner.batch != this {
            inner.batch = this;
            inner.began = inner.records.at();
            inner.placed.clear();
            inner.placed.resize(this.1, None);
            inner.pieces.clear();
        }
        Turn {
            commons: self,
            inner,
        }
    }

    /// The state after a panic in a member's turn is sound: a frame is placed or it is not.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn<'_> {
    /// Gives a member the frame at `place` of the batch. `Ok(false)`: its ring is full.
    ///
    /// # Errors
    /// [`PeerLied`], as a ring's.
    #[inline]
    pub(super) fn give(
        &mut self,
        producer: &mut Producer,
        place: usize,
        frame: &Frame<'_>,
        meta: impl FnOnce() -> Meta,
        gap: bool,
    ) -> Result<bool, PeerLied> {
        if !producer.reserve_descriptor()? {
            return Ok(false);
        }
        let placed = match self.inner.placed[place] {
            Some(placed) => placed,
            None => self.place(place, frame, &meta()),
        };
        producer.describe(placed, gap);
        Ok(true)
    }

    /// Gives a member packet `at` of those that the super-frames of the batch became; `frame` is the
    /// super-frame, at `place`. `Ok(false)`: its ring is full.
    ///
    /// # Errors
    /// [`PeerLied`], as a ring's.
    pub(super) fn give_piece(
        &mut self,
        producer: &mut Producer,
        (place, at): (usize, usize),
        (frame, piece): (&Frame<'_>, &Piece<'_>),
        meta: &Meta,
        gap: bool,
    ) -> Result<bool, PeerLied> {
        if !producer.reserve_descriptor()? {
            return Ok(false);
        }
        let inner = &mut *self.inner;
        if inner.pieces.len() <= at {
            inner.pieces.resize(at + 1, None);
        }
        let placed = match (inner.pieces[at], &mut inner.records) {
            (Some(placed), _) => placed,
            (None, Records::Copies(arena)) => {
                let (head, body) = piece.cut_to(arena.geometry().snaplen);
                arena.place_parts(meta, head, body)
            }
            // Where a NIC wrote it, nothing is left to a NIC.
            (None, Records::Lent(buffers)) => buffers.place(place as u64, meta, frame.bytes),
        };
        inner.pieces[at] = Some(placed);
        producer.describe(placed, gap);
        Ok(true)
    }

    /// What the member's doorbell needs to know.
    #[inline]
    pub(super) fn ground(&self) -> Ground {
        Ground {
            began: self.inner.began,
            now: self.inner.records.at(),
            most: self.commons.most,
        }
    }

    fn place(&mut self, place: usize, frame: &Frame<'_>, meta: &Meta) -> Placed {
        let placed = match &mut self.inner.records {
            Records::Copies(arena) => {
                let before = record_prefix(meta.flags);
                let most = arena.geometry().snaplen as usize - before;
                let bytes = &frame.bytes[..frame.bytes.len().min(most)];
                arena.place(meta, bytes)
            }
            Records::Lent(buffers) => buffers.place(place as u64, meta, frame.bytes),
        };
        self.inner.placed[place] = Some(placed);
        placed
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let (copies, lent) = match &self.inner.records {
            Records::Copies(arena) => (arena.placed(), 0),
            Records::Lent(buffers) => (buffers.copied(), buffers.lent()),
        };
        let at = self.inner.records.at();
        self.commons.at.store(at, Ordering::Relaxed);
        self.commons.copies.store(copies, Ordering::Relaxed);
        self.commons.lent.store(lent, Ordering::Relaxed);
    }
}

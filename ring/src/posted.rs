//! Sending on what was received, from where it lies: what its reader holds back meanwhile.
//!
//! A record of a transmit ring may name a place of a receive ring (see [`layout`](crate::layout)). The host copies
//! from there when it takes the record, so until then the place must not be given back: the host would write
//! other packets over it.
//!
//! ```text
//! reader   took a batch ── posts places of it ── releases: held back ───────── gives back ─▶ tail of the ring
//!                              │ last                          ▲ passed
//! host                         └─▶ takes the records, copies ──┘ tail of the transmit ring
//! ```
//!
//! What is held back is a batch: all that was taken between two releases. It is given back when the transmit
//! ring's tail has passed the last record that was written before the second of them. Batches are given back in
//! their order, as everything in a ring is. The tails' stores (Release) and loads (Acquire) make one chain: the host's copy
//! is made before it stores the tail of the transmit ring, of which the reader loads the value before it stores the tail of its
//! ring, which the host loads before it writes there.
//!
//! A transmit ring whose life is over takes nothing any more, so it holds back nothing. One that is closed is unmapped first,
//! and may be read until the host says that it is closed: in between all stays held back.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::layout::{Life, SEND_LIFE, TAIL, reached};
use crate::producer::Producer;
use crate::region::Region;

/// A transmit ring, as those know it who hold back what it names. Its sender keeps this until the host reads the ring no more.
#[derive(Debug)]
pub struct Outlet {
    epoch: u64,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Until its sender unmaps it.
    ring: Option<Region>,
    /// How far its reader was.
    tail: u64,
}

impl Outlet {
    /// Of a ring that is mapped.
    pub fn new(ring: &Producer) -> Arc<Self> {
        let region = ring.region().clone();
        let tail = region.load_u64(TAIL, Ordering::Acquire);
        Arc::new(Self {
            epoch: ring.geometry().epoch,
            seen: Mutex::new(Seen {
                ring: Some(region),
                tail,
            }),
        })
    }

    /// From here on nobody touches the ring's memory by this.
    pub fn unmap(&self) {
        self.seen().ring = None;
    }

    /// How far the host has taken all, or `last` if it takes no more.
    fn passed(&self, last: u64) -> u64 {
        let mut seen = self.seen();
        let Some(ring) = &seen.ring else {
            return seen.tail;
        };
        // Acquire: pairs with the Release in Intake::finish; nothing is taken after it.
        let life = ring.load_u64(SEND_LIFE, Ordering::Acquire);
        if life != self.epoch | Life::Open as u64 {
            return last;
        }
        // Acquire: pairs with the Release in Intake::release; the copies are made.
        seen.tail = ring.load_u64(TAIL, Ordering::Acquire);
        seen.tail
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was posted of one ring by one transmit ring: common to the reader of the one and the sender of the other.
#[derive(Debug)]
pub struct Posts {
    /// The transmit ring, as long as the host reads it.
    outlet: Weak<Outlet>,
    /// Its position after the last record that names a place of the other ring.
    last: AtomicU64,
    /// The other ring is not read any more.
    is_over: AtomicBool,
}

impl Posts {
    /// Of a ring from which nothing was posted by this transmit ring so far.
    pub fn new(to: &Producer, outlet: &Arc<Outlet>) -> Arc<Self> {
        Arc::new(Self {
            outlet: Arc::downgrade(outlet),
            last: AtomicU64::new(to.position()),
            is_over: AtomicBool::new(false),
        })
    }

    /// Whether the ring has no reader any more, so that nothing of it may be posted.
    #[inline]
    pub fn is_over(&self) -> bool {
        // Acquire: pairs with the Release in Hold::drop, after which the ring is unmapped.
        self.is_over.load(Ordering::Acquire)
    }

    /// Whether that is so and no record waits any more that names a place of it: another ring may have its number.
    pub fn is_free(&self) -> bool {
        let (last, passed) = self.progress();
        self.is_over() && reached(passed, last)
    }

    /// A record was written that names a place of the ring, up to this position of the transmit ring.
    #[inline]
    pub fn note(&self, position: u64) {
        // Relaxed: who posts a packet has it on loan, so its reader does not release meanwhile.
        self.last.store(position, Ordering::Relaxed);
    }

    /// The last position noted, and that up to which the host has taken all.
    fn progress(&self) -> (u64, u64) {
        let last = self.last.load(Ordering::Relaxed);
        let outlet = self.outlet.upgrade();
        (last, outlet.map_or(last, |outlet| outlet.passed(last)))
    }
}

/// How far a reader is in its ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Mark {
    /// Its position.
    pub tail: u64,
    /// Records before it.
    pub read: u64,
}

/// The batches of a ring that are held back for one transmit ring.
#[derive(Debug, Default)]
pub struct Held {
    batches: VecDeque<Batch>,
    /// The last position that was noted when it was asked last.
    seen: u64,
}

#[derive(Debug)]
struct Batch {
    from: Mark,
    /// The position that the transmit ring's reader must have passed.
    after: u64,
}

impl Held {
    /// Nothing, while `last` is the last position noted.
    pub fn new(last: u64) -> Self {
        Self {
            batches: VecDeque::new(),
            seen: last,
        }
    }

    /// How far the ring may be given back, of which `from`..`to` was taken since this was asked before. `last` is the last
    /// position noted, `passed` how far the transmit ring's reader is.
    #[inline]
    pub fn release(&mut self, (from, to): (Mark, Mark), (last, passed): (u64, u64)) -> Mark {
        if last != self.seen {
            self.seen = last;
            match (from != to, self.batches.back_mut()) {
                (true, _) => self.batches.push_back(Batch { from, after: last }),
                // Of what was taken before.
                (false, Some(batch)) => batch.after = last,
                (false, None) => {}
            }
        }
        while let Some(batch) = self.batches.front() {
            if !reached(passed, batch.after) {
                return batch.from;
            }
            self.batches.pop_front();
        }
        to
    }
}

/// A ring's part in one transmit ring.
#[derive(Debug)]
pub(crate) struct Hold {
    posts: Arc<Posts>,
    held: Held,
    /// How far the reader was when it released last, whatever was held back.
    marked: Mark,
}

impl Hold {
    /// From where its reader is.
    pub(crate) fn new(posts: Arc<Posts>, marked: Mark) -> Self {
        let held = Held::new(posts.last.load(Ordering::Relaxed));
        Self {
            posts,
            held,
            marked,
        }
    }

    /// How far the ring may be given back, of which all was taken up to this.
    pub(crate) fn release(&mut self, now: Mark) -> Mark {
        let from = std::mem::replace(&mut self.marked, now);
        self.held.release((from, now), self.posts.progress())
    }

    /// Whether something is held back.
    pub(crate) fn holds_back(&self) -> bool {
        !self.held.batches.is_empty()
    }

    /// Whether nothing is held back, and nothing will be: the sender is gone.
    pub(crate) fn is_done(&self) -> bool {
        !self.holds_back() && Arc::strong_count(&self.posts) == 1
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Release: pairs with the Acquire in Posts::is_over.
        self.posts.is_over.store(true, Ordering::Release);
    }
}

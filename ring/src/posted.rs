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
//! A transmit ring whose life is over takes nothing any more, so it holds back nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::layout::{Life, SEND_LIFE, TAIL, reached};
use crate::producer::Producer;
use crate::region::Region;

/// What was posted of one ring by one transmit ring: common to the reader of the one and the sender of the other.
#[derive(Debug)]
pub struct Posts {
    /// The transmit ring.
    ring: Region,
    epoch: u64,
    /// Its position after the last record that names a place of the other ring.
    last: AtomicU64,
    /// The other ring is not read any more.
    is_over: AtomicBool,
}

impl Posts {
    /// Of a ring from which nothing was posted by this transmit ring so far.
    pub fn new(to: &Producer) -> Arc<Self> {
        Arc::new(Self {
            ring: to.region().clone(),
            epoch: to.geometry().epoch,
            last: AtomicU64::new(to.position()),
            is_over: AtomicBool::new(false),
        })
    }

    /// Whether the ring has no reader any more, so that nothing of it may be posted.
    #[inline]
    pub fn is_over(&self) -> bool {
        // Relaxed: its reader and the sender are used by one thread at a time.
        self.is_over.load(Ordering::Relaxed)
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
        // Acquire: pairs with the Release in Intake::finish; nothing is taken after it.
        let life = self.ring.load_u64(SEND_LIFE, Ordering::Acquire);
        if life != self.epoch | Life::Open as u64 {
            return (last, last);
        }
        // Acquire: pairs with the Release in Intake::release; the copies are made.
        (last, self.ring.load_u64(TAIL, Ordering::Acquire))
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

    /// Whether nothing is held back, and nothing will be: the sender is gone.
    pub(crate) fn is_done(&self) -> bool {
        self.held.batches.is_empty() && Arc::strong_count(&self.posts) == 1
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.posts.is_over.store(true, Ordering::Relaxed);
    }
}

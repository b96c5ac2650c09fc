//! The rings of one guest, as the threads that forward use them.
//!
//! Which rings there are, in which memory, and what was agreed on is told by the entrance's thread as
//! one whole ([`Setup`]), which replaces the one before between two batches. The answer ([`Done`](wire::Done)) brings
//! the old one back: only then may its memory be unmapped, which happens aside. A new setup needs nothing
//! of the old one, because a ring's indices are in the guest's memory ([`super::ring`]).
//!
//! The two ways of a guest are locked each by itself. What it sends one thread takes, whoever that is at the time;
//! frames may be given to it by several in turn. Who needs both locks `incoming` first, and nobody holds the
//! `outgoing` of two guests.
//!
//! | file | what it has |
//! |---|---|
//! | `mod.rs` | a guest, and its port's link |
//! | `wire.rs` | how the entrance's thread speaks to it, and what both ways know of each other |
//! | `half.rs` | what both ways have |
//! | `incoming.rs` | what the guest sends: a turn of it |
//! | `orders.rs` | what it is told, by the entrance's thread and by the driver |
//! | `outgoing.rs` | frames for the guest |
//! | `waiting.rs` | those that wait for its buffers |

mod half;
mod incoming;
mod orders;
mod outgoing;
mod waiting;
mod wire;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use vnplug_os::datagrams::Rest;
use vnplug_ring::offload::Offload;

use self::incoming::Incoming;
pub(crate) use self::incoming::Passage;
use self::outgoing::Outgoing;
pub(super) use self::wire::{ANNOUNCEMENT, Order, Setup, Started, Wire};
use self::wire::{Shared, watch};
use super::call::{Caller, Calls};
use crate::batch::Batch;
use crate::exits::Due;
use crate::link::{Given, Link};

/// A guest with its rings.
pub(crate) struct Guest {
    shared: Arc<Shared>,
    incoming: Mutex<Incoming>,
    outgoing: Mutex<Outgoing>,
}

/// The link of a guest's port.
pub(crate) struct Rings(Arc<Guest>);

/// A link, and what speaks to it.
///
/// # Errors
/// The system's, when descriptors are short.
pub(crate) fn pair(
    name: String,
    calls: Arc<Calls>,
    caller: Option<Caller>,
) -> io::Result<(Wire, Rings)> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let news = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    watch(&epoll, &news)?;
    let shared = Arc::new(Shared::new(name, (epoll, news), calls, caller));
    let (sender, orders) = channel();
    let wire = Wire {
        orders: sender,
        shared: Arc::clone(&shared),
    };
    let guest = Guest {
        incoming: Mutex::new(Incoming::new(Arc::clone(&shared), orders)),
        outgoing: Mutex::new(Outgoing::new(Arc::clone(&shared))),
        shared,
    };
    Ok((wire, Rings(Arc::new(guest))))
}

impl Guest {
    /// Takes frames of one ring after the other, at most `most` of each. `forward` says how many of them, from the
    /// first on, are done with; the first one that is not ends the turn, and is there again for the next, with all
    /// behind it.
    ///
    /// # Errors
    /// The port is to be closed, and why.
    pub(crate) fn pass(
        &self,
        batch: &mut Batch,
        most: usize,
        forward: impl FnMut(&Batch) -> usize,
    ) -> io::Result<Passage> {
        let passed = self.incoming().pass(&self.outgoing, batch, most, forward);
        // It keeps memory mapped in which frames lie.
        batch.clear();
        passed
    }

    /// Gives it frames, in order.
    pub(crate) fn give(&self, due: Due<'_>) -> Given {
        locked(&self.outgoing).send(due)
    }

    /// A turn of [`pass`](Self::pass) panicked.
    pub(crate) fn undo(&self) {
        self.incoming().undo();
    }

    /// How many frames that were given to it, and waited, are dropped and were not counted yet.
    pub(crate) fn lost(&self) -> u64 {
        // Relaxed: a number.
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// The same, which are counted now.
    pub(crate) fn count_lost(&self) -> u64 {
        match self.lost() {
            0 => 0,
            _ => self.shared.lost.swap(0, Ordering::Relaxed),
        }
    }

    /// Whether it does what is left to do with such a frame.
    #[inline]
    pub(crate) fn takes(&self, offload: &Offload) -> bool {
        self.shared.takes(offload)
    }

    fn incoming(&self) -> MutexGuard<'_, Incoming> {
        locked(&self.incoming)
    }
}

impl Link for Rings {
    fn receive(&mut self, batch: &mut Batch, most: usize) -> io::Result<Rest> {
        self.0.incoming().receive(&self.0.outgoing, batch, most)
    }

    fn release(&mut self) {
        self.0.incoming().release();
    }

    fn guest(&self) -> Option<&Arc<Guest>> {
        Some(&self.0)
    }

    fn takes_tails(&self) -> bool {
        true
    }

    fn expand_acks(&mut self, is: bool) {
        self.0.incoming().expand_acks(is);
        locked(&self.0.outgoing).expand_acks(is);
    }

    fn added_acks(&mut self) -> u64 {
        locked(&self.0.outgoing).added_acks()
    }

    fn lost(&mut self) -> u64 {
        self.0.count_lost()
    }

    fn send(&mut self, due: Due<'_>) -> Given {
        self.0.give(due)
    }

    fn merges(&self) -> bool {
        self.0.shared.merges.load(Ordering::Relaxed)
    }

    fn takes(&self, offload: &Offload) -> bool {
        self.0.takes(offload)
    }
}

impl AsFd for Guest {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}

impl AsFd for Rings {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// NB: a thread that panicked left its half of a guest as it is between two frames, or worse for that guest alone.
fn locked<T>(half: &Mutex<T>) -> MutexGuard<'_, T> {
    half.lock().unwrap_or_else(PoisonError::into_inner)
}

//! How the entrance's thread speaks to the one that forwards: a channel, and an eventfd that says so.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;

use rustix::event::epoll::{self, EventData, EventFlags};
use vnplug_os::closer::PeerFd;
use vnplug_os::event;

use crate::vhost::call::{Call, Caller, Calls};
use crate::vhost::memory::Memory;
use crate::vhost::ring::Place;

/// What a guest's port is to be.
#[derive(Debug, Default)]
pub(crate) struct Setup {
    /// What the guest's driver acknowledged.
    pub(crate) features: u64,
    pub(crate) memory: Option<Arc<Memory>>,
    /// By their numbers: even ones are for the guest to receive, odd ones to send. None: not served.
    pub(crate) rings: Vec<Option<Started>>,
    /// The number of the control queue, if it is served.
    pub(crate) control: Option<usize>,
}

/// A ring that is to be served.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) place: Place,
    pub(crate) call: Option<Arc<Call>>,
}

/// What the thread that forwards is asked.
pub(crate) enum Order {
    /// This is the setup now.
    Setup(Box<Setup>, Sender<Done>),
    /// Sends this frame as the guest's.
    Announce([u8; ANNOUNCEMENT]),
}

/// The setup was replaced.
#[derive(Debug)]
pub(crate) struct Done {
    /// The indices of rings that were served before.
    pub(crate) indices: Vec<Option<u16>>,
    /// What was in use before.
    pub(crate) _old: Box<Setup>,
}

/// Speaks to a link.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(super) orders: Sender<Order>,
    pub(super) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    /// Watches the kicks, and `news`.
    pub(super) epoll: OwnedFd,
    pub(super) news: OwnedFd,
    pub(super) pending: AtomicBool,
    pub(super) calls: Arc<Calls>,
    /// Who calls the guest, if that is not the thread that forwards.
    pub(super) caller: Option<Caller>,
}

impl Wire {
    /// Gives an order. False: the link is gone.
    pub(crate) fn send(&self, order: Order) -> bool {
        let sent = self.orders.send(order).is_ok();
        // Release: pairs with the Acquire in `Rings::obey`; the order is in the channel.
        self.shared.pending.store(true, Ordering::Release);
        event::ring(&self.shared.news);
        sent
    }

    /// The link looks when this eventfd is written to.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn watch(&self, kick: impl AsFd) -> io::Result<()> {
        watch(&self.shared.epoll, kick)
    }

    /// Not any more. NB: before it is closed, as the peer has a copy.
    pub(crate) fn forget(&self, kick: impl AsFd) {
        let _ = epoll::delete(&self.shared.epoll, kick);
    }

    /// All calls of the switch.
    pub(crate) fn calls(&self) -> &Calls {
        &self.shared.calls
    }

    /// How a ring's guest is called by this descriptor; `None` if it is of another kind.
    pub(crate) fn call(&self, fd: PeerFd) -> Option<Arc<Call>> {
        self.shared.calls.add(fd, self.shared.caller.clone())
    }
}

/// Edges only: no eventfd of a peer's is ever read.
pub(super) fn watch(epoll: &OwnedFd, fd: impl AsFd) -> io::Result<()> {
    let flags = EventFlags::IN | EventFlags::ET;
    Ok(epoll::add(epoll, fd, EventData::new_u64(0), flags)?)
}

/// Bytes of the frame that tells switches where a guest is.
pub(crate) const ANNOUNCEMENT: usize = 60;

//! How the entrance's thread speaks to the one that forwards: a channel, and an eventfd that says so. And what is
//! known of a guest without its locks.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use rustix::event::epoll::{self, EventData, EventFlags};
use vnplug_os::closer::PeerFd;
use vnplug_os::event;
use vnplug_ring::offload::{HEADER, Offload, flags, gso};

use crate::vhost::call::{Call, Caller, Calls};
use crate::vhost::memory::Memory;
use crate::vhost::ring::Place;
use crate::vhost::spec::feature;

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
    pub(crate) _old: Arc<Setup>,
}

/// Speaks to a link.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(super) orders: Sender<Order>,
    pub(super) shared: Arc<Shared>,
}

/// What is known of a guest without its locks.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: String,
    /// Watches the kicks, and `news`.
    pub(super) epoll: OwnedFd,
    pub(super) news: OwnedFd,
    pub(super) pending: AtomicBool,
    pub(super) calls: Arc<Calls>,
    /// Who calls the guest, if that is not the thread that forwards.
    pub(super) caller: Option<Caller>,
    /// The guest is asked to kick for what it sends: nobody looks before. Who has this asks for buffers if frames
    /// `waits`; who makes frames wait does if it `is_armed`. Each stores its own and then loads the other's, all
    /// SeqCst, so that one of both at least asks.
    pub(super) is_armed: AtomicBool,
    /// Frames wait for its buffers.
    pub(super) waits: AtomicBool,
    /// It may have been asked to kick for buffers.
    pub(super) asks: AtomicBool,
    /// Segments may be merged for it.
    pub(super) merges: AtomicBool,
    /// Bits of [`feature::GUEST_OFFLOADS`] that hold now.
    offloads: AtomicU64,
    /// Frames that waited and are dropped, since somebody asked.
    pub(super) lost: AtomicU64,
}

impl Shared {
    pub(super) fn new(
        name: String,
        (epoll, news): (OwnedFd, OwnedFd),
        calls: Arc<Calls>,
        caller: Option<Caller>,
    ) -> Self {
        Self {
            name,
            epoll,
            news,
            pending: AtomicBool::new(false),
            calls,
            caller,
            is_armed: AtomicBool::new(false),
            waits: AtomicBool::new(false),
            asks: AtomicBool::new(false),
            merges: AtomicBool::new(true),
            offloads: AtomicU64::new(0),
            lost: AtomicU64::new(0),
        }
    }

    /// The guest's driver takes frames of these [features](feature::GUEST_OFFLOADS).
    pub(super) fn offer(&self, features: u64) {
        let offloads = features & feature::GUEST_OFFLOADS;
        self.offloads.store(offloads, Ordering::Relaxed);
    }

    /// What the guest is told of a frame whose checksum was found right: that, if its driver takes it.
    pub(super) fn header_of_valid(&self) -> [u8; HEADER] {
        let offloads = self.offloads.load(Ordering::Relaxed);
        let flags = match offloads & feature::GUEST_CSUM {
            0 => 0,
            _ => flags::DATA_VALID,
        };
        let offload = Offload {
            flags,
            ..Offload::default()
        };
        offload.to_header(&[])
    }

    /// Whether the guest does what is left to do with such a frame.
    #[inline]
    pub(super) fn takes(&self, offload: &Offload) -> bool {
        // Relaxed: a guest that takes less from now on has frames on their way to it anyhow.
        let offloads = self.offloads.load(Ordering::Relaxed);
        let has = |bits: u64| offloads & bits == bits;
        // A super-frame without a sum to be made is none for virtio.
        if !has(feature::GUEST_CSUM) || offload.flags & flags::NEEDS_CSUM == 0 {
            return false;
        }
        let ecn = offload.gso_type & gso::ECN != 0;
        match offload.gso_type & !gso::ECN {
            gso::NONE => true,
            _ if ecn && !has(feature::GUEST_ECN) => false,
            gso::TCPV4 => has(feature::GUEST_TSO4),
            gso::TCPV6 => has(feature::GUEST_TSO6),
            gso::UDP_L4 => has(feature::GUEST_USO4 | feature::GUEST_USO6),
            _ => false,
        }
    }
}

impl Wire {
    /// Gives an order. False: the link is gone.
    pub(crate) fn send(&self, order: Order) -> bool {
        let sent = self.orders.send(order).is_ok();
        // Release: pairs with the Acquire in `Incoming::obey`; the order is in the channel.
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

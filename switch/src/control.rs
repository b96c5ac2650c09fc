//! How other threads speak to the one that forwards.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use vnplug_os::event;
use vnplug_path::source::Queue;

use crate::counts::{Counters, Refused};
use crate::direct::Place;
use crate::exits::PortCounters;
use crate::forward::Number;
use crate::link::{Link, Losses};
use crate::settings::{PortSettings, Settings};
use crate::table::{Entry, Limits};
use crate::uplink::{Unplugged, Uplink};

/// What is asked of the thread that forwards.
pub(crate) enum Change {
    /// A port is there.
    Add {
        port: Number,
        link: Box<dyn Link>,
        /// Told when the thread that forwards closes it.
        losses: Losses,
    },
    /// One is there whose frames go through rings.
    AddRing(Number),
    /// An uplink is there; with queues, if its interface is.
    Plug {
        port: Number,
        uplink: Box<Uplink>,
        queues: Option<Vec<Box<dyn Queue>>>,
    },
    /// It is gone.
    Remove(Number),
    /// An uplink is gone; its sockets are for who asks to close.
    Unplug(Number, Sender<Unplugged>),
    /// Whoever has this number next is not who had it before.
    Anew(Number),
    /// From now on these are a port's settings, whether it is there or not; `None`: as others'.
    Settings(Number, Option<Box<PortSettings>>),
    /// From now on these are the switch's, with those of ports.
    Whole(Box<Settings>),
    /// A port is to be closed by who let it in.
    Close(Number),
    /// Somebody reads this port by itself, or does not any more.
    Read(Number, bool),
    /// This port is a member of a trust group, or none any more.
    Direct(Number, Option<Place>),
    /// How is it?
    Tell(Sender<Told>),
    /// Is all done that was asked for before?
    Settle(Sender<()>),
    /// A lane has found something of this guest's that it does not do, or has failed at it.
    Refer {
        port: Number,
        guest: u64,
        has_failed: bool,
    },
}

/// How a switch is.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) counters: Counters,
    pub(crate) ports: Vec<PortTold>,
    pub(crate) stations: Vec<Entry>,
    /// How many stations there are in all.
    pub(crate) station_count: u64,
    pub(crate) limits: Limits,
    pub(crate) is_hub: bool,
}

/// How a port is.
#[derive(Debug, Clone)]
pub(crate) struct PortTold {
    pub(crate) number: Number,
    pub(crate) counters: PortCounters,
    /// What was dropped of what it sent.
    pub(crate) refused: Refused,
    /// up, down, or shut for a loop.
    pub(crate) state: &'static str,
}

/// Speaks to the thread that forwards.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    changes: Sender<Change>,
    pending: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
    /// How often guests were called again.
    pub(crate) called_again: Arc<AtomicU64>,
}

/// That thread's end of a [`Line`].
#[derive(Debug)]
pub(crate) struct Inlet {
    changes: Receiver<Change>,
    pending: Arc<AtomicBool>,
    pub(crate) waker: Arc<OwnedFd>,
    pub(crate) called_again: Arc<AtomicU64>,
}

/// A line and its end.
///
/// # Errors
/// The system's, when descriptors are short.
pub(crate) fn line() -> std::io::Result<(Line, Inlet)> {
    let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (sender, receiver) = channel();
    let pending = Arc::new(AtomicBool::new(false));
    let called_again = Arc::<AtomicU64>::default();
    let line = Line {
        changes: sender,
        pending: Arc::clone(&pending),
        waker: Arc::clone(&waker),
        called_again: Arc::clone(&called_again),
    };
    let inlet = Inlet {
        changes: receiver,
        pending,
        waker,
        called_again,
    };
    Ok((line, inlet))
}

impl Line {
    /// Asks for a change.
    pub(crate) fn send(&self, change: Change) {
        // If the thread is gone, so is the switch.
        let _ = self.changes.send(change);
        event::ring(&self.waker);
        // Release: pairs with the Acquire in `take`; the change is in the channel.
        self.pending.store(true, Ordering::Release);
    }

    /// How the switch is; `None` if its thread does not answer.
    pub(crate) fn ask(&self) -> Option<Told> {
        let (reply, answer) = channel();
        self.send(Change::Tell(reply));
        answer.recv_timeout(PATIENCE).ok()
    }
}

impl Inlet {
    /// Whether changes may be there; then take them all.
    #[inline]
    pub(crate) fn has_news(&self) -> bool {
        // Acquire: pairs with the Release in `send`.
        let news =
            self.pending.load(Ordering::Relaxed) && self.pending.swap(false, Ordering::Acquire);
        if news {
            event::clear(&self.waker);
        }
        news
    }

    /// The next change.
    pub(crate) fn take(&self) -> Option<Change> {
        self.changes.try_recv().ok()
    }
}

/// How long a thread that forwards may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

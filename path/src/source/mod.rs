//! Where frames come from.
//!
//! A source has one or more **queues** (receive queues of the interface, threads of a fanout
//! group); each is a [`Queue`] of its own, and a thread serves one or several. A queue yields
//! batches of borrowed frames: the bytes stay where the kernel, the file or the generator put them
//! until the sink returns, and every port that wants them copies them once, into its ring.

pub mod af_packet;
pub mod af_xdp;
pub mod early;
pub mod generator;
pub mod lent;
mod link_state;
pub mod pcap;
pub mod transmit;
pub mod wake;

mod echo;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll::EventFlags;

use early::EarlyDrop;
pub use lent::Lent;
pub use transmit::{Echoes, Flushed, Latency, Transmit, Transmitter};
use vnplug_frame::Frame;
pub use wake::{Seen, Wake, wait};

/// The result of a call of [`Queue::receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// This many frames went to the sink (more than 0).
    Frames(usize),
    /// Frames came and were not handed over: [nobody reads](Queue::may_pass).
    Passed {
        /// How many.
        frames: u64,
        /// Their bytes.
        bytes: u64,
    },
    /// Nothing is there now; [wait](Queue::arm) before asking again.
    Nothing,
    /// Nothing will ever come again (a file played once, a generator's count reached).
    End,
}

/// One receive queue of a source, used by one thread. No call blocks.
pub trait Queue: Send {
    /// Hands at most [`MAX_BATCH`](vnplug_frame::MAX_BATCH) frames to `sink`, in one call of it.
    ///
    /// # Errors
    /// [`SourceError`] when the source cannot go on; frames before it were handed over.
    fn receive(&mut self, sink: &mut dyn FnMut(&[Frame<'_>])) -> Result<Received, SourceError>;

    /// Whether nobody reads what comes from now on: then it may be [passed](Received::Passed) by. Said
    /// before each call of `receive`; while it was never said, somebody reads.
    fn may_pass(&mut self, _may_pass: bool) {}

    /// Whether somebody reads it from now on who is no member of it (a port of a switch). Said before each call
    /// of `receive`.
    fn is_watched(&mut self, _is_watched: bool) {}

    /// Whether it hands out what an earlier process left, and would rather wait than have a port without room.
    fn is_behind(&self) -> bool {
        false
    }

    /// Whether some port that is being read is half full. Said before each call of `receive` while it is behind.
    fn is_crowded(&mut self, _is_crowded: bool) {}

    /// What to wait for after [`Received::Nothing`].
    fn arm(&mut self) -> Wake<'_>;

    /// The wait is over, and this was seen of the descriptors; often nothing. A queue learns here what
    /// happened to its interface.
    fn woke(&mut self, seen: Seen);

    /// The epoll instance by which it learns which of its many descriptors have something, if it has one. Its thread adds
    /// there what else wakes the thread, with numbers that have the [highest bit](OF_THREAD), and no number of the queue's
    /// has it. The thread looks there, and sleeps there; the queue itself does not look, and [arms](Self::arm) no descriptors.
    /// Such a queue does not wait for its first port.
    fn epoll(&self) -> Option<Arc<OwnedFd>> {
        None
    }

    /// What it watches by this number has something.
    fn found(&mut self, _number: u64, _flags: EventFlags) {}

    /// What the kernel (or file, or generator) counted so far, accumulated.
    fn counters(&mut self) -> QueueCounters;

    /// Counters that only its kind of source has, with their public names.
    fn own_counters(&self) -> Vec<(String, u64)> {
        Vec::new()
    }

    /// One word on how it is: `up`, `down`, `gone`, `ended` and so on, for `vnplug list`.
    fn state(&self) -> &'static str;

    /// Whether more frames wait than there is time for, so that some may be lost soon: ports of owners
    /// that cost most get less of them then. Asked before each batch, if there are several owners.
    fn is_pressed(&self) -> bool {
        false
    }

    /// The memory that its frames lie in, if the groups of this source may read them there.
    fn lent(&self) -> Option<Lent> {
        None
    }

    /// The way out, if frames can be sent through this queue at all.
    fn transmitter(&mut self) -> Option<&mut dyn Transmitter> {
        None
    }

    /// The kernel's part in it, if a kernel can drop frames before this queue.
    fn early(&mut self) -> Option<&mut dyn EarlyDrop> {
        None
    }

    /// Where it runs an operator's program on its frames, if it does.
    fn program(&mut self) -> Option<&mut vnplug_twin::Instance> {
        None
    }

    /// What measures how long frames took to a reader and back, if something does.
    fn echoes(&mut self) -> Option<&mut dyn Echoes> {
        None
    }
}

/// What a thread itself watches in the [epoll instance of its queue](Queue::epoll) has this bit in its number.
pub const OF_THREAD: u64 = 1 << 63;

/// Counters below the daemon's own `read`: `seen == read + dropped + early + program + waiting` (point K).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueCounters {
    /// Packets that arrived, taken or not (`tp_packets` and `early`), and those of `shown`.
    pub seen: u64,
    /// Packets that ports sent and that were shown to the other ports.
    pub shown: u64,
    /// Packets that the kernel dropped because no port wanted them.
    pub early: u64,
    /// Packets that the operator's program of this source dropped.
    pub program: u64,
    /// Packets that the kernel dropped because our receive ring was full (`tp_drops`).
    pub dropped: u64,
    /// Packets that wait in the receive ring, as the ring itself says.
    pub waiting: u64,
    /// Times the kernel stopped delivering for want of a block (`tp_freeze_q_cnt`).
    pub freezes: u64,
    /// Times the interface went down or vanished and was bound again.
    pub rebinds: u64,
    /// For how long, in milliseconds, the receive ring holds what comes at the present rate while it
    /// is not read, if the source can tell; of several queues the shortest.
    pub patience_ms: Option<u64>,
}

/// A source cannot start or go on.
#[derive(Debug)]
pub struct SourceError {
    /// What happened and what to do about it; lower case, no full stop.
    pub what: String,
    /// The system's error, if there is one.
    pub cause: Option<std::io::Error>,
}

impl SourceError {
    /// An error of our own wording.
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            cause: None,
        }
    }

    /// An error that wraps the system's.
    pub fn io(what: impl Into<String>, cause: impl Into<std::io::Error>) -> Self {
        Self {
            what: what.into(),
            cause: Some(cause.into()),
        }
    }
}

impl std::fmt::Display for SourceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.what)?;
        match &self.cause {
            Some(cause) => write!(f, ": {cause}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for SourceError {}

impl QueueCounters {
    /// Adds another queue's.
    pub fn add(&mut self, other: &Self) {
        let Self {
            seen,
            shown,
            early,
            program,
            dropped,
            waiting,
            freezes,
            rebinds,
            patience_ms,
        } = other;
        self.seen += seen;
        self.shown += shown;
        self.early += early;
        self.program += program;
        self.dropped += dropped;
        self.waiting += waiting;
        self.freezes += freezes;
        self.rebinds += rebinds;
        let patience = [self.patience_ms, *patience_ms];
        self.patience_ms = patience.into_iter().flatten().min();
    }

    /// The counters with their public names.
    pub fn named(&self) -> Vec<(String, u64)> {
        let Self {
            seen,
            shown,
            early,
            program,
            dropped,
            waiting,
            freezes,
            rebinds,
            patience_ms,
        } = *self;
        let mut named = vec![
            ("seen".into(), seen),
            ("shown".into(), shown),
            ("early".into(), early),
            ("program".into(), program),
            ("kernel_dropped".into(), dropped),
            ("in_kernel".into(), waiting),
            ("freezes".into(), freezes),
            ("rebinds".into(), rebinds),
        ];
        named.extend(patience_ms.map(|ms| ("patience_ms".to_owned(), ms)));
        named
    }
}

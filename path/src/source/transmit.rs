//! Frames the other way: from a reader's transmit ring through the source onto the wire.
//!
//! A queue first **takes** frames ([`Transmitter::transmit`]), each from memory of the daemon's own, or in a
//! [place](Transmitter::place) of its own where it is judged and sent from, then **flushes**: what it took goes to
//! the kernel together. Every frame offered is counted exactly once, by the answer of `transmit` or, if it was
//! taken, by that of the next `flush`.

use std::ops::Range;

use vnplug_frame::Frame;
use vnplug_ring::offload::Offload;

/// The way out through a queue. No call blocks.
pub trait Transmitter {
    /// The frames that are offered until the next flush are of this port of a switch; 0: of none.
    fn sends(&mut self, _member: u16) {}

    /// Takes a frame to be sent, Ethernet header included, FCS excluded. `bytes` is the daemon's own
    /// copy; it is not needed after the call. The caller flushes after a batch.
    fn transmit(&mut self, bytes: &[u8]) -> Transmit;

    /// Room for `len` bytes with a frame among them, where it is sent from. It is the daemon's own memory, which nobody else
    /// can change: a frame is copied there once, judged there, and [taken](Self::placed) or left. `None`: there is no
    /// such room, now or ever; ask [`transmit`](Self::transmit). Who asks again has the same place.
    fn place(&mut self, _len: usize) -> Option<&mut [u8]> {
        None
    }

    /// As [`transmit_offloaded`](Self::transmit_offloaded), of a frame that lies there in the place that was asked for
    /// last, for which there was room: the answer is not [`Full`](Transmit::Full).
    fn placed(&mut self, _frame: Range<usize>, _offload: &Offload) -> Transmit {
        Transmit::Unsupported
    }

    /// Whether it takes frames that are still to be cut or summed.
    fn takes_offload(&self) -> bool {
        false
    }

    /// As [`transmit`](Self::transmit), of a frame that is still to be cut or summed as `offload` says,
    /// which fits it. Only asked of who [takes such frames](Self::takes_offload).
    fn transmit_offloaded(&mut self, _bytes: &[u8], _offload: &Offload) -> Transmit {
        Transmit::Unsupported
    }

    /// Sends what was taken, and returns its fates. Frames that were sent, and that other captures
    /// on this wire receive but this queue does not, go to `shown`, in order and each once.
    fn flush(&mut self, shown: &mut dyn FnMut(&[Frame<'_>])) -> Flushed;
}

/// The way out where there is none.
pub(crate) struct NoWay;

impl Transmitter for NoWay {
    fn transmit(&mut self, _: &[u8]) -> Transmit {
        Transmit::Unsupported
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        Flushed::default()
    }
}

/// A measurement of how long frames take to a reader and back.
pub trait Echoes {
    /// A sender was attached where there was none: the measurement starts again.
    fn begin(&mut self);

    /// What was measured; `None` before the first echo.
    fn latency(&self) -> Option<Latency>;
}

/// What [`Transmitter::transmit`] says of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// Taken (the bytes were copied or sent); the next flush says what became of it.
    Taken,
    /// No more room before a flush: flush, then offer the frame once more. After that it is dropped.
    Full,
    /// Longer than the link can carry, or shorter than its header.
    BadLength,
    /// The link is down or the interface is gone.
    LinkDown,
    /// This source cannot send.
    Unsupported,
}

/// The fates of the frames that were taken since the flush before; their sum is the number of
/// frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Handed to the kernel or the driver, which may still lose them.
    pub sent: u64,
    /// Dropped: the kernel's or the driver's queue is full.
    pub full: u64,
    /// Dropped: the link cannot carry frames of this length.
    pub bad_length: u64,
    /// Dropped: the link is down or the interface is gone.
    pub link_down: u64,
}

/// How long frames took to a reader and back, in nanoseconds, since the first sender was attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Latency {
    /// Frames that came back.
    pub count: u64,
    /// The shortest.
    pub min_ns: u64,
    /// The median.
    pub p50_ns: u64,
    /// 99 % took at most this long.
    pub p99_ns: u64,
    /// 99.9 % took at most this long.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

impl Latency {
    /// Adds another queue's: the times of the slower one, because the histograms are gone by now.
    pub fn add(&mut self, other: &Self) {
        self.min_ns = match self.count {
            0 => other.min_ns,
            _ => self.min_ns.min(other.min_ns),
        };
        self.count += other.count;
        self.p50_ns = self.p50_ns.max(other.p50_ns);
        self.p99_ns = self.p99_ns.max(other.p99_ns);
        self.p999_ns = self.p999_ns.max(other.p999_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The values with their public names.
    pub fn named(&self) -> [(String, u64); 6] {
        [
            ("echoes".into(), self.count),
            ("echo_min_ns".into(), self.min_ns),
            ("echo_p50_ns".into(), self.p50_ns),
            ("echo_p99_ns".into(), self.p99_ns),
            ("echo_p999_ns".into(), self.p999_ns),
            ("echo_max_ns".into(), self.max_ns),
        ]
    }
}

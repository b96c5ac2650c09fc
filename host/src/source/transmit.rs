//! Frames the other way: from a reader's transmit ring through the source onto the wire.
//!
//! A queue first **takes** frames ([`Queue::transmit`](super::Queue::transmit)), each from memory of
//! the daemon's own, then **flushes**: what it took goes to the kernel together. Every frame offered
//! is counted exactly once, by what `transmit` answers or by what the next `flush` tells of those
//! that were taken.

/// What [`Queue::transmit`](super::Queue::transmit) says of a frame.
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

/// What became of the frames that were taken since the flush before; they add up to them.
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

//! A batch on its way through the ports of a queue, and who sent it.

use std::cell::RefCell;

use crate::cuts::Cuts;
use vnplug_frame::Frame;

/// Ports of one owner that a program declared to belong together: none is shown what another sends.
#[derive(Debug, Clone, Copy, Default)]
pub struct Handle {
    /// The port.
    pub port: u32,
    /// The number of its owner in the daemon.
    pub owner: u32,
    /// The number that the program chose; 0 = it has only this port.
    pub number: u64,
}

impl Handle {
    /// Whether both belong together.
    fn holds(&self, other: &Self) -> bool {
        self.port == other.port
            || self.number != 0 && self.number == other.number && self.owner == other.owner
    }
}

/// What the frames of one batch share, computed once for all ports.
#[derive(Debug, Clone, Copy)]
pub struct BatchInfo<'a> {
    /// The frames.
    pub frames: &'a [Frame<'a>],
    /// Their flow hashes.
    pub hashes: &'a [u32],
    /// How many frames this queue had read before.
    pub first: u64,
    /// The source's number.
    pub source: u16,
    /// The queue's number.
    pub queue: u16,
    /// Monotonic clock, microseconds.
    pub now_us: u64,
    /// The ports of the sender, if a port sent it.
    pub sender: Option<&'a Handle>,
    /// What its super-frames become.
    pub cuts: &'a RefCell<Cuts>,
}

impl BatchInfo<'_> {
    /// Whether this port's program sent it.
    #[inline]
    pub fn is_own(&self, port: &Handle) -> bool {
        self.sender.is_some_and(|sender| sender.holds(port))
    }
}

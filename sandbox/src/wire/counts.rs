//! What becomes of frames, and how many.

use std::net::IpAddr;

use crate::act::Transport;

/// What became of frames, one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    /// All that came.
    pub all: u64,
    /// Passed: of a flow that was permitted.
    pub permitted: u64,
    /// Passed: by a rule that needs no program.
    pub ruled: u64,
    /// Passed: what keeps an interface working (ARP, neighbour discovery, groups).
    pub kept: u64,
    /// Dropped: nobody permitted it.
    pub denied: u64,
    /// Dropped: of another sender than this interface, or for another receiver.
    pub foreign: u64,
    /// Dropped: no IP, or wrong.
    pub odd: u64,
}

/// What became of frames, both ways.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames of programs.
    pub sent: Passed,
    /// Frames of the switch.
    pub received: Passed,
}

/// Who is at the other end: how, address, port (0 where there are none).
pub(super) type Peer = (Transport, IpAddr, u16);

/// Why a frame passes, or does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Permitted,
    Ruled,
    Kept,
    Denied(Peer),
    /// It was permitted, but for what it says.
    Unsaid,
    Foreign,
    Odd,
}

impl Passed {
    pub(super) fn count(&mut self, fate: Fate) {
        self.all += 1;
        *match fate {
            Fate::Permitted => &mut self.permitted,
            Fate::Ruled => &mut self.ruled,
            Fate::Kept => &mut self.kept,
            Fate::Denied(_) | Fate::Unsaid => &mut self.denied,
            Fate::Foreign => &mut self.foreign,
            Fate::Odd => &mut self.odd,
        } += 1;
    }

    /// All that passed.
    #[must_use]
    pub fn passed(&self) -> u64 {
        self.permitted + self.ruled + self.kept
    }

    /// All that did not.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.denied + self.foreign + self.odd
    }
}

impl Fate {
    pub(super) fn passes(self) -> bool {
        matches!(self, Self::Permitted | Self::Ruled | Self::Kept)
    }
}

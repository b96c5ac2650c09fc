//! Where frames go: one small trait, and why a frame does not.

use std::io;

use super::wire::WireError;

/// What takes frames.
pub trait Exit {
    /// Whether a frame of this length and beginning is short enough.
    fn fits(&self, frame: &[u8]) -> bool;

    /// Sends frames in order; how many were taken. 0: there is no room, and a little time has passed.
    ///
    /// # Errors
    /// [`Obstacle`]: the first frame cannot be sent, or none ever.
    fn send(&mut self, frames: &[&[u8]]) -> Result<usize, Obstacle>;
}

/// Why nothing was sent.
#[derive(Debug)]
pub enum Obstacle {
    /// The first frame is longer than what can be sent now.
    TooLong,
    /// The kernel refuses the first frame.
    Frame(io::Error),
    /// Nothing can be sent any more.
    Gone(ExitError),
}

/// Nothing can be sent any more.
#[derive(Debug)]
pub enum ExitError {
    /// By the interface.
    Wire(WireError),
    /// By the daemon's port.
    Port(vnplug::Error),
    /// For this many seconds no frame was taken.
    Stuck(u64),
}

impl std::fmt::Display for ExitError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wire(error) => error.fmt(f),
            Self::Port(error) => error.fmt(f),
            Self::Stuck(seconds) => write!(f, "no frame was taken for {seconds} s"),
        }
    }
}

impl std::error::Error for ExitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Wire(error) => error.source(),
            Self::Port(error) => error.source(),
            Self::Stuck(_) => None,
        }
    }
}

//! Programs that nobody here wrote, unchanged: the same one on the real wire, on the host through
//! vNPlug's libpcap, and in guests through it, all at once over one conversation.
//!
//! ```text
//!   near ── wire0 ═══ wire1 ── far        the program with the distribution's libpcap, on wire1
//!   (one conversation)  │                 ├─ on the host, on vnplug:wire  ┐ the drop-in, by
//!                       └─ vnplugd: wire ─┤                               │ LD_LIBRARY_PATH
//!                                         └─ in a guest, on host:wire     ┘
//! ```
//!
//! [`Stage`] holds the wire and the daemon, [`Place`] is where a program runs, [`Watch`] is one
//! program that runs in several places. A command is a line for the shell with `{dev}` for the
//! interface and `{dir}` for a directory of its own.

mod place;
mod talk;
mod watch;

use std::path::PathBuf;

pub use place::Place;
pub use talk::Talk;
pub use watch::{Seen, Watch, same};

use crate::daemon::Daemon;
use crate::error::Result;
use crate::lab::Lab;

/// A wire on which ends talk, a daemon that listens, and the drop-in.
#[derive(Debug)]
pub struct Stage {
    /// Holds everything below; for files of the test.
    pub lab: Lab,
    /// The ends and what they say.
    pub talk: Talk,
    /// Serves the source `wire`, which is `wire1` of [`Talk::far`].
    pub daemon: Daemon,
    dropin: PathBuf,
}

impl Stage {
    /// Makes the wire and starts the daemon.
    ///
    /// # Errors
    /// [`LabError`](crate::LabError) with what is missing or failed.
    pub fn new() -> Result<Self> {
        let lab = Lab::new()?;
        let talk = Talk::start(&lab)?;
        // As `wire::PATIENT`: nobody is to lose a packet.
        let sources = ["--source", "wire=af_packet:wire1,block_timeout_ms=50"];
        let daemon = Daemon::start(&lab, Some(&talk.far), &sources)?;
        let dropin = place::dropin(&lab)?;
        Ok(Self {
            lab,
            talk,
            daemon,
            dropin,
        })
    }

    /// Starts a program on the real wire and in `places`, and waits until each says that it
    /// listens: prints `ready`, or where that is empty has opened its socket or port.
    ///
    /// # Errors
    /// [`LabError::Timeout`](crate::LabError::Timeout), with what the program printed, or why it could not be started.
    pub fn watch<'a>(
        &'a self,
        places: &[&'a Place],
        command: &str,
        ready: &str,
    ) -> Result<Watch<'a>> {
        Watch::start(self, places, command, ready)
    }

    /// Runs a command in one place to its end, through the drop-in.
    ///
    /// # Errors
    /// [`LabError::Timeout`](crate::LabError::Timeout) if it does not end.
    pub fn run(&self, place: &Place, command: &str) -> Result<Seen> {
        Watch::once(self, place, command)
    }
}

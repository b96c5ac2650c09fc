//! `vnplug agent`: serves the applications of a guest.

use std::path::{Path, PathBuf};

use clap::Args;
use vnplug::agent::{self, AgentConfig, AgentDevice};

use crate::failure::{OK, Outcome};
use crate::sys;

/// Serves the applications of this guest; runs inside virtual machines.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug agent
  vnplug agent --memory /dev/mmapper --channel /dev/ttyS0
  vnplug --socket /tmp/vnplug.sock agent --group 100

Finds the memory and the channel that `vnplug attach` plugged in, also when they come later, and
listens on the socket that applications here use. Ends at SIGTERM or Ctrl-C.")]
pub(crate) struct Agent {
    /// The memory pool [default: found by itself]
    #[arg(long, value_name = "PATH")]
    memory: Option<PathBuf>,
    /// The control channel [default: found by itself]
    #[arg(long, value_name = "PATH")]
    channel: Option<PathBuf>,
    /// Number of the group whose users may connect [default: every user may]
    #[arg(long, value_name = "GID")]
    group: Option<u32>,
}

impl Agent {
    pub(crate) fn run(self, socket: &Path) -> Outcome {
        let device = match (self.memory, self.channel) {
            (None, None) => AgentDevice::Search,
            (memory, channel) => AgentDevice::Paths { memory, channel },
        };
        agent::run(AgentConfig {
            socket: socket.to_owned(),
            group: self.group,
            device,
            stop: Some(sys::signals_as_fd()?),
        })?;
        Ok(OK)
    }
}

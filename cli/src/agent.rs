//! `vnplug agent`: serves the applications of a guest.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use vnplug::agent::{self, AgentConfig, AgentDevice, Hears, Standing};
use vnplug_os::service::Manager;

use crate::failure::{OK, Outcome};
use crate::sys;

/// Serves the applications of this guest; runs inside virtual machines.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug agent
  vnplug agent --memory /dev/mmapper --channel /dev/ttyS0
  vnplug --socket /tmp/vnplug.sock agent --group 100
  vnplug agent --doorbell off

Finds the memory and the channel that `vnplug attach` plugged in, also when they come later, and
listens on the socket that applications here use. Ends at SIGTERM or Ctrl-C.

A service manager (Type=notify) hears that it is ready when applications can connect: a guest's start does not wait
for its host. `systemctl status` says whether that answers.

A doorbell (`vnplug attach qemu --doorbell N`) wakes readers by interrupts. It needs the module
vfio-pci here and a VM with -device intel-iommu,intremap=on; without, it is said why, and readers
are woken over the channel.")]
pub(crate) struct Agent {
    /// The memory pool [default: found automatically]
    #[arg(long, value_name = "PATH")]
    memory: Option<PathBuf>,
    /// The control channel [default: found automatically]
    #[arg(long, value_name = "PATH")]
    channel: Option<PathBuf>,
    /// Number of the group whose users may connect [default: every user may]
    #[arg(long, value_name = "GID")]
    group: Option<u32>,
    /// Wake readers through the VM's doorbell device, if there is one and VFIO works
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = Doorbell::Auto)]
    doorbell: Doorbell,
}

/// Whether to use a doorbell device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Doorbell {
    /// If it works; otherwise say why not
    Auto,
    /// Readers are woken over the channel
    Off,
}

impl Agent {
    pub(crate) fn run(self, socket: &Path) -> Outcome {
        let device = match (self.memory, self.channel) {
            (None, None) => AgentDevice::Search,
            (memory, channel) => AgentDevice::Paths { memory, channel },
        };
        let manager = Arc::new(Manager::here());
        agent::run(AgentConfig {
            socket: socket.to_owned(),
            group: self.group,
            device,
            doorbell: self.doorbell == Doorbell::Auto,
            stop: Some(sys::signals_as_fd()?),
            hears: Some(hears(Arc::clone(&manager))),
        })?;
        manager.say_stopping();
        Ok(OK)
    }
}

/// Tells the service manager: with the first word the agent is ready.
fn hears(manager: Arc<Manager>) -> Hears {
    let mut is_ready = false;
    Hears(Box::new(move |standing| {
        let status = match standing {
            Standing::Connected => "Serving applications, connected to the host",
            Standing::Waiting => {
                "Waiting for the host: nothing is plugged in, or its daemon is away"
            }
        };
        match std::mem::replace(&mut is_ready, true) {
            false => manager.say_ready(status),
            true => manager.say_status(status),
        }
    }))
}

//! Plugs a daemon's memory pool and control channel into a running QEMU, and out again.
//!
//! The VM is running: nothing here needs a reboot or a change of its definition (a q35 machine needs
//! free PCIe ports, see [`slots`]). An attach that fails takes back what it did; one that was
//! interrupted is completed by running it again.

mod access;
mod advice;
mod arrival;
mod attach;
mod blocks;
mod choice;
mod definition;
mod detach;
mod grow;
mod incoming;
mod lines;
mod lost;
mod migrate;
mod monitor;
mod nic;
mod parts;
mod pmem;
mod pool;
mod push;
mod qmp;
mod slots;
mod target;
mod virsh;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

pub(crate) use self::attach::Attach;
pub(crate) use self::detach::Detach;
pub(crate) use self::migrate::Migrate;
use self::monitor::{Monitor, MonitorError};
pub(crate) use self::pmem::MORE_MEMORY;
use self::qmp::Qmp;
pub(crate) use self::slots::{MORE_PORTS, PORT_TYPES};
use self::virsh::Virsh;

/// Where QEMU's monitor is.
#[derive(Debug, Args)]
struct MonitorArgs {
    /// QEMU's monitor (QMP) socket, one that nobody else holds
    #[arg(
        long,
        value_name = "PATH",
        required_unless_present = "libvirt",
        conflicts_with = "libvirt"
    )]
    qmp: Option<PathBuf>,
    /// The VM's domain in libvirt: its name, id or UUID. The monitor stays libvirt's (uses virsh)
    #[arg(long, value_name = "DOMAIN")]
    libvirt: Option<String>,
    /// The libvirt to ask, for example qemu:///system. Default: virsh's (LIBVIRT_DEFAULT_URI)
    #[arg(long, value_name = "URI", requires = "libvirt", conflicts_with = "qmp")]
    connect: Option<String>,
}

impl MonitorArgs {
    fn open(&self) -> Result<Box<dyn Monitor>, MonitorError> {
        if let Some(domain) = &self.libvirt {
            let mut virsh = Virsh::open(domain, self.connect.as_deref(), VIRSH_LIMIT)?;
            virsh.claim()?;
            return Ok(Box::new(virsh));
        }
        // clap insists on one of the two.
        let socket = self.qmp.as_deref().unwrap_or(Path::new(""));
        Ok(Box::new(Qmp::connect(socket, QMP_LIMIT)?))
    }
}

const QMP_LIMIT: Duration = Duration::from_secs(5);
/// More, for virsh may have to wait until libvirt's daemon has started.
const VIRSH_LIMIT: Duration = Duration::from_secs(15);

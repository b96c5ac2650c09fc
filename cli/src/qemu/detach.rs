//! `vnplug detach qemu`: what was plugged goes, when the guest lets go of it.

use std::io::ErrorKind;
use std::time::Duration;

use clap::Args;
use vnplug::Client;

use super::advice::pending;
use super::monitor::{Monitor, MonitorError};
use super::parts::{self, Left, Part};
use super::{MonitorArgs, grow, nic, pmem};
use crate::entrances::{Entrances, Via};
use crate::failure::{Failure, OK, Outcome, PENDING};
use crate::{attach, out, text};

/// Detaches a QEMU virtual machine.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug detach qemu --name probe --qmp /run/probe.qmp
  vnplug detach qemu --name probe --libvirt probe
  vnplug detach qemu --name web --qmp /run/web.qmp --nic lan0

Without --nic everything goes that was plugged under this name, network interfaces, too. The guest's system must let go of the PCI devices; while it does not (no system runs yet, or one
without PCI hot-plug), the devices stay and the exit code is 4. Run the command again later.
A device of --memory pmem cannot be unplugged: it stays, empty, until the machine ends.")]
pub(crate) struct Detach {
    #[command(flatten)]
    pub(super) monitor: MonitorArgs,
    /// The name it was attached under
    #[arg(long, value_parser = attach::vm_name)]
    pub(super) name: String,
    /// Unplug the network interface on this switch only, or all of them, and nothing else
    #[arg(long, value_name = "SWITCH", num_args = 0..=1, default_missing_value = "")]
    nic: Option<String>,
    /// If QEMU has ended, have the daemon forget the VM
    #[arg(long, conflicts_with = "nic")]
    gone: bool,
    /// Take the devices out of the libvirt domain's definition, where `attach --permanent` wrote them
    #[arg(long, requires = "libvirt", conflicts_with_all = ["nic", "gone"])]
    pub(super) permanent: bool,
    /// How long to wait for the guest to let go of the devices
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = text::duration)]
    pub(super) timeout: Duration,
}

impl Detach {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        if self.permanent {
            return self.undefine(connect);
        }
        let name = &self.name;
        let mut monitor = match self.monitor.open() {
            // One that hangs, or may not be asked, is not gone.
            Err(MonitorError::Connect(_, error))
                if self.gone
                    && matches!(
                        error.kind(),
                        ErrorKind::NotFound | ErrorKind::ConnectionRefused
                    ) =>
            {
                return match attach::forget(&mut connect()?, name, 0)? {
                    true => out::line(&format!("{name}: has ended, and is forgotten")).map(|()| OK),
                    false => Ok(OK),
                };
            }
            monitor => monitor?,
        };
        let nics = nic::plugged(monitor.as_mut(), name)?;
        if let Some(switch) = &self.nic {
            let of_it = |nic: &String| switch.is_empty() || nic == switch;
            let nics: Vec<String> = nics.into_iter().filter(of_it).collect();
            if nics.is_empty() {
                let text = "has no such interface in this QEMU";
                return Err(Failure::about(name, text));
            }
            self.unplug(monitor.as_mut(), &nics, &connect)?;
            return Ok(OK);
        }
        // The daemon first: it closes the ports, so the guest's applications let go of the memory
        // before it disappears under them.
        let told = connect().and_then(|mut client| attach::forget(&mut client, name, 0));
        let known = told.unwrap_or_else(|failure| {
            out::note(&format!(
                "{name}: the daemon was not told: {}",
                failure.line()
            ));
            false
        });
        let all = parts::all_parts(name);
        let present = parts::present(monitor.as_mut())?;
        let here: Vec<Part> = all
            .into_iter()
            .filter(|p| present.contains(&p.id))
            .collect();
        if !nics.is_empty() {
            self.unplug(monitor.as_mut(), &nics, &connect)?;
        }
        let (staying, orphans) = (
            pmem::devices(name, &present),
            pmem::unplugged(name, &present),
        );
        if here.is_empty() && orphans.is_empty() && (staying.is_empty() || !known) {
            if !nics.is_empty() {
                return Ok(OK);
            }
            if !known {
                return Err(Failure::about(name, "is not attached to this QEMU"));
            }
            out::line(&format!("{name}: nothing was plugged into this QEMU"))?;
            return Ok(OK);
        }
        let stay = grow::remove_left_over(monitor.as_mut(), name, self.timeout)?;
        let mut left = parts::remove(monitor.as_mut(), &here, self.timeout)?;
        pmem::forget(monitor.as_mut(), &orphans)?;
        left.devices.extend(stay);
        if !left.is_empty() {
            let text = format!("{name}: {}", pending(&left));
            return Err(Failure::with_code(PENDING, text));
        }
        match staying.is_empty() {
            true => out::line(&format!("{name}: detached"))?,
            false => out::line(&format!("{name}: detached; {}", pmem::stay(&staying)))?,
        }
        Ok(OK)
    }

    /// Unplugs the interfaces on these switches.
    fn unplug(
        &self,
        monitor: &mut dyn Monitor,
        nics: &[String],
        connect: impl Fn() -> Result<Client, Failure>,
    ) -> Result<(), Failure> {
        let name = &self.name;
        // Without a daemon nothing is left to be tidied up but a file.
        let pairs_of = |switch: &str| {
            let entrances = Entrances::of(&mut connect().ok()?, switch).ok()?;
            entrances.path(Via::Dgram).map(str::to_owned)
        };
        let devices = nic::unplug(monitor, name, nics, self.timeout, pairs_of)?;
        if !devices.is_empty() {
            let left = Left {
                devices,
                ..Left::default()
            };
            let text = format!("{name}: {}", pending(&left));
            return Err(Failure::with_code(PENDING, text));
        }
        out::line(&format!(
            "{name}: unplugged the interface on {}",
            nics.join(", ")
        ))
    }
}

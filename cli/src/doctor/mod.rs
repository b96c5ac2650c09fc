//! `vnplug doctor`: what is there, what is missing, what costs speed, on a host and in a guest.
//!
//! A [`Check`] looks at one thing, changes nothing, and says what mends it. Checks run side by side; one
//! whose need failed is skipped. The verdict is the first failure, in the order of a frame's way. Nothing here
//! needs the daemon: without it the checks that do say so.
//!
//! | file | what it has |
//! |---|---|
//! | `check.rs` | what a check is, and how they run |
//! | `machine.rs` | the machine as files of `/proc` and `/sys`, so that tests make one up |
//! | `host.rs`, `guest.rs`, `both.rs` | checks |
//! | `interface.rs` | checks of a network interface |
//! | `qemu.rs` | checks of the virtual machines that run on a host |
//! | `live.rs` | checks that ask the daemon or the agent |
//! | `wire.rs` | the interfaces behind sources and uplinks, and whether they are in this network namespace |
//! | `traffic.rs` | where packets stop, from the wire to the application |
//! | `show.rs` | text and JSON |

mod both;
mod check;
mod guest;
mod host;
mod interface;
mod live;
mod machine;
mod qemu;
mod show;
#[cfg(test)]
mod tests;
mod traffic;
mod wire;

use std::path::Path;
use std::time::Duration;

use clap::Args;

use crate::failure::{DOCTOR, OK, Outcome};
use crate::out;
use check::{Check, State};
use machine::Machine;

/// Checks this host or guest: what is missing, what costs speed, and what mends it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug doctor
  vnplug doctor eth1                # this interface, also without a daemon
  vnplug doctor --json
  vnplug doctor --fix               # what is safe, as root: loads modules, mounts, sets jit

It changes nothing without --fix, and needs neither root nor the daemon, but sees more with both. It takes
about a second, in which it counts packets. The exit code is 6 if something does not work.")]
pub(crate) struct Doctor {
    /// Interfaces to look at, besides those of the daemon
    #[arg(value_name = "INTERFACE")]
    interfaces: Vec<String>,
    /// One JSON object
    #[arg(long)]
    json: bool,
    /// Mend what is safe to mend, then check again
    #[arg(long)]
    fix: bool,
    /// Check as a host, or as a guest [default: what this machine looks like]
    #[arg(long, value_enum, value_name = "WHAT")]
    role: Option<Role>,
}

/// Which end of a virtual machine this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Role {
    /// Runs the daemon
    Host,
    /// Runs in a virtual machine of such a host
    Guest,
}

impl Doctor {
    pub(crate) fn run(self, socket: &Path) -> Outcome {
        let machine = Machine::this();
        let role = self.role.unwrap_or_else(|| role(&machine));
        let all = || checks(&machine, role, &self.interfaces, socket);
        let mut results = check::run(&machine, all(), LIMIT);
        if self.fix {
            let mut mended = false;
            for one in &results {
                let (State::Fail | State::Warn, Some(fix)) = (one.finding.state, one.finding.fix)
                else {
                    continue;
                };
                match fix(&machine) {
                    Ok(()) => {
                        out::note(&format!("{}: mended", one.name));
                        mended = true;
                    }
                    Err(error) => out::note(&format!("{}: cannot be mended: {error}", one.name)),
                }
            }
            if mended {
                results = check::run(&machine, all(), LIMIT);
            }
        }
        out::raw(&match self.json {
            true => show::json(role, &results),
            false => show::text(&results),
        })?;
        let failed = results.iter().any(|it| it.finding.state == State::Fail);
        Ok(if failed { DOCTOR.into() } else { OK })
    }
}

/// A guest has what `vnplug attach` plugs in, or no sign of a daemon or of machines on one that is virtual.
fn role(machine: &Machine) -> Role {
    let plugged = guest::is_plugged(machine);
    let virtual_only = machine
        .read("/proc/cpuinfo")
        .is_ok_and(|it| it.contains("hypervisor"))
        && !SIGNS_OF_HOST.iter().any(|it| machine.has(it))
        && machine.process("vnplugd").is_none()
        && qemu::running(machine).is_err();
    match plugged || virtual_only {
        true => Role::Guest,
        false => Role::Host,
    }
}

/// A virtual machine with one of these is a host itself, also before the daemon runs.
const SIGNS_OF_HOST: [&str; 4] = [
    "/etc/vnplug.toml",
    "/usr/sbin/vnplugd",
    "/usr/local/sbin/vnplugd",
    "/dev/kvm",
];
/// Most that a check may take: `traffic`, which counts, takes two seconds.
const LIMIT: Duration = Duration::from_secs(10);

/// All checks for this machine, in the order of a frame's way.
fn checks(machine: &Machine, role: Role, interfaces: &[String], socket: &Path) -> Vec<Check> {
    let (own, server) = match role {
        Role::Host => (
            host::checks().into_iter().chain(qemu::checks()).collect(),
            "daemon",
        ),
        Role::Guest => (guest::checks(), "agent"),
    };
    let live = live::ask(machine, socket, server);
    let (mut wires, mut uplinks, mut notes) = (interfaces.to_vec(), Vec::new(), Vec::new());
    // What a guest's host has is not the guest's to look at.
    if role == Role::Host {
        let name = |it: &wire::Wire| it.interface.clone();
        wires.extend(live.wires.iter().map(name));
        uplinks.extend(live.uplinks.iter().map(name));
        notes = wire::notes(&live.away, socket);
    }
    for all in [&mut wires, &mut uplinks] {
        all.sort();
        all.dedup();
    }
    uplinks.retain(|it| !wires.contains(it));
    let of_wires = wires.iter().flat_map(|it| interface::checks(it));
    let of_uplinks = uplinks
        .iter()
        .flat_map(|it| interface::checks_of_uplink(it));
    own.into_iter()
        .chain(both::checks())
        .chain(of_wires)
        .chain(of_uplinks)
        .chain(notes)
        .chain(live.checks(role))
        .collect()
}

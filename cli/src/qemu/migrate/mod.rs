//! `vnplug migrate qemu`: a machine moves to another QEMU, and its applications read on there.
//!
//! ```text
//! target prepared ── held ── unplugged ── QEMU migrates ── plugged there ── forgotten here
//!       │ refuses      │          │             │ fails
//!       ▼              ▼          ▼             ▼
//!  nothing done     let go     plugged in again, and let go
//! ```
//!
//! QEMU refuses to migrate an `ivshmem` device, so it goes before and comes after. Each memory pool has a number
//! of its own; the agent takes only the one that its channel names, so nothing that was left in a pool is ever read
//! as new.
//!
//! A machine that was attached `--movable` keeps its pool and its channel, and QEMU sends the pool like its other
//! memory:
//!
//! ```text
//! target prepared ── held ── target plugged ── QEMU migrates ── its agent greets there ── forgotten here
//! ```
//!
//! QEMU does not see what the daemon writes into the pool, so what is sent would be a mixture of times. Hence no port
//! of the machine is open from before QEMU begins until the machine runs there: the daemon writes nothing, also one
//! that was restarted meanwhile. There the daemon has a number of its own for the pool, and asks the agent to
//! greet; no ring of before is used again.
//!
//! A domain of libvirt goes the same way; what QEMU is asked for above libvirt does (`virsh migrate`), and there is no
//! QEMU that waits: the other side makes sure of everything that it can, and looks for the domain.
//!
//! Each step can be told from QEMU and the daemon: a command that was killed is run again, and goes on.

mod back;
mod carrier;
mod domain;
mod leave;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use vnplug::Client;
use vnplug_ring::control::code;

use super::access;
use super::monitor::{Monitor, MonitorError};
use super::parts;
use super::slots::{self, DeviceAddress};
use super::target::Target;
use crate::failure::{Failure, OK, Outcome, USAGE};
use crate::{attach, out, sys, text};
use carrier::{Carrier, Direct};
use domain::Domain;

/// Moves a running QEMU virtual machine to another QEMU, with what is attached to it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug migrate qemu --name probe --qmp /run/a.qmp --to unix:/run/b.mig \\
      --target-qmp /run/b.qmp --target-socket /run/vnplug-b/vnplug.sock --allow eth1
  vnplug migrate qemu --name probe --qmp /run/probe.qmp --to tcp:host2:4444 \\
      --ssh root@host2 --target-qmp /run/probe.qmp
  vnplug migrate qemu --name probe --libvirt probe --to qemu+ssh://root@host2/system --allow eth1
  vnplug migrate qemu --name probe --libvirt probe --to qemu+ssh://root@host2/system -- --copy-storage-all

The other QEMU waits (-incoming unix:/run/b.mig, or tcp:0:4444) with the same machine as this one; for a domain of
libvirt, libvirt starts it, and what comes after -- are more options of `virsh migrate`. The daemon's
configuration there and --allow say what the VM may see there; that is checked before anything is changed here.
Applications in the guest read on; the first packet there has the mark of a gap. While QEMU copies the memory
nothing is captured: QEMU does not migrate while shared memory is plugged, or, of a machine that was attached
--movable, does not see what is written into it.
If it fails the VM is attached here as before. If it is killed, run it again: it goes on where it was.
Afterwards the old QEMU is stopped (postmigrate): end it.")]
pub(crate) struct Migrate {
    /// Monitor (QMP) socket of the QEMU that the machine runs in, one that nobody else holds
    #[arg(
        long,
        value_name = "PATH",
        required_unless_present = "libvirt",
        conflicts_with = "libvirt"
    )]
    qmp: Option<PathBuf>,
    /// The VM's domain in libvirt, which moves it (virsh migrate)
    #[arg(long, value_name = "DOMAIN")]
    libvirt: Option<String>,
    /// The libvirt here, for example qemu:///system. Default: virsh's (LIBVIRT_DEFAULT_URI)
    #[arg(long, value_name = "URI", requires = "libvirt")]
    connect: Option<String>,
    #[command(flatten)]
    vm: attach::VmArgs,
    /// Where the machine goes: what the other QEMU was given as -incoming; or the other libvirt, for example
    /// qemu+ssh://root@host2/system
    #[arg(long, value_name = "URI")]
    to: String,
    /// Monitor socket of the other QEMU
    #[arg(
        long,
        value_name = "PATH",
        required_unless_present = "libvirt",
        conflicts_with = "libvirt"
    )]
    target_qmp: Option<PathBuf>,
    /// The other libvirt, as that host calls it
    #[arg(
        long,
        value_name = "URI",
        requires = "libvirt",
        default_value = "qemu:///system"
    )]
    target_connect: String,
    /// Socket of the daemon there
    #[arg(long, value_name = "PATH")]
    target_socket: Option<PathBuf>,
    /// The host that the machine goes to: vnplug is run there, by ssh. Default: that of --to, if it is reached by ssh
    #[arg(long, value_name = "[USER@]HOST")]
    ssh: Option<String>,
    /// A group that the VM joins there, as with attach; may be repeated
    #[arg(long = "group", value_name = "NAME=SOURCE[,SIZE]")]
    groups: Vec<String>,
    /// PCI bus or free PCIe port to plug into there; once per device, in order
    #[arg(long = "bus", value_name = "ID")]
    buses: Vec<String>,
    /// User that the other QEMU runs as, where it is not found automatically
    #[arg(long, value_name = "USER")]
    qemu_user: Option<String>,
    /// Go on although applications have not let go of the memory: the kernel kills them when it is unplugged. With
    /// --movable the pool is not: they keep their part of it, which is taken there, too, until they let go
    #[arg(long)]
    force: bool,
    /// How long applications, then the guest's kernel, may take to let go
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = text::duration)]
    timeout: Duration,
    /// Print one JSON object with the times
    #[arg(long)]
    json: bool,
    /// With --libvirt: more options of `virsh migrate`
    #[arg(last = true, requires = "libvirt", value_name = "OPTIONS")]
    more: Vec<String>,
}

/// Where the machine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Here, and no migration is under way.
    Here,
    /// On its way.
    Moving,
    /// It has gone.
    Gone,
}

/// When what was done.
#[derive(Default)]
struct Times {
    drained: Duration,
    unplugged: Duration,
    moved: Duration,
    plugged: Duration,
}

/// What of the machine goes along with it, which its other QEMU must have beforehand.
struct Along {
    /// Bytes of its pool.
    pool: u64,
    /// Where the pool's device is, then the channel's.
    places: [DeviceAddress; 2],
}

/// What the machine must find where it goes.
#[derive(Default)]
struct Needs {
    /// The sources that its applications read.
    sources: BTreeSet<String>,
    /// Bytes of its pool here, from which their rings are made.
    pool: u64,
    /// What libvirt calls it.
    domain: Option<String>,
}

/// How a daemon is reached; it may be restarted while a machine moves.
type Connect<'a> = &'a dyn Fn() -> Result<Client, Failure>;

impl Migrate {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        if self.target_socket.is_none() && self.host().is_none() {
            let text = "--ssh [USER@]HOST says which host it goes to; or --target-socket, which daemon of this host";
            return Err(Failure::with_code(
                USAGE,
                format!("{}: {text}", self.vm.name),
            ));
        }
        match &self.libvirt {
            None => self.carry(&mut Direct::open(self)?, &connect),
            Some(_) => {
                let mut domain = Domain::open(self)?;
                if domain.standing()?.0 == Standing::Here {
                    domain.check(&self.vm.name)?;
                }
                self.carry(&mut domain, &connect)
            }
        }
    }

    fn carry(&self, carrier: &mut dyn Carrier, connect: Connect<'_>) -> Outcome {
        sys::catch_signals();
        let begun = Instant::now();
        let mut times = Times::default();
        let standing = carrier.standing()?.0;
        let (owner, along) = match (&self.libvirt, standing) {
            // Nobody is here any more to be asked.
            (Some(_), Standing::Gone) => (0, None),
            _ => {
                let monitor = carrier.monitor();
                (access::identity(monitor)?, self.goes_along(monitor)?)
            }
        };
        let along = along.as_ref();
        let target = match standing {
            Standing::Here => Some(self.send(carrier, connect, owner, along, &mut times)?),
            // An earlier command was killed.
            Standing::Moving | Standing::Gone => None,
        };
        let moving = Instant::now();
        let told = match self.await_end(carrier) {
            Ok(told) => told,
            Err(failure) => {
                return Err(self.give_up(carrier, connect, owner, target, failure));
            }
        };
        times.moved = moving.elapsed();
        let moved = Instant::now();
        let mut target = match target {
            Some(target) => target,
            None => self.find_target(along)?,
        };
        let attached = target
            .await_attached(ATTACHED_LIMIT)
            .map_err(|failure| self.stranded(&failure))?;
        times.plugged = moved.elapsed();
        if let Err(failure) = self.forget(connect, owner) {
            let why = failure.line();
            out::note(&format!(
                "{}: the daemon here did not forget it: {why}",
                self.vm.name
            ));
        }
        self.tell(&times, begun.elapsed(), &told, &attached)
    }

    /// The host that the machine goes to, if it is another one.
    fn host(&self) -> Option<String> {
        let by_uri = || {
            self.libvirt
                .as_ref()
                .and_then(|_| domain::ssh_host(&self.to))
        };
        self.ssh.clone().or_else(by_uri)
    }

    /// The daemon here forgets the machine, if it knows it.
    fn forget(&self, connect: Connect<'_>, owner: u64) -> Result<(), Failure> {
        match connect()?.detach_own_vm(&self.vm.name, owner) {
            Err(vnplug::Error::Refused { code, .. }) if code == code::NOT_FOUND => Ok(()),
            told => Ok(told?),
        }
    }

    /// What QEMU sends of the attachment; nothing if the machine was not attached `--movable`.
    fn goes_along(&self, qemu: &mut dyn Monitor) -> Result<Option<Along>, Failure> {
        let name = &self.vm.name;
        let present = parts::present(qemu)?;
        if !parts::is_movable(qemu, name, &present)? {
            return Ok(None);
        }
        let memory = format!("/objects/vnplug-{name}-mem");
        let size = json!({"path": memory, "property": "size"});
        let pool = qemu.execute("qom-get", size)?.as_u64().unwrap_or_default();
        if self.vm.pool > 0 && self.vm.pool != pool {
            let text = format!(
                "has a pool of {pool} bytes, which goes along: leave out --pool, or detach it and attach it anew"
            );
            return Err(Failure::about(name, text));
        }
        let place =
            |qemu: &mut dyn Monitor, part| slots::place_of(qemu, &format!("vnplug-{name}-{part}"));
        let places = [place(qemu, "shm")?, place(qemu, "ser")?];
        Ok(Some(Along { pool, places }))
    }

    /// Has the target prepared, takes everything out of this QEMU that does not go along, and has it send the
    /// machine. If any of that fails the machine is attached here as before.
    fn send(
        &self,
        carrier: &mut dyn Carrier,
        connect: Connect<'_>,
        owner: u64,
        along: Option<&Along>,
        times: &mut Times,
    ) -> Result<Target, Failure> {
        self.refuse_what_stays(carrier.monitor())?;
        let mut client = connect()?;
        let mut needs = self.needs(&mut client)?;
        needs.domain = carrier.domain()?;
        let mut target = Target::start(self.command(&needs, along, false)?)?;
        let begun = target.await_ready(READY_LIMIT).and_then(|()| {
            self.let_go(carrier.monitor(), &mut client, owner, along, times)?;
            if along.is_some() {
                self.refuse_what_cannot_go_along(carrier.monitor())?;
            }
            target.await_sent(READY_LIMIT)?;
            carrier.send()
        });
        match begun {
            Ok(()) => Ok(target),
            Err(failure) => Err(self.give_up(carrier, connect, owner, Some(target), failure)),
        }
    }

    /// The target of a machine that is there already. What an earlier command started there may still hold the
    /// monitor, and be about to attach it.
    fn find_target(&self, along: Option<&Along>) -> Result<Target, Failure> {
        let deadline = Instant::now() + READY_LIMIT;
        loop {
            let mut target = Target::start(self.command(&Needs::default(), along, true)?)?;
            match target.await_ready(READY_LIMIT) {
                Ok(()) => return Ok(target),
                // Which nobody holds who looks.
                Err(refusal) if self.libvirt.is_some() => {
                    let text = format!("it does not run here, and {}", refusal.line());
                    return Err(Failure::about(&self.vm.name, text));
                }
                Err(refusal) if Instant::now() >= deadline => return Err(self.stranded(&refusal)),
                Err(_) => target.cancel(),
            }
        }
    }

    /// Waits for the end of the carrier's part; what QEMU says of it.
    fn await_end(&self, carrier: &mut dyn Carrier) -> Result<Value, Failure> {
        loop {
            let (standing, told) = carrier.standing()?;
            match standing {
                Standing::Gone => return Ok(told),
                Standing::Here => return Err(Failure::about(&self.vm.name, carrier.why(&told))),
                Standing::Moving => {}
            }
            if sys::stop().is_some() {
                carrier.cancel()?;
            }
            carrier.monitor().news(Instant::now() + TURN)?;
        }
    }

    fn tell(&self, times: &Times, all: Duration, told: &Value, attached: &str) -> Outcome {
        let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
        // libvirt keeps it.
        let of_qemu = |key: &str| told[key].as_u64();
        let (total, down) = (of_qemu("total-time"), of_qemu("downtime"));
        if self.json {
            let line = json!({
                "name": self.vm.name, "away_ms": ms(all), "drained_ms": ms(times.drained),
                "unplugged_ms": ms(times.unplugged), "moved_ms": ms(times.moved),
                "plugged_ms": ms(times.plugged), "qemu_total_ms": total, "qemu_downtime_ms": down,
            });
            out::raw(&format!("{line}\n"))?;
            return Ok(OK);
        }
        out::line(attached)?;
        let of_these = match (total, down) {
            (Some(total), Some(down)) => format!("{total} ms of them QEMU's ({down} ms stopped)"),
            _ => format!("{:.0} ms of them libvirt's", ms(times.moved)),
        };
        out::line(&format!(
            "{}: moved: unplugged for {:.0} ms, {of_these}",
            self.vm.name,
            ms(all)
        ))?;
        Ok(OK)
    }
}

/// Where the machine is, and what QEMU says of the migration.
pub(super) fn standing(qemu: &mut dyn Monitor) -> Result<(Standing, Value), MonitorError> {
    let told = qemu.execute("query-migrate", json!({}))?;
    let state = qemu.execute("query-status", json!({}))?;
    let standing = match told["status"].as_str() {
        None | Some("none" | "failed" | "cancelled") => Standing::Here,
        // One that came here once is here, whatever it does now.
        Some("completed") if state["status"] == "postmigrate" => Standing::Gone,
        Some("completed") => Standing::Here,
        Some(_) => Standing::Moving,
    };
    Ok((standing, told))
}

const READY_LIMIT: Duration = Duration::from_secs(60);
const ATTACHED_LIMIT: Duration = Duration::from_secs(60);
/// Between looks at the daemon and at QEMU.
const TURN: Duration = Duration::from_millis(10);

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

mod carrier;
mod domain;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Client, Counted};
use vnplug_ring::control::{VERSION, VmReady, code};
use vnplug_ring::counters::label;
use vnplug_ring::pool::FIRST_RING;

use super::advice::pending;
use super::incoming::source_of;
use super::monitor::{Monitor, MonitorError};
use super::parts::{self, Kind, Part};
use super::slots::DeviceAddress;
use super::target::{self, Target};
use super::{QMP_LIMIT, access, blocks, grow, nic, pmem, slots};
use crate::failure::{Failure, OK, Outcome, PENDING, USAGE};
use crate::list::value;
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

    /// What QEMU would say no to when the other one has its devices, which it cannot let go of.
    fn refuse_what_cannot_go_along(&self, qemu: &mut dyn Monitor) -> Result<(), Failure> {
        let told = qemu.execute("query-migrate", json!({}))?;
        if let Some(reason) = told["blocked-reasons"][0].as_str() {
            return Err(Failure::about(&self.vm.name, format!("QEMU: {reason}")));
        }
        let switches = qemu.execute("query-migrate-capabilities", json!({}))?;
        let is_on = |it: &Value| it["capability"] == "postcopy-ram" && it["state"] == true;
        if switches.as_array().is_some_and(|all| all.iter().any(is_on)) {
            // Pages of the pool would come when it is in use.
            let text = "does not move with its memory by postcopy: switch postcopy-ram off";
            return Err(Failure::about(&self.vm.name, text));
        }
        Ok(())
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

    /// What would be left behind, or has no counterpart there.
    fn refuse_what_stays(&self, qemu: &mut dyn Monitor) -> Result<(), Failure> {
        let name = &self.vm.name;
        let nics = nic::plugged(qemu, name)?;
        let present = parts::present(qemu)?;
        let text = if !nics.is_empty() {
            format!(
                "has interfaces on {}: `vnplug detach qemu --nic` first, and attach them there",
                nics.join(", ")
            )
        } else if !grow::numbers(name, &present).is_empty() {
            "has memory that `attach --grow` plugged, which does not move: detach it first"
                .to_owned()
        } else if let [first, ..] = pmem::devices(name, &present).as_slice() {
            format!(
                "has the virtio-pmem device {first}, which QEMU can neither unplug nor move with what is in it: \
                 end the machine and start it there; nothing was changed"
            )
        } else if parts::all_parts(name)
            .iter()
            .any(|part| part.is_bell() && present.contains(&part.id))
        {
            "has a doorbell, which does not move: detach it, and attach it without --doorbell"
                .to_owned()
        } else {
            return Ok(());
        };
        Err(Failure::about(name, text))
    }

    /// What the VM must find there: the sources that its applications read, and room for their rings.
    fn needs(&self, client: &mut Client) -> Result<Needs, Failure> {
        let own = format!("vm {}", self.vm.name);
        let counters = client.stats()?;
        let is_own = |it: &&Counted| it.kind == "port" && label(it, "owner") == own;
        let read = counters.iter().filter(is_own);
        let mut sources: BTreeSet<String> = read
            .map(|it| source_of(label(it, "device")).to_owned())
            .collect();
        let vm = counters
            .iter()
            .find(|it| it.kind == "vm" && it.name == self.vm.name);
        // Of one that is held already there are no ports.
        let held = vm
            .into_iter()
            .flat_map(|it| label(it, "read").split_whitespace());
        sources.extend(held.map(str::to_owned));
        Ok(Needs {
            sources,
            pool: vm.map_or(0, |it| value(it, "pool_bytes")),
            domain: None,
        })
    }

    /// What is run where the machine goes to.
    fn command(
        &self,
        needs: &Needs,
        along: Option<&Along>,
        has_come: bool,
    ) -> Result<std::process::Command, Failure> {
        let mut words: Vec<String> = Vec::new();
        let mut option = |name: &str, value: &str| {
            words.extend([name.to_owned(), value.to_owned()]);
        };
        if let Some(socket) = &self.target_socket {
            option("--socket", &socket.to_string_lossy());
        }
        option("attach", "qemu");
        option("--name", &self.vm.name);
        match &self.libvirt {
            Some(domain) => {
                option("--libvirt", needs.domain.as_ref().unwrap_or(domain));
                option("--connect", &self.target_connect);
            }
            None => {
                let qmp = self.target_qmp.as_deref();
                option("--qmp", &qmp.unwrap_or(Path::new("")).to_string_lossy());
            }
        }
        let pool = match self.vm.pool {
            // What fits here fits there.
            0 => needs.pool,
            asked => asked,
        };
        let pool = along.map_or(pool, |along| along.pool);
        if pool > 0 {
            option("--pool", &pool.to_string());
        }
        for place in along.iter().flat_map(|along| &along.places) {
            option("--place", &place.to_string());
        }
        for grant in &self.vm.allow {
            match grant.filter.as_str() {
                "" => option("--allow", &grant.source),
                filter => option("--allow", &format!("{}:{filter}", grant.source)),
            }
        }
        self.groups.iter().for_each(|it| option("--group", it));
        self.buses.iter().for_each(|it| option("--bus", it));
        needs.sources.iter().for_each(|it| option("--needs", it));
        option("--speaks", &VERSION.to_string());
        if let Some(user) = &self.qemu_user {
            option("--qemu-user", user);
        }
        words.push("--incoming".to_owned());
        if along.is_some() {
            words.push("--movable".to_owned());
        }
        if has_come {
            words.push("--come".to_owned());
        }
        target::command(self.host().as_deref(), &words)
    }

    /// Has the applications and then the guest's kernel let go, and takes everything out of this QEMU that does not
    /// go along.
    fn let_go(
        &self,
        qemu: &mut dyn Monitor,
        client: &mut Client,
        owner: u64,
        along: Option<&Along>,
        times: &mut Times,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let begun = Instant::now();
        client.hold_vm(name, owner, true)?;
        let mapped = self.await_drained(client)?;
        if mapped > 0 && !self.force {
            let text = format!(
                "applications in the guest still map {} KiB of its memory after {} s (one that does not read what \
                 waits for it, or a back-end's): end them, or --force{}",
                mapped >> 10,
                self.timeout.as_secs_f32(),
                match along {
                    Some(_) => "",
                    None => ", by which the kernel kills them",
                }
            );
            return Err(Failure::about(name, text));
        }
        times.drained = begun.elapsed();
        let begun = Instant::now();
        let present = parts::present(qemu)?;
        let here: Vec<Part> = parts::all_parts(name)
            .into_iter()
            .filter(|part| present.contains(&part.id))
            .filter(|part| along.is_none() || !part.goes_along())
            .collect();
        let left = parts::remove(qemu, &here, self.timeout)?;
        if !left.is_empty() {
            return Err(Failure::with_code(
                PENDING,
                format!("{name}: {}", pending(&left)),
            ));
        }
        // A name that is still there would be part of the stream, and the other QEMU does not know it.
        let stale = blocks::wait_until_gone(qemu, &here.iter().collect::<Vec<_>>(), QMP_LIMIT)?;
        if !stale.is_empty() {
            let text = format!("QEMU does not let go of {}", stale.join(", "));
            return Err(Failure::about(name, text));
        }
        times.unplugged = begun.elapsed();
        Ok(())
    }

    /// Waits until no application maps memory; how much they do at the end.
    fn await_drained(&self, client: &mut Client) -> Result<u64, Failure> {
        let deadline = Instant::now() + self.timeout;
        loop {
            let counters = client.stats()?;
            let vm = counters
                .iter()
                .find(|it| it.kind == "vm" && it.name == self.vm.name);
            let mapped = vm.map_or(0, |vm| {
                let all = value(vm, "pool_bytes").saturating_sub(FIRST_RING);
                all.saturating_sub(value(vm, "pool_free"))
            });
            if mapped == 0 || Instant::now() >= deadline {
                return Ok(mapped);
            }
            if sys::stop().is_some() {
                return Err(Failure::about(&self.vm.name, "stopped by a signal"));
            }
            std::thread::sleep(TURN);
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

    /// Attaches the machine here again, if it is here; true if something was to be done.
    fn undo(
        &self,
        carrier: &mut dyn Carrier,
        connect: Connect<'_>,
        owner: u64,
    ) -> Result<bool, Failure> {
        let name = &self.vm.name;
        // NB: first. While QEMU may send the machine nobody may write what it sends.
        self.stays_here(carrier)?;
        let qemu = carrier.monitor();
        let ready = match connect()?.hold_vm(name, owner, false) {
            Ok(ready) => ready,
            Err(vnplug::Error::Refused { code, .. }) if code == code::NOT_FOUND => {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        let parts = parts::parts(name, false, ready.arenas.len());
        let present = parts::present(qemu)?;
        let missing: Vec<&Part> = parts
            .iter()
            .filter(|part| !present.contains(&part.id))
            .collect();
        self.plug_again(qemu, &missing, &ready)?;
        Ok(true)
    }

    /// Waits until it is said that the machine is here and stays here.
    fn stays_here(&self, carrier: &mut dyn Carrier) -> Result<(), Failure> {
        let until = Instant::now() + CANCEL_LIMIT;
        let mut is_told = false;
        loop {
            let what = match carrier.standing()? {
                (Standing::Here, _) => return Ok(()),
                (Standing::Gone, _) => "the machine is at the target",
                (Standing::Moving, _) if Instant::now() < until => {
                    if !is_told {
                        carrier.cancel()?;
                        is_told = true;
                    }
                    std::thread::sleep(TURN);
                    continue;
                }
                (Standing::Moving, _) => "QEMU goes on sending the machine",
            };
            return Err(Failure::about(
                &self.vm.name,
                format!("{what}; it stays held"),
            ));
        }
    }

    fn plug_again(
        &self,
        qemu: &mut dyn Monitor,
        missing: &[&Part],
        ready: &VmReady,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let pci = missing.iter().filter(|part| part.kind == Kind::Pci).count();
        let places =
            slots::choose(qemu, &[], pci)?.map_err(|no_room| Failure::about(name, no_room))?;
        let mut places = places.into_iter();
        for part in missing {
            let place = match part.kind {
                Kind::Pci => places.next().unwrap_or_default(),
                _ => slots::DeviceAddress::default(),
            };
            part.add(qemu, name, ready, 0, &place)?;
        }
        Ok(())
    }

    /// Ends a move that failed: the machine is attached where it runs.
    fn give_up(
        &self,
        carrier: &mut dyn Carrier,
        connect: Connect<'_>,
        owner: u64,
        target: Option<Target>,
        failure: Failure,
    ) -> Failure {
        // First what the machine needs; the target may be out of reach.
        let undone = self.undo(carrier, connect, owner);
        // Where it is not known that the machine stays here it may still come there.
        if undone.is_ok()
            && let Some(target) = target
        {
            target.cancel();
        }
        match undone {
            Ok(false) => failure,
            Ok(true) => {
                let text = format!("{}; it is attached here as before", failure.line());
                Failure::with_code(failure.code(), text)
            }
            Err(other) => self.both(&failure, &other),
        }
    }

    /// It failed, and so did the way back.
    fn both(&self, first: &Failure, second: &Failure) -> Failure {
        let text = format!(
            "{}; attaching it here again failed, too: {}; run the same command again, or `vnplug attach qemu`",
            first.line(),
            second.line()
        );
        Failure::about(&self.vm.name, text)
    }

    /// The machine runs there, and is not attached.
    fn stranded(&self, failure: &Failure) -> Failure {
        let text = format!(
            "the machine runs at the target and is not attached there: {}; run the same command again",
            failure.line()
        );
        Failure::about(&self.vm.name, text)
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
/// How long QEMU may go on sending a machine when it was told not to.
const CANCEL_LIMIT: Duration = Duration::from_secs(20);
const ATTACHED_LIMIT: Duration = Duration::from_secs(60);
/// Between looks at the daemon and at QEMU.
const TURN: Duration = Duration::from_millis(10);

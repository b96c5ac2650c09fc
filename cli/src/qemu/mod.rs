//! Plugs a daemon's memory pool and control channel into a running QEMU, and out again.
//!
//! The VM is running: nothing here needs a reboot or a change of its definition (a q35 machine needs
//! free PCIe ports, see [`slots`]). An attach that fails takes back what it did; one that was
//! interrupted is completed by running it again.

mod access;
mod blocks;
mod grow;
mod incoming;
mod lines;
mod migrate;
mod monitor;
mod nic;
mod parts;
mod pmem;
mod push;
mod qmp;
mod slots;
mod target;
mod virsh;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde_json::json;
use vnplug::Client;
use vnplug_ring::control::{HOST_PREFIX, HostGroup, VmKind, VmReady, VmSpec};
use vnplug_ring::pmem::FRONT;

use self::access::Owner;
pub(crate) use self::migrate::Migrate;
use self::migrate::Standing;
use self::monitor::{Monitor, MonitorError};
use self::parts::{Kind, Left, Part};
pub(crate) use self::pmem::MORE_MEMORY;
use self::pmem::Memory;
use self::push::Push;
use self::qmp::Qmp;
use self::slots::DeviceAddress;
pub(crate) use self::slots::{MORE_PORTS, PORT_TYPES};
use self::virsh::Virsh;
use crate::entrances::{Entrances, NicSpec, Via};
use crate::failure::{Failure, OK, Outcome, PENDING};
use crate::{attach, out, text};

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

/// Attaches a running QEMU virtual machine.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug attach qemu --name probe --qmp /run/probe.qmp --allow eth1
  vnplug attach qemu --name probe --qmp /run/probe.qmp --pool 256M --doorbell 8
  vnplug attach qemu --name q35 --qmp /run/q35.qmp --bus rp3 --bus rp4
  vnplug attach qemu --name secure --qmp /run/secure.qmp --allow eth1 --memory pmem
  vnplug attach qemu --name probe --libvirt probe --allow eth1
  vnplug attach qemu --name ids1 --qmp /run/ids1.qmp --allow eth1 --group ids=eth1,64M
  vnplug attach qemu --name ids2 --qmp /run/ids2.qmp --allow eth1 --group ids=eth1
  vnplug attach qemu --name web --qmp /run/web.qmp --nic lan0
  vnplug attach qemu --name mobile --qmp /run/mobile.qmp --allow eth1 --movable
  vnplug attach qemu --name many --qmp /run/many.qmp --allow eth1 --grow 256M --apart

QEMU needs a monitor socket of its own for --qmp: -qmp unix:/run/probe.qmp,server=on,wait=off
A q35 machine needs two free pcie-root-ports (one more with --doorbell, and for each --group).
The VMs of a --group read one copy of each packet, from memory that none of them can write. Each of
them can read whatever any of them asks for; hence all need the same --allow of that source. The
first one says how large each queue's arena is. In the guests: `vnplug count host:eth1 --group ids`.
Of an af_xdp source with arena=vm the memory is what its frames are received into, without a copy: the
VMs see all of them, asked for or not. With a filter in --allow, or a size, a group has copies.
A doorbell serves until the daemon is restarted; then readers are woken over the control channel
until the VM is detached and attached again. Without KVM keep it plugged: QEMU (7.2 at least) does
not forget its descriptors when it is unplugged and may crash later.
If QEMU runs as another user, that user gets access to the pool file and the sockets (an ACL).
In the guest, run `vnplug agent`, or have QEMU's guest agent install it there: --guest-agent /run/probe.qga
--nic alone plugs interfaces and nothing else, and needs no agent. Of the ways into the switch that this
QEMU can take it takes the best, and says which and why. The guest needs a driver (virtio_net), the machine
a free place for each (on q35: a pcie-root-port).")]
pub(crate) struct Attach {
    #[command(flatten)]
    monitor: MonitorArgs,
    #[command(flatten)]
    vm: attach::VmArgs,
    /// What the pool is in the guest
    #[arg(long, value_enum, default_value_t)]
    memory: Memory,
    /// Also plug an interrupt doorbell with N vectors; the guest needs an IOMMU (intel-iommu)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
    doorbell: u32,
    /// Let the VM join a group of the host: its members, in several VMs, read one copy of each packet of
    /// SOURCE, and all that any of them asks for; may be repeated
    #[arg(long = "group", value_name = "NAME=SOURCE[,SIZE]", value_parser = host_group)]
    groups: Vec<HostGroup>,
    /// Plug a network interface whose cable ends in a switch of the daemon: by vhost, stream, dgram or vde,
    /// whatever is best; may be repeated
    #[arg(
        long = "nic",
        value_name = "SWITCH[,mac=ADDRESS][,model=DRIVER][,via=WAY]"
    )]
    nics: Vec<NicSpec>,
    /// Stay, and plug more memory into the running VM, for back-ends and for ports that do not fit its pool, up
    /// to SIZE in all: until the VM is detached or this ends. Holds the monitor (not with --libvirt)
    #[arg(long, value_name = "SIZE", value_parser = text::size, conflicts_with_all = ["libvirt", "nics"])]
    grow: Option<u64>,
    /// Give each port memory of its own, and none in the pool: programs of the guest's other users cannot map it
    #[arg(long, requires = "grow")]
    apart: bool,
    /// This QEMU waits for a machine (-incoming): prepare everything, and plug when the machine is here. Part of
    /// `vnplug migrate`; `cancel` on standard input ends the wait
    #[arg(long, conflicts_with_all = ["libvirt", "nics", "grow", "doorbell"])]
    incoming: bool,
    /// With --incoming: the machine is here already, or on its way
    #[arg(long, requires = "incoming", hide = true)]
    come: bool,
    /// With --incoming: a source that the machine's applications read, to be refused where it is not to be seen
    #[arg(long, value_name = "SOURCE", requires = "incoming", hide = true)]
    needs: Vec<String>,
    /// `vnplug migrate` moves the machine with its memory and its channel in it, which then are plugged all the
    /// time. QEMU sends the pool with the machine's own memory. Not with what QEMU cannot send
    #[arg(long, conflicts_with_all = ["libvirt", "grow", "doorbell"])]
    movable: bool,
    /// With --incoming --movable: where the pool, then the channel, are in the machine that comes
    #[arg(long = "place", value_name = "BUS,SLOT", requires = "incoming", hide = true, value_parser = slots::parse)]
    places: Vec<DeviceAddress>,
    /// PCI bus or free PCIe port to plug into; once per device, in order. Default: found automatically
    #[arg(long = "bus", value_name = "ID")]
    buses: Vec<String>,
    /// User that QEMU runs as (NAME, UID or UID:GID), where it is not found automatically
    #[arg(long, value_name = "USER", value_parser = access::parse_owner)]
    qemu_user: Option<Owner>,
    #[command(flatten)]
    push: Push,
}

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
    monitor: MonitorArgs,
    /// The name it was attached under
    #[arg(long, value_parser = attach::vm_name)]
    name: String,
    /// Unplug the network interface on this switch only, or all of them, and nothing else
    #[arg(long, value_name = "SWITCH", num_args = 0..=1, default_missing_value = "")]
    nic: Option<String>,
    /// If QEMU has ended, have the daemon forget the VM
    #[arg(long, conflicts_with = "nic")]
    gone: bool,
    /// How long to wait for the guest to let go of the devices
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = text::duration)]
    timeout: Duration,
}

impl MonitorArgs {
    fn open(&self) -> Result<Box<dyn Monitor>, MonitorError> {
        if let Some(domain) = &self.libvirt {
            let virsh = Virsh::open(domain, self.connect.as_deref(), VIRSH_LIMIT)?;
            return Ok(Box::new(virsh));
        }
        // clap insists on one of the two.
        let socket = self.qmp.as_deref().unwrap_or(Path::new(""));
        Ok(Box::new(Qmp::connect(socket, QMP_LIMIT)?))
    }
}

impl Attach {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        self.check_memory()?;
        let program = self.push.prepare(&self.monitor)?;
        let mut monitor = self.monitor.open()?;
        if self.incoming {
            return self.attach_incoming(monitor.as_mut(), &connect);
        }
        if let Some(most) = self.grow {
            return self.attach_and_grow(monitor.as_mut(), most, &connect);
        }
        let asks_for_pool = self.doorbell > 0
            || self.vm.pool > 0
            || self.memory == Memory::Pmem
            || !self.vm.allow.is_empty()
            || !self.groups.is_empty();
        let mut buses = &self.buses[..];
        if self.nics.is_empty() || asks_for_pool {
            // A conventional bus holds everything; ports are used up.
            let own = match (self.nics.is_empty(), buses) {
                (true, _) | (_, [] | [_]) => buses,
                (false, _) => {
                    buses
                        .split_at(buses.len().saturating_sub(self.nics.len()))
                        .0
                }
            };
            self.attach_pool(monitor.as_mut(), own, connect()?)?;
            if own.len() < buses.len() {
                buses = &buses[own.len()..];
            }
        }
        if !self.nics.is_empty() {
            self.attach_nics(monitor.as_mut(), buses, &mut connect()?)?;
        }
        if let Some(program) = program {
            // QEMU is free for others meanwhile.
            drop(monitor);
            self.push.run(&program, &self.vm.name, &self.monitor)?;
        }
        Ok(OK)
    }

    /// Refuses what does not go with the kind of memory.
    fn check_memory(&self) -> Result<(), Failure> {
        let others = [
            ("--doorbell", self.doorbell > 0),
            ("--group", !self.groups.is_empty()),
            ("--grow", self.grow.is_some()),
            ("--incoming", self.incoming),
            (
                "--movable: QEMU moves a virtio-pmem device without what is in it",
                self.movable,
            ),
        ];
        match others.iter().find(|(_, is_given)| *is_given) {
            Some((other, _)) if self.memory == Memory::Pmem => {
                let text = format!("--memory pmem does not go with {other}; nothing was changed");
                Err(Failure::about(&self.vm.name, text))
            }
            _ => Ok(()),
        }
    }

    /// The pieces of this VM, in a QEMU that has these.
    fn parts(&self, present: &[String]) -> Vec<Part> {
        let name = &self.vm.name;
        match self.memory {
            Memory::Ivshmem => {
                let parts = parts::parts(name, self.doorbell > 0, self.groups.len());
                match self.movable {
                    true => parts::movable(parts),
                    false => parts,
                }
            }
            Memory::Pmem => pmem::parts(name, present),
        }
    }

    /// Plugs the interfaces that are not there yet.
    fn attach_nics(
        &self,
        monitor: &mut dyn Monitor,
        buses: &[String],
        client: &mut Client,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let there = nic::plugged(monitor, name)?;
        let (done, missing): (Vec<_>, Vec<_>) = self
            .nics
            .iter()
            .partition(|spec| there.contains(&spec.switch));
        for spec in done {
            out::line(&format!(
                "{name}: has an interface on {} already, nothing to do",
                spec.switch
            ))?;
        }
        let places = slots::choose(monitor, buses, missing.len())?
            .map_err(|no_room| Failure::about(name, no_room))?;
        let owner = match self.qemu_user {
            Some(owner) => Some(owner),
            None => monitor.qemu_user()?,
        };
        for (spec, place) in missing.into_iter().zip(places) {
            let entrances = Entrances::of(client, &spec.switch)?;
            let choice = nic::choose(monitor, &entrances, spec.via, owner)?;
            out::line(&nic::plug(monitor, name, spec, &choice, owner, &place)?)?;
        }
        Ok(())
    }

    /// Attaches; the connection by which that was done.
    fn attach_pool(
        &self,
        monitor: &mut dyn Monitor,
        buses: &[String],
        mut client: Client,
    ) -> Result<Client, Failure> {
        let name = &self.vm.name;
        if !self.incoming && migrate::standing(monitor)?.0 == Standing::Moving {
            // Its ports are closed, and the daemon would open them.
            let text = "is on its way to another QEMU: run `vnplug migrate` again, or wait";
            return Err(Failure::about(name, text));
        }
        let mut present = parts::present(monitor)?;
        if let Some(other) = pmem::other_kind(name, self.memory, &present) {
            return Err(Failure::about(name, other));
        }
        let mut parts = self.parts(&present);
        if !is_prefix(&parts, &present) {
            out::note(&format!("{name}: finishing an earlier detach first"));
            (present, parts) = self.clear(monitor)?;
        }
        let is_plugged = present.contains(&format!("vnplug-{name}-shm"));
        if self.movable && is_plugged && !parts::is_movable(monitor, name, &present)? {
            let text = "is attached without --movable: run `vnplug detach qemu` first";
            return Err(Failure::about(name, text));
        }
        let (mut missing, mut places) = self.missing(monitor, buses, &parts, &present)?;

        let owner = access::identity(monitor)?;
        let ready = client.attach_vm(self.spec(owner))?;
        if ready.arenas.len() != self.groups.len() {
            let text = "the daemon is too old for --group: update it";
            return Err(Failure::about(name, text));
        }
        if let Some(most) = self.grow {
            // Before the guest can see its pool: where a port lies is settled when it is opened.
            client.offer_growth(name, most, self.apart)?;
        }
        if self.has_lost_memory(monitor, &parts, &present, &ready)? {
            out::note(&format!(
                "{name}: the memory that is plugged was given up: it is unplugged, and plugged anew"
            ));
            (present, parts) = self.clear(monitor)?;
            (missing, places) = self.missing(monitor, buses, &parts, &present)?;
        }
        if missing.is_empty() {
            let text = match self.incoming {
                true => self.summary(&ready, false),
                false => format!("{name}: is attached already, nothing to do"),
            };
            out::line(&text)?;
            return Ok(client);
        }
        let all: Vec<&Part> = missing.iter().collect();
        if let Err(failure) = self.plug(monitor, &all, &ready, places) {
            if missing.len() == parts.len() {
                // Nothing of this VM was here before, so the daemon need not know it either.
                client.detach_own_vm(name, owner).unwrap_or_else(|error| {
                    out::note(&format!("{name}: the daemon did not forget it: {error}"));
                });
            }
            return Err(failure);
        }
        out::line(&self.summary(&ready, missing.len() < parts.len()))?;
        let is_own = |id: &String| parts.iter().any(|part| part.id == *id);
        let mut earlier = pmem::devices(name, &present);
        earlier.retain(|id| !is_own(id));
        if !earlier.is_empty() {
            out::note(&format!(
                "{name}: of an earlier attach {}",
                pmem::stay(&earlier)
            ));
        }
        // NB: hw/misc/ivshmem.c closes the vectors' eventfds and leaves its handlers on their
        // numbers; with KVM's irqfd it has none. Two crashes seen after detach and attach.
        if self.doorbell > 0 && !has_kvm(monitor) {
            out::note(&format!(
                "{name}: this QEMU runs without KVM and may crash after the doorbell is unplugged"
            ));
        }
        Ok(client)
    }

    /// Takes everything of this VM out of QEMU that can go; what is there then, and the pieces in a QEMU that has it.
    fn clear(&self, monitor: &mut dyn Monitor) -> Result<(Vec<String>, Vec<Part>), Failure> {
        let name = &self.vm.name;
        let left = parts::remove(monitor, &parts::all_parts(name), QMP_LIMIT)?;
        if !left.is_empty() {
            return Err(Failure::about(name, pending(&left)));
        }
        let present = parts::present(monitor)?;
        let parts = self.parts(&present);
        Ok((present, parts))
    }

    /// The pieces that are missing, and where devices among them may go.
    fn missing(
        &self,
        monitor: &mut dyn Monitor,
        buses: &[String],
        parts: &[Part],
        present: &[String],
    ) -> Result<(Vec<Part>, Vec<DeviceAddress>), Failure> {
        let name = &self.vm.name;
        let missing: Vec<&Part> = parts.iter().filter(|p| !present.contains(&p.id)).collect();
        let pci = missing.iter().filter(|part| part.kind == Kind::Pci).count();
        let places =
            slots::choose(monitor, buses, pci)?.map_err(|no_room| Failure::about(name, no_room))?;
        let stale = blocks::wait_until_gone(monitor, &missing, QMP_LIMIT)?;
        if !stale.is_empty() {
            let text = format!(
                "QEMU has memory by these names: {}; it is of devices that were unplugged a moment ago, or \
                 somebody else's, and QEMU may abort when the names come again. Nothing was changed; run \
                 the command again",
                stale.join(", ")
            );
            return Err(Failure::about(name, text));
        }
        Ok((missing.into_iter().cloned().collect(), places))
    }

    /// Whether memory that is plugged is of a file that is no more: the daemon forgot the VM meanwhile, for its guest
    /// did not let go, or the machine came here after its move was given up.
    ///
    /// # Errors
    /// [`Failure`] if it is of another file that is there, which another daemon may serve; or cannot be unplugged.
    fn has_lost_memory(
        &self,
        monitor: &mut dyn Monitor,
        parts: &[Part],
        present: &[String],
        ready: &VmReady,
    ) -> Result<bool, Failure> {
        let arenas = ready.arenas.iter().map(|(path, len)| (path.as_str(), *len));
        let memory = std::iter::once((ready.pool_path.as_str(), ready.pool_len)).chain(arenas);
        let objects = parts.iter().filter(|part| part.kind == Kind::Object);
        let mut is_lost = false;
        for (part, (path, len)) in objects.zip(memory) {
            if !present.contains(&part.id) {
                continue;
            }
            let (its_path, its_len) = memory_of(monitor, part)?;
            if its_path == path && its_len == len {
                continue;
            }
            let is_gone = matches!(Path::new(&its_path).try_exists(), Ok(false));
            if !is_gone || self.memory == Memory::Pmem {
                return Err(Failure::new(format!(
                    "this QEMU has the memory {its_path} ({its_len} bytes), the daemon now has {path} ({len} bytes); \
                     run `vnplug detach qemu` first, then attach again"
                )));
            }
            is_lost = true;
        }
        Ok(is_lost)
    }

    /// What the daemon is told of this machine.
    fn spec(&self, owner: u64) -> VmSpec {
        VmSpec {
            name: self.vm.name.clone(),
            kind: match self.memory {
                Memory::Ivshmem => VmKind::Qemu,
                Memory::Pmem => VmKind::QemuPmem,
            },
            pool_bytes: self.vm.pool,
            vectors: self.doorbell,
            allow: self.vm.allow.clone(),
            owner,
            groups: self.groups.clone(),
        }
    }

    /// Adds the missing parts, or none of them.
    fn plug(
        &self,
        monitor: &mut dyn Monitor,
        missing: &[&Part],
        ready: &VmReady,
        places: Vec<DeviceAddress>,
    ) -> Result<(), Failure> {
        let name = &self.vm.name;
        let owner = match self.qemu_user {
            Some(owner) => Some(owner),
            None => monitor.qemu_user()?,
        };
        if let Some(owner) = owner {
            access::hand_over(ready, owner)?;
        }
        let mut places = places.into_iter();
        let mut done: Vec<Part> = Vec::new();
        for part in missing {
            let place = match part.kind {
                Kind::Pci => places.next().unwrap_or_default(),
                _ => DeviceAddress::default(),
            };
            let added = part.add(monitor, name, ready, self.doorbell, &place);
            // Without an answer it may be there; removing what is not there is harmless.
            if !matches!(added, Err(MonitorError::Refused { .. })) {
                done.push((*part).clone());
            }
            if let Err(error) = added {
                let advice = advice(&error);
                let stays = done.iter().find(|part| part.is_pmem()).cloned();
                if stays.is_some() {
                    done.retain(|part| !part.is_pmem() && part.kind != Kind::Object);
                }
                let rolled_back = match parts::remove(monitor, &done, QMP_LIMIT) {
                    Ok(left) if left.is_empty() => match stays {
                        Some(device) => pmem::stay(&[device.id]),
                        None => "nothing was changed".to_owned(),
                    },
                    Ok(left) => pending(&left),
                    Err(error) => format!("taking back what was done failed too: {error}"),
                };
                let part = &part.id;
                let text = format!("{name}: {part}: {error}{advice}; {rolled_back}");
                return Err(Failure::new(text));
            }
        }
        Ok(())
    }

    fn summary(&self, ready: &VmReady, repaired: bool) -> String {
        let how = if repaired {
            "attached (completed an interrupted attach)"
        } else {
            "attached"
        };
        let doorbell = match self.doorbell {
            0 => String::new(),
            vectors => format!(", doorbell with {vectors} vectors"),
        };
        let arenas = ready.arenas.iter().zip(&self.groups);
        let groups: String = arenas
            .map(|((path, len), group)| {
                let what = match path.ends_with(".umem") {
                    true => format!(", packet memory of {}", group.source),
                    false => String::new(),
                };
                format!(", group {} ({} MiB{what})", group.name, len >> 20)
            })
            .collect();
        let (front, pmem) = match self.memory {
            Memory::Ivshmem => (0, ""),
            Memory::Pmem => (
                FRONT,
                ", as virtio-pmem, which stays until the machine ends",
            ),
        };
        format!(
            "{}: {how}: pool of {} MiB ({}){pmem}{doorbell}{groups}; run `vnplug agent` in the guest",
            self.vm.name,
            ready.pool_len.saturating_sub(front) >> 20,
            ready.pool_path,
        )
    }
}

impl Detach {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let name = &self.name;
        let mut monitor = match self.monitor.open() {
            Err(MonitorError::Connect(..)) if self.gone => {
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

/// How many devices `--grow` plugged.
fn numbers_grown(name: &str, present: &[String]) -> usize {
    grow::numbers(name, present).len()
}

/// True if this QEMU runs its guest by KVM; false if it does not say so.
fn has_kvm(monitor: &mut dyn Monitor) -> bool {
    monitor
        .execute("query-kvm", json!({}))
        .is_ok_and(|answer| answer["enabled"] == true)
}

/// True if the parts that are present are the first ones.
fn is_prefix(parts: &[Part], present: &[String]) -> bool {
    let mut here = parts.iter().map(|part| present.contains(&part.id));
    here.by_ref().find(|here| !here);
    !here.any(|here| here)
}

/// The file of a piece of memory, as QEMU was told, and its length. The daemon gives no two files the same name.
fn memory_of(monitor: &mut dyn Monitor, memory: &Part) -> Result<(String, u64), MonitorError> {
    let mut get = |property| {
        let path = format!("/objects/{}", memory.id);
        monitor.execute("qom-get", json!({"path": path, "property": property}))
    };
    let (path, size) = (get("mem-path")?, get("size")?);
    let path = path.as_str().unwrap_or_default().to_owned();
    Ok((path, size.as_u64().unwrap_or_default()))
}

fn pending(left: &Left) -> String {
    let mut text = format!(
        "the guest has not let go of {} (its system must run and support PCI hot-plug: ACPI or \
         pciehp)",
        left.devices.join(", ")
    );
    if !left.held.is_empty() {
        text += &format!("; {} stay with them", left.held.join(", "));
    }
    text + "; run `vnplug detach qemu` again later, or reset the guest"
}

fn advice(error: &MonitorError) -> String {
    let MonitorError::Refused { text, .. } = error else {
        return String::new();
    };
    let no_memory = [
        "memory devices",
        "address space for memory device",
        "maxmem",
    ];
    if no_memory.iter().any(|part| text.contains(part)) {
        // NB: "not enough space, currently … in use of total space for memory devices".
        return format!(
            "; the machine has no room for its memory: give it more at its next start, {MORE_MEMORY}. Devices \
             of earlier attaches count until then"
        );
    }
    known_advice(text).to_owned()
}

fn known_advice(text: &str) -> &'static str {
    let has = |part| text.contains(part);
    if has("no slot/function available") {
        "; all PCI slots are taken, unplug a device or give --bus a bridge with room"
    } else if has("does not support hotplug") {
        "; give --bus a bus or port that does"
    } else if has("Permission denied") {
        "; QEMU may not open it: see --qemu-user, the permissions of the directories above, and \
         AppArmor or SELinux profiles; under libvirt, start the VM after its directory is mounted"
    } else if has("backing store") && has("No such file") {
        "; QEMU does not see it: libvirt gives each VM a /dev of its own, with what was mounted \
         under /dev when the VM started; a pool directory must be a mount of its own by then"
    } else if has("not a valid device model name") {
        "; this QEMU was built without it, install the full QEMU package"
    } else {
        ""
    }
}

fn host_group(text: &str) -> Result<HostGroup, String> {
    let wrong = || "write NAME=SOURCE or NAME=SOURCE,SIZE, for example ids=eth1,64M".to_owned();
    let (name, rest) = text.split_once('=').ok_or_else(wrong)?;
    let (source, size) = rest.split_once(',').unwrap_or((rest, "0"));
    let source = source.strip_prefix(HOST_PREFIX).unwrap_or(source);
    if source.is_empty() {
        return Err(wrong());
    }
    Ok(HostGroup {
        name: attach::vm_name(name)?,
        source: source.to_owned(),
        arena_bytes: text::size(size)?,
    })
}

const QMP_LIMIT: Duration = Duration::from_secs(5);
/// More, for virsh may have to wait until libvirt's daemon has started.
const VIRSH_LIMIT: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupted_attach_is_told_from_an_unanswered_detach() {
        let all = parts::parts("a", false, 1);
        let ids = |suffixes: &[&str]| -> Vec<String> {
            suffixes.iter().map(|s| format!("vnplug-a-{s}")).collect()
        };
        for attach in [
            &[][..],
            &["mem"],
            &["mem", "chr", "shm"],
            &["mem", "chr", "shm", "ser", "port"],
            &["mem", "chr", "shm", "ser", "port", "mem0"],
        ] {
            assert!(is_prefix(&all, &ids(attach)), "{attach:?}");
        }
        for detach in [
            &["mem", "shm", "ser"][..],
            &["mem", "mem0", "shm0"],
            &["mem", "shm"],
            &["chr"],
        ] {
            assert!(!is_prefix(&all, &ids(detach)), "{detach:?}");
        }
    }

    #[test]
    fn a_group_is_a_name_a_source_and_perhaps_a_size() {
        let make = |source: &str, arena_bytes| HostGroup {
            name: "ids".into(),
            source: source.into(),
            arena_bytes,
        };
        assert_eq!(host_group("ids=eth1"), Ok(make("eth1", 0)));
        assert_eq!(host_group("ids=host:eth1,64M"), Ok(make("eth1", 64 << 20)));
        for bad in ["ids", "ids=", "=eth1", "a/b=eth1", "ids=eth1,big"] {
            assert!(host_group(bad).is_err(), "{bad}");
        }
    }
}

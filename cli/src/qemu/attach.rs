//! `vnplug attach qemu`: its options, and what is plugged in which order.

use std::time::Duration;

use clap::Args;
use vnplug::Client;
use vnplug_ring::control::{HOST_PREFIX, HostGroup};

use super::access::{self, Owner};
use super::choice::Wanted;
use super::monitor::Monitor;
use super::parts::{self, Part};
use super::pmem::{self, Memory};
use super::push::Push;
use super::slots::{self, DeviceAddress};
use super::{MonitorArgs, nic};
use crate::entrances::{Entrances, NicSpec};
use crate::failure::{Failure, OK, Outcome};
use crate::{attach, out, text};

/// Attaches a running QEMU virtual machine.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug attach qemu --name probe --qmp /run/probe.qmp --allow eth1
  vnplug attach qemu --name probe --qmp /run/probe.qmp --pool 256M --doorbell 8
  vnplug attach qemu --name q35 --qmp /run/q35.qmp --bus rp3 --bus rp4
  vnplug attach qemu --name secure --qmp /run/secure.qmp --allow eth1 --memory pmem
  vnplug attach qemu --name booting --libvirt booting --allow eth1 --wait 5m
  vnplug attach qemu --name probe --libvirt probe --allow eth1
  vnplug attach qemu --name probe --libvirt probe --allow eth1 --permanent
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
Without --memory a guest gets what its kernel may map: a locked-down one (Secure Boot) a virtio-pmem device, every
other one an ivshmem device. Who knows it is QEMU's guest agent (--guest-agent, or libvirt's), or else `vnplug
agent` in the guest, for which --wait is; run this again if it was started later.
If QEMU runs as another user, that user gets access to the pool file and the sockets (an ACL).
In the guest, run `vnplug agent`, or have QEMU's guest agent install it there: --guest-agent /run/probe.qga
--nic alone plugs interfaces and nothing else, and needs no agent. Of the ways into the switch that this
QEMU can take it takes the best, and says which and why. The guest needs a driver (virtio_net), the machine
a free place for each (on q35: a pcie-root-port).")]
pub(crate) struct Attach {
    #[command(flatten)]
    pub(super) monitor: MonitorArgs,
    #[command(flatten)]
    pub(super) vm: attach::VmArgs,
    /// What the pool is in the guest
    #[arg(long = "memory", value_name = "KIND", value_enum, default_value_t)]
    pub(super) wanted: Wanted,
    /// What it is, when that is settled.
    #[arg(skip)]
    pub(super) memory: Memory,
    /// How long to wait for the agent in the guest, where `--memory auto` needs its word. 0s: not at all
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = text::duration)]
    pub(super) wait: Duration,
    /// Also plug an interrupt doorbell with N vectors; the guest needs an IOMMU (intel-iommu)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub(super) doorbell: u32,
    /// Let the VM join a group of the host: its members, in several VMs, read one copy of each packet of
    /// SOURCE, and all that any of them asks for; may be repeated
    #[arg(long = "group", value_name = "NAME=SOURCE[,SIZE]", value_parser = host_group)]
    pub(super) groups: Vec<HostGroup>,
    /// Plug a network interface whose cable ends in a switch of the daemon: by vhost, stream, dgram or vde,
    /// whatever is best; may be repeated
    #[arg(
        long = "nic",
        value_name = "SWITCH[,mac=ADDRESS][,model=DRIVER][,via=WAY]"
    )]
    pub(super) nics: Vec<NicSpec>,
    /// Stay, and plug more memory into the running VM, for back-ends and for ports that do not fit its pool, up
    /// to SIZE in all: until the VM is detached or this ends. Holds the monitor (not with --libvirt)
    #[arg(long, value_name = "SIZE", value_parser = text::size, conflicts_with_all = ["libvirt", "nics"])]
    pub(super) grow: Option<u64>,
    /// Give each port memory of its own, and none in the pool: programs of the guest's other users cannot map it
    #[arg(long, requires = "grow")]
    pub(super) apart: bool,
    /// This QEMU waits for a machine (-incoming), or the domain is to come to this libvirt: prepare everything, and plug
    /// when the machine is here. Part of `vnplug migrate`; `cancel` on standard input ends the wait
    #[arg(long, conflicts_with_all = ["nics", "grow", "doorbell"])]
    pub(super) incoming: bool,
    /// With --incoming: the machine is here already, or on its way
    #[arg(long, requires = "incoming", hide = true)]
    pub(super) come: bool,
    /// With --incoming: a source that the machine's applications read, to be refused where it is not to be seen
    #[arg(long, value_name = "SOURCE", requires = "incoming", hide = true)]
    pub(super) needs: Vec<String>,
    /// With --incoming: the version of the protocol that the machine's agent speaks
    #[arg(long, value_name = "VERSION", requires = "incoming", hide = true)]
    pub(super) speaks: Option<u8>,
    /// `vnplug migrate` moves the machine with its memory and its channel in it, which then are plugged all the
    /// time. QEMU sends the pool with the machine's own memory. Not with what QEMU cannot send
    #[arg(long, conflicts_with_all = ["libvirt", "grow", "doorbell"])]
    pub(super) movable: bool,
    /// With --incoming --movable: where the pool, then the channel, are in the machine that comes
    #[arg(long = "place", value_name = "BUS,SLOT", requires = "incoming", hide = true, value_parser = slots::parse)]
    pub(super) places: Vec<DeviceAddress>,
    /// Write the devices into the libvirt domain's definition: it has them at each start, until they are detached with
    /// --permanent. A running domain gets them now, too. The pool must be in /dev/shm
    #[arg(long, requires = "libvirt", conflicts_with_all = ["groups", "nics", "grow", "doorbell", "buses", "guest_agent"])]
    pub(super) permanent: bool,
    /// PCI bus or free PCIe port to plug into; once per device, in order. Default: found automatically
    #[arg(long = "bus", value_name = "ID")]
    pub(super) buses: Vec<String>,
    /// User that QEMU runs as (NAME, UID or UID:GID), where it is not found automatically
    #[arg(long, value_name = "USER", value_parser = access::parse_owner)]
    pub(super) qemu_user: Option<Owner>,
    #[command(flatten)]
    pub(super) push: Push,
}

impl Attach {
    pub(crate) fn run(mut self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        self.check_memory()?;
        if self.permanent {
            self.must_map_pci(&connect)?;
            return self.define(connect);
        }
        if self.incoming && self.monitor.libvirt.is_some() {
            return self.attach_arriving(&connect);
        }
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
            || self.wanted == Wanted::Pmem
            || !self.vm.allow.is_empty()
            || !self.groups.is_empty();
        let mut nic_buses = self.buses.clone();
        let mut is_open = false;
        if self.nics.is_empty() || asks_for_pool {
            // A conventional bus holds everything; ports are used up.
            if !self.nics.is_empty() && nic_buses.len() > 1 {
                let own = nic_buses.len().saturating_sub(self.nics.len());
                nic_buses.drain(..own);
                self.buses.truncate(own);
            }
            is_open = self.choose(monitor.as_mut(), &connect)?;
            self.attach_pool(monitor.as_mut(), &self.buses, connect()?)?;
        }
        if !self.nics.is_empty() {
            self.attach_nics(monitor.as_mut(), &nic_buses, &mut connect()?)?;
        }
        // QEMU is free for others meanwhile.
        drop(monitor);
        let pushed = program.map_or(Ok(()), |program| {
            self.push.run(&program, &self.vm.name, &self.monitor)
        });
        // Also without it: an agent that is there may say that its kernel maps nothing of what is plugged.
        if is_open && let Err(unsettled) = self.settle(&connect) {
            if let Err(why) = pushed {
                out::note(&why.line());
            }
            return Err(unsettled);
        }
        pushed.map(|()| OK)
    }

    /// Refuses what does not go with the kind of memory.
    fn check_memory(&self) -> Result<(), Failure> {
        match self.needs_pci() {
            Some(other) if self.wanted == Wanted::Pmem => {
                let text = format!("--memory pmem does not go with {other}; nothing was changed");
                Err(Failure::about(&self.vm.name, text))
            }
            _ => Ok(()),
        }
    }

    /// What was asked for that only an ivshmem device does.
    pub(super) fn needs_pci(&self) -> Option<&'static str> {
        let all = [
            ("--doorbell", self.doorbell > 0),
            ("--group", !self.groups.is_empty()),
            ("--grow", self.grow.is_some()),
            ("--incoming", self.incoming),
            ("--permanent", self.permanent),
            (
                "--movable: QEMU moves a virtio-pmem device without what is in it",
                self.movable,
            ),
        ];
        all.iter()
            .find_map(|(option, is_given)| is_given.then_some(*option))
    }

    /// The pieces of this VM, in a QEMU that has these.
    pub(super) fn parts(&self, present: &[String]) -> Vec<Part> {
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
        let daemon = client.server_user()?;
        for (spec, place) in missing.into_iter().zip(places) {
            let entrances = Entrances::of(client, &spec.switch)?;
            let choice = nic::choose(monitor, &entrances, spec.via, owner)?;
            let owner = owner.map(|owner| (owner, daemon));
            out::line(&nic::plug(monitor, name, spec, &choice, owner, &place)?)?;
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

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

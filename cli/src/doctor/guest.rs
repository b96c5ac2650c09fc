//! Checks of a guest: what `vnplug attach` plugs in, and whether this kernel lets the agent use it.

use vnplug_ring::control::VIRTIO_PORT_NAME;
use vnplug_ring::pmem;

use super::check::{Check, Finding};
use super::machine::Machine;
use crate::qemu::MORE_MEMORY;

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check::new("memory", memory),
        Check::new("channel", channel),
        Check::new("lockdown", lockdown).after("memory"),
        Check::new("doorbell", doorbell).after("memory"),
    ]
}

/// Virtio's device 27.
const VIRTIO_PMEM: &str = "0x105b";
const BUS: &str = "/sys/bus/pci/devices";

/// Whether this guest has the memory or the channel.
pub(super) fn is_plugged(machine: &Machine) -> bool {
    !shared_memories(machine).is_empty()
        || !dax(machine).is_empty()
        || machine.has("/dev/mmapper")
        || port(machine).is_some()
}

/// Character devices of virtio-pmem that a host of ours made.
fn dax(machine: &Machine) -> Vec<String> {
    let dir = "/sys/bus/dax/drivers/device_dax";
    let mut names = machine.names(dir);
    // Beside the device lies its header's number.
    let uuid = |name: &str| machine.read(&format!("{dir}/{name}/../uuid"));
    names.retain(|name| uuid(name).is_ok_and(|uuid| pmem::is_ours(&uuid)));
    names
}

/// PCI devices of shared memory (ivshmem).
fn shared_memories(machine: &Machine) -> Vec<String> {
    pci(machine, "0x1110")
}

/// PCI devices with this number of QEMU's.
fn pci(machine: &Machine, number: &str) -> Vec<String> {
    let word = |slot: &str, name: &str| {
        machine
            .read(&format!("{BUS}/{slot}/{name}"))
            .unwrap_or_default()
    };
    let mut slots = machine.names(BUS);
    slots.retain(|it| word(it, "vendor") == "0x1af4" && word(it, "device") == number);
    slots
}

/// The virtio-serial port that is the channel.
fn port(machine: &Machine) -> Option<String> {
    let dir = "/sys/class/virtio-ports";
    let mut ports = machine.names(dir).into_iter();
    ports.find(|it| {
        machine
            .read(&format!("{dir}/{it}/name"))
            .is_ok_and(|it| it == VIRTIO_PORT_NAME)
    })
}

const ATTACH: &str = "on the host: vnplug attach qemu --name NAME --qmp SOCKET --allow SOURCE   (or --libvirt DOMAIN); if this is a host: vnplug doctor --role host";

fn memory(machine: &Machine) -> Finding {
    if machine.has("/dev/mmapper") {
        return Finding::ok("/dev/mmapper is this guest's shared memory");
    }
    if let [first, ..] = dax(machine).as_slice() {
        return Finding::ok(format!("/dev/{first} is this guest's shared memory"));
    }
    match shared_memories(machine).as_slice() {
        [] if !pci(machine, VIRTIO_PMEM).is_empty() => Finding::fail(
            "a virtio-pmem device is plugged, and the kernel has made no /dev/dax of it",
            "modprobe -a virtio_pmem nd_pmem dax_pmem device_dax   (dmesg says if it refuses the device)",
        ),
        [] => Finding::fail("no shared memory is plugged into this machine", ATTACH),
        slots => Finding::ok(format!("shared memory at {}", slots.join(", "))),
    }
}

fn channel(machine: &Machine) -> Finding {
    if let Some(port) = port(machine) {
        return Finding::ok(format!("the channel is /dev/{port}"));
    }
    let line = machine.read("/proc/cmdline").unwrap_or_default();
    match line
        .split_whitespace()
        .find_map(|it| it.strip_prefix("vnplug="))
    {
        Some(tty) => Finding::ok(format!("the channel is /dev/{tty}")),
        None => Finding::fail("no control channel is plugged into this machine", ATTACH),
    }
}

/// How far the kernel is locked down, if it is: `none` is not.
pub(super) fn locked_down(machine: &Machine) -> Option<String> {
    let modes = machine.read("/sys/kernel/security/lockdown").ok()?;
    let mode = modes.split(['[', ']']).nth(1)?;
    (mode != "none").then(|| mode.to_owned())
}

/// Whether the driver of VFIO has a shared memory.
fn through_vfio(machine: &Machine) -> bool {
    let all = machine.names("/sys/bus/pci/drivers/vfio-pci");
    shared_memories(machine)
        .iter()
        .any(|slot| all.contains(slot))
}

fn lockdown(machine: &Machine) -> Finding {
    match locked_down(machine) {
        None => Finding::ok("the kernel is not locked down"),
        Some(_) if shared_memories(machine).is_empty() || !dax(machine).is_empty() => {
            Finding::ok("locked down, but no PCI memory has to be mapped")
        }
        Some(_) if through_vfio(machine) => Finding::ok(
            "locked down, and vfio-pci has the memory, which is mapped through it, uncached",
        ),
        Some(mode) => Finding::fail(
            format!(
                "the kernel is locked down ({mode}, as with Secure Boot): it refuses to map PCI memory from sysfs"
            ),
            format!(
                "on the host run `vnplug attach qemu` for it again, which plugs what may be mapped (--memory pmem), if it \
                 was started with {MORE_MEMORY}, or with an IOMMU (and here vfio-pci and vfio_iommu_type1); or start it without Secure Boot and without lockdown="
            ),
        ),
    }
}

/// Interrupts instead of the channel wake readers, where there is an IOMMU.
fn doorbell(machine: &Machine) -> Finding {
    match machine.names("/sys/class/iommu").is_empty() {
        true => Finding::ok(
            "no IOMMU: readers are woken through the channel, a doorbell device cannot be used",
        ),
        false => match machine.has("/sys/bus/pci/drivers/vfio-pci") {
            true => Finding::ok("an IOMMU and vfio-pci are there, for a doorbell device"),
            false => Finding::warn(
                "there is an IOMMU and no vfio-pci: a doorbell device is not used",
                "modprobe vfio-pci",
            )
            .fixed_by(|_| super::machine::run("modprobe", &["vfio-pci"])),
        },
    }
}

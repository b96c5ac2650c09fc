//! The pool as a virtio-pmem device, for guests whose kernel is locked down: they may not map a PCI BAR.
//!
//! ```text
//! object   vnplug-NAME-pmem0      memory-backend-file: the header, and the pool
//! chardev  vnplug-NAME-chr        and vnplug-NAME-ser, vnplug-NAME-port: as ever
//! device   vnplug-NAME-pmemdev0   virtio-pmem-pci: the pool in the guest
//! ```
//!
//! QEMU cannot unplug such a device. A detach takes out the rest and leaves it, with memory that was freed; the
//! next attach plugs another one, with the next number. Which of them is in use is told by the channel: it is
//! there only while the last one is.

use std::collections::BTreeSet;

use serde_json::json;

use super::monitor::{Monitor, MonitorError};
use super::parts::{self, Part};

/// What the pool is for the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Memory {
    #[default]
    Ivshmem,
    Pmem,
}

/// What QEMU calls the memory with this number.
pub(super) fn object(vm: &str, number: u32) -> String {
    format!("vnplug-{vm}-pmem{number}")
}

/// What QEMU calls its device.
pub(super) fn device(vm: &str, number: u32) -> String {
    format!("vnplug-{vm}-pmemdev{number}")
}

/// The numbers of the memory, or of the devices, that are there.
fn numbers(vm: &str, present: &[String], id: fn(&str, u32) -> String) -> BTreeSet<u32> {
    let prefix = id(vm, 0);
    let prefix = prefix.trim_end_matches('0');
    let numbers = present.iter().filter_map(|it| it.strip_prefix(prefix));
    numbers.filter_map(|it| it.parse().ok()).collect()
}

/// The devices that are there, in use or left by an earlier detach.
pub(super) fn devices(vm: &str, present: &[String]) -> Vec<String> {
    let numbers = numbers(vm, present, device).into_iter();
    numbers.map(|number| device(vm, number)).collect()
}

/// The pieces of an attach that is to be made or completed.
pub(super) fn parts(vm: &str, present: &[String]) -> Vec<Part> {
    let last = numbers(vm, present, object).last().copied();
    let has_channel = present.contains(&format!("vnplug-{vm}-chr"));
    let number = last.map_or(0, |last| {
        let is_plugged = present.contains(&device(vm, last));
        // Without a channel a plugged one is what a detach left.
        last + u32::from(is_plugged && !has_channel)
    });
    parts::pmem_parts(vm, number)
}

/// Why a VM cannot be attached by this kind of memory: it is attached by the other one.
pub(super) fn other_kind(vm: &str, wanted: Memory, present: &[String]) -> Option<&'static str> {
    let has = |suffix: &str| present.contains(&format!("vnplug-{vm}-{suffix}"));
    match wanted {
        Memory::Pmem if has("mem") || has("shm") => Some(
            "is attached with an ivshmem device: run `vnplug detach qemu` first, then attach with --memory pmem",
        ),
        Memory::Ivshmem
            if has("chr") && !has("mem") && !numbers(vm, present, object).is_empty() =>
        {
            Some(
                "is attached with --memory pmem: say so again, or run `vnplug detach qemu` first. Neither \
                 --grow nor other memory goes with it",
            )
        }
        _ => None,
    }
}

/// Whether the machine was started with room for such devices, as far as QEMU tells.
pub(super) fn has_room(monitor: &mut dyn Monitor) -> Result<bool, MonitorError> {
    // NB: of `pc` and `q35`. The machine's `memory` has no `max-size` (QEMU 7.2).
    let room = json!({"path": "/machine", "property": "device-memory-region-size"});
    match monitor.execute("qom-get", room) {
        Err(MonitorError::Refused { .. }) => Ok(true),
        room => Ok(room?.as_u64() != Some(0)),
    }
}

/// Whether the machine has an IOMMU, by which a guest maps a PCI memory through VFIO.
pub(super) fn has_iommu(monitor: &mut dyn Monitor) -> Result<bool, MonitorError> {
    for path in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let devices = monitor.execute("qom-list", json!({"path": path}))?;
        let devices = devices.as_array().map(Vec::as_slice).unwrap_or_default();
        let types = devices.iter().filter_map(|device| device["type"].as_str());
        if types.into_iter().any(|it| IOMMUS.contains(&it)) {
            return Ok(true);
        }
    }
    Ok(false)
}

const IOMMUS: [&str; 3] = [
    "child<intel-iommu>",
    "child<amd-iommu>",
    "child<virtio-iommu-pci>",
];

/// Memory that no device has: an attach that did not end left it.
pub(super) fn unplugged(vm: &str, present: &[String]) -> Vec<String> {
    let all = numbers(vm, present, object).into_iter();
    let unplugged = all.filter(|&number| !present.contains(&device(vm, number)));
    unplugged.map(|number| object(vm, number)).collect()
}

/// Deletes such memory.
pub(super) fn forget(monitor: &mut dyn Monitor, objects: &[String]) -> Result<(), MonitorError> {
    for object in objects {
        match monitor.execute("object-del", json!({"id": object})) {
            Err(error) if !error.is_not_found() => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// What is said of devices that cannot go.
pub(super) fn stay(devices: &[String]) -> String {
    let (what, stays) = match devices {
        [_] => ("its memory device", "stays"),
        _ => ("its memory devices", "stay"),
    };
    format!(
        "{what} {} {stays}, empty, until the machine ends: QEMU cannot unplug virtio-pmem",
        devices.join(", ")
    )
}

/// How a machine gets room for such a device.
pub(crate) const MORE_MEMORY: &str =
    "`-m SIZE,maxmem=MORE` (in libvirt's XML `<maxMemory slots='1' unit='GiB'>MORE</maxMemory>`)";

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(suffixes: &[&str]) -> Vec<String> {
        let id = |suffix: &&str| format!("vnplug-a-{suffix}");
        suffixes.iter().map(id).collect()
    }

    fn first(present: &[&str]) -> String {
        let parts = parts("a", &ids(present));
        parts[0].id.replace("vnplug-a-", "")
    }

    #[test]
    fn a_detach_leaves_a_device_and_the_next_attach_makes_another() {
        assert_eq!(first(&[]), "pmem0");
        // An attach that was interrupted goes on, and one that is whole is the same one.
        assert_eq!(first(&["pmem0"]), "pmem0");
        assert_eq!(first(&["pmem0", "chr", "ser"]), "pmem0");
        let whole = ["pmem0", "chr", "ser", "port", "pmemdev0"];
        assert_eq!(first(&whole), "pmem0");
        // After a detach.
        assert_eq!(first(&["pmem0", "pmemdev0"]), "pmem1");
        assert_eq!(first(&["pmem0", "pmemdev0", "pmem1", "chr"]), "pmem1");
        assert_eq!(
            first(&["pmem0", "pmemdev0", "pmem10", "pmemdev10"]),
            "pmem11"
        );
        // Another VM's.
        assert_eq!(parts("b", &ids(&whole))[0].id, "vnplug-b-pmem0");
        assert_eq!(devices("a", &ids(&whole)), ["vnplug-a-pmemdev0"]);
        assert!(unplugged("a", &ids(&whole)).is_empty());
        assert_eq!(unplugged("a", &ids(&["pmem0"])), ["vnplug-a-pmem0"]);
    }

    #[test]
    fn the_two_kinds_are_not_mixed() {
        let other = |wanted, present: &[&str]| other_kind("a", wanted, &ids(present)).is_some();
        let pmem = ["pmem0", "chr", "ser", "port", "pmemdev0"];
        let plain = ["mem", "chr", "shm", "ser", "port"];
        assert!(other(Memory::Ivshmem, &pmem) && !other(Memory::Pmem, &pmem));
        assert!(other(Memory::Pmem, &plain) && !other(Memory::Ivshmem, &plain));
        // After a detach either is fine.
        let left = ["pmem0", "pmemdev0"];
        assert!(!other(Memory::Ivshmem, &left) && !other(Memory::Pmem, &left));
        let plain_after = [&left[..], &plain].concat();
        assert!(!other(Memory::Ivshmem, &plain_after));
    }
}

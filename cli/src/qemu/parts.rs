//! The pieces vNPlug puts into a QEMU, how each is made and how they go again.
//!
//! ```text
//! object   vnplug-NAME-mem       memory-backend-file: the pool
//! chardev  vnplug-NAME-chr       socket to the daemon, reconnects by itself
//! chardev  vnplug-NAME-bell-chr  socket to the daemon's ivshmem server      (with a doorbell)
//! device   vnplug-NAME-shm       ivshmem-plain: the pool in the guest
//! device   vnplug-NAME-ser       virtio-serial-pci
//! device   vnplug-NAME-port      virtserialport: the control channel
//! device   vnplug-NAME-bell      ivshmem-doorbell                           (with a doorbell)
//! object   vnplug-NAME-mem0 …    memory-backend-file, readonly: a group's arenas   (with --group)
//! device   vnplug-NAME-shm0 …    ivshmem-plain: they in the guest                  (with --group)
//! ```
//!
//! With `--movable` the pool's device is QEMU's `master=on`: it, its memory and the channel go along when the machine
//! migrates. With `--memory pmem` the first and the fourth are others, and the last ones, see [`super::pmem`].
//!
//! They are made in this order and go in the opposite one. The order tells two accidents apart: an
//! attach that was interrupted leaves the first pieces of the list; a detach whose guest did not
//! answer has removed the chardev and left devices behind it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vnplug_ring::control::{VIRTIO_PORT_NAME, VmReady};

use super::monitor::{Monitor, MonitorError, News};
use super::pmem;
use super::slots::DeviceAddress;

/// What kind of thing a piece is for QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Object,
    Chardev,
    /// A device on a PCI bus: takes a slot, and the guest must let go of it.
    Pci,
    /// A device on a virtio-serial bus: goes at once.
    Port,
}

/// One piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) kind: Kind,
    pub(crate) id: String,
    role: Role,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Memory,
    Channel,
    BellChannel,
    /// The pool in the guest; it may go along in a migration, or QEMU refuses one.
    Shm {
        movable: bool,
    },
    Serial,
    Port,
    Bell,
    /// Of the group with this place in the list.
    Arenas(usize),
    ArenasShm(usize),
    /// The pool in the guest as virtio-pmem, and of which of its objects.
    Pmem(u32),
}

/// The pieces of the VM `name` with this many groups of the host, in the order in which they are made.
pub(crate) fn parts(name: &str, doorbell: bool, groups: usize) -> Vec<Part> {
    let all = [
        (Kind::Object, Role::Memory, "mem"),
        (Kind::Chardev, Role::Channel, "chr"),
        (Kind::Chardev, Role::BellChannel, "bell-chr"),
        (Kind::Pci, Role::Shm { movable: false }, "shm"),
        (Kind::Pci, Role::Serial, "ser"),
        (Kind::Port, Role::Port, "port"),
        (Kind::Pci, Role::Bell, "bell"),
    ];
    let wanted = |role| doorbell || !matches!(role, Role::Bell | Role::BellChannel);
    let part = |kind, role, suffix: &str| Part {
        kind,
        id: format!("vnplug-{name}-{suffix}"),
        role,
    };
    let first = all
        .into_iter()
        .filter(|(_, role, _)| wanted(*role))
        .map(|(kind, role, suffix)| part(kind, role, suffix));
    let of_group = |at| {
        [
            part(Kind::Object, Role::Arenas(at), &format!("mem{at}")),
            part(Kind::Pci, Role::ArenasShm(at), &format!("shm{at}")),
        ]
    };
    first.chain((0..groups).flat_map(of_group)).collect()
}

/// These pieces where the machine may migrate with its pool and its channel.
pub(crate) fn movable(mut parts: Vec<Part>) -> Vec<Part> {
    for part in &mut parts {
        if let Role::Shm { movable } = &mut part.role {
            *movable = true;
        }
    }
    parts
}

/// Whether this QEMU has the pool of the VM `name` so that it goes along in a migration.
pub(crate) fn is_movable(
    monitor: &mut dyn Monitor,
    name: &str,
    present: &[String],
) -> Result<bool, MonitorError> {
    let device = format!("vnplug-{name}-shm");
    if !present.contains(&device) {
        return Ok(false);
    }
    let path = format!("/machine/peripheral/{device}");
    let master = monitor.execute("qom-get", json!({"path": path, "property": "master"}))?;
    Ok(master == "on")
}

/// The pieces of the VM `name` whose pool is its virtio-pmem device with this number, in the order in which they
/// are made. That device is the first one: that a machine has no room for it is found before another is plugged,
/// which only the guest could let go of.
pub(crate) fn pmem_parts(name: &str, number: u32) -> Vec<Part> {
    let all = [
        (Kind::Object, Role::Memory, pmem::object(name, number)),
        (Kind::Chardev, Role::Channel, format!("vnplug-{name}-chr")),
        (Kind::Pci, Role::Pmem(number), pmem::device(name, number)),
        (Kind::Pci, Role::Serial, format!("vnplug-{name}-ser")),
        (Kind::Port, Role::Port, format!("vnplug-{name}-port")),
    ];
    let part = |(kind, role, id)| Part { kind, id, role };
    all.into_iter().map(part).collect()
}

/// Every piece that the VM `name` can have, and that can go again.
pub(crate) fn all_parts(name: &str) -> Vec<Part> {
    parts(name, true, MAX_GROUPS)
}

/// The ids of everything in this QEMU that a [`Part`] could be.
pub(crate) fn present(monitor: &mut dyn Monitor) -> Result<Vec<String>, MonitorError> {
    let mut ids = Vec::new();
    for path in ["/objects", "/machine/peripheral"] {
        let list = monitor.execute("qom-list", json!({"path": path}))?;
        ids.extend(words(&list, "name"));
    }
    let chardevs = monitor.execute("query-chardev", json!({}))?;
    ids.extend(words(&chardevs, "label"));
    Ok(ids)
}

impl Part {
    /// Puts this piece into QEMU, at `place` if it is a PCI device.
    pub(crate) fn add(
        &self,
        monitor: &mut dyn Monitor,
        name: &str,
        ready: &VmReady,
        vectors: u32,
        place: &DeviceAddress,
    ) -> Result<(), MonitorError> {
        let other = |suffix: &str| format!("vnplug-{name}-{suffix}");
        let mut arguments = match self.role {
            Role::Memory => {
                let arguments = json!({
                    "qom-type": "memory-backend-file", "id": self.id, "share": true,
                    "mem-path": ready.pool_path, "size": ready.pool_len,
                });
                return monitor.execute("object-add", arguments).map(drop);
            }
            Role::Arenas(at) => {
                let (path, len) = ready.arenas.get(at).cloned().unwrap_or_default();
                let arguments = json!({
                    "qom-type": "memory-backend-file", "id": self.id, "share": true,
                    "readonly": true, "mem-path": path, "size": len,
                });
                return monitor.execute("object-add", arguments).map(drop);
            }
            Role::ArenasShm(at) => {
                json!({"driver": "ivshmem-plain", "memdev": other(&format!("mem{at}"))})
            }
            Role::Channel => return connect(monitor, &self.id, &ready.control_path, true),
            Role::BellChannel => return connect(monitor, &self.id, &ready.doorbell_path, false),
            Role::Shm { movable } => {
                let mut arguments = json!({"driver": "ivshmem-plain", "memdev": other("mem")});
                if movable {
                    arguments["master"] = json!("on");
                }
                arguments
            }
            Role::Pmem(number) => {
                json!({"driver": "virtio-pmem-pci", "memdev": pmem::object(name, number)})
            }
            Role::Serial => json!({"driver": "virtio-serial-pci"}),
            Role::Port => json!({
                "driver": "virtserialport", "bus": other("ser") + ".0",
                "chardev": other("chr"), "name": VIRTIO_PORT_NAME,
            }),
            Role::Bell => json!({
                "driver": "ivshmem-doorbell", "chardev": other("bell-chr"), "vectors": vectors,
            }),
        };
        arguments["id"] = json!(self.id);
        if self.kind == Kind::Pci {
            place.tell(&mut arguments);
        }
        monitor.execute("device_add", arguments).map(drop)
    }
}

/// Makes a socket chardev. One that is to `reconnect` does so by itself when the daemon restarts; an
/// ivshmem client cannot (QEMU, ivshmem-spec).
pub(super) fn connect(
    monitor: &mut dyn Monitor,
    id: &str,
    path: &str,
    reconnect: bool,
) -> Result<(), MonitorError> {
    let backend = |option: Option<(&str, u32)>| {
        let mut data = json!({
            "addr": {"type": "unix", "data": {"path": path}}, "server": false,
        });
        if let Some((name, value)) = option {
            data[name] = json!(value);
        }
        json!({"id": id, "backend": {"type": "socket", "data": data}})
    };
    if !reconnect {
        return insist(monitor, &backend(None));
    }
    match insist(monitor, &backend(Some(("reconnect", 1)))) {
        // NB: deprecated in QEMU 9.2 in favour of reconnect-ms.
        Err(MonitorError::Refused { text, .. }) if text.contains("is unexpected") => {
            insist(monitor, &backend(Some(("reconnect-ms", 1000))))
        }
        other => other,
    }
}

/// Adds a chardev, for a while also against "duplicate yank instance": QEMU frees a removed socket
/// chardev of the same id only when its connecting thread has ended (seen with 7.2).
fn insist(monitor: &mut dyn Monitor, arguments: &Value) -> Result<(), MonitorError> {
    let deadline = Instant::now() + STALE_CHARDEV;
    loop {
        match monitor.execute("chardev-add", arguments.clone()) {
            Err(MonitorError::Refused { text, .. })
                if text.contains("yank") && Instant::now() < deadline =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.map(drop),
        }
    }
}

/// What is left when not everything could be removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Ids of devices the guest has not let go of.
    pub(crate) devices: Vec<String>,
    /// Ids that cannot go while those devices are there.
    pub(crate) held: Vec<String>,
}

impl Left {
    /// True if everything is gone.
    pub(crate) fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.held.is_empty()
    }
}

/// Removes pieces, the last first: asks the guest for all devices at once, waits up to `limit` for
/// it to let go, then removes what was behind them. Pieces that are not there are fine.
///
/// # Errors
/// [`MonitorError`] for anything but "not there" and "the guest has not answered".
pub(crate) fn remove(
    monitor: &mut dyn Monitor,
    parts: &[Part],
    limit: Duration,
) -> Result<Left, MonitorError> {
    let devices = parts.iter().rev().filter(|part| part.is_device());
    let devices: Vec<String> = devices.map(|part| part.id.clone()).collect();
    let mut left = Left {
        devices: unplug(monitor, &devices, limit)?,
        held: Vec::new(),
    };
    for part in parts.iter().rev().filter(|part| !part.is_device()) {
        let command = match part.kind {
            Kind::Object => "object-del",
            _ => "chardev-remove",
        };
        match monitor.execute(command, json!({"id": part.id})) {
            Ok(_) => {}
            Err(error) if error.is_not_found() => {}
            Err(MonitorError::Refused { .. }) if !left.devices.is_empty() => {
                left.held.push(part.id.clone());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(left)
}

/// Asks the guest for devices, all at once, and waits up to `limit` for it to let go; those that it did
/// not let go of. Devices that are not there are fine.
///
/// # Errors
/// [`MonitorError`] for anything but "not there" and "the guest has not answered".
pub(super) fn unplug(
    monitor: &mut dyn Monitor,
    devices: &[String],
    limit: Duration,
) -> Result<Vec<String>, MonitorError> {
    let mut waiting = Vec::new();
    for id in devices {
        match monitor.execute("device_del", json!({"id": id})) {
            Ok(_) => waiting.push(id.clone()),
            Err(error) if error.is_pending() => waiting.push(id.clone()),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
    let deadline = Instant::now() + limit;
    let mut refused = Vec::new();
    while waiting.iter().any(|id| !refused.contains(id)) {
        let event = match monitor.news(deadline)? {
            News::Event(event) => event,
            News::Look => {
                let present = present(monitor)?;
                waiting.retain(|id| present.contains(id));
                continue;
            }
            News::Nothing => break,
        };
        let about = event.data["device"].as_str().unwrap_or_default().to_owned();
        match event.name.as_str() {
            "DEVICE_DELETED" => waiting.retain(|id| *id != about),
            "DEVICE_UNPLUG_GUEST_ERROR" => refused.push(about),
            _ => {}
        }
    }
    // An event may have been lost, and the serial port goes with its controller: look, not guess.
    let present = present(monitor)?;
    let left = devices.iter().filter(|id| present.contains(id));
    Ok(left.cloned().collect())
}

impl Part {
    /// The last part of the name of the memory block that this device brings; see [`super::blocks`].
    pub(super) fn block(&self) -> Option<String> {
        match self.role {
            Role::Shm { .. } | Role::ArenasShm(_) => {
                let (stem, number) = self.id.rsplit_once("-shm")?;
                Some(format!("{stem}-mem{number}"))
            }
            Role::Bell => Some("ivshmem.bar2".to_owned()),
            _ => None,
        }
    }

    /// It goes along when a machine migrates that is movable.
    pub(super) fn goes_along(&self) -> bool {
        matches!(
            self.role,
            Role::Memory | Role::Channel | Role::Shm { .. } | Role::Serial | Role::Port
        )
    }

    pub(super) fn is_bell(&self) -> bool {
        self.role == Role::Bell
    }

    /// It cannot be unplugged.
    pub(super) fn is_pmem(&self) -> bool {
        matches!(self.role, Role::Pmem(_))
    }

    pub(super) fn is_device(&self) -> bool {
        matches!(self.kind, Kind::Pci | Kind::Port)
    }
}

fn words(list: &Value, key: &str) -> Vec<String> {
    let items = list.as_array().map(Vec::as_slice).unwrap_or_default();
    let word = |item: &Value| item[key].as_str().map(str::to_owned);
    items.iter().filter_map(word).collect()
}

/// Groups of the host that a VM joins at most; as many as a daemon lets it.
pub(crate) const MAX_GROUPS: usize = 8;
const STALE_CHARDEV: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chardevs_come_before_devices_so_that_accidents_can_be_told_apart() {
        let ids = |doorbell, groups| -> Vec<String> {
            let suffix = |part: Part| part.id.replace("vnplug-a-", "");
            let parts = parts("a", doorbell, groups);
            parts.into_iter().map(suffix).collect()
        };
        assert_eq!(ids(false, 0), ["mem", "chr", "shm", "ser", "port"]);
        let with_bell = ["mem", "chr", "bell-chr", "shm", "ser", "port", "bell"];
        assert_eq!(ids(true, 0), with_bell);
        let groups = ["mem0", "shm0", "mem1", "shm1"];
        assert_eq!(ids(true, 2), [&with_bell[..], &groups].concat());
    }
}

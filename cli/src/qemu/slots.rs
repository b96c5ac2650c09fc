//! Where in a running machine there is room for PCI devices.
//!
//! On `pc` (i440fx) a device takes a free slot of `pci.0`. On `q35` and other PCIe machines a device
//! can only be hot-plugged into a `pcie-root-port` (or a switch's downstream port), which holds one
//! device; the ports themselves must be there from the start.
//!
//! Slots and ports are taken from the last one down: QEMU and libvirt go up from the first, and
//! libvirt does not know what we plugged; it would fail to hot-plug where we are.

use serde_json::{Value, json};

use super::monitor::{Monitor, MonitorError};

/// Where one device goes; QEMU chooses what is not said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct DeviceAddress {
    /// The id of a bus or of a port.
    pub(crate) bus: Option<String>,
    /// The slot on the bus.
    pub(crate) slot: Option<u8>,
}

impl DeviceAddress {
    /// Says it in the arguments of `device_add`.
    pub(crate) fn tell(&self, arguments: &mut Value) {
        if let Some(bus) = &self.bus {
            arguments["bus"] = json!(bus);
        }
        if let Some(slot) = self.slot {
            arguments["addr"] = json!(format!("{slot:x}"));
        }
    }
}

impl std::fmt::Display for DeviceAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bus = self.bus.as_deref().unwrap_or_default();
        write!(f, "{bus},{}", self.slot.unwrap_or_default())
    }
}

/// Reads what [`DeviceAddress`] shows of a bus and a slot.
pub(super) fn parse(text: &str) -> Result<DeviceAddress, String> {
    let wrong = || "write BUS,SLOT".to_owned();
    let (bus, slot) = text.rsplit_once(',').ok_or_else(wrong)?;
    Ok(DeviceAddress {
        bus: Some(bus.to_owned()),
        slot: Some(slot.parse().map_err(|_| wrong())?),
    })
}

/// Where the device with this id is.
pub(super) fn place_of(monitor: &mut dyn Monitor, id: &str) -> Result<DeviceAddress, MonitorError> {
    let mut get = |property| {
        let path = format!("/machine/peripheral/{id}");
        monitor.execute("qom-get", json!({"path": path, "property": property}))
    };
    let (bus, address) = (get("parent_bus")?, get("addr")?);
    let place = bus.as_str().and_then(|path| {
        let bus = path.rsplit('/').next()?.to_owned();
        // Three bits of it are the function.
        let slot = u8::try_from(address.as_u64()? >> 3).ok()?;
        Some(DeviceAddress {
            bus: Some(bus),
            slot: Some(slot),
        })
    });
    place.ok_or_else(|| MonitorError::NotAnswer("qom-get".into()))
}

/// Not enough places for the devices.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoRoom {
    /// Devices to plug.
    pub(crate) needed: usize,
    /// Ids of the ports that are free.
    pub(crate) free: Vec<String>,
    /// Ports there are at all.
    pub(crate) ports: usize,
}

/// The place of each of `needed` devices. `wanted` are the operator's buses and ports.
///
/// # Errors
/// `Ok(Err(NoRoom))` if the machine has too few free ports.
pub(crate) fn choose(
    monitor: &mut dyn Monitor,
    wanted: &[String],
    needed: usize,
) -> Result<Result<Vec<DeviceAddress>, NoRoom>, MonitorError> {
    let ports = ports(monitor)?;
    if let [bus] = wanted
        && !ports.iter().any(|port| port.id == *bus)
    {
        // A conventional bus (pci.0, a bridge) holds many devices.
        return Ok(Ok(vec![on(bus); needed]));
    }
    let free: Vec<String> = if !wanted.is_empty() {
        wanted.to_vec()
    } else if is_conventional(monitor)? {
        let root = monitor.execute("query-pci", json!({}))?;
        return Ok(Ok(last_slots(&root, needed)));
    } else {
        let free = ports.iter().filter(|port| port.free);
        let mut free: Vec<String> = free.map(|port| port.id.clone()).collect();
        // pci.10 comes after pci.9.
        free.sort_by_key(|id| std::cmp::Reverse((id.len(), id.clone())));
        free
    };
    if free.len() < needed {
        return Ok(Err(NoRoom {
            needed,
            free,
            ports: ports.len(),
        }));
    }
    Ok(Ok(free.iter().take(needed).map(|port| on(port)).collect()))
}

fn on(bus: &str) -> DeviceAddress {
    DeviceAddress {
        bus: Some(bus.to_owned()),
        slot: None,
    }
}

/// The last free slots of the root bus in `buses`, QEMU's list of buses and their devices; where
/// there are too few, the rest is left to QEMU, which says so best.
fn last_slots(buses: &Value, needed: usize) -> Vec<DeviceAddress> {
    let root = list(buses).first().map(|bus| list(&bus["devices"]));
    let used = |slot: u8| {
        let mut devices = root.unwrap_or_default().iter();
        devices.any(|device| device["slot"] == slot)
    };
    // Slot 0 is the host bridge on every machine.
    let free = (1..SLOTS).rev().filter(|slot| !used(*slot));
    let places = free.map(|slot| DeviceAddress {
        bus: None,
        slot: Some(slot),
    });
    let rest = std::iter::repeat(DeviceAddress::default());
    places.chain(rest).take(needed).collect()
}

struct Port {
    id: String,
    free: bool,
}

/// Every port with an id that takes a hot-plugged device. The occupants are read from QEMU's object
/// tree and not by query-pci, which knows nothing behind a port that the firmware has not numbered.
fn ports(monitor: &mut dyn Monitor) -> Result<Vec<Port>, MonitorError> {
    let path = "/machine/peripheral".to_owned();
    let devices = monitor.execute("qom-list", json!({"path": path}))?;
    let mut ports = Vec::new();
    for device in list(&devices) {
        let (Some(id), Some(kind)) = (device["name"].as_str(), device["type"].as_str()) else {
            continue;
        };
        if !PORT_TYPES
            .iter()
            .any(|port| kind == format!("child<{port}>"))
        {
            continue;
        }
        let own = format!("{path}/{id}");
        let hotplug = json!({"path": own, "property": "hotplug"});
        // Ports without the property (before QEMU 5.0) always take devices.
        let hotplug = monitor.execute("qom-get", hotplug);
        let bus = monitor.execute("qom-list", json!({"path": format!("{own}/{id}")}))?;
        let occupant = |item: &Value| {
            item["name"]
                .as_str()
                .is_some_and(|n| n.starts_with("child["))
        };
        ports.push(Port {
            id: id.to_owned(),
            free: !matches!(hotplug, Ok(Value::Bool(false))) && !list(&bus).iter().any(occupant),
        });
    }
    Ok(ports)
}

/// True for machines whose root bus takes hot-plugged devices.
fn is_conventional(monitor: &mut dyn Monitor) -> Result<bool, MonitorError> {
    let machine = json!({"path": "/machine", "property": "type"});
    let kind = monitor.execute("qom-get", machine)?;
    let kind = kind.as_str().unwrap_or_default();
    Ok(["i440fx", "pc-0", "pc-1", "pseries"]
        .iter()
        .any(|name| kind.contains(name)))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            needed,
            free,
            ports,
        } = self;
        write!(
            f,
            "{needed} free PCIe ports are needed, the machine has {} free of {ports}",
            free.len()
        )?;
        if !free.is_empty() {
            write!(f, " ({})", free.join(", "))?;
        }
        write!(
            f,
            "; ports cannot be added to a running machine, give it more at its next start: for each {MORE_PORTS}"
        )
    }
}

/// How a machine gets one more port.
pub(crate) const MORE_PORTS: &str = "`-device pcie-root-port,id=vnp1,chassis=31,slot=31` with numbers of its own, or \
                                     in libvirt's XML `<controller type='pci' model='pcie-root-port'/>`";
/// Slots of a conventional PCI bus.
const SLOTS: u8 = 32;
/// What one device can be plugged into while a q35 machine runs.
pub(crate) const PORT_TYPES: [&str; 3] = ["pcie-root-port", "ioh3420", "xio3130-downstream"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_from_the_last_one_down() {
        let devices: Vec<Value> = [0, 1, 30].map(|slot| json!({"slot": slot})).into();
        let buses = json!([{"bus": 0, "devices": devices}]);
        let slots: Vec<_> = last_slots(&buses, 3).iter().map(|p| p.slot).collect();
        assert_eq!(slots, [Some(31), Some(29), Some(28)]);

        let full: Vec<Value> = (0..31).map(|slot| json!({"slot": slot})).collect();
        let slots = last_slots(&json!([{"bus": 0, "devices": full}]), 2);
        assert_eq!(slots[0].slot, Some(31));
        assert_eq!(slots[1], DeviceAddress::default());
    }

    #[test]
    fn a_place_is_read_as_it_is_shown() {
        let place = DeviceAddress {
            bus: Some("pci.0".into()),
            slot: Some(31),
        };
        assert_eq!(place.to_string(), "pci.0,31");
        assert_eq!(parse("pci.0,31"), Ok(place));
        for bad in ["pci.0", "pci.0,", "pci.0,1f", "pci.0,256"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_room_says_how_to_make_room() {
        let text = NoRoom {
            needed: 2,
            free: vec!["rp1".into()],
            ports: 4,
        }
        .to_string();
        assert!(
            text.starts_with("2 free PCIe ports are needed, the machine has 1 free of 4 (rp1);")
        );
        assert!(text.contains("-device pcie-root-port,id=vnp1"));
        assert!(text.contains("<controller type='pci' model='pcie-root-port'/>"));
    }
}

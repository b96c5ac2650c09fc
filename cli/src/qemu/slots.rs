//! Where in a running machine there is room for PCI devices.
//!
//! On `pc` (i440fx) QEMU finds a free slot on `pci.0` by itself. On `q35` and other PCIe machines a
//! device can only be hot-plugged into a `pcie-root-port` (or a switch's downstream port), which
//! holds one device; the ports themselves must be there from the start.

use serde_json::{Value, json};

use super::qmp::{Qmp, QmpError};

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

/// The bus for each of `needed` devices; `None` lets QEMU choose. `wanted` are the operator's.
///
/// # Errors
/// `Ok(Err(NoRoom))` if the machine has too few free ports.
pub(crate) fn choose(
    qmp: &mut Qmp,
    wanted: &[String],
    needed: usize,
) -> Result<Result<Vec<Option<String>>, NoRoom>, QmpError> {
    let ports = ports(qmp)?;
    if let [bus] = wanted
        && !ports.iter().any(|port| port.id == *bus)
    {
        // A conventional bus (pci.0, a bridge) holds many devices.
        return Ok(Ok(vec![Some(bus.clone()); needed]));
    }
    let free: Vec<String> = if !wanted.is_empty() {
        wanted.to_vec()
    } else if is_conventional(qmp)? {
        return Ok(Ok(vec![None; needed]));
    } else {
        let free = ports.iter().filter(|port| port.free);
        free.map(|port| port.id.clone()).collect()
    };
    if free.len() < needed {
        return Ok(Err(NoRoom {
            needed,
            free,
            ports: ports.len(),
        }));
    }
    Ok(Ok(free.into_iter().take(needed).map(Some).collect()))
}

struct Port {
    id: String,
    free: bool,
}

/// Every port with an id that takes a hot-plugged device. The occupants are read from QEMU's object
/// tree and not by query-pci, which knows nothing behind a port that the firmware has not numbered.
fn ports(qmp: &mut Qmp) -> Result<Vec<Port>, QmpError> {
    let path = "/machine/peripheral".to_owned();
    let devices = qmp.execute("qom-list", json!({"path": path}))?;
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
        let hotplug = qmp.execute("qom-get", hotplug);
        let bus = qmp.execute("qom-list", json!({"path": format!("{own}/{id}")}))?;
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
fn is_conventional(qmp: &mut Qmp) -> Result<bool, QmpError> {
    let machine = json!({"path": "/machine", "property": "type"});
    let kind = qmp.execute("qom-get", machine)?;
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
        f.write_str(
            "; ports cannot be added to a running machine, give it more at its next start: for \
             each `-device pcie-root-port,id=vnp1,chassis=31,slot=31` with numbers of its own, or \
             in libvirt's XML `<controller type='pci' model='pcie-root-port'/>`",
        )
    }
}

const PORT_TYPES: [&str; 3] = ["pcie-root-port", "ioh3420", "xio3130-downstream"];

#[cfg(test)]
mod tests {
    use super::*;

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

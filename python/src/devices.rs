//! What may be opened.

use std::path::PathBuf;

use pyo3::prelude::*;
use vnplug::Client;

use crate::error::raise;

/// A device that may be opened.
#[pyclass(frozen, get_all, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Device {
    /// The name to open it by, with `host:`.
    name: String,
    /// `af_packet`, `pcap` or `gen`.
    kind: String,
    /// `up`, `down`, `gone`, `ended` or `waiting`.
    state: String,
    /// For people: interface, file, rate.
    description: String,
    /// Receive queues; `NAME@Q` opens queue Q alone.
    queues: u32,
    /// Readers that are attached; 0 in guests.
    ports: u32,
    /// Link type of its packets (DLT); 1 is Ethernet.
    link_type: u32,
    /// Bytes after the Ethernet header that a packet of the interface may have; None: unknown.
    mtu: Option<u32>,
    /// Megabits per second; None: unknown.
    speed_mbps: Option<u32>,
    /// The interface's hardware address, as `02:00:00:00:00:01`.
    mac: Option<String>,
    /// The interface's network addresses with their prefix lengths; empty in guests.
    addresses: Vec<String>,
}

#[pymethods]
impl Device {
    fn __repr__(&self) -> String {
        let Self {
            name, kind, state, ..
        } = self;
        format!("<vnplug.Device {name:?} {kind} {state}>")
    }
}

/// The devices that may be opened, as `vnplug list` shows them.
#[pyfunction]
#[pyo3(signature = (*, socket = None))]
pub(crate) fn devices(py: Python<'_>, socket: Option<PathBuf>) -> PyResult<Vec<Device>> {
    let list = py.detach(|| {
        let mut client = match &socket {
            Some(path) => Client::connect_to(path),
            None => Client::connect(),
        }?;
        client.devices()
    });
    let known = |device: vnplug::Device| Device {
        name: device.name,
        kind: device.kind,
        state: device.state,
        description: device.description,
        queues: device.queues,
        ports: device.ports,
        link_type: device.link_type,
        mtu: Some(device.mtu).filter(|&mtu| mtu != 0),
        speed_mbps: Some(device.speed_mbps).filter(|&speed| speed != 0),
        mac: Some(device.mac).filter(|&mac| mac != [0; 6]).map(mac),
        addresses: device.addresses,
    };
    let list = list.map_err(raise)?;
    Ok(list.into_iter().map(known).collect())
}

fn mac(bytes: [u8; 6]) -> String {
    bytes.map(|byte| format!("{byte:02x}")).join(":")
}

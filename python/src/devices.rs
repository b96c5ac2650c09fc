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
    };
    let list = list.map_err(raise)?;
    Ok(list.into_iter().map(known).collect())
}

//! Opening a port: Python's keyword arguments as the library's options.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use vnplug::{Balance, Direction, PortOptions, Segments};

use crate::bundle::Bundle;
use crate::error::{InvalidError, raise};
use crate::port::Port;

/// Opens a port on a device.
///
/// filter: a pcap-filter(7) expression; the daemon runs it.
/// snaplen: captured bytes per packet; 0 is all.
/// direction: packets that the interface received, sent, or both.
/// segments: super-frames, and frames whose checksum was left to a NIC, as the wire would have carried
///     them ("wire"), or as they came, with `Flag.OFFLOAD` ("merged").
/// sample: one in this number of the packets that pass the filter.
/// program: each packet goes through the operator's program of this name, which may drop it or change it.
/// cluster, balance: share the device with the other readers of this cluster, a flow to one reader
///     or packet by packet.
/// group, arena_bytes: read one copy of each packet with the others of this group, who trust each
///     other; the first member says how large their arena is (0 is the daemon's default). A reader
///     that is too slow loses what is overwritten before it takes it.
/// ring_bytes: size of each ring; 0 is the daemon's default.
/// watermark, max_delay: sleep until this many packets are unread, or this many seconds over.
/// reconnect: survive a restart of the daemon; the first packet afterwards has `Flag.GAP`.
/// label: what the operator sees; the default is the program's name and number.
/// bundle: make it a port of this `Bundle`, with the others of which it is waited for.
/// socket: of the daemon or agent; the default is $VNPLUG_SOCKET or the usual place.
///
/// Raises UnreachableError, NotFoundError, FilterError, DeniedError, LimitError, InvalidError.
#[pyfunction]
#[pyo3(signature = (device, *, filter = "", snaplen = 0, direction = "both", segments = "wire", sample = 1,
    program = "", cluster = "", balance = "flow", group = "", arena_bytes = 0, ring_bytes = 0, watermark = 1, max_delay = 0.01,
    reconnect = true, label = None, bundle = None, socket = None))]
#[expect(clippy::too_many_arguments, reason = "Python's keyword arguments")]
pub(crate) fn open(
    py: Python<'_>,
    device: &str,
    filter: &str,
    snaplen: u32,
    direction: &str,
    segments: &str,
    sample: u32,
    program: &str,
    cluster: &str,
    balance: &str,
    group: &str,
    arena_bytes: u64,
    ring_bytes: u64,
    watermark: u32,
    max_delay: f64,
    reconnect: bool,
    label: Option<String>,
    bundle: Option<Py<Bundle>>,
    socket: Option<PathBuf>,
) -> PyResult<Py<Port>> {
    let direction = match direction {
        "both" => Direction::Both,
        "rx" => Direction::Rx,
        "tx" => Direction::Tx,
        _ => return Err(unknown("direction", direction, "'both', 'rx' or 'tx'")),
    };
    let Some(wanted) = Segments::from_name(segments) else {
        return Err(unknown("segments", segments, "'wire' or 'merged'"));
    };
    let balance = match balance {
        "flow" => Balance::Flow,
        "rr" => Balance::RoundRobin,
        _ => return Err(unknown("balance", balance, "'flow' or 'rr'")),
    };
    let mut options = PortOptions::new(device)
        .filter(filter)
        .snaplen(snaplen)
        .direction(direction)
        .segments(wanted)
        .sample(sample)
        .program(program)
        .cluster(cluster, balance)
        .group(group)
        .arena_bytes(arena_bytes)
        .ring_bytes(ring_bytes)
        .watermark(watermark)
        .max_delay(seconds("max_delay", max_delay)?)
        .reconnect(reconnect);
    if let Some(label) = label {
        options = options.label(label);
    }
    if let Some(path) = socket {
        options = options.socket(path);
    }
    if let Some(bundle) = bundle {
        return bundle.get().open(py, options);
    }
    let port = py.detach(|| options.open()).map_err(raise)?;
    Py::new(py, Port::new(port))
}

/// A number of seconds as Python gives it.
pub(crate) fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    match Duration::try_from_secs_f64(value) {
        Ok(duration) => Ok(duration),
        // Longer than anybody waits.
        Err(_) if value > 0.0 => Ok(Duration::from_secs(u32::MAX.into())),
        Err(_) => Err(InvalidError::new_err(format!(
            "{name} is {value}, not a number of seconds"
        ))),
    }
}

fn unknown(name: &str, value: &str, allowed: &str) -> PyErr {
    InvalidError::new_err(format!("{name} is {value:?}; it may be {allowed}"))
}

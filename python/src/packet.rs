//! One packet, which owns its bytes.

#![expect(unsafe_code, reason = "the buffer protocol is one of raw pointers")]

use std::ffi::c_int;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vnplug::{Meta, flags};

/// A packet, which owns its bytes: `bytes(p)`, `memoryview(p)`, `p.data`.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Packet {
    meta: Meta,
    data: Py<PyBytes>,
}

impl Packet {
    /// Copies a lent packet.
    #[inline]
    pub(crate) fn new(py: Python<'_>, packet: &vnplug::Packet<'_>) -> Self {
        Self {
            meta: packet.meta,
            data: PyBytes::new(py, packet.bytes).unbind(),
        }
    }
}

#[pymethods]
impl Packet {
    /// The captured bytes, Ethernet header included.
    #[getter]
    fn data(&self, py: Python<'_>) -> Py<PyBytes> {
        self.data.clone_ref(py)
    }

    /// Nanoseconds since 1970-01-01 UTC.
    #[getter]
    fn ts_ns(&self) -> u64 {
        self.meta.ts_ns
    }

    /// Seconds since 1970-01-01 UTC, rounded to what a float holds.
    #[getter]
    fn time(&self) -> f64 {
        self.meta.ts_ns as f64 / 1e9
    }

    /// Length on the wire in bytes, FCS excluded.
    #[getter]
    fn wire_len(&self) -> u32 {
        self.meta.wire_len
    }

    /// Captured bytes.
    #[getter]
    fn caplen(&self, py: Python<'_>) -> usize {
        self.data.as_bytes(py).len()
    }

    /// Outermost 802.1Q tag (TCI); the bytes hold it too.
    #[getter]
    fn vlan(&self) -> Option<u16> {
        let tagged = self.meta.flags & flags::VLAN != 0;
        tagged.then_some(self.meta.vlan_tci)
    }

    /// Bits of `Flag`.
    #[getter]
    fn flags(&self) -> u16 {
        self.meta.flags
    }

    /// True if the host's interface sent it.
    #[getter]
    fn outbound(&self) -> bool {
        self.meta.flags & flags::OUTBOUND != 0
    }

    /// The same for both directions of a flow.
    #[getter]
    fn flow_hash(&self) -> u32 {
        self.meta.flow_hash
    }

    /// Packets that this port lost just before this one.
    #[getter]
    fn lost(&self) -> u32 {
        self.meta.lost
    }

    /// The daemon's number of the source.
    #[getter]
    fn source(&self) -> u16 {
        self.meta.source
    }

    /// Receive queue of the source.
    #[getter]
    fn queue(&self) -> u16 {
        self.meta.queue
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.data.as_bytes(py).len()
    }

    fn __bytes__(&self, py: Python<'_>) -> Py<PyBytes> {
        self.data(py)
    }

    /// # Safety
    /// Called by the interpreter, with a `Py_buffer` to fill in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let py = slf.py();
        // SAFETY: the interpreter gives a valid `Py_buffer`. The bytes object fills it in, as its
        // own: it is the one that is kept alive and told of the release.
        let done = unsafe { ffi::PyObject_GetBuffer(slf.get().data.as_ptr(), buffer, flags) };
        match done {
            0 => Ok(()),
            _ => Err(PyErr::fetch(py)),
        }
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let Meta {
            ts_ns,
            wire_len,
            flow_hash,
            ..
        } = self.meta;
        let caplen = self.caplen(py);
        format!(
            "<vnplug.Packet ts_ns={ts_ns} wire_len={wire_len} caplen={caplen} \
             flow_hash={flow_hash:#010x}>"
        )
    }
}

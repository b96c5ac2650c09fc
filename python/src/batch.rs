//! Several packets as arrays.

use std::mem::offset_of;
use std::sync::Arc;

use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::shared::{Inner, SharedPort};
use crate::view::{self, Bytes, Lent, Row, View};

/// Packets that were taken together; `batch[i]` is the bytes of one.
///
/// The columns are memoryviews, for numpy.asarray; they are the batch's own and outlive its release.
/// `data` and `batch[i]` look into the ring, unless `is_copy`; see `Port.batch`.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Batch {
    rows: Arc<Vec<Row>>,
    bytes: Bytes,
}

impl Batch {
    /// No packet.
    pub(crate) fn empty() -> Self {
        Self {
            rows: Arc::default(),
            bytes: Bytes::Owned(Arc::default()),
        }
    }

    /// Up to `max` packets where they lie in the ring; `None` if there are none now. The loan before
    /// must be settled.
    pub(crate) fn lent(
        shared: &Arc<SharedPort>,
        inner: &mut Inner,
        max: usize,
    ) -> PyResult<Option<Self>> {
        let port = inner.port()?;
        let mut rows = Vec::new();
        let mut ends: Option<(&[u8], &[u8])> = None;
        for packet in port.span(max) {
            // What was taken before an error is delivered; the next call says the error.
            let Ok(packet) = packet else { break };
            let (first, _) = *ends.get_or_insert((packet.bytes, packet.bytes));
            ends = Some((first, packet.bytes));
            let offset = packet.bytes.as_ptr().addr() - first.as_ptr().addr();
            rows.push(row(&packet, offset));
        }
        let Some((first, last)) = ends else {
            return Ok(None);
        };
        // Here the port's borrow ends and the loan begins: nothing moves the port before it is settled.
        let memory = view::span(first, last);
        let bytes = Bytes::Lent(Lent::new(memory, inner.lend(), shared.clone()));
        let rows = Arc::new(rows);
        Ok(Some(Self { rows, bytes }))
    }

    /// Copies up to `max` packets, of all rings, and gives their room back; `None` if there are none
    /// now.
    pub(crate) fn copied(inner: &mut Inner, max: usize) -> PyResult<Option<Self>> {
        let port = inner.port()?;
        let (mut rows, mut bytes) = (Vec::new(), Vec::new());
        for packet in port.batch(max) {
            let Ok(packet) = packet else { break };
            rows.push(row(&packet, bytes.len()));
            bytes.extend_from_slice(packet.bytes);
        }
        port.release();
        Ok((!rows.is_empty()).then(|| Self {
            rows: Arc::new(rows),
            bytes: Bytes::Owned(Arc::new(bytes)),
        }))
    }

    /// One packet, copied.
    pub(crate) fn single(packet: &vnplug::Packet<'_>) -> Self {
        Self {
            rows: Arc::new(vec![row(packet, 0)]),
            bytes: Bytes::Owned(Arc::new(packet.bytes.to_vec())),
        }
    }

    fn column<'py, T>(
        &self,
        py: Python<'py>,
        offset: usize,
        format: &'static std::ffi::CStr,
    ) -> PyResult<Bound<'py, PyMemoryView>> {
        View::of_field::<T>(self.rows.clone(), offset, format).memoryview(py)
    }
}

#[pymethods]
impl Batch {
    /// The bytes of all packets; packet i is `data[offset[i] : offset[i] + caplen[i]]`.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        let len = self.bytes.len();
        View::of_bytes(self.bytes.clone(), 0, len).memoryview(py)
    }

    /// All columns as one: a structured array for numpy.asarray, of 40-byte rows.
    #[getter]
    fn records<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        View::of_rows(self.rows.clone()).memoryview(py)
    }

    /// int64: nanoseconds since 1970-01-01 UTC.
    #[getter]
    fn ts_ns<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<i64>(py, offset_of!(Row, ts_ns), c"q")
    }

    /// uint64: where in `data` a packet begins.
    #[getter]
    fn offset<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u64>(py, offset_of!(Row, offset), c"Q")
    }

    /// uint32: captured bytes.
    #[getter]
    fn caplen<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u32>(py, offset_of!(Row, caplen), c"I")
    }

    /// uint32: bytes on the wire.
    #[getter]
    fn wire_len<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u32>(py, offset_of!(Row, wire_len), c"I")
    }

    /// uint32: the same for both directions of a flow.
    #[getter]
    fn flow_hash<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u32>(py, offset_of!(Row, flow_hash), c"I")
    }

    /// uint32: packets that this port lost just before.
    #[getter]
    fn lost<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u32>(py, offset_of!(Row, lost), c"I")
    }

    /// uint16: outermost 802.1Q tag, where `flags` has `Flag.VLAN`.
    #[getter]
    fn vlan<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u16>(py, offset_of!(Row, vlan), c"H")
    }

    /// uint16: bits of `Flag`.
    #[getter]
    fn flags<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u16>(py, offset_of!(Row, flags), c"H")
    }

    /// uint16: the daemon's number of the source.
    #[getter]
    fn source<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u16>(py, offset_of!(Row, source), c"H")
    }

    /// uint16: receive queue of the source.
    #[getter]
    fn queue<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyMemoryView>> {
        self.column::<u16>(py, offset_of!(Row, queue), c"H")
    }

    /// True if the bytes are the batch's own, and may be kept.
    #[getter]
    fn is_copy(&self) -> bool {
        self.bytes.loan().is_none()
    }

    /// True if the bytes were in the ring and are not there any more.
    #[getter]
    fn released(&self) -> bool {
        self.bytes.loan().is_some_and(|(loan, _)| loan.is_over())
    }

    /// The same packets, with bytes of its own.
    fn copy(&self) -> PyResult<Self> {
        Ok(Self {
            rows: self.rows.clone(),
            bytes: Bytes::Owned(self.bytes.copy()?),
        })
    }

    /// Gives the room in the ring back. Raises LoanError while views of the bytes are alive.
    fn release(&self) -> PyResult<()> {
        match self.bytes.loan() {
            Some((loan, _)) if loan.is_over() => Ok(()),
            Some((loan, shared)) => shared.lock()?.give_back(loan),
            None => Ok(()),
        }
    }

    fn __len__(&self) -> usize {
        self.rows.len()
    }

    fn __getitem__<'py>(
        &self,
        py: Python<'py>,
        index: isize,
    ) -> PyResult<Bound<'py, PyMemoryView>> {
        let from_end = |index: isize| index.checked_add_unsigned(self.rows.len());
        let place = match index {
            0.. => Some(index),
            _ => from_end(index),
        };
        let row = place
            .and_then(|place| self.rows.get(usize::try_from(place).ok()?))
            .ok_or_else(|| {
                PyIndexError::new_err(format!("a batch of {} packets", self.rows.len()))
            })?;
        let (offset, len) = (row.offset as usize, row.caplen as usize);
        View::of_bytes(self.bytes.clone(), offset, len).memoryview(py)
    }

    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let builtins = slf.py().import("builtins")?;
        let places = builtins.getattr("range")?.call1((slf.len()?,))?;
        let item = slf.getattr("__getitem__")?;
        builtins.getattr("map")?.call1((item, places))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        _type: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.release()
    }

    fn __repr__(&self) -> String {
        let state = match self.bytes.loan() {
            None => "copied",
            Some((loan, _)) if loan.is_over() => "released",
            Some(_) => "in the ring",
        };
        format!("<vnplug.Batch of {} packets, {state}>", self.rows.len())
    }
}

/// A batch nobody looks at any more gives its room back at once.
impl Drop for Batch {
    fn drop(&mut self) {
        if let Some((loan, shared)) = self.bytes.loan()
            && !loan.is_over()
            && let Ok(mut inner) = shared.lock()
        {
            // Views may outlive the batch; the port's next call looks again.
            let _ = inner.give_back(loan);
        }
    }
}

fn row(packet: &vnplug::Packet<'_>, offset: usize) -> Row {
    let meta = &packet.meta;
    Row {
        ts_ns: meta.ts_ns as i64,
        offset: offset as u64,
        caplen: packet.bytes.len() as u32,
        wire_len: meta.wire_len,
        flow_hash: meta.flow_hash,
        lost: meta.lost,
        vlan: meta.vlan_tci,
        flags: meta.flags,
        source: meta.source,
        queue: meta.queue,
    }
}

//! Memory as Python's buffer protocol shows it, read-only: what memoryview and NumPy look at.

#![expect(unsafe_code, reason = "the buffer protocol is one of raw pointers")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;

use crate::shared::{Loan, SharedPort};

/// Bytes of packets: lent by a ring, or copied.
#[derive(Debug, Clone)]
pub(crate) enum Bytes {
    Lent(Lent),
    Owned(Arc<Vec<u8>>),
}

/// Where packets lie in a ring, and what keeps them there.
#[derive(Debug, Clone)]
pub(crate) struct Lent {
    start: *const u8,
    len: usize,
    loan: Arc<Loan>,
    shared: Arc<SharedPort>,
}

// SAFETY: the memory is only read, and stays mapped and unwritten while the loan lasts, whichever
// thread looks; the other fields are Send and Sync.
unsafe impl Send for Lent {}
// SAFETY: as above.
unsafe impl Sync for Lent {}

/// One thing that has a buffer.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct View {
    memory: Memory,
    /// Of the first item, from the start of the memory.
    offset: usize,
    /// Items, and the distance from one to the next in bytes.
    len: usize,
    stride: usize,
    /// One item: as Python's struct module or PEP 3118 writes it, and its size.
    format: &'static CStr,
    item: usize,
}

#[derive(Debug)]
enum Memory {
    Bytes(Bytes),
    Rows(Arc<Vec<Row>>),
}

/// What a batch says of one packet; `offset` is where its bytes are.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Row {
    pub(crate) ts_ns: i64,
    pub(crate) offset: u64,
    pub(crate) caplen: u32,
    pub(crate) wire_len: u32,
    pub(crate) flow_hash: u32,
    pub(crate) lost: u32,
    pub(crate) vlan: u16,
    pub(crate) flags: u16,
    pub(crate) source: u16,
    pub(crate) queue: u16,
}

/// A row as a structured type of NumPy; `=`: standard sizes, no padding.
const ROW: &CStr = c"T{=q:ts_ns:=Q:offset:=I:caplen:=I:wire_len:=I:flow_hash:=I:lost:=H:vlan:=H:flags:=H:source:=H:queue:}";

// The format above is this layout.
const _: () = assert!(size_of::<Row>() == 40 && std::mem::offset_of!(Row, queue) == 38);

impl Lent {
    /// Memory of packets that are on loan.
    pub(crate) fn new(
        memory: (*const u8, usize),
        loan: Arc<Loan>,
        shared: Arc<SharedPort>,
    ) -> Self {
        let (start, len) = memory;
        Self {
            start,
            len,
            loan,
            shared,
        }
    }
}

/// The memory from the first byte of `first` to the last of `last`, which are packets of one span.
pub(crate) fn span(first: &[u8], last: &[u8]) -> (*const u8, usize) {
    let start = first.as_ptr();
    (start, last.as_ptr().addr() + last.len() - start.addr())
}

impl Bytes {
    /// A copy of the bytes.
    pub(crate) fn copy(&self) -> PyResult<Arc<Vec<u8>>> {
        let lent = match self {
            Self::Owned(bytes) => return Ok(bytes.clone()),
            Self::Lent(lent) => lent,
        };
        lent.loan.view()?;
        // SAFETY: the loan is not over, so the memory is mapped and the host does not write it; it
        // cannot end before `give_up`.
        let bytes = unsafe { std::slice::from_raw_parts(lent.start, lent.len) }.to_vec();
        lent.loan.give_up();
        Ok(Arc::new(bytes))
    }

    /// The loan, if they are lent.
    pub(crate) fn loan(&self) -> Option<(&Arc<Loan>, &Arc<SharedPort>)> {
        match self {
            Self::Lent(lent) => Some((&lent.loan, &lent.shared)),
            Self::Owned(_) => None,
        }
    }

    /// How many there are, what lies between packets included.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Lent(lent) => lent.len,
            Self::Owned(bytes) => bytes.len(),
        }
    }
}

impl View {
    /// Bytes of packets, from `offset` on; `len` must not lead beyond them.
    pub(crate) fn of_bytes(bytes: Bytes, offset: usize, len: usize) -> Self {
        assert!(offset + len <= bytes.len(), "a packet outside of its batch");
        Self {
            memory: Memory::Bytes(bytes),
            offset,
            len,
            stride: 1,
            format: c"B",
            item: 1,
        }
    }

    /// One field of all rows, `offset` bytes from their start; `T` is its type and `format` says so.
    pub(crate) fn of_field<T>(rows: Arc<Vec<Row>>, offset: usize, format: &'static CStr) -> Self {
        assert!(offset + size_of::<T>() <= size_of::<Row>());
        Self {
            len: rows.len(),
            memory: Memory::Rows(rows),
            offset,
            stride: size_of::<Row>(),
            format,
            item: size_of::<T>(),
        }
    }

    /// All rows.
    pub(crate) fn of_rows(rows: Arc<Vec<Row>>) -> Self {
        Self {
            len: rows.len(),
            memory: Memory::Rows(rows),
            offset: 0,
            stride: size_of::<Row>(),
            format: ROW,
            item: size_of::<Row>(),
        }
    }

    /// As a memoryview.
    pub(crate) fn memoryview(self, py: Python<'_>) -> PyResult<Bound<'_, PyMemoryView>> {
        PyMemoryView::from(Bound::new(py, self)?.as_any())
    }

    fn start(&self) -> *const u8 {
        let start = match &self.memory {
            Memory::Bytes(Bytes::Lent(lent)) => lent.start,
            Memory::Bytes(Bytes::Owned(bytes)) => bytes.as_ptr(),
            Memory::Rows(rows) => rows.as_ptr().cast(),
        };
        start.wrapping_add(self.offset)
    }

    fn loan(&self) -> Option<&Arc<Loan>> {
        match &self.memory {
            Memory::Bytes(bytes) => bytes.loan().map(|(loan, _)| loan),
            Memory::Rows(_) => None,
        }
    }
}

#[pymethods]
impl View {
    /// # Safety
    /// Called by the interpreter, with a `Py_buffer` to fill in.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        buffer: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if buffer.is_null() {
            return Err(PyBufferError::new_err("no buffer to fill in"));
        }
        let view = slf.get();
        let wants = |flag: c_int| flags & flag == flag;
        // SAFETY: the interpreter gives a valid `Py_buffer`, and wants `obj` to be null on error.
        unsafe { (*buffer).obj = ptr::null_mut() };
        if wants(ffi::PyBUF_WRITABLE) {
            return Err(PyBufferError::new_err("packets are read-only"));
        }
        let is_dense = view.stride == view.item;
        if !is_dense && !wants(ffi::PyBUF_STRIDES) {
            return Err(PyBufferError::new_err(
                "this column is not contiguous; numpy.asarray and list take it",
            ));
        }
        if let Some(loan) = view.loan() {
            loan.view()?;
        }
        // Freed by `__releasebuffer__`.
        let sizes = Box::new([view.len as isize, view.stride as isize]);
        let sizes: *mut isize = Box::into_raw(sizes).cast();
        let ask = |flag, value| if wants(flag) { value } else { ptr::null_mut() };
        let filled = ffi::Py_buffer {
            buf: view.start().cast_mut().cast::<c_void>(),
            len: (view.len * view.item) as isize,
            readonly: 1,
            itemsize: view.item as isize,
            format: match wants(ffi::PyBUF_FORMAT) {
                true => view.format.as_ptr().cast_mut(),
                false => ptr::null_mut(),
            },
            ndim: 1,
            shape: ask(ffi::PyBUF_ND, sizes),
            strides: ask(ffi::PyBUF_STRIDES, sizes.wrapping_add(1)),
            suboffsets: ptr::null_mut(),
            internal: sizes.cast(),
            obj: slf.into_ptr(),
        };
        // SAFETY: as above. The memory lives as long as `obj`, which the buffer now owns: owned bytes
        // and rows never change, lent ones stay until the view is given up (see `Loan`).
        unsafe { ptr::write(buffer, filled) };
        Ok(())
    }

    /// # Safety
    /// Called by the interpreter, once, with a buffer that `__getbuffer__` filled in.
    unsafe fn __releasebuffer__(&self, buffer: *mut ffi::Py_buffer) {
        // SAFETY: `internal` is the box that `__getbuffer__` made for this buffer.
        drop(unsafe { Box::from_raw((*buffer).internal.cast::<[isize; 2]>()) });
        if let Some(loan) = self.loan() {
            loan.give_up();
        }
    }
}

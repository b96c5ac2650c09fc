//! A port: waiting, and what comes out of it.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use vnplug::{FilterSpec, Next};

use crate::batch::Batch;
use crate::error::{ClosedError, EndedError, InvalidError, raise};
use crate::open::seconds;
use crate::packet::Packet;
use crate::shared::{Inner, SharedPort};

/// One attached reader of a device; a context manager and an iterator over packets.
///
/// One thread at a time may use it. Iteration ends when the source ends.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Port {
    shared: Arc<SharedPort>,
    device: String,
    fd: RawFd,
}

/// Batches until the source ends; see `Port.batches`.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Batches {
    port: Py<Port>,
    max: usize,
    timeout: Option<f64>,
    copy: bool,
}

/// Counters of a port since it was opened.
#[pyclass(frozen, get_all, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Stats {
    /// Packets taken.
    received: u64,
    /// Their captured bytes.
    bytes: u64,
    /// Packets this port lost, also those that no packet has told of yet.
    lost: u64,
    /// Packets with `Flag.GAP`.
    gaps: u64,
    /// Times the port was reopened.
    reopened: u64,
    /// The daemon's counters of this port (docs/vnplugd.md); None while it cannot be reached.
    host: Option<BTreeMap<String, u64>>,
}

#[pymethods]
impl Port {
    /// The device's name, with `host:`.
    #[getter]
    fn device(&self) -> &str {
        &self.device
    }

    /// Link type of the packets (DLT); 1 is Ethernet.
    #[getter]
    fn link_type(&self) -> PyResult<u32> {
        Ok(self.shared.lock()?.port()?.link_type())
    }

    /// The longest captured length.
    #[getter]
    fn snaplen(&self) -> PyResult<u32> {
        Ok(self.shared.lock()?.port()?.snaplen())
    }

    /// Rings, one per receive queue of the device.
    #[getter]
    fn rings(&self) -> PyResult<usize> {
        Ok(self.shared.lock()?.port()?.ring_count())
    }

    /// True while the daemon is gone and the port tries to reopen.
    #[getter]
    fn away(&self) -> PyResult<bool> {
        Ok(self.shared.lock()?.port()?.is_away())
    }

    /// True after `close`.
    #[getter]
    fn closed(&self) -> bool {
        self.shared.is_closing()
    }

    /// The next packet; None when `timeout` seconds are over (0: do not wait).
    ///
    /// Raises EndedError when the source ended, GoneError when the port is over.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<Packet>> {
        let mut inner = self.shared.lock()?;
        inner.settle()?;
        self.await_some(py, &mut inner, timeout, |inner| {
            Ok(match inner.port()?.next().map_err(raise)? {
                Next::Packet(packet) => Step::Got(Packet::new(py, &packet)),
                Next::Nothing => Step::Nothing,
                Next::Ended => Step::Ended,
            })
        })
    }

    /// Packets that are there now, at most `max`, at least one, waiting `timeout` seconds for it.
    ///
    /// An empty batch means that the time is over. Without `copy` their bytes stay in the ring until
    /// the batch is released: by its `release`, by `with`, or by the port's next call, which raises
    /// LoanError while memoryviews or arrays of the bytes are alive.
    ///
    /// Raises EndedError when the source ended, GoneError when the port is over.
    #[pyo3(signature = (max = 4096, timeout = None, copy = false))]
    fn batch(
        &self,
        py: Python<'_>,
        max: usize,
        timeout: Option<f64>,
        copy: bool,
    ) -> PyResult<Batch> {
        if max == 0 {
            return Err(InvalidError::new_err("a batch of at most 0 packets"));
        }
        let mut inner = self.shared.lock()?;
        inner.settle()?;
        let batch = self.await_some(py, &mut inner, timeout, |inner| {
            let batch = match copy {
                true => Batch::copied(inner, max)?,
                false => Batch::lent(&self.shared, inner, max)?,
            };
            if let Some(batch) = batch {
                return Ok(Step::Got(batch));
            }
            // Says why there are none, and arms the ring.
            Ok(match inner.port()?.next().map_err(raise)? {
                Next::Packet(packet) => Step::Got(Batch::single(&packet)),
                Next::Nothing => Step::Nothing,
                Next::Ended => Step::Ended,
            })
        })?;
        Ok(batch.unwrap_or_else(Batch::empty))
    }

    /// Batches until the source ends; an empty one whenever `timeout` seconds are over.
    #[pyo3(signature = (max = 4096, timeout = None, copy = false))]
    fn batches(slf: Py<Self>, max: usize, timeout: Option<f64>, copy: bool) -> Batches {
        Batches {
            port: slf,
            max,
            timeout,
            copy,
        }
    }

    /// Replaces the filter, between two packets. On FilterError the old one stays.
    fn set_filter(&self, py: Python<'_>, filter: &str) -> PyResult<()> {
        let spec = match filter.trim() {
            "" => FilterSpec::All,
            text => FilterSpec::Expression(text.into()),
        };
        let mut inner = self.shared.lock()?;
        let port = inner.port()?;
        py.detach(|| port.set_filter(spec)).map_err(raise)
    }

    /// The counters, this reader's and the host's.
    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        let mut inner = self.shared.lock()?;
        let port = inner.port()?;
        let stats = py.detach(|| port.stats()).map_err(raise)?;
        let (own, lost) = (stats.own, port.dropped());
        Ok(Stats {
            received: own.received,
            bytes: own.bytes,
            lost,
            gaps: own.gaps,
            reopened: own.reopened,
            host: stats.host.map(|host| host.values.into_iter().collect()),
        })
    }

    /// A descriptor for select, poll, epoll and asyncio.
    ///
    /// Readable means: call `next(0)` until it gives None. Do not wait before it did so once, and do
    /// not read the descriptor. It stays the same over a reconnect.
    fn fileno(&self) -> PyResult<RawFd> {
        match self.closed() {
            true => Err(ClosedError::new_err("the port is closed")),
            false => Ok(self.fd),
        }
    }

    /// Closes the port. A thread that waits on it gets a ClosedError.
    ///
    /// Raises LoanError while views of the last batch are alive.
    pub(crate) fn close(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.shared.close())
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Packet>> {
        or_stop(py, self.next(py, None))
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _type: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        let state = if self.closed() { ", closed" } else { "" };
        format!("<vnplug.Port {:?}{state}>", self.device)
    }
}

#[pymethods]
impl Batches {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let port = self.port.get();
        let batch = port.batch(py, self.max, self.timeout, self.copy);
        or_stop(py, batch.map(Some))
    }
}

#[pymethods]
impl Stats {
    fn __repr__(&self) -> String {
        let Self { received, lost, .. } = self;
        format!("<vnplug.Stats received={received} lost={lost}>")
    }
}

/// What a look at the port found.
enum Step<T> {
    Got(T),
    Nothing,
    Ended,
}

impl Port {
    /// Of an open port.
    pub(crate) fn new(port: vnplug::Port) -> Self {
        Self::of_bundle(port, Arc::default())
    }

    /// Of an open port of a bundle; `waits` says that a thread waits for that.
    pub(crate) fn of_bundle(port: vnplug::Port, waits: Arc<AtomicBool>) -> Self {
        Self {
            device: port.device().to_owned(),
            fd: port.fd().as_raw_fd(),
            shared: SharedPort::new(port, waits),
        }
    }

    /// What its bundle waits for.
    pub(crate) fn shared(&self) -> &SharedPort {
        &self.shared
    }

    /// Looks and waits by turns, until something is there or the time is over.
    fn await_some<T>(
        &self,
        py: Python<'_>,
        inner: &mut Inner,
        timeout: Option<f64>,
        mut look: impl FnMut(&mut Inner) -> PyResult<Step<T>>,
    ) -> PyResult<Option<T>> {
        let mut deadline = None;
        loop {
            match look(inner)? {
                Step::Got(got) => return Ok(Some(got)),
                Step::Ended => return Err(EndedError::new_err("the source ended")),
                Step::Nothing => {}
            }
            let now = Instant::now();
            if let (Some(timeout), None) = (timeout, deadline) {
                deadline = now.checked_add(seconds("timeout", timeout)?);
            }
            let left = deadline.map(|deadline: Instant| deadline.saturating_duration_since(now));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            let pause = left.map_or(PAUSE, |left| left.min(PAUSE));
            let port = inner.port()?;
            py.detach(|| port.wait(Some(pause))).map_err(raise)?;
            // Ctrl-C, also if the signal went to another thread; and close().
            py.check_signals()?;
            if self.closed() {
                return Err(ClosedError::new_err("the port was closed meanwhile"));
            }
        }
    }
}

/// The end of the source as Python's iterators say it.
fn or_stop<T>(py: Python<'_>, got: PyResult<Option<T>>) -> PyResult<Option<T>> {
    match got {
        Err(error) if error.is_instance_of::<EndedError>(py) => Ok(None),
        got => got,
    }
}

/// Longest wait without looking for signals.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);

//! Third parties' back-ends and the channels to them. Memory is copied out and in, never lent: the other side
//! may change it at any time.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use vnplug::{Error, Heard, SharedMemory};

use crate::channel::Channel;
use crate::error::{ClosedError, LoanError, raise};
use crate::open::seconds;
use crate::port::PAUSE;

/// One end, of one thread at a time; `None` after it was closed.
#[derive(Debug)]
pub(crate) struct End<T>(Mutex<Option<T>>);

/// What happened to a back-end or a channel; `kind` says which fields count.
#[pyclass(frozen, get_all, module = "vnplug")]
#[derive(Debug, Default)]
pub(crate) struct News {
    /// `joined`, `message`, `event`, `left`, `gone`, `back`, `shared`, `withdraw` or `released`.
    pub(crate) kind: &'static str,
    /// To a back-end: the channel's number.
    pub(crate) channel: u32,
    /// The event's number.
    pub(crate) event: u8,
    /// How often the event happened since it was told last.
    pub(crate) count: u64,
    /// The memory's number.
    pub(crate) region: u32,
    /// What the program says that it speaks.
    pub(crate) version: u32,
    /// Seconds that there are to let go of memory.
    pub(crate) within: f64,
    /// Who joined, in the daemon's words; or why something ended.
    pub(crate) text: String,
    /// What a program calls itself: not to be believed.
    pub(crate) label: String,
    /// A message.
    pub(crate) data: Data,
}

/// Bytes that become Python's when somebody looks.
#[derive(Debug, Default, Clone)]
pub(crate) struct Data(pub(crate) Vec<u8>);

/// Memory that a back-end and a program share; bytes are copied out and in.
///
/// The other side may change it at any time. What was taken back or is over raises InvalidError, or reads as zeros.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Memory {
    owner: Owner,
    region: u32,
}

/// Whose memory it is.
#[derive(Debug)]
pub(crate) enum Owner {
    BackEnd(Py<BackEnd>),
    Channel(Py<Channel>),
}

/// A back-end: programs in guests and elsewhere open channels to it. A context manager and an iterator over News.
///
/// `id` and `name` are those of the operator's grant. One thread at a time may use it.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct BackEnd {
    end: End<vnplug::BackEnd>,
}

#[pymethods]
impl BackEnd {
    #[new]
    #[pyo3(signature = (id, name, *, version = 0, events_in = 0, events_out = 0, socket = None))]
    fn new(
        py: Python<'_>,
        id: u32,
        name: &str,
        version: u32,
        events_in: u8,
        events_out: u8,
        socket: Option<PathBuf>,
    ) -> PyResult<Self> {
        let mut options = vnplug::BackEndOptions::new(id, name)
            .version(version)
            .events(events_in, events_out);
        if let Some(path) = socket {
            options = options.socket(path);
        }
        let back_end = py.detach(|| options.register()).map_err(raise)?;
        let end = End::new(back_end);
        Ok(Self { end })
    }

    /// What happened next; None when `timeout` seconds are over.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<News>> {
        let next = |end: &mut vnplug::BackEnd, limit| end.next(limit);
        Ok(self.end.next(py, timeout, next)?.map(News::from))
    }

    /// Says something to the program at a channel, at most 65,536 bytes.
    ///
    /// Raises FullError if it has not taken what was said before: call `next`, then try again.
    fn send(&self, channel: u32, data: &[u8]) -> PyResult<()> {
        self.end.with(|end| end.send(channel, data))
    }

    /// An event happened `count` times.
    #[pyo3(signature = (channel, event, count = 1))]
    fn event(&self, channel: u32, event: u8, count: u64) -> PyResult<()> {
        self.end.with(|end| end.event(channel, event, count))
    }

    /// Shares zeros with the program at a channel, rounded up to whole pages. Returns the memory's number.
    #[pyo3(signature = (channel, size, writable = false))]
    fn share(&self, py: Python<'_>, channel: u32, size: u64, writable: bool) -> PyResult<u32> {
        let mut end = self.end.lock()?;
        let end = open(&mut end)?;
        let shared = py.detach(|| end.share(channel, size, writable));
        shared.map_err(raise)
    }

    /// Memory that is shared, by its number.
    fn memory(slf: Py<Self>, region: u32) -> PyResult<Memory> {
        Memory::new(Owner::BackEnd(slf), region)
    }

    /// Takes memory back, and waits until the program lets go. False if it did not; it maps zeros then.
    #[pyo3(signature = (region, timeout = 10.0))]
    fn withdraw(&self, py: Python<'_>, region: u32, timeout: f64) -> PyResult<bool> {
        let within = seconds("timeout", timeout)?;
        let mut end = self.end.lock()?;
        let end = open(&mut end)?;
        let withdrawn = py.detach(|| end.withdraw(region, within));
        withdrawn.map_err(raise)
    }

    /// Ends a channel; the program is told the reason.
    #[pyo3(signature = (channel, reason = ""))]
    fn hang_up(&self, channel: u32, reason: &str) -> PyResult<()> {
        self.end.with(|end| end.hang_up(channel, reason))
    }

    /// The numbers of the channels that are open.
    #[getter]
    fn channels(&self) -> PyResult<Vec<u32>> {
        self.end.with(|end| Ok(end.channels().collect()))
    }

    /// True after `close`.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(self.end.lock()?.is_none())
    }

    /// A descriptor for select: call `next(0)` until it gives None before each wait.
    ///
    /// It changes with News of `gone` and `back`; in between it is never readable.
    fn fileno(&self) -> PyResult<RawFd> {
        self.end.fileno()
    }

    /// Ends all channels, and the back-end.
    fn close(&self) -> PyResult<()> {
        self.end.close()
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<News> {
        self.next(py, None)?.ok_or_else(over)
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
        self.close()
    }
}

#[pymethods]
impl Memory {
    /// A copy of `size` bytes from `offset` on.
    fn read<'py>(
        &self,
        py: Python<'py>,
        offset: u64,
        size: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        self.with(py, |memory| {
            // Before that much is allocated.
            if size as u64 > memory.len() {
                return Err(Error::Invalid("shared memory beyond its end"));
            }
            let mut bytes = vec![0; size];
            memory.read(offset, &mut bytes)?;
            Ok(PyBytes::new(py, &bytes))
        })
    }

    /// Copies bytes there.
    fn write(&self, py: Python<'_>, offset: u64, data: &[u8]) -> PyResult<()> {
        self.with(py, |memory| memory.write(offset, data))
    }

    /// The 64-bit word at `offset`, a multiple of 8: reads after it see what was written before it was stored.
    fn load(&self, py: Python<'_>, offset: u64) -> PyResult<u64> {
        self.with(py, |memory| memory.load(offset))
    }

    /// Stores a 64-bit word: who loads it sees what was written before.
    fn store(&self, py: Python<'_>, offset: u64, value: u64) -> PyResult<()> {
        self.with(py, |memory| memory.store(offset, value))
    }

    /// Its number.
    #[getter]
    fn region(&self) -> u32 {
        self.region
    }

    /// True if this side may write it.
    #[getter]
    fn writable(&self, py: Python<'_>) -> PyResult<bool> {
        self.with(py, |memory| Ok(memory.is_writable()))
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let len = self.with(py, |memory| Ok(memory.len()))?;
        Ok(usize::try_from(len)?)
    }
}

impl Memory {
    pub(crate) fn new(owner: Owner, region: u32) -> PyResult<Self> {
        let memory = Self { owner, region };
        Python::attach(|py| memory.with(py, |_| Ok(())))?;
        Ok(memory)
    }

    fn with<V>(
        &self,
        _py: Python<'_>,
        look: impl FnOnce(&SharedMemory) -> Result<V, Error>,
    ) -> PyResult<V> {
        let none = || Error::Invalid("no shared memory has this number, or it is over");
        match &self.owner {
            Owner::BackEnd(it) => it
                .get()
                .end
                .with(|end| look(end.memory(self.region).ok_or_else(none)?)),
            Owner::Channel(it) => it
                .get()
                .end
                .with(|end| look(end.memory(self.region).ok_or_else(none)?)),
        }
    }
}

impl<T: Send> End<T> {
    pub(crate) fn new(end: T) -> Self {
        Self(Mutex::new(Some(end)))
    }

    /// Never waits: who has it may wait for news, and may be ourselves, further up the stack.
    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, Option<T>>> {
        match self.0.try_lock() {
            Ok(end) => Ok(end),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(LoanError::new_err(
                "another thread uses this end of a channel; give each thread one of its own",
            )),
        }
    }

    pub(crate) fn with<V>(&self, call: impl FnOnce(&mut T) -> Result<V, Error>) -> PyResult<V> {
        let mut end = self.lock()?;
        call(open(&mut end)?).map_err(raise)
    }

    /// Waits in turns, so that Ctrl-C ends it.
    pub(crate) fn next<V: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        next: impl Fn(&mut T, Option<Duration>) -> Result<Option<V>, Error> + Sync,
    ) -> PyResult<Option<V>> {
        let timeout = timeout.map(|it| seconds("timeout", it)).transpose()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let pause = left.map_or(PAUSE, |left| left.min(PAUSE));
            let news = {
                let mut end = self.lock()?;
                let end = open(&mut end)?;
                py.detach(|| next(end, Some(pause))).map_err(raise)?
            };
            if news.is_some() || left.is_some_and(|left| left <= pause) {
                return Ok(news);
            }
            py.check_signals()?;
        }
    }

    pub(crate) fn fileno(&self) -> PyResult<RawFd>
    where
        T: AsFd,
    {
        self.with(|end| Ok(end.as_fd().as_raw_fd()))
    }

    pub(crate) fn close(&self) -> PyResult<()> {
        *self.lock()? = None;
        Ok(())
    }
}

fn open<T>(end: &mut Option<T>) -> PyResult<&mut T> {
    let closed = || ClosedError::new_err("this end of a channel is closed");
    end.as_mut().ok_or_else(closed)
}

/// Without a limit there is always something to say.
pub(crate) fn over() -> PyErr {
    PyStopIteration::new_err(())
}

impl From<Heard> for News {
    fn from(heard: Heard) -> Self {
        let news = Self::default();
        match heard {
            Heard::Joined {
                channel,
                who: text,
                label,
                version,
            } => Self {
                kind: "joined",
                channel,
                text,
                label,
                version,
                ..news
            },
            Heard::Message { channel, bytes } => Self {
                kind: "message",
                channel,
                data: Data(bytes),
                ..news
            },
            Heard::Event {
                channel,
                event,
                count,
            } => Self {
                kind: "event",
                channel,
                event,
                count,
                ..news
            },
            Heard::Left {
                channel,
                reason: text,
            } => Self {
                kind: "left",
                channel,
                text,
                ..news
            },
            Heard::Released { channel, region } => Self {
                kind: "released",
                channel,
                region,
                ..news
            },
            Heard::Gone(text) => Self {
                kind: "gone",
                text,
                ..news
            },
            Heard::Back => Self {
                kind: "back",
                ..news
            },
        }
    }
}

impl<'py> IntoPyObject<'py> for Data {
    type Target = PyBytes;
    type Output = Bound<'py, PyBytes>;
    type Error = std::convert::Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        Ok(PyBytes::new(py, &self.0))
    }
}

#[pymethods]
impl News {
    fn __repr__(&self) -> String {
        let Self { kind, channel, .. } = self;
        format!("<vnplug.News {kind}, channel {channel}>")
    }
}

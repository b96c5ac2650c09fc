//! A program's channel to a third party's back-end, and the list of those.

use std::os::fd::RawFd;
use std::path::PathBuf;

use pyo3::prelude::*;
use vnplug::{ChannelOptions, Told};

use crate::backend::{Data, End, Memory, News, Owner, over};
use crate::error::{InvalidError, raise};

/// A channel to a back-end. A context manager and an iterator over News.
///
/// `backend` is its name or its number. `wait=True` opens also if nobody is the back-end yet; News of `back` says when.
/// One thread at a time may use it. It is opened again by itself.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) end: End<vnplug::Channel>,
}

/// A back-end that may be used from here.
#[pyclass(frozen, get_all, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct BackEndInfo {
    /// Its number.
    id: u32,
    /// Its name.
    name: String,
    /// True if a process is it now.
    is_there: bool,
    /// Its version, if it is there.
    version: u32,
    /// Channels that it has; told to operators, else 0.
    channels: u32,
}

/// Whom a channel is to.
#[derive(Debug, FromPyObject)]
enum Wanted {
    Id(u32),
    Name(String),
}

/// The back-ends that may be used from here, as `vnplug backends` shows them.
#[pyfunction]
#[pyo3(signature = (*, socket = None))]
pub(crate) fn back_ends(py: Python<'_>, socket: Option<PathBuf>) -> PyResult<Vec<BackEndInfo>> {
    let list = py.detach(|| vnplug::Channel::list_of(socket.as_deref()));
    let known = |it: vnplug::BackendInfo| BackEndInfo {
        id: it.id,
        name: it.name,
        is_there: it.is_there,
        version: it.version,
        channels: it.channels,
    };
    Ok(list.map_err(raise)?.into_iter().map(known).collect())
}

#[pymethods]
impl Channel {
    #[new]
    #[pyo3(signature = (backend, *, label = "", version = 0, wait = false, socket = None))]
    fn new(
        py: Python<'_>,
        backend: Wanted,
        label: &str,
        version: u32,
        wait: bool,
        socket: Option<PathBuf>,
    ) -> PyResult<Self> {
        let mut options = match &backend {
            Wanted::Id(0) => return Err(InvalidError::new_err("a back-end's number is 1 or more")),
            Wanted::Id(id) => ChannelOptions::by_id(*id),
            Wanted::Name(name) => ChannelOptions::new(name),
        }
        .label(label)
        .version(version);
        if let Some(path) = socket {
            options = options.socket(path);
        }
        let channel = py.detach(|| match wait {
            true => options.open_when_there(),
            false => options.open(),
        });
        let end = End::new(channel.map_err(raise)?);
        Ok(Self { end })
    }

    /// What happened next; None when `timeout` seconds are over.
    #[pyo3(signature = (timeout = None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<News>> {
        let next = |end: &mut vnplug::Channel, limit| end.next(limit);
        Ok(self.end.next(py, timeout, next)?.map(News::from))
    }

    /// Says something to the back-end, at most 65,536 bytes.
    ///
    /// Raises FullError if it has not taken what was said before: call `next`, then try again. Raises
    /// UnreachableError while the channel is not open.
    fn send(&self, data: &[u8]) -> PyResult<()> {
        self.end.with(|end| end.send(data))
    }

    /// An event happened `count` times.
    #[pyo3(signature = (event, count = 1))]
    fn event(&self, event: u8, count: u64) -> PyResult<()> {
        self.end.with(|end| end.event(event, count))
    }

    /// Memory that is shared, or was and is not released, by its number.
    fn memory(slf: Py<Self>, region: u32) -> PyResult<Memory> {
        Memory::new(Owner::Channel(slf), region)
    }

    /// Lets go of memory.
    fn release(&self, region: u32) -> PyResult<()> {
        self.end.with(|end| end.release(region))
    }

    /// The numbers of the memory that is shared, or was and is not released.
    #[getter]
    fn regions(&self) -> PyResult<Vec<u32>> {
        self.end.with(|end| Ok(end.regions().collect()))
    }

    /// The version that the back-end says that it speaks; None while the channel is not open.
    #[getter]
    fn version(&self) -> PyResult<Option<u32>> {
        self.end.with(|end| Ok(end.peer().map(|peer| peer.version)))
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

    /// Ends the channel.
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
impl BackEndInfo {
    fn __repr__(&self) -> String {
        let Self { id, name, .. } = self;
        format!("<vnplug.BackEndInfo {name:?}, {id}>")
    }
}

impl From<Told> for News {
    fn from(told: Told) -> Self {
        let news = Self::default();
        match told {
            Told::Message(bytes) => Self {
                kind: "message",
                data: Data(bytes),
                ..news
            },
            Told::Event { event, count } => Self {
                kind: "event",
                event,
                count,
                ..news
            },
            Told::Shared { region } => Self {
                kind: "shared",
                region,
                ..news
            },
            Told::Withdraw { region, within } => Self {
                kind: "withdraw",
                region,
                within: within.as_secs_f64(),
                ..news
            },
            Told::Gone(text) => Self {
                kind: "gone",
                text,
                ..news
            },
            Told::Back => Self {
                kind: "back",
                ..news
            },
        }
    }
}

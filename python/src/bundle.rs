//! Many ports of one reader, waited for together.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use vnplug::{PortOptions, Ready};

use crate::error::{ClosedError, LoanError, raise};
use crate::open::seconds;
use crate::port::{PAUSE, Port};

/// Ports that share one connection and are waited for together; a context manager.
///
/// `open(…, bundle=it)` adds a port. One thread at a time may use a bundle and its ports.
#[pyclass(frozen, module = "vnplug")]
#[derive(Debug)]
pub(crate) struct Bundle {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    bundle: Option<vnplug::Bundle>,
    /// Those that were closed are left out when somebody asks.
    ports: Vec<Py<Port>>,
    /// The same by the numbers that the bundle has for them; one that was closed stays until the number is another's.
    numbered: Vec<Option<Py<Port>>>,
    /// A thread waits; the ports are not for others then.
    waits: Arc<AtomicBool>,
}

/// While a thread waits.
struct Waits<'a>(&'a AtomicBool);

impl<'a> Waits<'a> {
    fn begin(waits: &'a AtomicBool) -> Self {
        waits.store(true, Ordering::Relaxed);
        Self(waits)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

#[pymethods]
impl Bundle {
    #[new]
    fn new() -> PyResult<Self> {
        let bundle = vnplug::Bundle::new().map_err(raise)?;
        Ok(Self {
            inner: Mutex::new(Inner {
                bundle: Some(bundle),
                ports: Vec::new(),
                numbered: Vec::new(),
                waits: Arc::default(),
            }),
        })
    }

    /// The open ports, in the order of their opening.
    #[getter]
    fn ports(&self, py: Python<'_>) -> PyResult<Vec<Py<Port>>> {
        let mut inner = self.lock()?;
        Ok(inner
            .open_ports()
            .iter()
            .map(|it| it.clone_ref(py))
            .collect())
    }

    /// True after `close`.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        Ok(self.lock()?.bundle.is_none())
    }

    /// Waits until a port has packets or is over; False when `timeout` seconds are over.
    ///
    /// Ends the loans of ports that have news, as those have that lent something; raises LoanError while
    /// memoryviews or arrays of one are alive. A port that ended or failed makes it return at once: close it.
    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let timeout = timeout.map(|it| seconds("timeout", it)).transpose()?;
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let pause = left.map_or(PAUSE, |left| left.min(PAUSE));
            match self.wait_once(py, pause)? {
                Ready::Now => return Ok(true),
                Ready::TimedOut if left.is_some_and(|left| left <= pause) => return Ok(false),
                Ready::TimedOut | Ready::Interrupted => {}
            }
            // Ctrl-C, also if the signal went to another thread.
            py.check_signals()?;
        }
    }

    /// Those ports that may have something to say, after a wait: they have packets, or are not attached, or
    /// over. What this and `wait` cost depends on how many those are, and not on how many ports there are.
    fn ready(&self, py: Python<'_>) -> PyResult<Vec<Py<Port>>> {
        let mut inner = self.lock()?;
        let Inner {
            bundle, numbered, ..
        } = &mut *inner;
        let bundle = bundle.as_mut().ok_or_else(closed)?;
        let mut ready = Vec::new();
        while let Some(number) = bundle.next_awake() {
            if let Some(Some(port)) = numbered.get(number)
                && !port.get().shared().is_closing()
            {
                ready.push(port.clone_ref(py));
            }
        }
        Ok(ready)
    }

    /// Closes the bundle and all its ports.
    ///
    /// Raises LoanError while views of a port's last batch are alive, or another thread uses one of
    /// them; all stay open then.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let mut inner = self.lock()?;
        let mut used = Vec::with_capacity(inner.ports.len());
        for port in inner.open_ports() {
            let mut port = port.get().shared().lock()?;
            port.settle()?;
            used.push(port);
        }
        // Nobody looks at a ring from here on: the interpreter is ours until the ports close.
        drop(used);
        if let Some(bundle) = inner.bundle.take() {
            bundle.end();
        }
        let ports: Vec<_> = inner.ports.drain(..).collect();
        inner.numbered.clear();
        drop(inner);
        let mut result = Ok(());
        for port in ports {
            result = result.and(port.get().close(py));
        }
        result
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock()?.open_ports().len())
    }

    fn __iter__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let ports = self.ports(py)?.into_pyobject(py)?;
        Ok(ports.try_iter()?.into_any().unbind())
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

    fn __repr__(&self) -> PyResult<String> {
        let mut inner = self.lock()?;
        let state = if inner.bundle.is_some() {
            ""
        } else {
            ", closed"
        };
        Ok(format!(
            "<vnplug.Bundle of {}{state}>",
            inner.open_ports().len()
        ))
    }
}

impl Bundle {
    /// Opens one more port.
    pub(crate) fn open(&self, py: Python<'_>, options: PortOptions) -> PyResult<Py<Port>> {
        let mut inner = self.lock()?;
        let bundle = inner.bundle()?;
        let port = py.detach(|| bundle.open_apart(options)).map_err(raise)?;
        let number = bundle.number_of(&port).unwrap_or_default();
        let port = Py::new(py, Port::of_bundle(port, Arc::clone(&inner.waits)))?;
        inner.ports.push(port.clone_ref(py));
        if number >= inner.numbered.len() {
            inner.numbered.resize_with(number + 1, || None);
        }
        inner.numbered[number] = Some(port.clone_ref(py));
        Ok(port)
    }

    fn wait_once(&self, py: Python<'_>, pause: Duration) -> PyResult<Ready> {
        let mut inner = self.lock()?;
        let Inner {
            bundle,
            numbered,
            waits,
            ..
        } = &mut *inner;
        let bundle = bundle.as_mut().ok_or_else(closed)?;
        let mut failed = Ok(());
        let _waits = Waits::begin(waits);
        let waited = py.detach(|| {
            bundle.wait_apart(Some(pause), |number, look| {
                let port = numbered.get(number).and_then(Option::as_ref);
                let port = port.map(|port| port.get().shared());
                if let Some(port) = port.filter(|port| !port.is_closing()) {
                    // What Python has of its last packets must not end while it is looked at.
                    let looked = port.lock_within().and_then(|mut port| {
                        port.settle()?;
                        look(port.port()?);
                        Ok(())
                    });
                    failed = looked;
                }
                failed.is_ok()
            })
        });
        failed?;
        waited.map_err(raise)
    }

    /// Never waits, as [`SharedPort::lock`](crate::shared::Shared::lock).
    fn lock(&self) -> PyResult<MutexGuard<'_, Inner>> {
        match self.inner.try_lock() {
            Ok(inner) => Ok(inner),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(LoanError::new_err(
                "another thread uses this bundle; give each thread a bundle of its own",
            )),
        }
    }
}

impl Inner {
    fn bundle(&mut self) -> PyResult<&mut vnplug::Bundle> {
        self.bundle.as_mut().ok_or_else(closed)
    }

    fn open_ports(&mut self) -> &[Py<Port>] {
        self.ports.retain(|port| !port.get().shared().is_closing());
        &self.ports
    }
}

fn closed() -> PyErr {
    ClosedError::new_err("the bundle is closed")
}

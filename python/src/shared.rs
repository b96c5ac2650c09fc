//! The port behind Python's objects, and the rule that keeps loans safe.
//!
//! A batch without a copy lends memory of a ring to Python. The host leaves that memory alone, and
//! the mapping stays, until the port takes the next packets, releases, or is closed. So:
//!
//! - There is at most one [`Loan`]. It counts the views (memoryviews, arrays) that Python has of it.
//! - Whatever would end it calls [`Inner::settle`] first, which ends the loan if there are no views,
//!   else raises. An ended loan gives no more views.
//! - `Port::stats` and `Port::set_filter` neither release nor unmap (see `Port::ask` in libvnplug);
//!   they need not settle.
//! - A view keeps the [`SharedPort`] alive, and with it the mapping.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use pyo3::{PyErr, PyResult};

use crate::error::{ClosedError, LoanError};

/// A port, for all objects that need it.
#[derive(Debug)]
pub(crate) struct SharedPort {
    inner: Mutex<Inner>,
    /// Threads that use the port are to give up; the last one closes it.
    closing: AtomicBool,
    /// A thread waits for all ports of its bundle.
    waits: Arc<AtomicBool>,
}

/// The port, while this thread uses it.
#[derive(Debug)]
pub(crate) struct Use<'a> {
    shared: &'a SharedPort,
    /// There until the drop.
    inner: Option<MutexGuard<'a, Inner>>,
}

/// What one thread at a time uses.
#[derive(Debug)]
pub(crate) struct Inner {
    port: Option<vnplug::Port>,
    loan: Option<Arc<Loan>>,
}

/// Memory of a ring that Python may look at.
#[derive(Debug, Default)]
pub(crate) struct Loan {
    /// Views of it; [`ENDED`] when there can be no more.
    views: AtomicIsize,
}

impl SharedPort {
    /// Of an open port; `waits` says that a thread waits for its bundle.
    pub(crate) fn new(port: vnplug::Port, waits: Arc<AtomicBool>) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Inner {
                port: Some(port),
                loan: None,
            }),
            closing: AtomicBool::new(false),
            waits,
        })
    }

    /// The port, if nobody uses it or its bundle.
    pub(crate) fn lock(&self) -> PyResult<Use<'_>> {
        // Relaxed: no memory depends on it, as the lock is taken all the same.
        match self.waits.load(Ordering::Relaxed) {
            true => Err(used()),
            false => self.lock_within(),
        }
    }

    /// The port, if nobody uses it, for who waits for its bundle.
    pub(crate) fn lock_within(&self) -> PyResult<Use<'_>> {
        // NB: never waits: who has it may wait for packets, and may be ourselves, further up the
        // stack: a signal's handler runs in the middle of a wait.
        let inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(used()),
        };
        Ok(Use {
            shared: self,
            inner: Some(inner),
        })
    }

    /// True once [`close`](Self::close) was called.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Closes the port, at once or as soon as nobody uses it.
    pub(crate) fn close(&self) -> PyResult<()> {
        let before = self.closing.swap(true, Ordering::SeqCst);
        // Whoever has it closes it; see `Use::drop`.
        let Ok(mut inner) = self.lock_within() else {
            return Ok(());
        };
        let closed = inner.close();
        if closed.is_err() {
            self.closing.store(before, Ordering::SeqCst);
        }
        closed
    }
}

fn used() -> PyErr {
    LoanError::new_err("another thread uses this port; give each thread a port of its own")
}

impl Deref for Use<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        self.inner.as_deref().expect("there until the drop")
    }
}

impl DerefMut for Use<'_> {
    fn deref_mut(&mut self) -> &mut Inner {
        self.inner.as_deref_mut().expect("there until the drop")
    }
}

/// Either `close` finds the port free, or we find here that it is closing: it says so before it tries,
/// and we look after we let go.
impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.inner = None;
        if self.shared.is_closing()
            && let Ok(mut inner) = self.shared.inner.try_lock()
        {
            // With views of the last packets, it stays mapped until they are gone.
            let _ = inner.close();
        }
    }
}

impl Inner {
    /// The port.
    pub(crate) fn port(&mut self) -> PyResult<&mut vnplug::Port> {
        let closed = || ClosedError::new_err("the port is closed");
        self.port.as_mut().ok_or_else(closed)
    }

    /// Ends the loan, so that the port may go on.
    pub(crate) fn settle(&mut self) -> PyResult<()> {
        match &self.loan {
            Some(loan) => loan.end()?,
            None => return Ok(()),
        }
        self.loan = None;
        Ok(())
    }

    /// Notes that the packets just taken are on loan; nothing may be taken before it is settled.
    pub(crate) fn lend(&mut self) -> Arc<Loan> {
        let loan = Arc::new(Loan::default());
        self.loan = Some(loan.clone());
        loan
    }

    /// Ends this loan and gives the room back to the host; nothing if it is over already.
    pub(crate) fn give_back(&mut self, loan: &Arc<Loan>) -> PyResult<()> {
        loan.end()?;
        if self.loan.as_ref().is_some_and(|own| Arc::ptr_eq(own, loan)) {
            self.loan = None;
            if let Some(port) = &mut self.port {
                port.release();
            }
        }
        Ok(())
    }

    /// Closes the port; the rings are unmapped.
    pub(crate) fn close(&mut self) -> PyResult<()> {
        self.settle()?;
        self.port = None;
        Ok(())
    }
}

impl Loan {
    /// One view more.
    pub(crate) fn view(&self) -> PyResult<()> {
        // Relaxed, here and below: the interpreter's lock orders all that look at the memory.
        let counted = self
            .views
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |views| {
                (views != ENDED).then_some(views + 1)
            });
        match counted {
            Ok(_) => Ok(()),
            Err(_) => Err(LoanError::new_err(
                "this batch was released: its packets are in the ring no more; use batch.copy() or \
                 copy=True to keep them",
            )),
        }
    }

    /// One view less.
    pub(crate) fn give_up(&self) {
        self.views.fetch_sub(1, Ordering::Relaxed);
    }

    /// True if there can be no more views.
    pub(crate) fn is_over(&self) -> bool {
        self.views.load(Ordering::Relaxed) == ENDED
    }

    fn end(&self) -> PyResult<()> {
        let ended = self
            .views
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |views| {
                (views <= 0).then_some(ENDED)
            });
        match ended {
            Ok(_) => Ok(()),
            Err(views) => Err(LoanError::new_err(format!(
                "{views} memoryviews or arrays still look at packets of the last batch, in the ring: \
                 delete them first, or take copies (copy=True, batch.copy())"
            ))),
        }
    }
}

const ENDED: isize = -1;

//! An entrance of a switch, of whatever kind. Its files are made with the switch, by a daemon that may still do what takes
//! privileges; its thread begins when they are given up.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::porter::Shift;

/// Lets programs or machines of one kind join, from when it is opened until it is dropped.
pub(crate) struct Door {
    name: String,
    thread: &'static str,
    shut: &'static str,
    /// Until it is opened.
    prepare: Option<Box<Prepare>>,
    shift: Option<Shift>,
}

/// Makes what the thread does until the flag is set, with what wakes it.
type Prepare = dyn FnOnce(Arc<OwnedFd>) -> io::Result<Box<Run>> + Send;
type Run = dyn FnOnce(&AtomicBool) + Send;

impl Door {
    /// Of the switch of this name. `shut` is what is so if the thread cannot begin.
    pub(crate) fn new<R: FnOnce(&AtomicBool) + Send + 'static>(
        name: String,
        (thread, shut): (&'static str, &'static str),
        prepare: impl FnOnce(Arc<OwnedFd>) -> io::Result<R> + Send + 'static,
    ) -> Self {
        let prepare = |waker| -> io::Result<Box<Run>> { Ok(Box::new(prepare(waker)?)) };
        Self {
            name,
            thread,
            shut,
            prepare: Some(Box::new(prepare)),
            shift: None,
        }
    }

    /// Opens, once.
    pub(crate) fn open(&mut self) {
        let Some(prepare) = self.prepare.take() else {
            return;
        };
        match Shift::start(self.thread, prepare) {
            Ok(shift) => self.shift = Some(shift),
            Err(error) => log::error!(target: "switch", "{}: {}: {error}", self.name, self.shut),
        }
    }
}

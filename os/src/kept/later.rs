//! What a service manager's queue had no room for. A thread says it in turn, as soon as there is.
//!
//! Whoever says something never waits for the manager: a thread that receives packets would miss some, and one that closes
//! many sources would be late for all of them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::service::{Manager, is_full};

/// What is to be said to a manager, in its order.
#[derive(Debug, Default)]
pub(super) struct Later {
    manager: Arc<Manager>,
    queue: Mutex<Queue>,
    /// The queue is empty.
    is_said: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    all: VecDeque<Message>,
    /// A thread says it.
    has_thread: bool,
}

/// `FDSTORE=1` with a descriptor, or `FDSTOREREMOVE=1` without one.
#[derive(Debug)]
struct Message {
    name: String,
    fd: Option<OwnedFd>,
}

impl Later {
    pub(super) fn new(manager: Arc<Manager>) -> Self {
        Self {
            manager,
            ..Self::default()
        }
    }

    /// Whether anybody hears it.
    pub(super) fn is_heard(&self) -> bool {
        self.manager.listens()
    }

    /// Has the manager keep this by that name.
    ///
    /// # Errors
    /// It does not, and will not: the system's reason.
    pub(super) fn keep(self: &Arc<Self>, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.say(name, Some(fd))
    }

    /// Has the manager forget what has that name.
    ///
    /// # Errors
    /// It does not, and will not: the system's reason.
    pub(super) fn forget(self: &Arc<Self>, name: &str) -> io::Result<()> {
        let mut queue = self.queue();
        let mut all = queue.all.iter();
        let unsaid = all.position(|message| message.fd.is_some() && message.name == name);
        let unsaid = unsaid.and_then(|at| queue.all.remove(at));
        drop(queue);
        match unsaid {
            // NB: closed here, behind the lock.
            Some(_) => Ok(()),
            None => self.say(name, None),
        }
    }

    /// Waits until all is said, for so long at most. Whether it is.
    pub(super) fn settle(&self, within: Duration) -> bool {
        let queue = self.queue();
        let said = self
            .is_said
            .wait_timeout_while(queue, within, |queue| !queue.all.is_empty());
        let (queue, _) = said.unwrap_or_else(PoisonError::into_inner);
        queue.all.is_empty()
    }

    fn say(self: &Arc<Self>, name: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut queue = self.queue();
        if queue.all.is_empty() {
            match self.manager.send(&lines(name, fd.is_some()), fd) {
                Err(error) if is_full(&error) => {}
                said => return said,
            }
        }
        if queue.all.len() >= MOST {
            return Err(io::Error::other(format!("{MOST} messages wait for it")));
        }
        let message = Message {
            name: name.to_owned(),
            fd: fd.map(|fd| fd.try_clone_to_owned()).transpose()?,
        };
        if !queue.has_thread {
            let own = Arc::clone(self);
            let thread = thread::Builder::new().name("vnplug-keeps".into());
            thread.spawn(move || own.run())?;
            queue.has_thread = true;
        }
        queue.all.push_back(message);
        Ok(())
    }

    /// Says what waits, until nothing does.
    fn run(&self) {
        let mut pause = AGAIN;
        loop {
            let mut queue = self.queue();
            let Some(first) = queue.all.front() else {
                queue.has_thread = false;
                self.is_said.notify_all();
                return;
            };
            let fd = first.fd.as_ref().map(AsFd::as_fd);
            let said = self.manager.send(&lines(&first.name, fd.is_some()), fd);
            if said.as_ref().is_err_and(is_full) {
                drop(queue);
                thread::sleep(pause);
                pause = (2 * pause).min(SELDOM);
                continue;
            }
            pause = AGAIN;
            let first = queue.all.pop_front();
            // NB: what follows waits: for the log, and for the kernel, which takes a while to close a ring.
            drop(queue);
            if let (Err(error), Some(first)) = (said, &first) {
                super::not_heard(&first.name, first.fd.is_some(), &error);
            }
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the manager is told.
fn lines(name: &str, is_kept: bool) -> String {
    match is_kept {
        // Not watched by the manager: an interface that goes down makes its socket report an error.
        true => format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"),
        false => format!("FDSTOREREMOVE=1\nFDNAME={name}"),
    }
}

/// Messages that wait at most: each may have a descriptor.
const MOST: usize = 4_096;
/// How soon it is tried again where there was no room, and how seldom if there is none for a while.
const AGAIN: Duration = Duration::from_millis(2);
const SELDOM: Duration = Duration::from_millis(100);

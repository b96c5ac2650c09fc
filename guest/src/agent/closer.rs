//! Closing what an application has had its hands on, in a thread that may be lost.
//!
//! Descriptors that an application sent and nobody took are dropped with its socket, and to drop one
//! may take as long as it likes (`SO_LINGER`, a file of a FUSE). So each user's are closed by a thread
//! of its own, made when there is something to close; the agent itself never waits for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Closes descriptors of one user, one after the other. A clone is the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Closer {
    /// To its thread, if there is one.
    line: Arc<Mutex<Option<Sender<OwnedFd>>>>,
    /// Descriptors that are not closed yet.
    open: Arc<AtomicUsize>,
}

/// A descriptor that is closed by its user's [`Closer`].
#[derive(Debug)]
pub(super) struct PeerFd {
    fd: Option<OwnedFd>,
    closer: Closer,
}

impl Closer {
    /// Closes a descriptor soon. Never blocks.
    pub(super) fn close(&self, fd: OwnedFd) {
        // Relaxed: only a count.
        self.open.fetch_add(1, Ordering::Relaxed);
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = match &*line {
            Some(line) => line.clone(),
            None => {
                let (sender, fds) = channel();
                let own = self.clone();
                let thread = std::thread::Builder::new().name("vnplug-close".into());
                if let Err(error) = thread.stack_size(STACK).spawn(move || run(&own, &fds)) {
                    log::warn!("no thread to close with: {error}");
                    // Held rather than waited for.
                    std::mem::forget(fd);
                    return;
                }
                line.insert(sender).clone()
            }
        };
        if let Err(kept) = sender.send(fd) {
            // Its thread panicked.
            std::mem::forget(kept);
        }
    }

    /// How many descriptors are not closed yet.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

/// The thread: ends when nothing came for a while.
fn run(own: &Closer, fds: &Receiver<OwnedFd>) {
    loop {
        let waited = fds.recv_timeout(IDLE);
        let next = waited.or_else(|_| {
            // Nobody sends while this is held.
            let mut line = own.line.lock().unwrap_or_else(PoisonError::into_inner);
            let last = fds.try_recv();
            if last.is_err() {
                *line = None;
            }
            last
        });
        let Ok(fd) = next else {
            return;
        };
        drop(fd);
        own.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl PeerFd {
    pub(super) fn new(fd: OwnedFd, closer: Closer) -> Self {
        let fd = Some(fd);
        Self { fd, closer }
    }

    /// Who closes it.
    pub(super) fn closer(&self) -> &Closer {
        &self.closer
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let fd = self.fd.as_ref();
        fd.expect("only drop takes it").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.closer.close(fd);
        }
    }
}

/// How long a thread waits for more to close.
const IDLE: Duration = Duration::from_millis(200);
/// It calls close and little else.
const STACK: usize = 64 << 10;

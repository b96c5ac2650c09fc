//! What a thread of its own does for the control thread: it takes long, or may block on something of the operator's.

use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use vnplug_os::event;

/// Threads that do one thing each, and what they made.
pub(super) struct Elsewhere<T> {
    tell: Sender<T>,
    done: Receiver<T>,
}

impl<T: Send + 'static> Elsewhere<T> {
    pub(super) fn new() -> Self {
        let (tell, done) = channel();
        Self { tell, done }
    }

    /// Starts a thread. What it makes is [`next`](Self::next) once the bell rang; somebody waits for it, so if it panics,
    /// which is a bug, that is what `failed` says.
    pub(super) fn begin(
        &self,
        bell: &Arc<OwnedFd>,
        work: impl FnOnce() -> T + Send + 'static,
        failed: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<()> {
        let (tell, bell) = (self.tell.clone(), Arc::clone(bell));
        let thread = std::thread::Builder::new().name("vnplug-reload".into());
        let run = move || {
            let made = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| failed());
            // The loop is there as long as the process.
            let _ = tell.send(made);
            event::ring(&bell);
        };
        thread.spawn(run).map(drop)
    }

    /// What was made next.
    pub(super) fn next(&self) -> Option<T> {
        self.done.try_recv().ok()
    }
}

/// Starts a thread that ends what is there no more, and for which nobody waits.
pub(super) fn part(work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name("vnplug-parting".into());
    if let Err(error) = thread.spawn(work) {
        // It was, with the work.
        log::error!(target: "source", "the control thread closes what is there no more: {error}");
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

    use super::*;

    #[test]
    fn whoever_waits_hears_of_a_thread_that_panicked() {
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let elsewhere = Elsewhere::new();
        let heard = || {
            poll(&mut [PollFd::new(&*bell, PollFlags::IN)], None).unwrap();
            event::clear(&bell);
            elsewhere.next().unwrap()
        };
        elsewhere.begin(&bell, || "made", || "failed").unwrap();
        assert_eq!(heard(), "made");
        elsewhere
            .begin(&bell, || panic!("a bug"), || "failed")
            .unwrap();
        assert_eq!(heard(), "failed");
    }
}

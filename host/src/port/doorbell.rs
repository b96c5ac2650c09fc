//! How a sleeping reader is woken, without ever blocking the thread that wakes it (R8).
//!
//! A process gets the read end of a pipe. The write end is another open file description with
//! flags of its own, so nothing a reader does to its end (clearing `O_NONBLOCK`, filling the pipe
//! by a re-opened descriptor) can make our write block; a shared eventfd does not have this
//! property. A VM is woken by its control channel or doorbell device, which another thread writes:
//! here only a flag is set and that thread's private eventfd is rung.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sys::event;

/// The way to one reader.
#[derive(Debug, Clone)]
pub enum Doorbell {
    /// The write end of the reader's pipe, non-blocking.
    Pipe(Arc<OwnedFd>),
    /// A VM's port.
    Vm(VmBell),
    /// Nobody sleeps there.
    Silent,
}

/// The flag of one port of a VM and the eventfd of the thread that looks at it.
#[derive(Debug, Clone)]
pub struct VmBell {
    pending: Arc<AtomicBool>,
    thread: Arc<OwnedFd>,
}

impl Doorbell {
    /// A pipe: the doorbell, and the end to give to the reader.
    ///
    /// # Errors
    /// The system's, when descriptors are short.
    pub fn pipe() -> std::io::Result<(Self, OwnedFd)> {
        use rustix::pipe::{PipeFlags, pipe_with};
        let (read, write) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        Ok((Self::Pipe(Arc::new(write)), read))
    }

    /// Rings. Never blocks; a bell that is ringing already stays so.
    #[inline]
    pub fn ring(&self) {
        match self {
            // A full pipe (EAGAIN) is a bell that rings; a closed one (EPIPE) has no reader left,
            // which the control connection tells us too.
            Self::Pipe(write) => {
                let _ = rustix::io::write(write, &[1]);
            }
            Self::Vm(bell) => bell.ring(),
            Self::Silent => {}
        }
    }
}

impl VmBell {
    /// A bell whose ringing makes `thread`, an eventfd private to the daemon, readable.
    pub fn new(thread: Arc<OwnedFd>) -> Self {
        Self {
            pending: Arc::new(AtomicBool::new(false)),
            thread,
        }
    }

    fn ring(&self) {
        // AcqRel: pairs with take; whoever sees the flag sees what was published before.
        if !self.pending.swap(true, Ordering::AcqRel) {
            event::ring(&self.thread);
        }
    }

    /// Whether somebody has a clone of it.
    pub fn is_held(&self) -> bool {
        Arc::strong_count(&self.pending) > 1
    }

    /// Whether it was rung since the last call.
    pub fn take(&self) -> bool {
        self.pending.swap(false, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_that_nobody_drains_never_blocks_the_ringer() {
        let (bell, read) = Doorbell::pipe().unwrap();
        // The reader makes its end blocking and refuses to read.
        rustix::io::ioctl_fionbio(&read, false).unwrap();
        for _ in 0..100_000 {
            bell.ring();
        }
        drop(read);
        bell.ring();
    }

    #[test]
    fn a_vm_bell_rings_the_thread_once_until_taken() {
        let eventfd = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let bell = VmBell::new(Arc::new(eventfd));
        let doorbell = Doorbell::Vm(bell.clone());
        doorbell.ring();
        doorbell.ring();
        let mut count = [0; 8];
        rustix::io::read(&bell.thread, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        assert!(bell.take() && !bell.take());
    }
}

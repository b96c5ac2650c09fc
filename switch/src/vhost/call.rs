//! Calls a guest: tells it that a ring has something for it.
//!
//! QEMU's call is an eventfd. Its flags are the peer's, too, who could make a write to it block by
//! filling it, which no honest guest does. So the thread that forwards says when it is in a write
//! ([`Calls`]), and the entrance's thread empties eventfds that are full then: the write ends
//! ([`event::drain`]), and the port is closed. User-mode Linux's call is one end of a pair of stream
//! sockets, of which it reads whole eight bytes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use vnplug_os::closer::PeerFd;
use vnplug_os::event;

/// How one ring's guest is called.
#[derive(Debug)]
pub(crate) struct Call {
    fd: PeerFd,
    is_socket: bool,
    is_gone: AtomicBool,
    /// It was found full.
    was_full: AtomicBool,
}

/// All calls of a switch.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// The thread that forwards is in one.
    is_calling: AtomicBool,
    all: Mutex<Vec<Weak<Call>>>,
}

impl Call {
    /// Calls the guest.
    #[inline]
    pub(crate) fn ring(&self, calls: &Calls) {
        if !self.is_socket {
            // Relaxed: who looks looks again.
            calls.is_calling.store(true, Ordering::Relaxed);
            event::ring(&self.fd);
            calls.is_calling.store(false, Ordering::Relaxed);
            return;
        }
        if self.is_gone.load(Ordering::Relaxed) {
            return;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(&self.fd, &1_u64.to_ne_bytes(), flags) {
            // What is there already says the same.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.is_gone.store(true, Ordering::Relaxed),
        }
    }

    /// Whether it was full when it was to be used.
    pub(crate) fn was_full(&self) -> bool {
        self.was_full.load(Ordering::Relaxed)
    }

    fn is_full(&self) -> bool {
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        let polled = poll(&mut fds, Some(&now)).is_ok();
        polled && !self.is_socket && !fds[0].revents().contains(PollFlags::OUT)
    }
}

impl Calls {
    /// A call by this descriptor; `None` if it is of another kind.
    pub(crate) fn add(&self, fd: PeerFd) -> Option<Arc<Call>> {
        let is_socket = event::is_socket(&fd);
        if !is_socket && !event::is_eventfd(&fd) {
            return None;
        }
        let call = Arc::new(Call {
            fd,
            is_socket,
            is_gone: AtomicBool::new(false),
            was_full: AtomicBool::new(false),
        });
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == all.capacity() {
            all.retain(|it| it.strong_count() > 0);
        }
        all.push(Arc::downgrade(&call));
        Some(call)
    }

    /// Ends a write that a peer makes block.
    pub(crate) fn unblock(&self) {
        if !self.is_calling.load(Ordering::Relaxed) {
            return;
        }
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for call in all.iter().filter_map(Weak::upgrade) {
            if call.is_full() {
                call.was_full.store(true, Ordering::Relaxed);
                event::drain(&call.fd);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_stream_socket_has_whole_calls_and_a_full_or_closed_one_stops_nobody() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let calls = Calls::default();
        let call = calls.add(PeerFd::alone(ours.into())).unwrap();
        for _ in 0..10_000 {
            call.ring(&calls);
        }
        let mut bytes = [0; 8];
        theirs.read_exact(&mut bytes).unwrap();
        assert_eq!(bytes, 1_u64.to_ne_bytes());
        theirs.set_nonblocking(true).unwrap();
        let mut rest = Vec::new();
        let _ = theirs.read_to_end(&mut rest);
        assert_eq!(rest.len() % 8, 0);
        drop(theirs);
        call.ring(&calls);
        assert!(call.is_gone.load(Ordering::Relaxed));
    }

    #[test]
    fn a_call_that_blocks_is_seen_and_ended() {
        // The control: it blocks.
        let fd = eventfd(0, EventfdFlags::empty()).unwrap();
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let calls = Calls::default();
        let call = calls.add(PeerFd::alone(fd)).unwrap();
        let is_calling = || calls.is_calling.load(Ordering::Relaxed);
        std::thread::scope(|scope| {
            let blocked = scope.spawn(|| call.ring(&calls));
            vnplug_testing::eventually("it is in the call", is_calling);
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!blocked.is_finished() && !call.was_full());
            calls.unblock();
            blocked.join().unwrap();
        });
        assert!(call.was_full() && !is_calling());
    }

    #[test]
    fn calls_that_are_gone_are_forgotten() {
        let calls = Calls::default();
        for _ in 0..1_000 {
            let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            assert!(calls.add(PeerFd::alone(fd)).is_some());
        }
        assert!(calls.all.lock().unwrap().len() < 16);
    }

    #[test]
    fn a_file_is_no_call() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = PeerFd::alone(OwnedFd::from(file));
        assert!(Calls::default().add(fd).is_none());
    }
}

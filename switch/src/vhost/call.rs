//! Calls a guest: tells it that a ring has something for it.
//!
//! QEMU's call is an eventfd, User-mode Linux's one end of a pair of stream sockets, of which it reads
//! whole eight bytes. Both are shared with the peer, who can make a write take long: it can fill an
//! eventfd that it made block, or watch it by a million epoll instances, each of which is woken.
//!
//! - Calls of a user that is not trusted are made by a thread of that user's own ([`Caller`]), as its
//!   descriptors are closed by one. Who makes it hang waits for its own calls only.
//! - Those of root's and the daemon's own front-ends are made at once by the threads that forward,
//!   which say when they are in a write ([`Calls`]). The entrance's thread empties eventfds that are full
//!   then, so that a faulty front-end costs its port only: the write ends ([`event::drain`]), and the
//!   port is closed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketType, send, sockopt};
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
    /// Who calls, if that is not the thread that forwards.
    caller: Option<Caller>,
    /// The caller has it, and has not begun.
    is_asked: AtomicBool,
}

/// All calls of a switch.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Threads that forward and are in one.
    calling: AtomicU32,
    all: Mutex<Vec<Weak<Call>>>,
}

/// Calls the guests of one user, by a thread that may hang. Clones share the thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller(Arc<Lane>);

#[derive(Debug, Default)]
struct Lane {
    queue: Mutex<Queue>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Arc<Call>>,
    has_thread: bool,
    /// When the call began that is under way.
    since: Option<Instant>,
}

impl Caller {
    fn ask(&self, call: &Arc<Call>) {
        // AcqRel: pairs with itself in `run`; what the guest is called for was written before.
        if call.is_asked.swap(true, Ordering::AcqRel) {
            return;
        }
        let lane = &self.0;
        let mut queue = lane.queue();
        queue.waiting.push_back(Arc::clone(call));
        if queue.has_thread {
            drop(queue);
            lane.news.notify_one();
            return;
        }
        let own = Arc::clone(lane);
        let spawned = std::thread::Builder::new()
            .name("vnplug-call".into())
            .stack_size(STACK)
            .spawn(move || own.run());
        match spawned {
            Ok(_) => queue.has_thread = true,
            // It waits until the next one comes.
            Err(error) => log::error!(target: "switch", "no thread to call guests with: {error}"),
        }
    }

    /// Whether a call has been under way for long: its guests are to be closed.
    pub(crate) fn is_stuck(&self) -> bool {
        let since = self.0.queue().since;
        since.is_some_and(|since| since.elapsed() > LONGEST)
    }
}

impl Lane {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut queue = self.queue();
        loop {
            let Some(call) = queue.waiting.pop_front() else {
                let waited = self.news.wait_timeout(queue, IDLE);
                let (again, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                queue = again;
                if timeout.timed_out() && queue.waiting.is_empty() {
                    queue.has_thread = false;
                    return;
                }
                continue;
            };
            queue.since = Some(Instant::now());
            drop(queue);
            // AcqRel: pairs with itself in `ask`. Before the call: what is published then is called for.
            call.is_asked.swap(false, Ordering::AcqRel);
            call.make();
            drop(call);
            queue = self.queue();
            queue.since = None;
        }
    }
}

impl Call {
    /// Calls the guest.
    #[inline]
    pub(crate) fn ring(self: &Arc<Self>, calls: &Calls) {
        if let Some(caller) = &self.caller {
            caller.ask(self);
            return;
        }
        if self.was_full() {
            return;
        }
        if self.is_socket {
            return self.make();
        }
        // Relaxed: who looks looks again.
        calls.calling.fetch_add(1, Ordering::Relaxed);
        self.make();
        calls.calling.fetch_sub(1, Ordering::Relaxed);
    }

    fn make(&self) {
        if !self.is_socket {
            event::ring(&self.fd);
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
        // NB: a socket is not even asked, for that may take its lock.
        if self.is_socket {
            return false;
        }
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let mut fds = [PollFd::new(&self.fd, PollFlags::OUT)];
        poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().contains(PollFlags::OUT)
    }
}

impl Calls {
    /// A call by this descriptor, made by this caller; `None` if it is of another kind.
    pub(crate) fn add(&self, fd: PeerFd, caller: Option<Caller>) -> Option<Arc<Call>> {
        let is_socket = event::is_socket(&fd);
        let is_sound = match is_socket {
            true => is_unix_stream(&fd),
            false => event::is_eventfd(&fd),
        };
        if !is_sound {
            return None;
        }
        let call = Arc::new(Call {
            fd,
            is_socket,
            is_gone: AtomicBool::new(false),
            was_full: AtomicBool::new(false),
            caller,
            is_asked: AtomicBool::new(false),
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
        if self.calling.load(Ordering::Relaxed) == 0 {
            return;
        }
        let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        for call in all.iter().filter_map(Weak::upgrade) {
            if call.caller.is_none() && call.is_full() {
                call.was_full.store(true, Ordering::Relaxed);
                event::drain(&call.fd);
            }
        }
    }
}

/// No other kind of socket: to send to one of TCP can take as long as its peer likes.
fn is_unix_stream(fd: &PeerFd) -> bool {
    let of = |fd| {
        Some((
            sockopt::socket_domain(fd).ok()?,
            sockopt::socket_type(fd).ok()?,
        ))
    };
    of(fd) == Some((AddressFamily::UNIX, SocketType::STREAM))
}

/// A thread that calls nobody for so long ends.
const IDLE: Duration = Duration::from_secs(2);
/// A call takes microseconds.
const LONGEST: Duration = Duration::from_secs(1);
const STACK: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_stream_socket_has_whole_calls_and_a_full_or_closed_one_stops_nobody() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let calls = Calls::default();
        let call = calls.add(PeerFd::alone(ours.into()), None).unwrap();
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
        let call = calls.add(PeerFd::alone(fd), None).unwrap();
        let is_calling = || calls.calling.load(Ordering::Relaxed) > 0;
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
            assert!(calls.add(PeerFd::alone(fd), None).is_some());
        }
        assert!(calls.all.lock().unwrap().len() < 16);
    }

    #[test]
    fn neither_a_file_nor_another_kind_of_socket_is_a_call() {
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let datagrams = OwnedFd::from(UnixDatagram::unbound().unwrap());
        let tcp = OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
        for fd in [file, datagrams, tcp] {
            assert!(Calls::default().add(PeerFd::alone(fd), None).is_none());
        }
    }

    #[test]
    fn a_call_of_a_stranger_that_blocks_holds_up_its_own_calls_alone() {
        let calls = Calls::default();
        let made = |count: u64, caller: &Caller| {
            let fd = eventfd(0, EventfdFlags::empty()).unwrap();
            rustix::io::write(&fd, &count.to_ne_bytes()).unwrap();
            let theirs = fd.try_clone().unwrap();
            let call = calls.add(PeerFd::alone(fd), Some(caller.clone()));
            (call.unwrap(), theirs)
        };
        let [mut hostile, honest] = [(); 2].map(|()| Caller::default());
        let (full, theirs) = made(u64::MAX - 1, &hostile);
        let (other, at_other) = made(1, &honest);
        full.ring(&calls);
        vnplug_testing::eventually("it is stuck", || hostile.is_stuck());
        // However often, and without the control, which ends what blocks.
        (0..1000).for_each(|_| full.ring(&calls));
        assert_eq!(hostile.0.queue().waiting.len(), 1);
        other.ring(&calls);
        let mut count = [0; 8];
        vnplug_testing::eventually("the other one is called", || {
            rustix::io::read(&at_other, &mut count).unwrap();
            let is_called = u64::from_ne_bytes(count) > 0;
            rustix::io::write(&at_other, &1_u64.to_ne_bytes()).unwrap();
            is_called
        });
        assert!(!honest.is_stuck());
        // It goes on when the peer reads.
        rustix::io::read(&theirs, &mut count).unwrap();
        vnplug_testing::eventually("it goes on", || !hostile.is_stuck());
        hostile = Caller::default();
        assert!(!hostile.is_stuck());
    }
}

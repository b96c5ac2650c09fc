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
//! - A call by a socket that the guest does not read is made again ([`super::remind`]): by the user's own thread if the user is not
//!   trusted, else by the reminder's.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketType, send, sockopt};
use vnplug_os::closer::PeerFd;
use vnplug_os::{event, socket};

use super::remind::{Mark, Reminder};

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
    /// What the caller has of it, and has not begun: [`NOTHING`], [`FIRST`], [`AGAIN`].
    asked: AtomicU8,
    /// Where it is noted when it was made, if it is made again.
    mark: Option<Mark>,
}

/// All calls of a switch.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    /// Threads that forward and are in one.
    calling: AtomicU32,
    all: Mutex<Vec<Weak<Call>>>,
    reminder: Reminder,
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
        if call.asked.swap(FIRST, Ordering::AcqRel) == NOTHING {
            self.take(call);
        }
    }

    /// Nothing is asked if it has one of these to make anyhow.
    fn ask_again(&self, call: &Arc<Call>) {
        let (acq_rel, relaxed) = (Ordering::AcqRel, Ordering::Relaxed);
        let asked = &call.asked;
        let is_new = asked.compare_exchange(NOTHING, AGAIN, acq_rel, relaxed);
        if is_new.is_ok() {
            self.take(call);
        }
    }

    fn take(&self, call: &Arc<Call>) {
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

    /// Whether it is the same thread.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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
            let asked = call.asked.swap(NOTHING, Ordering::AcqRel);
            call.make(asked != AGAIN);
            drop(call);
            queue = self.queue();
            queue.since = None;
        }
    }
}

impl Call {
    pub(super) fn new(
        fd: PeerFd,
        is_socket: bool,
        caller: Option<Caller>,
        mark: Option<Mark>,
    ) -> Self {
        Self {
            fd,
            is_socket,
            is_gone: AtomicBool::new(false),
            was_full: AtomicBool::new(false),
            caller,
            asked: AtomicU8::new(NOTHING),
            mark,
        }
    }

    /// Where it is noted when it was made.
    #[cfg(test)]
    pub(super) fn mark(&self) -> Option<&Mark> {
        self.mark.as_ref()
    }

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
            return self.make(true);
        }
        // Relaxed: who looks looks again.
        calls.calling.fetch_add(1, Ordering::Relaxed);
        self.make(true);
        calls.calling.fetch_sub(1, Ordering::Relaxed);
    }

    /// Makes one again that was not read.
    pub(super) fn make_again(self: &Arc<Self>) {
        match &self.caller {
            Some(caller) => caller.ask_again(self),
            None => self.make(false),
        }
    }

    /// Whether the guest has read all calls, or is gone. No eventfd is asked.
    ///
    /// NB: this takes no lock of the socket, which its peer could hold: `SIOCOUTQ` reads how much memory what was sent has
    /// (`sk_wmem_alloc`).
    pub(super) fn is_read(&self) -> bool {
        !self.is_socket || self.is_gone.load(Ordering::Relaxed) || socket::is_read(&self.fd)
    }

    fn make(&self, is_first: bool) {
        if !self.is_socket {
            event::ring(&self.fd);
            return;
        }
        if self.is_gone.load(Ordering::Relaxed) {
            return;
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match send(&self.fd, &1_u64.to_ne_bytes(), flags) {
            Ok(_) => match &self.mark {
                Some(mark) if is_first => mark.note(),
                Some(mark) => mark.count(),
                None => {}
            },
            // What is there already says the same.
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.is_gone.store(true, Ordering::Relaxed),
        }
    }

    /// Whether it was full when it was to be used.
    pub(crate) fn was_full(&self) -> bool {
        self.was_full.load(Ordering::Relaxed)
    }

    fn is_full(&self) -> bool {
        // NB: no socket is polled, for that may take its lock.
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
    /// None yet; those that are made again are counted there.
    pub(crate) fn counting(again: Arc<AtomicU64>) -> Self {
        Self {
            reminder: Reminder::counting(again),
            ..Self::default()
        }
    }

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
        let call = Arc::new_cyclic(|call| {
            let reminder = is_socket.then_some(&self.reminder);
            let mark = reminder.and_then(|it| it.mark(Weak::clone(call), caller.as_ref()));
            Call::new(fd, is_socket, caller, mark)
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

/// The caller has nothing of a call; it is to make it; it is to make it again, as the guest has not read it.
const NOTHING: u8 = 0;
const FIRST: u8 = 1;
const AGAIN: u8 = 2;
/// After this time a thread that calls nobody ends.
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

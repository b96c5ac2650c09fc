//! Closes descriptors that a peer could touch, in a thread that may hang.
//!
//! A peer can make the drop of a file's last reference as slow as it likes. A socket with
//! descriptors that nobody took drops those (one of them with `SO_LINGER`, or a file of a FUSE). A
//! socket that is watched wakes all watchers. One in an epoll instance waits for the holder of that
//! instance. Neither `O_NONBLOCK` nor an earlier look prevents that. So no thread that others need
//! closes such a descriptor: a thread of the peer's owner closes a [`PeerFd`]. It starts when there
//! is something to close and ends when there is nothing. An owner that makes it hang blocks only its
//! own descriptors.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Closes descriptors of one owner, one after the other. Clones share the thread.
#[derive(Debug, Clone, Default)]
pub struct Closer(Arc<Lane>);

/// A descriptor that is closed by its owner's [`Closer`].
#[derive(Debug)]
pub struct PeerFd {
    fd: Option<OwnedFd>,
    closer: Closer,
    /// Others have a copy of it that is to live on.
    is_copy: bool,
}

/// The closers of all owners.
#[derive(Debug)]
pub struct Closers<Owner>(HashMap<Owner, Closer>);

#[derive(Debug, Default)]
struct Lane {
    queue: Mutex<Queue>,
    news: Condvar,
    /// Descriptors that are not closed yet, the one under way included.
    open: AtomicUsize,
}

#[derive(Debug, Default)]
struct Queue {
    /// With whether its peer is to be told first.
    waiting: VecDeque<(OwnedFd, bool)>,
    has_thread: bool,
}

impl Closer {
    /// Closes a descriptor of ours soon; a socket's peer learns it. Never blocks.
    pub fn close(&self, fd: OwnedFd) {
        self.take(fd, true);
    }

    /// Closes soon what a peer has a copy of by now, which goes on to serve the peer. Never blocks.
    pub fn let_go(&self, fd: OwnedFd) {
        self.take(fd, false);
    }

    fn take(&self, fd: OwnedFd, is_shut: bool) {
        let lane = &self.0;
        // Relaxed: only a count.
        lane.open.fetch_add(1, Ordering::Relaxed);
        let mut queue = lane.queue();
        queue.waiting.push_back((fd, is_shut));
        if queue.has_thread {
            lane.news.notify_one();
            return;
        }
        let own = Arc::clone(lane);
        let spawned = std::thread::Builder::new()
            .name("vnplug-close".into())
            .stack_size(STACK)
            .spawn(move || own.run());
        match spawned {
            Ok(_) => queue.has_thread = true,
            // It stays open until the next one comes.
            Err(error) => log::error!(target: "control", "no thread to close with: {error}"),
        }
    }

    /// How many descriptors are not closed yet.
    pub fn open(&self) -> usize {
        self.0.open.load(Ordering::Relaxed)
    }

    /// Somebody can still give it something, or it is not done.
    fn is_used(&self) -> bool {
        Arc::strong_count(&self.0) > 1 || self.open() > 0
    }
}

impl Lane {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut queue = self.queue();
        loop {
            if let Some((fd, is_shut)) = queue.waiting.pop_front() {
                drop(queue);
                if is_shut {
                    // The peer learns it before everything that it left in the socket is closed.
                    let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Both);
                }
                drop(fd);
                self.open.fetch_sub(1, Ordering::Relaxed);
                queue = self.queue();
                continue;
            }
            let waited = self.news.wait_timeout(queue, IDLE);
            let (held, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            queue = held;
            if timeout.timed_out() && queue.waiting.is_empty() {
                queue.has_thread = false;
                return;
            }
        }
    }
}

impl PeerFd {
    /// A descriptor that `closer` is to close.
    pub fn new(fd: OwnedFd, closer: Closer) -> Self {
        Self {
            fd: Some(fd),
            closer,
            is_copy: false,
        }
    }

    /// One that a peer sent: the peer's own copy is not shut.
    pub fn gift(fd: OwnedFd, closer: Closer) -> Self {
        Self {
            fd: Some(fd),
            closer,
            is_copy: true,
        }
    }

    /// Who has it now sees to it that it is closed aside.
    pub fn into_owned(mut self) -> OwnedFd {
        self.fd.take().expect("only drop takes it, too")
    }

    /// One with a thread of its own.
    pub fn alone(fd: OwnedFd) -> Self {
        Self::new(fd, Closer::default())
    }

    /// Who closes it.
    pub fn closer(&self) -> &Closer {
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
            self.closer.take(fd, !self.is_copy);
        }
    }
}

impl<Owner> Default for Closers<Owner> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<Owner: Clone + Eq + Hash> Closers<Owner> {
    /// The closer of an owner.
    pub fn of(&mut self, owner: &Owner) -> Closer {
        if self.0.len() >= MANY && !self.0.contains_key(owner) {
            self.0.retain(|_, closer| closer.is_used());
        }
        self.0.entry(owner.clone()).or_default().clone()
    }
}

/// How long a thread waits for more to close.
const IDLE: Duration = Duration::from_millis(200);
/// It calls close and little else.
const STACK: usize = 64 << 10;
/// From this number of owners on, unused closers are forgotten.
const MANY: usize = 256;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use vnplug_testing::eventually;

    use super::*;

    #[test]
    fn what_is_dropped_is_shut_and_closed_and_the_thread_ends() {
        let closer = Closer::default();
        for _ in 0..3 {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            drop(PeerFd::new(ours.into(), closer.clone()));
            assert_eq!(std::io::Read::read(&mut theirs, &mut [0]).unwrap(), 0);
        }
        eventually("all are closed", || closer.open() == 0);
        eventually("the thread ends", || !closer.is_used());
    }

    #[test]
    fn what_a_peer_has_a_copy_of_goes_on_to_serve_it() {
        let closer = Closer::default();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut copy = theirs.try_clone().unwrap();
        closer.let_go(theirs.into());
        eventually("ours is closed", || closer.open() == 0);
        std::io::Write::write_all(&mut &ours, b"x").unwrap();
        assert_eq!(std::io::Read::read(&mut copy, &mut [0]).unwrap(), 1);
    }

    #[test]
    fn owners_that_are_gone_are_forgotten() {
        let mut closers = Closers::default();
        let kept = closers.of(&7);
        for uid in 1_000..3_000 {
            closers.of(&uid);
        }
        assert!(closers.0.len() <= MANY + 1);
        assert!(Arc::ptr_eq(&kept.0, &closers.of(&7).0));
    }
}

//! How a sleeping reader is woken, without ever blocking the thread that wakes it (R8).
//!
//! A process gets one end of a socket pair. A pipe is no choice: its reader holds the pipe's lock
//! while the kernel copies into its memory, and a page fault there that is never answered
//! (userfaultfd, a file of a FUSE) blocks the writer at the other end, whatever `O_NONBLOCK` says.
//! A socket's sender takes no lock that a reader holds over a fault. An eventfd is one file for
//! both sides: flags and the last reference are shared. Our end is shut for reading before the
//! other one is given away, so that a reader can queue nothing here that would have to be dropped.
//!
//! The cost of a wake-up grows with the number of watchers, and a reader may have many (a million
//! take a tenth of a second). So a bell that is slow, by the ringing thread's CPU time, is rung by
//! a thread of its own from then on.
//!
//! The ports of a bundle share one socket, and a [`Board`](vnplug_ring::news::Board) that says which of them have news.
//!
//! A VM is woken by its control channel or doorbell device, which another thread writes: here only a
//! flag is set and that thread's private eventfd is rung.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketFlags, SocketType};
use rustix::net::{send, shutdown, socketpair};
use rustix::time::{ClockId, clock_gettime};

use vnplug_os::closer::{Closer, PeerFd};
use vnplug_os::event;
use vnplug_ring::{Region, news};

/// The way to one reader.
#[derive(Debug, Clone)]
pub enum Doorbell {
    /// A reader's process.
    Process(Arc<ProcessBell>),
    /// One of many ports of a process.
    OfMany(BundleBell),
    /// A VM's port.
    Vm(VmBell),
    /// Nobody sleeps there.
    Silent,
}

/// Our end of a reader's socket, and whether ringing takes long.
#[derive(Debug)]
pub struct ProcessBell {
    socket: Arc<PeerFd>,
    /// How many further rings are timed by the CPU's clock, because one took long.
    suspected: AtomicU32,
    /// How many of those took long.
    slow: AtomicU32,
    /// To the thread that rings instead.
    helper: OnceLock<SyncSender<()>>,
}

/// What wakes the ports of a process that share it.
#[derive(Debug, Clone)]
pub struct SharedBell {
    bell: Arc<ProcessBell>,
    board: Option<Arc<news::Board<Region>>>,
}

/// The bell of one of them, and its place on the board.
#[derive(Debug, Clone)]
pub struct BundleBell {
    bell: Arc<ProcessBell>,
    board: Arc<news::Board<Region>>,
    place: usize,
}

/// The flag of one port of a VM.
#[derive(Debug, Clone)]
pub struct VmBell {
    pending: Arc<AtomicBool>,
    board: Arc<Board>,
}

/// The bells of one VM: whether any of them was rung, and the eventfd of the thread that looks at them.
/// A VM whose bells are silent costs that thread one look, however many there are.
#[derive(Debug)]
pub struct Board {
    rung: AtomicBool,
    thread: Arc<OwnedFd>,
}

impl Doorbell {
    /// A process's doorbell, and the end to give to the reader; `closer` closes ours.
    ///
    /// # Errors
    /// The system's, when descriptors are short.
    pub fn process(closer: Closer) -> std::io::Result<(Self, OwnedFd)> {
        let (bell, theirs) = SharedBell::new(closer)?;
        Ok((Self::Process(bell.bell), theirs))
    }

    /// Rings. Never blocks; a bell that is ringing already stays so.
    #[inline]
    pub fn ring(&self) {
        match self {
            Self::Process(bell) => bell.ring(),
            Self::OfMany(BundleBell { bell, board, place }) => {
                // Who told before in the same word rings, or has.
                if board.tell(*place) {
                    bell.ring();
                }
            }
            Self::Vm(bell) => bell.ring(),
            Self::Silent => {}
        }
    }
}

impl SharedBell {
    /// A process's, without a board, and the end to give to the reader; `closer` closes ours.
    ///
    /// # Errors
    /// The system's, when descriptors are short.
    pub fn new(closer: Closer) -> std::io::Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        shutdown(&ours, Shutdown::Read)?;
        let bell = ProcessBell {
            socket: Arc::new(PeerFd::new(ours, closer)),
            suspected: AtomicU32::new(0),
            slow: AtomicU32::new(0),
            helper: OnceLock::new(),
        };
        let (bell, board) = (Arc::new(bell), None);
        Ok((Self { bell, board }, theirs))
    }

    /// Has the reader learn from a board in this memory, which it maps too, who rang.
    pub fn set_board(&mut self, memory: Region) {
        self.board = Some(Arc::new(news::Board::new(memory)));
    }

    /// Whether it has one.
    pub fn has_board(&self) -> bool {
        self.board.is_some()
    }

    /// That of a port with this place on the board, counted from 1; 0: it has none.
    pub fn of(&self, place: u32) -> Doorbell {
        let at = (place as usize)
            .checked_sub(1)
            .filter(|at| *at < news::PLACES);
        match (at, &self.board) {
            (Some(place), Some(board)) => Doorbell::OfMany(BundleBell {
                bell: Arc::clone(&self.bell),
                board: Arc::clone(board),
                place,
            }),
            _ => Doorbell::Process(Arc::clone(&self.bell)),
        }
    }
}

impl ProcessBell {
    fn ring(&self) {
        if let Some(helper) = self.helper.get() {
            // A full channel is a bell that rings.
            let _ = helper.try_send(());
            return;
        }
        // Relaxed, all of them: a ring that is timed or not changes nothing else.
        if self.suspected.load(Ordering::Relaxed) > 0 {
            return self.ring_timed();
        }
        let begun = Instant::now();
        wake(&self.socket);
        // Wall time means little if threads wait for a CPU.
        if begun.elapsed() >= SLOW {
            self.suspected.store(TIMED, Ordering::Relaxed);
        }
    }

    #[cold]
    fn ring_timed(&self) {
        let begun = cpu_time();
        wake(&self.socket);
        let took = cpu_time().saturating_sub(begun);
        self.suspected.fetch_sub(1, Ordering::Relaxed);
        if took >= SLOW && self.slow.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_SLOW {
            self.help();
        }
    }

    /// Starts a thread of its own that rings from now on; it ends with the bell.
    fn help(&self) {
        let (helper, rung) = sync_channel(1);
        let socket = Arc::clone(&self.socket);
        let spawned = std::thread::Builder::new()
            .name("vnplug-ring".into())
            .stack_size(64 << 10)
            .spawn(move || {
                while rung.recv().is_ok() {
                    wake(&socket);
                }
            });
        match spawned {
            Ok(_) => {
                log::info!(target: "port", "a reader is slow to wake: a thread of its own does it");
                let _ = self.helper.set(helper);
            }
            Err(error) => log::error!(target: "port", "no thread to ring with: {error}"),
        }
    }
}

/// A full buffer (`EAGAIN`) is a bell that rings; a closed end (`EPIPE`) has no reader left, which the
/// control connection tells us too.
fn wake(socket: &PeerFd) {
    let _ = send(socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
}

fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// A ring that takes longer than this is slow: one or two microseconds are usual.
const SLOW: Duration = Duration::from_micros(200);
/// Rings that are timed after a slow one.
const TIMED: u32 = 16;
/// After this many slow ones the bell gets a thread.
const MAX_SLOW: u32 = 3;

impl Board {
    /// Bells whose ringing makes `thread`, an eventfd private to the daemon, readable.
    pub fn new(thread: Arc<OwnedFd>) -> Arc<Self> {
        let rung = AtomicBool::new(false);
        Arc::new(Self { rung, thread })
    }

    /// Whether one of them was rung since they were taken.
    pub fn is_rung(&self) -> bool {
        // Relaxed: who rings stores this before it writes the eventfd, and the caller has read that.
        self.rung.load(Ordering::Relaxed)
    }

    /// Whether one of them was rung since the last call; which, the bells themselves say afterwards.
    pub fn take(&self) -> bool {
        self.rung.swap(false, Ordering::AcqRel)
    }
}

impl VmBell {
    /// One more bell of a VM.
    pub fn new(board: &Arc<Board>) -> Self {
        Self {
            pending: Arc::new(AtomicBool::new(false)),
            board: Arc::clone(board),
        }
    }

    fn ring(&self) {
        // AcqRel: pairs with take; a thread that sees the flag sees what was published before.
        if !self.pending.swap(true, Ordering::AcqRel) {
            // Release, and after `pending`: who takes this sees that.
            self.board.rung.store(true, Ordering::Release);
            event::ring(&self.board.thread);
        }
    }

    /// Whether a clone of it exists.
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
    fn a_bell_that_nobody_hears_never_blocks_the_ringer() {
        let (bell, theirs) = Doorbell::process(Closer::default()).unwrap();
        // The reader makes its end blocking and refuses to read.
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        for _ in 0..100_000 {
            bell.ring();
        }
        let mut bytes = [0; 4096];
        assert!(rustix::io::read(&theirs, &mut bytes).unwrap() > 100);
        drop(theirs);
        bell.ring();
    }

    #[test]
    fn a_reader_can_send_nothing_and_sees_the_end() {
        let (bell, theirs) = Doorbell::process(Closer::default()).unwrap();
        let sent = send(&theirs, b"x", SendFlags::NOSIGNAL);
        assert_eq!(sent, Err(rustix::io::Errno::PIPE));
        bell.ring();
        drop(bell);
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(&theirs, &mut bytes), Ok(1));
        assert_eq!(rustix::io::read(&theirs, &mut bytes), Ok(0));
    }

    /// Watches a descriptor this many times, and more.
    fn crowd(fd: &OwnedFd, watchers: usize) -> Vec<OwnedFd> {
        use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
        let copies: Vec<OwnedFd> = (0..200).map(|_| fd.try_clone().unwrap()).collect();
        let epolls = (0..watchers / copies.len()).map(|_| {
            let epoll = epoll::create(CreateFlags::CLOEXEC).unwrap();
            for copy in &copies {
                epoll::add(&epoll, copy, EventData::new_u64(0), EventFlags::IN).unwrap();
            }
            epoll
        });
        epolls
            .collect::<Vec<_>>()
            .into_iter()
            .chain(copies)
            .collect()
    }

    #[test]
    fn a_bell_with_a_crowd_of_watchers_is_rung_by_a_thread_of_its_own() {
        let (bell, theirs) = Doorbell::process(Closer::default()).unwrap();
        let Doorbell::Process(own) = &bell else {
            panic!("a process's")
        };
        // The control: one that nobody watches stays with its ringer.
        for _ in 0..1000 {
            bell.ring();
        }
        assert!(own.helper.get().is_none());
        let crowd = crowd(&theirs, 60_000);
        let mut bytes = [0; 4096];
        rustix::io::read(&theirs, &mut bytes).unwrap();
        let begun = cpu_time();
        for _ in 0..5 {
            bell.ring();
        }
        let five = cpu_time() - begun;
        assert!(own.helper.get().is_some(), "{five:?}");
        let begun = cpu_time();
        for _ in 0..100 {
            bell.ring();
        }
        let hundred = cpu_time() - begun;
        assert!(hundred < five, "{hundred:?} after {five:?}");
        // It still rings.
        while rustix::io::read(&theirs, &mut bytes).is_ok() {}
        bell.ring();
        rustix::io::ioctl_fionbio(&theirs, false).unwrap();
        assert!(rustix::io::read(&theirs, &mut bytes).unwrap() > 0);
        drop(crowd);
    }

    #[test]
    fn who_shares_a_bell_says_who_it_is_and_rings_once_until_it_is_heard() {
        let (mut bell, theirs) = SharedBell::new(Closer::default()).unwrap();
        let memory = Region::heap(news::BOARD_LEN);
        bell.set_board(memory.clone());
        let reader = news::Board::new(memory);
        let rings = || rustix::io::read(&theirs, &mut [0; 64]).unwrap_or(0);
        for place in [700, 701, 700] {
            bell.of(place).ring();
        }
        // Of the word of bits that both are in, the first rang.
        assert_eq!(rings(), 1);
        let mut heard = Vec::new();
        reader.hear(|place| heard.push(place));
        assert_eq!(heard, [699, 700]);
        bell.of(701).ring();
        assert_eq!(rings(), 1);
        // Who is on no board rings always; a place that there is not is none.
        for place in [0, 0, u32::MAX] {
            bell.of(place).ring();
        }
        assert_eq!(rings(), 3);
    }

    #[test]
    fn a_vm_bell_rings_the_thread_once_until_taken() {
        let eventfd = || rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let [board, other] = [(), ()].map(|()| Board::new(Arc::new(eventfd())));
        let bell = VmBell::new(&board);
        let doorbell = Doorbell::Vm(bell.clone());
        doorbell.ring();
        doorbell.ring();
        let mut count = [0; 8];
        rustix::io::read(&board.thread, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        // Another VM's are not looked at, and these once.
        assert!(board.take() && !board.take() && !other.take());
        assert!(bell.take() && !bell.take());
        // Rung after the look at the board: it is seen at the next one.
        doorbell.ring();
        assert!(board.take() && bell.take());
    }
}

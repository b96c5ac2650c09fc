//! The server of a VM's `ivshmem-doorbell` device, and the thread that raises its interrupts.
//!
//! QEMU connects while it executes `device_add` and does not answer its monitor until the
//! handshake is done (ivshmem-spec, "Client-Server protocol"); so the whole handshake is sent in
//! one go, from memory, when QEMU connects. It tells QEMU: protocol version 0; its id; the shared
//! memory (one page: the pool's header, so that the agent knows whose doorbell this is); the
//! eventfd of peer 0, us, which the guest's doorbell register writes; and one eventfd per vector of
//! its own, which we write and QEMU turns into MSI-X (by irqfd under KVM).
//!
//! A ring of the guest is answered by raising vector 0. An agent does not rely on vectors before it
//! has seen that answer: it proves both ways, interrupt remapping included, and that this daemon
//! and not an earlier one is at the other end. Rings of the guest are counted and otherwise mean
//! nothing; they are heard at most once a millisecond, so that a guest that rings without end costs
//! little (R4).
//!
//! QEMU shares these eventfds, so a write to one may block, or a read (R8). Only this VM's own
//! thread touches them; queues' threads ring that thread. When the VM is detached, or another QEMU
//! comes, they are emptied, and the thread goes on; one that a living peer fills at once again takes
//! another turn ([`Unstick`]).
//!
//! The device's clients cannot reconnect to another server. After a restart of the daemon wake-ups
//! go by the control channel until the device is plugged again.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vnplug_ring::pool::PoolHeader;

use vnplug_os::closer::{Closer, PeerFd};
use vnplug_os::{event, memory, socket};
use vnplug_path::port::doorbell::{Board, VmBell};

/// The most vectors a device may have.
pub(crate) const MAX_VECTORS: u32 = 64;

/// QEMU's id on this server; ours is 0.
const QEMU_ID: i64 = 1;

/// Between two looks whether the guest rang.
const PACE: Duration = Duration::from_millis(1);

/// One VM's doorbell.
pub(crate) struct DoorbellServer {
    pub(crate) listener: PeerFd,
    vectors: u32,
    page: memory::SharedMemory,
    closer: Closer,
    thread_bell: Arc<OwnedFd>,
    shared: Arc<Bells>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread and the server share.
#[derive(Default)]
struct Bells {
    plugged: Mutex<Option<Plugged>>,
    stop: AtomicBool,
    raised: AtomicU64,
    from_guest: AtomicU64,
}

/// A QEMU that is connected.
struct Plugged {
    /// QEMU takes a closed connection as the end of its server; we take it as an unplugged device.
    qemu: Arc<PeerFd>,
    /// The eventfd that the guest's doorbell register writes.
    own: Arc<PeerFd>,
    lines: Vec<Line>,
}

/// One vector.
struct Line {
    bell: VmBell,
    irq: Arc<PeerFd>,
}

impl DoorbellServer {
    /// Listens for QEMU at `path`.
    pub(crate) fn listen(path: &Path, vectors: u32, header: &PoolHeader) -> io::Result<Self> {
        let page = memory::sealed("vnplug-doorbell", 4096, &|| true)?;
        header.write(&page.region);
        // What may fail comes before the thread, which nobody would end.
        let listener = PeerFd::alone(vnplug_os::socket::listen(path, 0o600)?);
        let thread_bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let shared = Arc::new(Bells::default());
        let thread = Raise {
            bell: Arc::clone(&thread_bell),
            shared: Arc::clone(&shared),
            deaf_until: None,
        };
        let thread = std::thread::Builder::new()
            .name("vnplug-doorbell".into())
            .spawn(move || thread.run())?;
        Ok(Self {
            listener,
            vectors,
            page,
            closer: Closer::default(),
            thread_bell,
            shared,
            thread: Some(thread),
        })
    }

    /// Does the handshake with a QEMU that just connected; an earlier one is forgotten.
    pub(crate) fn greet(&self, qemu: OwnedFd) -> io::Result<()> {
        let guard = |fd| PeerFd::new(fd, self.closer.clone());
        let qemu = guard(qemu);
        // Nothing is read from it: what can be read tells that it is over.
        socket::pass_rights(&qemu, false);
        let own = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut lines = Vec::new();
        let board = Board::new(Arc::clone(&self.thread_bell));
        let own = guard(own);
        // QEMU may have closed its own before these go.
        let copy = |fd: BorrowedFd<'_>| rustix::io::dup(fd).map(guard);
        let mut messages: Vec<(i64, Option<PeerFd>)> = vec![
            (0, None),
            (QEMU_ID, None),
            (-1, Some(copy(self.page.fd.as_fd())?)),
            (0, Some(copy(own.as_fd())?)),
        ];
        for _ in 0..self.vectors {
            let irq = guard(eventfd(0, EventfdFlags::CLOEXEC)?);
            messages.push((QEMU_ID, Some(copy(irq.as_fd())?)));
            let bell = VmBell::new(&board);
            let irq = Arc::new(irq);
            lines.push(Line { bell, irq });
        }
        for (number, fd) in &messages {
            send(&qemu, *number, fd.as_ref().map(AsFd::as_fd))?;
        }
        let before = self.shared.plugged().replace(Plugged {
            qemu: Arc::new(qemu),
            own: Arc::new(own),
            lines,
        });
        // The thread may wait to raise an interrupt of a QEMU that is gone.
        before.iter().for_each(Plugged::empty);
        // It looks at these descriptors now.
        event::ring(&self.thread_bell);
        Ok(())
    }

    /// A vector below `heard` that no port has, and its bell, if QEMU is connected.
    pub(crate) fn free(&self, heard: u32) -> Option<(VmBell, u32)> {
        let plugged = self.shared.plugged();
        let lines = plugged.as_ref()?.lines.iter().take(heard as usize);
        let (vector, line) = lines.enumerate().find(|(_, line)| !line.bell.is_held())?;
        // What was rung for the port before means nothing to the next.
        line.bell.take();
        Some((line.bell.clone(), vector as u32))
    }

    /// Interrupts raised, and rings of the guest.
    pub(crate) fn counts(&self) -> (u64, u64) {
        // Relaxed: only counts.
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (of(&self.shared.raised), of(&self.shared.from_guest))
    }
}

impl Drop for DoorbellServer {
    fn drop(&mut self) {
        // Release: pairs with the thread's Acquire.
        self.shared.stop.store(true, Ordering::Release);
        event::ring(&self.thread_bell);
        let plugged = self.shared.plugged().take();
        if let (Some(plugged), Some(thread)) = (plugged, self.thread.take()) {
            Unstick { plugged, thread }.begin();
        }
    }
}

impl Plugged {
    /// Lets a thread go on that waits to raise one of its interrupts.
    fn empty(&self) {
        self.lines.iter().for_each(|line| event::drain(&line.irq));
    }
}

/// A thread that is to end, and what it may wait for.
struct Unstick {
    plugged: Plugged,
    thread: JoinHandle<()>,
}

impl Unstick {
    /// Empties the lines until the thread has ended, aside: a peer that lives can fill them again as
    /// fast, and no faster than it is looked for some time.
    fn begin(self) {
        self.plugged.empty();
        let aside = std::thread::Builder::new().name("vnplug-doorbell".into());
        let spawned = aside.spawn(move || {
            let mut pause = Duration::from_millis(1);
            while !self.thread.is_finished() {
                std::thread::sleep(pause);
                self.plugged.empty();
                pause = (pause * 2).min(Duration::from_secs(1));
            }
        });
        if let Err(error) = spawned {
            log::warn!(target: "vm", "a doorbell's thread may stay: {error}");
        }
    }
}

impl Bells {
    fn plugged(&self) -> MutexGuard<'_, Option<Plugged>> {
        self.plugged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn raise(&self, irq: &PeerFd) {
        // Relaxed: only a count.
        self.raised.fetch_add(1, Ordering::Relaxed);
        event::ring(irq);
    }
}

struct Raise {
    bell: Arc<OwnedFd>,
    shared: Arc<Bells>,
    /// Rings of the guest are not listened to until then.
    deaf_until: Option<Instant>,
}

impl Raise {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            let plugged = self.shared.plugged();
            let peer = plugged
                .as_ref()
                .map(|it| (Arc::clone(&it.qemu), Arc::clone(&it.own)));
            drop(plugged);
            let (bell, qemu, own) = self.wait(peer.as_ref());
            if bell {
                // It stays readable while it was rung, so this does not block.
                event::clear(&self.bell);
                self.raise_due();
            }
            if let Some((its_qemu, its_own)) = &peer {
                if own {
                    self.answer(its_own);
                }
                if qemu {
                    let mut plugged = self.shared.plugged();
                    if plugged
                        .as_ref()
                        .is_some_and(|now| Arc::ptr_eq(&now.qemu, its_qemu))
                    {
                        *plugged = None;
                        log::info!(target: "vm", "a doorbell is unplugged");
                    }
                }
            }
        }
    }

    /// Waits; tells what has news: the bell, QEMU's connection, the guest's ring.
    fn wait(&mut self, peer: Option<&(Arc<PeerFd>, Arc<PeerFd>)>) -> (bool, bool, bool) {
        let now = Instant::now();
        self.deaf_until = self.deaf_until.filter(|until| *until > now);
        let rest = self.deaf_until.map(|until| Timespec {
            tv_sec: 0,
            tv_nsec: i64::from((until - now).subsec_nanos()),
        });
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        if let Some((qemu, own)) = peer {
            fds.push(PollFd::new(qemu, PollFlags::IN));
            if rest.is_none() {
                fds.push(PollFd::new(own, PollFlags::IN));
            }
        }
        match poll(&mut fds, rest.as_ref()) {
            Ok(_) => {
                let has = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
                (has(0), has(1), has(2))
            }
            Err(_) => (false, false, false),
        }
    }

    /// Raises the vectors whose ports were rung. Without the lock, because it may block.
    fn raise_due(&self) {
        let mut due = Vec::new();
        if let Some(plugged) = self.shared.plugged().as_ref() {
            let rung = plugged.lines.iter().filter(|line| line.bell.take());
            due.extend(rung.map(|line| Arc::clone(&line.irq)));
        }
        for irq in due {
            self.shared.raise(&irq);
        }
    }

    /// Counts the guest's rings and answers them.
    fn answer(&mut self, own: &PeerFd) {
        let mut count = [0; 8];
        if rustix::io::read(own, &mut count) != Ok(8) {
            return;
        }
        self.deaf_until = Some(Instant::now() + PACE);
        // Relaxed: only a count.
        let rings = u64::from_ne_bytes(count);
        self.shared.from_guest.fetch_add(rings, Ordering::Relaxed);
        let plugged = self.shared.plugged();
        let first = plugged.as_ref().and_then(|it| it.lines.first());
        let irq = first.map(|line| Arc::clone(&line.irq));
        drop(plugged);
        if let Some(irq) = irq {
            self.shared.raise(&irq);
        }
    }
}

fn send(qemu: &PeerFd, number: i64, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let bytes = number.to_le_bytes();
    let borrowed: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = sendmsg(qemu, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSliceMut;
    use std::os::unix::net::UnixStream;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::*;

    /// Plays QEMU: gives its connection and the descriptors, ours first, then the vectors'.
    fn plug(server: &DoorbellServer) -> (UnixStream, Vec<OwnedFd>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        server.greet(theirs.into()).unwrap();
        let (mut numbers, mut fds) = (Vec::new(), Vec::new());
        for _ in 0..4 + server.vectors {
            let mut bytes = [0; 8];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let into = &mut [IoSliceMut::new(&mut bytes)];
            recvmsg(&ours, into, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            numbers.push(i64::from_le_bytes(bytes));
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
        }
        assert_eq!(numbers, [0, 1, -1, 0, 1, 1]);
        (ours, fds.split_off(1))
    }

    fn is_rung(fd: &OwnedFd) -> bool {
        let time = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&time)) == Ok(1)
            && rustix::io::read(fd, &mut [0; 8]) == Ok(8)
    }

    fn server(name: &str) -> DoorbellServer {
        let file = format!("vnplug-bell-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(file);
        let header = PoolHeader {
            len: 1 << 20,
            id: 5,
            name: "vm".into(),
        };
        let server = DoorbellServer::listen(&path, 2, &header).unwrap();
        std::fs::remove_file(path).unwrap();
        server
    }

    #[test]
    fn a_ring_of_the_guest_is_answered_and_counted() {
        let server = server("answer");
        let (_qemu, fds) = plug(&server);
        for round in 1..=3 {
            event::ring(&fds[0]);
            assert!(is_rung(&fds[1]));
            assert_eq!(server.counts(), (round, round));
        }
    }

    #[test]
    fn a_vector_belongs_to_one_port_until_that_is_gone() {
        let server = server("vectors");
        assert!(server.free(2).is_none(), "no QEMU is there");
        let (_qemu, fds) = plug(&server);
        assert!(server.free(0).is_none(), "the agent listens to none");
        let first = server.free(1).unwrap();
        assert!(first.1 == 0 && server.free(1).is_none());
        let second = server.free(2).unwrap();
        assert!(second.1 == 1 && server.free(2).is_none());
        vnplug_path::port::doorbell::Doorbell::Vm(second.0.clone()).ring();
        assert!(is_rung(&fds[2]));
        drop(first);
        assert_eq!(server.free(2).map(|(_, vector)| vector), Some(0));
    }

    #[test]
    fn an_unplugged_device_has_no_vectors() {
        let server = server("unplug");
        let (qemu, fds) = plug(&server);
        drop(qemu);
        // The descriptors' other ends are closed by the thread when it has seen it.
        let deadline = Instant::now() + Duration::from_secs(10);
        while server.free(2).is_some() {
            assert!(Instant::now() < deadline, "still plugged");
            std::thread::yield_now();
        }
        drop(fds);
        let (_qemu, _fds) = plug(&server);
        assert!(server.free(2).is_some());
    }

    /// Until a server's thread has ended.
    fn ends(shared: &std::sync::Weak<Bells>) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while shared.strong_count() > 0 {
            assert!(Instant::now() < deadline, "its thread stays");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_interrupt_line_that_is_full_keeps_no_thread_of_a_vm_that_is_gone() {
        let server = server("full");
        let (qemu, fds) = plug(&server);
        let shared = Arc::downgrade(&server.shared);
        let fill = || rustix::io::write(&fds[1], &(u64::MAX - 1).to_ne_bytes());
        assert_eq!(fill(), Ok(8));
        let (bell, _) = server.free(2).unwrap();
        vnplug_path::port::doorbell::Doorbell::Vm(bell).ring();
        let deadline = Instant::now() + Duration::from_secs(10);
        while server.counts().0 == 0 {
            assert!(Instant::now() < deadline, "it is not rung");
            std::thread::yield_now();
        }
        // Its control: the thread waits, and only that VM for it.
        std::thread::sleep(Duration::from_millis(50));
        let mut ring = 1_u64.to_ne_bytes();
        assert!(server.shared.plugged().is_some() && shared.strong_count() == 2);
        drop(qemu);
        drop(server);
        ends(&shared);
        // It is ours alone now, and empty or nearly so.
        rustix::io::ioctl_fionbio(&fds[1], true).unwrap();
        let left = rustix::io::read(&fds[1], &mut ring).map(|_| u64::from_ne_bytes(ring));
        assert!(
            left.is_err() || left.is_ok_and(|left| left <= 2),
            "{left:?}"
        );
    }

    #[test]
    fn who_fills_an_interrupt_line_again_and_again_keeps_a_thread_no_longer_than_it_lives() {
        let server = server("refilled");
        let (_qemu, fds) = plug(&server);
        let shared = Arc::downgrade(&server.shared);
        let (bell, _) = server.free(2).unwrap();
        let over = AtomicBool::new(false);
        rustix::io::ioctl_fionbio(&fds[1], true).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let _ = rustix::io::write(&fds[1], &(u64::MAX - 1).to_ne_bytes());
                    // The thread is to wait, not to be told that it would.
                    rustix::io::ioctl_fionbio(&fds[1], false).unwrap();
                    std::thread::sleep(Duration::from_micros(100));
                    rustix::io::ioctl_fionbio(&fds[1], true).unwrap();
                }
            });
            for _ in 0..100 {
                vnplug_path::port::doorbell::Doorbell::Vm(bell.clone()).ring();
                std::thread::sleep(Duration::from_micros(200));
            }
            drop(server);
            std::thread::sleep(Duration::from_millis(100));
            over.store(true, Ordering::Relaxed);
        });
        rustix::io::ioctl_fionbio(&fds[1], false).unwrap();
        ends(&shared);
    }
}

//! AF_XDP sockets: packet memory of our own ([`Umem`]), and the four rings shared with the kernel.
//!
//! ```text
//!   fill ring  ──chunks──> kernel ──descriptors──> RX ring ──> lent to the daemon ──> fill ring
//!   TX ring ──descriptors──> kernel ──chunks──> completion ring ──> free list ──> TX ring
//! ```
//!
//! A receive chunk is at one time in the fill ring or the kernel, in the RX ring, **taken**: in the
//! list that [`Socket::receive`] made, or kept back for readers of the packet memory. Only taken
//! chunks are lent here, and [`Socket::refill`] needs the socket alone, so no slice outlives its
//! chunk. The headroom before each frame is not used here: it has the stamp of the program in it, and
//! then the header of a record, if readers are shown the frame where it lies.
//!
//! The rings themselves are read and written through [`Region`], bounds-checked.
#![expect(
    unsafe_code,
    reason = "rings are mapped and frames lent from memory that the kernel writes"
)]

mod transmit;

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::{self, SocketAddrXdp, SocketAddrXdpFlags, XdpUmemReg, XdpUmemRegFlags};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, sockopt};
use vnplug_ring::Region;

use super::umem::Umem;
pub use transmit::Unsent;

/// A frame, or a part of one, in a taken chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the bytes, counted from the end of the first page.
    pub at: u64,
    /// How many.
    pub len: u32,
    /// The frame goes on in the next piece.
    pub more: bool,
}

/// An AF_XDP socket with its packet memory.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    umem: Umem,
    fill: Ring,
    completion: Ring,
    rx: Ring,
    tx: Ring,
    taken: Vec<Piece>,
    /// Offsets of transmit chunks that are neither the kernel's nor in the TX ring.
    free: Vec<u64>,
    /// Chunks that a frame to be sent may take.
    pieces: usize,
}

/// How a socket is bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Binding {
    /// The driver writes into the packet memory itself, or it is an error.
    pub zero_copy: bool,
    /// Frames of several chunks are received, and sent (Linux ≥ 6.6).
    pub frags: bool,
}

impl Socket {
    /// Opens a socket on this memory; needs `CAP_NET_RAW`. All receive chunks go to the kernel.
    ///
    /// # Errors
    /// The memory comes back with the system's error. `ENOBUFS`: locked memory is limited.
    pub fn open(umem: Umem) -> Result<Self, (io::Error, Umem)> {
        let parts = match Self::parts(&umem) {
            Ok(parts) => parts,
            Err(error) => return Err((error, umem)),
        };
        let (fd, [fill, completion, rx, tx]) = parts;
        let shape = umem.shape();
        let (transmit_at, chunk) = (shape.transmit_at(), u64::from(shape.chunk));
        let mut socket = Self {
            fd,
            umem,
            fill,
            completion,
            rx,
            tx,
            taken: Vec::with_capacity(MOST_TAKEN),
            free: (0..u64::from(shape.transmit))
                .rev()
                .map(|index| transmit_at + index * chunk)
                .collect(),
            pieces: 1,
        };
        let chunks = socket.umem.free();
        socket.fill.push_words(chunks.into_iter());
        Ok(socket)
    }

    fn parts(umem: &Umem) -> io::Result<(OwnedFd, [Ring; 4])> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, flags, None)?;
        let shape = umem.shape();
        let registration = XdpUmemReg {
            addr: umem.region().as_ptr().addr() as u64 + shape.chunks_at(),
            len: shape.chunk_bytes(),
            chunk_size: shape.chunk,
            headroom: shape.headroom,
            flags: XdpUmemRegFlags::empty(),
            tx_metadata_len: 0,
        };
        sockopt::set_xdp_umem_reg(&fd, registration)?;
        let (receive, transmit) = (shape.receive, shape.transmit);
        sockopt::set_xdp_umem_fill_ring_size(&fd, receive)?;
        sockopt::set_xdp_umem_completion_ring_size(&fd, transmit)?;
        sockopt::set_xdp_rx_ring_size(&fd, receive)?;
        sockopt::set_xdp_tx_ring_size(&fd, transmit)?;
        let at = sockopt::xdp_mmap_offsets(&fd)?;
        let word = size_of::<u64>() as u64;
        let rings = [
            Ring::map(&fd, &at.fr, xdp::XDP_UMEM_PGOFF_FILL_RING, receive, word)?,
            Ring::map(
                &fd,
                &at.cr,
                xdp::XDP_UMEM_PGOFF_COMPLETION_RING,
                transmit,
                word,
            )?,
            Ring::map(&fd, &at.rx, xdp::XDP_PGOFF_RX_RING, receive, 2 * word)?,
            Ring::map(&fd, &at.tx, xdp::XDP_PGOFF_TX_RING, transmit, 2 * word)?,
        ];
        Ok((fd, rings))
    }

    /// Binds to a receive queue of an interface.
    ///
    /// # Errors
    /// `EBUSY`: another socket has the queue, or one that was closed a moment ago still does.
    /// `EINVAL`: no such queue, or the kernel does not know `frags`. `EOPNOTSUPP` or others from
    /// drivers without zero-copy. It may be tried again in another way.
    pub fn bind(&mut self, index: i32, queue: u32, how: Binding) -> io::Result<()> {
        let mut flags = SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
        flags |= match how.zero_copy {
            true => SocketAddrXdpFlags::XDP_ZEROCOPY,
            false => SocketAddrXdpFlags::XDP_COPY,
        };
        if how.frags {
            flags |= SocketAddrXdpFlags::XDP_USE_SG;
        }
        let address = SocketAddrXdp::new(flags, index as u32, queue);
        rustix::net::bind(&self.fd, &address)?;
        self.pieces = how.pieces();
        Ok(())
    }

    /// Closes the socket; the memory is left.
    pub fn close(self) -> Umem {
        self.umem
    }

    /// The descriptor, for a map of sockets.
    pub fn descriptor(&self) -> &OwnedFd {
        &self.fd
    }

    /// Makes the kernel poll the driver in our system calls instead of by interrupts, `micros` at
    /// most each time; needs `CAP_NET_ADMIN` (Linux ≥ 5.11).
    pub fn prefer_busy_poll(&self, micros: u32, budget: u16) -> io::Result<()> {
        const SO_PREFER_BUSY_POLL: c_int = 69;
        const SO_BUSY_POLL_BUDGET: c_int = 70;
        let options = [
            (SO_PREFER_BUSY_POLL, 1),
            (libc::SO_BUSY_POLL, micros as c_int),
            (SO_BUSY_POLL_BUDGET, c_int::from(budget)),
        ];
        for (option, value) in options {
            // SAFETY: these options read one integer.
            let result = unsafe {
                libc::setsockopt(
                    self.fd.as_raw_fd(),
                    libc::SOL_SOCKET,
                    option,
                    (&raw const value).cast::<c_void>(),
                    size_of::<c_int>() as libc::socklen_t,
                )
            };
            if result < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Takes the pending error, for instance `ENETDOWN` after the interface was deleted.
    pub fn take_error(&self) -> Option<io::Error> {
        match sockopt::socket_error(&self.fd) {
            Ok(Ok(())) => None,
            Ok(Err(errno)) | Err(errno) => Some(errno.into()),
        }
    }

    /// The kernel's counters since the socket was opened.
    pub fn statistics(&self) -> io::Result<xdp::XdpStatistics> {
        Ok(sockopt::xdp_statistics(&self.fd)?)
    }

    /// Frames, or pieces of them, that the RX ring has.
    pub fn waiting(&self) -> u32 {
        self.rx.filled()
    }

    /// Takes pieces of frames out of the RX ring, `most` at most and [`MOST_TAKEN`]; what was taken
    /// before must have been refilled. The kernel publishes whole frames, but the last one taken
    /// may be cut by `most`: see [`untake`](Self::untake).
    pub fn receive(&mut self, most: usize) -> &[Piece] {
        assert!(
            self.taken.is_empty(),
            "chunks are refilled before others are taken"
        );
        let most = most.min(MOST_TAKEN) as u32;
        let shape = self.umem.shape();
        let (limit, first) = (shape.chunk_bytes(), shape.chunks_at());
        for _ in 0..self.rx.filled().min(most) {
            let (at, word) = self.rx.pop_pair();
            let (len, options) = (word as u32, (word >> 32) as u32);
            // The kernel is trusted; a piece outside would be a bug that must not become a read
            // outside.
            let inside = at.checked_add(len.into()).is_some_and(|end| end <= limit);
            // Another CPU wrote the bytes; the reader comes to them later in the batch.
            // NB: a frame does not begin with a cache line, and 60 bytes lie in two.
            self.umem.region().prefetch(first + at);
            let ahead = u64::from(len.clamp(1, LINE_BYTES + 1) - 1);
            self.umem.region().prefetch(first + at + ahead);
            self.taken.push(Piece {
                at: if inside { at } else { 0 },
                len: if inside { len } else { 0 },
                more: options & CONTINUED != 0,
            });
        }
        &self.taken
    }

    /// Puts the last `count` taken pieces back to the RX ring's front.
    pub fn untake(&mut self, count: usize) {
        let left = self.taken.len() - count;
        self.taken.truncate(left);
        self.rx.unpop(count as u32);
    }

    /// What is taken now.
    pub fn taken(&self) -> &[Piece] {
        &self.taken
    }

    /// The bytes of a taken piece, and `before` bytes of headroom in front of them.
    #[inline]
    pub fn bytes(&self, piece: usize, before: u32) -> &[u8] {
        let Piece { at, len, .. } = self.taken[piece];
        assert!(before <= self.umem.shape().headroom);
        let (at, len) = match at.checked_sub(before.into()) {
            Some(at) => (at, len + before),
            None => return &[],
        };
        // SAFETY: `receive` checked that the piece lies in the packet memory, which is mapped while
        // `umem` lives. The chunk is taken: the kernel has it not before `refill`, which needs
        // `&mut self`, and readers of the memory, if any, have it mapped read-only.
        unsafe {
            let base = self.umem.region().as_ptr();
            let first = self.umem.shape().chunks_at();
            std::slice::from_raw_parts(base.add((first + at) as usize), len as usize)
        }
    }

    /// Gives the taken chunks back to the kernel, or as many that were kept so far, and wakes the
    /// driver if it sleeps because it has none.
    pub fn refill(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        self.rx.release();
        let umem = &mut self.umem;
        let mask = !(u64::from(umem.shape().chunk) - 1);
        let chunks = self.taken.drain(..);
        let chunks = chunks.map(|piece| umem.exchange(piece.at & mask));
        // The ring is as large as there are chunks in circulation: there is room for every one.
        self.fill.push_words(chunks);
        if self.fill.needs_wakeup() {
            self.poll_driver();
        }
    }

    /// Makes the driver look for frames now: by busy polling, or by waking it.
    pub fn poll_driver(&self) {
        // What comes is in the ring, and errors come again with `take_error`.
        let _ = rustix::net::recv(&self.fd, &mut [0_u8; 0], RecvFlags::DONTWAIT);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One side of a ring that is shared with the kernel.
///
/// `next` is ours alone: the next entry that we fill, or take. The kernel's index is read each time
/// it may have moved; ours is stored when we say so.
#[derive(Debug)]
struct Ring {
    region: Region,
    producer: u64,
    consumer: u64,
    flags: Option<u64>,
    entries: u64,
    entry_bytes: u64,
    count: u32,
    next: u32,
}

impl Ring {
    fn map(
        fd: &OwnedFd,
        at: &xdp::XdpRingOffset,
        place: u64,
        count: u32,
        entry_bytes: u64,
    ) -> io::Result<Self> {
        let bytes = at.desc + u64::from(count) * entry_bytes;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap(null_mut(), bytes as usize, protection, flags, fd, place) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let owner = Arc::new(Mapping {
            base,
            bytes: bytes as usize,
        });
        Ok(Self {
            // SAFETY: mapped for `bytes` until the owner is dropped; page-aligned.
            region: unsafe { Region::from_raw(base, bytes, owner) },
            producer: at.producer,
            consumer: at.consumer,
            flags: at.flags,
            entries: at.desc,
            entry_bytes,
            count,
            next: 0,
        })
    }

    /// Entries that the kernel filled and we did not take.
    #[inline]
    fn filled(&self) -> u32 {
        // Acquire: pairs with the kernel's store-release of the producer index; the entries are
        // visible once it is.
        let producer = self.region.load_u32(self.producer, Ordering::Acquire);
        producer.wrapping_sub(self.next).min(self.count)
    }

    /// Entries that we published and the kernel did not take.
    fn used(&self) -> u32 {
        // Acquire: pairs with the kernel's store-release of the consumer index.
        let consumer = self.region.load_u32(self.consumer, Ordering::Acquire);
        self.next.wrapping_sub(consumer).min(self.count)
    }

    #[inline]
    fn advance(&mut self) -> u64 {
        let place = self.next & (self.count - 1);
        self.next = self.next.wrapping_add(1);
        self.entries + u64::from(place) * self.entry_bytes
    }

    #[inline]
    fn pop_pair(&mut self) -> (u64, u64) {
        let pair = self.peek_pair();
        self.advance();
        pair
    }

    #[inline]
    fn peek_pair(&self) -> (u64, u64) {
        let place = self.next & (self.count - 1);
        let at = self.entries + u64::from(place) * self.entry_bytes;
        let load = |at| self.region.load_u64(at, Ordering::Relaxed);
        (load(at), load(at + 8))
    }

    fn pop_word(&mut self) -> u64 {
        let at = self.advance();
        self.region.load_u64(at, Ordering::Relaxed)
    }

    fn unpop(&mut self, count: u32) {
        self.next = self.next.wrapping_sub(count);
    }

    /// Tells the kernel that it may reuse what we took.
    fn release(&self) {
        // Release: our reads of the entries end before the kernel sees the index.
        self.region
            .store_u32(self.consumer, self.next, Ordering::Release);
    }

    fn push_pair(&mut self, first: u64, second: u64) {
        let at = self.advance();
        self.region.store_u64(at, first, Ordering::Relaxed);
        self.region.store_u64(at + 8, second, Ordering::Relaxed);
    }

    #[inline]
    fn push_words(&mut self, words: impl Iterator<Item = u64>) {
        for word in words {
            let at = self.advance();
            self.region.store_u64(at, word, Ordering::Relaxed);
        }
        self.publish();
    }

    /// Our index as the kernel sees it.
    fn published(&self) -> u32 {
        // Relaxed: nobody else stores it.
        self.region.load_u32(self.producer, Ordering::Relaxed)
    }

    /// Shows the kernel what was pushed.
    fn publish(&self) {
        // Release: the entries, and our accesses to the chunks they name, come before the index.
        self.region
            .store_u32(self.producer, self.next, Ordering::Release);
    }

    /// Whether the kernel sleeps until it is told of new entries.
    fn needs_wakeup(&self) -> bool {
        // Our index is stored before the flag is read: the kernel sets the flag, then looks at the
        // index once more, so one of us sees the other.
        fence(Ordering::SeqCst);
        match self.flags {
            Some(at) => self.region.load_u32(at, Ordering::Relaxed) & NEED_WAKEUP != 0,
            // Before Linux 5.4 it always sleeps.
            None => true,
        }
    }
}

struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length; unmapping may happen on any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; there is no shared access through it.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and every region into it is gone (they own us).
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Bytes of a cache line.
const LINE_BYTES: u32 = 64;
/// The most pieces that are taken at a time.
pub const MOST_TAKEN: usize = 256;
/// Bytes of a chunk before the headroom, which are the kernel's (`XDP_PACKET_HEADROOM`).
pub const KERNEL_HEADROOM: u32 = 256;

/// The frame goes on in the next descriptor.
const CONTINUED: u32 = xdp::XdpDescOptions::XDP_PKT_CONTD.bits();
const NEED_WAKEUP: u32 = xdp::XdpRingFlags::XDP_RING_NEED_WAKEUP.bits();

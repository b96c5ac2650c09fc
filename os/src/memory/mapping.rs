//! Mappings: laid out of parts, guarded against a file that shrinks, unmapped and freed in chunks.
#![expect(unsafe_code, reason = "mmap and munmap")]

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::fstat;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vnplug_ring::Region;
use vnplug_ring::control::apart::Piece;

use super::{CHUNK, GoOn, HUGE, SharedMemory, in_chunks};
use crate::mappings::{self, Room, STRANGERS, Taken};
use crate::sigbus::{self, Guard};

/// What happens to a mapping of a file that others map, too.
#[derive(Debug, Default)]
pub struct Watch {
    /// It lost pages under us: its file was truncated by somebody.
    pub lost: AtomicBool,
    /// Nobody is to have it any more.
    over: AtomicBool,
}

impl Watch {
    /// From now on the pages of the mapping are freed with it, even if others still have the file.
    pub fn give_up(&self) {
        // Release: pairs with the Acquire in `Mapping::drop`.
        self.over.store(true, Ordering::Release);
    }
}

/// Maps `len` bytes of what a descriptor has, for as long as the region lives.
pub fn mapped(fd: &impl AsFd, len: u64) -> io::Result<Region> {
    map(fd, len, &Arc::default(), &|| true)
}

pub(super) fn map(
    fd: &impl AsFd,
    len: u64,
    watch: &Arc<Watch>,
    go_on: GoOn<'_>,
) -> io::Result<Region> {
    let piece = Piece {
        at: 0,
        is_records: false,
        from: 0,
        len,
    };
    let part = Part {
        piece,
        fd: fd.as_fd(),
    };
    // A file on a hugetlbfs is mapped where its pages, which may be larger, can begin.
    let block = fstat(fd)?.st_blksize as u64;
    let align = match len >= HUGE {
        true if block.is_power_of_two() => block.clamp(HUGE, 1 << 30),
        true => HUGE,
        false => 4096,
    };
    lay_out(&[part], len, align, watch, false, Some(go_on), None)
}

/// Maps `len` bytes from `offset` on of memory that a peer shares with us, for as long as the region
/// lives. No page is allocated or brought in before it is touched.
///
/// The file must be a memfd or lie on a tmpfs or a hugetlbfs: elsewhere a page fault could take as long as
/// the peer likes (FUSE). It may shrink later: [`Watch::lost`]. What a `stranger` shares takes addresses
/// of those that this user may have ([`STRANGERS`]).
///
/// # Errors
/// `InvalidInput` if the file is another one, or does not have these bytes; `QuotaExceeded`; else the
/// system's.
pub fn of_peer(
    fd: &impl AsFd,
    offset: u64,
    len: u64,
    watch: &Arc<Watch>,
    stranger: Option<u32>,
) -> io::Result<Region> {
    let bad = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
    // Only these have seals, or lack them; nobody is asked but the kernel's memory.
    if rustix::fs::fcntl_get_seals(fd).is_err() {
        let what = "its memory is no memfd, and on no tmpfs or hugetlbfs";
        return Err(bad(what.into()));
    }
    let stat = fstat(fd)?;
    let end = offset.checked_add(len).filter(|_| len > 0);
    if end.is_none_or(|end| end > stat.st_size as u64) {
        return Err(bad(format!(
            "{len} bytes at {offset} of a file of {}",
            stat.st_size
        )));
    }
    let page = match stat.st_blksize as u64 {
        block if block.is_power_of_two() => block.clamp(4096, 1 << 30),
        _ => 4096,
    };
    let before = offset % page;
    let span = (before + len)
        .checked_next_multiple_of(page)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let piece = Piece {
        at: 0,
        is_records: false,
        from: offset - before,
        len: span,
    };
    let part = Part {
        piece,
        fd: fd.as_fd(),
    };
    let align = if len >= HUGE { page.max(HUGE) } else { page };
    // What is too much for alignment is given back at once.
    let room = stranger.map(|user| STRANGERS.take(user, span));
    let room = room.transpose()?;
    let whole = lay_out(&[part], span, align, watch, false, None, room)?;
    let part = whole.part(before, len);
    part.ok_or_else(|| bad(format!("memory at offset {offset} is not aligned")))
}

/// A piece of a mapping, and of what.
pub(super) struct Part<'a> {
    pub(super) piece: Piece,
    pub(super) fd: BorrowedFd<'a>,
}

/// Maps parts, in order and without an overlap, into `len` bytes that begin at a multiple of `align`,
/// for as long as the region lives. With `own`, their pages are freed with it. With `populate`, all pages
/// are there at once.
pub(super) fn lay_out(
    parts: &[Part<'_>],
    len: u64,
    align: u64,
    watch: &Arc<Watch>,
    own: bool,
    populate: Option<GoOn<'_>>,
    room: Option<Room>,
) -> io::Result<Region> {
    let (bytes, align) = size(len).and_then(|len| Ok((len, size(align)?)))?;
    let span = bytes
        .checked_add(align)
        .ok_or(io::ErrorKind::InvalidInput)?;
    let taken = Taken::take(mappings::of(parts.iter().map(|part| &part.piece)))?;
    // SAFETY: a fresh mapping that nobody uses, at an address of the kernel's choice.
    let found = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        mmap_anonymous(std::ptr::null_mut(), span, ProtFlags::empty(), flags)
    }?;
    let base = found.wrapping_byte_add(found.align_offset(align));
    let before = base.addr() - found.addr();
    // SAFETY: what is too much of the mapping that was just made.
    unsafe {
        if before > 0 {
            munmap(found, before)?;
        }
        if before < align {
            munmap(base.wrapping_byte_add(bytes), align - before)?;
        }
    }
    let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    // From here on what fails unmaps it.
    let mut mapping = Mapping {
        base,
        bytes,
        guard: None,
        chunk: align.max(CHUNK as usize),
        own,
        pieces: parts.iter().map(|part| part.piece).collect(),
        watch: Arc::clone(watch),
        _taken: taken,
        _room: room,
    };
    for Part { piece, fd } in parts {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the piece lies in the mapping, of which nobody knows yet.
        unsafe {
            let at = base.as_ptr().wrapping_add(size(piece.at)?);
            mmap(
                at.cast(),
                size(piece.len)?,
                protection,
                flags,
                fd,
                piece.from,
            )?;
        }
    }
    mapping.guard = Some(sigbus::guard(base.as_ptr().addr(), bytes, watch));
    if let Some(go_on) = populate {
        for Part { piece, .. } in parts {
            in_chunks(piece.len, go_on, |offset, bytes| {
                mapping.populate(piece.at + offset, bytes)
            })?;
        }
    }
    // SAFETY: mapped for `len` bytes until `mapping`, the owner, is dropped; page-aligned. Nobody
    // takes a part of the region that has a gap.
    Ok(unsafe { Region::from_raw(base, len, Arc::new(mapping)) })
}

fn size(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput.into())
}

struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    /// Bytes that are unmapped at a time: no part of a huge page.
    chunk: usize,
    guard: Option<Guard>,
    /// Its pages are freed with it, unless they are left to readers.
    own: bool,
    pieces: Vec<Piece>,
    watch: Arc<Watch>,
    /// Dropped after the mapping is gone.
    _taken: Taken,
    _room: Option<Room>,
}

impl Mapping {
    /// Maps the pages of a part, which the file has, before a queue's thread writes there.
    fn populate(&self, offset: u64, bytes: u64) -> rustix::io::Result<()> {
        // SAFETY: the part lies in the mapping, and its pages stay what they are.
        let done = unsafe {
            let part = self.base.as_ptr().add(offset as usize);
            madvise(part.cast(), bytes as usize, Advice::LinuxPopulateWrite)
        };
        match done {
            // Before Linux 5.14: the first store to a page maps it, which costs its time then.
            Err(rustix::io::Errno::INVAL) => Ok(()),
            done => done,
        }
    }

    /// Frees the shared pages, for everybody: a process that still maps them finds zeroes, and one that
    /// has a descriptor has no memory by it. The life in the ring's page said before that it is over.
    fn free(&self) {
        // The records first: their reader looks at its page before.
        let (records, words): (Vec<Piece>, _) = self.pieces.iter().partition(|it| it.is_records);
        for piece in records.into_iter().chain(words) {
            let freed = in_chunks(piece.len, &|| true, |offset, bytes| {
                // SAFETY: the piece lies in the mapping, of which every region is gone.
                unsafe {
                    let part = self.base.as_ptr().add((piece.at + offset) as usize);
                    madvise(part.cast(), bytes as usize, Advice::LinuxRemove)
                }
            });
            if let Err(error) = freed {
                log::warn!(target: "port", "a closed ring's memory stays with its reader: {error}");
                return;
            }
        }
    }
}

// SAFETY: an address and a length; unmapping may happen on any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; there is no shared access through it.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the addresses may be somebody else's.
        self.guard = None;
        let is_own = self.own && !LEFT.load(Ordering::Acquire);
        // What was lost is no file's any more.
        let is_over =
            self.watch.over.load(Ordering::Acquire) && !self.watch.lost.load(Ordering::Acquire);
        if is_own || is_over {
            self.free();
        }
        let (mut offset, chunk) = (0, self.chunk);
        while offset < self.bytes {
            let bytes = chunk.min(self.bytes - offset);
            // SAFETY: the mapping is ours and every region into it is gone (they own us).
            let _ = unsafe { munmap(self.base.as_ptr().add(offset).cast(), bytes) };
            offset += bytes;
        }
    }
}

/// From now on memory stays as it is when its last region goes: the daemon ends, and readers are to
/// have what was published.
pub fn leave_to_readers() {
    LEFT.store(true, Ordering::Release);
}

static LEFT: AtomicBool = AtomicBool::new(false);

impl SharedMemory {
    /// Replaces a part by memory of our own; others who map the descriptor still see the part as it
    /// was; both ends on huge pages. Before anybody has a region of it.
    pub fn unshare(&mut self, offset: u64, len: u64) -> io::Result<()> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside || !offset.is_multiple_of(HUGE) || !len.is_multiple_of(HUGE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::POPULATE;
        // SAFETY: the part lies in the region's own mapping, which is unmapped as a whole; it stays
        // readable and writable, and bytes in a region may change at any time.
        unsafe {
            let part = self.region.as_ptr().add(offset as usize).cast();
            mmap_anonymous(part, len as usize, protection, flags)?;
        }
        Ok(())
    }

    /// Has the kernel put the pages together as huge ones, if it can (Linux ≥ 6.1), whatever
    /// `/sys/kernel/mm/transparent_hugepage` says; before a device gets them. Takes 1 to 2 ms for
    /// each MiB.
    pub fn collapse(&mut self) {
        if self.huge || self.len < HUGE {
            return;
        }
        // SAFETY: the range is the region's own mapping, and its bytes stay what they are.
        let result = unsafe {
            let base = self.region.as_ptr();
            libc::madvise(base.cast(), self.len as usize, libc::MADV_COLLAPSE)
        };
        if result == 0 {
            self.huge = true;
        } else {
            // Not known, or no such pages are free: small ones do.
            let error = io::Error::last_os_error();
            log::debug!(target: "source", "no huge pages: {error}");
        }
    }
}

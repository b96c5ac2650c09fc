//! Memory that the daemon shares with readers: committed when it is made, sealed where it can be.
//!
//! A reader's process gets two memfds of its own ([`apart`](vnplug_ring::control::apart)), sealed
//! against shrinking and growing, every page allocated before the descriptors leave the daemon.
//! That of the records it gets opened for reading only, with a mode that lets no other user open it
//! again: it can neither write there nor free pages. That of the words it can write, so it can free
//! their pages: a few of them, ordinary ones, which the next store makes again. When the last
//! region of such memory goes, its pages are freed even if others still have a descriptor
//! (`Mapping::drop`).
//!
//! A VM's pool is a file, because QEMU and User-mode Linux open it by path; a file cannot be sealed.
//! Every mapping is watched by [`super::sigbus`] (R7, R9).
//!
//! Committing takes about half a second for each GiB. It goes in chunks, so that it can be given up
//! between two of them ([`GoOn`]) and other threads that map memory wait for one chunk at most.
#![expect(unsafe_code, reason = "mmap and munmap")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals, fstat,
    ftruncate,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vnplug_ring::Region;
use vnplug_ring::control::apart::{Piece, Shape};

use super::mappings::{self, Taken};

/// Bytes of the huge pages we ask for.
pub use vnplug_ring::control::apart::HUGE;

/// Bytes that are committed, or unmapped, at a time.
const CHUNK: u64 = 16 << 20;

/// Asked between two chunks: whether anybody still wants the memory.
pub type GoOn<'a> = &'a dyn Fn() -> bool;

/// Shared memory with its descriptor.
#[derive(Debug)]
pub struct SharedMemory {
    /// The mapping.
    pub region: Region,
    /// What it is a mapping of.
    pub fd: OwnedFd,
    /// Bytes to map; the length of the region.
    pub len: u64,
    /// It lies in huge pages.
    pub huge: bool,
}

/// The memory of a process' rings, laid out as their reader lays it out.
#[derive(Debug)]
pub struct Rings {
    /// The mapping.
    pub region: Region,
    /// Where in it which ring lies.
    pub shape: Shape,
    /// What their reader writes.
    pub words: OwnedFd,
    /// What it reads: opened for reading only.
    pub records: OwnedFd,
    /// The records lie in huge pages.
    pub huge: bool,
}

/// Makes the memory of a process' rings. It is freed with the last region of it.
///
/// # Errors
/// As [`sealed`].
pub fn rings(shape: Shape, go_on: GoOn<'_>) -> io::Result<Rings> {
    let words = committed(
        "vnplug-words",
        shape.words_len(),
        MemfdFlags::empty(),
        go_on,
    )?;
    fcntl_add_seals(&words, SEALS)?;
    // Rounded up to huge pages only where each area begins at one.
    let len = shape.records_len();
    let may_be_huge = shape.align() == HUGE;
    let (records, huge) = huge_or_not("vnplug-port", len, may_be_huge, go_on)?;
    let reader = for_reading(&records)?;
    fcntl_add_seals(&records, SEALS)?;
    let pieces = shape.pieces();
    let parts: Vec<Part<'_>> = pieces
        .iter()
        .map(|&piece| Part {
            piece,
            fd: match piece.is_records {
                true => records.as_fd(),
                false => words.as_fd(),
            },
        })
        .collect();
    let watch = Arc::new(Watch::default());
    let region = lay_out(&parts, shape.map_len(), shape.align(), &watch, true, go_on)?;
    Ok(Rings {
        region,
        shape,
        words,
        records: reader,
        huge,
    })
}

/// Makes memory whose descriptor nobody but the daemon's own user can write or free pages by. It is
/// freed with the last region of it.
///
/// # Errors
/// As [`sealed`].
pub fn readable(name: &str, len: u64, go_on: GoOn<'_>) -> io::Result<SharedMemory> {
    let may_be_huge = len >= HUGE;
    let len = len.next_multiple_of(if may_be_huge { HUGE } else { 4096 });
    let (fd, huge) = huge_or_not(name, len, may_be_huge, go_on)?;
    let reader = for_reading(&fd)?;
    fcntl_add_seals(&fd, SEALS)?;
    let piece = Piece {
        at: 0,
        is_records: true,
        from: 0,
        len,
    };
    let part = Part {
        piece,
        fd: fd.as_fd(),
    };
    let align = if may_be_huge { HUGE } else { 4096 };
    let region = lay_out(&[part], len, align, &Arc::default(), true, go_on)?;
    Ok(SharedMemory {
        region,
        fd: reader,
        len,
        huge,
    })
}

/// Nobody changes the length, and nobody adds to this.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Reopens a memfd for reading only, and lets no other user open it for more.
fn for_reading(fd: &OwnedFd) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    fchmod(fd, Mode::RUSR)?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&path, flags, Mode::empty());
    opened.map_err(|error| match error {
        rustix::io::Errno::NOENT => io::Error::new(
            io::ErrorKind::NotFound,
            format!("no {path}: the daemon needs /proc"),
        ),
        // With its number: what to do depends on it.
        error => error.into(),
    })
}

/// Looks whether pages of a memfd that had all of them were freed.
#[derive(Debug)]
pub struct Holes {
    fd: OwnedFd,
    /// Of 512 bytes, of a file that has all of its pages.
    blocks: u64,
}

impl Holes {
    /// For a memfd of ordinary pages, of this many bytes.
    pub fn new(fd: OwnedFd, len: u64) -> Self {
        Self {
            fd,
            blocks: len.next_multiple_of(4096) / 512,
        }
    }

    /// Whether there are any.
    pub fn are_there(&self) -> bool {
        fstat(&self.fd).is_ok_and(|stat| (stat.st_blocks as u64) < self.blocks)
    }
}

/// From now on memory stays as it is when its last region goes: the daemon ends, and readers are to
/// have what was published.
pub fn leave_to_readers() {
    LEFT.store(true, Ordering::Release);
}

static LEFT: AtomicBool = AtomicBool::new(false);

/// As [`sealed`], and only mappings made here can ever write it: what gets the descriptor maps it
/// readable only. Linux 5.1.
///
/// # Errors
/// As [`sealed`].
pub fn write_sealed(name: &str, len: u64, go_on: GoOn<'_>) -> io::Result<SharedMemory> {
    in_huge_pages_or_not(name, len, SealFlags::FUTURE_WRITE, go_on)
}

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

/// Makes a sealed memfd of at least `len` bytes, in huge pages if enough are free.
///
/// # Errors
/// The system's, `ENOMEM` and `ENOSPC` among them: there is not enough memory now. `Interrupted` if
/// nobody wants it any more.
pub fn sealed(name: &str, len: u64, go_on: GoOn<'_>) -> io::Result<SharedMemory> {
    in_huge_pages_or_not(name, len, SealFlags::empty(), go_on)
}

fn in_huge_pages_or_not(
    name: &str,
    len: u64,
    seals: SealFlags,
    go_on: GoOn<'_>,
) -> io::Result<SharedMemory> {
    let may_be_huge = len >= HUGE;
    let (fd, huge) = huge_or_not(name, len, may_be_huge, go_on)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    let len = fstat(&fd)?.st_size as u64;
    let region = map(&fd, len, &Arc::default(), go_on)?;
    // Our own mapping, made before, stays writable.
    fcntl_add_seals(&fd, seals | SealFlags::SEAL)?;
    Ok(SharedMemory {
        region,
        fd,
        len,
        huge,
    })
}

/// A memfd of at least `len` bytes, and whether it has huge pages: if it may, and enough are free.
fn huge_or_not(
    name: &str,
    len: u64,
    may_be_huge: bool,
    go_on: GoOn<'_>,
) -> io::Result<(OwnedFd, bool)> {
    if may_be_huge {
        let len = len.next_multiple_of(HUGE);
        if free_huge_pages() >= len / HUGE {
            match committed(name, len, MemfdFlags::HUGETLB, go_on) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    log::debug!(target: "port", "no huge pages for {name}: {error}");
                }
                done => return done.map(|fd| (fd, true)),
            }
        }
    }
    let len = len.next_multiple_of(4096);
    committed(name, len, MemfdFlags::empty(), go_on).map(|fd| (fd, false))
}

/// A memfd with all its pages.
fn committed(name: &str, len: u64, flags: MemfdFlags, go_on: GoOn<'_>) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags,
    )?;
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&fd, len)?;
    commit(&fd, len, go_on)?;
    Ok(fd)
}

/// Opens or makes the file of a VM's pool, commits its memory and maps it.
///
/// # Errors
/// The system's; an existing file of another length, another user's or no regular file is refused
/// with `InvalidData`. `Interrupted` if nobody wants it any more. Nothing is left of a file that
/// could not be made.
pub fn pool_file(path: &Path, len: u64, create: bool, go_on: GoOn<'_>) -> io::Result<Pool> {
    let made = open_pool(path, len, create, go_on);
    if create && made.is_err() {
        // The shortage is what the caller is told of; what is left of the file is nobody's.
        let _ = std::fs::remove_file(path);
    }
    made
}

/// A VM's pool, mapped.
pub type Pool = (Region, Arc<Watch>);

fn open_pool(path: &Path, len: u64, create: bool, go_on: GoOn<'_>) -> io::Result<Pool> {
    // Who owns the file can give it to others.
    let us = [rustix::process::geteuid().as_raw()];
    let file = open(path, len, create.then_some(go_on), &us)?;
    watched(&file, len, go_on)
}

/// As [`pool_file`] makes one.
pub fn anew(path: &Path, len: u64) -> io::Result<(File, Pool)> {
    let us = [rustix::process::geteuid().as_raw()];
    let made = open(path, len, Some(&|| true), &us).and_then(|file| {
        let pool = watched(&file, len, &|| true)?;
        Ok((file, pool))
    });
    if made.is_err() {
        // As above.
        let _ = std::fs::remove_file(path);
    }
    made
}

/// As [`pool_file`] opens one that is there, if it is this one, of one of these users.
pub fn again(path: &Path, inode: u64, len: u64, users: &[u32]) -> io::Result<(File, Pool)> {
    use std::os::unix::fs::MetadataExt;
    let file = open(path, len, None, users)?;
    if file.metadata()?.ino() != inode {
        let what = format!("{} is another file now", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    commit(&file, len, &|| true)?;
    let pool = watched(&file, len, &|| true)?;
    Ok((file, pool))
}

/// Opens a file of one of these users; with `make`, makes it.
fn open(path: &Path, len: u64, make: Option<GoOn<'_>>, users: &[u32]) -> io::Result<File> {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = match make {
        None => options.open(path)?,
        Some(go_on) => {
            let file = options.create_new(true).open(path)?;
            commit(&file, len, go_on)?;
            file
        }
    };
    let have = file.metadata()?;
    let wrong = |what: String| {
        let what = format!("{} {what}", path.display());
        Err(io::Error::new(io::ErrorKind::InvalidData, what))
    };
    if !have.is_file() {
        return wrong("is no regular file".into());
    }
    if !users.contains(&have.uid()) {
        let us = users[0];
        return wrong(format!("belongs to user {}, not to user {us}", have.uid()));
    }
    if have.len() != len {
        return wrong(format!("has {} bytes, not {len}", have.len()));
    }
    Ok(file)
}

fn watched(file: &File, len: u64, go_on: GoOn<'_>) -> io::Result<Pool> {
    let watch = Arc::new(Watch::default());
    let region = map(file, len, &watch, go_on)?;
    Ok((region, watch))
}

/// Allocates every page of a file.
fn commit(file: &impl AsFd, len: u64, go_on: GoOn<'_>) -> io::Result<()> {
    in_chunks(len, go_on, |offset, bytes| {
        fallocate(file, FallocateFlags::empty(), offset, bytes)
    })
}

/// Does `what` to each chunk (offset, bytes) of `len` bytes.
fn in_chunks(
    len: u64,
    go_on: GoOn<'_>,
    what: impl Fn(u64, u64) -> rustix::io::Result<()>,
) -> io::Result<()> {
    let mut offset = 0;
    while offset < len {
        if !go_on() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let bytes = CHUNK.min(len - offset);
        what(offset, bytes)?;
        offset += bytes;
    }
    Ok(())
}

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

fn map(fd: &impl AsFd, len: u64, watch: &Arc<Watch>, go_on: GoOn<'_>) -> io::Result<Region> {
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
    lay_out(&[part], len, align, watch, false, go_on)
}

/// A piece of a mapping, and of what.
struct Part<'a> {
    piece: Piece,
    fd: BorrowedFd<'a>,
}

/// Maps parts, in order and without an overlap, into `len` bytes that begin at a multiple of `align`,
/// for as long as the region lives. With `own`, their pages are freed with it.
fn lay_out(
    parts: &[Part<'_>],
    len: u64,
    align: u64,
    watch: &Arc<Watch>,
    own: bool,
    go_on: GoOn<'_>,
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
        own,
        pieces: parts.iter().map(|part| part.piece).collect(),
        watch: Arc::clone(watch),
        _taken: taken,
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
    mapping.guard = Some(super::sigbus::guard(base.as_ptr().addr(), bytes, watch));
    for Part { piece, .. } in parts {
        in_chunks(piece.len, go_on, |offset, bytes| {
            mapping.populate(piece.at + offset, bytes)
        })?;
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
    guard: Option<super::sigbus::Guard>,
    /// Its pages are freed with it, unless they are left to readers.
    own: bool,
    pieces: Vec<Piece>,
    watch: Arc<Watch>,
    /// Dropped after the mapping is gone.
    _taken: Taken,
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
        let (mut offset, chunk) = (0, CHUNK as usize);
        while offset < self.bytes {
            let bytes = chunk.min(self.bytes - offset);
            // SAFETY: the mapping is ours and every region into it is gone (they own us).
            let _ = unsafe { munmap(self.base.as_ptr().add(offset).cast(), bytes) };
            offset += bytes;
        }
    }
}

/// Free 2 MiB pages, 0 if the kernel has none.
pub fn free_huge_pages() -> u64 {
    std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_memfd_can_neither_shrink_nor_grow() {
        let shared = sealed("test", 10_000, &|| true).unwrap();
        assert_eq!(shared.len, 12_288);
        assert!(ftruncate(&shared.fd, 4096).is_err());
        assert!(ftruncate(&shared.fd, 1 << 20).is_err());
        shared.region.store_u64(8, 7, Ordering::Relaxed);
        assert_eq!(shared.region.load_u64(8, Ordering::Relaxed), 7);
    }

    #[test]
    fn what_nobody_wants_any_more_is_given_up_between_two_chunks() {
        let name = format!("vnplug-pool-given-up-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let left = std::cell::Cell::new(3);
        let go_on = || {
            left.set(left.get() - 1);
            left.get() > 0
        };
        let error = pool_file(&path, 64 * CHUNK, true, &go_on).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        assert_eq!(left.get(), 0);
        assert!(!path.exists());
    }

    #[test]
    fn a_pool_that_is_not_ours_is_not_mapped() {
        let name = format!("vnplug-pool-theirs-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let wrong = |path: &Path| {
            let opened = pool_file(path, 1 << 20, false, &|| true);
            opened.err().unwrap().to_string()
        };
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, 0o600.into()).unwrap();
        let error = wrong(&path);
        assert!(error.contains("no regular file"), "{error}");
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        wrong(&path);
        std::fs::remove_file(&path).unwrap();
        File::create(&path).unwrap().set_len(1 << 20).unwrap();
        pool_file(&path, 1 << 20, false, &|| true).unwrap();
        // Only root can give a file away; without, there is nothing to refuse.
        if std::os::unix::fs::chown(&path, Some(65534), None).is_ok() {
            let error = wrong(&path);
            assert!(error.contains("belongs to user 65534"), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_truncated_pool_reads_as_zero_and_is_noticed() {
        let path = std::env::temp_dir().join(format!("vnplug-pool-test-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let (region, watch) = pool_file(&path, 1 << 20, true, &|| true).unwrap();
        region.store_u64(8192, 7, Ordering::Relaxed);
        assert!(!watch.lost.load(Ordering::Relaxed));
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        assert_eq!(region.load_u64(8192, Ordering::Relaxed), 0);
        region.store_u64(8192, 9, Ordering::Relaxed);
        assert!(watch.lost.load(Ordering::Relaxed));
        std::fs::remove_file(&path).unwrap();
    }
}

//! Memory that the daemon shares with readers: committed when it is made, sealed where it can be.
//!
//! A reader's process gets a memfd of its own: sealed against shrinking and growing, every page
//! allocated before the descriptor leaves the daemon, so that no later shortage or truncation can
//! raise SIGBUS here (R7, R9). A VM's pool is a file, because QEMU and User-mode Linux open it by
//! path; a file cannot be sealed, so its mapping is watched by [`super::sigbus`].
//!
//! Committing takes about half a second for each GiB. It goes in chunks, so that it can be given up
//! between two of them ([`GoOn`]) and other threads that map memory wait for one chunk at most.
#![expect(unsafe_code, reason = "mmap and munmap")]

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use vnplug_ring::Region;

/// Bytes of the huge pages we ask for.
pub(crate) const HUGE: u64 = 2 << 20;

/// Bytes that are committed, or unmapped, at a time.
const CHUNK: u64 = 16 << 20;

/// Asked between two chunks: whether anybody still wants the memory.
pub(crate) type GoOn<'a> = &'a dyn Fn() -> bool;

/// Shared memory with its descriptor.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) region: Region,
    pub(crate) fd: OwnedFd,
    /// Bytes to map; the length of the region.
    pub(crate) len: u64,
    /// It lies in huge pages.
    pub(crate) huge: bool,
}

/// As [`sealed`], and nobody but who maps it here can ever write it: what gets the descriptor maps it
/// readable only. Linux 5.1.
///
/// # Errors
/// As [`sealed`].
pub(crate) fn write_sealed(name: &str, len: u64, go_on: GoOn<'_>) -> io::Result<Shared> {
    in_huge_pages_or_not(name, len, SealFlags::FUTURE_WRITE, go_on)
}

impl Shared {
    /// Puts memory of our own in the place of a part, which whoever maps the descriptor sees as it
    /// was; both ends on huge pages. Before anybody has a region of it.
    pub(crate) fn unshare(&mut self, offset: u64, len: u64) -> io::Result<()> {
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
    pub(crate) fn collapse(&mut self) {
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
pub(crate) fn sealed(name: &str, len: u64, go_on: GoOn<'_>) -> io::Result<Shared> {
    in_huge_pages_or_not(name, len, SealFlags::empty(), go_on)
}

fn in_huge_pages_or_not(
    name: &str,
    len: u64,
    seals: SealFlags,
    go_on: GoOn<'_>,
) -> io::Result<Shared> {
    if len >= HUGE {
        let len = len.next_multiple_of(HUGE);
        if free_huge_pages() >= len / HUGE {
            match memfd(name, len, MemfdFlags::HUGETLB, seals, go_on) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    log::debug!(target: "port", "no huge pages for {name}: {error}");
                }
                done => return done,
            }
        }
    }
    let len = len.next_multiple_of(4096);
    memfd(name, len, MemfdFlags::empty(), seals, go_on)
}

fn memfd(
    name: &str,
    len: u64,
    flags: MemfdFlags,
    seals: SealFlags,
    go_on: GoOn<'_>,
) -> io::Result<Shared> {
    let fd = rustix::fs::memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags,
    )?;
    ftruncate(&fd, len)?;
    commit(&fd, len, go_on)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
    let region = map(&fd, len, None, go_on)?;
    // Our own mapping, made before, stays writable.
    fcntl_add_seals(&fd, seals | SealFlags::SEAL)?;
    Ok(Shared {
        region,
        fd,
        len,
        huge: flags.contains(MemfdFlags::HUGETLB),
    })
}

/// Opens or makes the file of a VM's pool, commits its memory and maps it.
///
/// # Errors
/// The system's; an existing file of another length, another user's or no regular file is refused
/// with `InvalidData`. `Interrupted` if nobody wants it any more. Nothing is left of a file that
/// could not be made.
pub(crate) fn pool_file(path: &Path, len: u64, create: bool, go_on: GoOn<'_>) -> io::Result<Pool> {
    let made = open_pool(path, len, create, go_on);
    if create && made.is_err() {
        // The shortage is what the caller is told of; what is left of the file is nobody's.
        let _ = std::fs::remove_file(path);
    }
    made
}

/// A VM's pool, mapped.
pub(crate) type Pool = (Region, Arc<Watch>);

fn open_pool(path: &Path, len: u64, create: bool, go_on: GoOn<'_>) -> io::Result<Pool> {
    // Who owns the file can give it to others.
    let us = [rustix::process::geteuid().as_raw()];
    let file = open(path, len, create.then_some(go_on), &us)?;
    watched(&file, len, go_on)
}

/// As [`pool_file`] makes one.
pub(crate) fn anew(path: &Path, len: u64) -> io::Result<(File, Pool)> {
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
pub(crate) fn again(path: &Path, inode: u64, len: u64, users: &[u32]) -> io::Result<(File, Pool)> {
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
    let region = map(file, len, Some(&watch), go_on)?;
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

/// Whether a mapping lost pages under us: its file was truncated by somebody.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub(crate) lost: std::sync::atomic::AtomicBool,
}

/// Maps `len` bytes of what a descriptor has, for as long as the region lives.
pub(crate) fn mapped(fd: &impl AsFd, len: u64) -> io::Result<Region> {
    map(fd, len, None, &|| true)
}

fn map(
    fd: &impl AsFd,
    len: u64,
    watch: Option<&Arc<Watch>>,
    go_on: GoOn<'_>,
) -> io::Result<Region> {
    let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let wish = aligned(bytes);
    // SAFETY: a fresh mapping, near a wish at an address of the kernel's choice, overlaps nothing.
    let base = unsafe { mmap(wish, bytes, protection, MapFlags::SHARED, fd, 0) }?;
    let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let guard = watch.map(|watch| super::sigbus::guard(base.as_ptr().addr(), bytes, watch));
    let mapping = Mapping { base, bytes, guard };
    in_chunks(len, go_on, |offset, bytes| mapping.populate(offset, bytes))?;
    // SAFETY: mapped for `len` bytes until `mapping`, the owner, is dropped; page-aligned.
    Ok(unsafe { Region::from_raw(base, len, Arc::new(mapping)) })
}

/// An address that is free at this moment, where huge pages can begin; null if none are needed.
fn aligned(bytes: usize) -> *mut c_void {
    let null = std::ptr::null_mut();
    if bytes < HUGE as usize {
        return null;
    }
    let span = bytes + HUGE as usize;
    // SAFETY: a fresh mapping that nobody uses, gone before the return.
    let found = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        mmap_anonymous(null, span, ProtFlags::empty(), flags)
            .and_then(|base| munmap(base, span).map(|()| base))
    };
    found.map_or(null, |base| {
        base.wrapping_byte_add(base.align_offset(HUGE as usize))
    })
}

struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    guard: Option<super::sigbus::Guard>,
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
}

// SAFETY: an address and a length; unmapping may happen on any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; there is no shared access through it.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the addresses may be somebody else's.
        self.guard = None;
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
pub(crate) fn free_huge_pages() -> u64 {
    std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

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

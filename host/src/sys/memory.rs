//! Memory that the daemon shares with readers: committed when it is made, sealed where it can be.
//!
//! A reader's process gets a memfd of its own: sealed against shrinking and growing, every page
//! allocated before the descriptor leaves the daemon, so that no later shortage or truncation can
//! raise SIGBUS here (R7, R9). A VM's pool is a file, because QEMU and User-mode Linux open it by
//! path; a file cannot be sealed, so its mapping is watched by [`super::sigbus`].
#![expect(unsafe_code, reason = "mmap and munmap")]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vnplug_ring::Region;

/// Bytes of the huge pages we ask for.
const HUGE: u64 = 2 << 20;

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

/// Makes a sealed memfd of at least `len` bytes, in huge pages if enough are free.
///
/// # Errors
/// The system's, `ENOMEM` and `ENOSPC` among them: there is not enough memory now.
pub(crate) fn sealed(name: &str, len: u64) -> io::Result<Shared> {
    if len >= HUGE {
        let len = len.next_multiple_of(HUGE);
        if free_huge_pages() >= len / HUGE {
            match memfd(name, len, MemfdFlags::HUGETLB) {
                Ok(shared) => return Ok(shared),
                Err(error) => log::debug!(target: "port", "no huge pages for {name}: {error}"),
            }
        }
    }
    memfd(name, len.next_multiple_of(4096), MemfdFlags::empty())
}

fn memfd(name: &str, len: u64, flags: MemfdFlags) -> io::Result<Shared> {
    let fd = rustix::fs::memfd_create(
        name,
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags,
    )?;
    ftruncate(&fd, len)?;
    fallocate(&fd, FallocateFlags::empty(), 0, len)?;
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let region = map(&fd, len, None)?;
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
/// The system's; an existing file of another length is refused with `InvalidData`.
pub(crate) fn pool_file(path: &Path, len: u64, create: bool) -> io::Result<(Region, Arc<Watch>)> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW);
    let file = if create {
        options.create_new(true).open(path)?
    } else {
        options.open(path)?
    };
    if create && let Err(error) = fallocate(&file, FallocateFlags::empty(), 0, len) {
        // The shortage is what the caller is told of; what is left of the file is nobody's.
        let _ = std::fs::remove_file(path);
        return Err(error.into());
    }
    let have = file.metadata()?.len();
    if have != len {
        let what = format!("{} has {have} bytes, not {len}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let watch = Arc::new(Watch::default());
    let region = map(&file, len, Some(&watch))?;
    Ok((region, watch))
}

/// Whether a mapping lost pages under us: its file was truncated by somebody.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    pub(crate) lost: std::sync::atomic::AtomicBool,
}

fn map(fd: &impl AsFd, len: u64, watch: Option<&Arc<Watch>>) -> io::Result<Region> {
    let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            bytes,
            protection,
            MapFlags::SHARED | MapFlags::POPULATE,
            fd,
            0,
        )
    }?;
    let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
    let guard = watch.map(|watch| super::sigbus::guard(base.as_ptr().addr(), bytes, watch));
    let mapping = Mapping {
        base,
        bytes,
        _guard: guard,
    };
    // SAFETY: mapped for `len` bytes until `mapping`, the owner, is dropped; page-aligned.
    Ok(unsafe { Region::from_raw(base, len, Arc::new(mapping)) })
}

struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    _guard: Option<super::sigbus::Guard>,
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
        let shared = sealed("test", 10_000).unwrap();
        assert_eq!(shared.len, 12_288);
        assert!(ftruncate(&shared.fd, 4096).is_err());
        assert!(ftruncate(&shared.fd, 1 << 20).is_err());
        shared.region.store_u64(8, 7, Ordering::Relaxed);
        assert_eq!(shared.region.load_u64(8, Ordering::Relaxed), 7);
    }

    #[test]
    fn a_truncated_pool_reads_as_zero_and_is_noticed() {
        let path = std::env::temp_dir().join(format!("vnplug-pool-test-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let (region, watch) = pool_file(&path, 1 << 20, true).unwrap();
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

//! Shared memory and CPUs.
#![expect(unsafe_code, reason = "maps shared memory")]

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::thread::{CpuSet, sched_setaffinity};
use vnplug_ring::Region;

use crate::row::Result;

/// Shared memory that a child process inherits, of `len` bytes.
pub(crate) fn memory(len: u64) -> Result<OwnedFd> {
    // No CLOEXEC: the other process of the row gets the descriptor by its number.
    let fd = memfd_create("vnplug-bench", MemfdFlags::empty())?;
    ftruncate(&fd, len)?;
    Ok(fd)
}

/// Maps shared memory, with huge pages where the kernel gives them.
pub(crate) fn map(fd: impl AsFd, len: u64) -> Result<Region> {
    struct Mapping(usize, usize);
    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: mapped below with this length; the region that used it is gone. An error
            // leaves the memory mapped, which harms nobody.
            let _ = unsafe { munmap(self.0 as *mut _, self.1) };
        }
    }
    let size = usize::try_from(len)?;
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { mmap(std::ptr::null_mut(), size, flags, MapFlags::SHARED, fd, 0)? };
    // SAFETY: just mapped; the advice changes no contents. It is refused where huge pages are off.
    let _ = unsafe { madvise(base, size, Advice::LinuxHugepage) };
    let owner = Arc::new(Mapping(base as usize, size));
    let base = NonNull::new(base.cast()).ok_or("mapped at zero")?;
    // SAFETY: `owner` keeps the mapping, page-aligned and of `len` bytes, until the region is gone.
    Ok(unsafe { Region::from_raw(base, len, owner) })
}

/// Keeps the calling thread on one CPU.
pub(crate) fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

//! Memory for machine code: written once, then executable, never both.
//!
//! The pages are made writable, filled, and made executable and read-only before anybody learns
//! their address; nothing makes them writable again. Where a policy forbids executable memory
//! (systemd's `MemoryDenyWriteExecute`, SELinux' `execmem`, `PR_SET_MDWE`), making them fails.
#![expect(unsafe_code, reason = "mmap, mprotect and munmap of machine code")]

use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Pages of machine code, unmapped when dropped.
#[derive(Debug)]
pub struct Executable {
    base: NonNull<u8>,
    bytes: usize,
}

impl Executable {
    /// Pages that hold `code`; what is left of the last one is filled with `int3`.
    ///
    /// # Errors
    /// The system's: no memory, or a policy that forbids executable memory.
    pub fn new(code: &[u8]) -> io::Result<Self> {
        let bytes = pages(code.len());
        let writable = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base =
            unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, writable, MapFlags::PRIVATE) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let pages = Self { base, bytes };
        // SAFETY: `bytes` bytes are mapped, writable and known to nobody else; the code fits.
        unsafe {
            base.as_ptr().write_bytes(INT3, bytes);
            base.copy_from_nonoverlapping(NonNull::from(code).cast(), code.len());
        }
        let executable = MprotectFlags::READ | MprotectFlags::EXEC;
        // SAFETY: the mapping is ours, and no reference into it exists.
        unsafe { mprotect(base.as_ptr().cast(), bytes, executable) }?;
        Ok(pages)
    }

    /// Where the byte at `offset` lies.
    ///
    /// # Panics
    /// If that is outside.
    pub fn address(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.bytes, "{offset} is outside of the code");
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.base.add(offset) }
    }
}

/// Bytes that `len` bytes of code take.
pub fn pages(len: usize) -> usize {
    len.max(1).next_multiple_of(PAGE_BYTES)
}

// SAFETY: an address and a length; the pages are never written, unmapping may happen anywhere.
unsafe impl Send for Executable {}
// SAFETY: as above.
unsafe impl Sync for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; its callers keep it alive.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The machines that have native filters have pages of 4 KiB.
const PAGE_BYTES: usize = 4096;

/// Stops a jump to where no function is.
const INT3: u8 = 0xcc;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_never_writable_and_executable_and_goes_when_dropped() {
        let permissions = |address: usize| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().find_map(|line| {
                let (range, rest) = line.split_once(' ')?;
                let (from, to) = range.split_once('-')?;
                let number = |text| usize::from_str_radix(text, 16).unwrap();
                let inside = (number(from)..number(to)).contains(&address);
                inside.then(|| rest[..4].to_owned())
            })
        };
        let goes = || {
            let pages = Executable::new(&[0xc3; 5000]).unwrap();
            let address = pages.address(8191).as_ptr().addr();
            assert_eq!(permissions(address).as_deref(), Some("r-xp"));
            drop(pages);
            permissions(address).as_deref() != Some("r-xp")
        };
        // Another thread of the tests may at once have code of its own at the place.
        assert!((0..100).any(|_| goes()));
    }
}

//! The memory that a program of one instance can reach: a power of two long, mapped whole.
//!
//! Nothing in it ever faults. Maps are the kernel's memory, of a length that nobody can change; where nothing
//! lies, there are zeroes of our own. What only the program writes (its stack, the frame, the context) is
//! private to the instance.
#![expect(unsafe_code, reason = "mmap at fixed places, and the bytes there")]

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use crate::code::SharedMap;
use crate::layout::PAGE;

/// An area; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Area {
    base: NonNull<u8>,
    /// Without the guard.
    bytes: usize,
}

impl Area {
    /// An area of `bytes` bytes with maps at these places.
    ///
    /// # Errors
    /// The system's; `InvalidInput` for a place outside.
    pub(crate) fn new<'a>(
        bytes: u32,
        maps: impl Iterator<Item = (u32, &'a SharedMap)>,
    ) -> io::Result<Self> {
        let bytes = bytes as usize;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // An access begins in the area, and ends at most 7 bytes behind it.
        let all = bytes + PAGE as usize;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), all, both, flags) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let area = Self { base, bytes };
        for (place, map) in maps {
            area.put(place as usize, map)?;
        }
        Ok(area)
    }

    fn put(&self, place: usize, map: &SharedMap) -> io::Result<()> {
        let len = usize::try_from(map.bytes()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let len = len.next_multiple_of(PAGE as usize);
        let is_page = place.is_multiple_of(PAGE as usize);
        if !is_page || place.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let at = self.at(place).cast();
        match map.constant {
            // Of what programs may not write the area has a copy: nothing there may fault.
            true => {
                let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
                // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
                let from = unsafe { mmap(ptr::null_mut(), len, read, shared, map.fd.as_fd(), 0) }?;
                // SAFETY: both have `len` bytes, and do not overlap; the mapping is given back once.
                unsafe {
                    ptr::copy_nonoverlapping(from.cast_const(), at, len);
                    let _ = munmap(from, len);
                }
            }
            false => {
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                let both = ProtFlags::READ | ProtFlags::WRITE;
                // SAFETY: replaces pages of the area, which is ours and to which no reference exists.
                unsafe { mmap(at, len, both, flags, map.fd.as_fd(), 0) }?;
            }
        }
        Ok(())
    }

    /// Where it begins.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes of it that no map has.
    pub(crate) fn bytes(&self, from: u32, to: u32) -> &[u8] {
        let (from, to) = (from as usize, to as usize);
        assert!(
            from <= to && to <= crate::layout::MAPS as usize,
            "{from}..{to} is not the frame's"
        );
        // SAFETY: mapped, initialized, and written by nobody else: the program of this instance does not run
        // while somebody holds the instance, and no map lies there.
        unsafe { std::slice::from_raw_parts(self.at(from), to - from) }
    }

    /// As [`bytes`](Self::bytes), to be written.
    pub(crate) fn bytes_mut(&mut self, from: u32, to: u32) -> &mut [u8] {
        let (from, to) = (from as usize, to as usize);
        assert!(
            from <= to && to <= crate::layout::MAPS as usize,
            "{from}..{to} is not the frame's"
        );
        // SAFETY: as above; and this borrows the area exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.at(from), to - from) }
    }

    /// Reads bytes wherever they lie, also in maps.
    pub(crate) fn read(&self, from: u64, to: &mut [u8]) -> bool {
        let Ok(from) = usize::try_from(from) else {
            return false;
        };
        if from
            .checked_add(to.len())
            .is_none_or(|end| end > self.bytes)
        {
            return false;
        }
        // SAFETY: as many bytes are mapped there. The kernel may write a map meanwhile; a copy of bytes bears
        // that as the kernel's own does.
        unsafe { ptr::copy_nonoverlapping(self.at(from), to.as_mut_ptr(), to.len()) };
        true
    }

    fn at(&self, place: usize) -> *mut u8 {
        debug_assert!(place <= self.bytes, "{place} is outside");
        // SAFETY: within the mapping, which every caller has checked.
        unsafe { self.base.as_ptr().add(place) }
    }
}

// SAFETY: an address and a length of memory that goes with it; who holds the area uses it alone.
unsafe impl Send for Area {}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and its callers keep the area alive.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes + PAGE as usize) };
    }
}

//! Mapping the memory that came with a port.
#![expect(unsafe_code, reason = "the island that maps ring memory")]

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FileType, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use vnplug_ring::Region;
use vnplug_ring::control::Opened;
use vnplug_ring::control::apart::Shape;

use crate::error::Error;

pub(crate) mod vfio;

/// Maps `len` bytes from the start of `fd`, shared, readable and writable. A [`Port`](crate::Port)
/// does this by itself; it is public for tools that serve rings of their own.
///
/// The mapping lives as long as the region or any part or clone of it.
///
/// # Errors
/// [`Error::Protocol`] if `len` is 0 or the file is shorter; [`Error::System`].
pub fn map(fd: BorrowedFd<'_>, len: u64) -> Result<Region, Error> {
    map_as(fd, 0, len, ProtFlags::READ | ProtFlags::WRITE)
}

/// As [`map`], but readable only: of the region nothing may be stored.
pub(crate) fn map_read_only(fd: BorrowedFd<'_>, len: u64) -> Result<Region, Error> {
    map_as(fd, 0, len, ProtFlags::READ)
}

/// Maps `len` bytes of `fd` from `offset` on, a multiple of the page size; readable only, unless it is
/// `writable`.
pub(crate) fn map_at(
    fd: BorrowedFd<'_>,
    offset: u64,
    len: u64,
    writable: bool,
) -> Result<Region, Error> {
    map_as(fd, offset, len, protection(writable))
}

/// Puts private pages of zeros in the place of all that a region maps: what it was is not touched any more,
/// whatever becomes of it. The region is to be one of [`map_at`], whole, and `writable` as there.
pub(crate) fn blank(region: &Region, writable: bool) -> Result<(), Error> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let at = region.as_ptr().cast::<c_void>();
    let len = region.len() as usize;
    // SAFETY: a whole mapping of ours, page-aligned, which stays ours: other pages lie there from now on,
    // as readable and writable, and they are unmapped with it. Nobody holds references into a region.
    let blank = unsafe { mmap_anonymous(at, len, protection(writable), flags) };
    blank
        .map(|_| ())
        .map_err(Error::system("cannot let go of shared memory"))
}

fn protection(writable: bool) -> ProtFlags {
    match writable {
        true => ProtFlags::READ | ProtFlags::WRITE,
        false => ProtFlags::READ,
    }
}

/// Maps a port whose records lie apart (see [`vnplug_ring::control::apart`]): `words` readable and
/// writable, `records` readable only, laid out so that its rings are at the places that `opened`
/// tells. As public as [`map`], and for the same.
///
/// # Errors
/// As [`map`]; [`Error::Protocol`] also if that is no such port.
pub fn map_apart(
    words: BorrowedFd<'_>,
    records: BorrowedFd<'_>,
    opened: &Opened,
) -> Result<Region, Error> {
    let shape = Shape::of(opened).filter(|_| opened.apart).ok_or_else(|| {
        Error::Protocol("an opened port whose rings lie where they cannot".into())
    })?;
    has(words, shape.words_len())?;
    has(records, shape.records_len())?;
    let failed = || Error::system("cannot map the ring's memory");
    let (len, align) = (shape.map_len() as usize, shape.align() as usize);
    let (null, span) = (std::ptr::null_mut(), len + align);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice disturbs no other.
    let all = unsafe { mmap_anonymous(null, span, ProtFlags::empty(), flags) };
    let all = Mapping {
        base: all.map_err(failed())?,
        bytes: span,
    };
    let base = all.base.wrapping_byte_add(all.base.align_offset(align));
    for piece in shape.pieces() {
        let (fd, prot) = match piece.is_records {
            true => (records, ProtFlags::READ),
            false => (words, ProtFlags::READ | ProtFlags::WRITE),
        };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the piece lies in the mapping that was just made, of which nobody knows yet; all of
        // it is unmapped as one.
        unsafe {
            let at = base.wrapping_byte_add(piece.at as usize);
            mmap(at, piece.len as usize, prot, flags, fd, piece.from)
        }
        .map_err(failed())?;
    }
    let base = NonNull::new(base.cast::<u8>()).ok_or(Error::Invalid("a mapping at address 0"))?;
    // SAFETY: page-aligned, and mapped until the owner unmaps it. A reader touches nothing but its
    // rings, which have no gaps, and stores to their pages and to the transmit ring alone.
    Ok(unsafe { Region::from_raw(base, shape.map_len(), Arc::new(all)) })
}

/// Where the memory begins in a descriptor: in a file at its beginning, in a PCI device of VFIO's somewhere else. Checks
/// that there are `len` bytes.
fn beginning(fd: BorrowedFd<'_>, len: u64) -> Result<u64, Error> {
    let stat = fstat(fd).map_err(Error::system("cannot inspect the ring's memory"))?;
    // VFIO's devices have no type, as all files that lie nowhere.
    let may_be_vfio = FileType::from_raw_mode(stat.st_mode) == FileType::Unknown;
    match may_be_vfio.then(|| vfio::memory_in(fd)).flatten() {
        None => has(fd, len).map(|()| 0),
        Some((at, size)) if len <= size => Ok(at),
        Some((_, size)) => {
            let what = format!("{len} bytes of ring memory in a device of {size}");
            Err(Error::Protocol(what))
        }
    }
}

/// Checks that a file has `len` bytes: a mapping beyond its end is a SIGBUS later.
fn has(fd: BorrowedFd<'_>, len: u64) -> Result<(), Error> {
    let stat = fstat(fd).map_err(Error::system("cannot inspect the ring's memory"))?;
    // Devices do not tell their length.
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if is_file && (stat.st_size as u64) < len {
        let what = format!("{len} bytes of ring memory in a file of {}", stat.st_size);
        return Err(Error::Protocol(what));
    }
    Ok(())
}

fn map_as(fd: BorrowedFd<'_>, offset: u64, len: u64, prot: ProtFlags) -> Result<Region, Error> {
    let bytes = usize::try_from(len).ok().filter(|&bytes| bytes > 0);
    let bytes = bytes.ok_or_else(|| Error::Protocol(format!("{len} bytes of ring memory")))?;
    let begins = beginning(fd, offset.saturating_add(len))?;
    let offset = begins.saturating_add(offset);
    let flags = MapFlags::SHARED;
    // SAFETY: a fresh mapping at an address of the kernel's choice disturbs no other.
    let base = unsafe { mmap(std::ptr::null_mut(), bytes, prot, flags, fd, offset) }
        .map_err(Error::system("cannot map the ring's memory"))?;
    let mapping = Mapping { base, bytes };
    let base = NonNull::new(base.cast::<u8>()).ok_or(Error::Invalid("a mapping at address 0"))?;
    // SAFETY: the mapping is page-aligned, `bytes` long, readable and, if the region is ever stored
    // to, writable until the owner unmaps it, and nothing else knows its address.
    Ok(unsafe { Region::from_raw(base, len, Arc::new(mapping)) })
}

#[derive(Debug)]
struct Mapping {
    base: *mut c_void,
    bytes: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; `base` is only used to unmap.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method takes `&self`.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the last region of this mapping is gone, so nobody uses the addresses.
        let unmapped = unsafe { munmap(self.base, self.bytes) };
        debug_assert!(unmapped.is_ok(), "our own mapping can be unmapped");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::Ordering;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn two_mappings_of_one_file_share_their_words() {
        let fd = memfd_create("map-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 8192).unwrap();
        let (one, two) = (
            map(fd.as_fd(), 8192).unwrap(),
            map(fd.as_fd(), 4096).unwrap(),
        );
        one.store_u64(64, 77, Ordering::Relaxed);
        assert_eq!(two.load_u64(64, Ordering::Relaxed), 77);
    }

    #[test]
    fn a_file_shorter_than_promised_is_refused_and_not_a_fault_later() {
        let fd = memfd_create("map-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 4096).unwrap();
        assert!(matches!(map(fd.as_fd(), 8192), Err(Error::Protocol(_))));
        assert!(matches!(map(fd.as_fd(), 0), Err(Error::Protocol(_))));
    }
}

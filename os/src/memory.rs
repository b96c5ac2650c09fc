//! Memory that the daemon shares with readers: committed when it is made, sealed where it can be.
//!
//! A reader's process gets two memfds of its own ([`apart`](vnplug_ring::control::apart)), sealed
//! against shrinking and growing, every page allocated before the descriptors leave the daemon.
//! That of the records it gets opened for reading only, with a mode that lets no other user open it
//! again: it can neither write there nor free pages. That of the words it can write, so it can free
//! their pages: a few of them, ordinary ones, which the next store makes again. When the last
//! region of such memory goes, its pages are freed even if others still have a descriptor
//! (`Mapping::drop` in `memory/mapping.rs`).
//!
//! A VM's pool is a file, because QEMU and User-mode Linux open it by path; a file cannot be sealed.
//! Every mapping is watched by [`super::sigbus`] (R7, R9).
//!
//! Committing takes about half a second for each GiB. It goes in chunks, so that it can be given up
//! between two of them ([`GoOn`]) and other threads that map memory wait for one chunk at most.

mod mapping;
mod pool;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fchmod, fcntl_add_seals, fstat,
    ftruncate,
};
use vnplug_ring::Region;
use vnplug_ring::control::apart::{Piece, Shape};

use mapping::{Part, lay_out, map};
pub use mapping::{Watch, leave_to_readers, mapped, of_peer};
pub use pool::{Pool, again, anew, pool_file};

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
    let region = lay_out(
        &parts,
        shape.map_len(),
        shape.align(),
        &watch,
        true,
        Some(go_on),
        None,
    )?;
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
    let region = lay_out(
        &[part],
        len,
        align,
        &Arc::default(),
        true,
        Some(go_on),
        None,
    )?;
    Ok(SharedMemory {
        region,
        fd: reader,
        len,
        huge,
    })
}

/// Memory that two peers share, and that the daemon maps only if it is one of them. Its pages are freed with this, even if others
/// still have a descriptor: it reads as zero then.
#[derive(Debug)]
pub struct Exported {
    /// For who writes it.
    pub whole: OwnedFd,
    /// For who only reads it, if it may not be written by both.
    reading: Option<OwnedFd>,
    len: u64,
}

/// Makes memory of at least `len` bytes, in ordinary pages, whose length nobody can change. With `writable`
/// both sides may write it.
///
/// # Errors
/// As [`sealed`].
pub fn exported(len: u64, writable: bool, go_on: GoOn<'_>) -> io::Result<Exported> {
    let len = len.next_multiple_of(4096);
    let whole = committed("vnplug-region", len, MemfdFlags::empty(), go_on)?;
    let reading = (!writable).then(|| for_reading(&whole)).transpose()?;
    fcntl_add_seals(&whole, SEALS)?;
    Ok(Exported {
        whole,
        reading,
        len,
    })
}

impl Exported {
    /// The descriptor for the side that did not ask for it.
    pub fn for_program(&self) -> &OwnedFd {
        self.reading.as_ref().unwrap_or(&self.whole)
    }

    /// Bytes of it.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never: it has a page at least.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts these bytes at its beginning, and lets whoever has a descriptor open it again: QEMU does, as
    /// another user.
    ///
    /// # Errors
    /// The system's.
    pub fn open_to_vm(&self, writable: bool, begins: &[u8]) -> io::Result<()> {
        rustix::io::pwrite(&self.whole, begins, 0)?;
        let all = Mode::RUSR | Mode::RGRP | Mode::ROTH;
        let mode = match writable {
            true => all | Mode::WUSR | Mode::WGRP | Mode::WOTH,
            false => all,
        };
        Ok(fchmod(&self.whole, mode)?)
    }

    /// Maps all of it here, too.
    ///
    /// # Errors
    /// The system's.
    pub fn map(&self) -> io::Result<Region> {
        mapped(&self.whole, self.len)
    }

    /// Frees its pages: whoever maps it sees zeros, in pages that are made when they are touched.
    pub fn empty(&self) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = fallocate(&self.whole, flags, 0, self.len) {
            log::warn!(target: "backend", "shared memory is not emptied: {error}");
        }
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        self.empty();
    }
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

/// As [`sealed`], and only mappings made here can ever write it: what gets the descriptor maps it
/// readable only. Linux 5.1.
///
/// # Errors
/// As [`sealed`].
pub fn write_sealed(name: &str, len: u64, go_on: GoOn<'_>) -> io::Result<SharedMemory> {
    in_huge_pages_or_not(name, len, SealFlags::FUTURE_WRITE, go_on)
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

/// Free 2 MiB pages, 0 if the kernel has none.
pub fn free_huge_pages() -> u64 {
    std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

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
}

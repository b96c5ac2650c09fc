//! The memory of a guest, as a front-end shared it: a hostile object.
//!
//! A guest names bytes by addresses of its own. [`Memory`] is the one door to them: it finds the piece
//! of the table that has them, and copies in or out, once. A range may cross pieces that touch in the
//! guest; each part is translated by itself (CVE-2018-1059 was a back-end that translated the start
//! only).

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_os::memory::{Watch, of_peer};
use vnplug_ring::Region;

/// A piece of a guest's memory, as a front-end describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Described {
    /// Where the guest has it.
    pub(crate) guest: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// Where the front-end has it.
    pub(crate) user: u64,
    /// Where it begins in the file.
    pub(crate) offset: u64,
}

/// How much memory a front-end may share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowance {
    /// Pieces.
    pub(crate) pieces: usize,
    /// Their bytes in all.
    pub(crate) bytes: u64,
    /// Whose front-end it is, if all that this user shares is bounded, too.
    pub(crate) stranger: Option<u32>,
}

/// A piece that is mapped.
#[derive(Debug, Clone)]
pub(crate) struct Slot {
    described: Described,
    region: Region,
}

/// The memory of a guest, and what was written there if that is asked for.
#[derive(Debug)]
pub(crate) struct Memory {
    /// In the order of the guest's addresses.
    slots: Vec<Slot>,
    watch: Arc<Watch>,
    log: Option<Region>,
}

/// Bytes in one piece of a memory's table, which were looked up there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    slot: u32,
    /// Bytes.
    pub(super) len: u32,
    /// Where they begin in the piece.
    at: u64,
}

/// Bytes of a guest in one piece.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    region: &'a Region,
    at: u64,
}

/// A place in one piece.
#[derive(Debug, Clone)]
pub(crate) struct Area {
    pub(crate) region: Region,
    pub(crate) at: u64,
}

impl Slot {
    /// Maps a piece, a stranger's if so.
    ///
    /// # Errors
    /// `InvalidInput` if it cannot be one, `QuotaExceeded`; else the system's.
    pub(crate) fn map(
        described: Described,
        fd: &impl std::os::fd::AsFd,
        watch: &Arc<Watch>,
        stranger: Option<u32>,
    ) -> io::Result<Self> {
        let Described {
            guest, len, user, ..
        } = described;
        let fits = |begin: u64| begin.checked_add(len).is_some();
        if !fits(guest) || !fits(user) {
            let what = format!("{len} bytes at {guest:#x} ({user:#x}) do not fit");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let region = of_peer(fd, described.offset, len, watch, stranger)?;
        Ok(Self { described, region })
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> u64 {
        self.described.len
    }

    /// Whether it is this one; the file's offset does not matter.
    pub(crate) fn is(&self, other: &Described) -> bool {
        let Described {
            guest, len, user, ..
        } = self.described;
        (guest, len, user) == (other.guest, other.len, other.user)
    }
}

impl Memory {
    /// Of these pieces.
    ///
    /// # Errors
    /// `InvalidInput` if two have the same of the guest's addresses.
    pub(crate) fn new(
        mut slots: Vec<Slot>,
        watch: Arc<Watch>,
        log: Option<Region>,
    ) -> io::Result<Self> {
        slots.sort_by_key(|slot| slot.described.guest);
        let end = |slot: &Slot| slot.described.guest + slot.described.len;
        if slots
            .windows(2)
            .any(|pair| end(&pair[0]) > pair[1].described.guest)
        {
            let what = "two pieces of memory overlap in the guest";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        Ok(Self { slots, watch, log })
    }

    /// The pieces.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Whether a file shrank under us.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.watch.lost.load(Ordering::Acquire)
    }

    /// `len` bytes at a guest's address; `None` also if they are in several pieces.
    #[inline]
    pub(super) fn piece(&self, at: u64, len: usize) -> Option<Piece<'_>> {
        let after = self.slots.partition_point(|it| it.described.guest <= at);
        let slot = &self.slots[after.checked_sub(1)?];
        let (offset, size) = (at - slot.described.guest, slot.described.len);
        let is_in = offset < size && len as u64 <= size - offset;
        is_in.then_some(Piece {
            region: &slot.region,
            at: offset,
        })
    }

    /// Copies out bytes at a guest's address; false if not all of them are there.
    #[inline]
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let mut done = 0;
        self.parts(at, into.len(), |_, slot, offset, len| {
            slot.region.read(offset, &mut into[done..done + len]);
            done += len;
        })
    }

    /// Copies bytes to a guest's address; false if not all of them are there.
    #[inline]
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> bool {
        let mut done = 0;
        let written = self.parts(at, bytes.len(), |_, slot, offset, len| {
            slot.region.write(offset, &bytes[done..done + len]);
            done += len;
        });
        if let Some(log) = &self.log {
            mark(log, at, done as u64);
        }
        written
    }

    /// Looks up bytes at a guest's address; false if not all of them are there.
    #[inline]
    pub(super) fn find(&self, at: u64, len: usize, into: &mut Vec<Found>) -> bool {
        self.parts(at, len, |number, slot, at, len| {
            // The processor goes on by itself when it has seen some.
            for line in 0..AHEAD {
                slot.region.prefetch(at + LINE * line);
            }
            into.push(Found {
                slot: number as u32,
                len: len as u32,
                at,
            });
        })
    }

    /// Copies out bytes that were found.
    pub(super) fn read_found(&self, found: &Found, into: &mut [u8]) {
        self.slots[found.slot as usize].region.read(found.at, into);
    }

    /// Copies bytes to a guest's address that were found in another guest's memory, without the first `skip`
    /// of them; false if not all of the place is there.
    #[inline]
    pub(super) fn copy(
        &self,
        at: u64,
        len: usize,
        (from, found, skip): (&Self, &Found, usize),
    ) -> bool {
        let theirs = &from.slots[found.slot as usize].region;
        let mut done = skip as u64;
        let copied = self.parts(at, len, |_, slot, offset, len| {
            slot.region
                .copy(offset, theirs, found.at + done, len as u64);
            done += len as u64;
        });
        if let Some(log) = &self.log {
            mark(log, at, done - skip as u64);
        }
        copied
    }

    /// Notes that bytes at a guest's address were written.
    #[inline]
    pub(crate) fn wrote(&self, at: u64, len: u64) {
        if let Some(log) = &self.log {
            mark(log, at, len);
        }
    }

    /// Asks the processor for the header and the begin of a frame at a guest's address. A hint.
    #[inline]
    pub(crate) fn prefetch(&self, at: u64) {
        if let Some((region, offset)) = self.hinted(at) {
            region.prefetch(offset);
            region.prefetch(offset + LINE);
        }
    }

    /// The same, to be written. A hint.
    #[inline]
    pub(crate) fn prefetch_write(&self, at: u64) {
        if let Some((region, offset)) = self.hinted(at) {
            region.prefetch_write(offset);
            region.prefetch_write(offset + LINE);
        }
    }

    /// The piece that has what is at a guest's address, and where there. NB: elsewhere no line is asked for: it would
    /// be taken from whoever has it.
    #[inline]
    fn hinted(&self, at: u64) -> Option<(&Region, u64)> {
        let after = self.slots.partition_point(|it| it.described.guest <= at);
        let slot = &self.slots[after.checked_sub(1)?];
        let offset = at - slot.described.guest;
        (offset < slot.described.len).then_some((&slot.region, offset))
    }

    /// `len` bytes at one of the front-end's addresses, within one piece, aligned.
    pub(crate) fn area(&self, user: u64, len: u64, align: u64) -> Option<Area> {
        let slot = self.slots.iter().find(|slot| {
            let it = &slot.described;
            user >= it.user && user - it.user < it.len && len <= it.len - (user - it.user)
        })?;
        let at = user - slot.described.user;
        at.is_multiple_of(align).then(|| Area {
            region: slot.region.clone(),
            at,
        })
    }

    /// Goes over the parts of a range: number of the piece, the piece, offset there, bytes. False if it ends before the range does.
    #[inline]
    fn parts(&self, at: u64, len: usize, mut part: impl FnMut(usize, &Slot, u64, usize)) -> bool {
        let (mut at, mut left) = (at, len);
        while left > 0 {
            let after = self.slots.partition_point(|it| it.described.guest <= at);
            let Some(number) = after.checked_sub(1) else {
                return false;
            };
            let slot = &self.slots[number];
            let offset = at - slot.described.guest;
            if offset >= slot.described.len {
                return false;
            }
            let now = (slot.described.len - offset).min(left as u64) as usize;
            part(number, slot, offset, now);
            left -= now;
            // A piece ends at the last address at most.
            at = at.wrapping_add(now as u64);
        }
        true
    }
}

impl Piece<'_> {
    /// Copies out bytes behind the first `skip`.
    #[inline]
    pub(super) fn read(&self, skip: usize, into: &mut [u8]) {
        self.region.read(self.at + skip as u64, into);
    }

    /// Copies bytes to behind the first `skip`. NB: the log is [told](Memory::wrote) of it by who does that.
    #[inline]
    pub(super) fn write(&self, skip: usize, bytes: &[u8]) {
        self.region.write(self.at + skip as u64, bytes);
    }

    /// As [`write`](Self::write), of bytes that were found in another guest's memory.
    #[inline]
    pub(super) fn copy(&self, skip: usize, from: &Memory, found: &Found) {
        let theirs = &from.slots[found.slot as usize].region;
        let at = self.at + skip as u64;
        self.region.copy(at, theirs, found.at, found.len.into());
    }
}

/// Marks pages in a log of dirty memory: a bit each. What is beyond it has none.
fn mark(log: &Region, at: u64, len: u64) {
    if len == 0 {
        return;
    }
    let pages = at / PAGE..=at.saturating_add(len - 1) / PAGE;
    for page in pages {
        let byte = page / 8;
        if byte >= log.len() {
            return;
        }
        log.set_bits(byte, 1 << (page % 8));
    }
}

/// Lines of bytes that were looked up which the processor is asked for.
const AHEAD: u64 = 4;
/// Bytes of one. A frame of 64 bytes mostly is in two, as its header is before it.
const LINE: u64 = 64;
/// Bytes that a bit of the log stands for (`VHOST_LOG_PAGE`).
const PAGE: u64 = 4096;

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    pub(crate) fn file(len: u64) -> OwnedFd {
        let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    }

    fn described(guest: u64, len: u64, user: u64, offset: u64) -> Described {
        Described {
            guest,
            len,
            user,
            offset,
        }
    }

    /// Two pieces that touch in the guest and lie the other way round in the file, and one apart.
    fn memory(log: Option<Region>) -> Memory {
        let fd = file(0x6000);
        let watch = Arc::default();
        let pieces = [
            described(0x10_0000, 0x2000, 0x7000_0000, 0x2000),
            described(0x10_2000, 0x2000, 0x5000_0000, 0),
            described(0x20_0000, 0x1000, 0x9000_0000, 0x4000),
        ];
        let slots = pieces.map(|it| Slot::map(it, &fd, &watch, None).unwrap());
        Memory::new(slots.to_vec(), watch, log).unwrap()
    }

    #[test]
    fn a_range_across_pieces_is_translated_in_each_v1() {
        let memory = memory(None);
        let bytes: Vec<u8> = (0..=255).collect();
        assert!(memory.write(0x10_1f80, &bytes));
        let mut back = [0; 256];
        assert!(memory.read(0x10_1f80, &mut back));
        assert_eq!(back[..], bytes[..]);
        // Not beyond the start's piece in the front-end's view, where other memory lies.
        let second = memory.area(0x5000_0000, 128, 1).unwrap();
        let mut there = [0; 128];
        second.region.read(second.at, &mut there);
        assert_eq!(there[..], bytes[128..]);
    }

    #[test]
    fn what_is_not_there_is_neither_read_nor_written_v5() {
        let memory = memory(None);
        let mut bytes = [0; 16];
        for at in [
            0,
            0xf_fff8,
            0x10_3ff8,
            0x1f_ffff,
            0x20_0ff8,
            u64::MAX,
            u64::MAX - 8,
        ] {
            assert!(!memory.read(at, &mut bytes), "{at:#x}");
            assert!(!memory.write(at, &bytes), "{at:#x}");
        }
        assert!(memory.read(0x20_0ff0, &mut bytes));
    }

    #[test]
    fn an_area_lies_in_one_piece_and_is_aligned() {
        let memory = memory(None);
        assert!(memory.area(0x7000_0000, 0x2000, 16).is_some());
        assert!(memory.area(0x7000_0010, 0x2000, 16).is_none());
        assert!(memory.area(0x7000_0008, 16, 16).is_none());
        assert!(memory.area(0x7000_1fff, 1, 1).is_some());
        assert!(memory.area(0x7000_2000, 1, 1).is_none());
        assert!(memory.area(0x6fff_ffff, u64::MAX, 1).is_none());
    }

    #[test]
    fn pieces_that_overflow_overlap_or_exceed_their_file_are_refused_v5() {
        let (fd, watch) = (file(0x4000), Arc::default());
        for bad in [
            described(0, 0, 0, 0),
            described(0, 0x4001, 0, 0),
            described(0, 0x4000, 0, 1),
            described(0, 0x1000, 0, u64::MAX - 0xfff),
            described(u64::MAX - 0xfff, 0x2000, 0, 0),
            described(0, 0x2000, u64::MAX - 0xfff, 0),
            described(0, u64::MAX, 0, 0x1000),
        ] {
            assert!(Slot::map(bad, &fd, &watch, None).is_err(), "{bad:?}");
        }
        let one = Slot::map(described(0, 0x2000, 0, 0), &fd, &watch, None).unwrap();
        let two = Slot::map(described(0x1fff, 0x1000, 0, 0), &fd, &watch, None).unwrap();
        assert!(Memory::new(vec![two, one], watch, None).is_err());
    }

    #[test]
    fn only_the_kernels_memory_is_mapped() {
        let here = std::fs::File::open("/proc/self/exe").unwrap();
        let watch = Arc::default();
        let error = Slot::map(described(0, 0x1000, 0, 0), &here, &watch, None).unwrap_err();
        assert!(error.to_string().contains("tmpfs"), "{error}");
    }

    #[test]
    fn a_file_that_shrinks_is_found_out_and_ends_nothing_v20() {
        let (fd, watch) = (file(0x4000), Arc::default());
        let slot = Slot::map(described(0, 0x4000, 0, 0), &fd, &watch, None).unwrap();
        let memory = Memory::new(vec![slot], watch, None).unwrap();
        assert!(memory.write(0x2000, b"there"));
        assert!(!memory.is_lost());
        ftruncate(&fd, 0x1000).unwrap();
        let mut bytes = [1; 5];
        assert!(memory.read(0x2000, &mut bytes));
        assert_eq!(bytes, [0; 5]);
        assert!(memory.is_lost());
        assert!(memory.write(0x2000, b"again"));
    }

    #[test]
    fn what_is_written_is_logged_page_by_page_and_never_beyond_the_log() {
        let log = Region::heap(40);
        let memory = memory(Some(log.clone()));
        let bits = || {
            let mut bytes = [0; 40];
            log.read(0, &mut bytes);
            bytes
        };
        assert!(memory.read(0x10_1000, &mut [0; 8]));
        assert_eq!(bits(), [0; 40]);
        assert!(memory.write(0x10_1ffc, &[1; 8]));
        let mut expected = [0; 40];
        expected[0x20] = 0b110;
        assert_eq!(bits(), expected);
        assert!(memory.write(0x20_0000, &[1; 8]));
        memory.wrote(u64::MAX, 8);
        assert_eq!(bits(), expected);
    }
}

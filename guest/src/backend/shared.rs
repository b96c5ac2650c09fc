//! Memory that a back-end and a program share.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use vnplug_ring::Region;
use vnplug_ring::control::backend::Mapped;

use crate::error::Error;
use crate::map::{blank, map_at};

/// Memory that the other side may change at any time: it is copied out and in, and never lent.
///
/// It stays mapped as long as this lives. After it was taken back, by whichever side, it reads as zeros;
/// to touch it is never a fault.
#[derive(Debug)]
pub struct SharedMemory {
    /// All that is mapped for it.
    whole: Region,
    region: Region,
    writable: bool,
}

impl SharedMemory {
    pub(super) fn map(fd: BorrowedFd<'_>, mapped: &Mapped, writable: bool) -> Result<Self, Error> {
        let Mapped { offset, len, .. } = *mapped;
        let (whole, at) = match map_at(fd, offset, len, writable) {
            // NB: User-mode Linux' /dev/mmapper is mapped from its beginning only.
            Err(Error::System { .. }) if offset > 0 => {
                (map_at(fd, 0, offset.saturating_add(len), writable)?, offset)
            }
            mapped => (mapped?, 0),
        };
        let region = whole.part(at, len);
        let region = region.ok_or(Error::Invalid("shared memory beyond its end"))?;
        Ok(Self {
            whole,
            region,
            writable,
        })
    }

    /// Puts zeros in its place.
    pub(super) fn let_go(&self) -> Result<(), Error> {
        blank(&self.whole, self.writable)
    }

    /// Bytes of it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.region.len()
    }

    /// Never: a region has a page at least.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.region.is_empty()
    }

    /// Whether this side may write it.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Where it is mapped, for who knows how to share memory with somebody whom he does not trust.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }

    /// Copies out.
    ///
    /// # Errors
    /// [`Error::Invalid`] beyond its end.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.within(offset, into.len() as u64)?;
        self.region.read(offset, into);
        Ok(())
    }

    /// Copies in.
    ///
    /// # Errors
    /// [`Error::Invalid`] beyond its end, or if this side may not write it.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.within(offset, bytes.len() as u64)?;
        self.may_write()?;
        self.region.write(offset, bytes);
        Ok(())
    }

    /// Loads a word, at a multiple of 8, and sees what was written before it was stored.
    ///
    /// # Errors
    /// [`Error::Invalid`] beyond its end or between two words.
    pub fn load(&self, offset: u64) -> Result<u64, Error> {
        self.word(offset)?;
        Ok(self.region.load_u64(offset, Ordering::Acquire))
    }

    /// Stores a word, at a multiple of 8: who loads it sees what was written before.
    ///
    /// # Errors
    /// As [`load`](Self::load), and if this side may not write it.
    pub fn store(&self, offset: u64, value: u64) -> Result<(), Error> {
        self.word(offset)?;
        self.may_write()?;
        self.region.store_u64(offset, value, Ordering::Release);
        Ok(())
    }

    fn word(&self, offset: u64) -> Result<(), Error> {
        if !offset.is_multiple_of(8) {
            return Err(Error::Invalid("a word of shared memory between two words"));
        }
        self.within(offset, 8)
    }

    fn within(&self, offset: u64, len: u64) -> Result<(), Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len() => Ok(()),
            _ => Err(Error::Invalid("shared memory beyond its end")),
        }
    }

    fn may_write(&self) -> Result<(), Error> {
        match self.writable {
            true => Ok(()),
            false => Err(Error::Invalid("memory that is the other side's to write")),
        }
    }
}

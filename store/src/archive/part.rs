//! A packed file on its way to the disk, and the look whether it got there.

use std::cell::RefCell;
use std::hash::{DefaultHasher, Hasher as _};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use crate::disk::{BLOCK, Buffer, Disk, Write as DiskWrite};

/// The disk that is read and written at a time, by one thread.
pub(super) type SharedDisk<'d> = RefCell<&'d mut dyn Disk>;

/// A file that is written.
pub(super) struct Part<'a, 'd> {
    disk: &'a SharedDisk<'d>,
    buffer: Buffer,
    filled: usize,
    written: u64,
    sum: DefaultHasher,
}

/// What was written of a file.
pub(super) struct Print {
    /// Its bytes.
    pub(super) len: u64,
    sum: u64,
}

impl<'a, 'd> Part<'a, 'd> {
    pub(super) fn create(disk: &'a SharedDisk<'d>, path: &Path) -> io::Result<Self> {
        disk.borrow_mut().create(path)?;
        Ok(Self {
            disk,
            buffer: Buffer::new(AT_ONCE, u16::MAX),
            filled: 0,
            written: 0,
            sum: DefaultHasher::new(),
        })
    }

    /// Has all of it on the disk, under the time of `like`.
    pub(super) fn finish(mut self, like: &Path) -> io::Result<Print> {
        let len = self.written + self.filled as u64;
        self.pass_on()?;
        let mut disk = self.disk.borrow_mut();
        disk.truncate(len)?;
        disk.date(like)?;
        disk.sync()?;
        disk.close();
        drop(disk);
        Ok(Print {
            len,
            sum: self.sum.finish(),
        })
    }

    /// Writes what is in the buffer, in whole blocks.
    fn pass_on(&mut self) -> io::Result<()> {
        if self.filled == 0 {
            return Ok(());
        }
        self.sum.write(&self.buffer[..self.filled]);
        let len = self.filled.next_multiple_of(BLOCK);
        self.buffer[self.filled..len].fill(0);
        let mut disk = self.disk.borrow_mut();
        disk.start(DiskWrite {
            buffer: std::mem::replace(&mut self.buffer, Buffer::none()),
            len,
            offset: self.written,
        });
        let mut result = Ok(());
        while let Some(written) = disk.finish() {
            self.buffer = written.write.buffer;
            result = result.and(written.result);
        }
        self.written += self.filled as u64;
        self.filled = 0;
        result
    }
}

impl Write for Part<'_, '_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let len = bytes.len().min(AT_ONCE - self.filled);
        self.buffer[self.filled..self.filled + len].copy_from_slice(&bytes[..len]);
        self.filled += len;
        if self.filled == AT_ONCE {
            self.pass_on()?;
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Part<'_, '_> {
    fn drop(&mut self) {
        self.disk.borrow_mut().close();
    }
}

/// Reads a file that was written and synced: whether the disk has what was meant to be there.
pub(super) fn check(
    disk: &SharedDisk<'_>,
    path: &Path,
    print: &Print,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<()> {
    let mut buffer = Buffer::new(AT_ONCE, u16::MAX);
    let mut sum = DefaultHasher::new();
    let mut len = 0;
    // The same pieces as it was written in.
    each(disk, path, &mut buffer, pulse, |bytes| {
        len += bytes.len() as u64;
        sum.write(bytes);
        Ok(())
    })?;
    match (len, sum.finish()) == (print.len, print.sum) {
        true => Ok(()),
        false => Err(io::Error::new(
            ErrorKind::InvalidData,
            "what the disk has of the packed file is not what was written",
        )),
    }
}

/// Reads all of a file. `pulse` is asked before each piece.
pub(super) fn each(
    disk: &SharedDisk<'_>,
    path: &Path,
    buffer: &mut Buffer,
    pulse: &mut dyn FnMut() -> bool,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut offset = 0;
    loop {
        if !pulse() {
            return Err(ErrorKind::Interrupted.into());
        }
        let len = disk.borrow_mut().read(path, offset, buffer)?;
        take(&buffer[..len])?;
        offset += len as u64;
        if len < buffer.len() {
            return Ok(());
        }
    }
}

/// Bytes of a write.
const AT_ONCE: usize = 256 << 10;

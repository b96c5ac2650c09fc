//! The door to the disk: every file operation of the recorder, and of the packing of what
//! it closed, goes through [`Disk`].
//!
//! | implementation | what for |
//! |---|---|
//! | [`Real`] | one directory of a real file system: O_DIRECT with io_uring, else with pwrite, else buffered |
//! | [`Sim`] | tests: a disk in memory that fails the Nth call or loses its power after any operation |
//!
//! A [`Disk`] belongs to one thread and has one file open for writing at a time, the segment.
//! A program that reads segments takes a [`lease`]; no segment under a lease is recycled.

mod buffer;
mod directory;
mod huge;
mod lease;
mod real;
mod sim;
mod uring;

use std::fmt::Debug;
use std::io;
use std::path::Path;

pub use buffer::{BLOCK, Buffer};
pub use directory::make_directory;
pub use lease::{lease, remove_unless_leased};
pub use real::{Real, Way};
pub use sim::{Fault, Image, Sim};

/// File operations of one directory's recorder.
///
/// Paths are whole. Errors carry an errno ([`io::Error::raw_os_error`]).
pub trait Disk: Debug + Send {
    /// Makes a file that must not exist and opens it for writing; the one before is closed.
    ///
    /// # Errors
    /// Those of open(2).
    fn create(&mut self, path: &Path) -> io::Result<()>;

    /// Reserves the open file's blocks from `offset` on, without changing its length. On a full disk nothing
    /// is reserved beyond the file's end any more.
    ///
    /// # Errors
    /// Those of fallocate(2); a file system without it says `EOPNOTSUPP`.
    fn allocate(&mut self, offset: u64, bytes: u64) -> io::Result<()>;

    /// Takes a write to the open file. Writes are done in the order in which they are started: a
    /// reader never sees a later one without those before it. After one that failed the others are
    /// not done.
    fn start(&mut self, write: Write);

    /// Begins what was started, where that is possible without waiting for it.
    fn submit(&mut self) {}

    /// Waits for the oldest write that was started; `None` if there is none.
    fn finish(&mut self) -> Option<Written>;

    /// fdatasync(2) of the open file: all writes that are finished.
    ///
    /// # Errors
    /// Those of fdatasync(2). After one, nothing is known of the data since the last success.
    fn sync(&mut self) -> io::Result<()>;

    /// Sets the open file's length and gives back what was reserved beyond it.
    ///
    /// # Errors
    /// Those of ftruncate(2).
    fn truncate(&mut self, bytes: u64) -> io::Result<()>;

    /// Gives back what is reserved beyond the end of a file that a recorder before did not close.
    ///
    /// # Errors
    /// Those of open(2) and ftruncate(2).
    fn trim(&mut self, path: &Path) -> io::Result<()>;

    /// Closes the open file, if there is one.
    fn close(&mut self);

    /// Writes a small file and syncs it.
    ///
    /// # Errors
    /// Those of open(2), write(2) and fsync(2).
    fn store(&mut self, path: &Path, bytes: &[u8]) -> io::Result<()>;

    /// Reads a small file; `None` if there is none.
    ///
    /// # Errors
    /// Those of open(2) and read(2).
    fn load(&mut self, path: &Path) -> io::Result<Option<Vec<u8>>>;

    /// Reads of a file from `offset` on, which is a multiple of [`BLOCK`]: what the disk has, not the page
    /// cache, where the file system lets us. Fewer bytes than `into` has are read only at the file's end.
    ///
    /// # Errors
    /// Those of open(2) and read(2); `EINVAL` if it is no regular file.
    fn read(&mut self, path: &Path, offset: u64, into: &mut Buffer) -> io::Result<usize>;

    /// Gives the open file the time at which another one was changed.
    ///
    /// # Errors
    /// Those of stat(2) and futimens(3).
    fn date(&mut self, like: &Path) -> io::Result<()>;

    /// Appends to a small file, which is made if it is not there. Nothing depends on it: it is not synced,
    /// and a disk that cannot do it says `Unsupported`.
    ///
    /// # Errors
    /// Those of open(2) and write(2).
    fn append(&mut self, _path: &Path, _bytes: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// rename(2).
    ///
    /// # Errors
    /// Those of rename(2).
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()>;

    /// Renames the open file to a name that no file has.
    ///
    /// # Errors
    /// `EEXIST` if one has it; those of rename(2).
    fn publish(&mut self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file unless somebody has a [`lease`] on it; true if it is gone.
    ///
    /// # Errors
    /// Those of unlink(2).
    fn remove(&mut self, path: &Path) -> io::Result<bool>;

    /// Removes a file even if somebody reads it, who goes on with what he has open; true if somebody does.
    ///
    /// # Errors
    /// Those of unlink(2).
    fn recycle(&mut self, path: &Path) -> io::Result<bool> {
        self.remove(path).map(|_| false)
    }

    /// Bytes of [`recycle`](Self::recycle)d files that are still read, and so not free.
    fn held(&mut self) -> u64 {
        0
    }

    /// Takes the oldest of those files from its reader; the bytes that are free again, or `None` if there is
    /// none.
    ///
    /// # Errors
    /// Those of ftruncate(2); the file is left alone from then on.
    fn cut_held(&mut self) -> Option<io::Result<u64>> {
        None
    }

    /// fsync(2) of a directory: its files' names.
    ///
    /// # Errors
    /// Those of fsync(2).
    fn sync_dir(&mut self, dir: &Path) -> io::Result<()>;

    /// The files of a directory.
    ///
    /// # Errors
    /// Those of readdir(3).
    fn list(&mut self, dir: &Path) -> io::Result<Vec<Entry>>;

    /// How full the file system is.
    ///
    /// # Errors
    /// Those of statvfs(3).
    fn space(&mut self, dir: &Path) -> io::Result<Space>;

    /// Holds a lock file until the disk is dropped, or until it is held again since the one of this name is
    /// another file now: its directory was removed and made again.
    ///
    /// # Errors
    /// `EWOULDBLOCK` if another holds it; those of open(2).
    fn lock(&mut self, path: &Path) -> io::Result<()>;
}

/// A write to be: `len` bytes from the start of `buffer`, to `offset`.
///
/// Both are multiples of [`BLOCK`] unless the file system is written through its cache.
#[derive(Debug)]
pub struct Write {
    /// The bytes; comes back with [`Written`].
    pub buffer: Buffer,
    /// How many of them.
    pub len: usize,
    /// Where to.
    pub offset: u64,
}

/// A write that is over.
#[derive(Debug)]
pub struct Written {
    /// What was asked.
    pub write: Write,
    /// All of it is written, or why not: some of it may be.
    pub result: io::Result<()>,
}

/// A file of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its length.
    pub len: u64,
    /// Bytes it takes on the disk.
    pub bytes: u64,
    /// When it was written last, nanoseconds since 1970.
    pub written_ns: u64,
}

/// How full a file system is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// All.
    pub total: u64,
    /// What may still be written.
    pub free: u64,
}

/// Whether the disk is full: a file system, or a quota. A file that is as long as a file may be
/// (`EFBIG`) is no full disk: the next one has room.
pub fn is_full(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = error.raw_os_error();
    [Errno::NOSPC, Errno::DQUOT]
        .map(|errno| Some(errno.raw_os_error()))
        .contains(&code)
}

/// Whether there is no such file; one that cannot be read is there.
pub(crate) fn is_gone(disk: &mut dyn Disk, path: &Path) -> bool {
    let read = disk.read(path, 0, &mut Buffer::new(BLOCK, u16::MAX));
    read.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

fn errno(errno: rustix::io::Errno) -> io::Error {
    io::Error::from(errno)
}

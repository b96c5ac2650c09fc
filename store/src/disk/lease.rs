//! Leases: who reads a segment holds a shared flock(2) on it.
//!
//! A segment that somebody reads loses its name to the quota all the same: else a slow reader of old packets
//! would cost new ones. Its reader goes on with what it has open, until the room is needed ([`Recycled`]).
//! Whatever else removes a segment waits for its readers ([`remove_unless_leased`]).

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, ftruncate, open, unlink};
use rustix::io::Errno;

use super::errno;

/// Opens a segment for reading, and keeps the recorder from recycling it until the file is closed.
///
/// # Errors
/// Those of open(2); `ENOENT` also if it is being recycled at this moment; `EINVAL` if it is no
/// regular file.
pub fn lease(path: &Path) -> io::Result<File> {
    let file = open_regular(path, OFlags::RDONLY).map_err(errno)?;
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Err(errno(Errno::NOENT)),
        Err(error) => return Err(errno(error)),
    }
    if fstat(&file).map_err(errno)?.st_nlink == 0 {
        return Err(errno(Errno::NOENT));
    }
    Ok(File::from(file))
}

/// Removes a file that nobody has a [`lease`] on; true if it is gone.
///
/// # Errors
/// Those of open(2) and unlink(2), but a file that is not there is gone; `EINVAL` if it is no
/// regular file.
pub fn remove_unless_leased(path: &Path) -> io::Result<bool> {
    // NFS gives an exclusive lock only to who may write.
    let file = match open_regular(path, OFlags::RDWR) {
        Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => open_regular(path, OFlags::RDONLY),
        file => file,
    };
    let file = match file {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(true),
        Err(error) => return Err(errno(error)),
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(false),
        Err(error) => return Err(errno(error)),
    }
    match unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(error) => Err(errno(error)),
    }
}

/// Files that lost their names while somebody read them, the oldest first. Their blocks are free when the
/// last reader closes them, or when they are cut.
#[derive(Debug, Default)]
pub(super) struct Recycled(VecDeque<(OwnedFd, u64)>);

impl Recycled {
    /// Removes a file even while it is read; true if somebody reads it.
    pub(super) fn recycle(&mut self, path: &Path) -> io::Result<bool> {
        let file = match open_regular(path, OFlags::RDWR) {
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => open_regular(path, OFlags::RDONLY),
            file => file,
        };
        let file = match file {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(errno(error)),
        };
        let is_read = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => false,
            Err(Errno::WOULDBLOCK) => true,
            Err(error) => return Err(errno(error)),
        };
        match unlink(path) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(errno(error)),
        }
        let about = fstat(&file).map_err(errno)?;
        // Under another name it is somebody's copy, and none of ours any more.
        if is_read && about.st_nlink == 0 {
            self.0.push_back((file, about.st_blocks as u64 * 512));
        }
        Ok(is_read)
    }

    /// Bytes of those that are still read.
    pub(super) fn bytes(&mut self) -> u64 {
        let is_read = |file: &OwnedFd| {
            flock(file, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
        };
        self.0.retain(|(file, _)| is_read(file));
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Cuts the oldest: its reader finds its end. The bytes that are free again; `None` if there is none.
    pub(super) fn cut(&mut self) -> Option<io::Result<u64>> {
        let (file, bytes) = self.0.pop_front()?;
        let cut = match fstat(&file) {
            Ok(about) if about.st_nlink == 0 => ftruncate(&file, 0).map(|()| bytes),
            other => other.map(|_| 0),
        };
        Some(cut.map_err(errno))
    }
}

/// Does not wait for the other end of a FIFO, which is refused as everything that is no file.
pub(super) fn open_regular(path: &Path, access: OFlags) -> Result<OwnedFd, Errno> {
    let flags = access | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_or_a_directory_is_no_segment_and_holds_nobody() {
        let dir = std::env::temp_dir().join(format!("vnplug-lease-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let fifo = dir.join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::from_raw_mode(0o600)).unwrap();
        for path in [fifo.as_path(), dir.as_path()] {
            assert!(lease(path).is_err(), "{}", path.display());
            assert!(remove_unless_leased(path).is_err(), "{}", path.display());
        }
        let file = dir.join("file");
        std::fs::write(&file, "x").unwrap();
        let held = lease(&file).unwrap();
        assert!(!remove_unless_leased(&file).unwrap());
        drop(held);
        assert!(remove_unless_leased(&file).unwrap());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

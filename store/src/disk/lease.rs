//! Leases: who reads a segment holds a shared flock(2) on it; the recorder removes a segment only
//! under an exclusive one that it gets at once.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open, unlink};
use rustix::io::Errno;

use super::errno;

/// Opens a segment for reading, and keeps the recorder from recycling it until the file is closed.
///
/// # Errors
/// Those of open(2); `ENOENT` also if it is being recycled at this moment.
pub fn lease(path: &Path) -> io::Result<File> {
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(errno)?;
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
/// Those of open(2) and unlink(2), but a file that is not there is gone.
pub fn remove_unless_leased(path: &Path) -> io::Result<bool> {
    let file = match open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
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

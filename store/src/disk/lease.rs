//! Leases: who reads a segment holds a shared flock(2) on it; the recorder removes a segment only
//! under an exclusive one that it gets at once.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, open, unlink};
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

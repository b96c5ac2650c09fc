//! Files in directories that somebody else may write, as the daemon's user may write `/run/vnplug`: root opens what a name
//! names without following a link, looks at what it opened, and changes that, whatever the name names by then.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Statx, StatxFlags, Uid, chownat, open, statx,
};

use crate::socket;

/// What lies at a name, held by a descriptor that opens nothing (`O_PATH`).
#[derive(Debug)]
pub struct Placed {
    file: OwnedFd,
    found: Statx,
}

impl Placed {
    /// What lies there; a link is not followed, and is what is found.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Self::of(open(path, flags, Mode::empty())?)
    }

    /// The file of a socket that was bound to `path`.
    ///
    /// # Errors
    /// Something else lies there; or the system's.
    pub fn of_socket(bound: impl AsFd, path: &Path) -> io::Result<Self> {
        let named = Self::open(path)?;
        // Only with CAP_NET_ADMIN, or above Linux 4.16, the kernel says which file it is. Without, what has another name,
        // which is one of another directory perhaps, is none that was bound here.
        let is_it = match socket::file_of(bound) {
            Ok(file) => Self::of(file)?.is_same(&named),
            Err(_) => named.found.stx_nlink == 1,
        };
        if named.kind() != FileType::Socket || !is_it {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "something else was put in the place of the socket",
            ));
        }
        Ok(named)
    }

    fn of(file: OwnedFd) -> io::Result<Self> {
        // Asks no file system that a stranger may serve.
        let flags = AtFlags::EMPTY_PATH | AtFlags::from_bits_retain(AT_STATX_DONT_SYNC);
        let found = statx(&file, "", flags, StatxFlags::BASIC_STATS)?;
        Ok(Self { file, found })
    }

    /// What kind of file it is.
    #[must_use]
    pub fn kind(&self) -> FileType {
        FileType::from_raw_mode(u32::from(self.found.stx_mode))
    }

    /// The user whose it is.
    #[must_use]
    pub fn owner(&self) -> u32 {
        self.found.stx_uid
    }

    /// Its permission bits.
    #[must_use]
    pub fn mode(&self) -> u32 {
        u32::from(self.found.stx_mode) & 0o7777
    }

    /// Gives it to a user, a group, or both.
    ///
    /// # Errors
    /// The system's.
    pub fn give(&self, uid: Option<u32>, gid: Option<u32>) -> io::Result<()> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        Ok(chownat(&self.file, "", uid, gid, AtFlags::EMPTY_PATH)?)
    }

    /// Sets its permission bits.
    ///
    /// # Errors
    /// The system's; it is a link.
    pub fn set_mode(&self, mode: u32) -> io::Result<()> {
        if self.kind() == FileType::Symlink {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(self.path(), std::fs::Permissions::from_mode(mode))
    }

    /// A path to what was opened, for calls that take paths alone; while this lives.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    fn is_same(&self, other: &Self) -> bool {
        let file = |it: &Statx| (it.stx_dev_major, it.stx_dev_minor, it.stx_ino);
        file(&self.found) == file(&other.found)
    }
}

impl AsFd for Placed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl From<Placed> for OwnedFd {
    fn from(placed: Placed) -> Self {
        placed.file
    }
}

/// `linux/fcntl.h`.
const AT_STATX_DONT_SYNC: u32 = 0x4000;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_link_in_the_place_of_a_socket_leads_to_nothing() {
        let dir = vnplug_testing::TestDir::new("placed");
        let (path, victim) = (dir.path("sock"), dir.path("victim"));
        let ours = UnixListener::bind(&path).unwrap();
        let placed = Placed::of_socket(&ours, &path).unwrap();
        placed.set_mode(0o640).unwrap();
        placed.give(None, None).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        std::fs::write(&victim, "").unwrap();
        let before = std::fs::metadata(&victim).unwrap().mode();
        std::fs::remove_file(&path).unwrap();
        symlink(&victim, &path).unwrap();
        Placed::of_socket(&ours, &path).unwrap_err();
        let link = Placed::open(&path).unwrap();
        assert_eq!(link.kind(), FileType::Symlink);
        link.set_mode(0o777).unwrap_err();
        // What was opened before is still the socket.
        placed.set_mode(0o600).unwrap();
        assert_eq!(std::fs::metadata(&victim).unwrap().mode(), before);
    }

    #[test]
    fn a_file_of_another_name_is_none_that_was_bound_there() {
        let dir = vnplug_testing::TestDir::new("placed");
        let (path, other) = (dir.path("sock"), dir.path("other"));
        let ours = UnixListener::bind(&path).unwrap();
        let _others = UnixListener::bind(&other).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::hard_link(&other, &path).unwrap();
        Placed::of_socket(&ours, &path).unwrap_err();
    }
}

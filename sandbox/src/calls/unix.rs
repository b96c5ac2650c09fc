//! Unix sockets by path: what file the program means, and which of them are the sandbox's own.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{
    AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags, fstat, openat, openat2, statx,
};
use rustix::time::Timespec;

use super::address::unix_address;
use super::control::number_of;
use crate::sys::identity::Identity;
use crate::sys::socket::Address;
use crate::sys::{lock, process};

/// A file that the program named, looked up once.
#[derive(Debug)]
pub(super) struct Place {
    file: OwnedFd,
    /// Where it is.
    pub(super) path: PathBuf,
}

/// Where a file is or will be: its directory, which is held, and its name there. What is judged about it is true when it is
/// used, whatever becomes of the path by which the program named it.
#[derive(Debug)]
pub(super) struct Spot {
    pub(super) directory: OwnedFd,
    pub(super) name: OsString,
}

/// Files of Unix sockets that programs of the sandbox have bound. Each is held open, so that its number cannot
/// come to mean another file.
#[derive(Debug, Default)]
pub(super) struct Own(Mutex<HashMap<(u64, u64), OwnedFd>>);

/// Where a thread is: its working directory and its root.
#[derive(Debug)]
pub(super) struct Home {
    directory: OwnedFd,
    root: OwnedFd,
    /// Its root is ours, so that a path means the same here.
    is_ours: bool,
    thread: u32,
    /// As whom it reaches files, if not as we do.
    identity: Option<Identity>,
}

impl Place {
    /// Looks up what `path` means to a thread.
    ///
    /// # Errors
    /// The system's; `EXDEV` for what cannot be followed in another root than ours.
    pub(super) fn of(thread: u32, path: &[u8]) -> io::Result<Self> {
        Self::opened(Home::of(thread)?.open(path, OFlags::PATH)?)
    }

    /// What is at a spot.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn there(spot: &Spot) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Self::opened(openat(&spot.directory, &spot.name, flags, Mode::empty())?)
    }

    fn opened(file: OwnedFd) -> io::Result<Self> {
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        Ok(Self { file, path })
    }

    /// An address by which the kernel finds this file, whatever lies at its path by now.
    pub(super) fn address(&self) -> Address {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        unix_address(path.as_bytes()).expect("the path is short")
    }

    /// Whether the file was made then or later. The kernel tells only half of the number of a socket's file: among
    /// files of one moment that is enough.
    pub(super) fn is_made_since(&self, time: Timespec) -> bool {
        let stat = statx(&self.file, "", AtFlags::EMPTY_PATH, StatxFlags::BTIME);
        stat.is_ok_and(|stat| {
            let made = (stat.stx_btime.tv_sec, i64::from(stat.stx_btime.tv_nsec));
            stat.stx_mask & StatxFlags::BTIME.bits() != 0 && made >= (time.tv_sec, time.tv_nsec)
        })
    }

    /// The device and the number of the file.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn number(&self) -> io::Result<(u64, u64)> {
        let stat = fstat(&self.file)?;
        Ok((stat.st_dev, stat.st_ino))
    }
}

impl Spot {
    /// The spot that `path` means, whose directory `open` looks up.
    ///
    /// # Errors
    /// `EBUSY` for the root, `EINVAL` if it ends in no name, and those of `open`.
    pub(super) fn of(
        path: &[u8],
        open: impl FnOnce(&[u8]) -> Result<OwnedFd, i32>,
    ) -> Result<Self, i32> {
        let trimmed = match path.iter().rposition(|byte| *byte != b'/') {
            Some(last) => &path[..=last],
            None => return Err(libc::EBUSY),
        };
        let (parent, name) = split(trimmed);
        if matches!(name, b"" | b"." | b"..") {
            return Err(libc::EINVAL);
        }
        Ok(Self {
            directory: open(parent)?,
            name: OsStr::from_bytes(name).to_os_string(),
        })
    }

    /// The same for a path of a thread.
    ///
    /// # Errors
    /// The system's, and those of [`of`](Self::of).
    pub(super) fn of_thread(thread: u32, path: &[u8]) -> Result<Self, i32> {
        let home = Home::of(thread).map_err(number_of)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        Self::of(path, |parent| home.open(parent, flags).map_err(number_of))
    }

    /// Where it is by now.
    ///
    /// # Errors
    /// `EACCES` below `/proc`, and the system's.
    pub(super) fn path(&self) -> Result<PathBuf, i32> {
        Ok(super::files::place_of(&self.directory)?.join(&self.name))
    }
}

impl Own {
    /// A program of the sandbox has bound this one.
    pub(super) fn add(&self, place: Place) {
        const MOST: usize = 1024;
        let Ok(number) = place.number() else { return };
        let mut own = lock(&self.0);
        if own.len() >= MOST {
            // Those whose file is gone cannot be connected to.
            own.retain(|_, file| fstat(&*file).is_ok_and(|stat| stat.st_nlink > 0));
        }
        if own.len() < MOST {
            own.insert(number, place.file);
        }
    }

    /// Whether a program of the sandbox bound it.
    pub(super) fn has(&self, number: (u64, u64)) -> bool {
        lock(&self.0).contains_key(&number)
    }
}

impl Home {
    /// Looks where a thread is.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn of(thread: u32) -> io::Result<Self> {
        let open = |name: &str| {
            let path = format!("/proc/{thread}/{name}");
            openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        };
        let (directory, root) = (open("cwd")?, open("root")?);
        let (theirs, ours) = (fstat(&root)?, fs::metadata("/")?);
        let space = |whose: &str| fs::read_link(format!("/proc/{whose}/ns/mnt"));
        let is_ours = (theirs.st_dev, theirs.st_ino) == (ours.dev(), ours.ino())
            && space(&thread.to_string())? == space("self")?;
        Ok(Self {
            directory,
            root,
            is_ours,
            thread,
            identity: Identity::of(thread, None)?,
        })
    }

    /// Opens what a path means there.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn open(&self, path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
        let (flags, mode) = (flags | OFlags::CLOEXEC, Mode::empty());
        let path = self.of_theirs(path)?;
        let open = || match (self.is_ours, path.is_absolute()) {
            (true, true) => openat(CWD, &path, flags, mode),
            (true, false) => openat(&self.directory, &path, flags, mode),
            (false, true) => openat2(&self.root, &path, flags, mode, ResolveFlags::IN_ROOT),
            (false, false) => openat2(&self.directory, &path, flags, mode, ResolveFlags::BENEATH),
        };
        Ok(Identity::act(self.identity.as_ref(), open)?)
    }

    /// Makes the file of a Unix socket at `path`: `act` gets the name to bind to, and the calling thread's working
    /// directory is the one where that is meant, with the program's mask for new files. The thread must have a working
    /// directory of its own.
    ///
    /// If the root is ours, the name is the path as the program wrote it: that is what it sees later as its address.
    ///
    /// # Errors
    /// The system's, and those of `act`.
    pub(super) fn inside<T>(
        &self,
        path: &[u8],
        act: impl FnOnce(&[u8]) -> io::Result<T>,
    ) -> io::Result<T> {
        if self.is_ours {
            return self.standing_in(&self.directory, || act(path));
        }
        let (parent, name) = split(path);
        let directory = self.open(parent, OFlags::PATH | OFlags::DIRECTORY)?;
        self.standing_in(&directory, || act(name))
    }

    /// Does something as the program's user, with its mask for new files, where the calling thread's working directory
    /// is this one meanwhile. The thread must have a working directory of its own.
    ///
    /// # Errors
    /// The system's, and those of `act`.
    pub(super) fn standing_in<T>(
        &self,
        directory: &OwnedFd,
        act: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        rustix::process::fchdir(directory)?;
        let result = self.act(act);
        rustix::process::chdir("/")?;
        result
    }

    /// The same with another working directory.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn elsewhere(&self, directory: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            directory,
            root: self.root.try_clone()?,
            is_ours: self.is_ours,
            thread: self.thread,
            identity: Identity::of(self.thread, None)?,
        })
    }

    /// Does something as the program's user, with its mask for new files.
    ///
    /// # Errors
    /// The system's, and those of `act`.
    pub(super) fn act<T>(&self, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let mask = self.mask()?;
        with_mask(mask, || Identity::act(self.identity.as_ref(), act))
    }

    fn mask(&self) -> io::Result<Mode> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.thread))?;
        let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
        let mask = line.and_then(|text| u32::from_str_radix(text.trim(), 8).ok());
        Ok(Mode::from_raw_mode(mask.unwrap_or(0o077)))
    }

    /// `/proc/self` and what leads there from `/dev` are the program's, not ours.
    ///
    /// NB: a link of the program's own that leads there means ours. What is found is judged by where it lies all the same.
    fn of_theirs(&self, path: &[u8]) -> io::Result<PathBuf> {
        let unchanged = || Ok(Path::new(OsStr::from_bytes(path)).to_path_buf());
        let Some((head, rest)) = beginning(path) else {
            return unchanged();
        };
        let thread = self.thread;
        let group = || process::group_of(thread);
        let head = match head {
            [b"proc", b"self"] => format!("/proc/{}/", group()?),
            [b"proc", b"thread-self"] => format!("/proc/{}/task/{thread}/", group()?),
            [b"dev", b"fd"] => format!("/proc/{}/fd/", group()?),
            [b"dev", b"stdin"] if rest.is_empty() => format!("/proc/{}/fd/0", group()?),
            [b"dev", b"stdout"] if rest.is_empty() => format!("/proc/{}/fd/1", group()?),
            [b"dev", b"stderr"] if rest.is_empty() => format!("/proc/{}/fd/2", group()?),
            _ => return unchanged(),
        };
        let mut whole = head.into_bytes();
        whole.extend(rest);
        Ok(PathBuf::from(OsString::from_vec(whole)))
    }
}

/// The first two names of an absolute path, however many slashes and dots are between them, and what follows.
fn beginning(path: &[u8]) -> Option<([&[u8]; 2], &[u8])> {
    let mut rest = path.strip_prefix(b"/")?;
    let mut name = || {
        loop {
            let end = rest.iter().position(|byte| *byte == b'/');
            let (name, after) = match end {
                Some(end) => (&rest[..end], &rest[end + 1..]),
                None => (rest, &rest[rest.len()..]),
            };
            let is_over = end.is_none();
            rest = after;
            match name {
                b"" | b"." if is_over => return None,
                b"" | b"." => {}
                name => return Some((name, rest)),
            }
        }
    };
    let (first, _) = name()?;
    let (second, rest) = name()?;
    Some(([first, second], rest))
}

fn with_mask<T>(mask: Mode, act: impl FnOnce() -> T) -> T {
    let before = rustix::process::umask(mask);
    let result = act();
    rustix::process::umask(before);
    result
}

/// The directory and the name in it.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(0) => (b"/", &path[1..]),
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b".", path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_names_the_process_means_the_programs() {
        let pid = std::process::id();
        let home = Home::of(pid).unwrap();
        for (path, means) in [
            ("/proc/self/maps", "/proc/P/maps"),
            ("/proc//self/./maps", "/proc/P/./maps"),
            ("//proc/./self", "/proc/P/"),
            ("/proc/thread-self/fd/3", "/proc/P/task/P/fd/3"),
            ("/dev/fd/7", "/proc/P/fd/7"),
            ("/dev//stdout", "/proc/P/fd/1"),
            ("/dev/stdin", "/proc/P/fd/0"),
            ("/proc/selfish", "/proc/selfish"),
            ("/dev/stdoutx", "/dev/stdoutx"),
            ("/tmp/x", "/tmp/x"),
            ("/", "/"),
            ("//.", "//."),
            ("proc/self", "proc/self"),
        ] {
            let means = means.replace('P', &pid.to_string());
            let of_theirs = home.of_theirs(path.as_bytes()).unwrap();
            assert_eq!(of_theirs.as_os_str(), means.as_str(), "{path}");
        }
    }
}

//! Files (`--files`): opened for writing, made, removed and renamed here, on what was looked up once and judged.
//!
//! Landlock stands below: the program itself can write nowhere. So nothing depends on the program asking.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, RenameFlags, fcntl_setfl, fstat,
    fstatfs, linkat, mkdirat, mknodat, openat, renameat_with, symlinkat, unlinkat,
};

use super::control::number_of;
use super::unix::{Home, Spot};
use crate::sys::seccomp::Notice;
use crate::sys::{memory, process};

/// A change of files, as registers name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// open, openat, creat
    Open { at: At, flags: i32, mode: u32 },
    /// truncate
    Truncate { at: At, length: u64 },
    /// unlink, unlinkat, rmdir
    Remove { at: At, flags: i32 },
    /// rename, renameat, renameat2
    Rename { from: At, to: At, flags: u32 },
    /// mkdir, mkdirat
    Directory { at: At, mode: u32 },
    /// mknod, mknodat
    Node { at: At, mode: u32, device: u64 },
    /// link, linkat
    Link { from: At, to: At, flags: i32 },
    /// symlink, symlinkat; what the link says is at `text`.
    Symlink { text: u64, at: At },
}

/// A path in the program's memory, and the descriptor of the directory that it starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    pub(super) directory: i32,
    pub(super) path: u64,
}

/// A change whose files were looked up.
#[derive(Debug)]
pub(super) struct Looked {
    change: Ready,
    home: Home,
    /// The files that change, to be judged.
    pub(super) paths: Vec<PathBuf>,
}

#[derive(Debug)]
enum Ready {
    /// A file that is there, by a descriptor that stands for it.
    Existing {
        file: OwnedFd,
        flags: OFlags,
    },
    New {
        name: Spot,
        flags: OFlags,
        mode: Mode,
    },
    Truncate {
        file: OwnedFd,
        length: u64,
    },
    Remove {
        name: Spot,
        flags: AtFlags,
    },
    Rename {
        from: Spot,
        to: Spot,
        flags: RenameFlags,
    },
    Directory {
        name: Spot,
        mode: Mode,
    },
    Node {
        name: Spot,
        mode: u32,
        device: u64,
    },
    Link {
        from: OwnedFd,
        to: Spot,
    },
    Symlink {
        text: Vec<u8>,
        name: Spot,
    },
}

/// What came of a change.
#[derive(Debug)]
pub(super) enum Made {
    /// It is done.
    Done,
    /// This is the open file.
    File { file: OwnedFd, closes_on_exec: bool },
    /// Opening it would wait (a FIFO without a reader): it is to be tried again.
    Later,
}

impl Change {
    /// The change that a call is; `None` for other calls.
    pub(super) fn of(notice: &Notice) -> Option<Self> {
        let register = notice.arguments;
        let int = |index: usize| register[index] as i32;
        let here = |index: usize| At {
            directory: libc::AT_FDCWD,
            path: register[index],
        };
        let at = |index: usize| At {
            directory: int(index),
            path: register[index + 1],
        };
        #[cfg(target_arch = "x86_64")]
        match notice.number {
            libc::SYS_open => {
                return Some(Self::Open {
                    at: here(0),
                    flags: int(1),
                    mode: int(2) as u32,
                });
            }
            libc::SYS_creat => {
                let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;
                return Some(Self::Open {
                    at: here(0),
                    flags,
                    mode: int(1) as u32,
                });
            }
            libc::SYS_unlink => {
                return Some(Self::Remove {
                    at: here(0),
                    flags: 0,
                });
            }
            libc::SYS_rmdir => {
                return Some(Self::Remove {
                    at: here(0),
                    flags: libc::AT_REMOVEDIR,
                });
            }
            libc::SYS_rename => {
                return Some(Self::Rename {
                    from: here(0),
                    to: here(1),
                    flags: 0,
                });
            }
            libc::SYS_mkdir => {
                return Some(Self::Directory {
                    at: here(0),
                    mode: int(1) as u32,
                });
            }
            libc::SYS_mknod => {
                let (mode, device) = (int(1) as u32, register[2]);
                return Some(Self::Node {
                    at: here(0),
                    mode,
                    device,
                });
            }
            libc::SYS_link => {
                return Some(Self::Link {
                    from: here(0),
                    to: here(1),
                    flags: 0,
                });
            }
            libc::SYS_symlink => {
                return Some(Self::Symlink {
                    text: register[0],
                    at: here(1),
                });
            }
            _ => {}
        }
        Some(match notice.number {
            libc::SYS_openat => Self::Open {
                at: at(0),
                flags: int(2),
                mode: int(3) as u32,
            },
            libc::SYS_truncate => Self::Truncate {
                at: here(0),
                length: register[1],
            },
            libc::SYS_unlinkat => Self::Remove {
                at: at(0),
                flags: int(2),
            },
            libc::SYS_renameat => Self::Rename {
                from: at(0),
                to: at(2),
                flags: 0,
            },
            libc::SYS_renameat2 => Self::Rename {
                from: at(0),
                to: at(2),
                flags: int(4) as u32,
            },
            libc::SYS_mkdirat => Self::Directory {
                at: at(0),
                mode: int(2) as u32,
            },
            libc::SYS_mknodat => Self::Node {
                at: at(0),
                mode: int(2) as u32,
                device: register[3],
            },
            libc::SYS_linkat => Self::Link {
                from: at(0),
                to: at(2),
                flags: int(4),
            },
            libc::SYS_symlinkat => Self::Symlink {
                text: register[0],
                at: at(1),
            },
            _ => return None,
        })
    }

    /// Looks up the files.
    ///
    /// # Errors
    /// The number of the error that the call gets.
    pub(super) fn look(self, thread: u32, thread_fd: BorrowedFd<'_>) -> Result<Looked, i32> {
        let home = Home::of(thread).map_err(number_of)?;
        let look = Look {
            thread,
            thread_fd,
            home: &home,
        };
        let (change, paths) = match self {
            Self::Open { at, flags, mode } => look.open(at, flags, mode)?,
            Self::Truncate { at, length } => {
                let file = look.existing(at, true)?;
                let path = place_of(&file)?;
                (Ready::Truncate { file, length }, vec![path])
            }
            Self::Remove { at, flags } => {
                let name = look.spot(at)?;
                let path = name.path()?;
                let flags = AtFlags::from_bits(flags as u32).ok_or(libc::EINVAL)?;
                (Ready::Remove { name, flags }, vec![path])
            }
            Self::Rename { from, to, flags } => {
                let (from, to) = (look.spot(from)?, look.spot(to)?);
                let paths = vec![from.path()?, to.path()?];
                let flags = RenameFlags::from_bits(flags).ok_or(libc::EINVAL)?;
                (Ready::Rename { from, to, flags }, paths)
            }
            Self::Directory { at, mode } => {
                let name = look.spot(at)?;
                let path = name.path()?;
                let mode = Mode::from_raw_mode(mode);
                (Ready::Directory { name, mode }, vec![path])
            }
            Self::Node { at, mode, device } => {
                let name = look.spot(at)?;
                let path = name.path()?;
                (Ready::Node { name, mode, device }, vec![path])
            }
            Self::Link { from, to, flags } => {
                let from = look.existing(from, flags & libc::AT_SYMLINK_FOLLOW != 0)?;
                let to = look.spot(to)?;
                // Whoever has the link can write the file.
                let paths = vec![place_of(&from)?, to.path()?];
                (Ready::Link { from, to }, paths)
            }
            Self::Symlink { text, at } => {
                let text = look.text(text)?;
                let name = look.spot(at)?;
                let path = name.path()?;
                (Ready::Symlink { text, name }, vec![path])
            }
        };
        Ok(Looked {
            change,
            home,
            paths,
        })
    }
}

/// Looks up what a thread means.
pub(super) struct Look<'a> {
    pub(super) thread: u32,
    pub(super) thread_fd: BorrowedFd<'a>,
    pub(super) home: &'a Home,
}

impl Look<'_> {
    fn open(&self, at: At, flags: i32, mode: u32) -> Result<(Ready, Vec<PathBuf>), i32> {
        let flags = OFlags::from_bits_retain(flags as u32);
        let mode = Mode::from_raw_mode(mode);
        if flags.contains(OFlags::TMPFILE) {
            let directory = self.existing(at, true)?;
            let path = place_of(&directory)?;
            return Ok((
                Ready::Existing {
                    file: directory,
                    flags,
                },
                vec![path],
            ));
        }
        let follows = !flags.contains(OFlags::NOFOLLOW);
        let makes = flags.contains(OFlags::CREATE);
        match self.existing(at, follows) {
            Ok(_) if makes && flags.contains(OFlags::EXCL) => Err(libc::EEXIST),
            Ok(file) => {
                let path = place_of(&file)?;
                let flags = flags & !(OFlags::CREATE | OFlags::NOFOLLOW);
                Ok((Ready::Existing { file, flags }, vec![path]))
            }
            Err(libc::ENOENT) if makes => {
                let name = self.spot(at)?;
                let path = name.path()?;
                // Nothing is there, and nothing else that comes meanwhile is opened.
                let flags = flags | OFlags::NOFOLLOW;
                Ok((Ready::New { name, flags, mode }, vec![path]))
            }
            Err(number) => Err(number),
        }
    }

    /// The file that a path means, as something that can only be pointed to.
    pub(super) fn existing(&self, at: At, follows: bool) -> Result<OwnedFd, i32> {
        let path = self.text(at.path)?;
        let mut flags = OFlags::PATH;
        flags.set(OFlags::NOFOLLOW, !follows);
        self.start(at, &path, |home, path| home.open(path, flags))
    }

    /// The directory and the name in it that a path means.
    fn spot(&self, at: At) -> Result<Spot, i32> {
        let path = self.text(at.path)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        Spot::of(&path, |parent| {
            self.start(at, parent, |home, path| home.open(path, flags))
        })
    }

    fn start(
        &self,
        at: At,
        path: &[u8],
        open: impl FnOnce(&Home, &[u8]) -> io::Result<OwnedFd>,
    ) -> Result<OwnedFd, i32> {
        if at.directory == libc::AT_FDCWD || path.first() == Some(&b'/') {
            return open(self.home, path).map_err(number_of);
        }
        let directory = process::file_of(self.thread_fd, at.directory).map_err(number_of)?;
        let home = self.home.elsewhere(directory).map_err(number_of)?;
        open(&home, path).map_err(number_of)
    }

    /// Whether a path is the empty one.
    pub(super) fn is_empty(&self, at: At) -> bool {
        let mut first = [1];
        memory::read(self.thread, at.path, &mut first).is_ok() && first == [0]
    }

    /// A text of the program's up to its zero byte.
    fn text(&self, at: u64) -> Result<Vec<u8>, i32> {
        const LONGEST: usize = libc::PATH_MAX as usize;
        let mut text = vec![0; LONGEST];
        // It may end before memory that is not there.
        let mut length = 0;
        while length < LONGEST {
            let here = at.wrapping_add(length as u64);
            let page = 4096 - (here % 4096) as usize;
            let end = (length + page).min(LONGEST);
            memory::read(self.thread, here, &mut text[length..end]).map_err(|_| libc::EFAULT)?;
            if let Some(zero) = text[length..end].iter().position(|byte| *byte == 0) {
                text.truncate(length + zero);
                return if text.is_empty() {
                    Err(libc::ENOENT)
                } else {
                    Ok(text)
                };
            }
            length = end;
        }
        Err(libc::ENAMETOOLONG)
    }
}

impl Looked {
    /// Makes the change, as the program's user and with its mask for new files.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn make(&self) -> io::Result<Made> {
        self.home.act(|| self.change.make())
    }
}

impl Ready {
    fn make(&self) -> io::Result<Made> {
        match self {
            Self::Existing { file, flags } => return reopen(file, *flags),
            Self::New { name, flags, mode } => {
                let file = openat(&name.directory, &name.name, *flags | OFlags::CLOEXEC, *mode)?;
                let closes_on_exec = flags.contains(OFlags::CLOEXEC);
                return Ok(Made::File {
                    file,
                    closes_on_exec,
                });
            }
            Self::Truncate { file, length } => {
                let file = openat(
                    CWD,
                    own(file),
                    OFlags::WRONLY | OFlags::CLOEXEC,
                    Mode::empty(),
                )?;
                rustix::fs::ftruncate(file, *length)?;
            }
            Self::Remove { name, flags } => unlinkat(&name.directory, &name.name, *flags)?,
            Self::Rename { from, to, flags } => {
                renameat_with(&from.directory, &from.name, &to.directory, &to.name, *flags)?;
            }
            Self::Directory { name, mode } => mkdirat(&name.directory, &name.name, *mode)?,
            Self::Node { name, mode, device } => mknodat(
                &name.directory,
                &name.name,
                FileType::from_raw_mode(*mode),
                Mode::from_raw_mode(*mode),
                *device,
            )?,
            Self::Link { from, to } => {
                linkat(
                    CWD,
                    own(from),
                    &to.directory,
                    &to.name,
                    AtFlags::SYMLINK_FOLLOW,
                )?;
            }
            Self::Symlink { text, name } => {
                symlinkat(OsStr::from_bytes(text), &name.directory, &name.name)?;
            }
        }
        Ok(Made::Done)
    }
}

/// Opens a file that was only pointed to. What is no plain file could make us wait.
fn reopen(file: &OwnedFd, flags: OFlags) -> io::Result<Made> {
    let is_plain = FileType::from_raw_mode(fstat(file)?.st_mode) == FileType::RegularFile;
    let waits = !is_plain && !flags.contains(OFlags::NONBLOCK);
    let mut how = flags | OFlags::CLOEXEC;
    how.set(OFlags::NONBLOCK, waits || flags.contains(OFlags::NONBLOCK));
    // A terminal does not become ours.
    how |= OFlags::NOCTTY;
    let mode = Mode::from_raw_mode(0o600);
    let opened = match openat(CWD, own(file), how, mode) {
        Err(rustix::io::Errno::NXIO) if waits => return Ok(Made::Later),
        opened => opened?,
    };
    if waits {
        fcntl_setfl(
            &opened,
            rustix::fs::fcntl_getfl(&opened)? & !OFlags::NONBLOCK,
        )?;
    }
    Ok(Made::File {
        file: opened,
        closes_on_exec: flags.contains(OFlags::CLOEXEC),
    })
}

/// A path of ours that means the file of a descriptor.
pub(super) fn own(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Where the file of a descriptor is.
///
/// # Errors
/// `EACCES` for files of `/proc`.
pub(super) fn place_of(file: &OwnedFd) -> Result<PathBuf, i32> {
    // Processes are no files: Landlock keeps the program from writing into others, and it is not below us.
    if fstatfs(file).map_err(|error| error.raw_os_error())?.f_type == PROC_SUPER_MAGIC {
        return Err(libc::EACCES);
    }
    let path = fs::read_link(own(file)).map_err(number_of)?;
    // Of a file that was removed and is open somewhere.
    let bytes = path.into_os_string().into_vec();
    Ok(OsString::from_vec(bytes).into())
}

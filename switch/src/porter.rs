//! What entrances have in common: a thread, files that others may use, and how strangers are let in.

use std::fs::{DirBuilder, DirEntry, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{
    DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fs::{FileType, FlockOperation, OFlags, flock};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, socket_with,
};
use vnplug_os::closer::{Closers, PeerFd};
use vnplug_os::placed::Placed;
use vnplug_os::privileges::user_name;
use vnplug_os::socket::{self, Peer};
use vnplug_os::{event, peer_log};

use crate::roster::Holder;

/// Who may use the files of a switch's entrances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Permission bits of sockets.
    pub mode: u32,
    /// Permission bits of directories; by default what `mode` says.
    pub dir_mode: Option<u32>,
    /// The group that they are for.
    pub group: Option<u32>,
    /// The user that the daemon will be, if it is not to stay what it is.
    pub user: Option<(u32, u32)>,
}

/// An entrance's thread, which ends when this is dropped.
pub(crate) struct Shift {
    stop: Arc<AtomicBool>,
    waker: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Default for Access {
    /// For the daemon's user alone.
    fn default() -> Self {
        Self {
            mode: 0o600,
            dir_mode: None,
            group: None,
            user: None,
        }
    }
}

impl Access {
    /// The user that the daemon will be, and the group, who are to have its files.
    fn whose(&self) -> (Option<u32>, Option<u32>) {
        let uid = self.user.map(|(uid, _)| uid);
        (uid, self.group.or(self.user.map(|(_, gid)| gid)))
    }

    /// Listens at a path for connections of this kind.
    pub(crate) fn listen(&self, path: &Path, kind: SocketType) -> io::Result<OwnedFd> {
        let listener = socket::listen_for(path, self.mode, kind)?;
        let (uid, gid) = self.whose();
        let placed = Placed::of_socket(&listener, path);
        let given = placed.and_then(|it| it.give(uid, gid));
        given.map_err(|error| {
            // A socket that nobody serves only misleads.
            let _ = std::fs::remove_file(path);
            at(path, error)
        })?;
        Ok(listener)
    }
}

impl Shift {
    /// Starts a thread of this name; `prepare` has what wakes it, and makes what it does until the flag is
    /// set.
    pub(crate) fn start<Run: FnOnce(&AtomicBool) + Send + 'static>(
        name: &str,
        prepare: impl FnOnce(Arc<OwnedFd>) -> io::Result<Run>,
    ) -> io::Result<Self> {
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let run = prepare(Arc::clone(&waker))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || run(&stopped))?;
        Ok(Self {
            stop,
            waker,
            thread: Some(thread),
        })
    }
}

impl Drop for Shift {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        event::ring(&self.waker);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!(target: "switch", "a thread of the switch panicked");
        }
    }
}

/// Waits for what an epoll instance watches, `limit` at most: the numbers of what has news.
pub(crate) fn wait(epoll: &OwnedFd, limit: Duration, mut has_news: impl FnMut(u64)) {
    let mut events = [Event {
        flags: EventFlags::empty(),
        data: EventData::new_u64(0),
    }; 32];
    let limit = Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: limit.subsec_nanos().into(),
    };
    // A signal ends the wait early.
    let found = epoll::wait(epoll, &mut events, Some(&limit)).unwrap_or(0);
    let found = &events[..found];
    found.iter().for_each(|event| has_news(event.data.u64()));
}

/// Takes a connection, and whose it is; nothing if it is gone again, or descriptors are short.
pub(crate) fn accept(
    listener: &OwnedFd,
    switch: &str,
    closers: &mut Closers<u32>,
) -> Option<(PeerFd, Peer)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = match accept_with(listener, flags) {
        Ok(socket) => socket,
        Err(Errno::MFILE | Errno::NFILE) => {
            peer_log!(log::Level::Warn, "switch", "{switch}: out of descriptors");
            std::thread::sleep(PAUSE);
            return None;
        }
        Err(_) => return None,
    };
    let peer = socket::peer(&socket).ok()?;
    // Where the kernel cannot refuse descriptors, what is read stops before them.
    socket::pass_rights(&socket, false);
    Some((PeerFd::new(socket, closers.of(&peer.uid)), peer))
}

/// Who has a port that a user of the host asks for.
pub(crate) fn holder(uid: u32, way: &'static str, description: String) -> Holder {
    let us = rustix::process::geteuid().as_raw();
    Holder {
        owner: user_name(uid),
        is_trusted: uid == 0 || uid == us,
        way,
        description,
    }
}

/// A directory in which a switch has sockets, held against other switches.
pub(crate) struct Directory {
    /// Held while it is ours.
    _lock: File,
    /// It is removed with this.
    made: bool,
    /// Its name without links.
    pub(crate) real: PathBuf,
}

impl Directory {
    /// Makes it, or takes over what a switch left that is gone.
    ///
    /// # Errors
    /// The system's, or who has the directory.
    pub(crate) fn open(dir: &Path, access: &Access) -> io::Result<Self> {
        let in_dir = |error| at(dir, error);
        let dir_mode = access.dir_mode.unwrap_or_else(|| dir_mode(access.mode));
        let made = match DirBuilder::new().mode(0o700).create(dir) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(in_dir(error)),
        };
        let lock = File::options()
            .read(true)
            .custom_flags((OFlags::DIRECTORY | OFlags::NOFOLLOW).bits() as i32)
            .open(dir)
            .map_err(in_dir)?;
        let found = lock.metadata().map_err(in_dir)?;
        let us = rustix::process::geteuid().as_raw();
        let user = access.user.map_or(us, |(uid, _)| uid);
        if found.uid() != us && found.uid() != user {
            let what = format!(
                "{} belongs to user {}; name another directory",
                dir.display(),
                found.uid()
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        }
        flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let what = format!("another switch serves {}", dir.display());
            io::Error::new(io::ErrorKind::AddrInUse, what)
        })?;
        if !made && !is_for_switches(dir).map_err(in_dir)? {
            let what = format!(
                "{} has other files: name an empty directory, or one that is not there yet",
                dir.display()
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        lock.set_permissions(Permissions::from_mode(dir_mode))
            .map_err(in_dir)?;
        let real = std::fs::canonicalize(dir).map_err(in_dir)?;
        let (uid, gid) = access.whose();
        fchown(&lock, uid, gid).map_err(in_dir)?;
        Ok(Self {
            _lock: lock,
            made,
            real,
        })
    }

    /// Removes sockets that a switch left that was killed: those of which `is_ours` knows the name.
    pub(crate) fn clear(&self, is_ours: impl Fn(&str) -> bool) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.real)? {
            let entry = entry?;
            let ours = entry.file_name().to_str().is_some_and(&is_ours);
            if ours && entry.file_type()?.is_socket() {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if self.made {
            // Clients may have left something.
            let _ = std::fs::remove_dir(&self.real);
        }
    }
}

/// Permission bits of a directory whose sockets have these: who may use one may look for it. Who may make files there
/// may not take others' away: the switch's own socket, say, to put another in its place.
fn dir_mode(mode: u32) -> u32 {
    STICKY | mode | (mode & 0o444) >> 2 | (mode & 0o222) >> 1
}

/// Whether a directory has been a switch's, or has nothing but sockets: the permissions of no other are
/// changed.
fn is_for_switches(dir: &Path) -> io::Result<bool> {
    let is_socket = |entry: &DirEntry| entry.file_type().map(|it| it.is_socket());
    let mut all = true;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let socket = is_socket(&entry)?;
        if socket && entry.file_name() == "ctl" {
            return Ok(true);
        }
        all &= socket;
    }
    Ok(all)
}

/// The file of a stranger's socket, and its owner. It is only looked at.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn find_socket(path: &Path) -> Result<(OwnedFd, u32), String> {
    let named = path.display();
    let found = Placed::open(path).map_err(|error| format!("{named}: {error}"))?;
    if found.kind() != FileType::Socket {
        return Err(format!("{named} is no socket"));
    }
    let owner = found.owner();
    Ok((found.into(), owner))
}

/// A datagram socket that is connected to a client's, and bound to no name.
pub(crate) fn connected(theirs: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let ours = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    // The file that was looked at, whatever its name names now.
    let path = format!("/proc/self/fd/{}", theirs.as_fd().as_raw_fd());
    connect(&ours, &SocketAddrUnix::new(path)?)?;
    Ok(ours)
}

/// Gives our socket its name, for a client of this user alone.
pub(crate) fn name_for(ours: &OwnedFd, path: &Path, uid: u32, access: &Access) -> io::Result<()> {
    bind(ours, &SocketAddrUnix::new(path)?)?;
    // Without the right to give files away, who may use the entrance may connect to it. Nobody
    // but the client can send to a socket that is connected to the client's.
    let named = Placed::of_socket(ours, path).and_then(|placed| {
        let given = placed.give(Some(uid), access.group).is_ok();
        placed.set_mode(if given {
            access.mode & 0o700
        } else {
            access.mode
        })
    });
    named.inspect_err(|_| {
        let _ = std::fs::remove_file(path);
    })
}

fn at(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Files in a directory are only their owners' to remove.
const STICKY: u32 = 0o1000;
/// How long to wait for descriptors.
const PAUSE: Duration = Duration::from_millis(50);

//! The applications' connections: accepting them, and reading what they ask.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, socket_with,
};

use super::app::{App, Hangup};
use super::closer::{Closer, PeerFd};
use super::serve::Agent;
use crate::error::Error;
use crate::peer::peer_of;

impl Agent {
    pub(super) fn accept(&mut self) {
        // Each may leave a farewell behind, which has to find room.
        if self.is_clogged() {
            return self.rest();
        }
        // A few at a time; the epoll instance reminds of the rest.
        for _ in 0..8 {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
                Err(errno) => {
                    log::warn!("cannot accept applications: {errno}");
                    return self.rest();
                }
            };
            let uid = peer_of(&socket).map_or(u32::MAX, |peer| peer.uid);
            let closer = self.closer_of(uid);
            let socket = PeerFd::new(socket, closer.clone());
            let same = self.apps.values().filter(|app| app.uid == uid).count();
            // Those that are over count until they are closed.
            if same + closer.open() >= MAX_PER_USER || self.apps.len() >= MAX_APPS {
                log::warn!("too many connections of user {uid}");
                continue;
            }
            let number = self.next_app();
            match self.watch(&socket, u64::from(number)) {
                Ok(()) => {
                    self.apps.insert(number, App::new(socket, uid));
                }
                Err(error) => log::warn!("{error}"),
            }
        }
    }

    /// Who closes what a user's applications had their hands on.
    fn closer_of(&mut self, uid: u32) -> Closer {
        if self.closers.len() > MAX_APPS {
            // Those of the present ones are kept by them.
            self.closers.retain(|_, closer| closer.open() > 0);
            for app in self.apps.values() {
                self.closers.insert(app.uid, app.closer().clone());
            }
        }
        self.closers.entry(uid).or_default().clone()
    }

    /// Accepts nobody for a moment.
    fn rest(&mut self) {
        let deleted = epoll::delete(&self.epoll, &self.listener);
        debug_assert!(deleted.is_ok(), "the listener was watched");
        self.deaf_until = Some(Instant::now() + Duration::from_millis(200));
    }

    pub(super) fn serve(&mut self, number: u32, flags: EventFlags) {
        let Some(app) = self.apps.get_mut(&number) else {
            return;
        };
        let mut served = Ok(());
        if flags.contains(EventFlags::OUT) {
            served = app.flush();
        }
        // NB: a busy application is not read, and its hang-up would be reported on and on.
        let gone = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        if gone && app.is_busy() {
            served = Err(Hangup("closed".into()));
        } else if gone || flags.contains(EventFlags::IN) {
            served = served.and_then(|()| app.read());
        }
        match served {
            Ok(()) => self.serve_requests(number),
            Err(hangup) => self.drop_app(number, &hangup),
        }
    }

    /// Serves the requests of an application that were read, until it is busy.
    pub(super) fn serve_requests(&mut self, number: u32) {
        let slow = self.channel.as_ref().is_some_and(|it| it.backlog() > SLOW);
        let served = loop {
            let Some(app) = self.apps.get_mut(&number) else {
                return;
            };
            // What it says to back-ends is not to keep others from the host.
            app.held = slow && app.channels > 0;
            if app.held {
                self.held_back.insert(number);
                break Ok(());
            }
            let said = match app.next_request() {
                Ok(Some((id, request))) => self.app_says(number, id, request),
                Ok(None) => break Ok(()),
                Err(hangup) => Err(hangup),
            };
            if said.is_err() {
                break said;
            }
        };
        match served {
            Ok(()) => self.watch_app(number),
            Err(hangup) => self.drop_app(number, &hangup),
        }
    }

    /// Numbers come back only after four billion others.
    fn next_app(&mut self) -> u32 {
        loop {
            self.last_app = self.last_app.wrapping_add(1);
            if self.last_app != 0 && !self.apps.contains_key(&self.last_app) {
                return self.last_app;
            }
        }
    }

    /// Watches for requests of an application unless it is busy, and for room in its socket while
    /// something waits for it.
    pub(super) fn watch_app(&self, number: u32) {
        if let Some(app) = self.apps.get(&number) {
            let mut flags = EventFlags::empty();
            flags.set(EventFlags::IN, !app.is_busy() && !app.held);
            flags.set(EventFlags::OUT, app.has_backlog());
            let data = EventData::new_u64(u64::from(number));
            if let Err(errno) = epoll::modify(&self.epoll, app.as_fd(), data, flags) {
                log::warn!("cannot watch application {number}: {errno}");
            }
        }
    }
}

/// Listens on `path`; replaces the socket of an agent that died, not of one that lives.
pub(super) fn listen(path: &Path, group: Option<u32>) -> Result<OwnedFd, Error> {
    let system = |what| {
        move |error: std::io::Error| Error::System {
            what,
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        }
    };
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(system("cannot make the socket's directory"))?;
    }
    if std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) {
        if is_served(path) {
            let what = "another agent or daemon listens on the socket";
            return Err(Error::System {
                what,
                errno: Errno::ADDRINUSE,
            });
        }
        std::fs::remove_file(path).map_err(system("cannot remove a dead agent's socket"))?;
    }
    let listener = UnixListener::bind(path).map_err(system("cannot make the socket"))?;
    let system_mode = system("cannot open the socket to its users");
    let mode = if group.is_some() { 0o660 } else { 0o666 };
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)
            .map_err(system("cannot give the socket to its group"))?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(system_mode)?;
    listener
        .set_nonblocking(true)
        .map_err(system("cannot set up the socket"))?;
    Ok(listener.into())
}

/// Whether somebody listens there. One who hangs does, too: its queue is full, and nobody waits for room in it.
fn is_served(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let served = SocketAddrUnix::new(path).and_then(|address| {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)
    });
    matches!(served, Ok(()) | Err(Errno::AGAIN))
}

/// Connections of one user.
const MAX_PER_USER: usize = 256;
/// Connections of all.
const MAX_APPS: usize = 1024;
/// While this much waits for the host, nothing more is read of who speaks to back-ends.
const SLOW: usize = 64 << 10;

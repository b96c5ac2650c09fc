//! The doors: the daemon's socket, and those of VMs.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use vnplug_ring::control::{Message, code};

use super::session::{Gifts, Session};
use super::{Control, LISTENER};
use crate::hub::{NO_DESCRIPTORS, Peer};
use vnplug_os::closer::PeerFd;
use vnplug_os::{peer_log, socket};

/// Connections of one user that is no operator.
const MAX_SESSIONS_PER_USER: usize = 1_024;
/// Connections accepted (or refused) per turn.
const ACCEPTS: usize = 64;
/// How long a listener rests when descriptors are short.
const REST: Duration = Duration::from_millis(50);

/// The daemon's socket, and what is done when descriptors are short.
pub(super) struct Door {
    listener: OwnedFd,
    /// Listeners that rest because descriptors are short, and until when.
    resting: Vec<(Instant, u64)>,
    /// Held back for the moment when there are no more.
    spare: Option<OwnedFd>,
}

impl Door {
    /// Behind this listener.
    pub(super) fn new(listener: OwnedFd) -> Self {
        Self {
            listener,
            resting: Vec::new(),
            spare: spare(),
        }
    }

    /// How soon a listener has rested enough.
    pub(super) fn look_again(&self, now: Instant) -> Option<Duration> {
        let until = self.resting.iter().map(|(until, _)| until);
        until
            .map(|until| until.saturating_duration_since(now))
            .min()
    }
}

impl Control {
    /// Lets clients in that wait at the daemon's socket.
    pub(super) fn accept(&mut self) {
        for _ in 0..ACCEPTS {
            match self.accept_on(LISTENER) {
                Ok(Some(fd)) => self.welcome_client(fd),
                Ok(None) => return,
                Err(error) => {
                    self.refuse_for_want_of_descriptors(LISTENER, &error);
                    return;
                }
            }
        }
    }

    /// Descriptors are short: close who is waiting at once instead of spinning on a readable
    /// listener, and listen again a little later.
    pub(super) fn refuse_for_want_of_descriptors(&mut self, token: u64, error: &Errno) {
        peer_log!(
            log::Level::Warn,
            "control",
            "cannot accept a connection: {error}"
        );
        self.door.spare = None;
        for _ in 0..ACCEPTS {
            let Ok(Some(refused)) = self.accept_on(token) else {
                break;
            };
            if token == LISTENER {
                tell_why(&refused);
            }
            let user = socket::peer(&refused).map_or(u32::MAX, |peer| peer.uid);
            let owner = Peer::User(user);
            self.hub.closers.of(&owner).close(refused);
        }
        self.door.spare = spare();
        if let Some(listener) = self.listener_of(token) {
            self.sessions.unwatch(listener);
            self.door.resting.push((Instant::now() + REST, token));
        }
    }

    fn listener_of(&self, token: u64) -> Option<BorrowedFd<'_>> {
        match token {
            LISTENER => Some(self.door.listener.as_fd()),
            token => self.vms.listener(token),
        }
    }

    pub(super) fn accept_on(&self, token: u64) -> rustix::io::Result<Option<OwnedFd>> {
        let Some(listener) = self.listener_of(token) else {
            return Ok(None);
        };
        match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn welcome_client(&mut self, fd: OwnedFd) {
        let uid = match socket::peer(&fd) {
            Ok(peer) => peer.uid,
            Err(error) => {
                peer_log!(
                    log::Level::Warn,
                    "control",
                    "a client without credentials: {error}"
                );
                return;
            }
        };
        let viewer = Peer::User(uid);
        let fd = self.peer_socket(fd, &viewer);
        // Connections that are over count until they are closed.
        let has_many = || {
            let present = self.sessions.count_of(&viewer);
            present + fd.closer().open() >= MAX_SESSIONS_PER_USER
        };
        let operator = self.policy.is_operator(&viewer);
        if self.sessions.is_full() || !operator && has_many() {
            log::debug!(target: "control", "user {uid} has too many connections");
            return;
        }
        let bucket = self.sessions.bucket_of(&viewer, operator);
        let mut session = Session::new(fd, viewer, false, bucket, Instant::now());
        if operator {
            session.take_gifts(Gifts::OfOperator);
        }
        self.sessions.add(session);
    }

    /// A peer's socket, which nobody closes here.
    pub(super) fn peer_socket(&mut self, fd: OwnedFd, viewer: &Peer) -> PeerFd {
        PeerFd::new(fd, self.hub.closers.of(viewer))
    }

    /// Listens again where descriptors were short.
    pub(super) fn listen_again(&mut self, now: Instant) {
        let over = self.door.resting.extract_if(.., |(until, _)| *until <= now);
        let over: Vec<u64> = over.map(|(_, token)| token).collect();
        for token in over {
            if let Some(listener) = self.listener_of(token)
                && let Err(error) = self.sessions.watch(listener, token)
            {
                log::error!(target: "control", "cannot listen again: {error}");
            }
        }
    }
}

/// Tells a client that there is no descriptor for it, as far as it listens at once.
fn tell_why(refused: &OwnedFd) {
    use rustix::net::{SendFlags, send};
    let why = Message::Error {
        code: code::LIMIT,
        text: NO_DESCRIPTORS.into(),
    };
    let _ = send(
        refused,
        &why.encode(0, 0),
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    );
}

/// A descriptor held back.
fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

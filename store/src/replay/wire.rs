//! An interface as the exit, by a packet socket.

use std::fmt;
use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::exit::{Exit, ExitError, Obstacle};
use super::sys::{Link, Socket, link};

/// Sends by an interface of this network namespace.
#[derive(Debug)]
pub struct Wire {
    name: String,
    socket: Socket,
    mtu: usize,
}

/// Why an interface takes no frames.
#[derive(Debug)]
pub enum WireError {
    /// No interface of this network namespace has the name.
    Missing(String),
    /// The process may not open packet sockets.
    NotAllowed(String),
    /// It is down.
    Down(String),
    /// It is up but has no carrier.
    NoCarrier(String),
    /// It carries no Ethernet, but this (ARPHRD_…).
    NotEthernet(String, u16),
    /// Something else that the system refused.
    System(String, io::Error),
}

impl Wire {
    /// Opens a socket on the interface. With `bypass`, frames go to the driver past the queueing
    /// discipline: faster, but its limits do not hold then, and programs that capture on the same
    /// interface do not see the frames.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn open(name: &str, bypass: bool) -> Result<Self, WireError> {
        let wrong = |error: io::Error| explain(name, error);
        let socket = Socket::open().map_err(wrong)?;
        let state = usable(&socket, name)?;
        let index = rustix::net::netdevice::name_to_index(&socket, name);
        socket
            .bind(index.map_err(|errno| wrong(errno.into()))?)
            .map_err(wrong)?;
        if bypass {
            socket.bypass_queueing().map_err(wrong)?;
        }
        Ok(Self {
            name: name.to_owned(),
            socket,
            mtu: state.mtu,
        })
    }

    /// Whether this network namespace has an interface of the name.
    pub fn exists(name: &str) -> bool {
        use rustix::net::{AddressFamily, SocketType, socket};
        let socket = socket(AddressFamily::UNIX, SocketType::DGRAM, None);
        socket.is_ok_and(|socket| link(&socket, name).is_ok())
    }

    /// Bytes of the longest frame without its Ethernet header.
    pub fn mtu(&self) -> usize {
        self.mtu
    }

    fn gone(&self, error: io::Error) -> Obstacle {
        // The interface itself knows best why.
        let why = match usable(&self.socket, &self.name) {
            Ok(_) => explain(&self.name, error),
            Err(why) => why,
        };
        Obstacle::Gone(ExitError::Wire(why))
    }
}

impl Exit for Wire {
    fn fits(&self, frame: &[u8]) -> bool {
        let tagged = matches!(frame.get(12..14), Some([0x81, 0x00] | [0x88, 0xa8]));
        frame.len() <= self.mtu + HEADER + if tagged { TAG } else { 0 }
    }

    fn send(&mut self, frames: &[&[u8]]) -> Result<usize, Obstacle> {
        let error = match self.socket.send(frames) {
            Ok(sent) => return Ok(sent),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EINTR) => Ok(0),
            Some(libc::EAGAIN) => {
                // The socket's buffer is full: until the driver gives some of it back.
                let mut fds = [PollFd::new(&self.socket, PollFlags::OUT)];
                // NB: whatever poll says, the next attempt shows.
                let _ = poll(&mut fds, Some(&LOOK));
                Ok(0)
            }
            Some(libc::ENOBUFS) => {
                // The queueing discipline or the driver is full, and nobody says until when.
                std::thread::yield_now();
                Ok(0)
            }
            Some(libc::EMSGSIZE) => Err(Obstacle::TooLong),
            Some(libc::EINVAL) => Err(Obstacle::Frame(error)),
            _ => Err(self.gone(error)),
        }
    }
}

fn usable(socket: &Socket, name: &str) -> Result<Link, WireError> {
    let state = link(socket, name).map_err(|error| explain(name, error))?;
    let name = || name.to_owned();
    if ![libc::ARPHRD_ETHER, libc::ARPHRD_LOOPBACK].contains(&state.hardware) {
        return Err(WireError::NotEthernet(name(), state.hardware));
    }
    if !state.up {
        return Err(WireError::Down(name()));
    }
    if !state.running {
        return Err(WireError::NoCarrier(name()));
    }
    Ok(state)
}

fn explain(name: &str, error: io::Error) -> WireError {
    let name = name.to_owned();
    match error.raw_os_error() {
        Some(libc::ENODEV | libc::ENXIO) => WireError::Missing(name),
        Some(libc::EPERM | libc::EACCES) => WireError::NotAllowed(name),
        Some(libc::ENETDOWN) => WireError::Down(name),
        _ => WireError::System(name, error),
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(name) => write!(
                f,
                "{name}: no interface of this network namespace has that name (see `ip link`); a device \
                 of the daemon is port:{name}"
            ),
            Self::NotAllowed(name) => write!(
                f,
                "{name}: sending by an interface needs CAP_NET_RAW; run this as root, or send \
                 through a port of the daemon"
            ),
            Self::Down(name) => write!(f, "{name} is down; `ip link set {name} up`"),
            Self::NoCarrier(name) => {
                write!(f, "{name} has no carrier: is its other end there and up?")
            }
            Self::NotEthernet(name, kind) => write!(
                f,
                "{name} carries no Ethernet (its hardware type is {kind}); only Ethernet frames are sent"
            ),
            Self::System(name, error) => write!(f, "{name}: {error}"),
        }
    }
}

impl std::error::Error for WireError {}

const HEADER: usize = 14;
/// A VLAN tag does not count against the MTU.
const TAG: usize = 4;
/// How long an attempt waits for room.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_is_not_found_by_the_beginning_of_a_name() {
        // Every network namespace has one.
        assert!(Wire::exists("lo"));
        for name in ["lo:1", "lo:", "lo\0", ":"] {
            assert!(!Wire::exists(name), "{name:?}");
        }
    }
}

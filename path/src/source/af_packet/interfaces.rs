//! Which interfaces there are, and facts about one of them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::Namespace;
use crate::source::SourceError;
use vnplug_os::interface::{self, Link};
use vnplug_os::{netlink, statistics};

/// One network interface of this network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceInfo {
    /// Its name, as `ip link` shows it.
    pub name: String,
    /// Administratively up.
    pub up: bool,
    /// The link has a carrier.
    pub carrier: bool,
    /// Bytes after the Ethernet header that a frame may have.
    pub mtu: u32,
    /// Its address; `None` where it is not Ethernet.
    pub mac: Option<[u8; 6]>,
    /// Whether [`AfPacket`](super::AfPacket) can open it: Ethernet or loopback.
    pub capturable: bool,
}

/// Lists the interfaces of this network namespace, in the kernel's order. Needs no privilege.
///
/// # Errors
/// [`SourceError`] if the kernel does not list them.
pub fn interfaces() -> Result<Vec<InterfaceInfo>, SourceError> {
    let failed = |cause| SourceError::io("cannot list the interfaces", cause);
    let socket = any_socket().map_err(failed)?;
    let names = interface::names().map_err(failed)?;
    // One that vanished since then is not listed.
    let known = names
        .into_iter()
        .filter_map(|name| Some((interface::link(&socket, &name).ok()?, name)));
    Ok(known
        .map(|(link, name)| InterfaceInfo {
            name,
            up: link.up,
            carrier: link.running,
            mtu: link.mtu,
            mac: mac(&link),
            capturable: super::is_capturable(link.hardware),
        })
        .collect())
}

/// An interface by its name, to be asked about now and then; the one that has the name by then.
#[derive(Debug)]
pub struct Interface {
    name: String,
    asks: Asks,
    known: Mutex<Known>,
}

/// What was learnt of an interface at the last look.
#[derive(Debug, Default)]
struct Known {
    facts: Facts,
    counters: Vec<(String, u64)>,
}

/// By which socket it is asked about.
#[derive(Debug)]
enum Asks {
    /// One of the network namespace where it was made.
    Here(OwnedFd),
    /// One that is in another namespace while that is there.
    There(Arc<Namespace>),
}

/// Facts about an interface.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Facts {
    /// Bytes after the Ethernet header that a frame may have; 0 = unknown.
    pub mtu: u32,
    /// Megabits per second; 0 = unknown.
    pub speed_mbps: u32,
    /// Its address; zeros = none.
    pub mac: [u8; 6],
}

impl Interface {
    /// The interface of this name in the calling thread's network namespace.
    ///
    /// # Errors
    /// [`SourceError`] if descriptors are short.
    pub fn new(name: impl Into<String>) -> Result<Self, SourceError> {
        let socket =
            any_socket().map_err(|cause| SourceError::io("cannot ask about interfaces", cause))?;
        Ok(Self {
            name: name.into(),
            asks: Asks::Here(socket),
            known: Mutex::default(),
        })
    }

    /// The interface of this name in that network namespace, while a source is in it.
    pub fn within(namespace: Arc<Namespace>, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            asks: Asks::There(namespace),
            known: Mutex::default(),
        }
    }

    /// Whether it is in the network namespace where it was made.
    pub fn is_here(&self) -> bool {
        matches!(self.asks, Asks::Here(_))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether there is one of that name now.
    pub fn is_there(&self) -> bool {
        self.link().is_ok()
    }

    /// Its number, while there is one of that name.
    pub fn index(&self) -> Option<u32> {
        self.link().ok().map(|link| link.index.cast_unsigned())
    }

    fn link(&self) -> io::Result<Link> {
        self.ask(|socket| interface::link(socket, &self.name))
    }

    fn ask<T>(&self, ask: impl FnOnce(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        match &self.asks {
            Asks::Here(socket) => ask(socket.as_fd()),
            Asks::There(namespace) => {
                let asked = namespace.ask(ask);
                asked.unwrap_or_else(|| Err(io::ErrorKind::NotFound.into()))
            }
        }
    }

    /// Asks what it is like now, and what its driver counts: [`facts`](Self::facts) and [`counters`](Self::counters) are
    /// from now on what was said.
    ///
    /// NB: the kernel answers under its lock of all interfaces of all network namespaces (`rtnl`), which whoever makes or deletes
    /// many of them holds for seconds. So this is for a thread that may wait.
    pub fn look(&self) {
        let now = Known {
            facts: self.ask_facts(),
            counters: self.ask_counters(),
        };
        *self.known() = now;
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What its driver and the kernel counted of it at the last look, by the counters' public names; nothing if there was no
    /// interface of that name.
    pub fn counters(&self) -> Vec<(String, u64)> {
        self.known().counters.clone()
    }

    /// What was known at the last look; nothing if there was no interface of that name.
    pub fn facts(&self) -> Facts {
        self.known().facts.clone()
    }

    fn ask_counters(&self) -> Vec<(String, u64)> {
        let Ok(told) = self.ask(|socket| statistics::of(socket, &self.name)) else {
            return Vec::new();
        };
        let named = [
            ("nic_rx_frames", told.rx_packets),
            ("nic_rx_bytes", told.rx_bytes),
            ("nic_rx_missed", told.rx_missed_errors),
            ("nic_rx_fifo", told.rx_fifo_errors),
            ("nic_rx_dropped", told.rx_dropped),
            ("nic_rx_errors", told.rx_errors),
            ("nic_tx_frames", told.tx_packets),
            ("nic_tx_bytes", told.tx_bytes),
            ("nic_tx_dropped", told.tx_dropped),
            ("nic_tx_errors", told.tx_errors),
        ];
        named.map(|(name, value)| (name.to_owned(), value)).into()
    }

    fn ask_facts(&self) -> Facts {
        let facts = self.ask(|socket| {
            let link = interface::link(socket, &self.name)?;
            Ok(Facts {
                mtu: link.mtu,
                speed_mbps: interface::speed_mbps(socket, &self.name).unwrap_or(0),
                mac: mac(&link).unwrap_or_default(),
            })
        });
        facts.unwrap_or_default()
    }
}

fn mac(link: &Link) -> Option<[u8; 6]> {
    (link.hardware == libc::ARPHRD_ETHER).then_some(link.mac)
}

/// A socket of the calling thread's network namespace: of rtnetlink, by which figures are asked for, or where that is
/// forbidden of any kind, which has no figures.
pub(super) fn any_socket() -> std::io::Result<OwnedFd> {
    netlink::open(SocketFlags::NONBLOCK).or_else(|_| {
        let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
        Ok(socket)
    })
}

//! Which interfaces there are.

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::source::SourceError;
use crate::sys::packet;

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
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)
        .map_err(|errno| failed(errno.into()))?;
    let names = packet::names().map_err(failed)?;
    // One that vanished since then is not listed.
    let known = names
        .into_iter()
        .filter_map(|name| Some((packet::link(&socket, &name).ok()?, name)));
    Ok(known
        .map(|(link, name)| InterfaceInfo {
            name,
            up: link.up,
            carrier: link.running,
            mtu: link.mtu,
            mac: (link.hardware == libc::ARPHRD_ETHER).then_some(link.mac),
            capturable: super::is_capturable(link.hardware),
        })
        .collect())
}

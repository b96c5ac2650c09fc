//! Requests to the TUN driver and to network interfaces (tun(4) in the kernel's
//! Documentation/networking/tuntap.rst, netdevice(7)); no safe library has them.

#![expect(unsafe_code, reason = "ioctl has no safe interface")]

use std::ffi::{c_char, c_short, c_ulong};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketType};

/// Makes the opened `/dev/net/tun` a queue of the TAP `name`; a name with `%d` gets a number.
/// Frames go with a 10-byte vnet header and without packet information. Gives the interface's name.
///
/// `queues` must be the same for all queues of one interface; the `first` makes the interface, and
/// fails with `EBUSY` if it exists.
///
/// # Errors
/// The driver's: `EPERM`, `EBUSY`, `EINVAL`.
pub(super) fn open_queue(
    tun: BorrowedFd<'_>,
    name: &str,
    queues: usize,
    first: bool,
) -> io::Result<String> {
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if queues > 1 {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    if first {
        flags |= libc::IFF_TUN_EXCL;
    }
    let mut request = request(name)?;
    // NB: as wide as the kernel's field; IFF_TUN_EXCL is its highest bit.
    request.ifr_ifru.ifru_flags = flags as u16 as c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`.
    unsafe { ioctl(tun, libc::TUNSETIFF as c_ulong, &mut request) }?;
    let name = request.ifr_name.map(|c| c as u8);
    let end = name.iter().position(|&c| c == 0).unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Says what may be left to whoever reads the TAP: bits of `TUN_F_*`. Of one queue it is said for all.
///
/// # Errors
/// The driver's: `EINVAL` if it does not know one of them.
pub(super) fn set_offload(queue: BorrowedFd<'_>, features: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes a number and touches no memory of ours.
    match unsafe {
        libc::ioctl(
            queue.as_raw_fd(),
            libc::TUNSETOFFLOAD as _,
            c_ulong::from(features),
        )
    } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Plugs the cable in or out, as programs see it. Linux ≥ 5.0.
///
/// # Errors
/// The driver's: `EINVAL` if it cannot.
pub(super) fn set_carrier(queue: BorrowedFd<'_>, is_in: bool) -> io::Result<()> {
    let is_in = libc::c_int::from(is_in);
    // SAFETY: TUNSETCARRIER reads one `int`.
    match unsafe {
        libc::ioctl(
            queue.as_raw_fd(),
            libc::TUNSETCARRIER as _,
            &raw const is_in,
        )
    } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The interface outlives its last queue: it ends with its network namespace.
///
/// # Errors
/// The driver's.
pub(super) fn set_persistent(queue: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: TUNSETPERSIST takes a number and touches no memory of ours.
    match unsafe { libc::ioctl(queue.as_raw_fd(), libc::TUNSETPERSIST as _, 1_usize) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An interface of the calling thread's network namespace.
#[derive(Debug)]
pub(super) struct Interface {
    socket: OwnedFd,
    name: String,
}

impl Interface {
    /// Of this name; nothing is asked yet.
    ///
    /// # Errors
    /// No socket can be made.
    pub(super) fn new(name: &str) -> io::Result<Self> {
        // Any socket will do; local ones exist in every kernel.
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None)?;
        let name = name.to_owned();
        Ok(Self { socket, name })
    }

    /// Sets the MTU, in bytes, Ethernet header excluded.
    ///
    /// # Errors
    /// The kernel's: `EINVAL` if the driver cannot do it.
    pub(super) fn set_mtu(&self, bytes: u16) -> io::Result<()> {
        let mut request = request(&self.name)?;
        request.ifr_ifru.ifru_mtu = i32::from(bytes);
        self.ask(libc::SIOCSIFMTU, &mut request)
    }

    /// Sets the hardware address.
    ///
    /// # Errors
    /// The kernel's: `EADDRNOTAVAIL` for a group address.
    pub(super) fn set_mac(&self, mac: [u8; 6]) -> io::Result<()> {
        let mut request = request(&self.name)?;
        let mut data = [0; 14];
        for (to, from) in data.iter_mut().zip(mac) {
            *to = from as c_char;
        }
        request.ifr_ifru.ifru_hwaddr = libc::sockaddr {
            sa_family: libc::ARPHRD_ETHER,
            sa_data: data,
        };
        self.ask(libc::SIOCSIFHWADDR, &mut request)
    }

    /// Sets it up, or silences it (no ARP and no group membership), or both.
    ///
    /// # Errors
    /// The kernel's.
    pub(super) fn set_flags(&self, up: bool, silent: bool) -> io::Result<()> {
        let mut request = request(&self.name)?;
        self.ask(libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: the kernel has just filled in the flags.
        let mut flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
        if silent {
            flags = (flags | libc::IFF_NOARP) & !libc::IFF_MULTICAST;
        }
        if up {
            flags |= libc::IFF_UP;
        }
        request.ifr_ifru.ifru_flags = flags as c_short;
        self.ask(libc::SIOCSIFFLAGS, &mut request)
    }

    fn ask(&self, what: c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
        // SAFETY: the three requests above read or write one `ifreq`.
        unsafe { ioctl(self.socket.as_fd(), what, request) }
    }
}

/// A request about the interface `name`, everything else zero.
fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: an `ifreq` is a name and a union of plain numbers and addresses: zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte stays zero, as the end of the name.
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as c_char;
    }
    Ok(request)
}

/// Asks a driver.
///
/// # Safety
/// `what` must be a request that reads or writes at most one `ifreq`.
unsafe fn ioctl(fd: BorrowedFd<'_>, what: c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: the caller's promise; `request` is exclusively borrowed for the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), what as _, std::ptr::from_mut(request)) } {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

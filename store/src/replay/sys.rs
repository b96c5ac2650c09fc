#![expect(
    unsafe_code,
    reason = "packet sockets, requests about interfaces and sendmmsg have no safe form"
)]
//! Packet sockets that send (packet(7)).

use std::ffi::{c_int, c_ulong};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What the kernel says of an interface (netdevice(7)).
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    /// `ARPHRD_*`.
    pub(super) hardware: u16,
    /// Bytes of the longest frame without its Ethernet header.
    pub(super) mtu: usize,
    /// Administratively up.
    pub(super) up: bool,
    /// Has a carrier.
    pub(super) running: bool,
}

/// A packet socket bound to one interface; it receives nothing.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

impl Socket {
    /// Makes one that is bound to nothing yet.
    pub(super) fn open() -> io::Result<Self> {
        // SAFETY: socket(2) takes no pointers. Protocol 0: no frame is ever queued to this socket.
        let raw = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        check(raw)?;
        // SAFETY: `raw` is a fresh descriptor nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(raw) }))
    }

    /// From now on frames leave by this interface.
    pub(super) fn bind(&self, index: u32) -> io::Result<()> {
        let address = libc::sockaddr_ll {
            sll_family: libc::AF_PACKET as u16,
            sll_protocol: 0,
            sll_ifindex: index as i32,
            sll_hatype: 0,
            sll_pkttype: 0,
            sll_halen: 0,
            sll_addr: [0; 8],
        };
        // SAFETY: the address is a live sockaddr_ll and its length is given.
        check(unsafe {
            libc::bind(
                self.0.as_raw_fd(),
                (&raw const address).cast(),
                size_of_val(&address) as libc::socklen_t,
            )
        })
    }

    /// Frames go to the driver past the queueing discipline, and past those who listen there.
    pub(super) fn bypass_queueing(&self) -> io::Result<()> {
        let on: c_int = 1;
        // SAFETY: the option value is a live c_int and its length is given.
        check(unsafe {
            libc::setsockopt(
                self.0.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_QDISC_BYPASS,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        })
    }

    /// Sends frames in order without blocking; how many the kernel took before it refused one.
    ///
    /// # Errors
    /// Why the kernel refused the first.
    pub(super) fn send(&self, frames: &[&[u8]]) -> io::Result<usize> {
        // SAFETY: all-zero is a valid iovec and a valid mmsghdr: no pointers, no lengths.
        let mut parts: [libc::iovec; MOST] = unsafe { std::mem::zeroed() };
        // SAFETY: as above.
        let mut messages: [libc::mmsghdr; MOST] = unsafe { std::mem::zeroed() };
        let count = frames.len().min(MOST);
        for ((frame, part), message) in frames.iter().zip(&mut parts).zip(&mut messages) {
            part.iov_base = frame.as_ptr().cast_mut().cast();
            part.iov_len = frame.len();
            message.msg_hdr.msg_iov = part;
            message.msg_hdr.msg_iovlen = 1;
        }
        // SAFETY: each of the first `count` messages has one part, a live slice that the kernel only
        // reads; both arrays outlive the call.
        let sent = unsafe {
            libc::sendmmsg(
                self.0.as_raw_fd(),
                messages.as_mut_ptr(),
                count as u32,
                libc::MSG_DONTWAIT,
            )
        };
        check(sent)?;
        Ok(sent as usize)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Asks about an interface of this network namespace, through any socket in it.
///
/// # Errors
/// `ENODEV` if no interface has that name.
pub(super) fn link(socket: impl AsFd, name: &str) -> io::Result<Link> {
    let ask = |what: c_ulong| -> io::Result<libc::ifreq> {
        // SAFETY: all-zero is a valid ifreq: an empty name and plain numbers.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        // One byte is left for the zero at the end. The kernel would take `eth0:1` for `eth0`
        // (dev_ioctl cuts at a colon), and so send where nobody asked it to.
        if name.len() >= request.ifr_name.len() || name.contains([':', '\0']) {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        // SAFETY: these requests read the name and write one member of the ifreq.
        check(unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), what as _, &raw mut request) })?;
        Ok(request)
    };
    let hardware = ask(libc::SIOCGIFHWADDR as c_ulong)?;
    let flags = ask(libc::SIOCGIFFLAGS as c_ulong)?;
    let mtu = ask(libc::SIOCGIFMTU as c_ulong)?;
    // SAFETY: every member of the union is plain data, and each request wrote the one read here.
    let (hardware, flags, mtu) = unsafe {
        (
            hardware.ifr_ifru.ifru_hwaddr.sa_family,
            c_int::from(flags.ifr_ifru.ifru_flags),
            mtu.ifr_ifru.ifru_mtu,
        )
    };
    Ok(Link {
        hardware,
        mtu: mtu.max(0) as usize,
        up: flags & libc::IFF_UP != 0,
        running: flags & libc::IFF_RUNNING != 0,
    })
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Frames of one system call.
pub(super) const MOST: usize = 64;

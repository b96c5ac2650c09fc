//! Interfaces get addresses and routes: requests to the kernel by rtnetlink(7), in the caller's network namespace.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// A way to the kernel.
#[derive(Debug)]
pub(super) struct Netlink {
    socket: OwnedFd,
}

impl Netlink {
    /// To the network namespace of the calling thread.
    pub(super) fn new() -> io::Result<Self> {
        let kind = (SocketType::RAW, SocketFlags::CLOEXEC);
        // NETLINK_ROUTE is protocol 0.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind.0, kind.1, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { socket })
    }

    /// The number of the interface of that name.
    pub(super) fn index(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(&self.socket, name)?)
    }

    /// Sets it up.
    pub(super) fn up(&self, index: u32) -> io::Result<()> {
        let up = libc::IFF_UP as u32;
        let mut body = vec![0; 4];
        for word in [index, up, up] {
            body.extend(word.to_ne_bytes());
        }
        self.ask(libc::RTM_NEWLINK, 0, body, &[])
    }

    /// Gives it an address, of a network of so many bits. An IPv6 address is used at once, without looking who else has it.
    pub(super) fn address(&self, index: u32, address: IpAddr, bits: u8) -> io::Result<()> {
        let (family, bytes) = parts(address);
        let mut body = vec![family, bits, IFA_F_NODAD, 0];
        body.extend(index.to_ne_bytes());
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        let attributes = [(libc::IFA_LOCAL, &bytes[..]), (libc::IFA_ADDRESS, &bytes)];
        self.ask(libc::RTM_NEWADDR, flags, body, &attributes)
    }

    /// What is on no network of ours goes by that router.
    pub(super) fn default_route(&self, index: u32, router: IpAddr) -> io::Result<()> {
        let (family, bytes) = parts(router);
        let (table, protocol, scope, kind) = (254, 4, 0, 1);
        let mut body = vec![family, 0, 0, 0, table, protocol, scope, kind];
        body.extend(0_u32.to_ne_bytes());
        let index = index.to_ne_bytes();
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        let attributes = [(libc::RTA_OIF, &index[..]), (libc::RTA_GATEWAY, &bytes)];
        self.ask(libc::RTM_NEWROUTE, flags, body, &attributes)
    }

    /// Asks, and waits for the answer, which the kernel has at once.
    fn ask(
        &self,
        kind: u16,
        flags: i32,
        body: Vec<u8>,
        attributes: &[(u16, &[u8])],
    ) -> io::Result<()> {
        let mut message = vec![0; HEADER];
        message.extend(body);
        for (name, value) in attributes {
            let len = u16::try_from(4 + value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
            message.extend(len.to_ne_bytes());
            message.extend(name.to_ne_bytes());
            message.extend(*value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let len = u32::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
        message[..4].copy_from_slice(&len.to_ne_bytes());
        message[4..6].copy_from_slice(&kind.to_ne_bytes());
        message[6..8].copy_from_slice(&flags.to_ne_bytes());
        rustix::net::send(&self.socket, &message, SendFlags::empty())?;
        let mut answer = [0; 4096];
        let (count, _) = rustix::net::recv(&self.socket, &mut answer, RecvFlags::empty())?;
        let errno = answer[..count].get(HEADER..HEADER + 4);
        let errno = errno
            .and_then(|bytes| bytes.try_into().ok())
            .map(i32::from_ne_bytes);
        match errno {
            Some(0) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(-errno)),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

fn parts(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (libc::AF_INET as u8, Ipv4Addr::octets(&address).to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6 as u8, Ipv6Addr::octets(&address).to_vec()),
    }
}

/// Bytes of `struct nlmsghdr`.
const HEADER: usize = 16;
const IFA_F_NODAD: u8 = 2;

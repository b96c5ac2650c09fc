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

    /// Gives it an address, of a network with a prefix of `bits`. An IPv6 address is used at once, without looking who else has it.
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

    /// One that was made before, in the namespace of which it speaks whoever has it.
    pub(super) fn of(socket: OwnedFd) -> Self {
        Self { socket }
    }

    pub(super) fn into_socket(self) -> OwnedFd {
        self.socket
    }

    /// The IPv6 addresses that an interface has.
    pub(super) fn addresses6(&self, index: u32) -> io::Result<Vec<IpAddr>> {
        let request = message(
            libc::RTM_GETADDR,
            libc::NLM_F_REQUEST | libc::NLM_F_DUMP,
            vec![libc::AF_INET6 as u8, 0, 0, 0, 0, 0, 0, 0],
            &[],
        )?;
        let mut found = Vec::new();
        let mut answer = vec![0; 32_768];
        // What is left of an answer that failed is none of ours.
        while rustix::net::recv(&self.socket, &mut answer[..], RecvFlags::DONTWAIT).is_ok() {}
        rustix::net::send(&self.socket, &request, SendFlags::empty())?;
        loop {
            // The kernel has it at once; what it has not is not waited for.
            let flags = RecvFlags::DONTWAIT;
            let (count, _) = rustix::net::recv(&self.socket, &mut answer[..], flags)?;
            if addresses_in(&answer[..count], index, &mut found) {
                return Ok(found);
            }
        }
    }

    /// Asks, and waits for the answer, which the kernel has at once.
    fn ask(
        &self,
        kind: u16,
        flags: i32,
        body: Vec<u8>,
        attributes: &[(u16, &[u8])],
    ) -> io::Result<()> {
        let flags = libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags;
        let message = message(kind, flags, body, attributes)?;
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

fn message(
    kind: u16,
    flags: i32,
    body: Vec<u8>,
    attributes: &[(u16, &[u8])],
) -> io::Result<Vec<u8>> {
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
    message[..4].copy_from_slice(&len.to_ne_bytes());
    message[4..6].copy_from_slice(&kind.to_ne_bytes());
    message[6..8].copy_from_slice(&(flags as u16).to_ne_bytes());
    Ok(message)
}

/// Adds the addresses of the interface that a part of an answer has. True: it was the last part.
fn addresses_in(mut answer: &[u8], index: u32, found: &mut Vec<IpAddr>) -> bool {
    while let Some((head, _)) = answer.split_first_chunk::<HEADER>() {
        let len = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let kind = u16::from_ne_bytes([head[4], head[5]]);
        let Some(body) = answer.get(HEADER..len) else {
            return true;
        };
        if kind != libc::RTM_NEWADDR {
            // The end, or an error.
            return true;
        }
        if let Some((about, attributes)) = body.split_first_chunk::<8>()
            && about[4..] == index.to_ne_bytes()
        {
            found.extend(address_in(attributes));
        }
        answer = answer.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

/// The interface's own address: of a point-to-point link it is not the first.
fn address_in(mut attributes: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    while let [a, b, c, d, ..] = *attributes {
        let (len, name) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
        let value = attributes.get(4..usize::from(len))?;
        let address = <[u8; 16]>::try_from(value).ok().map(IpAddr::from);
        match name {
            libc::IFA_LOCAL => found = address,
            libc::IFA_ADDRESS => found = found.or(address),
            _ => {}
        }
        attributes = attributes
            .get(usize::from(len).next_multiple_of(4)..)
            .unwrap_or_default();
    }
    found
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_which_addresses_an_interface_has_and_is_asked_again() {
        let netlink = Netlink::new().unwrap();
        let lo = netlink.index("lo").unwrap();
        let text = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
        let mut told: Vec<IpAddr> = text
            .lines()
            .filter(|line| line.ends_with(" lo"))
            .filter_map(|line| u128::from_str_radix(&line[..32], 16).ok())
            .map(|bits| Ipv6Addr::from(bits).into())
            .collect();
        told.sort();
        for _ in 0..3 {
            let mut found = netlink.addresses6(lo).unwrap();
            found.sort();
            assert_eq!(found, told);
        }
        assert!(netlink.addresses6(u32::MAX).unwrap().is_empty());
    }

    #[test]
    fn any_cut_of_an_answer_is_read_safely() {
        let mut body = vec![libc::AF_INET6 as u8, 64, 0, 0];
        body.extend(7_u32.to_ne_bytes());
        let own = Ipv6Addr::LOCALHOST.octets();
        let answer = message(libc::RTM_NEWADDR, 0, body, &[(libc::IFA_ADDRESS, &own)]).unwrap();
        let mut found = Vec::new();
        assert!(!addresses_in(&answer, 7, &mut found) && !addresses_in(&answer, 8, &mut found));
        assert_eq!(found, [IpAddr::from(own)]);
        for len in 0..answer.len() {
            addresses_in(&answer[..len], 7, &mut found);
        }
    }
}

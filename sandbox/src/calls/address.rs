//! Addresses: what the program wrote, what is judged, and what the kernel is given.
//!
//! The kernel is never given what the program wrote: a [`Name`] is made of a copy, judged, and written out again.
//! What an address means depends on the socket's kind, which is read from the socket itself.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::BorrowedFd;

use crate::act::Transport;
use crate::sys::socket::{self, Address};

/// What kind of socket it is, by itself and not by what is said to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kind {
    /// `AF_…`
    pub(super) domain: i32,
    /// `SOCK_…`
    pub(super) kind: i32,
    /// `IPPROTO_…` and others, by domain.
    pub(super) protocol: i32,
}

/// What an address is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// connect
    Connect,
    /// bind
    Bind,
    /// sendto, sendmsg, sendmmsg
    Send,
}

/// An address that was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// Nobody: connect with `AF_UNSPEC`, which takes a connection back.
    Nobody,
    /// An address of IPv4 or IPv6. `judged` has no forms of IPv4 inside IPv6 and no wildcard as a destination.
    Internet { judged: SocketAddr, given: Address },
    /// A Unix socket's file, as the program names it.
    Path(Vec<u8>),
    /// A Unix socket's abstract name.
    Abstract(Vec<u8>),
    /// A Unix socket gets an abstract name of the kernel's.
    Any,
    /// Context id and port.
    Vsock { cid: u32, port: u32, given: Address },
    /// Of a family whose sockets are judged when they are made.
    Other(Address),
}

type Number = i32;

impl Kind {
    /// What kind a socket is.
    ///
    /// # Errors
    /// `ENOTSOCK` if it is none.
    pub(super) fn of(file: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self {
            domain: socket::option(file, libc::SO_DOMAIN)?,
            kind: socket::option(file, libc::SO_TYPE)?,
            protocol: socket::option(file, libc::SO_PROTOCOL)?,
        })
    }

    /// The protocol as rules name it.
    pub(super) fn transport(self) -> Transport {
        match self.domain {
            libc::AF_INET | libc::AF_INET6 => match (self.kind & 0xf, self.protocol) {
                (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP | libc::IPPROTO_MPTCP) => Transport::Tcp,
                (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP | libc::IPPROTO_UDPLITE) => Transport::Udp,
                (libc::SOCK_DGRAM, libc::IPPROTO_ICMP | libc::IPPROTO_ICMPV6) => Transport::Icmp,
                (libc::SOCK_RAW, _) => Transport::Raw,
                // SOCK_PACKET, the packet socket of Linux 2.0
                (10, _) => Transport::Packet,
                (_, protocol) => Transport::Other(u8::try_from(protocol).unwrap_or(255)),
            },
            libc::AF_UNIX => Transport::Unix,
            libc::AF_NETLINK => Transport::Netlink(u8::try_from(self.protocol).unwrap_or(255)),
            libc::AF_PACKET => Transport::Packet,
            libc::AF_VSOCK => Transport::Vsock,
            domain => Transport::Family(u16::try_from(domain).unwrap_or(u16::MAX)),
        }
    }

    /// Whether it is of IPv4 or IPv6.
    pub(super) fn is_internet(self) -> bool {
        matches!(self.domain, libc::AF_INET | libc::AF_INET6)
    }

    /// Whether it carries a stream, so that a part of what is to be sent may be.
    pub(super) fn is_stream(self) -> bool {
        self.kind == libc::SOCK_STREAM
    }
}

impl Name {
    /// Understands an address that was written for a socket of this kind.
    ///
    /// # Errors
    /// The number of the error that the kernel gives for it.
    pub(super) fn of(kind: Kind, purpose: Purpose, bytes: &[u8]) -> Result<Self, Number> {
        let Some(family) = number::<2>(bytes, 0).map(u16::from_ne_bytes) else {
            return Err(libc::EINVAL);
        };
        let family = i32::from(family);
        match kind.domain {
            libc::AF_INET | libc::AF_INET6 => internet(kind, purpose, family, bytes),
            libc::AF_UNIX => unix(purpose, family, bytes),
            _ if family == libc::AF_UNSPEC && purpose == Purpose::Connect => Ok(Self::Nobody),
            libc::AF_VSOCK => {
                let (port, cid) = (number::<4>(bytes, 4), number::<4>(bytes, 8));
                let (Some(port), Some(cid)) = (port, cid) else {
                    return Err(libc::EINVAL);
                };
                Ok(Self::Vsock {
                    cid: u32::from_ne_bytes(cid),
                    port: u32::from_ne_bytes(port),
                    given: other(bytes)?,
                })
            }
            libc::AF_NETLINK => {
                let to = number::<4>(bytes, 4).map(u32::from_ne_bytes);
                // NETLINK_ROUTE sockets are made without a question, to speak to the kernel.
                if kind.protocol == 0 && purpose != Purpose::Bind && to != Some(0) {
                    return Err(libc::EPERM);
                }
                Ok(Self::Other(other(bytes)?))
            }
            _ => Ok(Self::Other(other(bytes)?)),
        }
    }
}

fn other(bytes: &[u8]) -> Result<Address, Number> {
    Address::new(bytes).ok_or(libc::EINVAL)
}

fn internet(kind: Kind, purpose: Purpose, family: i32, bytes: &[u8]) -> Result<Name, Number> {
    let is_six = kind.domain == libc::AF_INET6;
    match family {
        libc::AF_UNSPEC => match purpose {
            Purpose::Connect => Ok(Name::Nobody),
            // udpv6_sendmsg takes it for no address, udp_sendmsg for one of AF_INET.
            Purpose::Send if is_six => Ok(Name::Nobody),
            Purpose::Send => four(purpose, bytes),
            // inet_bind takes the wildcard so, for old programs.
            Purpose::Bind if !is_six => match four(purpose, bytes)? {
                name @ Name::Internet { judged, .. } if judged.ip().is_unspecified() => Ok(name),
                _ => Err(libc::EAFNOSUPPORT),
            },
            Purpose::Bind => Err(libc::EAFNOSUPPORT),
        },
        libc::AF_INET if is_six && purpose == Purpose::Bind => Err(libc::EAFNOSUPPORT),
        libc::AF_INET => four(purpose, bytes),
        libc::AF_INET6 if is_six => six(purpose, bytes),
        libc::AF_INET6 => Err(libc::EAFNOSUPPORT),
        _ => Err(libc::EAFNOSUPPORT),
    }
}

fn four(purpose: Purpose, bytes: &[u8]) -> Result<Name, Number> {
    let (Some(port), Some(address)) = (number::<2>(bytes, 2), number::<4>(bytes, 4)) else {
        return Err(libc::EINVAL);
    };
    if bytes.len() < size_of::<libc::sockaddr_in>() {
        return Err(libc::EINVAL);
    }
    let ip = destination(purpose, IpAddr::V4(Ipv4Addr::from(address)));
    let judged = SocketAddr::new(ip, u16::from_be_bytes(port));
    Ok(Name::Internet {
        judged,
        given: encode(judged),
    })
}

fn six(purpose: Purpose, bytes: &[u8]) -> Result<Name, Number> {
    let (Some(port), Some(flow), Some(address)) = (
        number::<2>(bytes, 2),
        number::<4>(bytes, 4),
        number::<16>(bytes, 8),
    ) else {
        // SIN6_LEN_RFC2133: 24 bytes, without a scope.
        return Err(libc::EINVAL);
    };
    let scope = number::<4>(bytes, 24).map_or(0, u32::from_ne_bytes);
    let port = u16::from_be_bytes(port);
    let written = Ipv6Addr::from(address);
    // IPv4 in the form of IPv6 is judged as IPv4, and given as it was.
    let (judged, given) = match written.to_ipv4_mapped() {
        Some(mapped) => {
            let IpAddr::V4(mapped) = destination(purpose, IpAddr::V4(mapped)) else {
                return Err(libc::EINVAL);
            };
            (IpAddr::V4(mapped), mapped.to_ipv6_mapped())
        }
        None => match destination(purpose, IpAddr::V6(written)) {
            ip @ IpAddr::V6(six) => (ip, six),
            IpAddr::V4(_) => return Err(libc::EINVAL),
        },
    };
    let given = SocketAddrV6::new(given, port, u32::from_be_bytes(flow), scope);
    let judged = match judged {
        IpAddr::V4(four) => SocketAddr::V4(SocketAddrV4::new(four, port)),
        IpAddr::V6(_) => SocketAddr::V6(SocketAddrV6::new(*given.ip(), port, 0, scope)),
    };
    Ok(Name::Internet {
        judged,
        given: encode(SocketAddr::V6(given)),
    })
}

/// Who is meant: to the kernel the wildcard as a destination is this host.
fn destination(purpose: Purpose, ip: IpAddr) -> IpAddr {
    match ip {
        _ if purpose == Purpose::Bind || !ip.is_unspecified() => ip,
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

fn unix(purpose: Purpose, family: i32, bytes: &[u8]) -> Result<Name, Number> {
    const LONGEST: usize = size_of::<libc::sockaddr_un>();
    if family == libc::AF_UNSPEC && purpose == Purpose::Connect {
        return Ok(Name::Nobody);
    }
    if family != libc::AF_UNIX || bytes.len() > LONGEST {
        return Err(libc::EINVAL);
    }
    match &bytes[2..] {
        [] if purpose == Purpose::Bind => Ok(Name::Any),
        [] => Err(libc::EINVAL),
        [0, name @ ..] => Ok(Name::Abstract(name.to_vec())),
        path => {
            let end = path.iter().position(|byte| *byte == 0);
            Ok(Name::Path(path[..end.unwrap_or(path.len())].to_vec()))
        }
    }
}

/// A Unix address of a path (at most 108 bytes), or with a leading zero byte of an abstract name.
pub(super) fn unix_address(name: &[u8]) -> Option<Address> {
    let mut bytes = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
    bytes.extend(name);
    (bytes.len() <= size_of::<libc::sockaddr_un>())
        .then(|| Address::new(&bytes))
        .flatten()
}

/// An address of IPv4 or IPv6 as the kernel takes it.
pub(crate) fn encode(address: SocketAddr) -> Address {
    let mut bytes = [0; size_of::<libc::sockaddr_in6>()];
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    let length = match address {
        SocketAddr::V4(four) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            bytes[4..8].copy_from_slice(&four.ip().octets());
            size_of::<libc::sockaddr_in>()
        }
        SocketAddr::V6(six) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            bytes[4..8].copy_from_slice(&six.flowinfo().to_be_bytes());
            bytes[8..24].copy_from_slice(&six.ip().octets());
            bytes[24..28].copy_from_slice(&six.scope_id().to_ne_bytes());
            bytes.len()
        }
    };
    Address::new(&bytes[..length]).expect("shorter than any address may be")
}

/// Another address for a socket that was given `like`: IPv4 in the form of IPv6 if that was.
pub(super) fn encode_like(like: &Address, address: SocketAddr) -> Address {
    let family = number::<2>(like.bytes(), 0).map(u16::from_ne_bytes);
    let is_six = family.is_some_and(|family| i32::from(family) == libc::AF_INET6);
    match address {
        SocketAddr::V4(four) if is_six => {
            let ip = four.ip().to_ipv6_mapped();
            encode(SocketAddr::V6(SocketAddrV6::new(ip, four.port(), 0, 0)))
        }
        other => encode(other),
    }
}

/// The other way: an address that the kernel gave, without forms of IPv4 inside IPv6.
pub(super) fn decode(address: &Address) -> Option<SocketAddr> {
    let bytes = address.bytes();
    let port = u16::from_be_bytes(number(bytes, 2)?);
    let ip = match i32::from(u16::from_ne_bytes(number(bytes, 0)?)) {
        libc::AF_INET => IpAddr::V4(Ipv4Addr::from(number::<4>(bytes, 4)?)),
        libc::AF_INET6 => IpAddr::V6(Ipv6Addr::from(number::<16>(bytes, 8)?)).to_canonical(),
        _ => return None,
    };
    let scope = number::<4>(bytes, 24).map_or(0, u32::from_ne_bytes);
    Some(match ip {
        IpAddr::V4(_) => SocketAddr::new(ip, port),
        IpAddr::V6(six) => SocketAddr::V6(SocketAddrV6::new(six, port, 0, scope)),
    })
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TCP4: Kind = Kind {
        domain: libc::AF_INET,
        kind: libc::SOCK_STREAM,
        protocol: libc::IPPROTO_TCP,
    };
    const UDP6: Kind = Kind {
        domain: libc::AF_INET6,
        kind: libc::SOCK_DGRAM,
        protocol: libc::IPPROTO_UDP,
    };
    const UNIX: Kind = Kind {
        domain: libc::AF_UNIX,
        kind: libc::SOCK_STREAM,
        protocol: 0,
    };

    fn judged(kind: Kind, purpose: Purpose, written: &str) -> (String, SocketAddr) {
        let bytes = encode(written.parse().unwrap());
        match Name::of(kind, purpose, bytes.bytes()).unwrap() {
            Name::Internet { judged, given } => (judged.to_string(), decode(&given).unwrap()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn ipv4_inside_ipv6_is_judged_as_ipv4() {
        let (mapped, _) = judged(UDP6, Purpose::Send, "[::ffff:10.0.0.1]:53");
        assert_eq!(mapped, "10.0.0.1:53");
        let (plain, _) = judged(UDP6, Purpose::Send, "10.0.0.1:53");
        assert_eq!(plain, "10.0.0.1:53");
        let (six, _) = judged(UDP6, Purpose::Connect, "[2001:db8::1]:443");
        assert_eq!(six, "[2001:db8::1]:443");
    }

    #[test]
    fn the_wildcard_as_a_destination_is_this_host() {
        for (kind, written, expected) in [
            (TCP4, "0.0.0.0:80", "127.0.0.1:80"),
            (UDP6, "[::]:80", "[::1]:80"),
            (UDP6, "[::ffff:0.0.0.0]:80", "127.0.0.1:80"),
        ] {
            let (name, given) = judged(kind, Purpose::Connect, written);
            assert_eq!(name, expected);
            assert_eq!(given.to_string(), expected);
            let (bound, _) = judged(kind, Purpose::Bind, written);
            assert_ne!(bound, expected);
        }
    }

    #[test]
    fn no_family_means_what_the_kernel_makes_of_it() {
        let mut bytes = encode("192.0.2.1:7".parse().unwrap()).bytes().to_vec();
        bytes[..2].copy_from_slice(&[0, 0]);
        assert_eq!(Name::of(TCP4, Purpose::Connect, &bytes), Ok(Name::Nobody));
        let udp = Kind {
            kind: libc::SOCK_DGRAM,
            protocol: libc::IPPROTO_UDP,
            ..TCP4
        };
        let Ok(Name::Internet { judged, .. }) = Name::of(udp, Purpose::Send, &bytes) else {
            panic!("an address");
        };
        assert_eq!(judged.to_string(), "192.0.2.1:7");
        assert_eq!(Name::of(UDP6, Purpose::Send, &bytes), Ok(Name::Nobody));
        assert_eq!(
            Name::of(udp, Purpose::Bind, &bytes),
            Err(libc::EAFNOSUPPORT)
        );
    }

    #[test]
    fn a_unix_address_on_a_tcp_socket_is_refused_by_the_sockets_kind() {
        let bytes = unix_address(b"/run/x").unwrap();
        assert_eq!(
            Name::of(TCP4, Purpose::Connect, bytes.bytes()),
            Err(libc::EAFNOSUPPORT)
        );
        let name = Name::of(UNIX, Purpose::Connect, bytes.bytes());
        assert_eq!(name, Ok(Name::Path(b"/run/x".to_vec())));
        let abstracted = unix_address(b"\0a\0b").unwrap();
        let name = Name::of(UNIX, Purpose::Connect, abstracted.bytes());
        assert_eq!(name, Ok(Name::Abstract(b"a\0b".to_vec())));
        let inet = encode("192.0.2.1:7".parse().unwrap());
        let refused = Name::of(UNIX, Purpose::Connect, inet.bytes());
        assert_eq!(refused, Err(libc::EINVAL));
    }

    #[test]
    fn short_addresses_are_refused() {
        let whole = encode("192.0.2.1:7".parse().unwrap());
        for length in 0..16 {
            assert!(Name::of(TCP4, Purpose::Connect, &whole.bytes()[..length]).is_err());
        }
        let whole = encode("[2001:db8::1]:7".parse().unwrap());
        for length in 0..24 {
            assert!(Name::of(UDP6, Purpose::Connect, &whole.bytes()[..length]).is_err());
        }
        assert!(Name::of(UDP6, Purpose::Connect, &whole.bytes()[..24]).is_ok());
    }
}

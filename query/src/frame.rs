//! What a row of `flows` is told apart by: who spoke with whom, over what.

use std::net::IpAddr;

use vnplug_frame::headers::{self, Link};
pub(crate) use vnplug_frame::headers::{IPV4, IPV6};

/// One direction of a conversation in one minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    /// Minutes since 1970 UTC.
    pub(crate) minute: u32,
    /// Number of the interface's name in the segment.
    pub(crate) interface: u32,
    /// 0 unknown, 1 received, 2 sent.
    pub(crate) direction: u8,
    /// LINKTYPE_….
    pub(crate) link_type: u32,
    /// VLAN numbers of the two outermost tags.
    pub(crate) vlans: [Option<u16>; 2],
    /// The rest.
    pub(crate) talk: Talk,
}

/// Who speaks with whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Talk {
    /// IPv4 or IPv6.
    Ip {
        from: IpAddr,
        to: IpAddr,
        /// Of IPv6 the one after the extension headers.
        protocol: u8,
        /// Of TCP, UDP and SCTP, and type and code of ICMP; of fragments only the first has them.
        ports: Option<[u16; 2]>,
    },
    /// Anything else, and IP whose header is cut.
    Other {
        /// Below 0x600 it is a length, and no Ethertype.
        ethertype: Option<u16>,
        /// Source and destination.
        macs: Option<[[u8; 6]; 2]>,
    },
}

/// What a frame says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    /// VLAN numbers of the two outermost tags.
    pub(crate) vlans: [Option<u16>; 2],
    /// Who speaks with whom.
    pub(crate) talk: Talk,
    /// The flags of TCP.
    pub(crate) tcp_flags: Option<u8>,
}

impl Frame {
    /// Looks at what was captured of a frame. Never fails: what is not understood is
    /// [`Talk::Other`].
    pub(crate) fn of(link_type: u32, bytes: &[u8]) -> Self {
        match link_type {
            ETHERNET => {
                let mac = |at: usize| bytes.get(at..)?.first_chunk::<6>().copied();
                let macs = mac(6).zip(mac(0)).map(|(from, to)| [from, to]);
                Self::tagged(bytes, 12, macs)
            }
            LINUX_SLL => Self::tagged(bytes, 14, None),
            LINUX_SLL2 => {
                let net = bytes.get(20..).unwrap_or_default();
                Self::untagged(half(bytes, 0), net, None)
            }
            RAW | RAW_IPV4 | RAW_IPV6 => {
                let ethertype = match bytes.first().map(|first| first >> 4) {
                    Some(4) => Some(IPV4),
                    Some(6) => Some(IPV6),
                    _ => None,
                };
                Self::untagged(ethertype, bytes, None)
            }
            _ => Self::untagged(None, &[], None),
        }
    }

    /// With an Ethertype at `at`, behind which the packet begins, or tags.
    fn tagged(bytes: &[u8], at: usize, macs: Option<[[u8; 6]; 2]>) -> Self {
        let link = Link::of(bytes, at);
        Self {
            vlans: [link.vlan(bytes, 0), link.vlan(bytes, 1)],
            ..Self::untagged(link.ethertype, link.network(bytes), macs)
        }
    }

    fn untagged(ethertype: Option<u16>, net: &[u8], macs: Option<[[u8; 6]; 2]>) -> Self {
        let ip = ethertype.and_then(|ethertype| ip(ethertype, net));
        let (talk, tcp_flags) = ip.unwrap_or((Talk::Other { ethertype, macs }, None));
        Self {
            vlans: [None; 2],
            talk,
            tcp_flags,
        }
    }
}

/// `None` if it is not IP, or the header is cut.
fn ip(ethertype: u16, net: &[u8]) -> Option<(Talk, Option<u8>)> {
    let carried = headers::ip(ethertype, net)?;
    let (from, to) = match ethertype {
        IPV4 => (v4(net, 12)?, v4(net, 16)?),
        _ => (v6(net, 8)?, v6(net, 24)?),
    };
    let no_header = ethertype == IPV4 && carried.at < 20;
    let (ports, flags) = match carried.later || no_header {
        true => (None, None),
        false => transport(carried.protocol, net.get(carried.at..).unwrap_or_default()),
    };
    let talk = Talk::Ip {
        from,
        to,
        protocol: carried.protocol,
        ports,
    };
    Some((talk, flags))
}

fn v4(net: &[u8], at: usize) -> Option<IpAddr> {
    Some(IpAddr::from(*net.get(at..)?.first_chunk::<4>()?))
}

fn v6(net: &[u8], at: usize) -> Option<IpAddr> {
    Some(IpAddr::from(*net.get(at..)?.first_chunk::<16>()?))
}

/// Ports, and flags of TCP, as far as they were captured.
fn transport(protocol: u8, bytes: &[u8]) -> (Option<[u16; 2]>, Option<u8>) {
    match (protocol, bytes) {
        (TCP | UDP | SCTP, _) => {}
        (ICMP | ICMP6, &[kind, code, ..]) => return (Some([kind.into(), code.into()]), None),
        _ => return (None, None),
    }
    let ports = half(bytes, 0).zip(half(bytes, 2));
    let flags = (protocol == TCP).then(|| bytes.get(13).copied()).flatten();
    (ports.map(|(from, to)| [from, to]), flags)
}

#[inline]
fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let half = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*half))
}

/// The usual name of an IP protocol, or its number.
pub(crate) fn protocol_name(protocol: u8) -> String {
    let name = match protocol {
        ICMP => "icmp",
        2 => "igmp",
        4 => "ipip",
        TCP => "tcp",
        UDP => "udp",
        41 => "ipv6",
        47 => "gre",
        50 => "esp",
        51 => "ah",
        ICMP6 => "icmp6",
        89 => "ospf",
        103 => "pim",
        112 => "vrrp",
        SCTP => "sctp",
        other => return format!("ip-proto-{other}"),
    };
    name.to_owned()
}

// LINKTYPE_…
const ETHERNET: u32 = 1;
const RAW: u32 = 101;
const LINUX_SLL: u32 = 113;
const RAW_IPV4: u32 = 228;
const RAW_IPV6: u32 = 229;
const LINUX_SLL2: u32 = 276;

const ICMP: u8 = 1;
const ICMP6: u8 = 58;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

#[cfg(test)]
mod tests {
    use super::*;

    fn ethernet(behind_macs: &[u8]) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        frame.extend(behind_macs);
        frame
    }

    fn v4_header(protocol: u8, options: u8, fragment: u16) -> Vec<u8> {
        let mut header = vec![0x45 + options, 0, 0, 100, 0, 0];
        header.extend(fragment.to_be_bytes());
        header.extend([64, protocol, 0, 0, 10, 1, 2, 3, 192, 0, 2, 1]);
        header.extend(vec![1; usize::from(options) * 4]);
        header
    }

    fn ip(frame: Frame) -> (String, String, u8, Option<[u16; 2]>) {
        match frame.talk {
            Talk::Ip {
                from,
                to,
                protocol,
                ports,
            } => (from.to_string(), to.to_string(), protocol, ports),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn tcp_behind_options_and_two_tags_is_seen() {
        let mut frame = ethernet(&[0x88, 0xa8, 0x60, 7, 0x81, 0, 0, 5, 8, 0]);
        frame.extend(v4_header(6, 2, 0x4000));
        frame.extend([0x01, 0xbb, 0x1f, 0x90, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x12]);
        let seen = Frame::of(1, &frame);
        assert_eq!(seen.vlans, [Some(7), Some(5)]);
        assert_eq!(seen.tcp_flags, Some(0x12));
        let ports = Some([443, 8080]);
        assert_eq!(ip(seen), ("10.1.2.3".into(), "192.0.2.1".into(), 6, ports));
    }

    #[test]
    fn later_fragments_and_cut_headers_have_no_ports() {
        let mut frame = ethernet(&[8, 0]);
        frame.extend(v4_header(17, 0, 0x0010));
        frame.extend([0, 53, 0, 53]);
        assert_eq!(ip(Frame::of(1, &frame)).3, None);
        let mut frame = ethernet(&[8, 0]);
        frame.extend(v4_header(17, 0, 0));
        frame.extend([0, 53, 0]);
        assert_eq!(ip(Frame::of(1, &frame)).3, None);
        frame.truncate(14 + 19);
        let macs = Some([[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]]);
        let ethertype = Some(IPV4);
        assert_eq!(Frame::of(1, &frame).talk, Talk::Other { ethertype, macs });
    }

    #[test]
    fn ports_behind_extension_headers_are_seen() {
        let mut packet = vec![0x60, 0, 0, 0, 0, 100, 0, 64];
        for last in [1, 2] {
            packet.extend([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        packet.extend([44, 0, 1, 4, 0, 0, 0, 0]); // hop by hop, then a fragment
        let fragment = packet.len();
        packet.extend([17, 0, 0, 1, 0, 0, 0, 0]); // the first one
        packet.extend([0, 53, 0x80, 0]);
        let (from, to) = ("2001:db8::1".to_owned(), "2001:db8::2".to_owned());
        let first = (from.clone(), to.clone(), 17, Some([53, 0x8000]));
        assert_eq!(ip(Frame::of(101, &packet)), first);
        packet[fragment + 3] = 9; // a later one
        assert_eq!(ip(Frame::of(229, &packet)), (from, to, 17, None));
    }

    #[test]
    fn whatever_the_bytes_are_something_is_said() {
        let mut frame = ethernet(&[0x81, 0, 0, 1, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 1, 0, 64]);
        frame.extend([7; 60]);
        for link_type in [1, 101, 113, 228, 229, 276, 147] {
            for len in 0..frame.len() {
                let _ = Frame::of(link_type, &frame[..len]);
            }
        }
        let macs = Some([[2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1]]);
        let arp = Frame::of(1, &ethernet(&[8, 6, 0, 1])).talk;
        let ethertype = Some(0x0806);
        assert_eq!(arp, Talk::Other { ethertype, macs });
    }
}

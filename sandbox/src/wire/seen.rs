//! What a frame is, as far as a fence asks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use vnplug_frame::headers::{self, IPV4, IPV6};

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen<'a> {
    /// Who has which IPv4 address.
    Arp(Arp),
    /// An IP packet.
    Ip(Packet<'a>),
    /// Something else, a tagged frame too.
    Other,
    /// It says that it is one of the first two, and is not.
    Malformed,
}

/// A message of ARP for IPv4 on Ethernet (RFC 826).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arp {
    /// It says who it is of.
    pub(super) sender: ([u8; 6], Ipv4Addr),
    /// Whom it asks for, or answers.
    pub(super) target: Ipv4Addr,
    /// The hardware address of that one, as far as the sender knows.
    pub(super) target_mac: [u8; 6],
    pub(super) is_request: bool,
    /// Nothing follows but the zeros that fill an Ethernet frame.
    pub(super) is_exact: bool,
}

/// An IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packet<'a> {
    pub(super) from: IpAddr,
    pub(super) to: IpAddr,
    pub(super) protocol: u8,
    /// Options, or extension headers.
    pub(super) between: &'a [u8],
    /// What comes after the IP headers.
    pub(super) body: &'a [u8],
    /// How many bytes at its end are beyond the packet's length: short frames are filled up.
    pub(super) padding: usize,
    /// Not the first part of a datagram: the body begins in its middle.
    pub(super) later: bool,
    /// More parts follow.
    pub(super) more: bool,
    /// Which datagram it is a part of.
    pub(super) identity: u32,
    /// It says by itself which way to go: its destination may be another than `to`.
    pub(super) routes: bool,
    /// Hops that are left.
    pub(super) hops: u8,
}

impl<'a> Seen<'a> {
    pub(super) fn of(frame: &'a [u8]) -> Self {
        match frame {
            [_, _, _, _, _, _, _, _, _, _, _, _, high, low, rest @ ..] => {
                match u16::from_be_bytes([*high, *low]) {
                    ARP => arp(rest).map_or(Self::Malformed, Self::Arp),
                    IPV4 => ipv4(rest).map_or(Self::Malformed, Self::Ip),
                    IPV6 => ipv6(rest).map_or(Self::Malformed, Self::Ip),
                    _ => Self::Other,
                }
            }
            _ => Self::Malformed,
        }
    }
}

impl<'a> Packet<'a> {
    /// What the packet carries by its own length.
    pub(super) fn unpadded(&self) -> &'a [u8] {
        let len = self.body.len().saturating_sub(self.padding);
        &self.body[..len]
    }

    /// The ports of TCP, UDP and whatever has them at the same place.
    pub(super) fn ports(&self) -> Option<(u16, u16)> {
        match self.body {
            [a, b, c, d, ..] => Some((u16::from_be_bytes([*a, *b]), u16::from_be_bytes([*c, *d]))),
            _ => None,
        }
    }
}

fn arp(bytes: &[u8]) -> Option<Arp> {
    let (bytes, filling) = bytes.split_first_chunk::<28>()?;
    let [0, 1, 8, 0, 6, 4, 0, operation @ 1..=2] = bytes[..8] else {
        return None;
    };
    let address =
        |at: usize| Ipv4Addr::from([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let mut mac = [0; 6];
    mac.copy_from_slice(&bytes[8..14]);
    let mut target_mac = [0; 6];
    target_mac.copy_from_slice(&bytes[18..24]);
    Some(Arp {
        sender: (mac, address(14)),
        target: address(24),
        target_mac,
        is_request: operation == 1,
        is_exact: matches!(filling.len(), 0 | ARP_FILLING) && filling.iter().all(|&byte| byte == 0),
    })
}

pub(super) fn ipv4(bytes: &[u8]) -> Option<Packet<'_>> {
    let head: &[u8; 20] = bytes.first_chunk()?;
    let carried = headers::ip(IPV4, bytes)?;
    if head[0] >> 4 != 4 || carried.at < head.len() {
        return None;
    }
    let options = bytes.get(head.len()..carried.at)?;
    let len = match u16::from_be_bytes([head[2], head[3]]) {
        0 => bytes.len(),
        len => usize::from(len),
    };
    Some(Packet {
        from: Ipv4Addr::from([head[12], head[13], head[14], head[15]]).into(),
        to: Ipv4Addr::from([head[16], head[17], head[18], head[19]]).into(),
        protocol: carried.protocol,
        between: options,
        body: &bytes[carried.at..],
        padding: bytes.len().saturating_sub(len),
        later: carried.later,
        more: carried.more,
        identity: u16::from_be_bytes([head[4], head[5]]).into(),
        routes: has_route(options),
        hops: head[8],
    })
}

pub(super) fn ipv6(bytes: &[u8]) -> Option<Packet<'_>> {
    let head: &[u8; 40] = bytes.first_chunk()?;
    let carried = headers::ip(IPV6, bytes)?;
    if head[0] >> 4 != 6 || carried.unknown {
        return None;
    }
    let [mut from, mut to] = [[0; 16]; 2];
    from.copy_from_slice(&head[8..24]);
    to.copy_from_slice(&head[24..]);
    let len = match u16::from_be_bytes([head[4], head[5]]) {
        0 => bytes.len(),
        payload => usize::from(payload) + head.len(),
    };
    let mut packet = Packet {
        from: Ipv6Addr::from(from).into(),
        to: Ipv6Addr::from(to).into(),
        protocol: carried.protocol,
        between: bytes.get(head.len()..carried.at)?,
        body: bytes.get(carried.at..)?,
        padding: bytes.len().saturating_sub(len),
        later: carried.later,
        more: carried.more,
        identity: 0,
        routes: false,
        hops: head[7],
    };
    // Once more over the extension headers, for what the walk does not say.
    let (mut protocol, mut at) = (head[6], head.len());
    while at < carried.at {
        let rest = bytes.get(at..)?;
        packet.routes |= protocol == ROUTING;
        (protocol, at) = match headers::extension(protocol, rest) {
            headers::Extension::Header { next, len } => (next, at + len),
            headers::Extension::Fragment { next, .. } => {
                let identity = rest.get(4..8)?;
                packet.identity = identity
                    .iter()
                    .fold(0, |sum, &byte| sum << 8 | u32::from(byte));
                (next, at + headers::FRAGMENT_BYTES)
            }
            headers::Extension::Not | headers::Extension::Cut => break,
        };
    }
    Some(packet)
}

/// Whether the options of an IPv4 header have a source route (RFC 791, 3.1), or are none.
fn has_route(mut options: &[u8]) -> bool {
    loop {
        options = match options {
            [] | [END, ..] => return false,
            [NO_OPERATION, rest @ ..] => rest,
            [LOOSE_ROUTE | STRICT_ROUTE, ..] => return true,
            [_, len, ..] if *len >= 2 => match options.get(usize::from(*len)..) {
                Some(rest) => rest,
                None => return true,
            },
            _ => return true,
        }
    }
}

const ARP: u16 = 0x0806;
/// What a frame of 60 bytes, the least of Ethernet, has behind its 14 and the message.
const ARP_FILLING: usize = 18;
/// IPv6's routing header.
const ROUTING: u8 = 43;
const END: u8 = 0;
const NO_OPERATION: u8 = 1;
const LOOSE_ROUTE: u8 = 131;
const STRICT_ROUTE: u8 = 137;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_in_the_header_is_seen_and_odd_options_count_as_one() {
        for (options, routes) in [
            (&[][..], false),
            (&[1, 1, 1, 0], false),
            (&[148, 4, 0, 0], false),
            (&[1, 131, 7, 4, 10, 0, 0, 1], true),
            (&[148, 4, 0, 0, 137, 3, 4, 0], true),
            (&[7, 0, 0, 0], true),
            (&[7, 9, 0, 0], true),
            (&[7], true),
        ] {
            assert_eq!(has_route(options), routes, "{options:?}");
        }
    }

    #[test]
    fn any_cut_and_any_bytes_are_looked_at_safely() {
        let mut frame = vec![0; 14];
        frame[12..].copy_from_slice(&IPV6.to_be_bytes());
        frame.extend([0x60, 0, 0, 0, 0, 32, ROUTING, 64]);
        frame.extend([1; 32]);
        frame.extend([44, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend([17, 0, 0, 1, 1, 2, 3, 4, 0, 53, 0, 54, 0, 8, 0, 0]);
        let Seen::Ip(packet) = Seen::of(&frame) else {
            panic!("an IP packet");
        };
        assert!(packet.routes && packet.more && !packet.later);
        assert_eq!((packet.identity, packet.protocol), (0x0102_0304, 17));
        assert_eq!(packet.ports(), Some((53, 54)));
        for len in 0..frame.len() {
            Seen::of(&frame[..len]);
        }
        for kind in [[8, 0], [8, 6], [0x86, 0xdd], [0x81, 0]] {
            for byte in 0..=255 {
                let mut bytes = vec![byte; 80];
                bytes[12..14].copy_from_slice(&kind);
                Seen::of(&bytes);
            }
        }
    }
}

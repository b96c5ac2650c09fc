//! What a tunnel carries: one step, from a packet to the one within it.
//!
//! | tunnel | known by | carries |
//! |---|---|---|
//! | IP in IP | protocol 4, 41 (RFC 2003, 4213) | a packet |
//! | GRE | protocol 47, version 0, without a source route (RFC 2784, 2890) | a packet, a frame, or ERSPAN I, II or III |
//! | VXLAN | UDP to 4789, with a number (RFC 7348) | a frame |
//! | Geneve | UDP to 6081, version 0 (RFC 8926) | a packet or a frame |
//! | GTP-U | UDP to 2152, version 1, a G-PDU (3GPP TS 29.281) | a packet |
//!
//! Nothing is believed and nothing fails, as in [`headers`](crate::headers): what does not look like one of them
//! carries nothing. A fragment is none of them: only the first one has the tunnel's header.

use crate::headers::{IPV4, IPV6};

/// What is within a tunnel: the end of what was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inner<'a> {
    /// An Ethernet frame.
    Frame(&'a [u8]),
    /// A packet of this Ethertype, IPv4 or IPv6.
    Packet(u16, &'a [u8]),
}

/// True for UDP to this port where a tunnel may be.
#[inline(always)]
#[must_use]
pub fn is_udp_port(target: u16) -> bool {
    matches!(target, VXLAN | GENEVE | GTP)
}

/// What is carried by `rest`, which follows an IP header that says `protocol`.
#[must_use]
pub fn inside(protocol: u8, rest: &[u8]) -> Option<Inner<'_>> {
    match protocol {
        4 => Some(Inner::Packet(IPV4, rest)),
        41 => Some(Inner::Packet(IPV6, rest)),
        47 => gre(rest),
        17 => {
            let (head, rest) = rest.split_first_chunk::<8>()?;
            match u16::from_be_bytes([head[2], head[3]]) {
                VXLAN => vxlan(rest),
                GENEVE => geneve(rest),
                GTP => gtp(rest),
                _ => None,
            }
        }
        _ => None,
    }
}

/// What VXLAN carries whose header begins `rest`, behind that of UDP.
#[must_use]
pub fn vxlan(rest: &[u8]) -> Option<Inner<'_>> {
    let (head, frame) = rest.split_first_chunk::<8>()?;
    // Reserved bits, but for those of group policies, are 0: other UDP may go to this port, too.
    let is_vxlan = head[0] & 0x77 == 0 && head[0] & VXLAN_HAS_ID != 0 && head[7] == 0;
    is_vxlan.then_some(Inner::Frame(frame))
}

/// The same of Geneve.
#[must_use]
pub fn geneve(rest: &[u8]) -> Option<Inner<'_>> {
    let (head, rest) = rest.split_first_chunk::<8>()?;
    let (version, options) = (head[0] >> 6, usize::from(head[0] & 0x3f) * 4);
    (version == 0).then_some(())?;
    of_type(u16::from_be_bytes([head[2], head[3]]), rest.get(options..)?)
}

/// The same of GTP-U.
#[must_use]
pub fn gtp(rest: &[u8]) -> Option<Inner<'_>> {
    let (head, mut rest) = rest.split_first_chunk::<8>()?;
    let is_pdu = head[0] >> 4 == GTP_VERSION && head[1] == GTP_G_PDU;
    is_pdu.then_some(())?;
    if head[0] & 0x7 != 0 {
        let (more, after) = rest.split_first_chunk::<4>()?;
        rest = after;
        let mut next = match head[0] & GTP_EXTENSION {
            0 => 0,
            _ => more[3],
        };
        for _ in 0..MAX_GTP_EXTENSIONS {
            if next == 0 {
                break;
            }
            let len = usize::from(*rest.first()?) * 4;
            next = *rest.get(..len)?.last()?;
            rest = &rest[len..];
        }
        (next == 0).then_some(())?;
    }
    match rest.first()? >> 4 {
        4 => Some(Inner::Packet(IPV4, rest)),
        6 => Some(Inner::Packet(IPV6, rest)),
        _ => None,
    }
}

/// What GRE carries whose header begins `rest`.
#[must_use]
pub fn gre(rest: &[u8]) -> Option<Inner<'_>> {
    let head: &[u8; 4] = rest.first_chunk()?;
    let flags = u16::from_be_bytes([head[0], head[1]]);
    // Version 1 is PPTP, which carries PPP. A source route has a length of its own, and RFC 2784 forbids it.
    (flags & (GRE_VERSION | GRE_ROUTING) == 0).then_some(())?;
    let words = (flags & (GRE_CHECKSUM | GRE_KEY | GRE_SEQUENCE)).count_ones() as usize;
    let rest = rest.get(4 + 4 * words..)?;
    match u16::from_be_bytes([head[2], head[3]]) {
        // Type I has no header of its own, and no number.
        ERSPAN if flags & GRE_SEQUENCE == 0 => Some(Inner::Frame(rest)),
        ERSPAN => rest.get(8..).map(Inner::Frame),
        ERSPAN_III => {
            let (head, rest) = rest.split_first_chunk::<12>()?;
            let is_frame = head[10] >> 2 & 0x1f == 0;
            let more = usize::from(head[11] & 1) * 8;
            is_frame.then_some(())?;
            rest.get(more..).map(Inner::Frame)
        }
        ethertype => of_type(ethertype, rest),
    }
}

fn of_type(ethertype: u16, rest: &[u8]) -> Option<Inner<'_>> {
    match ethertype {
        IPV4 | IPV6 => Some(Inner::Packet(ethertype, rest)),
        ETHERNET => Some(Inner::Frame(rest)),
        _ => None,
    }
}

/// The ports of UDP that tunnels are sent to.
pub const VXLAN: u16 = 4789;
/// That of Geneve.
pub const GENEVE: u16 = 6081;
/// That of GTP-U.
pub const GTP: u16 = 2152;
const VXLAN_HAS_ID: u8 = 0x08;
/// Version 1, protocol type GTP.
const GTP_VERSION: u8 = 0x3;
const GTP_G_PDU: u8 = 255;
const GTP_EXTENSION: u8 = 0x4;
/// More of them are no honest packet.
const MAX_GTP_EXTENSIONS: usize = 8;
const GRE_CHECKSUM: u16 = 0x8000;
const GRE_ROUTING: u16 = 0x4000;
const GRE_KEY: u16 = 0x2000;
const GRE_SEQUENCE: u16 = 0x1000;
const GRE_VERSION: u16 = 0x7;
/// Transparent Ethernet bridging.
const ETHERNET: u16 = 0x6558;
/// ERSPAN I and II (draft-foschiano-erspan-03, 4.1, 4.2).
const ERSPAN: u16 = 0x88be;
/// ERSPAN III (4.3 of the same).
const ERSPAN_III: u16 = 0x22eb;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The header of UDP to this port and what follows.
    fn udp(target: u16, rest: &[u8]) -> (u8, Vec<u8>) {
        let mut bytes = vec![0xc0, 1];
        bytes.extend(target.to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend(rest);
        (17, bytes)
    }

    /// Every way to carry this frame: its protocol, the tunnel's header and the frame.
    pub(crate) fn around_frame(frame: &[u8]) -> Vec<(&'static str, u8, Vec<u8>)> {
        let with = |head: &[u8]| [head, frame].concat();
        let vxlan = udp(VXLAN, &with(&[8, 0, 0, 0, 0, 0, 7, 0]));
        let geneve = udp(
            GENEVE,
            &with(&[2, 0, 0x65, 0x58, 0, 0, 7, 0, 1, 2, 3, 1, 9, 9, 9, 9]),
        );
        let mut third = vec![0x10, 0, 0x22, 0xeb, 0, 0, 0, 1];
        third.extend([0x20, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 1]);
        third.extend([7; 8]);
        let mut second = vec![0x10, 0, 0x88, 0xbe, 0, 0, 0, 1];
        second.extend([0x10, 0, 0, 5, 0, 0, 0, 0]);
        let gre = [0xb0, 0, 0x65, 0x58, 1, 1, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1];
        vec![
            ("vxlan", vxlan.0, vxlan.1),
            ("geneve", geneve.0, geneve.1),
            ("gre", 47, with(&gre)),
            ("erspan I", 47, with(&[0, 0, 0x88, 0xbe])),
            ("erspan II", 47, with(&second)),
            ("erspan III", 47, with(&third)),
        ]
    }

    /// Every way to carry this IPv4 packet.
    pub(crate) fn around_packet(packet: &[u8]) -> Vec<(&'static str, u8, Vec<u8>)> {
        let with = |head: &[u8]| [head, packet].concat();
        let plain = udp(GTP, &with(&[0x30, 255, 0, 0, 0, 0, 0, 7]));
        let extended = udp(
            GTP,
            &with(&[
                0x34, 255, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0x85, 1, 0, 9, 0x85, 1, 0, 9, 0,
            ]),
        );
        let geneve = udp(GENEVE, &with(&[0, 0, 8, 0, 0, 0, 7, 0]));
        vec![
            ("ip in ip", 4, packet.to_vec()),
            ("gre", 47, with(&[0, 0, 8, 0])),
            ("geneve", geneve.0, geneve.1),
            ("gtp-u", plain.0, plain.1),
            ("gtp-u with extensions", extended.0, extended.1),
        ]
    }

    #[test]
    fn what_is_within_is_found() {
        let frame = [0xab; 60];
        for (name, protocol, bytes) in around_frame(&frame) {
            assert_eq!(
                inside(protocol, &bytes),
                Some(Inner::Frame(&frame)),
                "{name}"
            );
        }
        let mut packet = [0xab; 60];
        packet[0] = 0x45;
        for (name, protocol, bytes) in around_packet(&packet) {
            let found = inside(protocol, &bytes);
            assert_eq!(found, Some(Inner::Packet(IPV4, &packet)), "{name}");
        }
        assert_eq!(inside(41, &packet), Some(Inner::Packet(IPV6, &packet)));
    }

    #[test]
    fn what_only_looks_like_a_tunnel_carries_nothing() {
        let none = |(protocol, bytes): (u8, Vec<u8>)| assert_eq!(inside(protocol, &bytes), None);
        // No number, another version, an odd type, signalling, another port, another protocol.
        none(udp(VXLAN, &[0; 60]));
        none(udp(VXLAN, &[0x0c; 60]));
        none(udp(
            VXLAN,
            &[&[8, 0, 0, 0, 0, 0, 1, 1], &[0; 60][..]].concat(),
        ));
        none(udp(GENEVE, &[0x40, 0, 0x65, 0x58, 0, 0, 0, 0, 1]));
        none(udp(GENEVE, &[0, 0, 8, 6, 0, 0, 0, 0, 1]));
        none(udp(GTP, &[0x30, 1, 0, 0, 0, 0, 0, 0, 0x45]));
        none(udp(GTP, &[0x30, 255, 0, 0, 0, 0, 0, 0, 0x15]));
        none(udp(53, &[8; 60]));
        none((6, vec![8; 60]));
        // PPTP, a source route, PPP.
        none((47, vec![0, 1, 8, 0, 0x45]));
        none((47, vec![0x40, 0, 8, 0, 0x45, 0, 0, 0, 0]));
        none((47, vec![0, 0, 0x88, 0x0b, 0x45]));
        // An extension without a length, and more of them than anybody sends.
        let head = [0x34, 255, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0x85];
        none(udp(GTP, &[&head[..], &[0; 8]].concat()));
        let many: Vec<u8> = [1, 0, 0, 0x85].repeat(MAX_GTP_EXTENSIONS + 1);
        none(udp(GTP, &[&head[..], &many, &[0x45; 20]].concat()));
    }

    #[test]
    fn any_cut_is_looked_at_safely() {
        let (frame, mut packet) = ([1; 20], [1; 20]);
        packet[0] = 0x45;
        let all = around_frame(&frame).into_iter();
        for (_, protocol, bytes) in all.chain(around_packet(&packet)) {
            for cut in 0..bytes.len() {
                if let Some(Inner::Frame(it) | Inner::Packet(_, it)) =
                    inside(protocol, &bytes[..cut])
                {
                    assert!(it.len() < 20);
                }
            }
        }
    }
}

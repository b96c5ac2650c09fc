//! The symmetric flow hash: both directions of a flow, and all fragments of a datagram, get one
//! number.
//!
//! It covers addresses, protocol and (TCP, UDP, SCTP, UDP-Lite) ports of the first IP header after
//! its VLAN tags ([`headers`](crate::headers)); a fragment counts only by its addresses, so that all
//! fragments get one hash. Anything else counts by its MAC addresses and Ethertype. Of a
//! [`tunnel`] what is within it counts, and nothing of what is around it, through up to
//! [`MAX_TUNNELS`] of them: so mirrored traffic is shared by its own flows. A tunnel whose inner headers are not there,
//! and a fragment of one, counts as any other packet. It is not keyed: a sender can make flows collide
//! and so load one member of a cluster; the others lose nothing.

use crate::headers::{
    AUTHENTICATION, FRAGMENT, IPV4, IPV6, Link, MAX_EXTENSIONS, counts_in_eights,
};
use crate::tunnel::{self, Inner};

/// Tunnels in tunnels that are looked into: a mirror's (ERSPAN) of a network's (VXLAN) of a mobile user's (GTP-U).
pub const MAX_TUNNELS: usize = 3;

/// The hash of one Ethernet frame; 0 only by chance.
#[inline]
pub fn flow_hash(frame: &[u8]) -> u32 {
    // NB: most frames are plain; this path halves their cost.
    let hash = frame.first_chunk().and_then(plain);
    finish(hash.unwrap_or_else(|| any(frame)))
}

/// What [`any`] says of TCP and UDP over IPv4 without tags, options and fragments, and that is no tunnel.
#[inline]
fn plain(head: &[u8; 38]) -> Option<u64> {
    let pair = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let word = |at: usize| u64::from(pair(at)) << 16 | u64::from(pair(at + 2));
    let protocol = head[23];
    let is_plain = pair(12) == IPV4
        && head[14] & 0xf == 5
        && pair(20) & 0x3fff == 0
        && (protocol == 6 || protocol == 17 && !tunnel::is_udp_port(pair(36)));
    let ports = Some((pair(34), pair(36)));
    is_plain.then(|| combine(word(26), word(30), protocol, ports))
}

fn any(frame: &[u8]) -> u64 {
    ethernet(frame, MAX_TUNNELS)
}

/// Looks through this number of `tunnels`.
#[inline]
fn ethernet(frame: &[u8], tunnels: usize) -> u64 {
    let link = Link::of(frame, 12);
    let ethertype = link.ethertype.unwrap_or(0);
    network(ethertype, link.network(frame), tunnels).unwrap_or_else(|| other(frame, ethertype))
}

#[inline]
fn network(ethertype: u16, packet: &[u8], tunnels: usize) -> Option<u64> {
    match ethertype {
        IPV4 => ipv4(packet, tunnels),
        IPV6 => ipv6(packet, tunnels),
        _ => None,
    }
}

/// What is within a tunnel, if that is one: `transport` follows an IP header with this protocol.
#[inline]
fn tunnelled(protocol: u8, transport: &[u8], tunnels: usize) -> Option<u64> {
    match protocol {
        4 | 17 | 41 | 47 if tunnels > 0 => within(protocol, transport, tunnels - 1),
        _ => None,
    }
}

// NB: out of the way of frames without a tunnel.
#[inline(never)]
fn within(protocol: u8, transport: &[u8], tunnels: usize) -> Option<u64> {
    match tunnel::inside(protocol, transport)? {
        Inner::Packet(ethertype, packet) => network(ethertype, packet, tunnels),
        Inner::Frame(frame) => inner_frame(frame, tunnels),
    }
}

/// Of a frame that is what it looks like: other UDP to the port of a tunnel must not count packet by packet.
fn inner_frame(frame: &[u8], tunnels: usize) -> Option<u64> {
    let link = Link::of(frame, 12);
    match link.ethertype? {
        ARP => Some(other(frame, ARP)),
        ethertype => network(ethertype, link.network(frame), tunnels),
    }
}

#[inline]
fn ipv4(packet: &[u8], tunnels: usize) -> Option<u64> {
    let head: &[u8; 20] = packet.first_chunk()?;
    let source = u64::from(u32::from_be_bytes([head[12], head[13], head[14], head[15]]));
    let target = u64::from(u32::from_be_bytes([head[16], head[17], head[18], head[19]]));
    let fragment = u16::from_be_bytes([head[6], head[7]]) & 0x3fff != 0;
    let protocol = head[9];
    let transport = packet
        .get(usize::from(head[0] & 0xf) * 4..)
        .unwrap_or_default();
    if fragment {
        return Some(combine(source, target, protocol, None));
    }
    let hash = tunnelled(protocol, transport, tunnels);
    Some(hash.unwrap_or_else(|| combine(source, target, protocol, ports(protocol, transport))))
}

#[inline]
fn ipv6(packet: &[u8], tunnels: usize) -> Option<u64> {
    let head: &[u8; 40] = packet.first_chunk()?;
    let word = |at: usize| {
        u64::from_be_bytes([
            head[at],
            head[at + 1],
            head[at + 2],
            head[at + 3],
            head[at + 4],
            head[at + 5],
            head[at + 6],
            head[at + 7],
        ])
    };
    let source = mix(word(8)) ^ word(16);
    let target = mix(word(24)) ^ word(32);
    let mut protocol = head[6];
    let mut rest = &packet[40..];
    for _ in 0..MAX_EXTENSIONS {
        let len = match protocol {
            _ if counts_in_eights(protocol) => (usize::from(*rest.get(1)?) + 1) * 8,
            // By addresses alone, as in IPv4.
            FRAGMENT => return Some(combine(source, target, FRAGMENT, None)),
            AUTHENTICATION => (usize::from(*rest.get(1)?) + 2) * 4,
            _ => break,
        };
        protocol = rest[0];
        rest = rest.get(len..).unwrap_or_default();
    }
    let hash = tunnelled(protocol, rest, tunnels);
    Some(hash.unwrap_or_else(|| combine(source, target, protocol, ports(protocol, rest))))
}

#[inline]
fn ports(protocol: u8, transport: &[u8]) -> Option<(u16, u16)> {
    match protocol {
        6 | 17 | 132 | 136 => {
            let head: &[u8; 4] = transport.first_chunk()?;
            Some((
                u16::from_be_bytes([head[0], head[1]]),
                u16::from_be_bytes([head[2], head[3]]),
            ))
        }
        _ => None,
    }
}

#[inline]
fn combine(source: u64, target: u64, protocol: u8, ports: Option<(u16, u16)>) -> u64 {
    let (a, b) = ports.map_or((0, 0), |(a, b)| (u64::from(a), u64::from(b)));
    // A sum does not depend on which end is the source.
    let ends = mix(source ^ a << 40).wrapping_add(mix(target ^ b << 40));
    ends ^ mix(u64::from(protocol) + 1)
}

#[inline]
fn other(frame: &[u8], ethertype: u16) -> u64 {
    let mac = |at: usize| {
        frame.get(at..at + 6).map_or(0, |mac| {
            u64::from_be_bytes([0, 0, mac[0], mac[1], mac[2], mac[3], mac[4], mac[5]])
        })
    };
    mix(mac(0)).wrapping_add(mix(mac(6))) ^ u64::from(ethertype)
}

#[inline]
fn mix(word: u64) -> u64 {
    let word = (word ^ word >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^ word >> 29
}

#[inline]
fn finish(word: u64) -> u32 {
    (mix(word) >> 32) as u32
}

const ARP: u16 = 0x806;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tunnel::tests::{around_frame, around_packet};

    fn udp(source: [u8; 4], target: [u8; 4], ports: (u16, u16), fragment: u16) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x08, 0x00, 0x45, 0, 0, 28, 0, 1]);
        frame.extend(fragment.to_be_bytes());
        frame.extend([64, 17, 0, 0]);
        frame.extend(source);
        frame.extend(target);
        frame.extend(ports.0.to_be_bytes());
        frame.extend(ports.1.to_be_bytes());
        frame.extend([0; 4]);
        frame
    }

    const A: [u8; 4] = [10, 0, 0, 1];
    const B: [u8; 4] = [10, 0, 0, 2];

    #[test]
    fn both_directions_of_a_flow_hash_alike_and_flows_differ() {
        let there = flow_hash(&udp(A, B, (1000, 53), 0));
        assert_eq!(there, flow_hash(&udp(B, A, (53, 1000), 0)));
        assert_ne!(there, flow_hash(&udp(A, B, (1001, 53), 0)));
        assert_ne!(there, flow_hash(&udp(A, B, (53, 1000), 0)));
    }

    #[test]
    fn a_vlan_tag_does_not_change_the_flow() {
        let plain = udp(A, B, (1, 2), 0);
        let mut tagged = plain[..12].to_vec();
        tagged.extend([0x81, 0, 0, 5]);
        tagged.extend(&plain[12..]);
        assert_eq!(flow_hash(&plain), flow_hash(&tagged));
    }

    #[test]
    fn all_fragments_of_a_datagram_hash_alike() {
        let first = flow_hash(&udp(A, B, (1, 2), 0x2000));
        assert_eq!(first, flow_hash(&udp(A, B, (7, 8), 0x0010)));
    }

    #[test]
    fn a_thousand_flows_spread_evenly_over_two_and_seven() {
        for members in [2_u64, 7] {
            let mut counts = vec![0_u32; members as usize];
            for port in 0..7_000_u16 {
                let hash = flow_hash(&udp(A, B, (port, 80), 0));
                counts[((u64::from(hash) * members) >> 32) as usize] += 1;
            }
            let fair = 7_000 / members as u32;
            assert!(
                counts
                    .iter()
                    .all(|&n| n > fair * 8 / 10 && n < fair * 12 / 10),
                "{counts:?}"
            );
        }
    }

    #[test]
    fn every_cut_of_every_kind_of_frame_is_hashed_without_panic() {
        let mut six = vec![0; 12];
        six.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 40, 0, 64]);
        six.extend([1; 32]);
        six.extend([43, 0, 0, 0, 0, 0, 0, 0, 17, 1]);
        six.extend([9; 30]);
        for frame in [udp(A, B, (1, 2), 0), six] {
            for cut in 0..=frame.len() {
                flow_hash(&frame[..cut]);
            }
        }
    }

    /// An IPv4 packet of this protocol in a frame.
    fn outer(protocol: u8, rest: &[u8], fragment: u16) -> Vec<u8> {
        let mut frame = udp([192, 0, 2, 1], [192, 0, 2, 2], (0, 0), fragment);
        frame.truncate(34);
        frame[23] = protocol;
        frame.extend(rest);
        frame
    }

    /// The same over IPv6, with a header of options.
    fn outer_six(protocol: u8, rest: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 12];
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, 60, 64]);
        frame.extend([9; 32]);
        frame.extend([protocol, 0, 0, 0, 0, 0, 0, 0]);
        frame.extend(rest);
        frame
    }

    fn tunnels(frame: &[u8]) -> Vec<(&'static str, u8, Vec<u8>)> {
        let all = around_frame(frame).into_iter();
        all.chain(around_packet(&frame[14..])).collect()
    }

    #[test]
    fn what_is_in_a_tunnel_counts_and_nothing_around_it() {
        let (there, back) = (udp(A, B, (1000, 53), 0), udp(B, A, (53, 1000), 0));
        let own = flow_hash(&there);
        for frame in [&there, &back] {
            for (name, protocol, bytes) in tunnels(frame) {
                assert_eq!(flow_hash(&outer(protocol, &bytes, 0)), own, "{name}");
                assert_eq!(flow_hash(&outer_six(protocol, &bytes)), own, "{name}");
                // The tunnel's own source port is another one.
                let mut other = bytes.clone();
                if protocol == 17 {
                    other[0] ^= 0xff;
                    assert_eq!(flow_hash(&outer(protocol, &other, 0)), own, "{name}");
                }
            }
        }
        for (name, protocol, bytes) in tunnels(&udp(A, B, (1001, 53), 0)) {
            assert_ne!(flow_hash(&outer(protocol, &bytes, 0)), own, "{name}");
        }
        // What is no IP within counts by its own addresses.
        let arp = [&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 6][..], &[0; 28]].concat();
        for (name, protocol, bytes) in around_frame(&arp) {
            let hash = flow_hash(&outer(protocol, &bytes, 0));
            assert_eq!(hash, flow_hash(&arp), "{name}");
        }
    }

    #[test]
    fn a_tunnel_of_which_the_inside_is_not_there_counts_by_its_outside() {
        let frame = udp(A, B, (1000, 53), 0);
        for (name, protocol, bytes) in around_frame(&frame) {
            let whole = outer(protocol, &bytes, 0);
            // Cut within the inner MAC addresses.
            let cut = &whole[..whole.len() - frame.len() + 13];
            let outside = outer(protocol, &bytes[..8], 0);
            let expected = match protocol {
                17 => flow_hash(&outside),
                _ => flow_hash(&outer(protocol, &[], 0)),
            };
            assert_eq!(flow_hash(cut), expected, "{name}");
            // All fragments of one go one way.
            let first = flow_hash(&outer(protocol, &bytes, 0x2000));
            let last = flow_hash(&outer(protocol, &[7; 30], 0x0100));
            assert_eq!(first, last, "{name}");
            assert_ne!(first, flow_hash(&whole), "{name}");
        }
    }

    #[test]
    fn a_flow_from_the_port_of_a_tunnel_keeps_to_one_hash() {
        // Answers to a resolver that happened to ask from there, whose numbers are any.
        let outside = flow_hash(&udp(A, B, (53, 4789), 0));
        for number in 0..=u16::MAX {
            let mut answer = udp(A, B, (53, 4789), 0);
            answer.extend([0; 4]);
            answer.extend(number.to_be_bytes());
            answer.extend([0x81, 0x80, 0, 1, 0, 2, 0, 0, 0, 0, 7]);
            answer.extend(*b"examplehand\x03com\x00\x00\x01\x00\x01");
            assert_eq!(flow_hash(&answer), outside, "{number:#x}");
        }
    }

    #[test]
    fn so_many_tunnels_are_looked_through_and_no_more() {
        let inner = udp(A, B, (1000, 53), 0);
        let own = flow_hash(&inner);
        let mut frame = inner;
        for depth in 1..=MAX_TUNNELS + 2 {
            let (_, protocol, bytes) = around_frame(&frame).swap_remove(0);
            frame = outer(protocol, &bytes, 0);
            assert_eq!(flow_hash(&frame) == own, depth <= MAX_TUNNELS, "{depth}");
        }
    }

    #[test]
    fn every_cut_and_every_changed_byte_of_a_tunnel_is_hashed_without_panic() {
        for (_, protocol, bytes) in tunnels(&udp(A, B, (1000, 53), 0)) {
            let frame = outer(protocol, &bytes, 0);
            for at in 0..frame.len() {
                for byte in 0..=255 {
                    let mut frame = frame.clone();
                    frame[at] = byte;
                    assert_eq!(flow_hash(&frame), finish(any(&frame)));
                    flow_hash(&frame[..at]);
                }
            }
        }
    }

    #[test]
    fn plain_frames_hash_as_all_others_do() {
        let frame = udp(A, B, (1000, 53), 0);
        assert!(plain(frame.first_chunk().unwrap()).is_some());
        // Every header with one byte changed: another type, options, fragments, protocols.
        for at in 0..frame.len() {
            for byte in 0..=255 {
                let mut frame = frame.clone();
                frame[at] = byte;
                for cut in [33, 34, 37, 38, frame.len()] {
                    let frame = &frame[..cut];
                    assert_eq!(flow_hash(frame), finish(any(frame)), "{frame:x?}");
                }
            }
        }
    }
}

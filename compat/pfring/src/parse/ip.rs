//! IPv4 with options, IPv6 with extension headers.

use vnplug_frame::headers::{self, IPV4, IPV6};

use super::bytes::{array, u32_at};
use crate::abi::packet::{IP_FRAG_OFFSET, IP_MORE_FRAG, IpAddr};

/// An IP header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Network {
    pub(super) source: IpAddr,
    pub(super) target: IpAddr,
    /// Of the transport header; 0 = there is none.
    pub(super) proto: u8,
    pub(super) tos: u8,
    /// Where the transport header starts.
    pub(super) payload: usize,
    /// Not the first fragment: what follows is no transport header.
    pub(super) later_fragment: bool,
    /// `PKT_FLAGS_IP_*`.
    pub(super) flags: u32,
}

/// The header of that version at `at`.
pub(super) fn network(packet: &[u8], at: usize, version: u8) -> Option<Network> {
    match version {
        4 => v4(packet, at),
        6 => v6(packet, at),
        _ => None,
    }
}

fn v4(packet: &[u8], at: usize) -> Option<Network> {
    let head: [u8; 20] = array(packet, at)?;
    let carried = headers::ip(IPV4, packet.get(at..)?)?;
    if head[0] >> 4 != 4 || carried.at < head.len() {
        return None;
    }
    Some(Network {
        source: IpAddr::v4(u32_at(packet, at + 12)?),
        target: IpAddr::v4(u32_at(packet, at + 16)?),
        proto: carried.protocol,
        tos: head[1],
        payload: at + carried.at,
        later_fragment: carried.later,
        flags: fragment_flags(carried.more, carried.later),
    })
}

fn v6(packet: &[u8], at: usize) -> Option<Network> {
    let head: [u8; 40] = array(packet, at)?;
    if head[0] >> 4 != 6 {
        return None;
    }
    let carried = headers::ip(IPV6, packet.get(at..)?)?;
    Some(Network {
        source: IpAddr::v6(array(packet, at + 8)?),
        target: IpAddr::v6(array(packet, at + 24)?),
        proto: match carried.protocol {
            NO_NEXT => 0,
            protocol => protocol,
        },
        tos: (head[0] << 4) | (head[1] >> 4),
        payload: at + carried.at,
        // A chain that is cut off has no transport header.
        later_fragment: carried.later || carried.unknown,
        flags: fragment_flags(carried.more, carried.later),
    })
}

fn fragment_flags(more: bool, later: bool) -> u32 {
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    flag(more, IP_MORE_FRAG) | flag(later, IP_FRAG_OFFSET)
}

/// IPv6-NoNxt (RFC 8200, 4.7).
const NO_NEXT: u8 = 59;

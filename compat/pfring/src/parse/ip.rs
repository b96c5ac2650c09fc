//! IPv4 with options, IPv6 with extension headers.

use super::bytes::{array, u8_at, u16_at, u32_at};
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
    let len = usize::from(head[0] & 0xf) * 4;
    if head[0] >> 4 != 4 || len < head.len() {
        return None;
    }
    let fragment = u16::from_be_bytes([head[6], head[7]]);
    Some(Network {
        source: IpAddr::v4(u32_at(packet, at + 12)?),
        target: IpAddr::v4(u32_at(packet, at + 16)?),
        proto: head[9],
        tos: head[1],
        payload: at + len,
        later_fragment: fragment & 0x1fff != 0,
        flags: fragment_flags(fragment & 0x2000 != 0, fragment & 0x1fff != 0),
    })
}

fn v6(packet: &[u8], at: usize) -> Option<Network> {
    let head: [u8; 40] = array(packet, at)?;
    if head[0] >> 4 != 6 {
        return None;
    }
    let mut network = Network {
        source: IpAddr::v6(array(packet, at + 8)?),
        target: IpAddr::v6(array(packet, at + 24)?),
        proto: head[6],
        tos: (head[0] << 4) | (head[1] >> 4),
        payload: at + head.len(),
        later_fragment: false,
        flags: 0,
    };
    for _ in 0..MAX_EXTENSIONS {
        let units = usize::from(u8_at(packet, network.payload + 1).unwrap_or(0));
        let len = match network.proto {
            HOP_BY_HOP | ROUTING | DESTINATION => units * 8 + 8,
            FRAGMENT => 8,
            AUTHENTICATION => units * 4 + 8,
            NO_NEXT => {
                network.proto = 0;
                break;
            }
            _ => break,
        };
        // A chain that is cut off has no transport header.
        let Some(next) = u8_at(packet, network.payload) else {
            network.later_fragment = true;
            break;
        };
        if network.proto == FRAGMENT {
            let word = u16_at(packet, network.payload + 2)?;
            network.later_fragment = word & 0xfff8 != 0;
            network.flags = fragment_flags(word & 1 != 0, word & 0xfff8 != 0);
        }
        network.proto = next;
        network.payload += len;
        if network.later_fragment {
            break;
        }
    }
    Some(network)
}

fn fragment_flags(more: bool, later: bool) -> u32 {
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    flag(more, IP_MORE_FRAG) | flag(later, IP_FRAG_OFFSET)
}

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const NO_NEXT: u8 = 59;
const DESTINATION: u8 = 60;
/// More of them are no honest packet.
const MAX_EXTENSIONS: usize = 16;

//! Headers of a packet, as `struct pkt_parsing_info` has them.
//!
//! Total: any bytes give an answer, and a header that is cut off or makes no sense ends the parse at
//! the level before it. The offset of what comes next may lie after the captured bytes.
//!
//! | level | found                                                     |
//! |-------|-----------------------------------------------------------|
//! | 1     | nothing: less than an Ethernet header                     |
//! | 2     | Ethernet and VLAN tags (`vnplug_frame::headers`)          |
//! | 3     | IPv4 with options, or IPv6 with extension headers         |
//! | 4     | TCP, UDP, SCTP, ICMP, ICMPv6, GRE                         |
//! | 5     | IP inside GTP, GRE, VXLAN or Geneve                       |
//! | 6     | the transport header inside                               |
//!
//! Later fragments have no transport header: they end at level 3. ARP, MPLS and everything else that
//! is not IP ends at level 2.

mod bytes;
mod ip;
mod tunnel;

#[cfg(test)]
mod tests;

use crate::abi::packet::{NO_TUNNEL_ID, Parsed, Tcp};
use bytes::{array, u8_at, u16_at, u32_at};
use ip::Network;
use vnplug_frame::headers::{IPV4, IPV6, Link};

/// What was found in a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Headers {
    /// For the program.
    pub(crate) parsed: Parsed,
    /// How far it went; see the module's table.
    pub(crate) level: u8,
    /// `PKT_FLAGS_IP_MORE_FRAG`, `PKT_FLAGS_IP_FRAG_OFFSET`.
    pub(crate) flags: u32,
}

/// Parses the headers of `packet` up to `level`.
pub(crate) fn headers(packet: &[u8], level: u8) -> Headers {
    let mut found = Headers {
        parsed: Parsed::default(),
        level: 1,
        flags: 0,
    };
    found.parsed.tunnel.id = NO_TUNNEL_ID;
    // What is missing ends the parse; what was found before stays.
    let _ended_early = ethernet(packet, level, &mut found);
    found
}

/// A hash of the parsed flow that is the same in both directions: of the tunnel's inside, if there
/// is one.
pub(crate) fn symmetric_hash(parsed: &Parsed) -> u32 {
    let tunnel = parsed.tunnel;
    let inside = tunnel.id != NO_TUNNEL_ID && tunnel.ip_version != 0;
    let (source, target, proto, ports) = if inside {
        let ports = [tunnel.l4_src_port, tunnel.l4_dst_port];
        (tunnel.ip_src, tunnel.ip_dst, tunnel.proto, ports)
    } else {
        let ports = [parsed.l4_src_port, parsed.l4_dst_port];
        (parsed.ip_src, parsed.ip_dst, parsed.l3_proto, ports)
    };
    let addresses = [source.as_v6(), target.as_v6()];
    let words = addresses.iter().flat_map(|bytes| bytes.as_chunks::<4>().0);
    words
        .map(|word| u32::from_ne_bytes(*word))
        .chain(ports.map(u32::from))
        .chain([u32::from(proto), u32::from(parsed.vlan_id)])
        .fold(0, u32::wrapping_add)
}

fn ethernet(packet: &[u8], level: u8, found: &mut Headers) -> Option<()> {
    let parsed = &mut found.parsed;
    parsed.dmac = array(packet, 0)?;
    parsed.smac = array(packet, 6)?;
    let (link, eth_type) = link(packet, 12)?;
    parsed.vlan_id = link.vlan(packet, 0).unwrap_or(0);
    parsed.qinq_vlan_id = link.vlan(packet, 1).unwrap_or(0);
    let at = link.at + 2;
    if link.tags > 0 {
        parsed.offset.vlan = offset(at - 4);
    }
    parsed.eth_type = eth_type;
    parsed.offset.l3 = offset(at);
    found.level = 2;
    if level < 3 {
        return None;
    }
    parsed.ip_version = version(eth_type)?;
    let network = ip::network(packet, at, parsed.ip_version)?;
    parsed.l3_proto = network.proto;
    parsed.ip_tos = network.tos;
    (parsed.ip_src, parsed.ip_dst) = (network.source, network.target);
    parsed.offset.l4 = offset(network.payload);
    found.flags = network.flags;
    found.level = 3;
    if level < 4 || network.later_fragment {
        return None;
    }
    transport(packet, level, &network, found)
}

fn transport(packet: &[u8], level: u8, network: &Network, found: &mut Headers) -> Option<()> {
    let at = network.payload;
    let parsed = &mut found.parsed;
    parsed.offset.payload = offset(at);
    match network.proto {
        TCP => {
            let doff = usize::from(u8_at(packet, at + 12)? >> 4) * 4;
            (parsed.l4_src_port, parsed.l4_dst_port) = ports(packet, at)?;
            parsed.tcp = Tcp {
                flags: u8_at(packet, at + 13)? & 0x3f,
                seq_num: u32_at(packet, at + 4)?,
                ack_num: u32_at(packet, at + 8)?,
            };
            parsed.offset.payload = offset(at + doff);
        }
        UDP => {
            array::<8>(packet, at)?;
            (parsed.l4_src_port, parsed.l4_dst_port) = ports(packet, at)?;
            parsed.offset.payload = offset(at + UDP_HEADER);
        }
        SCTP => (parsed.l4_src_port, parsed.l4_dst_port) = ports(packet, at)?,
        ICMP | ICMPV6 => {
            parsed.icmp_type = u8_at(packet, at)?;
            parsed.icmp_code = u8_at(packet, at + 1)?;
        }
        GRE => {}
        _ => return None,
    }
    found.level = 4;
    match network.proto {
        UDP => tunnel::in_udp(packet, at + UDP_HEADER, level, found),
        GRE => tunnel::in_gre(packet, at, level, found),
        _ => None,
    }
}

/// The tags of a frame whose first Ethertype is at `at`, and the Ethertype after them; a tag that is
/// cut is none, but an Ethertype.
fn link(packet: &[u8], at: usize) -> Option<(Link, u16)> {
    let mut link = Link::of(packet, at);
    if link.ethertype.is_none() && link.tags > 0 {
        link.tags -= 1;
        link.at -= 4;
    }
    Some((link, u16_at(packet, link.at)?))
}

/// The IP version that an Ethertype stands for.
fn version(eth_type: u16) -> Option<u8> {
    match eth_type {
        IPV4 => Some(4),
        IPV6 => Some(6),
        _ => None,
    }
}

/// Source and destination port.
fn ports(packet: &[u8], at: usize) -> Option<(u16, u16)> {
    Some((u16_at(packet, at)?, u16_at(packet, at + 2)?))
}

/// As the C structure has it; 0 where a jumbo offset does not fit, which no header reaches.
fn offset(at: usize) -> i16 {
    i16::try_from(at).unwrap_or(0)
}

/// Protocol numbers of IANA.
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const GRE: u8 = 47;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

const UDP_HEADER: usize = 8;

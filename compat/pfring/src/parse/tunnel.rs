//! What is inside GTP (3GPP TS 29.281, 29.060), GRE (RFC 2784, 2890) and VXLAN (RFC 7348).

use super::bytes::{array, u8_at, u16_at, u32_at};
use super::{Headers, SCTP, TCP, UDP, ip, link, offset, ports, version};

/// A tunnel whose header starts at `at`, after a UDP header.
pub(super) fn in_udp(packet: &[u8], at: usize, level: u8, found: &mut Headers) -> Option<()> {
    let (source, target) = (found.parsed.l4_src_port, found.parsed.l4_dst_port);
    let either = |port| source == port || target == port;
    if level < 5 {
        None
    } else if either(GTP_USER) || either(GTP_SIGNALING) {
        gtp(packet, at, either(GTP_USER), found)
    } else if target == VXLAN {
        vxlan(packet, at, found)
    } else {
        None
    }
}

/// GRE at `at`; its payload's offset and key are found at level 4 already.
pub(super) fn in_gre(packet: &[u8], at: usize, level: u8, found: &mut Headers) -> Option<()> {
    let flags = u16_at(packet, at)?;
    let proto = u16_at(packet, at + 2)?;
    // Version 1 is PPTP, which carries PPP.
    if flags & GRE_VERSION != 0 {
        return None;
    }
    let mut payload = at + 4;
    if flags & (GRE_CHECKSUM | GRE_ROUTING) != 0 {
        payload += 4;
    }
    if flags & GRE_KEY != 0 {
        found.parsed.tunnel.id = u32_at(packet, payload)?;
        payload += 4;
    }
    if flags & GRE_SEQUENCE != 0 {
        payload += 4;
    }
    found.parsed.offset.payload = offset(payload);
    // A source route has a length of its own, and RFC 2784 forbids it.
    if level < 5 || flags & GRE_ROUTING != 0 {
        return None;
    }
    match proto {
        ETHERNET => inner_ethernet(packet, payload, found),
        _ => inner(packet, payload, version(proto)?, found),
    }
}

fn gtp(packet: &[u8], at: usize, user: bool, found: &mut Headers) -> Option<()> {
    let flags = u8_at(packet, at)?;
    let id = u32_at(packet, at + 4)?;
    if flags >> 5 != 1 {
        return None;
    }
    found.parsed.tunnel.id = id;
    // Only a G-PDU carries a packet.
    if !user || u8_at(packet, at + 1)? != GTP_G_PDU {
        return None;
    }
    let mut payload = at + 8;
    if flags & 0x7 != 0 {
        let mut next = u8_at(packet, payload + 3)?;
        payload += 4;
        if flags & GTP_EXTENSION == 0 {
            next = 0;
        }
        for _ in 0..MAX_EXTENSIONS {
            if next == 0 {
                break;
            }
            let len = usize::from(u8_at(packet, payload)?) * 4;
            if len == 0 {
                return None;
            }
            next = u8_at(packet, payload + len - 1)?;
            payload += len;
        }
    }
    inner(packet, payload, u8_at(packet, payload)? >> 4, found)
}

fn vxlan(packet: &[u8], at: usize, found: &mut Headers) -> Option<()> {
    let head: [u8; 8] = array(packet, at)?;
    if head[0] & VXLAN_HAS_ID == 0 {
        return None;
    }
    found.parsed.tunnel.id = u32::from_be_bytes([0, head[4], head[5], head[6]]);
    inner_ethernet(packet, at + head.len(), found)
}

fn inner_ethernet(packet: &[u8], at: usize, found: &mut Headers) -> Option<()> {
    let tunnel = &mut found.parsed.tunnel;
    tunnel.dmac = array(packet, at)?;
    tunnel.smac = array(packet, at + 6)?;
    let (link, eth_type) = link(packet, at + 12)?;
    tunnel.eth_type = eth_type;
    inner(packet, link.at + 2, version(eth_type)?, found)
}

fn inner(packet: &[u8], at: usize, version: u8, found: &mut Headers) -> Option<()> {
    let network = ip::network(packet, at, version)?;
    let tunnel = &mut found.parsed.tunnel;
    tunnel.ip_version = version;
    tunnel.proto = network.proto;
    (tunnel.ip_src, tunnel.ip_dst) = (network.source, network.target);
    found.level = 5;
    if network.later_fragment || !matches!(network.proto, TCP | UDP | SCTP) {
        return None;
    }
    (tunnel.l4_src_port, tunnel.l4_dst_port) = ports(packet, network.payload)?;
    found.level = 6;
    Some(())
}

const GTP_SIGNALING: u16 = 2123;
const GTP_USER: u16 = 2152;
const VXLAN: u16 = 4789;
const GTP_G_PDU: u8 = 255;
const GTP_EXTENSION: u8 = 0x4;
const GRE_CHECKSUM: u16 = 0x8000;
const GRE_ROUTING: u16 = 0x4000;
const GRE_KEY: u16 = 0x2000;
const GRE_SEQUENCE: u16 = 0x1000;
const GRE_VERSION: u16 = 0x7;
/// Transparent Ethernet bridging.
const ETHERNET: u16 = 0x6558;
const VXLAN_HAS_ID: u8 = 0x08;
/// More of them are no honest packet.
const MAX_EXTENSIONS: usize = 16;

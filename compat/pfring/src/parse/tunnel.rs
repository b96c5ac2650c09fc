//! What is inside GTP, GRE, VXLAN and Geneve: where it is, says [`vnplug_frame::tunnel`]; the tunnels' numbers are found here.

use vnplug_frame::tunnel::{self, GENEVE, GTP, Inner, VXLAN};

use super::bytes::{array, u16_at, u32_at};
use super::{Headers, SCTP, TCP, UDP, ip, link, offset, ports, version};

/// A tunnel whose header starts at `at`, after a UDP header.
pub(super) fn in_udp(packet: &[u8], at: usize, level: u8, found: &mut Headers) -> Option<()> {
    let (source, target) = (found.parsed.l4_src_port, found.parsed.l4_dst_port);
    let either = |port| source == port || target == port;
    if level < 5 {
        return None;
    }
    let head: [u8; 8] = array(packet, at)?;
    let rest = packet.get(at..)?;
    let inner = if either(GTP) || either(GTP_SIGNALING) {
        if head[0] >> 5 != GTP_VERSION {
            return None;
        }
        found.parsed.tunnel.id = u32_at(packet, at + 4)?;
        // Signalling carries no packet.
        either(GTP).then(|| tunnel::gtp(rest))?
    } else {
        let inner = match target {
            VXLAN => tunnel::vxlan(rest)?,
            GENEVE => tunnel::geneve(rest)?,
            _ => return None,
        };
        found.parsed.tunnel.id = u32::from_be_bytes([0, head[4], head[5], head[6]]);
        Some(inner)
    };
    inside(packet, inner?, found)
}

/// GRE at `at`; its payload's offset and key are found at level 4 already.
pub(super) fn in_gre(packet: &[u8], at: usize, level: u8, found: &mut Headers) -> Option<()> {
    let flags = u16_at(packet, at)?;
    u16_at(packet, at + 2)?;
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
    if level < 5 {
        return None;
    }
    inside(packet, tunnel::gre(packet.get(at..)?)?, found)
}

/// What a tunnel carries, which is the end of the packet.
fn inside(packet: &[u8], inner: Inner<'_>, found: &mut Headers) -> Option<()> {
    match inner {
        Inner::Frame(frame) => ethernet(packet, packet.len() - frame.len(), found),
        Inner::Packet(ethertype, rest) => network(
            packet,
            packet.len() - rest.len(),
            version(ethertype)?,
            found,
        ),
    }
}

fn ethernet(packet: &[u8], at: usize, found: &mut Headers) -> Option<()> {
    let tunnel = &mut found.parsed.tunnel;
    tunnel.dmac = array(packet, at)?;
    tunnel.smac = array(packet, at + 6)?;
    let (link, eth_type) = link(packet, at + 12)?;
    tunnel.eth_type = eth_type;
    network(packet, link.at + 2, version(eth_type)?, found)
}

fn network(packet: &[u8], at: usize, version: u8, found: &mut Headers) -> Option<()> {
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
const GTP_VERSION: u8 = 1;
const GRE_CHECKSUM: u16 = 0x8000;
const GRE_ROUTING: u16 = 0x4000;
const GRE_KEY: u16 = 0x2000;
const GRE_SEQUENCE: u16 = 0x1000;
const GRE_VERSION: u16 = 0x7;

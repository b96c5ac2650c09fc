//! Packets counted by flow: who spoke with whom, and how much.

use std::collections::HashMap;
use std::net::IpAddr;

use vnplug_frame::headers::{self, IPV4, Link};

/// One direction of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// IP protocol; of IPv6 the one after the extension headers.
    pub protocol: u8,
    /// Where its packets come from.
    pub from: IpAddr,
    /// Where they go.
    pub to: IpAddr,
    /// Source and destination port of TCP, UDP and SCTP, type and code of ICMP; 0 of others and of fragments after the first.
    pub ports: (u16, u16),
    /// The ports are those of the packets.
    pub has_ports: bool,
}

/// What a flow has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    /// Packets.
    pub packets: u64,
    /// Their bytes on the wire.
    pub bytes: u64,
    /// Bytes of their IP packets, headers included.
    pub ip_bytes: u64,
    /// Time of the first of them.
    pub first_ns: u64,
    /// Time of the last.
    pub last_ns: u64,
}

/// A table of flows.
#[derive(Debug, Default)]
pub struct Flows {
    flows: HashMap<Flow, Sum>,
    other: Sum,
}

impl Flow {
    /// Type and code, if it is one of ICMP that has them.
    pub fn icmp(&self) -> Option<(u16, u16)> {
        (matches!(self.protocol, 1 | 58) && self.has_ports).then_some(self.ports)
    }

    /// Of an Ethernet frame, after VLAN tags; `None` if it is not IP, or cut.
    pub fn of(frame: &[u8]) -> Option<Self> {
        let link = Link::of(frame, 12);
        let (kind, net) = (link.ethertype?, link.network(frame));
        let carried = headers::ip(kind, net)?;
        let (from, to) = match kind {
            IPV4 => (v4(net, 12)?, v4(net, 16)?),
            _ => (v6(net, 8)?, v6(net, 24)?),
        };
        let head = net.get(carried.at..).unwrap_or_default();
        let ports = match (carried.protocol, head) {
            _ if carried.later => None,
            (6 | 17 | 132, &[a, b, c, d, ..]) => {
                Some((u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])))
            }
            (1 | 58, &[kind, code, ..]) => Some((kind.into(), code.into())),
            _ => None,
        };
        Some(Self {
            protocol: carried.protocol,
            from,
            to,
            ports: ports.unwrap_or_default(),
            has_ports: ports.is_some(),
        })
    }
}

/// Bytes of the IP packet in an Ethernet frame that was `wire_len` long, as far as its header tells: a super-frame's may not.
fn ip_bytes(frame: &[u8], wire_len: u32) -> u64 {
    let link = Link::of(frame, 12);
    let net = link.network(frame);
    let room = u64::from(wire_len).saturating_sub((frame.len() - net.len()) as u64);
    let (at, more) = if link.ethertype == Some(IPV4) {
        (2, 0)
    } else {
        (4, 40)
    };
    match net.get(at..).and_then(<[u8]>::first_chunk) {
        Some(&len) if len != [0; 2] => (u64::from(u16::from_be_bytes(len)) + more).min(room),
        _ => room,
    }
}

fn v4(net: &[u8], at: usize) -> Option<IpAddr> {
    Some(IpAddr::from(*net.get(at..)?.first_chunk::<4>()?))
}

fn v6(net: &[u8], at: usize) -> Option<IpAddr> {
    Some(IpAddr::from(*net.get(at..)?.first_chunk::<16>()?))
}

impl Flows {
    /// Counts a packet. What is not IP on Ethernet, and flows beyond a million, count as others.
    pub fn add(&mut self, packet: &super::Packet<'_>) {
        let flow = match packet.interface.link_type {
            1 => Flow::of(packet.bytes),
            _ => None,
        };
        let full = self.flows.len() >= MAX_FLOWS;
        let sum = match flow {
            Some(flow) if !full || self.flows.contains_key(&flow) => {
                self.flows.entry(flow).or_default()
            }
            _ => &mut self.other,
        };
        if sum.packets == 0 {
            sum.first_ns = packet.ts_ns;
        }
        sum.packets += 1;
        sum.bytes += u64::from(packet.wire_len);
        if flow.is_some() {
            sum.ip_bytes += ip_bytes(packet.bytes, packet.wire_len);
        }
        sum.first_ns = sum.first_ns.min(packet.ts_ns);
        sum.last_ns = sum.last_ns.max(packet.ts_ns);
    }

    /// All flows, the largest first: by packets, or by bytes.
    pub fn sorted(&self, by_packets: bool) -> Vec<(Flow, Sum)> {
        let mut list: Vec<_> = self.flows.iter().map(|(flow, sum)| (*flow, *sum)).collect();
        let size = |sum: &Sum| if by_packets { sum.packets } else { sum.bytes };
        list.sort_by_key(|(flow, sum)| (std::cmp::Reverse(size(sum)), *flow));
        list
    }

    /// What belongs to no flow of the table.
    pub fn other(&self) -> Sum {
        self.other
    }
}

const MAX_FLOWS: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_behind_tags_and_extension_headers_are_seen() {
        let mut frame = vec![0; 12];
        frame.extend([0x88, 0xa8, 0, 7, 0x81, 0, 0, 5, 0x86, 0xdd]);
        frame.extend([0x60, 0, 0, 0, 0, 100, 0, 64]);
        for last in [1, 2] {
            frame.extend([0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
        frame.extend([17, 0, 1, 4, 0, 0, 0, 0]); // hop by hop
        frame.extend([0, 53, 0x80, 0]);
        let flow = Flow::of(&frame).unwrap();
        assert_eq!((flow.protocol, flow.ports), (17, (53, 0x8000)));
        assert_eq!(flow.from.to_string(), "2001:db8::1");
        assert_eq!(flow.to.to_string(), "2001:db8::2");
        for len in 0..frame.len() {
            Flow::of(&frame[..len]);
        }
        // The length that its header tells, and never more than there was.
        assert_eq!(ip_bytes(&frame, 1000), 140);
        assert_eq!(ip_bytes(&frame, 100), 78);
    }
}

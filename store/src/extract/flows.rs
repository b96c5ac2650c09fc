//! Packets counted by flow: who spoke with whom, and how much.

use std::collections::HashMap;
use std::net::IpAddr;

use crate::index::TAGS;

/// One direction of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Flow {
    /// Protocol of IPv4, or the first next header of IPv6.
    pub protocol: u8,
    /// Where its packets come from.
    pub from: IpAddr,
    /// Where they go.
    pub to: IpAddr,
    /// Source and destination port of TCP, UDP and SCTP; 0 of others and of fragments behind the first.
    pub ports: (u16, u16),
}

/// What a flow has sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    /// Packets.
    pub packets: u64,
    /// Their bytes on the wire.
    pub bytes: u64,
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
    /// Of an Ethernet frame, behind VLAN tags; `None` if it is not IP, or cut.
    pub fn of(frame: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        let mut at = 12;
        while TAGS.contains(&half(at)?) {
            at += 4;
        }
        let (kind, net) = (half(at)?, frame.get(at + 2..)?);
        let (protocol, from, to, ports, whole) = match kind {
            0x0800 => {
                let header = net.first_chunk::<20>()?;
                let address = |at: usize| Some(IpAddr::from(*header[at..].first_chunk::<4>()?));
                let whole = u16::from_be_bytes([header[6], header[7]]) & 0x1fff == 0;
                let ports = usize::from(header[0] & 0xf) * 4;
                (header[9], address(12)?, address(16)?, ports, whole)
            }
            0x86dd => {
                let header = net.first_chunk::<40>()?;
                let address = |at: usize| Some(IpAddr::from(*header[at..].first_chunk::<16>()?));
                (header[6], address(8)?, address(24)?, 40, true)
            }
            _ => return None,
        };
        let ports = match protocol {
            6 | 17 | 132 if whole => (
                half(at + 2 + ports).unwrap_or(0),
                half(at + 4 + ports).unwrap_or(0),
            ),
            _ => (0, 0),
        };
        Some(Self {
            protocol,
            from,
            to,
            ports,
        })
    }
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

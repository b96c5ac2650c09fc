//! The fields of a frame that rules test, as words that can be masked and compared.
//!
//! ```text
//! word 0  source MAC (48) | IP protocol (8) | type of service (8)
//! word 1  target MAC (48) | IP version (8) | TCP flags (8)
//! word 2  bits 34 IP, 33 TCP flags known, 32 ports known | Ethertype (16) | VLAN (16)
//! word 3, 4  source address (IPv4 in the low half of word 4)
//! word 5, 6  target address
//! ```
//!
//! Only what was captured counts: a frame that is cut before a field is one without that field.

use std::net::IpAddr;

use vnplug_frame::headers::{
    AUTHENTICATION, FRAGMENT, FRAGMENT_BYTES, IPV4, IPV6, MAX_EXTENSIONS, MAX_TAGS,
    counts_in_eights, is_tag,
};
use vnplug_ring::control::{Flow, NO_VLAN};

/// A frame, as wildcard rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct FrameKey {
    pub(super) words: [u64; 7],
    /// Source and target; 0 where there are none.
    pub(super) ports: (u16, u16),
}

/// A flow, the same for both directions, as exact rules see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct FlowKey(pub(super) [u64; 5]);

pub(super) const PORTS_KNOWN: u64 = 1 << 32;
pub(super) const FLAGS_KNOWN: u64 = 1 << 33;
pub(super) const IS_IP: u64 = 1 << 34;

impl FrameKey {
    /// Reads a frame; any bytes give a key.
    #[inline]
    pub(super) fn of(frame: &[u8]) -> Self {
        let mut key = Self::default();
        let Some(macs) = frame.first_chunk::<12>() else {
            key.words[2] = u64::from(NO_VLAN);
            return key;
        };
        key.words[0] = mac([macs[6], macs[7], macs[8], macs[9], macs[10], macs[11]]);
        key.words[1] = mac([macs[0], macs[1], macs[2], macs[3], macs[4], macs[5]]);
        let (mut at, mut vlan) = (12, None);
        let mut ethertype = u16_at(frame, at).unwrap_or(0);
        for _ in 0..MAX_TAGS {
            if !is_tag(ethertype) {
                break;
            }
            vlan = vlan.or_else(|| Some(u16_at(frame, at + 2)? & 0xfff));
            at += 4;
            ethertype = u16_at(frame, at).unwrap_or(0);
        }
        // A tag of VLAN 0 only carries a priority (IEEE 802.1Q-2018, 9.6).
        let vlan = vlan.filter(|&vlan| vlan != 0).unwrap_or(NO_VLAN);
        key.words[2] = u64::from(ethertype) << 16 | u64::from(vlan);
        let network = frame.get(at + 2..).unwrap_or_default();
        match ethertype {
            IPV4 => key.ipv4(network),
            IPV6 => key.ipv6(network),
            _ => {}
        }
        key
    }

    #[inline]
    fn ipv4(&mut self, packet: &[u8]) {
        let Some(head) = packet.first_chunk::<20>() else {
            return;
        };
        let address = |at: usize| {
            u64::from(u32::from_be_bytes([
                head[at],
                head[at + 1],
                head[at + 2],
                head[at + 3],
            ]))
        };
        self.ip(4, head[9], head[1]);
        self.words[4] = address(12);
        self.words[6] = address(16);
        let later = u16::from_be_bytes([head[6], head[7]]) & 0x1fff != 0;
        if !later {
            let len = usize::from(head[0] & 0xf) * 4;
            self.transport(head[9], packet.get(len..).unwrap_or_default());
        }
    }

    #[inline]
    fn ipv6(&mut self, packet: &[u8]) {
        let Some(head) = packet.first_chunk::<40>() else {
            return;
        };
        let word = |at: usize| {
            let bytes: [u8; 8] = std::array::from_fn(|i| head[at + i]);
            u64::from_be_bytes(bytes)
        };
        for (i, at) in [8, 16, 24, 32].into_iter().enumerate() {
            self.words[3 + i] = word(at);
        }
        let tos = head[0] << 4 | head[1] >> 4;
        let (mut protocol, mut rest, mut later) = (head[6], &packet[40..], false);
        for _ in 0..MAX_EXTENSIONS {
            let eights = counts_in_eights(protocol);
            let len = match (eights, protocol, rest) {
                (true, _, [_, len, ..]) => (usize::from(*len) + 1) * 8,
                (_, AUTHENTICATION, [_, len, ..]) => (usize::from(*len) + 2) * 4,
                (_, FRAGMENT, [_, _, high, low, ..]) => {
                    later = u16::from_be_bytes([*high, *low]) & 0xfff8 != 0;
                    FRAGMENT_BYTES
                }
                _ => break,
            };
            protocol = rest[0];
            rest = rest.get(len..).unwrap_or_default();
            if later {
                break;
            }
        }
        self.ip(6, protocol, tos);
        if !later {
            self.transport(protocol, rest);
        }
    }

    #[inline]
    fn ip(&mut self, version: u8, protocol: u8, tos: u8) {
        self.words[0] |= u64::from(protocol) << 8 | u64::from(tos);
        self.words[1] |= u64::from(version) << 8;
        self.words[2] |= IS_IP;
    }

    #[inline]
    fn transport(&mut self, protocol: u8, segment: &[u8]) {
        if !matches!(protocol, 6 | 17 | 132 | 136) {
            return;
        }
        let Some(head) = segment.first_chunk::<4>() else {
            return;
        };
        self.ports = (
            u16::from_be_bytes([head[0], head[1]]),
            u16::from_be_bytes([head[2], head[3]]),
        );
        self.words[2] |= PORTS_KNOWN;
        if protocol == 6
            && let Some(flags) = segment.get(13)
        {
            self.words[1] |= u64::from(*flags);
            self.words[2] |= FLAGS_KNOWN;
        }
    }

    /// The same frame on its way back.
    #[inline]
    pub(super) fn swapped(&self) -> Self {
        let [a, b, meta, s0, s1, t0, t1] = self.words;
        let (source, target) = (a >> 16, b >> 16);
        Self {
            words: [
                target << 16 | a & 0xffff,
                source << 16 | b & 0xffff,
                meta,
                t0,
                t1,
                s0,
                s1,
            ],
            ports: (self.ports.1, self.ports.0),
        }
    }

    /// The frame's flow, if it has one.
    #[inline]
    pub(super) fn flow(&self) -> Option<FlowKey> {
        if self.words[2] & IS_IP == 0 {
            return None;
        }
        let [a, b, meta, s0, s1, t0, t1] = self.words;
        let vlan = match meta as u16 {
            NO_VLAN => 0,
            vlan => vlan,
        };
        let (proto, version) = ((a >> 8) as u8, (b >> 8) as u8);
        let ends = ((s0, s1, self.ports.0), (t0, t1, self.ports.1));
        Some(FlowKey::new(ends, vlan, proto, version))
    }
}

impl FlowKey {
    #[inline]
    fn new((a, b): ((u64, u64, u16), (u64, u64, u16)), vlan: u16, proto: u8, version: u8) -> Self {
        let (a, b) = if a <= b { (a, b) } else { (b, a) };
        let rest = u64::from(vlan) << 48
            | u64::from(proto) << 40
            | u64::from(version) << 32
            | u64::from(a.2) << 16
            | u64::from(b.2);
        Self([a.0, a.1, b.0, b.1, rest])
    }

    /// The key of a flow as a reader names it; `None` if its ends are of two families or its VLAN
    /// is none.
    pub(super) fn named(flow: &Flow) -> Option<Self> {
        let version = match (flow.host_a, flow.host_b) {
            (IpAddr::V4(_), IpAddr::V4(_)) => 4,
            (IpAddr::V6(_), IpAddr::V6(_)) => 6,
            _ => return None,
        };
        let ((a0, a1), (b0, b1)) = (address(flow.host_a), address(flow.host_b));
        let ends = ((a0, a1, flow.port_a), (b0, b1, flow.port_b));
        (flow.vlan_id < NO_VLAN).then(|| Self::new(ends, flow.vlan_id, flow.proto, version))
    }

    /// The flow, with its lower end as `a`.
    pub(super) fn flow(self) -> Flow {
        let [a0, a1, b0, b1, rest] = self.0;
        let host = |high: u64, low: u64| -> IpAddr {
            match (rest >> 32) as u8 {
                4 => IpAddr::V4((low as u32).into()),
                _ => IpAddr::V6((u128::from(high) << 64 | u128::from(low)).into()),
            }
        };
        Flow {
            vlan_id: (rest >> 48) as u16,
            proto: (rest >> 40) as u8,
            host_a: host(a0, a1),
            host_b: host(b0, b1),
            port_a: (rest >> 16) as u16,
            port_b: rest as u16,
        }
    }
}

/// An address as two words.
pub(super) fn address(address: IpAddr) -> (u64, u64) {
    match address {
        IpAddr::V4(address) => (0, u64::from(address.to_bits())),
        IpAddr::V6(address) => ((address.to_bits() >> 64) as u64, address.to_bits() as u64),
    }
}

/// A MAC address in the upper 48 bits.
#[inline]
pub(super) fn mac(mac: [u8; 6]) -> u64 {
    u64::from_be_bytes([mac[0], mac[1], mac[2], mac[3], mac[4], mac[5], 0, 0])
}

#[inline]
fn u16_at(frame: &[u8], at: usize) -> Option<u16> {
    frame
        .get(at..at + 2)
        .map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

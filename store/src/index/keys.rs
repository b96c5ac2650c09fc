//! What a frame is found by.
//!
//! The places are those at which libpcap's programs look, whatever the frame's contents mean there: a
//! query must never miss a frame that its filter accepts. Hence a frame that is too short to say what
//! it is may have every key.

use vnplug_frame::headers::{
    self, Extension, FRAGMENT_BYTES, IPV4, IPV6, Link, MAX_EXTENSIONS, MAX_TAGS, extension,
};

use super::v6_mark;

/// The keys of one frame, but for its Ethertypes and tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Flow {
    /// What the fields mean.
    pub(super) family: Family,
    pub(super) protocol: u8,
    pub(super) addresses: [u32; 2],
    /// How many of the ports are there.
    pub(super) port_count: u8,
    pub(super) ports: [u16; 2],
}

/// What the addresses of a [`Flow`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Family {
    /// No addresses, ports, or protocol.
    #[default]
    Other,
    V4,
    V6,
    /// IPv4 addresses only.
    Arp,
}

/// What is known of a frame.
pub(super) struct Keys {
    pub(super) flow: Flow,
    /// The frame may have any ports: it is a fragment, or its headers are cut.
    pub(super) any_port: bool,
    /// The frame may have any key at all.
    pub(super) anything: bool,
}

impl Keys {
    const ANYTHING: Self = Self {
        flow: Flow {
            family: Family::Other,
            protocol: 0,
            addresses: [0; 2],
            port_count: 0,
            ports: [0; 2],
        },
        any_port: false,
        anything: true,
    };
}

/// Looks at an Ethernet frame; Ethertypes and tags (VLAN numbers) are told to `ether` and `vlan`.
#[inline]
pub(super) fn keys(bytes: &[u8], mut ether: impl FnMut(u16), mut vlan: impl FnMut(u16)) -> Keys {
    let link = Link::of(bytes, 12);
    for n in 0..link.tags {
        let at = 12 + 4 * n;
        ether(half(bytes, at).unwrap_or(0));
        if let Some(tci) = half(bytes, at + 2) {
            vlan(headers::vlan(tci));
        }
    }
    // After that many tags there may be anything.
    let Some(kind) = link.ethertype.filter(|_| link.tags < MAX_TAGS) else {
        return Keys::ANYTHING;
    };
    ether(if kind < 0x600 { 0 } else { kind });
    let net = link.at + 2;
    match kind {
        IPV4 => v4(bytes, net),
        IPV6 => v6(bytes, net),
        0x0806 | 0x8035 => arp(bytes, net),
        _ => Keys {
            flow: Flow::default(),
            any_port: false,
            anything: false,
        },
    }
}

#[inline]
fn v4(bytes: &[u8], net: usize) -> Keys {
    let Some(header) = bytes.get(net..).and_then(|rest| rest.first_chunk::<20>()) else {
        return Keys::ANYTHING;
    };
    let word = |at: usize| {
        u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let mut keys = Keys {
        flow: Flow {
            family: Family::V4,
            protocol: header[9],
            addresses: [word(12), word(16)],
            ..Flow::default()
        },
        any_port: u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0,
        anything: false,
    };
    if !keys.any_port && has_ports(header[9]) {
        ports(
            bytes,
            net + usize::from(header[0] & 0xf) * 4,
            &mut keys.flow,
        );
    }
    keys
}

fn v6(bytes: &[u8], net: usize) -> Keys {
    let Some(header) = bytes.get(net..).and_then(|rest| rest.first_chunk::<40>()) else {
        return Keys::ANYTHING;
    };
    let address = |at: usize| v6_mark(header[at..].first_chunk().copied().unwrap_or_default());
    let mut keys = Keys {
        flow: Flow {
            family: Family::V6,
            protocol: header[6],
            addresses: [address(8), address(24)],
            ..Flow::default()
        },
        any_port: false,
        anything: false,
    };
    let (mut next, mut at) = (header[6], net + 40);
    for _ in 0..MAX_EXTENSIONS {
        if has_ports(next) {
            ports(bytes, at, &mut keys.flow);
            return keys;
        }
        let rest = bytes.get(at..).unwrap_or_default();
        (next, at) = match extension(next, rest) {
            Extension::Not => return keys,
            Extension::Header { next, len } => (next, at + len),
            Extension::Fragment { next, later, .. } => {
                keys.any_port |= later;
                (next, at + FRAGMENT_BYTES)
            }
            Extension::Cut => break,
        };
    }
    // Cut, or more headers than anybody has.
    keys.any_port = true;
    keys
}

fn arp(bytes: &[u8], net: usize) -> Keys {
    let word = |at: usize| {
        let word = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_be_bytes(*word))
    };
    let (Some(sender), Some(target)) = (word(net + 14), word(net + 24)) else {
        return Keys::ANYTHING;
    };
    Keys {
        flow: Flow {
            family: Family::Arp,
            addresses: [sender, target],
            ..Flow::default()
        },
        any_port: false,
        anything: false,
    }
}

/// As many ports as the frame still has.
#[inline]
fn ports(bytes: &[u8], at: usize, flow: &mut Flow) {
    for (n, port) in flow.ports.iter_mut().enumerate() {
        if let Some(value) = half(bytes, at + 2 * n) {
            *port = value;
            flow.port_count += 1;
        }
    }
}

/// TCP, UDP, SCTP: those whose ports libpcap looks at.
fn has_ports(protocol: u8) -> bool {
    matches!(protocol, 6 | 17 | 132)
}

#[inline]
fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let half = bytes.get(at..)?.first_chunk()?;
    Some(u16::from_be_bytes(*half))
}

//! What a frame is found by.
//!
//! The places are those at which libpcap's programs look, whatever the frame's contents mean there: a
//! query must never miss a frame that its filter accepts. Hence a frame that is too short to say what
//! it is may have every key.

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
    let mut at = 12;
    let mut kind = match half(bytes, at) {
        Some(kind) => kind,
        None => return Keys::ANYTHING,
    };
    let mut tags = 0;
    loop {
        ether(if kind < 0x600 { 0 } else { kind });
        if !TAGS.contains(&kind) {
            break;
        }
        let (Some(tag), Some(next)) = (half(bytes, at + 2), half(bytes, at + 4)) else {
            return Keys::ANYTHING;
        };
        vlan(tag & 0xfff);
        tags += 1;
        if tags == MAX_TAGS {
            return Keys::ANYTHING;
        }
        (at, kind) = (at + 4, next);
    }
    let net = at + 2;
    match kind {
        0x0800 => v4(bytes, net),
        0x86dd => v6(bytes, net),
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
        let len = |unit: usize, more: usize| {
            bytes
                .get(at + 1)
                .map(|&len| (usize::from(len) + more) * unit)
        };
        let step = match next {
            0 | 43 | 60 => len(8, 1),
            44 => {
                keys.any_port |= half(bytes, at + 2).is_none_or(|part| part & 0xfff8 != 0);
                Some(8)
            }
            51 => len(4, 2),
            _ => return keys,
        };
        let (Some(step), Some(&following)) = (step, bytes.get(at)) else {
            break;
        };
        (next, at) = (following, at + step);
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

/// Ethertypes of VLAN tags.
pub(crate) const TAGS: [u16; 3] = [0x8100, 0x88a8, 0x9100];
/// A frame with so many tags may have every key.
pub(crate) const MAX_TAGS: usize = 8;
const MAX_EXTENSIONS: usize = 8;

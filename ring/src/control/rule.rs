//! Filtering rules of a port, beside its filter: many, each with an action and counters of its own.
//!
//! Exact rules name one flow each and are found by a hash, however many there are. Wildcard rules
//! are tried one after the other, in the order of their numbers. What no rule decides the default
//! decides.

use std::net::IpAddr;

use super::wire::{Malformed, Reader, Writer};

/// A rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// About one flow.
    Exact(ExactRule),
    /// About all packets of a pattern.
    Wildcard(WildcardRule),
}

/// A rule about one flow; tried before all wildcard rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactRule {
    /// The flow.
    pub flow: Flow,
    /// What to do with its packets.
    pub action: RuleAction,
}

/// One flow, both directions: it does not matter which end is `a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Flow {
    /// The outermost VLAN's number; 0 = untagged (or tagged for priority alone).
    pub vlan_id: u16,
    /// IP protocol, behind IPv6's extension headers.
    pub proto: u8,
    /// One end.
    pub host_a: IpAddr,
    /// The other end, of the same family.
    pub host_b: IpAddr,
    /// Port of `host_a`; 0 where there are none: not TCP, UDP, SCTP or UDP-Lite, or a later
    /// fragment.
    pub port_a: u16,
    /// Port of `host_b`.
    pub port_b: u16,
}

/// A rule about all packets of a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WildcardRule {
    /// Its place: lower numbers are tried first. A rule of the same number is replaced.
    pub id: u16,
    /// Which packets.
    pub matches: Pattern,
    /// What to do with them.
    pub action: RuleAction,
}

/// Which packets a wildcard rule is about: those that have everything that is not 0 or `None`. The
/// default is every packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pattern {
    /// Also packets that match with source and target swapped (addresses, ports, MAC addresses).
    pub bidirectional: bool,
    /// Zeros = any.
    pub source_mac: [u8; 6],
    /// Zeros = any.
    pub target_mac: [u8; 6],
    /// The outermost VLAN's number; 0 = any, [`NO_VLAN`] = untagged.
    pub vlan_id: u16,
    /// After VLAN tags; 0 = any.
    pub ethertype: u16,
    /// IP protocol, behind IPv6's extension headers; 0 = any.
    pub proto: u8,
    /// Where it comes from; `None` = anywhere.
    pub source: Option<Network>,
    /// Where it goes to; `None` = anywhere.
    pub target: Option<Network>,
    /// Lowest and highest; (0, 0) = any.
    pub source_ports: (u16, u16),
    /// Lowest and highest; (0, 0) = any.
    pub target_ports: (u16, u16),
    /// IPv4's type of service or IPv6's traffic class, in the bits of `tos_mask`.
    pub tos: u8,
    /// Which bits of `tos` count; 0 = any.
    pub tos_mask: u8,
    /// TCP's flags in the bits of `tcp_flags_mask`: 1 FIN, 2 SYN, 4 RST, 8 PSH, 16 ACK, 32 URG,
    /// 64 ECE, 128 CWR.
    pub tcp_flags: u8,
    /// Which bits of `tcp_flags` count; 0 = any.
    pub tcp_flags_mask: u8,
}

/// [`Pattern::vlan_id`] of packets without a VLAN tag.
pub const NO_VLAN: u16 = 4096;

/// Addresses that agree with one in some bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// The address; bits outside the mask do not count.
    pub address: IpAddr,
    /// Which bits count; of the same family, any bits.
    pub mask: IpAddr,
}

/// What a rule does with a packet that it is about. Whatever it does, it counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RuleAction {
    /// The port gets it; no further rule is tried.
    #[default]
    Accept,
    /// The port does not get it; no further rule is tried.
    Drop,
    /// Counts it; the next rules, and at last the default, decide.
    Count,
}

/// What a rule is found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleKey {
    /// The exact rule about this flow.
    Exact(Flow),
    /// The wildcard rule of this number.
    Wildcard(u16),
}

/// One of the two kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleKind {
    /// Exact rules.
    Exact,
    /// Wildcard rules.
    Wildcard,
}

/// The most exact rules of a port.
pub const MAX_EXACT_RULES: usize = 65_536;
/// The most wildcard rules of a port.
pub const MAX_WILDCARD_RULES: usize = 4096;

impl Rule {
    /// What it is found by.
    pub fn key(&self) -> RuleKey {
        match self {
            Self::Exact(rule) => RuleKey::Exact(rule.flow),
            Self::Wildcard(rule) => RuleKey::Wildcard(rule.id),
        }
    }

    pub(super) fn write(&self, w: &mut Writer) {
        match self {
            Self::Exact(ExactRule { flow, action }) => {
                w.u8(0);
                flow.write(w);
                w.u8(*action as u8);
            }
            Self::Wildcard(rule) => {
                w.u8(1);
                w.u16(rule.id);
                rule.matches.write(w);
                w.u8(rule.action as u8);
            }
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match read_kind(r)? {
            RuleKind::Exact => Self::Exact(ExactRule {
                flow: Flow::read(r)?,
                action: RuleAction::read(r)?,
            }),
            RuleKind::Wildcard => Self::Wildcard(WildcardRule {
                id: r.u16("rule")?,
                matches: Pattern::read(r)?,
                action: RuleAction::read(r)?,
            }),
        })
    }
}

impl Flow {
    /// The same flow with the lower end (address, then port) as `a`.
    #[must_use]
    pub fn ordered(&self) -> Self {
        if (self.host_a, self.port_a) <= (self.host_b, self.port_b) {
            return *self;
        }
        Self {
            host_a: self.host_b,
            host_b: self.host_a,
            port_a: self.port_b,
            port_b: self.port_a,
            ..*self
        }
    }

    fn write(&self, w: &mut Writer) {
        w.u16(self.vlan_id);
        w.u8(self.proto);
        write_address(w, self.host_a);
        write_address(w, self.host_b);
        w.u16(self.port_a);
        w.u16(self.port_b);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self {
            vlan_id: r.u16("vlan_id")?,
            proto: r.u8("proto")?,
            host_a: read_address(r)?,
            host_b: read_address(r)?,
            port_a: r.u16("port_a")?,
            port_b: r.u16("port_b")?,
        })
    }
}

impl Pattern {
    fn write(&self, w: &mut Writer) {
        w.u8(u8::from(self.bidirectional));
        w.array(&self.source_mac);
        w.array(&self.target_mac);
        w.u16(self.vlan_id);
        w.u16(self.ethertype);
        w.u8(self.proto);
        for network in [self.source, self.target] {
            w.u8(u8::from(network.is_some()));
            if let Some(network) = network {
                write_address(w, network.address);
                write_address(w, network.mask);
            }
        }
        for (low, high) in [self.source_ports, self.target_ports] {
            w.u16(low);
            w.u16(high);
        }
        w.array(&[self.tos, self.tos_mask, self.tcp_flags, self.tcp_flags_mask]);
    }

    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        fn network(r: &mut Reader<'_>) -> Result<Option<Network>, Malformed> {
            Ok(match r.flag("network")? {
                false => None,
                true => Some(Network {
                    address: read_address(r)?,
                    mask: read_address(r)?,
                }),
            })
        }
        fn ports(r: &mut Reader<'_>) -> Result<(u16, u16), Malformed> {
            Ok((r.u16("port")?, r.u16("port")?))
        }
        let mut pattern = Self {
            bidirectional: r.flag("bidirectional")?,
            source_mac: r.array("source_mac")?,
            target_mac: r.array("target_mac")?,
            vlan_id: r.u16("vlan_id")?,
            ethertype: r.u16("ethertype")?,
            proto: r.u8("proto")?,
            source: network(r)?,
            target: network(r)?,
            source_ports: ports(r)?,
            target_ports: ports(r)?,
            ..Self::default()
        };
        [
            pattern.tos,
            pattern.tos_mask,
            pattern.tcp_flags,
            pattern.tcp_flags_mask,
        ] = r.array("tos and flags")?;
        Ok(pattern)
    }
}

impl RuleAction {
    fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.one_of("action", &[Self::Accept, Self::Drop, Self::Count])
    }
}

impl RuleKey {
    pub(super) fn write(&self, w: &mut Writer) {
        match self {
            Self::Exact(flow) => {
                w.u8(0);
                flow.write(w);
            }
            Self::Wildcard(id) => {
                w.u8(1);
                w.u16(*id);
            }
        }
    }

    pub(super) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match read_kind(r)? {
            RuleKind::Exact => Self::Exact(Flow::read(r)?),
            RuleKind::Wildcard => Self::Wildcard(r.u16("rule")?),
        })
    }
}

pub(super) fn read_kind(r: &mut Reader<'_>) -> Result<RuleKind, Malformed> {
    r.one_of("kind of rule", &[RuleKind::Exact, RuleKind::Wildcard])
}

fn write_address(w: &mut Writer, address: IpAddr) {
    match address {
        IpAddr::V4(address) => {
            w.u8(4);
            w.array(&address.octets());
        }
        IpAddr::V6(address) => {
            w.u8(6);
            w.array(&address.octets());
        }
    }
}

fn read_address(r: &mut Reader<'_>) -> Result<IpAddr, Malformed> {
    match r.u8("IP version")? {
        4 => r.array::<4>("address").map(Into::into),
        6 => r.array::<16>("address").map(Into::into),
        other => Err(Malformed::Value("IP version", u64::from(other))),
    }
}

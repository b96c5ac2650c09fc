//! PF_RING's rules in the words of libvnplug.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use vnplug::{ExactRule, Flow, Network, Pattern, RuleAction, WildcardRule};

use crate::abi::packet::IpAddr as Address;
use crate::abi::rule::{Core, FilteringRule, HashRule, TUNNEL_ID_FLAG};
use crate::error::{INVALID_ARGUMENT, NOT_SUPPORTED};
use crate::handle::Failure;

/// A wildcard rule; `id` is the number it gets, `if_index` the device's own interface.
pub(crate) fn wildcard(
    rule: &FilteringRule,
    id: u16,
    if_index: i32,
) -> Result<WildcardRule, Failure> {
    let (core, extended) = (rule.core, rule.extended);
    let tunnel = extended.tunnel;
    let masks = [tunnel.shost_mask, tunnel.dhost_mask];
    let other_device = core.if_index > 0 && core.if_index != if_index;
    if other_device
        || rule.balance_pool != 0
        || extended.optional_fields & TUNNEL_ID_FLAG != 0
        || masks != [Address::default(); 2]
        || extended.payload_pattern[0] != 0
    {
        return Err(UNSUPPORTED);
    }
    Ok(WildcardRule {
        id,
        matches: pattern(&core, rule.bidirectional != 0)?,
        action: match rule.rule_action {
            FORWARD => RuleAction::Accept,
            DO_NOT_FORWARD => RuleAction::Drop,
            CONTINUE => RuleAction::Count,
            action => return Err(unknown(action)),
        },
    })
}

/// A rule about one flow.
pub(crate) fn exact(rule: &HashRule) -> Result<ExactRule, Failure> {
    Ok(ExactRule {
        flow: flow(rule)?,
        action: match rule.rule_action {
            FORWARD => RuleAction::Accept,
            DO_NOT_FORWARD | STOP => RuleAction::Drop,
            CONTINUE => RuleAction::Count,
            action => return Err(unknown(action)),
        },
    })
}

/// The flow that a hash rule is about.
pub(crate) fn flow(rule: &HashRule) -> Result<Flow, Failure> {
    let host = |address: Address| match rule.ip_version {
        4 => Ok(v4(address)),
        6 => Ok(v6(address)),
        _ => Err(INVALID),
    };
    Ok(Flow {
        vlan_id: rule.vlan_id,
        proto: rule.proto,
        host_a: host(rule.host_peer_a)?,
        host_b: host(rule.host_peer_b)?,
        port_a: rule.port_peer_a,
        port_b: rule.port_peer_b,
    })
}

fn pattern(core: &Core, bidirectional: bool) -> Result<Pattern, Failure> {
    let hosts = [core.shost, core.dhost, core.shost_mask, core.dhost_mask];
    // A rule does not say of which family its addresses are. IPv4 fills the first word alone.
    let six = core.eth_type == 0x86dd || hosts.iter().any(|host| !host.is_v4());
    let network = |address: Address, mask: Address| {
        let kind = if six { v6 } else { v4 };
        (mask != Address::default()).then(|| Network {
            address: kind(address),
            mask: kind(mask),
        })
    };
    let ports = |low: u16, high: u16| match (low, high) {
        (_, 0) => Ok((0, 0)),
        (low, high) if low <= high => Ok((low, high)),
        _ => Err(INVALID),
    };
    Ok(Pattern {
        bidirectional,
        source_mac: core.smac,
        target_mac: core.dmac,
        vlan_id: core.vlan_id,
        ethertype: core.eth_type,
        proto: core.proto,
        source: network(core.shost, core.shost_mask),
        target: network(core.dhost, core.dhost_mask),
        source_ports: ports(core.sport_low, core.sport_high)?,
        target_ports: ports(core.dport_low, core.dport_high)?,
        tcp_flags: core.tcp_flags,
        tcp_flags_mask: if core.tcp_flags == 0 {
            0
        } else {
            ALL_TCP_FLAGS
        },
        ..Pattern::default()
    })
}

fn v4(address: Address) -> IpAddr {
    Ipv4Addr::from(address.as_v4()).into()
}

fn v6(address: Address) -> IpAddr {
    Ipv6Addr::from(address.as_v6()).into()
}

fn unknown(action: u32) -> Failure {
    if action <= LAST_ACTION {
        UNSUPPORTED
    } else {
        INVALID
    }
}

const INVALID: Failure = Failure::new(INVALID_ARGUMENT, libc::EINVAL);
const UNSUPPORTED: Failure = Failure::new(NOT_SUPPORTED, libc::ENOTSUP);

/// `rule_action_behaviour`.
const FORWARD: u32 = 0;
const DO_NOT_FORWARD: u32 = 1;
const CONTINUE: u32 = 2;
const STOP: u32 = 3;
const LAST_ACTION: u32 = 8;
/// FIN to URG, as `tcp.flags` of a parsed packet.
const ALL_TCP_FLAGS: u8 = 0x3f;

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> FilteringRule {
        FilteringRule::default()
    }

    #[test]
    fn an_empty_rule_is_about_every_packet() {
        let rule = wildcard(&empty(), 7, -1).unwrap();
        assert_eq!((rule.id, rule.action), (7, RuleAction::Accept));
        assert_eq!(rule.matches, Pattern::default());
    }

    #[test]
    fn addresses_are_of_the_family_they_fill() {
        let mut rule = empty();
        rule.core.shost = Address::v4(0x0a00_0001);
        rule.core.shost_mask = Address::v4(0xffff_ff00);
        let source = wildcard(&rule, 0, -1).unwrap().matches.source.unwrap();
        let four = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(
            (source.address, source.mask),
            (four("10.0.0.1"), four("255.255.255.0"))
        );
        rule.core.dhost_mask = Address::v6([0xff; 16]);
        rule.core.shost_mask = Address::default();
        let matches = wildcard(&rule, 0, -1).unwrap().matches;
        assert!(matches.source.is_none() && matches.target.unwrap().mask.is_ipv6());
    }

    #[test]
    fn what_the_host_cannot_match_is_refused() {
        let code = |rule: &FilteringRule| wildcard(rule, 0, 3).unwrap_err().code;
        let mut rule = empty();
        rule.balance_pool = 2;
        assert_eq!(code(&rule), NOT_SUPPORTED);
        rule = empty();
        rule.extended.payload_pattern[0] = 1;
        assert_eq!(code(&rule), NOT_SUPPORTED);
        rule = empty();
        rule.rule_action = 5;
        assert_eq!(code(&rule), NOT_SUPPORTED);
        rule.rule_action = 99;
        assert_eq!(code(&rule), INVALID_ARGUMENT);
        rule = empty();
        (rule.core.sport_low, rule.core.sport_high) = (9, 3);
        assert_eq!(code(&rule), INVALID_ARGUMENT);
        rule = empty();
        rule.core.if_index = 4;
        assert_eq!(code(&rule), NOT_SUPPORTED);
        rule.core.if_index = 3;
        assert!(wildcard(&rule, 0, 3).is_ok());
    }

    #[test]
    fn a_flow_has_a_version() {
        let mut rule = HashRule {
            proto: 6,
            ip_version: 4,
            ..HashRule::default()
        };
        rule.host_peer_a = Address::v4(1);
        assert_eq!(
            exact(&rule).unwrap().flow.host_a,
            IpAddr::from([0, 0, 0, 1])
        );
        rule.ip_version = 5;
        assert_eq!(exact(&rule).unwrap_err().code, INVALID_ARGUMENT);
    }
}

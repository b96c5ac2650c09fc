//! Random frames and rules that know what they mean, and whether one is about the other.

use std::net::IpAddr;

use vnplug_ring::control::{
    ExactRule, Flow, NO_VLAN, Network, Pattern, Rule, RuleAction, WildcardRule,
};

/// Numbers from a seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

/// A frame as it was meant, beside its bytes.
#[derive(Debug, Clone)]
pub(super) struct Meant {
    macs: ([u8; 6], [u8; 6]),
    vlan: Option<u16>,
    ethertype: u16,
    ip: Option<Ip>,
    pub(super) bytes: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct Ip {
    hosts: (IpAddr, IpAddr),
    proto: u8,
    tos: u8,
    ports: Option<(u16, u16)>,
    flags: Option<u8>,
}

fn host(dice: &mut Dice, six: bool) -> IpAddr {
    let last = dice.below(3) as u8;
    match six {
        true => [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last].into(),
        false => [10, 0, 0, last].into(),
    }
}

/// A frame of few hosts, ports and kinds, so that rules are about some.
pub(super) fn frame(dice: &mut Dice) -> Meant {
    let mac = |dice: &mut Dice| [2, 0, 0, 0, 0, dice.below(3) as u8];
    let macs = (mac(dice), mac(dice));
    let mut bytes = [macs.1, macs.0].concat();
    let mut vlan = None;
    for tag in 0..dice.below(3) {
        let tci = dice.below(3) as u16;
        let tpid: u16 = if dice.chance(2) { 0x8100 } else { 0x88a8 };
        bytes.extend(tpid.to_be_bytes());
        bytes.extend((tci | 0x2000).to_be_bytes());
        if tag == 0 {
            vlan = Some(tci).filter(|&vlan| vlan != 0);
        }
    }
    let kind = dice.below(5);
    let ethertype = [0x0800_u16, 0x0800, 0x86dd, 0x86dd, 0x0806][kind as usize];
    bytes.extend(ethertype.to_be_bytes());
    if ethertype == 0x0806 {
        bytes.extend([0; 28]);
        return Meant {
            macs,
            vlan,
            ethertype,
            ip: None,
            bytes,
        };
    }
    let six = ethertype == 0x86dd;
    let hosts = (host(dice, six), host(dice, six));
    let proto = [6_u8, 17, 1][dice.below(3) as usize];
    let tos = [0_u8, 4, 0xb8][dice.below(3) as usize];
    let ports = (dice.below(3) as u16 + 1, dice.below(3) as u16 + 1);
    let flags = dice.below(64) as u8;
    let (fragment, later) = (dice.chance(4), dice.chance(2));
    let offset: u16 = u16::from(later) * 8;
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    if six {
        let mut chain = Vec::new();
        let mut next = Vec::new();
        if dice.chance(3) {
            next.push(0_u8);
            chain.push(vec![0, 0, 0, 0, 0, 0, 0, 0]);
        }
        if fragment {
            next.push(44);
            let word = (offset | 1).to_be_bytes();
            chain.push(vec![0, 0, word[0], word[1], 0, 0, 0, 9]);
        }
        next.push(proto);
        for (header, next) in chain.iter_mut().zip(&next[1..]) {
            header[0] = *next;
        }
        bytes.extend([0x60 | tos >> 4, tos << 4, 0, 0, 0, 0, next[0], 64]);
        bytes.extend([octets(hosts.0), octets(hosts.1)].concat());
        bytes.extend(chain.concat());
    } else {
        let options = dice.below(2) as u8;
        bytes.extend([0x45 + options, tos, 0, 0, 0, 0]);
        let word = if fragment {
            0x2000 | (offset / 8)
        } else {
            0x4000
        };
        bytes.extend(word.to_be_bytes());
        bytes.extend([64, proto, 0, 0]);
        bytes.extend([octets(hosts.0), octets(hosts.1)].concat());
        bytes.extend(vec![1; usize::from(options) * 4]);
    }
    let has_ports = proto != 1 && !(fragment && later);
    bytes.extend(ports.0.to_be_bytes());
    bytes.extend(ports.1.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0]);
    let ip = Ip {
        hosts,
        proto,
        tos,
        ports: has_ports.then_some(ports),
        flags: (has_ports && proto == 6).then_some(flags),
    };
    Meant {
        macs,
        vlan,
        ethertype,
        ip: Some(ip),
        bytes,
    }
}

/// Whether a pattern is about a frame, by the words of its documentation, in one direction.
fn one_way(pattern: &Pattern, meant: &Meant, back: bool) -> bool {
    let turn = |(a, b): ([u8; 6], [u8; 6])| if back { (b, a) } else { (a, b) };
    let macs = turn(meant.macs);
    let ip = meant.ip;
    let hosts = ip.map(|ip| {
        if back {
            (ip.hosts.1, ip.hosts.0)
        } else {
            ip.hosts
        }
    });
    let ports = ip
        .and_then(|ip| ip.ports)
        .map(|(a, b)| if back { (b, a) } else { (a, b) });
    let within = |network: Option<Network>, host: Option<IpAddr>| match network {
        None => true,
        Some(Network { address, mask }) => match (address, mask, host) {
            (IpAddr::V4(a), IpAddr::V4(m), Some(IpAddr::V4(h))) => {
                a.to_bits() & m.to_bits() == h.to_bits() & m.to_bits()
            }
            (IpAddr::V6(a), IpAddr::V6(m), Some(IpAddr::V6(h))) => {
                a.to_bits() & m.to_bits() == h.to_bits() & m.to_bits()
            }
            _ => false,
        },
    };
    let (no_source, no_target) = (
        pattern.source_ports == (0, 0),
        pattern.target_ports == (0, 0),
    );
    let ports_fit = match ports {
        None => no_source && no_target,
        Some((source, target)) => {
            let (s, t) = (pattern.source_ports, pattern.target_ports);
            (no_source || (s.0..=s.1).contains(&source))
                && (no_target || (t.0..=t.1).contains(&target))
        }
    };
    (pattern.source_mac == [0; 6] || pattern.source_mac == macs.0)
        && (pattern.target_mac == [0; 6] || pattern.target_mac == macs.1)
        && match pattern.vlan_id {
            0 => true,
            NO_VLAN => meant.vlan.is_none(),
            vlan => meant.vlan == Some(vlan),
        }
        && (pattern.ethertype == 0 || pattern.ethertype == meant.ethertype)
        && (pattern.proto == 0 || ip.is_some_and(|ip| ip.proto == pattern.proto))
        && within(pattern.source, hosts.map(|hosts| hosts.0))
        && within(pattern.target, hosts.map(|hosts| hosts.1))
        && ports_fit
        && (pattern.tos_mask == 0
            || ip.is_some_and(|ip| (ip.tos ^ pattern.tos) & pattern.tos_mask == 0))
        && (pattern.tcp_flags_mask == 0
            || ip
                .and_then(|ip| ip.flags)
                .is_some_and(|flags| (flags ^ pattern.tcp_flags) & pattern.tcp_flags_mask == 0))
}

pub(super) fn is_about(rule: &Rule, meant: &Meant) -> bool {
    match rule {
        Rule::Wildcard(rule) => {
            one_way(&rule.matches, meant, false)
                || rule.matches.bidirectional && one_way(&rule.matches, meant, true)
        }
        Rule::Exact(rule) => {
            let Some(ip) = meant.ip else { return false };
            let (a, b) = ip.ports.unwrap_or((0, 0));
            let flow = Flow {
                vlan_id: meant.vlan.unwrap_or(0),
                proto: ip.proto,
                host_a: ip.hosts.0,
                host_b: ip.hosts.1,
                port_a: a,
                port_b: b,
            };
            flow.ordered() == rule.flow.ordered()
        }
    }
}

fn action(dice: &mut Dice) -> RuleAction {
    [RuleAction::Accept, RuleAction::Drop, RuleAction::Count][dice.below(3) as usize]
}

pub(super) fn rule(dice: &mut Dice) -> Rule {
    let six = dice.chance(2);
    if dice.chance(2) {
        let other = frame(dice);
        let ip = other.ip;
        let (a, b) = ip.and_then(|ip| ip.ports).unwrap_or((0, 0));
        let (x, y) = ip.map_or_else(|| (host(dice, six), host(dice, six)), |ip| ip.hosts);
        let flow = Flow {
            vlan_id: other.vlan.unwrap_or(0),
            proto: ip.map_or(6, |ip| ip.proto),
            host_a: y,
            host_b: x,
            port_a: b,
            port_b: a,
        };
        let action = action(dice);
        return Rule::Exact(ExactRule { flow, action });
    }
    let network = |dice: &mut Dice| {
        dice.chance(3).then(|| Network {
            address: host(dice, six),
            mask: match (six, dice.chance(2)) {
                (true, true) => [0xff; 16].into(),
                (true, false) => [0xf0; 16].into(),
                (false, true) => [255; 4].into(),
                (false, false) => [255, 255, 0, 1].into(),
            },
        })
    };
    let ports = |dice: &mut Dice| match dice.below(4) {
        0 => {
            let low = dice.below(4) as u16;
            (low, low + dice.below(2) as u16)
        }
        _ => (0, 0),
    };
    let mac = |dice: &mut Dice| match dice.below(5) {
        0 => [2, 0, 0, 0, 0, dice.below(3) as u8],
        _ => [0; 6],
    };
    let matches = Pattern {
        bidirectional: dice.chance(2),
        source_mac: mac(dice),
        target_mac: mac(dice),
        vlan_id: [0, 0, 0, 1, 2, NO_VLAN][dice.below(6) as usize],
        ethertype: [0, 0, 0, 0x0800, 0x86dd, 0x0806][dice.below(6) as usize],
        proto: [0, 0, 6, 17][dice.below(4) as usize],
        source: network(dice),
        target: network(dice),
        source_ports: ports(dice),
        target_ports: ports(dice),
        tos: 0xb8,
        tos_mask: [0, 0, 0, 0xfc][dice.below(4) as usize],
        tcp_flags: dice.below(64) as u8,
        tcp_flags_mask: [0, 0, 0, 2, 16][dice.below(5) as usize],
    };
    Rule::Wildcard(WildcardRule {
        id: dice.below(40) as u16,
        matches,
        action: action(dice),
    })
}

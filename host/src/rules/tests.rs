//! Rules against a second, slow implementation, and what they cost.

use std::collections::HashMap;
use std::net::IpAddr;

use vnplug_ring::control::{
    ExactRule, Flow, NO_VLAN, Network, Pattern, Rule, RuleAction, RuleKey, RuleKind, WildcardRule,
};

use super::*;

/// Numbers from a seed.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

/// A frame as it was meant, beside its bytes.
#[derive(Debug, Clone)]
struct Meant {
    macs: ([u8; 6], [u8; 6]),
    vlan: Option<u16>,
    ethertype: u16,
    ip: Option<Ip>,
    bytes: Vec<u8>,
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
fn frame(dice: &mut Dice) -> Meant {
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

fn is_about(rule: &Rule, meant: &Meant) -> bool {
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

fn rule(dice: &mut Dice) -> Rule {
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

/// Rules as the control thread keeps them: it gives them memory.
#[derive(Default)]
struct Kept {
    rules: Rules,
    room: (usize, usize),
    has: (usize, usize),
}

impl Kept {
    fn add(&mut self, rules: &[Rule], now_us: u64) {
        let prepared = Prepared::new(rules).unwrap();
        let (exact, wildcards) = prepared.len();
        let needed = (self.has.0 + exact, self.has.1 + wildcards);
        let room = Room::beyond(&mut self.room, needed);
        let changed = self.rules.change(Change::Add(prepared, room), now_us);
        assert_eq!(changed.refused, 0);
        self.has.0 += changed.added.0;
        self.has.1 += changed.added.1;
    }

    fn remove(&mut self, keys: &[RuleKey]) -> (usize, usize) {
        let keys = keys.iter().map(|key| Key::new(key).unwrap()).collect();
        let removed = self.rules.change(Change::RemoveAll(keys), 0).removed;
        self.has.0 -= removed.0;
        self.has.1 -= removed.1;
        removed
    }

    fn hits(&mut self, key: &RuleKey, now_us: u64) -> Option<(u64, u64)> {
        let ask = Change::Ask(Key::new(key).unwrap());
        self.rules.change(ask, now_us).hits
    }
}

fn ordered(key: RuleKey) -> RuleKey {
    match key {
        RuleKey::Exact(flow) => RuleKey::Exact(flow.ordered()),
        wildcard => wildcard,
    }
}

#[test]
fn random_rules_judge_random_frames_as_their_words_say() {
    let mut dice = Dice(0x0123_4567_89ab_cdef);
    let (mut accepted, mut refused, mut hit) = (0, 0, 0_u64);
    for round in 0..300 {
        let mut kept = Kept::default();
        let mut naive: HashMap<RuleKey, (Rule, u64)> = HashMap::new();
        let accept = round % 2 == 0;
        kept.rules.change(Change::Default(accept), 0);
        for _ in 0..20 {
            let rules: Vec<Rule> = (0..dice.below(4)).map(|_| rule(&mut dice)).collect();
            kept.add(&rules, 0);
            for rule in rules {
                naive.insert(ordered(rule.key()), (rule, 0));
            }
            if dice.chance(3)
                && let Some(&key) = naive.keys().next()
            {
                naive.remove(&key);
                let removed = kept.remove(&[key]);
                assert_eq!(removed.0 + removed.1, 1);
                assert_eq!(kept.remove(&[key]), (0, 0));
            }
            for _ in 0..20 {
                let meant = frame(&mut dice);
                let mut order: Vec<RuleKey> = naive.keys().copied().collect();
                order.sort();
                let mut verdict = None;
                for key in order {
                    let (rule, hits) = naive.get_mut(&key).unwrap();
                    let action = match rule {
                        Rule::Exact(rule) => rule.action,
                        Rule::Wildcard(rule) => rule.action,
                    };
                    if verdict.is_none() && is_about(rule, &meant) {
                        *hits += 1;
                        hit += 1;
                        verdict = match action {
                            RuleAction::Accept => Some(true),
                            RuleAction::Drop => Some(false),
                            RuleAction::Count => None,
                        };
                    }
                }
                let verdict = verdict.unwrap_or(accept);
                let got = kept.rules.accept(&meant.bytes, 0);
                assert_eq!(got, verdict, "{meant:?}\n{naive:#?}");
                *if got { &mut accepted } else { &mut refused } += 1;
            }
        }
        for (key, (_, hits)) in &naive {
            assert_eq!(kept.hits(key, 0).map(|hits| hits.0), Some(*hits), "{key:?}");
        }
    }
    assert!(
        accepted > 10_000 && refused > 10_000 && hit > 20_000,
        "{accepted} {refused} {hit}"
    );
}

fn flow(number: u32) -> Flow {
    Flow {
        vlan_id: 0,
        proto: 17,
        host_a: (0x0a00_0000 + number / 7).to_be_bytes().into(),
        host_b: [192, 0, 2, 1].into(),
        port_a: 1000 + (number % 7) as u16,
        port_b: 53,
    }
}

fn exact(number: u32) -> Rule {
    Rule::Exact(ExactRule {
        flow: flow(number),
        action: RuleAction::Drop,
    })
}

/// A UDP frame of a flow.
fn udp(flow: Flow) -> Vec<u8> {
    let octets = |address: IpAddr| match address {
        IpAddr::V4(address) => address.octets(),
        IpAddr::V6(_) => unreachable!("IPv4 only"),
    };
    let mut bytes = vec![2; 12];
    bytes.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0]);
    bytes.extend(octets(flow.host_a));
    bytes.extend(octets(flow.host_b));
    bytes.extend(flow.port_a.to_be_bytes());
    bytes.extend(flow.port_b.to_be_bytes());
    bytes.resize(60, 0);
    bytes
}

#[test]
fn a_table_that_grows_and_shrinks_loses_no_rule_and_no_counter() {
    const RULES: u32 = 20_000;
    let mut kept = Kept::default();
    for first in (0..RULES).step_by(500) {
        let rules: Vec<Rule> = (first..first + 500).map(exact).collect();
        kept.add(&rules, 0);
        assert!(!kept.rules.accept(&udp(flow(first)), 7));
    }
    assert_eq!(kept.has.0, RULES as usize);
    let odd: Vec<RuleKey> = (0..RULES)
        .filter(|n| n % 3 == 1)
        .map(|n| RuleKey::Exact(flow(n)))
        .collect();
    assert_eq!(kept.remove(&odd).0, odd.len());
    for number in 0..RULES + 1000 {
        let there = number < RULES && number % 3 != 1;
        assert_eq!(kept.rules.accept(&udp(flow(number)), 9), !there, "{number}");
        let hits = kept.hits(&RuleKey::Exact(flow(number)), 10);
        let first = number % 500 == 0;
        assert_eq!(hits, there.then_some((1 + u64::from(first), 1)), "{number}");
    }
}

#[test]
fn idle_rules_are_named_and_a_replaced_one_begins_anew() {
    let mut kept = Kept::default();
    kept.add(&[exact(1), exact(2)], 1000);
    let any = |id| {
        Rule::Wildcard(WildcardRule {
            id,
            matches: Pattern::default(),
            action: RuleAction::Count,
        })
    };
    kept.add(&[any(5), any(3)], 1000);
    kept.rules.accept(&udp(flow(1)), 2000);
    kept.rules.accept(&udp(flow(9)), 2500);
    assert_eq!(kept.hits(&RuleKey::Wildcard(3), 3000), Some((1, 500)));
    let mut idle = |kind, idle_us| {
        let change = Change::Idle(kind, idle_us, Vec::with_capacity(9));
        let keys = kept.rules.change(change, 3000).idle;
        keys.into_iter().map(Key::named).collect::<Vec<_>>()
    };
    assert_eq!(
        idle(RuleKind::Exact, 1001),
        [RuleKey::Exact(flow(2).ordered())]
    );
    assert_eq!(idle(RuleKind::Exact, 1000).len(), 2);
    assert_eq!(idle(RuleKind::Wildcard, 501), []);
    assert_eq!(
        idle(RuleKind::Wildcard, 0),
        [RuleKey::Wildcard(3), RuleKey::Wildcard(5)]
    );
    assert_eq!(idle(RuleKind::Wildcard, u64::MAX), []);
    kept.add(&[any(3)], 4000);
    assert_eq!(kept.hits(&RuleKey::Wildcard(3), 4000), Some((0, 0)));
    assert_eq!(kept.has, (2, 2));
}

#[test]
fn impossible_rules_are_refused_with_a_reason() {
    let four: IpAddr = [10, 0, 0, 1].into();
    let six: IpAddr = [1; 16].into();
    let network = |address, mask| Some(Network { address, mask });
    let wildcard = |matches| {
        Rule::Wildcard(WildcardRule {
            id: 1,
            matches,
            action: RuleAction::Drop,
        })
    };
    let pattern = Pattern::default;
    let mixed = Flow {
        host_b: six,
        ..flow(1)
    };
    let tagged = Flow {
        vlan_id: 4096,
        ..flow(1)
    };
    let action = RuleAction::Drop;
    let bad = [
        Rule::Exact(ExactRule {
            flow: mixed,
            action,
        }),
        Rule::Exact(ExactRule {
            flow: tagged,
            action,
        }),
        wildcard(Pattern {
            vlan_id: 4097,
            ..pattern()
        }),
        wildcard(Pattern {
            source: network(four, six),
            ..pattern()
        }),
        wildcard(Pattern {
            source: network(four, four),
            target: network(six, six),
            ..pattern()
        }),
        wildcard(Pattern {
            target_ports: (9, 8),
            ..pattern()
        }),
    ];
    for rule in bad {
        assert!(Prepared::new(&[exact(1), rule]).is_err(), "{rule:?}");
    }
}

#[test]
fn every_cut_of_every_kind_of_frame_is_judged_without_panic() {
    let mut dice = Dice(77);
    let mut kept = Kept::default();
    let rules: Vec<Rule> = (0..60).map(|_| rule(&mut dice)).collect();
    kept.add(&rules, 0);
    for _ in 0..200 {
        let meant = frame(&mut dice);
        for cut in 0..=meant.bytes.len() {
            kept.rules.accept(&meant.bytes[..cut], 0);
        }
    }
}

/// Nanoseconds per frame of `frames`, the best of several rounds.
fn cost(rules: &mut Rules, frames: &[Vec<u8>]) -> f64 {
    let round = |rules: &mut Rules| {
        let begun = std::time::Instant::now();
        let accepted = frames.iter().filter(|frame| rules.accept(frame, 0)).count();
        std::hint::black_box(accepted);
        begun.elapsed().as_nanos() as f64 / frames.len() as f64
    };
    (0..20).map(|_| round(rules)).fold(f64::MAX, f64::min)
}

#[test]
#[ignore = "a measurement: cargo test --release -p vnplugd rules_speed -- --ignored --nocapture"]
fn rules_speed() {
    let mut dice = Dice(5);
    for count in [0, 1, 100, 10_000, 65_536_u32] {
        let mut kept = Kept::default();
        let rules: Vec<Rule> = (0..count).map(exact).collect();
        let begun = std::time::Instant::now();
        for rules in rules.chunks(512) {
            kept.add(rules, 0);
        }
        let adding = begun.elapsed().as_nanos() as f64 / f64::from(count.max(1));
        let mut frames = |first: u32| -> Vec<Vec<u8>> {
            let number = |dice: &mut Dice| first + dice.below(u64::from(count.max(1))) as u32;
            (0..20_000).map(|_| udp(flow(number(&mut dice)))).collect()
        };
        let (hits, misses) = (frames(0), frames(1 << 20));
        println!(
            "{count:>6} exact: {:.1} ns hit, {:.1} ns miss, {adding:.0} ns to add",
            cost(&mut kept.rules, &hits),
            cost(&mut kept.rules, &misses),
        );
    }
    for count in [1_u16, 10, 100, 4096] {
        let mut kept = Kept::default();
        let rules: Vec<Rule> = (0..count)
            .map(|id| {
                Rule::Wildcard(WildcardRule {
                    id,
                    matches: Pattern {
                        proto: 17,
                        target_ports: (10_000 + id, 10_000 + id),
                        ..Pattern::default()
                    },
                    action: RuleAction::Drop,
                })
            })
            .collect();
        kept.add(&rules, 0);
        let frames: Vec<_> = (0..2000).map(|n| udp(flow(n))).collect();
        let ns = cost(&mut kept.rules, &frames);
        println!(
            "{count:>6} wildcard: {ns:.1} ns, {:.2} ns each",
            ns / f64::from(count)
        );
    }
}

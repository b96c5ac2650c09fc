//! Rules against a second, slow implementation, and what they cost.

mod meant;

use std::collections::HashMap;
use std::net::IpAddr;

use vnplug_ring::control::{
    ExactRule, Flow, Network, Pattern, Rule, RuleAction, RuleKey, RuleKind, WildcardRule,
};

use super::*;
use meant::{Dice, frame, is_about, rule};

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

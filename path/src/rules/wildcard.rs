//! Wildcard rules: each a mask and a value over a frame's words, and two ranges of ports.
//!
//! Rules stand in slots and stay there; `order` holds their slots by ascending number, so that a
//! new rule moves some small integers and no rule. Memory is only taken by
//! [`Wildcards::with_room`], in the control thread.

use std::net::IpAddr;

use vnplug_ring::control::{Network, Pattern, RuleAction, WildcardRule};

use super::Hits;
use super::key::{FLAGS_KNOWN, FrameKey, IS_IP, PORTS_KNOWN, address, mac};

/// The rules.
#[derive(Debug, Default)]
pub(super) struct Wildcards {
    slots: Vec<Wildcard>,
    order: Vec<u16>,
    free: Vec<u16>,
}

/// One rule.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wildcard {
    mask: [u64; 7],
    value: [u64; 7],
    source_ports: (u16, u16),
    target_ports: (u16, u16),
    bidirectional: bool,
    action: RuleAction,
    id: u16,
    hits: Hits,
}

impl Wildcard {
    /// A rule as a reader gives it.
    ///
    /// # Errors
    /// What is out of range.
    pub(super) fn new(rule: &WildcardRule) -> Result<Self, &'static str> {
        let Pattern {
            bidirectional,
            source_mac,
            target_mac,
            vlan_id,
            ethertype,
            proto,
            source,
            target,
            source_ports,
            target_ports,
            tos,
            tos_mask,
            tcp_flags,
            tcp_flags_mask,
        } = rule.matches;
        if vlan_id > vnplug_ring::control::NO_VLAN {
            return Err("a VLAN is 1 to 4095, 0 for any or 4096 for none");
        }
        let ordered = |(low, high): (u16, u16)| low <= high;
        if !ordered(source_ports) || !ordered(target_ports) {
            return Err("a range of ports begins with the lower one");
        }
        let mut all = [(0_u64, 0_u64); 7];
        let mut must = |word: usize, mask: u64, value: u64| {
            all[word].0 |= mask;
            all[word].1 |= value & mask;
        };
        let mut version = None;
        for (word, network) in [(3, source), (5, target)] {
            let Some(Network {
                address: base,
                mask,
            }) = network
            else {
                continue;
            };
            let family = match (base, mask) {
                (IpAddr::V4(_), IpAddr::V4(_)) => 4,
                (IpAddr::V6(_), IpAddr::V6(_)) => 6,
                _ => return Err("an address and its mask are of one family"),
            };
            if version.is_some_and(|other| other != family) {
                return Err("source and target are of one family");
            }
            version = Some(family);
            let ((m0, m1), (v0, v1)) = (address(mask), address(base));
            must(word, m0, v0);
            must(word + 1, m1, v1);
            must(1, 0xff00, family << 8);
        }
        if source_mac != [0; 6] {
            must(0, !0xffff, mac(source_mac));
        }
        if target_mac != [0; 6] {
            must(1, !0xffff, mac(target_mac));
        }
        if vlan_id != 0 {
            must(2, 0xffff, u64::from(vlan_id));
        }
        if ethertype != 0 {
            must(2, 0xffff_0000, u64::from(ethertype) << 16);
        }
        if proto != 0 {
            must(0, 0xff00, u64::from(proto) << 8);
            must(2, IS_IP, IS_IP);
        }
        if tos_mask != 0 {
            must(0, u64::from(tos_mask), u64::from(tos));
            must(2, IS_IP, IS_IP);
        }
        if tcp_flags_mask != 0 {
            must(1, u64::from(tcp_flags_mask), u64::from(tcp_flags));
            must(2, FLAGS_KNOWN, FLAGS_KNOWN);
        }
        let any = |ports| {
            if ports == (0, 0) {
                (0, u16::MAX)
            } else {
                ports
            }
        };
        if source_ports != (0, 0) || target_ports != (0, 0) {
            must(2, PORTS_KNOWN, PORTS_KNOWN);
        }
        Ok(Self {
            mask: all.map(|(mask, _)| mask),
            value: all.map(|(_, value)| value),
            source_ports: any(source_ports),
            target_ports: any(target_ports),
            bidirectional,
            action: rule.action,
            id: rule.id,
            hits: Hits::default(),
        })
    }

    #[inline]
    fn is_about(&self, key: &FrameKey, back: &mut Option<FrameKey>) -> bool {
        self.matches(key)
            || self.bidirectional && self.matches(back.get_or_insert_with(|| key.swapped()))
    }

    #[inline]
    fn matches(&self, key: &FrameKey) -> bool {
        let within = |(low, high): (u16, u16), port: u16| low <= port && port <= high;
        let masked = self.mask.iter().zip(&self.value).zip(&key.words);
        let differ = masked.fold(0, |differ, ((mask, value), word)| {
            differ | (word & mask ^ value)
        });
        differ == 0
            && within(self.source_ports, key.ports.0)
            && within(self.target_ports, key.ports.1)
    }
}

impl Wildcards {
    /// No rules, and room for this many.
    pub(super) fn with_room(rules: usize) -> Self {
        let rules = rules.max(super::LEAST_WILDCARDS).next_power_of_two();
        Self {
            slots: Vec::with_capacity(rules),
            order: Vec::with_capacity(rules),
            free: Vec::with_capacity(rules),
        }
    }

    pub(super) fn room(&self) -> usize {
        self.order.capacity().min(self.slots.capacity())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Moves all rules, in order, to where there is room; their counters stay.
    pub(super) fn move_to(&self, other: &mut Self) {
        for (&slot, place) in self.order.iter().zip(0_u16..) {
            other.slots.push(self.slots[usize::from(slot)]);
            other.order.push(place);
        }
    }

    /// Adds or replaces a rule. `None`: there is no room; else whether it is new.
    pub(super) fn add(&mut self, rule: Wildcard, now_us: u64) -> Option<bool> {
        let rule = Wildcard {
            hits: Hits::since(now_us),
            ..rule
        };
        match self.find(rule.id) {
            Ok(at) => {
                self.slots[usize::from(self.order[at])] = rule;
                Some(false)
            }
            Err(at) => {
                if self.order.len() >= self.room() {
                    return None;
                }
                let slot = self.free.pop().unwrap_or(self.slots.len() as u16);
                match self.slots.get_mut(usize::from(slot)) {
                    Some(place) => *place = rule,
                    None => self.slots.push(rule),
                }
                self.order.insert(at, slot);
                Some(true)
            }
        }
    }

    /// Removes a rule; false if there is none.
    pub(super) fn remove(&mut self, id: u16) -> bool {
        let found = self.find(id);
        if let Ok(at) = found {
            let slot = self.order.remove(at);
            self.free.push(slot);
        }
        found.is_ok()
    }

    /// The first rule's action that decides; every rule about the frame up to it is counted.
    #[inline]
    pub(super) fn decide(&mut self, key: &FrameKey, now_us: u64) -> Option<RuleAction> {
        let mut back = None;
        for &slot in &self.order {
            let rule = &mut self.slots[usize::from(slot)];
            if rule.is_about(key, &mut back) {
                rule.hits.count(now_us);
                if rule.action != RuleAction::Count {
                    return Some(rule.action);
                }
            }
        }
        None
    }

    pub(super) fn hits(&self, id: u16) -> Option<Hits> {
        let at = self.find(id).ok()?;
        Some(self.slots[usize::from(self.order[at])].hits)
    }

    /// The numbers of rules that were not hit since a time.
    pub(super) fn idle(&self, since_us: u64) -> impl Iterator<Item = u16> {
        let rules = self
            .order
            .iter()
            .map(|&slot| &self.slots[usize::from(slot)]);
        let idle = move |rule: &&Wildcard| rule.hits.last_us <= since_us;
        rules.filter(idle).map(|rule| rule.id)
    }

    fn find(&self, id: u16) -> Result<usize, usize> {
        self.order
            .binary_search_by_key(&id, |&slot| self.slots[usize::from(slot)].id)
    }
}

//! Decisions by rules: VLANs, locks, limits, links that are down.

use std::collections::HashMap;

use super::{Forwarder, GROUP, HOST, Number, Way};
use crate::counts::Reason;
use crate::rules::{Class, Form, Rule, TRANSPARENT};
use crate::settings::{Address, Lock};
use crate::table::Key;

/// The ports that are in a VLAN and are up, in order; made when a frame is flooded there, and forgotten when
/// ports or rules change.
#[derive(Debug, Default)]
pub(super) struct Lists {
    of: HashMap<u16, Box<[Number]>>,
    /// Ports in all of them.
    len: usize,
}

impl Lists {
    pub(super) fn clear(&mut self) {
        if self.len > 0 || !self.of.is_empty() {
            *self = Self::default();
        }
    }
}

impl Forwarder {
    /// As [`decide`](Self::decide), for a frame that has both addresses.
    #[inline(never)]
    pub(super) fn decide_by_rules(
        &mut self,
        from: Number,
        frame: &[u8],
        to: Address,
        source: Address,
    ) -> Way {
        let class = match self.enter(from, frame, source) {
            Ok(class) => class,
            Err(reason) => return self.refuse(from, reason),
        };
        let is_group = to[0] & GROUP != 0;
        let known = match is_group || self.is_hub {
            true => None,
            false => self.table.find(Key::new(to, class.vlan), self.now_s),
        };
        let Some(to) = known else {
            let is_for_many = is_group || !self.is_hub;
            return self.flood(from, class, is_group, is_for_many);
        };
        if to == from {
            self.counters.consumed += 1;
            return Way::default();
        }
        let rule = self.rule(to);
        let form = match rule.form(class) {
            _ if rule.is_shut() => Err(Reason::Down),
            _ if rule.is_isolated && self.rule(from).is_isolated => Err(Reason::Isolated),
            None => Err(Reason::Vlan),
            Some(form) => Ok(form),
        };
        let form = match form {
            Ok(form) => form,
            Err(reason) => return self.refuse(from, reason),
        };
        let begin = self.dues.len();
        self.dues.push(to);
        self.counters.unicast += 1;
        self.counters.due += 1;
        let split = match form {
            Form::Plain => begin + 1,
            Form::Tagged => begin,
        };
        self.way(class, begin, split)
    }

    /// The VLAN of a frame that may enter; its sender is learned.
    #[inline]
    fn enter(&mut self, from: Number, frame: &[u8], source: Address) -> Result<Class, Reason> {
        let at = usize::from(from);
        let Some(rule) = self.states.get_mut(at).and_then(|it| it.rule.as_mut()) else {
            let class = Class::transparent(frame);
            return match self.hear(from, Key::new(source, class.vlan), false) {
                true => Ok(class),
                false => Err(Reason::Lock),
            };
        };
        if rule.is_shut() {
            return Err(Reason::Down);
        }
        let class = rule.classify(frame).ok_or(Reason::Vlan)?;
        // Before it is heard: a station that lies about its network is learned nowhere.
        if !rule.networks.admit(frame) {
            return Err(Reason::Lock);
        }
        let key = Key::new(source, class.vlan);
        if rule.lock == Lock::No {
            let is_deaf = rule.is_deaf;
            return match self.hear(from, key, is_deaf) {
                true => Ok(class),
                false => Err(Reason::Lock),
            };
        }
        let pinned = self.table.pinned(key);
        let is_named = matches!(&rule.lock, Lock::To(stations) if stations.contains(&source));
        // First: who is at another port cannot become the one that this port is locked to.
        let is_others = match rule.lock {
            Lock::First => self
                .table
                .find(key, self.now_s)
                .is_some_and(|port| port != from),
            _ => !is_named && pinned.is_some_and(|port| port != from),
        };
        if is_others {
            return Err(Reason::Lock);
        }
        if from == HOST {
            // Its programs are many, and nobody is found there.
            return match rule.lock == Lock::First || is_named {
                true => Ok(class),
                false => Err(Reason::Lock),
            };
        }
        if !rule.admits(source) {
            return Err(Reason::Lock);
        }
        if pinned != Some(from) {
            let fits = !self.table.is_full(from) && self.table.pin(key, from, self.now_s);
            self.counters.unlearned += u64::from(!fits);
        }
        Ok(class)
    }

    /// A station is heard; whether it may be there.
    fn hear(&mut self, from: Number, key: Key, is_deaf: bool) -> bool {
        match from == HOST || is_deaf {
            true => self.table.pinned(key).is_none_or(|port| port == from),
            false => self.learn(key, from),
        }
    }

    /// To all ports of its VLAN.
    fn flood(&mut self, from: Number, class: Class, is_group: bool, is_for_many: bool) -> Way {
        let now_us = self.now_us;
        let state = self.states.get_mut(usize::from(from));
        let rule = state.and_then(|it| it.rule.as_mut());
        let mut is_isolated = false;
        if let Some(rule) = rule {
            is_isolated = rule.is_isolated;
            if is_for_many
                && let Some(bucket) = &mut rule.storm
                && !bucket.take(now_us)
            {
                return self.refuse(from, Reason::Storm);
            }
        }
        self.list(class.vlan);
        let begin = self.dues.len();
        let Self {
            lists,
            dues,
            states,
            ..
        } = self;
        let list = lists.of.get(&class.vlan).map_or(&[][..], |list| list);
        let is_stranger = !is_group && is_for_many;
        let form = |port: Number| {
            let rule = states[usize::from(port)].rule.as_deref();
            let rule = rule.unwrap_or(&TRANSPARENT);
            let is_out = port == from
                || (is_isolated && rule.is_isolated)
                || (is_stranger && rule.is_spared);
            rule.form(class).filter(|_| !is_out)
        };
        let having = |wanted: Form| {
            let form = &form;
            let has = move |port: &&Number| form(**port) == Some(wanted);
            list.iter().filter(has)
        };
        dues.extend(having(Form::Plain));
        let split = dues.len();
        // In VLAN 0 nobody has a tag.
        if class.vlan != 0 {
            dues.extend(having(Form::Tagged));
        }
        let way = self.way(class, begin, split);
        match way.count() > 0 {
            true => self.counters.flooded += 1,
            false => self.counters.consumed += 1,
        }
        self.counters.due += u64::from(way.count());
        way
    }

    fn way(&self, class: Class, begin: usize, split: usize) -> Way {
        Way {
            begin: begin as u32,
            split: split as u32,
            end: self.dues.len() as u32,
            edits: [class.plain(), class.tagged()],
        }
    }

    /// Makes the list of the ports in a VLAN, if it is not there.
    fn list(&mut self, vlan: u16) {
        if self.lists.of.contains_key(&vlan) {
            return;
        }
        if self.lists.len > MAX_LISTED {
            self.lists.clear();
        }
        let is_in = |port: &&Number| {
            let rule = self.rule(**port);
            rule.is_in(vlan) && !rule.is_shut()
        };
        let list: Box<[Number]> = self.ports.iter().filter(is_in).copied().collect();
        self.lists.len += list.len();
        self.lists.of.insert(vlan, list);
    }

    pub(super) fn rule(&self, port: Number) -> &Rule {
        let state = self.states.get(usize::from(port));
        let rule = state.and_then(|state| state.rule.as_deref());
        rule.unwrap_or(&TRANSPARENT)
    }

    /// Whether it has rules that say something of frames whose sender and receiver are known.
    pub(crate) fn rules_known(&self, port: Number) -> bool {
        !self.rule(port).leaves_known()
    }

    /// Whether nothing enters or leaves, and whether it is for a loop.
    pub(crate) fn is_shut(&self, port: Number) -> (bool, bool) {
        let rule = self.rule(port);
        (rule.is_shut(), rule.shut_s.is_some())
    }

    pub(super) fn put(&mut self, port: Number, rule: Option<Box<Rule>>) {
        let is = usize::from(rule.is_some());
        let old = std::mem::replace(&mut self.state(port).rule, rule);
        self.count(is, usize::from(old.is_some()));
        self.lists.clear();
    }

    /// The stations that a port has for good: static ones, and those that it is locked to.
    pub(super) fn pin(&mut self, port: Number) {
        let now_s = self.now_s;
        let mut keys: Vec<Key> = Vec::new();
        let rule = self.rule(port);
        if let (Lock::To(stations), Some(vlan)) = (&rule.lock, rule.vlan()) {
            keys.extend(stations.iter().map(|it| Key::new(*it, vlan)));
        }
        let statics = self.statics.iter().filter(|(_, at)| *at == port);
        keys.extend(statics.map(|(key, _)| *key));
        for key in keys {
            if !self.table.pin(key, port, now_s) {
                self.counters.unlearned += 1;
            }
        }
    }

    /// Shuts a port for a loop; says whether it was open.
    pub(super) fn shut(&mut self, port: Number) -> bool {
        if !self.state(port).is_there || self.rule(port).shut_s.is_some() {
            return false;
        }
        self.shut_until(port, self.now_s + SHUT_S);
        true
    }

    /// Shuts an open port for a loop until this second.
    pub(super) fn shut_until(&mut self, port: Number, until: u32) {
        let rule = self.state(port).rule.take();
        self.count(usize::from(rule.is_none()), 0);
        let mut rule = rule.unwrap_or_default();
        rule.shut_s = Some(until);
        self.state(port).rule = Some(rule);
        if !self.shut.contains(&port) {
            self.shut.push(port);
        }
        self.flips.push(port);
        self.lists.clear();
        self.last = None;
        self.table.forget(port);
        self.pin(port);
    }

    /// Ports that were shut for a loop, or opened again, since the last call.
    #[inline]
    pub(crate) fn take_flips(&mut self) -> Option<Vec<Number>> {
        (!self.flips.is_empty()).then(|| std::mem::take(&mut self.flips))
    }

    /// Opens ports again that were shut for long enough.
    #[cold]
    pub(super) fn reopen(&mut self) {
        let now_s = self.now_s;
        let mut shut = std::mem::take(&mut self.shut);
        let mut idle = 0;
        let flips = &mut self.flips;
        shut.retain(|port| {
            let state = &mut self.states[usize::from(*port)];
            let Some(rule) = &mut state.rule else {
                return false;
            };
            match rule.shut_s {
                Some(until) if until > now_s => return true,
                Some(_) => rule.shut_s = None,
                None => return false,
            }
            if rule.is_idle() {
                state.rule = None;
                idle += 1;
            }
            self.lists.clear();
            flips.push(*port);
            false
        });
        self.shut = shut;
        self.count(0, idle);
    }
}

/// For how long a port is shut for a loop.
const SHUT_S: u32 = 60;
/// Ports in all lists: 2 MiB.
const MAX_LISTED: usize = 1 << 20;

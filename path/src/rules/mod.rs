//! A port's filtering rules, run in its queue's thread after the filter.
//!
//! ```text
//! frame ── filter ──► exact rules ──► wildcard rules, ascending ──► default ──► sampling …
//!                     by a hash       first that decides            accept or drop
//! ```
//!
//! The thread owns the rules and their counters. The control thread changes them by [`Change`]s,
//! which take effect between two batches; it allocates what they need and frees what they replace,
//! so that a change costs the thread no call of the allocator. Larger tables are filled by moving
//! every rule once, which doubling makes rare: 65,536 exact rules take about a millisecond.
//!
//! Every queue of a port has all its rules; counters are added up, and a rule is idle if it is so
//! in every queue.

mod exact;
mod key;
mod wildcard;

use vnplug_ring::control::{Rule, RuleAction, RuleKey, RuleKind};

use exact::Exact;
use key::{FlowKey, FrameKey};
use wildcard::{Wildcard, Wildcards};

/// The rules of one port in one queue.
#[derive(Debug)]
pub struct Rules {
    exact: Exact,
    wildcards: Wildcards,
    accept: bool,
    /// There are rules, or the default refuses.
    active: bool,
}

/// How often and when a rule matched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Hits {
    /// Frames.
    pub matched: u64,
    /// When last, or when it was added, on the thread's clock.
    pub last_us: u64,
}

/// A change of a port's rules.
#[derive(Debug)]
pub enum Change {
    /// Add these, after moving all rules to other memory if it is given.
    Add(Prepared, Room),
    /// Remove these.
    RemoveAll(Vec<Key>),
    /// What no rule decides is accepted.
    Default(bool),
    /// Report one.
    Ask(Key),
    /// List those of a kind that are idle for this many microseconds, in this memory.
    Idle(RuleKind, u64, Vec<Key>),
}

/// The result of a change, with the memory that the control thread must free.
#[derive(Debug, Default)]
pub struct Changed {
    /// Exact and wildcard rules that were added and are new.
    pub added: (usize, usize),
    /// Exact and wildcard rules that were removed.
    pub removed: (usize, usize),
    /// Rules for which there was no room.
    pub refused: usize,
    /// A rule's counters, and microseconds since it matched.
    pub hits: Option<(u64, u64)>,
    /// Rules that are idle.
    pub idle: Vec<Key>,
    _garbage: (Prepared, Vec<Key>, Room),
}

/// Rules in the form in which they are run.
#[derive(Debug, Clone, Default)]
pub struct Prepared {
    exact: Vec<(FlowKey, RuleAction)>,
    wildcards: Vec<Wildcard>,
}

/// What a rule is found by, in the thread's form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Named);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Named {
    Exact(FlowKey),
    Wildcard(u16),
}

/// Other memory for rules.
#[derive(Debug, Default)]
pub struct Room {
    exact: Option<Exact>,
    wildcards: Option<Wildcards>,
}

impl Room {
    /// Memory for this many exact and wildcard rules if `has` is too small; `has` becomes that.
    pub fn beyond(has: &mut (usize, usize), needed: (usize, usize)) -> Self {
        let mut room = Self::default();
        if needed.0 > has.0 {
            let exact = Exact::with_room(needed.0);
            has.0 = exact.room();
            room.exact = Some(exact);
        }
        if needed.1 > has.1 {
            let wildcards = Wildcards::with_room(needed.1);
            has.1 = wildcards.room();
            room.wildcards = Some(wildcards);
        }
        room
    }

    /// Memory with twice the room that this many rules need, if `has` is more than four times as
    /// much; `has` becomes that. `None`: it fits.
    pub fn within(has: &mut (usize, usize), needed: (usize, usize)) -> Option<Self> {
        let mut room = Self::default();
        let exact = LEAST_EXACT.max(needed.0 * 2);
        if has.0 > exact * 2 {
            let exact = Exact::with_room(exact);
            has.0 = exact.room();
            room.exact = Some(exact);
        }
        let wildcard = LEAST_WILDCARDS.max(needed.1 * 2);
        if has.1 > wildcard * 2 {
            let wildcards = Wildcards::with_room(wildcard);
            has.1 = wildcards.room();
            room.wildcards = Some(wildcards);
        }
        (room.exact.is_some() || room.wildcards.is_some()).then_some(room)
    }
}

impl Prepared {
    /// Rules as a reader gives them.
    ///
    /// # Errors
    /// What is out of range, and in which.
    pub fn new(rules: &[Rule]) -> Result<Self, String> {
        let mut prepared = Self::default();
        for rule in rules {
            match rule {
                Rule::Exact(rule) => {
                    let key = FlowKey::named(&rule.flow).ok_or(NO_FLOW)?;
                    prepared.exact.push((key, rule.action));
                }
                Rule::Wildcard(rule) => {
                    let wildcard = Wildcard::new(rule);
                    let wildcard = wildcard.map_err(|what| format!("rule {}: {what}", rule.id))?;
                    prepared.wildcards.push(wildcard);
                }
            }
        }
        Ok(prepared)
    }

    /// Exact and wildcard rules.
    pub fn len(&self) -> (usize, usize) {
        (self.exact.len(), self.wildcards.len())
    }
}

impl Key {
    /// A rule as a reader names it.
    ///
    /// # Errors
    /// What is out of range.
    pub fn new(key: &RuleKey) -> Result<Self, String> {
        Ok(Self(match key {
            RuleKey::Exact(flow) => Named::Exact(FlowKey::named(flow).ok_or(NO_FLOW)?),
            RuleKey::Wildcard(id) => Named::Wildcard(*id),
        }))
    }

    /// As a reader names it.
    pub fn named(self) -> RuleKey {
        match self.0 {
            Named::Exact(flow) => RuleKey::Exact(flow.flow()),
            Named::Wildcard(id) => RuleKey::Wildcard(id),
        }
    }
}

impl Default for Rules {
    /// No rules: everything is accepted.
    fn default() -> Self {
        Self {
            exact: Exact::default(),
            wildcards: Wildcards::default(),
            accept: true,
            active: false,
        }
    }
}

impl Rules {
    /// Whether there is no rule, and what no rule decides is accepted.
    #[inline]
    pub fn accept_everything(&self) -> bool {
        !self.active
    }

    /// Whether a frame is for the reader.
    #[inline]
    pub fn accept(&mut self, frame: &[u8], now_us: u64) -> bool {
        !self.active || self.judge(frame, now_us)
    }

    fn judge(&mut self, frame: &[u8], now_us: u64) -> bool {
        let key = FrameKey::of(frame);
        let exact = match self.exact.is_empty() {
            true => None,
            false => key.flow().and_then(|flow| self.exact.hit(flow, now_us)),
        };
        let action = match exact {
            None | Some(RuleAction::Count) => self.wildcards.decide(&key, now_us),
            decided => decided,
        };
        match action {
            Some(RuleAction::Accept) => true,
            Some(RuleAction::Drop) => false,
            None | Some(RuleAction::Count) => self.accept,
        }
    }

    /// Does what the control thread wants.
    pub fn change(&mut self, change: Change, now_us: u64) -> Changed {
        let mut changed = Changed::default();
        match change {
            Change::Add(rules, room) => self.add(rules, room, now_us, &mut changed),
            Change::RemoveAll(keys) => {
                for key in &keys {
                    match key.0 {
                        Named::Exact(flow) => {
                            changed.removed.0 += usize::from(self.exact.remove(flow));
                        }
                        Named::Wildcard(id) => {
                            changed.removed.1 += usize::from(self.wildcards.remove(id));
                        }
                    }
                }
                changed._garbage.1 = keys;
            }
            Change::Default(accept) => self.accept = accept,
            Change::Ask(key) => {
                let hits = match key.0 {
                    Named::Exact(flow) => self.exact.hits(flow),
                    Named::Wildcard(id) => self.wildcards.hits(id),
                };
                let told = |hits: Hits| (hits.matched, now_us.saturating_sub(hits.last_us));
                changed.hits = hits.map(told);
            }
            Change::Idle(kind, idle_us, mut keys) => {
                let room = keys.capacity();
                if let Some(since) = now_us.checked_sub(idle_us) {
                    match kind {
                        RuleKind::Exact => {
                            let idle = self.exact.idle(since).map(Named::Exact);
                            keys.extend(idle.map(Key).take(room));
                        }
                        RuleKind::Wildcard => {
                            let idle = self.wildcards.idle(since).map(Named::Wildcard);
                            keys.extend(idle.map(Key).take(room));
                        }
                    }
                }
                changed.idle = keys;
            }
        }
        self.active = !self.accept || !self.exact.is_empty() || !self.wildcards.is_empty();
        changed
    }

    fn add(&mut self, rules: Prepared, mut room: Room, now_us: u64, changed: &mut Changed) {
        if let Some(larger) = &mut room.exact {
            self.exact.move_to(larger);
            std::mem::swap(&mut self.exact, larger);
        }
        if let Some(larger) = &mut room.wildcards {
            self.wildcards.move_to(larger);
            std::mem::swap(&mut self.wildcards, larger);
        }
        for &(key, action) in &rules.exact {
            match self.exact.add(key, action, now_us) {
                Some(new) => changed.added.0 += usize::from(new),
                None => changed.refused += 1,
            }
        }
        for &rule in &rules.wildcards {
            match self.wildcards.add(rule, now_us) {
                Some(new) => changed.added.1 += usize::from(new),
                None => changed.refused += 1,
            }
        }
        changed._garbage = (rules, Vec::new(), room);
    }
}

impl Hits {
    fn since(now_us: u64) -> Self {
        Self {
            matched: 0,
            last_us: now_us,
        }
    }

    #[inline]
    fn count(&mut self, now_us: u64) {
        self.matched += 1;
        self.last_us = now_us;
    }
}

/// Rules of a kind for which there is room at least, if there are any.
const LEAST_EXACT: usize = 32;
const LEAST_WILDCARDS: usize = 16;

const NO_FLOW: &str = "a flow has two addresses of one family, and a VLAN of 0 (none) to 4095";

#[cfg(test)]
mod tests;

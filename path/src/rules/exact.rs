//! Exact rules: a table of flows, open addressing, at most half full.
//!
//! A frame that no rule is about, the usual case, touches one line of `tags`. The hash is keyed by
//! a number that no reader learns, so that nobody can choose rules or packets that collide. Memory
//! is only taken by [`Exact::with_room`], in the control thread.

use vnplug_ring::control::RuleAction;

use super::Hits;
use super::key::FlowKey;
use vnplug_os::event;

/// The table.
#[derive(Debug, Default)]
pub(super) struct Exact {
    /// 0 = free, else some bits of the hash.
    tags: Vec<u32>,
    entries: Vec<Entry>,
    len: usize,
    secret: [u64; 4],
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    key: FlowKey,
    hits: Hits,
    action: RuleAction,
}

impl Exact {
    /// An empty table for this many rules.
    pub(super) fn with_room(rules: usize) -> Self {
        let slots = (rules.max(super::LEAST_EXACT) * 2).next_power_of_two();
        let entry = Entry {
            key: FlowKey([0; 5]),
            hits: Hits::default(),
            action: RuleAction::Accept,
        };
        Self {
            tags: vec![0; slots],
            entries: vec![entry; slots],
            len: 0,
            secret: std::array::from_fn(|_| event::random()),
        }
    }

    /// How many rules it has room for.
    pub(super) fn room(&self) -> usize {
        self.tags.len() / 2
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Moves all rules into an empty table that has the room; their counters stay.
    pub(super) fn move_to(&self, other: &mut Self) {
        for entry in self.used() {
            let (at, tag) = other.place(entry.key);
            other.tags[at] = tag;
            other.entries[at] = *entry;
        }
        other.len = self.len;
    }

    /// Adds or replaces a rule. `None`: there is no room; else whether it is new.
    pub(super) fn add(&mut self, key: FlowKey, action: RuleAction, now_us: u64) -> Option<bool> {
        if self.tags.is_empty() {
            return None;
        }
        let (at, tag) = self.place(key);
        let new = self.tags[at] == 0;
        if new && self.len == self.room() {
            return None;
        }
        self.len += usize::from(new);
        self.tags[at] = tag;
        self.entries[at] = Entry {
            key,
            hits: Hits::since(now_us),
            action,
        };
        Some(new)
    }

    /// Removes a rule; false if there is none.
    pub(super) fn remove(&mut self, key: FlowKey) -> bool {
        let Some(mut hole) = self.find(key) else {
            return false;
        };
        self.len -= 1;
        let mask = self.tags.len() - 1;
        let mut at = hole;
        // A later entry moves into the hole if the hole lies on its probe path.
        loop {
            at = (at + 1) & mask;
            if self.tags[at] == 0 {
                break;
            }
            let home = self.hash(self.entries[at].key) as usize & mask;
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.tags[hole] = self.tags[at];
                self.entries[hole] = self.entries[at];
                hole = at;
            }
        }
        self.tags[hole] = 0;
        true
    }

    /// The action of the rule about a flow, which is counted.
    #[inline]
    pub(super) fn hit(&mut self, key: FlowKey, now_us: u64) -> Option<RuleAction> {
        let at = self.find(key)?;
        let entry = &mut self.entries[at];
        entry.hits.count(now_us);
        Some(entry.action)
    }

    pub(super) fn hits(&self, key: FlowKey) -> Option<Hits> {
        self.find(key).map(|at| self.entries[at].hits)
    }

    /// The flows of rules that were not hit since a time.
    pub(super) fn idle(&self, since_us: u64) -> impl Iterator<Item = FlowKey> {
        let idle = move |entry: &&Entry| entry.hits.last_us <= since_us;
        self.used().filter(idle).map(|entry| entry.key)
    }

    fn used(&self) -> impl Iterator<Item = &Entry> {
        let all = self.tags.iter().zip(&self.entries);
        all.filter(|(tag, _)| **tag != 0).map(|(_, entry)| entry)
    }

    #[inline]
    fn find(&self, key: FlowKey) -> Option<usize> {
        if self.len == 0 {
            return None;
        }
        let (at, _) = self.place(key);
        (self.tags[at] != 0).then_some(at)
    }

    /// Where a rule is, or else the free place for it, and its tag. The table is not empty, and
    /// never full.
    #[inline]
    fn place(&self, key: FlowKey) -> (usize, u32) {
        let hash = self.hash(key);
        let (mask, tag) = (self.tags.len() - 1, (hash >> 32) as u32 | 1);
        let mut at = hash as usize & mask;
        loop {
            let there = self.tags[at];
            if there == 0 || (there == tag && self.entries[at].key == key) {
                return (at, tag);
            }
            at = (at + 1) & mask;
        }
    }

    #[inline]
    fn hash(&self, FlowKey([a, b, c, d, e]): FlowKey) -> u64 {
        fn fold(a: u64, b: u64) -> u64 {
            let product = u128::from(a) * u128::from(b);
            product as u64 ^ (product >> 64) as u64
        }
        let [s, t, u, v] = self.secret;
        let ends = fold(a ^ s, b ^ t).rotate_left(23) ^ fold(c ^ u, d ^ v);
        fold(ends ^ t, e ^ v | 1)
    }
}

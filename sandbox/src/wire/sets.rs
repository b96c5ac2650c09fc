//! Sets that stay small, whatever is put into them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;
use std::time::Instant;

/// A set that forgets who was added first.
#[derive(Debug)]
pub(super) struct Bounded<T> {
    pub(super) members: HashSet<T>,
    order: VecDeque<T>,
    most: usize,
}

/// Members that live until some time, or for good. When they are too many, those that were not used for longest go.
#[derive(Debug)]
pub(super) struct Lasting<K> {
    members: HashMap<K, Life>,
    most: usize,
}

#[derive(Clone, Copy, Debug)]
struct Life {
    until: Option<Instant>,
    used: Instant,
}

impl<T: Copy + Eq + Hash> Bounded<T> {
    pub(super) fn new(most: usize) -> Self {
        Self {
            members: HashSet::new(),
            order: VecDeque::new(),
            most,
        }
    }

    pub(super) fn add(&mut self, member: T) {
        if !self.members.insert(member) {
            return;
        }
        self.order.push_back(member);
        if self.order.len() > self.most
            && let Some(first) = self.order.pop_front()
        {
            self.members.remove(&first);
        }
    }
}

impl<K: Eq + Hash> Lasting<K> {
    pub(super) fn new(most: usize) -> Self {
        Self {
            members: HashMap::new(),
            most,
        }
    }

    /// A life that ends later, or never, takes the place of one that ends.
    pub(super) fn extend(&mut self, key: K, until: Option<Instant>) {
        let used = Instant::now();
        match self.members.entry(key) {
            Entry::Vacant(vacant) => {
                vacant.insert(Life { until, used });
            }
            Entry::Occupied(mut occupied) => {
                let life = occupied.get_mut();
                life.used = used;
                life.until = match (life.until, until) {
                    (Some(now), Some(new)) => Some(now.max(new)),
                    _ => None,
                };
            }
        }
        if self.members.len() > self.most {
            self.forget(used);
        }
    }

    /// Whether it lives now, in which case it is used.
    pub(super) fn lives(&mut self, key: &K, now: Instant) -> bool {
        match self.members.get_mut(key) {
            Some(life) if life.until.is_none_or(|until| until > now) => {
                life.used = now;
                true
            }
            _ => false,
        }
    }

    /// It ends then, if not before.
    pub(super) fn end(&mut self, key: &K, until: Instant) {
        if let Some(life) = self.members.get_mut(key) {
            life.until = Some(life.until.map_or(until, |now| now.min(until)));
        }
    }

    pub(super) fn remove(&mut self, key: &K) {
        self.members.remove(key);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.members.len()
    }

    /// Makes room for an eighth, so that the next ones cost nothing.
    fn forget(&mut self, now: Instant) {
        let is_over = |life: &Life| life.until.is_some_and(|until| until <= now);
        self.members.retain(|_, life| !is_over(life));
        let kept = self.most - self.most / 8;
        let Some(excess) = self.members.len().checked_sub(kept) else {
            return;
        };
        let mut used: Vec<_> = self.members.values().map(|life| life.used).collect();
        used.sort_unstable();
        let Some(last) = excess.checked_sub(1).and_then(|last| used.get(last)) else {
            return;
        };
        // Several may have been used at that very time: no more than the excess go.
        let mut left = excess;
        self.members.retain(|_, life| {
            let goes = left > 0 && life.used <= *last;
            left -= usize::from(goes);
            !goes
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn who_came_first_is_forgotten_first_and_memory_is_bounded() {
        let mut bounded = Bounded::new(3);
        for member in 0..10 {
            bounded.add(member);
            bounded.add(member);
        }
        assert_eq!(bounded.order, [7, 8, 9]);
        assert_eq!(bounded.members.len(), 3);
    }

    #[test]
    fn the_life_that_ends_later_counts() {
        let mut lasting = Lasting::new(64);
        let now = Instant::now();
        let later = now + Duration::from_secs(3600);
        lasting.extend(0, Some(now));
        assert!(!lasting.lives(&0, now));
        lasting.extend(0, Some(later));
        lasting.extend(0, Some(now));
        assert!(lasting.lives(&0, now) && !lasting.lives(&0, later));
        lasting.extend(0, None);
        lasting.extend(0, Some(now));
        assert!(lasting.lives(&0, later));
    }

    #[test]
    fn who_was_not_used_for_longest_goes_and_who_is_over_goes_before() {
        let mut lasting = Lasting::new(64);
        for member in 0..10_000 {
            lasting.extend(member, None);
            assert!(lasting.lives(&0, Instant::now()), "it is used: {member}");
            assert!(lasting.lives(&member, Instant::now()));
            assert!(lasting.members.len() <= 64);
        }
        let mut lasting = Lasting::new(64);
        lasting.extend(0, None);
        let soon = Instant::now() + Duration::from_millis(1);
        for member in 1..=63 {
            lasting.extend(member, Some(soon));
        }
        std::thread::sleep(Duration::from_millis(2));
        lasting.extend(64, None);
        lasting.extend(65, None);
        assert_eq!(lasting.members.len(), 3, "only those that were over went");
    }
}

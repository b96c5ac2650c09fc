//! Which programs a value of a field leads to: a hash table that the control plane's peers fill and
//! the wire's senders ask.
//!
//! Open addressing, at most half full; a lookup usually reads one cache line. Positions depend on a
//! secret odd factor (multiply-shift hashing, two-universal), so that nobody can choose values that
//! collide.

/// Programs by values.
#[derive(Debug)]
pub(super) struct Table {
    /// A power of two of them.
    entries: Vec<Entry>,
    used: usize,
    /// Further candidates of values that have more than one.
    lists: Vec<Vec<Candidate>>,
    free_lists: Vec<u32>,
    secret: u64,
}

/// A program that a value leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate(u32);

#[derive(Debug, Clone, Copy)]
struct Entry {
    value: u64,
    /// [`NOBODY`]: the entry is free.
    first: Candidate,
    /// The list of the others; [`NO_LIST`]: there are none.
    list: u32,
}

const _: () = assert!(size_of::<Entry>() == 16);

const NOBODY: Candidate = Candidate(u32::MAX);
const NO_LIST: u32 = u32::MAX;
const FREE: Entry = Entry {
    value: 0,
    first: NOBODY,
    list: NO_LIST,
};
/// The fewest entries.
const LEAST: usize = 8;

impl Candidate {
    /// Program `judge`, below 2^31 - 1; `sure`: it accepts every frame with the value.
    pub(super) fn new(judge: u32, sure: bool) -> Self {
        Self(judge << 1 | u32::from(sure))
    }

    #[inline]
    pub(super) fn judge(self) -> u32 {
        self.0 >> 1
    }

    #[inline]
    pub(super) fn is_sure(self) -> bool {
        self.0 & 1 != 0
    }
}

impl Table {
    pub(super) fn new(secret: u64) -> Self {
        Self {
            entries: vec![FREE; LEAST],
            used: 0,
            lists: Vec::new(),
            free_lists: Vec::new(),
            secret: secret | 1,
        }
    }

    /// Whether it leads nowhere.
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Where the search for a value begins.
    #[inline]
    pub(super) fn place(&self, value: u64) -> usize {
        let bits = self.entries.len().trailing_zeros();
        (value.wrapping_mul(self.secret) >> (64 - bits)) as usize
    }

    /// What a value leads to: one candidate, and the others; `place` is the value's own.
    #[inline]
    pub(super) fn find(&self, value: u64, place: usize) -> Option<(Candidate, &[Candidate])> {
        let entry = &self.entries[self.search(value, place).ok()?];
        let more = self.lists.get(entry.list as usize);
        Some((entry.first, more.map_or(&[], Vec::as_slice)))
    }

    /// The entry of a value, or where it would be.
    #[inline]
    fn search(&self, value: u64, place: usize) -> Result<usize, usize> {
        let mask = self.entries.len() - 1;
        let mut at = place & mask;
        // At least half of the entries are free.
        loop {
            let entry = &self.entries[at];
            if entry.first == NOBODY {
                return Err(at);
            }
            if entry.value == value {
                return Ok(at);
            }
            at = (at + 1) & mask;
        }
    }

    /// Lets a value lead to one more program.
    pub(super) fn insert(&mut self, value: u64, candidate: Candidate) {
        if (self.used + 1) * 2 > self.entries.len() {
            self.resize(self.entries.len() * 2);
        }
        match self.search(value, self.place(value)) {
            Err(at) => {
                self.entries[at] = Entry {
                    value,
                    first: candidate,
                    list: NO_LIST,
                };
                self.used += 1;
            }
            Ok(at) => {
                if self.entries[at].list == NO_LIST {
                    self.entries[at].list = self.free_lists.pop().unwrap_or_else(|| {
                        self.lists.push(Vec::new());
                        self.lists.len() as u32 - 1
                    });
                }
                self.lists[self.entries[at].list as usize].push(candidate);
            }
        }
    }

    /// Undoes an [`insert`](Self::insert).
    pub(super) fn remove(&mut self, value: u64, candidate: Candidate) {
        let Ok(at) = self.search(value, self.place(value)) else {
            return;
        };
        let Entry { first, list, .. } = self.entries[at];
        if list == NO_LIST {
            if first == candidate {
                self.free(at);
            }
            return;
        }
        let others = &mut self.lists[list as usize];
        if first == candidate {
            // A list is never empty.
            self.entries[at].first = others.pop().unwrap_or(NOBODY);
        } else if let Some(nth) = others.iter().position(|other| *other == candidate) {
            others.swap_remove(nth);
        }
        if others.is_empty() {
            self.lists[list as usize] = Vec::new();
            self.free_lists.push(list);
            self.entries[at].list = NO_LIST;
        }
    }

    /// Frees an entry and moves later ones that would not be found any more.
    fn free(&mut self, mut hole: usize) {
        let mask = self.entries.len() - 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry.first == NOBODY {
                break;
            }
            let own = self.place(entry.value);
            // It may move back to the hole if that is not before its own place.
            if at.wrapping_sub(own) & mask >= at.wrapping_sub(hole) & mask {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = FREE;
        self.used -= 1;
        if self.entries.len() > LEAST && self.used * 8 < self.entries.len() {
            self.resize(self.entries.len() / 2);
        }
    }

    fn resize(&mut self, len: usize) {
        let old = std::mem::replace(&mut self.entries, vec![FREE; len]);
        for entry in old.into_iter().filter(|entry| entry.first != NOBODY) {
            if let Err(at) = self.search(entry.value, self.place(entry.value)) {
                self.entries[at] = entry;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn it_leads_where_a_map_of_lists_would_through_many_changes() {
        let mut table = Table::new(0x1234_5678_9abc_def1);
        let mut model: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
        let mut state = 1_u64;
        for round in 0..40_000_u32 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let value = (state >> 40) % 700;
            // First more come than go, then fewer.
            let comes = (state >> 33) % 100 < if round < 20_000 { 60 } else { 40 };
            let list = model.entry(value).or_default();
            if comes {
                table.insert(value, Candidate::new(round, round.is_multiple_of(3)));
                list.push(round);
            } else if !list.is_empty() {
                let gone = list.swap_remove((state >> 20) as usize % list.len());
                table.remove(value, Candidate::new(gone, gone.is_multiple_of(3)));
            }
            let asked = (state >> 10) % 700;
            let found = table.find(asked, table.place(asked));
            let mut judges: Vec<u32> = found
                .into_iter()
                .flat_map(|(first, more)| std::iter::once(first).chain(more.iter().copied()))
                .inspect(|it| assert_eq!(it.is_sure(), it.judge().is_multiple_of(3)))
                .map(Candidate::judge)
                .collect();
            judges.sort_unstable();
            let mut expected = model.get(&asked).cloned().unwrap_or_default();
            expected.sort_unstable();
            assert_eq!(judges, expected, "round {round}");
        }
        for (value, list) in model {
            for judge in list {
                table.remove(value, Candidate::new(judge, judge.is_multiple_of(3)));
            }
        }
        assert!(table.is_empty() && table.entries.len() == LEAST);
    }
}

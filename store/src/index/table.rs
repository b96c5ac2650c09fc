//! Which chunks a key occurs in, for keys of 32 bits, in memory that does not grow.

/// A hash table with linear probing.
#[derive(Debug)]
pub(super) struct Table {
    keys: Box<[u32]>,
    /// Chunks of the key in the same place; 0 is a free place.
    chunks: Box<[u64]>,
    used: usize,
    /// No further keys are taken then.
    limit: usize,
}

impl Table {
    /// Room for `limit` keys.
    pub(super) fn new(limit: usize) -> Self {
        let places = (limit * 2).next_power_of_two();
        Self {
            keys: vec![0; places].into(),
            chunks: vec![0; places].into(),
            used: 0,
            limit,
        }
    }

    /// Notes that `key` occurs in `chunk` (one bit); false if there is no room for it.
    #[inline]
    pub(super) fn add(&mut self, key: u32, chunk: u64) -> bool {
        let mask = self.keys.len() - 1;
        let mut at = spread(key) & mask;
        loop {
            if self.chunks[at] == 0 {
                if self.used == self.limit {
                    return false;
                }
                self.used += 1;
                (self.keys[at], self.chunks[at]) = (key, chunk);
                return true;
            }
            if self.keys[at] == key {
                self.chunks[at] |= chunk;
                return true;
            }
            at = (at + 1) & mask;
        }
    }

    /// Moves everything out, sorted, behind what is in `list`.
    pub(super) fn drain_into(&mut self, list: &mut Vec<(u32, u64)>) {
        if self.used == 0 {
            return;
        }
        let from = list.len();
        let places = self.keys.iter().zip(&mut self.chunks);
        list.extend(places.filter_map(|(&key, chunks)| {
            let chunks = std::mem::take(chunks);
            (chunks != 0).then_some((key, chunks))
        }));
        list[from..].sort_unstable_by_key(|&(key, _)| key);
        self.used = 0;
    }
}

#[inline]
fn spread(key: u32) -> usize {
    (u64::from(key).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize
}

//! Which chunks a key occurs in, for keys of 32 bits, in memory that does not grow.

/// A hash table with linear probing.
#[derive(Debug)]
pub(super) struct Table {
    /// A key and its chunks, side by side: a look is one line of the cache. No chunks: a free place.
    places: Box<[(u32, u64)]>,
    used: usize,
    /// No further keys are taken then.
    limit: usize,
}

impl Table {
    /// Room for `limit` keys.
    pub(super) fn new(limit: usize) -> Self {
        let places = (limit * 2).next_power_of_two();
        Self {
            places: vec![(0, 0); places].into(),
            used: 0,
            limit,
        }
    }

    /// Notes that `key` occurs in `chunk` (one bit); false if there is no room for it.
    #[inline]
    pub(super) fn add(&mut self, key: u32, chunk: u64) -> bool {
        let mask = self.places.len() - 1;
        let mut at = spread(key) & mask;
        loop {
            let place = &mut self.places[at];
            if place.1 == 0 {
                if self.used == self.limit {
                    return false;
                }
                self.used += 1;
                *place = (key, chunk);
                return true;
            }
            if place.0 == key {
                place.1 |= chunk;
                return true;
            }
            at = (at + 1) & mask;
        }
    }

    /// Moves everything out, sorted, after what is in `list`.
    pub(super) fn drain_into(&mut self, list: &mut Vec<(u32, u64)>) {
        if self.used == 0 {
            return;
        }
        let from = list.len();
        list.extend(self.places.iter_mut().filter_map(|(key, chunks)| {
            let (key, chunks) = (*key, std::mem::take(chunks));
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

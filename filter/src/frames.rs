//! Sets of frames of one batch.

use vnplug_frame::MAX_BATCH;

/// Some frames of a batch, by their places in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FrameSet([u64; WORDS]);

const WORDS: usize = MAX_BATCH / 64;

const _: () = assert!(WORDS * 64 == MAX_BATCH);

impl FrameSet {
    /// The first `count` frames, at most [`MAX_BATCH`].
    #[must_use]
    pub fn first(count: usize) -> Self {
        let word = |at: usize| match count.saturating_sub(at * 64) {
            64.. => u64::MAX,
            some => (1 << some) - 1,
        };
        Self(std::array::from_fn(word))
    }

    /// Adds the frame at this place of the batch.
    #[inline]
    pub fn insert(&mut self, at: usize) {
        self.0[(at >> 6) % WORDS] |= 1 << (at & 63);
    }

    /// Whether there are none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    /// How many there are.
    #[inline]
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Those that are in both.
    #[inline]
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] & other.0[at]))
    }

    /// Those that are in one of both.
    #[inline]
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] | other.0[at]))
    }

    /// Those that are not in the other.
    #[inline]
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at] & !other.0[at]))
    }

    /// Their places in the batch, ascending: the wire's order.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = usize> + use<> {
        self.0.into_iter().enumerate().flat_map(|(at, mut word)| {
            std::iter::from_fn(move || {
                (word != 0).then(|| {
                    let bit = word.trailing_zeros() as usize;
                    word &= word - 1;
                    at * 64 + bit
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_into_it_in_ascending_order() {
        let mut set = FrameSet::default();
        assert!(set.is_empty());
        let places = [255, 0, 63, 64, 200, 64];
        places.into_iter().for_each(|at| set.insert(at));
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 63, 64, 200, 255]);
        assert_eq!(set.len(), 5);
        let low = FrameSet::first(64);
        assert_eq!(set.and(&low).iter().collect::<Vec<_>>(), [0, 63]);
        assert_eq!(set.without(&low).iter().collect::<Vec<_>>(), [64, 200, 255]);
        assert_eq!(set.and(&low).or(&set.without(&low)), set);
    }

    #[test]
    fn the_first_frames_are_counted_at_the_edges_of_words() {
        for count in [0, 1, 63, 64, 65, 128, 255, 256] {
            let first: Vec<usize> = FrameSet::first(count).iter().collect();
            assert_eq!(first, (0..count).collect::<Vec<_>>());
        }
    }
}

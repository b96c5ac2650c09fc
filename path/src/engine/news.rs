//! Who has news, among many: a bit for each, and above them a bit for each word of bits.
//!
//! ```text
//!   over   …0000000000000010      a bit for each word that is not 0
//!   words  …0 …0 …0 …1000 …0      a bit for each place
//! ```
//!
//! The one of ten thousand who has news is found by looking at three words: those of the first level are passed
//! over 64 at a time. Owned by one thread; who tells it of news does so by a kick or a command.

/// Places, some of which have news.
#[derive(Debug, Clone, Default)]
pub(super) struct News {
    words: Vec<u64>,
    over: Vec<u64>,
    count: usize,
}

impl News {
    /// How many have news.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// A place has news.
    #[inline]
    pub(super) fn set(&mut self, at: usize) {
        let word = at / BITS;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
            self.over.resize(word / BITS + 1, 0);
        }
        let bit = 1 << (at % BITS);
        self.count += usize::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
        self.over[word / BITS] |= 1 << (word % BITS);
    }

    /// It has none any more.
    #[inline]
    pub(super) fn clear(&mut self, at: usize) {
        let word = at / BITS;
        let Some(bits) = self.words.get_mut(word) else {
            return;
        };
        let bit = 1 << (at % BITS);
        self.count -= usize::from(*bits & bit != 0);
        *bits &= !bit;
        if *bits == 0 {
            self.over[word / BITS] &= !(1 << (word % BITS));
        }
    }

    /// The first place with news from this one on.
    #[inline]
    pub(super) fn next_from(&self, at: usize) -> Option<usize> {
        let word = at / BITS;
        let rest = self.words.get(word)? & (u64::MAX << (at % BITS));
        if rest != 0 {
            return Some(word * BITS + rest.trailing_zeros() as usize);
        }
        let after = word + 1;
        let mut block = after / BITS;
        let mut over = self.over.get(block)? & (u64::MAX << (after % BITS));
        while over == 0 {
            block += 1;
            over = *self.over.get(block)?;
        }
        let word = block * BITS + over.trailing_zeros() as usize;
        Some(word * BITS + self.words[word].trailing_zeros() as usize)
    }

    /// All of them, in order.
    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let found = self.next_from(at)?;
            at = found + 1;
            Some(found)
        })
    }
}

/// Bits of a word.
const BITS: usize = u64::BITS as usize;

#[cfg(test)]
mod tests {
    use super::*;

    /// Places at the edges of words, of the words' words, and within.
    const PLACES: [usize; 12] = [0, 1, 62, 63, 64, 127, 128, 4095, 4096, 4097, 8191, 9999];

    #[test]
    fn every_set_of_places_is_found_from_everywhere() {
        for set in 0_u32..1 << PLACES.len() {
            let is_in = |nth: &usize| set >> nth & 1 == 1;
            let expected: Vec<usize> = (0..PLACES.len())
                .filter(is_in)
                .map(|it| PLACES[it])
                .collect();
            let mut news = News::default();
            expected.iter().rev().for_each(|at| news.set(*at));
            assert_eq!(news.iter().collect::<Vec<_>>(), expected);
            assert_eq!(news.count(), expected.len());
            for from in PLACES.into_iter().flat_map(|at| [at, at + 1]) {
                let first = expected.iter().copied().find(|at| *at >= from);
                assert_eq!(news.next_from(from), first, "{expected:?} from {from}");
            }
            // Half of them go; the others stay.
            let (gone, left): (Vec<usize>, Vec<usize>) =
                expected.iter().partition(|at| *at % 2 == 0);
            gone.iter().for_each(|at| news.clear(*at));
            gone.iter().for_each(|at| news.clear(*at));
            left.iter().for_each(|at| news.set(*at));
            assert_eq!(news.iter().collect::<Vec<_>>(), left);
            assert_eq!(news.count(), left.len());
        }
        let mut news = News::default();
        news.clear(77);
        assert_eq!(
            (news.count(), news.next_from(0), news.next_from(1 << 40)),
            (0, None, None)
        );
    }
}

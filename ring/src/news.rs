//! Who has news, among many: a bit for each, and above them a bit for each word of bits.
//!
//! ```text
//!   over   …0000000000000010      a bit for each word that is not 0
//!   words  …0 …0 …0 …1000 …0      a bit for each place
//! ```
//!
//! The one of ten thousand who has news is found by looking at three words: those of the first level are passed
//! over 64 at a time. [`News`] is owned by one thread; who tells it of news does so by a kick or a command. A [`Board`]
//! is shared: any number of threads of the daemon tell, one reader hears.
//!
//! Who **tells** sets the bit of its place, then that above it, and rings only if that was not set: whoever set it
//! rings. Who **hears** was rung; it takes the bits above, then those below that they point at. Each order is needed: with
//! the bit above set first, it can be taken before there is anything below, and with the bits below taken first, one that
//! comes after them loses the bit above. In both cases what was told is found by nobody until somebody else in the same
//! word tells something (`ring/tests/news_model.rs` finds both).
//!
//! The reader can write the board. What it spoils is when it is rung itself: who tells takes nothing from there but
//! whether to ring.

use std::sync::atomic::Ordering;

use crate::region::Region;

/// Words of a board, which several change at a time.
pub trait Words {
    /// Sets bits of a word, and returns what it was.
    fn set(&self, word: usize, bits: u64, order: Ordering) -> u64;

    /// Takes all bits of a word. One that is 0 need not be written.
    fn take(&self, word: usize, order: Ordering) -> u64;
}

/// Which of up to [`PLACES`] places have news, in memory that those who tell and the one who hears share.
///
/// 64-bit words, little-endian: 16 of the upper level, then those of the lower.
#[derive(Debug, Clone)]
pub struct Board<W>(W);

impl<W: Words> Board<W> {
    /// In words that are all 0, of which there are [`BOARD_LEN`] / 8.
    pub fn new(words: W) -> Self {
        Self(words)
    }

    /// A place has news, which was published before. True: its reader is to be rung.
    ///
    /// # Panics
    /// If there is no such place.
    #[inline]
    pub fn tell(&self, place: usize) -> bool {
        assert!(place < PLACES, "{place} is no place of a board");
        let (word, bit) = (place / BITS, 1 << (place % BITS));
        // Release: pairs with the Acquire of the second take in `hear`, whose reader then sees what was published.
        self.0.set(OVERS + word, bit, Ordering::Release);
        let above = 1 << (word % BITS);
        // Release: pairs with the Acquire of the first take in `hear`, which then finds the bit below.
        self.0.set(word / BITS, above, Ordering::AcqRel) & above == 0
    }

    /// Takes all news: the places, in order. Whoever tells from now on rings.
    #[inline]
    pub fn hear(&self, mut each: impl FnMut(usize)) {
        for over in 0..OVERS {
            for word in bits(self.0.take(over, Ordering::AcqRel)) {
                let word = over * BITS + word;
                for bit in bits(self.0.take(OVERS + word, Ordering::Acquire)) {
                    each(word * BITS + bit);
                }
            }
        }
    }
}

impl Words for Region {
    #[inline]
    fn set(&self, word: usize, bits: u64, order: Ordering) -> u64 {
        self.or_u64(word as u64 * 8, bits, order)
    }

    #[inline]
    fn take(&self, word: usize, order: Ordering) -> u64 {
        // Relaxed: who was rung sees what was set before.
        match self.load_u64(word as u64 * 8, Ordering::Relaxed) {
            0 => 0,
            _ => self.take_u64(word as u64 * 8, order),
        }
    }
}

/// The numbers of the bits that are set.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let found = (word != 0).then(|| word.trailing_zeros() as usize);
        word &= word.wrapping_sub(1);
        found
    })
}

/// Places, some of which have news.
#[derive(Debug, Clone, Default)]
pub struct News {
    words: Vec<u64>,
    over: Vec<u64>,
    count: usize,
}

impl News {
    /// How many have news.
    pub fn count(&self) -> usize {
        self.count
    }

    /// A place has news.
    #[inline]
    pub fn set(&mut self, at: usize) {
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
    pub fn clear(&mut self, at: usize) {
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
    pub fn next_from(&self, at: usize) -> Option<usize> {
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
    pub fn iter(&self) -> impl Iterator<Item = usize> {
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
/// Words of a board's upper level.
const OVERS: usize = 16;
/// Places of a board.
pub const PLACES: usize = OVERS * BITS * BITS;
/// Bytes of a board.
pub const BOARD_LEN: u64 = ((OVERS + OVERS * BITS) * 8) as u64;

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

    #[test]
    fn a_board_rings_once_for_a_word_and_tells_every_place_once() {
        let board = Board::new(Region::heap(BOARD_LEN));
        let heard = || {
            let mut all = Vec::new();
            board.hear(|place| all.push(place));
            all
        };
        assert_eq!(heard(), []);
        let places = [0, 63, 64, 4095, 4096, super::PLACES - 1];
        // Who shares a word of bits with one that rang does not ring.
        let rang: Vec<bool> = places.iter().map(|it| board.tell(*it)).collect();
        assert_eq!(rang, [true, false, true, true, true, true]);
        assert!(!board.tell(0));
        assert_eq!(heard(), places);
        assert_eq!(heard(), []);
        assert!(board.tell(63));
        assert_eq!(heard(), [63]);
    }
}

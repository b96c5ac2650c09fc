//! Every order in which threads can tell news and one can hear them, as C11 allows their atomic operations to be seen.
//!
//! The code under test is the product's ([`Board`]); its words are loom's. Whoever tells publishes something first, then
//! tells, and rings if it is told to. The reader hears after each ring, and in the end has heard of each place, and sees
//! what was published. Each turned order must lose something: that is the control.
//!
//! Run by `make test-models`, with `--cfg loom`.
#![cfg(loom)]

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, AtomicUsize};
use loom::thread;
use vnplug_ring::news::{Board, Words};
use vnplug_testing::panic_of;

/// Which order is turned round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutant {
    None,
    /// The bit above is set before the bit below.
    AboveFirst,
    /// The bits below are taken before those above.
    BelowFirst,
    /// Nothing is ordered.
    Relaxed,
}

/// As many words as two places need that are in one word, and one in another: word 0 is above, 16 and 17 are below.
struct Small {
    above: AtomicU64,
    below: [AtomicU64; 2],
    mutant: Mutant,
}

impl Small {
    fn word(&self, word: usize) -> &AtomicU64 {
        match word {
            0 => &self.above,
            _ => &self.below[word - 16],
        }
    }

    fn order(&self, order: Ordering) -> Ordering {
        match self.mutant {
            Mutant::Relaxed => Ordering::Relaxed,
            _ => order,
        }
    }
}

impl Words for &Small {
    fn set(&self, word: usize, bits: u64, order: Ordering) -> u64 {
        self.word(word).fetch_or(bits, self.order(order))
    }

    fn take(&self, word: usize, order: Ordering) -> u64 {
        // The others belong to places that nobody has here.
        match word {
            0 | 16 | 17 => self.word(word).swap(0, self.order(order)),
            _ => 0,
        }
    }
}

/// The product's `tell` with its two steps turned round.
fn tell_above_first(words: &Small, place: usize) -> bool {
    let word = place / 64;
    let rings = words.above.fetch_or(1 << word, Ordering::AcqRel) & 1 << word == 0;
    words.below[word].fetch_or(1 << (place % 64), Ordering::Release);
    rings
}

/// The product's `hear` with its two steps turned round.
fn hear_below_first(words: &Small, mut each: impl FnMut(usize)) {
    let below = [0, 1].map(|word| words.below[word].swap(0, Ordering::Acquire));
    words.above.swap(0, Ordering::AcqRel);
    for place in 0..128 {
        if below[place / 64] >> (place % 64) & 1 == 1 {
            each(place);
        }
    }
}

struct Shared {
    words: Small,
    /// What each place published.
    published: [AtomicUsize; 2],
    /// Rings that the reader has not heard.
    rings: AtomicUsize,
}

/// Whether in some order one of two that tell is not heard, or what it published is not seen.
fn loses(mutant: Mutant, places: [usize; 2]) -> bool {
    let model = move || {
        loom::model(move || {
            let shared = Arc::new(Shared {
                words: Small {
                    above: AtomicU64::new(0),
                    below: [(), ()].map(|()| AtomicU64::new(0)),
                    mutant,
                },
                published: [(), ()].map(|()| AtomicUsize::new(0)),
                rings: AtomicUsize::new(0),
            });
            let tellers: Vec<_> = places
                .into_iter()
                .enumerate()
                .map(|(nth, place)| {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || {
                        shared.published[nth].store(1, Ordering::Relaxed);
                        let rings = match mutant {
                            Mutant::AboveFirst => tell_above_first(&shared.words, place),
                            _ => Board::new(&shared.words).tell(place),
                        };
                        if rings {
                            // As a byte in a socket: who reads it sees what was done before.
                            shared.rings.fetch_add(1, Ordering::AcqRel);
                        }
                    })
                })
                .collect();
            let mut heard = [false; 2];
            let mut hear = || {
                if shared.rings.swap(0, Ordering::AcqRel) == 0 {
                    return;
                }
                let mut each = |place| {
                    let nth = places.iter().position(|it| *it == place).expect("a place");
                    heard[nth] = true;
                    assert_eq!(shared.published[nth].load(Ordering::Relaxed), 1, "not seen");
                };
                match mutant {
                    Mutant::BelowFirst => hear_below_first(&shared.words, &mut each),
                    _ => Board::new(&shared.words).hear(&mut each),
                }
            };
            // While they tell, and when they have.
            hear();
            for teller in tellers {
                teller.join().expect("it told");
            }
            hear();
            assert!(heard == [true; 2], "not heard");
        });
    };
    let Some(text) = panic_of(model) else {
        return false;
    };
    assert!(
        text.contains("not heard") || text.contains("not seen"),
        "{text}"
    );
    true
}

#[test]
fn no_news_are_lost_in_any_order_and_each_turned_order_loses_some() {
    for places in [[3, 7], [3, 64]] {
        assert!(!loses(Mutant::None, places), "{places:?}");
        assert!(loses(Mutant::AboveFirst, places), "{places:?}");
        assert!(loses(Mutant::Relaxed, places), "{places:?}");
    }
    // Who is alone in its word rings, and is found in the end.
    assert!(loses(Mutant::BelowFirst, [3, 7]));
}

//! Places for rings in a VM's memory pool: first fit, page-aligned, checked against overlap.
//!
//! A place is free, used by a ring, or *lingering*: an application of the guest still maps it
//! although its ring is gone (the daemon restarted). Lingering places come from the guest agent's
//! Hello and go by its Release; a guest that lies about them only spoils its own pool. There are at
//! most [`MOST`] of them: what would make more stays lingering, so that no message takes long.

use vnplug_ring::control::RingPlace;
use vnplug_ring::pool::FIRST_RING;

const PAGE: u64 = 4096;
/// Places that a guest may name in a Hello: as many as it may have ports, and more.
const MOST_NAMED: usize = 4096;
/// Lingering places of a pool.
const MOST: usize = 4096;

/// The places of one pool.
#[derive(Debug)]
pub(crate) struct Places {
    len: u64,
    used: Vec<RingPlace>,
    lingering: Vec<RingPlace>,
}

impl Places {
    /// A pool of `len` bytes, all free but its first page.
    pub(crate) fn new(len: u64) -> Self {
        Self {
            len,
            used: Vec::new(),
            lingering: Vec::new(),
        }
    }

    /// Takes a place of at least `len` bytes, or `None` when no gap is large enough.
    pub(crate) fn take(&mut self, len: u64) -> Option<RingPlace> {
        let len = len.checked_next_multiple_of(PAGE)?;
        let mut taken: Vec<RingPlace> = self.used.iter().chain(&self.lingering).copied().collect();
        taken.sort_by_key(|place| place.offset);
        let mut offset = FIRST_RING;
        for place in taken {
            if place.offset.saturating_sub(offset) >= len {
                break;
            }
            offset = offset.max(place.offset + place.len);
        }
        if offset.checked_add(len)? > self.len {
            return None;
        }
        let place = RingPlace { offset, len };
        self.used.push(place);
        Some(place)
    }

    /// Whether all of these can be taken.
    pub(crate) fn fit(&mut self, lens: &[u64]) -> bool {
        let before = self.used.len();
        let all = lens.iter().all(|&len| len == 0 || self.take(len).is_some());
        self.used.truncate(before);
        all
    }

    /// Gives a place back.
    pub(crate) fn give(&mut self, place: RingPlace) {
        self.used.retain(|used| *used != place);
    }

    /// Notes places that applications still map; impossible ones are ignored.
    pub(crate) fn linger(&mut self, places: &[RingPlace]) {
        let possible = places
            .iter()
            .take(MOST_NAMED)
            .filter(|place| self.is_possible(place));
        let possible: Vec<RingPlace> = possible.copied().collect();
        self.lingering.extend(possible);
        // Overlapping ones become one, so that a release cuts each page out of one place only.
        self.lingering.sort_unstable_by_key(|place| place.offset);
        self.lingering.dedup_by(|next, kept| {
            let end = kept.offset + kept.len;
            let joins = next.offset <= end;
            if joins {
                kept.len = end.max(next.offset + next.len) - kept.offset;
            }
            joins
        });
        self.bound();
    }

    /// Makes one of the last places, and of what lies between them, if there are too many.
    fn bound(&mut self) {
        if self.lingering.len() <= MOST {
            return;
        }
        let end = self
            .lingering
            .last()
            .map_or(0, |last| last.offset + last.len);
        self.lingering.truncate(MOST);
        if let Some(last) = self.lingering.last_mut() {
            last.len = end - last.offset;
        }
    }

    /// Forgets lingering places, whole or in part; impossible ones are ignored.
    pub(crate) fn release(&mut self, places: &[RingPlace]) {
        // A guest may name thousands of places in each message: both lists are walked once.
        let possible = places.iter().filter(|place| self.is_possible(place));
        let mut gone: Vec<(u64, u64)> = possible
            .map(|place| (place.offset, place.offset + place.len))
            .collect();
        gone.sort_unstable();
        gone.dedup_by(|next, kept| {
            let joins = next.0 <= kept.1;
            if joins {
                kept.1 = kept.1.max(next.1);
            }
            joins
        });
        let mut left = Vec::new();
        for place in &self.lingering {
            let (mut at, end) = (place.offset, place.offset + place.len);
            let first = gone.partition_point(|&(_, gone_end)| gone_end <= at);
            for &(gone_at, gone_end) in gone[first..].iter().take_while(|gone| gone.0 < end) {
                if at < gone_at {
                    left.push(RingPlace {
                        offset: at,
                        len: gone_at - at,
                    });
                }
                at = at.max(gone_end);
            }
            if at < end {
                left.push(RingPlace {
                    offset: at,
                    len: end - at,
                });
            }
        }
        self.lingering = left;
        self.bound();
    }

    fn is_possible(&self, place: &RingPlace) -> bool {
        let end = place.offset.checked_add(place.len);
        place.offset >= FIRST_RING
            && place.len > 0
            && place.offset.is_multiple_of(PAGE)
            && place.len.is_multiple_of(PAGE)
            && end.is_some_and(|end| end <= self.len)
    }

    /// Forgets all lingering places: a new agent named the ones that count.
    pub(crate) fn release_all(&mut self) {
        self.lingering.clear();
    }

    /// Bytes not taken.
    pub(crate) fn free(&self) -> u64 {
        let taken: u64 = self
            .used
            .iter()
            .chain(&self.lingering)
            .map(|place| place.len)
            .sum();
        (self.len - FIRST_RING).saturating_sub(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_never_overlap_and_are_found_again() {
        let mut places = Places::new(64 * PAGE);
        let mut taken: Vec<RingPlace> = Vec::new();
        let mut state = 12_345_u64;
        for _ in 0..10_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            if state >> 63 == 0 && !taken.is_empty() {
                places.give(taken.swap_remove((state >> 32) as usize % taken.len()));
            } else if let Some(new) = places.take((state >> 40) % (9 * PAGE) + 1) {
                assert!(new.offset >= FIRST_RING && new.offset + new.len <= 64 * PAGE);
                for old in &taken {
                    assert!(
                        new.offset >= old.offset + old.len || old.offset >= new.offset + new.len
                    );
                }
                taken.push(new);
            }
        }
        for place in taken {
            places.give(place);
        }
        assert_eq!(places.free(), 63 * PAGE);
        assert!(places.take(63 * PAGE).is_some() && places.take(1).is_none());
    }

    #[test]
    fn a_guest_cannot_shift_rings_off_their_pages() {
        let mut places = Places::new(16 * PAGE);
        for (offset, len) in [
            (5 * PAGE, 2 * PAGE + 1),
            (0, PAGE),
            (PAGE, 0),
            (PAGE + 8, PAGE),
        ] {
            places.linger(&[RingPlace { offset, len }]);
        }
        let first = places.take(15 * PAGE).unwrap();
        assert_eq!(
            first,
            RingPlace {
                offset: PAGE,
                len: 15 * PAGE
            }
        );
    }

    #[test]
    fn overlapping_lies_do_not_multiply() {
        let mut places = Places::new(10_000 * PAGE);
        let lie = RingPlace {
            offset: PAGE,
            len: 9_000 * PAGE,
        };
        places.linger(&[lie; 4_000]);
        let holes: Vec<RingPlace> = (1..4_000)
            .map(|hole| RingPlace {
                offset: 2 * hole * PAGE,
                len: PAGE,
            })
            .collect();
        places.release(&holes);
        assert!(places.lingering.len() <= holes.len() + 1);
    }

    #[test]
    fn many_messages_make_no_more_pieces_than_one() {
        let pages = 1 << 17;
        let mut places = Places::new(pages * PAGE);
        places.linger(&[RingPlace {
            offset: PAGE,
            len: (pages - 1) * PAGE,
        }]);
        // Every second page of half a gigabyte, in messages of the longest kind.
        let holes: Vec<RingPlace> = (1..pages / 2)
            .map(|hole| RingPlace {
                offset: 2 * hole * PAGE,
                len: PAGE,
            })
            .collect();
        let begun = std::time::Instant::now();
        for message in holes.chunks(4_095) {
            places.release(message);
            assert!(places.lingering.len() <= MOST, "{}", places.lingering.len());
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(2));
        // Nothing is free that was not released; and all of it is when all is.
        assert_eq!(places.take(2 * PAGE), None);
        places.release(&[RingPlace {
            offset: PAGE,
            len: (pages - 1) * PAGE,
        }]);
        assert_eq!(places.free(), (pages - 1) * PAGE);
    }

    #[test]
    fn a_lingering_place_is_released_in_parts() {
        let mut places = Places::new(16 * PAGE);
        places.linger(&[RingPlace {
            offset: PAGE,
            len: 8 * PAGE,
        }]);
        places.release(&[
            RingPlace {
                offset: 5 * PAGE,
                len: PAGE,
            },
            RingPlace {
                offset: 2 * PAGE,
                len: 2 * PAGE,
            },
        ]);
        assert_eq!(places.free(), (15 - 5) * PAGE);
        assert_eq!(places.take(2 * PAGE).unwrap().offset, 2 * PAGE);
        places.release(&[RingPlace {
            offset: PAGE,
            len: 8 * PAGE,
        }]);
        assert_eq!(places.free(), (15 - 2) * PAGE);
    }

    #[test]
    fn lingering_places_are_not_given_out_until_released() {
        let mut places = Places::new(4 * PAGE);
        let mapped = RingPlace {
            offset: PAGE,
            len: 2 * PAGE,
        };
        let lie = RingPlace {
            offset: u64::MAX - PAGE + 1,
            len: PAGE,
        };
        places.linger(&[mapped, lie]);
        assert_eq!(places.take(2 * PAGE), None);
        places.release(&[mapped]);
        assert_eq!(places.take(2 * PAGE), Some(mapped));
    }
}

//! The part of the table that the kernel instance of a switch reads, too (`twin/`): where a station is, and when
//! it was heard.
//!
//! ```text
//! byte  0  sequence: odd while the slot is written        one writer: the thread that forwards
//!       4  port                                           the same
//!       6  flags: 1, it never moves                       the same
//!       8  key, 0: free                                   the same
//!      16  second in which it was heard, by the clock of  that thread, the kernel instance, and lanes
//!          the kernel (CLOCK_MONOTONIC)
//!      24  nothing
//! ```
//!
//! Sequence, port and flags are one word. Who reads beside the writer reads that word, the key, and the word again:
//! if it is the same, and even, port and key are of one station. The thread that forwards is the only writer of
//! both, and reads without that.
//!
//! Who hears a station beside the writer writes the second, and then looks at the word once more. The writer that moves
//! a station or forgets it because of its age makes the word odd first, and then looks at the second. So one of both finds
//! out: the writer moves what was heard, or who heard it gives the frame to the writer. Nothing that was heard is lost.

use std::sync::atomic::{Ordering, fence};

use vnplug_ring::Region;

/// The shared part of all slots.
#[derive(Debug, Clone)]
pub(crate) struct Slots {
    region: Region,
    mask: usize,
}

/// What a slot says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Said {
    pub(super) key: u64,
    pub(super) port: u16,
    pub(super) is_pinned: bool,
    pub(super) heard_s: u32,
}

impl Slots {
    /// Bytes of a slot.
    pub(crate) const BYTES: u64 = 32;
    /// Where it has its parts.
    pub(crate) const WORD: u64 = 0;
    pub(crate) const KEY: u64 = 8;
    pub(crate) const HEARD: u64 = 16;
    /// Bits of the word.
    pub(crate) const PORT_SHIFT: u32 = 32;
    pub(crate) const PINNED_SHIFT: u32 = 48;

    /// `count` slots, a power of two, that nobody else reads.
    pub(super) fn private(count: usize) -> Self {
        Self::of(Region::heap(count as u64 * Self::BYTES))
    }

    /// All slots of a memory, as many as a power of two.
    pub(crate) fn of(region: Region) -> Self {
        let count = (region.len() / Self::BYTES) as usize;
        assert!(count.is_power_of_two(), "the caller's shape");
        Self {
            region,
            mask: count - 1,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.mask + 1
    }

    pub(super) fn mask(&self) -> usize {
        self.mask
    }

    #[inline]
    fn load(&self, slot: usize, part: u64) -> u64 {
        // Relaxed: our own thread is the only one that writes what it depends on.
        self.region
            .load_u64(slot as u64 * Self::BYTES + part, Ordering::Relaxed)
    }

    #[inline]
    fn store(&self, slot: usize, part: u64, value: u64, order: Ordering) {
        self.region
            .store_u64(slot as u64 * Self::BYTES + part, value, order);
    }

    /// 0: it is free.
    #[inline]
    pub(super) fn key(&self, slot: usize) -> u64 {
        self.load(slot, Self::KEY)
    }

    #[inline]
    pub(super) fn port(&self, slot: usize) -> u16 {
        (self.load(slot, Self::WORD) >> Self::PORT_SHIFT) as u16
    }

    #[inline]
    pub(super) fn is_pinned(&self, slot: usize) -> bool {
        self.load(slot, Self::WORD) >> Self::PINNED_SHIFT & 1 != 0
    }

    #[inline]
    pub(super) fn heard_s(&self, slot: usize) -> u32 {
        self.load(slot, Self::HEARD) as u32
    }

    /// Its station was heard by a thread beside the writer, which found this word and second. False: it may be another
    /// station's slot by now, and it was not heard for sure.
    #[inline]
    pub(super) fn hear_beside(&self, slot: usize, (word, heard_s): (u64, u32), now_s: u32) -> bool {
        // A second that others have written since is newer, or another station's.
        let at = slot as u64 * Self::BYTES + Self::HEARD;
        self.region.exchange_u64(at, heard_s.into(), now_s.into());
        // Pairs with the fence in `close`: it finds the second, or we find its word.
        fence(Ordering::SeqCst);
        self.load(slot, Self::WORD) == word
    }

    /// Begins to change a slot: nobody beside finds its station there any more. When it was heard last.
    pub(super) fn close(&self, slot: usize) -> u32 {
        let word = self.load(slot, Self::WORD) | 1;
        self.store(slot, Self::WORD, word, Ordering::Relaxed);
        // Pairs with the fence in `hear_beside`, and with the exchange of the kernel instance.
        fence(Ordering::SeqCst);
        self.heard_s(slot)
    }

    /// Leaves a slot as it is that was [closed](Self::close).
    pub(super) fn reopen(&self, slot: usize) {
        let said = self.said(slot);
        self.put(slot, said);
    }

    /// Its station was heard.
    #[inline]
    pub(super) fn hear(&self, slot: usize, now_s: u32) {
        self.store(slot, Self::HEARD, now_s.into(), Ordering::Relaxed);
    }

    /// What a slot says of the station of this key, for a thread beside the writer.
    #[inline]
    pub(super) fn read_beside(&self, slot: usize, key: u64) -> Option<super::Seen> {
        let at = slot as u64 * Self::BYTES;
        // Acquire: pairs with the Release in `put`; who has this word has the key that belongs to it.
        let word = self.region.load_u64(at + Self::WORD, Ordering::Acquire);
        let (found, heard_s) = (self.key(slot), self.heard_s(slot));
        // Pairs with the fence in `put`: who has a newer key finds the word odd, or another one than before.
        fence(Ordering::Acquire);
        let after = self.load(slot, Self::WORD);
        let is_whole = word == after && word & 1 == 0 && found == key;
        is_whole.then_some(super::Seen {
            slot,
            word,
            port: (word >> Self::PORT_SHIFT) as u16,
            is_pinned: word >> Self::PINNED_SHIFT & 1 != 0,
            heard_s,
        })
    }

    pub(super) fn said(&self, slot: usize) -> Said {
        Said {
            key: self.key(slot),
            port: self.port(slot),
            is_pinned: self.is_pinned(slot),
            heard_s: self.heard_s(slot),
        }
    }

    /// Writes a slot, so that nobody takes parts of two stations for one.
    pub(super) fn put(&self, slot: usize, said: Said) {
        let sequence = self.load(slot, Self::WORD) as u32 | 1;
        let word = u64::from(said.port) << Self::PORT_SHIFT
            | u64::from(said.is_pinned) << Self::PINNED_SHIFT;
        self.store(
            slot,
            Self::WORD,
            word | u64::from(sequence),
            Ordering::Relaxed,
        );
        // Pairs with the order in which the kernel instance loads: who has the new key finds the word odd, or
        // another one than before.
        fence(Ordering::Release);
        self.store(slot, Self::KEY, said.key, Ordering::Relaxed);
        self.store(slot, Self::HEARD, said.heard_s.into(), Ordering::Relaxed);
        // Release: pairs with the same loads; who has this word has the key that belongs to it.
        let sequence = sequence.wrapping_add(1);
        self.store(
            slot,
            Self::WORD,
            word | u64::from(sequence),
            Ordering::Release,
        );
    }

    /// Frees a slot.
    pub(super) fn clear(&self, slot: usize) {
        let free = Said {
            key: 0,
            port: 0,
            is_pinned: false,
            heard_s: 0,
        };
        self.put(slot, free);
    }

    /// The fault: the slot is one station's, then another's, part by part.
    #[cfg(test)]
    pub(super) fn tear(&self, slot: usize, stations: [(u64, u16); 2]) {
        self.store(slot, Self::HEARD, u32::MAX.into(), Ordering::Relaxed);
        for (key, port) in stations {
            let word = u64::from(port) << Self::PORT_SHIFT;
            self.store(slot, Self::KEY, key, Ordering::Release);
            self.store(slot, Self::WORD, word, Ordering::Release);
        }
    }

    /// Whether its writer died within it.
    pub(super) fn is_torn(&self, slot: usize) -> bool {
        self.load(slot, Self::WORD) & 1 != 0
    }
}

//! The table, as threads find stations in it that do not write it.

use super::slots::Slots;
use super::{Key, home};

/// The table for threads that read it beside the one that writes.
#[derive(Debug, Clone)]
pub(crate) struct View {
    pub(super) shared: Slots,
    pub(super) secret: (u64, u64),
}

/// A station, as such a thread finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(super) slot: usize,
    pub(super) word: u64,
    pub(crate) port: u16,
    pub(super) is_pinned: bool,
    pub(super) heard_s: u32,
}

impl View {
    /// Where a station is, heard lately or not. One whose slot is being written is not found.
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<Seen> {
        let mut slot = home(key, self.secret) & self.shared.mask();
        for _ in 0..PROBES {
            match self.shared.key(slot) {
                0 => return None,
                found if found == key.0 => return self.shared.read_beside(slot, key.0),
                _ => slot = (slot + 1) & self.shared.mask(),
            }
        }
        None
    }

    /// It was heard. False: its slot was changed meanwhile, and who forwards must hear it.
    #[inline]
    #[must_use]
    pub(crate) fn hear(&self, seen: &Seen, now_s: u32) -> bool {
        seen.heard_s >= now_s
            || self
                .shared
                .hear_beside(seen.slot, (seen.word, seen.heard_s), now_s)
    }
}

impl Seen {
    /// Whether it was not heard for `age_s`.
    #[inline]
    pub(crate) fn is_old(&self, now_s: u32, age_s: u32) -> bool {
        !self.is_pinned && now_s.saturating_sub(self.heard_s) > age_s
    }
}

/// Slots at which a reader looks for one station.
const PROBES: usize = 64;

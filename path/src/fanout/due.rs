//! When to look at which reader although no frame came for it.
//!
//! A reader that waits for its watermark is due at a time. In a group it is also due when the arena,
//! which waits for nobody, has moved so far that its unread packets will soon be overwritten; the
//! frames that move it may be those of other members. None of this is touched per frame: a reader
//! is added when it is first seen to wait, and removed when it is rung.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::commons::Commons;

/// The seats of readers that are due some time.
#[derive(Debug, Default)]
pub(super) struct Due {
    /// By the clock, in microseconds.
    times: Seats,
    /// By the place where an arena is; only those that a reader waits on.
    arenas: Vec<(Arc<Commons>, Seats)>,
}

/// When each is due, and which it is.
type Seats = BTreeSet<(u64, u32)>;

impl Due {
    /// The next time at which a reader is due.
    pub(super) fn first_us(&self) -> Option<u64> {
        self.times.first().map(|(due_us, _)| *due_us)
    }

    /// Takes a seat out whose time has come.
    pub(super) fn take(&mut self, now_us: u64) -> Option<u32> {
        let &(due_us, _) = self.times.first()?;
        (due_us <= now_us)
            .then(|| self.times.pop_first())?
            .map(|(_, at)| at)
    }

    /// Takes a seat out whose arena has moved too far. Once per batch: one comparison for each arena
    /// that a reader waits on.
    #[inline]
    pub(super) fn take_turned(&mut self) -> Option<u32> {
        let turned = |(commons, seats): &mut (Arc<Commons>, Seats)| {
            let &(due_at, _) = seats.first()?;
            (commons.at() >= due_at).then(|| seats.pop_first())?
        };
        let (_, at) = self.arenas.iter_mut().find_map(turned)?;
        self.arenas.retain(|(_, seats)| !seats.is_empty());
        Some(at)
    }

    /// A seat is due at another time than before.
    pub(super) fn at_time(&mut self, at: u32, before: Option<u64>, due_us: Option<u64>) {
        if let Some(before) = before {
            self.times.remove(&(before, at));
        }
        self.times.extend(due_us.map(|due_us| (due_us, at)));
    }

    /// A seat is due at another place of its arena than before.
    pub(super) fn at_place(
        &mut self,
        at: u32,
        commons: &Arc<Commons>,
        before: Option<u64>,
        due_at: Option<u64>,
    ) {
        let is_it = |(other, _): &(Arc<Commons>, _)| Arc::ptr_eq(other, commons);
        let found = self.arenas.iter().position(is_it);
        let nth = match (found, due_at) {
            (Some(nth), _) => nth,
            (None, None) => return,
            (None, Some(_)) => {
                self.arenas.push((Arc::clone(commons), Seats::new()));
                self.arenas.len() - 1
            }
        };
        let seats = &mut self.arenas[nth].1;
        if let Some(before) = before {
            seats.remove(&(before, at));
        }
        seats.extend(due_at.map(|due_at| (due_at, at)));
        if seats.is_empty() {
            self.arenas.swap_remove(nth);
        }
    }
}

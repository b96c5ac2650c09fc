//! Who may have how many places of the table, and which they are.
//!
//! The slots of a port are a list, each by its place plus 1: a port that leaves costs what it has, not what the table
//! has. A port has [`Limits::own`] places whatever others have; beyond them, uplinks and all others have parts that do
//! not touch each other.

use super::{Key, Limits, Slot, Table};

/// What a port has of the table.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Places {
    pub(super) count: u32,
    /// The first of its slots, plus 1; 0: none.
    pub(super) first: u32,
    /// The most that it may have, if not as many as others.
    most: Option<u32>,
    is_uplink: bool,
}

impl Places {
    /// Of [`Table::beyond`].
    fn kind(&self) -> usize {
        usize::from(!self.is_uplink)
    }
}

impl Table {
    /// The most addresses that this port may have; `None`: as many as others.
    pub fn set_most(&mut self, port: u16, most: Option<u32>) {
        self.places(port).most = most;
    }

    /// This port is an uplink, or is none any more.
    pub fn set_uplink(&mut self, port: u16, is_uplink: bool) {
        let own = self.limits.own;
        let places = self.places(port);
        let beyond = (places.count as usize).saturating_sub(own);
        let before = places.kind();
        places.is_uplink = is_uplink;
        let now = places.kind();
        self.beyond[before] -= beyond;
        self.beyond[now] += beyond;
    }

    pub(super) fn places(&mut self, port: u16) -> &mut Places {
        let port = usize::from(port);
        if self.ports.len() <= port {
            self.ports.resize(port + 1, Places::default());
        }
        &mut self.ports[port]
    }

    /// Whether a port has as many addresses as it may have.
    pub(crate) fn is_full(&mut self, port: u16) -> bool {
        let Limits { all, each, own, .. } = self.limits;
        let places = *self.places(port);
        let count = places.count as usize;
        let [of_uplinks, of_others] = self.beyond;
        let is_crowded =
            of_uplinks + of_others >= all - all / 4 || (!places.is_uplink && of_others >= all / 2);
        count >= places.most.map_or(each, |most| most as usize) || (count >= own && is_crowded)
    }

    /// The stations of a port, old ones that are not swept yet among them.
    pub(crate) fn of_port(&self, port: u16) -> impl Iterator<Item = Key> {
        let first = self.ports.get(usize::from(port)).map_or(0, |it| it.first);
        let slot = |place: u32| (place as usize).checked_sub(1);
        std::iter::successors(slot(first), move |at| slot(self.slots[*at].after))
            .map(|at| Key(self.shared.key(at)))
    }

    /// Puts a slot at the begin of its port's list.
    pub(super) fn link(&mut self, at: usize) {
        self.changes += 1;
        let (place, own) = (at as u32 + 1, self.limits.own);
        let places = self.places(self.shared.port(at));
        let first = std::mem::replace(&mut places.first, place);
        places.count += 1;
        let (kind, is_beyond) = (places.kind(), places.count as usize > own);
        self.beyond[kind] += usize::from(is_beyond);
        (self.slots[at].before, self.slots[at].after) = (0, first);
        if first != 0 {
            self.slots[first as usize - 1].before = place;
        }
    }

    /// Takes a slot out of its port's list.
    pub(super) fn unlink(&mut self, at: usize) {
        self.changes += 1;
        let Slot { before, after, .. } = self.slots[at];
        let (port, own) = (self.shared.port(at), self.limits.own);
        let places = self.places(port);
        let (kind, is_beyond) = (places.kind(), places.count as usize > own);
        places.count -= 1;
        self.beyond[kind] -= usize::from(is_beyond);
        self.join(before, after, port);
    }

    /// Makes two neighbours in a port's list, of which one may be its end.
    pub(super) fn join(&mut self, before: u32, after: u32, port: u16) {
        match before {
            0 => self.places(port).first = after,
            before => self.slots[before as usize - 1].after = after,
        }
        if after != 0 {
            self.slots[after as usize - 1].before = before;
        }
    }
}

//! Where stations are: a table of addresses, bounded for each port and in all.
//!
//! A port that makes up addresses fills its own part only, so that it can make the switch forget
//! nobody, and many of them do not fill the table: each port keeps a few places of its own, and uplinks a part
//! ([`Limits::own`]). The place of an address depends on a secret: nobody can choose addresses that collide.
//!
//! What is said of a slot is in two parts: `slots` has what the kernel instance of a switch reads, too, and the
//! rest is nobody else's.

mod places;
mod slots;
mod view;

use vnplug_os::event;
use vnplug_ring::Region;

use places::Places;
use slots::Said;
pub(crate) use slots::Slots;
pub(crate) use view::{Seen, View};

/// A station's address and its VLAN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// Of an address (IEEE 802, six bytes in the order of the wire) in a VLAN.
    #[inline]
    pub fn new(address: [u8; 6], vlan: u16) -> Self {
        let [a, b, c, d, e, f] = address;
        let address = u64::from_be_bytes([0, 0, a, b, c, d, e, f]);
        Self(USED | u64::from(vlan & 0xfff) << 48 | address)
    }

    /// The address.
    pub fn address(self) -> [u8; 6] {
        let [_, _, a, b, c, d, e, f] = self.0.to_be_bytes();
        [a, b, c, d, e, f]
    }

    /// The VLAN.
    pub fn vlan(self) -> u16 {
        (self.0 >> 48) as u16 & 0xfff
    }
}

/// A place that is in use; 0 is free.
const USED: u64 = 1 << 63;

/// One address, as [`Table::entries`] tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Whose place it is.
    pub key: Key,
    /// Where it is in the table.
    pub slot: usize,
    /// Where the station is.
    pub port: u16,
    /// Seconds since it was heard last.
    pub age_s: u32,
    /// It never moves.
    pub is_pinned: bool,
}

/// What became of a source address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learned {
    /// It was there.
    Known,
    /// It is there now.
    New,
    /// It was at another port.
    Moved {
        /// The port that does not seem to be its own.
        stray: u16,
    },
    /// It is at another port, and has come there too lately to move again.
    Held {
        /// The port that does not seem to be its own.
        stray: u16,
    },
    /// It is at another port, and never moves.
    Pinned,
    /// The port, or the table, has as many as it may have.
    Full,
}

/// How large a table is, and how long it remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Addresses in all.
    pub all: usize,
    /// Addresses at one port.
    pub each: usize,
    /// Addresses that each port has places for, whatever others have. Of `all`, they take a quarter at most; all
    /// ports but uplinks have at most half of it beyond their own, and uplinks have the rest.
    pub own: usize,
    /// Seconds after which an address that is not heard is forgotten.
    pub age_s: u32,
    /// Seconds for which an address stays where it has come to.
    pub hold_s: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            all: 65_536,
            each: 4_096,
            own: 16,
            // The default of IEEE 802.1Q-2018, 8.8.3.
            age_s: 300,
            hold_s: 2,
        }
    }
}

/// What only the table knows of a slot.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    came_s: u32,
    /// The slots before and after in the list of the port's, each by its place plus 1; 0: none. A port that
    /// leaves costs what it has, not what the table has.
    before: u32,
    after: u32,
    /// Where it was for long, or first.
    home: u16,
}

/// The addresses that a switch knows. Times are seconds of a clock of the caller's.
#[derive(Debug)]
pub struct Table {
    shared: Slots,
    slots: Box<[Slot]>,
    limits: Limits,
    len: usize,
    /// By port.
    ports: Vec<Places>,
    /// Addresses beyond the ports' own: of uplinks, and of others.
    beyond: [usize; 2],
    secret: (u64, u64),
    /// Where aging goes on.
    hand: usize,
    /// The second in which there was no room last, and how many slots may still be looked at for it then.
    crowded: (u32, usize),
    changes: u64,
}

impl Table {
    /// An empty one.
    pub fn new(limits: Limits) -> Self {
        let shared = Slots::private(Self::places_of(limits));
        Self::over(limits, shared, Self::new_secret())
    }

    /// How many slots such a table has.
    pub(crate) fn places_of(limits: Limits) -> usize {
        (limits.all.max(8) * 2).next_power_of_two()
    }

    /// What decides the places of addresses.
    pub(crate) fn new_secret() -> (u64, u64) {
        (event::random(), event::random() | 1)
    }

    fn over(limits: Limits, shared: Slots, secret: (u64, u64)) -> Self {
        Self {
            slots: vec![Slot::default(); shared.len()].into_boxed_slice(),
            shared,
            limits,
            len: 0,
            ports: Vec::new(),
            beyond: [0; 2],
            secret,
            hand: 0,
            crowded: (0, 0),
            changes: 0,
        }
    }

    /// One in memory that others read, with what is there already of ports that are `kept`. What its last
    /// writer left half done is repaired.
    pub(crate) fn take_over(
        limits: Limits,
        memory: Region,
        secret: (u64, u64),
        kept: impl Fn(u16) -> bool,
    ) -> Self {
        let mut table = Self::over(limits, Slots::of(memory), secret);
        let used: Vec<usize> = (0..table.slots.len())
            .filter(|at| table.shared.key(*at) != 0 || table.shared.is_torn(*at))
            .collect();
        for &at in &used {
            let said = table.shared.said(at);
            if said.key == 0 {
                table.shared.clear(at);
                continue;
            }
            // NB: also what goes in a moment: what is removed is in a list, and its followers move up.
            table.slots[at].home = said.port;
            table.link(at);
            table.len += 1;
        }
        let torn: Vec<u64> = used
            .iter()
            .filter(|at| table.shared.is_torn(**at))
            .map(|at| table.shared.key(*at))
            .collect();
        // What is found elsewhere is there twice: its writer was moving it.
        let is_bad = |table: &Self, at: usize| {
            let key = table.shared.key(at);
            let is_kept = kept(table.shared.port(at)) && !table.shared.is_pinned(at);
            key != 0 && (!is_kept || torn.contains(&key) || table.place(Key(key)) != Some(at))
        };
        let mut at = 0;
        while at < table.slots.len() {
            // What follows may move here.
            match is_bad(&table, at) {
                true => table.remove(at),
                false => at += 1,
            }
        }
        table
    }

    /// For threads that read it beside this one.
    pub(crate) fn view(&self) -> View {
        View {
            shared: self.shared.clone(),
            secret: self.secret,
        }
    }

    /// How large it may become, and how long it remembers.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Remembers for this long from now on.
    pub fn set_age(&mut self, age_s: u32) {
        self.limits.age_s = age_s;
    }

    /// Addresses stay this long where they have come to.
    pub fn set_hold(&mut self, hold_s: u32) {
        self.limits.hold_s = hold_s;
    }

    /// The port of a station that was heard lately.
    #[inline]
    pub fn find(&self, key: Key, now_s: u32) -> Option<u16> {
        let at = self.place(key)?;
        (!self.is_old(at, now_s)).then(|| self.shared.port(at))
    }

    /// A station was heard at a port.
    #[inline]
    pub fn learn(&mut self, key: Key, port: u16, now_s: u32) -> Learned {
        let Some(at) = self.place(key) else {
            return self.add(key, port, now_s);
        };
        if self.shared.port(at) == port {
            self.shared.hear(at, now_s);
            return Learned::Known;
        }
        self.stray(at, port, now_s)
    }

    /// A station was heard at a port that it was not at.
    #[cold]
    fn stray(&mut self, at: usize, port: u16, now_s: u32) -> Learned {
        let is_old = self.is_old(at, now_s);
        let said = self.shared.said(at);
        if said.is_pinned {
            return Learned::Pinned;
        }
        let slot = &mut self.slots[at];
        let was_s = now_s.saturating_sub(slot.came_s);
        if was_s >= SETTLED_S {
            slot.home = said.port;
        }
        let stray = match port == slot.home {
            true => said.port,
            false => port,
        };
        if !is_old && was_s < self.limits.hold_s {
            return Learned::Held { stray };
        }
        // Without it where it was.
        let changes = self.changes;
        self.unlink(at);
        if self.is_full(port) {
            self.link(at);
            self.changes = changes;
            return Learned::Full;
        }
        let moved = Said {
            port,
            heard_s: now_s,
            ..said
        };
        self.shared.put(at, moved);
        self.slots[at].came_s = now_s;
        self.link(at);
        Learned::Moved { stray }
    }

    #[cold]
    fn add(&mut self, key: Key, port: u16, now_s: u32) -> Learned {
        let is_full = |it: &mut Self| it.len >= it.limits.all || it.is_full(port);
        if is_full(self) {
            self.look_for_room(now_s);
            if is_full(self) {
                return Learned::Full;
            }
        }
        self.insert(key, port, now_s, false);
        Learned::New
    }

    /// A station is at a port, whoever else sends as it, until it is [forgotten](Self::unpin). Says whether
    /// there was room.
    pub fn pin(&mut self, key: Key, port: u16, now_s: u32) -> bool {
        if let Some(at) = self.place(key) {
            if (self.shared.port(at), self.shared.is_pinned(at)) == (port, true) {
                return true;
            }
            self.remove(at);
        }
        if self.len >= self.limits.all {
            return false;
        }
        self.insert(key, port, now_s, true);
        true
    }

    /// Forgets a station that never moves, if it is at this port.
    pub fn unpin(&mut self, key: Key, port: u16) {
        if let Some(at) = self.place(key)
            && self.shared.is_pinned(at)
            && self.shared.port(at) == port
        {
            self.remove(at);
        }
    }

    /// The port that a station never leaves.
    #[inline]
    pub fn pinned(&self, key: Key) -> Option<u16> {
        let at = self.place(key)?;
        self.shared.is_pinned(at).then(|| self.shared.port(at))
    }

    /// There is room, and nobody of that key.
    fn insert(&mut self, key: Key, port: u16, now_s: u32, is_pinned: bool) {
        let mut at = self.home(key);
        while self.shared.key(at) != 0 {
            at = (at + 1) & self.shared.mask();
        }
        let said = Said {
            key: key.0,
            port,
            is_pinned,
            heard_s: now_s,
        };
        self.shared.put(at, said);
        self.slots[at] = Slot {
            came_s: now_s,
            home: port,
            ..Slot::default()
        };
        self.link(at);
        self.len += 1;
    }

    /// Forgets what is old, as there seems to be no room: within a second the whole table is looked at once, which
    /// finds all that there is, however many are refused.
    fn look_for_room(&mut self, now_s: u32) {
        if self.crowded.0 != now_s {
            self.crowded = (now_s, self.slots.len());
        }
        let slots = self.crowded.1.min(SWEEP);
        self.crowded.1 -= slots;
        self.sweep(now_s, slots);
    }

    /// Another number when a station came, went or moved.
    #[inline]
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Forgets what was not heard for long, in a part of the table: all of it, if it is called often
    /// enough.
    pub fn sweep(&mut self, now_s: u32, slots: usize) {
        for _ in 0..slots.min(self.slots.len()) {
            if self.shared.key(self.hand) != 0 && self.is_old(self.hand, now_s) {
                self.shared.close(self.hand);
                // Somebody else may have heard it a moment ago.
                if self.is_old(self.hand, now_s) {
                    // What follows may move here.
                    self.remove(self.hand);
                    continue;
                }
                self.shared.reopen(self.hand);
            }
            self.hand = (self.hand + 1) & (self.slots.len() - 1);
        }
    }

    /// Forgets all stations of a port that is gone; it costs what they are.
    pub fn forget(&mut self, port: u16) {
        loop {
            let first = self.places(port).first;
            if first == 0 {
                return;
            }
            self.remove(first as usize - 1);
        }
    }

    /// How many addresses it has, old ones that are not swept yet among them.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it knows nobody.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All stations that were heard lately.
    pub fn entries(&self, now_s: u32) -> impl Iterator<Item = Entry> {
        let used = (0..self.slots.len()).filter(|at| self.shared.key(*at) != 0);
        used.filter(move |at| !self.is_old(*at, now_s))
            .map(move |at| {
                let said = self.shared.said(at);
                Entry {
                    key: Key(said.key),
                    slot: at,
                    port: said.port,
                    age_s: now_s.saturating_sub(said.heard_s),
                    is_pinned: said.is_pinned,
                }
            })
    }

    #[inline]
    fn is_old(&self, at: usize, now_s: u32) -> bool {
        let age_s = now_s.saturating_sub(self.shared.heard_s(at));
        age_s > self.limits.age_s && !self.shared.is_pinned(at)
    }

    /// Where a key would be if nobody else were there.
    #[inline]
    fn home(&self, key: Key) -> usize {
        home(key, self.secret) & self.shared.mask()
    }

    /// Where a key is.
    #[inline]
    fn place(&self, key: Key) -> Option<usize> {
        let mut at = self.home(key);
        // Half of the slots are free, so this ends.
        loop {
            match self.shared.key(at) {
                0 => return None,
                found if found == key.0 => return Some(at),
                _ => at = (at + 1) & self.shared.mask(),
            }
        }
    }

    /// Frees a slot, and moves those up that are not where they would be but for it. Who reads beside us may find
    /// one twice meanwhile, or not at all, but never at another port.
    fn remove(&mut self, hole: usize) {
        self.remove_by(hole, Slots::close);
    }

    /// `last_heard` tells of a slot when its station was heard, before that moves.
    fn remove_by(&mut self, mut hole: usize, mut last_heard: impl FnMut(&Slots, usize) -> u32) {
        let mask = self.shared.mask();
        self.unlink(hole);
        self.len -= 1;
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let said = self.shared.said(at);
            if said.key == 0 {
                break;
            }
            let home = self.home(Key(said.key));
            // Whether `home` is not between the hole and here.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                let heard_s = last_heard(&self.shared, at);
                self.shared.put(hole, Said { heard_s, ..said });
                let slot = self.slots[at];
                self.slots[hole] = slot;
                // Its neighbours in the list find it there.
                let place = hole as u32 + 1;
                self.join(slot.before, place, said.port);
                self.join(place, slot.after, said.port);
                hole = at;
            }
        }
        self.shared.clear(hole);
        self.slots[hole] = Slot::default();
    }
}

#[cfg(test)]
impl Table {
    /// How far from where it would be a key is, or is not.
    pub(crate) fn distance(&self, key: Key) -> usize {
        let (home, mut count) = (self.home(key), 0);
        loop {
            let found = self.shared.key((home + count) & self.shared.mask());
            if found == 0 || found == key.0 {
                return count;
            }
            count += 1;
        }
    }

    /// Forgets one station.
    pub(crate) fn unlearn(&mut self, key: Key) {
        if let Some(at) = self.place(key) {
            self.remove(at);
        }
    }

    /// The fault: when those behind it were heard is taken down before nobody hears them there any more. What happens
    /// between the two is up to the caller.
    pub(crate) fn unlearn_carelessly(&mut self, key: Key, mut between: impl FnMut()) {
        if let Some(at) = self.place(key) {
            self.remove_by(at, |slots, at| {
                let heard_s = slots.heard_s(at);
                between();
                heard_s
            });
        }
    }

    /// Writes a stranger at another port into a station's slot, and the station again, without a sequence.
    pub(crate) fn tear(&mut self, key: Key, port: u16, other: u16) {
        self.shared
            .tear(self.home(key), [(key.0 ^ 1 << 40, other), (key.0, port)]);
    }
}

#[inline]
fn home(key: Key, secret: (u64, u64)) -> usize {
    let mixed = (key.0 ^ secret.0).wrapping_mul(secret.1);
    let mixed = (mixed ^ mixed >> 32).wrapping_mul(secret.1);
    (mixed >> 32) as usize
}

/// Seconds after which a station is at home where it is.
const SETTLED_S: u32 = 30;
/// Slots that are looked at at a time when there seems to be no room.
const SWEEP: usize = 1024;

#[cfg(test)]
mod tests;

//! The sending end of direct mode: frames for stations at other members go into rings to them, and not to
//! the switch; see [`vnplug_ring::direct`].

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send};
use vnplug_ring::direct::{SLOTS, TableReader};
use vnplug_ring::layout::{Meta, flags};
use vnplug_ring::offload::PREFIX;
use vnplug_ring::{Bell, Producer};

/// Rings to the other members.
#[derive(Debug)]
pub(super) struct Ways {
    table: TableReader,
    /// This member's slot.
    own: usize,
    to: [Option<Way>; SLOTS],
    /// Slots whose rings have frames that are not published, a bit each.
    touched: u32,
    /// The last frame found no room.
    is_full: bool,
}

/// A ring to one of them.
#[derive(Debug)]
pub(super) struct Way {
    pub(super) generation: u32,
    ring: Producer,
    bell: OwnedFd,
    /// Since when it has no room.
    full_since: Option<Instant>,
}

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Handed {
    /// It is in a member's ring, or dropped there since that member does not read.
    Over,
    /// The member's ring has no room now.
    Full,
    /// It is for the switch.
    ToTheSwitch,
}

impl Ways {
    pub(super) fn new(table: TableReader, own: usize) -> Self {
        Self {
            table,
            own,
            to: Default::default(),
            touched: 0,
            is_full: false,
        }
    }

    /// Hands a frame over, if it is for one station, at a member that can take it, from a station that is
    /// known to be here. A station that is not, the switch has to hear; and of a port with settings it
    /// knows none.
    #[inline]
    pub(super) fn hand(&mut self, meta: &Meta, frame: &[u8]) -> Handed {
        self.is_full = false;
        // IEEE 802.3-2018, 3.2: destination, source, EtherType. Frames with a tag are the switch's.
        let Some((to, rest)) = frame.split_first_chunk::<6>() else {
            return Handed::ToTheSwitch;
        };
        let Some((from, rest)) = rest.split_first_chunk::<6>() else {
            return Handed::ToTheSwitch;
        };
        let is_tagged = rest
            .first_chunk()
            .is_none_or(|it| is_tag(u16::from_be_bytes(*it)));
        if to[0] & 1 != 0 || is_tagged || self.table.is_watched() {
            return Handed::ToTheSwitch;
        }
        let (Some(slot), Some(own)) = (self.table.find(to), self.table.find(from)) else {
            return Handed::ToTheSwitch;
        };
        let member = self.table.member(slot);
        let way = self.to.get_mut(slot).and_then(Option::as_mut);
        let (Some(member), Some(way)) = (member, way) else {
            return Handed::ToTheSwitch;
        };
        if own != self.own || member.generation != way.generation {
            return Handed::ToTheSwitch;
        }
        let handed = way.push(meta, frame, member.merged);
        match handed {
            Handed::Over => self.touched |= 1 << slot,
            Handed::Full => {
                self.touched |= 1 << slot;
                self.is_full = true;
            }
            Handed::ToTheSwitch => {}
        }
        handed
    }

    /// Whether the last frame found no room at a member.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// Publishes what was handed over, and wakes those who sleep.
    #[inline]
    pub(super) fn flush(&mut self) {
        while self.touched != 0 {
            let slot = self.touched.trailing_zeros() as usize;
            self.touched &= self.touched - 1;
            if let Some(way) = &mut self.to[slot] {
                way.ring.publish();
                if way.ring.bell(0) == Bell::Ring {
                    way.ring_bell();
                }
            }
        }
    }

    pub(super) fn generation(&self, slot: usize) -> Option<u32> {
        self.to[slot].as_ref().map(|way| way.generation)
    }

    pub(super) fn set(&mut self, slot: usize, way: Option<Way>) {
        self.to[slot] = way;
    }
}

impl Way {
    /// To a member of this generation, which is told that the ring is laid.
    pub(super) fn new(ring: Producer, bell: OwnedFd, generation: u32) -> Self {
        let way = Self {
            generation,
            ring,
            bell,
            full_since: None,
        };
        way.ring_bell();
        way
    }

    #[inline]
    fn push(&mut self, meta: &Meta, frame: &[u8], merged: bool) -> Handed {
        // Until it has made its words those of this ring, and again when it reads no more.
        if !self.ring.is_attached() {
            return Handed::ToTheSwitch;
        }
        let is_due = meta.flags & flags::OFFLOAD != 0;
        let before = if is_due { PREFIX } else { 0 };
        let len = (before + frame.len()) as u32;
        if is_due && !merged || len > self.ring.geometry().snaplen {
            return Handed::ToTheSwitch;
        }
        match self.ring.has_room(len) {
            Ok(true) => {}
            Ok(false) => return self.is_full(),
            Err(_) => return self.lied(),
        }
        // One that frees room frame by frame makes nobody wait for each of them.
        if self.full_since.is_some() && self.ring.used() < self.ring.geometry().capacity / 2 {
            self.full_since = None;
        }
        match self.ring.push(meta, frame) {
            Ok(_) => Handed::Over,
            Err(_) => self.lied(),
        }
    }

    /// A member that does not read holds up nobody but, for a moment, who sends to it.
    #[cold]
    fn is_full(&mut self) -> Handed {
        let since = *self.full_since.get_or_insert_with(Instant::now);
        if since.elapsed() < LONGEST_WAIT {
            return Handed::Full;
        }
        self.ring.miss(1);
        Handed::Over
    }

    /// What the member says of its progress cannot be: it gets nothing here any more.
    #[cold]
    fn lied(&mut self) -> Handed {
        log::warn!("a member of the trust group writes nonsense; its frames go through the switch");
        self.ring.disown();
        Handed::ToTheSwitch
    }

    /// A full socket has woken it already, and a closed one has nobody behind it.
    #[cold]
    fn ring_bell(&self) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = send(&self.bell, &[1], flags);
    }
}

/// IEEE 802.1Q-2018, 9.5: C-TAG and S-TAG.
#[inline]
fn is_tag(ether_type: u16) -> bool {
    matches!(ether_type, 0x8100 | 0x88a8)
}

/// How long a frame waits for room at a member.
const LONGEST_WAIT: Duration = Duration::from_millis(10);

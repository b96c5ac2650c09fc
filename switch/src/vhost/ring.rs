//! One split virtqueue (virtio 1.2, 2.7), of which the guest owns every byte.
//!
//! Nothing of a ring is believed, and every field is fetched once. What a guest does wrong is of two
//! kinds. A chain of descriptors that makes no sense is given back unused ([`BadChain`]): its frame is
//! lost. Indices that make no sense stop the ring until it is started again ([`Broken`]): whoever
//! writes them has lost count.
//!
//! All chains are given back in order, and none is held between two turns of the forwarding thread; within
//! one, those of long frames are until these are sent (`tail.rs`).
//! So `used.idx` in the guest's memory says everything: a ring that is started again, also by the next
//! daemon after a crash, goes on there. Frames may be lost by that, places never.
//!
//! | field | who writes it |
//! |---|---|
//! | descriptors, `avail.flags`, `avail.idx`, `avail.ring`, `used_event` | the guest |
//! | `used.flags`, `used.idx`, `used.ring`, `avail_event` | this file |

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::memory::{Area, Memory};

/// Where a ring lies.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Entries; a power of two.
    pub(crate) size: u16,
    desc: Area,
    avail: Area,
    used: Area,
    /// Where the log has the ring's used part, if that is logged.
    log: Option<u64>,
}

/// Where a front-end says that a ring lies, in its own addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) desc: u64,
    pub(crate) used: u64,
    pub(crate) avail: u64,
    pub(crate) log: Option<u64>,
}

/// What was agreed on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Agreed {
    /// Each side says at which index it wants to be told (`VIRTIO_F_EVENT_IDX`).
    pub(crate) event_idx: bool,
    /// A descriptor may name a table (`VIRTIO_F_INDIRECT_DESC`).
    pub(crate) indirect: bool,
}

/// A ring that is served.
#[derive(Debug)]
pub(crate) struct Ring {
    place: Place,
    agreed: Agreed,
    memory: Arc<Memory>,
    /// The next entry, and how many have been given back: the same, as none is held.
    next: u16,
    /// What the guest was told of it.
    published: u16,
    /// The guest's index as it was seen last.
    seen: u16,
    /// What `used.idx` was when the guest was called last, or found not to wait.
    called: Option<u16>,
    /// The next entry and the guest's index when all chains between them were walked through, and the bytes that
    /// they have room for.
    walked: Option<(u16, u16, u64)>,
}

/// A part of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) at: u64,
    pub(crate) len: u32,
    /// The guest reads it; else it wrote it.
    pub(crate) is_for_guest: bool,
}

/// The ring makes no sense any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The guest's index is further ahead of ours than the ring is long.
    Index { guest: u16, ours: u16, size: u16 },
    /// A chain begins outside of the table.
    Head { head: u16, size: u16 },
}

/// A chain makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BadChain {
    /// A descriptor outside of the table.
    Next(u16),
    /// More descriptors than the ring has entries, or than [`LONGEST`]: a loop, most likely.
    Long,
    /// A table in a table, or one that was not agreed on, or of no whole number of descriptors.
    Table,
    /// A table where there is no memory.
    Address(u64),
    /// What the guest is to read before what it wrote.
    Order,
}

impl Place {
    /// A ring of this size at these addresses; `None` if it does not lie in the memory, each part in one
    /// piece and aligned as virtio wants it.
    pub(crate) fn find(memory: &Memory, size: u16, at: &Addresses) -> Option<Self> {
        let entries = u64::from(size);
        Some(Self {
            size,
            desc: memory.area(at.desc, entries * DESCRIPTOR, 16)?,
            // With used_event and avail_event, whether they are agreed on or not.
            avail: memory.area(at.avail, 6 + 2 * entries, 2)?,
            used: memory.area(at.used, 6 + 8 * entries, 4)?,
            log: at.log,
        })
    }

    /// Where a ring goes on that was left here.
    pub(crate) fn index(&self) -> u16 {
        let used = &self.used;
        used.region.load_u16(used.at + 2, Ordering::Acquire)
    }
}

impl Ring {
    /// A ring that goes on where it was left.
    pub(crate) fn new(place: Place, agreed: Agreed, memory: Arc<Memory>) -> Self {
        let used = place.index();
        Self {
            place,
            agreed,
            memory,
            next: used,
            published: used,
            seen: used,
            called: None,
            walked: None,
        }
    }

    /// Entries.
    pub(crate) fn size(&self) -> u16 {
        self.place.size
    }

    /// Where it is: the value of GET_VRING_BASE.
    pub(crate) fn index(&self) -> u16 {
        self.next
    }

    /// The guest's index as it was seen last.
    pub(crate) fn seen(&self) -> u16 {
        self.seen
    }

    /// How many chains are left of those that were there then.
    #[inline]
    pub(crate) fn left(&self) -> u16 {
        self.seen.wrapping_sub(self.next)
    }

    /// The bytes that all chains have room for which were there when that was [noted](Self::note_room), if they are
    /// still the same.
    pub(crate) fn room(&self) -> Option<u64> {
        let (next, seen, room) = self.walked?;
        ((next, seen) == (self.next, self.seen)).then_some(room)
    }

    /// All chains that are there have room for `room` bytes together.
    pub(crate) fn note_room(&mut self, room: u64) {
        self.walked = Some((self.next, self.seen, room));
    }

    /// The guest's memory.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// How many chains the guest has made available that were not taken yet.
    ///
    /// # Errors
    /// [`Broken`] if that are more than the ring has entries.
    #[inline]
    pub(crate) fn available(&mut self) -> Result<u16, Broken> {
        let known = self.left();
        if known > 0 {
            return Ok(known);
        }
        self.refresh()
    }

    /// As [`available`](Self::available), and looks at the guest's index in any case.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub(crate) fn refresh(&mut self) -> Result<u16, Broken> {
        let avail = &self.place.avail;
        // Acquire: pairs with the guest's store after it wrote entries and descriptors.
        let guest = avail.region.load_u16(avail.at + 2, Ordering::Acquire);
        let count = guest.wrapping_sub(self.next);
        if count > self.place.size {
            return Err(Broken::Index {
                guest,
                ours: self.next,
                size: self.place.size,
            });
        }
        self.seen = guest;
        Ok(count)
    }

    /// The first descriptor of the chain that is `ahead` of the next; it was [available](Self::available).
    ///
    /// # Errors
    /// [`Broken`] if there is no such descriptor.
    #[inline]
    pub(crate) fn head(&self, ahead: u16) -> Result<u16, Broken> {
        let (avail, size) = (&self.place.avail, self.place.size);
        let entry = u64::from(self.next.wrapping_add(ahead) & (size - 1));
        let at = avail.at + 4 + 2 * entry;
        let head = avail.region.load_u16(at, Ordering::Relaxed);
        match head < size {
            true => Ok(head),
            false => Err(Broken::Head { head, size }),
        }
    }

    /// Asks the processor for the descriptor of a chain further ahead. A hint.
    #[inline]
    pub(crate) fn prefetch(&self, ahead: u16) {
        if let Some(head) = self.hinted(ahead) {
            let table = &self.place.desc;
            table
                .region
                .prefetch(table.at + DESCRIPTOR * u64::from(head));
        }
    }

    /// Asks the processor for the buffer of a chain further ahead, which will be written. A hint.
    #[inline]
    pub(crate) fn prefetch_buffer(&self, ahead: u16) {
        if let Some(head) = self.hinted(ahead)
            && head < self.place.size
        {
            self.memory.prefetch_write(self.descriptor(head).at);
        }
    }

    /// The first descriptor of a chain further ahead, as the guest says.
    #[inline]
    fn hinted(&self, ahead: u16) -> Option<u16> {
        let avail = &self.place.avail;
        let entry = u64::from(self.next.wrapping_add(ahead) & (self.place.size - 1));
        let at = avail.at + 4 + 2 * entry;
        (self.left() > ahead).then(|| avail.region.load_u16(at, Ordering::Relaxed))
    }

    /// Adds the parts of the chain that begins with this descriptor. Whether they lie in memory is not
    /// known yet.
    ///
    /// # Errors
    /// [`BadChain`]; then some parts may have been added.
    #[inline]
    pub(crate) fn chain(&self, head: u16, parts: &mut Vec<Part>) -> Result<(), BadChain> {
        let first = self.descriptor(head);
        match first.flags & (NEXT | INDIRECT) {
            0 => {
                parts.push(first.part());
                Ok(())
            }
            _ => self.long_chain(first, parts),
        }
    }

    /// The chain that begins with this descriptor, if it has no other.
    #[inline]
    pub(crate) fn only(&self, head: u16) -> Option<Part> {
        let first = self.descriptor(head);
        (first.flags & (NEXT | INDIRECT) == 0).then(|| first.part())
    }

    /// A descriptor of the table, which has it.
    #[inline]
    fn descriptor(&self, at: u16) -> Descriptor {
        let table = &self.place.desc;
        let mut bytes = [0; DESCRIPTOR as usize];
        table
            .region
            .read(table.at + DESCRIPTOR * u64::from(at), &mut bytes);
        Descriptor::read(&bytes)
    }

    /// A chain of several descriptors, or in a table.
    #[inline(never)]
    fn long_chain(&self, first: Descriptor, parts: &mut Vec<Part>) -> Result<(), BadChain> {
        let (size, begin) = (self.place.size, parts.len());
        let mut it = first;
        // Of a chain that loops no more is read than there are descriptors.
        for place in 0..size.min(LONGEST) {
            if it.flags & INDIRECT != 0 {
                // NB: virtio allows a table after plain descriptors; no driver makes one.
                return match place == 0 && it.flags & NEXT == 0 && self.agreed.indirect {
                    true => self.table(&it, parts),
                    false => Err(BadChain::Table),
                };
            }
            add(&it, parts, begin)?;
            if it.flags & NEXT == 0 {
                return Ok(());
            }
            if it.next >= size {
                return Err(BadChain::Next(it.next));
            }
            it = self.descriptor(it.next);
        }
        Err(BadChain::Long)
    }

    /// The chain in a table, which begins with its first descriptor.
    fn table(&self, table: &Descriptor, parts: &mut Vec<Part>) -> Result<(), BadChain> {
        let entries = u64::from(table.len) / DESCRIPTOR;
        let (most, begin) = (u64::from(self.place.size.min(LONGEST)), parts.len());
        if entries == 0 || !u64::from(table.len).is_multiple_of(DESCRIPTOR) {
            return Err(BadChain::Table);
        }
        let mut next = 0_u64;
        for _ in 0..entries.min(most) {
            let mut bytes = [0; DESCRIPTOR as usize];
            let at = table.at.checked_add(DESCRIPTOR * next);
            if !at.is_some_and(|at| self.memory.read(at, &mut bytes)) {
                return Err(BadChain::Address(table.at));
            }
            let it = Descriptor::read(&bytes);
            if it.flags & INDIRECT != 0 {
                return Err(BadChain::Table);
            }
            add(&it, parts, begin)?;
            if it.flags & NEXT == 0 {
                return Ok(());
            }
            next = u64::from(it.next);
            if next >= entries {
                return Err(BadChain::Next(it.next));
            }
        }
        Err(BadChain::Long)
    }

    /// Gives the next chain back, of which `len` bytes were written. The guest learns it by
    /// [`publish`](Self::publish).
    #[inline]
    pub(crate) fn give_back(&mut self, head: u16, len: u32) {
        let used = &self.place.used;
        let entry = u64::from(self.next & (self.place.size - 1));
        let mut element = [0; 8];
        element[..4].copy_from_slice(&u32::from(head).to_le_bytes());
        element[4..].copy_from_slice(&len.to_le_bytes());
        used.region.write(used.at + 4 + 8 * entry, &element);
        if let Some(log) = self.place.log {
            self.memory.wrote(log.wrapping_add(4 + 8 * entry), 8);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Takes back what was given back last, and not published: the guest's chains are there again.
    pub(crate) fn take_back(&mut self, chains: u16) {
        let unpublished = self.next.wrapping_sub(self.published);
        self.next = self.next.wrapping_sub(chains.min(unpublished));
    }

    /// Tells the guest what was given back. Whether it is to be called.
    #[inline]
    pub(crate) fn publish(&mut self) -> bool {
        if self.published == self.next {
            return false;
        }
        let used = &self.place.used;
        // Release: the guest that finds the index finds the elements and the bytes.
        used.region
            .store_u16(used.at + 2, self.next, Ordering::Release);
        if let Some(log) = self.place.log {
            self.memory.wrote(log.wrapping_add(2), 2);
        }
        self.published = self.next;
        // The same indices come again, with other buffers.
        self.walked = None;
        // The guest stores what it wants and then looks at the index; we the other way round.
        fence(Ordering::SeqCst);
        let avail = &self.place.avail;
        if !self.agreed.event_idx {
            let flags = avail.region.load_u16(avail.at, Ordering::Relaxed);
            return flags & NO_INTERRUPT == 0;
        }
        let at = avail.at + 4 + 2 * u64::from(self.place.size);
        let event = avail.region.load_u16(at, Ordering::Relaxed);
        // Virtio 1.2, 2.7.10.1: whether the index passed the event since the last call.
        let passed = self.next.wrapping_sub(event).wrapping_sub(1);
        let before = self.called.replace(self.next);
        before.is_none_or(|before| passed < self.next.wrapping_sub(before))
    }

    /// From now on the guest need not kick.
    #[inline]
    pub(crate) fn disarm(&mut self) {
        // With events an index that is behind says so.
        if !self.agreed.event_idx {
            let used = &self.place.used;
            used.region.store_u16(used.at, NO_NOTIFY, Ordering::Relaxed);
        }
    }

    /// From now on the guest kicks when it makes something available. True if nothing is there yet.
    ///
    /// # Errors
    /// As [`available`](Self::available).
    #[inline]
    pub(crate) fn arm(&mut self) -> Result<bool, Broken> {
        let used = &self.place.used;
        let at = match self.agreed.event_idx {
            true => {
                let at = used.at + 4 + 8 * u64::from(self.place.size);
                used.region.store_u16(at, self.seen, Ordering::Relaxed);
                4 + 8 * u64::from(self.place.size)
            }
            false => {
                used.region.store_u16(used.at, 0, Ordering::Relaxed);
                0
            }
        };
        if let Some(log) = self.place.log {
            self.memory.wrote(log.wrapping_add(at), 2);
        }
        // What the guest made available before it saw that, we see now.
        fence(Ordering::SeqCst);
        let before = self.seen;
        self.refresh()?;
        Ok(before == self.seen)
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Index { guest, ours, size } => {
                write!(f, "index {guest} is more than {size} ahead of {ours}")
            }
            Self::Head { head, size } => write!(f, "no descriptor {head} among {size}"),
        }
    }
}

struct Descriptor {
    at: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    /// Virtio 1.2, 2.7.5.
    #[inline]
    fn read(bytes: &[u8; DESCRIPTOR as usize]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = *bytes;
        Self {
            at: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            len: u32::from_le_bytes([i, j, k, l]),
            flags: u16::from_le_bytes([m, n]),
            next: u16::from_le_bytes([o, p]),
        }
    }

    #[inline]
    fn part(&self) -> Part {
        Part {
            at: self.at,
            len: self.len,
            is_for_guest: self.flags & WRITE != 0,
        }
    }
}

/// Adds a part to a chain whose first one is at `begin`.
#[inline]
fn add(it: &Descriptor, parts: &mut Vec<Part>, begin: usize) -> Result<(), BadChain> {
    let part = it.part();
    if !part.is_for_guest && parts[begin..].last().is_some_and(|it| it.is_for_guest) {
        return Err(BadChain::Order);
    }
    parts.push(part);
    Ok(())
}

/// The most descriptors of a chain, as many as QEMU takes.
const LONGEST: u16 = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR: u64 = 16;
/// Flags of a descriptor: another follows, the device writes, it names a table.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// In `avail.flags`: do not call.
const NO_INTERRUPT: u16 = 1;
/// In `used.flags`: do not kick.
const NO_NOTIFY: u16 = 1;

#[cfg(test)]
pub(super) mod tests;

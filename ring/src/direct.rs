//! Direct mode: the members of a trust group hand frames to each other, and the switch has no work.
//!
//! ```text
//!   member 1: home ─ its ring to 2 ───▶ read by 2        each home is written by its member alone;
//!                  ─ its words for 2's ring to 1 ◀─ ─    the others map it readable only
//!   member 2: home ─ its ring to 1 ───▶ read by 1
//!                  ─ its words for 1's ring to 2
//!   switch:  table ─ who is a member, and which stations are where ──▶ read by all
//! ```
//!
//! Every member makes a memory of its own, its **home**, which nobody else can ever map writable, and gives
//! it to the daemon, which gives it to the others. For each other member it has a page of words, those that
//! the reader of a ring writes, and a ring of packets ([`layout`](crate::layout)), of which the member is the
//! producer. So no member can write what another one reads from a third, or what another has to say of its
//! own progress; it can read both. A member that changes a frame after it was sent changes what its own receivers see.
//!
//! ```text
//! home    0x0000 + 0x1000 × S          words: this member's, as the reader of what slot S sends
//!         0x1000 × SLOTS + ring × S    ring: what this member sends to slot S
//!
//! table   offset  written              content
//!         0x000   daemon, once         magic · version
//!         0x080   daemon               u32 roster: another number when somebody came or went
//!         0x084   daemon               u32 watched: not 0 = all frames go through the switch
//!         0x090   daemon, once         u64 key: an odd random number
//!         0x100   daemon               u64 per slot: generation << 1 | merged; 0 = free
//!         0x1000  forwarding thread    stations: 256 buckets of 8 words, 0 = none; the bucket of an address is
//!                                      the upper 8 bits of its product with the key
//!                                      address (bits 0–47, its first byte lowest) · slot + 1 (bits 48–55)
//! ```
//!
//! A word of a station is whole by itself: who reads it sees one that is, or was. A station that has no room
//! in its bucket is not there, and frames for it go through the switch, as do all that are for many, that are
//! tagged, for a station that is not known to be at a member, or from one that is not known to be at the
//! sender: so the switch hears of stations that it does not know yet, or has forgotten, and what is set of the
//! sender's port holds.
//!
//! A pair of members agrees on a ring by an epoch that has the generations of both in it ([`epoch`]): the
//! sender lays the ring with it, and sends nothing before the reader's words have it too. So neither takes
//! what a predecessor in the same slot left behind.

use std::sync::atomic::Ordering;

use crate::layout::{DATA_OFFSET, VERSION_MAJOR, VERSION_MINOR, ring_size};
use crate::region::Region;

/// First eight bytes of a table: `VNPLTABL` in memory order.
pub const TABLE_MAGIC: u64 = u64::from_le_bytes(*b"VNPLTABL");
/// Members that a group may have.
pub const SLOTS: usize = 16;
/// Bytes of a table.
pub const TABLE_SIZE: u64 = STATIONS + (BUCKETS * BUCKET * 8) as u64;
/// Bits of a generation.
pub const GENERATION_BITS: u32 = 28;

const MAJOR: u64 = 0x08;
const ROSTER: u64 = 0x80;
const WATCHED: u64 = 0x84;
const KEY: u64 = 0x90;
const MEMBERS: u64 = 0x100;
const STATIONS: u64 = 0x1000;
const BUCKETS: usize = 256;
/// Stations of a bucket: one cache line.
const BUCKET: usize = 8;

/// Bytes of a home whose rings have record areas of `capacity` bytes.
pub const fn home_size(capacity: u64) -> u64 {
    SLOTS as u64 * (DATA_OFFSET + ring_size(capacity))
}

/// The member's words for what `slot` sends, in its home.
pub fn words(home: &Region, slot: usize) -> Option<Region> {
    home.part(slot as u64 * DATA_OFFSET, DATA_OFFSET)
}

/// The member's ring to `slot`, in its home.
pub fn ring(home: &Region, slot: usize, capacity: u64) -> Option<Region> {
    let size = ring_size(capacity);
    home.part(SLOTS as u64 * DATA_OFFSET + slot as u64 * size, size)
}

/// The epoch of a ring between two members of these generations.
pub const fn epoch(from: u32, to: u32) -> u64 {
    (from as u64) << (GENERATION_BITS + 8) | (to as u64) << 8
}

/// What a table says of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Which of those that ever had the slot; not zero.
    pub generation: u32,
    /// It takes frames that are still to be cut or summed.
    pub merged: bool,
}

/// A table, as the daemon writes it; clones write the same one.
#[derive(Debug, Clone)]
pub struct Table {
    region: Region,
    key: u64,
}

/// A table, as members read it.
#[derive(Debug, Clone)]
pub struct TableReader {
    region: Region,
    key: u64,
}

/// Where stations are, to be written into a table.
#[derive(Debug)]
pub struct Stations {
    /// Of the table that they are for.
    key: u64,
    words: Box<[u64; BUCKETS * BUCKET]>,
}

impl Table {
    /// Lays an empty table into `region`, with a random number by which nobody outside can tell which stations
    /// share a bucket. `None` if the region is too short.
    pub fn create(region: Region, random: u64) -> Option<Self> {
        let key = random | 1;
        let region = region.part(0, TABLE_SIZE)?;
        region.clear(0, TABLE_SIZE);
        let version = u64::from(VERSION_MAJOR) | u64::from(VERSION_MINOR) << 16;
        region.store_u64(MAJOR, version, Ordering::Relaxed);
        region.store_u64(KEY, key, Ordering::Relaxed);
        // Release: who sees the magic sees the rest.
        region.store_u64(0, TABLE_MAGIC, Ordering::Release);
        Some(Self { region, key })
    }

    /// Somebody takes a slot, or frees it.
    pub fn set_member(&self, slot: usize, member: Option<Member>) {
        let word = member.map_or(0, |member| {
            u64::from(member.generation) << 1 | u64::from(member.merged)
        });
        self.region
            .store_u64(MEMBERS + slot as u64 * 8, word, Ordering::Relaxed);
        let roster = self.region.load_u32(ROSTER, Ordering::Relaxed);
        // Release: who sees the new roster sees the slot.
        self.region
            .store_u32(ROSTER, roster.wrapping_add(1), Ordering::Release);
    }

    /// Whether all frames are to go through the switch, because somebody looks at them there.
    pub fn set_watched(&self, watched: bool) {
        self.region
            .store_u32(WATCHED, u32::from(watched), Ordering::Relaxed);
    }

    /// From now on stations are there. How many words changed.
    pub fn set_stations(&self, stations: &Stations) -> usize {
        debug_assert_eq!(stations.key, self.key, "of this table");
        let mut changed = 0;
        for (at, word) in (STATIONS..).step_by(8).zip(stations.words.iter()) {
            if self.region.load_u64(at, Ordering::Relaxed) != *word {
                self.region.store_u64(at, *word, Ordering::Relaxed);
                changed += 1;
            }
        }
        changed
    }
}

impl Default for Stations {
    fn default() -> Self {
        Self {
            key: 1,
            words: Box::new([0; BUCKETS * BUCKET]),
        }
    }
}

impl Stations {
    /// Forgets all, and is for this table from now on.
    pub fn begin(&mut self, table: &Table) {
        self.key = table.key;
        self.words.fill(0);
    }

    /// Adds one; false: there is no room for it.
    pub fn add(&mut self, address: [u8; 6], slot: usize) -> bool {
        let address = packed(&address);
        let first = bucket(address, self.key) * BUCKET;
        let free = self.words[first..first + BUCKET]
            .iter_mut()
            .find(|word| **word == 0);
        match free {
            Some(word) => *word = address | (slot as u64 + 1) << 48,
            None => return false,
        }
        true
    }
}

impl TableReader {
    /// Looks at a table, which may be mapped readable only; `None` if it is none, or of another version.
    pub fn attach(region: Region) -> Option<Self> {
        let region = region.part(0, TABLE_SIZE)?;
        // Acquire: pairs with the Release in Table::create.
        let is_one = region.load_u64(0, Ordering::Acquire) == TABLE_MAGIC
            && region.load_u64(MAJOR, Ordering::Relaxed) as u16 == VERSION_MAJOR;
        let key = region.load_u64(KEY, Ordering::Relaxed);
        is_one.then_some(Self { region, key })
    }

    /// Another number when somebody came or went.
    #[inline]
    pub fn roster(&self) -> u32 {
        // Acquire: pairs with the Release in Table::set_member.
        self.region.load_u32(ROSTER, Ordering::Acquire)
    }

    /// Whether all frames are to go through the switch.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.region.load_u32(WATCHED, Ordering::Relaxed) != 0
    }

    /// Who has a slot.
    #[inline]
    pub fn member(&self, slot: usize) -> Option<Member> {
        let at = MEMBERS + (slot % SLOTS) as u64 * 8;
        let word = self.region.load_u64(at, Ordering::Relaxed);
        (word != 0).then_some(Member {
            generation: (word >> 1) as u32,
            merged: word & 1 != 0,
        })
    }

    /// The slot of the member at which a station is.
    #[inline]
    pub fn find(&self, address: &[u8; 6]) -> Option<usize> {
        let address = packed(address);
        let first = STATIONS + (bucket(address, self.key) * BUCKET * 8) as u64;
        for at in 0..BUCKET as u64 {
            let word = self.region.load_u64(first + at * 8, Ordering::Relaxed);
            if word & ADDRESS == address {
                return (word >> 48).checked_sub(1).map(|slot| slot as usize);
            }
        }
        None
    }
}

#[inline]
fn packed(address: &[u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = *address;
    u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
}

#[inline]
fn bucket(address: u64, key: u64) -> usize {
    (address.wrapping_mul(key) >> 56) as usize
}

const ADDRESS: u64 = (1 << 48) - 1;

const _: () = {
    assert!(BUCKETS == 256 && BUCKET * 8 == 64);
    assert!(MEMBERS + SLOTS as u64 * 8 <= STATIONS);
    assert!(2 * GENERATION_BITS + 8 == 64);
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Geometry, Meta};
    use crate::{Bell, Consumer, Producer, Wait};

    const RANDOM: u64 = 0x9e37_79b9_7f4a_7c15;

    fn geometry(epoch: u64) -> Geometry {
        Geometry {
            capacity: 4096,
            snaplen: 1514,
            link_type: 1,
            epoch,
            port: 0,
            queue: 0,
        }
    }

    #[test]
    fn a_table_says_who_is_there_and_where_stations_are() {
        let region = Region::heap(TABLE_SIZE);
        assert!(TableReader::attach(region.clone()).is_none());
        let table = Table::create(region.clone(), RANDOM).unwrap();
        let reader = TableReader::attach(region).unwrap();
        let roster = reader.roster();
        let member = Member {
            generation: 7,
            merged: true,
        };
        table.set_member(3, Some(member));
        assert_ne!(reader.roster(), roster);
        assert_eq!((reader.member(3), reader.member(4)), (Some(member), None));
        let mut stations = Stations::default();
        stations.begin(&table);
        for last in 0..200 {
            assert!(stations.add([2, 0, 0, 0, 0, last], usize::from(last) % SLOTS));
        }
        assert_eq!(table.set_stations(&stations), 200);
        for last in 0..200 {
            let found = reader.find(&[2, 0, 0, 0, 0, last]);
            assert_eq!(found, Some(usize::from(last) % SLOTS));
        }
        assert_eq!(reader.find(&[2, 0, 0, 0, 1, 0]), None);
        // An address of zeroes is no free word.
        assert_eq!(reader.find(&[0; 6]), None);
        stations.begin(&table);
        assert!(stations.add([2, 0, 0, 0, 0, 9], 1));
        assert_eq!(table.set_stations(&stations), 200);
        assert_eq!(reader.find(&[2, 0, 0, 0, 0, 9]), Some(1));
        assert_eq!(reader.find(&[2, 0, 0, 0, 0, 8]), None);
        assert!(!reader.is_watched());
        table.set_watched(true);
        assert!(reader.is_watched());
    }

    #[test]
    fn a_full_bucket_has_no_more_room_and_loses_nobody() {
        let region = Region::heap(TABLE_SIZE);
        let table = Table::create(region.clone(), RANDOM).unwrap();
        let mut stations = Stations::default();
        stations.begin(&table);
        let mut there = Vec::new();
        for n in 0..4000_u16 {
            let [high, low] = n.to_be_bytes();
            let address = [2, 0, 0, 0, high, low];
            if stations.add(address, 1) {
                there.push(address);
            }
        }
        assert!(there.len() > 1000 && there.len() <= BUCKETS * BUCKET);
        table.set_stations(&stations);
        let reader = TableReader::attach(region).unwrap();
        assert!(there.iter().all(|it| reader.find(it) == Some(1)));
    }

    #[test]
    fn two_members_hand_over_frames_and_neither_writes_the_others_memory() {
        let homes = [0, 1].map(|_| Region::heap(home_size(4096)));
        let epoch = epoch(5, 9);
        let theirs = ring(&homes[0], 1, 4096).unwrap();
        let mine = words(&homes[1], 0).unwrap();
        let attach =
            || Consumer::attach_beside(theirs.clone(), mine.clone(), epoch, (1514, false)).unwrap();
        assert!(attach().is_none());
        let mut sender =
            Producer::create_beside(theirs.clone(), mine.clone(), geometry(epoch)).unwrap();
        assert!(!sender.is_attached());
        let mut reader = attach().unwrap();
        assert!(sender.is_attached());
        // What each of them writes of its own is all that changes.
        let before = |home: &Region| {
            let mut bytes = vec![0; home.len() as usize];
            home.read(0, &mut bytes);
            bytes
        };
        let (first, second) = (before(&homes[0]), before(&homes[1]));
        assert_eq!(reader.arm(1, 0), Wait::Sleep);
        assert_eq!(before(&homes[0]), first);
        let second_armed = before(&homes[1]);
        assert_ne!(second_armed, second);
        assert!(sender.push(&Meta::default(), &[7; 60]).unwrap());
        sender.publish();
        assert_eq!(sender.bell(0), Bell::Ring);
        assert_eq!(before(&homes[1]), second_armed);
        assert_ne!(before(&homes[0]), first);
        assert!(reader.next().unwrap().is_some());
        reader.release();
        for round in 0..500_u32 {
            let frame = vec![round as u8; 60 + round as usize];
            let meta = Meta {
                wire_len: frame.len() as u32,
                ..Meta::default()
            };
            assert!(sender.push(&meta, &frame).unwrap());
            sender.publish();
            assert_eq!(sender.bell(0), Bell::Quiet);
            assert_eq!(reader.next().unwrap().unwrap().bytes, frame);
            assert!(reader.next().unwrap().is_none());
            reader.release();
        }
    }

    #[test]
    fn what_another_had_in_the_slot_counts_for_nobody() {
        let homes = [0, 1].map(|_| Region::heap(home_size(4096)));
        let theirs = ring(&homes[0], 1, 4096).unwrap();
        let mine = words(&homes[1], 0).unwrap();
        for generation in 1..4 {
            let epoch = epoch(1, generation);
            let mut sender =
                Producer::create_beside(theirs.clone(), mine.clone(), geometry(epoch)).unwrap();
            // Words of the one before are not taken for this one's.
            assert!(!sender.is_attached());
            let before = super::epoch(1, generation - 1);
            let late = Consumer::attach_beside(theirs.clone(), mine.clone(), before, (1514, false))
                .unwrap();
            assert!(late.is_none());
            let reader =
                Consumer::attach_beside(theirs.clone(), mine.clone(), epoch, (1514, false))
                    .unwrap();
            let mut reader = reader.unwrap();
            assert!(sender.is_attached());
            assert!(sender.push(&Meta::default(), &[1; 60]).unwrap());
            sender.publish();
            assert!(reader.next().unwrap().is_some());
            reader.release();
        }
    }

    #[test]
    fn a_reader_that_lies_stops_the_sender_and_a_sender_that_lies_is_corrupt() {
        let homes = [0, 1].map(|_| Region::heap(home_size(4096)));
        let theirs = ring(&homes[0], 1, 4096).unwrap();
        let mine = words(&homes[1], 0).unwrap();
        let epoch = epoch(1, 1);
        let mut sender =
            Producer::create_beside(theirs.clone(), mine.clone(), geometry(epoch)).unwrap();
        let mut reader =
            Consumer::attach_beside(theirs.clone(), mine.clone(), epoch, (1514, false))
                .unwrap()
                .unwrap();
        assert!(sender.push(&Meta::default(), &[1; 60]).unwrap());
        sender.publish();
        // A life that is over and counts that run on are only the sender's word.
        theirs.store_u64(crate::layout::LIFE, 2, Ordering::Relaxed);
        theirs.store_u64(crate::layout::PUBLISHED, 1 << 40, Ordering::Relaxed);
        assert_eq!(reader.arm(1, 0), Wait::Ready);
        theirs.store_u32(DATA_OFFSET, 4000, Ordering::Relaxed);
        assert!(reader.next().is_err());
        // It is over, and wakes nobody again.
        assert!(reader.is_drained() && reader.next().unwrap().is_none());
        assert_eq!(reader.arm(1, 0), Wait::Sleep);
        mine.store_u64(crate::layout::TAIL, 1 << 40, Ordering::Relaxed);
        let lied = (0..100).find_map(|_| sender.push(&Meta::default(), &[1; 60]).err());
        assert!(lied.is_some());
    }

    #[test]
    fn a_record_without_a_frame_is_the_end_and_what_a_leaver_sent_is_read() {
        let homes = [0, 1].map(|_| Region::heap(home_size(4096)));
        let theirs = ring(&homes[0], 1, 4096).unwrap();
        let mine = words(&homes[1], 0).unwrap();
        let attached = |generation| {
            let epoch = epoch(1, generation);
            let sender = Producer::create_beside(theirs.clone(), mine.clone(), geometry(epoch));
            let reader =
                Consumer::attach_beside(theirs.clone(), mine.clone(), epoch, (1514, false));
            (sender.unwrap(), reader.unwrap().unwrap())
        };
        for (generation, cap_len) in [(1, 0), (2, 13), (3, 1515)] {
            let (mut sender, mut reader) = attached(generation);
            assert!(sender.push(&Meta::default(), &[1; 60]).unwrap());
            sender.publish();
            theirs.store_u64(crate::layout::LIFE, 2, Ordering::Relaxed);
            theirs.store_u32(DATA_OFFSET, cap_len, Ordering::Relaxed);
            assert!(!reader.is_drained());
            assert!(reader.next().is_err(), "{cap_len}");
            assert!(reader.is_drained());
        }
        let (mut sender, mut reader) = attached(9);
        let meta = Meta {
            flags: crate::layout::flags::GAP | crate::layout::flags::OFFLOAD,
            lost: 7,
            ..Meta::default()
        };
        assert!(sender.push_parts(&meta, &[], &[1; 60]).unwrap());
        sender.publish();
        reader.see_off();
        assert!(sender.push(&Meta::default(), &[2; 60]).unwrap());
        sender.publish();
        let packet = reader.next().unwrap().unwrap();
        let Meta { flags, lost, .. } = packet.meta;
        assert_eq!((packet.bytes, flags, lost), (&[1; 60][..], 0, 0));
        assert!(reader.next().unwrap().is_none() && reader.is_drained());
    }
}

use std::os::fd::OwnedFd;

use vnplug_ring::Region;

use super::super::memory::tests::file;
use super::super::memory::{Described, Slot};
use super::*;

/// A ring and its driver, in 64 KiB of memory that guest and front-end have at the same addresses.
pub(in crate::vhost) struct Driver {
    pub(in crate::vhost) region: Region,
    memory: Arc<Memory>,
    size: u16,
    base: u64,
    _file: OwnedFd,
}

const LEN: u64 = 0x10_0000;

/// Memory, and the same as a test's own region.
fn memory() -> (Arc<Memory>, Region, OwnedFd) {
    let fd = file(LEN);
    let all = Described {
        guest: 0,
        len: LEN,
        user: 0,
        offset: 0,
    };
    let watch = Arc::default();
    let slot = Slot::map(all, &fd, &watch, None).unwrap();
    let region = vnplug_os::memory::mapped(&fd, LEN).unwrap();
    let memory = Memory::new(vec![slot], watch, None).unwrap();
    (Arc::new(memory), region, fd)
}

impl Driver {
    pub(in crate::vhost) fn new(size: u16) -> Self {
        let (memory, region, file) = memory();
        Self {
            region,
            memory,
            size,
            base: 0,
            _file: file,
        }
    }

    fn addresses(&self) -> Addresses {
        Addresses {
            desc: self.base,
            avail: self.base + 0x1000,
            used: self.base + 0x2000,
            log: None,
        }
    }

    fn place(&self) -> Place {
        Place::find(&self.memory, self.size, &self.addresses()).unwrap()
    }

    pub(in crate::vhost) fn ring(&self, agreed: Agreed) -> Ring {
        Ring::new(self.place(), agreed, Arc::clone(&self.memory))
    }

    /// Writes a descriptor into a table.
    pub(in crate::vhost) fn describe(&self, table: u64, at: u16, it: (u64, u32, u16, u16)) {
        let (address, len, flags, next) = it;
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.region.write(table + 16 * u64::from(at), &bytes);
    }

    pub(in crate::vhost) fn desc(&self, at: u16, it: (u64, u32, u16, u16)) {
        self.describe(self.base, at, it);
    }

    /// Makes a chain available.
    pub(in crate::vhost) fn offer(&self, head: u16) {
        let index = self.index();
        let entry = u64::from(index % self.size);
        let at = self.base + 0x1004 + 2 * entry;
        self.region.store_u16(at, head, Ordering::Relaxed);
        self.set_index(index.wrapping_add(1));
    }

    fn index(&self) -> u16 {
        self.region.load_u16(self.base + 0x1002, Ordering::Relaxed)
    }

    fn set_index(&self, index: u16) {
        let at = self.base + 0x1002;
        self.region.store_u16(at, index, Ordering::Release);
    }

    fn set_used_event(&self, index: u16) {
        let at = self.base + 0x1004 + 2 * u64::from(self.size);
        self.region.store_u16(at, index, Ordering::Release);
    }

    pub(in crate::vhost) fn used(&self) -> u16 {
        self.region.load_u16(self.base + 0x2002, Ordering::Acquire)
    }

    fn used_flags(&self) -> u16 {
        self.region.load_u16(self.base + 0x2000, Ordering::Acquire)
    }

    fn avail_event(&self) -> u16 {
        let at = self.base + 0x2004 + 8 * u64::from(self.size);
        self.region.load_u16(at, Ordering::Acquire)
    }

    /// An element of the used ring.
    pub(in crate::vhost) fn element(&self, at: u16) -> (u32, u32) {
        let at = self.base + 0x2004 + 8 * u64::from(at % self.size);
        let word = |at| self.region.load_u32(at, Ordering::Relaxed);
        (word(at), word(at + 4))
    }
}

const ALL: Agreed = Agreed {
    event_idx: true,
    indirect: true,
};

fn chain(ring: &Ring, head: u16) -> Result<Vec<Part>, BadChain> {
    let mut parts = Vec::new();
    ring.chain(head, &mut parts).map(|()| parts)
}

#[test]
fn chains_are_taken_and_given_back_in_order_and_indices_wrap() {
    let driver = Driver::new(4);
    let mut ring = driver.ring(Agreed::default());
    for at in 0..4 {
        driver.desc(at, (0x8000 + u64::from(at), 8, 0, 0));
    }
    for turn in 0..70_000_u32 {
        assert_eq!(ring.available(), Ok(0));
        for head in [2, 0, 3] {
            driver.offer(head);
        }
        for head in [2, 0, 3] {
            assert!(ring.available().unwrap() > 0);
            assert_eq!(ring.head(0), Ok(head));
            assert_eq!(chain(&ring, head).unwrap()[0].at, 0x8000 + u64::from(head));
            ring.give_back(head, turn);
        }
        let before = driver.used();
        assert!(ring.publish() && !ring.publish());
        assert_eq!(driver.used(), before.wrapping_add(3));
        assert_eq!(driver.element(before), (2, turn));
        assert_eq!(driver.element(before.wrapping_add(2)), (3, turn));
    }
}

#[test]
fn an_index_too_far_ahead_breaks_the_ring_v12() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(ALL);
    driver.set_index(8);
    assert_eq!(ring.available(), Ok(8));
    let mut ring = driver.ring(ALL);
    for bad in [9, 0x100, 0x8000, 0xffff] {
        driver.set_index(bad);
        assert!(
            matches!(ring.available(), Err(Broken::Index { .. })),
            "{bad}"
        );
        assert!(ring.arm().is_err());
    }
}

#[test]
fn a_head_outside_of_the_table_breaks_the_ring() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(ALL);
    driver.offer(8);
    assert_eq!(ring.available(), Ok(1));
    assert_eq!(ring.head(0), Err(Broken::Head { head: 8, size: 8 }));
}

#[test]
fn the_same_head_twice_is_two_chains_v12() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(ALL);
    driver.desc(5, (0x8000, 8, 0, 0));
    driver.offer(5);
    driver.offer(5);
    for _ in 0..2 {
        assert!(ring.available().unwrap() > 0);
        let head = ring.head(0).unwrap();
        assert_eq!(chain(&ring, head).unwrap().len(), 1);
        ring.give_back(head, 0);
    }
    ring.publish();
    assert_eq!(driver.used(), 2);
}

#[test]
fn chains_that_loop_or_leave_the_table_end_v7() {
    let driver = Driver::new(8);
    let ring = driver.ring(ALL);
    driver.desc(0, (0x8000, 8, NEXT, 1));
    driver.desc(1, (0x8000, 8, NEXT, 0));
    assert_eq!(chain(&ring, 0), Err(BadChain::Long));
    driver.desc(1, (0x8000, 8, NEXT, 8));
    assert_eq!(chain(&ring, 0), Err(BadChain::Next(8)));
    driver.desc(1, (0x8000, 8, NEXT, 0xffff));
    assert_eq!(chain(&ring, 0), Err(BadChain::Next(0xffff)));
    // The control: as many as there are.
    for at in 0..8 {
        let next = if at < 7 { NEXT } else { 0 };
        driver.desc(at, (0x8000, 8, next, at + 1));
    }
    assert_eq!(chain(&ring, 0).unwrap().len(), 8);
    driver.desc(3, (0x8000, 8, WRITE | NEXT, 4));
    assert_eq!(chain(&ring, 0), Err(BadChain::Order));
}

#[test]
fn tables_of_no_sense_are_refused_v11() {
    let driver = Driver::new(8);
    let ring = driver.ring(ALL);
    let table = 0x9000;
    driver.describe(table, 0, (0x8000, 8, NEXT, 2));
    driver.describe(table, 2, (0x8100, 9, 0, 0));
    driver.desc(0, (table, 48, INDIRECT, 0));
    let lens: Vec<u32> = chain(&ring, 0).unwrap().iter().map(|it| it.len).collect();
    assert_eq!(lens, [8, 9]);
    for (len, flags) in [
        (0, INDIRECT),
        (15, INDIRECT),
        (40, INDIRECT),
        (48, INDIRECT | NEXT),
    ] {
        driver.desc(0, (table, len, flags, 1));
        assert_eq!(chain(&ring, 0), Err(BadChain::Table), "{len}");
    }
    // A link beyond the table, a loop in it, a table in it, one that ends outside, one behind others.
    driver.desc(0, (table, 32, INDIRECT, 0));
    assert_eq!(chain(&ring, 0), Err(BadChain::Next(2)));
    driver.desc(0, (table, 48, INDIRECT, 0));
    driver.describe(table, 2, (0x8100, 9, NEXT, 0));
    assert_eq!(chain(&ring, 0), Err(BadChain::Long));
    driver.describe(table, 2, (table, 48, INDIRECT, 0));
    assert_eq!(chain(&ring, 0), Err(BadChain::Table));
    driver.describe(table, 0, (0x8000, 8, NEXT, 1));
    driver.desc(0, (LEN - 16, 32, INDIRECT, 0));
    driver
        .region
        .write(LEN - 16, &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 1, 0]);
    assert_eq!(chain(&ring, 0), Err(BadChain::Address(LEN - 16)));
    driver.desc(0, (u64::MAX - 15, 0xffff_fff0, INDIRECT, 0));
    assert_eq!(chain(&ring, 0), Err(BadChain::Address(u64::MAX - 15)));
    driver.desc(0, (0x8000, 8, NEXT, 1));
    driver.desc(1, (table, 48, INDIRECT, 0));
    assert_eq!(chain(&ring, 0), Err(BadChain::Table));
    // One that was not agreed on.
    driver.desc(0, (table, 48, INDIRECT, 0));
    assert_eq!(
        chain(&driver.ring(Agreed::default()), 0),
        Err(BadChain::Table)
    );
}

#[test]
fn a_ring_begins_where_used_is_and_not_beyond() {
    let driver = Driver::new(8);
    driver.region.store_u16(0x2002, 0xfffe, Ordering::Relaxed);
    driver.set_index(1);
    let mut ring = driver.ring(ALL);
    assert_eq!((ring.index(), ring.available()), (0xfffe, Ok(3)));
    driver.region.store_u16(0x2002, 0x4000, Ordering::Relaxed);
    assert!(driver.ring(ALL).available().is_err());
}

#[test]
fn a_place_lies_whole_in_the_memory_and_is_aligned() {
    let driver = Driver::new(8);
    let at = driver.addresses();
    let found = |size, at: Addresses| Place::find(&driver.memory, size, &at).is_some();
    assert!(found(256, at));
    for bad in [
        Addresses { desc: 8, ..at },
        Addresses { avail: 1, ..at },
        Addresses { used: 2, ..at },
        Addresses {
            used: LEN - 8,
            ..at
        },
        Addresses {
            avail: u64::MAX - 1,
            ..at
        },
        Addresses { desc: LEN, ..at },
    ] {
        assert!(!found(8, bad), "{bad:?}");
    }
}

#[test]
fn the_guest_is_called_and_kicks_when_it_asked_for_it_by_flags() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    driver.desc(0, (0x8000, 8, 0, 0));
    ring.disarm();
    assert_eq!(driver.used_flags(), NO_NOTIFY);
    assert_eq!(ring.arm(), Ok(true));
    assert_eq!(driver.used_flags(), 0);
    driver.offer(0);
    assert_eq!(ring.arm(), Ok(false));
    assert_eq!(ring.available(), Ok(1));
    ring.give_back(0, 0);
    driver
        .region
        .store_u16(0x1000, NO_INTERRUPT, Ordering::Relaxed);
    assert!(!ring.publish());
    driver.region.store_u16(0x1000, 0, Ordering::Relaxed);
    driver.offer(0);
    assert_eq!(ring.available(), Ok(1));
    ring.give_back(0, 0);
    assert!(ring.publish());
}

#[test]
fn the_guest_is_called_and_kicks_when_it_asked_for_it_by_events() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(ALL);
    driver.desc(0, (0x8000, 8, 0, 0));
    let mut one = || {
        driver.offer(0);
        assert!(ring.available().unwrap() > 0);
        ring.give_back(0, 0);
        ring.publish()
    };
    // The first time in any case.
    driver.set_used_event(0xfff0);
    assert!(one());
    assert!(!one());
    driver.set_used_event(3);
    assert!(!one() && one() && !one());
    assert_eq!(driver.used(), 5);
    assert_eq!(ring.arm(), Ok(true));
    assert_eq!(driver.avail_event(), 5);
}

#[test]
fn what_is_given_back_is_logged() {
    let (fd, watch) = (file(LEN), Arc::default());
    let all = Described {
        guest: 0,
        len: LEN,
        user: 0,
        offset: 0,
    };
    let slot = Slot::map(all, &fd, &watch, None).unwrap();
    let log = Region::heap(64);
    let memory = Arc::new(Memory::new(vec![slot], watch, Some(log.clone())).unwrap());
    let addresses = Addresses {
        desc: 0,
        avail: 0x1000,
        used: 0x2000,
        log: Some(0x5000),
    };
    let place = Place::find(&memory, 8, &addresses).unwrap();
    let mut ring = Ring::new(place, ALL, memory);
    ring.give_back(0, 0);
    ring.publish();
    let mut bits = [0; 2];
    log.read(0, &mut bits);
    assert_eq!(bits, [1 << 5, 0]);
}

#[test]
fn what_is_taken_back_is_there_again_as_long_as_the_guest_was_told_nothing() {
    let driver = Driver::new(8);
    let mut ring = driver.ring(Agreed::default());
    (0..5).for_each(|head| driver.offer(head));
    assert_eq!(ring.available(), Ok(5));
    (0..4).for_each(|head| ring.give_back(head, 0));
    assert_eq!((ring.left(), driver.used()), (1, 0));
    ring.take_back(3);
    assert_eq!((ring.available(), ring.head(0)), (Ok(4), Ok(1)));
    ring.publish();
    assert_eq!(driver.used(), 1);
    // No more than that: the guest has the first one.
    ring.give_back(1, 0);
    ring.take_back(8);
    assert_eq!((ring.available(), ring.head(0)), (Ok(4), Ok(1)));
}

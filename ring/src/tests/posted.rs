//! Records that go on where their sender received them.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Dice, EPOCH, bytes, geometry, meta};
use crate::layout::{
    DATA_OFFSET, Geometry, Life, Meta, Place, RECORD_HEADER, TAIL, flags, record_size, ring_size,
};
use crate::{Consumer, Intake, Outlet, Posts, Producer, Region, SenderLied};

const SNAPLEN: u32 = 300;
const RING: u64 = 4096;

/// A port that receives by one ring and sends by another.
struct Both {
    source: Producer,
    reader: Consumer,
    received: Region,
    sender: Producer,
    intake: Intake,
    outlet: Arc<Outlet>,
    posts: Arc<Posts>,
}

impl Both {
    /// Whose reader holds back what it posts, or does not.
    fn new(holds: bool) -> Self {
        Self::at(holds, 0)
    }

    fn at(holds: bool, start: u64) -> Self {
        let [received, sent] = [(); 2].map(|()| Region::heap(ring_size(RING)));
        let source = Producer::create_at(received.clone(), geometry(RING, SNAPLEN), start);
        let to = Geometry {
            epoch: EPOCH << 8,
            ..geometry(RING, 2 * SNAPLEN)
        };
        let mut intake = Intake::create_at(sent.clone(), to, start).unwrap();
        intake.lend(received.part(DATA_OFFSET, RING));
        let mut reader = Consumer::attach(received.clone()).unwrap();
        let sender = Producer::attach(sent.clone()).unwrap();
        assert!(sender.takes_posted());
        let outlet = Outlet::new(&sender);
        let posts = Posts::new(&sender, &outlet);
        if holds {
            reader.hold_for(Arc::clone(&posts));
        }
        Self {
            source: source.unwrap(),
            reader,
            received,
            sender,
            intake,
            outlet,
            posts,
        }
    }

    fn receive(&mut self, number: u64, len: usize) -> bool {
        let pushed = self.source.push(&meta(number, len), &bytes(number, len));
        self.source.publish();
        pushed.unwrap()
    }

    /// Posts all but the first `skip` bytes of the next packet behind `head`; false: there is none, or no room.
    fn forward(&mut self, head: &[u8], skip: usize) -> bool {
        let (base, _) = self.reader.area();
        if !self.sender.has_room(head.len() as u32).unwrap() {
            return false;
        }
        let Some(packet) = self.reader.next().unwrap() else {
            return false;
        };
        let place = Place {
            ring: 0,
            at: (packet.bytes.as_ptr().addr() - base + skip) as u64,
            len: (packet.bytes.len() - skip) as u32,
        };
        assert_eq!(self.sender.push_posted(0, head, place), Ok(true));
        self.posts.note(self.sender.position());
        self.sender.publish();
        true
    }

    fn take(&mut self) -> Result<Option<Vec<u8>>, SenderLied> {
        let mut buffer = [0xee; 2 * SNAPLEN as usize];
        let taken = self.intake.take(&mut buffer)?;
        Ok(taken.map(|len| buffer[..len].to_vec()))
    }

    /// The bytes of the transmit ring's record that was written last, if it is the first.
    fn post(&mut self, head: &[u8], place: Place) -> Result<Option<Vec<u8>>, SenderLied> {
        assert_eq!(self.sender.push_posted(0, head, place), Ok(true));
        self.sender.publish();
        let taken = self.take();
        self.intake.release();
        taken
    }
}

#[test]
fn a_posted_record_is_its_own_bytes_and_then_those_of_the_place() {
    let mut both = Both::new(true);
    assert!(both.receive(5, 200));
    assert!(both.forward(b"new header", 14));
    let expected = [b"new header", &bytes(5, 200)[14..]].concat();
    assert_eq!(both.take(), Ok(Some(expected)));
    assert_eq!(both.take(), Ok(None));
}

/// Forwards many packets of all lengths, in batches, through a host that is late: how many were not what was received.
fn wrong(holds: bool, seed: u64) -> (u64, u64) {
    let mut both = Both::at(holds, 0_u64.wrapping_sub(RING * 5));
    let mut dice = Dice(seed);
    let (mut number, mut taken, mut wrong) = (0, 0, 0);
    let mut expected = std::collections::VecDeque::new();
    let mut unread = std::collections::VecDeque::new();
    while taken < 20_000 {
        for _ in 0..dice.below(6) {
            let len = 1 + dice.below(u64::from(SNAPLEN)) as usize;
            if both.receive(number, len) {
                unread.push_back(bytes(number, len));
            }
            number += 1;
        }
        for _ in 0..dice.below(6) {
            let len = unread.front().map_or(0, Vec::len);
            let (skip, head) = (dice.below(len as u64 + 1) as usize, dice.below(40));
            let head = bytes(number, head as usize);
            // Some are copied, and some dropped: they need not wait.
            match dice.below(4) {
                0 => match both.reader.next().unwrap() {
                    Some(packet) if both.sender.has_room(packet.bytes.len() as u32).unwrap() => {
                        let pushed = both.sender.push(&Meta::default(), packet.bytes);
                        assert_eq!(pushed, Ok(true));
                        both.sender.publish();
                        expected.extend(unread.pop_front());
                    }
                    Some(_) => drop(unread.pop_front()),
                    None => {}
                },
                _ => {
                    if both.forward(&head, skip) {
                        let packet = unread.pop_front().unwrap();
                        expected.push_back([&head[..], &packet[skip..]].concat());
                    }
                }
            }
        }
        both.reader.release();
        let tail = both.received.load_u64(TAIL, Ordering::Relaxed);
        assert!(holds || tail == both.reader.position());
        if dice.below(3) == 0 {
            for _ in 0..dice.below(30) {
                let Some(frame) = both.take().unwrap() else {
                    break;
                };
                wrong += u64::from(Some(frame) != expected.pop_front());
                taken += 1;
            }
            both.intake.release();
        }
    }
    let full = both.source.dropped();
    // What was held back comes back.
    while both.take().unwrap().is_some() {}
    both.intake.release();
    both.reader.release();
    assert_eq!(
        both.received.load_u64(TAIL, Ordering::Relaxed),
        both.reader.position()
    );
    (wrong, full)
}

#[test]
fn what_is_posted_is_sent_as_it_was_received_because_its_reader_holds_it_back() {
    for seed in 1..=4 {
        let (wrong, full) = wrong(true, seed);
        assert_eq!(wrong, 0);
        assert!(full > 0, "the ring was never full of what is held back");
    }
    // The control: a reader that gives back what it posted.
    assert!(wrong(false, 1).0 > 0);
}

#[test]
fn a_place_outside_is_refused_and_the_ring_goes_on() {
    let mut both = Both::new(true);
    assert!(both.receive(1, 100));
    both.received.write(DATA_OFFSET + RING - 8, b"the last");
    let refused = [
        (0, RING - 7, 8),
        (0, RING, 1),
        (0, u64::MAX, 1),
        (0, u64::MAX - 7, 8),
        (0, 0u64.wrapping_sub(DATA_OFFSET), 8),
        (0, 1 << 63, 8),
        (0, 0, 2 * SNAPLEN),
        (0, 0, u32::MAX),
        (1, 0, 8),
        (u16::MAX, 0, 8),
    ];
    for (ring, at, len) in refused {
        let place = Place { ring, at, len };
        let taken = both.post(b"x", place);
        assert_eq!(taken, Err(SenderLied::Place(place)));
        assert_eq!(both.take(), Ok(None), "it is passed");
    }
    for (at, len, rest) in [(RING - 8, 8, &b"the last"[..]), (RING, 0, b""), (0, 0, b"")] {
        let place = Place { ring: 0, at, len };
        let expected = [b"x", rest].concat();
        assert_eq!(both.post(b"x", place), Ok(Some(expected)));
    }
    // The longest that there may be.
    let len = 2 * SNAPLEN - 1;
    let place = Place {
        ring: 0,
        at: 0,
        len,
    };
    let taken = both.post(b"x", place).unwrap().unwrap();
    assert_eq!(taken.len(), 2 * SNAPLEN as usize);
}

#[test]
fn the_flag_means_nothing_to_a_host_that_lends_no_ring() {
    let sent = Region::heap(ring_size(RING));
    let mut intake = Intake::create(sent.clone(), geometry(RING, SNAPLEN)).unwrap();
    let mut sender = Producer::attach(sent).unwrap();
    assert!(!sender.takes_posted());
    let place = Place {
        ring: 0,
        at: 0,
        len: 8,
    };
    assert_eq!(sender.push_posted(0, b"own", place), Ok(true));
    sender.publish();
    let mut buffer = [0; SNAPLEN as usize];
    assert_eq!(intake.take(&mut buffer), Ok(Some(3)));
}

#[test]
fn what_is_prefixed_may_be_posted_too() {
    let mut both = Both::new(true);
    assert!(both.receive(3, 100));
    let at = record_size(0);
    let place = Place {
        ring: 0,
        at: at - RECORD_HEADER,
        len: 20,
    };
    // Of 16 bytes that say what is left to do, some lie at the place: they are what was copied.
    both.sender
        .push_posted(flags::OFFLOAD, &[0; 4], place)
        .unwrap();
    both.sender.publish();
    let mut buffer = [0; 2 * SNAPLEN as usize];
    let merged = crate::control::Segments::Merged;
    let (copied, sent) = both
        .intake
        .take_to(merged, |_| &mut buffer)
        .unwrap()
        .unwrap();
    assert_eq!((copied.len(), sent.start, sent.end), (24, 16, 24));
}

#[test]
fn a_transmit_ring_that_is_over_holds_back_nothing() {
    for life in [Life::Closed, Life::Quarantined, Life::Revoked] {
        let mut both = Both::new(true);
        assert!(both.receive(1, 100) && both.receive(2, 100));
        assert!(both.forward(b"", 0));
        both.reader.release();
        let told = |both: &Both| both.received.load_u64(TAIL, Ordering::Relaxed);
        assert_eq!(told(&both), 0);
        both.intake.finish(life);
        both.reader.release();
        assert_eq!(told(&both), record_size(100));
    }
}

#[test]
fn a_batch_waits_for_its_last_post_and_batches_come_back_in_order() {
    let mut both = Both::new(true);
    let told = |both: &Both| both.received.load_u64(TAIL, Ordering::Relaxed);
    let size = record_size(100);
    for number in 0..6 {
        assert!(both.receive(number, 100));
    }
    // Two posted; one of a second batch that is not; two posted.
    assert!(both.forward(b"", 0) && both.forward(b"", 0));
    both.reader.release();
    assert!(both.reader.next().unwrap().is_some());
    both.reader.release();
    assert!(both.forward(b"", 0) && both.forward(b"", 0));
    both.reader.release();
    assert_eq!(told(&both), 0);
    for expected in [0, 3 * size, 3 * size, 5 * size] {
        assert!(both.take().unwrap().is_some());
        both.intake.release();
        both.reader.release();
        assert_eq!(told(&both), expected);
    }
    // Nothing is held any more.
    assert!(both.reader.next().unwrap().is_some());
    both.reader.release();
    assert_eq!(told(&both), 6 * size);
}

#[test]
fn a_transmit_ring_that_is_unmapped_holds_back_until_its_host_reads_it_no_more() {
    let mut both = Both::new(true);
    assert!(both.receive(1, 100) && both.forward(b"", 0));
    both.reader.release();
    let told = |both: &Both| both.received.load_u64(TAIL, Ordering::Relaxed);
    both.outlet.unmap();
    both.reader.release();
    assert!(told(&both) == 0 && both.reader.holds_back());
    let (other, _, _) = super::ring(RING, SNAPLEN);
    both.outlet = Outlet::new(&other);
    both.reader.release();
    assert!(told(&both) == record_size(100) && !both.reader.holds_back());
}

#[test]
#[expect(unsafe_code, reason = "memory that says when it is given up")]
fn a_ring_is_over_for_those_who_post_of_it_before_it_is_unmapped() {
    struct Owner {
        posts: Arc<Posts>,
        was_over: Arc<AtomicBool>,
        _memory: Region,
    }
    impl Drop for Owner {
        fn drop(&mut self) {
            let is_over = self.posts.is_over();
            self.was_over.store(is_over, Ordering::Relaxed);
        }
    }
    let both = Both::new(true);
    let memory = both.received;
    let (was_over, posts) = (Arc::default(), both.posts);
    let owner = Owner {
        posts: Arc::clone(&posts),
        was_over: Arc::clone(&was_over),
        _memory: memory.clone(),
    };
    let base = NonNull::new(memory.as_ptr()).unwrap();
    // SAFETY: the owner keeps it, and nobody else uses it here but by words and copies.
    let region = unsafe { Region::from_raw(base, memory.len(), Arc::new(owner)) };
    let mut reader = Consumer::attach(region).unwrap();
    reader.hold_for(posts);
    assert!(!was_over.load(Ordering::Relaxed));
    drop(reader);
    assert!(was_over.load(Ordering::Relaxed));
}

//! A group: what is handed out is whole, what is not is counted.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use vnplug_testing::Deadline;

use super::{Dice, EPOCH, bytes, geometry, meta};
use crate::arena::{Arena, ArenaGeometry, ArenaReader, arena_size, arena_snaplen, header};
use crate::layout::{DATA_OFFSET, HEAD, Meta, TAIL, flags, ring_size};
use crate::{AttachError, Consumer, CreateError, Producer, Region, Wait};

pub(super) const ARENA: u64 = 1 << 16;
const SNAPLEN: u32 = 1000;

pub(super) fn arena_at(capacity: u64, start: u64) -> (Arena, Region) {
    let region = Region::heap(arena_size(capacity));
    let geometry = ArenaGeometry {
        capacity,
        snaplen: SNAPLEN,
        epoch: EPOCH,
        queue: 0,
    };
    let arena = Arena::create_at(region.clone(), geometry, start).expect("a valid geometry");
    (arena, region)
}

/// A member with room for `descriptors` and its own snaplen.
pub(super) fn member(
    arena: &Region,
    descriptors: u64,
    snaplen: u32,
) -> (Producer, Consumer, Region) {
    let capacity = descriptors * 16;
    let region = Region::heap(ring_size(capacity));
    let producer =
        Producer::create_descriptors(region.clone(), geometry(capacity, snaplen)).expect("valid");
    let reader = ArenaReader::attach(arena.clone()).expect("an arena");
    let consumer = Consumer::attach_group(region.clone(), reader).expect("a ring");
    (producer, consumer, region)
}

fn give(arena: &mut Arena, members: &mut [&mut Producer], number: u64, len: usize) {
    let placed = arena.place(&meta(number, len), &bytes(number, len));
    for member in members {
        if member.reserve_descriptor().expect("an honest reader") {
            member.describe(placed, false);
        }
    }
}

#[test]
fn every_member_gets_the_packet_cut_to_its_own_snaplen() {
    let (mut arena, region) = arena_at(ARENA, 0);
    let (mut one, mut all, _one) = member(&region, 256, SNAPLEN);
    let (mut two, mut cut, _two) = member(&region, 256, 100);
    for number in 0..40 {
        give(
            &mut arena,
            &mut [&mut one, &mut two],
            number,
            60 + number as usize * 20,
        );
    }
    one.publish();
    two.publish();
    for number in 0..40 {
        let len = 60 + number as usize * 20;
        let packet = all.next().unwrap().expect("published");
        assert_eq!(
            (packet.meta, packet.bytes),
            (meta(number, len), &bytes(number, len)[..])
        );
        let packet = cut.next().unwrap().expect("published");
        assert_eq!(packet.bytes, &bytes(number, len)[..len.min(100)]);
        assert_eq!(packet.meta.wire_len, len as u32 + 4);
    }
    assert!(all.next().unwrap().is_none() && all.recycled() == 0);
    assert_eq!(arena.placed(), 40, "one copy for both");
}

#[test]
fn a_reader_that_lags_loses_its_own_is_told_and_costs_nobody() {
    let (mut arena, region) = arena_at(ARENA, 0);
    let (mut one, mut quick, _one) = member(&region, 4096, SNAPLEN);
    let (mut two, mut slow, _two) = member(&region, 4096, SNAPLEN);
    for number in 0..3000 {
        give(&mut arena, &mut [&mut one, &mut two], number, 500);
        one.publish();
        two.publish();
        let packet = quick.next().unwrap().expect("whole: it came just now");
        assert_eq!((packet.meta.ts_ns, packet.meta.lost), (number, 0));
        assert_eq!(packet.bytes, bytes(number, 500));
    }
    let mut next = 0;
    let mut received = 0;
    while let Some(packet) = slow.next().unwrap() {
        next += u64::from(packet.meta.lost);
        assert_eq!(
            packet.meta.ts_ns, next,
            "the loss is told where it happened"
        );
        assert_eq!(packet.bytes, bytes(next, 500));
        (next, received) = (next + 1, received + 1);
    }
    assert_eq!((next, received + slow.dropped()), (3000, 3000));
    // 536 bytes each: what an arena holds, but for the floor's step.
    let holds = ARENA / 536;
    assert!(
        (holds - 4..=holds).contains(&received),
        "{received} of {holds}"
    );
    assert_eq!((slow.unread(), quick.recycled()), (0, 0));
}

#[test]
fn random_operations_agree_with_a_queue() {
    let mut recycled = 0;
    for seed in 1..=16 {
        let mut dice = Dice(seed);
        let start = if seed % 2 == 0 {
            0_u64.wrapping_sub(8 * dice.below(4096))
        } else {
            0
        };
        let (mut arena, region) = arena_at([1 << 13, ARENA][seed as usize % 2], start);
        let (mut producer, mut consumer, _ring) = member(&region, 256, SNAPLEN);
        let (mut model, mut number, mut dropped, mut next) = (VecDeque::new(), 0, 0, 0);
        let (mut visible, mut received) = (0_usize, 0);
        let mut check = |packet: crate::Packet<'_>, model: &mut VecDeque<(u64, usize)>| {
            // Lost ones left the queue, at either end of the descriptor ring.
            next += u64::from(packet.meta.lost);
            let mut passed = 0;
            while let Some((number, len)) = model.pop_front() {
                passed += 1;
                if number == next {
                    assert_eq!(packet.bytes, bytes(number, len));
                    assert_eq!(
                        Meta {
                            lost: 0,
                            ..packet.meta
                        },
                        meta(number, len)
                    );
                    next += 1;
                    return passed;
                }
            }
            panic!("a packet nobody published: {next}");
        };
        for _ in 0..20_000 {
            match dice.below(10) {
                0..=4 => {
                    let len = dice.below(u64::from(SNAPLEN) + 1) as usize;
                    if producer.reserve_descriptor().unwrap() {
                        let placed = arena.place(&meta(number, len), &bytes(number, len));
                        producer.describe(placed, false);
                        model.push_back((number, len));
                    } else {
                        dropped += 1;
                    }
                    number += 1;
                }
                5 => {
                    producer.publish();
                    visible = model.len();
                }
                6 => {
                    for packet in consumer.batch(dice.below(9) as usize) {
                        visible -= check(packet.unwrap(), &mut model);
                        received += 1;
                    }
                }
                7 => {
                    let mut end = 0;
                    for packet in consumer.span(dice.below(5) as usize) {
                        let packet = packet.unwrap();
                        let start = packet.bytes.as_ptr().addr();
                        assert!(end == 0 || start.wrapping_sub(end) < 40, "in one piece");
                        end = start + packet.bytes.len();
                        visible -= check(packet, &mut model);
                        received += 1;
                    }
                }
                8 => {
                    let waits = !consumer.is_drained();
                    let packet = consumer.next().unwrap();
                    assert_eq!(packet.is_some(), waits, "what was seen is had");
                    if let Some(packet) = packet {
                        visible -= check(packet, &mut model);
                        received += 1;
                    }
                }
                _ => consumer.release(),
            }
            assert!(visible <= model.len());
        }
        producer.publish();
        while let Some(packet) = consumer.next().unwrap() {
            check(packet, &mut model);
            received += 1;
        }
        assert_eq!(received + consumer.dropped(), number);
        assert_eq!(consumer.dropped(), dropped + consumer.recycled());
        assert_eq!(producer.written(), received + consumer.recycled());
        recycled += consumer.recycled();
    }
    assert!(recycled > 5_000, "the runs recycled: {recycled}");
}

#[test]
fn a_loan_outlives_the_look_for_more() {
    let (mut arena, region) = arena_at(1 << 21, 0);
    let (mut producer, mut consumer, _ring) = member(&region, 4096, SNAPLEN);
    for number in 0..1500 {
        give(&mut arena, &mut [&mut producer], number, 999);
    }
    producer.publish();
    let mut taken = 0;
    while taken < 1500 {
        let lent: Vec<(Meta, *const u8, usize)> = consumer
            .batch(usize::MAX)
            .map(|packet| packet.unwrap())
            .map(|packet| (packet.meta, packet.bytes.as_ptr(), packet.bytes.len()))
            .collect();
        assert!(!lent.is_empty());
        // As Port::settle does while a batch is lent.
        assert_eq!(consumer.is_drained(), taken + lent.len() as u64 == 1500);
        let _: Wait = consumer.arm_lent(1, 0);
        let copies = consumer.copies();
        let base = copies.address(0, 0).addr();
        for (meta, at, len) in lent {
            let mut copy = vec![0; len];
            copies.read((at.addr() - base) as u64, &mut copy);
            assert_eq!(copy, bytes(meta.ts_ns, len));
            assert_eq!(meta.ts_ns, taken);
            taken += 1;
        }
    }
}

#[test]
fn a_look_says_whether_it_was_whole() {
    let (mut arena, region) = arena_at(1 << 13, 0);
    let (mut producer, mut consumer, _ring) = member(&region, 256, SNAPLEN);
    for number in 0..3 {
        give(&mut arena, &mut [&mut producer], number, 300);
    }
    producer.publish();
    let look = consumer.look().unwrap().expect("published");
    let mut copy = [0; 400];
    assert_eq!(consumer.read_at(&look, 0, &mut copy), 300);
    assert_eq!(copy[..300], bytes(0, 300));
    assert_eq!(consumer.read_at(&look, 290, &mut copy), 10);
    assert!(consumer.is_whole(&look));
    let look = consumer.look().unwrap().expect("published");
    for number in 3..40 {
        give(&mut arena, &mut [&mut producer], number, 300);
    }
    producer.publish();
    assert!(
        !consumer.is_whole(&look),
        "overwritten while it was looked at"
    );
    let packet = consumer.next().unwrap().expect("the newest are whole");
    // 1 was not whole; everything before this one was recycled.
    let lost = u64::from(packet.meta.lost);
    assert_eq!(lost, packet.meta.ts_ns - 1);
    assert_eq!(consumer.recycled(), lost);
}

#[test]
fn a_mark_on_a_recycled_packet_is_not_lost_with_it() {
    let (mut arena, region) = arena_at(1 << 13, 0);
    let (mut producer, mut consumer, _ring) = member(&region, 256, SNAPLEN);
    let placed = arena.place(&meta(0, 60), &bytes(0, 60));
    assert!(producer.reserve_descriptor().unwrap());
    producer.describe(placed, true);
    for number in 1..200 {
        give(&mut arena, &mut [&mut producer], number, 300);
    }
    producer.publish();
    let marks: Vec<bool> = consumer
        .batch(3)
        .map(|packet| packet.unwrap().meta)
        .map(|found| (found.flags ^ meta(found.ts_ns, 0).flags) & flags::GAP != 0)
        .collect();
    assert_eq!(marks, [true, false, false]);
}

#[test]
fn a_retired_arena_has_no_whole_packets() {
    let (mut arena, region) = arena_at(ARENA, 0);
    let (mut producer, mut consumer, _ring) = member(&region, 256, SNAPLEN);
    give(&mut arena, &mut [&mut producer], 0, 60);
    producer.publish();
    arena.retire();
    assert!(consumer.next().unwrap().is_none());
    assert_eq!(consumer.dropped(), 1);
    assert!(matches!(
        ArenaReader::attach(region),
        Err(AttachError::Geometry("arena's epoch", 0))
    ));
}

#[test]
fn what_is_no_arena_is_not_made_and_not_attached_to() {
    let geometry = |capacity, snaplen, epoch| ArenaGeometry {
        capacity,
        snaplen,
        epoch,
        queue: 0,
    };
    let make = |geometry| Arena::create(Region::heap(arena_size(1 << 16)), geometry).map(|_| ());
    assert_eq!(
        make(geometry(5000, 60, 1)),
        Err(CreateError::Capacity(5000))
    );
    let most = arena_snaplen(1 << 16);
    assert_eq!(make(geometry(1 << 16, most, 1)), Ok(()));
    assert_eq!(
        make(geometry(1 << 16, most + 1, 1)),
        Err(CreateError::Snaplen(most + 1))
    );
    assert_eq!(make(geometry(1 << 16, 60, 0)), Err(CreateError::Epoch(0)));
    let need = arena_size(1 << 17);
    let have = arena_size(1 << 16);
    assert_eq!(
        make(geometry(1 << 17, 60, 1)),
        Err(CreateError::Region { need, have })
    );
    // A ring of packets is no ring of descriptors, and the other way round.
    let ring = Region::heap(ring_size(4096));
    let _packets = Producer::create(ring.clone(), super::geometry(4096, 60)).unwrap();
    let (_arena, region) = arena_at(ARENA, 0);
    let reader = ArenaReader::attach(region.clone()).unwrap();
    assert!(matches!(
        Consumer::attach_group(ring, reader),
        Err(AttachError::Magic(_))
    ));
    let (_producer, _consumer, ring) = member(&region, 256, 60);
    assert!(matches!(Consumer::attach(ring), Err(AttachError::Magic(_))));
}

/// Clause: the host decides nothing by what lies in the arena, and a reader survives anything there.
#[test]
fn garbage_in_the_arena_harms_the_readers_packets_only() {
    let (mut arena, region) = arena_at(1 << 13, 0);
    let (mut producer, mut consumer, ring) = member(&region, 256, SNAPLEN);
    let mut dice = Dice(0xa4e4a);
    let (mut corrupt, mut placed) = (0, Vec::new());
    for number in 0..300_000_u64 {
        match dice.below(4) {
            0 => {
                let at = 8 * dice.below(region.len() / 8);
                region.store_u64(at, dice.roll(), Ordering::Relaxed);
            }
            1 => {
                let len = dice.below(400) as usize;
                if producer.reserve_descriptor().unwrap() {
                    let new = arena.place(&meta(number, len), &bytes(number, len));
                    producer.describe(new, false);
                    placed.push(new);
                }
                producer.publish();
            }
            2 => {
                // Descriptors too: they lie in memory that the reader can write.
                let at = DATA_OFFSET + 8 * dice.below(512);
                ring.store_u64(at, dice.roll() >> dice.below(64), Ordering::Relaxed);
            }
            _ => {
                let failed = consumer.batch(9).any(|packet| packet.is_err());
                consumer.release();
                if failed || dice.below(500) == 0 {
                    corrupt += u64::from(failed);
                    // A new arena and the same ring, from its head on.
                    let geometry = *arena.geometry();
                    arena = Arena::create(region.clone(), geometry).unwrap();
                    let head = ring.load_u64(HEAD, Ordering::Relaxed);
                    ring.store_u64(TAIL, head, Ordering::Relaxed);
                    let reader = ArenaReader::attach(region.clone()).unwrap();
                    consumer = Consumer::attach_group(ring.clone(), reader).unwrap();
                }
            }
        }
    }
    assert!(corrupt > 100, "{corrupt} impossible records were told");
    // The host's own positions never strayed.
    let at = |placed: &crate::Placed| u64::from(placed.at) * 8;
    assert!(placed.iter().all(|placed| at(placed) < 1 << 13));
}

#[test]
fn racing_readers_never_take_a_torn_packet_for_a_whole_one() {
    const PACKETS: u64 = 400_000;
    let (mut arena, region) = arena_at(1 << 14, 0);
    let over = AtomicBool::new(false);
    let torn = AtomicU64::new(0);
    let whole: [AtomicU64; 3] = Default::default();
    let mut producers = Vec::new();
    std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for (kind, whole) in whole.iter().enumerate() {
            let (producer, mut consumer, _ring) = member(&region, 1 << 12, SNAPLEN);
            producers.push(producer);
            let (over, torn) = (&over, &torn);
            readers.push(scope.spawn(move || {
                let (mut received, mut copy) = (0_u64, [0; 512]);
                loop {
                    let last = over.load(Ordering::Acquire);
                    let mut found = false;
                    if kind == 0 {
                        for _ in 0..32 {
                            let Some(look) = consumer.look().unwrap() else {
                                break;
                            };
                            found = true;
                            let len = consumer.read_at(&look, 0, &mut copy);
                            if consumer.is_whole(&look) {
                                received += 1;
                                let sound = is_sound(&look.meta, &copy[..len]);
                                torn.fetch_add(u64::from(!sound), Ordering::Relaxed);
                            }
                        }
                    } else {
                        for packet in consumer.batch(32) {
                            let packet = packet.unwrap();
                            found = true;
                            received += 1;
                            let sound = is_sound(&packet.meta, packet.bytes);
                            torn.fetch_add(u64::from(!sound), Ordering::Relaxed);
                        }
                    }
                    consumer.release();
                    whole.store(received, Ordering::Relaxed);
                    if last && !found {
                        return (received, consumer.dropped());
                    }
                }
            }));
        }
        // However late a reader is given a processor, it is to race.
        let deadline = Deadline::new("every reader reads");
        // Readers end also if this thread fails.
        let end = Over(&over);
        let mut number = 0;
        let slowest = || {
            whole
                .iter()
                .map(|count| count.load(Ordering::Relaxed))
                .min()
        };
        while number < PACKETS || slowest() < Some(1000) {
            deadline.check();
            let len = (number * 37 % 400) as usize;
            let frame = [number as u8; 400];
            let meta = Meta {
                ts_ns: number,
                ..Meta::default()
            };
            let placed = arena.place(&meta, &frame[..len]);
            for producer in &mut producers {
                if producer.reserve_descriptor().unwrap() {
                    producer.describe(placed, false);
                }
                if number % 8 == 7 {
                    producer.publish();
                }
            }
            number += 1;
            // Who found everything overwritten until here has time to read now.
            if number > PACKETS && number % 8 == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        producers.iter_mut().for_each(Producer::publish);
        drop(end);
        for reader in readers {
            let (received, lost) = reader.join().expect("a reader");
            assert_eq!(received + lost, number);
        }
    });
    assert_eq!(torn.load(Ordering::Relaxed), 0);
}

/// Says at its end that all is over.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

fn is_sound(meta: &Meta, bytes: &[u8]) -> bool {
    bytes.len() as u64 == meta.ts_ns * 37 % 400
        && bytes.iter().all(|&byte| byte == meta.ts_ns as u8)
}

#[test]
fn the_floor_moves_in_steps_and_never_too_late() {
    let (mut arena, region) = arena_at(1 << 14, 0);
    let (mut floors, mut last) = (0, 0);
    for number in 0..1000 {
        let placed = arena.place(&meta(number, 60), &bytes(number, 60));
        let floor = region.load_u64(header::FLOOR, Ordering::Relaxed);
        floors += u64::from(floor != last);
        last = floor;
        assert!(floor <= placed.seq, "the newest is always whole");
        let end = placed.seq + 96;
        assert!(floor + (1 << 14) >= end, "all that was touched is below");
    }
    // 1000 records of 96 bytes are almost 6 turns, of which the first raises nothing.
    assert!((250..400).contains(&floors), "{floors}");
}

//! Peers that write anything anywhere at any time.

use std::sync::atomic::Ordering;

use super::{Dice, EPOCH, bytes, geometry, meta};
use crate::layout::{
    DATA_OFFSET, HEAD, MAX_DELAY_US, MIN_CAPACITY, Meta, PAD, PUBLISHED, READ, TAIL, WAKE_AT,
    WAKE_SEQ, header, ring_size,
};
use crate::{Bell, Consumer, Producer, Region};
use vnplug_frame::witness::seed;

const GUARD: u64 = 8192;
const CANARY: u64 = 0xdead_beef_0bad_cafe;
/// Lies and operations, in any order.
const OPS: u64 = 10_000_000;

/// A ring between two guard zones.
fn guarded() -> (Region, Region) {
    let size = ring_size(MIN_CAPACITY);
    let all = Region::heap(GUARD + size + GUARD);
    for offset in (0..GUARD).step_by(8) {
        all.store_u64(offset, CANARY, Ordering::Relaxed);
        all.store_u64(GUARD + size + offset, CANARY, Ordering::Relaxed);
    }
    let ring = all.part(GUARD, size).expect("inside");
    (all, ring)
}

fn assert_guards(all: &Region) {
    let size = ring_size(MIN_CAPACITY);
    for offset in (0..GUARD).step_by(8) {
        assert_eq!(all.load_u64(offset, Ordering::Relaxed), CANARY);
        assert_eq!(
            all.load_u64(GUARD + size + offset, Ordering::Relaxed),
            CANARY
        );
    }
}

/// Near-misses are likelier to do harm than noise.
fn nasty(dice: &mut Dice, near: u64) -> u64 {
    match dice.below(8) {
        0 => dice.roll(),
        1 => near.wrapping_add(8 * dice.below(1024)),
        2 => near.wrapping_sub(8 * dice.below(1024)),
        3 => near.wrapping_add(1 << 63),
        4 => 0,
        5 => u64::MAX - dice.below(16),
        6 => 1 << dice.below(64),
        _ => near,
    }
}

#[test]
fn a_lying_reader_harms_only_itself() {
    let (all, region) = guarded();
    let mut dice = Dice(seed("a lying reader"));
    let frame = bytes(1, 300);
    let (mut lied, mut fresh, mut ops) = (0_u64, 0_u64, 0_u64);
    while ops < OPS {
        fresh += 1;
        let start = if dice.below(2) == 0 {
            0
        } else {
            0_u64.wrapping_sub(8 * dice.below(2048))
        };
        let geometry = geometry(MIN_CAPACITY, 300);
        let mut producer = Producer::create_at(region.clone(), geometry, start).unwrap();
        let mut near = start;
        for _ in 0..2_000 {
            ops += 1;
            match dice.below(12) {
                0 => region.store_u64(TAIL, nasty(&mut dice, near), Ordering::Relaxed),
                1 => region.store_u64(WAKE_AT, nasty(&mut dice, near), Ordering::Relaxed),
                2 => region.store_u64(WAKE_SEQ, dice.roll(), Ordering::Relaxed),
                3 => {
                    // Any word at all: header, head, life, records, lengths.
                    let at = 8 * dice.below(region.len() / 8);
                    if at != TAIL || dice.below(50) == 0 {
                        region.store_u64(at, nasty(&mut dice, near), Ordering::Relaxed);
                    }
                }
                4 => {
                    // An honest step, so that runs live long: give everything back.
                    near = region.load_u64(HEAD, Ordering::Relaxed);
                    if dice.below(4) != 0 {
                        region.store_u64(TAIL, near, Ordering::Relaxed);
                    }
                }
                5 => match producer.bell(dice.roll()) {
                    Bell::Quiet | Bell::Ring | Bell::Later(_) => {}
                },
                6 | 7 => producer.publish(),
                8 => assert!(producer.used() <= MIN_CAPACITY),
                _ => {
                    let len = dice.below(301) as usize;
                    if producer.push(&meta(ops, len), &frame[..len]).is_err() {
                        lied += 1;
                        break;
                    }
                }
            }
            assert_eq!(producer.geometry(), &geometry, "frozen");
        }
        if fresh.is_multiple_of(64) {
            assert_guards(&all);
        }
    }
    assert_guards(&all);
    assert!(
        lied > 1000,
        "lies were told and found: {lied} in {fresh} rings"
    );
    println!("figure: G-02 hostile operations on receive rings = {ops}");
}

#[test]
fn a_header_rewritten_after_creation_changes_nothing() {
    let (all, region) = guarded();
    let mut producer = Producer::create(region.clone(), geometry(MIN_CAPACITY, 64)).unwrap();
    let mut consumer = Consumer::attach(region.clone()).unwrap();
    for round in 0..1_000 {
        for at in (0..header::SIZE).step_by(8) {
            region.store_u64(at, u64::MAX / 3, Ordering::Relaxed);
        }
        assert_eq!(producer.push(&meta(round, 64), &bytes(round, 64)), Ok(true));
        producer.publish();
        assert_eq!(
            consumer.next().unwrap().expect("published").bytes,
            bytes(round, 64)
        );
        consumer.release();
    }
    assert_eq!(producer.geometry(), &geometry(MIN_CAPACITY, 64));
    assert_guards(&all);
}

/// Clause: whatever the memory holds, the reader returns packets within the area and the snaplen,
/// `None` or `Corrupt`, and ends.
#[test]
fn random_ring_memory_never_leads_a_reader_outside() {
    let (all, region) = guarded();
    let mut dice = Dice(seed("random ring memory"));
    let (mut packets, mut corrupt) = (0_u64, 0_u64);
    let mut sum = 0_u64;
    for _ in 0..30_000 {
        let start = 8 * dice.below(MIN_CAPACITY / 8);
        drop(Producer::create_at(region.clone(), geometry(MIN_CAPACITY, 300), start).unwrap());
        let tail = start.wrapping_add(nasty(&mut dice, 0) & !7);
        region.store_u64(TAIL, tail, Ordering::Relaxed);
        let head = tail.wrapping_add(dice.below(MIN_CAPACITY + 16));
        region.store_u64(HEAD, head, Ordering::Relaxed);
        region.store_u64(PUBLISHED, dice.roll(), Ordering::Relaxed);
        region.store_u64(READ, dice.roll(), Ordering::Relaxed);
        for at in (0..MIN_CAPACITY).step_by(8) {
            let cap_len = match dice.below(8) {
                0 => u64::from(PAD),
                1 => dice.roll(),
                2 => 300 + dice.below(2),
                _ => dice.below(100),
            };
            region.store_u64(DATA_OFFSET + at, cap_len, Ordering::Relaxed);
        }
        let mut consumer = Consumer::attach(region.clone()).unwrap();
        for step in 0..1_000 {
            assert!(step < 999, "ends");
            if dice.below(16) == 0 {
                // The memory changes while it is read.
                let at = 8 * dice.below(region.len() / 8);
                region.store_u64(at, nasty(&mut dice, tail), Ordering::Relaxed);
            }
            if dice.below(64) == 0 {
                consumer.arm(dice.roll() as u32, dice.roll() as u32);
                region.store_u32(MAX_DELAY_US, 0, Ordering::Relaxed);
            }
            match consumer.next() {
                Ok(Some(packet)) => {
                    assert!(packet.bytes.len() <= 300);
                    sum += packet
                        .bytes
                        .iter()
                        .map(|byte| u64::from(*byte))
                        .sum::<u64>();
                    packets += 1;
                }
                Ok(None) => break,
                Err(_) => {
                    corrupt += 1;
                    break;
                }
            }
        }
        assert_eq!(consumer.geometry().epoch, EPOCH);
    }
    assert_guards(&all);
    assert!(
        packets > 10_000 && corrupt > 10_000 && sum > 0,
        "{packets} {corrupt}"
    );
}

#[test]
fn random_headers_attach_only_when_they_fit() {
    let (_, region) = guarded();
    let mut dice = Dice(seed("random headers"));
    let mut attached = 0;
    for _ in 0..200_000 {
        drop(Producer::create(region.clone(), geometry(MIN_CAPACITY, 300)).unwrap());
        for _ in 0..=dice.below(3) {
            let at = 8 * dice.below(header::SIZE / 8);
            region.store_u64(at, nasty(&mut dice, MIN_CAPACITY), Ordering::Relaxed);
        }
        if let Ok(mut consumer) = Consumer::attach(region.clone()) {
            attached += 1;
            assert!(ring_size(consumer.geometry().capacity) <= region.len());
            assert!(consumer.next().unwrap().is_none());
        }
    }
    assert!(attached > 1_000);
}

#[test]
fn reused_memory_shows_as_closed() {
    let (_, region) = guarded();
    let mut first = Producer::create(region.clone(), geometry(MIN_CAPACITY, 64)).unwrap();
    let consumer = Consumer::attach(region.clone()).unwrap();
    first.push(&Meta::default(), &[1; 60]).unwrap();
    first.publish();
    let again = crate::layout::Geometry {
        epoch: EPOCH + 256,
        ..geometry(MIN_CAPACITY, 64)
    };
    drop(Producer::create(region, again).unwrap());
    assert_eq!(consumer.life(), crate::layout::Life::Closed);
}

//! Exactness: the ring against a queue that cannot be wrong.

use std::collections::VecDeque;

use super::{Dice, bytes, meta, ring, ring_at};
use crate::layout::{ALIGN, DATA_OFFSET, HEAD, MIN_CAPACITY, PAD, READ, TAIL, record_size};
use crate::{AttachError, Consumer, PeerLied};
use std::sync::atomic::Ordering;

#[test]
fn a_packet_arrives_as_it_was_filled() {
    let (mut producer, mut consumer, _) = ring(4096, 1514);
    assert_eq!(producer.push(&meta(5, 60), &bytes(5, 60)), Ok(true));
    assert!(
        consumer.next().unwrap().is_none(),
        "nothing is visible before publish"
    );
    producer.publish();
    let packet = consumer.next().unwrap().expect("published");
    assert_eq!(packet.meta, meta(5, 60));
    assert_eq!(packet.bytes, bytes(5, 60));
    assert!(consumer.next().unwrap().is_none());
}

#[test]
fn every_length_at_every_offset_wraps_with_a_pad() {
    const SNAPLEN: u64 = 300;
    for offset in (0..MIN_CAPACITY).step_by(ALIGN as usize) {
        let (mut producer, mut consumer, region) = ring_at(MIN_CAPACITY, SNAPLEN as u32, offset);
        for len in [
            0, 1, 7, 8, 15, 16, 31, 32, 33, 60, 64, 65, 127, 128, 129, SNAPLEN,
        ] {
            let len = len as usize;
            let at = consumer.position();
            assert_eq!(
                producer.push(&meta(offset, len), &bytes(offset, len)),
                Ok(true)
            );
            producer.publish();
            let packet = consumer.next().unwrap().expect("published");
            assert_eq!(packet.bytes, bytes(offset, len), "{len} bytes at {offset}");
            assert_eq!(packet.meta, meta(offset, len));
            let to_end = MIN_CAPACITY - at % MIN_CAPACITY;
            let size = record_size(len as u32);
            let padded = to_end < size;
            assert_eq!(
                consumer.position() - at,
                size + if padded { to_end } else { 0 }
            );
            let word = region.load_u32(DATA_OFFSET + at % MIN_CAPACITY, Ordering::Relaxed);
            assert_eq!(word == PAD, padded);
            consumer.release();
        }
    }
}

#[test]
fn every_length_up_to_snaplen_survives() {
    const SNAPLEN: usize = 2000;
    let (mut producer, mut consumer, _) = ring(8192, SNAPLEN as u32);
    for len in 0..=SNAPLEN {
        assert_eq!(
            producer.push(&meta(len as u64, len), &bytes(len as u64, len)),
            Ok(true)
        );
        producer.publish();
        let packet = consumer.next().unwrap().expect("published");
        assert_eq!(packet.bytes, bytes(len as u64, len));
        consumer.release();
    }
}

#[test]
fn full_ring_drops_counts_and_tells_in_the_stream() {
    let (mut producer, mut consumer, _) = ring(4096, 96);
    let fitting = 4096 / record_size(96);
    for number in 0..fitting + 5 {
        assert_eq!(
            producer.push(&meta(number, 96), &bytes(number, 96)),
            Ok(number < fitting)
        );
    }
    producer.publish();
    assert_eq!((producer.dropped(), consumer.dropped()), (5, 5));
    assert_eq!(consumer.batch(usize::MAX).count() as u64, fitting);
    assert_eq!(
        producer.push(&meta(0, 96), &bytes(0, 96)),
        Ok(false),
        "taken is not released"
    );
    consumer.release();
    assert_eq!(producer.push(&meta(1, 96), &bytes(1, 96)), Ok(true));
    assert_eq!(producer.push(&meta(2, 96), &bytes(2, 96)), Ok(true));
    producer.publish();
    let lost: Vec<u32> = consumer
        .batch(9)
        .map(|packet| packet.unwrap().meta.lost)
        .collect();
    assert_eq!(lost, [6, 0]);
}

#[test]
fn a_slot_that_is_not_filled_costs_nothing() {
    let (mut producer, mut consumer, _) = ring(4096, 96);
    for _ in 0..1000 {
        drop(producer.reserve(96).unwrap().expect("room"));
    }
    assert_eq!(producer.push(&meta(1, 10), &bytes(1, 10)), Ok(true));
    producer.publish();
    assert_eq!(
        consumer.next().unwrap().expect("published").bytes,
        bytes(1, 10)
    );
    assert_eq!(producer.dropped(), 0);
}

#[test]
#[should_panic(expected = "filled as reserved")]
fn a_slot_is_stale_once_something_else_was_written() {
    let (mut producer, _, _) = ring(4096, 96);
    let slot = producer.reserve(10).unwrap().expect("room");
    producer.push(&meta(1, 10), &bytes(1, 10)).unwrap();
    producer.fill(slot, &meta(1, 10), &bytes(1, 10));
}

#[test]
fn random_operations_agree_with_a_queue() {
    let mut drops = 0;
    for seed in 1..=24 {
        let mut dice = Dice(seed);
        // Half of the runs cross 2^64 early.
        let start = if seed % 2 == 0 {
            0_u64.wrapping_sub(8 * dice.below(4096))
        } else {
            0
        };
        let snaplen = [64, 300, 1514][seed as usize % 3];
        let (mut producer, mut consumer, _) = ring_at(MIN_CAPACITY, snaplen, start);
        let mut model = VecDeque::new(); // (number, length, lost before it)
        let (mut visible, mut lost, mut dropped, mut number) = (0, 0, 0, 0);
        for _ in 0..50_000 {
            match dice.below(8) {
                0..=3 => {
                    let len = dice.below(u64::from(snaplen) + 1) as usize;
                    number += 1;
                    if producer
                        .push(&meta(number, len), &bytes(number, len))
                        .unwrap()
                    {
                        model.push_back((number, len, lost));
                        lost = 0;
                    } else {
                        lost += 1;
                        dropped += 1;
                    }
                }
                4 | 5 => {
                    producer.publish();
                    visible = model.len();
                }
                6 => {
                    let max = dice.below([4, 8, 20][seed as usize / 3 % 3]) as usize;
                    let expect = max.min(visible);
                    let mut taken = 0;
                    for packet in consumer.batch(max) {
                        let packet = packet.unwrap();
                        let (number, len, lost) = model.pop_front().expect("a modelled packet");
                        assert_eq!(
                            packet.meta,
                            crate::layout::Meta {
                                lost,
                                ..meta(number, len)
                            }
                        );
                        assert_eq!(packet.bytes, bytes(number, len));
                        taken += 1;
                    }
                    assert_eq!(taken, expect);
                    visible -= taken;
                }
                _ => consumer.release(),
            }
            assert_eq!(producer.dropped(), dropped);
        }
        drops += dropped;
    }
    assert!(drops > 10_000, "the runs reached the full ring: {drops}");
}

/// Clause: a tail is taken if and only if it lies between the last one taken and what was announced.
#[test]
fn a_tail_is_taken_exactly_when_it_is_possible() {
    for start in [0, 0_u64.wrapping_sub(2048)] {
        for released in [0_u64, 1, 5, 42] {
            // 42 records of 96 bytes fill the ring; `released` of them are given back first.
            let tails = |announced: u64, tail: u64| {
                let step = [
                    0,
                    1,
                    7,
                    8,
                    96,
                    4096,
                    1 << 32,
                    1 << 63,
                    u64::MAX,
                    u64::MAX / 2,
                ];
                step.map(|s| [announced.wrapping_add(s), announced.wrapping_sub(s)])
                    .into_iter()
                    .flatten()
                    .chain(step.map(|s| tail.wrapping_add(s)))
                    .chain(step.map(|s| tail.wrapping_sub(s)))
                    .collect::<Vec<_>>()
            };
            let setup = || {
                let (mut producer, mut consumer, region) = ring_at(4096, 64, start);
                for number in 0..42 {
                    assert_eq!(
                        producer.push(&meta(number, 64), &bytes(number, 64)),
                        Ok(true)
                    );
                }
                producer.publish();
                assert_eq!(consumer.batch(released as usize).count() as u64, released);
                consumer.release();
                // The ring looks full to the producer until it refreshes: make it.
                let announced = region.load_u64(HEAD, Ordering::Relaxed);
                while producer.push(&meta(0, 64), &bytes(0, 64)).unwrap() {}
                (producer, region, announced, consumer.position())
            };
            let (_, _, announced, tail) = setup();
            for lie in tails(announced, tail) {
                let (mut producer, region, ..) = setup();
                region.store_u64(TAIL, lie, Ordering::Relaxed);
                let possible = lie.wrapping_sub(tail) <= announced.wrapping_sub(tail);
                match producer.push(&meta(0, 64), &bytes(0, 64)) {
                    Ok(_) => assert!(possible, "{lie:#x} was taken"),
                    Err(lied) => {
                        assert!(!possible, "{lie:#x} was refused");
                        assert_eq!(
                            lied,
                            PeerLied {
                                head: announced,
                                tail: lie
                            }
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_second_reader_goes_on_where_the_first_released() {
    let (mut producer, mut first, region) = ring(4096, 64);
    for number in 0..10 {
        producer
            .push(&meta(number, 64), &bytes(number, 64))
            .unwrap();
    }
    producer.publish();
    assert_eq!(first.batch(4).count(), 4);
    first.release();
    assert_eq!(
        first.batch(3).count(),
        3,
        "taken and not released: read again by the next"
    );
    let mut second = Consumer::attach(region.clone()).unwrap();
    assert_eq!(second.taken(), 4);
    assert_eq!(second.next().unwrap().expect("unread").meta.ts_ns, 4);
    assert_eq!(region.load_u64(READ, Ordering::Relaxed), 4);
}

#[test]
fn an_unaligned_tail_is_not_attached_to() {
    let (_, _, region) = ring(4096, 64);
    region.store_u64(TAIL, 3, Ordering::Relaxed);
    assert!(matches!(
        Consumer::attach(region),
        Err(AttachError::Geometry("tail", 3))
    ));
}

#[test]
fn a_span_lies_in_one_piece_and_all_spans_together_are_everything() {
    let (mut producer, mut consumer, _region) = ring(4096, 600);
    let mut dice = Dice(7);
    let (mut pushed, mut taken, mut wraps) = (0_u64, 0_u64, 0);
    for _ in 0..5000 {
        for _ in 0..dice.below(8) {
            let len = dice.below(600) as usize;
            if producer
                .push(&meta(pushed, len), &bytes(pushed, len))
                .unwrap()
            {
                pushed += 1;
            }
        }
        producer.publish();
        let max = 1 + dice.below(6) as usize;
        let before = taken;
        let mut end = 0;
        for packet in consumer.span(max) {
            let packet = packet.unwrap();
            let start = packet.bytes.as_ptr().addr();
            // Nothing but padding and a header in between.
            let gap = start.wrapping_sub(end);
            assert!(end == 0 || gap < 32 + 8, "{gap}");
            end = start + packet.bytes.len();
            assert_eq!(packet.bytes, bytes(taken, packet.bytes.len()));
            taken += 1;
        }
        wraps += u64::from(taken - before < max as u64 && taken < pushed);
        consumer.release();
    }
    assert!(wraps > 100, "{wraps} spans ended at the end of the area");
    while taken < pushed {
        taken += consumer.span(8).count() as u64;
    }
    assert!(consumer.is_drained());
}

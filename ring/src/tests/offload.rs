//! Frames that were left to a NIC, with what is left to do.

use super::*;
use crate::control::Segments;
use crate::offload::{Offload, PREFIX, gso};
use crate::tests::group::{ARENA, arena_at, member};
use crate::{Intake, Producer, SenderLied};

const OFFLOAD: Offload = Offload {
    flags: 1,
    gso_type: gso::TCPV4,
    gso_size: 1448,
    csum_start: 34,
    csum_offset: 16,
};

/// Every third packet is a super-frame.
fn some(number: u64) -> Meta {
    let mut meta = meta(number, 300);
    if number.is_multiple_of(3) {
        meta.flags |= flags::OFFLOAD;
        meta.offload = OFFLOAD;
        meta.offload.gso_size = number as u16;
    }
    meta
}

#[test]
fn a_reader_has_the_frame_and_what_is_left_to_do() {
    let (mut producer, mut consumer, _) = ring(4096, 400);
    for number in 0..500 {
        let bytes = bytes(number, 300);
        assert!(producer.push(&some(number), &bytes).unwrap());
        producer.publish();
        let packet = consumer.next().unwrap().expect("published");
        assert_eq!((packet.meta, packet.bytes), (some(number), &bytes[..]));
        consumer.release();
    }
}

#[test]
fn one_that_looks_has_the_same() {
    let (mut producer, mut consumer, _) = ring(1 << 16, 400);
    let mut arena = arena_at(ARENA, 0);
    let (mut of_group, mut looks, _one) = member(&arena.1, 4096, 400);
    let (mut of_other, mut copies, _two) = member(&arena.1, 4096, 400);
    for number in 0..30 {
        let bytes = bytes(number, 300);
        assert!(producer.push(&some(number), &bytes).unwrap());
        let placed = arena.0.place(&some(number), &bytes);
        for member in [&mut of_group, &mut of_other] {
            assert!(member.reserve_descriptor().unwrap());
            member.describe(placed, false);
            member.publish();
        }
        producer.publish();
        for reader in [&mut consumer, &mut looks] {
            let look = reader.look().unwrap().expect("published");
            let mut seen = vec![0; look.len as usize];
            assert_eq!(reader.read_at(&look, 0, &mut seen), 300);
            assert!(reader.is_whole(&look));
            assert_eq!((look.meta, &seen), (some(number), &bytes));
        }
        let packet = copies.next().unwrap().expect("published");
        assert_eq!((packet.meta, packet.bytes), (some(number), &bytes[..]));
    }
}

#[test]
fn two_parts_are_one_record() {
    let (mut producer, mut consumer, _) = ring(4096, 400);
    for number in 0..100 {
        let bytes = bytes(number, 300);
        let (head, rest) = bytes.split_at(number as usize * 3);
        assert!(producer.push_parts(&meta(number, 300), head, rest).unwrap());
        producer.publish();
        let packet = consumer.next().unwrap().expect("published");
        assert_eq!((packet.meta, packet.bytes), (meta(number, 300), &bytes[..]));
        consumer.release();
    }
    // A ring that is full says so.
    let full = (0..100).filter(|_| !producer.push_parts(&meta(0, 300), &[1], &[2; 299]).unwrap());
    assert_eq!(full.count() as u64, producer.dropped());
    assert!(producer.dropped() > 80);
}

#[test]
fn what_a_sender_leaves_to_do_is_taken_if_it_may_leave_something() {
    let region = Region::heap(ring_size(4096));
    let mut intake = Intake::create(region.clone(), geometry(4096, 400)).unwrap();
    let mut sender = Producer::attach(region).unwrap();
    let mut buffer = [0; 400];
    for number in 0..100 {
        let bytes = bytes(number, 300);
        assert!(sender.push(&some(number), &bytes).unwrap());
        sender.publish();
        let taken = intake.take_to(Segments::Merged, |_| &mut buffer).unwrap();
        let (all, sent) = taken.expect("published");
        assert_eq!(all[sent.start..sent.end], bytes);
        assert_eq!(sent.offload, some(number).offload);
        intake.release();
    }
    // To who does not ask, the flag of a sender means nothing.
    assert!(sender.push(&some(0), &[7; 100]).unwrap());
    sender.publish();
    assert_eq!(intake.take(&mut buffer).unwrap(), Some(100 + PREFIX));
    // A record too short for what it says to have.
    let mut short = meta(1, PREFIX - 1);
    short.flags |= flags::OFFLOAD;
    assert!(sender.push_parts(&short, &[0; PREFIX - 1], &[]).unwrap());
    sender.publish();
    let lie = intake
        .take_to(Segments::Merged, |_| &mut buffer)
        .unwrap_err();
    assert!(
        matches!(lie, SenderLied::Record { cap_len: 15, .. }),
        "{lie}"
    );
}

//! Ports of a switch: each gets what is due to it, and the sums close.

use std::num::NonZeroU16;

use super::*;

fn member(id: u32, number: u16) -> (Box<Port>, Consumer) {
    let (mut port, region) = port_and_region(id);
    port.member = NonZeroU16::new(number);
    (port, Consumer::attach(region).unwrap())
}

fn lengths(consumer: &mut Consumer) -> Vec<u32> {
    let mut lengths = Vec::new();
    while let Ok(Some(packet)) = consumer.next() {
        lengths.push(packet.meta.wire_len);
    }
    consumer.release();
    lengths
}

/// Frames of 60, 61, … bytes, due to these ports.
fn deliver(fanout: &mut Fanout, due: &[&[u16]]) {
    let bytes = [5; 100];
    let frames: Vec<_> = (60..)
        .zip(due)
        .map(|(len, due)| Frame {
            bytes: &bytes[..len],
            wire_len: len as u32,
            due,
            ..Frame::default()
        })
        .collect();
    fanout.deliver(&frames, 0);
}

#[test]
fn each_member_gets_what_is_due_to_it_and_a_capture_gets_all() {
    let mut fanout = Fanout::new(0, 0);
    let (one, mut ones) = member(1, 7);
    let (two, mut twos) = member(2, 300);
    fanout.attach(one);
    fanout.attach(two);
    deliver(&mut fanout, &[&[7], &[300, 7], &[], &[9, 300], &[1000]]);
    assert_eq!(lengths(&mut ones), [60, 61]);
    assert_eq!(lengths(&mut twos), [61, 63]);
    assert_eq!(fanout.counters().duties, 4);
    let (capture, region) = port_and_region(3);
    let mut captured = Consumer::attach(region).unwrap();
    fanout.attach(capture);
    deliver(&mut fanout, &[&[7], &[]]);
    assert_eq!(lengths(&mut captured), [60, 61]);
    assert_eq!(lengths(&mut ones), [60]);
    assert!(lengths(&mut twos).is_empty());
    // Who is gone gets nothing, and who has its number then does.
    fanout.detach(2).unwrap();
    let (third, mut thirds) = member(4, 300);
    deliver(&mut fanout, &[&[300]]);
    fanout.attach(third);
    deliver(&mut fanout, &[&[300], &[7, 300]]);
    assert_eq!(lengths(&mut thirds), [60, 61]);
    assert_eq!(lengths(&mut ones), [61]);
    assert_eq!(offered(&fanout), fanout.counters().duties);
}

#[test]
fn another_form_of_a_frame_is_for_members_alone_and_counts_for_them() {
    let mut fanout = Fanout::new(0, 0);
    let (one, mut ones) = member(1, 7);
    let (two, mut twos) = member(2, 8);
    let (capture, region) = port_and_region(3);
    let mut captured = Consumer::attach(region).unwrap();
    for port in [one, two, capture] {
        fanout.attach(port);
    }
    deliver(&mut fanout, &[&[7], &[]]);
    let bytes = [5; 64];
    let form = Frame {
        bytes: &bytes,
        wire_len: 64,
        due: &[8, 7],
        is_form: true,
        ..Frame::default()
    };
    fanout.deliver(&[form], 0);
    deliver(&mut fanout, &[&[7, 8]]);
    assert_eq!(lengths(&mut ones), [60, 64, 60]);
    assert_eq!(lengths(&mut twos), [64, 60]);
    assert_eq!(lengths(&mut captured), [60, 61, 60]);
    assert_eq!(fanout.counters().read, 3);
    assert_eq!(offered(&fanout), fanout.counters().duties);
}

#[test]
fn a_members_own_wishes_hold_and_one_in_quarantine_is_counted() {
    let mut fanout = Fanout::new(0, 0);
    let (mut one, mut ones) = member(1, 1);
    let paused = Tuning {
        enabled: false,
        ..Tuning::default()
    };
    one.judge.tune(paused);
    fanout.attach(one);
    deliver(&mut fanout, &[&[1], &[1]]);
    fanout.tune(1, Tuning::default());
    deliver(&mut fanout, &[&[1]]);
    assert_eq!(lengths(&mut ones), [60]);
    fanout.quarantine(1, "a test".into());
    deliver(&mut fanout, &[&[1], &[1], &[1]]);
    let (_, counters) = fanout.account(1).unwrap();
    let fates = (
        counters.paused,
        counters.delivered,
        counters.dropped_quarantine,
    );
    assert_eq!((counters.offered, fates), (6, (2, 1, 3)));
    assert_eq!(offered(&fanout), fanout.counters().duties);
}

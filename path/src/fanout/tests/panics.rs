//! What panics costs itself, and nobody else anything.

use std::panic::AssertUnwindSafe;

use super::*;

#[test]
#[cfg(debug_assertions)]
fn a_port_that_panics_when_it_is_looked_up_costs_only_itself() {
    let programs = programs();
    let packets = packets::frames(2_000, 0xfa);
    let mut fanout = Fanout::new(0, 0);
    let mut broken = port(1);
    // Longer than its ring's records may be, which an assertion of debug builds finds.
    broken.snaplen = u32::MAX;
    broken.judge.set_filter(programs[11].clone());
    let mut sound = port(2);
    sound.judge.set_filter(programs[11].clone());
    fanout.attach(broken);
    fanout.attach(sound);
    let frames: Vec<Frame<'_>> = packets
        .iter()
        .map(|(bytes, wire_len)| Frame {
            bytes,
            wire_len: *wire_len,
            ts_ns: 0,
            flags: 0,
            vlan_tci: 0,
            ..Frame::default()
        })
        .collect();
    let delivered = AssertUnwindSafe(|| {
        fanout.deliver(&frames, 0);
    });
    assert_eq!(vnplug_testing::panic_of(delivered), None);
    assert!(fanout.account(1).unwrap().0.quarantined().is_some());
    assert!(fanout.account(2).unwrap().0.quarantined().is_none());
    assert_eq!(fanout.counters().duties, offered(&fanout));
    assert_eq!(fanout.account(1).unwrap().1.offered, 2_000);
}

/// A program that panics when it is run.
fn breaking() -> Arc<Program> {
    Arc::new(Program::broken())
}

#[test]
fn a_panic_in_a_readers_program_costs_that_reader_its_port_and_nobody_else_anything() {
    let mut fanout = Fanout::new(0, 0);
    fanout.attach(port(1));
    let mut bad = port(2);
    bad.judge.set_filter(Some(breaking()));
    fanout.attach(bad);
    let mut good = port(3);
    good.judge.set_filter(Some(Arc::new(Program::accept(1))));
    fanout.attach(good);
    let bytes = [5; 60];
    for turn in 0..3 {
        fanout.deliver(&frames_of(&bytes, 10), turn);
        assert_eq!(fanout.counters().duties, offered(&fanout));
    }
    for id in [1, 3] {
        let counters = account(&fanout, id);
        assert_eq!((counters.offered, counters.delivered), (30, 30), "{id}");
    }
    let (bad, counters) = fanout.account(2).unwrap();
    assert!(bad.quarantined().unwrap().contains("please report"));
    assert_eq!((counters.offered, counters.delivered), (30, 0));
}

#[test]
fn a_panic_in_the_flow_hash_costs_that_frame_its_hash() {
    let good = [5; 60];
    let mut bad = good;
    bad[..super::super::BREAKS.len()].copy_from_slice(super::super::BREAKS);
    let mut frames = frames_of(&good, 5);
    frames[2].bytes = &bad;
    let hash = super::super::flow::flow_hash(&good);
    for filter in [None, Some(Arc::new(Program::accept(1)))] {
        let mut fanout = Fanout::new(0, 0);
        let (mut port, region) = port_and_region(1);
        port.judge.set_filter(filter);
        fanout.attach(port);
        fanout.deliver(&frames, 0);
        let mut consumer = Consumer::attach(region).unwrap();
        let mut hashes = Vec::new();
        while let Ok(Some(record)) = consumer.next() {
            hashes.push(record.meta.flow_hash);
        }
        assert_eq!(hashes, [hash, hash, 0, hash, hash]);
    }
}

//! One port of a switch, read by itself: what it sent and what is due to it, and the sums close.

use std::num::NonZeroU16;

use super::*;

fn reader(id: u32, number: u16, tuning: Tuning) -> (Box<Port>, Consumer) {
    let (mut port, region) = port_and_region(id);
    port.only = NonZeroU16::new(number);
    port.judge.tune(tuning);
    (port, Consumer::attach(region).unwrap())
}

/// Their lengths, and whether they were sent.
fn read(consumer: &mut Consumer) -> Vec<(u32, bool)> {
    let mut all = Vec::new();
    while let Ok(Some(packet)) = consumer.next() {
        let meta = packet.meta;
        all.push((meta.wire_len, meta.flags & flags::OUTBOUND != 0));
    }
    consumer.release();
    all
}

/// Frames of 60, 61, … bytes, each from a port and due to others.
fn deliver(fanout: &mut Fanout) {
    let bytes = [5; 100];
    let frame = |(len, (from, due)): (usize, (u16, &'static [u16]))| Frame {
        bytes: &bytes[..len],
        wire_len: len as u32,
        due,
        from,
        ..Frame::default()
    };
    let frames: Vec<_> = (60..).zip(WAYS).map(frame).collect();
    fanout.deliver(&frames, 0);
}

const WAYS: [(u16, &[u16]); 6] = [
    (3, &[1, 2]),
    (1, &[3]),
    (1, &[2]),
    (2, &[1, 3, 4]),
    (0, &[3]),
    (33, &[1]),
];

#[test]
fn a_reader_of_one_port_has_what_passes_it_and_nothing_else() {
    let mut fanout = Fanout::new(0, 0);
    let (one, mut ones) = reader(1, 3, Tuning::default());
    let (capture, region) = port_and_region(2);
    let mut captured = Consumer::attach(region).unwrap();
    fanout.attach(one);
    fanout.attach(capture);
    deliver(&mut fanout);
    assert_eq!(
        read(&mut ones),
        [(60, false), (61, true), (63, true), (64, true)]
    );
    assert_eq!(read(&mut captured).len(), WAYS.len());
    assert_eq!(fanout.counters().duties, 4 + 6);
    assert_eq!(offered(&fanout), 4 + 6);
    assert_eq!(fanout.ports().count(), 2);
    // Nobody reads it any more, and the account of its reader stays.
    fanout.detach(1).unwrap();
    deliver(&mut fanout);
    assert_eq!((fanout.counters().duties, offered(&fanout)), (16, 16));
    assert_eq!(fanout.counters().read, 12);
}

#[test]
fn direction_filter_and_cluster_hold_on_one_port_too() {
    let mut fanout = Fanout::new(0, 0);
    let tuned = |direction| Tuning {
        direction,
        ..Tuning::default()
    };
    let (rx, mut rxs) = reader(1, 3, tuned(Direction::Rx));
    let (tx, mut txs) = reader(2, 3, tuned(Direction::Both));
    fanout.attach(rx);
    fanout.attach(tx);
    fanout.tune(2, tuned(Direction::Tx));
    deliver(&mut fanout);
    assert_eq!(read(&mut rxs), [(60, false)]);
    assert_eq!(read(&mut txs), [(61, true), (63, true), (64, true)]);
    let share = |index| Share::Member {
        cluster: 1,
        index,
        of: 2,
        balance: Balance::RoundRobin,
    };
    fanout.reshare(&[(1, share(0)), (2, share(1))]);
    fanout.tune(1, Tuning::default());
    fanout.tune(2, Tuning::default());
    deliver(&mut fanout);
    assert_eq!(read(&mut rxs).len() + read(&mut txs).len(), 4);
    assert_eq!(fanout.counters().duties, 4 * 2 + 4);
    assert_eq!(offered(&fanout), fanout.counters().duties);
    fanout.set_filter(2, Some(Arc::new(Program::accept(0))));
    deliver(&mut fanout);
    assert_eq!(fanout.account(2).unwrap().1.delivered, 5);
    assert_eq!(offered(&fanout), fanout.counters().duties);
}

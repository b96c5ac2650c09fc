//! What a port does with frames, by one behaviour each.

mod programs;
mod segments;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vnplug_ring::arena::arena_size;
use vnplug_ring::control::{Balance, Direction, Tuning};
use vnplug_ring::layout::{Geometry, Life, TAIL, flags, ring_size};
use vnplug_ring::{Arena, ArenaGeometry, ArenaReader, Consumer, Producer, Region, Wait};

use super::doorbell::Doorbell;
use super::{IDLE_US, Offered, Port, PortCounters, Share};
use crate::batch::BatchInfo;
use crate::commons::Commons;
use vnplug_filter::Program;
use vnplug_frame::Frame;

const CAPACITY: u64 = 1 << 16;

fn ring(snaplen: u32) -> (Producer, Consumer, Region) {
    let region = Region::heap(ring_size(CAPACITY));
    let geometry = Geometry {
        capacity: CAPACITY,
        snaplen,
        link_type: 1,
        epoch: 256,
        port: 1,
        queue: 0,
    };
    let producer = Producer::create(region.clone(), geometry).unwrap();
    (producer, Consumer::attach(region.clone()).unwrap(), region)
}

fn port(snaplen: u32) -> (Port, Consumer, Region) {
    let (producer, consumer, region) = ring(snaplen);
    (Port::new(1, producer, Doorbell::Silent), consumer, region)
}

fn frames(bytes: &[u8], count: usize) -> Vec<Frame<'_>> {
    let frame = Frame {
        bytes,
        wire_len: bytes.len() as u32,
        ts_ns: 1,
        flags: 0,
        vlan_tci: 0,
        ..Frame::default()
    };
    vec![frame; count]
}

fn offer(port: &mut Port, frames: &[Frame<'_>], first: u64) {
    let hashes: Vec<u32> = (0..frames.len() as u32)
        .map(|n| n.wrapping_mul(0x9e37_79b9))
        .collect();
    let batch = BatchInfo {
        frames,
        hashes: &hashes,
        first,
        source: 3,
        queue: 2,
        now_us: 0,
        sender: None,
        cuts: &RefCell::default(),
    };
    port.take(&batch, Offered::Whole);
    assert_eq!(port.counters.offered, port.counters.accounted());
}

fn nothing() -> Option<Arc<Program>> {
    // ret 0
    Some(Arc::new(
        Program::from_bytes(&[6, 0, 0, 0, 0, 0, 0, 0], vnplug_filter::Trust::Guest).unwrap(),
    ))
}

#[test]
fn frames_arrive_whole_with_their_meta() {
    let (mut port, mut consumer, _) = port(2000);
    offer(&mut port, &frames(b"sixteen bytes ok", 2), 0);
    let packet = consumer.next().unwrap().unwrap();
    assert_eq!(packet.bytes, b"sixteen bytes ok");
    assert_eq!(
        (packet.meta.source, packet.meta.queue, packet.meta.wire_len),
        (3, 2, 16)
    );
    assert_eq!(port.counters.delivered, 2);
}

#[test]
fn the_snaplen_cuts_and_the_wire_length_stays() {
    let (mut port, mut consumer, _) = port(10);
    offer(&mut port, &frames(b"sixteen bytes ok", 1), 0);
    let packet = consumer.next().unwrap().unwrap();
    assert_eq!((packet.bytes.len(), packet.meta.wire_len), (10, 16));
}

#[test]
fn a_full_ring_drops_counts_and_says_so_in_the_stream() {
    let (mut port, mut consumer, _) = port(2000);
    let bytes = [7; 1000];
    offer(&mut port, &frames(&bytes, 100), 0);
    let fits = port.counters.delivered;
    assert_eq!(port.counters.dropped_full, 100 - fits);
    while consumer.next().unwrap().is_some() {}
    consumer.release();
    offer(&mut port, &frames(&bytes, 1), 100);
    let packet = consumer.next().unwrap().unwrap();
    assert_eq!(u64::from(packet.meta.lost), 100 - fits);
}

#[test]
fn a_port_is_crowded_while_its_reader_takes_something_and_half_is_not_read() {
    let (mut port, mut consumer, _) = port(2000);
    let some = frames(&[7; 1000], 20);
    offer(&mut port, &some, 0);
    assert!(!port.is_crowded(0));
    offer(&mut port, &some, 20);
    assert!(port.is_crowded(0) && port.is_crowded(IDLE_US - 1));
    consumer.next().unwrap();
    consumer.release();
    assert!(port.is_crowded(IDLE_US) && port.is_crowded(2 * IDLE_US - 1));
    assert!(!port.is_crowded(2 * IDLE_US));
    consumer.next().unwrap();
    consumer.release();
    assert!(port.is_crowded(2 * IDLE_US));
    while consumer.next().unwrap().is_some() {}
    consumer.release();
    assert!(!port.is_crowded(2 * IDLE_US));
    offer(&mut port, &some, 40);
    offer(&mut port, &some, 60);
    assert!(port.is_crowded(2 * IDLE_US));
    port.quarantine("it lied".into());
    assert!(!port.is_crowded(2 * IDLE_US));
}

#[test]
fn a_reader_that_lies_is_quarantined_and_every_frame_stays_accounted_for() {
    let (mut port, consumer, region) = port(2000);
    let bytes = [7; 1000];
    offer(&mut port, &frames(&bytes, 10), 0);
    region.store_u64(
        vnplug_ring::layout::TAIL,
        1 << 40,
        std::sync::atomic::Ordering::Relaxed,
    );
    offer(&mut port, &frames(&bytes, 100), 10);
    assert!(port.quarantined().is_some());
    assert_eq!(
        port.counters.delivered + port.counters.dropped_quarantine,
        110
    );
    assert_eq!(consumer.life(), Life::Quarantined);
    offer(&mut port, &frames(&bytes, 5), 110);
    assert_eq!(port.counters.offered, 115);
}

#[test]
fn quarantine_tells_nothing_of_what_the_operator_refuses() {
    let (mut port, _consumer, _) = port(2000);
    port.judge.set_guard(nothing());
    port.quarantine("it lied".into());
    offer(&mut port, &frames(b"secret", 9), 0);
    assert_eq!(
        (port.counters.refused, port.counters.dropped_quarantine),
        (9, 0)
    );
}

#[test]
fn guard_direction_filter_and_sampling_each_count_their_own() {
    let (mut port, _consumer, _) = port(2000);
    port.judge.set_guard(nothing());
    offer(&mut port, &frames(b"x", 3), 0);
    assert_eq!(port.counters.refused, 3);
    port.judge.set_guard(None);
    port.judge.set_filter(nothing());
    offer(&mut port, &frames(b"x", 4), 3);
    assert_eq!(port.counters.filtered, 4);
    port.judge.set_filter(None);
    port.judge.tune(Tuning {
        direction: Direction::Tx,
        ..Tuning::default()
    });
    offer(&mut port, &frames(b"x", 5), 7);
    assert_eq!(port.counters.direction, 5);
    let mut sent = frames(b"x", 1);
    sent[0].flags = flags::OUTBOUND;
    offer(&mut port, &sent, 12);
    assert_eq!(port.counters.delivered, 1);
    let mut tuning = Tuning {
        sample: 10,
        ..Tuning::default()
    };
    port.judge.tune(tuning);
    offer(&mut port, &frames(b"x", 95), 13);
    assert_eq!(
        (port.counters.delivered, port.counters.sampled_out),
        (10, 86)
    );
    tuning.enabled = false;
    port.judge.tune(tuning);
    offer(&mut port, &frames(b"x", 7), 108);
    assert_eq!((port.counters.delivered, port.counters.paused), (10, 7));
    // A port that goes on begins a new round of its sampling.
    tuning.enabled = true;
    port.judge.tune(tuning);
    offer(&mut port, &frames(b"x", 10), 115);
    assert_eq!(port.counters.delivered, 11);
    assert_eq!(port.counters.offered, port.counters.accounted());
}

#[test]
fn members_of_a_cluster_share_every_frame_exactly_once() {
    for balance in [Balance::Flow, Balance::RoundRobin] {
        let mut members: Vec<_> = (0..3).map(|_| port(2000)).collect();
        for (index, (port, _, _)) in members.iter_mut().enumerate() {
            port.judge.set_share(Share::Member {
                cluster: 1,
                index: index as u32,
                of: 3,
                balance,
            });
        }
        for round in 0..4 {
            for (port, _, _) in &mut members {
                offer(port, &frames(b"frame", 100), round * 100);
            }
        }
        let delivered: Vec<u64> = members
            .iter()
            .map(|(port, _, _)| port.counters.delivered)
            .collect();
        assert_eq!(
            delivered.iter().sum::<u64>(),
            400,
            "{balance:?} {delivered:?}"
        );
        assert!(
            delivered.iter().all(|&n| n > 60),
            "{balance:?} {delivered:?}"
        );
    }
}

#[test]
fn the_first_record_after_a_restart_is_marked_and_only_it() {
    let (mut port, mut consumer, _) = port(2000);
    port.mark_gap = true;
    offer(&mut port, &frames(b"frame", 2), 0);
    assert_ne!(consumer.next().unwrap().unwrap().meta.flags & flags::GAP, 0);
    assert_eq!(consumer.next().unwrap().unwrap().meta.flags & flags::GAP, 0);
}

#[test]
fn settling_after_a_panic_accounts_for_the_rest_of_the_batch() {
    let (mut port, _consumer, _) = port(2000);
    let batch = frames(b"frame", 10);
    offer(&mut port, &batch[..4], 0);
    // As if the port had panicked on the seventh frame of a batch of ten.
    let hashes = [0; 10];
    let info = BatchInfo {
        frames: &batch,
        hashes: &hashes,
        first: 4,
        source: 0,
        queue: 0,
        now_us: 0,
        sender: None,
        cuts: &RefCell::default(),
    };
    port.counters.offered += 7;
    port.counters.delivered += 6;
    port.settle(&info, 4);
    assert_eq!((port.counters.offered, port.counters.accounted()), (14, 14));
    assert_eq!(port.counters.dropped_quarantine, 4);
    assert!(port.quarantined().is_some());
}

/// Members of one group, with room for 256 descriptors each.
pub(crate) fn members(count: u32) -> (Arc<Commons>, Vec<(Port, Consumer, Region)>) {
    let memory = Region::heap(arena_size(CAPACITY));
    let geometry = ArenaGeometry {
        capacity: CAPACITY,
        snaplen: 2000,
        epoch: 256,
        queue: 0,
    };
    let arena = Arena::create(memory.clone(), geometry).unwrap();
    let commons = Arc::new(Commons::new(arena));
    let member = |id| {
        let region = Region::heap(ring_size(4096));
        let geometry = Geometry {
            capacity: 4096,
            snaplen: 2000,
            link_type: 1,
            epoch: 256,
            port: id,
            queue: 0,
        };
        let producer = Producer::create_descriptors(region.clone(), geometry).unwrap();
        let arena = ArenaReader::attach(memory.clone()).unwrap();
        let consumer = Consumer::attach_group(region.clone(), arena).unwrap();
        let mut port = Port::new(id, producer, Doorbell::Silent);
        port.commons = Some(Arc::clone(&commons));
        (port, consumer, region)
    };
    let members = (1..=count).map(member).collect();
    (commons, members)
}

#[test]
fn a_member_that_wants_everything_has_the_account_of_one_that_is_asked_for_each_frame() {
    let (commons, mut members) = members(2);
    let everything = Program::from_bytes(&[6, 0, 0, 0, 1, 0, 0, 0], vnplug_filter::Trust::Guest);
    members[1]
        .0
        .judge
        .set_filter(Some(Arc::new(everything.unwrap())));
    for (turn, count) in [3, 0, 1, 250, 9].into_iter().enumerate() {
        for (port, ..) in &mut members {
            port.mark_gap = turn == 0;
            offer(port, &frames(b"a frame", count), 1000 * turn as u64);
        }
    }
    let [(one, first, _), (two, second, _)] = &mut members[..] else {
        panic!("two members");
    };
    assert_eq!(one.counters, two.counters);
    assert_eq!(
        (one.counters.delivered, one.counters.dropped_full),
        (256, 7)
    );
    assert_eq!(commons.copies(), 256, "one copy for both, none for nobody");
    for number in 0..256 {
        let packet = first.next().unwrap().unwrap();
        assert_eq!(packet.bytes, b"a frame");
        assert_eq!(packet.meta, second.next().unwrap().unwrap().meta);
        assert_eq!(packet.meta.flags & flags::GAP != 0, number == 0);
    }
}

#[test]
fn a_member_that_lies_is_in_quarantine_alone_and_every_frame_is_accounted_for() {
    let (_commons, mut members) = members(2);
    for round in 0..4 {
        for (port, consumer, _) in &mut members {
            offer(port, &frames(b"a frame", 100), 100 * round);
            if port.id == 1 {
                while consumer.next().unwrap().is_some() {}
                consumer.release();
            }
        }
        members[1].2.store_u64(TAIL, 0x1234_5678, Ordering::Relaxed);
    }
    assert_eq!(members[0].0.counters.delivered, 400);
    assert_eq!(members[0].0.quarantined(), None);
    let liar = &members[1].0;
    assert!(liar.quarantined().is_some());
    assert_eq!((liar.counters.offered, liar.counters.delivered), (400, 256));
    assert_eq!(liar.counters.dropped_quarantine, 144);
}

#[test]
fn a_member_below_its_watermark_is_rung_when_half_of_the_arena_was_overwritten() {
    let (_commons, mut members) = members(1);
    let (port, consumer, _) = &mut members[0];
    let bytes = [7; 1480];
    let mut number = 0;
    for round in 1..=5 {
        assert_eq!(consumer.arm(1_000_000, u32::MAX), Wait::Sleep);
        let mut unread = 0;
        while port.counters.rings < round {
            offer(port, &frames(&bytes, 1), number);
            (number, unread) = (number + 1, unread + 1);
            assert_eq!(port.due_at().is_some(), port.counters.rings < round);
            assert!(unread <= 22, "half of 64 KiB, 1,512 bytes each");
        }
        assert_eq!(unread, 22);
        let read = std::iter::from_fn(|| consumer.next().unwrap().map(|_| ())).count();
        assert_eq!((read as u64, consumer.dropped()), (unread, 0));
    }
}

#[test]
fn another_arming_makes_the_oldest_unread_packet_no_younger() {
    let (_commons, mut members) = members(1);
    let (port, consumer, _) = &mut members[0];
    let bytes = [7; 1480];
    assert_eq!(consumer.arm(1_000_000, u32::MAX), Wait::Sleep);
    for number in 0..15 {
        offer(port, &frames(&bytes, 1), number);
    }
    let due_at = port.due_at();
    assert!(due_at.is_some());
    let again = consumer.arm(1_000_000, u32::MAX);
    assert_eq!(again, Wait::SleepAtMost(u32::MAX));
    offer(port, &frames(&bytes, 1), 15);
    assert_eq!(port.due_at(), due_at);
    // The control: once it was read, the next one is the oldest.
    while consumer.next().unwrap().is_some() {}
    assert_eq!(consumer.arm(1_000_000, u32::MAX), Wait::Sleep);
    offer(port, &frames(&bytes, 1), 16);
    assert!(port.due_at() > due_at);
}

#[test]
fn what_came_to_a_member_that_was_awake_it_reads_before_it_sleeps() {
    let (_commons, mut members) = members(1);
    let (port, consumer, _) = &mut members[0];
    offer(port, &frames(b"a frame", 1), 0);
    assert_eq!(consumer.arm(1_000_000, u32::MAX), Wait::Ready);
}

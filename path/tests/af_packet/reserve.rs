//! The rings hold what comes while nobody reads, and give it in order.

use std::time::{Duration, Instant};

use vnplug_path::source::af_packet::{AfPacket, AfPacketConfig, Direction};
use vnplug_testing::{Deadline, PATIENCE};

use crate::net::{QUIET, Sender, frame, isolated, open, read, read_all, rx, veth};

/// Sends frames `first..first + count` at a rate; the sequence is at byte 14, big-endian.
fn send_at(sender: &Sender, first: u32, count: u32, pps: u32) {
    let start = Instant::now();
    let mut frame = frame(60, 0);
    for sent in 0..count {
        let due = Duration::from_secs(1) * sent / pps;
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        frame[14..18].copy_from_slice(&(first + sent).to_be_bytes());
        assert!(sender.send(&frame));
    }
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[14..18].try_into().expect("a long frame"))
}

#[test]
fn what_comes_slowly_while_nobody_reads_is_held_and_comes_in_order() {
    const FRAMES: u32 = 5_000;
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            direction: Direction::Rx,
            ..AfPacketConfig::new("va")
        });
        // In blocks that close after 2 ms, 128 of them hold a quarter of a second of this.
        send_at(&Sender::new("vb"), 0, FRAMES, FRAMES);
        let before = queue.counters();
        assert_eq!((before.waiting, before.dropped), (FRAMES.into(), 0));
        let got = read_all(queue.as_mut(), FRAMES as usize);
        let numbers: Vec<u32> = got.iter().map(|got| number(&got.bytes)).collect();
        assert!(numbers.iter().copied().eq(0..FRAMES), "{}", numbers.len());
        let counters = queue.counters();
        assert_eq!((counters.seen, counters.dropped), (FRAMES.into(), 0));
        assert_eq!(counters.waiting, 0);
        // What is told of this rate holds for it.
        let told = counters.patience_ms.expect("an interface tells");
        assert!(told > 1_000, "{told}");
    });
}

#[test]
fn a_quiet_wire_is_held_for_ten_seconds() {
    isolated(|| {
        veth();
        let mut queue = open(AfPacketConfig {
            direction: Direction::Rx,
            ..AfPacketConfig::new("va")
        });
        let deadline = Deadline::new("it is held for ten seconds");
        let sender = Sender::new("vb");
        let mut first = 0;
        // Told of a second and more in which the sender had a processor.
        loop {
            send_at(&sender, first, 2_500, 5_000);
            first += 2_500;
            read(queue.as_mut(), usize::MAX, QUIET);
            let told = queue.counters().patience_ms.expect("an interface tells");
            if (10_000..60_000).contains(&told) {
                break;
            }
            deadline.check_seen(&told);
        }
    });
}

#[test]
fn order_holds_and_sums_close_over_many_overflows() {
    isolated(|| {
        veth();
        let mut queues = AfPacket::open(AfPacketConfig {
            block_size: 4096,
            blocks: 96,
            snaplen: 512,
            ..rx("va")
        })
        .expect("open");
        const BURST: u32 = 10_000;
        let sender = Sender::new("vb");
        let (mut last, mut taken, mut total) = (None, 0, 0);
        for burst in 0..20 {
            let sending = || {
                for seq in total..total + BURST {
                    let mut frame = frame(60, 0);
                    frame[14..18].copy_from_slice(&seq.to_be_bytes());
                    assert!(sender.send(&frame));
                }
            };
            let mut reading = |enough: u64| {
                let deadline = Deadline::new(format!("{enough} are taken or dropped"));
                while taken + queues[0].counters().dropped < enough {
                    for got in read(queues[0].as_mut(), 1, Duration::from_millis(2)) {
                        let seq = number(&got.bytes);
                        assert!(last.is_none_or(|last| last < seq), "{last:?} before {seq}");
                        last = Some(seq);
                        taken += 1;
                    }
                    deadline.check();
                }
            };
            // Half of the bursts meet a reader that sleeps, half one that reads along.
            match burst % 2 {
                0 => {
                    sending();
                    reading(u64::from(total + BURST));
                }
                _ => std::thread::scope(|scope| {
                    scope.spawn(sending);
                    reading(u64::from(total + BURST));
                }),
            }
            total += BURST;
        }
        let counters = queues[0].counters();
        assert_eq!(counters.seen, u64::from(total));
        assert_eq!(counters.seen, taken + counters.dropped);
        assert!(counters.dropped > 0, "the rings must overflow to prove it");
    });
}

#[test]
fn after_an_overflow_a_lone_frame_is_soon_there_again() {
    isolated(|| {
        veth();
        // Blocks of the reserve close after a third of a second and more.
        let mut queue = open(AfPacketConfig {
            block_size: 4096,
            blocks: 384,
            block_timeout_ms: 12,
            snaplen: 512,
            ..rx("va")
        });
        let sender = Sender::new("vb");
        (0..7_000).for_each(|seq| assert!(sender.send(&frame(60, seq))));
        let got = read_all(queue.as_mut(), 7_000);
        assert_eq!((got.len(), queue.counters().dropped), (7_000, 0));
        let took = (0..20).map(|seq| {
            let start = Instant::now();
            assert!(sender.send(&frame(60, seq)));
            assert_eq!(read(queue.as_mut(), 1, PATIENCE).len(), 1);
            start.elapsed()
        });
        let soonest = took.min().expect("some");
        assert!(soonest < Duration::from_millis(150), "{soonest:?}");
    });
}

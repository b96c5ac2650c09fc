//! Who rings whom, and when: one thread, time passed as an argument.

use std::sync::atomic::Ordering;

use super::{Dice, bytes, meta, ring, ring_at};
use crate::layout::{Life, PUBLISHED, READ};
use crate::{Bell, Consumer, Producer, Wait};

fn publish(producer: &mut Producer, packets: u64) {
    for number in 0..packets {
        assert_eq!(producer.push(&meta(number, 8), &bytes(number, 8)), Ok(true));
    }
    producer.publish();
}

fn drain(consumer: &mut Consumer) -> usize {
    let taken = consumer.batch(usize::MAX).count();
    consumer.release();
    taken
}

#[test]
fn a_reader_that_is_awake_is_never_rung() {
    let (mut producer, _consumer, _) = ring(4096, 64);
    publish(&mut producer, 9);
    assert_eq!(producer.bell(0), Bell::Quiet);
}

#[test]
fn one_arming_is_rung_once() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    assert_eq!(consumer.arm(1, 0), Wait::Sleep);
    assert_eq!(producer.bell(0), Bell::Quiet, "nothing to read");
    publish(&mut producer, 1);
    assert_eq!(producer.bell(1), Bell::Ring);
    publish(&mut producer, 1);
    assert_eq!(producer.bell(2), Bell::Quiet);
    assert_eq!(drain(&mut consumer), 2);
    assert_eq!(consumer.arm(1, 0), Wait::Sleep);
    publish(&mut producer, 1);
    assert_eq!(producer.bell(3), Bell::Ring);
}

#[test]
fn the_watermark_rings_at_the_crossing() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    assert_eq!(consumer.arm(10, 500), Wait::Sleep);
    publish(&mut producer, 9);
    assert_eq!(producer.bell(100), Bell::Later(600));
    publish(&mut producer, 1);
    assert_eq!(producer.bell(200), Bell::Ring);
}

#[test]
fn half_a_ring_rings_below_any_watermark() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    assert_eq!(consumer.arm(1000, 500), Wait::Sleep);
    // A record takes 40 bytes: 51 are less than half of the ring, 52 more.
    publish(&mut producer, 51);
    assert_eq!(producer.bell(100), Bell::Later(600));
    publish(&mut producer, 1);
    assert_eq!(producer.bell(200), Bell::Ring);
    // Who finds it so does not go to sleep.
    assert_eq!(consumer.arm(1000, 500), Wait::Ready);
    assert_eq!(drain(&mut consumer), 52);
    assert_eq!(consumer.arm(1000, 500), Wait::Sleep);
}

#[test]
fn the_delay_counts_from_the_first_unread_record() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    assert_eq!(consumer.arm(10, 500), Wait::Sleep);
    assert_eq!(producer.bell(0), Bell::Quiet);
    publish(&mut producer, 1);
    assert_eq!(producer.bell(100), Bell::Later(600));
    publish(&mut producer, 1);
    assert_eq!(producer.bell(400), Bell::Later(600));
    assert_eq!(producer.bell(599), Bell::Later(600));
    assert_eq!(producer.bell(600), Bell::Ring);
    assert_eq!(producer.bell(900), Bell::Quiet);
}

#[test]
fn an_older_arming_does_not_shorten_the_delay_of_a_new_one() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    assert_eq!(consumer.arm(10, 500), Wait::Sleep);
    publish(&mut producer, 1);
    assert_eq!(producer.bell(100), Bell::Later(600));
    assert_eq!(drain(&mut consumer), 1);
    assert_eq!(consumer.arm(10, 500), Wait::Sleep);
    publish(&mut producer, 1);
    assert_eq!(producer.bell(550), Bell::Later(1050));
}

#[test]
fn unread_records_below_the_watermark_are_the_readers_to_time() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    publish(&mut producer, 3);
    assert_eq!(
        producer.bell(0),
        Bell::Quiet,
        "the reader is awake, nobody calls again"
    );
    assert_eq!(consumer.arm(10, 500), Wait::SleepAtMost(500));
    assert_eq!(consumer.arm(3, 500), Wait::Ready);
    assert_eq!(consumer.arm(1, 500), Wait::Ready);
    assert_eq!(consumer.arm(10, 0), Wait::Ready);
}

#[test]
fn filled_but_unpublished_records_ring_nobody() {
    let (mut producer, mut consumer, _) = ring(4096, 64);
    assert_eq!(consumer.arm(2, 500), Wait::Sleep);
    publish(&mut producer, 1);
    producer.push(&meta(0, 8), &bytes(0, 8)).unwrap();
    assert_eq!(producer.bell(0), Bell::Later(500));
    producer.publish();
    assert_eq!(producer.bell(0), Bell::Ring);
}

#[test]
fn the_end_of_life_keeps_a_reader_awake() {
    for life in [Life::Ended, Life::Closed, Life::Quarantined, Life::Failed] {
        let (mut producer, mut consumer, _) = ring(4096, 64);
        producer.finish(life);
        assert_eq!(consumer.arm(10, 500), Wait::Ready);
        assert_eq!(consumer.life(), life);
    }
}

#[test]
fn a_count_left_too_low_by_a_dead_reader_is_corrected() {
    let (mut producer, mut consumer, region) = ring(4096, 64);
    publish(&mut producer, 5);
    assert_eq!(drain(&mut consumer), 5);
    // Died after storing `tail`, before storing its count.
    region.store_u64(READ, 0, Ordering::Relaxed);
    let mut next = Consumer::attach(region.clone()).unwrap();
    assert_eq!(next.arm(2, 500), Wait::Sleep);
    assert_eq!(next.taken(), region.load_u64(PUBLISHED, Ordering::Relaxed));
    publish(&mut producer, 1);
    assert_eq!(producer.bell(0), Bell::Later(500));
    publish(&mut producer, 1);
    assert_eq!(producer.bell(0), Bell::Ring);
}

/// A reader that does what `arm` says, a host that calls `bell` when it should, and a clock: no
/// record is ever unread for longer than the delay, nor the watermark passed, while it sleeps.
#[test]
fn random_schedules_never_sleep_too_long() {
    for seed in 1..=200 {
        let mut dice = Dice(seed);
        let start = 0_u64.wrapping_sub(8 * dice.below(3000));
        let (mut producer, mut consumer, _) = ring_at(65536, 64, start);
        let (mut now, mut later) = (0, u64::MAX);
        // Some((watermark, deadline by its own timer)) while the reader sleeps.
        let mut asleep: Option<(u64, u64, u64)> = None;
        let (mut unread, mut first_unread_at) = (0, 0);
        for _ in 0..2_000 {
            now += dice.below(200);
            let mut rung = false;
            if now >= later {
                // The host is exact here; its real lateness adds to the delay.
                now = later;
                later = u64::MAX;
                match producer.bell(now) {
                    Bell::Ring => rung = true,
                    Bell::Later(at) => later = at,
                    Bell::Quiet => {}
                }
            }
            if dice.below(3) == 0 && unread < 400 {
                let packets = 1 + dice.below(4);
                if unread == 0 {
                    first_unread_at = now;
                }
                unread += packets;
                publish(&mut producer, packets);
                match producer.bell(now) {
                    Bell::Ring => rung = true,
                    Bell::Later(at) => later = at,
                    Bell::Quiet => {}
                }
            }
            match asleep {
                Some((watermark, delay, timer)) => {
                    if rung || now >= timer {
                        asleep = None;
                    } else {
                        assert!(unread < watermark, "seed {seed}: {unread} unread at {now}");
                        let due = first_unread_at + delay;
                        let looked_at = later.min(timer);
                        assert!(
                            unread == 0 || looked_at <= due,
                            "seed {seed}: nobody looks before {looked_at}, due {due}"
                        );
                    }
                }
                None => {
                    if dice.below(2) == 0 {
                        let all = drain(&mut consumer) as u64;
                        assert_eq!(all, unread);
                        unread = 0;
                    }
                    let (watermark, delay) = (1 + dice.below(12), dice.below(1000));
                    asleep = match consumer.arm(watermark as u32, delay as u32) {
                        Wait::Ready => None,
                        Wait::Sleep => {
                            assert_eq!(unread, 0);
                            Some((watermark, delay, u64::MAX))
                        }
                        Wait::SleepAtMost(us) => {
                            // From here the reader's own timer is the promise.
                            first_unread_at = now;
                            Some((watermark, delay, now + u64::from(us)))
                        }
                    };
                }
            }
        }
    }
}

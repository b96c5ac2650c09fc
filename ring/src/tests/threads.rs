//! Two threads and a real doorbell. Threads stand for processes: ThreadSanitizer sees them.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{Dice, meta, ring_at};
use crate::layout::{Life, Meta};
use crate::{Bell, Consumer, Producer, Wait};

/// Longer than any delay or pause of these tests: a reader asleep for so long missed its wake-up.
const WATCHDOG: Duration = Duration::from_secs(60);

fn ring_bell(doorbell: &SyncSender<()>) {
    // Like an eventfd: rung twice is rung.
    if let Err(TrySendError::Disconnected(())) = doorbell.try_send(()) {
        panic!("the reader is gone");
    }
}

fn produce(mut producer: Producer, doorbell: &SyncSender<()>, packets: u64, seed: u64) -> [u64; 2] {
    let mut dice = Dice(seed);
    let begin = Instant::now();
    let now_us = || begin.elapsed().as_micros() as u64;
    let mut number = 0;
    while number < packets {
        for _ in 0..=dice.below(64) {
            let len = dice.below(200) as usize;
            let frame = [number as u8; 200];
            if producer
                .push(&meta(number, len), &frame[..len])
                .expect("an honest reader")
            {
                number += 1;
            } else {
                break;
            }
        }
        producer.publish();
        let look = |producer: &mut Producer| match producer.bell(now_us()) {
            Bell::Quiet => None,
            Bell::Ring => {
                ring_bell(doorbell);
                None
            }
            Bell::Later(at) => Some(at),
        };
        let later = look(&mut producer);
        match dice.below(2_000) {
            0 => thread::sleep(Duration::from_micros(dice.below(300))),
            1..40 => thread::yield_now(),
            _ => {}
        }
        if later.is_some_and(|at| now_us() >= at) {
            look(&mut producer);
        }
    }
    let dropped = producer.dropped();
    // The source went quiet: only the times that `bell` asked for remain.
    loop {
        match producer.bell(now_us()) {
            Bell::Later(at) => thread::sleep(Duration::from_micros(at.saturating_sub(now_us()))),
            Bell::Ring => ring_bell(doorbell),
            Bell::Quiet => break,
        }
    }
    producer.finish(Life::Ended);
    ring_bell(doorbell);
    [number, dropped]
}

/// Reads until the end of the ring's life; returns the packets, their lost ones and the sleeps.
fn consume(
    mut consumer: Consumer,
    doorbell: &Receiver<()>,
    arms: &[(u32, u32)],
    seed: u64,
) -> [u64; 3] {
    let mut dice = Dice(seed);
    let (mut expect, mut lost, mut sleeps) = (0, 0, 0_u64);
    loop {
        let mut taken = 0;
        for packet in consumer.batch(1 + dice.below(100) as usize) {
            let packet = packet.expect("sound records");
            let len = packet.bytes.len();
            assert_eq!(
                packet.meta,
                Meta {
                    lost: packet.meta.lost,
                    ..meta(expect, len)
                }
            );
            assert!(packet.bytes.iter().all(|byte| *byte == expect as u8));
            lost += u64::from(packet.meta.lost);
            expect += 1;
            taken += 1;
        }
        if dice.below(4) == 0 {
            consumer.release();
        }
        if taken > 0 && dice.below(8) != 0 {
            continue;
        }
        let (watermark, delay_us) = arms[dice.below(arms.len() as u64) as usize];
        let patience = match consumer.arm(watermark, delay_us) {
            Wait::Ready => {
                if consumer.life() != Life::Open && consumer.is_drained() {
                    return [expect, lost, sleeps];
                }
                continue;
            }
            Wait::Sleep => WATCHDOG,
            Wait::SleepAtMost(us) => Duration::from_micros(us.into()),
        };
        sleeps += 1;
        match doorbell.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) if patience == WATCHDOG => {
                panic!(
                    "lost wake-up after {expect} packets, drained: {}",
                    consumer.is_drained()
                )
            }
            Ok(()) | Err(_) => {}
        }
    }
}

fn run(arms: &'static [(u32, u32)], packets: u64, seed: u64) {
    let (producer, consumer, _) = ring_at(16384, 200, 0_u64.wrapping_sub(1 << 20));
    let (doorbell, ear) = sync_channel(1);
    let reader = thread::spawn(move || consume(consumer, &ear, arms, seed));
    let [written, dropped] = produce(producer, &doorbell, packets, seed ^ 0xff);
    let [read, lost, sleeps] = reader.join().expect("the reader is content");
    assert_eq!(read, written);
    assert!(
        lost <= dropped,
        "losses after the last packet are only counted"
    );
    assert!(sleeps > 0, "the reader slept");
}

#[test]
fn no_wake_up_is_lost_at_watermark_one() {
    run(&[(1, 0)], 1_000_000, 11);
}

#[test]
fn no_wake_up_is_lost_with_watermarks_and_delays() {
    run(
        &[(1, 0), (10, 300), (64, 2_000), (1_000_000, 500)],
        1_000_000,
        12,
    );
}

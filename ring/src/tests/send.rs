//! The transmit ring: exact, kicked, and with a sender that lies.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, TrySendError, sync_channel};
use std::time::Duration;

use super::{Dice, bytes, geometry, meta};
use crate::layout::{
    ALIGN, DATA_OFFSET, HEAD, Life, MAX_SNAPLEN, MIN_CAPACITY, PAD, TAIL, WAKE_SEQ, ring_size,
};
use crate::{AttachError, Bell, Consumer, Intake, Producer, Region};
use vnplug_frame::witness::seed;

fn ring(capacity: u64, snaplen: u32, start: u64) -> (Producer, Intake, Region) {
    let region = Region::heap(ring_size(capacity));
    let intake = Intake::create_at(region.clone(), geometry(capacity, snaplen), start)
        .expect("a valid geometry");
    let producer = Producer::attach(region.clone()).expect("a transmit ring");
    (producer, intake, region)
}

#[test]
fn every_frame_arrives_once_in_order_also_over_the_wrap() {
    let (mut producer, mut intake, _) = ring(4096, 300, 0_u64.wrapping_sub(4096 * 3));
    let (mut dice, mut sent, mut taken) = (Dice(5), 0_u64, 0_u64);
    let mut buffer = [0; 300];
    while taken < 20_000 {
        for _ in 0..dice.below(8) {
            let frame = bytes(sent, (sent % 300) as usize);
            if producer.has_room(frame.len() as u32).unwrap() {
                assert_eq!(producer.push(&meta(sent, frame.len()), &frame), Ok(true));
                sent += 1;
            }
        }
        producer.publish();
        for _ in 0..dice.below(8) {
            let Some(len) = intake.take(&mut buffer).unwrap() else {
                break;
            };
            assert_eq!(buffer[..len], bytes(taken, (taken % 300) as usize));
            taken += 1;
        }
        intake.release();
    }
    assert_eq!(producer.dropped(), 0, "has_room was asked first");
}

#[test]
fn a_ring_for_one_direction_is_refused_by_the_other() {
    let (_, _, region) = ring(4096, 300, 0);
    assert!(matches!(
        Consumer::attach(region.clone()),
        Err(AttachError::Magic(_))
    ));
    Producer::create(region.clone(), geometry(4096, 300)).unwrap();
    assert!(matches!(
        Producer::attach(region),
        Err(AttachError::Magic(_))
    ));
}

#[test]
fn one_arming_is_kicked_once_and_what_is_there_keeps_the_host_awake() {
    let (mut producer, mut intake, _) = ring(4096, 300, 0);
    let send = |producer: &mut Producer| {
        producer.push(&meta(0, 8), &bytes(0, 8)).unwrap();
        producer.publish();
        producer.bell(0)
    };
    assert_eq!(send(&mut producer), Bell::Quiet, "the host is awake");
    assert_eq!(intake.arm(), Ok(true));
    let mut buffer = [0; 300];
    while intake.take(&mut buffer).unwrap().is_some() {}
    assert_eq!(intake.arm(), Ok(false));
    assert_eq!(send(&mut producer), Bell::Ring);
    assert_eq!(send(&mut producer), Bell::Quiet);
    intake.finish(Life::Ended);
    assert_eq!(producer.life(), Life::Ended);
}

#[test]
fn impossible_heads_and_lengths_are_lies() {
    for head in [4096 + 8, u64::MAX - 7, 1 << 63, 12] {
        let (_, mut intake, region) = ring(4096, 300, 0);
        region.store_u64(HEAD, head, Ordering::Relaxed);
        assert!(intake.take(&mut [0; 300]).is_err(), "{head}");
        assert!(intake.arm().is_err(), "{head}");
    }
    for cap_len in [301, 4096, PAD, PAD - 1, MAX_SNAPLEN] {
        let (_, mut intake, region) = ring(4096, 300, 0);
        region.store_u32(DATA_OFFSET, cap_len, Ordering::Relaxed);
        region.store_u64(HEAD, 256, Ordering::Relaxed);
        assert!(intake.take(&mut [0; 300]).is_err(), "{cap_len}");
    }
    // A head that falls back after what was believed.
    let (mut producer, mut intake, region) = ring(4096, 300, 0);
    for _ in 0..2 {
        producer.push(&meta(0, 8), &bytes(0, 8)).unwrap();
    }
    producer.publish();
    assert!(intake.take(&mut [0; 300]).is_ok());
    region.store_u64(HEAD, ALIGN, Ordering::Relaxed);
    assert!(intake.take(&mut [0; 300]).is_ok(), "believed before");
    assert!(intake.take(&mut [0; 300]).is_err());
}

/// Whatever a sender writes, the host gets lengths within the snaplen, does one record's work per
/// call and never reads outside the ring (which would panic).
#[test]
fn a_lying_sender_harms_only_itself() {
    let mut dice = Dice(seed("a lying sender"));
    let mut buffer = [0; 300];
    let (mut lies, mut frames, mut ops) = (0_u64, 0_u64, 0_u64);
    for _ in 0..3_000 {
        let start = 0_u64.wrapping_sub(8 * dice.below(2048));
        let (_, mut intake, region) = ring(MIN_CAPACITY, 300, start);
        let mut head = start;
        for _ in 0..400 {
            ops += 1;
            match dice.below(8) {
                0 => {
                    let at = 8 * dice.below(region.len() / 8);
                    region.store_u64(at, dice.roll(), Ordering::Relaxed);
                }
                1 => region.store_u64(HEAD, dice.roll() & !7, Ordering::Relaxed),
                2 => region.store_u64(TAIL, dice.roll(), Ordering::Relaxed),
                3 => {
                    let offset = 8 * dice.below(MIN_CAPACITY / 8);
                    let cap_len = [PAD, 0, 60, 300, 301, dice.roll() as u32];
                    let cap_len = cap_len[dice.below(6) as usize];
                    region.store_u32(DATA_OFFSET + offset, cap_len, Ordering::Relaxed);
                }
                4 | 5 => {
                    head = head.wrapping_add(8 * dice.below(64));
                    region.store_u64(HEAD, head, Ordering::Relaxed);
                }
                _ => match intake.take(&mut buffer) {
                    Ok(Some(len)) => {
                        assert!(len <= 300);
                        frames += 1;
                    }
                    Ok(None) => {
                        if intake.arm().is_err() {
                            lies += 1;
                            break;
                        }
                    }
                    Err(_) => {
                        lies += 1;
                        break;
                    }
                },
            }
        }
    }
    assert!(lies > 500 && frames > 500, "{lies} lies, {frames} frames");
    println!("figure: G-02 hostile operations on transmit rings = {ops}");
}

/// Threads stand for processes; the host sleeps whenever it finds nothing.
#[test]
fn no_kick_is_lost() {
    const FRAMES: u64 = 300_000;
    let (mut producer, mut intake, region) = ring(16384, 200, 0_u64.wrapping_sub(1 << 16));
    let (kick, ear) = sync_channel(1);
    let host = std::thread::spawn(move || {
        let (mut taken, mut sleeps) = (0_u64, 0_u64);
        let mut buffer = [0; 200];
        while taken < FRAMES {
            while let Some(len) = intake.take(&mut buffer).expect("an honest sender") {
                assert!(buffer[..len].iter().all(|byte| *byte == taken as u8));
                taken += 1;
            }
            if taken == FRAMES || intake.arm().expect("an honest sender") {
                continue;
            }
            sleeps += 1;
            if ear.recv_timeout(Duration::from_secs(60)) == Err(RecvTimeoutError::Timeout) {
                panic!("lost kick after {taken} frames");
            }
        }
        intake.release();
        sleeps
    });
    let mut dice = Dice(77);
    let mut sent = 0;
    while sent < FRAMES {
        let len = dice.below(200) as usize;
        if producer.has_room(len as u32).expect("an honest host") {
            let frame = [sent as u8; 200];
            producer.push(&meta(sent, len), &frame[..len]).unwrap();
            sent += 1;
        }
        if sent == FRAMES || dice.below(4) == 0 {
            producer.publish();
            if producer.bell(0) == Bell::Ring
                && let Err(TrySendError::Disconnected(())) = kick.try_send(())
                && sent < FRAMES
            {
                panic!("the host is gone");
            }
        }
        if dice.below(500) == 0 {
            std::thread::yield_now();
        }
    }
    assert!(host.join().expect("the host is content") > 0, "it slept");
    assert_ne!(region.load_u32(WAKE_SEQ, Ordering::Relaxed), 0);
}

//! A ring between members of a trust group, either of whom lies: the other takes or writes what the ring
//! allows, within bounds, writes into its own memory alone, and a ring that made no sense is over.

use std::sync::atomic::Ordering;

use vnplug_ring::layout::{
    ATTACHED, DATA_OFFSET, DROPPED, Geometry, HEAD, LIFE, MIN_CAPACITY, Meta, PUBLISHED, TAIL,
    ring_size,
};
use vnplug_ring::{Consumer, Producer, Region};

use crate::Dice;

const SNAPLEN: u32 = 300;
const EPOCH: u64 = 0x0100;

/// All of a memory.
fn all(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len() as usize];
    region.read(0, &mut bytes);
    bytes
}

fn geometry() -> Geometry {
    Geometry {
        capacity: MIN_CAPACITY,
        snaplen: SNAPLEN,
        link_type: 1,
        epoch: EPOCH,
        port: 0,
        queue: 0,
    }
}

/// Checks it with these bytes: what the liar stores, and what the other does.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let ring = Region::heap(ring_size(MIN_CAPACITY));
    let words = Region::heap(DATA_OFFSET);
    match dice.byte() % 2 {
        0 => sender_lies(&mut dice, &ring, &words),
        _ => reader_lies(&mut dice, &ring, &words),
    }
}

fn sender_lies(dice: &mut Dice<'_>, ring: &Region, words: &Region) {
    let sender = Producer::create_beside(ring.clone(), words.clone(), geometry());
    let mut sender = sender.expect("a ring");
    // Some of its header is nonsense from the start.
    for _ in 0..dice.byte() % 3 {
        ring.store_u64(
            8 * u64::from(dice.byte() % 16),
            dice.u64(),
            Ordering::Relaxed,
        );
    }
    let attached = Consumer::attach_beside(ring.clone(), words.clone(), EPOCH, (SNAPLEN, false));
    let Ok(Some(mut reader)) = attached else {
        return;
    };
    assert!(sender.is_attached());
    let snaplen = reader.geometry().snaplen as usize;
    let mut is_over = false;
    while !dice.is_empty() {
        match dice.byte() % 8 {
            0 => {
                let at = 8 * (u64::from(dice.u16()) % (ring.len() / 8));
                ring.store_u64(at, dice.u64(), Ordering::Relaxed);
            }
            1 => {
                let at = [HEAD, PUBLISHED, DROPPED, LIFE][usize::from(dice.byte() % 4)];
                ring.store_u64(at, dice.u64(), Ordering::Relaxed);
            }
            2 | 3 => {
                let frame = vec![7; usize::from(dice.u16()) % (SNAPLEN as usize + 1)];
                let _ = sender.push(&Meta::default(), &frame);
                sender.publish();
            }
            does => {
                let before = all(ring);
                match does {
                    4 => {
                        reader.arm(1, 0);
                    }
                    5 => {
                        is_over |= reader
                            .batch(usize::from(dice.byte()))
                            .any(|packet| packet.is_err());
                    }
                    6 => {
                        let _ = (reader.dropped(), reader.unread(), reader.life());
                        reader.release();
                    }
                    _ => match reader.next() {
                        Ok(Some(packet)) => {
                            assert!(!is_over && (14..=snaplen).contains(&packet.bytes.len()));
                            std::hint::black_box(
                                packet.bytes.iter().map(|it| u64::from(*it)).sum::<u64>(),
                            );
                        }
                        Ok(None) => {}
                        Err(_) => is_over = true,
                    },
                }
                assert!(
                    all(ring) == before,
                    "the reader wrote into the sender's memory"
                );
                if is_over {
                    assert!(reader.is_drained(), "over, and yet there is more");
                }
            }
        }
    }
}

fn reader_lies(dice: &mut Dice<'_>, ring: &Region, words: &Region) {
    let sender = Producer::create_beside(ring.clone(), words.clone(), geometry());
    let mut sender = sender.expect("a ring");
    while !dice.is_empty() {
        match dice.byte() % 6 {
            0 => {
                let at = 8 * (u64::from(dice.u16()) % (words.len() / 8));
                words.store_u64(at, dice.u64(), Ordering::Relaxed);
            }
            1 => words.store_u64(TAIL, dice.u64(), Ordering::Relaxed),
            2 => words.store_u64(ATTACHED, EPOCH, Ordering::Relaxed),
            does => {
                let before = all(words);
                let frame = vec![7; usize::from(dice.u16()) % (SNAPLEN as usize + 1)];
                let has_room = sender.has_room(frame.len() as u32);
                match does {
                    3 => {
                        let _ = sender.bell(0);
                    }
                    4 => sender.miss(1),
                    _ => {
                        let pushed = sender.push(&Meta::default(), &frame);
                        assert!(has_room.is_err() || pushed.is_err() || pushed == has_room);
                        sender.publish();
                    }
                }
                assert!(
                    all(words) == before,
                    "the sender wrote into the reader's memory"
                );
                if has_room.is_err() {
                    sender.disown();
                    assert!(!sender.is_attached());
                    return;
                }
            }
        }
    }
}

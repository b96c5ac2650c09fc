//! A transmit ring whose sender lies: whatever stands in the memory, the host takes what a plain
//! reading of the format gives, or says that the sender lied. Its records may be posted: their bytes go on in a record area
//! that lies between canaries, and every place in it has its own byte.
//!
//! Each word is loaded once by a call (head, one or two lengths) and the words lie apart, so that what
//! a sender can do during a call, it can do before it: no second thread is needed.

use std::sync::atomic::Ordering;

use vnplug_ring::layout::{
    ALIGN, DATA_OFFSET, Geometry, HEAD, Life, MIN_CAPACITY, PAD, READ, RECORD_HEADER, TAIL, flags,
    record_size, ring_size,
};
use vnplug_ring::{Intake, Region, SenderLied};

use crate::Dice;

const SNAPLEN: u32 = 300;
const GUARD: u64 = 64;
/// Bytes of the area in which records may name places.
const AREA: u64 = 1024;
const CANARY: u64 = 0x5ca1_ab1e_5ca1_ab1e;

/// The host as the document describes it, in as few lines as possible.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Model {
    head: u64,
    tail: u64,
    taken: u64,
}

/// A place and its length; none if it is not the sender's.
type Rest = Option<(u64, u32)>;

impl Model {
    /// Believes the sender's head, or not.
    fn look(&mut self, region: &Region) -> Result<bool, ()> {
        let head = region.load_u64(HEAD, Ordering::Relaxed);
        let ahead = head.wrapping_sub(self.tail);
        let known = self.head.wrapping_sub(self.tail);
        if !head.is_multiple_of(ALIGN) || ahead > MIN_CAPACITY || ahead < known {
            return Err(());
        }
        self.head = head;
        Ok(ahead > 0)
    }

    /// Where the next frame begins, how many of its bytes lie there, and where the others do, or that it is refused.
    fn take(&mut self, region: &Region) -> Result<Option<(u64, u32, Rest)>, ()> {
        if self.tail == self.head && !self.look(region)? {
            return Ok(None);
        }
        let length = |at| region.load_u32(DATA_OFFSET + at, Ordering::Relaxed);
        let (mut at, mut skip) = (self.tail % MIN_CAPACITY, 0);
        if length(at) == PAD {
            skip = MIN_CAPACITY - at;
            at = 0;
        }
        let left = self.head.wrapping_sub(self.tail);
        let cap_len = length(at);
        if skip >= left || cap_len > SNAPLEN {
            return Err(());
        }
        let size = record_size(cap_len);
        if skip + size > left || at + size > MIN_CAPACITY {
            return Err(());
        }
        self.tail += skip + size;
        self.taken += 1;
        let record = DATA_OFFSET + at;
        let word = |offset| u128::from(region.load_u64(record + offset, Ordering::Relaxed));
        let (len, place, last) = (word(0) >> 32, word(8), word(24));
        let rest = match last & u128::from(flags::POSTED) {
            0 => Some((0, 0)),
            _ if last >> 48 > 0 || place + len > u128::from(AREA) => None,
            _ if len + u128::from(cap_len) > u128::from(SNAPLEN) => None,
            _ => Some((place as u64, len as u32)),
        };
        Ok(Some((record + RECORD_HEADER, cap_len, rest)))
    }
}

/// Checks it with these bytes: what the sender stores, and when the host looks.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let size = ring_size(MIN_CAPACITY);
    let all = Region::heap(size + 2 * GUARD);
    for at in (0..GUARD).step_by(8) {
        all.store_u64(at, CANARY, Ordering::Relaxed);
        all.store_u64(GUARD + size + at, CANARY, Ordering::Relaxed);
    }
    let region = all.part(GUARD, size).expect("inside");
    let geometry = Geometry {
        capacity: MIN_CAPACITY,
        snaplen: SNAPLEN,
        link_type: 1,
        epoch: 0x0100,
        port: 7,
        queue: 0,
    };
    let mut host = Intake::create(region.clone(), geometry).expect("a ring");
    // Before and behind it lie canaries.
    let around = Region::heap(AREA + 2 * GUARD);
    for at in (0..around.len()).step_by(8) {
        around.store_u64(at, CANARY, Ordering::Relaxed);
    }
    let area = around.part(GUARD, AREA).expect("inside");
    for at in 0..AREA {
        area.write(at, &[at as u8 & 0x7f]);
    }
    host.lend([area.clone()]);
    let (mut model, mut head) = (Model::default(), 0_u64);
    // The sender wrote words that are the host's.
    let mut spoiled = false;
    while !dice.is_empty() {
        match dice.byte() % 8 {
            0 => {
                let at = 8 * (u64::from(dice.u16()) % (size / 8));
                region.store_u64(at, dice.u64(), Ordering::Relaxed);
                spoiled |= matches!(at, TAIL | READ);
            }
            1 => region.store_u64(HEAD, dice.u64(), Ordering::Relaxed),
            2 => {
                let at = 8 * (u64::from(dice.u16()) % (MIN_CAPACITY / 8));
                let cap_len = match dice.byte() % 4 {
                    0 => PAD,
                    1 => dice.u32(),
                    _ => u32::from(dice.u16()) % (SNAPLEN + 2),
                };
                region.store_u32(DATA_OFFSET + at, cap_len, Ordering::Relaxed);
            }
            3 | 4 => {
                // An honest record, or one that says too much, where the next one is expected.
                let cap_len = u32::from(dice.u16()) % (SNAPLEN + 2);
                let at = head % MIN_CAPACITY;
                let place = match MIN_CAPACITY - at < record_size(cap_len) {
                    true => {
                        region.store_u32(DATA_OFFSET + at, PAD, Ordering::Relaxed);
                        head += MIN_CAPACITY - at;
                        0
                    }
                    false => at,
                };
                region.store_u32(DATA_OFFSET + place, cap_len, Ordering::Relaxed);
                if dice.byte() % 2 == 0 {
                    let (len, at) = match dice.byte() % 4 {
                        0 => (dice.u32(), dice.u64()),
                        _ => (
                            u32::from(dice.u16()) % SNAPLEN,
                            u64::from(dice.u16()) % (AREA + 2),
                        ),
                    };
                    let of = u64::from(dice.byte() % 8 == 0);
                    region.store_u32(DATA_OFFSET + place + 4, len, Ordering::Relaxed);
                    region.store_u64(DATA_OFFSET + place + 8, at, Ordering::Relaxed);
                    let last = u64::from(flags::POSTED) | of << 48;
                    region.store_u64(DATA_OFFSET + place + 24, last, Ordering::Relaxed);
                }
                head += record_size(cap_len);
                region.store_u64(HEAD, head, Ordering::Relaxed);
            }
            5 => {
                host.release();
                let told = [TAIL, READ].map(|at| region.load_u64(at, Ordering::Relaxed));
                assert!(spoiled || told == [model.tail, model.taken], "{told:?}");
            }
            6 => match (host.arm(), model.tail != model.head) {
                (armed, true) => assert_eq!(armed, Ok(true)),
                (armed, false) => {
                    let looked = model.look(&region);
                    assert_eq!(armed.map_err(drop), looked);
                    if looked.is_err() {
                        break;
                    }
                }
            },
            _ => {
                let mut buffer = [0xee; SNAPLEN as usize];
                let expected = model.take(&region);
                match host.take(&mut buffer) {
                    Ok(Some(len)) => {
                        let Ok(Some((at, cap_len, Some((place, more))))) = expected else {
                            panic!("{len} bytes where there is {expected:?}");
                        };
                        let mut there = vec![0; (cap_len + more) as usize];
                        let (own, rest) = there.split_at_mut(cap_len as usize);
                        region.read(at, own);
                        area.read(place, rest);
                        assert_eq!(buffer[..len], there);
                        assert!(buffer[len..].iter().all(|byte| *byte == 0xee));
                    }
                    Ok(None) => assert_eq!(expected, Ok(None)),
                    Err(SenderLied::Place(place)) => {
                        assert!(
                            matches!(expected, Ok(Some((.., None)))),
                            "{place:?} {expected:?}"
                        );
                    }
                    Err(lie) => {
                        assert_eq!(expected, Err(()), "{lie}");
                        break;
                    }
                }
                assert_eq!(host.taken(), model.taken);
            }
        }
    }
    assert_eq!(host.geometry(), &geometry, "frozen");
    host.finish(Life::Closed);
    for at in (0..GUARD).step_by(8) {
        assert_eq!(all.load_u64(at, Ordering::Relaxed), CANARY);
        assert_eq!(all.load_u64(GUARD + size + at, Ordering::Relaxed), CANARY);
    }
}

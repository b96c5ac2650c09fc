//! The two ends together: exactness, sleeping, and peers that lie.

mod buffers;
mod exhaustive;
mod floor;
mod group;
mod hostile;
mod model;
mod offload;
mod posted;
mod send;
mod sleep;
mod threads;

use crate::layout::{Geometry, Meta, flags, ring_size};
use crate::{Consumer, Producer, Region};

const EPOCH: u64 = 0x00c0_ffee_0000_0100;

fn geometry(capacity: u64, snaplen: u32) -> Geometry {
    Geometry {
        capacity,
        snaplen,
        link_type: 1,
        epoch: EPOCH,
        port: 7,
        queue: 0,
    }
}

/// Both ends of a small ring whose positions and counts begin at `start`.
fn ring_at(capacity: u64, snaplen: u32, start: u64) -> (Producer, Consumer, Region) {
    let region = Region::heap(ring_size(capacity));
    let producer = Producer::create_at(region.clone(), geometry(capacity, snaplen), start)
        .expect("a valid geometry");
    let consumer = Consumer::attach(region.clone()).expect("a ring");
    (producer, consumer, region)
}

fn ring(capacity: u64, snaplen: u32) -> (Producer, Consumer, Region) {
    ring_at(capacity, snaplen, 0)
}

/// The bytes of packet `number`: every byte depends on the number and its place.
fn bytes(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (number.wrapping_mul(31) ^ i.wrapping_mul(7)) as u8)
        .collect()
}

fn meta(number: u64, len: usize) -> Meta {
    Meta {
        ts_ns: number,
        wire_len: len as u32 + 4,
        flow_hash: !(number as u32),
        lost: 0,
        flags: number as u16 & !flags::OFFLOAD,
        vlan_tci: 1,
        source: 2,
        queue: number as u16 ^ 3,
        ..Meta::default()
    }
}

/// A small seeded generator (xorshift64*): the same run every time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, bound: u64) -> u64 {
        (self.roll() >> 11) % bound
    }
}

//! Senders with rings in the memory of the test, and links that take what they are given.

mod fair;
mod fates;
mod hostile;
mod places;
mod posted;
pub(in crate::engine) mod sleep;

use std::os::fd::AsFd;

use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::{Intake, Producer, Region};

use super::*;
use crate::source::{Flushed, Transmit, Transmitter};
use vnplug_frame::Frame;

/// A link that takes ten frames between two flushes, of which the last is lost, and no frame of
/// more than 100 bytes; of one byte makes it panic.
#[derive(Default)]
struct Link {
    taken: u64,
}

impl Transmitter for Link {
    fn transmit(&mut self, bytes: &[u8]) -> Transmit {
        assert!(bytes.len() != 1, "on purpose");
        match bytes.len() {
            101.. => Transmit::BadLength,
            _ if self.taken == 10 => Transmit::Full,
            _ => {
                self.taken += 1;
                Transmit::Taken
            }
        }
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        let taken = std::mem::take(&mut self.taken);
        Flushed {
            sent: taken.saturating_sub(1),
            full: taken.min(1),
            ..Flushed::default()
        }
    }
}

fn sender(id: u32) -> (Sender, Producer, Region) {
    sender_of(id, 1 << 17, 200)
}

fn sender_of(id: u32, capacity: u64, snaplen: u32) -> (Sender, Producer, Region) {
    sender_that(id, capacity, snaplen, false)
}

/// One that may post, if it `posts`, though no place is its own.
fn sender_that(id: u32, capacity: u64, snaplen: u32, posts: bool) -> (Sender, Producer, Region) {
    let geometry = Geometry {
        capacity,
        snaplen,
        link_type: 1,
        epoch: 256,
        port: id,
        queue: 0,
    };
    let region = Region::heap(ring_size(geometry.capacity));
    let mut intake = Intake::create(region.clone(), geometry).unwrap();
    if posts {
        intake.lend([]);
    }
    let producer = Producer::attach(region.clone()).unwrap();
    (Sender::new(id, intake, None, None), producer, region)
}

fn write(producer: &mut Producer, frames: usize, len: usize) {
    for _ in 0..frames {
        assert_eq!(producer.push(&Meta::default(), &vec![7; len]), Ok(true));
    }
    producer.publish();
}

fn attached(rings: &mut [(Sender, Producer, Region)]) -> Senders {
    let mut senders = Senders::default();
    let nobody = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    for (at, ring) in rings.iter_mut().enumerate() {
        let sender = std::mem::replace(&mut ring.0, self::sender(900 + at as u32).0);
        senders.attach(sender, nobody.as_fd());
    }
    senders
}

/// A link that takes everything.
struct Wire;

impl Transmitter for Wire {
    fn transmit(&mut self, _: &[u8]) -> Transmit {
        Transmit::Taken
    }

    fn flush(&mut self, _: &mut dyn FnMut(&[Frame<'_>])) -> Flushed {
        Flushed::default()
    }
}

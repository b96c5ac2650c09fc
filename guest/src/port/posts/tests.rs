use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vnplug_ring::control::Segments;
use vnplug_ring::layout::{Geometry, Meta, ring_size};
use vnplug_ring::offload::Offload;
use vnplug_ring::{Consumer, Intake, Outlet, Producer, Region};

use crate::map::map;
use crate::port::Outbox;

const RING: u64 = 1 << 14;
const SNAPLEN: u32 = 2000;

fn geometry() -> Geometry {
    Geometry {
        capacity: RING,
        snaplen: SNAPLEN,
        link_type: 1,
        epoch: 1 << 8,
        port: 1,
        queue: 0,
    }
}

/// A ring with packets of these bytes.
fn ring(count: u8) -> Consumer {
    let region = Region::heap(ring_size(RING));
    let mut source = Producer::create(region.clone(), geometry()).unwrap();
    for byte in 0..count {
        assert_eq!(source.push(&Meta::default(), &[byte; 1000]), Ok(true));
    }
    source.publish();
    Consumer::attach(region).unwrap()
}

/// A sending end whose ring is this memory, its host, and who it kicks.
fn outbox(region: Region) -> (Outbox, Intake, UnixStream) {
    let mut intake = Intake::create(region.clone(), geometry()).unwrap();
    intake.lend(Some(Region::heap(RING)));
    let (kick, kicked) = UnixStream::pair().unwrap();
    let sender = Producer::attach(region).unwrap();
    let outbox = Outbox::new(sender, OwnedFd::from(kick), Segments::Merged);
    (outbox, intake, kicked)
}

fn post_all(outbox: &mut Outbox, ring: &mut Consumer) {
    for packet in ring.batch(64) {
        assert!(outbox.forward(b"header", packet.unwrap().bytes).unwrap());
    }
    outbox.flush();
    ring.release();
}

#[test]
fn a_number_is_free_when_its_ring_is_over_and_no_record_that_names_it_waits() {
    let (mut outbox, mut intake, _kicked) = outbox(Region::heap(ring_size(RING)));
    let mut first = [ring(2)];
    outbox.post_from(0, &mut first).unwrap();
    assert_eq!(outbox.postable().free(1), 1, "it is read");
    post_all(&mut outbox, &mut first[0]);
    assert_eq!(outbox.posted(), 2);
    drop(first);
    let mut buffer = [0; SNAPLEN as usize];
    for free in [1, 0] {
        assert_eq!(outbox.postable().free(1), 1, "its records wait");
        assert!(intake.take(&mut buffer).unwrap().is_some());
        intake.release();
        assert_eq!(outbox.postable().free(1), free);
    }
}

#[test]
fn a_host_that_is_too_old_for_it_is_named_with_what_to_do() {
    let region = Region::heap(ring_size(RING));
    let _old = Intake::create(region.clone(), geometry()).unwrap();
    let (kick, _kicked) = UnixStream::pair().unwrap();
    let sender = Producer::attach(region).unwrap();
    let mut outbox = Outbox::new(sender, OwnedFd::from(kick), Segments::Merged);
    let mut rings = [ring(1)];
    let error = outbox.post_from(0, &mut rings).unwrap_err().to_string();
    let told = ["daemon", "too old", "update it", "without `posts`"];
    assert!(told.iter().all(|it| error.contains(it)), "{error}");
    // It sends copies as before.
    for packet in rings[0].batch(1) {
        assert!(outbox.forward(b"header", packet.unwrap().bytes).unwrap());
    }
    assert_eq!(outbox.posted(), 0);
}

#[test]
fn a_transmit_ring_is_unmapped_with_its_sending_end_though_others_hold_back_for_it() {
    let name = "vnplug-posts-test";
    let fd = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, ring_size(RING)).unwrap();
    let is_mapped = || {
        fs::read_to_string("/proc/self/maps")
            .unwrap()
            .contains(name)
    };
    let region = map(fd.as_fd(), ring_size(RING)).unwrap();
    let (mut outbox, intake, _kicked) = outbox(region);
    let mut rings = [ring(2)];
    outbox.post_from(0, &mut rings).unwrap();
    post_all(&mut outbox, &mut rings[0]);
    assert!(rings[0].holds_back());
    // As a link has it.
    let outlet = outbox.postable().outlet();
    // The host's own mapping, which is the same one here.
    drop(intake);
    assert!(is_mapped());
    drop(outbox);
    assert!(!is_mapped());
    rings[0].release();
    assert!(rings[0].holds_back(), "the host may read it still");
    drop::<std::sync::Arc<Outlet>>(outlet);
    rings[0].release();
    assert!(!rings[0].holds_back());
}

#[test]
fn behind_a_long_head_what_is_to_be_cut_is_copied() {
    let (mut outbox, mut intake, _kicked) = outbox(Region::heap(ring_size(RING)));
    let mut rings = [ring(2)];
    outbox.post_from(0, &mut rings).unwrap();
    let offload = Offload {
        gso_type: 1,
        gso_size: 100,
        ..Offload::default()
    };
    for (packet, (len, posted)) in rings[0].batch(2).zip([(256, 1), (257, 1)]) {
        let head = vec![7; len];
        let sent = outbox.forward_offloaded(&head, packet.unwrap().bytes, &offload);
        assert!(sent.unwrap());
        assert_eq!(outbox.posted(), posted, "{len}");
    }
    outbox.flush();
    let mut buffer = [0; SNAPLEN as usize];
    for len in [256, 257] {
        let taken = intake.take_to(Segments::Merged, |_| &mut buffer);
        let (_, sent) = taken.unwrap().unwrap();
        assert_eq!(sent.end - sent.start, len + 1000);
    }
}

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vnplug_ring::control::Segments;
use vnplug_ring::layout::{Geometry, VERSION_MINOR, header, ring_size};
use vnplug_ring::offload::{Offload, gso};
use vnplug_ring::{Intake, Producer, Region};

use super::patience::{QUARTER_WAIT, SHORTEST};
use crate::error::Error;
use crate::port::Outbox;

const RING: u64 = 1 << 14;
const SNAPLEN: usize = 4000;
const OFFLOAD: Offload = Offload {
    flags: 1,
    gso_type: gso::TCPV4,
    gso_size: 1448,
    csum_start: 34,
    csum_offset: 16,
};

/// The host's end of a transmit ring that a daemon made who knows this layout, and the end of a port that may leave frames
/// to be cut.
fn ends(minor: u16) -> (Intake, Outbox) {
    let region = Region::heap(ring_size(RING));
    let geometry = Geometry {
        capacity: RING,
        snaplen: SNAPLEN as u32,
        link_type: 1,
        epoch: 1 << 8,
        port: 1,
        queue: 0,
    };
    let intake = Intake::create(region.clone(), geometry).unwrap();
    region.store_u16(header::MINOR, minor, Ordering::Release);
    let (kick, _) = UnixStream::pair().unwrap();
    let sender = Producer::attach(region).unwrap();
    let outbox = Outbox::new(sender, OwnedFd::from(kick), Segments::Merged);
    (intake, outbox)
}

/// What the host has of the next frame, as a host of layout 1.0 reads it (`Wire`) or a later one.
fn taken(intake: &mut Intake, segments: Segments) -> Option<(Vec<u8>, Offload)> {
    let mut buffer = [0; SNAPLEN];
    let taken = intake.take_to(segments, |_| &mut buffer).unwrap();
    let taken = taken.map(|(all, sent)| (all[sent.start..sent.end].to_vec(), sent.offload));
    intake.release();
    taken
}

#[test]
fn a_daemon_of_layout_1_0_is_given_no_super_frame() {
    let (mut intake, mut outbox) = ends(0);
    let frame = [7; 3500];
    for refused in [
        outbox.push_offloaded(&frame, &OFFLOAD),
        outbox.forward_offloaded(&frame[..100], &frame[100..], &OFFLOAD),
        outbox.forward_offloaded(&[], &frame, &OFFLOAD),
    ] {
        let Err(Error::Invalid(text)) = refused else {
            panic!("{refused:?}");
        };
        assert!(text.contains("a daemon that knows it"), "{text}");
    }
    outbox.flush();
    assert_eq!(taken(&mut intake, Segments::Wire), None, "nothing of them");
    // Frames of the wire go there as ever, and as long as the ring has room for.
    assert_eq!(outbox.max_frame(), SNAPLEN);
    assert!(outbox.push(&[7; SNAPLEN]).unwrap());
    outbox.flush();
    let whole = (vec![7; SNAPLEN], Offload::default());
    assert_eq!(taken(&mut intake, Segments::Wire), Some(whole));
}

#[test]
fn a_daemon_of_layout_1_1_and_of_ours_is_given_a_super_frame_with_what_is_left_to_do() {
    for minor in [1, VERSION_MINOR] {
        let (mut intake, mut outbox) = ends(minor);
        assert!(outbox.push_offloaded(&[7; 3500], &OFFLOAD).unwrap());
        outbox.flush();
        let whole = (vec![7; 3500], OFFLOAD);
        assert_eq!(taken(&mut intake, Segments::Merged), Some(whole));
    }
}

#[test]
fn room_is_what_is_free_wherever_the_next_record_would_lie() {
    let (mut intake, mut outbox) = ends(VERSION_MINOR);
    let frame = [7; 1000];
    // Records of 1 KiB and less: the head comes to lie in each quarter of the ring.
    for turn in 0..40 {
        while outbox.push(&frame).unwrap() {}
        outbox.flush();
        assert!(!outbox.has_room(frame.len() as u32, 0).unwrap());
        let mut has_taken = 0;
        while !outbox.has_room(frame.len() as u32, RING / 4).unwrap() {
            assert!(taken(&mut intake, Segments::Wire).is_some(), "{turn}");
            has_taken += 1;
        }
        // More than one, which is enough for a frame, and no more than a quarter and what lies at its ends.
        assert!((3..=6).contains(&has_taken), "{turn}: {has_taken}");
    }
}

#[test]
fn who_waits_look_by_look_goes_on_when_a_quarter_is_free() {
    let (mut intake, mut outbox) = ends(VERSION_MINOR);
    let frame = [7; 1000];
    while outbox.push(&frame).unwrap() {}
    outbox.flush();
    let mut patience = outbox.patience(Duration::from_secs(3600));
    assert!(!outbox.has_room_for(frame.len(), &mut patience).unwrap());
    // Before it slept one frame's room is enough.
    assert!(taken(&mut intake, Segments::Wire).is_some());
    assert!(outbox.has_room_for(frame.len(), &mut patience).unwrap());
    assert_eq!(patience.pause(), Some(SHORTEST));
    let mut has_taken = 0;
    while !outbox.has_room_for(frame.len(), &mut patience).unwrap() {
        assert!(taken(&mut intake, Segments::Wire).is_some());
        has_taken += 1;
    }
    assert!(
        has_taken >= 2 || patience.look() >= QUARTER_WAIT,
        "{has_taken}"
    );
}

#[test]
fn who_waits_sleeps_half_as_long_first_as_the_last_wait_took() {
    let (mut intake, mut outbox) = ends(VERSION_MINOR);
    let frame = [7; 1000];
    while outbox.push(&frame).unwrap() {}
    outbox.flush();
    let mut patience = outbox.patience(Duration::from_secs(3600));
    assert_eq!(patience.pause(), Some(SHORTEST));
    while taken(&mut intake, Segments::Wire).is_some() {}
    std::thread::sleep(4 * SHORTEST);
    assert!(outbox.has_room_for(frame.len(), &mut patience).unwrap());
    let next = outbox.patience(Duration::from_secs(3600)).pause().unwrap();
    assert!(next >= 2 * SHORTEST, "{next:?}");
}

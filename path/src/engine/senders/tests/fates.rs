//! What becomes of the frames of senders that go, lie, or are revoked.

use super::*;
use vnplug_frame::MAX_BATCH;
use vnplug_ring::layout::HEAD;

#[test]
fn every_fate_is_counted_once_and_who_goes_is_served_to_the_end() {
    let mut rings = [sender(1)];
    let mut senders = attached(&mut rings);
    let producer = &mut rings[0].1;
    write(producer, 40, 60);
    write(producer, 5, 150);
    write(producer, 500, 60);
    let mut link = Link::default();
    let last = senders.last_of(1);
    while !senders.is_done(1, last) {
        assert!(senders.serve(&mut link, 0, &mut |_, _| {}).frames <= MAX_BATCH);
    }
    let gone = senders.detach(1, Life::Closed).unwrap();
    assert!(gone.is_over() && producer.life() == Life::Closed);
    let total = senders.total();
    assert_eq!((total.taken, total.dropped_length), (545, 5));
    assert_eq!(total.accounted(), total.taken);
    assert!(senders.is_done(1, 0) && senders.detach(1, Life::Closed).is_none());
}

#[test]
fn who_goes_and_writes_on_is_not_served_for_ever() {
    let mut rings = [sender(1)];
    let mut senders = attached(&mut rings);
    let mut link = Link::default();
    let last = senders.last_of(1);
    let mut turns = 0;
    write(&mut rings[0].1, 1, 60);
    while !senders.is_done(1, last) {
        write(&mut rings[0].1, MAX_BATCH, 60);
        senders.serve(&mut link, 0, &mut |_, _| {});
        turns += 1;
        assert!(turns <= LAST as usize / MAX_BATCH);
    }
    assert_eq!(senders.total().taken, LAST);
}

#[test]
fn what_waits_when_sending_is_revoked_is_counted_and_not_read() {
    let mut rings = [sender(1), sender(2)];
    let mut senders = attached(&mut rings);
    write(&mut rings[0].1, 30, 60);
    write(&mut rings[1].1, 3, 60);
    // What is read of it would be a lie.
    rings[0].2.store_u32(
        vnplug_ring::layout::DATA_OFFSET,
        u32::MAX - 1,
        std::sync::atomic::Ordering::Relaxed,
    );
    senders.revoke(1);
    let mut link = Link::default();
    while senders.serve(&mut link, 0, &mut |_, _| {}).frames > 0 {}
    let of = |id| senders.counters().find(|(it, _)| *it == id).unwrap().1;
    assert_eq!(
        (of(1).taken, of(1).dropped_revoked, of(1).sent),
        (30, 30, 0)
    );
    assert_eq!((of(2).taken, of(2).dropped_revoked), (3, 0));
    assert_eq!(rings[0].1.life(), Life::Revoked);
    assert_eq!(rings[1].1.life(), Life::Open);
    // Whoever writes on writes for nobody, and no second end is put over the first.
    write(&mut rings[0].1, 3, 60);
    assert!(!senders.arm().0 && senders.is_done(1, u64::MAX));
    drop(senders.detach(1, Life::Closed));
    assert_eq!(rings[0].1.life(), Life::Revoked);
    assert_eq!(senders.total().accounted(), senders.total().taken);
}

#[test]
fn a_sender_that_says_how_many_wait_is_believed_as_far_as_there_is_room() {
    let (sender, mut producer, region) = sender(1);
    let mut intake = sender;
    write(&mut producer, 3, 60);
    region.store_u64(
        vnplug_ring::layout::PUBLISHED,
        u64::MAX / 2,
        std::sync::atomic::Ordering::Relaxed,
    );
    intake.revoke();
    // Three records of 60 bytes are as long as nine without any.
    assert_eq!(intake.counters.dropped_revoked, 9);
}

#[test]
fn a_lie_and_a_fault_of_ours_cost_one_port() {
    let mut rings = [sender(1), sender(2), sender(3)];
    let mut senders = attached(&mut rings);
    let mut link = Link::default();
    rings[0]
        .2
        .store_u64(HEAD, 12, std::sync::atomic::Ordering::Release);
    write(&mut rings[1].1, 1, 1);
    write(&mut rings[2].1, 3, 60);
    let mut liars = Vec::new();
    for _ in 0..6 {
        liars.extend(
            senders
                .serve(&mut link, 0, &mut |_, _| {})
                .liar
                .map(|(id, _)| id),
        );
    }
    liars.sort_unstable();
    assert_eq!(liars, [1, 2]);
    let lives: Vec<Life> = rings.iter().map(|ring| ring.1.life()).collect();
    assert_eq!(lives, [Life::Quarantined, Life::Quarantined, Life::Open]);
    let honest = senders.counters().find(|(id, _)| *id == 3).unwrap();
    assert_eq!(honest.1.taken, 3);
    assert_eq!(senders.total().accounted(), senders.total().taken);
    assert_eq!(senders.arm(), (false, None));
}

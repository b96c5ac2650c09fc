//! Segments that are merged for a guest that takes super-frames: the setting `gro`.

use vnplug_frame::offload::checksum::Sum;

use super::*;

/// The frames of the wire that a guest was given, and how many it was given.
fn given(guest: &mut Guest, count: usize) -> (Vec<Vec<u8>>, usize) {
    let (mut wire, mut frames) = (Vec::new(), 0);
    while wire.len() < count {
        let (header, frame) = guest.next();
        frames += 1;
        wire.extend(cut(&header, frame));
    }
    (wire, frames)
}

#[test]
fn segments_are_merged_for_a_guest_that_takes_super_frames_and_for_no_other() {
    let served = Served::set("default.gro=20");
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let mut plain = served.guest(PLAIN);
    let (mut all, mut fewer) = (0, 0);
    for (round, len) in (0..).zip([1000, 1400, 100, 1448, 536].repeat(10)) {
        // Of a flow that goes on, and to both: station 2 is at neither.
        let frames = segments(round * 40, 40, len);
        for frame in &frames {
            sender.send(frame);
        }
        let (wire, count) = given(&mut takes, 40);
        assert!(wire == frames, "{round}");
        (all, fewer) = (all + 40, fewer + 40 - count);
        let (wire, count) = given(&mut plain, 40);
        assert!(wire == frames && count == 40, "{round}");
        eventually("all came back", || sender.has_sent());
    }
    // How many meet in a turn is the machine's affair.
    assert!(fewer > 0, "{all}");
    assert_eq!(served.count("out_merged"), fewer as u64);
    let made = served.count("out_super_frames");
    assert!((1..=fewer as u64).contains(&made));
    served.check_sums();
    served.check_alive();
}

/// A pure ACK of station 2, with a right checksum or with that of the pseudo header.
fn ack(number: u32, is_left: bool) -> (Vec<u8>, Offload) {
    let mut frame = vec![
        2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 40, 0, 9,
    ];
    frame.extend([0x40, 0, 64, 6, 0, 0, 10, 0, 3, 2, 10, 0, 3, 1]);
    frame.extend([0x1b, 0x59, 0x1b, 0x58, 0, 0, 0, 1]);
    frame.extend(number.to_be_bytes());
    frame.extend([0x50, 0x10, 4, 0, 0, 0, 0, 0]);
    let sum = Sum::default().bytes(&frame[14..34]).finish();
    frame[24..26].copy_from_slice(&sum);
    let pseudo = Sum::default().bytes(&frame[26..34]).number(6 + 20);
    let sum = match is_left {
        true => pseudo.finish().map(|byte| !byte),
        false => pseudo.bytes(&frame[34..]).finish(),
    };
    frame[50..52].copy_from_slice(&sum);
    let offload = Offload {
        flags: flags::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 16,
        ..Offload::default()
    };
    let left = is_left.then_some(offload);
    (frame, left.unwrap_or_default())
}

#[test]
fn an_ack_for_what_was_merged_becomes_those_of_single_segments() {
    let served = Served::set("default.gro=20 default.acks=expand");
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let (mut at, mut segments_sent, mut acks, mut own) = (0, 0, 0, 0);
    for round in 0..40 {
        // The guest acknowledges all of it at once, whatever it was given it in.
        let sent = segments(at, 40, 1000);
        for frame in &sent {
            sender.send(frame);
        }
        let (wire, _) = given(&mut takes, 40);
        assert!(wire == sent, "{round}");
        at += 40;
        let is_left = round % 2 == 0;
        let (mine, offload) = ack(at * 1000, is_left);
        takes.send_offloaded(&mine, &offload);
        let mut last = (at - 40) * 1000;
        own += 1;
        while last != at * 1000 {
            // All but the number and the sum of it are the guest's own, and right.
            let (_, came) = sender.next();
            let number = u32::from_be_bytes(came[42..46].try_into().unwrap());
            assert!(last < number && number.is_multiple_of(1000), "{number}");
            assert_eq!(came, ack(number, false).0);
            (last, acks) = (number, acks + 1);
        }
        segments_sent += 40;
        eventually("all came back", || sender.has_sent() && takes.has_sent());
        sender.drain();
    }
    let added = served.count("acks_expanded");
    assert_eq!(added, acks - own);
    assert!(added > 0 && added * 2 <= segments_sent);
    // It says the same again, and lies: nothing is added.
    for number in [at * 1000, at * 1000 - 500, at * 1000 + 70_000, 5] {
        let (mine, offload) = ack(number, true);
        takes.send_offloaded(&mine, &offload);
        assert_eq!(sender.next().1, ack(number, false).0);
    }
    assert_eq!(served.count("acks_expanded"), added);
    served.check_sums();
    served.check_alive();
}

#[test]
fn a_frame_longer_than_all_chains_of_a_guest_holds_up_none_behind_it_for_ever() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut takes = Guest::with(
        Front::connect(&served.path),
        PLAIN | GUEST_CSUM | GUEST_TSO4,
    );
    assert!(takes.front.table(&takes.memory, LEN));
    assert!(takes.front.start(&takes.receiving) && takes.front.start(&takes.sending));
    // Of three descriptors each: the ring has no place for more chains than 21, of 1.5 KiB, and later of 2.
    for head in (0..SIZE - 2).step_by(3) {
        for part in 0..3 {
            let at = 0x10_0000 + 2048 * u64::from(head) + 512 * u64::from(part);
            let flags = 2 | u16::from(part < 2);
            let it = (at, 512, flags, head + part + 1);
            takes.receiving.desc(&takes.region, head + part, it);
        }
        takes.receiving.offer(&takes.region, head);
    }
    let (longer, offload) = super_frame(0xee, 1, 50_000);
    sender.send_offloaded(&longer, &offload);
    let mut all = 0;
    eventually("what follows comes", || {
        sender.send(&frame(0xee, 1, all));
        all += 1;
        std::thread::sleep(Duration::from_millis(50));
        takes.received().is_some()
    });
    // Another one is not waited for.
    sender.send_offloaded(&longer, &offload);
    sender.send(&frame(0xee, 1, all));
    all += 1;
    let mut last = 0;
    while last + 1 < all {
        let (_, came) = takes.next();
        last = u32::from_be_bytes(came[14..18].try_into().unwrap());
    }
    // Nor are shorter ones, which are still longer than all chains: who sends them would stop the guest.
    let lost = served.count("out_dropped_full");
    for len in (43_100..43_400).step_by(20).rev() {
        let (longer, offload) = super_frame(0xee, 1, len);
        sender.send_offloaded(&longer, &offload);
        sender.send(&frame(0xee, 1, all));
        assert_eq!(takes.next().1, frame(0xee, 1, all));
        all += 1;
    }
    assert_eq!(served.count("out_dropped_full"), lost + 15);
    served.check_sums();
    served.check_alive();
}

#[test]
fn a_guest_that_was_stopped_for_long_with_few_buffers_left_has_merged_frames_again() {
    let served = Served::set("default.gro=20");
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    // It stands still. One buffer of it is left, and is too short for all that follows.
    for number in 0..u32::from(SIZE) - 1 {
        sender.send(&frame(0xee, 1, number));
        eventually("it came back", || sender.has_sent());
    }
    let (longer, offload) = super_frame(0xee, 1, 20_000);
    sender.send_offloaded(&longer, &offload);
    let mut at = 0;
    let mut send = |sender: &mut Guest| {
        for frame in segments(at, 10, 2100) {
            sender.send(&frame);
        }
        at += 10;
        eventually("all came back", || sender.has_sent());
    };
    eventually("segments are merged", || {
        send(&mut sender);
        served.count("out_merged") > 0
    });
    std::thread::sleep(Duration::from_millis(1100));
    send(&mut sender);
    assert!(served.count("out_dropped_gone") > 0);
    // It goes on.
    let merged = served.count("out_merged");
    eventually("segments are merged again", || {
        takes.drain();
        send(&mut sender);
        served.count("out_merged") > merged
    });
    served.check_sums();
    served.check_alive();
}

#[test]
fn a_guest_without_mergeable_buffers_loses_what_is_merged_once_and_then_has_all_of_it_in_segments()
{
    let served = Served::set("default.gro=20");
    let mut sender = served.guest(PLAIN);
    let features = PLAIN & !MRG_RXBUF | GUEST_CSUM | GUEST_TSO4;
    let mut takes = served.guest(features);
    let mut at = 0;
    // How many meet in a turn is the machine's affair.
    eventually("a frame was too long for a buffer", || {
        for frame in segments(at, 40, 1400) {
            sender.send(&frame);
        }
        at += 40;
        eventually("all came back", || sender.has_sent());
        takes.take_back(0);
        takes.receiving.kick();
        served.count("out_dropped_full") > 0
    });
    // What is left of that has come before this.
    sender.send(&frame(0xee, 1, 0));
    while takes.next().1 != frame(0xee, 1, 0) {}
    let lost = served.count("out_dropped_full");
    let merged = served.count("out_merged");
    for round in 0..20 {
        let frames = segments(at + round * 40, 40, 1400);
        for frame in &frames {
            sender.send(frame);
        }
        for frame in frames {
            assert!(takes.next().1 == frame, "{round}");
        }
        eventually("all came back", || sender.has_sent());
    }
    assert_eq!(served.count("out_dropped_full"), lost);
    assert_eq!(served.count("out_merged"), merged);
    served.check_sums();
    served.check_alive();
}

#[test]
fn merged_frames_that_wait_for_a_guest_which_is_set_up_anew_are_counted_as_dropped() {
    let served = Served::set("default.gro=20");
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    // More than all its buffers; it takes none of them back.
    for at in (0..400).step_by(40) {
        for frame in segments(at, 40, 1448) {
            sender.send(&frame);
        }
        eventually("all came back", || sender.has_sent());
    }
    assert!(served.count("out_merged") > 0);
    served.check_sums();
    assert_eq!(served.count("out_dropped_gone"), 0);
    // Its driver begins anew, without the offload.
    for number in 0..2 {
        takes.front.stop(number);
    }
    assert!(takes.front.does(SET_FEATURES, &bytes_of(&[PLAIN]), &[]));
    eventually("they are lost", || served.count("out_dropped_gone") > 0);
    served.check_sums();
    served.check_alive();
}

//! Threads that forward beside the one of the switch.

use super::*;

/// Frames that lanes have forwarded.
fn forwarded(served: &Served) -> u64 {
    served.count("lane_forwarded")
}

/// A guest that is heard only if it is asked to kick.
fn polite(served: &Served) -> Guest {
    let mut guest = served.guest(PLAIN);
    guest.is_polite = true;
    guest
}

/// Sends a frame whenever there is room, and takes what comes, until `count` frames went each way, all in order.
fn talk(one: &mut Guest, two: &mut Guest, (first, second): (u8, u8), count: u32) {
    let (mut sent, mut came) = ([0; 2], [0; 2]);
    eventually("all frames are there", || {
        let ways = [(second, first), (first, second)];
        for (at, (to, from)) in ways.into_iter().enumerate() {
            let (sender, receiver) = match at {
                0 => (&mut *one, &mut *two),
                _ => (&mut *two, &mut *one),
            };
            // What the receiver has no room for waits, but not without end.
            while sent[at] < count && sent[at] < came[at] + 48 {
                sender.has_sent();
                sender.send(&frame(to, from, sent[at]));
                sent[at] += 1;
            }
            while let Some((_, bytes)) = receiver.received() {
                assert_eq!(bytes, frame(to, from, came[at]));
                came[at] += 1;
            }
        }
        came == [count; 2]
    });
}

#[test]
fn lanes_forward_what_is_known_and_each_frame_is_counted_once() {
    let served = Served::here();
    let (mut one, mut two) = (polite(&served), polite(&served));
    let mut third = polite(&served);
    talk(&mut one, &mut two, (1, 2), 20_000);
    // Only while nobody knew where the stations are.
    assert!(third.drain() <= 2 * 48);
    let lanes = forwarded(&served);
    // The first ones go by the switch, and 10 ms of others.
    assert!(lanes > 10_000, "{lanes} of 40,000");
    assert_eq!(served.count("entered"), 40_000);
    assert_eq!(served.count("out_dropped_full"), 0);
    served.check_sums();
    // The control: a switch that has none.
    let alone = Served::alone();
    let (mut one, mut two) = (polite(&alone), polite(&alone));
    talk(&mut one, &mut two, (1, 2), 2_000);
    let counters = alone.counters.lock().unwrap().clone();
    assert!(!counters.iter().any(|(name, _)| name == "lane_forwarded"));
}

#[test]
fn a_limit_for_what_is_for_many_leaves_lanes_their_work_and_holds_beside_them() {
    let served = Served::set("storm=10/s default.stations=100");
    let (mut one, mut two) = (polite(&served), polite(&served));
    one.send(&frame(0xfe, 1, 0));
    assert_eq!(two.next().1, frame(0xfe, 1, 0));
    two.send(&frame(0xfe, 2, 0));
    assert_eq!(one.next().1, frame(0xfe, 2, 0));
    let mut third = polite(&served);
    for round in 0..2 {
        let before = forwarded(&served);
        talk(&mut one, &mut two, (1, 2), 2_000);
        let lanes = forwarded(&served) - before;
        assert!(lanes > 1_000, "round {round}: {lanes} of 4,000");
        let dropped = served.count("in_dropped_storm");
        for number in 0..200 {
            one.send(&frame(0xfe, 1, number));
            if number % 32 == 31 {
                eventually("its buffers are back", || one.has_sent());
            }
        }
        eventually("most are dropped", || {
            served.count("in_dropped_storm") > dropped + 100
        });
        two.drain();
    }
    assert!(third.drain() < 200);
    served.check_sums();
}

#[test]
fn frames_for_many_among_them_overtake_none_and_are_overtaken_by_none() {
    let served = Served::here();
    let (mut one, mut two) = (polite(&served), polite(&served));
    two.send(&frame(0xfe, 2, 0));
    one.next();
    let to = |number: u32| if number.is_multiple_of(97) { 0xfe } else { 2 };
    let (mut sent, mut came, count) = (0, 0, 30_000);
    eventually("all frames are there", || {
        while sent < count && sent < came + 48 {
            one.has_sent();
            one.send(&frame(to(sent), 1, sent));
            sent += 1;
        }
        while let Some((_, bytes)) = two.received() {
            assert_eq!(bytes, frame(to(came), 1, came));
            came += 1;
        }
        came == count
    });
    // The port went to and fro.
    assert!(forwarded(&served) > 0 && served.count("flooded") > u64::from(count) / 97);
    served.check_sums();
}

#[test]
fn super_frames_pass_whole_to_who_takes_them_and_others_are_cut_by_the_switch() {
    let served = Served::here();
    let mut sender = polite(&served);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let mut plain = polite(&served);
    takes.send(&frame(0xfe, 2, 0));
    plain.send(&frame(0xfe, 3, 0));
    (0..2).for_each(|_| drop(sender.next()));
    plain.drain();
    takes.drain();
    let before = forwarded(&served);
    for round in 0..400 {
        let (bytes, offload) = super_frame(2, 1, 20_000);
        sender.send_offloaded(&bytes, &offload);
        assert_eq!(takes.next().1, bytes);
        if round % 40 == 0 {
            let (bytes, offload) = super_frame(3, 1, 4_000);
            sender.send_offloaded(&bytes, &offload);
            let cut = (0..3).map(|_| plain.next().1[54..].to_vec());
            assert_eq!(cut.collect::<Vec<_>>().concat(), bytes[54..]);
        }
        eventually("its buffers are back", || sender.has_sent());
    }
    assert!(forwarded(&served) > before);
    served.check_sums();
}

#[test]
fn a_setting_and_a_port_that_goes_hold_for_all_lanes_at_once() {
    let served = Served::here();
    let (mut one, mut two) = (polite(&served), polite(&served));
    talk(&mut one, &mut two, (1, 2), 5_000);
    eventually("lanes forward", || {
        talk(&mut one, &mut two, (1, 2), 500);
        forwarded(&served) > 0
    });
    for port in [1, 2] {
        served.board.set(Some(port), "isolated=yes").unwrap();
    }
    // It was asked, and answers when it has done it.
    served.count("entered");
    let (before, lanes) = (served.count("in_dropped_isolated"), forwarded(&served));
    for number in 0..50 {
        one.send(&frame(2, 1, number));
    }
    eventually("all were dropped", || {
        served.count("in_dropped_isolated") == before + 50
    });
    assert_eq!((forwarded(&served), two.drain()), (lanes, 0));
    for port in [1, 2] {
        served.board.set(Some(port), "isolated=no").unwrap();
    }
    served.count("entered");
    talk(&mut one, &mut two, (1, 2), 500);
    // Who has the number next has nothing of what was for the one before.
    for round in 0..20_u8 {
        let old = 0x40 + round;
        let mut guest = polite(&served);
        guest.send(&frame(0xfe, old, 0));
        assert_eq!(one.next().1, frame(0xfe, old, 0));
        talk(&mut one, &mut guest, (1, old), 200);
        drop(guest);
        let mut next = polite(&served);
        for number in 0..20 {
            one.send(&frame(old, 1, number));
        }
        next.send(&frame(1, 0x80 + round, 0));
        eventually("it is there", || {
            one.received()
                .is_some_and(|(_, bytes)| bytes == frame(1, 0x80 + round, 0))
        });
        while let Some((_, bytes)) = next.received() {
            // Flooded, to a station that nobody knows any more.
            assert_eq!(bytes[5], old);
        }
        two.drain();
    }
    served.check_sums();
}

#[test]
fn captures_that_come_and_go_among_them_lose_nothing_and_double_nothing() {
    let served = Served::here();
    served.flips.store(true, Ordering::Relaxed);
    let (mut one, mut two) = (polite(&served), polite(&served));
    talk(&mut one, &mut two, (1, 2), 20_000);
    assert_eq!(served.count("entered"), 40_000);
    served.check_sums();
}

#[test]
fn an_age_that_is_set_is_that_of_lanes_too() {
    let served = Served::here();
    let (mut one, mut two) = (polite(&served), polite(&served));
    let mut third = polite(&served);
    eventually("lanes forward", || {
        talk(&mut one, &mut two, (1, 2), 50);
        forwarded(&served) > 0
    });
    third.drain();
    served.board.set(None, "age=1").unwrap();
    std::thread::sleep(Duration::from_millis(3_200));
    one.send(&frame(2, 1, 7));
    // Nobody knows any more where it is.
    assert_eq!(third.next().1, frame(2, 1, 7));
    assert_eq!(two.next().1, frame(2, 1, 7));
    served.check_sums();
}

/// Bounded: who is not heard of is not heard of later either.
#[track_caller]
fn soon(what: &str, mut is: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn several_lanes_give_to_one_guest_and_what_waits_for_its_buffers_comes_or_is_counted() {
    let served = Served::here();
    let mut to = polite(&served);
    let mut senders: Vec<Guest> = (0..4).map(|_| polite(&served)).collect();
    to.send(&frame(0xfe, 9, 0));
    for (at, sender) in (1..).zip(&mut senders) {
        sender.send(&frame(0xfe, at, 0));
        eventually("it is known", || sender.drain() > 0);
    }
    eventually("all are", || {
        to.drain();
        senders.iter_mut().for_each(|it| {
            it.drain();
        });
        served.count("stations") == 5
    });
    std::thread::sleep(Duration::from_millis(50));
    to.drain();
    for round in 0..30 {
        let (before, dropped) = (forwarded(&served), served.count("out_dropped_full"));
        // More than it has buffers for, and than its port keeps: 4 x 150 frames, 64 buffers, 512 wait.
        for number in 0..150 {
            for (from, sender) in (1..).zip(&mut senders) {
                while sender.sending.next.wrapping_sub(sender.sending.taken) >= SIZE {
                    sender.has_sent();
                }
                sender.send(&frame(9, from, number));
            }
        }
        soon("all are taken", || {
            senders.iter_mut().all(|sender| sender.has_sent())
        });
        assert!(forwarded(&served) > before, "{round}");
        // Each sender's in order, and all but what was dropped.
        let (mut next, mut came) = ([0; 5], 0);
        soon("all that was kept comes", || {
            while let Some((_, bytes)) = to.received() {
                let number = u32::from_be_bytes(bytes[14..18].try_into().unwrap());
                let next = &mut next[usize::from(bytes[11])];
                assert!(number >= *next, "{number} after {next}");
                *next = number + 1;
                came += 1;
            }
            came + served.count("out_dropped_full") - dropped == 600
        });
    }
    served.check_sums();
}

#[test]
fn what_lanes_gave_and_its_guest_made_unusable_is_counted_as_dropped() {
    let served = Served::here();
    let (mut one, mut two) = (polite(&served), polite(&served));
    let mut third = polite(&served);
    eventually("lanes forward", || {
        talk(&mut one, &mut two, (1, 2), 50);
        forwarded(&served) > 0
    });
    third.drain();
    for round in 1..=20 {
        let gone = served.count("out_dropped_gone");
        // Its buffers are taken, then frames wait.
        for number in 0..64 + 40 {
            while one.sending.next.wrapping_sub(one.sending.taken) >= SIZE {
                one.has_sent();
            }
            one.send(&frame(2, 1, number));
        }
        eventually("all are taken", || one.has_sent());
        // Buffers where no memory is, for those that wait.
        while let Some((head, _)) = two.receiving.back(&two.region) {
            two.receiving
                .desc(&two.region, head as u16, (u64::MAX - 4096, 2048, 2, 0));
            two.receiving.offer(&two.region, head as u16);
        }
        two.receiving.kick();
        soon("they are counted as dropped", || {
            served.count("out_dropped_gone") >= gone + 40
        });
        // The switch's own thread looks at that port, too.
        third.send(&frame(0xfe, 3, round));
        eventually("its buffers are usable again", || {
            while let Some((head, _)) = two.receiving.back(&two.region) {
                two.post(head as u16);
            }
            two.receiving.kick();
            one.send(&frame(2, 1, 9999));
            eventually("it is taken", || one.has_sent());
            two.received()
                .is_some_and(|(_, bytes)| bytes == frame(2, 1, 9999))
        });
        two.drain();
        one.drain();
        served.check_sums();
    }
}

//! Frames between guests, super-frames, and chains and headers that make no sense.

use super::*;

#[test]
fn frames_go_between_guests_and_each_is_counted() {
    let served = Served::here();
    for features in [PLAIN, PLAIN | EVENT_IDX, PROTOCOL, PROTOCOL | EVENT_IDX] {
        // Without virtio 1 and mergeable buffers the header has two bytes less: not these guests'.
        let features = features | VERSION_1 | MRG_RXBUF;
        let (mut one, mut two) = (served.guest(features), served.guest(features));
        let mut three = served.guest(PLAIN);
        for number in 0..1000 {
            one.send(&frame(2, 1, number));
            let (header, bytes) = two.next();
            assert_eq!(bytes, frame(2, 1, number));
            assert_eq!(header, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            two.send(&frame(1, 2, number));
            assert_eq!(one.next().1, frame(1, 2, number));
        }
        // Only the first, to a stranger.
        assert_eq!(three.drain(), 1);
        eventually("all came back", || one.has_sent() && two.has_sent());
        let mut calls = [0; 8];
        rustix::io::read(&two.receiving.call, &mut calls).unwrap();
    }
    served.check_sums();
}

#[test]
fn super_frames_are_whole_for_a_guest_that_takes_them_and_cut_and_summed_for_another() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut takes = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let mut sums = served.guest(PLAIN | GUEST_CSUM);
    let mut plain = served.guest(PLAIN);
    let (bytes, offload) = super_frame(0xee, 1, 20_000);
    sender.send_offloaded(&bytes, &offload);
    let (header, whole) = takes.next();
    assert_eq!(whole, bytes);
    let mut expected = offload.to_header(&bytes);
    // The number of buffers of 2,048 bytes.
    expected[10] = 10;
    assert_eq!(header, expected);
    for guest in [&mut sums, &mut plain] {
        let mut payload = Vec::new();
        while payload.len() < 20_000 {
            let (header, cut) = guest.next();
            assert_eq!(header[0] & flags::NEEDS_CSUM, 0);
            assert_eq!(header[1], gso::NONE);
            payload.extend_from_slice(&cut[54..]);
        }
        assert_eq!(payload, bytes[54..]);
    }
    // A missing sum alone.
    let (bytes, offload) = super_frame(0xee, 1, 100);
    let partial = Offload {
        gso_type: gso::NONE,
        gso_size: 0,
        ..offload
    };
    sender.send_offloaded(&bytes, &partial);
    assert_eq!(takes.next().1, bytes);
    let (header, left) = sums.next();
    assert_eq!((header[0], &left), (flags::NEEDS_CSUM, &bytes));
    let (header, summed) = plain.next();
    assert_eq!(header[0], 0);
    assert_ne!(summed[50..52], bytes[50..52]);
    served.check_sums();
}

#[test]
fn headers_that_lie_cost_the_frame_and_not_the_port_v8_v10() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let (bytes, good) = super_frame(0xee, 1, 4000);
    let lies = [
        Offload {
            csum_start: 0xffff,
            ..good
        },
        Offload {
            csum_offset: 0xffff,
            ..good
        },
        Offload {
            csum_start: 33,
            ..good
        },
        Offload {
            gso_size: 0,
            ..good
        },
        Offload {
            gso_type: 2,
            ..good
        },
        Offload {
            gso_type: 0x85,
            ..good
        },
        Offload {
            gso_type: gso::TCPV6,
            ..good
        },
        Offload {
            gso_type: gso::UDP_L4,
            ..good
        },
        Offload {
            gso_type: 0,
            csum_start: 4100,
            ..good
        },
        Offload {
            gso_type: 0,
            csum_start: 4053,
            csum_offset: 0,
            ..good
        },
    ];
    for lie in &lies {
        sender.send_offloaded(&bytes, lie);
    }
    // On no TCP at all.
    sender.send_offloaded(&frame(2, 1, 0), &good);
    sender.send(&frame(0xee, 1, 7));
    assert_eq!(other.next().1, frame(0xee, 1, 7));
    assert_eq!(served.count("in_dropped_offload"), lies.len() as u64 + 1);
    served.check_sums();
}

#[test]
fn datagrams_that_linux_does_not_take_as_one_are_cut_for_a_guest() {
    let served = Served::here();
    let takes = PLAIN | GUEST_CSUM | GUEST_TSO4 | GUEST_USO;
    let (mut sender, mut other) = (served.guest(takes), served.guest(takes));
    (sender.is_polite, other.is_polite) = (true, true);
    // Where both are, so that a lane may forward.
    for (from, to) in [(1, 2), (2, 1), (1, 2)] {
        let (one, two) = match from {
            1 => (&mut sender, &mut other),
            _ => (&mut other, &mut sender),
        };
        one.send(&frame(to, from, 0));
        assert_eq!(two.next().1, frame(to, from, 0));
    }
    for round in 0..30 {
        let way = ["to one", "to all"][round % 2];
        let to = if round % 2 == 0 { 2 } else { 0xff };
        if round % 10 == 0 {
            // A port that sent to all is lent again in a while.
            let before = served.count("lane_forwarded");
            eventually("a lane forwards", || {
                sender.send(&frame(2, 1, 0));
                assert_eq!(other.next().1, frame(2, 1, 0));
                served.count("lane_forwarded") > before
            });
        }
        for (count, pieces) in [(64, 1), (65, 65), (1, 1), (200, 200)] {
            let (mut bytes, offload) = datagrams(count);
            bytes[5] = to;
            if to == 0xff {
                bytes[..5].fill(0xff);
            }
            sender.send_offloaded(&bytes, &offload);
            let mut payload = Vec::new();
            for _ in 0..pieces {
                let (header, given) = other.next();
                let is_whole = pieces == 1;
                assert_eq!(header[1] == gso::UDP_L4, is_whole, "{count} {way}");
                payload.extend_from_slice(&given[42..]);
            }
            assert_eq!(payload, bytes[42..], "{count} {way}");
        }
        // Segments of TCP may be as many as they like.
        let (bytes, mut offload) = super_frame(2, 1, 20_000);
        offload.gso_size = 100;
        sender.send_offloaded(&bytes, &offload);
        assert_eq!(other.next().1, bytes);
        eventually("all came back", || sender.has_sent());
    }
    served.check_sums();
}

/// A super-frame of `count` datagrams of 100 bytes from station 1, and what is left to do.
fn datagrams(count: usize) -> (Vec<u8>, Offload) {
    let carries = (8 + count * 100) as u16;
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0];
    frame.extend((20 + carries).to_be_bytes());
    frame.extend([0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 3, 1, 10, 0, 3, 2]);
    frame.extend([0x1b, 0x58, 0x1b, 0x59]);
    frame.extend(carries.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend((0..count * 100).map(|at| (at / 100) as u8));
    let offload = Offload {
        flags: flags::NEEDS_CSUM,
        gso_type: gso::UDP_L4,
        gso_size: 100,
        csum_start: 34,
        csum_offset: 6,
    };
    (frame, offload)
}

#[test]
fn a_header_is_fetched_once_v9_v13() {
    let served = Served::here();
    let mut sender = served.guest(PLAIN);
    let mut other = served.guest(PLAIN | GUEST_CSUM | GUEST_TSO4);
    let (bytes, good) = super_frame(0xee, 1, 100);
    let partial = Offload {
        gso_type: gso::NONE,
        ..good
    };
    let stop = AtomicBool::new(false);
    let region = sender.region.clone();
    std::thread::scope(|scope| {
        // csum_start of all of the sender's buffers, to and fro.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for at in 0..u64::from(SIZE) {
                    for start in [0xfff0_u16, 34] {
                        region.store_u16(0x20_0006 + 0x8000 * at, start, Ordering::Relaxed);
                    }
                }
            }
        });
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            sender.send_offloaded(&bytes, &partial);
            eventually("it is taken", || sender.has_sent());
            while let Some((header, _)) = other.received() {
                assert_eq!(header[6..8], 34_u16.to_le_bytes());
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    served.check_alive();
}

/// Another thread changes the receiver and the payload of frames that are sent, all the time.
#[test]
fn a_frame_that_changes_while_it_is_taken_goes_where_its_copy_says() {
    let count = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000_000,
        None => 100_000,
    };
    for served in [Served::here(), Served::alone()] {
        let mut sender = served.guest(PLAIN);
        sender.is_polite = true;
        let mut others = [2, 3].map(|number| (number, served.guest(PLAIN)));
        for (number, other) in &mut others {
            other.is_polite = true;
            other.send(&frame(1, *number, 0));
            assert_eq!(sender.next().1, frame(1, *number, 0));
        }
        for (_, other) in &mut others {
            other.drain();
        }
        let mut bytes = frame(2, 1, 0);
        bytes.resize(800, 2);
        let stop = AtomicBool::new(false);
        let region = sender.region.clone();
        let receiver_at = |at: u64| 0x20_0000 + 0x8000 * at + 12 + 4;
        // Frames that came, that say another thing at their ends, and places where a second look into the guest, after
        // a batch was taken, found another receiver.
        let (mut came, mut mixed, mut changed) = ([0; 2], 0, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    for number in [3, 2] {
                        for from_end in [4, 798] {
                            for at in 0..u64::from(SIZE) {
                                let place = receiver_at(at) - 4 + from_end;
                                let says = u16::from_le_bytes([0, number]);
                                region.store_u16(place, says, Ordering::Relaxed);
                            }
                        }
                    }
                }
            });
            let (mut sent, end) = (0, Instant::now() + Duration::from_secs(20));
            // The other thread may have less of the processors than these.
            let is_done = |came: &[i32; 2], mixed: i32, changed: usize| {
                came.iter().all(|it| *it > 100) && mixed > 0 && changed > 0
            };
            while sent < count / 2 || !is_done(&came, mixed, changed) && Instant::now() < end {
                sender.send_together(32, &bytes, &Offload::default());
                sent += 32;
                eventually("it is taken, and all came", || {
                    for (at, (number, other)) in others.iter_mut().enumerate() {
                        while let Some((_, given)) = other.received() {
                            assert_eq!(given[5], *number, "{given:02x?}");
                            mixed += i32::from(given[799] != *number);
                            came[at] += 1;
                        }
                    }
                    sender.has_sent()
                });
                let looks = (0..u64::from(SIZE))
                    .map(|at| region.load_u16(receiver_at(at), Ordering::Relaxed));
                changed += looks.filter(|says| says.to_le_bytes()[1] != 2).count();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let all = "frames that were changed: to 2 and 3, of two minds, and that had changed at a second look";
        println!("{all}: {came:?}, {mixed}, {changed}");
        // The control: they did change, before they were taken and meanwhile.
        assert!(came.iter().all(|it| *it > 100), "{all}: {came:?}");
        assert!(mixed > 0 && changed > 0, "{all}: {mixed} {changed}");
        served.check_alive();
    }
}

#[test]
fn chains_of_no_sense_are_given_back_and_counted_v6_v7() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let region = sender.region.clone();
    let buffer = 0x20_0000;
    region.write(buffer, &[0; 12]);
    region.write(buffer + 12, &frame(0xee, 1, 5));
    // Nothing but (a part of) a header, nothing at all, outside, around the end, a loop, one to be written.
    let bad: [(u64, u32, u16, u16); 9] = [
        (buffer, 12, 0, 0),
        (buffer, 11, 0, 0),
        (buffer, 0, 0, 0),
        (LEN, 72, 0, 0),
        (LEN - 71, 72, 0, 0),
        (u64::MAX - 10, 72, 0, 0),
        (buffer, 72, 1, 0),
        (buffer, 72, 1, SIZE),
        (buffer, 72, 2, 0),
    ];
    for it in bad {
        sender.sending.desc(&region, 0, it);
        sender.sending.offer(&region, 0);
        sender.sending.kick();
        eventually("it comes back", || sender.has_sent());
    }
    // Longer than any frame may be.
    sender.sending.desc(&region, 0, (buffer, 0x11_0000, 0, 0));
    sender.sending.offer(&region, 0);
    sender.sending.kick();
    eventually("it comes back", || sender.has_sent());
    assert_eq!(served.count("in_dropped_chain"), bad.len() as u64);
    assert_eq!(served.count("in_dropped_long"), 1);
    // The header in pieces of five bytes, and some of none.
    for at in 0..15_u16 {
        let len = if at % 3 == 2 { 0 } else { 5 };
        let begin = buffer + 5 * u64::from(at - at / 3);
        let next = if at < 14 { 1 } else { 0 };
        let it = match at {
            14 => (buffer + 50, 22, 0, 0),
            _ => (begin, len, next, at + 1),
        };
        sender.sending.desc(&region, at, it);
    }
    sender.sending.offer(&region, 0);
    sender.sending.kick();
    assert_eq!(other.next().1, frame(0xee, 1, 5));
    // Buffers to receive in that make no sense: the frame is lost, and the next one comes.
    let full = served.count("out_dropped_full");
    for (number, it) in [
        (LEN, 2048, 2, 0),
        (0x10_0000, 2048, 0, 0),
        (0x10_0000, 0, 2, 0),
        (0x10_0000, 2048, 3, SIZE),
        (u64::MAX - 3, 2048, 2, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let head = other.receiving.taken % SIZE;
        let its_region = other.region.clone();
        other.receiving.desc(&its_region, head, it);
        sender.send(&frame(0xee, 1, 100));
        let mut back = None;
        eventually("it comes back", || {
            back = other.receiving.back(&its_region);
            back.is_some()
        });
        assert_eq!(back, Some((head.into(), 0)), "{it:x?}");
        other.post(head);
        sender.send(&frame(0xee, 1, 200));
        assert_eq!(other.next().1, frame(0xee, 1, 200));
        assert_eq!(served.count("out_dropped_full"), full + 1 + number as u64);
    }
    served.check_alive();
}

#[test]
fn a_ring_without_sense_stops_and_can_be_started_again_v12() {
    let served = Served::here();
    let (mut sender, mut other) = (served.guest(PLAIN), served.guest(PLAIN));
    let region = sender.region.clone();
    for broken in [true, false] {
        match broken {
            // Far ahead.
            true => region.store_u16(sender.sending.at + 0x1002, 0x4000, Ordering::Release),
            // A head that there is not.
            false => sender.sending.offer(&region, SIZE),
        }
        sender.sending.kick();
        served.count("entered");
        assert_eq!(sender.front.stop(1), 0);
        // As a guest that boots again.
        sender.sending.next = 0;
        sender.sending.taken = 0;
        region.write(sender.sending.at, &[0; 0x3000]);
        assert!(sender.front.start(&sender.sending));
        sender.send(&frame(0xee, 1, 9));
        assert_eq!(other.next().1, frame(0xee, 1, 9));
        eventually("it is back", || sender.has_sent());
        sender.front.stop(1);
        sender.sending.next = 0;
        sender.sending.taken = 0;
        region.write(sender.sending.at, &[0; 0x3000]);
        assert!(sender.front.start(&sender.sending));
    }
    served.check_sums();
}

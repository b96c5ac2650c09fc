use super::*;

const RUN: u32 = 0xfeed_0001;

fn shapes() -> Vec<Shape> {
    let mut shapes = Vec::new();
    for protocol in Protocol::ALL {
        for vlan_tci in [None, Some(0x6064)] {
            let mut shape = Shape {
                len_bytes: 0,
                flow: 0x0103_0507,
                protocol,
                vlan_tci,
            };
            let min = shape.min_bytes();
            for len_bytes in [min, min + 1, 127, 1000, 1514, 9000, 65_535] {
                shape.len_bytes = len_bytes;
                shapes.push(shape);
            }
        }
    }
    shapes
}

fn udp(seq: u64) -> Vec<u8> {
    let shape = Shape {
        len_bytes: 60,
        flow: 1,
        protocol: Protocol::Udp4,
        vlan_tci: None,
    };
    make(shape, RUN, seq).unwrap()
}

fn fed(view: View, seqs: &[u64]) -> Report {
    let mut checker = Checker::new(view);
    for seq in seqs {
        checker.feed(&udp(*seq));
    }
    checker.report(RUN).unwrap()
}

/// The Internet checksum of words and an odd last byte, straight from RFC 1071.
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0u32;
    for part in parts {
        for pair in part.chunks(2) {
            sum += u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |low| u32::from(*low));
            sum = (sum & 0xffff) + (sum >> 16);
        }
    }
    !(sum as u16)
}

#[test]
fn every_shape_carries_its_run_and_sequence() {
    for shape in shapes() {
        // 0x89a8: its complement is the plain magic, where a plain trailer has it.
        for seq in [0, 1, 0x89a8, 0xffff_ffff, 0x0102_0304_0506_0708, u64::MAX] {
            let frame = make(shape, RUN, seq).unwrap();
            assert_eq!(frame.len(), shape.len_bytes);
            assert_eq!(
                parse(&frame),
                Parsed::Witness(Witness { run: RUN, seq }),
                "{shape:?}"
            );
        }
    }
}

#[test]
fn shortest_frame_is_60_bytes_and_shorter_is_refused() {
    assert_eq!(Protocol::Udp4.min_bytes(), 60);
    for protocol in Protocol::ALL {
        let len_bytes = protocol.min_bytes() - 1;
        let shape = Shape {
            len_bytes,
            flow: 0,
            protocol,
            vlan_tci: None,
        };
        assert!(make(shape, RUN, 0).is_err());
        assert!(
            make(
                Shape {
                    len_bytes: usize::MAX,
                    ..shape
                },
                RUN,
                0
            )
            .is_err()
        );
    }
}

#[test]
fn checksums_are_valid_for_every_sequence() {
    for shape in shapes() {
        for seq in [0, 7, u64::MAX / 3] {
            let frame = make(shape, RUN, seq).unwrap();
            let packet = &frame[if shape.vlan_tci.is_some() { 18 } else { 14 }..];
            let v6 = packet[0] >> 4 == 6;
            let (header, segment) = packet.split_at(if v6 { 40 } else { 20 });
            let (number, addresses) = if v6 {
                (header[6], &header[8..40])
            } else {
                assert_eq!(checksum(&[header]), 0, "IPv4 header of {shape:?}");
                (header[9], &header[12..20])
            };
            if shape.protocol == Protocol::Udp4 {
                assert_eq!(segment[6..8], [0, 0]);
                continue;
            }
            let len = (segment.len() as u32).to_be_bytes();
            let pseudo = [addresses, &len, &[0, number]];
            let [a, b, c] = if shape.protocol == Protocol::Icmp4 {
                [&[][..]; 3]
            } else {
                pseudo
            };
            assert_eq!(checksum(&[a, b, c, segment]), 0, "{shape:?} seq {seq}");
        }
    }
}

#[test]
fn any_flipped_bit_is_corrupt() {
    for protocol in Protocol::ALL {
        let shape = Shape {
            len_bytes: 110,
            flow: 9,
            protocol,
            vlan_tci: Some(5),
        };
        let good = make(shape, RUN, 42).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse(&bad), Parsed::Corrupt, "{protocol:?} bit {bit}");
        }
    }
}

#[test]
fn a_cut_frame_is_corrupt_and_a_strange_one_foreign() {
    let good = udp(3);
    for len in 0..good.len() {
        let expected = if len < 6 {
            Parsed::Foreign
        } else {
            Parsed::Corrupt
        };
        assert_eq!(parse(&good[..len]), expected, "cut to {len}");
    }
    assert_eq!(parse(&[0; 64]), Parsed::Foreign);
    assert_eq!(parse(&[0xff; 1514]), Parsed::Foreign);
}

#[test]
fn a_strangers_bytes_that_look_like_a_trailer_are_a_strangers() {
    for (magic, from_end) in [(b"vW", 18), (b"vB", 30)] {
        let mut frame = [7; 1514];
        frame[1514 - from_end..][..2].copy_from_slice(magic);
        assert_eq!(parse(&frame), Parsed::Foreign);
    }
}

#[test]
fn in_order_and_complete_is_perfect() {
    let mut checker = Checker::new(View::Whole);
    checker.expect(RUN, 0..200_000);
    for seq in 0..200_000 {
        checker.feed(&udp(seq));
    }
    assert!(checker.is_perfect(), "{:?}", checker.report(RUN));
    assert_eq!(
        checker.set(RUN).unwrap().ranges().first(),
        Some(&(0..200_000))
    );
}

#[test]
fn loss_duplicates_and_disorder_are_counted_exactly() {
    let report = fed(View::Whole, &[5, 6, 9, 8, 8, 12, 5, 11]);
    assert_eq!(
        (report.received, report.duplicates, report.reordered),
        (8, 2, 2)
    );
    assert_eq!(
        report.missing,
        Gaps {
            count: 2,
            first: vec![7..8, 10..11]
        }
    );
    assert_eq!((report.first, report.last), (5, 12));
    assert!(!report.is_perfect());
}

#[test]
fn expected_range_shows_loss_at_both_ends() {
    let mut checker = Checker::new(View::Whole);
    checker.expect(RUN, 0..10);
    assert_eq!(checker.report(RUN).unwrap().missing.count, 10);
    for seq in [2, 3, 4] {
        checker.feed(&udp(seq));
    }
    let report = checker.report(RUN).unwrap();
    assert_eq!(
        report.missing,
        Gaps {
            count: 7,
            first: vec![0..2, 5..10]
        }
    );
    checker.feed(&udp(10));
    assert_eq!(checker.report(RUN).unwrap().unexpected, 1);
}

#[test]
fn part_view_reports_no_gaps_but_the_members_together_do() {
    let evens: Vec<u64> = (0..100).map(|n| n * 2).collect();
    let odds: Vec<u64> = (0..100).map(|n| n * 2 + 1).filter(|n| *n != 77).collect();
    assert!(fed(View::Part, &evens).is_perfect());
    let mut members = [Checker::new(View::Part), Checker::new(View::Part)];
    for (checker, seqs) in members.iter_mut().zip([&evens, &odds]) {
        for seq in seqs {
            checker.feed(&udp(*seq));
        }
    }
    let mut all = members[0].set(RUN).unwrap().clone();
    assert_eq!(all.merge(members[1].set(RUN).unwrap()), 0);
    let gaps = all.gaps(0..200);
    assert_eq!((gaps.count, gaps.first.first()), (1, Some(&(77..78))));
    assert_eq!(all.merge(members[0].set(RUN).unwrap()), 100);
}

#[test]
fn runs_are_kept_apart_and_bounded() {
    let mut checker = Checker::new(View::Whole);
    let shape = Shape {
        len_bytes: 60,
        flow: 1,
        protocol: Protocol::Udp4,
        vlan_tci: None,
    };
    for run in 0..MAX_RUNS as u32 + 3 {
        checker.feed(&make(shape, run, 0).unwrap());
    }
    checker.feed(&[0; 60]);
    assert_eq!(checker.runs().count(), MAX_RUNS);
    assert_eq!((checker.foreign(), checker.corrupt()), (4, 0));
}

#[test]
fn scattered_sequences_stay_within_memory_and_are_never_guessed() {
    let mut set = SeqSet::new();
    for n in 0..100 {
        assert_eq!(set.insert(n * 1_000_000), Inserted::New);
    }
    assert_eq!(set.insert(0), Inserted::Forgotten);
    assert_eq!(set.insert(99_000_000), Inserted::Known);
    assert_eq!(set.len(), 100);
    assert_eq!(set.known(), set.ranges().len() as u64);
    assert!(set.known() < 12 && set.floor() > 80_000_000);
    assert_eq!(set.insert(u64::MAX), Inserted::New);
    assert_eq!(set.contains(u64::MAX), Some(true));
    assert_eq!(set.contains(0), None);
}

/// Against a plain `BTreeSet`, with ranges long enough to fill chunks, in a seeded random order.
#[test]
fn set_agrees_with_a_plain_set() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let (mut set, mut other) = (SeqSet::new(), SeqSet::new());
    let mut plain = std::collections::BTreeSet::new();
    for _ in 0..40 {
        let start = random() % 300_000;
        let len = random() % 40_000;
        let target = if random() % 2 == 0 {
            &mut set
        } else {
            &mut other
        };
        for seq in start..start + len {
            target.insert(seq);
            plain.insert(seq);
        }
    }
    let both = set.len() + other.len();
    assert_eq!(both - set.merge(&other), plain.len() as u64);
    assert_eq!(
        (set.len(), set.known()),
        (plain.len() as u64, plain.len() as u64)
    );
    let listed: Vec<u64> = set.ranges().into_iter().flatten().collect();
    assert_eq!(listed, plain.iter().copied().collect::<Vec<_>>());
    let missing = (0..350_000).filter(|seq| !plain.contains(seq)).count();
    assert_eq!(set.gaps(0..350_000).count, missing as u64);
}

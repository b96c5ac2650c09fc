//! Frames that must merge, and frames that must not, one condition at a time.

use super::*;

/// The segment after [`PLAIN`].
const NEXT: Recipe = Recipe {
    id: 101,
    seq: 1100,
    fill: 100,
    ..PLAIN
};

fn pair(first: &Recipe, second: &Recipe) -> Vec<usize> {
    let frames = [first, second].map(|it| (frame(it), None));
    shape(&merged(44, &frames).0)
}

fn six(recipe: Recipe) -> Recipe {
    Recipe {
        is_ipv6: true,
        ..recipe
    }
}

#[test]
fn segments_that_follow_each_other_merge() {
    let with = |change: fn(&mut Recipe)| {
        let (mut first, mut second) = (PLAIN, NEXT);
        change(&mut first);
        change(&mut second);
        [(first, second), (six(first), six(second))]
    };
    let changes: [fn(&mut Recipe); 10] = [
        |_| {},
        |it| it.stamp = 0,
        |it| it.tags = 2,
        |it| it.tos = 0x02,
        |it| it.fragment = 0,
        |it| it.flags |= flag::ECE,
        |it| it.reserved = 1,
        |it| it.window = 0,
        |it| it.urgent = 7,
        |it| it.seq = it.seq.wrapping_sub(1050),
    ];
    for (nth, change) in changes.into_iter().enumerate() {
        for (first, second) in with(change) {
            assert_eq!(pair(&first, &second), [2], "{nth} {first:?}");
        }
    }
    // The last one may be shorter, push, and be the end of the flow.
    for (flags, len) in [(flag::PSH, 100), (flag::FIN, 100), (0, 1), (ENDS, 99)] {
        let mut last = NEXT;
        (last.flags, last.len) = (last.flags | flags, len);
        assert_eq!(pair(&PLAIN, &last), [2]);
    }
}

#[test]
fn what_differs_in_one_thing_does_not_merge() {
    let changes: [Change; 25] = [
        ("address", |it| it.source = 2),
        ("source port", |it| it.ports ^= 1 << 16),
        ("destination port", |it| it.ports ^= 1),
        ("VLAN", |it| (it.tags, it.tci) = (1, 6)),
        ("no tag", |it| it.tags = 0),
        ("TTL", |it| it.ttl = 63),
        ("TOS", |it| it.tos = 0x10),
        ("congestion", |it| it.tos = 0x03),
        ("a hole", |it| it.seq += 1),
        ("the same again", |it| it.seq -= 100),
        ("one byte again, as keep-alives", |it| it.seq -= 1),
        ("ACK number", |it| it.ack += 1),
        ("window", |it| it.window += 1),
        ("zero window", |it| it.window = 0),
        ("urgent pointer", |it| it.urgent = 1),
        ("reserved bits", |it| it.reserved = 2),
        ("accurate ECN", |it| it.reserved = 1),
        ("SYN", |it| it.flags |= flag::SYN),
        ("RST", |it| it.flags |= flag::RST),
        ("URG", |it| it.flags |= flag::URG),
        ("ECE", |it| it.flags |= flag::ECE),
        ("CWR", |it| it.flags |= flag::CWR),
        ("timestamp", |it| it.stamp += 1),
        ("no timestamp", |it| it.stamp = 0),
        ("longer", |it| it.len = 101),
    ];
    for (what, change) in changes {
        for is_ipv6 in [false, true] {
            let (mut first, mut second) = (PLAIN, NEXT);
            (first.is_ipv6, second.is_ipv6) = (is_ipv6, is_ipv6);
            if what.contains("VLAN") || what == "no tag" {
                (first.tags, second.tags) = (1, 1);
            }
            change(&mut second);
            assert_eq!(pair(&first, &second), [1, 1], "{what} {is_ipv6}");
        }
    }
    let of_ipv4: [Change; 6] = [
        ("the same identification", |it| it.id -= 1),
        ("another identification", |it| it.id += 1),
        ("DF", |it| it.fragment = 0),
        ("a reserved bit", |it| it.fragment = 0xc000),
        ("first fragment", |it| it.fragment = 0x2000),
        ("later fragment", |it| it.fragment = 0x0001),
    ];
    for (what, change) in of_ipv4 {
        let mut second = NEXT;
        change(&mut second);
        assert_eq!(pair(&PLAIN, &second), [1, 1], "{what}");
    }
    // Another Ethernet address.
    for at in 0..12 {
        let mut frames = [PLAIN, NEXT].map(|it| (frame(&it), None));
        frames[1].0[at] ^= 4;
        assert_eq!(shape(&merged(44, &frames).0), [1, 1]);
    }
    // Another flow label.
    let mut frames = [PLAIN, NEXT].map(|it| (frame(&six(it)), None));
    frames[1].0[17] ^= 1;
    assert_eq!(shape(&merged(44, &frames).0), [1, 1]);
}

#[test]
fn what_both_have_may_forbid_it() {
    let both = |change: fn(&mut Recipe)| {
        let (mut first, mut second) = (PLAIN, NEXT);
        change(&mut first);
        change(&mut second);
        second.seq = first.seq.wrapping_add(first.len as u32);
        [pair(&first, &second), pair(&six(first), &six(second))]
    };
    let changes: [Change; 12] = [
        ("no payload", |it| it.len = 0),
        ("no ACK", |it| it.flags = 0),
        ("PSH", |it| it.flags |= flag::PSH),
        ("FIN", |it| it.flags |= flag::FIN),
        ("SYN", |it| it.flags |= flag::SYN),
        ("RST", |it| it.flags |= flag::RST),
        ("URG", |it| it.flags |= flag::URG),
        ("CWR", |it| it.flags |= flag::CWR),
        ("SACK", |it| {
            it.options = &[1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2]
        }),
        ("an unknown option", |it| it.options = &[1, 1, 254, 2]),
        ("two timestamps", |it| {
            it.options = &[1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
        }),
        ("MSS", |it| it.options = &[2, 4, 5, 0xb4]),
    ];
    for (what, change) in changes {
        assert_eq!(both(change), [[1, 1], [1, 1]], "{what}");
    }
}

/// Changes the bytes of the second frame, and sums it again where that matters.
fn spoilt(is_ipv6: bool, change: impl Fn(&mut Vec<u8>)) -> Vec<usize> {
    let recipes = [PLAIN, NEXT].map(|it| Recipe { is_ipv6, ..it });
    let mut frames = recipes.map(|it| (frame(&it), None));
    change(&mut frames[1].0);
    shape(&merged(44, &frames).0)
}

#[test]
fn a_wrong_checksum_or_length_forbids_it() {
    for is_ipv6 in [false, true] {
        let at = if is_ipv6 { 54 } else { 34 };
        assert_eq!(spoilt(is_ipv6, |_| {}), [2]);
        assert_eq!(spoilt(is_ipv6, |it| it[at + 16] ^= 1), [1, 1]);
        assert_eq!(spoilt(is_ipv6, |it| *it.last_mut().unwrap() ^= 1), [1, 1]);
        // Padding, as of Ethernet; a frame that was cut short.
        assert_eq!(spoilt(is_ipv6, |it| it.push(0)), [1, 1]);
        assert_eq!(spoilt(is_ipv6, |it| it.truncate(it.len() - 1)), [1, 1]);
        // A header that is longer than the frame.
        assert_eq!(spoilt(is_ipv6, |it| it[at + 12] = 0xf0), [1, 1]);
        assert_eq!(spoilt(is_ipv6, |it| it[at + 12] = 0x40), [1, 1]);
        assert_eq!(spoilt(is_ipv6, |it| it.truncate(at + 10)), [1, 1]);
        assert_eq!(spoilt(is_ipv6, |it| it.truncate(20)), [1, 1]);
    }
    // The IP header's sum, IP options, another version; IPv6 extension headers.
    assert_eq!(spoilt(false, |it| it[24] ^= 1), [1, 1]);
    assert_eq!(spoilt(false, |it| it[14] = 0x46), [1, 1]);
    assert_eq!(spoilt(false, |it| it[14] = 0x55), [1, 1]);
    for next in [0, 43, 44, 51, 60, 135] {
        assert_eq!(spoilt(true, |it| it[20] = next), [1, 1]);
    }
    // The first one's, found out when the second comes.
    let mut frames = [PLAIN, NEXT, NEXT].map(|it| (frame(&it), None));
    let third = Recipe {
        id: 102,
        seq: 1200,
        ..NEXT
    };
    frames[0].0[50] ^= 1;
    frames[2].0 = frame(&third);
    assert_eq!(shape(&merged(44, &frames).0), [1, 2]);
}

#[test]
fn what_is_left_to_do_is_the_checksum_of_tcp_or_nothing() {
    let left = |change: fn(&mut Vec<u8>, &mut Offload)| {
        let frames = [PLAIN, NEXT].map(|it| {
            let mut frame = frame(&it);
            let mut offload = leave(&mut frame, &it);
            change(&mut frame, &mut offload);
            (frame, Some(offload))
        });
        shape(&merged(44, &frames).0)
    };
    assert_eq!(left(|_, _| {}), [2]);
    // The payload is nobody's business: its sender sums it, or the guest that has it.
    assert_eq!(left(|frame, _| *frame.last_mut().unwrap() ^= 1), [2]);
    assert_eq!(left(|frame, _| frame[34 + 16] ^= 1), [1, 1]);
    assert_eq!(left(|_, offload| offload.csum_start += 1), [1, 1]);
    assert_eq!(left(|_, offload| offload.csum_offset = 6), [1, 1]);
    assert_eq!(
        left(|_, offload| (offload.gso_type, offload.gso_size) = (gso::TCPV4, 50)),
        [1, 1]
    );
}

/// Segments of a flow, `len` bytes each, numbered from 0.
fn stream(count: usize, len: usize) -> Vec<(Vec<u8>, Option<Offload>)> {
    let recipe = |nth: usize| Recipe {
        id: nth as u16,
        seq: (nth * len) as u32,
        len,
        ..PLAIN
    };
    (0..count).map(|nth| (frame(&recipe(nth)), None)).collect()
}

#[test]
fn the_limit_is_kept_and_64_kib_too() {
    for limit in [1, 2, 20, 44] {
        let shape = shape(&merged(limit, &stream(90, 100)).0);
        assert_eq!(shape.iter().sum::<usize>(), 90);
        assert!(shape[..shape.len() - 1].iter().all(|it| *it == limit));
    }
    // As many as fit into 65,535 bytes with all headers: 66 bytes.
    for (len, fits) in [(1448, 44), (8948, 7), (32_734, 2), (32_735, 1)] {
        let (aggregator, _) = merged(44, &stream(44, len));
        assert_eq!(shape(&aggregator)[0], fits, "{len}");
    }
}

#[test]
fn what_is_for_many_is_not_merged() {
    let mut frames = stream(4, 100);
    frames.iter_mut().for_each(|(frame, _)| frame[0] |= 1);
    assert_eq!(shape(&merged(44, &frames).0), [1; 4]);
}

#[test]
fn nothing_overtakes_a_frame_of_its_flow() {
    let mut frames = stream(6, 100);
    let other = Recipe { source: 7, ..PLAIN };
    let of = |change: fn(&mut Recipe)| {
        let mut it = PLAIN;
        (it.id, it.seq, it.len) = (200, 300, 0);
        change(&mut it);
        (frame(&it), None)
    };
    let arp = (vec![0xff; 60], None);
    // A pure ACK, a keep-alive, a RST of the same flow.
    for own in [
        of(|_| {}),
        of(|it| (it.seq, it.len) = (299, 1)),
        of(|it| it.flags |= flag::RST),
    ] {
        frames.insert(3, own);
        assert_eq!(shape(&merged(44, &frames).0), [3, 1, 3]);
        frames.remove(3);
    }
    // Others' frames do not matter; one that may be anybody's does.
    for (foreign, expected) in [
        ((frame(&other), None), vec![6, 1]),
        (arp, vec![6, 1]),
        (
            of(|it| (it.source, it.fragment) = (7, 0x2000)),
            vec![3, 1, 3],
        ),
    ] {
        frames.insert(3, foreign);
        assert_eq!(shape(&merged(44, &frames).0), expected);
        frames.remove(3);
    }
}

#[test]
fn any_number_of_flows_is_bounded_and_none_is_lost() {
    let flow = |nth: usize, round: usize| Recipe {
        ports: nth as u32,
        id: round as u16,
        seq: (round * 100) as u32,
        ..PLAIN
    };
    let mut frames = Vec::new();
    for round in 0..4 {
        frames.extend((0..1000).map(|nth| (frame(&flow(nth, round)), None)));
    }
    let (aggregator, gone) = merged(44, &frames);
    let shape = shape(&aggregator);
    assert_eq!(shape.len() + gone, frames.len());
    assert!(aggregator.open.len() == FLOWS);
    // As many as there are places merge.
    frames.retain(|(frame, _)| frame[37] < 16 && frame[36] == 0);
    let few = self::shape(&merged(44, &frames).0);
    assert!(few.iter().filter(|it| **it == 4).count() >= 12, "{few:?}");
}

#[test]
fn what_the_far_end_does_not_take_is_not_merged() {
    let frames = |is_ipv6| [PLAIN, NEXT].map(|it| (frame(&Recipe { is_ipv6, ..it }), None));
    for (ipv4, ipv6) in [(true, false), (false, true)] {
        let limits = Limits {
            segments: 44,
            ipv4,
            ipv6,
        };
        for is_ipv6 in [false, true] {
            let frames = frames(is_ipv6);
            let mut aggregator = Aggregator::default();
            let gone = aggregator.run(&limits, 2, |at| single(&frames[at], 0));
            assert_eq!(gone == 1, ipv6 == is_ipv6);
        }
    }
    // A part of it is elsewhere.
    let frames = frames(false);
    let mut aggregator = Aggregator::default();
    let gone = aggregator.run(&all(44), 2, |at| {
        let (head, _) = frames[at].0.split_at(120);
        Single {
            head,
            body: &[],
            missing: frames[at].0.len() - 120,
            offload: None,
            is_valid: false,
        }
    });
    assert_eq!(gone, 0);
}

use super::samples::{
    PLAIN, Recipe, any, dice, folded, frame, leave_sum, offload, pseudo_addresses,
};
use super::*;
use crate::witness::seed;

mod captures;

/// The packets that a frame becomes, whole.
fn packets(frame: &[u8], wire_len: u32, offload: &Offload) -> Vec<Vec<u8>> {
    let work = work(frame, wire_len, offload).unwrap().unwrap();
    let mut pieces = Pieces::default();
    let range = pieces.make(frame, wire_len, &work);
    let pieces = range.map(|at| {
        let piece = pieces.get(at, frame);
        assert!(piece.is_summed);
        let packet = [piece.head, piece.body].concat();
        assert_eq!(packet.len(), piece.wire_len as usize);
        packet
    });
    pieces.collect()
}

/// That both checksums of a packet are right: with them, all sums are ones.
fn check_sums(packet: &[u8], recipe: &Recipe, network: usize, transport: usize) {
    let (ip, carried) = (&packet[network..], &packet[transport..]);
    if !recipe.is_ipv6 {
        assert_eq!(folded(&[&ip[..transport - network]]), 0xffff);
    }
    let addresses = pseudo_addresses(packet, recipe);
    let protocol = if recipe.is_udp { 17 } else { 6 };
    let length = (carried.len() as u32).to_be_bytes();
    let sums = folded(&[&addresses, &length, &[0, protocol], carried]);
    assert_eq!(sums, 0xffff, "{recipe:?}");
}

fn half(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([bytes[at], bytes[at + 1]]))
}

#[test]
fn every_kind_of_super_frame_is_cut_as_its_headers_say() {
    let mut dice = dice(seed("super-frames"));
    for _ in 0..2000 {
        let (mut recipe, size) = any(&mut dice);
        let is_left = dice(2) == 0;
        // Who makes the whole sum takes the addresses of the IP header.
        recipe.is_routed &= is_left;
        let (mut frame, transport, payload) = frame(&recipe);
        let mut offload = offload(&recipe, transport, size);
        match is_left {
            true => leave_sum(&mut frame, &recipe, transport),
            false => offload.flags = 0,
        }
        let packets = packets(&frame, frame.len() as u32, &offload);
        assert_eq!(packets.len(), recipe.payload.div_ceil(size.into()));
        let work = work(&frame, frame.len() as u32, &offload).unwrap().unwrap();
        let longest = packets.iter().map(Vec::len).max();
        assert_eq!(Some(work.longest()), longest);
        let network = 14 + 4 * recipe.tags;
        let (mut moved, last) = (Vec::<u8>::new(), packets.len() - 1);
        for (nth, packet) in packets.iter().enumerate() {
            check_sums(packet, &recipe, network, transport);
            let (ip, carried) = (&packet[network..], &packet[transport..]);
            assert_eq!(packet[..network], frame[..network]);
            if recipe.is_ipv6 {
                assert_eq!(half(ip, 4), ip.len() - 40);
            } else {
                assert_eq!(half(ip, 2), ip.len());
                assert_eq!(half(ip, 4) as u16, 0xfffe_u16.wrapping_add(nth as u16));
            }
            if recipe.is_udp {
                assert_eq!(half(carried, 4), carried.len());
            } else {
                let sequence = u32::from_be_bytes(*carried[4..].first_chunk().unwrap());
                assert_eq!(sequence, 0xffff_f000_u32.wrapping_add(moved.len() as u32));
                let only_last = if nth == last { 0xff } else { !0x09 };
                assert_eq!(carried[13], recipe.tcp_flags & only_last);
                assert_eq!(
                    carried[20..payload - transport],
                    frame[transport + 20..payload]
                );
            }
            moved.extend(&packet[payload..]);
        }
        assert_eq!(moved, frame[payload..]);
    }
}

#[test]
fn cwr_is_the_first_packets_only_if_the_header_says_so() {
    let recipe = Recipe {
        tcp_flags: 0x90,
        ..PLAIN
    };
    let (frame, transport, _) = frame(&recipe);
    for (ecn, others) in [(0, 0x90), (gso::ECN, 0x10)] {
        let mut offload = offload(&recipe, transport, 1000);
        offload.gso_type |= ecn;
        let packets = packets(&frame, frame.len() as u32, &offload);
        let flags: Vec<u8> = packets
            .iter()
            .map(|packet| packet[transport + 13])
            .collect();
        assert_eq!(flags, [0x90, others, others, others]);
    }
}

#[test]
fn a_checksum_alone_is_filled_and_zero_is_written_as_ones() {
    for is_udp in [false, true] {
        let recipe = Recipe { is_udp, ..PLAIN };
        let (mut frame, transport, _) = frame(&recipe);
        let mut offload = offload(&recipe, transport, 0);
        offload.gso_type = gso::NONE;
        // The sum of the pseudo header, as a sender leaves it.
        let at = transport + usize::from(offload.csum_offset);
        leave_sum(&mut frame, &recipe, transport);
        // The IP header's is never left.
        let of_header = !folded(&[&frame[14..34]]);
        frame[24..26].copy_from_slice(&of_header.to_be_bytes());
        let packets = packets(&frame, frame.len() as u32, &offload);
        assert_eq!(packets.len(), 1);
        check_sums(&packets[0], &recipe, 14, transport);
        assert_eq!(packets[0][at + 2..], frame[at + 2..]);
    }
    let mut ones = [0; 60];
    ones[40..42].fill(0xff);
    let offload = Offload {
        flags: flags::NEEDS_CSUM,
        csum_start: 34,
        csum_offset: 6,
        ..Offload::default()
    };
    assert_eq!(packets(&ones, 60, &offload)[0], ones);
}

#[test]
fn sctps_checksum_is_a_crc() {
    // An SCTP packet with a known sum: INIT-ACK's header alone, summed by the definition.
    let (mut frame, transport, _) = frame(&Recipe {
        payload: 40,
        ..PLAIN
    });
    frame[23] = 132;
    let offload = Offload {
        flags: flags::NEEDS_CSUM,
        csum_start: transport as u16,
        csum_offset: 8,
        ..Offload::default()
    };
    let packet = &packets(&frame, frame.len() as u32, &offload)[0];
    let mut zeroed = frame[transport..].to_vec();
    zeroed[8..12].fill(0);
    let at = transport + 8;
    assert_eq!(packet[at..at + 4], crc32c::crc32c(&zeroed).to_le_bytes());
    // Of another protocol it is two bytes.
    frame[23] = 50;
    let packet = &packets(&frame, frame.len() as u32, &offload)[0];
    assert_eq!(packet[at + 2..], frame[at + 2..]);
}

#[test]
fn more_than_64_datagrams_are_not_for_linux() {
    for (is_udp, is_ipv6, payload, is_for) in [
        (true, false, 6400, true),
        (true, false, 6401, false),
        (true, true, 6400, true),
        (true, true, 6401, false),
        (false, false, 6401, true),
        (false, true, 20_000, true),
    ] {
        let recipe = Recipe {
            is_udp,
            is_ipv6,
            payload,
            tags: payload % 2,
            options: 8,
            ..PLAIN
        };
        let (frame, transport, _) = frame(&recipe);
        let offload = offload(&recipe, transport, 100);
        assert_eq!(is_for_linux(frame.len(), &offload), is_for, "{recipe:?}");
        let work = work(&frame, frame.len() as u32, &offload).unwrap().unwrap();
        assert_eq!(work.is_for_linux(), is_for, "{recipe:?}");
    }
}

#[test]
fn a_frame_that_was_cut_short_is_cut_without_sums() {
    let (frame, transport, payload) = frame(&PLAIN);
    let offload = offload(&PLAIN, transport, 1000);
    let there = &frame[..payload + 1500];
    let plan = work(there, frame.len() as u32, &offload).unwrap().unwrap();
    let mut pieces = Pieces::default();
    let range = pieces.make(there, frame.len() as u32, &plan);
    let seen: Vec<(usize, u32, bool)> = range
        .map(|at| pieces.get(at, there))
        .map(|piece| (piece.body.len(), piece.wire_len, piece.is_summed))
        .collect();
    let wire = payload as u32 + 1000;
    let whole = [(1000, wire, true), (500, wire, false)];
    let cut = [(0, wire, false), (0, wire, false)];
    assert_eq!(seen, [whole, cut].concat());
}

#[test]
fn a_header_that_lies_is_refused() {
    let (frame, transport, _) = frame(&PLAIN);
    let wire_len = frame.len() as u32;
    let good = offload(&PLAIN, transport, 1000);
    let refused = |frame: &[u8], offload: Offload| work(frame, wire_len, &offload).unwrap_err();
    let kind = |gso_type| Offload { gso_type, ..good };
    for unknown in [2, 3, 6, 0x7f, gso::ECN, gso::ECN | gso::UDP_L4] {
        let lie = refused(&frame, kind(unknown));
        assert!(matches!(lie, Lie::Kind(_) | Lie::Headers), "{unknown}");
    }
    for other in [gso::TCPV6, gso::UDP_L4] {
        assert_eq!(refused(&frame, kind(other)), Lie::Headers);
    }
    for size in [0, 1] {
        let small = Offload {
            gso_size: size,
            ..good
        };
        assert_eq!(refused(&frame, small), Lie::Size(size));
    }
    for (start, offset) in [(33, 16), (34, 6), (u16::MAX, 16), (34, u16::MAX)] {
        let mut elsewhere = good;
        (elsewhere.csum_start, elsewhere.csum_offset) = (start, offset);
        assert_eq!(refused(&frame, elsewhere), Lie::Checksum);
        elsewhere.gso_type = gso::NONE;
        let outside = usize::from(start) + usize::from(offset) + 2 > frame.len();
        // Before the header of TCP lies nothing whose checksum is left out.
        let before = usize::from(start) < transport;
        let refused = work(&frame, wire_len, &elsewhere).is_err();
        assert_eq!(refused, outside || before);
    }
    let with = |at: usize, byte: u8| {
        let mut frame = frame.clone();
        frame[at] = byte;
        frame
    };
    // Version, header lengths, fragment, protocol, TCP's header length.
    for (at, byte) in [(14, 0x55), (14, 0x44), (20, 0x20), (23, 17), (46, 0x40)] {
        assert_eq!(
            refused(&with(at, byte), good),
            Lie::Headers,
            "{at} {byte:x}"
        );
    }
    assert_eq!(refused(&with(17, 1), good), Lie::Length);
    // More than the IP header's length can say, in packets that are themselves too long or just not.
    let (mut big, transport, payload) = samples::frame(&PLAIN);
    big.resize(payload + 70_000, 0);
    big[16..18].fill(0);
    for (size, fits) in [(65_535 - 52, true), (65_535 - 51, false), (65_535, false)] {
        let offload = offload(&PLAIN, transport, size);
        let found = work(&big, big.len() as u32, &offload);
        assert_eq!(found.is_ok(), fits, "{size}");
        if fits {
            assert_eq!(packets(&big, big.len() as u32, &offload).len(), 2);
        } else {
            assert_eq!(found, Err(Lie::Size(size)));
        }
    }
    assert_eq!(refused(&frame[..60], good), Lie::Headers);
}

#[test]
fn headers_that_each_packet_would_have_are_bounded() {
    // As many extension headers as are walked through, the longest ones: 32 KiB, and then a byte for each packet.
    let mut frame: Vec<u8> = (1..=12).collect();
    frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
    let len = 16 * 2048 + 20 + 2000;
    frame.extend((len as u16).to_be_bytes());
    frame.extend([60, 64]);
    frame.extend([1; 32]);
    for nth in 0..16 {
        let mut header = [0; 2048];
        (header[0], header[1]) = (if nth < 15 { 60 } else { 6 }, 255);
        frame.extend(header);
    }
    let transport = frame.len();
    frame.extend([0; 12]);
    frame.extend([0x50, 0x18, 4, 0, 0, 0, 0, 0]);
    frame.extend([7; 2000]);
    let bomb = Offload {
        flags: flags::NEEDS_CSUM,
        gso_type: gso::TCPV6,
        gso_size: 1,
        csum_start: transport as u16,
        csum_offset: 16,
    };
    let found = work(&frame, frame.len() as u32, &bomb);
    assert_eq!(found, Err(Lie::Headers), "2,000 packets of 32 KiB");
    // Up to the limit they are what they were.
    for (options, fits) in [(424, true), (432, false)] {
        let recipe = Recipe {
            is_ipv6: true,
            options,
            ..PLAIN
        };
        let (frame, transport, payload) = samples::frame(&recipe);
        assert_eq!(payload <= MAX_HEADERS, fits, "{payload}");
        let found = work(
            &frame,
            frame.len() as u32,
            &offload(&recipe, transport, 1000),
        );
        assert_eq!(found.is_ok(), fits, "{options}");
    }
}

#[test]
fn no_bytes_and_no_header_make_it_panic() {
    let mut dice = dice(seed("lying super-frames"));
    let mut pieces = Pieces::default();
    let (mut done, mut refused) = (0, 0);
    for _ in 0..50_000 {
        let recipe = Recipe {
            is_ipv6: dice(2) == 0,
            is_udp: dice(2) == 0,
            tags: dice(3),
            payload: 200,
            ..PLAIN
        };
        let (mut frame, transport, _) = frame(&recipe);
        let mut offload = offload(&recipe, transport, 1 + dice(300) as u16);
        for _ in 0..dice(3) {
            let at = dice(frame.len());
            frame[at] = dice(256) as u8;
        }
        match dice(8) {
            0 => offload.csum_start = dice(1 << 16) as u16,
            1 => offload.csum_offset = dice(300) as u16,
            2 => offload.gso_type = dice(256) as u8,
            3 => offload.gso_type = 0,
            4 => frame.truncate(dice(300)),
            _ => {}
        }
        let wire_len = (frame.len() + dice(3) * 700) as u32;
        match work(&frame, wire_len, &offload) {
            Ok(Some(work)) => {
                pieces.clear();
                for at in pieces.make(&frame, wire_len, &work) {
                    let piece = pieces.get(at, &frame);
                    assert!(piece.head.len() + piece.body.len() <= piece.wire_len as usize);
                }
                done += 1;
            }
            Ok(None) => {}
            Err(lie) => refused += u32::from(!lie.to_string().is_empty()),
        }
    }
    assert!(done > 5000 && refused > 5000, "{done} {refused}");
}

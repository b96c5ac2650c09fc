//! A capture, or a guest, of which little is true: each frame is left alone, refused, or becomes packets of its own bytes,
//! and is counted as one of these.

use std::collections::BTreeMap;

use super::super::hostile::hostile;
use super::*;

/// Where IP begins, and what it carries, and which protocol that is; written another way than the cutter's.
fn carried(frame: &[u8]) -> Option<(usize, usize, u8)> {
    let byte = |at: usize| frame.get(at).copied();
    let half = |at: usize| Some(u16::from_be_bytes([byte(at)?, byte(at + 1)?]));
    let mut network = 14;
    while matches!(half(network - 2)?, 0x8100 | 0x88a8 | 0x9100) {
        network += 4;
    }
    let version = byte(network)? >> 4;
    match (half(network - 2)?, version) {
        (0x0800, 4) if half(network + 6)? & 0x3fff == 0 => {
            let words = usize::from(byte(network)? & 0xf);
            Some((network, network + 4 * words, byte(network + 9)?))
        }
        (0x86dd, 6) => {
            let (mut protocol, mut at) = (byte(network + 6)?, network + 40);
            loop {
                let len = match protocol {
                    0 | 43 | 60 | 135 | 139 | 140 => 8 + 8 * usize::from(byte(at + 1)?),
                    51 => 8 + 4 * usize::from(byte(at + 1)?),
                    // A fragment that is all there is.
                    44 if half(at + 2)? & 0xfff9 == 0 => 8,
                    44 => return None,
                    _ => return Some((network, at, protocol)),
                };
                (protocol, at) = (byte(at)?, at + len);
            }
        }
        _ => None,
    }
}

/// Fields that a cut may write: from, and how many bytes.
fn written(plan: &Plan) -> Vec<(usize, usize)> {
    let ip: &[(usize, usize)] = if plan.is_ipv6 {
        &[(4, 2)]
    } else {
        &[(2, 4), (10, 2)]
    };
    // UDP's length and sum; TCP's sequence number, flags and sum.
    let carried: &[(usize, usize)] = if plan.is_udp {
        &[(4, 4)]
    } else {
        &[(4, 4), (13, 1), (16, 2)]
    };
    let ip = ip.iter().map(|(at, len)| (plan.network + at, *len));
    let carried = carried.iter().map(|(at, len)| (plan.transport + at, *len));
    ip.chain(carried).collect()
}

/// That packets are TCP or UDP, tell the truth of their length, and have nothing that the frame had not.
fn check_cut(frame: &[u8], wire_len: usize, plan: &Plan, packets: &[Piece<'_>]) {
    let protocol = if plan.is_udp { 17 } else { 6 };
    let found = carried(frame);
    assert_eq!(found, Some((plan.network, plan.transport, protocol)));
    let (mut there, mut on_wire) = (plan.payload, plan.payload);
    for packet in packets {
        let Piece { head, body, .. } = *packet;
        assert_eq!(head.len(), plan.payload);
        let mut own = head.to_vec();
        for (at, len) in written(plan) {
            own[at..at + len].copy_from_slice(&frame[at..at + len]);
        }
        assert!(own == frame[..plan.payload], "{plan:?}");
        assert!(body == &frame[there..there + body.len()], "{plan:?}");
        let said = if plan.is_ipv6 {
            half(head, plan.network + 4) + 40
        } else {
            half(head, plan.network + 2)
        };
        assert_eq!(said, packet.wire_len as usize - plan.network);
        there += body.len();
        on_wire += packet.wire_len as usize - head.len();
    }
    assert_eq!((there, on_wire), (frame.len(), wire_len));
}

#[test]
fn hostile_frames_are_refused_or_become_packets_of_their_own_bytes() {
    let count = match std::env::var_os("VNPLUG_LONG") {
        Some(_) => 1_000_000,
        None => 50_000,
    };
    let mut dice = dice(seed("hostile frames, cut"));
    let mut pieces = Pieces::default();
    let mut fates: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..count {
        let it = hostile(&mut dice);
        // A capture may have less of it than there was.
        let more = [0, 0, 0, 700, 70_000, u32::MAX - 1_000_000][dice(6)];
        let (frame, wire_len) = (&it.frame[..], it.frame.len() as u32 + more);
        let work = work(frame, wire_len, &it.offload);
        let fate = match &work {
            Ok(None) => "left",
            Ok(Some(Work::Sum(_))) => "summed",
            Ok(Some(Work::Cut(_))) => "cut",
            Err(Lie::Kind(_)) => "kind",
            Err(Lie::Headers) => "headers",
            Err(Lie::Length) => "length",
            Err(Lie::Size(_)) => "size",
            Err(Lie::Checksum) => "checksum",
        };
        *fates.entry(fate).or_default() += 1;
        let Ok(Some(work)) = work else { continue };
        pieces.clear();
        let range = pieces.make(frame, wire_len, &work);
        let packets: Vec<_> = range.map(|at| pieces.get(at, frame)).collect();
        assert_eq!(packets.len(), work.packets());
        match work {
            Work::Sum(place) => {
                let mut whole = [packets[0].head, packets[0].body].concat();
                // Never the addresses, nor what says which protocol it is.
                assert!(place.start >= 14);
                let len = if place.is_crc { 4 } else { 2 };
                let sum = place.at..place.at + len;
                whole[sum.clone()].copy_from_slice(&frame[sum]);
                assert!(whole == frame, "{place:?}");
            }
            Work::Cut(plan) => check_cut(frame, wire_len as usize, &plan, &packets),
        }
    }
    println!("{count} frames: {fates:?}");
    assert_eq!(fates.values().sum::<usize>(), count);
    // Each fate is many a frame's.
    assert!(fates.len() == 8, "{fates:?}");
    for (fate, times) in &fates {
        assert!(*times > count / 500, "{fate}: {fates:?}");
    }
}

//! Frames of which little is true, as a hostile capture or a hostile guest has them, for tests here and of a switch.

use vnplug_ring::offload::Offload;

use super::samples::{PLAIN, any, frame, leave_sum, offload};

/// A frame, and what its sender says is left to do with it.
#[derive(Debug, Clone)]
pub(crate) struct Hostile {
    pub(crate) frame: Vec<u8>,
    pub(crate) offload: Offload,
}

/// Where the headers of a frame were before any of it was spoilt.
struct Places {
    network: usize,
    transport: usize,
    is_ipv6: bool,
    is_udp: bool,
}

/// A super-frame of which up to four things are spoilt; one in forty is no frame at all.
pub(crate) fn hostile(dice: &mut impl FnMut(usize) -> usize) -> Hostile {
    let (mut recipe, size) = match dice(4) {
        0 => (PLAIN, 1448),
        _ => any(dice),
    };
    if dice(8) > 0 {
        // What is spoilt is near the headers.
        recipe.payload = 1 + recipe.payload % 3000;
    }
    let (mut frame, transport, _) = frame(&recipe);
    leave_sum(&mut frame, &recipe, transport);
    let mut it = Hostile {
        frame,
        offload: offload(&recipe, transport, size),
    };
    if dice(40) == 0 {
        it.frame = (0..dice(200)).map(|_| dice(256) as u8).collect();
    }
    let places = Places {
        network: 14 + 4 * recipe.tags,
        transport,
        is_ipv6: recipe.is_ipv6,
        is_udp: recipe.is_udp,
    };
    for _ in 0..dice(5) {
        match dice(2) {
            0 => spoil_frame(&mut it, &places, dice),
            _ => spoil_offload(&mut it.offload, dice),
        }
    }
    it
}

fn spoil_frame(it: &mut Hostile, places: &Places, dice: &mut impl FnMut(usize) -> usize) {
    let &Places {
        network,
        transport,
        is_ipv6,
        is_udp,
    } = places;
    let any = [dice(256) as u8, dice(256) as u8];
    let frame = &mut it.frame;
    match dice(13) {
        0 => put(frame, dice(100), &any[..1]),
        1 => frame.truncate(dice(frame.len() + 1)),
        // Behind what the IP header counts.
        2 => frame.resize(frame.len() + dice(200), any[0]),
        // What IP says is its length, or its payload's; 0 is that of BIG TCP.
        3 => put(frame, network + if is_ipv6 { 4 } else { 2 }, &any),
        4 => put(frame, network + if is_ipv6 { 4 } else { 2 }, &[0, 0]),
        // Version, and the length of IPv4's header.
        5 => put(frame, network, &any[..1]),
        // A protocol, or the first extension header.
        6 => put(frame, network + if is_ipv6 { 6 } else { 9 }, &any[..1]),
        // What lies behind the fixed header: options, with lengths of their own.
        7 => {
            let from = network + if is_ipv6 { 40 } else { 20 };
            for at in from..transport {
                put(frame, at, &[dice(256) as u8]);
            }
        }
        8 if is_ipv6 => {
            let (first, headers) = extensions(dice, if is_udp { 17 } else { 6 });
            put(frame, network + 6, &[first]);
            insert(frame, network + 40, &headers);
            if dice(3) > 0 {
                // All else is true of it.
                let len = frame.len().saturating_sub(network + 40) as u16;
                put(frame, network + 4, &len.to_be_bytes());
                move_sum(&mut it.offload, headers.len());
            }
        }
        // More fragments; and an offset, or a bit that is reserved.
        8 => put(frame, network + 6, &[0x20 | (any[0] * (any[1] & 1)), 0]),
        9 if is_udp => put(frame, transport + 4, &any),
        // The length of TCP's header, and its options.
        9 => put(frame, transport + 12, &any[..1]),
        10 => put(frame, transport + 20, &any),
        // The Ethertype, or a tag's.
        11 => put(frame, network - 2, &any),
        _ => {
            let tags = [0x81_u8, 0, 0, 7].repeat(1 + dice(10));
            insert(frame, 12, &tags);
            if dice(3) > 0 {
                move_sum(&mut it.offload, tags.len());
            }
        }
    }
}

fn spoil_offload(offload: &mut Offload, dice: &mut impl FnMut(usize) -> usize) {
    let any = dice(1 << 16) as u16;
    match dice(8) {
        0 => offload.gso_size = [0, 1, 2, 7, u16::MAX][dice(5)],
        1 => offload.gso_size = any,
        2 => offload.gso_type = any as u8,
        // The checksum alone.
        3 => (offload.gso_type, offload.gso_size) = (0, 0),
        4 => offload.csum_start = [0, 13, 14, 33, u16::MAX, any][dice(6)],
        5 => offload.csum_offset = [0, 6, 8, 16, u16::MAX, any][dice(6)],
        6 => offload.flags = any as u8,
        _ => {
            *offload = Offload {
                flags: any as u8,
                gso_type: dice(8) as u8,
                gso_size: dice(1 << 16) as u16,
                csum_start: dice(200) as u16,
                csum_offset: dice(40) as u16,
            };
        }
    }
}

/// Extension headers of IPv6 of any kinds, sometimes more than are walked through, each of which says that it is as long as
/// it is, or seldom not; and the kind of the first. What follows the last is `protocol`, as a rule.
fn extensions(dice: &mut impl FnMut(usize) -> usize, protocol: u8) -> (u8, Vec<u8>) {
    // Those that are known, "no next header", ESP, and TCP and UDP.
    const KINDS: [u8; 10] = [0, 43, 44, 51, 60, 135, 59, 50, 6, 17];
    let mut headers = Vec::new();
    let any = |dice: usize| {
        KINDS[if dice < 60 {
            dice % 5
        } else {
            dice % KINDS.len()
        }]
    };
    let first = any(dice(64));
    let (mut kind, count) = (first, 1 + [dice(3), dice(20)][dice(2)]);
    for nth in 0..count {
        let next = match nth + 1 == count && dice(8) > 0 {
            true => protocol,
            false => any(dice(64)),
        };
        // A fragment header has eight bytes, and an authentication header counts in fours.
        let units = if kind == 44 { 1 } else { 1 + dice(3) };
        let says = if kind == 51 { 2 * units - 2 } else { units - 1 };
        let mut header = vec![0; 8 * units];
        (header[0], header[1]) = (next, says as u8);
        match dice(24) {
            0 => header[1] = dice(256) as u8,
            1 => header[3] = dice(256) as u8,
            // More fragments.
            2 => header[3] = 1,
            _ => {}
        }
        if kind == 44 {
            header[1] = 0;
        }
        headers.extend(header);
        kind = next;
    }
    (first, headers)
}

/// The checksum counts from `len` bytes later.
fn move_sum(offload: &mut Offload, len: usize) {
    offload.csum_start = offload.csum_start.wrapping_add(len as u16);
}

/// Writes what lies within the frame.
fn put(frame: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = frame.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn insert(frame: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let rest = frame.split_off(at.min(frame.len()));
    frame.extend(bytes);
    frame.extend(rest);
}

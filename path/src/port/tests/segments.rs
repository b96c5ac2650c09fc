//! Super-frames, for readers that want them cut and for readers that do not.

use vnplug_ring::control::Segments;
use vnplug_ring::offload::{self, Offload, PREFIX, gso};

use super::*;

/// TCP over IPv4 with this much payload, in packets of 1000 bytes; of its checksum only the pseudo header's part is there.
pub(super) fn super_frame(payload: usize) -> (Vec<u8>, Offload) {
    let mut bytes = vec![2; 12];
    bytes.extend([8, 0, 0x45, 0]);
    bytes.extend((40 + payload as u16).to_be_bytes());
    bytes.extend([0, 9, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([
        0, 80, 0x30, 0x39, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0,
    ]);
    // The sum of the pseudo header: the addresses, TCP, and its length.
    let sum = 2 * 0x0a00 + 1 + 2 + 6 + 20 + payload as u32;
    let sum = (sum & 0xffff) + (sum >> 16);
    bytes[50..52].copy_from_slice(&(sum as u16).to_be_bytes());
    bytes.extend((0..payload).map(|at| at as u8));
    let offload = Offload {
        flags: offload::flags::NEEDS_CSUM,
        gso_type: gso::TCPV4,
        gso_size: 1000,
        csum_start: 34,
        csum_offset: 16,
    };
    (bytes, offload)
}

pub(super) fn as_frame(bytes: &[u8], offload: Offload) -> Frame<'_> {
    Frame {
        flags: flags::OFFLOAD | flags::CSUM_NOT_READY | flags::SOURCE_LOSS,
        offload,
        ..frames(bytes, 1)[0]
    }
}

/// Whether the TCP checksum of a packet of [`super_frame`] is right.
pub(super) fn is_summed(packet: &[u8]) -> bool {
    let tcp = &packet[34..];
    let words = |bytes: &[u8]| -> u32 {
        let pairs = bytes.chunks(2);
        pairs
            .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from))
            .sum()
    };
    let sum = words(&packet[26..34]) + 6 + tcp.len() as u32 + words(tcp);
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

#[test]
fn a_reader_of_the_wire_has_packets_and_another_the_super_frame() {
    let (bytes, offload) = super_frame(2500);
    let frame = as_frame(&bytes, offload);
    let (mut wire, mut its, _) = port(3000);
    let (mut merged, mut whole, _) = port(3000);
    merged.segments = Segments::Merged;
    merged.snaplen -= PREFIX as u32;
    for port in [&mut wire, &mut merged] {
        port.mark_gap = true;
        offer(port, &[frame, frames(b"plain", 1)[0]], 0);
    }
    let packet = whole.next().unwrap().unwrap();
    assert_eq!((packet.bytes, packet.meta.offload), (&bytes[..], offload));
    assert_eq!(packet.meta.flags, frame.flags | flags::GAP);
    assert_eq!(whole.next().unwrap().unwrap().bytes, b"plain");
    assert_eq!((merged.counters.delivered, merged.counters.cut), (2, 0));
    for (nth, len) in [1000, 1000, 500].into_iter().enumerate() {
        let packet = its.next().unwrap().unwrap();
        assert_eq!(packet.bytes.len(), 54 + len);
        assert_eq!(packet.meta.wire_len as usize, 54 + len);
        assert!(is_summed(packet.bytes));
        let first = flags::GAP | flags::SOURCE_LOSS;
        assert_eq!(packet.meta.flags, if nth == 0 { first } else { 0 });
        assert_eq!(packet.meta.offload, Offload::default());
    }
    assert_eq!(its.next().unwrap().unwrap().bytes, b"plain");
    let PortCounters {
        offered,
        delivered,
        cut,
        bytes,
        ..
    } = wire.counters;
    assert_eq!((offered, delivered, cut), (2, 4, 2));
    assert_eq!(bytes, 3 * 54 + 2500 + 5);
}

#[test]
fn members_of_a_group_share_the_packets_too() {
    let (bytes, offload) = super_frame(2500);
    let frame = as_frame(&bytes, offload);
    let (commons, mut members) = members(2);
    for (port, ..) in &mut members {
        offer(port, &[frame, frame], 0);
    }
    assert_eq!(commons.copies(), 6);
    for (port, consumer, _) in &mut members {
        assert_eq!((port.counters.delivered, port.counters.cut), (6, 4));
        for len in [1000, 1000, 500, 1000, 1000, 500] {
            let packet = consumer.next().unwrap().unwrap();
            assert_eq!(packet.bytes.len(), 54 + len);
            assert!(is_summed(packet.bytes));
        }
    }
}

#[test]
fn packets_for_which_there_is_no_room_are_counted_one_by_one() {
    let (bytes, offload) = super_frame(60_000);
    let (mut port, mut consumer, region) = port(3000);
    offer(&mut port, &[as_frame(&bytes, offload)], 0);
    let taken = std::iter::from_fn(|| consumer.next().unwrap().map(|_| ())).count() as u64;
    let counters = port.counters;
    // 1,088 bytes each, in a ring of 64 KiB; a reader that reads takes the rest.
    assert_eq!(
        (taken, counters.delivered, counters.dropped_full),
        (60, 60, 0)
    );
    offer(&mut port, &[as_frame(&bytes, offload)], 1);
    assert_eq!(port.counters.dropped_full + port.counters.delivered, 120);
    assert_eq!(port.counters.dropped_full, 60);
    // A reader that lies in the middle of one.
    region.store_u64(TAIL, 0x1234_5678, Ordering::Relaxed);
    offer(&mut port, &[as_frame(&bytes, offload)], 2);
    assert!(port.quarantined().is_some());
    assert_eq!(port.counters.dropped_quarantine, 60);
}

#[test]
fn a_snaplen_cuts_each_packet() {
    let (bytes, offload) = super_frame(2500);
    for snaplen in [20, 100] {
        let (mut port, mut consumer, _) = port(snaplen);
        offer(&mut port, &[as_frame(&bytes, offload)], 0);
        for len in [1054, 1054, 554] {
            let packet = consumer.next().unwrap().unwrap();
            assert_eq!(
                (packet.bytes.len(), packet.meta.wire_len),
                (snaplen as usize, len)
            );
        }
    }
}

#[test]
fn one_whose_offload_does_not_fit_stays_as_it_came() {
    let (bytes, mut offload) = super_frame(2500);
    offload.gso_size = 0;
    let (mut port, mut consumer, _) = port(3000);
    offer(&mut port, &[as_frame(&bytes, offload)], 0);
    let packet = consumer.next().unwrap().unwrap();
    assert_eq!(packet.bytes, bytes);
    let left = flags::CSUM_NOT_READY | flags::SOURCE_LOSS;
    assert_eq!((packet.meta.flags, port.counters.cut), (left, 0));
}

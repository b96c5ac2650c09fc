//! Classic pcap with nanoseconds, little-endian. One link type per file, and no word about losses.

use vnplug_ring::Packet;

use super::super::classic::{HEADER_BYTES, MAGIC_NS};
use super::{Head, Interface, Pen};

/// The beginning of a file; the link type is that of the first interface.
pub fn header(interfaces: &[Interface]) -> Vec<u8> {
    let first = interfaces.first();
    let mut out = Vec::with_capacity(HEADER_BYTES);
    let link_type = first.map_or(1, Interface::file_link_type);
    file(&mut out, first.map_or(0, |first| first.snaplen), link_type);
    out
}

/// The beginning of a file of this LINKTYPE_…; a `snaplen` of 0 is the most that readers allow.
pub fn file(out: &mut Vec<u8>, snaplen: u32, link_type: u32) {
    let snaplen = if snaplen == 0 { MAX_SNAPLEN } else { snaplen };
    out.extend(MAGIC_NS.to_le_bytes());
    out.extend([2, 0, 4, 0]);
    out.extend([0; 8]);
    out.extend(snaplen.to_le_bytes());
    out.extend(link_type.to_le_bytes());
}

/// Writes a packet's record to `memory` from `at` on: where it ends, or `None` if it has no room.
#[inline]
pub fn packet(memory: &mut [u8], at: usize, packet: &Packet<'_>) -> Option<usize> {
    record(memory, at, &Head::of(packet), packet.bytes)
}

/// The same of any packet.
#[inline]
pub fn record(memory: &mut [u8], at: usize, head: &Head, bytes: &[u8]) -> Option<usize> {
    let end = at + RECORD_BYTES + bytes.len();
    let mut pen = Pen {
        memory: memory.get_mut(at..end)?,
        at: 0,
    };
    let seconds = head.ts_ns / 1_000_000_000;
    pen.u32(u32::try_from(seconds).unwrap_or(u32::MAX));
    pen.u32((head.ts_ns % 1_000_000_000) as u32);
    pen.u32(bytes.len() as u32);
    pen.u32(head.wire_len);
    pen.bytes(bytes);
    Some(end)
}

/// Bytes of a packet's header.
pub const RECORD_BYTES: usize = 16;
const MAX_SNAPLEN: u32 = 262_144;

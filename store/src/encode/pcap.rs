//! Classic pcap with nanoseconds, little-endian. One link type per file, and no word about losses.

use vnplug::Packet;

use super::{Interface, Pen};

/// The beginning of a file; the link type is that of the first interface.
pub fn header(interfaces: &[Interface]) -> Vec<u8> {
    let first = interfaces.first();
    let snaplen = first.map_or(0, |interface| interface.snaplen);
    let snaplen = if snaplen == 0 { MAX_SNAPLEN } else { snaplen };
    let mut out = Vec::with_capacity(HEADER);
    out.extend(NS_MAGIC.to_le_bytes());
    out.extend([2, 0, 4, 0]);
    out.extend([0; 8]);
    out.extend(snaplen.to_le_bytes());
    out.extend(first.map_or(1, Interface::file_link_type).to_le_bytes());
    out
}

/// Writes a packet's record to `memory` from `at` on: where it ends, or `None` if it has no room.
#[inline]
pub fn packet(memory: &mut [u8], at: usize, packet: &Packet<'_>) -> Option<usize> {
    let end = at + RECORD + packet.bytes.len();
    let mut pen = Pen {
        memory: memory.get_mut(at..end)?,
        at: 0,
    };
    pen.u32((packet.meta.ts_ns / 1_000_000_000) as u32);
    pen.u32((packet.meta.ts_ns % 1_000_000_000) as u32);
    pen.u32(packet.bytes.len() as u32);
    pen.u32(packet.meta.wire_len);
    pen.bytes(packet.bytes);
    Some(end)
}

const NS_MAGIC: u32 = 0xa1b2_3c4d;
const HEADER: usize = 24;
const RECORD: usize = 16;
const MAX_SNAPLEN: u32 = 262_144;

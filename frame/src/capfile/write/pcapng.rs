//! pcapng (draft-ietf-opsawg-pcapng), little-endian, nanoseconds.
//!
//! A packet is an enhanced packet block; it says its direction if it was sent (`epb_flags`), how many
//! packets this recorder lost just before it (`epb_dropcount`), and if an unknown number is missing
//! (`opt_comment`). Writes end at multiples of 4096 bytes and at the end of a block: [`pad`] fills the
//! rest with a block of a type for local use (its highest bit is set), which readers pass over.

use vnplug_ring::Packet;
use vnplug_ring::layout::{Meta, flags};

use super::super::ng::{
    BYTE_ORDER_MAGIC, ENHANCED_PACKET, EPB_DROPCOUNT, EPB_FLAGS, IF_FILTER, IF_NAME, IF_TSRESOL,
    INBOUND, INTERFACE, ISB_ENDTIME, ISB_FILTERACCEPT, ISB_IFDROP, ISB_IFRECV, ISB_OSDROP,
    ISB_STARTTIME, ISB_USRDELIV, OPT_COMMENT, OPT_END, OUTBOUND, SECTION, SHB_HARDWARE, SHB_OS,
    SHB_USERAPPL, STATISTICS,
};
use super::{Head, Interface, Pen};

/// The type of blocks that only fill room: for local use, `VNP` with the highest bit.
pub const PADDING: u32 = 0x8050_4e56;

/// The beginning of a file: a section and its interfaces, packets refer to them by their place.
pub fn header(interfaces: &[Interface], comment: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let application = concat!("vnplug ", env!("CARGO_PKG_VERSION"));
    let options = [
        (OPT_COMMENT, comment),
        (SHB_HARDWARE, std::env::consts::ARCH),
        (SHB_OS, std::env::consts::OS),
        (SHB_USERAPPL, application),
    ];
    section(&mut out, &options);
    for one in interfaces {
        let link_type = one.file_link_type();
        interface(&mut out, link_type, one.snaplen, &one.name, &one.filter);
    }
    out
}

/// A section header of unknown length; options without a value are left out.
pub fn section(out: &mut Vec<u8>, options: &[(u16, &str)]) {
    block(out, SECTION, |block| {
        block.extend(BYTE_ORDER_MAGIC.to_le_bytes());
        block.extend([1, 0, 0, 0]);
        block.extend([0xff; 8]);
        for &(code, value) in options {
            if !value.is_empty() {
                option(block, code, value.as_bytes());
            }
        }
        if !options.is_empty() {
            option(block, OPT_END, &[]);
        }
    });
}

/// An interface description, of nanoseconds. `link_type` is a LINKTYPE_…; a `snaplen` of 0 is no limit;
/// an empty `name` or `filter` is left out.
pub fn interface(out: &mut Vec<u8>, link_type: u32, snaplen: u32, name: &str, filter: &str) {
    block(out, INTERFACE, |block| {
        block.extend((link_type as u16).to_le_bytes());
        block.extend([0; 2]);
        block.extend(snaplen.to_le_bytes());
        if !name.is_empty() {
            option(block, IF_NAME, name.as_bytes());
        }
        option(block, IF_TSRESOL, &[9]);
        if !filter.is_empty() {
            // Kind 0: a filter expression of libpcap's.
            let kind = [b"\0", filter.as_bytes()].concat();
            option(block, IF_FILTER, &kind);
        }
        option(block, OPT_END, &[]);
    });
}

/// What an interface statistics block says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics<'a> {
    /// The interface's place.
    pub interface: u32,
    /// When this was true, nanoseconds since 1970.
    pub at_ns: u64,
    /// Begin and end of what is counted.
    pub range_ns: Option<(u64, u64)>,
    /// Packets that came.
    pub received: Option<u64>,
    /// Packets that were lost.
    pub dropped: Option<u64>,
    /// What became of those that a filter accepted.
    pub accepted: Option<Accepted>,
    /// In words.
    pub comment: &'a str,
}

/// Packets that a capture filter accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Accepted {
    /// Written to the file.
    pub delivered: u64,
    /// Lost before that.
    pub lost: u64,
}

/// An interface statistics block.
pub fn statistics(out: &mut Vec<u8>, statistics: &Statistics<'_>) {
    let stamp = |ns: u64| {
        let (high, low) = ((ns >> 32) as u32, ns as u32);
        [high.to_le_bytes(), low.to_le_bytes()].concat()
    };
    block(out, STATISTICS, |block| {
        block.extend(statistics.interface.to_le_bytes());
        block.extend(stamp(statistics.at_ns));
        if !statistics.comment.is_empty() {
            option(block, OPT_COMMENT, statistics.comment.as_bytes());
        }
        if let Some((from, to)) = statistics.range_ns {
            option(block, ISB_STARTTIME, &stamp(from));
            option(block, ISB_ENDTIME, &stamp(to));
        }
        if let Some(received) = statistics.received {
            option(block, ISB_IFRECV, &received.to_le_bytes());
        }
        if let Some(dropped) = statistics.dropped {
            option(block, ISB_IFDROP, &dropped.to_le_bytes());
        }
        if let Some(Accepted { delivered, lost }) = statistics.accepted {
            option(block, ISB_FILTERACCEPT, &(delivered + lost).to_le_bytes());
            option(block, ISB_OSDROP, &lost.to_le_bytes());
            option(block, ISB_USRDELIV, &delivered.to_le_bytes());
        }
        option(block, OPT_END, &[]);
    });
}

/// Writes a packet's block to `memory` from `at` on: where it ends, or `None` if it has no room.
#[inline]
pub fn packet(memory: &mut [u8], at: usize, interface: u32, packet: &Packet<'_>) -> Option<usize> {
    if is_plain(&packet.meta) {
        return enhanced(memory, at, interface, &Head::of(packet), packet.bytes, &[]);
    }
    packet_with_options(memory, at, interface, packet)
}

/// As [`packet`], and says the direction of received packets, too.
#[inline]
pub fn packet_with_direction(
    memory: &mut [u8],
    at: usize,
    interface: u32,
    packet: &Packet<'_>,
) -> Option<usize> {
    if is_plain(&packet.meta) {
        const RECEIVED: [u8; 12] = [EPB_FLAGS as u8, 0, 4, 0, INBOUND as u8, 0, 0, 0, 0, 0, 0, 0];
        return enhanced(
            memory,
            at,
            interface,
            &Head::of(packet),
            packet.bytes,
            &RECEIVED,
        );
    }
    packet_with_options(memory, at, interface, packet)
}

fn is_plain(meta: &Meta) -> bool {
    let odd = flags::OUTBOUND | flags::GAP | flags::SOURCE_LOSS;
    meta.flags & odd == 0 && meta.lost == 0
}

#[cold]
fn packet_with_options(
    memory: &mut [u8],
    at: usize,
    interface: u32,
    packet: &Packet<'_>,
) -> Option<usize> {
    let meta = &packet.meta;
    let mut options = Vec::new();
    if meta.flags & flags::GAP != 0 {
        option(&mut options, OPT_COMMENT, GAP_COMMENT.as_bytes());
    }
    if meta.flags & flags::SOURCE_LOSS != 0 {
        option(&mut options, OPT_COMMENT, SOURCE_LOSS_COMMENT.as_bytes());
    }
    if meta.flags & flags::OUTBOUND != 0 {
        option(&mut options, EPB_FLAGS, &OUTBOUND.to_le_bytes());
    }
    if meta.lost != 0 {
        let lost = u64::from(meta.lost).to_le_bytes();
        option(&mut options, EPB_DROPCOUNT, &lost);
    }
    option(&mut options, OPT_END, &[]);
    let head = Head::of(packet);
    enhanced(memory, at, interface, &head, packet.bytes, &options)
}

/// Writes an enhanced packet block to `memory` from `at` on, with `options` as [`option`] writes them
/// and their end mark, or none: where it ends, or `None` if it has no room.
#[inline]
pub fn enhanced(
    memory: &mut [u8],
    at: usize,
    interface: u32,
    head: &Head,
    bytes: &[u8],
    options: &[u8],
) -> Option<usize> {
    let (len, total) = (bytes.len(), enhanced_bytes(bytes, options));
    let mut pen = Pen {
        memory: memory.get_mut(at..at + total)?,
        at: 0,
    };
    pen.u32(ENHANCED_PACKET);
    pen.u32(total as u32);
    pen.u32(interface);
    pen.u32((head.ts_ns >> 32) as u32);
    pen.u32(head.ts_ns as u32);
    pen.u32(len as u32);
    pen.u32(head.wire_len);
    pen.bytes(bytes);
    pen.pad(len);
    pen.bytes(options);
    pen.u32(total as u32);
    Some(at + total)
}

/// How long such a block is.
#[inline]
pub fn enhanced_bytes(bytes: &[u8], options: &[u8]) -> usize {
    EMPTY + bytes.len().next_multiple_of(4) + options.len()
}

/// Fills `memory` from `at` (a multiple of four) up to a multiple of `unit`: where that is. The
/// caller leaves [`PADDING_ROOM`] bytes, and `memory` is a multiple of `unit` long.
pub fn pad(memory: &mut [u8], at: usize, unit: usize) -> usize {
    let mut end = at.next_multiple_of(unit);
    if end == at {
        return at;
    }
    if end - at < SMALLEST {
        end += unit;
    }
    let total = (end - at) as u32;
    let mut pen = Pen { memory, at };
    pen.u32(PADDING);
    pen.u32(total);
    pen.memory[at + 8..end - 4].fill(0);
    pen.at = end - 4;
    pen.u32(total);
    end
}

fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    body(out);
    let total = (out.len() - start + 4) as u32;
    out[start + 4..start + 8].copy_from_slice(&total.to_le_bytes());
    out.extend(total.to_le_bytes());
}

/// An option: code, length, value, padded. What is longer than an option may be is cut.
pub fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(LONGEST_OPTION)];
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// What must be left free after the last packet so that [`pad`] has room.
pub const PADDING_ROOM: usize = 16;
/// A block without anything in it.
const SMALLEST: usize = 12;
/// A packet block without packet and options.
const EMPTY: usize = 32;
const LONGEST_OPTION: usize = 4096;
/// In the comment of statistics that say the same as the `epb_dropcount` of the next packet.
pub const HERE: &str = "packets are missing here";
/// A packet's comments: packets are missing before it.
pub const GAP_COMMENT: &str =
    "the capture was interrupted before this packet; how many are missing is unknown";
/// Of a packet before which the kernel or the NIC lost some.
pub const SOURCE_LOSS_COMMENT: &str = "packets were lost before this one, by the kernel or the NIC";

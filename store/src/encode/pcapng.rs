//! pcapng (draft-ietf-opsawg-pcapng), little-endian, nanoseconds.
//!
//! A packet is an enhanced packet block; it says its direction if it was sent (`epb_flags`), how many
//! packets this recorder lost just before it (`epb_dropcount`), and if an unknown number is missing
//! (`opt_comment`). Writes end at multiples of 4096 bytes and at the end of a block: [`pad`] fills the
//! rest with a block of a type for local use (its highest bit is set), which readers pass over.

use vnplug::{Packet, flags};

use super::{Interface, Pen, halves};

/// The type of blocks that only fill room: for local use, `VNP` with the highest bit.
pub const PADDING: u32 = 0x8050_4e56;

/// The beginning of a file: a section and its interfaces, packets refer to them by their place.
pub fn header(interfaces: &[Interface], comment: &str) -> Vec<u8> {
    let mut out = Vec::new();
    block(&mut out, SECTION_HEADER, |block| {
        block.extend(BYTE_ORDER_MAGIC.to_le_bytes());
        block.extend([1, 0, 0, 0]);
        block.extend([0xff; 8]);
        let application = concat!("vnplug ", env!("CARGO_PKG_VERSION"));
        if !comment.is_empty() {
            option(block, OPT_COMMENT, comment.as_bytes());
        }
        option(block, SHB_HARDWARE, std::env::consts::ARCH.as_bytes());
        option(block, SHB_OS, std::env::consts::OS.as_bytes());
        option(block, SHB_USERAPPL, application.as_bytes());
        option(block, OPT_END, &[]);
    });
    for interface in interfaces {
        block(&mut out, INTERFACE, |block| {
            block.extend((interface.file_link_type() as u16).to_le_bytes());
            block.extend([0; 2]);
            block.extend(interface.snaplen.to_le_bytes());
            option(block, IF_NAME, interface.name.as_bytes());
            option(block, IF_TSRESOL, &[9]);
            if !interface.filter.is_empty() {
                // Kind 0: a filter expression of libpcap's.
                let kind = [b"\0", interface.filter.as_bytes()].concat();
                option(block, IF_FILTER, &kind);
            }
            option(block, OPT_END, &[]);
        });
    }
    out
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
    /// In words.
    pub comment: &'a str,
}

/// An interface statistics block.
pub fn statistics(out: &mut Vec<u8>, statistics: &Statistics<'_>) {
    let stamp = |ns: u64| {
        let (high, low) = ((ns >> 32) as u32, ns as u32);
        [high.to_le_bytes(), low.to_le_bytes()].concat()
    };
    block(out, INTERFACE_STATISTICS, |block| {
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
        option(block, OPT_END, &[]);
    });
}

/// Writes a packet's block to `memory` from `at` on: where it ends, or `None` if it has no room.
#[inline]
pub fn packet(memory: &mut [u8], at: usize, interface: u32, packet: &Packet<'_>) -> Option<usize> {
    let meta = &packet.meta;
    let odd = flags::OUTBOUND | flags::GAP | flags::SOURCE_LOSS;
    if meta.flags & odd != 0 || meta.lost != 0 {
        return packet_with_options(memory, at, interface, packet);
    }
    let len = packet.bytes.len();
    let total = EMPTY + len.next_multiple_of(4);
    let mut pen = Pen {
        memory: memory.get_mut(at..at + total)?,
        at: 0,
    };
    body(&mut pen, total, interface, packet);
    pen.u32(total as u32);
    Some(at + total)
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
    let total = EMPTY + packet.bytes.len().next_multiple_of(4) + options.len();
    let mut pen = Pen {
        memory: memory.get_mut(at..at + total)?,
        at: 0,
    };
    body(&mut pen, total, interface, packet);
    pen.bytes(&options);
    pen.u32(total as u32);
    Some(at + total)
}

#[inline]
fn body(pen: &mut Pen<'_>, total: usize, interface: u32, packet: &Packet<'_>) {
    let (high, low) = halves(&packet.meta);
    let len = packet.bytes.len();
    pen.u32(ENHANCED_PACKET);
    pen.u32(total as u32);
    pen.u32(interface);
    pen.u32(high);
    pen.u32(low);
    pen.u32(len as u32);
    pen.u32(packet.meta.wire_len);
    pen.bytes(packet.bytes);
    pen.pad(len);
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
pub(crate) fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(LONGEST_OPTION)];
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// What must be left free behind the last packet so that [`pad`] has room.
pub const PADDING_ROOM: usize = 16;
/// A block without anything in it.
const SMALLEST: usize = 12;
/// A packet block without packet and options.
const EMPTY: usize = 32;
const LONGEST_OPTION: usize = 4096;
const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
pub(crate) const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;
const OPT_END: u16 = 0;
pub(crate) const OPT_COMMENT: u16 = 1;
const SHB_HARDWARE: u16 = 2;
const SHB_OS: u16 = 3;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const IF_FILTER: u16 = 11;
pub(crate) const EPB_FLAGS: u16 = 2;
pub(crate) const EPB_DROPCOUNT: u16 = 4;
pub(crate) const ISB_STARTTIME: u16 = 2;
pub(crate) const ISB_ENDTIME: u16 = 3;
pub(crate) const ISB_IFRECV: u16 = 4;
pub(crate) const ISB_IFDROP: u16 = 5;
/// epb_flags: the lowest two bits are the direction.
const OUTBOUND: u32 = 0b10;
/// In the comment of statistics that say the same as the `epb_dropcount` of the packet behind them.
pub(crate) const HERE: &str = "packets are missing here";
/// A packet's comments: packets are missing before it.
pub(crate) const GAP_COMMENT: &str =
    "the capture was interrupted before this packet; how many are missing is unknown";
pub(crate) const SOURCE_LOSS_COMMENT: &str =
    "packets were lost before this one, by the kernel or the NIC";

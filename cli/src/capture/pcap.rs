//! Writes capture files: pcap with nanoseconds, and pcapng.
//!
//! Everything is little-endian. pcapng blocks (draft-ietf-opsawg-pcapng): one section header, one
//! interface description with nanosecond timestamps, an enhanced packet block per packet with its
//! direction and with the packets lost before it, and one interface statistics block at the end.

use std::io::{self, Write};

use vnplug::{Meta, Packet, flags};

/// Which kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Classic, with nanoseconds
    Pcap,
    /// With interface name, direction and drop counts
    Pcapng,
}

/// A capture file in the making; packets are collected and written in large pieces.
#[derive(Debug)]
pub(crate) struct Writer<W> {
    file: W,
    format: Format,
    pending: Vec<u8>,
    pending_packets: u64,
    written_packets: u64,
}

/// What the file says about its origin.
#[derive(Debug, Clone)]
pub(crate) struct Origin<'a> {
    /// The device's name.
    pub(crate) device: &'a str,
    /// A DLT; 1 = Ethernet.
    pub(crate) link_type: u32,
    /// Longest captured length, 0 = no limit.
    pub(crate) snaplen: u32,
    /// The filter expression, empty = none.
    pub(crate) filter: &'a str,
}

/// What the statistics at the end say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Totals {
    /// First and last moment of the capture, nanoseconds since 1970.
    pub(crate) from_ns: u64,
    /// See `from_ns`.
    pub(crate) to_ns: u64,
    /// Packets in the file.
    pub(crate) delivered: u64,
    /// Packets this port lost.
    pub(crate) lost: u64,
}

impl<W: Write> Writer<W> {
    /// Begins a file; nothing is written before the first flush.
    pub(crate) fn new(file: W, format: Format, origin: &Origin<'_>) -> Self {
        let mut pending = Vec::with_capacity(PIECE + 4096);
        // tcpdump.org/linktypes: the one DLT of ours whose number in files is another.
        let link_type = match origin.link_type {
            DLT_RAW => LINKTYPE_RAW,
            other => other,
        };
        match format {
            Format::Pcap => {
                pending.extend(PCAP_NS_MAGIC.to_le_bytes());
                pending.extend([2, 0, 4, 0]);
                pending.extend([0; 8]);
                let snaplen = if origin.snaplen == 0 {
                    MAX_SNAPLEN
                } else {
                    origin.snaplen
                };
                pending.extend(snaplen.to_le_bytes());
                pending.extend(link_type.to_le_bytes());
            }
            Format::Pcapng => {
                block(&mut pending, SECTION_HEADER, |block| {
                    block.extend(BYTE_ORDER_MAGIC.to_le_bytes());
                    block.extend([1, 0, 0, 0]);
                    block.extend([0xff; 8]);
                    let application = concat!("vnplug ", env!("CARGO_PKG_VERSION"));
                    option(block, SHB_USERAPPL, application.as_bytes());
                    end_of_options(block);
                });
                block(&mut pending, INTERFACE, |block| {
                    block.extend((link_type as u16).to_le_bytes());
                    block.extend([0; 2]);
                    block.extend(origin.snaplen.to_le_bytes());
                    option(block, IF_NAME, origin.device.as_bytes());
                    option(block, IF_TSRESOL, &[9]);
                    if !origin.filter.is_empty() {
                        // Kind 0: a filter expression of libpcap's.
                        option(
                            block,
                            IF_FILTER,
                            &[b"\0", origin.filter.as_bytes()].concat(),
                        );
                    }
                    end_of_options(block);
                });
            }
        }
        Self {
            file,
            format,
            pending,
            pending_packets: 0,
            written_packets: 0,
        }
    }

    /// Adds a packet.
    ///
    /// # Errors
    /// The file cannot be written; [`written`](Self::written) packets are in it.
    #[inline]
    pub(crate) fn packet(&mut self, packet: &Packet<'_>) -> io::Result<()> {
        match self.format {
            Format::Pcap => pcap_record(&mut self.pending, &packet.meta, packet.bytes),
            Format::Pcapng => pcapng_record(&mut self.pending, &packet.meta, packet.bytes),
        }
        self.pending_packets += 1;
        if self.pending.len() >= PIECE {
            self.flush()?;
        }
        Ok(())
    }

    /// Writes what was collected.
    ///
    /// # Errors
    /// As [`packet`](Self::packet). What was collected is gone: a second try would repeat a part.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let written = self.file.write_all(&self.pending);
        self.pending.clear();
        written?;
        self.file.flush()?;
        self.written_packets += std::mem::take(&mut self.pending_packets);
        Ok(())
    }

    /// Packets that were handed to the system whole.
    pub(crate) fn written(&self) -> u64 {
        self.written_packets
    }

    /// Ends the file with its statistics (pcapng) and writes everything.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub(crate) fn finish(&mut self, totals: &Totals) -> io::Result<()> {
        if self.format == Format::Pcapng {
            block(&mut self.pending, STATISTICS, |block| {
                block.extend([0; 4]);
                timestamp(block, totals.to_ns);
                let mut moment = Vec::new();
                timestamp(&mut moment, totals.from_ns);
                option(block, ISB_STARTTIME, &moment);
                moment.clear();
                timestamp(&mut moment, totals.to_ns);
                option(block, ISB_ENDTIME, &moment);
                let received = totals.delivered + totals.lost;
                option(block, ISB_FILTERACCEPT, &received.to_le_bytes());
                option(block, ISB_OSDROP, &totals.lost.to_le_bytes());
                option(block, ISB_USRDELIV, &totals.delivered.to_le_bytes());
                end_of_options(block);
            });
        }
        self.flush()
    }
}

#[inline]
fn pcap_record(out: &mut Vec<u8>, meta: &Meta, bytes: &[u8]) {
    let mut head = [0; 16];
    head[0..4].copy_from_slice(&((meta.ts_ns / 1_000_000_000) as u32).to_le_bytes());
    head[4..8].copy_from_slice(&((meta.ts_ns % 1_000_000_000) as u32).to_le_bytes());
    head[8..12].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    head[12..16].copy_from_slice(&wire_len(meta, bytes).to_le_bytes());
    out.extend_from_slice(&head);
    out.extend_from_slice(bytes);
}

#[inline]
fn pcapng_record(out: &mut Vec<u8>, meta: &Meta, bytes: &[u8]) {
    let start = out.len();
    let mut head = [0; 28];
    head[0..4].copy_from_slice(&ENHANCED_PACKET.to_le_bytes());
    head[12..16].copy_from_slice(&((meta.ts_ns >> 32) as u32).to_le_bytes());
    head[16..20].copy_from_slice(&(meta.ts_ns as u32).to_le_bytes());
    head[20..24].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
    head[24..28].copy_from_slice(&wire_len(meta, bytes).to_le_bytes());
    out.extend_from_slice(&head);
    out.extend_from_slice(bytes);
    out.extend_from_slice(&[0; 3][..padding(bytes.len())]);
    // epb_flags: bits 0-1 are the direction, 1 inbound, 2 outbound.
    let outbound = meta.flags & flags::OUTBOUND != 0;
    option(out, EPB_FLAGS, &(1_u32 + u32::from(outbound)).to_le_bytes());
    if meta.lost > 0 {
        option(out, EPB_DROPCOUNT, &u64::from(meta.lost).to_le_bytes());
    }
    if meta.flags & flags::GAP != 0 {
        let comment = b"the daemon was restarted: packets may be missing before this one";
        option(out, OPT_COMMENT, comment);
    }
    end_of_options(out);
    close_block(out, start);
}

/// pcap demands that the captured length is not the larger one.
#[inline]
fn wire_len(meta: &Meta, bytes: &[u8]) -> u32 {
    meta.wire_len.max(bytes.len() as u32)
}

fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    body(out);
    close_block(out, start);
}

/// Writes the block's length at its end and its beginning.
#[inline]
fn close_block(out: &mut Vec<u8>, start: usize) {
    let len = ((out.len() - start + 4) as u32).to_le_bytes();
    out.extend_from_slice(&len);
    out[start + 4..start + 8].copy_from_slice(&len);
}

#[inline]
fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    out.extend_from_slice(&[0; 3][..padding(value.len())]);
}

#[inline]
fn end_of_options(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0; 4]);
}

/// High and low half, as pcapng wants them.
fn timestamp(out: &mut Vec<u8>, ns: u64) {
    out.extend(((ns >> 32) as u32).to_le_bytes());
    out.extend((ns as u32).to_le_bytes());
}

/// Bytes up to the next multiple of four.
#[inline]
fn padding(len: usize) -> usize {
    len.wrapping_neg() & 3
}

const PIECE: usize = 256 << 10;
const MAX_SNAPLEN: u32 = 0x4_0000;
const DLT_RAW: u32 = 12;
const LINKTYPE_RAW: u32 = 101;

const PCAP_NS_MAGIC: u32 = 0xa1b2_3c4d;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const INTERFACE: u32 = 1;
const STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;

const OPT_COMMENT: u16 = 1;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const IF_FILTER: u16 = 11;
const EPB_FLAGS: u16 = 2;
const EPB_DROPCOUNT: u16 = 4;
const ISB_STARTTIME: u16 = 2;
const ISB_ENDTIME: u16 = 3;
const ISB_FILTERACCEPT: u16 = 6;
const ISB_OSDROP: u16 = 7;
const ISB_USRDELIV: u16 = 8;

#[cfg(test)]
mod tests;

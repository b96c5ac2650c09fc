//! The contents of a TPACKET_V3 block: a header, then frames, each after a header of its own.
//!
//! ```text
//! tpacket_block_desc .. [ tpacket3_hdr sockaddr_ll | headroom | frame ] [ tpacket3_hdr .. ] ..
//!                         ^ tp_next_offset leads to the next one     ^ tp_mac leads to the frame
//! ```
//!
//! With `PACKET_VNET_HDR` a virtio-net header of 10 bytes, in the machine's byte order, ends where the
//! frame begins.
//!
//! The kernel is trusted, but nothing here relies on that: every offset is checked against the
//! block, and a block that does not add up ends early, its frames counted as lost.

use std::mem::offset_of;
use std::sync::atomic::{Ordering, compiler_fence};

use libc::{sockaddr_ll, tpacket_block_desc, tpacket_hdr_v1, tpacket3_hdr};
use vnplug_ring::layout::flags;
use vnplug_ring::offload::{self, Offload, SHORT_HEADER};

use vnplug_frame::{Frame, vlan_of};
use vnplug_os::packet::{NOTE, NOTE_LEN};

/// Where the walk through a block stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cursor {
    /// Frames not yet handed out.
    pub(super) left: u32,
    /// Offset in the block of the next frame's header.
    at: usize,
}

impl Cursor {
    /// Where the walk through this filling of `block` stopped last, be it another process'; at first before the first frame.
    pub(super) fn resume(block: &[u8]) -> Self {
        let filling = block.get(FILLING..FILLING + 8);
        match block.get(NOTE..NOTE + NOTE_LEN) {
            Some(note) if note.get(..8) == filling => Self {
                left: u32_at(note, 8).unwrap_or(0),
                at: u32_at(note, 12).unwrap_or(0) as usize,
            },
            _ => Self::start(block),
        }
    }

    /// Before the first frame of `block`.
    fn start(block: &[u8]) -> Self {
        let left = u32_at(block, PACKETS).unwrap_or(0);
        let at = u32_at(block, FIRST).map_or(block.len(), |at| at as usize);
        Self { left, at }
    }

    /// When the next frame came, in nanoseconds since 1970.
    pub(super) fn next_ns(self, block: &[u8]) -> u64 {
        block.get(self.at..).and_then(time_of).unwrap_or(0)
    }
}

/// Bytes that a block's frames take, headers included.
pub(super) fn used(block: &[u8]) -> u64 {
    u32_at(block, USED).map_or(0, u64::from)
}

/// Walks through a block from a cursor on; an iterator of frames.
#[derive(Debug)]
pub(super) struct Walk<'a> {
    /// What lies before the frames.
    head: &'a mut [u8],
    rest: &'a mut [u8],
    cursor: Cursor,
    snaplen: usize,
    /// Stops before the first frame that came later.
    until_ns: u64,
    /// Virtio-net headers stand before the frames.
    has_headers: bool,
    /// Frames that could not be read because the block does not add up.
    malformed: u32,
}

impl<'a> Walk<'a> {
    /// Goes on in `block` at `cursor`, with frames that came until `until_ns`; they have at most
    /// `snaplen` bytes, VLAN tag included.
    pub(super) fn resume(block: &'a mut [u8], cursor: Cursor, snaplen: u32, until_ns: u64) -> Self {
        let (head, rest) = block.split_at_mut_checked(cursor.at).unwrap_or_default();
        Self {
            head,
            rest,
            cursor,
            snaplen: snaplen as usize,
            until_ns,
            has_headers: false,
            malformed: 0,
        }
    }

    /// Whether virtio-net headers stand before the frames; not, if this is not said.
    pub(super) fn with_headers(self, has_headers: bool) -> Self {
        Self {
            has_headers,
            ..self
        }
    }

    /// Adds frames to `batch` until it has `most`.
    ///
    /// NB: not `extend`, which asks for each frame how many are to come.
    #[inline]
    pub(super) fn fill(&mut self, batch: &mut Vec<Frame<'a>>, most: usize) {
        batch.reserve(most);
        while batch.len() < most
            && let Some(frame) = self.next()
        {
            batch.push(frame);
        }
    }

    /// Where to go on, and how many frames were malformed.
    ///
    /// The block notes it, too, before the frames are handed out: who goes on when this process was killed hands out none of them
    /// twice.
    pub(super) fn stop(self) -> (Cursor, u32) {
        let Cursor { left, at } = self.cursor;
        if let Some((header, note)) = self.head.split_at_mut_checked(NOTE)
            && let Some(filling) = header.get(FILLING..FILLING + 8)
            && let Some(note) = note.first_chunk_mut::<NOTE_LEN>()
        {
            note[8..12].copy_from_slice(&left.to_ne_bytes());
            note[12..].copy_from_slice(&(at as u32).to_ne_bytes());
            // Whose note it is comes last: this process may be killed between two of its instructions.
            compiler_fence(Ordering::Release);
            note[..8].copy_from_slice(filling);
        }
        (self.cursor, self.malformed)
    }

    /// Cuts the next record (header, headroom, frame) off `rest`.
    fn record(&mut self) -> Option<&'a mut [u8]> {
        let rest = std::mem::take(&mut self.rest);
        let step = match self.cursor.left {
            1 => rest.len(), // the last frame's tp_next_offset is 0
            _ => u32_at(rest, NEXT)? as usize,
        };
        if step < HEADER_LEN {
            return None;
        }
        let (record, rest) = rest.split_at_mut_checked(step)?;
        self.rest = rest;
        self.cursor.at += step;
        Some(record)
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = Frame<'a>;

    #[inline]
    fn next(&mut self) -> Option<Frame<'a>> {
        if self.cursor.left == 0 {
            return None;
        }
        if self.until_ns < u64::MAX && time_of(self.rest).is_some_and(|ns| ns > self.until_ns) {
            return None;
        }
        let Some(frame) = self
            .record()
            .and_then(|it| frame(it, self.snaplen, self.has_headers))
        else {
            self.malformed = std::mem::take(&mut self.cursor.left);
            return None;
        };
        self.cursor.left -= 1;
        Some(frame)
    }
}

/// Reads a record; puts a VLAN tag that the kernel took out back where it was on the wire.
#[inline(always)] // Else each frame is written twice: 20 instructions.
fn frame(record: &mut [u8], snaplen: usize, has_headers: bool) -> Option<Frame<'_>> {
    // All offsets below are within it.
    let header: &[u8; HEADER_LEN] = record.first_chunk()?;
    let word = |at: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|byte| header[at + byte]));
    let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
    let status = word(STATUS);
    let mut start = usize::from(half(MAC));
    let mut len = word(SNAPLEN) as usize;
    let mut wire_len = word(LEN);
    let ts_ns = nanoseconds(word(SECONDS), word(NANOSECONDS));
    let tag = status & libc::TP_STATUS_VLAN_VALID != 0;
    let tci = word(VLAN_TCI) as u16;
    let tpid = match status & libc::TP_STATUS_VLAN_TPID_VALID {
        0 => TPID_8021Q,
        _ => half(VLAN_TPID),
    };
    let mut bits = 0;
    if header[PACKET_TYPE] == libc::PACKET_OUTGOING {
        bits |= flags::OUTBOUND;
    }
    if status & libc::TP_STATUS_CSUMNOTREADY != 0 {
        bits |= flags::CSUM_NOT_READY;
    }
    if status & libc::TP_STATUS_TS_RAW_HARDWARE != 0 {
        bits |= flags::HW_TIMESTAMP;
    }
    // Before the tag is put where it stands.
    let mut offload = match has_headers {
        true => offload_before(record, start)?,
        false => Offload::default(),
    };
    if offload.is_due() {
        bits |= flags::OFFLOAD;
    }
    if tag && len >= MACS_LEN && start >= HEADER_LEN + VLAN_TAG_LEN {
        record.get(start..start.checked_add(len)?)?;
        let header = start.checked_sub(SHORT_HEADER + VLAN_TAG_LEN);
        let header = header.filter(|&at| has_headers && at >= HEADER_LEN);
        if let Some(header) = header {
            record.copy_within(start - SHORT_HEADER..start, header);
        }
        record.copy_within(start..start + MACS_LEN, start - VLAN_TAG_LEN);
        start -= VLAN_TAG_LEN;
        let tag = start + MACS_LEN;
        record[tag..tag + 2].copy_from_slice(&tpid.to_be_bytes());
        record[tag + 2..tag + 4].copy_from_slice(&tci.to_be_bytes());
        len += VLAN_TAG_LEN;
        if offload.is_due() {
            offload.csum_start = offload.csum_start.saturating_add(VLAN_TAG_LEN as u16);
        }
        wire_len = wire_len.saturating_add(VLAN_TAG_LEN as u32);
        if let Some(header) = header.filter(|_| offload.is_due()) {
            let csum_start = offload.csum_start.to_ne_bytes();
            put(record, header + CSUM_START, &csum_start);
        }
        // Who reads it again, as this process was killed, is not to put it there again.
        put(record, MAC, &(start as u16).to_ne_bytes());
        put(record, SNAPLEN, &(len as u32).to_ne_bytes());
        put(record, LEN, &wire_len.to_ne_bytes());
        put(record, STATUS, &(status & !VLAN_STATUS).to_ne_bytes());
    }
    let record: &[u8] = record;
    let bytes = record.get(start..)?.get(..len)?;
    let bytes = &bytes[..len.min(snaplen)];
    let (tag, vlan_tci) = vlan_of(bytes);
    bits |= tag;
    let wire_len = wire_len.max(bytes.len() as u32);
    Some(Frame {
        bytes,
        wire_len,
        ts_ns,
        flags: bits,
        vlan_tci,
        offload,
        due: &[],
        is_form: false,
        from: 0,
    })
}

/// What the virtio-net header says that stands before the frame at `start`.
#[inline(always)]
fn offload_before(record: &[u8], start: usize) -> Option<Offload> {
    let header = record.get(start.checked_sub(SHORT_HEADER)?..start)?;
    let header: &[u8; SHORT_HEADER] = header.first_chunk()?;
    let offload = Offload::from_native_header(header);
    // Of a frame that is done, the rest says nothing.
    Some(match offload.is_due() {
        true => offload,
        false => Offload {
            flags: offload.flags & offload::flags::DATA_VALID,
            ..Offload::default()
        },
    })
}

#[inline(always)]
fn put(record: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = record.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// A record's time stamp.
fn time_of(record: &[u8]) -> Option<u64> {
    Some(nanoseconds(
        u32_at(record, SECONDS)?,
        u32_at(record, NANOSECONDS)?,
    ))
}

fn nanoseconds(seconds: u32, nanoseconds: u32) -> u64 {
    u64::from(seconds) * 1_000_000_000 + u64::from(nanoseconds)
}

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes
        .get(offset..)?
        .first_chunk()
        .map(|word| u32::from_ne_bytes(*word))
}

/// Destination and source address.
const MACS_LEN: usize = 12;
/// Tag of IEEE 802.1Q-2018, 9.4: TPID and TCI, big-endian.
const VLAN_TAG_LEN: usize = 4;
const TPID_8021Q: u16 = 0x8100;
/// In a virtio-net header.
const CSUM_START: usize = 6;
const VLAN_STATUS: u32 = libc::TP_STATUS_VLAN_VALID | libc::TP_STATUS_VLAN_TPID_VALID;

// tpacket_block_desc
const HEADER: usize = offset_of!(tpacket_block_desc, hdr);
const PACKETS: usize = HEADER + offset_of!(tpacket_hdr_v1, num_pkts);
const FIRST: usize = HEADER + offset_of!(tpacket_hdr_v1, offset_to_first_pkt);
const FILLING: usize = HEADER + offset_of!(tpacket_hdr_v1, seq_num);
const USED: usize = HEADER + offset_of!(tpacket_hdr_v1, blk_len);
// tpacket3_hdr, followed by a sockaddr_ll
const NEXT: usize = offset_of!(tpacket3_hdr, tp_next_offset);
const SECONDS: usize = offset_of!(tpacket3_hdr, tp_sec);
const NANOSECONDS: usize = offset_of!(tpacket3_hdr, tp_nsec);
const SNAPLEN: usize = offset_of!(tpacket3_hdr, tp_snaplen);
const LEN: usize = offset_of!(tpacket3_hdr, tp_len);
const STATUS: usize = offset_of!(tpacket3_hdr, tp_status);
const MAC: usize = offset_of!(tpacket3_hdr, tp_mac);
const VLAN_TCI: usize = offset_of!(tpacket3_hdr, hv1.tp_vlan_tci);
const VLAN_TPID: usize = offset_of!(tpacket3_hdr, hv1.tp_vlan_tpid);
const PACKET_TYPE: usize = size_of::<tpacket3_hdr>() + offset_of!(sockaddr_ll, sll_pkttype);
/// Length of both headers in bytes (`TPACKET3_HDRLEN`).
const HEADER_LEN: usize = libc::TPACKET3_HDRLEN;

#[cfg(test)]
#[path = "block_tests.rs"]
mod tests;

//! The index of a segment that is being written, from the bytes that go to the disk.
//!
//! It is made by the thread that writes, after the write: capturing does not wait for it. The segment
//! never depends on it. If it cannot be written, the rest of that segment has none, and `vnplug extract`
//! reads the segment itself.

use std::io;
use std::path::{Path, PathBuf};

use vnplug_frame::capfile::Order;
use vnplug_frame::capfile::classic::HEADER_BYTES;
use vnplug_frame::capfile::ng::{
    ENHANCED_PACKET, EPB_DROPCOUNT, INTERFACE, ISB_IFRECV, OPT_COMMENT, Opt, SECTION, STATISTICS,
    options,
};
use vnplug_frame::capfile::write::pcap::RECORD_BYTES;

use super::{Builder, Sidecar};
use crate::disk::Disk;
use crate::name::Format;
use crate::read::Note;

/// Follows the segments of one directory, one after the other.
#[derive(Debug, Default)]
pub struct Live {
    builder: Builder,
    /// The index; `None` if there is no segment, or it could not be written.
    path: Option<PathBuf>,
    pcapng: bool,
    /// Of each interface.
    link_types: Vec<u32>,
}

impl Live {
    /// A segment begins; its first bytes are the next that are [`written`](Self::written).
    pub fn begin(&mut self, segment: &Path, format: Format) {
        self.abandon();
        self.path = Some(Sidecar::path_of(segment));
        self.pcapng = format == Format::Pcapng;
    }

    /// These bytes, whole blocks as this crate encodes them, are in the segment at `offset`.
    pub fn written(&mut self, disk: &mut dyn Disk, offset: u64, bytes: &[u8]) {
        if self.path.is_none() {
            return;
        }
        match self.pcapng {
            true => self.blocks(offset, bytes),
            false => self.records(offset, bytes),
        }
        let ready = self.builder.take();
        self.append(disk, &ready);
    }

    /// The segment is closed and `len_bytes` long.
    pub fn finish(&mut self, disk: &mut dyn Disk, len_bytes: u64) {
        if self.path.is_some() {
            let rest = self.builder.finish(len_bytes);
            self.append(disk, &rest);
        }
        self.path = None;
        self.link_types.clear();
    }

    /// Nothing more is known of the segment.
    pub fn abandon(&mut self) {
        if self.path.take().is_some() {
            // NB: not `finish`, which wants to know where the last packet ends.
            self.builder = Builder::default();
        }
        self.link_types.clear();
    }

    fn append(&mut self, disk: &mut dyn Disk, bytes: &[u8]) {
        let Some(path) = self.path.as_ref().filter(|_| !bytes.is_empty()) else {
            return;
        };
        if let Err(error) = disk.append(path, bytes) {
            if error.kind() != io::ErrorKind::Unsupported {
                log::warn!("{}: no index from here on: {error}", path.display());
            }
            self.abandon();
        }
    }

    fn blocks(&mut self, mut offset: u64, mut bytes: &[u8]) {
        let mut warm = Warm::default();
        while let Some(block) = bytes
            .get(..word(bytes, 4) as usize)
            .filter(|b| b.len() >= 12)
        {
            warm.pass(bytes, block.len());
            match word(block, 0) {
                ENHANCED_PACKET if block.len() >= 32 => {
                    let link_type = self.link_types.get(word(block, 8) as usize);
                    let ts_ns = u64::from(word(block, 12)) << 32 | u64::from(word(block, 16));
                    let packet = block
                        .get(28..28 + word(block, 20) as usize)
                        .unwrap_or_default();
                    let link_type = link_type.copied().unwrap_or_default();
                    self.builder.packet(offset, link_type, ts_ns, packet);
                    let options = 28 + packet.len().next_multiple_of(4);
                    let marks = block.get(options..).map_or((0, false), marks);
                    self.builder.amount(word(block, 24), marks.0);
                    if marks.1 {
                        self.builder.mark();
                    }
                }
                INTERFACE => {
                    self.builder.definition(offset);
                    self.link_types.push(word(block, 8) & 0xffff);
                }
                SECTION => self.builder.definition(offset),
                STATISTICS if is_loss(block) => self.builder.mark(),
                _ => {}
            }
            offset += block.len() as u64;
            bytes = &bytes[block.len()..];
        }
    }

    fn records(&mut self, mut offset: u64, mut bytes: &[u8]) {
        if self.link_types.is_empty() && bytes.len() >= HEADER_BYTES {
            self.link_types.push(word(bytes, 20));
            offset += HEADER_BYTES as u64;
            bytes = &bytes[HEADER_BYTES..];
        }
        let link_type = self.link_types.first().copied().unwrap_or_default();
        let mut warm = Warm::default();
        while bytes.len() >= RECORD_BYTES {
            let Some(packet) = bytes.get(RECORD_BYTES..RECORD_BYTES + word(bytes, 8) as usize)
            else {
                return;
            };
            let len = RECORD_BYTES + packet.len();
            warm.pass(bytes, len);
            let ts_ns = u64::from(word(bytes, 0)) * 1_000_000_000 + u64::from(word(bytes, 4));
            self.builder.packet(offset, link_type, ts_ns, packet);
            self.builder.amount(word(bytes, 12), 0);
            offset += len as u64;
            bytes = &bytes[len..];
        }
    }
}

/// How far what is read next is in the cache.
///
/// The bytes went to the disk, and are cold. Each block says where the next one is, so that each would be waited
/// for by itself: they are touched ahead. Of long blocks only the headers are, where they are if the next ones
/// are as long.
#[derive(Default)]
struct Warm {
    bytes: usize,
    /// The length of blocks for which that is so; 0 is any.
    len: usize,
}

impl Warm {
    /// A block of this length is read at the beginning of `bytes`.
    #[inline]
    fn pass(&mut self, bytes: &[u8], len: usize) {
        let is_other = self.len != 0 && self.len != len;
        if self.bytes < len || is_other {
            *self = Self::touch(bytes, len, len >= LONG_BYTES && !is_other);
        }
        self.bytes -= len.min(self.bytes);
    }

    #[inline(never)]
    fn touch(bytes: &[u8], len: usize, headers: bool) -> Self {
        let (window, step, lines) = match headers {
            true => (LONG_BLOCKS * len, len, HEADER_LINES),
            false => (WARM_BYTES, LINE_BYTES, 1),
        };
        let next = &bytes[..bytes.len().min(window)];
        let mut all = 0;
        for line in 0..lines {
            let from = next.get(line * LINE_BYTES..).unwrap_or_default();
            all = from.iter().step_by(step).fold(all, |all, byte| all ^ byte);
        }
        std::hint::black_box(all);
        Self {
            bytes: next.len(),
            len: if headers { len } else { 0 },
        }
    }
}

/// `epb_dropcount` among the options of a block, and whether it has a comment; its last word is the block's length.
#[inline]
fn marks(mut options: &[u8]) -> (u64, bool) {
    let (mut dropped, mut is_commented) = (0, false);
    while options.len() > 4 {
        let (code, len) = (word(options, 0) & 0xffff, word(options, 0) >> 16);
        if code == DROPCOUNT && len == 8 {
            dropped = u64::from(word(options, 8)) << 32 | u64::from(word(options, 4));
        }
        is_commented |= code == COMMENT;
        let next = 4 + len.next_multiple_of(4) as usize;
        options = options.get(next..).unwrap_or_default();
    }
    (dropped, is_commented)
}

/// Whether statistics of ours tell a loss that no packet tells: their first option is a comment, and no total.
#[cold]
fn is_loss(block: &[u8]) -> bool {
    let mut note = Note::default();
    let body = block.get(..block.len() - 4).unwrap_or_default();
    for Opt { code, value, .. } in options(body, 20, Order::Little).flatten() {
        match code {
            OPT_COMMENT => note.comment = String::from_utf8_lossy(value).into_owned(),
            ISB_IFRECV => note.received = Some(0),
            _ => {}
        }
    }
    note.is_loss()
}

/// A little-endian number; 0 where there is none.
#[inline]
fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..).and_then(|rest| rest.first_chunk().copied());
    u32::from_le_bytes(word.unwrap_or_default())
}

const LINE_BYTES: usize = 64;
/// A part of a core's own cache.
const WARM_BYTES: usize = 64 << 10;
/// From this length on most lines of a block are none of its headers'.
const LONG_BYTES: usize = 1024;
const LONG_BLOCKS: usize = 16;
/// A block's header and those of a frame.
const HEADER_LINES: usize = 2;
const COMMENT: u32 = OPT_COMMENT as u32;
const DROPCOUNT: u32 = EPB_DROPCOUNT as u32;

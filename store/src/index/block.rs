//! One block of an index: 64 chunks, and what may be in them.

use crc32c::{crc32c, crc32c_append};

use super::code::{Parser, Writer};
use super::{CHUNKS, Key};

/// A part of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chunk {
    /// Where it begins in the segment.
    pub start: u64,
    /// Where it ends.
    pub end: u64,
    /// How many packets begin in it.
    pub packets: u64,
    /// The lowest timestamp in it, nanoseconds.
    pub low_ns: u64,
    /// The highest.
    pub high_ns: u64,
    /// Lengths of its packets on the wire, the sum.
    pub wire_bytes: u64,
    /// Packets that the recorder lost just before some of them (`epb_dropcount`).
    pub lost: u64,
}

/// A packet by which a segment is known again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probe {
    /// Where its block begins.
    pub offset: u64,
    /// Its timestamp.
    pub ts_ns: u64,
    /// How many bytes of it were captured.
    pub len_bytes: u32,
}

/// The keys of one kind, sorted, and the chunks that have them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Keys {
    /// Chunks that may have any key.
    pub(super) any: u64,
    pub(super) list: Vec<(u32, u64)>,
}

/// A block, read back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Block {
    pub(super) number: u32,
    pub(super) first: Probe,
    pub(super) last: Probe,
    /// Where section headers and interface descriptions are.
    pub(super) definitions: Vec<u64>,
    pub(super) chunks: Vec<Chunk>,
    pub(super) keys: [Keys; Key::ALL.len()],
}

impl Chunk {
    /// Bytes of packets in it, if each stands in an enhanced packet block without options.
    fn estimate(&self) -> u64 {
        (self.end - self.start).saturating_sub(self.packets.saturating_mul(32))
    }
}

impl Block {
    /// Its chunks, in the order of the segment; at most 64.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Where section headers and interface descriptions are in it.
    pub fn definitions(&self) -> &[u64] {
        &self.definitions
    }

    /// The part of the segment that it covers.
    pub fn range(&self) -> std::ops::Range<u64> {
        let start = self.chunks.first().map_or(0, |chunk| chunk.start);
        start..self.chunks.last().map_or(start, |chunk| chunk.end)
    }

    /// The set of all its chunks.
    pub fn all(&self) -> u64 {
        all(self.chunks.len())
    }

    /// The chunks that may have a key from `low` to `high`; bit n stands for chunk n.
    pub fn with(&self, key: Key, low: u32, high: u32) -> u64 {
        let keys = &self.keys[key as usize];
        let from = keys.list.partition_point(|&(key, _)| key < low);
        let within = keys.list[from..]
            .iter()
            .take_while(|&&(key, _)| key <= high);
        within.fold(keys.any, |set, &(_, chunks)| set | chunks)
    }

    /// The first block of an index.
    #[cfg(test)]
    pub(crate) fn first(index: &[u8]) -> Self {
        let len = u32::from_le_bytes(*index[8..].first_chunk().unwrap()) as usize;
        Self::decode(&index[FRAME_HEADER..FRAME_HEADER + len]).unwrap()
    }

    /// The chunks in which there may be anything: frames that the index does not understand.
    pub fn anything(&self) -> u64 {
        let any = self.keys.iter().map(|keys| keys.any);
        any.fold(self.all(), |set, any| set & any)
    }

    /// Writes it as the payload of a frame.
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        let mut writer = Writer(out);
        let range = self.range();
        writer.u32(self.number);
        writer.u64(range.start);
        writer.u64(range.end);
        for probe in [&self.first, &self.last] {
            writer.u64(probe.offset);
            writer.u64(probe.ts_ns);
            writer.u32(probe.len_bytes);
        }
        writer.number(self.definitions.len() as u64);
        let mut at = range.start;
        for &definition in &self.definitions {
            writer.number(definition.saturating_sub(at));
            at = definition;
        }
        writer.number(self.chunks.len() as u64);
        for chunk in &self.chunks {
            writer.number(chunk.end - chunk.start);
            writer.number(chunk.packets);
            writer.u64(chunk.low_ns);
            writer.number(chunk.high_ns - chunk.low_ns);
        }
        let all = self.all();
        for keys in &self.keys {
            writer.u64(keys.any);
            writer.number(keys.list.len() as u64);
            let mut before = 0;
            for &(key, chunks) in &keys.list {
                writer.number(u64::from(key - before));
                writer.chunks(chunks, all);
                before = key;
            }
        }
        for chunk in &self.chunks {
            writer.number(chunk.wire_bytes);
            writer.number(chunk.lost);
        }
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` if it is anything else.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut parser = Parser(bytes);
        let number = parser.u32()?;
        let (start, end) = (parser.u64()?, parser.u64()?);
        let mut probe = || {
            Some(Probe {
                offset: parser.u64()?,
                ts_ns: parser.u64()?,
                len_bytes: parser.u32()?,
            })
        };
        let (first, last) = (probe()?, probe()?);
        let count = parser.number()?;
        let mut definitions = Vec::new();
        let mut at = start;
        for _ in 0..count {
            at = at.checked_add(parser.number()?)?;
            definitions.push(at);
        }
        let count = usize::try_from(parser.number()?)
            .ok()
            .filter(|&n| n <= CHUNKS)?;
        let mut chunks = Vec::with_capacity(count);
        let mut at = start;
        for _ in 0..count {
            let chunk = Chunk {
                start: at,
                end: at.checked_add(parser.number()?)?,
                packets: parser.number()?,
                low_ns: parser.u64()?,
                ..Chunk::default()
            };
            let high_ns = chunk.low_ns.checked_add(parser.number()?)?;
            at = chunk.end;
            chunks.push(Chunk { high_ns, ..chunk });
        }
        let all = all(count);
        let mut keys: [Keys; Key::ALL.len()] = Default::default();
        for keys in &mut keys {
            keys.any = parser.u64()?;
            let count = parser.number()?;
            let mut before = 0_u32;
            for _ in 0..count {
                let key = before.checked_add(u32::try_from(parser.number()?).ok()?)?;
                keys.list.push((key, parser.chunks(all)?));
                before = key;
            }
        }
        // Indexes of before had no such numbers.
        let has_amounts = !parser.0.is_empty();
        for chunk in &mut chunks {
            (chunk.wire_bytes, chunk.lost) = match has_amounts {
                true => (parser.number()?, parser.number()?),
                false => (chunk.estimate(), 0),
            };
        }
        (at == end && parser.0.is_empty()).then_some(Self {
            number,
            first,
            last,
            definitions,
            chunks,
            keys,
        })
    }
}

/// Appends a frame with what `payload` writes.
pub(super) fn frame(out: &mut Vec<u8>, kind: u32, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(MAGIC);
    out.extend(kind.to_le_bytes());
    out.extend([0; 8]);
    payload(out);
    let len = (out.len() - start - FRAME_HEADER) as u32;
    out[start + 8..start + 12].copy_from_slice(&len.to_le_bytes());
    let crc = checksum(&out[start + 4..start + 12], &out[start + FRAME_HEADER..]);
    out[start + 12..start + 16].copy_from_slice(&crc.to_le_bytes());
}

/// Of a frame's kind and length, and of its payload.
pub(super) fn checksum(head: &[u8], payload: &[u8]) -> u32 {
    crc32c_append(crc32c(head), payload)
}

/// The set of the first `count` chunks.
pub(super) fn all(count: usize) -> u64 {
    match count {
        0 => 0,
        count => u64::MAX >> (CHUNKS - count.min(CHUNKS)),
    }
}

pub(super) const MAGIC: [u8; 4] = *b"VNX1";
pub(super) const FRAME_HEADER: usize = 16;
pub(super) const BLOCK: u32 = 1;
pub(super) const TRAILER: u32 = 2;

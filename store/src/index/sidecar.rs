//! Reads an index back, as far as it is whole and fits its segment, and makes it again.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::block::{self, Block, Chunk, FRAME_HEADER, MAGIC, Probe, checksum};
use super::builder::Builder;
use super::code::Parser;
use crate::archive::Keys;
use crate::name::{SegmentName, unpacked_path};
use crate::read::{End, Note, Packet, ReadError, Reader, Source, open_source};

/// What the end of an index says of a segment that is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// Length of the segment.
    pub len_bytes: u64,
    /// Blocks of the index.
    pub blocks: u32,
    /// Packets in the segment.
    pub packets: u64,
    /// The lowest timestamp in it; higher than `high_ns` if there are no packets.
    pub low_ns: u64,
    /// The highest.
    pub high_ns: u64,
}

/// An index, read block by block.
pub struct Sidecar {
    /// `None` when it has ended.
    file: Option<Box<dyn Source>>,
    /// Where the next frame begins.
    at: u64,
    blocks: u32,
    covered: u64,
    total: Chunk,
    definitions: Vec<u64>,
    trailer: Option<Trailer>,
}

impl Sidecar {
    /// Where the index of a segment is.
    pub fn path_of(segment: &Path) -> PathBuf {
        let (plain, packing) = unpacked_path(segment);
        plain.with_extension(if packing.age { "vnx.age" } else { "vnx" })
    }

    /// Opens the index of a segment. One that is missing has no blocks.
    pub fn open(segment: &Path) -> Self {
        Self::open_with(segment, &Keys::default())
    }

    /// As [`open`](Self::open); one that is encrypted is opened with these keys.
    pub fn open_with(segment: &Path, keys: &Keys) -> Self {
        Self {
            file: source(segment, keys),
            at: 0,
            blocks: 0,
            covered: 0,
            total: Chunk {
                low_ns: u64::MAX,
                ..Chunk::default()
            },
            definitions: Vec::new(),
            trailer: None,
        }
    }

    /// What the end of a segment's index says, if it is there, whole, and of a segment of this length.
    pub fn trailer(segment: &Path, len_bytes: u64, keys: &Keys) -> Option<Trailer> {
        Self::last(segment, keys).filter(|trailer| trailer.len_bytes == len_bytes)
    }

    /// What the end of a segment's index says, if it is of this segment when that was longer: of one with
    /// the same first packet. If that is not left, of one with a name that only a recorder gives.
    ///
    /// `segment` must not have been read from.
    pub fn trailer_of_longer(segment: &mut Reader, keys: &Keys) -> Option<Trailer> {
        let path = segment.path().to_owned();
        let trailer = Self::last(&path, keys)?;
        // NB: asked for after the trailer: a recorder that closes the segment cuts what it reserved first.
        if segment.len_bytes()? >= trailer.len_bytes {
            return None;
        }
        let frame = Self::open_with(&path, keys).frame()?;
        let block = unpack(&frame).filter(|&(kind, _)| kind == block::BLOCK);
        let first = block.and_then(|(_, payload)| Some(Block::decode(payload)?.first));
        let is_it = match segment.read() {
            Ok(Some(packet)) => first == Some(Probe::of(&packet)),
            Ok(None) => {
                let name = path.file_name().and_then(|name| name.to_str());
                name.is_some_and(|name| SegmentName::parse(name).is_some())
            }
            Err(_) => false,
        };
        is_it.then_some(trailer)
    }

    /// What its end says of whatever segment.
    fn last(segment: &Path, keys: &Keys) -> Option<Trailer> {
        let mut file = source(segment, keys)?;
        let len = file.len_bytes().ok()?;
        let at = len.checked_sub(TRAILER_FRAME as u64)?;
        let mut frame = [0; TRAILER_FRAME];
        file.read_exact_at(&mut frame, at).ok()?;
        let (kind, payload) = unpack(&frame)?;
        Trailer::decode(payload).filter(|_| kind == block::TRAILER)
    }

    /// The next block; `None` at the end, or where the index is torn or does not fit the segment,
    /// which `probe` reads.
    pub fn read(&mut self, probe: &mut Reader) -> Option<Block> {
        let block = self.try_read(probe);
        if block.is_none() {
            self.file = None;
        }
        block
    }

    /// The frame at the current place, which is not passed.
    fn frame(&mut self) -> Option<Vec<u8>> {
        let file = self.file.as_mut()?;
        let mut frame = vec![0; FRAME_HEADER];
        file.read_exact_at(&mut frame, self.at).ok()?;
        let len = Parser(&frame[8..]).u32()? as usize;
        if frame[..4] != MAGIC || len > MAX_PAYLOAD {
            return None;
        }
        frame.resize(FRAME_HEADER + len, 0);
        file.read_exact_at(&mut frame[FRAME_HEADER..], self.at + FRAME_HEADER as u64)
            .ok()?;
        Some(frame)
    }

    fn try_read(&mut self, probe: &mut Reader) -> Option<Block> {
        let frame = self.frame()?;
        let (kind, payload) = unpack(&frame)?;
        if kind == block::TRAILER {
            let trailer = Trailer::decode(payload)?;
            self.trailer = (trailer.blocks == self.blocks).then_some(trailer);
            return None;
        }
        let block = Block::decode(payload).filter(|_| kind == block::BLOCK)?;
        let range = block.range();
        let fits = block.number == self.blocks
            && range.start == self.covered
            && probe.len_bytes().is_some_and(|len| range.end <= len);
        if !fits {
            return None;
        }
        let known = self.definitions.len();
        self.definitions.extend(block.definitions());
        if !(self.finds(block.first, probe) && self.finds(block.last, probe)) {
            self.definitions.truncate(known);
            return None;
        }
        self.at += frame.len() as u64;
        self.blocks += 1;
        self.covered = range.end;
        for chunk in block.chunks() {
            self.total.packets += chunk.packets;
            self.total.low_ns = self.total.low_ns.min(chunk.low_ns);
            self.total.high_ns = self.total.high_ns.max(chunk.high_ns);
        }
        Some(block)
    }

    /// An index that had ended may have grown: reading goes on where it stopped.
    pub fn resume(&mut self, segment: &Path) {
        if self.file.is_none() && self.trailer.is_none() {
            self.file = source(segment, &Keys::default());
        }
    }

    /// Whether the segment has this packet.
    fn finds(&self, wanted: Probe, segment: &mut Reader) -> bool {
        segment.seek(wanted.offset, &self.definitions).is_ok()
            && matches!(segment.read(), Ok(Some(packet)) if wanted == Probe::of(&packet))
    }

    /// Up to which byte of the segment the blocks that were read go.
    pub fn covered(&self) -> u64 {
        self.covered
    }

    /// The section headers and interface descriptions of what is covered.
    pub fn definitions(&self) -> &[u64] {
        &self.definitions
    }

    /// What its end said, if all blocks were read and it is of a segment that was closed.
    pub fn end(&self) -> Option<Trailer> {
        self.trailer
    }
}

impl std::fmt::Debug for Sidecar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sidecar")
            .field("blocks", &self.blocks)
            .field("covered", &self.covered)
            .finish_non_exhaustive()
    }
}

fn source(segment: &Path, keys: &Keys) -> Option<Box<dyn Source>> {
    open_source(File::open(Sidecar::path_of(segment)).ok()?, keys).ok()
}

/// Writes the index of a segment that nobody writes any more, keeping what is good of it; true if that
/// was necessary. What is damaged in the segment is not covered. One that is encrypted is left alone: its
/// index would tell what is in it.
///
/// # Errors
/// [`ReadError`] if the segment cannot be opened, or the index cannot be written.
pub fn rebuild(segment: &Path) -> Result<bool, ReadError> {
    if unpacked_path(segment).1.age {
        return Ok(false);
    }
    let mut reader = Reader::open(segment)?;
    let mut sidecar = Sidecar::open(segment);
    while sidecar.read(&mut reader).is_some() {}
    let closed_at = sidecar.end().map(|trailer| trailer.len_bytes);
    if closed_at.is_some() && closed_at == reader.len_bytes() {
        return Ok(false);
    }
    let path = Sidecar::path_of(segment);
    let temporary = path.with_extension(format!("vnx.{}", std::process::id()));
    let written = extend(&mut reader, &sidecar, &path, &temporary);
    if written.is_err() {
        // What is left of it is of no use to anybody.
        let _ = fs::remove_file(&temporary);
    }
    written
        .map_err(|error| ReadError::io(&path, 0, error))
        .map(|()| true)
}

/// The damage in a segment that its index ends at, and [`rebuild`] with it.
pub fn damage(segment: &Path) -> Option<ReadError> {
    let mut reader = Reader::open(segment).ok()?;
    let mut sidecar = Sidecar::open(segment);
    while sidecar.read(&mut reader).is_some() {}
    let behind = |reader: &mut Reader| {
        reader.seek(sidecar.covered, &sidecar.definitions)?;
        while reader.read()?.is_some() {}
        Ok(())
    };
    behind(&mut reader).err().filter(ReadError::is_damage)
}

/// Copies what is good and adds the rest.
fn extend(reader: &mut Reader, sidecar: &Sidecar, old: &Path, new: &Path) -> io::Result<()> {
    let mut file = io::BufWriter::new(File::create(new)?);
    if sidecar.at > 0 {
        let mut good = io::Read::take(File::open(old)?, sidecar.at);
        io::copy(&mut good, &mut file)?;
    }
    let mut builder = Builder::resume(sidecar.blocks, sidecar.covered, sidecar.total);
    reader
        .seek(sidecar.covered, &sidecar.definitions)
        .map_err(io::Error::other)?;
    let end = scan(reader, sidecar.definitions.len(), &mut builder, |bytes| {
        file.write_all(&bytes)
    })?;
    let len_bytes = reader.len_bytes().unwrap_or(end);
    file.write_all(&builder.finish_torn(end, len_bytes))?;
    file.into_inner()
        .map_err(|error| error.into_error())?
        .sync_data()?;
    fs::rename(new, old)
}

/// Tells a builder everything that follows in the segment; up to where whole blocks go.
fn scan(
    reader: &mut Reader,
    mut known: usize,
    builder: &mut Builder,
    mut write: impl FnMut(Vec<u8>) -> io::Result<()>,
) -> io::Result<u64> {
    let mut bytes = Vec::new();
    reader.notes();
    loop {
        let (offset, interface, ts_ns, amount, is_commented) = match reader.read() {
            Ok(Some(packet)) => {
                bytes.clear();
                bytes.extend_from_slice(packet.bytes);
                let amount = (packet.wire_len, packet.lost);
                let is_commented = !packet.comment.is_empty();
                (
                    packet.offset,
                    packet.interface,
                    packet.ts_ns,
                    amount,
                    is_commented,
                )
            }
            Ok(None) => {
                if reader.notes().iter().any(Note::is_loss) {
                    builder.mark();
                }
                return Ok(match reader.end() {
                    End::Clean => reader.offset(),
                    End::Torn(at) | End::Unwritten(at) => at,
                });
            }
            Err(error) if error.is_damage() => return Ok(error.offset),
            Err(error) => return Err(io::Error::other(error)),
        };
        for &definition in &reader.definitions()[known..] {
            builder.definition(definition);
        }
        known = reader.definitions().len();
        if reader.notes().iter().any(Note::is_loss) {
            builder.mark();
        }
        let link_type = reader.interfaces()[interface].link_type;
        builder.packet(offset, link_type, ts_ns, &bytes);
        builder.amount(amount.0, amount.1);
        if is_commented {
            builder.mark();
        }
        let ready = builder.take();
        if !ready.is_empty() {
            write(ready)?;
        }
    }
}

impl Probe {
    fn of(packet: &Packet<'_>) -> Self {
        Self {
            offset: packet.offset,
            ts_ns: packet.ts_ns,
            len_bytes: packet.bytes.len() as u32,
        }
    }
}

impl Trailer {
    fn decode(payload: &[u8]) -> Option<Self> {
        let mut parser = Parser(payload);
        let trailer = Self {
            len_bytes: parser.u64()?,
            blocks: parser.u32()?,
            packets: parser.u64()?,
            low_ns: parser.u64()?,
            high_ns: parser.u64()?,
        };
        parser.0.is_empty().then_some(trailer)
    }
}

/// A frame's kind and payload, if it is whole.
fn unpack(frame: &[u8]) -> Option<(u32, &[u8])> {
    let (head, payload) = frame.split_first_chunk::<FRAME_HEADER>()?;
    let mut parser = Parser(&head[4..]);
    let (kind, len, crc) = (parser.u32()?, parser.u32()?, parser.u32()?);
    let whole = head[..4] == MAGIC
        && len as usize == payload.len()
        && crc == checksum(&head[4..12], payload);
    whole.then_some((kind, payload))
}

/// More than any block has.
const MAX_PAYLOAD: usize = 8 << 20;
const TRAILER_FRAME: usize = FRAME_HEADER + 36;

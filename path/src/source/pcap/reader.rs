//! Reading capture files of any origin, hostile ones included.
//!
//! The reader holds one buffer of 256 KiB, more only while a longer block is really there (at most
//! 8 MiB), whatever lengths a file claims. It never seeks. Packets are looked at in place:
//! [`Reader::peek`] never moves the buffer, [`Reader::fill`] does.

use std::io::{self, Read};
use std::ops::Range;

use vnplug_frame::capfile::classic::{Classic, HEADER_BYTES};
use vnplug_frame::capfile::ng::{Block, SECTION};
use vnplug_frame::capfile::{Bad, Order, Record};

use super::link;
use super::ng::Ng;

/// A file or stream of packets.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    buffer: Vec<u8>,
    /// The part of `buffer` that is read and not consumed.
    start: usize,
    end: usize,
    /// Where `buffer[start]` is in the file.
    offset: u64,
    at_eof: bool,
    /// Bytes of the packet that `peek` returned last.
    peeked: usize,
    format: Format,
    skipping: Option<Skipping>,
}

#[derive(Debug)]
enum Format {
    Unknown,
    Classic { file: Classic, fcs_bytes: u8 },
    Ng(Ng),
}

/// A long block of no interest, skipped without buffering.
#[derive(Debug, Clone, Copy)]
struct Skipping {
    /// Where the block began in the file.
    block_at: u64,
    /// Its bytes still to pass, the last four excluded.
    left: u64,
    block: Block,
}

/// A packet in the reader's buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    at: usize,
    cap_len: u32,
    /// Bytes on the wire, FCS excluded; at least what was captured.
    pub wire_len: u32,
    /// Nanoseconds since 1970-01-01 UTC.
    pub ts_ns: u64,
    /// The capturing host sent it.
    pub outbound: bool,
}

/// What [`Reader::peek`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peek {
    /// A whole packet; [`Reader::advance`] goes past it.
    Packet(Packet),
    /// [`Reader::fill`] and look again; this many bytes are needed at least.
    Starved(usize),
    /// The file ends here, after a whole packet or block.
    End,
}

/// The file is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadFile {
    /// The byte of the file where it shows; for a truncated record, where the record begins.
    pub offset: u64,
    /// What is wrong there.
    pub what: String,
}

impl std::fmt::Display for BadFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "byte {}: {}", self.offset, self.what)
    }
}

impl std::error::Error for BadFile {}

impl<R: Read> Reader<R> {
    /// A reader at the beginning of a file.
    pub fn new(input: R) -> Self {
        Self {
            input,
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
            offset: 0,
            at_eof: false,
            peeked: 0,
            format: Format::Unknown,
            skipping: None,
        }
    }

    /// Begins again, after the caller has moved the input to its beginning.
    pub fn restart(&mut self) {
        (self.start, self.end, self.offset, self.peeked) = (0, 0, 0, 0);
        (self.at_eof, self.format, self.skipping) = (false, Format::Unknown, None);
    }

    /// What the reader reads from.
    pub fn input(&mut self) -> &mut R {
        &mut self.input
    }

    /// Looks at the next packet. Asked again without [`Reader::advance`], answers the same.
    ///
    /// # Errors
    /// [`BadFile`] if no whole packet follows and none ever can; all packets before it came.
    pub fn peek(&mut self) -> Result<Peek, BadFile> {
        loop {
            if let Some(needed) = self.skip()? {
                return Ok(Peek::Starved(needed));
            }
            let input = &self.buffer[self.start..self.end];
            if self.at_eof && input.is_empty() && !matches!(self.format, Format::Unknown) {
                return Ok(Peek::End);
            }
            let step = self.format.step(input).map_err(|bad| BadFile {
                offset: self.offset + bad.at as u64,
                what: bad.what,
            })?;
            match step {
                Step::Need(needed) if self.at_eof => return Err(self.truncated(needed)),
                Step::Need(needed) => return Ok(Peek::Starved(needed)),
                Step::Skip(bytes) => self.consume(bytes),
                Step::Jump(block) => {
                    self.skipping = Some(Skipping {
                        block_at: self.offset,
                        left: u64::from(block.len) - 4,
                        block,
                    });
                }
                Step::Packet(bytes, mut packet) => {
                    packet.at += self.start;
                    self.peeked = bytes;
                    return Ok(Peek::Packet(packet));
                }
            }
        }
    }

    /// Goes past the packet that [`Reader::peek`] returned; its bytes stay until
    /// [`Reader::fill`].
    pub fn advance(&mut self) {
        let bytes = std::mem::take(&mut self.peeked);
        self.consume(bytes);
    }

    /// The captured bytes of a packet found since the last [`Reader::fill`].
    pub fn bytes(&self, packet: &Packet) -> &[u8] {
        &self.buffer[packet.range()]
    }

    /// Reads once, after [`Peek::Starved`]. Packets found before are gone. Returns the bytes read;
    /// 0 is the end of the file.
    ///
    /// # Errors
    /// The input's, `WouldBlock` among them; asking again is allowed.
    pub fn fill(&mut self, needed: usize) -> io::Result<usize> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == self.buffer.len() {
            // Doubled only when full of the file's bytes: a claimed length costs nothing.
            let longer = needed.min(2 * self.buffer.len()).max(self.buffer.len() + 1);
            self.buffer.resize(longer, 0);
        }
        loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(count) => {
                    self.at_eof = count == 0;
                    self.end += count;
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        self.offset += bytes as u64;
    }

    /// Passes over the block being skipped; `Some` if more bytes are needed for that.
    fn skip(&mut self) -> Result<Option<usize>, BadFile> {
        let Some(mut skipping) = self.skipping else {
            return Ok(None);
        };
        let here = skipping.left.min((self.end - self.start) as u64);
        self.consume(here as usize);
        skipping.left -= here;
        self.skipping = Some(skipping);
        let Skipping {
            block_at,
            left,
            block,
        } = skipping;
        if left > 0 || self.end - self.start < 4 {
            if self.at_eof {
                let got = self.offset + (self.end - self.start) as u64 - block_at;
                let what = format!("truncated: {got} bytes of a block of {}", block.len);
                return Err(BadFile {
                    offset: block_at,
                    what,
                });
            }
            return Ok(Some(4));
        }
        let trailer = &self.buffer[self.start..self.end];
        block.check_trailer(trailer).map_err(|bad| BadFile {
            offset: self.offset,
            what: bad.what,
        })?;
        self.consume(4);
        self.skipping = None;
        Ok(None)
    }

    fn truncated(&self, needed: usize) -> BadFile {
        let got = self.end - self.start;
        let what = match self.format {
            Format::Unknown if got == 0 => "the file is empty".to_owned(),
            _ => format!("truncated: {got} bytes here, at least {needed} are needed"),
        };
        BadFile {
            offset: self.offset,
            what,
        }
    }
}

impl Format {
    fn step(&mut self, input: &[u8]) -> Result<Step, Bad> {
        match self {
            Self::Classic { file, fcs_bytes } => classic(file, *fcs_bytes, input),
            Self::Ng(ng) => ng.step(input),
            Self::Unknown => self.identify(input),
        }
    }

    fn identify(&mut self, input: &[u8]) -> Result<Step, Bad> {
        if input.len() < 4 {
            return Ok(Step::Need(4));
        }
        if Order::Little.u32(input, 0) == SECTION {
            *self = Self::Ng(Ng::default());
            return Ok(Step::Skip(0));
        }
        if input.len() < HEADER_BYTES && Classic::is_magic(input) {
            return Ok(Step::Need(HEADER_BYTES));
        }
        if input.len() >= HEADER_BYTES
            && let Some(file) = Classic::parse(input)?
        {
            let fcs_bytes = link::ethernet(file.link, 20)?;
            *self = Self::Classic { file, fcs_bytes };
            return Ok(Step::Skip(HEADER_BYTES));
        }
        let kind = match input {
            [0x1f, 0x8b, ..] => "a gzip file; unpack it first",
            [0x28, 0xb5, 0x2f, 0xfd, ..] => "a zstd file; unpack it first",
            _ => "neither pcap nor pcapng",
        };
        let magic = Order::Big.u32(input, 0);
        Err(Bad::new(
            0,
            format!("{kind} (it begins with {magic:#010x})"),
        ))
    }
}

impl Packet {
    pub(super) fn new(at: usize, cap_len: u32, wire_len: u32, ts_ns: u64, fcs_bytes: u8) -> Self {
        let wire_len = wire_len.max(cap_len).saturating_sub(fcs_bytes.into());
        Self {
            at,
            cap_len: cap_len.min(wire_len),
            wire_len,
            ts_ns,
            outbound: false,
        }
    }

    fn range(&self) -> Range<usize> {
        self.at..self.at + self.cap_len as usize
    }
}

/// What a format finds in the bytes at hand.
pub(super) enum Step {
    /// Nothing yet: it takes this many bytes from here, perhaps more.
    Need(usize),
    /// This many bytes without a packet.
    Skip(usize),
    /// A block that need not be held.
    Jump(Block),
    /// This many bytes with a packet in them; its position counts from their beginning.
    Packet(usize, Packet),
}

/// The packet at the beginning of a part of a classic file.
fn classic(file: &Classic, fcs_bytes: u8, input: &[u8]) -> Result<Step, Bad> {
    let header_bytes = file.record_bytes;
    if input.len() < header_bytes {
        return Ok(Step::Need(header_bytes));
    }
    let record = file.record(input);
    check_length(record.cap_len, 8)?;
    let bytes = header_bytes + record.cap_len as usize;
    if input.len() < bytes {
        return Ok(Step::Need(bytes));
    }
    let Record {
        cap_len,
        wire_len,
        ts_ns,
    } = record;
    let packet = Packet::new(header_bytes, cap_len, wire_len, ts_ns, fcs_bytes);
    Ok(Step::Packet(bytes, packet))
}

/// Refuses what no ring can hold.
pub(super) fn check_length(cap_len: u32, at: usize) -> Result<(), Bad> {
    if cap_len <= MAX_PACKET {
        return Ok(());
    }
    let what = format!("captured length {cap_len}, the limit is {MAX_PACKET}");
    Err(Bad::new(at, what))
}

/// The longest captured length in bytes, as libpcap's for Ethernet and as a ring record's.
const MAX_PACKET: u32 = vnplug_ring::layout::MAX_SNAPLEN;
const BUFFER_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    /// A section header, then a block that claims `len`, then `follow` bytes of it.
    fn claim(kind: u32, len: u32, follow: usize) -> Reader<impl Read> {
        let mut file = Vec::new();
        for word in [
            SECTION,
            28,
            0x1a2b_3c4d,
            1,
            u32::MAX,
            u32::MAX,
            28,
            kind,
            len,
        ] {
            file.extend(word.to_le_bytes());
        }
        Reader::new(io::Cursor::new(file).chain(io::repeat(0).take(follow as u64)))
    }

    fn read_out<R: Read>(reader: &mut Reader<R>) -> (Result<(), BadFile>, usize) {
        let mut largest = 0;
        loop {
            largest = largest.max(reader.buffer.capacity());
            match reader.peek() {
                Ok(Peek::Packet(_)) => reader.advance(),
                Ok(Peek::Starved(needed)) => assert!(reader.fill(needed).is_ok()),
                Ok(Peek::End) => return (Ok(()), largest),
                Err(bad) => return (Err(bad), largest),
            }
        }
    }

    #[test]
    fn a_claimed_length_takes_no_memory() {
        let (result, memory) = read_out(&mut claim(6, 8 << 20, 1000));
        assert_eq!(result.unwrap_err().offset, 28);
        assert_eq!(memory, BUFFER_BYTES);
    }

    #[test]
    fn long_blocks_are_read_up_to_a_limit_and_the_others_skipped() {
        let (result, memory) = read_out(&mut claim(6, 8 << 20, 9 << 20));
        // Zeros: the block is whole, and its trailing length is not its length.
        assert_eq!(result.unwrap_err().offset, 28 + (8 << 20) - 4);
        assert!(memory <= 16 << 20);
        let (result, _) = read_out(&mut claim(6, (8 << 20) + 4, 9 << 20));
        assert_eq!(result.unwrap_err().offset, 32);
        let (result, memory) = read_out(&mut claim(0x0bad, 64 << 20, 65 << 20));
        assert_eq!(result.unwrap_err().offset, 28 + (64 << 20) - 4);
        assert_eq!(memory, BUFFER_BYTES);
        let (result, _) = read_out(&mut claim(0x0bad, u32::MAX - 3, 1 << 20));
        assert_eq!(result.unwrap_err().offset, 28);
    }
}

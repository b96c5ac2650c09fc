//! pcapng blocks (draft-ietf-opsawg-pcapng).

use super::input::Input;
use super::{Clock, End, Found, Interface, MAX_BLOCK_BYTES, Note, Problem, Step};
use crate::encode::pcapng::{
    INTERFACE_STATISTICS as STATISTICS, ISB_ENDTIME, ISB_IFDROP, ISB_IFRECV, ISB_STARTTIME,
    OPT_COMMENT,
};

/// What the blocks of a section refer to.
#[derive(Debug, Default)]
pub(super) struct State {
    big_endian: bool,
    /// The first interface of the section among all.
    first: usize,
    /// Of the section.
    interfaces: usize,
    /// Simple packets have no time: that of the packet before.
    last_ns: u64,
    /// Where section headers and interface descriptions are.
    pub(super) definitions: Vec<u64>,
}

impl State {
    /// Reads one block.
    pub(super) fn step(
        &mut self,
        input: &mut Input,
        interfaces: &mut Vec<Interface>,
        comment: &mut String,
        notes: Option<&mut Vec<Note>>,
    ) -> Result<Step, Problem> {
        let offset = input.offset();
        let Some(start) = input.peek(12)? else {
            let end = if input.buffered() == 0 {
                End::Clean
            } else {
                End::Torn(offset)
            };
            return Ok(Step::End(end));
        };
        let word = |at: usize| [start[at], start[at + 1], start[at + 2], start[at + 3]];
        let (kind, len, order) = (word(0), word(4), word(8));
        if (kind, len) == ([0; 4], [0; 4]) {
            return Ok(Step::End(End::Unwritten(offset)));
        }
        // A section header has the same type in both byte orders, and says which it is.
        if kind == SECTION.to_le_bytes() {
            self.big_endian = match order {
                [0x4d, 0x3c, 0x2b, 0x1a] => false,
                [0x1a, 0x2b, 0x3c, 0x4d] => true,
                _ => return Err(Problem::Bad("section header without the byte-order magic")),
            };
        }
        let kind = self.u32(kind);
        let len = self.u32(len);
        if len < 12 || !len.is_multiple_of(4) {
            return Err(Problem::Bad("block length that no block can have"));
        }
        let packets = matches!(kind, ENHANCED | SIMPLE | OLD_PACKET);
        let wanted = notes
            .filter(|notes| kind == STATISTICS && len <= LONGEST_NOTE && notes.len() < MAX_NOTES);
        if let Some(notes) = wanted {
            let Some(block) = input.peek(len as usize)? else {
                return Ok(Step::End(End::Torn(offset)));
            };
            notes.extend(self.note(block, interfaces));
            input.take(len as usize);
            return Ok(Step::Other);
        }
        if !packets && !matches!(kind, SECTION | INTERFACE) {
            return Ok(match input.skip(u64::from(len))? {
                true => Step::Other,
                false => Step::End(End::Torn(offset)),
            });
        }
        let len = len as usize;
        if len > MAX_BLOCK_BYTES {
            return Err(Problem::Bad("block of more than 16 MiB"));
        }
        let Some(block) = input.peek(len)? else {
            return Ok(Step::End(End::Torn(offset)));
        };
        let trailer = block[len - 4..].first_chunk().copied().unwrap_or_default();
        if self.u32(trailer) as usize != len {
            return Err(Problem::Bad("the two lengths of a block differ"));
        }
        let step = match kind {
            SECTION => self.section(block, offset, interfaces.len())?,
            INTERFACE => {
                let known = self.definitions.last().is_some_and(|&last| last >= offset);
                let interface = self.interface(block)?;
                if !known {
                    if interfaces.len() >= MAX_INTERFACES {
                        return Err(Problem::Bad("more than 65536 interfaces"));
                    }
                    interfaces.push(interface);
                    self.interfaces += 1;
                    self.definitions.push(offset);
                }
                Step::Other
            }
            _ => Step::Packet(self.packet(kind, block, offset, interfaces, comment)?),
        };
        input.take(len);
        Ok(step)
    }

    fn section(&mut self, block: &[u8], offset: u64, interfaces: usize) -> Result<Step, Problem> {
        if block.len() < 28 {
            return Err(Problem::Bad("section header that is too short"));
        }
        if self.u16(block, 12) != 1 {
            return Err(Problem::Bad("pcapng of a major version other than 1"));
        }
        // Read once more after a seek, it changes nothing.
        if self.definitions.last().is_none_or(|&last| last < offset) {
            if self.definitions.len().saturating_sub(interfaces) >= MAX_SECTIONS {
                return Err(Problem::Bad("more than 65536 sections"));
            }
            self.definitions.push(offset);
            (self.first, self.interfaces) = (interfaces, 0);
        }
        Ok(Step::Other)
    }

    fn interface(&self, block: &[u8]) -> Result<Interface, Problem> {
        if block.len() < 20 {
            return Err(Problem::Bad("interface description that is too short"));
        }
        let mut interface = Interface {
            link_type: u32::from(self.u16(block, 8)),
            snaplen: self.at(block, 12),
            name: String::new(),
            clock: Clock::new(1_000_000),
        };
        for (code, value) in self.options(&block[16..block.len() - 4]) {
            match (code, value) {
                (IF_NAME, name) => {
                    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
                    let name = String::from_utf8_lossy(name);
                    interface.name = name.chars().take(MAX_NAME).collect();
                }
                (IF_TSRESOL, &[resolution, ..]) => {
                    let exponent = u32::from(resolution & 0x7f);
                    let base: u64 = if resolution & 0x80 == 0 { 10 } else { 2 };
                    interface.clock.per_second = base
                        .checked_pow(exponent)
                        .ok_or(Problem::Bad("timestamps of a resolution beyond 64 bits"))?;
                }
                (IF_TSOFFSET, value) if value.len() >= 8 => {
                    interface.clock.offset_s = self.u64(value) as i64;
                }
                _ => {}
            }
        }
        Ok(interface)
    }

    fn packet(
        &mut self,
        kind: u32,
        block: &[u8],
        offset: u64,
        interfaces: &[Interface],
        comment: &mut String,
    ) -> Result<Found, Problem> {
        const SHORT: Problem = Problem::Bad("packet block that is too short");
        let (interface, header) = match kind {
            SIMPLE => (0, 12),
            OLD_PACKET => (usize::from(self.u16(block, 8)), 28),
            _ => (self.at(block, 8) as usize, 28),
        };
        if block.len() < header + 4 {
            return Err(SHORT);
        }
        if interface >= self.interfaces {
            return Err(Problem::Bad(
                "packet of an interface that was not described",
            ));
        }
        let interface = self.first + interface;
        let room = block.len() - header - 4;
        let Interface { clock, snaplen, .. } = &interfaces[interface];
        let (len, wire_len) = if kind == SIMPLE {
            let wire_len = self.at(block, 8);
            let limit = if *snaplen == 0 { u32::MAX } else { *snaplen };
            (wire_len.min(limit) as usize, wire_len)
        } else {
            let units = u64::from(self.at(block, 12)) << 32 | u64::from(self.at(block, 16));
            self.last_ns = clock.ns(units);
            (self.at(block, 20) as usize, self.at(block, 24))
        };
        if len > room {
            return Err(Problem::Bad("packet that is longer than its block"));
        }
        let (mut flags, mut lost) = (0, 0);
        comment.clear();
        if kind == ENHANCED {
            let options = header + len.next_multiple_of(4);
            let options = block.get(options..block.len() - 4).unwrap_or_default();
            for (code, value) in self.options(options) {
                match (code, value.len()) {
                    (EPB_FLAGS, 4) => flags = self.at(value, 0),
                    (EPB_DROPCOUNT, 8) => lost = self.u64(value),
                    (OPT_COMMENT, _) => {
                        if !comment.is_empty() {
                            comment.push('\n');
                        }
                        comment.push_str(&String::from_utf8_lossy(value));
                    }
                    _ => {}
                }
            }
        }
        Ok(Found {
            ts_ns: self.last_ns,
            wire_len,
            interface,
            flags,
            lost,
            offset,
            skip: header,
            len,
        })
    }

    /// Statistics; `None` if they are of no interface that is known.
    fn note(&self, block: &[u8], interfaces: &[Interface]) -> Option<Note> {
        let number = self.at(block, 8) as usize;
        let options = block.get(20..block.len() - 4)?;
        let interface = interfaces.get(self.first.checked_add(number)?)?;
        let time = |bytes: &[u8]| {
            let units = u64::from(self.at(bytes, 0)) << 32 | u64::from(self.at(bytes, 4));
            interface.clock.ns(units)
        };
        let mut note = Note {
            at_ns: time(&block[12..]),
            ..Note::default()
        };
        let (mut from_ns, mut to_ns) = (None, None);
        for (code, value) in self.options(options) {
            match (code, value.len()) {
                (OPT_COMMENT, _) if note.comment.is_empty() => {
                    note.comment = String::from_utf8_lossy(value).into_owned();
                }
                (ISB_STARTTIME, 8) => from_ns = Some(time(value)),
                (ISB_ENDTIME, 8) => to_ns = Some(time(value)),
                (ISB_IFRECV, 8) => note.received = Some(self.u64(value)),
                (ISB_IFDROP, 8) => note.dropped = Some(self.u64(value)),
                _ => {}
            }
        }
        note.range_ns = from_ns.zip(to_ns);
        Some(note)
    }

    /// Options up to the end mark, or to the first that does not fit.
    fn options<'a>(&self, mut rest: &'a [u8]) -> impl Iterator<Item = (u16, &'a [u8])> + use<'a> {
        let big_endian = self.big_endian;
        std::iter::from_fn(move || {
            let (head, tail) = rest.split_first_chunk::<4>()?;
            let half = |a, b| match big_endian {
                true => u16::from_be_bytes([a, b]),
                false => u16::from_le_bytes([a, b]),
            };
            let (code, len) = (half(head[0], head[1]), usize::from(half(head[2], head[3])));
            let value = tail.get(..len).filter(|_| code != 0)?;
            rest = tail.get(len.next_multiple_of(4)..).unwrap_or_default();
            Some((code, value))
        })
    }

    fn u32(&self, bytes: [u8; 4]) -> u32 {
        match self.big_endian {
            true => u32::from_be_bytes(bytes),
            false => u32::from_le_bytes(bytes),
        }
    }

    fn at(&self, bytes: &[u8], at: usize) -> u32 {
        let word = bytes.get(at..).and_then(|rest| rest.first_chunk().copied());
        self.u32(word.unwrap_or_default())
    }

    /// The first eight bytes.
    fn u64(&self, bytes: &[u8]) -> u64 {
        let (first, second) = (u64::from(self.at(bytes, 0)), u64::from(self.at(bytes, 4)));
        match self.big_endian {
            true => first << 32 | second,
            false => second << 32 | first,
        }
    }

    fn u16(&self, bytes: &[u8], at: usize) -> u16 {
        let half = [bytes[at], bytes[at + 1]];
        match self.big_endian {
            true => u16::from_be_bytes(half),
            false => u16::from_le_bytes(half),
        }
    }
}

/// Block types.
pub(super) const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const OLD_PACKET: u32 = 2;
const SIMPLE: u32 = 3;
const ENHANCED: u32 = 6;

/// Options.
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const IF_TSOFFSET: u16 = 14;
const EPB_FLAGS: u16 = 2;
const EPB_DROPCOUNT: u16 = 4;

const MAX_INTERFACES: usize = 1 << 16;
const MAX_SECTIONS: usize = 1 << 16;
const MAX_NAME: usize = 64;
/// Longer statistics are passed over, and so is what comes behind so many.
const LONGEST_NOTE: u32 = 64 << 10;
const MAX_NOTES: usize = 4096;

//! Classic pcap files.

use super::input::Input;
use super::{Clock, End, Found, Interface, MAX_BLOCK_BYTES, NS, Problem, Step};

/// What the file's header says of all packets.
#[derive(Debug)]
pub(super) struct State {
    big_endian: bool,
    nanoseconds: bool,
    /// Bytes of a packet's header.
    header: usize,
    first: First,
}

/// Which of a packet's two lengths comes first.
#[derive(Debug, Clone, Copy)]
enum First {
    /// Captured, on the wire: since version 2.4.
    Captured,
    /// Version 2.3 had both orders; the captured one is not the longer.
    Shorter,
    /// Up to version 2.2, and in AIX's 543.0.
    Wire,
}

impl State {
    /// Reads the file's header, which begins with `magic`; `None` if the file ends in it.
    pub(super) fn begin(
        input: &mut Input,
        magic: [u8; 4],
    ) -> Result<Option<(Self, Interface)>, Problem> {
        let (big_endian, value) = match magic[0] {
            0xa1 => (true, u32::from_be_bytes(magic)),
            _ => (false, u32::from_le_bytes(magic)),
        };
        let (nanoseconds, header) = match value {
            0xa1b2_c3d4 => (false, 16),
            0xa1b2_3c4d => (true, 16),
            // Alexey Kuznetsov's format: eight more bytes in front of each packet.
            0xa1b2_cd34 => (false, 24),
            _ => return Err(Problem::Bad("neither pcapng nor pcap")),
        };
        let mut state = Self {
            big_endian,
            nanoseconds,
            header,
            first: First::Captured,
        };
        let Some(start) = input.peek(24)? else {
            return Ok(None);
        };
        let halves = [start[4], start[5], start[6], start[7]];
        let version = match big_endian {
            true => u32::from_be_bytes(halves),
            false => u32::from_le_bytes(halves).rotate_left(16),
        };
        state.first = match (version >> 16, version & 0xffff) {
            (2, 4..) => First::Captured,
            (2, 3) => First::Shorter,
            (2, _) | (543, 0) => First::Wire,
            _ => return Err(Problem::Bad("pcap of an unknown version")),
        };
        let interface = Interface {
            // The upper bits tell of frame check sequences.
            link_type: state.u32(start, 20) & 0xffff,
            snaplen: state.u32(start, 16),
            name: String::new(),
            clock: Clock::new(NS),
        };
        input.take(24);
        Ok(Some((state, interface)))
    }

    pub(super) fn step(&mut self, input: &mut Input) -> Result<Step, Problem> {
        let offset = input.offset();
        let Some(head) = input.peek(self.header)? else {
            let end = if input.buffered() == 0 {
                End::Clean
            } else {
                End::Torn(offset)
            };
            return Ok(Step::End(end));
        };
        if head.iter().all(|&byte| byte == 0) {
            return Ok(Step::End(End::Unwritten(offset)));
        }
        if head.iter().all(|&byte| byte == 0xff) && is_padding(input, offset)? {
            return Ok(Step::End(End::Torn(offset)));
        }
        // NB: what lies behind may have moved the buffer.
        let Some(head) = input.peek(self.header)? else {
            return Ok(Step::End(End::Torn(offset)));
        };
        let (seconds, part) = (self.u32(head, 0), self.u32(head, 4));
        let (first, second) = (self.u32(head, 8), self.u32(head, 12));
        let (len, wire_len) = match self.first {
            First::Shorter if first > second => (second, first),
            First::Wire => (second, first),
            _ => (first, second),
        };
        let len = len as usize;
        if len > MAX_BLOCK_BYTES {
            return Err(Problem::Bad("packet of more than 16 MiB"));
        }
        let part = u64::from(part) * if self.nanoseconds { 1 } else { 1000 };
        let found = Found {
            ts_ns: u64::from(seconds) * NS + part,
            wire_len,
            interface: 0,
            flags: 0,
            lost: 0,
            offset,
            skip: self.header,
            len,
        };
        if input.peek(self.header + len)?.is_none() {
            return Ok(Step::End(End::Torn(offset)));
        }
        input.take(self.header + len);
        Ok(Step::Packet(found))
    }

    fn u32(&self, bytes: &[u8], at: usize) -> u32 {
        let word = [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        match self.big_endian {
            true => u32::from_be_bytes(word),
            false => u32::from_le_bytes(word),
        }
    }
}

/// Whether this is what a recorder writes behind the end of a file until it has cut it there, and what
/// stays if it is killed before: ones up to the end of the disk's block, and nothing or zeros behind it.
fn is_padding(input: &mut Input, offset: u64) -> Result<bool, Problem> {
    let len = (offset.next_multiple_of(DISK_BLOCK) - offset) as usize;
    let seen = match input.peek(len + BEHIND)? {
        Some(seen) => seen,
        None => input.rest(),
    };
    let (ones, behind) = seen.split_at(len.min(seen.len()));
    let is = |bytes: &[u8], what| bytes.iter().all(|&byte| byte == what);
    Ok(len > 0 && is(ones, 0xff) && is(behind, 0))
}

/// What the recorder's writes are a multiple of.
const DISK_BLOCK: u64 = 4096;
/// So much of what follows is looked at.
const BEHIND: usize = 64;
/// Bytes before the first packet.
pub(super) const FILE_HEADER: u64 = 24;

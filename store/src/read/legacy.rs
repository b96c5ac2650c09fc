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
        let state = Self {
            big_endian,
            nanoseconds,
            header,
        };
        let Some(start) = input.peek(24)? else {
            return Ok(None);
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
        let all = |value| head.iter().all(|&byte| byte == value);
        let (zeros, ones) = (all(0), all(0xff));
        // The recorder's last write is a whole block of the disk for a moment, with ones behind the end.
        let block_end = offset.next_multiple_of(4096);
        if zeros || ones && input.len_bytes() == Some(block_end) {
            return Ok(Step::End(End::Unwritten(offset)));
        }
        let Some(head) = input.peek(self.header)? else {
            return Ok(Step::End(End::Torn(offset)));
        };
        let (seconds, part) = (self.u32(head, 0), self.u32(head, 4));
        let (len, wire_len) = (self.u32(head, 8) as usize, self.u32(head, 12));
        if len > MAX_BLOCK_BYTES {
            return Err(Problem::Bad("packet of more than 16 MiB"));
        }
        let part = u64::from(part) * if self.nanoseconds { 1 } else { 1000 };
        let found = Found {
            ts_ns: u64::from(seconds) * NS + part,
            wire_len,
            interface: 0,
            flags: 0,
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

/// Bytes before the first packet.
pub(super) const FILE_HEADER: u64 = 24;

//! The classic pcap file: a header of 24 bytes, then packets.
//!
//! Both byte orders; microseconds, nanoseconds, and Kuznetzov's modified format with its longer
//! packet header. Versions 2.0 to 2.4 and AIX's 543.0, whose lengths are swapped.

use super::link;
use super::reader::{Bad, MAX_PACKET, Packet, Step, u16_at, u32_at};

/// How to read this file's packets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Legacy {
    big_endian: bool,
    /// Nanoseconds in a unit of the fraction.
    unit_ns: u64,
    header_bytes: usize,
    first_length: Length,
    fcs_bytes: u8,
}

/// Which of the two lengths comes first: captured (since version 2.3), or on the wire.
#[derive(Debug, Clone, Copy)]
enum Length {
    Captured,
    Wire,
    /// Version 2.3 wrote both; the captured one is not the longer.
    Shorter,
}

impl Legacy {
    /// Whether `head`, at least four bytes, begins as a pcap file does.
    pub(super) fn is_magic(head: &[u8]) -> bool {
        let known = |word| matches!(word, MAGIC_US | MAGIC_NS | MAGIC_MODIFIED);
        known(u32_at(head, 0, true)) || known(u32_at(head, 0, false))
    }

    /// Reads the file's header; `None` if the magic is of no pcap file. `head` has
    /// [`HEADER_BYTES`].
    pub(super) fn parse(head: &[u8]) -> Result<Option<Self>, Bad> {
        let big_endian = matches!(u32_at(head, 0, true), MAGIC_US | MAGIC_NS | MAGIC_MODIFIED);
        let (unit_ns, header_bytes) = match u32_at(head, 0, big_endian) {
            MAGIC_US => (1000, 16),
            MAGIC_NS => (1, 16),
            MAGIC_MODIFIED => (1000, 24),
            _ => return Ok(None),
        };
        let version = (u16_at(head, 4, big_endian), u16_at(head, 6, big_endian));
        let first_length = match version {
            (2, 4) => Length::Captured,
            (2, 3) => Length::Shorter,
            (2, 0..=2) | (543, 0) => Length::Wire,
            (major, minor) => {
                let what = format!("pcap version {major}.{minor}, only 2.0 to 2.4 are known");
                return Err(Bad { at: 4, what });
            }
        };
        let fcs_bytes = link::ethernet(u32_at(head, 20, big_endian), 20)?;
        Ok(Some(Self {
            big_endian,
            unit_ns,
            header_bytes,
            first_length,
            fcs_bytes,
        }))
    }

    /// The packet at the beginning of `input`.
    pub(super) fn step(&self, input: &[u8]) -> Result<Step, Bad> {
        if input.len() < self.header_bytes {
            return Ok(Step::Need(self.header_bytes));
        }
        let word = |at| u32_at(input, at, self.big_endian);
        let (first, second) = (word(8), word(12));
        let (cap_len, wire_len) = match self.first_length {
            Length::Wire => (second, first),
            Length::Shorter if first > second => (second, first),
            _ => (first, second),
        };
        if cap_len > MAX_PACKET {
            let what = format!("captured length {cap_len}, the limit is {MAX_PACKET}");
            return Err(Bad { at: 8, what });
        }
        let record_bytes = self.header_bytes + cap_len as usize;
        if input.len() < record_bytes {
            return Ok(Step::Need(record_bytes));
        }
        let ts_ns = u64::from(word(0)) * 1_000_000_000 + u64::from(word(4)) * self.unit_ns;
        let packet = Packet::new(self.header_bytes, cap_len, wire_len, ts_ns, self.fcs_bytes);
        Ok(Step::Packet(record_bytes, packet))
    }
}

/// Bytes of the file's header.
pub(super) const HEADER_BYTES: usize = 24;
const MAGIC_US: u32 = 0xa1b2_c3d4;
const MAGIC_NS: u32 = 0xa1b2_3c4d;
const MAGIC_MODIFIED: u32 = 0xa1b2_cd34;

//! Packets as capture files have them, little-endian, written into memory that is there already.
//!
//! [`pcapng`] is what recordings are; [`pcap`] is for programs that read nothing else.

pub mod pcap;
pub mod pcapng;

use vnplug_ring::Packet;

/// An interface of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The device's name.
    pub name: String,
    /// A DLT; 1 = Ethernet.
    pub link_type: u32,
    /// Longest captured length, 0 = no limit.
    pub snaplen: u32,
    /// The filter expression, empty = none.
    pub filter: String,
}

impl Interface {
    /// The number of its link type in files.
    pub fn file_link_type(&self) -> u32 {
        // tcpdump.org/linktypes: the one DLT of ours whose number in files is another.
        match self.link_type {
            DLT_RAW => LINKTYPE_RAW,
            other => other,
        }
    }
}

/// What a file says of a packet beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Nanoseconds since 1970.
    pub ts_ns: u64,
    /// Bytes on the wire; no file may have fewer than were captured.
    pub wire_len: u32,
}

impl Head {
    /// Of a packet out of a ring.
    #[inline]
    pub fn of(packet: &Packet<'_>) -> Self {
        Self {
            ts_ns: packet.meta.ts_ns,
            wire_len: packet.meta.wire_len.max(packet.bytes.len() as u32),
        }
    }
}

/// Writes little-endian numbers and bytes one after the other; the caller has made sure of the room.
struct Pen<'a> {
    memory: &'a mut [u8],
    at: usize,
}

impl Pen<'_> {
    #[inline]
    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    #[inline]
    fn bytes(&mut self, bytes: &[u8]) {
        self.memory[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    /// Zeros up to a multiple of four bytes after something of `len` bytes.
    #[inline]
    fn pad(&mut self, len: usize) {
        let zeros = len.next_multiple_of(4) - len;
        self.bytes(&[0; 3][..zeros]);
    }
}

const DLT_RAW: u32 = 12;
const LINKTYPE_RAW: u32 = 101;

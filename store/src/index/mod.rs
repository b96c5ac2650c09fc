//! The index beside a segment, `.vnx`: where in it which times, addresses, ports, protocols and VLANs
//! may be.
//!
//! A segment is divided into **chunks** of about 256 KiB that begin where a packet's block begins; 64
//! of them make a **block** of the index (16 MiB of the segment). For each block the index has the
//! chunks' places, times and numbers of packets, and for each kind of [`Key`] a sorted list of the
//! keys that occur, each with the set of chunks it occurs in. A question ("which chunks may have
//! 10.1.2.3?") is answered with a set of 64 bits. A chunk that is not in the answer has no packet that
//! is looked for; one that is may have none either.
//!
//! While a segment is written a [`Builder`] sees its packets and hands out finished blocks, which are
//! appended to the index. The index is never needed: what it does not cover is read from the segment.
//!
//! ```text
//! frame    "VNX1" | kind u32 | length u32 | CRC-32C u32 of kind, length, payload | payload
//! kind 1   a block                     kind 2   the trailer: the segment is closed
//! block    number u32 | start u64 | end u64 | first packet, last packet: offset u64, ns u64, bytes u32
//!          definitions: count, then distances | chunks: count, then length, packets, lowest ns u64,
//!          highest - lowest | for each kind: chunks that may have any key u64, count of keys,
//!          then distance to the key before and its chunks | for each chunk: bytes on the wire,
//!          packets lost before its packets
//! trailer  segment length u64 | blocks u32 | packets u64 | lowest ns u64 | highest ns u64
//! ```
//!
//! Numbers are little-endian; those without a type are LEB128. Blocks cover the segment from its first
//! byte on without gaps. A frame whose checksum does not fit ends the index: a torn end loses its last
//! block only. The first and the last packet of each block must be in the segment as the block says,
//! else the index is another file's and ends there ([`Sidecar`]).

mod block;
mod builder;
mod code;
mod keys;
mod live;
mod sidecar;
mod table;

pub use block::{Block, Chunk, Probe};
pub use builder::Builder;
pub use live::Live;
pub use sidecar::{Sidecar, Trailer, damage, rebuild};

/// What packets are found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// Ethertypes, also those after VLAN tags; 0 stands for all lengths (below 0x600).
    Ethertype,
    /// VLAN numbers of all tags.
    Vlan,
    /// Protocols of IPv4, next headers of IPv6.
    Protocol,
    /// Ports of TCP, UDP and SCTP, source and destination.
    Port,
    /// IPv4 addresses, source and destination, also those in ARP.
    V4,
    /// Marks of IPv6 addresses ([`v6_mark`]).
    V6,
}

impl Key {
    /// All kinds, in the order of the file.
    pub const ALL: [Self; 6] = [
        Self::Ethertype,
        Self::Vlan,
        Self::Protocol,
        Self::Port,
        Self::V4,
        Self::V6,
    ];
}

/// What an IPv6 address is found by: 32 bits, which others may share.
pub fn v6_mark(address: [u8; 16]) -> u32 {
    let [a, b] = [0, 8].map(|at| {
        let half = address[at..].first_chunk().copied().unwrap_or_default();
        u64::from_be_bytes(half)
    });
    let mixed = (a ^ b.rotate_left(29)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        ^ b.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
    (mixed ^ mixed >> 32) as u32
}

/// A chunk ends at the first packet that begins this many bytes after its start.
const CHUNK_BYTES: u64 = 256 << 10;
/// Chunks of a block: the bits of a set.
const CHUNKS: usize = 64;

#[cfg(test)]
mod tests;

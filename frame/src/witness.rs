//! What a generated frame carries, so that any receiver can prove what happened to it.
//!
//! A witness frame is an ordinary Ethernet frame (UDP, TCP or ICMP over IPv4 or IPv6, perhaps with
//! a VLAN tag) whose last bytes are a trailer. All fields are big-endian; offsets count from the
//! end of the frame, FCS excluded.
//!
//! ```text
//! plain (UDP over IPv4)                 balanced (everything else)
//!  -18  magic      76 57                 -30  magic      76 42
//!  -16  run         4 bytes              -28  run         4 bytes
//!  -12  sequence    8 bytes              -24  ~sequence   8 bytes
//!   -4  CRC-32C     4 bytes              -16  sequence    8 bytes
//!                                         -8  CRC-32C     4 bytes
//!                                         -4  ~CRC-32C    4 bytes
//! ```
//!
//! The CRC covers the frame from its first Ethernet byte to the byte before the CRC. **Nothing is
//! exempt**: a bridge, a ring, a recorder must deliver the frame as it was. A router that lowers a
//! TTL or a stage that strips a VLAN tag without putting it back makes the frame corrupt.
//!
//! Why two trailers: UDP over IPv4 may send checksum 0, so 18 bytes fit the shortest frame (60
//! bytes). Other protocols need a valid checksum. There each changing word is accompanied by its
//! complement, so the Internet checksum is the same for every sequence and is computed once.
//!
//! The **flow** is not in the trailer: it is the addresses and ports ([`Shape`]). The **run** tells
//! one start of a generator from the next. The **sequence** counts from 0 per run, over all flows.
//!
//! [`parse`] tells three things apart: a witness, a damaged witness ([`Parsed::Corrupt`]: one of the
//! generator's two Ethernet addresses is there, but the rest does not fit; also a frame cut short), and
//! a foreign frame. A damaged one whose addresses were both replaced counts as foreign, and its
//! sequence is missing. [`Checker`] judges frames in the order they came.

mod checker;
mod seed;
mod set;
mod shape;
mod stamp;

pub use checker::{Checker, MAX_RUNS, Report, View};
pub use seed::seed;
pub use set::{Gaps, Inserted, SeqSet};
pub use shape::{BadLength, Protocol, Shape, make};
pub use stamp::Stamp;

use crc32c::crc32c;

/// What identifies one generated frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Witness {
    /// The generator's start it belongs to.
    pub run: u32,
    /// Its place in that run, from 0.
    pub seq: u64,
}

/// What a received frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// An undamaged witness frame.
    Witness(Witness),
    /// A witness frame whose bytes changed on the way, or that was cut short.
    Corrupt,
    /// Not from a generator.
    Foreign,
}

/// Reads and verifies the trailer of `frame` (Ethernet header included, FCS excluded).
pub fn parse(frame: &[u8]) -> Parsed {
    if let Some((head, trailer)) = frame.split_last_chunk::<PLAIN_BYTES>()
        && trailer[..2] == PLAIN_MAGIC
        && be32(trailer, 14) == crc32c(&frame[..head.len() + PLAIN_BYTES - 4])
    {
        return Parsed::Witness(Witness {
            run: be32(trailer, 2),
            seq: be64(trailer, 6),
        });
    }
    if let Some((head, trailer)) = frame.split_last_chunk::<BALANCED_BYTES>()
        && trailer[..2] == BALANCED_MAGIC
    {
        let crc = crc32c(&frame[..head.len() + BALANCED_BYTES - 8]);
        let seq = be64(trailer, 14);
        if be32(trailer, 22) == crc && be32(trailer, 26) == !crc && be64(trailer, 6) == !seq {
            return Parsed::Witness(Witness {
                run: be32(trailer, 2),
                seq,
            });
        }
    }
    // NB: the magic alone tells nothing: one in 32,768 frames of random bytes ends with one of the two.
    match frame.get(..6) == Some(&DESTINATION_MAC) || frame.get(6..12) == Some(&SOURCE_MAC) {
        true => Parsed::Corrupt,
        false => Parsed::Foreign,
    }
}

/// Bytes of the trailer of UDP over IPv4.
const PLAIN_BYTES: usize = 18;
/// Bytes of the trailer of every other protocol.
const BALANCED_BYTES: usize = 30;
const PLAIN_MAGIC: [u8; 2] = *b"vW";
const BALANCED_MAGIC: [u8; 2] = *b"vB";
/// Locally administered; the generator's frames go from here to there.
const SOURCE_MAC: [u8; 6] = *b"\x02vnplg";
const DESTINATION_MAC: [u8; 6] = *b"\x02vnplh";

fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

#[cfg(test)]
mod tests;

//! The ring's layout, version 1: a specification with code in it.
//!
//! All integers are little-endian. Offsets are bytes from the start of the ring, which starts on a
//! page of its region. Positions (`head`, `tail`) are free-running byte counts, masked on use.
//!
//! ```text
//! offset  sole writer      content
//! 0x000   host, once       header: magic, version, epoch, capacity, data offset, …   (frozen)
//! 0x080   host, per batch  head · published · dropped · life
//! 0x100   reader, batch    tail · read
//! 0x180   reader, asleep   wake_at · wake_seq · max_delay_us
//! 0x1000  host             records, `capacity` bytes
//! ```
//!
//! A record is a 32-byte header and the captured bytes, padded to [`ALIGN`]:
//!
//! ```text
//! +0  u32 cap_len    bytes that follow; PAD = skip to the end of the record area
//! +4  u32 wire_len   bytes on the wire, FCS excluded
//! +8  u64 ts_ns      nanoseconds since 1970-01-01 UTC
//! +16 u32 flow_hash  symmetric: both directions of a flow have the same
//! +20 u32 lost       packets this port lost between the previous record and this one (saturating)
//! +24 u16 flags      [`flags`]
//! +26 u16 vlan_tci   outermost 802.1Q tag (TCI) when flags has VLAN; the bytes hold it too
//! +28 u16 source     the daemon's number of the source
//! +30 u16 queue      receive queue (thread) of the source
//! ```
//!
//! With [`flags::OFFLOAD`] (1.1) the first [`PREFIX`](crate::offload::PREFIX) bytes are not the frame's:
//! four that are zero, then a virtio-net header ([`offload`](crate::offload)), which says that the frame
//! is still to be cut or lacks a checksum. `cap_len` counts them, `wire_len` does not. Only a reader
//! that asked for such frames (`segments`) has such records, so those that know 1.0 alone see none.
//!
//! A record never crosses the end of the area: a record with `cap_len == PAD` (only its first four
//! bytes are valid) sends the reader back to offset 0.
//!
//! The producer publishes with a Release store of `head`; the reader pairs it with an Acquire load.
//! The reader gives space back with a Release store of `tail`; the producer pairs it with an
//! Acquire load.
//!
//! # Size
//!
//! A ring of 256 KiB to 1 MiB stays in the producer's L2 cache and is the fastest. Two processes,
//! Mpps at 60 / 1514 bytes: 64 KiB 98 / 13, 256 KiB 152 / 25, 1 MiB 154 / 25, 4 MiB 104 / 16. A larger
//! ring buys time for a reader that stops: 1 MiB holds 10,900 packets of 60 bytes.
//!
//! # Sleeping and ringing
//!
//! The reader **arms**: it stores `wake_at` (a count of records), `max_delay_us` and then a new
//! `wake_seq`. The producer rings an arming at most once. Arming is a Dekker handshake: the reader
//! stores `wake_seq`, fences (`SeqCst`) and reads `head`; the producer stores `head`, fences
//! (`SeqCst`) and reads `wake_seq` ([`wake`](crate::wake)). One of them sees the other, so a record belongs to exactly one
//! of two cases, and each case has one clock:
//!
//! | the record was published | who sees it | who keeps the time |
//! |---|---|---|
//! | after the arming | the producer sees the arming | the producer: it rings at the watermark, when more than half of the area is unread, or `max_delay_us` after it first saw the record |
//! | before the arming | the reader sees the record | the reader: it does not sleep at the watermark, else at most `max_delay_us` |
//!
//! Hence the producer has no timer for a reader that is awake, and the reader has none when it goes
//! to sleep on an empty ring. An application that polls a file descriptor waits for the doorbell
//! and, only in the second case, for a timer. Early wake-ups are allowed, late ones are not.
//!
//! After the end of a ring's life (`life`) the producer's side rings once more, armed or not.
//!
//! # Transmit rings
//!
//! A ring in the other direction: the reader's application is the producer (the **sender**), the
//! host the consumer (`Intake`). Layout, records and the handshake are the same with the roles
//! swapped; `SEND_MAGIC` tells the two kinds apart.
//!
//! ```text
//! offset  sole writer      content
//! 0x000   host, once       header
//! 0x080   sender, batch    head · published · dropped (times there was no room)
//! 0x100   host, batch      tail · read
//! 0x180   host, asleep     wake_at · wake_seq · max_delay_us (0) · life
//! 0x1000  sender           records
//! ```
//!
//! Of a record the host takes `cap_len` and the bytes, each once, into memory of its own; the other
//! fields of its header mean nothing. If the port was opened with `segments` merged, the host takes
//! `flags` too, once: with `OFFLOAD` the bytes begin as above. The host arms before its thread sleeps,
//! for the first record, and the sender **kicks** it then.
//!
//! # Posted records
//!
//! If the port was opened with `posts` (1.2; [`header::TAKES`] says so), the host takes `flags` too, and a record of a
//! transmit ring with [`flags::POSTED`] goes on elsewhere: behind its own bytes come those of a **place** in a ring
//! from which the same port reads, so that what was received is sent on without being copied by its reader; or in one of
//! another port of the same program, which it lent.
//!
//! ```text
//! +0  u32 cap_len    bytes that follow here, 0 or more; they come first
//! +4  u32 len        bytes at the place
//! +8  u64 at         where they begin: bytes from the start of that ring's record area
//! +30 u16 ring       which of the port's rings, or of those that were lent to it
//! ```
//!
//! Both lengths together are no more than the transmit ring's `snaplen`. The host reads each of these fields once,
//! checks its own copy against the record area, and copies the bytes out, once, as those of the record; all that it decides
//! it decides by that copy. A place outside is refused, and nothing of that record is sent. A place may be any bytes of
//! the area: all of it is what this reader was given. Whoever posts a place does not release it before the transmit
//! ring's `tail` has passed the record that names it ([`Posts`](crate::Posts)); else other bytes of its own are sent.

use crate::offload::Offload;

/// First eight bytes of a ring: `VNPLRING` in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"VNPLRING");
/// First eight bytes of a transmit ring: `VNPLSEND` in memory order.
pub const SEND_MAGIC: u64 = u64::from_le_bytes(*b"VNPLSEND");
/// Layout version a reader must know. A reader refuses any other.
pub const VERSION_MAJOR: u16 = 1;
/// Additions an old reader may ignore.
pub const VERSION_MINOR: u16 = 2;

/// Records start at multiples of this many bytes.
pub const ALIGN: u64 = 8;
/// Bytes of a record header.
pub const RECORD_HEADER: u64 = 32;
/// `cap_len` of a record that only fills the area up to its end.
pub const PAD: u32 = u32::MAX;
/// Offset of the first record, and so the size of everything before it.
pub const DATA_OFFSET: u64 = 0x1000;
/// Smallest record area in bytes.
pub const MIN_CAPACITY: u64 = 4096;
/// Largest record area in bytes.
pub const MAX_CAPACITY: u64 = 1 << 32;
/// Largest captured length a record may have, in bytes (a full GSO super-frame fits).
pub const MAX_SNAPLEN: u32 = 0x4_0000;

/// Header fields, written once by the host before the reader is told of the ring.
pub mod header {
    /// `u64`: [`super::MAGIC`].
    pub const MAGIC: u64 = 0x00;
    /// `u16`: [`super::VERSION_MAJOR`].
    pub const MAJOR: u64 = 0x08;
    /// `u16`: [`super::VERSION_MINOR`].
    pub const MINOR: u64 = 0x0a;
    /// `u32`: link type of the frames (DLT as registered by tcpdump.org; 1 = Ethernet).
    pub const LINK_TYPE: u64 = 0x0c;
    /// `u64`: random number of this incarnation, non-zero, low 8 bits zero.
    pub const EPOCH: u64 = 0x10;
    /// `u64`: bytes of the record area, a power of two.
    pub const CAPACITY: u64 = 0x18;
    /// `u64`: offset of the record area.
    pub const DATA: u64 = 0x20;
    /// `u32`: no record has more captured bytes than this.
    pub const SNAPLEN: u64 = 0x28;
    /// `u32`: the port's number in the daemon.
    pub const PORT: u64 = 0x2c;
    /// `u32`: which of the port's rings this is (one per receive queue of the source).
    pub const QUEUE: u64 = 0x30;
    /// `u32`, of a transmit ring: which [`flags`](super::flags) of its records mean something that
    /// only hosts that say so know: [`POSTED`](super::flags::POSTED), or none.
    pub const TAKES: u64 = 0x34;
    /// Bytes of the header.
    pub const SIZE: u64 = 0x40;
}

/// `u64`, host: bytes published since the ring was made.
pub const HEAD: u64 = 0x80;
/// `u64`, host: records published.
pub const PUBLISHED: u64 = 0x88;
/// `u64`, host: records that this ring lost for want of room.
pub const DROPPED: u64 = 0x90;
/// `u64`, host: epoch in the high 56 bits, a [`Life`] in the low 8.
pub const LIFE: u64 = 0x98;
/// `u64`, reader: bytes released since the ring was made.
pub const TAIL: u64 = 0x100;
/// `u64`, reader: records released since the ring was made, stored after `tail`. For the reader's
/// successor and for statistics; the host decides nothing by it.
pub const READ: u64 = 0x108;
/// `u64`, reader: wake me when `published` reaches this count.
pub const WAKE_AT: u64 = 0x180;
/// `u32`, reader: incremented by each arming; one arming is rung at most once.
pub const WAKE_SEQ: u64 = 0x188;
/// `u32`, reader: wake me this many microseconds after the first unread record even if `wake_at`
/// is not reached. 0: at the first record.
pub const MAX_DELAY_US: u64 = 0x18c;
/// `u64`, host: as [`LIFE`], of a transmit ring, where the line of `LIFE` is the sender's.
pub const SEND_LIFE: u64 = 0x190;

/// `u64`, reader, of a ring whose reader has its words in memory of its own ([`direct`](crate::direct)): the
/// epoch of the ring that they belong to, stored when they start anew.
pub const ATTACHED: u64 = 0x1a0;

/// Bits of a record's `flags`.
pub mod flags {
    /// The frame was sent by the host's interface (else received).
    pub const OUTBOUND: u16 = 1 << 0;
    /// `vlan_tci` is valid.
    pub const VLAN: u16 = 1 << 1;
    /// The timestamp was taken by the NIC.
    pub const HW_TIMESTAMP: u16 = 1 << 2;
    /// First record of a ring that replaced an earlier one (daemon restart): records may be missing
    /// before it that no counter knows of.
    pub const GAP: u16 = 1 << 3;
    /// Some packets before this one were lost in the kernel or the NIC, before any port.
    pub const SOURCE_LOSS: u16 = 1 << 4;
    /// The sender left the transport checksum to the NIC; it is not valid in the captured bytes.
    pub const CSUM_NOT_READY: u16 = 1 << 5;
    /// The frame is as its sender left it to a NIC: `Meta::offload` says what is still to be done, and
    /// the record's bytes begin with it (see the top of [`layout`](super)).
    pub const OFFLOAD: u16 = 1 << 6;
    /// Of a record of a transmit ring: its bytes go on at a place in a ring that the port reads (see the
    /// top of [`layout`](super)).
    pub const POSTED: u16 = 1 << 7;
}

/// Where a ring is in its life. The host alone moves it: out of `Open` once, and from `Ended` or
/// `Failed` to `Closed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Life {
    /// Records may still come.
    Open = 0,
    /// The source ended (a file played once); what was published stays readable.
    Ended = 1,
    /// The port was detached.
    Closed = 2,
    /// The host stopped serving this ring because its reader's indices made no sense.
    Quarantined = 3,
    /// The source failed (a damaged file); what was published stays readable, more was meant to come.
    Failed = 4,
    /// An operator took it from its owner; what was published stays readable.
    Revoked = 5,
}

impl Life {
    /// The state in the low byte of [`LIFE`].
    pub fn from_word(word: u64) -> Self {
        match word & 0xff {
            0 => Self::Open,
            1 => Self::Ended,
            3 => Self::Quarantined,
            4 => Self::Failed,
            5 => Self::Revoked,
            _ => Self::Closed,
        }
    }
}

/// What is fixed when a ring is made and never read from shared memory again by the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of the record area, a power of two.
    pub capacity: u64,
    /// No record has more captured bytes than this.
    pub snaplen: u32,
    /// DLT of the frames; 1 = Ethernet.
    pub link_type: u32,
    /// Random incarnation number, non-zero, low 8 bits zero.
    pub epoch: u64,
    /// The port's number in the daemon.
    pub port: u32,
    /// Which of the port's rings this is.
    pub queue: u32,
}

/// Where the bytes of a posted record go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Which of the port's rings, or of those of other ports that were lent to it.
    pub ring: u16,
    /// Bytes from the start of that ring's record area.
    pub at: u64,
    /// How many bytes.
    pub len: u32,
}

/// Everything a record says besides its bytes. `cap_len` is the length of the bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Meta {
    /// Nanoseconds since 1970-01-01 UTC.
    pub ts_ns: u64,
    /// Length on the wire in bytes, Ethernet header included, FCS excluded.
    pub wire_len: u32,
    /// Symmetric flow hash.
    pub flow_hash: u32,
    /// Packets this port lost just before this one.
    pub lost: u32,
    /// Bits of [`flags`].
    pub flags: u16,
    /// Outermost VLAN TCI, valid with [`flags::VLAN`].
    pub vlan_tci: u16,
    /// The daemon's number of the source.
    pub source: u16,
    /// Receive queue of the source.
    pub queue: u16,
    /// What is left to do with the frame, valid with [`flags::OFFLOAD`].
    pub offload: Offload,
}

/// Bytes of ring memory for a record area of `capacity` bytes.
pub const fn ring_size(capacity: u64) -> u64 {
    DATA_OFFSET + capacity
}

/// Bytes a record with `cap_len` captured bytes takes in the area.
#[inline]
pub const fn record_size(cap_len: u32) -> u64 {
    (RECORD_HEADER + cap_len as u64 + ALIGN - 1) & !(ALIGN - 1)
}

/// True when a free-running count has reached `goal`.
#[inline]
pub(crate) const fn reached(count: u64, goal: u64) -> bool {
    count.wrapping_sub(goal) < 1 << 63
}

// The specification, checked: lines do not share a 128-byte pair of cache lines between writers.
const _: () = {
    assert!(header::SIZE <= HEAD && header::TAKES + 4 <= header::SIZE);
    assert!(HEAD / 128 != TAIL / 128 && TAIL / 128 != WAKE_AT / 128);
    assert!(HEAD.is_multiple_of(128) && TAIL.is_multiple_of(128) && WAKE_AT.is_multiple_of(128));
    assert!(LIFE + 8 <= TAIL && READ + 8 <= WAKE_AT && MAX_DELAY_US + 4 <= SEND_LIFE);
    assert!(SEND_LIFE / 128 == WAKE_AT / 128 && SEND_LIFE < ATTACHED && ATTACHED < DATA_OFFSET);
    assert!(DATA_OFFSET.is_multiple_of(4096) && RECORD_HEADER.is_multiple_of(ALIGN));
    assert!(MIN_CAPACITY.is_power_of_two() && MAX_CAPACITY.is_power_of_two());
    // A pad record needs its first four bytes; ALIGN leaves at least eight.
    assert!(ALIGN >= 8);
    assert!(record_size(0) == 32 && record_size(60) == 96 && record_size(1514) == 1552);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn life_words_round_trip_and_unknown_means_closed() {
        for life in [
            Life::Open,
            Life::Ended,
            Life::Closed,
            Life::Quarantined,
            Life::Failed,
            Life::Revoked,
        ] {
            assert_eq!(Life::from_word(0xabc00 | life as u64), life);
        }
        assert_eq!(Life::from_word(77), Life::Closed);
    }
}

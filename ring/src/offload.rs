//! What a sender left to the NIC: a frame that is still to be cut, or whose checksum is missing.
//!
//! It travels as a virtio-net header (virtio 1.2, 5.1.6), little-endian:
//!
//! ```text
//! +0  u8  flags        1 NEEDS_CSUM · 2 DATA_VALID
//! +1  u8  gso_type     0 none · 1 TCPV4 · 4 TCPV6 · 5 UDP_L4 · 0x80 ECN, with one of TCP
//! +2  u16 hdr_len      bytes of all headers, of a frame that is to be cut; else 0
//! +4  u16 gso_size     payload bytes of each packet that it is cut into
//! +6  u16 csum_start   where the checksum begins to count, in bytes from the frame's first
//! +8  u16 csum_offset  where it is stored, in bytes from csum_start
//! +10 u16 num_buffers  1
//! ```

/// Bytes of the header.
pub const HEADER: usize = 12;

/// Bytes of the header without `num_buffers`, as packet sockets and old devices have it.
pub const SHORT_HEADER: usize = 10;

/// Bytes before the frame in a record with flag [`OFFLOAD`](crate::layout::flags::OFFLOAD): four that
/// are zero, then the header, so that header and frame are one piece of memory.
pub const PREFIX: usize = 16;

/// Bytes before the frame in a record with these flags.
#[inline]
pub const fn record_prefix(flags: u16) -> usize {
    match flags & crate::layout::flags::OFFLOAD {
        0 => 0,
        _ => PREFIX,
    }
}

/// Bits of [`Offload::flags`].
pub mod flags {
    /// The checksum is to be computed; its place holds the sum of the pseudo header.
    pub const NEEDS_CSUM: u8 = 1;
    /// The checksum was found right.
    pub const DATA_VALID: u8 = 2;
}

/// Values of [`Offload::gso_type`].
pub mod gso {
    /// The frame goes as it is.
    pub const NONE: u8 = 0;
    /// TCP over IPv4.
    pub const TCPV4: u8 = 1;
    /// TCP over IPv6.
    pub const TCPV6: u8 = 4;
    /// UDP over IPv4 or IPv6: each packet is a datagram of its own.
    pub const UDP_L4: u8 = 5;
    /// A bit beside TCP: the flag CWR belongs to the first packet only.
    pub const ECN: u8 = 0x80;
}

/// What is left to do with a frame; by default nothing. Nobody has checked it against the frame:
/// `vnplug_frame::offload` does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Offload {
    /// Bits of [`flags`].
    pub flags: u8,
    /// One of [`gso`].
    pub gso_type: u8,
    /// Payload bytes of each packet that the frame is cut into.
    pub gso_size: u16,
    /// Where the checksum begins to count, in bytes from the frame's first.
    pub csum_start: u16,
    /// Where it is stored, in bytes from `csum_start`.
    pub csum_offset: u16,
}

impl Offload {
    /// Reads a header, long or short; `hdr_len` and `num_buffers` say nothing new.
    pub fn from_header(header: &[u8; SHORT_HEADER]) -> Self {
        Self::read(header, u16::from_le_bytes)
    }

    /// Reads a header in the machine's byte order, as packet sockets have it (packet(7),
    /// `PACKET_VNET_HDR`).
    #[inline]
    pub fn from_native_header(header: &[u8; SHORT_HEADER]) -> Self {
        Self::read(header, u16::from_ne_bytes)
    }

    #[inline(always)]
    fn read(header: &[u8; SHORT_HEADER], half: impl Fn([u8; 2]) -> u16) -> Self {
        let half = |at: usize| half([header[at], header[at + 1]]);
        Self {
            flags: header[0],
            gso_type: header[1],
            gso_size: half(4),
            csum_start: half(6),
            csum_offset: half(8),
        }
    }

    /// The header of `frame`, short and in the machine's byte order.
    pub fn to_native_header(self, frame: &[u8]) -> [u8; SHORT_HEADER] {
        let mut header = [0; SHORT_HEADER];
        header.copy_from_slice(&self.to_header(frame)[..SHORT_HEADER]);
        for half in header[2..].chunks_exact_mut(2) {
            let value = u16::from_le_bytes([half[0], half[1]]);
            half.copy_from_slice(&value.to_ne_bytes());
        }
        header
    }

    /// The header of `frame`.
    pub fn to_header(self, frame: &[u8]) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        (header[0], header[1]) = (self.flags, self.gso_type);
        let halves = [
            (2, self.header_len(frame)),
            (4, self.gso_size),
            (6, self.csum_start),
            (8, self.csum_offset),
            (10, 1),
        ];
        for (at, half) in halves {
            header[at..at + 2].copy_from_slice(&half.to_le_bytes());
        }
        header
    }

    /// Whether anything is left to do.
    #[inline]
    pub fn is_due(&self) -> bool {
        self.gso_type != gso::NONE || self.flags & flags::NEEDS_CSUM != 0
    }

    /// Whether a card or the kernel found the frame's checksum right, so that nobody needs to check it again.
    #[inline]
    pub fn is_valid(&self) -> bool {
        self.flags & flags::DATA_VALID != 0
    }

    /// Whether the frame is to be cut.
    #[inline]
    pub fn is_super_frame(&self) -> bool {
        self.gso_type != gso::NONE
    }

    /// The headers' bytes of a frame that is to be cut, 0 of another.
    fn header_len(&self, frame: &[u8]) -> u16 {
        let transport = match self.gso_type & !gso::ECN {
            gso::UDP_L4 => 8,
            gso::TCPV4 | gso::TCPV6 => {
                let words = frame.get(usize::from(self.csum_start) + TCP_WORDS);
                words.map_or(0, |word| u16::from(word >> 4) * 4)
            }
            _ => return 0,
        };
        self.csum_start.saturating_add(transport)
    }
}

/// Where a TCP header says how long it is, in words of four bytes (RFC 9293, 3.1).
const TCP_WORDS: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_read_as_it_was_written() {
        let mut frame = [0; 80];
        frame[34 + TCP_WORDS] = 0x80;
        let offload = Offload {
            flags: flags::NEEDS_CSUM,
            gso_type: gso::TCPV4 | gso::ECN,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
        };
        let header = offload.to_header(&frame);
        assert_eq!(header, [1, 0x81, 66, 0, 0xa8, 5, 34, 0, 16, 0, 1, 0]);
        assert_eq!(Offload::from_header(header.first_chunk().unwrap()), offload);
        assert!(offload.is_due() && offload.is_super_frame());
    }

    #[test]
    fn a_header_beyond_the_frame_is_written_all_the_same() {
        let offload = Offload {
            gso_type: gso::TCPV6,
            csum_start: u16::MAX,
            ..Offload::default()
        };
        assert_eq!(offload.to_header(&[])[2..4], [0xff, 0xff]);
        assert!(!Offload::default().is_due());
    }
}

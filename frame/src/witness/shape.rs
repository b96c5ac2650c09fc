//! Making witness frames: the headers once, the sequence for every frame.

use super::SOURCE_MAC;
use super::{BALANCED_BYTES, BALANCED_MAGIC, DESTINATION_MAC, PLAIN_BYTES, PLAIN_MAGIC, Stamp};

/// What a generated frame looks like to a dissector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// UDP over IPv4, checksum 0 (none); the only one that fits 60 bytes.
    Udp4,
    /// TCP over IPv4: a segment with PSH and ACK.
    Tcp4,
    /// ICMP echo request.
    Icmp4,
    /// UDP over IPv6.
    Udp6,
    /// TCP over IPv6.
    Tcp6,
    /// ICMPv6 echo request.
    Icmp6,
}

impl Protocol {
    /// Every protocol, shortest first.
    pub const ALL: [Self; 6] = [
        Self::Udp4,
        Self::Icmp4,
        Self::Tcp4,
        Self::Udp6,
        Self::Icmp6,
        Self::Tcp6,
    ];

    /// The shortest frame in bytes, Ethernet header included, FCS and VLAN tag excluded:
    /// 60 (UDP), 72 (ICMP), 84 (TCP); over IPv6 92, 92, 104.
    pub const fn min_bytes(self) -> usize {
        ETHERNET_BYTES + self.network_bytes() + self.transport_bytes() + self.trailer_bytes()
    }

    const fn trailer_bytes(self) -> usize {
        if matches!(self, Self::Udp4) {
            PLAIN_BYTES
        } else {
            BALANCED_BYTES
        }
    }

    const fn is_v6(self) -> bool {
        matches!(self, Self::Udp6 | Self::Tcp6 | Self::Icmp6)
    }

    const fn network_bytes(self) -> usize {
        if self.is_v6() { 40 } else { 20 }
    }

    const fn transport_bytes(self) -> usize {
        if matches!(self, Self::Tcp4 | Self::Tcp6) {
            20
        } else {
            8
        }
    }

    /// The protocol number of the transport (IANA).
    const fn number(self) -> u8 {
        match self {
            Self::Icmp4 => 1,
            Self::Tcp4 | Self::Tcp6 => 6,
            Self::Udp4 | Self::Udp6 => 17,
            Self::Icmp6 => 58,
        }
    }
}

/// Everything that is the same for the frames of one flow and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Frame length in bytes, Ethernet header and VLAN tag included, FCS excluded.
    pub len_bytes: usize,
    /// Flow number; its low 24 bits become the source address 10.x.y.z (or 2001:2::a:x:yz), and a
    /// source port from 49152 up (an ICMP identifier).
    pub flow: u32,
    /// What it looks like.
    pub protocol: Protocol,
    /// An 802.1Q tag with this TCI.
    pub vlan_tci: Option<u16>,
}

/// A frame length that cannot hold the headers and the trailer, or that IP cannot express.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadLength {
    /// What was asked for, in bytes.
    pub len_bytes: usize,
    /// The shortest that works for this shape.
    pub min_bytes: usize,
}

impl std::fmt::Display for BadLength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            len_bytes,
            min_bytes,
        } = self;
        write!(
            f,
            "a frame of {len_bytes} bytes; this kind has {min_bytes} to {MAX_BYTES}"
        )
    }
}

impl std::error::Error for BadLength {}

impl Shape {
    /// The shortest frame of this shape in bytes.
    pub const fn min_bytes(&self) -> usize {
        self.protocol.min_bytes() + self.tag_bytes()
    }

    /// Writes headers, filling and the constant part of the trailer into `frame`, whose length must
    /// be `len_bytes`; the sequence follows with [`Stamp::put`].
    ///
    /// # Errors
    /// [`BadLength`] if the shape does not fit, or `frame` has another length.
    pub fn write(&self, run: u32, frame: &mut [u8]) -> Result<Stamp, BadLength> {
        let fits = (self.min_bytes()..=MAX_BYTES).contains(&self.len_bytes);
        if !fits || frame.len() != self.len_bytes {
            return Err(BadLength {
                len_bytes: self.len_bytes,
                min_bytes: self.min_bytes(),
            });
        }
        let network_at = ETHERNET_BYTES + self.tag_bytes();
        self.write_ethernet(frame);
        let (_, packet) = frame.split_at_mut(network_at);
        self.write_packet(run, packet);
        let balanced = self.protocol != Protocol::Udp4;
        let changing = if balanced { 24 } else { 12 };
        Ok(Stamp::new(&frame[..self.len_bytes - changing], balanced))
    }

    const fn tag_bytes(&self) -> usize {
        if self.vlan_tci.is_some() { 4 } else { 0 }
    }

    fn write_ethernet(&self, frame: &mut [u8]) {
        let ether_type: u16 = if self.protocol.is_v6() {
            0x86dd
        } else {
            0x0800
        };
        frame[..6].copy_from_slice(&DESTINATION_MAC);
        frame[6..12].copy_from_slice(&SOURCE_MAC);
        let mut at = 12;
        if let Some(tci) = self.vlan_tci {
            frame[12..14].copy_from_slice(&[0x81, 0x00]);
            frame[14..16].copy_from_slice(&tci.to_be_bytes());
            at = 16;
        }
        frame[at..at + 2].copy_from_slice(&ether_type.to_be_bytes());
    }

    fn write_packet(&self, run: u32, packet: &mut [u8]) {
        let protocol = self.protocol;
        let header_bytes = protocol.network_bytes();
        let trailer_at = packet.len() - protocol.trailer_bytes();
        let filling_at = header_bytes + protocol.transport_bytes();
        for (n, byte) in packet[filling_at..trailer_at].iter_mut().enumerate() {
            *byte = n as u8;
        }
        write_trailer(&mut packet[trailer_at..], run, protocol == Protocol::Udp4);
        let pseudo_sum = if protocol.is_v6() {
            self.write_v6(packet)
        } else {
            self.write_v4(packet)
        };
        let (_, segment) = packet.split_at_mut(header_bytes);
        let checksum_at = self.write_transport(segment);
        if protocol != Protocol::Udp4 {
            let covered = if protocol == Protocol::Icmp4 {
                0
            } else {
                pseudo_sum
            };
            let sum = match fold(covered + sum16(segment)) {
                // RFC 768: zero means none, so a computed zero is sent as all ones.
                0 if protocol == Protocol::Udp6 => 0xffff,
                sum => sum,
            };
            segment[checksum_at..checksum_at + 2].copy_from_slice(&sum.to_be_bytes());
        }
    }

    /// Writes the IPv4 header (RFC 791) and returns the sum of its pseudo-header.
    fn write_v4(&self, packet: &mut [u8]) -> u64 {
        let total = packet.len() as u16;
        let [_, x, y, z] = self.flow.to_be_bytes();
        let header = &mut packet[..20];
        header.fill(0);
        header[0] = 0x45;
        header[2..4].copy_from_slice(&total.to_be_bytes());
        header[6] = 0x40; // don't fragment
        header[8] = 64;
        header[9] = self.protocol.number();
        header[12..16].copy_from_slice(&[10, x, y, z]);
        header[16..20].copy_from_slice(&[198, 18, 0, 1]); // RFC 2544's test network
        let checksum = fold(sum16(header));
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        sum16(&header[12..20]) + u64::from(self.protocol.number()) + u64::from(total - 20)
    }

    /// Writes the IPv6 header (RFC 8200) and returns the sum of its pseudo-header.
    fn write_v6(&self, packet: &mut [u8]) -> u64 {
        let payload = (packet.len() - 40) as u16;
        let [_, x, y, z] = self.flow.to_be_bytes();
        let header = &mut packet[..40];
        header.fill(0);
        header[0] = 0x60;
        header[4..6].copy_from_slice(&payload.to_be_bytes());
        header[6] = self.protocol.number();
        header[7] = 64;
        header[8..12].copy_from_slice(&[0x20, 0x01, 0, 2]); // RFC 5180's test network
        header[19..24].copy_from_slice(&[0x0a, 0, x, y, z]);
        header[24..28].copy_from_slice(&[0x20, 0x01, 0, 2]);
        header[37..40].copy_from_slice(&[0x0b, 0, 1]);
        sum16(&header[8..40]) + u64::from(self.protocol.number()) + u64::from(payload)
    }

    /// Writes the transport header with checksum 0 and returns where the checksum goes.
    fn write_transport(&self, segment: &mut [u8]) -> usize {
        let len = segment.len() as u16;
        let port = FIRST_PORT + (self.flow % 16_384) as u16;
        segment[..self.protocol.transport_bytes()].fill(0);
        match self.protocol {
            Protocol::Udp4 | Protocol::Udp6 => {
                segment[0..2].copy_from_slice(&port.to_be_bytes());
                segment[2..4].copy_from_slice(&DISCARD_PORT.to_be_bytes());
                segment[4..6].copy_from_slice(&len.to_be_bytes());
                6
            }
            Protocol::Tcp4 | Protocol::Tcp6 => {
                segment[0..2].copy_from_slice(&port.to_be_bytes());
                segment[2..4].copy_from_slice(&DISCARD_PORT.to_be_bytes());
                segment[7] = 1; // sequence number
                segment[11] = 1; // acknowledgement number
                segment[12..16].copy_from_slice(&[0x50, 0x18, 0xff, 0xff]);
                16
            }
            Protocol::Icmp4 | Protocol::Icmp6 => {
                segment[0] = if self.protocol.is_v6() { 128 } else { 8 };
                segment[4..6].copy_from_slice(&port.to_be_bytes());
                2
            }
        }
    }
}

/// One complete witness frame.
///
/// # Errors
/// [`BadLength`] if the shape does not fit.
pub fn make(shape: Shape, run: u32, seq: u64) -> Result<Vec<u8>, BadLength> {
    // Not allocated before the length is known to be sane.
    let mut frame = vec![0; shape.len_bytes.min(MAX_BYTES)];
    shape.write(run, &mut frame)?.put(&mut frame, seq);
    Ok(frame)
}

/// Magic and run; the words that change are left as they sum to zero (0 and its complement), so
/// that the checksum computed over them holds for every sequence and CRC.
fn write_trailer(trailer: &mut [u8], run: u32, plain: bool) {
    trailer.fill(0);
    trailer[2..6].copy_from_slice(&run.to_be_bytes());
    if plain {
        trailer[..2].copy_from_slice(&PLAIN_MAGIC);
    } else {
        trailer[..2].copy_from_slice(&BALANCED_MAGIC);
        trailer[6..14].fill(0xff);
        trailer[26..30].fill(0xff);
    }
}

/// The sum of the big-endian 16-bit words of `bytes` (RFC 1071), not yet folded.
fn sum16(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<2>();
    let last = rest.first().map_or(0, |byte| u64::from(*byte) << 8);
    words
        .iter()
        .map(|word| u64::from(u16::from_be_bytes(*word)))
        .sum::<u64>()
        + last
}

/// The checksum that goes with a sum: folded to 16 bits and complemented.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

const ETHERNET_BYTES: usize = 14;
/// IPv4's total length is 16 bits wide.
const MAX_BYTES: usize = 65_535;
/// Dynamic ports (RFC 6335): no dissector takes the filling for its protocol.
const FIRST_PORT: u16 = 49_152;
const DISCARD_PORT: u16 = 9; // RFC 863

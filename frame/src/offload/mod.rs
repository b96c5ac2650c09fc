//! What a NIC would have done with a frame, done here: checksums filled, super-frames cut.
//!
//! A frame that a kernel or a guest leaves to its NIC comes with an [`Offload`]. Who cannot hand that on
//! (a reader that wants the frames of the wire, a port of a switch whose end takes plain frames) asks
//! [`work`] what is to be done, and [`Pieces`] to do it. The result is what Linux's own software
//! segmentation makes (`net/ipv4/tcp_offload.c`, `udp_offload.c`), byte for byte:
//!
//! | field | in each packet |
//! |---|---|
//! | IPv4 total length, IPv6 payload length, UDP length | its own |
//! | IPv4 identification | one more than in the packet before |
//! | TCP sequence number | further by the payload before it |
//! | FIN, PSH | in the last one |
//! | CWR | in the first one if [`gso::ECN`] says so; else in all, as accurate ECN needs it |
//! | checksums | computed, TCP's and UDP's from the sum of the pseudo header that the sender left, if it did; UDP's is never 0 |
//!
//! Nothing is believed: an `Offload` that does not fit its frame is a [`Lie`], and nothing is cut.

pub mod checksum;
mod cut;

use vnplug_ring::offload::{Offload, flags, gso};

use crate::headers::{IPV4, IPV6, Link, ip};
pub use cut::{Piece, Pieces};

/// What is to be done with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// The checksum is to be filled.
    Sum(Place),
    /// The frame is to be cut, and each packet's checksums filled.
    Cut(Plan),
}

impl Work {
    /// Packets that the frame becomes.
    pub fn packets(&self) -> usize {
        match self {
            Self::Sum(_) => 1,
            Self::Cut(plan) => plan.count,
        }
    }

    /// Bytes of the longest packet that the frame is cut into, Ethernet header included; 0 if it is not cut.
    pub fn longest(&self) -> usize {
        match self {
            Self::Sum(_) => 0,
            Self::Cut(plan) => plan.longest,
        }
    }

    /// Whether Linux does it: see [`is_for_linux`].
    pub fn is_for_linux(&self) -> bool {
        !matches!(self, Self::Cut(plan) if plan.is_udp && plan.count > LINUX_DATAGRAMS)
    }
}

/// Whether Linux takes a frame of `len` bytes with this, of which the sum is left to do, or refuses it whole: from a
/// packet socket, a TAP, or a device of virtio it takes at most 64 datagrams as one (`UDP_MAX_SEGMENTS`; 128 since
/// 6.8).
#[inline]
pub fn is_for_linux(len: usize, offload: &Offload) -> bool {
    if offload.gso_type & !gso::ECN != gso::UDP_L4 {
        return true;
    }
    let payload = len.saturating_sub(usize::from(offload.csum_start) + 8);
    payload <= LINUX_DATAGRAMS * usize::from(offload.gso_size)
}

/// Where a checksum stands, and which bytes it covers; within the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The first byte that counts.
    start: usize,
    /// Where it is stored.
    at: usize,
    /// A CRC-32C in four bytes, not the Internet checksum in two.
    is_crc: bool,
}

/// Where a frame is cut; its headers lie within the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Where the IP header begins.
    network: usize,
    is_ipv6: bool,
    /// Where the TCP or UDP header begins.
    transport: usize,
    is_udp: bool,
    /// Where the payload begins.
    payload: usize,
    /// Payload bytes of each packet but the last.
    size: usize,
    /// Packets.
    count: usize,
    /// Bytes of the longest of them.
    longest: usize,
    /// CWR is the first packet's only.
    clears_cwr: bool,
    /// The checksum's place holds the sum of a pseudo header of this length. The sender knows which address is in it:
    /// with a routing header or a source route not that of the IP header (RFC 8200, 8.1).
    left: Option<u32>,
}

/// Why an offload does not fit its frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lie {
    /// A kind of super-frame that is not known, or two at once.
    Kind(u8),
    /// The frame is none of that protocol, or a fragment, or its headers end outside of it or are more than
    /// [`MAX_HEADERS`].
    Headers,
    /// The IP header counts other bytes than there are.
    Length,
    /// Packets of this payload size are none, longer than IP can say, or more than [`MAX_PIECES`].
    Size(u16),
    /// The checksum's place lies outside the frame, or is not that protocol's.
    Checksum,
}

/// The most packets that a frame is cut into: 64 KiB in the least segments that TCP must accept
/// (RFC 9293, 3.7.1, less the longest options).
pub const MAX_PIECES: usize = 2048;

/// The most bytes of headers: each packet has them all, so that a frame of many packets with long headers would
/// become a multiple of itself. Linux' senders leave room for less than 400 (`MAX_TCP_HEADER`).
pub const MAX_HEADERS: usize = 512;

/// Datagrams that every Linux takes as one.
const LINUX_DATAGRAMS: usize = 64;

/// What is left to do with a frame of `wire_len` bytes, of which `frame` are there; `None` if nothing.
///
/// # Errors
/// [`Lie`], if the offload does not fit the frame.
pub fn work(frame: &[u8], wire_len: u32, offload: &Offload) -> Result<Option<Work>, Lie> {
    if offload.is_super_frame() {
        return plan(frame, wire_len as usize, offload).map(|plan| Some(Work::Cut(plan)));
    }
    if offload.flags & flags::NEEDS_CSUM == 0 {
        return Ok(None);
    }
    let start = usize::from(offload.csum_start);
    let at = start + usize::from(offload.csum_offset);
    // What comes before the header whose checksum it is says where from and where to the frame goes, and was looked
    // at by others as it stands.
    if start < first_checked(frame) {
        return Err(Lie::Checksum);
    }
    let is_crc = offload.csum_offset == SCTP_CHECKSUM && carries_sctp(frame, start);
    let len = if is_crc { 4 } else { 2 };
    match at + len <= frame.len() {
        true => Ok(Some(Work::Sum(Place { start, at, is_crc }))),
        false => Err(Lie::Checksum),
    }
}

/// Where the first header may begin that has a checksum which its sender may leave out.
fn first_checked(frame: &[u8]) -> usize {
    let link = Link::of(frame, 12);
    let network = link.at + 2;
    let packet = link.network(frame);
    let carried = link.ethertype.and_then(|ethertype| ip(ethertype, packet));
    network + carried.map_or(0, |carried| carried.at)
}

/// Whether an SCTP header begins at `start`.
fn carries_sctp(frame: &[u8], start: usize) -> bool {
    let link = Link::of(frame, 12);
    let carried = link
        .ethertype
        .and_then(|ethertype| ip(ethertype, link.network(frame)));
    carried.is_some_and(|carried| carried.protocol == 132 && link.at + 2 + carried.at == start)
}

fn plan(frame: &[u8], wire_len: usize, offload: &Offload) -> Result<Plan, Lie> {
    let kind = offload.gso_type & !gso::ECN;
    let is_udp = kind == gso::UDP_L4;
    let (protocol, checksum) = if is_udp { (17, 6) } else { (6, 16) };
    let link = Link::of(frame, 12);
    let is_ipv6 = match (kind, link.ethertype) {
        (gso::TCPV4, Some(IPV4)) => false,
        (gso::TCPV6, Some(IPV6)) => true,
        (gso::UDP_L4, Some(IPV4)) => false,
        (gso::UDP_L4, Some(IPV6)) => true,
        (gso::TCPV4 | gso::TCPV6 | gso::UDP_L4, _) => return Err(Lie::Headers),
        _ => return Err(Lie::Kind(offload.gso_type)),
    };
    if is_udp && offload.gso_type & gso::ECN != 0 {
        return Err(Lie::Kind(offload.gso_type));
    }
    let network = link.at + 2;
    let packet = &frame[network.min(frame.len())..];
    let ethertype = if is_ipv6 { IPV6 } else { IPV4 };
    let carried = ip(ethertype, packet).ok_or(Lie::Headers)?;
    let version = packet[0] >> 4;
    let is_whole = !carried.later && !carried.more && !carried.unknown;
    let is_ip = version == if is_ipv6 { 6 } else { 4 } && carried.at >= 20;
    if !is_whole || !is_ip || carried.protocol != protocol {
        return Err(Lie::Headers);
    }
    let transport = network + carried.at;
    let header = match is_udp {
        true => 8,
        false => frame
            .get(transport + 12)
            .map_or(0, |words| usize::from(words >> 4) * 4),
    };
    let payload = transport + header;
    let is_there = payload <= frame.len() && payload <= MAX_HEADERS;
    if header < if is_udp { 8 } else { 20 } || !is_there {
        return Err(Lie::Headers);
    }
    // What is there is part of what was on the wire.
    let wire_len = wire_len.max(frame.len());
    let half = |at: usize| usize::from(u16::from_be_bytes([packet[at], packet[at + 1]]));
    // 0 if it is more than the field can say (BIG TCP).
    let (said, is) = match is_ipv6 {
        true => (half(4), wire_len - network - 40),
        false => (half(2), wire_len - network),
    };
    if said != is && (said != 0 || is <= usize::from(u16::MAX)) {
        return Err(Lie::Length);
    }
    if offload.flags & flags::NEEDS_CSUM != 0
        && (usize::from(offload.csum_start), offload.csum_offset) != (transport, checksum)
    {
        return Err(Lie::Checksum);
    }
    let left = (offload.flags & flags::NEEDS_CSUM != 0).then(|| match is_udp {
        true => half(carried.at + 4) as u32,
        false => (wire_len - transport) as u32,
    });
    let size = usize::from(offload.gso_size);
    let rest = wire_len - payload;
    let count = match size {
        0 => usize::MAX,
        _ => rest.div_ceil(size).max(1),
    };
    // Each packet has a length of its own, of 16 bits.
    let longest = payload + size.min(rest);
    if count > MAX_PIECES || longest - network > usize::from(u16::MAX) {
        return Err(Lie::Size(offload.gso_size));
    }
    Ok(Plan {
        network,
        is_ipv6,
        transport,
        is_udp,
        payload,
        size,
        count,
        longest,
        clears_cwr: offload.gso_type & gso::ECN != 0,
        left,
    })
}

impl std::fmt::Display for Lie {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Kind(kind) => write!(f, "a super-frame of unknown kind {kind:#x}"),
            Self::Headers => f.write_str("a super-frame whose headers are not what it says"),
            Self::Length => f.write_str("a super-frame whose IP length is not its own"),
            Self::Size(size) => write!(f, "a super-frame in packets of {size} bytes"),
            Self::Checksum => f.write_str("a checksum outside the frame, or not in its place"),
        }
    }
}

/// Where an SCTP header has its checksum (RFC 9260, 3.1).
const SCTP_CHECKSUM: u16 = 8;

#[cfg(test)]
pub(crate) mod hostile;
#[cfg(test)]
pub(crate) mod samples;
#[cfg(test)]
mod tests;

//! TCP segments: where their headers lie, for what merges them ([`aggregate`](crate::aggregate)) and for
//! what counts their acknowledgements ([`acks`](crate::acks)).
//!
//! Only what both can use is a [`Segment`]: IPv4 without options, IPv6 without extension headers, no
//! fragment. Another frame that may belong to a TCP flow is [`Look::Unknown`].

use crate::headers::{AUTHENTICATION, FRAGMENT, IPV4, IPV6, Link, counts_in_eights};

/// What a frame is to whoever looks for TCP segments.
#[derive(Debug, Clone, Copy)]
pub enum Look<'a> {
    /// It carries no TCP.
    Other,
    /// It may carry TCP, and its flow cannot be told: a fragment, IP options, extension headers, or it is cut
    /// in its headers.
    Unknown,
    /// A segment.
    Tcp(Segment<'a>),
}

/// A TCP segment. Nothing is verified but that its headers are there.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// The frame's first bytes, all headers among them.
    head: &'a [u8],
    /// Where the IP header begins.
    pub network: usize,
    /// Where the TCP header begins.
    pub transport: usize,
    /// Where the payload begins.
    pub payload: usize,
    /// Where the payload ends, as the IP header says; what follows in the frame is padding.
    pub end: usize,
    /// IPv6, not IPv4.
    pub is_ipv6: bool,
}

/// Looks at a frame of `len` bytes that begins with `head`: the whole frame, or at least [`HEADERS`] of it.
#[inline]
pub fn look(head: &[u8], len: usize) -> Look<'_> {
    let link = Link::of(head, 12);
    let network = link.at + 2;
    let packet = head.get(network..).unwrap_or_default();
    match link.ethertype {
        Some(IPV4) => ipv4(head, packet, network, len),
        Some(IPV6) => ipv6(head, packet, network, len),
        _ => Look::Other,
    }
}

#[inline]
fn ipv4<'a>(head: &'a [u8], packet: &[u8], network: usize, len: usize) -> Look<'a> {
    let Some(ip) = packet.first_chunk::<20>() else {
        return Look::Unknown;
    };
    if ip[9] != TCP {
        return Look::Other;
    }
    // RFC 791, 3.1: version and header length; more fragments, and the offset.
    if ip[0] != 0x45 || u16::from_be_bytes([ip[6], ip[7]]) & 0x3fff != 0 {
        return Look::Unknown;
    }
    let total = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
    tcp(head, network, network + 20, network + total, len, false)
}

#[inline]
fn ipv6<'a>(head: &'a [u8], packet: &[u8], network: usize, len: usize) -> Look<'a> {
    let Some(ip) = packet.first_chunk::<40>() else {
        return Look::Unknown;
    };
    match ip[6] {
        TCP => {}
        FRAGMENT | AUTHENTICATION => return Look::Unknown,
        next if counts_in_eights(next) => return Look::Unknown,
        _ => return Look::Other,
    }
    if ip[0] >> 4 != 6 {
        return Look::Unknown;
    }
    let transport = network + 40;
    let carries = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
    tcp(head, network, transport, transport + carries, len, true)
}

#[inline]
fn tcp(
    head: &[u8],
    network: usize,
    transport: usize,
    end: usize,
    len: usize,
    is_ipv6: bool,
) -> Look<'_> {
    let words = head.get(transport + 12).map_or(0, |byte| byte >> 4);
    let payload = transport + usize::from(words) * 4;
    if words < 5 || payload > head.len() || end < payload || end > len {
        return Look::Unknown;
    }
    Look::Tcp(Segment {
        head,
        network,
        transport,
        payload,
        end,
        is_ipv6,
    })
}

impl<'a> Segment<'a> {
    /// All headers.
    #[inline]
    pub fn headers(&self) -> &'a [u8] {
        &self.head[..self.payload]
    }

    /// The IP header.
    #[inline]
    pub fn ip(&self) -> &'a [u8] {
        &self.head[self.network..self.transport]
    }

    /// The TCP header, options included.
    #[inline]
    pub fn tcp(&self) -> &'a [u8] {
        &self.head[self.transport..self.payload]
    }

    /// Both addresses, the source first.
    #[inline]
    pub fn addresses(&self) -> &'a [u8] {
        if self.is_ipv6 {
            &self.ip()[8..40]
        } else {
            &self.ip()[12..20]
        }
    }

    /// Both ports, the source first.
    #[inline]
    pub fn ports(&self) -> [u8; 4] {
        let tcp = self.tcp();
        [tcp[0], tcp[1], tcp[2], tcp[3]]
    }

    /// The sequence number.
    #[inline]
    pub fn seq(&self) -> u32 {
        word(self.tcp(), 4)
    }

    /// The acknowledgement number.
    #[inline]
    pub fn ack(&self) -> u32 {
        word(self.tcp(), 8)
    }

    /// The flags: bits of [`flag`].
    #[inline]
    pub fn flags(&self) -> u8 {
        self.tcp()[13]
    }

    /// The four bits beside the header's length: three are reserved, the last is AE (RFC 9768).
    #[inline]
    pub fn reserved(&self) -> u8 {
        self.tcp()[12] & 0xf
    }

    /// The window, not scaled.
    #[inline]
    pub fn window(&self) -> u16 {
        u16::from_be_bytes([self.tcp()[14], self.tcp()[15]])
    }

    /// Bytes of payload.
    #[inline]
    pub fn len(&self) -> usize {
        self.end - self.payload
    }

    /// Without payload.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there are no options but one timestamp and padding.
    #[inline]
    pub fn has_timestamps_only(&self) -> bool {
        match &self.tcp()[20..] {
            [] => true,
            // RFC 7323, appendix A: as nearly everybody writes it.
            [1, 1, 8, 10, rest @ ..] if rest.len() == 8 => true,
            options => only_timestamps(options),
        }
    }

    /// A number for the flow: the same for all its segments of one direction.
    #[inline]
    pub fn hash(&self) -> u32 {
        let mut sum = u64::from(u32::from_be_bytes(self.ports()));
        for part in self.addresses().chunks_exact(8) {
            let part = part.first_chunk().map_or(0, |it| u64::from_be_bytes(*it));
            sum = (sum ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sum ^= sum >> 32;
        }
        sum as u32
    }
}

fn only_timestamps(mut options: &[u8]) -> bool {
    let mut is_stamped = false;
    loop {
        match options {
            [] | [0, ..] => return true,
            [1, rest @ ..] => options = rest,
            [8, 10, rest @ ..] if rest.len() >= 8 && !is_stamped => {
                (options, is_stamped) = (&rest[8..], true);
            }
            _ => return false,
        }
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Flags of a TCP header (RFC 9293, 3.1).
pub mod flag {
    /// The sender has no more data.
    pub const FIN: u8 = 0x01;
    /// The flow begins.
    pub const SYN: u8 = 0x02;
    /// The flow is reset.
    pub const RST: u8 = 0x04;
    /// What has come is to be handed on.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer counts.
    pub const URG: u8 = 0x20;
    /// Congestion was experienced (RFC 3168).
    pub const ECE: u8 = 0x40;
    /// The congestion window was reduced (RFC 3168).
    pub const CWR: u8 = 0x80;
}

/// Bytes of the longest headers of a segment: eight tags, IPv6, TCP with all options.
pub const HEADERS: usize = 14 + 8 * 4 + 40 + 60;

/// The protocol number of TCP.
const TCP: u8 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    fn options(bytes: &[u8]) -> bool {
        let mut frame = vec![0; 14 + 20 + 20];
        (frame[12], frame[14], frame[23]) = (8, 0x45, TCP);
        frame.extend(bytes);
        frame[14 + 20 + 12] = (5 + bytes.len() as u8 / 4) << 4;
        frame[17] = 40 + bytes.len() as u8;
        match look(&frame, frame.len()) {
            Look::Tcp(segment) => segment.has_timestamps_only(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_timestamp_and_padding_are_the_only_options() {
        let stamp = [8, 10, 1, 2, 3, 4, 5, 6, 7, 8];
        assert!(options(&[]));
        assert!(options(&[&[1, 1], &stamp[..]].concat()));
        assert!(options(&[&stamp[..], &[1, 1]].concat()));
        assert!(options(&[&stamp[..], &[0, 9]].concat()));
        assert!(options(&[1, 1, 1, 0]));
        // Twice, too short, SACK, a kind that nobody knows.
        assert!(!options(&[&stamp[..], &stamp[..]].concat()));
        assert!(!options(&[8, 10, 1, 2]));
        assert!(!options(&[1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2]));
        assert!(!options(&[1, 1, 254, 2]));
    }
}

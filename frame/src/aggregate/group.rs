//! Segments that follow each other: which one continues them, and the headers of what they become.

use vnplug_ring::offload::{Offload, flags, gso};

use super::single::pseudo;
use super::{ENDS, LONGEST, Limits};
use crate::offload::checksum::Sum;
use crate::segment::Segment;

/// Segments that follow each other.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) hash: u32,
    /// Its headers: where they are, and what of them is where.
    pub(super) head: usize,
    pub(super) network: usize,
    pub(super) transport: usize,
    pub(super) payload: usize,
    pub(super) is_ipv6: bool,
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) count: usize,
    /// Payload of each segment but the last, and of all.
    pub(super) size: usize,
    pub(super) len: usize,
    /// Flags of the last one that are the super-frame's.
    pub(super) ends: u8,
    /// The first one's checksums were looked at.
    pub(super) is_verified: bool,
    /// The super-frame, once it is made.
    pub(super) bytes: (usize, usize),
    pub(super) offload: Offload,
}

impl Group {
    /// Whether a segment is what comes next in a self.
    #[inline]
    pub(super) fn continues(&self, head: &[u8], segment: &Segment<'_>, limits: &Limits) -> bool {
        let &Group {
            network,
            transport,
            payload,
            ..
        } = self;
        let new = segment.headers();
        let is_like = (
            segment.network,
            segment.transport,
            segment.payload,
            segment.is_ipv6,
        ) == (network, transport, payload, self.is_ipv6);
        let has_room = self.count < limits.segments
            && segment.len() <= self.size
            && payload + self.len + segment.len() <= LONGEST;
        if !is_like || !has_room {
            return false;
        }
        let (ip, new_ip) = (&head[network..transport], &new[network..transport]);
        let is_same_ip = if self.is_ipv6 {
            ip[..4] == new_ip[..4] && ip[6..] == new_ip[6..]
        } else {
            let id = half(ip, 4).wrapping_add(self.count as u16);
            ip[..2] == new_ip[..2]
                && id == half(new_ip, 4)
                && ip[6..10] == new_ip[6..10]
                && ip[12..] == new_ip[12..]
        };
        let (tcp, new_tcp) = (&head[transport..], segment.tcp());
        let seq = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        head[..network] == new[..network]
            && is_same_ip
            && tcp[..4] == new_tcp[..4]
            && seq.wrapping_add(self.len as u32) == segment.seq()
            && tcp[8..13] == new_tcp[8..13]
            && (tcp[13] ^ new_tcp[13]) & !ENDS == 0
            && tcp[14..16] == new_tcp[14..16]
            && tcp[18..] == new_tcp[18..]
    }

    /// Makes the headers of the first segment those of the super-frame.
    pub(super) fn patch(&mut self, frame: &mut [u8]) {
        let carries = (self.payload - self.transport + self.len) as u16;
        let (network, transport) = frame.split_at_mut(self.transport);
        let ip = &mut network[self.network..];
        if self.is_ipv6 {
            ip[4..6].copy_from_slice(&carries.to_be_bytes());
        } else {
            let total = ip.len() as u16 + carries;
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            ip[10..12].fill(0);
            let sum = Sum::default().bytes(ip).finish();
            ip[10..12].copy_from_slice(&sum);
        }
        transport[13] |= self.ends;
        let addresses = if self.is_ipv6 { 8..40 } else { 12..20 };
        let sum = pseudo(&ip[addresses], carries);
        transport[16..18].copy_from_slice(&sum);
        self.offload = Offload {
            flags: flags::NEEDS_CSUM,
            gso_type: if self.is_ipv6 { gso::TCPV6 } else { gso::TCPV4 },
            gso_size: self.size as u16,
            csum_start: self.transport as u16,
            csum_offset: 16,
        };
    }
}

#[inline]
fn half(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

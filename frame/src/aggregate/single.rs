//! One frame of a batch: whether it could be merged, as far as itself says.

use vnplug_ring::offload::{Offload, flags};

use super::{ENDS, Limits};
use crate::offload::checksum::Sum;
use crate::segment::{HEADERS, Segment, flag};

/// A frame of a batch, in two parts.
#[derive(Debug, Clone, Copy)]
pub struct Single<'a> {
    /// Its first bytes: all, or as many as there are before `body`.
    pub head: &'a [u8],
    /// The rest.
    pub body: &'a [u8],
    /// Bytes that are elsewhere: it is not merged.
    pub missing: usize,
    /// What is left to do with it.
    pub offload: Option<&'a Offload>,
    /// A card or the kernel found its checksum right.
    pub is_valid: bool,
}

impl<'a> Single<'a> {
    /// Bytes of the frame.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.head.len() + self.body.len() + self.missing
    }

    /// All headers in one piece.
    #[inline]
    pub(super) fn joined<'b>(&self, space: &'b mut [u8; HEADERS]) -> &'b [u8]
    where
        'a: 'b,
    {
        if self.body.is_empty() || self.head.len() >= HEADERS {
            return self.head;
        }
        let (head, rest) = space.split_at_mut(self.head.len());
        head.copy_from_slice(self.head);
        let more = rest.len().min(self.body.len());
        rest[..more].copy_from_slice(&self.body[..more]);
        let len = self.head.len() + more;
        &space[..len]
    }

    /// What follows its first `from` bytes, in two parts, of a frame that [`is_candidate`] has seen.
    #[inline]
    pub(super) fn payload(&self, from: usize) -> [&'a [u8]; 2] {
        match from.checked_sub(self.head.len()) {
            Some(from) => [&[], &self.body[from..]],
            None => [&self.head[from..], self.body],
        }
    }

    /// Whether its checksums are those that a cut would write.
    #[inline]
    pub(super) fn is_right(&self, segment: &Segment<'_>) -> bool {
        let ip = segment.ip();
        if !segment.is_ipv6 {
            let sum = Sum::default().bytes(&ip[..10]).bytes(&ip[12..]).finish();
            if sum != ip[10..12] {
                return false;
            }
        }
        let tcp = segment.tcp();
        let carries = (tcp.len() + segment.len()) as u16;
        if self.offload.is_some_and(Offload::is_due) {
            // Its sender vouches for the rest.
            return pseudo(segment.addresses(), carries) == tcp[16..18];
        }
        // 0xffff is as right as 0, but not what a cut writes.
        if self.is_valid && tcp[16..18] != [0xff; 2] {
            return true;
        }
        let [begin, rest] = self.payload(segment.payload);
        let sum = Sum::default()
            .bytes(segment.addresses())
            .number(u32::from(carries) + TCP)
            .bytes(&tcp[..16])
            .bytes(&tcp[18..])
            .bytes(begin)
            .bytes(rest)
            .finish();
        sum == tcp[16..18]
    }
}

/// Whether a segment could be one of several, as far as its headers say.
#[inline]
pub(super) fn is_candidate(segment: &Segment<'_>, single: &Single<'_>, limits: &Limits) -> bool {
    let is_wanted = if segment.is_ipv6 {
        limits.ipv6
    } else {
        limits.ipv4
    };
    // A sum has an odd number of bytes only at its end.
    let begun = single.head.len().saturating_sub(segment.payload);
    let is_here = single.missing == 0
        && segment.end == single.len()
        && (begun.is_multiple_of(2) || single.body.is_empty());
    // Nothing is left to do with it, or the checksum of TCP is.
    let is_plain = single.offload.is_none_or(|offload| {
        let place = (usize::from(offload.csum_start), offload.csum_offset);
        let is_left = offload.flags & flags::NEEDS_CSUM != 0;
        !offload.is_super_frame() && (!is_left || place == (segment.transport, 16))
    });
    // The bit before DF is reserved, and 0.
    let is_odd = !segment.is_ipv6 && segment.ip()[6] & 0x80 != 0;
    // A frame for a group goes to many ports, each of which would have it merged anew.
    let is_for_one = single.head.first().is_some_and(|byte| byte & 1 == 0);
    is_wanted
        && is_for_one
        && is_here
        && is_plain
        && !is_odd
        && !segment.is_empty()
        && segment.flags() & !(ENDS | flag::ECE) == flag::ACK
        && segment.has_timestamps_only()
}

/// The sum of the pseudo header, as a sender leaves it in a checksum's place.
#[inline]
pub(super) fn pseudo(addresses: &[u8], carries: u16) -> [u8; 2] {
    let sum = Sum::default()
        .bytes(addresses)
        .number(u32::from(carries) + TCP)
        .finish();
    sum.map(|byte| !byte)
}

/// The protocol number of TCP.
const TCP: u32 = 6;

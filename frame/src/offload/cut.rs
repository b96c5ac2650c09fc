//! Cuts super-frames and fills checksums, without moving payload: each packet is new headers and a part of
//! the frame.

use std::ops::Range;

use crc32c::{crc32c, crc32c_append};

use super::checksum::Sum;
use super::{Place, Plan, Work};

/// Packets that frames become. It keeps its memory.
#[derive(Debug, Default)]
pub struct Pieces {
    heads: Vec<u8>,
    pieces: Vec<Cut>,
}

/// A packet: new bytes, then some of its frame's.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Its headers.
    pub head: &'a [u8],
    /// What follows them.
    pub body: &'a [u8],
    /// Its length on the wire; more than both if the frame was cut short when it was captured.
    pub wire_len: u32,
    /// Its checksum is right. If not all of it is there, nobody can say.
    pub is_summed: bool,
}

impl<'a> Piece<'a> {
    /// Its first bytes, at most `most`, in its two parts.
    pub fn cut_to(&self, most: u32) -> (&'a [u8], &'a [u8]) {
        let most = most as usize;
        let head = &self.head[..self.head.len().min(most)];
        let body = &self.body[..self.body.len().min(most - head.len())];
        (head, body)
    }
}

#[derive(Debug, Clone, Copy)]
struct Cut {
    head: (u32, u32),
    body: (u32, u32),
    wire_len: u32,
    is_summed: bool,
}

impl Pieces {
    /// Forgets all packets, and gives back memory that few batches need.
    pub fn clear(&mut self) {
        self.heads.clear();
        self.heads.shrink_to(KEPT);
        self.pieces.clear();
        self.pieces.shrink_to(KEPT / size_of::<Cut>());
    }

    /// Does the `work` that was found for this frame of `wire_len` bytes, and says which packets it has
    /// become.
    pub fn make(&mut self, frame: &[u8], wire_len: u32, work: &Work) -> Range<usize> {
        let first = self.pieces.len();
        match work {
            Work::Sum(place) => self.sum(frame, wire_len, place),
            Work::Cut(plan) => self.cut(frame, wire_len as usize, plan),
        }
        first..self.pieces.len()
    }

    /// The frame itself as the only packet: nothing is done.
    pub fn keep(&mut self, frame: &[u8], wire_len: u32) -> Range<usize> {
        let at = self.pieces.len();
        let head = self.heads.len() as u32;
        self.pieces.push(Cut {
            head: (head, head),
            body: (0, frame.len() as u32),
            wire_len,
            is_summed: false,
        });
        at..at + 1
    }

    /// Packet `at`, which `frame` became.
    #[inline]
    pub fn get<'a>(&'a self, at: usize, frame: &'a [u8]) -> Piece<'a> {
        let cut = &self.pieces[at];
        let range = |(from, to): (u32, u32)| from as usize..to as usize;
        Piece {
            head: &self.heads[range(cut.head)],
            body: &frame[range(cut.body)],
            wire_len: cut.wire_len,
            is_summed: cut.is_summed,
        }
    }

    fn sum(&mut self, frame: &[u8], wire_len: u32, place: &Place) {
        let &Place { start, at, is_crc } = place;
        let end = if is_crc { at + 4 } else { at + 2 };
        let head = self.heads.len();
        self.heads.extend_from_slice(&frame[..end]);
        let is_summed = frame.len() >= wire_len as usize;
        if is_summed {
            let field = &mut self.heads[head + at..];
            if is_crc {
                let before = crc32c(&frame[start..at]);
                let crc = crc32c_append(crc32c_append(before, &[0; 4]), &frame[end..]);
                field.copy_from_slice(&crc.to_le_bytes());
            } else {
                let sum = Sum::default().bytes(&frame[start..]).finish();
                field.copy_from_slice(&not_zero(sum));
            }
        }
        self.pieces.push(Cut {
            head: (head as u32, (head + end) as u32),
            body: (end as u32, frame.len() as u32),
            wire_len,
            is_summed,
        });
    }

    fn cut(&mut self, frame: &[u8], wire_len: usize, plan: &Plan) {
        let wire_len = wire_len.max(frame.len());
        let &Plan {
            payload,
            size,
            count,
            ..
        } = plan;
        self.heads.reserve(count * payload);
        self.pieces.reserve(count);
        for nth in 0..count {
            let from = payload + nth * size;
            let to = (from + size).min(wire_len);
            let there = frame.len();
            let body = (from.min(there), to.min(there));
            let head = self.heads.len();
            self.heads.extend_from_slice(&frame[..payload]);
            let is_summed = to <= there;
            let part = is_summed.then(|| &frame[body.0..body.1]);
            plan.patch(&mut self.heads[head..], nth, to - from, part);
            self.pieces.push(Cut {
                head: (head as u32, (head + payload) as u32),
                body: (body.0 as u32, body.1 as u32),
                wire_len: (payload + to - from) as u32,
                is_summed,
            });
        }
    }
}

impl Plan {
    /// Makes the frame's headers those of packet `nth`, which has `len` bytes of payload; computes its
    /// checksum if that is there.
    #[inline]
    fn patch(&self, head: &mut [u8], nth: usize, len: usize, payload: Option<&[u8]>) {
        let (network, transport) = head.split_at_mut(self.transport);
        let network = &mut network[self.network..];
        let carries = (transport.len() + len) as u16;
        if self.is_ipv6 {
            let extensions = (network.len() - 40) as u16;
            network[4..6].copy_from_slice(&(extensions + carries).to_be_bytes());
        } else {
            let total = network.len() as u16 + carries;
            network[2..4].copy_from_slice(&total.to_be_bytes());
            let id = u16::from_be_bytes([network[4], network[5]]).wrapping_add(nth as u16);
            network[4..6].copy_from_slice(&id.to_be_bytes());
            network[10..12].fill(0);
            let sum = Sum::default().bytes(network).finish();
            network[10..12].copy_from_slice(&sum);
        }
        let (at, protocol) = if self.is_udp { (6, 17) } else { (16, 6) };
        let stored = [transport[at], transport[at + 1]];
        if self.is_udp {
            transport[4..6].copy_from_slice(&carries.to_be_bytes());
        } else {
            let mut sequence = [0; 4];
            sequence.copy_from_slice(&transport[4..8]);
            let sequence = u32::from_be_bytes(sequence).wrapping_add((nth * self.size) as u32);
            transport[4..8].copy_from_slice(&sequence.to_be_bytes());
            if nth + 1 < self.count {
                transport[FLAGS] &= !(FIN | PSH);
            }
            if nth > 0 && self.clears_cwr {
                transport[FLAGS] &= !CWR;
            }
        }
        let Some(payload) = payload else { return };
        transport[at..at + 2].fill(0);
        let pseudo = match self.left {
            // Less its length: the complement is what is subtracted (RFC 1624, 3).
            Some(len) => Sum::default().bytes(&stored).number(!len),
            None => {
                let addresses = if self.is_ipv6 { 8..40 } else { 12..20 };
                let sum = Sum::default().bytes(&network[addresses]);
                sum.number(protocol)
            }
        };
        let sum = pseudo
            .number(carries.into())
            .bytes(transport)
            .bytes(payload)
            .finish();
        let sum = if self.is_udp { not_zero(sum) } else { sum };
        transport[at..at + 2].copy_from_slice(&sum);
    }
}

/// A UDP checksum of 0 means that there is none (RFC 768); Linux does the same for every protocol whose
/// checksum alone is left to it (`skb_checksum_help`).
fn not_zero(sum: [u8; 2]) -> [u8; 2] {
    if sum == [0, 0] { [0xff, 0xff] } else { sum }
}

/// Bytes that are kept: what a batch of 256 whole super-frames of usual packets takes.
const KEPT: usize = 1 << 20;

/// Where a TCP header has its flags (RFC 9293, 3.1), and three of them.
const FLAGS: usize = 13;
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

//! Receive aggregation: TCP segments that follow each other become one super-frame.
//!
//! It is the inverse of [`offload`](crate::offload): what is merged here is cut there into the same frames,
//! byte for byte. The rules are those of Linux (`tcp_gro_receive` and `inet_gro_receive`, Linux 6.12) and of
//! Menon (2007, 3.2.1), whichever is stricter.
//!
//! A segment joins the one before it if
//!
//! | | |
//! |---|---|
//! | equal | Ethernet addresses, VLAN tags, IP addresses, ports, TOS or traffic class, flow label, TTL, DF, ACK number, window, urgent pointer, reserved bits, flags but PSH and FIN, TCP options |
//! | continuous | sequence number, and the identification of IPv4 |
//! | right | IPv4 header checksum, TCP checksum (or the sum of the pseudo header, if the rest is left to do) |
//! | has | payload, at most as much as the first; ACK; no options but one timestamp |
//! | has not | SYN, RST, URG, CWR; IP options, extension headers, fragments; padding behind the payload |
//!
//! A shorter segment, PSH, FIN or the limit ends a super-frame. Everything else passes as it is, and ends the
//! super-frame of its flow, so that nothing overtakes a frame of its own flow; a frame that may be of any
//! flow ([`Look::Unknown`]) ends all.
//!
//! Nothing waits: a batch is looked at by itself, and all that is in it leaves with it. A batch has at most
//! [`FLOWS`] super-frames that are not ended; one more flow ends one of them, and is none the worse.

mod group;
mod single;

use vnplug_ring::offload::Offload;

use crate::segment::{HEADERS, Look, Segment, flag, look};
use group::Group;
pub use single::Single;
use single::is_candidate;

/// Merges the segments of one batch at a time. It keeps its memory.
#[derive(Debug)]
pub struct Aggregator {
    /// What became of each frame of the batch.
    fates: Vec<Fate>,
    /// The frame that follows in the same super-frame.
    next: Vec<u32>,
    groups: Vec<Group>,
    /// Headers of groups.
    heads: Vec<u8>,
    /// Super-frames, whole.
    bytes: Vec<u8>,
    /// Groups that are not ended, by the hash of the flow.
    open: [u32; FLOWS],
    /// Which of a set is closed next, if it is full.
    turn: usize,
}

/// What is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Segments of a super-frame; at most [`MAX_SEGMENTS`].
    pub segments: usize,
    /// Those of IPv4.
    pub ipv4: bool,
    /// Those of IPv6.
    pub ipv6: bool,
}

/// What leaves, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// This frame of the batch, as it is.
    Frame(u32),
    /// This super-frame, which begins with that frame of the batch.
    Made(Made, u32),
}

/// A super-frame that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made(u32);

#[derive(Debug, Clone, Copy)]
enum Fate {
    Alone,
    /// The first of a group.
    First(u32),
    Later,
}

impl Default for Aggregator {
    fn default() -> Self {
        Self {
            fates: Vec::new(),
            next: Vec::new(),
            groups: Vec::new(),
            heads: Vec::new(),
            bytes: Vec::new(),
            open: [NONE; FLOWS],
            turn: 0,
        }
    }
}

impl Aggregator {
    /// Merges what can be of `count` frames, which `get` has by number. How many frames are gone: what a
    /// super-frame has beyond one.
    pub fn run<'a>(
        &mut self,
        limits: &Limits,
        count: usize,
        get: impl Fn(usize) -> Single<'a>,
    ) -> usize {
        self.begin();
        for at in 0..count {
            let single = get(at);
            let fate = if single.body.is_empty() || single.head.len() >= HEADERS {
                self.place(at, single.head, &single, limits, &get)
            } else {
                let mut space = [0; HEADERS];
                let head = single.joined(&mut space);
                self.place(at, head, &single, limits, &get)
            };
            self.fates.push(fate);
            self.next.push(NONE);
        }
        let mut gone = 0;
        for at in 0..self.groups.len() {
            if self.groups[at].count > 1 {
                gone += self.groups[at].count - 1;
                self.make(at, &get);
            }
        }
        gone
    }

    /// What leaves, in order.
    pub fn outcomes(&self) -> impl Iterator<Item = Outcome> {
        let all = (0..).zip(&self.fates);
        all.filter_map(|(at, fate)| match *fate {
            Fate::Alone => Some(Outcome::Frame(at)),
            Fate::First(group) => Some(match self.groups[group as usize].count {
                1 => Outcome::Frame(at),
                _ => Outcome::Made(Made(group), at),
            }),
            Fate::Later => None,
        })
    }

    /// A super-frame that was made, and what is left to do with it.
    #[inline]
    pub fn get(&self, made: Made) -> (&[u8], &Offload) {
        let group = &self.groups[made.0 as usize];
        (&self.bytes[group.bytes.0..group.bytes.1], &group.offload)
    }

    fn begin(&mut self) {
        self.fates.clear();
        self.next.clear();
        self.groups.clear();
        self.heads.clear();
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        self.open = [NONE; FLOWS];
    }

    /// Finds the group of a frame, or begins one.
    #[inline]
    fn place<'a>(
        &mut self,
        at: usize,
        head: &[u8],
        single: &Single<'_>,
        limits: &Limits,
        get: &impl Fn(usize) -> Single<'a>,
    ) -> Fate {
        let segment = match look(head, single.len()) {
            Look::Other => return Fate::Alone,
            Look::Unknown => {
                self.open = [NONE; FLOWS];
                return Fate::Alone;
            }
            Look::Tcp(segment) => segment,
        };
        let hash = segment.hash();
        let slot = self.find(hash);
        if !is_candidate(&segment, single, limits) {
            if let Some(slot) = slot {
                self.open[slot] = NONE;
            }
            return Fate::Alone;
        }
        if let Some(slot) = slot {
            let open = self.open[slot] as usize;
            let group = &self.groups[open];
            let head = &self.heads[group.head..][..group.payload];
            let is_next = group.continues(head, &segment, limits) && single.is_right(&segment);
            if is_next && self.is_first_right(open, get) {
                self.join(slot, at, &segment, limits);
                return Fate::Later;
            }
            self.open[slot] = NONE;
        }
        if segment.flags() & ENDS != 0 {
            return Fate::Alone;
        }
        let group = self.groups.len() as u32;
        self.start(at, hash, &segment);
        let slot = slot.unwrap_or_else(|| self.room(hash));
        self.open[slot] = group;
        Fate::First(group)
    }

    /// Where the open group of a flow is.
    #[inline]
    fn find(&self, hash: u32) -> Option<usize> {
        let is_it = |slot: &usize| {
            let group = self.groups.get(self.open[*slot] as usize);
            group.is_some_and(|group| group.hash == hash)
        };
        set(hash).find(is_it)
    }

    /// A place for one more open group.
    fn room(&mut self, hash: u32) -> usize {
        let mut all = set(hash);
        let first = all.start;
        all.find(|slot| self.open[*slot] == NONE)
            .unwrap_or_else(|| {
                self.turn = self.turn.wrapping_add(1);
                first + self.turn % WAYS
            })
    }

    fn start(&mut self, at: usize, hash: u32, segment: &Segment<'_>) {
        let head = self.heads.len();
        self.heads.extend_from_slice(segment.headers());
        self.groups.push(Group {
            hash,
            head,
            network: segment.network,
            transport: segment.transport,
            payload: segment.payload,
            is_ipv6: segment.is_ipv6,
            first: at as u32,
            last: at as u32,
            count: 1,
            size: segment.len(),
            len: segment.len(),
            ends: 0,
            is_verified: false,
            bytes: (0, 0),
            offload: Offload::default(),
        });
    }

    /// Whether the checksums of a group's first segment are right, which nobody asks before a second comes.
    fn is_first_right<'a>(&mut self, group: usize, get: &impl Fn(usize) -> Single<'a>) -> bool {
        let group = &mut self.groups[group];
        if group.is_verified {
            return true;
        }
        let single = get(group.first as usize);
        let mut space = [0; HEADERS];
        let head = single.joined(&mut space);
        group.is_verified = match look(head, single.len()) {
            // NB: memory that others write may have changed since.
            Look::Tcp(first) if first.payload == group.payload && first.end == single.len() => {
                single.is_right(&first)
            }
            _ => false,
        };
        group.is_verified
    }

    fn join(&mut self, slot: usize, at: usize, segment: &Segment<'_>, limits: &Limits) {
        let group = &mut self.groups[self.open[slot] as usize];
        self.next[group.last as usize] = at as u32;
        group.last = at as u32;
        group.count += 1;
        group.len += segment.len();
        group.ends = segment.flags() & ENDS;
        if group.ends != 0 || segment.len() < group.size || group.count == limits.segments {
            self.open[slot] = NONE;
        }
    }

    /// Writes the super-frame of a group.
    fn make<'a>(&mut self, at: usize, get: &impl Fn(usize) -> Single<'a>) {
        let group = &mut self.groups[at];
        let begin = self.bytes.len();
        self.bytes
            .extend_from_slice(&self.heads[group.head..][..group.payload]);
        let mut next = group.first;
        for _ in 0..group.count {
            // All of them are as long as the first, but the last.
            let mut most = group
                .size
                .min(begin + group.payload + group.len - self.bytes.len());
            for part in get(next as usize).payload(group.payload) {
                let len = part.len().min(most);
                self.bytes.extend_from_slice(&part[..len]);
                most -= len;
            }
            next = self.next[next as usize];
        }
        group.bytes = (begin, self.bytes.len());
        group.patch(&mut self.bytes[begin..]);
    }
}

/// The places of a flow among the open groups.
#[inline]
fn set(hash: u32) -> std::ops::Range<usize> {
    let first = hash as usize % (FLOWS / WAYS) * WAYS;
    first..first + WAYS
}

/// The most segments of a super-frame: 64 KiB at the usual size.
pub const MAX_SEGMENTS: usize = 44;
/// Super-frames of a batch that are not ended.
pub const FLOWS: usize = 64;
/// Places where an open group may be.
const WAYS: usize = 4;
/// No group, no frame.
const NONE: u32 = u32::MAX;
/// Bytes of the longest frame that is made: neither a packet socket nor a buffer for 64 KiB takes a longer one.
const LONGEST: usize = 65_535;
/// The flags that end a super-frame, and only its last segment has.
const ENDS: u8 = flag::PSH | flag::FIN;
/// Bytes that are kept from batch to batch: 128 frames of 9 KiB have less.
const KEPT: usize = 2 << 20;

#[cfg(test)]
mod tests;

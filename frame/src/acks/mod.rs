//! Acknowledgement offload: one ACK for a super-frame becomes those that its segments would have had.
//!
//! A receiver that is given super-frames ([`aggregate`](crate::aggregate)) sends an ACK for each, where it
//! would have sent one for every two segments (RFC 9293, 3.8.6.3). A sender that counts ACKs, not bytes, is
//! slowed by that. Menon (2007, 3.2.2) has the receiver send a template with a list of numbers; here the
//! receiver knows nothing, its ACK is the template, and the list is what was merged for it.
//!
//! - **Given.** Of each flow that was merged for the receiver, the ends of segments are remembered: only of
//!   super-frames that came in order, as there is no ACK for others.
//! - **Sent.** An ACK that goes beyond such ends is preceded by copies of itself with their numbers, one for
//!   every two segments. It itself is the last of them, and unchanged.
//!
//! An ACK is expanded only if it says nothing else: flags ACK alone, no payload, no options but one
//! timestamp (so no SACK), the window of the ACK before, and IPv4 with DF (RFC 6864: then its identification
//! may occur again). A duplicate, an older one, and the first one that is seen of a flow are not.
//!
//! With accurate ECN (RFC 9768) each ACK carries a count of CE marks in its flags, of which every eighth value
//! looks like no flag at all. Copies would say it of numbers before the mark; so no ACK is expanded of a flow
//! that was seen to use it.
//!
//! A receiver that lies gains nothing. A number is used once, if it was given, if it is beyond the last ACK,
//! and below the one that is expanded; so there are at most half as many copies as segments given.

use vnplug_ring::offload::{Offload, flags};

use crate::segment::{HEADERS, Look, Segment, flag, look};

/// What is known of the flows of one receiver.
#[derive(Debug)]
pub struct Acks {
    /// By their hash, in sets of [`WAYS`].
    flows: Vec<Option<Flow>>,
    /// Counts what happens, to find the flow that is not used.
    now: u64,
    /// Numbers of the copies that were asked for last.
    numbers: Vec<u32>,
}

impl Default for Acks {
    fn default() -> Self {
        Self {
            flows: (0..FLOWS).map(|_| None).collect(),
            now: 0,
            numbers: Vec::with_capacity(MAX_COPIES),
        }
    }
}

impl Acks {
    /// The receiver was given this frame, merged of segments with `size` bytes of payload each; `None`: it was not merged.
    pub fn given(&mut self, segment: &Segment<'_>, size: Option<u16>) {
        let flags = segment.flags();
        let fin = flags & flag::FIN;
        let len = segment.len() as u32 + u32::from(fin);
        let begins = flags & (flag::SYN | flag::RST) != 0;
        // An ACK alone, as most frames are that have no data.
        if len == 0 && !begins {
            return;
        }
        let Some(key) = Key::of(segment, false) else {
            return;
        };
        if begins {
            return self.begin(key, segment);
        }
        let (start, end) = (segment.seq(), segment.seq().wrapping_add(len));
        self.now += 1;
        if let Some(flow) = self.find(&key).and_then(|at| self.flows[at].as_mut()) {
            flow.used = self.now;
            flow.is_accurate |= segment.reserved() & AE != 0;
            // No ACK is for the data of a segment without its FIN.
            flow.given(start, end, size.filter(|_| fin == 0));
        } else if size.is_some() {
            let mut flow = Flow::new(key, self.now, (start, end));
            flow.is_accurate = segment.reserved() & AE != 0;
            let room = self.room(&flow.key);
            self.flows[room] = Some(flow);
        }
    }

    /// The receiver sends this. The numbers of the ACKs that go before it, in order.
    pub fn sent(&mut self, segment: &Segment<'_>) -> &[u32] {
        self.numbers.clear();
        let Some(key) = Key::of(segment, true) else {
            return &[];
        };
        let flags = segment.flags();
        if flags & (flag::SYN | flag::RST) != 0 {
            self.begin(key, segment);
            return &[];
        }
        if let Some(at) = self.find(&key)
            && let Some(flow) = &mut self.flows[at]
            && flags & flag::ACK != 0
        {
            self.now += 1;
            flow.used = self.now;
            if !segment.has_timestamps_only() {
                // It misses something (SACK), which it may have been given: nor is this one expanded.
                flow.forget_given();
            }
            // RFC 3168, 6.1.2: CWR is for data, but with accurate ECN.
            flow.is_accurate |= segment.reserved() & AE != 0;
            flow.is_accurate |= segment.is_empty() && flags & flag::CWR != 0;
            let (ack, window) = (segment.ack(), segment.window());
            let is_pure = !flow.is_accurate && is_pure(segment);
            flow.acknowledged(ack, window, is_pure, &mut self.numbers);
        }
        &self.numbers
    }

    /// The receiver sends this whole frame: calls `put` with each ACK that goes before it, in order, until that
    /// has no room. How many there were.
    pub fn expand(
        &mut self,
        frame: &[u8],
        offload: &Offload,
        mut put: impl FnMut(&[u8]) -> bool,
    ) -> u64 {
        let Look::Tcp(segment) = look(frame, frame.len()) else {
            return 0;
        };
        let transport = segment.transport;
        let numbers = self.sent(&segment);
        if numbers.is_empty() {
            return 0;
        }
        let is_left = offload.flags & flags::NEEDS_CSUM != 0;
        let place = (usize::from(offload.csum_start), offload.csum_offset);
        let may_be_copied = !offload.is_super_frame() && (!is_left || place == (transport, 16));
        let mut copy = [0; HEADERS];
        let copy = match copy.get_mut(..frame.len()) {
            Some(copy) if may_be_copied => copy,
            _ => return 0,
        };
        let mut added = 0;
        for &number in numbers {
            copy.copy_from_slice(frame);
            renumber(copy, transport, number, is_left);
            if !put(copy) {
                break;
            }
            added += 1;
        }
        added
    }

    /// Where a flow is.
    #[inline]
    fn find(&self, key: &Key) -> Option<usize> {
        key.set()
            .find(|at| self.flows[*at].as_ref().is_some_and(|it| it.key == *key))
    }

    /// Where one more flow could be: nothing is there, or what was not used for the longest time.
    fn room(&self, key: &Key) -> usize {
        let used = |at: &usize| self.flows[*at].as_ref().map_or(0, |flow| flow.used);
        key.set().min_by_key(used).unwrap_or(0)
    }

    /// A SYN or an RST: what was known of such a flow is of another.
    fn begin(&mut self, key: Key, segment: &Segment<'_>) {
        self.now += 1;
        let at = self.find(&key);
        if let Some(at) = at {
            self.flows[at] = None;
        }
        if agrees_on_accurate_ecn(segment) {
            let seq = segment.seq();
            let mut flow = Flow::new(key, self.now, (seq, seq));
            flow.is_accurate = true;
            let at = at.unwrap_or_else(|| self.room(&flow.key));
            self.flows[at] = Some(flow);
        }
    }
}

/// Makes an ACK that of another number. Its checksum is as right as before; `is_left`: it is left to be made,
/// and does not cover the number yet.
fn renumber(frame: &mut [u8], transport: usize, number: u32, is_left: bool) {
    let tcp = &mut frame[transport..];
    let half = |tcp: &[u8], at: usize| u32::from(u16::from_be_bytes([tcp[at], tcp[at + 1]]));
    let old = [half(tcp, 8), half(tcp, 10)];
    tcp[8..12].copy_from_slice(&number.to_be_bytes());
    if is_left {
        return;
    }
    // RFC 1624, 3, eqn. 3.
    let mut sum = !half(tcp, 16) & 0xffff;
    for (old, at) in old.into_iter().zip([8, 10]) {
        sum += (!old & 0xffff) + half(tcp, at);
    }
    for _ in 0..2 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    tcp[16..18].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

/// Whether this is a SYN/ACK after which both ends use accurate ECN (RFC 9768, table 2).
fn agrees_on_accurate_ecn(segment: &Segment<'_>) -> bool {
    let flags = segment.flags();
    let says = |bit: u8| flags & bit != 0;
    if !says(flag::SYN) || !says(flag::ACK) || says(flag::RST) {
        return false;
    }
    let ae = segment.reserved() & AE != 0;
    match (ae, says(flag::CWR), says(flag::ECE)) {
        (false, true, _) | (true, _, false) => true,
        // No ECN, that of RFC 3168, and what is broken or unused.
        (false, false, _) | (true, _, true) => false,
    }
}

/// Whether an ACK says nothing but its number, its window, and what its options do.
fn is_pure(segment: &Segment<'_>) -> bool {
    // IPv4: DF and nothing beside it.
    let may_be_copied = segment.is_ipv6 || segment.ip()[6..8] == [0x40, 0];
    may_be_copied && segment.is_empty() && segment.flags() == flag::ACK && segment.reserved() == 0
}

/// A flow, as its data goes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    is_ipv6: bool,
    tags: [u16; MAX_TAGS],
    source: [u8; 16],
    target: [u8; 16],
    ports: [u8; 4],
}

impl Key {
    /// `None` if it has too many tags.
    fn of(segment: &Segment<'_>, is_back: bool) -> Option<Self> {
        // Tag after tag, and the Ethertype.
        let tags = segment.headers().get(12..segment.network - 2)?;
        if tags.len() > MAX_TAGS * 4 {
            return None;
        }
        let mut key = Self {
            is_ipv6: segment.is_ipv6,
            tags: [0; MAX_TAGS],
            source: [0; 16],
            target: [0; 16],
            ports: segment.ports(),
        };
        for (into, tag) in key.tags.iter_mut().zip(tags.chunks_exact(4)) {
            // The number alone, as both ways may have other priorities; and that there is a tag.
            *into = 0x8000 | u16::from_be_bytes([tag[2], tag[3]]) & 0xfff;
        }
        let addresses = segment.addresses();
        let (source, target) = addresses.split_at(addresses.len() / 2);
        key.source[..source.len()].copy_from_slice(source);
        key.target[..target.len()].copy_from_slice(target);
        if is_back {
            std::mem::swap(&mut key.source, &mut key.target);
            key.ports.rotate_left(2);
        }
        Some(key)
    }

    /// The places where its flow may be.
    fn set(&self) -> std::ops::Range<usize> {
        let first = self.hash() as usize % (FLOWS / WAYS) * WAYS;
        first..first + WAYS
    }

    fn hash(&self) -> u32 {
        let parts = [&self.source, &self.target].map(|it| u128::from_be_bytes(*it) as u64);
        let mut sum = u64::from(u32::from_be_bytes(self.ports));
        for part in parts {
            sum = (sum ^ part).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            sum ^= sum >> 32;
        }
        sum as u32
    }
}

/// What is known of a flow. Sequence numbers are compared by their distance (RFC 9293, 3.4).
#[derive(Debug)]
struct Flow {
    key: Key,
    used: u64,
    /// Its ACKs count CE marks, also where they look plain.
    is_accurate: bool,
    /// The receiver has everything up to here; `None` until its first ACK says so.
    edge: Option<u32>,
    /// The last of what it was given behind a hole: from here to there. Nothing was given beyond.
    late: Option<(u32, u32)>,
    /// Number and window of its last ACK.
    acked: Option<(u32, u16)>,
    /// Segments since the last ACK; −1: it came one too early.
    since: i32,
    /// What was merged for it, and is not acknowledged.
    runs: [Run; RUNS],
    count: usize,
}

/// Segments of a super-frame: their ends are `from` + `size`, + 2 · `size` and so on, and `end`.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    from: u32,
    size: u32,
    end: u32,
}

impl Flow {
    fn new(key: Key, used: u64, given: (u32, u32)) -> Self {
        Self {
            key,
            used,
            is_accurate: false,
            edge: None,
            late: Some(given),
            acked: None,
            since: 0,
            runs: [Run::default(); RUNS],
            count: 0,
        }
    }

    /// The receiver was given these bytes.
    fn given(&mut self, start: u32, end: u32, size: Option<u16>) {
        match self.edge {
            Some(edge) if start == edge => {
                // NB: what it has behind a hole may be a part of it, and has no ACK of its own.
                if let Some(size) = size.filter(|size| *size > 0 && self.late.is_none()) {
                    self.push(Run {
                        from: start,
                        size: u32::from(size),
                        end,
                    });
                }
                self.reach(end);
            }
            // Some of it again.
            Some(edge) if is_after(edge, start) => self.reach(end),
            _ => {
                self.late = Some(match self.late {
                    Some(late) if !is_after(end, late.1) => late,
                    Some((from, to)) if !is_after(start, to) => (earlier(from, start), end),
                    _ => (start, end),
                });
            }
        }
    }

    /// The receiver has everything up to here at least.
    fn reach(&mut self, end: u32) {
        let mut edge = self.edge.map_or(end, |edge| later(edge, end));
        if let Some((from, to)) = self.late
            && !is_after(from, edge)
        {
            (edge, self.late) = (later(edge, to), None);
        }
        self.edge = Some(edge);
    }

    /// The receiver lacks something of what it was given, or it would not say what it says.
    fn forget_given(&mut self) {
        (self.count, self.edge) = (0, None);
    }

    fn push(&mut self, run: Run) {
        if self.count == RUNS {
            self.runs.rotate_left(1);
            self.count -= 1;
        }
        self.runs[self.count] = run;
        self.count += 1;
    }

    /// The receiver acknowledges; `numbers` of the ACKs that go before.
    fn acknowledged(&mut self, number: u32, window: u16, is_pure: bool, numbers: &mut Vec<u32>) {
        let Some((last, last_window)) = self.acked else {
            self.acked = Some((number, window));
            self.reach(number);
            self.drop_up_to(number, |_| {});
            return;
        };
        if !is_after(number, last) {
            if number == last {
                if is_pure && window == last_window {
                    // A duplicate (RFC 5681, 2).
                    self.forget_given();
                }
                self.acked = Some((number, window));
            }
            return;
        }
        self.acked = Some((number, window));
        self.reach(number);
        let is_expanded = is_pure && window == last_window;
        let mut since = self.since;
        self.drop_up_to(number, |end| {
            since += 1;
            if is_expanded
                && since >= 2
                && end != number
                && is_after(end, last)
                && numbers.len() < MAX_COPIES
            {
                numbers.push(end);
                since = 0;
            }
        });
        self.since = (since - 2).clamp(-1, 0);
    }

    /// Forgets ends up to here, and calls for each.
    fn drop_up_to(&mut self, number: u32, mut each: impl FnMut(u32)) {
        let mut kept = 0;
        for at in 0..self.count {
            let mut run = self.runs[at];
            while run.from != run.end {
                let left = run.end.wrapping_sub(run.from);
                let end = run.from.wrapping_add(run.size.min(left));
                if is_after(end, number) {
                    break;
                }
                run.from = end;
                each(end);
            }
            if run.from != run.end {
                self.runs[kept] = run;
                kept += 1;
            }
        }
        self.count = kept;
    }
}

/// Whether a sequence number comes after another.
#[inline]
fn is_after(one: u32, other: u32) -> bool {
    (one.wrapping_sub(other) as i32) > 0
}

#[inline]
fn later(one: u32, other: u32) -> u32 {
    if is_after(one, other) { one } else { other }
}

#[inline]
fn earlier(one: u32, other: u32) -> u32 {
    if is_after(one, other) { other } else { one }
}

/// Flows of a receiver, and places where one may be.
const FLOWS: usize = 64;
const WAYS: usize = 4;
/// Super-frames of a flow that are not acknowledged; of more the oldest are forgotten.
const RUNS: usize = 16;
/// ACKs that one becomes, beside itself.
pub const MAX_COPIES: usize = 48;
/// AE, of the bits beside the header's length (RFC 9768, 3.1).
const AE: u8 = 1;
/// Tags of a frame.
const MAX_TAGS: usize = 2;

#[cfg(test)]
mod tests;

//! De-duplication: a packet that comes a second time within a window is not recorded.
//!
//! Mirror ports, and taps on both sides of a switch, deliver packets twice. Two packets are the same if
//! their captured bytes, their captured lengths and their lengths on the wire are equal; the interface
//! they came through, their direction and their stamps do not count. A packet is compared with those
//! that were **recorded**, not with duplicates of them, so that of a packet that comes again and again
//! one is recorded in each window. (`editcap -w` compares with duplicates, too, and keeps one of all.)
//!
//! A keyed hash finds candidates, and the bytes decide: no packet is taken for another. The other way,
//! a duplicate is recorded nevertheless if what it is compared with was forgotten, which is counted
//! (`forgotten`): memory has room for [`MEMORY`] bytes and [`ENTRIES`] packets, whatever the window. A
//! sender who knows the key could hide duplicates behind [`STEPS`] others of the same hash; it is drawn
//! at each start.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use vnplug::{Packet, flags};

/// What was recorded in the last moments.
pub(super) struct Dedup {
    window_ns: u64,
    keys: [u64; 4],
    /// The latest entry of each hash, by its number plus one.
    buckets: Box<[u64]>,
    /// A ring: entry n is at n modulo their number.
    entries: Box<[Entry]>,
    /// Entries so far.
    count: u64,
    /// The first one that was not overwritten.
    oldest: u64,
    /// A ring of packets, none of which is split.
    memory: Box<[u8]>,
    /// Bytes so far.
    head: u64,
    /// What the next packet of each interface says in the place of duplicates before it.
    carried: Vec<(u32, u16)>,
    /// Of each interface: duplicates that the books do not know.
    uncounted: Vec<u64>,
    untold: DedupStatus,
}

/// What was left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DedupStatus {
    /// Packets.
    pub packets: u64,
    /// Their captured bytes.
    pub bytes: u64,
    /// Packets that were forgotten before the window was over, since memory was short; duplicates of
    /// them are recorded.
    pub forgotten: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Entry {
    hash: u64,
    ts_ns: u64,
    /// Where its bytes are, as `head` counts.
    at: u64,
    len: u32,
    wire_len: u32,
    /// The entry before of its bucket, by its number plus one.
    before: u64,
}

impl Dedup {
    pub(super) fn new(window: Duration, interfaces: usize) -> Self {
        Self::with(window, interfaces, MEMORY, ENTRIES)
    }

    fn with(window: Duration, interfaces: usize, memory: usize, entries: usize) -> Self {
        let key = |n: u64| {
            let mut hasher = RandomState::new().build_hasher();
            hasher.write_u64(n);
            hasher.finish()
        };
        Self {
            window_ns: window.as_nanos() as u64,
            keys: [1, 2, 3, 4].map(key),
            buckets: vec![0; entries.next_power_of_two()].into(),
            entries: vec![Entry::default(); entries].into(),
            count: 0,
            oldest: 0,
            memory: vec![0; memory].into(),
            head: 0,
            carried: vec![(0, 0); interfaces],
            uncounted: vec![0; interfaces],
            untold: DedupStatus::default(),
        }
    }

    /// The packet as it is to be recorded; `None` if it is a duplicate.
    #[inline]
    pub(super) fn once<'a>(&mut self, interface: usize, packet: &Packet<'a>) -> Option<Packet<'a>> {
        let hash = self.hash(packet.bytes);
        let bucket = hash as usize & (self.buckets.len() - 1);
        if self.knows(hash, bucket, packet) {
            self.leave_out(interface, packet);
            return None;
        }
        self.remember(hash, bucket, packet);
        let mut packet = *packet;
        if let Some((lost, marks)) = self.carried.get_mut(interface)
            && (*lost, *marks) != (0, 0)
        {
            packet.meta.lost = packet.meta.lost.saturating_add(std::mem::take(lost));
            packet.meta.flags |= std::mem::take(marks);
        }
        Some(packet)
    }

    /// What was left out since the last call, and how much of each interface.
    pub(super) fn news(&mut self) -> (DedupStatus, Vec<u64>) {
        let each = self.uncounted.clone();
        self.uncounted.fill(0);
        (std::mem::take(&mut self.untold), each)
    }

    /// Of each interface: packets lost before its last duplicates, for which there is no next packet.
    pub(super) fn let_go(&mut self) -> Vec<u64> {
        let carried = self.carried.iter_mut().map(std::mem::take);
        carried.map(|(lost, _)| u64::from(lost)).collect()
    }

    fn knows(&self, hash: u64, bucket: usize, packet: &Packet<'_>) -> bool {
        let mut next = self.buckets[bucket];
        for _ in 0..STEPS {
            let Some(number) = next.checked_sub(1).filter(|&number| number >= self.oldest) else {
                return false;
            };
            let entry = &self.entries[number as usize % self.entries.len()];
            let same = entry.hash == hash
                && entry.len as usize == packet.bytes.len()
                && entry.wire_len == packet.meta.wire_len
                && entry.ts_ns.abs_diff(packet.meta.ts_ns) <= self.window_ns;
            if same {
                let start = entry.at as usize % self.memory.len();
                if self.memory[start..start + packet.bytes.len()] == *packet.bytes {
                    return true;
                }
            }
            next = entry.before;
        }
        false
    }

    fn remember(&mut self, hash: u64, bucket: usize, packet: &Packet<'_>) {
        let (size, len) = (self.memory.len(), packet.bytes.len());
        if len > size {
            return;
        }
        let place = self.head as usize % size;
        if place + len > size {
            self.head += (size - place) as u64;
        }
        let at = self.head;
        self.head += len as u64;
        // Those that this one overwrites.
        while self.oldest < self.count {
            let entry = &self.entries[self.oldest as usize % self.entries.len()];
            if entry.at + size as u64 >= self.head
                && self.count - self.oldest < self.entries.len() as u64
            {
                break;
            }
            let age = packet.meta.ts_ns.saturating_sub(entry.ts_ns);
            self.untold.forgotten += u64::from(age < self.window_ns);
            self.oldest += 1;
        }
        let start = at as usize % size;
        self.memory[start..start + len].copy_from_slice(packet.bytes);
        self.entries[self.count as usize % self.entries.len()] = Entry {
            hash,
            ts_ns: packet.meta.ts_ns,
            at,
            len: len as u32,
            wire_len: packet.meta.wire_len,
            before: self.buckets[bucket],
        };
        self.count += 1;
        self.buckets[bucket] = self.count;
    }

    fn leave_out(&mut self, interface: usize, packet: &Packet<'_>) {
        self.untold.packets += 1;
        self.untold.bytes += packet.bytes.len() as u64;
        if let Some(uncounted) = self.uncounted.get_mut(interface) {
            *uncounted += 1;
        }
        let marks = packet.meta.flags & (flags::GAP | flags::SOURCE_LOSS);
        if let Some(carried) = self.carried.get_mut(interface) {
            carried.0 = carried.0.saturating_add(packet.meta.lost);
            carried.1 |= marks;
        }
    }

    /// Two chains of multiplications, 32 bytes a step.
    #[inline]
    fn hash(&self, bytes: &[u8]) -> u64 {
        let [first, second, third, fourth] = self.keys;
        let (mut a, mut b) = (first ^ bytes.len() as u64, second);
        let mut step = |part: &[u8; 32]| {
            let word = |at: usize| {
                u64::from_le_bytes(part[at..at + 8].first_chunk().copied().unwrap_or_default())
            };
            a = fold(word(0) ^ third, word(8) ^ a);
            b = fold(word(16) ^ fourth, word(24) ^ b);
        };
        let (parts, rest) = bytes.as_chunks::<32>();
        for part in parts {
            step(part);
        }
        if !rest.is_empty() {
            let mut last = [0; 32];
            last[..rest.len()].copy_from_slice(rest);
            step(&last);
        }
        fold(a ^ fourth, b ^ third)
    }
}

impl std::fmt::Debug for Dedup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dedup")
            .field("window_ns", &self.window_ns)
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

#[inline]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

/// 10 ms of 25 Gb/s.
const MEMORY: usize = 32 << 20;
/// 10 ms of 26 million packets per second.
const ENTRIES: usize = 1 << 18;
/// Entries of a bucket that are looked at.
const STEPS: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;
    use vnplug::Meta;

    fn packet(ts_ns: u64, bytes: &[u8]) -> Packet<'_> {
        let meta = Meta {
            ts_ns,
            wire_len: bytes.len() as u32,
            ..Meta::default()
        };
        Packet { meta, bytes }
    }

    fn frame(number: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0x5a; len];
        bytes[len - 4..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    const WINDOW: Duration = Duration::from_micros(10);

    #[test]
    fn the_same_bytes_within_the_window_are_recorded_once() {
        let mut dedup = Dedup::new(WINDOW, 2);
        let (a, b) = (frame(1, 70), frame(2, 70));
        assert!(dedup.once(0, &packet(1000, &a)).is_some());
        assert!(dedup.once(1, &packet(1001, &b)).is_some());
        // From another interface, earlier by its stamp, at the end of the window.
        assert!(dedup.once(1, &packet(900, &a)).is_none());
        assert!(dedup.once(0, &packet(11_000, &a)).is_none());
        assert!(dedup.once(0, &packet(11_001, &a)).is_some());
        // A byte less, and another length on the wire.
        assert!(dedup.once(0, &packet(1002, &b[1..])).is_some());
        let mut cut = packet(1002, &b);
        cut.meta.wire_len += 1;
        assert!(dedup.once(0, &cut).is_some());
        assert!(dedup.once(0, &cut).is_none());
        let (news, each) = dedup.news();
        assert_eq!((news.packets, news.bytes, news.forgotten), (3, 210, 0));
        assert_eq!(each, [2, 1]);
    }

    #[test]
    fn of_a_packet_that_never_ends_one_in_each_window_stays() {
        let mut dedup = Dedup::new(WINDOW, 1);
        let same = frame(7, 60);
        let kept: Vec<u64> = (0..100)
            .filter(|n| dedup.once(0, &packet(n * 4000, &same)).is_some())
            .collect();
        assert_eq!(kept, (0..100).step_by(3).collect::<Vec<u64>>());
    }

    #[test]
    fn the_next_packet_says_what_a_duplicate_would_have_said() {
        let mut dedup = Dedup::new(WINDOW, 1);
        let (a, b) = (frame(1, 60), frame(2, 60));
        assert!(dedup.once(0, &packet(1, &a)).is_some());
        let mut again = packet(2, &a);
        (again.meta.lost, again.meta.flags) = (5, flags::GAP | flags::OUTBOUND);
        assert!(dedup.once(0, &again).is_none());
        let next = dedup.once(0, &packet(3, &b)).unwrap();
        assert_eq!((next.meta.lost, next.meta.flags), (5, flags::GAP));
        let next = dedup.once(0, &packet(4, &frame(3, 60))).unwrap().meta;
        assert_eq!((next.lost, next.flags), (0, 0));
    }

    #[test]
    fn it_agrees_with_one_that_remembers_all() {
        let mut random = vnplug_testing::Dice(5);
        let mut dedup = Dedup::new(WINDOW, 1);
        let mut recorded: Vec<(u64, Vec<u8>)> = Vec::new();
        let mut ts_ns = 1_000_000;
        for _ in 0..20_000 {
            ts_ns += random.below(3000);
            let bytes = frame(random.below(40) as u32, 60 + random.below(8) as usize);
            let near = recorded
                .iter()
                .rev()
                .take_while(|(at, _)| ts_ns - at <= 10_000);
            let known = near.into_iter().any(|(_, other)| *other == bytes);
            assert_eq!(dedup.once(0, &packet(ts_ns, &bytes)).is_none(), known);
            if !known {
                recorded.push((ts_ns, bytes));
            }
        }
        assert!(recorded.len() > 5000 && recorded.len() < 19_900);
        assert_eq!(dedup.news().0.forgotten, 0);
    }

    #[test]
    fn short_memory_forgets_and_counts_and_is_never_wrong() {
        for (memory, entries, forgotten) in [(1000, 64, 190), (1 << 20, 8, 192)] {
            let mut dedup = Dedup::with(WINDOW, 1, memory, entries);
            for round in 0..2 {
                for number in 0..100 {
                    let ts_ns = 1 + round * 100 + u64::from(number);
                    let bytes = frame(number, 100);
                    let kept = dedup.once(0, &packet(ts_ns, &bytes));
                    assert!(kept.is_some(), "{memory} {round} {number}");
                }
            }
            let last = frame(99, 100);
            assert!(dedup.once(0, &packet(300, &last)).is_none());
            assert_eq!(dedup.news().0.forgotten, forgotten);
        }
    }

    /// `cargo test --release -p vnplug-store cost_of_deduplication -- --ignored --nocapture`
    #[test]
    #[ignore = "prints a measurement"]
    fn cost_of_deduplication() {
        for (len, twice) in [
            (60, false),
            (60, true),
            (512, false),
            (1400, false),
            (1400, true),
        ] {
            let mut dedup = Dedup::new(Duration::from_millis(10), 1);
            let mut bytes = frame(0, len);
            let count = 2_000_000_u64;
            // Time of the processor: the machine may have other things to do.
            let now = || {
                let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
                time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
            };
            let began = now();
            let mut kept = 0;
            for number in 0..count {
                let number = if twice { number / 2 } else { number };
                bytes[len - 8..].copy_from_slice(&number.to_le_bytes());
                kept += u64::from(dedup.once(0, &packet(number * 1000, &bytes)).is_some());
            }
            let each = (now() - began) / count as f64;
            println!("{len} bytes, each twice: {twice}: {each:.0} ns per packet, {kept} kept");
        }
    }
}

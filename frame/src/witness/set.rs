//! A set of sequences, exact within bounded memory.
//!
//! Sequences live in chunks of 65,536. A chunk that is neither empty nor full is a bitmap of
//! 8 KiB; full chunks are kept as ranges, so a loss-free run of any length costs nothing. When
//! more than [`MAX_PARTIAL`] bitmaps or [`MAX_RANGES`] ranges would be needed, the lowest chunks
//! are forgotten: the set's **floor** rises, sequences below it stay counted but can no longer be
//! told new from known. That needs 268 million sequences between the oldest gap and the newest
//! frame.

use std::collections::BTreeMap;
use std::ops::Range;

/// Sequences received. Cheap for in-order insertion: the chunk in use is not looked up again.
#[derive(Debug, Clone, Default)]
pub struct SeqSet {
    /// Chunks with some but not all sequences, except `current`.
    partial: BTreeMap<u64, Box<Chunk>>,
    /// Full chunks: first chunk number to one past the last. Neighbours are merged.
    full: BTreeMap<u64, u64>,
    /// The chunk used last.
    current: Option<(u64, Box<Chunk>)>,
    /// Sequences in chunks below this one are forgotten.
    floor_chunk: u64,
    len: u64,
}

/// What [`SeqSet::insert`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inserted {
    /// It is in the set from now on.
    New,
    /// It was there already.
    Known,
    /// It is below the floor: unknown.
    Forgotten,
}

impl SeqSet {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds `seq`.
    pub fn insert(&mut self, seq: u64) -> Inserted {
        let number = seq / CHUNK;
        match &self.current {
            Some((current, _)) if *current == number => {}
            _ => {
                if number < self.floor_chunk {
                    return Inserted::Forgotten;
                }
                if self.is_full(number) {
                    return Inserted::Known;
                }
                self.select(number);
                if number < self.floor_chunk {
                    return Inserted::Forgotten;
                }
            }
        }
        let Some((_, chunk)) = &mut self.current else {
            return Inserted::Forgotten;
        };
        if !chunk.insert((seq % CHUNK) as usize) {
            return Inserted::Known;
        }
        self.len += 1;
        if u64::from(chunk.count) == CHUNK {
            self.current = None;
            self.add_full(number, number.saturating_add(1));
            self.bound();
        }
        Inserted::New
    }

    /// How many sequences were added, forgotten ones included.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// How many sequences from the floor up are in the set.
    pub fn known(&self) -> u64 {
        let full: u64 = self
            .full
            .iter()
            .map(|(first, end)| (end - first) * CHUNK)
            .sum();
        let partial: u64 = self
            .partial
            .values()
            .map(|chunk| u64::from(chunk.count))
            .sum();
        full + partial
            + self
                .current
                .as_ref()
                .map_or(0, |(_, chunk)| u64::from(chunk.count))
    }

    /// Whether nothing was added yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The lowest sequence whose presence is still known; 0 unless memory ran out.
    pub fn floor(&self) -> u64 {
        self.floor_chunk.saturating_mul(CHUNK)
    }

    /// Whether `seq` is there; `None` below the floor.
    pub fn contains(&self, seq: u64) -> Option<bool> {
        let number = seq / CHUNK;
        if number < self.floor_chunk {
            return None;
        }
        let bit = (seq % CHUNK) as usize;
        Some(self.is_full(number) || self.chunk(number).is_some_and(|chunk| chunk.contains(bit)))
    }

    /// The set as ranges of consecutive sequences, ascending, merged, from the floor up. A range
    /// that reaches `u64::MAX` leaves that one sequence out.
    pub fn ranges(&self) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let full = self.full.iter().map(|(first, end)| (*first, Some(*end)));
        let partial = self.partial.keys().map(|number| (*number, None));
        let current = self.current.iter().map(|(number, _)| (*number, None));
        let mut order: Vec<_> = full.chain(partial).chain(current).collect();
        order.sort_unstable();
        for (first, end) in order {
            let base = first.saturating_mul(CHUNK);
            match (end, self.chunk(first)) {
                (Some(end), _) => push(&mut ranges, base..end.saturating_mul(CHUNK)),
                (None, Some(chunk)) => chunk.ranges_onto(base, &mut ranges),
                (None, None) => {}
            }
        }
        ranges
    }

    /// What is missing of `expected`, the part below the floor left out.
    pub fn gaps(&self, expected: Range<u64>) -> Gaps {
        let mut gaps = Gaps::default();
        let mut next = expected.start.max(self.floor());
        for range in self.ranges() {
            if range.start >= expected.end {
                break;
            }
            if range.start > next {
                gaps.add(next..range.start);
            }
            next = next.max(range.end);
        }
        if next < expected.end {
            gaps.add(next..expected.end);
        }
        gaps
    }

    /// Adds all of `other`, as for the members of a cluster, and returns how many sequences both
    /// had (0 for members that share nothing). Sequences that either side has forgotten are
    /// forgotten in the result.
    pub fn merge(&mut self, other: &SeqSet) -> u64 {
        let mut both = 0;
        for range in other.ranges() {
            both += self.insert_range(range);
        }
        self.floor_chunk = self.floor_chunk.max(other.floor_chunk);
        self.forget_below(self.floor_chunk);
        both
    }

    /// Adds a range; whole chunks are not visited one sequence at a time. Returns how many of its
    /// sequences were there already.
    fn insert_range(&mut self, range: Range<u64>) -> u64 {
        let mut both = 0;
        let mut seq = range.start;
        while seq < range.end {
            let number = seq / CHUNK;
            if seq.is_multiple_of(CHUNK) && range.end - seq >= CHUNK && !self.is_full(number) {
                self.stow();
                let had = self
                    .partial
                    .remove(&number)
                    .map_or(0, |chunk| u64::from(chunk.count));
                both += had;
                if number >= self.floor_chunk {
                    self.len += CHUNK - had;
                    self.add_full(number, number + 1);
                    self.bound();
                }
                seq += CHUNK;
            } else if self.is_full(number) {
                let end = range.end.min((number + 1).saturating_mul(CHUNK));
                both += end - seq;
                seq = end;
            } else {
                both += u64::from(self.insert(seq) == Inserted::Known);
                seq += 1;
            }
        }
        both
    }

    fn is_full(&self, number: u64) -> bool {
        self.full
            .range(..=number)
            .next_back()
            .is_some_and(|(_, end)| number < *end)
    }

    fn chunk(&self, number: u64) -> Option<&Chunk> {
        match &self.current {
            Some((current, chunk)) if *current == number => Some(chunk),
            _ => self.partial.get(&number).map(AsRef::as_ref),
        }
    }

    /// Makes `number` the current chunk.
    fn select(&mut self, number: u64) {
        self.stow();
        let chunk = self.partial.remove(&number).unwrap_or_default();
        self.current = Some((number, chunk));
        self.bound();
    }

    /// Puts the current chunk back among the others.
    fn stow(&mut self) {
        if let Some((number, chunk)) = self.current.take() {
            self.partial.insert(number, chunk);
        }
    }

    fn add_full(&mut self, mut first: u64, mut end: u64) {
        if let Some(after) = self.full.remove(&end) {
            end = after;
        }
        if let Some((before, before_end)) = self.full.range(..first).next_back()
            && *before_end == first
        {
            first = *before;
        }
        self.full.insert(first, end);
    }

    /// Raises the floor until the set is within its memory.
    fn bound(&mut self) {
        while self.partial.len() > MAX_PARTIAL || self.full.len() > MAX_RANGES {
            let partial = self.partial.keys().next().map(|number| number + 1);
            let full = self.full.values().next().copied();
            let floor = if self.partial.len() > MAX_PARTIAL {
                partial
            } else {
                full
            };
            let Some(floor) = floor else { return };
            self.forget_below(floor);
        }
    }

    fn forget_below(&mut self, floor: u64) {
        self.floor_chunk = self.floor_chunk.max(floor);
        while let Some(lowest) = self.partial.first_entry()
            && *lowest.key() < self.floor_chunk
        {
            lowest.remove();
        }
        while let Some((first, end)) = self.full.iter().next().map(|(f, e)| (*f, *e)) {
            if first >= self.floor_chunk {
                break;
            }
            self.full.remove(&first);
            if end > self.floor_chunk {
                self.full.insert(self.floor_chunk, end);
            }
        }
        if self
            .current
            .as_ref()
            .is_some_and(|(number, _)| *number < self.floor_chunk)
        {
            self.current = None;
        }
    }
}

/// What is missing from an expected range.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gaps {
    /// How many sequences are missing.
    pub count: u64,
    /// The first few missing ranges, for messages ([`Gaps::SHOWN`] at most).
    pub first: Vec<Range<u64>>,
}

impl Gaps {
    /// The most ranges that [`Gaps::first`] names.
    pub const SHOWN: usize = 16;

    fn add(&mut self, range: Range<u64>) {
        self.count += range.end - range.start;
        if self.first.len() < Self::SHOWN {
            self.first.push(range);
        }
    }
}

#[derive(Debug, Clone)]
struct Chunk {
    bits: [u64; WORDS],
    count: u32,
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            bits: [0; WORDS],
            count: 0,
        }
    }
}

impl Chunk {
    /// Whether the bit was clear.
    fn insert(&mut self, bit: usize) -> bool {
        let word = &mut self.bits[bit / 64];
        let mask = 1 << (bit % 64);
        let new = *word & mask == 0;
        *word |= mask;
        self.count += u32::from(new);
        new
    }

    fn contains(&self, bit: usize) -> bool {
        self.bits[bit / 64] & (1 << (bit % 64)) != 0
    }

    fn ranges_onto(&self, base: u64, ranges: &mut Vec<Range<u64>>) {
        for (n, word) in self.bits.iter().enumerate() {
            let mut rest = *word;
            let mut at = base + 64 * n as u64;
            while rest != 0 {
                let skip = rest.trailing_zeros();
                let run = (rest >> skip).trailing_ones();
                at += u64::from(skip);
                push(ranges, at..at.saturating_add(u64::from(run)));
                at = at.saturating_add(u64::from(run));
                rest = rest.checked_shr(skip + run).unwrap_or(0);
            }
        }
    }
}

/// Appends a range, merged with the last if they touch.
fn push(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// Sequences in a chunk.
const CHUNK: u64 = 65_536;
const WORDS: usize = 1024;
/// Bitmaps kept: 32 MiB (few in unit tests, which reach the limit).
const MAX_PARTIAL: usize = if cfg!(test) { 8 } else { 4096 };
/// Ranges of full chunks kept.
const MAX_RANGES: usize = 4096;

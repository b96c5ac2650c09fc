//! Facts about a frame on one path through a program.

use std::collections::HashSet;

use super::Base;

/// Facts about one byte.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fact {
    pub(super) base: Base,
    pub(super) at: u32,
    pub(super) mask: u8,
    pub(super) value: u8,
    /// It was compared with a value, and not only tested for zero bits.
    pub(super) compared: bool,
}

/// Some bits of the frame: a load, masked, shifted to the right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Bits {
    pub(super) base: Base,
    pub(super) at: u32,
    pub(super) len: u8,
    pub(super) mask: u32,
    pub(super) shift: u32,
}

/// Between which values some bits are, both included.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    pub(super) bits: Bits,
    pub(super) low: u32,
    pub(super) high: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    Equal,
    Above,
    AtLeast,
    AnyBit,
}

/// All facts; the list grows along a path and is cut back where the next path begins.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) facts: Vec<Fact>,
    /// In the order in which it was learnt, and to be found.
    unequal: Vec<(Bits, u32)>,
    excluded: HashSet<(Bits, u32)>,
    /// Later facts imply all earlier ones about the same bits.
    pub(super) ranges: Vec<Range>,
}

/// The number of facts at some point.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mark {
    facts: usize,
    unequal: usize,
    ranges: usize,
}

/// The most excluded values, and the most ranges; further ones are not noted.
const MAX_NOTED: usize = 512;

impl Known {
    /// The number of facts to search.
    pub(super) fn size(&self) -> usize {
        self.facts.len() + self.ranges.len()
    }

    pub(super) fn mark(&self) -> Mark {
        Mark {
            facts: self.facts.len(),
            unequal: self.unequal.len(),
            ranges: self.ranges.len(),
        }
    }

    pub(super) fn cut_back(&mut self, mark: Mark) {
        self.facts.truncate(mark.facts);
        for gone in self.unequal.drain(mark.unequal..) {
            self.excluded.remove(&gone);
        }
        self.ranges.truncate(mark.ranges);
    }

    /// Notes the result of a test; false if that is impossible.
    pub(super) fn assume(&mut self, bits: Bits, test: Test, k: u32, holds: bool) -> bool {
        match (test, holds) {
            (Test::Equal, true) => !self.excluded.contains(&(bits, k)) && self.learn(bits, k, true),
            (Test::Equal, false) => {
                if self.unequal.len() < MAX_NOTED && self.excluded.insert((bits, k)) {
                    self.unequal.push((bits, k));
                }
                true
            }
            // None of these bits is set.
            (Test::AnyBit, false) => {
                let mask = bits.mask & k.checked_shl(bits.shift).unwrap_or(0);
                let zero = Bits {
                    mask,
                    shift: 0,
                    ..bits
                };
                self.learn(zero, 0, false)
            }
            (Test::AnyBit, true) => true,
            (Test::Above, true) => match k.checked_add(1) {
                Some(low) => self.narrow(bits, low, u32::MAX),
                None => false,
            },
            (Test::Above, false) => self.narrow(bits, 0, k),
            (Test::AtLeast, true) => self.narrow(bits, k, u32::MAX),
            (Test::AtLeast, false) => match k.checked_sub(1) {
                Some(high) => self.narrow(bits, 0, high),
                None => false,
            },
        }
    }

    /// Notes that some bits are in a range; false if that is impossible.
    fn narrow(&mut self, bits: Bits, low: u32, high: u32) -> bool {
        let before = self.ranges.iter().rfind(|range| range.bits == bits);
        let (least, most) = before.map_or((0, bits.most()), |range| (range.low, range.high));
        let (low, high) = (low.max(least), high.min(most));
        if low > high {
            return false;
        }
        if (low, high) != (least, most) && self.ranges.len() < MAX_NOTED {
            self.ranges.push(Range { bits, low, high });
        }
        true
    }

    /// Notes that some bits have a value; false if that is impossible.
    fn learn(&mut self, bits: Bits, value: u32, compared: bool) -> bool {
        let Some(word) = value.checked_shl(bits.shift) else {
            return value == 0;
        };
        if word >> bits.shift != value || word & !bits.mask != 0 {
            return false;
        }
        for nth in 0..u32::from(bits.len) {
            let shift = 8 * (u32::from(bits.len) - 1 - nth);
            let (mask, value) = ((bits.mask >> shift) as u8, (word >> shift) as u8);
            let at = bits.at + nth;
            let (has, is) = self.byte(bits.base, at);
            if (is ^ value) & has & mask != 0 {
                return false;
            }
            if mask != 0 {
                self.facts.push(Fact {
                    base: bits.base,
                    at,
                    mask,
                    value,
                    compared,
                });
            }
        }
        true
    }

    /// Which bits of a byte are known, and what they are.
    fn byte(&self, base: Base, at: u32) -> (u8, u8) {
        let about = |fact: &&Fact| fact.base == base && fact.at == at;
        let facts = self.facts.iter().filter(about);
        facts.fold((0, 0), |(mask, value), fact| {
            (mask | fact.mask, value | fact.value)
        })
    }

    /// The value of these bits, if all of them are known.
    pub(super) fn value(&self, bits: &Bits) -> Option<u32> {
        let (mut known, mut word) = (0_u32, 0_u32);
        for nth in 0..u32::from(bits.len) {
            let (mask, value) = self.byte(bits.base, bits.at + nth);
            known = known << 8 | u32::from(mask);
            word = word << 8 | u32::from(value);
        }
        let all = known & bits.mask == bits.mask;
        all.then(|| (word & bits.mask).checked_shr(bits.shift).unwrap_or(0))
    }
}

impl Bits {
    /// The largest value that they may have.
    fn most(&self) -> u32 {
        self.mask.checked_shr(self.shift).unwrap_or(0)
    }
}

impl Test {
    pub(super) fn holds(self, a: u32, k: u32) -> bool {
        match self {
            Self::Equal => a == k,
            Self::Above => a > k,
            Self::AtLeast => a >= k,
            Self::AnyBit => a & k != 0,
        }
    }
}

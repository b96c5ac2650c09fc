//! What a frame must have for a program to accept it.
//!
//! [`analyse`] walks every way through a program, with symbols in place of the frame: a register is
//! a constant, some bits of the frame, or unknown. Each way to an accepting return collects what its
//! comparisons say of single bytes. A way that contradicts itself does not exist. From each of the
//! others one [`Key`] is taken: a field of the frame and the value that it must have. So
//!
//! > the program accepts a frame ⇒ one of the keys holds on the frame
//!
//! and a frame on which none holds need not be judged. Nothing else follows from a key, unless it
//! is `sure`: then walking again, with only the key's bytes known, comes to no rejecting return and
//! to no load beyond them, and the program accepts whatever the key holds on.
//!
//! Bytes that most frames agree on (Ethertype, protocol, fragment offset) are in no key: they would
//! lead to all filters at once. The Ethertype is the field's gate instead. A program with a way that
//! leaves nothing else (`tcp`, `portrange 1-9`, `not host A`), with a loop or with too many ways has
//! no keys and is judged on every frame.

use std::collections::HashSet;

use super::field::{Field, MAX_PARTS, Part};
use super::program::{Instruction, Program, SCRATCH_WORDS, code};

/// When a program must be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Analysis {
    /// On every frame.
    Always,
    /// On frames on which one of these holds. Without keys it accepts nothing.
    If(Vec<Key>),
}

/// One thing that a frame may have for a program to accept it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// Where to look.
    pub field: Field,
    /// What is there.
    pub value: u64,
    /// The program accepts every frame that has it.
    pub sure: bool,
}

/// What an offset counts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Base {
    /// The first byte of the frame.
    Start,
    /// 4 times the low four bits of the byte at this offset: the length of an IPv4 header there.
    Header(u32),
}

/// The most instructions that all ways of a program may have together.
const MAX_STEPS: usize = 20_000;
/// The same when a key is looked at for being sure.
const MAX_SURE_STEPS: usize = 1_000;
/// The most facts about single bytes on one way, and the most values that it is known not to have.
const MAX_FACTS: usize = 256;
const MAX_UNEQUAL: usize = 512;
/// A program with more keys is judged on every frame.
pub(super) const MAX_KEYS: usize = 512;
/// A key has so many bits at least.
const MIN_BITS: u32 = 8;

/// Finds the keys of a program.
pub(super) fn analyse(program: &Program) -> Analysis {
    if program.loops() {
        return Analysis::Always;
    }
    let list = program.instructions();
    let mut keys: Vec<Key> = Vec::new();
    let mut seen = HashSet::new();
    let mut walk = Walk::new(list);
    while let Some(end) = walk.next_end() {
        match end {
            End::TooLong => return Analysis::Always,
            End::Returns { accepts: false, .. } => continue,
            End::Returns { .. } => {}
        }
        let Some((mut key, facts)) = key(&walk.facts, walk.reached) else {
            return Analysis::Always;
        };
        if !seen.insert((key.field.clone(), key.value)) {
            continue;
        }
        if keys.len() == MAX_KEYS {
            return Analysis::Always;
        }
        key.sure = key.field.is_exact() && accepts_all_with(list, &key.field, facts);
        keys.push(key);
    }
    Analysis::If(keys)
}

/// Whether a program accepts every frame that has these bytes in this field.
fn accepts_all_with(list: &[Instruction], field: &Field, facts: Vec<Fact>) -> bool {
    let mut walk = Walk::with_only(list, field, facts);
    while let Some(end) = walk.next_end() {
        match end {
            End::Returns {
                accepts: true,
                certain: true,
            } => {}
            _ => return false,
        }
    }
    true
}

/// What is known of one byte.
#[derive(Debug, Clone, Copy)]
struct Fact {
    base: Base,
    at: u32,
    mask: u8,
    value: u8,
    /// It was compared with a value, and not only tested for zero bits.
    compared: bool,
}

/// Some bits of the frame: a load, masked, shifted to the right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Bits {
    base: Base,
    at: u32,
    len: u8,
    mask: u32,
    shift: u32,
}

/// What is in a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Symbol {
    Unknown,
    Constant(u32),
    Bits(Bits),
    /// 4 times the low four bits of this byte.
    Header(u32),
}

#[derive(Clone, Copy)]
struct State {
    pc: usize,
    a: Symbol,
    x: Symbol,
    scratch: [Symbol; SCRATCH_WORDS as usize],
    /// The frame has so many bytes at least.
    reached: u32,
    /// Every load so far was within bytes that are known to be there.
    certain: bool,
}

/// A branch not taken yet.
struct Fork {
    state: State,
    facts: usize,
    unequal: usize,
    assume: Option<(Bits, Test, u32, bool)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Test {
    Equal,
    Above,
    AtLeast,
    AnyBit,
}

enum End {
    Returns { accepts: bool, certain: bool },
    TooLong,
}

/// All ways through a program, one after the other.
struct Walk<'a> {
    list: &'a [Instruction],
    forks: Vec<Fork>,
    /// What is known on the way that ended last.
    facts: Vec<Fact>,
    unequal: Vec<(Bits, u32)>,
    reached: u32,
    steps_left: usize,
    frames_may_be_short: bool,
}

impl<'a> Walk<'a> {
    fn new(list: &'a [Instruction]) -> Self {
        let state = State {
            pc: 0,
            a: Symbol::Constant(0),
            x: Symbol::Constant(0),
            scratch: [Symbol::Constant(0); SCRATCH_WORDS as usize],
            reached: 0,
            certain: true,
        };
        let first = Fork {
            state,
            facts: 0,
            unequal: 0,
            assume: None,
        };
        Self {
            list,
            forks: vec![first],
            facts: Vec::new(),
            unequal: Vec::new(),
            reached: 0,
            steps_left: MAX_STEPS,
            frames_may_be_short: false,
        }
    }

    /// For frames with these facts in this field and nothing known beyond.
    fn with_only(list: &'a [Instruction], field: &Field, facts: Vec<Fact>) -> Self {
        let mut walk = Self::new(list);
        let parts = field.parts.iter().filter(|part| part.base == Base::Start);
        let end = parts
            .map(|part| part.at.saturating_add(u32::from(part.len)))
            .max();
        let gate = field.gate.map_or(0, |_| 14);
        for first in &mut walk.forks {
            first.state.reached = end.unwrap_or(0).max(gate);
            first.facts = facts.len();
        }
        Self {
            facts,
            steps_left: MAX_SURE_STEPS,
            frames_may_be_short: true,
            ..walk
        }
    }

    /// Follows the next way to its end.
    fn next_end(&mut self) -> Option<End> {
        while let Some(fork) = self.forks.pop() {
            self.facts.truncate(fork.facts);
            self.unequal.truncate(fork.unequal);
            let possible = match fork.assume {
                Some((bits, test, k, holds)) => self.assume(bits, test, k, holds),
                None => true,
            };
            if possible && let Some(end) = self.follow(fork.state) {
                return Some(end);
            }
        }
        None
    }

    /// Goes on until a return; `None` if this way does not exist.
    fn follow(&mut self, mut s: State) -> Option<End> {
        loop {
            if self.steps_left == 0 || self.facts.len() > MAX_FACTS {
                self.forks.clear();
                return Some(End::TooLong);
            }
            self.steps_left -= 1;
            let Instruction { code, jt, jf, k } = *self.list.get(s.pc)?;
            s.pc += 1;
            match code {
                code::RET => return Some(self.end(&s, Some(k))),
                code::RET_A => {
                    let value = match s.a {
                        Symbol::Constant(value) => Some(value),
                        _ => None,
                    };
                    return Some(self.end(&s, value));
                }
                code::JA => s.pc += k as usize,
                code::JEQ_K | code::JGT_K | code::JGE_K | code::JSET_K => {
                    self.branch(&mut s, code, Symbol::Constant(k), jt, jf)?;
                }
                code::JEQ_X | code::JGT_X | code::JGE_X | code::JSET_X => {
                    let x = s.x;
                    self.branch(&mut s, code & !0x08, x, jt, jf)?;
                }
                _ => self.step(&mut s, code, k),
            }
        }
    }

    fn end(&mut self, s: &State, value: Option<u32>) -> End {
        self.reached = s.reached;
        End::Returns {
            // A value that is not known may be one that accepts.
            accepts: value != Some(0),
            certain: s.certain && value.is_some(),
        }
    }

    /// Takes a branch and leaves the other for later; `None` if the one taken does not exist.
    fn branch(&mut self, s: &mut State, code: u16, with: Symbol, jt: u8, jf: u8) -> Option<()> {
        let test = match code {
            code::JEQ_K => Test::Equal,
            code::JGT_K => Test::Above,
            code::JGE_K => Test::AtLeast,
            _ => Test::AnyBit,
        };
        let (yes, no) = (s.pc + usize::from(jt), s.pc + usize::from(jf));
        let Symbol::Constant(k) = with else {
            return self.either(s, yes, no, None);
        };
        let known = match s.a {
            Symbol::Constant(a) => Some(a),
            Symbol::Bits(bits) => self.value(&bits),
            _ => None,
        };
        if let Some(a) = known {
            s.pc = if test.holds(a, k) { yes } else { no };
            return Some(());
        }
        let assume = match s.a {
            Symbol::Bits(bits) => Some((bits, test, k)),
            _ => None,
        };
        self.either(s, yes, no, assume)
    }

    fn either(
        &mut self,
        s: &mut State,
        yes: usize,
        no: usize,
        about: Option<(Bits, Test, u32)>,
    ) -> Option<()> {
        let other = State { pc: no, ..*s };
        self.forks.push(Fork {
            state: other,
            facts: self.facts.len(),
            unequal: self.unequal.len(),
            assume: about.map(|(bits, test, k)| (bits, test, k, false)),
        });
        s.pc = yes;
        match about {
            Some((bits, test, k)) => self.assume(bits, test, k, true).then_some(()),
            None => Some(()),
        }
    }

    /// Notes that a test came out so; false if it cannot.
    fn assume(&mut self, bits: Bits, test: Test, k: u32, holds: bool) -> bool {
        match (test, holds) {
            (Test::Equal, true) => !self.unequal.contains(&(bits, k)) && self.learn(bits, k, true),
            (Test::Equal, false) => {
                if self.unequal.len() < MAX_UNEQUAL {
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
            _ => true,
        }
    }

    /// Notes that some bits have a value; false if they cannot.
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
    fn value(&self, bits: &Bits) -> Option<u32> {
        let (mut known, mut word) = (0_u32, 0_u32);
        for nth in 0..u32::from(bits.len) {
            let (mask, value) = self.byte(bits.base, bits.at + nth);
            known = known << 8 | u32::from(mask);
            word = word << 8 | u32::from(value);
        }
        let all = known & bits.mask == bits.mask;
        all.then(|| (word & bits.mask).checked_shr(bits.shift).unwrap_or(0))
    }

    fn step(&mut self, s: &mut State, code: u16, k: u32) {
        use Symbol::{Constant, Unknown};
        match code {
            code::LD_W_ABS => s.a = self.load(s, Constant(0), k, 4),
            code::LD_H_ABS => s.a = self.load(s, Constant(0), k, 2),
            code::LD_B_ABS => s.a = self.load(s, Constant(0), k, 1),
            code::LD_W_IND => s.a = self.load(s, s.x, k, 4),
            code::LD_H_IND => s.a = self.load(s, s.x, k, 2),
            code::LD_B_IND => s.a = self.load(s, s.x, k, 1),
            code::LDX_MSH => {
                let byte = self.load(s, Constant(0), k, 1);
                s.x = match byte {
                    Symbol::Bits(bits) => self
                        .value(&Bits { mask: 0xf, ..bits })
                        .map_or(Symbol::Header(k), |low| Constant(low << 2)),
                    _ => Unknown,
                };
            }
            code::LD_LEN => s.a = Unknown,
            code::LDX_LEN => s.x = Unknown,
            code::LD_IMM => s.a = Constant(k),
            code::LDX_IMM => s.x = Constant(k),
            code::LD_MEM => s.a = s.scratch[k as usize % s.scratch.len()],
            code::LDX_MEM => s.x = s.scratch[k as usize % s.scratch.len()],
            code::ST => s.scratch[k as usize % SCRATCH_WORDS as usize] = s.a,
            code::STX => s.scratch[k as usize % SCRATCH_WORDS as usize] = s.x,
            code::TAX => s.x = s.a,
            code::TXA => s.a = s.x,
            code::NEG => {
                s.a = match s.a {
                    Constant(a) => Constant(a.wrapping_neg()),
                    _ => Unknown,
                }
            }
            _ => self.calculate(s, code, k),
        }
    }

    /// A load; what it is if the frame has it.
    fn load(&mut self, s: &mut State, x: Symbol, k: u32, len: u8) -> Symbol {
        let (base, at) = match x {
            Symbol::Constant(x) => (Base::Start, x.checked_add(k)),
            Symbol::Header(at) => (Base::Header(at), Some(k)),
            _ => {
                s.certain = false;
                return Symbol::Unknown;
            }
        };
        let end = at.and_then(|at| at.checked_add(u32::from(len)));
        let (Some(at), Some(end)) = (at, end) else {
            s.certain = false;
            return Symbol::Unknown;
        };
        match base {
            Base::Start if end <= s.reached => {}
            Base::Start if !self.frames_may_be_short => s.reached = end,
            _ => s.certain = false,
        }
        Symbol::Bits(Bits {
            base,
            at,
            len,
            mask: u32::MAX >> (32 - 8 * u32::from(len)),
            shift: 0,
        })
    }

    fn calculate(&mut self, s: &mut State, code: u16, k: u32) {
        let by_x = code & 0x08 != 0;
        let operand = match (by_x, s.x) {
            (false, _) => Some(k),
            (true, Symbol::Constant(x)) => Some(x),
            _ => None,
        };
        let operation = code & !0x08;
        if by_x && matches!(operation, code::DIV_K | code::MOD_K) {
            s.certain = false;
        }
        let (Some(k), a) = (operand, s.a) else {
            s.a = Symbol::Unknown;
            return;
        };
        s.a = match a {
            Symbol::Constant(a) => constant(operation, a, k),
            Symbol::Bits(bits) => match operation {
                code::AND_K => Symbol::Bits(Bits {
                    mask: bits.mask & k.checked_shl(bits.shift).unwrap_or(0),
                    ..bits
                }),
                code::RSH_K if k < 32 - bits.shift => Symbol::Bits(Bits {
                    shift: bits.shift + k,
                    mask: bits.mask >> (bits.shift + k) << (bits.shift + k),
                    ..bits
                }),
                _ => Symbol::Unknown,
            },
            _ => Symbol::Unknown,
        };
    }
}

impl Test {
    fn holds(self, a: u32, k: u32) -> bool {
        match self {
            Self::Equal => a == k,
            Self::Above => a > k,
            Self::AtLeast => a >= k,
            Self::AnyBit => a & k != 0,
        }
    }
}

/// As the interpreter calculates.
fn constant(operation: u16, a: u32, k: u32) -> Symbol {
    let value = match operation {
        code::ADD_K => Some(a.wrapping_add(k)),
        code::SUB_K => Some(a.wrapping_sub(k)),
        code::MUL_K => Some(a.wrapping_mul(k)),
        code::DIV_K => a.checked_div(k),
        code::MOD_K => a.checked_rem(k),
        code::AND_K => Some(a & k),
        code::OR_K => Some(a | k),
        code::XOR_K => Some(a ^ k),
        code::LSH_K => Some(a.checked_shl(k).unwrap_or(0)),
        code::RSH_K => Some(a.checked_shr(k).unwrap_or(0)),
        _ => None,
    };
    value.map_or(Symbol::Unknown, Symbol::Constant)
}

/// The key of a way on which these facts hold for frames of at least `reached` bytes, and the facts
/// that it says.
fn key(facts: &[Fact], reached: u32) -> Option<(Key, Vec<Fact>)> {
    let mut bytes: Vec<Fact> = Vec::new();
    for fact in facts.iter().filter(|fact| fact.compared) {
        match bytes
            .iter_mut()
            .find(|it| (it.base, it.at) == (fact.base, fact.at))
        {
            Some(byte) => {
                byte.mask |= fact.mask;
                byte.value |= fact.value;
            }
            None => bytes.push(*fact),
        }
    }
    bytes.sort_unstable_by_key(|byte| (byte.base, byte.at));
    let whole = |at: u32| {
        let find = |at| {
            let byte = bytes
                .iter()
                .find(|it| it.base == Base::Start && it.at == at)?;
            (byte.mask == 0xff).then_some(byte.value)
        };
        Some(u16::from_be_bytes([find(at)?, find(at + 1)?]))
    };
    let common = common_bytes(whole);
    let gate = whole(12);
    let (gates, mut rest): (Vec<Fact>, Vec<Fact>) =
        bytes.iter().partition(|byte| is_at(byte, &[12, 13]));
    rest.retain(|byte| !is_at(byte, &common));
    let bits: u32 = rest.iter().map(|byte| byte.mask.count_ones()).sum();
    if bits < MIN_BITS {
        return None;
    }
    let (parts, values): (Vec<Part>, Vec<u64>) = parts(&rest, reached).into_iter().unzip();
    let field = Field { gate, parts };
    let value = field.join(&values);
    let covers = |byte: &Fact| {
        field
            .parts
            .iter()
            .any(|part| part.covers(byte.base, byte.at))
    };
    rest.retain(covers);
    if gate.is_some() {
        rest.extend(gates);
    }
    let key = Key {
        field,
        value,
        sure: false,
    };
    Some((key, rest))
}

fn is_at(byte: &Fact, places: &[u32]) -> bool {
    byte.base == Base::Start && places.contains(&byte.at)
}

/// Offsets of bytes that most frames agree on: types of tags and of what is in the frame, and in an
/// IP header the version, what tells of fragments, and the protocol.
fn common_bytes(whole: impl Fn(u32) -> Option<u16>) -> Vec<u32> {
    let mut at = 12;
    let mut common = vec![at, at + 1];
    while at < 12 + 4 * 8 && matches!(whole(at), Some(0x8100 | 0x88a8 | 0x9100)) {
        at += 4;
        common.extend([at, at + 1]);
    }
    let network = at + 2;
    match whole(at) {
        Some(0x0800) => common.extend([0, 6, 7, 9].map(|byte| network + byte)),
        Some(0x86dd) => common.extend([0, 6].map(|byte| network + byte)),
        _ => {}
    }
    common
}

/// Loads that cover these bytes, at most [`MAX_PARTS`], with their values.
fn parts(bytes: &[Fact], reached: u32) -> Vec<(Part, u64)> {
    let mut parts: Vec<(Part, u64)> = Vec::new();
    let mut rest = bytes;
    while let Some(first) = rest.first() {
        let follows = |(nth, byte): &(usize, &Fact)| {
            byte.base == first.base && byte.at == first.at + *nth as u32
        };
        let run = rest.iter().enumerate().take_while(follows).count().min(8);
        // A load may be longer than the run where the frame is known to be as long.
        let longer = run.next_power_of_two();
        let end = first.at.checked_add(longer as u32);
        let there = first.base == Base::Start && end.is_some_and(|end| end <= reached);
        let len = if there { longer } else { 1 << run.ilog2() };
        let taken = run.min(len);
        let (mut mask, mut value) = (0_u64, 0_u64);
        for nth in 0..len {
            let byte = rest.get(nth).filter(|_| nth < taken);
            mask = mask << 8 | u64::from(byte.map_or(0, |byte| byte.mask));
            value = value << 8 | u64::from(byte.map_or(0, |byte| byte.value));
        }
        let part = Part {
            base: first.base,
            at: first.at,
            len: len as u8,
            mask,
        };
        parts.push((part, value));
        rest = &rest[taken..];
    }
    if parts.len() > MAX_PARTS {
        parts.sort_by_key(|(part, _)| std::cmp::Reverse(part.mask.count_ones()));
        parts.truncate(MAX_PARTS);
        parts.sort_unstable_by_key(|(part, _)| *part);
    }
    parts
}

#[cfg(test)]
#[path = "analyse_tests.rs"]
mod tests;

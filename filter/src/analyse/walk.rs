//! All paths through a program, one after the other, with symbols instead of the frame.

use super::Base;
use super::known::{Bits, Fact, Known, Mark, Test};
use crate::field::Field;
use vnplug_bpf::{Instruction, SCRATCH_WORDS, calculate, code};

/// The most facts about single bytes on one path.
const MAX_FACTS: usize = 256;
/// A step searches all of them; with more than this number it counts as several.
const FACTS_PER_STEP: usize = 16;

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
struct WalkState {
    pc: usize,
    a: Symbol,
    x: Symbol,
    scratch: [Symbol; SCRATCH_WORDS as usize],
    /// The frame has at least this many bytes.
    reached: u32,
    /// Every load so far was within bytes that are known to be there.
    certain: bool,
}

/// A branch not taken yet.
struct Fork {
    state: WalkState,
    known: Mark,
    assume: Option<(Bits, Test, u32, bool)>,
}

pub(super) enum End {
    Returns { accepts: bool, certain: bool },
    TooLong,
}

/// All paths through a program, one after the other.
pub(super) struct Walk<'a> {
    list: &'a [Instruction],
    forks: Vec<Fork>,
    /// The facts on the path that ended last.
    pub(super) known: Known,
    /// Frames on that path have at least this many bytes.
    pub(super) reached: u32,
    pub(super) steps_left: usize,
    frames_may_be_short: bool,
}

impl<'a> Walk<'a> {
    /// For any frame, in at most this many steps.
    pub(super) fn new(list: &'a [Instruction], steps: usize) -> Self {
        let state = WalkState {
            pc: 0,
            a: Symbol::Constant(0),
            x: Symbol::Constant(0),
            scratch: [Symbol::Constant(0); SCRATCH_WORDS as usize],
            reached: 0,
            certain: true,
        };
        let first = Fork {
            state,
            known: Mark::default(),
            assume: None,
        };
        Self {
            list,
            forks: vec![first],
            known: Known::default(),
            reached: 0,
            steps_left: steps,
            frames_may_be_short: false,
        }
    }

    /// For frames with these facts in this field and nothing known beyond.
    pub(super) fn with_only(
        list: &'a [Instruction],
        field: &Field,
        facts: Vec<Fact>,
        steps: usize,
    ) -> Self {
        let mut walk = Self::new(list, steps);
        walk.known.facts = facts;
        walk.frames_may_be_short = true;
        let known = walk.known.mark();
        let parts = field.parts.iter().filter(|part| part.base == Base::Start);
        let end = parts
            .map(|part| part.at.saturating_add(u32::from(part.len)))
            .max();
        let gate = field.gate.map_or(0, |_| 14);
        for first in &mut walk.forks {
            first.state.reached = end.unwrap_or(0).max(gate);
            first.known = known;
        }
        walk
    }

    /// Follows the next path to its end.
    pub(super) fn next_end(&mut self) -> Option<End> {
        while let Some(fork) = self.forks.pop() {
            self.known.cut_back(fork.known);
            let possible = match fork.assume {
                Some((bits, test, k, holds)) => self.known.assume(bits, test, k, holds),
                None => true,
            };
            if possible && let Some(end) = self.follow(fork.state) {
                return Some(end);
            }
        }
        None
    }

    /// Uses up this many steps; false if fewer are left.
    pub(super) fn charge(&mut self, steps: usize) -> bool {
        let left = self.steps_left.checked_sub(steps);
        self.steps_left = left.unwrap_or(0);
        left.is_some()
    }

    /// Goes on until a return; `None` if this path does not exist.
    fn follow(&mut self, mut s: WalkState) -> Option<End> {
        loop {
            let cost = 1 + self.known.size() / FACTS_PER_STEP;
            if self.known.facts.len() > MAX_FACTS || !self.charge(cost) {
                self.forks.clear();
                return Some(End::TooLong);
            }
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

    fn end(&mut self, s: &WalkState, value: Option<u32>) -> End {
        self.reached = s.reached;
        End::Returns {
            // A value that is not known may be one that accepts.
            accepts: value != Some(0),
            certain: s.certain && value.is_some(),
        }
    }

    /// Takes a branch and leaves the other for later; `None` if the one taken does not exist.
    fn branch(&mut self, s: &mut WalkState, code: u16, with: Symbol, jt: u8, jf: u8) -> Option<()> {
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
            Symbol::Bits(bits) => self.known.value(&bits),
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
        s: &mut WalkState,
        yes: usize,
        no: usize,
        about: Option<(Bits, Test, u32)>,
    ) -> Option<()> {
        let other = WalkState { pc: no, ..*s };
        self.forks.push(Fork {
            state: other,
            known: self.known.mark(),
            assume: about.map(|(bits, test, k)| (bits, test, k, false)),
        });
        s.pc = yes;
        match about {
            Some((bits, test, k)) => self.known.assume(bits, test, k, true).then_some(()),
            None => Some(()),
        }
    }

    fn step(&mut self, s: &mut WalkState, code: u16, k: u32) {
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
                        .known
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
    fn load(&mut self, s: &mut WalkState, x: Symbol, k: u32, len: u8) -> Symbol {
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

    fn calculate(&mut self, s: &mut WalkState, code: u16, k: u32) {
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

fn constant(operation: u16, a: u32, k: u32) -> Symbol {
    calculate(operation, a, k).map_or(Symbol::Unknown, Symbol::Constant)
}

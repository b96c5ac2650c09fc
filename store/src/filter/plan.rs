//! From a program to the chunks of a segment that may have packets which it accepts.
//!
//! The program is gone through once with symbols in place of a frame; ways that meet stay apart if
//! different things are known on them, up to 8 for an instruction, and are joined then. At each
//! comparison it is known what is compared (a constant, a part of the frame, or unknown) and which
//! values other parts of the frame must have on every way that leads there. So it is known whether `ldh
//! [x + 14]` is a port: only if the Ethertype is IPv4's and the protocol one with ports. A comparison of
//! something that the index has becomes a question to it; of anything else, every chunk may hold.
//!
//! Then, from the last instruction to the first, for each block of the index:
//!
//! > may(comparison) = (asked(it holds) ∧ may(target)) ∨ (asked(it does not) ∧ may(other target))
//!
//! with sets of 64 chunks. All that is not understood is taken to be possible, so what is left out of
//! the answer has no packet that the program accepts. A program that jumps backwards
//! (`protochain`) may accept packets everywhere.

use std::collections::BTreeMap;

use vnplug_bpf::{Instruction, Program, SCRATCH_WORDS, calculate, code};
use vnplug_frame::headers::{MAX_TAGS, TAGS};

use crate::index::{Block, Key, v6_mark};

/// What to ask an index about a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexPlan {
    /// In the order of the program; empty if packets may be anywhere.
    steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Accept,
    Reject,
    On(Target),
    Fork {
        yes: (Ask, Target),
        no: (Ask, Target),
    },
}

/// Where it goes on: an instruction and one of the ways to it; when all is known, the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target {
    at: usize,
    way: usize,
}

/// A question to the index.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ask {
    /// Every chunk may.
    Any,
    /// Chunks that have a key in one of these ranges; none if there is none.
    Keys(Key, Ranges),
}

/// Values, from and to.
type Ranges = Vec<(u32, u32)>;

/// What a register may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Constant(u32),
    /// A part of the frame, and the mask of the bits that count.
    Part(Part, u32),
    /// 4 times the low four bits of the byte at this place: the length of an IPv4 header.
    Header(u32),
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    /// After an IPv4 header that begins here, or from the frame's start.
    header: Option<u32>,
    at: u32,
    size: u32,
}

/// What is known before an instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Known {
    a: Value,
    x: Value,
    scratch: [Value; SCRATCH_WORDS as usize],
    /// The values that parts of the frame must have.
    facts: BTreeMap<Part, Ranges>,
}

impl IndexPlan {
    /// Finds out what to ask.
    pub fn of(program: &Program) -> Self {
        let list = program.instructions();
        let start = Known {
            a: Value::Constant(0),
            x: Value::Constant(0),
            scratch: [Value::Unknown; SCRATCH_WORDS as usize],
            facts: BTreeMap::new(),
        };
        // What is known on the ways to each instruction; the steps of an instruction follow each other.
        let mut states: Vec<Vec<Known>> = vec![Vec::new(); list.len()];
        if let Some(first) = states.first_mut() {
            first.push(start);
        }
        let mut steps = Vec::new();
        let mut numbers = Vec::with_capacity(list.len());
        for (at, &instruction) in list.iter().enumerate() {
            numbers.push(steps.len());
            for state in std::mem::take(&mut states[at]) {
                let Some((mut step, next)) = step(at, instruction, state) else {
                    return Self { steps: Vec::new() };
                };
                for (target, (pc, state)) in step.targets().into_iter().flatten().zip(next) {
                    match states.get_mut(pc) {
                        Some(list) => target.way = add(list, state),
                        None => return Self { steps: Vec::new() },
                    }
                }
                steps.push(step);
            }
        }
        for step in &mut steps {
            for target in step.targets().into_iter().flatten() {
                target.at = numbers[target.at] + target.way;
            }
        }
        Self { steps }
    }

    /// The chunks of a block that may have packets which the program accepts.
    pub fn ask(&self, block: &Block) -> u64 {
        let all = block.all();
        if self.steps.is_empty() {
            return all;
        }
        let mut may = vec![0; self.steps.len()];
        for (at, step) in self.steps.iter().enumerate().rev() {
            may[at] = match step {
                Step::Reject => 0,
                Step::Accept => all,
                Step::On(target) => may[target.at],
                Step::Fork { yes, no } => {
                    let branch = |(ask, target): &(Ask, Target)| match may[target.at] {
                        0 => 0,
                        set => set & ask.of(block),
                    };
                    branch(yes) | branch(no)
                }
            };
        }
        // Frames that the index does not understand may be of another link type.
        may[0] | block.anything()
    }

    /// True if the index cannot leave out anything.
    pub fn is_everything(&self) -> bool {
        let asks = |step: &Step| {
            matches!(
                step,
                Step::Fork {
                    yes: (Ask::Keys(..), _),
                    ..
                } | Step::Fork {
                    no: (Ask::Keys(..), _),
                    ..
                }
            )
        };
        !self.steps.iter().any(asks)
    }
}

impl Step {
    fn targets(&mut self) -> [Option<&mut Target>; 2] {
        match self {
            Self::Accept | Self::Reject => [None, None],
            Self::On(target) => [Some(target), None],
            Self::Fork { yes, no } => [Some(&mut yes.1), Some(&mut no.1)],
        }
    }
}

impl Target {
    fn instruction(at: usize) -> Self {
        Self { at, way: 0 }
    }
}

/// Notes a way to an instruction, and says which one it is.
fn add(ways: &mut Vec<Known>, state: Known) -> usize {
    if let Some(same) = ways.iter().position(|way| *way == state) {
        return same;
    }
    if ways.len() < MAX_WAYS {
        ways.push(state);
    } else {
        ways[MAX_WAYS - 1].join(&state);
    }
    ways.len() - 1
}

impl Ask {
    fn of(&self, block: &Block) -> u64 {
        match self {
            Self::Any => block.all(),
            Self::Keys(key, ranges) => ranges
                .iter()
                .fold(0, |set, &(low, high)| set | block.with(*key, low, high)),
        }
    }
}

/// What an instruction is to the plan, and where it leads with what is known then; `None` if that is
/// beyond this.
fn step(at: usize, i: Instruction, mut state: Known) -> Option<(Step, Vec<(usize, Known)>)> {
    use code::*;
    let next = at + 1;
    let part = |size| {
        Value::Part(
            Part {
                header: None,
                at: i.k,
                size,
            },
            u32::MAX,
        )
    };
    match i.code {
        LD_W_ABS => state.a = part(4),
        LD_H_ABS => state.a = part(2),
        LD_B_ABS => state.a = part(1),
        LD_W_IND | LD_H_IND | LD_B_IND => {
            let size = [4, 2, 1][usize::from(i.code - LD_W_IND) / 8];
            let part = match state.x {
                Value::Constant(x) => Some(Part {
                    header: None,
                    at: x.checked_add(i.k)?,
                    size,
                }),
                Value::Header(header) => Some(Part {
                    header: Some(header),
                    at: i.k,
                    size,
                }),
                _ => None,
            };
            state.a = part.map_or(Value::Unknown, |part| Value::Part(part, u32::MAX));
        }
        LDX_MSH => state.x = Value::Header(i.k),
        LD_IMM => state.a = Value::Constant(i.k),
        LDX_IMM => state.x = Value::Constant(i.k),
        LD_LEN => state.a = Value::Unknown,
        LDX_LEN => state.x = Value::Unknown,
        LD_MEM => state.a = *state.scratch.get(i.k as usize)?,
        LDX_MEM => state.x = *state.scratch.get(i.k as usize)?,
        ST => *state.scratch.get_mut(i.k as usize)? = state.a,
        STX => *state.scratch.get_mut(i.k as usize)? = state.x,
        TAX => state.x = state.a,
        TXA => state.a = state.x,
        RET if i.k == 0 => return Some((Step::Reject, Vec::new())),
        RET | RET_A => return Some((Step::Accept, Vec::new())),
        JA => {
            let target = next.checked_add(usize::try_from(i.k.cast_signed()).ok()?)?;
            return Some((Step::On(Target::instruction(target)), vec![(target, state)]));
        }
        code if code & CLASS == JUMPS => return Some(fork(next, i, state)),
        AND_K => {
            state.a = match state.a {
                Value::Constant(a) => Value::Constant(a & i.k),
                Value::Part(part, mask) => Value::Part(part, mask & i.k),
                _ => Value::Unknown,
            }
        }
        code if code & CLASS == ALU && code & BY_X == 0 => {
            state.a = match state.a {
                Value::Constant(a) => {
                    calculate(code, a, i.k).map_or(Value::Unknown, Value::Constant)
                }
                _ => Value::Unknown,
            }
        }
        code if code & CLASS == ALU => state.a = Value::Unknown,
        _ => return None,
    }
    Some((Step::On(Target::instruction(next)), vec![(next, state)]))
}

/// A comparison: both ways, each with its question and what is known after it.
fn fork(next: usize, i: Instruction, state: Known) -> (Step, Vec<(usize, Known)>) {
    let (above, below) = (i.k.checked_add(1), i.k.checked_sub(1));
    let up = |low: Option<u32>| low.map_or(Vec::new(), |low| vec![(low, u32::MAX)]);
    let down = |high: Option<u32>| high.map_or(Vec::new(), |high| vec![(0, high)]);
    let (yes, no) = match i.code {
        code::JEQ_K => (Some(vec![(i.k, i.k)]), None),
        code::JGT_K => (Some(up(above)), Some(down(Some(i.k)))),
        code::JGE_K => (Some(up(Some(i.k))), Some(down(below))),
        _ => (None, None),
    };
    let targets = [next + usize::from(i.jt), next + usize::from(i.jf)];
    let [yes, no] = [yes, no].map(|values| state.given(values));
    let step = Step::Fork {
        yes: (yes.0, Target::instruction(targets[0])),
        no: (no.0, Target::instruction(targets[1])),
    };
    (step, vec![(targets[0], yes.1), (targets[1], no.1)])
}

impl Known {
    /// If the accumulator has one of these values: what to ask, and what is known then.
    fn given(&self, values: Option<Ranges>) -> (Ask, Self) {
        let mut state = self.clone();
        let (Some(values), Value::Part(part, mask)) = (values, self.a) else {
            return (Ask::Any, state);
        };
        let whole = u32::MAX >> (32 - 8 * part.size);
        if mask & whole != whole {
            return (self.masked(part, mask & whole, &values), state);
        }
        let values = match self.facts.get(&part) {
            Some(known) => both(known, &values),
            None => both(&values, &[(0, whole)]),
        };
        state.facts.insert(part, values.clone());
        let ask = match self.role(part) {
            // No frame takes this way.
            _ if values.is_empty() => Ask::Keys(Key::Ethertype, Vec::new()),
            None => Ask::Any,
            Some(Key::Ethertype) if values[0].0 < FIRST_TYPE => Ask::Any,
            Some(Key::V6) => state
                .v6(part)
                .map_or(Ask::Any, |mark| Ask::Keys(Key::V6, vec![(mark, mark)])),
            Some(key) => Ask::Keys(key, values),
        };
        (ask, state)
    }

    /// The same where only some bits are compared: networks, and the number in a VLAN tag.
    fn masked(&self, part: Part, mask: u32, values: &Ranges) -> Ask {
        let &[(low, high)] = &values[..] else {
            return Ask::Any;
        };
        let network = mask.leading_ones() + mask.trailing_zeros() == 32;
        match self.role(part) {
            Some(Key::V4) if low == high && network && low & !mask == 0 => {
                Ask::Keys(Key::V4, vec![(low, low | !mask)])
            }
            Some(Key::Vlan) if mask == 0xfff => Ask::Keys(Key::Vlan, vec![(low, high.min(0xfff))]),
            _ => Ask::Any,
        }
    }

    /// What a part of the frame is, by what is known of others.
    fn role(&self, part: Part) -> Option<Key> {
        let Part { header, at, size } = part;
        let mut kind = 12;
        for _ in 1..MAX_TAGS {
            let here = |offset| header.is_none() && at == kind + offset;
            if here(0) && size == 2 {
                return Some(Key::Ethertype);
            }
            let net = kind + 2;
            let is = |types: &[u16]| self.is(kind, 2, types);
            if is(&TAGS) {
                if here(2) && size == 2 {
                    return Some(Key::Vlan);
                }
                kind += 4;
                continue;
            }
            let from_net = at.checked_sub(net)?;
            return if is(&[0x0800]) {
                match (header, from_net, size) {
                    (None, 12 | 16, 4) => Some(Key::V4),
                    (None, 9, 1) => Some(Key::Protocol),
                    (Some(start), 0 | 2, 2) if start == net && self.has_ports(net + 9) => {
                        Some(Key::Port)
                    }
                    _ => None,
                }
            } else if is(&[0x86dd]) {
                match (header, from_net, size) {
                    (None, 6, 1) => Some(Key::Protocol),
                    (None, 8..40, 4) => Some(Key::V6),
                    (None, 40 | 42, 2) if self.has_ports(net + 6) => Some(Key::Port),
                    _ => None,
                }
            } else if is(&[0x0806, 0x8035]) {
                matches!((header, from_net, size), (None, 14 | 24, 4)).then_some(Key::V4)
            } else {
                None
            };
        }
        None
    }

    fn has_ports(&self, at: u32) -> bool {
        self.is(at, 1, &[6, 17, 132])
    }

    /// Whether a part at a fixed place must have one of these values.
    fn is(&self, at: u32, size: u32, values: &[u16]) -> bool {
        let part = Part {
            header: None,
            at,
            size,
        };
        self.facts.get(&part).is_some_and(|ranges| {
            let known = |&(low, high)| low == high && values.iter().any(|&v| u32::from(v) == low);
            ranges.iter().all(known)
        })
    }

    /// The mark of the IPv6 address of which this is a word, if all four are known.
    fn v6(&self, part: Part) -> Option<u32> {
        let ether = (12..=12 + 4 * MAX_TAGS as u32)
            .step_by(4)
            .find(|&kind| self.is(kind, 2, &[0x86dd]))?;
        let first = ether + 10; // the source
        let start = first + part.at.checked_sub(first)? / 16 * 16;
        let mut address = [0; 16];
        for (n, word) in address.chunks_exact_mut(4).enumerate() {
            let part = Part {
                header: None,
                at: start + 4 * n as u32,
                size: 4,
            };
            let &[(low, high)] = &self.facts.get(&part)?[..] else {
                return None;
            };
            if low != high {
                return None;
            }
            word.copy_from_slice(&low.to_be_bytes());
        }
        Some(v6_mark(address))
    }

    /// What is known if one or the other holds.
    fn join(&mut self, other: &Self) {
        let same = |a: Value, b: Value| if a == b { a } else { Value::Unknown };
        self.a = same(self.a, other.a);
        self.x = same(self.x, other.x);
        for (mine, theirs) in self.scratch.iter_mut().zip(other.scratch) {
            *mine = same(*mine, theirs);
        }
        self.facts
            .retain(|part, ranges| match other.facts.get(part) {
                Some(others) => {
                    for range in others {
                        if !ranges.contains(range) {
                            ranges.push(*range);
                        }
                    }
                    ranges.sort_unstable();
                    ranges.len() <= MAX_RANGES
                }
                None => false,
            });
    }
}

/// What lies in a range of both.
fn both(a: &[(u32, u32)], b: &[(u32, u32)]) -> Ranges {
    let pairs = a
        .iter()
        .flat_map(|a| b.iter().map(move |b| (a.0.max(b.0), a.1.min(b.1))));
    pairs.filter(|&(low, high)| low <= high).collect()
}

/// Below, the field is a length.
const FIRST_TYPE: u32 = 0x600;
/// More are forgotten.
const MAX_RANGES: usize = 16;
/// Ways to an instruction that are kept apart.
const MAX_WAYS: usize = 8;

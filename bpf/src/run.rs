//! The interpreter: one decoded operation per step, no allocation, nothing that can panic.
//!
//! A program is decoded once into [`Op`]s, one per instruction and at the same index. Where a load
//! or a mask is followed by a comparison with a constant (most of what libpcap emits), the first
//! one's slot holds both: one step instead of two. The comparison keeps its own slot, because a
//! jump may lead to it.
//!
//! Steps are bounded. Without backward jumps every step moves forward, so there are at most as many
//! as instructions. A backward jump over *n* instructions pays *n* from [`STEP_BUDGET`]; a run
//! therefore takes at most as many steps as [`STEP_BUDGET`] and the program's length together,
//! whatever the frame.

#[cfg(doc)]
use super::program::SCRATCH_WORDS;
use super::program::{Instruction, OutOfSteps, code};
use crate::speculation::confined;

/// Instructions that one frame may make a looping program go back over.
///
/// `protochain` takes about 20 per extension header: this is enough for 3,000 of them.
pub const STEP_BUDGET: u32 = 65_536;

/// Where a comparison goes: indices of operations.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fork {
    yes: u16,
    no: u16,
}

impl Fork {
    #[inline(always)]
    fn to(self, holds: bool) -> usize {
        if holds {
            usize::from(self.yes)
        } else {
            // NB: not cold, but without the hint this compiles to a conditional move, and the next
            // operation waits for the frame's bytes: 10 to 25 % slower over six filters.
            std::hint::cold_path();
            usize::from(self.no)
        }
    }
}

/// One decoded step.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Word(u32),
    Half(u32),
    Byte(u32),
    WordEq(Fork, u32, u32),
    HalfEq(Fork, u32, u32),
    ByteEq(Fork, u32, u32),
    HalfSet(Fork, u32, u32),
    WordXEq(Fork, u32, u32),
    HalfXEq(Fork, u32, u32),
    ByteXEq(Fork, u32, u32),
    AndEq(Fork, u32, u32),
    WordX(u32),
    HalfX(u32),
    ByteX(u32),
    Len,
    Imm(u32),
    Mem(u32),
    XImm(u32),
    XMem(u32),
    XLen,
    XHeader(u32),
    Store(u32),
    StoreX(u32),
    Add(u32),
    Sub(u32),
    Mul(u32),
    Div(u32),
    Mod(u32),
    And(u32),
    Or(u32),
    Xor(u32),
    Shl(u32),
    Shr(u32),
    AddX,
    SubX,
    MulX,
    DivX,
    ModX,
    AndX,
    OrX,
    XorX,
    ShlX,
    ShrX,
    Neg,
    ToX,
    FromX,
    Skip(u32),
    Back(u32),
    Eq(Fork, u32),
    Gt(Fork, u32),
    Ge(Fork, u32),
    Set(Fork, u32),
    EqX(Fork),
    GtX(Fork),
    GeX(Fork),
    SetX(Fork),
    Ret(u32),
    RetA,
}

const _: () = assert!(size_of::<Op>() == 16);

/// Decodes instructions that were verified.
pub(super) fn decode(instructions: &[Instruction]) -> Vec<Op> {
    let mut ops: Vec<Op> = instructions
        .iter()
        .enumerate()
        .map(|(at, i)| single(*i, at))
        .collect();
    for at in 0..ops.len().saturating_sub(1) {
        ops[at] = match (ops[at], ops[at + 1]) {
            (Op::Word(offset), Op::Eq(fork, k)) => Op::WordEq(fork, offset, k),
            (Op::Half(offset), Op::Eq(fork, k)) => Op::HalfEq(fork, offset, k),
            (Op::Byte(offset), Op::Eq(fork, k)) => Op::ByteEq(fork, offset, k),
            (Op::Half(offset), Op::Set(fork, k)) => Op::HalfSet(fork, offset, k),
            (Op::WordX(offset), Op::Eq(fork, k)) => Op::WordXEq(fork, offset, k),
            (Op::HalfX(offset), Op::Eq(fork, k)) => Op::HalfXEq(fork, offset, k),
            (Op::ByteX(offset), Op::Eq(fork, k)) => Op::ByteXEq(fork, offset, k),
            (Op::And(mask), Op::Eq(fork, k)) => Op::AndEq(fork, mask, k),
            (op, _) => op,
        };
    }
    ops
}

/// True if an operation uses scratch memory.
pub(super) fn uses_scratch(ops: &[Op]) -> bool {
    let uses = |op: &Op| matches!(op, Op::Mem(_) | Op::XMem(_) | Op::Store(_) | Op::StoreX(_));
    ops.iter().any(uses)
}

/// Runs decoded operations; see [`Program::judge`](super::Program::judge).
///
/// `SCRATCH` is [`SCRATCH_WORDS`], or 0 for a program that does not use it: clearing it would be a
/// good part of a short program's cost.
pub(super) fn run<const SCRATCH: usize>(
    ops: &[Op],
    bytes: &[u8],
    wire_len: u32,
) -> Result<u32, OutOfSteps> {
    let mut a = 0_u32;
    let mut x = 0_u32;
    let mut scratch = [0_u32; SCRATCH];
    let mut budget = STEP_BUDGET;
    let mut pc = 0_usize;
    /// Takes the value, or rejects the frame.
    macro_rules! some {
        ($value:expr) => {
            match $value {
                Some(value) => value,
                None => return Ok(0),
            }
        };
    }
    // Verification put every jump inside and a return at the end: `None` cannot happen.
    while let Some(&op) = ops.get(pc) {
        pc += 1;
        match op {
            Op::WordEq(fork, offset, k) => {
                a = some!(word(bytes, offset as usize));
                pc = fork.to(a == k);
            }
            Op::HalfEq(fork, offset, k) => {
                a = some!(half(bytes, offset as usize));
                pc = fork.to(a == k);
            }
            Op::ByteEq(fork, offset, k) => {
                a = some!(byte(bytes, offset as usize));
                pc = fork.to(a == k);
            }
            Op::HalfSet(fork, offset, k) => {
                a = some!(half(bytes, offset as usize));
                pc = fork.to(a & k != 0);
            }
            Op::WordXEq(fork, offset, k) => {
                a = some!(word(bytes, some!(sum(x, offset))));
                pc = fork.to(a == k);
            }
            Op::HalfXEq(fork, offset, k) => {
                a = some!(half(bytes, some!(sum(x, offset))));
                pc = fork.to(a == k);
            }
            Op::ByteXEq(fork, offset, k) => {
                a = some!(byte(bytes, some!(sum(x, offset))));
                pc = fork.to(a == k);
            }
            Op::AndEq(fork, mask, k) => {
                a &= mask;
                pc = fork.to(a == k);
            }
            Op::Word(offset) => a = some!(word(bytes, offset as usize)),
            Op::Half(offset) => a = some!(half(bytes, offset as usize)),
            Op::Byte(offset) => a = some!(byte(bytes, offset as usize)),
            Op::WordX(k) => a = some!(word(bytes, some!(sum(x, k)))),
            Op::HalfX(k) => a = some!(half(bytes, some!(sum(x, k)))),
            Op::ByteX(k) => a = some!(byte(bytes, some!(sum(x, k)))),
            Op::XHeader(offset) => x = (some!(byte(bytes, offset as usize)) & 0x0f) << 2,
            Op::Len => a = wire_len,
            Op::XLen => x = wire_len,
            Op::Imm(k) => a = k,
            Op::XImm(k) => x = k,
            Op::Mem(k) => a = some!(scratch.get(k as usize).copied()),
            Op::XMem(k) => x = some!(scratch.get(k as usize).copied()),
            Op::Store(k) => *some!(scratch.get_mut(k as usize)) = a,
            Op::StoreX(k) => *some!(scratch.get_mut(k as usize)) = x,
            Op::Add(k) => a = a.wrapping_add(k),
            Op::Sub(k) => a = a.wrapping_sub(k),
            Op::Mul(k) => a = a.wrapping_mul(k),
            Op::Div(k) => a = some!(a.checked_div(k)),
            Op::Mod(k) => a = some!(a.checked_rem(k)),
            Op::And(k) => a &= k,
            Op::Or(k) => a |= k,
            Op::Xor(k) => a ^= k,
            Op::Shl(k) => a = a.checked_shl(k).unwrap_or(0),
            Op::Shr(k) => a = a.checked_shr(k).unwrap_or(0),
            Op::AddX => a = a.wrapping_add(x),
            Op::SubX => a = a.wrapping_sub(x),
            Op::MulX => a = a.wrapping_mul(x),
            Op::DivX => a = some!(a.checked_div(x)),
            Op::ModX => a = some!(a.checked_rem(x)),
            Op::AndX => a &= x,
            Op::OrX => a |= x,
            Op::XorX => a ^= x,
            Op::ShlX => a = a.checked_shl(x).unwrap_or(0),
            Op::ShrX => a = a.checked_shr(x).unwrap_or(0),
            Op::Neg => a = a.wrapping_neg(),
            Op::ToX => x = a,
            Op::FromX => a = x,
            Op::Skip(k) => pc += k as usize,
            Op::Back(distance) => {
                budget = budget.checked_sub(distance).ok_or(OutOfSteps)?;
                pc = pc.wrapping_sub(distance as usize);
            }
            Op::Eq(fork, k) => pc = fork.to(a == k),
            Op::Gt(fork, k) => pc = fork.to(a > k),
            Op::Ge(fork, k) => pc = fork.to(a >= k),
            Op::Set(fork, k) => pc = fork.to(a & k != 0),
            Op::EqX(fork) => pc = fork.to(a == x),
            Op::GtX(fork) => pc = fork.to(a > x),
            Op::GeX(fork) => pc = fork.to(a >= x),
            Op::SetX(fork) => pc = fork.to(a & x != 0),
            Op::Ret(k) => return Ok(k),
            Op::RetA => return Ok(a),
        }
    }
    Ok(0)
}

#[inline(always)]
fn word(bytes: &[u8], offset: usize) -> Option<u32> {
    load(bytes, offset).map(u32::from_be_bytes)
}

#[inline(always)]
fn half(bytes: &[u8], offset: usize) -> Option<u32> {
    load(bytes, offset).map(|half| u32::from(u16::from_be_bytes(half)))
}

#[inline(always)]
fn byte(bytes: &[u8], offset: usize) -> Option<u32> {
    load(bytes, offset).map(|[byte]| u32::from(byte))
}

/// `N` bytes of the frame; on a mispredicted path no others at a place of the program's choice.
#[inline(always)]
fn load<const N: usize>(bytes: &[u8], offset: usize) -> Option<[u8; N]> {
    let offset = confined(offset, offset.checked_add(N)?, bytes.len());
    bytes.get(offset..)?.first_chunk().copied()
}

/// The sum without wrapping: an offset past 2^32 is beyond every frame.
#[inline(always)]
fn sum(x: u32, k: u32) -> Option<usize> {
    (x as usize).checked_add(k as usize)
}

/// What an operation with a constant (`code::ADD_K` and its like, not `NEG`) makes of A, as the
/// interpreter does; `None` for a division by zero, and for anything else.
pub fn calculate(operation: u16, a: u32, k: u32) -> Option<u32> {
    match operation {
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
    }
}

fn single(i: Instruction, at: usize) -> Op {
    // Inside the program, so less than MAX_OWN_INSTRUCTIONS: it fits.
    let target = |skip: u8| (at + 1 + usize::from(skip)) as u16;
    let fork = Fork {
        yes: target(i.jt),
        no: target(i.jf),
    };
    let k = i.k;
    match i.code {
        code::LD_W_ABS => Op::Word(k),
        code::LD_H_ABS => Op::Half(k),
        code::LD_B_ABS => Op::Byte(k),
        code::LD_W_IND => Op::WordX(k),
        code::LD_H_IND => Op::HalfX(k),
        code::LD_B_IND => Op::ByteX(k),
        code::LD_LEN => Op::Len,
        code::LD_IMM => Op::Imm(k),
        code::LD_MEM => Op::Mem(k),
        code::LDX_IMM => Op::XImm(k),
        code::LDX_MEM => Op::XMem(k),
        code::LDX_LEN => Op::XLen,
        code::LDX_MSH => Op::XHeader(k),
        code::ST => Op::Store(k),
        code::STX => Op::StoreX(k),
        code::ADD_K => Op::Add(k),
        code::SUB_K => Op::Sub(k),
        code::MUL_K => Op::Mul(k),
        code::DIV_K => Op::Div(k),
        code::MOD_K => Op::Mod(k),
        code::AND_K => Op::And(k),
        code::OR_K => Op::Or(k),
        code::XOR_K => Op::Xor(k),
        code::LSH_K => Op::Shl(k),
        code::RSH_K => Op::Shr(k),
        code::ADD_X => Op::AddX,
        code::SUB_X => Op::SubX,
        code::MUL_X => Op::MulX,
        code::DIV_X => Op::DivX,
        code::MOD_X => Op::ModX,
        code::AND_X => Op::AndX,
        code::OR_X => Op::OrX,
        code::XOR_X => Op::XorX,
        code::LSH_X => Op::ShlX,
        code::RSH_X => Op::ShrX,
        code::NEG => Op::Neg,
        code::TAX => Op::ToX,
        code::TXA => Op::FromX,
        code::JA if k.cast_signed() < 0 => Op::Back(k.wrapping_neg()),
        code::JA => Op::Skip(k),
        code::JEQ_K => Op::Eq(fork, k),
        code::JGT_K => Op::Gt(fork, k),
        code::JGE_K => Op::Ge(fork, k),
        code::JSET_K => Op::Set(fork, k),
        code::JEQ_X => Op::EqX(fork),
        code::JGT_X => Op::GtX(fork),
        code::JGE_X => Op::GeX(fork),
        code::JSET_X => Op::SetX(fork),
        code::RET_A => Op::RetA,
        code::RET => Op::Ret(k),
        // Verification let nothing else through; rejecting every frame would be the safe reading.
        _ => Op::Ret(0),
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;

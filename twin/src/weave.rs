//! Maps whose memory the kernel gives to nobody, made of arrays, whose memory it does.
//!
//! A hash or an array per CPU is an array here ([`crate::hash`], [`crate::per_cpu`]). A program's calls of the kernel's functions
//! for such a map become calls of functions of ours, which stand behind the program. The verifier checks them with the rest,
//! and both instances run them: the daemon knows arrays alone.

use vnplug_os::bpf::asm::{Asm, FP, Operand, Reg, Size};
use vnplug_os::bpf::{Array, Insn};

use crate::check::{ALU_MOV, Checked, FETCH, Op, Right, Unfit};
use crate::object::{MapKind, MapSpec};
use crate::{hash, per_cpu};

/// For whom a program is put together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    /// Places per CPU are the CPU's.
    Kernel,
    /// They are the instance's.
    Daemon,
}

/// What is done with a map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Lookup,
    Update,
    Delete,
}

/// The program, with functions of ours for the maps that need some.
///
/// # Errors
/// [`Unfit`]: which map a call is for does not show.
pub(crate) fn weave(
    insns: &[Insn],
    checked: &Checked,
    maps: &[(&MapSpec, &Array)],
    side: Side,
) -> Result<Vec<Insn>, Unfit> {
    let is_woven = |spec: &MapSpec| spec.kind != MapKind::Array;
    let mut woven = insns.to_vec();
    if !maps.iter().any(|(spec, _)| is_woven(spec)) {
        return Ok(woven);
    }
    let known = maps_at_calls(checked);
    let mut made: Vec<((usize, Access), usize)> = Vec::new();
    for (at, insn) in insns.iter().enumerate() {
        let access = match (insn.code(), insn.src(), insn.imm()) {
            (CALL, 0, 1) => Access::Lookup,
            (CALL, 0, 2) => Access::Update,
            (CALL, 0, 3) => Access::Delete,
            _ => continue,
        };
        let Known::Map(descriptor) = known[at] else {
            let why = "which map this call is for differs by the way that leads here, or does not show: name the map where \
                       it is called for";
            return Err(Unfit {
                at,
                why: why.into(),
            });
        };
        let map = maps.iter().position(|(_, it)| it.number() == descriptor);
        let Some(map) = map.filter(|&map| is_woven(maps[map].0)) else {
            continue;
        };
        let there = made.iter().find(|it| it.0 == (map, access));
        let begin = match there {
            Some((_, begin)) => *begin,
            None => {
                let (spec, array) = maps[map];
                let function = match spec.kind {
                    MapKind::Hash { key_bytes, forgets } => {
                        let layout = hash::Layout::of(spec, key_bytes, forgets);
                        hash::function(access, &layout, array)
                    }
                    _ => per_cpu::function(access, spec, array, side),
                };
                let begin = woven.len();
                woven.extend(function.map_err(|why| Unfit { at, why })?);
                made.push(((map, access), begin));
                begin
            }
        };
        let distance = begin as i64 - (at as i64 + 1);
        let distance = i32::try_from(distance).unwrap_or_default();
        woven[at] = Insn::new(CALL, 0, PSEUDO_CALL, 0, distance);
    }
    Ok(woven)
}

/// Copies bytes that the program has somewhere, whatever they are aligned to, onto the stack at `to`, and zeroes behind them up to
/// a multiple of 8.
pub(crate) fn copy_in(asm: &mut Asm, from: Reg, bytes: u32, to: i16, scratch: Reg) {
    for at in 0..bytes as i16 {
        asm.load(Size::Byte, scratch, from, at);
        asm.store(Size::Byte, FP, to + at, scratch);
    }
    for at in bytes..bytes.next_multiple_of(8) {
        asm.store_k(Size::Byte, FP, to + at as i16, 0);
    }
}

/// An error of the kernel's, in R0.
pub(crate) fn fail(asm: &mut Asm, error: u32) {
    asm.alu64(
        vnplug_os::bpf::asm::Alu::Mov,
        vnplug_os::bpf::asm::R0,
        Operand::K(error.wrapping_neg()),
    );
}

/// What a register is known to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing led here yet.
    Unseen,
    /// A map, by its descriptor.
    Map(i32),
    /// Something else, or one map or another.
    Other,
}

/// What R1 is at each instruction.
fn maps_at_calls(checked: &Checked) -> Vec<Known> {
    let ops = &checked.ops;
    let mut before = vec![[Known::Unseen; 11]; ops.len()];
    let mut left = Vec::new();
    for function in &checked.functions {
        before[function.start] = [Known::Other; 11];
        left.push(function.start);
    }
    while let Some(at) = left.pop() {
        let mut regs = before[at];
        let mut set = |reg: u8, known| regs[usize::from(reg)] = known;
        match ops[at] {
            Op::Map { dst, descriptor } => set(dst, Known::Map(descriptor)),
            Op::Alu {
                op: ALU_MOV,
                wide: true,
                dst,
                right: Right::X(src),
                off: 0,
            } => set(dst, before[at][usize::from(src)]),
            Op::Alu { dst, .. }
            | Op::Swap { dst, .. }
            | Op::Number { dst, .. }
            | Op::Value { dst, .. }
            | Op::Load { dst, .. } => set(dst, Known::Other),
            Op::Atomic { src, op, .. } if op & FETCH != 0 => {
                set(src, Known::Other);
                set(0, Known::Other);
            }
            Op::Help(_) | Op::Call { .. } => (0..=5).for_each(|reg| set(reg, Known::Other)),
            _ => {}
        }
        let next = match ops[at] {
            Op::Jump { to } => [Some(to), None],
            Op::Branch { to, .. } => [Some(to), Some(at + 1)],
            Op::Exit => [None, None],
            Op::Number { .. } | Op::Map { .. } | Op::Value { .. } => [Some(at + 2), None],
            _ => [Some(at + 1), None],
        };
        for to in next.into_iter().flatten().filter(|&to| to < ops.len()) {
            let mut changed = false;
            for (there, comes) in before[to].iter_mut().zip(regs) {
                let both = match (*there, comes) {
                    (Known::Unseen, it) | (it, Known::Unseen) => it,
                    (one, other) if one == other => one,
                    _ => Known::Other,
                };
                changed |= both != *there;
                *there = both;
            }
            if changed {
                left.push(to);
            }
        }
    }
    before.into_iter().map(|regs| regs[1]).collect()
}

const CALL: u8 = 0x85;
const PSEUDO_CALL: u8 = 1;

#[cfg(test)]
mod tests;

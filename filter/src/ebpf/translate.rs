//! One classic program as an eBPF fragment.
//!
//! | register | holds |
//! |---|---|
//! | R6 | A |
//! | R7 | X |
//! | R8, R9 | how the packet is reached ([`Reach`]) |
//! | R0 to R5 | nothing for longer than one classic instruction |
//!
//! ```text
//! R10 ->  0 ..  -64   scratch memory, 16 words
//!       -64 ..  -88   slots of the packet's side: length, what a helper loads
//!       -80 .. -208   the packet's first bytes (socket filters)
//! ```
//!
//! Every conditional jump stays conditional even if its outcome is certain (an offset beyond every
//! packet): the kernel refuses code that no edge reaches, and removes code that no run reaches.

use crate::{Instruction, Program};
use vnplug_bpf::code;
use vnplug_os::bpf::asm::{Alu, Asm, Cond, FP, Label, Operand, R1, R2, R6, R7, Reg, Size};

use Operand::{K, X};

/// A register of the classic machine.
pub(super) const A: Reg = R6;
pub(super) const INDEX: Reg = R7;

/// The lowest stack offset that a fragment and scratch memory leave to the packet's side.
pub(super) const SLOTS: i16 = -(SCRATCH_BYTES as i16);

const SCRATCH_BYTES: u32 = 64;

/// How a fragment reaches the packet; the kinds of programs differ only in this.
pub(super) trait Reach {
    /// Loads `size` bytes at `offset` into `dst`, in host byte order; jumps to `reject` if the
    /// packet does not have them.
    fn fixed(&self, asm: &mut Asm, size: Size, dst: Reg, offset: u32, labels: &Labels);

    /// The same at the offset that R2 holds, of up to 33 bits.
    fn variable(&self, asm: &mut Asm, size: Size, dst: Reg, labels: &Labels);

    /// Puts the length on the wire into `dst`.
    fn wire_len(&self, asm: &mut Asm, dst: Reg);
}

/// Where a fragment leads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Labels {
    /// The program wants the frame.
    pub(super) accept: Label,
    /// This cannot be decided here.
    pub(super) unsure: Label,
    /// The program does not want it.
    pub(super) reject: Label,
}

/// Appends a program that does not loop; it leaves by one of the labels.
pub(super) fn append(asm: &mut Asm, program: &Program, reach: &impl Reach, labels: Labels) {
    let list = program.instructions();
    let reached = reached(list);
    asm.alu32(Alu::Mov, A, K(0));
    asm.alu32(Alu::Mov, INDEX, K(0));
    clear_scratch(asm, list);
    let places: Vec<Label> = list.iter().map(|_| asm.label()).collect();
    for (at, instruction) in list.iter().enumerate() {
        if reached[at] {
            asm.bind(places[at]);
            one(asm, *instruction, &places[at + 1..], reach, &labels);
        }
    }
}

/// The highest end of a fixed load of a program, in bytes of the packet.
pub(super) fn fixed_end(program: &Program) -> u64 {
    let ends = program.instructions().iter().filter_map(|i| {
        let bytes = match i.code {
            code::LD_W_ABS => 4,
            code::LD_H_ABS => 2,
            code::LD_B_ABS | code::LDX_MSH => 1,
            _ => return None,
        };
        Some(u64::from(i.k) + bytes)
    });
    ends.max().unwrap_or(0)
}

/// How many instructions load at an offset that depends on the packet.
pub(super) fn variable_loads(program: &Program) -> usize {
    let varies =
        |i: &&Instruction| matches!(i.code, code::LD_W_IND | code::LD_H_IND | code::LD_B_IND);
    program.instructions().iter().filter(varies).count()
}

/// Whether a program asks for the length of the frame.
pub(super) fn asks_length(program: &Program) -> bool {
    let asks = |i: &Instruction| matches!(i.code, code::LD_LEN | code::LDX_LEN);
    program.instructions().iter().any(asks)
}

/// Which instructions a run can reach: the kernel refuses a program with others.
fn reached(list: &[Instruction]) -> Vec<bool> {
    let mut reached = vec![false; list.len()];
    reached[0] = true;
    for (at, i) in list.iter().enumerate() {
        if !reached[at] {
            continue;
        }
        let next = at + 1;
        match i.code {
            code::RET | code::RET_A => {}
            code::JA => reached[next + i.k as usize] = true,
            _ if i.code & 0x07 == code::JA => {
                reached[next + usize::from(i.jt)] = true;
                reached[next + usize::from(i.jf)] = true;
            }
            _ => reached[next] = true,
        }
    }
    reached
}

/// Sets the words that the program reads to zero, in pairs, as stack memory is not.
fn clear_scratch(asm: &mut Asm, list: &[Instruction]) {
    let mut pairs = [false; 8];
    for i in list {
        if matches!(i.code, code::LD_MEM | code::LDX_MEM) {
            pairs[i.k as usize / 2] = true;
        }
    }
    for (pair, read) in pairs.into_iter().enumerate() {
        if read {
            asm.store_k(Size::Double, FP, word(pair as u32 * 2), 0);
        }
    }
}

/// Where a word of scratch memory is.
fn word(k: u32) -> i16 {
    SLOTS + (k * 4) as i16
}

/// Appends one instruction; `after[n]` is the label of the one after the `n` next.
fn one(asm: &mut Asm, i: Instruction, after: &[Label], reach: &impl Reach, labels: &Labels) {
    let k = i.k;
    match i.code {
        code::LD_W_ABS => reach.fixed(asm, Size::Word, A, k, labels),
        code::LD_H_ABS => reach.fixed(asm, Size::Half, A, k, labels),
        code::LD_B_ABS => reach.fixed(asm, Size::Byte, A, k, labels),
        code::LD_W_IND => indirect(asm, Size::Word, k, reach, labels),
        code::LD_H_IND => indirect(asm, Size::Half, k, reach, labels),
        code::LD_B_IND => indirect(asm, Size::Byte, k, reach, labels),
        code::LDX_MSH => {
            reach.fixed(asm, Size::Byte, INDEX, k, labels);
            asm.alu32(Alu::And, INDEX, K(0x0f));
            asm.alu32(Alu::Shl, INDEX, K(2));
        }
        code::LD_LEN => reach.wire_len(asm, A),
        code::LDX_LEN => reach.wire_len(asm, INDEX),
        code::LD_IMM => asm.alu32(Alu::Mov, A, K(k)),
        code::LDX_IMM => asm.alu32(Alu::Mov, INDEX, K(k)),
        code::LD_MEM => asm.load(Size::Word, A, FP, word(k)),
        code::LDX_MEM => asm.load(Size::Word, INDEX, FP, word(k)),
        code::ST => asm.store(Size::Word, FP, word(k), A),
        code::STX => asm.store(Size::Word, FP, word(k), INDEX),
        code::TAX => asm.alu32(Alu::Mov, INDEX, X(A)),
        code::TXA => asm.alu32(Alu::Mov, A, X(INDEX)),
        code::NEG => asm.alu32(Alu::Neg, A, K(0)),
        code::DIV_X | code::MOD_X => {
            asm.jump32_if(Cond::Eq, INDEX, K(0), labels.reject);
            let op = if i.code == code::DIV_X {
                Alu::Div
            } else {
                Alu::Mod
            };
            asm.alu32(op, A, X(INDEX));
        }
        code::LSH_X => shift(asm, Alu::Shl),
        code::RSH_X => shift(asm, Alu::Shr),
        code::JA => asm.jump(after[k as usize]),
        code::RET if k == 0 => asm.jump(labels.reject),
        code::RET => asm.jump(labels.accept),
        code::RET_A => {
            asm.jump32_if(Cond::Ne, A, K(0), labels.accept);
            asm.jump(labels.reject);
        }
        other if other & 0x07 == code::JA => fork(asm, i, after),
        other => arithmetic(asm, other, k),
    }
}

fn indirect(asm: &mut Asm, size: Size, k: u32, reach: &impl Reach, labels: &Labels) {
    // 64 bits wide: the sum does not wrap.
    asm.alu32(Alu::Mov, R2, K(k));
    asm.alu64(Alu::Add, R2, X(INDEX));
    reach.variable(asm, size, A, labels);
}

/// The classic machine shifts everything out where eBPF takes the count modulo 32.
fn shift(asm: &mut Asm, op: Alu) {
    let (some, done) = (asm.label(), asm.label());
    asm.jump32_if(Cond::Lt, INDEX, K(32), some);
    asm.alu32(Alu::Mov, A, K(0));
    asm.jump(done);
    asm.bind(some);
    asm.alu32(op, A, X(INDEX));
    asm.bind(done);
}

fn arithmetic(asm: &mut Asm, operation: u16, k: u32) {
    let operand = if operation & 0x08 == 0 {
        K(k)
    } else {
        X(INDEX)
    };
    let op = match operation & !0x08 {
        code::ADD_K => Alu::Add,
        code::SUB_K => Alu::Sub,
        code::MUL_K => Alu::Mul,
        code::DIV_K => Alu::Div,
        code::MOD_K => Alu::Mod,
        code::AND_K => Alu::And,
        code::OR_K => Alu::Or,
        code::XOR_K => Alu::Xor,
        code::LSH_K => Alu::Shl,
        // Verification let nothing else through.
        _ => Alu::Shr,
    };
    asm.alu32(op, A, operand);
}

fn fork(asm: &mut Asm, i: Instruction, after: &[Label]) {
    let operand = if i.code & 0x08 == 0 { K(i.k) } else { X(INDEX) };
    let (yes, no) = (after[usize::from(i.jt)], after[usize::from(i.jf)]);
    let (cond, opposite) = match i.code & !0x08 {
        code::JEQ_K => (Cond::Eq, Some(Cond::Ne)),
        code::JGT_K => (Cond::Gt, Some(Cond::Le)),
        code::JGE_K => (Cond::Ge, Some(Cond::Lt)),
        _ => (Cond::Set, None),
    };
    match opposite {
        Some(opposite) if i.jt == 0 => asm.jump32_if(opposite, A, operand, no),
        _ => {
            asm.jump32_if(cond, A, operand, yes);
            if i.jf != 0 {
                asm.jump(no);
            }
        }
    }
}

/// From a value in `dst` that was loaded in pieces of `size`, of which R1 has the next.
pub(super) fn join(asm: &mut Asm, dst: Reg, size: Size) {
    asm.alu32(Alu::Shl, dst, K(size.bytes() * 8));
    asm.alu32(Alu::Or, dst, X(R1));
}

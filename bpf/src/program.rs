//! A verified classic BPF program: the only form in which a filter meets a frame.
//!
//! A [`Program`] is checked once, completely, when it is made; after that nothing in it can fail.
//! The rules are those of the Linux kernel for socket filters (`bpf_check_classic` in
//! `net/core/filter.c`), with three differences:
//!
//! - Scratch memory starts as zeros here, so reading a word that was never written is allowed.
//! - The kernel's own load offsets (`SKF_AD_OFF` and so on, which read the kernel's notes about a
//!   packet and not the packet) are refused: a ring has no such notes. libpcap 1.10 emits one, for
//!   `inbound` and `outbound`; run as it stands it would reject every frame in silence.
//! - [`Trust::Operator`] may jump backwards, as libpcap's `protochain` does; such a program is
//!   metered when it runs.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::run::{self, Op};

/// One classic BPF instruction, laid out as Linux `struct sock_filter` and libpcap `bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if the comparison holds.
    pub jt: u8,
    /// Instructions to skip if it does not.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

const _: () = assert!(size_of::<Instruction>() == INSTRUCTION_BYTES);

/// Whose program it is; decides whether it may loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// A guest's: forward jumps only, so at most one step per instruction.
    Guest,
    /// The host operator's, or the output of libpcap: backward jumps run on a meter
    /// ([`STEP_BUDGET`](super::STEP_BUDGET)).
    Operator,
    /// The user's who runs it, in a process of theirs: as [`Trust::Operator`], and up to
    /// [`MAX_OWN_INSTRUCTIONS`] long, for nobody else waits for it.
    Own,
}

impl Trust {
    /// The longest program.
    fn max_instructions(self) -> usize {
        match self {
            Self::Guest | Self::Operator => MAX_INSTRUCTIONS,
            Self::Own => MAX_OWN_INSTRUCTIONS,
        }
    }
}

/// A verified program; cloning shares it.
#[derive(Clone)]
pub struct Program {
    instructions: Arc<[Instruction]>,
    ops: Arc<[Op]>,
    loops: bool,
    needs: Needs,
}

/// What interpreting a program takes.
#[derive(Clone, Copy)]
enum Needs {
    Nothing,
    /// Scratch memory.
    Scratch,
    /// See [`Program::broken`].
    Mending,
}

impl Program {
    /// Verifies the wire form: 8 bytes per instruction, little-endian `code`, `jt`, `jf`, `k`.
    ///
    /// # Errors
    /// [`VerifyError`] with the first rule that is broken; the sender's fault.
    pub fn from_bytes(bytes: &[u8], trust: Trust) -> Result<Self, VerifyError> {
        let (chunks, rest) = bytes.as_chunks::<INSTRUCTION_BYTES>();
        if !rest.is_empty() {
            return Err(VerifyError::Ragged {
                len_bytes: bytes.len(),
            });
        }
        // Before the allocation, so that its size is bounded.
        check_len(chunks.len(), trust)?;
        let instructions: Vec<Instruction> = chunks.iter().map(instruction).collect();
        Self::from_instructions(&instructions, trust)
    }

    /// Verifies a list of instructions.
    ///
    /// # Errors
    /// As [`Program::from_bytes`].
    pub fn from_instructions(
        instructions: &[Instruction],
        trust: Trust,
    ) -> Result<Self, VerifyError> {
        check_len(instructions.len(), trust)?;
        let mut loops = false;
        for (at, instruction) in instructions.iter().enumerate() {
            loops |= check(*instruction, at, instructions.len(), trust)?;
        }
        let last = instructions[instructions.len() - 1].code;
        if last & 0x07 != code::RET {
            return Err(VerifyError::NoReturnAtEnd { code: last });
        }
        let ops = run::decode(instructions);
        let needs = match run::uses_scratch(&ops) {
            true => Needs::Scratch,
            false => Needs::Nothing,
        };
        Ok(Self {
            instructions: instructions.into(),
            ops: ops.into(),
            loops,
            needs,
        })
    }

    /// A program that accepts every frame, cut to `snaplen` bytes (0 rejects every frame).
    pub fn accept(snaplen: u32) -> Self {
        let ret = [Instruction {
            code: code::RET,
            jt: 0,
            jf: 0,
            k: snaplen,
        }];
        Self {
            instructions: ret.into(),
            ops: run::decode(&ret).into(),
            loops: false,
            needs: Needs::Nothing,
        }
    }

    /// A program that panics when it is interpreted, as no verified one does: it stands for a bug of
    /// ours in tests of what such a bug may cost.
    #[doc(hidden)]
    pub fn broken() -> Self {
        let nop = Instruction {
            code: code::TAX,
            jt: 0,
            jf: 0,
            k: 0,
        };
        let mut broken = Self::accept(1);
        // Like no other program, or the two would be one in an index.
        broken.instructions = [nop, broken.instructions[0]].into();
        broken.needs = Needs::Mending;
        broken
    }

    /// The wire form that [`Program::from_bytes`] reads.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.instructions
            .iter()
            .copied()
            .flat_map(instruction_bytes)
            .collect()
    }

    /// The instructions as they were given.
    pub fn instructions(&self) -> &Arc<[Instruction]> {
        &self.instructions
    }

    /// True if it jumps backwards somewhere; [`Trust::Guest`] would have refused it.
    pub fn loops(&self) -> bool {
        self.loops
    }

    /// Where running it begins to read, for a caller that prefetches it.
    #[inline(always)]
    pub fn entry(&self) -> *const u8 {
        self.ops.as_ptr().cast()
    }

    /// How many bytes of a frame the filter wants: 0 is "not this frame", and a number may be
    /// larger than the frame.
    ///
    /// `bytes` is what was captured, `wire_len` the length on the wire in bytes. The result is that
    /// of libpcap's `bpf_filter`: a load beyond `bytes` or a division by zero rejects the frame.
    /// A frame on which a looping program runs out of steps is rejected too; use
    /// [`Program::judge`] to tell the two apart.
    #[inline]
    pub fn run(&self, bytes: &[u8], wire_len: u32) -> u32 {
        self.judge(bytes, wire_len).unwrap_or(0)
    }

    /// As [`Program::run`], but says when the meter ran out.
    ///
    /// # Errors
    /// [`OutOfSteps`]: reject the frame and count it. Only programs that loop can do this.
    #[inline]
    pub fn judge(&self, bytes: &[u8], wire_len: u32) -> Result<u32, OutOfSteps> {
        match self.needs {
            Needs::Nothing => run::run::<0>(&self.ops, bytes, wire_len),
            Needs::Scratch => run::run::<{ SCRATCH_WORDS as usize }>(&self.ops, bytes, wire_len),
            Needs::Mending => panic!("on purpose"),
        }
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&*self.instructions).finish()
    }
}

impl PartialEq for Program {
    fn eq(&self, other: &Self) -> bool {
        self.instructions == other.instructions
    }
}

impl Eq for Program {}

impl Hash for Program {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.instructions.hash(state);
    }
}

/// A looping program used up its step budget on one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfSteps;

impl fmt::Display for OutOfSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the filter used up its {} steps on one frame",
            run::STEP_BUDGET
        )
    }
}

impl std::error::Error for OutOfSteps {}

/// Why a program is refused. `at` is the index of the instruction, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyError {
    /// No instruction at all.
    Empty,
    /// More than [`MAX_INSTRUCTIONS`], or [`MAX_OWN_INSTRUCTIONS`].
    TooLong {
        /// Instructions given.
        len: usize,
        /// Instructions allowed.
        max: usize,
    },
    /// Not a whole number of instructions.
    Ragged {
        /// Bytes given.
        len_bytes: usize,
    },
    /// Not an operation of classic BPF.
    UnknownOpcode {
        /// Where.
        at: usize,
        /// The operation.
        code: u16,
    },
    /// A jump leaves the program.
    JumpOutside {
        /// Where.
        at: usize,
        /// The instruction it would reach.
        target: i64,
    },
    /// A jump to itself or backwards in a guest's program.
    BackwardJump {
        /// Where.
        at: usize,
    },
    /// Execution could run off the end.
    NoReturnAtEnd {
        /// The last operation.
        code: u16,
    },
    /// Division or remainder by the constant 0.
    DivisionByZero {
        /// Where.
        at: usize,
    },
    /// Scratch memory has 16 words.
    ScratchOutside {
        /// Where.
        at: usize,
        /// The word asked for.
        word: u32,
    },
    /// A constant shift of a 32-bit register by 32 or more.
    ShiftTooLarge {
        /// Where.
        at: usize,
        /// Bits asked for.
        bits: u32,
    },
    /// A load from the kernel's notes instead of the packet.
    KernelOffset {
        /// Where.
        at: usize,
        /// The offset, negative.
        offset: i32,
    },
}

impl fmt::Display for VerifyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Empty => {
                f.write_str("filter program is empty: send at least one ret instruction")
            }
            Self::TooLong { len, max } => write!(
                f,
                "filter program has {len} instructions: at most {max} are allowed, \
                 use a simpler filter"
            ),
            Self::Ragged { len_bytes } => write!(
                f,
                "filter program has {len_bytes} bytes: send {INSTRUCTION_BYTES} per instruction"
            ),
            Self::UnknownOpcode { at, code } => write!(
                f,
                "instruction {at}: {code:#06x} is not a classic BPF operation (eBPF is not accepted)"
            ),
            Self::JumpOutside { at, target } => write!(
                f,
                "instruction {at}: jump to {target} leaves the program, correct its offset"
            ),
            Self::BackwardJump { at } => write!(
                f,
                "instruction {at}: jumps backwards, which a guest's program may not do: \
                 unroll the loop, or send the expression instead of the program"
            ),
            Self::NoReturnAtEnd { code } => {
                write!(
                    f,
                    "last instruction is {code:#06x}: end the program with ret"
                )
            }
            Self::DivisionByZero { at } => {
                write!(
                    f,
                    "instruction {at}: divides by the constant 0, correct the divisor"
                )
            }
            Self::ScratchOutside { at, word } => write!(
                f,
                "instruction {at}: uses scratch word {word}, only 0 to {} exist",
                SCRATCH_WORDS - 1
            ),
            Self::ShiftTooLarge { at, bits } => {
                write!(
                    f,
                    "instruction {at}: shifts by {bits} bits, at most 31 make sense"
                )
            }
            Self::KernelOffset { at, offset } => write!(
                f,
                "instruction {at}: loads from kernel offset {offset}, which only the kernel has: \
                 leave out what asks for it (inbound, outbound)"
            ),
        }
    }
}

impl std::error::Error for VerifyError {}

fn instruction(bytes: &[u8; INSTRUCTION_BYTES]) -> Instruction {
    let [c0, c1, jt, jf, k @ ..] = *bytes;
    Instruction {
        code: u16::from_le_bytes([c0, c1]),
        jt,
        jf,
        k: u32::from_le_bytes(k),
    }
}

/// The wire form of one instruction.
pub fn instruction_bytes(i: Instruction) -> [u8; INSTRUCTION_BYTES] {
    let ([c0, c1], [k0, k1, k2, k3]) = (i.code.to_le_bytes(), i.k.to_le_bytes());
    [c0, c1, i.jt, i.jf, k0, k1, k2, k3]
}

fn check_len(len: usize, trust: Trust) -> Result<(), VerifyError> {
    let max = trust.max_instructions();
    match len {
        0 => Err(VerifyError::Empty),
        _ if len <= max => Ok(()),
        _ => Err(VerifyError::TooLong { len, max }),
    }
}

/// Checks one instruction; true if it jumps backwards.
fn check(i: Instruction, at: usize, len: usize, trust: Trust) -> Result<bool, VerifyError> {
    use code::*;
    let inside = |distance: i64| {
        let target = at as i64 + 1 + distance;
        if (0..len as i64).contains(&target) {
            Ok(())
        } else {
            Err(VerifyError::JumpOutside { at, target })
        }
    };
    match i.code {
        LD_W_ABS | LD_H_ABS | LD_B_ABS | LDX_MSH if i.k >= KERNEL_OFFSETS => {
            Err(VerifyError::KernelOffset {
                at,
                offset: i.k.cast_signed(),
            })
        }
        LD_W_ABS | LD_H_ABS | LD_B_ABS | LDX_MSH => Ok(false),
        LD_W_IND | LD_H_IND | LD_B_IND | LD_LEN | LD_IMM | LDX_IMM | LDX_LEN => Ok(false),
        LD_MEM | LDX_MEM | ST | STX if i.k >= SCRATCH_WORDS => {
            Err(VerifyError::ScratchOutside { at, word: i.k })
        }
        LD_MEM | LDX_MEM | ST | STX => Ok(false),
        DIV_K | MOD_K if i.k == 0 => Err(VerifyError::DivisionByZero { at }),
        LSH_K | RSH_K if i.k >= 32 => Err(VerifyError::ShiftTooLarge { at, bits: i.k }),
        ADD_K | SUB_K | MUL_K | DIV_K | MOD_K | AND_K | OR_K | XOR_K | LSH_K | RSH_K => Ok(false),
        ADD_X | SUB_X | MUL_X | DIV_X | MOD_X | AND_X | OR_X | XOR_X | LSH_X | RSH_X => Ok(false),
        NEG | TAX | TXA | RET | RET_A => Ok(false),
        JA => {
            // The offset is unsigned in the kernel; libpcap's protochain means a signed one.
            let distance = i64::from(i.k.cast_signed());
            inside(distance)?;
            match (distance < 0, trust) {
                (true, Trust::Guest) => Err(VerifyError::BackwardJump { at }),
                (backward, _) => Ok(backward),
            }
        }
        JEQ_K | JGT_K | JGE_K | JSET_K | JEQ_X | JGT_X | JGE_X | JSET_X => {
            inside(i64::from(i.jt))?;
            inside(i64::from(i.jf))?;
            Ok(false)
        }
        code => Err(VerifyError::UnknownOpcode { at, code }),
    }
}

/// Operations of classic BPF (linux/bpf_common.h and linux/filter.h, the allowed combinations).
#[expect(missing_docs, reason = "the names say what there is to say")]
pub mod code {
    macro_rules! codes {
        ($($name:ident = $value:expr;)*) => { $(pub const $name: u16 = $value;)* };
    }
    codes! {
        // What every operation has in it: its class, and whether its operand is X.
        CLASS = 0x07; ALU = 0x04; JUMPS = 0x05; BY_X = 0x08;
        LD_W_ABS = 0x20; LD_H_ABS = 0x28; LD_B_ABS = 0x30;
        LD_W_IND = 0x40; LD_H_IND = 0x48; LD_B_IND = 0x50;
        LD_LEN = 0x80; LD_IMM = 0x00; LD_MEM = 0x60;
        LDX_IMM = 0x01; LDX_MEM = 0x61; LDX_LEN = 0x81; LDX_MSH = 0xb1;
        ST = 0x02; STX = 0x03;
        ADD_K = 0x04; SUB_K = 0x14; MUL_K = 0x24; DIV_K = 0x34; OR_K = 0x44; AND_K = 0x54;
        LSH_K = 0x64; RSH_K = 0x74; NEG = 0x84; MOD_K = 0x94; XOR_K = 0xa4;
        ADD_X = 0x0c; SUB_X = 0x1c; MUL_X = 0x2c; DIV_X = 0x3c; OR_X = 0x4c; AND_X = 0x5c;
        LSH_X = 0x6c; RSH_X = 0x7c; MOD_X = 0x9c; XOR_X = 0xac;
        JA = 0x05; JEQ_K = 0x15; JGT_K = 0x25; JGE_K = 0x35; JSET_K = 0x45;
        JEQ_X = 0x1d; JGT_X = 0x2d; JGE_X = 0x3d; JSET_X = 0x4d;
        RET = 0x06; RET_A = 0x16; TAX = 0x07; TXA = 0x87;
    }
}

/// The longest program, as in the kernel (`BPF_MAXINSNS`).
pub const MAX_INSTRUCTIONS: usize = 4096;

/// The longest program of a user's own, for which a comparison's targets still fit (`run::Fork`): a
/// list of about ten thousand hosts.
pub const MAX_OWN_INSTRUCTIONS: usize = 65_535;

/// Bytes of one instruction in [`Program::to_bytes`].
pub const INSTRUCTION_BYTES: usize = 8;

/// Words of scratch memory (`BPF_MEMWORDS`).
pub const SCRATCH_WORDS: u32 = 16;

/// Absolute load offsets from here on mean "not the packet" to the kernel (`SKF_LL_OFF`).
const KERNEL_OFFSETS: u32 = (-0x20_0000_i32).cast_unsigned();

#[cfg(test)]
#[path = "program_tests.rs"]
mod tests;

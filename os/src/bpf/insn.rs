//! eBPF instructions, and the few spellings of them that our programs use.
//!
//! The encoding is that of the kernel's Documentation/bpf/standardization/instruction-set.rst.

/// One instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Insn {
    /// Operation, with its class and source.
    pub code: u8,
    /// Destination register in the low four bits, source register in the high ones (little endian).
    pub regs: u8,
    /// Signed offset: bytes of a memory access, instructions of a jump.
    pub off: i16,
    /// Immediate operand.
    pub imm: i32,
}

/// A register, `r0` to `r10`.
pub type Reg = u8;

/// Width of a memory access: the size bits of its code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Width {
    /// 4 bytes.
    Word = 0x00,
    /// 8 bytes.
    Double = 0x18,
}

/// When a jump is taken: the operation bits of its code. Comparisons are of 64 bits, unsigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum If {
    /// Equal.
    Eq = 0x10,
    /// Greater.
    Gt = 0x20,
    /// Not equal.
    Ne = 0x50,
}

/// An operation on a register: the operation bits of its code. 64 bits wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Alu {
    /// Addition.
    Add = 0x00,
    /// Exclusive or.
    Xor = 0xa0,
    /// Assignment.
    Mov = 0xb0,
}

impl Insn {
    /// Any instruction.
    pub const fn new(code: u8, dst: Reg, src: Reg, off: i16, imm: i32) -> Self {
        #[cfg(target_endian = "little")]
        let regs = src << 4 | dst;
        #[cfg(target_endian = "big")]
        let regs = dst << 4 | src;
        Self {
            code,
            regs,
            off,
            imm,
        }
    }

    /// `dst = dst OP imm`.
    pub const fn alu(op: Alu, dst: Reg, imm: i32) -> Self {
        Self::new(CLASS_ALU64 | op as u8, dst, 0, 0, imm)
    }

    /// `dst = dst OP src`.
    pub const fn alu_reg(op: Alu, dst: Reg, src: Reg) -> Self {
        Self::new(CLASS_ALU64 | SOURCE_REG | op as u8, dst, src, 0, 0)
    }

    /// `dst = *(src + off)`.
    pub const fn load(width: Width, dst: Reg, src: Reg, off: i16) -> Self {
        Self::new(CLASS_LDX | MODE_MEM | width as u8, dst, src, off, 0)
    }

    /// `*(dst + off) = src`.
    pub const fn store(width: Width, dst: Reg, off: i16, src: Reg) -> Self {
        Self::new(CLASS_STX | MODE_MEM | width as u8, dst, src, off, 0)
    }

    /// `*(dst + off) += src`, 8 bytes, as one.
    pub const fn atomic_add(dst: Reg, off: i16, src: Reg) -> Self {
        Self::new(
            CLASS_STX | MODE_ATOMIC | Width::Double as u8,
            dst,
            src,
            off,
            0,
        )
    }

    /// Jumps over `off` instructions if `dst IF imm`.
    pub const fn jump(when: If, dst: Reg, imm: i32, off: i16) -> Self {
        Self::new(CLASS_JMP | when as u8, dst, 0, off, imm)
    }

    /// Jumps over `off` instructions if `dst IF src`.
    pub const fn jump_reg(when: If, dst: Reg, src: Reg, off: i16) -> Self {
        Self::new(CLASS_JMP | SOURCE_REG | when as u8, dst, src, off, 0)
    }

    /// Calls a helper (`BPF_FUNC_*`) with `r1` to `r5`; the result is in `r0`, and `r1` to `r5` are
    /// lost.
    pub const fn call(helper: i32) -> Self {
        Self::new(CLASS_JMP | OP_CALL, 0, 0, 0, helper)
    }

    /// Ends the program; its result is `r0`.
    pub const fn exit() -> Self {
        Self::new(CLASS_JMP | OP_EXIT, 0, 0, 0, 0)
    }

    /// The first of the two instructions that load a map's address; see `Map::load_into`.
    pub const fn map_low(dst: Reg, fd: i32) -> Self {
        const PSEUDO_MAP_FD: u8 = 1;
        Self::new(CODE_LOAD_IMM64, dst, PSEUDO_MAP_FD, 0, fd)
    }
}

const CLASS_LDX: u8 = 0x01;
const CLASS_STX: u8 = 0x03;
const CLASS_JMP: u8 = 0x05;
const CLASS_ALU64: u8 = 0x07;
const MODE_MEM: u8 = 0x60;
const MODE_ATOMIC: u8 = 0xc0;
const SOURCE_REG: u8 = 0x08;
const OP_CALL: u8 = 0x80;
const OP_EXIT: u8 = 0x90;
const CODE_LOAD_IMM64: u8 = 0x18;

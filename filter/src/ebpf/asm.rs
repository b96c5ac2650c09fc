//! eBPF instructions and an assembler with labels.
//!
//! Only what the translation uses (Linux `Documentation/bpf/standardization/instruction-set.rst`);
//! 32-bit jumps need Linux ≥ 5.1, direct addresses of map values ≥ 5.2.

use vnplug_os::bpf::Insn;

/// A register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reg(pub(super) u8);

pub(super) const R0: Reg = Reg(0);
pub(super) const R1: Reg = Reg(1);
pub(super) const R2: Reg = Reg(2);
pub(super) const R3: Reg = Reg(3);
pub(super) const R4: Reg = Reg(4);
pub(super) const R6: Reg = Reg(6);
pub(super) const R7: Reg = Reg(7);
pub(super) const R8: Reg = Reg(8);
pub(super) const R9: Reg = Reg(9);
/// Points past the end of the stack; read-only.
pub(super) const FP: Reg = Reg(10);

/// Arithmetic, by its number in the instruction set.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(super) enum Alu {
    Add = 0x00,
    Sub = 0x10,
    Mul = 0x20,
    Div = 0x30,
    Or = 0x40,
    And = 0x50,
    Shl = 0x60,
    Shr = 0x70,
    Neg = 0x80,
    Mod = 0x90,
    Xor = 0xa0,
    Mov = 0xb0,
}

/// A comparison of unsigned numbers.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(super) enum Cond {
    Eq = 0x10,
    Gt = 0x20,
    Ge = 0x30,
    Set = 0x40,
    Ne = 0x50,
    Lt = 0xa0,
    Le = 0xb0,
}

/// Bytes of a memory access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    Byte,
    Half,
    Word,
    Double,
}

impl Size {
    pub(super) fn bytes(self) -> u32 {
        match self {
            Self::Byte => 1,
            Self::Half => 2,
            Self::Word => 4,
            Self::Double => 8,
        }
    }

    fn bits(self) -> u8 {
        match self {
            Self::Word => 0x00,
            Self::Half => 0x08,
            Self::Byte => 0x10,
            Self::Double => 0x18,
        }
    }
}

/// The right side of an operation.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operand {
    /// A constant; 64-bit operations extend its sign.
    K(u32),
    /// A register.
    X(Reg),
}

/// A jump target; [`Asm::bind`] says where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Label(usize);

/// A jump is longer than an instruction can say (32,767 instructions).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooFar;

/// Instructions under construction.
#[derive(Debug, Default)]
pub(super) struct Asm {
    code: Vec<Insn>,
    /// Where each label is.
    places: Vec<Option<usize>>,
    /// Jumps and the labels they lead to.
    jumps: Vec<(usize, Label)>,
}

impl Asm {
    /// A new label, bound later.
    pub(super) fn label(&mut self) -> Label {
        self.places.push(None);
        Label(self.places.len() - 1)
    }

    /// The label is here.
    pub(super) fn bind(&mut self, label: Label) {
        self.places[label.0] = Some(self.code.len());
    }

    /// Jumps to `from`, which is not bound, go to `to` instead.
    pub(super) fn lead(&mut self, from: Label, to: Label) {
        for (_, label) in &mut self.jumps {
            if *label == from {
                *label = to;
            }
        }
    }

    /// Whether something jumps there.
    pub(super) fn is_used(&self, label: Label) -> bool {
        self.jumps.iter().any(|(_, to)| *to == label)
    }

    /// 32-bit arithmetic; the upper half of `dst` becomes zero.
    pub(super) fn alu32(&mut self, op: Alu, dst: Reg, operand: Operand) {
        self.operate(CLASS_ALU, op, dst, operand);
    }

    /// 64-bit arithmetic.
    pub(super) fn alu64(&mut self, op: Alu, dst: Reg, operand: Operand) {
        self.operate(CLASS_ALU64, op, dst, operand);
    }

    /// From network byte order, `Half` or `Word`; the rest of the register becomes zero.
    pub(super) fn network_order(&mut self, dst: Reg, size: Size) {
        if size != Size::Byte {
            self.push(TO_BE, dst, R0, 0, size.bytes() * 8);
        }
    }

    /// `dst = *(size *)(src + off)`.
    pub(super) fn load(&mut self, size: Size, dst: Reg, src: Reg, off: i16) {
        self.push(CLASS_LDX | MODE_MEM | size.bits(), dst, src, off, 0);
    }

    /// `*(size *)(dst + off) = src`.
    pub(super) fn store(&mut self, size: Size, dst: Reg, off: i16, src: Reg) {
        self.push(CLASS_STX | MODE_MEM | size.bits(), dst, src, off, 0);
    }

    /// `*(size *)(dst + off) = k`.
    pub(super) fn store_k(&mut self, size: Size, dst: Reg, off: i16, k: u32) {
        self.push(CLASS_ST | MODE_MEM | size.bits(), dst, R0, off, k);
    }

    /// `*(u64 *)dst += src`, as one.
    pub(super) fn atomic_add(&mut self, dst: Reg, src: Reg) {
        self.push(
            CLASS_STX | MODE_ATOMIC | Size::Double.bits(),
            dst,
            src,
            0,
            0,
        );
    }

    /// The address of the value of an array map with one element, by the map's descriptor.
    pub(super) fn map_value(&mut self, dst: Reg, map: i32) {
        self.push(LD_DOUBLE, dst, PSEUDO_MAP_VALUE, 0, map.cast_unsigned());
        self.push(0, R0, R0, 0, 0);
    }

    /// Calls a helper of the kernel; R1 to R5 are lost.
    pub(super) fn call(&mut self, helper: u32) {
        self.push(CALL, R0, R0, 0, helper);
    }

    pub(super) fn exit(&mut self) {
        self.push(EXIT, R0, R0, 0, 0);
    }

    pub(super) fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(JA, R0, R0, 0, 0);
    }

    /// Jumps if the low halves compare so.
    pub(super) fn jump32_if(&mut self, cond: Cond, left: Reg, right: Operand, to: Label) {
        self.compare(CLASS_JMP32, cond, left, right, to);
    }

    /// Jumps if the whole registers compare so.
    pub(super) fn jump_if(&mut self, cond: Cond, left: Reg, right: Operand, to: Label) {
        self.compare(CLASS_JMP, cond, left, right, to);
    }

    /// The instructions, with every jump resolved.
    ///
    /// # Errors
    /// [`TooFar`], also for a label that was never bound.
    pub(super) fn finish(mut self) -> Result<Vec<Insn>, TooFar> {
        for (at, label) in self.jumps {
            let place = self.places[label.0].ok_or(TooFar)?;
            let distance = place as i64 - (at as i64 + 1);
            self.code[at].off = i16::try_from(distance).map_err(|_| TooFar)?;
        }
        Ok(self.code)
    }

    fn operate(&mut self, class: u8, op: Alu, dst: Reg, operand: Operand) {
        match operand {
            Operand::K(k) => self.push(class | op as u8, dst, R0, 0, k),
            Operand::X(src) => self.push(class | op as u8 | SOURCE_X, dst, src, 0, 0),
        }
    }

    fn compare(&mut self, class: u8, cond: Cond, left: Reg, right: Operand, to: Label) {
        self.jumps.push((self.code.len(), to));
        match right {
            Operand::K(k) => self.push(class | cond as u8, left, R0, 0, k),
            Operand::X(src) => self.push(class | cond as u8 | SOURCE_X, left, src, 0, 0),
        }
    }

    fn push(&mut self, code: u8, dst: Reg, src: Reg, off: i16, imm: u32) {
        self.code
            .push(Insn::new(code, dst.0, src.0, off, imm.cast_signed()));
    }
}

const CLASS_LDX: u8 = 0x01;
const CLASS_ST: u8 = 0x02;
const CLASS_STX: u8 = 0x03;
const CLASS_ALU: u8 = 0x04;
const CLASS_JMP: u8 = 0x05;
const CLASS_JMP32: u8 = 0x06;
const CLASS_ALU64: u8 = 0x07;
const MODE_MEM: u8 = 0x60;
const MODE_ATOMIC: u8 = 0xc0;
const SOURCE_X: u8 = 0x08;
const LD_DOUBLE: u8 = 0x18;
const TO_BE: u8 = 0xdc;
const JA: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const PSEUDO_MAP_VALUE: Reg = Reg(2);

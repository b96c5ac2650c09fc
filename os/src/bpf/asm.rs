//! eBPF instructions and an assembler with labels.
//!
//! Only what our programs use (Linux `Documentation/bpf/standardization/instruction-set.rst`);
//! 32-bit jumps need Linux ≥ 5.1, direct addresses of map values ≥ 5.2.

use std::os::fd::AsRawFd;

use super::Map;

/// One instruction (`struct bpf_insn`).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Insn {
    /// Operation, with its class and source.
    code: u8,
    /// Destination register in the low four bits, source register in the high ones (little endian).
    regs: u8,
    /// Signed offset: bytes of a memory access, instructions of a jump.
    off: i16,
    /// Immediate operand.
    imm: i32,
}

const _: () = assert!(size_of::<Insn>() == 8);

impl Insn {
    /// From its parts, as an object has them.
    pub fn new(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Self {
        let (dst, src) = (dst & 0xf, src & 0xf);
        let regs = match cfg!(target_endian = "little") {
            true => src << 4 | dst,
            false => dst << 4 | src,
        };
        Self {
            code,
            regs,
            off,
            imm,
        }
    }

    /// Operation, with its class and source.
    pub fn code(self) -> u8 {
        self.code
    }

    /// The number of the destination register.
    pub fn dst(self) -> u8 {
        match cfg!(target_endian = "little") {
            true => self.regs & 0xf,
            false => self.regs >> 4,
        }
    }

    /// The number of the source register.
    pub fn src(self) -> u8 {
        match cfg!(target_endian = "little") {
            true => self.regs >> 4,
            false => self.regs & 0xf,
        }
    }

    /// Bytes of a memory access, instructions of a jump.
    pub fn off(self) -> i16 {
        self.off
    }

    /// The immediate operand.
    pub fn imm(self) -> i32 {
        self.imm
    }
}

/// A register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reg(u8);

/// The result, of calls and of the program.
pub const R0: Reg = Reg(0);
/// The first argument of calls, and the context when the program begins.
pub const R1: Reg = Reg(1);
/// The second argument.
pub const R2: Reg = Reg(2);
/// The third argument.
pub const R3: Reg = Reg(3);
/// The fourth argument.
pub const R4: Reg = Reg(4);
/// The fifth argument.
pub const R5: Reg = Reg(5);
/// Calls leave it alone, as R7 to R9.
pub const R6: Reg = Reg(6);
/// As R6.
pub const R7: Reg = Reg(7);
/// As R6.
pub const R8: Reg = Reg(8);
/// As R6.
pub const R9: Reg = Reg(9);
/// Points past the end of the stack; it is read-only itself.
pub const FP: Reg = Reg(10);

/// Arithmetic, by its number in the instruction set.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say what there is to say")]
pub enum Alu {
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
#[expect(missing_docs, reason = "the names say what there is to say")]
pub enum Cond {
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
pub enum Size {
    /// 1.
    Byte,
    /// 2.
    Half,
    /// 4.
    Word,
    /// 8.
    Double,
}

impl Size {
    /// How many.
    pub fn bytes(self) -> u32 {
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
pub enum Operand {
    /// A constant; 64-bit operations extend its sign.
    K(u32),
    /// A register.
    X(Reg),
}

/// A jump target; [`Asm::bind`] says where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label(usize);

/// A jump is longer than an instruction can say (32,767 instructions).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooFar;

/// Instructions under construction.
#[derive(Debug, Default)]
pub struct Asm {
    code: Vec<Insn>,
    /// Where each label is.
    places: Vec<Option<usize>>,
    /// Jumps and the labels they lead to.
    jumps: Vec<(usize, Label)>,
    /// Calls of functions, and the labels where these begin.
    calls: Vec<(usize, Label)>,
}

impl Asm {
    /// A new label, bound later.
    pub fn label(&mut self) -> Label {
        self.places.push(None);
        Label(self.places.len() - 1)
    }

    /// The label is here.
    pub fn bind(&mut self, label: Label) {
        self.places[label.0] = Some(self.code.len());
    }

    /// Jumps to `from`, which is not bound, go to `to` instead.
    pub fn lead(&mut self, from: Label, to: Label) {
        for (_, label) in &mut self.jumps {
            if *label == from {
                *label = to;
            }
        }
    }

    /// Whether something jumps there.
    pub fn is_used(&self, label: Label) -> bool {
        self.jumps.iter().any(|(_, to)| *to == label)
    }

    /// 32-bit arithmetic; the upper half of `dst` becomes zero.
    pub fn alu32(&mut self, op: Alu, dst: Reg, operand: Operand) {
        self.operate(CLASS_ALU, op, dst, operand);
    }

    /// 64-bit arithmetic.
    pub fn alu64(&mut self, op: Alu, dst: Reg, operand: Operand) {
        self.operate(CLASS_ALU64, op, dst, operand);
    }

    /// From network byte order; the rest of the register becomes zero.
    pub fn network_order(&mut self, dst: Reg, size: Size) {
        if size != Size::Byte {
            self.push(TO_BE, dst, R0, 0, size.bytes() * 8);
        }
    }

    /// `dst = *(size *)(src + off)`.
    pub fn load(&mut self, size: Size, dst: Reg, src: Reg, off: i16) {
        self.push(CLASS_LDX | MODE_MEM | size.bits(), dst, src, off, 0);
    }

    /// `*(size *)(dst + off) = src`.
    pub fn store(&mut self, size: Size, dst: Reg, off: i16, src: Reg) {
        self.push(CLASS_STX | MODE_MEM | size.bits(), dst, src, off, 0);
    }

    /// `*(size *)(dst + off) = k`.
    pub fn store_k(&mut self, size: Size, dst: Reg, off: i16, k: u32) {
        self.push(CLASS_ST | MODE_MEM | size.bits(), dst, R0, off, k);
    }

    /// `*(u64 *)dst += src`, as one.
    pub fn atomic_add(&mut self, dst: Reg, src: Reg) {
        self.atomic_add_at(dst, 0, src);
    }

    /// `*(u64 *)(dst + off) += src`, as one.
    pub fn atomic_add_at(&mut self, dst: Reg, off: i16, src: Reg) {
        self.push(ATOMIC, dst, src, off, 0);
    }

    /// `if *(u64 *)(dst + off) == R0 { = src }`, as one; R0 is what was there (Linux ≥ 5.12).
    pub fn compare_exchange(&mut self, dst: Reg, off: i16, src: Reg) {
        self.push(ATOMIC, dst, src, off, COMPARE_EXCHANGE);
    }

    /// The address of a map, valid for [`Program::load`](super::Program::load) while the map lives.
    pub fn map(&mut self, dst: Reg, map: &Map) {
        self.descriptor(dst, PSEUDO_MAP_FD, map);
    }

    /// The address of the only entry of an array, valid as that of a [`map`](Self::map).
    pub fn value(&mut self, dst: Reg, map: &Map) {
        self.descriptor(dst, PSEUDO_MAP_VALUE, map);
    }

    /// What was put together elsewhere, and jumps only within itself or to its end.
    pub fn append(&mut self, code: &[Insn]) {
        self.code.extend_from_slice(code);
    }

    /// Calls a helper of the kernel; R1 to R5 are lost.
    pub fn call(&mut self, helper: u32) {
        self.push(CALL, R0, R0, 0, helper);
    }

    /// Calls a function of the program's (Linux ≥ 4.16); R1 to R5 are lost.
    pub fn call_function(&mut self, function: Label) {
        self.calls.push((self.code.len(), function));
        self.push(CALL, R0, PSEUDO_CALL, 0, 0);
    }

    /// Ends the program; its result is R0.
    pub fn exit(&mut self) {
        self.push(EXIT, R0, R0, 0, 0);
    }

    /// Jumps in any case.
    pub fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(JA, R0, R0, 0, 0);
    }

    /// Jumps if the low halves compare so.
    pub fn jump32_if(&mut self, cond: Cond, left: Reg, right: Operand, to: Label) {
        self.compare(CLASS_JMP32, cond, left, right, to);
    }

    /// Jumps if the whole registers compare so.
    pub fn jump_if(&mut self, cond: Cond, left: Reg, right: Operand, to: Label) {
        self.compare(CLASS_JMP, cond, left, right, to);
    }

    /// The instructions, with every jump resolved.
    ///
    /// # Errors
    /// [`TooFar`], also for a label that was never bound.
    pub fn finish(mut self) -> Result<Vec<Insn>, TooFar> {
        for (at, label) in self.calls {
            let place = self.places[label.0].ok_or(TooFar)?;
            let distance = place as i64 - (at as i64 + 1);
            self.code[at].imm = i32::try_from(distance).map_err(|_| TooFar)?;
        }
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

    /// The first of these two instructions says what the descriptor stands for.
    fn descriptor(&mut self, dst: Reg, what: Reg, map: &Map) {
        let number = map.fd.as_raw_fd().cast_unsigned();
        self.push(LD_DOUBLE, dst, what, 0, number);
        self.push(0, R0, R0, 0, 0);
    }

    fn push(&mut self, code: u8, dst: Reg, src: Reg, off: i16, imm: u32) {
        #[cfg(target_endian = "little")]
        let regs = src.0 << 4 | dst.0;
        #[cfg(target_endian = "big")]
        let regs = dst.0 << 4 | src.0;
        self.code.push(Insn {
            code,
            regs,
            off,
            imm: imm.cast_signed(),
        });
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
const ATOMIC: u8 = CLASS_STX | MODE_ATOMIC | 0x18;
/// `BPF_CMPXCHG`
const COMPARE_EXCHANGE: u32 = 0xf1;
const SOURCE_X: u8 = 0x08;
const LD_DOUBLE: u8 = 0x18;
const TO_BE: u8 = 0xdc;
const JA: u8 = 0x05;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// `BPF_PSEUDO_CALL`, in the place of a source register.
const PSEUDO_CALL: Reg = Reg(1);
/// `BPF_PSEUDO_MAP_FD`, in the place of a source register.
const PSEUDO_MAP_FD: Reg = Reg(1);
/// `BPF_PSEUDO_MAP_VALUE`: of an array map with one element.
const PSEUDO_MAP_VALUE: Reg = Reg(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_lie_where_the_kernel_looks() {
        let mut asm = Asm::default();
        asm.alu64(Alu::Mov, R6, Operand::X(R1));
        let code = asm.finish().unwrap();
        assert_eq!((code[0].code, code[0].regs), (0xbf, 0x16));
    }

    #[test]
    fn jumps_lead_to_their_labels_also_over_what_is_appended() {
        let mut piece = Asm::default();
        let end = piece.label();
        piece.jump_if(Cond::Eq, R0, Operand::K(0), end);
        piece.exit();
        piece.bind(end);
        let piece = piece.finish().unwrap();

        let mut asm = Asm::default();
        let end = asm.label();
        asm.jump(end);
        asm.append(&piece);
        asm.bind(end);
        asm.exit();
        let offsets: Vec<_> = asm.finish().unwrap().iter().map(|it| it.off).collect();
        assert_eq!(offsets, [2, 1, 0, 0]);

        let mut nowhere = Asm::default();
        let label = nowhere.label();
        nowhere.jump(label);
        assert_eq!(nowhere.finish(), Err(TooFar));
    }
}

//! Classic BPF programs, checked and interpreted.

/// One instruction, laid out as libpcap's `bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// A program that stays within itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program(Vec<Instruction>);

impl Program {
    /// Checks that every jump has a target and the last instruction returns.
    ///
    /// # Errors
    /// What is wrong.
    pub fn new(list: Vec<Instruction>) -> Result<Self, &'static str> {
        let inside =
            |at: usize, skip: i64| (0..list.len() as i64).contains(&(at as i64 + 1 + skip));
        for (at, i) in list.iter().enumerate() {
            let good = match i.code {
                code::JA => inside(at, i64::from(i.k.cast_signed())),
                code if code & 7 == code::JUMPS => {
                    inside(at, i64::from(i.jt)) && inside(at, i64::from(i.jf))
                }
                code::LD_MEM | code::LDX_MEM | code::ST | code::STX => i.k < SCRATCH as u32,
                // The kernel's notes of a packet are not in a file.
                code::LD_W | code::LD_H | code::LD_B | code::LDX_MSH => i.k < KERNEL_OFFSETS,
                _ => true,
            };
            if !good {
                return Err("it asks for what a file does not have (inbound, outbound)");
            }
        }
        match list.last() {
            Some(last) if last.code & 7 == code::RETURNS => Ok(Self(list)),
            _ => Err("the program does not end"),
        }
    }

    /// Accepts every packet.
    pub fn everything() -> Self {
        Self(vec![Instruction {
            code: code::RET,
            jt: 0,
            jf: 0,
            k: u32::MAX,
        }])
    }

    /// Its instructions.
    pub fn instructions(&self) -> &[Instruction] {
        &self.0
    }

    /// Whether it accepts a packet, as libpcap's `bpf_filter` says; a program that goes round more than
    /// 100,000 steps does not.
    pub fn accepts(&self, bytes: &[u8], wire_len: u32) -> bool {
        self.run(bytes, wire_len).is_some_and(|len| len != 0)
    }

    fn run(&self, bytes: &[u8], wire_len: u32) -> Option<u32> {
        use code::*;
        let (mut a, mut x, mut scratch) = (0_u32, 0_u32, [0_u32; SCRATCH]);
        let mut at = 0_usize;
        for _ in 0..MAX_STEPS {
            let Instruction { code, jt, jf, k } = *self.0.get(at)?;
            at += 1;
            let fork = |holds: bool| usize::from(if holds { jt } else { jf });
            let beside_x = || usize::try_from(u64::from(x) + u64::from(k)).ok();
            match code {
                LD_W => a = load::<4>(bytes, k as usize)?,
                LD_H => a = load::<2>(bytes, k as usize)?,
                LD_B => a = load::<1>(bytes, k as usize)?,
                LD_W_X => a = load::<4>(bytes, beside_x()?)?,
                LD_H_X => a = load::<2>(bytes, beside_x()?)?,
                LD_B_X => a = load::<1>(bytes, beside_x()?)?,
                LDX_MSH => x = (load::<1>(bytes, k as usize)? & 0xf) << 2,
                LD_LEN => a = wire_len,
                LDX_LEN => x = wire_len,
                LD_IMM => a = k,
                LDX_IMM => x = k,
                LD_MEM => a = *scratch.get(k as usize)?,
                LDX_MEM => x = *scratch.get(k as usize)?,
                ST => *scratch.get_mut(k as usize)? = a,
                STX => *scratch.get_mut(k as usize)? = x,
                TAX => x = a,
                TXA => a = x,
                RET => return Some(k),
                RET_A => return Some(a),
                NEG => a = a.wrapping_neg(),
                JA => at = at.checked_add_signed(k.cast_signed() as isize)?,
                _ if code & 7 == JUMPS => {
                    let other = if code & 8 == 0 { k } else { x };
                    at += match code & 0xf0 {
                        0x10 => fork(a == other),
                        0x20 => fork(a > other),
                        0x30 => fork(a >= other),
                        0x40 => fork(a & other != 0),
                        _ => return None,
                    };
                }
                _ if code & 7 == ALU => {
                    a = arithmetic(code & 0xf0, a, if code & 8 == 0 { k } else { x })?;
                }
                _ => return None,
            }
        }
        None
    }
}

/// `a` and another operand combined; `None` for a division by zero.
pub(super) fn arithmetic(operation: u16, a: u32, other: u32) -> Option<u32> {
    Some(match operation {
        0x00 => a.wrapping_add(other),
        0x10 => a.wrapping_sub(other),
        0x20 => a.wrapping_mul(other),
        0x30 => a.checked_div(other)?,
        0x40 => a | other,
        0x50 => a & other,
        0x60 => a.checked_shl(other).unwrap_or(0),
        0x70 => a.checked_shr(other).unwrap_or(0),
        0x90 => a.checked_rem(other)?,
        0xa0 => a ^ other,
        _ => return None,
    })
}

#[inline]
fn load<const N: usize>(bytes: &[u8], at: usize) -> Option<u32> {
    let part = bytes.get(at..)?.first_chunk::<N>()?;
    Some(part.iter().fold(0, |sum, &byte| sum << 8 | u32::from(byte)))
}

/// Operations (`<linux/filter.h>`).
pub(super) mod code {
    pub(crate) const LD_W: u16 = 0x20;
    pub(crate) const LD_H: u16 = 0x28;
    pub(crate) const LD_B: u16 = 0x30;
    pub(crate) const LD_W_X: u16 = 0x40;
    pub(crate) const LD_H_X: u16 = 0x48;
    pub(crate) const LD_B_X: u16 = 0x50;
    pub(crate) const LD_LEN: u16 = 0x80;
    pub(crate) const LD_IMM: u16 = 0x00;
    pub(crate) const LD_MEM: u16 = 0x60;
    pub(crate) const LDX_IMM: u16 = 0x01;
    pub(crate) const LDX_MEM: u16 = 0x61;
    pub(crate) const LDX_LEN: u16 = 0x81;
    pub(crate) const LDX_MSH: u16 = 0xb1;
    pub(crate) const ST: u16 = 0x02;
    pub(crate) const STX: u16 = 0x03;
    pub(crate) const ALU: u16 = 0x04;
    pub(crate) const AND_K: u16 = 0x54;
    pub(crate) const NEG: u16 = 0x84;
    pub(crate) const JUMPS: u16 = 0x05;
    pub(crate) const JA: u16 = 0x05;
    pub(crate) const JEQ_K: u16 = 0x15;
    pub(crate) const JGT_K: u16 = 0x25;
    pub(crate) const JGE_K: u16 = 0x35;
    pub(crate) const RETURNS: u16 = 0x06;
    pub(crate) const RET: u16 = 0x06;
    pub(crate) const RET_A: u16 = 0x16;
    pub(crate) const TAX: u16 = 0x07;
    pub(crate) const TXA: u16 = 0x87;
}

/// Words of scratch memory.
pub(super) const SCRATCH: usize = 16;
/// Loads from here on are of the kernel's notes.
const KERNEL_OFFSETS: u32 = 0xffff_f000;
const MAX_STEPS: usize = 100_000;

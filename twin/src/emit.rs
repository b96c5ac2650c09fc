//! One function of a program, instruction by instruction, as Cranelift's.
//!
//! # Shape
//!
//! `fn(host, frame pointer, r1, …, r5) -> r0`. Registers are variables of 64 bits. Pointers are numbers of bytes
//! from the begin of the area; [`super::layout`] has what lies where.
//!
//! # What a program could do
//!
//! - *Reach memory outside of the area.* Each address is cut to the area's size, without a branch, so that it
//!   holds on mispredicted ways too; the area is mapped whole, and a guard lies behind it. Accesses to a function's
//!   own stack at a constant distance need no cut: nothing writes the frame pointer.
//! - *Never end.* Each jump back and each call costs as much as it has instructions, and a helper what it copies;
//!   when the fuel is used up, the function returns, and all that wait for it do.
//! - *Be taken for the only one.* Maps are shared with the kernel's instances and other threads': loads and stores outside of a
//!   function's own stack are each done, in their order, as a program relies on that reads a map's word twice.
//! - *Divide by zero.* As the instruction set has it: the result of a division is 0, the rest is what was divided.

use std::mem::offset_of;

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, AtomicRmwOp, Block, InstBuilder, MemFlagsData, SigRef, Signature, Type, Value,
};
use cranelift_codegen::isa::{CallConv, TargetFrontendConfig};
use cranelift_frontend::{FunctionBuilder, Variable};

use crate::check::{ALU_DIV, ALU_MOD, ALU_MOV, CMPXCHG, Checked, FETCH, Helper, Op, Right, XCHG};
use crate::helpers::Host;
use crate::layout::FRAME_STACK;

/// Where descriptors of maps lead.
pub(crate) trait Places {
    /// What a helper knows a map by.
    fn handle(&self, descriptor: i32) -> Option<u64>;
    /// Where the values of a map begin in the area, and their bytes.
    fn values(&self, descriptor: i32) -> Option<(u32, u64)>;
}

/// Writes one function.
pub(crate) struct Emitter<'a> {
    b: FunctionBuilder<'a>,
    program: &'a Checked,
    places: &'a dyn Places,
    /// The area's bytes less one; `None`: addresses are believed.
    mask: Option<u32>,
    host: Value,
    base: Value,
    /// The frame pointer, and where it leads.
    fp: Value,
    stack: Value,
    regs: Vec<Variable>,
    blocks: Vec<Option<Block>>,
    /// Leaves the function when the fuel is used up.
    empty: Block,
    helper: SigRef,
    function: SigRef,
    /// Nothing leads here.
    is_dead: bool,
}

/// Of the functions of programs.
pub(crate) fn function_signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.extend([AbiParam::new(I64); 7]);
    signature.returns.push(AbiParam::new(I64));
    signature
}

/// Of helpers: `fn(host, r1, …, r5) -> r0`.
fn helper_signature() -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.extend([AbiParam::new(I64); 6]);
    signature.returns.push(AbiParam::new(I64));
    signature
}

impl<'a> Emitter<'a> {
    pub(crate) fn new(
        mut b: FunctionBuilder<'a>,
        program: &'a Checked,
        places: &'a dyn Places,
        mask: Option<u32>,
    ) -> Self {
        let entry = b.create_block();
        b.append_block_params_for_function_params(entry);
        b.switch_to_block(entry);
        let params = b.block_params(entry).to_vec();
        let (host, fp) = (params[0], params[1]);
        let base = b
            .ins()
            .load(I64, MEMORY, host, offset_of!(Host, base) as i32);
        let stack = b.ins().iadd(base, fp);
        let zero = b.ins().iconst(I64, 0);
        let regs = (0..=10)
            .map(|number| {
                let variable = b.declare_var(I64);
                let value = match number {
                    1..=5 => params[number + 1],
                    10 => fp,
                    _ => zero,
                };
                b.def_var(variable, value);
                variable
            })
            .collect();
        let empty = b.create_block();
        b.set_cold_block(empty);
        let helper = b.import_signature(helper_signature());
        let function = b.import_signature(function_signature());
        Self {
            b,
            program,
            places,
            mask,
            host,
            base,
            fp,
            stack,
            regs,
            blocks: vec![None; program.ops.len()],
            empty,
            helper,
            function,
            is_dead: false,
        }
    }

    /// Writes function `number`, and ends it.
    ///
    /// # Errors
    /// What it refers to is not there.
    pub(crate) fn write(
        mut self,
        number: usize,
        target: TargetFrontendConfig,
    ) -> Result<(), String> {
        let range = self.program.functions[number].clone();
        let first = self.block(range.start);
        self.b.ins().jump(first, &[]);
        self.is_dead = true;
        for at in range {
            if self.program.leaders[at] {
                let block = self.block(at);
                if !self.is_dead {
                    self.b.ins().jump(block, &[]);
                }
                self.b.switch_to_block(block);
                self.is_dead = false;
            }
            if !self.is_dead {
                self.step(at)?;
            }
        }
        self.b.switch_to_block(self.empty);
        let zero = self.number(0);
        self.b.ins().return_(&[zero]);
        self.b.seal_all_blocks();
        self.b.finalize(target);
        Ok(())
    }

    fn step(&mut self, at: usize) -> Result<(), String> {
        match self.program.ops[at] {
            Op::Rest => {}
            Op::Alu {
                op,
                wide,
                dst,
                right,
                off,
            } => self.alu(op, wide, dst, right, off),
            Op::Swap { dst, bits, to_big } => self.swap(dst, bits, to_big),
            Op::Number { dst, value } => {
                let value = self.number(value);
                self.set(dst, value);
            }
            Op::Map { dst, descriptor } => {
                let handle = self.places.handle(descriptor).ok_or(NO_MAP)?;
                let value = self.number(handle);
                self.set(dst, value);
            }
            Op::Value {
                dst,
                descriptor,
                offset,
            } => {
                let (place, bytes) = self.places.values(descriptor).ok_or(NO_MAP)?;
                if u64::from(offset) >= bytes {
                    return Err("refers to a place beyond a map".into());
                }
                let value = self.number(u64::from(place) + u64::from(offset));
                self.set(dst, value);
            }
            Op::Load {
                dst,
                base,
                off,
                bytes,
                signed,
            } => {
                self.keep_apart(base, off, bytes);
                let (address, off) = self.address(base, off, bytes, false);
                let kind = of_bytes(bytes);
                let value = self.b.ins().load(kind, MEMORY, address, off);
                let value = match (bytes, signed) {
                    (8, _) => value,
                    (_, false) => self.b.ins().uextend(I64, value),
                    (_, true) => self.b.ins().sextend(I64, value),
                };
                self.set(dst, value);
            }
            Op::Store {
                base,
                off,
                bytes,
                right,
            } => {
                let value = self.right(right);
                let value = match bytes {
                    8 => value,
                    _ => self.b.ins().ireduce(of_bytes(bytes), value),
                };
                self.keep_apart(base, off, bytes);
                let (address, off) = self.address(base, off, bytes, false);
                self.b.ins().store(MEMORY, value, address, off);
            }
            Op::Atomic {
                base,
                off,
                bytes,
                src,
                op,
            } => self.atomic(base, off, bytes, src, op),
            Op::Jump { to } => {
                if to <= at {
                    self.pay(at + 1 - to);
                }
                let block = self.block(to);
                self.b.ins().jump(block, &[]);
                self.is_dead = true;
            }
            Op::Branch {
                op,
                wide,
                left,
                right,
                to,
            } => {
                let holds = self.compare(op, wide, left, right);
                let (yes, no) = (self.b.create_block(), self.b.create_block());
                self.b.ins().brif(holds, yes, &[], no, &[]);
                self.b.switch_to_block(yes);
                if to <= at {
                    self.pay(at + 1 - to);
                }
                let block = self.block(to);
                self.b.ins().jump(block, &[]);
                self.b.switch_to_block(no);
            }
            Op::Help(helper) => self.help(helper),
            Op::Call { function } => self.call(function),
            Op::Exit => {
                let result = self.get(0);
                self.b.ins().return_(&[result]);
                self.is_dead = true;
            }
        }
        Ok(())
    }

    fn alu(&mut self, op: u8, wide: bool, dst: u8, right: Right, off: i16) {
        let kind = if wide { I64 } else { I32 };
        let (mut left, mut right) = (self.get(dst), self.right(right));
        if op == ALU_MOV && off != 0 {
            let part = match off {
                8 => I8,
                16 => I16,
                _ => I32,
            };
            right = self.b.ins().ireduce(part, right);
            right = self.b.ins().sextend(kind, right);
        } else if !wide {
            right = self.b.ins().ireduce(I32, right);
        }
        if !wide {
            left = self.b.ins().ireduce(I32, left);
        }
        let ins = self.b.ins();
        let value = match op {
            0x00 => ins.iadd(left, right),
            0x10 => ins.isub(left, right),
            0x20 => ins.imul(left, right),
            ALU_DIV | ALU_MOD => self.divide(op, kind, left, right, off != 0),
            0x40 => ins.bor(left, right),
            0x50 => ins.band(left, right),
            // The machine takes the distance modulo the width, as the instruction set wants it.
            0x60 => ins.ishl(left, right),
            0x70 => ins.ushr(left, right),
            0x80 => ins.ineg(left),
            0xa0 => ins.bxor(left, right),
            ALU_MOV => right,
            _ => ins.sshr(left, right),
        };
        let value = match wide {
            true => value,
            false => self.b.ins().uextend(I64, value),
        };
        self.set(dst, value);
    }

    fn divide(&mut self, op: u8, kind: Type, left: Value, right: Value, signed: bool) -> Value {
        let (zero, one) = (self.b.ins().iconst(kind, 0), self.b.ins().iconst(kind, 1));
        let by_zero = self.b.ins().icmp(IntCC::Equal, right, zero);
        let mut safe = self.b.ins().select(by_zero, one, right);
        let mut result = None;
        if signed {
            // The smallest number by -1 has no result that fits.
            let minus = self.b.ins().iconst(kind, -1);
            let by_minus = self.b.ins().icmp(IntCC::Equal, right, minus);
            safe = self.b.ins().select(by_minus, one, safe);
            let odd = match op {
                ALU_DIV => self.b.ins().ineg(left),
                _ => zero,
            };
            result = Some((by_minus, odd));
        }
        let mut value = match (op, signed) {
            (ALU_DIV, false) => self.b.ins().udiv(left, safe),
            (ALU_DIV, true) => self.b.ins().sdiv(left, safe),
            (_, false) => self.b.ins().urem(left, safe),
            (_, true) => self.b.ins().srem(left, safe),
        };
        if let Some((by_minus, odd)) = result {
            value = self.b.ins().select(by_minus, odd, value);
        }
        let nothing = if op == ALU_DIV { zero } else { left };
        self.b.ins().select(by_zero, nothing, value)
    }

    fn swap(&mut self, dst: u8, bits: i32, to_big: Option<bool>) {
        let turns = to_big != Some(cfg!(target_endian = "big"));
        let value = self.get(dst);
        let kind = match bits {
            16 => I16,
            32 => I32,
            _ => I64,
        };
        let mut value = match kind {
            I64 => value,
            _ => self.b.ins().ireduce(kind, value),
        };
        // To the order that the machine has, nothing is turned round.
        if turns && to_big != Some(false) || to_big.is_none() {
            value = self.b.ins().bswap(value);
        }
        let value = match kind {
            I64 => value,
            _ => self.b.ins().uextend(I64, value),
        };
        self.set(dst, value);
    }

    fn atomic(&mut self, base: u8, off: i16, bytes: u8, src: u8, op: i32) {
        let kind = of_bytes(bytes);
        let (address, _) = self.address(base, off, bytes, true);
        let narrow = |it: &mut Self, value| match bytes {
            8 => value,
            _ => it.b.ins().ireduce(kind, value),
        };
        let value = self.get(src);
        let value = narrow(self, value);
        let old = match op {
            CMPXCHG => {
                let expected = self.get(0);
                let expected = narrow(self, expected);
                self.b.ins().atomic_cas(MEMORY, address, expected, value)
            }
            _ => {
                let how = match op {
                    XCHG => AtomicRmwOp::Xchg,
                    op => match op & !FETCH {
                        0x40 => AtomicRmwOp::Or,
                        0x50 => AtomicRmwOp::And,
                        0xa0 => AtomicRmwOp::Xor,
                        _ => AtomicRmwOp::Add,
                    },
                };
                self.b.ins().atomic_rmw(kind, MEMORY, how, address, value)
            }
        };
        let old = match bytes {
            8 => old,
            _ => self.b.ins().uextend(I64, old),
        };
        match op {
            CMPXCHG => self.set(0, old),
            op if op & FETCH != 0 => self.set(src, old),
            _ => {}
        }
    }

    fn compare(&mut self, op: u8, wide: bool, left: u8, right: Right) -> Value {
        let (mut left, mut right) = (self.get(left), self.right(right));
        if !wide {
            left = self.b.ins().ireduce(I32, left);
            right = self.b.ins().ireduce(I32, right);
        }
        let how = match op {
            0x10 => IntCC::Equal,
            0x20 => IntCC::UnsignedGreaterThan,
            0x30 => IntCC::UnsignedGreaterThanOrEqual,
            0x40 => return self.b.ins().band(left, right),
            0x50 => IntCC::NotEqual,
            0x60 => IntCC::SignedGreaterThan,
            0x70 => IntCC::SignedGreaterThanOrEqual,
            0xa0 => IntCC::UnsignedLessThan,
            0xb0 => IntCC::UnsignedLessThanOrEqual,
            0xc0 => IntCC::SignedLessThan,
            _ => IntCC::SignedLessThanOrEqual,
        };
        self.b.ins().icmp(how, left, right)
    }

    fn help(&mut self, helper: Helper) {
        let price = helper.price();
        if price > 0 {
            self.pay(price);
        }
        let table = offset_of!(Host, helpers) as i32;
        let at = table + (helper as usize * size_of::<usize>()) as i32;
        let callee = self.b.ins().load(I64, MEMORY, self.host, at);
        let mut args = vec![self.host];
        args.extend((1..=5).map(|reg| self.get(reg)));
        let call = self.b.ins().call_indirect(self.helper, callee, &args);
        let result = self.b.inst_results(call)[0];
        self.set(0, result);
        if price > 0 {
            // It may have taken more.
            let fuel = self.b.ins().load(I64, MEMORY, self.host, FUEL);
            self.go_on_if_left(fuel);
        }
    }

    fn call(&mut self, function: usize) {
        self.pay(self.program.functions[function].len());
        let table = offset_of!(Host, functions) as i32;
        let table = self.b.ins().load(I64, MEMORY, self.host, table);
        let at = (function * size_of::<usize>()) as i32;
        let callee = self.b.ins().load(I64, MEMORY, table, at);
        let fp = self.b.ins().iadd_imm_s(self.fp, -i64::from(FRAME_STACK));
        let mut args = vec![self.host, fp];
        args.extend((1..=5).map(|reg| self.get(reg)));
        let call = self.b.ins().call_indirect(self.function, callee, &args);
        let result = self.b.inst_results(call)[0];
        self.set(0, result);
        // It may have come back for want of fuel.
        let fuel = self.b.ins().load(I64, MEMORY, self.host, FUEL);
        self.go_on_if_left(fuel);
    }

    /// Takes fuel for these `instructions`; leaves the function if there is none left.
    fn pay(&mut self, instructions: usize) {
        let fuel = self.b.ins().load(I64, MEMORY, self.host, FUEL);
        let fuel = self.b.ins().iadd_imm_s(fuel, -(instructions as i64));
        self.b.ins().store(MEMORY, fuel, self.host, FUEL);
        self.go_on_if_left(fuel);
    }

    fn go_on_if_left(&mut self, fuel: Value) {
        let go_on = self.b.create_block();
        let none = self.b.ins().icmp_imm_s(IntCC::SignedLessThan, fuel, 0);
        self.b.ins().brif(none, self.empty, &[], go_on, &[]);
        self.b.switch_to_block(go_on);
    }

    /// An access that others may see, or whose outcome is theirs, is done as often as the program has it: a value that it loads twice
    /// was perhaps written in between, and each value that it stores is one that somebody may wait for.
    fn keep_apart(&mut self, base: u8, off: i16, bytes: u8) {
        if !is_own_stack(base, off, bytes) {
            // NB: The translator takes a load for an earlier one of the same place, and drops a store before another one, unless
            // something that orders memory lies between. This does, and is no instruction of the machine's. `atomic_load` would do as
            // well, but `atomic_store` has a fence of the machine's behind it, and both want addresses to be aligned.
            self.b.ins().sequence_point();
        }
    }

    /// Where an access goes: an address, and a distance from it.
    fn address(&mut self, base: u8, off: i16, bytes: u8, is_atomic: bool) -> (Value, i32) {
        let aligned = !is_atomic || i32::from(off) % i32::from(bytes) == 0;
        if is_own_stack(base, off, bytes) && aligned {
            let address = match is_atomic {
                true => self.b.ins().iadd_imm_s(self.stack, i64::from(off)),
                false => self.stack,
            };
            return (address, off.into());
        }
        let mut place = self.get(base);
        if off != 0 {
            place = self.b.ins().iadd_imm_s(place, i64::from(off));
        }
        if let Some(mask) = self.mask {
            // What is done as one must not lie across two lines.
            let mask = match is_atomic {
                true => mask & !(u32::from(bytes) - 1),
                false => mask,
            };
            place = self.b.ins().band_imm_u(place, i64::from(mask));
        }
        (self.b.ins().iadd(self.base, place), 0)
    }

    fn block(&mut self, at: usize) -> Block {
        match self.blocks[at] {
            Some(block) => block,
            None => *self.blocks[at].insert(self.b.create_block()),
        }
    }

    fn number(&mut self, value: u64) -> Value {
        self.b.ins().iconst(I64, value.cast_signed())
    }

    fn right(&mut self, right: Right) -> Value {
        match right {
            Right::K(k) => self.b.ins().iconst(I64, i64::from(k)),
            Right::X(reg) => self.get(reg),
        }
    }

    fn get(&mut self, reg: u8) -> Value {
        self.b.use_var(self.regs[usize::from(reg)])
    }

    fn set(&mut self, reg: u8, value: Value) {
        self.b.def_var(self.regs[usize::from(reg)], value);
    }
}

/// At a constant distance from the frame pointer, in the function's own stack, which is the instance's alone.
fn is_own_stack(base: u8, off: i16, bytes: u8) -> bool {
    let own = -(FRAME_STACK as i32)..=-i32::from(bytes);
    base == 10 && own.contains(&off.into())
}

fn of_bytes(bytes: u8) -> Type {
    match bytes {
        1 => I8,
        2 => I16,
        4 => I32,
        _ => I64,
    }
}

/// Everything in reach is mapped; nothing is known to stay as it is.
const MEMORY: MemFlagsData = MemFlagsData::new().with_notrap();

const FUEL: i32 = offset_of!(Host, fuel) as i32;

const NO_MAP: &str = "refers to a map that the program does not have";

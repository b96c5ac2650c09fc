//! One function of a program, instruction by instruction.
//!
//! # Shape
//!
//! `fn(bytes, len, wire_len, key) -> verdict`. A, X and the scratch words are values of their own;
//! the program jumps forwards only, so one pass in the order of its instructions sees everything
//! that leads to a block before the block. A load outside the frame and a division by zero go to
//! one shared block that rejects.
//!
//! Loads that must follow each other are checked together: [`super::reach`].
//!
//! # What a guest's program could do
//!
//! - *Read beyond the frame on a mispredicted branch* (Spectre v1): after each check the frame's
//!   address is replaced by 0 if the check fails, by a conditional move, which is not predicted.
//!   Every later load of that way depends on it. Address 0 and 8 GiB after it hold nothing.
//! - *Place instructions of its choice in executable memory* by its constants: every constant of
//!   more than 16 bits is kept xored with `key`, which is random, and restored in a register.

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{Block, InstBuilder, MemFlagsData, Type, Value};
use cranelift_codegen::isa::TargetFrontendConfig;
use cranelift_frontend::{FunctionBuilder, Variable};

use super::reach::{Mode, Reach, is_branch, load, needs, targets};
use vnplug_bpf::{Instruction, SCRATCH_WORDS, code};

/// Writes one function.
pub(super) struct Emitter<'a> {
    b: FunctionBuilder<'a>,
    list: &'a [Instruction],
    needs: Vec<Reach>,
    /// The block that begins at an instruction, and what is known of the frame there.
    blocks: Vec<Option<(Block, Reach)>>,
    /// Facts about the frame here; `None` if nothing leads here.
    known: Option<Reach>,
    reject: Block,
    len: Value,
    wire_len: Value,
    key: Value,
    secret: u32,
    /// The frame's address, or 0 where a check failed; see the module.
    base: Variable,
    a: Variable,
    x: Variable,
    scratch: Vec<Variable>,
}

impl<'a> Emitter<'a> {
    pub(super) fn new(mut b: FunctionBuilder<'a>, list: &'a [Instruction], secret: u32) -> Self {
        let entry = b.create_block();
        b.append_block_params_for_function_params(entry);
        b.switch_to_block(entry);
        b.seal_block(entry);
        let &[bytes, len, wire_len, key] = b.block_params(entry) else {
            unreachable!("the signature has four parameters");
        };
        let reject = b.create_block();
        b.set_cold_block(reject);
        let base = b.declare_var(I64);
        b.def_var(base, bytes);
        let zero = b.ins().iconst(I32, 0);
        let mut word = || {
            let variable = b.declare_var(I32);
            b.def_var(variable, zero);
            variable
        };
        let (a, x) = (word(), word());
        let scratch = (0..SCRATCH_WORDS).map(|_| word()).collect();
        let mut blocks = vec![None; list.len()];
        for (at, i) in list.iter().enumerate() {
            let ends = if is_branch(i.code) {
                targets(at, *i)
            } else if i.code == code::JA {
                [at + 1 + i.k as usize; 2]
            } else {
                continue;
            };
            for target in ends {
                blocks[target].get_or_insert_with(|| (b.create_block(), Reach::NEVER));
            }
        }
        Self {
            needs: needs(list),
            b,
            list,
            blocks,
            known: Some(Reach::NOTHING),
            reject,
            len,
            wire_len,
            key,
            secret,
            base,
            a,
            x,
            scratch,
        }
    }

    /// Ends the function after the last instruction.
    pub(super) fn end(mut self, target: TargetFrontendConfig) {
        self.b.switch_to_block(self.reject);
        self.b.seal_block(self.reject);
        let zero = self.b.ins().iconst(I32, 0);
        self.b.ins().return_(&[zero]);
        self.b.finalize(target);
    }

    pub(super) fn step(&mut self, at: usize) {
        if let Some((block, _)) = self.blocks[at] {
            if self.known.is_some() {
                self.edge(at);
                self.b.ins().jump(block, &[]);
            }
            // All jumps to here lie before it, so the facts are known by now.
            let (_, known) = self.blocks[at].unwrap_or((block, Reach::NEVER));
            self.known = (known != Reach::NEVER).then_some(known);
            if self.known.is_some() {
                self.b.switch_to_block(block);
                self.b.seal_block(block);
            }
        }
        if self.known.is_some() {
            self.instruction(at);
        }
    }

    fn instruction(&mut self, at: usize) {
        use code::*;
        let Instruction { code, k, .. } = self.list[at];
        if let Some((mode, size)) = load(code) {
            if self.require(at, mode) {
                let value = self.load(mode, k, size);
                self.b.def_var(self.a, value);
            }
            return;
        }
        let a = |it: &mut Self| it.b.use_var(it.a);
        let x = |it: &mut Self| it.b.use_var(it.x);
        match code {
            LDX_MSH => {
                if self.require(at, Mode::Absolute) {
                    let byte = self.load(Mode::Absolute, k, 1);
                    let (mask, two) = (self.constant(15), self.constant(2));
                    let words = self.b.ins().band(byte, mask);
                    let bytes = self.b.ins().ishl(words, two);
                    self.set_x(bytes);
                }
            }
            LD_LEN => self.b.def_var(self.a, self.wire_len),
            LDX_LEN => self.set_x(self.wire_len),
            LD_IMM => {
                let value = self.constant(k);
                self.b.def_var(self.a, value);
            }
            LDX_IMM => {
                let value = self.constant(k);
                self.set_x(value);
            }
            LD_MEM => {
                let value = self.b.use_var(self.scratch[k as usize]);
                self.b.def_var(self.a, value);
            }
            LDX_MEM => {
                let value = self.b.use_var(self.scratch[k as usize]);
                self.set_x(value);
            }
            ST => {
                let value = a(self);
                self.b.def_var(self.scratch[k as usize], value);
            }
            STX => {
                let value = x(self);
                self.b.def_var(self.scratch[k as usize], value);
            }
            TAX => {
                let value = a(self);
                self.set_x(value);
            }
            TXA => {
                let value = x(self);
                self.b.def_var(self.a, value);
            }
            NEG => {
                let value = a(self);
                let value = self.b.ins().ineg(value);
                self.b.def_var(self.a, value);
            }
            RET => {
                let verdict = self.constant(k);
                self.b.ins().return_(&[verdict]);
                self.known = None;
            }
            RET_A => {
                let verdict = a(self);
                self.b.ins().return_(&[verdict]);
                self.known = None;
            }
            JA => {
                let block = self.edge(at + 1 + k as usize);
                self.b.ins().jump(block, &[]);
                self.known = None;
            }
            code if is_branch(code) => self.branch(at),
            code => {
                let left = a(self);
                let right = self.operand(code, k);
                let value = self.arithmetic(code, left, right);
                self.b.def_var(self.a, value);
            }
        }
    }

    fn branch(&mut self, at: usize) {
        use code::*;
        let i = self.list[at];
        let left = self.b.use_var(self.a);
        let right = self.operand(i.code, i.k);
        let holds = match i.code {
            JEQ_K | JEQ_X => self.b.ins().icmp(IntCC::Equal, left, right),
            JGT_K | JGT_X => self.b.ins().icmp(IntCC::UnsignedGreaterThan, left, right),
            JGE_K | JGE_X => {
                let at_least = IntCC::UnsignedGreaterThanOrEqual;
                self.b.ins().icmp(at_least, left, right)
            }
            _ => self.b.ins().band(left, right),
        };
        let [yes, no] = targets(at, i).map(|target| self.edge(target));
        self.b.ins().brif(holds, yes, &[], no, &[]);
        self.known = None;
    }

    /// X, or the constant.
    fn operand(&mut self, code: u16, k: u32) -> Value {
        if code & 0x08 == 0 {
            self.constant(k)
        } else {
            self.b.use_var(self.x)
        }
    }

    fn arithmetic(&mut self, code: u16, left: Value, right: Value) -> Value {
        use code::*;
        match code {
            ADD_K | ADD_X => self.b.ins().iadd(left, right),
            SUB_K | SUB_X => self.b.ins().isub(left, right),
            MUL_K | MUL_X => self.b.ins().imul(left, right),
            AND_K | AND_X => self.b.ins().band(left, right),
            OR_K | OR_X => self.b.ins().bor(left, right),
            XOR_K | XOR_X => self.b.ins().bxor(left, right),
            LSH_K => self.b.ins().ishl(left, right),
            RSH_K => self.b.ins().ushr(left, right),
            LSH_X | RSH_X => {
                // Machines take the shift modulo 32; BPF shifts everything out.
                let (bits, zero) = (self.constant(32), self.constant(0));
                let small = self.b.ins().icmp(IntCC::UnsignedLessThan, right, bits);
                let shifted = match code {
                    LSH_X => self.b.ins().ishl(left, right),
                    _ => self.b.ins().ushr(left, right),
                };
                self.b.ins().select(small, shifted, zero)
            }
            _ => {
                // By X: a zero rejects. The verifier refused the constant 0.
                if code & 0x08 != 0 {
                    let go_on = self.b.create_block();
                    self.b.ins().brif(right, go_on, &[], self.reject, &[]);
                    self.b.switch_to_block(go_on);
                    self.b.seal_block(go_on);
                }
                match code {
                    DIV_K | DIV_X => self.b.ins().udiv(left, right),
                    _ => self.b.ins().urem(left, right),
                }
            }
        }
    }

    /// Notes a way from here to the beginning of a block.
    fn edge(&mut self, target: usize) -> Block {
        let here = self.known.unwrap_or(Reach::NEVER);
        // Every target of a jump has a block.
        match &mut self.blocks[target] {
            Some((block, known)) => {
                *known = known.or(here);
                *block
            }
            None => self.reject,
        }
    }

    fn set_x(&mut self, value: Value) {
        self.b.def_var(self.x, value);
        if let Some(known) = &mut self.known {
            known.behind_x = 0;
        }
    }

    /// Rejects frames that are too short from here on, unless that is known; false if all are.
    fn require(&mut self, at: usize, mode: Mode) -> bool {
        let Some(mut known) = self.known else {
            return false;
        };
        let need = self.needs[at];
        if need.frame == u64::MAX || need.behind_x == u64::MAX {
            self.b.ins().jump(self.reject, &[]);
            self.known = None;
            return false;
        }
        let end = match mode {
            Mode::Absolute if known.frame >= need.frame => return true,
            Mode::BehindX if known.behind_x >= need.behind_x => return true,
            Mode::Absolute => {
                known.frame = need.frame;
                self.wide(need.frame)
            }
            Mode::BehindX => {
                known.behind_x = need.behind_x;
                known.frame = known.frame.max(need.behind_x);
                let x = self.b.use_var(self.x);
                let x = self.b.ins().uextend(I64, x);
                let beyond = self.wide(need.behind_x);
                self.b.ins().iadd(x, beyond)
            }
        };
        self.known = Some(known);
        let outside = self.b.ins().icmp(IntCC::UnsignedLessThan, self.len, end);
        let (base, nowhere) = (self.b.use_var(self.base), self.b.ins().iconst(I64, 0));
        let base = self.b.ins().select_spectre_guard(outside, nowhere, base);
        self.b.def_var(self.base, base);
        let inside = self.b.create_block();
        self.b.ins().brif(outside, self.reject, &[], inside, &[]);
        self.b.switch_to_block(inside);
        self.b.seal_block(inside);
        true
    }

    /// Loads what [`require`](Self::require) checked.
    fn load(&mut self, mode: Mode, k: u32, size: u64) -> Value {
        let mut address = self.b.use_var(self.base);
        if let Mode::BehindX = mode {
            let x = self.b.use_var(self.x);
            let x = self.b.ins().uextend(I64, x);
            address = self.b.ins().iadd(address, x);
        }
        let offset = match i32::try_from(k) {
            Ok(offset) if k <= PLAIN => offset,
            _ => {
                let far = self.wide(u64::from(k));
                address = self.b.ins().iadd(address, far);
                0
            }
        };
        // Neither aligned nor read-only: a load must not move in front of its check.
        let flags = MemFlagsData::new().with_notrap();
        let kind: Type = match size {
            1 => I8,
            2 => I16,
            _ => I32,
        };
        let mut value = self.b.ins().load(kind, flags, address, offset);
        if size > 1 && cfg!(target_endian = "little") {
            value = self.b.ins().bswap(value);
        }
        if size < 4 {
            value = self.b.ins().uextend(I32, value);
        }
        value
    }

    /// A constant of the program; larger ones do not stand in the code as they are.
    fn constant(&mut self, k: u32) -> Value {
        if k <= PLAIN {
            return self.b.ins().iconst(I32, i64::from(k));
        }
        let hidden = self.b.ins().iconst(I32, i64::from(k ^ self.secret));
        self.b.ins().bxor(hidden, self.key)
    }

    /// A length, which can be a little more than 32 bits say.
    fn wide(&mut self, n: u64) -> Value {
        let low = u32::try_from(n).unwrap_or(u32::MAX);
        let low_value = self.constant(low);
        let value = self.b.ins().uextend(I64, low_value);
        match n - u64::from(low) {
            0 => value,
            rest => {
                let rest = self.b.ins().iconst(I64, rest.cast_signed());
                self.b.ins().iadd(value, rest)
            }
        }
    }
}

/// Constants up to here are no instructions worth having.
const PLAIN: u32 = 0xffff;

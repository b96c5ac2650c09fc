//! Which programs the daemon can run: their instructions, their helpers, the shape of their functions.
//!
//! The kernel's verifier proves more. This is what the translation relies on, so it is not left to anybody
//! else.

use std::fmt;
use std::ops::Range;

use vnplug_os::bpf::Insn;

/// What a program is given beside a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// `struct xdp_md`: a program for the hook of a network driver.
    Xdp,
    /// `struct __sk_buff`: a program for the kernel's traffic control.
    Classifier,
}

/// How many functions may be under way at a time (`MAX_CALL_FRAMES`).
pub const MAX_DEPTH: usize = 8;

/// The most instructions of a program.
pub const MAX_INSNS: usize = 65_536;

/// Why the daemon cannot run a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit {
    /// Which instruction.
    pub at: usize,
    /// What is wrong with it, for people.
    pub why: String,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "instruction {}: {}", self.at, self.why)
    }
}

impl std::error::Error for Unfit {}

/// What a call of the kernel's is for the daemon (`enum bpf_func_id`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum Helper {
    Lookup,
    Update,
    Clock,
    CoarseClock,
    Random,
    Cpu,
    CsumDiff,
    Redirect,
    AdjustHead,
    AdjustTail,
    LoadBytes,
    StoreBytes,
    L3Csum,
    L4Csum,
    Delete,
    Seat,
}

impl Helper {
    /// How many there are.
    pub(crate) const COUNT: usize = 16;

    /// What a call costs, in instructions. What it is told to copy or sum costs besides (`Host::pay`).
    ///
    /// NB: what the functions of hashes call costs nothing: they must not be stopped while they have a bucket's lock.
    pub(crate) fn price(self) -> usize {
        match self {
            Self::Lookup | Self::Seat => 0,
            Self::Clock | Self::CoarseClock | Self::Cpu => 64,
            _ => 16,
        }
    }

    fn of(number: i32, context: Context) -> Option<Self> {
        Some(match (number, context) {
            (1, _) => Self::Lookup,
            (2, _) => Self::Update,
            (3, _) => Self::Delete,
            (SEAT, _) => Self::Seat,
            // With and without the time that the machine slept: the daemon has one clock.
            (5 | 125, _) => Self::Clock,
            (160, _) => Self::CoarseClock,
            (7, _) => Self::Random,
            (8, _) => Self::Cpu,
            (28, _) => Self::CsumDiff,
            (23, _) | (155, Context::Classifier) => Self::Redirect,
            (44, Context::Xdp) => Self::AdjustHead,
            (65, Context::Xdp) => Self::AdjustTail,
            (189, Context::Xdp) | (26, Context::Classifier) => Self::LoadBytes,
            (190, Context::Xdp) | (9, Context::Classifier) => Self::StoreBytes,
            (10, Context::Classifier) => Self::L3Csum,
            (11, Context::Classifier) => Self::L4Csum,
            _ => return None,
        })
    }
}

/// A program whose instructions are known to be fit.
#[derive(Debug)]
pub(crate) struct Checked {
    /// What it does.
    pub(crate) ops: Vec<Op>,
    /// Which instructions each function has; the first is where the program begins.
    pub(crate) functions: Vec<Range<usize>>,
    /// Where several ways meet, or may: begins of blocks.
    pub(crate) leaders: Vec<bool>,
}

/// One instruction. What is no operation is the second half of the one before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// Arithmetic, of 64 bits or of 32.
    Alu {
        op: u8,
        wide: bool,
        dst: u8,
        right: Right,
        off: i16,
    },
    /// The order of bytes in the low `bits`. `to_big`: the order that they get; `None`: they are turned round in any case.
    Swap {
        dst: u8,
        bits: i32,
        to_big: Option<bool>,
    },
    /// A number of 64 bits.
    Number { dst: u8, value: u64 },
    /// A map, for a helper.
    Map { dst: u8, descriptor: i32 },
    /// A place in the values of a map.
    Value {
        dst: u8,
        descriptor: i32,
        offset: u32,
    },
    /// From memory.
    Load {
        dst: u8,
        base: u8,
        off: i16,
        bytes: u8,
        signed: bool,
    },
    /// To memory.
    Store {
        base: u8,
        off: i16,
        bytes: u8,
        right: Right,
    },
    /// To memory, as one.
    Atomic {
        base: u8,
        off: i16,
        bytes: u8,
        src: u8,
        op: i32,
    },
    /// Goes on elsewhere.
    Jump { to: usize },
    /// Goes on elsewhere, if.
    Branch {
        op: u8,
        wide: bool,
        left: u8,
        right: Right,
        to: usize,
    },
    /// A function of the kernel's.
    Help(Helper),
    /// A function of the program's, by its number.
    Call { function: usize },
    /// The function ends.
    Exit,
    /// Belongs to the instruction before.
    Rest,
}

/// The right side of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Right {
    /// A constant, whose sign is extended.
    K(i32),
    /// A register.
    X(u8),
}

/// Checks a program.
pub(crate) fn check(insns: &[Insn], context: Context) -> Result<Checked, Unfit> {
    if insns.is_empty() || insns.len() > MAX_INSNS {
        let why = format!("a program has 1 to {MAX_INSNS} instructions");
        return Err(Unfit { at: 0, why });
    }
    let starts = starts(insns)?;
    let mut ops = Vec::with_capacity(insns.len());
    while ops.len() < insns.len() {
        let at = ops.len();
        let op = decode(insns, at, context, &starts).map_err(|why| Unfit { at, why })?;
        ops.push(op);
        if matches!(op, Op::Number { .. } | Op::Map { .. } | Op::Value { .. }) {
            ops.push(Op::Rest);
        }
    }
    let ends = starts.iter().skip(1).copied().chain([insns.len()]);
    let functions: Vec<_> = starts
        .iter()
        .zip(ends)
        .map(|(&from, to)| from..to)
        .collect();
    let leaders = leaders(&ops, &functions)?;
    depth(&ops, &functions)?;
    Ok(Checked {
        ops,
        functions,
        leaders,
    })
}

/// Where functions begin, in order.
fn starts(insns: &[Insn]) -> Result<Vec<usize>, Unfit> {
    let mut starts = vec![0];
    let mut at = 0;
    while at < insns.len() {
        let insn = insns[at];
        if insn.code() == CALL && insn.src() == PSEUDO_CALL {
            let to = at as i64 + 1 + i64::from(insn.imm());
            let inside = usize::try_from(to).ok().filter(|&to| to < insns.len());
            let Some(to) = inside else {
                let why = "calls what is no part of the program".into();
                return Err(Unfit { at, why });
            };
            starts.push(to);
        }
        at += if insn.code() == LD_DOUBLE { 2 } else { 1 };
    }
    starts.sort_unstable();
    starts.dedup();
    Ok(starts)
}

fn decode(insns: &[Insn], at: usize, context: Context, starts: &[usize]) -> Result<Op, String> {
    let insn = insns[at];
    let (code, dst, src, off, imm) = (insn.code(), insn.dst(), insn.src(), insn.off(), insn.imm());
    let right = if code & SOURCE_X == 0 {
        Right::K(imm)
    } else {
        Right::X(src)
    };
    let unknown = || format!("unknown operation {code:#04x}");
    let size = |code: u8| match code & 0x18 {
        0x00 => 4,
        0x08 => 2,
        0x10 => 1,
        _ => 8,
    };
    if dst > 10 || src > 10 {
        return Err("there is no such register".into());
    }
    let target = |distance: i64| {
        usize::try_from(at as i64 + 1 + distance)
            .ok()
            .filter(|&to| to < insns.len())
            .ok_or("jumps out of the program".to_owned())
    };
    let writes = |op| match dst {
        10 => Err("writes the frame pointer".to_owned()),
        _ => Ok(op),
    };
    match code & 0x07 {
        CLASS_LD if code == LD_DOUBLE => {
            let second = insns.get(at + 1).filter(|it| it.code() == 0);
            let Some(second) = second else {
                return Err("a number of 64 bits without its second half".into());
            };
            let high = second.imm();
            writes(match src {
                0 => Op::Number {
                    dst,
                    value: u64::from(high.cast_unsigned()) << 32 | u64::from(imm.cast_unsigned()),
                },
                PSEUDO_MAP_FD => Op::Map {
                    dst,
                    descriptor: imm,
                },
                PSEUDO_MAP_VALUE => Op::Value {
                    dst,
                    descriptor: imm,
                    offset: high.cast_unsigned(),
                },
                4 => return Err("takes the address of a function, which the daemon cannot".into()),
                _ => {
                    return Err(
                        "refers to something of the kernel's, which the daemon cannot".into(),
                    );
                }
            })
        }
        CLASS_LD => Err(
            "loads from a packet in the way of classic BPF, which the daemon cannot; read it by \
                         its pointers, or by bpf_skb_load_bytes"
                .into(),
        ),
        CLASS_LDX => match code & 0xe0 {
            MODE_MEM | MODE_MEMSX if !(code & 0xe0 == MODE_MEMSX && size(code) == 8) => {
                writes(Op::Load {
                    dst,
                    base: src,
                    off,
                    bytes: size(code),
                    signed: code & 0xe0 == MODE_MEMSX,
                })
            }
            _ => Err(unknown()),
        },
        CLASS_ST if code & 0xe0 == MODE_MEM => Ok(Op::Store {
            base: dst,
            off,
            bytes: size(code),
            right: Right::K(imm),
        }),
        CLASS_STX => match code & 0xe0 {
            MODE_MEM => Ok(Op::Store {
                base: dst,
                off,
                bytes: size(code),
                right: Right::X(src),
            }),
            MODE_ATOMIC if size(code) >= 4 && is_atomic(imm) => {
                let fetches = imm & FETCH != 0 && imm != CMPXCHG;
                match fetches && src == 10 {
                    true => Err("writes the frame pointer".into()),
                    false => Ok(Op::Atomic {
                        base: dst,
                        off,
                        bytes: size(code),
                        src,
                        op: imm,
                    }),
                }
            }
            _ => Err(unknown()),
        },
        CLASS_ALU | CLASS_ALU64 => {
            let wide = code & 0x07 == CLASS_ALU64;
            let op = code & 0xf0;
            match op {
                ALU_END => {
                    if !matches!(imm, 16 | 32 | 64) {
                        return Err("turns round neither 16 nor 32 nor 64 bits".into());
                    }
                    let to_big = match wide {
                        true => None,
                        false => Some(code & SOURCE_X != 0),
                    };
                    writes(Op::Swap {
                        dst,
                        bits: imm,
                        to_big,
                    })
                }
                0x00..=0xc0 => {
                    let odd = off != 0;
                    let fits = match op {
                        ALU_MOV => {
                            let extends = matches!(off, 8 | 16) || off == 32 && wide;
                            !odd || extends && matches!(right, Right::X(_))
                        }
                        ALU_DIV | ALU_MOD => matches!(off, 0 | 1),
                        _ => !odd,
                    };
                    match fits {
                        true => writes(Op::Alu {
                            op,
                            wide,
                            dst,
                            right,
                            off,
                        }),
                        false => Err(unknown()),
                    }
                }
                _ => Err(unknown()),
            }
        }
        CLASS_JMP | CLASS_JMP32 => {
            let wide = code & 0x07 == CLASS_JMP;
            match code {
                JA => Ok(Op::Jump {
                    to: target(off.into())?,
                }),
                JA32 => Ok(Op::Jump {
                    to: target(imm.into())?,
                }),
                CALL => match src {
                    0 => Helper::of(imm, context).map(Op::Help).ok_or_else(|| {
                        format!("calls helper {imm} of the kernel, which the daemon does not have")
                    }),
                    PSEUDO_CALL => {
                        let to = target(imm.into())?;
                        let function = starts.binary_search(&to);
                        Ok(Op::Call {
                            function: function.map_err(|_| unknown())?,
                        })
                    }
                    _ => Err(
                        "calls a function of the kernel's, which the daemon does not have".into(),
                    ),
                },
                EXIT => Ok(Op::Exit),
                _ => {
                    let op = code & 0xf0;
                    match op {
                        0x10..=0x70 | 0xa0..=0xd0 => Ok(Op::Branch {
                            op,
                            wide,
                            left: dst,
                            right,
                            to: target(off.into())?,
                        }),
                        _ => Err(unknown()),
                    }
                }
            }
        }
        _ => Err(unknown()),
    }
}

/// Begins of blocks; every jump must lead to an instruction of its function, and no function may run out.
fn leaders(ops: &[Op], functions: &[Range<usize>]) -> Result<Vec<bool>, Unfit> {
    let mut leaders = vec![false; ops.len()];
    for function in functions {
        leaders[function.start] = true;
        for at in function.clone() {
            let to = match ops[at] {
                Op::Jump { to } | Op::Branch { to, .. } => to,
                _ => continue,
            };
            if !function.contains(&to) || ops[to] == Op::Rest {
                let why = "jumps to what is no instruction of its function".into();
                return Err(Unfit { at, why });
            }
            leaders[to] = true;
        }
        let last = function.end - 1;
        if ops[function.start] == Op::Rest || !matches!(ops[last], Op::Exit | Op::Jump { .. }) {
            let why = "the function does not end here".into();
            return Err(Unfit { at: last, why });
        }
    }
    Ok(leaders)
}

/// No function may be under way twice, nor too many.
fn depth(ops: &[Op], functions: &[Range<usize>]) -> Result<(), Unfit> {
    fn visit(
        function: usize,
        under_way: &mut Vec<usize>,
        depths: &mut [Option<usize>],
        ops: &[Op],
        functions: &[Range<usize>],
    ) -> Result<usize, Unfit> {
        if let Some(depth) = depths[function] {
            return Ok(depth);
        }
        under_way.push(function);
        let mut deepest = 0;
        for at in functions[function].clone() {
            let Op::Call { function: callee } = ops[at] else {
                continue;
            };
            if under_way.contains(&callee) || under_way.len() >= MAX_DEPTH {
                let why = format!("calls itself, or more than {MAX_DEPTH} functions deep");
                return Err(Unfit { at, why });
            }
            deepest = deepest.max(visit(callee, under_way, depths, ops, functions)?);
        }
        under_way.pop();
        depths[function] = Some(deepest + 1);
        Ok(deepest + 1)
    }
    let mut depths = vec![None; functions.len()];
    let depth = visit(0, &mut Vec::new(), &mut depths, ops, functions)?;
    if depth > MAX_DEPTH {
        let why = format!("calls more than {MAX_DEPTH} functions deep");
        return Err(Unfit { at: 0, why });
    }
    Ok(())
}

fn is_atomic(op: i32) -> bool {
    matches!(op, XCHG | CMPXCHG) || matches!(op & !FETCH, 0x00 | 0x40 | 0x50 | 0xa0)
}

/// Of ours alone: no program that the kernel accepts calls it.
const SEAT: i32 = crate::per_cpu::SEAT.cast_signed();
const CLASS_LD: u8 = 0x00;
const CLASS_LDX: u8 = 0x01;
const CLASS_ST: u8 = 0x02;
const CLASS_STX: u8 = 0x03;
const CLASS_ALU: u8 = 0x04;
const CLASS_JMP: u8 = 0x05;
const CLASS_JMP32: u8 = 0x06;
const CLASS_ALU64: u8 = 0x07;
const SOURCE_X: u8 = 0x08;
const MODE_MEM: u8 = 0x60;
const MODE_MEMSX: u8 = 0x80;
const MODE_ATOMIC: u8 = 0xc0;
const LD_DOUBLE: u8 = 0x18;
pub(crate) const ALU_DIV: u8 = 0x30;
pub(crate) const ALU_MOD: u8 = 0x90;
pub(crate) const ALU_MOV: u8 = 0xb0;
const ALU_END: u8 = 0xd0;
const JA: u8 = 0x05;
const JA32: u8 = 0x06;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const PSEUDO_CALL: u8 = 1;
const PSEUDO_MAP_FD: u8 = 1;
const PSEUDO_MAP_VALUE: u8 = 2;
/// `BPF_FETCH`: the operation gives the old value back.
pub(crate) const FETCH: i32 = 0x01;
/// `BPF_XCHG`
pub(crate) const XCHG: i32 = 0xe0 | FETCH;
/// `BPF_CMPXCHG`
pub(crate) const CMPXCHG: i32 = 0xf0 | FETCH;

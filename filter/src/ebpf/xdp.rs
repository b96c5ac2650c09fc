//! The packet as an XDP program sees it: bytes in memory.
//!
//! A helper reads what a driver puts into further buffers (frames longer than a page); a program
//! for frames of one buffer needs it only for variable loads. Nothing here needs more than
//! `CAP_BPF` and `CAP_NET_ADMIN`: pointers are neither subtracted nor moved by variables.

use super::translate::{Labels, Reach, SLOTS};
use vnplug_os::bpf::asm::{Alu, Asm, Cond, FP, Operand, R0, R1, R2, R3, R4, R9, Reg, Size};

use Operand::{K, X};

/// R9: the context.
///
/// NB: every load asks the context where the packet lies, because the verifier follows what is
/// known about a pointer through every later filter.
#[derive(Debug)]
pub(super) struct Xdp {
    /// Frames may have several buffers.
    pub(super) frags: bool,
}

impl Xdp {
    /// From R1, the context, to what the fragments need.
    pub(super) fn prepare(asm: &mut Asm, asks_length: bool) {
        asm.alu64(Alu::Mov, R9, X(R1));
        if asks_length {
            asm.call(XDP_GET_BUFF_LEN);
            asm.store(Size::Double, FP, WIRE_LEN, R0);
        }
    }

    /// Puts the context into `dst`.
    pub(super) fn context(asm: &mut Asm, dst: Reg) {
        asm.alu64(Alu::Mov, dst, X(R9));
    }
}

impl Reach for Xdp {
    fn fixed(&self, asm: &mut Asm, size: Size, dst: Reg, offset: u32, labels: &Labels) {
        let end = u64::from(offset) + u64::from(size.bytes());
        if end > u64::from(LONGEST_DIRECT) {
            asm.alu32(Alu::Mov, R2, K(offset));
            return self.variable(asm, size, dst, labels);
        }
        asm.load(Size::Word, R2, R9, XDP_DATA);
        asm.load(Size::Word, R3, R9, XDP_DATA_END);
        asm.alu64(Alu::Mov, R1, X(R2));
        asm.alu64(Alu::Add, R1, K(end as u32));
        let (elsewhere, done) = (asm.label(), asm.label());
        let beyond = if self.frags { elsewhere } else { labels.reject };
        asm.jump_if(Cond::Gt, R1, X(R3), beyond);
        asm.load(size, dst, R2, offset as i16);
        asm.network_order(dst, size);
        if self.frags {
            asm.jump(done);
            asm.bind(elsewhere);
            asm.alu32(Alu::Mov, R2, K(offset));
            self.variable(asm, size, dst, labels);
            asm.bind(done);
        }
    }

    fn variable(&self, asm: &mut Asm, size: Size, dst: Reg, labels: &Labels) {
        asm.jump_if(Cond::Gt, R2, K(LONGEST), labels.reject);
        Self::context(asm, R1);
        asm.alu64(Alu::Mov, R3, X(FP));
        asm.alu64(Alu::Add, R3, K(i32::from(LOADED).cast_unsigned()));
        asm.alu64(Alu::Mov, R4, K(size.bytes()));
        asm.call(XDP_LOAD_BYTES);
        asm.jump_if(Cond::Ne, R0, K(0), labels.reject);
        asm.load(size, dst, FP, LOADED);
        asm.network_order(dst, size);
    }

    fn wire_len(&self, asm: &mut Asm, dst: Reg) {
        asm.load(Size::Word, dst, FP, WIRE_LEN_LOW);
    }
}

/// Fixed loads beyond are helper calls.
const LONGEST_DIRECT: u32 = 16_384;
/// The helper takes no more.
const LONGEST: u32 = 0xffff;

// Slots on the stack.
const WIRE_LEN: i16 = SLOTS - 16;
const WIRE_LEN_LOW: i16 = if cfg!(target_endian = "little") {
    WIRE_LEN
} else {
    WIRE_LEN + 4
};
const LOADED: i16 = SLOTS - 24;

// struct xdp_md
const XDP_DATA: i16 = 0;
const XDP_DATA_END: i16 = 4;

/// `bpf_xdp_get_buff_len` and `bpf_xdp_load_bytes`; Linux ≥ 5.18.
const XDP_GET_BUFF_LEN: u32 = 188;
const XDP_LOAD_BYTES: u32 = 189;

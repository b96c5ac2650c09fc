//! The packet as a socket filter sees it.
//!
//! A socket filter has no pointer to the packet. Its first bytes, as far as some filter loads them
//! at a fixed offset, are copied to the stack once, by one helper call for all filters; a fixed load
//! is then a comparison and a load. Variable loads and late ones are a helper call each.
//!
//! A VLAN tag that the kernel took out of the bytes is put where the daemon's judge will see it:
//! the copy on the stack has it in place, its length counts it, and variable offsets after it are
//! four bytes less in the kernel's packet. A load that would touch the tag at a variable offset
//! accepts the frame, and the judge decides.

use super::translate::{Labels, Reach, SLOTS, fixed_end, join};
use crate::Program;
use vnplug_os::bpf::asm::{
    Alu, Asm, Cond, FP, Label, Operand, R0, R1, R2, R3, R4, R8, R9, Reg, Size,
};

use Operand::{K, X};

/// R8: bytes of a VLAN tag beside the packet, 0 or 4; R9: the context.
///
/// NB: the length is asked of the context for every load. Kept in a register, the verifier follows
/// its range through every later filter: 64 filters took it a second instead of some
/// milliseconds.
#[derive(Debug)]
pub(super) struct Skb {
    /// Bytes of the packet on the stack, a multiple of 8.
    prefix: u32,
}

impl Skb {
    /// For these filters together.
    pub(super) fn new<'a>(filters: impl Iterator<Item = &'a Program>) -> Self {
        let end = filters.map(fixed_end).max().unwrap_or(0);
        let prefix = end.clamp(u64::from(MIN_PREFIX), u64::from(MAX_PREFIX)) as u32;
        Self {
            prefix: prefix.next_multiple_of(8),
        }
    }

    /// From R1, the context, to what the fragments need. Frames that it cannot judge go to `accept`.
    pub(super) fn prepare(&self, asm: &mut Asm, accept: Label) {
        let (tagged, ready) = (asm.label(), asm.label());
        asm.alu64(Alu::Mov, R9, X(R1));
        // The helper may write to memory only that was written before.
        for double in 0..=self.prefix / 8 {
            let at = self.bottom() + (double * 8) as i16;
            asm.store_k(Size::Double, FP, at, 0);
        }
        asm.load(Size::Word, R4, R9, SKB_LEN);
        asm.load(Size::Word, R0, R9, SKB_VLAN_PRESENT);
        asm.jump32_if(Cond::Ne, R0, K(0), tagged);

        asm.alu32(Alu::Mov, R8, K(0));
        at_most(asm, R4, self.prefix);
        asm.jump32_if(Cond::Lt, R4, K(1), ready);
        self.copy(asm, 0, 0, accept);
        asm.jump(ready);

        asm.bind(tagged);
        asm.jump32_if(Cond::Le, R4, K(MACS), accept);
        asm.alu64(Alu::Mov, R4, K(MACS));
        self.copy(asm, 0, 0, accept);
        asm.load(Size::Word, R0, R9, SKB_VLAN_PROTO);
        asm.store(Size::Half, FP, self.at(MACS), R0);
        asm.load(Size::Word, R0, R9, SKB_VLAN_TCI);
        asm.network_order(R0, Size::Half);
        asm.store(Size::Half, FP, self.at(MACS + 2), R0);
        asm.alu32(Alu::Mov, R8, K(TAG_BYTES));
        asm.load(Size::Word, R4, R9, SKB_LEN);
        at_most(asm, R4, self.prefix - TAG_BYTES);
        // Said again for the kernel's verifier.
        asm.jump32_if(Cond::Le, R4, K(MACS), accept);
        asm.alu64(Alu::Sub, R4, K(MACS));
        self.copy(asm, MACS, MACS + TAG_BYTES, accept);
        asm.bind(ready);
    }

    /// Copies R4 bytes of the packet from `from` on to where byte `to` belongs.
    fn copy(&self, asm: &mut Asm, from: u32, to: u32, failed: Label) {
        asm.alu64(Alu::Mov, R1, X(R9));
        asm.alu64(Alu::Mov, R2, K(from));
        asm.alu64(Alu::Mov, R3, X(FP));
        asm.alu64(Alu::Add, R3, K(i32::from(self.at(to)).cast_unsigned()));
        asm.call(SKB_LOAD_BYTES);
        asm.jump_if(Cond::Ne, R0, K(0), failed);
    }

    /// The lowest byte of the copy's memory.
    fn bottom(&self) -> i16 {
        LOWEST_SLOT - 8 - self.prefix as i16
    }

    /// Where byte `offset` of the packet is on the stack. Two bytes above a multiple of four:
    /// the bytes after the Ethernet header are then aligned, as reads of the stack must be.
    fn at(&self, offset: u32) -> i16 {
        self.bottom() + 2 + offset as i16
    }

    /// Loads from the copy, in pieces that are aligned.
    fn load_copied(&self, asm: &mut Asm, size: Size, dst: Reg, offset: u32) {
        let at = self.at(offset);
        let piece = match size {
            Size::Word | Size::Double if at % 4 == 0 => Size::Word,
            Size::Word | Size::Double | Size::Half if at % 2 == 0 => Size::Half,
            _ => Size::Byte,
        };
        asm.load(piece, dst, FP, at);
        asm.network_order(dst, piece);
        for more in 1..size.bytes() / piece.bytes() {
            asm.load(piece, R1, FP, at + (more * piece.bytes()) as i16);
            asm.network_order(R1, piece);
            join(asm, dst, piece);
        }
    }
}

impl Reach for Skb {
    fn fixed(&self, asm: &mut Asm, size: Size, dst: Reg, offset: u32, labels: &Labels) {
        let end = u64::from(offset) + u64::from(size.bytes());
        if end > u64::from(self.prefix) {
            asm.alu32(Alu::Mov, R2, K(offset));
            return self.variable(asm, size, dst, labels);
        }
        self.wire_len(asm, R0);
        asm.jump32_if(Cond::Lt, R0, K(end as u32), labels.reject);
        self.load_copied(asm, size, dst, offset);
    }

    fn variable(&self, asm: &mut Asm, size: Size, dst: Reg, labels: &Labels) {
        let untagged = asm.label();
        // The helper takes 32 bits of it; no packet is so long.
        asm.jump_if(Cond::Gt, R2, K(LONGEST), labels.reject);
        asm.jump32_if(Cond::Eq, R8, K(0), untagged);
        asm.jump_if(Cond::Lt, R2, K(MACS + TAG_BYTES), labels.unsure);
        asm.alu64(Alu::Sub, R2, K(TAG_BYTES));
        asm.bind(untagged);
        asm.alu64(Alu::Mov, R1, X(R9));
        asm.alu64(Alu::Mov, R3, X(FP));
        asm.alu64(Alu::Add, R3, K(i32::from(LOADED).cast_unsigned()));
        asm.alu64(Alu::Mov, R4, K(size.bytes()));
        asm.call(SKB_LOAD_BYTES);
        asm.jump_if(Cond::Ne, R0, K(0), labels.reject);
        asm.load(size, dst, FP, LOADED);
        asm.network_order(dst, size);
    }

    fn wire_len(&self, asm: &mut Asm, dst: Reg) {
        asm.load(Size::Word, dst, R9, SKB_LEN);
        asm.alu32(Alu::Add, dst, X(R8));
    }
}

fn at_most(asm: &mut Asm, reg: Reg, most: u32) {
    let less = asm.label();
    asm.jump32_if(Cond::Le, reg, K(most), less);
    asm.alu32(Alu::Mov, reg, K(most));
    asm.bind(less);
}

/// Both Ethernet addresses.
const MACS: u32 = 12;
const TAG_BYTES: u32 = 4;
/// Fixed loads beyond are helper calls.
const MAX_PREFIX: u32 = 128;
const MIN_PREFIX: u32 = 24;
/// Offsets above are beyond every packet (`INT_MAX` in the kernel).
const LONGEST: u32 = 0x7fff_ffff;

// Slots on the stack.
/// What a helper loaded.
const LOADED: i16 = SLOTS - 8;
const LOWEST_SLOT: i16 = LOADED;

// struct __sk_buff
const SKB_LEN: i16 = 0;
pub(super) const SKB_PKT_TYPE: i16 = 4;
const SKB_VLAN_PRESENT: i16 = 20;
const SKB_VLAN_TCI: i16 = 24;
const SKB_VLAN_PROTO: i16 = 28;

/// `bpf_skb_load_bytes`; Linux ≥ 4.5.
const SKB_LOAD_BYTES: u32 = 26;

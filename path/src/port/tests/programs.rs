//! An operator's program at a port: frames that it makes longer and shorter, tags, super-frames. The programs are
//! instructions made here, so no kernel is needed.

use vnplug_os::bpf::Insn;
use vnplug_os::bpf::asm::{Alu, Asm, Cond, Operand, R0, R1, R2, R3, R6, Size};
use vnplug_ring::control::Segments;
use vnplug_ring::offload::{Offload, PREFIX};
use vnplug_twin::{Code, Context, Instance};

use super::segments::{as_frame, is_summed, super_frame};
use super::*;
use crate::port::{PortProgram, Totals};

/// `bpf_xdp_adjust_head`, `bpf_xdp_adjust_tail`
const HEAD: u32 = 44;
const TAIL: u32 = 65;
const XDP_DROP: u32 = 1;
const XDP_PASS: u32 = 2;

/// Ends with this verdict.
fn verdict(asm: &mut Asm, verdict: u32) {
    asm.alu64(Alu::Mov, R0, Operand::K(verdict));
    asm.exit();
}

fn finished(asm: Asm) -> Vec<Insn> {
    asm.finish().unwrap()
}

/// Moves an end of the frame by `by` bytes, and passes it.
fn moved(helper: u32, by: i32) -> Vec<Insn> {
    let mut asm = Asm::default();
    asm.alu64(Alu::Mov, R2, Operand::K(by.cast_unsigned()));
    asm.call(helper);
    verdict(&mut asm, XDP_PASS);
    finished(asm)
}

/// A VLAN tag after the addresses, or the one that is there taken out.
fn tagged(tci: Option<u8>) -> Vec<Insn> {
    let mut asm = Asm::default();
    asm.alu64(Alu::Mov, R6, Operand::X(R1));
    let words = |asm: &mut Asm, order: [i16; 3], by: i16| {
        asm.load(Size::Word, R2, R6, 0);
        for at in order {
            asm.load(Size::Word, R3, R2, at);
            asm.store(Size::Word, R2, at + by, R3);
        }
    };
    if tci.is_none() {
        words(&mut asm, [8, 4, 0], 4);
    }
    asm.alu64(Alu::Mov, R1, Operand::X(R6));
    let by = if tci.is_some() { -4_i32 } else { 4 };
    asm.alu64(Alu::Mov, R2, Operand::K(by.cast_unsigned()));
    asm.call(HEAD);
    if let Some(tci) = tci {
        words(&mut asm, [4, 8, 12], -4);
        asm.store_k(Size::Byte, R2, 12, 0x81);
        asm.store_k(Size::Byte, R2, 13, 0);
        asm.store_k(Size::Byte, R2, 14, 0);
        asm.store_k(Size::Byte, R2, 15, tci.into());
    }
    verdict(&mut asm, XDP_PASS);
    finished(asm)
}

/// Drops what is shorter, and takes 20 bytes from the end of the others.
fn long_and_cut(shortest: u32) -> Vec<Insn> {
    let mut asm = Asm::default();
    let drops = asm.label();
    asm.load(Size::Word, R2, R1, 0);
    asm.load(Size::Word, R3, R1, 4);
    asm.alu64(Alu::Sub, R3, Operand::X(R2));
    asm.jump_if(Cond::Lt, R3, Operand::K(shortest), drops);
    asm.alu64(Alu::Mov, R2, Operand::K((-20_i32).cast_unsigned()));
    asm.call(TAIL);
    verdict(&mut asm, XDP_PASS);
    asm.bind(drops);
    verdict(&mut asm, XDP_DROP);
    finished(asm)
}

fn programmed(snaplen: u32, insns: &[Insn]) -> (Port, Consumer, Arc<Totals>) {
    let (mut port, consumer, _) = port(snaplen);
    let code = Code::new(insns, Context::Xdp, Vec::new()).unwrap();
    let totals = Arc::<Totals>::default();
    let instance = Instance::new(&code).unwrap();
    port.program = Some(PortProgram::shared(instance, 7, Arc::clone(&totals)));
    (port, consumer, totals)
}

/// What the reader has of one frame: bytes, length on the wire, flags and tag.
fn one(insns: &[Insn], snaplen: u32, frame: Frame<'_>) -> (Vec<u8>, u32, u16, u16) {
    let (mut port, mut consumer, _) = programmed(snaplen, insns);
    offer(&mut port, &[frame], 0);
    let packet = consumer.next().unwrap().unwrap();
    let meta = &packet.meta;
    let tag = (meta.flags & flags::VLAN, meta.vlan_tci);
    (packet.bytes.to_vec(), meta.wire_len, tag.0, tag.1)
}

#[test]
fn what_a_program_makes_longer_or_shorter_the_reader_has_so() {
    let bytes: Vec<u8> = (0..60).collect();
    let frame = frames(&bytes, 1)[0];
    let (got, wire, ..) = one(&moved(TAIL, -20), 256, frame);
    assert_eq!((&got[..], wire), (&bytes[..40], 40));
    let (got, wire, ..) = one(&moved(HEAD, 14), 256, frame);
    assert_eq!((&got[..], wire), (&bytes[14..], 46));
    // Longer: what is new is zero behind it, and before it anything.
    let (got, wire, ..) = one(&moved(TAIL, 10), 256, frame);
    assert_eq!(
        (&got[..60], &got[60..], wire),
        (&bytes[..], &[0; 10][..], 70)
    );
    let (got, wire, ..) = one(&moved(HEAD, -8), 256, frame);
    assert_eq!((got.len(), &got[8..], wire), (68, &bytes[..], 68));
    // What was not captured is still missing; the port's own snaplen comes after.
    let cut = Frame {
        wire_len: 1514,
        ..frame
    };
    let (got, wire, ..) = one(&moved(TAIL, -20), 256, cut);
    assert_eq!((got.len(), wire), (40, 1494));
    let (got, wire, ..) = one(&moved(TAIL, 10), 64, frame);
    assert_eq!((got.len(), wire), (64, 70));
    // There is no room for so much: the helper says so, and the frame is as it was.
    for program in [moved(HEAD, -300), moved(TAIL, 1 << 20), moved(TAIL, -60)] {
        let (got, wire, ..) = one(&program, 256, frame);
        assert_eq!((got.len(), wire), (60, 60));
    }
}

#[test]
fn a_tag_that_a_program_puts_in_or_takes_out_is_in_the_meta() {
    let plain: Vec<u8> = (0..60).collect();
    let mut with = plain[..12].to_vec();
    with.extend([0x81, 0, 0, 10]);
    with.extend(&plain[12..]);
    let frame = frames(&plain, 1)[0];
    let (got, wire, flag, tci) = one(&tagged(Some(10)), 256, frame);
    assert_eq!((&got, wire, flag, tci), (&with, 64, flags::VLAN, 10));
    let frame = Frame {
        flags: flags::VLAN,
        vlan_tci: 10,
        ..frames(&with, 1)[0]
    };
    let (got, wire, flag, tci) = one(&tagged(None), 256, frame);
    assert_eq!((&got, wire, flag, tci), (&plain, 60, 0, 0));
    // The control: what does not touch it leaves it.
    let (.., flag, tci) = one(&moved(TAIL, 0), 256, frame);
    assert_eq!((flag, tci), (flags::VLAN, 10));
}

#[test]
fn of_a_super_frame_it_has_the_packets_of_the_wire() {
    let (bytes, offload) = super_frame(2500);
    let frame = as_frame(&bytes, offload);
    let (mut port, mut consumer, totals) = programmed(3000, &long_and_cut(600));
    offer(&mut port, &[frame, frames(&bytes[..700], 1)[0]], 0);
    for len in [1054, 1054] {
        let packet = consumer.next().unwrap().unwrap();
        // As it was summed before: what the program changes it must sum itself.
        assert_eq!(packet.bytes.len(), len - 20);
        assert_eq!(packet.meta.wire_len as usize, len - 20);
        assert_eq!(packet.meta.flags & flags::OFFLOAD, 0);
        assert_eq!(packet.meta.offload, Offload::default());
    }
    assert_eq!(consumer.next().unwrap().unwrap().bytes.len(), 680);
    assert!(consumer.next().unwrap().is_none());
    let counters = port.counters;
    assert_eq!((counters.offered, counters.delivered), (2, 3));
    assert_eq!((counters.cut, counters.program), (2, 1));
    let told = [&totals.frames, &totals.dropped, &totals.aborted];
    assert_eq!(told.map(|it| it.load(Ordering::Relaxed)), [4, 1, 0]);
    // The control: one that changes nothing leaves packets whose sums are right.
    let (mut port, mut consumer, _) = programmed(3000, &moved(TAIL, 0));
    offer(&mut port, &[frame], 0);
    for _ in 0..3 {
        assert!(is_summed(consumer.next().unwrap().unwrap().bytes));
    }
}

#[test]
fn a_merged_super_frame_goes_whole_and_a_torn_one_not_at_all() {
    let (bytes, offload) = super_frame(2500);
    let frame = as_frame(&bytes, offload);
    for (program, is_torn) in [
        (moved(TAIL, 0), false),
        (moved(TAIL, -4), true),
        (moved(HEAD, 14), true),
    ] {
        let (mut port, mut consumer, totals) = programmed(3000, &program);
        port.segments = Segments::Merged;
        port.snaplen -= PREFIX as u32;
        offer(&mut port, &[frame, frames(&bytes[..100], 1)[0]], 0);
        if !is_torn {
            let packet = consumer.next().unwrap().unwrap();
            assert_eq!((packet.bytes, packet.meta.offload), (&bytes[..], offload));
        }
        // What is no super-frame may change.
        let packet = consumer.next().unwrap().unwrap();
        assert_eq!(packet.meta.flags & flags::OFFLOAD, 0);
        assert!(consumer.next().unwrap().is_none());
        let lost = u64::from(is_torn);
        assert_eq!(
            (port.counters.program, port.counters.delivered),
            (lost, 2 - lost)
        );
        assert_eq!(totals.aborted.load(Ordering::Relaxed), lost);
    }
}

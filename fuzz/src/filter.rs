//! Filter programs of guests: what is accepted runs as libpcap runs it, interpreted, as machine code
//! and through the index.

use std::sync::Arc;

use vnplug_filter::{FrameSet, Index, Instruction, Program, Trust, translate_now};
use vnplug_frame::Frame;

use crate::{Dice, libpcap};

/// Checks it with these bytes: programs, then a frame.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let mode = dice.byte();
    let count = usize::from(dice.byte() % 64);
    if mode & 1 == 1 {
        // As they come over the wire.
        let raw = dice.bytes(8 * count + usize::from(mode >> 5));
        let _ = Program::from_bytes(raw, Trust::Guest);
        return;
    }
    // libpcap leaves scratch memory as it finds it, so each program sets all of it first.
    let mut list: Vec<Instruction> = (0..16).map(|k| op(0x02, k)).collect();
    list.extend((0..count).map(|_| instruction(&mut dice)));
    list.push(op(0x16, 0));
    let cut = dice.u16();
    let frame = dice.0;
    let wire_len = frame.len() as u32 + u32::from(cut);
    let Ok(program) = Program::from_instructions(&list, Trust::Operator) else {
        assert!(Program::from_instructions(&list, Trust::Guest).is_err());
        return;
    };
    let wire = program.to_bytes();
    assert_eq!(
        Program::from_bytes(&wire, Trust::Operator).as_ref(),
        Ok(&program)
    );
    let guests = Program::from_bytes(&wire, Trust::Guest);
    assert_eq!(guests.is_err(), program.loops());
    assert!(libpcap::accepts(&list), "libpcap refuses {list:?}");
    let Ok(verdict) = program.interpret(frame, wire_len) else {
        // libpcap would not come back.
        assert!(program.loops());
        return;
    };
    assert_eq!(verdict, libpcap::run(&list, frame, wire_len), "{list:?}");
    indexed(&program, frame, wire_len, verdict);
    // It takes far longer than the rest.
    if mode & 0x0e == 0 && !program.loops() {
        translate_now(std::slice::from_ref(&program));
        assert!(program.is_native(), "{list:?}");
        assert_eq!(verdict, program.run(frame, wire_len), "native {list:?}");
    }
}

fn op(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

/// One that is likely to pass.
fn instruction(dice: &mut Dice<'_>) -> Instruction {
    const KNOWN: [u16; 49] = [
        0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x07, 0x0c, 0x14, 0x15, 0x1c, 0x1d, 0x20, 0x24, 0x25,
        0x28, 0x2c, 0x2d, 0x30, 0x34, 0x35, 0x3c, 0x3d, 0x40, 0x44, 0x45, 0x48, 0x4c, 0x4d, 0x50,
        0x54, 0x5c, 0x60, 0x61, 0x64, 0x6c, 0x74, 0x7c, 0x80, 0x81, 0x84, 0x87, 0x94, 0x9c, 0xa4,
        0xac, 0xb1, 0x06, 0x16,
    ];
    let code = match dice.byte() {
        255 => dice.u16(),
        known => KNOWN[usize::from(known) % KNOWN.len()],
    };
    let (jt, jf) = (dice.byte() % 8, dice.byte() % 8);
    let k = match dice.byte() {
        byte @ 0..=127 => u32::from(byte),
        128..=159 => u32::from(dice.byte() & 63).wrapping_neg(),
        _ => dice.u32(),
    };
    Instruction { code, jt, jf, k }
}

/// The index decides as the program does, alone and among others.
fn indexed(program: &Program, frame: &[u8], wire_len: u32, verdict: u32) {
    let mut index = Index::default();
    let others: Vec<_> = [0x0800, 0x86dd]
        .map(|ether| {
            let test = Instruction {
                jf: 1,
                ..op(0x15, ether)
            };
            let list = [op(0x28, 12), test, op(0x06, 9), op(0x06, 0)];
            Program::from_instructions(&list, Trust::Guest).expect("a program")
        })
        .into();
    let ids: Vec<_> = [program]
        .into_iter()
        .chain(&others)
        .map(|p| {
            let p = Arc::new(p.clone());
            (index.add(&p), p)
        })
        .collect();
    let frames = [Frame {
        bytes: frame,
        wire_len,
        ts_ns: 0,
        flags: 0,
        vlan_tci: 0,
        ..Frame::default()
    }];
    index.judge(&frames, &FrameSet::default());
    assert_eq!(
        !index.accepted(ids[0].0).is_empty(),
        verdict != 0,
        "{program:?}"
    );
    for (id, other) in &ids[1..] {
        assert_eq!(
            !index.accepted(*id).is_empty(),
            other.run(frame, wire_len) != 0
        );
    }
    index.forget();
    ids.iter().for_each(|(id, _)| index.remove(*id));
    assert_eq!(index.size(), Index::default().size());
}

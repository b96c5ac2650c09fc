//! Operators' programs, as if the kernel's verifier let everything pass: what the daemon accepts ends, and reaches its own maps and
//! frame alone.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vnplug_os::bpf::Insn;
use vnplug_twin::{Code, Context, Instance, Meta, SharedMap};

use crate::Dice;

/// Bytes of a page; a map has one, and a page that is not its own lies behind it in its file.
const PAGE: u32 = 4096;
/// What instructions name the map by.
const DESCRIPTOR: i32 = 7;
const CANARY: u8 = 0x77;

/// Checks it with these bytes: instructions, then a frame.
pub fn check(bytes: &[u8]) {
    let mut dice = Dice(bytes);
    let context = match dice.byte() & 1 {
        0 => Context::Xdp,
        _ => Context::Classifier,
    };
    let count = usize::from(dice.byte() % 64);
    let canary = Box::new([CANARY; 64]);
    let mut list: Vec<Insn> = Vec::new();
    for _ in 0..count {
        instruction(&mut dice, canary.as_ptr().addr() as u64, &mut list);
    }
    list.extend([Insn::new(0xb7, 0, 0, 0, 2), Insn::new(0x95, 0, 0, 0, 0)]);
    let Some(file) = map() else {
        return;
    };
    let Ok(fd) = file.try_clone() else {
        return;
    };
    let shared = SharedMap::of(fd.into(), DESCRIPTOR, 64, PAGE / 64);
    let Ok(code) = Code::new(&list, context, vec![shared]) else {
        return;
    };
    let Ok(mut instance) = Instance::new(&code) else {
        return;
    };
    // Twice: what it did the first time must not hurt the second.
    for _ in 0..2 {
        let run = instance.run(dice.0, &Meta::default());
        assert!(run.frame.len() <= vnplug_twin::MAX_FRAME as usize + 1024);
    }
    assert!(canary.iter().all(|byte| *byte == CANARY), "{list:?}");
    let mut behind = [0; PAGE as usize];
    let read = file.read_exact_at(&mut behind, PAGE.into());
    assert!(
        read.is_ok() && behind == [CANARY; PAGE as usize],
        "{list:?}"
    );
}

/// Memory for a map, with a page behind it that nobody may write.
fn map() -> Option<File> {
    let directory = format!("/dev/shm/vnplug-fuzz-{}", std::process::id());
    std::fs::create_dir_all(&directory).ok()?;
    let path = format!("{directory}/map");
    let options = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&path);
    let file = options.ok()?;
    std::fs::remove_file(&path).ok()?;
    file.set_len(u64::from(2 * PAGE)).ok()?;
    file.write_all_at(&[CANARY; PAGE as usize], PAGE.into())
        .ok()?;
    Some(file)
}

/// One that is likely to pass.
fn instruction(dice: &mut Dice<'_>, canary: u64, list: &mut Vec<Insn>) {
    const OPERATIONS: [u8; 12] = [
        0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x90, 0xa0, 0xb0, 0xc0,
    ];
    const JUMPS: [u8; 11] = [
        0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xa0, 0xb0, 0xc0, 0xd0,
    ];
    const HELPERS: [i32; 18] = [
        1, 2, 3, 5, 7, 8, 9, 10, 11, 23, 26, 28, 44, 65, 155, 160, 189, 190,
    ];
    const ATOMICS: [i32; 6] = [0x00, 0x01, 0x41, 0x51, 0xe1, 0xf1];
    let (dst, src) = (dice.byte() % 10, dice.byte() % 11);
    let how = dice.byte();
    let pick = usize::from(dice.byte());
    let imm = match dice.byte() {
        byte @ 0..=127 => i32::from(byte),
        128..=159 => -i32::from(dice.byte()),
        _ => dice.u32().cast_signed(),
    };
    let off = match dice.byte() {
        byte @ 0..=127 => i16::from(byte % 16) - 8,
        _ => dice.u16().cast_signed(),
    };
    let size = [0x00, 0x08, 0x10, 0x18][pick % 4];
    let source = 0x08 * (how >> 7);
    let insn = match how % 16 {
        0..=2 => Insn::new(0x07 | source | OPERATIONS[pick % 12], dst, src, 0, imm),
        3 => Insn::new(0x04 | source | OPERATIONS[pick % 12], dst, src, 0, imm),
        4 | 5 => Insn::new(0x61 | size, dst, src, off, 0),
        6 | 7 => Insn::new(0x63 | size, dst, src, off, 0),
        8 => Insn::new(0x62 | size, dst, 0, off, imm),
        9 => {
            let op = ATOMICS[pick % 6];
            Insn::new(0xc3 | (0x18 * (how >> 7)), dst, src % 10, off, op)
        }
        10 | 11 => Insn::new(0x05 | source | JUMPS[pick % 11], dst, src, off, imm),
        12 => Insn::new(0x85, 0, 0, 0, HELPERS[pick % 18]),
        13 => {
            // A map, a place in it, the canary.
            let (kind, low, high) = match pick % 3 {
                0 => (1, DESCRIPTOR, 0),
                1 => (2, DESCRIPTOR, imm & 0xfff),
                _ => (0, canary as i32, (canary >> 32) as i32),
            };
            list.push(Insn::new(0x18, dst, kind, 0, low));
            Insn::new(0, 0, 0, 0, high)
        }
        14 => Insn::new(0xd4 | source, dst, 0, 0, [16, 32, 64][pick % 3]),
        _ => Insn::new(dice.byte(), dst, src, off, imm),
    };
    list.push(insn);
}

//! Random programs on random frames: the kernel's instance and the daemon's do the same, on the same map.
//!
//! Each program is one that the verifier accepts: arithmetic of all kinds, branches, loads and stores of frame,
//! stack and map, atomic operations, a bounded loop. Helpers are compared by the examples' programs (`e2e`). Needs
//! `CAP_BPF`.

use vnplug_os::bpf::{Array, Insn, Program, ProgramKind};
use vnplug_testing::Dice;
use vnplug_twin::{Code, Context, Instance, Meta, SharedMap};

/// Programs, and frames for each: 10^6 in all.
const PROGRAMS: u64 = 500;
const FRAMES: u64 = 2_000;

/// Bytes of the one value of the map.
const VALUE: usize = 256;

/// Registers with numbers, which the program plays with.
const NUMBERS: [u8; 4] = [0, 7, 8, 9];
/// Where the frame's begin, and the map's value, are kept.
const FRAME: u8 = 6;
const MAP: u8 = 5;
/// Bytes of each frame that programs look at.
const SEEN: u64 = 64;

fn program(dice: &mut Dice, map: &Array, is_new: bool) -> Vec<Insn> {
    let mut code = Vec::new();
    let put = |code: u8, dst: u8, src: u8, off: i16, imm: i32| (code, dst, src, off, imm);
    let mut list: Vec<(u8, u8, u8, i16, i32)> = vec![
        put(0x61, 6, 1, 0, 0),              // r6 = data
        put(0x61, 2, 1, 4, 0),              // r2 = data_end
        put(0xbf, 3, 6, 0, 0),              // r3 = r6
        put(0x07, 3, 0, 0, SEEN as i32),    // r3 += SEEN
        put(0x3d, 2, 3, 2, 0),              // if r2 >= r3 goto +2
        put(0xb7, 0, 0, 0, 77),             // r0 = 77
        put(0x95, 0, 0, 0, 0),              // exit
        put(0x18, MAP, 2, 0, map.number()), // r5 = the map's value
        put(0x00, 0, 0, 0, 0),
        put(0x61, 0, 6, 0, 0), // numbers from the frame
        put(0x79, 7, 6, 8, 0),
        put(0x69, 8, 6, 16, 0),
        put(0x79, 9, MAP, 0, 0), // and from the map
    ];
    // A stack without anything of earlier frames.
    for slot in 1..=8 {
        list.push((0x7a, 10, 0, -8 * slot, dice.roll() as i32));
    }
    let steps = 10 + dice.below(60);
    for _ in 0..steps {
        step(dice, &mut list, is_new);
    }
    if dice.below(2) == 0 {
        looped(dice, &mut list);
    }
    list.push((0x7b, MAP, 0, 8, 0)); // what was found is left in the map
    list.push((0xbc, 0, 0, 0, 0)); // w0 = w0
    list.push((0x95, 0, 0, 0, 0));
    for (op, dst, src, off, imm) in list {
        code.push(Insn::new(op, dst, src, off, imm));
    }
    code
}

fn step(dice: &mut Dice, list: &mut Vec<(u8, u8, u8, i16, i32)>, is_new: bool) {
    let (dst, src) = (dice.one_of(&NUMBERS), dice.one_of(&NUMBERS));
    let wide = dice.one_of(&[0x04_u8, 0x07]);
    let imm = match dice.below(4) {
        0 => dice.roll() as i32,
        1 => -1,
        2 => i32::MIN,
        _ => dice.below(100) as i32,
    };
    let size = dice.one_of(&[(0x00_u8, 4_u64), (0x08, 2), (0x10, 1), (0x18, 8)]);
    let aligned = |dice: &mut Dice, room: u64| (dice.below(room / size.1) * size.1) as i16;
    match dice.below(12) {
        0..=3 => {
            let op = dice.one_of(&[0x00_u8, 0x10, 0x20, 0x40, 0x50, 0xa0, 0xb0, 0x30, 0x90]);
            match dice.below(2) {
                0 => list.push((op | wide | 0x08, dst, src, 0, 0)),
                _ if matches!(op, 0x30 | 0x90) && imm == 0 => {}
                _ => list.push((op | wide, dst, 0, 0, imm)),
            }
        }
        4 => {
            let op = dice.one_of(&[0x60_u8, 0x70, 0xc0]);
            let bits = if wide == 7 { 64 } else { 32 };
            match dice.below(2) {
                0 => list.push((op | wide, dst, 0, 0, dice.below(bits) as i32)),
                _ => list.push((op | wide | 0x08, dst, src, 0, 0)),
            }
        }
        5 => match dice.below(4) {
            0 => list.push((0x80 | wide, dst, 0, 0, 0)),
            1 => list.push((
                dice.one_of(&[0xd4_u8, 0xdc]),
                dst,
                0,
                0,
                dice.one_of(&[16, 32, 64]),
            )),
            _ if !is_new => {}
            2 => list.push((0xd7, dst, 0, 0, dice.one_of(&[16, 32, 64]))),
            // Signed division, moves that extend a sign.
            _ => match dice.below(2) {
                0 => list.push((dice.one_of(&[0x30_u8, 0x90]) | wide | 0x08, dst, src, 1, 0)),
                _ => list.push((0xb0 | wide | 0x08, dst, src, dice.one_of(&[8, 16]), 0)),
            },
        },
        6 => {
            let at = aligned(dice, SEEN);
            list.push((0x61 | size.0, dst, FRAME, at, 0));
        }
        7 => {
            // The addresses stay: the kernel's test looks at nothing, but frames are frames.
            let at = 16 + aligned(dice, SEEN - 16);
            list.push((0x63 | size.0, FRAME, dst, at, 0));
        }
        8 => {
            let at = 16 + aligned(dice, VALUE as u64 - 16);
            match dice.below(4) {
                0 => list.push((0x61 | size.0, dst, MAP, at, 0)),
                1 => list.push((0x63 | size.0, MAP, dst, at, 0)),
                2 => list.push((0x62 | size.0, MAP, 0, at, imm)),
                // With its sign; 8 bytes have no other way.
                _ if is_new && size.1 < 8 => list.push((0x81 | size.0, dst, MAP, at, 0)),
                _ => {}
            }
        }
        9 => {
            let at = -64 + aligned(dice, 64);
            match dice.below(2) {
                0 => list.push((0x63 | size.0, 10, dst, at, 0)),
                _ => list.push((0x61 | size.0, dst, 10, at, 0)),
            }
        }
        10 => {
            let bytes = dice.one_of(&[(0xc3_u8, 4_u64), (0xdb, 8)]);
            let at = (16 + dice.below((VALUE as u64 - 16) / bytes.1) * bytes.1) as i16;
            let op = dice.one_of(&[0x00, 0x40, 0x50, 0xa0, 0x01, 0x41, 0x51, 0xa1, 0xe1, 0xf1]);
            list.push((bytes.0, MAP, src, at, op));
        }
        _ => {
            // A branch over one step of arithmetic.
            let class = dice.one_of(&[0x05_u8, 0x06]);
            let op = dice.one_of(&[
                0x10_u8, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xa0, 0xb0, 0xc0, 0xd0,
            ]);
            match dice.below(2) {
                0 => list.push((op | class, dst, 0, 1, imm)),
                _ => list.push((op | class | 0x08, dst, src, 1, 0)),
            }
            list.push((0x07, dice.one_of(&NUMBERS), 0, 0, imm));
        }
    }
}

/// A loop over r2, which counts down.
fn looped(dice: &mut Dice, list: &mut Vec<(u8, u8, u8, i16, i32)>) {
    list.push((0xb7, 2, 0, 0, 1 + dice.below(8) as i32));
    let begin = list.len();
    list.push((0x0f, dice.one_of(&NUMBERS), 2, 0, 0));
    list.push((0x27, dice.one_of(&NUMBERS), 0, 0, 3));
    list.push((0x17, 2, 0, 0, 1));
    let back = begin as i64 - (list.len() as i64 + 1);
    list.push((0x55, 2, 0, back as i16, 0));
}

/// Whether the kernel knows signed division and what else came with Linux 6.6.
fn has_newer_instructions() -> bool {
    let code = [
        Insn::new(0xb7, 0, 0, 0, 2),
        Insn::new(0x37, 0, 0, 1, 2),
        Insn::new(0x95, 0, 0, 0, 0),
    ];
    let knows = Program::load(ProgramKind::Xdp, "newer", &code, false).is_ok();
    println!(
        "instructions of Linux 6.6: {}",
        if knows {
            "tested"
        } else {
            "not here, not tested"
        }
    );
    knows
}

#[test]
fn both_instances_do_the_same_on_one_map() {
    let seed = vnplug_frame::witness::seed("twin");
    let mut dice = Dice(seed);
    let (mut runs, mut refused) = (0_u64, 0);
    let map = Array::create("differential", VALUE as u32, 1, false).unwrap();
    let is_new = has_newer_instructions();
    while runs < PROGRAMS * FRAMES {
        let insns = program(&mut dice, &map, is_new);
        let kernel = match Program::load(ProgramKind::Xdp, "differential", &insns, false) {
            Ok(kernel) => kernel,
            Err(error) => {
                refused += 1;
                assert!(refused < 50, "seed {seed}: {error}");
                continue;
            }
        };
        let maps = vec![SharedMap::new(&map, false).unwrap()];
        let code = Code::new(&insns, Context::Xdp, maps).unwrap();
        let mut daemon = Instance::new(&code).unwrap();
        let mut out = Vec::with_capacity(2048);
        let mut before = vec![0; VALUE];
        let (mut after, mut ours) = (vec![0; VALUE], vec![0; VALUE]);
        for number in 0..FRAMES {
            let len = 60 + dice.below(100) as usize;
            let frame: Vec<u8> = (0..len.div_ceil(8))
                .flat_map(|_| dice.roll().to_ne_bytes())
                .take(len)
                .collect();
            // Now and then the map is what nobody left there.
            if number % 64 == 0 {
                let value: Vec<u8> = (0..VALUE / 8)
                    .flat_map(|_| dice.roll().to_ne_bytes())
                    .collect();
                map.set(0, &value).unwrap();
            }
            assert!(daemon.read_map(0, 0, &mut before));
            let theirs = kernel.test_output(&frame, &mut out).unwrap();
            assert!(daemon.read_map(0, 0, &mut after));
            map.set(0, &before).unwrap();
            let run = daemon.run(&frame, &Meta::default());
            let (verdict, made) = (run.verdict, run.frame.to_vec());
            assert!(daemon.read_map(0, 0, &mut ours));
            let same = verdict == Some(theirs.cast_signed()) && made == out && ours == after;
            assert!(
                same,
                "seed {seed}, frame {number}: verdict {verdict:?} and {theirs}, frame the same: {}, map the same: \
                 {}; program {insns:?}",
                made == out,
                ours == after
            );
            runs += 1;
        }
    }
    println!("{runs} runs of both, {refused} programs refused by the verifier");
}

#[test]
fn a_program_that_differs_in_one_operation_is_found() {
    let mut dice = Dice(vnplug_frame::witness::seed("twin control"));
    let map = Array::create("control", VALUE as u32, 1, false).unwrap();
    let simple = |op: u8| {
        [
            Insn::new(0x61, 6, 1, 0, 0),
            Insn::new(0x61, 2, 1, 4, 0),
            Insn::new(0xbf, 3, 6, 0, 0),
            Insn::new(0x07, 3, 0, 0, 8),
            Insn::new(0x2d, 3, 2, 3, 0),
            Insn::new(0x61, 0, 6, 0, 0),
            Insn::new(0x61, 7, 6, 4, 0),
            Insn::new(op, 0, 7, 0, 0),
            Insn::new(0x95, 0, 0, 0, 0),
        ]
    };
    // r0 is set on both ways.
    let simple = |op: u8| {
        let mut code = simple(op).to_vec();
        code.insert(0, Insn::new(0xb7, 0, 0, 0, 0));
        code
    };
    let kernel = Program::load(ProgramKind::Xdp, "control", &simple(0x4c), false).unwrap();
    let mut differences = |op: u8| {
        let maps = vec![SharedMap::new(&map, false).unwrap()];
        let code = Code::new(&simple(op), Context::Xdp, maps).unwrap();
        let mut daemon = Instance::new(&code).unwrap();
        let mut count = 0;
        for _ in 0..1000 {
            let frame: Vec<u8> = (0..8).flat_map(|_| dice.roll().to_ne_bytes()).collect();
            let theirs = kernel.test(&frame).unwrap();
            let ours = daemon.run(&frame, &Meta::default()).verdict;
            count += u32::from(ours != Some(theirs.cast_signed()));
        }
        count
    };
    assert_eq!(differences(0x4c), 0);
    // Addition instead of "or".
    assert!(differences(0x0c) > 900);
}

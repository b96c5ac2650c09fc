//! Programs that the verifier never saw: what the daemon's instance makes of them. Each has a control that
//! differs in what is wrong, and runs.
//!
//! The kernel refuses all of them, which is the first wall, and is looked at here as well. Needs `CAP_BPF`.

use std::time::Instant;

use vnplug_os::bpf::{Array, Insn, Program, ProgramKind};
use vnplug_twin::{Code, CodeError, Context, Instance, Meta, SharedMap};

const FRAME: [u8; 64] = [0x5a; 64];

fn insn((code, dst, src, off, imm): (u8, u8, u8, i16, i32)) -> Insn {
    Insn::new(code, dst, src, off, imm)
}

fn code(list: &[(u8, u8, u8, i16, i32)]) -> Vec<Insn> {
    list.iter().copied().map(insn).collect()
}

fn is_accepted(list: &[Insn]) -> bool {
    Program::load(ProgramKind::Xdp, "hostile", list, false).is_ok()
}

fn run(list: &[Insn], maps: &[&Array]) -> Option<i32> {
    let maps = maps
        .iter()
        .map(|map| SharedMap::new(map, false).expect("a descriptor"));
    let code = Code::new(list, Context::Xdp, maps.collect()).expect("fit for the daemon");
    let mut instance = Instance::new(&code).expect("memory");
    // Twice: what it did the first time must not hurt the second.
    instance.run(&FRAME, &Meta::default());
    instance.run(&FRAME, &Meta::default()).verdict
}

const EXIT: (u8, u8, u8, i16, i32) = (0x95, 0, 0, 0, 0);

#[test]
fn wild_stores_and_loads_stay_in_the_area() {
    let canary = Box::new([0x77_u8; 4096]);
    let at = canary.as_ptr().addr() as u64;
    let (low, high) = ((at & 0xffff_ffff) as i32, (at >> 32) as i32);
    // *(u64 *)canary = r1, and r0 = what lies there then
    let wild = code(&[
        (0x18, 6, 0, 0, low),
        (0x00, 0, 0, 0, high),
        (0xb7, 1, 0, 0, 0x1111),
        (0x7b, 6, 1, 0, 0),
        (0x79, 0, 6, 0, 0),
        EXIT,
    ]);
    assert!(!is_accepted(&wild));
    assert_eq!(
        run(&wild, &[]),
        Some(0x1111),
        "it has what it wrote, in its own memory"
    );
    assert!(canary.iter().all(|&byte| byte == 0x77));

    // From any place, by any distance, whatever lies there.
    let mut seed = vnplug_frame::witness::seed("wild");
    for _ in 0..200 {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let (low, high) = ((seed >> 8) as i32, (seed >> 32) as i32);
        let wild = code(&[
            (0x18, 6, 0, 0, low),
            (0x00, 0, 0, 0, high),
            (0xb7, 1, 0, 0, -1),
            (0x7b, 6, 1, (seed >> 16) as i16, 0),
            (0xdb, 6, 1, (seed >> 24) as i16, 0x01),
            (0x61, 0, 6, (seed >> 40) as i16, 0),
            (0xb7, 0, 0, 0, 2),
            EXIT,
        ]);
        assert_eq!(run(&wild, &[]), Some(2));
    }
    assert!(canary.iter().all(|&byte| byte == 0x77));
}

#[test]
fn a_wild_store_does_not_reach_the_map_of_another_program() {
    let (mine, other) = (
        Array::create("mine", 4096, 1, false).unwrap(),
        Array::create("other", 4096, 1, false).unwrap(),
    );
    let others = vec![SharedMap::new(&other, false).unwrap()];
    let accepted = code(&[(0xb7, 0, 0, 0, 2), EXIT]);
    let bystander = Instance::new(&Code::new(&accepted, Context::Xdp, others).unwrap()).unwrap();
    // Stores over 120 MiB, by steps of a page: over any area several times.
    let flood = code(&[
        (0xb7, 6, 0, 0, 0),
        (0xb7, 2, 0, 0, 30_000),
        (0x62, 6, 0, 0, 0x6666),
        (0x07, 6, 0, 0, 4096),
        (0x17, 2, 0, 0, 1),
        (0x55, 2, 0, -4, 0),
        (0xb7, 0, 0, 0, 2),
        EXIT,
    ]);
    assert!(!is_accepted(&flood));
    assert_eq!(run(&flood, &[&mine]), Some(2));
    let mut word = [0; 4];
    assert!(bystander.read_map(0, 0, &mut word));
    assert_eq!(u32::from_ne_bytes(word), 0);
    // Control: its own map it did reach.
    let own = Code::new(
        &accepted,
        Context::Xdp,
        vec![SharedMap::new(&mine, false).unwrap()],
    )
    .unwrap();
    assert!(Instance::new(&own).unwrap().read_map(0, 0, &mut word));
    assert_eq!(u32::from_ne_bytes(word), 0x6666);
}

#[test]
fn an_endless_loop_is_stopped_soon_and_one_that_ends_is_not() {
    let endless = code(&[(0xb7, 0, 0, 0, 2), (0x05, 0, 0, -1, 0), EXIT]);
    assert!(!is_accepted(&endless));
    let begun = Instant::now();
    assert_eq!(run(&endless, &[]), None);
    assert!(begun.elapsed().as_millis() < 500, "{:?}", begun.elapsed());
    let bounded = code(&[
        (0xb7, 0, 0, 0, 2),
        (0xb7, 1, 0, 0, 1000),
        (0x17, 1, 0, 0, 1),
        (0x55, 1, 0, -2, 0),
        EXIT,
    ]);
    assert!(is_accepted(&bounded));
    assert_eq!(run(&bounded, &[]), Some(2));
}

#[test]
fn an_endless_loop_in_a_function_stops_those_that_wait_for_it() {
    let loops = code(&[
        (0x85, 0, 1, 0, 2), // call +2
        (0xb7, 0, 0, 0, 2),
        EXIT,
        (0xb7, 0, 0, 0, 1),
        (0x05, 0, 0, -1, 0),
        EXIT,
    ]);
    assert_eq!(run(&loops, &[]), None);
    let ends = code(&[
        (0x85, 0, 1, 0, 2),
        (0x07, 0, 0, 0, 1),
        EXIT,
        (0xb7, 0, 0, 0, 1),
        EXIT,
    ]);
    assert!(is_accepted(&ends));
    assert_eq!(run(&ends, &[]), Some(2));
}

fn refusal(list: &[Insn]) -> String {
    match Code::new(list, Context::Xdp, Vec::new()) {
        Err(CodeError::Unfit(why)) => why.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn recursion_is_refused_and_calls_are_not() {
    let recursion = code(&[(0x85, 0, 1, 0, 1), EXIT, (0x85, 0, 1, 0, -1), EXIT]);
    assert!(!is_accepted(&recursion));
    assert!(refusal(&recursion).contains("calls itself"));
    // Eight functions deep is what the kernel allows; each has a stack of its own.
    let deep = |functions: usize| {
        let mut list = Vec::new();
        for number in 0..functions {
            list.push((0x7a, 10, 0, -8, number as i32));
            match number + 1 < functions {
                true => list.extend([(0x85, 0, 1, 0, 2), (0x79, 0, 10, -8, 0), EXIT]),
                false => list.extend([(0x79, 0, 10, -8, 0), EXIT]),
            }
        }
        code(&list)
    };
    assert!(is_accepted(&deep(8)));
    assert_eq!(run(&deep(8), &[]), Some(0));
    assert!(!is_accepted(&deep(9)));
    assert!(refusal(&deep(9)).contains("functions deep"));
}

#[test]
fn a_smashed_stack_is_the_programs_own() {
    // Fills what lies around its stack, from 32 KiB below to 32 KiB above.
    let mut list = Vec::new();
    for at in (i16::MIN..=i16::MAX - 8).step_by(4096) {
        list.push((0x7a, 10, 0, at, -1));
    }
    list.extend([(0xb7, 0, 0, 0, 2), EXIT]);
    let smash = code(&list);
    assert!(!is_accepted(&smash));
    assert_eq!(run(&smash, &[]), Some(2));
    let kept = code(&[(0x7a, 10, 0, -512, -1), (0xb7, 0, 0, 0, 2), EXIT]);
    assert!(is_accepted(&kept));
    assert_eq!(run(&kept, &[]), Some(2));
}

#[test]
fn helpers_that_the_daemon_does_not_have_are_named() {
    // bpf_get_current_pid_tgid
    let forbidden = code(&[(0x85, 0, 0, 0, 14), (0xb7, 0, 0, 0, 2), EXIT]);
    assert!(refusal(&forbidden).contains("helper 14"));
    let allowed = code(&[(0x85, 0, 0, 0, 7), (0xb7, 0, 0, 0, 2), EXIT]);
    assert!(is_accepted(&allowed));
    assert_eq!(run(&allowed, &[]), Some(2));
}

/// What each helper that the daemon has is called by, for the programs of a kind.
const OF_XDP: [i32; 14] = [1, 2, 3, 5, 7, 8, 23, 28, 44, 65, 125, 160, 189, 190];
const OF_TC: [i32; 15] = [1, 2, 3, 5, 7, 8, 9, 10, 11, 23, 26, 28, 125, 155, 160];

#[test]
fn helpers_bear_any_argument() {
    let map = Array::create("helpers", 64, 4, false).unwrap();
    // What lies outside of the area: memory of the process, and the map of another program.
    let other = Array::create("others", 64, 4, false).unwrap();
    let shared = || vec![SharedMap::new(&other, false).unwrap()];
    let nothing = Code::new(&code(&[EXIT]), Context::Xdp, shared()).unwrap();
    let bystander = Instance::new(&nothing).unwrap();
    let canary = Box::new([0x77_u8; 4096]);
    let at = canary.as_ptr().addr() as u64;
    let mut seed = vnplug_frame::witness::seed("helpers");
    let kinds = [(Context::Xdp, &OF_XDP[..]), (Context::Classifier, &OF_TC)];
    for (context, helpers) in kinds {
        for helper in helpers {
            for _ in 0..200 {
                let mut list = Vec::new();
                for reg in 1..=5 {
                    seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(3);
                    let value = match seed >> 61 {
                        0 => u64::MAX,
                        1 => seed & 0xffff,
                        2 => 0xb9f0_0000_0000_0000 + (seed & 3),
                        3 => u64::MAX - (seed & 0xff),
                        4 => at + (seed & 0xfff),
                        _ => seed,
                    };
                    list.push((0x18, reg, 0, 0, value as i32));
                    list.push((0x00, 0, 0, 0, (value >> 32) as i32));
                }
                list.extend([(0x85, 0, 0, 0, *helper), (0xb7, 0, 0, 0, 2), EXIT]);
                let maps = vec![SharedMap::new(&map, false).unwrap()];
                let code = Code::new(&code(&list), context, maps).unwrap();
                let mut instance = Instance::new(&code).unwrap();
                for _ in 0..2 {
                    let run = instance.run(&FRAME, &Meta::default());
                    assert_eq!(run.verdict, Some(2), "helper {helper}");
                }
            }
        }
    }
    assert!(canary.iter().all(|&byte| byte == 0x77));
    let mut values = [0; 256];
    assert!(bystander.read_map(0, 0, &mut values));
    assert_eq!(values, [0; 256]);
}

/// The control of the above: what an argument leads to within the area is read and written.
#[test]
fn helpers_do_what_right_arguments_say() {
    let run = |context, list: &[(u8, u8, u8, i16, i32)]| {
        let code = Code::new(&code(list), context, Vec::new()).unwrap();
        let mut instance = Instance::new(&code).unwrap();
        let run = instance.run(&FRAME, &Meta::default());
        (run.verdict, run.frame.to_vec())
    };
    // Four bytes of the frame to the stack, and from there to its begin with one changed.
    for (context, load, store) in [(Context::Xdp, 189, 190), (Context::Classifier, 26, 9)] {
        let (verdict, frame) = run(
            context,
            &[
                (0xbf, 6, 1, 0, 0),
                (0xb7, 2, 0, 0, 32),
                (0xbf, 3, 10, 0, 0),
                (0x07, 3, 0, 0, -8),
                (0xb7, 4, 0, 0, 4),
                (0x85, 0, 0, 0, load),
                (0x61, 7, 10, -8, 0),
                (0x72, 10, 0, -8, 0x11),
                (0xbf, 1, 6, 0, 0),
                (0xb7, 2, 0, 0, 0),
                (0xbf, 3, 10, 0, 0),
                (0x07, 3, 0, 0, -8),
                (0xb7, 4, 0, 0, 4),
                (0xb7, 5, 0, 0, 0),
                (0x85, 0, 0, 0, store),
                (0xbc, 0, 7, 0, 0),
                EXIT,
            ],
        );
        assert_eq!(verdict, Some(0x5a5a_5a5a));
        assert_eq!(frame[..5], [0x11, 0x5a, 0x5a, 0x5a, 0x5a]);
    }
    // The sum at the frame's end, for a word that became another one.
    for helper in [10, 11] {
        let (verdict, frame) = run(
            Context::Classifier,
            &[
                (0xb7, 2, 0, 0, 62),
                (0xb7, 3, 0, 0, 0x1234),
                (0xb7, 4, 0, 0, 0x1235),
                (0xb7, 5, 0, 0, 2),
                (0x85, 0, 0, 0, helper),
                EXIT,
            ],
        );
        assert_eq!(verdict, Some(0));
        let sum = u16::from_ne_bytes([frame[62], frame[63]]);
        assert_eq!(sum, 0x5a5a - 1);
    }
}

#[test]
fn division_by_zero_is_what_the_kernel_makes_of_it() {
    let divide = |op: u8| {
        code(&[
            (0xb7, 0, 0, 0, 77),
            (0xb7, 1, 0, 0, 0),
            (op, 0, 1, 0, 0),
            EXIT,
        ])
    };
    for (op, expected) in [(0x3f, 0), (0x9f, 77), (0x3c, 0), (0x9c, 77)] {
        let list = divide(op);
        let kernel = Program::load(ProgramKind::Xdp, "divide", &list, false).unwrap();
        assert_eq!(kernel.test(&FRAME).unwrap(), expected);
        assert_eq!(run(&list, &[]), Some(expected.cast_signed()));
    }
}

#[test]
fn what_is_no_program_is_refused() {
    for (list, why) in [
        (vec![], "1 to 65536"),
        (code(&[(0xb7, 0, 0, 0, 2)]), "does not end"),
        (code(&[(0x05, 0, 0, 7, 0), EXIT]), "jumps out"),
        (code(&[(0x05, 0, 0, -7, 0), EXIT]), "jumps out"),
        (code(&[(0x18, 0, 0, 0, 0), EXIT]), "second half"),
        (
            code(&[
                (0x05, 0, 0, 1, 0),
                (0x18, 0, 0, 0, 0),
                (0x00, 0, 0, 0, 0),
                EXIT,
            ]),
            "no instruction",
        ),
        (code(&[(0xbf, 10, 1, 0, 0), EXIT]), "frame pointer"),
        (code(&[(0xbf, 12, 1, 0, 0), EXIT]), "no such register"),
        (code(&[(0xff, 0, 0, 0, 0), EXIT]), "unknown operation"),
        (code(&[(0x20, 0, 0, 0, 0), EXIT]), "classic BPF"),
        (
            code(&[(0x85, 0, 2, 0, 1), EXIT]),
            "function of the kernel's",
        ),
        (
            code(&[(0x85, 0, 1, 0, 100), EXIT]),
            "no part of the program",
        ),
    ] {
        let said = refusal(&list);
        assert!(said.contains(why), "{said:?} for {list:?}");
    }
}

#[test]
fn what_helpers_copy_is_paid_for() {
    let map = Array::create("long", 1 << 20, 1, false).unwrap();
    // bpf_map_update_elem of a megabyte onto itself, again and again.
    let copies = |times: usize| {
        let mut list = vec![(0x62, 10, 0, -4, 0)];
        for _ in 0..times {
            list.extend([
                (0x18, 1, 1, 0, map.number()),
                (0x00, 0, 0, 0, 0),
                (0xbf, 2, 10, 0, 0),
                (0x07, 2, 0, 0, -4),
                (0x18, 3, 2, 0, map.number()),
                (0x00, 0, 0, 0, 0),
                (0xb7, 4, 0, 0, 0),
                (0x85, 0, 0, 0, 2),
            ]);
        }
        list.extend([(0xb7, 0, 0, 0, 2), EXIT]);
        code(&list)
    };
    assert_eq!(run(&copies(2), &[&map]), None);
    let short = Array::create("short", 1 << 10, 1, false).unwrap();
    let list = code(&[
        (0x62, 10, 0, -4, 0),
        (0x18, 1, 1, 0, short.number()),
        (0x00, 0, 0, 0, 0),
        (0xbf, 2, 10, 0, 0),
        (0x07, 2, 0, 0, -4),
        (0x18, 3, 2, 0, short.number()),
        (0x00, 0, 0, 0, 0),
        (0xb7, 4, 0, 0, 0),
        (0x85, 0, 0, 0, 2),
        (0xb7, 0, 0, 0, 2),
        EXIT,
    ]);
    assert_eq!(run(&list, &[&short]), Some(2));
}

#[test]
fn what_cannot_be_paid_for_is_not_copied() {
    // Entry 1 of a map becomes what entry 0 is.
    let copied = |bytes: u32| {
        let map = Array::create("copied", bytes, 2, false).unwrap();
        map.set(0, &vec![0x66; bytes as usize]).unwrap();
        let list = code(&[
            (0x62, 10, 0, -4, 1),
            (0x18, 1, 1, 0, map.number()),
            (0x00, 0, 0, 0, 0),
            (0xbf, 2, 10, 0, 0),
            (0x07, 2, 0, 0, -4),
            (0x18, 3, 2, 0, map.number()),
            (0x00, 0, 0, 0, 0),
            (0xb7, 4, 0, 0, 0),
            (0x85, 0, 0, 0, 2),
            (0xb7, 0, 0, 0, 2),
            EXIT,
        ]);
        let maps = vec![SharedMap::new(&map, false).unwrap()];
        let code = Code::new(&list, Context::Xdp, maps).unwrap();
        let mut instance = Instance::new(&code).unwrap();
        let verdict = instance.run(&FRAME, &Meta::default()).verdict;
        let mut last = [0; 8];
        assert!(instance.read_map(0, u64::from(bytes) * 2 - 8, &mut last));
        (verdict, last)
    };
    assert_eq!(copied(1 << 10), (Some(2), [0x66; 8]));
    assert_eq!(
        copied(32 << 20),
        (None, [0; 8]),
        "more than a frame may cost"
    );
}

#[test]
fn what_helpers_take_long_for_is_paid_for() {
    // Again and again: the sum of 64 bytes less that of 64 others.
    let sums = |times: i32| {
        let mut list: Vec<_> = (1..=8).map(|word| (0x7a, 10, 0, -8 * word, 0)).collect();
        list.extend([
            (0xb7, 6, 0, 0, times),
            (0xbf, 1, 10, 0, 0),
            (0x07, 1, 0, 0, -64),
            (0xb7, 2, 0, 0, 64),
            (0xbf, 3, 1, 0, 0),
            (0xb7, 4, 0, 0, 64),
            (0xb7, 5, 0, 0, 0),
            (0x85, 0, 0, 0, 28),
            (0x17, 6, 0, 0, 1),
            (0x55, 6, 0, -9, 0),
            (0xb7, 0, 0, 0, 2),
            EXIT,
        ]);
        code(&list)
    };
    // Looks at the clock.
    let looks = |times: i32| {
        code(&[
            (0xb7, 6, 0, 0, times),
            (0x85, 0, 0, 0, 5),
            (0x17, 6, 0, 0, 1),
            (0x55, 6, 0, -3, 0),
            (0xb7, 0, 0, 0, 2),
            EXIT,
        ])
    };
    for (short, long) in [(sums(500), sums(1000)), (looks(1000), looks(3000))] {
        // The kernel's verifier lets both pass.
        assert!(is_accepted(&long));
        assert_eq!(run(&short, &[]), Some(2));
        assert_eq!(run(&long, &[]), None);
    }
}

#[test]
fn a_frame_that_is_too_long_has_no_verdict() {
    let accepted = code(&[(0xb7, 0, 0, 0, 2), EXIT]);
    let code = Code::new(&accepted, Context::Xdp, Vec::new()).unwrap();
    let mut instance = Instance::new(&code).unwrap();
    let longest = vnplug_twin::MAX_FRAME as usize;
    let frame = vec![0; longest + 1];
    assert_eq!(
        instance.run(&frame[..longest], &Meta::default()).verdict,
        Some(2)
    );
    assert_eq!(instance.run(&frame, &Meta::default()).verdict, None);
    assert_eq!(instance.aborted(), 1);
}

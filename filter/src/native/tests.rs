use std::sync::atomic::Ordering;

use vnplug_testing::eventually;

use super::*;
use crate::{Instruction, MAX_INSTRUCTIONS, Trust};
use vnplug_bpf::code;

fn op(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

/// Accepts 100 bytes of a frame whose first four are `k`.
fn begins_with(k: u32) -> Program {
    let list = [
        op(code::LD_W_ABS, 0),
        Instruction {
            jf: 1,
            ..op(code::JEQ_K, k)
        },
        op(code::RET, 100),
        op(code::RET, 0),
    ];
    Program::from_instructions(&list, Trust::Guest).unwrap()
}

fn workshop(limit_bytes: u64) -> (Workshop, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let translator = Translator::new().unwrap();
    let workshop = Workshop::new(translator, Arc::clone(&counters), limit_bytes);
    (workshop, counters)
}

fn wanted(owner: &str, program: &Program) -> Wanted {
    let (instructions, slot) = program.parts();
    Wanted {
        owner: owner.to_owned(),
        instructions: Arc::clone(instructions),
        slot: Arc::clone(slot),
    }
}

fn make(workshop: &mut Workshop, owner: &str, programs: &[Program]) {
    for program in programs {
        workshop.translate(wanted(owner, program));
    }
    workshop.place();
}

#[test]
fn a_program_gets_native_code_that_gives_its_verdicts() {
    let (mut workshop, _) = workshop(1 << 20);
    let program = begins_with(0x0102_0304);
    let clone = program.clone();
    make(&mut workshop, "a", &[program]);
    assert!(clone.is_native());
    assert_eq!(clone.run(&[1, 2, 3, 4, 5], 5), 100);
    assert_eq!(clone.run(&[1, 2, 3, 5, 5], 5), 0);
    assert_eq!(clone.run(&[1, 2, 3], 5), 0, "cut before the load's end");
    assert_eq!(clone.run(&[], 0), 0);
}

#[test]
fn equal_programs_share_a_function_and_the_pages_go_with_the_last() {
    let (mut workshop, counters) = workshop(1 << 20);
    let mut programs: Vec<Program> = [7, 8, 7].map(begins_with).into();
    make(&mut workshop, "a", &programs);
    programs.push(begins_with(8));
    make(&mut workshop, "b", &programs[3..]);
    assert_eq!((counters.programs.now(), counters.bytes.now()), (4, 4096));
    assert!(programs.iter().all(Program::is_native));
    programs.truncate(1);
    assert_eq!((counters.programs.now(), counters.bytes.now()), (1, 4096));
    programs.clear();
    assert_eq!((counters.programs.now(), counters.bytes.now()), (0, 0));
}

#[test]
fn beyond_its_bytes_programs_stay_interpreted_and_are_counted() {
    let (mut workshop, counters) = workshop(4 * 4096);
    let filter = |k: u32| begins_with(0x0100_0000 + k);
    // Four owners fill four pages, alone in each; the fifth finds nothing left.
    let kept: Vec<Program> = (0..4).map(filter).collect();
    for (program, owner) in kept.iter().zip(["a", "b", "c", "d"]) {
        make(&mut workshop, owner, std::slice::from_ref(program));
        assert!(program.is_native());
    }
    let late = filter(9);
    make(&mut workshop, "e", std::slice::from_ref(&late));
    assert!(!late.is_native());
    assert_eq!(late.run(&[1, 0, 0, 9], 4), 100);
    assert_eq!(counters.refused.load(Ordering::Relaxed), 1);
    assert_eq!(counters.bytes.now(), 4 * 4096);
    drop(kept);
    make(&mut workshop, "e", std::slice::from_ref(&late));
    assert!(late.is_native(), "there is room again");
}

#[test]
fn without_memory_for_code_programs_stay_interpreted_and_are_counted() {
    // In a process of its own: the limit concerns all of it.
    let name = concat!(module_path!(), "::probe_without_memory");
    let (_, name) = name.split_once("::").unwrap();
    let done = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--test-threads=1", name])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by without_memory_for_code_programs_stay_interpreted_and_are_counted"]
fn probe_without_memory() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let (mut workshop, counters) = workshop(1 << 20);
    let programs: Vec<Program> = [7, 8].map(begins_with).into();
    // The control: with memory it works.
    make(&mut workshop, "a", &programs[..1]);
    workshop.translate(wanted("a", &programs[1]));
    let before = getrlimit(Resource::As);
    let mut none = before;
    none.current = Some(0);
    setrlimit(Resource::As, none).unwrap();
    workshop.place();
    setrlimit(Resource::As, before).unwrap();
    assert!(programs[0].is_native() && !programs[1].is_native());
    assert_eq!(programs[1].run(&[0, 0, 0, 8], 4), 100);
    assert_eq!(counters.failed.load(Ordering::Relaxed), 1);
    assert_eq!(
        counters.bytes.now(),
        4096,
        "what was not placed takes nothing"
    );
}

#[test]
fn one_owner_gets_a_fourth_and_others_still_theirs() {
    let (mut workshop, _) = workshop(16 * 4096);
    let programs: Vec<Program> = (0..5_000).map(|k| begins_with(0x0100_0000 + k)).collect();
    for few in programs.chunks(20) {
        make(&mut workshop, "greedy", few);
    }
    let native = programs.iter().filter(|it| it.is_native()).count();
    assert!((20..programs.len()).contains(&native), "{native}");
    let other = begins_with(3);
    make(&mut workshop, "modest", std::slice::from_ref(&other));
    assert!(other.is_native());
}

#[test]
fn the_thread_translates_what_it_is_handed_and_ends() {
    let jit = Jit::start(1 << 20);
    let programs: Vec<Program> = (0..50).map(begins_with).collect();
    for program in &programs {
        jit.submit("a", program);
        jit.submit("a", program);
    }
    eventually("all are native", || programs.iter().all(Program::is_native));
    let value = |name: &str| {
        let all = jit.counters();
        all.iter().find(|(it, _)| it == name).unwrap().1
    };
    assert_eq!((value("native_filters"), value("native_waiting")), (50, 0));
    let weak = jit
        .0
        .as_ref()
        .map(|handle| Arc::downgrade(&handle.0))
        .unwrap();
    drop(jit);
    eventually("the thread ends", || weak.strong_count() == 0);
    assert_eq!(
        programs[7].run(&[0, 0, 0, 7], 4),
        100,
        "code outlives the thread"
    );
}

#[test]
fn without_it_and_for_what_loops_there_is_the_interpreter() {
    let program = begins_with(1);
    Jit::off().submit("a", &program);
    assert!(Jit::off().counters().is_empty());
    let jit = Jit::start(1 << 20);
    let back = op(code::JA, (-2_i32).cast_unsigned());
    let list = [op(code::LD_LEN, 0), back, op(code::RET, 5)];
    let looping = Program::from_instructions(&list, Trust::Operator).unwrap();
    for program in [&Program::accept(5), &looping] {
        jit.submit("a", program);
        assert!(!program.parts().1.asked.load(Ordering::Relaxed));
    }
    assert_eq!(looping.run(&[], 0), 0);
}

#[test]
#[ignore = "a measurement: cargo test -p vnplugd ten_thousand_filters -- --ignored --nocapture"]
fn what_ten_thousand_filters_take() {
    let library = crate::libpcap::Library::load().unwrap();
    let programs: Vec<Program> = (0..10_000_u32)
        .map(|number| {
            let [_, b, c, d] = number.to_be_bytes();
            let text = format!("host 10.{b}.{c}.{d} and tcp port 80");
            let text = std::ffi::CString::new(text).unwrap();
            let list = library.compile(&text, 262_144, 1).unwrap();
            Program::from_instructions(&list, Trust::Guest).unwrap()
        })
        .collect();
    let mappings = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().count()
    };
    let (jit, before, begun) = (Jit::start(32 << 20), mappings(), Instant::now());
    for program in &programs {
        jit.submit("a", program);
    }
    let until = Instant::now() + Duration::from_secs(600);
    while !programs.iter().all(Program::is_native) {
        assert!(Instant::now() < until, "{:?}", jit.counters());
        std::thread::sleep(Duration::from_millis(10));
    }
    println!("{:?}: {:?}", begun.elapsed(), jit.counters());
    println!("{} mappings more", mappings() - before);
}

/// Programs of the greatest length that are hard on a compiler, by name.
fn hard() -> Vec<(&'static str, Vec<Instruction>)> {
    let n = MAX_INSTRUCTIONS as u32 - 1;
    let jump = |code, k, jt: u32, jf: u32| Instruction {
        code,
        jt: jt as u8,
        jf: jf as u8,
        k,
    };
    // No jump leads beyond the return at the end.
    let left = |at: u32, wish: u32| wish.min(n - 1 - at);
    let build = |make: &dyn Fn(u32) -> Instruction| -> Vec<Instruction> {
        (0..n).map(make).chain([op(code::RET_A, 0)]).collect()
    };
    vec![
        (
            "branches that cross",
            build(&|at| match at % 2 {
                0 => op(code::LD_B_ABS, at % 200),
                _ => jump(code::JEQ_K, at, left(at, 255), left(at, at % 97)),
            }),
        ),
        (
            "scratch words merged everywhere",
            build(&|at| match at % 4 {
                0 => op(code::LD_MEM, at / 4 % 16),
                1 => op(code::ADD_K, at << 16),
                2 => op(code::ST, at / 4 * 7 % 16),
                _ => jump(code::JGT_K, at << 20, left(at, at % 251), left(at, at % 13)),
            }),
        ),
        (
            "loads behind an X that changes",
            build(&|at| match at % 2 {
                0 => op(code::LD_B_IND, at << 12),
                _ => op(code::TAX, 0),
            }),
        ),
        (
            "divisions by X and shifts by X",
            build(&|at| match at % 3 {
                0 => op(code::DIV_X, 0),
                1 => op(code::LSH_X, 0),
                _ => op(code::MOD_X, 0),
            }),
        ),
        (
            "comparisons only",
            build(&|at| jump(code::JEQ_X, 0, left(at, at % 256), left(at, at * 31 % 256))),
        ),
    ]
}

#[test]
fn the_hardest_programs_are_translated_or_stay_interpreted() {
    for (name, list) in hard() {
        let program = Program::from_instructions(&list, Trust::Guest).expect(name);
        let begun = Instant::now();
        translate_now(std::slice::from_ref(&program));
        // With --nocapture: the time that one program can take from the others.
        println!("{name}: {:?}", begun.elapsed());
        for len in [0, 1, 60, 300] {
            let frame = vec![7; len];
            let verdict = program.interpret(&frame, 300);
            assert_eq!(Ok(program.run(&frame, 300)), verdict, "{name}");
        }
    }
}

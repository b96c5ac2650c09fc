//! Maps of ours do what the kernel's own do: random programs, by the kernel with its own maps, by the kernel with ours, and by the
//! daemon with the same ones. Needs `CAP_BPF`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vnplug_os::bpf::asm::{
    Alu, Asm, Cond, FP, Label, Operand, R0, R1, R2, R3, R4, R6, R7, R8, R9, Size,
};
use vnplug_os::bpf::{Array, Insn, Map, MapKind as Kernels, Program, ProgramKind, possible_cpus};
use vnplug_testing::Dice;

use super::{Side, weave};
use crate::check::{self, Context};
use crate::code::{Code, SharedMap};
use crate::hash::Layout;
use crate::instance::{Instance, Meta};
use crate::object::{MapKind, MapSpec};
use crate::per_cpu::Seats;
use Operand::{K, X};

mod forget;

/// Bytes of each frame that programs read: a key each.
const SEEN: u32 = 64;

fn spec(kind: MapKind, value_bytes: u32, entries: u32) -> MapSpec {
    MapSpec {
        name: "tested".into(),
        kind,
        value_bytes,
        entries,
        constant: false,
        is_variables: false,
        seed: 7,
        data: Vec::new(),
    }
}

/// An access of a random program: at this place of the frame is the key.
#[derive(Debug, Clone, Copy)]
enum Act {
    /// What is found is added to the result, and the second number to it, as one if that is odd.
    Look(u32, u32),
    /// With these flags, this number as the value.
    Put(u32, u32, u32),
    Remove(u32),
}

/// A program of these accesses, on a map with keys of `key_bytes`.
fn program(acts: &[Act], map: &Map, key_bytes: u32, value_bytes: u32) -> Vec<Insn> {
    let mut asm = Asm::default();
    let short = asm.label();
    asm.load(Size::Word, R6, R1, 0);
    asm.load(Size::Word, R2, R1, 4);
    asm.alu64(Alu::Mov, R3, X(R6));
    asm.alu64(Alu::Add, R3, K(SEEN));
    asm.jump_if(Cond::Gt, R3, X(R2), short);
    asm.alu64(Alu::Mov, R7, K(1));
    for act in acts {
        let (Act::Look(at, _) | Act::Put(at, ..) | Act::Remove(at)) = *act;
        for byte in 0..key_bytes as i16 {
            asm.load(Size::Byte, R1, R6, at as i16 + byte);
            asm.store(Size::Byte, FP, KEY + byte, R1);
        }
        asm.alu64(Alu::Mov, R2, X(FP));
        asm.alu64(Alu::Add, R2, K(i32::from(KEY).cast_unsigned()));
        asm.map(R1, map);
        asm.alu64(Alu::Mul, R7, K(31));
        match *act {
            Act::Look(_, add) => look(&mut asm, add),
            Act::Put(_, flags, number) => {
                for at in (0..value_bytes).step_by(8) {
                    asm.store_k(Size::Double, FP, VALUE + at as i16, number + at);
                }
                asm.alu64(Alu::Mov, R3, X(FP));
                asm.alu64(Alu::Add, R3, K(i32::from(VALUE).cast_unsigned()));
                asm.alu64(Alu::Mov, R4, K(flags));
                asm.call(2);
                asm.alu64(Alu::Add, R7, X(R0));
            }
            Act::Remove(_) => {
                asm.call(3);
                asm.alu64(Alu::Add, R7, X(R0));
            }
        }
    }
    asm.alu64(Alu::Mov, R0, X(R7));
    asm.alu64(Alu::Shr, R0, K(32));
    asm.alu64(Alu::Xor, R0, X(R7));
    asm.alu32(Alu::Mov, R0, X(R0));
    asm.exit();
    asm.bind(short);
    asm.alu64(Alu::Mov, R0, K(0));
    asm.exit();
    asm.finish().unwrap()
}

fn look(asm: &mut Asm, add: u32) {
    let absent: Label = asm.label();
    asm.call(1);
    asm.jump_if(Cond::Eq, R0, K(0), absent);
    asm.load(Size::Double, R8, R0, 0);
    asm.alu64(Alu::Add, R7, X(R8));
    asm.alu64(Alu::Mov, R9, K(add));
    match add % 2 {
        1 => asm.atomic_add(R0, R9),
        _ => {
            asm.alu64(Alu::Add, R8, X(R9));
            asm.store(Size::Double, R0, 0, R8);
        }
    }
    asm.bind(absent);
}

const KEY: i16 = -16;
const VALUE: i16 = -40;

/// The kernel's instance and the daemon's, on one map of ours.
fn both(
    acts: &[Act],
    (spec, array): (&MapSpec, &Array),
    key_bytes: u32,
    seats: &Arc<Seats>,
) -> (Program, Instance) {
    let insns = program(acts, array.map(), key_bytes, spec.value_bytes);
    both_of(&insns, (spec, array), seats)
}

fn both_of(
    insns: &[Insn],
    (spec, array): (&MapSpec, &Array),
    seats: &Arc<Seats>,
) -> (Program, Instance) {
    let checked = check::check(insns, Context::Xdp).unwrap();
    let woven = |side| weave(insns, &checked, &[(spec, array)], side).unwrap();
    let kernel = Program::load(ProgramKind::Xdp, "woven", &woven(Side::Kernel), false)
        .unwrap_or_else(|error| panic!("{error}"));
    let shared = vec![SharedMap::new(array, false).unwrap()];
    let code = Code::seated(
        &woven(Side::Daemon),
        Context::Xdp,
        shared,
        Some(Arc::clone(seats)),
    );
    (kernel, Instance::new(&code.unwrap()).unwrap())
}

fn frame(dice: &mut Dice, keys: u64, key_bytes: u32) -> Vec<u8> {
    let mut frame = vec![0; 80];
    let each = key_bytes as usize;
    for at in (0..SEEN as usize - each).step_by(each) {
        // Few, so that they meet again; spread over the key's bytes.
        let number = dice.below(keys) as u32;
        frame[at] = number as u8;
        frame[at + each - 1] ^= (number >> 8) as u8;
    }
    frame
}

fn acts(dice: &mut Dice, key_bytes: u32, removes: bool) -> Vec<Act> {
    let places = u64::from((SEEN - key_bytes) / key_bytes);
    (0..3 + dice.below(5))
        .map(|_| {
            let at = dice.below(places) as u32 * key_bytes;
            let number = dice.below(1000) as u32;
            match dice.below(4) {
                0 | 1 => Act::Look(at, number),
                2 if removes => Act::Remove(at),
                _ => Act::Put(at, [0, 0, 1, 2, 3][dice.below(5) as usize], number),
            }
        })
        .collect()
}

#[test]
fn a_hash_does_what_the_kernels_does_whoever_runs_it() {
    // Sometimes more keys than there is room for.
    let sizes = [(64, 60), (64, 200), (1, 3), (1000, 900)];
    as_the_kernels(Kernels::Hash, sizes, 1);
}

#[test]
fn a_hash_that_forgets_does_what_the_kernels_does_as_long_as_neither_is_full() {
    // Which key is forgotten, and when, each of them has in its own way.
    let sizes = [(4096, 60), (4096, 200), (4096, 3), (8192, 900)];
    as_the_kernels(Kernels::LruHash, sizes, 4);
}

/// Random programs on maps of these sizes (entries, and keys that are used); a part of the usual number of runs.
fn as_the_kernels(kernels: Kernels, sizes: [(u32, u64); 4], part: usize) {
    let seed = vnplug_frame::witness::seed("hash");
    let forgets = kernels == Kernels::LruHash;
    let mut dice = Dice(seed);
    let mut runs = 0;
    let frames = match std::env::var_os("VNPLUG_LONG") {
        None => 1_250,
        Some(_) => 5_000,
    } / part;
    for round in 0..50_u32 {
        let key_bytes = [4, 1, 8, 13, 16][round as usize % 5];
        let value_bytes = [8, 24][round as usize % 2];
        let (entries, keys) = sizes[round as usize % 4];
        let keys = if key_bytes == 1 { keys.min(250) } else { keys };
        let spec = spec(MapKind::Hash { key_bytes, forgets }, value_bytes, entries);
        let layout = Layout::of(&spec, key_bytes, forgets);
        let array = Array::create("tested", layout.bucket(), layout.array() as u32, false).unwrap();
        let own = (key_bytes as usize, value_bytes as usize);
        let real = Map::create(kernels, "tested", own, entries).unwrap();
        let seats = Arc::default();
        for _ in 0..4 {
            let acts = acts(&mut dice, key_bytes, true);
            let insns = program(&acts, &real, key_bytes, value_bytes);
            let theirs = Program::load(ProgramKind::Xdp, "theirs", &insns, false)
                .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let (kernel, mut daemon) = both(&acts, (&spec, &array), key_bytes, &seats);
            for number in 0..frames {
                let frame = frame(&mut dice, keys, key_bytes);
                let wanted = theirs.test(&frame).unwrap();
                // By one and the other in turns, each on what the other left.
                let ours = match number % 2 {
                    0 => Some(kernel.test(&frame).unwrap().cast_signed()),
                    _ => daemon.run(&frame, &Meta::default()).verdict,
                };
                assert_eq!(
                    ours,
                    Some(wanted.cast_signed()),
                    "seed {seed}, round {round}, frame {number}: {acts:?}"
                );
                runs += 1;
            }
        }
    }
    println!("{runs} runs");
    assert_eq!(runs, 200 * frames);
}

#[test]
fn an_array_per_cpu_does_what_the_kernels_does_in_places_of_each_ones_own() {
    let seed = vnplug_frame::witness::seed("per cpu");
    let mut dice = Dice(seed);
    stay();
    let seats: Arc<Seats> = Arc::default();
    let cpus = possible_cpus().unwrap() as u32;
    let mut runs = 0;
    for _ in 0..20_u32 {
        let entries = 200;
        let spec = spec(MapKind::PerCpu, 8, entries);
        let places = crate::per_cpu::places(cpus);
        let array = Array::create("tested", 8, entries * places, false).unwrap();
        let real = || Map::create(Kernels::PerCpuArray, "tested", (4, 8), entries).unwrap();
        let reals = [real(), real()];
        for _ in 0..5 {
            let acts = acts(&mut dice, 4, false);
            let theirs = reals.each_ref().map(|map| {
                let insns = program(&acts, map, 4, 8);
                Program::load(ProgramKind::Xdp, "theirs", &insns, false).unwrap()
            });
            let (kernel, mut daemon) = both(&acts, (&spec, &array), 4, &seats);
            for number in 0..2_000_usize {
                let frame = frame(&mut dice, 220, 4);
                let wanted = theirs[number % 2].test(&frame).unwrap();
                let ours = match number % 2 {
                    0 => Some(kernel.test(&frame).unwrap().cast_signed()),
                    _ => daemon.run(&frame, &Meta::default()).verdict,
                };
                assert_eq!(ours, Some(wanted.cast_signed()), "seed {seed}: {acts:?}");
                runs += 1;
            }
        }
    }
    println!("{runs} runs");
    // As many instances as there are seats, and one more.
    let acts = [Act::Look(0, 1)];
    let spec = spec(MapKind::PerCpu, 8, 4);
    let array = Array::create("tested", 8, 4 * crate::per_cpu::places(cpus), false).unwrap();
    let insns = program(&acts, array.map(), 4, 8);
    let checked = check::check(&insns, Context::Xdp).unwrap();
    let woven = weave(&insns, &checked, &[(&spec, &array)], Side::Daemon).unwrap();
    let shared = vec![SharedMap::new(&array, false).unwrap()];
    let code = Code::seated(&woven, Context::Xdp, shared, Some(Arc::clone(&seats))).unwrap();
    let mut all: Vec<_> = (0..crate::per_cpu::SEATS)
        .map(|_| Instance::new(&code).unwrap())
        .collect();
    let error = Instance::new(&code).unwrap_err().to_string();
    assert!(error.contains("32 instances"), "{error}");
    all.pop();
    assert!(Instance::new(&code).is_ok());
}

/// This thread stays on the CPU where it is.
fn stay() {
    let mut set = rustix::thread::CpuSet::new();
    set.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}

/// Counts in the entry of the frame's key, which it makes if it is not there; 1: it did.
fn counter(map: &Map) -> Vec<Insn> {
    let mut asm = Asm::default();
    let (short, found, failed) = (asm.label(), asm.label(), asm.label());
    asm.load(Size::Word, R6, R1, 0);
    asm.load(Size::Word, R2, R1, 4);
    asm.alu64(Alu::Mov, R3, X(R6));
    asm.alu64(Alu::Add, R3, K(SEEN));
    asm.jump_if(Cond::Gt, R3, X(R2), short);
    asm.load(Size::Double, R7, R6, 0);
    asm.store(Size::Double, FP, KEY, R7);
    let find = |asm: &mut Asm| {
        asm.alu64(Alu::Mov, R2, X(FP));
        asm.alu64(Alu::Add, R2, K(i32::from(KEY).cast_unsigned()));
        asm.map(R1, map);
    };
    find(&mut asm);
    asm.call(1);
    asm.jump_if(Cond::Ne, R0, K(0), found);
    asm.store_k(Size::Double, FP, VALUE, 0);
    asm.store(Size::Double, FP, VALUE + 8, R7);
    find(&mut asm);
    asm.alu64(Alu::Mov, R3, X(FP));
    asm.alu64(Alu::Add, R3, K(i32::from(VALUE).cast_unsigned()));
    asm.alu64(Alu::Mov, R4, K(1));
    asm.call(2);
    find(&mut asm);
    asm.call(1);
    asm.jump_if(Cond::Eq, R0, K(0), failed);
    asm.bind(found);
    // The value names the key: another one would be another slot's.
    asm.load(Size::Double, R1, R0, 8);
    asm.jump_if(Cond::Ne, R1, X(R7), short);
    asm.alu64(Alu::Mov, R1, K(1));
    asm.atomic_add(R0, R1);
    asm.alu64(Alu::Mov, R0, K(1));
    asm.exit();
    asm.bind(failed);
    asm.alu64(Alu::Mov, R0, K(2));
    asm.exit();
    asm.bind(short);
    asm.alu64(Alu::Mov, R0, K(0));
    asm.exit();
    asm.finish().unwrap()
}

#[test]
fn both_insert_at_the_same_time_and_no_key_is_there_twice() {
    let (layout, theirs, ours, seen, sum) = insert_by_both(1 << 15, false);
    assert_eq!(
        (theirs[0], ours[0]),
        (0, 0),
        "a slot of another key was found"
    );
    assert!(seen < u64::from(layout.slots()));
    assert_eq!(sum, theirs[1] + ours[1]);
}

#[test]
fn both_insert_at_the_same_time_where_keys_are_forgotten_and_none_is_there_twice() {
    let (layout, theirs, ours, seen, sum) = insert_by_both(1 << 11, true);
    // Nearly all slots are taken by then. What was counted for keys that were forgotten is gone.
    assert!(seen > u64::from(layout.slots()) * 9 / 10, "{seen}");
    assert!(sum <= theirs[1] + ours[1]);
}

/// Both instances count frames by key, of which there are 20,000, in a map of `entries`: verdicts of the kernel and the daemon,
/// keys that are there, and the sum of their values.
fn insert_by_both(entries: u32, forgets: bool) -> (Layout, [u64; 3], [u64; 3], u64, u64) {
    const KEYS: u64 = 20_000;
    const EACH: u64 = 300_000;
    let kind = MapKind::Hash {
        key_bytes: 8,
        forgets,
    };
    let spec = spec(kind, 16, entries);
    let layout = Layout::of(&spec, 8, forgets);
    let array = Array::create("tested", layout.bucket(), layout.array() as u32, false).unwrap();
    let seats = Arc::default();
    let (kernel, mut daemon) = both_of(&counter(array.map()), (&spec, &array), &seats);
    let go = AtomicBool::new(false);
    let frame = |number: u64| {
        let mut frame = vec![0; 80];
        frame[..8].copy_from_slice(&number.to_ne_bytes());
        frame
    };
    // Both come to new keys at about the same time, again and again.
    let key = |dice: &mut Dice, turn: u64| dice.below(1 + turn * KEYS / EACH);
    let (theirs, ours) = std::thread::scope(|scope| {
        let theirs = scope.spawn(|| {
            let mut dice = Dice(1);
            while !go.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            let run = |turn| kernel.test(&frame(key(&mut dice, turn))).unwrap();
            tally((0..EACH).map(run))
        });
        go.store(true, Ordering::Release);
        let mut dice = Dice(2);
        let mut run = |turn| {
            let frame = frame(key(&mut dice, turn));
            daemon
                .run(&frame, &Meta::default())
                .verdict
                .unwrap()
                .cast_unsigned()
        };
        let ours = tally((0..EACH).map(&mut run));
        (theirs.join().unwrap(), ours)
    });
    println!("kernel: {theirs:?}, daemon: {ours:?} (wrong, counted, refused)");
    let mut seen = std::collections::HashSet::new();
    let mut sum = 0;
    for slot in 0..layout.slots() {
        let mut bytes = vec![0; layout.slot() as usize];
        assert!(daemon.read_map(0, layout.place(slot), &mut bytes));
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let key = if forgets { 16 } else { 8 };
        if word(0) & 3 == 2 {
            assert!(seen.insert(word(key)), "key {} is there twice", word(key));
            sum += word(key + 8);
        } else {
            assert_eq!(word(0) & 3, 0);
        }
    }
    let mut count = [0; 8];
    assert!(daemon.read_map(0, 0, &mut count));
    let seen = seen.len() as u64;
    assert_eq!(u64::from_ne_bytes(count), seen);
    (layout, theirs, ours, seen, sum)
}

/// How many verdicts are 0, 1, 2.
fn tally(verdicts: impl Iterator<Item = u32>) -> [u64; 3] {
    let mut all = [0; 3];
    verdicts.for_each(|it| all[it as usize] += 1);
    all
}

/// Nanoseconds of a processor that this thread has had.
fn spent() -> u128 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    spent.tv_sec as u128 * 1_000_000_000 + spent.tv_nsec as u128
}

#[test]
#[ignore = "measures"]
fn cost_of_a_hash() {
    let entries = 1 << 14;
    for (kernels, forgets) in [(Kernels::Hash, false), (Kernels::LruHash, true)] {
        cost_of(kernels, forgets, entries);
    }
}

fn cost_of(kernels: Kernels, forgets: bool, entries: u32) {
    let kind = MapKind::Hash {
        key_bytes: 16,
        forgets,
    };
    let spec = spec(kind, 8, entries);
    let layout = Layout::of(&spec, 16, forgets);
    let array = Array::create("tested", layout.bucket(), layout.array() as u32, false).unwrap();
    let real = Map::create(kernels, "tested", (16, 8), entries).unwrap();
    let seats = Arc::default();
    for (what, act) in [
        ("lookup", Act::Look(0, 1)),
        ("update", Act::Put(0, 0, 1)),
        ("nothing", Act::Look(0, 1)),
    ] {
        let acts: Vec<Act> = match what {
            "nothing" => Vec::new(),
            _ => vec![act],
        };
        let insns = program(&acts, &real, 16, 8);
        let theirs = Program::load(ProgramKind::Xdp, "theirs", &insns, false).unwrap();
        let (kernel, mut daemon) = both(&acts, (&spec, &array), 16, &seats);
        let frame = vec![1; 80];
        let put = both(&[Act::Put(0, 0, 1)], (&spec, &array), 16, &seats);
        put.0.test(&frame).unwrap();
        real.update(&[1; 16], &[0; 8]).unwrap();
        let mut of: [Vec<u128>; 3] = Default::default();
        for _ in 0..9 {
            of[0].push(theirs.test_repeatedly(&frame, 1_000_000).unwrap().1.into());
            of[1].push(kernel.test_repeatedly(&frame, 1_000_000).unwrap().1.into());
            let begun = spent();
            for _ in 0..1_000_000 {
                daemon.run(&frame, &Meta::default());
            }
            of[2].push((spent() - begun) / 1_000_000);
        }
        of.iter_mut().for_each(|it| it.sort_unstable());
        println!(
            "{kernels:?}, {what}: the kernel's own {} ns, ours in the kernel {} ns, in the daemon {} ns",
            of[0][4], of[1][4], of[2][4]
        );
    }
}

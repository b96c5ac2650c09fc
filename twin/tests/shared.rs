//! Words of a map that several instances write: a program's loads and stores are done, each of them.
//!
//! Each test has a control with an atomic operation in the place of what could be left out. Needs `CAP_BPF`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vnplug_os::bpf::{Array, Insn};
use vnplug_twin::{Code, Context, Instance, Meta, SharedMap};

type Words = (u8, u8, u8, i16, i32);

const EXIT: Words = (0x95, 0, 0, 0, 0);
const VALUE_BYTES: u32 = 512;
/// As long as is waited for what may happen at any time.
const PATIENCE: Duration = Duration::from_secs(20);

fn instance(list: &[Words], map: &Array) -> Instance {
    let insns: Vec<_> = list
        .iter()
        .map(|&(code, dst, src, off, imm)| Insn::new(code, dst, src, off, imm))
        .collect();
    let maps = vec![SharedMap::new(map, false).expect("a descriptor")];
    let code = Code::new(&insns, Context::Xdp, maps).expect("fit for the daemon");
    Instance::new(&code).expect("memory")
}

fn run(instance: &mut Instance) -> i32 {
    let run = instance.run(&[0x5a; 64], &Meta::default());
    run.verdict.expect("it ends")
}

/// r6 = the map's first word
fn word(map: &Array) -> [Words; 2] {
    [(0x18, 6, 2, 0, map.number()), (0x00, 0, 0, 0, 0)]
}

/// Adds the map's other words to r4, so that others have the time to write. Nothing but loads stays between two loads, as it stands.
fn wait() -> impl Iterator<Item = Words> {
    (1..VALUE_BYTES / 8).flat_map(|at| [(0x79, 3, 6, 8 * at as i16, 0), (0x0f, 4, 3, 0, 0)])
}

/// Says whether `seen` was ever true while `other` was run again and again.
fn while_running(mut other: Instance, mut seen: impl FnMut() -> bool) -> bool {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                run(&mut other);
            }
        });
        let begun = Instant::now();
        let mut found = false;
        while !found && begun.elapsed() < PATIENCE {
            found = seen();
        }
        over.store(true, Ordering::Relaxed);
        found
    })
}

#[test]
fn a_word_that_is_loaded_twice_may_differ() {
    let map = Array::create("twice", VALUE_BYTES, 1, false).unwrap();
    // Again and again: the word, and a while later the word again. Counts when they differed.
    let reader = |second: &[Words]| {
        let mut list = word(&map).to_vec();
        list.extend([(0xb7, 0, 0, 0, 0), (0xb7, 7, 0, 0, 100)]);
        let begin = list.len() as i16;
        list.extend([(0x79, 1, 6, 0, 0), (0xbf, 4, 1, 0, 0)]);
        list.extend(wait());
        list.extend(second);
        list.extend([
            (0x7b, 10, 4, -8, 0),
            (0x1d, 2, 1, 1, 0),
            (0x07, 0, 0, 0, 1),
            (0x17, 7, 0, 0, 1),
        ]);
        list.push((0x55, 7, 0, begin - list.len() as i16 - 1, 0));
        list.push(EXIT);
        instance(&list, &map)
    };
    let writer = || {
        let mut list = word(&map).to_vec();
        list.extend([(0xb7, 1, 0, 0, 1), (0xb7, 0, 0, 0, 10_000)]);
        list.extend([
            (0xdb, 6, 1, 0, 0),
            (0x17, 0, 0, 0, 1),
            (0x55, 0, 0, -3, 0),
            EXIT,
        ]);
        instance(&list, &map)
    };
    let add_nothing = [(0xb7, 2, 0, 0, 0), (0xdb, 6, 2, 0, 0x01)];
    let load = [(0x79, 2, 6, 0, 0)];
    for (how, second) in [("added to", &add_nothing[..]), ("loaded", &load[..])] {
        let mut reader = reader(second);
        assert!(
            while_running(writer(), || run(&mut reader) > 0),
            "{how} again, the word never differs"
        );
        // Nobody writes now.
        assert_eq!(run(&mut reader), 0, "{how}");
    }
}

#[test]
fn of_two_stores_to_a_word_the_first_is_seen() {
    let map = Array::create("first", VALUE_BYTES, 1, false).unwrap();
    // Again and again: 1, and a while later 2.
    let writer = |first: Words| {
        let mut list = word(&map).to_vec();
        list.push((0xb7, 7, 0, 0, 100));
        let begin = list.len() as i16;
        list.extend([(0xb7, 1, 0, 0, 1), (0xbf, 4, 7, 0, 0), first]);
        // What the second one stores is there late.
        list.extend((0..100).flat_map(|_| [(0x27, 4, 0, 0, 0x5bd1_e995), (0x07, 4, 0, 0, 1)]));
        list.extend([
            (0x57, 4, 0, 0, 0),
            (0x47, 4, 0, 0, 2),
            (0x7b, 6, 4, 0, 0),
            (0x17, 7, 0, 0, 1),
        ]);
        list.push((0x55, 7, 0, begin - list.len() as i16 - 1, 0));
        list.extend([(0xb7, 0, 0, 0, 2), EXIT]);
        instance(&list, &map)
    };
    let exchange = (0xdb, 6, 1, 0, 0xe1);
    let store = (0x7b, 6, 1, 0, 0);
    for (how, first) in [("exchanged", exchange), ("stored", store)] {
        let reader = instance(&[(0xb7, 0, 0, 0, 2), EXIT], &map);
        let seen = || {
            let mut word = [0; 8];
            assert!(reader.read_map(0, 0, &mut word));
            u64::from_ne_bytes(word) == 1
        };
        assert!(while_running(writer(first), seen), "{how}, 1 is never seen");
    }
}

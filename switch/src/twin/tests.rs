//! The kernel instance by test runs, beside the daemon's table, on the same memory.

mod charges;
mod heard;
mod torn;

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use super::*;
use crate::table::{Key, Learned};

/// Both instances, without names and interfaces: what comes by the loopback interface comes from port 1.
struct Both {
    state: Shared,
    layout: Layout,
    classifier: Arc<Program>,
    judge: Judge,
    table: Table,
    /// Keeps the memory.
    _slots: Shared,
}

const LIMITS: Limits = Limits {
    all: 4096,
    each: 4096,
    own: 16,
    age_s: 300,
    hold_s: 0,
};
/// The kernel's number of the loopback interface, by which test runs come.
const LOOPBACK: u64 = 1;
/// What the classifier says of a frame that is forwarded (`TC_ACT_REDIRECT`).
const REDIRECT: u32 = 7;

impl Both {
    /// `None`: who is not root may not load programs.
    fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: loads programs into the kernel, which takes root");
            return None;
        }
        let layout = Layout::new(Table::places_of(LIMITS), 8).unwrap();
        let shape = Shape {
            entry_bytes: Slots::BYTES as u32,
            entries: layout.slots,
        };
        let state = Shared::create("test_state", layout.shape()).unwrap();
        let slots = Shared::create("test_table", shape).unwrap();
        let secret = Table::new_secret();
        layout.found(&state, secret, 1);
        state.write(header::LONGEST, 1514);
        state.write(header::AGE, LIMITS.age_s.into());
        state.write(door_at(LOOPBACK), LOOPBACK | 1 << 32);
        // Port 3 is a machine's: the kernel does not reach it.
        for (number, index) in [(1, LOOPBACK), (2, 2), (4, 4)] {
            state.write(layout.port(number) + part::WORD, index);
        }
        let parts = Parts {
            state: &state,
            table: &slots,
            layout,
        };
        let load = |kind, code: Vec<_>| Program::load(kind, "test", &code, false).unwrap();
        load(ProgramKind::SocketFilter, parts.gate(MAX_SNAPLEN).unwrap());
        let insns = parts.classifier().unwrap();
        let judge = Judge::new(&insns, [&state, &slots]).unwrap();
        let classifier = Arc::new(load(ProgramKind::Classifier, insns));
        let memory = slots.region().part(0, slots.region().len()).unwrap();
        let mut table = Table::take_over(LIMITS, memory, secret, |_| false);
        (1..=4).for_each(|port| table.set_uplink(port, true));
        Some(Self {
            state,
            layout,
            classifier,
            judge,
            table,
            _slots: slots,
        })
    }

    fn out(&self, number: Number) -> u64 {
        self.state.read(self.layout.port(number) + part::OUT_FRAMES)
    }

    /// Where the kernel instance puts a frame: its port, or nowhere.
    fn run(&self, from: u32, to: u32) -> Option<Number> {
        let before = [2, 4].map(|number| self.out(number));
        let verdict = self.classifier.test(&frame(from, to)).unwrap();
        let after = [2, 4].map(|number| self.out(number));
        match (verdict, after[0] - before[0], after[1] - before[1]) {
            (REDIRECT, 1, 0) => Some(2),
            (REDIRECT, 0, 1) => Some(4),
            (program::SHOT, 0, 0) => None,
            other => panic!("{other:?}"),
        }
    }

    /// Where the daemon's instance puts a frame of port 1.
    fn judge(&mut self, from: u32, to: u32) -> Option<Number> {
        match self.judge.ask(1, (&frame(from, to), 64)) {
            Verdict::Forward(to) => Some(to),
            Verdict::Refer => None,
            Verdict::Policed => panic!("nothing is policed"),
        }
    }

    /// Where the daemon's table says that the kernel instance puts it.
    fn find(&self, from: u32, to: u32, now_s: u32) -> Option<Number> {
        let [from, to] = [from, to].map(|it| self.table.find(key(it), now_s));
        to.filter(|to| from == Some(1) && [2, 4].contains(to))
    }
}

fn address(station: u32) -> [u8; 6] {
    let [a, b, c, d] = station.to_be_bytes();
    [2, 0, a, b, c, d]
}

fn key(station: u32) -> Key {
    Key::new(address(station), 0)
}

fn frame(from: u32, to: u32) -> [u8; 64] {
    let mut frame = [0; 64];
    frame[..6].copy_from_slice(&address(to));
    frame[6..12].copy_from_slice(&address(from));
    frame
}

/// The clock of both.
fn now_s() -> u32 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u32
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as u32
    }
}

#[test]
fn what_one_instance_knows_the_other_does_too_in_a_million_alternating_lookups() {
    let Some(mut both) = Both::new() else {
        return;
    };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut forwarded, mut lookups, mut far) = (0, 0_u64, 0);
    let began = Instant::now();
    while lookups < 1_000_000 {
        let now = now_s();
        let [station, port] = [random.next() % 3000, random.next()];
        match random.next() % 16 {
            0..4 => drop(both.table.learn(key(station), (port % 4) as u16 + 1, now)),
            4 if port % 16 == 0 => {
                // Heard long ago.
                both.table
                    .learn(key(station), (port % 4) as u16 + 1, now - 301);
            }
            5 => both.table.sweep(now, 64),
            6 if port % 4096 == 0 => both.table.forget((port >> 12) as u16 % 4 + 1),
            _ => {
                let from = random.next() % 3000;
                let ours = both.find(from, station, now);
                let theirs = both.run(from, station);
                // The daemon's own instance reaches machines, too.
                let [source, to] = [from, station].map(|it| both.table.find(key(it), now));
                let wanted = to.filter(|to| source == Some(1) && *to != 1);
                let here = both.judge(from, station);
                lookups += 2;
                forwarded += u64::from(theirs.is_some());
                let is_far = [from, station]
                    .iter()
                    .any(|it| both.table.distance(key(*it)) >= program::PROBES as usize);
                match is_far {
                    true => far += 1,
                    // The second may have changed between the two.
                    false => assert!(
                        (ours, wanted) == (theirs, here) || now_s() != now,
                        "{ours:?} {theirs:?}, {wanted:?} {here:?}"
                    ),
                }
            }
        }
    }
    // Counters are exact, and of one memory.
    let in_frames = both.state.read(both.layout.port(1) + part::IN_FRAMES);
    assert_eq!(in_frames, forwarded);
    assert_eq!(both.out(2) + both.out(4), forwarded);
    let bytes = both.state.read(both.layout.port(1) + part::IN_BYTES);
    assert_eq!(bytes, forwarded * 64);
    assert!(forwarded > 50_000 && far < 10_000, "{forwarded} {far}");
    println!(
        "{lookups} lookups, {forwarded} forwarded, {far} far, in {:?}",
        began.elapsed()
    );
}

#[test]
fn a_station_that_only_the_kernel_hears_does_not_age_and_one_that_nobody_hears_does() {
    let Some(mut both) = Both::new() else {
        return;
    };
    let now = now_s();
    // Heard 200 seconds ago, of 300.
    for (station, port) in [(1, 1), (2, 2)] {
        both.table.learn(key(station), port, now - 200);
    }
    assert_eq!(both.run(1, 2), Some(2));
    let age = |both: &Both, station| {
        let mut entries = both.table.entries(now);
        entries.find(|it| it.key == key(station)).unwrap().age_s
    };
    assert!(age(&both, 1) <= 1 && age(&both, 2) >= 199);
    // A hundred seconds later one of them is forgotten.
    both.table.sweep(now + 150, usize::MAX);
    let find = |station| both.table.find(key(station), now + 150);
    assert_eq!((find(1), find(2)), (Some(1), None));
    assert_eq!(both.run(1, 2), None);
}

#[test]
fn frames_that_only_the_daemon_can_judge_are_upcalls() {
    let Some(mut both) = Both::new() else {
        return;
    };
    let now = now_s();
    for (station, port) in [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1)] {
        both.table.learn(key(station), port, now);
    }
    let lost = |both: &Both| both.state.read(header::LOST);
    assert_eq!(both.run(1, 2), Some(2));
    // Unknown, of a machine, back where it came from; from nobody, from another port's.
    let upcalls = [(1, 9), (1, 3), (1, 5), (9, 2), (2, 4)];
    for (from, to) in upcalls {
        assert_eq!(both.run(from, to), None, "{from} to {to}");
    }
    assert_eq!(lost(&both), upcalls.len() as u64);
    let verdict = |frame: &[u8]| both.classifier.test(frame).unwrap();
    let mut group = frame(1, 2);
    group[0] |= 1;
    let mut source = frame(1, 2);
    source[6] |= 1;
    let mut long = vec![0; 1515];
    long[..64].copy_from_slice(&frame(1, 2));
    assert_eq!(
        [&group[..], &source, &long].map(verdict),
        [program::SHOT; 3]
    );
    // The control: as long as it may be.
    assert_eq!(verdict(&long[..1514]), REDIRECT);
    // Ports whose settings the kernel does not know.
    for number in [1, 2] {
        let word = both.layout.port(number) + part::WORD;
        both.state
            .write(word, u64::from(number) | u64::from(UPCALL) << 32);
        assert_eq!(both.run(1, 2), None);
        both.state.write(word, u64::from(number));
        assert_eq!(both.run(1, 2), Some(2));
    }
}

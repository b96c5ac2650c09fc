//! A loss of power after every operation of packing, faults at every call, and both.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use super::*;
use crate::disk::{Fault, Image, Sim};

const DIR: &str = "/r";

/// A recording on a disk in memory, and the packets in it: all of them are acknowledged.
struct Bench {
    lab: Lab,
    how: How,
    recorded: Image,
    packets: Answer,
    /// Images that were looked at.
    seen: BTreeSet<u64>,
}

impl Bench {
    fn new(name: &str, (level, sealed): (Option<i32>, bool), packets: &[u64]) -> Self {
        let lab = Lab::new(name);
        for (sequence, &packets) in (0..).zip(packets) {
            lab.record(sequence..sequence + 1, packets);
        }
        let content = |name: String| {
            (
                Path::new(DIR).join(&name),
                fs::read(lab.path(name)).unwrap(),
            )
        };
        let recorded = lab.names().into_iter().map(content).collect();
        let how = lab.how(level, sealed);
        let (packets, ..) = lab.ask("");
        Self {
            lab,
            how,
            recorded,
            packets,
            seen: BTreeSet::new(),
        }
    }

    /// A disk with these files, all of them synced.
    fn sim(files: &Image) -> Sim {
        let mut sim = Sim::new(1 << 30);
        for (path, content) in files {
            sim.store(path, content).unwrap();
        }
        sim.sync_dir(Path::new(DIR)).unwrap();
        sim
    }

    fn job(&self, sim: &Sim) -> (Job, Arc<Ledger>) {
        job_on(Box::new(sim.clone()), Path::new(DIR), self.how.clone())
    }

    /// Each packet can be read once.
    fn check(&self, image: &Image, state: &str) {
        self.lab.empty();
        for (path, content) in image {
            let name = path.file_name().unwrap().to_string_lossy();
            fs::write(self.lab.path(name), content).unwrap();
        }
        let (packets, _, problems) = self.lab.ask("");
        assert!(problems.is_empty(), "{state}: {problems:?}");
        assert!(
            packets == self.packets,
            "{state}: {} packets",
            packets.len()
        );
    }

    /// Packed is all of it, and nothing else is there; flows of a segment that is not encrypted may be,
    /// as nobody takes them for those of the packed one.
    fn check_done(&self, image: &Image, state: &str) {
        self.check(image, state);
        let suffix = self.how.packing().suffix();
        let index = if self.how.packing().age {
            ".vnx.age"
        } else {
            ".vnx"
        };
        for name in self.lab.names() {
            let mut right = name.ends_with(&format!(".pcapng{suffix}")) || name.ends_with(index);
            right |= !self.how.packing().age && name.ends_with(".flows.parquet");
            assert!(right, "{state}: {name}");
        }
    }

    /// What a loss of power leaves can be read, and the next recorder packs it.
    fn crash(&mut self, sim: &Sim, operations: usize, part: u32) {
        let (_, image) = sim.crash(operations, part);
        let mut hasher = DefaultHasher::new();
        image.hash(&mut hasher);
        if !self.seen.insert(hasher.finish()) {
            return;
        }
        let state = format!("{operations} operations, {part}");
        self.check(&image, &state);
        let sim = Self::sim(&image);
        // As it does at its start.
        for path in image
            .keys()
            .filter(|path| path.to_string_lossy().ends_with(".part"))
        {
            sim.clone().remove(path).unwrap();
        }
        let (mut job, books) = self.job(&sim);
        while job.round(Instant::now(), true, &mut || true) {}
        assert_eq!(books.status().archive.unwrap().trouble, "", "{state}");
        self.check_done(&sim.files(), &state);
    }
}

#[test]
fn what_was_acknowledged_survives_a_crash_after_every_operation_of_packing() {
    // Operations of two segments; the first is more than one write if it is not compressed.
    for (level, sealed, least) in [(Some(1), false, 18), (Some(1), true, 32), (None, true, 33)] {
        let name = format!("crash-{least}");
        let mut bench = Bench::new(&name, (level, sealed), &[600, 20]);
        let sim = Bench::sim(&bench.recorded);
        let before = sim.operations();
        let (mut job, _) = bench.job(&sim);
        while job.round(Instant::now(), false, &mut || true) {}
        bench.check_done(&sim.files(), "without a crash");
        for operations in before..=sim.operations() {
            for part in [0, 1000].into_iter().chain((1..20).map(|part| part * 50)) {
                bench.crash(&sim, operations, part);
            }
        }
        assert!(sim.operations() >= before + least);
        assert!(bench.seen.len() > 20, "{}", bench.seen.len());
    }
}

#[test]
fn every_call_of_packing_may_fail_and_the_power_with_it() {
    for sealed in [false, true] {
        let mut bench = Bench::new(&format!("fail-{sealed}"), (Some(1), sealed), &[50, 20]);
        let whole = Bench::sim(&bench.recorded);
        let begin = whole.calls();
        let (mut job, _) = bench.job(&whole);
        while job.round(Instant::now(), false, &mut || true) {}
        for at in begin..whole.calls() {
            for (errno, short) in [(5, 1000), (28, 0)] {
                let sim = Bench::sim(&bench.recorded);
                sim.fail(Some(Fault {
                    at,
                    calls: 1,
                    errno,
                    short,
                }));
                let state = format!("call {at}, errno {errno}");
                let before = sim.operations();
                let (mut job, books) = bench.job(&sim);
                let mut now = Instant::now();
                let mut crashes = vec![before];
                for _ in 0..4 {
                    while job.round(now, false, &mut || true) {}
                    crashes.push(sim.operations());
                    now += AGAIN;
                }
                assert!(sim.calls() > at, "{state}");
                bench.check_done(&sim.files(), &state);
                let status = books.status().archive.unwrap();
                assert_eq!(
                    (status.waiting, status.trouble.as_str()),
                    (0, ""),
                    "{state}"
                );
                assert_eq!(status.segments, 2, "{state}");
                for operations in before..=sim.operations() {
                    let part = 1 + (at * 7 + operations as u64 * 13) as u32 % 998;
                    if operations % 5 == at as usize % 5 || crashes.contains(&operations) {
                        bench.crash(&sim, operations, part);
                        bench.crash(&sim, operations, 0);
                    }
                }
            }
        }
        assert!(whole.calls() > begin + 30, "{}", whole.calls());
        assert!(bench.seen.len() > 20, "{}", bench.seen.len());
    }
}

#[test]
fn what_has_its_name_on_the_disk_is_not_synced_again() {
    let bench = Bench::new("again", (Some(1), true), &[20]);
    let sim = Bench::sim(&bench.recorded);
    let begin = sim.calls();
    let (mut job, _) = bench.job(&sim);
    let mut now = Instant::now();
    while job.round(now, false, &mut || true) {}
    let calls = sim.calls() - begin;
    // The removal of the segment fails: the last but one call of the round, before the last look.
    let sim = Bench::sim(&bench.recorded);
    sim.fail(Some(Fault {
        at: begin + calls - 3,
        calls: 1,
        errno: 5,
        short: 0,
    }));
    let (mut job, books) = bench.job(&sim);
    while job.round(now, false, &mut || true) {}
    let status = books.status().archive.unwrap();
    assert_eq!((status.segments, status.waiting), (1, 1), "{status:?}");
    now += AGAIN;
    let before = sim.calls();
    while job.round(now, false, &mut || true) {}
    // Two looks; the flows, the segment, its index.
    assert_eq!(sim.calls() - before, 5);
    bench.check_done(&sim.files(), "again");
}

//! A loss of power after every operation, faults at every call, and both.

use super::*;
use crate::record::Loss;

/// What is there keeps what the books said, and what `NAME.state` says. Packets are there once, unless
/// a sync failed: then what was cut may have come back.
fn check(bench: &Bench, note: u64, image: &Image, once: bool) {
    let promised = &bench.promises.lock().unwrap()[note as usize];
    let numbers = packets_after_a_crash(image);
    let there: BTreeSet<u64> = numbers.iter().copied().collect();
    if once {
        assert_eq!(there.len(), numbers.len(), "some packets are there twice");
    }
    keeps(promised, &there);
    let Some(text) = image.get(&Path::new(DIR).join("t.state")) else {
        return;
    };
    let told = Status::from_json(text).expect("the state file is never torn");
    assert!(
        told.mark <= promised.mark,
        "{} of {}",
        told.mark,
        promised.mark
    );
    keeps(&told, &there);
    let segments = image.keys().filter_map(|path| {
        let name = SegmentName::parse(&path.file_name().unwrap().to_string_lossy())?;
        (name.to_string() == told.lanes[0].segment).then_some(name.sequence)
    });
    for sequence in segments {
        assert!(sequence < told.next_sequence, "{told:?}");
    }
}

/// Everything up to the mark is there, and everything before the mark's time, but for what was lost: each
/// that is missing was told, in its place.
fn keeps(promised: &Status, there: &BTreeSet<u64>) {
    let acknowledged = (0..promised.taken)
        .filter(|&number| number < promised.settled || stamp(number) < promised.settled_ns);
    let durable = |&number: &u64| number < promised.mark || stamp(number) < promised.mark_ns;
    let mut missing = (0..promised.taken).filter(durable);
    assert_eq!(
        missing.find(|number| !there.contains(number)),
        None,
        "{promised:?}"
    );
    assert!(promised.mark <= promised.durable, "{promised:?}");
    let mut losses: Vec<(u64, u64, u64)> = lost(promised)
        .map(|loss| (loss.to_ns, loss.from_ns, loss.packets))
        .collect();
    losses.sort_unstable();
    for number in acknowledged.filter(|number| !there.contains(number)) {
        let told = losses.iter_mut().find(|(to_ns, from_ns, left)| {
            (*from_ns..=*to_ns).contains(&stamp(number)) && *left > 0
        });
        let (.., left) = told.unwrap_or_else(|| panic!("{number} is missing: {promised:?}"));
        *left -= 1;
    }
}

/// What the disk lost.
fn lost(status: &Status) -> impl Iterator<Item = &Loss> {
    let losses = status.losses.iter();
    losses.filter(|loss| loss.kind == "disk" || loss.kind == "unknown")
}

/// Every loss that the books know is in a file.
fn assert_told(sim: &Sim, status: &Status) {
    let text = losses::text(sim);
    for loss in &status.losses {
        assert!(text.contains(&loss.words()), "{loss:?} is in no file");
    }
}

fn fingerprint(image: &Image) -> u64 {
    use std::hash::{Hash as _, Hasher as _};
    let mut hasher = std::hash::DefaultHasher::new();
    image.hash(&mut hasher);
    hasher.finish()
}

/// Nine chunks in three segments. In a `burst` they come at once.
fn record(bench: &mut Bench, burst: bool) {
    for chunk in 0..9 {
        bench.chunk(chunk % 3 == 0);
        if chunk % 2 == 0 && !burst {
            bench.work(chunk);
        }
    }
    bench.writer.end(Instant::now() + Duration::from_secs(60));
}

fn crash_everywhere(format: Format, stores: Option<i32>, burst: bool) {
    let sim = Sim::new(1 << 30);
    sim.fail_stores(stores);
    let mut bench = Bench::new(&sim, settings(format));
    record(&mut bench, burst);
    assert_eq!(bench.ledger.status().mark, 9 * PER_CHUNK);
    let (mut states, mut images) = (0, BTreeSet::new());
    let mut promised = BTreeSet::new();
    for operations in 1..=sim.operations() {
        for part in [0, 1000].into_iter().chain((1..200).map(|part| part * 5)) {
            let (note, image) = sim.crash(operations, part);
            images.insert(fingerprint(&image));
            check(&bench, note, &image, true);
            promised.insert(bench.promises.lock().unwrap()[note as usize].mark);
            states += 1;
        }
    }
    assert!(promised.len() > 4, "{promised:?}");
    assert!(states >= 7000, "{states}");
    // Before the first write, and where all is synced, every part leaves the same.
    assert!(images.len() > 400, "{} of {states}", images.len());
    println!("figure: G-16 crash states = {states}");
}

#[test]
fn what_was_acknowledged_survives_a_crash_after_every_operation() {
    crash_everywhere(Format::Pcapng, None, false);
}

#[test]
fn what_was_acknowledged_survives_a_crash_in_classic_pcap() {
    crash_everywhere(Format::Pcap, None, false);
}

/// The state file syncs the directory, too; without it the names of segments depend on nobody else.
#[test]
fn names_survive_a_crash_in_a_directory_without_a_state() {
    crash_everywhere(Format::Pcapng, Some(EIO), false);
}

#[test]
fn what_was_acknowledged_survives_a_crash_in_a_burst() {
    crash_everywhere(Format::Pcapng, None, true);
}

/// Records nine chunks on a disk with this fault: the books must close, and what is durable by them
/// must be there, also if the power is lost then.
fn record_with(format: Format, fault: Option<Fault>, burst: bool) -> (Sim, Bench) {
    let sim = Sim::new(1 << 30);
    sim.fail(fault);
    let mut bench = Bench::new(&sim, settings(format));
    for chunk in 0..9 {
        if chunk < 2 || chunk % 3 == 1 {
            // Nobody told it where it happened.
            let ns = stamp(chunk * PER_CHUNK) - 1;
            bench.ledger.lost_in_ring(ns, ns, 1, "not told", false);
        }
        bench.chunk(chunk % 3 == 0);
        if !burst {
            bench.work(chunk);
        }
    }
    (0..9).for_each(|later| bench.work(10 * later));
    bench.writer.end(Instant::now() + Duration::from_secs(60));
    sim.fail(None);
    let status = bench.ledger.status();
    assert!(bench.writer.tell_losses(), "{fault:?}");
    if format == Format::Pcapng {
        assert_told(&sim, &status);
    }
    assert_eq!(status.taken, 9 * PER_CHUNK);
    assert_eq!(
        (status.buffered, status.unexplained()),
        (0, 0),
        "{fault:?}: {status:?}"
    );
    assert_no_duplicates(&packets(&sim.files()));
    let (_, image) = sim.crash(sim.operations(), 0);
    let there = packets(&image);
    assert!(
        there.len() as u64 >= status.durable,
        "{fault:?}: {status:?}"
    );
    assert_eq!(status.settled, status.taken);
    (sim, bench)
}

fn fail_every_call(format: Format, burst: bool) {
    let status = |fault| record_with(format, Some(fault), burst).1.ledger.status();
    let (sim, whole) = record_with(format, None, burst);
    assert_eq!(lost(&whole.ledger.status()).count(), 0);
    let calls = sim.calls();
    assert!(calls > 40);
    // Two errors; once with four lengths, for ever, and for a while.
    println!("figure: G-17 failed calls = {}", calls * 2 * 6);
    for at in 0..calls {
        for errno in [EIO, ENOSPC] {
            let fault = |calls, short| Fault {
                at,
                calls,
                errno,
                short,
            };
            for short in [0, 1, 4096, 5000] {
                let status = status(fault(1, short));
                // One call that fails costs nothing, unless it was the one that confirms.
                assert_eq!(status.lost_disk, 0, "{at}, {errno}, {short}");
                assert!(status.lost_unknown <= 2 * PER_CHUNK, "{at}: {status:?}");
            }
            let for_ever = status(fault(u64::MAX, 0));
            let expected = for_ever.taken - for_ever.durable;
            let lost: u64 = lost(&for_ever).map(|loss| loss.packets).sum();
            assert_eq!(lost, expected, "{at}: {for_ever:?}");
            let some = status(fault(7, 100));
            assert!(some.durable > 0, "{at}: {some:?}");
        }
    }
}

#[test]
fn every_call_may_fail_once_or_for_ever() {
    fail_every_call(Format::Pcapng, false);
}

#[test]
fn every_call_may_fail_in_a_burst() {
    fail_every_call(Format::Pcapng, true);
}

#[test]
fn every_call_may_fail_in_classic_pcap() {
    fail_every_call(Format::Pcap, false);
}

/// The power goes at some time after something failed.
#[test]
fn a_kill_at_any_moment_leaves_no_segment_without_its_header() {
    for format in [Format::Pcapng, Format::Pcap] {
        let sim = Sim::new(1 << 30);
        let mut bench = Bench::new(&sim, settings(format));
        record(&mut bench, false);
        let mut unnamed = 0;
        for operations in 1..=sim.operations() {
            // What the kernel was told it still has.
            for (path, content) in sim.crash(operations, 1000).1 {
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                unnamed += u32::from(name.ends_with(crate::name::PART));
                assert!(
                    SegmentName::parse(&name).is_none() || content.len() >= 24,
                    "{name} has {} bytes after operation {operations}",
                    content.len()
                );
            }
        }
        assert!(unnamed > 0, "no file was seen that was not named yet");
    }
}

fn fail_and_crash(format: Format, burst: bool) {
    let (sim, _) = record_with(format, None, burst);
    let mut states = 0;
    for at in 0..sim.calls() {
        for (calls, short) in [(1, 0), (1, 5000), (5, 100), (u64::MAX, 0)] {
            let fault = Fault {
                at,
                calls,
                errno: EIO,
                short,
            };
            let (sim, bench) = record_with(format, Some(fault), burst);
            let whole = bench.ledger.status();
            let once = whole.lost_unknown == 0 && whole.lanes[0].paused.is_empty();
            let last = sim.operations();
            for operations in (1..=last).filter(|step| step % 5 == at as usize % 5 || *step == last)
            {
                for part in [0, 1 + (at * 7 + operations as u64 * 13) as u32 % 998] {
                    let (note, image) = sim.crash(operations, part);
                    check(&bench, note, &image, once);
                    states += 1;
                }
            }
        }
    }
    assert!(states > 5000, "{states}");
    println!("figure: G-16 crash states = {states}");
}

#[test]
fn what_was_acknowledged_survives_faults_and_a_crash_together() {
    fail_and_crash(Format::Pcapng, false);
}

#[test]
fn what_was_acknowledged_survives_faults_and_a_crash_in_a_burst() {
    fail_and_crash(Format::Pcapng, true);
}

#[test]
fn what_was_acknowledged_survives_faults_and_a_crash_in_classic_pcap() {
    fail_and_crash(Format::Pcap, false);
}

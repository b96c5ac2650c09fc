//! Several directories, one of which fails.

use vnplug_testing::{Deadline, until};

use super::*;
use crate::extract::{Extract, Query};
use crate::filter::Filter;

/// As `vnplug record` does while nothing comes.
fn wait(recorder: &mut Recorder, what: &str, test: impl FnMut(&Status) -> bool) {
    let look = || {
        recorder.flush_due(Instant::now());
        recorder.ledger().status()
    };
    until(what, look, test);
}

fn settings_of_two() -> Settings {
    Settings {
        flush_every: Duration::ZERO,
        ..settings(Format::Pcapng)
    }
}

#[test]
fn packets_of_one_stamp_are_extracted_as_they_came() {
    let (one, two) = (
        TestDir::new("record-equal-a"),
        TestDir::new("record-equal-b"),
    );
    let mut settings = settings(Format::Pcapng);
    settings.chunk_bytes = 1 << 20;
    let mut recorder = recorder(&settings, vec![real(&one), real(&two)]);
    for number in 0..20_000_u64 {
        let mut bytes = number.to_le_bytes().to_vec();
        bytes.resize(1400, 1);
        // So many have one stamp that chunks, and so directories, change among them.
        let meta = meta(number / 50, bytes.len());
        let packet = Packet {
            meta,
            bytes: &bytes,
        };
        assert!(recorder.take(0, &packet, &mut || false));
    }
    assert_eq!(recorder.finish().durable, 20_000);
    let query = Query {
        from_ns: 0,
        to_ns: u64::MAX,
        filter: Filter::new("").unwrap(),
    };
    let places = [one.0.clone(), two.0.clone()];
    let mut extract = Extract::open(&places, query).unwrap();
    let mut numbers = Vec::new();
    while let Some(packet) = extract.read().unwrap() {
        numbers.push(u64::from_le_bytes(*packet.bytes.first_chunk().unwrap()));
    }
    let wrong = (0..20_000).zip(&numbers).filter(|(n, found)| n != *found);
    assert_eq!((numbers.len(), wrong.count()), (20_000, 0));
}

#[test]
fn a_disk_that_fails_does_not_hold_the_mark() {
    let disks = [Sim::new(1 << 30), Sim::new(1 << 30)];
    let mut recorder = recorder(&settings_of_two(), sims(&disks));
    for part in 0..4 {
        take(&mut recorder, part * 100..(part + 1) * 100);
        recorder.flush();
    }
    wait(&mut recorder, "both write", |status| status.mark == 400);
    assert!(disks.iter().all(|disk| !disk.files().is_empty()));

    disks[0].fail_writes(Some(EIO));
    for part in 4..40 {
        take(&mut recorder, part * 100..(part + 1) * 100);
        recorder.flush();
    }
    wait(&mut recorder, "the other takes all", |status| {
        status.mark == 4000
    });
    let status = recorder.ledger().status();
    assert_eq!((status.durable, status.lost()), (4000, 0), "{status:?}");
    assert_eq!(status.mark_ns, START_NS + 3999 * 1000 + 1);
    assert!(!status.lanes[0].paused.is_empty(), "{status:?}");

    disks[0].fail_writes(None);
    let mut next = 4000;
    wait_and_take(&mut recorder, &mut next, |status| {
        status.lanes[0].paused.is_empty()
    });
    let status = recorder.finish();
    assert_eq!((status.durable, status.lost()), (next, 0), "{status:?}");
    let mut all: Vec<u64> = disks
        .iter()
        .flat_map(|disk| packets(&disk.files()))
        .collect();
    all.sort_unstable();
    assert_eq!(all, (0..next).collect::<Vec<u64>>());
}

fn wait_and_take(recorder: &mut Recorder, next: &mut u64, mut test: impl FnMut(&Status) -> bool) {
    let deadline = Deadline::new("it stands as awaited");
    while !test(&recorder.ledger().status()) {
        deadline.check_seen(&recorder.ledger().status());
        take(recorder, *next..*next + 10);
        *next += 10;
        recorder.flush();
        recorder.flush_due(Instant::now());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn what_waits_for_a_disk_that_fails_at_the_end_is_written_by_another() {
    let disks = [Sim::new(1 << 30), Sim::new(1 << 30), Sim::new(1 << 30)];
    let mut recorder = recorder(&settings_of_two(), sims(&disks));
    disks[1].fail_writes(Some(EIO));
    for part in 0..8 {
        take(&mut recorder, part * 100..(part + 1) * 100);
        recorder.flush();
    }
    let status = recorder.finish();
    assert_eq!((status.durable, status.lost()), (800, 0), "{status:?}");
}

#[test]
fn segments_end_where_they_must_after_a_disk_failed() {
    let disks = [Sim::new(1 << 30), Sim::new(1 << 30)];
    let settings = Settings {
        rotate_packets: 250,
        ..settings_of_two()
    };
    let mut recorder = recorder(&settings, sims(&disks));
    disks[1].fail_writes(Some(EIO));
    for part in 0..30 {
        take(&mut recorder, part * 100..(part + 1) * 100);
        recorder.flush();
    }
    let status = recorder.finish();
    assert_eq!((status.durable, status.lost()), (3000, 0), "{status:?}");
    for (path, content) in disks[0].files() {
        let numbers = packets(&Image::from([(path, content)]));
        assert!(numbers.len() <= 250, "{}", numbers.len());
        assert!(numbers.is_sorted());
    }
}

#[test]
fn a_disk_that_stands_still_does_not_hold_the_end() {
    let disks = [Sim::new(1 << 30), Sim::new(1 << 30)];
    let mut recorder = recorder(&settings_of_two(), sims(&disks));
    let stands = disks[0].stands();
    let held = stands.lock().unwrap();
    for part in 0..8 {
        take(&mut recorder, part * 100..(part + 1) * 100);
        recorder.flush();
    }
    let status = recorder.finish_within(Duration::from_secs(5));
    assert_eq!(status.taken, 800);
    assert_eq!(status.durable + status.lost(), 800, "{status:?}");
    assert!(status.durable > 0 && status.lost_unknown > 0, "{status:?}");
    // The other disk says so.
    let told = disks[1].files().into_values().any(|bytes| {
        let words = b"the disk stood still";
        bytes.windows(words.len()).any(|part| part == words)
    });
    assert!(told, "{status:?}");
    drop(held);
}

#[test]
fn a_directory_that_stands_still_gets_nothing_more() {
    let queue = super::super::queue::Queue::default();
    let now = Instant::now();
    assert!(!queue.is_stuck(now));
    let taken = queue.take(4, now);
    assert!(taken.chunks.is_empty() && taken.empty && !taken.closed);
    assert!(!queue.is_stuck(now));
    assert!(queue.is_stuck(now + Duration::from_secs(60)));
    queue.rest(0, Vec::new(), None);
    assert!(!queue.is_stuck(now + Duration::from_secs(60)));
    queue.rest(0, Vec::new(), Some(now + Duration::from_secs(5)));
    assert!(queue.is_stuck(now + Duration::from_secs(4)));
    assert!(!queue.is_stuck(now + Duration::from_secs(5)));
}

#[test]
fn a_writer_that_panics_is_told_at_once() {
    let ledger = Ledger::new("t", &["/rec".to_owned()]);
    let queue = super::super::queue::Queue::default();
    let panics = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let _gone = super::super::queue::Gone {
                queue: &queue,
                ledger: &ledger,
                lane: 0,
            };
            panic!("on purpose");
        });
        thread.join().is_err()
    });
    assert!(panics && queue.is_stuck(Instant::now()));
    assert_eq!(ledger.status().lanes[0].paused, "its writer panicked");
}

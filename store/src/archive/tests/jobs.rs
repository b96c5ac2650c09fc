//! Which segments are packed, and when.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use vnplug_testing::eventually;

use super::*;
use crate::disk::Sim;

fn archive(books: &Ledger) -> ArchiveStatus {
    books.status().archive.unwrap()
}

/// Rounds until there is nothing to do at this time.
fn work(job: &mut Job, now: Instant) {
    while job.round(now, false, &mut || true) {}
}

#[test]
fn who_reads_a_segment_keeps_it_and_who_gives_up_leaves_nothing() {
    let lab = Lab::new("lease");
    let segments = lab.record(0..1, 3000);
    let before = lab.names();
    let (mut job, books) = lab.job(lab.how(Some(1), false));
    let mut now = Instant::now();
    assert!(job.round(now, false, &mut || false));
    assert_eq!(lab.names(), before);
    now += AGAIN;
    let held = lease(&lab.path(&segments[0])).unwrap();
    work(&mut job, now);
    let flows = lab.path(flows_file(&segments[0].to_string()));
    assert!(!flows.exists(), "they go before the segment does");
    assert_eq!(lab.names().len(), 3);
    assert_eq!(lab.ask("").0.len(), 3000);
    drop(held);
    work(&mut job, now + AGAIN);
    assert_eq!(lab.names().len(), 2);
    let status = archive(&books);
    assert_eq!((status.segments, status.waiting), (1, 0));
    assert_eq!(status.trouble, "");
    // It is recycled while somebody packs it.
    let segments = lab.record(1..2, 100);
    let path = lab.path(&segments[0]);
    let mut remove = || {
        let _ = fs::remove_file(&path);
        true
    };
    assert!(job.round(now + AGAIN, false, &mut remove));
    work(&mut job, now + AGAIN);
    let there = lab.names();
    assert!(there.iter().all(|name| !name.ends_with(".part")));
    assert!(
        there
            .iter()
            .all(|name| !name.contains(&path.display().to_string()))
    );
    assert_eq!(archive(&books).trouble, "");
}

#[test]
fn segments_that_are_read_are_no_backlog() {
    let lab = Lab::new("backlog");
    let segments = lab.record(0..20, 20);
    let held: Vec<_> = segments
        .iter()
        .map(|segment| lease(&lab.path(segment)).unwrap())
        .collect();
    let (mut job, books) = lab.job(lab.how(Some(1), false));
    let now = Instant::now();
    // Four were left, as there was too much to do.
    work(&mut job, now);
    assert_eq!((archive(&books).segments, archive(&books).left), (16, 4));
    lab.record(20..30, 20);
    work(&mut job, now);
    let status = archive(&books);
    assert_eq!((status.segments, status.left), (26, 4));
    assert_eq!(status.waiting, 16, "they are there plain, too");
    drop(held);
    work(&mut job, now + AGAIN);
    assert_eq!(archive(&books).waiting, 0);
    // The next recorder packs what was left; one of those is packed already.
    let (mut next, books) = lab.job(lab.how(Some(1), false));
    let mut ends = 0;
    while next.round(now, true, &mut || true) {
        ends += 1;
    }
    assert_eq!((ends, archive(&books).segments), (4, 4));
    assert_eq!(lab.ask("").0.len(), 30 * 20);
}

#[test]
fn one_that_cannot_be_packed_keeps_nobody_waiting() {
    let lab = Lab::new("blocked");
    let segments = lab.record(0..5, 20);
    // Something that cannot be read has the oldest one's name.
    fs::remove_file(lab.path(&segments[0])).unwrap();
    fs::create_dir(lab.path(&segments[0])).unwrap();
    for ended in [false, true] {
        let (mut job, books) = lab.job(lab.how(Some(1), false));
        let mut now = Instant::now();
        let mut rounds = 0;
        while job.round(now, ended, &mut || true) {
            rounds += 1;
            assert!(rounds < 100, "it ends");
            // It takes longer than it is waited for.
            now += if ended { Duration::ZERO } else { AGAIN };
            if !ended && rounds == 10 {
                break;
            }
        }
        job.tell();
        let status = archive(&books);
        assert_eq!((status.segments, status.waiting), (4, 1));
        assert!(
            status.trouble.starts_with(&segments[0].to_string()),
            "{status:?}"
        );
        // At the end of the recorder it is tried once more.
        let mut last = 0;
        while !ended && job.round(now, true, &mut || true) {
            last += 1;
        }
        assert_eq!(last, u32::from(!ended));
        lab.record(1..5, 20);
        for segment in &segments[1..] {
            fs::remove_file(lab.path(format!("{segment}.zst"))).unwrap();
        }
    }
    // What was wrong is mended.
    let (mut job, books) = lab.job(lab.how(Some(1), false));
    let now = Instant::now();
    work(&mut job, now);
    fs::remove_dir(lab.path(&segments[0])).unwrap();
    lab.record(0..1, 20);
    work(&mut job, now + AGAIN);
    assert_eq!(
        (archive(&books).waiting, archive(&books).trouble),
        (0, String::new())
    );
    assert_eq!(lab.ask("").0.len(), 5 * 20);
}

#[test]
fn nothing_waits_for_a_link_that_leads_nowhere() {
    let lab = Lab::new("link");
    let (name, _) = segment(0, 1);
    std::os::unix::fs::symlink("nowhere", lab.path(name)).unwrap();
    let (mut job, _) = lab.job(lab.how(Some(1), false));
    let now = Instant::now();
    assert!(job.round(now, true, &mut || true));
    assert!(!job.round(now, true, &mut || true));
}

#[test]
fn what_is_beside_an_encrypted_segment_alone_does_not_stay_in_the_open() {
    let lab = Lab::new("bare");
    let segments = lab.record(0..2, 20);
    let clear = |segment: &SegmentName| {
        let flows = flows_file(&segment.to_string());
        [segment.index(), format!("{flows}.tmp"), flows]
    };
    lab.pack(lab.how(None, true));
    for name in segments.iter().flat_map(clear) {
        fs::write(lab.path(name), "who with whom").unwrap();
    }
    // This one is there as it was recorded, too.
    let (name, bytes) = segment(1, 20);
    fs::write(lab.path(format!("{name}.zst")), bytes).unwrap();
    let others = lab.path("other.flows.parquet");
    fs::write(&others, "").unwrap();
    let (mut job, _) = lab.job(lab.how(Some(1), false));
    job.tell();
    let there = |names: [String; 3]| names.map(|name| lab.path(name).exists());
    assert_eq!(there(clear(&segments[0])), [false; 3]);
    assert_eq!(there(clear(&segments[1])), [true; 3]);
    assert!(others.exists());
}

#[test]
fn the_worker_packs_what_is_closed_and_leaves_the_rest() {
    let lab = Lab::new("worker");
    let segments = lab.record(0..5, 500);
    let books = Arc::new(Ledger::new("r", &["there".to_owned()]));
    books.lane(0, |lane| {
        lane.segment = segments[3].to_string();
        lane.open = true;
    });
    let start = || {
        let (how, books) = (lab.how(Some(1), false), Arc::clone(&books));
        Worker::start(
            Some(how),
            "r".into(),
            vec![(lab.place.0.clone(), None)],
            0,
            books,
        )
        .unwrap()
    };
    let worker = start();
    eventually("three are packed", || archive(&books).segments == 3);
    worker.finish();
    let plain = |n: usize| lab.path(&segments[n]).exists();
    assert_eq!(
        [0, 1, 2, 3, 4].map(plain),
        [false, false, false, true, true]
    );
    // The recorder ends: its segment is closed. The fifth is nobody's yet.
    books.lane(0, |lane| lane.open = false);
    start().finish();
    assert_eq!([3, 4].map(plain), [false, true]);
    let status = archive(&books);
    assert_eq!((status.segments, status.waiting), (4, 0));
    assert!(status.bytes_after > 0 && status.bytes_before > status.bytes_after);
}

#[test]
fn a_disk_that_stands_still_does_not_hold_the_end() {
    let sim = Sim::new(1 << 30);
    let (name, bytes) = segment(0, 20);
    sim.clone()
        .store(&Path::new("/r").join(name.to_string()), &bytes)
        .unwrap();
    let (job, books) = job_on(
        Box::new(sim.clone()),
        Path::new("/r"),
        Lab::new("still").how(Some(1), false),
    );
    let stands = Arc::new(Mutex::new(()));
    let held = stands.lock().unwrap();
    let (still, began) = (Arc::clone(&stands), Arc::new(AtomicBool::new(false)));
    let begun = Arc::clone(&began);
    sim.watch(move || {
        begun.store(true, Ordering::Relaxed);
        drop(still.lock());
        0
    });
    let mut worker = Worker::of(job, Arc::clone(&books)).unwrap();
    eventually("it writes", || began.load(Ordering::Relaxed));
    worker.end(Duration::ZERO, Duration::from_millis(100));
    assert!(archive(&books).trouble.contains("stands still"));
    drop(held);
}

#[test]
fn what_is_too_slow_leaves_the_oldest_as_they_are_or_only_encrypts_them() {
    for sealed in [false, true] {
        let lab = Lab::new(&format!("slow-{sealed}"));
        let segments = lab.record(0..20, 20);
        let (mut job, books) = lab.job(lab.how(Some(1), sealed));
        work(&mut job, Instant::now());
        let status = archive(&books);
        assert_eq!(
            (status.segments, status.left, status.hurried),
            if sealed { (20, 0, 4) } else { (16, 4, 0) }
        );
        let suffix = if sealed { ".age" } else { "" };
        for (n, segment) in segments.iter().enumerate() {
            let path = lab.path(format!("{segment}{suffix}"));
            assert_eq!(path.exists(), n < 4, "{}", path.display());
        }
    }
}

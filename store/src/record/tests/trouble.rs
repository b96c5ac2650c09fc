//! What a disk in trouble must not cost.

use std::time::SystemTime;

use vnplug_testing::{eventually, until};

use super::*;
use crate::extract::{Extract, Query};
use crate::filter::Filter;
use crate::read::{Cause, ReadError};

const EFBIG: i32 = 27;

fn state(sim: &Sim, dir: &str) -> serde_json::Value {
    let path = Path::new(dir).join("t.state");
    serde_json::from_slice(&sim.files()[&path]).unwrap()
}

#[test]
fn a_disk_that_confirms_nothing_costs_nothing_that_was_confirmed() {
    let sim = Sim::new(1 << 30);
    let mut settings = settings(Format::Pcapng);
    settings.quota = Some(Quota::Bytes(1 << 20));
    let mut bench = Bench::new(&sim, settings);
    for _ in 0..20 {
        bench.chunk(true);
        bench.work(0);
    }
    assert_eq!(bench.ledger.status().durable, 500);
    sim.fail_syncs(Some(EIO));
    for later in 0..60 {
        bench.chunk(true);
        bench.work(later * 10);
    }
    let status = bench.ledger.status();
    assert_eq!(status.lanes[0].recycled, 0);
    assert!(status.lanes[0].paused.contains("os error 5"), "{status:?}");
    assert!(status.lost_unknown <= 2 * PER_CHUNK, "{status:?}");
    let there: BTreeSet<u64> = packets(&sim.files()).into_iter().collect();
    assert!((0..500).all(|number| there.contains(&number)));
    // Told while it lasts.
    let told = state(&sim, DIR);
    assert_eq!(told["lost"]["unknown"], status.lost_unknown);
    assert_ne!(told["disks"][0]["paused"], "");

    sim.fail_syncs(None);
    bench.work(1000);
    let status = bench.ledger.status();
    assert_eq!(status.durable + status.lost_unknown, status.taken);
    assert_eq!(status.lanes[0].paused, "");
    assert_eq!(state(&sim, DIR)["disks"][0]["paused"], "");
}

#[test]
fn a_disk_that_stays_full_gives_up_one_segment() {
    // As much as one chunk takes, and room for the header of a segment, but for no other chunk.
    let large = Sim::new(1 << 30);
    let mut bench = Bench::new(&large, settings(Format::Pcapng));
    bench.chunk(true);
    bench.work(0);
    let used: usize = large.files().values().map(Vec::len).sum();
    let sim = Sim::new(used as u64 + (12 << 10));
    let mut bench = Bench::new(&sim, settings(Format::Pcapng));
    bench.chunk(true);
    bench.work(0);
    bench.chunk(false);
    for later in 0..40 {
        bench.work(later * 10);
    }
    let status = bench.ledger.status();
    assert!(!status.lanes[0].paused.is_empty());
    assert_eq!((status.durable, status.lanes[0].poisoned), (PER_CHUNK, 1));
}

#[test]
fn segments_that_are_too_old_are_removed_and_are_no_holes() {
    let place = TestDir::new("record-age");
    let mut settings = settings(Format::Pcapng);
    (settings.rotate_packets, settings.manifest) = (10, true);
    let mut first = recorder(&settings, vec![real(&place)]);
    take(&mut first, 0..50);
    first.finish();
    let segments = || -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&place.0).unwrap();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        paths.retain(|path| path.extension().is_some_and(|ext| ext == "pcapng"));
        paths.sort();
        paths
    };
    assert_eq!(segments().len(), 5);
    let long_ago = SystemTime::now() - Duration::from_secs(7200);
    let old = segments()[..2].to_vec();
    for path in &old {
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_modified(long_ago).unwrap();
    }
    settings.max_age = Some(Duration::from_secs(3600));
    let mut second = recorder(&settings, vec![real(&place)]);
    // Nothing needs to come for that.
    while old.iter().any(|path| path.exists()) {
        std::thread::sleep(Duration::from_millis(5));
    }
    take(&mut second, 50..60);
    let status = second.finish();
    assert_eq!((segments().len(), status.lanes[0].recycled), (4, 2));
    assert!(!old[0].with_extension("vnx").exists());
    assert_eq!(
        crate::manifest::holes(std::slice::from_ref(&place.0)).unwrap(),
        []
    );
    let manifest = std::fs::read_to_string(place.0.join("t.manifest")).unwrap();
    assert_eq!(manifest.matches("\"why\":\"age\"").count(), 2);
}

/// Records, has the third segment still be made when the recorder is killed, and records again. How many
/// segments are missing then. A `.part` that is gone is what a thief leaves.
fn holes_after_a_segment_without_a_name(place: &TestDir, is_there: bool) -> usize {
    let mut settings = settings(Format::Pcapng);
    settings.rotate_packets = 10;
    let mut first = recorder(&settings, vec![real(place)]);
    take(&mut first, 0..50);
    first.finish();
    let entries = std::fs::read_dir(&place.0).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let third = paths
        .into_iter()
        .find(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            SegmentName::parse(&name).is_some_and(|name| name.sequence == 2)
        })
        .unwrap();
    let part = third.with_extension("pcapng.part");
    std::fs::rename(&third, &part).unwrap();
    if !is_there {
        std::fs::remove_file(&part).unwrap();
    }
    settings.manifest = true;
    let mut second = recorder(&settings, vec![real(place)]);
    take(&mut second, 50..60);
    second.finish();
    assert!(!part.exists());
    let dirs = std::slice::from_ref(&place.0);
    crate::manifest::holes(dirs).unwrap().len()
}

#[test]
fn a_number_whose_segment_never_got_its_name_is_no_hole() {
    let places = [TestDir::new("unnamed"), TestDir::new("stolen")];
    assert_eq!(holes_after_a_segment_without_a_name(&places[0], true), 0);
    // The control.
    assert_eq!(holes_after_a_segment_without_a_name(&places[1], false), 1);
}

#[test]
fn a_file_as_long_as_may_be_costs_no_other() {
    let sim = Sim::new(1 << 30);
    let mut settings = settings(Format::Pcapng);
    settings.quota = Some(Quota::Bytes(100 << 20));
    let mut bench = Bench::new(&sim, settings);
    for _ in 0..3 {
        bench.chunk(true);
        bench.work(0);
    }
    bench.chunk(false);
    // The write of the chunk: it is the next call.
    sim.fail(Some(Fault {
        at: sim.calls(),
        calls: 1,
        errno: EFBIG,
        short: 0,
    }));
    bench.work(0);
    let status = bench.ledger.status();
    assert_eq!(status.lanes[0].poisoned, 1);
    assert_eq!(status.lanes[0].recycled, 0);
    assert_eq!(status.durable, 4 * PER_CHUNK);
}

#[test]
fn a_segment_is_given_up_once() {
    let sim = Sim::new(1 << 30);
    let never = Settings {
        sync_every: Duration::from_secs(3600),
        ..settings(Format::Pcapng)
    };
    let mut bench = Bench::new(&sim, never);
    bench.chunk(true);
    bench.work(0);
    bench.chunk(false);
    sim.fail_syncs(Some(EIO));
    sim.fail(Some(Fault {
        at: sim.calls(),
        calls: 1,
        errno: EIO,
        short: 0,
    }));
    bench.work(0);
    let status = bench.ledger.status();
    assert_eq!(status.lost_unknown, PER_CHUNK);
    assert_eq!(status.lanes[0].poisoned, 1);
}

/// More than the index has in one entry.
#[test]
fn a_segment_and_its_index_are_given_up_in_the_middle() {
    for index_alone in [false, true] {
        let sim = Sim::new(1 << 30);
        let mut bench = Bench::new(&sim, settings(Format::Pcapng));
        for chunk in 0..40 {
            bench.chunk(chunk == 0);
            bench.work(0);
        }
        match index_alone {
            false => sim.fail_syncs(Some(EIO)),
            true => bench.writer.drop_index(),
        }
        bench.chunk(false);
        bench.work(0);
        sim.fail_syncs(None);
        bench.chunk(false);
        bench.work(100);
        bench.writer.end(Instant::now());
        let status = bench.ledger.status();
        let unknown = if index_alone { 0 } else { PER_CHUNK };
        assert_eq!(
            (status.taken, status.lost_unknown),
            (42 * PER_CHUNK, unknown)
        );
        assert_eq!(status.durable + status.lost_unknown, status.taken);
    }
}

#[test]
fn a_quota_smaller_than_a_segment_keeps_most_of_the_recording() {
    let quota = 8 << 20;
    let sim = Sim::new(1 << 30);
    let settings = Settings {
        quota: Some(Quota::Bytes(quota)),
        rotate_bytes: 16 << 20,
        ..settings(Format::Pcapng)
    };
    let mut recorder = recorder(&settings, alone(&sim));
    let used = || sim.files().values().map(Vec::len).sum::<usize>() as u64;
    for part in 0..30 {
        take(&mut recorder, part * 2000..(part + 1) * 2000);
        assert!(used() <= quota + (4 << 20), "{}", used());
    }
    let status = recorder.finish();
    assert_eq!(status.durable, 60_000);
    assert!(status.taken_bytes > 3 * quota);
    assert!(used() > quota / 2, "{}", used());
}

#[test]
fn a_share_of_a_small_disk_keeps_most_of_the_recording() {
    let sim = Sim::new(20 << 20);
    let settings = Settings {
        quota: Some(Quota::Percent(80)),
        ..settings(Format::Pcapng)
    };
    let mut recorder = recorder(&settings, alone(&sim));
    take(&mut recorder, 0..80_000);
    let status = recorder.finish();
    assert_eq!(status.durable, 80_000);
    let used: usize = sim.files().values().map(Vec::len).sum();
    assert!((8 << 20..18 << 20).contains(&used), "{used}");
}

#[test]
fn a_small_disk_is_not_filled_by_what_is_reserved() {
    // MiB of the disk, and those that are free when a segment was begun. The last is as ever.
    for (capacity, left) in [(48, 47), (80, 69), (400, 349), (100 << 10, 101_374)] {
        let sim = Sim::new(capacity << 20);
        let mut bench = Bench::new(&sim, settings(Format::Pcapng));
        bench.chunk(true);
        bench.work(0);
        let space = sim.clone().space(Path::new(DIR)).unwrap();
        assert_eq!(space.free >> 20, left, "{capacity}");
    }
}

/// Its killed run would be in nobody's books.
#[test]
fn the_state_is_there_before_a_packet_comes() {
    let sim = Sim::new(1 << 30);
    let never = Settings {
        sync_every: Duration::from_secs(3600),
        ..settings(Format::Pcapng)
    };
    let recorder = recorder(&never, alone(&sim));
    let path = Path::new("/disk0").join("t.state");
    eventually("the state is there", || sim.files().contains_key(&path));
    assert_eq!(state(&sim, "/disk0")["run"]["ended"], false);
    recorder.finish();
}

#[test]
fn the_state_is_whole_in_every_directory_at_the_end() {
    let disks = [Sim::new(1 << 30), Sim::new(1 << 30)];
    let settings = Settings {
        sync_every: Duration::from_secs(3600),
        ..settings(Format::Pcapng)
    };
    let mut recorder = recorder(&settings, sims(&disks));
    take(&mut recorder, 0..30_000);
    let status = recorder.finish();
    assert_eq!(status.mark, 30_000);
    for (lane, sim) in disks.iter().enumerate() {
        let told = state(sim, &format!("/disk{lane}"));
        assert_eq!(told["durable_mark"]["packets"], 30_000, "{told:#}");
        assert_eq!(told["buffered"], 0);
    }
}

#[test]
fn a_packet_that_cannot_be_taken_is_counted() {
    let sim = Sim::new(1 << 30);
    let settings = settings(Format::Pcapng);
    let disks = alone(&sim);
    let mut recorder = Recorder::start(settings, disks, Vec::new()).unwrap();
    let mut meta = meta(7, 4);
    meta.lost = 5;
    let packet = Packet {
        meta,
        bytes: &[1, 2, 3, 4],
    };
    assert!(!recorder.take(0, &packet, &mut || true));
    let status = recorder.finish();
    assert_eq!((status.taken, status.lost_ring), (0, 6));
}

#[test]
fn a_packet_longer_than_a_buffer_is_counted() {
    let sim = Sim::new(1 << 30);
    let settings = settings(Format::Pcapng);
    let mut recorder = recorder(&settings, alone(&sim));
    let long = vec![0; 5 << 20];
    let packet = Packet {
        meta: meta(1, long.len()),
        bytes: &long,
    };
    assert!(recorder.take(0, &packet, &mut || false));
    take(&mut recorder, 2..3);
    let status = recorder.finish();
    assert_eq!((status.taken, status.lost_ring), (1, 1));
}

#[test]
fn a_loss_before_the_first_packet_is_since_the_beginning() {
    let sim = Sim::new(1 << 30);
    let settings = settings(Format::Pcapng);
    let mut recorder = recorder(&settings, alone(&sim));
    let began = super::super::now_ns();
    let mut meta = meta(0, 4);
    (meta.ts_ns, meta.lost) = (began + 1_000_000, 3);
    let packet = Packet {
        meta,
        bytes: &[1, 2, 3, 4],
    };
    assert!(recorder.take(0, &packet, &mut || false));
    let loss = recorder.finish().losses.remove(0);
    assert_eq!(loss.packets, 3);
    assert!(began - loss.from_ns < 3_600_000_000_000, "{loss:?}");
}

#[test]
fn a_segment_ends_when_the_clock_was_set_back() {
    let sim = Sim::new(1 << 30);
    let settings = Settings {
        rotate_time: Duration::from_millis(50),
        ..settings(Format::Pcapng)
    };
    let mut recorder = recorder(&settings, alone(&sim));
    take(&mut recorder, 100_000..100_010);
    take(&mut recorder, 0..10);
    recorder.finish();
    let files = sim.files();
    let segments = files
        .keys()
        .filter(|path| path.extension().unwrap() == "pcapng");
    assert_eq!(segments.count(), 2);
}

#[test]
fn what_a_killed_recorder_had_reserved_is_given_back() {
    use std::os::unix::fs::MetadataExt as _;
    let place = TestDir::new("record-reserved");
    let name = SegmentName {
        recording: "t".into(),
        sequence: 4,
        start_ns: START_NS,
        format: Format::Pcapng,
    };
    let path = place.0.join(name.to_string());
    let (_, mut disk) = real(&place);
    disk.create(&path).unwrap();
    disk.allocate(0, 8 << 20).unwrap();
    let header = pcapng::header(&settings(Format::Pcapng).interfaces, "");
    let mut buffer = Buffer::new(BLOCK, u16::MAX);
    buffer[..header.len()].copy_from_slice(&header);
    disk.start(crate::disk::Write {
        len: pcapng::pad(&mut buffer, header.len(), BLOCK),
        buffer,
        offset: 0,
    });
    assert!(disk.finish().unwrap().result.is_ok());
    drop(disk);
    let before = std::fs::metadata(&path).unwrap();
    assert!(before.blocks() * 512 >= 8 << 20);
    recorder(&settings(Format::Pcapng), vec![real(&place)]).finish();
    let after = std::fs::metadata(&path).unwrap();
    assert_eq!(after.len(), before.len());
    assert!(after.blocks() * 512 <= 64 << 10, "{}", after.blocks());
}

#[test]
fn what_cannot_be_recycled_is_passed_over() {
    let place = TestDir::new("record-strange");
    let file = |sequence: u64, extension: &str| {
        let stem = format!("t-{sequence:010}-20261121T134501.000000000Z");
        place.0.join(format!("{stem}.{extension}"))
    };
    std::fs::create_dir(file(0, "pcapng")).unwrap();
    for sequence in [2, 3, 4] {
        std::fs::write(file(sequence, "pcapng"), vec![1; 100 << 10]).unwrap();
    }
    std::fs::write(file(1, "vnx"), vec![1; 100 << 10]).unwrap(); // its segment is gone
    std::fs::write(file(1, "flows.parquet"), vec![1; 8 << 10]).unwrap(); // likewise
    for beside in ["vnx", "flows.parquet", "flows.parquet.tmp"] {
        std::fs::write(file(2, beside), vec![1; 8 << 10]).unwrap();
    }
    // Counted, too: without them two segments would fit.
    std::fs::write(file(4, "flows.parquet"), vec![1; 60 << 10]).unwrap();
    let (dir, mut disk) = real(&place);
    let quota = Quota::Bytes(250 << 10);
    let room = quota
        .enforce(disk.as_mut(), &dir, "t", None, 0, &mut |_| {})
        .unwrap();
    assert_eq!((room.segments, room.enough), (2, true));
    for (sequence, extension, there) in [
        (0, "pcapng", true),
        (1, "vnx", false),
        (1, "flows.parquet", false),
        (2, "pcapng", false),
        (2, "vnx", false),
        (2, "flows.parquet", false),
        (2, "flows.parquet.tmp", false),
        (3, "pcapng", false),
        (4, "pcapng", true),
        (4, "flows.parquet", true),
    ] {
        assert_eq!(
            file(sequence, extension).exists(),
            there,
            "{sequence} {extension}"
        );
    }
}

#[test]
fn a_disk_that_gives_nothing_back_costs_a_few_segments() {
    for quota in [Quota::Percent(90), Quota::Bytes(1 << 30)] {
        let sim = Sim::new(2 << 20);
        let settings = Settings {
            quota: Some(quota),
            rotate_bytes: 64 << 10,
            ..settings(Format::Pcapng)
        };
        let mut bench = Bench::new(&sim, settings);
        for _ in 0..50 {
            bench.chunk(true);
            bench.work(0);
        }
        sim.keep_room();
        for later in 1..200 {
            bench.chunk(true);
            bench.work(later * 10);
        }
        let status = bench.ledger.status();
        assert!(!status.lanes[0].paused.is_empty(), "{status:?}");
        let left = sim.files();
        let left = left
            .keys()
            .filter(|path| path.extension().unwrap() == "pcapng");
        assert!(left.count() >= 30, "{quota:?}: {status:?}");
    }
}

/// Forty segments of a megabyte go by, of which eight may stay.
#[test]
fn a_slow_reader_costs_no_new_segment() {
    let place = TestDir::new("record-slow");
    let mut settings = settings(Format::Pcapng);
    settings.quota = Some(Quota::Bytes(8 << 20));
    settings.rotate_bytes = 1 << 20;
    let mut recorder = recorder(&settings, vec![real(&place)]);
    let names = || {
        let entries = std::fs::read_dir(&place.0).unwrap();
        let names = entries
            .filter_map(|entry| SegmentName::parse(entry.unwrap().file_name().to_str().unwrap()));
        let mut numbers: Vec<u64> = names.map(|name| name.sequence).collect();
        numbers.sort_unstable();
        numbers
    };
    take(&mut recorder, 0..8000);
    recorder.flush();
    let status = || recorder.ledger().status();
    until("all are on disk", status, |it| it.durable == 8000);
    let everything = Query {
        from_ns: 0,
        to_ns: u64::MAX,
        filter: Filter::new("").unwrap(),
    };
    let mut reader = Extract::open(std::slice::from_ref(&place.0), everything).unwrap();
    assert!(reader.read().unwrap().is_some());
    let first = names();
    take(&mut recorder, 8000..70_000);
    let status = recorder.finish();
    assert_eq!((status.durable, status.lost()), (70_000, 0));
    let left = names();
    assert!(left[0] > *first.last().unwrap(), "{first:?} {left:?}");
    assert!(left.is_sorted_by(|a, b| a + 1 == *b), "{left:?}");
    let lane = &status.lanes[0];
    assert!(lane.recycled_read > 0, "{lane:?}");
    // More than a quarter of the quota is not kept for it.
    assert!(
        (1..=lane.recycled_read).contains(&lane.readers_cut),
        "{lane:?}"
    );
    // What was kept is read, and what was taken is told.
    while reader.read().unwrap().is_some() {}
    let problems = reader.problems();
    assert!((1..8000).contains(&reader.tally().packets));
    let taken = |problem: &ReadError| matches!(problem.cause, Cause::Taken);
    assert!(problems.iter().any(taken), "{problems:?}");
}

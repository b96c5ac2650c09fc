//! Packed segments give the same answers, and a crash costs nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use age::secrecy::ExposeSecret;

use super::pack::Packed;
use super::*;
use crate::disk::{Disk, Real, lease};
use crate::extract::{Extract, Query, Tally, find};
use crate::filter::Filter;
use crate::index::{Sidecar, rebuild};
use crate::name::{Format, SegmentName};
use crate::read::Reader;
use crate::read::tests::Maker;
use crate::record::{Ledger, Quota};
use crate::testing::{Place, Traffic};

type Answer = Vec<(u64, Vec<u8>)>;

fn segment(sequence: u64) -> SegmentName {
    SegmentName {
        recording: "r".into(),
        sequence,
        start_ns: 1_700_000_000_000_000_000 + sequence * 1_000_000_000,
        format: Format::Pcapng,
    }
}

/// Segments of `packets` packets each, with their indexes.
fn recording(place: &Place, segments: u64, packets: u64) -> Vec<SegmentName> {
    let mut traffic = Traffic::new(7);
    let make = |sequence| {
        let name = segment(sequence);
        let mut maker = Maker::ng(false);
        maker.interface(1, 9);
        for n in 0..packets {
            let mut frame = match n % 5000 == 4000 {
                true => Traffic::udp(0xc000_024d, 0x0a00_0001, 53, 99, 90),
                false => traffic.busy(),
            };
            frame.extend([sequence as u8, n as u8]);
            maker.packet(0, name.start_ns + n * 1000, &frame);
        }
        let path = place.0.join(name.to_string());
        fs::write(&path, &maker.bytes).unwrap();
        rebuild(&path).unwrap();
        name
    };
    (0..segments).map(make).collect()
}

fn ask(place: &Path, expression: &str, keys: &Keys) -> (Answer, Tally, Vec<String>) {
    let query = Query {
        from_ns: 0,
        to_ns: u64::MAX,
        filter: Filter::new(expression).unwrap(),
    };
    let mut extract = Extract::open_with(&[place.to_owned()], query, keys).unwrap();
    let mut found = Vec::new();
    while let Some(packet) = extract.read().unwrap() {
        found.push((packet.ts_ns, packet.bytes.to_vec()));
    }
    let problems = extract.problems().iter().map(ToString::to_string).collect();
    (found, extract.tally(), problems)
}

fn names(place: &Place) -> Vec<String> {
    let all = fs::read_dir(&place.0).unwrap();
    let mut names: Vec<String> = all
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Somebody's keys: for whom, and what opens it.
fn pair(place: &Place, name: &str) -> (Recipients, Keys) {
    let secret = age::x25519::Identity::generate();
    let file = std::env::temp_dir().join(format!(
        "{}-{name}.key",
        place.0.file_name().unwrap().to_string_lossy()
    ));
    let text = format!("# a key\n\n{}\n", secret.to_string().expose_secret());
    fs::write(&file, text).unwrap();
    let keys = Keys::read(std::slice::from_ref(&file)).unwrap();
    fs::remove_file(file).unwrap();
    let public = secret.to_public().to_string();
    (Recipients::new::<&Path>(&[public], &[]).unwrap(), keys)
}

#[test]
fn packed_segments_give_the_same_answers_by_the_same_index() {
    for (number, (level, sealed)) in [(Some(1), false), (None, true), (Some(3), true)]
        .into_iter()
        .enumerate()
    {
        let place = Place::new(&format!("archive-same-{number}"));
        let segments = recording(&place, 2, 12_000);
        let (recipients, keys) = pair(&place, "a");
        let questions = ["", "host 192.0.2.77", "port 443 and not port 444"];
        let before = questions.map(|question| ask(&place.0, question, &Keys::default()));
        assert!(before[1].1.chunks_skipped > 20, "{:?}", before[1].1);
        let how = How {
            level,
            recipients: if sealed {
                recipients
            } else {
                Recipients::default()
            },
        };
        for segment in &segments {
            let flows = place.0.join(crate::name::flows_file(&segment.to_string()));
            fs::write(flows, "who spoke with whom").unwrap();
            let packed = pack(&place.0, segment, &how, &mut || true).unwrap();
            assert!(matches!(packed, Packed::Done(before, after) if before > 0 && after > 0));
        }
        let there = names(&place);
        assert_eq!(there.len(), 4, "{there:?}");
        let suffix = how.packing().suffix();
        let index = if sealed { ".vnx.age" } else { ".vnx" };
        assert!(
            there
                .iter()
                .all(|name| name.ends_with(&format!(".pcapng{suffix}")) || name.ends_with(index))
        );
        for (question, (packets, tally, _)) in questions.into_iter().zip(before) {
            let (got, with, problems) = ask(&place.0, question, &keys);
            assert!(problems.is_empty(), "{problems:?}");
            assert!(
                got == packets,
                "{question}: {} of {}",
                got.len(),
                packets.len()
            );
            assert_eq!(with, tally, "{question}");
        }
        if sealed {
            let (_, others) = pair(&place, "b");
            for (keys, words) in [
                (Keys::default(), "--identity"),
                (others, "none of the keys"),
            ] {
                let (got, _, problems) = ask(&place.0, "", &keys);
                assert!(got.is_empty());
                assert_eq!(problems.len(), 2);
                assert!(problems[0].contains(words), "{problems:?}");
            }
            // Its index is not made anew in the open.
            let path = find(std::slice::from_ref(&place.0)).unwrap()[0]
                .path
                .clone();
            assert!(!rebuild(&path).unwrap());
        } else {
            let path = find(std::slice::from_ref(&place.0)).unwrap()[0]
                .path
                .clone();
            fs::remove_file(Sidecar::path_of(&path)).unwrap();
            assert!(rebuild(&path).unwrap());
            assert!(!rebuild(&path).unwrap());
        }
        assert_eq!(names(&place).len(), 4);
    }
}

#[test]
fn whatever_a_crash_leaves_each_packet_is_read_once() {
    let place = Place::new("archive-crash");
    let segments = recording(&place, 1, 3000);
    let plain = place.0.join(segments[0].to_string());
    let index = place.0.join(segments[0].index());
    let (bytes, index_bytes) = (fs::read(&plain).unwrap(), fs::read(&index).unwrap());
    let (recipients, keys) = pair(&place, "a");
    let (expected, ..) = ask(&place.0, "", &keys);
    for sealed in [false, true] {
        let how = How {
            level: Some(1),
            recipients: if sealed {
                recipients.clone()
            } else {
                Recipients::default()
            },
        };
        let finished = |state: &str| {
            let (got, _, problems) = ask(&place.0, "", &keys);
            assert!(
                problems.is_empty() && got == expected,
                "{state}: {problems:?}"
            );
            let packed = pack(&place.0, &segments[0], &how, &mut || true).unwrap();
            assert!(matches!(packed, Packed::Done(..)), "{state}: {packed:?}");
            let (got, _, problems) = ask(&place.0, "", &keys);
            assert!(
                problems.is_empty() && got == expected,
                "{state}: {problems:?}"
            );
            names(&place)
        };
        let suffix = how.packing().suffix();
        // Killed while it was written.
        fs::write(&plain, &bytes).unwrap();
        fs::write(&index, &index_bytes).unwrap();
        fs::write(
            plain.with_extension(format!("pcapng{suffix}.part")),
            &bytes[..999],
        )
        .unwrap();
        let done = finished("a part of it");
        assert_eq!(done.len(), 2, "{done:?}");
        // Killed before the segment was removed.
        fs::write(&plain, &bytes).unwrap();
        assert_eq!(finished("both"), done);
        fs::write(&plain, &bytes).unwrap();
        fs::write(&index, &index_bytes).unwrap();
        assert_eq!(finished("both, and the index"), done);
        if sealed {
            // Killed before the index was removed.
            fs::write(&index, &index_bytes).unwrap();
            let job = ledger("r-x.pcapng");
            Worker::start(how.clone(), "r".into(), vec![place.0.clone()], 100, job)
                .unwrap()
                .finish();
            assert_eq!(names(&place), done);
        }
        for name in names(&place) {
            fs::remove_file(place.0.join(name)).unwrap();
        }
    }
}

#[test]
fn who_reads_a_segment_keeps_it_and_who_gives_up_leaves_nothing() {
    let place = Place::new("archive-lease");
    let segments = recording(&place, 1, 3000);
    let how = How {
        level: Some(1),
        ..How::default()
    };
    let before = names(&place);
    let refused = pack(&place.0, &segments[0], &how, &mut || false).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::Interrupted);
    assert_eq!(names(&place), before);
    let held = lease(&place.0.join(segments[0].to_string())).unwrap();
    let flows = place
        .0
        .join(crate::name::flows_file(&segments[0].to_string()));
    fs::write(&flows, "who spoke with whom").unwrap();
    let packed = pack(&place.0, &segments[0], &how, &mut || true).unwrap();
    assert!(matches!(packed, Packed::Leased(..)), "{packed:?}");
    assert!(!flows.exists(), "they go before the segment does");
    assert_eq!(names(&place).len(), 3);
    assert_eq!(ask(&place.0, "", &Keys::default()).0.len(), 3000);
    drop(held);
    let packed = pack(&place.0, &segments[0], &how, &mut || true).unwrap();
    assert!(matches!(packed, Packed::Done(..)), "{packed:?}");
    assert_eq!(names(&place).len(), 2);
    // It is recycled while somebody packs it.
    let segments = recording(&place, 2, 100);
    let path = place.0.join(segments[1].to_string());
    let mut remove = || {
        let _ = fs::remove_file(&path);
        true
    };
    assert_eq!(
        pack(&place.0, &segments[1], &how, &mut remove).unwrap(),
        Packed::Gone
    );
    assert!(names(&place).iter().all(|name| !name.ends_with(".part")));
}

#[test]
fn damage_is_told_and_nothing_else_is_read_in_its_place() {
    let place = Place::new("archive-damage");
    let segments = recording(&place, 1, 12_000);
    let (recipients, keys) = pair(&place, "a");
    let (expected, ..) = ask(&place.0, "", &keys);
    for sealed in [false, true] {
        let how = How {
            level: Some(1),
            recipients: if sealed {
                recipients.clone()
            } else {
                Recipients::default()
            },
        };
        let mut again = recording(&place, 1, 12_000);
        pack(&place.0, &again.remove(0), &how, &mut || true).unwrap();
        let path = find(std::slice::from_ref(&place.0)).unwrap()[0]
            .path
            .clone();
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
        let (got, _, problems) = ask(&place.0, "", &keys);
        assert!(!problems.is_empty());
        assert!(
            got.len() < expected.len() && !got.is_empty(),
            "{}",
            got.len()
        );
        assert!(
            got.iter()
                .all(|packet| expected.binary_search(packet).is_ok())
        );
        for name in names(&place) {
            fs::remove_file(place.0.join(name)).unwrap();
        }
    }
    assert_eq!(segments.len(), 1);
}

/// Books of one directory whose segment at work has this name.
fn ledger(at_work: &str) -> Arc<Ledger> {
    let ledger = Ledger::new("r", &["there".to_owned()]);
    ledger.lane(0, |lane| {
        at_work.clone_into(&mut lane.segment);
        lane.open = true;
    });
    Arc::new(ledger)
}

fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !test() {
        assert!(Instant::now() < limit, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_worker_packs_what_is_closed_and_leaves_the_rest() {
    let place = Place::new("archive-worker");
    let segments = recording(&place, 5, 500);
    let books = ledger(&segments[3].to_string());
    let how = How {
        level: Some(1),
        ..How::default()
    };
    let start = || {
        let (how, books) = (how.clone(), Arc::clone(&books));
        Worker::start(how, "r".into(), vec![place.0.clone()], 0, books).unwrap()
    };
    let worker = start();
    let status = || books.status().archive.unwrap();
    eventually("three are packed", || status().segments == 3);
    worker.finish();
    let plain = |n: usize| place.0.join(segments[n].to_string()).exists();
    assert_eq!(
        [0, 1, 2, 3, 4].map(plain),
        [false, false, false, true, true]
    );
    // The recorder ends: its segment is closed. The fifth is nobody's yet.
    books.lane(0, |lane| lane.open = false);
    start().finish();
    assert_eq!([3, 4].map(plain), [false, true]);
    assert_eq!((status().segments, status().waiting), (4, 0));
    assert!(status().bytes_after > 0 && status().bytes_before > status().bytes_after);
}

#[test]
fn what_is_too_slow_leaves_the_oldest_as_they_are_or_only_encrypts_them() {
    for sealed in [false, true] {
        let place = Place::new(&format!("archive-slow-{sealed}"));
        let segments = recording(&place, 20, 20);
        let books = ledger("none");
        let recipients = match sealed {
            true => pair(&place, "a").0,
            false => Recipients::default(),
        };
        let how = How {
            level: Some(1),
            recipients,
        };
        let dirs = vec![place.0.clone()];
        let worker = Worker::start(how, "r".into(), dirs, 100, Arc::clone(&books)).unwrap();
        let status = || books.status().archive.unwrap();
        let wanted = if sealed { 20 } else { 16 };
        eventually("the rest is packed", || status().segments == wanted);
        worker.finish();
        let status = status();
        assert_eq!(
            (status.left, status.hurried),
            if sealed { (0, 4) } else { (4, 0) }
        );
        let suffix = if sealed { ".age" } else { "" };
        for (n, segment) in segments.iter().enumerate() {
            let path = place.0.join(format!("{segment}{suffix}"));
            assert_eq!(path.exists(), n < 4, "{}", path.display());
        }
    }
}

#[test]
fn a_quota_counts_and_recycles_packed_segments() {
    let place = Place::new("archive-quota");
    let segments = recording(&place, 4, 500);
    let (recipients, _) = pair(&place, "a");
    for (n, segment) in segments.iter().enumerate() {
        let how = How {
            level: (n % 2 == 0).then_some(1),
            recipients: if n > 1 {
                recipients.clone()
            } else {
                Recipients::default()
            },
        };
        if n != 1 {
            pack(&place.0, segment, &how, &mut || true).unwrap();
        }
    }
    fs::write(place.0.join(format!("{}.zst.part", segments[3])), "x").unwrap();
    let mut disk = Real::new(false).0;
    let all: u64 = disk
        .list(&place.0)
        .unwrap()
        .iter()
        .map(|entry| entry.bytes)
        .sum();
    let keep = Some(segments[3].sequence);
    let mut enforce = |bytes| {
        Quota::Bytes(bytes)
            .enforce(&mut disk, &place.0, "r", keep, 0)
            .unwrap()
    };
    assert_eq!(enforce(all), (0, true));
    assert_eq!(enforce(all - 1), (1, true));
    let (removed, enough) = enforce(0);
    assert_eq!((removed, enough), (2, false));
    // Each went with its index; what is being written stays.
    let left = names(&place);
    assert_eq!(left.len(), 3, "{left:?}");
    assert!(left.iter().all(|name| name.starts_with("r-0000000003-")));
}

#[test]
fn keys_that_are_none_are_told_of() {
    let place = Place::new("archive-keys");
    let told = |text: &str| Recipients::new::<&Path>(&[text.into()], &[]).unwrap_err();
    assert!(told("ssh-ed25519 AAAA").contains("no public key of age"));
    assert!(told("AGE-SECRET-KEY-1QQQ").contains("secret key"));
    let file = place.0.join("keys");
    let recipients = |text: &str| {
        fs::write(&file, text).unwrap();
        Recipients::new(&[], std::slice::from_ref(&file)).unwrap_err()
    };
    assert!(recipients("# nothing\n").contains("no key in it"));
    assert!(recipients("\nage1wrong\n").contains("keys: line 2: "));
    let keys = |text: &str| {
        fs::write(&file, text).unwrap();
        Keys::read(std::slice::from_ref(&file)).unwrap_err()
    };
    let slip = keys("AGE-SECRET-KEY-1SLIP");
    assert!(
        slip.contains("no key of age") && !slip.contains("SLIP"),
        "{slip}"
    );
    assert!(keys("age1qqq").contains("public key"));
    assert!(keys("age-encryption.org/v1\n").contains("age -d"));
    let missing: Vec<PathBuf> = vec![place.0.join("missing")];
    assert!(Keys::read(&missing).unwrap_err().contains("missing: "));
    assert!(Reader::open(place.0.join("missing")).is_err());
}

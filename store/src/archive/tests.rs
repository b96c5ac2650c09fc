//! Packed segments give the same answers, and a crash costs nothing.

mod crashes;
mod jobs;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use age::secrecy::ExposeSecret;

use super::job::{AGAIN, Job};
use super::*;
use crate::disk::{Disk, Real, lease};
use crate::extract::{Extract, Query, Tally, find};
use crate::filter::Filter;
use crate::index::{Sidecar, rebuild};
use crate::name::{Format, SegmentName, flows_file};
use crate::read::Reader;
use crate::read::tests::Maker;
use crate::record::{Ledger, Quota};
use vnplug_testing::TestDir;

use crate::testing::Traffic;

type Answer = Vec<(u64, Vec<u8>)>;

/// A directory with a recording, and somebody's keys.
pub(crate) struct Lab {
    pub(crate) place: TestDir,
    recipients: Recipients,
    pub(crate) keys: Keys,
}

impl Lab {
    pub(crate) fn new(name: &str) -> Self {
        let place = TestDir::new(&format!("archive-{name}"));
        let (recipients, keys) = pair();
        Self {
            place,
            recipients,
            keys,
        }
    }

    fn path(&self, name: impl std::fmt::Display) -> PathBuf {
        self.place.0.join(name.to_string())
    }

    /// Segments of `packets` packets each, with their indexes and flows.
    pub(crate) fn record(&self, segments: std::ops::Range<u64>, packets: u64) -> Vec<SegmentName> {
        let make = |sequence| {
            let (name, bytes) = segment(sequence, packets);
            fs::write(self.path(&name), bytes).unwrap();
            rebuild(&self.path(&name)).unwrap();
            fs::write(self.path(flows_file(&name.to_string())), "who with whom").unwrap();
            name
        };
        segments.map(make).collect()
    }

    pub(crate) fn how(&self, level: Option<i32>, sealed: bool) -> How {
        How {
            level,
            recipients: match sealed {
                true => self.recipients.clone(),
                false => Recipients::default(),
            },
        }
    }

    /// What packs all that is there, as of recorders before.
    fn job(&self, how: How) -> (Job, Arc<Ledger>) {
        job_on(Box::new(Real::new(false).0), &self.place.0, how)
    }

    /// Packs all that is there.
    pub(crate) fn pack(&self, how: How) {
        let (mut job, books) = self.job(how);
        while job.round(Instant::now(), true, &mut || true) {}
        assert_eq!(books.status().archive.unwrap().trouble, "");
    }

    fn ask(&self, expression: &str) -> (Answer, Tally, Vec<String>) {
        ask(&self.place.0, expression, &self.keys)
    }

    fn names(&self) -> Vec<String> {
        let all = fs::read_dir(&self.place.0).unwrap();
        let mut names: Vec<String> = all
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn empty(&self) {
        for name in self.names() {
            fs::remove_file(self.path(name)).unwrap();
        }
    }
}

fn job_on(disk: Box<dyn Disk>, dir: &Path, how: How) -> (Job, Arc<Ledger>) {
    let books = Arc::new(Ledger::new("r", &["there".to_owned()]));
    let dirs = vec![(dir.to_owned(), None)];
    let job = Job::new(Some(how), "r".into(), dirs, 100, Arc::clone(&books), disk);
    (job, books)
}

/// Its name and content.
fn segment(sequence: u64, packets: u64) -> (SegmentName, Vec<u8>) {
    let name = SegmentName {
        recording: "r".into(),
        sequence,
        start_ns: 1_700_000_000_000_000_000 + sequence * 1_000_000_000,
        format: Format::Pcapng,
    };
    let mut traffic = Traffic::new(7 + sequence);
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
    (name, maker.bytes)
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

/// Somebody's keys: for whom, and what opens it.
fn pair() -> (Recipients, Keys) {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let secret = age::x25519::Identity::generate();
    // Relaxed: a number.
    let place = TestDir::new(&format!(
        "archive-key{}",
        NEXT.fetch_add(1, Ordering::Relaxed)
    ));
    let file = place.0.join("key");
    let text = format!("# a key\n\n{}\n", secret.to_string().expose_secret());
    fs::write(&file, text).unwrap();
    let keys = Keys::read(&[file]).unwrap();
    let public = secret.to_public().to_string();
    (Recipients::new::<&Path>(&[public], &[]).unwrap(), keys)
}

#[test]
fn packed_segments_give_the_same_answers_by_the_same_index() {
    for (level, sealed) in [(Some(1), false), (None, true), (Some(3), true)] {
        let lab = Lab::new(&format!("same-{level:?}-{sealed}"));
        lab.record(0..2, 12_000);
        let questions = ["", "host 192.0.2.77", "port 443 and not port 444"];
        let before = questions.map(|question| lab.ask(question));
        assert!(before[1].1.chunks_skipped > 20, "{:?}", before[1].1);
        let how = lab.how(level, sealed);
        lab.pack(how.clone());
        let there = lab.names();
        assert_eq!(there.len(), 4, "{there:?}");
        let suffix = how.packing().suffix();
        let index = if sealed { ".vnx.age" } else { ".vnx" };
        assert!(
            there
                .iter()
                .all(|name| name.ends_with(&format!(".pcapng{suffix}")) || name.ends_with(index))
        );
        for (question, (packets, tally, _)) in questions.into_iter().zip(before) {
            let (got, with, problems) = lab.ask(question);
            assert!(problems.is_empty(), "{problems:?}");
            assert!(
                got == packets,
                "{question}: {} of {}",
                got.len(),
                packets.len()
            );
            assert_eq!(with, tally, "{question}");
        }
        let path = find(std::slice::from_ref(&lab.place.0))
            .unwrap()
            .next()
            .unwrap()
            .path
            .clone();
        if sealed {
            for (keys, words) in [
                (Keys::default(), "--identity"),
                (pair().1, "none of the keys"),
            ] {
                let (got, _, problems) = ask(&lab.place.0, "", &keys);
                assert!(got.is_empty());
                assert_eq!(problems.len(), 2);
                assert!(problems[0].contains(words), "{problems:?}");
            }
            // Its index is not made again in the open.
            assert!(!rebuild(&path).unwrap());
        } else {
            fs::remove_file(Sidecar::path_of(&path)).unwrap();
            assert!(rebuild(&path).unwrap());
            assert!(!rebuild(&path).unwrap());
        }
        assert_eq!(lab.names().len(), 4);
    }
}

#[test]
fn the_time_and_the_rights_of_a_segment_stay() {
    use std::os::unix::fs::PermissionsExt as _;
    let lab = Lab::new("time");
    let segments = lab.record(0..1, 100);
    let plain = lab.path(&segments[0]);
    let at = std::time::UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789);
    fs::File::options()
        .write(true)
        .open(&plain)
        .unwrap()
        .set_modified(at)
        .unwrap();
    lab.pack(lab.how(Some(1), true));
    let packed = fs::metadata(lab.path(format!("{}.zst.age", segments[0]))).unwrap();
    assert_eq!(packed.modified().unwrap(), at);
    assert_eq!(packed.permissions().mode() & 0o137, 0);
}

#[test]
fn what_the_disk_spoils_does_not_take_the_place_of_the_segment() {
    let lab = Lab::new("spoilt");
    let segments = lab.record(0..1, 12_000);
    let part = lab.path(format!("{}.zst.part", segments[0]));
    let (mut job, books) = lab.job(lab.how(Some(1), false));
    let mut spoilt = false;
    let mut pulse = || {
        // Once it is whole it ends with its table.
        let whole = fs::read(&part).unwrap_or_default();
        if !spoilt && whole.ends_with(&[0xb1, 0xea, 0x92, 0x8f]) {
            let mut bytes = whole;
            bytes[99] ^= 1;
            fs::write(&part, bytes).unwrap();
            spoilt = true;
        }
        true
    };
    let now = Instant::now();
    assert!(job.round(now, false, &mut pulse));
    assert!(spoilt);
    job.tell();
    let trouble = books.status().archive.unwrap().trouble;
    assert!(trouble.contains("is not what was written"), "{trouble}");
    assert_eq!(lab.names().len(), 3, "{:?}", lab.names());
    assert!(lab.path(&segments[0]).exists());
    assert!(job.round(now + AGAIN, false, &mut || true));
    assert_eq!(lab.ask("").0.len(), 12_000);
    assert!(!lab.path(&segments[0]).exists());
}

#[test]
fn damage_is_told_and_nothing_else_is_read_in_its_place() {
    for sealed in [false, true] {
        let lab = Lab::new(&format!("damage-{sealed}"));
        lab.record(0..1, 12_000);
        let (expected, ..) = lab.ask("");
        lab.pack(lab.how(Some(1), sealed));
        let path = find(std::slice::from_ref(&lab.place.0))
            .unwrap()
            .next()
            .unwrap()
            .path
            .clone();
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&path, bytes).unwrap();
        let (got, _, problems) = lab.ask("");
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
    }
}

#[test]
fn a_quota_counts_and_recycles_packed_segments() {
    let lab = Lab::new("quota");
    for (sequence, (level, sealed)) in [(Some(1), false), (Some(1), true), (None, true)]
        .into_iter()
        .enumerate()
    {
        lab.record(sequence as u64..sequence as u64 + 1, 500);
        lab.pack(lab.how(level, sealed));
    }
    lab.record(3..4, 500);
    let segments = lab.record(4..5, 500);
    fs::write(lab.path(format!("{}.zst.part", segments[0])), "x").unwrap();
    let mut disk = Real::new(false).0;
    let entries = disk.list(&lab.place.0).unwrap();
    let all: u64 = entries.iter().map(|entry| entry.bytes).sum();
    let keep = Some(segments[0].sequence);
    let mut enforce = |bytes| {
        let quota = Quota::Bytes(bytes);
        let room = quota.enforce(&mut disk, &lab.place.0, "r", keep, 0, &mut |_| {});
        let room = room.unwrap();
        (room.segments, room.enough)
    };
    assert_eq!(enforce(all), (0, true));
    assert_eq!(enforce(all - 1), (1, true));
    assert_eq!(enforce(0), (3, false));
    // Each went with what is beside it; what is being written stays.
    let left = lab.names();
    assert_eq!(left.len(), 4, "{left:?}");
    assert!(left.iter().all(|name| name.starts_with("r-0000000004-")));
}

#[test]
fn keys_that_are_none_are_told_of() {
    let place = TestDir::new("archive-no-keys");
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

//! Beside a recorder: what it writes, packs, and recycles while queries are at work.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use vnplug::{Meta, Packet};
use vnplug_frame::capfile::write::Interface;
use vnplug_store::archive::{How, Recipients, Worker};
use vnplug_store::disk::{Buffer, Real};
use vnplug_store::name::SegmentName;
use vnplug_store::record::{Ledger, Quota, Recorder, Settings, Status, read_state};

use crate::lab::{Lab, SECOND, START_NS, Sample, age, mix, run, udp};

const SUMS: &str = "select sum(packets), sum(bytes) from flows";

/// A recorder at work in the lab's directory, that waits for nothing.
fn recorder(lab: &Lab) -> Recorder {
    let interface = Interface {
        name: "lab".into(),
        link_type: 1,
        snaplen: 0,
        filter: String::new(),
    };
    let settings = Settings {
        chunk_bytes: 1 << 20,
        sync_every: Duration::ZERO,
        ..Settings::new("live", vec![interface])
    };
    let buffers = (0..8).map(|id| Buffer::new(1 << 20, id)).collect();
    let disk = Box::new(Real::new(false).0);
    Recorder::start(settings, vec![(lab.0.clone(), disk)], buffers).unwrap()
}

/// Has packets of 1,000 bytes on the disk, and said so.
fn take(lab: &Lab, recorder: &mut Recorder, numbers: std::ops::Range<u64>) {
    for number in numbers.clone() {
        let bytes = udp([10, 0, 0, 1], [10, 0, 0, 2], [number as u16, 53], 1000);
        let meta = Meta {
            ts_ns: START_NS + number * SECOND / 1000,
            wire_len: 1000,
            flow_hash: 0,
            lost: 0,
            flags: 0,
            vlan_tci: 0,
            source: 0,
            queue: 0,
            ..Meta::default()
        };
        let packet = Packet {
            meta,
            bytes: &bytes,
        };
        assert!(recorder.take(0, &packet, &mut || false));
    }
    recorder.flush();
    let is_told = |state: Status| state.mark >= numbers.end;
    let limit = SystemTime::now() + Duration::from_secs(120);
    while !read_state(&lab.0, "live").is_ok_and(is_told) {
        assert!(
            SystemTime::now() < limit,
            "{:?}",
            recorder.ledger().status()
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The segments that are there, packed or not.
fn segments(lab: &Lab) -> Vec<PathBuf> {
    let files = fs::read_dir(&lab.0).unwrap().map(|file| file.unwrap());
    let is_one = |name: &str| SegmentName::parse(name).is_some();
    let files = files.filter(|file| is_one(file.file_name().to_str().unwrap()));
    let mut all: Vec<PathBuf> = files.map(|file| file.path()).collect();
    all.sort();
    all
}

fn flows(lab: &Lab) -> usize {
    let files = fs::read_dir(&lab.0)
        .unwrap()
        .map(|file| file.unwrap().path());
    files
        .filter(|path| path.to_str().unwrap().ends_with(".flows.parquet"))
        .count()
}

#[test]
fn what_a_recorder_has_written_so_far_is_counted_and_no_file_made_of_it() {
    let lab = Lab::new("live");
    let mut recorder = recorder(&lab);
    take(&lab, &mut recorder, 0..3000);
    assert_eq!(lab.lines(SUMS, &[]), ["3000,3000000"]);
    take(&lab, &mut recorder, 3000..7000);
    let segment = segments(&lab).pop().unwrap();
    assert_eq!(lab.lines(SUMS, &[]), ["7000,7000000"]);
    // The wire is quiet: still nothing is made, though it was not written to lately.
    age(&segment, SystemTime::now() - Duration::from_secs(120));
    assert_eq!(lab.lines(SUMS, &[]), ["7000,7000000"]);
    assert_eq!(lab.lines("select open from segments", &[]), ["true"]);
    let prepared = run(&["--prepare", lab.0.to_str().unwrap()]);
    assert!(prepared.status.success() && prepared.stdout.is_empty());
    assert_eq!(flows(&lab), 0);
    recorder.finish();
    assert_eq!(lab.lines(SUMS, &[]), ["7000,7000000"]);
    assert_eq!(lab.lines("select open from segments", &[]), ["false"]);
    assert_eq!(flows(&lab), 1);
}

#[test]
fn a_segment_of_a_recorder_that_was_killed_is_taken_for_closed_in_the_end() {
    let lab = Lab::new("killed");
    let mut recorder = recorder(&lab);
    take(&lab, &mut recorder, 0..100);
    // What a killed one leaves: its state says that it is at work.
    let state = fs::read(lab.path("live.state")).unwrap();
    recorder.finish();
    fs::write(lab.path("live.state"), state).unwrap();
    let segment = segments(&lab).pop().unwrap();
    fs::remove_file(segment.with_extension("vnx")).unwrap();
    age(&segment, SystemTime::now() - Duration::from_secs(60));
    assert_eq!(lab.lines("select open from segments", &[]), ["true"]);
    age(&segment, SystemTime::now() - Duration::from_secs(7200));
    assert_eq!(lab.lines(SUMS, &[]), ["100,100000"]);
    assert_eq!(flows(&lab), 1);
}

#[test]
fn a_packed_segment_is_asked_as_it_was() {
    let lab = Lab::new("packed");
    let plain = lab.segment(0, &mix(30, 2000));
    assert!(vnplug_store::index::rebuild(&plain).unwrap());
    let before = lab.lines(SUMS, &[]);
    let how = How {
        level: Some(3),
        recipients: Recipients::default(),
    };
    let ledger = Arc::new(Ledger::new("t", &[lab.0.display().to_string()]));
    let worker = Worker::start(
        Some(how),
        "t".into(),
        vec![(lab.0.clone(), None)],
        1,
        ledger,
    )
    .unwrap();
    let limit = SystemTime::now() + Duration::from_secs(120);
    while plain.exists() {
        assert!(SystemTime::now() < limit, "it is not packed");
        std::thread::sleep(Duration::from_millis(20));
    }
    worker.finish();
    assert!(segments(&lab)[0].extension().unwrap() == "zst");
    assert_eq!(lab.lines(SUMS, &[]), before);
    assert_eq!(lab.lines(SUMS, &["--no-files"]), before);
    // The name that it had means it, too.
    let output = run(&[SUMS, plain.to_str().unwrap(), "--format", "csv"]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().nth(1), Some(before[0].as_str()));
}

#[test]
fn a_file_counts_once_under_whatever_names() {
    let lab = Lab::new("twice");
    let segment = lab.segment(0, &mix(31, 300));
    lab.segment(1, &mix(32, 200));
    let name = segment.file_name().unwrap();
    symlink(name, lab.path("latest.pcapng")).unwrap();
    let again = Lab::new("again");
    let link = again.path("link");
    symlink(&lab.0, &link).unwrap();
    let dotted = lab.path(".");
    let places = [&lab.0, &dotted, &link, &segment, &lab.0];
    let mut words = vec!["select sum(packets) from flows", "--format", "csv"];
    words.extend(places.map(|place| place.to_str().unwrap()));
    for more in [&[][..], &["--no-files"]] {
        let output = run(&[&words[..], more].concat());
        assert!(output.status.success(), "{output:?}");
        assert!(
            String::from_utf8(output.stdout)
                .unwrap()
                .ends_with("\n500\n")
        );
    }
    assert_eq!(flows(&lab), 2);
}

/// A query whose answer is longer than a pipe, at work, and the first byte of it.
fn begun(lab: &Lab, more: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let sql = "select src, dst, src_port, first, last, segment, interface \
               from flows order by dst, src, last";
    let mut child = Command::new(env!("CARGO_BIN_EXE_vnplug-query"))
        .args([sql, lab.0.to_str().unwrap(), "--format", "csv"])
        .args(more)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut answer = BufReader::with_capacity(1, child.stdout.take().unwrap());
    let mut first = [0];
    answer.read_exact(&mut first).unwrap();
    (child, answer)
}

/// As many flows as packets.
fn many(count: u64) -> Vec<Sample> {
    let packet = |n: u64| {
        let [a, b, c, d] = (n as u32).wrapping_mul(0x9e37_79b1).to_be_bytes();
        let frame = udp([10, a, b, c], [d, 1, 1, 1], [n as u16, 53], 60);
        Sample::new(START_NS + n, frame)
    };
    (0..count).map(packet).collect()
}

#[test]
fn a_segment_that_is_recycled_is_read_to_its_end_by_a_query() {
    let lab = Lab::new("leased");
    lab.segment(0, &many(10_000));
    lab.segment(1, &many(10_000));
    let (mut child, mut answer) = begun(&lab, &[]);
    let recycle = || {
        let mut disk = Real::new(false).0;
        Quota::Bytes(0)
            .enforce(&mut disk, &lab.0, "t", None, 1, &mut |_| {})
            .unwrap()
            .segments
    };
    assert_eq!(recycle(), 2);
    assert_eq!((segments(&lab).len(), flows(&lab)), (0, 0));
    let mut text = String::new();
    answer.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    // The line of names, too.
    assert_eq!(text.lines().count(), 20_001);
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let lab = Lab::new("interrupted");
    lab.segment(0, &many(100_000));
    let spill = Lab::new("interrupted-spill");
    let place = spill.0.to_str().unwrap();
    let limits = ["--memory", "24M", "--threads", "1", "--spill", place];
    // It waits for its reader, and has put most of the answer on the disk.
    let (mut child, answer) = begun(&lab, &limits);
    fn files(dir: &Path) -> usize {
        let entries = fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        entries
            .map(|path| if path.is_dir() { files(&path) } else { 1 })
            .sum()
    }
    assert!(files(&spill.0) > 0);
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-INT", &pid])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(answer);
    assert_eq!(fs::read_dir(&spill.0).unwrap().count(), 0);
}

#[test]
fn more_segments_than_files_may_be_open_at_first_are_read() {
    let lab = Lab::new("limit");
    for n in 0..40 {
        lab.segment(n, &mix(100 + n, 10));
    }
    for more in ["--no-files", "--format=csv"] {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -Sn 24; exec \"$@\"", "sh"]);
        shell.args([
            env!("CARGO_BIN_EXE_vnplug-query"),
            "select sum(packets) n from flows",
        ]);
        let output = shell.arg(&lab.0).arg(more).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8(output.stdout).unwrap().contains("400"));
    }
}

#[test]
fn flows_are_as_readable_as_their_segment_and_not_more() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    let lab = Lab::new("mode");
    for (n, mode) in [(0, 0o600), (1, 0o640), (2, 0o644), (3, 0o400)] {
        let segment = lab.segment(n, &mix(40 + n, 20));
        let name = vnplug_store::name::flows_file(segment.file_name().unwrap().to_str().unwrap());
        // One that a killed query left, which everybody can read.
        let left = lab.path(&format!("{name}.tmp"));
        File::create(&left).unwrap();
        fs::set_permissions(&left, fs::Permissions::from_mode(0o666)).unwrap();
        fs::set_permissions(&segment, fs::Permissions::from_mode(mode)).unwrap();
        assert!(lab.number("select count(*) from flows", &[]) > 0);
        let (of, is) = (
            fs::metadata(&segment).unwrap(),
            fs::metadata(lab.path(&name)).unwrap(),
        );
        assert_eq!(is.mode() & 0o7777, mode, "{mode:o}");
        assert_eq!((is.uid(), is.gid()), (of.uid(), of.gid()));
    }
}

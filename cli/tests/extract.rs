//! `extract`, `flows` and `index`: what they refuse, and how they tell what is wrong with recordings.

#![expect(clippy::unwrap_used, reason = "a test's helper fails loudly")]

#[path = "extract/ipfix.rs"]
mod ipfix;
mod support;

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use support::{run, vnplug};
use vnplug_store::extract::{Format, Output, Packet};
use vnplug_store::index::{Sidecar, rebuild};
use vnplug_store::read::{Interface, Reader};
use vnplug_testing::TestDir;

/// Writes a capture of these frames, each with its time in nanoseconds after [`START_NS`].
fn write(capture: &Path, frames: impl Iterator<Item = (u64, impl AsRef<[u8]>)>) {
    let mut output = Output::new(File::create(capture).unwrap(), Format::Pcapng);
    for (after_ns, frame) in frames {
        let bytes = frame.as_ref();
        let packet = Packet {
            ts_ns: START_NS + after_ns,
            bytes,
            wire_len: bytes.len() as u32,
            flags: 0,
            lost: 0,
            comment: "",
            interface: &Interface::ethernet(),
        };
        output.write(&packet).unwrap();
    }
    output.finish().unwrap();
}

/// A recording of one segment in a directory of its own, with its index and a state.
struct Recording {
    scratch: TestDir,
    dir: PathBuf,
    segment: PathBuf,
}

impl Recording {
    fn new() -> Self {
        let scratch = TestDir::new("cli");
        let dir = scratch.path("rec");
        fs::create_dir(&dir).unwrap();
        let segment = dir.join("r-0000000001-20261121T134501.000000000Z.pcapng");
        write(&segment, (0..100).map(|n| (n, [7; 60])));
        assert!(rebuild(&segment).unwrap());
        fs::write(dir.join("r.state"), "{}").unwrap();
        Self {
            scratch,
            dir,
            segment,
        }
    }

    fn found(&self) -> PathBuf {
        self.scratch.path("found.pcapng")
    }

    /// Exit code, standard output and standard error.
    fn vnplug(&self, words: &[&Path]) -> (i32, String, String) {
        let words: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        run(vnplug(&self.scratch.path("nobody"), &words))
    }

    fn extract(&self, place: &Path, more: &[&str]) -> (i32, String, String) {
        let found = self.found();
        let words = [Path::new("extract"), place, Path::new("-w"), &found];
        let more = more.iter().map(Path::new);
        self.vnplug(&words.into_iter().chain(more).collect::<Vec<_>>())
    }
}

#[test]
fn what_is_read_is_never_written() {
    let it = Recording::new();
    let index = Sidecar::path_of(&it.segment);
    let files = [it.segment.clone(), index.clone(), it.dir.join("r.state")];
    let contents = || files.each_ref().map(|file| fs::read(file).unwrap());
    let before = contents();
    let soft = it.scratch.path("soft.pcapng");
    symlink(&it.segment, &soft).unwrap();
    let (hard, index_too) = (it.scratch.path("hard.pcapng"), it.scratch.path("hard"));
    fs::hard_link(&it.segment, &hard).unwrap();
    fs::hard_link(&index, &index_too).unwrap();
    let new = it.dir.join("new.pcapng");
    let forbidden = [&soft, &hard, &index_too, &new];
    for to in files.iter().chain(forbidden) {
        let (code, _, err) = it.vnplug(&["extract".as_ref(), &it.dir, "-w".as_ref(), to]);
        assert_eq!(code, 1, "{}: {err}", to.display());
        assert!(err.contains("write to another file"), "{err}");
        assert_eq!(contents(), before, "{}", to.display());
    }
    assert!(!new.exists());
    let (code, _, err) = it.extract(&it.dir, &[]);
    assert_eq!(code, 0, "{err}");
}

#[test]
fn a_closed_segment_that_was_cut_off_is_damage() {
    let it = Recording::new();
    let len = fs::metadata(&it.segment).unwrap().len();
    let segment = File::options().write(true).open(&it.segment).unwrap();
    segment.set_len(len / 2).unwrap();
    let words = format!("is cut off: {} bytes of the {len}", len / 2);
    for command in ["flows", "index", "index", "extract"] {
        let (code, _, err) = match command {
            "extract" => it.extract(&it.dir, &[]),
            _ => it.vnplug(&[command.as_ref(), &it.dir]),
        };
        assert_eq!(code, 1, "{command}: {err}");
        assert!(err.contains(&words), "{command}: {err}");
    }
    assert!(fs::metadata(it.found()).unwrap().len() > len / 4);
}

#[test]
fn a_segment_that_is_missing_in_the_middle_is_told_by_all() {
    let it = Recording::new();
    for n in 2..5 {
        let name = format!("r-{n:010}-20261121T13450{n}.000000000Z.pcapng");
        fs::copy(&it.segment, it.dir.join(name)).unwrap();
    }
    let (code, _, err) = it.extract(&it.dir, &[]);
    assert!(code == 0 && !err.contains("missing"), "{err}");
    fs::remove_file(
        it.dir
            .join("r-0000000003-20261121T134503.000000000Z.pcapng"),
    )
    .unwrap();
    for command in ["flows", "index", "extract", "verify"] {
        let (code, out, err) = match command {
            "extract" => it.extract(&it.dir, &[]),
            _ => it.vnplug(&[command.as_ref(), &it.dir]),
        };
        assert_eq!(code, 1, "{command}: {err}");
        let words = "sequence 3 is missing between r-0000000002-";
        assert!((out + &err).contains(words), "{command}: {err}");
    }
    // Not in the time that is asked for.
    let (code, _, err) = it.extract(&it.dir, &["--to", "20261121T134501.5Z"]);
    assert_eq!(code, 0, "{err}");
}

#[test]
fn what_was_read_is_told_beside_packets_on_standard_output_if_it_is_asked_for() {
    let it = Recording::new();
    let said = |more: &[&str]| {
        let words = [&["extract", it.dir.to_str().unwrap()], more].concat();
        let mut command = vnplug(&it.scratch.path("nobody"), &words);
        let output = command.output().unwrap();
        assert!(output.status.success() && output.stdout.len() > 6000);
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(said(&[]), "");
    for option in ["--verbose", "-v"] {
        let told = said(&[option]);
        assert!(told.contains("100 packets; 1 segment, "), "{told}");
    }
}

#[test]
fn an_exported_file_is_whole_and_no_more_readable_than_segments() {
    let it = Recording::new();
    let found = it.found();
    let (code, _, err) = it.extract(&it.dir, &[]);
    assert_eq!(code, 0, "{err}");
    assert!(
        err.contains("100 packets, 6,000 captured bytes in "),
        "{err}"
    );
    assert_eq!(fs::metadata(&found).unwrap().mode() & 0o027, 0);
    // One that is stopped leaves what was there, and nothing beside it.
    let before = fs::read(&found).unwrap();
    let large = it.scratch.path("large.pcapng");
    write(&large, (0..400_000).map(|n| (n, &[7; 1400])));
    let words = [
        "extract",
        large.to_str().unwrap(),
        "-w",
        found.to_str().unwrap(),
    ];
    let mut command = vnplug(&it.scratch.path("nobody"), &words);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    let parts = || {
        let entries = fs::read_dir(&it.scratch.0).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .filter(|path| path.extension().is_some_and(|ext| ext == "part"))
            .count()
    };
    while parts() == 0 {
        assert_eq!(fs::read(&found).unwrap(), before);
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{out:?}");
    assert!(
        String::from_utf8_lossy(&out.stderr).contains("stopped by a signal"),
        "{out:?}"
    );
    assert_eq!((fs::read(&found).unwrap(), parts()), (before, 0));
}

#[test]
fn a_file_named_like_a_filter_is_asked_about() {
    let it = Recording::new();
    fs::write(it.scratch.path("udp"), "").unwrap();
    let found = it.found();
    let words = ["extract", "rec", "udp", "-w", found.to_str().unwrap()];
    let mut command = vnplug(&it.scratch.path("nobody"), &words);
    command.current_dir(&it.scratch.0);
    let (code, _, err) = run(command);
    assert_eq!(code, 2, "{err}");
    assert!(
        err.contains("--filter 'udp'") && err.contains("./udp"),
        "{err}"
    );
    assert!(!found.exists());
    let words = [
        "extract",
        "rec",
        "--filter",
        "udp",
        "-w",
        found.to_str().unwrap(),
    ];
    let mut command = vnplug(&it.scratch.path("nobody"), &words);
    command.current_dir(&it.scratch.0);
    let (code, _, err) = run(command);
    assert!(code == 0 && err.contains("no packets match"), "{err}");
}

#[test]
fn a_place_that_is_not_there_is_called_so() {
    let it = Recording::new();
    let nope = it.scratch.path("nope");
    for more in [&[][..], &["udp"]] {
        let (code, _, err) = it.extract(&nope, more);
        assert!(code == 1 && err.contains("nope: no such file"), "{err}");
    }
    let (code, _, err) = it.extract(&it.dir, &[nope.to_str().unwrap()]);
    assert!(code == 1 && err.contains("nope: no such file"), "{err}");
    let (code, _, err) = it.extract(&it.dir, &["host and"]);
    assert!(code == 1 && err.contains("no such file"), "{err}");
    assert!(err.contains("no filter: "), "{err}");
    for command in ["flows", "index"] {
        let (code, _, err) = it.vnplug(&[command.as_ref(), &nope]);
        assert!(
            code == 1 && err.contains("nope: no such file"),
            "{command}: {err}"
        );
    }
    assert!(!it.found().exists());
}

#[test]
fn nothing_found_is_said_and_a_summary_is_json() {
    let it = Recording::new();
    let (code, _, err) = it.extract(&it.dir, &["arp"]);
    assert!(code == 0 && err.contains("no packets match"), "{err}");
    let (code, out, err) = it.vnplug(&["flows".as_ref(), &it.dir, "-f".as_ref(), "arp".as_ref()]);
    assert!(
        code == 0 && out.is_empty() && err.contains("no packets match"),
        "{err}"
    );
    let (code, out, _) = it.extract(&it.dir, &["--json"]);
    let summary: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &summary["packets"]), (0, &serde_json::json!(100)));
    assert_eq!(summary["captured_bytes"], 6000);
    assert_eq!(summary["losses"]["told_by_packets"]["packets"], 0);
    assert_eq!(summary["problems"], serde_json::json!([]));
    let words = ["extract".as_ref(), it.dir.as_path(), "--json".as_ref()];
    let (code, _, err) = it.vnplug(&words);
    assert!(code == 2 && err.contains("add `-w FILE`"), "{err}");
}

#[test]
fn what_a_range_lost_is_carried_over_and_told() {
    let it = Recording::new();
    let name = "r-0000000002-20261121T134502.000000000Z.pcapng";
    let mut output = Output::new(File::create(it.dir.join(name)).unwrap(), Format::Pcapng);
    for (n, lost) in [(1, 5), (2, 1 << 33)] {
        let packet = Packet {
            ts_ns: START_NS + n * 1_000_000_000,
            bytes: &[7; 60],
            wire_len: 60,
            flags: 2,
            lost,
            comment: "",
            interface: &Interface::ethernet(),
        };
        output.write(&packet).unwrap();
    }
    output.finish().unwrap();
    let loss = |from: &str, kind: &str, packets: Option<u64>| {
        serde_json::json!({ "run": 1, "from": from, "to": from, "packets": packets, "kind": kind,
                            "segment": "", "reason": "of this test" })
    };
    let state = serde_json::json!({ "version": 1, "recording": "r", "losses": [
        loss("20261121T134501.000000500Z", "disk", Some(1234)),
        loss("20261121T134501.000000600Z", "gap", None),
        loss("20261121T144501.000000000Z", "ring", Some(77)),
    ] });
    fs::write(it.dir.join("r.state"), state.to_string()).unwrap();
    // Also if the filter selects nothing.
    for filter in ["", "arp"] {
        let range = ["--to", "2026-11-21T13:46:00", filter];
        let (code, _, err) = it.extract(&it.dir, &range[..2 + usize::from(filter == "arp")]);
        assert_eq!(code, 0, "{err}");
        for words in [
            "8589934597 packets",
            "1234 packets (disk)",
            "1 gap of unknown size",
        ] {
            assert!(err.contains(words), "{words}: {err}");
        }
        let mut reader = Reader::open(it.found()).unwrap();
        let (mut notes, mut carried) = (reader.notes(), 0);
        while let Some(packet) = reader.read().unwrap() {
            carried += packet.lost;
        }
        notes.extend(reader.notes());
        let beside: u64 = notes.iter().filter_map(|note| note.dropped).sum();
        assert_eq!(
            (carried + beside, carried > 0),
            ((1 << 33) + 5, filter.is_empty())
        );
        let text: Vec<String> = notes.into_iter().map(|note| note.comment).collect();
        let text = text.join("\n");
        assert!(
            text.contains("1234 packets between 20261121T134501.000000500Z"),
            "{text}"
        );
        assert!(
            text.contains("an unknown number of packets between"),
            "{text}"
        );
        assert!(!text.contains("77 packets"), "{text}");
    }
    let (code, _, err) = it.vnplug(&["flows".as_ref(), &it.dir]);
    assert!(code == 0 && err.contains("77 packets (ring)"), "{err}");
    // Of one file, what was lost in its time.
    let (_, _, err) = it.extract(&it.segment, &[]);
    assert!(!err.contains("lost"), "{err}");
}

#[test]
fn a_range_that_ends_before_it_begins_is_wrong_usage() {
    let it = Recording::new();
    let range = ["--from", "2026-11-22", "--to", "2026-11-21"];
    let flows = ["flows".as_ref(), it.dir.as_path()];
    let flows: Vec<&Path> = flows.into_iter().chain(range.map(Path::new)).collect();
    for (code, _, err) in [it.extract(&it.dir, &range), it.vnplug(&flows)] {
        assert_eq!(code, 2, "{err}");
        assert!(err.contains("--from is later than --to"), "{err}");
    }
    assert!(!it.found().exists());
}

#[test]
fn a_directory_without_segments_is_told() {
    let it = Recording::new();
    let empty = it.scratch.path("empty");
    fs::create_dir(&empty).unwrap();
    fs::write(empty.join("old.pcap.gz"), "not read").unwrap();
    let words = format!("no segments in {}", empty.display());
    for command in ["flows", "index", "extract"] {
        let (code, _, err) = match command {
            "extract" => it.extract(&empty, &[]),
            _ => it.vnplug(&[command.as_ref(), &empty]),
        };
        assert!(code == 1 && err.contains(&words), "{command}: {err}");
    }
    assert!(!it.found().exists());
    // What is in the others is found all the same.
    let (code, out, err) = it.vnplug(&["flows".as_ref(), &it.dir, &empty]);
    assert!(code == 1 && err.contains(&words), "{err}");
    assert!(out.contains("100 packets"), "{out}");
}

#[test]
fn a_recording_without_packets_is_no_error() {
    let it = Recording::new();
    let begun = it.scratch.path("begun");
    fs::create_dir(&begun).unwrap();
    fs::write(begun.join("r.state"), "{}").unwrap();
    let (code, _, err) = it.extract(&begun, &[]);
    assert!(code == 0 && err.contains("no packets yet in "), "{err}");
    assert!(it.found().exists());
    let (code, _, err) = it.vnplug(&["flows".as_ref(), &begun]);
    assert!(code == 0 && err.contains("no packets yet in "), "{err}");
}

#[test]
fn what_cannot_be_read_is_not_called_damaged() {
    let it = Recording::new();
    let sealed = it.dir.join("sealed.pcapng.age");
    fs::write(&sealed, "age-encryption.org/v1\n-> X25519 abc\n").unwrap();
    for (code, _, err) in [
        it.extract(&it.dir, &[]),
        it.vnplug(&["flows".as_ref(), &it.dir]),
    ] {
        assert_eq!(code, 1, "{err}");
        assert!(err.contains("sealed.pcapng.age: "), "{err}");
        assert!(err.contains("could not be read; all else was"), "{err}");
        assert!(!err.contains("damaged") && !err.contains("byte 0"), "{err}");
    }
}

#[test]
fn an_index_that_ends_at_damage_is_told_each_time() {
    let it = Recording::new();
    fs::remove_file(Sidecar::path_of(&it.segment)).unwrap();
    let mut bytes = fs::read(&it.segment).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..].fill(0xff);
    fs::write(&it.segment, bytes).unwrap();
    let segment = File::options().write(true).open(&it.segment).unwrap();
    // Else it would be taken for one that is being written.
    let long_ago = SystemTime::now() - Duration::from_secs(60);
    segment.set_modified(long_ago).unwrap();
    for is_made in [true, false] {
        let (code, out, err) = it.vnplug(&["index".as_ref(), &it.dir]);
        assert_eq!(code, 1, "{err}");
        assert_eq!(out.contains("made"), is_made, "{out}");
        assert!(err.contains(".pcapng: byte "), "{err}");
    }
}

/// 2026-11-21T13:45:01Z.
const START_NS: u64 = 1_795_268_701_000_000_000;

//! `vnplug record` on a real daemon and a real disk: what was sent is in the files, other tools read
//! them while they are written, and nothing that was promised is missing after a kill.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, program, value};
use vnplug_e2e::recorder::{
    MARK, Recorder, number, packets_by_others, read_by, segments, state_in,
};
use vnplug_e2e::traffic::{Stream, sequence};
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Lab, LabError, Netns};
use vnplug_ring::witness::{Parsed, parse};
use vnplug_store::read::Reader;

/// A recorder's ports are opened just before it is there: frames of run 1, one after the other, until one
/// is durable; how many that were.
fn send_until_it_records(netns: &Netns, recorder: &Recorder) -> u64 {
    let mut sent = 0;
    recorder.until("it records", || {
        let one = Stream {
            run: 1,
            ..Stream::new("wire0", 1)
        };
        sent += netns.enter(|| one.send()).unwrap().unwrap().frames;
        sleep(Duration::from_millis(300));
        recorder.mark() > 0
    });
    sent
}

/// The numbers of all frames, each checked against its checksum.
fn numbers(files: &[PathBuf]) -> Vec<u64> {
    let mut numbers = Vec::new();
    for file in files {
        let mut reader = Reader::open(file).unwrap();
        while let Some(packet) = reader.read().unwrap() {
            assert_eq!(packet.bytes.len(), packet.wire_len as usize);
            numbers.push(sequence(packet.bytes));
        }
    }
    numbers
}

#[test]
fn a_wire_is_recorded_and_others_read_the_files_while_they_grow() {
    for format in ["pcapng", "pcap"] {
        let lab = Lab::new().unwrap();
        let netns = Netns::new().unwrap();
        netns.veth("wire0", "wire1").unwrap();
        let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
        let dir = lab.dir().join("rec");
        let args = [
            "host:wire1",
            "--format",
            format,
            "--flush",
            "100ms",
            "--rotate-size",
            "4M",
            "--ring",
            "32M",
        ];
        let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
        let first = send_until_it_records(&netns, &recorder);
        let mut sent = 0;
        for (run, len_bytes) in [(2, 60), (3, 512), (4, 1514)] {
            let pps = NonZeroU64::new(20_000);
            let stream = Stream {
                run,
                len_bytes,
                pps,
                ..Stream::new("wire0", 8000)
            };
            sent += netns.enter(|| stream.send()).unwrap().unwrap().frames;
            // The file that is being written, as whole as the disk's blocks.
            let open = segments(&dir).pop().unwrap();
            if format == "pcapng" {
                for words in [["tcpdump", "-nr"], ["tshark", "-nr"], ["capinfos", "-c"]] {
                    read_by(&words, &open);
                }
            }
        }
        recorder.until("all is durable", || recorder.mark() > sent);
        let state = recorder.state();
        let said = recorder.end().unwrap();
        let files = segments(&dir);
        assert!(files.len() >= 3, "{files:?}");
        let found = numbers(&files).len() as u64;
        assert!(
            found > sent && found <= sent + first,
            "{found}, {sent} sent: {said} {state}"
        );
        assert!(!said.contains("lost"), "{said}");
        let mut others = [0; 3];
        for file in &files {
            for (total, packets) in others.iter_mut().zip(packets_by_others(file)) {
                *total += packets;
            }
        }
        assert_eq!(others, [found; 3], "{said}");
    }
}

/// The numbers of all frames of a segment that a killed recorder left. Classic pcap may end in damage:
/// what was behind the last write that was finished.
fn numbers_after_a_kill(file: &Path) -> Vec<u64> {
    if file.extension().unwrap() == "pcapng" {
        return numbers(&[file.to_owned()]);
    }
    let mut reader = Reader::open(file).unwrap();
    let mut numbers = Vec::new();
    while let Ok(Some(packet)) = reader.read() {
        match parse(packet.bytes) {
            Parsed::Witness(witness) => numbers.push(witness.seq),
            _ => break,
        }
    }
    numbers
}

/// Starts a recorder and kills it, again and again: each time everything it acknowledged is there, and
/// everything that was acknowledged in the rounds before.
fn kill_again_and_again(format: &str, directories: &[&str], rounds: u64) {
    let lab = Lab::new().unwrap();
    let daemon =
        Daemon::start(&lab, None, &["--source", "lab=gen,size=60-1514,pps=20000"]).unwrap();
    let dirs: Vec<PathBuf> = directories.iter().map(|dir| lab.dir().join(dir)).collect();
    let mut args = vec!["host:lab", "--format", format, "--flush", "20ms"];
    args.extend(["--rotate-size", "4M", "--ring", "16M"]);
    let mut acknowledged: BTreeSet<u64> = BTreeSet::new();
    let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
    for round in 1..=rounds {
        let mut recorder = Recorder::start(&daemon, &args, &dirs).unwrap();
        recorder.until("something is durable", || {
            let state = recorder.state();
            number(&state, "/run/number") == round && number(&state, MARK) > 0
        });
        sleep(Duration::from_millis(37 * (round % 8)));
        recorder.kill();
        let state = recorder.state();
        let promised = number(&state, MARK);
        assert_eq!(number(&state, "/earlier/cut"), round - 1, "{state:#}");
        let files: Vec<PathBuf> = dirs.iter().flat_map(|dir| segments(dir)).collect();
        let new: Vec<&PathBuf> = files.iter().filter(|file| !seen.contains(*file)).collect();
        let mut found: Vec<u64> = Vec::new();
        for file in &new {
            let numbers = numbers_after_a_kill(file);
            assert!(numbers.is_sorted_by(|one, next| one < next));
            if format == "pcapng" {
                let [tcpdump, tshark, capinfos] = packets_by_others(file);
                assert_eq!([tshark, capinfos], [tcpdump; 2], "{}", file.display());
            }
            found.extend(numbers);
        }
        found.sort_unstable();
        assert!(found.is_sorted_by(|one, next| one < next), "twice");
        assert!(found.len() as u64 >= promised, "{promised}: {state:#}");
        found.truncate(promised as usize);
        // What is missing between them never came to the recorder, and was counted.
        let span = found[found.len() - 1] - found[0] + 1;
        let lost = number(&state, "/lost/ring") + number(&state, "/lost/source");
        assert!(span - promised <= lost, "{span}, {promised}: {state:#}");
        acknowledged.extend(found);
        seen.extend(files);
    }
    let files: Vec<PathBuf> = dirs.iter().flat_map(|dir| segments(dir)).collect();
    let all: BTreeSet<u64> = files
        .iter()
        .flat_map(|file| numbers_after_a_kill(file))
        .collect();
    assert!(all.is_superset(&acknowledged));
}

#[test]
fn a_killed_recorder_has_what_it_promised() {
    kill_again_and_again("pcapng", &["rec"], 12);
}

#[test]
fn a_killed_recorder_of_classic_pcap_has_what_it_promised() {
    kill_again_and_again("pcap", &["rec"], 10);
}

#[test]
fn a_killed_recorder_in_two_directories_has_what_it_promised() {
    kill_again_and_again("pcapng", &["rec", "other"], 10);
}

#[test]
fn a_signal_before_the_first_packet_ends_a_recorder_as_any_other() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=300,pps=100"]).unwrap();
    for round in 1..=10 {
        let dir = lab.dir().join("rec");
        let mut recorder = Recorder::start(&daemon, &["host:lab"], &[&dir]).unwrap();
        recorder.until("its port is there", || {
            let counters = daemon.counters();
            counters.iter().any(|it| it.kind == "port")
        });
        recorder.end().unwrap();
        let state = recorder.state();
        assert_eq!(number(&state, "/run/number"), round, "{state:#}");
        assert_eq!(state["run"]["ended"], true, "{state:#}");
        assert_eq!(number(&state, "/earlier/cut"), 0, "{state:#}");
    }
}

#[test]
fn stats_show_the_durable_mark_of_a_recorder_at_work() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=300,pps=2000"]).unwrap();
    let dir = lab.dir().join("rec");
    let args = ["host:lab", "--flush", "50ms"];
    let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
    let stats = |args: &[&str]| {
        let mut command = Command::new(program("vnplug").unwrap());
        command.arg("--socket").arg(daemon.socket()).arg("stats");
        let output = command.args(args).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let told = || -> Option<Value> {
        let all: Value = serde_json::from_str(&stats(&["--json"])).unwrap();
        let counters = all["counters"].as_array().unwrap().clone();
        let mut ports = counters.into_iter().filter(|one| one["kind"] == "port");
        let values = ports.next()?["values"].clone();
        (number(&values, "/reader_durable_packets") > 0).then_some(values)
    };
    let mut first = Value::Null;
    recorder.until("the mark is told", || {
        first = told().unwrap_or_default();
        first != Value::Null
    });
    let before = number(&first, "/reader_durable_packets");
    assert!(before <= number(&first, "/reader_taken"), "{first}");
    recorder.until("it moves", || {
        let now = told().unwrap_or_default();
        number(&now, "/reader_durable_packets") > before
            && number(&now, "/reader_durable_time_ns") > number(&first, "/reader_durable_time_ns")
    });
    let mark = number(&told().unwrap(), "/reader_durable_packets");
    recorder.until("it is so", || recorder.mark() >= mark);
    let text = stats(&[]);
    assert!(text.contains("reader_durable_time_ns"), "{text}");
    recorder.end().unwrap();
}

#[test]
fn a_slice_keeps_the_beginning_of_what_matches_and_all_of_the_rest() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,size=60-1514,pps=4000";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let dir = lab.dir().join("rec");
    let args = ["host:lab", "--flush", "50ms", "--slice", "greater 1000=96"];
    let args = [&args[..], &["--slice", "greater 500=200"]].concat();
    let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
    recorder.until("packets are durable", || recorder.mark() > 3000);
    let said = recorder.end().unwrap();
    let durable = recorder.number("/durable");
    let mut kinds = [0; 3];
    for file in segments(&dir) {
        let mut reader = Reader::open(&file).unwrap();
        while let Some(packet) = reader.read().unwrap() {
            let (kind, kept) = match packet.wire_len {
                1000.. => (0, 96),
                500.. => (1, 200),
                whole => (2, whole as usize),
            };
            assert_eq!(packet.bytes.len(), kept, "{} bytes", packet.wire_len);
            kinds[kind] += 1;
        }
    }
    assert_eq!(kinds.iter().sum::<u64>(), durable, "{said}");
    assert!(kinds.iter().all(|&count| count > 300), "{kinds:?}");
}

#[test]
fn a_directory_that_is_removed_pauses_the_recorder_until_it_is_there_again() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=300,pps=2000"]).unwrap();
    let dir = lab.dir().join("rec");
    let args = ["host:lab", "--flush", "50ms"];
    let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
    recorder.until("it records", || recorder.mark() > 500);
    fs::remove_dir_all(&dir).unwrap();
    recorder.until("it pauses", || recorder.said().contains("recording pauses"));
    fs::create_dir(&dir).unwrap();
    recorder.until("it goes on", || recorder.mark() > 3000);
    let ended = recorder.end();
    let state = recorder.state();
    let in_time = !matches!(ended, Err(LabError::Timeout { .. }));
    // What was written since the last sync went with the directory.
    let unknown = number(&state, "/lost/unknown");
    assert!(in_time && ended.is_ok() == (unknown == 0), "{ended:?}");
    let taken = number(&state, "/taken");
    let settled = number(&state, "/durable") + unknown;
    assert_eq!(settled, taken, "{state:#}");
    let found = numbers(&segments(&dir));
    assert!(found.is_sorted_by(|one, next| one < next));
    assert!(found.len() > 1000, "{}: {state:#}", found.len());
}

#[test]
fn a_full_disk_pauses_the_recorder_and_room_wakes_it() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=1000,pps=10000"]).unwrap();
    let dir = lab.dir().join("small");
    fs::create_dir(&dir).unwrap();
    // A mount that nobody else sees, and that goes with the recorder.
    let mut command = Command::new("unshare");
    let mount = "mount -t tmpfs -o size=24m none \"$0\" && exec \"$@\"";
    command
        .args(["-m", "sh", "-c", mount])
        .arg(&dir)
        .arg(program("vnplug").unwrap());
    let args = [
        "host:lab",
        "--flush",
        "50ms",
        "--rotate-size",
        "4M",
        "--buffer",
        "16M",
        "--ring",
        "1M",
    ];
    let recorder = Recorder::start_by(command, &daemon, &args, &[&dir]).unwrap();
    let inside = format!("/proc/{}/root{}", recorder.pid(), dir.display());
    let inside = PathBuf::from(inside);
    let mark_inside = || number(&state_in(&inside), MARK);
    recorder.until("the disk is full", || {
        recorder.said().contains("recording pauses")
    });
    let oldest = segments(&inside).remove(0);
    recorder.until("the ring is full meanwhile", || {
        let counters = daemon.audit();
        let port = counters.iter().find(|it| it.kind == "port").unwrap();
        value(port, "dropped_full") > 0
    });
    let mark = mark_inside();
    fs::remove_file(oldest).unwrap();
    let from = Instant::now();
    recorder.until("it goes on", || mark_inside() > mark);
    eprintln!("recording again after {:?}", from.elapsed());
    for file in segments(&inside).iter().take(3) {
        packets_by_others(file);
    }
    let dirs = segments(&inside);
    assert!(dirs.len() < 12, "{dirs:?}");
}

#[test]
fn a_quota_holds_and_a_second_recorder_is_refused() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=1500,pps=20000"]).unwrap();
    let dir = lab.dir().join("rec");
    let args = [
        "host:lab",
        "--flush",
        "50ms",
        "--rotate-size",
        "4M",
        "--quota",
        "20M",
        "--no-uring",
    ];
    let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
    let recycled = || recorder.number("/disks/0/recycled");
    recorder.until("files are recycled", || recycled() > 3);
    let mut second = Recorder::start(&daemon, &["host:lab"], &[&dir]).unwrap();
    let refused = second.wait().unwrap_err().to_string();
    assert!(
        refused.contains("failed") && refused.contains("another recorder"),
        "{refused}"
    );
    // Who reads a segment keeps it; one may be recycled between a look and the lease.
    let mut leased = None;
    recorder.until("a segment is leased", || {
        let oldest = segments(&dir).remove(0);
        leased = vnplug_store::disk::lease(&oldest)
            .ok()
            .map(|it| (oldest, it));
        leased.as_ref().is_some_and(|(kept, _)| kept.exists())
    });
    let (kept, lease) = leased.unwrap();
    let before = recycled();
    recorder.until("others are recycled", || recycled() > before + 3);
    assert!(kept.exists());
    drop(lease);
    recorder.until("now it goes, too", || !kept.exists());
    let status = Command::new(program("vnplug").unwrap())
        .arg("record")
        .arg("--status")
        .arg(&dir)
        .output()
        .unwrap();
    let state: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert!(state["durable"].as_u64().unwrap() > 0);
    recorder.end().unwrap();
    let bytes: u64 = segments(&dir)
        .iter()
        .map(|file| fs::metadata(file).unwrap().len())
        .sum();
    assert!(bytes <= 20 << 20, "{bytes}");
}

#[test]
fn what_is_in_the_ring_at_the_end_is_recorded_in_two_directories() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let (dir, other) = (lab.dir().join("rec"), lab.dir().join("deep/down/rec"));
    let args = ["host:wire1", "--flush", "100ms", "--ring", "32M"];
    let mut recorder = Recorder::start(&daemon, &args, &[&dir, &other]).unwrap();
    let first = send_until_it_records(&netns, &recorder);
    recorder.signal(Signal::STOP).unwrap();
    let stream = Stream {
        run: 2,
        ..Stream::new("wire0", 5000)
    };
    let sent = netns.enter(|| stream.send()).unwrap().unwrap().frames;
    // Into the ring, on a busy machine, too.
    recorder.until("all is received", || {
        let counters = daemon.audit();
        let source = counters.iter().find(|it| it.kind == "source").unwrap();
        value(source, "read") + value(source, "early") >= first + sent
    });
    recorder.signal(Signal::INT).unwrap();
    recorder.signal(Signal::CONT).unwrap();
    let said = recorder.wait().unwrap();
    let mut files = segments(&dir);
    files.extend(segments(&other));
    let found = numbers(&files).len() as u64;
    assert!(
        found >= sent && found <= sent + first,
        "{found}, {sent} sent: {said}"
    );
    for dir in [dir, other] {
        let state = state_in(&dir);
        assert_eq!(state["durable"], found, "{state:#}");
        assert_eq!(state["buffered"], 0, "{state:#}");
    }
}

#[test]
fn a_limit_of_the_files_length_ends_segments_and_not_the_recorder() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=1500,pps=20000"]).unwrap();
    let dir = lab.dir().join("rec");
    let mut command = Command::new("prlimit");
    command
        .arg("--fsize=6000000")
        .arg(program("vnplug").unwrap());
    let args = ["host:lab", "--flush", "100ms"];
    let mut recorder = Recorder::start_by(command, &daemon, &args, &[&dir]).unwrap();
    recorder.until("there are several files", || segments(&dir).len() > 3);
    let state = recorder.state();
    let said = recorder.end().unwrap();
    assert!(!said.contains("PAUSED"), "{said}");
    assert_eq!(state["lost"]["disk"], 0, "{state:#}");
    for file in segments(&dir) {
        assert!(fs::metadata(&file).unwrap().len() <= 6_000_000);
    }
}

//! `vnplug record` on a real daemon and a real disk: what was sent is in the files, other tools read
//! them while they are written, and nothing that was promised is missing after a kill.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod disk;
mod kill;
mod shortage;

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, counted, value};
use vnplug_e2e::recorder::{Recorder, number, packets_by_others, read_by, segments, state_in};
use vnplug_e2e::traffic::{Stream, sequence};
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_e2e::{Lab, Netns};
use vnplug_store::read::Reader;

#[test]
fn a_wire_is_recorded_and_others_read_the_files_while_they_grow() {
    for format in ["pcapng", "pcap"] {
        let wire = Wire::new("1500", &["--source", PATIENT]);
        let dir = wire.lab.dir().join("rec");
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
        let mut recorder = Recorder::start(&wire.daemon, &args, &[&dir]).unwrap();
        let first = send_until_it_records(&wire.netns, &recorder);
        let mut sent = 0;
        for (run, len_bytes) in [(2, 60), (3, 512), (4, 1514)] {
            let pps = NonZeroU64::new(20_000);
            let stream = Stream {
                run,
                len_bytes,
                pps,
                ..Stream::new("wire0", 8000)
            };
            sent += wire.netns.enter(|| stream.send()).unwrap().unwrap().frames;
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

#[test]
fn a_recorder_of_a_quiet_wire_is_known_to_be_at_work() {
    let wire = Wire::new("1500", &["--source", "wire1"]);
    let dir = wire.lab.dir().join("rec");
    // Nothing that the kernel itself sends.
    let args = ["host:wire1", "--filter", "ether proto 0x1234"];
    let mut recorder = Recorder::start(&wire.daemon, &args, &[&dir]).unwrap();
    recorder.until("it is armed", || {
        recorder.said().contains("recording since ")
    });
    recorder.until("the state says since when", || {
        recorder.number("/run/since_ns") > 0
    });
    for _ in 0..3 {
        let beat = ["/heartbeat_ns", "/revision", "/written_ns"];
        let before = beat.map(|field| recorder.number(field));
        recorder.until("the heart beats", || {
            let now = beat.map(|field| recorder.number(field));
            before.iter().zip(now).all(|(before, now)| *before < now)
        });
    }
    assert_eq!(recorder.number("/taken"), 0);
    recorder.end().unwrap();
}

#[test]
fn stats_show_the_durable_mark_of_a_recorder_at_work() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::start(&lab, None, &["--source", "lab=gen,size=300,pps=2000"]).unwrap();
    let dir = lab.dir().join("rec");
    let args = ["host:lab", "--flush", "50ms"];
    let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
    let stats = |args: &[&str]| {
        let mut command = daemon.command().unwrap();
        let output = command.arg("stats").args(args).output().unwrap();
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
fn what_is_in_the_ring_at_the_end_is_recorded_in_two_directories() {
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let (dir, other) = (
        wire.lab.dir().join("rec"),
        wire.lab.dir().join("deep/down/rec"),
    );
    let args = [
        "host:wire1",
        "--flush",
        "100ms",
        "--ring",
        "32M",
        "--parents",
    ];
    let mut recorder = Recorder::start(&wire.daemon, &args, &[&dir, &other]).unwrap();
    let first = send_until_it_records(&wire.netns, &recorder);
    recorder.signal(Signal::STOP).unwrap();
    let stream = Stream {
        run: 2,
        ..Stream::new("wire0", 5000)
    };
    let sent = wire.netns.enter(|| stream.send()).unwrap().unwrap().frames;
    // Into the ring, on a busy machine, too.
    recorder.until("all is received", || {
        let counters = wire.daemon.audit();
        let source = counted(&counters, "source");
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

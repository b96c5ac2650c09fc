//! `vnplug record` on a real daemon and a real disk: what was sent is in the files, other tools read
//! them while they are written, and nothing that was promised is missing after a kill.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, program, value};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::witness::{Parsed, parse};
use vnplug_store::name::SegmentName;
use vnplug_store::read::Reader;

const LIMIT: Duration = Duration::from_secs(120);

/// A recorder that does not outlive its test.
struct Recorder {
    child: Child,
    dir: PathBuf,
    log: PathBuf,
}

impl Recorder {
    fn start(daemon: &Daemon, dir: &Path, args: &[&str]) -> Self {
        Self::start_by(Command::new(program("vnplug").unwrap()), daemon, dir, args)
    }

    fn start_by(mut command: Command, daemon: &Daemon, dir: &Path, args: &[&str]) -> Self {
        let log = dir.with_extension("log");
        command.arg("--socket").arg(daemon.socket());
        command.arg("record").args(args).arg("--to").arg(dir);
        command.stderr(fs::File::create(&log).unwrap());
        Self {
            child: command.spawn().unwrap(),
            dir: dir.to_owned(),
            log,
        }
    }

    fn state(&self) -> Value {
        state_in(&self.dir)
    }

    fn mark(&self) -> u64 {
        self.state()["durable_mark"]["packets"]
            .as_u64()
            .unwrap_or(0)
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// As Ctrl-C does; what it said.
    fn stop(self) -> String {
        let (success, said) = self.end();
        assert!(success, "{said}");
        said
    }

    /// As Ctrl-C does; whether all was well, and what it said.
    fn end(mut self) -> (bool, String) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let status = self.child.wait().unwrap();
        (status.success(), self.said())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn state_in(dir: &Path) -> Value {
    let text = fs::read(dir.join("rec.state")).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn number(state: &Value, pointer: &str) -> u64 {
    let number = state.pointer(pointer).and_then(Value::as_u64);
    number.unwrap_or(0)
}

/// A recorder's ports are opened just before it is there: frames of run 1, one after the other, until one
/// is durable; how many that were.
fn send_until_it_records(netns: &Netns, recorder: &Recorder) -> u64 {
    let mut sent = 0;
    eventually("it records", || {
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

fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !test() {
        assert!(Instant::now() < deadline, "never: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// The segments of a recording in their order.
fn segments(dir: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name());
    let names = files.filter_map(|name| SegmentName::parse(name.to_str().unwrap()));
    let mut names: Vec<SegmentName> = names.collect();
    names.sort_by_key(|name| name.sequence);
    names
        .iter()
        .map(|name| dir.join(name.to_string()))
        .collect()
}

/// The numbers of all frames, each checked against its checksum.
fn numbers(files: &[PathBuf]) -> Vec<u64> {
    let mut numbers = Vec::new();
    for file in files {
        let mut reader = Reader::open(file).unwrap();
        while let Some(packet) = reader.read().unwrap() {
            assert_eq!(packet.bytes.len(), packet.wire_len as usize);
            match parse(packet.bytes) {
                Parsed::Witness(witness) => numbers.push(witness.seq),
                other => panic!("{other:?} in {}", file.display()),
            }
        }
    }
    numbers
}

fn output(command: &[&OsStr]) -> String {
    let output = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {errors}");
    assert!(
        !errors.contains("damage") && !errors.contains("cut short"),
        "{command:?}: {errors}"
    );
    String::from_utf8(output.stdout).unwrap()
}

/// How many packets tcpdump, tshark and capinfos find in a file that does not grow.
fn packets_by_others(file: &Path) -> [u64; 3] {
    let file = file.as_os_str();
    let lines = |text: String| text.lines().count() as u64;
    let tcpdump = lines(output(&["tcpdump".as_ref(), "-nr".as_ref(), file]));
    let tshark = lines(output(&["tshark".as_ref(), "-nr".as_ref(), file]));
    let told = output(&["capinfos".as_ref(), "-cMT".as_ref(), "-r".as_ref(), file]);
    let capinfos = told.trim().rsplit('\t').next().unwrap().parse().unwrap();
    [tcpdump, tshark, capinfos]
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
        let recorder = Recorder::start(&daemon, &dir, &args);
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
                output(&["tcpdump".as_ref(), "-nr".as_ref(), open.as_os_str()]);
                output(&["tshark".as_ref(), "-nr".as_ref(), open.as_os_str()]);
                output(&["capinfos".as_ref(), "-c".as_ref(), open.as_os_str()]);
            }
        }
        eventually("all is durable", || recorder.mark() > sent);
        let state = recorder.state();
        let said = recorder.stop();
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
    for dir in &dirs[1..] {
        args.extend(["--to", dir.to_str().unwrap()]);
    }
    let mut acknowledged: BTreeSet<u64> = BTreeSet::new();
    let mut seen: BTreeSet<PathBuf> = BTreeSet::new();
    for round in 1..=rounds {
        let mut recorder = Recorder::start(&daemon, &dirs[0], &args);
        let ours = |state: &Value| number(state, "/run/number") == round;
        eventually("something is durable", || {
            let state = recorder.state();
            ours(&state) && number(&state, "/durable_mark/packets") > 0
        });
        sleep(Duration::from_millis(37 * (round % 8)));
        recorder.child.kill().unwrap();
        recorder.child.wait().unwrap();
        // The directory that was synced last knows most.
        let states = dirs.iter().map(|dir| state_in(dir)).filter(ours);
        let state = states.max_by_key(|state| number(state, "/durable_mark/packets"));
        let state = state.unwrap();
        let promised = number(&state, "/durable_mark/packets");
        assert_eq!(number(&state, "/earlier/cut"), round - 1, "{state:#}");
        let files: Vec<PathBuf> = dirs.iter().flat_map(|dir| segments(dir)).collect();
        let new: Vec<&PathBuf> = files.iter().filter(|file| !seen.contains(*file)).collect();
        let mut found: Vec<u64> = Vec::new();
        for file in &new {
            let numbers = numbers_after_a_kill(file);
            assert!(numbers.is_sorted_by(|one, next| one < next));
            found.extend(numbers);
            if format == "pcapng" {
                let [tcpdump, tshark, capinfos] = packets_by_others(file);
                assert_eq!([tshark, capinfos], [tcpdump; 2], "{}", file.display());
            }
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
        let recorder = Recorder::start(&daemon, &dir, &["host:lab"]);
        eventually("its port is there", || {
            let counters = daemon.counters();
            counters.iter().any(|it| it.kind == "port")
        });
        recorder.stop();
        let state = state_in(&dir);
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
    let recorder = Recorder::start(&daemon, &dir, &["host:lab", "--flush", "50ms"]);
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
    eventually("the mark is told", || {
        first = told().unwrap_or_default();
        first != Value::Null
    });
    let before = number(&first, "/reader_durable_packets");
    assert!(before <= number(&first, "/reader_taken"), "{first}");
    eventually("it moves", || {
        let now = told().unwrap_or_default();
        number(&now, "/reader_durable_packets") > before
            && number(&now, "/reader_durable_time_ns") > number(&first, "/reader_durable_time_ns")
    });
    let mark = number(&told().unwrap(), "/reader_durable_packets");
    eventually("it is so", || recorder.mark() >= mark);
    let text = stats(&[]);
    assert!(text.contains("reader_durable_time_ns"), "{text}");
    recorder.stop();
}

#[test]
fn a_slice_keeps_the_beginning_of_what_matches_and_all_of_the_rest() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,size=60-1514,pps=4000";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let dir = lab.dir().join("rec");
    let args = ["host:lab", "--flush", "50ms", "--slice", "greater 1000=96"];
    let args = [&args[..], &["--slice", "greater 500=200"]].concat();
    let recorder = Recorder::start(&daemon, &dir, &args);
    eventually("packets are durable", || recorder.mark() > 3000);
    let said = recorder.stop();
    let durable = number(&state_in(&dir), "/durable");
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
    let recorder = Recorder::start(&daemon, &dir, &["host:lab", "--flush", "50ms"]);
    eventually("it records", || recorder.mark() > 500);
    fs::remove_dir_all(&dir).unwrap();
    eventually("it pauses", || recorder.said().contains("recording pauses"));
    fs::create_dir(&dir).unwrap();
    eventually("it goes on", || recorder.mark() > 3000);
    let (success, said) = recorder.end();
    let state = state_in(&dir);
    // What was written since the last sync went with the directory.
    assert_eq!(success, number(&state, "/lost/unknown") == 0, "{said}");
    let taken = number(&state, "/taken");
    let settled = number(&state, "/durable") + number(&state, "/lost/unknown");
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
    let mut recorder = Recorder::start_by(command, &daemon, &dir, &args);
    recorder.dir = PathBuf::from(format!(
        "/proc/{}/root{}",
        recorder.child.id(),
        dir.display()
    ));
    let inside = recorder.dir.clone();
    eventually("the disk is full", || {
        recorder.said().contains("recording pauses")
    });
    let oldest = segments(&inside).remove(0);
    eventually("the ring is full meanwhile", || {
        let counters = daemon.audit();
        let port = counters.iter().find(|it| it.kind == "port").unwrap();
        value(port, "dropped_full") > 0
    });
    let mark = recorder.mark();
    fs::remove_file(oldest).unwrap();
    let from = Instant::now();
    eventually("it goes on", || recorder.mark() > mark);
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
    let recorder = Recorder::start(&daemon, &dir, &args);
    eventually("files are recycled", || {
        recorder.state()["disks"][0]["recycled"]
            .as_u64()
            .is_some_and(|n| n > 3)
    });
    let mut second = Recorder::start(&daemon, &dir, &["host:lab"]);
    assert!(!second.child.wait().unwrap().success());
    assert!(
        second.said().contains("another recorder"),
        "{}",
        second.said()
    );
    // Who reads a segment keeps it; one may be recycled between a look and the lease.
    let mut leased = None;
    eventually("a segment is leased", || {
        let oldest = segments(&dir).remove(0);
        leased = vnplug_store::disk::lease(&oldest)
            .ok()
            .map(|it| (oldest, it));
        leased.as_ref().is_some_and(|(kept, _)| kept.exists())
    });
    let (kept, lease) = leased.unwrap();
    let recycled = recorder.state()["disks"][0]["recycled"].as_u64().unwrap();
    eventually("others are recycled", || {
        recorder.state()["disks"][0]["recycled"]
            .as_u64()
            .is_some_and(|n| n > recycled + 3)
    });
    assert!(kept.exists());
    drop(lease);
    eventually("now it goes, too", || !kept.exists());
    let status = Command::new(program("vnplug").unwrap())
        .arg("record")
        .arg("--status")
        .arg(&dir)
        .output()
        .unwrap();
    let state: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert!(state["durable"].as_u64().unwrap() > 0);
    drop(recorder.stop());
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
    let args = ["host:wire1", "--flush", "100ms", "--ring", "32M", "--to"];
    let args = [&args[..], &[other.to_str().unwrap()]].concat();
    let recorder = Recorder::start(&daemon, &dir, &args);
    let first = send_until_it_records(&netns, &recorder);
    let kill = |signal| {
        let pid = rustix::process::Pid::from_child(&recorder.child);
        rustix::process::kill_process(pid, signal).unwrap();
    };
    kill(rustix::process::Signal::STOP);
    let stream = Stream {
        run: 2,
        ..Stream::new("wire0", 5000)
    };
    let sent = netns.enter(|| stream.send()).unwrap().unwrap().frames;
    // Into the ring, on a busy machine, too.
    eventually("all is received", || {
        let counters = daemon.audit();
        let source = counters.iter().find(|it| it.kind == "source").unwrap();
        value(source, "read") + value(source, "early") >= first + sent
    });
    kill(rustix::process::Signal::INT);
    kill(rustix::process::Signal::CONT);
    let said = recorder.stop();
    let mut files = segments(&dir);
    files.extend(segments(&other));
    let found = numbers(&files).len() as u64;
    assert!(
        found >= sent && found <= sent + first,
        "{found}, {sent} sent: {said}"
    );
    for dir in [dir, other] {
        let state: Value =
            serde_json::from_slice(&fs::read(dir.join("rec.state")).unwrap()).unwrap();
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
    let recorder = Recorder::start_by(command, &daemon, &dir, &["host:lab", "--flush", "100ms"]);
    eventually("there are several files", || {
        dir.exists() && segments(&dir).len() > 3
    });
    let state = recorder.state();
    let said = recorder.stop();
    assert!(!said.contains("PAUSED"), "{said}");
    assert_eq!(state["lost"]["disk"], 0, "{state:#}");
    for file in segments(&dir) {
        assert!(fs::metadata(&file).unwrap().len() <= 6_000_000);
    }
}

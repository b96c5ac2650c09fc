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
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::{Lab, Netns};
use vnplug_ring::witness::{Parsed, parse};
use vnplug_store::name::SegmentName;
use vnplug_store::read::Reader;

const LIMIT: Duration = Duration::from_secs(60);

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
        let text = fs::read(self.dir.join("rec.state")).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
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
    fn stop(mut self) -> String {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let status = self.child.wait().unwrap();
        let said = self.said();
        assert!(status.success(), "{said}");
        said
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
        let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
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
        eventually("the recorder listens", || dir.join("rec.lock").exists());
        // Its ports are opened just before; one frame shows that they are there.
        let mut first = 0;
        eventually("it records", || {
            let one = Stream {
                run: 1,
                ..Stream::new("wire0", 1)
            };
            first += netns.enter(|| one.send()).unwrap().unwrap().frames;
            sleep(Duration::from_millis(300));
            recorder.mark() > 0
        });
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

#[test]
fn a_killed_recorder_has_what_it_promised() {
    let lab = Lab::new().unwrap();
    let daemon =
        Daemon::start(&lab, None, &["--source", "lab=gen,size=60-1514,pps=20000"]).unwrap();
    let dir = lab.dir().join("rec");
    for round in 0..6 {
        let before: BTreeSet<PathBuf> = match round {
            0 => BTreeSet::new(),
            _ => segments(&dir).into_iter().collect(),
        };
        let old = fs::read(dir.join("rec.state")).unwrap_or_default();
        let args = [
            "host:lab",
            "--flush",
            "20ms",
            "--rotate-size",
            "4M",
            "--ring",
            "16M",
        ];
        let mut recorder = Recorder::start(&daemon, &dir, &args);
        eventually("something is durable", || {
            let new = fs::read(dir.join("rec.state")).unwrap_or_default();
            new != old && recorder.mark() > 0
        });
        sleep(Duration::from_millis(37 * round));
        recorder.child.kill().unwrap();
        recorder.child.wait().unwrap();
        let promised = recorder.mark();
        let files = segments(&dir);
        let new: Vec<PathBuf> = files
            .into_iter()
            .filter(|file| !before.contains(file))
            .collect();
        let found = numbers(&new);
        let lost = recorder.state()["lost"]["ring"].as_u64().unwrap();
        assert!(
            found.len() as u64 >= promised,
            "{} of {promised}",
            found.len()
        );
        assert!(found.is_sorted_by(|one, next| one < next));
        // Without losses the numbers have no gaps.
        if lost == 0
            && recorder.state()["losses"]
                .as_array()
                .is_some_and(Vec::is_empty)
        {
            let span = found[promised as usize - 1] - found[0] + 1;
            assert_eq!(span, promised);
        }
        for file in &new {
            let [tcpdump, tshark, capinfos] = packets_by_others(file);
            assert_eq!([tshark, capinfos], [tcpdump; 2], "{}", file.display());
        }
    }
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
    // It waits for room, and the ring overflows meanwhile.
    sleep(Duration::from_millis(1500));
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
    // Who reads a segment keeps it.
    let kept = segments(&dir).remove(0);
    let lease = vnplug_store::disk::lease(&kept).unwrap();
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
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", "wire1"]).unwrap();
    let (dir, other) = (lab.dir().join("rec"), lab.dir().join("deep/down/rec"));
    let args = ["host:wire1", "--flush", "100ms", "--ring", "32M", "--to"];
    let args = [&args[..], &[other.to_str().unwrap()]].concat();
    let recorder = Recorder::start(&daemon, &dir, &args);
    let mut first = 0;
    eventually("it records", || {
        let one = Stream {
            run: 1,
            ..Stream::new("wire0", 1)
        };
        first += netns.enter(|| one.send()).unwrap().unwrap().frames;
        sleep(Duration::from_millis(300));
        recorder.mark() > 0
    });
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
    sleep(Duration::from_secs(1)); // in the ring by now, on a busy machine, too
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

//! `vnplug record` where there is little: of a disk, of a ring, and of a daemon.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, program, value};
use vnplug_e2e::recorder::Recorder;
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::PATIENT;
use vnplug_e2e::{DiskFault, Lab, Netns};
use vnplug_store::disk::{BLOCK, Buffer, Disk, Real, Write, is_full};
use vnplug_testing::eventually;

/// A process that does not outlive its test.
struct Process(Child);

impl Process {
    fn record(daemon: &Daemon, dir: &Path, log: &Path, args: &[&str]) -> Self {
        let mut command = Command::new(program("vnplug").unwrap());
        command.arg("--socket").arg(daemon.socket());
        command.args(["record", "host:wire1", "--flush", "100ms"]);
        command.args(args).arg("--to").arg(dir);
        command.stderr(fs::File::create(log).unwrap());
        Self(command.spawn().unwrap())
    }

    /// As Ctrl-C does.
    fn stop(mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        assert!(self.0.wait().unwrap().success());
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An ext4 of so many MiB, mounted where only a process of the test's sees it.
struct Small {
    _holder: Process,
    dir: PathBuf,
}

impl Small {
    fn new(lab: &Lab, mib: u64) -> Self {
        let image = DiskFault::file(lab, "image", mib).unwrap();
        let dir = lab.dir().join("small");
        fs::create_dir(&dir).unwrap();
        let script = "mount -o loop \"$0\" \"$1\" && echo mounted && exec sleep 600";
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", script]);
        command.arg(image).arg(&dir).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let mut said = BufReader::new(child.stdout.take().unwrap());
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "mounted\n");
        let root = PathBuf::from(format!("/proc/{}/root", child.id()));
        let dir = root.join(dir.strip_prefix("/").unwrap());
        Self {
            _holder: Process(child),
            dir,
        }
    }

    fn free_mib(&self) -> u64 {
        let space = Real::new(false).0.space(&self.dir).unwrap();
        space.free >> 20
    }
}

fn state(dir: &Path) -> Value {
    let text = fs::read(dir.join("rec.state")).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

fn number(state: &Value, pointer: &str) -> u64 {
    let number = state.pointer(pointer).and_then(Value::as_u64);
    number.unwrap_or(0)
}

/// Frames until that is so.
fn send_until(netns: &Netns, len_bytes: usize, what: &str, mut test: impl FnMut() -> bool) {
    eventually(what, || {
        let some = Stream {
            len_bytes,
            ..Stream::new("wire0", 100)
        };
        netns.enter(|| some.send()).unwrap().unwrap();
        sleep(Duration::from_millis(200));
        test()
    });
}

#[test]
fn a_small_disk_keeps_room_for_the_books_of_a_killed_recorder() {
    let lab = Lab::new().unwrap();
    let small = Small::new(&lab, 400);
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let (dir, log) = (small.dir.join("rec"), lab.dir().join("log"));
    let before = small.free_mib();
    let recorder = Process::record(&daemon, &dir, &log, &[]);
    eventually("there is a state", || dir.join("rec.state").exists());
    let durable = |dir: &Path| number(&state(dir), "/durable");
    send_until(&netns, 1000, "packets are durable", || durable(&dir) > 0);
    let free = small.free_mib();
    assert!(free > before * 3 / 4, "{before} MiB, then {free}");
    recorder.kill();
    let killed = durable(&dir);
    let next = Process::record(&daemon, &dir, &log, &[]);
    let run = || number(&state(&dir), "/run/number");
    eventually("the next run", || run() == 2);
    next.stop();
    let earlier = &state(&dir)["earlier"];
    assert_eq!((number(earlier, "/runs"), number(earlier, "/cut")), (1, 1));
    assert_eq!(number(earlier, "/durable"), killed);
    let said = fs::read_to_string(&log).unwrap();
    assert!(said.starts_with("vnplug: recording since "), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
}

/// ext4 keeps what it found before it was full.
#[test]
fn what_cannot_be_reserved_is_given_back() {
    let lab = Lab::new().unwrap();
    let small = Small::new(&lab, 64);
    for uring in [false, true] {
        let mut disk = Real::new(uring).0;
        disk.create(&small.dir.join(format!("{uring}"))).unwrap();
        let before = small.free_mib();
        disk.allocate(0, BLOCK as u64).unwrap();
        let mut buffer = Buffer::new(BLOCK, u16::MAX);
        buffer[..BLOCK].fill(7);
        for end in [1, 2] {
            // One is on its way, to where room was reserved.
            disk.start(Write {
                buffer,
                len: BLOCK,
                offset: (end - 1) * BLOCK as u64,
            });
            disk.submit();
            let error = disk.allocate(2 * BLOCK as u64, 1 << 30).unwrap_err();
            assert!(is_full(&error), "{error}");
            let written = disk.finish().unwrap();
            written.result.unwrap();
            buffer = written.write.buffer;
            disk.allocate(end * BLOCK as u64, BLOCK as u64).unwrap();
            assert!(small.free_mib() + 1 >= before, "{}", small.free_mib());
        }
        let written = fs::read(small.dir.join(format!("{uring}"))).unwrap();
        assert_eq!(written, vec![7; 2 * BLOCK]);
    }
}

#[test]
fn a_restart_of_the_daemon_and_a_small_ring_are_told() {
    let lab = Lab::new().unwrap();
    let netns = Netns::new().unwrap();
    netns.veth("wire0", "wire1").unwrap();
    let mut daemon = Daemon::start(&lab, Some(&netns), &["--source", PATIENT]).unwrap();
    let (dir, log) = (lab.dir().join("rec"), lab.dir().join("log"));
    let recorder = Process::record(&daemon, &dir, &log, &["--ring", "64K"]);
    let durable = || number(&state(&dir), "/durable");
    send_until(&netns, 100, "packets are durable", || durable() > 0);
    daemon.kill();
    daemon.launch().unwrap();
    let gaps = || number(&state(&dir), "/gaps");
    send_until(&netns, 100, "the gap is in the state", || gaps() > 0);
    let gap = state(&dir)["losses"][0].clone();
    assert_eq!(
        (&gap["kind"], &gap["packets"]),
        (&"gap".into(), &Value::Null)
    );
    // And again, with no packet behind it.
    daemon.kill();
    daemon.launch().unwrap();
    let ports = || value(&daemon.counters()[0], "ports");
    eventually("it is back", || ports() > 0);
    let before = gaps();
    sleep(Duration::from_secs(1));
    recorder.stop();
    assert_eq!(gaps(), before + 1);
    let said = fs::read_to_string(&log).unwrap();
    for words in [
        "packets longer than 32,728 bytes are cut",
        "host:wire1: an unknown number of packets is missing between 20",
        "gaps of unknown size",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
}

#[test]
fn a_restart_is_one_gap_however_many_rings_a_port_has() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,queues=4,flows=64,size=200,pps=2000";
    let mut daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    let dir = lab.dir().join("rec");
    let args = ["host:lab", "--flush", "100ms"];
    let mut recorder = Recorder::start(&daemon, &args, &[&dir]).unwrap();
    recorder.until("packets are durable", || recorder.mark() > 100);
    daemon.kill();
    daemon.launch().unwrap();
    recorder.until("the gap is told", || recorder.number("/gaps") > 0);
    let mark = recorder.mark();
    // All queues have come by.
    recorder.until("it goes on", || recorder.mark() > mark + 1000);
    let said = recorder.end().unwrap();
    assert_eq!(recorder.number("/gaps"), 1, "{said}");
    assert_eq!(said.matches("an unknown number").count(), 1, "{said}");
}

//! `vnplug record` where there is little: of a disk, of a ring, and of a daemon.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, value};
use vnplug_e2e::recorder::{Recorder, number, state_in};
use vnplug_e2e::traffic::Stream;
use vnplug_e2e::wire::{PATIENT, Wire};
use vnplug_e2e::{DiskFault, Lab};
use vnplug_store::disk::{BLOCK, Buffer, Disk, Real, Write, is_full};
use vnplug_testing::eventually;

/// An ext4 of this many MiB, mounted where only a process of the test's sees it.
struct Small {
    /// It holds the namespace in which that is mounted.
    holder: Child,
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
        Self { holder: child, dir }
    }

    fn free_mib(&self) -> u64 {
        let space = Real::new(false).0.space(&self.dir).unwrap();
        space.free >> 20
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Frames until that is so.
fn send_until(wire: &Wire, len_bytes: usize, what: &str, mut test: impl FnMut() -> bool) {
    eventually(what, || {
        let some = Stream {
            len_bytes,
            ..Stream::new("wire0", 100)
        };
        wire.netns.enter(|| some.send()).unwrap().unwrap();
        sleep(Duration::from_millis(200));
        test()
    });
}

/// A recorder of the wire, which syncs often.
fn record(daemon: &Daemon, dir: &Path, args: &[&str]) -> Recorder {
    let args = [&["host:wire1", "--flush", "100ms"], args].concat();
    Recorder::start(daemon, &args, &[dir]).unwrap()
}

#[test]
fn a_small_disk_keeps_room_for_the_books_of_a_killed_recorder() {
    let lab = Lab::new().unwrap();
    let small = Small::new(&lab, 400);
    let wire = Wire::new("1500", &["--source", PATIENT]);
    let dir = small.dir.join("rec");
    let before = small.free_mib();
    let mut recorder = record(&wire.daemon, &dir, &[]);
    recorder.until("there is a state", || dir.join("rec.state").exists());
    let durable = || number(&state_in(&dir), "/durable");
    send_until(&wire, 1000, "packets are durable", || durable() > 0);
    let free = small.free_mib();
    assert!(free > before * 3 / 4, "{before} MiB, then {free}");
    recorder.kill();
    let killed = durable();
    let mut next = record(&wire.daemon, &dir, &[]);
    next.until("the next run", || next.number("/run/number") == 2);
    let said = next.end().unwrap();
    let earlier = &next.state()["earlier"];
    assert_eq!((number(earlier, "/runs"), number(earlier, "/cut")), (1, 1));
    assert_eq!(number(earlier, "/durable"), killed);
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
    let mut wire = Wire::new("1500", &["--source", PATIENT]);
    let dir = wire.lab.dir().join("rec");
    let mut recorder = record(&wire.daemon, &dir, &["--ring", "64K"]);
    let durable = || recorder.number("/durable");
    send_until(&wire, 100, "packets are durable", || durable() > 0);
    wire.daemon.kill();
    wire.daemon.launch().unwrap();
    let gaps = || number(&state_in(&dir), "/gaps");
    send_until(&wire, 100, "the gap is in the state", || gaps() > 0);
    let gap = recorder.state()["losses"][0].clone();
    assert_eq!(
        (&gap["kind"], &gap["packets"]),
        (&"gap".into(), &Value::Null)
    );
    // And again, with no packet after it.
    wire.daemon.kill();
    wire.daemon.launch().unwrap();
    let ports = || value(&wire.daemon.counters()[0], "ports");
    eventually("it is back", || ports() > 0);
    let before = gaps();
    sleep(Duration::from_secs(1));
    let said = recorder.end().unwrap();
    assert_eq!(gaps(), before + 1);
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

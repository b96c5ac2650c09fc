//! `vnplug record` on a disk that fails, stalls and loses its power, in a real kernel: recording goes on,
//! and what the durable mark promised is there.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use vnplug_e2e::daemon::program;
use vnplug_e2e::groups::eventually;
use vnplug_e2e::{DiskFault, Fault, Guest, Image, Job, Lab, Uml, UmlConfig};
use vnplug_ring::witness::{Parsed, parse};
use vnplug_store::name::SegmentName;
use vnplug_store::read::Reader;

const LIMIT: Duration = Duration::from_secs(180);
/// Also seen by the host's programs, which find it at /mnt (`world`).
const DIR: &str = "/world/mnt";
/// Where the host's programs find ours.
const PROGRAMS: &str = "/tmp/programs";

/// A daemon that generates frames, and a recorder on a disk that can fail.
struct Stage {
    guest: Guest,
    /// Holds the disk's file.
    _lab: Lab,
}

impl Stage {
    fn new(journal: bool) -> Self {
        let lab = Lab::new().unwrap();
        let file = DiskFault::file(&lab, "disk", 512).unwrap();
        if !journal {
            let mut tune = Command::new("tune2fs");
            tune.args(["-O", "^has_journal"]).arg(&file);
            let output = tune.env("PATH", "/usr/sbin:/sbin").output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        let guest = Uml::boot(
            &lab,
            UmlConfig {
                memory_mib: 512,
                kernel_args: vec![DiskFault::kernel_arg(&file)],
                image: DiskFault::image(Image::default().host_root()),
                ..UmlConfig::default()
            },
        )
        .unwrap();
        let stage = Self { guest, _lab: lab };
        // NB: in `world` a checkout below /tmp is hidden by the guest's own /tmp.
        let programs = program("vnplugd").unwrap();
        let programs = programs.parent().unwrap().display();
        stage.works(&format!(
            "mkdir {PROGRAMS} && mount -t hostfs -o ro,{programs} none /world{PROGRAMS}"
        ));
        stage
    }

    fn works(&self, command: &str) -> String {
        let output = self.guest.run(command, LIMIT).unwrap();
        assert!(output.success(), "{command}: {}", output.text());
        output.text()
    }

    fn start(&self) -> (Job, Job) {
        self.start_with("")
    }

    fn start_with(&self, args: &str) -> (Job, Job) {
        let daemon = self.guest.spawn(&format!(
            "mkdir /tmp/pools; exec world {PROGRAMS}/vnplugd --socket /tmp/s --pool-dir /tmp/pools \
             --source lab=gen,pps=2000,size=300"
        ));
        let daemon = daemon.unwrap();
        let serves = "for i in $(seq 1000); do [ -S /tmp/s ] && exit; sleep 0.1; done; exit 1";
        if !self.guest.run(serves, LIMIT).unwrap().success() {
            let output = daemon.wait(Duration::from_secs(1));
            panic!("the daemon does not serve: {output:?}");
        }
        let recorder = format!(
            "exec world {PROGRAMS}/vnplug --socket /tmp/s record lab --to /mnt/rec --flush 200ms \
             --rotate-size 64M {args}"
        );
        (daemon, self.guest.spawn(&recorder).unwrap())
    }

    /// A reader of the same device, whom the recorder's disk is no concern.
    fn neighbour(&self) -> Job {
        let count = "count lab --witness --ring 16M --json";
        let command = format!("exec world {PROGRAMS}/vnplug --socket /tmp/s {count}");
        self.guest.spawn(&command).unwrap()
    }

    fn state(&self) -> Value {
        self.state_in("/world/mnt/rec")
    }

    fn state_in(&self, dir: &str) -> Value {
        let cat = format!("cat {dir}/rec.state");
        let output = self.guest.run(&cat, LIMIT).unwrap();
        serde_json::from_str(&output.text()).unwrap_or_default()
    }

    fn mark(&self) -> u64 {
        self.state()["durable_mark"]["packets"]
            .as_u64()
            .unwrap_or(0)
    }

    /// Waits until the durable mark has gone past this.
    fn await_mark(&self, beyond: u64, recorder: &Job) -> u64 {
        let deadline = Instant::now() + LIMIT;
        loop {
            let mark = self.mark();
            if mark > beyond {
                return mark;
            }
            let said = recorder.peek(2000).unwrap();
            assert!(
                Instant::now() < deadline,
                "{mark} of {beyond}: {said} {}",
                self.state()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The numbers of all recorded frames, in the order of the segments, and how many segments there are.
    fn recorded(&self) -> (Vec<u64>, usize) {
        self.works("rm -rf /host/rec && cp -r /world/mnt/rec /host/rec");
        numbers(&self.guest.shared_dir().unwrap().join("rec"))
    }
}

fn numbers(dir: &Path) -> (Vec<u64>, usize) {
    let mut segments: Vec<(SegmentName, PathBuf)> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| Some((SegmentName::parse(path.file_name()?.to_str()?)?, path)))
        .collect();
    segments.sort();
    let mut numbers = Vec::new();
    for (_, path) in &segments {
        let mut reader = Reader::open(path).unwrap();
        // What a segment holds before a damaged end is what counts.
        while let Ok(Some(packet)) = reader.read() {
            match parse(packet.bytes) {
                Parsed::Witness(witness) => numbers.push(witness.seq),
                other => panic!("{other:?} in {}", path.display()),
            }
        }
    }
    (numbers, segments.len())
}

fn end(recorder: Job) -> String {
    recorder.signal("INT").unwrap();
    let output = recorder.wait(LIMIT).unwrap();
    output.text()
}

/// Ends a neighbour, who must have had every packet.
fn untouched(neighbour: Job) {
    let said = end(neighbour);
    let perfect = said.contains("\"perfect\":true") && said.contains("\"lost\":0");
    assert!(perfect, "{said}");
}

#[test]
fn recording_goes_on_after_eio_and_every_loss_is_counted() {
    let stage = Stage::new(false);
    let disk = DiskFault::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    let (_daemon, recorder) = stage.start();
    let neighbour = stage.neighbour();
    let before = stage.await_mark(2000, &recorder);
    // Without a journal: a file system whose journal fails is read-only from then on.
    disk.set(Fault::Writes).unwrap();
    // It writes each 200 ms, and says so when that fails.
    eventually("no write fails", || {
        let said = recorder.peek(2000).unwrap();
        said.contains("the segment ends here")
    });
    disk.set(Fault::None).unwrap();
    stage.await_mark(before + 4000, &recorder);
    untouched(neighbour);
    let said = end(recorder);
    let state = stage.state();
    let (numbers, segments) = stage.recorded();
    let of = |path: &str| state.pointer(path).and_then(Value::as_u64).unwrap();
    let (taken, durable, lost) = (
        of("/taken"),
        of("/durable"),
        of("/lost/disk") + of("/lost/unknown"),
    );
    assert!(segments >= 2, "{said} {state}");
    assert_eq!(taken, durable + lost, "{state}");
    assert!(numbers.len() as u64 >= durable, "{} {state}", numbers.len());
    assert!(
        numbers.is_sorted_by(|one, other| one < other),
        "out of order or twice"
    );
    // What is missing was counted.
    let span = numbers.last().unwrap() - numbers[0] + 1;
    let missing = span - numbers.len() as u64;
    assert!(
        missing <= lost + of("/lost/ring"),
        "{missing} missing, {state}"
    );
}

#[test]
fn one_disk_of_two_that_fails_does_not_hold_the_mark() {
    let stage = Stage::new(false);
    let disk = DiskFault::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    // The other is in memory.
    stage.works("mount -t tmpfs -o size=200m none /world/srv");
    let (_daemon, recorder) = stage.start_with("--to /srv/rec");
    let before = stage.await_mark(2000, &recorder);
    disk.set(Fault::Writes).unwrap();
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = stage.state_in("/world/srv/rec");
        let mark = state
            .pointer("/durable_mark/packets")
            .and_then(Value::as_u64);
        if mark.unwrap_or(0) > before + 8000 {
            assert_ne!(state["disks"][0]["paused"], "", "{state:#}");
            break;
        }
        assert!(
            Instant::now() < deadline,
            "the mark stands still: {state:#}"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    disk.set(Fault::None).unwrap();
    let paused = |state: &Value| state["disks"][0]["paused"] != "";
    while paused(&stage.state_in("/world/srv/rec")) {
        assert!(Instant::now() < deadline, "the disk is not used again");
        std::thread::sleep(Duration::from_millis(200));
    }
    let said = end(recorder);
    let state = stage.state_in("/world/srv/rec");
    let of = |path: &str| state.pointer(path).and_then(Value::as_u64).unwrap();
    assert_eq!(of("/lost/disk"), 0, "{said} {state:#}");
    assert_eq!(
        of("/taken"),
        of("/durable") + of("/lost/unknown"),
        "{state:#}"
    );
    stage.works("mkdir /host/all && cp /world/mnt/rec/*.pcapng /world/srv/rec/*.pcapng /host/all");
    let (mut numbers, _) = numbers(&stage.guest.shared_dir().unwrap().join("all"));
    numbers.sort_unstable();
    assert!(numbers.is_sorted_by(|one, other| one < other), "twice");
    assert!(numbers.len() as u64 >= of("/durable"), "{state:#}");
    let span = numbers.last().unwrap() - numbers[0] + 1;
    let missing = span - numbers.len() as u64;
    assert!(
        missing <= of("/lost/unknown") + of("/lost/ring"),
        "{missing}: {state:#}"
    );
}

#[test]
fn a_slow_disk_loses_nothing_that_memory_holds() {
    let stage = Stage::new(true);
    let disk = DiskFault::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    let (_daemon, recorder) = stage.start();
    let neighbour = stage.neighbour();
    let before = stage.await_mark(2000, &recorder);
    disk.set(Fault::Slow(Duration::from_secs(1))).unwrap();
    // Slowly, but twice.
    let slowly = stage.await_mark(before, &recorder);
    stage.await_mark(slowly, &recorder);
    disk.set(Fault::None).unwrap();
    stage.await_mark(before + 12_000, &recorder);
    untouched(neighbour);
    end(recorder);
    let state = stage.state();
    let (numbers, segments) = stage.recorded();
    // The control of the test before: without an error no further segment begins.
    assert_eq!(segments, 1);
    assert_eq!(
        (&state["lost"]["disk"], &state["lost"]["unknown"]),
        (&0.into(), &0.into()),
        "{state}"
    );
    assert_eq!(state["durable"].as_u64().unwrap(), numbers.len() as u64);
    let span = numbers.last().unwrap() - numbers[0] + 1;
    assert_eq!(
        span - numbers.len() as u64,
        state["lost"]["ring"].as_u64().unwrap()
    );
}

#[test]
fn after_a_power_cut_everything_up_to_the_durable_mark_is_there() {
    let stage = Stage::new(true);
    let disk = DiskFault::new(&stage.guest, DIR).unwrap();
    disk.mount().unwrap();
    let (_daemon, recorder) = stage.start();
    let promised = stage.await_mark(6000, &recorder);
    disk.cut("killall -9 vnplug").unwrap();
    let (numbers, _) = stage.recorded();
    let first = numbers[0];
    let prefix = numbers
        .iter()
        .zip(first..)
        .take_while(|&(&one, other)| one == other)
        .count() as u64;
    assert!(prefix >= promised, "{prefix} of {promised}");
    drop(recorder);
}

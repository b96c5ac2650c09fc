//! A guest with a disk that can fail, and a recorder on it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use vnplug_e2e::attached::summary;
use vnplug_e2e::daemon::program;
use vnplug_e2e::recorder::{SETTLED, number, segments};
use vnplug_e2e::traffic::sequence;
use vnplug_e2e::{DiskFault, Guest, Image, Job, Lab, Uml, UmlConfig};
use vnplug_store::read::Reader;
use vnplug_testing::{Deadline, PATIENCE};

/// Also seen by the host's programs, which find it at /mnt (`world`).
pub(crate) const DIR: &str = "/world/mnt";
/// Where the host's programs find ours.
pub(crate) const PROGRAMS: &str = "/tmp/programs";

/// A daemon that generates frames, and a recorder on a disk that can fail.
pub(crate) struct Stage {
    pub(crate) guest: Guest,
    /// Holds the disk's file.
    pub(crate) lab: Lab,
}

impl Stage {
    pub(crate) fn new(journal: bool) -> Self {
        let lab = Lab::new().unwrap();
        let file = DiskFault::file(&lab, "disk", 512).unwrap();
        if !journal {
            host("tune2fs", &["-O", "^has_journal", file.to_str().unwrap()]);
        }
        Self::with(lab, vec![DiskFault::kernel_arg(&file)])
    }

    pub(crate) fn with(lab: Lab, kernel_args: Vec<String>) -> Self {
        let guest = Uml::boot(
            &lab,
            UmlConfig {
                memory_mib: 512,
                kernel_args,
                image: DiskFault::image(Image::default().host_root()),
                ..UmlConfig::default()
            },
        )
        .unwrap();
        let stage = Self { guest, lab };
        // NB: in `world` a checkout below /tmp is hidden by the guest's own /tmp.
        let programs = program("vnplugd").unwrap();
        let programs = programs.parent().unwrap().display();
        stage.works(&format!(
            "mkdir {PROGRAMS} && mount -t hostfs -o ro,{programs} none /world{PROGRAMS}"
        ));
        stage
    }

    pub(crate) fn works(&self, command: &str) -> String {
        let output = self.guest.run(command, PATIENCE).unwrap();
        assert!(output.success(), "{command}: {}", output.text());
        output.text()
    }

    pub(crate) fn start(&self) -> (Job, Job) {
        self.start_with("--rotate-size 64M")
    }

    pub(crate) fn start_with(&self, args: &str) -> (Job, Job) {
        let daemon = self.guest.spawn(&format!(
            "mkdir /tmp/pools; exec world {PROGRAMS}/vnplugd --socket /tmp/s --pool-dir /tmp/pools \
             --source lab=gen,pps=2000,size=300"
        ));
        let daemon = daemon.unwrap();
        let serves = "for i in $(seq 1000); do [ -S /tmp/s ] && exit; sleep 0.1; done; exit 1";
        if !self.guest.run(serves, PATIENCE).unwrap().success() {
            let output = daemon.wait(Duration::from_secs(1));
            panic!("the daemon does not serve: {output:?}");
        }
        let recorder = format!(
            "exec world {PROGRAMS}/vnplug --socket /tmp/s record lab --to /mnt/rec --ring 16M --flush 200ms {args}"
        );
        (daemon, self.guest.spawn(&recorder).unwrap())
    }

    /// A reader of the same device, whom the recorder's disk is no concern.
    pub(crate) fn neighbour(&self) -> Job {
        let count = "count lab --witness --ring 16M --json";
        let command = format!("exec world {PROGRAMS}/vnplug --socket /tmp/s {count}");
        self.guest.spawn(&command).unwrap()
    }

    pub(crate) fn state(&self) -> Value {
        self.state_in("/world/mnt/rec")
    }

    pub(crate) fn state_in(&self, dir: &str) -> Value {
        let cat = format!("cat {dir}/rec.state");
        let output = self.guest.run(&cat, PATIENCE).unwrap();
        serde_json::from_str(&output.text()).unwrap_or_default()
    }

    /// Waits until the durable mark has gone past this.
    pub(crate) fn await_mark(&self, beyond: u64, recorder: &Job) -> u64 {
        let deadline = Deadline::new(format!("the mark goes past {beyond}"));
        loop {
            let mark = number(&self.state(), SETTLED);
            if mark > beyond {
                return mark;
            }
            if recorder.is_done() {
                let said = recorder.wait(PATIENCE).unwrap().text();
                panic!("the recorder ended at {mark} of {beyond}: {said}");
            }
            let said = recorder.peek(2000).unwrap();
            deadline.check_seen(&(mark, said, self.state()));
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The numbers of all recorded frames, in the order of the segments, and how many segments there are.
    pub(crate) fn recorded(&self) -> (Vec<u64>, usize) {
        self.works("rm -rf /host/rec && cp -r /world/mnt/rec /host/rec");
        numbers(&self.guest.shared_dir().unwrap().join("rec"))
    }
}

pub(crate) fn numbers(dir: &Path) -> (Vec<u64>, usize) {
    let segments = segments(dir);
    let mut numbers = Vec::new();
    for path in &segments {
        let mut reader = Reader::open(path).unwrap();
        // What a segment holds before a damaged end is what counts.
        while let Ok(Some(packet)) = reader.read() {
            numbers.push(sequence(packet.bytes));
        }
    }
    (numbers, segments.len())
}

/// Runs a program of e2fsprogs on the host.
pub(crate) fn host(program: &str, args: &[&str]) {
    let mut command = Command::new(program);
    let output = command
        .args(args)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
}

/// How many packets follow the first without a gap.
pub(crate) fn prefix(numbers: &[u64]) -> u64 {
    let first = numbers.first().copied().unwrap_or_default();
    let pairs = numbers.iter().zip(first..);
    pairs.take_while(|&(&one, other)| one == other).count() as u64
}

pub(crate) fn end(recorder: Job) -> String {
    recorder.signal("INT").unwrap();
    let output = recorder.wait(PATIENCE).unwrap();
    output.text()
}

/// Ends a neighbour, who must have had every packet.
pub(crate) fn untouched(neighbour: Job) {
    let said = end(neighbour);
    let summary = summary(&said).unwrap();
    assert_eq!(summary["witness"]["perfect"], true, "{said}");
    assert_eq!(summary["lost"], 0, "{said}");
}

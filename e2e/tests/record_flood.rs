//! A recorder that gets more than its disk takes: its files are whole for everybody, while they grow and
//! after it was killed in the middle of its writes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::{Daemon, program};
use vnplug_store::read::Reader;

const LIMIT: Duration = Duration::from_secs(120);
/// Written before a recorder is killed: more than its buffers hold, so that it always has a backlog.
const ENOUGH: u64 = 300_000_000;

struct Recorder(Child);

impl Recorder {
    fn start(daemon: &Daemon, dir: &Path) -> Self {
        let mut command = Command::new(program("vnplug").unwrap());
        command.arg("--socket").arg(daemon.socket());
        command.args(["record", "host:lab", "--rotate-size", "100M", "--to"]);
        command
            .arg(dir)
            .args(["--flush", "50ms", "--buffer", "128M"]);
        // What it says of losses is not the question here.
        command.stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|end| end == "pcapng"))
        .collect();
    files.sort();
    files
}

/// How many packets a program of others finds, which must have no complaint.
fn by(words: &[&str], file: &Path) -> u64 {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(file).stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{words:?} {}: {said}",
        file.display()
    );
    for complaint in ["damage", "cut short", "truncated", "bogus"] {
        assert!(
            !said.contains(complaint),
            "{words:?} {}: {said}",
            file.display()
        );
    }
    let told = String::from_utf8(output.stdout).unwrap();
    let last = told.trim().rsplit('\t').next().unwrap();
    last.parse().unwrap_or(0)
}

/// tcpdump and capinfos; the number is the latter's.
fn whole(file: &Path) -> u64 {
    by(&["tcpdump", "-w", "/dev/null", "-r"], file);
    by(&["capinfos", "-cMT", "-r"], file)
}

fn mark(dir: &Path) -> u64 {
    let state = fs::read(dir.join("rec.state")).unwrap_or_default();
    let state: Value = serde_json::from_slice(&state).unwrap_or_default();
    state["durable_mark"]["packets"].as_u64().unwrap_or(0)
}

#[test]
fn what_a_flooded_recorder_leaves_is_whole() {
    let lab = Lab::new().unwrap();
    let source = "lab=gen,size=1400,flows=1000";
    let daemon = Daemon::start(&lab, None, &["--source", source]).unwrap();
    for round in 0..6 {
        let dir = lab.dir().join(format!("rec{round}"));
        let mut recorder = Recorder::start(&daemon, &dir);
        let deadline = Instant::now() + LIMIT;
        let (mut looked, written) = (0, |dir: &Path| -> u64 {
            let files = segments(dir);
            files
                .iter()
                .map(|file| fs::metadata(file).unwrap().len())
                .sum()
        });
        while mark(&dir) == 0 || written(&dir) < ENOUGH {
            assert!(
                Instant::now() < deadline,
                "round {round}: it does not write"
            );
            assert!(recorder.0.try_wait().unwrap().is_none(), "it ended");
            // The one that is being written, now.
            if let Some(open) = segments(&dir).last()
                && fs::metadata(open).unwrap().len() > 0
            {
                whole(open);
                looked += 1;
            }
            sleep(Duration::from_millis(3 * round));
        }
        recorder.0.kill().unwrap();
        recorder.0.wait().unwrap();
        assert!(looked > 0);
        let (promised, mut found) = (mark(&dir), 0);
        for file in segments(&dir) {
            let mut reader = Reader::open(&file).unwrap();
            let mut packets = 0;
            while reader.read().unwrap().is_some() {
                packets += 1;
            }
            assert_eq!(whole(&file), packets, "{}", file.display());
            found += packets;
        }
        assert!(found >= promised, "{promised} promised, {found} there");
        fs::remove_dir_all(&dir).unwrap();
    }
}

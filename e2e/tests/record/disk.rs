//! A disk that is full, limited, shared or removed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use serde_json::Value;
use vnplug_e2e::daemon::{Daemon, program, value};
use vnplug_e2e::recorder::{
    MARK, Recorder, SETTLED, number, packets_by_others, segments, state_in,
};
use vnplug_e2e::{Lab, LabError};
use vnplug_store::name::SegmentName;

use crate::numbers;

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
    recorder.until("it goes on", || recorder.number(SETTLED) > 3000);
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
    // Who reads a segment keeps it without its name, until its room is needed; newer ones stay.
    let mut leased = None;
    recorder.until("a segment is leased", || {
        let oldest = segments(&dir).remove(0);
        leased = vnplug_store::disk::lease(&oldest)
            .ok()
            .map(|it| (oldest, it));
        leased.as_ref().is_some_and(|(kept, _)| kept.exists())
    });
    let (kept, lease) = leased.unwrap();
    recorder.until("its name goes", || !kept.exists());
    let numbers: Vec<u64> = segments(&dir)
        .iter()
        .filter_map(|path| SegmentName::parse(path.file_name()?.to_str()?))
        .map(|name| name.sequence)
        .collect();
    assert!(numbers.is_sorted_by(|a, b| a + 1 == *b), "{numbers:?}");
    recorder.until("that is counted", || {
        recorder.number("/disks/0/recycled_while_read") > 0
    });
    drop(lease);
    let status = Command::new(program("vnplug").unwrap())
        .arg("record")
        .args(["--json", "--status"])
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

//! `vnplug record` on a disk that fails, stalls and loses its power, in a real kernel: recording goes on,
//! and what the durable mark promised is there. What was recorded is read from a disk that fails.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod power;
mod reading;
mod stage;

use std::time::Duration;

use serde_json::Value;
use vnplug_e2e::{DiskFault, Fault};
use vnplug_testing::{eventually, until};

use stage::{DIR, Stage, end, numbers, untouched};

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
    let (_daemon, recorder) = stage.start_with("--rotate-size 64M --to /srv/rec");
    let before = stage.await_mark(2000, &recorder);
    disk.set(Fault::Writes).unwrap();
    let look = || stage.state_in("/world/srv/rec");
    let state = until("the mark goes on", look, |state| {
        let mark = state.pointer("/settled_mark/packets");
        mark.and_then(Value::as_u64).unwrap_or(0) > before + 8000
    });
    assert_ne!(state["disks"][0]["paused"], "", "{state:#}");
    disk.set(Fault::None).unwrap();
    until("the disk is used again", look, |state| {
        state["disks"][0]["paused"] == ""
    });
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

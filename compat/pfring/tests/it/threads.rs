//! One ring in several threads and signal handlers, as PF_RING's programs use it. Counts are exact.

use std::process::Command;

use crate::support::{Library, Running, compile};
use vnplug_e2e::Lab;
use vnplug_e2e::daemon::Daemon;
use vnplug_testing::PATIENCE;

const SOURCE: &str = "lab=gen,pps=4000,run=1,protocols=udp4";

/// Every use beside a reader, in a program that runs as `wrapped`.
fn all(wrapped: &[&str]) {
    let lab = Lab::new().unwrap();
    let program = compile(lab.dir(), "threads", Library::Shared);
    let daemon = Daemon::start(&lab, None, &["--source", SOURCE]).unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new("timeout");
        let seconds = PATIENCE.as_secs().to_string();
        command
            .args(["-s", "KILL", &seconds])
            .args(wrapped)
            .arg(&program);
        let running = Running::of(command, &daemon.socket(), args);
        running.expect("ok");
        running.finish();
        daemon.audit();
    };
    for how in ["loop", "recv"] {
        run(&[how, "lab", "12000"]);
    }
    run(&["close", "lab", "20"]);
}

#[test]
fn statistics_settings_breaks_and_closes_come_from_anywhere() {
    all(&[]);
}

#[test]
fn valgrind_finds_no_fault_in_threads() {
    all(&["valgrind", "--error-exitcode=9", "-q", "--fair-sched=yes"]);
}

//! Processes that do not run for a while (SIGSTOP).

use std::fs;

use rustix::process::{Pid, Signal, kill_process};
use vnplug_testing::eventually;

/// Processes that are stopped until this is dropped, also if the test fails: who is to end must run.
#[derive(Debug)]
pub struct Stopped(Vec<Pid>);

impl Stopped {
    /// Stops them, and waits until each of their threads is.
    ///
    /// # Panics
    /// If one is not there, or does not stop.
    #[must_use]
    pub fn new(processes: &[u32]) -> Self {
        let pids = processes.iter().map(|pid| Pid::from_raw(pid.cast_signed()));
        let own = Self(pids.collect::<Option<_>>().expect("processes"));
        for pid in &own.0 {
            kill_process(*pid, Signal::STOP).expect("it is there, and ours");
        }
        for pid in processes {
            eventually("all of it is stopped", || is_stopped(*pid));
        }
        own
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            // One that has ended meanwhile is not to go on.
            let _ = kill_process(*pid, Signal::CONT);
        }
    }
}

/// Whether none of its threads runs.
fn is_stopped(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives");
    threads.flatten().all(|thread| {
        // One that ends meanwhile does not run.
        let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let state = status.lines().find_map(|line| line.strip_prefix("State:"));
        state.is_none_or(|state| matches!(state.trim_start().as_bytes(), [b'T' | b'Z' | b'X', ..]))
    })
}

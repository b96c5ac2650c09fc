//! System calls of a process, counted by the kernel's tracepoint.

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::row::Result;

/// Counts the system calls of all threads of a process, from its making on.
///
/// `perf` does it (`raw_syscalls:sys_enter`), which stops nobody: other than with strace, the process
/// goes on about as fast as without.
pub(crate) struct Calls(Child);

impl Calls {
    /// Begins to count.
    ///
    /// # Errors
    /// Where there is no perf, or the kernel has no such tracepoint.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let mut perf = Command::new("perf");
        perf.args(["stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p"]);
        perf.arg(pid.to_string());
        perf.stdin(Stdio::null()).stdout(Stdio::null());
        let perf = perf.stderr(Stdio::piped()).spawn();
        let mut calls = Self(perf.map_err(|error| format!("perf (package linux-perf): {error}"))?);
        let begin = Instant::now();
        while !calls.counts() {
            if calls.0.try_wait()?.is_some() || begin.elapsed() > PATIENCE {
                return Err("perf counts no system calls here".into());
            }
            sleep(STEP);
        }
        // It has the counters; they are on soon after.
        sleep(10 * STEP);
        Ok(calls)
    }

    /// Whether it has its counters.
    fn counts(&self) -> bool {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.0.id()));
        let mut links = files.into_iter().flatten().flatten();
        links.any(|file| {
            std::fs::read_link(file.path())
                .is_ok_and(|to| to.to_string_lossy().contains("[perf_event]"))
        })
    }

    /// How many there were until now.
    ///
    /// # Errors
    /// What perf says instead.
    pub(crate) fn finish(mut self) -> Result<u64> {
        kill_process(Pid::from_child(&self.0), Signal::INT)?;
        let mut text = String::new();
        if let Some(mut said) = self.0.stderr.take() {
            std::io::Read::read_to_string(&mut said, &mut text)?;
        }
        parse(&text).ok_or_else(|| format!("perf says {text:?}").into())
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The count in what `perf stat -x ,` prints: `5120,,raw_syscalls:sys_enter,…`.
fn parse(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("sys_enter"))?;
    line.split(',').next()?.parse().ok()
}

const PATIENCE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_the_first_field() {
        let text = "\n5120,,raw_syscalls:sys_enter,2002101,100.00,,\n";
        assert_eq!(parse(text), Some(5120));
        assert_eq!(parse("<not counted>,,raw_syscalls:sys_enter,0"), None);
    }
}

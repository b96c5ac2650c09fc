//! Child processes that cannot outlive us.
//!
//! A guest runs in a process group of its own, and beside it a **watchdog**: a shell that reads
//! from a pipe whose only other end is ours. The guest's first act, before exec, is to write its
//! group into that pipe. When we end, by whatever signal, the kernel closes the pipe and the
//! watchdog kills the group. An orderly end kills the group itself and dismisses the watchdog.
//!
//! NB: `PR_SET_PDEATHSIG` is not enough. It fires when the *thread* that spawned ends, and
//! User-mode Linux has helper processes that live on when its main process is killed.

use std::fs;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{LabError, Result};
use crate::owner::stat_fields;
use crate::sys;

/// A process group that dies with us.
#[derive(Debug)]
pub(crate) struct Tethered {
    process: Child,
    watchdog: Child,
    exit: Option<ExitStatus>,
}

impl Tethered {
    /// Starts `command`, which inherits `inherit` and runs in `netns`.
    pub(crate) fn spawn(
        mut command: Command,
        inherit: Vec<OwnedFd>,
        netns: Option<OwnedFd>,
    ) -> Result<Self> {
        let what = command.get_program().to_string_lossy().into_owned();
        let (end, ours) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
            .map_err(|errno| LabError::io("pipe for the watchdog")(errno.into()))?;
        let announce = ours
            .try_clone()
            .map_err(LabError::io("pipe for the watchdog"))?;
        let mut watchdog = Command::new("/bin/sh");
        watchdog
            .args(["-c", WATCHDOG])
            .stdin(end)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        std::os::unix::process::CommandExt::process_group(&mut watchdog, 0);
        let mut watchdog = watchdog
            .spawn()
            .map_err(LabError::io("start the watchdog"))?;
        watchdog.stdin = Some(ours.into());

        sys::tether(&mut command, announce, inherit, netns);
        match command.spawn() {
            Ok(process) => Ok(Self {
                process,
                watchdog,
                exit: None,
            }),
            Err(source) => {
                dismiss(&mut watchdog);
                Err(LabError::Io {
                    what: format!("start {what}"),
                    source,
                })
            }
        }
    }

    /// Process id of the group's leader.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The exit status, if the leader has ended; what it left behind is killed.
    pub(crate) fn try_wait(&mut self) -> Option<ExitStatus> {
        if self.exit.is_none() {
            self.exit = self.process.try_wait().ok().flatten();
            if self.exit.is_some() {
                sys::kill_group(self.process.id());
                dismiss(&mut self.watchdog);
            }
        }
        self.exit
    }

    /// Waits for the leader's end; `None` when it still runs after `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.try_wait() {
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends a signal to the leader.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal)
            .map_err(|errno| LabError::io("signal a child")(errno.into()))
    }

    /// Kills the whole group and waits until the leader is gone.
    pub(crate) fn kill(&mut self) {
        if self.try_wait().is_none() {
            sys::kill_group(self.process.id());
            self.exit = self.process.wait().ok();
            dismiss(&mut self.watchdog);
        }
    }

    /// Processor time of the leader and all its descendants, user and system, since their start;
    /// includes ended ones that were waited for.
    pub(crate) fn cpu_time(&self) -> Duration {
        let mut total = 0;
        let mut pending = vec![self.process.id()];
        while let Some(pid) = pending.pop() {
            // proc(5): utime, stime, cutime, cstime are fields 14 to 17.
            let fields = stat_fields(pid).unwrap_or_default();
            total += fields
                .iter()
                .skip(11)
                .take(4)
                .filter_map(|field| field.parse::<u64>().ok())
                .sum::<u64>();
            for task in fs::read_dir(format!("/proc/{pid}/task"))
                .into_iter()
                .flatten()
                .flatten()
            {
                let children = fs::read_to_string(task.path().join("children")).unwrap_or_default();
                pending.extend(
                    children
                        .split_whitespace()
                        .filter_map(|child| child.parse::<u32>().ok()),
                );
            }
        }
        let ticks_per_second = rustix::param::clock_ticks_per_second();
        Duration::from_millis(total * 1000 / ticks_per_second)
    }
}

impl Drop for Tethered {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Ends a watchdog without its killing anything.
fn dismiss(watchdog: &mut Child) {
    if let Some(mut pipe) = watchdog.stdin.take() {
        // NB: failures mean that the watchdog is gone already, which is what is wanted.
        let _ = pipe.write_all(b"dismissed\ndismissed\n");
    }
    let _ = watchdog.wait();
}

/// Line 1 is the group to guard, line 2 the dismissal; an end of file before it is our death.
const WATCHDOG: &str = r#"read -r group; read -r dismissal || kill -s KILL -- "-$group""#;

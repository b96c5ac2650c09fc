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
use std::sync::Arc;
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
        inherit: Vec<Arc<OwnedFd>>,
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
                self.bury();
            }
        }
        self.exit
    }

    /// Whether the leader has ended, if [`try_wait`](Self::try_wait) has not said so yet.
    pub(crate) fn has_ended(&self) -> bool {
        let id = rustix::process::WaitId::Pid(rustix::process::Pid::from_child(&self.process));
        let look = rustix::process::WaitIdOptions::EXITED
            | rustix::process::WaitIdOptions::NOHANG
            | rustix::process::WaitIdOptions::NOWAIT;
        self.exit.is_some() || matches!(rustix::process::waitid(id, look), Ok(Some(_)))
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

    /// Sends a signal to the whole group, as a terminal does.
    pub(crate) fn signal_group(&self, signal: rustix::process::Signal) -> Result<()> {
        let group = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process_group(group, signal)
            .map_err(|errno| LabError::io("signal a child's group")(errno.into()))
    }

    /// Kills the whole group and waits until none of it runs.
    pub(crate) fn kill(&mut self) {
        if self.try_wait().is_none() {
            sys::kill_group(self.process.id());
            self.exit = self.process.wait().ok();
            self.bury();
        }
    }

    /// Kills what the leader left behind, waits until it is gone and dismisses the watchdog.
    ///
    /// NB: a killed process still runs until the kernel comes round to it, and only the leader is
    /// ours to wait for: User-mode Linux's helpers are seen for some milliseconds after its end.
    fn bury(&mut self) {
        let group = self.process.id();
        let deadline = Instant::now() + BURIAL;
        sys::kill_group(group);
        while runs(group) {
            if Instant::now() >= deadline {
                eprintln!("processes of group {group} outlive SIGKILL by {BURIAL:?}");
                break;
            }
            thread::sleep(Duration::from_millis(1));
        }
        dismiss(&mut self.watchdog);
    }

    /// Processor time of the leader and all its descendants; see [`cpu_time`].
    pub(crate) fn cpu_time(&self) -> Duration {
        cpu_time(self.process.id())
    }
}

impl Drop for Tethered {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Processor time of a process and all its descendants, user and system, since their start; includes
/// ended ones that were waited for.
pub(crate) fn cpu_time(pid: u32) -> Duration {
    let mut total = 0;
    let mut pending = vec![pid];
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

/// Whether a process of this group runs. Zombies do not; they are the business of their parents.
fn runs(group: u32) -> bool {
    if !sys::group_exists(group) {
        return false;
    }
    let group = group.to_string();
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(stat_fields)
        .any(|fields| fields.get(2) == Some(&group) && !["Z", "X"].contains(&fields[0].as_str()))
}

/// Ends a watchdog without its killing anything.
fn dismiss(watchdog: &mut Child) {
    if let Some(mut pipe) = watchdog.stdin.take() {
        // NB: failures mean that the watchdog is gone already, which is what is wanted.
        let _ = pipe.write_all(b"dismissed\ndismissed\n");
    }
    let _ = watchdog.wait();
}

/// How long killed processes may take to end; the kernel may be writing back their memory.
const BURIAL: Duration = Duration::from_secs(10);

/// Line 1 is the group to guard, line 2 the dismissal; an end of file before it is our death.
const WATCHDOG: &str = r#"read -r group; read -r dismissal || kill -s KILL -- "-$group""#;

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Tethered {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdout(Stdio::null());
        Tethered::spawn(command, Vec::new(), None).unwrap()
    }

    #[test]
    fn a_killed_group_does_not_run_any_more() {
        // Processes with much memory, which the kernel takes a while to take back.
        let busy = "dd if=/dev/zero of=/dev/null bs=64M count=1000 2>/dev/null";
        for _ in 0..5 {
            let mut group = shell(&format!("{busy} & {busy} & {busy} & wait"));
            // Whatever they have come to by now.
            thread::sleep(Duration::from_millis(200));
            group.kill();
            assert!(!runs(group.pid()));
        }
    }

    #[test]
    fn a_leader_that_ends_takes_its_group_along() {
        let mut group = shell("for n in $(seq 50); do sleep 1000 & done; exit 3");
        let ended = group.wait(Duration::from_secs(60)).unwrap();
        assert_eq!(ended.code(), Some(3));
        assert!(!runs(group.pid()));
    }
}

//! Programs that write what they capture to a disk, started and ended alike.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::time::{ClockId, clock_gettime};
use vnplug_e2e::Netns;
use vnplug_e2e::daemon::{Daemon, guest_program};

use super::files;
use crate::attached::cpu_time;
use crate::row::Result;
use crate::sys;
use crate::wire::Wire;

/// Who records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tool {
    /// The daemon and `vnplug record`.
    Vnplug,
    Tcpdump,
    Dumpcap,
    Netsniff,
}

/// One that records what comes out of `wire0` into a directory.
pub(super) struct Recording {
    tool: Tool,
    dir: PathBuf,
    process: Process,
    daemon: Option<Daemon>,
    /// Processor time of both when they were ready.
    before: Duration,
}

/// What a recording took.
pub(super) struct Ended {
    /// Processor time of the program, the daemon and the flush, since they were ready.
    pub(super) cpu: Duration,
    /// When the last byte was on the disk.
    pub(super) at: Instant,
}

impl Tool {
    /// As figures have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Vnplug => "vnplug",
            Self::Tcpdump => "tcpdump",
            Self::Dumpcap => "dumpcap",
            Self::Netsniff => "netsniff-ng",
        }
    }

    /// Starts it and waits until it captures.
    pub(super) fn start(self, wire: &Wire, dir: &Path) -> Result<Recording> {
        let daemon = match self {
            Self::Vnplug => {
                let source = format!("wire0=af_packet:wire0,blocks={}", SHARE_MIB * 2);
                let args = ["--source", &source];
                Some(Daemon::start(&wire.lab, Some(&wire.netns), &args)?)
            }
            _ => None,
        };
        let mut command = match &daemon {
            Some(daemon) => recorder(daemon, "host:wire0", dir)?,
            None => self.command(dir),
        };
        if daemon.is_some() {
            let share = format!("{SHARE_MIB}M");
            command.args(["--ring", &share, "--buffer", &share]);
        }
        let log = wire.lab.dir().join("tool.log");
        let process = Process::start(command, Some(&wire.netns), &log)?;
        let ready = || match self {
            Self::Vnplug => dir.join("rec.lock").exists(),
            Self::Tcpdump => process.said().contains("listening on"),
            Self::Dumpcap => process.said().contains("File: "),
            Self::Netsniff => process.said().contains("Running!"),
        };
        process.until(ready)?;
        // What they say, they say a little too early.
        sleep(Duration::from_millis(100));
        let mut recording = Recording {
            tool: self,
            dir: dir.to_owned(),
            process,
            daemon,
            before: Duration::ZERO,
        };
        recording.before = recording.cpu()?;
        Ok(recording)
    }

    fn command(self, dir: &Path) -> Command {
        let words = match self {
            Self::Vnplug | Self::Tcpdump => {
                format!("tcpdump -n -Z root -i wire0 -B {} -w", 3 * SHARE_MIB * 1024)
            }
            Self::Dumpcap => format!("dumpcap -q -i wire0 -B {} -w", 3 * SHARE_MIB),
            Self::Netsniff => {
                format!(
                    "netsniff-ng --silent --in wire0 --ring-size {}MiB --out",
                    3 * SHARE_MIB
                )
            }
        };
        let mut words = words.split(' ');
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).arg(dir.join("captured.pcap"));
        command
    }

    /// How long no byte may come to its files until it has nothing left to write: longer than it waits
    /// for a block of the kernel's ring to fill, and than the kernel holds up a writer at once.
    fn rest(self) -> Duration {
        Duration::from_millis(match self {
            // Its timeout is a second.
            Self::Tcpdump => 1300,
            _ => 500,
        })
    }
}

impl Recording {
    /// Waits until everything is written, ends it, and has what it left in the page cache written, too.
    /// `Ended::at` leaves out what was waited for.
    pub(super) fn end(mut self) -> Result<Ended> {
        let idle = self.await_rest()?;
        let begin = Instant::now();
        let own = Usage::now(&self.process)?;
        let daemon = self.daemon_cpu()?;
        self.process.end(Some(Signal::INT))?;
        let mut cpu = own.until_its_end()? + self.daemon_cpu()?.saturating_sub(daemon);
        cpu += (own.of_process + daemon).saturating_sub(self.before);
        let flush = thread_time();
        files::sync(&self.dir)?;
        cpu += thread_time().saturating_sub(flush);
        let at = Instant::now() - begin.saturating_duration_since(idle);
        Ok(Ended { cpu, at })
    }

    /// When the last byte was written that came by itself.
    fn await_rest(&self) -> Result<Instant> {
        let deadline = Instant::now() + LIMIT;
        let (mut size, mut since) = (0, Instant::now());
        while since.elapsed() < self.tool.rest() && Instant::now() < deadline {
            let now = files::size(&self.dir)?;
            if now != size {
                (size, since) = (now, Instant::now());
            }
            sleep(LOOK);
        }
        Ok(since)
    }

    fn cpu(&self) -> Result<Duration> {
        Ok(cpu_time(self.process.pid())? + self.daemon_cpu()?)
    }

    fn daemon_cpu(&self) -> Result<Duration> {
        let pid = self.daemon.as_ref().map(Daemon::pid);
        pid.map_or(Ok(Duration::ZERO), cpu_time)
    }
}

/// `vnplug record` of a device; the caller adds options.
pub(super) fn recorder(daemon: &Daemon, device: &str, dir: &Path) -> Result<Command> {
    let mut command = Command::new(guest_program()?);
    command.arg("--socket").arg(daemon.socket());
    command.args(["record", device, "--to"]).arg(dir);
    Ok(command)
}

/// A child of ours that speaks into a file.
pub(super) struct Process {
    child: Child,
    log: PathBuf,
    ended: bool,
}

impl Process {
    /// Starts it, in a namespace if one is given, where this thread may run.
    pub(super) fn start(mut command: Command, netns: Option<&Netns>, log: &Path) -> Result<Self> {
        let output = File::create(log)?;
        command.stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output);
        let child = match netns {
            Some(netns) => netns.enter(|| command.spawn())?,
            None => command.spawn(),
        };
        let program = command.get_program().to_string_lossy().into_owned();
        Ok(Self {
            child: child.map_err(|error| format!("{program}: {error}"))?,
            log: log.to_owned(),
            ended: false,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said so far.
    pub(super) fn said(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until something is so.
    pub(super) fn until(&self, mut ready: impl FnMut() -> bool) -> Result<()> {
        let deadline = Instant::now() + LIMIT;
        while !ready() {
            if Instant::now() > deadline
                || !Path::new(&format!("/proc/{}/exe", self.pid())).exists()
            {
                return Err(format!("it does not work: {}", self.said()).into());
            }
            sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Signals it, or not, and waits for its end; what it said.
    pub(super) fn end(&mut self, signal: Option<Signal>) -> Result<String> {
        if let (Some(signal), Some(pid)) = (signal, Pid::from_raw(self.pid().cast_signed())) {
            kill_process(pid, signal)?;
        }
        let deadline = Instant::now() + LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if Instant::now() > deadline {
                return Err(format!("it does not end: {}", self.said()).into());
            }
            sleep(Duration::from_millis(1));
        };
        self.ended = true;
        match status.success() {
            true => Ok(self.said()),
            false => Err(format!("{status}: {}", self.said()).into()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.ended {
            // An error means that it is gone already.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Processor time of a process, to be told when it is gone.
pub(super) struct Usage {
    of_process: Duration,
    of_children: Duration,
}

impl Usage {
    /// As it is now.
    pub(super) fn now(process: &Process) -> Result<Self> {
        Ok(Self {
            of_process: cpu_time(process.pid())?,
            of_children: sys::children_time()?,
        })
    }

    /// What the process took from then until its end, if no other child ended since.
    pub(super) fn until_its_end(&self) -> Result<Duration> {
        Ok(self.whole()?.saturating_sub(self.of_process))
    }

    /// What the process took in all, if no other child ended since.
    pub(super) fn whole(&self) -> Result<Duration> {
        Ok(sys::children_time()?.saturating_sub(self.of_children))
    }
}

/// Processor time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Ours has three buffers of this many MiB: the kernel's, the ring and the recorder's. Others have one of
/// three times as much, in the kernel.
pub(super) const SHARE_MIB: usize = 16;
/// Longest wait for anything.
const LIMIT: Duration = Duration::from_secs(60);
/// How often a file's size is looked at.
const LOOK: Duration = Duration::from_millis(20);

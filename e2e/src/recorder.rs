//! A recorder under test: `vnplug record`, what it says of itself, and how others read its files.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;
use serde_json::Value;
use vnplug_testing::PATIENCE;

use crate::child::Tethered;
use crate::daemon::{Daemon, program};
use crate::error::{LabError, Result};
use crate::patience;

/// A running `vnplug record`; killed when dropped.
#[derive(Debug)]
pub struct Recorder {
    process: Tethered,
    dirs: Vec<PathBuf>,
    log: PathBuf,
}

impl Recorder {
    /// Starts one with these arguments, into these directories. What it says is in a file beside the first.
    ///
    /// # Errors
    /// [`LabError`] if it cannot be started.
    pub fn start(daemon: &Daemon, args: &[&str], dirs: &[impl AsRef<Path>]) -> Result<Self> {
        Self::start_by(Command::new(program("vnplug")?), daemon, args, dirs)
    }

    /// As [`start`](Self::start), by a command that is `vnplug`, or ends with it and becomes it.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_by(
        mut command: Command,
        daemon: &Daemon,
        args: &[&str],
        dirs: &[impl AsRef<Path>],
    ) -> Result<Self> {
        let dirs: Vec<PathBuf> = dirs.iter().map(|dir| dir.as_ref().to_owned()).collect();
        let log = dirs[0].with_extension("log");
        let output = File::create(&log).map_err(LabError::io("the recorder's log"))?;
        command.arg("--socket").arg(daemon.socket());
        command.arg("record").args(args);
        for dir in &dirs {
            command.arg("--to").arg(dir);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(output);
        Ok(Self {
            process: Tethered::spawn(command, Vec::new(), None)?,
            dirs,
            log,
        })
    }

    /// What the directory that was synced last says; null before the first sync.
    #[must_use]
    pub fn state(&self) -> Value {
        let states = self.dirs.iter().map(|dir| state_in(dir));
        let age = |state: &Value| (number(state, "/run/number"), number(state, "/revision"));
        states.max_by_key(age).unwrap_or_default()
    }

    /// A number in its [`state`](Self::state); 0 if there is none.
    #[must_use]
    pub fn number(&self, at: &str) -> u64 {
        number(&self.state(), at)
    }

    /// The durable mark: this many packets are on the disk for certain.
    #[must_use]
    pub fn mark(&self) -> u64 {
        self.number(MARK)
    }

    /// What it said so far.
    #[must_use]
    pub fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Waits until something holds while it is at work.
    ///
    /// # Panics
    /// With `what` and what it said, if it ends before, or after [`PATIENCE`].
    pub fn until(&self, what: &str, holds: impl FnMut() -> bool) {
        let waited = self.try_until(what, holds);
        waited.unwrap_or_else(|error| panic!("{error}"));
    }

    /// As [`until`](Self::until), without the panic.
    pub(crate) fn try_until(&self, what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
        let told = || format!("{what}: {}", self.said());
        patience::until(told, PATIENCE, || match holds() {
            false if self.process.has_ended() => Err(self.failed()),
            holds => Ok(holds),
        })
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// [`LabError::Io`] if it is no more.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Ends it as Ctrl-C does; what it said.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn end(&mut self) -> Result<String> {
        self.signal(Signal::INT)?;
        self.wait()
    }

    /// Waits until it ends; what it said.
    ///
    /// # Errors
    /// With what it said, [`LabError::Command`] if not all was well, [`LabError::Timeout`] if it is at work
    /// after [`PATIENCE`].
    pub fn wait(&mut self) -> Result<String> {
        match self.process.wait(PATIENCE) {
            Some(status) if status.success() => Ok(self.said()),
            Some(_) => Err(self.failed()),
            None => Err(self.late("it ends")),
        }
    }

    fn failed(&self) -> LabError {
        LabError::Command {
            command: "vnplug record".to_owned(),
            text: self.said(),
        }
    }

    fn late(&self, what: &str) -> LabError {
        LabError::Timeout {
            what: format!("{what}: {}", self.said()),
            after: PATIENCE,
        }
    }
}

/// What the state file in a directory says; null if there is none.
#[must_use]
pub fn state_in(dir: &Path) -> Value {
    let text = fs::read(dir.join("rec.state")).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

/// A number in a state, at a JSON pointer; 0 if there is none.
#[must_use]
pub fn number(state: &Value, at: &str) -> u64 {
    state.pointer(at).and_then(Value::as_u64).unwrap_or(0)
}

/// The segments in a directory, packed or not, in their order; none if it is not there.
#[must_use]
pub fn segments(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|file| {
        let name = file.to_str().unwrap_or_default();
        let name = name.strip_suffix(".age").unwrap_or(name);
        let name = name.strip_suffix(".zst").unwrap_or(name);
        name.ends_with(".pcapng") || name.ends_with(".pcap")
    });
    // Their numbers have all the same length.
    files.sort();
    files
}

/// What a program prints of a file, of which it must have no complaint.
///
/// # Panics
/// With its complaint.
pub fn read_by(words: &[&str], file: &Path) -> String {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).arg(file).stdin(Stdio::null());
    let output = command.output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr);
    let complaints = ["damage", "cut short", "truncated", "bogus"];
    let complains = complaints.iter().any(|words| said.contains(words));
    assert!(output.status.success() && !complains, "{command:?}: {said}");
    String::from_utf8(output.stdout).expect("text")
}

/// How many packets capinfos finds in a file.
///
/// # Panics
/// As [`read_by`].
pub fn packets_by_capinfos(file: &Path) -> u64 {
    let told = read_by(&["capinfos", "-cMT", "-r"], file);
    let last = told.trim().rsplit('\t').next();
    last.and_then(|last| last.parse().ok()).expect("a number")
}

/// How many packets tcpdump, tshark and capinfos find in a file that does not grow.
///
/// # Panics
/// As [`read_by`].
pub fn packets_by_others(file: &Path) -> [u64; 3] {
    let lines = |program| read_by(&[program, "-nr"], file).lines().count() as u64;
    [lines("tcpdump"), lines("tshark"), packets_by_capinfos(file)]
}

/// Where the durable mark is in a state.
pub const MARK: &str = "/durable_mark/packets";
/// Where it has how far everything is durable, or counted as lost.
pub const SETTLED: &str = "/settled_mark/packets";

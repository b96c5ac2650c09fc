//! `vnplug record` and what reads its files, as the demo of recording runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use rustix::process::Signal;
use serde_json::Value;
use vnplug_ring::witness::{Parsed, parse};

use super::compare;
use super::report::grouped;
use super::wire::{TAPPED, until};
use crate::child::Tethered;
use crate::daemon::Daemon;
use crate::error::{LabError, Result};

/// A recorder at work.
#[derive(Debug)]
pub(super) struct Recorder {
    process: Tethered,
    dir: PathBuf,
    log: PathBuf,
}

impl Recorder {
    /// Starts one on the tapped wire and waits until something is durable.
    pub(super) fn start(vnplug: &Path, daemon: &Daemon, dir: &Path) -> Result<Self> {
        let state = dir.join(STATE);
        let old = fs::read(&state).unwrap_or_default();
        let log = dir.with_extension("log");
        let output = fs::File::create(&log).map_err(LabError::io("the recorder's log"))?;
        let mut command = Command::new(vnplug);
        command.arg("--socket").arg(daemon.socket());
        command.args(["record", &format!("host:{TAPPED}"), "--to"]);
        command.arg(dir).args(["--flush", "200ms", "--ring", "64M"]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(output);
        let mut recorder = Self {
            process: Tethered::spawn(command, Vec::new(), None)?,
            dir: dir.to_owned(),
            log,
        };
        until("the recorder says that packets are durable", || {
            if recorder.process.try_wait().is_some() {
                return Err(recorder.failed());
            }
            Ok(fs::read(&state).unwrap_or_default() != old && recorder.mark() > 0)
        })?;
        Ok(recorder)
    }

    /// The durable mark: so many packets are on the disk for certain.
    pub(super) fn mark(&self) -> u64 {
        let text = fs::read(self.dir.join(STATE)).unwrap_or_default();
        let state: Value = serde_json::from_slice(&text).unwrap_or_default();
        state["durable_mark"]["packets"].as_u64().unwrap_or(0)
    }

    /// Kills it with SIGKILL; the mark that it left.
    pub(super) fn kill(mut self) -> u64 {
        self.process.kill();
        self.mark()
    }

    /// Ends it as Ctrl-C does; what it says.
    pub(super) fn end(mut self) -> Result<String> {
        self.process.signal(Signal::INT)?;
        match self.process.wait(super::LIMIT) {
            Some(status) if status.success() => Ok(self.said()),
            _ => Err(self.failed()),
        }
    }

    fn said(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        text.trim().to_owned()
    }

    fn failed(&self) -> LabError {
        LabError::Command {
            command: "vnplug record".to_owned(),
            text: self.said(),
        }
    }
}

/// Numbered frames among the packets of capture files.
#[derive(Debug, Default)]
pub(super) struct Numbered {
    /// All packets.
    pub(super) packets: u64,
    /// Those with a number.
    pub(super) frames: u64,
    /// How many numbers are missing between the first and the last.
    pub(super) missing: u64,
    /// Frames whose checksum is wrong.
    pub(super) corrupt: u64,
}

impl Numbered {
    /// Of these files, as `vnplug extract` reads them; `copy` is where to put what it finds.
    pub(super) fn of(vnplug: &Path, files: &[PathBuf], copy: &Path) -> Result<Self> {
        let mut command = Command::new(vnplug);
        command.arg("extract").args(files);
        command.args(["--format", "pcap", "-w"]).arg(copy);
        output(command)?;
        let mut numbers = Vec::new();
        let mut counted = Self::default();
        for packet in compare::read(copy)? {
            counted.packets += 1;
            match parse(packet.bytes()) {
                Parsed::Witness(witness) => numbers.push(witness.seq),
                Parsed::Corrupt => counted.corrupt += 1,
                Parsed::Foreign => {}
            }
        }
        // NB: a failure leaves it to the lab.
        let _ = fs::remove_file(copy);
        numbers.sort_unstable();
        numbers.dedup();
        counted.frames = numbers.len() as u64;
        if let (Some(first), Some(last)) = (numbers.first(), numbers.last()) {
            counted.missing = last - first + 1 - counted.frames;
        }
        Ok(counted)
    }

    /// In words.
    pub(super) fn told(&self) -> String {
        format!(
            "{} packets, {} of them numbered frames, of whose numbers {} are missing in between",
            grouped(self.packets),
            grouped(self.frames),
            grouped(self.missing)
        )
    }
}

/// The segments in a directory, the oldest first.
pub(super) fn segments(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(LabError::io(format!("list {}", dir.display())))?;
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "pcapng"))
        .collect();
    files.sort();
    Ok(files)
}

/// What a program prints.
pub(super) fn output(mut command: Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let ended = command.stdin(Stdio::null()).output();
    let ended = ended.map_err(LabError::io(format!("run {name}")))?;
    match ended.status.success() {
        true => Ok(String::from_utf8_lossy(&ended.stdout).into_owned()),
        false => Err(LabError::Command {
            command: format!("{command:?}"),
            text: String::from_utf8_lossy(&ended.stderr).into_owned(),
        }),
    }
}

/// Does something on a thread of its own until `rest` is over.
pub(super) fn beside<T>(
    work: impl FnOnce() -> Result<()> + Send,
    rest: impl FnOnce() -> Result<T>,
) -> Result<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(work);
        let done = rest();
        let worked = worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        worked.and(done)
    })
}

const STATE: &str = "rec.state";

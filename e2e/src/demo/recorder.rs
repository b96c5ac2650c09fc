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
        Told::of(&self.dir).mark
    }

    /// Kills it with SIGKILL; the state that it left.
    pub(super) fn kill(mut self) -> Told {
        self.process.kill();
        Told::of(&self.dir)
    }

    /// Ends it as Ctrl-C does; what it says, and its last state.
    pub(super) fn end(mut self) -> Result<(String, Told)> {
        self.process.signal(Signal::INT)?;
        match self.process.wait(super::LIMIT) {
            Some(status) if status.success() => Ok((self.said(), Told::of(&self.dir))),
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

/// What a recorder says in its state file.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Told {
    /// The durable mark.
    pub(super) mark: u64,
    durable: u64,
    /// Lost in the ring, of all that it knows.
    ring: u64,
    /// Lost before the daemon.
    source: u64,
    ended: bool,
}

impl Told {
    fn of(dir: &Path) -> Self {
        let text = fs::read(dir.join(STATE)).unwrap_or_default();
        let state: Value = serde_json::from_slice(&text).unwrap_or_default();
        let number = |at: &str| state.pointer(at).and_then(Value::as_u64).unwrap_or(0);
        Self {
            mark: number("/durable_mark/packets"),
            durable: number("/durable"),
            ring: number("/lost/ring"),
            source: number("/lost/source"),
            ended: state.pointer("/run/ended") == Some(&Value::Bool(true)),
        }
    }
}

/// Numbered frames among the packets of capture files.
#[derive(Debug, Default)]
pub(super) struct Numbered {
    /// All packets.
    pub(super) packets: u64,
    /// Their numbers, each with how many packets are before it.
    numbers: Vec<(u64, u64)>,
    /// Frames whose checksum is wrong.
    corrupt: u64,
}

impl Numbered {
    /// Of these files, as `vnplug extract` reads them; `copy` is where to put what it finds.
    pub(super) fn of(vnplug: &Path, files: &[PathBuf], copy: &Path) -> Result<Self> {
        let mut command = Command::new(vnplug);
        command.arg("extract").args(files);
        command.args(["--format", "pcap", "-w"]).arg(copy);
        output(command)?;
        let mut counted = Self::default();
        for packet in compare::read(copy)? {
            match parse(packet.bytes()) {
                Parsed::Witness(witness) => counted.numbers.push((counted.packets, witness.seq)),
                Parsed::Corrupt => counted.corrupt += 1,
                Parsed::Foreign => {}
            }
            counted.packets += 1;
        }
        // NB: a failure leaves it to the lab.
        let _ = fs::remove_file(copy);
        Ok(counted)
    }

    /// In words.
    pub(super) fn told(&self) -> String {
        let (missing, twice) = self.gaps(self.packets);
        format!(
            "{} packets, {} of them numbered frames, of whose numbers {} are missing in between and {} \
             are there twice",
            grouped(self.packets),
            grouped(self.numbers.len() as u64),
            grouped(missing),
            grouped(twice),
        )
    }

    /// What is wrong: everything that was promised is there, once, and of what is missing in between each
    /// was told, or is among those that the `kernel` lost before the daemon.
    pub(super) fn faults(&self, told: &Told, kernel: u64) -> Vec<String> {
        let mut faults = Vec::new();
        let there = grouped(self.packets);
        if self.packets < told.mark {
            let promised = grouped(told.mark);
            faults.push(format!(
                "{promised} packets were promised, {there} are there"
            ));
        }
        if told.ended && self.packets != told.durable {
            let durable = grouped(told.durable);
            faults.push(format!(
                "{durable} packets are counted as durable, {there} are there"
            ));
        }
        if self.corrupt > 0 {
            faults.push(format!("{} frames are damaged", grouped(self.corrupt)));
        }
        // What is behind the mark of one that was killed was not told yet.
        let (missing, _) = self.gaps(told.mark);
        let lost = told.ring + told.source.max(kernel);
        if missing > lost {
            faults.push(format!(
                "{} frames are missing in between, {} losses were told",
                grouped(missing),
                grouped(lost)
            ));
        }
        let (_, twice) = self.gaps(self.packets);
        if twice > 0 {
            faults.push(format!("{} frames are there twice", grouped(twice)));
        }
        if self.numbers.is_empty() {
            faults.push("no numbered frame is there".to_owned());
        }
        faults
    }

    /// Of the first so many packets: numbers that are missing between the first and the last, and those
    /// that come again.
    fn gaps(&self, packets: u64) -> (u64, u64) {
        let first = self.numbers.iter().filter(|(before, _)| *before < packets);
        let mut numbers: Vec<u64> = first.map(|(_, number)| *number).collect();
        let all = numbers.len();
        numbers.sort_unstable();
        numbers.dedup();
        let span = match (numbers.first(), numbers.last()) {
            (Some(first), Some(last)) => last - first + 1,
            _ => 0,
        };
        (span - numbers.len() as u64, (all - numbers.len()) as u64)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As many packets, of which these have these numbers.
    fn found(numbers: impl Iterator<Item = u64>) -> Numbered {
        let numbers: Vec<(u64, u64)> = (0..).zip(numbers).collect();
        Numbered {
            packets: numbers.len() as u64,
            numbers,
            corrupt: 0,
        }
    }

    #[test]
    fn a_recorder_that_loses_silently_is_found_out() {
        let told = Told {
            mark: 1000,
            durable: 1000,
            ..Told::default()
        };
        assert!(found(7..1007).faults(&told, 0).is_empty());
        // Nine of ten, and one: told, lost before the daemon, or neither.
        let tenth = found((0..10_000).step_by(10));
        let one = found((0..500).chain(501..1001));
        for (found, missing) in [(&tenth, 8991), (&one, 1)] {
            assert_eq!(found.faults(&told, missing - 1).len(), 1);
            assert!(found.faults(&told, missing).is_empty());
            let ring = Told {
                ring: missing,
                ..told
            };
            assert!(found.faults(&ring, 0).is_empty());
        }
        // Behind the mark nothing was told yet.
        assert!(
            found((0..1000).chain(5000..5100))
                .faults(&told, 0)
                .is_empty()
        );
    }

    #[test]
    fn what_is_not_there_or_there_twice_is_a_fault() {
        let told = Told {
            mark: 100,
            durable: 100,
            ended: true,
            ..Told::default()
        };
        assert!(found(0..100).faults(&told, 0).is_empty());
        for wrong in [found(0..99), found(0..101), found((0..99).chain([5]))] {
            assert!(!wrong.faults(&told, 0).is_empty(), "{wrong:?}");
        }
        let mut damaged = found(0..99);
        (damaged.packets, damaged.corrupt) = (100, 1);
        assert_eq!(damaged.faults(&told, 0).len(), 1);
        damaged.numbers.clear();
        assert_eq!(damaged.faults(&told, 0).len(), 2);
    }
}

//! `vnplug record` and what reads its files, as the demo of recording runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use serde_json::Value;
use vnplug_frame::witness::{Parsed, parse};

use super::compare;
use super::report::grouped;
use super::wire::TAPPED;
use crate::daemon::Daemon;
use crate::error::{LabError, Result};
use crate::recorder::{MARK, Recorder, number, state_in};

/// Starts one on the tapped wire and waits until something is durable.
pub(super) fn start(vnplug: &Path, daemon: &Daemon, dir: &Path) -> Result<Recorder> {
    let old = state_in(dir);
    let device = format!("host:{TAPPED}");
    let args = [device.as_str(), "--flush", "200ms", "--ring", "64M"];
    let recorder = Recorder::start_by(Command::new(vnplug), daemon, &args, &[dir])?;
    recorder.try_until("it says that packets are durable", || {
        recorder.state() != old && recorder.mark() > 0
    })?;
    Ok(recorder)
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
    /// What it says now.
    pub(super) fn by(recorder: &Recorder) -> Self {
        let state = recorder.state();
        Self {
            mark: number(&state, MARK),
            durable: number(&state, "/durable"),
            ring: number(&state, "/lost/ring"),
            source: number(&state, "/lost/source"),
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

    /// Of the first `packets` packets: numbers that are missing between the first and the last, and those
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
        // After the mark nothing was told yet.
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

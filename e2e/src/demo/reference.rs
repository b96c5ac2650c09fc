//! tcpdump on the host: what really was on the wire.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::LIMIT;
use super::talk::spawn;
use super::wire::{TAPPED, Wire, until};
use crate::child::Tethered;
use crate::error::{LabError, Result};

/// A tcpdump that runs.
pub(super) struct Reference {
    process: Tethered,
    log: PathBuf,
}

impl Reference {
    pub(super) fn start(wire: &Wire, file: &Path) -> Result<Self> {
        let log = file.with_extension("log");
        // NB: a log of an earlier run says "listening" already.
        let _ = fs::remove_file(&log);
        let file = file.display().to_string();
        let options = [
            "-n", "-Z", "root", "-s", "0", "-B", "131072", "--nano", "-w", &file,
        ];
        let words = [&["tcpdump", "-i", TAPPED], &options[..]].concat();
        let process = spawn(wire.here.name(), &words, &log)?;
        let reference = Self { process, log };
        until("tcpdump on the host listens", || {
            Ok(reference.said().contains("listening on"))
        })?;
        Ok(reference)
    }

    /// Ends it; fails if it lost packets, as it would be no reference then.
    pub(super) fn end(mut self) -> Result<()> {
        // What was captured last is handed over within its timeout of 1 s at most.
        thread::sleep(Duration::from_millis(500));
        self.process.signal(rustix::process::Signal::INT)?;
        let ended = self.process.wait(LIMIT);
        let said = self.said();
        if ended.is_some()
            && said
                .lines()
                .any(|line| line.starts_with("0 packets dropped by kernel"))
        {
            return Ok(());
        }
        Err(LabError::Command {
            command: "tcpdump on the host".to_owned(),
            text: format!("it is no reference: {said}"),
        })
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
}

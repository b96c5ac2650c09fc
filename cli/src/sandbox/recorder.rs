//! `--record`: a recorder of the program's own port, as long as the program runs.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use rustix::process::{Pid, Signal};

use crate::external;

/// `vnplug record`, which runs beside the program.
#[derive(Debug)]
pub(super) struct Recorder {
    child: Child,
    to: PathBuf,
}

impl Recorder {
    /// Records `device` in files of this directory. Returns when it reads the device, so that no frame is missed.
    pub(super) fn start(socket: &Path, device: &str, to: &Path) -> io::Result<Self> {
        let mut command = external::own();
        command.arg("--socket").arg(socket).arg("record");
        command.args([OsStr::new(device), OsStr::new("--to"), to.as_os_str()]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::piped());
        // Ctrl-C is for the program.
        command.process_group(0);
        let mut child = command.spawn()?;
        let said = child.stderr.take().map(BufReader::new);
        let mut lines = said.into_iter().flat_map(BufRead::lines);
        let mut why = String::new();
        while let Some(line) = lines.next().transpose()? {
            if line.contains(STARTED) {
                let rest = lines.map_while(Result::ok);
                std::thread::spawn(move || rest.for_each(|line| eprintln!("{line}")));
                let to = to.to_owned();
                return Ok(Self { child, to });
            }
            why += &line;
        }
        let status = child.wait()?;
        let text = format!("the recorder has ended ({status}): {why}");
        Err(io::Error::other(text))
    }

    /// All that passed is on the disk then.
    pub(super) fn finish(mut self) -> io::Result<PathBuf> {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, Signal::TERM)?;
        match self.child.wait() {
            Ok(status) if status.success() => Ok(self.to),
            Ok(status) => Err(io::Error::other(format!(
                "the recorder has ended: {status}"
            ))),
            // The supervisor waits for whatever child ends.
            Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(self.to),
            Err(error) => Err(error),
        }
    }
}

/// What it says when it reads the device.
const STARTED: &str = "recording since";

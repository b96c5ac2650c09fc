//! `vnplug record --trigger …`: only what is around something that happens.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use vnplug_store::record::{Settings, Triggers};

use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Options of triggered recording.
#[derive(Debug, Args)]
#[command(next_help_heading = "Triggered recording")]
pub(super) struct TriggerOptions {
    /// Record only what is around packets that match this expression, and around --trigger-now; may be
    /// given several times
    #[arg(long, value_name = "EXPRESSION")]
    trigger: Vec<String>,
    /// How long before a trigger; packets wait in memory this long [default with triggers: 10s]
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    before: Option<Duration>,
    /// How long after the last trigger [default with triggers: 10s]
    #[arg(long, value_name = "TIME", value_parser = text::duration)]
    after: Option<Duration>,
    /// Memory for packets that wait for a trigger; when it is full, the oldest are dropped
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = text::size)]
    before_memory: u64,
    /// Trigger the recorder that runs in this directory
    #[arg(long, value_name = "DIR", conflicts_with_all = ["sources", "to", "status", "trigger"])]
    pub(super) trigger_now: Option<PathBuf>,
}

impl TriggerOptions {
    /// What triggers, if anything is to.
    pub(super) fn triggers(&self, settings: &mut Settings) -> Result<(), Failure> {
        if self.trigger.is_empty() && self.before.is_none() && self.after.is_none() {
            return Ok(());
        }
        let buffers = u16::try_from(self.before_memory / settings.chunk_bytes as u64)
            .ok()
            .filter(|buffers| (2..=8192).contains(buffers))
            .ok_or_else(|| Failure::new("--before-memory: between 8M and 32G"))?;
        settings.buffers += buffers;
        settings.trigger = Some(Triggers {
            filters: self.trigger.clone(),
            before: self.before.unwrap_or(USUAL),
            after: self.after.unwrap_or(USUAL),
            buffers,
        });
        Ok(())
    }
}

/// Triggers the recorder that is at work in a directory.
pub(super) fn now(dir: &Path, recording: &str) -> Outcome {
    let path = dir.join(format!("{recording}.lock"));
    let about = |what: String| Failure::about(dir.display(), what);
    let none = || about(format!("no recorder of `{recording}` is at work here"));
    let lock = File::open(&path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => none(),
        _ => Failure::about(path.display(), error),
    })?;
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Ok(()) => return Err(none()),
        Err(Errno::WOULDBLOCK) => {}
        Err(error) => return Err(Failure::about(path.display(), error)),
    }
    let it = lock
        .metadata()
        .map_err(|error| Failure::about(path.display(), error))?;
    let unknown = || {
        about(format!(
            "the recorder of `{recording}` cannot be found: it is another user's, or in another container"
        ))
    };
    let (number, process) = holders(it.ino())
        .into_iter()
        .filter_map(|pid| Some((pid, pidfd_open(pid, PidfdFlags::empty()).ok()?)))
        .find(|(pid, _)| has_open(*pid, &it))
        .ok_or_else(unknown)?;
    // Whom the signal would kill is left alone.
    if !catches_usr1(number) {
        return Err(about(format!(
            "the recorder of `{recording}` records everything: it was started without --trigger, --before and --after"
        )));
    }
    pidfd_send_signal(process, Signal::USR1)
        .map_err(|error| about(format!("the recorder cannot be told: {error}")))?;
    let number = number.as_raw_nonzero();
    out::note(&format!("triggered recorder {number}"));
    Ok(OK)
}

/// Who holds a flock(2) on a file with this inode number; of any file system.
fn holders(inode: u64) -> Vec<Pid> {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let holder = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (kind, _, mode) = (words.next()?, words.next()?, words.next()?);
        let (pid, place) = (words.next()?, words.next()?);
        let same = place.rsplit(':').next()?.parse() == Ok(inode);
        let pid = pid.parse().ok().and_then(Pid::from_raw);
        pid.filter(|_| kind == "FLOCK" && mode == "WRITE" && same)
    };
    locks.lines().filter_map(holder).collect()
}

/// Whether a process has this very file open.
fn has_open(pid: Pid, file: &fs::Metadata) -> bool {
    let dir = format!("/proc/{}/fd", pid.as_raw_nonzero());
    let mut open = fs::read_dir(dir).into_iter().flatten().flatten();
    open.any(|entry| {
        let other = fs::metadata(entry.path());
        other.is_ok_and(|other| (other.dev(), other.ino()) == (file.dev(), file.ino()))
    })
}

/// Whether a process has a handler for SIGUSR1.
fn catches_usr1(pid: Pid) -> bool {
    let path = format!("/proc/{}/status", pid.as_raw_nonzero());
    let status = fs::read_to_string(path).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask >> (Signal::USR1.as_raw() - 1) & 1 == 1)
}

const USUAL: Duration = Duration::from_secs(10);

//! `NAME.state` and the segments that are there: where a recorder goes on.

use std::io;
use std::path::{Path, PathBuf};

use super::ledger::Status;
use crate::disk::Disk;
use crate::name::{self, SegmentName};

/// What the latest `NAME.state` of a recording says.
pub(super) fn last_state(
    directories: &mut [(PathBuf, Box<dyn Disk>)],
    recording: &str,
) -> io::Result<Option<Status>> {
    let mut last: Option<Status> = None;
    for (dir, disk) in directories {
        let path = state_path(dir, recording);
        let Some(bytes) = disk.load(&path)? else {
            continue;
        };
        let Some(state) = Status::from_json(&bytes) else {
            log::warn!(
                "{}: no state of a recording; what it counted is forgotten",
                path.display()
            );
            continue;
        };
        let order = |state: &Status| (state.run.number, state.revision);
        if last.as_ref().is_none_or(|last| order(last) < order(&state)) {
            last = Some(state);
        }
    }
    Ok(last)
}

/// Reads `NAME.state` of a recording in a directory: the durable mark and the counters, as they were when
/// the directory was last synced. A recorder may be at work meanwhile.
///
/// # Errors
/// The file is not there, cannot be read, or is no recording's state (`InvalidData`).
pub fn read_state(dir: &Path, recording: &str) -> io::Result<Status> {
    let bytes = std::fs::read(state_path(dir, recording))?;
    Status::from_json(&bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The number after the last segment of a recording in a directory.
///
/// # Errors
/// The directory cannot be read.
pub fn next_sequence(disk: &mut dyn Disk, dir: &Path, recording: &str) -> io::Result<u64> {
    let entries = disk.list(dir)?;
    let names = entries
        .iter()
        .filter_map(|entry| SegmentName::parse(&entry.name));
    let ours = names.filter(|name| name.recording == recording);
    Ok(ours.map(|name| name.sequence + 1).max().unwrap_or(0))
}

/// What a recorder holds while it is at work on a recording in a directory.
pub(super) fn lock_path(dir: &Path, recording: &str) -> PathBuf {
    dir.join(format!("{recording}.lock"))
}

/// Where a recording's state is.
pub fn state_path(dir: &Path, recording: &str) -> PathBuf {
    dir.join(name::state_file(recording))
}

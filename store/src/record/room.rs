//! Room on the disk: the quota, and recycling of the oldest segments.

use std::io;
use std::path::Path;

use crate::disk::{Disk, Entry};
use crate::name::SegmentName;

/// How much of a disk a recording may use; the oldest segments make room for new ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// Bytes that its segments and their indexes take in one directory.
    Bytes(u64),
    /// Percent of the disk that may be used, by whomever.
    Percent(u8),
}

impl Quota {
    /// Removes the oldest segments of `recording` until `more` bytes may be written. `keep` is the
    /// number of the segment that is being written. How many were removed, and whether it is enough:
    /// segments that are read at the moment stay.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn enforce(
        self,
        disk: &mut dyn Disk,
        dir: &Path,
        recording: &str,
        keep: Option<u64>,
        more: u64,
    ) -> io::Result<(u64, bool)> {
        let mut removed = 0;
        let mut leased = 0;
        loop {
            let entries = disk.list(dir)?;
            if self.fits(disk, dir, recording, &entries, more)? {
                return Ok((removed, true));
            }
            match remove_oldest(disk, dir, recording, keep, &entries, leased)? {
                Removal::Removed => removed += 1,
                Removal::Leased => leased += 1,
                Removal::None => return Ok((removed, false)),
            }
        }
    }

    fn fits(
        self,
        disk: &mut dyn Disk,
        dir: &Path,
        recording: &str,
        entries: &[Entry],
        more: u64,
    ) -> io::Result<bool> {
        match self {
            Self::Bytes(most) => {
                let ours = entries
                    .iter()
                    .filter(|entry| belongs(&entry.name, recording));
                let used: u64 = ours.map(|entry| entry.bytes).sum();
                Ok(used.saturating_add(more) <= most)
            }
            Self::Percent(most) => {
                let space = disk.space(dir)?;
                let free = u128::from(space.free.saturating_sub(more));
                Ok(free * 100 >= u128::from(space.total) * u128::from(100 - most.min(100)))
            }
        }
    }
}

/// Removes one segment, whatever the quota says: the disk is full.
///
/// # Errors
/// Those of the disk.
pub(super) fn make_room(
    disk: &mut dyn Disk,
    dir: &Path,
    recording: &str,
    keep: Option<u64>,
) -> io::Result<bool> {
    let entries = disk.list(dir)?;
    let mut leased = 0;
    loop {
        match remove_oldest(disk, dir, recording, keep, &entries, leased)? {
            Removal::Removed => return Ok(true),
            Removal::Leased => leased += 1,
            Removal::None => return Ok(false),
        }
    }
}

enum Removal {
    Removed,
    Leased,
    None,
}

/// Removes the oldest segment but `skip`, with its index.
fn remove_oldest(
    disk: &mut dyn Disk,
    dir: &Path,
    recording: &str,
    keep: Option<u64>,
    entries: &[Entry],
    skip: usize,
) -> io::Result<Removal> {
    let mut segments: Vec<SegmentName> = entries
        .iter()
        .filter_map(|entry| SegmentName::parse(&entry.name))
        .filter(|name| name.recording == recording && Some(name.sequence) != keep)
        .collect();
    segments.sort_unstable_by_key(|name| name.sequence);
    let Some(oldest) = segments.get(skip) else {
        return Ok(Removal::None);
    };
    if !disk.remove(&dir.join(oldest.to_string()))? {
        return Ok(Removal::Leased);
    }
    let index = oldest.index();
    if entries.iter().any(|entry| entry.name == index) {
        disk.remove(&dir.join(index))?;
    }
    Ok(Removal::Removed)
}

/// Whether a file is a segment of the recording, or an index of one.
fn belongs(file: &str, recording: &str) -> bool {
    let segment = match file.strip_suffix(".vnx") {
        Some(stem) => SegmentName::parse(&format!("{stem}.pcapng")),
        None => SegmentName::parse(file),
    };
    segment.is_some_and(|name| name.recording == recording)
}

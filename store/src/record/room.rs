//! Room on the disk: the quota, and recycling of the oldest segments.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::disk::{BLOCK, Disk, Entry, is_gone};
use crate::name::{COMPANIONS, PART, Packing, SegmentName, unpacked};

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
    /// segments that are read at the moment stay, and those that cannot be removed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn enforce(
        self,
        disk: &mut dyn Disk,
        dir: &Path,
        recording: &str,
        keep: Option<u64>,
        more: u64,
    ) -> io::Result<(u64, bool)> {
        let mut removed = 0;
        let mut stay = 0;
        loop {
            let entries = disk.list(dir)?;
            if self.fits(disk, dir, recording, &entries, more)? {
                return Ok((removed, true));
            }
            match remove_oldest(disk, dir, recording, keep, &entries, stay) {
                Removal::Removed => removed += 1,
                Removal::Packed => {}
                Removal::Stays => stay += 1,
                Removal::None => return Ok((removed, false)),
            }
        }
    }

    /// Bytes that the recording may take in a directory, as things are now.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub(super) fn room(self, disk: &mut dyn Disk, dir: &Path, recording: &str) -> io::Result<u64> {
        match self {
            Self::Bytes(most) => Ok(most),
            Self::Percent(most) => {
                let used = used(&disk.list(dir)?, recording);
                let space = disk.space(dir)?;
                let kept = u128::from(space.total) * u128::from(100 - most.min(100)) / 100;
                Ok((used + space.free).saturating_sub(kept as u64))
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
            Self::Bytes(most) => Ok(used(entries, recording).saturating_add(more) <= most),
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
/// The directory cannot be read.
pub(super) fn make_room(
    disk: &mut dyn Disk,
    dir: &Path,
    recording: &str,
    keep: Option<u64>,
) -> io::Result<bool> {
    let entries = disk.list(dir)?;
    let mut stay = 0;
    loop {
        match remove_oldest(disk, dir, recording, keep, &entries, stay) {
            Removal::Removed | Removal::Packed => return Ok(true),
            Removal::Stays => stay += 1,
            Removal::None => return Ok(false),
        }
    }
}

/// Gives back what a recorder that was killed had reserved behind the end of its segments. Nobody
/// else may be at work on the recording here.
///
/// # Errors
/// The directory cannot be read.
pub(super) fn give_back(disk: &mut dyn Disk, dir: &Path, recording: &str) -> io::Result<()> {
    for entry in disk.list(dir)? {
        if entry.name.ends_with(PART) && segment(&entry.name, recording).is_some() {
            // It was being packed.
            disk.remove(&dir.join(&entry.name))?;
            continue;
        }
        let ours = SegmentName::parse(&entry.name).is_some_and(|name| name.recording == recording);
        // A file system may count a little of its own.
        if !ours || entry.bytes <= entry.len.next_multiple_of(BLOCK as u64) + SLACK {
            continue;
        }
        if let Err(error) = disk.trim(&dir.join(&entry.name)) {
            log::warn!("{}: what was reserved stays: {error}", entry.name);
        }
    }
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum Removal {
    Removed,
    /// It was packed since the directory was listed; that is there.
    Packed,
    Stays,
    None,
}

/// Removes the oldest segment but `skip`, with what is beside it; or such a file whose segment is gone.
fn remove_oldest(
    disk: &mut dyn Disk,
    dir: &Path,
    recording: &str,
    keep: Option<u64>,
    entries: &[Entry],
    skip: usize,
) -> Removal {
    // By its number; a segment goes before its index.
    let files: BTreeSet<(u64, bool, &str)> = entries
        .iter()
        .filter(|entry| !entry.name.ends_with(PART))
        .filter_map(|entry| {
            let index = companion(unpacked(&entry.name).0).is_some();
            Some((
                segment(&entry.name, recording)?.sequence,
                index,
                entry.name.as_str(),
            ))
        })
        .filter(|&(sequence, ..)| Some(sequence) != keep)
        .collect();
    let has_segment = |sequence: u64| {
        let mut same = files.range((sequence, false, "")..(sequence, true, ""));
        same.next().is_some()
    };
    let mut whole = files
        .iter()
        .filter(|&&(sequence, index, _)| !index || !has_segment(sequence));
    let Some(&(sequence, index, oldest)) = whole.nth(skip) else {
        return Removal::None;
    };
    match disk.remove(&dir.join(oldest)) {
        Ok(true) => {}
        Ok(false) => return Removal::Stays,
        Err(error) => {
            log::warn!("{oldest} cannot be recycled: {error}");
            return Removal::Stays;
        }
    }
    let same = files.range((sequence, false, "")..(sequence, true, ""));
    if index || same.count() > 1 {
        return Removal::Removed;
    }
    // NB: who packs removes the segment, too, and what is beside it belongs to the packed one.
    let packed = Packing::ALL.map(|packing| format!("{}{}", unpacked(oldest).0, packing.suffix()));
    let mut others = packed.iter().filter(|name| *name != oldest);
    if others.any(|name| !is_gone(disk, &dir.join(name))) {
        return Removal::Packed;
    }
    for (.., name) in files.range((sequence, true, "")..(sequence + 1, false, "")) {
        if let Err(error) = disk.remove(&dir.join(name)) {
            log::warn!("{name} cannot be removed: {error}");
        }
    }
    Removal::Removed
}

/// Bytes of the recording's segments and indexes.
fn used(entries: &[Entry], recording: &str) -> u64 {
    let ours = entries
        .iter()
        .filter(|entry| segment(&entry.name, recording).is_some());
    ours.map(|entry| entry.bytes).sum()
}

/// The segment of the recording that a file is, packed or not, or is beside.
fn segment(file: &str, recording: &str) -> Option<SegmentName> {
    let file = unpacked(file.strip_suffix(PART).unwrap_or(file)).0;
    let name = match companion(file) {
        Some(stem) => SegmentName::parse(&format!("{stem}.pcapng")),
        None => SegmentName::parse(file),
    };
    name.filter(|name| name.recording == recording)
}

/// The stem of a file that is beside a segment: its index, its flows.
fn companion(file: &str) -> Option<&str> {
    COMPANIONS.iter().find_map(|end| file.strip_suffix(end))
}

const SLACK: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Sim;

    #[test]
    fn one_that_is_packed_meanwhile_keeps_its_index() {
        let dir = Path::new("/r");
        let stem = "r-0000000007-20261121T134501.123456789Z";
        let path = |end: &str| dir.join(format!("{stem}{end}"));
        let mut sim = Sim::new(1 << 20);
        for end in [".pcapng", ".vnx"] {
            sim.store(&path(end), b"x").unwrap();
        }
        let listed = sim.list(dir).unwrap();
        let packed = path(".pcapng.zst");
        sim.rename(&path(".pcapng"), &packed).unwrap();
        let first = remove_oldest(&mut sim, dir, "r", None, &listed, 0);
        assert_eq!(first, Removal::Packed);
        assert!(sim.files().keys().eq([&packed, &path(".vnx")]));
        let listed = sim.list(dir).unwrap();
        let second = remove_oldest(&mut sim, dir, "r", None, &listed, 0);
        assert_eq!(second, Removal::Removed);
        assert!(sim.files().is_empty());
    }
}

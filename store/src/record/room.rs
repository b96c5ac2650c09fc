//! Room on the disk: the quota, and recycling of the oldest segments.

use std::collections::{BTreeMap, BTreeSet};
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
    /// number of the segment that is being written. How many were removed, their bytes, and whether that is
    /// enough: those stay that cannot be removed.
    ///
    /// One that somebody reads goes, too, and its reader has it open still. Such segments may take a quarter
    /// of a quota in bytes on top; of one in percent nothing, once they are missed. What is beyond is taken
    /// from its reader, the oldest first. `removing` is called before a segment goes.
    ///
    /// What is removed counts as free whether the disk says so yet or not: somebody may have it open, or
    /// have a snapshot of it.
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
        removing: &mut dyn FnMut(&str),
    ) -> io::Result<Room> {
        let entries = disk.list(dir)?;
        let mut short = self.short(disk, dir, recording, &entries, more)?;
        let mut cut = 0;
        let too_many = |disk: &mut dyn Disk, short| match self {
            Self::Bytes(most) => disk.held() > most / HELD,
            Self::Percent(_) => short > 0 && disk.held() > 0,
        };
        while too_many(disk, short) && cut_held(disk).is_some() {
            cut += 1;
            short = self.short(disk, dir, recording, &entries, more)?;
        }
        let most = match self {
            Self::Bytes(_) => short,
            // Others may have filled the disk, and may go on: no more than is written goes.
            Self::Percent(_) => short.min(more.saturating_mul(2).max(1)),
        };
        let mut room = remove_oldest(disk, dir, (recording, keep), &entries, most, removing);
        room.enough = room.bytes >= short;
        room.cut = cut;
        Ok(room)
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

    /// Bytes that are too many.
    fn short(
        self,
        disk: &mut dyn Disk,
        dir: &Path,
        recording: &str,
        entries: &[Entry],
        more: u64,
    ) -> io::Result<u64> {
        Ok(match self {
            Self::Bytes(most) => {
                let used = used(entries, recording).saturating_add(more);
                used.saturating_sub(most)
            }
            Self::Percent(most) => {
                let space = disk.space(dir)?;
                let kept = u128::from(space.total) * u128::from(100 - most.min(100));
                let kept = kept.div_ceil(100) as u64;
                kept.saturating_add(more).saturating_sub(space.free)
            }
        })
    }
}

/// What was removed to make room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// Segments.
    pub segments: u64,
    /// Their bytes, and those of what was beside them.
    pub bytes: u64,
    /// Segments that somebody reads.
    pub read: u64,
    /// Segments that were removed before and are now taken from their readers.
    pub cut: u64,
    /// It is as much as is needed.
    pub enough: bool,
}

/// Takes the oldest segment that was removed from its reader.
fn cut_held(disk: &mut dyn Disk) -> Option<u64> {
    let cut = disk.cut_held()?;
    cut.inspect_err(|error| log::warn!("a removed segment keeps its room: {error}"))
        .ok()
        .or(Some(0))
}

/// Removes one segment, whatever the quota says: the disk is full. One that was removed before and is still
/// read comes first.
///
/// # Errors
/// The directory cannot be read.
pub(super) fn make_room(
    disk: &mut dyn Disk,
    dir: &Path,
    recording: &str,
    keep: Option<u64>,
    removing: &mut dyn FnMut(&str),
) -> io::Result<Room> {
    while disk.held() > 0 {
        match cut_held(disk) {
            Some(bytes @ 1..) => {
                return Ok(Room {
                    bytes,
                    cut: 1,
                    ..Room::default()
                });
            }
            Some(0) => {}
            None => break,
        }
    }
    let entries = disk.list(dir)?;
    Ok(remove_oldest(
        disk,
        dir,
        (recording, keep),
        &entries,
        1,
        removing,
    ))
}

/// Removes the segments that were written last before this time, whatever the quota says.
///
/// # Errors
/// The directory cannot be read.
pub(super) fn remove_aged(
    disk: &mut dyn Disk,
    dir: &Path,
    recording: &str,
    keep: Option<u64>,
    before_ns: u64,
    removing: &mut dyn FnMut(&str),
) -> io::Result<Room> {
    let entries = disk.list(dir)?;
    let is_capture = |entry: &&Entry| companion(unpacked(&entry.name).0).is_none();
    let number = |entry: &Entry| segment(&entry.name, recording).map(|name| name.sequence);
    let captures = entries.iter().filter(is_capture);
    let (old, new): (Vec<&Entry>, Vec<&Entry>) =
        captures.partition(|entry| entry.written_ns < before_ns);
    let mut old: BTreeSet<u64> = old.into_iter().filter_map(number).collect();
    // One of which a form is new is being packed.
    for number in new.into_iter().filter_map(number) {
        old.remove(&number);
    }
    let is_old = |entry: &Entry| number(entry).is_some_and(|number| old.contains(&number));
    let entries: Vec<Entry> = entries.into_iter().filter(is_old).collect();
    let everything = u64::MAX;
    Ok(remove_oldest(
        disk,
        dir,
        (recording, keep),
        &entries,
        everything,
        removing,
    ))
}

/// Gives back what a recorder that was killed had reserved past the end of its segments. Nobody
/// else may be at work on the recording here. The numbers of segments that never got their name.
///
/// # Errors
/// The directory cannot be read.
pub(super) fn give_back(disk: &mut dyn Disk, dir: &Path, recording: &str) -> io::Result<Vec<u64>> {
    let mut unnamed = Vec::new();
    for entry in disk.list(dir)? {
        if let Some(whole) = entry.name.strip_suffix(PART)
            && let Some(name) = segment(whole, recording)
        {
            // It was being made, or packed.
            disk.remove(&dir.join(&entry.name))?;
            if whole == name.to_string() {
                unnamed.push(name.sequence);
            }
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
    Ok(unnamed)
}

/// Removes the oldest segments, with what is beside them, until that is this many bytes; also what is beside
/// one that is gone.
fn remove_oldest(
    disk: &mut dyn Disk,
    dir: &Path,
    (recording, keep): (&str, Option<u64>),
    entries: &[Entry],
    bytes: u64,
    removing: &mut dyn FnMut(&str),
) -> Room {
    let mut room = Room::default();
    // By number; a segment goes before its index.
    let mut files: BTreeMap<u64, BTreeSet<(bool, &str, u64)>> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| !entry.name.ends_with(PART)) {
        let Some(name) = segment(&entry.name, recording) else {
            continue;
        };
        let beside = companion(unpacked(&entry.name).0).is_some();
        let same = files.entry(name.sequence).or_default();
        same.insert((beside, &entry.name, entry.bytes));
    }
    files.retain(|&sequence, _| Some(sequence) != keep);
    for same in files.values() {
        if room.bytes >= bytes {
            break;
        }
        let mut removed = false;
        let mut is_read = false;
        for &(beside, name, bytes) in same {
            if !beside && !is_gone(disk, &dir.join(name)) {
                removing(name);
            }
            match disk.recycle(&dir.join(name)) {
                // It was packed in the meantime: what is beside it is the packed one's.
                Ok(_) if !beside && is_packed(disk, dir, name) => break,
                Ok(read) => {
                    room.bytes += bytes;
                    removed |= !beside;
                    is_read |= read && !beside;
                }
                // What is beside it is of use as long as it is there.
                Err(error) => {
                    log::warn!("{name} cannot be recycled: {error}");
                    break;
                }
            }
        }
        room.segments += u64::from(removed);
        room.read += u64::from(is_read);
    }
    room
}

/// Whether a segment that is gone is there as a packed one.
fn is_packed(disk: &mut dyn Disk, dir: &Path, name: &str) -> bool {
    let packed = Packing::ALL.map(|packing| format!("{}{}", unpacked(name).0, packing.suffix()));
    let mut others = packed.iter().filter(|other| *other != name);
    others.any(|name| !is_gone(disk, &dir.join(name)))
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
/// What readers keep of removed segments is at most this part of the quota.
const HELD: u64 = 4;

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
        let first = remove_oldest(&mut sim, dir, ("r", None), &listed, 1, &mut |_| {});
        assert_eq!((first.segments, first.bytes), (0, 0));
        assert!(sim.files().keys().eq([&packed, &path(".vnx")]));
        let listed = sim.list(dir).unwrap();
        let second = remove_oldest(&mut sim, dir, ("r", None), &listed, 1, &mut |_| {});
        assert_eq!((second.segments, second.bytes), (1, 2));
        assert!(sim.files().is_empty());
    }
}

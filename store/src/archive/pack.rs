//! One segment, packed so that a crash at any moment leaves it or the packed one.

use std::cell::RefCell;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use super::How;
use super::part::{Part, Print, SharedDisk, check, each};
use super::seekable::{FRAME_BYTES, Frames};
use crate::disk::{Buffer, Disk, is_gone};
use crate::name::{PART, Packing, SegmentName, flows_file};

/// Makes the packed file of a segment of `len` bytes, and if it is encrypted that of its index; the
/// length of the first. They are on the disk then, with their names; the segment is still there. `None`
/// if it was recycled meanwhile. `pulse` is asked at each MiB, may wait, and says false to give up.
///
/// # Errors
/// [`ErrorKind::Interrupted`] if `pulse` said so; those of reading and writing. Nothing was made then.
pub(super) fn pack(
    disk: &mut dyn Disk,
    dir: &Path,
    (segment, len): (&SegmentName, u64),
    how: &How,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<Option<u64>> {
    has_room(disk, dir, len)?;
    let plain = dir.join(segment.to_string());
    let target = dir.join(format!("{segment}{}", how.packing().suffix()));
    let mut files = vec![(plain.clone(), target, how.clone())];
    let index = dir.join(segment.index());
    if how.packing().age && !is_gone(disk, &index) {
        let sealed = dir.join(format!("{}.age", segment.index()));
        let how = How {
            level: None,
            recipients: how.recipients.clone(),
        };
        // Before the segment: who finds that finds its index.
        files.insert(0, (index, sealed, how));
    }
    let mut after = 0;
    let made = files.iter().try_for_each(|(from, to, how)| {
        let part = with_part(to);
        // What one who was killed left.
        disk.remove(&part)?;
        after = make(disk, from, &part, how, pulse)?.len;
        Ok(())
    });
    let is_recycled = is_gone(disk, &plain);
    let named = made.and_then(|()| match is_recycled {
        true => Err(ErrorKind::NotFound.into()),
        false => {
            let mut all = files.iter();
            all.try_for_each(|(_, to, _)| disk.rename(&with_part(to), to))?;
            disk.sync_dir(dir)
        }
    });
    let Err(error) = named else {
        return Ok(Some(after));
    };
    // What is open is not removed.
    disk.close();
    // NB: also those that have their names: whether these are on the disk is not known.
    for path in files
        .iter()
        .flat_map(|(_, to, _)| [with_part(to), to.clone()])
    {
        if let Err(error) = disk.remove(&path) {
            log::warn!("{}: {error}", path.display());
        }
    }
    match is_recycled {
        true => Ok(None),
        false => Err(error),
    }
}

/// Removes a segment of which there is a packed one, unless somebody reads it; true if it is gone.
/// What `vnplug query` keeps of it goes before, and its index after it if there is an encrypted
/// one: they would tell in clear what is encrypted. What a crash leaves of them is
/// [bare](super::job), and goes later.
///
/// # Errors
/// Those of removing.
pub(super) fn remove(
    disk: &mut dyn Disk,
    dir: &Path,
    segment: &SegmentName,
    packed: Packing,
) -> io::Result<bool> {
    disk.remove(&dir.join(flows_file(&segment.to_string())))?;
    let gone = disk.remove(&dir.join(segment.to_string()))?;
    if gone && packed.age {
        disk.remove(&dir.join(segment.index()))?;
    }
    Ok(gone)
}

/// Writes a packed file, has it on the disk, and looks whether it is there.
fn make(
    disk: &mut dyn Disk,
    from: &Path,
    part: &Path,
    how: &How,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<Print> {
    let disk = RefCell::new(disk);
    let to = Part::create(&disk, part)?;
    let level = how.level.unwrap_or(zstd::DEFAULT_COMPRESSION_LEVEL);
    let to = match (how.packing().zstd, how.packing().age) {
        (true, true) => {
            let frames = Frames::new(how.recipients.seal(to)?, level)?;
            copy(&disk, from, frames, pulse)?.finish()?.finish()?
        }
        (true, false) => copy(&disk, from, Frames::new(to, level)?, pulse)?.finish()?,
        (false, true) => copy(&disk, from, how.recipients.seal(to)?, pulse)?.finish()?,
        (false, false) => copy(&disk, from, to, pulse)?,
    };
    let print = to.finish(from)?;
    check(&disk, part, &print, pulse)?;
    Ok(print)
}

fn copy<W: Write>(
    disk: &SharedDisk<'_>,
    from: &Path,
    mut to: W,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<W> {
    let mut buffer = Buffer::new(FRAME_BYTES, u16::MAX);
    each(disk, from, &mut buffer, pulse, |bytes| to.write_all(bytes))?;
    Ok(to)
}

/// Recording goes before: what is still free must be more than the worst case.
fn has_room(disk: &mut dyn Disk, dir: &Path, len: u64) -> io::Result<()> {
    match disk.space(dir)?.free >= len.saturating_add(len / 16).saturating_add(ROOM) {
        true => Ok(()),
        false => Err(io::Error::new(
            ErrorKind::StorageFull,
            "the disk has no room for a second copy",
        )),
    }
}

fn with_part(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(PART);
    name.into()
}

/// Left to the recording at least.
const ROOM: u64 = 16 << 20;

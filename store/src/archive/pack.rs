//! One segment, packed so that a crash at any moment leaves it or the packed one.

use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Advice, fadvise, statvfs};

use super::How;
use super::seekable::{FRAME_BYTES, Frames};
use crate::disk::{remove_unless_leased, sync_directory};
use crate::name::{INDEX, PART, Packing, SegmentName, flows_file};

/// What became of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packed {
    /// Its bytes before and after; the segment itself is gone.
    Done(u64, u64),
    /// As above, but somebody reads the segment: it is there as well, and must be removed later.
    Leased(u64, u64),
    /// There is nothing to do any more: it was recycled.
    Gone,
}

/// Packs a segment of a directory. `pulse` is asked at each MiB, may wait, and says false to give up.
///
/// # Errors
/// [`ErrorKind::Interrupted`] if `pulse` said so; those of reading and writing. The segment stays then,
/// and nothing else.
pub fn pack(
    dir: &Path,
    segment: &SegmentName,
    how: &How,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<Packed> {
    let plain = dir.join(segment.to_string());
    if let Some((before, after)) = already(dir, segment)? {
        return remove(dir, segment, before, after);
    }
    let from = match File::open(&plain) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Packed::Gone),
        other => other?,
    };
    let about = from.metadata()?;
    has_room(dir, about.len())?;
    let target = dir.join(format!("{segment}{}", how.packing().suffix()));
    let part = with_part(&target);
    let index = dir.join(segment.index());
    let sealed_index = dir.join(format!("{}.age", segment.index()));
    let sealed_part = with_part(&sealed_index);
    let made = write(&from, &about, &part, how, pulse).and_then(|after| {
        if how.packing().age {
            seal_index(&index, &sealed_part, how)?;
        }
        Ok(after)
    });
    let after = match made {
        // Recycled meanwhile.
        Ok(_) if from.metadata()?.nlink() == 0 => {
            discard(&[&part, &sealed_part]);
            return Ok(Packed::Gone);
        }
        Ok(after) => after,
        Err(error) => {
            discard(&[&part, &sealed_part]);
            return Err(error);
        }
    };
    let named = match how.packing().age && sealed_part.exists() {
        true => fs::rename(&sealed_part, &sealed_index),
        false => Ok(()),
    };
    let named = named.and_then(|()| fs::rename(&part, &target));
    if let Err(error) = named.and_then(|()| sync_directory(dir)) {
        // Whether its name is durable is not known: the segment stays, and this one goes.
        discard(&[&part, &sealed_part, &target, &sealed_index]);
        return Err(error);
    }
    remove(dir, segment, about.len(), after)
}

/// The lengths of a segment and of the packed one that is there already.
fn already(dir: &Path, segment: &SegmentName) -> io::Result<Option<(u64, u64)>> {
    for packing in Packing::ALL.into_iter().skip(1) {
        let path = dir.join(format!("{segment}{}", packing.suffix()));
        if let Ok(packed) = fs::metadata(&path) {
            // The one who made it may have been killed before.
            sync_directory(dir)?;
            let before = fs::metadata(dir.join(segment.to_string()));
            return Ok(Some((before.map_or(0, |data| data.len()), packed.len())));
        }
    }
    Ok(None)
}

/// Removes a segment of which there is a packed one, unless somebody reads it, and its flows: they
/// are of a file of that name and length, and would tell in clear what is encrypted.
fn remove(dir: &Path, segment: &SegmentName, before: u64, after: u64) -> io::Result<Packed> {
    let flows = dir.join(flows_file(&segment.to_string()));
    // Before the segment, as who is killed in between does not come back here; and behind it, as a
    // query may have made them meanwhile.
    discard(&[&flows]);
    let gone = remove_unless_leased(&dir.join(segment.to_string()))?;
    let sealed = dir.join(format!("{}.age", segment.index()));
    if gone && sealed.exists() {
        remove_unless_leased(&dir.join(segment.index()))?;
    }
    if gone {
        discard(&[&flows, &flows.with_added_extension("tmp")]);
    }
    Ok(match gone {
        true => Packed::Done(before, after),
        false => Packed::Leased(before, after),
    })
}

fn write(
    from: &File,
    about: &Metadata,
    part: &Path,
    how: &How,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<u64> {
    let file = create(part)?;
    let to = BufWriter::with_capacity(FRAME_BYTES, &file);
    let to = match how.packing() {
        Packing {
            zstd: true,
            age: true,
        } => {
            let frames = Frames::new(how.recipients.seal(to)?, level(how))?;
            copy(from, about, frames, pulse)?.finish()?.finish()?
        }
        Packing {
            zstd: true,
            age: false,
        } => copy(from, about, Frames::new(to, level(how))?, pulse)?.finish()?,
        Packing {
            zstd: false,
            age: true,
        } => copy(from, about, how.recipients.seal(to)?, pulse)?.finish()?,
        Packing {
            zstd: false,
            age: false,
        } => copy(from, about, to, pulse)?,
    };
    to.into_inner().map_err(io::IntoInnerError::into_error)?;
    finish(&file, about)
}

fn level(how: &How) -> i32 {
    how.level.unwrap_or(zstd::DEFAULT_COMPRESSION_LEVEL)
}

/// Copies a segment, and lets the page cache go of it.
fn copy<W: Write>(
    from: &File,
    about: &Metadata,
    mut to: W,
    pulse: &mut dyn FnMut() -> bool,
) -> io::Result<W> {
    let mut bytes = vec![0; FRAME_BYTES];
    let mut at = 0;
    while at < about.len() {
        if !pulse() {
            return Err(ErrorKind::Interrupted.into());
        }
        let most = usize::try_from(about.len() - at).map_or(FRAME_BYTES, |n| n.min(FRAME_BYTES));
        from.read_exact_at(&mut bytes[..most], at)?;
        to.write_all(&bytes[..most])?;
        let _ = fadvise(
            from,
            at,
            std::num::NonZeroU64::new(most as u64),
            Advice::DontNeed,
        );
        at += most as u64;
    }
    Ok(to)
}

fn seal_index(index: &Path, part: &Path, how: &How) -> io::Result<()> {
    let mut from = match File::open(index) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let about = from.metadata()?;
    let file = create(part)?;
    let mut sealed = how.recipients.seal(BufWriter::new(&file))?;
    io::copy(&mut from, &mut sealed)?;
    let to = sealed.finish()?;
    to.into_inner().map_err(io::IntoInnerError::into_error)?;
    finish(&file, &about).map(drop)
}

fn create(part: &Path) -> io::Result<File> {
    // What one who was killed left.
    discard(&[part]);
    let mut options = File::options();
    options.write(true).create_new(true).mode(0o640);
    options.open(part)
}

/// Has all of it on the disk, under the time of the original; its length.
fn finish(file: &File, about: &Metadata) -> io::Result<u64> {
    if let Ok(at) = about.modified() {
        file.set_modified(at)?;
    }
    file.sync_all()?;
    let _ = fadvise(file, 0, None, Advice::DontNeed);
    file.metadata().map(|data| data.len())
}

/// Recording goes before: what is still free must be more than the worst case.
fn has_room(dir: &Path, len: u64) -> io::Result<()> {
    let space = statvfs(dir)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    match free >= len.saturating_add(len / 16).saturating_add(ROOM) {
        true => Ok(()),
        false => Err(io::Error::new(
            ErrorKind::StorageFull,
            "the disk has no room for a second copy",
        )),
    }
}

fn with_part(path: &Path) -> std::path::PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(PART);
    name.into()
}

fn discard(paths: &[&Path]) {
    for path in paths {
        match fs::remove_file(path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                log::warn!("{}: {error}", path.display());
            }
            _ => {}
        }
    }
}

/// Whether a file is the index of a segment that is there in encrypted form only.
pub(super) fn is_bare_index(dir: &Path, file: &str) -> bool {
    let Some(stem) = file.strip_suffix(INDEX) else {
        return false;
    };
    let there = |suffix: &str| dir.join(format!("{stem}{suffix}")).exists();
    let sealed = [
        ".pcapng.zst.age",
        ".pcap.zst.age",
        ".pcapng.age",
        ".pcap.age",
    ];
    let open = [".pcapng", ".pcap", ".pcapng.zst", ".pcap.zst"];
    sealed.into_iter().any(there) && !open.into_iter().any(there)
}

/// Left to the recording at least.
const ROOM: u64 = 16 << 20;

//! What is in the files that somebody captured.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};
use vnplug_frame::witness::{Parsed, parse};
use vnplug_store::read::Reader;

use crate::row::Result;

/// Packets of a directory's capture files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    /// Those that count.
    pub(super) packets: u64,
    /// Their bytes.
    pub(super) bytes: u64,
    /// The first stamp, in nanoseconds since 1970.
    pub(super) first_ns: u64,
    /// Bytes of the files.
    pub(super) file_bytes: u64,
}

/// Capture files in a directory, by name.
pub(super) fn captures(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = all(dir)?;
    files.retain(|file| {
        let end = file.extension().and_then(|end| end.to_str());
        matches!(end, Some("pcap" | "pcapng"))
    });
    Ok(files)
}

/// All files in a directory, by name.
pub(super) fn all(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files = entries.collect::<std::io::Result<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

/// Bytes of all files in a directory so far.
pub(super) fn size(dir: &Path) -> Result<u64> {
    let mut sum = 0;
    for file in all(dir)? {
        sum += fs::metadata(file)?.len();
    }
    Ok(sum)
}

/// Reads all capture files, and counts the frames of one run whose numbers and checksums are right; or all
/// packets, where nobody else could have sent any.
pub(super) fn count(dir: &Path, run: Option<u32>) -> Result<Found> {
    let mut found = Found::default();
    for path in captures(dir)? {
        found.file_bytes += fs::metadata(&path)?.len();
        let mut reader = Reader::open(&path)?;
        while let Some(packet) = reader.read()? {
            let is_ours = |run| matches!(parse(packet.bytes), Parsed::Witness(w) if w.run == run);
            if !run.is_none_or(is_ours) {
                continue;
            }
            if found.packets == 0 {
                found.first_ns = packet.ts_ns;
            }
            found.first_ns = found.first_ns.min(packet.ts_ns);
            found.packets += 1;
            found.bytes += packet.bytes.len() as u64;
        }
    }
    Ok(found)
}

/// Waits until every file of a directory is on the disk.
pub(super) fn sync(dir: &Path) -> Result<()> {
    for file in all(dir)? {
        File::open(file)?.sync_all()?;
    }
    Ok(())
}

/// Takes files that are on the disk out of the page cache; nothing else is.
pub(super) fn forget(dir: &Path) -> Result<()> {
    for file in all(dir)? {
        let file = File::open(file)?;
        // What is not yet written would stay.
        file.sync_all()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

//! `STEM.flows.parquet`: the rows of a segment, beside it.
//!
//! It is made once the segment is closed, under a name that ends in `.tmp`, synced, and renamed: it is
//! whole or not there. It says in its metadata of which segment it is (length, and time of its last
//! change); if that does not fit, it is made again. The recorder removes it with the segment.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufWriter};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use datafusion::arrow::array::RecordBatch;
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::basic::{Compression, ZstdLevel};
use datafusion::parquet::file::metadata::{KeyValue, ParquetMetaDataReader};
use datafusion::parquet::file::properties::WriterProperties;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};
use vnplug_store::name::flows_file;

use crate::failure::Failure;
use crate::leftover::Leftover;
use crate::rows::schema;
use crate::scan::{Facts, Sink, scan};

/// Which state of a segment rows are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    len_bytes: u64,
    changed_ns: i128,
}

impl Identity {
    /// Of an open segment.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let about = file.metadata()?;
        Ok(Self {
            len_bytes: about.len(),
            changed_ns: i128::from(about.mtime()) * 1_000_000_000 + i128::from(about.mtime_nsec()),
        })
    }
}

/// Where the rows of a segment are, or will be.
pub(crate) fn path_of(segment: &Path) -> PathBuf {
    let name = segment.file_name().unwrap_or_default();
    segment.with_file_name(flows_file(&name.to_string_lossy()))
}

/// What the file beside a segment says of it; `None` if there is none, or it is of something else.
pub(crate) fn facts(segment: &Path, identity: Identity) -> Option<Facts> {
    // A pipe is not waited for.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK);
    let file = options.open(path_of(segment)).ok()?;
    file.metadata().ok().filter(|about| about.is_file())?;
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&file).ok()?;
    let pairs = metadata.file_metadata().key_value_metadata()?;
    let ours = pairs.iter().find(|pair| pair.key == METADATA)?;
    decode(ours.value.as_deref()?, segment, identity)
}

/// Makes it. `file` is the segment, open and leased, and `identity` what it was when it was found closed;
/// at most this many rows are held at once.
///
/// # Errors
/// [`Trouble`].
pub(crate) fn make(
    segment: &Path,
    file: &File,
    identity: Identity,
    most_rows: usize,
) -> Result<Facts, Trouble> {
    let beside = |error: io::Error| Trouble::Beside(error.to_string());
    let failed = |error: io::Error| Trouble::Segment(error.into());
    let path = path_of(segment);
    let name = temporary(segment);
    let held = hold(&name).map_err(beside)?;
    // Until it has its name, or is gone.
    let _lock = held.try_clone().map_err(beside)?;
    let temporary = Leftover::new(name);
    if let Some(facts) = facts(segment, identity) {
        // Another one was quicker.
        return Ok(facts);
    }
    give(&held, file).map_err(beside)?;
    let mut sink = Parquet::begin(held)?;
    let from = file.try_clone().map_err(failed)?;
    let facts = match scan(segment, from, most_rows, &mut sink) {
        Ok(facts) => facts,
        Err(_) if sink.failed.is_some() => {
            return Err(Trouble::Beside(sink.failed.unwrap_or_default()));
        }
        Err(failure) => return Err(Trouble::Segment(failure)),
    };
    if Identity::of(file).map_err(failed)? != identity {
        return Err(Trouble::Changed);
    }
    sink.finish(&facts, segment, identity)?;
    fs::rename(temporary.path(), &path).map_err(beside)?;
    temporary.keep();
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    let dir = File::open(dir.unwrap_or(Path::new(".")));
    dir.and_then(|dir| dir.sync_all()).map_err(beside)?;
    Ok(facts)
}

/// Why it could not be made.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// Nothing can be written beside the segment: its rows have to be held in memory.
    Beside(String),
    /// The segment cannot be read.
    Segment(Failure),
    /// The segment was written to meanwhile: it is not closed.
    Changed,
}

/// A new file that nobody else writes, and nobody else can read. What a killed one left is taken over.
fn hold(temporary: &Path) -> io::Result<File> {
    for _ in 0..MOST_TRIES {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(temporary)?;
        // Whoever makes it at this moment is waited for.
        flock(&file, FlockOperation::LockExclusive)?;
        let ours = file.metadata()?;
        let there = fs::symlink_metadata(temporary);
        if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
            file.set_len(0)?;
            return Ok(file);
        }
    }
    Err(io::Error::other("others make it again and again"))
}

/// Lets those read it who may read the segment, and nobody else.
fn give(file: &File, segment: &File) -> io::Result<()> {
    let about = segment.metadata()?;
    let mut mode = about.mode() & 0o666;
    // Only root gives files away.
    let owner = fchown(file, Some(about.uid()), Some(about.gid()));
    if owner.is_err() && fchown(file, None, Some(about.gid())).is_err() {
        mode &= !0o070;
    }
    file.set_permissions(Permissions::from_mode(mode))
}

fn temporary(segment: &Path) -> PathBuf {
    let mut name = path_of(segment).into_os_string();
    name.push(".tmp");
    name.into()
}

/// Writes rows to a file.
struct Parquet {
    /// `None` only if it has failed.
    writer: Option<ArrowWriter<BufWriter<File>>>,
    file: File,
    /// Why nothing more is written.
    failed: Option<String>,
}

impl Parquet {
    fn begin(file: File) -> Result<Self, Trouble> {
        let mut sink = Self {
            writer: None,
            file,
            failed: None,
        };
        match sink.restart() {
            Ok(()) => Ok(sink),
            Err(failure) => Err(Trouble::Beside(failure.0)),
        }
    }

    fn finish(self, facts: &Facts, segment: &Path, identity: Identity) -> Result<(), Trouble> {
        let fail = |failure: Failure| Trouble::Beside(failure.0);
        let Some(mut writer) = self.writer else {
            return Err(Trouble::Beside("nothing is written".into()));
        };
        let pair = KeyValue::new(METADATA.to_owned(), encode(facts, segment, identity));
        writer.append_key_value_metadata(pair);
        let buffer = writer.into_inner().map_err(|error| fail(error.into()))?;
        let file = buffer
            .into_inner()
            .map_err(|error| Trouble::Beside(error.to_string()))?;
        file.sync_all().map_err(|error| fail(error.into()))
    }
}

impl Sink for Parquet {
    fn take(&mut self, rows: RecordBatch) -> Result<(), Failure> {
        let Some(writer) = &mut self.writer else {
            return Err(Failure::new("nothing is written"));
        };
        // A group of rows for each batch, so that times of groups do not overlap more than need be.
        let written = writer.write(&rows).and_then(|()| writer.flush());
        written.map_err(|error| {
            self.failed = Some(error.to_string());
            Failure::from(error)
        })
    }

    fn restart(&mut self) -> Result<(), Failure> {
        use std::io::Seek;

        self.writer = None;
        let begun = self.file.set_len(0).and_then(|()| {
            self.file.rewind()?;
            self.file.try_clone()
        });
        let file = begun.inspect_err(|error| self.failed = Some(error.to_string()))?;
        let writer = ArrowWriter::try_new(BufWriter::new(file), schema(), Some(properties()));
        self.writer = Some(writer.inspect_err(|error| self.failed = Some(error.to_string()))?);
        Ok(())
    }
}

/// How Parquet is written.
pub(crate) fn properties() -> WriterProperties {
    WriterProperties::builder()
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build()
}

/// What the metadata of a file beside `segment` says.
fn encode(facts: &Facts, segment: &Path, identity: Identity) -> String {
    json!({
        "version": VERSION,
        "segment": segment.file_name().unwrap_or_default().to_string_lossy(),
        "len_bytes": identity.len_bytes,
        "changed_ns": identity.changed_ns.to_string(),
        "packets": facts.packets,
        "bytes": facts.bytes,
        "first_ns": facts.first_ns,
        "last_ns": facts.last_ns,
        "damage": facts.damage,
    })
    .to_string()
}

/// Reads what [`encode`] writes, if it is of this segment as it is now.
fn decode(text: &str, segment: &Path, identity: Identity) -> Option<Facts> {
    let value: Value = serde_json::from_str(text).ok()?;
    let number = |name: &str| value.get(name)?.as_u64();
    let name = segment.file_name().unwrap_or_default().to_string_lossy();
    let said = Identity {
        len_bytes: number("len_bytes")?,
        changed_ns: value.get("changed_ns")?.as_str()?.parse().ok()?,
    };
    let fits = number("version")? == VERSION
        && value.get("segment")?.as_str()? == name
        && said == identity;
    fits.then_some(Facts {
        packets: number("packets")?,
        bytes: number("bytes")?,
        first_ns: number("first_ns")?,
        last_ns: number("last_ns")?,
        damage: value.get("damage")?.as_str().map(str::to_owned),
    })
}

/// The key of what is said of the segment.
const METADATA: &str = "vnplug.segment";
/// Grows with every change of what the rows are; other versions are made again.
const VERSION: u64 = 3;
const MOST_TRIES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_believed_of_the_same_state_of_the_same_segment_only() {
        let facts = Facts {
            packets: 7,
            bytes: 900,
            first_ns: 5,
            last_ns: 6,
            damage: Some("torn \"here\"".into()),
        };
        let identity = Identity {
            len_bytes: 1000,
            changed_ns: -5,
        };
        let text = encode(&facts, Path::new("/a/b.pcapng"), identity);
        let read = |name: &str, identity| decode(&text, Path::new(name), identity);
        assert_eq!(read("c/b.pcapng", identity), Some(facts));
        assert_eq!(read("/a/b.pcap", identity), None);
        let longer = Identity {
            len_bytes: 1001,
            ..identity
        };
        let later = Identity {
            changed_ns: -4,
            ..identity
        };
        assert_eq!(read("/a/b.pcapng", longer), None);
        assert_eq!(read("/a/b.pcapng", later), None);
    }
}

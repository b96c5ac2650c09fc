//! One capture file as a list of chunks: how many packets of which times stand where in it.
//!
//! The list comes from the index beside the file. What that does not cover (the end of a file that is
//! being written, or everything if there is no index) is read, each byte once.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use vnplug_store::disk::lease;
use vnplug_store::index::{Chunk, Sidecar};
use vnplug_store::name::SegmentName;
use vnplug_store::read::{End, Packet, ReadError, Reader};

/// What is known of a file.
#[derive(Debug)]
pub(crate) struct Segment {
    path: PathBuf,
    stamp: Stamp,
    /// How long it is for who reads it; a packed file is longer than it looks.
    len_bytes: u64,
    sidecar: Sidecar,
    /// As the index has them.
    indexed: Vec<Chunk>,
    /// What was read after them.
    tail: Vec<Chunk>,
    /// Up to which byte.
    tail_at: u64,
    /// Section headers and interface descriptions before it.
    definitions: Vec<u64>,
    /// What all of them have, if that is something.
    whole: Option<Chunk>,
    /// Everything up to the file's end is known.
    complete: bool,
    problem: Option<String>,
}

/// By which a change of a file is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: (u64, u64),
    len_bytes: u64,
    modified: Option<SystemTime>,
    /// It was looked at long after it was last modified; until then there may be more.
    settled: bool,
}

impl Stamp {
    fn of(about: &Metadata) -> Self {
        let modified = about.modified().ok();
        let age = modified.map(|at| at.elapsed().unwrap_or(Duration::ZERO));
        Self {
            inode: (about.dev(), about.ino()),
            len_bytes: about.len(),
            modified,
            settled: age.is_some_and(|age| age > SETTLED),
        }
    }
}

impl Segment {
    /// Nothing is known of it but that it is there.
    pub(crate) fn new(path: PathBuf, about: &Metadata) -> Self {
        Self {
            sidecar: Sidecar::open(&path),
            stamp: Stamp::of(about),
            len_bytes: about.len(),
            indexed: Vec::new(),
            tail: Vec::new(),
            tail_at: 0,
            definitions: Vec::new(),
            whole: None,
            complete: false,
            problem: None,
            path,
        }
    }

    /// Notes how the file is now; one that was replaced or cut is looked at again.
    pub(crate) fn update(&mut self, about: &Metadata) {
        let now = Stamp::of(about);
        // The recorder gives back what it had reserved, and was never written.
        let shorter = now.len_bytes < self.stamp.len_bytes;
        if now.inode != self.stamp.inode || shorter && now.len_bytes < self.known_bytes() {
            *self = Self::new(std::mem::take(&mut self.path), about);
        } else if now != self.stamp {
            (self.stamp, self.complete, self.problem) = (now, false, None);
        }
    }

    /// Reads the index, and the rest of the file if `tail`, until the deadline.
    pub(crate) fn look(&mut self, tail: bool, deadline: Instant) {
        if self.complete {
            return;
        }
        match self.try_look(tail, deadline) {
            Ok(complete) => self.complete = complete,
            Err(error) => {
                self.problem = Some(error);
                self.complete = true;
            }
        }
        let chunks = self.chunks().filter(|chunk| chunk.packets > 0);
        self.whole = chunks.copied().reduce(|all, chunk| Chunk {
            low_ns: all.low_ns.min(chunk.low_ns),
            high_ns: all.high_ns.max(chunk.high_ns),
            packets: all.packets + chunk.packets,
            lost: all.lost.saturating_add(chunk.lost),
            ..all
        });
    }

    fn try_look(&mut self, tail: bool, deadline: Instant) -> Result<bool, String> {
        let file = lease(&self.path).map_err(|e| format!("{}: {e}", self.path.display()))?;
        let mut reader = Reader::of(file, self.path.clone());
        self.len_bytes = reader.len_bytes().unwrap_or(self.stamp.len_bytes);
        self.sidecar.resume(&self.path);
        while let Some(block) = self.sidecar.read(&mut reader) {
            self.indexed.extend_from_slice(block.chunks());
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
        self.drop_indexed_tail();
        if !tail {
            return Ok(false);
        }
        self.read_tail(&mut reader, deadline)
            .map_err(|error| error.to_string())
    }

    /// The index has grown over what was read.
    fn drop_indexed_tail(&mut self) {
        let covered = self.sidecar.covered();
        self.tail.retain(|chunk| chunk.start >= covered);
        let fits = self
            .tail
            .first()
            .is_some_and(|chunk| chunk.start == covered);
        if !fits {
            self.tail.clear();
            self.tail_at = covered;
            self.definitions = self.sidecar.definitions().to_vec();
        }
    }

    /// True if the file's end was reached.
    fn read_tail(&mut self, reader: &mut Reader, deadline: Instant) -> Result<bool, ReadError> {
        if self.tail_at >= self.len_bytes {
            return Ok(true);
        }
        reader.seek(self.tail_at, &self.definitions)?;
        let ended = self.read_packets(reader, deadline);
        self.tail_at = match (&ended, reader.end()) {
            (Ok(true), End::Torn(at) | End::Unwritten(at)) => at,
            _ => reader.offset(),
        };
        self.definitions = reader.definitions().to_vec();
        ended
    }

    fn read_packets(&mut self, reader: &mut Reader, deadline: Instant) -> Result<bool, ReadError> {
        let mut count = 0_u32;
        while let Some(packet) = reader.read()? {
            note(&mut self.tail, self.sidecar.covered(), &packet);
            if let Some(last) = self.tail.last_mut() {
                last.end = reader.offset();
            }
            count += 1;
            if count.is_multiple_of(1024) && Instant::now() >= deadline {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Its chunks, in the order of the file.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = &Chunk> {
        self.indexed.iter().chain(&self.tail)
    }

    /// Its packets, their times, and what they tell of losses, as if it were one chunk; `None` if there are none.
    pub(crate) fn whole(&self) -> Option<&Chunk> {
        self.whole.as_ref()
    }

    /// The packets of chunks, which come in the order of the file, one by one; false if they cannot be
    /// read.
    pub(crate) fn read(&self, chunks: &[Chunk], mut each: impl FnMut(&Packet<'_>)) -> bool {
        let Ok(file) = lease(&self.path) else {
            return false;
        };
        let mut reader = Reader::of(file, self.path.clone());
        for chunk in chunks {
            if reader.offset() != chunk.start || chunk.start == 0 {
                // NB: the definitions after the index go on where those of the index end.
                let list = match self.definitions.len() >= self.sidecar.definitions().len() {
                    true => &self.definitions[..],
                    false => self.sidecar.definitions(),
                };
                if reader.seek(chunk.start, list).is_err() {
                    return false;
                }
            }
            let mut left = chunk.packets;
            while left > 0 {
                match reader.read_until(chunk.end) {
                    Ok(Some(packet)) => each(&packet),
                    _ => return false,
                }
                left -= 1;
            }
        }
        true
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What its name says, if it is a recorder's.
    pub(crate) fn name(&self) -> Option<SegmentName> {
        SegmentName::parse(self.path.file_name()?.to_str()?)
    }

    /// How much room the file takes.
    pub(crate) fn len_bytes(&self) -> u64 {
        self.stamp.len_bytes
    }

    /// How much of it is known.
    fn known_bytes(&self) -> u64 {
        self.sidecar.covered().max(self.tail_at)
    }

    /// How much of it is still to be read.
    pub(crate) fn pending_bytes(&self) -> u64 {
        match self.complete {
            true => 0,
            false => self.len_bytes.saturating_sub(self.known_bytes()),
        }
    }

    /// Why it is not known whole.
    pub(crate) fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }
}

/// Adds a packet to the chunks of a file, which begin at the same places as those of an index.
fn note(tail: &mut Vec<Chunk>, from: u64, packet: &Packet<'_>) {
    let full = tail
        .last()
        .is_none_or(|last| packet.offset >= last.start + CHUNK_BYTES);
    if full {
        tail.push(Chunk {
            start: if tail.is_empty() { from } else { packet.offset },
            low_ns: u64::MAX,
            ..Chunk::default()
        });
    }
    let Some(chunk) = tail.last_mut() else {
        return;
    };
    chunk.packets += 1;
    chunk.low_ns = chunk.low_ns.min(packet.ts_ns);
    chunk.high_ns = chunk.high_ns.max(packet.ts_ns);
    chunk.wire_bytes += u64::from(packet.wire_len);
    chunk.lost = chunk.lost.saturating_add(packet.lost);
}

/// As in an index.
const CHUNK_BYTES: u64 = 256 << 10;
/// A file that was modified this time ago has its last modification in its stamp.
const SETTLED: Duration = Duration::from_secs(2);

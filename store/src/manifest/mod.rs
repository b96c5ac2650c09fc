//! The manifest of a recording: which closed files it consists of, and what is in them.
//!
//! `NAME.manifest` lies in each directory of a recording: lines of JSON, each of which has the SHA-256 of the
//! line before it, so that no line can be changed, left out or put in between without a break. Lines are only
//! appended, each by one write(2) that is synced.
//!
//! | `what` | meaning |
//! |---|---|
//! | `begin` | the first line |
//! | `closed` | a segment as it was when it was closed: `file`, `bytes`, `sha256` |
//! | `packed` | the packed form of a segment: the same of that file |
//! | `removed` | a segment was removed on purpose, `why`; written before it goes |
//! | `unused` | no segment has this `sequence` |
//!
//! What is in a file is read back from the disk by the thread that packs closed files ([`crate::archive`]),
//! of the lowest priority: recording does not wait for it. A file that was closed and has no line, as its
//! recorder was killed, gets one from the next recorder of this name.
//!
//! A chain has no anchor of its own: who can write to the directory can write a new one. It is evidence
//! together with the hash of a line that was noted elsewhere ([`Book::head`]).

mod check;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::disk::{Buffer, Disk};
use crate::name::{self, Packing, SegmentName, unpacked};

pub use check::{Hole, Verdict, Verification, holes, verify};

/// SHA-256, in hexadecimal digits.
pub type Hash = String;

/// What a manifest says of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Its length.
    pub bytes: u64,
    /// What is in it.
    pub sha256: Hash,
}

/// A manifest that was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Book {
    /// The closed files, and the packed ones, by their names.
    pub files: BTreeMap<String, Content>,
    /// Segments that were removed on purpose, and why, by the names they had when they were closed.
    pub removed: BTreeMap<String, String>,
    /// Numbers that no segment has.
    pub unused: Vec<u64>,
    /// Whole lines.
    pub lines: u64,
    /// The hash of the last whole line; of none it is empty.
    pub head: Hash,
    /// The hashes of all whole lines, in order.
    pub hashes: Vec<Hash>,
    /// Lines that do not follow from the one before, counted from 1, and those that are none.
    pub broken: Vec<u64>,
    /// Bytes up to the end of the last whole line.
    len: u64,
}

impl Book {
    /// Reads the manifest of a recording in a directory; an empty one if there is none.
    ///
    /// # Errors
    /// Those of reading.
    pub fn read(dir: &Path, recording: &str) -> io::Result<Self> {
        match std::fs::read(dir.join(manifest_file(recording))) {
            Ok(bytes) => Ok(Self::parse(&bytes)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        }
    }

    /// What a manifest says. A last line without an end was never finished, and does not count.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut book = Self::default();
        for line in bytes.split_inclusive(|&byte| byte == b'\n') {
            let Some(line) = line.strip_suffix(b"\n") else {
                break;
            };
            book.add(line);
        }
        book
    }

    fn add(&mut self, line: &[u8]) {
        self.lines += 1;
        self.len += line.len() as u64 + 1;
        let value: Option<Value> = serde_json::from_slice(line).ok();
        let text = |key: &str| value.as_ref()?.get(key)?.as_str().map(str::to_owned);
        if text("previous").as_ref() != Some(&self.head) {
            self.broken.push(self.lines);
        }
        self.head = hex(&Sha256::digest(line));
        self.hashes.push(self.head.clone());
        let number = |key: &str| value.as_ref()?.get(key)?.as_u64();
        match (text("what").as_deref(), text("file")) {
            (Some("closed" | "packed"), Some(file)) => {
                if let (Some(bytes), Some(sha256)) = (number("bytes"), text("sha256")) {
                    // The first counts: a later one is of a file that came in its place.
                    self.files.entry(file).or_insert(Content { bytes, sha256 });
                }
            }
            (Some("removed"), Some(file)) => {
                let why = text("why").unwrap_or_default();
                self.removed.insert(unpacked(&file).0.to_owned(), why);
            }
            (Some("unused"), _) => self.unused.extend(number("sequence")),
            _ => {}
        }
    }

    /// The numbers of which it knows what became.
    fn numbers(&self) -> impl Iterator<Item = u64> {
        let files = self.files.keys().chain(self.removed.keys());
        let files = files.filter_map(|file| Some(SegmentName::parse(file)?.sequence));
        files.chain(self.unused.iter().copied())
    }
}

/// The manifest of a recorder at work in a directory.
#[derive(Debug)]
pub struct Manifest {
    dir: PathBuf,
    recording: String,
    /// What it says, and the file that was so.
    book: Mutex<(Book, u64)>,
}

impl Manifest {
    /// Opens a recording's manifest, or begins it. A line that was not finished is cut off.
    ///
    /// # Errors
    /// Those of reading and writing.
    pub fn open(dir: &Path, recording: &str) -> io::Result<Self> {
        let manifest = Self {
            dir: dir.to_owned(),
            recording: recording.to_owned(),
            book: Mutex::default(),
        };
        manifest.append(|_| None)?;
        Ok(manifest)
    }

    /// Whether it has a line of a file that was closed or packed.
    pub fn has(&self, file: &str) -> bool {
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        book.0.files.contains_key(file)
    }

    /// Reads a closed file back from the disk, and adds what is in it, if it has no line.
    ///
    /// # Errors
    /// [`ErrorKind::Interrupted`] if `pulse` says false, which is asked at each MiB; those of reading and
    /// writing.
    pub fn take_in(
        &self,
        disk: &mut dyn Disk,
        file: &str,
        pulse: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        if self.has(file) {
            return Ok(());
        }
        let path = self.dir.join(file);
        let mut buffer = Buffer::new(AT_ONCE, u16::MAX);
        let (mut bytes, mut hash) = (0, Sha256::new());
        loop {
            if !pulse() {
                return Err(ErrorKind::Interrupted.into());
            }
            let len = disk.read(&path, bytes, &mut buffer)?;
            hash.update(&buffer[..len]);
            bytes += len as u64;
            if len < buffer.len() {
                break;
            }
        }
        let what = match unpacked(file).1 == Packing::default() {
            true => "closed",
            false => "packed",
        };
        let sha256 = hex(&hash.finalize());
        self.append(|book| {
            let new = !book.files.contains_key(file);
            new.then(|| json!({ "what": what, "file": file, "bytes": bytes, "sha256": sha256 }))
        })
    }

    /// A segment is about to be removed.
    ///
    /// # Errors
    /// Those of writing.
    pub fn removing(&self, file: &str, why: &str) -> io::Result<()> {
        self.append(|book| {
            let new = !book.removed.contains_key(unpacked(file).0);
            new.then(|| json!({ "what": "removed", "file": file, "why": why }))
        })
    }

    /// No segment has this number.
    ///
    /// # Errors
    /// Those of writing.
    pub fn unused(&self, sequence: u64) -> io::Result<()> {
        self.append(|_| Some(json!({ "what": "unused", "sequence": sequence })))
    }

    /// Appends a line, unless there is nothing to say. If the file is another one since, or was changed, it is
    /// read again: a directory may have been made again.
    fn append(&self, line: impl FnOnce(&Book) -> Option<Value>) -> io::Result<()> {
        let mut held = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let (book, inode) = &mut *held;
        let mut file = File::options()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o640)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(self.dir.join(manifest_file(&self.recording)))?;
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(ErrorKind::InvalidInput.into());
        }
        if (about.ino(), about.len()) != (*inode, book.len) {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            *book = Book::parse(&bytes);
            *inode = about.ino();
            if book.len < bytes.len() as u64 {
                file.set_len(book.len)?;
            }
            if book.lines == 0 {
                let begin = json!({ "what": "begin", "version": 1, "recording": self.recording });
                add(&mut file, book, begin)?;
                File::open(&self.dir)?.sync_all()?;
            }
        }
        match line(book) {
            Some(line) => add(&mut file, book, line),
            None => Ok(()),
        }
    }
}

fn add(file: &mut File, book: &mut Book, mut line: Value) -> io::Result<()> {
    line["at"] = name::time(crate::record::now_ns()).into();
    line["previous"] = book.head.clone().into();
    let text = line.to_string();
    let written = file
        .write_all(format!("{text}\n").as_bytes())
        .and_then(|()| file.sync_data());
    match written {
        Ok(()) => book.add(text.as_bytes()),
        Err(_) => {
            // Half a line, or none that is certain: it is read again at the next, as far as it goes.
            let _ = file.set_len(book.len);
            book.len = u64::MAX;
        }
    }
    written
}

/// The name of a recording's manifest.
pub fn manifest_file(recording: &str) -> String {
    format!("{recording}{END}")
}

fn hex(bytes: &[u8]) -> Hash {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // A string takes everything.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

const END: &str = ".manifest";
/// Bytes that are read at once.
const AT_ONCE: usize = 1 << 20;

#[cfg(test)]
mod tests;

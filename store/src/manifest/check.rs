//! Recordings held against their manifests, and against the numbers of their segments.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Book, Content, END, hex};
use crate::disk::lease;
use crate::name::{self, SegmentName, unpacked};
use crate::record::read_state;

/// Segments that should be there and are not, or are others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hole {
    /// What is missing or wrong, in words.
    pub what: String,
    /// A directory of the recording.
    pub dir: PathBuf,
    /// What is missing begins here at the earliest, nanoseconds since 1970,
    pub from_ns: u64,
    /// and ends here at the latest.
    pub to_ns: u64,
}

impl fmt::Display for Hole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.dir.display(), self.what)
    }
}

/// A recording's files in a directory.
struct DirFiles {
    dir: PathBuf,
    book: Book,
    /// By number: the names of the files.
    files: BTreeMap<u64, Vec<(SegmentName, String, u64)>>,
}

/// The recordings of these directories.
fn recordings(dirs: &[PathBuf]) -> io::Result<BTreeMap<String, Vec<DirFiles>>> {
    let mut all: BTreeMap<String, Vec<DirFiles>> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for dir in dirs.iter().filter(|dir| dir.is_dir()) {
        if !seen.insert(fs::canonicalize(dir)?) {
            continue;
        }
        let mut here: BTreeMap<String, DirFiles> = BTreeMap::new();
        let place = |recording: &str| -> io::Result<DirFiles> {
            Ok(DirFiles {
                dir: dir.clone(),
                book: Book::read(dir, recording)?,
                files: BTreeMap::new(),
            })
        };
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let Ok(file) = entry.file_name().into_string() else {
                continue;
            };
            let segment = SegmentName::parse(&file);
            let manifest = file
                .strip_suffix(END)
                .filter(|it| name::is_recording_name(it));
            let recording = segment
                .as_ref()
                .map(|it| it.recording.as_str())
                .or(manifest);
            let Some(recording) = recording else { continue };
            if !here.contains_key(recording) {
                here.insert(recording.to_owned(), place(recording)?);
            }
            let Some(place) = here.get_mut(recording) else {
                continue;
            };
            // Recycled at this moment.
            let Ok(about) = entry.metadata() else {
                continue;
            };
            if let Some(segment) = segment {
                let same = place.files.entry(segment.sequence).or_default();
                same.push((segment, file, about.len()));
            }
        }
        for (recording, place) in here {
            all.entry(recording).or_default().push(place);
        }
    }
    Ok(all)
}

/// What is missing in the recordings of these directories between what is there, and what is not the file that was closed, as far as its length tells.
///
/// What was removed by a quota or by age is no hole, and neither is what was taken away at the old end. Of a
/// recording in several directories all must be named: the numbers of segments go over all of them.
///
/// # Errors
/// A directory or a manifest cannot be read.
pub fn holes(dirs: &[PathBuf]) -> io::Result<Vec<Hole>> {
    let mut holes = Vec::new();
    for (recording, places) in recordings(dirs)? {
        between(&recording, &places, &mut holes);
        for place in &places {
            place.changed(&mut holes);
        }
    }
    Ok(holes)
}

/// Numbers between those that are there that no segment has.
fn between(recording: &str, places: &[DirFiles], holes: &mut Vec<Hole>) {
    let there: BTreeMap<u64, (&SegmentName, &Path)> = places
        .iter()
        .flat_map(|place| {
            place.files.iter().filter_map(|(&number, same)| {
                Some((number, (&same.first()?.0, place.dir.as_path())))
            })
        })
        .collect();
    // The directories have their oldest segments removed each for itself.
    let firsts = places.iter().filter_map(|place| place.files.keys().next());
    let Some(&first) = firsts.max() else { return };
    let closed = |place: &DirFiles| {
        let names = place.book.files.keys();
        let names = names.filter(|file| !place.book.removed.contains_key(unpacked(file).0));
        let numbers = names.filter_map(|file| Some(SegmentName::parse(file)?.sequence));
        numbers.collect::<Vec<_>>()
    };
    let expected: BTreeSet<u64> = places.iter().flat_map(closed).collect();
    let last = there
        .keys()
        .chain(&expected)
        .max()
        .copied()
        .unwrap_or(first);
    let is_whole = is_whole(recording, places);
    let known: BTreeSet<u64> = places
        .iter()
        .flat_map(|place| place.book.numbers())
        .collect();
    let is_missing = |number: &u64| {
        let unknown = || is_whole && !known.contains(number);
        !there.contains_key(number) && (expected.contains(number) || unknown())
    };
    let mut next = first;
    while next <= last {
        let Some((after, _)) = there
            .range(next..)
            .next()
            .map_or(Some((last + 1, None)), |(n, it)| Some((*n, Some(it))))
        else {
            break;
        };
        let missing: Vec<u64> = (next..after.min(next + MOST)).filter(is_missing).collect();
        let before = there.range(..after).next_back();
        if let (Some(low), Some(high), Some((_, (before, dir)))) =
            (missing.first(), missing.last(), before)
        {
            let numbers = match missing.len() {
                1 => format!("sequence {low} is missing"),
                count => format!("{count} segments are missing (sequence {low} to {high})"),
            };
            let behind = there.get(&after);
            let what = match behind {
                Some((behind, _)) => format!("{numbers} between {before} and {behind}"),
                None => format!("{numbers} after {before}"),
            };
            holes.push(Hole {
                what,
                dir: dir.to_path_buf(),
                from_ns: before.start_ns,
                to_ns: behind.map_or(u64::MAX, |(behind, _)| behind.start_ns),
            });
        }
        next = after + 1;
    }
}

/// Whether these are all directories of the recording, as far as its state tells.
fn is_whole(recording: &str, places: &[DirFiles]) -> bool {
    let states = places
        .iter()
        .filter_map(|place| read_state(&place.dir, recording).ok());
    let most = states.map(|state| state.lanes.len()).max().unwrap_or(0);
    places.len() >= most
}

impl DirFiles {
    /// Files of another length than when they were closed, and numbers that several segments have.
    fn changed(&self, holes: &mut Vec<Hole>) {
        for (number, same) in &self.files {
            let Some((segment, _, _)) = same.first() else {
                continue;
            };
            let mut tell = |what: String| {
                holes.push(Hole {
                    what,
                    dir: self.dir.clone(),
                    from_ns: segment.start_ns,
                    to_ns: u64::MAX,
                });
            };
            if same.iter().any(|(other, _, _)| other != segment) {
                tell(format!("several segments have the number {number}"));
            }
            for (_, file, len) in same {
                let closed = self.book.files.get(file).map(|content| content.bytes);
                if let Some(closed) = closed.filter(|closed| closed != len) {
                    tell(format!(
                        "{file} is not the file that was closed: it has {len} bytes instead of {closed}"
                    ));
                }
            }
        }
    }
}

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is what was closed.
    Same,
    /// It is not; how that is seen, in words.
    Changed(String),
    /// It should be there and is not.
    Missing,
    /// It was removed on purpose; why.
    Removed(String),
    /// It has no line: it is being written, or its recorder was killed.
    Unlisted,
    /// It cannot be read.
    Unread(String),
}

/// What a verification found in a recording's directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verification {
    /// The recording.
    pub recording: String,
    /// The directory.
    pub dir: PathBuf,
    /// Each file, by name.
    pub files: Vec<(String, Verdict)>,
    /// What is wrong with the manifest, in words.
    pub chain: Vec<String>,
    /// Its last line's hash: noted elsewhere, it shows later that nothing before was changed.
    pub head: String,
    /// Lines of the manifest.
    pub lines: u64,
    /// Bytes that were read.
    pub bytes: u64,
}

impl Verification {
    /// Whether something is missing, changed, or cannot be read.
    pub fn is_wrong(&self) -> bool {
        let wrong = |verdict: &Verdict| {
            matches!(
                verdict,
                Verdict::Changed(_) | Verdict::Missing | Verdict::Unread(_)
            )
        };
        !self.chain.is_empty() || self.files.iter().any(|(_, verdict)| wrong(verdict))
    }
}

/// Reads every file of the recordings in a directory, and holds it against the manifest. `head` is the hash
/// of a line that was noted before, and must be there still. `tell` is called before each file.
///
/// # Errors
/// The directory or a manifest cannot be read.
pub fn verify(
    dir: &Path,
    head: Option<&str>,
    tell: &mut dyn FnMut(&str),
) -> io::Result<Vec<Verification>> {
    let all = recordings(&[dir.to_owned()])?;
    let mut found = Vec::new();
    let is_it =
        |place: &DirFiles| head.is_some_and(|head| place.book.hashes.iter().any(|it| it == head));
    // A directory may have several recordings: the line is of one of them.
    let head = head.filter(|_| !all.values().flatten().any(is_it));
    for (recording, places) in all {
        for place in places {
            found.push(place.verify(&recording, head, tell));
        }
    }
    Ok(found)
}

impl DirFiles {
    fn verify(
        &self,
        recording: &str,
        head: Option<&str>,
        tell: &mut dyn FnMut(&str),
    ) -> Verification {
        let mut result = Verification {
            recording: recording.to_owned(),
            dir: self.dir.clone(),
            head: self.book.head.clone(),
            lines: self.book.lines,
            ..Verification::default()
        };
        if self.book.lines == 0 {
            result.chain.push("there is no manifest".to_owned());
        }
        for line in &self.book.broken {
            result.chain.push(format!(
                "line {line} does not follow from the one before: lines were changed, left out or added"
            ));
        }
        if let Some(head) = head.filter(|head| !self.book.hashes.iter().any(|it| it == head)) {
            result.chain.push(format!(
                "no line has the hash {head}: it is another manifest, or an older one"
            ));
        }
        let mut there = BTreeSet::new();
        for (_, file, len) in self.files.values().flatten() {
            there.insert(unpacked(file).0);
            tell(file);
            let verdict = self.judge(file, *len, &mut result.bytes);
            result.files.push((file.clone(), verdict));
        }
        let plain = self.book.files.keys().map(|file| unpacked(file).0);
        let gone: BTreeSet<&str> = plain.filter(|file| !there.contains(file)).collect();
        for file in gone {
            let verdict = match self.book.removed.get(file) {
                Some(why) => Verdict::Removed(why.clone()),
                None => Verdict::Missing,
            };
            result.files.push((file.to_owned(), verdict));
        }
        let mut holes = Vec::new();
        if is_whole(recording, std::slice::from_ref(self)) {
            between(recording, std::slice::from_ref(self), &mut holes);
        }
        let is_told = |hole: &Hole| {
            let missing = result
                .files
                .iter()
                .filter(|(_, verdict)| *verdict == Verdict::Missing);
            let numbers: Vec<u64> = missing
                .filter_map(|(file, _)| Some(SegmentName::parse(file)?.sequence))
                .collect();
            numbers
                .iter()
                .any(|number| hole.what.contains(&format!("sequence {number} ")))
        };
        holes.retain(|hole| !is_told(hole));
        result.chain.extend(holes.into_iter().map(|hole| hole.what));
        result
    }

    fn judge(&self, file: &str, len: u64, read: &mut u64) -> Verdict {
        let Some(content) = self.book.files.get(file) else {
            return Verdict::Unlisted;
        };
        if content.bytes != len {
            let what = format!("it has {len} bytes instead of {}", content.bytes);
            return Verdict::Changed(what);
        }
        match hash(&self.dir.join(file), read) {
            Ok(now) if now == *content => Verdict::Same,
            Ok(now) => Verdict::Changed(format!(
                "its SHA-256 is {} instead of {}",
                now.sha256, content.sha256
            )),
            Err(error) => Verdict::Unread(error.to_string()),
        }
    }
}

fn hash(path: &Path, read: &mut u64) -> io::Result<Content> {
    let mut file: File = lease(path)?;
    let mut buffer = vec![0; super::AT_ONCE];
    let (mut bytes, mut hash) = (0, Sha256::new());
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(len) => {
                hash.update(&buffer[..len]);
                bytes += len as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    *read += bytes;
    Ok(Content {
        bytes,
        sha256: hex(&hash.finalize()),
    })
}

/// Numbers that are looked at in one gap.
const MOST: u64 = 1 << 20;

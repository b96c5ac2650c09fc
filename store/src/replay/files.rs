//! Which files are played, in which order.

use std::io;
use std::path::{Path, PathBuf};

use crate::name::SegmentName;

/// A file to be played.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Where it is.
    pub path: PathBuf,
    /// Its times go on where those of the file before it ended: both are segments of one recording.
    pub continues: bool,
}

/// What was named, in that order; a directory stands for the segments in it, in the order in which
/// they were recorded.
///
/// # Errors
/// The path, and why it cannot be read; a directory without segments, or with those of several
/// recordings, is an error, and so is a second directory of one recording.
pub fn files(named: &[PathBuf]) -> Result<Vec<File>, (PathBuf, io::Error)> {
    let mut all: Vec<File> = Vec::new();
    let mut recordings: Vec<(String, &Path)> = Vec::new();
    for path in named {
        let about = |error| (path.clone(), error);
        let paths = match std::fs::metadata(path).map_err(about)?.is_dir() {
            true => segments(path).map_err(about)?,
            false => vec![path.clone()],
        };
        if path.is_dir()
            && let Some(name) = paths.first().and_then(|path| segment(path))
        {
            let known = recordings.iter().find(|(of, _)| *of == name.recording);
            if let Some((recording, first)) = known
                && *first != path.as_path()
            {
                return Err(about(striped(recording, first, path)));
            }
            recordings.push((name.recording, path));
        }
        for path in paths {
            let before = all.last().map(|file| file.path.as_path());
            let continues = before.is_some_and(|before| follows(before, &path));
            all.push(File { path, continues });
        }
    }
    Ok(all)
}

/// A recording in several directories has its packets in turns in them.
fn striped(recording: &str, first: &Path, second: &Path) -> io::Error {
    let what = format!(
        "{recording} is also in {0}: where a recorder wrote to several directories its packets \
         alternate between them. `vnplug extract {0} {1} -w FILE` brings them into one order; files \
         that are named one by one are played one after the other",
        first.display(),
        second.display()
    );
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn segments(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if let Some(name) = segment(&entry.path()) {
            found.push((name, entry.path()));
        }
    }
    if found.is_empty() {
        let what = "a directory without segments of a recording; name its files";
        return Err(io::Error::new(io::ErrorKind::NotFound, what));
    }
    // One that was packed, and could not be removed yet.
    found.sort();
    found.dedup_by(|(name, _), (before, _)| name == before);
    if let [(first, _), .., (last, _)] = &found[..]
        && first.recording != last.recording
    {
        let what = format!(
            "a directory with several recordings; name the files of one, as {}/{}-*",
            dir.display(),
            first.recording
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Whether both are segments of one recording, and this one is the later.
fn follows(before: &Path, this: &Path) -> bool {
    let (Some(before), Some(this)) = (segment(before), segment(this)) else {
        return false;
    };
    before.recording == this.recording && before.sequence < this.sequence
}

fn segment(path: &Path) -> Option<SegmentName> {
    SegmentName::parse(path.file_name()?.to_str()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_of_a_recording_go_on_in_time_and_other_files_begin_anew() {
        let dir = std::env::temp_dir().join(format!("vnplug-replay-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let start = "20261121T134501.123456789Z";
        let name = |recording: &str, sequence: u32| {
            dir.join(format!("{recording}-{sequence:010}-{start}.pcapng"))
        };
        for path in [name("a", 10), name("a", 9), dir.join("a.state")] {
            std::fs::write(path, "").unwrap();
        }
        let single = dir.join("single.pcap");
        std::fs::write(&single, "").unwrap();
        let found = files(&[single.clone(), dir.clone(), single.clone()]).unwrap();
        let found: Vec<(PathBuf, bool)> = found
            .into_iter()
            .map(|file| (file.path, file.continues))
            .collect();
        let wanted = [
            (single.clone(), false),
            (name("a", 9), false),
            (name("a", 10), true),
            (single, false),
        ];
        assert_eq!(found, wanted);
        let other = name("b", 11);
        std::fs::write(&other, "").unwrap();
        let (path, error) = files(std::slice::from_ref(&dir)).unwrap_err();
        assert!(path == dir && error.to_string().contains("several recordings"));
        let found = files(&[name("a", 10), other]).unwrap();
        assert!(found.iter().all(|file| !file.continues));
        let (path, _) = files(&[dir.join("missing")]).unwrap_err();
        assert_eq!(path, dir.join("missing"));
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn two_directories_of_one_recording_are_no_order() {
        let dir = std::env::temp_dir().join(format!("vnplug-replay-two-{}", std::process::id()));
        let place = |sub: &str, recording: &str, sequence: u32| {
            let place = dir.join(sub);
            std::fs::create_dir_all(&place).unwrap();
            let start = "20261121T134501.123456789Z";
            let file = place.join(format!("{recording}-{sequence:010}-{start}.pcapng"));
            std::fs::write(file, "").unwrap();
            place
        };
        let (one, two, other) = (place("1", "a", 1), place("2", "a", 2), place("3", "b", 1));
        let (path, error) = files(&[one.clone(), other.clone(), two.clone()]).unwrap_err();
        assert!(path == two && error.to_string().contains("vnplug extract"));
        assert_eq!(files(&[one.clone(), other, one]).unwrap().len(), 3);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

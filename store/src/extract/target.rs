//! What must not be written to: what is read.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::captures;
use crate::index::Sidecar;
use crate::name::flows_file;

/// Why a file of this name must not be written by who reads these places; `None` if it may be.
///
/// Nothing in a directory that is read may be, since it would be taken for a part of the recording. Of a
/// capture file that is named itself that is the file, its index and its flows, and the recorder's state
/// beside it. All this under any name: links are followed. Pipes and devices may always be written to.
pub fn forbidden(path: &Path, places: &[PathBuf]) -> Option<&'static str> {
    let there = fs::metadata(path).ok();
    if there.as_ref().is_some_and(|about| !about.is_file()) {
        return None;
    }
    let home = home(path);
    let is_home = |place: &PathBuf| {
        let place = fs::metadata(place).ok();
        place
            .zip(home.as_ref())
            .is_some_and(|(a, b)| is_same(&a, b))
    };
    if places.iter().any(is_home) {
        return Some("is in a directory that is read: write to another file");
    }
    let there = there?;
    let is_it = |other: PathBuf| fs::metadata(other).is_ok_and(|other| is_same(&other, &there));
    files(places)
        .any(is_it)
        .then_some("is part of what is read: write to another file")
}

/// All files that may be read, and what is in the directories of that.
fn files(places: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
    let beside = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let flows = path.with_file_name(flows_file(&name));
        [Sidecar::path_of(&path), flows, path]
    };
    let captures = captures(places).0.into_iter();
    let captures = captures.flat_map(move |capture| beside(capture.path));
    let others = places.iter().flat_map(|place| {
        let is_dir = place.is_dir();
        let dir = if is_dir { place } else { directory(place) };
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let paths = entries.map(|entry| entry.path());
        paths.filter(move |path| is_dir || path.extension().is_some_and(|ext| ext == "state"))
    });
    captures.chain(others)
}

/// The directory in which a file of this name is, or would be made: behind symbolic links.
fn home(path: &Path) -> Option<Metadata> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        let dir = directory(&path);
        match fs::read_link(&path) {
            Ok(target) => path = dir.join(target),
            Err(_) => return fs::metadata(dir).ok(),
        }
    }
    None
}

fn directory(path: &Path) -> &Path {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    dir.unwrap_or(Path::new("."))
}

fn is_same(a: &Metadata, b: &Metadata) -> bool {
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

/// As many as the system follows (path_resolution(7)).
const MOST_LINKS: usize = 40;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use vnplug_testing::TestDir;

    const STEM: &str = "r-0000000001-20261121T134501.000000000Z";

    /// A directory `rec` with a segment and what is beside it; the names.
    fn recording(place: &TestDir) -> Vec<String> {
        let names = ["pcapng", "vnx", "flows.parquet"].map(|end| format!("{STEM}.{end}"));
        let names = [&names[..], &["r.state".to_owned()]].concat();
        fs::create_dir(place.0.join("rec")).unwrap();
        for name in &names {
            fs::write(place.0.join("rec").join(name), "read").unwrap();
        }
        names
    }

    #[test]
    fn what_is_read_is_not_written_under_any_name() {
        let place = TestDir::new("target-names");
        let names = recording(&place);
        let dir = place.0.join("rec");
        let dirs = [dir.clone()];
        let file = [dir.join(&names[0])];
        for name in &names {
            let (soft, hard) = (place.0.join("soft"), place.0.join("hard"));
            symlink(dir.join(name), &soft).unwrap();
            fs::hard_link(dir.join(name), &hard).unwrap();
            for path in [&dir.join(name), &soft, &hard] {
                assert!(forbidden(path, &dirs).is_some(), "{}", path.display());
                assert!(forbidden(path, &file).is_some(), "{}", path.display());
            }
            fs::remove_file(&soft).unwrap();
            fs::remove_file(&hard).unwrap();
        }
    }

    #[test]
    fn nothing_is_made_in_a_directory_that_is_read() {
        let place = TestDir::new("target-new");
        recording(&place);
        let dir = place.0.join("rec");
        let dirs = [dir.clone()];
        let (dangling, again) = (place.0.join("dangling"), place.0.join("again"));
        symlink("rec/new.pcapng", &dangling).unwrap();
        symlink(&dir, &again).unwrap();
        for path in [dir.join("new.pcapng"), dangling, again.join("new.pcapng")] {
            assert!(forbidden(&path, &dirs).is_some(), "{}", path.display());
        }
        assert!(forbidden(&place.0.join("new.pcapng"), &dirs).is_none());
    }

    #[test]
    fn other_files_and_devices_are_written() {
        let place = TestDir::new("target-others");
        let names = recording(&place);
        let dir = place.0.join("rec");
        // Only the file is read, not its directory.
        let file = [dir.join(&names[0])];
        assert!(forbidden(&dir.join("new.pcapng"), &file).is_none());
        fs::write(place.0.join("old.pcapng"), "old").unwrap();
        for path in [&place.0.join("old.pcapng"), Path::new("/dev/null")] {
            assert!(forbidden(path, &[dir.clone(), "/dev".into()]).is_none());
        }
    }
}

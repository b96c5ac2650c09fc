//! The picture's file: never one of those that the picture is of, and whole or as it was.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vnplug_store::extract::captures;
use vnplug_store::index::Sidecar;
use vnplug_store::name::{INDEX, PART, unpacked_path};

/// Whether a file is one of those that are read in these places, or would be from then on.
pub(crate) fn is_read(places: &[PathBuf], file: &Path) -> bool {
    let file = resolved(file);
    let (itself, directory) = (inode(&file), file.parent().and_then(inode));
    let is_itself = |path: &Path| itself.is_some() && inode(path) == itself;
    for place in places {
        let Ok(entries) = fs::read_dir(place) else {
            continue;
        };
        if is_recorded(&file) && directory == inode(place) {
            return true;
        }
        let mut paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        if paths.any(|path| is_recorded(&path) && is_itself(&path)) {
            return true;
        }
    }
    let captures = captures(places).0;
    captures.iter().any(|capture| {
        let index = Sidecar::path_of(&capture.path);
        is_itself(&capture.path) || is_itself(&index) || resolved(&index) == file
    })
}

/// Writes a file by way of a temporary one beside it; a pipe or a device is written as it is.
pub(crate) fn save(file: &Path, text: &str) -> io::Result<()> {
    if fs::metadata(file).is_ok_and(|about| !about.is_file()) {
        return fs::write(file, text);
    }
    let file = resolved(file);
    let Some(name) = file.file_name() else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}{PART}", std::process::id()));
    let temporary = file.with_file_name(temporary);
    let written = File::create_new(&temporary)
        .and_then(|mut part| part.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&temporary, &file));
    if written
        .as_ref()
        .is_err_and(|e| e.kind() != ErrorKind::AlreadyExists)
    {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Where a file is, or will be: a name without a directory is one of the current directory.
fn resolved(file: &Path) -> PathBuf {
    fs::canonicalize(file).unwrap_or_else(|_| Path::new(".").join(file))
}

/// By which a file is known, whatever its name; links are followed.
fn inode(path: &Path) -> Option<(u64, u64)> {
    let about = fs::metadata(path).ok()?;
    Some((about.dev(), about.ino()))
}

/// Whether a file has a name of those that recorders write, or that are read as captures.
fn is_recorded(path: &Path) -> bool {
    let (plain, _) = unpacked_path(path);
    let ends = |ending: &&str| plain.to_string_lossy().ends_with(ending);
    ENDINGS.iter().any(ends)
}

const ENDINGS: [&str; 6] = [
    ".pcapng",
    ".pcap",
    INDEX,
    ".state",
    ".lock",
    ".flows.parquet",
];

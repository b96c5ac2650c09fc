//! Which files a recording consists of, and what is known of their times without reading them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::ExtractError;
use crate::archive::Keys;
use crate::disk::lease;
use crate::index::{Sidecar, Trailer};
use crate::name::{Packing, SegmentName, unpacked_path};
use crate::read::open_source;

/// A capture file that was found, open and leased.
#[derive(Debug)]
pub struct Found {
    /// Its name.
    pub path: PathBuf,
    /// Held until it has been read: the recorder does not remove it before.
    pub file: io::Result<File>,
    /// What opens it if it is encrypted.
    pub keys: Keys,
    /// Its length when it was found, unpacked; what is written later does not count.
    pub len_bytes: u64,
    /// What its index says, if it is closed.
    pub trailer: Option<Trailer>,
    /// What its name says of its first packet.
    pub start_ns: Option<u64>,
}

/// The capture files in these directories (`.pcapng`, `.pcap`, and behind that `.zst`, `.age`), and these
/// files, sorted by name. A segment that is there packed and not packed is one file.
///
/// # Errors
/// [`ExtractError::Place`] if a directory cannot be read, or a file is not there.
pub fn find(places: &[PathBuf]) -> Result<Vec<Found>, ExtractError> {
    find_with(places, &Keys::default())
}

/// As [`find`]; what is encrypted is opened with these keys.
///
/// # Errors
/// As [`find`].
pub fn find_with(places: &[PathBuf], keys: &Keys) -> Result<Vec<Found>, ExtractError> {
    let mut paths = Vec::new();
    for place in places {
        let fail = |error| ExtractError::Place(place.clone(), error);
        if !fs::metadata(place).map_err(fail)?.is_dir() {
            paths.push(original(place));
            continue;
        }
        for entry in fs::read_dir(place).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            let (plain, _) = unpacked_path(&path);
            let capture = plain
                .extension()
                .is_some_and(|ext| ext == "pcapng" || ext == "pcap");
            if capture && path.is_file() {
                paths.push(original(&path));
            }
        }
    }
    paths.sort();
    paths.dedup();
    let mut list = Vec::with_capacity(paths.len());
    for plain in paths {
        let Some((path, file)) = open(&plain) else {
            continue; // recycled meanwhile
        };
        let opened = file.and_then(|file| {
            let len_bytes = open_source(file.try_clone()?, keys)?.len_bytes()?;
            Ok((file, len_bytes))
        });
        let (file, len_bytes) = match opened {
            Ok((file, len_bytes)) => (Ok(file), len_bytes),
            Err(error) => (Err(error), 0),
        };
        let name = path.file_name().and_then(|name| name.to_str());
        list.push(Found {
            trailer: Sidecar::trailer(&path, len_bytes, keys),
            start_ns: name.and_then(SegmentName::parse).map(|name| name.start_ns),
            keys: keys.clone(),
            file,
            len_bytes,
            path,
        });
    }
    Ok(list)
}

/// What a segment was called before it was packed; other files are what they are called.
fn original(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str());
    match name.and_then(SegmentName::parse) {
        Some(_) => unpacked_path(path).0,
        None => path.to_owned(),
    }
}

/// Opens a file; a segment may be packed by now. `None` if nothing of it is there.
fn open(plain: &Path) -> Option<(PathBuf, io::Result<File>)> {
    let is_gone = |file: &io::Result<File>| {
        let error = file.as_ref().err();
        error.is_some_and(|error| error.kind() == ErrorKind::NotFound)
    };
    let mut all = Packing::ALL.into_iter().map(|packing| {
        let mut path = plain.as_os_str().to_owned();
        path.push(packing.suffix());
        let path = PathBuf::from(path);
        let file = lease(&path);
        (path, file)
    });
    all.find(|(_, file)| !is_gone(file))
}

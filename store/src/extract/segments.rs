//! Which files a recording consists of, and what is known of their times without reading them.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use super::ExtractError;
use crate::disk::lease;
use crate::index::{Sidecar, Trailer};
use crate::name::SegmentName;

/// A capture file that was found, open and leased.
#[derive(Debug)]
pub struct Found {
    /// Its name.
    pub path: PathBuf,
    /// Held until it has been read: the recorder does not remove it before.
    pub file: io::Result<File>,
    /// Its length when it was found; what is written later does not count.
    pub len_bytes: u64,
    /// What its index says, if it is closed.
    pub trailer: Option<Trailer>,
    /// What its name says of its first packet.
    pub start_ns: Option<u64>,
}

/// The capture files in these directories (`.pcapng`, `.pcap`), and these files, sorted by name.
///
/// # Errors
/// [`ExtractError::Place`] if a directory cannot be read, or a file is not there.
pub fn find(places: &[PathBuf]) -> Result<Vec<Found>, ExtractError> {
    let mut paths = Vec::new();
    for place in places {
        let fail = |error| ExtractError::Place(place.clone(), error);
        if !fs::metadata(place).map_err(fail)?.is_dir() {
            paths.push(place.clone());
            continue;
        }
        for entry in fs::read_dir(place).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            let capture = path
                .extension()
                .is_some_and(|ext| ext == "pcapng" || ext == "pcap");
            if capture && path.is_file() {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths.dedup();
    let mut list = Vec::with_capacity(paths.len());
    for path in paths {
        let file = lease(&path);
        if file
            .as_ref()
            .is_err_and(|error| error.kind() == ErrorKind::NotFound)
        {
            continue; // recycled meanwhile
        }
        let len_bytes = file.as_ref().ok().and_then(|file| file.metadata().ok());
        let len_bytes = len_bytes.map_or(0, |data| data.len());
        let name = path.file_name().and_then(|name| name.to_str());
        list.push(Found {
            trailer: Sidecar::trailer(&path, len_bytes),
            start_ns: name.and_then(SegmentName::parse).map(|name| name.start_ns),
            file,
            len_bytes,
            path,
        });
    }
    Ok(list)
}

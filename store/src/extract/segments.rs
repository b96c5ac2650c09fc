//! Which files a recording consists of, and what is known of their times without reading them.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::ExtractError;
use crate::archive::Keys;
use crate::disk::lease;
use crate::index::{Sidecar, Trailer};
use crate::name::{Packing, SegmentName, unpacked_path};
use crate::read::{ReadError, Reader, open_source};

/// A capture file that is there.
#[derive(Debug)]
pub struct Capture {
    /// Its name.
    pub path: PathBuf,
    /// How it was when it was looked at.
    pub about: Metadata,
}

/// A place that cannot be read, and why.
pub type Unread = (PathBuf, io::Error);

/// The capture files in these directories (`.pcapng`, `.pcap`, and after that `.zst`, `.age`), and these
/// files, sorted by name; and the places that cannot be read. A segment that is there packed and not packed
/// is one file, and so is what has several names; of them a recorder's is taken. A segment that is named
/// as it was before it was packed is there.
pub fn captures(places: &[PathBuf]) -> (Vec<Capture>, Vec<Unread>) {
    let mut unread = Vec::new();
    let mut by_inode: HashMap<(u64, u64), Capture> = HashMap::new();
    for place in places {
        let captures = captures_in(place).unwrap_or_else(|error| {
            unread.push((place.clone(), error));
            Vec::new()
        });
        for capture in captures {
            let inode = (capture.about.dev(), capture.about.ino());
            let known = by_inode.get(&inode).map(|known| rank(&known.path));
            if known.is_none_or(|known| rank(&capture.path) < known) {
                by_inode.insert(inode, capture);
            }
        }
    }
    let mut all: Vec<Capture> = by_inode.into_values().collect();
    all.sort_by(|a, b| a.path.cmp(&b.path));
    (all, unread)
}

/// Which of several names of a file is taken: the lowest.
fn rank(path: &Path) -> (bool, &Path) {
    (segment_name(path).is_none(), path)
}

/// The capture files of one place.
fn captures_in(place: &Path) -> io::Result<Vec<Capture>> {
    let paths = match fs::metadata(place) {
        Ok(about) if about.is_dir() => {
            let entries = fs::read_dir(place)?.map(|entry| Ok(entry?.path()));
            entries.collect::<io::Result<Vec<_>>>()?
        }
        Ok(about) => {
            let path = place.to_owned();
            return Ok(vec![Capture { path, about }]);
        }
        Err(error) => {
            let packed = forms(&original(place)).find_map(look);
            return packed.map(|capture| vec![capture]).ok_or(error);
        }
    };
    let mut captures: BTreeMap<PathBuf, Capture> = BTreeMap::new();
    for path in paths {
        let (plain, _) = unpacked_path(&path);
        let named = plain
            .extension()
            .is_some_and(|ext| ext == "pcapng" || ext == "pcap");
        let Some(capture) = named.then(|| look(path)).flatten() else {
            continue;
        };
        // The least packed is read fastest.
        let len = |capture: &Capture| capture.path.as_os_str().len();
        let known = captures.get(&original(&capture.path));
        if known.is_none_or(|known| len(&capture) < len(known)) {
            captures.insert(original(&capture.path), capture);
        }
    }
    Ok(captures.into_values().collect())
}

/// A file, if it is there.
fn look(path: PathBuf) -> Option<Capture> {
    let about = fs::metadata(&path).ok().filter(Metadata::is_file)?;
    Some(Capture { path, about })
}

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
    /// What its index says, if it is closed and was cut off since.
    pub longer: Option<Trailer>,
    /// What its name says of its first packet.
    pub start_ns: Option<u64>,
}

impl Found {
    /// What is wrong with it as a whole: that it was cut off.
    pub fn problem(&self) -> Option<ReadError> {
        let longer = self.longer?;
        Some(ReadError::cut(&self.path, self.len_bytes, longer.len_bytes))
    }
}

/// The [`captures`] of these places, each opened when it is asked for: a file of which the caller keeps
/// nothing takes no descriptor. A recorder recycles the oldest first: who begins at the end has what is
/// left without a hole.
///
/// # Errors
/// [`ExtractError::Place`] if a directory cannot be read, or a file is not there.
pub fn find(
    places: &[PathBuf],
) -> Result<impl DoubleEndedIterator<Item = Found> + use<>, ExtractError> {
    find_with(places, &Keys::default())
}

/// As [`find`]; what is encrypted is opened with these keys.
///
/// # Errors
/// As [`find`].
pub fn find_with(
    places: &[PathBuf],
    keys: &Keys,
) -> Result<impl DoubleEndedIterator<Item = Found> + use<>, ExtractError> {
    let (captures, unread) = captures(places);
    if let Some((place, error)) = unread.into_iter().next() {
        return Err(ExtractError::Place(place, error));
    }
    let keys = keys.clone();
    let captures = captures.into_iter();
    Ok(captures.filter_map(move |capture| found(&original(&capture.path), &keys)))
}

/// `None` if it was recycled meanwhile.
fn found(plain: &Path, keys: &Keys) -> Option<Found> {
    let (path, file) = open(plain)?;
    let opened = file.and_then(|file| {
        let len_bytes = open_source(file.try_clone()?, keys)?.len_bytes()?;
        Ok((file, len_bytes))
    });
    let (file, len_bytes) = match opened {
        Ok((file, len_bytes)) => (Ok(file), len_bytes),
        Err(error) => (Err(error), 0),
    };
    let trailer = Sidecar::trailer(&path, len_bytes, keys);
    let longer = || {
        let file = file.as_ref().ok()?.try_clone().ok()?;
        let mut reader = Reader::of_with(file, path.clone(), keys);
        Sidecar::trailer_of_longer(&mut reader, keys)
    };
    Some(Found {
        longer: trailer.is_none().then(longer).flatten(),
        trailer,
        start_ns: segment_name(&path).map(|name| name.start_ns),
        keys: keys.clone(),
        file,
        len_bytes,
        path,
    })
}

/// Lets this process open as many files as it may: recordings have thousands of segments, and shells
/// begin with a soft limit of 1,024.
pub fn raise_open_files() {
    let most = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: most,
        maximum: most,
    };
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        log::warn!("cannot raise the limit of open files: {error}");
    }
}

fn segment_name(path: &Path) -> Option<SegmentName> {
    SegmentName::parse(path.file_name()?.to_str()?)
}

/// What a segment was called before it was packed; other files are what they are called.
fn original(path: &Path) -> PathBuf {
    match segment_name(path) {
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
    let mut all = forms(plain).map(|path| {
        let file = lease(&path);
        (path, file)
    });
    all.find(|(_, file)| !is_gone(file))
}

/// What a file that has this name before it is packed may be called.
fn forms(plain: &Path) -> impl Iterator<Item = PathBuf> {
    Packing::ALL.into_iter().map(move |packing| {
        let mut path = plain.as_os_str().to_owned();
        path.push(packing.suffix());
        path.into()
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::extract::{Extract, Query};
    use crate::filter::Filter;
    use crate::index::rebuild;
    use crate::read::tests::Maker;
    use vnplug_testing::TestDir;

    const NAME: &str = "r-0000000001-20261121T134501.000000000Z.pcapng";

    /// A capture file with a packet at each of these times.
    fn write(path: &Path, times: &[u64]) {
        let mut maker = Maker::ng(false);
        maker.interface(1, 9);
        for &ts_ns in times {
            maker.packet(0, ts_ns, &[7; 60]);
        }
        fs::write(path, &maker.bytes).unwrap();
    }

    fn paths(places: &[&Path]) -> Vec<PathBuf> {
        let places: Vec<PathBuf> = places.iter().map(|place| place.to_path_buf()).collect();
        let (captures, unread) = captures(&places);
        assert!(unread.is_empty(), "{unread:?}");
        captures.into_iter().map(|capture| capture.path).collect()
    }

    #[test]
    fn a_file_under_several_names_is_one_file() {
        let place = TestDir::new("names");
        let dir = place.0.join("rec");
        fs::create_dir(&dir).unwrap();
        write(&dir.join(NAME), &[1, 2, 3]);
        symlink(NAME, dir.join("latest.pcapng")).unwrap();
        fs::hard_link(dir.join(NAME), dir.join("zlast.pcapng")).unwrap();
        let other = place.0.join("again");
        symlink(&dir, &other).unwrap();
        let places = [&dir, &other, &other.join("latest.pcapng"), &dir.join(NAME)];
        let places = places.map(PathBuf::as_path);
        // The name under which its index is.
        assert_eq!(paths(&places[1..2]), [other.join(NAME)]);
        assert_eq!(paths(&places).len(), 1);
        let places = places.map(Path::to_path_buf);
        let everything = Query {
            from_ns: 0,
            to_ns: u64::MAX,
            filter: Filter::new("").unwrap(),
        };
        let mut extract = Extract::open(&places, everything).unwrap();
        while extract.read().unwrap().is_some() {}
        assert_eq!(extract.tally().packets, 3);
    }

    #[test]
    fn a_segment_that_was_packed_is_found_by_its_name() {
        let place = TestDir::new("was-packed");
        let plain = place.0.join(NAME);
        let packed = place.0.join(format!("{NAME}.zst"));
        fs::write(&packed, "packed").unwrap();
        assert_eq!(paths(&[&plain]), [packed.as_path()]);
        write(&plain, &[1]);
        // Not removed yet: it is there in both forms, and counts once.
        assert_eq!(paths(&[&place.0]), [plain.as_path()]);
        fs::write(place.0.join("old.pcapng.zst"), "of others").unwrap();
        assert_eq!(paths(&[&place.0]).len(), 2);
    }

    #[test]
    fn a_place_that_cannot_be_read_is_told_and_the_others_are() {
        let place = TestDir::new("unread");
        write(&place.0.join(NAME), &[1]);
        let missing = place
            .0
            .join("r-0000000002-20261121T134501.000000000Z.pcapng");
        let (captures, unread) = captures(&[missing.clone(), place.0.clone()]);
        assert_eq!(captures.len(), 1);
        assert_eq!(unread.len(), 1);
        assert_eq!(unread[0].0, missing);
        assert_eq!(unread[0].1.kind(), ErrorKind::NotFound);
    }

    #[test]
    fn segments_out_of_time_are_not_kept_open() {
        let place = TestDir::new("kept");
        for n in 0..20 {
            let name = format!("r-{n:010}-20261121T134501.{n:09}Z.pcapng");
            write(&place.0.join(&name), &[1000 * n, 1000 * n + 1]);
            assert!(rebuild(&place.0.join(&name)).unwrap());
        }
        let query = Query {
            from_ns: 5000,
            to_ns: 6000,
            filter: Filter::new("").unwrap(),
        };
        let extract = Extract::open(std::slice::from_ref(&place.0), query).unwrap();
        let open = fs::read_dir("/proc/self/fd").unwrap();
        let open = open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        let ours = open.filter(|path| path.starts_with(&place.0));
        assert!((1..=3).contains(&ours.count()));
        assert_eq!(extract.tally().segments, 1);
    }
}

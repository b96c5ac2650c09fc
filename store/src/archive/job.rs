//! What there is to do, and in which order.
//!
//! Each round looks at the directories again. A segment is
//!
//! | state | what is done |
//! |---|---|
//! | closed and plain | it is packed, the oldest first |
//! | packed, and still there plain | the plain one is removed; if somebody reads it, again a second later |
//! | one that cannot be packed | again later, when there is nothing else to do; that is the `trouble` |
//! | left | nothing more: it waited too long |
//!
//! What is beside a segment that is there in encrypted form only, and is not encrypted itself, is
//! *bare*: a crash left it, or somebody made it in the last moment. It is removed.

use std::collections::{HashMap, HashSet};
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::How;
use super::pack::{pack, remove};
use crate::disk::Disk;
use crate::manifest::Manifest;
use crate::name::{COMPANIONS, Packing, SegmentName, unpacked};
use crate::record::{LaneStatus, Ledger};

/// The work on a recording's closed segments.
pub(super) struct Job {
    /// `None`: closed segments stay as they are.
    how: Option<How>,
    recording: String,
    directories: Vec<PathBuf>,
    /// What each directory's closed files are noted in.
    manifests: Vec<Option<Arc<Manifest>>>,
    /// Files that cannot be read, and so are in no manifest.
    unread: HashSet<String>,
    /// Segments with numbers below it are of recorders before.
    first: u64,
    ledger: Arc<Ledger>,
    disk: Box<dyn Disk>,
    /// Segments that are left as they are.
    left: HashSet<SegmentName>,
    later: HashMap<SegmentName, Later>,
    ending: bool,
}

/// A closed segment that is there as it was recorded.
struct Closed {
    lane: usize,
    segment: SegmentName,
    len: u64,
    /// There is a packed one, too.
    packed: Option<Packing>,
}

/// A segment with which something is to be done later.
#[derive(Default)]
struct Later {
    /// When; `None`: not by this recorder.
    at: Option<Instant>,
    /// How long it was waited.
    wait: Duration,
    /// The packed one has its name on the disk.
    durable: bool,
    /// What is wrong; empty: somebody reads it.
    trouble: String,
}

impl Job {
    pub(super) fn new(
        how: Option<How>,
        recording: String,
        directories: Vec<(PathBuf, Option<Arc<Manifest>>)>,
        first: u64,
        ledger: Arc<Ledger>,
        disk: Box<dyn Disk>,
    ) -> Self {
        if how.is_some() {
            ledger.archive(|_| {});
        }
        let (directories, manifests) = directories.into_iter().unzip();
        Self {
            manifests,
            unread: HashSet::new(),
            how,
            recording,
            directories,
            first,
            ledger,
            disk,
            left: HashSet::new(),
            later: HashMap::new(),
            ending: false,
        }
    }

    /// Takes a closed file into its manifest, removes what is packed, and packs one segment; false if there was nothing to do. Once `ended`
    /// nothing is put off: each is tried once more.
    pub(super) fn round(
        &mut self,
        now: Instant,
        ended: bool,
        pulse: &mut dyn FnMut() -> bool,
    ) -> bool {
        let is_noted = self.note(pulse);
        if self.how.is_none() {
            return is_noted && pulse();
        }
        if ended && !self.ending {
            self.ending = true;
            for later in self.later.values_mut() {
                later.at = Some(now);
            }
        }
        let mut ready = self.look();
        ready.retain(|closed| match self.later.get(&closed.segment) {
            Some(later) => later.at.is_some_and(|at| at <= now),
            None => true,
        });
        let failed = |closed: &Closed| {
            let later = self.later.get(&closed.segment);
            later.is_some_and(|later| !later.trouble.is_empty())
        };
        let backlog = ready.iter().filter(|closed| closed.packed.is_none());
        let backlog = backlog.filter(|closed| !failed(closed)).count();
        let hurries = backlog > MOST_WAITING && !ended;
        // Those that failed last, or they would keep the others waiting.
        ready.sort_by_cached_key(failed);
        for closed in &ready {
            // If it is still there then.
            let later = self.later.entry(closed.segment.clone()).or_default();
            later.at = (!ended).then(|| now + LEASED);
            let result = match closed.packed {
                Some(packed) => self.remove(closed, packed),
                None => self.pack(closed, hurries, pulse),
            };
            if let Err(error) = result {
                self.put_off(closed, now, &error);
            }
            if closed.packed.is_none() || !pulse() {
                break;
            }
        }
        !ready.is_empty() || is_noted
    }

    /// Takes the first closed file into its manifest that has no line; true if there was one.
    fn note(&mut self, pulse: &mut dyn FnMut() -> bool) -> bool {
        for lane in 0..self.directories.len() {
            let Some(manifest) = self.manifests[lane].clone() else {
                continue;
            };
            let Ok(entries) = self.disk.list(&self.directories[lane]) else {
                continue;
            };
            let status = self.ledger.status();
            let known = status.lanes.get(lane);
            let is_new = |segment: &SegmentName, file: &str| {
                segment.recording == self.recording
                    && is_closed(known, self.first, segment)
                    && !manifest.has(file)
                    && !self.unread.contains(file)
            };
            let mut new: Vec<(u64, String)> = entries
                .into_iter()
                .filter_map(|entry| {
                    let segment = SegmentName::parse(&entry.name)?;
                    is_new(&segment, &entry.name).then_some((segment.sequence, entry.name))
                })
                .collect();
            new.sort();
            let Some((_, file)) = new.into_iter().next() else {
                continue;
            };
            match manifest.take_in(self.disk.as_mut(), &file, pulse) {
                // Recycled meanwhile.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => return false,
                Err(error) => {
                    log::warn!("{file} is not in the manifest: {error}");
                    self.unread.insert(file);
                }
                Ok(()) => {}
            }
            return true;
        }
        false
    }

    /// Tells how things are.
    pub(super) fn tell(&mut self) {
        if self.how.is_some() {
            self.look();
        }
    }

    /// Looks at the directories, and tells how things are. The closed segments that are not packed, or
    /// not yet removed, the oldest first.
    fn look(&mut self) -> Vec<Closed> {
        let status = self.ledger.status();
        let mut found = Vec::new();
        let mut trouble = String::new();
        for lane in 0..self.directories.len() {
            let known = status.lanes.get(lane);
            let dir = &self.directories[lane];
            let entries = match self.disk.list(dir) {
                Ok(entries) => entries,
                Err(error) => {
                    trouble = format!("{}: {error}", dir.display());
                    continue;
                }
            };
            let names: HashSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
            for entry in &entries {
                if is_bare(&names, &entry.name, &self.recording) {
                    let path = dir.join(&entry.name);
                    if let Err(error) = self.disk.remove(&path) {
                        trouble = format!("{}: {error}", entry.name);
                    }
                    continue;
                }
                let plain = unpacked(&entry.name).1 == Packing::default();
                let ours = |segment: &SegmentName| {
                    plain
                        && segment.recording == self.recording
                        && is_closed(known, self.first, segment)
                };
                let Some(segment) = SegmentName::parse(&entry.name).filter(ours) else {
                    continue;
                };
                let mut packings = Packing::ALL.into_iter().skip(1);
                let is_there = |packing: &Packing| {
                    names.contains(format!("{segment}{}", packing.suffix()).as_str())
                };
                let packed = packings.find(is_there);
                if packed.is_some() || !self.left.contains(&segment) {
                    found.push(Closed {
                        lane,
                        len: entry.len,
                        packed,
                        segment,
                    });
                }
            }
        }
        found.sort_by_key(|closed| closed.segment.sequence);
        let there: HashSet<&SegmentName> = found.iter().map(|closed| &closed.segment).collect();
        self.later.retain(|segment, _| there.contains(segment));
        let mut troubles = found
            .iter()
            .filter_map(|closed| self.later.get(&closed.segment).map(|later| &later.trouble))
            .filter(|trouble| !trouble.is_empty());
        if let Some(first) = troubles.next() {
            trouble = match troubles.count() {
                0 => first.clone(),
                more => format!("{first} (and {more} more)"),
            };
        }
        self.ledger.archive(|status| {
            status.waiting = found.len() as u64;
            status.trouble = trouble;
        });
        found
    }

    fn pack(
        &mut self,
        closed: &Closed,
        hurries: bool,
        pulse: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let segment = &closed.segment;
        let Some(mut how) = self.how.clone() else {
            return Ok(());
        };
        if let Some(manifest) = self.manifests[closed.lane].clone() {
            // What was recorded is known before it is there in another form only.
            manifest.take_in(self.disk.as_mut(), &segment.to_string(), pulse)?;
        }
        let compresses = how.level.is_some();
        if hurries {
            if how.recipients.is_empty() {
                self.left.insert(segment.clone());
                let left = self.left.len() as u64;
                log::warn!("{segment} stays as it is: compression is slower than the recording");
                self.ledger.archive(|status| status.left = left);
                return Ok(());
            }
            how.level = None;
        }
        let dir = &self.directories[closed.lane];
        let disk = self.disk.as_mut();
        let Some(after) = pack(disk, dir, (segment, closed.len), &how, pulse)? else {
            return Ok(());
        };
        let hurried = u64::from(hurries && compresses);
        self.ledger.archive(|status| {
            status.segments += 1;
            status.bytes_before += closed.len;
            status.bytes_after += after;
            status.hurried += hurried;
        });
        self.later.entry(segment.clone()).or_default().durable = true;
        self.remove(closed, how.packing())
    }

    fn remove(&mut self, closed: &Closed, packed: Packing) -> io::Result<()> {
        let dir = &self.directories[closed.lane];
        let later = self.later.entry(closed.segment.clone()).or_default();
        if !later.durable {
            // The one who made it may have been killed before.
            self.disk.sync_dir(dir)?;
            later.durable = true;
        }
        remove(self.disk.as_mut(), dir, &closed.segment, packed)?;
        later.trouble.clear();
        Ok(())
    }

    /// It did not go: again later, and then later still.
    fn put_off(&mut self, closed: &Closed, now: Instant, error: &io::Error) {
        if error.kind() == ErrorKind::Interrupted {
            return;
        }
        let later = self.later.entry(closed.segment.clone()).or_default();
        later.wait = (later.wait * 2).clamp(AGAIN, SELDOM);
        later.at = (!self.ending).then(|| now + later.wait);
        let trouble = format!("{}: {error}", closed.segment);
        if trouble != later.trouble {
            log::warn!("{trouble}");
            later.trouble = trouble;
        }
    }
}

/// Whether a segment is not written any more: of those from `first` on the directory's status tells.
fn is_closed(known: Option<&LaneStatus>, first: u64, segment: &SegmentName) -> bool {
    let at_work = known.and_then(|known| SegmentName::parse(&known.segment));
    let is_open = known.is_some_and(|known| known.open);
    match &at_work {
        _ if segment.sequence < first => true,
        Some(at_work) if segment.sequence == at_work.sequence => !is_open,
        Some(at_work) => segment.sequence < at_work.sequence,
        None => false,
    }
}

/// Whether a file is beside a segment of the recording that is there in encrypted form only.
fn is_bare(names: &HashSet<&str>, file: &str, recording: &str) -> bool {
    let Some(stem) = COMPANIONS.iter().find_map(|end| file.strip_suffix(end)) else {
        return false;
    };
    let is_there = |suffix: &str| names.contains(format!("{stem}{suffix}").as_str());
    let segment = SegmentName::parse(&format!("{stem}.pcapng"));
    segment.is_some_and(|segment| segment.recording == recording)
        && SEALED.iter().any(|suffix| is_there(suffix))
        && !OPEN.iter().any(|suffix| is_there(suffix))
}

const SEALED: [&str; 4] = [
    ".pcapng.zst.age",
    ".pcap.zst.age",
    ".pcapng.age",
    ".pcap.age",
];
const OPEN: [&str; 4] = [".pcapng", ".pcap", ".pcapng.zst", ".pcap.zst"];
/// A segment that somebody reads.
const LEASED: Duration = Duration::from_secs(1);
/// After an error,
pub(super) const AGAIN: Duration = Duration::from_secs(10);
/// and after many.
const SELDOM: Duration = Duration::from_secs(600);
/// With more segments waiting, the oldest stay as they are, or are encrypted only.
const MOST_WAITING: usize = 16;

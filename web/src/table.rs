//! What is known of the recordings in the given places, kept up to date.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vnplug_store::index::Chunk;
use vnplug_store::name::{Format, SegmentName};

use crate::bins::{Axis, Bins};
use crate::segment::Segment;
use crate::state::{self, State};
use crate::timeline::{Part, Timeline, gaps};

/// The recordings.
#[derive(Debug)]
pub(crate) struct Table {
    places: Vec<PathBuf>,
    segments: BTreeMap<PathBuf, Segment>,
    states: Vec<State>,
    /// Places that cannot be read.
    problems: Vec<String>,
    looked: Option<Instant>,
}

impl Table {
    /// Of directories, with all capture files in them, and capture files.
    pub(crate) fn new(places: Vec<PathBuf>) -> Self {
        Self {
            places,
            segments: BTreeMap::new(),
            states: Vec::new(),
            problems: Vec::new(),
            looked: None,
        }
    }

    /// Looks what is new, for about `budget`; what is left is looked at by the next calls. Does nothing
    /// soon after the last call, unless that left something.
    pub(crate) fn refresh(&mut self, budget: Duration) {
        let now = Instant::now();
        let fresh = self.looked.is_some_and(|at| now - at < FRESH);
        if fresh && self.pending_bytes() == 0 {
            return;
        }
        let deadline = now + budget;
        self.find();
        // Indexes first: they tell most for the least work. Then the ends of files at work, then files
        // without an index.
        for segment in self.segments.values_mut() {
            segment.look(false, deadline);
        }
        let mut rest: Vec<&mut Segment> = self.segments.values_mut().collect();
        rest.sort_by_key(|segment| segment.pending_bytes());
        for segment in rest {
            segment.look(true, deadline);
            if Instant::now() >= deadline {
                break;
            }
        }
        self.looked = Some(Instant::now());
    }

    /// Notes which files there are.
    fn find(&mut self) {
        self.problems.clear();
        let mut seen = BTreeSet::new();
        let mut states = Vec::new();
        for place in &self.places {
            let files = match capture_files(place) {
                Ok(files) => files,
                Err(error) => {
                    self.problems.push(format!("{}: {error}", place.display()));
                    continue;
                }
            };
            states.extend(state::in_directory(place));
            for path in files {
                let Ok(about) = fs::metadata(&path) else {
                    continue; // recycled meanwhile
                };
                match self.segments.get_mut(&path) {
                    Some(segment) => segment.update(&about),
                    None => {
                        let segment = Segment::new(path.clone(), &about);
                        self.segments.insert(path.clone(), segment);
                    }
                }
                seen.insert(path);
            }
        }
        self.segments.retain(|path, _| seen.contains(path));
        self.states = state::latest(states);
    }

    /// Bytes of files that are still to be looked at.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.segments.values().map(Segment::pending_bytes).sum()
    }

    /// The first and the last time of all packets.
    fn range(&self) -> Option<(u64, u64)> {
        let chunks = self.segments.values().flat_map(Segment::chunks);
        chunks
            .filter(|chunk| chunk.packets > 0)
            .fold(None, |range, chunk| {
                let (low, high) = range.unwrap_or((u64::MAX, 0));
                Some((low.min(chunk.low_ns), high.max(chunk.high_ns)))
            })
    }

    /// The timeline between two times, or of everything, in at most `bins` parts. Chunks that would be
    /// blurred over several parts are read, the widest first, up to [`EXACT_BYTES`] of them.
    pub(crate) fn timeline(&self, from: Option<u64>, to: Option<u64>, bins: u64) -> Timeline {
        let all = self.range();
        let (low, high) = all.unwrap_or((0, 0));
        let from_ns = from.unwrap_or(low);
        // A rate needs some time: what came in one instant is shown in a second.
        let end = match high == low {
            true => high.saturating_add(1_000_000_000),
            false => high.saturating_add(1),
        };
        let to_ns = to.unwrap_or(end);
        let axis = Axis::new(from_ns, to_ns, bins);
        let mut bins = Bins::new(axis);
        let segments: Vec<&Segment> = self.segments.values().collect();
        let inside = |chunk: &Chunk| chunk.low_ns < axis.to_ns && chunk.high_ns >= axis.from_ns;
        let mut blurred: Vec<(usize, Chunk)> = Vec::new();
        let mut covered: Vec<(u64, u64)> = Vec::new();
        for (number, segment) in segments.iter().enumerate() {
            for chunk in segment.chunks().filter(|chunk| chunk.packets > 0) {
                covered.push((chunk.low_ns, chunk.high_ns));
                if !inside(chunk) {
                    continue;
                }
                let width_ns = chunk.high_ns.saturating_sub(chunk.low_ns);
                if !bins.is_exact(chunk) && width_ns >= axis.bin_ns / 8 {
                    blurred.push((number, *chunk));
                } else {
                    bins.chunk(chunk);
                }
            }
        }
        read_exactly(&segments, blurred, &mut bins);
        self.add_losses(&mut bins);
        let parts = segments.iter().filter_map(|segment| part(segment));
        Timeline {
            axis,
            spread_ns: bins.spread_ns(),
            bins: bins.finish(),
            gaps: gaps(covered, &axis),
            parts: parts
                .filter(|part| part.from_ns < axis.to_ns && part.to_ns >= axis.from_ns)
                .collect(),
            all,
            pending_bytes: self.pending_bytes(),
            len_bytes: segments.iter().map(|segment| segment.len_bytes()).sum(),
            segments: segments.len(),
            states: self.states.clone(),
            problems: self.problems(),
        }
    }

    /// Losses that no packet tells of: those of the disk and before the daemon, and in classic pcap all.
    fn add_losses(&self, bins: &mut Bins) {
        for state in &self.states {
            let names = self.segments.values().filter_map(Segment::name);
            let told = names
                .filter(|name| name.recording == state.status.recording)
                .any(|name| name.format == Format::Pcapng);
            for loss in &state.status.losses {
                let counts = match loss.kind.as_str() {
                    "disk" | "source" => true,
                    "ring" => !told,
                    _ => false,
                };
                if counts {
                    bins.loss(loss.from_ns, loss.to_ns, loss.packets);
                }
            }
        }
    }

    fn problems(&self) -> Vec<String> {
        let damaged = self.segments.values().filter_map(Segment::problem);
        let damaged = damaged.take(MOST_PROBLEMS).map(str::to_owned);
        self.problems.iter().cloned().chain(damaged).collect()
    }
}

/// Adds chunks packet by packet as far as that is cheap, and the others as they are.
fn read_exactly(segments: &[&Segment], mut blurred: Vec<(usize, Chunk)>, bins: &mut Bins) {
    blurred.sort_by_key(|(_, chunk)| std::cmp::Reverse(chunk.high_ns - chunk.low_ns));
    let mut left = EXACT_BYTES;
    let mut exact: BTreeMap<usize, Vec<Chunk>> = BTreeMap::new();
    for (number, chunk) in blurred {
        let len_bytes = chunk.end - chunk.start;
        if len_bytes <= left {
            left -= len_bytes;
            exact.entry(number).or_default().push(chunk);
        } else {
            bins.chunk(&chunk);
        }
    }
    for (number, mut chunks) in exact {
        chunks.sort_by_key(|chunk| chunk.start);
        let mut packets = Vec::new();
        let read = segments[number].read(&chunks, |packet| {
            packets.push((packet.ts_ns, packet.wire_len, packet.lost));
        });
        match read {
            true => packets
                .iter()
                .for_each(|&(ts_ns, len, lost)| bins.packet(ts_ns, len, lost)),
            // Recycled meanwhile, or damaged.
            false => chunks.iter().for_each(|chunk| bins.chunk(chunk)),
        }
    }
}

/// A segment as a whole.
fn part(segment: &Segment) -> Option<Part> {
    let path = segment.path();
    let mut part = Part {
        name: path.file_name()?.to_string_lossy().into_owned(),
        directory: path.parent()?.display().to_string(),
        from_ns: u64::MAX,
        to_ns: 0,
        packets: 0,
        len_bytes: segment.len_bytes(),
    };
    for chunk in segment.chunks().filter(|chunk| chunk.packets > 0) {
        part.from_ns = part.from_ns.min(chunk.low_ns);
        part.to_ns = part.to_ns.max(chunk.high_ns);
        part.packets += chunk.packets;
    }
    (part.packets > 0).then_some(part)
}

/// The capture files of a place, as `vnplug extract` takes them: also segments that were packed, but not
/// twice while one is there in both forms.
fn capture_files(place: &Path) -> std::io::Result<Vec<PathBuf>> {
    if !fs::metadata(place)?.is_dir() {
        return Ok(vec![place.to_owned()]);
    }
    let mut files: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    for entry in fs::read_dir(place)? {
        let path = entry?.path();
        let Some(file) = path.file_name() else {
            continue;
        };
        let segment = file.to_str().and_then(SegmentName::parse);
        let capture = path
            .extension()
            .is_some_and(|ext| ext == "pcapng" || ext == "pcap");
        if !(capture || segment.is_some()) || !path.is_file() {
            continue;
        }
        let plain = segment.map_or_else(|| file.to_owned(), |name| name.to_string().into());
        let known = files.entry(plain).or_insert_with(|| path.clone());
        if path.as_os_str().len() < known.as_os_str().len() {
            *known = path;
        }
    }
    Ok(files.into_values().collect())
}

/// How long what was seen is new enough.
const FRESH: Duration = Duration::from_millis(300);
/// Of segments that are read for one timeline: 64 chunks.
const EXACT_BYTES: u64 = 16 << 20;
const MOST_PROBLEMS: usize = 20;

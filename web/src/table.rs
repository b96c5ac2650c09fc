//! What is known of the recordings in the given places, kept up to date.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use vnplug_store::extract::{Capture, Unread, captures};
use vnplug_store::index::Chunk;
use vnplug_store::manifest::holes;

use crate::bins::{Axis, Bins};
use crate::losses::{self, Missing};
use crate::segment::Segment;
use crate::state::{self, RecordingState};
use crate::timeline::{Covered, Part, Timeline};

/// The recordings.
#[derive(Debug)]
pub(crate) struct Table {
    places: Vec<PathBuf>,
    segments: BTreeMap<PathBuf, Segment>,
    states: Vec<RecordingState>,
    /// Places that cannot be read.
    problems: Vec<String>,
    /// Segments that are missing between others, or are not those that were closed.
    holes: Vec<String>,
    /// When those were looked for.
    holes_at: Option<Instant>,
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
            holes: Vec::new(),
            holes_at: None,
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
        let (files, unread) = captures(&self.places);
        let problem = |(place, error): &Unread| format!("{}: {error}", place.display());
        self.problems = unread.iter().map(problem).collect();
        let mut known = std::mem::take(&mut self.segments);
        for Capture { path, about } in files {
            let segment = match known.remove(&path) {
                Some(mut segment) => {
                    segment.update(&about);
                    segment
                }
                None => Segment::new(path.clone(), &about),
            };
            self.segments.insert(path, segment);
        }
        let mut states: Vec<RecordingState> = self
            .places
            .iter()
            .flat_map(|p| state::in_directory(p))
            .collect();
        // What is known of a place that is there, and cannot be read at this moment, stays.
        let mut kept = unread
            .iter()
            .filter(|(_, e)| e.kind() != ErrorKind::NotFound)
            .peekable();
        if kept.peek().is_some() {
            states.append(&mut self.states);
        }
        for (place, _) in kept {
            let known = known.extract_if(.., |path, _| path.starts_with(place));
            self.segments.extend(known);
        }
        self.states = state::latest(states);
        if self.holes_at.is_none_or(|at| at.elapsed() >= HOLES_EVERY) {
            self.holes = match holes(&self.places) {
                Ok(holes) => holes.iter().map(ToString::to_string).collect(),
                Err(error) => vec![format!("what is missing is not known: {error}")],
            };
            self.holes_at = Some(Instant::now());
        }
    }

    /// Bytes of files that are still to be looked at.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.segments.values().map(Segment::pending_bytes).sum()
    }

    /// The first and the last time of all packets, and of losses that no packet tells.
    fn range(&self, losses: &[Missing]) -> Option<(u64, u64)> {
        let segments = self.segments.values().filter_map(Segment::whole);
        let times = segments.map(|whole| (whole.low_ns, whole.high_ns));
        let losses = losses.iter().map(|loss| (loss.from_ns, loss.to_ns));
        times
            .chain(losses)
            .reduce(|(low, high), (from, to)| (low.min(from), high.max(to)))
    }

    /// The timeline between two times, or of everything, in at most `bins` parts. Chunks that would be
    /// blurred over several parts are read, the widest first, up to [`EXACT_BYTES`] of them.
    pub(crate) fn timeline(&self, from: Option<u64>, to: Option<u64>, bins: u64) -> Timeline {
        let losses = self.losses();
        let all = self.range(&losses);
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
        let mut covered = Covered::new(&axis);
        for (number, segment) in segments.iter().enumerate() {
            let Some(whole) = segment.whole() else {
                continue;
            };
            if !inside(whole) {
                covered.add((whole.low_ns, whole.high_ns));
                continue;
            }
            for chunk in segment.chunks().filter(|chunk| chunk.packets > 0) {
                let width_ns = chunk.high_ns.saturating_sub(chunk.low_ns);
                if !bins.is_exact(chunk) && width_ns >= axis.bin_ns / 8 {
                    blurred.push((number, *chunk));
                } else {
                    add_whole(chunk, &mut bins, &mut covered);
                }
            }
        }
        read_exactly(&segments, blurred, &mut bins, &mut covered);
        for loss in &losses {
            bins.loss(loss.from_ns, loss.to_ns, loss.packets);
        }
        let parts = segments.iter().filter_map(|segment| part(segment));
        Timeline {
            axis,
            spread_ns: bins.spread_ns(),
            bins: bins.finish(),
            gaps: covered.gaps(),
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

    /// Losses that no packet tells.
    fn losses(&self) -> Vec<Missing> {
        let of = |state: &RecordingState| {
            let segments = self.segments.values();
            let own = segments.filter(|segment| losses::is_of(segment, state, &self.states));
            losses::untold(state, &own.collect::<Vec<_>>())
        };
        self.states.iter().flat_map(of).collect()
    }

    fn problems(&self) -> Vec<String> {
        let damaged = self.segments.values().filter_map(Segment::problem);
        let damaged = damaged.take(MOST_PROBLEMS).map(str::to_owned);
        let holes = self.holes.iter().take(MOST_PROBLEMS);
        let known = self.problems.iter().chain(holes).cloned();
        known.chain(damaged).collect()
    }
}

/// Adds chunks packet by packet as far as that is cheap, and the others as they are.
fn read_exactly(
    segments: &[&Segment],
    mut blurred: Vec<(usize, Chunk)>,
    bins: &mut Bins,
    covered: &mut Covered,
) {
    blurred.sort_by_key(|(_, chunk)| std::cmp::Reverse(chunk.high_ns - chunk.low_ns));
    let mut left = EXACT_BYTES;
    let mut exact: BTreeMap<usize, Vec<Chunk>> = BTreeMap::new();
    for (number, chunk) in blurred {
        let len_bytes = chunk.end - chunk.start;
        if len_bytes <= left {
            left -= len_bytes;
            exact.entry(number).or_default().push(chunk);
        } else {
            add_whole(&chunk, bins, covered);
        }
    }
    for (number, mut chunks) in exact {
        chunks.sort_by_key(|chunk| chunk.start);
        let mut packets = Vec::new();
        // NB: what an old index does not have was taken from the state.
        let tells = segments[number].whole().is_some_and(|whole| whole.lost > 0);
        let read = segments[number].read(&chunks, |packet| {
            let lost = if tells { packet.lost } else { 0 };
            packets.push((packet.ts_ns, packet.wire_len, lost));
        });
        match read {
            true => packets.iter().for_each(|&(ts_ns, len, lost)| {
                covered.add((ts_ns, ts_ns));
                bins.packet(ts_ns, len, lost);
            }),
            // Recycled meanwhile, or damaged.
            false => chunks
                .iter()
                .for_each(|chunk| add_whole(chunk, bins, covered)),
        }
    }
}

/// Adds a chunk of which only the first and the last time are known.
fn add_whole(chunk: &Chunk, bins: &mut Bins, covered: &mut Covered) {
    covered.add((chunk.low_ns, chunk.high_ns));
    bins.chunk(chunk);
}

/// A segment as a whole.
fn part(segment: &Segment) -> Option<Part> {
    let (path, whole) = (segment.path(), segment.whole()?);
    Some(Part {
        name: path.file_name()?.to_string_lossy().into_owned(),
        directory: path.parent()?.display().to_string(),
        from_ns: whole.low_ns,
        to_ns: whole.high_ns,
        packets: whole.packets,
        len_bytes: segment.len_bytes(),
    })
}

/// How long what was seen is new enough.
const FRESH: Duration = Duration::from_millis(300);
/// Of segments that are read for one timeline: 64 chunks.
const EXACT_BYTES: u64 = 16 << 20;
const MOST_PROBLEMS: usize = 20;
/// How often manifests and the numbers of segments are looked at.
const HOLES_EVERY: Duration = Duration::from_secs(5);

//! What a range of time lost: what the packets in it tell, what statistics in the files tell, and what the
//! recorders list in `NAME.state`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use vnplug_frame::capfile::write::pcapng::{GAP_COMMENT, SOURCE_LOSS_COMMENT};

use super::segments::Found;
use crate::index::Chunk;
use crate::name::{SegmentName, time};
use crate::read::{Note, Packet};
use crate::record::{Loss, Status};

/// What a range of time lost, as far as it is known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Losses {
    /// What the packets in the range say of packets that are missing before them, also those that the filter
    /// leaves out.
    pub told: Marks,
    /// The part of that which the filter leaves out; no packet that is handed out tells it.
    pub left_out: Marks,
    /// What recorders list of the range, at least in part, oldest first: the latest 256 losses of a recording.
    /// They tell again what the packets tell.
    pub listed: Vec<Loss>,
    /// Losses that are no longer in such a list.
    pub older: u64,
    /// What statistics in the files say and no list has: when, and in words.
    pub noted: BTreeSet<(u64, u64, String)>,
}

/// What packets say is missing before them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks {
    /// This many packets (`epb_dropcount`).
    pub packets: u64,
    /// How many gaps are of a size that nobody knows.
    pub gaps: u64,
    /// The times of the first and the last packet that says so.
    pub range_ns: Option<(u64, u64)>,
}

impl Marks {
    /// Whether nothing is missing.
    pub fn is_none(&self) -> bool {
        self.packets == 0 && self.gaps == 0
    }

    fn add(&mut self, packets: u64, gaps: u64, from_ns: u64, to_ns: u64) {
        if packets == 0 && gaps == 0 {
            return;
        }
        self.packets = self.packets.saturating_add(packets);
        self.gaps += gaps;
        let (from, to) = self.range_ns.unwrap_or((from_ns, to_ns));
        self.range_ns = Some((from.min(from_ns), to.max(to_ns)));
    }
}

impl Losses {
    /// What the states in these places list of a range.
    pub(super) fn listed(places: &[PathBuf], spans: &Spans, (from_ns, to_ns): (u64, u64)) -> Self {
        let mut losses = Self::default();
        for status in states(places).into_values() {
            let (low, high) = match places.iter().any(|place| place.is_dir()) {
                true => (0, u64::MAX),
                // Of files that are named themselves their own time counts.
                false => spans.of(&status.recording),
            };
            let (from_ns, to_ns) = (from_ns.max(low), to_ns.min(high));
            let all = status.losses.into_iter();
            let within = |loss: &Loss| loss.from_ns < to_ns && loss.to_ns >= from_ns;
            losses.listed.extend(all.filter(within));
            losses.older = losses.older.saturating_add(status.older_losses);
        }
        losses.listed.sort_by_key(|loss| (loss.from_ns, loss.to_ns));
        losses
    }

    /// Takes note of a packet in the range.
    #[inline]
    pub(super) fn packet(&mut self, packet: &Packet<'_>, is_left_out: bool) {
        if packet.lost == 0 && packet.comment.is_empty() {
            return;
        }
        let is_gap = |line: &str| line == GAP_COMMENT || line == SOURCE_LOSS_COMMENT;
        let gaps = packet.comment.lines().filter(|line| is_gap(line)).count();
        self.told
            .add(packet.lost, gaps as u64, packet.ts_ns, packet.ts_ns);
        if is_left_out {
            self.left_out
                .add(packet.lost, gaps as u64, packet.ts_ns, packet.ts_ns);
        }
    }

    /// Takes note of a chunk in the range that is left out.
    pub(super) fn chunk(&mut self, chunk: &Chunk) {
        self.told.add(chunk.lost, 0, chunk.low_ns, chunk.high_ns);
        self.left_out
            .add(chunk.lost, 0, chunk.low_ns, chunk.high_ns);
    }

    /// Takes note of statistics in a file, if they say that packets are missing in the range.
    pub(super) fn note(&mut self, note: Note, path: &Path, from_ns: u64, to_ns: u64) {
        let (from, to) = note.range_ns.unwrap_or((note.at_ns, note.at_ns));
        // The totals of a recorder's segment sum up what its packets tell.
        let is_segment = || {
            let name = path.file_name().and_then(|name| name.to_str());
            name.and_then(SegmentName::parse).is_some()
        };
        let text = match note.dropped {
            _ if note.is_loss() => note.comment,
            Some(dropped @ 1..) if !is_segment() => format!(
                "{dropped} packets were lost between {} and {}, as {} says",
                time(from),
                time(to),
                path.display()
            ),
            _ => return,
        };
        let is_listed = self
            .listed
            .iter()
            .any(|loss| loss.from_ns <= from && to <= loss.to_ns && text.ends_with(&loss.reason));
        if from < to_ns && to >= from_ns && !is_listed && self.noted.len() < MOST_NOTED {
            self.noted.insert((from, to, text));
        }
    }

    /// What the packets that are handed out do not tell, in words, with its range of time and, if it is known,
    /// the number that nothing else tells.
    pub fn untold(&self) -> Vec<((u64, u64), Option<u64>, String)> {
        let listed = self.listed.iter().map(|loss| {
            let range = (loss.from_ns, loss.to_ns);
            (range, None, loss.words())
        });
        let noted = self.noted.iter();
        let noted = noted.map(|(from, to, text)| ((*from, *to), None, text.clone()));
        let Marks {
            packets,
            gaps,
            range_ns,
        } = self.left_out;
        let left_out = range_ns.map(|range| {
            let text = format!(
                "{} before packets that the filter left out",
                amount(packets, gaps)
            );
            (range, Some(packets), text)
        });
        listed.chain(noted).chain(left_out).collect()
    }

    /// Whether nothing is known to be missing.
    pub fn is_none(&self) -> bool {
        self.told.is_none() && self.listed.is_empty() && self.noted.is_empty()
    }
}

impl Losses {
    /// What is missing, a sentence for each who says so; empty if nothing is known to be.
    pub fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        let Marks { packets, gaps, .. } = self.told;
        if !self.told.is_none() {
            let left_out = match self.left_out {
                Marks {
                    packets: 0,
                    gaps: 0,
                    ..
                } => String::new(),
                Marks { packets, gaps, .. } => {
                    format!(
                        "; {} of that before packets that the filter left out",
                        amount(packets, gaps)
                    )
                }
            };
            words.push(format!(
                "lost in this range, as its packets tell: {}{left_out}",
                amount(packets, gaps)
            ));
        }
        if !self.listed.is_empty() {
            let mut kinds: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
            for loss in &self.listed {
                let (packets, gaps) = kinds.entry(&loss.kind).or_default();
                *packets = packets.saturating_add(loss.packets);
                *gaps += u64::from(loss.is_gap());
            }
            let kinds: Vec<String> = kinds
                .into_iter()
                .map(|(kind, (packets, gaps))| match gaps {
                    0 => format!("{} ({kind})", amount(packets, 0)),
                    gaps => amount(0, gaps),
                })
                .collect();
            words.push(format!(
                "lost in this range or next to it, as the recorder lists it: {}",
                kinds.join(", ")
            ));
        }
        words.extend(
            self.noted
                .iter()
                .take(MOST_WORDS)
                .map(|(_, _, text)| text.clone()),
        );
        if self.noted.len() > MOST_WORDS {
            words.push(format!(
                "and {} more losses that the files tell",
                self.noted.len() - MOST_WORDS
            ));
        }
        if self.older > 0 && !self.is_none() {
            words.push(format!(
                "{} older losses are no longer in the recorder's list",
                self.older
            ));
        }
        words
    }
}

/// `packets`, and `gaps` whose packets nobody counted, for people.
fn amount(packets: u64, gaps: u64) -> String {
    let some = |count: u64, one: &str, more: &str| match count {
        1 => format!("1 {one}"),
        count => format!("{count} {more}"),
    };
    let packets = (packets > 0 || gaps == 0).then(|| some(packets, "packet", "packets"));
    let gaps = (gaps > 0).then(|| some(gaps, "gap of unknown size", "gaps of unknown size"));
    let parts: Vec<String> = packets.into_iter().chain(gaps).collect();
    parts.join(" and ")
}

/// The time of the segments of each recording: from the first to the last packet.
#[derive(Debug, Default)]
pub(super) struct Spans(BTreeMap<String, (u64, u64)>);

impl Spans {
    pub(super) fn add(&mut self, found: &Found) {
        let name = found.path.file_name().and_then(|name| name.to_str());
        let Some(name) = name.and_then(SegmentName::parse) else {
            return;
        };
        let (first, last) = match found.trailer.or(found.longer) {
            Some(trailer) => (trailer.low_ns, trailer.high_ns.saturating_add(1)),
            None => (found.start_ns.unwrap_or(0), u64::MAX),
        };
        let (low, high) = self.0.entry(name.recording).or_insert((u64::MAX, 0));
        (*low, *high) = ((*low).min(first), (*high).max(last));
    }

    /// Nothing of a recording of which there is no segment.
    fn of(&self, recording: &str) -> (u64, u64) {
        self.0.get(recording).copied().unwrap_or((u64::MAX, 0))
    }
}

/// The latest state of each recording in these directories, or beside these files.
fn states(places: &[PathBuf]) -> BTreeMap<(String, Vec<String>), Status> {
    let mut states: BTreeMap<(String, Vec<String>), Status> = BTreeMap::new();
    let dirs: BTreeSet<PathBuf> = places
        .iter()
        .map(|place| match place.is_dir() {
            true => place.clone(),
            false => match place.parent() {
                Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
                _ => PathBuf::from("."),
            },
        })
        .collect();
    for dir in dirs {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            // NB: opening a pipe would wait for a writer.
            let about = fs::metadata(&path);
            let is_state = path.extension().is_some_and(|ext| ext == "state")
                && about.is_ok_and(|about| about.is_file() && about.len() <= MOST_BYTES);
            let state = is_state.then(|| fs::read(&path).ok()).flatten();
            let Some(state) = state.and_then(|bytes| Status::from_json(&bytes)) else {
                continue;
            };
            // The directories of a recording have the same state; the latest counts.
            let lanes = state.lanes.iter().map(|lane| lane.directory.clone());
            let key = (state.recording.clone(), lanes.collect());
            let age = |state: &Status| (state.run.number, state.revision);
            let known = states.entry(key).or_default();
            if age(&state) >= age(known) {
                *known = state;
            }
        }
    }
    states
}

/// No state is longer.
const MOST_BYTES: u64 = 16 << 20;
/// Losses that files tell and no list has: this many are kept.
const MOST_NOTED: usize = 4096;
/// And this many are said.
const MOST_WORDS: usize = 10;

#[cfg(test)]
mod tests;

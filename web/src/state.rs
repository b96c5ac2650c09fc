//! What recorders say of their recordings in `NAME.state`: the durable mark, the counters, the losses.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vnplug_store::record::{Earlier, LaneStatus, Loss, Status};

/// One recording, as its recorder described it last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RecordingState {
    pub(crate) status: Status,
    /// When this was written, nanoseconds since 1970.
    written_ns: u64,
    /// Where it was found.
    places: Vec<PathBuf>,
}

impl RecordingState {
    fn parse(text: &[u8]) -> Option<Self> {
        let all: Value = serde_json::from_slice(text).ok()?;
        Some(Self {
            status: Status::from_json(text)?,
            written_ns: all["written_ns"].as_u64().unwrap_or(0),
            places: Vec::new(),
        })
    }

    /// Whether it was found in this directory.
    pub(crate) fn is_in(&self, directory: &Path) -> bool {
        self.places.iter().any(|place| place == directory)
    }

    /// What the page shows.
    pub(crate) fn to_json(&self) -> Value {
        let Self {
            status, written_ns, ..
        } = self;
        let Earlier {
            lost_ring,
            lost_source,
            lost_disk,
            lost_unknown,
            ..
        } = status.earlier;
        json!({
            "recording": status.recording,
            "written_ns": written_ns.to_string(),
            "mark_ns": status.mark_ns.to_string(),
            "mark_packets": status.mark,
            "run": status.run.number,
            "ended": status.run.ended,
            "taken": status.taken,
            "durable": status.durable,
            "buffered": status.buffered,
            "lost": {
                "ring": status.lost_ring, "source": status.lost_source,
                "disk": status.lost_disk, "unknown": status.lost_unknown,
            },
            "earlier": {
                "taken": status.earlier.taken,
                "lost": {
                    "ring": lost_ring, "source": lost_source,
                    "disk": lost_disk, "unknown": lost_unknown,
                },
            },
            "disks": status.lanes.iter().map(disk).collect::<Vec<_>>(),
            "losses": status.losses.iter().map(loss).collect::<Vec<_>>(),
        })
    }

    /// Whether both are of the same recording, each in another of its directories.
    fn is_with(&self, other: &Self) -> bool {
        let directories = |state: &Self| -> Vec<String> {
            let lanes = state.status.lanes.iter();
            lanes.map(|lane| lane.directory.clone()).collect()
        };
        self.status.recording == other.status.recording && directories(self) == directories(other)
    }
}

fn disk(lane: &LaneStatus) -> Value {
    json!({ "directory": lane.directory, "paused": lane.paused, "recycled": lane.recycled })
}

fn loss(loss: &Loss) -> Value {
    json!({
        "from_ns": loss.from_ns.to_string(), "to_ns": loss.to_ns.to_string(),
        "packets": loss.packets, "kind": loss.kind, "reason": loss.reason,
    })
}

/// The states in a directory.
pub(crate) fn in_directory(dir: &Path) -> Vec<RecordingState> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Vec::new();
    };
    let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let states = paths.filter(|path| path.extension().is_some_and(|ext| ext == "state"));
    let states = states.filter_map(|path| read(&path));
    let found = states.map(|state| RecordingState {
        places: vec![dir.to_owned()],
        ..state
    });
    found.collect()
}

fn read(path: &Path) -> Option<RecordingState> {
    // NB: opening a pipe would wait for a writer.
    if !fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    let file = fs::File::open(path).ok()?;
    file.take(MAX_BYTES).read_to_end(&mut text).ok()?;
    RecordingState::parse(&text)
}

/// One state per recording: of a recording over several directories the latest.
pub(crate) fn latest(all: Vec<RecordingState>) -> Vec<RecordingState> {
    let age = |state: &RecordingState| (state.status.run.number, state.status.revision);
    let mut list: Vec<RecordingState> = Vec::new();
    for mut state in all {
        let Some(other) = list.iter_mut().find(|other| other.is_with(&state)) else {
            list.push(state);
            continue;
        };
        if age(other) < age(&state) {
            std::mem::swap(other, &mut state);
        }
        other.places.append(&mut state.places);
    }
    list.sort_by(|a, b| a.status.recording.cmp(&b.status.recording));
    list
}

/// More than a state with all its losses has.
const MAX_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_of_a_recording_counts() {
        let status = |revision, recording: &str| Status {
            recording: recording.into(),
            revision,
            mark_ns: 1_795_268_701_000_000_001,
            ..Status::default()
        };
        let [a, b, c] = [status(1, "a"), status(2, "a"), status(1, "c")]
            .map(|status| RecordingState::parse(status.to_json(9).as_bytes()).unwrap());
        assert_eq!(
            (a.written_ns, a.status.mark_ns),
            (9, 1_795_268_701_000_000_001)
        );
        let list = latest(vec![b.clone(), c.clone(), a]);
        assert_eq!(list, [b, c]);
    }

    #[test]
    fn anything_else_is_nothing_or_a_state_without_numbers() {
        assert_eq!(RecordingState::parse(b"{"), None);
        assert_eq!(RecordingState::parse(b"[1]"), None);
        let odd = br#"{"version":1,"recording":"x","losses":[1,{"from":"y"}],"written_ns":-1}"#;
        let state = RecordingState::parse(odd).unwrap();
        assert_eq!((state.written_ns, state.status.taken), (0, 0));
    }
}

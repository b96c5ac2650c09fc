//! The table `losses`: what recorders say is missing, from their `NAME.state`.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use datafusion::arrow::array::{
    Int64Builder, RecordBatch, StringBuilder, TimestampNanosecondBuilder,
};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use vnplug_store::extract::captures;
use vnplug_store::record::Status;

use crate::catalog::Scope;
use crate::failure::Failure;
use crate::rows::{UTC, count, stamp, time_type};

/// The columns of `losses`.
pub(crate) fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("recording", DataType::Utf8, false),
        Field::new("first", time_type(), true),
        Field::new("last", time_type(), true),
        Field::new("packets", DataType::Int64, true),
        Field::new("kind", DataType::Utf8, true),
        Field::new("reason", DataType::Utf8, true),
    ]))
}

/// The names of the segments that recorders write to, as their states tell: those of recorders that were
/// killed, too.
pub(crate) fn at_work(scope: &Scope) -> HashSet<String> {
    // What cannot be read is told by [`load`].
    let states = state_files(scope)
        .into_iter()
        .filter_map(|file| read(&file).ok());
    let states = states.filter(|state| !state.run.ended);
    states
        .flat_map(|state| state.lanes.into_iter().map(|lane| lane.segment))
        .collect()
}

/// The losses that the states in the scope's directories tell, and what could not be read.
///
/// # Errors
/// [`Failure`] if Arrow does not take them.
pub(crate) fn load(scope: &Scope) -> Result<(RecordBatch, Vec<String>), Failure> {
    let (_, unread) = captures(&scope.places);
    let told = |(place, error): (PathBuf, _)| format!("{}: {error}", place.display());
    let mut problems: Vec<String> = unread.into_iter().map(told).collect();
    // The directories of a recording have copies of the same state; the latest counts.
    let mut states: BTreeMap<(String, Vec<String>), Status> = BTreeMap::new();
    for file in state_files(scope) {
        match read(&file) {
            Ok(state) => {
                let directories = state.lanes.iter().map(|lane| lane.directory.clone());
                let key = (state.recording.clone(), directories.collect());
                let latest = states.entry(key).or_default();
                let age = |state: &Status| (state.run.number, state.revision);
                if age(&state) >= age(latest) {
                    *latest = state;
                }
            }
            Err(why) => problems.push(format!("{}: {why}", file.display())),
        }
    }
    let mut recordings = StringBuilder::new();
    let mut first = TimestampNanosecondBuilder::new();
    let mut last = TimestampNanosecondBuilder::new();
    let mut packets = Int64Builder::new();
    let (mut kinds, mut reasons) = (StringBuilder::new(), StringBuilder::new());
    for state in states.values() {
        for loss in &state.losses {
            if loss.from_ns >= scope.to_ns || loss.to_ns < scope.from_ns {
                continue;
            }
            recordings.append_value(&state.recording);
            first.append_value(stamp(loss.from_ns));
            last.append_value(stamp(loss.to_ns));
            packets.append_option((!loss.is_gap()).then(|| count(loss.packets)));
            kinds.append_value(&loss.kind);
            reasons.append_value(&loss.reason);
        }
        if state.older_losses > 0 {
            recordings.append_value(&state.recording);
            first.append_null();
            last.append_null();
            packets.append_value(count(state.older_losses));
            kinds.append_null();
            reasons.append_value("older than the others");
        }
    }
    let batch = RecordBatch::try_new(
        schema(),
        vec![
            Arc::new(recordings.finish()),
            Arc::new(first.finish().with_timezone(UTC)),
            Arc::new(last.finish().with_timezone(UTC)),
            Arc::new(packets.finish()),
            Arc::new(kinds.finish()),
            Arc::new(reasons.finish()),
        ],
    )?;
    Ok((batch, problems))
}

/// The states of the recordings in the scope's directories, and beside its files.
fn state_files(scope: &Scope) -> Vec<PathBuf> {
    let dir = |place: &PathBuf| match place.is_dir() {
        true => place.clone(),
        false => match place.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        },
    };
    let mut dirs: Vec<PathBuf> = scope.places.iter().map(dir).collect();
    dirs.sort();
    dirs.dedup();
    // A place that cannot be read is told with the segments, and by [`load`].
    let entries = dirs
        .iter()
        .filter_map(|dir| fs::read_dir(dir).ok())
        .flatten();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|ext| ext == "state") && path.is_file())
        .collect();
    files.sort();
    files
}

fn read(path: &Path) -> Result<Status, String> {
    let about = fs::metadata(path).map_err(|error| error.to_string())?;
    if about.len() > MOST_BYTES {
        return Err("is no state of a recorder: too long".into());
    }
    let bytes = fs::read(path).map_err(|error| error.to_string())?;
    Status::from_json(&bytes).ok_or_else(|| "is no state of a recorder".to_owned())
}

/// A state has at most 256 losses.
const MOST_BYTES: u64 = 16 << 20;

//! `vnplug record --status`: what recorders say of their recordings.

use std::path::{Path, PathBuf};

use vnplug_store::name::time;
use vnplug_store::record::{LaneStatus, Status};

use super::{options, report};
use crate::failure::{Failure, OK, Outcome};
use crate::out;
use crate::text::{counted, escape, grouped};

/// Shows the states in a directory: in words, or as they are.
pub(super) fn show(dir: &Path, json: bool) -> Outcome {
    let about = |error| Failure::about(dir.display(), error);
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .map_err(about)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "state")
        })
        .collect();
    files.sort();
    if files.is_empty() {
        return Err(Failure::about(
            dir.display(),
            "no recording has its state here",
        ));
    }
    for file in files {
        let about = |what: &str| Failure::about(file.display(), what);
        let bytes = std::fs::read(&file).map_err(|error| about(&error.to_string()))?;
        if json {
            let state: serde_json::Value =
                serde_json::from_slice(&bytes).map_err(|error| about(&error.to_string()))?;
            out::raw(&format!("{state:#}\n"))?;
        } else {
            let status = Status::from_json(&bytes);
            out::raw(&words(
                &status.ok_or_else(|| about("is no recording's state"))?,
            ))?;
        }
    }
    Ok(OK)
}

/// A state as one line of JSON.
pub(super) fn line(status: &Status) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let text = status.to_json(now.unwrap_or_default().as_nanos() as u64);
    let state: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    format!("{state}\n")
}

/// A state in words, escaped.
fn words(status: &Status) -> String {
    let mut text = String::new();
    let mut say = |line: &str| {
        text += &escape(line);
        text.push('\n');
    };
    let ago = options::since(status.heartbeat_ns);
    let how = match status.run.ended {
        true => "ended".to_owned(),
        false if status.heartbeat_ns == 0 => "has begun".to_owned(),
        false => format!("at work: the last sign of life is {ago} old"),
    };
    say(&format!("{}: {how}", status.recording));
    let since = match status.run.since_ns {
        0 => "no packet is recorded yet".to_owned(),
        since => format!("recording since {}", time(since)),
    };
    say(&format!("  run {}, {since}", status.run.number));
    say(&format!("  {}", report::summary(status)));
    say(&format!(
        "  {} taken, {}, {} on the way to the disk",
        counted(status.taken, "packet"),
        counted(status.taken_bytes, "byte"),
        grouped(status.buffered),
    ));
    let earlier = &status.earlier;
    if earlier.runs > 0 {
        let lost =
            earlier.lost_ring + earlier.lost_source + earlier.lost_disk + earlier.lost_unknown;
        say(&format!(
            "  before: {}, {} durable, {} lost, {}",
            counted(earlier.runs, "run"),
            counted(earlier.durable, "packet"),
            grouped(lost),
            counted(earlier.gaps, "gap"),
        ));
    }
    for LaneStatus {
        directory,
        segment,
        recycled,
        poisoned,
        paused,
        ..
    } in &status.lanes
    {
        let segment = if segment.is_empty() {
            "no file yet"
        } else {
            segment
        };
        let paused = match paused.as_str() {
            "" => String::new(),
            paused => format!(", PAUSED: {paused}"),
        };
        say(&format!(
            "  {directory}: {segment}, {} removed, {} given up{paused}",
            counted(*recycled, "old file"),
            grouped(*poisoned),
        ));
    }
    let older = status.losses.len().saturating_sub(MOST_LOSSES) as u64 + status.older_losses;
    if older > 0 {
        say(&format!(
            "  {} older losses (--json tells more)",
            grouped(older)
        ));
    }
    for loss in status.losses.iter().rev().take(MOST_LOSSES).rev() {
        say(&format!("  lost ({}): {}", loss.kind, loss.words()));
    }
    text
}

/// The latest losses that are shown.
const MOST_LOSSES: usize = 10;

#[cfg(test)]
mod tests {
    use vnplug_store::record::{Loss, Run};

    use super::*;

    #[test]
    fn a_state_is_told_in_words() {
        let lane = LaneStatus {
            directory: "/data\u{1b}[2J".into(),
            paused: "No space left".into(),
            ..LaneStatus::default()
        };
        let loss = Loss {
            packets: 12,
            kind: "disk".into(),
            reason: "it was full".into(),
            ..Loss::default()
        };
        let status = Status {
            recording: "edge".into(),
            run: Run {
                number: 2,
                ended: true,
                ..Run::default()
            },
            lanes: vec![lane],
            losses: vec![loss; 12],
            ..Status::default()
        };
        let words = words(&status);
        for expected in [
            "edge: ended\n",
            "  run 2, ",
            "0 packets recorded",
            "PAUSED: No space left",
            "2 older losses",
            "lost (disk): 12 packets between",
        ] {
            assert!(words.contains(expected), "{expected}: {words}");
        }
        assert!(!words.contains('\u{1b}'));
        assert_eq!(line(&status).lines().count(), 1);
    }
}

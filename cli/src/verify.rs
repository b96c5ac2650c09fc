//! `vnplug verify`: recordings held against their manifests.

use std::path::PathBuf;

use clap::Args;
use serde_json::json;
use vnplug_store::manifest::{Hole, Verdict, Verification, holes, verify};

use crate::failure::{Failure, OK, Outcome};
use crate::out;
use crate::text::grouped;

/// Reads recordings whole, and holds every segment against the manifest.
#[derive(Debug, Args)]
#[command(after_help = "\
Name all directories of a recording: the numbers of its segments go over all of them.
The exit code is 1 if a segment is missing, changed, or cannot be read, or the manifest was changed.

Example: vnplug verify /data1/rec /data2/rec --head 9f86d081…")]
pub(crate) struct Verify {
    /// Recordings' directories
    #[arg(required = true, value_name = "DIR")]
    places: Vec<PathBuf>,
    /// The hash of a manifest's line, as it was said and noted before: it must be there still
    #[arg(long, value_name = "HASH")]
    head: Option<String>,
    /// A line of JSON for each directory
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub(crate) fn run(&self) -> Outcome {
        let mut all = Vec::new();
        let mut progress = out::Progress::new(self.json);
        let mut files = 0_u64;
        for dir in &self.places {
            if !dir.is_dir() {
                return Err(Failure::about(dir.display(), "no such directory"));
            }
            let found = verify(dir, self.head.as_deref(), &mut |file| {
                files += 1;
                progress.tell(|| format!("verifying {file}, file {}", grouped(files)));
            });
            let found = found.map_err(|error| Failure::about(dir.display(), error))?;
            if found.is_empty() {
                return Err(Failure::about(dir.display(), "no recording is here"));
            }
            all.extend(found);
        }
        progress.end();
        for one in &all {
            match self.json {
                true => out::line(&in_json(one))?,
                false => in_words(one)?,
            }
        }
        // Those between the directories; what one directory lacks was told with it.
        let holes = match self.places.len() {
            1 => Vec::new(),
            _ => holes(&self.places)?,
        };
        for hole in &holes {
            self.hole(hole)?;
        }
        match holes.is_empty() && !all.iter().any(Verification::is_wrong) {
            true => Ok(OK),
            false => Err(Failure::new(
                "the recording is not what was closed: see above",
            )),
        }
    }

    fn hole(&self, hole: &Hole) -> Result<(), Failure> {
        match self.json {
            true => out::line(&json!({ "directory": hole.dir, "hole": hole.what }).to_string()),
            false => out::line(&hole.to_string()),
        }
    }
}

fn in_words(one: &Verification) -> Result<(), Failure> {
    for what in &one.chain {
        out::line(&format!("{}: {}: {what}", one.dir.display(), one.recording))?;
    }
    for (file, verdict) in &one.files {
        if let Some(what) = words(verdict) {
            out::line(&format!("{}: {what}", one.dir.join(file).display()))?;
        }
    }
    let count = |test: fn(&Verdict) -> bool| {
        let files = one.files.iter().filter(|(_, verdict)| test(verdict));
        grouped(files.count() as u64)
    };
    out::line(&format!(
        "{}: {}: {} files are what was closed ({} bytes read), {} removed on purpose, {} not in the manifest \
         yet; {} lines, the last has the hash {}",
        one.dir.display(),
        one.recording,
        count(|it| *it == Verdict::Same),
        grouped(one.bytes),
        count(|it| matches!(it, Verdict::Removed(_))),
        count(|it| *it == Verdict::Unlisted),
        grouped(one.lines),
        one.head,
    ))
}

/// What is to be said of a file; nothing of one that is as it should be.
fn words(verdict: &Verdict) -> Option<String> {
    match verdict {
        Verdict::Same | Verdict::Removed(_) => None,
        Verdict::Changed(how) => Some(format!("CHANGED since it was closed: {how}")),
        Verdict::Missing => Some("MISSING".to_owned()),
        Verdict::Unlisted => {
            Some("not in the manifest yet: it is being written, or its recorder was killed".into())
        }
        Verdict::Unread(why) => Some(format!("cannot be read: {why}")),
    }
}

fn in_json(one: &Verification) -> String {
    let file = |(file, verdict): &(String, Verdict)| {
        let (verdict, why) = match verdict {
            Verdict::Same => ("same", ""),
            Verdict::Changed(how) => ("changed", how.as_str()),
            Verdict::Missing => ("missing", ""),
            Verdict::Removed(why) => ("removed", why.as_str()),
            Verdict::Unlisted => ("not in the manifest yet", ""),
            Verdict::Unread(why) => ("unread", why.as_str()),
        };
        json!({ "file": file, "verdict": verdict, "why": why })
    };
    json!({
        "directory": one.dir,
        "recording": one.recording,
        "whole": !one.is_wrong(),
        "manifest": { "lines": one.lines, "head": one.head, "problems": one.chain },
        "bytes_read": one.bytes,
        "files": one.files.iter().map(file).collect::<Vec<_>>(),
    })
    .to_string()
}

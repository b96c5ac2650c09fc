//! `vnplug sandbox log`: decisions that `--log` wrote, for people.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;

use clap::Args;
use serde_json::Value;

use crate::failure::{self, Failure, Outcome};
use crate::out;

/// Show what a sandbox decided
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug sandbox --log decisions.jsonl -- make test
  vnplug sandbox log decisions.jsonl --denied")]
pub(super) struct Log {
    /// The file that --log wrote; - is standard input
    file: PathBuf,
    /// Only what was refused, and the rule that would allow it
    #[arg(long)]
    denied: bool,
    /// Print the lines of JSON
    #[arg(long)]
    json: bool,
}

impl Log {
    pub(super) fn run(self) -> Outcome {
        let failed = |error| Failure::about(self.file.display(), error);
        let input: Box<dyn Read> = match self.file.to_str() {
            Some("-") => Box::new(io::stdin()),
            _ => Box::new(File::open(&self.file).map_err(failed)?),
        };
        for (index, line) in BufReader::new(input).lines().enumerate() {
            let line = line.map_err(failed)?;
            let entry: Value = serde_json::from_str(&line).map_err(|error| {
                Failure::new(format!("{}:{}: {error}", self.file.display(), index + 1))
            })?;
            let is_denied = entry["verdict"] == "deny" || entry.get("not_written").is_some();
            if self.denied && !is_denied {
                continue;
            }
            if self.json {
                out::raw(&format!("{entry}\n"))?;
                continue;
            }
            out::line(&sentence(&entry))?;
            if self.denied {
                for line in text(&entry["allow_with"]).lines() {
                    out::line(&format!("    {line}"))?;
                }
            }
        }
        Ok(failure::OK)
    }
}

/// One line of an entry.
fn sentence(entry: &Value) -> String {
    let time = text(&entry["time"]);
    if let Some(count) = entry["not_written"].as_u64() {
        return format!("{time}  {count} decisions could not be written");
    }
    let process = &entry["process"];
    let to = &entry["to"];
    let place = ["address", "name", "path", "abstract"]
        .iter()
        .map(|key| text(&to[*key]))
        .find(|place| !place.is_empty());
    let name = match text(&entry["names"][0]) {
        "" => String::new(),
        name => format!(" ({name})"),
    };
    let port = to["port"]
        .as_u64()
        .filter(|&port| port != 0)
        .map_or(String::new(), |port| format!(" port {port}"));
    format!(
        "{time}  {:5}  {}[{}]  {} {}{name}{port} by {}: {}",
        text(&entry["verdict"]),
        text(&process["program"]),
        process["pid"],
        text(&entry["doing"]),
        place.unwrap_or_default(),
        text(&entry["protocol"]),
        text(&entry["why"]),
    )
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

//! `vnplug list`: which devices can be opened.

use clap::Args;
use serde_json::json;
use vnplug::{Client, Device};

use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Lists the devices that can be opened.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug list
  vnplug list --json

In a guest these are the host's devices that the operator lets it see.")]
pub(crate) struct List {
    /// One JSON array of objects
    #[arg(long)]
    json: bool,
}

impl List {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let devices = connect()?.devices()?;
        if self.json {
            out::raw(&format!("{}\n", to_json(&devices)))?;
        } else if devices.is_empty() {
            out::note("there is no device to see; the daemon's configuration decides which are");
        } else {
            out::raw(&to_text(&devices))?;
        }
        Ok(OK)
    }
}

fn to_json(devices: &[Device]) -> serde_json::Value {
    let one = |device: &Device| {
        json!({
            "name": device.name, "kind": device.kind, "state": device.state,
            "queues": device.queues, "ports": device.ports, "description": device.description,
        })
    };
    devices.iter().map(one).collect()
}

fn to_text(devices: &[Device]) -> String {
    let head = ["DEVICE", "KIND", "STATE", "QUEUES", "PORTS", "DESCRIPTION"];
    let row = |device: &Device| {
        vec![
            text::escape(&device.name),
            text::escape(&device.kind),
            text::escape(&device.state),
            device.queues.to_string(),
            device.ports.to_string(),
            text::escape(&device.description),
        ]
    };
    let head = head.map(str::to_owned).to_vec();
    let rows: Vec<_> = std::iter::once(head)
        .chain(devices.iter().map(row))
        .collect();
    text::columns(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_words_are_escaped_and_columns_aligned() {
        let device = |name: &str, queues| Device {
            name: name.into(),
            kind: "gen".into(),
            state: "up".into(),
            description: "1\u{1b}[0m".into(),
            queues,
            ports: 0,
        };
        let text = to_text(&[device("host:a", 1), device("host:long", 12)]);
        assert_eq!(
            text,
            "DEVICE     KIND  STATE  QUEUES  PORTS  DESCRIPTION\n\
             host:a     gen   up          1      0  1\\x1b[0m\n\
             host:long  gen   up         12      0  1\\x1b[0m\n"
        );
    }
}

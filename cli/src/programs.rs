//! `vnplug programs`: the operator's programs, and what lies in their maps.

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Client, ProgramInfo};

use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Lists the operator's eBPF programs that may be used from here, and shows what lies in their maps.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug programs
  vnplug programs count                   its maps, and what it did
  vnplug programs count --map counters    the values of a map at this moment
  vnplug dump eth1 --program count        frames go through it

The operator loads them ([[program]] in the daemon's configuration) and says who may use them. The kernel, the
daemon and who looks from here see the same memory.")]
pub(crate) struct Programs {
    /// Only this program, with its maps
    #[arg(value_name = "PROGRAM")]
    name: Option<String>,
    /// Show the values of this map
    #[arg(long, value_name = "MAP", requires = "name")]
    map: Option<String>,
    /// The first entry to show
    #[arg(long, value_name = "N", default_value_t = 0, requires = "map")]
    first: u32,
    /// How many entries
    #[arg(long, value_name = "N", default_value_t = 256, requires = "map")]
    count: u32,
    /// One JSON array
    #[arg(long)]
    json: bool,
}

impl Programs {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let mut client = connect()?;
        if let (Some(name), Some(map)) = (&self.name, &self.map) {
            return self.show(&mut client, name, map);
        }
        let mut all = client.programs()?;
        if let Some(name) = &self.name {
            all.retain(|it| it.name == *name);
            if all.is_empty() {
                let what =
                    "no such program that may be used from here; `vnplug programs` shows them";
                return Err(Failure::about(name, what));
            }
        }
        if self.json {
            let all: Value = all.iter().map(to_json).collect();
            out::raw(&format!("{all}\n"))?;
        } else if all.is_empty() {
            out::note("there is no program that may be used from here; the operator loads them");
        } else {
            out::raw(&to_text(&all))?;
            if let (Some(_), [one]) = (&self.name, &all[..]) {
                out::raw(&maps_to_text(one))?;
            }
        }
        Ok(OK)
    }

    fn show(&self, client: &mut Client, name: &str, map: &str) -> Outcome {
        let mut values = Vec::new();
        // An answer has room for so many; more are asked for.
        while (values.len() as u32) < self.count {
            let first = self.first.saturating_add(values.len() as u32);
            let more = client.program_map(name, map, first, self.count - values.len() as u32)?;
            if more.is_empty() {
                break;
            }
            values.extend(more);
        }
        let numbered = values.iter().zip(self.first..);
        if self.json {
            let all: Value = numbered
                .map(|(value, entry)| json!({"entry": entry, "bytes": value, "number": number(value)}))
                .collect();
            out::raw(&format!("{all}\n"))?;
            return Ok(OK);
        }
        let rows = numbered.map(|(value, entry)| {
            let number = number(value).map_or_else(String::new, |it| it.to_string());
            vec![entry.to_string(), number, hex(value)]
        });
        out::raw(&text::table(&["ENTRY", "NUMBER", "BYTES"], rows))?;
        Ok(OK)
    }
}

/// A value of 1, 2, 4 or 8 bytes as a number without a sign, in the order of the machine's.
fn number(value: &[u8]) -> Option<u64> {
    match *value {
        [a] => Some(a.into()),
        [a, b] => Some(u16::from_ne_bytes([a, b]).into()),
        [a, b, c, d] => Some(u32::from_ne_bytes([a, b, c, d]).into()),
        [a, b, c, d, e, f, g, h] => Some(u64::from_ne_bytes([a, b, c, d, e, f, g, h])),
        _ => None,
    }
}

/// At most 64 bytes of a value.
fn hex(value: &[u8]) -> String {
    const MOST: usize = 64;
    let shown = value.iter().take(MOST).map(|byte| format!("{byte:02x}"));
    let mut text = shown.collect::<Vec<_>>().join(" ");
    if value.len() > MOST {
        text.push_str(" …");
    }
    text
}

fn to_json(it: &ProgramInfo) -> Value {
    let maps = it.maps.iter().map(|map| {
        json!({"name": map.name, "id": map.id, "value_bytes": map.value_bytes, "entries": map.entries,
               "constant": map.constant})
    });
    json!({"name": it.name, "kind": it.kind, "id": it.id, "runs": it.runs, "ports": it.ports,
           "frames": it.frames, "dropped": it.dropped, "aborted": it.aborted, "maps": maps.collect::<Value>()})
}

fn to_text(all: &[ProgramInfo]) -> String {
    let row = |it: &ProgramInfo| {
        vec![
            text::escape(&it.name),
            it.kind.clone(),
            it.id.to_string(),
            it.ports.to_string(),
            text::grouped(it.frames),
            text::grouped(it.dropped),
            text::grouped(it.aborted),
            text::escape(&it.runs.join(", ")),
        ]
    };
    let head = [
        "PROGRAM", "KIND", "ID", "PORTS", "FRAMES", "DROPPED", "ABORTED", "KERNEL",
    ];
    text::table(&head, all.iter().map(row))
}

fn maps_to_text(it: &ProgramInfo) -> String {
    let row = |map: &vnplug::ProgramMap| {
        vec![
            text::escape(&map.name),
            map.id.to_string(),
            map.value_bytes.to_string(),
            map.entries.to_string(),
            if map.constant { "read" } else { "written" }.to_owned(),
        ]
    };
    let head = ["MAP", "ID", "BYTES", "ENTRIES", "IS"];
    format!("\n{}", text::table(&head, it.maps.iter().map(row)))
}

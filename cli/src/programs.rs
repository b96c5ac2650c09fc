//! `vnplug programs`: the operator's programs, what lies in their maps, and changes of them.

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use vnplug::{Client, ProgramChange, ProgramInfo};

use crate::failure::{Failure, OK, Outcome};
use crate::{out, text};

/// Lists the operator's eBPF programs that may be used from here, shows what lies in their maps, and changes them.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  vnplug programs
  vnplug programs count                   its maps, and what it did
  vnplug programs count --map counters    the values of a map at this moment
  vnplug dump eth1 --program count        frames go through it
  vnplug programs replace count           its file is read again

The operator loads them ([[program]] in the daemon's configuration, or `add`) and says who may use them. The kernel, the
daemon and who looks from here see the same memory."
)]
pub(crate) struct Programs {
    #[command(subcommand)]
    change: Option<Change>,
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

/// Changes the programs, for root and the daemon's own user.
#[derive(Debug, Subcommand)]
enum Change {
    /// Load one more, until the daemon ends
    Add(Add),
    /// Load another version, for all that go through it
    Replace(Replace),
    /// Take one away; the ports that go through it are over
    Rm(Rm),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug programs add count=/etc/vnplug/count.o
  vnplug programs add 'count=/etc/vnplug/count.o,open=vm:*,attach=xdp:eth1'

The daemon reads the file, so it is an absolute path that the daemon's user can read. It loads programs after its start if
change_programs = \"on\" is in its configuration. To have it in the next daemon, too, write it into the file.")]
struct Add {
    /// The program, as with --program of vnplugd: NAME=FILE.o[:FUNCTION],open=…,attach=…
    #[arg(value_name = "PROGRAM")]
    text: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug programs replace count                         the same file, read again
  vnplug programs replace count=/etc/vnplug/new.o       all of it is as said here

Every frame is judged by the old version or the new one. Maps of the same name and shape stay, with what lies in them; others, and
the program's variables, begin anew. If the kernel does not accept it, nothing changes.")]
struct Replace {
    /// The program's name, or NAME=FILE.o[:FUNCTION],open=…,attach=…
    #[arg(value_name = "PROGRAM")]
    text: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  vnplug programs rm count

The kernel runs it no more. Readers that go through it keep what is in their rings, and are told. One that a source has stays: remove
that first.")]
struct Rm {
    /// The program, as `vnplug programs` shows it
    #[arg(value_name = "NAME")]
    name: String,
}

impl Programs {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let mut client = connect()?;
        if let Some(change) = &self.change {
            let change = match change {
                Change::Add(Add { text }) => ProgramChange::Add { text: text.clone() },
                Change::Replace(Replace { text }) => ProgramChange::Replace { text: text.clone() },
                Change::Rm(Rm { name }) => ProgramChange::Remove { name: name.clone() },
            };
            client.change_programs(change)?;
            return Ok(OK);
        }
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
        // An answer has room for some; the rest is asked for.
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

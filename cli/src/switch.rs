//! `vnplug switch`: switches as they are, their settings and entrances at run time, new ones and the end of one, and closing a
//! port.

use clap::{Args, Subcommand};
use serde_json::{Map, Value, json};
use vnplug::{Client, Counted, SourceRequest};
use vnplug_ring::counters::label;

use crate::failure::{Failure, OK, Outcome, USAGE};
use crate::list::value;
use crate::{out, text};

/// Shows switches and changes them, for root and the daemon's own user.
#[derive(Debug, Subcommand)]
pub(crate) enum Switch {
    /// List the switches
    List(List),
    /// Show a switch: its settings, its ports, who has them and what went through them
    Show(Show),
    /// Make one more switch, until the daemon ends or for good
    Add(Add),
    /// Remove a switch, with all its ports and entrances, and what was set of it
    Rm(Rm),
    /// Set something of a switch or of one of its ports, its entrances and uplinks, for good
    Set(Set),
    /// Close a port of a switch; its program may join again
    Kick(Kick),
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug switch list
  vnplug switch list --json")]
pub(crate) struct List {
    /// One JSON object: an array `switches`, each as `show` has it
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug switch show lan0
  vnplug switch show lan0/port3 --stations
  vnplug switch show lan0 --json | jq '.ports[] | {port, owner}'

Each setting says where it comes from: `file`, the daemon's configuration; `run time`, `vnplug switch set`;
`once`, the same with --once, or the console; `grant`, what the owner's permission to join says.")]
pub(crate) struct Show {
    /// The switch, or one port: lan0, lan0/port3
    #[arg(value_name = "SWITCH[/PORT]")]
    name: String,
    /// And where stations are
    #[arg(long)]
    stations: bool,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug switch add lan1
  vnplug switch add --keep lan1,vde=/run/vnplug/lan1.ctl,mode=660,group=vde
  vnplug switch add lan1,vhost=/run/vnplug/lan1.sock,uplink=eth1

It is written as on the daemon's command line (docs/switch.md). Its sockets must lie where the daemon's user may make files.
Twins take rights that the daemon has given up: they need the configuration file and a new start; and so do uplinks by AF_XDP, but with
change_programs = \"on\".")]
pub(crate) struct Add {
    /// The switch, as with --switch of vnplugd: NAME,OPTION=VALUE…
    #[arg(value_name = "SPEC")]
    spec: String,
    /// Make it in the next daemon, too, until `vnplug switch rm`
    #[arg(long)]
    keep: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  vnplug switch rm lan1

Whoever reads it or takes part in it is told that it is gone. One of the daemon's configuration is there again when the daemon
starts.")]
pub(crate) struct Rm {
    /// The switch, as `vnplug switch list` shows it
    #[arg(value_name = "SWITCH")]
    name: String,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug switch set lan0 hub=yes
  vnplug switch set lan0 stream=/run/vnplug/lan0.stream
  vnplug switch set lan0 vde=no
  vnplug switch set lan0 uplink=eth1+eth2
  vnplug switch set lan0 age=60 hold=0 --once

It is set at once, and again when the daemon starts. `docs/switch.md` has the settings.")]
pub(crate) struct Set {
    /// The switch, or one port: lan0, lan0/port3
    #[arg(value_name = "SWITCH[/PORT]")]
    name: String,
    /// What to set
    #[arg(value_name = "KEY=VALUE", required = true)]
    settings: Vec<String>,
    /// Only until the daemon ends
    #[arg(long)]
    once: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug switch kick lan0/port3")]
pub(crate) struct Kick {
    /// The port: lan0/port3
    #[arg(value_name = "SWITCH/PORT")]
    name: String,
}

impl Switch {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        match self {
            Self::List(List { json }) => {
                let all = connect()?.show_switch("", 0, false)?;
                let all = switches(&all);
                if *json {
                    let all = json!({"switches": all.iter().map(to_json).collect::<Value>()});
                    out::raw(&format!("{all}\n"))?;
                } else if all.is_empty() {
                    out::note("there is no switch; vnplugd --switch NAME makes one");
                } else {
                    out::raw(&list_to_text(&all))?;
                }
            }
            Self::Show(show) => {
                let (name, port) = place(&show.name)?;
                let all = connect()?.show_switch(name, port, show.stations)?;
                for switch in switches(&all) {
                    let text = match show.json {
                        true => format!("{}\n", to_json(&switch)),
                        false => to_text(&switch),
                    };
                    out::raw(&text)?;
                }
            }
            Self::Add(Add { spec, keep }) => {
                let text = source(spec)?;
                connect()?.change_sources(SourceRequest::Add { text, keep: *keep })?;
            }
            Self::Rm(Rm { name }) => {
                let mut client = connect()?;
                let name = name.strip_prefix("host:").unwrap_or(name).to_owned();
                // It says so if it is no switch.
                client.show_switch(&name, 0, false)?;
                client.change_sources(SourceRequest::Remove { name })?;
            }
            Self::Set(set) => {
                let (name, port) = place(&set.name)?;
                let text = set.settings.join(" ");
                connect()?.set_switch(name, port, &text, !set.once)?;
            }
            Self::Kick(kick) => {
                let (name, port) = place(&kick.name)?;
                connect()?.kick(name, port)?;
            }
        }
        Ok(OK)
    }
}

/// A switch as a source: NAME,OPTION=VALUE… becomes NAME=switch,OPTION=VALUE….
fn source(spec: &str) -> Result<String, Failure> {
    let (name, options) = spec.split_once(',').unwrap_or((spec, ""));
    if name.contains('=') {
        let what = format!("{spec}: write NAME,OPTION=VALUE,…");
        return Err(Failure::with_code(USAGE, what));
    }
    let comma = if options.is_empty() { "" } else { "," };
    Ok(format!("{name}=switch{comma}{options}"))
}

/// The switch and the port of a name as people write it; 0 = the whole switch.
fn place(name: &str) -> Result<(&str, u16), Failure> {
    let Some((switch, port)) = name.split_once('/') else {
        return Ok((name, 0));
    };
    let number = port.strip_prefix("port").unwrap_or(port).parse().ok();
    let number = number.filter(|number| *number > 0);
    let wrong = || {
        Failure::with_code(
            USAGE,
            format!("{name:?}: write {switch}/port1, or {switch}/1"),
        )
    };
    Ok((switch, number.ok_or_else(wrong)?))
}

/// A switch with what belongs to it.
struct Shown<'a> {
    switch: &'a Counted,
    ports: Vec<&'a Counted>,
    stations: Vec<&'a Counted>,
}

fn switches(all: &[Counted]) -> Vec<Shown<'_>> {
    let mut found: Vec<Shown<'_>> = Vec::new();
    for counted in all {
        match (counted.kind.as_str(), found.last_mut()) {
            ("switch", _) => found.push(Shown {
                switch: counted,
                ports: Vec::new(),
                stations: Vec::new(),
            }),
            ("switch_port", Some(shown)) => shown.ports.push(counted),
            ("station", Some(shown)) => shown.stations.push(counted),
            // Of a newer daemon.
            _ => {}
        }
    }
    found
}

fn to_json(shown: &Shown<'_>) -> Value {
    let port = |port: &&Counted| {
        json!({
            "port": port.name, "number": number(port), "way": label(port, "way"),
            "state": label(port, "state"), "owner": label(port, "owner"), "description": label(port, "description"),
            "granted": label(port, "granted"), "settings": settings_to_json(port),
            "counters": counters_to_json(port),
        })
    };
    let station = |it: &&Counted| {
        json!({
            "address": it.name, "port": label(it, "switch_port"),
            "vlan": label(it, "vlan").parse::<u16>().unwrap_or(0), "age_s": value(it, "age_s"),
            "static": label(it, "static") == "yes",
        })
    };
    json!({
        "name": shown.switch.name,
        "settings": settings_to_json(shown.switch),
        "counters": counters_to_json(shown.switch),
        "ports": shown.ports.iter().map(port).collect::<Value>(),
        "stations": shown.stations.iter().map(station).collect::<Value>(),
    })
}

fn settings_to_json(of: &Counted) -> Value {
    let one = |(key, value, from): (&str, &str, &str)| {
        (key.to_owned(), json!({"value": value, "from": from}))
    };
    Value::Object(settings(of).map(one).collect::<Map<_, _>>())
}

fn counters_to_json(of: &Counted) -> Value {
    let one = |(key, value): &(String, u64)| (key.clone(), json!(value));
    Value::Object(of.values.iter().map(one).collect::<Map<_, _>>())
}

/// Key, value, and where it comes from.
fn settings(of: &Counted) -> impl Iterator<Item = (&str, &str, &str)> {
    of.labels.iter().filter_map(|(key, value)| {
        let key = key.strip_prefix("set.")?;
        Some((key, value.as_str(), label(of, &format!("from.{key}"))))
    })
}

fn list_to_text(all: &[Shown<'_>]) -> String {
    let head = [
        "SWITCH", "PORTS", "STATIONS", "FRAMES", "DROPPED", "SETTINGS",
    ];
    let row = |shown: &Shown<'_>| {
        let switch = shown.switch;
        let dropped = switch.values.iter();
        let dropped = dropped.filter(|(key, _)| key.contains("dropped"));
        vec![
            text::escape(&switch.name),
            text::grouped(value(switch, "ports")),
            text::grouped(value(switch, "stations")),
            text::grouped(value(switch, "entered")),
            text::grouped(dropped.map(|(_, value)| value).sum()),
            settings_to_text(switch),
        ]
    };
    text::table(&head, all.iter().map(row))
}

fn to_text(shown: &Shown<'_>) -> String {
    let switch = shown.switch;
    let mut all = format!("switch {}\n", text::escape(&switch.name));
    for (key, value, from) in settings(switch) {
        let (key, value, from) = (text::escape(key), text::escape(value), text::escape(from));
        all += &format!("  {key:<24} {value}  ({from})\n");
    }
    for (key, value) in &switch.values {
        all += &format!(
            "  {:<24} {:>20}\n",
            text::escape(key),
            text::grouped(*value)
        );
    }
    if !shown.ports.is_empty() {
        let head = [
            "PORT",
            "STATE",
            "WAY",
            "OWNER",
            "IN",
            "OUT",
            "DROPPED",
            "SETTINGS",
            "DESCRIPTION",
        ];
        let row = |port: &&Counted| {
            let dropped = port.values.iter();
            let dropped = dropped.filter(|(key, _)| key.contains("dropped"));
            vec![
                text::escape(&port.name),
                text::escape(label(port, "state")),
                text::escape(label(port, "way")),
                text::escape(label(port, "owner")),
                text::grouped(value(port, "in_frames")),
                text::grouped(value(port, "out_frames")),
                text::grouped(dropped.map(|(_, value)| value).sum()),
                settings_to_text(port),
                text::escape(label(port, "description")),
            ]
        };
        all += &format!("\n{}", text::table(&head, shown.ports.iter().map(row)));
    }
    if !shown.stations.is_empty() {
        let head = ["STATION", "PORT", "VLAN", "AGE S"];
        let row = |it: &&Counted| {
            vec![
                text::escape(&it.name),
                text::escape(label(it, "switch_port")),
                text::escape(label(it, "vlan")),
                text::grouped(value(it, "age_s")),
            ]
        };
        all += &format!("\n{}", text::table(&head, shown.stations.iter().map(row)));
    }
    all
}

fn settings_to_text(of: &Counted) -> String {
    let words: Vec<String> = settings(of)
        .map(|(key, value, _)| text::escape(&format!("{key}={value}")))
        .collect();
    match words.is_empty() {
        true => "-".to_owned(),
        false => words.join(" "),
    }
}

fn number(port: &Counted) -> u16 {
    let number = port.name.rsplit_once("/port");
    number.and_then(|(_, it)| it.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(kind: &str, name: &str, labels: &[(&str, &str)], values: &[(&str, u64)]) -> Counted {
        let labels = labels.iter();
        Counted {
            kind: kind.into(),
            name: name.into(),
            labels: labels
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect(),
            values: values
                .iter()
                .map(|(key, it)| ((*key).into(), *it))
                .collect(),
        }
    }

    fn some() -> [Counted; 3] {
        let hub = [("set.hub", "yes"), ("from.hub", "run time")];
        let about = [
            ("state", "up"),
            ("way", "ring"),
            ("owner", "vm probe"),
            ("description", "\u{1b}[0m"),
        ];
        let at = [("switch_port", "lan0/port3"), ("vlan", "0")];
        [
            counted("switch", "lan0", &hub, &[("entered", 1200), ("ports", 1)]),
            counted("switch_port", "lan0/port3", &about, &[("in_frames", 7)]),
            counted("station", "02:00:00:00:00:01", &at, &[("age_s", 5)]),
        ]
    }

    #[test]
    fn a_switch_is_one_object_and_each_setting_says_where_it_comes_from() {
        let all = some();
        let shown = switches(&all);
        assert_eq!(
            to_json(&shown[0]),
            json!({
                "name": "lan0",
                "settings": {"hub": {"value": "yes", "from": "run time"}},
                "counters": {"entered": 1200, "ports": 1},
                "ports": [{
                    "port": "lan0/port3", "number": 3, "state": "up", "way": "ring", "owner": "vm probe",
                    "description": "\u{1b}[0m", "granted": "", "settings": {},
                    "counters": {"in_frames": 7},
                }],
                "stations": [{
                    "address": "02:00:00:00:00:01", "port": "lan0/port3", "vlan": 0, "age_s": 5,
                    "static": false,
                }],
            })
        );
    }

    #[test]
    fn foreign_words_are_escaped() {
        let all = some();
        let text = to_text(&switches(&all)[0]);
        assert!(
            text.contains("yes  (run time)") && text.contains("\\x1b[0m"),
            "{text}"
        );
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn a_switch_is_added_as_a_source_of_its_kind() {
        assert_eq!(source("lan1").unwrap(), "lan1=switch");
        let text = source("lan1,vde=/run/x,mode=660").unwrap();
        assert_eq!(text, "lan1=switch,vde=/run/x,mode=660");
        assert!(source("lan1=switch,vde=/run/x").is_err());
    }

    #[test]
    fn a_port_is_named_by_its_number() {
        assert_eq!(place("lan0").ok(), Some(("lan0", 0)));
        assert_eq!(place("lan0/port3").ok(), Some(("lan0", 3)));
        assert_eq!(place("lan0/3").ok(), Some(("lan0", 3)));
        for wrong in ["lan0/", "lan0/0", "lan0/portx", "lan0/70000"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}

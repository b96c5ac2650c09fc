//! `vnplug list`: which devices can be opened, and, for the operator, who reads them.

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Client, Counted, Device};
use vnplug_ring::counters::{device, label};

use crate::failure::{Failure, OK, Outcome};
use crate::{out, stats, text};

/// Lists the devices that can be opened; on the host also attached ports and virtual machines.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug list
  vnplug list --json

In a guest these are the host's devices that the operator lets it see. Ports and virtual machines
are shown to root and to the daemon's own user; `vnplug stats` has all their counters.")]
pub(crate) struct List {
    /// One JSON object: arrays `devices`, `ports`, `vms`
    #[arg(long)]
    json: bool,
}

impl List {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let mut client = connect()?;
        let devices = client.devices()?;
        let counted = client.stats()?;
        let of = |kind: &str| {
            counted
                .iter()
                .filter(|one| one.kind == kind)
                .collect::<Vec<_>>()
        };
        let (ports, vms) = (of("port"), of("vm"));
        if self.json {
            let all = |counted: &[&Counted]| -> Value {
                counted
                    .iter()
                    .map(|counted| stats::to_json(counted))
                    .collect()
            };
            let list =
                json!({"devices": to_json(&devices), "ports": all(&ports), "vms": all(&vms)});
            out::raw(&format!("{list}\n"))?;
            return Ok(OK);
        }
        if devices.is_empty() {
            out::note("there is no device to see; the daemon's configuration decides which are");
        } else {
            out::raw(&to_text(&devices))?;
        }
        if !ports.is_empty() {
            out::raw(&format!("\n{}", ports_to_text(&ports)))?;
        }
        if !vms.is_empty() {
            out::raw(&format!("\n{}", vms_to_text(&vms)))?;
        }
        Ok(OK)
    }
}

fn to_json(devices: &[Device]) -> Value {
    let one = |device: &Device| {
        json!({
            "name": device.name, "kind": device.kind, "state": device.state,
            "queues": device.queues, "ports": device.ports, "description": device.description,
            "link_type": device.link_type, "mtu": device.mtu, "speed_mbps": device.speed_mbps,
            "mac": mac(device), "addresses": device.addresses,
        })
    };
    devices.iter().map(one).collect()
}

fn to_text(devices: &[Device]) -> String {
    let head = [
        "DEVICE",
        "KIND",
        "STATE",
        "QUEUES",
        "PORTS",
        "MTU",
        "MBIT/S",
        "MAC",
        "DESCRIPTION",
        "ADDRESSES",
    ];
    let known = |number: u32| match number {
        0 => "-".to_owned(),
        number => number.to_string(),
    };
    let row = |device: &Device| {
        vec![
            text::escape(&device.name),
            text::escape(&device.kind),
            text::escape(&device.state),
            device.queues.to_string(),
            device.ports.to_string(),
            known(device.mtu),
            known(device.speed_mbps),
            mac(device).unwrap_or_else(|| "-".into()),
            text::escape(&device.description),
            text::escape(&device.addresses.join(", ")),
        ]
    };
    text::table(&head, devices.iter().map(row))
}

fn mac(device: &Device) -> Option<String> {
    let bytes = device.mac.map(|byte| format!("{byte:02x}"));
    (device.mac != [0; 6]).then(|| bytes.join(":"))
}

fn ports_to_text(ports: &[&Counted]) -> String {
    let head = [
        "PORT",
        "DEVICE",
        "OWNER",
        "STATE",
        "DELIVERED",
        "DROPPED",
        "READER",
        "FILTER",
    ];
    let row = |port: &&Counted| {
        let kinds = ["dropped_full", "dropped_budget", "dropped_quarantine"];
        let dropped = kinds.iter().map(|kind| value(port, kind)).sum();
        vec![
            text::escape(&port.name),
            text::escape(&device(port)),
            text::escape(label(port, "owner")),
            text::escape(label(port, "state")),
            text::grouped(value(port, "delivered")),
            text::grouped(dropped),
            text::escape(label(port, "label")),
            text::escape(label(port, "filter")),
        ]
    };
    text::table(&head, ports.iter().map(row))
}

fn vms_to_text(vms: &[&Counted]) -> String {
    let head = ["VM", "KIND", "STATE", "POOL BYTES", "FREE"];
    let row = |vm: &&Counted| {
        vec![
            text::escape(&vm.name),
            text::escape(label(vm, "kind")),
            text::escape(label(vm, "state")),
            text::grouped(value(vm, "pool_bytes")),
            text::grouped(value(vm, "pool_free")),
        ]
    };
    text::table(&head, vms.iter().map(row))
}

pub(crate) fn value(counted: &Counted, name: &str) -> u64 {
    let found = counted.values.iter().find(|(key, _)| key == name);
    found.map_or(0, |(_, value)| *value)
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
            ..Device::default()
        };
        let text = to_text(&[device("host:a", 1), device("host:long", 12)]);
        assert_eq!(
            text,
            "DEVICE     KIND  STATE  QUEUES  PORTS  MTU  MBIT/S  MAC  DESCRIPTION  ADDRESSES\n\
             host:a     gen   up          1      0    -       -    -  1\\x1b[0m\n\
             host:long  gen   up         12      0    -       -    -  1\\x1b[0m\n"
        );
    }
}

//! `vnplug stats`: every counter, and whether the accounts close.
//!
//! The daemon takes its counters between two batches, so these hold in every answer:
//!
//! ```text
//! source   seen    = read + kernel_dropped + in_kernel
//! source   duties  = offered of its ports + departed_offered
//! port     offered = refused + paused + direction + filtered + ruled_out + sampled_out +
//!                    delivered + dropped_…
//! both     send_taken = sent + send_dropped_…, of what sends
//! ```
//!
//! What a port's reader says of itself is shown as `reader_…`: a recorder's durable mark.
//!
//! A guest sees its own ports alone; an identity whose counters are not all there is not judged.

use clap::Args;
use serde_json::{Value, json};
use vnplug::{Client, Counted};
use vnplug_ring::control::HOST_PREFIX;
use vnplug_store::name;

use crate::failure::{ACCOUNTS, Failure, OK, Outcome};
use crate::out;
use crate::text::{escape, grouped};

/// Shows every counter and checks that the accounts close.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vnplug stats
  vnplug stats --json | jq '.counters[] | select(.kind == \"port\")'

`closes: yes` means that every frame is accounted for, to the packet, also under load: what the kernel
has counted and the daemon not read yet is in_kernel. If an account does not close the exit code is 5.")]
pub(crate) struct Stats {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// One equation between counters.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    about: String,
    left: (&'static str, u64),
    right: Vec<(String, u64)>,
}

impl Stats {
    pub(crate) fn run(&self, connect: impl Fn() -> Result<Client, Failure>) -> Outcome {
        let all = connect()?.stats()?;
        let identities = identities(&all);
        if self.json {
            let line = json!({
                "counters": all.iter().map(to_json).collect::<Value>(),
                "identities": identities.iter().map(Identity::to_json).collect::<Value>(),
                "closes": identities.iter().all(Identity::closes),
            });
            out::raw(&format!("{line}\n"))?;
        } else {
            let counters: String = all.iter().map(to_text).collect();
            let lines: String = identities.iter().map(Identity::to_text).collect();
            let closes = match identities.iter().all(Identity::closes) {
                true => "yes",
                false => "no",
            };
            let head = if lines.is_empty() { "" } else { "accounts\n" };
            out::raw(&format!("{counters}{head}{lines}closes: {closes}\n"))?;
        }
        let closes = identities.iter().all(Identity::closes);
        Ok(if closes { OK } else { ACCOUNTS.into() })
    }
}

/// A thing and its counters as JSON.
pub(crate) fn to_json(counted: &Counted) -> Value {
    let labels = counted
        .labels
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)));
    let values = counted
        .values
        .iter()
        .map(|(key, value)| (key.clone(), json!(value)));
    json!({
        "kind": counted.kind, "name": counted.name,
        "labels": Value::Object(labels.collect()),
        "values": Value::Object(values.collect()),
    })
}

fn to_text(counted: &Counted) -> String {
    let mut text = format!("{} {}\n", escape(&counted.kind), escape(&counted.name));
    for (key, value) in counted.labels.iter().filter(|(_, value)| !value.is_empty()) {
        text += &format!("  {:<24} {}\n", escape(key), escape(value));
    }
    for (key, value) in &counted.values {
        let shown = match key.ends_with("_time_ns") {
            true => name::time(*value),
            false => grouped(*value),
        };
        text += &format!("  {:<24} {shown:>20}\n", escape(key));
    }
    text + "\n"
}

fn identities(all: &[Counted]) -> Vec<Identity> {
    let mut found = Vec::new();
    for source in all.iter().filter(|counted| counted.kind == "source") {
        let about = format!("source {}", source.name);
        found.extend(sum(
            &about,
            source,
            "seen",
            &["read", "kernel_dropped", "early", "in_kernel"],
        ));
        let ports = all
            .iter()
            .filter(|port| port.kind == "port" && is_of(port, source));
        if let (Some(duties), Some(departed)) =
            (value(source, "duties"), value(source, "departed_offered"))
        {
            let offered = ports.filter_map(|port| value(port, "offered")).sum();
            found.push(Identity {
                about,
                left: ("duties", duties),
                right: vec![
                    ("offered to its ports".into(), offered),
                    ("departed_offered".into(), departed),
                ],
            });
        }
    }
    for port in all.iter().filter(|counted| counted.kind == "port") {
        let parts = [
            "paused",
            "direction",
            "filtered",
            "ruled_out",
            "sampled_out",
            "delivered",
        ];
        let about = format!("port {}", port.name);
        if let Some(mut identity) = sum(&about, port, "offered", &parts) {
            let more = |name: &str| name == "refused" || name.starts_with("dropped_");
            let more = port.values.iter().filter(|(name, _)| more(name));
            identity.right.extend(more.cloned());
            found.push(identity);
        }
    }
    for sender in all {
        let about = format!("{} {}", sender.kind, sender.name);
        found.extend(sum(&about, sender, "send_taken", &SEND_FATES));
    }
    found
}

/// What becomes of frames that were taken to be sent.
const SEND_FATES: [&str; 5] = [
    "sent",
    "send_dropped_full",
    "send_dropped_length",
    "send_dropped_link",
    "send_dropped_unsupported",
];

/// `left` = the sum of `parts`, if the thing has all of them.
fn sum(about: &str, of: &Counted, left: &'static str, parts: &[&str]) -> Option<Identity> {
    let part = |name: &&str| Some(((*name).to_owned(), value(of, name)?));
    Some(Identity {
        about: about.to_owned(),
        left: (left, value(of, left)?),
        right: parts.iter().map(part).collect::<Option<_>>()?,
    })
}

fn is_of(port: &Counted, source: &Counted) -> bool {
    let device = port.labels.iter().find(|(key, _)| key == "device");
    device.is_some_and(|(_, name)| name.strip_prefix(HOST_PREFIX).unwrap_or(name) == source.name)
}

fn value(of: &Counted, name: &str) -> Option<u64> {
    let found = of.values.iter().find(|(key, _)| key == name);
    found.map(|(_, value)| *value)
}

impl Identity {
    fn closes(&self) -> bool {
        self.difference() == 0
    }

    /// What is missing on the right (negative: too much).
    fn difference(&self) -> i128 {
        let right: i128 = self.right.iter().map(|(_, value)| i128::from(*value)).sum();
        i128::from(self.left.1) - right
    }

    fn to_text(&self) -> String {
        let right: Vec<String> = self
            .right
            .iter()
            .map(|(name, value)| format!("{} {}", grouped(*value), escape(name)))
            .collect();
        let verdict = match self.difference() {
            0 => "closes".to_owned(),
            difference => format!("DIFFERS by {difference}"),
        };
        let about = escape(&self.about);
        let (name, left) = (self.left.0, grouped(self.left.1));
        format!(
            "  {about}: {left} {name} = {}: {verdict}\n",
            right.join(" + ")
        )
    }

    fn to_json(&self) -> Value {
        let right = self
            .right
            .iter()
            .map(|(name, value)| (name.clone(), json!(value)));
        json!({
            "about": self.about, "name": self.left.0, "value": self.left.1,
            "sum_of": Value::Object(right.collect()),
            "closes": self.closes(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_adds_up_too() {
        let mut values: Vec<(&str, u64)> = SEND_FATES.map(|fate| (fate, 2)).to_vec();
        values.push(("send_taken", 10));
        let found = identities(&[counted("source", "lab", &values)]);
        assert!(found.len() == 1 && found[0].closes(), "{found:?}");
        values[0].1 = 3;
        assert!(!identities(&[counted("port", "1", &values)])[0].closes());
    }

    fn counted(kind: &str, name: &str, values: &[(&str, u64)]) -> Counted {
        Counted {
            kind: kind.into(),
            name: name.into(),
            labels: vec![("device".into(), "host:eth1".into())],
            values: values.iter().map(|(n, v)| ((*n).to_owned(), *v)).collect(),
        }
    }

    fn accounts(delivered: u64) -> Vec<Counted> {
        let port = |name, delivered| {
            let values = [
                ("offered", 100),
                ("refused", 1),
                ("paused", 0),
                ("direction", 2),
                ("filtered", 3),
                ("ruled_out", 0),
                ("sampled_out", 0),
                ("delivered", delivered),
                ("dropped_full", 4),
                ("dropped_quarantine", 0),
                ("rings", 2),
            ];
            counted("port", name, &values)
        };
        let source = [
            ("seen", 120),
            ("early", 3),
            ("read", 100),
            ("kernel_dropped", 10),
            ("in_kernel", 7),
            ("duties", 205),
            ("departed_offered", 5),
        ];
        vec![
            counted("daemon", "vnplugd", &[("ports", 2)]),
            counted("source", "eth1", &source),
            port("1", 90),
            port("2", delivered),
        ]
    }

    #[test]
    fn accounts_that_add_up_close() {
        let found = identities(&accounts(90));
        assert_eq!(found.len(), 4);
        assert!(found.iter().all(Identity::closes), "{found:?}");
    }

    #[test]
    fn one_packet_too_few_or_too_many_is_named() {
        for (delivered, words) in [(89, "DIFFERS by 1"), (91, "DIFFERS by -1")] {
            let found = identities(&accounts(delivered));
            let open: Vec<_> = found.iter().filter(|identity| !identity.closes()).collect();
            assert_eq!(open.len(), 1);
            let text = open[0].to_text();
            assert!(
                text.contains("port 2: 100 offered") && text.contains(words),
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_not_counted_is_not_judged() {
        assert_eq!(identities(&[counted("source", "eth1", &[("seen", 7)])]), []);
    }
}

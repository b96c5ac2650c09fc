//! Which counters add up, and whether they do.

use super::{Counter, NEWER, PORT, SENDER, SOURCE, SWITCH};
use crate::control::{Counted, HOST_PREFIX};

/// One sum, with its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Whose: `source eth1`, `port 7`.
    pub about: String,
    /// The counter that is the sum.
    pub total: (&'static str, u64),
    /// What it is the sum of.
    pub parts: Vec<(String, u64)>,
}

impl Account {
    /// What is missing among the parts (negative: too much); 0 if it closes.
    #[must_use]
    pub fn difference(&self) -> i128 {
        let parts = self.parts.iter().map(|(_, value)| i128::from(*value));
        i128::from(self.total.1) - parts.sum::<i128>()
    }

    /// Whether nothing is missing.
    #[must_use]
    pub fn closes(&self) -> bool {
        self.difference() == 0
    }
}

/// The sums that these counters are in. A sum is skipped if one of its counters is missing: a guest
/// sees its own ports alone.
#[must_use]
pub fn accounts(all: &[Counted]) -> Vec<Account> {
    let mut found = Vec::new();
    for counted in all {
        match counted.kind.as_str() {
            "source" => {
                found.extend(sum(counted, "seen", SOURCE));
                found.extend(duties(counted, all));
                found.extend(departed(counted));
                found.extend(sum(counted, "entered", SWITCH));
                found.extend(sum(counted, "due", SWITCH));
                found.extend(sum(counted, "uplink_seen", SWITCH));
            }
            "port" => found.extend(sum(counted, "offered", PORT)),
            _ => {}
        }
        found.extend(sum(counted, "send_taken", SENDER));
    }
    found
}

/// One word about a thing; nothing if there is none of this name.
#[must_use]
pub fn label<'a>(of: &'a Counted, name: &str) -> &'a str {
    let found = of.labels.iter().find(|(key, _)| key == name);
    found.map_or("", |(_, value)| value)
}

/// One counter's value, if the thing has it.
#[must_use]
pub fn value(of: &Counted, name: &str) -> Option<u64> {
    let found = of.values.iter().find(|(key, _)| key == name);
    found.map(|(_, value)| *value)
}

/// `total` = the sum of its parts, if the thing has all of them.
fn sum(of: &Counted, total: &'static str, table: &[Counter]) -> Option<Account> {
    let parts = table.iter().filter(|it| it.part_of == Some(total));
    // A reader does not see what the operator's filter refuses.
    let is_optional = |name: &str| name == "refused" || name.starts_with("dropped_");
    let mut found = Vec::new();
    for part in parts.filter(|part| !is_optional(part.name)) {
        match value(of, part.name) {
            Some(value) => found.push((part.name.to_owned(), value)),
            // Older daemons do not count them.
            None if NEWER.contains(&part.name) => {}
            None => return None,
        }
    }
    if total == "offered" {
        // Also what a newer daemon drops for a reason of its own.
        let more = of.values.iter().filter(|(name, _)| is_optional(name));
        found.extend(more.cloned());
    }
    account(of, total, found)
}

/// What its ports were offered.
fn duties(source: &Counted, all: &[Counted]) -> Option<Account> {
    let is_of = |port: &&Counted| {
        let device = port.labels.iter().find(|(key, _)| key == "device");
        port.kind == "port"
            && device.is_some_and(|(_, name)| {
                let name = name.strip_prefix(HOST_PREFIX).unwrap_or(name);
                // Of a reader of one port of a switch: `lan0/port3`.
                let (whole, _) = name.split_once('/').unwrap_or((name, ""));
                whole == source.name
            })
    };
    let ports = all.iter().filter(is_of);
    let offered = ports.filter_map(|port| value(port, "offered")).sum();
    let departed = value(source, "departed_offered")?;
    let parts = vec![
        ("offered to its ports".into(), offered),
        ("departed_offered".into(), departed),
    ];
    account(source, "duties", parts)
}

fn departed(source: &Counted) -> Option<Account> {
    let accounted = value(source, "departed_accounted")?;
    let parts = vec![("departed_accounted".into(), accounted)];
    account(source, "departed_offered", parts)
}

fn account(of: &Counted, total: &'static str, parts: Vec<(String, u64)>) -> Option<Account> {
    Some(Account {
        about: format!("{} {}", of.kind, of.name),
        total: (total, value(of, total)?),
        parts,
    })
}

//! Every metric: how the table of counters (`ring/src/counters.rs`) becomes names by Prometheus's rules.
//!
//! - `vnplug`, the thing, the counter's name, its base unit, and `total` for what only grows:
//!   `vnplug_source_freezes_total`, `vnplug_port_patience_seconds`.
//! - Counters that are parts of a sum are one metric with a label `fate`, and the sum is their sum:
//!   `vnplug_port_offered_frames_total{fate="dropped_full"}`.

use vnplug_ring::counters::{
    BACKEND, Counter, DAEMON, ECHO, NIC, PORT, SENDER, SOURCE, SWITCH, SWITCH_PORT, Unit, VM,
};

/// A metric, with or without values.
#[derive(Debug)]
pub(crate) struct Metric {
    /// Without `_total`.
    pub(crate) name: String,
    pub(crate) unit: Option<&'static str>,
    pub(crate) help: &'static str,
    /// It may fall.
    pub(crate) is_now: bool,
    /// Of which kind of things, in the daemon's word.
    pub(crate) of: &'static str,
    pub(crate) labels: &'static [&'static str],
    /// The counters that it shows; several have the label `fate`.
    pub(crate) counters: Vec<&'static Counter>,
}

impl Metric {
    /// As Prometheus has it.
    #[cfg(test)]
    pub(crate) fn full_name(&self) -> String {
        let total = if self.is_now { "" } else { "_total" };
        format!("{}{total}", self.name)
    }

    /// Whether its counters are parts of a sum.
    pub(crate) fn has_fates(&self) -> bool {
        let mut counters = self.counters.iter();
        !self.is_now && counters.any(|it| it.part_of.is_some())
    }
}

/// Kind of thing, first word of the name, labels, counters.
type Section = (
    &'static str,
    &'static str,
    &'static [&'static str],
    &'static [Counter],
);

const SECTIONS: [Section; 11] = [
    ("daemon", "daemon", &[], DAEMON),
    ("source", "source", &["source"], SOURCE),
    ("source", "source", &["source"], SENDER),
    ("source", "nic", &["source"], NIC),
    ("source", "generator", &["source"], ECHO),
    ("source", "switch", &["switch"], SWITCH),
    (
        "switch_port",
        "switch_port",
        &["switch", "port"],
        SWITCH_PORT,
    ),
    ("port", "port", &["port", "source", "owner"], PORT),
    ("port", "port", &["port", "source", "owner"], SENDER),
    ("vm", "vm", &["vm"], VM),
    ("backend", "backend", &["backend"], BACKEND),
];

/// Of which a port tells those of its group.
const OF_GROUP: &str = "arena_";
pub(crate) const GROUP_LABELS: &[&str] = &["source", "group", "owner"];

/// All metrics that are made of counters.
pub(crate) fn metrics() -> Vec<Metric> {
    let mut all: Vec<Metric> = Vec::new();
    for (of, prefix, labels, table) in SECTIONS {
        for counter in table {
            let has_parts = table.iter().any(|it| it.part_of == Some(counter.name));
            if has_parts {
                continue;
            }
            let (prefix, labels) = match counter.name.starts_with(OF_GROUP) {
                true => ("group", GROUP_LABELS),
                false => (prefix, labels),
            };
            let sum = counter.part_of.filter(|_| !counter.is_now);
            let sum = sum.and_then(|sum| table.iter().find(|it| it.name == sum));
            let shown = sum.unwrap_or(counter);
            let unit = unit(counter.unit);
            let name = name(prefix, shown.name, unit);
            match all.iter_mut().find(|it| it.name == name) {
                Some(metric) => metric.counters.push(counter),
                None => all.push(Metric {
                    name,
                    unit,
                    help: shown.help,
                    is_now: counter.is_now,
                    of,
                    labels,
                    counters: vec![counter],
                }),
            }
        }
    }
    all
}

/// Prometheus's base units.
fn unit(unit: Unit) -> Option<&'static str> {
    match unit {
        Unit::Frames => Some("frames"),
        Unit::Bytes => Some("bytes"),
        Unit::Milliseconds | Unit::Nanoseconds => Some("seconds"),
        Unit::Times | Unit::Things => None,
    }
}

/// By what a value is divided to be one of the base unit.
pub(crate) fn scale(unit: Unit) -> f64 {
    match unit {
        Unit::Milliseconds => 1e3,
        Unit::Nanoseconds => 1e9,
        Unit::Frames | Unit::Bytes | Unit::Times | Unit::Things => 1.0,
    }
}

/// Each word once: the thing is not in the counter's name again, nor is the unit.
fn name(prefix: &str, counter: &str, unit: Option<&str>) -> String {
    let own = counter.strip_prefix(&format!("{prefix}_"));
    let words = own.unwrap_or(counter).split('_');
    let words = words.filter(|word| Some(*word) != unit && !matches!(*word, "ms" | "ns"));
    let all = ["vnplug", prefix].into_iter().chain(words).chain(unit);
    all.collect::<Vec<_>>().join("_")
}

/// What is not in the table of counters: states, and what is known of the answer itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fact {
    pub(crate) name: &'static str,
    pub(crate) unit: Option<&'static str>,
    pub(crate) labels: &'static [&'static str],
    pub(crate) help: &'static str,
}

const fn fact(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Fact {
    Fact {
        name,
        unit: None,
        labels,
        help,
    }
}

pub(crate) const UP: Fact = fact("vnplug_up", &[], "1 if the daemon answered");
pub(crate) const ANSWER: Fact = Fact {
    unit: Some("seconds"),
    ..fact(
        "vnplug_answer_seconds",
        &[],
        "how long the daemon took to answer",
    )
};
pub(crate) const DAEMON_INFO: Fact = fact(
    "vnplug_daemon_info",
    &["version"],
    "1; the daemon's version",
);
pub(crate) const ACCOUNTS: Fact = fact(
    "vnplug_accounts_open",
    &[],
    "sums that do not close: frames that nobody accounts for. Always 0, or it is a bug",
);
pub(crate) const PORTS_LEFT_OUT: Fact = fact(
    "vnplug_ports_left_out",
    &[],
    "ports, and ports of switches, that have no series here because there are more than --max-ports",
);
pub(crate) const SOURCE_INFO: Fact = fact(
    "vnplug_source_info",
    &["source", "kind", "state"],
    "1; what the source is, and how it is",
);
pub(crate) const SOURCE_UP: Fact = fact(
    "vnplug_source_up",
    &["source"],
    "1 if all its queues receive, or have nothing more to receive; 0 if one is down, gone or stalled",
);
pub(crate) const PORT_INFO: Fact = fact(
    "vnplug_port_info",
    &["port", "source", "owner", "reader", "group", "cluster"],
    "1; who reads it, in the reader's own words",
);
pub(crate) const QUARANTINED: Fact = fact(
    "vnplug_port_quarantined",
    &["port", "source", "owner"],
    "1 if the port is in quarantine: its reader broke the rules of the ring",
);
pub(crate) const VM_INFO: Fact = fact("vnplug_vm_info", &["vm", "kind"], "1; what the VM is");
pub(crate) const VM_READY: Fact = fact(
    "vnplug_vm_ready",
    &["vm"],
    "1 if the agent of the VM speaks to the daemon",
);

/// All of them, in the order in which they are shown.
#[cfg(test)]
pub(crate) const FACTS: [Fact; 11] = [
    UP,
    ANSWER,
    DAEMON_INFO,
    ACCOUNTS,
    PORTS_LEFT_OUT,
    SOURCE_INFO,
    SOURCE_UP,
    PORT_INFO,
    QUARANTINED,
    VM_INFO,
    VM_READY,
];

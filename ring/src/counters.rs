//! Every counter: its name, its unit, what it counts, and the sum that it is part of.
//!
//! A daemon tells its counters as names and values ([`Counted`](crate::control::Counted)). This table says
//! what the names mean; `docs/vnplugd.md` shows it, and [`accounts`] is the only place that knows which of them add up.
//! They are taken between two batches of a thread, so each sum holds to the packet in every answer,
//! also under load.
//!
//! | thing | sum |
//! |---|---|
//! | source | `seen` = `read` + `kernel_dropped` + `early` + `in_kernel` |
//! | source | `duties` = the `offered` of its ports + `departed_offered` |
//! | source | `departed_offered` = `departed_accounted` |
//! | switch | `entered` = `unicast` + `flooded` + `consumed` + the `in_dropped_…` |
//! | switch | `due` = `out_rings` + `out_enqueued` + the `out_dropped_…` |
//! | port | `offered` = the sum of all that can become of a frame |
//! | port, source | `send_taken` = `sent` + the `send_dropped_…` |

mod account;
mod course;
mod losses;
mod rows;
mod switch;
mod table;

pub use account::{Account, accounts, label, value};
pub use course::{Course, Curve, HISTORY, Key, key};
pub use losses::{Growth, STAGES, Stage, lost};
pub use rows::{PortRow, SourceRow, VmRow, device};
pub use switch::{SWITCH, SWITCH_PORT};
pub use table::{BACKEND, DAEMON, ECHO, NIC, PORT, SENDER, SOURCE, VM};

/// What is known of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counter {
    /// Its name.
    pub name: &'static str,
    /// What it is counted in.
    pub unit: Unit,
    /// What it counts.
    pub help: &'static str,
    /// The counter of the same thing that is the sum of this one and others.
    pub part_of: Option<&'static str>,
    /// It says how it is now, and may fall; the others only grow.
    pub is_now: bool,
}

/// What a counter is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Frames.
    Frames,
    /// Bytes.
    Bytes,
    /// Times something happened.
    Times,
    /// Milliseconds.
    Milliseconds,
    /// Nanoseconds.
    Nanoseconds,
    /// Things that are there: ports, filters, rules.
    Things,
}

/// Parts of a sum that daemons did not count at first.
const NEWER: [&str; 15] = [
    "send_dropped_station",
    "send_dropped_vlan",
    "send_dropped_network",
    "send_dropped_filter",
    "send_dropped_revoked",
    "send_dropped_offload",
    "send_dropped_place",
    "in_dropped_vlan",
    "in_dropped_lock",
    "in_dropped_storm",
    "in_dropped_police",
    "in_dropped_isolated",
    "in_dropped_down",
    "out_dropped_loss",
    "out_merged",
];

/// What begins so is said by a port's reader of itself.
pub const OF_READER: &str = "reader_";

/// What is known of a counter of a kind of thing; `None` if nothing is.
#[must_use]
pub fn find(kind: &str, name: &str) -> Option<&'static Counter> {
    let tables: &[&[Counter]] = match kind {
        "source" => &[SOURCE, NIC, SENDER, ECHO, SWITCH],
        "port" => &[PORT, SENDER],
        "switch_port" => &[SWITCH_PORT],
        "daemon" => &[DAEMON],
        "vm" => &[VM],
        "backend" => &[BACKEND],
        _ => &[],
    };
    let mut all = tables.iter().flat_map(|table| table.iter());
    all.find(|counter| counter.name == name)
}

#[cfg(test)]
mod tests;

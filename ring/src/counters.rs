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

pub use account::{Account, accounts, label, value};
pub use course::{Course, Curve, HISTORY, Key, key};
pub use losses::{Growth, STAGES, Stage, lost};
pub use rows::{PortRow, SourceRow, VmRow, device};

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

const fn own(name: &'static str, unit: Unit, help: &'static str) -> Counter {
    Counter {
        name,
        unit,
        help,
        part_of: None,
        is_now: matches!(unit, Things | Milliseconds | Nanoseconds),
    }
}

const fn part(of: &'static str, name: &'static str, help: &'static str) -> Counter {
    Counter {
        name,
        unit: Unit::Frames,
        help,
        part_of: Some(of),
        is_now: false,
    }
}

const fn now(counter: Counter) -> Counter {
    Counter {
        is_now: true,
        ..counter
    }
}

use Unit::{Bytes, Frames, Milliseconds, Nanoseconds, Things, Times};

/// Counters of a source.
pub const SOURCE: &[Counter] = &[
    own(
        "seen",
        Frames,
        "frames that arrived at the source, taken or not, and those that were shown",
    ),
    own(
        "shown",
        Frames,
        "frames that a port sent and that were shown to the other ports",
    ),
    part("seen", "read", "frames that the daemon read or showed"),
    part(
        "seen",
        "kernel_dropped",
        "frames that the kernel dropped: its receive ring was full",
    ),
    part(
        "seen",
        "early",
        "frames that the kernel dropped because no port wanted them",
    ),
    part(
        "seen",
        "program",
        "frames that the operator's program of this source dropped",
    ),
    now(part(
        "seen",
        "in_kernel",
        "frames that wait in the receive ring to be read, counted in the ring itself; 0 at rest. Of \
         `af_xdp` up to 64 per queue more, which the driver has not put there yet",
    )),
    own("bytes", Bytes, "captured bytes of the frames in `read`"),
    own(
        "freezes",
        Times,
        "the kernel stopped for want of a free block",
    ),
    own(
        "rebinds",
        Times,
        "the interface went down or vanished and was bound again",
    ),
    own(
        "patience_ms",
        Milliseconds,
        "of `af_packet`: for how long the receive ring holds what comes at the present rate while the \
         daemon does not run",
    ),
    own(
        "filters_keyed",
        Things,
        "different filters that are looked up",
    ),
    own(
        "filters_scanned",
        Things,
        "different filters that are run on every frame",
    ),
    own(
        "filter_fields",
        Things,
        "fields in which frames are looked up",
    ),
    own(
        "duties",
        Frames,
        "for each frame read, the subscribers of that moment, added up, a cluster as one; and what \
         super-frames became, beyond one frame for each subscriber that has them cut",
    ),
    own(
        "departed_offered",
        Frames,
        "what ports that are gone had been offered",
    ),
    own(
        "departed_accounted",
        Frames,
        "the sum of what became of `departed_offered`; equal to it",
    ),
    own(
        "departed_delivered",
        Frames,
        "the part of `departed_accounted` that was delivered",
    ),
    own(
        "departed_dropped_full",
        Frames,
        "the part that was dropped because a ring was full",
    ),
    own(
        "departed_dropped_budget",
        Frames,
        "the part that was dropped for an owner's budget",
    ),
];

/// Counters of a port.
pub const PORT: &[Counter] = &[
    own(
        "offered",
        Frames,
        "frames that this port had to judge; a super-frame that was cut counts as what it became",
    ),
    part(
        "offered",
        "refused",
        "refused by the operator's filter; shown to operators alone",
    ),
    part(
        "offered",
        "paused",
        "passed by while the reader had paused the port",
    ),
    part(
        "offered",
        "direction",
        "not the wanted direction, or sent by the port's own program",
    ),
    part("offered", "filtered", "not wanted by the reader's filter"),
    part("offered", "ruled_out", "not wanted by the reader's rules"),
    part("offered", "sampled_out", "left out by sampling"),
    part("offered", "program", "dropped by the operator's program"),
    part(
        "offered",
        "delivered",
        "written to its ring; a member of a group may still find a packet overwritten before it read it, \
         which it alone counts",
    ),
    part("offered", "dropped_full", "dropped: its ring was full"),
    part(
        "offered",
        "dropped_budget",
        "dropped unseen: the source had more than its thread could do, and the owner's ports had had \
         their part",
    ),
    part(
        "offered",
        "dropped_quarantine",
        "dropped: the port is in quarantine",
    ),
    own(
        "cut",
        Frames,
        "what super-frames became, beyond one frame for each; they are in `offered`",
    ),
    own(
        "bytes",
        Bytes,
        "captured bytes of the frames in `delivered`",
    ),
    own(
        "rings",
        Times,
        "its reader was woken by a crossing or a delay",
    ),
    own(
        "source_kernel_dropped",
        Frames,
        "what the kernel dropped of its queues since the port was opened, wanted or not",
    ),
    own("exact_rules", Things, "rules that are found by a hash"),
    own("wildcard_rules", Things, "rules that are tried in order"),
    now(own("arena_bytes", Bytes, "size of the arenas of its group")),
    own(
        "arena_copies",
        Frames,
        "frames copied into those arenas, once for all members",
    ),
    own(
        "arena_lent",
        Frames,
        "frames that members have where they were received",
    ),
    own("filter_version", Times, "its filter was replaced"),
    now(own("ring_bytes", Bytes, "size of each of its rings")),
    own(
        "patience_ms",
        Milliseconds,
        "for operators: for how long its rings hold what was delivered since they were last asked, a \
         second ago or more, while the reader does not read; an hour at most",
    ),
];

/// Counters of the interface of a source, as its driver and the kernel tell them: what is lost there never
/// reaches the source. They begin where the kernel began, and not with the daemon.
pub const NIC: &[Counter] = &[
    own(
        "nic_rx_frames",
        Frames,
        "frames that the interface received",
    ),
    own("nic_rx_bytes", Bytes, "their bytes"),
    own(
        "nic_rx_missed",
        Frames,
        "lost: the NIC had no buffer for them (`rx_missed_errors`)",
    ),
    own(
        "nic_rx_fifo",
        Frames,
        "lost: the NIC's own memory was full (`rx_fifo_errors`); some drivers count them as missed, too",
    ),
    own(
        "nic_rx_dropped",
        Frames,
        "dropped by the kernel after the NIC, also those of protocols that nobody asked for",
    ),
    own(
        "nic_rx_errors",
        Frames,
        "damaged: checksums, lengths and all other errors of reception",
    ),
    own("nic_tx_frames", Frames, "frames that the interface sent"),
    own("nic_tx_bytes", Bytes, "their bytes"),
    own(
        "nic_tx_dropped",
        Frames,
        "frames that were to be sent and were dropped",
    ),
    own(
        "nic_tx_errors",
        Frames,
        "frames that the interface failed to send",
    ),
];

/// Counters of what sends: a port, and a source for all its ports, those that are gone included.
pub const SENDER: &[Counter] = &[
    own(
        "send_taken",
        Frames,
        "frames taken from transmit rings; a super-frame that was cut counts as what it became",
    ),
    own(
        "send_cut",
        Frames,
        "what super-frames became, beyond one frame for each",
    ),
    own("send_bytes", Bytes, "their bytes"),
    part(
        "send_taken",
        "sent",
        "handed to the kernel or driver, which may still lose them",
    ),
    part(
        "send_taken",
        "send_dropped_full",
        "dropped: the kernel's or driver's queue was full",
    ),
    part(
        "send_taken",
        "send_dropped_length",
        "dropped: the link does not carry frames of this length",
    ),
    part(
        "send_taken",
        "send_dropped_link",
        "dropped: the link was down or the interface gone",
    ),
    part(
        "send_taken",
        "send_dropped_offload",
        "dropped: what was left to be cut or summed does not fit the frame",
    ),
    part(
        "send_taken",
        "send_dropped_unsupported",
        "dropped: the source cannot send, or the daemon failed at it",
    ),
    part(
        "send_taken",
        "send_dropped_revoked",
        "dropped: they waited when an operator revoked sending; counted as the sender counts them, unread",
    ),
    part(
        "send_taken",
        "send_dropped_station",
        "dropped: another station's, by the address in the frame, in ARP or in neighbour discovery",
    ),
    part(
        "send_taken",
        "send_dropped_vlan",
        "dropped: of a VLAN in which the port may not send",
    ),
    part(
        "send_taken",
        "send_dropped_network",
        "dropped: from a network from which the port may not send, or it cannot be said from where",
    ),
    part(
        "send_taken",
        "send_dropped_filter",
        "dropped: the operator's filter for what is sent rejects them",
    ),
];

/// What the generator measures, since its first sender was attached; of several queues the slowest.
pub const ECHO: &[Counter] = &[
    own("echoes", Frames, "frames that came back from a reader"),
    own(
        "echo_min_ns",
        Nanoseconds,
        "the shortest time that one took",
    ),
    own("echo_p50_ns", Nanoseconds, "the median"),
    own("echo_p99_ns", Nanoseconds, "99 % took at most this"),
    own("echo_p999_ns", Nanoseconds, "99.9 % took at most this"),
    own("echo_max_ns", Nanoseconds, "the longest"),
];

/// Counters of a switch.
pub const SWITCH: &[Counter] = &[
    own(
        "entered",
        Frames,
        "frames that its ports, and programs of the host, sent",
    ),
    own(
        "acks_expanded",
        Frames,
        "of those that entered, ACKs that one of a guest's became: the port's setting `acks`",
    ),
    part(
        "entered",
        "unicast",
        "for the one port where the station is known to be",
    ),
    part(
        "entered",
        "flooded",
        "for all other ports: a group's address, or a station that is not known",
    ),
    part(
        "entered",
        "consumed",
        "for nobody: the station is at the port that sent the frame, or there is no other port",
    ),
    part(
        "entered",
        "in_dropped_short",
        "dropped: shorter than an Ethernet header",
    ),
    part(
        "entered",
        "in_dropped_long",
        "dropped: longer than the option `longest`",
    ),
    part(
        "entered",
        "in_dropped_offload",
        "dropped: what its sender says is left to do with it (a virtio-net header) does not fit it",
    ),
    part(
        "entered",
        "in_dropped_chain",
        "dropped: the descriptors of a guest's ring (vhost-user) that should have it make no sense",
    ),
    part(
        "entered",
        "in_dropped_source",
        "dropped: a group's address as the source",
    ),
    part(
        "entered",
        "in_dropped_vlan",
        "dropped: of no VLAN that the port is in, or for a port that is not in its VLAN",
    ),
    part(
        "entered",
        "in_dropped_lock",
        "dropped: the port is locked to other stations, or the sender is another port's for good",
    ),
    part(
        "entered",
        "in_dropped_storm",
        "dropped: for many, and more of them than the port may send in a second",
    ),
    part(
        "entered",
        "in_dropped_police",
        "dropped: more than the port may send in a second, by its setting `police`",
    ),
    part(
        "entered",
        "in_dropped_isolated",
        "dropped: from one isolated port to another",
    ),
    part(
        "entered",
        "in_dropped_down",
        "dropped: the link is down by its settings, or shut because of a loop",
    ),
    own(
        "due",
        Frames,
        "copies that were due to ports; of a super-frame that was cut, what it became",
    ),
    own(
        "out_cut",
        Frames,
        "what super-frames became, beyond one frame for each port",
    ),
    part(
        "due",
        "out_rings",
        "copies for ports with rings: what those ports were offered",
    ),
    part(
        "due",
        "out_merged",
        "copies that were merged into a super-frame, beyond one for each, delivered or not",
    ),
    own(
        "out_super_frames",
        Frames,
        "super-frames that were made of several copies: the port's setting `gro`",
    ),
    part(
        "due",
        "out_enqueued",
        "copies on their way to a port's client",
    ),
    part(
        "due",
        "out_dropped_full",
        "copies that were dropped: the client does not read as fast",
    ),
    part(
        "due",
        "out_dropped_gone",
        "copies that were dropped: the client is gone, and its port not closed yet",
    ),
    part(
        "due",
        "out_dropped_long",
        "copies that were dropped: longer than the uplink's interface can carry",
    ),
    part(
        "due",
        "out_dropped_loss",
        "copies that were lost on purpose: the port's setting `loss`",
    ),
    own(
        "unlearned",
        Times,
        "an address was not learned: the port, or the switch, has as many as it may",
    ),
    own("moves", Times, "a station moved from one port to another"),
    own(
        "moves_held",
        Times,
        "a station was heard at another port too soon to move",
    ),
    own(
        "loops",
        Times,
        "a port sent 100 frames in a second of stations that are at another port",
    ),
    own("stations", Things, "addresses that are known"),
    own(
        "switch_ports",
        Things,
        "ports that clients have, and uplinks",
    ),
    own("uplinks_up", Things, "uplinks whose interface is up"),
    own("uplink_seen", Frames, "frames that arrived at uplinks"),
    part(
        "uplink_seen",
        "uplink_entered",
        "those that entered the switch",
    ),
    part(
        "uplink_seen",
        "uplink_kernel_dropped",
        "those that the kernel dropped because the receive ring was full",
    ),
    now(part(
        "uplink_seen",
        "uplink_in_kernel",
        "those that wait in the receive ring",
    )),
    own(
        "uplink_rebinds",
        Times,
        "an uplink's interface went down or vanished and came back",
    ),
    own(
        "twin_ports",
        Things,
        "uplinks between which the kernel instance forwards",
    ),
    own(
        "twin_forwarded",
        Frames,
        "of those that entered, frames that the kernel instance forwarded",
    ),
    own(
        "twin_lost",
        Frames,
        "frames that came while no daemon was there, to stations that the kernel instance did not know",
    ),
];

/// Counters of one port of a switch.
pub const SWITCH_PORT: &[Counter] = &[
    own("in_frames", Frames, "frames that it sent"),
    own("in_bytes", Bytes, "their bytes"),
    own(
        "acks_expanded",
        Frames,
        "of those frames, ACKs that one of its own became",
    ),
    own(
        "in_dropped_short",
        Frames,
        "dropped of what it sent: shorter than an Ethernet header",
    ),
    own(
        "in_dropped_long",
        Frames,
        "dropped of what it sent: longer than the option `longest`",
    ),
    own(
        "in_dropped_offload",
        Frames,
        "dropped of what it sent: what is left to do with it does not fit it",
    ),
    own(
        "in_dropped_chain",
        Frames,
        "dropped of what it sent: descriptors (vhost-user) that make no sense",
    ),
    own(
        "in_dropped_source",
        Frames,
        "dropped of what it sent: a group's address as the source",
    ),
    own(
        "in_dropped_vlan",
        Frames,
        "dropped of what it sent: of no VLAN that it is in",
    ),
    own(
        "in_dropped_lock",
        Frames,
        "dropped of what it sent: not its station",
    ),
    own(
        "in_dropped_storm",
        Frames,
        "dropped of what it sent: one of too many for many",
    ),
    own(
        "in_dropped_police",
        Frames,
        "dropped of what it sent: more than it may send",
    ),
    own(
        "in_dropped_isolated",
        Frames,
        "dropped of what it sent: for another isolated port",
    ),
    own(
        "in_dropped_down",
        Frames,
        "dropped of what it sent: its link is down",
    ),
    own("out_frames", Frames, "frames that it was given"),
    own("out_bytes", Bytes, "their bytes"),
    own(
        "out_merged",
        Frames,
        "frames that it was given within super-frames, beyond one for each",
    ),
    own(
        "out_super_frames",
        Frames,
        "super-frames that were made for it",
    ),
    own(
        "out_dropped_full",
        Frames,
        "not given to it: it does not read as fast",
    ),
    own(
        "out_dropped_gone",
        Frames,
        "not given to it: nobody is there",
    ),
    own(
        "out_dropped_long",
        Frames,
        "not given to it: longer than its interface can carry",
    ),
    own(
        "out_dropped_loss",
        Frames,
        "lost on purpose: its setting `loss`",
    ),
];

/// Counters of the daemon.
pub const DAEMON: &[Counter] = &[
    own("ports", Things, "ports that are open"),
    own("ports_opened", Times, "a port was opened"),
    own("ports_closed", Times, "a port was closed"),
    own("native_filters", Things, "filters that run as machine code"),
    now(own(
        "native_bytes",
        Bytes,
        "bytes of the pages with machine code",
    )),
    own(
        "native_waiting",
        Things,
        "filters that wait to become machine code",
    ),
    own("native_refused", Times, "a limit left a filter interpreted"),
    own(
        "native_failed",
        Times,
        "a filter could not be translated or placed; the log says why",
    ),
];

/// Counters of a VM.
pub const VM: &[Counter] = &[
    now(own("pool_bytes", Bytes, "the pool")),
    now(own("pool_free", Bytes, "what no ring uses of it")),
    own(
        "grown_devices",
        Things,
        "devices that are plugged for its ports and for back-ends' memory",
    ),
    now(own("grown_bytes", Bytes, "bytes of them")),
    own(
        "channel_skipped_bytes",
        Bytes,
        "garbage on its control channel",
    ),
    own(
        "doorbell_vectors_heard",
        Things,
        "vectors of its doorbell device that the agent listens to",
    ),
    own("doorbell_to_guest", Times, "an interrupt was raised"),
    own(
        "doorbell_from_guest",
        Times,
        "a ring of the guest was heard",
    ),
];

/// Counters of a third party's back-end.
pub const BACKEND: &[Counter] = &[
    own("channels", Things, "channels to it"),
    own("channels_opened", Times, "a program connected to it"),
    own(
        "channels_cut",
        Times,
        "a channel ended because one side broke the rules",
    ),
    own("messages_in", Times, "a program said something to it"),
    own("messages_out", Times, "it said something to a program"),
    own("message_bytes_in", Bytes, "what programs said to it"),
    own("message_bytes_out", Bytes, "what it said to programs"),
    own("events_in", Times, "a program's event happened"),
    own("events_out", Times, "an event of its happened"),
    now(own(
        "waiting_bytes",
        Bytes,
        "what either side said and the other has not taken, 256 for each message more",
    )),
    own("regions", Things, "pieces of memory that it shares"),
    now(own("region_bytes", Bytes, "bytes of them")),
];

/// Parts of a sum that daemons did not count at first.
const NEWER: [&str; 14] = [
    "send_dropped_station",
    "send_dropped_vlan",
    "send_dropped_network",
    "send_dropped_filter",
    "send_dropped_revoked",
    "send_dropped_offload",
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

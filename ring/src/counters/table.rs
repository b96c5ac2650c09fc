//! The counters of sources, ports, the daemon, VMs and back-ends.

use super::Counter;
use super::Unit::{self, Bytes, Frames, Milliseconds, Nanoseconds, Things, Times};

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
        "send_dropped_place",
        "dropped: a posted frame that was to go on at a place that its port was not given",
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
pub(super) const fn own(name: &'static str, unit: Unit, help: &'static str) -> Counter {
    Counter {
        name,
        unit,
        help,
        part_of: None,
        is_now: matches!(unit, Things | Milliseconds | Nanoseconds),
    }
}

pub(super) const fn part(of: &'static str, name: &'static str, help: &'static str) -> Counter {
    Counter {
        name,
        unit: Unit::Frames,
        help,
        part_of: Some(of),
        is_now: false,
    }
}

pub(super) const fn now(counter: Counter) -> Counter {
    Counter {
        is_now: true,
        ..counter
    }
}

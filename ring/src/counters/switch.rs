//! The counters of switches and of their ports.

use super::Counter;
use super::Unit::{Bytes, Frames, Things, Times};
use super::table::{now, own, part};

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
    own(
        "called_again",
        Times,
        "a guest by vhost-user had not read its call (User-mode Linux), and was called again",
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
        "lanes",
        Things,
        "threads that forward between virtual machines beside the one of the switch",
    ),
    own(
        "lane_forwarded",
        Frames,
        "of those that entered, frames that these threads forwarded",
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

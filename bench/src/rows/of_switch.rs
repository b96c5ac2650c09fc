//! Rows of a switch.

use super::row;
use crate::row::Row;
use crate::switch;

/// Every row of a switch but those of guests in pairs.
pub(super) const SWITCH: &[Row] = &[
    row(
        "switch-ring-60",
        "a switch from ring to ring, 60-byte frames, against testpmd between two memif",
        |plan| switch::rings(plan, 60),
    ),
    row(
        "switch-ring-1514",
        "a switch from ring to ring, 1514-byte frames, against testpmd between two memif",
        |plan| switch::rings(plan, 1514),
    ),
    row(
        "switch-direct-60",
        "direct mode on a switch, 60-byte frames, against testpmd between two memif",
        |plan| switch::direct(plan, 60),
    ),
    row(
        "switch-direct-1514",
        "direct mode on a switch, 1514-byte frames, against testpmd between two memif",
        |plan| switch::direct(plan, 1514),
    ),
    row(
        "switch-vhost-64",
        "a switch from guest to guest by vhost-user, 64-byte frames, against testpmd, OVS and a bridge",
        |plan| switch::vhost(plan, 64),
    ),
    row(
        "switch-vhost-1514",
        "a switch from guest to guest by vhost-user, 1514-byte frames, against testpmd, OVS and a bridge",
        |plan| switch::vhost(plan, 1514),
    ),
    row(
        "switch-vde-60",
        "a switch by the sockets of VDE, 60-byte frames, against vde_switch",
        |plan| switch::against_vde_switch(plan, 60),
    ),
    row(
        "switch-vde-1514",
        "a switch by the sockets of VDE, 1514-byte frames, against vde_switch",
        |plan| switch::against_vde_switch(plan, 1514),
    ),
    row(
        "switch-plugs",
        "TCP between two TAPs of vde_plug2tap on a switch, against vde_switch",
        switch::programs,
    ),
    row(
        "switch-many",
        "one pair among 10 to 9,000 ports of a switch, and while ports come and go, against vde_switch",
        switch::many,
    ),
    row(
        "switch-curve",
        "one to seven pairs of guests by vhost-user, against TAPs on a Linux bridge and on Open vSwitch",
        switch::curve,
    ),
    row(
        "aggregate",
        "segments of a wire merged for a guest and a container, and ACKs expanded, against neither and the kernel's GRO",
        switch::aggregate,
    ),
    row(
        "aggregate-senders",
        "the same by how the sender controls congestion, one and four streams at a time, and what is sent again",
        switch::aggregate_senders,
    ),
    row(
        "aggregate-loss",
        "a stream to a container over a wire that loses segments and changes their order, with segments merged and ACKs expanded, against neither",
        switch::aggregate_loss,
    ),
    row(
        "aggregate-flood",
        "a million flows of one segment through a switch to a card with segments merged, against without",
        switch::flood,
    ),
    row(
        "acks-only",
        "ACKs alone through a switch, by rings and between cards, also where each is looked at, against frames of 60 bytes",
        switch::acks_only,
    ),
    row(
        "acks-slow-start",
        "short transfers from a sender that counts ACKs and from Linux, with segments merged and ACKs expanded, against neither",
        switch::slow_start,
    ),
    row(
        "acks-senders",
        "longer transfers, and four at once, from slirp and from Linux by how it controls congestion, and what is sent again",
        switch::acks_senders,
    ),
    row(
        "cutter",
        "super-frames cut and summed by ours, against the kernel's own segmentation",
        switch::cutter,
    ),
    row(
        "hlvi",
        "a stream of TCP from a guest whose card cuts and sums nothing, by what the wire's offers, against its own work",
        switch::hlvi,
    ),
    row(
        "hlvi-xdp",
        "the same by an AF_XDP uplink, for which the switch cuts and sums, against one by a packet socket and the guest's own work",
        switch::hlvi_xdp,
    ),
    row(
        "httpd",
        "pages of a guest for a container, a connection for each, against a bridge and vde_switch",
        switch::httpd,
    ),
    row(
        "tcp-rr",
        "requests by TCP to a guest, alone and beside a stream, with segments merged, against without",
        switch::requests,
    ),
    row(
        "tcp-rr-asleep",
        "requests by TCP to a guest that sleeps until each comes, against a Linux bridge",
        switch::asleep,
    ),
    row(
        "tcp-stage",
        "where the time of a stream of TCP goes, by stage, with and without each mechanism, against a bridge and vde_switch",
        switch::stages,
    ),
    row(
        "stage-switch",
        "instructions of the daemon for a frame from card to card by vhost-user, short, long and a super-frame, counted by callgrind",
        switch::instructions,
    ),
    row(
        "twin-containers",
        "TCP between two containers by the kernel instance of a switch, and by the daemon, against a Linux bridge",
        switch::twin_containers,
    ),
    row(
        "twin-upcalls",
        "nine pairs of containers, of which none to all are forwarded by the daemon, against a Linux bridge",
        switch::twin_upcalls,
    ),
    row(
        "twin-peers",
        "TCP between two containers by the kernel instance of a switch, against a bridge, Open vSwitch, vde_switch and testpmd",
        switch::twin_peers,
    ),
    row(
        "twin-guest",
        "TCP between two containers by the kernel instance of a switch, against that of a guest on a TAP and a bridge",
        switch::twin_guest,
    ),
    row(
        "twin-parts",
        "processor time of a packet by part, sent and received, by the kernel instance of a switch, against a guest and the host",
        switch::twin_parts,
    ),
    row(
        "twin-web",
        "nginx at rising rates of requests by httperf, by the kernel instance of a switch, against guests and loopback",
        switch::twin_web,
    ),
    row(
        "switch-mixed",
        "guests with and without super-frames, changed live, against their like and a Linux bridge",
        switch::mixed,
    ),
    row(
        "switch-loss",
        "datagrams lost by rate, bursts, number of flows and length of rings, against vde_switch",
        switch::loss,
    ),
    row(
        "switch-calls",
        "system calls of a QEMU and of the switch for a frame: sockets, module and vhost-user, against vde_switch",
        switch::qemu_calls,
    ),
];

/// Rows of guests in pairs on a switch.
macro_rules! pairs {
    ($($guests:literal),*) => {
        &[$(
            row(
                concat!("switch-pairs-", $guests),
                concat!(
                    $guests, " guests in pairs, TCP and UDP: sockets, module and vhost-user, \
                     against vde_switch"
                ),
                |plan| switch::pairs(plan, $guests),
            ),
        )*]
    };
}

/// Two to eight guests.
pub(super) const PAIRS: &[Row] = pairs!(2, 4, 6, 8);

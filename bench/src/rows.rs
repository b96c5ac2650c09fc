//! The table of rows, in the order of the report.

mod of_switch;

use self::of_switch::{PAIRS, SWITCH};
use crate::handoff::{self, Reading, Sizes};
use crate::row::{Plan, Result, Row};
use crate::{
    attached, backend, capture, context, fanout, filter, group, latency, limit, pcap, record,
    sandbox, scale, stage, supervise, switch, twin, uml, uplink,
};

/// Every row.
pub(crate) fn all() -> impl Iterator<Item = &'static Row> {
    GROUPS.iter().copied().flatten()
}

/// The row that is left out unless an interface is named.
pub(crate) const ON_INTERFACE: &str = "interface";

/// Runs the part of a row that needs a process of its own.
pub(crate) fn child(words: &[String]) -> Result<()> {
    match words.split_first() {
        Some((name, rest)) if name == "row" => supervise::child(rest),
        Some((name, rest)) if name == "handoff-producer" => handoff::producer(rest),
        Some((name, _)) if name == "latency-pong" => latency::pong(),
        Some((name, rest)) if name == backend::RELAY => backend::relay(rest),
        Some((name, rest)) if name == backend::CHILD => backend::child(rest),
        Some((name, rest)) if name == "attach" => attached::client(rest),
        Some((name, rest)) if name == "stage-reader" => stage::child(rest),
        Some((name, rest)) if name == "pcap-count" => pcap::child(rest),
        Some((name, rest)) if name == switch::CHILD => switch::child(rest),
        Some((name, rest)) if name == switch::CONTEXT_CHILD => switch::context_child(rest),
        Some((name, rest)) if name == switch::IDLE => switch::idle(rest),
        _ => Err(format!("no such child: {words:?}").into()),
    }
}

const GROUPS: &[&[Row]] = &[
    CAPTURE,
    HANDOFF,
    SWITCH,
    PAIRS,
    readers!("60", Sizes::One(60); 1, 2, 8, 64),
    readers!("1514", Sizes::One(1514); 1, 2, 8, 64),
    readers!("imix", Sizes::Imix; 1, 2, 8, 64),
    FILTERS,
    filters!(1, 10, 100, 1000, 10000),
    SCALE,
    CONTEXT,
    BACKEND,
    TWIN,
    LATENCY,
    PORTS,
    applications!(60, 1514),
    PCAP_GUESTS,
    RECORD,
    UPLINK,
    SANDBOX,
];

const fn row(
    name: &'static str,
    about: &'static str,
    run: fn(&Plan) -> Result<Vec<crate::row::Figure>>,
) -> Row {
    Row { name, about, run }
}

const CAPTURE: &[Row] = &[
    row(
        "capture-host",
        "by frame size: a reader on the host, against libpcap",
        capture::on_host,
    ),
    row(
        "capture-uml",
        "by frame size: a reader in User-mode Linux, against the guest's own NIC and the host",
        capture::one_uml,
    ),
    row(
        "capture-uml-two",
        "by frame size: two readers in one User-mode Linux, against the guest's own NIC",
        capture::two_in_uml,
    ),
    row(
        "capture-umls",
        "by frame size: readers in two User-mode Linux, against the guests' own NICs",
        capture::two_umls,
    ),
    row(
        "capture-qemu",
        "by frame size: a reader in QEMU, against virtio-net",
        capture::qemu,
    ),
    row(
        "afxdp",
        "a reader of the source af_xdp, against libpcap and the source af_packet",
        capture::af_xdp,
    ),
    row(
        "afxdp-group",
        "a group on the packet memory of af_xdp, against an arena with copies",
        capture::group,
    ),
    row(
        "afxdp-guest",
        "a reader in QEMU of the packet memory of af_xdp, against copies in a group and in a ring",
        capture::lent_to_guest,
    ),
    row(
        "early",
        "a filter that the kernel applies early, against the same in the daemon and libpcap",
        capture::early,
    ),
    row(
        ON_INTERFACE,
        "readers on the interface that IFACE names, against libpcap; traffic is the user's",
        capture::on_interface,
    ),
];

const HANDOFF: &[Row] = &[
    row(
        "handoff-60",
        "one ring between two processes, 60-byte frames, against DPDK memif and vhost-user",
        |plan| handoff::against_dpdk(plan, 60, Reading::InPlace),
    ),
    row(
        "handoff-1514",
        "one ring between two processes, 1514-byte frames, against DPDK memif and vhost-user",
        |plan| handoff::against_dpdk(plan, 1514, Reading::InPlace),
    ),
    row(
        "handoff-copied-1514",
        "as handoff-1514, our reader copies every byte out as memif's does",
        |plan| handoff::against_dpdk(plan, 1514, Reading::CopiedOut),
    ),
    row(
        "handoff-imix",
        "one ring between two processes, a mix of 60, 590 and 1514 bytes",
        handoff::imix,
    ),
    row(
        "memory",
        "by frame size: two processes in memory, against DPDK memif and vhost-user",
        handoff::by_length,
    ),
    row(
        "limit",
        "what the machine allows: a cache line between two CPUs, copies by one",
        limit::machine,
    ),
    row(
        "handoff-sizes",
        "rings of 16 KiB to 16 MiB, 60 and 1514 bytes",
        handoff::sizes,
    ),
    row(
        "uml-reader-60",
        "one binary reads 60-byte frames in User-mode Linux and on the host",
        |plan| uml::against_host(plan, 60),
    ),
    row(
        "uml-reader-1514",
        "one binary reads 1514-byte frames in User-mode Linux and on the host",
        |plan| uml::against_host(plan, 1514),
    ),
];

/// Rows of one source and several readers, with private rings and as a group.
macro_rules! readers {
    ($length:literal, $sizes:expr; $($readers:literal),*) => {
        &[$(
            row(
                concat!("fanout-", $readers, "-", $length),
                concat!(
                    "one source to ", $readers, " private ring(s), frames of ", $length,
                    ", against copying alone and DPDK"
                ),
                |plan| fanout::against_copies(plan, $sizes, $readers),
            ),
            row(
                concat!("group-", $readers, "-", $length),
                concat!(
                    "one source to a group of ", $readers, ", frames of ", $length,
                    ", against private rings"
                ),
                |plan| group::against_copies(plan, $sizes, $readers),
            ),
        )*]
    };
}
use readers;

const FILTERS: &[Row] = &[
    row(
        "filter-one",
        "one filter: machine code and interpreter, against libpcap's and the kernel's JIT",
        filter::one,
    ),
    row(
        "targets",
        "10,000 targets by address on a full wire, each with a port of its own",
        filter::targets,
    ),
    row(
        "targets-wire",
        "as targets, from a veth that a sender fills, against libpcap with one capture of everything",
        capture::targets,
    ),
];

/// Rows of ports that have a filter each.
macro_rules! filters {
    ($($filters:literal),*) => {
        &[$(
            row(
                concat!("filters-", $filters),
                concat!(
                    "filters of ", $filters,
                    " port(s), looked up, against running them one after the other"
                ),
                |plan| filter::many(plan, $filters),
            ),
        )*]
    };
}
use filters;

const SCALE: &[Row] = &[
    row(
        "scale-flows",
        "one source and one reader, by number of flows",
        scale::flows,
    ),
    row(
        "scale-queues",
        "queues and as many readers, on as many CPUs as there are",
        scale::queues,
    ),
    row(
        "stage",
        "instructions per packet by stage of the path, counted by callgrind",
        stage::by_stage,
    ),
];

const CONTEXT: &[Row] = &[
    row(
        "context-fair",
        "how equal the parts of 2 to 32 ports are that send through one wire, by bytes",
        context::fair,
    ),
    row(
        "context-tx",
        "1 to 32 ports that send through one wire, against one packet socket",
        context::transmit,
    ),
    row(
        "context-copies",
        "taking a frame out of a transmit ring, by one copy, against two",
        context::copies,
    ),
    row(
        "context-zero-copy",
        "frames checked and copied out of a transmit ring and sent, against sending them from where they lie, unchecked",
        context::zero_copy,
    ),
    row(
        "context-posted",
        "a received frame sent on by a copy in the transmit ring, against its place in the receive ring",
        context::posted,
    ),
    row(
        "context-guest",
        "frames that a guest sends and takes by the rings of a port, against its card by a TAP on a bridge, and whose time it takes",
        switch::contexts,
    ),
    row(
        "context-guests",
        "frames that 1 to 32 guests send at once by the rings of a port each, against their cards by TAPs on a bridge",
        switch::contexts_of_guests,
    ),
    row(
        "context-rx",
        "1 to 32 ports that receive from one wire by their addresses, against as many TAPs on a bridge",
        context::receive,
    ),
    row(
        "context-news",
        "one port that has packets, of 10, 1,000 and 10,000 of one reader, against epoll over as many eventfds",
        context::news,
    ),
];

const BACKEND: &[Row] = &[
    row(
        "backend-message",
        "a message to a back-end and its answer, against a relay between two sockets",
        backend::message,
    ),
    row(
        "backend-event",
        "an event until a back-end has heard it, and how many a second",
        backend::event,
    ),
    row(
        "backend-guest",
        "a message and an event to a back-end and back from guests, against a request by TCP over their card",
        backend::guest,
    ),
];

const TWIN: &[Row] = &[
    row(
        "twin-program",
        "an operator's program in the daemon, confined and not, against the kernel's instance",
        twin::programs,
    ),
    row(
        "twin-path",
        "a frame's whole way through the daemon with an operator's program, confined and not",
        twin::whole_path,
    ),
];

const LATENCY: &[Row] = &[
    row(
        "latency-host",
        "how late a process of the host is, by way of waiting, idle and loaded, against pipes",
        latency::host,
    ),
    row(
        "latency-awake",
        "the same where the daemon keeps idle CPUs from halting (wake_us = 0)",
        latency::awake,
    ),
    row(
        "latency-uml",
        "how late a reader in User-mode Linux is, by way of waiting, idle and loaded",
        latency::uml,
    ),
    row(
        "latency-qemu",
        "how late a reader in QEMU is, by way of waiting, idle and loaded",
        latency::qemu,
    ),
];

const PORTS: &[Row] = &[
    row(
        "idle",
        "the daemon's processor time while nothing happens",
        attached::idle,
    ),
    row(
        "attach-1000",
        "time to attach and detach 1,000 ports",
        attached::attach,
    ),
];

/// Rows of programs over the drop-in on the host.
macro_rules! applications {
    ($($length:literal),*) => {
        &[$(
            row(
                concat!("pcap-dispatch-", $length),
                concat!(
                    "a pcap_dispatch counter, frames of ", $length,
                    ", the drop-in against the system's libpcap"
                ),
                |plan| pcap::dispatch(plan, $length),
            ),
            row(
                concat!("pcap-tcpdump-", $length),
                concat!(
                    "tcpdump -w /dev/null, frames of ", $length,
                    ", the drop-in against the system's libpcap"
                ),
                |plan| pcap::tcpdump(plan, $length),
            ),
        )*]
    };
}
use applications;

const PCAP_GUESTS: &[Row] = &[
    row(
        "pcap-uml-60",
        "a pcap_dispatch counter in User-mode Linux, over vNPlug against the guest's NIC",
        pcap::in_uml,
    ),
    row(
        "pcap-uml-filtered",
        "what a guest with a filter pays for the packets it does not want",
        pcap::filtered,
    ),
];

const RECORD: &[Row] = &[
    row(
        "record-64",
        "64-byte frames to disk at several rates, against tcpdump, dumpcap and netsniff-ng",
        |plan| record::on_a_wire(plan, Sizes::One(64)),
    ),
    row(
        "record-512",
        "512-byte frames to disk at several rates, against tcpdump, dumpcap and netsniff-ng",
        |plan| record::on_a_wire(plan, Sizes::One(512)),
    ),
    row(
        "record-1400",
        "1400-byte frames to disk at several rates, against tcpdump, dumpcap and netsniff-ng",
        |plan| record::on_a_wire(plan, Sizes::One(1400)),
    ),
    row(
        "record-imix",
        "a mix of frames to disk at several rates, against tcpdump, dumpcap and netsniff-ng",
        |plan| record::on_a_wire(plan, Sizes::Imix),
    ),
    row(
        "record-disk",
        "from the generator in memory to the disk, against fio with O_DIRECT",
        record::against_fio,
    ),
    row(
        "record-index",
        "the write rate with an index, against the same without",
        record::with_and_without_index,
    ),
    row(
        "replay-gap",
        "how exactly recorded gaps are replayed, against tcpreplay",
        record::accuracy,
    ),
    row(
        "replay-top",
        "60-byte frames replayed at top speed, against tcpreplay",
        record::top_speed,
    ),
    row(
        "query-20g",
        "one host in one hour of a recording of 20 GB, against tcpdump -r; needs 25 GB of disk",
        record::in_20g,
    ),
];

const UPLINK: &[Row] = &[
    row(
        "uplink-puzzle",
        "a switch's uplink of 100 Mbit/s by what its kernel merges, against vde_switch and vde_pcapplug",
        uplink::puzzle,
    ),
    row(
        "uplink-speed",
        "the same without a limit, and for an interface by rings, against vde_pcapplug and a bridge",
        uplink::speed,
    ),
    row(
        "uplink-engines",
        "an uplink by mapped rings and by AF_XDP, rate, processor time and system calls, against read and write",
        uplink::engines,
    ),
];

const SANDBOX: &[Row] = &[
    row(
        "sandbox-call",
        "a call of a program that is judged, against Sandlock, strace and a supervisor that only continues",
        sandbox::calls,
    ),
    row(
        "sandbox-start",
        "what a program takes longer in a sandbox, against Sandlock, firejail and strace",
        sandbox::start,
    ),
    row(
        "sandbox-data",
        "a connection that was allowed, against none and Sandlock",
        sandbox::data,
    ),
    row(
        "sandbox-threads",
        "calls of a thousand threads at once, against Sandlock and a supervisor that only continues",
        sandbox::threads,
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_names_are_unique() {
        let names: Vec<&str> = all().map(|row| row.name).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(names[at + 1..].iter().all(|other| other != name));
        }
    }

    #[test]
    fn the_rows_of_the_documentation_can_be_selected() {
        for name in [
            "fanout-8-imix",
            "group-64-1514",
            "filters-10000",
            "pcap-tcpdump-60",
        ] {
            assert!(all().any(|row| row.name == name), "{name}");
        }
    }
}

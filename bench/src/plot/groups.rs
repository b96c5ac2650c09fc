//! Which figures stand together, as the papers group them.

mod switch;

use super::Panel::{Dots as D, Lines as L};
use super::REACHED;
use super::dots::Dots;
use super::lines::Side::{Ours, Peer};
use super::lines::{Curve, Lines};
use super::{Panel, Plot};

/// Every plot, in the order of the page.
pub(super) fn plots() -> impl Iterator<Item = &'static Plot> + Clone {
    PLOTS.iter().chain(switch::PLOTS)
}

const fn curve(label: &'static str, pattern: &'static str, side: super::lines::Side) -> Curve {
    Curve {
        label,
        pattern,
        side,
    }
}

const fn dots(title: &'static str, names: &'static [&'static str], unit: &'static str) -> Dots {
    Dots {
        title,
        names,
        without: &[],
        suffix: "",
        unit,
        log: false,
    }
}

/// Three panels of one capture row: rate, loss and idle CPU by frame size.
macro_rules! capture {
    ($title:literal, $row:literal, $ours:literal, $peer:literal $(, $host:literal)?) => {
        [
            capture!(@ concat!($title, ": captured"), "Mpps", 0.0, "", $row, $ours, $peer $(, $host)?),
            capture!(@ concat!($title, ": lost"), "% of packets", 100.0, "-loss", $row, $ours, $peer),
            capture!(@ concat!($title, ": idle CPU"), "% idle", 100.0, "-idle", $row, $ours, $peer),
        ]
    };
    (@ $title:expr, $unit:literal, $reach:literal, $suffix:literal, $row:literal, $ours:literal, $peer:literal
     $(, $host:literal)?) => {
        L(Lines {
            title: $title,
            over: "frame length, bytes",
            unit: $unit,
            log: false,
            reach: $reach,
            curves: &[
                curve($ours, concat!($row, "-{}", $suffix), Ours),
                curve($peer, concat!($row, "-{}", $suffix), Peer),
                $(curve($host, concat!($row, "-{}-host"), Peer),)?
            ],
            levels: &[],
        })
    };
}

const HOST: [Panel; 3] = capture!("Host", "capture-host", "vNPlug", "libpcap");
const UML: [Panel; 3] = capture!(
    "One reader in UML",
    "capture-uml",
    "vNPlug",
    "guest's own NIC",
    "vNPlug on the host"
);
const UML_TWO: [Panel; 3] = capture!(
    "Two readers in one UML",
    "capture-uml-two",
    "vNPlug",
    "guest's own NIC"
);
const UMLS: [Panel; 3] = capture!(
    "Two UML guests",
    "capture-umls",
    "vNPlug",
    "guests' own NICs"
);
const QEMU: [Panel; 3] = capture!("QEMU guest", "capture-qemu", "vNPlug", "virtio-net");

/// The source's cost by number of readers, for frames of one length.
macro_rules! by_readers {
    ($title:literal, $length:literal) => {
        L(Lines {
            title: $title,
            over: "readers",
            unit: "ns per packet and reader",
            log: true,
            reach: 0.0,
            curves: &[
                curve(
                    "private rings",
                    concat!("fanout-{}-", $length, "-cost"),
                    Ours,
                ),
                curve(
                    "memcpy alone",
                    concat!("fanout-{}-", $length, "-cost"),
                    Peer,
                ),
                curve("one group", concat!("group-{}-", $length, "-cost"), Ours),
            ],
            levels: &[],
        })
    };
}

/// The cost of a packet by number of filters of one shape.
macro_rules! by_filters {
    ($title:literal, $shape:literal) => {
        L(Lines {
            title: $title,
            over: "filters",
            unit: "ns per packet",
            log: true,
            reach: 0.0,
            curves: &[
                curve("vNPlug, looked up", concat!("filters-{}-", $shape), Ours),
                curve("libpcap, in sequence", concat!("filters-{}-", $shape), Peer),
                curve(
                    "kernel's JIT, in sequence",
                    concat!("filters-{}-", $shape, "-kernel"),
                    Peer,
                ),
            ],
            levels: &[(200.0, "goal: 5 Mpps")],
        })
    };
}

/// The fan-out with filters and rings, by number of ports.
const DELIVER: Lines = Lines {
    title: "Fanout with rings, one host each",
    over: "ports with filters",
    unit: "ns per packet",
    log: true,
    reach: 0.0,
    curves: &[curve(
        "lookup, copy and publish",
        "filters-{}-deliver",
        Ours,
    )],
    levels: &[(200.0, "goal: 5 Mpps")],
};

/// A quantity of the recorders by frame length, with one load.
macro_rules! recorders {
    ($title:literal, $unit:literal, $suffix:literal) => {
        L(Lines {
            title: $title,
            over: "frame length, bytes",
            unit: $unit,
            log: false,
            reach: 0.0,
            curves: &[
                curve("vNPlug", concat!("record-{}", $suffix), Ours),
                curve("tcpdump", concat!("record-{}", $suffix), Peer),
                curve("dumpcap", concat!("record-{}", $suffix, "-dumpcap"), Peer),
                curve(
                    "netsniff-ng",
                    concat!("record-{}", $suffix, "-netsniff"),
                    Peer,
                ),
            ],
            levels: &[],
        })
    };
}

/// Names that end so only compare with another peer, or say the same in another unit.
const ONCE: &[&str] = &[
    "-cost:",
    "-memif:",
    "-vhost:",
    "-kernel:",
    "-interpreter:",
    "-packet:",
    "-off:",
    "K:",
];

/// All plots, in the order of the page.
const PLOTS: &[Plot] = &[
    Plot {
        name: "capture",
        title: "Captured rate, loss and idle CPU by frame size",
        panels: &[&HOST, &UML, &UML_TWO, &UMLS, &QEMU],
    },
    Plot {
        name: "lossless",
        title: "Highest rate without loss, 64 bytes",
        panels: &[&[D(dots(
            "Sender, capture and reader share the CPUs; the sender is the limit",
            &["capture-"],
            "Mpps",
        )
        .ending("-lossless")
        .by_magnitude())]],
    },
    Plot {
        name: "memory",
        title: "Between two processes in memory, by frame size",
        panels: &[&[L(Lines {
            title: "Received, nothing lost",
            over: "frame length, bytes",
            unit: "Mpps",
            log: true,
            reach: 0.0,
            curves: &[
                curve("vNPlug ring", "memory-memif-{}", Ours),
                curve("DPDK memif", "memory-memif-{}", Peer),
                curve("DPDK vhost-user", "memory-vhost-{}", Peer),
            ],
            levels: &[],
        })]],
    },
    Plot {
        name: "handoff",
        title: "Ring hand-off between two processes",
        panels: &[
            &[D(dots(
                "One CPU each side",
                &["handoff-", "uml-reader-"],
                "Mpps",
            )
            .without(&["K"])
            .by_magnitude())],
            &[L(Lines {
                title: "By size of the ring",
                over: "record area, KiB",
                unit: "Mpps",
                log: true,
                reach: 0.0,
                curves: &[
                    curve("60 bytes", "handoff-60-{}K", Ours),
                    curve("1514 bytes", "handoff-1514-{}K", Ours),
                ],
                levels: &[],
            })],
        ],
    },
    Plot {
        name: "fanout",
        title: "One source, many readers: the source's cost per packet and reader",
        panels: &[
            &[
                by_readers!("60 bytes", "60"),
                by_readers!("1514 bytes", "1514"),
            ],
            &[by_readers!("A mix of 60, 590 and 1514 bytes", "imix")],
            &[D(dots(
                "A further reader of a group",
                &["group-"],
                "ns per packet and further port",
            )
            .ending("-further")
            .by_magnitude())],
            &[D(dots(
                "Delivered to each reader",
                &["fanout-", "group-"],
                "Mpps to each port",
            )
            .by_magnitude())],
        ],
    },
    Plot {
        name: "pcap",
        title: "Unchanged applications of libpcap",
        panels: &[
            &[D(dots(
                "Processor time, over vNPlug's drop-in and over the system's libpcap",
                &["pcap-"],
                "CPU s/Mpkt",
            )
            .by_magnitude())],
            &[D(dots(
                "A filter in the guest that wants one packet in 1,000",
                &["pcap-uml-filtered"],
                "CPU s/M on wire",
            )
            .by_magnitude())],
        ],
    },
    Plot {
        name: "ports",
        title: "Many ports: attached, detached, asleep",
        panels: &[
            &[D(dots(
                "Time for 1,000 ports; 10,000 targets",
                &["attach-", "detach-", "targets-"],
                "s",
            ))],
            &[D(dots(
                "The daemon's time while nothing happens",
                &["idle-"],
                "% of a CPU",
            ))],
        ],
    },
    Plot {
        name: "afxdp",
        title: "AF_XDP on a veth, beside libpcap and af_packet",
        panels: &[
            &[D(dots(
                "Captured, flat out",
                &["afxdp-64", "afxdp-1514", "afxdp-group-"],
                "Mpps",
            ))],
            &[D(dots(
                "Lost",
                &["afxdp-64", "afxdp-1514", "afxdp-group-"],
                "% lost",
            ))],
            &[D(dots(
                "Processor time (-daemon: our daemon alone)",
                &["afxdp-64", "afxdp-1514", "afxdp-group-"],
                "CPU s/Mpkt",
            )
            .by_magnitude())],
        ],
    },
    Plot {
        name: "afxdp-guest",
        title: "From the wire into QEMU: packet memory of AF_XDP as a device, beside copies",
        panels: &[
            &[D(dots("Read, flat out", &["afxdp-guest-"], "Mpps"))],
            &[D(dots("Lost", &["afxdp-guest-"], "% lost"))],
            &[D(dots(
                "Processor time of the daemon; with the guest's (-cpu)",
                &["afxdp-guest-"],
                "CPU s/Mpkt",
            )
            .by_magnitude())],
        ],
    },
    Plot {
        name: "early",
        title: "Early drop: a filter that wants one packet in 1,000, and one that wants half",
        panels: &[
            &[D(dots(
                "Processor time of daemon and reader",
                &["early-"],
                "CPU s/M on wire",
            )
            .by_magnitude())],
            &[D(dots(
                "What the sender reaches, in whose time the kernel filters",
                &["early-"],
                "Mpps",
            ))],
            &[D(dots(
                "Captured of what is wanted",
                &["early-"],
                "% of the wanted",
            ))],
        ],
    },
    Plot {
        name: "filters",
        title: "Many filters: cost of a packet by number of ports",
        panels: &[
            &[
                by_filters!("One host each", "host"),
                by_filters!("One network each", "net"),
            ],
            &[
                by_filters!("One UDP port each", "port"),
                by_filters!("A mix of shapes", "mixed"),
            ],
            &[
                by_filters!("One range of ports each", "range"),
                by_filters!("One host each, one in 20 of them `not`", "not"),
            ],
            &[L(DELIVER)],
            &[D(dots(
                "10,000 targets by address on a full wire, each with a port of its own",
                &["targets-"],
                "Mpps",
            ))],
            &[D(dots(
                "The same from a veth: lost",
                &["targets-wire-"],
                "% lost",
            ))],
            &[D(dots(
                "The same from a veth: processor time of daemon and reader",
                &["targets-wire-"],
                "CPU s/Mpkt",
            ))],
            &[D(dots(
                "One filter: machine code and interpreter beside libpcap; the kernel's JIT",
                &["filter-one-"],
                "ns per frame",
            )
            .by_magnitude())],
        ],
    },
    Plot {
        name: "latency",
        title: "Latency: published on the host, echoed by the reader",
        panels: &[
            &[D(
                dots("Reader on the host", &["latency-host-"], "us").by_magnitude()
            )],
            &[D(dots(
                "Reader on the host, CPUs that do not halt",
                &["latency-awake-"],
                "us",
            )
            .by_magnitude())],
            &[D(dots(
                "Reader in User-mode Linux",
                &["latency-uml-"],
                "us",
            )
            .by_magnitude())],
            &[D(
                dots("Reader in QEMU", &["latency-qemu-"], "us").by_magnitude()
            )],
        ],
    },
    Plot {
        name: "scaling",
        title: "Scaling with readers, filters, flows and CPUs",
        panels: &[
            &[
                by_readers!("Readers, 60 bytes", "60"),
                by_filters!("Filters", "host"),
            ],
            &[
                L(Lines {
                    title: "Flows: one source, one reader",
                    over: "flows",
                    unit: "ns per packet",
                    log: false,
                    reach: 0.0,
                    curves: &[curve("generator to reader", "scale-flows-{}", Ours)],
                    levels: &[],
                }),
                L(Lines {
                    title: "CPUs: all readers together",
                    over: "queues, each with a reader",
                    unit: "Mpps",
                    log: false,
                    reach: 0.0,
                    curves: &[curve("generator to readers", "scale-queues-{}", Ours)],
                    levels: &[],
                }),
            ],
        ],
    },
    Plot {
        name: "record",
        title: "Recording to disk, beside tcpdump, dumpcap and netsniff-ng",
        panels: &[
            &[
                recorders!("Lost, sent flat out", "% of packets", "-flat-loss"),
                recorders!("Lost at 400,000 packets/s", "% of packets", "-400k-loss"),
            ],
            &[
                recorders!("On the disk, sent flat out", "MB/s", "-flat-rate"),
                recorders!("Processor time, sent flat out", "CPU s/GB", "-flat-cpu"),
            ],
            &[D(dots(
                "From the generator in memory, beside fio; with and without the index",
                &["record-disk", "record-index-"],
                "MB/s",
            ))],
            &[D(dots(
                "Recorded per second of processor time",
                &["record-disk-core", "record-disk-two-core"],
                "Gb/s per core",
            ))],
        ],
    },
    Plot {
        name: "query",
        title: "Found and replayed",
        panels: &[
            &[D(dots(
                "To the first packet of a host in an hour of a recording",
                &["query-"],
                "s",
            )
            .by_magnitude())],
            &[D(dots(
                "By how much replayed gaps are off",
                &["replay-gap-"],
                "us",
            )
            .by_magnitude())],
            &[D(dots("Replayed at top speed", &["replay-top-"], "Mpps"))],
        ],
    },
    Plot {
        name: "stages",
        title: "Instructions of one packet, by stage",
        panels: &[&[D(dots(
            "From the generator to one reader, counted by callgrind",
            &["stage-"],
            "instructions/packet",
        ))]],
    },
    Plot {
        name: "limits",
        title: "How near rings are to what the machine allows",
        panels: &[
            &[D(dots(
                "Rings, of a bare transfer of the same bytes",
                &[
                    "handoff-",
                    "memory-memif-",
                    "uml-reader-",
                    "fanout-",
                    "group-",
                    "scale-",
                ],
                REACHED,
            )
            .without(ONCE))],
            &[D(dots(
                "A cache line from one CPU to the other, one way",
                &["limit-"],
                "ns",
            ))],
            &[D(dots("memcpy by one CPU", &["limit-"], "GB/s"))],
        ],
    },
    Plot {
        name: "limits-captures",
        title: "How near captures and filters are to what the machine allows",
        panels: &[
            &[D(dots(
                "Captures, of what the sender reaches while nobody listens",
                &["capture-", "afxdp-", "early-", "interface-"],
                REACHED,
            )
            .without(&["-host:", "-packet:", "-private:", "-off:"]))],
            &[D(dots(
                "Filters, of one look into a plain table or at the frame",
                &["filters-", "filter-", "targets-"],
                REACHED,
            )
            .without(ONCE)
            .by_magnitude())],
        ],
    },
    Plot {
        name: "limits-others",
        title: "How near programs, latency and many ports are to what the machine allows",
        panels: &[&[D(dots(
            "Programs, of a bare transfer; latency, of a cache line's; ports, of their memory",
            &["pcap-", "latency-", "attach-", "detach-"],
            REACHED,
        )
        .without(&["-p99:"])
        .by_magnitude())]],
    },
    Plot {
        name: "interface",
        title: "On a real interface, with the user's traffic",
        panels: &[
            &[D(dots("Captured", &["interface-"], "Mpps"))],
            &[D(dots("Lost", &["interface-"], "% lost"))],
            &[D(dots("Idle CPU", &["interface-"], "% idle"))],
        ],
    },
];

//! Which figures stand together, as the papers group them.

use super::Panel::{Dots as D, Lines as L};
use super::dots::Dots;
use super::lines::Side::{Ours, Peer};
use super::lines::{Curve, Lines};
use super::{Panel, Plot};

const fn curve(label: &'static str, pattern: &'static str, side: super::lines::Side) -> Curve {
    Curve {
        label,
        pattern,
        side,
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

/// All plots, in the order of the page.
pub(super) const PLOTS: &[Plot] = &[
    Plot {
        name: "capture",
        title: "Captured rate, loss and idle CPU by frame size",
        panels: &[&HOST, &UML, &UML_TWO, &UMLS, &QEMU],
    },
    Plot {
        name: "lossless",
        title: "Highest rate without loss, 64 bytes",
        panels: &[&[D(Dots {
            title: "Sender, capture and reader share the CPUs; ours reaches the sender's limit",
            names: &["capture-"],
            without: "",
            suffix: "-lossless",
            unit: "Mpps",
            log: true,
        })]],
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
            &[D(Dots {
                title: "One CPU each side",
                names: &["handoff-", "uml-reader-"],
                without: "K",
                suffix: "",
                unit: "Mpps",
                log: true,
            })],
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
        title: "One source, many readers",
        panels: &[
            &[
                L(Lines {
                    title: "60 bytes: source's cost per packet and reader",
                    over: "readers",
                    unit: "ns",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("private rings", "fanout-{}-60-cost", Ours),
                        curve("memcpy alone", "fanout-{}-60-cost", Peer),
                        curve("one group", "group-{}-60-cost", Ours),
                    ],
                    levels: &[],
                }),
                L(Lines {
                    title: "1514 bytes: source's cost per packet and reader",
                    over: "readers",
                    unit: "ns",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("private rings", "fanout-{}-1514-cost", Ours),
                        curve("memcpy alone", "fanout-{}-1514-cost", Peer),
                        curve("one group", "group-{}-1514-cost", Ours),
                    ],
                    levels: &[],
                }),
            ],
            &[D(Dots {
                title: "A further reader of a group",
                names: &["group-"],
                without: "",
                suffix: "-further",
                unit: "ns per packet and further port",
                log: true,
            })],
            &[D(Dots {
                title: "Delivered to each reader",
                names: &["fanout-", "group-"],
                without: "",
                suffix: "",
                unit: "Mpps to each port",
                log: true,
            })],
        ],
    },
    Plot {
        name: "pcap",
        title: "Unchanged applications of libpcap",
        panels: &[
            &[D(Dots {
                title: "Processor time, over vNPlug's drop-in and over the system's libpcap",
                names: &["pcap-"],
                without: "",
                suffix: "",
                unit: "CPU s/Mpkt",
                log: true,
            })],
            &[D(Dots {
                title: "A filter in the guest that wants one packet in 1,000",
                names: &["pcap-uml-filtered"],
                without: "",
                suffix: "",
                unit: "CPU s/M on wire",
                log: true,
            })],
        ],
    },
    Plot {
        name: "ports",
        title: "Many ports: attached, detached, asleep",
        panels: &[
            &[D(Dots {
                title: "Time for 1,000 ports; 10,000 targets",
                names: &["attach-", "detach-", "targets-"],
                without: "",
                suffix: "",
                unit: "s",
                log: false,
            })],
            &[D(Dots {
                title: "The daemon's time while nothing happens",
                names: &["idle-"],
                without: "",
                suffix: "",
                unit: "% of a CPU",
                log: false,
            })],
        ],
    },
    Plot {
        name: "afxdp",
        title: "AF_XDP on a veth, beside libpcap and af_packet",
        panels: &[
            &[D(Dots {
                title: "Captured, flat out",
                names: &["afxdp-"],
                without: "",
                suffix: "",
                unit: "Mpps",
                log: false,
            })],
            &[D(Dots {
                title: "Lost",
                names: &["afxdp-"],
                without: "",
                suffix: "",
                unit: "% lost",
                log: false,
            })],
            &[D(Dots {
                title: "Processor time (-daemon: our daemon alone)",
                names: &["afxdp-"],
                without: "",
                suffix: "",
                unit: "CPU s/Mpkt",
                log: true,
            })],
        ],
    },
    Plot {
        name: "early",
        title: "Early drop in the kernel",
        panels: &[
            &[D(Dots {
                title: "Processor time per packet on the wire",
                names: &["early-"],
                without: "",
                suffix: "",
                unit: "CPU s/Mpkt",
                log: true,
            })],
            &[D(Dots {
                title: "Nanoseconds",
                names: &["early-"],
                without: "",
                suffix: "",
                unit: "ns per packet",
                log: true,
            })],
        ],
    },
    Plot {
        name: "filters",
        title: "Many filters: cost of a packet by number of ports",
        panels: &[
            &[
                L(Lines {
                    title: "One host each",
                    over: "filters",
                    unit: "ns per packet",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("vNPlug, looked up", "filters-{}-host", Ours),
                        curve("libpcap, in sequence", "filters-{}-host", Peer),
                        curve("kernel's JIT, in sequence", "filters-{}-host-kernel", Peer),
                    ],
                    levels: &[(200.0, "goal: 5 Mpps")],
                }),
                L(Lines {
                    title: "One network each",
                    over: "filters",
                    unit: "ns per packet",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("vNPlug, looked up", "filters-{}-net", Ours),
                        curve("libpcap, in sequence", "filters-{}-net", Peer),
                        curve("kernel's JIT, in sequence", "filters-{}-net-kernel", Peer),
                    ],
                    levels: &[(200.0, "goal: 5 Mpps")],
                }),
            ],
            &[
                L(Lines {
                    title: "One UDP port each",
                    over: "filters",
                    unit: "ns per packet",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("vNPlug, looked up", "filters-{}-port", Ours),
                        curve("libpcap, in sequence", "filters-{}-port", Peer),
                        curve("kernel's JIT, in sequence", "filters-{}-port-kernel", Peer),
                    ],
                    levels: &[(200.0, "goal: 5 Mpps")],
                }),
                L(Lines {
                    title: "A mix of shapes",
                    over: "filters",
                    unit: "ns per packet",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("vNPlug, looked up", "filters-{}-mixed", Ours),
                        curve("libpcap, in sequence", "filters-{}-mixed", Peer),
                        curve("kernel's JIT, in sequence", "filters-{}-mixed-kernel", Peer),
                    ],
                    levels: &[(200.0, "goal: 5 Mpps")],
                }),
            ],
            &[
                L(Lines {
                    title: "One range of ports each",
                    over: "filters",
                    unit: "ns per packet",
                    log: true,
                    reach: 0.0,
                    curves: &[
                        curve("vNPlug, looked up", "filters-{}-range", Ours),
                        curve("libpcap, in sequence", "filters-{}-range", Peer),
                        curve("kernel's JIT, in sequence", "filters-{}-range-kernel", Peer),
                    ],
                    levels: &[(200.0, "goal: 5 Mpps")],
                }),
                L(Lines {
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
                }),
            ],
            &[D(Dots {
                title: "10,000 targets by address on a full wire, each with a port of its own",
                names: &["targets-"],
                without: "",
                suffix: "",
                unit: "Mpps",
                log: false,
            })],
            &[D(Dots {
                title: "One filter: machine code and interpreter beside libpcap; the kernel's JIT",
                names: &["filter-one-"],
                without: "",
                suffix: "",
                unit: "ns per frame",
                log: true,
            })],
        ],
    },
    Plot {
        name: "latency",
        title: "Latency: published on the host, echoed by the reader",
        panels: &[
            &[D(Dots {
                title: "Reader on the host",
                names: &["latency-host-"],
                without: "",
                suffix: "",
                unit: "us",
                log: true,
            })],
            &[D(Dots {
                title: "Reader in User-mode Linux",
                names: &["latency-uml-"],
                without: "",
                suffix: "",
                unit: "us",
                log: true,
            })],
            &[D(Dots {
                title: "Reader in QEMU",
                names: &["latency-qemu-"],
                without: "",
                suffix: "",
                unit: "us",
                log: true,
            })],
        ],
    },
    Plot {
        name: "scaling",
        title: "Scaling with flows and CPUs",
        panels: &[&[
            L(Lines {
                title: "One source, one reader",
                over: "flows",
                unit: "ns per packet",
                log: false,
                reach: 0.0,
                curves: &[curve("generator to reader", "scale-flows-{}", Ours)],
                levels: &[],
            }),
            L(Lines {
                title: "All readers together",
                over: "queues, each with a reader",
                unit: "Mpps",
                log: false,
                reach: 0.0,
                curves: &[curve("generator to readers", "scale-queues-{}", Ours)],
                levels: &[],
            }),
        ]],
    },
    Plot {
        name: "stages",
        title: "Instructions of one packet, by stage",
        panels: &[&[D(Dots {
            title: "From the generator to one reader, counted by callgrind",
            names: &["stage-"],
            without: "",
            suffix: "",
            unit: "instructions/packet",
            log: false,
        })]],
    },
    Plot {
        name: "limits",
        title: "Distance to what the machine allows",
        panels: &[
            &[D(Dots {
                title: "Hand-off beside a bare transfer of the same bytes",
                names: &["handoff-"],
                without: "",
                suffix: "-limit",
                unit: "Mpps",
                log: true,
            })],
            &[D(Dots {
                title: "A cache line from one CPU to the other, one way",
                names: &["limit-"],
                without: "",
                suffix: "",
                unit: "ns",
                log: false,
            })],
            &[D(Dots {
                title: "memcpy by one CPU",
                names: &["limit-"],
                without: "",
                suffix: "",
                unit: "GB/s",
                log: false,
            })],
        ],
    },
    Plot {
        name: "interface",
        title: "On a real interface, with the user's traffic",
        panels: &[
            &[D(Dots {
                title: "Captured",
                names: &["interface-"],
                without: "",
                suffix: "",
                unit: "Mpps",
                log: false,
            })],
            &[D(Dots {
                title: "Lost",
                names: &["interface-"],
                without: "",
                suffix: "",
                unit: "% lost",
                log: false,
            })],
            &[D(Dots {
                title: "Idle CPU",
                names: &["interface-"],
                without: "",
                suffix: "",
                unit: "% idle",
                log: false,
            })],
        ],
    },
];

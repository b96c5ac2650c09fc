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
                names: &[
                    "handoff-60",
                    "handoff-1514",
                    "handoff-copied",
                    "uml-reader-",
                ],
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
                    levels: &[(5.0, "goal of a group")],
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
                    levels: &[(5.0, "goal of a group")],
                }),
            ],
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
                title: "Time for 1,000 ports",
                names: &["attach-", "detach-"],
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
];
